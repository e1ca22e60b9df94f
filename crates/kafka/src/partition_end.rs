//! Where a consumer reached the end of a partition.
//!
//! librdkafka reports an end of partition once per end offset, when its fetch position equals the end in a fetch response: the
//! last stable offset for a read_committed consumer (`rdkafka_fetcher.c`, `rd_kafka_fetch_reply_handle_partition`). That end
//! is the one which the answering broker knew. It can be lower than an end that was looked up before: a new leader, or a
//! follower that serves the fetch, may not have heard of the newest high watermark yet. Lookups of offsets do not have this
//! problem, because a leader refuses them until its high watermark has caught up (KIP-207). So an end of partition says that
//! everything *below its offset* was read, and nothing about an end that was promised elsewhere.
//!
//! Neither the offset of the last record nor the cached watermarks can replace that offset:
//!
//! - Transaction markers, aborted records and offsets that compaction has removed are not delivered. So the position after the
//!   last record can stay below an end that was reached.
//! - `rd_kafka_get_watermark_offsets` returns the high watermark of the *latest* response. A response that follows the one with
//!   the end of partition may have raised it, while its records are still to be delivered.
//!
//! The event has the right offset: the fetch position at that moment. Records before it precede the event in the same queue,
//! and librdkafka drops events of an older assignment. rdkafka does not pass the offset on
//! (fede1024/rust-rdkafka#784), but first calls [`ClientContext::error`], on the same thread, with librdkafka's text, which
//! contains it. If the text cannot be parsed, no end is ever accepted, so a reader times out instead of skipping records.

use std::sync::{Mutex, MutexGuard, PoisonError};

use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::ConsumerContext;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};

use crate::client::ClientLog;
use crate::recovery::error_code;

/// The offset of an end of partition that is about to be returned from the current poll.
#[derive(Debug, Default)]
pub(crate) struct LastEnd(Mutex<Option<i64>>);

impl LastEnd {
    /// Takes note of an error that the client reports. Returns false unless it is the end of a partition.
    pub(crate) fn note(&self, error: &KafkaError, reason: &str, log: &ClientLog) -> bool {
        if error_code(error) != Some(RDKafkaErrorCode::PartitionEOF) {
            return false;
        }
        let offset = offset_in(reason);
        if offset.is_none() && log.should_log("end") {
            tracing::error!(reason, "cannot read the offset of an end of partition");
        }
        *self.lock() = offset;
        true
    }

    /// The offset of the end of partition that the last poll has returned: everything below it was returned before. `None` if
    /// the offset is unknown.
    pub(crate) fn take(&self) -> Option<i64> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<i64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The context of a consumer that is polled by one thread. It remembers the offset of the last end of partition.
#[derive(Debug, Default)]
pub(crate) struct EndContext {
    log: ClientLog,
    end: LastEnd,
    /// Receives every end, so that a test can act after it.
    #[cfg(test)]
    observer: Mutex<Option<std::sync::mpsc::SyncSender<i64>>>,
}

impl EndContext {
    #[cfg(test)]
    pub(crate) fn report_ends_to(&self, observer: std::sync::mpsc::SyncSender<i64>) {
        *self.observer.lock().unwrap() = Some(observer);
    }

    /// See [`LastEnd::take`].
    pub(crate) fn take_end(&self) -> Option<i64> {
        self.end.take()
    }
}

impl ClientContext for EndContext {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        self.log.log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        if self.end.note(&error, reason, &self.log) {
            #[cfg(test)]
            if let (Some(observer), Some(offset)) = (&*self.observer.lock().unwrap(), offset_in(reason)) {
                // The test may have ended.
                let _ = observer.try_send(offset);
            }
        } else if self.log.should_log("error") {
            tracing::warn!(%error, reason, "consumer error");
        }
    }
}

impl ConsumerContext for EndContext {}

/// The offset in librdkafka's text "Fetch from broker 1 reached end of partition at offset 990 (HighwaterMark 990)".
fn offset_in(reason: &str) -> Option<i64> {
    let (_, rest) = reason.split_once("end of partition at offset ")?;
    let (offset, _) = rest.split_once(' ')?;
    offset.parse().ok().filter(|offset| *offset >= 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offset_is_in_the_text() {
        let text = "Fetch from broker 1 reached end of partition at offset 990 (HighwaterMark 1000)";
        assert_eq!(offset_in(text), Some(990));
        for other in [
            "",
            "Broker: No more messages",
            "end of partition at offset -1 (HighwaterMark 1000)",
            "end of partition at offset x (HighwaterMark 1000)",
            "end of partition at offset 99",
        ] {
            assert_eq!(offset_in(other), None, "{other}");
        }
    }
}
