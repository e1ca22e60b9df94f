//! Listing, filtering, paging, reading and counting dead letters.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use redeliver_core::Headers;
use redeliver_proto::error::reason;
use redeliver_proto::v1;
use redeliver_testkit::{FakeEndpoint, Reply, eventually, eventually_async};
use tonic::Code;
use tonic_types::StatusExt as _;

use crate::support::{DEADLINE, Dead, InspectorEnv, dead, ids};

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_of_a_worker_are_listed_with_all_fields() {
    let mut env = InspectorEnv::new("worker");
    let endpoint = FakeEndpoint::start(|_| Reply::status(422));
    // The inspector of this test reads only topics with the name prefix of the test.
    let pipeline = format!("{}-docs", env.base.name());
    env.base.set(
        &format!("pipelines.\"{pipeline}\".output"),
        &format!("{pipeline}-out"),
    );
    env.base.set(
        &format!("pipelines.\"{pipeline}\".http.url"),
        &format!("{}/x", endpoint.url()),
    );
    let _enricher = env.base.start("enricher", "worker", &[]);
    let mut inspector = env.start().await;
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let traceparent = format!("00-{trace}-b7ad6b7169203331-01");
    let sent = env
        .put(
            &pipeline.as_str().into(),
            0,
            (0..3)
                .map(|number| {
                    let headers = [
                        ("tenant", "x"),
                        ("job-id", "job-1"),
                        ("traceparent", traceparent.as_str()),
                    ];
                    dead(&format!("key-{number}"), format!("value-{number}"), &headers)
                })
                .collect(),
        )
        .await;
    let listed = inspector
        .until_listed("error_class = permanent AND headers.tenant = x", 3)
        .await;
    let mut origins = BTreeMap::new();
    for letter in &listed {
        assert_eq!(letter.dialect(), v1::HeaderDialect::Redeliver);
        assert_eq!(
            (letter.pipeline.as_str(), letter.error_code.as_str()),
            (pipeline.as_str(), "http.422")
        );
        assert_eq!(
            (letter.retry_count, letter.state()),
            (1, v1::DeadLetterState::Open)
        );
        assert_eq!(
            (letter.trace_id.as_str(), letter.job_id.as_str()),
            (trace, "job-1")
        );
        assert!(letter.failed_at.is_some() && letter.dead_at.is_some() && letter.origin_timestamp.is_some());
        assert_eq!(
            (letter.value_size, &letter.value, letter.headers.len()),
            (Some(7), &None, 0)
        );
        let origin = letter.origin.clone().unwrap();
        assert_eq!(origin.topic, pipeline);
        origins.insert((origin.partition, origin.offset), letter.key.clone());
    }
    let expected: BTreeMap<_, _> = sent
        .iter()
        .zip(0..)
        .map(|(position, number)| {
            (
                (position.partition, position.offset),
                Some(Bytes::from(format!("key-{number}"))),
            )
        })
        .collect();
    assert_eq!(origins, expected);
    // The log must not contain payloads.
    assert!(!inspector.process.output().contains("value-"));
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_of_every_dialect_are_found_by_filters() {
    let env = InspectorEnv::new("dialects");
    let topic = env.create_topic("foreign", 1).await;
    let with = |list: &[(&str, &[u8])]| {
        let headers = list.iter().map(|(name, value)| (*name, Some(*value)));
        Dead {
            headers: headers.collect(),
            ..dead("k", "v", &[])
        }
    };
    let records = vec![
        with(&[
            ("kafka_dlt-original-topic", b"orders"),
            ("kafka_dlt-original-partition", &7_i32.to_be_bytes()),
            ("kafka_dlt-original-offset", &42_i64.to_be_bytes()),
            ("kafka_dlt-original-consumer-group", b"billing"),
            (
                "kafka_dlt-exception-fqcn",
                b"org.springframework.kafka.listener.ListenerExecutionFailedException",
            ),
            (
                "kafka_dlt-exception-cause-fqcn",
                b"java.lang.IllegalStateException",
            ),
            ("kafka_dlt-exception-message", b"Listener failed; no customer"),
            ("kafka_dlt-exception-stacktrace", b"java.lang..."),
        ]),
        with(&[
            ("__connect.errors.topic", b"orders"),
            ("__connect.errors.partition", b"1"),
            ("__connect.errors.offset", b"2"),
            ("__connect.errors.connector.name", b"jdbc-sink"),
            (
                "__connect.errors.exception.class.name",
                b"org.apache.kafka.connect.errors.DataException",
            ),
            ("__connect.errors.exception.message", b"Unknown magic byte!"),
        ]),
        with(&[
            (
                "__streams.errors.exception",
                b"java.lang.RuntimeException: negative",
            ),
            ("__streams.errors.message", b"negative"),
            ("__streams.errors.topic", b"clicks"),
            ("__streams.errors.partition", b"0"),
            ("__streams.errors.offset", b"9"),
        ]),
        with(&[
            (
                "dead-letter-exception-class-name",
                b"io.vertx.core.impl.NoStackTraceThrowable",
            ),
            ("dead-letter-reason", b"no such movie"),
            ("dead-letter-topic", b"movies"),
            ("dead-letter-partition", b"3"),
            ("dead-letter-offset", b"4"),
        ]),
        with(&[
            ("__dlq.errors.topic", b"jobs"),
            ("__dlq.errors.partition", b"5"),
            ("__dlq.errors.offset", b"6"),
            ("__dlq.errors.group", b"workers"),
            ("__dlq.errors.delivery.count", b"5"),
            (
                "__dlq.errors.message",
                b"Offset delivery count exceeded the threshold.",
            ),
        ]),
        with(&[("tenant", b"none of these")]),
        with(&[
            ("kafka_dlt-original-topic", b"\xff\xfe"),
            ("kafka_dlt-original-offset", b"\x01"),
        ]),
    ];
    env.put(&topic, 0, records).await;
    let mut inspector = env.start().await;
    for (filter, offset) in [
        ("dialect = SPRING AND origin.topic = orders", 0),
        (
            "pipeline = billing AND origin.partition = 7 AND origin.offset = 42",
            0,
        ),
        ("error_code = java.lang.IllegalStateException", 0),
        ("dialect = connect pipeline = jdbc-sink", 1),
        ("error_message : \"magic byte\"", 1),
        (
            "error_code = java.lang.RuntimeException AND error_message = negative",
            2,
        ),
        ("dialect = HEADER_DIALECT_SMALLRYE", 3),
        ("origin.topic = movies origin.offset = 4", 3),
        ("retry_count >= 5 AND pipeline : work", 4),
        ("dialect = unknown", 5),
        (
            "headers.\"kafka_dlt-original-offset\" : * AND NOT origin.topic : *",
            6,
        ),
    ] {
        let listed = inspector.list(filter).await;
        assert_eq!(ids(&listed), [format!("{topic}/0/{offset}")], "{filter}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_is_returned_byte_for_byte() {
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
    let large: Vec<u8> = (0..700_000_u32).map(|number| (number % 251) as u8).collect();
    let records = vec![
        Dead {
            key: Some(Bytes::from_static(b"\xffkey")),
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
    let mut client = inspector.client().await;
    let mut get = async |offset: i64| {
        let id = format!("{topic}/0/{offset}");
        client
            .get_dead_letter(v1::GetDeadLetterRequest { id })
            .await
            .unwrap()
            .into_inner()
    };
    let letter = get(0).await;
    assert_eq!(redeliver_proto::convert::from_headers(&letter.headers), headers);
    assert_eq!(letter.key.as_deref(), Some(&b"\xffkey"[..]));
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
        let mut stream = client
            .read_payload(v1::ReadPayloadRequest { id })
            .await
            .unwrap()
            .into_inner();
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
        let refused = client
            .get_dead_letter(v1::GetDeadLetterRequest { id: id.clone() })
            .await
            .unwrap_err();
        assert_eq!(
            (refused.code(), reason(&refused).as_deref()),
            (code, Some(why)),
            "{id}"
        );
        let refused = client
            .read_payload(v1::ReadPayloadRequest { id: id.clone() })
            .await
            .unwrap_err();
        assert_eq!(
            (refused.code(), reason(&refused).as_deref()),
            (code, Some(why)),
            "{id}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_visit_every_dead_letter_once_in_either_order() {
    let env = InspectorEnv::new("pages");
    let topic = env.create_topic("a", 3).await;
    for partition in 0..3 {
        let records = (0..200).map(|number| {
            let class = if number % 2 == 0 { "permanent" } else { "expired" };
            dead(
                &format!("{partition}-{number}"),
                vec![7; 20_000],
                &[("error-class", class)],
            )
        });
        env.put(&topic, partition, records.collect()).await;
    }
    let mut inspector = env.start().await;
    let mut client = inspector.client().await;
    let mut visited = async |filter: &str, order_by: &str, page_size: i32, view: v1::DeadLetterView| {
        let mut request = v1::ListDeadLettersRequest {
            filter: filter.to_owned(),
            page_size,
            order_by: order_by.to_owned(),
            view: view.into(),
            ..v1::ListDeadLettersRequest::default()
        };
        let (mut all, mut pages) = (Vec::new(), 0);
        loop {
            let page = client
                .list_dead_letters(request.clone())
                .await
                .unwrap()
                .into_inner();
            pages += 1;
            all.extend(page.dead_letters);
            if page.next_page_token.is_empty() {
                return (all, pages);
            }
            request.page_token = page.next_page_token;
        }
    };
    let basic = v1::DeadLetterView::Basic;
    let (newest_first, pages) = visited("", "", 0, basic).await;
    assert_eq!((newest_first.len(), pages), (600, 12));
    let distinct: BTreeSet<&str> = newest_first.iter().map(|letter| letter.id.as_str()).collect();
    assert_eq!(distinct.len(), 600);
    let (mut oldest_first, _) = visited("", "dead_at", 77, basic).await;
    oldest_first.reverse();
    assert_eq!(ids(&newest_first), ids(&oldest_first));
    let (expired, _) = visited("error_class = expired", "dead_at desc", 7, basic).await;
    assert_eq!(expired.len(), 300);
    // 600 values of 20,000 bytes do not fit into one message.
    let (full, pages) = visited("", "", 1000, v1::DeadLetterView::Full).await;
    assert_eq!((ids(&full), pages), (ids(&newest_first), 4));
    assert!(
        full.iter()
            .all(|letter| letter.value.as_ref().is_some_and(|value| value.len() == 20_000))
    );
    assert!(full.iter().all(|letter| letter.headers.len() == 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_request_is_rejected_with_a_reason() {
    let env = InspectorEnv::new("wrong");
    let topic = env.create_topic("a", 1).await;
    env.put(
        &topic,
        0,
        (0..5).map(|number| dead(&number.to_string(), "v", &[])).collect(),
    )
    .await;
    let mut inspector = env.start().await;
    let mut client = inspector.client().await;
    let list = |filter: &str| v1::ListDeadLettersRequest {
        filter: filter.to_owned(),
        page_size: 2,
        ..v1::ListDeadLettersRequest::default()
    };
    let refused = client
        .list_dead_letters(list("topic : a AND colour = red"))
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(
        refused
            .message()
            .starts_with("filter: unknown field `colour`; known fields are"),
        "{refused:?}"
    );
    let info = refused.get_details_error_info().unwrap();
    assert_eq!(
        (info.reason.as_str(), info.domain.as_str()),
        ("FILTER_INVALID", "redeliver")
    );
    assert_eq!(info.metadata["position"], "15");
    assert_eq!(
        refused.get_details_bad_request().unwrap().field_violations[0].field,
        "filter"
    );

    let token = client
        .list_dead_letters(list(""))
        .await
        .unwrap()
        .into_inner()
        .next_page_token;
    assert_ne!(token, "");
    let refusals = [
        (
            v1::ListDeadLettersRequest {
                page_size: -1,
                ..list("")
            },
            "PAGE_SIZE_INVALID",
        ),
        (
            v1::ListDeadLettersRequest {
                order_by: "key".into(),
                ..list("")
            },
            "ORDER_INVALID",
        ),
        (
            v1::ListDeadLettersRequest {
                page_token: "x".into(),
                ..list("")
            },
            "TOKEN_INVALID",
        ),
        (
            v1::ListDeadLettersRequest {
                page_token: token.clone(),
                ..list("topic : a")
            },
            "TOKEN_OF_ANOTHER_QUESTION",
        ),
        (
            v1::ListDeadLettersRequest {
                page_token: token.clone(),
                order_by: "dead_at".into(),
                ..list("")
            },
            "TOKEN_OF_ANOTHER_QUESTION",
        ),
    ];
    for (request, why) in refusals {
        let refused = client.list_dead_letters(request).await.unwrap_err();
        assert_eq!(
            (refused.code(), reason(&refused).as_deref()),
            (Code::InvalidArgument, Some(why))
        );
    }
    // Page size and view may change between pages.
    let request = v1::ListDeadLettersRequest {
        page_token: token,
        page_size: 100,
        view: v1::DeadLetterView::Full.into(),
        ..list("")
    };
    let rest = client.list_dead_letters(request).await.unwrap().into_inner();
    assert_eq!((rest.dead_letters.len(), rest.next_page_token.as_str()), (3, ""));
    let refused = client
        .get_dead_letter_stats(v1::GetDeadLetterStatsRequest {
            filter: "(".into(),
            ..v1::GetDeadLetterStatsRequest::default()
        })
        .await
        .unwrap_err();
    assert_eq!(reason(&refused).as_deref(), Some("FILTER_INVALID"));
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
        let stats = inspector
            .client()
            .await
            .get_dead_letter_stats(v1::GetDeadLetterStatsRequest::default())
            .await;
        let topics = stats.unwrap().into_inner().topics;
        if topics[0].until_removal.is_some() {
            Ok(())
        } else {
            Err(format!("{topics:?}"))
        }
    })
    .await;
    let mut client = inspector.client().await;
    let mut stats = async |filter: &str| {
        let request = v1::GetDeadLetterStatsRequest {
            filter: filter.to_owned(),
            ..v1::GetDeadLetterStatsRequest::default()
        };
        client.get_dead_letter_stats(request).await.unwrap().into_inner()
    };
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
        match expected.iter().find(|line| !metrics.contains(*line)) {
            None => Ok(()),
            Some(missing) => Err(format!("{missing}\n{metrics}")),
        }
    });
    let of_empty = format!("redeliver_dlq_removal_timestamp_seconds{{topic=\"{second}\"}}");
    assert!(!inspector.metrics().contains(&of_empty));
}
