//! Counts the records of a job that have come back.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use redeliver_core::redrive::REDRIVE_ID;
use redeliver_core::{Clock, Timestamp};
use redeliver_kafka::reader::ReadError;
use redeliver_proto::v1;

use super::job::{Job, Kind, Progress};
use super::jobs::JobEntry;
use super::record::Destinations;
use crate::completeness::MAX_AGE;
use crate::filter::{Expr, Restriction, TextTest};
use crate::index::{self, Pool};
use crate::shared::SharedState;
use crate::waiting::scans::Scans;

/// The interval between two counts of what has come back.
const COUNTED: Duration = Duration::from_secs(2);
/// How long looking for records that still wait may take.
const SCAN_TIMEOUT: Duration = Duration::from_secs(20);

/// Why it is not known how many have come back.
#[derive(Debug, thiserror::Error)]
pub(super) enum StepError {
    #[error("reading Kafka")]
    Kafka(#[from] ReadError),
    #[error("reading the index")]
    Index(#[from] index::ReadError),
    #[error("the index lacks what may have come back{}", in_topic(.0.as_deref()))]
    Incomplete(Option<Arc<str>>),
    #[error("{0} redriven records still wait for an attempt, so it is unknown whether they come back")]
    Waiting(u64),
}

fn in_topic(topic: Option<&str>) -> String {
    topic.map(|topic| format!(" to `{topic}`")).unwrap_or_default()
}

/// Counts in the index.
pub(crate) struct Returns {
    pool: Pool,
    pub(super) shared: Arc<SharedState>,
    pub(super) destinations: Arc<Destinations>,
    scans: Scans,
    /// The last count: of which job, and when.
    counted: Option<(String, u32, Instant)>,
    /// When none of the first records of a job was waiting any more, by id; and how many records these are.
    settled: HashMap<String, (u32, Timestamp)>,
}

impl Returns {
    pub(crate) fn new(
        pool: Pool,
        shared: Arc<SharedState>,
        destinations: Arc<Destinations>,
        scans: Scans,
    ) -> Self {
        Self {
            pool,
            shared,
            destinations,
            scans,
            counted: None,
            settled: HashMap::new(),
        }
    }

    /// Another process may have executed the jobs meanwhile.
    pub(super) fn forget(&mut self) {
        self.settled.clear();
    }

    /// An observation of this job has ended.
    pub(super) fn observed(&mut self, id: &str) {
        self.counted = None;
        self.settled.remove(id);
    }

    /// How many records of a job have come back; `None` if that is of no interest now.
    pub(super) fn returned(
        &mut self,
        job: &Job,
        before: &Progress,
        now: Timestamp,
    ) -> Result<Option<u32>, StepError> {
        if job.kind != Kind::Redrive || before.done == 0 {
            return Ok(None);
        }
        let id = &job.spec().id;
        if let Some((of, count, at)) = &self.counted
            && of == id
            && at.elapsed() < COUNTED
        {
            return Ok(Some(*count));
        }
        let max_age = i64::try_from(MAX_AGE.as_millis()).unwrap_or(i64::MAX);
        let recent = Timestamp::from_millis(now.as_millis().saturating_sub(max_age));
        let count = match self.count(job, recent, now) {
            // It cannot be auto-paused.
            Err(StepError::Incomplete(_)) if !job.has_auto_pause() => return Ok(None),
            count => count?,
        };
        self.counted = Some((id.clone(), count, Instant::now()));
        Ok(Some(count))
    }

    /// When none of the records of a job was waiting any more, this many of which were redriven.
    pub(super) fn settled_at(
        &mut self,
        job: &Job,
        entry: &JobEntry,
        done: u32,
        clock: &dyn Clock,
    ) -> Result<Timestamp, StepError> {
        let id = &job.spec().id;
        if let Some((of, at)) = self.settled.get(id)
            && *of == done
        {
            return Ok(*at);
        }
        let waiting = self.scans.redriven(job, &entry.written(), SCAN_TIMEOUT)?;
        if waiting > 0 {
            return Err(StepError::Waiting(waiting));
        }
        // A record that was found nowhere may have died during the scan.
        let at = clock.now();
        self.settled.insert(id.clone(), (done, at));
        Ok(at)
    }

    /// How many records of a job have come back, at least those that had at a time.
    pub(super) fn count(&self, job: &Job, at: Timestamp, now: Timestamp) -> Result<u32, StepError> {
        let id = &job.spec().id;
        let topics = returning_to(job.spec(), &self.destinations);
        let completeness = self.shared.completeness();
        let count = self
            .pool
            .read_blocking(|connection| count_returned(connection, id, &topics, now))?;
        let completeness = completeness.and(&self.shared.completeness());
        completeness.check(&topics, at).map_err(StepError::Incomplete)?;
        Ok(count)
    }
}

/// The topics in which the records of a job come back: those from which it takes dead letters, and those of the pipelines to which it writes. In others, a
/// later pipeline has given up on a result.
pub(crate) fn returning_to(job: &v1::Redrive, destinations: &Destinations) -> BTreeSet<String> {
    let topics = |counts: &'_ [v1::RedriveCount]| -> Vec<String> {
        counts.iter().map(|count| count.topic.clone()).collect()
    };
    let written = topics(&job.destinations);
    let written: Vec<&str> = written.iter().map(String::as_str).collect();
    let of_pipelines = destinations.dead_letter_topics(&written).map(ToString::to_string);
    topics(&job.sources).into_iter().chain(of_pipelines).collect()
}

/// How many dead letters a job has redriven that came back to one of these topics.
pub(crate) fn count_returned(
    connection: &rusqlite::Connection,
    id: &str,
    topics: &BTreeSet<String>,
    now: Timestamp,
) -> rusqlite::Result<u32> {
    let filter = Expr::Is(Restriction::Header(
        REDRIVE_ID.to_owned(),
        TextTest::Equal(id.to_owned()),
    ));
    let counts = index::count_by_topic(connection, &filter, [now; 3])?;
    let counts = counts.iter().filter(|(topic, _)| topics.contains(*topic));
    let count: u64 = counts.map(|(_, counts)| counts.total).sum();
    Ok(u32::try_from(count).unwrap_or(u32::MAX))
}
