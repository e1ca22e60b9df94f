//! The window of a shard: the jobs that are due soon, in memory, in the order in which they are dispatched.
//!
//! Until a job is due, it is ordered by due time. Once it is due, it is in the queue of its application. There, a lower
//! priority counts like a later due time, so no job is overtaken for longer than that. Applications take turns, so that a
//! burst of one does not delay the others.
//!
//! A job that is cancelled or rescheduled after it was due leaves its old entry in a queue. The revision identifies such
//! an entry when it is popped. A job that is not due any more when it is popped, because the clock was set back, is ordered
//! by due time again.
//!
//! Looked-up jobs and jobs from commands are counted separately, so that each kind can have room of its own. In shared
//! room, a large burst that was scheduled earlier would keep new jobs out until it is over, and many new jobs would keep
//! out those that were scheduled before them.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::Timestamp;
use redeliver_service::due::Waiting;

use crate::index::Cursor;
use crate::job::{Job, JobId, Priority};

/// How long jobs of high priority may overtake a due job of this priority.
fn priority_delay(priority: Priority) -> Duration {
    match priority {
        Priority::High => Duration::ZERO,
        Priority::Normal => Duration::from_secs(1),
        Priority::Low => Duration::from_secs(10),
    }
}

/// The due time including the delay of the priority, the id and the revision of a due job.
type QueuedJob = Reverse<(Timestamp, JobId, u32)>;

/// How a job came into the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// From the index.
    LookedUp,
    /// From a command that scheduled or rescheduled it when it was due soon.
    Commanded,
    /// Parked before.
    Unparked,
}

impl Source {
    const ALL: [Self; 3] = [Self::LookedUp, Self::Commanded, Self::Unparked];
}

/// The number and the size in bytes of the jobs of one source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) jobs: usize,
    pub(crate) bytes: usize,
}

/// The jobs of one source.
#[derive(Debug, Default)]
struct SourceJobs {
    load: Load,
    /// Jobs that are not queued as due.
    upcoming: BTreeSet<Cursor>,
}

/// The window of a shard.
#[derive(Debug, Default)]
pub(crate) struct Window {
    jobs: HashMap<JobId, (Arc<Job>, Source)>,
    looked_up: SourceJobs,
    commanded: SourceJobs,
    unparked: SourceJobs,
    /// The queues of due jobs by application. No queue is empty.
    due: HashMap<Arc<str>, BinaryHeap<QueuedJob>>,
    /// The applications in `due`, each once, in the order of their turns.
    rotation: VecDeque<Arc<str>>,
}

impl Window {
    /// Inserts a job, and replaces an older revision of it.
    pub(crate) fn insert(&mut self, job: Arc<Job>, source: Source) {
        self.remove(job.id);
        let jobs_of = self.jobs_of_mut(source);
        jobs_of.load.jobs += 1;
        jobs_of.load.bytes += job.size();
        jobs_of.upcoming.insert(Cursor::of(&job));
        self.jobs.insert(job.id, (job, source));
    }

    pub(crate) fn get(&self, id: JobId) -> Option<&Arc<Job>> {
        self.jobs.get(&id).map(|(job, _)| job)
    }

    pub(crate) fn remove(&mut self, id: JobId) -> Option<Arc<Job>> {
        let (job, source) = self.jobs.remove(&id)?;
        let jobs_of = self.jobs_of_mut(source);
        jobs_of.load.jobs -= 1;
        jobs_of.load.bytes -= job.size();
        jobs_of.upcoming.remove(&Cursor::of(&job));
        Some(job)
    }

    /// The latest job of a source that is not queued as due.
    pub(crate) fn latest(&self, source: Source) -> Option<Cursor> {
        self.jobs_of(source).upcoming.last().copied()
    }

    /// Removes looked-up jobs after a cursor.
    pub(crate) fn evict_looked_up_after(&mut self, cursor: Option<Cursor>) {
        while let Some(latest) = self
            .latest(Source::LookedUp)
            .filter(|latest| Some(*latest) > cursor)
        {
            self.remove(latest.id);
        }
    }

    fn jobs_of(&self, source: Source) -> &SourceJobs {
        match source {
            Source::LookedUp => &self.looked_up,
            Source::Commanded => &self.commanded,
            Source::Unparked => &self.unparked,
        }
    }

    fn jobs_of_mut(&mut self, source: Source) -> &mut SourceJobs {
        match source {
            Source::LookedUp => &mut self.looked_up,
            Source::Commanded => &mut self.commanded,
            Source::Unparked => &mut self.unparked,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.jobs.len()
    }

    pub(crate) fn load(&self, source: Source) -> Load {
        self.jobs_of(source).load
    }

    /// Whether due jobs were left at the last [`Window::pop_due`].
    pub(crate) fn has_backlog(&self) -> bool {
        !self.rotation.is_empty()
    }

    /// When the next job is due; in the past if due jobs are queued.
    pub(crate) fn next_due(&self) -> Option<Timestamp> {
        if !self.rotation.is_empty() {
            return Some(Timestamp::from_millis(0));
        }
        let sources = Source::ALL.into_iter().map(|source| self.jobs_of(source));
        let first = sources.filter_map(|jobs_of| jobs_of.upcoming.first()).min();
        first.map(|cursor| cursor.due)
    }

    /// What waits. Of the due jobs of an application, the one that is dispatched next counts as the earliest, although one of
    /// lower priority may have been due for up to 10 s longer.
    pub(crate) fn waiting(&self, now: Timestamp) -> Waiting {
        let queues = self.due.values();
        let heads = queues.clone().filter_map(|queue| {
            let Reverse((_, id, revision)) = queue.peek()?;
            let job = self.get(*id).filter(|job| job.revision == *revision);
            job.map(|job| job.due)
        });
        let sources = Source::ALL.map(|source| &self.jobs_of(source).upcoming);
        let upcoming = sources
            .iter()
            .filter_map(|jobs| jobs.first().map(|cursor| cursor.due));
        let is_due = |cursor: &&Cursor| cursor.due <= now;
        let due_now = sources.iter().map(|jobs| jobs.iter().take_while(is_due).count());
        Waiting {
            earliest: heads.chain(upcoming).min(),
            due: queues.map(BinaryHeap::len).sum::<usize>() + due_now.sum::<usize>(),
        }
    }

    fn is_current(&self, id: JobId, revision: u32) -> bool {
        self.get(id).is_some_and(|job| job.revision == revision)
    }

    /// Removes and returns the next due job.
    pub(crate) fn pop_due(&mut self, now: Timestamp) -> Option<Arc<Job>> {
        self.queue_due(now);
        while let Some(app) = self.rotation.pop_front() {
            let Some(queue) = self.due.get_mut(&app) else {
                continue;
            };
            let entry = queue.pop();
            if queue.is_empty() {
                self.due.remove(&app);
            } else {
                self.rotation.push_back(app);
            }
            let Some(Reverse((_, id, revision))) = entry else {
                continue;
            };
            if !self.is_current(id, revision) {
                continue;
            }
            // The job was queued by a later time: the clock has been set back.
            if self.get(id).is_some_and(|job| job.due > now) {
                self.wait_again(id);
                continue;
            }
            return self.remove(id);
        }
        None
    }

    /// Orders a job that was queued as due by its due time again.
    fn wait_again(&mut self, id: JobId) {
        if let Some((job, source)) = self.jobs.get(&id) {
            let (cursor, source) = (Cursor::of(job), *source);
            self.jobs_of_mut(source).upcoming.insert(cursor);
        }
    }

    /// Moves jobs that are due by now to the queues of their applications.
    fn queue_due(&mut self, now: Timestamp) {
        for source in Source::ALL {
            while let Some(cursor) = self.jobs_of(source).upcoming.first().copied() {
                if cursor.due > now {
                    break;
                }
                self.jobs_of_mut(source).upcoming.pop_first();
                let Some((job, _)) = self.jobs.get(&cursor.id) else {
                    continue;
                };
                let entry = Reverse((
                    cursor.due.after(priority_delay(job.priority)),
                    job.id,
                    job.revision,
                ));
                match self.due.get_mut(&job.app) {
                    Some(queue) => queue.push(entry),
                    None => {
                        self.rotation.push_back(job.app.clone());
                        self.due.entry(job.app.clone()).or_default().push(entry);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::job::{JobState, Kind, Payload};

    fn job(number: i64, app: &str, due: i64, priority: Priority) -> Arc<Job> {
        Arc::new(Job {
            id: JobId::new(Timestamp::from_millis(0), 0, number),
            app: app.into(),
            kind: Kind::App,
            state: JobState::Scheduled,
            priority,
            due: Timestamp::from_millis(due),
            accepted: Timestamp::from_millis(0),
            revision: 1,
            idempotency_key: None,
            request_hash: [0; 16],
            request_id: None,
            topic: "t".into(),
            payload: Payload::default(),
            ended: None,
            expires: None,
        })
    }

    fn pop_all(window: &mut Window, now: i64) -> Vec<u64> {
        std::iter::from_fn(|| window.pop_due(Timestamp::from_millis(now)))
            .map(|job| job.id.offset())
            .collect()
    }

    #[test]
    fn high_priority_is_dispatched_first_and_low_priority_is_not_starved() {
        let mut window = Window::default();
        window.insert(job(1, "a", 0, Priority::Low), Source::Commanded);
        window.insert(job(2, "a", 50, Priority::Normal), Source::Commanded);
        window.insert(job(3, "a", 100, Priority::High), Source::Commanded);
        assert_eq!(pop_all(&mut window, 100), [3, 2, 1]);
        window.insert(job(1, "a", 0, Priority::Low), Source::Commanded);
        window.insert(job(2, "a", 10_001, Priority::High), Source::Commanded);
        assert_eq!(pop_all(&mut window, 10_001), [1, 2]);
        assert_eq!(
            (window.len(), window.load(Source::Commanded)),
            (0, Load::default())
        );
    }

    #[test]
    fn jobs_that_are_due_are_counted_whether_they_are_queued_or_not() {
        let mut window = Window::default();
        for (number, app, due) in [(1, "a", 100), (2, "a", 200), (3, "b", 300), (4, "b", 900)] {
            window.insert(job(number, app, due, Priority::Normal), Source::Commanded);
        }
        let at = Timestamp::from_millis;
        let waiting = |earliest, due| Waiting {
            earliest: Some(at(earliest)),
            due,
        };
        assert_eq!(window.waiting(at(99)), waiting(100, 0));
        assert_eq!(window.waiting(at(500)), waiting(100, 3));
        assert_eq!(window.pop_due(at(500)).map(|job| job.id.offset()), Some(1));
        assert_eq!(window.waiting(at(500)), waiting(200, 2));
        pop_all(&mut window, 500);
        assert_eq!(window.waiting(at(500)), waiting(900, 0));
        pop_all(&mut window, 900);
        assert_eq!(window.waiting(at(900)), Waiting::default());
    }

    #[test]
    fn a_burst_of_one_application_does_not_delay_another() {
        let mut window = Window::default();
        for number in 0..1000 {
            window.insert(job(number, "burst", 0, Priority::Normal), Source::Commanded);
        }
        window.insert(job(2000, "trickle", 500, Priority::Normal), Source::Commanded);
        let first: Vec<u64> = (0..2)
            .filter_map(|_| window.pop_due(Timestamp::from_millis(500)))
            .map(|job| job.id.offset())
            .collect();
        assert!(first.contains(&2000), "{first:?}");
    }

    #[test]
    fn an_older_revision_is_never_popped() {
        let mut window = Window::default();
        window.insert(job(1, "a", 10, Priority::Normal), Source::Commanded);
        let later = Job {
            revision: 2,
            due: Timestamp::from_millis(50),
            ..(*job(1, "a", 0, Priority::Normal)).clone()
        };
        window.insert(Arc::new(later), Source::LookedUp);
        assert!(pop_all(&mut window, 49).is_empty());
        assert_eq!(window.next_due(), Some(Timestamp::from_millis(50)));
        assert_eq!(pop_all(&mut window, 50), [1]);
        window.insert(job(2, "a", 60, Priority::Normal), Source::Commanded);
        assert!(
            window
                .remove(JobId::new(Timestamp::from_millis(0), 0, 2))
                .is_some()
        );
        assert_eq!(window.next_due(), None);
        assert!(pop_all(&mut window, 100).is_empty());
    }

    #[test]
    fn a_queued_job_waits_again_when_the_clock_is_set_back() {
        let mut window = Window::default();
        window.insert(job(1, "a", 90, Priority::Normal), Source::Commanded);
        window.insert(job(2, "a", 100, Priority::Normal), Source::LookedUp);
        let first = window.pop_due(Timestamp::from_millis(100)).unwrap();
        assert_eq!((first.id.offset(), window.has_backlog()), (1, true));
        assert!(pop_all(&mut window, 99).is_empty());
        assert_eq!(window.next_due(), Some(Timestamp::from_millis(100)));
        assert_eq!(pop_all(&mut window, 100), [2]);
        assert_eq!(window.next_due(), None);
    }

    proptest! {
        #[test]
        fn no_job_is_popped_early_or_lost_when_the_clock_is_set_back_and_forth(
            jobs in proptest::collection::vec((0_i64..1000, 0..3_usize, 0..3_usize), 0..100),
            turns in proptest::collection::vec((0_i64..1000, 0..20_usize), 0..20),
        ) {
            let priorities = [Priority::High, Priority::Normal, Priority::Low];
            let mut window = Window::default();
            for (number, (due, app, priority)) in jobs.iter().enumerate() {
                let job = job(i64::try_from(number).unwrap(), ["a", "b", "c"][*app], *due, priorities[*priority]);
                window.insert(job, Source::ALL[number % 3]);
            }
            let mut popped = Vec::new();
            for (now, limit) in turns.into_iter().chain([(1000, usize::MAX)]) {
                for _ in 0..limit {
                    let Some(job) = window.pop_due(Timestamp::from_millis(now)) else { break };
                    prop_assert!(job.due.as_millis() <= now, "due {} at {now}", job.due.as_millis());
                    popped.push(job.id);
                }
            }
            popped.sort_unstable();
            popped.dedup();
            prop_assert_eq!(popped.len(), jobs.len());
            prop_assert_eq!(window.next_due(), None);
        }

        #[test]
        fn each_job_is_popped_once_and_never_early(
            jobs in proptest::collection::vec((0_i64..1000, 0..3_usize, 0..3_usize), 0..100), steps in proptest::collection::vec(0_i64..1000, 0..10),
        ) {
            let priorities = [Priority::High, Priority::Normal, Priority::Low];
            let mut window = Window::default();
            for (number, (due, app, priority)) in jobs.iter().enumerate() {
                window.insert(job(i64::try_from(number).unwrap(), ["a", "b", "c"][*app], *due, priorities[*priority]), Source::Commanded);
            }
            let mut popped = Vec::new();
            let mut steps = steps.clone();
            steps.sort_unstable();
            for now in steps.into_iter().chain([1000]) {
                while let Some(job) = window.pop_due(Timestamp::from_millis(now)) {
                    prop_assert!(job.due.as_millis() <= now);
                    popped.push(job.id);
                }
                prop_assert!(window.next_due().is_none_or(|due| due.as_millis() > now));
            }
            popped.sort_unstable();
            popped.dedup();
            prop_assert_eq!(popped.len(), jobs.len());
            prop_assert_eq!((window.len(), window.load(Source::Commanded)), (0, Load::default()));
        }
    }
}
