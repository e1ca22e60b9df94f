//! Our headers: their names, how they are read and how they are written.
//!
//! What is read is untrusted. A duplicate, a number out of range, a time that does not parse or lies too
//! far away makes the record malformed; it never makes it due.

use std::sync::Arc;

use crate::failure::{Failure, MESSAGE_LIMIT, bounded_text};
use crate::pipeline::is_topic_name;
use crate::record::{Headers, Record};
use crate::span::Span;
use crate::time::Timestamp;

/// The time lock: not before this instant.
pub const PROCESS_AFTER: &str = "process-after";
/// How many attempts have failed so far.
pub const RETRY_COUNT: &str = "retry-count";
/// Where a tier releases the record to.
pub const RETURN_TOPIC: &str = "return-topic";
/// The topic in which the record was first read.
pub const ORIGINAL_TOPIC: &str = "original-topic";
/// The partition in which the record was first read.
pub const ORIGINAL_PARTITION: &str = "original-partition";
/// The offset at which the record was first read.
pub const ORIGINAL_OFFSET: &str = "original-offset";
/// The timestamp the record had there.
pub const ORIGINAL_TIMESTAMP: &str = "original-timestamp";
/// The class of the last failure.
pub const ERROR_CLASS: &str = "error-class";
/// The stable code of the last failure.
pub const ERROR_CODE: &str = "error-code";
/// The text of the last failure.
pub const ERROR_MESSAGE: &str = "error-message";
/// When it failed last.
pub const ERROR_TIMESTAMP: &str = "error-timestamp";
/// The pipeline that handled the record.
pub const PIPELINE: &str = "pipeline";
/// What a dead letter was written without, because with it the letter is too large for its topic: `value`, or
/// `key, value, headers`. What is missing stands where the record comes from.
pub const PAYLOAD_OMITTED: &str = "payload-omitted";
/// The scheduler's job that the record comes from. Headers of jobs are kept like those of users.
pub const JOB_ID: &str = "job-id";
/// The application whose job it is.
pub const JOB_APP: &str = "job-app";
/// When the job was due.
pub const SCHEDULED_TIME: &str = "scheduled-time";
/// When the job was dispatched.
pub const DISPATCHED_AT: &str = "dispatched-at";
/// The key under which its application knows the request.
pub const IDEMPOTENCY_KEY: &str = "idempotency-key";
/// high, normal or low.
pub const JOB_PRIORITY: &str = "job-priority";
/// W3C trace context.
pub const TRACEPARENT: &str = "traceparent";
/// W3C trace context of vendors.
pub const TRACESTATE: &str = "tracestate";

const OURS: [&str; 13] = [
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
    ERROR_TIMESTAMP,
    PAYLOAD_OMITTED,
];

/// No record is tried more often; a larger count was forged.
pub const MAX_RETRY_COUNT: u32 = 100_000;

/// Whether a header is written by us and not by the user.
#[must_use]
pub fn is_ours(name: &str) -> bool {
    slot(name).is_some()
}

/// How much the clocks of two processes may differ before a legitimate due time looks forged.
pub const CLOCK_SKEW: Span = Span::from_secs(300);

fn slot(name: &str) -> Option<usize> {
    // The first byte and the length tell nearly every foreign name apart before any comparison of bytes.
    match (name.as_bytes().first(), name.len()) {
        (Some(b'p' | b'r' | b'o' | b'e'), 8..=18) => OURS.iter().position(|ours| *ours == name),
        _ => None,
    }
}

/// The values of our headers on one record, each at most once; none of them is trusted yet.
#[derive(Debug, Default)]
pub struct ReservedHeaders<'a> {
    values: [Option<Option<&'a [u8]>>; OURS.len()],
}

/// Where a record entered the pipeline: the identity that it keeps through all hops.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Origin {
    /// The topic.
    pub topic: Arc<str>,
    /// The partition.
    pub partition: i32,
    /// The offset.
    pub offset: i64,
    /// The record's timestamp there, if it had one.
    pub timestamp: Option<Timestamp>,
}

impl Origin {
    /// The place where a record was read just now.
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

    /// `topic-partition-offset`: stable across retries, usable as an `Idempotency-Key`.
    #[must_use]
    pub fn id(&self) -> String {
        format!("{}-{}-{}", self.topic, self.partition, self.offset)
    }
}

impl<'a> ReservedHeaders<'a> {
    /// Picks our headers out of a record's.
    ///
    /// # Errors
    /// A malformed failure when one of them stands more than once or has a null value, or when the record
    /// has headers whose names cannot be read.
    pub fn read(record: &'a Record) -> Result<Self, Failure> {
        if record.unreadable_headers > 0 {
            let message = format!(
                "{} headers cannot be read: there are names that are not UTF-8",
                record.unreadable_headers
            );
            return Err(Failure::malformed("header.name", message));
        }
        let mut ours = Self::default();
        for (name, value) in record.headers.iter() {
            let Some(slot) = slot(name) else { continue };
            if ours.values[slot].is_some() {
                let message = format!("header `{name}` stands more than once");
                return Err(Failure::malformed(format!("header.{name}"), message));
            }
            ours.values[slot] = Some(value);
        }
        Ok(ours)
    }

    /// The time lock.
    ///
    /// # Errors
    /// A malformed failure when it is missing, no time, or further away from `now` than `max_wait` and
    /// [`CLOCK_SKEW`] allow.
    pub fn process_after(&self, now: Timestamp, max_wait: Span) -> Result<Timestamp, Failure> {
        let due: Timestamp = self.required(PROCESS_AFTER, "a time such as 2026-01-31T12:00:00.000Z")?;
        if due > now.after(max_wait.duration() + CLOCK_SKEW.duration()) {
            let message = format!("header `{PROCESS_AFTER}` {due} is more than the allowed {max_wait} away");
            return Err(Failure::malformed(format!("header.{PROCESS_AFTER}"), message));
        }
        Ok(due)
    }

    /// Whether the time lock of a record that came back is over. A record without one has nothing to wait for.
    ///
    /// # Errors
    /// A malformed failure when it is no time, or further ahead of `now` than [`CLOCK_SKEW`]: no tier has
    /// released that record.
    pub fn lock_is_over(&self, now: Timestamp) -> Result<(), Failure> {
        if self.raw(PROCESS_AFTER).is_none() {
            return Ok(());
        }
        let due: Timestamp = self.required(PROCESS_AFTER, "a time such as 2026-01-31T12:00:00.000Z")?;
        if due > now.after(CLOCK_SKEW.duration()) {
            let message =
                format!("header `{PROCESS_AFTER}` {due} is still ahead, so no tier has released the record");
            return Err(Failure::malformed(format!("header.{PROCESS_AFTER}"), message));
        }
        Ok(())
    }

    /// The topic that the record names for the end of its wait. It is not trusted: whoever can write to a tier must
    /// not be able to write to any topic through us. [`crate::pipeline::Returns`] decides.
    ///
    /// # Errors
    /// A malformed failure when it is missing or cannot be the name of a topic.
    pub fn return_topic(&self) -> Result<&'a str, Failure> {
        let found = self.raw(RETURN_TOPIC);
        let name = found.flatten().and_then(|bytes| std::str::from_utf8(bytes).ok());
        name.filter(|name| is_topic_name(name))
            .ok_or_else(|| wrong_value(RETURN_TOPIC, found, "the name of a topic"))
    }

    /// How many attempts have failed so far.
    ///
    /// # Errors
    /// A malformed failure when it is missing, no number, or out of range.
    pub fn retry_count(&self) -> Result<u32, Failure> {
        let range = "a number from 0 to 100000";
        let count: u32 = self.required(RETRY_COUNT, range)?;
        if count > MAX_RETRY_COUNT {
            return Err(wrong_value(RETRY_COUNT, self.raw(RETRY_COUNT), range));
        }
        Ok(count)
    }

    /// Where the record entered the pipeline.
    ///
    /// # Errors
    /// A malformed failure when a part is missing or out of range. Only the timestamp may be missing.
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

    /// Whether the record says that this pipeline has handled it before.
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
            // `parse` accepts a sign that the protocol does not write.
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

/// W3C trace context that replaces the record's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// The header `traceparent`.
    pub traceparent: String,
    /// The header `tracestate`, if there is any.
    pub tracestate: Option<String>,
}

/// The user's headers of a record, ready for ours to be added. A new trace context replaces the old one.
#[must_use]
pub fn user_headers(headers: &Headers, trace: Option<&TraceContext>) -> Headers {
    let Some(trace) = trace else {
        return headers.filtered(|name| !is_ours(name));
    };
    let mut kept = headers.filtered(|name| !is_ours(name) && name != TRACEPARENT && name != TRACESTATE);
    kept.push_text(TRACEPARENT, &trace.traceparent);
    if let Some(state) = &trace.tracestate {
        kept.push_text(TRACESTATE, state);
    }
    kept
}

/// Says that a wait ends in this topic: whoever reads the record there is told that it was meant to go there.
pub fn readdress(headers: &mut Headers, topic: &str) {
    *headers = headers.filtered(|name| name != RETURN_TOPIC);
    headers.push_text(RETURN_TOPIC, topic);
}

/// Adds where the record comes from, which pipeline handled it and how many attempts have failed.
pub fn write_lineage(headers: &mut Headers, pipeline: &str, origin: &Origin, retry_count: u32) {
    headers.push_text(PIPELINE, pipeline);
    headers.push_text(ORIGINAL_TOPIC, &origin.topic);
    headers.push_text(ORIGINAL_PARTITION, &origin.partition.to_string());
    headers.push_text(ORIGINAL_OFFSET, &origin.offset.to_string());
    if let Some(timestamp) = origin.timestamp {
        headers.push_text(ORIGINAL_TIMESTAMP, &timestamp.to_string());
    }
    headers.push_text(RETRY_COUNT, &retry_count.to_string());
}

/// Adds what went wrong and when.
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
    fn what_is_written_is_read_back() {
        let mut headers = Headers::new();
        headers.push_text("tenant", "a");
        write_lineage(&mut headers, "p", &lineage(), 2);
        let record = record(headers);
        let ours = ReservedHeaders::read(&record).unwrap();
        assert_eq!(ours.origin(), Ok(lineage()));
        assert_eq!(ours.retry_count(), Ok(2));
        assert!(ours.is_retry_of("p") && !ours.is_retry_of("q"));
        assert_eq!(user_headers(&record.headers, None).len(), 1);
    }

    #[test]
    fn every_name_of_ours_is_recognised_and_no_other() {
        assert!(OURS.iter().all(|name| is_ours(name)));
        for foreign in [
            "",
            "p",
            "Process-After",
            "process-after ",
            "tenant",
            TRACEPARENT,
            "job-id",
        ] {
            assert!(!is_ours(foreign), "{foreign}");
        }
    }

    #[test]
    fn a_new_trace_context_replaces_the_old_one() {
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
    fn forged_values_name_the_header_and_what_would_be_right() {
        let now = Timestamp::from_millis(1_700_000_000_000);
        let check = |value: Option<&[u8]>, expected: &str| {
            let record = record([(PROCESS_AFTER, value)].into_iter().collect());
            let ours = ReservedHeaders::read(&record).unwrap();
            let failure = ours.process_after(now, Span::from_secs(3600)).unwrap_err();
            assert_eq!(failure.code, "header.process-after");
            assert!(failure.message.contains(expected), "{}", failure.message);
        };
        check(None, "is null");
        check(Some(b"\xff\x00"), r"is `\xff\x00`");
        check(Some(b"now"), "expected a time");
        check(Some(b"2999-01-01T00:00:00.000Z"), "more than the allowed 1h away");
        let ahead = record(
            [(PROCESS_AFTER, Some(&b"2999-01-01T00:00:00.000Z"[..]))]
                .into_iter()
                .collect(),
        );
        let failure = ReservedHeaders::read(&ahead)
            .unwrap()
            .lock_is_over(now)
            .unwrap_err();
        assert!(failure.message.contains("is still ahead"), "{}", failure.message);
        let missing = record(Headers::new());
        assert_eq!(ReservedHeaders::read(&missing).unwrap().lock_is_over(now), Ok(()));
        assert!(
            ReservedHeaders::read(&missing)
                .unwrap()
                .retry_count()
                .unwrap_err()
                .message
                .contains("is missing")
        );
        let twice = record(
            [(RETRY_COUNT, Some(&b"1"[..])), (RETRY_COUNT, Some(&b"1"[..]))]
                .into_iter()
                .collect(),
        );
        assert!(
            ReservedHeaders::read(&twice)
                .unwrap_err()
                .message
                .contains("more than once")
        );
        let foreign = record([(RETURN_TOPIC, Some(&b"../etc"[..]))].into_iter().collect());
        assert!(ReservedHeaders::read(&foreign).unwrap().return_topic().is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_in_every_header_of_ours_never_panic_and_never_mean_now(
            values in proptest::collection::vec((0..OURS.len(), proptest::option::of(proptest::collection::vec(any::<u8>(), 0..40))), 0..20),
        ) {
            let now = Timestamp::from_millis(1_700_000_000_000);
            let headers: Headers = values.iter().map(|(i, v)| (OURS[*i], v.as_deref())).collect();
            let record = record(headers);
            let Ok(ours) = ReservedHeaders::read(&record) else { return Ok(()) };
            let _ = ours.retry_count();
            let _ = ours.return_topic();
            if let Ok(origin) = ours.origin() {
                prop_assert!(origin.partition >= 0 && origin.offset >= 0);
            }
            if let Ok(due) = ours.process_after(now, Span::from_secs(60)) {
                // Only a value that really is a time within the bound is accepted.
                let text = std::str::from_utf8(record.headers.last(PROCESS_AFTER).unwrap()).unwrap();
                prop_assert_eq!(text.parse::<Timestamp>().unwrap(), due);
            }
        }

        #[test]
        fn digits_and_dates_of_any_size_never_panic(text in "[-+0-9TZ:.]{0,40}") {
            let headers: Headers = OURS.iter().map(|name| (*name, Some(text.as_bytes()))).collect();
            let record = record(headers);
            let ours = ReservedHeaders::read(&record).unwrap();
            let _ = (ours.retry_count(), ours.origin(), ours.process_after(Timestamp::from_millis(0), Span::from_secs(1)));
        }
    }
}
