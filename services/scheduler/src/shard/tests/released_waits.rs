//! Releases of long waits before they are due.

use redeliver_service::control::value::Release;

use super::super::dispatch::DueAction;
use super::*;

/// Longer than a test.
const FAR: Duration = Duration::from_secs(86_400 * 30);
const RELEASED: usize = 30;
const LATER: usize = 5;

/// An operator has released the waits before this offset of the ingest topic with this id.
fn release(topic: TopicId, end: usize) -> AppStates {
    release_at(None, topic, end)
}

fn release_at(at: Option<Timestamp>, topic: TopicId, end: usize) -> AppStates {
    let release = Release {
        topic,
        ends: vec![i64::try_from(end).unwrap()],
        at,
    };
    AppStates {
        released_waits: [("docs".into(), Arc::new(release))].into(),
        ..AppStates::default()
    }
}

/// The release of the waits before this offset is finished.
fn finished(before: usize) -> FinishedRelease {
    FinishedRelease {
        topic: ingest_id(),
        before: i64::try_from(before).unwrap(),
    }
}

/// The offset of the command of a record that has come back.
fn offset_of(value: Option<&Bytes>) -> usize {
    std::str::from_utf8(value.unwrap()).unwrap().parse().unwrap()
}

impl World {
    /// A record waits until it is due. Its value is the offset of its command.
    pub(super) fn send_wait(&mut self, due: Timestamp) {
        let value = self.ingest.len().to_string();
        self.send(ProtoCommand::LongWait(v1::LongWait {
            pipeline: "docs".to_owned(),
            due: Some(to_timestamp(due)),
            value: Some(value.into()),
            ..v1::LongWait::default()
        }));
    }

    fn send_waits(&mut self, count: usize) {
        for _ in 0..count {
            self.send_wait(self.now.after(FAR));
        }
    }

    /// Runs turns until nothing happens any more; time stands still. The turns with these numbers are lost.
    pub(super) fn run_turns(&mut self, lost: &[usize]) {
        for turn in 0..60 {
            self.turn(7, lost.contains(&turn));
            for _ in 0..3 {
                self.serve_index();
            }
        }
    }

    fn serve_all(&mut self) {
        while !self.requests.is_empty() {
            self.serve_index();
        }
    }

    /// The values of the records that have come back, sorted.
    pub(super) fn returned(&self) -> Vec<usize> {
        let values = self.returned_waits.iter().map(|(value, at)| {
            assert_eq!(*at, self.now, "time stands still");
            offset_of(value.as_ref())
        });
        let mut values: Vec<usize> = values.collect();
        values.sort_unstable();
        values
    }
}

#[test]
fn release_dispatches_earlier_waits_once() {
    for lost in [&[][..], &[0], &[1, 2], &[3, 9], &[5, 6, 7, 20]] {
        // How much of it was read before.
        for read in [0, 10, RELEASED] {
            let mut world = World::new();
            world.may_feed = read;
            world.send_waits(RELEASED);
            world.run_turns(&[]);
            assert_eq!(world.returned(), [0; 0]);
            world.set_apps(release(ingest_id(), RELEASED));
            world.may_feed = usize::MAX;
            world.send_waits(LATER);
            world.run_turns(lost);
            let expected: Vec<usize> = (0..RELEASED).collect();
            assert_eq!(world.returned(), expected, "{lost:?} {read}");
            let jobs = world.state.values();
            let waiting: Vec<_> = jobs.filter(|job| job.state == JobState::Scheduled).collect();
            assert_eq!(waiting.len(), LATER);
            assert!(waiting.iter().all(|job| job.due == world.now.after(FAR)));
            // Of the next release, they are a part.
            world.set_apps(release(ingest_id(), RELEASED + LATER));
            world.run_turns(lost);
            assert_eq!(world.returned().len(), RELEASED + LATER, "{lost:?} {read}");
        }
    }
}

#[test]
fn foreign_release_releases_nothing() {
    let mut world = World::new();
    world.send_waits(RELEASED);
    let other = AppStates {
        released_waits: [(
            "mail".into(),
            release(ingest_id(), RELEASED).released_waits["docs"].clone(),
        )]
        .into(),
        ..AppStates::default()
    };
    for states in [release(TopicId::from_bits(8), RELEASED), other] {
        world.set_apps(states);
        world.run_turns(&[]);
        assert_eq!(world.returned(), [0; 0]);
    }
}

#[test]
fn later_release_restarts_the_scan() {
    let mut waits = ReleasedWaits::of_shard(0);
    waits.set_topic(Some(ingest_id()));
    waits.set_wanted(&release(ingest_id(), 3).released_waits);
    let request = |waits: &mut ReleasedWaits| waits.request(|_| true);
    let is_scan = |request: Option<IndexRequest>| matches!(request, Some(IndexRequest::ScanWaits(_)));
    let is_lookup = |request: Option<IndexRequest>| matches!(request, Some(IndexRequest::FinishedRelease(_)));
    assert!(is_lookup(request(&mut waits)));
    waits.looked_up(None);
    assert!(is_scan(request(&mut waits)) && request(&mut waits).is_none());
    waits.set_wanted(&release(ingest_id(), RELEASED).released_waits);
    // The last page of the scan for the previous release.
    assert!(waits.scanned(Scan::default()).is_empty());
    assert!(is_lookup(request(&mut waits)));
    // The previous release is finished, the new one is not.
    waits.looked_up(Some(finished(3)));
    assert!(is_scan(request(&mut waits)));
    assert!(waits.scanned(Scan::default()).is_empty());
    let finishing = request(&mut waits);
    assert!(
        matches!(finishing, Some(IndexRequest::FinishRelease(_, whole)) if whole == finished(RELEASED)),
        "{finishing:?}"
    );
    // Another release takes place before the index remembers that.
    waits.set_wanted(&release(ingest_id(), RELEASED + 1).released_waits);
    waits.finished();
    assert!(is_lookup(request(&mut waits)));
    waits.looked_up(Some(finished(RELEASED + 1)));
    assert!(request(&mut waits).is_none());
}

#[test]
fn next_owner_reads_no_finished_release() {
    let mut world = World::new();
    world.send_waits(RELEASED);
    world.run_turns(&[]);
    world.set_apps(release(ingest_id(), RELEASED));
    world.send_waits(LATER);
    world.run_turns(&[]);
    let expected: Vec<usize> = (0..RELEASED).collect();
    assert_eq!(world.returned(), expected);
    let scans = world.wait_scans;
    assert!(scans > 0);
    world.restart();
    world.run_turns(&[]);
    assert_eq!((world.returned(), world.wait_scans), (expected.clone(), scans));
    // A new index remembers nothing.
    world.finished_releases.clear();
    world.restart();
    world.run_turns(&[]);
    assert_eq!(world.returned(), expected);
    assert!(world.wait_scans > scans);
    // A later release is about others.
    world.set_apps(release(ingest_id(), RELEASED + LATER));
    world.run_turns(&[]);
    assert_eq!(world.returned().len(), RELEASED + LATER);
}

#[test]
fn next_owner_completes_the_release() {
    let mut world = World::new();
    world.may_feed = 10;
    world.send_waits(RELEASED);
    world.run_turns(&[]);
    world.set_apps(release(ingest_id(), RELEASED));
    world.run_turns(&[]);
    assert_eq!(world.returned(), (0..10).collect::<Vec<_>>());
    // The next owner reads the control topic a moment later.
    world.apps = Arc::default();
    world.may_feed = usize::MAX;
    world.restart();
    world.run_turns(&[]);
    assert_eq!(world.returned().len(), 10);
    world.set_apps(release(ingest_id(), RELEASED));
    world.run_turns(&[]);
    assert_eq!(world.returned(), (0..RELEASED).collect::<Vec<_>>());
}

#[test]
fn jobs_to_release_count_as_memory() {
    let mut world = World::new();
    world.send_waits(RELEASED);
    world.run_turns(&[]);
    assert!(world.is_overlay_empty());
    let before = world.shard.memory();
    world.set_apps(release(ingest_id(), RELEASED));
    world.feed();
    world.serve_all();
    let sizes: usize = world.state.values().map(Job::size).sum();
    assert_eq!(world.shard.memory(), before + sizes);
    world.run_turns(&[]);
    assert_eq!(world.shard.memory(), before);
}

#[test]
fn released_job_is_due_at_release() {
    let mut world = World::new();
    world.send_waits(1);
    world.run_turns(&[]);
    let job = world.state.values().next().unwrap();
    let (earlier, later) = (
        Timestamp::from_millis(START - 1_000),
        world.now.after(Duration::from_secs(1)),
    );
    // The clock of the scheduler, or that of the server that was asked, is ahead. An older server has not told the time.
    for (at, due) in [
        (Some(earlier), earlier),
        (Some(later), world.now),
        (None, world.now),
    ] {
        let mut waits = ReleasedWaits::of_shard(0);
        waits.set_topic(Some(ingest_id()));
        waits.set_wanted(&release_at(at, ingest_id(), 1).released_waits);
        let released = waits.released(job, world.now).unwrap();
        assert_eq!(released.due, due);
        let stamped = released.payload.headers.last(headers::PROCESS_AFTER).unwrap();
        assert_eq!(stamped, due.to_string().as_bytes());
        assert_eq!(waits.released(&released, world.now), None);
    }
}

#[test]
fn late_release_waits_for_missing_topic() {
    let mut world = World::new();
    world.send_waits(1);
    world.run_turns(&[]);
    let job = world.state.values().next().unwrap();
    let hour = Duration::from_secs(3_600);
    let now = world.now.after(hour);
    let mut waits = ReleasedWaits::of_shard(0);
    waits.set_topic(Some(ingest_id()));
    waits.set_wanted(&release_at(Some(world.now), ingest_id(), 1).released_waits);
    let released = waits.released(job, now).unwrap();
    let action = |job: &Job, at: Timestamp| {
        let missing = Presence::Missing { lasting: hour };
        world.settings.due_action(missing, &AppStates::default(), job, at)
    };
    assert_eq!(action(&released, now), DueAction::Block);
    assert_eq!(action(&released, now.after(TIMEOUT)), DueAction::DeadLetter);
    // After a step back of the clock, it does not wait until it is due.
    assert_eq!(released.due, world.now);
    // Another job with this due time has waited for so long.
    let due = Job {
        due: world.now,
        ..job.clone()
    };
    assert_eq!(action(&due, now), DueAction::DeadLetter);
}

#[derive(Clone, Debug)]
enum Event {
    /// A record of the pipeline waits.
    Wait {
        ahead: u16,
    },
    /// An operator releases what waits.
    Release,
    /// An operator acts on one of the waits, or on what is none.
    Act(usize, v1::LongWaitAction),
    Other(Step),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0_u16..2_000).prop_map(|ahead| Event::Wait { ahead }),
        1 => Just(Event::Release),
        2 => (0_usize..30, prop::sample::select(vec![v1::LongWaitAction::Retry, v1::LongWaitAction::Dead]))
            .prop_map(|(wait, action)| Event::Act(wait, action)),
        10 => step().prop_map(Event::Other),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn long_waits_are_dispatched_once(events in proptest::collection::vec(event(), 0..150)) {
        let mut world = World::new();
        let mut dues: HashMap<usize, Timestamp> = HashMap::new();
        let mut releases: Vec<(Timestamp, usize)> = Vec::new();
        // The offsets of the waits, when somebody has acted on them, and the keys of the answers.
        let mut acts: Vec<(usize, Timestamp, String)> = Vec::new();
        for event in events {
            match event {
                Event::Wait { ahead } => {
                    let due = world.now.after(Duration::from_millis(ahead.into()));
                    dues.insert(world.ingest.len(), due);
                    world.send_wait(due);
                }
                Event::Release => releases.push((world.now, world.ingest.len())),
                Event::Act(wait, action) => {
                    if let Some(id) = world.ids.get(wait).copied() {
                        acts.push((wait, world.now, world.act(id, action)));
                    }
                }
                Event::Other(step) => world.run(&step),
            }
            if let Some((at, end)) = releases.last() {
                let released_waits = release_at(Some(*at), ingest_id(), *end).released_waits;
                let states = AppStates { released_waits, ..(*world.apps).clone() };
                if states != *world.apps {
                    world.set_apps(states);
                }
            }
        }
        world.settle();
        world.check();
        let has_outcome = |answer: &String, outcome: v1::Outcome| world.answers[answer].outcome() == outcome;
        let mut given_up: Vec<usize> = acts
            .iter()
            .filter(|(_, _, answer)| has_outcome(answer, v1::Outcome::Dead))
            .map(|(wait, ..)| *wait)
            .collect();
        let dead = world.dead_long_waits.iter().map(|letter| offset_of(letter.value.as_ref()));
        let mut dead: Vec<usize> = dead.collect();
        given_up.sort_unstable();
        dead.sort_unstable();
        prop_assert_eq!(&dead, &given_up);
        let mut ended = HashSet::new();
        for wait in dead {
            prop_assert!(ended.insert(wait), "{} was given up twice", wait);
        }
        for (value, at) in &world.returned_waits {
            let offset = offset_of(value.as_ref());
            prop_assert!(ended.insert(offset), "{} has ended twice", offset);
            // Times of different clocks cannot be compared.
            let is_since = |since| since <= at || world.has_stepped;
            let is_released = releases.iter().any(|(since, end)| is_since(since) && offset < *end);
            let is_retried = acts.iter().any(|(wait, since, answer)| {
                *wait == offset && is_since(since) && has_outcome(answer, v1::Outcome::Rescheduled)
            });
            prop_assert!(
                *at >= dues[&offset] || is_released || is_retried,
                "{} was dispatched early",
                offset
            );
        }
        prop_assert_eq!(ended.len(), dues.len());
    }
}
