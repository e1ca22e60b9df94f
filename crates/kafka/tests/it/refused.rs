//! What topics do not take: it stops no lane, and nothing has to be read again because of it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions, AlterConfig, NewTopic, ResourceSpecifier, TopicReplication};
use rdkafka::client::DefaultClientContext;
use redeliver_core::{Headers, Output, Record, Timestamp};
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::TopicReader;
use redeliver_kafka::{
    AssignmentId, IfRecreated, KafkaSettings, Lane, LaneContext, LaneError, LaneObserver, LaneSpec,
    Processor, Refused, TopicWatch, TransactionBatch,
};
use redeliver_testkit::{eventually, unique};
use tokio_util::sync::CancellationToken;

use crate::support::{create_topic, settings};

const DEADLINE: Duration = Duration::from_secs(60);

/// Copies records to a topic; where that does not take them, what stands in their place says so.
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

    fn finish(&mut self, _now: Timestamp, _limit: usize, turn: &mut TransactionBatch) {
        for (assignment, record) in self.waiting.drain(..) {
            turn.completed.push((assignment, record.position.offset));
            turn.outputs.push(Output {
                topic: self.to.clone(),
                partition: None,
                key: record.key,
                value: record.value,
                headers: record.headers,
            });
        }
    }

    fn refused(&mut self, refused: &[Refused], turn: &mut TransactionBatch, _now: Timestamp) -> bool {
        for refused in refused {
            turn.outputs[refused.index].value = Some(refused.failure.code.clone().into());
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

/// What a lane says of itself.
#[derive(Default)]
struct Heard {
    /// Why it waits; nothing once it is ready.
    waits_for: Mutex<Option<String>>,
    setbacks: AtomicU64,
}

impl LaneObserver for Heard {
    fn ready(&self) {
        *self.waits_for.lock().unwrap() = None;
    }

    fn waiting(&self, reason: &str) {
        *self.waits_for.lock().unwrap() = Some(reason.to_owned());
    }

    fn setback(&self, _remedy: redeliver_kafka::remedy::RecoveryAction) {
        self.setbacks.fetch_add(1, Ordering::SeqCst);
    }
}

/// A lane that copies from one topic to another one, which takes batches of up to 2000 bytes.
struct Copying {
    settings: KafkaSettings,
    from: String,
    to: String,
    heard: Arc<Heard>,
    accepted: Arc<AtomicU64>,
    stop: CancellationToken,
    thread: Option<JoinHandle<Result<(), LaneError>>>,
}

impl Copying {
    async fn new(replaces: bool) -> Self {
        let settings = settings("refused");
        let (from, to, group) = (unique("from"), unique("to"), unique("group"));
        create_topic(&settings, &from, 2).await;
        let admin: AdminClient<DefaultClientContext> = settings.client().create().unwrap();
        let narrow = NewTopic::new(&to, 2, TopicReplication::Fixed(1)).set("max.message.bytes", "2000");
        for result in admin
            .create_topics([&narrow], &AdminOptions::new())
            .await
            .unwrap()
        {
            result.unwrap();
        }
        let mut copying = Self {
            from,
            to,
            heard: Arc::default(),
            accepted: Arc::default(),
            stop: CancellationToken::new(),
            thread: None,
            settings,
        };
        let spec = LaneSpec {
            name: format!("copy-{group}"),
            group,
            topics: vec![copying.from.as_str().into()],
            batch: 500,
            grace: Duration::from_secs(10),
            changelog: None,
            if_recreated: IfRecreated::ReadFromBeginning,
        };
        let copy = Copy {
            to: copying.to.as_str().into(),
            replaces,
            accepted: copying.accepted.clone(),
            waiting: Vec::new(),
        };
        let watch = TopicWatch::start(&copying.settings).unwrap();
        let context = LaneContext::new(
            copying.settings.clone(),
            copying.heard.clone(),
            watch,
            copying.stop.clone(),
        );
        let lane = Lane::new(context, spec, copy);
        copying.thread = Some(std::thread::spawn(move || lane.run()));
        copying
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

    /// Key and value of what was written, once there is so much of it.
    fn written(&self, count: usize) -> BTreeMap<String, Vec<u8>> {
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
            assert_eq!(twice, 0, "written twice");
            if written.len() == count {
                Ok(())
            } else {
                Err(format!(
                    "{} are, and {:?}",
                    written.len(),
                    self.heard.waits_for.lock().unwrap()
                ))
            }
        });
        written
    }

    fn waits_for(&self) -> Option<String> {
        self.heard.waits_for.lock().unwrap().clone()
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        self.stop.cancel();
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            ended.unwrap().unwrap().unwrap();
        }
    }
}

/// Whether a record of the tests fits into 2000 bytes.
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
async fn records_that_are_too_large_alone_are_replaced_and_all_others_are_written() {
    let copying = Copying::new(true).await;
    // Together they are far too large for a batch, and every seventh is by itself.
    let sizes = || {
        (0..300).map(|number| {
            if number % 7 == 3 {
                2_100 + 10 * number
            } else {
                number
            }
        })
    };
    copying
        .fill(&Producer::new(&copying.settings).unwrap(), sizes())
        .await;
    assert_eq!(copying.written(300), expected(sizes()));
    assert_eq!(
        copying.accepted.load(Ordering::SeqCst),
        300,
        "some were read again"
    );
    assert_eq!(copying.waits_for(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_only_fitted_compressed_is_replaced() {
    let copying = Copying::new(true).await;
    let mut gzip = copying.settings.clone();
    gzip.properties.insert("compression.type".into(), "gzip".into());
    let sizes = || [10, 500_000, 20].into_iter();
    copying.fill(&Producer::new(&gzip).unwrap(), sizes()).await;
    assert_eq!(copying.written(3), expected(sizes()));
    assert_eq!(copying.accepted.load(Ordering::SeqCst), 3, "some were read again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_whose_transactions_keep_failing_says_why_and_goes_on_when_the_cause_is_gone() {
    let copying = Copying::new(false).await;
    copying
        .fill(
            &Producer::new(&copying.settings).unwrap(),
            [10, 5_000].into_iter(),
        )
        .await;
    eventually("the reason is told", DEADLINE, || match copying.waits_for() {
        Some(reason) if reason.contains(&format!("delivering to topic `{}`", copying.to)) => Ok(()),
        other => Err(format!("{other:?}")),
    });
    eventually("it is tried again", DEADLINE, || {
        match copying.heard.setbacks.load(Ordering::SeqCst) {
            0..6 => Err("not yet".to_owned()),
            _ => Ok(()),
        }
    });
    assert!(copying.waits_for().is_some());
    let admin: AdminClient<DefaultClientContext> = copying.settings.client().create().unwrap();
    let wide = AlterConfig::new(ResourceSpecifier::Topic(&copying.to)).set("max.message.bytes", "10000");
    for result in admin.alter_configs([&wide], &AdminOptions::new()).await.unwrap() {
        result.unwrap();
    }
    assert_eq!(copying.written(2).len(), 2);
    eventually("it is ready again", DEADLINE, || {
        copying.waits_for().map_or(Ok(()), Err)
    });
}
