//! The start of a scheduler: without a configuration, and with a Redis that may evict keys or is unavailable.

use std::sync::Arc;

use redeliver_core::headers::ERROR_CODE;
use redeliver_core::{Headers, Output};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::TopicReader;
use redeliver_testkit::{LocalKafka, LocalRedis, ServiceProcess, binary, ensure, eventually};

use crate::env::{DEADLINE, SchedulerEnv, header};
use crate::index::own_redis::Raw;
use crate::oracle::JobSpec;
use crate::requests::Request;

#[test]
fn scheduler_waits_for_redis() {
    let mut redis = LocalRedis::start().unwrap();
    redis.stop().unwrap();
    let env = SchedulerEnv::new(SchedulerEnv::builder("patient").redis(redis.url()));
    let mut scheduler = env.spawn("a");
    scheduler.until_not_ready("index not up to date");
    let until_redis_is = |scheduler: &mut ServiceProcess, up: u64| {
        eventually("the metric is updated", DEADLINE, || {
            let value = scheduler.metric("redeliver_scheduler_redis_up");
            ensure(value == up, value)
        });
    };
    until_redis_is(&mut scheduler, 0);
    let request = |n: u32| {
        let spec = JobSpec::new("mail", n.to_string()).idempotency_key(format!("{n}"));
        Request::protobuf(spec).answer_to(n.to_string())
    };
    // Requests that arrive meanwhile are decided later.
    let sent = env.send((0..20).map(request).collect());
    redis.start_again().unwrap();
    scheduler.until_ready();
    until_redis_is(&mut scheduler, 1);
    assert!(scheduler.has_never_ended());
    env.settle(sent);
    // A Redis that stops while the scheduler runs is waited for too.
    redis.stop().unwrap();
    let again = env.send(vec![request(20)]);
    scheduler.until_not_ready("index unavailable");
    until_redis_is(&mut scheduler, 0);
    redis.start_again().unwrap();
    scheduler.until_ready();
    let mut watch = env.watch();
    watch.until_jobs_ended(20 + again.len());
    assert!(scheduler.has_never_ended());
}

#[test]
fn evicting_redis_is_not_used() {
    let redis = LocalRedis::start().unwrap();
    let env = SchedulerEnv::new(SchedulerEnv::builder("evicts-later").redis(redis.url()));
    let mut scheduler = env.start("a");
    let set_policy = |policy: &str| {
        env.block_on(async {
            let raw = Raw::connect(&redis.url()).await;
            raw.call(&["CONFIG", "SET", "maxmemory", "100mb"]).await;
            raw.call(&["CONFIG", "SET", "maxmemory-policy", policy]).await;
        });
    };
    set_policy("allkeys-lru");
    scheduler.until_not_ready("allkeys-lru");
    let sent = env.send(vec![Request::protobuf(JobSpec::new("mail", "1"))]);
    set_policy("noeviction");
    scheduler.until_ready();
    assert!(scheduler.has_never_ended());
    env.settle(sent);
}

/// Of the configuration, only the addresses differ from the defaults.
#[test]
fn scheduler_starts_with_defaults() {
    let (kafka, redis) = (LocalKafka::start().unwrap(), LocalRedis::start().unwrap());
    let environment = [
        ("REDELIVER__KAFKA__BROKERS", kafka.brokers()),
        ("REDELIVER__REDIS__URL", redis.url()),
        ("REDELIVER__ADMIN__LISTEN", "127.0.0.1:0".to_owned()),
        ("REDELIVER__SCHEDULER__LISTEN", "127.0.0.1:0".to_owned()),
    ];
    let mut scheduler = ServiceProcess::spawn("scheduler", move || {
        let mut command = binary("scheduler");
        command.env_clear().envs(environment.clone());
        command
    });
    // Nothing is created without permission, and the message says how to.
    let status = scheduler.wait(DEADLINE);
    let output = scheduler.output();
    assert_eq!(status.code(), Some(1), "{output}");
    for words in ["scheduler.jobs.ingest", "redeliver topics apply"] {
        assert!(output.contains(words), "{output}");
    }
    scheduler.start_again_with(&[("REDELIVER__KAFKA__TOPICS__CREATE", "true")]);
    scheduler.until_ready();

    // There are no applications, so each request becomes a dead letter.
    let settings = KafkaSettings::new(kafka.brokers(), "test");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let written = runtime.block_on(async {
        let request = Output {
            topic: "scheduler.jobs.ingest".into(),
            partition: None,
            key: None,
            value: Some(r#"{"appName":"a","delay":"1s","jobData":1}"#.into()),
            headers: Headers::new(),
        };
        Producer::new(&settings).unwrap().send(&request).await.unwrap()
    });
    let dead_letters: Arc<str> = "scheduler.jobs.dlq".into();
    let mut reader = TopicReader::new(&settings, &[dead_letters]).unwrap();
    eventually("the request is a dead letter", DEADLINE, || {
        let mut found = Vec::new();
        reader.read_to_end(DEADLINE, |record| found.push(record)).unwrap();
        match &found[..] {
            [letter] => {
                assert_eq!(header::<String>(letter, ERROR_CODE), "request.appName");
                assert_eq!(
                    header::<i64>(letter, redeliver_core::headers::ORIGINAL_OFFSET),
                    written.position.offset
                );
                Ok(())
            }
            other => Err(format!("{other:?}")),
        }
    });
}
