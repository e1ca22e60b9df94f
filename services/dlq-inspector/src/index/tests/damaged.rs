//! Whatever is in the headers of a record, it is indexed, listed as it was, and found.

use std::cell::RefCell;

use redeliver_testkit::fuzz::fuzz;

use super::*;
use crate::header_list;
use crate::letter::MAX_HEADERS;
use crate::masking::Masking;

/// Records that are written together.
const BATCH: usize = 250;
/// An index is replaced by a new one after this many records, so that it does not fill the disk.
const INDEXED: i64 = 20_000;

/// A header per line: name, colon, value. A line without a colon is a header without a value.
fn headers_of(input: &[u8]) -> Headers {
    let mut headers = Headers::new();
    for line in input.split(|byte| *byte == b'\n') {
        let mut parts = line.splitn(2, |byte| *byte == b':');
        let name = String::from_utf8_lossy(parts.next().unwrap_or_default());
        headers.push(&name, parts.next());
    }
    headers
}

struct Checked {
    fixture: Fixture,
    masking: Masking,
    batch: Vec<(Headers, Letter)>,
    next: i64,
}

impl Checked {
    fn new() -> Self {
        let rule = r#"{"topics":["masked"],"headers":["x-*"],"messages":["[0-9]+"]}"#;
        Self {
            fixture: Fixture::new(),
            masking: Masking::new(&[serde_json::from_str(rule).unwrap()]),
            batch: Vec::new(),
            next: 0,
        }
    }

    fn add(&mut self, input: &[u8]) {
        let topic = if self.next % 2 == 0 { "masked" } else { "shown" };
        let record = Record {
            timestamp: Some(Timestamp::from_millis(self.next)),
            headers: headers_of(input),
            ..record_at(topic, 0, self.next)
        };
        let letter = Letter::read_masked(&record, &self.masking.of(topic));
        self.batch.push((record.headers, letter));
        self.next += 1;
        if self.batch.len() == BATCH {
            self.check();
        }
    }

    fn check(&mut self) {
        let batch = std::mem::take(&mut self.batch);
        let letters = batch.iter().map(|(_, letter)| letter.clone());
        self.fixture.put(letters.collect());
        let listed = self.fixture.list("", Direction::Descending, None, batch.len());
        assert_eq!(listed.len(), batch.len());
        for ((headers, letter), listed) in batch.iter().rev().zip(&listed) {
            assert_eq!(listed.id.offset, letter.position.offset);
            assert_eq!(listed.headers, letter.headers);
            if headers.byte_len() <= MAX_HEADERS {
                assert_eq!(header_list::decode(&listed.headers), *headers);
            }
            assert_eq!(listed.facts.error_message, letter.facts.error_message);
            assert_eq!(listed.group, letter.group);
        }
        let (_, last) = &batch[batch.len() - 1];
        let group = format!("group = {}", last.group);
        assert!(self.fixture.matching(&group).contains(&last.position.offset));
        if self.next >= INDEXED {
            *self = Self::new();
        }
    }
}

fn damaged_headers(count: u32) {
    let valid = [
        &b"pipeline:p\nerror-class:permanent\nerror-code:http.422\nerror-message:no field 7\nfailed-at:1700000000000\nretry-count:3"[..],
        b"original-topic:t\noriginal-partition:1\noriginal-offset:7\noriginal-timestamp:1\ntraceparent:00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\njob-id:01HZX",
        b"kafka_dlt-original-topic:orders\nkafka_dlt-original-partition:\0\0\0\x02\nkafka_dlt-original-offset:\0\0\0\0\0\0\0\x07\nkafka_dlt-exception-message:busy\nkafka_dlt-exception-fqcn:java.io.IOException",
        b"__connect.errors.topic:t\n__connect.errors.partition:1\n__connect.errors.offset:2\n__connect.errors.exception.message:m\n__streams.errors.exception:e",
        b"dead-letter-reason:r\ndead-letter-topic:t\ndead-letter-offset:1\n__dlq.errors.message:m\nx-user:u\nx-user:\nx-user",
    ];
    let valid = valid.map(<[u8]>::to_vec);
    let checked = RefCell::new(Checked::new());
    fuzz("damaged_headers", count, &valid, |input| {
        checked.borrow_mut().add(input);
    });
}

#[test]
fn damaged_headers_are_indexed_unchanged() {
    damaged_headers(5_000);
}

#[test]
#[ignore = "long"]
fn million_damaged_headers_are_indexed_unchanged() {
    damaged_headers(1_000_000);
}
