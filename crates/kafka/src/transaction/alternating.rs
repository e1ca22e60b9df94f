//! Two producers, used alternately, and spare ones.
//!
//! The broker confirms a commit once its outcome is certain, and writes the transaction's markers after that. If the same
//! producer begins another transaction meanwhile, the broker answers `CONCURRENT_TRANSACTIONS` when partitions are added,
//! and the client library waits 20 ms before it retries (`retry_backoff_ms` in `rdkafka_txnmgr.c`). With two producers, the
//! next transaction begins at once.
//!
//! There is still only one open transaction at a time. The markers of two consecutive transactions may be written in any
//! order: of two commits of a group's position, the coordinator keeps the one that is later in its log, no matter which is
//! completed first, and it returns no position (`require_stable`) while one of them is open.
//!
//! While a partition of a transaction has no leader, or too few replicas in sync, the broker cannot write its marker, and refuses the transactional
//! id, also after a restart of the process. The transaction does not wait for that: its outcome is certain, and the coordinator returns no position
//! that depends on it before. So the lane continues with the other producer, or with a spare one with another id.
//!
//! A crashed process may have left a transaction open under any id, so all are initialised at the start, and the spare ones dropped after that.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::ConsumerGroupMetadata;
use redeliver_core::Output;

use super::{TransactionError, Transactions};
use crate::client::KafkaSettings;
use crate::processor::FollowUp;
use crate::recovery::RecoveryAction;
use crate::topic_watch::TopicWatch;

/// What is added to the transactional ids: two that alternate, and two spare ones.
const SUFFIXES: [&str; 4] = ["", "-b", "-c", "-d"];
const PAIR: usize = 2;
/// How often the initialisation of a producer is looked at while others are used, and for how long.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_millis(10);
/// The previous after an error other than a timeout.
const LONG_INTERVAL: Duration = Duration::from_secs(30);

/// Several [`Transactions`], used alternately.
pub(crate) struct Alternating {
    all: [Transactions; SUFFIXES.len()],
    /// The number of those in use: all, or without the spare ones, which have no producer then.
    used: usize,
    last: usize,
    next_look: Instant,
}

impl Alternating {
    /// Creates producers whose transactional ids begin with `id` and the prefix of the installation.
    pub(crate) fn new(
        settings: &KafkaSettings,
        id: &str,
        changelog: Option<&Arc<str>>,
        watch: &TopicWatch,
    ) -> Self {
        let all = SUFFIXES.map(|suffix| {
            let id = format!("{id}{suffix}");
            let config = settings.transactional_producer(&id);
            let mut transactions = Transactions::new(config, settings.id(&id), settings.transaction_timeout);
            transactions.set_changelog(changelog.cloned());
            transactions.set_watch(watch.clone());
            transactions
        });
        Self {
            used: all.len(),
            all,
            last: 0,
            next_look: Instant::now(),
        }
    }

    /// See [`Transactions::recover`]. On success, the outcome of each transaction of this process is certain, and at least one producer is ready. Those whose
    /// last transaction the broker cannot resolve yet are not, and spare ones need not be.
    ///
    /// # Errors
    /// If a producer is not initialised yet; call again.
    pub(crate) fn recover(&mut self, wait: Duration) -> Result<(), TransactionError> {
        // Create them first, so that they connect at the same time.
        self.all[..PAIR].iter_mut().try_for_each(Transactions::connect)?;
        let mut unready = None;
        for (index, one) in self.all[..self.used].iter_mut().enumerate() {
            // Of the spare ones, only the last one used can have a transaction whose outcome is unknown.
            let is_needed = index < PAIR || index == self.last;
            let wait = if is_needed && !one.is_blocked() {
                wait
            } else {
                LOOK
            };
            match one.recover(wait) {
                Err(error) if is_needed && !one.is_blocked() => return Err(error),
                recovered => unready = recovered.err().or(unready),
            }
        }
        self.drop_spares();
        match unready {
            Some(error) if !self.all.iter().any(Transactions::is_ready) => {
                self.used = self.all.len();
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// Looks whether the broker has resolved the transactions of producers that are not ready. Takes no longer than a few milliseconds, and
    /// must not be called before [`Alternating::recover`] has succeeded.
    pub(crate) fn look_after_unready(&mut self) {
        let now = Instant::now();
        if self.used == PAIR && self.all[..PAIR].iter().all(Transactions::is_ready) || now < self.next_look {
            return;
        }
        self.next_look = now + LOOK_INTERVAL;
        for one in &mut self.all[..self.used] {
            if let Err(error) = one.recover(LOOK)
                && error.action != RecoveryAction::Retry
            {
                self.next_look = now + LONG_INTERVAL;
                tracing::warn!(%error, "cannot initialise a producer; using the others");
            }
        }
        self.drop_spares();
    }

    /// Drops the spare producers, unless one that is used is not ready.
    fn drop_spares(&mut self) {
        if self.all[..self.used].iter().all(Transactions::is_ready) {
            self.all[PAIR..].iter_mut().for_each(Transactions::discard);
            self.used = PAIR;
            self.last %= PAIR;
        }
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
        let count = self.all.len();
        let after_last = (1..=count).map(|step| (self.last + step) % count);
        let ready = after_last.into_iter().find(|index| self.all[*index].is_ready());
        self.last = ready.unwrap_or(self.last);
        let is_any_blocked = self.all.iter().any(Transactions::is_blocked);
        self.all[self.last].set_wary(is_any_blocked);
        self.all[self.last].write_and_follow_up(outputs, follow_up, offsets, member)
    }

    /// See [`Transactions::take_changelog_ends`].
    pub(crate) fn take_changelog_ends(&mut self) -> Vec<(i32, i64)> {
        self.all[self.last].take_changelog_ends()
    }

    /// Drops all producers.
    pub(crate) fn discard(&mut self) {
        self.all.iter_mut().for_each(Transactions::discard);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No broker listens there, so no producer becomes ready.
    fn alternating() -> Alternating {
        let settings = KafkaSettings::new("127.0.0.1:1", "test");
        Alternating::new(&settings, "test", None, &TopicWatch::start(&settings).unwrap())
    }

    fn recover(alternating: &mut Alternating) -> bool {
        alternating.recover(LOOK).is_ok()
    }

    #[test]
    fn failing_spares_do_not_block() {
        let mut alternating = alternating();
        assert!(!recover(&mut alternating));
        alternating.all[0].initialised = true;
        assert!(!recover(&mut alternating));
        alternating.all[1].initialised = true;
        assert!(recover(&mut alternating));
        // A transaction that an earlier process has left open is still to be resolved.
        assert_eq!(alternating.used, SUFFIXES.len());
        for spare in &mut alternating.all[PAIR..] {
            spare.initialised = true;
        }
        alternating.next_look = Instant::now();
        alternating.look_after_unready();
        assert_eq!(alternating.used, PAIR);
        assert!(!alternating.all[PAIR].is_ready());
    }

    #[test]
    fn unknown_outcome_of_spare_blocks() {
        let mut alternating = alternating();
        for one in &mut alternating.all[..PAIR] {
            one.initialised = true;
        }
        alternating.last = PAIR;
        assert!(!recover(&mut alternating));
        // The broker says that it resolves the transaction.
        alternating.all[PAIR].is_unresolved = true;
        assert!(recover(&mut alternating));
        assert_eq!(alternating.used, SUFFIXES.len());
    }

    #[test]
    fn spares_replace_blocked_producers() {
        let mut alternating = alternating();
        alternating.used = PAIR;
        for one in &mut alternating.all[..PAIR] {
            one.is_unresolved = true;
        }
        assert!(!recover(&mut alternating));
        alternating.all[PAIR].initialised = true;
        assert!(recover(&mut alternating));
        let _ = alternating.write(&[], None, &TopicPartitionList::new(), None);
        assert_eq!(alternating.last, PAIR);
    }

    #[test]
    fn blocked_producers_are_not_waited_for() {
        let mut alternating = alternating();
        alternating.all[0].initialised = true;
        alternating.all[1].is_unresolved = true;
        alternating.recover(Duration::from_secs(600)).unwrap();
    }
}
