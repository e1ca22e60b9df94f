//! Results of work that an earlier session of a lane began.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use redeliver_core::{Headers, Output, Record, Timestamp};
use redeliver_kafka::{
    AssignmentId, IfRecreated, KafkaSettings, Lane, LaneContext, LaneObserver, LaneSpec, Processor,
    TopicWatch, TransactionBatch,
};
use redeliver_testkit::{eventually, unique};
use tokio_util::sync::CancellationToken;

use crate::lane::{DEADLINE, counts, fill};
use crate::support::{create_topic, settings};

/// Holds what it accepts under its first assignment, and hands it over under the second one, before it does the work of
/// that: what a handler that outlives a session would lead to if nobody looked at the ids.
struct Late {
    to: Arc<str>,
    story: Arc<Mutex<Story>>,
    early: Vec<(AssignmentId, Record)>,
    current: Vec<(AssignmentId, Record)>,
}

#[derive(Default)]
struct Story {
    assigned: Vec<AssignmentId>,
    accepted: usize,
    handed_over_late: usize,
}

impl Late {
    fn write(&self, turn: &mut TransactionBatch, record: &Record, value: String) {
        turn.outputs.push(Output {
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
        self.story.lock().unwrap().assigned.push(assignment);
    }

    fn revoked(&mut self, assignment: AssignmentId) {
        self.current.retain(|(id, _)| *id != assignment);
    }

    fn capacity(&self, _assignment: AssignmentId) -> usize {
        100
    }

    fn accept(&mut self, assignment: AssignmentId, record: Record, _now: Timestamp) {
        let mut story = self.story.lock().unwrap();
        story.accepted += 1;
        if story.assigned.len() == 1 {
            self.early.push((assignment, record));
        } else {
            self.current.push((assignment, record));
        }
    }

    fn finish(&mut self, _now: Timestamp, _limit: usize, turn: &mut TransactionBatch) {
        let is_later = self.story.lock().unwrap().assigned.len() > 1;
        if !is_later {
            return;
        }
        if let Some((assignment, record)) = self.early.pop() {
            self.story.lock().unwrap().handed_over_late += 1;
            turn.completed.push((assignment, record.position.offset));
            self.write(turn, &record, "late".to_owned());
            return;
        }
        for (assignment, record) in std::mem::take(&mut self.current) {
            turn.completed.push((assignment, record.position.offset));
            let value = String::from_utf8(record.value.clone().unwrap().to_vec()).unwrap();
            self.write(turn, &record, value);
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

struct Quiet;

impl LaneObserver for Quiet {}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_result_of_an_earlier_session_touches_no_record_of_a_later_one() {
    let settings = KafkaSettings {
        static_membership: true,
        ..settings("late")
    };
    let (from, to, group) = (unique("from"), unique("to"), unique("group"));
    create_topic(&settings, &from, 1).await;
    create_topic(&settings, &to, 1).await;
    fill(&settings, &from, 0..10).await;
    let story = Arc::new(Mutex::new(Story::default()));
    let late = Late {
        to: to.as_str().into(),
        story: story.clone(),
        early: Vec::new(),
        current: Vec::new(),
    };
    let spec = LaneSpec {
        name: "late".to_owned(),
        group: group.clone(),
        topics: vec![from.as_str().into()],
        batch: 100,
        grace: Duration::from_secs(5),
        changelog: None,
        if_recreated: IfRecreated::ReadFromBeginning,
    };
    let stop = CancellationToken::new();
    let watch = TopicWatch::start(&settings).unwrap();
    let context = LaneContext::new(settings.clone(), Arc::new(Quiet), watch, stop.clone());
    let lane = Lane::new(context, spec, late);
    let running = thread::spawn(move || lane.run());
    eventually("the records are in hand", DEADLINE, || {
        match story.lock().unwrap().accepted {
            10 => Ok(()),
            accepted => Err(format!("{accepted} of 10")),
        }
    });
    // Another consumer under the same instance id fences the lane's, which breaks its session.
    let other: BaseConsumer = settings.consumer(&group, "late").create().unwrap();
    other.subscribe(&[from.as_str()]).unwrap();
    eventually("the session is a new one", DEADLINE, || {
        drop(other.poll(Duration::from_millis(10)));
        match story.lock().unwrap().assigned.len() {
            0 | 1 => Err("still the first".to_owned()),
            _ => Ok(()),
        }
    });
    drop(other);
    eventually("all are copied", DEADLINE, || {
        let counts = counts(&settings, &to);
        assert!(!counts.contains_key("late"), "a late result was written");
        if counts.len() == 10 {
            Ok(())
        } else {
            Err(format!("{} of 10", counts.len()))
        }
    });
    stop.cancel();
    running.join().unwrap().unwrap();
    assert!(counts(&settings, &to).values().all(|count| *count == 1));
    let story = story.lock().unwrap();
    assert!(story.handed_over_late > 0);
    let ids: HashSet<AssignmentId> = story.assigned.iter().copied().collect();
    assert_eq!(
        ids.len(),
        story.assigned.len(),
        "an id was given out twice: {:?}",
        story.assigned
    );
}
