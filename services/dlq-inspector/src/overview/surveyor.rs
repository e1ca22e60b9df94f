//! Surveys Kafka and the index.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::error_chain::error_chain;
use redeliver_core::pipeline::parse_retry_topic;
use redeliver_core::wait::LogThrottle;
use redeliver_core::{Clock, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::reader::ReadError;
use redeliver_proto::convert::time;
use redeliver_proto::v1;
use redeliver_runtime::Config;
use redeliver_service::control::Control;
use redeliver_service::queues;
use redeliver_service::status::Statuses;
use redeliver_store::Replica;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::history::History;
use super::pipelines::Pipelines;
use super::survey::{Letters, Open, Reading, Redrive, RedriveState, Survey, Topics};
use super::view::Overview;
use crate::completeness::MAX_AGE;
use crate::group_states::GroupStates;
use crate::index::{self, Pool, Trends};
use crate::pipeline_audit::AuditStatuses;
use crate::redrive::job;
use crate::redrive::jobs::Jobs;
use crate::shared::SharedState;

/// The time within which records near the ends of topics must be read.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// A group is new for this time after its first dead letter.
const NEW_MILLIS: i64 = 86_400_000;
/// How long a survey waits for what waits, before and after it was read for the first time.
const FIRST_READING: Duration = Duration::from_secs(3);
const READING: Duration = Duration::from_millis(500);
/// The time between two readings is at least this many times as long as a reading, up to the maximum.
const PAUSE: u32 = 4;
const MAX_INTERVAL: Duration = Duration::from_secs(30);
/// And at least this long for each group: a reading connects to the cluster once for each of them.
const PER_GROUP: Duration = Duration::from_millis(200);
/// The time between two readings of the trends of dead letters, and at least this many times as long as a reading.
const TRENDS_INTERVAL: Duration = Duration::from_secs(10);
const TRENDS_PAUSE: u32 = 20;
/// Of how many missing topics Kafka is asked in each survey why they are not in its list.
const ASKED: usize = 20;

/// Where a survey comes from.
pub(crate) struct Sources {
    pub(crate) config: Arc<Config>,
    pub(crate) kafka: KafkaSettings,
    pub(crate) surveyor: redeliver_kafka::survey::Surveyor,
    pub(crate) pool: Pool,
    pub(crate) shared: Arc<SharedState>,
    pub(crate) group_states: Replica<GroupStates>,
    pub(crate) jobs: Replica<Jobs>,
    pub(crate) control: Control,
    pub(crate) statuses: Replica<Statuses>,
    pub(crate) pipeline_audits: AuditStatuses,
    pub(crate) clock: Arc<dyn Clock>,
}

/// Surveys, one after the other.
pub(crate) struct Surveyor {
    sources: Sources,
    pipelines: Arc<Pipelines>,
    began: Instant,
    history: History,
    /// What waits, as it was read last.
    waiting: Option<Arc<Reading>>,
    /// A reading that is in progress, since when.
    reading: Option<(Instant, JoinHandle<Result<Reading, ReadError>>)>,
    /// A reading in progress whose result is not needed any more. No other one begins until it has ended, so that there is never more than one.
    forgotten: Option<JoinHandle<Result<Reading, ReadError>>>,
    /// When the next one may begin.
    next_reading: Instant,
    /// Whether the last reading has failed, or none has ended yet.
    lacks_reading: bool,
    trends: Option<Known>,
    log_throttle: LogThrottle,
}

/// Trends as they were read last.
struct Known {
    trends: Arc<Trends>,
    /// Of the index from which they are.
    build: u64,
    until: Instant,
}

impl Surveyor {
    pub(crate) fn new(sources: Sources) -> Self {
        let pipelines = Pipelines::new(redeliver_service::topics::pipelines(&sources.config));
        Self {
            sources,
            pipelines: Arc::new(pipelines),
            began: Instant::now(),
            history: History::default(),
            waiting: None,
            reading: None,
            forgotten: None,
            next_reading: Instant::now(),
            lacks_reading: true,
            trends: None,
            log_throttle: LogThrottle::default(),
        }
    }

    /// Forgets what was found, once it is not needed any more.
    pub(crate) fn forget(&mut self) {
        self.history = History::default();
        // A blocking call goes on without its handle.
        if let Some((_, reading)) = self.reading.take() {
            self.forgotten = Some(reading);
        }
        (self.waiting, self.lacks_reading, self.trends) = (None, true, None);
        self.next_reading = Instant::now();
    }

    /// Surveys everything. What waits can be older, if reading it takes longer than the rest.
    pub(crate) async fn survey(&mut self, number: u64) -> Overview {
        let at = self.sources.clock.now();
        let uptime = self.began.elapsed();
        let mut incomplete = BTreeMap::new();
        let (topics, asked) = self.topics().await;
        if topics.is_none() {
            let problem = "Kafka does not answer the request for topics";
            incomplete.insert(v1::OverviewPart::Topics, problem);
        }
        self.read_waiting(topics.as_deref()).await;
        let waiting = self.waiting.clone();
        let is_old = |reading: &Arc<Reading>| at.since(reading.at) > 2 * MAX_AGE;
        if self.lacks_reading || waiting.as_ref().is_none_or(is_old) {
            let problem = "what waits is not read yet, or cannot be read";
            incomplete.insert(v1::OverviewPart::Waiting, problem);
        }
        let letters = self.letters(at).await;
        match &letters {
            None => drop(incomplete.insert(
                v1::OverviewPart::DeadLetters,
                "the index has not caught up, or cannot be read",
            )),
            Some(letters) if !letters.has_states => {
                let problem = "the ledger cannot be read";
                incomplete.insert(v1::OverviewPart::DeadLetters, problem);
            }
            Some(letters)
                if letters
                    .completeness
                    .as_of
                    .is_none_or(|as_of| at.since(as_of) > MAX_AGE) =>
            {
                let problem = "the index is more than 30 seconds old";
                incomplete.insert(v1::OverviewPart::DeadLetters, problem);
            }
            Some(_) => {}
        }
        let sources = &self.sources;
        for (part, problem) in [
            (
                v1::OverviewPart::GroupStates,
                sources.group_states.problem(MAX_AGE),
            ),
            (v1::OverviewPart::Controls, sources.control.problem(MAX_AGE)),
            (v1::OverviewPart::Redrives, sources.jobs.problem(MAX_AGE)),
        ] {
            if problem.is_some() {
                incomplete.insert(part, "its topic cannot be read");
            }
        }
        let statuses = sources.statuses.state();
        let statuses = statuses.filter(|_| sources.statuses.problem(MAX_AGE).is_none());
        let survey = Survey {
            number,
            at,
            uptime,
            topics,
            waiting,
            letters,
            controls: sources.control.is_known().then(|| sources.control.snapshot()),
            redrives: sources.jobs.state().map(|jobs| redrives(&jobs)),
            breakers: statuses.map(|statuses| statuses.breakers(at)),
            audits: sources.pipeline_audits.messages(at),
            incomplete,
        };
        self.history.note(&survey, self.pipelines.needed.iter(), &asked);
        let overview = Overview::of(&self.pipelines, &survey, &self.history);
        self.history.add(&survey);
        overview
    }

    /// The topics, and of which of them Kafka was asked by name.
    async fn topics(&mut self) -> (Option<Arc<Topics>>, BTreeSet<Arc<str>>) {
        let (surveyor, pipelines) = (self.sources.surveyor.clone(), self.pipelines.clone());
        // A topic is missing only in a second survey, which knows whether Kafka refuses to describe it.
        let asked = self.history.ask(ASKED);
        let named = asked.clone();
        let surveyed = tokio::task::spawn_blocking(move || {
            let is_needed = |name: &str| {
                let retried = || parse_retry_topic(name).map(|(pipeline, _)| pipeline);
                pipelines.needed.contains(name)
                    || retried().is_some_and(|pipeline| pipelines.get(pipeline).is_some())
            };
            surveyor.topics_and(is_needed, &named)
        });
        // It panics only if it has a defect, and is cancelled only at the end of the process.
        let surveyed = surveyed.await.ok();
        let surveyed =
            surveyed.and_then(|surveyed| self.known(surveyed, "cannot survey topics for the overview"));
        let topics = surveyed.map(|surveyed| Arc::new(Topics::of(surveyed)));
        (topics, asked)
    }

    fn known<T>(&mut self, result: Result<T, ReadError>, message: &'static str) -> Option<T> {
        match result {
            Ok(known) => Some(known),
            Err(error) => {
                if self.log_throttle.should_log() {
                    tracing::warn!(error = %error_chain(&error), "{message}");
                }
                None
            }
        }
    }

    /// Reads what waits in these topics, or goes on waiting for it. What was read before stays meanwhile.
    async fn read_waiting(&mut self, topics: Option<&Topics>) {
        if self.forgotten.as_ref().is_some_and(JoinHandle::is_finished) {
            self.forgotten = None;
        }
        if let (None, None, Some(topics)) = (&self.reading, &self.forgotten, topics)
            && Instant::now() >= self.next_reading
        {
            let existing = topics.ends.keys().map(ToString::to_string).collect();
            self.reading = Some((Instant::now(), self.begin_reading(existing)));
        }
        let Some((began, reading)) = &mut self.reading else {
            return;
        };
        let patience = if self.waiting.is_none() {
            FIRST_READING
        } else {
            READING
        };
        let Ok(read) = timeout(patience, reading).await else {
            return;
        };
        let took = began.elapsed();
        self.reading = None;
        // It panics only if it has a defect, and is cancelled only at the end of the process.
        let read = read
            .ok()
            .and_then(|read| self.known(read, "cannot read what waits for the overview"));
        self.lacks_reading = read.is_none();
        let groups = read.as_ref().map_or(1, |read| read.groups);
        self.next_reading = Instant::now() + (took * PAUSE).max(PER_GROUP * groups).min(MAX_INTERVAL);
        if let Some(read) = read {
            self.waiting = Some(Arc::new(read));
        }
    }

    fn begin_reading(&self, existing: BTreeSet<String>) -> JoinHandle<Result<Reading, ReadError>> {
        let (config, kafka) = (self.sources.config.clone(), self.sources.kafka.clone());
        let at = self.sources.clock.now();
        tokio::task::spawn_blocking(move || {
            let mut read = queues::queues(&config, &kafka, &existing);
            read.retain(|queue| queue.is_configured && queue.pipeline.is_some());
            let groups: BTreeSet<&str> = read.iter().map(|queue| &*queue.group).collect();
            let groups = u32::try_from(groups.len()).unwrap_or(u32::MAX);
            let mut waiting = queues::waiting(&kafka, &read, READ_TIMEOUT)?;
            let mut queues: BTreeMap<Arc<str>, Vec<_>> = BTreeMap::new();
            for queue in read {
                if let (Some(pipeline), Some(waiting)) = (&queue.pipeline, waiting.remove(&queue.topic)) {
                    queues.entry(pipeline.clone()).or_default().push((queue, waiting));
                }
            }
            Ok(Reading { at, groups, queues })
        })
    }

    /// What the index knows.
    async fn letters(&mut self, now: Timestamp) -> Option<Arc<Letters>> {
        let shared = &self.sources.shared;
        let (build, before) = (shared.build(), shared.completeness());
        before.as_of?;
        let states = self.sources.group_states.state();
        let since = Timestamp::from_millis(now.as_millis().saturating_sub(NEW_MILLIS));
        let are_known = |known: &Known| known.build == build && Instant::now() < known.until;
        let needs_trends = !self.trends.as_ref().is_some_and(are_known);
        let read = self.sources.pool.internal(move |connection| {
            let began = Instant::now();
            let trends = needs_trends.then(|| index::trends(connection, now)).transpose()?;
            let trends = trends.map(|trends| (trends, began.elapsed()));
            let open = index::open_by_topic(connection)?;
            let groups = states
                .as_ref()
                .map(|states| index::groups_in_need(connection, states, since, now));
            Ok((open, groups.transpose()?, trends))
        });
        let (open, groups, trends) = match read.await {
            Ok(read) => read,
            Err(error) => {
                if self.log_throttle.should_log() {
                    tracing::warn!(error = %error_chain(&error), "cannot read the index for the overview");
                }
                return None;
            }
        };
        let completeness = before.and(&shared.completeness());
        if completeness.as_of.is_none() || shared.build() != build {
            return None;
        }
        if let Some((trends, took)) = trends {
            self.trends = Some(Known {
                trends: Arc::new(trends),
                build,
                until: Instant::now() + (took * TRENDS_PAUSE).max(TRENDS_INTERVAL),
            });
        }
        let topics = shared.topics().clone();
        let has_states = completeness.are_states_known();
        let open = open.into_iter().filter(|_| has_states).map(|(topic, open)| {
            let status = topics.get(&topic);
            let known = Open {
                count: open.count.unsigned_abs(),
                oldest: open.oldest,
                removed_from: status.and_then(|status| status.removes_at(open.oldest)),
            };
            (topic, known)
        });
        Some(Arc::new(Letters {
            open: open.collect(),
            has_states,
            groups: groups.filter(|_| has_states),
            trends: self
                .trends
                .as_ref()
                .map(|known| known.trends.clone())
                .unwrap_or_default(),
            completeness,
        }))
    }
}

/// The jobs that have not ended, and are started.
fn redrives(jobs: &Jobs) -> Vec<Redrive> {
    let redrives = jobs.iter().filter_map(|(id, entry, job)| {
        let progress = entry.progress();
        let state = match job::state(&job, &progress) {
            v1::RedriveState::Running => RedriveState::Running,
            v1::RedriveState::Paused if job::is_auto_paused(&job, &progress) => RedriveState::AutoPaused,
            v1::RedriveState::Paused => RedriveState::Paused,
            _ => return None,
        };
        let sources = job.spec().sources.iter();
        Some(Redrive {
            id: id.to_owned(),
            sources: sources.map(|count| count.topic.as_str().into()).collect(),
            state,
            sent_at: time(progress.sent_at),
            returned: progress.returned,
            by: job.spec().created_by.clone(),
        })
    });
    redrives.collect()
}
