//! The thread that reads topics into the table.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use redeliver_core::error_chain::error_chain;
use redeliver_core::wait::LogThrottle;
use redeliver_core::{Record, Timestamp};
use redeliver_kafka::Waker;
use redeliver_kafka::follow::{Event, Follower, Start};
use redeliver_kafka::reader::{ReadError, TopicReader};
use redeliver_kafka::survey::{Extent, SurveyedTopic, Surveyor};
use redeliver_proto::long_wait;
use tokio_util::sync::CancellationToken;

use super::copy::JobCopy;
use super::{JobOutcomes, Partition};
use crate::metrics::Metrics;
use crate::waiting::timeline::Location;

/// The time between two looks for topics and partitions.
const SURVEY: Duration = Duration::from_secs(30);
/// The longest wait for a record, after which the thread looks for the end of the process.
const POLL: Duration = Duration::from_millis(200);
/// The pause after an error.
const PAUSE: Duration = Duration::from_secs(1);
/// How many events are applied at once.
const BATCH: usize = 2_000;

/// The thread.
pub(crate) struct Following {
    pub(crate) outcomes: JobOutcomes,
    pub(crate) surveyor: Surveyor,
    /// From when on records are read.
    pub(crate) since: Timestamp,
    pub(crate) metrics: Metrics,
    pub(crate) stop: CancellationToken,
}

/// What a topic is for pipelines, by their numbers.
type Roles = HashMap<Arc<str>, Vec<(u16, Location)>>;

/// What is followed.
struct Followed {
    follower: Follower,
    times: TopicReader,
    roles: Roles,
    partitions: HashSet<Partition>,
    /// Partitions that were behind at the last survey, and where.
    behind: HashMap<Partition, i64>,
    /// The rounds of the follower at the last survey.
    rounds: u64,
}

impl Following {
    /// Follows the topics until `stop` is cancelled.
    pub(crate) fn run(self) {
        let mut log_throttle = LogThrottle::default();
        while !self.stop.is_cancelled() {
            if let Err(error) = self.follow() {
                if log_throttle.should_log() {
                    tracing::warn!(error = %error_chain(&error), "cannot follow jobs through pipelines; retrying");
                }
                std::thread::park_timeout(PAUSE);
            }
        }
    }

    fn follow(&self) -> Result<(), ReadError> {
        let kafka = &self.outcomes.0.kafka;
        let mut followed = Followed {
            follower: Follower::new(kafka, Waker::new())?,
            times: TopicReader::new(kafka, &[])?,
            roles: Roles::new(),
            partitions: HashSet::new(),
            behind: HashMap::new(),
            rounds: 0,
        };
        let mut log_throttle = LogThrottle::default();
        let mut next_survey = Instant::now();
        while !self.stop.is_cancelled() {
            if Instant::now() >= next_survey {
                self.survey(&mut followed)?;
                next_survey = Instant::now() + SURVEY;
            }
            let mut events = Vec::new();
            followed.follower.poll(POLL, |event| {
                events.push(event);
                match events.len() < BATCH {
                    true => ControlFlow::Continue(()),
                    false => ControlFlow::Break(()),
                }
            })?;
            self.apply(&followed.roles, events, &mut log_throttle);
        }
        Ok(())
    }

    fn apply(&self, roles: &Roles, events: Vec<Event>, log_throttle: &mut LogThrottle) {
        if events.is_empty() {
            return;
        }
        let (mut next, mut copies, mut refused) = (Vec::new(), Vec::new(), Vec::new());
        for event in events {
            match event {
                Event::Record(record) => {
                    let position = &record.position;
                    next.push(((position.topic.clone(), position.partition), position.offset + 1));
                    self.read(roles, &record, |pipeline, copy| {
                        copies.push((pipeline, copy, record.position.clone()));
                    });
                }
                Event::End {
                    topic,
                    partition,
                    offset,
                } => next.push(((topic, partition), offset)),
                Event::Refused {
                    topic,
                    partition,
                    error,
                } => {
                    if log_throttle.should_log() {
                        tracing::warn!(topic = &*topic, partition, %error, "cannot follow jobs in a topic");
                    }
                    refused.push((topic, error.to_string()));
                }
            }
        }
        let mut state = self.outcomes.state();
        for (pipeline, copy, position) in copies {
            if let Some(topic) = state.number(&position.topic) {
                let at = (topic, position.partition, position.offset);
                state.table.add(pipeline, &copy, at);
            }
        }
        // After the copies, so that a partition that counts as read is in the table.
        state.next.extend(next);
        state.refused.extend(refused);
        self.metrics.set_job_outcomes(state.table.len());
    }

    fn read(&self, roles: &Roles, record: &Record, mut found: impl FnMut(u16, JobCopy)) {
        let pipelines = &self.outcomes.0.pipelines;
        if record.position.topic == self.outcomes.0.ingest {
            let Some((name, waiting)) = long_wait::unwrap_any(record) else {
                return;
            };
            for (number, pipeline) in (0..).zip(pipelines) {
                if *pipeline.name == *name
                    && let Some(copy) = JobCopy::read(pipeline, Location::Scheduler, &waiting)
                {
                    found(number, copy);
                }
            }
            return;
        }
        for (number, location) in roles.get(&record.position.topic).into_iter().flatten() {
            let pipeline = &pipelines[usize::from(*number)];
            if let Some(copy) = JobCopy::read(pipeline, *location, record) {
                found(*number, copy);
            }
        }
    }

    /// Looks for topics and partitions that are new or were created again, and for partitions that do not go on.
    fn survey(&self, followed: &mut Followed) -> Result<(), ReadError> {
        let inner = &self.outcomes.0;
        followed.roles = self.roles()?;
        let mut of_pipelines: HashMap<Arc<str>, BTreeSet<u16>> = HashMap::new();
        for (topic, roles) in &followed.roles {
            let numbers = roles.iter().map(|(number, _)| *number);
            of_pipelines.insert(topic.clone(), numbers.collect());
        }
        let named: BTreeSet<Arc<str>> = followed.roles.keys().cloned().collect();
        let topics = self
            .surveyor
            .topics_and(|name| followed.roles.contains_key(name), &named)?;
        let rounds = followed.follower.rounds();
        let had_turn = rounds > std::mem::replace(&mut followed.rounds, rounds);
        let mut existing: HashSet<Partition> = HashSet::new();
        let (mut ids, mut refused) = (HashMap::new(), HashMap::new());
        for topic in &topics {
            let partitions = (0..).zip(&topic.partitions);
            existing.extend(partitions.map(|(number, _)| (topic.name.clone(), number)));
            ids.extend(topic.id.map(|id| (topic.name.clone(), id)));
            if let Some(refusal) = &topic.refusal {
                refused.insert(topic.name.clone(), refusal.to_string());
            }
        }
        let (is_first, known_ids) = {
            let mut state = self.outcomes.state();
            state.of_pipelines = of_pipelines;
            state.refused = refused;
            state.next.retain(|partition, _| existing.contains(partition));
            let known = state.ids.clone();
            // What a broker does not tell now stays: a topic that was created again has another id.
            state.ids.extend(ids);
            (state.since.is_none(), known)
        };
        for (topic, _) in followed
            .partitions
            .extract_if(|partition| !existing.contains(partition))
        {
            followed.behind.retain(|(behind, _), _| *behind != topic);
            // Those that still exist are added again.
            followed.follower.remove(&topic)?;
        }
        let (mut starts, mut stalled) = (Vec::new(), false);
        for SurveyedTopic {
            name, id, partitions, ..
        } in topics
        {
            let known = known_ids.get(&name).copied();
            let is_other = known.is_some() && id.is_some() && known != id;
            for (number, extent) in (0..).zip(partitions) {
                let Some(Extent { low, end }) = extent else {
                    continue;
                };
                let key: Partition = (name.clone(), number);
                let read = self.outcomes.state().next.get(&key).copied();
                let from = match read {
                    // Created again, or truncated.
                    Some(next) if is_other || next > end => low,
                    Some(next) if followed.partitions.contains(&key) => {
                        let before = if next < end {
                            followed.behind.insert(key, next)
                        } else {
                            followed.behind.remove(&key);
                            None
                        };
                        stalled |= had_turn && before == Some(next);
                        continue;
                    }
                    // After an error, reading goes on.
                    Some(next) => next.max(low),
                    None if is_first && !inner.kafka.is_embedded => {
                        let since = followed.times.offset_of_time(&name, number, self.since)?;
                        since.map_or(end, |since| since.max(low))
                    }
                    None => low,
                };
                self.outcomes.state().next.insert(key.clone(), from);
                followed.partitions.insert(key);
                starts.push(Start {
                    topic: name.clone(),
                    partition: number,
                    from: Some(from),
                });
            }
        }
        if !starts.is_empty() {
            followed.follower.add(&starts)?;
        }
        if stalled {
            // After a restart of a broker, a fetch may hang.
            followed.follower.renew()?;
        }
        self.outcomes.state().since.get_or_insert(self.since);
        Ok(())
    }

    fn roles(&self) -> Result<Roles, ReadError> {
        let inner = &self.outcomes.0;
        let mut all = Roles::new();
        for (number, roles) in (0..).zip(self.surveyor.roles(&inner.pipelines)?) {
            for (topic, role) in roles {
                all.entry(topic)
                    .or_default()
                    .push((number, Location::Topic(role)));
            }
        }
        for (number, pipeline) in self.outcomes.pipelines() {
            if pipeline.long_waits.is_some() {
                let of_ingest = all.entry(inner.ingest.clone()).or_default();
                of_ingest.push((number, Location::Scheduler));
            }
        }
        Ok(all)
    }
}
