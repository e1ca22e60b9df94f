//! What the executor does next with a job: take items, wait, or auto-pause it. No IO.
//!
//! A redrive begins with a few records. After each batch, and at the end, the executor waits for a while, and until none of them waits for an attempt, and counts
//! how many have come back. Items that are skipped or fail end no batch, because nothing can come back from them.

use std::ops::Range;
use std::time::Duration;

use redeliver_core::Timestamp;
use redeliver_core::redrive::BATCHES;
use redeliver_proto::convert::time;

use super::job::{self, CHUNK, Job, Progress, RedriveState};
use super::record::MAX_OBSERVE;

/// With fewer redriven records, a share says nothing.
const MIN_DONE: u32 = 10;

/// The time before the next attempt after a problem, which doubles with each further one.
const FIRST_RETRY: Duration = Duration::from_secs(2);
/// The longest one.
const LAST_RETRY: Duration = Duration::from_secs(30);
/// After so many problems, the time is the longest one.
const MAX_DOUBLINGS: u32 = 4;
/// The number of chunks in which a step ends at the latest: the time that a transaction needs however little it writes is spent on many items. The records of a
/// step have a limit of their own.
const STEP_CHUNKS: u32 = 8;
/// A step has at most 2^12 items.
const MAX_HALVINGS: u32 = 12;

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Try items.
    Take(Take),
    /// A batch has ended, or everything was tried: count what has come back, then decide again.
    Observe,
    /// Nothing before this time.
    Wait(Timestamp),
    /// Nothing, until the job is changed.
    Nothing,
}

/// The items of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Take {
    /// Their numbers.
    pub items: Range<u32>,
    /// The step ends with the item that is the last one of so many that are done.
    pub max_done: u32,
}

/// What the executor remembers of a job besides its progress. A new executor begins without it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// The rate, or an observation, permits nothing before this time.
    pub not_before: Option<Timestamp>,
    /// How many attempts in a row did nothing because of a problem, and when the next one is.
    pub failures: u32,
    /// See `failures`.
    pub retry_at: Option<Timestamp>,
    /// How often the size of a step is halved: a step that could not be read or written in time is tried again with less.
    pub halvings: u32,
}

impl Memory {
    /// An attempt did nothing because of a problem.
    pub fn failed(&mut self, now: Timestamp) {
        let delay = FIRST_RETRY * 2_u32.saturating_pow(self.failures);
        self.retry_at = Some(now.after(delay.min(LAST_RETRY)));
        self.failures = self.failures.saturating_add(1).min(MAX_DOUBLINGS);
        self.halvings = self.halvings.saturating_add(1).min(MAX_HALVINGS);
    }

    /// An attempt did something.
    pub fn succeeded(&mut self) {
        self.failures = 0;
        self.retry_at = None;
        self.halvings = self.halvings.saturating_sub(1);
    }
}

/// What to do next with a job.
#[must_use]
pub fn next(job: &Job, progress: &Progress, memory: Memory, now: Timestamp) -> Next {
    if job::state(job, progress) != RedriveState::Running {
        return Next::Nothing;
    }
    let begins = [
        memory.not_before,
        memory.retry_at,
        waits_until(job, progress, now),
    ];
    if let Some(begin) = begins.into_iter().flatten().max().filter(|begin| *begin > now) {
        return Next::Wait(begin);
    }
    if is_observed_now(job, progress) {
        return Next::Observe;
    }
    let total = job.spec().total;
    let batch = batch_end(job, progress);
    // Of most items of a batch, the record is not needed if others are not skipped.
    let chunks = batch.map_or(STEP_CHUNKS, |_| 1);
    let mut to = total.min((progress.next / CHUNK + chunks) * CHUNK);
    if job.spec().rate_per_second > 0 {
        // At least ten steps per second, so that a pause takes effect soon.
        let most = (job.spec().rate_per_second / 10).max(1);
        to = to.min(progress.next.saturating_add(most));
    }
    let size = to.saturating_sub(progress.next) >> memory.halvings;
    Next::Take(Take {
        items: progress.next..progress.next.saturating_add(size.max(1)).min(to),
        max_done: batch.map_or(u32::MAX, |end| end - batched(progress)),
    })
}

/// What counts for the batches.
fn batched(progress: &Progress) -> u32 {
    progress.done
}

/// The end of the batch that a job has begun; `None` if it takes the rest.
fn batch_end(job: &Job, progress: &Progress) -> Option<u32> {
    let mut ends = BATCHES.into_iter().filter(|_| job.has_batches());
    ends.find(|end| *end > batched(progress))
}

/// Whether nothing more is tried before it was counted what has come back.
fn is_observed_now(job: &Job, progress: &Progress) -> bool {
    let is_batch = job.has_batches() && BATCHES.contains(&batched(progress));
    job::awaits_returns(job, progress) && (is_batch || progress.next >= job.spec().total)
}

/// Until when a running job waits, because its start is delayed or its records are observed.
#[must_use]
pub fn waits_until(job: &Job, progress: &Progress, now: Timestamp) -> Option<Timestamp> {
    // This includes items that it took while it was postponed.
    if let Some(start) = job.start_at().filter(|start| *start > now) {
        return Some(start);
    }
    if !is_observed_now(job, progress) {
        return None;
    }
    observed_at(job, progress).filter(|end| *end > now)
}

/// When it is known which of the records that were written last have come back; `None` if nothing was written.
#[must_use]
pub fn observed_at(job: &Job, progress: &Progress) -> Option<Timestamp> {
    Some(time(progress.sent_at)?.after(job.observe()))
}

/// When a job does not wait any longer for records that still wait for an attempt.
#[must_use]
pub fn gives_up_at(job: &Job, progress: &Progress) -> Option<Timestamp> {
    Some(observed_at(job, progress)?.after(MAX_OBSERVE))
}

/// The time before which a job takes nothing more after this many items, because of its rate.
#[must_use]
pub fn not_before(job: &Job, taken: u32, now: Timestamp) -> Option<Timestamp> {
    let rate = u64::from(job.spec().rate_per_second);
    let pause = (u64::from(taken) * 1_000).checked_div(rate)?;
    Some(now.after(Duration::from_millis(pause)))
}

/// Why a job is auto-paused; `None` if it is not.
#[must_use]
pub fn auto_pause(job: &Job, progress: &Progress) -> Option<String> {
    let done = progress.done.saturating_sub(progress.auto_paused_done);
    let returned = progress.returned.saturating_sub(progress.auto_paused_returned);
    let bound = job.spec().max_returned_share;
    // Once everything was tried, there is nothing to pause.
    let is_over = job.has_auto_pause()
        && progress.next < job.spec().total
        && done >= MIN_DONE
        && f64::from(returned) > bound * f64::from(done);
    is_over
        .then(|| format!("{returned} of {done} redriven records have come back, more than {bound} of them"))
}

#[cfg(test)]
mod tests {
    use redeliver_proto::convert::{to_duration, to_timestamp};
    use redeliver_proto::v1;

    use super::super::job::tests::job;
    use super::*;

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    fn tried(next: u32, sent_at: i64) -> Progress {
        Progress {
            next,
            done: next,
            sent_at: Some(to_timestamp(at(sent_at))),
            ..Progress::default()
        }
    }

    fn take(items: Range<u32>, max_done: u32) -> Next {
        Next::Take(Take { items, max_done })
    }

    fn with(job: &Job, change: impl FnOnce(&mut v1::Redrive)) -> Job {
        let mut record = job.record.clone();
        change(record.redrive.as_mut().unwrap());
        Job::read(record).unwrap()
    }

    fn observing(total: u32) -> Job {
        let observe = redeliver_core::HumanDuration::from_secs(30);
        with(&job(total, RedriveState::Running), |spec| {
            spec.observe = Some(to_duration(observe));
        })
    }

    #[test]
    fn batches_grow_and_each_is_observed() {
        let job = observing(5_200);
        let next = |done, observed, now| {
            let progress = Progress {
                observed,
                ..tried(done, 1_000)
            };
            super::next(&job, &progress, Memory::default(), at(now))
        };
        let first = super::next(&job, &Progress::default(), Memory::default(), at(0));
        assert_eq!(first, take(0..500, 10));
        assert_eq!(next(4, 0, 1_000), take(4..500, 6));
        assert_eq!(next(10, 0, 1_000), Next::Wait(at(31_000)));
        assert_eq!(next(10, 0, 31_000), Next::Observe);
        assert_eq!(next(10, 10, 1_000), take(10..500, 100));
        assert_eq!(next(110, 10, 31_000), Next::Observe);
        assert_eq!(next(110, 110, 1_000), take(110..4_000, u32::MAX));
        // A step ends with a chunk.
        assert_eq!(next(700, 110, 1_000), take(700..4_500, u32::MAX));
        assert_eq!(next(4_000, 110, 1_000), take(4_000..5_200, u32::MAX));
        assert_eq!(next(5_200, 110, 1_000), Next::Wait(at(31_000)));
        assert_eq!(next(5_200, 110, 31_000), Next::Observe);
        assert_eq!(next(5_200, 5_200, 31_000), Next::Nothing);
        let at_once = with(&job, |spec| spec.all_at_once = true);
        let next = |progress: &Progress| super::next(&at_once, progress, Memory::default(), at(31_000));
        assert_eq!(next(&Progress::default()), take(0..4_000, u32::MAX));
        assert_eq!(next(&tried(110, 1_000)), take(110..4_000, u32::MAX));
        assert_eq!(next(&tried(5_200, 1_000)), Next::Observe);
    }

    #[test]
    fn without_auto_pause_only_end_is_observed() {
        let job = with(&observing(5_200), |spec| spec.max_returned_share = 1.0);
        let next = |progress: &Progress| super::next(&job, progress, Memory::default(), at(31_000));
        assert_eq!(next(&Progress::default()), take(0..4_000, u32::MAX));
        for done in [10, 110] {
            assert_eq!(next(&tried(done, 1_000)), take(done..4_000, u32::MAX));
        }
        assert_eq!(next(&tried(5_200, 1_000)), Next::Observe);
    }

    #[test]
    fn skipped_items_end_no_batch() {
        let job = observing(1_110);
        let next = |next, done, observed, now| {
            let progress = Progress {
                next,
                done,
                skipped: next - done,
                observed,
                sent_at: (done > 0).then(|| to_timestamp(at(1_000))),
                ..Progress::default()
            };
            super::next(&job, &progress, Memory::default(), at(now))
        };
        assert_eq!(next(110, 0, 0, 0), take(110..500, 10));
        assert_eq!(next(500, 0, 0, 0), take(500..1_000, 10));
        assert_eq!(next(510, 10, 0, 1_000), Next::Wait(at(31_000)));
        assert_eq!(next(510, 10, 0, 31_000), Next::Observe);
        assert_eq!(next(510, 10, 10, 31_000), take(510..1_000, 100));
        // Of the second batch, all were skipped up to here.
        assert_eq!(next(600, 10, 10, 31_000), take(600..1_000, 100));
        // Nothing can come back.
        assert_eq!(next(1_110, 0, 0, 0), Next::Nothing);
    }

    #[test]
    fn failing_steps_become_smaller() {
        let job = with(&job(1_000, RedriveState::Running), |spec| spec.all_at_once = true);
        let mut memory = Memory::default();
        let next = |memory: Memory| next(&job, &tried(100, 0), memory, at(1_000_000));
        assert_eq!(next(memory), take(100..1_000, u32::MAX));
        for size in [450, 225, 112, 56, 28, 14, 7, 3, 1, 1, 1, 1, 1] {
            memory.failed(at(0));
            assert_eq!(next(memory), take(100..100 + size, u32::MAX));
        }
        for size in [1, 1, 1, 3, 7] {
            memory.succeeded();
            assert_eq!(next(memory), take(100..100 + size, u32::MAX));
        }
    }

    #[test]
    fn start_time_and_rate_are_kept() {
        let running = job(1_000, RedriveState::Running);
        let delayed = with(&running, |spec| {
            spec.start_at = Some(to_timestamp(at(5_000)));
        });
        let first = |job: &Job, now| next(job, &Progress::default(), Memory::default(), at(now));
        assert_eq!(
            (first(&delayed, 4_999), first(&delayed, 5_000)),
            (Next::Wait(at(5_000)), take(0..500, 10))
        );
        // It was postponed in the moment in which it took its first items.
        let after_first = |now| next(&delayed, &tried(4, 1_000), Memory::default(), at(now));
        assert_eq!(
            (after_first(4_999), after_first(5_000)),
            (Next::Wait(at(5_000)), take(4..500, 6))
        );
        let slow = with(&running, |spec| {
            spec.rate_per_second = 20;
            spec.all_at_once = true;
        });
        assert_eq!(first(&slow, 0), take(0..2, u32::MAX));
        let not_before = not_before(&slow, 2, at(1_000));
        assert_eq!(not_before, Some(at(1_100)));
        let memory = Memory {
            not_before,
            ..Memory::default()
        };
        assert_eq!(
            next(&slow, &tried(2, 1_000), memory, at(1_099)),
            Next::Wait(at(1_100))
        );
        assert_eq!(
            next(&slow, &tried(2, 1_000), memory, at(1_100)),
            take(2..4, u32::MAX)
        );
        assert_eq!(super::not_before(&running, 2, at(1_000)), None);
        for wanted in [
            RedriveState::Planned,
            RedriveState::Paused,
            RedriveState::Cancelled,
        ] {
            assert_eq!(first(&job(5, wanted), 0), Next::Nothing, "{wanted:?}");
        }
    }

    #[test]
    fn failing_job_backs_off() {
        let running = job(500, RedriveState::Running);
        let next = |memory, now| next(&running, &Progress::default(), memory, at(now));
        let mut memory = Memory::default();
        for seconds in [2, 4, 8, 16, 30, 30] {
            memory.failed(at(1_000));
            assert_eq!(next(memory, 1_000), Next::Wait(at(1_000 + seconds * 1_000)));
        }
        assert_eq!(next(memory, 31_000), take(0..7, 10));
        memory.succeeded();
        assert_eq!(next(memory, 1_000), take(0..15, 10));
        memory.failed(at(1_000));
        assert_eq!(next(memory, 1_000), Next::Wait(at(3_000)));
    }

    #[test]
    fn auto_pause_counts_since_last_one() {
        let job = job(1_000, RedriveState::Running);
        let pauses = |done, returned, (auto_paused_done, auto_paused_returned)| {
            let progress = Progress {
                next: done,
                done,
                returned,
                auto_paused_done,
                auto_paused_returned,
                ..Progress::default()
            };
            auto_pause(&job, &progress).is_some()
        };
        assert!(!pauses(9, 9, (0, 0)) && !pauses(10, 2, (0, 0)) && pauses(10, 3, (0, 0)));
        assert!(!pauses(19, 12, (10, 3)) && !pauses(30, 7, (10, 3)) && pauses(30, 8, (10, 3)));
        let never = with(&job, |spec| spec.max_returned_share = 1.0);
        assert_eq!(
            super::auto_pause(
                &never,
                &Progress {
                    done: 10,
                    returned: 20,
                    ..Progress::default()
                }
            ),
            None
        );
    }
}
