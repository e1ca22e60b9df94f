use proptest::prelude::*;
use redeliver_core::Headers;
use redeliver_core::record::Position;

use super::*;

/// A record and its groups.
type Grouped = (usize, GroupsOf);

fn groups_of(record: &Grouped) -> &GroupsOf {
    &record.1
}

fn group(name: u8) -> Group {
    Group::Of(Bytes::from(vec![name]))
}

fn record(number: usize, key: u8, tenant: u8) -> Grouped {
    let groups = GroupsOf {
        ordered: Some(group(key)),
        limited: Some(group(tenant)),
    };
    (number, groups)
}

fn limited_to(concurrency: usize) -> Groups<Grouped> {
    Groups::new(&Grouping {
        ordering: Ordering::Key,
        limit: Some(GroupLimit {
            by: GroupBy::Key,
            concurrency,
        }),
        ..Grouping::default()
    })
}

#[test]
fn the_next_record_of_a_key_starts_when_the_one_before_has_ended() {
    let mut groups = limited_to(10);
    let mut enter = |number, key| groups.enter(record(number, key, 0), groups_of).is_some();
    assert_eq!(
        [enter(0, 1), enter(1, 1), enter(2, 2), enter(3, 1)],
        [true, false, true, false]
    );
    let mut leave = |key| {
        let next = groups.leave(&record(0, key, 0).1, groups_of).into_iter();
        next.map(|(number, _)| number).collect::<Vec<_>>()
    };
    assert_eq!(leave(1), [1]);
    assert_eq!(leave(1), [3]);
    assert_eq!((leave(1), leave(2)), (vec![], vec![]));
    assert!(groups.ordered.groups.is_empty() && groups.limited.groups.is_empty());
}

#[test]
fn a_removed_record_that_waits_for_its_limit_leaves_its_order() {
    let mut groups = limited_to(1);
    assert!(groups.enter(record(0, 1, 7), groups_of).is_some());
    assert!(groups.enter(record(1, 2, 7), groups_of).is_none());
    assert!(groups.enter(record(2, 2, 8), groups_of).is_none());
    let removed = groups.remove(|(number, _)| *number == 1, groups_of);
    assert_eq!(removed.records.len(), 1);
    let next: Vec<_> = removed
        .left
        .iter()
        .flat_map(|left| groups.leave(left, groups_of))
        .collect();
    assert_eq!(next.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [2]);
}

proptest! {
    /// Whatever ends when: each record starts once, those of a key in their order and one at a time, and no more of a tenant
    /// than its limit.
    #[test]
    fn records_start_in_the_order_of_their_key_and_within_the_limit_of_their_tenant(
        records in proptest::collection::vec((0..4_u8, 0..3_u8), 1..60),
        choices in proptest::collection::vec((any::<bool>(), any::<usize>()), 0..400),
        limit in 1..4_usize,
        removed in any::<u64>(),
    ) {
        let mut groups = limited_to(limit);
        let mut arriving = records.iter().enumerate().map(|(number, (key, tenant))| record(number, *key, *tenant));
        let mut running: Vec<Grouped> = Vec::new();
        let mut started: Vec<usize> = Vec::new();
        let mut arrived = 0;
        let mut gone = 0;
        let mut choices = choices.into_iter();
        loop {
            let (is_arrival, which) = choices.next().unwrap_or((arrived < records.len(), 0));
            let ready = if is_arrival && let Some(record) = arriving.next() {
                arrived += 1;
                groups.enter(record, groups_of).into_iter().collect()
            } else if !running.is_empty() {
                let ended = running.remove(which % running.len());
                groups.leave(&ended.1, groups_of)
            } else if arrived == records.len() {
                break;
            } else {
                continue;
            };
            for record in &ready {
                started.push(record.0);
            }
            running.extend(ready);
            for tenant in 0..3 {
                let of_tenant = running.iter().filter(|(number, _)| records[*number].1 == tenant);
                prop_assert!(of_tenant.count() <= limit);
            }
            for key in 0..4 {
                let of_key = running.iter().filter(|(number, _)| records[*number].0 == key);
                prop_assert!(of_key.count() <= 1);
            }
            if arrived == records.len() && gone == 0 && removed % 2 == 0 {
                let is_removed = |(number, _): &Grouped| (removed >> (number % 60)) & 2 != 0;
                let removed = groups.remove(is_removed, groups_of);
                gone = removed.records.len();
                for left in removed.left {
                    let next = groups.leave(&left, groups_of);
                    started.extend(next.iter().map(|(number, _)| *number));
                    running.extend(next);
                }
            }
        }
        prop_assert_eq!(started.len() + gone, records.len());
        for key in 0..4 {
            let of_key: Vec<_> = started.iter().filter(|number| records[**number].0 == key).collect();
            prop_assert!(of_key.is_sorted());
        }
        prop_assert!(groups.ordered.groups.is_empty() && groups.limited.groups.is_empty());
    }
}

#[test]
fn a_property_that_is_missing_is_a_group_of_its_own() {
    let record = |key: Option<&'static str>, header: Option<&'static str>, value: &'static str| Record {
        position: Position {
            topic: "docs".into(),
            partition: 3,
            offset: 9,
        },
        timestamp: None,
        key: key.map(Into::into),
        value: Some(value.into()),
        headers: header
            .map(|tenant| ("tenant", Some(tenant.as_bytes())))
            .into_iter()
            .collect::<Headers>(),
        unreadable_headers: 0,
    };
    let of = |text: &'static str| Group::Of(text.into());
    let full = record(Some("k"), Some("acme"), r#"{"tenant": {"id": 7}}"#);
    let empty = record(None, None, "hello");
    for (by, expected) in [
        (GroupBy::Key, of("k")),
        (GroupBy::Header("tenant".to_owned()), of("acme")),
        (GroupBy::Pointer("/tenant/id".to_owned()), of("7")),
        (GroupBy::Pointer("/tenant".to_owned()), Group::Without),
    ] {
        assert_eq!(by.group_of(&full), expected, "{by:?}");
        assert_eq!(by.group_of(&empty), Group::Without, "{by:?}");
    }
    let ordered = |ordering, record: &Record| {
        let grouping = Grouping {
            ordering,
            ..Grouping::default()
        };
        grouping.of(record).ordered
    };
    assert_eq!(ordered(Ordering::None, &full), None);
    assert_eq!(ordered(Ordering::Key, &full), Some(of("k")));
    assert_eq!(ordered(Ordering::Key, &empty), None);
    let partition = Some(Group::Partition("docs".into(), 3));
    assert_eq!(ordered(Ordering::Partition, &full), partition);
}
