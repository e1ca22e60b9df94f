//! The thread that reads the urgent topic.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use redeliver_core::wait::{Backoff, LogThrottle};
use redeliver_core::{Clock, mutant};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::follow::{Event, Follower, Start};
use redeliver_kafka::reader::ReadError;
use redeliver_runtime::error_chain::error_chain;
use tokio_util::sync::CancellationToken;

use super::copy::read_copy;
use super::inbox::{Pushed, UrgentCopies};
use crate::metrics::UrgentMetrics;
use crate::settings::Settings;
use crate::shard::UrgentCopy;

/// The maximum time until the reader notices a new shard, or the end of the process, and between two attempts to pass copies on.
const POLL: Duration = Duration::from_millis(200);
/// The maximum number of copies that were read and not passed on.
const MAX_WAITING: usize = 10_000;

/// The thread that reads the urgent topic.
pub(crate) struct Reader {
    pub(crate) kafka: KafkaSettings,
    pub(crate) settings: Arc<Settings>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) copies: Arc<UrgentCopies>,
    pub(crate) metrics: UrgentMetrics,
    pub(crate) stop: CancellationToken,
}

impl Reader {
    /// Runs until the process shuts down. Failures are logged and retried: nothing depends on the copies.
    pub(crate) fn run(self) -> Result<(), ReadError> {
        let mut log = LogThrottle::default();
        let new_backoff = || Backoff::new(Duration::from_millis(100), Duration::from_secs(30));
        let mut backoff = new_backoff();
        while !self.stop.is_cancelled() {
            let began = Instant::now();
            if let Err(error) = self.follow(&mut log) {
                self.log(&mut log, &error_chain(&error));
                // The next client reads all shards.
                self.copies.unread();
                if began.elapsed() > Duration::from_secs(60) {
                    backoff = new_backoff();
                }
                self.pause(backoff.next_delay());
            }
        }
        Ok(())
    }

    /// Pauses, but not beyond the end of the process.
    fn pause(&self, delay: Duration) {
        let until = Instant::now() + delay;
        while !self.stop.is_cancelled() && Instant::now() < until {
            std::thread::park_timeout(POLL.min(until.saturating_duration_since(Instant::now())));
        }
    }

    fn follow(&self, log: &mut LogThrottle) -> Result<(), ReadError> {
        // Uncommitted: a transaction holds up no copies behind it, and a pin for a command that was aborted ends by itself.
        let mut follower = Follower::uncommitted(&self.kafka, self.copies.reader.clone())?;
        let mut waiting = Waiting::default();
        while !self.stop.is_cancelled() {
            self.follow_shards(&mut follower, &mut waiting)?;
            if waiting.is_full() {
                std::thread::park_timeout(POLL);
            } else {
                follower.poll(POLL, |event| {
                    self.visit(event, &mut waiting, log);
                    match waiting.is_full() {
                        true => ControlFlow::Break(()),
                        false => ControlFlow::Continue(()),
                    }
                })?;
            }
            let end_of = |partition| {
                let end = follower.end_of(&self.settings.ingest, partition);
                end.map_err(|error| self.log(log, &error_chain(&error))).ok()
            };
            if waiting.pass_on(&self.copies, &self.metrics, end_of) {
                self.copies.waker.wake();
            }
        }
        Ok(())
    }

    fn visit(&self, event: Event, waiting: &mut Waiting, log: &mut LogThrottle) {
        match event {
            Event::Record(copy) => match read_copy(&copy, &self.settings, self.clock.now()) {
                Some(read) => waiting.add(copy.position.partition, read),
                None => {
                    self.metrics.invalid.inc();
                    tracing::debug!(
                        position = %copy.position,
                        "record of the urgent topic is no copy of a command that names a job"
                    );
                }
            },
            Event::End { partition, .. } => waiting.end(partition),
            Event::Refused { partition, error, .. } => {
                self.log(log, &format!("partition {partition}: {error}"));
                if self.copies.complete(partition) {
                    self.metrics.gave_up.inc();
                    self.copies.waker.wake();
                }
            }
        }
    }

    /// Reads the shards that the lane has, each assignment from the beginning.
    fn follow_shards(&self, follower: &mut Follower, waiting: &mut Waiting) -> Result<(), ReadError> {
        let (owned, new) = self.copies.begin();
        waiting
            .partitions
            .retain(|partition, _| owned.contains(partition) && !new.contains(partition));
        let starts = new.into_iter().map(|partition| Start {
            topic: self.copies.topic.clone(),
            partition,
            from: None,
        });
        let starts: Vec<Start> = starts.collect();
        follower.retain(|_, partition| owned.contains(&partition))?;
        if starts.is_empty() {
            return Ok(());
        }
        follower.add(&starts)
    }

    fn log(&self, log: &mut LogThrottle, reason: &str) {
        if log.should_log() {
            tracing::warn!(
                topic = &*self.copies.topic,
                reason,
                "cannot read the urgent topic; commands wait for their turn in the ingest topic"
            );
        }
    }
}

/// Copies that were read and not passed on to their shards.
#[derive(Default)]
struct Waiting {
    partitions: HashMap<i32, WaitingCopies>,
}

#[derive(Default)]
struct WaitingCopies {
    copies: Vec<UrgentCopy>,
    /// The end of the partition was reached after these copies.
    is_at_end: bool,
    /// Where the partition of the ingest topic ended when that was last asked for.
    end: i64,
    /// When to ask again after a failure.
    next_attempt: Option<Instant>,
}

impl Waiting {
    fn add(&mut self, partition: i32, copy: UrgentCopy) {
        self.partitions.entry(partition).or_default().copies.push(copy);
    }

    fn end(&mut self, partition: i32) {
        self.partitions.entry(partition).or_default().is_at_end = true;
    }

    fn is_full(&self) -> bool {
        let copies = self.partitions.values().map(|waiting| waiting.copies.len());
        copies.sum::<usize>() >= MAX_WAITING
    }

    /// Passes on what there is room for. `end_of` returns the current end of a partition of the ingest topic; `None` if it is not known.
    /// Returns whether a shard has something to take.
    fn pass_on(
        &mut self,
        copies: &UrgentCopies,
        metrics: &UrgentMetrics,
        mut end_of: impl FnMut(i32) -> Option<i64>,
    ) -> bool {
        let mut is_new = false;
        for (partition, waiting) in &mut self.partitions {
            if !waiting.knows_originals(|| end_of(*partition)) {
                continue;
            }
            is_new |= waiting.push(*partition, copies, metrics);
            if waiting.copies.is_empty() && std::mem::take(&mut waiting.is_at_end) {
                is_new |= copies.complete(*partition);
            }
        }
        is_new
    }
}

impl WaitingCopies {
    /// Whether the end of the partition of the ingest topic was asked for after the copies were read, if that is necessary.
    fn knows_originals(&mut self, end_of: impl FnOnce() -> Option<i64>) -> bool {
        let last = self.copies.iter().map(|copy| copy.original).max();
        if last.is_none_or(|last| last < self.end) {
            return true;
        }
        if self.next_attempt.is_some_and(|next| Instant::now() < next) {
            return false;
        }
        let end = end_of();
        self.end = end.unwrap_or(self.end);
        self.next_attempt = end.is_none().then(|| Instant::now() + POLL);
        end.is_some()
    }

    /// Passes copies on while there is room for them, except for those that name an offset which does not exist: an original is
    /// acknowledged before its copy is written.
    fn push(&mut self, partition: i32, copies: &UrgentCopies, metrics: &UrgentMetrics) -> bool {
        let mut is_new = false;
        let mut passed_on = 0;
        for copy in &self.copies {
            if copy.original >= self.end && !mutant!("urgent-trusts-made-up-offsets") {
                metrics.invalid.inc();
            } else {
                match copies.push(partition, *copy) {
                    Pushed::Added => is_new = true,
                    Pushed::Merged => drop(metrics.pins.inc()),
                    Pushed::Late => drop(metrics.late.inc()),
                    Pushed::Outdated => {}
                    Pushed::Full => break,
                }
            }
            passed_on += 1;
        }
        self.copies.drain(..passed_on);
        is_new
    }
}

#[cfg(test)]
mod tests {
    use redeliver_kafka::{AssignmentId, Waker};

    use super::*;
    use crate::shard::NamedBy;
    use crate::urgent::inbox::MAX_NAMES;

    const SHARD: i32 = 3;

    struct Bench {
        copies: Arc<UrgentCopies>,
        assignment: AssignmentId,
        metrics: UrgentMetrics,
        waiting: Waiting,
        /// The number of requests for the end of the ingest topic.
        requests: u32,
    }

    impl Bench {
        fn new() -> Self {
            let copies = UrgentCopies::new("urgent".into(), Waker::new());
            let assignment = AssignmentId::for_tests(0, 1);
            copies.assigned(assignment, SHARD);
            copies.begin();
            Self {
                copies,
                assignment,
                metrics: UrgentMetrics::default(),
                waiting: Waiting::default(),
                requests: 0,
            }
        }

        fn read(&mut self, name: u16, original: i64) {
            let mut key = [7; 16];
            key[..2].copy_from_slice(&name.to_be_bytes());
            let names = NamedBy::Key(key);
            self.waiting.add(SHARD, UrgentCopy { names, original });
        }

        fn pass_on(&mut self, end: Option<i64>) -> bool {
            let requests = &mut self.requests;
            self.waiting.pass_on(&self.copies, &self.metrics, |_| {
                *requests += 1;
                end
            })
        }

        fn taken(&self) -> Vec<i64> {
            let copies = self.copies.take(self.assignment, SHARD, 0).copies;
            let mut originals: Vec<i64> = copies.iter().map(|copy| copy.original).collect();
            originals.sort_unstable();
            originals
        }
    }

    #[test]
    fn copies_of_offsets_that_do_not_exist_pin_nothing() {
        let mut bench = Bench::new();
        bench.read(1, 9);
        bench.read(2, 10);
        bench.read(3, i64::MAX);
        assert!(bench.pass_on(Some(10)));
        assert_eq!(bench.taken(), [9]);
        assert_eq!(bench.metrics.invalid.get(), 2);
        // The end is asked for only if an original is behind the known one.
        bench.read(1, 8);
        assert!(bench.pass_on(Some(20)));
        bench.read(2, 10);
        assert!(bench.pass_on(Some(20)));
        assert_eq!(bench.taken(), [8, 10]);
        assert_eq!(bench.requests, 2);
    }

    #[test]
    fn copies_and_the_end_behind_them_wait_until_the_end_of_the_ingest_topic_is_known() {
        let mut bench = Bench::new();
        bench.read(1, 9);
        bench.waiting.end(SHARD);
        assert!(!bench.pass_on(None) && !bench.pass_on(Some(10)));
        assert_eq!(bench.requests, 1, "not again at once");
        assert!(!bench.copies.take(bench.assignment, SHARD, 0).is_complete);
        for waiting in bench.waiting.partitions.values_mut() {
            waiting.next_attempt = None;
        }
        assert!(bench.pass_on(Some(10)));
        let delivery = bench.copies.take(bench.assignment, SHARD, 0);
        assert_eq!((delivery.copies.len(), delivery.is_complete), (1, true));
    }

    #[test]
    fn no_copy_is_dropped_while_an_inbox_is_full() {
        let mut bench = Bench::new();
        for name in 0..=u16::try_from(MAX_NAMES).unwrap() {
            bench.read(name, i64::from(name));
        }
        bench.waiting.end(SHARD);
        assert!(bench.waiting.is_full());
        assert!(bench.pass_on(Some(1 << 20)));
        assert!(!bench.waiting.is_full());
        let delivery = bench.copies.take(bench.assignment, SHARD, 0);
        assert_eq!((delivery.copies.len(), delivery.is_complete), (MAX_NAMES, false));
        assert!(bench.pass_on(Some(1 << 20)));
        let delivery = bench.copies.take(bench.assignment, SHARD, 0);
        assert_eq!((delivery.copies.len(), delivery.is_complete), (1, true));
    }
}
