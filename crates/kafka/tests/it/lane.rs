//! The lane on real Kafka, with a processor that copies records.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rdkafka::producer::{BaseProducer, BaseRecord, Producer as _};
use redeliver_core::{Headers, Output, Record, Timestamp};
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::{TopicReader, group_positions};
use redeliver_kafka::remedy::RecoveryAction;
use redeliver_kafka::{
    AssignmentId, IfRecreated, KafkaSettings, Lane, LaneContext, LaneError, LaneObserver, LaneSpec,
    Processor, TopicWatch, TransactionBatch,
};
use redeliver_testkit::{eventually, unique};
use tokio_util::sync::CancellationToken;

use crate::support::{create_topic, settings};

pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// Copies records to a topic, those with an odd value later than those with an even one, so that records
/// finish out of order.
struct Copy {
    to: Arc<str>,
    live: HashSet<AssignmentId>,
    even: Vec<(AssignmentId, Record)>,
    odd: Vec<(AssignmentId, Record)>,
    hold_odd: bool,
    accepted: Arc<AtomicU64>,
}

impl Copy {
    fn new(to: &str, hold_odd: bool, accepted: Arc<AtomicU64>) -> Self {
        Self {
            to: to.into(),
            live: HashSet::new(),
            even: vec![],
            odd: vec![],
            hold_odd,
            accepted,
        }
    }
}

impl Processor for Copy {
    fn assigned(&mut self, assignment: AssignmentId, _topic: &Arc<str>, _partition: i32) {
        self.live.insert(assignment);
    }

    fn revoked(&mut self, assignment: AssignmentId) {
        self.live.remove(&assignment);
        self.even.retain(|(id, _)| *id != assignment);
        self.odd.retain(|(id, _)| *id != assignment);
    }

    fn capacity(&self, _assignment: AssignmentId) -> usize {
        1000_usize.saturating_sub(self.even.len() + self.odd.len())
    }

    fn accept(&mut self, assignment: AssignmentId, record: Record, _now: Timestamp) {
        self.accepted.fetch_add(1, Ordering::SeqCst);
        let is_even = record
            .value
            .as_ref()
            .and_then(|value| value.last())
            .is_some_and(|last| last % 2 == 0);
        if is_even { &mut self.even } else { &mut self.odd }.push((assignment, record));
    }

    fn finish(&mut self, _now: Timestamp, _limit: usize, turn: &mut TransactionBatch) {
        let mut done = std::mem::take(&mut self.even);
        if !self.hold_odd && done.is_empty() {
            done = std::mem::take(&mut self.odd);
        }
        for (assignment, record) in done {
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

    fn committed(&mut self, _now: Timestamp) {}

    fn next_due(&self) -> Option<Timestamp> {
        None
    }

    fn is_busy(&self) -> bool {
        let is_empty = self.even.is_empty() && self.odd.is_empty();
        !(self.hold_odd || is_empty)
    }
}

/// What a lane says of itself.
#[derive(Default)]
pub(crate) struct Lags {
    /// The lag of each partition that is owned.
    lags: Mutex<BTreeMap<(String, i32), u64>>,
    /// Why it waits; nothing when it is ready.
    waiting: Mutex<Option<String>>,
    pub(crate) dropped: AtomicU64,
    pub(crate) recreated: AtomicU64,
    pub(crate) deleted_unread: AtomicU64,
    pub(crate) setbacks: AtomicU64,
}

impl Lags {
    pub(crate) fn sum(&self) -> Option<u64> {
        let lags = self.lags.lock().unwrap();
        (!lags.is_empty()).then(|| lags.values().sum())
    }

    /// The topics of which partitions are owned and read.
    pub(crate) fn topics(&self) -> BTreeSet<String> {
        let lags = self.lags.lock().unwrap();
        lags.keys().map(|(topic, _)| topic.clone()).collect()
    }

    /// How many partitions are owned and read.
    pub(crate) fn partitions(&self) -> usize {
        self.lags.lock().unwrap().len()
    }

    pub(crate) fn waiting(&self) -> Option<String> {
        self.waiting.lock().unwrap().clone()
    }
}

impl LaneObserver for Lags {
    fn ready(&self) {
        *self.waiting.lock().unwrap() = None;
    }

    fn waiting(&self, reason: &str) {
        *self.waiting.lock().unwrap() = Some(reason.to_owned());
    }

    fn lag(&self, topic: &str, partition: i32, records: Option<u64>) {
        let mut lags = self.lags.lock().unwrap();
        let partition = (topic.to_owned(), partition);
        match records {
            Some(records) => lags.insert(partition, records),
            None => lags.remove(&partition),
        };
    }

    fn setback(&self, _remedy: RecoveryAction) {
        self.setbacks.fetch_add(1, Ordering::SeqCst);
    }

    fn recreated(&self, _topic: &str, _partition: i32, in_hand: usize) {
        self.recreated.fetch_add(1, Ordering::SeqCst);
        self.dropped.fetch_add(in_hand as u64, Ordering::SeqCst);
    }

    fn deleted_unread(&self, _topic: &str, _partition: i32, records: u64) {
        self.deleted_unread.fetch_add(records, Ordering::SeqCst);
    }
}

pub(crate) struct Running {
    pub(crate) lags: Arc<Lags>,
    stop: CancellationToken,
    thread: JoinHandle<Result<(), LaneError>>,
    pub(crate) accepted: Arc<AtomicU64>,
}

impl Running {
    pub(crate) fn stop(self) {
        self.stop.cancel();
        self.thread.join().unwrap().unwrap();
    }
}

pub(crate) fn start(settings: KafkaSettings, group: &str, from: &str, to: &str, hold_odd: bool) -> Running {
    start_with(
        settings,
        group,
        &[from],
        to,
        hold_odd,
        IfRecreated::ReadFromBeginning,
    )
}

pub(crate) fn start_with(
    settings: KafkaSettings,
    group: &str,
    from: &[&str],
    to: &str,
    hold_odd: bool,
    if_recreated: IfRecreated,
) -> Running {
    let spec = LaneSpec {
        name: format!("copy-{group}"),
        group: group.to_owned(),
        topics: from.iter().map(|from| Arc::from(*from)).collect(),
        batch: 500,
        grace: Duration::from_secs(10),
        changelog: None,
        if_recreated,
    };
    let stop = CancellationToken::new();
    let accepted = Arc::new(AtomicU64::new(0));
    let copy = Copy::new(to, hold_odd, accepted.clone());
    let lags = Arc::new(Lags::default());
    *lags.waiting.lock().unwrap() = Some("starting".to_owned());
    let watch = TopicWatch::start(&settings).unwrap();
    let context = LaneContext::new(settings, lags.clone(), watch, stop.clone());
    let lane = Lane::new(context, spec, copy);
    let thread = std::thread::spawn(move || lane.run());
    Running {
        lags,
        stop,
        thread,
        accepted,
    }
}

pub(crate) fn counts(settings: &KafkaSettings, topic: &str) -> BTreeMap<String, u32> {
    let mut counts = BTreeMap::new();
    let mut reader = TopicReader::new(settings, &[topic.into()]).unwrap();
    reader
        .read_to_end(DEADLINE, |record| {
            let value = String::from_utf8(record.value.unwrap().to_vec()).unwrap();
            *counts.entry(value).or_default() += 1;
        })
        .unwrap();
    counts
}

pub(crate) async fn fill(settings: &KafkaSettings, topic: &str, values: std::ops::Range<u32>) {
    let producer = Producer::new(settings).unwrap();
    let sends = values.map(|n| {
        let producer = producer.clone();
        let output = Output {
            topic: topic.into(),
            partition: None,
            key: Some(format!("key-{n}").into()),
            value: Some(n.to_string().into()),
            headers: Headers::new(),
        };
        async move { producer.send(&output).await.unwrap() }
    });
    futures::future::join_all(sends).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_record_is_copied_once_and_offsets_follow() {
    let settings = settings("copies");
    let (from, to, group) = (unique("from"), unique("to"), unique("group"));
    create_topic(&settings, &from, 3).await;
    create_topic(&settings, &to, 3).await;
    fill(&settings, &from, 0..2000).await;
    let lane = start(settings.clone(), &group, &from, &to, false);
    eventually("all are copied", DEADLINE, || {
        let copied = counts(&settings, &to).len();
        if copied == 2000 {
            Ok(())
        } else {
            Err(format!("{copied} of 2000"))
        }
    });
    lane.stop();
    assert!(counts(&settings, &to).values().all(|count| *count == 1));
    let positions = group_positions(&settings, &group, &[from.as_str().into()]).unwrap();
    let committed: i64 = positions
        .values()
        .map(|position| position.as_ref().unwrap().offset)
        .sum();
    assert_eq!(committed, 2000);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_done_behind_an_unfinished_record_is_not_done_again_after_a_restart() {
    let settings = settings("holes");
    let (from, to, group) = (unique("from"), unique("to"), unique("group"));
    create_topic(&settings, &from, 1).await;
    create_topic(&settings, &to, 1).await;
    fill(&settings, &from, 0..200).await;
    let lane = start(settings.clone(), &group, &from, &to, true);
    eventually("the even ones are copied", DEADLINE, || {
        let copied = counts(&settings, &to).len();
        if copied == 100 {
            Ok(())
        } else {
            Err(format!("{copied} of 100"))
        }
    });
    let lags = lane.lags.clone();
    let lag_is = |lags: &Lags, expected: Option<u64>| {
        eventually("the lag is told", DEADLINE, || match lags.sum() {
            lag if lag == expected => Ok(()),
            lag => Err(format!("{lag:?}")),
        });
    };
    lag_is(&lags, Some(100));
    lane.stop();
    assert_eq!(lags.sum(), None, "of no partition that is not owned");
    let lane = start(settings.clone(), &group, &from, &to, false);
    eventually("all are copied", DEADLINE, || {
        let copied = counts(&settings, &to).len();
        if copied == 200 {
            Ok(())
        } else {
            Err(format!("{copied} of 200"))
        }
    });
    assert_eq!(
        lane.accepted.load(Ordering::SeqCst),
        100,
        "only what was not done is handled again"
    );
    lag_is(&lane.lags, Some(0));
    lane.stop();
    assert!(counts(&settings, &to).values().all(|count| *count == 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn lanes_come_and_go_and_every_record_is_copied_once() {
    let settings = |instance: &str| settings(instance);
    let (from, to, group) = (unique("from"), unique("to"), unique("group"));
    let admin = settings("admin");
    create_topic(&admin, &from, 4).await;
    create_topic(&admin, &to, 4).await;
    let first = start(settings(&unique("a")), &group, &from, &to, false);
    fill(&admin, &from, 0..3000).await;
    let second = start(settings(&unique("b")), &group, &from, &to, false);
    fill(&admin, &from, 3000..6000).await;
    first.stop();
    fill(&admin, &from, 6000..7000).await;
    let third = start(settings(&unique("c")), &group, &from, &to, false);
    fill(&admin, &from, 7000..8000).await;
    eventually("all are copied", Duration::from_secs(60), || {
        let copied = counts(&admin, &to).len();
        if copied == 8000 {
            Ok(())
        } else {
            Err(format!("{copied} of 8000"))
        }
    });
    second.stop();
    third.stop();
    assert!(counts(&admin, &to).values().all(|count| *count == 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_process_left_open_is_resolved_first() {
    let settings = KafkaSettings {
        // Nobody but its successor ends such a transaction within the time of this test.
        transaction_timeout: Duration::from_secs(600),
        ..settings(&unique("killed"))
    };
    let (from, to, group) = (unique("from"), unique("to"), unique("group"));
    create_topic(&settings, &from, 1).await;
    create_topic(&settings, &to, 1).await;
    fill(&settings, &from, 0..100).await;
    // A lane writes with two producers in turn.
    let left_open = ["", "-b"].map(|which| {
        let id = format!("redeliver-{}-copy-{group}{which}", settings.instance);
        let producer: BaseProducer = settings.transactional_producer(&id).create().unwrap();
        producer.init_transactions(DEADLINE).unwrap();
        producer.begin_transaction().unwrap();
        let record = BaseRecord::<(), str>::to(&to).payload("left");
        producer.send(record).map_err(|(error, _)| error).unwrap();
        producer.flush(DEADLINE).unwrap();
        producer
    });
    let lane = start(settings.clone(), &group, &from, &to, false);
    eventually("all are copied", DEADLINE, || {
        let copied = counts(&settings, &to);
        if copied.len() == 100 && !copied.contains_key("left") {
            Ok(())
        } else {
            Err(format!("{} of 100", copied.len()))
        }
    });
    lane.stop();
    assert!(counts(&settings, &to).values().all(|count| *count == 1));
    drop(left_open);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lag_at_the_end_of_a_partition_is_zero_also_behind_the_markers_of_transactions() {
    let settings = settings("markers");
    let (from, to, group) = (unique("from"), unique("to"), unique("group"));
    create_topic(&settings, &from, 1).await;
    create_topic(&settings, &to, 1).await;
    let write = |values: std::ops::Range<u32>| {
        let producer: BaseProducer = settings
            .transactional_producer(&unique("writer"))
            .create()
            .unwrap();
        producer.init_transactions(DEADLINE).unwrap();
        for value in values {
            producer.begin_transaction().unwrap();
            let value = value.to_string();
            let record = BaseRecord::<(), str>::to(&from).payload(&value);
            producer.send(record).map_err(|(error, _)| error).unwrap();
            producer.commit_transaction(DEADLINE).unwrap();
        }
    };
    let lag_is = |lags: &Lags, expected: Option<u64>| {
        eventually("the lag is told", DEADLINE, || match lags.sum() {
            lag if lag == expected => Ok(()),
            lag => Err(format!("{lag:?}")),
        });
    };
    write(0..10);
    let lane = start(settings.clone(), &group, &from, &to, false);
    lag_is(&lane.lags, Some(0));
    write(10..12);
    eventually("all are copied", DEADLINE, || {
        match counts(&settings, &to).len() {
            12 => Ok(()),
            copied => Err(format!("{copied} of 12")),
        }
    });
    lag_is(&lane.lags, Some(0));
    lane.stop();
    // From a committed offset, behind which there is a marker.
    let lane = start(settings.clone(), &group, &from, &to, true);
    lag_is(&lane.lags, Some(0));
    write(13..14);
    lag_is(&lane.lags, Some(1));
    lane.stop();
}
