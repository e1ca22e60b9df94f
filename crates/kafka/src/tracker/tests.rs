use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use redeliver_kafka_ffi::TopicId;

use super::*;

/// A tracker that begins at 0 with these offsets in flight.
fn in_flight(offsets: impl IntoIterator<Item = i64>) -> OffsetTracker {
    let mut tracker = OffsetTracker::new(Committed::at(0), None);
    for offset in offsets {
        assert!(tracker.may_admit(), "{offset}");
        assert_eq!(tracker.observe(offset), Admission::New);
    }
    tracker
}

fn restart(position: &CommitPosition) -> OffsetTracker {
    restart_in(position, None)
}

fn restart_in(position: &CommitPosition, topic: Option<TopicFingerprint>) -> OffsetTracker {
    let committed = Committed::decode(position.offset, &position.metadata).unwrap();
    assert!(!committed.is_of_another(topic));
    OffsetTracker::new(committed, topic)
}

fn topic(bits: u128) -> Option<TopicFingerprint> {
    Some(TopicFingerprint::of(TopicId::from_bits(bits)))
}

#[test]
fn commit_of_earlier_topic_is_recognised() {
    let mut tracker = OffsetTracker::new(Committed::at(0), topic(1 << 100));
    tracker.observe(0);
    tracker.complete(0);
    let position = tracker.commit_position().unwrap();
    let committed = Committed::decode(position.offset, &position.metadata).unwrap();
    assert!(!committed.is_of_another(topic(1 << 100)));
    assert!(committed.is_of_another(topic(1 << 101)));
    // Without a fingerprint or a topic id, nothing is certain.
    assert!(!committed.is_of_another(None));
    assert!(!Committed::at(1).is_of_another(topic(1 << 101)));
    let beginning = OffsetTracker::new(Committed::start(), topic(1 << 100)).position_or_beginning();
    let committed = Committed::decode(beginning.offset, &beginning.metadata).unwrap();
    assert_eq!(
        (committed.offset, committed.is_of_another(topic(1 << 101))),
        (0, true)
    );
}

fn completed(position: &CommitPosition) -> Vec<(i64, i64)> {
    let completed = Committed::decode(position.offset, &position.metadata)
        .unwrap()
        .completed;
    completed
        .ranges()
        .iter()
        .map(|range| (range.start, range.end))
        .collect()
}

#[test]
fn uncommitted_partition_begins_at_first_offset() {
    let mut tracker = OffsetTracker::new(Committed::start(), None);
    assert_eq!((tracker.current_position(), tracker.position()), (None, None));
    assert_eq!(tracker.observe(1_000_000_000_000), Admission::New);
    assert_eq!(tracker.current_position().unwrap().offset, 1_000_000_000_000);
    assert!(tracker.complete(1_000_000_000_000));
    assert_eq!(tracker.current_position().unwrap().offset, 1_000_000_000_001);
}

#[test]
fn position_is_returned_until_committed() {
    let mut tracker = OffsetTracker::new(Committed::at(5), None);
    assert_eq!(tracker.commit_position(), None);
    assert_eq!(tracker.current_position().unwrap().offset, 5);
    tracker.observe(5);
    assert_eq!(tracker.commit_position(), None);
    tracker.complete(5);
    let position = tracker.commit_position().unwrap();
    assert_eq!(tracker.commit_position().as_ref(), Some(&position));
    tracker.observe(6);
    tracker.complete(6);
    tracker.mark_committed(&position);
    assert_eq!(tracker.commit_position().unwrap().offset, 7);
}

#[test]
fn record_is_completed_once() {
    let mut tracker = in_flight([1, 2, 5, 6]);
    for unknown in [i64::MIN, 0, 3, 4, 7, i64::MAX] {
        assert!(!tracker.complete(unknown), "{unknown}");
    }
    assert!(tracker.complete(5));
    assert!(!tracker.complete(5));
    assert!(tracker.complete(1));
    assert!(!tracker.complete(1));
    assert_eq!(tracker.in_flight(), 2);
}

#[test]
fn offsets_below_the_position_are_stale() {
    let mut tracker = in_flight([1, 2]);
    assert_eq!(tracker.observe(2), Admission::Stale);
    assert_eq!(tracker.observe(0), Admission::Stale);
    assert_eq!(tracker.in_flight(), 2);
    assert_eq!(
        OffsetTracker::new(Committed::at(9), None).observe(8),
        Admission::Stale
    );
}

#[test]
fn restored_offsets_survive_a_commit() {
    let mut tracker = in_flight(0..10);
    for offset in [2, 3, 7] {
        tracker.complete(offset);
    }
    let mut tracker = restart(&tracker.current_position().unwrap());
    assert_eq!(tracker.commit_position(), None);
    assert_eq!(tracker.observe(0), Admission::New);
    tracker.complete(0);
    let position = tracker.commit_position().unwrap();
    assert_eq!((position.offset, completed(&position)), (1, vec![(2, 4), (7, 8)]));

    let mut tracker = restart(&position);
    let admissions: Vec<_> = (1..9).map(|offset| tracker.observe(offset)).collect();
    let (new, already) = (Admission::New, Admission::AlreadyCompleted);
    assert_eq!(admissions, [new, already, already, new, new, new, already, new]);
    assert!(!tracker.complete(2), "it was never admitted");
    tracker.complete(1);
    let position = tracker.current_position().unwrap();
    assert_eq!((position.offset, completed(&position)), (4, vec![(7, 8)]));
}

#[test]
fn incomplete_record_blocks_no_others() {
    let mut tracker = in_flight([0]);
    for offset in 1..200_000 {
        assert!(tracker.may_admit());
        assert_eq!(tracker.observe(offset), Admission::New);
        if offset >= 16 {
            assert!(tracker.complete(offset - 15));
        }
        let blocked = offset - 15 >= 150;
        assert_eq!(tracker.blocked_by(), blocked.then_some(0), "{offset}");
    }
    let position = tracker.current_position().unwrap();
    assert_eq!((position.offset, completed(&position)), (0, vec![(1, 199_985)]));
    assert!(position.metadata.len() < 16 && tracker.queue.len() < 64);
}

#[test]
fn full_tracker_admits_nothing() {
    let mut tracker = OffsetTracker::new(Committed::at(0), None);
    let mut end = 0;
    while tracker.may_admit() {
        assert_eq!(tracker.observe(end), Admission::New);
        end += 1;
    }
    assert!((16_384..24_552).contains(&end), "{end}");
    for odd in (1..end).step_by(2) {
        tracker.complete(odd);
    }
    assert!(tracker.current_position().unwrap().metadata.len() <= METADATA_LIMIT);
    assert!(!tracker.may_admit(), "every second record still takes up bits");
    for even in (0..1_000).step_by(2) {
        tracker.complete(even);
    }
    assert!(tracker.may_admit());
    assert_eq!(tracker.observe(1 << 50), Admission::New);
}

#[test]
#[should_panic(expected = "was read although the tracker is full")]
fn observing_with_full_tracker_panics() {
    let mut tracker = OffsetTracker::new(Committed::at(0), None);
    (0..30_000).for_each(|offset| {
        tracker.observe(offset);
    });
}

#[test]
fn tracker_continues_from_full_commit() {
    let mut tracker = OffsetTracker::new(Committed::at(0), None);
    let mut log = Vec::new();
    while tracker.may_admit() {
        let offset = 2 * i64::try_from(log.len()).unwrap();
        assert_eq!(tracker.observe(offset), Admission::New);
        log.push(offset);
    }
    // If the log has lost restored records, those after them are admitted up to the limit.
    tracker.restored.push_back(OffsetRange {
        start: i64::MAX - 1,
        end: i64::MAX,
    });
    for _ in 0..75 {
        let offset = log.last().unwrap() + 2;
        assert_eq!(tracker.observe(offset), Admission::New);
        log.push(offset);
    }
    tracker.restored.clear();
    tracker.complete(*log.last().unwrap());
    let mut tracker = restart(&tracker.current_position().unwrap());
    assert!(!tracker.restored_leaves_room);
    for offset in log.iter().copied().chain([1 << 40]) {
        assert!(tracker.may_admit());
        match tracker.observe(offset) {
            Admission::New => assert!(tracker.complete(offset)),
            other => assert_eq!(other, Admission::AlreadyCompleted),
        }
    }
    assert_eq!(tracker.current_position().unwrap().offset, (1 << 40) + 1);
}

/// A partition and its durable state, with sets instead of encodings.
struct Model {
    /// The offsets of all records, ascending.
    log: Vec<i64>,
    tracker: OffsetTracker,
    /// The index of the next record to deliver.
    next: usize,
    pending: BTreeSet<i64>,
    /// Completed since the last commit. A restart loses them.
    uncommitted: BTreeSet<i64>,
    /// How often the completion of each offset was committed.
    durable: BTreeMap<i64, u32>,
    stored: Option<CommitPosition>,
}

#[derive(Clone, Debug)]
enum Step {
    /// Read at most this many records.
    Admit(usize),
    /// Complete every n-th record in flight.
    Complete {
        every: usize,
        from: usize,
    },
    CompleteOne(usize),
    Commit,
    /// A record completes while the transaction with the position is written.
    CommitMeanwhile(usize),
    Restart,
    /// Retention or compaction removes an incomplete record, then a restart.
    Remove(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1usize..30).prop_map(Step::Admit),
        2 => (1_000usize..30_000).prop_map(Step::Admit),
        3 => (1usize..9, 0usize..9).prop_map(|(every, from)| Step::Complete { every, from }),
        4 => any::<usize>().prop_map(Step::CompleteOne),
        3 => Just(Step::Commit),
        2 => any::<usize>().prop_map(Step::CommitMeanwhile),
        2 => Just(Step::Restart),
        1 => any::<usize>().prop_map(Step::Remove),
    ]
}

/// The offsets of a log: stretches with distances of one kind each.
fn log() -> impl Strategy<Value = Vec<i64>> {
    let kind = prop_oneof![
        4 => Just(1i64..2),
        2 => Just(1i64..4),
        1 => Just(30i64..140),
        1 => Just(1i64..100_000),
        1 => Just(1i64 << 20..1i64 << 40),
    ];
    let stretch = (kind, prop_oneof![1usize..50, 100usize..12_000], any::<u64>());
    (0i64..1 << 40, prop::collection::vec(stretch, 1..6)).prop_map(|(start, stretches)| {
        let mut offsets = vec![start];
        for (distances, length, seed) in stretches {
            let mut random = seed | 1;
            for _ in 0..length {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let spread = (distances.end - distances.start).unsigned_abs();
                let distance = distances.start.checked_add_unsigned(random % spread).unwrap();
                offsets.push(offsets.last().unwrap() + distance);
            }
        }
        offsets
    })
}

impl Model {
    fn new(log: Vec<i64>) -> Self {
        Self {
            log,
            tracker: OffsetTracker::new(Committed::start(), topic(1 << 100)),
            next: 0,
            pending: BTreeSet::new(),
            uncommitted: BTreeSet::new(),
            durable: BTreeMap::new(),
            stored: None,
        }
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Admit(count) => (0..count).for_each(|_| self.admit()),
            Step::Complete { every, from } => {
                let chosen: Vec<_> = self.pending.iter().copied().skip(from).step_by(every).collect();
                chosen.into_iter().for_each(|offset| self.complete(offset));
            }
            Step::CompleteOne(index) => self.complete_one(index),
            Step::Commit => self.commit(None),
            Step::CommitMeanwhile(index) => self.commit(Some(index)),
            Step::Restart => self.restart(),
            Step::Remove(index) => {
                let index = index % self.log.len();
                if !self.durable.contains_key(&self.log[index]) && self.log.len() > 1 {
                    self.log.remove(index);
                }
                self.restart();
            }
        }
        self.check();
    }

    fn admit(&mut self) {
        if self.next == self.log.len() || !self.tracker.may_admit() {
            return;
        }
        let offset = self.log[self.next];
        self.next += 1;
        match self.tracker.observe(offset) {
            Admission::New => assert!(self.pending.insert(offset)),
            Admission::AlreadyCompleted => {
                assert!(self.durable.contains_key(&offset), "{offset} is incomplete");
            }
            Admission::Stale => panic!("{offset} is stale"),
        }
    }

    fn complete(&mut self, offset: i64) {
        assert!(self.tracker.complete(offset));
        assert!(self.pending.remove(&offset));
        assert!(self.uncommitted.insert(offset));
    }

    fn complete_one(&mut self, index: usize) {
        if !self.pending.is_empty() {
            let chosen = *self.pending.iter().nth(index % self.pending.len()).unwrap();
            self.complete(chosen);
        }
    }

    /// Commits the position. The record at the index completes too late for this commit.
    fn commit(&mut self, meanwhile: Option<usize>) {
        let position = self.tracker.commit_position();
        let committed = std::mem::take(&mut self.uncommitted);
        assert!(
            position.is_some() || committed.is_empty(),
            "completions without a new position"
        );
        if let Some(index) = meanwhile {
            self.complete_one(index);
        }
        if let Some(position) = position {
            self.tracker.mark_committed(&position);
            assert_eq!(
                self.tracker.commit_position().is_none(),
                self.uncommitted.is_empty()
            );
            self.stored = Some(position);
        }
        for offset in committed {
            *self.durable.entry(offset).or_default() += 1;
        }
    }

    fn restart(&mut self) {
        self.pending.clear();
        self.uncommitted.clear();
        match &self.stored {
            Some(stored) => {
                self.tracker = restart_in(stored, topic(1 << 100));
                self.next = self.log.partition_point(|offset| *offset < stored.offset);
            }
            None => {
                self.tracker = OffsetTracker::new(Committed::start(), topic(1 << 100));
                self.next = 0;
            }
        }
        assert_eq!(self.tracker.commit_position(), None);
    }

    /// Compares the tracker, and the position that it would commit, with the sets.
    fn check(&self) {
        assert_eq!(self.tracker.in_flight(), self.pending.len());
        assert_eq!(self.tracker.lowest_incomplete(), self.pending.first().copied());
        let Some(position) = self.tracker.current_position() else {
            return;
        };
        assert!(
            position.metadata.len() <= METADATA_LIMIT,
            "{} bytes",
            position.metadata.len()
        );
        assert!(position.metadata.bytes().all(|byte| byte.is_ascii_graphic()));
        if let Some(lowest) = self.pending.first() {
            assert!(position.offset <= *lowest);
        }
        let completed = Committed::decode(position.offset, &position.metadata)
            .unwrap()
            .completed;
        for offset in &self.log {
            let expected = self.durable.contains_key(offset) || self.uncommitted.contains(offset);
            let is_completed = *offset < position.offset || completed.contains(*offset);
            assert_eq!(is_completed, expected, "{offset} with {position:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn offsets_are_completed_exactly_once(
        log in log(),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let mut model = Model::new(log);
        for step in &steps {
            model.run(step);
        }
        model.run(&Step::Commit);
        while model.next < model.log.len() || !model.pending.is_empty() {
            model.run(&Step::Admit(5_000));
            model.run(&Step::Complete { every: 1, from: 0 });
            model.run(&Step::Commit);
        }
        for offset in &model.log {
            prop_assert_eq!(model.durable.get(offset), Some(&1), "{}", offset);
        }
    }
}
