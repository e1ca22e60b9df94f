//! Recurring schedules as JSON, with the field names of definitions.

use prost_types::{Duration as ProtoDuration, Timestamp as ProtoTimestamp};
use redeliver_proto::convert::{from_duration, from_timestamp};
use redeliver_proto::v1;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::api::view::{HeaderView, data, priority, text};

/// A recurring schedule. Bytes that are not UTF-8 are encoded in Base64, in a field of another name.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ScheduleView {
    id: String,
    /// `active`, `paused` or `finished`.
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'static str>,
    /// Starts at 1 and increases with each pause, resumption and change of the definition.
    revision: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    created_at: Option<String>,
    /// Every occurrence whose nominal time is not later was dispatched or skipped.
    #[serde(skip_serializing_if = "Option::is_none")]
    decided_until: Option<String>,
    dispatched: u64,
    skipped: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    next_nominal_time: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next_due_time: Option<String>,
    /// Why the next occurrence cannot create its job.
    #[serde(skip_serializing_if = "String::is_empty")]
    problem: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    cron: Option<CronView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    every: Option<IntervalView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    start: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
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
pub(crate) struct OccurrenceView {
    /// The nominal time, which is also the earliest due time.
    nominal_time: Option<String>,
    /// Later than `nominalTime` if the schedule has jitter.
    latest_due_time: Option<String>,
    /// The nominal time on the clock of the zone.
    local_time: String,
    /// `regular`, `anchor`, `shifted_by_gap`, `first_of_overlap` or `second_of_overlap`.
    reason: String,
    /// With `shifted_by_gap`: the local time that does not exist.
    #[serde(skip_serializing_if = "String::is_empty")]
    missing_local_time: String,
}

fn time(time: Option<&ProtoTimestamp>) -> Option<String> {
    Some(from_timestamp(time?)?.to_string())
}

fn duration(duration: Option<&ProtoDuration>) -> Option<String> {
    Some(from_duration(duration?)?.to_string())
}

impl From<v1::Schedule> for ScheduleView {
    fn from(schedule: v1::Schedule) -> Self {
        let state = match schedule.state() {
            v1::ScheduleState::Unspecified => None,
            v1::ScheduleState::Active => Some("active"),
            v1::ScheduleState::Paused => Some("paused"),
            v1::ScheduleState::Finished => Some("finished"),
        };
        let spec = schedule.spec.unwrap_or_default();
        let job = spec.job.unwrap_or_default();
        let (cron, every) = match spec.timing {
            Some(v1::schedule_spec::Timing::Cron(cron)) => (Some(cron.into()), None),
            Some(v1::schedule_spec::Timing::Every(every)) => (None, Some(every.into())),
            None => (None, None),
        };
        let priority = priority(job.priority());
        let (key, key_base64) = job.key.map_or((None, None), |key| text(&key));
        let (job_data, job_data_base64) = data(&job.data);
        Self {
            id: schedule.id,
            state,
            revision: schedule.revision,
            created_at: time(schedule.created_at.as_ref()),
            decided_until: time(schedule.decided_until.as_ref()),
            dispatched: schedule.dispatched,
            skipped: schedule.skipped,
            next_nominal_time: time(schedule.next_nominal_time.as_ref()),
            next_due_time: time(schedule.next_due_time.as_ref()),
            problem: schedule.problem,
            cron,
            every,
            start: time(spec.start.as_ref()),
            end: time(spec.end.as_ref()),
            max_count: (spec.max_count != 0).then_some(spec.max_count),
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
            gap: match cron.gap() {
                v1::GapPolicy::Unspecified => None,
                v1::GapPolicy::Shift => Some("shift"),
                v1::GapPolicy::Skip => Some("skip"),
            },
            overlap: match cron.overlap() {
                v1::OverlapPolicy::Unspecified => None,
                v1::OverlapPolicy::First => Some("first"),
                v1::OverlapPolicy::Both => Some("both"),
            },
            expression: cron.expression,
            zone: cron.zone,
        }
    }
}

impl From<v1::IntervalTiming> for IntervalView {
    fn from(every: v1::IntervalTiming) -> Self {
        Self {
            interval: duration(every.interval.as_ref()),
            anchor: time(every.anchor.as_ref()),
        }
    }
}

impl From<v1::Misfire> for MisfireView {
    fn from(misfire: v1::Misfire) -> Self {
        Self {
            policy: match misfire.policy() {
                v1::MisfirePolicy::Unspecified => None,
                v1::MisfirePolicy::Skip => Some("skip"),
                v1::MisfirePolicy::Once => Some("once"),
                v1::MisfirePolicy::All => Some("all"),
            },
            limit: (misfire.limit != 0).then_some(misfire.limit),
            grace: duration(misfire.grace.as_ref()),
        }
    }
}

impl From<v1::OccurrencePreview> for OccurrenceView {
    fn from(preview: v1::OccurrencePreview) -> Self {
        let reason = preview.reason().as_str_name();
        let reason = reason.strip_prefix("OCCURRENCE_REASON_").unwrap_or(reason);
        Self {
            nominal_time: time(preview.nominal_time.as_ref()),
            latest_due_time: time(preview.latest_due_time.as_ref()),
            reason: reason.to_lowercase(),
            local_time: preview.local_time,
            missing_local_time: preview.missing_local_time,
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use jiff::tz::TimeZone;
    use serde_json::{Value, json};

    use super::*;
    use crate::request::read_schedule_json;

    #[test]
    fn a_schedule_has_the_fields_of_its_definition() {
        let definition = json!({
            "cron": {"expression": "30 2 * * *", "zone": "Europe/Berlin", "gap": "skip", "overlap": "both"},
            "start": "2026-01-01T00:00:00.000Z", "end": "2026-12-31T00:00:00.000Z", "maxCount": 7, "jitter": "90s",
            "misfire": {"policy": "all", "limit": 5, "grace": "10m"},
            "appName": "sms", "priority": "high", "key": "k", "headers": [{"name": "h", "value": "v"}],
            "expireAfter": "1h", "jobData": {"n": 1},
        });
        let text = Bytes::from(definition.to_string());
        let (_, spec) = read_schedule_json(&text, &TimeZone::UTC).unwrap();
        let schedule = v1::Schedule {
            id: "nightly".into(),
            spec: Some(spec),
            state: v1::ScheduleState::Active.into(),
            revision: 2,
            ..v1::Schedule::default()
        };
        let mut view = serde_json::to_value(ScheduleView::from(schedule)).unwrap();
        let object = view.as_object_mut().unwrap();
        let mut state = json!({});
        for field in ["id", "state", "revision", "dispatched", "skipped"] {
            state[field] = object.remove(field).unwrap_or(Value::Null);
        }
        assert_eq!(
            state,
            json!({"id": "nightly", "state": "active", "revision": 2, "dispatched": 0, "skipped": 0})
        );
        // So what was read can be written again.
        assert_eq!(view, definition);
    }
}
