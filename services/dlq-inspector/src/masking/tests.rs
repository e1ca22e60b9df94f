use redeliver_core::Headers;

use super::*;
use crate::filter::parse;

/// A rule with these lists; `lists` is a JSON object.
fn masking(rules: &[&str]) -> Masking {
    let rules: Vec<MaskingRule> = rules
        .iter()
        .map(|rule| serde_json::from_str(rule).unwrap())
        .collect();
    Masking::new(&rules)
}

fn headers(list: &[(&str, &str)]) -> Headers {
    list.iter()
        .map(|(name, value)| (*name, Some(value.as_bytes())))
        .collect()
}

#[test]
fn rules_apply_to_matching_topics() {
    let masking = masking(&[
        r#"{"topics":["orders-*"],"key":true}"#,
        r#"{"topics":["*-dlq"],"fields":["/pan"]}"#,
    ]);
    let of = |topic| {
        let mask = masking.of(topic);
        (mask.has_key(), mask.has_fields(), mask.is_empty())
    };
    assert_eq!(of("orders-dlq"), (true, true, false));
    assert_eq!(of("orders-x"), (true, false, false));
    assert_eq!(of("people-dlq"), (false, true, false));
    assert_eq!(of("people"), (false, false, true));
}

#[test]
fn headers_are_masked_by_name() {
    let masking = masking(&[r#"{"topics":["*"],"headers":["X-User-*"]}"#]);
    let mut given = headers(&[
        ("a", "1"),
        ("x-user-id", "7"),
        ("a", "2"),
        ("X-USER-id", "8"),
        ("x-user-id", "9"),
    ]);
    given.push("x-user-id", None);
    let MaskedHeaders {
        headers: shown,
        masked,
    } = masking.of("t").headers(given.iter());
    let expected = headers(&[
        ("a", "1"),
        ("x-user-id", MASK),
        ("a", "2"),
        ("X-USER-id", MASK),
        ("x-user-id", MASK),
        ("x-user-id", MASK),
    ]);
    assert_eq!(shown, expected);
    assert_eq!(masked, ["x-user-id", "X-USER-id"]);
}

#[test]
fn messages_and_traces_are_masked() {
    let masking = masking(&[r#"{"topics":["*"],"messages":["[0-9]{16}"]}"#]);
    let mask = masking.of("t");
    let secret = "4111111111111111";
    let text = format!("card {secret} refused");
    for name in [
        "error-message",
        "error-response",
        "kafka_dlt-exception-message",
        "kafka_dlt-exception-stacktrace",
        "__connect.errors.exception.message",
        "__connect.errors.exception.stacktrace",
        "__streams.errors.message",
        "__streams.errors.exception",
        "__streams.errors.stacktrace",
        "dead-letter-reason",
        "__dlq.errors.message",
        "x-Failure-Cause",
    ] {
        let shown = mask.headers(headers(&[(name, &text)]).iter());
        assert_eq!(
            shown.headers,
            headers(&[(name, "card <masked> refused")]),
            "{name}"
        );
        assert_eq!(shown.masked, [name]);
    }
    for name in [
        "tenant",
        "error-class",
        "error-code",
        "kafka_dlt-exception-fqcn",
        "traceparent",
    ] {
        let shown = mask.headers(headers(&[(name, &text)]).iter());
        assert_eq!(
            (shown.headers, shown.masked.len()),
            (headers(&[(name, &text)]), 0)
        );
    }
    // What cannot be searched is masked as a whole.
    let long = format!("{}{secret}", " ".repeat(MAX_SEARCHED));
    let given: Headers = [
        ("x-error", Some(&b"\xff4111"[..])),
        ("y-error", Some(long.as_bytes())),
        ("z-error", None),
    ]
    .into_iter()
    .collect();
    let shown = mask.headers(given.iter());
    assert_eq!(shown.masked, ["x-error", "y-error"]);
    assert!(
        shown
            .headers
            .iter()
            .all(|(_, value)| value.is_none_or(|value| value == MASK.as_bytes()))
    );
}

#[test]
fn cut_secret_is_masked() {
    let masking = masking(&[r#"{"topics":["*"],"messages":["[0-9]{16}"]}"#]);
    let cut = redeliver_core::failure::bounded_text(
        &format!("{} 4111111111111111", "x".repeat(MESSAGE_LIMIT - 11)),
        MESSAGE_LIMIT,
    );
    let given = headers(&[("error-message", &cut), ("error-class", "permanent")]);
    let facts = masking.of("t").facts(given.iter()).unwrap();
    assert!(!facts.error_message.contains("4111"), "{}", facts.error_message);
    // Longer than any fixed limit.
    let masking = self::masking(&[r#"{"topics":["*"],"messages":["eyJ[a-z0-9]+[.][a-z]+"]}"#]);
    let cut =
        redeliver_core::failure::bounded_text(&format!("token eyJ{}", "s3cret".repeat(300)), MESSAGE_LIMIT);
    let masked = masking
        .of("t")
        .headers(headers(&[("error-message", &cut)]).iter());
    assert_eq!(masked.headers, headers(&[("error-message", "token <masked>")]));
    let responses = [
        ("token eyJa…", "token <masked>"),
        ("token eyJa", "token eyJa"),
        ("at eyJa.b, then no…", "at <masked>, then no"),
    ];
    for (response, shown) in responses {
        let given = headers(&[("error-response", response)]);
        let masked = masking.of("t").headers(given.iter()).headers;
        assert_eq!(masked, headers(&[("error-response", shown)]));
    }
}

#[test]
fn exception_code_is_masked() {
    let masking = masking(&[r#"{"topics":["*"],"messages":["[0-9]{16}"]}"#]);
    let mask = masking.of("t");
    let code = |exception: &str| {
        let given = headers(&[("__streams.errors.exception", exception)]);
        let whole = Facts::read(&given).error_code;
        let shown = mask.facts(given.iter()).map(|facts| facts.error_code);
        (whole, shown)
    };
    assert_eq!(
        code("a.B: card 4111111111111111"),
        ("a.B".to_owned(), Some("a.B".to_owned()))
    );
    assert_eq!(
        code("4111111111111111"),
        ("4111111111111111".to_owned(), Some(MASK.to_owned()))
    );
    assert_eq!(
        code("Can't deserialize data [[49, 50]] from topic"),
        ("Can't".to_owned(), None)
    );
    let tests_code = |rule: &str| {
        let masking = self::masking(&[rule]);
        let filter = parse("error_code = x", &[]).unwrap();
        !filter.all(&|restriction| !masking.of("t").hides_tested(restriction))
    };
    assert!(tests_code(r#"{"topics":["*"],"messages":["x"]}"#));
    // The name of a class quotes no record.
    assert!(!tests_code(r#"{"topics":["*"],"fields":["/pan"],"key":true}"#));
}

#[test]
fn quoted_records_are_masked() {
    let spring = "Can't deserialize data [[123, 34, 112, 97, 110, 34]] from topic [orders]";
    let jackson = r#"Unexpected end-of-input (code 1)
 at [Source: (byte[])"{"pan":"x; line: 9"}"[truncated 500 bytes]; line: 1, column: 8]"#;
    let cut = r#"Unrecognized token at [Source: (String)"{"pan":"4111"#;
    for rule in [
        r#"{"topics":["*"],"fields":["/pan"]}"#,
        r#"{"topics":["*"],"key":true}"#,
    ] {
        let masking = masking(&[rule]);
        let mask = masking.of("t");
        for (message, expected) in [
            (spring, "Can't deserialize data <masked>]] from topic [orders]"),
            (
                jackson,
                "Unexpected end-of-input (code 1)\n at <masked>1, column: 8]",
            ),
            (cut, "Unrecognized token at <masked>"),
            (
                "bytes [1, 2, 3, 4, -5] of partition [3]",
                "bytes <masked>] of partition [3]",
            ),
            ("partitions [0, 1] at offset 7", "partitions [0, 1] at offset 7"),
        ] {
            let shown = mask.headers(headers(&[("x-error", message)]).iter());
            assert_eq!(shown.headers, headers(&[("x-error", expected)]));
        }
        let filter = parse("error_message : pan", &[]).unwrap();
        assert!(
            !filter.all(&|restriction| !mask.hides_tested(restriction)),
            "{rule}"
        );
        assert_eq!(masking.warnings().len(), 1);
    }
    let complete = masking(&[r#"{"topics":["*"],"key":true,"messages":["[0-9]{16}"]}"#]);
    assert_eq!(complete.warnings(), [""; 0]);
}

#[test]
fn copies_of_records_are_masked() {
    let copies = [
        "springDeserializerExceptionValue",
        "deserialization-failure-data",
        "deserialization-failure-key-data",
        "deserialization-failure-value-data",
        "error-response",
    ];
    let mut given: Headers = copies.iter().map(|name| (*name, Some(&b"4111"[..]))).collect();
    given.push_text("deserialization-failure-topic", "orders");
    for rule in [
        r#"{"topics":["*"],"fields":["/pan"]}"#,
        r#"{"topics":["*"],"key":true}"#,
    ] {
        let shown = masking(&[rule]).of("t").headers(given.iter());
        assert_eq!(shown.masked, copies, "{rule}");
    }
}

#[test]
fn masked_binary_number_is_none() {
    let masking = masking(&[r#"{"topics":["*"],"headers":["kafka_dlt-*"]}"#]);
    let number = 7_i64.to_be_bytes();
    let names = ["kafka_dlt-original-offset", "kafka_dlt-original-timestamp"];
    let given: Headers = names.map(|name| (name, Some(&number[..]))).into_iter().collect();
    let facts = masking.of("t").facts(given.iter()).unwrap();
    let offset = facts.origin.and_then(|origin| origin.offset);
    assert_eq!((offset, facts.origin_timestamp), (None, None));
    assert_eq!(crate::dialect::readable_number(names[0], MASK.as_bytes()), None);
}

#[test]
fn facts_are_read_after_masking() {
    let masking = masking(&[r#"{"topics":["*"],"headers":["*"]}"#]);
    let given = headers(&[
        ("error-class", "permanent"),
        ("error-code", "http.404"),
        ("error-message", "secret"),
        ("pipeline", "secret"),
        ("retry-count", "3"),
        ("original-topic", "secret"),
        ("job-id", "secret"),
        (
            "traceparent",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ),
    ]);
    let facts = masking.of("t").facts(given.iter()).unwrap();
    assert_eq!(facts.dialect, crate::dialect::Dialect::Redeliver);
    assert_eq!(
        (&*facts.error_message, &*facts.pipeline, &*facts.error_code),
        (MASK, MASK, MASK)
    );
    assert_eq!((facts.retry_count, facts.origin, facts.trace_id), (0, None, None));
    assert_eq!(facts.job_id.as_deref(), Some(MASK));
    assert_eq!(Masking::default().of("t").facts(given.iter()), None);
}

#[test]
fn filters_on_masked_fields_are_known() {
    let indexed = ["/customer/email", "/customer", "/PAN", "/items/0/pan"].map(str::to_owned);
    let hides = |rule: &str, filter: &str| {
        let masking = masking(&[rule]);
        let mask = masking.of("t");
        !parse(filter, &indexed)
            .unwrap()
            .all(&|restriction| !mask.hides_tested(restriction))
    };
    let fields = r#"{"topics":["*"],"fields":["/customer/*","/**/pan"]}"#;
    let messages = r#"{"topics":["*"],"messages":["x"]}"#;
    for (rule, filter, expected) in [
        (r#"{"topics":["*"],"key":true}"#, "NOT key:*", true),
        (r#"{"topics":["*"],"key":true}"#, "headers.key = a", false),
        (fields, "json./customer/email = a", true),
        (fields, "-json./PAN : 4", true),
        (fields, "json./items/0/pan:*", true),
        (fields, "json./customer = a", false),
        (fields, "value_size > 3", true),
        (fields, "key = a AND headers.tenant : x", false),
        (fields, "error_message : x", true),
        (
            r#"{"topics":["*"],"headers":["x-*"]}"#,
            "headers.X-user = a",
            true,
        ),
        (
            r#"{"topics":["*"],"headers":["x-*"]}"#,
            "headers.tenant = a OR value_size > 3",
            false,
        ),
        (
            messages,
            "state = OPEN OR (retry_count > 3 error_message : a)",
            true,
        ),
        (messages, "headers.error-message : a", true),
        (messages, "headers.x-stacktrace : a", true),
        (messages, "error_class = b AND group = 0123456789abcdef", false),
        (messages, "error_class = b AND error_code = a", true),
        (
            r#"{"topics":["*"],"headers":["__connect.errors.exception.message"]}"#,
            "error_message : a",
            true,
        ),
        (r#"{"topics":["*"],"headers":["pipeline"]}"#, "pipeline = a", true),
        (
            r#"{"topics":["*"],"headers":["error-timestamp"]}"#,
            r#"failed_at > "2026-01-01T00:00:00Z""#,
            true,
        ),
        (
            r#"{"topics":["*"],"headers":["retry-count"]}"#,
            "retry_count > 3",
            true,
        ),
        (
            r#"{"topics":["*"],"headers":["original-offset"]}"#,
            "origin.offset > 3",
            true,
        ),
        (
            r#"{"topics":["*"],"headers":["traceparent"]}"#,
            "trace_id : a",
            true,
        ),
        (r#"{"topics":["*"],"headers":["job-id"]}"#, "job_id = a", true),
        (
            r#"{"topics":["*"],"headers":["*"]}"#,
            r#"topic = a AND dead_at > "2026-01-01T00:00:00Z" AND id = "t/0/0""#,
            false,
        ),
    ] {
        assert_eq!(hides(rule, filter), expected, "{rule} {filter}");
    }
}

#[test]
fn value_without_readable_fields_is_withheld() {
    let masking = masking(&[r#"{"topics":["*"],"fields":["/pan"]}"#]);
    let mask = masking.of("t");
    let value = |text: &'static str| mask.value(Bytes::from_static(text.as_bytes()));
    let MaskedValue::Shown(shown, paths) = value(r#"{"pan":1}"#) else {
        panic!("withheld");
    };
    assert_eq!((&shown[..], paths.len()), (&br#"{"pan":"<masked>"}"#[..], 1));
    assert_eq!(
        value(r#"{"a":1}"#),
        MaskedValue::Shown(Bytes::from_static(br#"{"a":1}"#), Vec::new())
    );
    assert_eq!(
        value("\u{0}\u{0}\u{0}\u{0}\u{1}{\"pan\":1}"),
        MaskedValue::Withheld
    );
    assert_eq!(value(""), MaskedValue::Shown(Bytes::new(), Vec::new()));
    let none = Masking::default();
    assert_eq!(
        none.of("t").value(Bytes::from_static(b"no json")),
        MaskedValue::Shown(Bytes::from_static(b"no json"), Vec::new())
    );
}

#[test]
fn index_depends_on_masked_headers() {
    let of = |rule: &str| masking(&[rule]).of_groups().unwrap();
    let messages = of(r#"{"topics":["a"],"messages":["a"]}"#);
    assert_ne!(messages, of(r#"{"topics":["b"],"messages":["a"]}"#));
    assert_ne!(messages, of(r#"{"topics":["a"],"messages":["b"]}"#));
    assert_ne!(messages, of(r#"{"topics":["a"],"headers":["a"]}"#));
    // Quoted records.
    assert_ne!(messages, of(r#"{"topics":["a"],"messages":["a"],"key":true}"#));
    let fields = |path| of(&format!(r#"{{"topics":["a"],"fields":["{path}"]}}"#));
    assert_eq!(fields("/a"), fields("/b"));
    assert_eq!(Masking::default().of_groups(), None);
}
