//! Changes that cannot overlap, on a real broker.

use std::cell::Cell;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer as _, ThreadedProducer};
use redeliver_core::{Headers, Output};
use redeliver_kafka::exclusive::{ExclusiveError, ExclusiveWriter};
use redeliver_kafka::reader::{ReadError, ReadTo, TopicReader};
use redeliver_kafka::{KafkaClient, KafkaSettings, TopicId};
use redeliver_testkit::kafka_request::delete_records;
use redeliver_testkit::unique;

use crate::support::{create_topic, settings};

const DEADLINE: Duration = Duration::from_secs(90);
const WRITERS: usize = 3;
const CHANGES: usize = 4;

/// The offsets of a topic. Reads all of it.
fn offsets(topic: &Arc<str>, timeout: Duration) -> Result<Vec<i64>, ReadError> {
    let mut offsets = Vec::new();
    whole(topic)?.read_to_end(timeout, |record| offsets.push(record.position.offset))?;
    Ok(offsets)
}

fn output(topic: &Arc<str>, value: impl Into<Bytes>) -> Output {
    Output {
        topic: topic.clone(),
        partition: Some(0),
        key: Some("key".into()),
        value: Some(value.into()),
        headers: Headers::new(),
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

fn create(settings: &KafkaSettings, topic: &str) {
    let creating = create_topic(settings, topic, 1);
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().build().unwrap().block_on(creating);
}

#[test]
fn concurrent_changes_are_serialized() {
    let topic: Arc<str> = unique("exclusive").into();
    create(&settings("exclusive"), &topic);
    // Writes the number of records before it.
    let count = |writer: &ExclusiveWriter| {
        let read = |timeout| offsets(&topic, timeout);
        writer.write(DEADLINE, read, |offsets| match offsets.len() {
            count if count < WRITERS * CHANGES => (Some(count), vec![output(&topic, count.to_string())]),
            _ => (None, Vec::new()),
        })
    };
    thread::scope(|scope| {
        for _ in 0..WRITERS {
            scope.spawn(|| {
                let (_, writer) = writer(&topic);
                for _ in 0..CHANGES {
                    assert!(count(&writer).unwrap().is_some());
                }
            });
        }
    });
    let (_, writer) = writer(&topic);
    assert_eq!(count(&writer).unwrap(), None);
    let mut values = Vec::new();
    let mut reader = whole(&topic).unwrap();
    reader
        .read_to_end(DEADLINE, |record| {
            values.push(String::from_utf8(record.value.unwrap().to_vec()).unwrap());
        })
        .unwrap();
    // Each has seen all changes before its own.
    let expected: Vec<String> = (0..WRITERS * CHANGES).map(|n| n.to_string()).collect();
    assert_eq!(values, expected);
}

#[test]
fn record_refused_by_topic_fails_once() {
    let topic: Arc<str> = unique("large").into();
    let (settings, writer) = writer(&topic);
    create(&settings, &topic);
    let attempts = Cell::new(0);
    let read = |_| {
        attempts.set(attempts.get() + 1);
        Ok(())
    };
    let failed = writer.write(DEADLINE, read, |()| {
        // Larger than the topic permits, and not compressible.
        let value: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..))
            .take(2 << 20)
            .collect();
        ((), vec![output(&topic, value)])
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
fn missing_topic_is_not_created() {
    let topic: Arc<str> = unique("missing").into();
    let (settings, writer) = writer(&topic);
    let read = |timeout| offsets(&topic, timeout);
    let failed = writer.write(DEADLINE, read, |_| ((), vec![output(&topic, "value")]));
    let Err(ExclusiveError::Unavailable { source, .. }) = failed else {
        panic!("{failed:?}");
    };
    assert!(source.to_string().contains("does not exist"), "{source}");
    assert!(TopicReader::new(&settings, &[topic]).is_err());
}

#[test]
fn change_reads_only_what_is_new() {
    const RECORDS: i64 = 5_000;
    let topic: Arc<str> = unique("tail").into();
    let (settings, writer) = writer(&topic);
    create(&settings, &topic);
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
        let read = |timeout| {
            let (mut reader, continues) = TopicReader::continuing(&settings, &topic, 0, Some(from))?;
            let mut seen = Vec::new();
            reader.read_to_end(timeout, |record| seen.push(record.position.offset))?;
            Ok((continues, seen))
        };
        let decide = |seen| (seen, vec![output(&topic, "value")]);
        writer.write(DEADLINE, read, decide).unwrap()
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
