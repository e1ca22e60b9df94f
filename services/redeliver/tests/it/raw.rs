//! Requests to the broker that our own client cannot send: creating a topic with any configuration, and a
//! record with any timestamp or with header names that are not UTF-8. Versions and layouts follow
//! <https://kafka.apache.org/protocol>. The broker must be the only one, so that it leads every partition.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use redeliver_core::{Clock as _, SystemClock, Timestamp};
pub(crate) use redeliver_testkit::kafka_request::configure_topic;
use redeliver_testkit::{DEADLINE, eventually};

const PRODUCE: (i16, i16) = (0, 3);
const CREATE_TOPICS: (i16, i16) = (19, 2);
const TIMEOUT_MS: i32 = 10_000;
/// A code of the Kafka protocol.
const INVALID_TIMESTAMP: i16 = 32;

/// Creates a topic with one partition and this configuration.
#[track_caller]
pub(crate) fn create_topic(brokers: &str, topic: &str, config: &[(&str, &str)]) {
    let mut body = Vec::new();
    array(&mut body, &[topic], |body, topic| {
        string(body, topic);
        body.extend(1_i32.to_be_bytes());
        body.extend(1_i16.to_be_bytes());
        array(body, &[] as &[i32], |_, _| {});
        array(body, config, |body, (name, value)| {
            string(body, name);
            string(body, value);
        });
    });
    body.extend(TIMEOUT_MS.to_be_bytes());
    body.push(0);
    let answer = call(brokers, CREATE_TOPICS, &body);
    // Skips the throttle time, the number of topics, and the topic's name.
    let error = &answer[4 + 4 + 2 + topic.len()..][..2];
    assert_eq!(error, [0, 0], "creating {topic}");
}

/// Writes one record with these headers to partition 0, and returns its offset.
#[track_caller]
pub(crate) fn produce(brokers: &str, topic: &str, value: &[u8], headers: &[(&[u8], &[u8])]) -> i64 {
    produce_at(brokers, topic, SystemClock.now(), value, headers)
}

/// As [`produce`], with any timestamp. The broker takes note of a changed limit for timestamps a little later, and rejects the
/// record until then.
#[track_caller]
pub(crate) fn produce_at(
    brokers: &str,
    topic: &str,
    timestamp: Timestamp,
    value: &[u8],
    headers: &[(&[u8], &[u8])],
) -> i64 {
    let batch = batch(timestamp, value, headers);
    let mut body = Vec::new();
    body.extend((-1_i16).to_be_bytes());
    body.extend((-1_i16).to_be_bytes());
    body.extend(TIMEOUT_MS.to_be_bytes());
    array(&mut body, &[topic], |body, topic| {
        string(body, topic);
        array(body, &[0_i32], |body, partition| {
            body.extend(partition.to_be_bytes());
            body.extend(length(batch.len()).to_be_bytes());
            body.extend(&batch);
        });
    });
    eventually("the timestamp is accepted", DEADLINE, || {
        let answer = call(brokers, PRODUCE, &body);
        // Skips the number of topics, the topic's name, the number of partitions, and the partition.
        let answer = &answer[4 + 2 + topic.len() + 4 + 4..];
        match i16::from_be_bytes([answer[0], answer[1]]) {
            0 => Ok(i64::from_be_bytes(answer[2..10].try_into().unwrap())),
            INVALID_TIMESTAMP => Err("INVALID_TIMESTAMP"),
            code => panic!("writing to {topic}: code {code}"),
        }
    })
}

fn call(brokers: &str, (api, version): (i16, i16), body: &[u8]) -> Vec<u8> {
    let mut request = Vec::new();
    request.extend(api.to_be_bytes());
    request.extend(version.to_be_bytes());
    request.extend(7_i32.to_be_bytes());
    string(&mut request, "redeliver-test");
    request.extend(body);
    let mut stream = TcpStream::connect(brokers).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(&length(request.len()).to_be_bytes()).unwrap();
    stream.write_all(&request).unwrap();
    let mut size = [0; 4];
    stream.read_exact(&mut size).unwrap();
    let mut answer = vec![0; usize::try_from(i32::from_be_bytes(size)).unwrap()];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer[..4], 7_i32.to_be_bytes(), "an answer to another request");
    answer.split_off(4)
}

/// A record batch of format 2 with one record without a key.
fn batch(timestamp: Timestamp, value: &[u8], headers: &[(&[u8], &[u8])]) -> Vec<u8> {
    let mut record = vec![0, 0, 0];
    varint(&mut record, -1);
    bytes(&mut record, value);
    varint(&mut record, headers.len() as i64);
    for (name, value) in headers {
        bytes(&mut record, name);
        bytes(&mut record, value);
    }
    let timestamp = timestamp.as_millis();
    let mut checked = Vec::new();
    checked.extend([0_u8; 2 + 4]);
    checked.extend(timestamp.to_be_bytes());
    checked.extend(timestamp.to_be_bytes());
    checked.extend((-1_i64).to_be_bytes());
    checked.extend((-1_i16).to_be_bytes());
    checked.extend((-1_i32).to_be_bytes());
    checked.extend(1_i32.to_be_bytes());
    bytes(&mut checked, &record);

    let mut batch = Vec::new();
    batch.extend(0_i64.to_be_bytes());
    batch.extend(length(4 + 1 + 4 + checked.len()).to_be_bytes());
    batch.extend((-1_i32).to_be_bytes());
    batch.push(2);
    batch.extend(crc32c(&checked).to_be_bytes());
    batch.extend(checked);
    batch
}

fn length(length: usize) -> i32 {
    i32::try_from(length).unwrap()
}

fn string(to: &mut Vec<u8>, text: &str) {
    to.extend(i16::try_from(text.len()).unwrap().to_be_bytes());
    to.extend(text.as_bytes());
}

fn array<T>(to: &mut Vec<u8>, items: &[T], mut write: impl FnMut(&mut Vec<u8>, &T)) {
    to.extend(length(items.len()).to_be_bytes());
    for item in items {
        write(to, item);
    }
}

fn bytes(to: &mut Vec<u8>, bytes: &[u8]) {
    varint(to, bytes.len() as i64);
    to.extend(bytes);
}

/// A zigzag varint.
fn varint(to: &mut Vec<u8>, number: i64) {
    let mut rest = ((number << 1) ^ (number >> 63)).cast_unsigned();
    while rest >= 0x80 {
        to.push(rest.to_le_bytes()[0] | 0x80);
        rest >>= 7;
    }
    to.push(rest.to_le_bytes()[0]);
}

/// CRC-32C, bit by bit, because records of tests are short.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| {
        if crc & 1 == 1 {
            (crc >> 1) ^ 0x82f6_3b78
        } else {
            crc >> 1
        }
    };
    !bytes
        .iter()
        .fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}
