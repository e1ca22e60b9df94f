//! Results for records of an earlier session of a lane.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use redeliver_core::{Headers, Output, Record, Timestamp};
use redeliver_kafka::{AssignmentId, KafkaClient, KafkaSettings, Processor, TransactionBatch};
use redeliver_testkit::eventually;

use crate::copy::{CopyEnv, Observed};
use crate::support::{DEADLINE, RunningLane, lane_spec, settings};

/// Keeps the records of its first assignment, and finishes them during the second one, before the records of that. This is
/// like a handler that outlives a session; only the assignment ids show that its results are late.
struct Late {
    to: Arc<str>,
    history: Arc<Mutex<History>>,
    early: Vec<(AssignmentId, Record)>,
    current: Vec<(AssignmentId, Record)>,
}

#[derive(Default)]
struct History {
    assigned: Vec<AssignmentId>,
    accepted: usize,
    late_results: usize,
}

impl Late {
    fn write(&self, batch: &mut TransactionBatch, record: &Record, value: String) {
        batch.outputs.push(Output {
            topic: self.to.clone(),
            partition: None,
            key: record.key.clone(),
            value: Some(value.into()),
            headers: Headers::new(),
        });
    }
}

impl Processor for Late {
    fn assigned(&mut self, assignment: AssignmentId, _topic: &Arc<str>, _partition: i32) {
        self.history.lock().unwrap().assigned.push(assignment);
    }

    fn revoked(&mut self, assignment: AssignmentId) {
        self.current.retain(|(id, _)| *id != assignment);
    }

    fn capacity(&self, _assignment: AssignmentId) -> usize {
        100
    }

    fn accept(&mut self, assignment: AssignmentId, record: Record, _now: Timestamp) {
        let mut history = self.history.lock().unwrap();
        history.accepted += 1;
        if history.assigned.len() == 1 {
            self.early.push((assignment, record));
        } else {
            self.current.push((assignment, record));
        }
    }

    fn finish(&mut self, _now: Timestamp, _limit: usize, batch: &mut TransactionBatch) {
        let is_first_session = self.history.lock().unwrap().assigned.len() <= 1;
        if is_first_session {
            return;
        }
        if let Some((assignment, record)) = self.early.pop() {
            self.history.lock().unwrap().late_results += 1;
            batch.completed.push((assignment, record.position.offset));
            self.write(batch, &record, "late".to_owned());
            return;
        }
        for (assignment, record) in std::mem::take(&mut self.current) {
            batch.completed.push((assignment, record.position.offset));
            let value = String::from_utf8(record.value.clone().unwrap().to_vec()).unwrap();
            self.write(batch, &record, value);
        }
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
async fn late_results_are_never_written() {
    let settings = KafkaSettings {
        static_membership: true,
        ..settings("late")
    };
    let env = CopyEnv::new(settings, 1, 1).await;
    env.fill(0..10).await;
    let history = Arc::new(Mutex::new(History::default()));
    let late = Late {
        to: env.to.as_str().into(),
        history: history.clone(),
        early: Vec::new(),
        current: Vec::new(),
    };
    let spec = lane_spec("late", &env.group, &[&env.from]);
    let lane = RunningLane::spawn(&env.settings, spec, late, Arc::<Observed>::default());
    eventually("the records are in flight", DEADLINE, || {
        match history.lock().unwrap().accepted {
            10 => Ok(()),
            accepted => Err(format!("{accepted} of 10")),
        }
    });
    // Another consumer with the same instance id fences the consumer of the lane, which ends its session.
    let other: KafkaClient<BaseConsumer> = env.settings.consumer(&env.group, "late").create().unwrap();
    other.subscribe(&[env.from.as_str()]).unwrap();
    eventually("the lane has a new session", DEADLINE, || {
        drop(other.poll(Duration::from_millis(10)));
        match history.lock().unwrap().assigned.len() {
            0 | 1 => Err("still the first session".to_owned()),
            _ => Ok(()),
        }
    });
    drop(other);
    eventually("all are copied", DEADLINE, || {
        let counts = env.counts();
        assert!(!counts.contains_key("late"), "a late result was written");
        if counts.len() == 10 {
            Ok(())
        } else {
            Err(format!("{} of 10", counts.len()))
        }
    });
    lane.stop();
    env.assert_no_duplicates();
    let history = history.lock().unwrap();
    assert!(history.late_results > 0);
    let ids: HashSet<AssignmentId> = history.assigned.iter().copied().collect();
    assert_eq!(
        ids.len(),
        history.assigned.len(),
        "an assignment id occurred twice: {:?}",
        history.assigned
    );
}
