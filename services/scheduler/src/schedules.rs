//! The format of schedules in the state topic and the API: conversions between protobuf and `redeliver-recurrence`.
//!
//! Errors name fields of `ScheduleSpec`, such as `cron.expression`.
//!
//! A shard and its index treat a schedule as a job of the kind [`Kind::Schedule`](crate::job::Kind), which is due when the shard must
//! decide on the schedule: its entry.

use std::sync::Arc;

use bytes::Bytes;
use prost_types::{Duration as ProtoDuration, Timestamp as ProtoTimestamp};
use redeliver_core::{HumanDuration, Timestamp};
use redeliver_proto::convert::{from_duration, from_timestamp, to_duration, to_timestamp};
use redeliver_proto::{Message as _, v1};
use redeliver_recurrence::{
    Definition, Gap, Invalid, Misfire, MisfirePolicy, Occurrence, Overlap, Preview, Progress, Reason,
    Recurrence, Schedule, ScheduleId, Timing,
};

use crate::codec::error::CodecError;
use crate::job::{Job, JobId, JobState, Kind, Payload, Priority, RequestHash};
use crate::request::{key_hash, shard_of};

/// The version of the format of schedules that this scheduler writes, and the latest one that it reads.
pub const FORMAT: u32 = 0;

/// A schedule as the state topic stores it.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredSchedule {
    /// The id and the definition.
    pub schedule: Schedule,
    /// The job that each occurrence creates.
    pub job: v1::JobTemplate,
    /// When it was created.
    pub created: Timestamp,
    /// How far it has come.
    pub progress: Progress,
    /// The number of skipped occurrences.
    pub skipped: u64,
    /// When to decide on it next; `None` while there is nothing to decide.
    pub next: Option<Timestamp>,
    /// Why the next occurrence cannot create its job.
    pub problem: Option<String>,
}

/// When to decide on a schedule that is paused or finished: never. Schedules are listed by this time, so these come last.
pub(crate) const NEVER: Timestamp = Timestamp::from_millis(253_402_300_799_999);

/// Why a record of the state topic cannot be decoded as a schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// It is not the protobuf message, or a part is missing.
    #[error("not a schedule record: {0}")]
    Malformed(String),
    /// A newer scheduler wrote it.
    #[error("its format is {0}, but this version supports only formats up to {FORMAT}")]
    Newer(u32),
    /// The definition was valid when it was accepted and is not valid here, such as a zone that this host does not know.
    #[error("its definition is not valid here")]
    Definition(#[source] Invalid),
}

/// Reads a definition. Its job is not read.
///
/// # Errors
/// The first invalid field of `ScheduleSpec`.
pub fn read_spec(spec: &v1::ScheduleSpec) -> Result<Recurrence, Invalid> {
    let start = time("start", spec.start.as_ref())?;
    let timing = match &spec.timing {
        Some(v1::schedule_spec::Timing::Cron(cron)) => Timing::Cron {
            expression: cron.expression.clone(),
            zone: cron.zone.clone().unwrap_or_else(|| "UTC".to_owned()),
            gap: gap(cron.gap)?,
            overlap: overlap(cron.overlap)?,
        },
        Some(v1::schedule_spec::Timing::Every(every)) => Timing::Every {
            interval: duration("every.interval", every.interval.as_ref())?
                .ok_or_else(|| invalid("every.interval", "is missing; set a duration of at least 1s"))?,
            anchor: time("every.anchor", every.anchor.as_ref())?,
        },
        None => return Err(invalid("timing", "is missing; set cron or every")),
    };
    Recurrence::new(Definition {
        timing,
        start,
        end: time("end", spec.end.as_ref())?,
        max_count: spec.max_count,
        jitter: duration("jitter", spec.jitter.as_ref())?.unwrap_or_default(),
        misfire: misfire(spec.misfire.as_ref())?,
    })
}

/// Writes a definition, with all defaults filled in.
#[must_use]
pub fn write_spec(recurrence: &Recurrence, job: Option<v1::JobTemplate>) -> v1::ScheduleSpec {
    let definition = recurrence.definition();
    let timing = match &definition.timing {
        Timing::Cron {
            expression,
            zone,
            gap,
            overlap,
        } => v1::schedule_spec::Timing::Cron(v1::CronTiming {
            expression: expression.clone(),
            zone: Some(zone.clone()),
            gap: match gap {
                Gap::Shift => v1::GapPolicy::Shift,
                Gap::Skip => v1::GapPolicy::Skip,
            }
            .into(),
            overlap: match overlap {
                None => v1::OverlapPolicy::Unspecified,
                Some(Overlap::First) => v1::OverlapPolicy::First,
                Some(Overlap::Both) => v1::OverlapPolicy::Both,
            }
            .into(),
        }),
        Timing::Every { interval, anchor } => v1::schedule_spec::Timing::Every(v1::IntervalTiming {
            interval: Some(to_duration(*interval)),
            anchor: anchor.map(to_timestamp),
        }),
    };
    let (policy, limit) = match definition.misfire.policy {
        MisfirePolicy::Skip => (v1::MisfirePolicy::Skip, None),
        MisfirePolicy::Once => (v1::MisfirePolicy::Once, None),
        MisfirePolicy::All { limit } => (v1::MisfirePolicy::All, Some(limit)),
    };
    let jitter = Some(definition.jitter).filter(|jitter| jitter.as_millis() > 0);
    v1::ScheduleSpec {
        timing: Some(timing),
        start: definition.start.map(to_timestamp),
        end: definition.end.map(to_timestamp),
        max_count: definition.max_count,
        jitter: jitter.map(to_duration),
        misfire: Some(v1::Misfire {
            policy: policy.into(),
            limit,
            grace: Some(to_duration(definition.misfire.grace)),
        }),
        job,
    }
}

/// Writes an occurrence of a preview.
#[must_use]
pub fn write_preview(preview: &Preview) -> v1::OccurrencePreview {
    let (reason, missing) = match preview.reason {
        Reason::Regular => (v1::OccurrenceReason::Regular, None),
        Reason::Anchor => (v1::OccurrenceReason::Anchor, None),
        Reason::ShiftedByGap { missing } => (v1::OccurrenceReason::ShiftedByGap, Some(missing)),
        Reason::FirstOfOverlap => (v1::OccurrenceReason::FirstOfOverlap, None),
        Reason::SecondOfOverlap => (v1::OccurrenceReason::SecondOfOverlap, None),
    };
    v1::OccurrencePreview {
        nominal_time: Some(to_timestamp(preview.nominal)),
        latest_due_time: Some(to_timestamp(preview.latest_due)),
        local_time: preview.local.clone(),
        reason: reason.into(),
        missing_local_time: missing.map(|missing| missing.to_string()).unwrap_or_default(),
    }
}

/// Encodes a schedule as the value of a state record.
#[must_use]
pub fn encode(stored: &StoredSchedule) -> Bytes {
    to_record(stored).encode_to_vec().into()
}

fn to_record(stored: &StoredSchedule) -> v1::ScheduleRecord {
    let progress = stored.progress;
    v1::ScheduleRecord {
        id: stored.schedule.id().to_string(),
        spec: Some(write_spec(stored.schedule.recurrence(), Some(stored.job.clone()))),
        created_ms: stored.created.as_millis(),
        decided_ms: progress.position.as_millis(),
        dispatched: progress.count,
        skipped: stored.skipped,
        paused: progress.is_paused,
        revision: progress.revision,
        next_ms: stored.next.map(Timestamp::as_millis),
        problem: stored.problem.clone().unwrap_or_default(),
        format: FORMAT,
    }
}

/// Decodes the value of a state record.
///
/// # Errors
/// When the bytes are not a schedule, a newer scheduler wrote them, or the definition is not valid here.
pub fn decode(bytes: &Bytes) -> Result<StoredSchedule, RecordError> {
    let mut record = read(bytes)?;
    let mut spec = record.spec.take().unwrap_or_default();
    let job = spec.job.take().unwrap_or_default();
    let recurrence = read_spec(&spec).map_err(RecordError::Definition)?;
    to_stored(&record, recurrence, job)
}

fn to_stored(
    record: &v1::ScheduleRecord,
    recurrence: Recurrence,
    job: v1::JobTemplate,
) -> Result<StoredSchedule, RecordError> {
    Ok(StoredSchedule {
        schedule: Schedule::new(read_id(record)?, recurrence),
        job,
        created: Timestamp::from_millis(record.created_ms),
        progress: Progress {
            position: Timestamp::from_millis(record.decided_ms),
            count: record.dispatched,
            is_paused: record.paused,
            revision: record.revision,
        },
        skipped: record.skipped,
        next: record.next_ms.map(Timestamp::from_millis),
        problem: (!record.problem.is_empty()).then(|| record.problem.clone()),
    })
}

/// The schedule of a state record whose definition is not valid here, with another definition.
///
/// # Errors
/// When the bytes are not a schedule, or a newer scheduler wrote them.
pub(crate) fn replace_definition(
    bytes: &Bytes,
    recurrence: Recurrence,
    job: v1::JobTemplate,
    now: Timestamp,
) -> Result<StoredSchedule, RecordError> {
    let record = read(bytes)?;
    let mut stored = to_stored(&record, recurrence, job)?;
    stored.progress = stored.progress.redefine(now);
    Ok(stored)
}

/// Parses a state record without its definition, which may not be valid here.
fn read(bytes: &Bytes) -> Result<v1::ScheduleRecord, RecordError> {
    let record = v1::ScheduleRecord::decode(bytes.clone())
        .map_err(|error| RecordError::Malformed(error.to_string()))?;
    if record.format > FORMAT {
        return Err(RecordError::Newer(record.format));
    }
    let missing = |field: &str| RecordError::Malformed(format!("field `{field}` is missing"));
    let spec = record.spec.as_ref().ok_or_else(|| missing("spec"))?;
    if spec.job.is_none() {
        return Err(missing("spec.job"));
    }
    Ok(record)
}

fn read_id(record: &v1::ScheduleRecord) -> Result<ScheduleId, RecordError> {
    let id = record.id.parse();
    id.map_err(|error: Invalid| RecordError::Malformed(error.to_string()))
}

/// The state record of a schedule on which nothing can be decided before `next`, because of `problem`.
///
/// # Errors
/// When the bytes are not a schedule, or a newer scheduler wrote them.
pub(crate) fn postpone(bytes: &Bytes, problem: String, next: Timestamp) -> Result<Bytes, RecordError> {
    let mut record = read(bytes)?;
    (record.problem, record.next_ms) = (problem, Some(next.as_millis()));
    Ok(record.encode_to_vec().into())
}

/// The shard that owns a schedule, by its id.
#[must_use]
pub fn shard(id: &str, partitions: i32) -> i32 {
    shard_of("", id, partitions)
}

/// The id of the entry for a schedule in a shard and its index.
#[must_use]
pub fn entry_id(id: &str, shard: i32) -> JobId {
    JobId::of_schedule(shard, key_hash("", id))
}

/// The entry of a schedule for a shard and its index, from its state record.
///
/// # Errors
/// When the bytes are not a schedule, or a newer scheduler wrote them.
pub(crate) fn entry(id: JobId, bytes: &Bytes) -> Result<Job, CodecError> {
    let record = read(bytes).map_err(|error| match error {
        RecordError::Newer(_) => CodecError::Newer(error.to_string()),
        RecordError::Malformed(_) | RecordError::Definition(_) => CodecError::Malformed(error.to_string()),
    })?;
    Ok(entry_of(id, record, bytes.clone()))
}

fn entry_of(id: JobId, record: v1::ScheduleRecord, bytes: Bytes) -> Job {
    let template = record.spec.and_then(|spec| spec.job).unwrap_or_default();
    Job {
        id,
        app: template.app.into(),
        kind: Kind::Schedule,
        state: JobState::Scheduled,
        priority: Priority::High,
        due: record.next_ms.map_or(NEVER, Timestamp::from_millis),
        accepted: Timestamp::from_millis(record.created_ms),
        revision: record.revision,
        idempotency_key: None,
        request_hash: RequestHash::default(),
        request_id: None,
        topic: Arc::default(),
        payload: Payload {
            value: Some(bytes),
            ..Payload::default()
        },
        ended: None,
        expires: None,
        occurrence: Some(record.id.into()),
        released: None,
    }
}

/// The id and the application of a schedule, also from a state record that cannot be used, such as one of a newer scheduler. `None` if
/// it cannot be read at all.
pub(crate) fn id_and_app(bytes: &Bytes) -> Option<(String, String)> {
    let record = v1::ScheduleRecord::decode(bytes.clone()).ok()?;
    let job = record.spec?.job?;
    Some((record.id, job.app))
}

/// A schedule as the API shows it, from its state record. If the definition is not valid here, the next occurrence is left out.
///
/// # Errors
/// When the bytes are not a schedule, or a newer scheduler wrote them.
pub(crate) fn show(bytes: &Bytes, with_payload: bool) -> Result<v1::Schedule, RecordError> {
    let record = read(bytes)?;
    let next = match decode(bytes) {
        Ok(stored) => stored.next_occurrence(),
        Err(RecordError::Definition(_)) => None,
        Err(error) => return Err(error),
    };
    let state = state_of(record.paused, record.next_ms.is_some());
    let mut spec = record.spec;
    if let Some(job) = spec.as_mut().and_then(|spec| spec.job.as_mut())
        && !with_payload
    {
        (job.data, job.key, job.headers) = (Bytes::new(), None, Vec::new());
    }
    let time = |millis| Some(to_timestamp(Timestamp::from_millis(millis)));
    Ok(v1::Schedule {
        id: record.id,
        spec,
        state: state.into(),
        revision: record.revision,
        created_at: time(record.created_ms),
        decided_until: time(record.decided_ms),
        dispatched: record.dispatched,
        skipped: record.skipped,
        next_nominal_time: next.map(|next| to_timestamp(next.nominal)),
        next_due_time: next.map(|next| to_timestamp(next.due)),
        problem: record.problem,
    })
}

fn state_of(is_paused: bool, has_next: bool) -> v1::ScheduleState {
    match (is_paused, has_next) {
        (true, _) => v1::ScheduleState::Paused,
        (false, true) => v1::ScheduleState::Active,
        (false, false) => v1::ScheduleState::Finished,
    }
}

/// The state of a schedule once these are its times, from its state record.
///
/// # Errors
/// When the bytes are not a schedule, or a newer scheduler wrote them.
pub(crate) fn state_with(
    bytes: &Bytes,
    recurrence: Recurrence,
    now: Timestamp,
) -> Result<v1::ScheduleState, RecordError> {
    let stored = match decode(bytes) {
        Ok(mut stored) => {
            let job = stored.job.clone();
            stored.redefine(recurrence, job, now);
            stored
        }
        Err(RecordError::Definition(_)) => {
            replace_definition(bytes, recurrence, v1::JobTemplate::default(), now)?
        }
        Err(error) => return Err(error),
    };
    Ok(stored.state())
}

impl StoredSchedule {
    /// A schedule that is created at `now`.
    pub(crate) fn new(id: ScheduleId, recurrence: Recurrence, job: v1::JobTemplate, now: Timestamp) -> Self {
        let mut stored = Self {
            schedule: Schedule::new(id, recurrence),
            job,
            created: now,
            progress: Progress::new(now),
            skipped: 0,
            next: None,
            problem: None,
        };
        stored.plan(now);
        stored
    }

    /// Its entry for a shard and its index.
    pub(crate) fn entry(&self, id: JobId) -> Job {
        let record = to_record(self);
        let bytes = record.encode_to_vec().into();
        entry_of(id, record, bytes)
    }

    /// It with another definition from `now` on. If the times change, occurrences up to `now` that were not decided on are skipped.
    /// Returns their number.
    pub(crate) fn redefine(&mut self, recurrence: Recurrence, job: v1::JobTemplate, now: Timestamp) -> u64 {
        self.job = job;
        if *self.schedule.recurrence() == recurrence {
            self.progress = self.progress.revise();
            return 0;
        }
        let skipped = self.schedule.recurrence().count(self.progress.position, now);
        self.skipped += skipped;
        self.progress = self.progress.redefine(now);
        self.schedule = Schedule::new(self.schedule.id().clone(), recurrence);
        skipped
    }

    /// Whether it is paused, or has no further occurrence.
    pub(crate) fn state(&self) -> v1::ScheduleState {
        state_of(self.progress.is_paused, self.next_occurrence().is_some())
    }

    /// The next occurrence; `None` if the schedule is paused or finished.
    #[must_use]
    pub fn next_occurrence(&self) -> Option<Occurrence> {
        self.schedule.next(self.progress)
    }

    /// Decides on the schedule again when its next occurrence is due. If it is due already, other schedules that are due come first.
    pub(crate) fn plan(&mut self, now: Timestamp) {
        self.next = self.next_occurrence().map(|next| next.due.max(now));
        self.problem = None;
    }

    /// Whether it has this definition and this job.
    pub(crate) fn is_same(&self, recurrence: &Recurrence, job: &v1::JobTemplate) -> bool {
        self.schedule.recurrence() == recurrence && self.job == *job
    }
}

fn invalid(field: &'static str, problem: impl Into<String>) -> Invalid {
    Invalid {
        field,
        problem: problem.into(),
    }
}

fn gap(number: i32) -> Result<Gap, Invalid> {
    match v1::GapPolicy::try_from(number) {
        Ok(v1::GapPolicy::Unspecified | v1::GapPolicy::Shift) => Ok(Gap::Shift),
        Ok(v1::GapPolicy::Skip) => Ok(Gap::Skip),
        Err(_) => {
            let problem = format!("is {number}; expected 1 (shift) or 2 (skip)");
            Err(invalid("cron.gap", problem))
        }
    }
}

fn overlap(number: i32) -> Result<Option<Overlap>, Invalid> {
    match v1::OverlapPolicy::try_from(number) {
        Ok(v1::OverlapPolicy::Unspecified) => Ok(None),
        Ok(v1::OverlapPolicy::First) => Ok(Some(Overlap::First)),
        Ok(v1::OverlapPolicy::Both) => Ok(Some(Overlap::Both)),
        Err(_) => {
            let problem = format!("is {number}; expected 1 (first) or 2 (both)");
            Err(invalid("cron.overlap", problem))
        }
    }
}

fn misfire(misfire: Option<&v1::Misfire>) -> Result<Misfire, Invalid> {
    let default = Misfire::default();
    let Some(misfire) = misfire else {
        return Ok(default);
    };
    let policy = match v1::MisfirePolicy::try_from(misfire.policy) {
        Ok(v1::MisfirePolicy::Unspecified | v1::MisfirePolicy::Once) => MisfirePolicy::Once,
        Ok(v1::MisfirePolicy::Skip) => MisfirePolicy::Skip,
        Ok(v1::MisfirePolicy::All) => MisfirePolicy::All {
            limit: misfire
                .limit
                .ok_or_else(|| invalid("misfire.limit", "is missing; set it to 1 to 1000"))?,
        },
        Err(_) => {
            let problem = format!("is {}; expected 1 (skip), 2 (once) or 3 (all)", misfire.policy);
            return Err(invalid("misfire.policy", problem));
        }
    };
    if let (Some(limit), MisfirePolicy::Skip | MisfirePolicy::Once) = (misfire.limit, policy) {
        let problem = format!("is {limit}, but only the policy `all` has a limit; leave it out");
        return Err(invalid("misfire.limit", problem));
    }
    let grace = duration("misfire.grace", misfire.grace.as_ref())?;
    Ok(Misfire {
        policy,
        grace: grace.unwrap_or(default.grace),
    })
}

fn time(field: &'static str, time: Option<&ProtoTimestamp>) -> Result<Option<Timestamp>, Invalid> {
    let problem = "is not a valid google.protobuf.Timestamp; use a time from 1970 to 9999";
    time.map(|time| from_timestamp(time).ok_or_else(|| invalid(field, problem)))
        .transpose()
}

fn duration(field: &'static str, duration: Option<&ProtoDuration>) -> Result<Option<HumanDuration>, Invalid> {
    let problem = "is not a valid google.protobuf.Duration; use one that is not negative";
    duration
        .map(|duration| from_duration(duration).ok_or_else(|| invalid(field, problem)))
        .transpose()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use redeliver_testkit::fuzz;

    use super::*;

    fn cron() -> v1::CronTiming {
        v1::CronTiming {
            expression: "30 2 * * *".into(),
            zone: Some("Europe/Berlin".into()),
            ..v1::CronTiming::default()
        }
    }

    fn spec(timing: v1::schedule_spec::Timing) -> v1::ScheduleSpec {
        v1::ScheduleSpec {
            timing: Some(timing),
            ..v1::ScheduleSpec::default()
        }
    }

    fn cron_spec(cron: v1::CronTiming) -> v1::ScheduleSpec {
        spec(v1::schedule_spec::Timing::Cron(cron))
    }

    fn every_spec(seconds: i64) -> v1::ScheduleSpec {
        spec(v1::schedule_spec::Timing::Every(v1::IntervalTiming {
            interval: Some(ProtoDuration { seconds, nanos: 0 }),
            anchor: None,
        }))
    }

    fn stored(spec: &v1::ScheduleSpec) -> StoredSchedule {
        StoredSchedule {
            schedule: Schedule::new("nightly".parse().unwrap(), read_spec(spec).unwrap()),
            job: v1::JobTemplate {
                app: "billing".into(),
                data: Bytes::from_static(b"payload"),
                ..v1::JobTemplate::default()
            },
            created: Timestamp::from_millis(1_790_000_000_000),
            progress: Progress {
                position: Timestamp::from_millis(1_790_000_600_000),
                count: 7,
                is_paused: true,
                revision: 3,
            },
            skipped: 2,
            next: Some(Timestamp::from_millis(1_790_000_601_000)),
            problem: Some("`app` is unknown".to_owned()),
        }
    }

    #[test]
    fn errors_name_fields_of_messages() {
        let misfire = |misfire: v1::Misfire| v1::ScheduleSpec {
            misfire: Some(misfire),
            ..cron_spec(cron())
        };
        let time = |seconds| Some(ProtoTimestamp { seconds, nanos: 0 });
        for (spec, expected) in [
            (
                v1::ScheduleSpec::default(),
                "timing: is missing; set cron or every",
            ),
            (
                cron_spec(v1::CronTiming { gap: 9, ..cron() }),
                "cron.gap: is 9; expected 1 (shift) or 2 (skip)",
            ),
            (
                cron_spec(v1::CronTiming { overlap: 9, ..cron() }),
                "cron.overlap: is 9; expected 1 (first) or 2 (both)",
            ),
            (
                spec(v1::schedule_spec::Timing::Every(v1::IntervalTiming::default())),
                "every.interval: is missing; set a duration of at least 1s",
            ),
            (
                every_spec(-1),
                "every.interval: is not a valid google.protobuf.Duration; use one that is not negative",
            ),
            (
                v1::ScheduleSpec {
                    start: time(i64::MAX),
                    ..every_spec(60)
                },
                "start: is not a valid google.protobuf.Timestamp; use a time from 1970 to 9999",
            ),
            (
                misfire(v1::Misfire {
                    policy: 9,
                    ..v1::Misfire::default()
                }),
                "misfire.policy: is 9; expected 1 (skip), 2 (once) or 3 (all)",
            ),
            (
                misfire(v1::Misfire {
                    policy: 3,
                    ..v1::Misfire::default()
                }),
                "misfire.limit: is missing; set it to 1 to 1000",
            ),
            (
                misfire(v1::Misfire {
                    policy: 1,
                    limit: Some(5),
                    grace: None,
                }),
                "misfire.limit: is 5, but only the policy `all` has a limit; leave it out",
            ),
        ] {
            assert_eq!(read_spec(&spec).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn a_record_is_decoded_back() {
        let stored = stored(&cron_spec(cron()));
        let bytes = encode(&stored);
        assert_eq!(decode(&bytes), Ok(stored.clone()));

        let mut record = v1::ScheduleRecord::decode(bytes).unwrap();
        let decoded = |record: &v1::ScheduleRecord| decode(&record.encode_to_vec().into());
        record.format = 1;
        assert_eq!(decoded(&record), Err(RecordError::Newer(1)));
        record.format = 0;
        record.spec.as_mut().unwrap().job = None;
        let missing = RecordError::Malformed("field `spec.job` is missing".into());
        assert_eq!(decoded(&record), Err(missing));
        record.spec = Some(write_spec(stored.schedule.recurrence(), Some(stored.job.clone())));
        let Some(v1::schedule_spec::Timing::Cron(cron)) = &mut record.spec.as_mut().unwrap().timing else {
            panic!("not cron");
        };
        cron.zone = Some("Europe/Atlantis".into());
        assert!(
            matches!(decoded(&record), Err(RecordError::Definition(error)) if error.field == "cron.zone")
        );
    }

    #[test]
    fn damaged_record_is_refused_or_decoded() {
        let valid = [cron_spec(cron()), every_spec(60)].map(|spec| encode(&stored(&spec)).to_vec());
        fuzz::fuzz("schedule records", fuzz::FEW, &valid, |input| {
            if let Ok(stored) = decode(&Bytes::copy_from_slice(input)) {
                assert_eq!(decode(&encode(&stored)), Ok(stored));
            }
        });
    }

    proptest! {
        #[test]
        fn a_definition_is_read_back(
            is_cron: bool,
            (gap, overlap) in (0..3i32, 0..3i32),
            (seconds, anchor) in (1..1_000_000i64, prop::option::of(0..4_000_000_000i64)),
            (start, length) in (prop::option::of(0..4_000_000_000i64), prop::option::of(400_000_000..500_000_000i64)),
            max_count in prop::option::of(1..5u64),
            jitter in prop::option::of(0..86_400i64),
            misfire in prop::option::of((0..4i32, 1..1_000u32, prop::option::of(10..1_000_000i64))),
        ) {
            let time = |seconds| ProtoTimestamp { seconds, nanos: 0 };
            let duration = |seconds| ProtoDuration { seconds, nanos: 0 };
            let timing = if is_cron {
                v1::schedule_spec::Timing::Cron(v1::CronTiming { gap, overlap, ..cron() })
            } else {
                v1::schedule_spec::Timing::Every(v1::IntervalTiming {
                    interval: Some(duration(seconds)),
                    anchor: anchor.map(time),
                })
            };
            let spec = v1::ScheduleSpec {
                timing: Some(timing),
                start: start.map(time),
                end: length.map(|length| time(start.unwrap_or(0) + length)),
                max_count,
                jitter: jitter.map(duration),
                misfire: misfire.map(|(policy, limit, grace)| v1::Misfire {
                    policy,
                    limit: (policy == v1::MisfirePolicy::All as i32).then_some(limit),
                    grace: grace.map(duration),
                }),
                job: None,
            };
            let recurrence = read_spec(&spec).unwrap();
            prop_assert_eq!(read_spec(&write_spec(&recurrence, None)), Ok(recurrence));
        }
    }
}
