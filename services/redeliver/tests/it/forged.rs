//! Forged headers. A record with invalid reserved headers becomes a dead letter with an error code that names the header.
//! It is never released early, and it does not stop other records.

use std::collections::HashMap;
use std::time::Duration;

use redeliver_core::headers::{
    ERROR_CLASS, ERROR_CODE, ERROR_MESSAGE, ERROR_TIMESTAMP, ORIGINAL_OFFSET, ORIGINAL_PARTITION,
    ORIGINAL_TIMESTAMP, ORIGINAL_TOPIC, PIPELINE, PROCESS_AFTER, RETRY_COUNT, RETURN_TOPIC,
};
use redeliver_core::{Clock as _, Headers, Record, SystemClock, Timestamp};
use redeliver_testkit::{Fate, Reply, ensure, eventually};

use crate::raw;
use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder, records, text, users_headers};

/// The reserved headers of a waiting record.
type List = Vec<(&'static str, Option<Vec<u8>>)>;

fn valid_headers(pipe: &Pipe, due: Timestamp) -> List {
    let text = |value: &str| Some(value.as_bytes().to_vec());
    vec![
        (PIPELINE, text(pipe.name())),
        (ORIGINAL_TOPIC, text("upstream")),
        (ORIGINAL_PARTITION, text("0")),
        (ORIGINAL_OFFSET, text("7")),
        (ORIGINAL_TIMESTAMP, text("2026-01-31T12:00:00.000Z")),
        (RETRY_COUNT, text("1")),
        (ERROR_CLASS, text("transient")),
        (ERROR_CODE, text("http.503")),
        (ERROR_MESSAGE, text("busy")),
        (ERROR_TIMESTAMP, text("2026-01-31T12:00:01.000Z")),
        (PROCESS_AFTER, text(&due.to_string())),
        (RETURN_TOPIC, text(&pipe.pipeline.return_topic())),
    ]
}

/// Forged headers: each header twice, and some with a wrong value, with the names of what is wrong. The unit tests of
/// `redeliver_core::headers` check all kinds of wrong values.
fn forgeries(pipe: &Pipe, due: Timestamp) -> Vec<(String, &'static str, List)> {
    let valid = valid_headers(pipe, due);
    let twice = valid.iter().map(|(name, value)| {
        let mut list = valid.clone();
        list.push((name, value.clone()));
        (format!("twice {name}"), *name, list)
    });
    let wrong: [(&str, &[u8]); 7] = [
        (PROCESS_AFTER, b"2999-01-01T00:00:00.000Z"),
        (RETURN_TOPIC, b"../etc"),
        (RETRY_COUNT, b"100001"),
        (ORIGINAL_TOPIC, b"a/b"),
        (ORIGINAL_PARTITION, b"\xff\x00"),
        (ORIGINAL_OFFSET, b"\xff\x00"),
        (ORIGINAL_TIMESTAMP, b"\xff\x00"),
    ];
    let wrong = wrong.map(|(name, value)| {
        let mut list = valid.clone();
        let header = list.iter_mut().find(|(header, _)| *header == name).unwrap();
        header.1 = Some(value.to_vec());
        (format!("wrong {name}"), name, list)
    });
    twice.chain(wrong).collect()
}

fn draft(word: &str, list: &List) -> Draft {
    let mut headers = Headers::new();
    headers.push("user", None);
    for (name, value) in list {
        headers.push(name, value.as_deref());
    }
    headers.push("user", Some(b"\xff last"));
    Draft {
        headers,
        ..Draft::new(b"\x00key".to_vec(), word.to_owned())
    }
}

fn word(record: &Record) -> String {
    String::from_utf8_lossy(record.value.as_deref().unwrap_or_default()).into_owned()
}

fn setup(name: &str) -> PipeBuilder {
    PipeBuilder::new(name).partitions(1).tiers(&[300])
}

/// In a tier and in the due topic. Each forged record is followed by a valid one.
#[test]
fn forged_headers_become_dead_letters() {
    let pipe = setup("forged").create();
    let mut services = [pipe.enricher("a"), pipe.retry_tier("a")];
    let mut forged = Vec::new();
    let mut valid = Vec::new();
    for (topic, millis) in [(pipe.first_tier(), 700), (pipe.pipeline.due_topic(), 0)] {
        let due = SystemClock.now().after(Duration::from_millis(millis));
        let mut drafts = Vec::new();
        for (n, (word, name, list)) in forgeries(&pipe, due).into_iter().enumerate() {
            // Only tiers read the return topic.
            if millis == 0 && word == format!("wrong {RETURN_TOPIC}") {
                continue;
            }
            let word = format!("{word} in {topic}");
            drafts.push(draft(&word, &list));
            forged.push((word, name, list));
            // A time lock in the past is valid: the record is released at once.
            let lock = if n % 2 == 0 {
                due
            } else {
                Timestamp::from_millis(1)
            };
            let word = format!("valid {n} in {topic}");
            drafts.push(draft(&word, &valid_headers(&pipe, lock)));
            valid.push((word, lock));
        }
        pipe.produce_to(&topic, drafts);
    }
    let mut without_lock = valid_headers(&pipe, SystemClock.now());
    without_lock.retain(|(name, _)| *name != PROCESS_AFTER);
    let missing = [
        ("no lock", PROCESS_AFTER, without_lock),
        ("no headers", RETURN_TOPIC, List::new()),
    ];
    for (word, name, list) in missing {
        pipe.produce_to(&pipe.first_tier(), vec![draft(word, &list)]);
        forged.push((word.to_owned(), name, list));
    }
    let real = pipe.produce(records(40));

    let mut watch = pipe.watch();
    watch.until_ended(forged.len() + valid.len() + real.len(), DEADLINE);
    let dead_letters = pipe.pipeline.dead_letter_topic();
    let ends: HashMap<String, &Record> = watch
        .records
        .iter()
        .map(|record| (word(record), record))
        .collect();
    for (word, name, list) in &forged {
        let end = ends[word];
        assert_eq!(end.position.topic, dead_letters, "{word}");
        let code = text(end, ERROR_CODE).unwrap().unwrap();
        assert_eq!(code, format!("header.{name}"), "{word}");
        assert_eq!(text(end, ERROR_CLASS), Ok(Some("malformed".into())), "{word}");
        let message = text(end, ERROR_MESSAGE).unwrap().unwrap();
        assert!(message.contains(name), "{word}: {message}");
        assert_eq!(text(end, PIPELINE), Ok(Some(pipe.name().to_owned())), "{word}");
        let sent = draft(word, list);
        assert_eq!(
            (&end.key, users_headers(&end.headers)),
            (&sent.key, users_headers(&sent.headers)),
            "{word}"
        );
        assert_eq!(pipe.endpoint.calls_of_body(word.as_bytes()), 0, "{word}");
    }
    for (word, lock) in &valid {
        let end = ends[word];
        assert_ne!(end.position.topic, dead_letters, "{end:?}");
        assert!(end.timestamp >= Some(*lock), "{end:?}");
    }
    let report = eventually("nothing is waiting", DEADLINE, || {
        let report = pipe.audit();
        ensure(report.waiting.total() == 0, report.to_string()).map(|()| report)
    });
    assert!(report.is_clean() && report.output == 40, "{report}");
    for service in &mut services {
        assert_eq!(service.get("/readyz").0, 200);
    }
}

#[test]
fn forged_headers_in_source_are_ignored() {
    let pipe = setup("forged-source").create();
    let (_enricher, _tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let forged = forgeries(&pipe, SystemClock.now());
    let sent = pipe.produce(forged.iter().map(|(word, _, list)| draft(word, list)).collect());
    let ends = pipe.settle(&sent, DEADLINE);
    // A record in the source is new: its reserved headers are replaced.
    ends.meets_with(&sent, |_| Fate::Succeeds);
}

/// Names that are not UTF-8 make dead letters, in each topic. Names with NUL bytes are passed on unchanged.
#[test]
fn unusual_header_names_stop_nothing() {
    let setup = setup("forged-names").behave(|request| match request.body.starts_with(b"busy") {
        true => Reply::status(503),
        false => Reply::status(200),
    });
    let pipe = setup.create();
    let mut services = [pipe.enricher("a"), pipe.retry_tier("a")];
    let produce = |topic: &str, value: &str, headers: &[(&[u8], &[u8])]| {
        raw::produce(&pipe.kafka.brokers, topic, value.as_bytes(), headers);
    };
    let topics = [
        pipe.pipeline.source.clone(),
        pipe.pipeline.due_topic(),
        pipe.first_tier(),
    ];
    for topic in &topics {
        produce(
            topic,
            &format!("in {topic}"),
            &[(b"user", b"1"), (b"\xff\xfe", b"2")],
        );
        pipe.produce(records(3));
    }
    produce(
        &pipe.pipeline.source,
        "many",
        &vec![(&b"\xff"[..], &b"x"[..]); 20_000],
    );
    let with_nul: [(&[u8], &[u8]); 4] = [
        (b"user\0name", b"1"),
        (b"\0", b""),
        // A reserved header, if it were cut off.
        (b"pipeline\0", b"2"),
        (b"plain", b"\0"),
    ];
    // One becomes a result. The other one waits in a tier and then becomes a dead letter.
    for value in ["nul", "busy"] {
        produce(&pipe.pipeline.source, value, &with_nul);
    }
    let mut watch = pipe.watch();
    watch.until_ended(4 + 9 + 2, DEADLINE);
    let dead_letters = pipe.pipeline.dead_letter_topic();
    let (dead, results): (Vec<&Record>, Vec<_>) = watch
        .records
        .iter()
        .partition(|record| record.position.topic == dead_letters);
    assert_eq!(dead.len(), 5, "{dead:?}");
    let of = |value: &str| *dead.iter().find(|dead| word(dead) == value).unwrap();
    for topic in &topics {
        let end = of(&format!("in {topic}"));
        assert_eq!(text(end, ERROR_CODE), Ok(Some("header.name".into())));
        assert_eq!(end.headers.last("user"), Some(&b"1"[..]));
    }
    assert_eq!(text(of("many"), ERROR_CODE), Ok(Some("header.name".into())));
    let message = text(of("many"), ERROR_MESSAGE).unwrap().unwrap();
    assert!(message.starts_with("20000 headers "), "{message}");
    let expected: Headers = with_nul
        .iter()
        .map(|(name, value)| (std::str::from_utf8(name).unwrap(), Some(*value)))
        .collect();
    let is_result = |record: &&&Record| record.headers.last("user\0name").is_some();
    let result = results.iter().find(is_result).unwrap();
    for end in [*result, of("busy")] {
        assert_eq!(users_headers(&end.headers), expected, "{end:?}");
    }
    for service in &mut services {
        assert_eq!(service.get("/readyz").0, 200);
        let output = service.output();
        assert!(!output.contains("panic"), "{output}");
    }
}
