//! A lane that reports where it reaches the ends of partitions.

use std::sync::{Arc, Mutex};

use redeliver_core::{Record, Timestamp};
use redeliver_kafka::backlog::{Head, Mode, heads};
use redeliver_kafka::{AssignmentId, IfFenced, LaneSpec, Processor, TransactionBatch};
use redeliver_testkit::{DEADLINE, eventually, unique};

use crate::copy::Observed;
use crate::follow::{produce, produce_and_abort};
use crate::support::{RunningLane, create_topic, lane_spec, settings};

/// What a lane reports about its partition, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Seen {
    Start(i64),
    Record(i64),
    End(i64),
}

/// Completes all records, and remembers what the lane reports.
#[derive(Default)]
struct Witness {
    seen: Arc<Mutex<Vec<Seen>>>,
    accepted: Vec<(AssignmentId, i64)>,
}

impl Witness {
    fn see(&self, seen: Seen) {
        self.seen.lock().unwrap().push(seen);
    }
}

impl Processor for Witness {
    fn assigned(&mut self, _assignment: AssignmentId, _topic: &Arc<str>, _partition: i32) {}

    fn starts_at(&mut self, _assignment: AssignmentId, offset: i64) {
        self.see(Seen::Start(offset));
    }

    fn revoked(&mut self, assignment: AssignmentId) {
        self.accepted.retain(|(id, _)| *id != assignment);
    }

    fn capacity(&self, _assignment: AssignmentId) -> usize {
        10
    }

    fn accept(&mut self, assignment: AssignmentId, record: Record, _now: Timestamp) {
        self.see(Seen::Record(record.position.offset));
        self.accepted.push((assignment, record.position.offset));
    }

    fn reached_end(&mut self, _assignment: AssignmentId, offset: i64) {
        self.see(Seen::End(offset));
    }

    fn finish(&mut self, _now: Timestamp, _limit: usize, batch: &mut TransactionBatch) {
        batch.completed.append(&mut self.accepted);
    }

    fn committed(&mut self, _now: Timestamp) {}

    fn next_due(&self) -> Option<Timestamp> {
        None
    }

    fn is_busy(&self) -> bool {
        !self.accepted.is_empty()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ends_follow_records_and_markers() {
    let settings = settings("ends");
    let (topic, group): (Arc<str>, _) = (unique("ends").into(), unique("group"));
    create_topic(&settings, &topic, 1).await;
    produce(&settings, &topic, 0, &["a", "b"]).await;
    produce_and_abort(&settings, &topic, &["never"]);
    let spec = LaneSpec {
        if_fenced: IfFenced::End,
        ..lane_spec(&format!("ends-{group}"), &group, &[&topic])
    };
    let witness = Witness::default();
    let seen = witness.seen.clone();
    let until_end = |end| {
        eventually("the end", DEADLINE, || {
            let seen = seen.lock().unwrap();
            match seen.last() {
                Some(Seen::End(offset)) if *offset == end => Ok(()),
                _ => Err(format!("{seen:?}")),
            }
        });
        std::mem::take(&mut *seen.lock().unwrap())
    };
    let lane = RunningLane::spawn(&settings, spec.clone(), witness, Arc::<Observed>::default());
    // The aborted record and its marker have offsets, too.
    assert_eq!(
        until_end(4),
        [Seen::Start(0), Seen::Record(0), Seen::Record(1), Seen::End(4)]
    );
    // An end without a record before it.
    produce_and_abort(&settings, &topic, &["never"]);
    let ends = until_end(6);
    assert!(ends.iter().all(|seen| matches!(seen, Seen::End(_))), "{ends:?}");
    produce(&settings, &topic, 0, &["c"]).await;
    assert_eq!(until_end(7), [Seen::Record(6), Seen::End(7)]);
    lane.stop();
    // An owner that finds nothing to read learns where the end is.
    let witness = Witness {
        seen: seen.clone(),
        ..Witness::default()
    };
    let _lane = RunningLane::spawn(&settings, spec, witness, Arc::<Observed>::default());
    assert_eq!(until_end(7), [Seen::Start(7), Seen::End(7)]);
}

/// A part of a partition may contain no record at all. Then the record after it shows that there are some.
#[tokio::test(flavor = "multi_thread")]
async fn heads_pass_aborted_records() {
    let settings = settings("heads");
    let topic: Arc<str> = unique("heads").into();
    create_topic(&settings, &topic, 1).await;
    produce_and_abort(&settings, &topic, &["never"]);
    produce(&settings, &topic, 0, &["a", "b", "c"]).await;
    let topics = [(unique("group"), topic.clone())];
    let offset = |record: Record| record.position.offset;
    let heads = heads(&settings, &topics, Mode::Heads, 1, DEADLINE, offset).unwrap();
    let Head { backlog, first, .. } = &heads[&topic];
    assert_eq!(
        (first.as_slice(), backlog.is_exact),
        (&[2][..], false),
        "{backlog}"
    );
}
