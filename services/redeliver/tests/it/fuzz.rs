//! What decoders make of damaged inputs: they never panic, and what they accept keeps its promises. The long test has a
//! million inputs together with those of other packages.

use std::collections::BTreeMap;

use bytes::Bytes;
use redeliver_core::anchor::Anchor;
use redeliver_core::headers::{self, ReservedHeaders};
use redeliver_core::json;
use redeliver_core::pipeline::ReturnTo;
use redeliver_core::route::{Arrival, RouteContext, reject};
use redeliver_core::{
    Failure, Headers, HumanDuration, JobId, Outcome, Output, Pipeline, Position, Record, Timestamp,
};
use redeliver_dlq_inspector::dialect::Facts;
use redeliver_dlq_inspector::group_states::GroupStates;
use redeliver_dlq_inspector::group_states::value::Value as GroupValue;
use redeliver_dlq_inspector::header_list;
use redeliver_dlq_inspector::id::parse_id;
use redeliver_dlq_inspector::json_fields::JsonFields;
use redeliver_dlq_inspector::ledger::Update;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::{Message as _, long_wait, v1};
use redeliver_runtime::ProgramConfig;
use redeliver_runtime::config::Sources;
use redeliver_runtime::trace_context::span_context;
use redeliver_scheduler::codec;
use redeliver_scheduler::request::{Action, Command, Rules, read};
use redeliver_service::control::Snapshot;
use redeliver_service::control::value::Value as ControlValue;
use redeliver_store::State as _;
use redeliver_testkit::fuzz::{FEW, check_each, fuzz};
use redeliver_testkit::valid_json;

const NOW: Timestamp = Timestamp::from_millis(1_763_722_800_000); // 2025-11-21T11:00:00Z
const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

fn record(topic: &str, value: impl Into<Bytes>, headers: Headers) -> Record {
    Record {
        position: Position {
            topic: topic.into(),
            partition: 1,
            offset: 2,
        },
        timestamp: Some(NOW),
        key: Some(Bytes::from_static(b"key")),
        value: Some(value.into()),
        headers,
        unreadable_headers: 0,
    }
}

/// A header per line: name, colon, value. A line without a colon is a header without a value.
fn headers_of(input: &[u8]) -> Headers {
    let mut headers = Headers::new();
    for line in input.split(|byte| *byte == b'\n') {
        let colon = line.iter().position(|byte| *byte == b':');
        let (name, value) = match colon {
            Some(at) => (&line[..at], Some(&line[at + 1..])),
            None => (line, None),
        };
        headers.push(&String::from_utf8_lossy(name), value);
    }
    headers
}

fn pipelines() -> [Pipeline; 2] {
    [ReturnTo::Due, ReturnTo::Source].map(|return_to| Pipeline {
        output: Some("results".into()),
        return_to,
        anchor: Anchor::Payload("/meta/created_at".to_owned()),
        ..Pipeline::new("docs")
    })
}

/// A record is read only if its time lock has ended, wherever it goes next can be read again, and other services can
/// read its headers.
fn check_headers(input: &[u8]) {
    let found = headers_of(input);
    let _ = (Facts::read(&found), span_context(&found));
    assert_eq!(header_list::decode(&header_list::encode(&found)), found);
    for pipeline in &pipelines() {
        for topic in [pipeline.source.clone(), pipeline.due_topic()] {
            let record = record(&topic, "{}", found.clone());
            let arrival = Arrival::read_at(pipeline, &record, NOW);
            let failure = Failure::transient("test", "test");
            let Ok(arrival) = arrival else {
                let letter = reject(pipeline, &record, &failure, NOW);
                assert_eq!(letter.topic, pipeline.dead_letter_topic());
                assert!(is_readable(&letter), "{letter:?}");
                continue;
            };
            assert!(arrival.origin.partition >= 0 && arrival.origin.offset >= 0);
            let has_lock = found.iter().any(|(name, _)| name == headers::PROCESS_AFTER);
            if topic == pipeline.due_topic() && has_lock {
                let reserved = ReservedHeaders::read(&record).unwrap();
                let due = reserved.process_after(NOW, HumanDuration::from_secs(0));
                assert!(due.is_ok(), "{due:?}");
            }
            let context = RouteContext {
                pipeline,
                arrival: &arrival,
                trace: None,
                now: NOW,
                random: 0.5,
                partitions: &|_| Some(4),
            };
            let routing = context.route(&record, Outcome::Failed(failure));
            assert_eq!(routing.outputs.len(), 1);
            assert!(routing.outputs.iter().all(is_readable), "{:?}", routing.outputs);
        }
    }
}

/// Whether the origin and the attempts of a record that we have written can be read.
fn is_readable(output: &Output) -> bool {
    let reserved = ReservedHeaders::from_headers(&output.headers);
    reserved.is_ok_and(|reserved| reserved.origin().is_ok() && reserved.retry_count().is_ok())
}

fn headers_of_retries() -> Vec<Vec<u8>> {
    let retry = format!(
        "tenant:a\nprocess-after:2025-11-21T10:59:00.000Z\nretry-count:2\nreturn-topic:docs\noriginal-topic:docs\n\
         original-partition:3\noriginal-offset:44\noriginal-timestamp:2025-11-21T10:00:00.000Z\nerror-class:transient\n\
         error-code:http.503\nerror-message:busy\nerror-timestamp:2025-11-21T10:58:00.000Z\npipeline:docs\n\
         traceparent:{TRACE}\ntracestate:a=b,c=d"
    );
    let later = retry.replace("10:59:00.000Z", "23:59:59.999+14:00");
    let spring = "kafka_dlt-original-topic:docs\nkafka_dlt-exception-message:no\n__connect.errors.topic:docs\n\
                  dead-letter-topic:docs\ndead-letter-reason:no\njob-id:x\n\nnull";
    vec![retry.into(), later.into(), spring.into()]
}

/// The rules of a scheduler with an application and a pipeline.
fn rules() -> Rules {
    let overrides = [
        ("scheduler.apps", "{ sms: { topic: sms-jobs } }"),
        ("pipelines", "{ docs: { long_waits: scheduler } }"),
        ("scheduler.default_time_zone", "Europe/Vienna"),
    ];
    let sources = Sources {
        file: None,
        environment: BTreeMap::new(),
        overrides: overrides
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
    };
    redeliver_scheduler::rules(&<ProgramConfig>::load(&sources).unwrap()).unwrap()
}

/// An accepted job has the topic of an application or the due topic of a pipeline, is due within the limit, and survives the encoding of the state topic.
fn check_request(rules: &Rules, content_type: &str, input: &[u8]) {
    let mut headers = Headers::new();
    headers.push_text("content-type", content_type);
    let record = record("scheduler.jobs.ingest", input.to_vec(), headers);
    let _ = long_wait::unwrap("docs", &record);
    let latest = NOW.after(rules.max_ahead.duration());
    match read(&record, rules, NOW).command {
        Ok(Command::Schedule(request)) => {
            assert!(request.due <= latest, "{}", request.due);
            // A long wait can be of a pipeline that only its workers know yet.
            let is_known = rules.apps.values().any(|topic| *topic == request.topic);
            assert!(
                is_known || request.topic.ends_with("-retry-due"),
                "{}",
                request.topic
            );
        }
        Ok(Command::Reschedule { due, .. }) => assert!(due <= latest, "{due}"),
        Ok(Command::Cancel(_) | Command::ActOnWait(_)) => {}
        Ok(Command::ChangeSchedule(change)) => {
            if let Action::Create(definition) = change.action {
                let next = definition.recurrence.next(NOW);
                assert!(next.is_none_or(|(nominal, _)| nominal > NOW), "{next:?}");
            }
        }
        Err(failure) => assert!(!failure.code.is_empty() && !failure.message.is_empty()),
    }
}

fn json_requests() -> Vec<Vec<u8>> {
    let jobs = [
        r#"{"requestId":"r-1","appName":"sms","scheduledTime":"2025-11-22T10:00:00","priority":"high","idempotencyKey":"k","jobData":{"to":"x","n":1.0}}"#,
        r#"{"appName":"sms","delay":"90s","key":"customer","headers":{"a":"b","c":null},"expireAfter":"1h","jobData":[[[1]]]}"#,
        r#"{"appName":"sms","scheduledTime":"2025-11-22T10:00:00+01:00","jobData":"text"}"#,
    ];
    let id = id();
    let commands = [
        format!(r#"{{"cancel":"{id}"}}"#),
        format!(r#"{{"reschedule":"{id}","scheduledTime":"2026-03-29T02:30:00"}}"#),
    ];
    jobs.map(Vec::from)
        .into_iter()
        .chain(commands.map(Vec::from))
        .collect()
}

fn id() -> JobId {
    JobId::new(NOW, 3, 4)
}

fn protobuf_requests() -> Vec<Vec<u8>> {
    let header = v1::Header {
        name: "a".to_owned(),
        value: Some(Bytes::from_static(b"\xff")),
    };
    let spec = v1::JobSpec {
        app: "sms".to_owned(),
        when: Some(v1::job_spec::When::ScheduledTime(to_timestamp(NOW))),
        data: Bytes::from_static(b"data"),
        key: Some(Bytes::from_static(b"key")),
        headers: vec![header.clone()],
        idempotency_key: Some("k".to_owned()),
        ..v1::JobSpec::default()
    };
    let wait = v1::LongWait {
        pipeline: "docs".to_owned(),
        due: Some(to_timestamp(NOW)),
        headers: vec![header],
        key: None,
        value: Some(Bytes::from_static(b"value")),
    };
    let cancel = v1::CancelJob {
        id: id().to_string(),
        ..v1::CancelJob::default()
    };
    let act = v1::ActOnLongWait {
        id: id().to_string(),
        action: v1::LongWaitAction::Dead.into(),
        by: "token:ann".to_owned(),
        reason: "INC-17".to_owned(),
    };
    let commands = [
        v1::job_command::Command::Schedule(spec),
        v1::job_command::Command::LongWait(wait),
        v1::job_command::Command::Cancel(cancel),
        v1::job_command::Command::ChangeSchedule(create_schedule()),
        v1::job_command::Command::ActOnLongWait(act),
    ];
    commands
        .map(|command| {
            let command = v1::JobCommand {
                command: Some(command),
                answer_to: "answers-1".to_owned(),
            };
            command.encode_to_vec()
        })
        .into()
}

fn create_schedule() -> v1::ChangeSchedule {
    let cron = v1::CronTiming {
        expression: "*/5 2-4 L * FRI#2".to_owned(),
        zone: Some("Europe/Berlin".to_owned()),
        ..v1::CronTiming::default()
    };
    let spec = v1::ScheduleSpec {
        timing: Some(v1::schedule_spec::Timing::Cron(cron)),
        job: Some(v1::JobTemplate {
            app: "sms".to_owned(),
            ..v1::JobTemplate::default()
        }),
        ..v1::ScheduleSpec::default()
    };
    v1::ChangeSchedule {
        id: "nightly".to_owned(),
        expected_app: "sms".to_owned(),
        change: Some(v1::change_schedule::Change::Create(v1::change_schedule::Create {
            spec: Some(spec),
        })),
    }
}

/// A record of the state topic that can be decoded is the same job after it is encoded again.
fn check_job(input: &[u8]) {
    let value = Bytes::copy_from_slice(input);
    if let Ok(job) = codec::decode(id(), &value) {
        let again = codec::encode(&job);
        let decoded = codec::decode(id(), &again).unwrap();
        assert_eq!(codec::encode(&decoded), again);
    }
    if let Ok(key) = codec::KeyValue::decode(input) {
        assert_eq!(key.encode(), value);
    }
    let state = record("scheduler.jobs.state", value.clone(), Headers::new());
    let _ = long_wait::unwrap_state("docs", &state);
    // The ledger of dead letters is compacted as well, with tombstones.
    let text = String::from_utf8_lossy(input);
    let entry = Record {
        key: Some(Bytes::copy_from_slice(text.as_bytes())),
        value: None,
        ..state.clone()
    };
    if let Ok(update) = Update::read(&entry) {
        assert!(update.entry.is_none() && parse_id(&update.id.to_string()) == Ok(update.id));
    }
    let entry = Record {
        key: Some(Bytes::from_static(b"docs-dlq/0/1")),
        ..state
    };
    let _ = Update::read(&entry);
    // Values of the control topic, and any keys.
    if let Ok(control) = ControlValue::decode(&value) {
        assert_eq!(ControlValue::decode(&control.encode()), Ok(control));
    }
    // And of the topic of the states of groups.
    if let Ok(group) = GroupValue::decode(&value) {
        let written = GroupValue {
            is_newer: false,
            ..group
        };
        assert_eq!(GroupValue::decode(&written.encode()), Ok(written));
    }
    let mut snapshot = Snapshot::default();
    let entry = Record {
        key: Some(Bytes::copy_from_slice(text.as_bytes())),
        value: Some(value),
        ..entry
    };
    snapshot.apply(&entry);
    assert!(snapshot.table.count() + snapshot.problems().len() > 0);
    let mut states = GroupStates::default();
    states.apply(&entry);
    assert!(states.table.count() + states.problems().len() > 0);
}

fn jobs() -> Vec<Vec<u8>> {
    let job = v1::JobRecord {
        app: "sms".to_owned(),
        state: v1::JobState::Scheduled.into(),
        due_ms: NOW.as_millis(),
        accepted_ms: NOW.as_millis(),
        revision: 2,
        idempotency_key: "k".to_owned(),
        request_hash: Bytes::from_static(&[7; 16]),
        data: Some(Bytes::from_static(b"data")),
        topic: "sms-jobs".to_owned(),
        expires_ms: Some(NOW.as_millis()),
        ..v1::JobRecord::default()
    };
    let ended = v1::JobRecord {
        state: v1::JobState::Dispatched.into(),
        ended_ms: Some(NOW.as_millis()),
        data: None,
        ..job.clone()
    };
    let wait = v1::JobRecord {
        long_wait: true,
        app: "docs".to_owned(),
        ..job.clone()
    };
    let entry = v1::LedgerEntry {
        state: 1,
        time: Some(to_timestamp(NOW)),
        by: "me".to_owned(),
        ..v1::LedgerEntry::default()
    };
    let control = v1::ControlRecord {
        revision: 3,
        changed_at: Some(to_timestamp(NOW)),
        changed_by: "me".to_owned(),
        desired: Some(v1::control_record::Desired::Application(v1::ApplicationControl {
            state: v1::RunState::Paused.into(),
            rate: Some(v1::RateLimit {
                limit: Some(v1::rate_limit::Limit::PerSecond(0.5)),
            }),
        })),
        ..v1::ControlRecord::default()
    };
    let group = v1::GroupRecord {
        revision: 3,
        decision: Some(v1::GroupDecision {
            state: v1::GroupState::Muted.into(),
            resolved_until: Some(to_timestamp(NOW)),
            time: Some(to_timestamp(NOW)),
            by: "me".to_owned(),
            reason: "known".to_owned(),
            muted_until: Some(to_timestamp(NOW)),
        }),
        note: Some(v1::GroupNote {
            text: "runbook".to_owned(),
            time: Some(to_timestamp(NOW)),
            by: "me".to_owned(),
        }),
        ..v1::GroupRecord::default()
    };
    let messages = [job, ended, wait].map(|job| job.encode_to_vec());
    let others = [
        vec![7; 40],
        entry.encode_to_vec(),
        b"docs-dlq/0/1".to_vec(),
        control.encode_to_vec(),
        b"app/sms".to_vec(),
        group.encode_to_vec(),
        b"group/000000000000001f".to_vec(),
    ];
    messages.into_iter().chain(others).collect()
}

/// Otherwise, damaged inputs would test little.
#[test]
fn undamaged_inputs_are_accepted() {
    let [pipeline, _] = pipelines();
    for headers in &headers_of_retries()[..2] {
        let record = record(&pipeline.due_topic(), "{}", headers_of(headers));
        let arrival = Arrival::read_at(&pipeline, &record, NOW).unwrap();
        assert_eq!((arrival.failed_attempts, arrival.origin.offset), (2, 44));
    }
    let rules = rules();
    for (content_type, requests) in [
        ("application/json", json_requests()),
        (redeliver_proto::CONTENT_TYPE, protobuf_requests()),
    ] {
        for request in requests {
            let shown = request.escape_ascii().to_string();
            let mut headers = Headers::new();
            headers.push_text("content-type", content_type);
            let incoming = read(&record("scheduler.jobs.ingest", request, headers), &rules, NOW);
            assert!(incoming.command.is_ok(), "{:?} {shown}", incoming.command);
        }
    }
    for job in &jobs()[..3] {
        codec::decode(id(), &Bytes::copy_from_slice(job)).unwrap();
    }
}

/// A field is found in any valid document, and data is kept byte for byte. What reads JSON in one package only is tested there in the same way: the
/// outputs, merges and batches of the enricher, the schemas and groups of workers, masked and decoded values, and the keys of issuers.
fn valid_json_is_read(count: u32) {
    let [pipeline, _] = pipelines();
    let (rules, fields) = (
        rules(),
        JsonFields::new(&["/meta/id", "/meta/created_at"].map(str::to_owned)),
    );
    let document = |random: &mut fastrand::Rng| {
        let fields = [("created_at", "1795822443.5440"), ("id", "\"a\"")];
        let meta = valid_json::object(random, &fields);
        valid_json::object(random, &[("meta", &meta)]).into_bytes()
    };
    check_each("valid JSON", count, document, |input| {
        let id = json::scalar_at(input, "/meta/id").unwrap().unwrap().into_text();
        assert_eq!(&*id, b"a");
        let found = header_list::decode(&fields.read(Some(input)).unwrap());
        let expected = [("/meta/id", "a"), ("#/meta/created_at", "1795822443.544")];
        let expected = expected.map(|(name, value)| (name, Some(value.as_bytes())));
        assert_eq!(found, expected.into_iter().collect());
        let anchor = pipeline
            .anchor
            .time(&record("docs", input.to_vec(), Headers::new()), None, NOW);
        assert_eq!(anchor, Ok(Timestamp::from_millis(1_795_822_443_544)));
        let request = [br#"{"appName":"sms","delay":"90s","jobData":"#, input, b"}"].concat();
        let mut headers = Headers::new();
        headers.push_text("content-type", "application/json");
        match read(&record("scheduler.jobs.ingest", request, headers), &rules, NOW).command {
            Ok(Command::Schedule(request)) => {
                assert_eq!(request.payload.value.as_deref(), Some(input.trim_ascii()));
            }
            Ok(other) => panic!("{other:?}"),
            Err(failure) => assert!(failure.message.contains("levels deep"), "{failure}"),
        }
    });
}

fn all_decoders(count: u32) {
    let rules = rules();
    let json = |input: &[u8]| check_request(&rules, "application/json", input);
    let protobuf = |input: &[u8]| check_request(&rules, redeliver_proto::CONTENT_TYPE, input);
    fuzz("headers", count, &headers_of_retries(), check_headers);
    fuzz("requests in JSON", count, &json_requests(), json);
    fuzz("requests in protobuf", count, &protobuf_requests(), protobuf);
    fuzz("jobs", count, &jobs(), check_job);
    valid_json_is_read(count);
}

#[test]
fn damaged_inputs_fail_no_decoder() {
    all_decoders(FEW);
}

/// The other packages test their own decoders in the same way.
#[test]
#[ignore = "long"]
fn many_damaged_inputs_fail_no_decoder() {
    all_decoders(120_000);
}
