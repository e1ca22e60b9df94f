//! The near window of one shard: jobs that are due soon, in memory, in the order in which they are to leave.
//!
//! Until a job is due it stands in the order of due times. Once it is, it stands in the queue of its
//! application: by priority first, where a lower priority counts like a later due time, so that nobody is
//! overtaken for longer than that. Applications take turns, so that a burst of one delays no other.
//!
//! Jobs that were cancelled or rescheduled after they were due leave their old entries behind in the queues, which are
//! recognised by the revision when they come up.
//!
//! What was looked up and what came as a command is counted apart, so that either can be given a room of its own:
//! in one room a burst that was scheduled long before would keep newcomers of others out until it is over, and
//! newcomers in great number would keep out what was scheduled before them.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::Timestamp;

use crate::index::Cursor;
use crate::job::{Job, JobId, Priority};

/// For how long a due job of this priority may be overtaken by those of high priority.
fn may_be_overtaken(priority: Priority) -> Duration {
    match priority {
        Priority::High => Duration::ZERO,
        Priority::Normal => Duration::from_secs(1),
        Priority::Low => Duration::from_secs(10),
    }
}

type Entry = Reverse<(Timestamp, JobId, u32)>;

/// How a job came into the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The index had it.
    LookedUp,
    /// It was scheduled, or rescheduled, when it was due soon.
    Commanded,
    /// It had waited for its topic.
    Returned,
}

impl Source {
    const ALL: [Self; 3] = [Self::LookedUp, Self::Commanded, Self::Returned];
}

/// How much came that way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) jobs: usize,
    pub(crate) bytes: usize,
}

/// What came one way.
#[derive(Debug, Default)]
struct Room {
    load: Load,
    /// What is not known to be due.
    coming: BTreeSet<Cursor>,
}

/// Jobs that are due soon.
#[derive(Debug, Default)]
pub(crate) struct Window {
    jobs: HashMap<JobId, (Arc<Job>, Source)>,
    looked_up: Room,
    commanded: Room,
    returned: Room,
    /// By application, and there by due time and priority. None is empty.
    due: HashMap<Arc<str>, BinaryHeap<Entry>>,
    /// The applications in `due`, each once, in the order of their turns.
    turns: VecDeque<Arc<str>>,
}

impl Window {
    /// Takes a job in, in place of an older revision of it.
    pub(crate) fn insert(&mut self, job: Arc<Job>, way: Source) {
        self.remove(job.id);
        let room = self.room_mut(way);
        room.load.jobs += 1;
        room.load.bytes += job.size();
        room.coming.insert(Cursor::of(&job));
        self.jobs.insert(job.id, (job, way));
    }

    pub(crate) fn get(&self, id: JobId) -> Option<&Arc<Job>> {
        self.jobs.get(&id).map(|(job, _)| job)
    }

    /// Takes a job out.
    pub(crate) fn remove(&mut self, id: JobId) -> Option<Arc<Job>> {
        let (job, way) = self.jobs.remove(&id)?;
        let room = self.room_mut(way);
        room.load.jobs -= 1;
        room.load.bytes -= job.size();
        room.coming.remove(&Cursor::of(&job));
        Some(job)
    }

    /// The last one of those that came this way and are not known to be due.
    pub(crate) fn latest(&self, way: Source) -> Option<Cursor> {
        self.room(way).coming.last().copied()
    }

    /// Takes out what was looked up behind a place.
    pub(crate) fn remove_looked_up_behind(&mut self, place: Option<Cursor>) {
        while let Some(latest) = self
            .latest(Source::LookedUp)
            .filter(|latest| Some(*latest) > place)
        {
            self.remove(latest.id);
        }
    }

    fn room(&self, way: Source) -> &Room {
        match way {
            Source::LookedUp => &self.looked_up,
            Source::Commanded => &self.commanded,
            Source::Returned => &self.returned,
        }
    }

    fn room_mut(&mut self, way: Source) -> &mut Room {
        match way {
            Source::LookedUp => &mut self.looked_up,
            Source::Commanded => &mut self.commanded,
            Source::Returned => &mut self.returned,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.jobs.len()
    }

    pub(crate) fn load(&self, way: Source) -> Load {
        self.room(way).load
    }

    /// Whether there was more due than was taken out when it was last looked at.
    pub(crate) fn is_behind(&self) -> bool {
        !self.turns.is_empty()
    }

    /// When there will be something to pop; in the past when there is already.
    pub(crate) fn next_due(&self) -> Option<Timestamp> {
        if !self.turns.is_empty() {
            return Some(Timestamp::from_millis(0));
        }
        let rooms = Source::ALL.into_iter().map(|way| self.room(way));
        let first = rooms.filter_map(|room| room.coming.first()).min();
        first.map(|cursor| cursor.due)
    }

    fn is_current(&self, id: JobId, revision: u32) -> bool {
        self.get(id).is_some_and(|job| job.revision == revision)
    }

    /// Takes out the job that is to leave next, if one is due.
    pub(crate) fn pop_due(&mut self, now: Timestamp) -> Option<Arc<Job>> {
        self.notice_due(now);
        while let Some(app) = self.turns.pop_front() {
            let Some(queue) = self.due.get_mut(&app) else {
                continue;
            };
            let entry = queue.pop();
            if queue.is_empty() {
                self.due.remove(&app);
            } else {
                self.turns.push_back(app);
            }
            let Some(Reverse((_, id, revision))) = entry else {
                continue;
            };
            if self.is_current(id, revision) {
                return self.remove(id);
            }
        }
        None
    }

    /// Moves what is due by now to the queues of the applications.
    fn notice_due(&mut self, now: Timestamp) {
        for way in Source::ALL {
            while let Some(cursor) = self.room(way).coming.first().copied() {
                if cursor.due > now {
                    break;
                }
                self.room_mut(way).coming.pop_first();
                let Some((job, _)) = self.jobs.get(&cursor.id) else {
                    continue;
                };
                let entry = Reverse((
                    cursor.due.after(may_be_overtaken(job.priority)),
                    job.id,
                    job.revision,
                ));
                match self.due.get_mut(&job.app) {
                    Some(queue) => queue.push(entry),
                    None => {
                        self.turns.push_back(job.app.clone());
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
    use crate::job::{Kind, Payload, State};

    fn job(number: i64, app: &str, due: i64, priority: Priority) -> Arc<Job> {
        Arc::new(Job {
            id: JobId::new(Timestamp::from_millis(0), 0, number),
            app: app.into(),
            kind: Kind::App,
            state: State::Scheduled,
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
    fn high_priority_goes_first_and_low_is_not_starved() {
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
    fn a_burst_of_one_application_delays_no_other() {
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
    fn an_older_revision_never_leaves() {
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

    proptest! {
        #[test]
        fn each_job_leaves_once_and_never_early(
            jobs in proptest::collection::vec((0_i64..1000, 0..3_usize, 0..3_usize), 0..100), steps in proptest::collection::vec(0_i64..1000, 0..10),
        ) {
            let priorities = [Priority::High, Priority::Normal, Priority::Low];
            let mut window = Window::default();
            for (number, (due, app, priority)) in jobs.iter().enumerate() {
                window.insert(job(i64::try_from(number).unwrap(), ["a", "b", "c"][*app], *due, priorities[*priority]), Source::Commanded);
            }
            let mut left = Vec::new();
            let mut steps = steps.clone();
            steps.sort_unstable();
            for now in steps.into_iter().chain([1000]) {
                while let Some(job) = window.pop_due(Timestamp::from_millis(now)) {
                    prop_assert!(job.due.as_millis() <= now);
                    left.push(job.id);
                }
                prop_assert!(window.next_due().is_none_or(|due| due.as_millis() > now));
            }
            left.sort_unstable();
            left.dedup();
            prop_assert_eq!(left.len(), jobs.len());
            prop_assert_eq!((window.len(), window.load(Source::Commanded)), (0, Load::default()));
        }
    }
}
