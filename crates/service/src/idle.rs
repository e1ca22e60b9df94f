//! The one-shot mode of a service, `--until-idle`: the process ends when nothing is left to do.
//!
//! `left` decides, without IO, from what Kafka tells about the pipelines: the source, the due topic and the tiers, for the
//! whole consumer groups and not only for this process. So several processes of a group end together, and a record that
//! another one has in hand is not done. A worker looks at the tiers only if it has to wait for retries, because without a process that serves
//! them it would not end.
//!
//! A record that moves from one of these topics to another while they are read could be missed in both. So
//! the ends of the topics are read before and after: if they are equal, and no transaction was open in the
//! topics, no record was added in between, so all were empty at the same time. The same is true of the jobs of a scheduler, about
//! which its index is asked in between.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use redeliver_core::backoff::MAX_WAIT;
use redeliver_core::headers::ReservedHeaders;
use redeliver_core::pipeline::retry_tier_group;
use redeliver_core::wait::LogThrottle;
use redeliver_core::{Clock, HumanDuration, Pipeline, Position, Record, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::backlog::{Head, Mode, heads};
use redeliver_kafka::ends::{Ends, settled_ends};
use redeliver_kafka::reader::ReadError;
use redeliver_runtime::Config;
use redeliver_runtime::error_chain::error_chain;
use tokio_util::sync::CancellationToken;

use crate::control::Control;
use crate::control::value::Release;
use crate::leftovers::{Leftover, leftovers};
use crate::topics;

/// Maximum number of offsets of a partition that are read at first. Most times they show that records are left.
const HEAD: i64 = 100;
/// Everything is read, before the process ends.
const ALL: i64 = i64::MAX;
/// How long reading the first records may take.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long reading all waiting records may take.
const ALL_TIMEOUT: Duration = Duration::from_secs(600);
/// Minimum time between two looks. A look that takes long is followed by a longer pause.
const MIN_PAUSE: Duration = Duration::from_secs(1);
/// A pause is this many times as long as the look before it, so that looks do not load the brokers.
const PAUSE_FACTOR: u32 = 10;
/// Also after a look that has waited for the index.
const MAX_PAUSE: Duration = Duration::from_secs(10);

/// A topic that must be empty, or in which no record may be due soon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Queue {
    topic: Arc<str>,
    group: String,
    /// Its records wait until they are due: the pipeline and the tier.
    tier: Option<(Arc<str>, HumanDuration)>,
    /// It is no longer part of the configuration. An operator deletes it once it is empty.
    is_leftover: bool,
}

/// What keeps a process from being idle.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Left {
    /// A circuit breaker is open.
    OpenBreaker(Arc<str>),
    /// The topic does not exist.
    MissingTopic(Arc<str>),
    /// Incomplete records.
    Unprocessed(Arc<str>),
    /// A record that is due soon, or was due.
    Due(Arc<str>),
    /// Jobs of a scheduler, for this reason.
    Jobs(String),
    /// Records may have moved while the topics were read.
    Moving,
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OpenBreaker(pipeline) => write!(f, "the circuit breaker of pipeline `{pipeline}` is open"),
            Self::MissingTopic(topic) => write!(f, "topic `{topic}` is missing"),
            Self::Unprocessed(topic) => write!(f, "records of topic `{topic}` are not processed"),
            Self::Due(topic) => write!(
                f,
                "records of topic `{topic}` are due, or will be within the duration"
            ),
            Self::Jobs(reason) => f.write_str(reason),
            Self::Moving => f.write_str("records were being added to the topics"),
        }
    }
}

/// What is known about a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    /// The due times of its first incomplete records. `None`: the record has none, or was released early, and is processed at once.
    first: Vec<Option<Timestamp>>,
    /// There are no other incomplete records.
    is_all: bool,
}

/// What a look at the topics shows.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    Left(Left),
    /// Nothing, among the records that were read. There may be others.
    Unknown,
    Nothing,
}

/// Decides whether something is left to do until `until`.
fn left(queues: &[Queue], seen: &BTreeMap<Arc<str>, Seen>, until: Timestamp) -> Verdict {
    let mut is_all = true;
    for queue in queues {
        let Some(seen) = seen.get(&queue.topic) else {
            if queue.is_leftover {
                continue;
            }
            return Verdict::Left(Left::MissingTopic(queue.topic.clone()));
        };
        let is_due = |due: &Option<Timestamp>| due.is_none_or(|due| due <= until);
        if queue.tier.is_some() && seen.first.iter().any(is_due) {
            return Verdict::Left(Left::Due(queue.topic.clone()));
        }
        if queue.tier.is_none() && !seen.first.is_empty() {
            return Verdict::Left(Left::Unprocessed(queue.topic.clone()));
        }
        is_all &= seen.is_all;
    }
    if is_all {
        Verdict::Nothing
    } else {
        Verdict::Unknown
    }
}

/// A pipeline that the process works on.
pub(crate) struct Worked {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) work: Work,
}

/// What the process does for a pipeline.
pub enum Work {
    /// It processes the records. Whether the circuit breaker is open.
    Attempts(Box<dyn Fn() -> bool + Send + Sync>),
    /// It releases the records of some tiers.
    Tiers {
        /// Whether it serves a tier; the second argument is whether the tier is a leftover.
        serves: Box<dyn Fn(HumanDuration, bool) -> bool + Send + Sync>,
        /// What operators have released early.
        control: Control,
    },
}

/// The jobs that the process dispatches.
pub struct Dispatch {
    /// The topic of commands.
    pub commands: Arc<str>,
    /// The group that reads it.
    pub group: String,
    /// The topic of states.
    pub states: Arc<str>,
    /// Why something is left to do until this time; `None` if nothing is. Asked while all commands are completed.
    pub left: Box<dyn Fn(Timestamp) -> BoxFuture<'static, anyhow::Result<Option<String>>> + Send + Sync>,
}

impl Dispatch {
    pub(crate) fn queue(&self) -> Queue {
        Queue {
            topic: self.commands.clone(),
            group: self.group.clone(),
            tier: None,
            is_leftover: false,
        }
    }
}

impl Worked {
    fn is_open(&self) -> bool {
        matches!(&self.work, Work::Attempts(is_open) if is_open())
    }
}

/// The topics in which records of a pipeline can be that concern the process, except for those that wait in the scheduler. `leftovers`
/// are those of the configuration. `with_retries`: whether a worker waits for them.
fn queues(
    Worked { pipeline, work }: &Worked,
    with_retries: bool,
    leftovers: &[Leftover],
    kafka: &KafkaSettings,
    existing: &BTreeSet<String>,
) -> Vec<Queue> {
    let read = match work {
        Work::Attempts(_) => pipeline.worker_topics(existing.contains(&*pipeline.due_topic())),
        Work::Tiers { .. } => Vec::new(),
    };
    let group = pipeline.worker_group(&kafka.id_prefix);
    let read = read.into_iter().map(|topic| Queue {
        topic,
        group: group.clone(),
        tier: None,
        is_leftover: false,
    });
    let concerns = |tier, is_leftover| match work {
        Work::Attempts(_) => with_retries,
        Work::Tiers { serves, .. } => serves(tier, is_leftover),
    };
    let tiers = pipeline.policy.tiers().iter();
    let tiers = tiers.filter(|tier| concerns(**tier, false)).map(|&tier| Queue {
        topic: pipeline.tier_topic(tier),
        group: retry_tier_group(&kafka.id_prefix, tier),
        tier: Some((pipeline.name.clone(), tier)),
        is_leftover: false,
    });
    let own = leftovers
        .iter()
        .filter(|leftover| leftover.pipeline == pipeline.name);
    let leftovers = own.filter_map(|leftover| {
        let tier = leftover.tier.filter(|tier| concerns(*tier, true))?;
        Some(Queue {
            topic: leftover.topic.clone(),
            group: leftover.group(&kafka.id_prefix),
            tier: Some((pipeline.name.clone(), tier)),
            is_leftover: true,
        })
    });
    read.chain(tiers).chain(leftovers).collect()
}

/// The topics that must be empty before the process ends. `with_retries`: whether a worker waits for retries.
pub(crate) fn queues_of(
    config: &Config,
    existing: &BTreeSet<String>,
    worked: &[Worked],
    with_retries: bool,
    kafka: &KafkaSettings,
) -> Vec<Queue> {
    let leftovers = leftovers(&topics::pipelines(config), &topics::of_all(config), existing);
    worked
        .iter()
        .flat_map(|worked| queues(worked, with_retries, &leftovers, kafka, existing))
        .collect()
}

/// Ends the process when it is idle.
pub(crate) struct IdleWatch {
    pub(crate) kafka: KafkaSettings,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) worked: Vec<Worked>,
    pub(crate) dispatch: Option<Dispatch>,
    pub(crate) queues: Vec<Queue>,
    /// Records that are due within this time are waited for.
    pub(crate) within: HumanDuration,
    pub(crate) shutdown: CancellationToken,
}

impl IdleWatch {
    /// Runs until the process is idle, and then cancels `shutdown`; or until something else has cancelled it.
    pub(crate) async fn run(self) {
        let mut throttle = LogThrottle::default();
        let mut logged = None;
        // A recurring schedule has a next job within any duration, so that of jobs counts from the start.
        let jobs_until = self.clock.now().after(self.within.duration());
        loop {
            let began = Instant::now();
            let looked = tokio::select! {
                looked = self.look(jobs_until) => looked,
                () = self.shutdown.cancelled() => return,
            };
            match looked {
                Ok(None) => {
                    tracing::info!(within = %self.within, "idle; shutting down");
                    self.shutdown.cancel();
                    return;
                }
                Ok(Some(left)) => {
                    let is_new = logged.as_ref() != Some(&left);
                    if throttle.should_log() || is_new {
                        tracing::info!(reason = %left, "not idle yet");
                        logged = Some(left);
                    }
                }
                Err(error) => {
                    if throttle.should_log() {
                        tracing::warn!(
                            error = error_chain(&*error),
                            "cannot check for remaining work; retrying"
                        );
                    }
                }
            }
            let pause = (began.elapsed() * PAUSE_FACTOR).clamp(MIN_PAUSE, MAX_PAUSE);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.shutdown.cancelled() => return,
            }
        }
    }

    /// The topics that are looked at, without those of paused tiers, and what was released of them.
    fn unpaused(&self) -> (Vec<Queue>, Releases) {
        let controls = self.worked.iter().find_map(|worked| match &worked.work {
            Work::Tiers { control, .. } => Some(control.snapshot()),
            Work::Attempts(_) => None,
        });
        let state_of = |queue: &Queue| {
            let (pipeline, tier) = queue.tier.as_ref()?;
            Some(controls.as_ref()?.tier(pipeline, *tier))
        };
        let is_paused = |queue: &Queue| state_of(queue).is_some_and(|state| state.is_paused);
        let queues: Vec<Queue> = self
            .queues
            .iter()
            .filter(|queue| !is_paused(queue))
            .cloned()
            .collect();
        let released = queues
            .iter()
            .filter_map(|queue| Some((queue.topic.clone(), state_of(queue)?.release?)));
        let released = released.collect();
        (queues, released)
    }

    /// What is left to do.
    async fn look(&self, jobs_until: Timestamp) -> anyhow::Result<Option<Left>> {
        let Some(dispatch) = &self.dispatch else {
            return Ok(self.look_at_topics().await?);
        };
        let before = self.ends(dispatch).await?;
        if let Some(left) = self.look_at_topics().await? {
            return Ok(Some(left));
        }
        if let Some(reason) = (dispatch.left)(jobs_until.max(self.clock.now())).await? {
            return Ok(Some(Left::Jobs(reason)));
        }
        let is_settled = before.is_some() && self.ends(dispatch).await? == before;
        Ok((!is_settled).then_some(Left::Moving))
    }

    /// The ends of the topics of jobs.
    async fn ends(&self, dispatch: &Dispatch) -> Result<Option<Ends>, ReadError> {
        let kafka = self.kafka.clone();
        let topics = [dispatch.commands.clone(), dispatch.states.clone()];
        let ends = blocking(move || settled_ends(&kafka, &topics)).await;
        Ok(ends.transpose()?.flatten())
    }

    /// What is left to do in the topics that are read.
    async fn look_at_topics(&self) -> Result<Option<Left>, ReadError> {
        let open = self.worked.iter().find(|worked| worked.is_open());
        if let Some(worked) = open {
            return Ok(Some(Left::OpenBreaker(worked.pipeline.name.clone())));
        }
        let (queues, releases) = self.unpaused();
        if queues.is_empty() {
            return Ok(None);
        }
        let (kafka, clock, within) = (self.kafka.clone(), self.clock.clone(), self.within.duration());
        let looked = blocking(move || look(&kafka, &*clock, &queues, &releases, within)).await;
        looked.unwrap_or(Ok(Some(Left::Moving)))
    }
}

/// The result of blocking work; `None` if the runtime is shutting down.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => Some(result),
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(_) => None,
    }
}

/// The records that operators have released early, by the topic of the tier.
type Releases = BTreeMap<Arc<str>, Arc<Release>>;

/// Looks at the topics. Blocks.
fn look(
    kafka: &KafkaSettings,
    clock: &dyn Clock,
    queues: &[Queue],
    releases: &Releases,
    within: Duration,
) -> Result<Option<Left>, ReadError> {
    let topics: Vec<Arc<str>> = queues.iter().map(|queue| queue.topic.clone()).collect();
    for (offsets, timeout) in [(HEAD, HEAD_TIMEOUT), (ALL, ALL_TIMEOUT)] {
        let Some(before) = settled_ends(kafka, &topics)? else {
            return Ok(Some(Left::Moving));
        };
        let seen = read(kafka, clock, queues, releases, offsets, timeout)?;
        match left(queues, &seen, clock.now().after(within)) {
            Verdict::Left(left) => return Ok(Some(left)),
            Verdict::Unknown => {}
            Verdict::Nothing if settled_ends(kafka, &topics)?.as_ref() == Some(&before) => return Ok(None),
            Verdict::Nothing => return Ok(Some(Left::Moving)),
        }
    }
    // Records were added while the topics were read.
    Ok(Some(Left::Moving))
}

/// Reads the first incomplete records of each topic.
fn read(
    kafka: &KafkaSettings,
    clock: &dyn Clock,
    queues: &[Queue],
    releases: &Releases,
    offsets: i64,
    timeout: Duration,
) -> Result<BTreeMap<Arc<str>, Seen>, ReadError> {
    let pairs: Vec<(String, Arc<str>)> = queues
        .iter()
        .map(|queue| (queue.group.clone(), queue.topic.clone()))
        .collect();
    let now = clock.now();
    let due_time = |record: Record| {
        let Position {
            topic,
            partition,
            offset,
        } = &record.position;
        // One of a topic that was created again can be taken for a released one. Then the process ends when the record is due.
        let release = releases.get(topic);
        if release.is_some_and(|release| *offset < release.before(Some(release.topic), *partition)) {
            return None;
        }
        let headers = ReservedHeaders::read(&record).ok()?;
        // A malformed record becomes a dead letter at once.
        headers.process_after(now, MAX_WAIT).ok()
    };
    let heads: BTreeMap<Arc<str>, Head<Option<Timestamp>>> =
        heads(kafka, &pairs, Mode::Heads, offsets, timeout, due_time)?;
    let seen = heads.into_iter().map(|(topic, head)| {
        let seen = Seen {
            is_all: head.backlog.is_exact,
            first: head.first,
        };
        (topic, seen)
    });
    Ok(seen.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_000_000);

    fn queue(topic: &str) -> Queue {
        Queue {
            topic: topic.into(),
            group: "g".to_owned(),
            tier: topic
                .contains("tier")
                .then(|| ("docs".into(), HumanDuration::from_secs(30))),
            is_leftover: false,
        }
    }

    fn verdict(seen: &[(&str, &[i64], bool)]) -> Verdict {
        let queues = ["docs", "docs-due", "docs-tier"].map(queue);
        let seen = seen.iter().map(|(topic, dues, is_all)| {
            // Malformed if negative.
            let due = |due: &i64| (*due >= 0).then_some(Timestamp::from_millis(*due));
            let seen = Seen {
                first: dues.iter().map(due).collect(),
                is_all: *is_all,
            };
            ((*topic).into(), seen)
        });
        left(&queues, &seen.collect(), NOW)
    }

    #[test]
    fn verdict_depends_on_each_topic() {
        let (source, due, tier) = (
            ("docs", &[][..], true),
            ("docs-due", &[][..], true),
            ("docs-tier", &[][..], true),
        );
        let of_tier = |dues, is_all| [source, due, ("docs-tier", dues, is_all)];
        let is_due = || Verdict::Left(Left::Due("docs-tier".into()));
        let unprocessed = |topic: &str| Verdict::Left(Left::Unprocessed(topic.into()));
        let later = &[2_000_000][..];
        for (seen, expected) in [
            (&[source, due, tier][..], Verdict::Nothing),
            // Whenever they are due.
            (&[("docs", later, true), due, tier], unprocessed("docs")),
            (
                &[source, ("docs-due", later, true), tier],
                unprocessed("docs-due"),
            ),
            (&of_tier(&[1_000_001, 1_000_000], true), is_due()),
            (&of_tier(&[1_000_001, -1], false), is_due()),
            (&of_tier(&[1_000_001], true), Verdict::Nothing),
            (&of_tier(&[1_000_001], false), Verdict::Unknown),
            // Markers hide records.
            (&[("docs", &[], false), due, tier], Verdict::Unknown),
            (
                &[source, tier],
                Verdict::Left(Left::MissingTopic("docs-due".into())),
            ),
        ] {
            assert_eq!(verdict(seen), expected, "{seen:?}");
        }
    }

    #[test]
    fn deleted_leftover_tier_is_empty() {
        let leftover = Queue {
            is_leftover: true,
            ..queue("docs-tier")
        };
        assert_eq!(left(&[leftover], &BTreeMap::new(), NOW), Verdict::Nothing);
    }
}
