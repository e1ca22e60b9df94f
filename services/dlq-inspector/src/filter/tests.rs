use proptest::prelude::*;

use super::*;

fn text_id(text: &str) -> Option<i64> {
    ["", "permanent", "http.503", "t-dlq"]
        .iter()
        .position(|known| *known == text)
        .map(|index| index as i64 + 1)
}

#[track_caller]
fn sql(filter: &str) -> (String, Vec<Param>) {
    let parsed = parse(filter).unwrap_or_else(|error| panic!("{filter}: {error}"));
    let condition = Condition::of(&parsed, &text_id);
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
    let error = parse(filter).unwrap_err();
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
fn a_filter_becomes_a_condition_with_parameters() {
    check(
        r#"error_class = "permanent" AND headers.tenant = "x" AND retry_count > 3 AND failed_at > "2026-01-01T00:00:00Z""#,
        "(l.error_class = ? AND header_is(b.headers, ?, ?) AND l.retry_count > ? AND \
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
fn or_binds_more_tightly_than_and_and_adjacent_conditions_are_joined_by_and() {
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
fn values_need_quotes_only_if_they_are_ambiguous() {
    check("error_code = http.503", "l.error_code = ?", &[Param::Integer(3)]);
    check(
        "dead_at > 2026-01-01T00:00:00Z",
        "l.dead_at > ?",
        &[Param::Integer(1_767_225_600_000)],
    );
    check(
        r#"error_message : "say \"no\" \\ it's""#,
        "instr(l.error_message, ?) > 0",
        &[text(r#"say "no" \ it's"#)],
    );
    check(
        "error_message:'(x)'",
        "instr(l.error_message, ?) > 0",
        &[text("(x)")],
    );
    check(
        "headers.kafka_dlt-original-topic:a headers.\"__connect.errors.topic\"=b headers.__connect.errors.stage:*",
        "(header_has(b.headers, ?, ?) AND header_is(b.headers, ?, ?) AND header_exists(b.headers, ?))",
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
fn every_type_of_field_has_a_condition() {
    check(
        "id = t-dlq/3/44",
        "(l.topic = ? AND l.partition = ? AND l.offset = ?)",
        &[4, 3, 44].map(Param::Integer),
    );
    check("id = other/3/44", "0", &[]);
    check("topic = t-dlq", "l.topic = ?", &[Param::Integer(4)]);
    check("position.topic != none", "NOT (0)", &[]);
    check(
        "origin.topic : ord",
        "l.origin_topic IN (SELECT id FROM texts WHERE instr(text, ?) > 0)",
        &[text("ord")],
    );
    check("pipeline:*", "l.pipeline != ?", &[Param::Integer(1)]);
    check("job_id = j", "(l.job_id = ? AND l.job_id != '')", &[text("j")]);
    check("trace_id = \"\"", "l.trace_id = ?", &[text("")]);
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
    assert!(parse(&deep(MAX_DEPTH)).is_ok());
    invalid(
        &deep(MAX_DEPTH + 1),
        MAX_DEPTH + 2,
        "nested more than 32 levels deep",
    );
    assert!(parse(&format!("{}topic = a", "NOT ".repeat(100_000 / 4))).is_err());
    invalid(
        &format!("{}topic = a", "-".repeat(1000)),
        MAX_DEPTH + 2,
        "nested more than",
    );
    let many = vec!["topic = a"; MAX_RESTRICTIONS];
    assert!(parse(&many.join(" AND ")).is_ok());
    assert!(
        parse(&format!("{} topic = a", many.join(" ")))
            .unwrap_err()
            .problem
            .contains("more than 100")
    );
    invalid(&" ".repeat(MAX_LENGTH + 1), MAX_LENGTH + 1, "the limit is 8192");
}

proptest! {
    #[test]
    fn arbitrary_text_never_panics(filter in ".{0,80}") {
        let _ = parse(&filter).map(|filter| Condition::of(&filter, &text_id));
    }

    #[test]
    fn sequences_of_tokens_never_panic(
        tokens in proptest::collection::vec(prop_oneof![
            Just("topic"), Just("headers.x"), Just("retry_count"), Just("state"), Just("AND"), Just("OR"), Just("NOT"),
            Just("-"), Just("("), Just(")"), Just("="), Just("!="), Just(":"), Just(">"), Just("\"a b\""), Just("1"),
            Just("OPEN"), Just("*"), Just("\\"), Just("'"), Just(".")
        ], 0..20),
        separator in prop_oneof![Just(""), Just(" ")],
    ) {
        if let Ok(filter) = parse(&tokens.join(separator)) {
            let condition = Condition::of(&filter, &text_id);
            prop_assert_eq!(condition.sql.matches('?').count(), condition.params.len());
        }
    }
}

#[test]
fn it_is_known_which_fields_a_filter_tests() {
    for (filter, expected) in [
        ("", false),
        ("retry_count = 1 topic = a", false),
        ("headers.state = OPEN", false),
        ("state = OPEN", true),
        ("topic = a AND NOT (retry_count = 1 OR state != OPEN)", true),
    ] {
        assert_eq!(
            parse(filter).unwrap().tests(NumberField::State),
            expected,
            "{filter}"
        );
    }
}
