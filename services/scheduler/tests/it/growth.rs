//! The ingest topic gets more partitions while schedulers run.

use redeliver_kafka::murmur2::shard_of;
use redeliver_testkit::kafka_request::create_partitions;

use crate::env::SchedulerEnv;
use crate::oracle::JobSpec;
use crate::requests::Request;

const APP: &str = "mail";
const COMMANDS: usize = 60;

#[test]
fn growing_ingest_topic_halts_schedulers() {
    let mut env = SchedulerEnv::new(SchedulerEnv::builder("grown"));
    let before = env.topics.partitions;
    let after = before + 3;
    let mut old = env.start("a");
    let mut sent = env.send(vec![Request::protobuf(JobSpec::new(APP, "before"))]);
    env.watch().settle(&mut sent);
    for topic in [&env.topics.state, &env.topics.ingest] {
        create_partitions(&env.kafka.brokers, topic, after);
    }
    env.grown_to(after);
    let has = format!("has {after} partitions; it had {before}");
    old.until_not_ready(&has);
    assert!(old.output().contains("shards halted"), "{}", old.output());
    assert_eq!(old.metric("redeliver_scheduler_live_shards"), 0);

    // A process that starts after the growth shares the partitions with one that started before. Each command is in the
    // partition that a client with the previous number chooses, so it is forwarded if it moves.
    let mut new = env.start("b");
    let commands = (0..COMMANDS).map(|n| {
        let key = format!("key-{n}");
        let partition = shard_of(APP, &key, before);
        Request::protobuf(JobSpec::new(APP, key.clone()).idempotency_key(key)).partition(partition)
    });
    sent.extend(env.send(commands.collect()));
    let moved = (0..COMMANDS)
        .map(|n| format!("key-{n}"))
        .filter(|key| shard_of(APP, key, before) != shard_of(APP, key, after))
        .count();
    assert!(moved > 0);
    old.until_not_ready(&has);
    assert!(old.has_never_ended());
    old.restart();
    new.until_ready();
    let mut watch = env.watch();
    watch.settle(&mut sent);
    assert_eq!(
        watch.seen.ingest.len() - sent.len(),
        moved,
        "each command that moves is forwarded once"
    );
}
