//! Static members whose subscription changes over a restart.

use rdkafka::admin::{AdminClient, AdminOptions, NewPartitions};
use rdkafka::client::DefaultClientContext;
use redeliver_kafka::{IfRecreated, KafkaSettings};
use redeliver_testkit::{eventually, unique};

use crate::lane::{DEADLINE, Running, counts, fill, start_with};
use crate::support::{create_topic, settings};

/// Members of one group that restart with other topics.
struct Group {
    name: String,
    to: String,
    members: Vec<(KafkaSettings, Option<Running>)>,
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
        let (settings, running) = &mut self.members[member];
        let lane = start_with(
            settings.clone(),
            &self.name,
            topics,
            &self.to,
            false,
            IfRecreated::ReadFromBeginning,
        );
        *running = Some(lane);
    }

    fn stop(&mut self, member: usize) {
        self.members[member].1.take().unwrap().stop();
    }

    fn running(&self) -> impl Iterator<Item = &Running> {
        self.members.iter().filter_map(|(_, running)| running.as_ref())
    }

    fn are_ready(&self) {
        eventually("all lanes are ready", DEADLINE, || {
            let waiting: Vec<_> = self.running().filter_map(|lane| lane.lags.waiting()).collect();
            if waiting.is_empty() {
                Ok(())
            } else {
                Err(format!("{waiting:?}"))
            }
        });
    }

    /// Records so far, each of them once.
    fn copied(&self, count: usize) {
        eventually("all are copied", DEADLINE, || {
            let counts = counts(self.settings(), &self.to);
            assert!(
                counts.values().all(|count| *count == 1),
                "a record was copied twice"
            );
            if counts.len() == count {
                Ok(())
            } else {
                Err(format!("{} of {count}", counts.len()))
            }
        });
    }

    /// The members together read these topics and no others.
    fn read(&self, topics: &[&str]) {
        eventually("these topics are read and no others", DEADLINE, || {
            let mut read: Vec<_> = self.running().flat_map(|lane| lane.lags.topics()).collect();
            read.sort();
            read.dedup();
            let mut wanted: Vec<_> = topics.iter().map(|topic| (*topic).to_owned()).collect();
            wanted.sort();
            if read == wanted {
                Ok(())
            } else {
                Err(format!("{read:?} and not {wanted:?}"))
            }
        });
    }

    fn stop_all(mut self) {
        for member in 0..self.members.len() {
            if self.members[member].1.is_some() {
                self.stop(member);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_static_member_that_restarts_with_other_topics_reads_those_and_keeps_its_offsets() {
    let mut group = Group::new(1, true).await;
    let (a, b) = (group.topic(2).await, group.topic(2).await);
    fill(group.settings(), &a, 0..50).await;
    group.start(0, &[&a]);
    group.copied(50);
    group.are_ready();
    group.stop(0);

    // Replaced.
    fill(group.settings(), &b, 50..100).await;
    group.start(0, &[&b]);
    group.copied(100);
    group.are_ready();
    group.read(&[&b]);
    group.stop(0);

    // One added, whose offsets were kept meanwhile.
    fill(group.settings(), &a, 100..150).await;
    group.start(0, &[&a, &b]);
    group.copied(150);
    group.are_ready();
    group.read(&[&a, &b]);
    group.stop(0);

    // One removed.
    group.start(0, &[&a]);
    group.are_ready();
    group.read(&[&a]);
    fill(group.settings(), &b, 200..210).await;
    fill(group.settings(), &a, 150..200).await;
    group.copied(200);
    group.stop_all();
}

#[tokio::test(flavor = "multi_thread")]
async fn three_members_restart_one_after_the_other_with_another_topic() {
    for is_static in [true, false] {
        let mut group = Group::new(3, is_static).await;
        let (a, b) = (group.topic(3).await, group.topic(3).await);
        fill(group.settings(), &a, 0..60).await;
        for member in 0..3 {
            group.start(member, &[&a]);
        }
        group.copied(60);
        group.are_ready();
        fill(group.settings(), &b, 60..120).await;
        for member in 0..3 {
            group.stop(member);
            group.start(member, &[&a, &b]);
            group.are_ready();
        }
        group.copied(120);
        group.read(&[&a, &b]);
        eventually(
            "each member has its share of both topics together",
            DEADLINE,
            || {
                let shares: Vec<_> = group.running().map(|lane| lane.lags.partitions()).collect();
                if shares.iter().all(|share| *share == 2) {
                    Ok(())
                } else {
                    Err(format!("{shares:?}"))
                }
            },
        );
        group.stop_all();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn three_static_members_restart_at_once_with_another_topic() {
    let mut group = Group::new(3, true).await;
    let (a, b) = (group.topic(3).await, group.topic(3).await);
    fill(group.settings(), &a, 0..60).await;
    for member in 0..3 {
        group.start(member, &[&a]);
    }
    group.copied(60);
    group.are_ready();
    for member in 0..3 {
        group.stop(member);
    }
    fill(group.settings(), &b, 60..120).await;
    for member in 0..3 {
        group.start(member, &[&b]);
    }
    group.copied(120);
    group.are_ready();
    group.read(&[&b]);
    group.stop_all();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_static_member_without_partitions_restarts_with_another_topic() {
    let mut group = Group::new(2, true).await;
    let (a, b) = (group.topic(1).await, group.topic(4).await);
    group.start(0, &[&a]);
    group.are_ready();
    group.start(1, &[&a]);
    group.are_ready();
    for member in [0, 1] {
        group.stop(member);
        group.start(member, &[&a, &b]);
        group.are_ready();
    }
    fill(group.settings(), &b, 0..40).await;
    group.copied(40);
    group.stop_all();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_is_created_or_grows_while_members_run_is_read_soon() {
    let mut group = Group::new(2, true).await;
    let (a, late) = (group.topic(2).await, unique("late"));
    group.start(0, &[&a, &late]);
    group.start(1, &[&a, &late]);
    group.are_ready();
    create_topic(group.settings(), &late, 2).await;
    fill(group.settings(), &late, 0..20).await;
    group.copied(20);
    group.are_ready();
    grow(group.settings(), &late, 6).await;
    // Its partitions are empty, and known to be read by their lag.
    eventually("the new partitions are read", DEADLINE, || {
        match group.running().map(|lane| lane.lags.partitions()).sum::<usize>() {
            8 => Ok(()),
            partitions => Err(format!("{partitions} of 8")),
        }
    });
    group.stop_all();
}

async fn grow(settings: &KafkaSettings, topic: &str, partitions: usize) {
    let admin: AdminClient<DefaultClientContext> = settings.client().create().unwrap();
    let grown = NewPartitions::new(topic, partitions);
    for result in admin
        .create_partitions([&grown], &AdminOptions::new())
        .await
        .unwrap()
    {
        result.unwrap();
    }
}
