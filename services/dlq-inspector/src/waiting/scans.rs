//! Reads the topics of pipelines: for what waits in them, and for the copies of one record.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::headers::{ORIGINAL_OFFSET, Origin, ReservedHeaders};
use redeliver_core::pipeline::{ReturnTo, TopicRole};
use redeliver_core::route::Arrival;
use redeliver_core::{JobId, Pipeline, Position, Record, SchedulerTopics, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::backlog::GroupPositions;
use redeliver_kafka::lookup::Lookup;
use redeliver_kafka::reader::ReadError;
use redeliver_kafka::scan::{Progress, Scan};
use redeliver_kafka::survey::Surveyor;
use redeliver_proto::long_wait;
use redeliver_runtime::Config;
use redeliver_service::topics;
use tokio::sync::Semaphore;

use super::Place;
use super::facts::Visible;
use super::life::{Copies, Copy, Entered, Life, Spot, life};
use super::tally::{Filter, Found, Tally};
use crate::access::Viewer;
use crate::masking::Mask;

/// How many scans run at the same time.
const SCANS: usize = 2;
/// The maximum duration of a scan.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(600);
/// The maximum time to find a single record.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);
/// Copies of a record can seem older than the record by this much, by another clock.
const SLACK_MILLIS: i64 = 600_000;

/// Scans the topics of the configured pipelines. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Scans {
    kafka: KafkaSettings,
    surveyor: Surveyor,
    pipelines: Arc<[Pipeline]>,
    /// The group and the topics of the scheduler.
    scheduler: Arc<(String, SchedulerTopics)>,
    pub(crate) permits: Arc<Semaphore>,
}

/// Is told how much was read, and breaks if nobody waits for the rest.
pub(crate) type OnProgress<'p> = &'p mut dyn FnMut(Progress) -> ControlFlow<()>;

/// Why there is no trace.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TraceError {
    #[error(transparent)]
    Read(#[from] ReadError),
    /// No pipeline that the caller sees has the topic.
    #[error("no pipeline reads or writes the topic `{0}`")]
    OtherTopic(Arc<str>),
    /// Kafka has no record at the position.
    #[error("there is no record at {0}; retention may have removed it")]
    Gone(Position),
    /// The record names no origin in the pipeline.
    #[error("the record at {0} does not say where it entered a pipeline")]
    NoOrigin(Position),
}

/// The life of a record in one pipeline.
#[derive(Debug)]
pub(crate) struct Traced {
    pub(crate) pipeline: Arc<str>,
    pub(crate) origin: Position,
    pub(crate) origin_timestamp: Option<Timestamp>,
    pub(crate) life: Life,
    pub(crate) is_truncated: bool,
    pub(crate) since: Option<Timestamp>,
}

impl Scans {
    pub(crate) fn new(config: &Config, kafka: &KafkaSettings, surveyor: Surveyor) -> Self {
        let scheduler = &config.scheduler;
        Self {
            kafka: kafka.clone(),
            surveyor,
            pipelines: topics::pipelines(config).into(),
            scheduler: Arc::new((kafka.id(&scheduler.group), scheduler.topics())),
            permits: Arc::new(Semaphore::new(SCANS)),
        }
    }

    /// The pipelines that the caller sees, or the one with this name.
    pub(crate) fn visible(&self, viewer: &Viewer, name: &str) -> Vec<Pipeline> {
        let is_wanted = |pipeline: &&Pipeline| name.is_empty() || *pipeline.name == *name;
        let wanted = self.pipelines.iter().filter(is_wanted);
        wanted
            .filter(|pipeline| viewer.sees(&pipeline.dead_letter_topic()))
            .cloned()
            .collect()
    }

    /// Finds the waiting records of pipelines that match. Blocks.
    pub(crate) fn waiting(
        &self,
        viewer: &Viewer,
        pipelines: &[Pipeline],
        filter: Filter,
        limit: usize,
        now: Timestamp,
        on_progress: OnProgress<'_>,
    ) -> Result<Found, ReadError> {
        let roles = self.surveyor.roles(pipelines)?;
        let masks = masks(viewer, pipelines);
        let (group, scheduler) = &*self.scheduler;
        let waits_long = pipelines.iter().any(|pipeline| pipeline.long_waits.is_some());
        let reads_scheduler = filter.has_place(Place::Scheduler) && waits_long;

        let mut places: HashMap<Arc<str>, (usize, Place)> = HashMap::new();
        let (mut whole, mut unfinished) = (Vec::new(), Vec::new());
        if reads_scheduler {
            // Its end is looked up before those of the topics to which jobs are released.
            whole.push((scheduler.state.clone(), None));
            unfinished.push((group.clone(), scheduler.ingest.clone()));
        }
        for (index, (pipeline, roles)) in pipelines.iter().zip(roles).enumerate() {
            for (topic, role) in roles {
                let place = Place::of(role).filter(|place| filter.has_place(*place));
                let group = pipeline.reading_group(role, &self.kafka.id_prefix);
                if let (Some(place), Some(group)) = (place, group) {
                    unfinished.push((group, topic.clone()));
                    places.insert(topic, (index, place));
                }
            }
        }
        let by_name: HashMap<&str, usize> = (0..)
            .zip(pipelines)
            .map(|(index, pipeline)| (&*pipeline.name, index))
            .collect();
        let mut tally = Tally::new(filter, limit, now);
        let scan = Scan::new(&self.kafka, &whole, &unfinished)?;
        let mut visit = |record: &Record| {
            let topic = &record.position.topic;
            if let Some((pipeline, place)) = places.get(topic) {
                tally.add(*pipeline, *place, record, &masks[*pipeline]);
            } else if *topic == scheduler.ingest {
                let waiting = long_wait::unwrap_any(record);
                let waiting = waiting.and_then(|(name, record)| Some((*by_name.get(&*name)?, record)));
                if let Some((pipeline, record)) = waiting {
                    tally.add(pipeline, Place::Scheduler, &record, &masks[pipeline]);
                }
            } else if let Some(id) = job_id(record) {
                let waiting = long_wait::unwrap_any_state(record);
                let waiting = waiting.and_then(|(name, record)| Some((*by_name.get(&*name)?, record)));
                let waiting = waiting.as_ref();
                tally.add_state(
                    id,
                    waiting.map(|(pipeline, record)| (*pipeline, record, &masks[*pipeline])),
                );
            }
        };
        scan.run(TIMEOUT, |record, progress| {
            if let Some(record) = &record {
                visit(record);
            }
            on_progress(progress)
        })?;
        Ok(tally.finish())
    }

    /// Follows the record at a position through these pipelines. Blocks.
    pub(crate) fn trace(
        &self,
        viewer: &Viewer,
        pipelines: &[Pipeline],
        position: &Position,
        from_beginning: bool,
        now: Timestamp,
        on_progress: OnProgress<'_>,
    ) -> Result<Vec<Traced>, TraceError> {
        let roles = self.surveyor.roles(pipelines)?;
        let (_, scheduler) = &*self.scheduler;
        let is_scheduler = position.topic == scheduler.state || position.topic == scheduler.ingest;
        let having: Vec<_> = pipelines
            .iter()
            .zip(roles)
            .filter(|(_, roles)| is_scheduler || roles.contains_key(&position.topic))
            .collect();
        if having.is_empty() {
            return Err(TraceError::OtherTopic(position.topic.clone()));
        }
        let found = self.lookup(position)?;
        let (mut traced, mut before) = (Vec::new(), Progress::default());
        for (pipeline, roles) in having {
            let Some(origin) = self.origin_at(pipeline, position, found.as_ref()) else {
                continue;
            };
            let mask = viewer.mask(&pipeline.dead_letter_topic());
            let search = Search {
                scans: self,
                pipeline,
                roles,
                offset: origin.offset.to_string(),
                origin,
                mask,
                now,
            };
            let mut now = before;
            traced.push(search.run(from_beginning, &mut |progress| {
                now = Progress {
                    read: before.read + progress.read,
                    total: before.total + progress.total,
                };
                on_progress(now)
            })?);
            before = now;
        }
        match found {
            _ if !traced.is_empty() => Ok(traced),
            Some(_) => Err(TraceError::NoOrigin(position.clone())),
            None => Err(TraceError::Gone(position.clone())),
        }
    }

    fn lookup(&self, position: &Position) -> Result<Option<Record>, ReadError> {
        let lookup = Lookup::new(&self.kafka)?;
        let found = lookup.get(std::slice::from_ref(position), LOOKUP_TIMEOUT)?;
        let found = found.into_iter().flatten().next();
        Ok(found.map(|stored| stored.record))
    }

    /// Where the record at a position entered a pipeline. A record of the source that is gone was new, which is the rule.
    fn origin_at(&self, pipeline: &Pipeline, position: &Position, found: Option<&Record>) -> Option<Origin> {
        let (_, scheduler) = &*self.scheduler;
        let is_source = position.topic == pipeline.source;
        let Some(record) = found else {
            return is_source.then(|| Origin {
                topic: position.topic.clone(),
                partition: position.partition,
                offset: position.offset,
                timestamp: None,
            });
        };
        if is_source {
            let arrival = Arrival::read(pipeline, record);
            return Some(arrival.unwrap_or_else(|_| Arrival::salvaged(record)).origin);
        }
        let unwrapped = if position.topic == scheduler.ingest {
            Some(long_wait::unwrap(&pipeline.name, record)?)
        } else if position.topic == scheduler.state {
            Some(long_wait::unwrap_state(&pipeline.name, record)?)
        } else {
            None
        };
        let reserved = ReservedHeaders::read(unwrapped.as_ref().unwrap_or(record)).ok()?;
        let origin = reserved.origin().ok()?;
        reserved.is_retry_of(&pipeline.name).then_some(origin)
    }
}

/// What is masked for the caller in each pipeline.
fn masks<'v>(viewer: &'v Viewer, pipelines: &[Pipeline]) -> Vec<Mask<'v>> {
    let topics = pipelines.iter().map(Pipeline::dead_letter_topic);
    topics.map(|topic| viewer.mask(&topic)).collect()
}

fn job_id(state: &Record) -> Option<JobId> {
    std::str::from_utf8(state.key.as_deref()?).ok()?.parse().ok()
}

/// The search for the copies of a record in a pipeline.
struct Search<'s> {
    scans: &'s Scans,
    pipeline: &'s Pipeline,
    roles: HashMap<Arc<str>, TopicRole>,
    origin: Origin,
    /// The offset of the origin, as headers contain it.
    offset: String,
    mask: Mask<'s>,
    now: Timestamp,
}

impl Search<'_> {
    fn run(self, from_beginning: bool, on_progress: OnProgress<'_>) -> Result<Traced, ReadError> {
        let Self {
            scans,
            pipeline,
            origin,
            ..
        } = &self;
        let (group, scheduler) = &*scans.scheduler;
        let position = Position {
            topic: origin.topic.clone(),
            partition: origin.partition,
            offset: origin.offset,
        };
        let source = scans.lookup(&position)?;
        let timestamp = source
            .as_ref()
            .map_or(origin.timestamp, |source| source.timestamp);
        // A time in the future says nothing about when copies were written.
        let since = timestamp
            .filter(|timestamp| !from_beginning && *timestamp <= self.now)
            .map(|timestamp| Timestamp::from_millis(timestamp.as_millis().saturating_sub(SLACK_MILLIS)));

        let groups = self.roles.iter().filter_map(|(topic, role)| {
            let group = pipeline.reading_group(*role, &scans.kafka.id_prefix)?;
            Some((group, topic.clone()))
        });
        let mut groups: Vec<(String, Arc<str>)> = groups.collect();
        let mut whole: Vec<(Arc<str>, Option<Timestamp>)> = Vec::new();
        if pipeline.long_waits.is_some() {
            groups.push((group.clone(), scheduler.ingest.clone()));
            whole.push((scheduler.state.clone(), since));
            whole.push((scheduler.ingest.clone(), since));
        }
        for (topic, role) in &self.roles {
            let holds_copies = *role != TopicRole::Source || pipeline.return_to == ReturnTo::Source;
            if holds_copies {
                whole.push((topic.clone(), since));
            }
        }
        // What is complete now has its next copy before the ends that the scan looks up.
        let positions = GroupPositions::read(&scans.kafka, &groups)?;
        let scan = Scan::new(&scans.kafka, &whole, &[])?;
        let mut copies = Copies::default();
        let mut jobs: HashMap<JobId, Copy> = HashMap::new();
        scan.run(TIMEOUT, |record, progress| {
            if let Some(record) = &record {
                let topic = &record.position.topic;
                if *topic == scheduler.state {
                    self.job(record, &mut jobs, &mut copies);
                } else if *topic == scheduler.ingest {
                    let waiting = long_wait::unwrap(&pipeline.name, record);
                    let is_unread = positions.is_unread(&record.position);
                    if let Some(waiting) = waiting.filter(|waiting| self.is_copy(waiting)) {
                        copies.add(self.copy(Spot::Scheduler, &waiting, is_unread));
                    }
                } else if let Some(role) = self.roles.get(topic)
                    && record.position != position
                    && self.is_copy(record)
                {
                    let is_read = pipeline.reading_group(*role, "").is_some();
                    let is_unread = is_read && positions.is_unread(&record.position);
                    copies.add(self.copy(Spot::Topic(*role), record, is_unread));
                }
            }
            on_progress(progress)
        })?;
        for (_, job) in jobs {
            copies.add(Copy {
                is_unread: true,
                ..job
            });
        }
        let entered = Entered {
            is_unread: positions.is_unread(&position),
            is_found: source.is_some(),
            position,
            timestamp,
        };
        let (copies, is_truncated) = copies.finish();
        Ok(Traced {
            pipeline: pipeline.name.clone(),
            life: life(pipeline, &entered, copies),
            origin: entered.position,
            origin_timestamp: timestamp,
            is_truncated,
            since,
        })
    }

    /// A state of a job. Those that are scheduled are in `jobs` until a newer state has ended.
    fn job(&self, state: &Record, jobs: &mut HashMap<JobId, Copy>, copies: &mut Copies) {
        let Some(id) = job_id(state) else { return };
        let waiting = long_wait::unwrap_state(&self.pipeline.name, state);
        match waiting.filter(|waiting| self.is_copy(waiting)) {
            Some(waiting) => drop(jobs.insert(id, self.copy(Spot::Scheduler, &waiting, false))),
            // It was dispatched, and its wait is a part of the life.
            None => jobs.remove(&id).into_iter().for_each(|job| copies.add(job)),
        }
    }

    /// Whether it is a copy of the record, in this pipeline.
    fn is_copy(&self, record: &Record) -> bool {
        let Origin {
            topic,
            partition,
            offset,
            ..
        } = &self.origin;
        // Nearly all others differ in it.
        let is_near = record
            .headers
            .last(ORIGINAL_OFFSET)
            .is_some_and(|text| text == self.offset.as_bytes());
        is_near
            && ReservedHeaders::read(record).is_ok_and(|reserved| {
                reserved.is_retry_of(&self.pipeline.name)
                    && reserved.origin().is_ok_and(|found| {
                        (&found.topic, found.partition, found.offset) == (topic, *partition, *offset)
                    })
            })
    }

    fn copy(&self, spot: Spot, record: &Record, is_unread: bool) -> Copy {
        let visible = Visible::of(record, &self.mask);
        Copy {
            spot,
            position: record.position.clone(),
            facts: visible.facts(record, false, self.now),
            message: visible.message(),
            is_unread,
        }
    }
}
