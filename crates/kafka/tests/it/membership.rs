//! Members whose subscription changes with a restart.

use rdkafka::admin::{AdminClient, AdminOptions, NewPartitions};
use rdkafka::client::DefaultClientContext;
use redeliver_kafka::KafkaClient;
use redeliver_kafka::KafkaSettings;
use redeliver_testkit::{ensure, eventually, unique};
use tokio::task::JoinSet;

use crate::copy::{CopyLane, CopyOptions, fill, until_copied};
use crate::support::{DEADLINE, create_topic, settings};

/// A group of lanes that restart with other topics.
struct Group {
    name: String,
    to: String,
    members: Vec<(KafkaSettings, Option<CopyLane>)>,
}

impl Group {
    async fn new(members: usize, is_static: bool) -> Self {
        let name = unique("group");
        let members: Vec<_> = (0..members)
            .map(|number| {
                let settings = KafkaSettings {
                    static_membership: is_static,
                    ..settings(&format!("member-{number}"))
                };
                (settings, None)
            })
            .collect();
        let to = unique("to");
        create_topic(&members[0].0, &to, 1).await;
        Self { name, to, members }
    }

    fn settings(&self) -> &KafkaSettings {
        &self.members[0].0
    }

    async fn topic(&self, partitions: i32) -> String {
        let topic = unique("from");
        create_topic(self.settings(), &topic, partitions).await;
        topic
    }

    fn start(&mut self, member: usize, topics: &[&str]) {
        let (settings, lane) = &mut self.members[member];
        let started = CopyLane::start(settings, &self.name, topics, &self.to, CopyOptions::default());
        *lane = Some(started);
    }

    fn start_all(&mut self, topics: &[&str]) {
        (0..self.members.len()).for_each(|member| self.start(member, topics));
    }

    fn stop(&mut self, member: usize) {
        self.members[member].1.take().unwrap().stop();
    }

    fn stop_all(&mut self) {
        (0..self.members.len()).for_each(|member| self.stop(member));
    }

    fn running(&self) -> impl Iterator<Item = &CopyLane> {
        self.members.iter().filter_map(|(_, lane)| lane.as_ref())
    }

    #[track_caller]
    fn until_ready(&self) {
        eventually("all lanes are ready", DEADLINE, || {
            let waiting: Vec<_> = self
                .running()
                .filter_map(|lane| lane.observed.waiting())
                .collect();
            ensure(waiting.is_empty(), format!("{waiting:?}"))
        });
    }

    /// Writes these values to a topic.
    async fn fill(&self, topic: &str, values: std::ops::Range<u32>) {
        fill(self.settings(), topic, values).await;
    }

    #[track_caller]
    fn until_copied(&self, count: usize) {
        until_copied(self.settings(), &self.to, count);
    }

    /// Waits until each member owns so many partitions.
    #[track_caller]
    fn until_shares(&self, expected: &[usize]) {
        eventually("each member owns its share", DEADLINE, || {
            let shares: Vec<_> = self.running().map(|lane| lane.observed.partitions()).collect();
            ensure(shares == expected, format!("{shares:?}, not {expected:?}"))
        });
    }

    /// Waits until the members together own partitions of exactly these topics.
    #[track_caller]
    fn until_topics(&self, topics: &[&str]) {
        eventually("the members own exactly these topics", DEADLINE, || {
            let mut owned: Vec<_> = self.running().flat_map(|lane| lane.observed.topics()).collect();
            owned.sort();
            owned.dedup();
            let mut expected: Vec<_> = topics.iter().map(|topic| (*topic).to_owned()).collect();
            expected.sort();
            ensure(owned == expected, format!("{owned:?}, not {expected:?}"))
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_member_keeps_its_offsets() {
    let mut group = Group::new(1, true).await;
    let (a, b) = (group.topic(2).await, group.topic(2).await);
    group.fill(&a, 0..50).await;
    group.start(0, &[&a]);
    group.until_copied(50);
    group.until_ready();
    group.stop(0);

    // The topic is replaced by another.
    group.fill(&b, 50..100).await;
    group.start(0, &[&b]);
    group.until_copied(100);
    group.until_ready();
    group.until_topics(&[&b]);
    group.stop(0);

    // A topic is added whose committed offsets still exist.
    group.fill(&a, 100..150).await;
    group.start(0, &[&a, &b]);
    group.until_copied(150);
    group.until_ready();
    group.until_topics(&[&a, &b]);
    group.stop(0);

    // A topic is removed.
    group.start(0, &[&a]);
    group.until_ready();
    group.until_topics(&[&a]);
    group.fill(&b, 200..210).await;
    group.fill(&a, 150..200).await;
    group.until_copied(200);
    group.stop_all();
}

/// Runs a scenario with static and with dynamic members, at the same time.
async fn with_both_memberships<F>(scenario: impl Fn(bool) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut running: JoinSet<()> = [true, false].into_iter().map(scenario).collect();
    while let Some(ended) = running.join_next().await {
        ended.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rolling_restart_adds_topic() {
    with_both_memberships(|is_static| async move {
        let mut group = Group::new(3, is_static).await;
        let (a, b) = (group.topic(3).await, group.topic(3).await);
        group.fill(&a, 0..60).await;
        group.start_all(&[&a]);
        group.until_copied(60);
        group.until_ready();
        group.fill(&b, 60..120).await;
        for member in 0..3 {
            group.stop(member);
            group.start(member, &[&a, &b]);
            group.until_ready();
        }
        group.until_copied(120);
        group.until_topics(&[&a, &b]);
        group.until_shares(&[2, 2, 2]);
        group.stop_all();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_static_member_gains_topic() {
    let mut group = Group::new(2, true).await;
    let (a, b) = (group.topic(1).await, group.topic(4).await);
    group.start(0, &[&a]);
    group.until_ready();
    group.start(1, &[&a]);
    group.until_ready();
    for member in [0, 1] {
        group.stop(member);
        group.start(member, &[&a, &b]);
        group.until_ready();
    }
    group.fill(&b, 0..40).await;
    group.until_copied(40);
    group.stop_all();
}

#[tokio::test(flavor = "multi_thread")]
async fn created_topics_and_partitions_are_read() {
    let mut group = Group::new(2, true).await;
    let (a, late) = (group.topic(2).await, unique("late"));
    group.start(0, &[&a, &late]);
    group.start(1, &[&a, &late]);
    group.until_ready();
    create_topic(group.settings(), &late, 2).await;
    group.fill(&late, 0..20).await;
    group.until_copied(20);
    group.until_ready();
    grow(group.settings(), &late, 6).await;
    // The new partitions are empty, but their lag is reported.
    group.until_shares(&[4, 4]);
    group.stop_all();
}

/// The leader's client notices only new partitions of its own topics.
#[tokio::test(flavor = "multi_thread")]
async fn partitions_unknown_to_leader_are_read() {
    with_both_memberships(|is_static| async move {
        let mut group = Group::new(4, is_static).await;
        let (a, b) = (group.topic(2).await, group.topic(2).await);
        // The first member becomes the leader.
        group.start(0, &[&a]);
        group.until_ready();
        group.start(1, &[&a]);
        group.start(2, &[&b]);
        group.start(3, &[&b]);
        group.until_ready();
        grow(group.settings(), &b, 6).await;
        group.until_shares(&[1, 1, 3, 3]);
        group.until_ready();
        group.stop_all();
    })
    .await;
}

async fn grow(settings: &KafkaSettings, topic: &str, partitions: usize) {
    let admin: KafkaClient<AdminClient<DefaultClientContext>> = settings.client().create().unwrap();
    let grown = NewPartitions::new(topic, partitions);
    for result in admin
        .create_partitions([&grown], &AdminOptions::new())
        .await
        .unwrap()
    {
        result.unwrap();
    }
}
