use proptest::prelude::*;

use super::*;

#[test]
fn one_cause_has_one_template() {
    let cases = [
        // HTTP
        (
            "connection refused (os error 111)",
            "connection refused (os error <number>)",
        ),
        (
            "error sending request for url (http://inventory:8080/items/7?x=1): connection closed",
            "error sending request for url (<url>): connection closed",
        ),
        (
            "endpoint answered 503 after 1.25s.",
            "endpoint answered <number> after <number>.<number>s.",
        ),
        (
            "dial tcp 10.0.0.7:8080: i/o timeout",
            "dial tcp <host>: i/o timeout",
        ),
        ("see https://example.com/a/b.", "see <url>."),
        // Java and Spring
        (
            "java.net.ConnectException: Connection refused: db.example.com/10.0.0.7:5432",
            "java.net.ConnectException: Connection refused: <host>",
        ),
        (
            "Cannot deserialize value of type `int` from String \"abc\": not a valid `int` value",
            "Cannot deserialize value of type <quoted> from String <quoted>: not a valid <quoted> value",
        ),
        (
            "Listener method 'void com.acme.OrderListener.on(Order)' threw exception; nested exception is \
             java.lang.IllegalStateException: order 4711 is closed",
            "Listener method <quoted> threw exception; nested exception is java.lang.IllegalStateException: \
             order <number> is closed",
        ),
        ("com.acme.Order@1b2c3d4f is null", "com.acme.Order@<hex> is null"),
        (
            "Http2Connection of worker17 is gone",
            "Http<number>Connection of worker<number> is gone",
        ),
        // Connect
        (
            "Tolerance exceeded in error handler\n\tat 2026-01-05T10:00:00.123Z",
            "Tolerance exceeded in error handler at <time>",
        ),
        (
            "Error converting byte[] to Kafka Connect data due to serialization error of topic orders-3:",
            "Error converting byte[] to Kafka Connect data due to serialization error of topic orders-<number>:",
        ),
        // Postgres
        (
            "ERROR: duplicate key value violates unique constraint \"users_pkey\"\n  Detail: Key (email)=(a@b.c) already exists.",
            "ERROR: duplicate key value violates unique constraint <quoted> Detail: Key (email)=(<quoted>) already exists.",
        ),
        (
            "date out of range: 2026-02-31 10:00:00+01",
            "date out of range: <time>",
        ),
        ("can't lock row, isn't ours", "can't lock row, isn't ours"),
        // Redis
        (
            "MOVED 3999 redis-1.redis.svc.cluster.local:6379",
            "MOVED <number> <host>",
        ),
        (
            "READONLY You can't write against a read only replica.",
            "READONLY You can't write against a read only replica.",
        ),
        (
            "connect to [fe80::1]:6379 and fe80::2 failed",
            "connect to <host> and <host> failed",
        ),
        // Ids
        (
            "job 0190a7c2-5f1e-7cc3-98c4-dc0c0c07398f of 01H8XYZK3QJ5 is dead",
            "job <id> of <id> is dead",
        ),
        ("sha 3f2A9c0d at 0x7ffe", "sha <hex> at <hex>"),
        (
            "at 10:00:00, in 1,000.5 ms, v1.2.3",
            "at <time>, in <number> ms, v<number>.<number>",
        ),
        ("größe 5 zu groß", "größe <number> zu groß"),
        ("", ""),
        ("  \n ", ""),
    ];
    for (message, expected) in cases {
        assert_eq!(template(message), expected, "{message}");
        assert_eq!(template(expected), expected);
    }
}

#[test]
fn input_and_template_are_bounded() {
    let long = "word ".repeat(1_000_000);
    assert_eq!(template(&long).chars().count(), MAX_TEMPLATE - 1);
    // The closing quotation mark is beyond what is considered.
    let json = |text: &str| format!("bad document \"{}\"", text.repeat(1_000));
    assert_eq!(template(&json("a b")), "bad document <quoted>");
    assert_eq!(template(&json("c")), template(&json("a b")));
}

fn facts(pipeline: &str, class: &str, code: &str, message: &str) -> Facts {
    Facts {
        pipeline: pipeline.to_owned(),
        error_class: class.to_owned(),
        error_code: code.to_owned(),
        error_message: message.to_owned(),
        ..Facts::default()
    }
}

#[test]
fn named_problem_separates_groups() {
    let of = |response: &str| {
        let facts = Facts {
            error_response: response.to_owned(),
            ..facts("p", "permanent", "http.422", "answered 422")
        };
        (GroupId::of("t", &facts), template_of(&facts))
    };
    let none = of("");
    assert_eq!(none.1, "answered <number>");
    let suspended = of(r#"{"error":"tenant-suspended","at":"a"}"#);
    assert_eq!(suspended.1, "answered <number>: tenant-suspended");
    assert_eq!(of(r#"{"error":"tenant-suspended","at":"b"}"#), suspended);
    assert_ne!(of(r#"{"error":"too-large"}"#).0, suspended.0);
    assert_eq!(of(r#"{"error":"no customer Bob Miller"}"#), none);
    // Ids of failures without a named problem are those of earlier versions.
    assert_eq!(of("tenant suspended"), none);
}

#[test]
fn group_depends_on_cause_and_pipeline() {
    let of = |topic, facts: &Facts| GroupId::of(topic, facts);
    let base = of("a-dlq", &facts("a", "permanent", "http_500", "order 1"));
    assert_eq!(
        base,
        of("other-dlq", &facts("a", "permanent", "http_500", "order 22"))
    );
    let others = [
        facts("b", "permanent", "http_500", "order 1"),
        facts("a", "transient", "http_500", "order 1"),
        facts("a", "permanent", "http_501", "order 1"),
        facts("a", "permanent", "http_500", "item 1"),
        facts("a", "permanenthttp_500", "", "order 1"),
        facts("", "permanent", "http_500", "order 1"),
    ];
    for other in others {
        assert_ne!(base, of("a", &other), "{other:?}");
    }
    // Without a pipeline, the topic stands for it.
    let unknown = facts("", "e", "", "");
    assert_ne!(of("a-dlq", &unknown), of("b-dlq", &unknown));
}

#[test]
fn ids_are_stable() {
    let id = GroupId::of("a-dlq", &facts("a", "permanent", "http_500", "order 1"));
    // Ids are shown to people and stored: other rules require another version.
    assert_eq!(id.to_string(), "8d4d8be8ab351d3a");
    for number in [0, 1, -1, i64::MIN, i64::MAX] {
        let id = GroupId::from_number(number);
        assert_eq!(id.to_string().parse(), Ok(id));
    }
    for invalid in [
        "",
        "1",
        "+000000000000001",
        "0000000000000000a",
        "000000000000000A",
    ] {
        assert_eq!(invalid.parse::<GroupId>(), Err(InvalidGroupId), "{invalid}");
    }
}

proptest! {
    #[test]
    fn template_is_its_own_template(
        message in prop_oneof!["\\PC{0,80}", "[0-9a-fx:.,/'\"`()=\\[\\]<> TZ_@-]{0,60}", "(a|9|://|::|\"|'|\\)=\\(|0x|é|-|\\.| ){0,40}"],
    ) {
        let once = template(&message);
        prop_assert!(!once.bytes().any(|byte| byte.is_ascii_digit()), "{once}");
        prop_assert_eq!(template(&once), once);
    }

    #[test]
    fn numbers_do_not_change_the_template(
        words in proptest::collection::vec("[a-z]{1,8}", 1..6), one in 0..u32::MAX, other in 0..u32::MAX,
    ) {
        let message = |number: u32| words.join(&format!(" {number} "));
        prop_assert_eq!(template(&message(one)), template(&message(other)));
    }
}

#[test]
fn unpaired_quotation_mark_is_text() {
    for (message, expected) in [
        (
            "a \u{201c}b \u{201c}c 'd' \"e\" 1",
            "a \u{201c}b \u{201c}c <quoted> <quoted> <number>",
        ),
        ("`x 'y' `z", "<quoted>z"),
        ("it is ` and 'y' and \"", "it is ` and <quoted> and \""),
    ] {
        assert_eq!(template(message), expected);
    }
}
