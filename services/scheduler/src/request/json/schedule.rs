//! Definitions of recurring schedules.
//!
//! A definition has the fields of its job at the top, next to those of its times. `cron` and `every` are objects, or texts if nothing
//! but the expression or the interval is given.

use bytes::Bytes;
use jiff::tz::TimeZone;
use redeliver_core::Failure;
use redeliver_proto::v1;
use redeliver_proto::v1::schedule_spec::Timing;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::job::{Priority, priority};
use super::{
    HeaderFields, Object, TextOr, invalid, number, parse, raw, read_base64, read_data, read_duration,
    read_time, word, words,
};
use crate::request::field::{Field, Format};
use crate::request::job::missing_app;

words! {
    /// What happens to a missing local time.
    Gap, GapPolicy { Shift = "shift", Skip = "skip" }
    /// What happens to a local time that occurs twice.
    Overlap, OverlapPolicy { First = "first", Both = "both" }
    /// Which missed occurrences are dispatched late.
    MisfirePolicy, MisfirePolicy { Skip = "skip", Once = "once", All = "all" }
    /// The state of a schedule.
    ScheduleState, ScheduleState { Active = "active", Paused = "paused", Finished = "finished" }
}

/// The definition of a recurring schedule, or a schedule as `GET` returns it, of which all but `state` and `revision` is ignored besides the
/// definition. Exactly one of `cron` and `every` is required.
#[derive(Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct ScheduleRequest<'a> {
    /// 1 to 128 of the characters a-z, A-Z, 0-9, `.`, `_` and `-`. Required to create a schedule.
    id: Option<String>,
    /// An expression, such as `30 2 * * *`, or an object.
    #[schema(inline)]
    cron: Option<TextOr<Cron>>,
    /// With `cron` as a string: the name of an IANA time zone, `scheduler.default_time_zone` by default.
    zone: Option<String>,
    /// An interval, such as `5m`, or an object.
    #[schema(inline)]
    every: Option<TextOr<Every>>,
    /// No nominal time is before this one.
    #[schema(format = DateTime)]
    start: Option<String>,
    /// No nominal time is after this one.
    #[schema(format = DateTime)]
    end: Option<String>,
    /// How many occurrences are dispatched; without a limit by default. Skipped and triggered ones do not count.
    #[serde(default, deserialize_with = "number")]
    #[schema(minimum = 1)]
    max_count: Option<u64>,
    /// How much later than its nominal time an occurrence may be due, such as `90s`: at most 1 day.
    #[schema(pattern = "^[0-9]+(ms|s|m|h|d)$")]
    jitter: Option<String>,
    #[schema(inline, value_type = Option<Misfire>)]
    misfire: Option<TextOr<Misfire>>,
    /// The name of an application in the configuration of the scheduler.
    #[schema(value_type = String, min_length = 1)]
    app_name: Option<String>,
    #[serde(default, deserialize_with = "priority")]
    priority: Option<Priority>,
    /// The value of the record to dispatch. Either this or `jobDataBase64` is required.
    #[serde(borrow, default, deserialize_with = "raw")]
    #[schema(value_type = Option<serde_json::Value>)]
    job_data: Option<&'a RawValue>,
    /// The value of the record to dispatch, in Base64.
    job_data_base64: Option<String>,
    /// The key of the record to dispatch.
    key: Option<String>,
    /// The key of the record to dispatch, in Base64.
    key_base64: Option<String>,
    /// The headers of the record to dispatch: an object, or an array of objects with `name` and `value` or `valueBase64`.
    #[schema(value_type = Option<serde_json::Value>)]
    headers: Option<HeaderFields<true>>,
    /// How long after its due time a job can still be dispatched, such as `5m`.
    #[schema(pattern = "^[0-9]+(ms|s|m|h|d)$")]
    expire_after: Option<String>,
    /// What the state of the schedule will be. Another state is an error, because a definition does not
    /// change it.
    #[serde(default, deserialize_with = "word")]
    state: Option<ScheduleState>,
    /// In an update: the revision that the schedule has before it. Another one is a conflict (409). Ignored in a creation.
    #[serde(default, deserialize_with = "number")]
    #[schema(minimum = 1)]
    revision: Option<u32>,
    // Output fields of a schedule are ignored, so that a response can be sent as a request.
    #[schema(ignore)]
    _created_at: Option<IgnoredAny>,
    #[schema(ignore)]
    _decided_until: Option<IgnoredAny>,
    #[schema(ignore)]
    _dispatched: Option<IgnoredAny>,
    #[schema(ignore)]
    _skipped: Option<IgnoredAny>,
    #[schema(ignore)]
    _next_nominal_time: Option<IgnoredAny>,
    #[schema(ignore)]
    _next_due_time: Option<IgnoredAny>,
    #[schema(ignore)]
    _problem: Option<IgnoredAny>,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Cron {
    /// Five fields, or six with the second in front; or `@hourly`, `@daily`, `@weekly`, `@monthly`, `@yearly`.
    expression: String,
    /// The name of an IANA time zone, `scheduler.default_time_zone` by default.
    zone: Option<String>,
    /// What happens to a missing local time: `shift` (default) or `skip`.
    #[serde(default, deserialize_with = "word")]
    gap: Option<Gap>,
    /// What happens to a local time that occurs twice: `first` or `both`.
    #[serde(default, deserialize_with = "word")]
    overlap: Option<Overlap>,
}

impl Object for Cron {
    const EXPECTED: &str = "an expression, or an object with `expression`, `zone`, `gap` and `overlap`";
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Every {
    /// From 1 second to 366 days.
    interval: String,
    /// One of the times, which decides the phase.
    #[schema(format = DateTime)]
    anchor: Option<String>,
}

impl Object for Every {
    const EXPECTED: &str = "an interval such as 5m, or an object with `interval` and `anchor`";
}

/// What happens to occurrences that are missed.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Misfire {
    /// `once` by default.
    #[serde(default, deserialize_with = "word")]
    policy: Option<MisfirePolicy>,
    /// With `all`.
    #[serde(default, deserialize_with = "number")]
    #[schema(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// How late an occurrence can be without being missed, such as `60s` (default).
    #[schema(pattern = "^[0-9]+(ms|s|m|h|d)$")]
    grace: Option<String>,
}

impl Object for Misfire {
    const EXPECTED: &str = "an object with `policy`, `limit` and `grace`";
}

/// A definition, and the fields written with it.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadSchedule {
    /// The id of the schedule.
    pub id: Option<String>,
    /// The definition. It has no job if no field of a job is set.
    pub spec: v1::ScheduleSpec,
    /// The state that the schedule is expected to have with this definition. A definition cannot change it.
    pub state: Option<v1::ScheduleState>,
    /// The revision that the schedule is expected to have before an update. At least 1.
    pub revision: Option<u32>,
}

/// Parses a definition. Times without an offset are interpreted in `zone`. A schedule as the API shows it is a definition.
///
/// # Errors
/// When the text is not JSON, or a field is unknown, missing, repeated, or has the wrong type.
pub fn read(value: &Bytes, zone: &TimeZone) -> Result<ReadSchedule, Failure> {
    let mut request: ScheduleRequest<'_> = parse(value)?;
    let spec = v1::ScheduleSpec {
        timing: request.timing(zone)?,
        start: read_time(Field("start"), request.start.as_ref(), zone)?,
        end: read_time(Field("end"), request.end.as_ref(), zone)?,
        max_count: request.max_count,
        jitter: read_duration(Field("jitter"), request.jitter.as_ref())?,
        misfire: request.misfire.take().map(read_misfire).transpose()?,
        job: request.job(value)?,
    };
    if request.revision == Some(0) {
        return Err(invalid(Field("revision"), "is 0; the first revision is 1"));
    }
    Ok(ReadSchedule {
        spec,
        id: request.id,
        state: request.state.map(Into::into),
        revision: request.revision,
    })
}

impl ScheduleRequest<'_> {
    fn timing(&mut self, zone: &TimeZone) -> Result<Option<Timing>, Failure> {
        let wrong_zone = |problem| Err(invalid(Field("zone"), problem));
        let timing = match (self.cron.take(), self.every.take()) {
            (Some(_), Some(_)) => {
                return Err(invalid(
                    Field("every"),
                    "cannot be combined with `cron`; set one of the two",
                ));
            }
            (Some(TextOr::Text(expression)), None) => Timing::Cron(v1::CronTiming {
                expression,
                zone: self.zone.take(),
                ..v1::CronTiming::default()
            }),
            (Some(TextOr::Object(_)), None) if self.zone.is_some() => {
                return wrong_zone("belongs in `cron` if that is an object");
            }
            (Some(TextOr::Object(cron)), None) => Timing::Cron(v1::CronTiming {
                expression: cron.expression,
                zone: cron.zone,
                gap: cron.gap.map_or(v1::GapPolicy::Unspecified, Into::into).into(),
                overlap: cron
                    .overlap
                    .map_or(v1::OverlapPolicy::Unspecified, Into::into)
                    .into(),
            }),
            (None, _) if self.zone.is_some() => return wrong_zone("is set, but only `cron` has a time zone"),
            (None, Some(TextOr::Text(interval))) => Timing::Every(v1::IntervalTiming {
                interval: read_duration(Field("every"), Some(&interval))?,
                anchor: None,
            }),
            (None, Some(TextOr::Object(every))) => Timing::Every(v1::IntervalTiming {
                interval: read_duration(Field("every.interval"), Some(&every.interval))?,
                anchor: read_time(Field("every.anchor"), every.anchor.as_ref(), zone)?,
            }),
            (None, None) => return Ok(None),
        };
        Ok(Some(timing))
    }

    /// The job; `None` if none of its fields is set.
    fn job(&mut self, value: &Bytes) -> Result<Option<v1::JobTemplate>, Failure> {
        let Some(app) = self.app_name.take() else {
            let has_job = self.job_data.is_some()
                || self.job_data_base64.is_some()
                || self.key.is_some()
                || self.key_base64.is_some()
                || self.headers.is_some()
                || self.priority.is_some()
                || self.expire_after.is_some();
            return if has_job {
                Err(missing_app(Format::Json))
            } else {
                Ok(None)
            };
        };
        let data = match read_base64(Field("jobDataBase64"), self.job_data_base64.as_ref())? {
            Some(_) if self.job_data.is_some() => {
                return Err(invalid(
                    Field("jobDataBase64"),
                    "cannot be combined with `jobData`",
                ));
            }
            Some(data) => data,
            None => read_data(self.job_data, value)?,
        };
        let key = match read_base64(Field("keyBase64"), self.key_base64.as_ref())? {
            Some(_) if self.key.is_some() => {
                return Err(invalid(Field("keyBase64"), "cannot be combined with `key`"));
            }
            Some(key) => Some(key),
            None => self.key.take().map(Bytes::from),
        };
        Ok(Some(v1::JobTemplate {
            app,
            priority: self.priority.map_or(v1::Priority::Normal, Into::into).into(),
            data,
            key,
            headers: self.headers.take().unwrap_or_default().0,
            expire_after: read_duration(Field("expireAfter"), self.expire_after.as_ref())?,
        }))
    }
}

fn read_misfire(misfire: TextOr<Misfire>) -> Result<v1::Misfire, Failure> {
    let TextOr::Object(misfire) = misfire else {
        let problem = format!("is a text; expected {}", Misfire::EXPECTED);
        return Err(invalid(Field("misfire"), &problem));
    };
    Ok(v1::Misfire {
        policy: misfire
            .policy
            .map_or(v1::MisfirePolicy::Unspecified, Into::into)
            .into(),
        limit: misfire.limit,
        grace: read_duration(Field("misfire.grace"), misfire.grace.as_ref())?,
    })
}

/// The failure of a definition that expects another state than the one that its schedule has or would have.
#[must_use]
pub fn other_state(expected: v1::ScheduleState, is: v1::ScheduleState) -> Failure {
    let [expected, is] = [expected, is].map(|state| ScheduleState::of(state).unwrap_or("unknown"));
    let problem = format!(
        "is `{expected}`, but with this definition the schedule is {is}; leave it out, and pause or resume the schedule \
         to change it"
    );
    Field("state").rejected(Format::Json, &problem)
}
#[cfg(test)]
mod tests {
    use redeliver_proto::convert::{to_duration, to_timestamp};

    use super::*;
    use crate::request::tests::rows;

    fn read_text(text: &str) -> Result<ReadSchedule, Failure> {
        read(&Bytes::copy_from_slice(text.as_bytes()), &TimeZone::UTC)
    }

    #[test]
    fn all_fields_are_read() {
        let text = r#"{"id":"nightly","cron":{"expression":"30 2 * * *","zone":"Europe/Berlin","gap":"skip","overlap":"both"},
            "start":"2026-01-01T00:00:00Z","end":"2026-12-31T00:00:00+01:00","maxCount":7,"jitter":"90s",
            "misfire":{"policy":"all","limit":5,"grace":"10m"},"appName":"sms","priority":"high","key":"k",
            "headers":{"h":"v"},"expireAfter":"1h","jobData":{"n": 1.50}}"#;
        let ReadSchedule { id, spec, .. } = read_text(text).unwrap();
        assert_eq!(id.as_deref(), Some("nightly"));
        let duration = |text: &str| Some(to_duration(text.parse().unwrap()));
        let time = |text: &str| Some(to_timestamp(text.parse().unwrap()));
        let expected = v1::ScheduleSpec {
            timing: Some(Timing::Cron(v1::CronTiming {
                expression: "30 2 * * *".into(),
                zone: Some("Europe/Berlin".into()),
                gap: v1::GapPolicy::Skip.into(),
                overlap: v1::OverlapPolicy::Both.into(),
            })),
            start: time("2026-01-01T00:00:00Z"),
            end: time("2026-12-30T23:00:00Z"),
            max_count: Some(7),
            jitter: duration("90s"),
            misfire: Some(v1::Misfire {
                policy: v1::MisfirePolicy::All.into(),
                limit: Some(5),
                grace: duration("10m"),
            }),
            job: Some(v1::JobTemplate {
                app: "sms".into(),
                priority: v1::Priority::High.into(),
                data: Bytes::from_static(br#"{"n": 1.50}"#),
                key: Some(Bytes::from_static(b"k")),
                headers: vec![v1::Header {
                    name: "h".into(),
                    value: Some(Bytes::from_static(b"v")),
                }],
                expire_after: duration("1h"),
            }),
        };
        assert_eq!(spec, expected);
    }

    #[test]
    fn short_forms_mean_the_same() {
        for (short, long) in [
            (
                r#"{"cron":"@daily","zone":"Europe/Berlin"}"#,
                r#"{"cron":{"expression":"@daily","zone":"Europe/Berlin"}}"#,
            ),
            (r#"{"every":"5m"}"#, r#"{"every":{"interval":"5m"}}"#),
        ] {
            assert_eq!(read_text(short), read_text(long));
            assert_eq!(read_text(short).unwrap().spec.job, None);
        }
    }

    #[test]
    fn invalid_field_is_named() {
        const DEFINITIONS: &str = r#"
            "crom":"x" | unknownField | unknown field `crom`, did you mean `cron`?
            "cron":{"expression":"x","zon":"x"} | unknownField | unknown field `zon`, did you mean `zone`?
            "cron":"x","every":"5m" | every | `every` cannot be combined with `cron`; set one of the two
            "every":"5m","zone":"UTC" | zone | `zone` is set, but only `cron` has a time zone
            "cron":{"expression":"x"},"zone":"UTC" | zone | `zone` belongs in `cron` if that is an object
            "cron":7 | cron | `cron` is integer `7`; expected an expression, or an object with `expression`, `zone`, `gap` and `overlap`
            "cron":{} | cron.expression | `cron.expression` is missing
            "every":"x" | every | `every` `x` is not a duration: write
            "every":{"interval":"x"} | every.interval | `every.interval` `x` is not a duration
            "cron":{"expression":"x","gap":"drop"} | cron.gap | `cron.gap` is `drop`; expected `shift` or `skip`
            "cron":{"gap":"skip","gap":"skip"} | cron.gap | `cron.gap` appears more than once
            "maxCount":-1 | maxCount | `maxCount` is `-1`; expected a whole number that is not negative
            "misfire":"skip" | misfire | `misfire` is a text; expected an object with `policy`, `limit` and `grace`
            "misfire":["skip"] | misfire | `misfire` is sequence; expected an object with `policy`, `limit` and `grace`
            "jobData":1 | appName | `appName` is missing; set it to the name of the application
            "appName":"sms" | jobData | `jobData` is missing; set it to null if the job has no data
            "appName":"sms","jobData":1,"jobDataBase64":"AA==" | jobDataBase64 | `jobDataBase64` cannot be combined with `jobData`
            "appName":"sms","jobDataBase64":"A" | jobDataBase64 | `jobDataBase64` is not Base64: Invalid input length: 1
            "appName":"sms","jobData":1,"key":"","keyBase64":"" | keyBase64 | `keyBase64` cannot be combined with `key`
            "headers":[{"name":"h","value":"v","valueBase64":""}] | headers | `headers` are invalid at `headers` (an item is invalid); write
            "headers":[{"name":"h","valueBase64":"A"}] | headers | (not Base64: Invalid input length: 1)
            "state":"pausd" | state | `state` is `pausd`; expected one of `active`, `paused`, `finished`
            "revision":0 | revision | `revision` is 0; the first revision is 1
            "revision":"1" | revision | `revision` is `"1"`; expected a whole number that is not negative
            "start":"tomorrow" | start | expected a date and time such as 2026-01-31T12:00:00Z or 2026-01-31T12:00:00"#;
        for [fields, code, message] in rows(DEFINITIONS) {
            let text = format!("{{{fields}}}");
            let failure = read_text(&text).unwrap_err();
            assert_eq!(failure.code, format!("request.{code}"), "{text}");
            assert!(failure.message.contains(message), "{failure}");
        }
    }
}
