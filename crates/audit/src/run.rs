//! One pass over the topics of a pipeline, from outside, while it may be running.
//!
//! The pass has four steps, in this order:
//!
//! 1. read the output and the dead letters to their ends;
//! 2. ask for the committed positions: of the worker's group in the source and due topics, of each tier's
//!    group in the tier's topic, of the scheduler's group in its ingest topic;
//! 3. read to their ends, where the pipeline's long waits go through the scheduler, its ingest and state
//!    topics; then the tiers and the due topic; then the source. A record is *unread* when it is at or
//!    beyond its group's committed offset and not among the offsets that are completed beyond it; a job of
//!    the state topic is unread when its newest record says that it has not ended;
//! 4. read the output and the dead letters again, to their new ends.
//!
//! # Why nothing is called lost that is not
//! A record moves by one transaction, which completes its offset and writes its next copy. So its copies are
//! a chain: c0 in the source, then some in tiers and the due topic, at last one in the output or the dead
//! letters. Say that c0 was seen in step 3 and none of the chain is seen unread. c0 is not unread, so it was
//! done in step 2, so c1 was written before step 3, and a reader that goes to the ends sees it there, since
//! it waits for transactions that are open. c1 is not unread either, so it was done in step 2, and so on: the
//! whole chain was written before step 3, its end included, and step 4 sees the end. Whoever is not unread
//! and has no end is lost.
//!
//! A job of the scheduler is a copy that is done at the transaction which writes both its next state and the
//! record in the due topic, and whether it is done is known from step 3 instead of step 2. That record may
//! then be newer than step 2, but not newer than the reading of the due topic, which comes after that of the
//! state topic: so it is seen there, and is unread.
//!
//! # Why nothing is called doubled that is not
//! A chain has one end. And an end that step 1 saw had all its chain done before step 2, whose answers include
//! transactions that are committed but not yet applied; a copy unread by them is a second chain. So is a job
//! that has not ended when it is looked at later.
//!
//! # What it relies on
//! Tiers are read before the source, so that an origin they name must be found there. The topics still keep
//! the ends of all records that the source keeps: an output with a shorter retention than the source makes
//! old records look lost. The number of partitions does not change during the pass. Two copies that wait at
//! once are not told from one on its way; they are found when one of them has ended.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use redeliver_core::pipeline::{TopicRole, parse_retry_topic, retry_tier_group};
use redeliver_core::{JobId, Pipeline, Position, Record, SchedulerTopics};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::reader::{ReadError, TopicReader, group_positions};
use redeliver_kafka::survey::Surveyor;
use redeliver_kafka::tracker::Committed;
use redeliver_proto::long_wait;

use crate::ledger::{Ledger, OutputCheck, Scheduled};
use crate::report::Report;

/// How to audit.
#[derive(Clone, Debug)]
pub struct AuditOptions {
    /// What must be equal between a source record and its result.
    pub output: OutputCheck,
    /// The consumer group and the topics of the scheduler, for pipelines whose long waits go through it.
    pub scheduler: Option<(String, SchedulerTopics)>,
    /// How long each of the steps may take.
    pub timeout: Duration,
}

impl Default for AuditOptions {
    /// Results are unchanged; no scheduler; ten minutes.
    fn default() -> Self {
        Self {
            output: OutputCheck::default(),
            scheduler: None,
            timeout: Duration::from_secs(600),
        }
    }
}

/// The audit could not be made; nothing is known then.
#[derive(Debug, thiserror::Error)]
#[error("{step} of pipeline `{pipeline}`")]
pub struct AuditError {
    /// The pipeline.
    pub pipeline: String,
    /// What was tried.
    pub step: &'static str,
    /// Why it failed.
    pub source: Box<ReadError>,
}

/// Audits a pipeline, in the order that the module explains. Blocks the calling thread, which must not serve
/// asynchronous tasks. Writes nothing and joins no group.
///
/// # Errors
/// When a topic is missing, the broker does not answer, or an end is not reached in time.
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
    let mut ledger = Ledger::new(pipeline, options.output);
    let roles = roles(settings, pipeline).map_err(failed("looking for retry topics"))?;
    let topics = |wanted: fn(&TopicRole) -> bool| -> Vec<Arc<str>> {
        roles
            .iter()
            .filter(|(_, role)| wanted(role))
            .map(|(topic, _)| topic.clone())
            .collect()
    };

    let ends = topics(|role| matches!(role, TopicRole::Output | TopicRole::DeadLetter));
    let mut ends = Sweep::new(settings, &ends).map_err(failed("opening the output and the dead letters"))?;
    let end = |ledger: &mut Ledger, record: &Record| match roles.get(&record.position.topic) {
        Some(TopicRole::Output) => ledger.output(record),
        _ => ledger.dead(record),
    };
    ends.read(options.timeout, |record| end(&mut ledger, record))
        .map_err(failed("reading the output and the dead letters"))?;

    let positions =
        Positions::ask(settings, pipeline, &roles, options).map_err(failed("asking for the positions"))?;
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
        .map_err(failed("reading what waits with the scheduler"))?;
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
    waited.map_err(failed("reading the tiers and the due topic"))?;

    let came_in =
        Sweep::new(settings, &topics(|role| matches!(role, TopicRole::Source))).and_then(|mut sweep| {
            sweep.read(options.timeout, |record| {
                let unread = positions.is_unread(&record.position);
                // What a retired pipeline has not begun it never will.
                if !(pipeline.retired && unread) {
                    ledger.source(record, unread);
                }
            })
        });
    came_in.map_err(failed("reading the source"))?;

    ends.read(options.timeout, |record| end(&mut ledger, record))
        .map_err(failed("reading the output and the dead letters again"))?;
    Ok(ledger.report())
}

/// The topics of a pipeline with their roles: those that it has now, and those that it had before its settings were
/// changed, in which records may wait.
fn roles(settings: &KafkaSettings, pipeline: &Pipeline) -> Result<HashMap<Arc<str>, TopicRole>, ReadError> {
    let of_pipeline = |name: &str| match parse_retry_topic(name)? {
        (named, tier) if *named == *pipeline.name => Some(tier.map_or(TopicRole::Due, TopicRole::Tier)),
        _ => None,
    };
    let existing = Surveyor::new(settings)?.topics(|name| of_pipeline(name).is_some())?;
    let left = existing
        .into_iter()
        .filter_map(|topic| Some((topic.name.clone(), of_pipeline(&topic.name)?)));
    let source = [(pipeline.source.clone(), TopicRole::Source)];
    Ok(left.chain(source).chain(pipeline.topics()).collect())
}

/// Reads commands and jobs to their ends.
fn read_scheduler(
    settings: &KafkaSettings,
    pipeline: &Pipeline,
    scheduler: &SchedulerTopics,
    timeout: Duration,
    positions: &Positions,
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

/// Reads topics to their ends, each record once, however often it is told to read on.
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
            // A reader that went beyond the end it had asked for may give records of there a second time. They
            // must not look doubled.
            let next = next.entry((topic.clone(), *partition)).or_insert(0);
            if *offset >= *next {
                *next = *offset + 1;
                visit(&record);
            }
        })
    }
}

/// Asks until there is an answer: while a transaction is committed but not yet applied the broker gives none.
fn positions_of(
    settings: &KafkaSettings,
    group: &str,
    topics: &[Arc<str>],
    deadline: Instant,
) -> Result<BTreeMap<(String, i32), Option<Committed>>, ReadError> {
    loop {
        match group_positions(settings, group, topics) {
            Err(ReadError::Kafka { .. }) if Instant::now() < deadline => {
                thread::park_timeout(Duration::from_millis(50));
            }
            result => return result,
        }
    }
}

/// How long the broker may give no positions. Transactions are applied in milliseconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// Where the groups of a pipeline stand.
struct Positions(HashMap<Arc<str>, HashMap<i32, Committed>>);

impl Positions {
    fn ask(
        settings: &KafkaSettings,
        pipeline: &Pipeline,
        roles: &HashMap<Arc<str>, TopicRole>,
        options: &AuditOptions,
    ) -> Result<Self, ReadError> {
        let mut topics_of: BTreeMap<String, Vec<Arc<str>>> = BTreeMap::new();
        for (topic, role) in roles {
            let group = match role {
                TopicRole::Source | TopicRole::Due => pipeline.worker_group(),
                TopicRole::Tier(tier) => retry_tier_group(*tier),
                TopicRole::Output | TopicRole::DeadLetter => continue,
            };
            topics_of.entry(group).or_default().push(topic.clone());
        }
        if let Some((group, scheduler)) = &options.scheduler {
            let topics = topics_of.entry(group.clone()).or_default();
            topics.push(scheduler.ingest.clone());
        }
        let mut positions: HashMap<Arc<str>, HashMap<i32, Committed>> = HashMap::new();
        let deadline = Instant::now() + options.timeout.min(PATIENCE);
        for (group, topics) in topics_of {
            for ((topic, partition), committed) in positions_of(settings, &group, &topics, deadline)? {
                if let Some(committed) = committed {
                    positions
                        .entry(topic.into())
                        .or_default()
                        .insert(partition, committed);
                }
            }
        }
        Ok(Self(positions))
    }

    /// A group that has committed nothing will begin at the beginning.
    fn is_unread(&self, position: &Position) -> bool {
        let committed = self
            .0
            .get(&position.topic)
            .and_then(|partitions| partitions.get(&position.partition));
        committed.is_none_or(|committed| {
            position.offset >= committed.offset && !committed.completed.contains(position.offset)
        })
    }
}
