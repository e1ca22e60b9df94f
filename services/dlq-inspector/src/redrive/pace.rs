//! What the executor does next with a job: take items, wait, or brake. No IO.
//!
//! A redrive begins with a few items. After each batch, the executor waits for a while and looks how many of them have come back.

use std::time::Duration;

use redeliver_core::Timestamp;
use redeliver_proto::v1;

use super::job::{self, CHUNK, Job, Kind, Progress};

/// The ends of the first batches.
const BATCHES: [u32; 2] = [10, 110];
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Try items up to this number, exclusively.
    Take(u32),
    /// A batch has ended: count what has come back, then decide again.
    Observe,
    /// Nothing before this time.
    Wait(Timestamp),
    /// Nothing, until somebody changes the job.
    Nothing,
}

/// What the executor remembers of a job besides its progress. A new executor begins without it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// What has come back was counted after this number of items were tried.
    pub observed: u32,
    /// The rate permits nothing before this time.
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
    if job::state(job, progress) != v1::RedriveState::Running {
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
    let total = job.spec().total;
    let has_batches = job.kind == Kind::Redrive && !job.spec().all_at_once;
    if has_batches && BATCHES.contains(&progress.next) && memory.observed != progress.next {
        return Next::Observe;
    }
    let mut to = total.min((progress.next / CHUNK + STEP_CHUNKS) * CHUNK);
    if has_batches && let Some(end) = BATCHES.into_iter().find(|end| *end > progress.next) {
        to = to.min(end);
    }
    if job.spec().rate_per_second > 0 {
        // At least ten steps per second, so that a pause takes effect soon.
        let most = (job.spec().rate_per_second / 10).max(1);
        to = to.min(progress.next.saturating_add(most));
    }
    let size = to.saturating_sub(progress.next) >> memory.halvings;
    Next::Take(progress.next.saturating_add(size.max(1)).min(to))
}

/// Until when a running job waits, because its start is delayed or a batch is observed.
#[must_use]
pub fn waits_until(job: &Job, progress: &Progress, now: Timestamp) -> Option<Timestamp> {
    // Also if it took its first items while it was postponed.
    if let Some(start) = job.start_at().filter(|start| *start > now) {
        return Some(start);
    }
    let has_batches = job.kind == Kind::Redrive && !job.spec().all_at_once;
    if !has_batches || !BATCHES.contains(&progress.next) {
        return None;
    }
    let end = progress.time?.after(job.observe());
    (end > now).then_some(end)
}

/// The time before which a job takes nothing more after this many items, because of its rate.
#[must_use]
pub fn not_before(job: &Job, taken: u32, now: Timestamp) -> Option<Timestamp> {
    let rate = u64::from(job.spec().rate_per_second);
    let pause = (u64::from(taken) * 1_000).checked_div(rate)?;
    Some(now.after(Duration::from_millis(pause)))
}

/// Why the brake pauses a job; `None` if it does not.
#[must_use]
pub fn brake(job: &Job, progress: &Progress) -> Option<String> {
    let (done_before, returned_before) = progress.braked_at;
    let done = progress.done.saturating_sub(done_before);
    let returned = progress.returned.saturating_sub(returned_before);
    let bound = job.spec().max_returned_share;
    let is_over = job.kind == Kind::Redrive
        && done >= MIN_DONE
        && f64::from(returned) > bound * f64::from(done)
        && bound < 1.0;
    is_over
        .then(|| format!("{returned} of {done} redriven records have come back, more than {bound} of them"))
}

#[cfg(test)]
mod tests {
    use super::super::job::Wanted;
    use super::super::job::tests::job;
    use super::*;

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    fn tried(next: u32, time: i64) -> Progress {
        Progress {
            next,
            done: next,
            time: Some(at(time)),
            ..Progress::default()
        }
    }

    fn with(job: &Job, change: impl FnOnce(&mut v1::Redrive)) -> Job {
        let mut record = job.record.clone();
        change(record.redrive.as_mut().unwrap());
        Job::read(record).unwrap()
    }

    #[test]
    fn batches_grow_and_each_is_observed() {
        let observe = redeliver_core::HumanDuration::from_secs(30);
        let job = with(&job(5_200, Wanted::Running), |spec| {
            spec.observe = Some(redeliver_proto::convert::to_duration(observe));
        });
        let next = |next_item, observed, now| {
            let memory = Memory {
                observed,
                ..Memory::default()
            };
            super::next(&job, &tried(next_item, 1_000), memory, at(now))
        };
        assert_eq!(
            super::next(&job, &Progress::default(), Memory::default(), at(0)),
            Next::Take(10)
        );
        assert_eq!(next(4, 0, 1_000), Next::Take(10));
        assert_eq!(next(10, 0, 1_000), Next::Wait(at(31_000)));
        assert_eq!(next(10, 0, 31_000), Next::Observe);
        assert_eq!(next(10, 10, 31_000), Next::Take(110));
        assert_eq!(next(110, 10, 31_000), Next::Observe);
        assert_eq!(next(110, 110, 31_000), Next::Take(4_000));
        // A step ends with a chunk.
        assert_eq!(next(700, 110, 31_000), Next::Take(4_500));
        assert_eq!(next(4_000, 110, 31_000), Next::Take(5_200));
        assert_eq!(next(5_200, 110, 31_000), Next::Nothing);
        let at_once = with(&job, |spec| spec.all_at_once = true);
        assert_eq!(
            super::next(&at_once, &Progress::default(), Memory::default(), at(0)),
            Next::Take(4_000)
        );
    }

    #[test]
    fn steps_that_fail_become_smaller_until_one_succeeds() {
        let job = with(&job(1_000, Wanted::Running), |spec| spec.all_at_once = true);
        let mut memory = Memory::default();
        let take = |memory: Memory| next(&job, &tried(100, 0), memory, at(1_000_000));
        assert_eq!(take(memory), Next::Take(1_000));
        for size in [450, 225, 112, 56, 28, 14, 7, 3, 1, 1, 1, 1, 1] {
            memory.failed(at(0));
            assert_eq!(take(memory), Next::Take(100 + size));
        }
        for size in [1, 1, 1, 3, 7] {
            memory.succeeded();
            assert_eq!(take(memory), Next::Take(100 + size));
        }
    }

    #[test]
    fn nothing_is_taken_before_the_start_or_faster_than_the_rate() {
        let running = job(1_000, Wanted::Running);
        let delayed = with(&running, |spec| {
            spec.start_at = Some(redeliver_proto::convert::to_timestamp(at(5_000)));
        });
        let first = |job: &Job, now| next(job, &Progress::default(), Memory::default(), at(now));
        assert_eq!(
            (first(&delayed, 4_999), first(&delayed, 5_000)),
            (Next::Wait(at(5_000)), Next::Take(10))
        );
        // It was postponed in the moment in which it took its first items.
        let after_first = |now| next(&delayed, &tried(4, 1_000), Memory::default(), at(now));
        assert_eq!(
            (after_first(4_999), after_first(5_000)),
            (Next::Wait(at(5_000)), Next::Take(10))
        );
        let slow = with(&running, |spec| {
            spec.rate_per_second = 20;
            spec.all_at_once = true;
        });
        assert_eq!(first(&slow, 0), Next::Take(2));
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
        assert_eq!(next(&slow, &tried(2, 1_000), memory, at(1_100)), Next::Take(4));
        assert_eq!(super::not_before(&running, 2, at(1_000)), None);
        for wanted in [Wanted::Planned, Wanted::Paused, Wanted::Cancelled] {
            assert_eq!(first(&job(5, wanted), 0), Next::Nothing, "{wanted:?}");
        }
    }

    #[test]
    fn after_a_problem_a_job_waits_longer_each_time_until_it_succeeds() {
        let running = job(500, Wanted::Running);
        let next = |memory, now| next(&running, &Progress::default(), memory, at(now));
        let mut memory = Memory::default();
        for seconds in [2, 4, 8, 16, 30, 30] {
            memory.failed(at(1_000));
            assert_eq!(next(memory, 1_000), Next::Wait(at(1_000 + seconds * 1_000)));
        }
        assert_eq!(next(memory, 31_000), Next::Take(1));
        memory.succeeded();
        assert_eq!(next(memory, 1_000), Next::Take(1));
        memory.failed(at(1_000));
        assert_eq!(next(memory, 1_000), Next::Wait(at(3_000)));
    }

    #[test]
    fn the_brake_counts_from_where_it_acted_last() {
        let job = job(1_000, Wanted::Running);
        let brake = |done, returned, braked_at| {
            let progress = Progress {
                next: done,
                done,
                returned,
                braked_at,
                ..Progress::default()
            };
            brake(&job, &progress).is_some()
        };
        assert!(!brake(9, 9, (0, 0)) && !brake(10, 2, (0, 0)) && brake(10, 3, (0, 0)));
        assert!(!brake(19, 12, (10, 3)) && !brake(30, 7, (10, 3)) && brake(30, 8, (10, 3)));
        let never = with(&job, |spec| spec.max_returned_share = 1.0);
        assert_eq!(
            super::brake(
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
