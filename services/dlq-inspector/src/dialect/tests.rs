use proptest::prelude::*;
use redeliver_core::headers::{ERROR_RESPONSE, Origin, write_failure, write_lineage};
use redeliver_core::{ErrorClass, Failure};

use super::*;

fn headers(list: &[(&str, &[u8])]) -> Headers {
    list.iter().map(|(name, value)| (*name, Some(*value))).collect()
}

#[test]
fn headers_of_a_worker_are_parsed() {
    let mut written = headers(&[
        ("tenant", b"a"),
        (
            "traceparent",
            b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ),
        ("job-id", b"01HZX"),
    ]);
    let origin = Origin {
        topic: "docs".into(),
        partition: 3,
        offset: 44,
        timestamp: Some(Timestamp::from_millis(5)),
    };
    write_lineage(&mut written, "crawl", &origin, 2);
    let failure = Failure::new(ErrorClass::Exhausted, "http.503", "no answer");
    write_failure(&mut written, &failure, Timestamp::from_millis(7));
    written.push_text(ERROR_RESPONSE, "busy");
    let expected = Facts {
        dialect: Dialect::Redeliver,
        pipeline: "crawl".into(),
        error_class: "exhausted".into(),
        error_code: "http.503".into(),
        error_message: "no answer".into(),
        error_response: "busy".into(),
        failed_at: Some(Timestamp::from_millis(7)),
        retry_count: 2,
        origin: Some(OriginPosition {
            topic: "docs".into(),
            partition: Some(3),
            offset: Some(44),
        }),
        origin_timestamp: Some(Timestamp::from_millis(5)),
        trace_id: Some("0af7651916cd43dd8448eb211c80319c".into()),
        job_id: Some("01HZX".into()),
    };
    assert_eq!(Facts::read(&written), expected);
}

#[test]
fn spring_headers_have_binary_numbers() {
    let facts = Facts::read(&headers(&[
        ("kafka_dlt-original-topic", b"orders"),
        ("kafka_dlt-original-partition", &2_i32.to_be_bytes()),
        ("kafka_dlt-original-offset", &77_i64.to_be_bytes()),
        (
            "kafka_dlt-original-timestamp",
            &1_700_000_000_000_i64.to_be_bytes(),
        ),
        ("kafka_dlt-original-timestamp-type", b"CreateTime"),
        ("kafka_dlt-original-topic", b"orders-retry-0"),
        ("kafka_dlt-original-offset", &1_i64.to_be_bytes()),
        ("kafka_dlt-original-consumer-group", b"billing"),
        (
            "kafka_dlt-exception-fqcn",
            b"org.springframework.kafka.listener.ListenerExecutionFailedException",
        ),
        (
            "kafka_dlt-exception-cause-fqcn",
            b"java.lang.IllegalStateException",
        ),
        (
            "kafka_dlt-exception-message",
            b"Listener failed; no such customer",
        ),
        ("retry_topic-attempts", &4_i32.to_be_bytes()),
    ]));
    assert_eq!(facts.dialect, Dialect::Spring);
    assert_eq!(
        facts.origin,
        Some(OriginPosition {
            topic: "orders".into(),
            partition: Some(2),
            offset: Some(77)
        })
    );
    assert_eq!(
        facts.origin_timestamp,
        Some(Timestamp::from_millis(1_700_000_000_000))
    );
    assert_eq!((facts.pipeline.as_str(), facts.retry_count), ("billing", 4));
    assert_eq!(facts.error_code, "java.lang.IllegalStateException");
    assert_eq!(facts.error_message, "Listener failed; no such customer");
    assert_eq!(facts.error_class, "");
    // Java's BigInteger omits leading zero bytes.
    let short = Facts::read(&headers(&[
        ("kafka_dlt-exception-fqcn", b"x.Y"),
        (
            "retry_topic-original-timestamp",
            &1_700_000_000_000_i64.to_be_bytes()[2..],
        ),
    ]));
    assert_eq!(
        short.origin_timestamp,
        Some(Timestamp::from_millis(1_700_000_000_000))
    );
}

#[test]
fn missing_timestamp_is_none() {
    for minus_one in [&(-1_i64).to_be_bytes()[..], b"\xff"] {
        let facts = Facts::read(&headers(&[
            ("kafka_dlt-original-topic", b"orders"),
            ("kafka_dlt-original-timestamp", minus_one),
        ]));
        assert_eq!(facts.origin_timestamp, None);
    }
    let zero = Facts::read(&headers(&[
        ("kafka_dlt-original-topic", b"orders"),
        ("kafka_dlt-original-timestamp", &[0]),
    ]));
    assert_eq!(zero.origin_timestamp, Some(Timestamp::from_millis(0)));
}

#[test]
fn binary_numbers_are_readable() {
    let time = 1_700_000_000_000_i64.to_be_bytes();
    for (header, value, expected) in [
        (
            "kafka_dlt-original-partition",
            &2_i32.to_be_bytes()[..],
            Some("2"),
        ),
        ("kafka_dlt-original-offset", &77_i64.to_be_bytes(), Some("77")),
        (
            "kafka_dlt-original-timestamp",
            &time,
            Some("2023-11-14T22:13:20.000Z"),
        ),
        (
            "kafka_dlt-original-timestamp",
            &(-1_i64).to_be_bytes(),
            Some("-1"),
        ),
        (
            "retry_topic-backoff-timestamp",
            &time[2..],
            Some("2023-11-14T22:13:20.000Z"),
        ),
        ("retry_topic-attempts", &3_i32.to_be_bytes(), Some("3")),
        ("kafka_dlt-original-offset", b"", None),
        ("kafka_dlt-original-offset", b"123456789", None),
        ("kafka_dlt-original-topic", b"orders", None),
        ("__connect.errors.offset", b"12", None),
        ("tenant", &2_i32.to_be_bytes(), None),
    ] {
        assert_eq!(
            readable_number(header, value).as_deref(),
            expected,
            "{header} {value:?}"
        );
    }
}

#[test]
fn other_frameworks_write_text() {
    let connect: &[(&str, &[u8])] = &[
        ("__connect.errors.topic", b"orders"),
        ("__connect.errors.partition", b"2"),
        ("__connect.errors.offset", b"9223372036854775807"),
        ("__connect.errors.connector.name", b"jdbc-sink"),
        ("__connect.errors.exception.class.name", b"DataException"),
        ("__connect.errors.exception.message", b"Converting failed"),
    ];
    // The exception includes its message.
    let streams: &[(&str, &[u8])] = &[
        ("__streams.errors.exception", b"RuntimeException: negative: -1"),
        ("__streams.errors.message", b"negative: -1"),
        ("__streams.errors.topic", b"clicks"),
        ("__streams.errors.partition", b"0"),
        ("__streams.errors.offset", b"12"),
    ];
    // The newest failure is the first one, of an exception without a cause.
    let smallrye: &[(&str, &[u8])] = &[
        ("dead-letter-exception-class-name", b"second.Failure"),
        ("dead-letter-reason", b"again"),
        ("dead-letter-topic", b"movies-dlq"),
        ("dead-letter-partition", b"1"),
        ("dead-letter-offset", b"2"),
        ("dead-letter-exception-class-name", b"first.Failure"),
        ("dead-letter-reason", b"once"),
        ("dead-letter-cause-class-name", b"java.io.IOException"),
        ("dead-letter-cause", b"connection refused"),
        ("dead-letter-topic", b"movies"),
        ("dead-letter-partition", b"3"),
        ("dead-letter-offset", b"4"),
    ];
    let share: &[(&str, &[u8])] = &[
        ("__dlq.errors.topic", b"jobs"),
        ("__dlq.errors.partition", b"5"),
        ("__dlq.errors.offset", b"6"),
        ("__dlq.errors.group", b"workers"),
        ("__dlq.errors.delivery.count", b"3"),
        ("__dlq.errors.message", b"Offset rejected"),
    ];
    for (written, dialect, [pipeline, code, message], retries, origin) in [
        (
            connect,
            Dialect::Connect,
            ["jdbc-sink", "DataException", "Converting failed"],
            0,
            ("orders", 2, i64::MAX),
        ),
        (
            streams,
            Dialect::Streams,
            ["", "RuntimeException", "negative: -1"],
            0,
            ("clicks", 0, 12),
        ),
        (
            smallrye,
            Dialect::SmallRye,
            ["", "second.Failure", "again"],
            0,
            ("movies", 3, 4),
        ),
        (
            share,
            Dialect::ShareGroup,
            ["workers", "", "Offset rejected"],
            3,
            ("jobs", 5, 6),
        ),
    ] {
        let facts = Facts::read(&headers(written));
        assert_eq!((facts.dialect, facts.retry_count), (dialect, retries));
        assert_eq!(
            [&*facts.pipeline, &facts.error_code, &facts.error_message],
            [pipeline, code, message]
        );
        let found = facts.origin.unwrap();
        assert_eq!(
            (&*found.topic, found.partition, found.offset),
            (origin.0, Some(origin.1), Some(origin.2))
        );
    }
}

#[test]
fn redeliver_headers_take_precedence() {
    let facts = Facts::read(&headers(&[
        ("__connect.errors.topic", b"orders"),
        ("error-class", b"permanent"),
        ("original-topic", b"not a topic"),
        ("original-offset", b"-1"),
        ("retry-count", b"many"),
        ("error-timestamp", b"yesterday"),
    ]));
    assert_eq!(
        (facts.dialect, facts.error_class.as_str()),
        (Dialect::Redeliver, "permanent")
    );
    assert_eq!(
        (facts.origin, facts.retry_count, facts.failed_at),
        (None, 0, None)
    );
    let plain = Facts::read(&headers(&[
        ("pipeline", b"x"),
        ("retry-count", b"3"),
        ("tenant", b"t"),
    ]));
    assert_eq!(plain, Facts::default());
}

#[test]
fn null_headers_are_ignored() {
    assert_eq!(BY_HEADER.len(), RULES.len());
    let nulls: Headers = [
        ("error-class", None),
        ("error-class", Some(&b"expired"[..])),
        ("error-class", None),
    ]
    .into_iter()
    .collect();
    assert_eq!(Facts::read(&nulls).error_class, "expired");
    for invalid in [
        "",
        "00",
        "00-0af7651916cd43dd8448eb211c80319-b7ad6b7169203331-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
    ] {
        assert_eq!(trace_id(invalid.as_bytes()), None, "{invalid}");
    }
}

fn any_header() -> impl Strategy<Value = (String, Option<Vec<u8>>)> {
    let known: Vec<&'static str> = RULES
        .iter()
        .map(|rule| rule.header)
        .chain([TRACEPARENT, JOB_ID])
        .collect();
    let name = prop_oneof![4 => proptest::sample::select(known).prop_map(str::to_owned), 1 => ".{0,20}"];
    let value = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..40),
        "[-0-9.:TZ]{0,30}".prop_map(String::into_bytes),
        ".{0,2000}".prop_map(String::into_bytes),
    ];
    (name, proptest::option::weighted(0.9, value))
}

proptest! {
    #[test]
    fn arbitrary_headers_never_panic(list in proptest::collection::vec(any_header(), 0..30)) {
        let headers: Headers = list.iter().map(|(name, value)| (name.as_str(), value.as_deref())).collect();
        let facts = Facts::read(&headers);
        for text in [&facts.pipeline, &facts.error_class, &facts.error_code] {
            prop_assert!(text.len() <= TEXT_LIMIT);
        }
        prop_assert!(facts.error_message.len() <= MESSAGE_LIMIT);
        if let Some(origin) = facts.origin {
            prop_assert!(is_topic_name(&origin.topic));
            prop_assert!(origin.partition.is_none_or(|partition| partition >= 0));
            prop_assert!(origin.offset.is_none_or(|offset| offset >= 0));
        }
    }

    #[test]
    fn big_endian_numbers_are_decoded(number in any::<i64>(), cut in 0_usize..8) {
        let number = number >> (8 * cut);
        prop_assert_eq!(big_endian(&number.to_be_bytes()), Some(number));
        prop_assert_eq!(big_endian(&number.to_be_bytes()[cut..]), Some(number));
    }
}
