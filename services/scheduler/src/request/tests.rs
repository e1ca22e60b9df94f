//! Requests that are accepted, requests that are rejected, and the messages.

use proptest::prelude::*;
use redeliver_core::{ErrorClass, Position};
use redeliver_proto::convert::{to_duration, to_priority, to_timestamp};

use super::*;
use crate::job::JobId;

const NOW: Timestamp = Timestamp::from_millis(1_763_722_800_000); // 2025-11-21T11:00:00Z

fn rules() -> Rules {
    Rules {
        apps: [
            ("sms".to_owned(), "sms-jobs".into()),
            ("mail".to_owned(), "mails".into()),
        ]
        .into(),
        pipelines: [("crawl-jobs".to_owned(), Arc::new(Pipeline::new("crawl-jobs")))].into(),
        time_zone: TimeZone::UTC,
        max_ahead: "3650d".parse().unwrap(),
        max_request_age: "7d".parse().unwrap(),
        max_data: 1000,
    }
}

fn record(value: impl Into<Bytes>, headers: Headers) -> Record {
    Record {
        position: Position {
            topic: "scheduler.jobs.ingest".into(),
            partition: 1,
            offset: 2,
        },
        timestamp: Some(Timestamp::from_millis(NOW.as_millis() - 5_000)),
        key: None,
        value: Some(value.into()),
        headers,
        unreadable_headers: 0,
    }
}

fn json(text: &str) -> Record {
    record(text.to_owned(), Headers::new())
}

fn protobuf(command: Message) -> Record {
    let command = v1::JobCommand {
        command: Some(command),
        answer_to: String::new(),
    };
    record(command.encode_to_vec(), [CONTENT_TYPE].into_iter().collect())
}

const CONTENT_TYPE: (&str, Option<&[u8]>) = ("content-type", Some(redeliver_proto::CONTENT_TYPE.as_bytes()));

fn request_of(record: &Record, rules: &Rules) -> Request {
    match read(record, rules, NOW).command {
        Ok(Command::Schedule(request)) => *request,
        other => panic!("{other:?}"),
    }
}

fn accepted(text: &str) -> Request {
    request_of(&json(text), &rules())
}

fn failure_of(record: &Record) -> Failure {
    read(record, &rules(), NOW).command.unwrap_err()
}

/// Asserts that the request is rejected with this code and a message that contains this text.
#[track_caller]
fn rejected(text: &str, code: &str, says: &str) {
    let failure = failure_of(&json(text));
    assert_eq!(failure.code, format!("request.{code}"), "{failure} {text}");
    assert!(failure.message.contains(says), "{failure} {text}");
}

/// The columns of the lines of a table.
pub(super) fn rows<const N: usize>(table: &str) -> impl Iterator<Item = [&str; N]> {
    table.trim().lines().map(|line| {
        let columns: Vec<&str> = line.trim().split(" | ").collect();
        columns.try_into().expect(line)
    })
}

/// A request with these fields instead of a valid time.
fn with(fields: &str) -> String {
    format!(r#"{{"appName":"sms","jobData":1,{fields}}}"#)
}

fn id() -> JobId {
    JobId::new(NOW, 3, 77)
}

#[test]
fn all_fields_are_parsed() {
    let request = accepted(
        r#"{ "requestId": "optional", "appName": "sms", "scheduledTime": "2025-11-22T22:00:00", "priority": "HIGH",
             "idempotencyKey": "sms-12345", "onConflict": "replace", "expireAfter": "5m", "jobData": { "any":  "json" } }"#,
    );
    assert_eq!(request.due.to_string(), "2025-11-22T22:00:00.000Z");
    assert_eq!((&*request.app, &*request.topic), ("sms", "sms-jobs"));
    assert_eq!((request.kind, request.priority), (Kind::App, Priority::High));
    assert_eq!(request.idempotency_key.as_deref(), Some("sms-12345"));
    assert_eq!(request.on_conflict, ConflictPolicy::Replace);
    assert_eq!(request.request_id.as_deref(), Some("optional"));
    let data = br#"{ "any":  "json" }"#;
    assert_eq!(request.payload.value.as_deref(), Some(&data[..]));
    assert_eq!(request.payload.key, None);
    // Counted from the due time.
    assert_eq!(request.expires.unwrap().to_string(), "2025-11-22T22:05:00.000Z");
    // Many JSON serializers write null for fields that are not set.
    let nulls = r#""delay":"1s","cron":null,"priority":null,"headers":null,"key":null,"requestId":null,"cancel":null"#;
    let request = accepted(&with(nulls));
    assert_eq!((request.priority, request.expires), (Priority::Normal, None));
    let request = accepted(&with(
        r#""delay":"1s","onConflict":"reject","expireAfter":"36500d""#,
    ));
    assert_eq!(request.on_conflict, ConflictPolicy::Reject);
    assert!(request.expires.unwrap().to_rfc3339().is_some());
}

#[test]
fn data_bytes_are_unchanged() {
    for data in [
        "null",
        "1e400",
        "\"\\u00e4 \u{e4}\"",
        "[ 1,\t2 ]",
        "{\"a\":1,\"a\":2}",
        "0.10",
    ] {
        let request = accepted(&format!(r#"{{"jobData": {data} ,"appName":"sms","delay":"1s"}}"#));
        assert_eq!(request.payload.value.as_deref(), Some(data.as_bytes()));
    }
}

#[test]
fn local_times_use_configured_zone() {
    for (zone, time, due) in [
        ("UTC", "2025-12-01T10:00:00+01:00", "2025-12-01T09:00:00.000Z"),
        ("UTC", "2025-12-01T10:00Z", "2025-12-01T10:00:00.000Z"),
        ("UTC", "2025-12-01T10:00", "2025-12-01T10:00:00.000Z"),
        ("UTC", "2025-12-01 10:00:00.0001", "2025-12-01T10:00:00.001Z"),
        // A time in the past is allowed.
        ("UTC", "1999-12-01T10:00:00Z", "1999-12-01T10:00:00.000Z"),
        ("Europe/Berlin", "2025-12-01T10:00:00", "2025-12-01T09:00:00.000Z"),
        // Skipped when the clocks go forward; repeated when they go back.
        ("Europe/Berlin", "2026-03-29T02:30:00", "2026-03-29T01:30:00.000Z"),
        ("Europe/Berlin", "2026-10-25T02:30:00", "2026-10-25T00:30:00.000Z"),
    ] {
        let rules = Rules {
            time_zone: TimeZone::get(zone).unwrap(),
            ..rules()
        };
        let text = with(&format!(r#""scheduledTime":"{time}""#));
        assert_eq!(request_of(&json(&text), &rules).due.to_string(), due, "{time}");
    }
}

#[test]
fn invalid_times_are_rejected() {
    const FORM: &str = "expected a date and time such as";
    const TIMES: &str = "
        2025-13-01T10:00:00Z | which names a month, day, hour or minute that does not exist
        2025-12-01T25:00:00 | which names a month, day, hour or minute that does not exist
        2025-12-01T12:30:60Z | which has a second of 60 or more
        2025-12-01T12:30:60 | which has a second of 60 or more
        2025-12-01T12:00:00+25:00 | which has an offset beyond 23:59
        9999-12-31T23:59:59-01:00 | which is not in the years 1 to 9999
        9999-12-31T23:59:59Z | is too far ahead (9999-12-31T23:59:59.000Z)
        2999-01-01T00:00:00Z | the maximum is 3650d";
    let forms = [
        "",
        "tomorrow",
        "2025-12-01",
        "10:00:00",
        "2025-12-01T10:00:00[Europe/Berlin]",
        "2025-12-01T10:00:00+01:00[Europe/Berlin]",
        "20251201T10:00:00 and more",
    ];
    for [time, says] in rows(TIMES).chain(forms.map(|time| [time, FORM])) {
        rejected(
            &with(&format!(r#""scheduledTime":"{time}""#)),
            "scheduledTime",
            says,
        );
    }
}

#[test]
fn invalid_fields_are_named() {
    const FIELDS: &str = r#"
        "scheduledTime":1763722800 | scheduledTime | is integer `1763722800`; expected a string
        "scheduledTime":[2025,11,3] | scheduledTime | is sequence; expected a string
        "delay":"soon" | delay | `soon` is not a duration
        "delay":"213503982334d" | delay | the maximum is 3650d
        "priority":"low" | scheduledTime | is missing; set it, or set `delay`
        "delay":"5s","scheduledTime":"2025-12-01T10:00:00Z" | scheduledTime | set one of the two
        "scheduleTime":"x" | unknownField | unknown field `scheduleTime`, did you mean `scheduledTime`?
        "headersBase64":{} | unknownField | unknown field `headersBase64`
        "key":"\ud800" | key | hex escape
        "delay":1e999 | delay | out of range
        "headers":"Bearer secret" | headers | are invalid at `headers` (invalid type: string);
        "headers":{"pin":1234} | headers | are invalid at `headers.pin` (invalid type: integer);
        "tenant":"x" | unknownField | unknown field `tenant`; expected one of appName
        "delay":"1s","delay":"1s" | delay | appears more than once
        "key":null,"key":null | key | appears more than once
        "delay":"1s","cron":"* * * * *" | cron | is not supported in the request for a job
        "delay":"1s","timeZone":"UTC" | timeZone | is not supported in the request for a job
        "delay":"1s","priority":"urgent" | priority | is `urgent`; expected one of `high`, `normal`, `low`
        "delay":"1s","priority":{"high":null} | priority | is map; expected a string
        "delay":"1s","idempotencyKey":"" | idempotencyKey | is empty
        "delay":"1s","requestId":"" | requestId | is empty; omit it instead
        "delay":"1s","expireAfter":"36501d" | expireAfter | the maximum is 36500d
        "delay":"1s","onConflict":"replace" | onConflict | is `replace`, which needs an `idempotencyKey`
        "delay":"1s","onConflict":"latest" | onConflict | is `latest`; expected `reject` or `replace`
        "delay":"1s","keyBase64":"AA==" | unknownField | unknown field `keyBase64`"#;
    for [fields, code, says] in rows(FIELDS) {
        rejected(&with(fields), code, says);
    }
    let long = "k".repeat(513);
    let idempotency_key = with(&format!(r#""delay":"1s","idempotencyKey":"{long}""#));
    let request_id = with(&format!(r#""delay":"1s","requestId":"{long}""#));
    let data = |data: &str| format!(r#"{{"appName":"sms","delay":"1s","jobData":{data}}}"#);
    let large = data(&format!("\"{}\"", "d".repeat(1000)));
    let deep = data(&("[".repeat(129) + &"]".repeat(129)));
    let size = "1002 bytes including key and headers; the maximum is 1000";
    for (text, code, says) in [
        (
            &*idempotency_key,
            "idempotencyKey",
            "has 513 bytes; the maximum is 512",
        ),
        (&request_id, "requestId", "has 513 bytes"),
        (&large, "jobData", size),
        (&deep, "jobData", "more than 128 levels"),
        (
            r#"{"appName":"sms","delay":"1s"}"#,
            "jobData",
            "is missing; set it to null",
        ),
        (r#"{"jobData":1,"delay":"1s"}"#, "appName", "is missing"),
        (
            r#"{"jobData":1,"delay":"1s","appName":null}"#,
            "appName",
            "is missing",
        ),
    ] {
        rejected(text, code, says);
    }
}

#[test]
fn unknown_application_gets_suggestion() {
    let text = |app: &str| format!(r#"{{"appName":"{app}","jobData":1,"delay":"1s"}}"#);
    let similar = "is `SMS`, which is not an application, did you mean `sms`?";
    rejected(&text("SMS"), "appName", similar);
    rejected(&text("fax"), "appName", "expected one of mail, sms");
    assert_eq!(failure_of(&json(&text("fax"))).class, ErrorClass::Permanent);
}

#[test]
fn delay_counts_from_plausible_timestamp() {
    let mut record = json(&with(r#""delay":"90s""#));
    let (now, day) = (NOW.as_millis(), 86_400_000);
    let oldest = now - 7 * day;
    for (timestamp, from, is_too_old) in [
        (Some(now - 5_000), now - 5_000, false),
        (Some(now + day), now, false),
        (Some(now - day), now - day, false),
        (Some(oldest), oldest, false),
        (Some(oldest - 1), now, true),
        // In seconds, of a clock that was never set, and none at all.
        (Some(now / 1_000), now, true),
        (Some(1), now, true),
        (Some(i64::MIN), now, true),
        (None, now, false),
    ] {
        record.timestamp = timestamp.map(Timestamp::from_millis);
        let incoming = read(&record, &rules(), NOW);
        assert_eq!(incoming.is_timestamp_too_old, is_too_old, "{timestamp:?}");
        let due = request_of(&record, &rules()).due.as_millis();
        assert_eq!(due, from + 90_000, "{timestamp:?}");
    }
}

#[test]
fn invalid_json_is_not_quoted() {
    for (text, says) in [
        ("", "does not begin with `{`"),
        ("\"a secret\"", "does not begin with `{`"),
        ("[1]", "does not begin with `{`"),
        ("{", "EOF"),
        (r#"{"jobData": "a secret" "#, "EOF"),
        (r#"{"jobData": a secret}"#, "expected value"),
        (r#"{} {}"#, "trailing"),
    ] {
        rejected(text, "json", says);
        assert!(!failure_of(&json(text)).message.contains("secret"));
    }
    let failure = failure_of(&record(&b"{\"jobData\":\"\xff\"}"[..], Headers::new()));
    assert!(failure.message.contains("not UTF-8 at byte 12"), "{failure}");
    let mut tombstone = json("{}");
    tombstone.value = None;
    assert_eq!(failure_of(&tombstone).code, "request.value");
}

#[test]
fn headers_are_object_or_array() {
    let twice = [("a", Some(&b"1"[..])), ("a", Some(b"2"))];
    let (value, null) = (("a", Some(&b"1"[..])), ("b", None));
    for (text, expected) in [
        (r#"{"a":"1","b":null}"#, [value, null]),
        (
            r#"[{"name":"a","value":"1"},{"value":null,"name":"b"}]"#,
            [value, null],
        ),
        (r#"[{"name":"a","value":"1"},{"name":"b"}]"#, [value, null]),
        (r#"[{"name":"a","value":"1"},{"name":"a","value":"2"}]"#, twice),
    ] {
        let request = accepted(&with(&format!(r#""delay":"1s","headers":{text}"#)));
        assert_eq!(request.payload.headers, expected.into_iter().collect());
    }
    const WRONG: &str = r#"
        {"a":"1","a":"2"} | `a` is repeated, which only an array allows
        {"a":1} | at `headers.a` (invalid type: integer)
        7 | are invalid at `headers` (invalid type: integer)
        [{"name":"a","value":"1","more":1}] | at `headers[0].more` (unknown field `more`
        [{"value":"1"}] | at `headers[0]` (missing field `name`); write an object of names and strings
        [{"name":"a","valueBase64":"AA=="}] | an item is invalid
        ["a"] | an item is invalid
        [["a","1"]] | are invalid at `headers[0]`
        {"":"x"} | without a name
        {"process-after":"x"} | `process-after`, which is reserved
        {"job-id":"x"} | `job-id`
        {"dispatched-at":"x"} | `dispatched-at`"#;
    for [wrong, says] in rows(WRONG) {
        rejected(
            &with(&format!(r#""delay":"1s","headers":{wrong}"#)),
            "headers",
            says,
        );
    }
}

#[test]
fn key_and_trace_are_inherited() {
    let mut record = json(&with(r#""delay":"1s""#));
    record.key = Some(Bytes::from_static(b"k"));
    let trace = [("traceparent", Some(&b"00-x"[..])), ("tracestate", Some(b"a=1"))];
    let other = ("other", Some(&b"not for the target"[..]));
    record.headers = trace.into_iter().chain([other]).collect();
    let request = request_of(&record, &rules());
    assert_eq!(request.payload.key.as_deref(), Some(&b"k"[..]));
    assert_eq!(request.payload.headers, trace.into_iter().collect());
    let text = with(r#""delay":"1s","key":"own","headers":{"traceparent":"00-own"}"#);
    record.value = Some(text.into());
    let request = request_of(&record, &rules());
    assert_eq!(request.payload.key.as_deref(), Some(&b"own"[..]));
    assert_eq!(request.payload.headers.len(), 1);
}

#[test]
fn commands_name_jobs() {
    let by_key = JobRef::Key {
        app: "sms".into(),
        key: "k".into(),
    };
    let when = When::After("60s".parse().unwrap());
    let due = Timestamp::from_millis(NOW.as_millis() + 55_000);
    let key = r#"{"idempotencyKey":"k","appName":"sms"}"#.to_owned();
    for (job, text) in [(JobRef::Id(id()), format!("\"{}\"", id())), (by_key, key)] {
        let (cancel, rescheduled) = (job.cancel(), reschedule(job.cancel(), when));
        for (record, command) in [
            (
                json(&format!(r#"{{"cancel":{text}}}"#)),
                Command::Cancel(job.clone()),
            ),
            (protobuf(Message::Cancel(cancel)), Command::Cancel(job.clone())),
            (
                json(&format!(r#"{{"delay":"60s","reschedule":{text}}}"#)),
                Command::Reschedule {
                    job: job.clone(),
                    due,
                },
            ),
            (
                protobuf(Message::Reschedule(rescheduled)),
                Command::Reschedule { job, due },
            ),
        ] {
            assert_eq!(read(&record, &rules(), NOW).command, Ok(command));
        }
    }
}

#[test]
fn invalid_commands_are_rejected() {
    const JOBS: &str = r#"
        {"appName":"sms"} | idempotencyKey | `idempotencyKey` is missing
        {"idempotencyKey":"k"} | appName | `appName` is missing
        {} | cancel | set `appName` and `idempotencyKey`
        {"appName":"smss","idempotencyKey":"k"} | appName | did you mean `sms`?
        {"appName":"sms","idempotencyKey":"k","delay":"1s"} | delay | cannot be combined with `cancel`
        {"appName":"sms","key":"k"} | key | cannot be combined
        {"appName":"sms","idempotencyKey":"k","cancel":"x"} | cancel | cannot be
        {"id":"x"} | unknownField | unknown field `id`
        ["sms","k"] | cancel | expected an id, or an object with `appName` and `idempotencyKey`
        7 | cancel | is `7`; expected an id
        "x" | cancel | `x` is not a job id
        "" | cancel | is missing; set it, or set"#;
    const COMMANDS: &str = r#"
        "cancel":ID,"delay":"1s" | delay | cannot be combined with `cancel`
        "reschedule":ID,"delay":"1s","jobData":1 | jobData | cannot be combined with `reschedule`
        "reschedule":ID | scheduledTime | is missing
        "reschedule":ID,"delay":"4000d" | delay | the maximum is 3650d"#;
    let long = format!(r#"{{"appName":"sms","idempotencyKey":"{}"}}"#, "k".repeat(513));
    for [job, code, says] in rows(JOBS).chain([[&*long, "idempotencyKey", "has 513 bytes"]]) {
        rejected(&format!(r#"{{"cancel":{job}}}"#), code, says);
    }
    for [fields, code, says] in rows(COMMANDS) {
        let fields = fields.replace("ID", &format!("\"{}\"", id()));
        rejected(&format!("{{{fields}}}"), code, says);
    }
    for (id, app, key, says) in [
        (
            "",
            "",
            "",
            "`id` is missing; set it, or set `app` and `idempotency_key`",
        ),
        (
            "x",
            "sms",
            "",
            "`id` cannot be combined with `app` and `idempotency_key`",
        ),
        ("", "sms", "", "`idempotency_key` is missing"),
        ("", "", "k", "`app` is missing"),
    ] {
        let failure = read_job_ref(Field("id"), Format::Protobuf, id, app, key).unwrap_err();
        assert!(failure.message.contains(says), "{failure}");
    }
}

#[test]
fn only_due_time_can_change() {
    let due = |text: &str| read_due(text.as_bytes(), &TimeZone::UTC);
    assert_eq!(
        due(r#"{"delay":"1s","key":null}"#),
        Ok(When::After("1s".parse().unwrap()))
    );
    for (text, code) in [
        (r#"{"delay":"1s","priority":"low"}"#, "request.priority"),
        (r#"{"delay":"1s","jobdata":1}"#, "request.unknownField"),
        ("{}", "request.scheduledTime"),
    ] {
        assert_eq!(due(text).unwrap_err().code, code);
    }
}

#[test]
fn content_type_chooses_format() {
    let typed = |value: Option<&[u8]>| {
        let mut record = json(&with(r#""delay":"1s""#));
        record.headers.push("content-type", value);
        record
    };
    request_of(&typed(Some(b"Application/JSON; charset=utf-8")), &rules());
    for wrong in [None, Some(&b"text/plain"[..]), Some(&b"\xff"[..])] {
        let failure = failure_of(&typed(wrong));
        assert_eq!(failure.code, "request.contentType");
        let says = "expected application/json or application/x-protobuf";
        assert!(failure.message.contains(says), "{failure}");
    }
    let mut twice = typed(Some(b"application/json"));
    twice.headers.push_text("content-type", "application/json");
    assert!(failure_of(&twice).message.contains("more than once"));
    let wrong = typed(Some(b"application/x-protobuf"));
    assert_eq!(failure_of(&wrong).code, "request.protobuf");
    let mut unreadable = json("{}");
    unreadable.unreadable_headers = 1;
    assert_eq!(failure_of(&unreadable).code, "header.name");
}

#[test]
fn invalid_protobuf_keeps_answer_key() {
    let spec = |change: fn(&mut v1::JobSpec)| {
        let mut spec = v1::JobSpec {
            app: "sms".to_owned(),
            when: Some(When::After("1s".parse().unwrap()).into()),
            ..v1::JobSpec::default()
        };
        change(&mut spec);
        Some(Message::Schedule(spec))
    };
    let negative = |spec: &mut v1::JobSpec| {
        let delay = prost_types::Duration {
            seconds: -1,
            nanos: 0,
        };
        spec.when = Some(v1::job_spec::When::Delay(delay));
    };
    let cancel = Message::Cancel(v1::CancelJob {
        id: "x".to_owned(),
        ..v1::CancelJob::default()
    });
    for (command, code, says) in [
        (None, "command", "is missing"),
        (
            spec(|spec| spec.app.clear()),
            "appName",
            "`app` is ``, which is not an application",
        ),
        (
            spec(|spec| spec.when = None),
            "scheduledTime",
            "`scheduled_time` is missing",
        ),
        (spec(|spec| spec.priority = 9), "priority", "is 9"),
        (
            spec(|spec| spec.idempotency_key = Some("k".repeat(513))),
            "idempotencyKey",
            "`idempotency_key` has 513 bytes",
        ),
        (
            spec(|spec| spec.idempotency_key = Some(String::new())),
            "idempotencyKey",
            "`idempotency_key` is empty",
        ),
        (
            spec(|spec| spec.request_id = Some(String::new())),
            "requestId",
            "`request_id` is empty",
        ),
        (spec(negative), "delay", "expected a duration of 0 or more"),
        (Some(cancel), "cancel", "`id` `x` is not a job id"),
        (spec(|spec| spec.on_conflict = 9), "onConflict", "is 9"),
        (
            spec(|spec| spec.on_conflict = v1::ConflictPolicy::Replace.into()),
            "onConflict",
            "`on_conflict` is `replace`, which needs an `idempotency_key`",
        ),
    ] {
        let command = v1::JobCommand {
            command,
            answer_to: "caller-1".to_owned(),
        };
        let record = record(command.encode_to_vec(), [CONTENT_TYPE].into_iter().collect());
        let incoming = read(&record, &rules(), NOW);
        assert_eq!(incoming.answer_to.as_deref(), Some("caller-1"));
        let failure = incoming.command.unwrap_err();
        assert_eq!(failure.code, format!("request.{code}"), "{failure}");
        assert!(failure.message.contains(says), "{failure}");
    }
}

#[test]
fn long_wait_record_is_unchanged() {
    let header = |name: &str, value: Option<&'static [u8]>| v1::Header {
        name: name.to_owned(),
        value: value.map(Bytes::from_static),
    };
    let due = NOW.after(std::time::Duration::from_secs(3600));
    let wait = v1::LongWait {
        pipeline: "crawl-jobs".to_owned(),
        due: Some(to_timestamp(due)),
        value: None,
        key: Some(Bytes::new()),
        headers: vec![header("process-after", Some(b"x")), header("a", None)],
    };
    let written = |wait: v1::LongWait| {
        let mut record = protobuf(Message::LongWait(wait));
        record.headers.push_text("traceparent", "00-other");
        record.key = Some(Bytes::from_static(b"ingest"));
        record
    };
    let request = request_of(&written(wait.clone()), &rules());
    let headers = [("process-after", Some(&b"x"[..])), ("a", None)];
    let payload = Payload {
        value: None,
        key: Some(Bytes::new()),
        headers: headers.into_iter().collect(),
    };
    assert_eq!(request.payload, payload);
    assert_eq!(
        (&*request.topic, request.kind),
        ("crawl-jobs-retry-due", Kind::LongWait)
    );
    assert_eq!((&*request.app, request.due), ("crawl-jobs", due));
    // Longer than a job may be.
    let value = Some(Bytes::from(vec![0; rules().max_data + 1]));
    let long = v1::LongWait {
        value: value.clone(),
        ..wait.clone()
    };
    assert_eq!(
        request_of(&written(long), &rules()).payload,
        Payload { value, ..payload }
    );
    let of = |pipeline: &str| {
        written(v1::LongWait {
            pipeline: pipeline.to_owned(),
            ..wait.clone()
        })
    };
    // Another process knows it already, or still.
    let request = request_of(&of("mail"), &rules());
    assert_eq!((&*request.app, &*request.topic), ("mail", "mail-retry-due"));
    for name in ["", "..", "a b", &"x".repeat(240)] {
        let read = read(&of(name), &rules(), NOW);
        assert_eq!(read.command.unwrap_err().code, "request.pipeline", "{name}");
        assert!(read.rejected_wait.is_none(), "{name}");
    }
}

#[test]
fn keys_are_hashed_with_application() {
    assert_ne!(key_hash("a", "bc"), key_hash("ab", "c"));
    assert_eq!(key_hash("a", "b"), key_hash("a", "b"));
    let key = [b"sms".as_slice(), b"\0", b"sms-1"].concat();
    assert_eq!(
        shard_of("sms", "sms-1", 12),
        redeliver_kafka::murmur2::partition_for_key(&key, 12)
    );
}

fn specs() -> impl Strategy<Value = v1::JobSpec> {
    let when = prop_oneof![
        (0_i64..4_000_000_000_000).prop_map(|millis| When::At(Timestamp::from_millis(millis))),
        (0_u64..1_000_000_000).prop_map(|millis| When::After(HumanDuration::from_millis(millis))),
    ];
    let name = || proptest::option::of("[a-z0-9-]{1,20}");
    let header = ("x-[a-z]{1,5}", proptest::option::of("\\PC{0,5}")).prop_map(|(name, value)| v1::Header {
        name,
        value: value.map(Bytes::from),
    });
    let data = prop_oneof![
        Just("null".to_owned()),
        "[1-9][0-9]{0,10}",
        "\"[a-z ]{0,20}\"",
        "\\{\"a\": \\[[1-9]\\]\\}"
    ];
    let priority = prop_oneof![Just(Priority::High), Just(Priority::Normal), Just(Priority::Low)];
    let expire_after = proptest::option::of((0_u64..1_000_000_000).prop_map(HumanDuration::from_millis));
    (
        (when, priority, expire_after, any::<bool>()),
        (name(), name()),
        (
            data,
            proptest::option::of("\\PC{0,10}"),
            proptest::collection::vec(header, 0..4),
        ),
    )
        .prop_map(
            |(
                (when, priority, expire_after, replaces),
                (idempotency_key, request_id),
                (data, key, headers),
            )| {
                v1::JobSpec {
                    on_conflict: match &idempotency_key {
                        Some(_) if replaces => v1::ConflictPolicy::Replace,
                        _ => v1::ConflictPolicy::Unspecified,
                    }
                    .into(),
                    app: "sms".to_owned(),
                    when: Some(when.into()),
                    priority: to_priority(priority).into(),
                    idempotency_key,
                    request_id,
                    data: data.into(),
                    key: key.map(Bytes::from),
                    headers,
                    expire_after: expire_after.map(to_duration),
                }
            },
        )
}

fn as_json(spec: &v1::JobSpec) -> String {
    use redeliver_proto::convert::{from_duration, from_timestamp};
    let text = |bytes: &Bytes| String::from_utf8(bytes.to_vec()).unwrap();
    let duration = |wait: &prost_types::Duration| from_duration(wait).unwrap().to_string();
    let when = match spec.when.as_ref().unwrap() {
        v1::job_spec::When::ScheduledTime(time) => {
            format!(r#""scheduledTime":"{}""#, from_timestamp(time).unwrap())
        }
        v1::job_spec::When::Delay(delay) => format!(r#""delay":"{}""#, duration(delay)),
    };
    let mut fields = vec![when];
    let mut optional = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            fields.push(format!("{name:?}:{}", serde_json::to_string(&value).unwrap()));
        }
    };
    optional("appName", Some(spec.app.clone()));
    optional("priority", PriorityName::of(spec.priority()).map(str::to_owned));
    optional("idempotencyKey", spec.idempotency_key.clone());
    optional("requestId", spec.request_id.clone());
    let replaces = spec.on_conflict() == v1::ConflictPolicy::Replace;
    optional("onConflict", replaces.then(|| "replace".to_owned()));
    optional("key", spec.key.as_ref().map(text));
    optional("expireAfter", spec.expire_after.as_ref().map(duration));
    let headers = spec.headers.iter();
    let headers = headers.map(|header| {
        serde_json::json!({"name": header.name, "value": header.value.as_ref().map(text)}).to_string()
    });
    let headers = headers.collect::<Vec<_>>().join(",");
    fields.push(format!(
        r#""headers":[{headers}],"jobData": {} "#,
        text(&spec.data)
    ));
    format!("{{{}}}", fields.join(","))
}

proptest! {
    #[test]
    fn both_formats_mean_the_same(spec in specs()) {
        let from_json = read(&json(&as_json(&spec)), &rules(), NOW).command;
        let from_protobuf = read(&protobuf(Message::Schedule(spec)), &rules(), NOW).command;
        match from_json {
            Ok(_) => prop_assert_eq!(from_json, from_protobuf),
            Err(failure) => prop_assert_eq!(failure.code, "request.scheduledTime"),
        }
    }

    #[test]
    fn different_content_has_different_hash(one in specs(), other in specs()) {
        let rules = Rules { max_ahead: "99999d".parse().unwrap(), ..rules() };
        let hash = |spec: &v1::JobSpec| request_of(&json(&as_json(spec)), &rules).request_hash;
        let named = |spec: &v1::JobSpec| v1::JobSpec { request_id: None, idempotency_key: None, on_conflict: 0, ..spec.clone() };
        prop_assert_eq!(named(&one) == named(&other), hash(&one) == hash(&other));
        // Neither the request id nor the policy is part of the content.
        prop_assert_eq!(hash(&named(&one)), hash(&one));
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), is_protobuf in any::<bool>()) {
        let _ = read(&record(bytes, is_protobuf.then_some(CONTENT_TYPE).into_iter().collect()), &rules(), NOW);
    }

    #[test]
    fn nearly_valid_requests_never_panic(spec in specs(), at in any::<prop::sample::Index>(), byte in any::<u8>(), is_protobuf in any::<bool>()) {
        let mut record = if is_protobuf { protobuf(Message::Schedule(spec)) } else { json(&as_json(&spec)) };
        let mut bytes = record.value.take().unwrap().to_vec();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        record.value = Some(bytes.into());
        let _ = read(&record, &rules(), NOW);
    }
}
