//! Copies of cancellations that overtake a backlog in the ingest topic.

use super::*;

const KEYS: u8 = 3;

impl World {
    /// From now on, the shard reads only as many records as it is told to.
    fn with_backlog() -> Self {
        let mut world = Self::new();
        world.may_feed = 0;
        world
    }

    fn read(&mut self, records: usize) {
        self.may_feed = records;
        self.feed();
        self.may_feed = 0;
    }

    fn cancel_key(&mut self, key: u8) -> i64 {
        self.send(ProtoCommand::Cancel(v1::CancelJob {
            app: "app".to_owned(),
            idempotency_key: key.to_string(),
            ..v1::CancelJob::default()
        }));
        self.last()
    }

    fn last(&self) -> i64 {
        i64::try_from(self.ingest.len()).unwrap() - 1
    }

    /// The shard gets the copy of the command at this offset.
    fn copy(&mut self, original: i64) -> bool {
        if self.shard.urgent_capacity() == 0 {
            return false;
        }
        let record = self.ingest[usize::try_from(original).unwrap()].clone();
        let is_accepted = self.shard.accept_urgent(record, self.now);
        self.requests.extend(self.shard.index_requests(self.now));
        is_accepted
    }

    /// Decides what the shard has accepted.
    fn decide_all(&mut self) {
        for _ in 0..4 {
            self.run(&Step::ServeIndex(9));
            self.turn(50, false);
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

#[test]
fn a_copy_cancels_a_job_before_the_backlog_is_read_and_the_original_is_not_answered_again() {
    for by_key in [true, false] {
        let mut world = World::with_backlog();
        let job = world.schedule("app", 5_000, Some(1));
        world.read(1);
        world.decide_all();
        for _ in 0..20 {
            world.schedule("other", 5_000, None);
        }
        if by_key {
            world.cancel_key(1);
        } else {
            world.cancel(job);
        }
        let original = world.last();
        assert!(world.copy(original));
        world.decide_all();
        assert_eq!(world.outcome(original), Some(v1::Outcome::Cancelled));
        assert_eq!(world.state_of(job), Some(JobState::Cancelled));
        assert!(!world.completed.contains(&original));
        world.read(21);
        world.decide_all();
        assert!(world.completed.contains(&original));
        assert_eq!(world.state_of(job), Some(JobState::Cancelled));
    }
}

#[test]
fn a_copy_that_overtakes_its_job_cancels_it_when_it_is_accepted() {
    for by_key in [true, false] {
        let mut world = World::with_backlog();
        world.schedule("other", 5_000, None);
        world.read(1);
        world.decide_all();
        // Due at once: without the copy, it would be dispatched.
        let job = world.schedule("app", 0, Some(1));
        if by_key {
            world.cancel_key(1);
        } else {
            world.cancel(job);
        }
        let original = world.last();
        assert!(world.copy(original));
        world.decide_all();
        assert_eq!(world.outcome(original), None);
        // The next job with the key comes after the cancellation.
        let replacement = Debounced {
            key: 1,
            ahead: 0,
            is_delayed: false,
            is_high: false,
            data: 1,
            request_id: Some(1),
        };
        let later = world.replace(&replacement);
        world.read(1);
        world.decide_all();
        assert_eq!(world.state_of(job), Some(JobState::Cancelled));
        assert_eq!(world.outcome(original), Some(v1::Outcome::Cancelled));
        world.read(2);
        world.decide_all();
        world.advance(300);
        assert!(world.dispatched.iter().all(|(id, _)| *id != job));
        assert!(world.dispatched.iter().any(|(id, _)| *id == later));
    }
}

#[test]
fn a_copy_never_affects_a_job_that_was_requested_after_its_original() {
    let mut world = World::with_backlog();
    world.schedule("app", 0, Some(1));
    let original = world.cancel_key(1);
    let replacement = Debounced {
        key: 1,
        ahead: 600,
        is_delayed: true,
        is_high: false,
        data: 1,
        request_id: None,
    };
    let later = world.replace(&replacement);
    // Before the shard has read anything, it does not know which originals have had their turn.
    assert!(!world.copy(original));
    world.read(3);
    world.decide_all();
    assert!(!world.copy(original), "the original has had its turn");
    world.decide_all();
    assert_eq!(world.state_of(later), Some(JobState::Scheduled));
}

#[test]
fn a_copy_of_the_cancellation_of_an_ended_job_is_answered_by_id_only() {
    let mut world = World::with_backlog();
    let job = world.schedule("app", 0, Some(1));
    world.read(1);
    world.decide_all();
    assert_eq!(world.state_of(job), Some(JobState::Dispatched));
    world.schedule("other", 5_000, None);
    world.cancel(job);
    let by_id = world.last();
    let by_key = world.cancel_key(1);
    assert!(world.copy(by_id) && world.copy(by_key));
    world.decide_all();
    assert_eq!(world.outcome(by_id), Some(v1::Outcome::AlreadyDispatched));
    assert_eq!(world.outcome(by_key), None);
    world.read(3);
    world.decide_all();
    assert_eq!(world.outcome(by_key), Some(v1::Outcome::AlreadyDispatched));
}

#[test]
fn only_cancellations_have_copies() {
    let mut world = World::with_backlog();
    let job = world.schedule("app", 5_000, Some(1));
    world.read(1);
    world.schedule("app", 5_000, None);
    assert!(!world.copy(1));
    world.reschedule(
        v1::RescheduleJob {
            id: job.to_string(),
            ..v1::RescheduleJob::default()
        },
        100,
    );
    assert!(!world.copy(2));
}

#[derive(Clone, Debug)]
enum Event {
    Schedule(u8, u16),
    Replace(Debounced),
    CancelKey(u8),
    CancelJob(usize),
    /// The copy of one of the last cancellations arrives, perhaps again.
    Copy(usize),
    Read(usize),
    Other(Step),
}

fn event() -> impl Strategy<Value = Event> {
    let other = prop_oneof![
        4 => (0_u16..120).prop_map(Step::AdvanceClock),
        6 => (1_usize..20, prop::bool::weighted(0.1)).prop_map(|(limit, is_lost)| Step::Turn { limit, is_lost }),
        6 => (1_u8..5).prop_map(Step::ServeIndex),
        1 => Just(Step::Restart),
    ];
    prop_oneof![
        4 => (0..KEYS, 0_u16..400).prop_map(|(key, ahead)| Event::Schedule(key, ahead)),
        4 => replacement().prop_map(|new| Event::Replace(Debounced { key: new.key % KEYS, ..new })),
        3 => (0..KEYS).prop_map(Event::CancelKey),
        2 => (0_usize..8).prop_map(Event::CancelJob),
        6 => (0_usize..4).prop_map(Event::Copy),
        4 => (1_usize..6).prop_map(Event::Read),
        14 => other.prop_map(Event::Other),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 400 } else { 4_000 }))]

    /// With any copies, a job that is answered as cancelled is never dispatched, no job is dispatched twice, and each cancelled
    /// job was named by a cancellation that came after its request, or another request took its place.
    #[test]
    fn copies_cancel_only_what_their_originals_name(events in proptest::collection::vec(event(), 1..120)) {
        let mut world = World::with_backlog();
        // What a cancellation names: a job or a key, by offset.
        let mut cancellations: BTreeMap<i64, Result<JobId, u8>> = BTreeMap::new();
        let mut replacements: HashSet<(u8, i64)> = HashSet::new();
        let mut jobs: BTreeMap<JobId, (u8, i64)> = BTreeMap::new();
        for event in events {
            match event {
                Event::Schedule(key, ahead) => {
                    let id = world.schedule("app", ahead, Some(key));
                    jobs.insert(id, (key, world.last()));
                }
                Event::Replace(new) => {
                    let id = world.replace(&new);
                    replacements.insert((new.key, world.last()));
                    jobs.insert(id, (new.key, world.last()));
                }
                Event::CancelKey(key) => drop(cancellations.insert(world.cancel_key(key), Err(key))),
                Event::CancelJob(back) => {
                    if let Some((id, _)) = jobs.iter().rev().nth(back) {
                        let id = *id;
                        world.cancel(id);
                        cancellations.insert(world.last(), Ok(id));
                    }
                }
                Event::Copy(back) => {
                    if let Some((offset, _)) = cancellations.iter().rev().nth(back) {
                        world.copy(*offset);
                    }
                }
                Event::Read(records) => world.read(records),
                Event::Other(step) => world.run(&step),
            }
        }
        world.may_feed = usize::MAX;
        world.feed();
        world.advance(2_000);
        prop_assert_eq!(world.completed.len(), world.ingest.len());
        let mut dispatched = HashSet::new();
        for (id, _) in &world.dispatched {
            prop_assert!(dispatched.insert(*id), "dispatched twice");
        }
        for (id, job) in &world.state {
            let (key, offset) = jobs[id];
            prop_assert_eq!(job.state == JobState::Dispatched, dispatched.contains(id));
            if job.state == JobState::Cancelled {
                let is_named = cancellations.iter().any(|(at, named)| *at > offset && match named {
                    Ok(named) => named == id,
                    Err(named) => *named == key,
                });
                let is_superseded = replacements.iter().any(|(named, at)| *named == key && *at > offset);
                prop_assert!(is_named || is_superseded, "cancelled without a reason: {id}");
            }
        }
        for (offset, named) in &cancellations {
            let answer = &world.answers[&offset.to_string()];
            if answer.outcome() == v1::Outcome::Cancelled {
                let id: JobId = answer.job.as_ref().unwrap().id.parse().unwrap();
                prop_assert!(!dispatched.contains(&id), "dispatched after a cancellation");
                prop_assert_eq!(world.state_of(id), Some(JobState::Cancelled));
                prop_assert!(jobs[&id].1 < *offset, "a later job: {named:?}");
            }
        }
    }
}
