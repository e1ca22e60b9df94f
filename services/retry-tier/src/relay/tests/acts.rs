//! What operators want done with single records.

use redeliver_kafka::lookup::{Found, StoredRecord};
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::{Message as _, v1};
use redeliver_service::waiting_actions::WaitingActionState as State;
use redeliver_store::State as _;

use super::super::acts::{LOOK_INTERVAL, VOID_AFTER, hash};
use super::*;
use crate::lookups::Answer;

const TOPIC: u128 = 7;

impl Bench {
    fn of_topic(look_ahead: usize) -> Self {
        let mut bench = Self::new(look_ahead);
        bench.reads(TOPIC);
        bench
    }

    /// Adds a record of the topic of actions.
    fn learn(&self, key: &str, value: &impl redeliver_proto::Message) {
        let mut state = WaitingActions::clone(&self.requests.borrow().clone().unwrap());
        state.apply(&Record {
            key: Some(key.to_owned().into()),
            value: Some(value.encode_to_vec().into()),
            headers: Headers::new(),
            ..record(0)
        });
        self.requests.send_replace(Some(Arc::new(state)));
    }

    fn request(&self, id: &str, action: v1::WaitingAction, topic: u128, offset: i64) {
        let edit = v1::RedriveEdit {
            value: Some(v1::EditedBytes {
                bytes: Some("edited".into()),
            }),
            ..v1::RedriveEdit::default()
        };
        let request = v1::WaitingRequestRecord {
            action: action.into(),
            edit: (action == v1::WaitingAction::Edit).then_some(edit),
            by: "token:ann".to_owned(),
            reason: "INC-17".to_owned(),
            at: Some(to_timestamp(NOW)),
            partitions: vec![v1::WaitingPartition {
                topic: "docs-retry-5s".to_owned(),
                // None in place of 0.
                topic_id: bytes::Bytes::copy_from_slice(
                    &topic.to_be_bytes()[..if topic == 0 { 0 } else { 16 }],
                ),
                partition: 0,
                offsets: vec![offset],
            }],
            ..v1::WaitingRequestRecord::default()
        };
        self.learn(&format!("request/{id}"), &request);
    }

    fn batch(&mut self) -> TransactionBatch {
        let now = self.clock.now();
        let mut batch = TransactionBatch::default();
        self.relay.finish(now, 100, &mut batch);
        batch
    }

    /// The record at an offset is found.
    fn answer(&mut self, offset: i64, found: Found) {
        let asked = std::mem::take(&mut *self.asked.lock().unwrap());
        let positions: Vec<_> = asked.iter().flat_map(|question| &question.positions).collect();
        assert!(
            positions.iter().any(|position| position.offset == offset),
            "{positions:?}"
        );
        let answer = Answer {
            assignment: self.assignment,
            found: vec![(offset, found)],
        };
        asked[0].inbox.lock().unwrap().push(answer);
    }

    fn accept_at(&mut self, offset: i64) {
        self.relay.accept(self.assignment, record(offset), NOW);
    }
}

fn record(offset: i64) -> Record {
    Record {
        position: Position {
            topic: "docs-retry-5s".into(),
            partition: 0,
            offset,
        },
        timestamp: Some(NOW),
        key: Some("k".into()),
        value: Some("v".into()),
        headers: waiting_until(in_seconds(5)),
        unreadable_headers: 0,
    }
}

fn found(offset: i64) -> Found {
    Found::Record(StoredRecord {
        record: record(offset),
        timestamp_type: None,
    })
}

fn done_key(offset: i64) -> String {
    format!("done/{TOPIC:032x}/docs-retry-5s/0/{offset}")
}

/// The outcomes that a transaction writes, by offset, and the actions that it records.
fn outcomes(batch: &TransactionBatch) -> (Vec<(i64, State, bool)>, Vec<String>) {
    let delivered: Vec<_> = (0..)
        .take(batch.outputs.len())
        .map(|offset| Some((1, 100 + offset)))
        .collect();
    let written = batch
        .follow_up
        .iter()
        .flat_map(|follow_up| follow_up.outputs(&delivered));
    let (mut outcomes, mut audited) = (Vec::new(), Vec::new());
    for output in written {
        let Some(key) = output.key else {
            audited.push(v1::AuditEntry::decode(output.value.unwrap()).unwrap().action);
            continue;
        };
        let key = std::str::from_utf8(&key).unwrap();
        let done = v1::WaitingDone::decode(output.value.unwrap()).unwrap();
        assert_eq!(done.written.is_some(), done.moved);
        let offset = key.rsplit('/').next().unwrap().parse().unwrap();
        outcomes.push((offset, done.state(), done.moved));
    }
    (outcomes, audited)
}

#[test]
fn waiting_record_is_acted_on_once() {
    for (action, topic, state, audited) in [
        (
            v1::WaitingAction::Retry,
            "docs-retry-due",
            State::Retried,
            "waiting.retry",
        ),
        (v1::WaitingAction::Dead, "docs-dlq", State::Dead, "waiting.dead"),
        (
            v1::WaitingAction::Edit,
            "docs-retry-5s",
            State::Edited,
            "waiting.edit",
        ),
    ] {
        let mut bench = Bench::of_topic(10);
        bench.accept_at(0);
        bench.accept_at(1);
        bench.request("a", action, TOPIC, 1);
        let batch = bench.batch();
        assert_eq!(batch.completed, [(bench.assignment, 1)]);
        let output = &batch.outputs[0];
        assert_eq!((&*output.topic, batch.outputs.len()), (topic, 1));
        let value = if state == State::Edited { "edited" } else { "v" };
        assert_eq!(output.value.as_deref(), Some(value.as_bytes()));
        let is_retried = state == State::Retried;
        if state != State::Dead {
            assert_eq!(
                due_of(&output.headers),
                if is_retried { NOW } else { in_seconds(5) }
            );
        } else {
            let message = output.headers.last(headers::ERROR_MESSAGE).unwrap();
            assert!(message.starts_with(b"token:ann has given up its retries (INC-17)"));
        }
        assert_eq!(
            outcomes(&batch),
            (vec![(1, state, true)], vec![audited.to_owned()])
        );
        bench.relay.committed(NOW);
        assert_eq!(bench.metrics().acted.get(), 1);
        // Its own outcome was not read back yet.
        bench.request("b", action, TOPIC, 9);
        assert!(bench.batch().outputs.is_empty());
        bench.relay.committed(NOW);
        // The other record waits as before.
        bench.clock.advance(Duration::from_secs(5));
        assert_eq!(bench.batch().completed, [(bench.assignment, 0)]);
    }
}

#[test]
fn record_ahead_is_skipped_when_read() {
    let mut bench = Bench::of_topic(1);
    bench.accept_at(0);
    bench.request("a", v1::WaitingAction::Dead, TOPIC, 5);
    assert!(bench.batch().outputs.is_empty());
    bench.answer(5, found(5));
    let batch = bench.batch();
    // Nothing is completed, but the broker checks who owns the partition.
    assert_eq!(
        (&*batch.completed, &*batch.owners),
        (&[][..], &[bench.assignment][..])
    );
    assert_eq!(&*batch.outputs[0].topic, "docs-dlq");
    assert_eq!(outcomes(&batch).0, [(5, State::Dead, true)]);
    // It is read while the transaction is being written.
    bench.accept_at(5);
    bench.relay.committed(NOW);
    let batch = bench.batch();
    assert_eq!(
        (batch.outputs.len(), &*batch.completed),
        (0, &[(bench.assignment, 5)][..])
    );
    bench.relay.committed(NOW);
    assert!(bench.batch().completed.is_empty());
}

#[test]
fn aborted_action_is_repeated() {
    for is_read in [true, false] {
        let mut bench = Bench::of_topic(10);
        bench.accept_at(0);
        bench.request("a", v1::WaitingAction::Dead, TOPIC, 5);
        bench.batch();
        bench.answer(5, found(5));
        let mut batch = bench.batch();
        assert_eq!(batch.outputs.len(), 1);
        if is_read {
            bench.accept_at(5);
        }
        assert!(bench.relay.take_back(&mut batch));
        let mut again = bench.batch();
        if !is_read {
            bench.answer(5, found(5));
            again = bench.batch();
        }
        assert_eq!(outcomes(&again).0, [(5, State::Dead, true)]);
        assert_eq!(again.completed.len(), usize::from(is_read));
    }
}

#[test]
fn released_record_is_gone() {
    let mut bench = Bench::of_topic(10);
    for offset in 0..2 {
        bench.accept_at(offset);
    }
    bench.clock.advance(Duration::from_secs(5));
    assert_eq!(bench.batch().outputs.len(), 2);
    bench.relay.committed(in_seconds(5));
    bench.request("a", v1::WaitingAction::Retry, TOPIC, 1);
    assert!(bench.batch().follow_up.is_none(), "the topic is read again");
    let batch = bench.batch();
    assert_eq!(outcomes(&batch), (vec![(1, State::Gone, false)], Vec::new()));
    assert_eq!(
        (batch.outputs.len(), &*batch.owners),
        (0, &[bench.assignment][..])
    );
}

#[test]
fn completed_record_is_not_looked_up() {
    let mut bench = Bench::of_topic(10);
    bench.relay.completed_to(bench.assignment, 4);
    bench.request("a", v1::WaitingAction::Retry, TOPIC, 3);
    assert!(bench.batch().outputs.is_empty() && bench.asked.lock().unwrap().is_empty());
    bench.accept_at(4);
    bench.clock.advance(Duration::from_secs(1));
    bench.batch();
    assert_eq!(outcomes(&bench.batch()).0, [(3, State::Gone, false)]);
}

#[test]
fn late_outcome_is_not_overwritten() {
    let mut bench = Bench::of_topic(10);
    // A previous owner has completed the record.
    bench.relay.starts_at(bench.assignment, 5);
    bench.request("a", v1::WaitingAction::Dead, TOPIC, 3);
    assert!(bench.batch().follow_up.is_none());
    bench.learn(&done_key(3), &v1::WaitingDone::default());
    for _ in 0..2 {
        bench.clock.advance(Duration::from_secs(1));
        assert!(bench.batch().follow_up.is_none());
    }
}

#[test]
fn gone_outcomes_share_the_transaction() {
    let mut bench = Bench::of_topic(10);
    bench.relay.starts_at(bench.assignment, 50);
    for offset in 0..30 {
        bench.request(&format!("r{offset}"), v1::WaitingAction::Retry, TOPIC, offset);
    }
    bench.batch();
    for count in [25, 5] {
        assert_eq!(outcomes(&bench.batch()).0.len(), count);
        bench.relay.committed(NOW);
    }
}

#[test]
fn compacted_record_is_gone() {
    let mut bench = Bench::of_topic(10);
    bench.request("a", v1::WaitingAction::Retry, TOPIC, 3);
    bench.batch();
    bench.answer(3, Found::Compacted);
    assert_eq!(outcomes(&bench.batch()).0, [(3, State::Gone, false)]);
}

#[test]
fn outcome_of_previous_owner_counts() {
    let mut bench = Bench::of_topic(10);
    // The hash of record 3 is that of another one, which Kafka has lost.
    for (offset, content) in [(2, hash(&record(2)).to_vec()), (3, vec![1; 16])] {
        let done = v1::WaitingDone {
            moved: true,
            content_hash: content.into(),
            ..v1::WaitingDone::default()
        };
        bench.learn(&done_key(offset), &done);
    }
    bench.relay.revoked(bench.assignment);
    bench.assignment = AssignmentId::for_tests(0, 2);
    bench.relay.assigned(bench.assignment, &bench.topic.clone(), 0);
    bench.reads(TOPIC);
    assert_eq!(bench.relay.capacity(bench.assignment), 0, "it is not known yet");
    bench.batch();
    assert_eq!(bench.relay.capacity(bench.assignment), 10);
    for offset in 1..4 {
        bench.accept_at(offset);
    }
    assert_eq!(bench.batch().completed, [(bench.assignment, 2)]);
    assert_eq!(bench.metrics().held.get(), 2);
}

#[test]
fn actions_need_topic_ids() {
    let mut bench = Bench::new(10);
    let done = v1::WaitingDone {
        moved: true,
        ..v1::WaitingDone::default()
    };
    bench.learn("done/-/docs-retry-5s/0/0", &done);
    bench.relay.revoked(bench.assignment);
    bench.assignment = AssignmentId::for_tests(0, 2);
    bench.relay.assigned(bench.assignment, &bench.topic.clone(), 0);
    bench.request("a", v1::WaitingAction::Dead, 0, 1);
    bench.batch();
    for offset in 0..2 {
        bench.accept_at(offset);
    }
    let batch = bench.batch();
    assert!(batch.outputs.is_empty() && batch.completed.is_empty());
    assert_eq!(bench.metrics().held.get(), 2);
}

#[test]
fn requests_of_previous_topic_are_void() {
    let mut bench = Bench::of_topic(10);
    bench.request("a", v1::WaitingAction::Dead, TOPIC - 1, 1);
    assert!(bench.batch().follow_up.is_none());
    bench.clock.advance(VOID_AFTER / 10);
    // This lane may be the one that reads the previous topic.
    bench.relay.acting.context.id_of = Box::new(|_| Some(TopicId::from_bits(TOPIC - 1)));
    for _ in 0..10 {
        bench.clock.advance(VOID_AFTER / 10);
        assert!(bench.batch().follow_up.is_none());
    }
    bench.relay.acting.context.id_of = Box::new(|_| Some(TopicId::from_bits(TOPIC)));
    let batch = bench.batch();
    assert_eq!(outcomes(&batch), (vec![(1, State::Void, false)], Vec::new()));
    bench.relay.committed(NOW);
    assert!(bench.batch().follow_up.is_none(), "one outcome is enough");
}

#[test]
fn paused_tier_retries_nothing() {
    let mut bench = Bench::of_topic(10);
    let paused = TierControl {
        run: Some(Run::Paused),
        ..TierControl::default()
    };
    bench.want("tier/docs/5s", paused);
    for (offset, action) in [(0, v1::WaitingAction::Retry), (1, v1::WaitingAction::Dead)] {
        bench.accept_at(offset);
        bench.request(&format!("r{offset}"), action, TOPIC, offset);
    }
    assert_eq!(outcomes(&bench.batch()).0, [(1, State::Dead, true)]);
    bench.relay.committed(NOW);
    bench.want("tier/docs/5s", TierControl::default());
    bench.clock.advance(Duration::from_secs(1));
    assert_eq!(outcomes(&bench.batch()).0, [(0, State::Retried, true)]);
}

#[test]
fn refused_edit_waits_unedited() {
    let mut bench = Bench::of_topic(10);
    bench.accept_at(0);
    bench.request("a", v1::WaitingAction::Edit, TOPIC, 0);
    let mut batch = bench.batch();
    let failure = Failure::permanent("output.too-large", "no");
    assert!(
        bench
            .relay
            .refused(&[Refused { index: 0, failure }], &mut batch, NOW)
    );
    assert_eq!(
        (&*batch.outputs[0].topic, batch.outputs[0].value.as_deref()),
        ("docs-retry-5s", Some(&b"v"[..]))
    );
    assert_eq!(outcomes(&batch), (vec![(0, State::Refused, true)], Vec::new()));
    let failure = Failure::permanent("output.denied", "no");
    assert!(
        bench
            .relay
            .refused(&[Refused { index: 0, failure }], &mut batch, NOW)
    );
    assert_eq!(&*batch.outputs[0].topic, "docs-dlq");
    assert_eq!(outcomes(&batch), (vec![(0, State::Dead, true)], Vec::new()));
    bench.relay.take_back(&mut batch);
    assert_eq!(outcomes(&bench.batch()).0, [(0, State::Edited, true)]);
}

#[test]
fn limited_retries_delay_no_dead_letters() {
    let mut bench = Bench::of_topic(10);
    let limited = TierControl {
        rate: Some(RateLimit::PerSecond(1.0)),
        ..TierControl::default()
    };
    bench.want("tier/docs/5s", limited);
    for offset in 0..40 {
        let action = if offset < 39 {
            v1::WaitingAction::Retry
        } else {
            v1::WaitingAction::Dead
        };
        bench.accept_at(offset);
        bench.request(&format!("r{offset}"), action, TOPIC, offset);
    }
    let (written, _) = outcomes(&bench.batch());
    assert!(written.contains(&(39, State::Dead, true)), "{written:?}");
    assert!(written.len() < 10, "{written:?}");
}

#[test]
fn unavailable_return_topic_delays_no_others() {
    let mut bench = Bench::of_topic(1);
    bench.relay.presence = Box::new(|topic| presence(topic == "docs-retry-due"));
    bench.request("a", v1::WaitingAction::Retry, TOPIC, 5);
    bench.request("b", v1::WaitingAction::Dead, TOPIC, 6);
    bench.batch();
    // There was no room for the second record.
    bench.answer(5, found(5));
    assert!(bench.batch().outputs.is_empty());
    bench.clock.advance(LOOK_INTERVAL);
    bench.batch();
    let asked = bench.asked.lock().unwrap();
    let asked: Vec<_> = asked[0]
        .positions
        .iter()
        .map(|position| position.offset)
        .collect();
    assert_eq!(asked, [6]);
}
