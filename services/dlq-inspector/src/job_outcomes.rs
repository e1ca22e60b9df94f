//! What becomes of jobs in pipelines after their dispatch: where the newest record of each job is, in memory.
//!
//! A thread follows the topics of all pipelines whose source is the topic of an application. An entry alone proves nothing: a call reads the record from
//! Kafka, and asks the group that reads its topic whether it is complete. So what is old, evicted, or of a deleted topic makes an answer unknown, never wrong.
//!
//! The index is not on disk: after a start, topics are read again from `scheduler.keep_ended` ago, for as long as the scheduler knows jobs that have ended.
//! And it is in the inspector instead of the scheduler, because only the inspector reads what pipelines write; clients ask both.
//!
//! | module | responsibility |
//! |---|---|
//! | `copy` | what a record says about its job; no IO |
//! | `table` | the newest copy of each job, in bounded memory; no IO |
//! | `follower` | the thread that reads topics into the table |
//! | `progress` | whether a copy is complete, and whether the table is current |

pub(crate) mod copy;
pub(crate) mod follower;
pub(crate) mod progress;
pub(crate) mod table;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redeliver_core::{JobId, Pipeline, Position, Timestamp};
use redeliver_kafka::{KafkaSettings, TopicId};
use redeliver_runtime::Config;
use redeliver_service::control::Control;
use redeliver_service::topics;

use self::progress::Clients;
use self::table::{Entry, Table};

/// A topic and one of its partitions.
type Partition = (Arc<str>, i32);

/// The index. Cheap to clone.
#[derive(Clone)]
pub(crate) struct JobOutcomes(Arc<Inner>);

struct Inner {
    kafka: KafkaSettings,
    pipelines: Vec<Pipeline>,
    /// Where long waits are written.
    ingest: Arc<str>,
    is_enabled: bool,
    control: Control,
    state: Mutex<State>,
    clients: Clients,
}

struct State {
    table: Table,
    /// Topics by their numbers in the table.
    topics: Vec<Arc<str>>,
    numbers: HashMap<Arc<str>, u16>,
    /// The next offset to read of each partition.
    next: HashMap<Partition, i64>,
    /// The pipelines that read or write each topic.
    of_pipelines: HashMap<Arc<str>, BTreeSet<u16>>,
    /// The ids of the topics that are read.
    ids: HashMap<Arc<str>, TopicId>,
    /// The topics that cannot be read, and why.
    refused: HashMap<Arc<str>, String>,
    /// From when on records are known. `None` until reading has begun.
    since: Option<Timestamp>,
}

/// The newest copy of a job that was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) position: Position,
    pub(crate) is_ambiguous: bool,
}

impl JobOutcomes {
    /// Knows nothing yet. `max_jobs`: of how many jobs in pipelines it knows the newest record; 0: no topics are read.
    pub(crate) fn new(config: &Config, kafka: &KafkaSettings, max_jobs: u32, control: Control) -> Self {
        let scheduler = config.scheduler.topics();
        let mut pipelines = topics::pipelines(config);
        pipelines.retain(|pipeline| scheduler.apps.contains(&pipeline.source));
        Self(Arc::new(Inner {
            kafka: kafka.clone(),
            is_enabled: max_jobs > 0 && !pipelines.is_empty(),
            pipelines,
            ingest: scheduler.ingest,
            control,
            state: Mutex::new(State {
                table: Table::new(max_jobs as usize),
                topics: Vec::new(),
                numbers: HashMap::new(),
                next: HashMap::new(),
                of_pipelines: HashMap::new(),
                ids: HashMap::new(),
                refused: HashMap::new(),
                since: None,
            }),
            clients: Clients::new(kafka),
        }))
    }

    /// Whether topics are read.
    pub(crate) fn is_enabled(&self) -> bool {
        self.0.is_enabled
    }

    /// The pipelines whose source is the topic of an application, with their numbers.
    pub(crate) fn pipelines(&self) -> impl Iterator<Item = (u16, &Pipeline)> {
        (0..).zip(&self.0.pipelines)
    }

    /// Whether an operator has paused a pipeline; `None` until the control topic was read. Workers do not start before they have read it.
    pub(crate) fn is_paused(&self, pipeline: &str) -> Option<bool> {
        let control = &self.0.control;
        control
            .is_known()
            .then(|| control.snapshot().pipeline(pipeline).is_paused)
    }

    /// From when on records are known; `None` until reading has begun.
    pub(crate) fn since(&self) -> Option<Timestamp> {
        self.state().since
    }

    /// The newest copy of a job in a pipeline that was seen.
    pub(crate) fn find(&self, pipeline: u16, id: JobId) -> Option<Known> {
        let state = self.state();
        let entry = state.table.find(pipeline, id)?;
        let Entry {
            topic,
            partition,
            offset,
            is_ambiguous,
            ..
        } = *entry;
        Some(Known {
            position: Position {
                topic: state.topics.get(usize::from(topic))?.clone(),
                partition,
                offset,
            },
            is_ambiguous,
        })
    }

    /// The id of a topic that is read, if it is known.
    pub(crate) fn topic_id(&self, topic: &str) -> Option<TopicId> {
        self.state().ids.get(topic).copied()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The number of a topic; `None` if there are too many.
    fn number(&mut self, topic: &Arc<str>) -> Option<u16> {
        if let Some(number) = self.numbers.get(topic) {
            return Some(*number);
        }
        let number = u16::try_from(self.topics.len()).ok()?;
        self.topics.push(topic.clone());
        self.numbers.insert(topic.clone(), number);
        Some(number)
    }
}
