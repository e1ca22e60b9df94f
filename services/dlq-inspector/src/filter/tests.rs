use redeliver_testkit::fuzz::fuzz;

use super::*;

/// Texts and templates of messages that are in the index. Messages that contain "busy" have the templates 7 and 8.
fn dictionary() -> Dictionary {
    let texts = ["", "permanent", "http.503", "t-dlq"];
    let busy = MessageMatches {
        all: vec![7, 8],
        some: vec![9],
        ..MessageMatches::default()
    };
    Dictionary {
        texts: (1..).zip(texts).map(|(id, text)| (text.to_owned(), id)).collect(),
        messages: [
            (String::new(), (1, None)),
            ("busy for 5 s".to_owned(), (7, Some("5".to_owned()))),
        ]
        .into(),
        contained: [("busy".to_owned(), busy)].into(),
    }
}

fn json_fields() -> Vec<String> {
    ["/order/id", "/a.b", "/a b"].map(str::to_owned).to_vec()
}

#[track_caller]
fn sql(filter: &str) -> (String, Vec<Param>) {
    let parsed = parse(filter, &json_fields()).unwrap_or_else(|error| panic!("{filter}: {error}"));
    let condition = Condition::of(&parsed, &dictionary());
    assert_eq!(
        condition.sql.matches('?').count(),
        condition.params.len(),
        "{}",
        condition.sql
    );
    (condition.sql, condition.params)
}

#[track_caller]
fn check(filter: &str, expected: &str, params: &[Param]) {
    assert_eq!(sql(filter), (expected.to_owned(), params.to_vec()), "{filter}");
}

#[track_caller]
fn invalid(filter: &str, position: usize, problem: &str) {
    let error = parse(filter, &json_fields()).unwrap_err();
    assert!(error.problem.contains(problem), "{filter}: {error}");
    assert_eq!(error.position, position, "{filter}: {error}");
}

fn text(text: &str) -> Param {
    Param::Text(text.to_owned())
}

fn blob(text: &str) -> Param {
    Param::Blob(text.as_bytes().to_vec())
}

#[test]
fn filter_becomes_condition_with_parameters() {
    check(
        r#"error_class = "permanent" AND headers.tenant = "x" AND retry_count > 3 AND failed_at > "2026-01-01T00:00:00Z""#,
        "(l.error_class_id = ? AND listed_is(b.headers, ?, ?) AND l.retry_count > ? AND \
         (l.failed_at IS NOT NULL AND l.failed_at > ?))",
        &[
            Param::Integer(2),
            text("tenant"),
            blob("x"),
            Param::Integer(3),
            Param::Integer(1_767_225_600_000),
        ],
    );
    check("", "(1)", &[]);
    check("  \n ", "(1)", &[]);
}

#[test]
fn or_binds_tighter_than_and() {
    check(
        "partition = 1 AND partition = 2 OR partition = 3",
        "(l.partition = ? AND (l.partition = ? OR l.partition = ?))",
        &[1, 2, 3].map(Param::Integer),
    );
    check(
        "partition=1 offset<=2",
        "(l.partition = ? AND l.offset <= ?)",
        &[1, 2].map(Param::Integer),
    );
    check(
        "NOT (partition=1 OR offset>=2) -state=OPEN",
        "(NOT ((l.partition = ? OR l.offset >= ?)) AND NOT (l.state = ?))",
        &[1, 2, 1].map(Param::Integer),
    );
    check("partition != 1", "NOT (l.partition = ?)", &[Param::Integer(1)]);
}

#[test]
fn expiry_depends_on_the_topic() {
    let filter = |text: &str, ages: &[(&str, i64)]| {
        let ages = ages.iter().map(|(topic, age)| ((*topic).to_owned(), *age));
        let ages = ages.collect::<BTreeMap<_, _>>().into();
        let condition = Condition::of(&parse(text, &[]).unwrap().with_ages(&ages), &dictionary());
        (condition.sql, condition.params)
    };
    let in_topics = "l.topic_id IN (SELECT value FROM json_each(?))";
    let late = "NOT (expires_at <= 1970-01-01T00:00:10Z OR partition = 1)";
    assert_eq!(
        filter(
            late,
            &[
                ("t-dlq", 4_000),
                ("permanent", 9_000),
                ("http.503", 4_000),
                ("new", 1)
            ]
        ),
        (
            format!(
                "NOT (((0 OR (l.dead_at <= ? AND {in_topics}) OR (l.dead_at <= ? AND {in_topics})) OR l.partition = ?))"
            ),
            vec![
                Param::Integer(6_000),
                text("[3,4]"),
                Param::Integer(1_000),
                text("[2]"),
                Param::Integer(1)
            ]
        )
    );
    assert_eq!(filter("expires_at:*", &[]), ("(0)".to_owned(), Vec::new()));
    assert_eq!(
        filter("expires_at:*", &[("t-dlq", 1)]),
        (format!("(0 OR ({in_topics}))"), vec![text("[4]")])
    );
    invalid("expires_at = 1d", 14, "is not an RFC 3339 time");
}

#[test]
fn ambiguous_values_need_quotes() {
    check(
        "error_code = http.503",
        "l.error_code_id = ?",
        &[Param::Integer(3)],
    );
    check(
        "dead_at > 2026-01-01T00:00:00Z",
        "l.dead_at > ?",
        &[Param::Integer(1_767_225_600_000)],
    );
    check(
        r#"key : "say \"no\" \\ it's""#,
        "(b.key IS NOT NULL AND instr(b.key, ?) > 0)",
        &[blob(r#"say "no" \ it's"#)],
    );
    check(
        "key:'(x)'",
        "(b.key IS NOT NULL AND instr(b.key, ?) > 0)",
        &[blob("(x)")],
    );
    check(
        "headers.kafka_dlt-original-topic:a headers.\"__connect.errors.topic\"=b headers.__connect.errors.stage:*",
        "(listed_has(b.headers, ?, ?) AND listed_is(b.headers, ?, ?) AND listed_exists(b.headers, ?))",
        &[
            text("kafka_dlt-original-topic"),
            blob("a"),
            text("__connect.errors.topic"),
            blob("b"),
            text("__connect.errors.stage"),
        ],
    );
}

#[test]
fn every_field_type_has_a_condition() {
    check(
        "id = t-dlq/3/44",
        "(l.topic_id = ? AND l.partition = ? AND l.offset = ?)",
        &[4, 3, 44].map(Param::Integer),
    );
    check("id = other/3/44", "0", &[]);
    check("topic = t-dlq", "l.topic_id = ?", &[Param::Integer(4)]);
    check("position.topic != none", "NOT (0)", &[]);
    check(
        "origin.topic : ord",
        "l.origin_topic_id IN (SELECT id FROM texts WHERE instr(text, ?) > 0)",
        &[text("ord")],
    );
    check("pipeline:*", "l.pipeline_id != ?", &[Param::Integer(1)]);
    check(
        "job_id = j",
        "(l.job_id IS NOT NULL AND l.job_id = ?)",
        &[text("j")],
    );
    check("job_id : *", "(l.job_id IS NOT NULL AND 1)", &[]);
    check("trace_id = \"\"", "l.trace_id IS NULL", &[]);
    check(
        "trace_id = 4bf9",
        "(l.trace_id IS NOT NULL AND lower(hex(l.trace_id)) = ?)",
        &[text("4bf9")],
    );
    check("error_message = gone", "0", &[]);
    check("error_message:*", "l.template_id != ?", &[Param::Integer(1)]);
    check(
        "error_message = 'busy for 5 s'",
        "(l.message_parts IS ? AND l.template_id = ?)",
        &[text("5"), Param::Integer(7)],
    );
    check(
        "error_message : busy",
        "(l.template_id IN (SELECT value FROM json_each(?)) \
         OR ((l.message_parts IS NULL OR instr(l.message_parts, ?) > 0) \
         AND l.template_id IN (SELECT value FROM json_each(?)) \
         AND message_has((SELECT text FROM templates WHERE id = l.template_id), l.message_parts, ?)))",
        &[text("[7,8]"), text("busy"), text("[9]"), text("busy")],
    );
    check("error_message : gone", "0", &[]);
    check(
        "json./order/id = o-7 json./a.b:* json.'/a b' : x",
        "(listed_is(b.json_fields, ?, ?) AND (listed_exists(b.json_fields, ?) OR listed_exists(b.json_fields, ?)) \
         AND (listed_has(b.json_fields, ?, ?) OR listed_has(b.json_fields, ?, ?)))",
        &[
            text("/order/id"),
            blob("o-7"),
            text("/a.b"),
            text("#/a.b"),
            text("/a b"),
            blob("x"),
            text("#/a b"),
            blob("x"),
        ],
    );
    check(
        "json./order/id = 1.50e1",
        "(listed_is(b.json_fields, ?, ?) OR listed_is(b.json_fields, ?, ?))",
        &[text("/order/id"), blob("1.50e1"), text("#/order/id"), blob("15")],
    );
    check(
        "state = dead_letter_state_discarded",
        "l.state = ?",
        &[Param::Integer(3)],
    );
    check("dialect : Spring", "l.dialect = ?", &[Param::Integer(2)]);
    check("failed_at:*", "l.failed_at IS NOT NULL", &[]);
    check("key = k", "(b.key IS NOT NULL AND b.key = ?)", &[blob("k")]);
}

#[test]
fn errors_have_a_position() {
    invalid(
        "colour = red",
        1,
        "unknown field `colour`; known fields are id, topic,",
    );
    invalid("topic = a AND colour = red", 15, "unknown field `colour`");
    invalid(
        "topic = a and pipeline = b",
        11,
        "unknown field `and`; write AND in upper case",
    );
    invalid("headers = a", 1, "unknown field `headers`");
    invalid("json = a", 1, "unknown field `json`");
    invalid("json.order = a", 1, "unknown field `json.order`");
    invalid(
        "topic = a json./none = a",
        11,
        "`json./none` is not in dlq_inspector.json_fields; indexed fields: json./order/id, json./a.b, json./a b",
    );
    invalid("topic", 6, "expected one of = != < <= > >= : after `topic`");
    invalid("topic ~ a", 7, "expected one of");
    invalid("topic = ", 9, "expected a value");
    invalid("topic < a", 9, "topic: unsupported operator <; use =, != or :");
    invalid("id : t", 6, "id: expected = or !=");
    invalid("id = t", 6, "`t` is not topic/partition/offset");
    invalid("retry_count > many", 15, "`many` is not an integer");
    invalid("failed_at > yesterday", 13, "`yesterday` is not an RFC 3339 time");
    invalid(
        "state = gone",
        9,
        "`gone` is not one of OPEN, REDRIVEN, DISCARDED",
    );
    invalid("state > OPEN", 9, "unsupported operator >; use =, != or :");
    invalid("retry_count = *", 15, "`*` requires the operator :");
    invalid("(topic = a", 1, "unclosed `(`");
    invalid("topic = a)", 10, "unmatched `)`");
    invalid("topic = \"a", 9, "unclosed quotation mark");
    invalid("topic = a AND", 14, "expected a field, found end of filter");
    invalid("OR topic = a", 1, "unknown field `OR`");
    invalid(".a = b", 1, "expected a field, found `.`");
    invalid("größe = 1 AND topic ~ a", 1, "unknown field `größe`");
    invalid("job_id = größe AND topic ~ a", 26, "expected one of");
}

#[test]
fn length_depth_and_count_are_limited() {
    let deep = |count: usize| format!("{}topic = a{}", "(".repeat(count), ")".repeat(count));
    assert!(parse(&deep(MAX_DEPTH), &[]).is_ok());
    invalid(
        &deep(MAX_DEPTH + 1),
        MAX_DEPTH + 2,
        "nested more than 32 levels deep",
    );
    assert!(parse(&format!("{}topic = a", "NOT ".repeat(100_000 / 4)), &[]).is_err());
    invalid(
        &format!("{}topic = a", "-".repeat(1000)),
        MAX_DEPTH + 2,
        "nested more than",
    );
    // What follows the name is still there.
    invalid(&"a".repeat(MAX_LENGTH), 1, "a`; known fields are");
    let many = vec!["topic = a"; MAX_RESTRICTIONS];
    assert!(parse(&many.join(" AND "), &[]).is_ok());
    assert!(
        parse(&format!("{} topic = a", many.join(" ")), &[])
            .unwrap_err()
            .problem
            .contains("more than 100")
    );
    invalid(&" ".repeat(MAX_LENGTH + 1), MAX_LENGTH + 1, "the limit is 8192");
}

/// Filters that are parsed are translated into SQL that consists of constants and has one `?` for each parameter.
fn damaged_filters(count: u32) {
    let valid = [
        r#"error_class = "permanent" AND headers.tenant = "x" AND retry_count > 3 AND failed_at > "2026-01-01T00:00:00Z""#,
        "NOT (partition=1 OR offset>=2) -state=OPEN dialect != SPRING",
        r"error_message : 'it\'s busy' OR error_message = 'busy for 5 s' key:* trace_id = 4bf9",
        "json./order/id = o-7 json.'/a b' : x id = t-dlq/0/1 origin.offset = 7 job_id : ''",
        "headers.'; DROP TABLE letters; --' = ') OR 1=1 --'",
    ];
    let valid = valid.map(|filter| filter.as_bytes().to_vec());
    let (dictionary, json_fields) = (dictionary(), json_fields());
    fuzz("damaged_filters", count, &valid, |input| {
        let text = String::from_utf8_lossy(input);
        let Ok(filter) = parse(&text, &json_fields) else {
            return;
        };
        let condition = Condition::of(&filter, &dictionary);
        assert_eq!(
            condition.sql.matches('?').count(),
            condition.params.len(),
            "{}",
            condition.sql
        );
        // Of the characters in texts of SQL, only the empty text of a constant could occur, and no comment.
        let is_constant = |c: char| c.is_ascii_alphanumeric() || " ()._,=<>!?".contains(c);
        assert!(condition.sql.chars().all(is_constant), "{}", condition.sql);
        let words = condition
            .sql
            .split(|c: char| !c.is_ascii_alphanumeric() && !"._".contains(c));
        assert!(
            words
                .filter(|word| word.starts_with(|c: char| c.is_ascii_digit()))
                .all(|word| word == "0" || word == "1")
        );
    });
}

#[test]
fn damaged_filter_cannot_inject_sql() {
    damaged_filters(10_000);
}

#[test]
#[ignore = "long"]
fn many_damaged_filters_cannot_inject_sql() {
    damaged_filters(1_000_000);
}

#[test]
fn topics_without_matches_are_known() {
    for (filter, expected) in [
        ("", [true, true]),
        ("topic = a-dlq", [true, false]),
        ("topic : b- AND pipeline = a", [false, true]),
        (
            r#"state = OPEN AND (topic = a-dlq OR id = "b-dlq/0/1")"#,
            [true, true],
        ),
        ("topic = a-dlq topic = b-dlq", [false, false]),
        // Not all that do not match are known.
        ("topic != a-dlq", [true, true]),
    ] {
        let filter = parse(filter, &[]).unwrap();
        let can_match = ["a-dlq", "b-dlq"].map(|topic| filter.can_match_in(topic));
        assert_eq!(can_match, expected, "{filter:?}");
    }
}

#[test]
fn tested_fields_are_known() {
    for (filter, expected) in [
        ("", false),
        ("retry_count = 1 topic = a", false),
        ("headers.state = OPEN", false),
        ("state = OPEN", true),
        ("topic = a AND NOT (retry_count = 1 OR state != OPEN)", true),
    ] {
        assert_eq!(
            parse(filter, &[]).unwrap().tests(NumberField::State),
            expected,
            "{filter}"
        );
    }
}

#[test]
fn recorded_filter_contains_no_secrets() {
    let fields = ["/a".to_owned()];
    for (filter, expected) in [
        ("", ""),
        (
            "error_class = permanent state=OPEN",
            "error_class = permanent state=OPEN",
        ),
        (
            r#"key = "ß \" x" OR -headers.x.y : 4711"#,
            "key = <value> OR -headers.x.y : <value>",
        ),
        (
            "(json./a!='ä')AND error_message:b",
            "(json./a!=<value>)AND error_message:<value>",
        ),
        // Whether it is set.
        ("key:* topic = a", "key:* topic = a"),
        ("headers.x = *", "headers.x = *"),
    ] {
        assert_eq!(without_secrets(filter, &fields, &|_| false).unwrap(), expected);
        assert!(parse_recorded(expected, &fields).is_ok(), "{expected}");
    }
    assert!(without_secrets("key = ", &fields, &|_| false).is_err());
    // What is masked.
    let is_masked = |restriction: &Restriction| {
        matches!(
            restriction,
            Restriction::Text(TextField::ErrorCode, _) | Restriction::Number(NumberField::RetryCount, _)
        )
    };
    let filter =
        "error_code = E1 AND NOT error_code != 'E2' AND pipeline = p AND retry_count >= 3 AND error_code : *";
    let expected = "error_code = <value> AND NOT error_code != <value> AND pipeline = p AND retry_count >= <value> AND error_code : *";
    assert_eq!(without_secrets(filter, &fields, &is_masked).unwrap(), expected);
    assert!(parse_recorded(expected, &fields).is_ok());
}
