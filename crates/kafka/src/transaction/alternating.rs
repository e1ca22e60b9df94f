//! Two producers, used alternately.
//!
//! The broker confirms a commit once its outcome is certain, and writes the transaction's markers after that. If the same
//! producer begins another transaction meanwhile, the broker answers `CONCURRENT_TRANSACTIONS` when partitions are added,
//! and the client library waits 20 ms before it retries (`retry_backoff_ms` in `rdkafka_txnmgr.c`). With two producers, the
//! next transaction begins at once.
//!
//! There is still only one open transaction at a time. The markers of two consecutive transactions may be written in any
//! order: of two commits of a group's position, the coordinator keeps the one that is later in its log, no matter which is
//! completed first, and it returns no position (`require_stable`) while one of them is open.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::TopicPartitionList;
use rdkafka::consumer::ConsumerGroupMetadata;
use redeliver_core::Output;

use super::{TransactionError, Transactions};
use crate::client::KafkaSettings;
use crate::processor::FollowUp;
use crate::topic_watch::TopicWatch;

/// Two [`Transactions`], used alternately.
pub(crate) struct Alternating {
    pair: [Transactions; 2],
    next: usize,
    last: usize,
}

impl Alternating {
    /// Creates producers with the transactional ids `id` and `id-b`, with the prefix of the installation.
    pub(crate) fn new(
        settings: &KafkaSettings,
        id: &str,
        changelog: Option<&Arc<str>>,
        watch: &TopicWatch,
    ) -> Self {
        let create = |id: String| {
            let config = settings.transactional_producer(&id);
            let mut transactions = Transactions::new(config, settings.id(&id), settings.transaction_timeout);
            transactions.set_changelog(changelog.cloned());
            transactions.set_watch(watch.clone());
            transactions
        };
        Self {
            pair: [create(id.to_owned()), create(format!("{id}-b"))],
            next: 0,
            last: 0,
        }
    }

    /// See [`Transactions::recover`]. On success, neither producer has an open transaction.
    ///
    /// # Errors
    /// If one of the producers is not initialised yet; call again.
    pub(crate) fn recover(&mut self, wait: Duration) -> Result<(), TransactionError> {
        // Create both first, so that they connect at the same time.
        self.pair.iter_mut().try_for_each(Transactions::connect)?;
        // A crashed process may have left a transaction open under either id, so both are initialised before reading.
        self.pair.iter_mut().try_for_each(|one| one.recover(wait))
    }

    /// See [`Transactions::write_and_follow_up`].
    ///
    /// # Errors
    /// See there.
    pub(crate) fn write(
        &mut self,
        outputs: &[Output],
        follow_up: Option<&FollowUp>,
        offsets: &TopicPartitionList,
        member: Option<&Arc<ConsumerGroupMetadata>>,
    ) -> Result<(), TransactionError> {
        self.last = self.next;
        self.next = 1 - self.next;
        self.pair[self.last].write_and_follow_up(outputs, follow_up, offsets, member)
    }

    /// See [`Transactions::take_changelog_ends`].
    pub(crate) fn take_changelog_ends(&mut self) -> Vec<(i32, i64)> {
        self.pair[self.last].take_changelog_ends()
    }

    /// Drops both producers.
    pub(crate) fn discard(&mut self) {
        self.pair.iter_mut().for_each(Transactions::discard);
    }
}
