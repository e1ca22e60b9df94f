//! The window of a shard: the jobs that are due soon, in memory, in the order in which they are dispatched.
//!
//! The jobs of a [`Flow`] are dispatched in the order of their due times. Between the flows of an application, a lower priority
//! counts like a later due time, so no job is overtaken for longer than that. Applications take turns. So a burst of one does
//! not delay the others. An application that has used up its rate is held back: it is left out until its next token arrives.
//!
//! All flows share the memory of the window. As long as there is room, a flow can use all of it. In a full window, a flow that
//! uses less than its share makes those that use more give up their latest jobs; within a flow, an earlier job replaces a later
//! one. The look-ahead reads the evicted jobs again in time.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::Timestamp;
use redeliver_service::due::Waiting;

use crate::index::Cursor;
use crate::job::{Flow, Job, JobId, Kind, Priority};
use crate::rate::{Rates, SharedBucket};

/// How long jobs of high priority may overtake a due job of this priority.
fn priority_delay(priority: Priority) -> Duration {
    match priority {
        Priority::High => Duration::ZERO,
        Priority::Normal => Duration::from_secs(1),
        Priority::Low => Duration::from_secs(10),
    }
}

/// The memory of a window.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// In bytes.
    all: usize,
    /// Each job counts at least as many bytes, which limits the number of jobs.
    per_job: usize,
}

impl Limits {
    fn cost_of(self, job: &Job) -> usize {
        job.size().max(self.per_job)
    }
}

/// More due jobs or commands than these are a backlog. A short turn dispatches more occurrences of schedules, which take the most records.
pub(crate) const BACKLOG: usize = 100;

/// What a shard tells about the lateness that a long turn would cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Backlog {
    /// Whether there are so many due jobs or undecided commands that a turn has the maximum size.
    pub(crate) is_long: bool,
    /// Whether an application without a backlog of its own has a job that is due soon or already.
    pub(crate) has_others: bool,
}

impl Backlog {
    /// Of several shards that share turns.
    pub(crate) fn merge(self, other: Self) -> Self {
        Self {
            is_long: self.is_long || other.is_long,
            has_others: self.has_others || other.has_others,
        }
    }
}

/// The window of a shard.
#[derive(Debug)]
pub(crate) struct Window {
    limits: Limits,
    jobs: HashMap<JobId, (Arc<Job>, FlowIndex)>,
    /// What all jobs cost, in bytes.
    cost: usize,
    /// The number of jobs that have left.
    departures: u64,
    /// All flows that have ever had a job here. Their number is bounded by the configuration.
    flows: Vec<FlowJobs>,
    indexes: HashMap<Flow, FlowIndex>,
    /// The number of flows with jobs.
    active: usize,
    rates: Rates,
    apps: Vec<App>,
    /// By name, and whether it is an application or the pipeline of long waits.
    app_indexes: HashMap<(Arc<str>, Kind), usize>,
    /// Flows whose first job was not due yet, by its due time.
    upcoming: BTreeSet<(Timestamp, FlowIndex)>,
    /// The applications with due flows that are not held back, each once, in the order of their turns.
    rotation: VecDeque<usize>,
    /// What all schedules have in common instead of an application, while one is due. They do not take turns with jobs: the shard decides how many of them run
    /// beside jobs.
    schedules: Option<usize>,
    /// Other applications with due flows: those that are held back, by the time of their next token.
    held: BTreeSet<(Timestamp, usize)>,
    /// The time of the last [`Window::pop_due`].
    popped: Timestamp,
}

type FlowIndex = usize;

/// The jobs of a flow.
#[derive(Debug)]
struct FlowJobs {
    priority: Priority,
    app: usize,
    jobs: BTreeSet<Cursor>,
    cost: usize,
    /// The number of jobs that are due at or before `counted`.
    due: usize,
    counted: Timestamp,
    place: Place,
}

impl FlowJobs {
    fn insert(&mut self, cursor: Cursor, cost: usize) {
        self.cost += cost;
        self.due += usize::from(self.jobs.insert(cursor) && cursor.due <= self.counted);
    }

    fn remove(&mut self, cursor: Cursor, cost: usize) {
        self.cost -= cost;
        self.due -= usize::from(self.jobs.remove(&cursor) && cursor.due <= self.counted);
    }

    /// The number of jobs that are due at `now`. Counts each job once while the clock advances.
    fn count_due(&self, now: Timestamp) -> usize {
        if now == self.counted {
            self.due
        } else if now > self.counted {
            let more = (
                Bound::Excluded(Cursor::end_of(self.counted)),
                Bound::Included(Cursor::end_of(now)),
            );
            self.due + self.jobs.range(more).count()
        } else {
            self.jobs.range(..=Cursor::end_of(now)).count()
        }
    }

    fn is_due(&self, now: Timestamp) -> bool {
        self.jobs.first().is_some_and(|first| first.due <= now)
    }
}

/// Where a flow is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Nowhere: it has no jobs.
    None,
    /// In [`Window::upcoming`], with this due time.
    Upcoming(Timestamp),
    /// In [`App::due`]. Its first job was due when it was put there.
    Due,
}

#[derive(Debug)]
struct App {
    name: Arc<str>,
    kind: Kind,
    /// Its flows that are due.
    due: Vec<FlowIndex>,
    /// Its tokens, if it has a rate.
    bucket: Option<SharedBucket>,
    /// Since when the token was there that the last job has taken.
    token: Timestamp,
    is_held: bool,
}

/// The result of [`Window::insert`].
#[derive(Debug, Default)]
pub(crate) struct Inserted {
    /// Whether the job is in the window.
    pub(crate) fits: bool,
    /// The jobs that made room, latest first.
    pub(crate) evicted: Vec<Arc<Job>>,
}

impl Window {
    /// A window for at most `jobs` jobs with at most `bytes` bytes, except that a single job can be larger.
    pub(crate) fn new(jobs: usize, bytes: usize, rates: Rates) -> Self {
        let limits = Limits {
            all: bytes.max(1),
            per_job: bytes.div_ceil(jobs.max(1)).max(1),
        };
        Self {
            limits,
            jobs: HashMap::new(),
            cost: 0,
            departures: 0,
            flows: Vec::new(),
            indexes: HashMap::new(),
            active: 0,
            rates,
            apps: Vec::new(),
            app_indexes: HashMap::new(),
            upcoming: BTreeSet::new(),
            rotation: VecDeque::new(),
            schedules: None,
            held: BTreeSet::new(),
            popped: Timestamp::from_millis(0),
        }
    }

    /// Inserts a job, and replaces an older revision of it, also if there is no room for the new one.
    pub(crate) fn insert(&mut self, job: Arc<Job>) -> Inserted {
        self.remove(job.id);
        let index = self.index_of(&job);
        let (cursor, cost) = (Cursor::of(&job), self.limits.cost_of(&job));
        let mut evicted = Vec::new();
        let before = self.departures;
        if !self.make_room(index, cursor, cost, &mut evicted) {
            // Otherwise, jobs would be evicted and read again without end.
            for job in evicted {
                self.add(job);
            }
            self.departures = before;
            return Inserted::default();
        }
        self.add(job);
        Inserted { fits: true, evicted }
    }

    fn add(&mut self, job: Arc<Job>) {
        let (index, cost) = (self.index_of(&job), self.limits.cost_of(&job));
        self.cost += cost;
        let flow = &mut self.flows[index];
        self.active += usize::from(flow.jobs.is_empty());
        flow.insert(Cursor::of(&job), cost);
        self.jobs.insert(job.id, (job, index));
        self.keep_upcoming(index);
    }

    pub(crate) fn get(&self, id: JobId) -> Option<&Arc<Job>> {
        self.jobs.get(&id).map(|(job, _)| job)
    }

    pub(crate) fn remove(&mut self, id: JobId) -> Option<Arc<Job>> {
        let (job, index) = self.jobs.remove(&id)?;
        let cost = self.limits.cost_of(&job);
        self.departures += 1;
        self.cost -= cost;
        let flow = &mut self.flows[index];
        flow.remove(Cursor::of(&job), cost);
        self.active -= usize::from(flow.jobs.is_empty());
        self.keep_upcoming(index);
        Some(job)
    }

    /// Removes all jobs of a flow.
    pub(crate) fn remove_flow(&mut self, flow: &Flow) {
        let Some(&index) = self.indexes.get(flow) else {
            return;
        };
        while let Some(cursor) = self.flows[index].jobs.last().copied() {
            self.remove(cursor.id);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Whether the flow has jobs here.
    pub(crate) fn contains_flow(&self, flow: &Flow) -> bool {
        let own = self.indexes.get(flow).map(|index| &self.flows[*index]);
        own.is_some_and(|own| !own.jobs.is_empty())
    }

    /// A number that changes when jobs leave.
    pub(crate) fn departures(&self) -> u64 {
        self.departures
    }

    /// How many more jobs of this flow fit, in units of small jobs.
    pub(crate) fn room_for(&self, flow: &Flow) -> usize {
        let own = self.indexes.get(flow).map(|index| &self.flows[*index]);
        let is_new = own.is_none_or(|own| own.jobs.is_empty());
        self.room(own.map_or(0, |own| own.cost), is_new)
    }

    /// How many jobs fit of a flow that has none here.
    pub(crate) fn room_for_new_flow(&self) -> usize {
        self.room(0, true)
    }

    /// A scan reads a flow only if there is room for so many jobs.
    pub(crate) fn worthwhile_room(&self) -> usize {
        (self.share(true) / self.limits.per_job / 4).max(1)
    }

    fn room(&self, own: usize, is_new: bool) -> usize {
        let free = self.limits.all.saturating_sub(self.cost);
        let unused = self.share(is_new).saturating_sub(own);
        free.max(unused) / self.limits.per_job
    }

    /// What each flow may cost in a full window.
    fn share(&self, is_new: bool) -> usize {
        self.limits.all / (self.active + usize::from(is_new)).max(1)
    }

    /// Evicts jobs until there is room for one of this flow. Returns false if there is none.
    fn make_room(
        &mut self,
        index: FlowIndex,
        cursor: Cursor,
        cost: usize,
        evicted: &mut Vec<Arc<Job>>,
    ) -> bool {
        while self.cost + cost > self.limits.all && !self.jobs.is_empty() {
            let own = &self.flows[index];
            let share = self.share(own.jobs.is_empty());
            let may_replace = own.jobs.last().is_some_and(|latest| *latest > cursor);
            let largest = self
                .largest_flow()
                .filter(|largest| *largest != index && self.may_shrink(*largest, index, cursor, cost, share));
            match largest {
                Some(largest) => self.shrink(largest, share, cost, evicted),
                None if may_replace => evicted.extend(self.remove_latest(index)),
                None => return false,
            }
        }
        true
    }

    /// Evicts the latest jobs of a flow: at least one, and enough for a job of this cost or, if the flow exceeds its share by more, for
    /// several, because looking for the largest flow takes a while.
    fn shrink(&mut self, index: FlowIndex, share: usize, cost: usize, evicted: &mut Vec<Arc<Job>>) {
        let room = cost.max(self.limits.all / 16);
        loop {
            evicted.extend(self.remove_latest(index));
            if self.flows[index].cost <= share || self.cost + room <= self.limits.all {
                return;
            }
        }
    }

    /// Whether the largest flow makes room for a job of another one: for one within its share, and, so that a share that is smaller than
    /// a job keeps no flow out, for the first one of a flow. That one must be due earlier if the largest flow has no other job itself.
    fn may_shrink(
        &self,
        largest: FlowIndex,
        index: FlowIndex,
        cursor: Cursor,
        cost: usize,
        share: usize,
    ) -> bool {
        let (largest, own) = (&self.flows[largest], &self.flows[index]);
        let is_within_share = own.cost + cost <= share;
        let is_later = largest.jobs.len() > 1 || largest.jobs.last().is_some_and(|latest| *latest > cursor);
        is_within_share || (own.jobs.is_empty() && is_later)
    }

    fn largest_flow(&self) -> Option<FlowIndex> {
        let flows = self.flows.iter().enumerate().filter(|(_, flow)| flow.cost > 0);
        flows.max_by_key(|(_, flow)| flow.cost).map(|(index, _)| index)
    }

    fn remove_latest(&mut self, index: FlowIndex) -> Option<Arc<Job>> {
        let latest = *self.flows[index].jobs.last()?;
        self.remove(latest.id)
    }

    fn index_of(&mut self, job: &Job) -> FlowIndex {
        let flow = Flow::of(job);
        if let Some(index) = self.indexes.get(&flow) {
            return *index;
        }
        let key = (flow.app.clone(), job.kind);
        let app = match self.app_indexes.get(&key) {
            Some(app) => *app,
            None => {
                self.apps.push(App {
                    name: flow.app.clone(),
                    kind: job.kind,
                    due: Vec::new(),
                    // A pipeline can have the name of an application.
                    bucket: self.rates.bucket(&flow.app).filter(|_| job.kind == Kind::App),
                    token: Timestamp::from_millis(0),
                    is_held: false,
                });
                self.app_indexes.insert(key, self.apps.len() - 1);
                self.apps.len() - 1
            }
        };
        self.flows.push(FlowJobs {
            priority: flow.priority,
            app,
            jobs: BTreeSet::new(),
            cost: 0,
            due: 0,
            counted: Timestamp::from_millis(0),
            place: Place::None,
        });
        let index = self.flows.len() - 1;
        self.indexes.insert(flow, index);
        index
    }

    /// Keeps a flow that is not due in the order of the due times of first jobs.
    fn keep_upcoming(&mut self, index: FlowIndex) {
        let flow = &mut self.flows[index];
        let place = match (flow.place, flow.jobs.first()) {
            // The next turn of its application moves it, if it is empty or not due any more.
            (Place::Due, _) => return,
            (_, Some(first)) => Place::Upcoming(first.due),
            (_, None) => Place::None,
        };
        let before = std::mem::replace(&mut flow.place, place);
        if before == place {
            return;
        }
        if let Place::Upcoming(due) = before {
            self.upcoming.remove(&(due, index));
        }
        if let Place::Upcoming(due) = place {
            self.upcoming.insert((due, index));
        }
    }

    /// Whether a small job fits without the eviction of others.
    pub(crate) fn has_free_room(&self) -> bool {
        self.cost + self.limits.per_job <= self.limits.all
    }

    /// Whether due jobs or schedules that are not held back were left at the last [`Window::pop_due`].
    pub(crate) fn has_backlog(&self) -> bool {
        !self.rotation.is_empty() || self.schedules.is_some()
    }

    /// What is due at `now`, and who becomes due until `soon`. Applications that are held back do not count.
    pub(crate) fn backlog(&self, now: Timestamp, soon: Timestamp) -> Backlog {
        let upcoming = self.upcoming.range(..=(soon, FlowIndex::MAX));
        let queued = self.rotation.iter().chain(&self.schedules);
        let flows = queued.flat_map(|app| &self.apps[*app].due);
        let mut due_of: HashMap<usize, usize> = HashMap::new();
        for flow in upcoming.map(|(_, index)| index).chain(flows) {
            let flow = &self.flows[*flow];
            // A flow whose job has just left can be in a queue until its next turn.
            if flow.is_due(soon) {
                *due_of.entry(flow.app).or_default() += flow.count_due(now);
            }
        }
        Backlog {
            is_long: due_of.values().sum::<usize>() > BACKLOG,
            has_others: due_of.values().any(|due| *due <= BACKLOG),
        }
    }

    /// Whether the rate of an application holds back its due jobs.
    pub(crate) fn holds_back(&self, app: &Arc<str>) -> bool {
        let index = self.app_indexes.get(&(app.clone(), Kind::App));
        index.is_some_and(|index| self.apps[*index].is_held)
    }

    /// When the next job can be dispatched; in the past if due jobs are queued.
    pub(crate) fn next_due(&self) -> Option<Timestamp> {
        if self.has_backlog() {
            return Some(Timestamp::from_millis(0));
        }
        let firsts = self.upcoming.first().into_iter().chain(self.held.first());
        firsts.map(|(time, _)| *time).min()
    }

    /// Whether an application has a rate, so that its jobs must go through the window.
    pub(crate) fn is_limited(&self, job: &Job) -> bool {
        job.kind == Kind::App && self.rates.is_limited(&job.app)
    }

    /// Since when the job that was popped last could be dispatched: its due time, or later if its application was held back.
    pub(crate) fn ready_at(&self, job: &Job) -> Timestamp {
        let app = self.app_of(job).map(|app| &self.apps[app]);
        let token = app.filter(|app| app.bucket.is_some()).map(|app| app.token);
        token.map_or(job.due, |token| token.max(job.due))
    }

    /// Changes the rates of applications. Those that were held back ask for a token again.
    pub(crate) fn set_rates(&mut self, rates: Rates) {
        self.rates = rates;
        for ((name, kind), index) in &self.app_indexes {
            self.apps[*index].bucket = self.rates.bucket(name).filter(|_| *kind == Kind::App);
        }
        for (_, app) in std::mem::take(&mut self.held) {
            self.apps[app].is_held = false;
            self.rotation.push_back(app);
        }
    }

    /// Returns the token of a job that was popped and not dispatched.
    pub(crate) fn return_token(&mut self, job: &Job) {
        if let Some(app) = self.app_of(job)
            && let Some(bucket) = &self.apps[app].bucket
        {
            bucket.lock().give_back();
        }
    }

    fn app_of(&self, job: &Job) -> Option<usize> {
        self.app_indexes.get(&(job.app.clone(), job.kind)).copied()
    }

    /// The number of due jobs of each application that is held back.
    pub(crate) fn held_back(&mut self, now: Timestamp) -> BTreeMap<Arc<str>, usize> {
        let (apps, flows) = (&self.apps, &mut self.flows);
        let mut count = |app: usize| {
            let due = apps[app].due.iter();
            let counts = due.map(|flow| {
                // Each job is counted once while the clock advances.
                let flow = &mut flows[*flow];
                (flow.due, flow.counted) = (flow.count_due(now), now);
                flow.due
            });
            counts.sum()
        };
        let held = self.held.iter();
        held.map(|(_, app)| (apps[*app].name.clone(), count(*app)))
            .collect()
    }

    /// What waits, except for applications that are held back. Of the due jobs of an application, the one that is dispatched next counts as the earliest, although one of
    /// lower priority may have been due for up to 10 s longer.
    pub(crate) fn waiting(&self, now: Timestamp) -> Waiting {
        let is_held = |flow: &FlowJobs| flow.place == Place::Due && self.apps[flow.app].is_held;
        let flows = self.flows.iter();
        let flows = flows.filter(|flow| !flow.jobs.is_empty() && !is_held(flow));
        let firsts = flows.clone().filter_map(|flow| flow.jobs.first());
        Waiting {
            earliest: firsts.map(|cursor| cursor.due).min(),
            due: flows.map(|flow| flow.count_due(now)).sum(),
        }
    }

    /// Removes and returns the next due job; schedules are left.
    pub(crate) fn pop_due(&mut self, now: Timestamp) -> Option<Arc<Job>> {
        self.queue_due(now);
        while let Some(app) = self.rotation.pop_front() {
            let Some(next) = self.next_of(app, now) else {
                continue;
            };
            match self.take_token(app, now) {
                Ok(()) => {
                    self.rotation.push_back(app);
                    return self.remove(next);
                }
                Err(time) => {
                    self.apps[app].is_held = true;
                    self.held.insert((time, app));
                }
            }
        }
        None
    }

    /// Removes and returns the next due schedule.
    pub(crate) fn pop_due_schedule(&mut self, now: Timestamp) -> Option<Arc<Job>> {
        self.queue_due(now);
        let next = self.next_of(self.schedules?, now);
        if next.is_none() {
            self.schedules = None;
        }
        self.remove(next?)
    }

    /// Queues the applications with flows that have become due, and those whose next token has arrived.
    fn queue_due(&mut self, now: Timestamp) {
        // Once the clock has been set back, the times of tokens are too late.
        let is_set_back = now < std::mem::replace(&mut self.popped, now);
        while let Some((time, app)) = self.held.first().copied()
            && (time <= now || is_set_back)
        {
            self.held.pop_first();
            self.apps[app].is_held = false;
            self.rotation.push_back(app);
        }
        while let Some((_, index)) = self.upcoming.first().copied().filter(|(due, _)| *due <= now) {
            self.upcoming.pop_first();
            let flow = &mut self.flows[index];
            flow.place = Place::Due;
            let app = &mut self.apps[flow.app];
            if app.due.is_empty() {
                match app.kind {
                    Kind::Schedule => self.schedules = Some(flow.app),
                    Kind::App | Kind::LongWait => self.rotation.push_back(flow.app),
                }
            }
            app.due.push(index);
        }
    }

    /// Takes a token of an application, if it has a rate. The error is when to ask again.
    fn take_token(&mut self, app: usize, now: Timestamp) -> Result<(), Timestamp> {
        let App { bucket, token, .. } = &mut self.apps[app];
        if let Some(bucket) = bucket {
            *token = bucket.lock().take(now)?;
        }
        Ok(())
    }

    /// The next due job or schedule of an application; `None` if none of its flows is due. Flows that are not due any more, because they are empty or the
    /// clock was set back, leave [`App::due`].
    fn next_of(&mut self, app: usize, now: Timestamp) -> Option<JobId> {
        let mut due = std::mem::take(&mut self.apps[app].due);
        let mut others = Vec::new();
        due.retain(|index| {
            let flow = &mut self.flows[*index];
            (flow.due, flow.counted) = (flow.count_due(now), now);
            let is_due = flow.is_due(now);
            if !is_due {
                others.push(*index);
            }
            is_due
        });
        for index in others {
            self.flows[index].place = Place::None;
            self.keep_upcoming(index);
        }
        let firsts = due.iter().filter_map(|index| {
            let flow = &self.flows[*index];
            let first = flow.jobs.first()?;
            Some((first.due.after(priority_delay(flow.priority)), first.id))
        });
        let next = firsts.min();
        self.apps[app].due = due;
        next.map(|(_, id)| id)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::job::Kind;
    use crate::rate::Buckets;

    fn job(number: i64, app: &str, due: i64, priority: Priority) -> Arc<Job> {
        Arc::new(Job {
            app: app.into(),
            priority,
            due: Timestamp::from_millis(due),
            ..Job::for_tests(number)
        })
    }

    fn window() -> Window {
        Window::new(10_000, 64 << 20, Rates::default())
    }

    fn limited(rate: f64) -> Window {
        let name = "limited".to_owned();
        let rates = Rates::of_shard(&[(name, rate)].into(), 0, 1, Buckets::default());
        Window::new(10_000, 64 << 20, rates)
    }

    fn pop_all(window: &mut Window, now: i64) -> Vec<u64> {
        std::iter::from_fn(|| window.pop_due(Timestamp::from_millis(now)))
            .map(|job| job.id.offset())
            .collect()
    }

    #[test]
    fn priorities_order_without_starving() {
        let mut window = window();
        window.insert(job(1, "a", 0, Priority::Low));
        window.insert(job(2, "a", 50, Priority::Normal));
        window.insert(job(3, "a", 100, Priority::High));
        assert_eq!(pop_all(&mut window, 100), [3, 2, 1]);
        window.insert(job(1, "a", 0, Priority::Low));
        window.insert(job(2, "a", 10_001, Priority::High));
        assert_eq!(pop_all(&mut window, 10_001), [1, 2]);
        assert_eq!((window.len(), window.cost), (0, 0));
    }

    #[test]
    fn due_jobs_are_counted() {
        let mut window = window();
        for (number, app, due) in [(1, "a", 100), (2, "a", 200), (3, "b", 300), (4, "b", 900)] {
            window.insert(job(number, app, due, Priority::Normal));
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
    fn backlog_delays_other_applications() {
        let at = Timestamp::from_millis;
        let mut window = window();
        let backlog = |is_long, has_others| Backlog { is_long, has_others };
        assert_eq!(window.backlog(at(100), at(600)), backlog(false, false));
        for number in 0..=BACKLOG as i64 {
            window.insert(job(number, "burst", 90, Priority::Normal));
            // Another flow of the application.
            window.insert(job(1_000 + number, "burst", 500, Priority::High));
        }
        assert_eq!(window.backlog(at(80), at(89)), backlog(false, false));
        assert_eq!(window.backlog(at(80), at(90)), backlog(false, true), "due soon");
        assert_eq!(window.backlog(at(100), at(600)), backlog(true, false));
        window.insert(job(5_000, "trickle", 500, Priority::Normal));
        window.insert(job(5_001, "trickle", 700, Priority::Normal));
        for _ in 0..2 {
            assert_eq!(window.backlog(at(100), at(499)), backlog(true, false));
            assert_eq!(window.backlog(at(100), at(500)), backlog(true, true), "due soon");
            assert_eq!(window.backlog(at(501), at(601)), backlog(true, true), "due");
            // The flows that are due move to the queue.
            window.pop_due(at(100));
            window.insert(job(6_000, "burst", 90, Priority::Normal));
        }
        let popped: Vec<_> = (0..2).filter_map(|_| window.pop_due(at(501))).collect();
        assert!(popped.iter().any(|job| job.id.offset() == 5_000), "{popped:?}");
        // It is in the queue until its next turn, but its next job is due later.
        assert_eq!(window.backlog(at(501), at(601)), backlog(true, false));
        assert_eq!(window.backlog(at(601), at(701)), backlog(true, true));
    }

    #[test]
    fn small_applications_form_a_backlog() {
        let at = Timestamp::from_millis;
        let mut window = window();
        for number in 0..=BACKLOG as i64 {
            window.insert(job(number, &format!("app-{number}"), 0, Priority::Normal));
        }
        let expected = Backlog {
            is_long: true,
            has_others: true,
        };
        assert_eq!(window.backlog(at(0), at(100)), expected);
    }

    #[test]
    fn burst_delays_no_other_application() {
        let mut window = window();
        for number in 0..1000 {
            window.insert(job(number, "burst", 0, Priority::Normal));
        }
        window.insert(job(2000, "trickle", 500, Priority::Normal));
        let first: Vec<u64> = (0..2)
            .filter_map(|_| window.pop_due(Timestamp::from_millis(500)))
            .map(|job| job.id.offset())
            .collect();
        assert!(first.contains(&2000), "{first:?}");
    }

    #[test]
    fn an_older_revision_is_never_popped() {
        let mut window = window();
        window.insert(job(1, "a", 10, Priority::Normal));
        let later = Job {
            revision: 2,
            due: Timestamp::from_millis(50),
            ..(*job(1, "a", 0, Priority::Normal)).clone()
        };
        window.insert(Arc::new(later));
        assert!(pop_all(&mut window, 49).is_empty());
        assert_eq!(window.next_due(), Some(Timestamp::from_millis(50)));
        assert_eq!(pop_all(&mut window, 50), [1]);
        window.insert(job(2, "a", 60, Priority::Normal));
        assert!(
            window
                .remove(JobId::new(Timestamp::from_millis(0), 0, 2))
                .is_some()
        );
        assert_eq!(window.next_due(), None);
        assert!(pop_all(&mut window, 100).is_empty());
    }

    #[test]
    fn application_without_tokens_is_skipped() {
        let mut window = limited(2.0);
        for number in 0..5 {
            window.insert(job(number, "limited", 0, Priority::Normal));
        }
        for number in 10..15 {
            window.insert(job(number, "other", 0, Priority::Low));
        }
        assert_eq!(pop_all(&mut window, 100), [0, 10, 1, 11, 12, 13, 14]);
        assert!(!window.has_backlog());
        assert_eq!(
            window.held_back(Timestamp::from_millis(100)),
            [("limited".into(), 3)].into()
        );
        // What is held back is no reason for more processes.
        assert_eq!(window.waiting(Timestamp::from_millis(100)), Waiting::default());
        let next = window.next_due().unwrap();
        assert!((600..610).contains(&next.as_millis()), "{next:?}");
        assert!(pop_all(&mut window, 599).is_empty());
        window.insert(job(15, "other", 0, Priority::Low));
        assert_eq!(pop_all(&mut window, next.as_millis()), [2, 15]);
        assert_eq!(pop_all(&mut window, 10_000), [3, 4]);
        assert_eq!(window.next_due(), None);
        assert!(window.held_back(Timestamp::from_millis(10_000)).is_empty());
    }

    #[test]
    fn waiting_for_tokens_is_not_lateness() {
        let mut window = limited(1.0);
        for number in 0..2 {
            window.insert(job(number, "limited", 0, Priority::Normal));
        }
        let first = window.pop_due(Timestamp::from_millis(500)).unwrap();
        assert_eq!(window.ready_at(&first), first.due);
        assert!(window.pop_due(Timestamp::from_millis(500)).is_none());
        let second = window.pop_due(Timestamp::from_millis(1_700)).unwrap();
        let ready = window.ready_at(&second).as_millis();
        assert!((1_498..=1_500).contains(&ready), "{ready}");
        let other = job(3, "other", 7, Priority::Normal);
        assert_eq!(window.ready_at(&other), other.due);
    }

    #[test]
    fn rate_changes_apply_to_waiting_jobs() {
        let mut window = window();
        for number in 0..10 {
            window.insert(job(number, "a", 0, Priority::Normal));
        }
        assert_eq!(
            window
                .pop_due(Timestamp::from_millis(0))
                .map(|job| job.id.offset()),
            Some(0)
        );
        let buckets = Buckets::default();
        let rates = |rate| Rates::of_shard(&[("a".to_owned(), rate)].into(), 0, 1, buckets.clone());
        window.set_rates(rates(0.1));
        assert_eq!(pop_all(&mut window, 0), [1]);
        assert!(window.holds_back(&"a".into()));
        // A higher rate counts at once, although the next token of the previous one is far away.
        window.set_rates(rates(2.0));
        assert!(pop_all(&mut window, 400).is_empty());
        let next = window.next_due().unwrap().as_millis();
        assert!((500..520).contains(&next), "{next}");
        assert_eq!(pop_all(&mut window, 1_000), [2, 3]);
        window.set_rates(Rates::default());
        assert!(!window.holds_back(&"a".into()));
        assert_eq!(pop_all(&mut window, 1_000).len(), 6);
    }

    #[test]
    fn undispatched_job_returns_its_token() {
        let mut window = limited(1.0);
        for number in 0..2 {
            window.insert(job(number, "limited", 0, Priority::Normal));
        }
        let first = window.pop_due(Timestamp::from_millis(0)).unwrap();
        window.return_token(&first);
        assert_eq!(pop_all(&mut window, 0), [1]);
    }

    #[test]
    fn long_waits_have_no_rate() {
        let mut window = limited(1.0);
        for number in 0..5 {
            let wait = Job {
                kind: Kind::LongWait,
                ..(*job(number, "limited", 0, Priority::Normal)).clone()
            };
            assert!(!window.is_limited(&wait));
            window.insert(Arc::new(wait));
        }
        assert_eq!(pop_all(&mut window, 0).len(), 5);
    }

    #[test]
    fn backward_clock_refills_tokens() {
        let mut window = limited(1.0);
        for number in 0..3 {
            window.insert(job(number, "limited", 0, Priority::Normal));
        }
        let hour = 3_600_000;
        assert_eq!(pop_all(&mut window, hour), [0]);
        assert!(window.next_due().unwrap().as_millis() > hour);
        assert!(pop_all(&mut window, 1_000).is_empty());
        let next = window.next_due().unwrap().as_millis();
        assert!((2_000..2_010).contains(&next), "{next}");
        assert_eq!(pop_all(&mut window, next), [1]);
    }

    fn insert(window: &mut Window, number: i64, app: &str, due: i64) -> (bool, Vec<u64>) {
        let Inserted { fits, evicted } = window.insert(job(number, app, due, Priority::Normal));
        (fits, evicted.iter().map(|job| job.id.offset()).collect())
    }

    #[test]
    fn full_window_keeps_earliest_jobs() {
        let mut window = Window::new(3, 3 << 20, Rates::default());
        for number in 0..3 {
            assert_eq!(insert(&mut window, number, "a", 100 * number), (true, vec![]));
        }
        assert_eq!(insert(&mut window, 3, "a", 300), (false, vec![]));
        assert_eq!(insert(&mut window, 4, "a", 150), (true, vec![2]));
        // A later revision that does not fit replaces the older one all the same.
        assert_eq!(insert(&mut window, 0, "a", 400), (true, vec![]));
        assert_eq!(insert(&mut window, 5, "a", 50), (true, vec![0]));
        assert_eq!(pop_all(&mut window, 1_000), [5, 1, 4]);
    }

    #[test]
    fn small_flow_evicts_others_latest_jobs() {
        let mut window = Window::new(8, 8 << 20, Rates::default());
        for number in 0..8 {
            insert(&mut window, number, "burst", number);
        }
        // Also while the burst is due.
        assert_eq!(
            window
                .pop_due(Timestamp::from_millis(100))
                .map(|job| job.id.offset()),
            Some(0)
        );
        assert_eq!(window.room_for_new_flow(), 4);
        let evicted: Vec<u64> = (10..14)
            .flat_map(|number| {
                let (fits, evicted) = insert(&mut window, number, "late", 1_000 + number);
                assert!(fits, "{number}");
                evicted
            })
            .collect();
        assert_eq!(evicted, [7, 6, 5]);
        assert_eq!(insert(&mut window, 14, "late", 2_000), (false, vec![]));
        assert_eq!(insert(&mut window, 8, "burst", 8), (false, vec![]));
        assert_eq!((window.len(), window.room_for_new_flow()), (8, 2));
        assert_eq!(pop_all(&mut window, 5_000).len(), 8);
    }

    proptest! {
        #[test]
        fn limited_window_loses_no_job(
            steps in proptest::collection::vec((0_i64..40, 0_i64..200, 0..6_usize, 0..3_usize), 0..300),
        ) {
            let mut window = Window::new(16, 16 << 10, Rates::default());
            let mut expected = BTreeSet::new();
            let mut now = 0;
            for (number, due, app, action) in steps {
                if action == 0 {
                    now = due;
                    if let Some(job) = window.pop_due(Timestamp::from_millis(now)) {
                        expected.remove(&job.id.offset());
                    }
                    continue;
                }
                // A job never changes its flow.
                let app = ["a", "b", "c", "d", "e", "f"][(app + usize::try_from(number).unwrap()) % 2 + usize::try_from(number % 5).unwrap()];
                let number = number * 10 + i64::from(app.as_bytes()[0] - b'a');
                let (fits, evicted) = insert(&mut window, number, app, due);
                for evicted in evicted {
                    prop_assert!(expected.remove(&evicted), "evicted {evicted}");
                }
                let number = u64::try_from(number).unwrap();
                if fits { expected.insert(number); } else { expected.remove(&number); }
                prop_assert!(window.len() <= 16 && window.cost <= 16 << 10);
                prop_assert_eq!(window.len(), expected.len());
                let waiting = window.waiting(Timestamp::from_millis(now));
                let due = window.jobs.values().filter(|(job, _)| job.due.as_millis() <= now).count();
                prop_assert_eq!(waiting.due, due);
            }
            let mut popped = pop_all(&mut window, 1_000);
            popped.sort_unstable();
            prop_assert_eq!(popped, expected.into_iter().collect::<Vec<_>>());
        }

        #[test]
        fn clock_steps_lose_no_job(
            jobs in proptest::collection::vec((0_i64..1000, 0..3_usize, 0..3_usize), 0..100),
            turns in proptest::collection::vec((0_i64..1000, 0..20_usize), 0..20),
        ) {
            let priorities = [Priority::High, Priority::Normal, Priority::Low];
            let mut window = window();
            for (number, (due, app, priority)) in jobs.iter().enumerate() {
                let job = job(i64::try_from(number).unwrap(), ["a", "b", "c"][*app], *due, priorities[*priority]);
                window.insert(job);
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
        fn window_keeps_the_rate(
            jobs in proptest::collection::vec((0_i64..5_000, any::<bool>()), 1..60),
            rate in prop_oneof![0.2..2.0, 2.0..200.0],
            set_back in proptest::option::of(0_i64..3_000),
        ) {
            let mut window = limited(rate);
            for (number, (due, is_limited)) in jobs.iter().enumerate() {
                let app = if *is_limited { "limited" } else { "other" };
                window.insert(job(i64::try_from(number).unwrap(), app, *due, Priority::Normal));
            }
            let (mut popped, mut times, mut asked, mut set_back) = (BTreeSet::new(), Vec::new(), 0, set_back);
            let (mut now, mut passed) = (0, 0);
            while let Some(next) = window.next_due() {
                passed += (next.as_millis() - now).max(0);
                now = now.max(next.as_millis());
                if let Some(back) = set_back.take_if(|_| now > 3_000) {
                    now -= back;
                }
                asked += 1;
                prop_assert!(asked <= 3 * jobs.len() + 10, "asked too often");
                while let Some(job) = window.pop_due(Timestamp::from_millis(now)) {
                    prop_assert!(job.due.as_millis() <= now);
                    prop_assert!(popped.insert(job.id), "popped twice");
                    if &*job.app == "limited" {
                        times.push(passed);
                    }
                }
            }
            prop_assert_eq!(popped.len(), jobs.len());
            for (first, since) in times.iter().enumerate() {
                for (last, until) in times.iter().enumerate().skip(first) {
                    let most = rate.max(1.0) + rate * Duration::from_millis((until - since).unsigned_abs()).as_secs_f64();
                    prop_assert!(f64::from(u32::try_from(last - first + 1).unwrap()) <= most + 0.01);
                }
            }
        }
    }
}
