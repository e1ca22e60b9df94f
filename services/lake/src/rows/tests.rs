use bytes::Bytes;
use delta_kernel::arrow::array::RecordBatch;
use delta_kernel::arrow::util::display::array_value_to_string;
use redeliver_core::headers::{Origin as Entered, write_failure, write_lineage};
use redeliver_core::{ErrorClass, Failure};
use redeliver_proto::convert::to_timestamp;
use redeliver_testkit::fuzz::{FEW, fuzz};
use redeliver_testkit::record_at;

use super::*;
use crate::schema::{GAPS, TABLES, UNFIT};

fn origin(tier: Option<&str>, is_dead: bool) -> Origin {
    Origin {
        topic_id: "id".to_owned(),
        tier: tier.map(str::to_owned),
        is_dead,
        expects_result: true,
        masked_as: "docs-dlq".to_owned(),
    }
}

fn rows(
    schema: &'static Schema,
    record: &Record,
    origin: &Origin,
    rules: &str,
    payloads: bool,
) -> RecordBatch {
    let rules = serde_json::from_str::<Vec<_>>(rules).unwrap();
    let mut batch = Batch::new(schema);
    let lake = LakeConfig {
        payloads,
        headers: vec!["tenant".to_owned(), "region".to_owned()],
        ..LakeConfig::default()
    };
    Rows::new(Masking::new(&rules), &lake).add(&mut batch, schema, record, origin);
    batch.take().unwrap()
}

/// The cells that are not null, without those of the position.
fn cells(rows: &RecordBatch) -> Vec<(String, String)> {
    assert_eq!(rows.num_rows(), 1);
    let schema = rows.schema();
    let columns = schema.fields().iter().zip(rows.columns()).skip(5);
    let filled = columns.filter(|(_, column)| column.is_valid(0));
    filled
        .map(|(field, column)| (field.name().clone(), array_value_to_string(column, 0).unwrap()))
        .collect()
}

fn assert_cells(rows: &RecordBatch, expected: &[(&str, &str)]) {
    let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    assert_eq!(cells(rows), expected.iter().map(owned).collect::<Vec<_>>());
}

/// A record as a pipeline writes it.
fn failed(topic: &str, class: ErrorClass) -> Record {
    let mut record = Record {
        timestamp: Some(Timestamp::from_millis(2_000)),
        key: Some(Bytes::from_static(b"k")),
        value: Some(Bytes::from_static(br#"{"card":4111}"#)),
        ..record_at(topic, 0, 7)
    };
    let entered = Entered {
        topic: "docs".into(),
        partition: 1,
        offset: 42,
        timestamp: Some(Timestamp::from_millis(0)),
    };
    let failure = Failure::new(class, "http.503", "503 for user 17");
    write_lineage(&mut record.headers, "docs", &entered, 2);
    write_failure(&mut record.headers, &failure, Timestamp::from_millis(1_000));
    record
}

const LINEAGE: [(&str, &str); 5] = [
    ("origin_topic", "docs"),
    ("origin_partition", "1"),
    ("origin_offset", "42"),
    ("origin_timestamp", "1970-01-01T00:00:00Z"),
    ("retry_count", "2"),
];

#[test]
fn waiting_record_is_an_attempt() {
    let mut record = failed("docs-retry-5s", ErrorClass::Transient);
    record
        .headers
        .push_text("process-after", "1970-01-01T00:00:06.000Z");
    let rows = rows(&ATTEMPTS, &record, &origin(Some("5s"), false), "[]", true);
    let mut expected = vec![("pipeline", "docs"), ("tier", "5s")];
    expected.extend(LINEAGE);
    expected.extend([
        ("process_after", "1970-01-01T00:00:06Z"),
        ("failed_at", "1970-01-01T00:00:01Z"),
        ("error_class", "transient"),
        ("error_code", "http.503"),
        ("error_message", "503 for user 17"),
        ("error_template", "<number> for user <number>"),
        ("value_size", "13"),
        ("expects_result", "true"),
    ]);
    assert_cells(&rows, &expected);
    let position: Vec<String> = (0..5)
        .map(|column| array_value_to_string(rows.column(column), 0).unwrap())
        .collect();
    assert_eq!(
        position,
        ["docs-retry-5s", "id", "0", "7", "1970-01-01T00:00:02Z"]
    );
}

#[test]
fn result_is_an_outcome() {
    let mut record = record_at("docs-out", 0, 7);
    let entered = Entered {
        topic: "docs".into(),
        partition: 1,
        offset: 42,
        timestamp: Some(Timestamp::from_millis(0)),
    };
    write_lineage(&mut record.headers, "docs", &entered, 2);
    let of = |record: &Record| rows(&OUTCOMES, record, &origin(None, false), "[]", false);
    let mut expected = vec![("outcome", "succeeded"), ("pipeline", "docs")];
    expected.extend(LINEAGE);
    assert_cells(&of(&record), &expected);
    // Another program can write to the topic, too.
    record.headers = [
        ("original-offset", Some(&b"first"[..])),
        ("pipeline", Some(b"\xff")),
    ]
    .into_iter()
    .collect();
    assert_cells(
        &of(&record),
        &[
            ("outcome", "succeeded"),
            (UNFIT, "pipeline: not UTF-8; origin_offset: invalid"),
        ],
    );
}

#[test]
fn dead_letter_is_masked() {
    let record = failed("docs-dlq", ErrorClass::Permanent);
    let of = |rules: &str, payloads| rows(&DEAD_LETTERS, &record, &origin(None, true), rules, payloads);
    let text = |rows: &RecordBatch, name: &str| {
        let found = cells(rows).into_iter().find(|(column, _)| column == name);
        found.map(|(_, value)| value)
    };
    let shown = of("[]", true);
    assert_eq!(text(&shown, "key").unwrap(), "k");
    assert_eq!(text(&shown, "value").unwrap(), r#"{"card":4111}"#);
    assert_eq!(text(&shown, "dialect").unwrap(), "REDELIVER");
    assert_eq!(text(&shown, UNFIT), None);
    assert_eq!(text(&of("[]", false), "value"), None);
    let rules = r#"[{"topics":["docs-*"],"key":true,"fields":["/card"],"messages":["user [0-9]+"]}]"#;
    let masked = of(rules, true);
    assert_eq!(text(&masked, "key").unwrap(), MASK);
    assert_eq!(text(&masked, "value").unwrap(), r#"{"card":"<masked>"}"#);
    assert_eq!(text(&masked, "error_message").unwrap(), "503 for <masked>");
    assert_eq!(text(&masked, "value_size"), None);
    assert_ne!(text(&masked, "group_id"), text(&shown, "group_id"));
    // A death is an outcome, too.
    let died = rows(&OUTCOMES, &record, &origin(None, true), rules, true);
    let mut expected = vec![("outcome", "died"), ("pipeline", "docs")];
    expected.extend(LINEAGE);
    expected.extend([("error_class", "permanent"), ("error_code", "http.503")]);
    assert_cells(&died, &expected);
}

#[test]
fn named_headers_are_in_a_column() {
    let mut record = failed("docs-dlq", ErrorClass::Permanent);
    record.headers.push_text("tenant", "a\"b");
    record.headers.push_text("other", "x");
    let rules = r#"[{"topics":["docs-*"],"headers":["region"]}]"#;
    let mut of = |region: &[u8]| {
        record.headers.push("region", Some(region));
        [(&ATTEMPTS, "[]"), (&OUTCOMES, rules), (&DEAD_LETTERS, rules)].map(|(schema, rules)| {
            let rows = rows(schema, &record, &origin(None, true), rules, false);
            let mut cells = cells(&rows).into_iter();
            cells.find(|(name, _)| name == "headers" || name == UNFIT)
        })
    };
    let found = |name: &str, text: &str| Some((name.to_owned(), text.to_owned()));
    let masked = found("headers", r#"{"region":"<masked>","tenant":"a\"b"}"#);
    let shown = found("headers", r#"{"region":"eu","tenant":"a\"b"}"#);
    assert_eq!(of(b"eu"), [shown, masked.clone(), masked.clone()]);
    assert_eq!(
        of(b"\xff"),
        [found(UNFIT, "headers: not UTF-8"), masked.clone(), masked]
    );
}

#[test]
fn ledger_entry_is_a_decision() {
    let entry = v1::LedgerEntry {
        state: v1::DeadLetterState::Redriven.into(),
        time: Some(to_timestamp(Timestamp::from_millis(5_000))),
        by: "token:ann".into(),
        redrive_id: "r1".into(),
        destination: "docs".into(),
        edited: vec!["value".into(), "key".into()],
        ..v1::LedgerEntry::default()
    };
    let of = |key: &str, value: Option<Bytes>| {
        let record = Record {
            value,
            ..redeliver_testkit::record(key, None)
        };
        rows(&DECISIONS, &record, &origin(None, false), "[]", false)
    };
    let letter = [
        ("letter_topic", "docs-dlq"),
        ("letter_partition", "3"),
        ("letter_offset", "1024"),
    ];
    let decided = [
        ("state", "REDRIVEN"),
        ("decided_at", "1970-01-01T00:00:05Z"),
        ("decided_by", "token:ann"),
        ("redrive_id", "r1"),
        ("destination", "docs"),
        ("edited", "value,key"),
    ];
    let written = Some(entry.encode_to_vec().into());
    assert_cells(&of("docs-dlq/3/1024", written), &[&letter[..], &decided].concat());
    let open = [("state", "OPEN")];
    assert_cells(&of("docs-dlq/3/1024", None), &[&letter[..], &open].concat());
    let invalid = [(UNFIT, "state: invalid")];
    assert_cells(
        &of("docs-dlq/3/1024", Some(Bytes::from_static(b"\xff"))),
        &[&letter[..], &invalid].concat(),
    );
    assert_cells(&of("docs-dlq", None), &[(UNFIT, "letter_topic: invalid")]);
}

#[test]
fn state_record_is_a_job() {
    let job = v1::JobRecord {
        app: "mail".into(),
        topic: "mails".into(),
        state: v1::JobState::Dispatched.into(),
        due_ms: 5_000,
        accepted_ms: 1_000,
        ended_ms: Some(5_001),
        revision: 2,
        ..v1::JobRecord::default()
    };
    let of = |key: &str, value: Option<Bytes>| {
        let record = redeliver_testkit::record(key, value);
        rows(&JOBS, &record, &origin(None, false), "[]", false)
    };
    let expected = [
        ("record_kind", "job"),
        ("job_id", "01J"),
        ("forgotten", "false"),
        ("app", "mail"),
        ("topic", "mails"),
        ("state", "dispatched"),
        ("priority", "normal"),
        ("due_at", "1970-01-01T00:00:05Z"),
        ("accepted_at", "1970-01-01T00:00:01Z"),
        ("ended_at", "1970-01-01T00:00:05.001Z"),
        ("revision", "2"),
        ("long_wait", "false"),
    ];
    assert_cells(&of("01J", Some(job.encode_to_vec().into())), &expected);
    assert_cells(
        &of("schedule:nightly", None),
        &[
            ("record_kind", "schedule"),
            ("job_id", "nightly"),
            ("forgotten", "true"),
        ],
    );
}

#[test]
fn audit_entry_is_a_row() {
    let entry = v1::AuditEntry {
        id: "e1".into(),
        time: Some(to_timestamp(Timestamp::from_millis(5_000))),
        by: "token:ann".into(),
        action: "control.pause".into(),
        target: "pipeline/docs".into(),
        ids: vec!["a/0/1".into(), "a/0/2".into()],
        ..v1::AuditEntry::default()
    };
    let record = redeliver_testkit::record("k", Some(entry.encode_to_vec().into()));
    let rows = rows(&AUDIT, &record, &origin(None, false), "[]", false);
    let expected = [
        ("entry_id", "e1"),
        ("decided_at", "1970-01-01T00:00:05Z"),
        ("caller", "token:ann"),
        ("action", "control.pause"),
        ("target", "pipeline/docs"),
        ("affected", "0"),
        ("ids", "a/0/1,a/0/2"),
        ("masked", "false"),
    ];
    assert_cells(&rows, &expected);
}

#[test]
fn every_record_becomes_one_row() {
    let valid = failed("docs-dlq", ErrorClass::Permanent);
    for schema in TABLES.into_iter().filter(|schema| schema.table != "gaps") {
        let empty = rows(schema, &record_at("t", 0, 0), &origin(None, false), "[]", true);
        assert_eq!(empty.num_rows(), 1);
        assert_eq!(
            rows(schema, &valid, &origin(Some("5s"), true), "[]", true).num_rows(),
            1
        );
    }
}

#[test]
fn damaged_messages_become_rows() {
    let entry = v1::LedgerEntry {
        by: "ann".into(),
        ..v1::LedgerEntry::default()
    };
    let job = v1::JobRecord {
        app: "mail".into(),
        ..v1::JobRecord::default()
    };
    let valid = [
        entry.encode_to_vec(),
        job.encode_to_vec(),
        b"docs-dlq/3/1024".to_vec(),
    ];
    fuzz("lake-rows", FEW, &valid, |input| {
        let record = Record {
            key: Some(Bytes::copy_from_slice(input)),
            value: Some(Bytes::copy_from_slice(input)),
            headers: [("original-offset", Some(input)), ("error-class", Some(input))]
                .into_iter()
                .collect(),
            ..record_at("docs-dlq", 0, 0)
        };
        for schema in TABLES.into_iter().filter(|schema| schema.table != GAPS.table) {
            assert_eq!(
                rows(schema, &record, &origin(None, true), "[]", true).num_rows(),
                1
            );
        }
    });
}
