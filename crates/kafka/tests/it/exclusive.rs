//! Changes that cannot overlap, on a real broker.

use std::cell::Cell;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use redeliver_core::{Headers, Output, Record};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::exclusive::{Decide, ExclusiveError, ExclusiveWriter};
use redeliver_kafka::reader::TopicReader;
use redeliver_testkit::unique;

use crate::support::{create_topic, settings};

const DEADLINE: Duration = Duration::from_secs(90);
const WRITERS: usize = 3;
const CHANGES: usize = 4;

/// Writes the number of records before it.
struct Count<'t> {
    topic: &'t Arc<str>,
    records: usize,
    most: usize,
}

impl Decide for Count<'_> {
    type Decision = usize;
    type Error = &'static str;

    fn read(&mut self, _record: Record) {
        self.records += 1;
    }

    fn decide(self) -> Result<(usize, Vec<Output>), &'static str> {
        if self.records >= self.most {
            return Err("enough");
        }
        let output = Output {
            topic: self.topic.clone(),
            partition: Some(0),
            key: Some("count".into()),
            value: Some(self.records.to_string().into()),
            headers: Headers::new(),
        };
        Ok((self.records, vec![output]))
    }
}

fn writer(topic: &Arc<str>) -> (KafkaSettings, ExclusiveWriter) {
    let mut settings = settings(&unique("writer"));
    // Writers of one topic fence each other, also those of different installations.
    settings.id_prefix = unique("prefix");
    let writer = ExclusiveWriter::new(&settings, &format!("exclusive-{topic}"), topic.clone());
    (settings, writer)
}

#[test]
fn changes_of_several_writers_at_once_are_decided_one_after_the_other() {
    let topic: Arc<str> = unique("exclusive").into();
    let settings = settings("exclusive");
    let creating = create_topic(&settings, &topic, 1);
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(creating);
    let count = || Count {
        topic: &topic,
        records: 0,
        most: WRITERS * CHANGES,
    };
    thread::scope(|scope| {
        for _ in 0..WRITERS {
            scope.spawn(|| {
                let (_, writer) = writer(&topic);
                for _ in 0..CHANGES {
                    writer.write(DEADLINE, count).unwrap();
                }
            });
        }
    });
    let (settings, writer) = writer(&topic);
    let refused = writer.write(DEADLINE, count);
    assert!(
        matches!(refused, Err(ExclusiveError::Refused("enough"))),
        "{refused:?}"
    );
    let mut values = Vec::new();
    let mut reader = TopicReader::new(&settings, std::slice::from_ref(&topic)).unwrap();
    reader
        .read_to_end(DEADLINE, |record| {
            values.push(String::from_utf8(record.value.unwrap().to_vec()).unwrap());
        })
        .unwrap();
    // Each has seen all changes before its own.
    let expected: Vec<String> = (0..WRITERS * CHANGES).map(|n| n.to_string()).collect();
    assert_eq!(values, expected);
}

/// Writes a record that is larger than the topic permits.
struct TooLarge<'t>(&'t Arc<str>);

impl Decide for TooLarge<'_> {
    type Decision = ();
    type Error = &'static str;

    fn read(&mut self, _record: Record) {}

    fn decide(self) -> Result<((), Vec<Output>), &'static str> {
        // Not compressible.
        let value: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..))
            .take(2 << 20)
            .collect();
        let output = Output {
            topic: self.0.clone(),
            partition: Some(0),
            key: Some("large".into()),
            value: Some(value.into()),
            headers: Headers::new(),
        };
        Ok(((), vec![output]))
    }
}

#[test]
fn a_record_that_the_topic_refuses_is_not_an_unknown_outcome_and_not_tried_again() {
    let topic: Arc<str> = unique("large").into();
    let (settings, writer) = writer(&topic);
    let creating = create_topic(&settings, &topic, 1);
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(creating);
    let attempts = Cell::new(0);
    let failed = writer.write(DEADLINE, || {
        attempts.set(attempts.get() + 1);
        TooLarge(&topic)
    });
    assert!(
        matches!(
            failed,
            Err(ExclusiveError::Unavailable {
                step: "committing",
                ..
            })
        ),
        "{failed:?}"
    );
    assert_eq!(attempts.get(), 1);
}

#[test]
fn a_change_of_a_missing_topic_is_refused_at_once_and_does_not_create_it() {
    let topic: Arc<str> = unique("missing").into();
    let (settings, writer) = writer(&topic);
    let failed = writer.write(DEADLINE, || Count {
        topic: &topic,
        records: 0,
        most: 1,
    });
    let Err(ExclusiveError::Unavailable { source, .. }) = failed else {
        panic!("{failed:?}");
    };
    assert!(source.to_string().contains("does not exist"), "{source}");
    assert!(TopicReader::new(&settings, &[topic]).is_err());
}
