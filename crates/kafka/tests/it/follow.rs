//! Following partitions, looking up single records, and listing topics.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rdkafka::TopicPartitionList;
use redeliver_core::{Output, Position};
use redeliver_kafka::follow::{Event, Follower, Start};
use redeliver_kafka::lookup::{Found, Lookup, StoredRecord};
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::TopicReader;
use redeliver_kafka::survey::{Extent, Retention, Surveyor};
use redeliver_kafka::transaction::Transactions;
use redeliver_kafka::{KafkaSettings, Waker};
use redeliver_testkit::{DEADLINE, ensure, eventually, kafka_request, unique};

use crate::support::{self, create_topic, settings};

fn output(topic: &Arc<str>, partition: i32, value: &str) -> Output {
    support::output(
        topic.clone(),
        Some(partition),
        None,
        Some(Bytes::copy_from_slice(value.as_bytes())),
    )
}

pub(crate) async fn produce(settings: &KafkaSettings, topic: &Arc<str>, partition: i32, values: &[&str]) {
    let producer = Producer::new(settings).unwrap();
    for value in values {
        producer.send(&output(topic, partition, value)).await.unwrap();
    }
}

/// Writes values in a transaction, aborts it, and waits until its marker is written.
pub(crate) fn produce_and_abort(settings: &KafkaSettings, topic: &Arc<str>, values: &[&str]) {
    let id = unique("aborted");
    let mut transactions = Transactions::new(settings.transactional_producer(&id), &id, DEADLINE);
    let recover = |transactions: &mut Transactions| {
        eventually("a producer", DEADLINE, || {
            let recovered = transactions.recover(Duration::from_secs(5));
            recovered.map_err(|error| error.to_string())
        });
    };
    recover(&mut transactions);
    let outputs: Vec<Output> = values.iter().map(|value| output(topic, 0, value)).collect();
    // The transaction fails because there is no group, once records are delivered.
    let error = transactions.write(&outputs, &TopicPartitionList::new(), None);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("adding offsets"), "{error}");
    // Otherwise, it is open until it times out.
    recover(&mut transactions);
    // The coordinator writes the marker after it has answered.
    let mut reader = TopicReader::new(settings, std::slice::from_ref(topic)).unwrap();
    reader.read_to_end(DEADLINE, drop).unwrap();
}

/// The events of a follower by partition: offsets with values, and the last end.
#[derive(Default)]
struct Received {
    records: BTreeMap<i32, Vec<(i64, String)>>,
    ends: BTreeMap<i32, i64>,
}

impl Received {
    fn until(&mut self, follower: &mut Follower, what: &str, mut is_expected: impl FnMut(&Self) -> bool) {
        eventually(what, DEADLINE, || {
            follower
                .poll(Duration::from_millis(20), |event| {
                    match event {
                        Event::Record(record) => {
                            let value = String::from_utf8(record.value.unwrap().to_vec()).unwrap();
                            let partition = self.records.entry(record.position.partition).or_default();
                            partition.push((record.position.offset, value));
                        }
                        Event::End {
                            partition, offset, ..
                        } => {
                            self.ends.insert(partition, offset);
                        }
                        Event::Refused { .. } => {}
                    }
                    ControlFlow::Continue(())
                })
                .unwrap();
            ensure(is_expected(self), format!("{:?} {:?}", self.records, self.ends))
        });
    }

    fn values(&self, partition: i32) -> Vec<&str> {
        let records = self.records.get(&partition).into_iter().flatten();
        records.map(|(_, value)| value.as_str()).collect()
    }
}

fn start(topic: &Arc<str>, partition: i32, from: Option<i64>) -> Start {
    Start {
        topic: topic.clone(),
        partition,
        from,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ids_do_not_wait_for_records() {
    let mut settings = settings("waiting-fetch");
    let topic: Arc<str> = unique("waiting-fetch").into();
    create_topic(&settings, &topic, 1).await;
    let waits = [("fetch.wait.max.ms", "60000"), ("socket.timeout.ms", "90000")];
    let waits = waits.map(|(name, value)| (name.to_owned(), value.to_owned()));
    settings.properties.extend(waits);
    let mut follower = Follower::new(&settings, Waker::default()).unwrap();
    follower.add(&[start(&topic, 0, None)]).unwrap();
    // After the end, the client waits for the next record.
    produce(&settings, &topic, 0, &["a"]).await;
    let mut received = Received::default();
    received.until(&mut follower, "the record", |received| {
        received.records.contains_key(&0)
    });
    assert_eq!(follower.topic_ids(&[&*topic]).unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_are_followed_from_given_offsets() {
    let settings = settings("follow");
    let topic: Arc<str> = unique("follow").into();
    create_topic(&settings, &topic, 2).await;
    produce(&settings, &topic, 0, &["a", "b"]).await;
    produce(&settings, &topic, 1, &["x", "y", "z"]).await;
    produce_and_abort(&settings, &topic, &["never", "never"]);
    let mut follower = Follower::new(&settings, Waker::new()).unwrap();
    follower
        .add(&[start(&topic, 0, None), start(&topic, 1, Some(2))])
        .unwrap();
    let mut received = Received::default();
    // The two aborted records and their marker have offsets too.
    let ends = BTreeMap::from([(0, 5), (1, 3)]);
    received.until(&mut follower, "both ends", |received| received.ends == ends);
    assert_eq!(
        (received.values(0), received.values(1)),
        (vec!["a", "b"], vec!["z"])
    );

    // New records arrive after the client was replaced. Then the partition is followed from another offset.
    follower.renew().unwrap();
    produce(&settings, &topic, 0, &["c"]).await;
    received.until(&mut follower, "a new record", |received| {
        received.values(0).len() == 3
    });
    assert_eq!(
        (received.values(0), received.values(1)),
        (vec!["a", "b", "c"], vec!["z"])
    );
    follower.add(&[start(&topic, 1, Some(1))]).unwrap();
    received.until(&mut follower, "records from an earlier offset", |received| {
        received.values(1).len() == 3
    });
    assert_eq!(received.values(1), ["z", "y", "z"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn recreated_topic_is_followed_again() {
    let settings = settings("again");
    let topic: Arc<str> = unique("again").into();
    create_topic(&settings, &topic, 1).await;
    produce(&settings, &topic, 0, &["old", "old", "old"]).await;
    let mut follower = Follower::new(&settings, Waker::new()).unwrap();
    follower.add(&[start(&topic, 0, None)]).unwrap();
    let mut received = Received::default();
    received.until(&mut follower, "all", |received| received.values(0).len() == 3);
    kafka_request::delete_topic(&settings.brokers, &topic);
    follower.remove(&topic).unwrap();
    create_topic(&settings, &topic, 1).await;
    produce(&settings, &topic, 0, &["new"]).await;
    follower.add(&[start(&topic, 0, None)]).unwrap();
    received.until(&mut follower, "the new one", |received| {
        received.values(0).len() == 4
    });
    assert_eq!(received.records[&0].last(), Some(&(0, "new".to_owned())));
}

#[tokio::test(flavor = "multi_thread")]
async fn lookups_return_existing_records() {
    let settings = settings("lookup");
    let topic: Arc<str> = unique("lookup").into();
    create_topic(&settings, &topic, 2).await;
    let many: Vec<String> = (0..300).map(|number| format!("v{number}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    produce(&settings, &topic, 0, &many).await;
    produce_and_abort(&settings, &topic, &["never"]);
    produce(&settings, &topic, 1, &["other"]).await;
    let mut lookup = Lookup::new(&settings).unwrap();
    let position = |partition, offset| Position {
        topic: topic.clone(),
        partition,
        offset,
    };
    let missing = Position {
        topic: unique("none").into(),
        partition: 0,
        offset: 0,
    };
    let positions = [
        position(0, 299),
        position(1, 0),
        position(0, 3),
        position(0, 300),
        position(0, 5),
        position(0, 150),
        position(1, 1),
        position(0, 100_000),
        missing,
        position(0, 3),
    ];
    for _ in 0..2 {
        let found = lookup.get(&positions, DEADLINE).unwrap();
        let values: Vec<Option<&str>> = found
            .iter()
            .map(|stored| {
                let value = stored.as_ref()?.record.value.as_deref()?;
                std::str::from_utf8(value).ok()
            })
            .collect();
        let expected = [
            Some("v299"),
            Some("other"),
            Some("v3"),
            None,
            Some("v5"),
            Some("v150"),
            None,
            None,
            None,
            Some("v3"),
        ];
        assert_eq!(values, expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_records_are_told_from_unknown() {
    let settings = settings("lookup-find");
    let topic: Arc<str> = unique("lookup-find").into();
    create_topic(&settings, &topic, 1).await;
    produce(&settings, &topic, 0, &["v0", "v1", "v2"]).await;
    produce_and_abort(&settings, &topic, &["never"]);
    kafka_request::delete_records(&settings.brokers, &topic, 0, 2);
    let mut lookup = Lookup::new(&settings).unwrap();
    let mut find = |topic: &Arc<str>, offsets: &[i64]| {
        let positions: Vec<Position> = offsets
            .iter()
            .map(|offset| Position {
                topic: topic.clone(),
                partition: 0,
                offset: *offset,
            })
            .collect();
        let found = lookup.find(&positions, DEADLINE).unwrap();
        let found = found.into_iter().map(|found| match found {
            Found::Record(stored) => String::from_utf8(stored.record.value.unwrap().to_vec()).unwrap(),
            Found::Deleted => "deleted".to_owned(),
            Found::Compacted => "compacted".to_owned(),
            Found::Unknown => "unknown".to_owned(),
        });
        found.collect::<Vec<_>>()
    };
    assert_eq!(
        find(&topic, &[0, 1, 2, 3]),
        ["deleted", "deleted", "v2", "compacted"]
    );
    assert_eq!(find(&topic, &[0, 100_000]), ["deleted", "unknown"]);
    // Nothing is asked after what is unknown.
    assert_eq!(find(&unique("none").into(), &[0, 1]), ["unknown"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn lookup_ends_at_given_size() {
    let settings = settings("lookup-size");
    let topic: Arc<str> = unique("lookup-size").into();
    create_topic(&settings, &topic, 2).await;
    // Small ones first, so that the size of the others cannot be guessed.
    let large = "x".repeat(100_000);
    let values: Vec<&str> = std::iter::repeat_n("x", 40)
        .chain(std::iter::repeat_n(large.as_str(), 40))
        .collect();
    for partition in 0..2 {
        produce(&settings, &topic, partition, &values).await;
    }
    let mut lookup = Lookup::for_runs(&settings).unwrap();
    let position = |partition, offset| Position {
        topic: topic.clone(),
        partition,
        offset,
    };
    let all: Vec<Position> = (0..80)
        .map(|offset| position(0, offset))
        .chain((0..80).map(|offset| position(1, offset)))
        .collect();
    let mut sizes = |positions: &[Position], bytes| -> Vec<Option<usize>> {
        let found = lookup.get_first(positions, bytes, DEADLINE).unwrap();
        let size = |stored: StoredRecord| stored.record.value.map(|value| value.len());
        found.into_iter().map(|stored| stored.and_then(size)).collect()
    };
    let mut expected = vec![Some(1); 40];
    expected.extend([Some(100_000); 3]);
    assert_eq!(sizes(&all, 250_000), expected);
    // One is read in any case, and missing ones have no size.
    assert_eq!(sizes(&all[60..], 1), [Some(100_000)]);
    // The next call continues there, or goes back.
    assert_eq!(sizes(&all[61..], 1), [Some(100_000)]);
    assert_eq!(sizes(&all[60..], 1), [Some(100_000)]);
    assert_eq!(sizes(&all[38..], 1), [Some(1)]);
    let some = [position(0, 99), position(1, 79), position(1, 78), position(0, 0)];
    assert_eq!(
        sizes(&some, usize::MAX),
        [None, Some(100_000), Some(100_000), Some(1)]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn survey_returns_offsets_and_retention() {
    let settings = settings("survey");
    let topic: Arc<str> = unique("survey").into();
    create_topic(&settings, &topic, 2).await;
    produce(&settings, &topic, 1, &["a", "b"]).await;
    produce_and_abort(&settings, &topic, &["never"]);
    let surveyor = Surveyor::new(&settings).unwrap();
    // The aborted record and its marker have offsets too. The marker is written a little later.
    let extents = [Some(Extent { low: 0, end: 2 }), Some(Extent { low: 0, end: 2 })];
    eventually("the extents", DEADLINE, || {
        let topics = surveyor.topics(|name| name == &*topic).unwrap();
        assert_eq!(topics.len(), 1);
        ensure(topics[0].partitions == extents, format!("{topics:?}"))
    });
    let retention = surveyor.retention(std::slice::from_ref(&topic)).await.unwrap();
    let week = Retention {
        age: Some(redeliver_core::HumanDuration::from_secs(7 * 86_400)),
        by_size: false,
    };
    assert_eq!(retention.get(&*topic), Some(&week));
    let missing_topic: Arc<str> = unique("missing").into();
    let limits = surveyor.max_message_bytes(&[topic.clone(), missing_topic]).await;
    // The default of the broker.
    let expected = BTreeMap::from([(topic.to_string(), 1_048_588)]);
    assert_eq!(limits.unwrap(), expected);
    assert_eq!(surveyor.topics(|_| false).unwrap(), []);
    // A topic that does not exist is not refused.
    let missing = BTreeSet::from([Arc::from(unique("missing"))]);
    assert_eq!(surveyor.topics_and(|_| false, &missing).unwrap(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn survey_tells_recreated_topic_apart() {
    let settings = settings("survey-id");
    let topic: Arc<str> = unique("survey-id").into();
    let surveyor = Surveyor::new(&settings).unwrap();
    let id = || surveyor.topics(|name| name == &*topic).unwrap().first()?.id;
    create_topic(&settings, &topic, 1).await;
    let first = eventually("an id", DEADLINE, || id().ok_or("none"));
    assert_eq!(id(), Some(first));
    kafka_request::delete_topic(&settings.brokers, &topic);
    create_topic(&settings, &topic, 1).await;
    eventually("another id", DEADLINE, || match id() {
        Some(id) if id != first => Ok(()),
        id => Err(format!("{id:?}")),
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn more_partitions_continue_the_others() {
    let settings = settings("follow-many");
    let (one, many): (Arc<str>, Arc<str>) = (unique("follow-one").into(), unique("follow-many").into());
    create_topic(&settings, &one, 1).await;
    create_topic(&settings, &many, 70).await;
    produce(&settings, &one, 0, &["a", "b"]).await;
    produce(&settings, &many, 69, &["z"]).await;
    let mut follower = Follower::new(&settings, Waker::new()).unwrap();
    follower.add(&[start(&one, 0, None)]).unwrap();
    let mut received = Received::default();
    received.until(&mut follower, "the first records", |received| {
        received.values(0).len() == 2
    });
    // So many partitions need a client with a smaller prefetch.
    let starts: Vec<Start> = (1..70).map(|partition| start(&many, partition, None)).collect();
    follower.add(&starts).unwrap();
    produce(&settings, &one, 0, &["c"]).await;
    received.until(&mut follower, "the other records", |received| {
        received.values(0).len() == 3 && received.values(69).len() == 1
    });
    assert_eq!(received.values(0), ["a", "b", "c"]);
    // Each partition had its turn.
    assert!(follower.rounds() > 0);
}
