//! The format of schedules in the state topic and the API: conversions between protobuf and `redeliver-recurrence`.
//!
//! Errors name fields of `ScheduleSpec`, such as `cron.expression`.

use bytes::Bytes;
use prost_types::{Duration as ProtoDuration, Timestamp as ProtoTimestamp};
use redeliver_core::{HumanDuration, Timestamp};
use redeliver_proto::convert::{from_duration, from_timestamp, to_duration, to_timestamp};
use redeliver_proto::{Message as _, v1};
use redeliver_recurrence::{
    Definition, Gap, Invalid, Misfire, MisfirePolicy, Overlap, Preview, Progress, Reason, Recurrence,
    Schedule, ScheduleId, Timing,
};

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
}

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
            zone: if cron.zone.is_empty() {
                "UTC".to_owned()
            } else {
                cron.zone.clone()
            },
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
        max_count: (spec.max_count != 0).then_some(spec.max_count),
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
            zone: zone.clone(),
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
        MisfirePolicy::Skip => (v1::MisfirePolicy::Skip, 0),
        MisfirePolicy::Once => (v1::MisfirePolicy::Once, 0),
        MisfirePolicy::All { limit } => (v1::MisfirePolicy::All, limit),
    };
    let jitter = Some(definition.jitter).filter(|jitter| jitter.as_millis() > 0);
    v1::ScheduleSpec {
        timing: Some(timing),
        start: definition.start.map(to_timestamp),
        end: definition.end.map(to_timestamp),
        max_count: definition.max_count.unwrap_or_default(),
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
    let progress = stored.progress;
    let record = v1::ScheduleRecord {
        spec: Some(write_spec(stored.schedule.recurrence(), Some(stored.job.clone()))),
        created_ms: stored.created.as_millis(),
        decided_ms: progress.position.as_millis(),
        dispatched: progress.count,
        skipped: stored.skipped,
        paused: progress.is_paused,
        revision: progress.revision,
        format: FORMAT,
    };
    record.encode_to_vec().into()
}

/// Decodes the value of a state record.
///
/// # Errors
/// When the bytes are not a schedule, a newer scheduler wrote them, or the definition is not valid here.
pub fn decode(id: ScheduleId, bytes: &Bytes) -> Result<StoredSchedule, RecordError> {
    let record = v1::ScheduleRecord::decode(bytes.clone())
        .map_err(|error| RecordError::Malformed(error.to_string()))?;
    if record.format > FORMAT {
        return Err(RecordError::Newer(record.format));
    }
    let missing = |field: &str| RecordError::Malformed(format!("field `{field}` is missing"));
    let mut spec = record.spec.ok_or_else(|| missing("spec"))?;
    let job = spec.job.take().ok_or_else(|| missing("spec.job"))?;
    let recurrence = read_spec(&spec).map_err(RecordError::Definition)?;
    Ok(StoredSchedule {
        schedule: Schedule::new(id, recurrence),
        job,
        created: Timestamp::from_millis(record.created_ms),
        progress: Progress {
            position: Timestamp::from_millis(record.decided_ms),
            count: record.dispatched,
            is_paused: record.paused,
            revision: record.revision,
        },
        skipped: record.skipped,
    })
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
        Ok(v1::MisfirePolicy::All) => MisfirePolicy::All { limit: misfire.limit },
        Err(_) => {
            let problem = format!("is {}; expected 1 (skip), 2 (once) or 3 (all)", misfire.policy);
            return Err(invalid("misfire.policy", problem));
        }
    };
    if misfire.limit != 0 && !matches!(policy, MisfirePolicy::All { .. }) {
        let problem = format!(
            "is {}, but only the policy `all` has a limit; leave it at 0",
            misfire.limit
        );
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
            zone: "Europe/Berlin".into(),
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
        }
    }

    #[test]
    fn an_error_names_the_field_of_the_message() {
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
                cron_spec(v1::CronTiming {
                    expression: "* 24 * * *".into(),
                    ..cron()
                }),
                "cron.expression: field 2 (hour): `24` is not valid; use 0 to 23",
            ),
            (
                cron_spec(v1::CronTiming {
                    zone: "Europe/Brelin".into(),
                    ..cron()
                }),
                "cron.zone: `Europe/Brelin` is not an IANA time zone, did you mean `Europe/Berlin`?",
            ),
            (
                spec(v1::schedule_spec::Timing::Every(v1::IntervalTiming::default())),
                "every.interval: is missing; set a duration of at least 1s",
            ),
            (
                every_spec(0),
                "every.interval: 0s is out of range: must be between 1s and 366d",
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
                v1::ScheduleSpec {
                    start: time(2_000_000),
                    end: time(1_000_000),
                    ..every_spec(60)
                },
                "end: 1970-01-12T13:46:40.000Z is before the start 1970-01-24T03:33:20.000Z; must not be earlier",
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
                "misfire.limit: 0 is out of range: must be between 1 and 1000",
            ),
            (
                misfire(v1::Misfire {
                    policy: 1,
                    limit: 5,
                    grace: None,
                }),
                "misfire.limit: is 5, but only the policy `all` has a limit; leave it at 0",
            ),
        ] {
            assert_eq!(read_spec(&spec).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn defaults_are_filled_in() {
        let written = |spec| write_spec(&read_spec(&spec).unwrap(), None);
        let expected = v1::ScheduleSpec {
            misfire: Some(v1::Misfire {
                policy: v1::MisfirePolicy::Once.into(),
                limit: 0,
                grace: Some(ProtoDuration {
                    seconds: 60,
                    nanos: 0,
                }),
            }),
            ..cron_spec(v1::CronTiming {
                zone: "UTC".into(),
                gap: v1::GapPolicy::Shift.into(),
                overlap: v1::OverlapPolicy::First.into(),
                ..cron()
            })
        };
        let given = cron_spec(v1::CronTiming {
            zone: String::new(),
            ..cron()
        });
        assert_eq!(written(given), expected);
        assert_eq!(written(expected.clone()), expected);
        let Some(v1::schedule_spec::Timing::Every(every)) = written(every_spec(60)).timing else {
            panic!("not an interval");
        };
        assert_eq!(every.anchor, Some(ProtoTimestamp { seconds: 0, nanos: 0 }));
    }

    #[test]
    fn a_record_is_decoded_back() {
        let id: ScheduleId = "nightly".parse().unwrap();
        let stored = stored(&cron_spec(cron()));
        let bytes = encode(&stored);
        assert_eq!(decode(id.clone(), &bytes), Ok(stored.clone()));

        let mut record = v1::ScheduleRecord::decode(bytes).unwrap();
        let decoded = |record: &v1::ScheduleRecord| decode(id.clone(), &record.encode_to_vec().into());
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
        cron.zone = "Europe/Atlantis".into();
        assert!(
            matches!(decoded(&record), Err(RecordError::Definition(error)) if error.field == "cron.zone")
        );
    }

    #[test]
    fn a_damaged_record_is_refused_or_decoded() {
        let id: ScheduleId = "nightly".parse().unwrap();
        let valid = [cron_spec(cron()), every_spec(60)].map(|spec| encode(&stored(&spec)).to_vec());
        fuzz::fuzz("schedule records", fuzz::FEW, &valid, |input| {
            if let Ok(stored) = decode(id.clone(), &Bytes::copy_from_slice(input)) {
                assert_eq!(decode(id.clone(), &encode(&stored)), Ok(stored));
            }
        });
    }

    #[test]
    fn a_preview_says_why_a_time_is_shifted() {
        let recurrence = read_spec(&cron_spec(cron())).unwrap();
        let after = "2026-03-28T12:00:00Z".parse().unwrap();
        let preview = recurrence.preview(after, 1);
        let time = Some(ProtoTimestamp {
            seconds: 1_774_747_800,
            nanos: 0,
        });
        let expected = v1::OccurrencePreview {
            nominal_time: time,
            latest_due_time: time,
            local_time: "2026-03-29T03:30:00+02:00[Europe/Berlin]".into(),
            reason: v1::OccurrenceReason::ShiftedByGap.into(),
            missing_local_time: "2026-03-29T02:30:00".into(),
        };
        assert_eq!(preview.iter().map(write_preview).collect::<Vec<_>>(), [expected]);
    }

    proptest! {
        #[test]
        fn a_definition_is_read_back(
            is_cron: bool,
            (gap, overlap) in (0..3i32, 0..3i32),
            (seconds, anchor) in (1..1_000_000i64, prop::option::of(0..4_000_000_000i64)),
            (start, length) in (prop::option::of(0..4_000_000_000i64), prop::option::of(400_000_000..500_000_000i64)),
            max_count in 0..5u64,
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
                    limit: if policy == v1::MisfirePolicy::All as i32 { limit } else { 0 },
                    grace: grace.map(duration),
                }),
                job: None,
            };
            let recurrence = read_spec(&spec).unwrap();
            prop_assert_eq!(read_spec(&write_spec(&recurrence, None)), Ok(recurrence));
        }
    }
}
