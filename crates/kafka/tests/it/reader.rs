//! What readers of topics read.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer as _, ThreadedProducer};
use redeliver_core::Timestamp;
use redeliver_kafka::KafkaClient;
use redeliver_kafka::reader::TopicReader;
use redeliver_testkit::unique;

use crate::copy::CopyEnv;
use crate::support::DEADLINE;

#[tokio::test(flavor = "multi_thread")]
async fn stable_reader_waits_for_no_transaction() {
    let env = CopyEnv::with_one_partition("stable").await;
    env.fill(0..3).await;
    let writer = env.settings.transactional_producer(&unique("writer"));
    let writer: KafkaClient<ThreadedProducer<DefaultProducerContext>> = writer.create().unwrap();
    writer.init_transactions(DEADLINE).unwrap();
    writer.begin_transaction().unwrap();
    let record = BaseRecord::<(), str>::to(&env.from).payload("3");
    writer.send(record).map_err(|(error, _)| error).unwrap();
    writer.flush(DEADLINE).unwrap();

    let topic: Arc<str> = env.from.as_str().into();
    let read = |limit| {
        let mut reader = TopicReader::new(&env.settings, std::slice::from_ref(&topic)).unwrap();
        let mut offsets = Vec::new();
        let are_hidden = reader.read_stable(limit, DEADLINE, |record| {
            offsets.push(record.position.offset);
            ControlFlow::Continue(())
        });
        (offsets, are_hidden.unwrap())
    };
    assert_eq!(read(None), (vec![0, 1, 2], true));
    assert_eq!(read(Some(3)), (vec![0, 1, 2], false));
    // One more may be visited.
    let (first, are_hidden) = read(Some(1));
    assert!([&[0][..], &[0, 1]].contains(&&*first) && !are_hidden, "{first:?}");
    assert_eq!(read(Some(0)), (vec![], false));
    writer.commit_transaction(DEADLINE).unwrap();
    assert_eq!(read(None), (vec![0, 1, 2, 3], false));

    let reader = TopicReader::new(&env.settings, std::slice::from_ref(&topic)).unwrap();
    let at = |millis| {
        reader
            .offset_of_time(&topic, 0, Timestamp::from_millis(millis))
            .unwrap()
    };
    assert_eq!((at(-1), at(0), at(i64::MAX / 2)), (Some(0), Some(0), None));
}

#[tokio::test(flavor = "multi_thread")]
async fn partition_is_read_in_parts() {
    let env = CopyEnv::with_one_partition("parts").await;
    env.fill(0..100).await;
    let topic: Arc<str> = env.from.as_str().into();
    let mut reader = TopicReader::new(&env.settings, std::slice::from_ref(&topic)).unwrap();
    // Less than the time after which a reader without records begins again with another client.
    let timeout = Duration::from_secs(7);
    for end in 1..=20 {
        let mut last = None;
        let ends = [((topic.clone(), 0), end)].into();
        reader.seek(&topic, 0, end - 1);
        let read = reader.read_up_to(
            &ends,
            timeout,
            || true,
            |record| {
                last = last.max(Some(record.position.offset));
            },
        );
        read.unwrap();
        assert!(last >= Some(end - 1), "{last:?} {end}");
    }
}
