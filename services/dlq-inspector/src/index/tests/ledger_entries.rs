//! Entries of the ledger and the states of dead letters.

use super::*;
use crate::redrive::job::Item;
use crate::redrive::ledger_states::LedgerStates;

#[test]
fn entry_applies_before_or_after_letter() {
    let mut fixture = Fixture::new();
    fixture.put(vec![letter("t-dlq", 0, 1, &[]), letter("t-dlq", 0, 2, &[])]);
    let discarded = Some(State::Discarded);
    fixture.apply(&[Change::Ledger(vec![
        update("t-dlq/0/1", discarded, None),
        update("t-dlq/0/3", Some(State::Redriven), None),
    ])]);
    fixture.put(vec![letter("t-dlq", 0, 3, &[])]);
    assert_eq!(fixture.matching("state = OPEN"), [2]);
    assert_eq!(fixture.matching("state = DISCARDED"), [1]);
    let redriven = fixture.get("t-dlq/0/3").unwrap();
    assert_eq!(
        (redriven.state, redriven.entry.by.as_str()),
        (State::Redriven, "ann")
    );
    assert_eq!(
        (redriven.entry.reason.as_str(), redriven.entry.time),
        ("because", Some(Timestamp::from_millis(9)))
    );
    fixture.mark("t-dlq/0/1", None);
    let open = fixture.get("t-dlq/0/1").unwrap();
    assert_eq!((open.state, open.entry.by.as_str()), (State::Open, ""));
    fixture.apply(&[Change::ForgetLedger]);
    assert_eq!(fixture.matching("state = OPEN"), [3, 2, 1]);
}

#[test]
fn newest_entry_counts_in_any_order() {
    let written = |state, partition, millis| {
        let mut update = update("t-dlq/0/1", state, None);
        update.version.partition = partition;
        update.version.time = Some(Timestamp::from_millis(millis));
        update
    };
    // The ledger had one partition when the dead letter was discarded, then two.
    let discarded = written(Some(State::Discarded), 0, 1_000);
    for (newest, expected) in [(Some(State::Redriven), State::Redriven), (None, State::Open)] {
        let newest = written(newest, 1, 2_000);
        for updates in [[&discarded, &newest], [&newest, &discarded]] {
            let mut fixture = Fixture::new();
            let dead = letter("t-dlq", 0, 1, &[]);
            let planned = Item {
                id: parse_id("t-dlq/0/1").unwrap(),
                content: dead.content,
            };
            fixture.put(vec![dead]);
            let updates = updates.map(Clone::clone);
            let mut states = LedgerStates::default();
            updates.iter().cloned().for_each(|update| states.apply(update));
            assert_eq!(states.state(&planned, None), expected, "the executor");
            fixture.apply(&[Change::Ledger(updates.into())]);
            assert_eq!(fixture.get("t-dlq/0/1").unwrap().state, expected);
            // Also of a dead letter that is indexed later.
            fixture.apply(&[forget("t-dlq")]);
            fixture.put(vec![letter("t-dlq", 0, 1, &[])]);
            assert_eq!(fixture.get("t-dlq/0/1").unwrap().state, expected);
        }
    }
}

#[test]
fn entry_of_another_record_is_ignored() {
    let mut fixture = Fixture::new();
    let first = letter("t-dlq", 0, 1, &[]);
    let second = letter("t-dlq", 0, 1, &[("tenant", "x")]);
    fixture.put(vec![first.clone()]);
    let discarded = update("t-dlq/0/1", Some(State::Discarded), Some(first.content));
    fixture.apply(&[Change::Ledger(vec![discarded])]);
    assert_eq!(fixture.get("t-dlq/0/1").unwrap().state, State::Discarded);
    fixture.apply(&[forget("t-dlq"), Change::Letters(vec![second.clone()])]);
    let found = fixture.get("t-dlq/0/1").unwrap();
    assert_eq!(
        (found.state, found.entry.by.as_str(), found.content),
        (State::Open, "", second.content)
    );
    for (state, content, expected) in [
        (State::Redriven, second.content, State::Redriven),
        (State::Discarded, first.content, State::Open),
    ] {
        let update = update("t-dlq/0/1", Some(state), Some(content));
        fixture.apply(&[Change::Ledger(vec![update])]);
        assert_eq!(fixture.get("t-dlq/0/1").unwrap().state, expected);
    }
}

#[test]
fn executor_and_index_agree() {
    let mut fixture = Fixture::new();
    let written = |id, content| {
        let mut update = update(id, Some(State::Discarded), content);
        update.version.time = Some(Timestamp::from_millis(9));
        update
    };
    // That of a record may be an hour ahead.
    let near = at(3_600_009, "t-dlq", 0, 1, &[]);
    let far = at(3_600_010, "t-dlq", 0, 2, &[]);
    let letters = [near.clone(), far.clone()];
    let closed = (State::Discarded, "ann".to_owned());
    let open = (State::Open, String::new());
    for (content, expected) in [
        (None, [closed.clone(), open.clone()]),
        (Some(far.content), [open.clone(), closed.clone()]),
    ] {
        let updates = ["t-dlq/0/1", "t-dlq/0/2"].map(|id| written(id, content));
        let mut states = LedgerStates::default();
        updates.iter().cloned().for_each(|update| states.apply(update));
        for entries_first in [true, false] {
            fixture.apply(&[Change::ForgetLedger, forget("t-dlq")]);
            let mut changes = [
                Change::Ledger(updates.clone().into()),
                Change::Letters(letters.clone().into()),
            ];
            if !entries_first {
                changes.reverse();
            }
            fixture.apply(&changes);
            for (letter, expected) in letters.iter().zip(&expected) {
                let id = letter.position.to_string();
                let found = fixture.get(&id).unwrap();
                let item = Item {
                    id: parse_id(&id).unwrap(),
                    content: letter.content,
                };
                assert_eq!(states.state(&item, Some(letter.dead_at)), found.state, "{id}");
                assert_eq!((found.state, found.entry.by), *expected, "{id} {entries_first}");
            }
        }
    }
}

#[test]
fn entry_of_unknown_time_applies() {
    let mut fixture = Fixture::new();
    fixture.put(vec![at(3_600_010, "t-dlq", 0, 1, &[])]);
    fixture.mark("t-dlq/0/1", Some(State::Discarded));
    assert_eq!(fixture.get("t-dlq/0/1").unwrap().state, State::Discarded);
}
