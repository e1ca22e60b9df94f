//! A lane that writes in the name of its partitions, and is told how far it wrote its changelog.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use redeliver_core::{Headers, Output, Record, Timestamp};
use redeliver_kafka::reader::{TopicReader, group_positions};
use redeliver_kafka::{
    AssignmentId, IfRecreated, Lane, LaneContext, LaneObserver, LaneSpec, Processor, TopicWatch,
    TransactionBatch,
};
use redeliver_testkit::{eventually, unique};
use tokio_util::sync::CancellationToken;

use crate::support::{create_topic, settings};

const TURNS: usize = 5;

/// Writes a number of records into the partition of the changelog that has the number of its own, without
/// ever being done with a record.
struct Owner {
    changelog: Arc<str>,
    assigned: Vec<(AssignmentId, i32)>,
    turns: usize,
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

    fn finish(&mut self, _now: Timestamp, _limit: usize, turn: &mut TransactionBatch) {
        if self.turns == TURNS || self.assigned.len() < 2 {
            return;
        }
        self.turns += 1;
        for (assignment, partition) in &self.assigned {
            turn.owners.push(*assignment);
            for _ in 0..=*partition {
                turn.outputs.push(Output {
                    topic: self.changelog.clone(),
                    partition: Some(*partition),
                    key: Some("the key would choose another partition".into()),
                    value: None,
                    headers: Headers::new(),
                });
            }
        }
    }

    fn changelog_written(&mut self, partition: i32, end: i64) {
        self.ends.lock().unwrap().push((partition, end));
    }

    fn committed(&mut self, _now: Timestamp) {}

    fn next_due(&self) -> Option<Timestamp> {
        None
    }

    fn is_busy(&self) -> bool {
        false
    }
}

struct Quiet;
impl LaneObserver for Quiet {}

#[tokio::test(flavor = "multi_thread")]
async fn turns_without_a_record_commit_the_positions_of_their_owners_and_tell_the_changelogs_ends() {
    let settings = settings("owner");
    let (from, changelog, group) = (unique("from"), unique("changelog"), unique("group"));
    create_topic(&settings, &from, 2).await;
    create_topic(&settings, &changelog, 2).await;
    let ends = Arc::new(Mutex::new(Vec::new()));
    let owner = Owner {
        changelog: changelog.as_str().into(),
        assigned: Vec::new(),
        turns: 0,
        ends: ends.clone(),
    };
    let spec = LaneSpec {
        name: format!("owner-{group}"),
        group: group.clone(),
        topics: vec![from.as_str().into()],
        batch: 100,
        grace: Duration::from_secs(10),
        changelog: Some(changelog.as_str().into()),
        if_recreated: IfRecreated::ReadFromBeginning,
    };
    let stop = CancellationToken::new();
    let watch = TopicWatch::start(&settings).unwrap();
    let context = LaneContext::new(settings.clone(), Arc::new(Quiet), watch, stop.clone());
    let lane = Lane::new(context, spec, owner);
    let running = thread::spawn(move || lane.run());
    eventually("all turns are committed", Duration::from_secs(30), || {
        let told = ends.lock().unwrap().clone();
        if told.len() == 2 * TURNS {
            Ok(())
        } else {
            Err(format!("{told:?}"))
        }
    });
    stop.cancel();
    running.join().unwrap().unwrap();

    let mut written: Vec<(i32, i64)> = Vec::new();
    let mut reader = TopicReader::new(&settings, &[changelog.as_str().into()]).unwrap();
    reader
        .read_to_end(Duration::from_secs(30), |record| {
            written.push((record.position.partition, record.position.offset));
        })
        .unwrap();
    for partition in [0, 1] {
        let offsets: Vec<i64> = written
            .iter()
            .filter(|(of, _)| *of == partition)
            .map(|(_, offset)| *offset)
            .collect();
        let per_turn = usize::try_from(partition).unwrap() + 1;
        assert_eq!(offsets.len(), per_turn * TURNS);
        let last_of_turns: Vec<i64> = offsets
            .chunks(per_turn)
            .map(|turn| turn[per_turn - 1] + 1)
            .collect();
        let told = ends.lock().unwrap().clone();
        let told: Vec<i64> = told
            .into_iter()
            .filter(|(of, _)| *of == partition)
            .map(|(_, end)| end)
            .collect();
        assert_eq!(told, last_of_turns);
    }
    let positions = group_positions(&settings, &group, &[from.as_str().into()]).unwrap();
    let offsets: Vec<Option<i64>> = positions
        .values()
        .map(|position| position.as_ref().map(|position| position.offset))
        .collect();
    assert_eq!(
        offsets,
        [Some(0), Some(0)],
        "nothing was read of them, and they are owned"
    );
}
