//! What is done to topics from outside, in Kafka's own words: deleting them, and what retention would do.
//! (Kafka protocol guide: `DeleteTopics` version 1, `DeleteRecords` version 1.)

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

const DELETE_TOPICS: i16 = 20;
const DELETE_RECORDS: i16 = 21;
const TIMEOUT: i32 = 20_000;

/// Deletes a topic.
pub(crate) fn delete_topic(brokers: &str, topic: &str) {
    let mut body = Vec::new();
    body.extend(1_i32.to_be_bytes());
    push_text(&mut body, topic);
    body.extend(TIMEOUT.to_be_bytes());
    let answer = ask(brokers, DELETE_TOPICS, &body);
    // The throttle time, one topic with its name, its error.
    let error = &answer[4 + 4 + 2 + topic.len()..];
    assert_eq!(error, [0, 0], "deleting {topic}: {answer:?}");
}

/// Removes what stands before an offset, as retention does.
pub(crate) fn delete_records(brokers: &str, topic: &str, partition: i32, before: i64) {
    let mut body = Vec::new();
    body.extend(1_i32.to_be_bytes());
    push_text(&mut body, topic);
    body.extend(1_i32.to_be_bytes());
    body.extend(partition.to_be_bytes());
    body.extend(before.to_be_bytes());
    body.extend(TIMEOUT.to_be_bytes());
    let answer = ask(brokers, DELETE_RECORDS, &body);
    // The throttle time, one topic with its name, one partition with its number, its beginning, its error.
    let error = &answer[4 + 4 + 2 + topic.len() + 4 + 4 + 8..];
    assert_eq!(error, [0, 0], "deleting records of {topic}: {answer:?}");
}

fn push_text(body: &mut Vec<u8>, text: &str) {
    body.extend(i16::try_from(text.len()).unwrap().to_be_bytes());
    body.extend(text.as_bytes());
}

/// Sends a request of version 1 and gives the answer behind its correlation id.
fn ask(brokers: &str, api: i16, body: &[u8]) -> Vec<u8> {
    let broker = brokers.split(',').next().unwrap();
    let mut stream = TcpStream::connect(broker).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut request = Vec::new();
    request.extend(api.to_be_bytes());
    request.extend(1_i16.to_be_bytes());
    request.extend(7_i32.to_be_bytes());
    request.extend((-1_i16).to_be_bytes());
    request.extend(body);
    stream
        .write_all(&i32::try_from(request.len()).unwrap().to_be_bytes())
        .unwrap();
    stream.write_all(&request).unwrap();
    let mut size = [0; 4];
    stream.read_exact(&mut size).unwrap();
    let mut answer = vec![0; usize::try_from(i32::from_be_bytes(size)).unwrap()];
    stream.read_exact(&mut answer).unwrap();
    answer.split_off(4)
}
