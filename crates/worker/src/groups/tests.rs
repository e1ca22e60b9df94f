use redeliver_core::Headers;
use redeliver_core::record::Position;
use redeliver_testkit::fuzz::{FEW, check_each};
use redeliver_testkit::valid_json;

use super::*;

fn group(name: &'static str) -> Group {
    Group::Of(name.into())
}

#[test]
fn full_group_admits_in_order() {
    let mut groups = Groups::new(2);
    let mut enter = |number| groups.enter(Some(group("noisy")), number);
    assert_eq!(
        [enter(0), enter(1), enter(2), enter(3)],
        [Some(0), Some(1), None, None]
    );
    assert_eq!(groups.enter(Some(group("quiet")), 4), Some(4));
    assert_eq!(groups.enter(None, 5), Some(5));
    let noisy = group("noisy");
    assert_eq!(groups.next(Some(&noisy)), None, "no room");
    assert_eq!(groups.waiting(), 2);
    assert_eq!(groups.leave(Some(&noisy)), Some(2));
    // The room is that of the next one, if the one before does not want it.
    assert_eq!(groups.next(Some(&noisy)), Some(3));
    assert_eq!(groups.enter(Some(noisy.clone()), 3), Some(3));
    assert_eq!(groups.enter(Some(noisy.clone()), 6), None);
    assert_eq!(groups.remove(|number| *number == 6), [6]);
    for group in [&noisy, &noisy, &group("quiet")] {
        assert_eq!(groups.leave(Some(group)), None);
    }
    assert!(groups.is_empty());
    assert_eq!(groups.waiting(), 0);
}

#[test]
fn missing_property_is_its_own_group() {
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
    for (id, expected) in [
        ("18446744073709551617", of("18446744073709551617")),
        ("18446744073709551616", of("18446744073709551616")),
        ("7.0", of("7")),
        (r#""\ud800""#, Group::Of(Bytes::from_static(b"\xed\xa0\x80"))),
    ] {
        let record = Record {
            value: Some(format!(r#"{{"tenant":{{"id":{id}}},"x":[1e400,"\udc00"]}}"#).into()),
            ..full.clone()
        };
        assert_eq!(
            GroupBy::Pointer("/tenant/id".to_owned()).group_of(&record),
            expected,
            "{id}"
        );
    }
    let by = GroupBy::Pointer("/tenant/id".to_owned());
    let document = |random: &mut fastrand::Rng| {
        let tenant = valid_json::object(random, &[("id", "18446744073709551617")]);
        valid_json::object(random, &[("tenant", &tenant)]).into_bytes()
    };
    check_each("groups", FEW, document, |input| {
        let record = Record {
            value: Some(Bytes::copy_from_slice(input)),
            ..full.clone()
        };
        assert_eq!(by.group_of(&record), of("18446744073709551617"));
    });
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
