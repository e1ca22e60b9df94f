//! Reading to ends, on the embedded broker.

use std::sync::mpsc;
use std::thread;

use bytes::Bytes;
use redeliver_core::{Headers, Output};

use super::*;
use crate::embedded::EmbeddedBroker;
use crate::producer::Producer;

const DEADLINE: Duration = Duration::from_secs(30);

fn write(settings: &KafkaSettings, topic: &Arc<str>, count: usize) {
    let producer = Producer::new(settings).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let output = Output {
        topic: topic.clone(),
        partition: Some(0),
        key: None,
        value: Some(Bytes::from_static(b"v")),
        headers: Headers::new(),
    };
    let sending = (0..count).map(|_| producer.send(&output));
    let written = runtime.block_on(futures::future::try_join_all(sending));
    assert_eq!(written.unwrap().len(), count);
}

/// A broker whose high watermark lags behind, as that of a new leader, reports an end of partition below the end that was
/// looked up. Here the lookup is replaced: the partition ends at 5, and 10 is to be reached.
#[test]
fn lower_end_is_not_the_end() {
    let topic: Arc<str> = "lagging".into();
    let broker = EmbeddedBroker::start(&[(topic.to_string(), 1)]).unwrap();
    let settings = KafkaSettings::new(broker.brokers(), "test");
    write(&settings, &topic, 5);
    let mut reader = TopicReader::new(&settings, std::slice::from_ref(&topic)).unwrap();
    let (reported, is_reported) = mpsc::sync_channel(16);
    reader.consumer().context().report_ends_to(reported);
    let (mut offsets, mut ends) = (Vec::new(), Vec::new());
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            // The other records become visible after the first end of partition.
            let first = is_reported.recv_timeout(DEADLINE).unwrap();
            write(&settings, &topic, 5);
            (first, is_reported)
        });
        let end = BTreeMap::from([((topic.clone(), 0), 10)]);
        let read = reader.read_until(&end, Until::End, Instant::now() + DEADLINE, |record| {
            offsets.extend(record.map(|record| record.position.offset));
            ControlFlow::Continue(())
        });
        read.unwrap();
        let (first, others) = writer.join().unwrap();
        ends.push(first);
        ends.extend(others.try_iter());
    });
    assert_eq!(offsets, (0..10).collect::<Vec<i64>>());
    assert_eq!((ends.first(), ends.last()), (Some(&5), Some(&10)), "{ends:?}");
    assert_eq!(reader.position(&topic, 0), Some(10));
}

#[test]
fn missing_end_times_out() {
    let topic: Arc<str> = "short".into();
    let broker = EmbeddedBroker::start(&[(topic.to_string(), 1)]).unwrap();
    let settings = KafkaSettings::new(broker.brokers(), "test");
    write(&settings, &topic, 3);
    let mut reader = TopicReader::new(&settings, std::slice::from_ref(&topic)).unwrap();
    let mut read = |end, timeout| {
        let end = BTreeMap::from([((topic.clone(), 0), end)]);
        reader.read_until(&end, Until::End, Instant::now() + timeout, |_| {
            ControlFlow::Continue(())
        })
    };
    read(3, DEADLINE).unwrap();
    let late = read(4, Duration::from_secs(1));
    assert!(matches!(late, Err(ReadError::Late { end: 4, .. })), "{late:?}");
    // It continues where it stopped.
    assert_eq!(reader.position(&topic, 0), Some(3));
}

#[test]
fn parts_follow_while_there_is_progress() {
    let topic: Arc<str> = "large".into();
    let broker = EmbeddedBroker::start(&[(topic.to_string(), 1)]).unwrap();
    let settings = KafkaSettings::new(broker.brokers(), "test");
    // More than the reader visits between two looks at the clock.
    let count = 5_500;
    write(&settings, &topic, count);
    let timeout = Duration::from_secs(5);
    let read = |is_stopped| {
        let mut reader = TopicReader::of_partition(&settings, &topic, 0, None).unwrap();
        let mut visited = 0;
        let read = reader.read_to_end_in_parts(
            timeout,
            || is_stopped,
            |_| {
                visited += 1;
                let began = Instant::now();
                while visited == 1 && began.elapsed() <= timeout {
                    thread::park_timeout(timeout);
                }
            },
        );
        (read, visited)
    };
    let (read_to_end, visited) = read(false);
    assert!(read_to_end.is_ok(), "{read_to_end:?}");
    assert_eq!(visited, count);
    let (stopped, visited) = read(true);
    assert!(matches!(stopped, Err(ReadError::Late { .. })), "{stopped:?}");
    assert!(visited < count);
}

#[test]
fn seek_reads_one_partition() {
    let topic: Arc<str> = "moved".into();
    let broker = EmbeddedBroker::start(&[(topic.to_string(), 2)]).unwrap();
    let settings = KafkaSettings::new(broker.brokers(), "test");
    write(&settings, &topic, 5);
    let mut reader = TopicReader::new(&settings, std::slice::from_ref(&topic)).unwrap();
    let mut read = |from: Option<(i32, i64)>| {
        if let Some((partition, offset)) = from {
            reader.seek(&topic, partition, offset);
        }
        let mut offsets = Vec::new();
        let visit = |record: Record| offsets.push(record.position.offset);
        reader.read_to_end(DEADLINE, visit).unwrap();
        offsets
    };
    assert_eq!(read(None), [0, 1, 2, 3, 4]);
    assert_eq!(read(Some((0, 3))), [3, 4]);
    assert_eq!(read(Some((1, 0))), [0_i64; 0]);
    assert_eq!(read(Some((0, 4))), [4]);
}

#[test]
fn readers_fetch_from_leaders_only() {
    let mut settings = KafkaSettings::new("localhost:9092", "test");
    settings.properties.insert("client.rack".into(), "a".into());
    assert_eq!(
        leader_config(&settings, "read_committed").get("client.rack"),
        None
    );
    assert_eq!(settings.client().get("client.rack"), Some("a"));
}
