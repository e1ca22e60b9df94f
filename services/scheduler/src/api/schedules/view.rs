//! Recurring schedules as JSON, with the field names of definitions.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prost_types::Duration as ProtoDuration;
use redeliver_proto::convert::from_duration;
use redeliver_proto::v1;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::api::view::{HeaderView, text, time};
use crate::request::{Gap, MisfirePolicy, Overlap, PriorityName, ScheduleState, as_data};

/// A recurring schedule. Bytes that are not UTF-8, and data that is not JSON, are encoded in Base64, in a field of another name.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScheduleView {
    id: String,
    /// `active`, `paused` or `finished`.
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'static str>,
    /// Starts at 1 and increases with each pause, resumption and change of the definition.
    revision: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    created_at: Option<String>,
    /// Every occurrence whose nominal time is not later was dispatched or skipped.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    decided_until: Option<String>,
    dispatched: u64,
    skipped: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    next_nominal_time: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    next_due_time: Option<String>,
    /// Why the next occurrence cannot create its job.
    #[serde(skip_serializing_if = "String::is_empty")]
    problem: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    cron: Option<CronView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    every: Option<IntervalView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    start: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    end: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_count: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    jitter: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    misfire: Option<MisfireView>,
    app_name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expire_after: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_base64: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    headers: Vec<HeaderView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    job_data: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    job_data_base64: Option<String>,
}

/// Times on the clock of a time zone.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CronView {
    expression: String,
    zone: String,
    /// `shift` or `skip`.
    #[serde(skip_serializing_if = "Option::is_none")]
    gap: Option<&'static str>,
    /// `first` or `both`.
    #[serde(skip_serializing_if = "Option::is_none")]
    overlap: Option<&'static str>,
}

/// Times at a fixed interval.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct IntervalView {
    #[serde(skip_serializing_if = "Option::is_none")]
    interval: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    anchor: Option<String>,
}

/// What happens to occurrences that are missed.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MisfireView {
    /// `skip`, `once` or `all`.
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    grace: Option<String>,
}

/// A future occurrence.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct OccurrenceView {
    /// The nominal time, which is also the earliest due time.
    #[schema(format = DateTime)]
    nominal_time: Option<String>,
    /// Later than `nominalTime` if the schedule has jitter.
    #[schema(format = DateTime)]
    latest_due_time: Option<String>,
    /// The nominal time on the clock of the zone.
    local_time: String,
    /// `regular`, `anchor`, `shifted_by_gap`, `first_of_overlap` or `second_of_overlap`.
    reason: String,
    /// With `shifted_by_gap`: the local time that does not exist.
    #[serde(skip_serializing_if = "String::is_empty")]
    missing_local_time: String,
}

/// A schedule that this scheduler cannot read, because a newer one wrote it, or because its entry in the index is damaged.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct UnreadableView {
    /// Missing if it cannot be read either.
    #[serde(skip_serializing_if = "String::is_empty")]
    id: String,
    /// The shard, which is the partition of the state topic.
    shard: i32,
    problem: String,
}

impl From<v1::UnreadableSchedule> for UnreadableView {
    fn from(schedule: v1::UnreadableSchedule) -> Self {
        let v1::UnreadableSchedule { id, shard, problem } = schedule;
        Self { id, shard, problem }
    }
}

fn duration(duration: Option<&ProtoDuration>) -> Option<String> {
    Some(from_duration(duration?)?.to_string())
}

impl ScheduleView {
    /// A definition alone, as JSON.
    #[expect(clippy::disallowed_types, reason = "what the view itself has made")]
    pub(crate) fn definition(spec: v1::ScheduleSpec) -> serde_json::Value {
        let view = Self::from(v1::Schedule {
            spec: Some(spec),
            ..v1::Schedule::default()
        });
        let mut definition = serde_json::json!(view);
        if let Some(fields) = definition.as_object_mut() {
            fields.retain(|field, _| !["id", "revision", "dispatched", "skipped"].contains(&field.as_str()));
        }
        // The text of audit entries is the same, whether or not a dependency lets maps keep their order.
        definition.sort_all_objects();
        definition
    }

    /// A schedule with the data, key and headers of its job. It is a definition of the same schedule.
    #[must_use]
    pub fn whole(schedule: v1::Schedule) -> Self {
        let mut view = Self::from(schedule);
        if view.job_data.is_none() {
            // Without data, which is something else than the data `null`.
            view.job_data_base64.get_or_insert_default();
        }
        view
    }
}

/// A schedule of which the data, key and headers of its job may have been left out.
impl From<v1::Schedule> for ScheduleView {
    fn from(schedule: v1::Schedule) -> Self {
        let state = ScheduleState::of(schedule.state());
        let spec = schedule.spec.unwrap_or_default();
        let job = spec.job.unwrap_or_default();
        let (cron, every) = match spec.timing {
            Some(v1::schedule_spec::Timing::Cron(cron)) => (Some(cron.into()), None),
            Some(v1::schedule_spec::Timing::Every(every)) => (None, Some(every.into())),
            None => (None, None),
        };
        let priority = PriorityName::of(job.priority());
        let (key, key_base64) = job.key.map_or((None, None), |key| text(&key));
        let (job_data, job_data_base64) = match as_data(&job.data) {
            Some(json) => (Some(json), None),
            None if job.data.is_empty() => (None, None),
            None => (None, Some(STANDARD.encode(&job.data))),
        };
        Self {
            id: schedule.id,
            state,
            revision: schedule.revision,
            created_at: time(schedule.created_at),
            decided_until: time(schedule.decided_until),
            dispatched: schedule.dispatched,
            skipped: schedule.skipped,
            next_nominal_time: time(schedule.next_nominal_time),
            next_due_time: time(schedule.next_due_time),
            problem: schedule.problem,
            cron,
            every,
            start: time(spec.start),
            end: time(spec.end),
            max_count: spec.max_count,
            jitter: duration(spec.jitter.as_ref()),
            misfire: spec.misfire.map(MisfireView::from),
            app_name: job.app,
            priority,
            expire_after: duration(job.expire_after.as_ref()),
            key,
            key_base64,
            headers: job.headers.into_iter().map(HeaderView::from).collect(),
            job_data,
            job_data_base64,
        }
    }
}

impl From<v1::CronTiming> for CronView {
    fn from(cron: v1::CronTiming) -> Self {
        Self {
            gap: Gap::of(cron.gap()),
            overlap: Overlap::of(cron.overlap()),
            expression: cron.expression,
            zone: cron.zone.unwrap_or_default(),
        }
    }
}

impl From<v1::IntervalTiming> for IntervalView {
    fn from(every: v1::IntervalTiming) -> Self {
        Self {
            interval: duration(every.interval.as_ref()),
            anchor: time(every.anchor),
        }
    }
}

impl From<v1::Misfire> for MisfireView {
    fn from(misfire: v1::Misfire) -> Self {
        Self {
            policy: MisfirePolicy::of(misfire.policy()),
            limit: misfire.limit,
            grace: duration(misfire.grace.as_ref()),
        }
    }
}

impl From<v1::OccurrencePreview> for OccurrenceView {
    fn from(preview: v1::OccurrencePreview) -> Self {
        Self {
            nominal_time: time(preview.nominal_time),
            latest_due_time: time(preview.latest_due_time),
            reason: preview.reason().name().unwrap_or_default(),
            local_time: preview.local_time,
            missing_local_time: preview.missing_local_time,
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use jiff::tz::TimeZone;
    use prost_types::Timestamp as ProtoTimestamp;
    use redeliver_core::Timestamp;
    use redeliver_recurrence::{Progress, Schedule};
    use utoipa::PartialSchema as _;

    use super::*;
    use crate::request::{ReadSchedule, read_schedule_json};
    use crate::schedules::{self, StoredSchedule, read_spec};

    fn seconds(seconds: i64) -> Option<ProtoDuration> {
        Some(ProtoDuration { seconds, nanos: 0 })
    }

    fn at(seconds: i64) -> Option<ProtoTimestamp> {
        let nanos = 5_000_000;
        Some(ProtoTimestamp { seconds, nanos })
    }

    fn cron(gap: v1::GapPolicy, overlap: v1::OverlapPolicy) -> v1::schedule_spec::Timing {
        v1::schedule_spec::Timing::Cron(v1::CronTiming {
            expression: "30 2 * * *".into(),
            zone: Some("Europe/Berlin".into()),
            gap: gap.into(),
            overlap: overlap.into(),
        })
    }

    fn every(anchor: Option<ProtoTimestamp>) -> v1::schedule_spec::Timing {
        let interval = seconds(5_400);
        v1::schedule_spec::Timing::Every(v1::IntervalTiming { interval, anchor })
    }

    fn misfire(policy: v1::MisfirePolicy, limit: Option<u32>) -> v1::Misfire {
        v1::Misfire {
            policy: policy.into(),
            limit,
            grace: seconds(90),
        }
    }

    fn header(name: &str, value: Option<&'static [u8]>) -> v1::Header {
        v1::Header {
            name: name.into(),
            value: value.map(Bytes::from_static),
        }
    }

    /// Definitions that have all fields, with each kind of value.
    fn definitions() -> Vec<v1::ScheduleSpec> {
        let full = v1::ScheduleSpec {
            timing: Some(cron(v1::GapPolicy::Skip, v1::OverlapPolicy::Both)),
            start: at(1_790_000_000),
            end: at(1_890_000_000),
            max_count: Some(u64::MAX),
            jitter: seconds(61),
            misfire: Some(misfire(v1::MisfirePolicy::All, Some(1_000))),
            job: Some(v1::JobTemplate {
                app: "sms".into(),
                priority: v1::Priority::High.into(),
                data: Bytes::from_static(b"{ \"n\": 1.50 }"),
                key: Some(Bytes::from_static(b"k")),
                headers: vec![
                    header("text", Some(b"v")),
                    header("text", Some(b"again")),
                    header("binary", Some(b"\xff\0")),
                    header("empty", Some(b"")),
                    header("null", None),
                ],
                expire_after: seconds(3_600),
            }),
        };
        let with = |change: &dyn Fn(&mut v1::ScheduleSpec)| {
            let mut spec = full.clone();
            change(&mut spec);
            spec
        };
        let with_job =
            |change: &dyn Fn(&mut v1::JobTemplate)| with(&|spec| change(spec.job.as_mut().unwrap()));
        let mut specs = vec![
            full.clone(),
            with(&|spec| spec.timing = Some(cron(v1::GapPolicy::Shift, v1::OverlapPolicy::First))),
            with(&|spec| {
                spec.timing = Some(cron(v1::GapPolicy::Unspecified, v1::OverlapPolicy::Unspecified));
            }),
            with(&|spec| spec.timing = Some(every(None))),
            with(&|spec| spec.timing = Some(every(at(7)))),
            with(&|spec| (spec.start, spec.end, spec.jitter, spec.misfire) = (None, None, None, None)),
            with(&|spec| spec.max_count = None),
            with(&|spec| spec.misfire = Some(misfire(v1::MisfirePolicy::Skip, None))),
            with(&|spec| spec.misfire = Some(misfire(v1::MisfirePolicy::Once, None))),
            with_job(&|job| (job.key, job.headers, job.expire_after) = (None, Vec::new(), None)),
            with_job(&|job| job.priority = v1::Priority::Normal.into()),
            with_job(&|job| job.priority = v1::Priority::Low.into()),
        ];
        for key in [&b""[..], b"\xff", b"\0\"\n"] {
            specs.push(with_job(&|job| job.key = Some(Bytes::from_static(key))));
        }
        let deep = "[".repeat(129) + &"]".repeat(129);
        for data in ["", "null", " {}", "{}\n", "1.50", "\"\u{e9}\"", "{", &deep] {
            specs.push(with_job(&|job| {
                job.data = Bytes::copy_from_slice(data.as_bytes());
            }));
        }
        specs.push(with_job(&|job| job.data = Bytes::from_static(b"\xff\0")));
        specs
    }

    #[test]
    fn shown_schedule_is_its_own_definition() {
        for spec in definitions() {
            let mut job = spec.clone();
            let job = job.job.take().unwrap();
            let stored = StoredSchedule {
                schedule: Schedule::new("nightly".parse().unwrap(), read_spec(&spec).unwrap()),
                job: job.clone(),
                created: Timestamp::from_millis(1_790_000_000_000),
                progress: Progress {
                    position: Timestamp::from_millis(1_790_000_600_000),
                    count: 7,
                    is_paused: false,
                    revision: 3,
                },
                skipped: 2,
                next: Some(Timestamp::from_millis(1_790_000_601_000)),
                problem: Some("`app` is unknown".to_owned()),
            };
            let shown = schedules::show(&schedules::encode(&stored), true).unwrap();
            let text = serde_json::to_string(&ScheduleView::whole(shown)).unwrap();
            for field in SERVER_FIELDS {
                assert!(text.contains(&format!("\"{field}\":")), "{field} in {text}");
            }
            let read = read_schedule_json(&Bytes::from(text.clone()), &TimeZone::UTC).unwrap();
            let ReadSchedule {
                id,
                mut spec,
                state,
                revision,
            } = read;
            assert_eq!(id.as_deref(), Some("nightly"));
            assert_eq!((state, revision), (Some(v1::ScheduleState::Active), Some(3)));
            assert_eq!(spec.job.take(), Some(job), "{text}");
            assert_eq!(&read_spec(&spec).unwrap(), stored.schedule.recurrence(), "{text}");
        }
    }

    /// What a definition does not set.
    const SERVER_FIELDS: [&str; 9] = [
        "state",
        "revision",
        "createdAt",
        "decidedUntil",
        "dispatched",
        "skipped",
        "nextNominalTime",
        "nextDueTime",
        "problem",
    ];

    #[test]
    fn definition_accepts_all_shown_fields() {
        let schema = serde_json::to_value(ScheduleView::schema()).unwrap();
        let fields = schema["properties"].as_object().unwrap();
        assert!(fields.len() > 20, "{schema}");
        for field in fields.keys() {
            let text = Bytes::from(format!("{{\"appName\":\"a\",\"jobData\":1,\"{field}\":null}}"));
            if let Err(failure) = read_schedule_json(&text, &TimeZone::UTC) {
                assert_ne!(failure.code, "request.unknownField", "{field}");
            }
        }
    }

    #[test]
    fn listed_schedule_is_no_definition() {
        let spec = definitions().into_iter().map(|mut spec| {
            let job = spec.job.as_mut().unwrap();
            (job.data, job.key, job.headers) = (Bytes::new(), None, Vec::new());
            spec
        });
        for spec in spec {
            let schedule = v1::Schedule {
                spec: Some(spec),
                ..v1::Schedule::default()
            };
            let text = serde_json::to_string(&ScheduleView::from(schedule)).unwrap();
            // So it cannot be written by mistake.
            let failure = read_schedule_json(&Bytes::from(text), &TimeZone::UTC).unwrap_err();
            assert_eq!(failure.code, "request.jobData");
        }
    }
}
