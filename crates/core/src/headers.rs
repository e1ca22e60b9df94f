//! Reserved headers: their names, how they are validated, and how they are written.
//!
//! Headers that are read are untrusted. A duplicate, a number out of range, or a time that is invalid or too far in the
//! future makes the record malformed. It never makes the record due.

use std::sync::Arc;

use crate::failure::{ErrorClass, Failure, MESSAGE_LIMIT, bounded_text};
use crate::human_duration::HumanDuration;
use crate::pipeline::is_topic_name;
use crate::record::{Headers, Record};
use crate::time::Timestamp;

/// The time lock: the due time of the record.
pub const PROCESS_AFTER: &str = "process-after";
/// The number of failed attempts so far.
pub const RETRY_COUNT: &str = "retry-count";
/// The topic in which the wait of the record ends.
pub const RETURN_TOPIC: &str = "return-topic";
/// The topic in which the record entered the pipeline.
pub const ORIGINAL_TOPIC: &str = "original-topic";
/// The partition in which the record entered the pipeline.
pub const ORIGINAL_PARTITION: &str = "original-partition";
/// The offset at which the record entered the pipeline.
pub const ORIGINAL_OFFSET: &str = "original-offset";
/// The timestamp with which the record entered the pipeline.
pub const ORIGINAL_TIMESTAMP: &str = "original-timestamp";
/// The failure class of the last failed attempt.
pub const ERROR_CLASS: &str = "error-class";
/// The error code of the last failed attempt.
pub const ERROR_CODE: &str = "error-code";
/// The error message of the last failed attempt.
pub const ERROR_MESSAGE: &str = "error-message";
/// The beginning of what the endpoint answered to the last attempt; only in dead letters.
pub const ERROR_RESPONSE: &str = "error-response";
/// The time of the last failed attempt.
pub const ERROR_TIMESTAMP: &str = "error-timestamp";
/// The pipeline that wrote the record.
pub const PIPELINE: &str = "pipeline";
/// The parts removed from a dead letter that is too large for its topic: `value`, or `key, value, headers`.
/// The original record is at the position that the other headers name.
pub const PAYLOAD_OMITTED: &str = "payload-omitted";
/// The hash of the key and the value that the dead letter had before [`PAYLOAD_OMITTED`], so that the original record can be recognised.
pub const PAYLOAD_OMITTED_HASH: &str = "payload-omitted-hash";
/// The id of the job from which the record was dispatched. Headers of jobs are not reserved: pipelines pass them on
/// like user headers.
pub const JOB_ID: &str = "job-id";
/// The application of the job.
pub const JOB_APP: &str = "job-app";
/// The due time of the job.
pub const SCHEDULED_TIME: &str = "scheduled-time";
/// The time of the dispatch.
pub const DISPATCHED_AT: &str = "dispatched-at";
/// The idempotency key of the job's request.
pub const IDEMPOTENCY_KEY: &str = "idempotency-key";
/// The priority of the job: `high`, `normal` or `low`.
pub const JOB_PRIORITY: &str = "job-priority";
/// The occurrence of a recurring schedule for which the job was created, such as `nightly@2026-11-24T02:30:00.000Z`.
pub const JOB_OCCURRENCE: &str = "job-occurrence";
/// The media type of the value. A user header, which the enricher sets in results.
pub const CONTENT_TYPE: &str = "content-type";
/// The trace context of a record or request, as defined by W3C Trace Context.
pub const TRACEPARENT: &str = "traceparent";
/// The vendor-specific part of the trace context.
pub const TRACESTATE: &str = "tracestate";

const RESERVED: [&str; 15] = [
    PROCESS_AFTER,
    RETRY_COUNT,
    RETURN_TOPIC,
    ORIGINAL_TOPIC,
    ORIGINAL_PARTITION,
    ORIGINAL_OFFSET,
    ORIGINAL_TIMESTAMP,
    PIPELINE,
    ERROR_CLASS,
    ERROR_CODE,
    ERROR_MESSAGE,
    ERROR_RESPONSE,
    ERROR_TIMESTAMP,
    PAYLOAD_OMITTED,
    PAYLOAD_OMITTED_HASH,
];

/// The maximum of the header `retry-count`; a larger number makes the record malformed.
pub const MAX_RETRY_COUNT: u32 = 100_000;

/// Whether a header is reserved, so that it is not a user header.
#[must_use]
pub fn is_reserved(name: &str) -> bool {
    slot(name).is_some()
}

/// The accepted difference between the clocks of two processes when a due time is validated.
pub const CLOCK_SKEW: HumanDuration = HumanDuration::from_secs(300);

fn slot(name: &str) -> Option<usize> {
    // This runs for every header of every record. First byte and length rule out nearly all user headers.
    match (name.as_bytes().first(), name.len()) {
        (Some(b'p' | b'r' | b'o' | b'e'), 8..=20) => RESERVED.iter().position(|reserved| *reserved == name),
        _ => None,
    }
}

/// The reserved headers of a record, each at most once. The values are not validated yet.
#[derive(Debug, Default)]
pub struct ReservedHeaders<'a> {
    values: [Option<Option<&'a [u8]>>; RESERVED.len()],
}

/// Where a record entered the pipeline. Retries and results keep the origin.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Origin {
    /// The source topic.
    pub topic: Arc<str>,
    /// The partition of the source topic.
    pub partition: i32,
    /// The offset in the partition.
    pub offset: i64,
    /// The timestamp of the record, if it has one.
    pub timestamp: Option<Timestamp>,
}

/// The failure that the headers of a waiting record, a retry or a dead letter describe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedFailure {
    /// The class of the failure.
    pub class: ErrorClass,
    /// The error code.
    pub code: String,
    /// The message, of at most [`MESSAGE_LIMIT`] bytes.
    pub message: String,
}

impl RecordedFailure {
    /// `None` if the headers describe no failure.
    #[must_use]
    pub fn read(headers: &Headers) -> Option<Self> {
        let text = |name| headers.last(name).map(String::from_utf8_lossy);
        Some(Self {
            class: text(ERROR_CLASS)?.parse().ok()?,
            code: text(ERROR_CODE)?.into_owned(),
            message: text(ERROR_MESSAGE).unwrap_or_default().into_owned(),
        })
    }
}

impl Origin {
    /// The origin of a new record: its position and timestamp.
    #[must_use]
    pub fn of(record: &Record) -> Self {
        let position = &record.position;
        Self {
            topic: position.topic.clone(),
            partition: position.partition,
            offset: position.offset,
            timestamp: record.timestamp,
        }
    }

    /// `topic-partition-offset`, the value of the HTTP header `Idempotency-Key`. It is the same for all retries.
    #[must_use]
    pub fn id(&self) -> String {
        format!("{}-{}-{}", self.topic, self.partition, self.offset)
    }
}

impl<'a> ReservedHeaders<'a> {
    /// Reads the reserved headers of a record.
    ///
    /// # Errors
    /// A malformed failure if one of them occurs more than once, or if the record has headers whose names are not
    /// UTF-8.
    pub fn read(record: &'a Record) -> Result<Self, Failure> {
        if record.unreadable_headers > 0 {
            let message = format!(
                "{} headers cannot be read: there are names that are not UTF-8",
                record.unreadable_headers
            );
            return Err(Failure::malformed("header.name", message));
        }
        Self::from_headers(&record.headers)
    }

    /// Reads the reserved headers in a list of headers.
    ///
    /// # Errors
    /// A malformed failure if one of them occurs more than once.
    pub fn from_headers(headers: &'a Headers) -> Result<Self, Failure> {
        let mut reserved = Self::default();
        for (name, value) in headers.iter() {
            let Some(slot) = slot(name) else { continue };
            if reserved.values[slot].is_some() {
                let message = format!("header `{name}` occurs more than once");
                return Err(Failure::malformed(format!("header.{name}"), message));
            }
            reserved.values[slot] = Some(value);
        }
        Ok(reserved)
    }

    /// The time lock.
    ///
    /// # Errors
    /// A malformed failure if it is missing, not a valid time, or more than `max_wait` and [`CLOCK_SKEW`] after `now`.
    pub fn process_after(&self, now: Timestamp, max_wait: HumanDuration) -> Result<Timestamp, Failure> {
        let due: Timestamp = self.required(PROCESS_AFTER, "a time such as 2026-01-31T12:00:00.000Z")?;
        if due > now.after(max_wait.duration() + CLOCK_SKEW.duration()) {
            let message = format!("header `{PROCESS_AFTER}` {due} is more than {max_wait} in the future");
            return Err(Failure::malformed(format!("header.{PROCESS_AFTER}"), message));
        }
        Ok(due)
    }

    /// Checks that the time lock of a retry, if there is one, has passed.
    ///
    /// # Errors
    /// A malformed failure if it is not a valid time, or is more than [`CLOCK_SKEW`] after `now`: no tier can have
    /// released the record.
    pub fn check_time_lock(&self, now: Timestamp) -> Result<(), Failure> {
        if self.raw(PROCESS_AFTER).is_none() {
            return Ok(());
        }
        let due: Timestamp = self.required(PROCESS_AFTER, "a time such as 2026-01-31T12:00:00.000Z")?;
        if due > now.after(CLOCK_SKEW.duration()) {
            let message =
                format!("header `{PROCESS_AFTER}` {due} is in the future: no tier has released the record");
            return Err(Failure::malformed(format!("header.{PROCESS_AFTER}"), message));
        }
        Ok(())
    }

    /// The return topic that the record names. Do not write to it directly: a client that can write to a tier must not
    /// be able to write to any topic. [`crate::pipeline::ReturnTopics`] limits it to topics of the pipeline.
    ///
    /// # Errors
    /// A malformed failure if it is missing or not a valid topic name.
    pub fn return_topic(&self) -> Result<&'a str, Failure> {
        let found = self.raw(RETURN_TOPIC);
        let name = found.flatten().and_then(|bytes| std::str::from_utf8(bytes).ok());
        name.filter(|name| is_topic_name(name))
            .ok_or_else(|| wrong_value(RETURN_TOPIC, found, "the name of a topic"))
    }

    /// The number of failed attempts so far.
    ///
    /// # Errors
    /// A malformed failure if it is missing, not a number, or greater than [`MAX_RETRY_COUNT`].
    pub fn retry_count(&self) -> Result<u32, Failure> {
        let range = "a number from 0 to 100000";
        let count: u32 = self.required(RETRY_COUNT, range)?;
        if count > MAX_RETRY_COUNT {
            return Err(wrong_value(RETRY_COUNT, self.raw(RETRY_COUNT), range));
        }
        Ok(count)
    }

    /// The origin of the record.
    ///
    /// # Errors
    /// A malformed failure if the topic, partition or offset is missing, or if any part is invalid. The timestamp is
    /// optional.
    pub fn origin(&self) -> Result<Origin, Failure> {
        let topic: String = self.required(ORIGINAL_TOPIC, "the name of a topic")?;
        if !is_topic_name(&topic) {
            return Err(wrong_value(
                ORIGINAL_TOPIC,
                self.raw(ORIGINAL_TOPIC),
                "the name of a topic",
            ));
        }
        let number = "a number from 0";
        let partition: i32 = self.required(ORIGINAL_PARTITION, number)?;
        let offset: i64 = self.required(ORIGINAL_OFFSET, number)?;
        if partition < 0 {
            return Err(wrong_value(
                ORIGINAL_PARTITION,
                self.raw(ORIGINAL_PARTITION),
                number,
            ));
        }
        if offset < 0 {
            return Err(wrong_value(ORIGINAL_OFFSET, self.raw(ORIGINAL_OFFSET), number));
        }
        let timestamp = match self.raw(ORIGINAL_TIMESTAMP) {
            None => None,
            Some(_) => Some(self.required(ORIGINAL_TIMESTAMP, "a time such as 2026-01-31T12:00:00.000Z")?),
        };
        Ok(Origin {
            topic: topic.into(),
            partition,
            offset,
            timestamp,
        })
    }

    /// Whether the record is a retry of this pipeline.
    #[must_use]
    pub fn is_retry_of(&self, pipeline: &str) -> bool {
        self.raw(PIPELINE) == Some(Some(pipeline.as_bytes())) && self.raw(RETRY_COUNT).is_some()
    }

    fn raw(&self, name: &str) -> Option<Option<&'a [u8]>> {
        slot(name).and_then(|slot| self.values[slot])
    }

    fn required<T: std::str::FromStr>(&self, name: &'static str, expected: &str) -> Result<T, Failure> {
        let found = self.raw(name);
        found
            .flatten()
            .and_then(|bytes| std::str::from_utf8(bytes).ok())
            // `parse` accepts a leading plus sign, but the protocol does not.
            .filter(|text| !text.starts_with('+'))
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| wrong_value(name, found, expected))
    }
}

fn wrong_value(name: &str, found: Option<Option<&[u8]>>, expected: &str) -> Failure {
    let found = match found {
        None => "is missing".to_owned(),
        Some(None) => "is null".to_owned(),
        Some(Some(bytes)) => {
            let shown = &bytes[..bytes.len().min(60)];
            format!("is `{}`", bounded_text(&shown.escape_ascii().to_string(), 120))
        }
    };
    Failure::malformed(
        format!("header.{name}"),
        format!("header `{name}` {found}; expected {expected}"),
    )
}

/// The trace context of an attempt, as defined by W3C Trace Context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// The value of the header `traceparent`.
    pub traceparent: String,
    /// The value of the header `tracestate`, if there is one.
    pub tracestate: Option<String>,
}

/// A copy of the headers without the reserved ones. `trace` replaces the trace context of the record.
#[must_use]
pub fn user_headers(headers: &Headers, trace: Option<&TraceContext>) -> Headers {
    let Some(trace) = trace else {
        return headers.filtered(|name| !is_reserved(name));
    };
    let mut kept = headers.filtered(|name| !is_reserved(name) && name != TRACEPARENT && name != TRACESTATE);
    kept.push_text(TRACEPARENT, &trace.traceparent);
    if let Some(state) = &trace.tracestate {
        kept.push_text(TRACESTATE, state);
    }
    kept
}

/// Replaces the header `return-topic`. A record that is released to another topic than it names must name that topic,
/// or its reader would not accept it as a retry.
pub fn set_return_topic(headers: &mut Headers, topic: &str) {
    *headers = headers.filtered(|name| name != RETURN_TOPIC);
    headers.push_text(RETURN_TOPIC, topic);
}

/// Replaces the header `process-after` of a record that is released before its due time. Otherwise, its reader would not accept it.
pub fn set_process_after(headers: &mut Headers, due: Timestamp) {
    *headers = headers.filtered(|name| name != PROCESS_AFTER);
    headers.push_text(PROCESS_AFTER, &due.to_string());
}

/// Appends the pipeline, the origin and the number of failed attempts.
pub fn write_lineage(headers: &mut Headers, pipeline: &str, origin: &Origin, retry_count: u32) {
    headers.push_text(PIPELINE, pipeline);
    headers.push_text(ORIGINAL_TOPIC, &origin.topic);
    headers.push_text(ORIGINAL_PARTITION, &origin.partition.to_string());
    headers.push_text(ORIGINAL_OFFSET, &origin.offset.to_string());
    // A text that cannot be read again would make every retry malformed.
    if let Some(timestamp) = origin.timestamp.and_then(Timestamp::to_rfc3339) {
        headers.push_text(ORIGINAL_TIMESTAMP, &timestamp);
    }
    headers.push_text(RETRY_COUNT, &retry_count.to_string());
}

/// Appends the failure and its time.
pub fn write_failure(headers: &mut Headers, failure: &Failure, now: Timestamp) {
    headers.push_text(ERROR_CLASS, failure.class.as_str());
    headers.push_text(ERROR_CODE, &bounded_text(&failure.code, 120));
    headers.push_text(ERROR_MESSAGE, &bounded_text(&failure.message, MESSAGE_LIMIT));
    headers.push_text(ERROR_TIMESTAMP, &now.to_string());
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;
    use crate::record::Position;

    fn record(headers: Headers) -> Record {
        Record {
            position: Position {
                topic: "t-retry-5s".into(),
                partition: 1,
                offset: 2,
            },
            timestamp: Some(Timestamp::from_millis(3)),
            key: None,
            value: Some(Bytes::from_static(b"v")),
            headers,
            unreadable_headers: 0,
        }
    }

    fn lineage() -> Origin {
        Origin {
            topic: "t".into(),
            partition: 3,
            offset: 44,
            timestamp: Some(Timestamp::from_millis(5)),
        }
    }

    #[test]
    fn unprintable_timestamp_is_omitted() {
        // Microseconds, written as milliseconds.
        for millis in [1_700_000_000_000_000, -62_135_596_800_001, i64::MAX] {
            let origin = Origin {
                timestamp: Some(Timestamp::from_millis(millis)),
                ..lineage()
            };
            let mut headers = Headers::new();
            write_lineage(&mut headers, "p", &origin, 2);
            let expected = Origin {
                timestamp: None,
                ..origin
            };
            assert_eq!(
                ReservedHeaders::read(&record(headers)).unwrap().origin(),
                Ok(expected)
            );
        }
    }

    #[test]
    fn written_headers_are_read_back() {
        let mut headers = Headers::new();
        headers.push_text("tenant", "a");
        write_lineage(&mut headers, "p", &lineage(), 2);
        let record = record(headers);
        let reserved = ReservedHeaders::read(&record).unwrap();
        assert_eq!(reserved.origin(), Ok(lineage()));
        assert_eq!(reserved.retry_count(), Ok(2));
        assert!(reserved.is_retry_of("p") && !reserved.is_retry_of("q"));
        assert_eq!(user_headers(&record.headers, None).len(), 1);
    }

    #[test]
    fn only_reserved_names_are_recognised() {
        assert!(RESERVED.iter().all(|name| is_reserved(name)));
        for foreign in [
            "",
            "p",
            "Process-After",
            "process-after ",
            "tenant",
            TRACEPARENT,
            "job-id",
        ] {
            assert!(!is_reserved(foreign), "{foreign}");
        }
    }

    #[test]
    fn new_trace_replaces_the_old() {
        let headers: Headers = [
            (TRACEPARENT, Some(&b"old"[..])),
            ("x", None),
            (TRACESTATE, Some(&b"s"[..])),
        ]
        .into_iter()
        .collect();
        assert_eq!(user_headers(&headers, None), headers);
        let trace = TraceContext {
            traceparent: "new".into(),
            tracestate: None,
        };
        let replaced = user_headers(&headers, Some(&trace));
        assert_eq!(
            replaced.iter().collect::<Vec<_>>(),
            [("x", None), (TRACEPARENT, Some(&b"new"[..]))]
        );
    }

    #[test]
    fn invalid_value_names_its_header() {
        let now = Timestamp::from_millis(1_800_000_000_000);
        let numbers: &[&str] = &["-1", "+1", "9223372036854775808", "0x1", "١", " 1", "1.0"];
        let times: &[&str] = &[
            "now",
            "0",
            "-1",
            "1e9",
            "2026-01-31 12:00",
            "2026-02-30T00:00:00Z",
            "+292278994-08-17T07:12:55.807Z",
        ];
        let topics: &[&str] = &["../etc", ".", "..", "a b", "a/b", "ä"];
        let cases: [(&str, &[&str]); 10] = [
            (PROCESS_AFTER, times),
            (
                PROCESS_AFTER,
                &["2999-01-01T00:00:00.000Z", "9999-12-31T23:59:59.999Z"],
            ),
            (RETURN_TOPIC, topics),
            (RETRY_COUNT, numbers),
            (RETRY_COUNT, &["100001", "4294967296", "99999999999999999999"]),
            (ORIGINAL_TOPIC, topics),
            (ORIGINAL_PARTITION, numbers),
            (ORIGINAL_PARTITION, &["2147483648"]),
            (ORIGINAL_OFFSET, numbers),
            (ORIGINAL_TIMESTAMP, times),
        ];
        let twice = [(RETRY_COUNT, Some(&b"1"[..])); 2].into_iter().collect();
        let failure = ReservedHeaders::from_headers(&twice).unwrap_err();
        assert!(failure.message.contains("more than once"), "{failure}");
        let none = Headers::new();
        let missing = ReservedHeaders::from_headers(&none).unwrap();
        assert_eq!(missing.check_time_lock(now), Ok(()));
        let failure = missing.retry_count().unwrap_err();
        assert!(failure.message.contains("is missing"), "{failure}");
        for (name, invalid) in cases {
            let texts = invalid.iter().map(|text| Some(text.as_bytes()));
            for value in texts.chain([None, Some(&b""[..]), Some(b"\xff\x00")]) {
                let mut headers = Headers::new();
                write_lineage(&mut headers, "p", &lineage(), 2);
                let mut headers = headers.filtered(|kept| kept != name);
                headers.push(name, value);
                let reserved = ReservedHeaders::from_headers(&headers).unwrap();
                let results = match name {
                    PROCESS_AFTER => vec![
                        reserved
                            .process_after(now, HumanDuration::from_secs(3600))
                            .map(drop),
                        reserved.check_time_lock(now),
                    ],
                    RETURN_TOPIC => vec![reserved.return_topic().map(drop)],
                    RETRY_COUNT => vec![reserved.retry_count().map(drop)],
                    _ => vec![reserved.origin().map(drop)],
                };
                for result in results {
                    let failure = result.expect_err(name);
                    assert_eq!(failure.code, format!("header.{name}"), "{value:?}");
                    assert!(failure.message.contains(name), "{}", failure.message);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn arbitrary_headers_make_nothing_due(
            values in proptest::collection::vec((0..RESERVED.len(), proptest::option::of(proptest::collection::vec(any::<u8>(), 0..40))), 0..20),
        ) {
            let now = Timestamp::from_millis(1_700_000_000_000);
            let headers: Headers = values.iter().map(|(i, v)| (RESERVED[*i], v.as_deref())).collect();
            let record = record(headers);
            let Ok(reserved) = ReservedHeaders::read(&record) else { return Ok(()) };
            let _ = reserved.retry_count();
            let _ = reserved.return_topic();
            if let Ok(origin) = reserved.origin() {
                prop_assert!(origin.partition >= 0 && origin.offset >= 0);
            }
            if let Ok(due) = reserved.process_after(now, HumanDuration::from_secs(60)) {
                // Only a valid time within the limit is accepted.
                let text = std::str::from_utf8(record.headers.last(PROCESS_AFTER).unwrap()).unwrap();
                prop_assert_eq!(text.parse::<Timestamp>().unwrap(), due);
            }
        }

        #[test]
        fn long_numbers_never_panic(text in "[-+0-9TZ:.]{0,40}") {
            let headers: Headers = RESERVED.iter().map(|name| (*name, Some(text.as_bytes()))).collect();
            let record = record(headers);
            let reserved = ReservedHeaders::read(&record).unwrap();
            let _ = (reserved.retry_count(), reserved.origin(), reserved.process_after(Timestamp::from_millis(0), HumanDuration::from_secs(1)));
        }
    }
}
