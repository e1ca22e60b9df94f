//! The wall clock of a worker steps.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use redeliver_core::headers::PROCESS_AFTER;
use redeliver_core::{AdjustableClock, Clock as _, HumanDuration, Outcome, SystemClock, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_runtime::Config;
use redeliver_runtime::cli::Start;
use redeliver_runtime::listen::Listener;
use redeliver_service::Host;
use redeliver_testkit::{EnvBuilder, eventually, unique_delays};
use redeliver_worker::Attempt;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tower::{BoxError, service_fn};

use crate::handler::{DEADLINE, by_value, host_with_topics, output, spawn_default, text};

#[test]
fn retry_waits_for_confirmed_time() {
    let tier = unique_delays(&[60_000])[0];
    let env = EnvBuilder::new("worker-clock")
        .partitions(1)
        .creates_topics()
        .yaml(&format!(
            "pipelines: {{ {{name}}: {{ output: {{name}}-out, retry: {{ tiers: [{tier}ms] }} }} }}\n"
        ))
        .build();
    let name = env.name().to_owned();
    let mut config = Config::from_yaml(&format!("instance: {name}\n{}", env.yaml())).unwrap();
    // Longer than the test: only undoing the step ends the hold.
    config.clock.confirm = HumanDuration::from_secs(3_600);
    let pipeline = config.pipelines[&name].pipeline(&name, &config.scheduler);
    let has_failed = Arc::new(AtomicBool::new(false));
    let handler = service_fn({
        let has_failed = has_failed.clone();
        move |attempt: Attempt| {
            let fails = attempt.record.value.as_deref() == Some(b"fails");
            has_failed.fetch_or(fails, Ordering::SeqCst);
            async move {
                if fails {
                    Err(BoxError::from("sorry"))
                } else {
                    Ok(Outcome::unchanged())
                }
            }
        }
    });
    let clock = Arc::new(AdjustableClock::default());
    let shutdown = CancellationToken::new();
    let runtime = Runtime::new().unwrap();
    let host = runtime.block_on(async {
        let start = Start::new(
            Arc::new(config),
            shutdown.clone(),
            Listener::bind("admin.listen", ([127, 0, 0, 1], 0).into()).unwrap(),
        );
        let mut host = Host::new("worker-clock", start);
        host.set_clock(clock.clone());
        let mut host = host_with_topics(host, &name).await;
        spawn_default(&mut host, &name, handler).await;
        host
    });
    let working = runtime.spawn(host.run());

    clock.set_error(-3_600_000);
    let kafka = KafkaSettings::new(env.brokers().to_owned(), "worker-clock-test");
    let producer = Producer::new(&kafka).unwrap();
    let produced = SystemClock.now();
    runtime.block_on(async {
        for value in ["fails", "is fine"] {
            producer.send(&output(&pipeline.source, value)).await.unwrap();
        }
    });
    let (out, tier_topic) = (
        pipeline.output.clone().unwrap(),
        pipeline.tier_topic(HumanDuration::from_millis(tier)),
    );
    eventually("both have been tried", DEADLINE, || {
        let done = by_value(&kafka, &out);
        match (done.len(), has_failed.load(Ordering::SeqCst)) {
            (1, true) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    assert!(by_value(&kafka, &tier_topic).is_empty());
    clock.set_error(0);
    let waiting = eventually("the record waits", DEADLINE, || {
        by_value(&kafka, &tier_topic).remove("fails").ok_or("not yet")
    });
    let due: Timestamp = text(&waiting, PROCESS_AFTER).unwrap().parse().unwrap();
    let earliest = produced.after(std::time::Duration::from_millis(tier));
    assert!(due >= earliest, "{due} {earliest}");
    shutdown.cancel();
    runtime.block_on(working).unwrap().unwrap();
}
