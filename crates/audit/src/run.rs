//! Reads the topics of a pipeline, which may be running.
//!
//! The audit has four steps, in this order:
//!
//! 1. Read the output and the dead letters to their ends.
//! 2. Read the committed offsets: of the workers' group in the source and the due topic, of each tier's group in the
//!    topic of the tier, and of the scheduler's group in the ingest topic.
//! 3. Read to their ends: the ingest and state topic of the scheduler, if long waits go there; then the tiers and the
//!    due topic; then the source. A record is *unread* if its offset is at or after the committed offset of its group
//!    and not in the completed set. A job is unread if its newest state has not ended.
//! 4. Read the output and the dead letters again, to their new ends.
//!
//! # Why a record that is not lost is never reported as lost
//! One transaction completes a record's offset and writes its next copy. So the copies of a record form a chain: c0 in
//! the source, then copies in tiers and the due topic, and the last one in the output or the dead letters. Assume that
//! step 3 read c0 and that no copy in the chain is unread. c0 is not unread, so it was complete in step 2. So c1 was
//! written before step 3, and step 3 reads it, because a reader waits for open transactions. c1 is not unread either,
//! so it was complete in step 2, and so on. The whole chain, including its end, was written before step 3, and step 4
//! reads the end. So a record without an unread copy and without an end is lost.
//!
//! A job of the scheduler is completed by the transaction that writes its next state and the record in the due topic.
//! Step 3, not step 2, shows whether it is complete. The record in the due topic can be newer than step 2, but step 3
//! reads the due topic after the state topic. So it reads that record, and the record is unread.
//!
//! # Why a record that is not doubled is never reported as doubled
//! A chain has one end. If step 1 read an end, all copies in its chain were complete before step 2, whose result
//! includes transactions that are committed but not applied yet. So an unread copy belongs to a second chain, and so
//! does a job that has not ended in step 3.
//!
//! Tiers are read before the source, so that the source contains the origins that they name.
//!
//! # Assumptions
//! - The topics still contain the ends of all records in the source. If the retention of the output is shorter than
//!   that of the source, old records are reported as lost.
//! - The number of partitions does not change during the audit.
//!
//! If two copies of a record wait at the same time, the audit reports the record as doubled only after one of them has
//! ended.

use std::collections::{BTreeMap, HashMap};
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::pipeline::TopicRole;
use redeliver_core::{HandlerChanges, JobId, Pipeline, Position, Record, SchedulerTopics};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::backlog::GroupPositions;
use redeliver_kafka::reader::{ReadError, TopicReader};
use redeliver_kafka::survey::Surveyor;
use redeliver_proto::long_wait;

use crate::ledger::{Ledger, Scheduled};
use crate::report::Report;

/// The options of an audit.
#[derive(Clone, Debug)]
pub struct AuditOptions {
    /// What the handler of the pipeline may change in a result.
    pub changes: HandlerChanges,
    /// The consumer group and the topics of the scheduler, if long waits go there.
    pub scheduler: Option<(String, SchedulerTopics)>,
    /// The timeout of each step.
    pub timeout: Duration,
}

impl Default for AuditOptions {
    /// Results must be unchanged, there is no scheduler, and the timeout is 10 minutes.
    fn default() -> Self {
        Self {
            changes: HandlerChanges::default(),
            scheduler: None,
            timeout: Duration::from_secs(600),
        }
    }
}

/// The audit failed, so there is no report.
#[derive(Debug, thiserror::Error)]
#[error("pipeline `{pipeline}`: cannot {step}")]
pub struct AuditError {
    /// The name of the pipeline.
    pub pipeline: String,
    /// The step that failed.
    pub step: &'static str,
    /// The cause.
    pub source: Box<ReadError>,
}

/// Audits a pipeline. Blocks the calling thread, so do not call it from an async task. Writes nothing and joins no
/// consumer group.
///
/// # Errors
/// If a topic does not exist, the broker is unavailable, or a step exceeds its timeout.
pub fn audit(
    settings: &KafkaSettings,
    pipeline: &Pipeline,
    options: &AuditOptions,
) -> Result<Report, AuditError> {
    let failed = |step| {
        let pipeline = pipeline.name.to_string();
        move |source| AuditError {
            pipeline,
            step,
            source: Box::new(source),
        }
    };
    let mut ledger = Ledger::new(pipeline, options.changes);
    let roles = roles(settings, pipeline).map_err(failed("list the retry topics"))?;
    let topics = |wanted: fn(&TopicRole) -> bool| -> Vec<Arc<str>> {
        roles
            .iter()
            .filter(|(_, role)| wanted(role))
            .map(|(topic, _)| topic.clone())
            .collect()
    };

    let ends = topics(|role| matches!(role, TopicRole::Output | TopicRole::DeadLetter));
    let mut ends = Sweep::new(settings, &ends).map_err(failed("open the output and the dead letters"))?;
    let end = |ledger: &mut Ledger, record: &Record| match roles.get(&record.position.topic) {
        Some(TopicRole::Output) => ledger.output(record),
        _ => ledger.dead(record),
    };
    ends.read(options.timeout, |record| end(&mut ledger, record))
        .map_err(failed("read the output and the dead letters"))?;

    let positions =
        positions(settings, pipeline, &roles, options).map_err(failed("read the committed offsets"))?;
    ledger.positions_known();

    if let Some((_, scheduler)) = &options.scheduler {
        read_scheduler(
            settings,
            pipeline,
            scheduler,
            options.timeout,
            &positions,
            &mut ledger,
        )
        .map_err(failed("read the waiting records in the scheduler"))?;
    }

    let waiting = topics(|role| matches!(role, TopicRole::Tier(_) | TopicRole::Due));
    let waited = Sweep::new(settings, &waiting).and_then(|mut sweep| {
        sweep.read(options.timeout, |record| {
            let unread = positions.is_unread(&record.position);
            match roles.get(&record.position.topic) {
                Some(TopicRole::Tier(_)) => ledger.tier(record, unread),
                _ => ledger.due(record, unread),
            }
        })
    });
    waited.map_err(failed("read the tiers and the due topic"))?;

    let came_in =
        Sweep::new(settings, &topics(|role| matches!(role, TopicRole::Source))).and_then(|mut sweep| {
            sweep.read(options.timeout, |record| {
                let unread = positions.is_unread(&record.position);
                // A retired pipeline never processes the unread records of its source.
                if !(pipeline.retired && unread) {
                    ledger.source(record, unread);
                }
            })
        });
    came_in.map_err(failed("read the source"))?;

    ends.read(options.timeout, |record| end(&mut ledger, record))
        .map_err(failed("read the output and the dead letters again"))?;
    Ok(ledger.report())
}

/// The topics of a pipeline with their roles.
fn roles(settings: &KafkaSettings, pipeline: &Pipeline) -> Result<HashMap<Arc<str>, TopicRole>, ReadError> {
    let of_pipelines = Surveyor::new(settings)?.roles(slice::from_ref(pipeline))?;
    Ok(of_pipelines.into_iter().flatten().collect())
}

/// The committed offsets of the groups of a pipeline.
fn positions(
    settings: &KafkaSettings,
    pipeline: &Pipeline,
    roles: &HashMap<Arc<str>, TopicRole>,
    options: &AuditOptions,
) -> Result<GroupPositions, ReadError> {
    let of_pipeline = roles.iter().filter_map(|(topic, role)| {
        let group = pipeline.reading_group(*role, &settings.id_prefix)?;
        Some((group, topic.clone()))
    });
    let of_scheduler = options.scheduler.iter();
    let of_scheduler = of_scheduler.map(|(group, topics)| (group.clone(), topics.ingest.clone()));
    let topics: Vec<(String, Arc<str>)> = of_pipeline.chain(of_scheduler).collect();
    GroupPositions::read(settings, &topics)
}

/// Reads the commands and jobs of the scheduler.
fn read_scheduler(
    settings: &KafkaSettings,
    pipeline: &Pipeline,
    scheduler: &SchedulerTopics,
    timeout: Duration,
    positions: &GroupPositions,
    ledger: &mut Ledger,
) -> Result<(), ReadError> {
    let mut commands = Sweep::new(settings, std::slice::from_ref(&scheduler.ingest))?;
    commands.read(timeout, |command| {
        if let Some(record) = long_wait::unwrap(&pipeline.name, command) {
            ledger.scheduled(&record, positions.is_unread(&command.position));
        }
    })?;
    let mut waiting: HashMap<JobId, Scheduled> = HashMap::new();
    let mut jobs = Sweep::new(settings, std::slice::from_ref(&scheduler.state))?;
    jobs.read(timeout, |job| {
        let key = job.key.as_deref().and_then(|key| std::str::from_utf8(key).ok());
        let Some(id) = key.and_then(|key| key.parse().ok()) else {
            return;
        };
        let record = long_wait::unwrap_state(&pipeline.name, job);
        match record.and_then(|record| ledger.scheduled(&record, false)) {
            Some(scheduled) => drop(waiting.insert(id, scheduled)),
            None => drop(waiting.remove(&id)),
        }
    })?;
    for scheduled in waiting.into_values() {
        ledger.still_scheduled(scheduled);
    }
    Ok(())
}

/// Reads topics to their ends, again and again if needed, and visits each record once.
struct Sweep {
    reader: TopicReader,
    next: BTreeMap<(Arc<str>, i32), i64>,
}

impl Sweep {
    fn new(settings: &KafkaSettings, topics: &[Arc<str>]) -> Result<Self, ReadError> {
        Ok(Self {
            reader: TopicReader::new(settings, topics)?,
            next: BTreeMap::new(),
        })
    }

    fn read(&mut self, timeout: Duration, mut visit: impl FnMut(&Record)) -> Result<(), ReadError> {
        let next = &mut self.next;
        self.reader.read_to_end(timeout, |record| {
            let Position {
                topic,
                partition,
                offset,
            } = &record.position;
            // The reader can read past the requested end and return those records again the next time. They must not be
            // counted twice.
            let next = next.entry((topic.clone(), *partition)).or_insert(0);
            if *offset >= *next {
                *next = *offset + 1;
                visit(&record);
            }
        })
    }
}
