//! Entries of the ledger and the states of dead letters.

use super::*;
use crate::redrive::job::Item;
use crate::redrive::ledger_states::LedgerStates;

#[test]
fn a_ledger_entry_sets_the_state_before_or_after_its_dead_letter() {
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
        (redriven.state, redriven.state_by.as_str()),
        (State::Redriven, "ann")
    );
    assert_eq!(
        (redriven.state_note.as_str(), redriven.state_time),
        ("because", Some(Timestamp::from_millis(9)))
    );
    fixture.apply(&[Change::Ledger(vec![update("t-dlq/0/1", None, None)])]);
    let open = fixture.get("t-dlq/0/1").unwrap();
    assert_eq!((open.state, open.state_by.as_str()), (State::Open, ""));
    fixture.apply(&[Change::ForgetLedger]);
    assert_eq!(fixture.matching("state = OPEN"), [3, 2, 1]);
}

#[test]
fn the_newest_ledger_entry_counts_in_whatever_order_partitions_are_read() {
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
            fixture.put(vec![letter("t-dlq", 0, 1, &[])]);
            fixture.apply(&[Change::Ledger(updates.map(Clone::clone).into())]);
            assert_eq!(fixture.get("t-dlq/0/1").unwrap().state, expected);
            // Also of a dead letter that is indexed later.
            fixture.apply(&[Change::Forget {
                topic: "t-dlq".into(),
            }]);
            fixture.put(vec![letter("t-dlq", 0, 1, &[])]);
            assert_eq!(fixture.get("t-dlq/0/1").unwrap().state, expected);
        }
    }
}

#[test]
fn a_ledger_entry_for_another_record_at_the_same_offset_is_ignored() {
    let mut fixture = Fixture::new();
    let first = letter("t-dlq", 0, 1, &[]);
    let second = letter("t-dlq", 0, 1, &[("tenant", "x")]);
    fixture.put(vec![first.clone()]);
    let discarded = update("t-dlq/0/1", Some(State::Discarded), Some(first.content));
    fixture.apply(&[Change::Ledger(vec![discarded])]);
    assert_eq!(fixture.get("t-dlq/0/1").unwrap().state, State::Discarded);
    fixture.apply(&[
        Change::Forget {
            topic: "t-dlq".into(),
        },
        Change::Letters(vec![second.clone()]),
    ]);
    let found = fixture.get("t-dlq/0/1").unwrap();
    assert_eq!(
        (found.state, found.state_by.as_str(), found.content),
        (State::Open, "", second.content)
    );
    fixture.apply(&[Change::Ledger(vec![update(
        "t-dlq/0/1",
        Some(State::Redriven),
        Some(second.content),
    )])]);
    assert_eq!(fixture.get("t-dlq/0/1").unwrap().state, State::Redriven);
    fixture.apply(&[Change::Ledger(vec![update(
        "t-dlq/0/1",
        Some(State::Discarded),
        Some(first.content),
    )])]);
    assert_eq!(fixture.get("t-dlq/0/1").unwrap().state, State::Open);
}

#[test]
fn the_executor_and_the_index_agree_on_entries() {
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
            fixture.apply(&[
                Change::ForgetLedger,
                Change::Forget {
                    topic: "t-dlq".into(),
                },
            ]);
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
                    id: id.parse().unwrap(),
                    content: letter.content,
                };
                assert_eq!(states.state(&item, Some(letter.dead_at)), found.state, "{id}");
                assert_eq!((found.state, found.state_by), *expected, "{id} {entries_first}");
            }
        }
    }
}

#[test]
fn an_entry_of_an_unknown_time_applies() {
    let mut fixture = Fixture::new();
    fixture.put(vec![at(3_600_010, "t-dlq", 0, 1, &[])]);
    let entry = update("t-dlq/0/1", Some(State::Discarded), None);
    fixture.apply(&[Change::Ledger(vec![entry])]);
    assert_eq!(fixture.get("t-dlq/0/1").unwrap().state, State::Discarded);
}
