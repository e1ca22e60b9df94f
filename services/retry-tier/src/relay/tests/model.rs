//! A model of a tier's topic: each record leaves once and never early, whatever happens.

use super::*;

/// A record of the tier's topic.
#[derive(Clone, Copy)]
struct Logged {
    /// Which record it is. A record that moves to the end of the topic keeps its number.
    number: usize,
    written: Timestamp,
    due: Timestamp,
}

/// An event of the model.
#[derive(Clone, Debug)]
enum Step {
    Write {
        ahead: u64,
    },
    AdvanceClock(u64),
    Turn {
        limit: usize,
        end: End,
    },
    /// The partition is revoked, and assigned again.
    Reassign,
    /// An operator pauses the tier, or lets it run.
    Pause(bool),
    /// An operator releases what waits now.
    Release,
}

/// How the transaction of a turn ends.
#[derive(Clone, Copy, Debug)]
enum End {
    Committed,
    /// Topics refuse all of its records, whose dead letters are committed.
    Refused,
    /// It is aborted, and the relay takes its records back.
    TakenBack,
    /// It is aborted, and the partition is read again.
    Dropped,
}

/// Multiples of 500 ms, and times 1 ms after them. So records are often due 1 ms after a turn.
fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0_u64..20, 0_u64..2).prop_map(|(half_seconds, more)| Step::Write { ahead: half_seconds * 500 + more }),
        1 => (0_u64..240).prop_map(|half_seconds| Step::Write { ahead: half_seconds * 500 }),
        3 => (0_u64..12).prop_map(|half_seconds| Step::AdvanceClock(half_seconds * 500)),
        4 => (1_usize..8).prop_map(|limit| Step::Turn { limit, end: End::Committed }),
        1 => (1_usize..8, prop::sample::select(vec![End::Refused, End::TakenBack, End::Dropped]))
            .prop_map(|(limit, end)| Step::Turn { limit, end }),
        1 => Just(Step::Reassign),
        1 => any::<bool>().prop_map(Step::Pause),
        1 => Just(Step::Release),
    ]
}

/// A tier's topic with one partition, what is committed, and the relay that owns the partition.
struct World {
    bench: Bench,
    generation: u32,
    now: Timestamp,
    log: Vec<Logged>,
    /// The number of records that the relay has read since its partition was assigned.
    read: usize,
    /// Completed offsets.
    completed: BTreeSet<usize>,
    /// Records that were released, or moved to another tier.
    left: BTreeSet<usize>,
    records: usize,
    is_paused: bool,
    /// Records before this offset do not wait.
    released_before: usize,
}

/// The topic of the world.
const TOPIC_ID: u128 = 7;

impl World {
    fn new(look_ahead: usize) -> Self {
        let mut bench = Bench::new(look_ahead);
        bench.reads(TOPIC_ID);
        Self {
            is_paused: false,
            released_before: 0,
            bench,
            // That of the first assignment.
            generation: 1,
            now: NOW,
            log: Vec::new(),
            read: 0,
            completed: BTreeSet::new(),
            left: BTreeSet::new(),
            records: 0,
        }
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Write { ahead } => {
                self.log.push(Logged {
                    number: self.records,
                    written: self.now,
                    due: self.now.after(Duration::from_millis(ahead)),
                });
                self.records += 1;
            }
            Step::AdvanceClock(millis) => {
                self.bench.clock.advance(Duration::from_millis(millis));
                self.now = self.bench.clock.now();
            }
            Step::Turn { limit, end } => self.turn(limit, end),
            Step::Reassign => self.reassign(),
            Step::Pause(is_paused) => {
                self.is_paused = is_paused;
                self.control();
            }
            Step::Release => {
                self.released_before = self.log.len();
                self.control();
            }
        }
        self.feed();
    }

    /// Tells the relay what operators want.
    fn control(&mut self) {
        let release = Release {
            topic: TopicId::from_bits(TOPIC_ID),
            ends: vec![i64::try_from(self.released_before).unwrap()],
            at: None,
        };
        let tier = TierControl {
            run: self.is_paused.then_some(Run::Paused),
            rate: None,
            release: Some(Arc::new(release)),
        };
        self.bench.want("tier/docs/5s", tier);
    }

    /// Whether a record need not wait any longer.
    fn may_leave(&self, offset: usize) -> bool {
        self.log[offset].due <= self.now || offset < self.released_before
    }

    fn feed(&mut self) {
        let Bench {
            relay, assignment, ..
        } = &mut self.bench;
        while self.read < self.log.len() && relay.capacity(*assignment) > 0 {
            let offset = self.read;
            self.read += 1;
            if self.completed.contains(&offset) {
                continue;
            }
            let Logged { number, written, due } = self.log[offset];
            let record = Record {
                position: Position {
                    topic: "docs-retry-5s".into(),
                    partition: 0,
                    offset: i64::try_from(offset).unwrap(),
                },
                timestamp: Some(written),
                key: Some(number.to_string().into()),
                value: Some("v".into()),
                headers: waiting_until(due),
                unreadable_headers: 0,
            };
            relay.accept(*assignment, record, self.now);
        }
    }

    /// The lane reads the partition again, without the records whose completion is committed.
    fn reassign(&mut self) {
        let Bench {
            relay, assignment, ..
        } = &mut self.bench;
        relay.revoked(*assignment);
        self.generation += 1;
        *assignment = AssignmentId::for_tests(0, self.generation);
        relay.assigned(*assignment, &"docs-retry-5s".into(), 0);
        relay.reads_topic(*assignment, Some(TopicId::from_bits(TOPIC_ID)));
        relay.follow_actions();
        self.read = 0;
    }

    fn turn(&mut self, limit: usize, end: End) {
        let mut batch = TransactionBatch::default();
        self.bench.relay.finish(self.now, limit, &mut batch);
        assert_eq!(batch.outputs.len(), batch.completed.len());
        match end {
            End::Committed => {}
            End::Refused => {
                let failure = Failure::permanent("output.too-large", "no");
                let refused: Vec<Refused> = (0..batch.outputs.len())
                    .map(|index| Refused {
                        index,
                        failure: failure.clone(),
                    })
                    .collect();
                assert!(self.bench.relay.refused(&refused, &mut batch, self.now));
            }
            End::TakenBack => {
                assert!(self.bench.relay.take_back(&mut batch));
                assert!(batch.outputs.is_empty() && batch.completed.is_empty());
                return;
            }
            End::Dropped => {
                self.bench.relay.aborted();
                return self.reassign();
            }
        }
        let is_full = batch.outputs.len() >= limit;
        assert!(
            !self.is_paused || batch.outputs.is_empty(),
            "a paused tier does nothing"
        );
        for (output, (assignment, offset)) in batch.outputs.into_iter().zip(batch.completed) {
            assert_eq!(assignment, self.bench.assignment);
            let offset = usize::try_from(offset).unwrap();
            let number: usize = std::str::from_utf8(&output.key.unwrap())
                .unwrap()
                .parse()
                .unwrap();
            let logged = self
                .log
                .get(offset)
                .copied()
                .filter(|logged| logged.number == number);
            let Logged { due, .. } = logged.expect("a record completes its own offset");
            assert!(self.completed.insert(offset), "{number} was completed twice");
            if matches!(end, End::Refused) {
                assert_eq!(&*output.topic, "docs-dlq");
                assert!(self.left.insert(number), "{number} left twice");
                continue;
            }
            match output.topic.strip_prefix("docs-retry-").unwrap() {
                "due" => {
                    assert!(self.may_leave(offset), "{number} was released early");
                    let stamped = due_of(&output.headers);
                    assert!(stamped <= due.min(self.now), "its reader would refuse {number}");
                    assert!(self.left.insert(number), "{number} left twice");
                }
                delay => {
                    let tier: HumanDuration = delay.parse().unwrap();
                    assert!(
                        self.now.after(tier.duration()) <= due,
                        "{number} would be late in {tier}"
                    );
                    if tier == TIER {
                        let written = self.now;
                        self.log.push(Logged { number, written, due });
                    } else {
                        assert!(self.left.insert(number), "{number} left twice");
                    }
                }
            }
        }
        self.bench.relay.committed(self.now);
        let mut in_memory = (0..self.read).filter(|offset| !self.completed.contains(offset));
        assert!(
            is_full || self.is_paused || in_memory.all(|offset| !self.may_leave(offset)),
            "a due record was not released"
        );
    }
}

proptest! {
    #[test]
    fn corrected_clock_steps_release_nothing_early(
        dues in proptest::collection::vec(0..120_000_u64, 1..50),
        errors in proptest::collection::vec((-10_000_000_i64..10_000_000, 1..4_000_u64), 0..40),
    ) {
        let mut bench = Bench::new(1_000);
        let at = |millis| NOW.after(Duration::from_millis(millis));
        for due in &dues {
            bench.accept(waiting_until(at(*due)));
        }
        let mut elapsed = 0;
        let mut released = 0;
        for (error, gap) in errors {
            for error in [error, 0] {
                bench.clock.set(Timestamp::from_millis(at(elapsed).as_millis() + error));
                let first = bench.finish_at_once();
                bench.clock.advance(Duration::from_millis(gap));
                elapsed += gap;
                let second = bench.finish_at_once();
                for (_, headers) in first.into_iter().chain(second) {
                    let due = due_of(&headers);
                    // The bound, and a tenth of the time between two readings.
                    prop_assert!(due <= at(elapsed).after(Duration::from_millis(2_400)), "{due} at {elapsed}");
                    released += 1;
                }
            }
        }
        released += bench.finish(at(elapsed + 120_000)).len();
        prop_assert_eq!(released, dues.len());
    }

    #[test]
    fn records_leave_once_never_early(look_ahead in 1_usize..6, steps in proptest::collection::vec(step(), 0..80)) {
        let mut world = World::new(look_ahead);
        for step in &steps {
            world.run(step);
        }
        world.run(&Step::Pause(false));
        for _ in 0..300 {
            world.run(&Step::AdvanceClock(1_000));
            world.run(&Step::Turn { limit: 10, end: End::Committed });
        }
        prop_assert_eq!(world.completed.len(), world.log.len());
        prop_assert_eq!(world.left.len(), world.records);
    }
}
