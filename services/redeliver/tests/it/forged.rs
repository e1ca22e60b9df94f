//! Whoever may write to our topics can write anything into headers. It ends in the dead-letter topic with a
//! code that names the header; it never runs early, and it never stops what stands beside it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::headers::{
    ERROR_CLASS, ERROR_CODE, ERROR_MESSAGE, ERROR_TIMESTAMP, ORIGINAL_OFFSET, ORIGINAL_PARTITION,
    ORIGINAL_TIMESTAMP, ORIGINAL_TOPIC, PIPELINE, PROCESS_AFTER, RETRY_COUNT, RETURN_TOPIC,
};
use redeliver_core::{Clock as _, Headers, Record, SystemClock, Timestamp};
use redeliver_testkit::{Fate, eventually};

use crate::raw;
use crate::support::{Draft, Pipe, Service, Setup, records, text, users_headers};

const DEADLINE: Duration = Duration::from_secs(60);

/// What a worker writes on a record that waits, as a list that can be tampered with.
type List = Vec<(&'static str, Option<Vec<u8>>)>;

fn honest(pipe: &Pipe, due: Timestamp) -> List {
    let text = |value: &str| Some(value.as_bytes().to_vec());
    vec![
        (PIPELINE, text(&pipe.name)),
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

/// Every way to tamper with one header, and a good number of random ones. The first word says what was done.
fn forgeries(pipe: &Pipe, due: Timestamp, tampered: &[&'static str]) -> Vec<(String, &'static str, List)> {
    let mut random = fastrand::Rng::with_seed(11);
    let mut forged = Vec::new();
    let mut forge = |how: String, name: &'static str, change: &dyn Fn(&mut List, usize)| {
        let mut list = honest(pipe, due);
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
        forge("empty".into(), name, &set(Some(Vec::new())));
        // Either may be missing: a timestamp is not known of every record, and who has no lock is free.
        if ![ORIGINAL_TIMESTAMP, PROCESS_AFTER].contains(name) {
            forge("missing".into(), name, &|list, at| drop(list.remove(at)));
        }
        for _ in 0..12 {
            let bytes: Vec<u8> = (0..random.usize(1..60)).map(|_| random.u8(..)).collect();
            forge("random".into(), name, &set(Some(bytes)));
        }
        let texts: &[&str] = match *name {
            PROCESS_AFTER => &[
                "now",
                "0",
                "-1",
                "9999-12-31T23:59:59.999Z",
                "+292278994-08-17T07:12:55.807Z",
                "2026-02-30T00:00:00Z",
                "2999-01-01T00:00:00.000Z",
                "1e9",
                "2026-01-31 12:00",
            ],
            RETURN_TOPIC => &["../etc", ".", "a b", "ä"],
            RETRY_COUNT => &[
                "-1",
                "+1",
                "100001",
                "4294967296",
                "99999999999999999999",
                "1.0",
                " 1",
            ],
            ORIGINAL_PARTITION | ORIGINAL_OFFSET => &["-1", "+1", "9223372036854775808", "0x1", "١"],
            ORIGINAL_TOPIC => &["", "..", "a b", "a/b", "ä"],
            _ => &["soon", "-1"],
        };
        for value in texts {
            forge("wrong".into(), name, &set(Some(value.as_bytes().to_vec())));
        }
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

/// Writes forgeries to a topic with an honest record after each, and checks what becomes of all.
#[track_caller]
fn forgeries_are_rejected(
    pipe: &Pipe,
    topic: &Arc<str>,
    tampered: &[&'static str],
    processes: [&mut Service; 2],
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
        // A lock that was over long ago is no forgery: the record goes at once.
        let (honest_word, lock) = if n % 2 == 0 {
            ("honest", due)
        } else {
            ("past", past)
        };
        drafts.push(draft(&format!("{honest_word} {n}"), &honest(pipe, lock)));
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
        assert_eq!(text(end, PIPELINE), Ok(Some(pipe.name.clone())), "{word}");
        let sent = draft(word, list);
        assert_eq!(
            (&end.key, users_headers(&end.headers)),
            (&sent.key, users_headers(&sent.headers)),
            "{word}"
        );
        assert_eq!(pipe.endpoint.calls_of_body(word.as_bytes()), 0, "{word}");

        let (honest_word, lock) = if n % 2 == 0 {
            ("honest", due)
        } else {
            ("past", past)
        };
        let honest = ends[&format!("{honest_word} {n}")];
        assert_ne!(honest.position.topic, dead_letters, "{honest:?}");
        assert!(honest.timestamp >= Some(lock), "{honest:?}");
    }
    // No record has left a tier before its time.
    let released = if is_tier {
        pipe.read(&[pipe.pipeline.due_topic()])
    } else {
        Vec::new()
    };
    for released in released {
        let lock: Timestamp = text(&released, PROCESS_AFTER).unwrap().unwrap().parse().unwrap();
        assert!(released.timestamp >= Some(lock), "{released:?}");
    }
    let report = pipe.settled_report();
    assert!(report.is_clean() && report.output == 40, "{report}");
    for service in processes {
        assert_eq!(service.get("/readyz").0, 200);
    }
    println!(
        "{} forgeries were rejected, and the {} honest records among them went through",
        forged.len(),
        forged.len()
    );
}

#[test]
fn forged_headers_in_a_tier_are_dead_and_never_early() {
    let pipe = Setup::new("forged-tier").partitions(1).tiers(&[300]).create();
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
    let topic = pipe.pipeline.tier_topic(pipe.pipeline.policy.tiers()[0]);
    forgeries_are_rejected(&pipe, &topic, &tampered, [&mut enricher, &mut tier]);
    let missing = honest(&pipe, SystemClock.now())
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
fn a_forged_return_topic_leads_to_the_pipelines_own() {
    let pipe = Setup::new("forged-return").partitions(1).tiers(&[300]).create();
    let target = Setup::new("forged-target").create();
    let (_enricher, _tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let topic = pipe.pipeline.tier_topic(pipe.pipeline.policy.tiers()[0]);
    let named = [
        target.pipeline.source.to_string(),
        target.pipeline.due_topic().to_string(),
        pipe.pipeline.dead_letter_topic().to_string(),
        "__consumer_offsets".to_owned(),
        "upstream".to_owned(),
    ];
    let forged = named.iter().map(|named| {
        let mut list = honest(&pipe, SystemClock.now());
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
fn forged_headers_in_the_due_topic_are_dead() {
    let pipe = Setup::new("forged-due").partitions(1).tiers(&[300]).create();
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
fn on_the_source_topic_forged_headers_mean_nothing() {
    let pipe = Setup::new("forged-source").partitions(1).tiers(&[300]).create();
    let (_enricher, _tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let forged = forgeries(
        &pipe,
        SystemClock.now(),
        &[PROCESS_AFTER, RETRY_COUNT, ORIGINAL_OFFSET],
    );
    let sent = pipe.produce(forged.iter().map(|(word, _, list)| draft(word, list)).collect());
    let ends = pipe.settle(&sent, DEADLINE);
    // A record that comes in is new: it succeeds, and what its headers claimed is replaced.
    ends.meets_with(&sent, |_| Fate::Succeeds);
}

#[test]
fn a_header_whose_name_is_not_text_is_dead_with_a_reason() {
    let pipe = Setup::new("forged-name").partitions(1).tiers(&[300]).create();
    let (mut enricher, mut tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let tier_topic = pipe.pipeline.tier_topic(pipe.pipeline.policy.tiers()[0]);
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
    // Each of these would be a panic of Kafka's client.
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
        let output = service.process.output();
        assert!(!output.contains("panicked"), "{output}");
        // The place, now and then.
        assert!(output.contains(" WARN ") && output.contains("place="), "{output}");
    }
}

#[test]
fn the_name_of_a_header_ends_where_kafkas_client_sees_its_end() {
    let pipe = Setup::new("forged-nul").partitions(1).create();
    let _enricher = pipe.enricher("a");
    let headers: [(&[u8], &[u8]); 2] = [(b"user\0name", b"1"), (b"\0", b"2")];
    raw::produce(&pipe.kafka.brokers, &pipe.pipeline.source, b"nul", &headers);
    let mut watch = pipe.watch();
    watch.until_ended(1, DEADLINE);
    let end = &watch.records[0];
    assert_ne!(end.position.topic, pipe.pipeline.dead_letter_topic());
    let expected: Headers = [("user", Some(&b"1"[..])), ("", Some(&b"2"[..]))]
        .into_iter()
        .collect();
    assert_eq!(users_headers(&end.headers), expected);
}
