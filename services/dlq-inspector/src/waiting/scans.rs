//! Reads the topics of pipelines: for what waits in them, for the copies of one record, and for what has a key, a header or a field.

pub(crate) mod find;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::headers::{ORIGINAL_OFFSET, Origin, ReservedHeaders};
use redeliver_core::pipeline::{ReturnTo, TopicRole, retry_tier_group};
use redeliver_core::redrive::REDRIVE_ID;
use redeliver_core::route::Arrival;
use redeliver_core::{HumanDuration, JobId, Pipeline, Position, Record, SchedulerTopics, Timestamp};
use redeliver_kafka::backlog::GroupPositions;
use redeliver_kafka::lookup::Lookup;
use redeliver_kafka::reader::{ReadError, TopicClient};
use redeliver_kafka::scan::{Progress, Scan};
use redeliver_kafka::survey::Surveyor;
use redeliver_kafka::{KafkaSettings, TopicId};
use redeliver_proto::long_wait;
use redeliver_runtime::Config;
use redeliver_service::topics;
use redeliver_service::waiting_actions::{Passed, WaitingActions};
use redeliver_store::Replica;

use super::Place;
use super::decision::{Decision, Decisions};
use super::facts::Visible;
use super::limit::{SCANS, ScanLimit};
use super::tally::{Detail, Filter, Found, Tally};
use super::timeline::{
    Copies, Entered, Location, MAX_COPIES, RecordCopy, Timeline, may_be_in_source, timeline,
};
use crate::access::Viewer;
use crate::ledger;
use crate::letter::content_hash;
use crate::masking::Mask;
use crate::redrive::job::Job;

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
    pub(crate) limit: ScanLimit,
    actions: Replica<WaitingActions>,
}

/// Gets how much was read, and breaks if no caller waits for the rest.
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
    /// The topic has fewer partitions.
    #[error("there is no record at {0}: the topic has {1} partitions")]
    NoPartition(Position, i32),
    /// The partition ends before.
    #[error("there is no record at {0}: the partition ends at offset {1}")]
    NotWritten(Position, i64),
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
    pub(crate) timeline: Timeline,
    pub(crate) is_truncated: bool,
    pub(crate) since: Option<Timestamp>,
}

impl Scans {
    pub(crate) fn new(
        config: &Config,
        kafka: &KafkaSettings,
        surveyor: Surveyor,
        actions: Replica<WaitingActions>,
    ) -> Self {
        let scheduler = &config.scheduler;
        Self {
            kafka: kafka.clone(),
            surveyor,
            pipelines: topics::pipelines(config).into(),
            scheduler: Arc::new((kafka.id(&scheduler.group), scheduler.topics())),
            limit: ScanLimit::new(SCANS),
            actions,
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

    /// The records of these topics that operators have had acted on.
    fn moved<'t>(&self, topics: impl Iterator<Item = &'t Arc<str>>) -> Result<Moved, ReadError> {
        let actions = self.actions.state().unwrap_or_default();
        let topics: Vec<&str> = topics.map(|topic| &**topic).collect();
        let ids = match actions.is_empty() {
            true => BTreeMap::new(),
            false => TopicClient::new(&self.kafka)?.known_ids(&topics)?,
        };
        Ok(Moved { actions, ids })
    }

    /// What groups of tiers have completed in these topics, and their ids. Blocks.
    pub(crate) fn passed(&self, topics: &[(HumanDuration, Arc<str>)]) -> Result<Passed, ReadError> {
        let names: Vec<&str> = topics.iter().map(|(_, topic)| &**topic).collect();
        let client = TopicClient::new(&self.kafka)?;
        let ids = client.known_ids(&names)?;
        let mut missing = BTreeSet::new();
        for topic in names.into_iter().filter(|topic| !ids.contains_key(*topic)) {
            match client.partitions(topic) {
                Err(ReadError::Missing(_)) => _ = missing.insert(topic.to_owned()),
                // A client that does not see the topic does not know.
                Ok(_) | Err(ReadError::Denied(_)) => {}
                Err(error) => return Err(error),
            }
        }
        let groups = topics.iter().map(|(tier, topic)| {
            let group = retry_tier_group(&self.kafka.id_prefix, *tier);
            (group, topic.clone())
        });
        let positions = GroupPositions::read(&self.kafka, &groups.collect::<Vec<_>>())?;
        Ok(Passed {
            positions: positions.of_topics(&ids),
            ids,
            missing,
        })
    }

    /// Whether the broker tells the id of this topic, which exists. Blocks.
    pub(crate) fn has_id(&self, topic: &str) -> Result<bool, ReadError> {
        Ok(TopicClient::new(&self.kafka)?.id(topic)?.is_some())
    }

    /// Where partitions end. Leaves out those that do not exist. Blocks.
    pub(crate) fn ends(
        &self,
        partitions: &[(Arc<str>, i32)],
    ) -> Result<BTreeMap<(Arc<str>, i32), i64>, ReadError> {
        let topics = TopicClient::new(&self.kafka)?;
        let mut existing = Vec::new();
        for (topic, partition) in partitions {
            match topics.partitions(topic) {
                Ok(count) if *partition < count => existing.push((topic.clone(), *partition)),
                Ok(_) | Err(ReadError::Missing(_)) => {}
                Err(error) => return Err(error),
            }
        }
        topics.ends(&existing)
    }

    /// Finds the waiting records of pipelines that match. Blocks.
    pub(crate) fn waiting(
        &self,
        viewer: &Viewer,
        pipelines: &[Pipeline],
        filter: Filter,
        detail: Detail,
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
            whole.push((scheduler.state.clone(), filter.states_since));
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
        // A job and its command are in the partition of its shard.
        let partition = filter.job.map(JobId::shard);
        let mut tally = Tally::new(filter, detail, now);
        // What its tier skips does not wait any more.
        let moved = self.moved(places.keys())?;
        let scan = Scan::of_partitions(&self.kafka, &whole, &unfinished, partition)?;
        let mut visit = |record: &Record| {
            let topic = &record.position.topic;
            if let Some((pipeline, place)) = places.get(topic) {
                if !moved.contains(&record.position) {
                    tally.add(*pipeline, *place, record, &masks[*pipeline]);
                }
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

    /// How many records of a redrive wait, which has written some at these positions: a pipeline that reads them there has not processed them yet, or will do so
    /// again. Blocks.
    pub(crate) fn redriven(
        &self,
        job: &Job,
        written: &[Position],
        timeout: Duration,
    ) -> Result<u64, ReadError> {
        let enters = |pipeline: &Pipeline, topic: &str| {
            let topics = pipeline.worker_topics(true);
            topics.iter().any(|read| **read == *topic)
        };
        let destinations = &job.spec().destinations;
        let pipelines = self.pipelines.iter().filter(|pipeline| {
            let mut topics = destinations.iter().map(|count| &*count.topic);
            topics.any(|topic| enters(pipeline, topic))
        });
        let pipelines: Vec<Pipeline> = pipelines.cloned().collect();
        let mut waiting = 0;
        for (pipeline, roles) in pipelines.iter().zip(self.surveyor.roles(&pipelines)?) {
            let groups = self.groups(pipeline, &roles);
            // The next copies are written together with these positions, and so before the scan, which is not needed yet if something is unread.
            let positions = GroupPositions::read(&self.kafka, &groups)?;
            let entered = written.iter().filter(|at| enters(pipeline, &at.topic));
            waiting += match entered.filter(|at| positions.is_unread(at)).count() as u64 {
                0 => self.later_attempts(pipeline, &roles, groups, job, timeout)?,
                unread => unread,
            };
        }
        Ok(waiting)
    }

    /// How many records of a redrive wait in a pipeline that has processed all of them before.
    fn later_attempts(
        &self,
        pipeline: &Pipeline,
        roles: &HashMap<Arc<str>, TopicRole>,
        mut groups: Vec<(String, Arc<str>)>,
        job: &Job,
        timeout: Duration,
    ) -> Result<u64, ReadError> {
        let (_, scheduler) = &*self.scheduler;
        groups.retain(|(_, topic)| {
            roles.get(topic) != Some(&TopicRole::Source) || pipeline.return_to == ReturnTo::Source
        });
        let since = Some(with_slack(job.created_at()));
        let states = pipeline
            .long_waits
            .is_some()
            .then(|| (scheduler.state.clone(), since));
        let scan = Scan::new(&self.kafka, states.as_slice(), &groups)?;
        let id = job.spec().id.as_bytes();
        let is_of_job = |record: &Record| record.headers.last(REDRIVE_ID) == Some(id);
        let (mut waiting, mut scheduled) = (0, HashSet::new());
        scan.run(timeout, |record, _| {
            let Some(record) = record else {
                return ControlFlow::Continue(());
            };
            if record.position.topic == scheduler.state {
                let waits = long_wait::unwrap_state(&pipeline.name, &record);
                if waits.as_ref().is_some_and(is_of_job) {
                    scheduled.insert(record.key);
                } else {
                    scheduled.remove(&record.key);
                }
            } else if record.position.topic == scheduler.ingest {
                let waits = long_wait::unwrap(&pipeline.name, &record);
                waiting += u64::from(waits.as_ref().is_some_and(is_of_job));
            } else {
                waiting += u64::from(is_of_job(&record));
            }
            ControlFlow::Continue(())
        })?;
        Ok(waiting + scheduled.len() as u64)
    }

    /// The groups that read the topics of a pipeline.
    fn groups(&self, pipeline: &Pipeline, roles: &HashMap<Arc<str>, TopicRole>) -> Vec<(String, Arc<str>)> {
        let of_pipeline = roles.iter().filter_map(|(topic, role)| {
            let group = pipeline.reading_group(*role, &self.kafka.id_prefix)?;
            Some((group, topic.clone()))
        });
        let (group, scheduler) = &*self.scheduler;
        let waits_long = pipeline.long_waits.is_some();
        let of_scheduler = waits_long.then(|| (group.clone(), scheduler.ingest.clone()));
        of_pipeline.chain(of_scheduler).collect()
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
        self.check_position(position)?;
        let found = self.lookup(position)?;
        let mut parts = Parts {
            before: Progress::default(),
            on_progress,
        };
        let mut traced = Vec::new();
        for (pipeline, roles) in having {
            let Some(origin) = self.origin_at(pipeline, position, found.as_ref()) else {
                continue;
            };
            let search = Search {
                moved: self.moved(roles.keys())?,
                scans: self,
                pipeline,
                roles,
                offset: origin.offset.to_string(),
                origin,
                mask: viewer.mask(&pipeline.dead_letter_topic()),
                now,
            };
            traced.push(search.run(from_beginning, &mut parts)?);
        }
        match found {
            _ if !traced.is_empty() => Ok(traced),
            Some(_) => Err(TraceError::NoOrigin(position.clone())),
            None => Err(TraceError::Gone(position.clone())),
        }
    }

    /// Checks that there is or was a record at a position. One that was never written is not one that retention has removed.
    fn check_position(&self, position: &Position) -> Result<(), TraceError> {
        let Position { topic, partition, .. } = position;
        let topics = TopicClient::new(&self.kafka)?;
        let partitions = topics.partitions(topic)?;
        if !(0..partitions).contains(partition) {
            return Err(TraceError::NoPartition(position.clone(), partitions));
        }
        let (_, end) = topics.watermarks(topic, *partition)?;
        if position.offset >= end {
            return Err(TraceError::NotWritten(position.clone(), end));
        }
        Ok(())
    }

    fn lookup(&self, position: &Position) -> Result<Option<Record>, ReadError> {
        let mut lookup = Lookup::new(&self.kafka)?;
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
            return Some(entered(pipeline, record).origin);
        }
        let unwrapped = if position.topic == scheduler.ingest {
            Some(long_wait::unwrap(&pipeline.name, record)?)
        } else if position.topic == scheduler.state {
            Some(long_wait::unwrap_state(&pipeline.name, record)?)
        } else {
            None
        };
        lineage(pipeline, unwrapped.as_ref().unwrap_or(record))
    }
}

/// The history of a record of the source.
fn entered(pipeline: &Pipeline, record: &Record) -> Arrival {
    Arrival::read(pipeline, record).unwrap_or_else(|_| Arrival::salvaged(record))
}

/// Where a record entered the pipeline, as its headers say.
fn lineage(pipeline: &Pipeline, record: &Record) -> Option<Origin> {
    let reserved = ReservedHeaders::read(record).ok()?;
    let origin = reserved.origin().ok()?;
    reserved.is_retry_of(&pipeline.name).then_some(origin)
}

/// What is masked for the caller in each pipeline.
fn masks<'v>(viewer: &'v Viewer, pipelines: &[Pipeline]) -> Vec<Mask<'v>> {
    let topics = pipelines.iter().map(Pipeline::dead_letter_topic);
    topics.map(|topic| viewer.mask(&topic)).collect()
}

/// The job of a record of the state topic.
pub(crate) fn job_id(state: &Record) -> Option<JobId> {
    std::str::from_utf8(state.key.as_deref()?).ok()?.parse().ok()
}

/// Records that their tiers skip, because they were written elsewhere.
struct Moved {
    actions: Arc<WaitingActions>,
    ids: BTreeMap<String, TopicId>,
}

impl Moved {
    fn contains(&self, position: &Position) -> bool {
        !self.actions.is_empty() && self.actions.is_moved(position, &self.ids)
    }
}

/// Several scans, whose progress adds up.
struct Parts<'p> {
    before: Progress,
    on_progress: OnProgress<'p>,
}

impl Parts<'_> {
    /// Reads topics, each from a time on; `None` means from their beginning.
    fn read(
        &mut self,
        kafka: &KafkaSettings,
        topics: &[(Arc<str>, Option<Timestamp>)],
        mut visit: impl FnMut(&Record),
    ) -> Result<(), ReadError> {
        let scan = Scan::new(kafka, topics, &[])?;
        let before = self.before;
        let mut sum = Progress {
            total: before.total + scan.total(),
            ..before
        };
        scan.run(TIMEOUT, |record, progress| {
            if let Some(record) = &record {
                visit(record);
            }
            sum.read = before.read + progress.read;
            (self.on_progress)(sum)
        })?;
        self.before = sum;
        Ok(())
    }
}

/// The search for the copies of a record in a pipeline.
struct Search<'s> {
    scans: &'s Scans,
    moved: Moved,
    pipeline: &'s Pipeline,
    roles: HashMap<Arc<str>, TopicRole>,
    origin: Origin,
    /// The offset of the origin, as headers contain it.
    offset: String,
    mask: Mask<'s>,
    now: Timestamp,
}

impl Search<'_> {
    fn run(self, from_beginning: bool, parts: &mut Parts<'_>) -> Result<Traced, ReadError> {
        let Self {
            scans,
            pipeline,
            origin,
            ..
        } = &self;
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
            .map(with_slack);

        // What is complete now has its next copy before the ends that the scans look up.
        let positions = GroupPositions::read(&scans.kafka, &scans.groups(pipeline, &self.roles))?;
        let mut copies = self.copies(since, &positions, parts)?;
        let decisions = self.decisions(&copies.list, from_beginning, parts)?;
        if may_be_in_source(pipeline, &copies.list, &decisions) {
            parts.read(&scans.kafka, &[(pipeline.source.clone(), since)], |record| {
                copies.extend(self.copy_at(record, &position, &positions));
            })?;
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
            timeline: timeline(pipeline, &entered, copies, decisions),
            origin: entered.position,
            origin_timestamp: timestamp,
            is_truncated,
            since,
        })
    }

    /// The copies in the topics in which the pipeline writes some.
    fn copies(
        &self,
        since: Option<Timestamp>,
        positions: &GroupPositions,
        parts: &mut Parts<'_>,
    ) -> Result<Copies, ReadError> {
        let (_, scheduler) = &*self.scans.scheduler;
        let mut topics: Vec<(Arc<str>, Option<Timestamp>)> = Vec::new();
        if self.pipeline.long_waits.is_some() {
            topics.push((scheduler.state.clone(), since));
            topics.push((scheduler.ingest.clone(), since));
        }
        for (topic, role) in &self.roles {
            if *role != TopicRole::Source || self.pipeline.return_to == ReturnTo::Source {
                topics.push((topic.clone(), since));
            }
        }
        let origin = Position {
            topic: self.origin.topic.clone(),
            partition: self.origin.partition,
            offset: self.origin.offset,
        };
        let mut copies = Copies::default();
        let mut jobs: HashMap<JobId, RecordCopy> = HashMap::new();
        parts.read(&self.scans.kafka, &topics, |record| {
            let topic = &record.position.topic;
            if *topic == scheduler.state {
                self.job(record, &mut jobs, &mut copies);
            } else if *topic == scheduler.ingest {
                let waiting = long_wait::unwrap(&self.pipeline.name, record);
                let is_unread = positions.is_unread(&record.position);
                if let Some(waiting) = waiting.filter(|waiting| self.is_copy(waiting)) {
                    copies.add(self.copy(Location::Scheduler, &waiting, is_unread));
                }
            } else {
                copies.extend(self.copy_at(record, &origin, positions));
            }
        })?;
        for (_, job) in jobs {
            copies.add(RecordCopy {
                is_unread: true,
                ..job
            });
        }
        Ok(copies)
    }

    /// A record of a topic of the pipeline, if it is a copy.
    fn copy_at(&self, record: &Record, origin: &Position, positions: &GroupPositions) -> Option<RecordCopy> {
        let role = self.roles.get(&record.position.topic)?;
        if record.position == *origin || !self.is_copy(record) {
            return None;
        }
        let is_read = self.pipeline.reading_group(*role, "").is_some();
        let is_unread =
            is_read && positions.is_unread(&record.position) && !self.moved.contains(&record.position);
        Some(self.copy(Location::Topic(*role), record, is_unread))
    }

    /// The decisions about the dead letters among the copies.
    fn decisions(
        &self,
        copies: &[RecordCopy],
        from_beginning: bool,
        parts: &mut Parts<'_>,
    ) -> Result<HashMap<Position, Decision>, ReadError> {
        let dead = || copies.iter().filter(|copy| copy.is_dead());
        let wanted: HashMap<Position, _> = dead()
            .filter_map(|copy| Some((copy.position.clone(), (copy.content?, copy.facts.written))))
            .collect();
        if wanted.is_empty() {
            return Ok(HashMap::new());
        }
        // An entry is written after its dead letter.
        let since = dead().map(|copy| copy.facts.written).min().flatten();
        let since = since.filter(|_| !from_beginning).map(with_slack);
        let mut decisions = Decisions::of(wanted);
        parts.read(&self.scans.kafka, &[(ledger::TOPIC.into(), since)], |record| {
            decisions.apply(record);
        })?;
        Ok(decisions.finish())
    }

    /// A state of a job. Those that are scheduled are in `jobs` until a newer state has ended.
    fn job(&self, state: &Record, jobs: &mut HashMap<JobId, RecordCopy>, copies: &mut Copies) {
        let Some(id) = job_id(state) else { return };
        let waiting = long_wait::unwrap_state(&self.pipeline.name, state);
        match waiting.filter(|waiting| self.is_copy(waiting)) {
            Some(waiting) => {
                let copy = self.copy(Location::Scheduler, &waiting, false);
                if jobs.len() < MAX_COPIES || jobs.contains_key(&id) {
                    jobs.insert(id, copy);
                } else {
                    copies.add(copy);
                }
            }
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

    fn copy(&self, location: Location, record: &Record, is_unread: bool) -> RecordCopy {
        let visible = Visible::of(record, &self.mask);
        let is_dead = location == Location::Topic(TopicRole::DeadLetter);
        RecordCopy {
            content: is_dead.then(|| content_hash(record)),
            location,
            position: record.position.clone(),
            facts: visible.facts(record, false, self.now),
            message: visible.message(),
            is_unread,
        }
    }
}

/// The earliest timestamp of records written after this time. Kafka takes negative ones for something else.
pub(crate) fn with_slack(time: Timestamp) -> Timestamp {
    Timestamp::from_millis(time.as_millis().saturating_sub(SLACK_MILLIS).max(0))
}
