//! Copies of commands that overtake a backlog in the ingest topic.

use super::*;
use crate::shard::pins::MAX_PINS;
use crate::urgent::read_copy;

const KEYS: u8 = 3;

/// The urgent topic, and what the shard has read of it.
#[derive(Default)]
pub(super) struct UrgentTopic {
    copies: Vec<Record>,
    is_read: bool,
    /// What pins jobs, and until when.
    pins: Vec<UrgentCopy>,
}

impl World {
    /// From now on, the shard reads only as many records as it is told to.
    fn with_backlog() -> Self {
        Self::with_backlog_and(settings())
    }

    fn with_backlog_and(settings: Settings) -> Self {
        let mut world = Self::with(settings);
        world.may_feed = 0;
        world.urgent = Some(UrgentTopic {
            is_read: true,
            ..UrgentTopic::default()
        });
        world
    }

    fn read(&mut self, records: usize) {
        self.may_feed = records;
        self.feed();
        self.may_feed = 0;
    }

    fn cancel_key(&mut self, key: u8) -> i64 {
        self.run(&Step::CancelKey(key));
        self.last()
    }

    fn last(&self) -> i64 {
        i64::try_from(self.ingest.len()).unwrap() - 1
    }

    /// Writes the copy of the command at this offset.
    fn write_copy(&mut self, original: i64) {
        let record = &self.ingest[usize::try_from(original).unwrap()];
        let copy = copy_of(record, self.now);
        self.urgent.as_mut().unwrap().copies.push(copy);
    }

    /// Writes the copy of the last command, and the shard reads it.
    fn copy(&mut self) -> Taken {
        self.write_copy(self.last());
        self.take_last_copy()
    }

    /// The transaction of the last command is aborted.
    fn abort(&mut self) {
        assert!(self.read_to < self.ingest.len(), "the command was read");
        self.aborted.insert(self.last());
    }

    fn take_last_copy(&mut self) -> Taken {
        let urgent = self.urgent.as_mut().unwrap();
        let copy = read_copy(urgent.copies.last().unwrap(), &self.settings, self.now).unwrap();
        let taken = self.shard.take_copy(&copy);
        if taken == Taken::Pins {
            urgent.pins.push(copy);
        }
        taken
    }

    /// A new owner reads the urgent topic from the beginning, and the ingest topic from the first command that is not decided.
    pub(super) fn restart_urgent(&mut self) {
        if let Some(urgent) = &mut self.urgent {
            urgent.is_read = false;
            urgent.pins.clear();
            let mut position = 0;
            for (offset, _) in (0..).zip(&self.ingest) {
                if self.completed.contains(&offset) {
                    position = offset + 1;
                } else if !self.aborted.contains(&offset) {
                    break;
                }
            }
            self.shard.start_at(position);
            self.shard.set_pins_complete(false);
        }
    }

    /// The shard reads the urgent topic to its end.
    fn read_urgent(&mut self) {
        let urgent = self.urgent.as_mut().unwrap();
        if !std::mem::replace(&mut urgent.is_read, true) {
            for copy in urgent.copies.clone() {
                let copy = read_copy(&copy, &self.settings, self.now).unwrap();
                if self.shard.take_copy(&copy) == Taken::Pins {
                    urgent.pins.push(copy);
                }
            }
            self.shard.set_pins_complete(true);
        }
    }

    /// No job was dispatched that waits for a command.
    pub(super) fn check_pins(&self, before: usize) {
        let Some(urgent) = &self.urgent else { return };
        for (id, _) in &self.dispatched[before..] {
            assert!(urgent.is_read, "dispatched before the urgent topic was read");
            let job = &self.state[id];
            let pins = |copy: &&UrgentCopy| match copy.names {
                NamedBy::Id(id) => id == job.id,
                NamedBy::Key(hash) => {
                    let key = job.idempotency_key.as_deref();
                    key.is_some_and(|key| key_hash(&job.app, key) == hash)
                }
            };
            for copy in urgent.pins.iter().filter(pins) {
                assert!(
                    self.completed.contains(&copy.original) || self.aborted.contains(&copy.original),
                    "{id} was dispatched before {}",
                    copy.original
                );
            }
        }
    }

    fn outcome(&self, offset: i64) -> Option<v1::Outcome> {
        self.answers
            .get(&offset.to_string())
            .map(v1::CommandOutcome::outcome)
    }

    fn state_of(&self, id: JobId) -> Option<JobState> {
        self.state.get(&id).map(|job| job.state)
    }
}

fn copy_of(original: &Record, now: Timestamp) -> Record {
    let mut list = original.headers.clone();
    headers::write_lineage(&mut list, NAME, &Origin::of(original), 0);
    Record {
        position: Position {
            topic: "urgent".into(),
            partition: original.position.partition,
            offset: 0,
        },
        timestamp: Some(now),
        headers: list,
        ..original.clone()
    }
}

fn debounced(key: u8, ahead: u16, data: u8) -> Debounced {
    Debounced {
        key,
        ahead,
        is_delayed: false,
        is_high: false,
        data,
        request_id: None,
    }
}

fn by_id(job: JobId) -> v1::RescheduleJob {
    v1::RescheduleJob {
        id: job.to_string(),
        ..v1::RescheduleJob::default()
    }
}

#[test]
fn a_job_is_not_dispatched_while_its_cancellation_waits_in_a_backlog() {
    for by_key in [true, false] {
        let mut world = World::with_backlog();
        let job = world.schedule("app", 100, Some(1));
        let other = world.schedule("app", 110, None);
        world.read(2);
        world.advance(20);
        for _ in 0..20 {
            world.schedule("other", 5_000, None);
        }
        if by_key {
            world.cancel_key(1);
        } else {
            world.cancel(job);
        }
        let original = world.last();
        assert_eq!(world.copy(), Taken::Pins);
        world.advance(1_000);
        assert!(world.was_dispatched(other), "a job behind it in its flow");
        assert_eq!(world.shard.pinned(), 1);
        assert_eq!(world.state_of(job), Some(JobState::Scheduled));
        assert_eq!(world.outcome(original), None);
        world.read(21);
        world.advance(1_000);
        assert_eq!(world.outcome(original), Some(v1::Outcome::Cancelled));
        assert_eq!(world.state_of(job), Some(JobState::Cancelled));
        assert!(!world.was_dispatched(job));
        assert_eq!(world.shard.pinned(), 0);
    }
}

#[test]
fn a_copy_that_overtakes_its_job_pins_it_from_the_start() {
    for by_key in [true, false] {
        let mut world = World::with_backlog();
        // Due at once: without the copy, it would be dispatched.
        let job = world.schedule("app", 0, Some(1));
        if by_key {
            world.cancel_key(1);
        } else {
            world.cancel(job);
        }
        let original = world.last();
        assert_eq!(world.copy(), Taken::Pins);
        // The next job with the key comes after the cancellation.
        let later = world.replace(&debounced(1, 0, 1));
        world.read(1);
        world.advance(100);
        assert_eq!(world.state_of(job), Some(JobState::Scheduled));
        world.read(1);
        world.advance(100);
        assert_eq!(world.outcome(original), Some(v1::Outcome::Cancelled));
        world.read(1);
        world.advance(300);
        assert!(!world.was_dispatched(job));
        assert!(world.was_dispatched(later));
    }
}

#[test]
fn a_rescheduled_job_is_dispatched_at_its_new_time_only() {
    let mut world = World::with_backlog();
    let job = world.schedule("app", 100, None);
    world.read(1);
    world.advance(50);
    world.schedule("other", 0, None);
    world.reschedule(by_id(job), 2_000);
    assert_eq!(world.copy(), Taken::Pins);
    world.advance(500);
    assert!(!world.was_dispatched(job));
    world.read(2);
    world.advance(1_000);
    assert!(!world.was_dispatched(job));
    world.advance(1_000);
    assert!(world.was_dispatched(job));
}

#[test]
fn a_request_in_the_backlog_that_replaces_a_pinned_job_does_what_it_does_without_the_copy() {
    // The request is for the same flow, or for another one.
    for is_high in [false, true] {
        let mut world = World::with_backlog();
        let job = world.schedule("app", 1_000, Some(1));
        world.read(1);
        world.advance(20);
        let replacement = world.replace(&Debounced {
            is_high,
            ..debounced(1, 400, 1)
        });
        world.cancel(job);
        assert_eq!(world.copy(), Taken::Pins);
        let original = world.last();
        world.advance(1_500);
        world.read(2);
        world.advance(1_000);
        let expected = match is_high {
            // The same job has the content of the replacement, and is cancelled.
            false => v1::Outcome::Cancelled,
            // The cancellation does not name the job of the replacement.
            true => v1::Outcome::AlreadyCancelled,
        };
        assert_eq!(world.outcome(original), Some(expected));
        assert_eq!(world.state_of(job), Some(JobState::Cancelled));
        assert!(!world.was_dispatched(job));
        assert_eq!(world.was_dispatched(replacement), is_high);
    }
}

#[test]
fn a_copy_pins_nothing_after_its_original_had_its_turn() {
    let mut world = World::with_backlog();
    world.schedule("app", 0, Some(1));
    let original = world.cancel_key(1);
    world.read(2);
    world.advance(100);
    assert!(world.completed.contains(&original));
    world.write_copy(original);
    assert_eq!(world.take_last_copy(), Taken::Late);
    let later = world.replace(&debounced(1, 0, 1));
    world.read(1);
    world.restart();
    world.read_urgent();
    world.read(9);
    world.advance(100);
    assert!(world.was_dispatched(later));
}

#[test]
fn commands_that_name_no_job_unpin_none() {
    let mut world = World::with_backlog();
    let job = world.schedule("app", 50, Some(1));
    world.read(1);
    world.advance(20);
    world.cancel_key(1);
    assert_eq!(world.copy(), Taken::Pins);
    world.schedule("other", 0, None);
    // The index does not answer the lookup of the cancellation, and the other command needs none.
    world.read(2);
    world.now = world.now.after(Duration::from_millis(200));
    world.turn(50, false);
    assert!(world.completed.contains(&2) && !world.completed.contains(&1));
    world.turn(50, false);
    assert!(!world.was_dispatched(job));
    world.advance(200);
    assert_eq!(world.state_of(job), Some(JobState::Cancelled));
}

#[test]
fn a_job_is_not_dispatched_before_the_urgent_topic_was_read() {
    let mut world = World::with_backlog();
    let job = world.schedule("app", 50, Some(1));
    world.read(1);
    world.advance(20);
    world.schedule("other", 0, None);
    world.cancel_key(1);
    world.write_copy(world.last());
    world.restart();
    world.now = world.now.after(Duration::from_millis(200));
    // It would also be dispatched when it is accepted.
    world.schedule("app", 0, None);
    world.read(2);
    world.advance(200);
    assert!(world.dispatched.is_empty());
    world.read_urgent();
    world.advance(200);
    assert!(!world.dispatched.is_empty());
    assert!(!world.was_dispatched(job));
}

#[test]
fn a_pin_ends_once_an_aborted_command_is_passed() {
    // What the shard reads behind it: nothing up to the end, a command that names a job, or another one.
    for key in [None, Some(Some(2)), Some(None)] {
        let mut world = World::with_backlog();
        let job = world.schedule("app", 50, Some(1));
        world.read(1);
        world.advance(20);
        world.cancel_key(1);
        assert_eq!(world.copy(), Taken::Pins);
        world.abort();
        if let Some(key) = key {
            world.schedule("other", 0, key);
        }
        world.advance(1_000);
        assert!(!world.was_dispatched(job));
        world.read(2);
        world.advance(100);
        assert!(world.was_dispatched(job));
        assert_eq!(world.shard.pinned(), 0);
    }
}

#[test]
fn a_pin_that_nothing_ends_lasts() {
    let mut world = World::with_backlog();
    let job = world.schedule("app", 50, Some(1));
    world.read(1);
    world.advance(20);
    // Behind an open transaction, or a leader that is away.
    world.cancel_key(1);
    assert_eq!(world.copy(), Taken::Pins);
    world.now = world.now.after(Duration::from_secs(3_600));
    world.advance(1_000);
    assert!(!world.was_dispatched(job));
    world.read(1);
    world.advance(200);
    assert_eq!(world.state_of(job), Some(JobState::Cancelled));
}

#[test]
fn a_command_that_ends_or_moves_its_pinned_job_delays_no_other_of_the_flow() {
    for is_moved in [false, true] {
        let mut world = World::with_backlog();
        let job = world.schedule("app", 50, None);
        world.read(1);
        world.advance(20);
        match is_moved {
            true => world.reschedule(by_id(job), 5_000),
            false => world.cancel(job),
        }
        assert_eq!(world.copy(), Taken::Pins);
        world.advance(100);
        assert_eq!(world.shard.pinned(), 1);
        world.read(1);
        // The lookup only: a job that is to be read again needs a scan.
        while !world.completed.contains(&1) {
            world.serve_index();
            world.turn(50, false);
        }
        let next = world.schedule("app", 0, None);
        world.read(1);
        world.turn(50, false);
        assert!(world.was_dispatched(next));
    }
}

#[test]
fn a_job_that_takes_the_place_of_many_pinned_ones_is_pinned() {
    let mut world = World::with_backlog();
    let mut jobs = Vec::new();
    for index in 0..20 {
        // Requests for different priorities end the former job.
        jobs.push(world.replace(&Debounced {
            is_high: index % 2 == 0,
            ..debounced(1, 0, 1)
        }));
    }
    world.cancel_key(1);
    assert_eq!(world.copy(), Taken::Pins);
    for _ in 0..20 {
        world.read(1);
        world.advance(100);
        assert_eq!(world.shard.pinned(), 1);
    }
    world.read(1);
    world.advance(100);
    assert!(world.dispatched.is_empty());
    let states = jobs.iter().map(|job| world.state_of(*job));
    assert!(states.eq([Some(JobState::Cancelled); 20]));
}

#[test]
fn a_job_whose_pin_has_ended_is_read_at_once_although_the_window_is_full_of_later_ones() {
    const WINDOW: usize = 80;
    let mut world = World::with_backlog_and(Settings {
        window_jobs: WINDOW,
        ..settings()
    });
    let job = world.schedule("app", 50, Some(1));
    world.read(1);
    world.advance(20);
    for _ in 0..200 {
        world.schedule("app", 60, None);
    }
    world.cancel_key(1);
    assert_eq!(world.copy(), Taken::Pins);
    world.abort();
    world.advance(100);
    assert_eq!(world.shard.pinned(), 1);
    world.set_apps(limited(Some(10.0)));
    world.read(200);
    world.advance(500);
    // Nothing more is read before a quarter of the flow's share has left.
    for _ in 0..200 {
        if world.shard.window_len() < WINDOW - 5 {
            world.advance(10);
        }
    }
    let jobs = world.shard.window_len();
    assert!(
        jobs >= WINDOW - 5,
        "{jobs} jobs in the window, {} dispatched",
        world.dispatched.len()
    );
    let before = world.dispatched.len();
    assert!(before < 100, "the others wait");
    world.read(1);
    world.advance(300);
    assert!(world.was_dispatched(job));
    let since = world.dispatched.len() - before;
    assert!(since <= 4, "{since} jobs were dispatched");
}

#[test]
fn the_time_for_which_a_job_is_pinned_is_no_lateness() {
    let mut world = World::with_backlog();
    let job = world.schedule("app", 50, Some(1));
    world.read(1);
    world.advance(20);
    world.cancel_key(1);
    assert_eq!(world.copy(), Taken::Pins);
    world.abort();
    world.advance(1_000);
    world.read(1);
    let ended = world.now;
    let ready = loop {
        let batch = world.collect(50);
        let mut dispatched = world
            .turns
            .tallies
            .iter()
            .flat_map(|(_, tally)| &tally.dispatched);
        let ready = dispatched.next().map(|job| job.ready);
        world.commit(batch);
        if let Some(ready) = ready {
            break ready;
        }
        world.run(&Step::AdvanceClock(10));
        world.run(&Step::ServeIndex(3));
    };
    assert!(world.was_dispatched(job));
    assert_eq!(ready, ended);
}

#[test]
fn the_number_of_pins_is_bounded() {
    let mut shard = Shard::new(Arc::new(settings()), 0);
    let copy = |number: usize| UrgentCopy {
        names: NamedBy::Key(key_hash("app", &number.to_string())),
        original: 5,
    };
    for number in 0..MAX_PINS {
        assert_eq!(shard.take_copy(&copy(number)), Taken::Pins);
    }
    assert_eq!(shard.take_copy(&copy(MAX_PINS)), Taken::NoRoom);
    assert_eq!(shard.take_copy(&copy(7)), Taken::Pins, "one that is known");
    shard.reached_end(6);
    shard.end_pins(Timestamp::from_millis(START));
    let next = UrgentCopy {
        original: 6,
        ..copy(MAX_PINS)
    };
    assert_eq!(shard.take_copy(&next), Taken::Pins);
}

#[test]
fn only_copies_of_commands_that_name_a_job_of_the_shard_are_read() {
    let mut world = World::with_backlog();
    let job = world.schedule("app", 50, Some(1));
    world.cancel(job);
    world.cancel_key(1);
    world.reschedule(by_id(job), 100);
    world.cancel(JobId::new(world.now, 1, 7));
    let now = world.now;
    let read = |record: &Record| read_copy(record, &world.settings, now).map(|copy| copy.names);
    let copies: Vec<Record> = world.ingest.iter().map(|record| copy_of(record, now)).collect();
    let names: Vec<_> = copies.iter().map(read).collect();
    let (id, key) = (NamedBy::Id(job), NamedBy::Key(key_hash("app", "1")));
    assert_eq!(names, [None, Some(id), Some(key), Some(id), None]);
    let spoil = |change: &dyn Fn(&mut Record)| {
        let mut copy = copies[1].clone();
        change(&mut copy);
        read(&copy)
    };
    assert_eq!(spoil(&|_| ()), Some(id));
    assert_eq!(spoil(&|copy| copy.position.partition = 1), None);
    assert_eq!(spoil(&|copy| copy.value = Some(vec![0; 20_000].into())), None);
    assert_eq!(
        spoil(&|copy| copy.headers = world.ingest[1].headers.clone()),
        None
    );
    let of_another = Record {
        position: Position {
            topic: "other".into(),
            ..world.ingest[1].position.clone()
        },
        ..world.ingest[1].clone()
    };
    assert_eq!(read(&copy_of(&of_another, now)), None);
}

#[derive(Clone, Debug)]
enum Event {
    Schedule(Option<u8>, u16),
    Replace(Debounced),
    CancelKey(u8),
    CancelJob(usize),
    RescheduleJob(usize, u16),
    RescheduleKey(u8, u16),
    /// The transaction of the last command is aborted, if it was not read.
    Abort,
    /// The copy of one of the last commands is written, perhaps again.
    Copy(usize),
    Other(Other),
}

/// What happens besides commands.
#[derive(Clone, Debug)]
enum Other {
    ReadUrgent,
    Read(usize),
    Step(Step),
}

fn other() -> impl Strategy<Value = Other> {
    let step = prop_oneof![
        4 => (0_u16..60).prop_map(Step::AdvanceClock),
        6 => (1_usize..20, prop::bool::weighted(0.1)).prop_map(|(limit, is_lost)| Step::Turn { limit, is_lost }),
        6 => (1_u8..5).prop_map(Step::ServeIndex),
        1 => Just(Step::Restart),
    ];
    prop_oneof![
        3 => Just(Other::ReadUrgent),
        4 => (1_usize..6).prop_map(Other::Read),
        14 => step.prop_map(Other::Step),
    ]
}

fn command() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (proptest::option::of(0..KEYS), 0_u16..400).prop_map(|(key, ahead)| Event::Schedule(key, ahead)),
        4 => replacement().prop_map(|new| Event::Replace(Debounced { key: new.key % KEYS, ..new })),
        3 => (0..KEYS).prop_map(Event::CancelKey),
        2 => (0_usize..8).prop_map(Event::CancelJob),
        2 => (0_usize..8, 0_u16..400).prop_map(|(back, ahead)| Event::RescheduleJob(back, ahead)),
        1 => (0..KEYS, 0_u16..400).prop_map(|(key, ahead)| Event::RescheduleKey(key, ahead)),
        1 => Just(Event::Abort),
    ]
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        17 => command(),
        6 => (0_usize..4).prop_map(Event::Copy),
        21 => other().prop_map(Event::Other),
    ]
}

/// A world with a backlog, and the commands in it that name a job.
struct Run {
    world: World,
    jobs: Vec<JobId>,
    commands: Vec<i64>,
}

impl Run {
    fn new() -> Self {
        Self {
            world: World::with_backlog(),
            jobs: Vec::new(),
            commands: Vec::new(),
        }
    }

    fn apply(&mut self, event: Event) {
        let world = &mut self.world;
        match event {
            Event::Schedule(key, ahead) => return self.jobs.push(world.schedule("app", ahead, key)),
            Event::Replace(new) => return self.jobs.push(world.replace(&new)),
            Event::CancelKey(key) => drop(world.cancel_key(key)),
            Event::CancelJob(back) => match self.jobs.iter().rev().nth(back) {
                Some(id) => world.cancel(*id),
                None => return,
            },
            Event::RescheduleJob(back, ahead) => match self.jobs.iter().rev().nth(back) {
                Some(id) => world.reschedule(by_id(*id), ahead),
                None => return,
            },
            Event::RescheduleKey(key, ahead) => world.run(&Step::RescheduleKey(key, ahead)),
            Event::Abort => {
                if world.read_to < world.ingest.len() {
                    world.abort();
                }
                return;
            }
            Event::Copy(back) => {
                if let Some(offset) = self.commands.iter().rev().nth(back) {
                    world.write_copy(*offset);
                    if world.urgent.as_ref().unwrap().is_read {
                        world.take_last_copy();
                    }
                }
                return;
            }
            Event::Other(Other::ReadUrgent) => return world.read_urgent(),
            Event::Other(Other::Read(records)) => return world.read(records),
            Event::Other(Other::Step(step)) => return world.run(&step),
        }
        self.commands.push(world.last());
    }

    /// The shard reads all that is left.
    fn finish(mut self) -> World {
        self.world.read_urgent();
        self.world.may_feed = usize::MAX;
        self.world.feed();
        self.world.settle();
        self.world
    }
}

/// The same commands without copies, without a backlog, without restarts, and without a dispatch before the last one is decided.
fn plain(ingest: &[Record], aborted: &HashSet<i64>) -> World {
    let mut plain = World::new();
    plain.shard.set_pins_complete(false);
    plain.aborted = aborted.clone();
    for record in ingest {
        plain.now = record.timestamp.unwrap();
        let command = v1::JobCommand::decode(record.value.clone().unwrap()).unwrap();
        plain.send(command.command.unwrap());
        (0..4).for_each(|_| plain.serve_index());
        plain.turn(50, false);
    }
    plain.advance(100);
    assert!(plain.dispatched.is_empty());
    plain.shard.set_pins_complete(true);
    plain.settle();
    plain
}

/// What is left of each job, apart from when it was decided.
fn results(world: &World) -> BTreeMap<JobId, (JobState, u32, Timestamp, crate::job::RequestHash)> {
    let jobs = world.state.iter();
    jobs.map(|(id, job)| (*id, (job.state, job.revision, job.due, job.request_hash)))
        .collect()
}

fn outcomes(world: &World) -> BTreeMap<String, (v1::Outcome, Option<String>)> {
    let answers = world.answers.iter();
    answers
        .map(|(to, answer)| {
            let job = answer.job.as_ref().map(|job| job.id.clone());
            (to.clone(), (answer.outcome(), job))
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 400 } else { 4_000 }))]

    /// With any copies, no job is dispatched before a command whose copy was read, and all commands have the outcomes that they
    /// have in their order.
    #[test]
    fn pinned_jobs_wait_for_their_commands(events in proptest::collection::vec(event(), 1..120)) {
        let mut run = Run::new();
        events.into_iter().for_each(|event| run.apply(event));
        let world = run.finish();
        world.check();
        prop_assert_eq!(world.shard.pinned(), 0);
    }

    /// All commands are in a backlog with jobs that become due in it, and a copy of each was read before any of them. The result is as if
    /// no job had been due before the last command: a job that a later command names waits for it, whatever happens meanwhile.
    #[test]
    fn jobs_in_a_backlog_are_dispatched_as_if_they_were_due_behind_it(
        commands in proptest::collection::vec(command(), 1..30),
        others in proptest::collection::vec(other(), 1..150),
    ) {
        let mut run = Run::new();
        commands.into_iter().for_each(|command| run.apply(command));
        // A request that replaces a job has no copy, so each key is named at the end.
        (0..KEYS).for_each(|key| run.apply(Event::RescheduleKey(key, 300)));
        for original in run.commands.clone() {
            run.world.write_copy(original);
            run.world.take_last_copy();
        }
        let (ingest, aborted) = (run.world.ingest.clone(), run.world.aborted.clone());
        others.into_iter().for_each(|other| run.apply(Event::Other(other)));
        let world = run.finish();
        world.check();
        let plain = plain(&ingest, &aborted);
        prop_assert_eq!(outcomes(&world), outcomes(&plain));
        prop_assert_eq!(results(&world), results(&plain));
        prop_assert_eq!(world.shard.pinned(), 0);
    }
}
