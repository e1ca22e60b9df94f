//! Records that their topic refuses do not stop a lane, and cause nothing to be read again.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use rdkafka::admin::{AdminClient, AdminOptions, AlterConfig, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::TopicReader;
use redeliver_kafka::{KafkaClient, KafkaSettings};
use redeliver_testkit::{DEADLINE, ensure, eventually, unique, until_seen};

use crate::copy::{CopyLane, CopyOptions};
use crate::support::{create_topic, create_topic_with, output, settings};

/// A lane that copies to a topic whose `max.message.bytes` is 2000.
struct Env {
    settings: KafkaSettings,
    from: String,
    to: String,
    lane: CopyLane,
}

impl Env {
    async fn new(replaces_refused: bool) -> Self {
        let settings = settings("refused");
        let (from, to) = (unique("from"), unique("to"));
        create_topic(&settings, &from, 2).await;
        create_topic_with(&settings, &to, 2, &[("max.message.bytes", "2000")]).await;
        let options = CopyOptions {
            replaces_refused,
            ..CopyOptions::default()
        };
        Self {
            lane: CopyLane::start(&settings, &unique("group"), &[&from], &to, options),
            settings,
            from,
            to,
        }
    }

    async fn fill(&self, producer: &Producer, sizes: impl Iterator<Item = usize>) {
        let sends = sizes.enumerate().map(|(number, size)| {
            let producer = producer.clone();
            let output = output(
                self.from.as_str().into(),
                None,
                Some(format!("key-{number}").into()),
                Some(vec![b'v'; size].into()),
            );
            async move { producer.send(&output).await.unwrap() }
        });
        futures::future::join_all(sends).await;
    }

    /// Waits until this many records are written, and returns their values by key.
    fn until_written(&self, count: usize) -> BTreeMap<String, Vec<u8>> {
        eventually("all are written", DEADLINE, || {
            let mut written = BTreeMap::new();
            let mut reader = TopicReader::new(&self.settings, &[self.to.as_str().into()]).unwrap();
            let mut twice = 0;
            reader
                .read_to_end(DEADLINE, |record| {
                    let key = String::from_utf8(record.key.unwrap().to_vec()).unwrap();
                    twice += usize::from(written.insert(key, record.value.unwrap().to_vec()).is_some());
                })
                .unwrap();
            assert_eq!(twice, 0, "records were written twice");
            let waiting = self.lane.observed.waiting();
            let count_written = written.len();
            let holds = count_written == count;
            ensure(holds, format!("{count_written} of {count}; {waiting:?}")).map(|()| written)
        })
    }
}

/// The expected values by key. Larger records do not fit into 2000 bytes.
fn expected(sizes: impl Iterator<Item = usize>) -> BTreeMap<String, Vec<u8>> {
    let value = |size| match size {
        0..1_900 => vec![b'v'; size],
        _ => b"output.too-large".to_vec(),
    };
    sizes
        .enumerate()
        .map(|(number, size)| (format!("key-{number}"), value(size)))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn too_large_records_are_replaced() {
    let env = Env::new(true).await;
    // All together are far too large for one batch, and every seventh record is too large on its own.
    let plain = (0..300).map(|number| match number % 7 {
        3 => 2_100 + 10 * number,
        _ => number,
    });
    // Fits only with compression.
    let sizes = || plain.clone().chain([500_000]);
    let mut gzip = env.settings.clone();
    gzip.properties.insert("compression.type".into(), "gzip".into());
    env.fill(&Producer::new(&gzip).unwrap(), sizes()).await;
    assert_eq!(env.until_written(301), expected(sizes()));
    let accepted = env.lane.accepted.load(Ordering::SeqCst);
    assert_eq!(accepted, 301, "records were read again");
    assert_eq!(env.lane.observed.waiting(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_lane_reports_the_reason() {
    let env = Env::new(false).await;
    env.fill(&Producer::new(&env.settings).unwrap(), [10, 5_000].into_iter())
        .await;
    eventually("the reason is reported", DEADLINE, || {
        match env.lane.observed.waiting() {
            Some(reason) if reason.contains(&format!("delivering to topic `{}`", env.to)) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    let failed = || env.lane.observed.failed_transactions.load(Ordering::SeqCst);
    until_seen("the transaction is repeated", failed, |&count| count >= 6);
    assert!(env.lane.observed.waiting().is_some());
    let admin: KafkaClient<AdminClient<DefaultClientContext>> = env.settings.client().create().unwrap();
    let wide = AlterConfig::new(ResourceSpecifier::Topic(&env.to)).set("max.message.bytes", "10000");
    for result in admin.alter_configs([&wide], &AdminOptions::new()).await.unwrap() {
        result.unwrap();
    }
    assert_eq!(env.until_written(2).len(), 2);
    eventually("the lane is ready again", DEADLINE, || {
        env.lane.observed.waiting().map_or(Ok(()), Err)
    });
}
