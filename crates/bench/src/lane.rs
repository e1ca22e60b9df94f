//! A lane with a processor that only copies records: the cost of the lane itself.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::{Output, Record, Timestamp};
use redeliver_kafka::{
    AssignmentId, IfFenced, IfRecreated, KafkaSettings, Lane, LaneContext, LaneObserver, LaneSpec, Processor,
    TopicWatch, TransactionBatch,
};
use tokio_util::sync::CancellationToken;

struct Copy {
    to: Arc<str>,
    live: HashSet<AssignmentId>,
    records: Vec<(AssignmentId, Record)>,
}

impl Processor for Copy {
    fn assigned(&mut self, assignment: AssignmentId, _topic: &Arc<str>, _partition: i32) {
        self.live.insert(assignment);
    }

    fn revoked(&mut self, assignment: AssignmentId) {
        self.live.remove(&assignment);
        self.records.retain(|(id, _)| *id != assignment);
    }

    fn capacity(&self, _assignment: AssignmentId) -> usize {
        5000_usize.saturating_sub(self.records.len())
    }

    fn accept(&mut self, assignment: AssignmentId, record: Record, _now: Timestamp) {
        self.records.push((assignment, record));
    }

    fn finish(&mut self, _now: Timestamp, _limit: usize, batch: &mut TransactionBatch) {
        for (assignment, record) in self.records.drain(..) {
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

    fn committed(&mut self, _now: Timestamp) {}

    fn next_due(&self) -> Option<Timestamp> {
        None
    }

    fn is_busy(&self) -> bool {
        !self.records.is_empty()
    }
}

struct Quiet;
impl LaneObserver for Quiet {
    fn committed(&self, outputs: usize, _completed: usize, took: Duration) {
        if std::env::var_os("BENCH_VERBOSE").is_some() {
            eprintln!("{outputs} in {took:?}");
        }
    }
}

pub(crate) fn start(
    settings: KafkaSettings,
    group: &str,
    from: &str,
    to: &str,
) -> (CancellationToken, std::thread::JoinHandle<()>) {
    let spec = LaneSpec {
        name: "copy".into(),
        group: group.to_owned(),
        topics: vec![from.into()],
        batch: 5000,
        grace: Duration::from_secs(10),
        changelog: None,
        if_recreated: IfRecreated::ReadFromBeginning,
        if_fenced: IfFenced::End,
    };
    let stop = CancellationToken::new();
    let copy = Copy {
        to: to.into(),
        live: HashSet::new(),
        records: Vec::new(),
    };
    let watch = TopicWatch::start(&settings).expect("a thread for the watch");
    let context = LaneContext::new(settings, Arc::new(Quiet), watch, stop.clone());
    let lane = Lane::new(context, spec, copy);
    let thread = std::thread::spawn(move || lane.run().expect("lane"));
    (stop, thread)
}
