//! Changes that cannot overlap, on a real broker.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer as _, ThreadedProducer};
use redeliver_core::{Headers, Output, Record};
use redeliver_kafka::exclusive::{Decide, ExclusiveError, ExclusiveWriter};
use redeliver_kafka::reader::{ReadError, ReadTo, TopicReader};
use redeliver_kafka::{KafkaClient, KafkaSettings, TopicId};
use redeliver_testkit::kafka_request::delete_records;
use redeliver_testkit::unique;

use crate::support::{create_topic, settings};

const DEADLINE: Duration = Duration::from_secs(90);
const WRITERS: usize = 3;
const CHANGES: usize = 4;

/// Writes the number of records before it.
struct Count<'t> {
    topic: &'t Arc<str>,
    records: usize,
    most: usize,
}

impl Decide for Count<'_> {
    type Decision = usize;
    type Error = &'static str;

    fn read(&mut self, _record: Record) {
        self.records += 1;
    }

    fn decide(self) -> Result<(usize, Vec<Output>), &'static str> {
        if self.records >= self.most {
            return Err("enough");
        }
        let output = Output {
            topic: self.topic.clone(),
            partition: Some(0),
            key: Some("count".into()),
            value: Some(self.records.to_string().into()),
            headers: Headers::new(),
        };
        Ok((self.records, vec![output]))
    }
}

/// A reader of all of a topic.
fn whole(topic: &Arc<str>) -> Result<TopicReader, ReadError> {
    TopicReader::of_partition(&settings("exclusive"), topic, 0, None)
}

fn writer(topic: &Arc<str>) -> (KafkaSettings, ExclusiveWriter) {
    let mut settings = settings(&unique("writer"));
    // Writers of one topic fence each other, also those of different installations.
    settings.id_prefix = unique("prefix");
    let writer = ExclusiveWriter::new(&settings, &format!("exclusive-{topic}"), topic.clone());
    (settings, writer)
}

#[test]
fn changes_of_several_writers_at_once_are_decided_one_after_the_other() {
    let topic: Arc<str> = unique("exclusive").into();
    let settings = settings("exclusive");
    let creating = create_topic(&settings, &topic, 1);
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(creating);
    let count = || {
        let count = Count {
            topic: &topic,
            records: 0,
            most: WRITERS * CHANGES,
        };
        Ok((whole(&topic)?, count))
    };
    thread::scope(|scope| {
        for _ in 0..WRITERS {
            scope.spawn(|| {
                let (_, writer) = writer(&topic);
                for _ in 0..CHANGES {
                    writer.write(DEADLINE, count).unwrap();
                }
            });
        }
    });
    let (settings, writer) = writer(&topic);
    let refused = writer.write(DEADLINE, count);
    assert!(
        matches!(refused, Err(ExclusiveError::Refused("enough"))),
        "{refused:?}"
    );
    let mut values = Vec::new();
    let mut reader = TopicReader::new(&settings, std::slice::from_ref(&topic)).unwrap();
    reader
        .read_to_end(DEADLINE, |record| {
            values.push(String::from_utf8(record.value.unwrap().to_vec()).unwrap());
        })
        .unwrap();
    // Each has seen all changes before its own.
    let expected: Vec<String> = (0..WRITERS * CHANGES).map(|n| n.to_string()).collect();
    assert_eq!(values, expected);
}

/// Writes a record that is larger than the topic permits.
struct TooLarge<'t>(&'t Arc<str>);

impl Decide for TooLarge<'_> {
    type Decision = ();
    type Error = &'static str;

    fn read(&mut self, _record: Record) {}

    fn decide(self) -> Result<((), Vec<Output>), &'static str> {
        // Not compressible.
        let value: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..))
            .take(2 << 20)
            .collect();
        let output = Output {
            topic: self.0.clone(),
            partition: Some(0),
            key: Some("large".into()),
            value: Some(value.into()),
            headers: Headers::new(),
        };
        Ok(((), vec![output]))
    }
}

#[test]
fn a_record_that_the_topic_refuses_is_not_an_unknown_outcome_and_not_tried_again() {
    let topic: Arc<str> = unique("large").into();
    let (settings, writer) = writer(&topic);
    let creating = create_topic(&settings, &topic, 1);
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(creating);
    let attempts = Cell::new(0);
    let failed = writer.write(DEADLINE, || {
        attempts.set(attempts.get() + 1);
        Ok((whole(&topic)?, TooLarge(&topic)))
    });
    assert!(
        matches!(
            failed,
            Err(ExclusiveError::Unavailable {
                step: "committing",
                ..
            })
        ),
        "{failed:?}"
    );
    assert_eq!(attempts.get(), 1);
}

#[test]
fn a_change_of_a_missing_topic_is_refused_at_once_and_does_not_create_it() {
    let topic: Arc<str> = unique("missing").into();
    let (settings, writer) = writer(&topic);
    let failed = writer.write(DEADLINE, || {
        let count = Count {
            topic: &topic,
            records: 0,
            most: 1,
        };
        Ok((whole(&topic)?, count))
    });
    let Err(ExclusiveError::Unavailable { source, .. }) = failed else {
        panic!("{failed:?}");
    };
    assert!(source.to_string().contains("does not exist"), "{source}");
    assert!(TopicReader::new(&settings, &[topic]).is_err());
}

/// Notes the offsets of what it reads, and writes one record.
struct Offsets<'t> {
    topic: &'t Arc<str>,
    seen: &'t RefCell<Vec<i64>>,
}

impl Decide for Offsets<'_> {
    type Decision = ();
    type Error = &'static str;

    fn read(&mut self, record: Record) {
        self.seen.borrow_mut().push(record.position.offset);
    }

    fn decide(self) -> Result<((), Vec<Output>), &'static str> {
        let output = Output {
            topic: self.topic.clone(),
            partition: Some(0),
            key: Some("key".into()),
            value: Some("value".into()),
            headers: Headers::new(),
        };
        Ok(((), vec![output]))
    }
}

#[test]
fn a_change_reads_only_what_is_new() {
    const RECORDS: i64 = 5_000;
    let topic: Arc<str> = unique("tail").into();
    let (settings, writer) = writer(&topic);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(create_topic(&settings, &topic, 1));
    let producer = settings.transactional_producer(&unique("records"));
    let producer: KafkaClient<ThreadedProducer<DefaultProducerContext>> = producer.create().unwrap();
    producer.init_transactions(DEADLINE).unwrap();
    producer.begin_transaction().unwrap();
    // The marker of the transaction is the last one.
    for number in 1..RECORDS {
        let value = number.to_string();
        let record = BaseRecord::<(), str>::to(&topic).payload(&value);
        producer.send(record).map_err(|(error, _)| error).unwrap();
    }
    producer.commit_transaction(DEADLINE).unwrap();
    let mut reader = whole(&topic).unwrap();
    reader.read_to_end(DEADLINE, |_| ()).unwrap();
    let id = reader.topics().id(&topic).unwrap().unwrap();
    assert_eq!(reader.position(&topic, 0), Some(RECORDS));
    // A change that knows what was read up to here returns which offsets it has read.
    let change = |from: ReadTo| {
        let (seen, continued) = (RefCell::default(), Cell::new(false));
        let begin = || {
            let (reader, continues) = TopicReader::continuing(&settings, &topic, 0, Some(from))?;
            continued.set(continues);
            let offsets = Offsets {
                topic: &topic,
                seen: &seen,
            };
            Ok((reader, offsets))
        };
        writer.write(DEADLINE, begin).unwrap();
        (continued.get(), seen.into_inner())
    };
    let end = ReadTo {
        topic: id,
        offset: RECORDS,
    };
    assert_eq!(change(end), (true, vec![]));
    // Each change is followed by the marker of its transaction.
    assert_eq!(change(end), (true, vec![RECORDS]));
    let before = ReadTo {
        offset: RECORDS - 3,
        ..end
    };
    let expected = vec![RECORDS - 3, RECORDS - 2, RECORDS, RECORDS + 2];
    assert_eq!(change(before), (true, expected));
    // It may be another topic of the same name, or an older one.
    let all = |(continues, seen): (bool, Vec<i64>)| (continues, seen.first().copied());
    for other in [
        ReadTo {
            topic: TopicId::from_bits(7),
            ..end
        },
        ReadTo {
            offset: RECORDS * 2,
            ..end
        },
    ] {
        assert_eq!(all(change(other)), (false, Some(0)), "{other:?}");
    }
    delete_records(&settings.brokers, &topic, 0, RECORDS);
    assert_eq!(all(change(before)), (false, Some(RECORDS)));
}
