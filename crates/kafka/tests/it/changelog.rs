//! A lane that writes on behalf of its partitions without completing records, and receives the ends of its changelog.

use std::sync::{Arc, Mutex};

use redeliver_core::{Record, Timestamp};
use redeliver_kafka::groups;
use redeliver_kafka::reader::TopicReader;
use redeliver_kafka::{AssignmentId, LaneSpec, Processor, TransactionBatch};
use redeliver_testkit::{ensure, eventually, unique};

use crate::copy::Observed;
use crate::support::{DEADLINE, RunningLane, create_topic, lane_spec, output, settings};

const BATCHES: usize = 5;

/// Writes `partition + 1` records per batch to the same partition of the changelog, without completing any record.
struct Owner {
    changelog: Arc<str>,
    assigned: Vec<(AssignmentId, i32)>,
    batches: usize,
    ends: Arc<Mutex<Vec<(i32, i64)>>>,
}

impl Processor for Owner {
    fn assigned(&mut self, assignment: AssignmentId, _topic: &Arc<str>, partition: i32) {
        self.assigned.push((assignment, partition));
    }

    fn revoked(&mut self, assignment: AssignmentId) {
        self.assigned.retain(|(id, _)| *id != assignment);
    }

    fn capacity(&self, _assignment: AssignmentId) -> usize {
        10
    }

    fn accept(&mut self, _assignment: AssignmentId, _record: Record, _now: Timestamp) {}

    fn finish(&mut self, _now: Timestamp, _limit: usize, batch: &mut TransactionBatch) {
        if self.batches == BATCHES || self.assigned.len() < 2 {
            return;
        }
        self.batches += 1;
        for (assignment, partition) in &self.assigned {
            batch.owners.push(*assignment);
            for _ in 0..=*partition {
                batch.outputs.push(output(
                    self.changelog.clone(),
                    Some(*partition),
                    Some("the key would choose another partition".into()),
                    None,
                ));
            }
        }
    }

    fn changelog_written(&mut self, partition: i32, end: i64) -> Result<(), String> {
        self.ends.lock().unwrap().push((partition, end));
        Ok(())
    }

    fn committed(&mut self, _now: Timestamp) {}

    fn next_due(&self) -> Option<Timestamp> {
        None
    }

    fn is_busy(&self) -> bool {
        false
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn owner_batch_commits_and_reports_ends() {
    let settings = settings("owner");
    let (from, changelog, group) = (unique("from"), unique("changelog"), unique("group"));
    create_topic(&settings, &from, 2).await;
    create_topic(&settings, &changelog, 2).await;
    let ends = Arc::new(Mutex::new(Vec::new()));
    let owner = Owner {
        changelog: changelog.as_str().into(),
        assigned: Vec::new(),
        batches: 0,
        ends: ends.clone(),
    };
    let spec = LaneSpec {
        changelog: Some(changelog.as_str().into()),
        ..lane_spec(&format!("owner-{group}"), &group, &[&from])
    };
    let lane = RunningLane::spawn(&settings, spec, owner, Arc::<Observed>::default());
    eventually("all batches are committed", DEADLINE, || {
        let reported = ends.lock().unwrap().clone();
        ensure(reported.len() == 2 * BATCHES, format!("{reported:?}"))
    });
    lane.stop();

    let mut written: Vec<(i32, i64)> = Vec::new();
    let mut reader = TopicReader::new(&settings, &[changelog.as_str().into()]).unwrap();
    reader
        .read_to_end(DEADLINE, |record| {
            written.push((record.position.partition, record.position.offset));
        })
        .unwrap();
    for partition in [0, 1] {
        let offsets: Vec<i64> = written
            .iter()
            .filter(|(of, _)| *of == partition)
            .map(|(_, offset)| *offset)
            .collect();
        let per_batch = usize::try_from(partition).unwrap() + 1;
        assert_eq!(offsets.len(), per_batch * BATCHES);
        let expected: Vec<i64> = offsets
            .chunks(per_batch)
            .map(|batch| batch[per_batch - 1] + 1)
            .collect();
        let reported = ends.lock().unwrap().clone();
        let reported: Vec<i64> = reported
            .into_iter()
            .filter(|(of, _)| *of == partition)
            .map(|(_, end)| end)
            .collect();
        assert_eq!(reported, expected);
    }
    let offsets = groups::offsets(&settings, &group, &[from.as_str().into()]).unwrap();
    let offsets: Vec<i64> = offsets.values().map(|committed| committed.offset).collect();
    assert_eq!(
        offsets,
        [0, 0],
        "no record was completed, but the partitions are owned"
    );
}
