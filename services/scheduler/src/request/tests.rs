//! Requests that are accepted, requests that are rejected, and the messages.

use bytes::Bytes;
use proptest::prelude::*;
use redeliver_core::{ErrorClass, Position};
use redeliver_proto::{Message as _, v1};

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

fn protobuf(command: &v1::JobCommand) -> Record {
    let mut headers = Headers::new();
    headers.push_text("content-type", redeliver_proto::CONTENT_TYPE);
    record(command.encode_to_vec(), headers)
}

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
    assert_eq!(failure.code, code, "{failure}");
    assert!(failure.message.contains(says), "{failure}");
}

/// A request with these fields instead of a valid time.
fn with(fields: &str) -> String {
    format!(r#"{{"appName":"sms","jobData":1,{fields}}}"#)
}

#[track_caller]
fn due_at(fields: &str) -> String {
    accepted(&with(fields)).due.to_string()
}

#[test]
fn a_request_with_all_fields_is_parsed() {
    let request = accepted(
        r#"{ "requestId": "optional", "appName": "sms", "scheduledTime": "2025-11-22T22:00:00",
             "priority": "HIGH", "idempotencyKey": "sms-12345", "jobData": { "any":  "json" } }"#,
    );
    assert_eq!(request.due.to_string(), "2025-11-22T22:00:00.000Z");
    assert_eq!((&*request.app, &*request.topic), ("sms", "sms-jobs"));
    assert_eq!((request.kind, request.priority), (Kind::App, Priority::High));
    assert_eq!(request.idempotency_key.as_deref(), Some("sms-12345"));
    assert_eq!(request.request_id.as_deref(), Some("optional"));
    assert_eq!(
        request.payload.value.as_deref(),
        Some(br#"{ "any":  "json" }"#.as_slice())
    );
    assert_eq!((request.payload.key, request.expires), (None, None));
}

#[test]
fn the_bytes_of_the_data_are_unchanged() {
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
fn a_time_without_an_offset_is_in_the_configured_time_zone() {
    assert_eq!(
        due_at(r#""scheduledTime":"2025-12-01T10:00:00+01:00""#),
        "2025-12-01T09:00:00.000Z"
    );
    assert_eq!(
        due_at(r#""scheduledTime":"2025-12-01T10:00Z""#),
        "2025-12-01T10:00:00.000Z"
    );
    assert_eq!(
        due_at(r#""scheduledTime":"2025-12-01T10:00""#),
        "2025-12-01T10:00:00.000Z"
    );
    assert_eq!(
        due_at(r#""scheduledTime":"2025-12-01 10:00:00.0001""#),
        "2025-12-01T10:00:00.001Z"
    );
    // A time in the past is allowed.
    assert_eq!(
        due_at(r#""scheduledTime":"1999-12-01T10:00:00Z""#),
        "1999-12-01T10:00:00.000Z"
    );
    let berlin = Rules {
        time_zone: TimeZone::get("Europe/Berlin").unwrap(),
        ..rules()
    };
    let due = |local: &str| {
        let text = with(&format!(r#""scheduledTime":"{local}""#));
        request_of(&json(&text), &berlin).due.to_string()
    };
    assert_eq!(due("2025-12-01T10:00:00"), "2025-12-01T09:00:00.000Z");
    // Skipped when the clocks go forward; repeated when they go back.
    assert_eq!(due("2026-03-29T02:30:00"), "2026-03-29T01:30:00.000Z");
    assert_eq!(due("2026-10-25T02:30:00"), "2026-10-25T00:30:00.000Z");
}

#[test]
fn an_invalid_time_is_rejected() {
    for time in [
        "",
        "tomorrow",
        "2025-12-01",
        "10:00:00",
        "2025-12-01T10:00:00[Europe/Berlin]",
        "2025-12-01T10:00:00+01:00[Europe/Berlin]",
        "20251201T10:00:00 and more",
    ] {
        let text = with(&format!(r#""scheduledTime":"{time}""#));
        rejected(&text, "request.scheduledTime", "expected a date and time such as");
    }
    for (time, problem) in [
        (
            "2025-13-01T10:00:00Z",
            "which names a month, day, hour or minute that does not exist",
        ),
        (
            "2025-12-01T25:00:00",
            "which names a month, day, hour or minute that does not exist",
        ),
        ("2025-12-01T12:30:60Z", "which has a second of 60 or more"),
        ("2025-12-01T12:30:60", "which has a second of 60 or more"),
        ("2025-12-01T12:00:00+25:00", "which has an offset beyond 23:59"),
        ("9999-12-31T23:59:59-01:00", "which is not in the years 1 to 9999"),
    ] {
        let text = with(&format!(r#""scheduledTime":"{time}""#));
        rejected(&text, "request.scheduledTime", problem);
    }
    let text = with(r#""scheduledTime":"9999-12-31T23:59:59Z""#);
    rejected(
        &text,
        "request.scheduledTime",
        "is too far ahead (9999-12-31T23:59:59.000Z)",
    );
    rejected(
        &with(r#""scheduledTime":1763722800"#),
        "request.scheduledTime",
        "is `1763722800`; expected a string",
    );
    rejected(
        &with(r#""scheduledTime":[2025,11,3]"#),
        "request.scheduledTime",
        "is an array",
    );
    rejected(
        &with(r#""delay":"soon""#),
        "request.delay",
        "`soon` is not a duration",
    );
    rejected(
        &with(r#""priority":"low""#),
        "request.scheduledTime",
        "is missing; set it, or set `delay`",
    );
    let both = with(r#""delay":"5s","scheduledTime":"2025-12-01T10:00:00Z""#);
    rejected(&both, "request.scheduledTime", "set one of the two");
}

#[test]
fn a_delay_counts_from_the_timestamp_of_the_record_unless_that_is_in_the_future() {
    let mut record = json(&with(r#""delay":"90s""#));
    let due = |record: &Record| request_of(record, &rules()).due.as_millis() - NOW.as_millis();
    assert_eq!(due(&record), 85_000);
    record.timestamp = Some(NOW.after(std::time::Duration::from_secs(3600)));
    assert_eq!(due(&record), 90_000);
    record.timestamp = None;
    assert_eq!(due(&record), 90_000);
}

#[test]
fn a_delay_counts_from_no_implausible_timestamp() {
    let mut record = json(&with(r#""delay":"90s""#));
    let day = 86_400_000;
    let oldest = NOW.as_millis() - 7 * day;
    for (timestamp, is_too_old) in [
        (NOW.as_millis() + day, false),
        (NOW.as_millis() - day, false),
        (oldest, false),
        (oldest - 1, true),
        // In seconds, of a clock that was never set, and none at all.
        (NOW.as_millis() / 1_000, true),
        (1, true),
        (i64::MIN, true),
    ] {
        record.timestamp = Some(Timestamp::from_millis(timestamp));
        let incoming = read(&record, &rules(), NOW);
        assert_eq!(incoming.is_timestamp_too_old, is_too_old, "{timestamp}");
        let due = request_of(&record, &rules()).due.as_millis();
        let from = if is_too_old {
            NOW.as_millis()
        } else {
            timestamp.min(NOW.as_millis())
        };
        assert_eq!(due, from + 90_000, "{timestamp}");
    }
}

#[test]
fn a_job_too_far_ahead_is_rejected_with_the_limit() {
    rejected(
        &with(r#""scheduledTime":"2999-01-01T00:00:00Z""#),
        "request.scheduledTime",
        "the maximum is 3650d",
    );
    rejected(
        &with(r#""delay":"213503982334d""#),
        "request.delay",
        "the maximum is 3650d",
    );
    let text = format!(r#"{{"reschedule":"{}","delay":"4000d"}}"#, id());
    rejected(&text, "request.delay", "the maximum is 3650d");
}

#[test]
fn unknown_repeated_and_missing_fields_are_named() {
    rejected(
        &with(r#""scheduleTime":"x""#),
        "request.unknownField",
        "did you mean `scheduledTime`?",
    );
    rejected(
        &with(r#""tenant":"x""#),
        "request.unknownField",
        "unknown field `tenant`; expected one of requestId",
    );
    rejected(
        &with(r#""delay":"1s","delay":"1s""#),
        "request.delay",
        "appears more than once",
    );
    rejected(
        r#"{"appName":"sms","delay":"1s"}"#,
        "request.jobData",
        "is missing; set it to null",
    );
    rejected(r#"{"jobData":1,"delay":"1s"}"#, "request.appName", "is missing");
    rejected(
        r#"{"jobData":1,"delay":"1s","appName":null}"#,
        "request.appName",
        "is missing",
    );
    rejected(
        &with(r#""delay":"1s","cron":"* * * * *""#),
        "request.cron",
        "is not supported in the request for a job",
    );
    rejected(
        &with(r#""delay":"1s","timeZone":"UTC""#),
        "request.timeZone",
        "is not supported in the request for a job",
    );
    // Many JSON serializers write null for fields that are not set.
    let nulls = r#""delay":"1s","cron":null,"priority":null,"headers":null,"key":null,"requestId":null"#;
    assert_eq!(accepted(&with(nulls)).priority, Priority::Normal);
}

#[test]
fn values_out_of_range_are_rejected() {
    rejected(
        &with(r#""delay":"1s","priority":"urgent""#),
        "request.priority",
        "expected high, normal or low",
    );
    rejected(
        &with(r#""delay":"1s","idempotencyKey":"""#),
        "request.idempotencyKey",
        "is empty",
    );
    let text = with(r#""delay":"1s","requestId":"""#);
    rejected(&text, "request.requestId", "is empty; omit it instead");
    let long = "k".repeat(513);
    let text = with(&format!(r#""delay":"1s","idempotencyKey":"{long}""#));
    rejected(
        &text,
        "request.idempotencyKey",
        "has 513 bytes; the maximum is 512",
    );
    let text = with(&format!(r#""delay":"1s","requestId":"{long}""#));
    rejected(&text, "request.requestId", "has 513 bytes");
    let data = format!(
        r#"{{"appName":"sms","delay":"1s","jobData":"{}"}}"#,
        "d".repeat(1000)
    );
    rejected(
        &data,
        "request.jobData",
        "1002 bytes including key and headers; the maximum is 1000",
    );
    let deep = format!(
        r#"{{"appName":"sms","delay":"1s","jobData":{}{}}}"#,
        "[".repeat(129),
        "]".repeat(129)
    );
    rejected(&deep, "request.jobData", "more than 128 levels");
}

#[test]
fn an_unknown_application_is_rejected_with_a_suggestion() {
    let text = |app: &str| format!(r#"{{"appName":"{app}","jobData":1,"delay":"1s"}}"#);
    rejected(
        &text("SMS"),
        "request.appName",
        "is `SMS`, which is not an application, did you mean `sms`?",
    );
    rejected(&text("fax"), "request.appName", "expected one of mail, sms");
    assert_eq!(failure_of(&json(&text("fax"))).class, ErrorClass::Permanent);
}

#[test]
fn invalid_json_is_rejected_and_not_in_the_message() {
    for (text, says) in [
        ("", "does not begin with `{`"),
        ("\"a secret\"", "does not begin with `{`"),
        ("[1]", "does not begin with `{`"),
        ("{", "EOF"),
        (r#"{"jobData": "a secret" "#, "EOF"),
        (r#"{"jobData": a secret}"#, "expected value"),
        (r#"{} {}"#, "trailing"),
    ] {
        rejected(text, "request.json", says);
        assert!(!failure_of(&json(text)).message.contains("secret"));
    }
    let failure = failure_of(&record(&b"{\"jobData\":\"\xff\"}"[..], Headers::new()));
    assert!(failure.message.contains("not UTF-8 at byte 12"), "{failure}");
    let mut tombstone = json("{}");
    tombstone.value = None;
    assert_eq!(failure_of(&tombstone).code, "request.value");
}

#[test]
fn headers_are_an_object_or_an_array() {
    let headers = |text: &str| {
        accepted(&with(&format!(r#""delay":"1s","headers":{text}"#)))
            .payload
            .headers
    };
    let expected: Headers = [("a", Some(&b"1"[..])), ("b", None)].into_iter().collect();
    assert_eq!(headers(r#"{"a":"1","b":null}"#), expected);
    assert_eq!(
        headers(r#"[{"name":"a","value":"1"},{"value":null,"name":"b"}]"#),
        expected
    );
    let twice: Headers = [("a", Some(&b"1"[..])), ("a", Some(&b"2"[..]))]
        .into_iter()
        .collect();
    assert_eq!(
        headers(r#"[{"name":"a","value":"1"},{"name":"a","value":"2"}]"#),
        twice
    );
    for (wrong, says) in [
        (r#"{"a":"1","a":"2"}"#, "contains `a` more than once"),
        (r#"{"a":1}"#, "not a string"),
        ("7", "neither"),
        (r#"[{"name":"a","value":"1","more":1}]"#, "invalid item"),
        (r#"[{"value":"1"}]"#, "invalid item"),
        (r#"["a"]"#, "invalid item"),
        (r#"{"":"x"}"#, "without a name"),
        (r#"{"process-after":"x"}"#, "`process-after`, which is reserved"),
        (r#"{"job-id":"x"}"#, "`job-id`"),
        (r#"{"dispatched-at":"x"}"#, "`dispatched-at`"),
    ] {
        rejected(
            &with(&format!(r#""delay":"1s","headers":{wrong}"#)),
            "request.headers",
            says,
        );
    }
}

#[test]
fn a_request_without_key_and_trace_context_inherits_those_of_the_record() {
    let mut record = json(&with(r#""delay":"1s""#));
    record.key = Some(Bytes::from_static(b"k"));
    record.headers.push_text("traceparent", "00-x");
    record.headers.push_text("tracestate", "a=1");
    record.headers.push_text("other", "not for the target");
    let request = request_of(&record, &rules());
    assert_eq!(request.payload.key.as_deref(), Some(&b"k"[..]));
    let trace: Headers = [
        ("traceparent", Some(&b"00-x"[..])),
        ("tracestate", Some(&b"a=1"[..])),
    ]
    .into_iter()
    .collect();
    assert_eq!(request.payload.headers, trace);
    let text = with(r#""delay":"1s","key":"own","headers":{"traceparent":"00-own"}"#);
    record.value = Some(text.into());
    let request = request_of(&record, &rules());
    assert_eq!(request.payload.key.as_deref(), Some(&b"own"[..]));
    assert_eq!(request.payload.headers.len(), 1);
}

#[test]
fn expiry_counts_from_the_due_time() {
    let request = accepted(&with(
        r#""scheduledTime":"2025-12-01T10:00:00Z","expireAfter":"5m""#,
    ));
    assert_eq!(request.expires.unwrap().to_string(), "2025-12-01T10:05:00.000Z");
}

#[test]
fn a_time_after_which_a_job_expires_can_be_written() {
    let with_expiry = |wait: &str| json(&with(&format!(r#""delay":"1s","expireAfter":"{wait}""#)));
    let request = request_of(&with_expiry("36500d"), &rules());
    assert!(request.expires.unwrap().to_rfc3339().is_some());
    let failure = failure_of(&with_expiry("36501d"));
    assert_eq!(failure.code, "request.expireAfter");
    assert!(
        failure.message.contains("the maximum is 36500d"),
        "{}",
        failure.message
    );
}

fn id() -> JobId {
    JobId::new(NOW, 3, 77)
}

#[test]
fn commands_cannot_be_combined_with_other_fields() {
    let command = |text: String| read(&json(&text), &rules(), NOW).command;
    assert_eq!(
        command(format!(r#"{{"cancel":"{}"}}"#, id())),
        Ok(Command::Cancel(JobRef::Id(id())))
    );
    let due = Timestamp::from_millis(NOW.as_millis() + 55_000);
    let job = JobRef::Id(id());
    let reschedule = Ok(Command::Reschedule { job, due });
    assert_eq!(
        command(format!(r#"{{"reschedule":"{}","delay":"60s"}}"#, id())),
        reschedule
    );
    rejected(r#"{"cancel":"x"}"#, "request.cancel", "`x` is not a job id");
    rejected(r#"{"cancel":7}"#, "request.cancel", "is `7`; expected an id");
    rejected(
        &format!(r#"{{"cancel":"{}","delay":"1s"}}"#, id()),
        "request.delay",
        "cannot be combined with `cancel`",
    );
    rejected(
        &format!(r#"{{"reschedule":"{}","delay":"1s","jobData":1}}"#, id()),
        "request.jobData",
        "cannot be combined with `reschedule`",
    );
    rejected(
        &format!(r#"{{"reschedule":"{}"}}"#, id()),
        "request.scheduledTime",
        "is missing",
    );
}

#[test]
fn the_content_type_chooses_the_format() {
    let typed = |value: Option<&[u8]>| {
        let mut record = json(&with(r#""delay":"1s""#));
        record.headers.push("content-type", value);
        record
    };
    request_of(&typed(Some(b"Application/JSON; charset=utf-8")), &rules());
    for wrong in [None, Some(&b"text/plain"[..]), Some(&b"\xff"[..])] {
        let failure = failure_of(&typed(wrong));
        assert_eq!(failure.code, "request.contentType");
        assert!(
            failure
                .message
                .contains("expected application/json or application/x-protobuf")
        );
    }
    let mut twice = typed(Some(b"application/json"));
    twice.headers.push_text("content-type", "application/json");
    assert!(failure_of(&twice).message.contains("more than once"));
    assert_eq!(
        failure_of(&typed(Some(b"application/x-protobuf"))).code,
        "request.protobuf"
    );
    let mut unreadable = json("{}");
    unreadable.unreadable_headers = 1;
    assert_eq!(failure_of(&unreadable).code, "header.name");
}

#[test]
fn an_invalid_protobuf_request_keeps_its_answer_key() {
    let check = |command: Option<v1::job_command::Command>, code: &str, says: &str| {
        let command = v1::JobCommand {
            command,
            answer_to: "caller-1".to_owned(),
        };
        let incoming = read(&protobuf(&command), &rules(), NOW);
        assert_eq!(incoming.answer_to.as_deref(), Some("caller-1"));
        let failure = incoming.command.unwrap_err();
        assert_eq!(failure.code, code, "{failure}");
        assert!(failure.message.contains(says), "{failure}");
    };
    let spec = |change: fn(&mut v1::JobSpec)| {
        let mut spec = v1::JobSpec {
            app: "sms".to_owned(),
            when: Some(v1::job_spec::When::Delay(prost_types::Duration {
                seconds: 1,
                nanos: 0,
            })),
            ..v1::JobSpec::default()
        };
        change(&mut spec);
        Some(v1::job_command::Command::Schedule(spec))
    };
    check(None, "request.command", "is missing");
    check(
        spec(|spec| spec.app.clear()),
        "request.appName",
        "`app` is ``, which is not an application",
    );
    check(
        spec(|spec| spec.when = None),
        "request.scheduledTime",
        "`scheduled_time` is missing",
    );
    check(spec(|spec| spec.priority = 9), "request.priority", "is 9");
    check(
        spec(|spec| spec.idempotency_key = Some("k".repeat(513))),
        "request.idempotencyKey",
        "`idempotency_key` has 513 bytes",
    );
    check(
        spec(|spec| spec.idempotency_key = Some(String::new())),
        "request.idempotencyKey",
        "`idempotency_key` is empty",
    );
    check(
        spec(|spec| spec.request_id = Some(String::new())),
        "request.requestId",
        "`request_id` is empty",
    );
    check(
        spec(|spec| {
            spec.when = Some(v1::job_spec::When::Delay(prost_types::Duration {
                seconds: -1,
                nanos: 0,
            }));
        }),
        "request.delay",
        "expected a duration of 0 or more",
    );
    check(
        Some(v1::job_command::Command::Cancel(v1::CancelJob {
            id: "x".to_owned(),
            ..v1::CancelJob::default()
        })),
        "request.cancel",
        "`id` `x` is not a job id",
    );
    check(spec(|spec| spec.on_conflict = 9), "request.onConflict", "is 9");
    check(
        spec(|spec| spec.on_conflict = v1::ConflictPolicy::Replace.into()),
        "request.onConflict",
        "`on_conflict` is `replace`, which needs an `idempotency_key`",
    );
}

#[test]
fn the_record_of_a_long_wait_is_unchanged() {
    let headers: Headers = [("process-after", Some(&b"x"[..])), ("a", None)]
        .into_iter()
        .collect();
    let wait = LongWait {
        pipeline: "crawl-jobs".to_owned(),
        due: NOW.after(std::time::Duration::from_secs(3600)),
        payload: Payload {
            value: None,
            key: Some(Bytes::new()),
            headers,
        },
    };
    let written = |wait: &LongWait| {
        let mut headers = Headers::new();
        headers.push_text("content-type", redeliver_proto::CONTENT_TYPE);
        headers.push_text("traceparent", "00-other");
        let mut record = record(
            write_protobuf(&ParsedRequest::LongWait(Box::new(wait.clone())), ""),
            headers,
        );
        record.key = Some(Bytes::from_static(b"ingest"));
        record
    };
    let request = request_of(&written(&wait), &rules());
    assert_eq!(request.payload, wait.payload);
    assert_eq!(
        (&*request.topic, request.kind),
        ("crawl-jobs-retry-due", Kind::LongWait)
    );
    assert_eq!((&*request.app, request.due), ("crawl-jobs", wait.due));
    let longer_than_a_job_may_be = LongWait {
        payload: Payload {
            value: Some(vec![0; rules().max_data + 1].into()),
            ..wait.payload.clone()
        },
        ..wait.clone()
    };
    let request = request_of(&written(&longer_than_a_job_may_be), &rules());
    assert_eq!(request.payload, longer_than_a_job_may_be.payload);
    // Another process knows it already, or still.
    let unknown = LongWait {
        pipeline: "mail".to_owned(),
        ..wait.clone()
    };
    let request = request_of(&written(&unknown), &rules());
    assert_eq!((&*request.app, &*request.topic), ("mail", "mail-retry-due"));
    for name in ["", "..", "a b", &"x".repeat(240)] {
        let invalid = LongWait {
            pipeline: name.to_owned(),
            ..wait.clone()
        };
        let read = read(&written(&invalid), &rules(), NOW);
        assert_eq!(read.command.unwrap_err().code, "request.pipeline", "{name}");
        assert!(read.rejected_wait.is_none(), "{name}");
    }
}

#[test]
fn a_command_names_its_job_by_its_id_or_by_its_key() {
    let by_key = JobRef::Key {
        app: "sms".into(),
        key: "k".into(),
    };
    let cancelled = Ok(Command::Cancel(by_key.clone()));
    let command = |text: &str| read(&json(text), &rules(), NOW).command;
    assert_eq!(
        command(r#"{"cancel":{"appName":"sms","idempotencyKey":"k"}}"#),
        cancelled
    );
    let due = Timestamp::from_millis(NOW.as_millis() + 55_000);
    let rescheduled = Ok(Command::Reschedule {
        job: by_key.clone(),
        due,
    });
    let key = r#"{"idempotencyKey":"k","appName":"sms"}"#;
    assert_eq!(
        command(&format!(r#"{{"delay":"60s","reschedule":{key}}}"#)),
        rescheduled
    );
    let when = When::After("60s".parse().unwrap());
    for (request, expected) in [
        (ParsedRequest::Cancel(by_key.clone()), cancelled),
        (ParsedRequest::Reschedule { job: by_key, when }, rescheduled),
    ] {
        let mut headers = Headers::new();
        headers.push_text("content-type", redeliver_proto::CONTENT_TYPE);
        let written = record(write_protobuf(&request, ""), headers);
        assert_eq!(read(&written, &rules(), NOW).command, expected);
    }
    for (job, code, says) in [
        (
            r#"{"appName":"sms"}"#,
            "request.idempotencyKey",
            "`idempotencyKey` is missing",
        ),
        (
            r#"{"idempotencyKey":"k"}"#,
            "request.appName",
            "`appName` is missing",
        ),
        ("{}", "request.cancel", "set `appName` and `idempotencyKey`"),
        (
            r#"{"appName":"smss","idempotencyKey":"k"}"#,
            "request.appName",
            "did you mean `sms`?",
        ),
        (
            r#"{"appName":"sms","idempotencyKey":"k","delay":"1s"}"#,
            "request.delay",
            "cannot be combined with `cancel`",
        ),
        (
            r#"{"appName":"sms","key":"k"}"#,
            "request.key",
            "cannot be combined",
        ),
        (
            r#"{"appName":"sms","idempotencyKey":"k","cancel":"x"}"#,
            "request.cancel",
            "cannot be",
        ),
        (r#"{"id":"x"}"#, "request.unknownField", "unknown field `id`"),
        (
            r#"["sms","k"]"#,
            "request.cancel",
            "is an array; expected an id, or an object",
        ),
        (r#""""#, "request.cancel", "is not a job id"),
    ] {
        rejected(&format!(r#"{{"cancel":{job}}}"#), code, says);
    }
    let long = "k".repeat(513);
    let long = format!(r#"{{"cancel":{{"appName":"sms","idempotencyKey":"{long}"}}}}"#);
    rejected(&long, "request.idempotencyKey", "has 513 bytes");
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
        let failure = read_job_ref(Field::Id, Format::Protobuf, id, app, key).unwrap_err();
        assert!(failure.message.contains(says), "{failure}");
    }
}

#[test]
fn a_replacing_request_needs_a_key() {
    rejected(
        &with(r#""delay":"1s","onConflict":"replace""#),
        "request.onConflict",
        "`onConflict` is `replace`, which needs an `idempotencyKey`",
    );
    rejected(
        &with(r#""delay":"1s","onConflict":"latest""#),
        "request.onConflict",
        "is `latest`; expected reject or replace",
    );
    let policy = |text| accepted(&with(text)).on_conflict;
    let replacing = r#""delay":"1s","onConflict":"replace","idempotencyKey":"k""#;
    assert_eq!(policy(replacing), ConflictPolicy::Replace);
    assert_eq!(
        policy(r#""delay":"1s","onConflict":"reject""#),
        ConflictPolicy::Reject
    );
}

#[test]
fn keys_are_hashed_with_their_application() {
    assert_ne!(key_hash("a", "bc"), key_hash("ab", "c"));
    assert_eq!(key_hash("a", "b"), key_hash("a", "b"));
    let key = [b"sms".as_slice(), b"\0", b"sms-1"].concat();
    assert_eq!(
        shard_of("sms", "sms-1", 12),
        redeliver_kafka::murmur2::partition_for_key(&key, 12)
    );
}

fn draft() -> impl Strategy<Value = Draft> {
    let when = prop_oneof![
        (0_i64..4_000_000_000_000).prop_map(|millis| When::At(Timestamp::from_millis(millis))),
        (0_u64..1_000_000_000).prop_map(|millis| When::After(HumanDuration::from_millis(millis))),
    ];
    let name = || proptest::option::of("[a-z0-9-]{1,20}");
    let headers = proptest::collection::vec(("x-[a-z]{1,5}", proptest::option::of("\\PC{0,5}")), 0..4);
    let data = prop_oneof![
        Just("null".to_owned()),
        "[1-9][0-9]{0,10}",
        "\"[a-z ]{0,20}\"",
        "\\{\"a\": \\[[1-9]\\]\\}"
    ];
    let priority = prop_oneof![Just(Priority::High), Just(Priority::Normal), Just(Priority::Low)];
    let key = proptest::option::of("\\PC{0,10}");
    let expire_after = proptest::option::of((0_u64..1_000_000_000).prop_map(HumanDuration::from_millis));
    let replaces = any::<bool>();
    (
        when,
        name(),
        name(),
        headers,
        data,
        priority,
        key,
        (expire_after, replaces),
    )
        .prop_map(
            |(when, idempotency_key, request_id, headers, data, priority, key, (expire_after, replaces))| {
                Draft {
                    on_conflict: match &idempotency_key {
                        Some(_) if replaces => ConflictPolicy::Replace,
                        _ => ConflictPolicy::Reject,
                    },
                    app: "sms".to_owned(),
                    when,
                    priority,
                    idempotency_key,
                    request_id,
                    payload: Payload {
                        value: Some(data.into()),
                        key: key.map(Bytes::from),
                        headers: headers
                            .iter()
                            .map(|(name, value)| (name.as_str(), value.as_deref().map(str::as_bytes)))
                            .collect(),
                    },
                    expire_after,
                }
            },
        )
}

fn as_json(draft: &Draft) -> String {
    let text = |bytes: &Bytes| String::from_utf8(bytes.to_vec()).unwrap();
    let mut fields = vec![format!(r#""appName":"{}""#, draft.app)];
    match draft.when {
        When::At(time) => fields.push(format!(r#""scheduledTime":"{time}""#)),
        When::After(delay) => fields.push(format!(r#""delay":"{delay}""#)),
    }
    fields.push(format!(r#""priority":"{}""#, draft.priority.as_str()));
    let mut optional = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            fields.push(format!("{name:?}:{}", serde_json::to_string(&value).unwrap()));
        }
    };
    optional("idempotencyKey", draft.idempotency_key.clone());
    optional("requestId", draft.request_id.clone());
    let replaces = draft.on_conflict == ConflictPolicy::Replace;
    optional("onConflict", replaces.then(|| "replace".to_owned()));
    optional("key", draft.payload.key.as_ref().map(text));
    optional("expireAfter", draft.expire_after.map(|wait| wait.to_string()));
    let headers: Vec<_> = draft
        .payload
        .headers
        .iter()
        .map(|(name, value)| {
            serde_json::json!({"name": name, "value": value.map(|value| std::str::from_utf8(value).unwrap())})
        })
        .collect();
    fields.push(format!(
        r#""headers":{}"#,
        serde_json::to_string(&headers).unwrap()
    ));
    fields.push(format!(
        r#""jobData": {} "#,
        text(draft.payload.value.as_ref().unwrap())
    ));
    format!("{{{}}}", fields.join(","))
}

proptest! {
    #[test]
    fn both_formats_give_the_same_request(draft in draft()) {
        let from_json = read(&json(&as_json(&draft)), &rules(), NOW);
        let bytes = write_protobuf(&ParsedRequest::Schedule(Box::new(draft)), "");
        let mut headers = Headers::new();
        headers.push_text("content-type", redeliver_proto::CONTENT_TYPE);
        let from_protobuf = read(&record(bytes, headers), &rules(), NOW);
        prop_assert!(from_json.command.is_ok() || from_json.command.as_ref().unwrap_err().code == "request.scheduledTime", "{from_json:?}");
        if from_json.command.is_ok() {
            prop_assert_eq!(&from_json.command, &from_protobuf.command);
            prop_assert_eq!(from_json.answer_to, from_protobuf.answer_to);
        }
    }

    #[test]
    fn requests_with_different_content_have_different_hashes(one in draft(), other in draft()) {
        let hash = |draft: Draft| request_of(&json(&as_json(&draft)), &Rules { max_ahead: "99999d".parse().unwrap(), ..rules() }).request_hash;
        let named = |draft: &Draft| Draft { request_id: None, idempotency_key: None, on_conflict: ConflictPolicy::Reject, ..draft.clone() };
        prop_assert_eq!(named(&one) == named(&other), hash(one.clone()) == hash(other));
        // Neither the request id nor the policy is part of the content.
        prop_assert_eq!(hash(named(&one)), hash(one));
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), is_protobuf in any::<bool>()) {
        let mut headers = Headers::new();
        if is_protobuf {
            headers.push_text("content-type", redeliver_proto::CONTENT_TYPE);
        }
        let _ = read(&record(bytes, headers), &rules(), NOW);
    }

    #[test]
    fn nearly_valid_requests_never_panic(draft in draft(), at in any::<prop::sample::Index>(), byte in any::<u8>(), is_protobuf in any::<bool>()) {
        let mut headers = Headers::new();
        let mut bytes = if is_protobuf {
            headers.push_text("content-type", redeliver_proto::CONTENT_TYPE);
            write_protobuf(&ParsedRequest::Schedule(Box::new(draft)), "a").to_vec()
        } else {
            as_json(&draft).into_bytes()
        };
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = read(&record(bytes, headers), &rules(), NOW);
    }
}
