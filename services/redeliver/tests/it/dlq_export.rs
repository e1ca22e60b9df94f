//! `redeliver dlq export`: what it writes is what Kafka contains, byte for byte.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use bytes::Bytes;
use redeliver_client::TimestampType;
use redeliver_client::export::{ExportReader, ExportedDeadLetter, Gap, Partial};
use redeliver_core::{Headers, Output, Record};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_testkit::{brokers, eventually, unique};

use crate::raw;
use crate::services::{Services, path};
use crate::support::DEADLINE;

/// More than the inspector sends in a list.
const LARGE: usize = 2_500_000;

fn output(topic: &Arc<str>, key: Option<&[u8]>, headers: Headers, value: Option<&[u8]>) -> Output {
    Output {
        topic: topic.clone(),
        partition: Some(0),
        key: key.map(Bytes::copy_from_slice),
        headers,
        value: value.map(Bytes::copy_from_slice),
    }
}

#[track_caller]
fn produce(outputs: &[Output]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.unwrap().block_on(async {
        let producer = Producer::new(&KafkaSettings::new(brokers(), unique("export"))).unwrap();
        let sent = outputs.iter().map(|output| producer.send(output));
        futures::future::try_join_all(sent).await.unwrap();
    });
}

/// The dead letters of a file by position.
#[track_caller]
fn read(file: &Path) -> BTreeMap<String, ExportedDeadLetter> {
    let reader = ExportReader::new(BufReader::new(File::open(file).unwrap())).unwrap();
    let letters = reader.map(Result::unwrap);
    letters
        .map(|letter| (letter.position.to_string(), letter))
        .collect()
}

#[track_caller]
fn is_same(letter: &ExportedDeadLetter, record: &Record) {
    assert_eq!(letter.key, record.key);
    assert_eq!(letter.headers, record.headers);
    assert_eq!(letter.timestamp, record.timestamp);
    // Not with `assert_eq`, which would print megabytes.
    assert!(letter.value == record.value, "the value of {}", record.position);
}

/// Exports until the index contains everything, so that the exit status is this one for another reason.
#[track_caller]
fn export(services: &Services, count: usize, status: i32, arguments: &[&str]) -> String {
    eventually("a complete export", DEADLINE, || {
        let printed = services.pipe.redeliver(&[&["dlq", "export"], arguments].concat());
        let is_complete = !printed.stderr.contains("incomplete");
        if is_complete
            && printed.code == Some(status)
            && printed
                .stderr
                .starts_with(&format!("{count} dead letters exported"))
        {
            Ok(printed.stderr)
        } else {
            Err(format!("{:?} {}", printed.code, printed.stderr))
        }
    })
}

#[test]
fn export_contains_every_byte() {
    let services = Services::new("export");
    let topic = services.pipe.pipeline.dead_letter_topic();
    let stamped: Arc<str> = format!("{}-stamped-dlq", services.pipe.name()).into();
    raw::configure_topic(&brokers(), &topic, &[("max.message.bytes", "8000000")]);
    raw::create_topic(
        &brokers(),
        &stamped,
        &[("message.timestamp.type", "LogAppendTime")],
    );
    let headers: Headers = [
        ("tenant", Some(&b"x"[..])),
        ("tenant", None),
        ("tenant", Some(b"")),
        ("", Some(b"\xff\x00")),
        ("\u{1b}\"ä", Some("\u{202e}\n".as_bytes())),
        ("tenant", Some(b"x")),
    ]
    .into_iter()
    .collect();
    let every_byte: Vec<u8> = (0..=255).collect();
    produce(&[
        output(&topic, None, Headers::new(), None),
        output(&topic, Some(b""), Headers::new(), Some(b"")),
        output(&topic, Some(&every_byte), headers.clone(), Some(&every_byte)),
        output(
            &topic,
            Some(b"\0"),
            headers.clone(),
            Some(br#"{"a" : 1.0,"a":"\ud83d"}"#),
        ),
        output(
            &topic,
            Some("ключ".as_bytes()),
            headers,
            Some("\u{feff}\r\n".as_bytes()),
        ),
        output(&stamped, Some(b"k"), Headers::new(), Some(b"v")),
    ]);
    let large: Vec<u8> = (0..251).cycle().take(LARGE).collect();
    raw::produce(&brokers(), &topic, &large, &[(b"a", b"b")]);
    let text = "ä".repeat(LARGE / 2);
    raw::produce(&brokers(), &topic, text.as_bytes(), &[]);
    let unreadable = raw::produce(&brokers(), &topic, b"v", &[(b"\xff", b"lost"), (b"a", b"b")]);

    let _inspector = services.inspect();
    let directory = services.pipe.env.directory();
    let (all, some) = (directory.join("all.jsonl"), directory.join("some.jsonl"));
    let summary = export(&services, 9, 3, &["--all", "--file", path(&all), "--force"]);
    assert!(
        summary.contains("1 of them without all parts: 1 with headers whose names are not UTF-8"),
        "{summary}"
    );
    let letters = read(&all);
    let records = services.pipe.read(&[topic.clone(), stamped.clone()]);
    assert_eq!((letters.len(), records.len()), (9, 9));
    for record in &records {
        let letter = &letters[&record.position.to_string()];
        is_same(letter, record);
        let is_unreadable = record.position.topic == topic && record.position.offset == unreadable;
        let headers = is_unreadable.then_some(Gap::Unreadable);
        let partial = Partial {
            headers,
            ..Partial::default()
        };
        assert_eq!(letter.partial, partial, "{}", record.position);
        let expected = if record.position.topic == stamped {
            TimestampType::LogAppendTime
        } else {
            TimestampType::CreateTime
        };
        assert_eq!(letter.timestamp_type, Some(expected));
        assert_eq!(letter.group.as_ref().map(String::len), Some(16));
    }

    // Without the one that has unreadable headers.
    let filter = format!("id != \"{topic}/0/{unreadable}\"");
    let summary = export(
        &services,
        8,
        0,
        &["--filter", &filter, "--file", path(&some), "--force"],
    );
    assert_eq!(summary, "8 dead letters exported\n");
    let mut exact = letters;
    exact.remove(&format!("{topic}/0/{unreadable}"));
    assert_eq!(read(&some), exact);

    // An existing file stays.
    let before = std::fs::read(&some).unwrap();
    let refused = services.fails(2, &["dlq", "export", "--all", "--file", path(&some)]);
    assert!(refused.stderr.contains("--force"), "{refused:?}");
    let wrong = ["--filter", "eror_class = 1", "--file", path(&some), "--force"];
    services.fails(1, &[&["dlq", "export"], &wrong[..]].concat());
    assert_eq!(std::fs::read(&some).unwrap(), before);

    // The payload of one in each format.
    let id = format!("{topic}/0/3");
    let json = services.cli(&["dlq", "show", &id, "--payload", "json"]);
    assert_eq!(json, "{\n  \"a\": 1.0,\n  \"a\": \"\\ud83d\"\n}\n");
    let id = format!("{topic}/0/4");
    assert_eq!(
        services.cli(&["dlq", "show", &id, "--payload", "hex"]),
        "efbbbf0d0a\n"
    );
    assert_eq!(
        services.cli(&["dlq", "show", &id, "--payload", "text"]),
        "\u{feff}\\r\n"
    );
    assert_eq!(services.cli(&["dlq", "show", &id, "--payload"]), "\u{feff}\r\n");
    let none = services.fails(1, &["dlq", "show", &id, "--payload", "json"]);
    assert!(none.stderr.contains("is not a JSON document"), "{none:?}");
}

#[test]
fn export_survives_inspector_restart() {
    let services = Services::new("export-outage");
    let topic = services.pipe.pipeline.dead_letter_topic();
    let count = 500;
    let outputs: Vec<Output> = (0..count)
        .map(|index| {
            let value = format!("{index:>4000}");
            output(&topic, None, Headers::new(), Some(value.as_bytes()))
        })
        .collect();
    produce(&outputs);
    let mut inspector = services.inspect();
    eventually("all dead letters are indexed", DEADLINE, || {
        let stats = services.pipe.redeliver(&["dlq", "stats", "-o", "json"]);
        if stats.stdout.contains(&format!("\"total\":{count}")) {
            Ok(())
        } else {
            Err(format!("{stats:?}"))
        }
    });
    let mut command = services.pipe.command("redeliver", &["dlq", "export", "--all"]);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut export = command.spawn().unwrap();
    let mut stdout = BufReader::with_capacity(4096, export.stdout.take().unwrap());
    let mut stderr = BufReader::new(export.stderr.take().unwrap());
    // The pipe holds less than a page, so the command waits within the first one.
    stdout.fill_buf().unwrap();
    inspector.kill_9();
    let reading = std::thread::spawn(move || {
        let reader = ExportReader::new(stdout).unwrap();
        reader.map(Result::unwrap).collect::<Vec<_>>()
    });
    let mut said = String::new();
    while !said.contains("connection lost; reconnecting") {
        assert_ne!(stderr.read_line(&mut said).unwrap(), 0, "{said}");
    }
    let _inspector = services.inspect();
    let letters = reading.join().unwrap();
    let records = services.pipe.read(std::slice::from_ref(&topic));
    assert_eq!((letters.len(), records.len()), (count, count));
    let letters: BTreeMap<_, _> = letters.iter().map(|letter| (&letter.position, letter)).collect();
    for record in &records {
        is_same(letters[&record.position], record);
    }
    while stderr.read_line(&mut said).unwrap() > 0 {}
    assert!(
        said.contains("reconnected\n500 dead letters exported\n"),
        "{said}"
    );
    // Whether the answers were complete depends on how long the inspector was away.
    assert!(matches!(export.wait().unwrap().code(), Some(0 | 3)), "{said}");
}
