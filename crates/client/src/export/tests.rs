use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use redeliver_core::terminal::is_harmful;

use super::*;

fn letter() -> ExportedDeadLetter {
    ExportedDeadLetter {
        position: Position {
            topic: "a-dlq".into(),
            partition: 1,
            offset: 17,
        },
        timestamp: Some(Timestamp::from_millis(1_763_722_800_123)),
        timestamp_type: Some(TimestampType::CreateTime),
        state: DeadLetterState::Open,
        group: Some("8d4d8be8ab351d3a".to_owned()),
        key: None,
        headers: [
            ("tenant", Some(&b"x"[..])),
            ("tenant", None),
            ("tenant", Some(b"")),
            ("b", Some(b"\xff")),
        ]
        .into_iter()
        .collect(),
        value: Some(Bytes::from_static(b"\xff\x00a")),
        partial: Partial::default(),
    }
}

fn file(letters: &[ExportedDeadLetter]) -> String {
    let mut writer = ExportWriter::new(Vec::new(), "state = OPEN", Timestamp::from_millis(0)).unwrap();
    for letter in letters {
        writer.write(letter).unwrap();
    }
    let complete = Completeness {
        complete: true,
        ..Completeness::default()
    };
    String::from_utf8(writer.finish(&complete).unwrap()).unwrap()
}

/// The dead letters of a file, or the error.
fn read(file: &str) -> Result<Vec<ExportedDeadLetter>, String> {
    let mut reader = ExportReader::new(file.as_bytes()).map_err(|error| error.to_string())?;
    let letters = reader.by_ref().collect::<Result<_, _>>();
    let letters = letters.map_err(|error| error.to_string())?;
    assert_eq!(
        (reader.filter_text(), reader.is_complete()),
        ("state = OPEN", Some(true))
    );
    Ok(letters)
}

#[test]
fn the_format_is_as_documented() {
    let gone = ExportedDeadLetter {
        timestamp: None,
        timestamp_type: None,
        group: None,
        key: Some(Bytes::new()),
        headers: Headers::new(),
        value: None,
        partial: Partial {
            headers: Some(Gap::Gone),
            value: Some(Gap::Gone),
            ..Partial::default()
        },
        ..letter()
    };
    let expected = concat!(
        r#"{"redeliver_dead_letters":1,"filter":"state = OPEN","exported_at":"1970-01-01T00:00:00.000Z"}"#,
        "\n",
        r#"{"topic":"a-dlq","partition":1,"offset":17,"timestamp":1763722800123,"timestamp_type":"create_time","state":"open","#,
        r#""group":"8d4d8be8ab351d3a","key":null,"headers":[{"name":"tenant","value":"x"},{"name":"tenant","value":null},"#,
        r#"{"name":"tenant","value":""},{"name":"b","value_base64":"/w=="}],"value_base64":"/wBh"}"#,
        "\n",
        r#"{"topic":"a-dlq","partition":1,"offset":17,"timestamp":null,"timestamp_type":null,"state":"open","group":null,"#,
        r#""partial":{"headers":"gone","value":"gone"},"key":""}"#,
        "\n",
        r#"{"end":{"dead_letters":2,"partial":1,"complete":true,"as_of":null,"missing_partitions":0}}"#,
        "\n",
    );
    assert_eq!(file(&[letter(), gone.clone()]), expected);
    assert_eq!(read(expected), Ok(vec![letter(), gone]));
}

#[test]
fn truncated_file_is_noticed() {
    let whole = file(&[letter(), letter()]);
    for end in 0..whole.len() {
        assert!(read(&whole[..end]).is_err(), "{end} bytes of {whole}");
    }
    let lines: Vec<&str> = whole.lines().collect();
    let without_one = [lines[0], lines[1], lines[3], ""].join("\n");
    assert_eq!(
        read(&without_one).unwrap_err(),
        "the file has 1 dead letters, and its last line counts 2"
    );
    let twice = format!("{whole}{whole}");
    assert_eq!(
        read(&twice).unwrap_err(),
        "line 5 is after the last line of the export"
    );
}

#[test]
fn error_names_line_and_field() {
    let check = |from: &str, to: &str, expected: &str| {
        let damaged = file(&[letter()]).replacen(from, to, 1);
        let problem = read(&damaged).unwrap_err();
        assert!(
            problem.contains(expected) && !problem.contains("s3cret"),
            "{to}: {problem}"
        );
    };
    check(
        r#"redeliver_dead_letters":1"#,
        r#"redeliver_dead_letters":2"#,
        "version 2",
    );
    check("redeliver_dead_letters", "s3cret", "line 1 is not the first line");
    check(
        r#""partition":1"#,
        r#""partition":"s3cret""#,
        "line 2: field `partition` is not valid",
    );
    check(
        r#""partition":1"#,
        r#""partition":-1"#,
        "line 2: field `partition` is negative",
    );
    check("a-dlq", "s3cret/x", "line 2: field `topic`");
    check(
        r#""state":"open""#,
        r#""state":"s3cret""#,
        "line 2: field `state`",
    );
    check("/w==", "s3cret", "line 2: field `headers[3].value_base64`");
    check(
        r#""value":null"#,
        r#""value":null,"value_base64":"""#,
        "line 2: a header has both",
    );
    check(r#","value":null"#, "", "line 2: a header has neither");
    check(r#""key":null,"#, "", "line 2: has neither `key`");
    check(r#","value_base64":"/wBh""#, "", "line 2: has neither `value`");
    check(r#""key":null,"#, r#""key":null,"key":null,"#, "line 2: ");
    check(
        r#""key":null,"#,
        r#""key":null,"keys":1,"#,
        "line 2: field `keys` is not valid",
    );
    check("/wBh\"}", "/wBh\"}{}", "line 2: has more than one JSON object");
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        vec(any::<u8>(), 0..40),
        any::<String>().prop_map(String::into_bytes),
        Just(b"\0\x1f\x7f\"\\\n".to_vec()),
    ]
}

fn gap() -> impl Strategy<Value = Option<Gap>> {
    option::of(prop_oneof![
        Just(Gap::Withheld),
        Just(Gap::Masked),
        Just(Gap::Gone)
    ])
}

fn any_letter() -> impl Strategy<Value = ExportedDeadLetter> {
    let position = ("[a-zA-Z0-9_-]{1,20}", 0..i32::MAX, 0..i64::MAX);
    let timestamp = (
        option::of(any::<i64>()),
        prop_oneof![
            Just(None),
            Just(Some(TimestampType::CreateTime)),
            Just(Some(TimestampType::LogAppendTime))
        ],
    );
    let state = prop_oneof![
        Just(DeadLetterState::Unspecified),
        Just(DeadLetterState::Open),
        Just(DeadLetterState::Redriven),
        Just(DeadLetterState::Discarded)
    ];
    let content = (
        option::of(bytes()),
        vec((any::<String>(), option::of(bytes())), 0..6),
        option::of(bytes()),
    );
    let about = (state, option::of("[0-9a-f]{16}"), gap(), gap(), gap());
    let parts = (position, timestamp, content, about);
    parts.prop_map(
        |((topic, partition, offset), (millis, timestamp_type), (key, headers, value), about)| {
            let (state, group, key_gap, headers_gap, value_gap) = about;
            let has_headers = !matches!(headers_gap, Some(Gap::Withheld | Gap::Gone));
            let headers = headers.iter().filter(|_| has_headers);
            ExportedDeadLetter {
                position: Position {
                    topic: topic.into(),
                    partition,
                    offset,
                },
                timestamp: millis.map(Timestamp::from_millis),
                timestamp_type,
                state,
                group,
                key: key.map(Bytes::from),
                headers: headers
                    .map(|(name, value)| (name.as_str(), value.as_deref()))
                    .collect(),
                value: value.map(Bytes::from),
                partial: Partial {
                    key: key_gap,
                    headers: headers_gap,
                    value: value_gap,
                },
            }
        },
    )
}

proptest! {
    #[test]
    fn dead_letters_survive_a_round_trip(letters in vec(any_letter(), 0..5)) {
        let file = file(&letters);
        prop_assert!(!file.contains(|c| is_harmful(c) && c != '\n'));
        prop_assert_eq!(read(&file), Ok(letters));
    }

    #[test]
    fn damaged_lines_never_panic(letter in any_letter(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut file = file(&[letter]).into_bytes();
        let at = at.index(file.len());
        file[at] = byte;
        if let Ok(reader) = ExportReader::new(&file[..]) {
            let _ = reader.count();
        }
    }
}
