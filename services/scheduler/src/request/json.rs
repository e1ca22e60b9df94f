//! Parses requests in JSON. The bytes of the job's data are kept unchanged.

use std::borrow::Cow;
use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use jiff::tz::TimeZone;
use redeliver_core::failure::bounded_text;
use redeliver_core::time::InvalidTimestamp;
use redeliver_core::{Failure, Headers, HumanDuration, Timestamp};
use serde::Deserialize;
use serde::de::{Deserializer as _, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::field::{Field, Format, hint, read_id, read_job_ref};
use super::parsed::{ConflictPolicy, Draft, JobRef, ParsedRequest, When};
use crate::job::{Payload, Priority};

mod schedule;

pub use schedule::{ReadSchedule, other_state, read as read_schedule};
pub(crate) use schedule::{as_data, state_name};

/// The maximum nesting depth of a job's data. Common JSON parsers reject deeper data.
const MAX_DEPTH: usize = 128;
/// The maximum length of an invalid value in a message, in bytes.
const SHOWN: usize = 60;

/// Parses a request. Times without an offset are interpreted in `zone`.
///
/// # Errors
/// When the request is not JSON, or a field is unknown, missing, repeated, or invalid.
pub fn read(value: &Bytes, zone: &TimeZone) -> Result<ParsedRequest, Failure> {
    let fields = Fields::read(value, &Field::IN_JSON)?;
    fields.reject_recurring()?;
    if fields.value(Field::Cancel).is_some() {
        fields.only(Field::Cancel, &[Field::Cancel])?;
        return Ok(ParsedRequest::Cancel(fields.job_ref(Field::Cancel)?));
    }
    if fields.value(Field::Reschedule).is_some() {
        let allowed = [Field::Reschedule, Field::ScheduledTime, Field::Delay];
        fields.only(Field::Reschedule, &allowed)?;
        return Ok(ParsedRequest::Reschedule {
            job: fields.job_ref(Field::Reschedule)?,
            when: fields.when(zone)?,
        });
    }
    let Some(data) = fields.raw(Field::Data) else {
        return Err(invalid(
            Field::Data,
            "is missing; set it to null if the job has no data",
        ));
    };
    check_depth(data.get())?;
    let app = fields.text(Field::App)?;
    Ok(ParsedRequest::Schedule(Box::new(Draft {
        app: app
            .ok_or_else(|| invalid(Field::App, "is missing; set it to the name of the application"))?
            .into_owned(),
        when: fields.when(zone)?,
        priority: fields.priority()?,
        idempotency_key: fields.text(Field::IdempotencyKey)?.map(Cow::into_owned),
        request_id: fields.text(Field::RequestId)?.map(Cow::into_owned),
        payload: Payload {
            value: Some(value.slice_ref(data.get().as_bytes())),
            key: fields.text(Field::Key)?.map(|key| Bytes::from(key.into_owned())),
            headers: fields.headers()?,
        },
        expire_after: fields.duration(Field::ExpireAfter)?,
        on_conflict: fields.on_conflict()?,
    })))
}

/// Parses the body of a request to reschedule a job.
pub(crate) fn read_time(value: &[u8], zone: &TimeZone) -> Result<When, Failure> {
    let fields = Fields::read(value, &Field::IN_JSON)?;
    for field in Field::IN_JSON {
        let is_time = field == Field::ScheduledTime || field == Field::Delay;
        if !is_time && fields.value(field).is_some() {
            return Err(invalid(
                field,
                "cannot be changed; set only `scheduledTime` or `delay`",
            ));
        }
    }
    fields.when(zone)
}

/// Parses a date and time, rounded up to the millisecond. Without an offset it is interpreted in `zone`.
pub(crate) fn read_instant(field: Field, text: &str, zone: &TimeZone) -> Result<Timestamp, Failure> {
    Timestamp::parse_in(text, zone).map_err(|error| {
        let shown = bounded_text(text, SHOWN);
        let problem = match error {
            InvalidTimestamp::Form => {
                let right = "a date and time such as 2026-01-31T12:00:00Z or 2026-01-31T12:00:00";
                format!("is `{shown}`; expected {right}")
            }
            error => format!("is `{shown}`, which {error}"),
        };
        invalid(field, &problem)
    })
}

fn invalid(field: Field, problem: &str) -> Failure {
    field.malformed(Format::Json, problem)
}

fn invalid_json(problem: impl fmt::Display) -> Failure {
    Failure::malformed(
        "request.json",
        format!("the request is not a JSON object: {problem}"),
    )
}

/// The fields of an object, each at most once.
struct Fields<'a>(Vec<(Field, &'a RawValue)>);

impl<'a> Fields<'a> {
    /// Reads a request, which has these fields.
    fn read(value: &'a [u8], known: &[Field]) -> Result<Self, Failure> {
        Self::read_ignoring(value, known, &[])
    }

    /// Reads a request, which has these fields, and others that are ignored.
    fn read_ignoring(value: &'a [u8], known: &[Field], ignored: &[&str]) -> Result<Self, Failure> {
        let text = std::str::from_utf8(value)
            .map_err(|error| invalid_json(format_args!("not UTF-8 at byte {}", error.valid_up_to())))?;
        // For other values, the message of serde would contain the value.
        if !text.trim_ascii_start().starts_with('{') {
            return Err(invalid_json("it does not begin with `{`"));
        }
        Self::of_object(text, known, ignored)
    }

    fn of_object(text: &'a str, known: &[Field], ignored: &[&str]) -> Result<Self, Failure> {
        let mut fields = Self(Vec::new());
        for (name, value) in entries(text).map_err(invalid_json)? {
            if ignored.contains(&&*name) {
                continue;
            }
            let Some(field) = known.iter().copied().find(|field| field.key() == name) else {
                let known = known.iter().map(|field| field.key());
                let shown = bounded_text(&name, SHOWN);
                let message = format!("unknown field `{shown}`{}", hint(&name, known));
                return Err(Failure::malformed("request.unknownField", message));
            };
            if fields.raw(field).is_some() {
                return Err(invalid(field, "appears more than once"));
            }
            fields.0.push((field, value));
        }
        Ok(fields)
    }

    /// The JSON text of a field.
    fn raw(&self, field: Field) -> Option<&'a RawValue> {
        let mut fields = self.0.iter();
        fields.find_map(|(other, value)| (*other == field).then_some(*value))
    }

    /// The JSON text of a field, unless it is null.
    fn value(&self, field: Field) -> Option<&'a RawValue> {
        self.raw(field).filter(|value| value.get() != "null")
    }

    fn text(&self, field: Field) -> Result<Option<Cow<'a, str>>, Failure> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        match text(value) {
            Some(text) => Ok(Some(text)),
            None => Err(invalid(field, &format!("is {}; expected a string", shown(value)))),
        }
    }

    fn reject_recurring(&self) -> Result<(), Failure> {
        for field in [Field::Cron, Field::TimeZone] {
            if self.value(field).is_some() {
                let problem = "is not supported in the request for a job; set `scheduledTime` or `delay`, or create a \
                               recurring schedule at /v1/schedules";
                return Err(field.rejected(Format::Json, problem));
            }
        }
        Ok(())
    }

    /// Rejects fields that a command does not have.
    fn only(&self, command: Field, allowed: &[Field]) -> Result<(), Failure> {
        for field in Field::IN_JSON {
            if !allowed.contains(&field) && self.value(field).is_some() {
                return Err(invalid(
                    field,
                    &format!("cannot be combined with `{}`", command.json()),
                ));
            }
        }
        Ok(())
    }

    /// The job of a command: its id, or an object with its application and idempotency key.
    fn job_ref(&self, field: Field) -> Result<JobRef, Failure> {
        if let Some(value) = self.value(field).filter(|value| value.get().starts_with('{')) {
            let fields = Fields::read(value.get().as_bytes(), &Field::IN_JSON)?;
            fields.only(field, &[Field::App, Field::IdempotencyKey])?;
            let (app, key) = (fields.text(Field::App)?, fields.text(Field::IdempotencyKey)?);
            let (app, key) = (app.unwrap_or_default(), key.unwrap_or_default());
            return read_job_ref(field, Format::Json, "", &app, &key);
        }
        let problem = "expected an id, or an object with `appName` and `idempotencyKey`";
        match self.value(field).and_then(text) {
            Some(id) => read_id(field, Format::Json, &id).map(JobRef::Id),
            None => Err(invalid(
                field,
                &format!(
                    "is {}; {problem}",
                    self.value(field).map_or_else(String::new, shown)
                ),
            )),
        }
    }

    fn on_conflict(&self) -> Result<ConflictPolicy, Failure> {
        match self.text(Field::OnConflict)?.as_deref() {
            None | Some("reject") => Ok(ConflictPolicy::Reject),
            Some("replace") => Ok(ConflictPolicy::Replace),
            Some(other) => {
                let shown = bounded_text(other, SHOWN);
                let problem = format!("is `{shown}`; expected reject or replace");
                Err(invalid(Field::OnConflict, &problem))
            }
        }
    }

    fn when(&self, zone: &TimeZone) -> Result<When, Failure> {
        match (self.text(Field::ScheduledTime)?, self.duration(Field::Delay)?) {
            (Some(text), None) => read_instant(Field::ScheduledTime, &text, zone).map(When::At),
            (None, Some(delay)) => Ok(When::After(delay)),
            (Some(_), Some(_)) => Err(invalid(
                Field::ScheduledTime,
                "cannot be combined with `delay`; set one of the two",
            )),
            (None, None) => Err(invalid(
                Field::ScheduledTime,
                "is missing; set it, or set `delay`, for example to 90s",
            )),
        }
    }

    fn duration(&self, field: Field) -> Result<Option<HumanDuration>, Failure> {
        let Some(text) = self.text(field)? else {
            return Ok(None);
        };
        let duration = text
            .parse()
            .map_err(|error| invalid(field, &format!("{error}")))?;
        Ok(Some(duration))
    }

    fn priority(&self) -> Result<Priority, Failure> {
        let Some(text) = self.text(Field::Priority)? else {
            return Ok(Priority::default());
        };
        let all = [Priority::High, Priority::Normal, Priority::Low];
        all.into_iter()
            .find(|priority| text.eq_ignore_ascii_case(priority.as_str()))
            .ok_or_else(|| {
                let shown = bounded_text(&text, SHOWN);
                invalid(
                    Field::Priority,
                    &format!("is `{shown}`; expected high, normal or low"),
                )
            })
    }

    fn headers(&self) -> Result<Headers, Failure> {
        self.read_headers(named_value)
    }

    /// The headers, each with its name and value by `read_item` if they are an array.
    fn read_headers(
        &self,
        read_item: impl Fn(&'a RawValue) -> Option<NamedValue<'a>>,
    ) -> Result<Headers, Failure> {
        const RIGHT: &str =
            "expected an object of names and strings, or an array of objects with `name` and `value`";
        let Some(value) = self.value(Field::Headers) else {
            return Ok(Headers::new());
        };
        let problem = |problem: &str| invalid(Field::Headers, &format!("{problem}; {RIGHT}"));
        let mut headers = Headers::new();
        let mut push = |name: &str, value: HeaderValue<'_>| {
            let shown = || bounded_text(name, SHOWN);
            match value {
                HeaderValue::Json(value) => {
                    let value = value.filter(|value| value.get() != "null");
                    let text = value.map(|value| {
                        let shown = shown();
                        text(value).ok_or_else(|| {
                            problem(&format!("contains a value for `{shown}` that is not a string"))
                        })
                    });
                    headers.push(name, text.transpose()?.as_deref().map(str::as_bytes));
                }
                HeaderValue::Base64(encoded) => {
                    let decoded = STANDARD.decode(&*encoded).map_err(|error| {
                        let shown = shown();
                        problem(&format!(
                            "contains a value for `{shown}` that is not Base64: {error}"
                        ))
                    })?;
                    headers.push(name, Some(&decoded));
                }
            }
            Ok(())
        };
        if value.get().starts_with('{') {
            let entries = entries(value.get()).map_err(invalid_json)?;
            let mut names = std::collections::BTreeSet::new();
            for (name, value) in &entries {
                if !names.insert(name) {
                    let shown = bounded_text(name, SHOWN);
                    return Err(problem(&format!(
                        "contains `{shown}` more than once, which only the array form allows"
                    )));
                }
                push(name, HeaderValue::Json(Some(value)))?;
            }
        } else if value.get().starts_with('[') {
            let items: Vec<&RawValue> = serde_json::from_str(value.get()).map_err(invalid_json)?;
            for item in items {
                let (name, value) = read_item(item).ok_or_else(|| problem("contains an invalid item"))?;
                push(&name, value)?;
            }
        } else {
            return Err(problem("is neither an object nor an array"));
        }
        Ok(headers)
    }
}

/// The value of a header.
enum HeaderValue<'a> {
    /// A string or null; a missing value is null.
    Json(Option<&'a RawValue>),
    Base64(Cow<'a, str>),
}

type NamedValue<'a> = (Cow<'a, str>, HeaderValue<'a>);

/// `{"name": ..., "value": ...}`.
fn named_value(item: &RawValue) -> Option<NamedValue<'_>> {
    let (mut name, mut value) = (None, None);
    for (field, found) in entries(item.get()).ok()? {
        let is_repeated = match field.as_ref() {
            "name" => name.replace(text(found)?).is_some(),
            "value" => value.replace(found).is_some(),
            _ => return None,
        };
        if is_repeated {
            return None;
        }
    }
    Some((name?, HeaderValue::Json(value)))
}

fn text(value: &RawValue) -> Option<Cow<'_, str>> {
    serde_json::from_str::<Text<'_>>(value.get())
        .ok()
        .map(|text| text.0)
}

fn shown(value: &RawValue) -> String {
    match value.get().as_bytes().first() {
        Some(b'{') => "an object".to_owned(),
        Some(b'[') => "an array".to_owned(),
        _ => format!("`{}`", bounded_text(value.get(), SHOWN)),
    }
}

#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// The names and values of a JSON object in order, including repeated names.
fn entries(object: &str) -> Result<Vec<(Cow<'_, str>, &RawValue)>, serde_json::Error> {
    struct Entries;

    impl<'de> Visitor<'de> for Entries {
        type Value = Vec<(Cow<'de, str>, &'de RawValue)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a JSON object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut entries = Vec::new();
            while let Some(Text(name)) = map.next_key()? {
                entries.push((name, map.next_value()?));
            }
            Ok(entries)
        }
    }

    let mut deserializer = serde_json::Deserializer::from_str(object);
    let entries = deserializer.deserialize_map(Entries)?;
    deserializer.end()?;
    Ok(entries)
}

fn check_depth(data: &str) -> Result<(), Failure> {
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    for byte in data.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => depth += 1,
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            let problem = format!("is nested more than {MAX_DEPTH} levels deep");
            return Err(invalid(Field::Data, &problem));
        }
    }
    Ok(())
}
