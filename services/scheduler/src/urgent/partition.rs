//! What the reader knows of one partition of the urgent topic. No IO.
//!
//! A copy whose original is behind the known end of the ingest topic waits until that end was asked for again: an original is
//! acknowledged before its copy is written, so a copy that was read before the question and names an offset behind the answer is made up.
//! Each partition waits for its own answers only.

use std::time::{Duration, Instant};

use redeliver_core::mutant;
use redeliver_core::wait::Backoff;
use redeliver_kafka::follow::Begin;

use super::inbox::{Pushed, UrgentCopies};
use crate::metrics::UrgentMetrics;
use crate::shard::UrgentCopy;

/// The maximum number of copies of a partition that were read and not passed on.
pub(super) const MAX_WAITING: usize = 1_000;
/// How many copies of a partition are read at a take-over, from the end. A shard has room for a tenth of them.
const MAX_TAKEN_OVER: i64 = 100_000;
/// How often the reader compares its position with the end of the partition. If it is behind that twice at the same position, the client
/// is stuck: after a restart of the broker, a fetch may hang forever.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// What is asked about a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Question {
    /// The end of the ingest topic, behind which no original exists.
    Originals,
    /// The end of the urgent topic, up to which the copies are to be read.
    Copies,
}

/// A partition of the urgent topic.
pub(super) struct Partition {
    /// Copies of originals that exist, while there is no room for them in the inbox.
    known: Vec<UrgentCopy>,
    /// Copies that were read before the end of the ingest topic was asked for. The answer has not come.
    asked: Vec<UrgentCopy>,
    /// Copies that were read since.
    unknown: Vec<UrgentCopy>,
    /// Where the ingest topic ended when that was last asked for.
    end: i64,
    /// Where to read on.
    next: Begin,
    /// The partition was read to its end, and nothing has failed since.
    is_at_end: bool,
    /// The number of the question that was asked last, until its answer comes.
    open_question: Option<u64>,
    /// The last question was not answered: the next one waits until this time.
    unanswered: Option<Instant>,
    /// The delays between questions that are not answered.
    question_delays: Backoff,
    next_check: Instant,
    /// The position at the last check, if the partition was not read to its end.
    behind_at: Option<Begin>,
    /// When the partition is to be followed from where it was read to.
    start: Option<Instant>,
    start_delays: Backoff,
}

fn delays() -> Backoff {
    Backoff::new(Duration::from_millis(200), Duration::from_secs(10))
}

impl Partition {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            known: Vec::new(),
            asked: Vec::new(),
            unknown: Vec::new(),
            end: 0,
            next: Begin::Last(MAX_TAKEN_OVER),
            is_at_end: false,
            open_question: None,
            unanswered: None,
            question_delays: delays(),
            next_check: now + CHECK_INTERVAL,
            behind_at: None,
            start: Some(now),
            start_delays: delays(),
        }
    }

    /// A record was read. It may be no copy.
    pub(super) fn read(&mut self, offset: i64, copy: Option<UrgentCopy>) {
        self.reached(offset + 1);
        if let Some(copy) = copy {
            self.list_of(&copy).push(copy);
        }
    }

    /// The end of the partition was reached.
    pub(super) fn end(&mut self, offset: i64) {
        self.reached(offset);
        self.is_at_end = true;
    }

    fn reached(&mut self, next: i64) {
        self.next = Begin::At(next);
        self.start = None;
        self.start_delays.reset();
    }

    fn list_of(&mut self, copy: &UrgentCopy) -> &mut Vec<UrgentCopy> {
        match copy.original < self.end {
            true => &mut self.known,
            false => &mut self.unknown,
        }
    }

    /// The broker refuses to return records, possibly only for a moment.
    pub(super) fn refused(&mut self, now: Instant) {
        self.is_at_end = false;
        let delay = self.start_delays.next_delay();
        self.start.get_or_insert(now + delay);
    }

    /// Where to follow the partition from, if that is to be done now.
    pub(super) fn take_start(&mut self, now: Instant) -> Option<Begin> {
        self.start.take_if(|at| *at <= now).map(|_| self.next)
    }

    /// Whether no more copies are to be read before others are passed on.
    pub(super) fn is_full(&self) -> bool {
        self.waiting() >= MAX_WAITING
    }

    fn waiting(&self) -> usize {
        self.known.len() + self.asked.len() + self.unknown.len()
    }

    /// Whether the last question was not answered.
    pub(super) fn is_unanswered(&self) -> bool {
        self.unanswered.is_some()
    }

    pub(super) fn is_asking(&self) -> bool {
        self.open_question.is_some()
    }

    /// What is to be asked now, under this number.
    pub(super) fn ask(&mut self, number: u64, now: Instant) -> Option<Question> {
        if self.is_asking() || self.unanswered.is_some_and(|next| now < next) {
            return None;
        }
        let question = if !self.unknown.is_empty() {
            self.asked = std::mem::take(&mut self.unknown);
            Question::Originals
        } else if now >= self.next_check {
            Question::Copies
        } else {
            return None;
        };
        self.open_question = Some(number);
        Some(question)
    }

    /// Takes the answer to a question; `None` if it is not known. Returns how many copies name originals that do not exist.
    pub(super) fn answered(
        &mut self,
        number: u64,
        question: Question,
        end: Option<i64>,
        now: Instant,
    ) -> usize {
        // The partition may have been assigned again since.
        if self.open_question != Some(number) {
            return 0;
        }
        self.open_question = None;
        match end {
            Some(_) => {
                self.unanswered = None;
                self.question_delays.reset();
            }
            None => self.unanswered = Some(now + self.question_delays.next_delay()),
        }
        match question {
            Question::Originals => self.sort_out(end),
            Question::Copies => {
                self.check(end, now);
                0
            }
        }
    }

    fn sort_out(&mut self, end: Option<i64>) -> usize {
        let mut asked = std::mem::take(&mut self.asked);
        let Some(end) = end else {
            asked.append(&mut self.unknown);
            self.unknown = asked;
            return 0;
        };
        self.end = end;
        let read = asked.len();
        asked.retain(|copy| copy.original < end || mutant!("urgent-trusts-made-up-offsets"));
        let made_up = read - asked.len();
        self.known.append(&mut asked);
        for copy in std::mem::take(&mut self.unknown) {
            self.list_of(&copy).push(copy);
        }
        made_up
    }

    /// Compares the position with the end of the partition.
    fn check(&mut self, end: Option<i64>, now: Instant) {
        self.next_check = now + CHECK_INTERVAL;
        let Some(end) = end else {
            self.is_at_end = false;
            return;
        };
        if matches!(self.next, Begin::At(next) if next >= end) {
            self.is_at_end = true;
            self.behind_at = None;
        } else if self.is_full() {
            self.behind_at = None;
        } else if self.behind_at.replace(self.next) == Some(self.next) {
            self.is_at_end = false;
            self.start = Some(now);
        }
    }

    /// Passes on what there is room for. Returns whether the shard has something to take.
    pub(super) fn pass_on(&mut self, shard: i32, copies: &UrgentCopies, metrics: &UrgentMetrics) -> bool {
        let mut is_new = false;
        let mut passed_on = 0;
        for copy in &self.known {
            match copies.push(shard, *copy) {
                Pushed::Added => is_new = true,
                Pushed::Merged => drop(metrics.pins.inc()),
                Pushed::Late => drop(metrics.late.inc()),
                Pushed::Outdated => {}
                Pushed::Full => break,
            }
            passed_on += 1;
        }
        self.known.drain(..passed_on);
        is_new
            | self
                .are_all_passed_on()
                .is_some_and(|all| copies.set_current(shard, all))
    }

    /// Whether the shard has all copies that the partition contains. `None` while some are on their way.
    fn are_all_passed_on(&self) -> Option<bool> {
        if !self.is_at_end || !self.unknown.is_empty() && self.is_unanswered() {
            return Some(false);
        }
        (self.waiting() == 0).then_some(true)
    }
}

#[cfg(test)]
mod tests {
    use redeliver_kafka::{AssignmentId, Waker};

    use super::super::inbox::MAX_NAMES;
    use super::*;
    use crate::shard::NamedBy;

    const SHARD: i32 = 3;
    const DELAY: Duration = Duration::from_secs(10);

    /// A partition, and the inbox of its shard.
    struct Bench {
        copies: std::sync::Arc<UrgentCopies>,
        assignment: AssignmentId,
        metrics: UrgentMetrics,
        partition: Partition,
        now: Instant,
        /// The next offset of the urgent topic.
        next: i64,
        /// The number of the last question.
        number: u64,
    }

    impl Bench {
        fn new() -> Self {
            let copies = UrgentCopies::new("urgent".into(), Waker::new());
            let assignment = AssignmentId::for_tests(0, 1);
            copies.assigned(assignment, SHARD);
            copies.begin();
            let now = Instant::now();
            Self {
                copies,
                assignment,
                metrics: UrgentMetrics::default(),
                partition: Partition::new(now),
                now,
                next: 0,
                number: 0,
            }
        }

        fn read(&mut self, name: u16, original: i64) {
            let mut key = [7; 16];
            key[..2].copy_from_slice(&name.to_be_bytes());
            let names = NamedBy::Key(key);
            self.partition
                .read(self.next, Some(UrgentCopy { names, original }));
            self.next += 1;
        }

        fn end(&mut self) {
            self.partition.end(self.next);
        }

        fn ask(&mut self) -> Option<Question> {
            self.number += 1;
            self.partition.ask(self.number, self.now)
        }

        fn answer(&mut self, question: Question, end: Option<i64>) -> usize {
            self.partition.answered(self.number, question, end, self.now)
        }

        /// Asks for the end of the ingest topic, which must be necessary.
        fn originals_end_at(&mut self, end: Option<i64>) -> usize {
            assert_eq!(self.ask(), Some(Question::Originals));
            self.answer(Question::Originals, end)
        }

        fn pass_on(&mut self) -> bool {
            self.partition.pass_on(SHARD, &self.copies, &self.metrics)
        }

        fn taken(&mut self) -> Vec<i64> {
            self.pass_on();
            let copies = self.copies.take(self.assignment, SHARD, 0, true).copies;
            let mut originals: Vec<i64> = copies.iter().map(|copy| copy.original).collect();
            originals.sort_unstable();
            originals
        }

        fn may_dispatch(&mut self) -> bool {
            self.pass_on();
            self.copies.take(self.assignment, SHARD, 0, true).may_dispatch
        }

        /// Whether the shard dispatches jobs although copies are missing.
        fn is_unprotected(&mut self) -> bool {
            self.pass_on();
            self.copies.note_progress(self.now);
            self.copies.unprotected(self.now) > 0
        }

        /// The time of the next check of the progress.
        fn check(&mut self, end: Option<i64>) {
            self.now += CHECK_INTERVAL;
            assert_eq!(self.ask(), Some(Question::Copies));
            self.answer(Question::Copies, end);
        }
    }

    #[test]
    fn copies_of_offsets_that_do_not_exist_pin_nothing() {
        let mut bench = Bench::new();
        bench.read(1, 9);
        bench.read(2, 10);
        bench.read(3, i64::MAX);
        assert_eq!(bench.originals_end_at(Some(10)), 2);
        assert_eq!(bench.taken(), [9]);
        // The end is asked for only if an original is behind the known one.
        bench.read(1, 8);
        assert_eq!(bench.ask(), None);
        bench.read(2, 10);
        assert_eq!(bench.originals_end_at(Some(20)), 0);
        assert_eq!(bench.taken(), [8, 10]);
    }

    #[test]
    fn a_copy_that_is_read_after_the_question_waits_for_the_next_one() {
        let mut bench = Bench::new();
        bench.read(1, 9);
        assert_eq!(bench.ask(), Some(Question::Originals));
        bench.read(2, 10);
        bench.read(3, 8);
        assert_eq!(bench.answer(Question::Originals, Some(10)), 0);
        assert_eq!(bench.taken(), [8, 9]);
        assert_eq!(bench.originals_end_at(Some(11)), 0);
        assert_eq!(bench.taken(), [10]);
    }

    #[test]
    fn an_answer_for_a_former_assignment_counts_for_nothing() {
        let mut bench = Bench::new();
        bench.read(1, 9);
        assert_eq!(bench.ask(), Some(Question::Originals));
        let former = bench.number;
        bench.partition = Partition::new(bench.now);
        bench.read(2, 10);
        assert_eq!(bench.ask(), Some(Question::Originals));
        let answered = |bench: &mut Bench, number| {
            bench
                .partition
                .answered(number, Question::Originals, Some(10), bench.now)
        };
        assert_eq!(answered(&mut bench, former), 0);
        assert_eq!(bench.answer(Question::Originals, Some(11)), 0);
        assert_eq!(bench.taken(), [10]);
    }

    #[test]
    fn copies_and_the_end_behind_them_wait_until_the_end_of_the_ingest_topic_is_known() {
        let mut bench = Bench::new();
        bench.read(1, 9);
        bench.end();
        assert_eq!(bench.originals_end_at(None), 0);
        assert!(!bench.may_dispatch());
        assert_eq!(bench.ask(), None, "not again at once");
        bench.now += DELAY;
        assert_eq!(bench.originals_end_at(Some(10)), 0);
        assert!(bench.pass_on());
        let delivery = bench.copies.take(bench.assignment, SHARD, 0, true);
        assert_eq!((delivery.copies.len(), delivery.may_dispatch), (1, true));
    }

    #[test]
    fn a_shard_is_unprotected_while_the_end_of_the_ingest_topic_is_not_known() {
        let mut bench = Bench::new();
        bench.end();
        assert!(bench.may_dispatch() && !bench.is_unprotected());
        bench.read(1, 9);
        assert!(!bench.is_unprotected(), "on its way");
        bench.originals_end_at(None);
        assert!(bench.is_unprotected());
        bench.now += DELAY;
        bench.originals_end_at(Some(10));
        assert!(!bench.is_unprotected());
        assert_eq!(bench.taken(), [9]);
    }

    #[test]
    fn a_partition_that_is_refused_is_read_again_from_where_it_was_read_to_and_counts_as_incomplete_until_then()
     {
        let mut bench = Bench::new();
        let first = Some(Begin::Last(MAX_TAKEN_OVER));
        assert_eq!(bench.partition.take_start(bench.now), first);
        bench.partition.refused(bench.now);
        assert!(!bench.may_dispatch());
        assert_eq!(bench.partition.take_start(bench.now), None);
        bench.now += DELAY;
        assert_eq!(bench.partition.take_start(bench.now), first);
        assert_eq!(bench.partition.take_start(bench.now), None, "once");
        bench.read(1, 9);
        assert!(!bench.may_dispatch());
        bench.originals_end_at(Some(10));
        bench.end();
        assert!(bench.may_dispatch() && !bench.is_unprotected());
        // Once more, after it was read.
        bench.partition.refused(bench.now);
        assert!(bench.may_dispatch() && bench.is_unprotected());
        bench.now += DELAY;
        assert_eq!(bench.partition.take_start(bench.now), Some(Begin::At(1)));
        bench.end();
        assert!(!bench.is_unprotected());
        // The client may go on by itself.
        bench.partition.refused(bench.now);
        bench.end();
        bench.now += DELAY;
        assert_eq!(bench.partition.take_start(bench.now), None);
    }

    #[test]
    fn a_client_that_returns_no_records_although_there_are_some_is_noticed() {
        let mut bench = Bench::new();
        bench.read(1, 9);
        bench.originals_end_at(Some(10));
        bench.end();
        assert!(bench.may_dispatch());
        bench.check(Some(1));
        assert!(!bench.is_unprotected());
        // New records may be on their way.
        bench.check(Some(3));
        assert!(!bench.is_unprotected());
        bench.read(1, 9);
        bench.check(Some(3));
        assert!(!bench.is_unprotected(), "there was progress");
        bench.check(Some(3));
        assert!(bench.is_unprotected());
        assert_eq!(bench.partition.take_start(bench.now), Some(Begin::At(2)));
        bench.read(1, 9);
        bench.end();
        assert!(!bench.is_unprotected());
        // Whether there is more is not known.
        bench.check(None);
        assert!(bench.is_unprotected());
        bench.check(Some(3));
        assert!(!bench.is_unprotected());
    }

    #[test]
    fn no_copy_is_dropped_while_an_inbox_is_full() {
        let mut bench = Bench::new();
        for name in 0..=u16::try_from(MAX_NAMES).unwrap() {
            bench.read(name, i64::from(name));
        }
        bench.end();
        assert!(bench.partition.is_full());
        bench.originals_end_at(Some(1 << 20));
        assert!(bench.pass_on());
        assert!(!bench.partition.is_full());
        let take = |bench: &Bench| {
            let delivery = bench.copies.take(bench.assignment, SHARD, 0, true);
            (delivery.copies.len(), delivery.may_dispatch)
        };
        assert_eq!(take(&bench), (MAX_NAMES, false));
        assert!(bench.pass_on());
        assert_eq!(take(&bench), (1, true));
    }
}
