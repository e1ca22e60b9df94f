//! Parses the definitions of recurring schedules in JSON.
//!
//! A definition has the fields of its job at the top, next to those of its times. `cron` and `every` are objects, or texts if nothing
//! but the expression or the interval is given.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use jiff::tz::TimeZone;
use prost_types::{Duration as ProtoDuration, Timestamp as ProtoTimestamp};
use redeliver_core::Failure;
use redeliver_proto::convert::{to_duration, to_headers, to_priority, to_timestamp};
use redeliver_proto::v1;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use super::{
    Field, Fields, Format, HeaderValue, NamedValue, SHOWN, bounded_text, check_depth, entries, invalid,
    named_value, read_instant, shown, text,
};

/// The fields of a definition, and what a definition expects.
const FIELDS: [Field; 19] = [
    Field::Id,
    Field::App,
    Field::Data,
    Field::DataBase64,
    Field::Key,
    Field::KeyBase64,
    Field::Headers,
    Field::Priority,
    Field::ExpireAfter,
    Field::Cron,
    Field::Zone,
    Field::Every,
    Field::Start,
    Field::End,
    Field::MaxCount,
    Field::Jitter,
    Field::Misfire,
    Field::State,
    Field::Revision,
];
/// What a schedule shows besides its definition. So what was read can be sent again, these fields are ignored.
const SHOWN_ONLY: [&str; 7] = [
    "createdAt",
    "decidedUntil",
    "dispatched",
    "skipped",
    "nextNominalTime",
    "nextDueTime",
    "problem",
];
/// Those of its job.
const JOB_FIELDS: [Field; 8] = [
    Field::App,
    Field::Data,
    Field::DataBase64,
    Field::Key,
    Field::KeyBase64,
    Field::Headers,
    Field::Priority,
    Field::ExpireAfter,
];
const CRON_FIELDS: [Field; 4] = [
    Field::CronExpression,
    Field::CronZone,
    Field::CronGap,
    Field::CronOverlap,
];
const EVERY_FIELDS: [Field; 2] = [Field::EveryInterval, Field::EveryAnchor];
const MISFIRE_FIELDS: [Field; 3] = [Field::MisfirePolicy, Field::MisfireLimit, Field::MisfireGrace];

/// The states of a schedule.
const STATES: [(&str, v1::ScheduleState); 3] = [
    ("active", v1::ScheduleState::Active),
    ("paused", v1::ScheduleState::Paused),
    ("finished", v1::ScheduleState::Finished),
];

/// A definition, and what was written with it.
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
    let fields = Fields::read_ignoring(value, &FIELDS, &SHOWN_ONLY)?;
    let spec = v1::ScheduleSpec {
        timing: timing(&fields, zone)?,
        start: fields.time(Field::Start, zone)?,
        end: fields.time(Field::End, zone)?,
        max_count: fields.number(Field::MaxCount)?,
        jitter: fields.proto_duration(Field::Jitter)?,
        misfire: misfire(&fields)?,
        job: job(&fields, value)?,
    };
    let state = fields.choice(Field::State, &STATES)?;
    let revision = fields.number(Field::Revision)?;
    if revision == Some(0) {
        return Err(invalid(Field::Revision, "is 0; the first revision is 1"));
    }
    Ok(ReadSchedule {
        id: fields.text(Field::Id)?.map(Cow::into_owned),
        spec,
        state,
        revision,
    })
}

/// The failure of a definition that expects another state than the one that its schedule has or would have.
#[must_use]
pub fn other_state(expected: v1::ScheduleState, is: v1::ScheduleState) -> Failure {
    let [expected, is] = [expected, is].map(|state| state_name(state).unwrap_or("unknown"));
    let problem = format!(
        "is `{expected}`, but with this definition the schedule is {is}; leave it out, and pause or resume the schedule \
         to change it"
    );
    Field::State.rejected(Format::Json, &problem)
}

/// The name of a state in JSON; `None` if there is no state.
pub(crate) fn state_name(state: v1::ScheduleState) -> Option<&'static str> {
    let found = STATES.iter().find(|(_, other)| *other == state);
    found.map(|(name, _)| *name)
}

fn timing(fields: &Fields<'_>, zone: &TimeZone) -> Result<Option<v1::schedule_spec::Timing>, Failure> {
    use v1::schedule_spec::Timing;
    match (fields.value(Field::Cron), fields.value(Field::Every)) {
        (Some(_), Some(_)) => Err(invalid(
            Field::Every,
            "cannot be combined with `cron`; set one of the two",
        )),
        (Some(cron), None) => Ok(Some(Timing::Cron(read_cron(fields, cron)?))),
        (None, every) => {
            if fields.value(Field::Zone).is_some() {
                return Err(invalid(Field::Zone, "is set, but only `cron` has a time zone"));
            }
            let every = every.map(|every| read_every(fields, every, zone));
            Ok(every.transpose()?.map(Timing::Every))
        }
    }
}

fn read_cron(fields: &Fields<'_>, cron: &RawValue) -> Result<v1::CronTiming, Failure> {
    if !is_object(cron) {
        return Ok(v1::CronTiming {
            expression: fields.owned_text(Field::Cron)?,
            zone: fields.text(Field::Zone)?.map(Cow::into_owned),
            ..v1::CronTiming::default()
        });
    }
    if fields.value(Field::Zone).is_some() {
        return Err(invalid(Field::Zone, "belongs in `cron` if that is an object"));
    }
    let fields = Fields::of_object(cron.get(), &CRON_FIELDS, &[])?;
    let gap = fields.choice(
        Field::CronGap,
        &[("shift", v1::GapPolicy::Shift), ("skip", v1::GapPolicy::Skip)],
    )?;
    let overlap = fields.choice(
        Field::CronOverlap,
        &[
            ("first", v1::OverlapPolicy::First),
            ("both", v1::OverlapPolicy::Both),
        ],
    )?;
    Ok(v1::CronTiming {
        expression: fields.owned_text(Field::CronExpression)?,
        zone: fields.text(Field::CronZone)?.map(Cow::into_owned),
        gap: gap.unwrap_or_default().into(),
        overlap: overlap.unwrap_or_default().into(),
    })
}

fn read_every(fields: &Fields<'_>, every: &RawValue, zone: &TimeZone) -> Result<v1::IntervalTiming, Failure> {
    if !is_object(every) {
        return Ok(v1::IntervalTiming {
            interval: fields.proto_duration(Field::Every)?,
            anchor: None,
        });
    }
    let fields = Fields::of_object(every.get(), &EVERY_FIELDS, &[])?;
    Ok(v1::IntervalTiming {
        interval: fields.proto_duration(Field::EveryInterval)?,
        anchor: fields.time(Field::EveryAnchor, zone)?,
    })
}

fn misfire(fields: &Fields<'_>) -> Result<Option<v1::Misfire>, Failure> {
    let Some(misfire) = fields.value(Field::Misfire) else {
        return Ok(None);
    };
    if !is_object(misfire) {
        let problem = format!(
            "is {}; expected an object with `policy`, `limit` and `grace`",
            shown(misfire)
        );
        return Err(invalid(Field::Misfire, &problem));
    }
    let fields = Fields::of_object(misfire.get(), &MISFIRE_FIELDS, &[])?;
    let policy = fields.choice(
        Field::MisfirePolicy,
        &[
            ("skip", v1::MisfirePolicy::Skip),
            ("once", v1::MisfirePolicy::Once),
            ("all", v1::MisfirePolicy::All),
        ],
    )?;
    Ok(Some(v1::Misfire {
        policy: policy.unwrap_or_default().into(),
        limit: fields.number(Field::MisfireLimit)?,
        grace: fields.proto_duration(Field::MisfireGrace)?,
    }))
}

/// The job; `None` if none of its fields is set.
fn job(fields: &Fields<'_>, value: &Bytes) -> Result<Option<v1::JobTemplate>, Failure> {
    let Some(app) = fields.text(Field::App)? else {
        let given = JOB_FIELDS.into_iter().find(|field| fields.raw(*field).is_some());
        return match given {
            Some(_) => Err(invalid(
                Field::App,
                "is missing; set it to the name of the application",
            )),
            None => Ok(None),
        };
    };
    let data = match (fields.raw(Field::Data), fields.base64(Field::DataBase64)?) {
        (Some(data), None) => {
            check_depth(data.get())?;
            value.slice_ref(data.get().as_bytes())
        }
        (None, Some(data)) => data,
        (Some(_), Some(_)) => return Err(invalid(Field::DataBase64, "cannot be combined with `jobData`")),
        (None, None) => {
            let problem = "is missing; set it to null if the job has no data";
            return Err(invalid(Field::Data, problem));
        }
    };
    let key = match (fields.text(Field::Key)?, fields.base64(Field::KeyBase64)?) {
        (Some(_), Some(_)) => return Err(invalid(Field::KeyBase64, "cannot be combined with `key`")),
        (text, bytes) => text.map(|key| Bytes::from(key.into_owned())).or(bytes),
    };
    Ok(Some(v1::JobTemplate {
        app: app.into_owned(),
        priority: to_priority(fields.priority()?).into(),
        data,
        key,
        headers: to_headers(&fields.read_headers(header)?),
        expire_after: fields.proto_duration(Field::ExpireAfter)?,
    }))
}

/// `{"name": ..., "value": ...}`, or with `valueBase64` in place of the value.
fn header(item: &RawValue) -> Option<NamedValue<'_>> {
    let mut entries = entries(item.get()).ok()?;
    let Some(index) = entries.iter().position(|(field, _)| field == "valueBase64") else {
        return named_value(item);
    };
    let (_, encoded) = entries.swap_remove(index);
    let mut name = None;
    for (field, found) in entries {
        let is_valid = match &*field {
            "name" => name.replace(text(found)?).is_none(),
            "value" => found.get() == "null",
            _ => false,
        };
        if !is_valid {
            return None;
        }
    }
    Some((name?, HeaderValue::Base64(text(encoded)?)))
}

/// The data of a job as the JSON text from which it would be read unchanged; `None` if there is none.
pub(crate) fn as_data(bytes: &[u8]) -> Option<Box<RawValue>> {
    let json: Box<RawValue> = serde_json::from_slice(bytes).ok()?;
    // Without white space around it.
    let is_whole = json.get().len() == bytes.len();
    (is_whole && check_depth(json.get()).is_ok()).then_some(json)
}

fn is_object(value: &RawValue) -> bool {
    value.get().starts_with('{')
}

impl Fields<'_> {
    fn base64(&self, field: Field) -> Result<Option<Bytes>, Failure> {
        let Some(text) = self.text(field)? else {
            return Ok(None);
        };
        let decoded = STANDARD.decode(&*text);
        let decoded = decoded.map_err(|error| invalid(field, &format!("is not Base64: {error}")))?;
        Ok(Some(decoded.into()))
    }

    /// The text of a field; empty if it is missing.
    fn owned_text(&self, field: Field) -> Result<String, Failure> {
        Ok(self.text(field)?.map(Cow::into_owned).unwrap_or_default())
    }

    fn time(&self, field: Field, zone: &TimeZone) -> Result<Option<ProtoTimestamp>, Failure> {
        let text = self.text(field)?;
        let time = text.map(|text| read_instant(field, &text, zone));
        Ok(time.transpose()?.map(to_timestamp))
    }

    fn proto_duration(&self, field: Field) -> Result<Option<ProtoDuration>, Failure> {
        Ok(self.duration(field)?.map(to_duration))
    }

    fn number<T: DeserializeOwned>(&self, field: Field) -> Result<Option<T>, Failure> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        let number = serde_json::from_str(value.get());
        number.map(Some).map_err(|_| {
            let problem = format!(
                "is {}; expected a whole number that is not negative",
                shown(value)
            );
            invalid(field, &problem)
        })
    }

    fn choice<T: Copy>(&self, field: Field, choices: &[(&str, T)]) -> Result<Option<T>, Failure> {
        let Some(text) = self.text(field)? else {
            return Ok(None);
        };
        let found = choices.iter().find(|(name, _)| *name == text);
        found.map(|(_, choice)| Some(*choice)).ok_or_else(|| {
            let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
            let problem = format!(
                "is `{}`; expected one of {}",
                bounded_text(&text, SHOWN),
                names.join(", ")
            );
            invalid(field, &problem)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<ReadSchedule, Failure> {
        read(&Bytes::copy_from_slice(text.as_bytes()), &TimeZone::UTC)
    }

    #[test]
    fn a_definition_has_all_fields() {
        let text = r#"{"id":"nightly","cron":{"expression":"30 2 * * *","zone":"Europe/Berlin","gap":"skip","overlap":"both"},
            "start":"2026-01-01T00:00:00Z","end":"2026-12-31T00:00:00+01:00","maxCount":7,"jitter":"90s",
            "misfire":{"policy":"all","limit":5,"grace":"10m"},"appName":"sms","priority":"high","key":"k",
            "headers":{"h":"v"},"expireAfter":"1h","jobData":{"n": 1.50}}"#;
        let ReadSchedule { id, spec, .. } = read_text(text).unwrap();
        assert_eq!(id.as_deref(), Some("nightly"));
        let seconds = |seconds| Some(ProtoDuration { seconds, nanos: 0 });
        let expected = v1::ScheduleSpec {
            timing: Some(v1::schedule_spec::Timing::Cron(v1::CronTiming {
                expression: "30 2 * * *".into(),
                zone: Some("Europe/Berlin".into()),
                gap: v1::GapPolicy::Skip.into(),
                overlap: v1::OverlapPolicy::Both.into(),
            })),
            start: Some(ProtoTimestamp {
                seconds: 1_767_225_600,
                nanos: 0,
            }),
            end: Some(ProtoTimestamp {
                seconds: 1_798_671_600,
                nanos: 0,
            }),
            max_count: Some(7),
            jitter: seconds(90),
            misfire: Some(v1::Misfire {
                policy: v1::MisfirePolicy::All.into(),
                limit: Some(5),
                grace: seconds(600),
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
                expire_after: seconds(3600),
            }),
        };
        assert_eq!(spec, expected);
    }

    #[test]
    fn short_forms_mean_the_same_as_objects() {
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
    fn an_invalid_definition_names_the_field_and_what_is_valid() {
        for (text, code, message) in [
            (
                r#"{"crom":"x"}"#,
                "request.unknownField",
                "unknown field `crom`, did you mean `cron`?",
            ),
            (
                r#"{"cron":{"zon":"x"}}"#,
                "request.unknownField",
                "unknown field `zon`, did you mean `zone`?",
            ),
            (
                r#"{"cron":"x","every":"5m"}"#,
                "request.every",
                "`every` cannot be combined with `cron`; set one of the two",
            ),
            (
                r#"{"every":"5m","zone":"UTC"}"#,
                "request.zone",
                "`zone` is set, but only `cron` has a time zone",
            ),
            (
                r#"{"cron":{"expression":"x"},"zone":"UTC"}"#,
                "request.zone",
                "`zone` belongs in `cron` if that is an object",
            ),
            (
                r#"{"cron":{"gap":"drop"}}"#,
                "request.cron.gap",
                "`cron.gap` is `drop`; expected one of shift, skip",
            ),
            (
                r#"{"cron":{"gap":"skip","gap":"skip"}}"#,
                "request.cron.gap",
                "`cron.gap` appears more than once",
            ),
            (
                r#"{"maxCount":-1}"#,
                "request.maxCount",
                "`maxCount` is `-1`; expected a whole number that is not negative",
            ),
            (
                r#"{"misfire":"skip"}"#,
                "request.misfire",
                "`misfire` is `\"skip\"`; expected an object with `policy`, `limit` and `grace`",
            ),
            (
                r#"{"jobData":1}"#,
                "request.appName",
                "`appName` is missing; set it to the name of the application",
            ),
            (
                r#"{"appName":"sms"}"#,
                "request.jobData",
                "`jobData` is missing; set it to null if the job has no data",
            ),
            (
                r#"{"appName":"sms","jobData":1,"jobDataBase64":"AA=="}"#,
                "request.jobDataBase64",
                "`jobDataBase64` cannot be combined with `jobData`",
            ),
            (
                r#"{"appName":"sms","jobDataBase64":"A"}"#,
                "request.jobDataBase64",
                "`jobDataBase64` is not Base64: Invalid input length: 1",
            ),
            (
                r#"{"appName":"sms","jobData":1,"key":"","keyBase64":""}"#,
                "request.keyBase64",
                "`keyBase64` cannot be combined with `key`",
            ),
            (
                r#"{"appName":"sms","jobData":1,"headers":[{"name":"h","value":"v","valueBase64":""}]}"#,
                "request.headers",
                "`headers` contains an invalid item; expected an object of names and strings, or an array of objects with \
                 `name` and `value`",
            ),
            (
                r#"{"state":"pausd"}"#,
                "request.state",
                "`state` is `pausd`; expected one of active, paused, finished",
            ),
            (
                r#"{"revision":0}"#,
                "request.revision",
                "`revision` is 0; the first revision is 1",
            ),
            (
                r#"{"revision":"1"}"#,
                "request.revision",
                "`revision` is `\"1\"`; expected a whole number that is not negative",
            ),
            (
                r#"{"start":"tomorrow"}"#,
                "request.start",
                "`start` is `tomorrow`; expected a date and time such as 2026-01-31T12:00:00Z or 2026-01-31T12:00:00",
            ),
        ] {
            let failure = read_text(text).unwrap_err();
            assert_eq!((&*failure.code, &*failure.message), (code, message), "{text}");
        }
    }
}
