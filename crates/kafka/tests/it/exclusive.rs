//! Changes that cannot overlap, on a real broker.

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
    let settings = settings(&unique("writer"));
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
