//! Starting without a broker, outages, and the embedded broker.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use redeliver_core::{Clock as _, SystemClock};
use redeliver_dlq_inspector::ledger;
use redeliver_kafka::embedded::EmbeddedBroker;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::v1;
use redeliver_testkit::kafka_request::delete_topic;
use redeliver_testkit::{LocalKafka, ensure, eventually_async, run, unique};
use tonic::Code;
use tonic_health::pb::health_check_response::ServingStatus;

use crate::redrive::{World, done, plan};
use crate::support::{
    Client, DEADLINE, Inspector, InspectorEnv, assert_refused, dead, get_group, get_letter, get_page,
    get_stats, list_groups,
};

#[tokio::test(flavor = "multi_thread")]
async fn inspector_serves_during_outages() {
    let mut kafka = LocalKafka::start().unwrap();
    let mut env = InspectorEnv::on("outage", &kafka.brokers());
    let topic = env.create_topic("a", 2).await;
    let records = (0..50).map(|number| dead(&number.to_string(), "v", &[]));
    env.put(&topic, 1, records.collect()).await;
    kafka.stop().unwrap();

    // With `kafka.topics.create`, the process would wait for the broker before it serves the API.
    env.base.set("kafka.topics.create", "false");
    let mut inspector = env.spawn();
    let not_serving = [Some(ServingStatus::NotServing); 2];
    assert_eq!(inspector.health().await.map(Result::ok), not_serving);
    let mut client = inspector.client().await;
    let refused = get_page(&mut client, "").await.unwrap_err();
    assert_refused(&refused, Code::Unavailable, "INDEX_CATCHING_UP");
    inspector.process.until_not_ready("Kafka unavailable");

    kafka.start_again().unwrap();
    inspector.until_serving().await;
    assert_eq!(inspector.list("").await.len(), 50);
    inspector.process.until_ready();

    // The ledger topic does not exist, which is only a warning.
    let ledger = "problem=\"does not exist\"";
    let output = inspector.process.wait_for_output(ledger, DEADLINE);
    assert!(output.contains("topic=\"redeliver.dlq.ledger\""), "{output}");

    // Without the topic of their states, groups are open, and cannot be changed.
    let mut client = inspector.client().await;
    let listed = list_groups(&mut client, "").await;
    let groups = listed.groups;
    assert_eq!((groups.len(), groups[0].state()), (1, v1::GroupState::Open));
    let got = get_group(&mut client, &groups[0].id).await.unwrap();
    for completeness in [listed.completeness, got.completeness].map(Option::unwrap) {
        let problem = &completeness.group_states_problem;
        assert!(
            problem.contains("topic `redeliver.dlq.groups` does not exist"),
            "{problem}"
        );
        assert!(!completeness.complete && completeness.missing_count == 0);
    }
    let completeness = get_stats(&mut client, "").await.completeness.unwrap();
    assert_eq!(completeness.group_states_problem, "");
    let change = v1::ChangeGroupRequest {
        id: groups[0].id.clone(),
        ..v1::ChangeGroupRequest::default()
    };
    let refused = client.resolve_group(change).await.unwrap_err();
    assert_refused(&refused, Code::Unavailable, "KAFKA_UNAVAILABLE");
    let ready = inspector.process.get("/readyz").1;
    assert!(
        ready.contains("the topic of group states cannot be read"),
        "{ready}"
    );

    // The index is served during an outage.
    kafka.stop().unwrap();
    assert_eq!(inspector.list("").await.len(), 50);
    kafka.start_again().unwrap();
    env.put(&topic, 0, vec![dead("new", "v", &[])]).await;
    inspector.until_listed("key = new", 1).await;
    assert_eq!(inspector.list("").await.len(), 51);
    inspector.process.shut_down();
}

#[tokio::test(flavor = "multi_thread")]
async fn it_works_with_the_embedded_broker() {
    let topic: Arc<str> = unique("embedded-a-dlq").into();
    let audit = unique("embedded-audit");
    let broker = EmbeddedBroker::start(&[(topic.to_string(), 2), (audit.clone(), 1)]).unwrap();
    let mut env = InspectorEnv::on("embedded", broker.brokers());
    env.base.set("audit.topic", &audit);
    env.base.set("kafka.topics.create", "false");
    env.base.set("dlq_inspector.topics", &format!("[{topic}]"));
    env.put(
        &topic,
        1,
        vec![dead("first", "v", &[("error-class", "permanent")])],
    )
    .await;
    // There is no topic of jobs.
    let mut inspector = env.spawn();
    inspector.until_serving().await;
    assert_eq!(inspector.list("error_class = permanent").await.len(), 1);
    env.put(&topic, 0, vec![dead("second", "value", &[])]).await;
    inspector.until_listed("key = second", 1).await;
    let mut client = inspector.client().await;
    let letter = get_letter(&mut client, &format!("{topic}/0/0")).await.unwrap();
    assert_eq!(letter.value.as_deref(), Some(&b"value"[..]));
    let topic = &get_stats(&mut client, "").await.topics[0];
    assert_eq!((topic.open, topic.until_removal), (Some(2), None));
    // The embedded broker does not tell the configuration of a topic.
    assert_eq!(topic.removal(), v1::Removal::Unspecified);
    inspector.process.shut_down();
}

/// A file system in memory. Mounting it needs the permissions of root.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(directory: PathBuf, size: &str) -> Self {
        std::fs::create_dir(&directory).unwrap();
        let disk = Self(directory);
        disk.tool("mount", &["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]);
        disk
    }

    fn resize(&self, size: &str) {
        self.tool("mount", &["-o", &format!("remount,size={size}")]);
    }

    fn tool(&self, program: &str, arguments: &[&str]) {
        let mut command = Command::new(program);
        command.args(arguments).arg(&self.0);
        let output = run(command);
        assert_eq!(output.code, Some(0), "{program} {arguments:?}: {output:?}");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Also while a process that has failed to stop uses it.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long"]
async fn a_full_disk_is_waited_out() {
    const COUNT: usize = 20_000;
    let mut env = InspectorEnv::new("full-disk");
    let disk = SmallDisk::mount(env.base.directory().join("disk"), "6m");
    env.base
        .set("dlq_inspector.data_dir", &disk.0.display().to_string());
    let topic = env.create_topic("a", 1).await;
    env.put(&topic, 0, vec![dead("first", "v", &[])]).await;
    let mut inspector = env.start().await;
    inspector.until_listed("", 1).await;
    for batch in 0..COUNT / 1_000 {
        let message = "x".repeat(500);
        let headers = [("error-message", &*message), ("tenant", "a")];
        let letters = (0..1_000).map(|index| dead(&format!("{batch}-{index}"), "v", &headers));
        env.put(&topic, 0, letters.collect()).await;
    }
    inspector.process.until_ready_but("the disk is full");
    // Indexed dead letters are served, as an incomplete answer.
    let mut client = inspector.client().await;
    let stats = async |client: &mut Client| {
        let stats = get_stats(client, "").await;
        (stats.topics[0].total, stats.completeness.unwrap().complete)
    };
    eventually_async("answers are incomplete", DEADLINE, async || {
        let (indexed, is_complete) = stats(&mut client).await;
        let holds = !is_complete && (1..COUNT as u64).contains(&indexed);
        ensure(holds, format!("{indexed}, {is_complete}"))
    })
    .await;
    let first = get_letter(&mut client, &format!("{topic}/0/0")).await.unwrap();
    assert_eq!(first.key.as_deref(), Some(&b"first"[..]));

    disk.resize("200m");
    inspector.process.until_ready();
    eventually_async("all dead letters are complete", DEADLINE, async || {
        let counted = stats(&mut client).await;
        ensure(counted == (COUNT as u64 + 1, true), format!("{counted:?}"))
    })
    .await;
    inspector.process.shut_down();
}

#[tokio::test(flavor = "multi_thread")]
async fn recreated_ledger_replaces_the_old_one() {
    let kafka = LocalKafka::start().unwrap();
    let mut world = World::on("ledger-again", "", &kafka.brokers()).await;
    world.put(6).await;
    let mut inspectors = world.start_two().await;
    for inspector in &mut inspectors {
        inspector.until_listed("state = OPEN", 6).await;
    }
    done(&mut inspectors[0], plan(v1::RedriveKind::Discard, "")).await;
    for inspector in &mut inspectors {
        inspector.until_listed("state = DISCARDED", 6).await;
    }
    // The ledger is deleted, and created again.
    let ledger: Arc<str> = ledger::TOPIC.into();
    delete_topic(&kafka.brokers(), &ledger);
    world.env.recreate_topic(&ledger, 2).await;
    let entry = v1::LedgerEntry {
        state: v1::DeadLetterState::Discarded.into(),
        time: Some(to_timestamp(SystemClock.now())),
        ..v1::LedgerEntry::default()
    };
    world
        .env
        .put_ledger(&format!("{}/1/2", world.dlq), Some(entry))
        .await;
    for inspector in &mut inspectors {
        // Until it was read again, states are unknown.
        eventually_async("the states of the new ledger", DEADLINE, async || {
            let states = inspector.list("").await;
            let states: Vec<_> = states.iter().map(v1::DeadLetter::state).collect();
            let count = |state| states.iter().filter(|found| **found == state).count();
            let counts = [v1::DeadLetterState::Open, v1::DeadLetterState::Discarded].map(count);
            ensure(counts == [5, 1], format!("{states:?}"))
        })
        .await;
    }
    let open = plan(v1::RedriveKind::Redrive, "state = OPEN");
    let job = done(&mut inspectors[1], open).await;
    assert_eq!(
        (job.total, job.done, world.redriven().len()),
        (5, 5, 5),
        "{job:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long"]
async fn five_thousand_partitions_are_followed() {
    const TOPICS: usize = 20;
    const PARTITIONS: i32 = 250;
    let total = TOPICS * PARTITIONS as usize;
    let kafka = LocalKafka::start().unwrap();
    let env = InspectorEnv::on("many", &kafka.brokers());
    let mut topics = Vec::new();
    for number in 0..TOPICS {
        let topic = env.create_topic(&number.to_string(), PARTITIONS).await;
        for partition in 0..PARTITIONS {
            env.put(&topic, partition, vec![dead("k", "first", &[])]).await;
        }
        topics.push(topic);
    }
    let mut inspector = env.spawn();
    inspector.until_serving().await;
    let counted = async |inspector: &mut Inspector| {
        let stats = get_stats(&mut inspector.client().await, "").await;
        let total: u64 = stats.topics.iter().map(|topic| topic.total).sum();
        (total, stats.completeness.unwrap().complete)
    };
    assert_eq!(counted(&mut inspector).await, (total as u64, true));
    // New ones are found in each topic, also after a crash.
    for (round, is_killed) in [(1, false), (2, true)] {
        if is_killed {
            inspector.process.kill_9();
        }
        for topic in &topics {
            env.put(topic, PARTITIONS - 1, vec![dead("k", "later", &[])])
                .await;
        }
        if is_killed {
            inspector.process.start_again();
            inspector.until_serving().await;
        }
        let expected = (total + round * TOPICS) as u64;
        eventually_async("the new ones are complete", DEADLINE, async || {
            let counted = counted(&mut inspector).await;
            ensure(counted == (expected, true), format!("{counted:?}"))
        })
        .await;
    }
    let memory = inspector.process.process().rss_kib() >> 10;
    assert!(memory < 512, "{memory} MiB");
    inspector.process.shut_down();
}
