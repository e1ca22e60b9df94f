//! A topic that may not be written, has no leader, or has too few replicas in sync, stops only the records for it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions, AlterConfig, NewTopic, ResourceSpecifier, TopicReplication};
use rdkafka::client::DefaultClientContext;
use redeliver_core::{Record, Timestamp};
use redeliver_kafka::backlog::{Head, Mode, backlogs, heads};
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::{ReadError, TopicReader};
use redeliver_kafka::scan::Scan;
use redeliver_kafka::{
    AssignmentId, KafkaClient, KafkaSettings, Presence, Processor, TopicWatch, TransactionBatch, Unwritable,
};
use redeliver_testkit::{LocalKafka, acls, ensure, eventually, unique};

use crate::copy::{Observed, until_copied};
use crate::support::{DEADLINE, RunningLane, create_new_topic, lane_spec, output};

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
            batch
                .outputs
                .push(output(topic(record).into(), None, None, record.value.clone()));
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
    /// Whether the lane can take back an aborted batch.
    takes_back: bool,
    lane: Option<RunningLane>,
}

impl Env {
    /// With lanes of both kinds.
    async fn both(brokers: &str, replicas: [&[i32]; 2]) -> [Self; 2] {
        [
            Self::new(brokers, replicas, false).await,
            Self::new(brokers, replicas, true).await,
        ]
    }

    /// `replicas`: the brokers of the topic that becomes unavailable, and of all other topics.
    async fn new(brokers: &str, replicas: [&[i32]; 2], takes_back: bool) -> Self {
        let env = Self {
            settings: KafkaSettings::new(brokers, unique("unavailable")),
            from: unique("from"),
            group: unique("group"),
            topics: [unique("first"), unique("second")],
            sent: 0,
            takes_back,
            lane: None,
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

    fn start(&mut self) {
        let group = self.group.as_str();
        let watch = TopicWatch::start(&self.settings).unwrap();
        let sort = Sort {
            watch: watch.clone(),
            waiting: Vec::new(),
            in_batch: Vec::new(),
            takes_back: self.takes_back,
        };
        let spec = lane_spec(group, group, &[&self.from]);
        let observed = Arc::<Observed>::default();
        let lane = RunningLane::spawn_with(&self.settings, spec, sort, observed, watch);
        self.lane = Some(lane);
    }

    /// Writes so many records for each of the topics.
    async fn fill(&mut self, count: u32) {
        let producer = Producer::new(&self.settings).unwrap();
        for number in self.sent..self.sent + count {
            for topic in &self.topics {
                let output = output(
                    self.from.as_str().into(),
                    None,
                    Some(topic.clone().into()),
                    Some(number.to_string().into()),
                );
                producer.send(&output).await.unwrap();
            }
        }
        self.sent += count;
    }

    #[track_caller]
    fn until_copied(&self, topic: usize) {
        until_copied(&self.settings, &self.topics[topic], self.sent as usize);
    }

    #[track_caller]
    fn until_too_few_replicas(&self) {
        let watch = TopicWatch::start(&self.settings).unwrap();
        eventually("the watch knows the reason", DEADLINE, || {
            match watch.presence(&self.topics[0]) {
                Presence::Unwritable {
                    reason: Unwritable::TooFewReplicas,
                    ..
                } => Ok(()),
                other => Err(other),
            }
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn denied_topic_stops_only_its_records() {
    let kafka = acls::start().unwrap();
    let mut envs = Env::both(&kafka.brokers(), [&[1], &[1]]).await;
    for env in &mut envs {
        acls::deny_writes(&env.settings.brokers, &env.topics[0]).unwrap();
        env.fill(10).await;
        env.start();
    }
    for env in &mut envs {
        env.until_copied(1);
        env.fill(10).await;
    }
    for env in &envs {
        env.until_copied(1);
        acls::permit_writes(&env.settings.brokers, &env.topics[0]).unwrap();
    }
    envs.iter().for_each(|env| env.until_copied(0));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long"]
async fn leaderless_topic_stops_only_its_records() {
    let [first, mut second] = LocalKafka::start_pair().unwrap();
    let mut envs = Env::both(&first.brokers(), [&[2], &[1]]).await;
    for env in &mut envs {
        env.start();
        env.fill(10).await;
        env.until_copied(0);
    }
    // The lanes write to both topics at the moment at which the broker fails, and before the controller notices.
    second.kill_9();
    for _ in 0..20 {
        for env in &mut envs {
            env.fill(5).await;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for env in &mut envs {
        env.until_copied(1);
        // A lane that begins meanwhile finds an unresolved transaction.
        env.lane = None;
        env.fill(10).await;
        env.start();
        env.until_copied(1);
    }
    second.start_again().unwrap();
    envs.iter().for_each(|env| env.until_copied(0));
}

/// What is only on a broker that stops is missing, and everything else goes on.
#[tokio::test(flavor = "multi_thread")]
async fn stopped_broker_affects_only_its_partitions() {
    let [first, mut second] = LocalKafka::start_pair().unwrap();
    let brokers = first.brokers();
    let mut envs = Env::both(&brokers, [&[1, 2], &[1]]).await;
    for env in &mut envs {
        env.start();
        env.fill(10).await;
        env.until_copied(0);
    }
    let mut moved = moved_leaders(&brokers).await;
    let backlogs = BacklogEnv::new(&brokers).await;
    second.stop().unwrap();
    // Without asking again for each topic, the client believes for minutes that there is no leader.
    moved.read_to_end(DEADLINE / 4, |_| {}).unwrap();
    let counted = std::thread::spawn(move || backlogs.assert_counted());
    for env in &mut envs {
        env.fill(10).await;
    }
    for env in &envs {
        env.until_copied(1);
        env.until_too_few_replicas();
        // One replica is enough from now on.
        let admin: KafkaClient<AdminClient<DefaultClientContext>> = env.settings.client().create().unwrap();
        let lower =
            AlterConfig::new(ResourceSpecifier::Topic(&env.topics[0])).set("min.insync.replicas", "1");
        for result in admin.alter_configs([&lower], &AdminOptions::new()).await.unwrap() {
            result.unwrap();
        }
    }
    envs.iter().for_each(|env| env.until_copied(0));
    counted.join().unwrap();
}

/// A reader of several topics, which the second broker leads.
async fn moved_leaders(brokers: &str) -> TopicReader {
    let settings = KafkaSettings::new(brokers, unique("leaders"));
    let topics: [Arc<str>; 3] = ["a", "b", "c"].map(Arc::from);
    for topic in &topics {
        let replicas = TopicReplication::Variable(&[&[2, 1]]);
        create_new_topic(&settings, &NewTopic::new(topic, 1, replicas)).await;
    }
    let mut reader = TopicReader::new(&settings, &topics).unwrap();
    reader.read_to_end(DEADLINE, |_| {}).unwrap();
    reader
}

/// Topics that are lost, kept and partly lost without the second broker.
struct BacklogEnv {
    settings: KafkaSettings,
    topics: [(String, Arc<str>); 3],
}

impl BacklogEnv {
    async fn new(brokers: &str) -> Self {
        let settings = KafkaSettings::new(brokers, unique("backlogs"));
        let group = unique("group");
        let topics = ["lost", "kept", "mixed"].map(|name| (group.clone(), Arc::from(unique(name))));
        let placed: [&[&[i32]]; 3] = [&[&[2]], &[&[1]], &[&[2], &[1]]];
        for ((_, topic), replicas) in topics.iter().zip(placed) {
            let partitions = i32::try_from(replicas.len()).unwrap();
            let new = NewTopic::new(topic, partitions, TopicReplication::Variable(replicas));
            create_new_topic(&settings, &new).await;
        }
        let producer = Producer::new(&settings).unwrap();
        for number in 0..6 {
            let output = output(topics[2].1.clone(), Some(number % 2), None, Some("v".into()));
            producer.send(&output).await.unwrap();
        }
        let env = Self { settings, topics };
        let all = env.reachable();
        assert!(all.values().all(|head| head.backlog.is_exact), "{all:?}");
        assert_eq!((all.len(), all[&env.topics[2].1].backlog.records), (3, 6));
        env
    }

    fn reachable(&self) -> BTreeMap<Arc<str>, Head<()>> {
        heads(
            &self.settings,
            &self.topics,
            Mode::Reachable,
            10,
            DEADLINE,
            |_| (),
        )
        .unwrap()
    }

    /// Without the broker, those are counted whose leaders answer.
    fn assert_counted(&self) {
        eventually("the others are counted", DEADLINE, || {
            let heads = self.reachable();
            let found = self.topics.each_ref().map(|(_, topic)| {
                let Head {
                    backlog, unreachable, ..
                } = &heads[topic];
                (unreachable.clone(), backlog.records, backlog.is_exact)
            });
            let expected = [(vec![0], 0, false), (vec![], 0, true), (vec![0], 3, false)];
            ensure(found == expected, format!("{found:?}"))
        });
        // Others must not take the partition for empty. Each of them waits for the leader.
        let mixed = &self.topics[2].1;
        let (settings, topics, whole) = (&self.settings, &self.topics[2..], &[(mixed.clone(), None)]);
        let refused = std::thread::scope(|scope| {
            [
                scope.spawn(|| backlogs(settings, topics, DEADLINE).unwrap_err()),
                scope.spawn(|| heads(settings, topics, Mode::Heads, 10, DEADLINE, |_| ()).unwrap_err()),
                scope.spawn(|| Scan::new(settings, whole, &[]).map(drop).unwrap_err()),
            ]
            .map(|refused| refused.join().unwrap())
        });
        for refused in refused {
            let is_named =
                matches!(&refused, ReadError::NoLeader { topic, partition: 0 } if **topic == **mixed);
            assert!(is_named, "{refused:?}");
        }
    }
}
