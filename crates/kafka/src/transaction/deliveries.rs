//! Waits for the delivery reports of a transaction.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{DeliveryResult, Message as _};
use rdkafka::producer::ProducerContext;
use redeliver_core::Output;

use crate::client::ClientLog;
use crate::processor::Delivered;
use crate::recovery::is_secondary;

/// How often the topics of unconfirmed deliveries are checked.
const TOPIC_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Counts delivery reports, which arrive on the producer's own thread, and wakes the thread that writes. The opaque value of a
/// record is the number of its transaction in the upper half, since reports of an aborted transaction may arrive during the
/// next one, and its index in the batch in the lower half.
pub(super) struct Deliveries {
    transaction: AtomicU32,
    waiting: Mutex<Option<Thread>>,
    reported: AtomicUsize,
    /// Which outputs are delivered, by index.
    delivered: Mutex<Vec<bool>>,
    awaited: AtomicUsize,
    failed: AtomicBool,
    /// The first failure that was not caused by another one; until there is one, the latest failure.
    first_failure: Mutex<Option<(usize, KafkaError)>>,
    /// The topics that the coordinator has not let the client add to the transaction. The client then purges the records of all topics, and
    /// tells the reason only in its log.
    denied: Mutex<Vec<String>>,
    changelog: Option<Arc<str>>,
    changelog_ends: Mutex<Vec<(i32, i64)>>,
    /// Where the first outputs were written, if requested.
    positions: Mutex<Vec<Delivered>>,
    wants_positions: AtomicBool,
    log: ClientLog,
}

const _: () = assert!(usize::BITS == 64, "an opaque value holds two 32-bit numbers");

impl Deliveries {
    pub(super) fn new(changelog: Option<Arc<str>>) -> Self {
        Self {
            changelog,
            changelog_ends: Mutex::default(),
            transaction: AtomicU32::new(0),
            waiting: Mutex::new(None),
            reported: AtomicUsize::new(0),
            delivered: Mutex::default(),
            awaited: AtomicUsize::new(usize::MAX),
            failed: AtomicBool::new(false),
            first_failure: Mutex::new(None),
            denied: Mutex::default(),
            positions: Mutex::default(),
            wants_positions: AtomicBool::new(false),
            log: ClientLog::default(),
        }
    }

    /// Begins a transaction and returns its number. The positions of the first `wanted` outputs are remembered.
    pub(super) fn begin(&self, wanted: usize) -> u32 {
        let number = self.transaction.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        self.reported.store(0, Ordering::SeqCst);
        lock(&self.delivered).clear();
        self.awaited.store(usize::MAX, Ordering::SeqCst);
        self.failed.store(false, Ordering::SeqCst);
        *lock(&self.first_failure) = None;
        lock(&self.denied).clear();
        lock(&self.changelog_ends).clear();
        *lock(&self.positions) = vec![None; wanted];
        self.wants_positions.store(wanted > 0, Ordering::SeqCst);
        number
    }

    /// Waits for `count` delivery reports. Every [`TOPIC_CHECK_INTERVAL`] it calls `check`, with the number of the call, for a
    /// reason to give up.
    ///
    /// # Errors
    /// If a delivery failed or `check` gives up, with the index of the output, or if the deadline passes.
    pub(super) fn wait_for(
        &self,
        count: usize,
        deadline: Instant,
        mut check: impl FnMut(u32) -> Option<(usize, KafkaError)>,
    ) -> Result<(), (Option<usize>, KafkaError)> {
        *lock(&self.waiting) = Some(thread::current());
        self.awaited.store(count, Ordering::SeqCst);
        let mut given_up = None;
        let mut round = 0;
        let mut next_check = Instant::now() + TOPIC_CHECK_INTERVAL;
        while self.reported() < count && !self.failed.load(Ordering::SeqCst) {
            let now = Instant::now();
            if now >= deadline {
                given_up = Some((None, KafkaError::Flush(RDKafkaErrorCode::OperationTimedOut)));
                break;
            }
            if now >= next_check {
                round += 1;
                next_check = now + TOPIC_CHECK_INTERVAL;
                if let Some((index, error)) = check(round) {
                    given_up = Some((Some(index), error));
                    break;
                }
            }
            thread::park_timeout(deadline.min(next_check) - now);
        }
        self.awaited.store(usize::MAX, Ordering::SeqCst);
        match lock(&self.first_failure).clone() {
            Some((index, error)) => Err((Some(index), error)),
            None => given_up.map_or(Ok(()), Err),
        }
    }

    /// The number of delivery reports in this transaction.
    pub(super) fn reported(&self) -> usize {
        self.reported.load(Ordering::SeqCst)
    }

    /// The topics of those outputs that are not delivered. `base`: the index of the first one.
    pub(super) fn undelivered(&self, outputs: &[Output], base: usize) -> BTreeSet<Arc<str>> {
        let delivered = lock(&self.delivered);
        let is_delivered = |index: usize| delivered.get(base + index) == Some(&true);
        let outputs = outputs.iter().enumerate();
        let undelivered = outputs.filter(|(index, _)| !is_delivered(*index));
        undelivered.map(|(_, output)| output.topic.clone()).collect()
    }

    /// The topic whose end offsets the lane wants to know.
    pub(super) fn changelog(&self) -> Option<&Arc<str>> {
        self.changelog.as_ref()
    }

    /// The partitions of the changelog that the transaction has written to, each with the offset after its last record there, or [`UNKNOWN_END`].
    pub(super) fn take_changelog_ends(&self) -> Vec<(i32, i64)> {
        std::mem::take(&mut *lock(&self.changelog_ends))
    }

    /// Where the first outputs were written, complete once they are delivered.
    pub(super) fn take_positions(&self) -> Vec<Delivered> {
        self.wants_positions.store(false, Ordering::SeqCst);
        std::mem::take(&mut *lock(&self.positions))
    }

    /// The topics to which this client may not write, as far as the current transaction has shown it.
    pub(super) fn denied(&self) -> Vec<String> {
        lock(&self.denied).clone()
    }

    /// The opaque value of an output.
    pub(super) const fn opaque(transaction: u32, index: usize) -> usize {
        ((transaction as usize) << 32) | index
    }

    /// Waits for one delivery report.
    pub(super) fn wait_for_any(&self, deadline: Instant) {
        // An abort follows, so the result does not matter.
        let _ = self.wait_for(1, deadline, |_| None);
    }
}

/// Parses a log line of the client (librdkafka 2.12, `rd_kafka_txn_handle_AddPartitionsToTxn`) about a topic to which it may not write. It reports that only
/// there, and before it purges the records.
fn denied_topic<'a>(facility: &str, message: &'a str) -> Option<&'a str> {
    if facility != "ADDPARTS" || !message.ends_with("Topic authorization failed") {
        return None;
    }
    let (_, after) = message.split_once("Failed to add partition \"")?;
    after.split_once('"').map(|(topic, _)| topic)
}

impl ClientContext for Deliveries {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        if let Some(topic) = denied_topic(facility, message) {
            let mut denied = lock(&self.denied);
            if !denied.iter().any(|known| known == topic) {
                denied.push(topic.to_owned());
            }
        }
        self.log.log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        if self.log.should_log("error") {
            tracing::warn!(%error, reason, "producer error");
        }
    }
}

impl ProducerContext for Deliveries {
    type DeliveryOpaque = usize;

    fn delivery(&self, result: &DeliveryResult<'_>, opaque: usize) {
        let (transaction, index) = (opaque >> 32, opaque & u32::MAX as usize);
        if transaction != self.transaction.load(Ordering::SeqCst) as usize {
            return;
        }
        if let Ok(message) = result
            && self.wants_positions.load(Ordering::SeqCst)
            && let Some(position) = lock(&self.positions).get_mut(index)
        {
            *position = Some((message.partition(), message.offset())).filter(|(_, offset)| *offset >= 0);
        }
        if result.is_ok() {
            let mut delivered = lock(&self.delivered);
            if delivered.len() <= index {
                delivered.resize(index + 1, false);
            }
            delivered[index] = true;
        }
        match result {
            Ok(message) if self.changelog.as_deref() == Some(message.topic()) => {
                let written = (message.partition(), message.offset());
                add_written(&mut lock(&self.changelog_ends), written);
            }
            Ok(_) => {}
            Err((error, _)) => {
                let mut first = lock(&self.first_failure);
                // The failure that caused the others may be reported after them.
                if first.as_ref().is_none_or(|(_, first)| is_secondary(first)) {
                    *first = Some((index, error.clone()));
                }
                if !is_secondary(error) {
                    self.failed.store(true, Ordering::SeqCst);
                }
            }
        }
        let reported = self.reported.fetch_add(1, Ordering::SeqCst) + 1;
        if (reported >= self.awaited.load(Ordering::SeqCst) || self.failed.load(Ordering::SeqCst))
            && let Some(thread) = &*lock(&self.waiting)
        {
            thread.unpark();
        }
    }
}

/// The end of a partition whose report has no offset: the broker had the record already, when the client sent it again.
const UNKNOWN_END: i64 = -1;

/// Adds a record of the changelog to the ends of its partitions.
fn add_written(ends: &mut Vec<(i32, i64)>, (partition, offset): (i32, i64)) {
    let end = if offset < 0 { UNKNOWN_END } else { offset + 1 };
    match ends.iter_mut().find(|(known, _)| *known == partition) {
        Some((_, UNKNOWN_END)) => {}
        Some((_, known)) if end == UNKNOWN_END => *known = end,
        Some((_, known)) => *known = end.max(*known),
        None => ends.push((partition, end)),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_without_offset_has_no_end() {
        let mut ends = Vec::new();
        for written in [(0, 7), (1, 3), (0, 6), (2, -1001), (1, -1001), (1, 4), (2, 9)] {
            add_written(&mut ends, written);
        }
        assert_eq!(ends, [(0, 8), (1, UNKNOWN_END), (2, UNKNOWN_END)]);
    }

    #[test]
    fn denied_topic_is_parsed() {
        let line = |problem: &str| {
            format!(
                "[thrd:TxnCoordinator]: TxnCoordinator/1: Failed to add partition \"docs\" [3] to transaction: {problem}"
            )
        };
        let denied = line("Broker: Topic authorization failed");
        assert_eq!(denied_topic("ADDPARTS", &denied), Some("docs"));
        assert_eq!(denied_topic("TXNERR", &denied), None);
        // Another partition of the same request was denied.
        let skipped = line("Broker: Operation not attempted");
        assert_eq!(denied_topic("ADDPARTS", &skipped), None);
    }
}
