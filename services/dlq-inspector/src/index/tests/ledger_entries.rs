//! Entries of the ledger and the states of dead letters.

use super::*;

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
fn a_ledger_entry_without_a_hash_that_is_older_than_the_record_is_ignored() {
    let mut fixture = Fixture::new();
    // The entries have the timestamp 9, and clocks may differ by a minute.
    let near = at(60_009, "t-dlq", 0, 1, &[]);
    let far = at(60_010, "t-dlq", 0, 2, &[]);
    let both = |state| {
        Change::Ledger(vec![
            update("t-dlq/0/1", state, None),
            update("t-dlq/0/2", state, None),
        ])
    };
    let discarded = Some(State::Discarded);
    for entries_first in [true, false] {
        fixture.apply(&[
            Change::ForgetLedger,
            Change::Forget {
                topic: "t-dlq".into(),
            },
        ]);
        let mut changes = [both(discarded), Change::Letters(vec![near.clone(), far.clone()])];
        if !entries_first {
            changes.reverse();
        }
        fixture.apply(&changes);
        let states = [1, 2].map(|offset| {
            let found = fixture.get(&format!("t-dlq/0/{offset}")).unwrap();
            (found.state, found.state_by)
        });
        let expected = [(State::Discarded, "ann".to_owned()), (State::Open, String::new())];
        assert_eq!(states, expected, "{entries_first}");
    }
    // An entry with the content hash applies regardless of its time.
    let named = update("t-dlq/0/2", discarded, Some(far.content));
    fixture.apply(&[Change::Ledger(vec![named])]);
    assert_eq!(fixture.get("t-dlq/0/2").unwrap().state, State::Discarded);
}
