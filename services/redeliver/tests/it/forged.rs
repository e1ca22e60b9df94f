//! Forged headers. A record with invalid reserved headers becomes a dead letter with an error code that names the header.
//! It is never released early, and it does not stop other records.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::headers::{
    ERROR_CLASS, ERROR_CODE, ERROR_MESSAGE, ERROR_TIMESTAMP, ORIGINAL_OFFSET, ORIGINAL_PARTITION,
    ORIGINAL_TIMESTAMP, ORIGINAL_TOPIC, PIPELINE, PROCESS_AFTER, RETRY_COUNT, RETURN_TOPIC,
};
use redeliver_core::{Clock as _, Headers, Record, SystemClock, Timestamp};
use redeliver_testkit::{Fate, Reply, ServiceProcess, eventually};

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

/// Forged headers: each header twice, and each of `tampered` null, missing and with an invalid value. The unit tests of
/// `redeliver_core::headers` check all kinds of invalid values. The first word says what was changed.
fn forgeries(pipe: &Pipe, due: Timestamp, tampered: &[&'static str]) -> Vec<(String, &'static str, List)> {
    let mut forged = Vec::new();
    let mut forge = |how: String, name: &'static str, change: &dyn Fn(&mut List, usize)| {
        let mut list = valid_headers(pipe, due);
        let at = list.iter().position(|(header, _)| *header == name).unwrap();
        change(&mut list, at);
        forged.push((format!("{how} {name} #{}", forged.len()), name, list));
    };
    let written = [
        ERROR_CLASS,
        ERROR_CODE,
        ERROR_MESSAGE,
        ERROR_TIMESTAMP,
        PIPELINE,
        ORIGINAL_TOPIC,
        ORIGINAL_PARTITION,
        ORIGINAL_OFFSET,
        ORIGINAL_TIMESTAMP,
        RETRY_COUNT,
        PROCESS_AFTER,
        RETURN_TOPIC,
    ];
    for name in written {
        forge("twice".into(), name, &|list, at| list.push(list[at].clone()));
    }
    for name in tampered {
        let set = |value: Option<Vec<u8>>| move |list: &mut List, at: usize| list[at].1.clone_from(&value);
        forge("null".into(), name, &set(None));
        // Both are optional: not every record has a timestamp, and a retry without a time lock is not locked.
        if ![ORIGINAL_TIMESTAMP, PROCESS_AFTER].contains(name) {
            forge("missing".into(), name, &|list, at| drop(list.remove(at)));
        }
        let wrong: &[u8] = match *name {
            PROCESS_AFTER => b"2999-01-01T00:00:00.000Z",
            RETURN_TOPIC => b"../etc",
            RETRY_COUNT => b"100001",
            ORIGINAL_TOPIC => b"a/b",
            _ => b"\xff\x00",
        };
        forge("wrong".into(), name, &set(Some(wrong.to_vec())));
    }
    forged
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

/// Writes forged records to a topic, each followed by a valid one, and checks where all of them end.
#[track_caller]
fn forgeries_are_rejected(
    pipe: &Pipe,
    topic: &Arc<str>,
    tampered: &[&'static str],
    processes: [&mut ServiceProcess; 2],
) {
    let is_tier = *topic != pipe.pipeline.due_topic();
    let due = SystemClock
        .now()
        .after(Duration::from_millis(if is_tier { 700 } else { 0 }));
    let past = Timestamp::from_millis(1);
    let forged = forgeries(pipe, due, tampered);
    let mut drafts = Vec::new();
    for (n, (word, _, list)) in forged.iter().enumerate() {
        drafts.push(draft(word, list));
        // A time lock in the past is valid: the record is released at once.
        let (valid_word, lock) = if n % 2 == 0 {
            ("valid", due)
        } else {
            ("past", past)
        };
        drafts.push(draft(&format!("{valid_word} {n}"), &valid_headers(pipe, lock)));
    }
    pipe.produce_to(topic, drafts);
    let real = pipe.produce(records(40));

    let mut watch = pipe.watch();
    watch.until_ended(2 * forged.len() + real.len(), DEADLINE);
    let dead_letters = pipe.pipeline.dead_letter_topic();
    let ends: HashMap<String, &Record> = watch
        .records
        .iter()
        .map(|record| (word(record), record))
        .collect();
    for (n, (word, name, list)) in forged.iter().enumerate() {
        let end = ends[word];
        assert_eq!(end.position.topic, dead_letters, "{word}");
        let code = text(end, ERROR_CODE).unwrap().unwrap();
        assert_eq!(code, format!("header.{name}"), "{word}");
        assert_eq!(text(end, ERROR_CLASS), Ok(Some("malformed".into())), "{word}");
        assert!(
            text(end, ERROR_MESSAGE).unwrap().unwrap().contains(name),
            "{word}"
        );
        assert_eq!(text(end, PIPELINE), Ok(Some(pipe.name().to_owned())), "{word}");
        let sent = draft(word, list);
        assert_eq!(
            (&end.key, users_headers(&end.headers)),
            (&sent.key, users_headers(&sent.headers)),
            "{word}"
        );
        assert_eq!(pipe.endpoint.calls_of_body(word.as_bytes()), 0, "{word}");

        let (valid_word, lock) = if n % 2 == 0 {
            ("valid", due)
        } else {
            ("past", past)
        };
        let valid = ends[&format!("{valid_word} {n}")];
        assert_ne!(valid.position.topic, dead_letters, "{valid:?}");
        assert!(valid.timestamp >= Some(lock), "{valid:?}");
    }
    // No record was released early.
    let released = if is_tier {
        pipe.read(&[pipe.pipeline.due_topic()])
    } else {
        Vec::new()
    };
    for released in released {
        let lock: Timestamp = text(&released, PROCESS_AFTER).unwrap().unwrap().parse().unwrap();
        assert!(released.timestamp >= Some(lock), "{released:?}");
    }
    let report = eventually("nothing is waiting", DEADLINE, || {
        let report = pipe.audit();
        if report.waiting.total() == 0 {
            Ok(report)
        } else {
            Err(report)
        }
    });
    assert!(report.is_clean() && report.output == 40, "{report}");
    for service in processes {
        assert_eq!(service.get("/readyz").0, 200);
    }
    println!(
        "{} forged records were rejected, and {} valid ones were processed",
        forged.len(),
        forged.len()
    );
}

#[test]
fn a_record_with_forged_headers_in_a_tier_becomes_a_dead_letter_and_is_never_early() {
    let pipe = PipeBuilder::new("forged-tier")
        .partitions(1)
        .tiers(&[300])
        .create();
    let (mut enricher, mut tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let tampered = [
        PROCESS_AFTER,
        RETURN_TOPIC,
        RETRY_COUNT,
        ORIGINAL_TOPIC,
        ORIGINAL_PARTITION,
        ORIGINAL_OFFSET,
        ORIGINAL_TIMESTAMP,
    ];
    let topic = pipe.first_tier();
    forgeries_are_rejected(&pipe, &topic, &tampered, [&mut enricher, &mut tier]);
    let missing = valid_headers(&pipe, SystemClock.now())
        .into_iter()
        .filter(|(name, _)| *name != PROCESS_AFTER);
    pipe.produce_to(&topic, vec![draft("no lock in a tier", &missing.collect())]);
    pipe.produce_to(&topic, vec![Draft::new("", "no headers at all")]);
    let ends = eventually("both are dead", DEADLINE, || {
        let dead = pipe.read(&[pipe.pipeline.dead_letter_topic()]);
        let two: Vec<Record> = dead
            .into_iter()
            .filter(|dead| word(dead).starts_with("no "))
            .collect();
        if two.len() == 2 {
            Ok(two)
        } else {
            Err(format!("{two:?}"))
        }
    });
    for (end, header) in ends.iter().zip([PROCESS_AFTER, RETURN_TOPIC]) {
        assert_eq!(text(end, ERROR_CODE), Ok(Some(format!("header.{header}"))));
    }
}

#[test]
fn a_forged_return_topic_is_replaced_by_the_due_topic() {
    let pipe = PipeBuilder::new("forged-return")
        .partitions(1)
        .tiers(&[300])
        .create();
    let target = PipeBuilder::new("forged-target").create();
    let (_enricher, _tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let topic = pipe.first_tier();
    let named = [
        target.pipeline.source.to_string(),
        target.pipeline.due_topic().to_string(),
        pipe.pipeline.dead_letter_topic().to_string(),
        "__consumer_offsets".to_owned(),
        "upstream".to_owned(),
    ];
    let forged = named.iter().map(|named| {
        let mut list = valid_headers(&pipe, SystemClock.now());
        list.last_mut().unwrap().1 = Some(named.as_bytes().to_vec());
        draft(named, &list)
    });
    pipe.produce_to(&topic, forged.collect());
    let mut watch = pipe.watch();
    watch.until_ended(named.len(), DEADLINE);
    let dead_letters = pipe.pipeline.dead_letter_topic();
    for end in &watch.records {
        assert_ne!(end.position.topic, dead_letters, "{end:?}");
    }
    let released = pipe.read(&[pipe.pipeline.due_topic()]);
    assert_eq!(released.len(), named.len());
    for released in released {
        let due = pipe.pipeline.due_topic().to_string();
        assert_eq!(text(&released, RETURN_TOPIC), Ok(Some(due)));
    }
    let elsewhere = [target.pipeline.source.clone(), target.pipeline.due_topic()];
    assert!(target.read(&elsewhere).is_empty());
}

#[test]
fn a_record_with_forged_headers_in_the_due_topic_becomes_a_dead_letter() {
    let pipe = PipeBuilder::new("forged-due")
        .partitions(1)
        .tiers(&[300])
        .create();
    let (mut enricher, mut tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let tampered = [
        PROCESS_AFTER,
        RETRY_COUNT,
        ORIGINAL_TOPIC,
        ORIGINAL_PARTITION,
        ORIGINAL_OFFSET,
        ORIGINAL_TIMESTAMP,
    ];
    forgeries_are_rejected(
        &pipe,
        &pipe.pipeline.due_topic(),
        &tampered,
        [&mut enricher, &mut tier],
    );
}

#[test]
fn forged_headers_in_the_source_are_ignored() {
    let pipe = PipeBuilder::new("forged-source")
        .partitions(1)
        .tiers(&[300])
        .create();
    let (_enricher, _tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let forged = forgeries(
        &pipe,
        SystemClock.now(),
        &[PROCESS_AFTER, RETRY_COUNT, ORIGINAL_OFFSET],
    );
    let sent = pipe.produce(forged.iter().map(|(word, _, list)| draft(word, list)).collect());
    let ends = pipe.settle(&sent, DEADLINE);
    // A record in the source is new: its reserved headers are replaced.
    ends.meets_with(&sent, |_| Fate::Succeeds);
}

#[test]
fn a_record_with_a_header_name_that_is_not_utf_8_becomes_a_dead_letter() {
    let pipe = PipeBuilder::new("forged-name")
        .partitions(1)
        .tiers(&[300])
        .create();
    let (mut enricher, mut tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let tier_topic = pipe.first_tier();
    let topics = [
        pipe.pipeline.source.clone(),
        pipe.pipeline.due_topic(),
        tier_topic,
    ];
    for topic in &topics {
        let headers: [(&[u8], &[u8]); 2] = [(b"user", b"1"), (b"\xff\xfe", b"2")];
        raw::produce(
            &pipe.kafka.brokers,
            topic,
            format!("in {topic}").as_bytes(),
            &headers,
        );
        pipe.produce(records(3));
    }
    let many: Vec<(&[u8], &[u8])> = vec![(b"\xff", b"x"); 20_000];
    let with_many = format!("many in {}", pipe.pipeline.source);
    raw::produce(
        &pipe.kafka.brokers,
        &pipe.pipeline.source,
        with_many.as_bytes(),
        &many,
    );
    let mut watch = pipe.watch();
    watch.until_ended(4 + 9, DEADLINE);
    let dead_letters = pipe.pipeline.dead_letter_topic();
    let dead: HashMap<String, &Record> = watch
        .records
        .iter()
        .filter(|record| record.position.topic == dead_letters)
        .map(|record| (word(record), record))
        .collect();
    for topic in &topics {
        let end = dead[&format!("in {topic}")];
        assert_eq!(text(end, ERROR_CODE), Ok(Some("header.name".into())));
        assert_eq!(end.headers.last("user"), Some(&b"1"[..]));
    }
    let end = dead[&with_many];
    assert_eq!(text(end, ERROR_CODE), Ok(Some("header.name".into())));
    let message = text(end, ERROR_MESSAGE).unwrap().unwrap();
    assert!(message.starts_with("20000 headers "), "{message}");
    assert_eq!(dead.len(), 4);
    for service in [&mut enricher, &mut tier] {
        assert_eq!(service.get("/readyz").0, 200);
        let output = service.output();
        assert!(!output.contains("panic"), "{output}");
    }
}

#[test]
fn header_names_with_nul_bytes_are_passed_on_unchanged() {
    let pipe = PipeBuilder::new("forged-nul")
        .partitions(1)
        .tiers(&[300])
        .behave(|request| {
            Reply::status(if request.body.starts_with(b"busy") {
                503
            } else {
                200
            })
        })
        .create();
    let (_enricher, _tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let headers: [(&[u8], &[u8]); 4] = [
        (b"user\0name", b"1"),
        (b"\0", b""),
        // A reserved header, if it were cut off.
        (b"pipeline\0", b"2"),
        (b"plain", b"\0"),
    ];
    // One becomes a result. The other one waits in a tier and then becomes a dead letter.
    let values: [&[u8]; 2] = [b"nul", b"busy"];
    for value in values {
        raw::produce(&pipe.kafka.brokers, &pipe.pipeline.source, value, &headers);
    }
    let mut watch = pipe.watch();
    watch.until_ended(2, DEADLINE);
    let expected: Headers = headers
        .iter()
        .map(|(name, value)| (std::str::from_utf8(name).unwrap(), Some(*value)))
        .collect();
    let mut dead = Vec::new();
    for end in &watch.records {
        assert_eq!(users_headers(&end.headers), expected, "{end:?}");
        dead.push(end.position.topic == pipe.pipeline.dead_letter_topic());
    }
    dead.sort_unstable();
    assert_eq!(dead, [false, true]);
}
