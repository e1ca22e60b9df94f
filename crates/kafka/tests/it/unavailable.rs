//! A topic that may not be written, has no leader, or has too few replicas in sync, stops only the records for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions, AlterConfig, NewTopic, ResourceSpecifier, TopicReplication};
use rdkafka::client::DefaultClientContext;
use redeliver_core::{Headers, Output, Record, Timestamp};
use redeliver_kafka::backlog::{Head, backlogs, heads, reachable_heads};
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::ReadError;
use redeliver_kafka::scan::Scan;
use redeliver_kafka::{
    AssignmentId, KafkaClient, KafkaSettings, Presence, Processor, TopicWatch, TransactionBatch, Unwritable,
};
use redeliver_testkit::{LocalKafka, acls, eventually, unique};

use crate::copy::{Observed, until_copied};
use crate::support::{DEADLINE, RunningLane, create_new_topic, lane_spec};

/// Copies records to the topic that their key names. Those for unavailable topics wait.
struct Sort {
    watch: TopicWatch,
    waiting: Vec<(AssignmentId, Record)>,
    in_batch: Vec<(AssignmentId, Record)>,
    takes_back: bool,
}

impl Processor for Sort {
    fn assigned(&mut self, _assignment: AssignmentId, _topic: &Arc<str>, _partition: i32) {}

    fn revoked(&mut self, assignment: AssignmentId) {
        self.waiting.retain(|(id, _)| *id != assignment);
    }

    fn capacity(&self, _assignment: AssignmentId) -> usize {
        10_000
    }

    fn accept(&mut self, assignment: AssignmentId, record: Record, _now: Timestamp) {
        self.waiting.push((assignment, record));
    }

    fn finish(&mut self, _now: Timestamp, limit: usize, batch: &mut TransactionBatch) {
        let topic = |record: &Record| String::from_utf8(record.key.clone().unwrap().into()).unwrap();
        let is_ready =
            |(_, record): &mut (AssignmentId, Record)| !self.watch.presence(&topic(record)).is_unavailable();
        self.in_batch = self.waiting.extract_if(.., is_ready).take(limit).collect();
        for (assignment, record) in &self.in_batch {
            batch.completed.push((*assignment, record.position.offset));
            batch.outputs.push(Output {
                topic: topic(record).into(),
                partition: None,
                key: None,
                value: record.value.clone(),
                headers: Headers::new(),
            });
        }
    }

    fn take_back(&mut self, _batch: &mut TransactionBatch) -> bool {
        if self.takes_back {
            self.waiting.splice(0..0, self.in_batch.drain(..));
        }
        self.takes_back
    }

    fn committed(&mut self, _now: Timestamp) {
        self.in_batch.clear();
    }

    fn aborted(&mut self) {
        self.in_batch.clear();
    }

    fn next_due(&self) -> Option<Timestamp> {
        None
    }

    fn is_busy(&self) -> bool {
        false
    }
}

struct Env {
    settings: KafkaSettings,
    from: String,
    group: String,
    /// The topic that becomes unavailable, and another one.
    topics: [String; 2],
    sent: u32,
    lanes: Vec<RunningLane>,
}

impl Env {
    /// `replicas`: the brokers of the topic that becomes unavailable, and of all other topics.
    async fn new(brokers: String, replicas: [&[i32]; 2]) -> Self {
        let env = Self {
            settings: KafkaSettings::new(brokers, unique("unavailable")),
            from: unique("from"),
            group: unique("group"),
            topics: [unique("first"), unique("second")],
            sent: 0,
            lanes: Vec::new(),
        };
        let [own, others] = replicas;
        for (topic, replicas) in [
            (&env.from, others),
            (&env.topics[0], own),
            (&env.topics[1], others),
        ] {
            let replicas = [replicas];
            let new = NewTopic::new(topic, 1, TopicReplication::Variable(&replicas));
            // All replicas.
            let min = replicas[0].len().to_string();
            let new = new.set("min.insync.replicas", &min);
            create_new_topic(&env.settings, &new).await;
        }
        env
    }

    /// Starts a lane, which can take back an aborted batch or not.
    fn start(&mut self, takes_back: bool) {
        let group = self.group.as_str();
        let watch = TopicWatch::start(&self.settings).unwrap();
        let sort = Sort {
            watch: watch.clone(),
            waiting: Vec::new(),
            in_batch: Vec::new(),
            takes_back,
        };
        let spec = lane_spec(group, group, &[&self.from]);
        let observed = Arc::<Observed>::default();
        let lane = RunningLane::spawn_with(&self.settings, spec, sort, observed, watch);
        self.lanes.push(lane);
    }

    /// Writes so many records for each of the topics.
    async fn fill(&mut self, count: u32) {
        let producer = Producer::new(&self.settings).unwrap();
        for number in self.sent..self.sent + count {
            for topic in &self.topics {
                let output = Output {
                    topic: self.from.as_str().into(),
                    partition: None,
                    key: Some(topic.clone().into()),
                    value: Some(number.to_string().into()),
                    headers: Headers::new(),
                };
                producer.send(&output).await.unwrap();
            }
        }
        self.sent += count;
    }

    #[track_caller]
    fn until_copied(&self, topic: usize) {
        let began = Instant::now();
        until_copied(&self.settings, &self.topics[topic], self.sent as usize);
        // Shown with --nocapture.
        println!(
            "{} records in topic {topic} after {:?}",
            self.sent,
            began.elapsed()
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn denied_topic_stops_only_its_records() {
    let kafka = acls::start().unwrap();
    for takes_back in [false, true] {
        let mut env = Env::new(kafka.brokers(), [&[1], &[1]]).await;
        let denied = env.topics[0].clone();
        acls::deny_writes(&env.settings.brokers, &denied).unwrap();
        env.fill(10).await;
        env.start(takes_back);
        env.until_copied(1);
        env.fill(10).await;
        env.until_copied(1);
        acls::permit_writes(&env.settings.brokers, &denied).unwrap();
        env.until_copied(0);
        env.lanes.clear();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long"]
async fn topic_without_leader_stops_only_its_records() {
    let [first, mut second] = LocalKafka::start_pair().unwrap();
    for takes_back in [false, true] {
        let mut env = Env::new(first.brokers(), [&[2], &[1]]).await;
        env.start(takes_back);
        env.fill(10).await;
        env.until_copied(0);
        // The lane writes to both topics at the moment at which the broker fails, and before the controller notices.
        second.kill_9();
        for _ in 0..20 {
            env.fill(5).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        env.until_copied(1);
        // A lane that begins meanwhile finds an unresolved transaction.
        env.lanes.clear();
        env.fill(10).await;
        env.start(takes_back);
        env.until_copied(1);
        second.start_again().unwrap();
        env.until_copied(0);
        env.lanes.clear();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn backlogs_count_what_leaders_answer() {
    let [first, mut second] = LocalKafka::start_pair().unwrap();
    let env = Env::new(first.brokers(), [&[2], &[1]]).await;
    let mixed = unique("mixed");
    let replicas: [&[i32]; 2] = [&[2], &[1]];
    let new = NewTopic::new(&mixed, 2, TopicReplication::Variable(&replicas));
    create_new_topic(&env.settings, &new).await;
    let producer = Producer::new(&env.settings).unwrap();
    for number in 0..6 {
        let output = Output {
            topic: mixed.as_str().into(),
            partition: Some(number % 2),
            key: None,
            value: Some("v".into()),
            headers: Headers::new(),
        };
        producer.send(&output).await.unwrap();
    }
    let group = unique("group");
    let [lost, kept] = &env.topics;
    let [lost, kept, mixed] = [lost, kept, &mixed].map(|topic| Arc::<str>::from(topic.as_str()));
    let topics = [&lost, &kept, &mixed].map(|topic| (group.clone(), topic.clone()));
    let reachable = || reachable_heads(&env.settings, &topics, 10, DEADLINE, |_| ()).unwrap();
    let all = reachable();
    assert!(all.values().all(|head| head.backlog.is_exact), "{all:?}");
    assert_eq!((all.len(), all[&mixed].backlog.records), (3, 6));
    second.kill_9();
    eventually("the others are counted", DEADLINE, || {
        let heads = reachable();
        let of = |topic| {
            let head: &Head<()> = &heads[topic];
            (
                head.unreachable.as_slice(),
                head.backlog.records,
                head.backlog.is_exact,
            )
        };
        let is_right =
            of(&lost) == (&[0], 0, false) && of(&kept) == (&[], 0, true) && of(&mixed) == (&[0], 3, false);
        if is_right {
            Ok(())
        } else {
            Err(format!("{heads:?}"))
        }
    });
    // Others must not take the partition for empty. Each of them waits for the leader.
    let (settings, topics, whole) = (&env.settings, &topics[2..], &[(mixed.clone(), None)]);
    let refused = std::thread::scope(|scope| {
        [
            scope.spawn(|| backlogs(settings, topics, DEADLINE).unwrap_err()),
            scope.spawn(|| heads(settings, topics, 10, DEADLINE, |_| ()).unwrap_err()),
            scope.spawn(|| Scan::new(settings, whole, &[]).map(drop).unwrap_err()),
        ]
        .map(|refused| refused.join().unwrap())
    });
    for refused in refused {
        let is_named = matches!(&refused, ReadError::NoLeader { topic, partition: 0 } if **topic == *mixed);
        assert!(is_named, "{refused:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn too_few_replicas_stop_only_their_records() {
    let [first, mut second] = LocalKafka::start_pair().unwrap();
    for takes_back in [false, true] {
        let mut env = Env::new(first.brokers(), [&[1, 2], &[1]]).await;
        env.start(takes_back);
        env.fill(10).await;
        env.until_copied(0);
        second.stop().unwrap();
        env.fill(10).await;
        env.until_copied(1);
        let watch = TopicWatch::start(&env.settings).unwrap();
        eventually("the watch knows the reason", DEADLINE, || {
            match watch.presence(&env.topics[0]) {
                Presence::Unwritable {
                    reason: Unwritable::TooFewReplicas,
                    ..
                } => Ok(()),
                other => Err(other),
            }
        });
        // One replica is enough from now on.
        let admin: KafkaClient<AdminClient<DefaultClientContext>> = env.settings.client().create().unwrap();
        let lower =
            AlterConfig::new(ResourceSpecifier::Topic(&env.topics[0])).set("min.insync.replicas", "1");
        for result in admin.alter_configs([&lower], &AdminOptions::new()).await.unwrap() {
            result.unwrap();
        }
        env.until_copied(0);
        second.start_again().unwrap();
        env.lanes.clear();
    }
}
