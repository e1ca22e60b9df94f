//! Whether a shard's index contains everything that the state topic contained at the time of a request. Only then is it certain that
//! a job does not exist, and only then is a list or a count complete.

use std::time::Duration;

use redeliver_runtime::error_chain::error_chain;
use tokio::time::Instant;

use super::error::RequestError;
use super::state_end::{SharedError, StateEnd};
use crate::index::Applied;

/// How long an index is read repeatedly until it is complete, and after which time for the first time.
pub(super) const TIMEOUT: Duration = Duration::from_secs(1);
pub(super) const INTERVAL: Duration = Duration::from_millis(25);
/// How long a request waits for answers of Kafka in all. Longer than the change of a partition's leader usually takes.
const KAFKA_TIMEOUT: Duration = Duration::from_secs(5);

/// Until when a request that begins now waits for answers of Kafka.
pub(super) fn deadline() -> Instant {
    Instant::now() + KAFKA_TIMEOUT
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
pub(super) struct Completeness {
    deadline: Instant,
    /// The end of the state topic at that time.
    end: Option<i64>,
    /// Up to where the index was complete at the last lookup.
    applied: Option<i64>,
}

impl Completeness {
    /// For a request with this [`deadline`].
    pub(super) fn until(deadline: Instant) -> Self {
        Self {
            deadline,
            end: None,
            applied: None,
        }
    }

    pub(super) async fn check(
        &mut self,
        state: &impl StatePartition,
        applied: i64,
    ) -> Result<bool, CheckError> {
        let deadline = self.deadline;
        match tokio::time::timeout_at(deadline, self.ask(state, applied)).await {
            Ok(answer) => Ok(answer?),
            Err(_) => Err(CheckError::Late),
        }
    }

    async fn ask(&mut self, state: &impl StatePartition, applied: i64) -> Result<bool, SharedError> {
        let end = match self.end {
            Some(end) => end,
            None => *self.end.insert(state.end().await?),
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
/// what it lacks would be missing in the answer without a notice. So is one of which Kafka does not tell the end before the
/// [`deadline`] of the request.
pub(super) async fn read_complete<T, F>(
    state: &impl StatePartition,
    deadline: Instant,
    read: impl Fn() -> F,
) -> Result<T, RequestError>
where
    F: Future<Output = Result<(Option<Applied>, T), RequestError>>,
{
    let (started, mut interval) = (Instant::now(), INTERVAL);
    let mut completeness = Completeness::until(deadline);
    loop {
        let (applied, found) = read().await?;
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
        if started.elapsed() >= TIMEOUT || Instant::now() >= deadline {
            return Err(RequestError::IndexIncomplete);
        }
        tokio::time::sleep(interval).await;
        // A list of an index that is rebuilt can be as large as a page, unlike the lookup of a job.
        interval *= 2;
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
        let found = read_complete(topic, deadline(), || {
            let offset = offsets[reads.get().min(offsets.len() - 1)];
            reads.set(reads.get() + 1);
            let at = Timestamp::from_millis(0);
            ready(Ok((offset.map(|offset| Applied { offset, at }), offset)))
        })
        .await;
        (reads.get(), found)
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_given_only_from_an_index_that_is_complete() {
        let topic = Topic {
            end: 9,
            empty_from: 8,
        };
        for (offsets, reads, answer) in [
            (&[Some(9)][..], 1, Some(9)),
            (&[Some(12)], 1, Some(12)),
            // Without an index at first, as while the shard moves to another scheduler.
            (&[None, None, Some(9)], 3, Some(9)),
            (&[Some(3), Some(5), Some(10)], 3, Some(10)),
            // Only a transaction marker follows.
            (&[Some(8)], 2, Some(8)),
        ] {
            let (found, result) = read(&topic, offsets).await;
            assert_eq!((found, result.unwrap()), (reads, answer), "{offsets:?}");
        }
        for offsets in [&[None][..], &[Some(7)], &[Some(3), None]] {
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
    async fn a_request_waits_for_all_answers_of_kafka_until_one_deadline() {
        let began = Instant::now();
        let deadline = deadline();
        for _shard in 0..3 {
            let found = read_complete(&Slow, deadline, || {
                let at = Timestamp::from_millis(0);
                ready(Ok((Some(Applied { offset: 8, at }), ())))
            });
            assert!(matches!(found.await, Err(RequestError::IndexIncomplete)));
        }
        assert_eq!(began.elapsed(), KAFKA_TIMEOUT);
    }
}
