//! A handler of several records per call on a real Kafka.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use redeliver_core::Pipeline;
use redeliver_core::headers::{ERROR_CODE, RETRY_COUNT};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_runtime::Config;
use redeliver_testkit::{EnvBuilder, ensure, eventually, unique_delays};
use redeliver_worker::{Attempt, BatchLimits, Failure, in_batches};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

use crate::handler::{DEADLINE, by_value, output, text, work};

const RECORDS: usize = 200;
/// Fewer than the attempts that run at the same time.
const LIMITS: BatchLimits = BatchLimits {
    records: 5,
    bytes: 1_000,
    wait: Duration::from_millis(20),
    calls: 2,
};

/// Every tenth record fails once, and every 50th for good.
fn result(attempt: &Attempt) -> Result<String, Failure> {
    let text = attempt.text()?;
    match text.parse::<usize>().unwrap() {
        n if n % 50 == 7 => Err(Failure::permanent("batch.bad", "")),
        n if n % 10 == 3 && attempt.failed_attempts == 0 => Err(Failure::transient("batch.busy", "")),
        _ => Ok(format!("{text}!")),
    }
}

#[test]
fn records_of_calls_end_once() {
    let tier = unique_delays(&[300])[0];
    let env = EnvBuilder::new("worker-batches")
        .partitions(1)
        .creates_topics()
        .yaml(&format!(
            "pipelines: {{ {{name}}: {{ output: {{name}}-out, retry: {{ tiers: [{tier}ms] }} }} }}\n"
        ))
        .build();
    let name = env.name().to_owned();
    let config = Arc::new(Config::from_yaml(&format!("instance: {name}\n{}", env.yaml())).unwrap());
    let pipeline: Pipeline = config.pipelines[&name].pipeline(&name, &config.scheduler);
    let sizes: Arc<Mutex<Vec<usize>>> = Arc::default();
    let seen = sizes.clone();
    let handler = in_batches(LIMITS, move |attempts: Vec<Attempt>| {
        seen.lock().unwrap().push(attempts.len());
        async move { attempts.iter().map(result).collect() }
    });

    let runtime = Runtime::new().unwrap();
    let shutdown = CancellationToken::new();
    let working = runtime.spawn(work(config.clone(), name, handler, shutdown.clone()));
    let mut relay = env.start("retry-tier", "relay", &[]);
    let kafka = KafkaSettings::new(env.brokers().to_owned(), "worker-batches-test");
    let producer = Producer::new(&kafka).unwrap();
    runtime.block_on(async {
        for n in 0..RECORDS {
            let record = output(&pipeline.source, n.to_string());
            producer.send(&record).await.unwrap();
        }
    });
    let (out, dlq) = (pipeline.output.clone().unwrap(), pipeline.dead_letter_topic());
    let (done, dead) = eventually("all records have ended", DEADLINE, || {
        let (done, dead) = (by_value(&kafka, &out), by_value(&kafka, &dlq));
        let holds = done.len() + dead.len() >= RECORDS;
        ensure(holds, format!("{} handled, {} dead", done.len(), dead.len())).map(|()| (done, dead))
    });
    for n in 0..RECORDS {
        if n % 50 == 7 {
            let code = text(&dead[&n.to_string()], ERROR_CODE);
            assert_eq!(code.as_deref(), Some("batch.bad"), "{n}");
        } else {
            let retries = text(&done[&format!("{n}!")], RETRY_COUNT);
            let expected = if n % 10 == 3 { "1" } else { "0" };
            assert_eq!(retries.as_deref(), Some(expected), "{n}");
        }
    }
    let sizes = sizes.lock().unwrap().clone();
    // Each failed record was alone in its second call.
    assert_eq!(sizes.iter().sum::<usize>(), RECORDS + RECORDS / 10, "{sizes:?}");
    let largest = sizes.iter().max();
    assert_eq!(largest, Some(&LIMITS.records), "{sizes:?}");

    shutdown.cancel();
    runtime.block_on(working).unwrap();
    relay.shut_down();
}
