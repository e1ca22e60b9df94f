//! A worker with a handler of its own in one-shot mode.

use std::sync::Arc;
use std::time::Duration;

use redeliver_core::{HumanDuration, Outcome};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_runtime::Config;
use redeliver_runtime::cli::Start;
use redeliver_runtime::listen::Listener;
use redeliver_service::Host;
use redeliver_testkit::{EnvBuilder, unique_delays};
use redeliver_worker::Attempt;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tower::{BoxError, service_fn};

use crate::handler::{DEADLINE, by_value, host_with_topics, output, spawn_default};

#[test]
fn idle_worker_ends() {
    let tier = unique_delays(&[60_000])[0];
    let env = EnvBuilder::new("worker-until-idle")
        .partitions(2)
        .creates_topics()
        .yaml(&format!(
            "pipelines: {{ {{name}}: {{ output: {{name}}-out, retry: {{ tiers: [{tier}ms] }} }} }}\n"
        ))
        .build();
    let name = env.name().to_owned();
    let config = Config::from_yaml(&format!("instance: {name}\n{}", env.yaml())).unwrap();
    let pipeline = config.pipelines[&name].pipeline(&name, &config.scheduler);
    let out = pipeline.output.clone().unwrap();
    let kafka = KafkaSettings::new(env.brokers().to_owned(), "worker-until-idle-test");
    Runtime::new().unwrap().block_on(async {
        let start = Start::new(
            Arc::new(config),
            CancellationToken::new(),
            Listener::bind("admin.listen", ([127, 0, 0, 1], 0).into()).unwrap(),
        );
        let start = Start {
            until_idle: Some(HumanDuration::from_secs(1)),
            ..start
        };
        let mut host = host_with_topics(Host::new("worker-until-idle", start), &name).await;
        let producer = Producer::new(&kafka).unwrap();
        for number in 0..20 {
            let record = output(&pipeline.source, None, number.to_string());
            producer.send(&record).await.unwrap();
        }
        // Slow, so that a look during the attempts must find the records in flight.
        let handler = service_fn(|_: Attempt| async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Ok::<_, BoxError>(Outcome::unchanged())
        });
        spawn_default(&mut host, &name, handler).await;
        let ended = tokio::time::timeout(DEADLINE, host.run()).await;
        ended.expect("it ends").unwrap();
    });
    assert_eq!(by_value(&kafka, &out).len(), 20);
}
