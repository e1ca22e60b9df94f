//! Two producers that take turns.
//!
//! A commit is answered when it is certain; the broker writes its markers after that. A producer that begins again
//! meanwhile is answered `CONCURRENT_TRANSACTIONS` when it adds its partitions, and the client library then waits
//! 20 ms before it asks again (`retry_backoff_ms` in `rdkafka_txnmgr.c`). The broker knows no such order between
//! transactions of two producers, so the next one begins at once.
//!
//! There is still only one transaction at a time. The offsets of two that follow each other need no order of their
//! markers: of two commits of a group's position, its coordinator keeps the one that stands later in its log,
//! whichever is completed first, and tells no position (`require_stable`) while one of them is open.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::TopicPartitionList;
use rdkafka::consumer::ConsumerGroupMetadata;
use redeliver_core::Output;

use super::{TransactionError, Transactions};
use crate::client::KafkaSettings;
use crate::topic_watch::TopicWatch;

/// Two [`Transactions`], used in turn, as one.
pub(crate) struct Alternating {
    pair: [Transactions; 2],
    /// Whose turn it is.
    next: usize,
    /// Who wrote last.
    last: usize,
}

impl Alternating {
    /// Prepares producers of two transactional ids that begin with `id`.
    pub(crate) fn new(
        settings: &KafkaSettings,
        id: &str,
        changelog: Option<&Arc<str>>,
        watch: &TopicWatch,
    ) -> Self {
        let of = |id: String| {
            let config = settings.transactional_producer(&id);
            let mut transactions = Transactions::new(config, id, settings.transaction_timeout);
            transactions.follow(changelog.cloned());
            transactions.heed(watch.clone());
            transactions
        };
        Self {
            pair: [of(id.to_owned()), of(format!("{id}-b"))],
            next: 0,
            last: 0,
        }
    }

    /// See [`Transactions::is_ready`].
    pub(crate) fn is_ready(&self) -> bool {
        self.pair.iter().all(Transactions::is_ready)
    }

    /// See [`Transactions::recover`]: afterwards nothing is open of either.
    ///
    /// # Errors
    /// When it did not succeed yet; call again.
    pub(crate) fn recover(&mut self, wait: Duration) -> Result<(), TransactionError> {
        // Both connect at the same time.
        self.pair.iter_mut().try_for_each(Transactions::connect)?;
        self.pair.iter_mut().try_for_each(|one| one.recover(wait))
    }

    /// See [`Transactions::write`].
    ///
    /// # Errors
    /// As there.
    pub(crate) fn write(
        &mut self,
        outputs: &[Output],
        offsets: &TopicPartitionList,
        group: impl Fn() -> Option<ConsumerGroupMetadata>,
    ) -> Result<(), TransactionError> {
        self.last = self.next;
        self.next = 1 - self.next;
        self.pair[self.last].write(outputs, offsets, group)
    }

    /// See [`Transactions::changelog_ends`].
    pub(crate) fn changelog_ends(&self) -> Vec<(i32, i64)> {
        self.pair[self.last].changelog_ends()
    }

    /// Drops both producers.
    pub(crate) fn discard(&mut self) {
        self.pair.iter_mut().for_each(Transactions::discard);
    }
}
