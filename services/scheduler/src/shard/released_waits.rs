//! Releases of long waits: an operator wants that the records of a pipeline that wait in the scheduler do not wait until they are due.
//!
//! A release is about the commands before an offset of the ingest topic, which is part of the ids of their jobs. So it is known of each job
//! whether it is released, also of those whose commands are read later. The others are read from the index, page by page, and become due
//! like rescheduled jobs.
//!
//! Once all commands before the offset are decided, and all jobs in the index were read and what follows is committed, no job that the release is about can
//! wait any longer, whatever happens: the release is finished. The index remembers that, so that the next owner of the shard need not read all long waits
//! again. It forgets it when it is rebuilt. Until then, a new owner reads all of them again, and leaves those that have become due as they are.

use std::collections::BTreeMap;
use std::sync::Arc;

use redeliver_core::{Timestamp, headers, mutant};
use redeliver_kafka::TopicId;
use redeliver_service::control::value::Release;

use super::{ReadyItem, Shard, Writes};
use crate::index::{Cursor, FinishedRelease, FlowPosition, Scan, ScanRequest};
use crate::index_messages::{IndexRequest, ScannedJob};
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
    /// The pipelines whose releases are not known to be finished.
    unfinished: BTreeMap<Arc<str>, Stage>,
    /// The pipeline about which the index is asked.
    asked: Option<Arc<str>>,
    /// The jobs that are queued for a decision, and their size.
    undecided: usize,
    bytes: usize,
}

/// How far the release of a pipeline is.
#[derive(Debug, PartialEq, Eq)]
enum Stage {
    /// A previous owner of the shard may have finished it.
    Unknown,
    /// The jobs are to be read from the index, from the first one or from this position on.
    Reading(Option<Cursor>),
    /// All were read.
    Read,
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
                // More of the records that are being read is released now, even of those that were read
                // before.
                self.unfinished.insert(pipeline.clone(), Stage::Unknown);
            }
        }
    }

    /// Whether a job does not have to wait any longer.
    pub(super) fn contains(&self, job: &Job) -> bool {
        let offset = i64::try_from(job.id.offset()).unwrap_or(i64::MAX);
        job.kind == Kind::LongWait
            && job.state == JobState::Scheduled
            && job.id.shard() == self.shard
            && self.includes(&job.app, offset)
    }

    /// Whether what the command at this offset creates for a pipeline does not have to wait.
    pub(super) fn includes(&self, pipeline: &str, offset: i64) -> bool {
        self.before.get(pipeline).is_some_and(|end| offset < *end)
    }

    /// A job as it is after its release. `None` if it is not released, or is due in any case.
    pub(super) fn released(&self, job: &Job, now: Timestamp) -> Option<Job> {
        if !self.contains(job) {
            return None;
        }
        let release = self.wanted.get(&job.app)?;
        due_since(job, release.at.unwrap_or(now), now)
    }

    /// The release of a pipeline up to its current end, as it is remembered once it is finished.
    fn whole(&self, pipeline: &str) -> Option<FinishedRelease> {
        Some(FinishedRelease {
            topic: self.topic?,
            before: *self.before.get(pipeline)?,
        })
    }

    /// The next request to the index. `is_decided`: whether everything that follows from the commands before an offset is committed.
    pub(super) fn request(&mut self, is_decided: impl Fn(i64) -> bool) -> Option<IndexRequest> {
        if self.asked.is_some() || self.undecided > 0 {
            return None;
        }
        let request = |(pipeline, stage): (&Arc<str>, &Stage)| {
            let request = match stage {
                Stage::Unknown => IndexRequest::FinishedRelease(pipeline.clone()),
                Stage::Reading(cursor) => IndexRequest::ScanWaits(scan(pipeline, *cursor)),
                Stage::Read => {
                    let whole = self.whole(pipeline)?;
                    is_decided(whole.before).then(|| IndexRequest::FinishRelease(pipeline.clone(), whole))?
                }
            };
            Some((pipeline.clone(), request))
        };
        let (pipeline, request) = self.unfinished.iter().find_map(request)?;
        self.asked = Some(pipeline);
        Some(request)
    }

    /// Takes note of what the index remembers of the pipeline about which it was asked.
    pub(super) fn looked_up(&mut self, finished: Option<FinishedRelease>) {
        let Some(pipeline) = self.asked.take() else {
            return;
        };
        let whole = self.whole(&pipeline);
        if finished
            .zip(whole)
            .is_some_and(|(finished, whole)| finished.includes(&whole))
        {
            self.unfinished.remove(&pipeline);
        } else {
            self.advance(&pipeline, &Stage::Unknown, Stage::Reading(None));
        }
    }

    /// Takes note of the result of a scan, and returns the jobs that are released.
    pub(super) fn scanned(&mut self, scan: Scan<ScannedJob>) -> Vec<Arc<Job>> {
        let Some(pipeline) = self.asked.take() else {
            return Vec::new();
        };
        let flow = flow_of(&pipeline);
        let found = scan.flows.into_iter().find(|found| found.flow == flow);
        let (rows, is_complete) = found.map_or((Vec::new(), true), |found| (found.rows, found.is_complete));
        if let Some(stage @ Stage::Reading(_)) = self.unfinished.get_mut(&pipeline) {
            if is_complete {
                *stage = Stage::Read;
            } else if let Some(last) = rows.last() {
                *stage = Stage::Reading(Some(last.cursor));
            }
        }
        let jobs = rows.into_iter().map(|row| row.job);
        jobs.filter(|job| self.contains(job)).collect()
    }

    /// The index remembers that the release of the pipeline about which it was asked is finished.
    pub(super) fn finished(&mut self) {
        // A release that has grown meanwhile is not.
        if let Some(pipeline) = self.asked.take()
            && self.unfinished.get(&pipeline) == Some(&Stage::Read)
        {
            self.unfinished.remove(&pipeline);
        }
    }

    fn advance(&mut self, pipeline: &str, from: &Stage, to: Stage) {
        if let Some(stage) = self.unfinished.get_mut(pipeline)
            && stage == from
        {
            *stage = to;
        }
    }

    /// Takes note of a released job that is queued for a decision.
    pub(super) fn queued(&mut self, job: &Job) {
        self.undecided += 1;
        self.bytes += job.size();
    }

    /// Takes note of the decision about a job that was queued.
    pub(super) fn decided(&mut self, job: &Job) {
        self.undecided -= 1;
        self.bytes -= job.size();
    }

    /// The size of the jobs that are queued for a decision.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Shard {
    /// Releases long waits that the index may not contain yet. The others are read from it.
    pub(super) fn release_unindexed_waits(&mut self) {
        let unindexed = self.overlay.scheduled();
        let released = unindexed.filter(|job| self.released_waits.contains(job));
        let released: Vec<_> = released.cloned().collect();
        self.queue_released_waits(released);
        self.retry_held_waits();
    }

    pub(super) fn queue_released_waits(&mut self, jobs: Vec<Arc<Job>>) {
        for job in jobs {
            self.released_waits.queued(&job);
            self.ready.push_back(ReadyItem::ReleasedWait(job));
        }
    }

    /// Makes a long wait due that an operator has released. `found` is its state in the index.
    pub(super) fn release_wait(&mut self, found: &Arc<Job>, now: Timestamp, writes: &mut Writes) {
        let newest = self.newest_job(found.id, Some(found));
        let Some(job) = newest.and_then(|job| self.released_waits.released(&job, now)) else {
            return;
        };
        writes.tally.released_early += 1;
        let revision = job.revision + 1;
        self.save(Arc::new(Job { revision, ..job }), now, writes);
    }

    /// The next request about released long waits.
    pub(super) fn request_released_waits(&mut self) -> Option<IndexRequest> {
        if self.is_index_behind(1) {
            return None;
        }
        // The state topic does not contain what a turn has decided that is not committed.
        let is_committed = self.changes.is_empty();
        let commands = || {
            let ready = self.ready.iter().filter_map(ReadyItem::command);
            let undecided = self.needs_lookup.iter().chain(&self.looking_up).chain(ready);
            undecided.chain(self.held_waits.commands())
        };
        let is_decided = |end: i64| {
            is_committed
                && (self.read_to >= end || mutant!("shard-finishes-releases-before-their-commands"))
                && commands().all(|command| command.record.position.offset >= end)
        };
        self.released_waits.request(is_decided)
    }
}

/// A scan of the long waits of a pipeline after a position.
fn scan(pipeline: &Arc<str>, cursor: Option<Cursor>) -> ScanRequest {
    let position = FlowPosition::After {
        cursor,
        until: NEVER,
        jobs: MAX_JOBS,
    };
    ScanRequest {
        until: NEVER,
        // No jobs need to be counted.
        now: Timestamp::from_millis(i64::MIN),
        after: None,
        jobs_per_flow: 0,
        positions: vec![(flow_of(pipeline), position)],
        jobs: MAX_JOBS,
        bytes: MAX_BYTES,
        rotation: 0,
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
pub(super) fn due_since(job: &Job, released_at: Timestamp, now: Timestamp) -> Option<Job> {
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
        released: Some(now),
        ..job.clone()
    })
}
