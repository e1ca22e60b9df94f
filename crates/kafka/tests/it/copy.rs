//! A lane that copies records, for tests.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use redeliver_core::{Output, Record, Timestamp};
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::TopicReader;
use redeliver_kafka::recovery::RecoveryAction;
use redeliver_kafka::{
    AssignmentId, IfRecreated, KafkaSettings, LaneObserver, LaneSpec, Processor, Refused, TransactionBatch,
};
use redeliver_testkit::kafka_request::delete_topic;
use redeliver_testkit::{ensure, eventually, unique, until_seen};

use crate::support::{DEADLINE, RunningLane, create_topic, lane_spec, output, settings};

/// Copies records to a topic, those with an odd value later than those with an even one, so that records complete out of
/// order.
struct Copy {
    to: Arc<str>,
    live: HashSet<AssignmentId>,
    even: Vec<(AssignmentId, Record)>,
    odd: Vec<(AssignmentId, Record)>,
    options: CopyOptions,
    accepted: Arc<AtomicU64>,
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

    fn finish(&mut self, _now: Timestamp, _limit: usize, batch: &mut TransactionBatch) {
        let mut finished = std::mem::take(&mut self.even);
        if !self.options.hold_odd && finished.is_empty() {
            finished = std::mem::take(&mut self.odd);
        }
        for (assignment, record) in finished {
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
        self.options.replaces_refused
    }

    fn committed(&mut self, _now: Timestamp) {}

    fn next_due(&self) -> Option<Timestamp> {
        None
    }

    fn is_busy(&self) -> bool {
        let is_empty = self.even.is_empty() && self.odd.is_empty();
        !(self.options.hold_odd || is_empty)
    }
}

/// What a lane has reported.
#[derive(Default)]
pub(crate) struct Observed {
    /// The lag of each owned partition.
    lags: Mutex<BTreeMap<(String, i32), u64>>,
    /// Why the lane is not ready; `None` if it is.
    waiting: Mutex<Option<String>>,
    pub(crate) dropped: AtomicU64,
    pub(crate) recreated: AtomicU64,
    pub(crate) deleted_unread: AtomicU64,
    pub(crate) failed_transactions: AtomicU64,
}

impl Observed {
    /// The sum of the lags of all owned partitions.
    pub(crate) fn lag(&self) -> Option<u64> {
        let lags = self.lags.lock().unwrap();
        (!lags.is_empty()).then(|| lags.values().sum())
    }

    #[track_caller]
    pub(crate) fn until_lag(&self, expected: u64) {
        until_seen("the lag is reported", || self.lag(), |&lag| lag == Some(expected));
    }

    /// The topics of owned partitions.
    pub(crate) fn topics(&self) -> BTreeSet<String> {
        let lags = self.lags.lock().unwrap();
        lags.keys().map(|(topic, _)| topic.clone()).collect()
    }

    /// The number of owned partitions.
    pub(crate) fn partitions(&self) -> usize {
        self.lags.lock().unwrap().len()
    }

    pub(crate) fn waiting(&self) -> Option<String> {
        self.waiting.lock().unwrap().clone()
    }
}

impl LaneObserver for Observed {
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

    fn transaction_failed(&self, _action: RecoveryAction) {
        self.failed_transactions.fetch_add(1, Ordering::SeqCst);
    }

    fn recreated(&self, _topic: &str, _partition: i32, in_flight: usize) {
        self.recreated.fetch_add(1, Ordering::SeqCst);
        self.dropped.fetch_add(in_flight as u64, Ordering::SeqCst);
    }

    fn deleted_unread(&self, _topic: &str, _partition: i32, records: u64) {
        self.deleted_unread.fetch_add(records, Ordering::SeqCst);
    }
}

#[derive(Clone, Copy, Default)]
pub(crate) struct CopyOptions {
    /// Whether records with an odd value stay in flight.
    pub(crate) hold_odd: bool,
    pub(crate) if_recreated: IfRecreated,
    /// Whether the values of refused records are replaced with the reason.
    pub(crate) replaces_refused: bool,
}

/// A running lane that copies records.
pub(crate) struct CopyLane {
    lane: RunningLane,
    pub(crate) observed: Arc<Observed>,
    pub(crate) accepted: Arc<AtomicU64>,
}

impl CopyLane {
    pub(crate) fn start(
        settings: &KafkaSettings,
        group: &str,
        from: &[&str],
        to: &str,
        options: CopyOptions,
    ) -> Self {
        let accepted = Arc::new(AtomicU64::new(0));
        let copy = Copy {
            to: to.into(),
            live: HashSet::new(),
            even: vec![],
            odd: vec![],
            options,
            accepted: accepted.clone(),
        };
        let observed = Arc::new(Observed::default());
        *observed.waiting.lock().unwrap() = Some("starting".to_owned());
        let spec = LaneSpec {
            if_recreated: options.if_recreated,
            ..lane_spec(&format!("copy-{group}"), group, from)
        };
        Self {
            lane: RunningLane::spawn(settings, spec, copy, observed.clone()),
            observed,
            accepted,
        }
    }

    pub(crate) fn stop(self) {
        self.lane.stop();
    }
}

/// A source topic, an output topic, and a group that copies from one to the other.
pub(crate) struct CopyEnv {
    pub(crate) settings: KafkaSettings,
    pub(crate) from: String,
    pub(crate) to: String,
    pub(crate) group: String,
}

impl CopyEnv {
    /// Creates the topics with these numbers of partitions.
    pub(crate) async fn new(settings: KafkaSettings, from: i32, to: i32) -> Self {
        let env = Self {
            settings,
            from: unique("from"),
            to: unique("to"),
            group: unique("group"),
        };
        create_topic(&env.settings, &env.from, from).await;
        create_topic(&env.settings, &env.to, to).await;
        env
    }

    /// Creates the topics with one partition each, for the settings of this instance.
    pub(crate) async fn with_one_partition(instance: &str) -> Self {
        Self::new(settings(instance), 1, 1).await
    }

    pub(crate) fn start(&self) -> CopyLane {
        self.start_with(CopyOptions::default())
    }

    pub(crate) fn start_with(&self, options: CopyOptions) -> CopyLane {
        CopyLane::start(&self.settings, &self.group, &[&self.from], &self.to, options)
    }

    /// Starts a lane that keeps records with an odd value in flight.
    pub(crate) fn start_holding_odd(&self) -> CopyLane {
        self.start_with(CopyOptions {
            hold_odd: true,
            ..CopyOptions::default()
        })
    }

    /// Writes these values to the source topic.
    pub(crate) async fn fill(&self, values: Range<u32>) {
        fill(&self.settings, &self.from, values).await;
    }

    #[track_caller]
    pub(crate) fn until_copied(&self, count: usize) {
        until_copied(&self.settings, &self.to, count);
    }

    pub(crate) fn counts(&self) -> BTreeMap<String, u32> {
        counts(&self.settings, &self.to)
    }

    #[track_caller]
    pub(crate) fn assert_no_duplicates(&self) {
        assert_no_duplicates(&self.counts());
    }

    /// Deletes the source topic and creates it again.
    pub(crate) async fn recreate_source(&self, partitions: i32) {
        delete_topic(&self.settings.brokers, &self.from);
        create_topic(&self.settings, &self.from, partitions).await;
    }
}

/// How often each value was written to a topic.
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

#[track_caller]
pub(crate) fn assert_no_duplicates(counts: &BTreeMap<String, u32>) {
    let duplicates: Vec<_> = counts.iter().filter(|(_, count)| **count != 1).collect();
    assert!(duplicates.is_empty(), "{duplicates:?}");
}

/// Waits until a topic contains this many values, and no duplicates.
#[track_caller]
pub(crate) fn until_copied(settings: &KafkaSettings, to: &str, count: usize) {
    eventually("all records are copied", 2 * DEADLINE, || {
        let counts = counts(settings, to);
        assert_no_duplicates(&counts);
        ensure(counts.len() == count, format!("{} of {count}", counts.len()))
    });
}

/// Writes these numbers as values to a topic.
pub(crate) async fn fill(settings: &KafkaSettings, topic: &str, values: Range<u32>) {
    let producer = Producer::new(settings).unwrap();
    let sends = values.map(|n| {
        let producer = producer.clone();
        let output = output(
            topic.into(),
            None,
            Some(format!("key-{n}").into()),
            Some(n.to_string().into()),
        );
        async move { producer.send(&output).await.unwrap() }
    });
    futures::future::join_all(sends).await;
}
