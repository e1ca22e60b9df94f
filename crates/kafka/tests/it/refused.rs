//! Records that their topic refuses do not stop a lane, and cause nothing to be read again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rdkafka::admin::{AdminClient, AdminOptions, AlterConfig, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use redeliver_core::{Headers, Output, Record, Timestamp};
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::TopicReader;
use redeliver_kafka::{AssignmentId, KafkaClient, KafkaSettings, Processor, Refused, TransactionBatch};
use redeliver_testkit::{DEADLINE, eventually, unique};

use crate::copy::Observed;
use crate::support::{RunningLane, create_topic, create_topic_with, lane_spec, settings};

/// Copies records to a topic, and replaces the values of refused ones with the reason.
struct Copy {
    to: Arc<str>,
    replaces: bool,
    accepted: Arc<AtomicU64>,
    waiting: Vec<(AssignmentId, Record)>,
}

impl Processor for Copy {
    fn assigned(&mut self, _assignment: AssignmentId, _topic: &Arc<str>, _partition: i32) {}

    fn revoked(&mut self, assignment: AssignmentId) {
        self.waiting.retain(|(id, _)| *id != assignment);
    }

    fn capacity(&self, _assignment: AssignmentId) -> usize {
        1_000_usize.saturating_sub(self.waiting.len())
    }

    fn accept(&mut self, assignment: AssignmentId, record: Record, _now: Timestamp) {
        self.accepted.fetch_add(1, Ordering::SeqCst);
        self.waiting.push((assignment, record));
    }

    fn finish(&mut self, _now: Timestamp, _limit: usize, batch: &mut TransactionBatch) {
        for (assignment, record) in self.waiting.drain(..) {
            batch.completed.push((assignment, record.position.offset));
            batch.outputs.push(Output {
                topic: self.to.clone(),
                partition: None,
                key: record.key,
                value: record.value,
                headers: record.headers,
            });
        }
    }

    fn refused(&mut self, refused: &[Refused], batch: &mut TransactionBatch, _now: Timestamp) -> bool {
        for refused in refused {
            batch.outputs[refused.index].value = Some(refused.failure.code.clone().into());
        }
        self.replaces
    }

    fn committed(&mut self, _now: Timestamp) {}

    fn next_due(&self) -> Option<Timestamp> {
        None
    }

    fn is_busy(&self) -> bool {
        false
    }
}

/// A lane that copies to a topic whose `max.message.bytes` is 2000.
struct Env {
    settings: KafkaSettings,
    from: String,
    to: String,
    observed: Arc<Observed>,
    accepted: Arc<AtomicU64>,
    _lane: RunningLane,
}

impl Env {
    async fn new(replaces: bool) -> Self {
        let settings = settings("refused");
        let (from, to, group) = (unique("from"), unique("to"), unique("group"));
        create_topic(&settings, &from, 2).await;
        create_topic_with(&settings, &to, 2, &[("max.message.bytes", "2000")]).await;
        let (observed, accepted) = (Arc::<Observed>::default(), Arc::<AtomicU64>::default());
        let copy = Copy {
            to: to.as_str().into(),
            replaces,
            accepted: accepted.clone(),
            waiting: Vec::new(),
        };
        let spec = lane_spec(&format!("copy-{group}"), &group, &[&from]);
        Self {
            _lane: RunningLane::spawn(&settings, spec, copy, observed.clone()),
            from,
            to,
            observed,
            accepted,
            settings,
        }
    }

    async fn fill(&self, producer: &Producer, sizes: impl Iterator<Item = usize>) {
        let sends = sizes.enumerate().map(|(number, size)| {
            let producer = producer.clone();
            let output = Output {
                topic: self.from.as_str().into(),
                partition: None,
                key: Some(format!("key-{number}").into()),
                value: Some(vec![b'v'; size].into()),
                headers: Headers::new(),
            };
            async move { producer.send(&output).await.unwrap() }
        });
        futures::future::join_all(sends).await;
    }

    /// Waits until this many records are written, and returns their values by key.
    fn until_written(&self, count: usize) -> BTreeMap<String, Vec<u8>> {
        let mut written = BTreeMap::new();
        eventually("all are written", DEADLINE, || {
            written.clear();
            let mut reader = TopicReader::new(&self.settings, &[self.to.as_str().into()]).unwrap();
            let mut twice = 0;
            reader
                .read_to_end(DEADLINE, |record| {
                    let key = String::from_utf8(record.key.unwrap().to_vec()).unwrap();
                    twice += usize::from(written.insert(key, record.value.unwrap().to_vec()).is_some());
                })
                .unwrap();
            assert_eq!(twice, 0, "records were written twice");
            if written.len() == count {
                Ok(())
            } else {
                Err(format!(
                    "{} of {count}; {:?}",
                    written.len(),
                    self.observed.waiting()
                ))
            }
        });
        written
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
async fn records_larger_than_the_limit_are_replaced_and_all_others_are_written() {
    let env = Env::new(true).await;
    // All together are far too large for one batch, and every seventh record is too large on its own.
    let sizes = || {
        (0..300).map(|number| {
            if number % 7 == 3 {
                2_100 + 10 * number
            } else {
                number
            }
        })
    };
    env.fill(&Producer::new(&env.settings).unwrap(), sizes()).await;
    assert_eq!(env.until_written(300), expected(sizes()));
    assert_eq!(
        env.accepted.load(Ordering::SeqCst),
        300,
        "records were read again"
    );
    assert_eq!(env.observed.waiting(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_fits_only_with_compression_is_replaced() {
    let env = Env::new(true).await;
    let mut gzip = env.settings.clone();
    gzip.properties.insert("compression.type".into(), "gzip".into());
    let sizes = || [10, 500_000, 20].into_iter();
    env.fill(&Producer::new(&gzip).unwrap(), sizes()).await;
    assert_eq!(env.until_written(3), expected(sizes()));
    assert_eq!(env.accepted.load(Ordering::SeqCst), 3, "records were read again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_with_failing_transactions_reports_the_reason_and_recovers() {
    let env = Env::new(false).await;
    env.fill(&Producer::new(&env.settings).unwrap(), [10, 5_000].into_iter())
        .await;
    eventually("the reason is reported", DEADLINE, || {
        match env.observed.waiting() {
            Some(reason) if reason.contains(&format!("delivering to topic `{}`", env.to)) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    eventually("the transaction is repeated", DEADLINE, || {
        match env.observed.failed_transactions.load(Ordering::SeqCst) {
            0..6 => Err("not yet".to_owned()),
            _ => Ok(()),
        }
    });
    assert!(env.observed.waiting().is_some());
    let admin: KafkaClient<AdminClient<DefaultClientContext>> = env.settings.client().create().unwrap();
    let wide = AlterConfig::new(ResourceSpecifier::Topic(&env.to)).set("max.message.bytes", "10000");
    for result in admin.alter_configs([&wide], &AdminOptions::new()).await.unwrap() {
        result.unwrap();
    }
    assert_eq!(env.until_written(2).len(), 2);
    eventually("the lane is ready again", DEADLINE, || {
        env.observed.waiting().map_or(Ok(()), Err)
    });
}
