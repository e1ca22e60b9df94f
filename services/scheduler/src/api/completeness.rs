//! Whether a shard's index contains everything that the state topic contained at the time of a request. Only then is it certain that
//! a job does not exist, and only then is a list or a count complete.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redeliver_runtime::error_chain::error_chain;
use tokio::time::Instant;

use super::error::RequestError;
use super::state_end::{SharedError, StateEnd};
use crate::index::Applied;

/// How long an index is read repeatedly until it is complete. The first read does not count. Longer than a shard usually needs to
/// move to another scheduler.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);
/// The time between the first two reads.
pub(super) const INTERVAL: Duration = Duration::from_millis(25);
/// The longest time between two reads of a list. A list of an index that is rebuilt can be as large as a page, unlike the lookup of a
/// job.
const LONGEST_INTERVAL: Duration = Duration::from_secs(1);
/// How long a request waits for answers of Kafka in all. Longer than the change of a partition's leader usually takes.
const KAFKA_TIMEOUT: Duration = Duration::from_secs(5);

/// For how long a request still waits for answers of Kafka. The time in which it reads the index does not count, however long that
/// takes. Questions that are asked at the same time count once.
#[derive(Debug)]
pub(super) struct KafkaWait(Mutex<Waiting>);

#[derive(Debug)]
struct Waiting {
    left: Duration,
    /// The number of questions without an answer.
    asked: usize,
    /// Since when there has always been one.
    since: Instant,
}

impl KafkaWait {
    /// For a request that has asked nothing.
    pub(super) fn new() -> Self {
        Self(Mutex::new(Waiting {
            left: KAFKA_TIMEOUT,
            asked: 0,
            since: Instant::now(),
        }))
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for an answer.
    async fn wait_for<T>(&self, answer: impl Future<Output = T>) -> Result<T, CheckError> {
        let question = Question::ask(self);
        let answer = tokio::time::timeout_at(question.deadline, answer).await;
        answer.map_err(|_| CheckError::Late)
    }

    fn is_over(&self) -> bool {
        self.waiting().left.is_zero()
    }
}

/// A question that has no answer until this is dropped.
struct Question<'a> {
    wait: &'a KafkaWait,
    deadline: Instant,
}

impl<'a> Question<'a> {
    fn ask(wait: &'a KafkaWait) -> Self {
        let mut waiting = wait.waiting();
        if waiting.asked == 0 {
            waiting.since = Instant::now();
        }
        waiting.asked += 1;
        let deadline = waiting.since + waiting.left;
        drop(waiting);
        Self { wait, deadline }
    }
}

impl Drop for Question<'_> {
    fn drop(&mut self) {
        let mut waiting = self.wait.waiting();
        waiting.asked -= 1;
        if waiting.asked == 0 {
            waiting.left = waiting.left.saturating_sub(waiting.since.elapsed());
        }
    }
}

/// Why it is not known whether an index is complete.
#[derive(Debug, thiserror::Error)]
pub(super) enum CheckError {
    #[error("no answer from Kafka within {} s", KAFKA_TIMEOUT.as_secs())]
    Late,
    #[error(transparent)]
    Read(#[from] SharedError),
}

/// The end of a partition of the state topic.
pub(super) trait StatePartition {
    async fn end(&self) -> Result<i64, SharedError>;
    fn is_known_empty(&self, from: i64, to: i64) -> bool;
    async fn is_empty(&self, from: i64, to: i64) -> Result<bool, SharedError>;
}

pub(super) struct PartitionEnd<'a> {
    pub(super) ends: &'a StateEnd,
    pub(super) partition: i32,
}

impl StatePartition for PartitionEnd<'_> {
    async fn end(&self) -> Result<i64, SharedError> {
        self.ends.of(self.partition).await
    }

    fn is_known_empty(&self, from: i64, to: i64) -> bool {
        self.ends.is_known_empty(self.partition, from, to)
    }

    async fn is_empty(&self, from: i64, to: i64) -> Result<bool, SharedError> {
        self.ends.is_empty(self.partition, from, to).await
    }
}

/// Whether the index contains everything that the state topic contained when it was first asked.
pub(super) struct Completeness<'a> {
    wait: &'a KafkaWait,
    /// The end of the state topic at that time.
    end: Option<i64>,
    /// Up to where the index was complete at the last lookup.
    applied: Option<i64>,
}

impl<'a> Completeness<'a> {
    /// For a request that waits for Kafka no longer than this.
    pub(super) fn within(wait: &'a KafkaWait) -> Self {
        Self {
            wait,
            end: None,
            applied: None,
        }
    }

    /// Whether the request may not ask Kafka any more.
    pub(super) fn is_over(&self) -> bool {
        self.wait.is_over()
    }

    pub(super) async fn check(
        &mut self,
        state: &impl StatePartition,
        applied: i64,
    ) -> Result<bool, CheckError> {
        let wait = self.wait;
        Ok(wait.wait_for(self.ask(state, applied)).await??)
    }

    async fn ask(&mut self, state: &impl StatePartition, applied: i64) -> Result<bool, SharedError> {
        let end = match self.end {
            Some(end) => end,
            None => {
                let end = state.end().await?;
                // The topic has lost records, or was created again. What it has now need not be in the index.
                if end < applied {
                    return Ok(false);
                }
                *self.end.insert(end)
            }
        };
        if state.is_known_empty(applied, end) {
            return Ok(true);
        }
        // The index usually follows within milliseconds. If it stays behind, there may be nothing to apply: transaction
        // markers move the end, too.
        let stays = self.applied.replace(applied) == Some(applied);
        Ok(stays && state.is_empty(applied, end).await?)
    }
}

/// Reads a shard of the index, repeatedly until it is complete. A shard without an index, or with one that stays behind, is an error:
/// what it lacks would be missing in the answer without a notice. So is one of which Kafka does not tell the end as long as the
/// request waits for that.
pub(super) async fn read_complete<T, F>(
    state: &impl StatePartition,
    wait: &KafkaWait,
    read: impl Fn() -> F,
) -> Result<T, RequestError>
where
    F: Future<Output = Result<(Option<Applied>, T), RequestError>>,
{
    let (mut started, mut interval) = (None, INTERVAL);
    let mut completeness = Completeness::within(wait);
    loop {
        let (applied, found) = read().await?;
        // The end is asked for after the first read, so the index is usually complete only at the second one. A read of a large index
        // may take longer than the time-out.
        let started = *started.get_or_insert_with(Instant::now);
        if let Some(applied) = applied {
            match completeness.check(state, applied.offset).await {
                Ok(true) => return Ok(found),
                Ok(false) => {}
                Err(error) => tracing::warn!(
                    reason = error_chain(&error),
                    "cannot read the end of the state topic"
                ),
            }
        }
        if started.elapsed() >= TIMEOUT || wait.is_over() {
            return Err(RequestError::IndexIncomplete);
        }
        tokio::time::sleep(interval).await;
        interval = (interval * 2).min(LONGEST_INTERVAL);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::cell::Cell;
    use std::future::ready;

    use redeliver_core::Timestamp;

    use super::*;

    /// A state topic with this end. There are no records from `empty_from` on.
    pub(in crate::api) struct Topic {
        pub(in crate::api) end: i64,
        pub(in crate::api) empty_from: i64,
    }

    impl StatePartition for Topic {
        async fn end(&self) -> Result<i64, SharedError> {
            Ok(self.end)
        }

        fn is_known_empty(&self, from: i64, to: i64) -> bool {
            from >= to
        }

        async fn is_empty(&self, from: i64, to: i64) -> Result<bool, SharedError> {
            Ok(self.is_known_empty(from, to) || from >= self.empty_from)
        }
    }

    /// Reads an index that is complete up to these offsets, one after the other; the last one repeats. Returns the number of reads,
    /// and the offset of the answer.
    async fn read(topic: &Topic, offsets: &[Option<i64>]) -> (usize, Result<Option<i64>, RequestError>) {
        let reads = Cell::new(0);
        let found = read_complete(topic, &KafkaWait::new(), || {
            let offset = offsets[reads.get().min(offsets.len() - 1)];
            reads.set(reads.get() + 1);
            let at = Timestamp::from_millis(0);
            ready(Ok((offset.map(|offset| Applied { offset, at }), offset)))
        })
        .await;
        (reads.get(), found)
    }

    #[tokio::test(start_paused = true)]
    async fn only_complete_indexes_answer() {
        let topic = Topic {
            end: 9,
            empty_from: 8,
        };
        for (offsets, reads, answer) in [
            (&[Some(9)][..], 1, Some(9)),
            // Without an index for more than 3 s, as while the shard moves to another scheduler.
            (
                &[None, None, None, None, None, None, None, None, None, Some(9)],
                10,
                Some(9),
            ),
            (&[Some(3), Some(5), Some(10)], 3, Some(10)),
            // Only a transaction marker follows.
            (&[Some(8)], 2, Some(8)),
        ] {
            let (found, result) = read(&topic, offsets).await;
            assert_eq!((found, result.unwrap()), (reads, answer), "{offsets:?}");
        }
        // In the last case, the topic has lost records, or is another one.
        for offsets in [&[None][..], &[Some(7)], &[Some(3), None], &[Some(12)]] {
            let (reads, result) = read(&topic, offsets).await;
            assert!(matches!(result, Err(RequestError::IndexIncomplete)), "{result:?}");
            assert!(reads > 2);
        }
    }

    /// A state topic whose broker answers each question after 3 seconds.
    struct Slow;

    impl Slow {
        async fn answer<T>(answer: T) -> Result<T, SharedError> {
            tokio::time::sleep(Duration::from_secs(3)).await;
            Ok(answer)
        }
    }

    impl StatePartition for Slow {
        async fn end(&self) -> Result<i64, SharedError> {
            Self::answer(9).await
        }

        fn is_known_empty(&self, _: i64, _: i64) -> bool {
            false
        }

        async fn is_empty(&self, _: i64, _: i64) -> Result<bool, SharedError> {
            Self::answer(true).await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn waits_for_kafka_are_limited_together() {
        let read = async |wait: &KafkaWait| {
            let began = Instant::now();
            let found = read_complete(&Slow, wait, || {
                let at = Timestamp::from_millis(0);
                ready(Ok((Some(Applied { offset: 8, at }), ())))
            });
            assert!(matches!(found.await, Err(RequestError::IndexIncomplete)));
            began.elapsed()
        };
        let own = KafkaWait::new();
        let alone = read(&own).await;
        assert_eq!(alone, KAFKA_TIMEOUT + INTERVAL);
        // Questions that are asked at the same time count once.
        let wait = KafkaWait::new();
        assert_eq!(tokio::join!(read(&wait), read(&wait)), (alone, alone));
        assert!(wait.is_over());
        assert_eq!(read(&wait).await, Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn reading_time_does_not_count() {
        let wait = KafkaWait::new();
        let topic = Topic {
            end: 9,
            empty_from: 9,
        };
        let began = Instant::now();
        for _shard in 0..3 {
            let reads = Cell::new(0);
            let found = read_complete(&topic, &wait, || async {
                tokio::time::sleep(KAFKA_TIMEOUT).await;
                reads.set(reads.get() + 1);
                let at = Timestamp::from_millis(0);
                // Records that were written during the first read are missing in it.
                let offset = if reads.get() == 1 { 7 } else { 9 };
                Ok((Some(Applied { offset, at }), offset))
            });
            assert_eq!(found.await.unwrap(), 9);
        }
        assert!(began.elapsed() >= 6 * KAFKA_TIMEOUT);
        assert!(!wait.is_over());
    }
}
