//! Releases of long waits: an operator wants that the records of a pipeline that wait in the scheduler do not wait until they are due.
//!
//! A release is about the commands before an offset of the ingest topic, which is part of the ids of their jobs. So it is known of each job
//! whether it is released, also of those whose commands are read later. The others are read from the index, page by page, and become due
//! like rescheduled jobs. A new owner of the shard reads all of them again: those that have become due already are left as they are.

use std::collections::BTreeMap;
use std::sync::Arc;

use redeliver_core::{Timestamp, headers, mutant};
use redeliver_kafka::TopicId;
use redeliver_service::control::value::Release;

use crate::index::{Cursor, FlowPosition, Scan, ScanRequest};
use crate::index_messages::ScannedJob;
use crate::job::{Flow, Job, JobState, Kind, Priority};
use crate::schedules::NEVER;

/// The maximum number and size of jobs per scan. They are in memory until they are rescheduled.
const MAX_JOBS: usize = 1_000;
const MAX_BYTES: usize = 4 << 20;

/// The releases of a shard.
#[derive(Debug, Default)]
pub(super) struct ReleasedWaits {
    shard: i32,
    /// The ingest topic, once it is known.
    topic: Option<TopicId>,
    wanted: BTreeMap<Arc<str>, Arc<Release>>,
    /// The offset before which the commands of each pipeline are released.
    before: BTreeMap<Arc<str>, i64>,
    /// The pipelines whose jobs are still to be read from the index, and after which position.
    unread: BTreeMap<Arc<str>, Option<Cursor>>,
    /// The pipeline whose jobs are being read.
    scanned: Option<Arc<str>>,
    /// More of its jobs were released since the scan began, also of those that were read before.
    is_outdated: bool,
    /// How many jobs were read and are not decided yet.
    pub(super) undecided: usize,
}

impl ReleasedWaits {
    pub(super) fn of_shard(shard: i32) -> Self {
        Self {
            shard,
            ..Self::default()
        }
    }

    /// Sets the ingest topic.
    pub(super) fn set_topic(&mut self, topic: Option<TopicId>) {
        self.topic = topic;
        self.update();
    }

    /// Sets what operators want.
    pub(super) fn set_wanted(&mut self, wanted: &BTreeMap<Arc<str>, Arc<Release>>) {
        self.wanted.clone_from(wanted);
        self.update();
    }

    fn update(&mut self) {
        let ends = self
            .wanted
            .iter()
            .map(|(pipeline, release)| (pipeline.clone(), release.before(self.topic, self.shard)));
        let before = std::mem::replace(&mut self.before, ends.collect());
        for (pipeline, end) in &self.before {
            if *end > before.get(pipeline).copied().unwrap_or(0) {
                self.unread.insert(pipeline.clone(), None);
                self.is_outdated |= self.scanned.as_ref() == Some(pipeline);
            }
        }
    }

    /// Whether a job does not have to wait any longer.
    pub(super) fn contains(&self, job: &Job) -> bool {
        let is_before = |end: &i64| {
            u64::try_from(*end).is_ok_and(|end| job.id.offset() < end)
                || mutant!("shard-releases-later-waits")
        };
        job.kind == Kind::LongWait
            && job.state == JobState::Scheduled
            && job.id.shard() == self.shard
            && self.before.get(&job.app).is_some_and(is_before)
    }

    /// A job as it is after its release. `None` if it is not released, or is due in any case.
    pub(super) fn released(&self, job: &Job, now: Timestamp) -> Option<Job> {
        if !self.contains(job) {
            return None;
        }
        let release = self.wanted.get(&job.app)?;
        due_since(job, release.at.unwrap_or(now), now)
    }

    /// The next scan of the index.
    pub(super) fn request(&mut self) -> Option<ScanRequest> {
        if self.scanned.is_some() || self.undecided > 0 {
            return None;
        }
        let (pipeline, cursor) = self.unread.iter().next()?;
        let position = FlowPosition::After {
            cursor: *cursor,
            until: NEVER,
            jobs: MAX_JOBS,
        };
        let request = ScanRequest {
            until: NEVER,
            // No jobs need to be counted.
            now: Timestamp::from_millis(i64::MIN),
            after: None,
            jobs_per_flow: 0,
            positions: vec![(flow_of(pipeline), position)],
            jobs: MAX_JOBS,
            bytes: MAX_BYTES,
            rotation: 0,
        };
        self.scanned = Some(pipeline.clone());
        Some(request)
    }

    /// Takes note of the result of a scan, and returns the jobs that are released.
    pub(super) fn scanned(&mut self, scan: Scan<ScannedJob>) -> Vec<Arc<Job>> {
        let Some(pipeline) = self.scanned.take() else {
            return Vec::new();
        };
        let flow = flow_of(&pipeline);
        let found = scan.flows.into_iter().find(|found| found.flow == flow);
        let (rows, is_complete) = found.map_or((Vec::new(), true), |found| (found.rows, found.is_complete));
        // Otherwise, the jobs are read from the first one on again.
        if !std::mem::take(&mut self.is_outdated) {
            if is_complete {
                self.unread.remove(&pipeline);
            } else if let (Some(position), Some(last)) = (self.unread.get_mut(&pipeline), rows.last()) {
                *position = Some(last.cursor);
            }
        }
        let jobs = rows.into_iter().map(|row| row.job);
        jobs.filter(|job| self.contains(job)).collect()
    }
}

/// All long waits of a pipeline.
fn flow_of(pipeline: &Arc<str>) -> Flow {
    Flow {
        app: pipeline.clone(),
        topic: Arc::default(),
        priority: Priority::Normal,
    }
}

/// A job that is due, because it was released at this time. `None` if it is due in any case.
fn due_since(job: &Job, released_at: Timestamp, now: Timestamp) -> Option<Job> {
    if job.due <= now {
        return None;
    }
    // Not the time of this process: its clock may be ahead, and its reader refuses a time in the future. The clock of the server that was asked may be ahead, too.
    let due = released_at.min(now);
    let mut payload = job.payload.clone();
    headers::set_process_after(&mut payload.headers, due);
    Some(Job {
        due,
        payload,
        ..job.clone()
    })
}
