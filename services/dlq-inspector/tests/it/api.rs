//! Listing, filtering, paging, reading and counting dead letters.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::{Clock as _, Headers, SystemClock};
use redeliver_proto::v1;
use redeliver_testkit::{ensure, eventually, eventually_async};
use tonic::Code;
use tonic_types::StatusExt as _;

use crate::support::{
    DEADLINE, Dead, InspectorEnv, assert_refused, dead, get_letter, get_payload, get_stats, ids,
};

#[tokio::test(flavor = "multi_thread")]
async fn record_is_returned_byte_for_byte() {
    let env = InspectorEnv::new("bytes");
    let topic = env.create_topic("a", 1).await;
    let headers: Headers = [
        ("tenant", Some(&b"x"[..])),
        ("binary", Some(&b"\x00\xff\xfe"[..])),
        ("tenant", None),
        ("tenant", Some(&b""[..])),
        ("error-code", Some(&b"http.404"[..])),
    ]
    .into_iter()
    .collect();
    // The index has a part of it.
    let key: Bytes = [b"\xff", &vec![b'k'; 100 << 10][..]].concat().into();
    let large: Vec<u8> = (0..700_000_u32).map(|number| (number % 251) as u8).collect();
    let records = vec![
        Dead {
            key: Some(key.clone()),
            value: Some(large.clone().into()),
            headers: headers.clone(),
        },
        Dead {
            key: None,
            value: None,
            headers: Headers::new(),
        },
        Dead {
            key: Some(Bytes::new()),
            value: Some(Bytes::new()),
            headers: Headers::new(),
        },
    ];
    env.put(&topic, 0, records).await;
    let mut inspector = env.start().await;
    let listed = inspector.list("headers.tenant = x").await;
    assert!(listed[0].key_truncated && key.starts_with(listed[0].key.as_ref().unwrap()));
    let mut client = inspector.client().await;
    let mut get = async |offset: i64| {
        let letter = get_letter(&mut client, &format!("{topic}/0/{offset}")).await;
        letter.unwrap()
    };
    let letter = get(0).await;
    assert_eq!(redeliver_proto::convert::from_headers(&letter.headers), headers);
    assert_eq!(letter.key, Some(key));
    assert_eq!(
        (letter.value.as_deref(), letter.value_size),
        (Some(&large[..]), Some(700_000))
    );
    assert!(!letter.value_truncated);
    let null = get(1).await;
    assert_eq!((null.key, null.value, null.value_size), (None, None, None));
    let empty = get(2).await;
    assert_eq!(
        (empty.key, empty.value, empty.value_size),
        (Some(Bytes::new()), Some(Bytes::new()), Some(0))
    );

    for (offset, expected, chunks) in [(0, &large[..], 3), (1, &[][..], 0), (2, &[][..], 0)] {
        let id = format!("{topic}/0/{offset}");
        let stream = client.read_payload(v1::ReadPayloadRequest { id }).await;
        let mut stream = stream.unwrap().into_inner();
        let (mut payload, mut count) = (Vec::new(), 0);
        while let Some(message) = stream.message().await.unwrap() {
            payload.extend_from_slice(&message.chunk);
            count += 1;
        }
        assert_eq!((payload.as_slice() == expected, count), (true, chunks));
    }

    for (id, code, why) in [
        (format!("{topic}/0/3"), Code::NotFound, "DEAD_LETTER_NOT_FOUND"),
        (
            format!("{}-none-dlq/0/3", env.base.name()),
            Code::NotFound,
            "DEAD_LETTER_NOT_FOUND",
        ),
        ("nonsense".to_owned(), Code::InvalidArgument, "ID_INVALID"),
    ] {
        assert_refused(&get_letter(&mut client, &id).await.unwrap_err(), code, why);
        assert_refused(&get_payload(&mut client, &id).await.unwrap_err(), code, why);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_are_bounded_in_bytes() {
    let env = InspectorEnv::new("pages");
    let topic = env.create_topic("a", 3).await;
    for partition in 0..3 {
        let records = (0..200).map(|number| dead(&number.to_string(), vec![7; 20_000], &[("tenant", "x")]));
        env.put(&topic, partition, records.collect()).await;
    }
    let mut inspector = env.start().await;
    let mut client = inspector.client().await;
    let mut visited = async |order_by: &str, page_size: i32, view: v1::DeadLetterView| {
        let mut request = v1::ListDeadLettersRequest {
            page_size,
            order_by: order_by.to_owned(),
            view: view.into(),
            ..v1::ListDeadLettersRequest::default()
        };
        let (mut all, mut pages) = (Vec::new(), 0);
        loop {
            let page = client.list_dead_letters(request.clone()).await;
            let page = page.unwrap().into_inner();
            pages += 1;
            all.extend(page.dead_letters);
            if page.next_page_token.is_empty() {
                return (all, pages);
            }
            request.page_token = page.next_page_token;
        }
    };
    let (newest_first, pages) = visited("", 0, v1::DeadLetterView::Basic).await;
    assert_eq!((newest_first.len(), pages), (600, 12));
    let (mut oldest_first, _) = visited("dead_at", 77, v1::DeadLetterView::Basic).await;
    oldest_first.reverse();
    assert_eq!(ids(&newest_first), ids(&oldest_first));
    // 600 values of 20,000 bytes do not fit into one message.
    let (full, pages) = visited("", 1000, v1::DeadLetterView::Full).await;
    assert_eq!((ids(&full), pages), (ids(&newest_first), 4));
    let is_whole = |letter: &v1::DeadLetter| {
        letter.headers.len() == 1 && letter.value.as_ref().is_some_and(|value| value.len() == 20_000)
    };
    assert!(full.iter().all(is_whole));
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_request_is_refused_with_reason() {
    let env = InspectorEnv::new("wrong");
    let topic = env.create_topic("a", 1).await;
    let letters = (0..5).map(|number| dead(&number.to_string(), "v", &[]));
    env.put(&topic, 0, letters.collect()).await;
    let mut inspector = env.start().await;
    let mut client = inspector.client().await;
    let list = |filter: &str, page_token: &str| v1::ListDeadLettersRequest {
        filter: filter.to_owned(),
        page_size: 2,
        page_token: page_token.to_owned(),
        ..v1::ListDeadLettersRequest::default()
    };
    let unknown = client.list_dead_letters(list("topic : a AND colour = red", ""));
    let refused = unknown.await.unwrap_err();
    let expected = "filter: unknown field `colour`; known fields are";
    assert!(refused.message().starts_with(expected), "{refused:?}");
    let info = refused.get_details_error_info().unwrap();
    assert_eq!((&*info.reason, &*info.domain), ("FILTER_INVALID", "redeliver"));
    assert_eq!(info.metadata["position"], "15");
    let fields = refused.get_details_bad_request().unwrap();
    assert_eq!(fields.field_violations[0].field, "filter");

    let first = client.list_dead_letters(list("", "")).await.unwrap();
    let token = first.into_inner().next_page_token;
    let by_time = v1::ListDeadLettersRequest {
        order_by: "dead_at".into(),
        ..list("", &token)
    };
    for (request, why) in [
        (list("", "x"), "TOKEN_INVALID"),
        (list("topic : a", &token), "TOKEN_OF_ANOTHER_QUESTION"),
        (by_time, "TOKEN_OF_ANOTHER_QUESTION"),
    ] {
        let refused = client.list_dead_letters(request).await.unwrap_err();
        assert_refused(&refused, Code::InvalidArgument, why);
    }
    // Page size and view may change between pages.
    let request = v1::ListDeadLettersRequest {
        page_size: 100,
        view: v1::DeadLetterView::Full.into(),
        ..list("", &token)
    };
    let rest = client.list_dead_letters(request).await.unwrap().into_inner();
    assert_eq!((rest.dead_letters.len(), rest.next_page_token.as_str()), (3, ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn counts_are_grouped_by_topic() {
    let env = InspectorEnv::new("stats");
    let (first, second) = (env.create_topic("a", 2).await, env.create_topic("b", 1).await);
    let classes = [("permanent", 3), ("exhausted", 2)];
    for (class, count) in classes {
        let records = (0..count).map(|number| dead(&number.to_string(), "v", &[("error-class", class)]));
        env.put(&first, 1, records.collect()).await;
    }
    let mut inspector = env.start().await;
    env.put_ledger(
        &format!("{first}/1/0"),
        Some(v1::LedgerEntry {
            state: v1::DeadLetterState::Discarded.into(),
            ..v1::LedgerEntry::default()
        }),
    )
    .await;
    inspector.until_listed("state = DISCARDED", 1).await;
    eventually_async("retention is known", DEADLINE, async || {
        let topics = get_stats(&mut inspector.client().await, "").await.topics;
        ensure(topics[0].until_removal.is_some(), format!("{topics:?}"))
    })
    .await;
    let mut client = inspector.client().await;
    let mut stats = async |filter: &str| get_stats(&mut client, filter).await;
    let all = stats("").await;
    let names: Vec<&str> = all.topics.iter().map(|topic| topic.topic.as_str()).collect();
    assert_eq!(names, [&*first, &*second]);
    let topic = &all.topics[0];
    assert_eq!(
        (topic.open, topic.total, topic.last_hour, topic.last_day),
        (Some(4), 5, 5, 5)
    );
    let by_class = [("exhausted".to_owned(), 2), ("permanent".to_owned(), 2)];
    assert_eq!(
        topic
            .open_by_class
            .clone()
            .into_iter()
            .collect::<BTreeMap<_, _>>(),
        by_class.into()
    );
    let millis = |time: &Option<_>| redeliver_proto::convert::from_timestamp(time.as_ref().unwrap()).unwrap();
    assert!(millis(&topic.newest) >= millis(&topic.oldest));
    // The topic's retention is 7 days.
    assert_eq!(topic.removal(), v1::Removal::ByAge);
    let left = topic.until_removal.unwrap().seconds;
    assert!((604_800 - 600..=604_800).contains(&left), "{left}");
    let empty = &all.topics[1];
    assert_eq!(
        (empty.open, empty.total, empty.oldest, empty.until_removal),
        (Some(0), 0, None, None)
    );
    let expired = stats("error_class = exhausted").await;
    assert_eq!(
        (
            expired.topics.len(),
            expired.topics[0].open,
            expired.topics[0].total
        ),
        (1, Some(2), 2)
    );

    let in_days = |days: u64| SystemClock.now().after(Duration::from_secs(days * 86_400));
    for (days, expected) in [(6, 0), (8, 5)] {
        let expiring = stats(&format!(r#"expires_at < "{}""#, in_days(days))).await;
        let total: u64 = expiring.topics.iter().map(|topic| topic.total).sum();
        assert_eq!(total, expected, "{days}");
    }
    let mut client = inspector.client().await;
    let mut counts = async |by: &[&str], zone: &str| {
        let request = v1::GetDeadLetterStatsRequest {
            by: by.iter().map(|name| (*name).to_owned()).collect(),
            zone: zone.to_owned(),
            limit: 2,
            ..v1::GetDeadLetterStatsRequest::default()
        };
        let counted = client.get_dead_letter_stats(request).await;
        counted.map(|counted| counted.into_inner().counts.unwrap())
    };
    let by_class = counts(&["error_class", "state", "topic"], "").await.unwrap();
    let row = |count: &v1::DeadLetterCount| (count.values.join(" "), count.count);
    assert_eq!((by_class.total, by_class.other, by_class.counts.len()), (5, 1, 2));
    assert_eq!(row(&by_class.counts[0]), (format!("exhausted OPEN {first}"), 2));
    let by_day = counts(&["day", "pipeline"], "Asia/Tokyo").await.unwrap();
    assert_eq!(by_day.total, 5);
    for (by, zone, says) in [
        (&["key"][..], "", "by: `key` is not one of topic, pipeline, "),
        (&["day", "day"], "", "by: `day` is there twice"),
        (&["headers.a"; 6], "", "by: has 6 fields; at most 5"),
        (
            &["day"],
            "Mars/Base",
            "zone: `Mars/Base` is not an IANA time zone",
        ),
    ] {
        let refused = counts(by, zone).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().starts_with(says), "{}", refused.message());
    }

    let removed = millis(&topic.oldest).as_millis() / 1_000 + 604_800;
    let expected = [
        format!("redeliver_dlq_indexed_total{{topic=\"{first}\"}} 5\n"),
        format!("redeliver_dlq_index_lag{{topic=\"{first}\"}} 0\n"),
        format!("redeliver_dlq_open{{topic=\"{first}\"}} 4\n"),
        format!("redeliver_dlq_open{{topic=\"{second}\"}} 0\n"),
        format!("redeliver_dlq_removal_timestamp_seconds{{topic=\"{first}\"}} {removed}\n"),
        "redeliver_dlq_index_size_bytes ".to_owned(),
        "redeliver_dlq_call_seconds_count{method=\"GetDeadLetterStats\",code=\"OK\"} ".to_owned(),
    ];
    eventually("the metrics are updated", DEADLINE, || {
        let metrics = inspector.metrics();
        let missing: Vec<_> = expected.iter().filter(|line| !metrics.contains(*line)).collect();
        ensure(missing.is_empty(), format!("{missing:?}\n{metrics}"))
    });
    let of_empty = format!("redeliver_dlq_removal_timestamp_seconds{{topic=\"{second}\"}}");
    assert!(!inspector.metrics().contains(&of_empty));
}
