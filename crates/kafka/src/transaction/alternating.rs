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
/// How long the broker resolves an earlier transaction before another transactional id is used. Usually it takes less than a second.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often the initialisation of a producer is looked at while others are used, and for how long.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_millis(10);

/// Several [`Transactions`], used alternately.
pub(crate) struct Alternating {
    create: Box<dyn Fn(&str) -> Transactions + Send>,
    /// Those of the first suffixes.
    all: Vec<Transactions>,
    last: usize,
    /// Since when the broker has been resolving earlier transactions.
    concurrent_since: Option<Instant>,
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
        let (settings, id) = (settings.clone(), id.to_owned());
        let (changelog, watch) = (changelog.cloned(), watch.clone());
        let create = move |suffix: &str| {
            let id = format!("{id}{suffix}");
            let config = settings.transactional_producer(&id);
            let mut transactions = Transactions::new(config, settings.id(&id), settings.transaction_timeout);
            transactions.set_changelog(changelog.clone());
            transactions.set_watch(watch.clone());
            transactions
        };
        Self {
            all: SUFFIXES[..PAIR].iter().map(|suffix| create(suffix)).collect(),
            create: Box::new(create),
            last: 0,
            concurrent_since: None,
            next_look: Instant::now(),
        }
    }

    /// See [`Transactions::recover`]. On success, no producer has an open transaction, and at least one is ready. Those whose last transaction the broker
    /// cannot resolve yet are not.
    ///
    /// # Errors
    /// If a producer is not initialised yet; call again.
    pub(crate) fn recover(&mut self, wait: Duration) -> Result<(), TransactionError> {
        // Create them first, so that they connect at the same time.
        self.all.iter_mut().try_for_each(Transactions::connect)?;
        // A crashed process may have left a transaction open under any id, so all are initialised before reading.
        let mut unready = None;
        for one in &mut self.all {
            let wait = if one.is_stalled() { LOOK } else { wait };
            match one.recover(wait) {
                Ok(()) => {}
                Err(error) if one.is_stalled() || error.is_concurrent() => unready = Some(error),
                Err(error) => return Err(error),
            }
        }
        let Some(error) = unready else {
            self.all.truncate(PAIR);
            self.concurrent_since = None;
            return Ok(());
        };
        let since = *self.concurrent_since.get_or_insert_with(Instant::now);
        let is_any_ready = self.all.iter().any(Transactions::is_ready);
        let are_stalled = self.all.iter().all(|one| one.is_ready() || one.is_stalled());
        if is_any_ready && (are_stalled || since.elapsed() >= PATIENCE) {
            return Ok(());
        }
        if !is_any_ready
            && (are_stalled || since.elapsed() >= PATIENCE)
            && let Some(suffix) = SUFFIXES.get(self.all.len())
        {
            self.all.push((self.create)(suffix));
        }
        Err(error)
    }

    /// Looks whether the broker has resolved the transactions of producers that are not ready. Takes no longer than a few milliseconds, and
    /// must not be called before [`Alternating::recover`] has succeeded.
    pub(crate) fn look_after_unready(&mut self) {
        if self.all.iter().all(Transactions::is_ready) && self.all.len() == PAIR {
            return;
        }
        let now = Instant::now();
        if now < self.next_look {
            return;
        }
        self.next_look = now + LOOK_INTERVAL;
        for one in &mut self.all {
            if let Err(error) = one.recover(LOOK)
                && error.action != RecoveryAction::Retry
            {
                tracing::warn!(%error, "cannot initialise a producer; others are used");
            }
        }
        if self.all.iter().take(PAIR).all(Transactions::is_ready) {
            self.all.truncate(PAIR);
            self.concurrent_since = None;
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
        self.last = ready.unwrap_or(self.last % count);
        self.all[self.last].write_and_follow_up(outputs, follow_up, offsets, member)
    }

    /// See [`Transactions::take_changelog_ends`].
    pub(crate) fn take_changelog_ends(&mut self) -> Vec<(i32, i64)> {
        self.all
            .get_mut(self.last)
            .map(Transactions::take_changelog_ends)
            .unwrap_or_default()
    }

    /// Drops all producers.
    pub(crate) fn discard(&mut self) {
        self.all.iter_mut().for_each(Transactions::discard);
    }
}
