//! Errors, panics and time-outs of handlers.

use std::collections::BTreeMap;
use std::future::pending;
use std::panic::panic_any;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::headers::{ERROR_CLASS, ERROR_CODE, ERROR_MESSAGE, RETRY_COUNT};
use redeliver_core::{Headers, Outcome, Output, Pipeline, Record};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::TopicReader;
use redeliver_runtime::Config;
use redeliver_runtime::cli::Start;
use redeliver_runtime::listen::Listener;
use redeliver_service::{Host, topics};
use redeliver_testkit::{EnvBuilder, ensure, eventually, unique_delays};
use redeliver_worker::{Attempt, Handler, WorkerSpec, spawn};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tower::{BoxError, service_fn};

pub(crate) use redeliver_testkit::DEADLINE;

/// Number of records of each kind.
const EACH: usize = 3;

/// Runs a worker with this handler until `shutdown` is cancelled.
pub(crate) async fn work<H: Handler>(
    config: Arc<Config>,
    name: String,
    handler: H,
    shutdown: CancellationToken,
) {
    let admin = Listener::bind("admin.listen", config.admin.listen).unwrap();
    work_with(config, name, handler, admin, shutdown).await;
}

/// As [`work`], with a listener of the admin port.
pub(crate) async fn work_with<H: Handler>(
    config: Arc<Config>,
    name: String,
    handler: H,
    admin: Listener,
    shutdown: CancellationToken,
) {
    let start = Start::new(config.clone(), shutdown, admin);
    let mut host = Host::new("handlers", start);
    let pipeline = config.pipelines[&name].pipeline(&name, &config.scheduler);
    let needed = topics::of_pipelines(&config, std::slice::from_ref(&pipeline));
    host.ensure_topics(&needed).await.unwrap();
    let spec = WorkerSpec {
        lanes: 1,
        batch: 100,
        concurrency: 8,
        repeated_slots: 1,
        in_flight: 1_000,
        in_flight_bytes: 1 << 20,
        grace: Duration::from_secs(10),
        ..WorkerSpec::from_config(&config, &name, &config.pipelines[&name]).unwrap()
    };
    spawn(&mut host, &spec, handler).await.unwrap();
    host.run().await.unwrap();
}

pub(crate) fn output(topic: &Arc<str>, value: impl Into<Bytes>) -> Output {
    Output {
        topic: topic.clone(),
        partition: None,
        key: None,
        value: Some(value.into()),
        headers: Headers::new(),
    }
}

pub(crate) fn text(record: &Record, name: &str) -> Option<String> {
    let value = record.headers.single(name).unwrap()?;
    Some(String::from_utf8(value.unwrap().to_vec()).unwrap())
}

/// All records of a topic by value. Fails if two have the same value.
#[track_caller]
pub(crate) fn by_value(kafka: &KafkaSettings, topic: &Arc<str>) -> BTreeMap<String, Record> {
    let mut records = BTreeMap::new();
    TopicReader::new(kafka, std::slice::from_ref(topic))
        .unwrap()
        .read_to_end(DEADLINE, |record| {
            let value = String::from_utf8(record.value.clone().unwrap().into()).unwrap();
            let other = records.insert(value, record);
            assert!(other.is_none(), "{other:?} was written twice");
        })
        .unwrap();
    records
}

#[test]
fn failed_attempts_affect_no_others() {
    let tier = unique_delays(&[300])[0];
    let env = EnvBuilder::new("handlers")
        .partitions(1)
        .creates_topics()
        .yaml(&format!(
            "pipelines: {{ {{name}}: {{ output: {{name}}-out, attempt_timeout: 500ms, retry: {{ tiers: [{tier}ms] }} }} }}\n"
        ))
        .build();
    let name = env.name().to_owned();
    let config = Arc::new(Config::from_yaml(&format!("instance: {name}\n{}", env.yaml())).unwrap());
    let pipeline: Pipeline = config.pipelines[&name].pipeline(&name, &config.scheduler);
    let calls: Arc<Mutex<BTreeMap<String, Vec<u32>>>> = Arc::default();
    let seen = calls.clone();
    let handler = service_fn(move |attempt: Attempt| {
        let value = attempt.record.value.clone().unwrap_or_default();
        let word = String::from_utf8(value.into()).unwrap();
        let mut seen = seen.lock().unwrap();
        seen.entry(word.clone())
            .or_default()
            .push(attempt.failed_attempts);
        drop(seen);
        // Panics before the handler has returned a future.
        assert!(!word.starts_with("panics at once"), "{word}");
        async move {
            let kind = word.rsplit_once(' ').map(|(kind, _)| kind).unwrap_or_default();
            match kind {
                "fails" => Err(BoxError::from(format!("{word}, sorry"))),
                "panics later" => {
                    tokio::task::yield_now().await;
                    panic!("{word}, sorry")
                }
                "panics without a message" => panic_any(7_u8),
                "hangs" => pending().await,
                _ => Ok(Outcome::value(word)),
            }
        }
    });

    let runtime = Runtime::new().unwrap();
    let shutdown = CancellationToken::new();
    let working = runtime.spawn(work(config.clone(), name, handler, shutdown.clone()));
    let mut relay = env.start("retry-tier", "relay", &[]);

    // All of them are in one partition.
    let kafka = KafkaSettings::new(env.brokers().to_owned(), "handlers-test");
    let producer = Producer::new(&kafka).unwrap();
    let kinds = [
        "is fine",
        "fails",
        "panics at once",
        "panics later",
        "panics without a message",
        "hangs",
    ];
    let values = (0..EACH).flat_map(|n| kinds.map(|kind| format!("{kind} {n}")));
    runtime.block_on(async {
        for value in values {
            producer.send(&output(&pipeline.source, value)).await.unwrap();
        }
    });
    let (out, dlq) = (pipeline.output.clone().unwrap(), pipeline.dead_letter_topic());
    let (done, dead) = eventually("all records have ended", DEADLINE, || {
        let (done, dead) = (by_value(&kafka, &out), by_value(&kafka, &dlq));
        let holds = done.len() + dead.len() >= EACH * kinds.len();
        ensure(holds, format!("{} handled, {} dead", done.len(), dead.len())).map(|()| (done, dead))
    });

    let calls = calls.lock().unwrap().clone();
    for n in 0..EACH {
        let fine = format!("is fine {n}");
        assert_eq!(text(&done[&fine], RETRY_COUNT).as_deref(), Some("0"));
        assert_eq!(calls[&fine], [0], "{fine}");
        for (kind, code, message) in [
            ("fails", "handler.error", format!("fails {n}, sorry")),
            ("panics at once", "handler.panic", format!("panics at once {n}")),
            (
                "panics later",
                "handler.panic",
                format!("panics later {n}, sorry"),
            ),
            (
                "panics without a message",
                "handler.panic",
                "without a message".to_owned(),
            ),
            (
                "hangs",
                "handler.timeout",
                "the attempt took longer than 500ms".to_owned(),
            ),
        ] {
            let value = format!("{kind} {n}");
            let record = &dead[&value];
            for (header, expected) in [
                (ERROR_CLASS, "exhausted"),
                (ERROR_CODE, code),
                (ERROR_MESSAGE, &format!("gave up after 2 attempts: {message}")),
                (RETRY_COUNT, "2"),
            ] {
                assert_eq!(
                    text(record, header).as_deref(),
                    Some(expected),
                    "{value}: {record:?}"
                );
            }
            assert_eq!(calls[&value], [0, 1], "{value}");
        }
    }
    assert_eq!((done.len(), dead.len()), (EACH, 5 * EACH));

    shutdown.cancel();
    runtime.block_on(working).unwrap();
    relay.shut_down();
}
