//! The steps of a record's life in a pipeline, from the copies that Kafka still contains.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::fmt;

use redeliver_core::pipeline::{ReturnTo, TopicRole};
use redeliver_core::{Pipeline, Position, Timestamp};
pub(crate) use redeliver_proto::v1::{TraceEvent as Event, TraceOutcome as Outcome};

use super::decision::Decision;
use super::facts::Facts;
use crate::ledger::State;
use crate::letter::ContentHash;

/// The maximum number of copies of a record that a trace remembers.
pub(crate) const MAX_COPIES: usize = 1_000;

/// Where a copy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    /// In a topic of the pipeline.
    Topic(TopicRole),
    /// With the scheduler.
    Scheduler,
}

/// A copy of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecordCopy {
    pub(crate) location: Location,
    pub(crate) position: Position,
    pub(crate) facts: Facts,
    pub(crate) message: Option<String>,
    /// Of a dead letter.
    pub(crate) content: Option<ContentHash>,
    /// Whether its reader has not completed it. False in topics that no service reads.
    pub(crate) is_unread: bool,
}

/// The record in the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entered {
    pub(crate) position: Position,
    pub(crate) timestamp: Option<Timestamp>,
    /// Whether Kafka still has it.
    pub(crate) is_found: bool,
    pub(crate) is_unread: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) event: Event,
    /// The record that was written; if a decision has written none, or the record is not there, the dead
    /// letter.
    pub(crate) copy: RecordCopy,
    /// Who has decided it, when, and why.
    pub(crate) decision: Option<Decision>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Timeline {
    pub(crate) steps: Vec<Step>,
    pub(crate) outcome: Outcome,
    pub(crate) next_due: Option<Timestamp>,
    pub(crate) gaps: Vec<String>,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Topic(TopicRole::Source) => f.write_str("source"),
            Self::Topic(TopicRole::Output) => f.write_str("output"),
            Self::Topic(TopicRole::Tier(tier)) => tier.fmt(f),
            Self::Topic(TopicRole::Due) => f.write_str("due"),
            Self::Topic(TopicRole::DeadLetter) => f.write_str("dead-letters"),
            Self::Scheduler => f.write_str("scheduler"),
        }
    }
}

impl Location {
    /// The place in a life of copies with equal attempts and times.
    pub(crate) fn rank(self) -> u8 {
        match self {
            Self::Topic(TopicRole::Tier(_)) | Self::Scheduler => 0,
            Self::Topic(TopicRole::Due | TopicRole::Source) => 1,
            Self::Topic(TopicRole::Output | TopicRole::DeadLetter) => 2,
        }
    }
}

impl RecordCopy {
    /// Whether both are the same wait: the scheduler has a command and a job of each, and another job with an earlier due time if an operator has retried it.
    fn is_same_wait(&self, other: &Self) -> bool {
        let wait = |copy: &Self| (copy.facts.redrives, copy.facts.attempts, copy.facts.failed_at);
        self.location == Location::Scheduler
            && other.location == Location::Scheduler
            && wait(self) == wait(other)
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.location == Location::Topic(TopicRole::DeadLetter)
    }

    /// Whether the redrive of this dead letter has written the other copy.
    fn was_redriven_as(&self, decision: &Decision, other: &Self) -> bool {
        let can_be = matches!(
            other.location,
            Location::Topic(TopicRole::Due | TopicRole::Source)
        ) && other.facts.redrives > self.facts.redrives;
        // Later copies have the header, too.
        let is_first = other.facts.attempts.unwrap_or(0) == 0;
        let is_same = match (&other.facts.redrive_id, &*decision.redrive_id) {
            (Some(of), id) if !id.is_empty() => of == id,
            _ => other.facts.redrives == self.facts.redrives + 1,
        };
        can_be && is_first && is_same
    }
}

impl Step {
    fn new(event: Event, copy: RecordCopy) -> Self {
        Self {
            event,
            copy,
            decision: None,
        }
    }
}

/// The life of a record from its copies, in any order. `entered`: its place in the source. `decisions`: those
/// about its dead letters.
pub(crate) fn timeline(
    pipeline: &Pipeline,
    entered: &Entered,
    mut copies: Vec<RecordCopy>,
    mut decisions: HashMap<Position, Decision>,
) -> Timeline {
    // Clocks of different processes differ, so the number of attempts comes first.
    copies.sort_by_key(|copy| {
        let facts = &copy.facts;
        let order = (
            facts.redrives,
            facts.attempts,
            facts.written,
            copy.location.rank(),
        );
        (order, copy.position.clone())
    });
    copies.dedup_by(|later, first| {
        let is_same = later.is_same_wait(first);
        first.is_unread |= is_same && later.is_unread;
        is_same
    });
    let mut gaps = gaps(entered, &copies);

    let mut steps = Vec::new();
    if entered.is_found {
        steps.push(entry(entered));
    }
    // The decisions that have written copies, by the index of the copy.
    let mut written: HashMap<usize, Decision> = HashMap::new();
    let mut redrives = 0;
    for (index, copy) in copies.iter().enumerate() {
        let event = match copy.location {
            Location::Scheduler | Location::Topic(TopicRole::Tier(_)) => Event::Waits,
            Location::Topic(TopicRole::Output) => Event::Succeeded,
            Location::Topic(TopicRole::DeadLetter) => Event::Died,
            Location::Topic(TopicRole::Due | TopicRole::Source) if copy.facts.redrives > redrives => {
                Event::Redriven
            }
            Location::Topic(TopicRole::Due | TopicRole::Source) => Event::Released,
        };
        redrives = redrives.max(copy.facts.redrives);
        steps.push(Step {
            decision: written.remove(&index),
            ..Step::new(event, copy.clone())
        });
        let decided = copy.is_dead().then(|| decisions.remove(&copy.position));
        let Some(decision) = decided.flatten() else {
            continue;
        };
        let event = match decision.state {
            State::Open => Event::Restored,
            State::Discarded => Event::Discarded,
            State::Redriven => {
                let mut others = copies.iter().enumerate().skip(index + 1);
                let is_next = |(_, other): &(usize, &RecordCopy)| copy.was_redriven_as(&decision, other);
                if let Some((next, _)) = others.find(is_next) {
                    written.insert(next, decision);
                    continue;
                }
                Event::Redriven
            }
        };
        steps.push(Step {
            decision: Some(decision),
            ..Step::new(event, copy.clone())
        });
    }

    let last = steps.last();
    let outcome = last.map_or(Outcome::Unknown, |step| outcome(pipeline, step));
    if outcome == Outcome::Unknown
        && let Some(last) = last
    {
        gaps.push(end_unknown(pipeline, last));
    }
    Timeline {
        next_due: last
            .filter(|_| outcome == Outcome::Waits)
            .and_then(|step| step.copy.facts.due),
        outcome,
        steps,
        gaps,
    }
}

/// Whether copies may be in the source although retries are not: a redrive can choose it.
pub(crate) fn may_be_in_source(
    pipeline: &Pipeline,
    copies: &[RecordCopy],
    decisions: &HashMap<Position, Decision>,
) -> bool {
    if pipeline.return_to == ReturnTo::Source {
        return false;
    }
    // Each redrive to the due topic has left a copy there.
    let begun = copies
        .iter()
        .filter(|copy| copy.location == Location::Topic(TopicRole::Due));
    let begun: BTreeSet<u32> = begun.map(|copy| copy.facts.redrives).collect();
    let mut redrives = copies.iter().map(|copy| copy.facts.redrives);
    let mut decisions = decisions.values();
    redrives.any(|redrives| redrives > 0 && !begun.contains(&redrives))
        || decisions.any(|decision| *decision.destination == *pipeline.source)
}

/// The first step.
fn entry(entered: &Entered) -> Step {
    let copy = RecordCopy {
        location: Location::Topic(TopicRole::Source),
        position: entered.position.clone(),
        facts: Facts {
            attempts: Some(0),
            written: entered.timestamp,
            ..Facts::default()
        },
        message: None,
        content: None,
        is_unread: entered.is_unread,
    };
    Step::new(Event::Entered, copy)
}

/// Where a record is after its last step.
fn outcome(pipeline: &Pipeline, last: &Step) -> Outcome {
    match (last.event, last.copy.is_unread) {
        (Event::Succeeded, _) => Outcome::Succeeded,
        (Event::Died | Event::Restored, _) => Outcome::Dead,
        (Event::Discarded, _) => Outcome::Discarded,
        (Event::Redriven, _) if last.copy.is_dead() => {
            let destination = last.decision.as_ref().map(|decision| &*decision.destination);
            match destination.filter(|topic| !topic.is_empty()) {
                Some(topic) if *topic != *pipeline.source && *topic != *pipeline.due_topic() => {
                    Outcome::Redriven
                }
                _ => Outcome::Unknown,
            }
        }
        (Event::Entered, true) => Outcome::New,
        (Event::Waits, true) => Outcome::Waits,
        (Event::Released | Event::Redriven, true) => Outcome::Due,
        (Event::Entered | Event::Waits | Event::Released | Event::Redriven, false)
        | (Event::Unspecified, _) => Outcome::Unknown,
    }
}

/// Why it is unknown what follows the last step.
fn end_unknown(pipeline: &Pipeline, last: &Step) -> String {
    if last.event == Event::Redriven && last.copy.is_dead() {
        return "the copy that the redrive has written is not there: it was written after the search, or retention has removed it"
            .to_owned();
    }
    if pipeline.output.is_none() || pipeline.drops_results {
        return "the last copy is complete and nothing follows it: the record has succeeded without a result, or retention has removed \
                what follows"
            .to_owned();
    }
    "the last copy is complete and nothing follows it: retention has removed what follows, or the search began too late".to_owned()
}

/// What retention has removed.
fn gaps(entered: &Entered, copies: &[RecordCopy]) -> Vec<String> {
    let mut gaps = Vec::new();
    if !entered.is_found {
        gaps.push(format!(
            "the source record {} is not in Kafka any more",
            entered.position
        ));
    }
    let attempts = |copy: &RecordCopy| copy.facts.attempts.unwrap_or(0);
    let lives: BTreeSet<u32> = copies.iter().map(|copy| copy.facts.redrives).collect();
    for life in lives {
        let of_life = || copies.iter().filter(|copy| copy.facts.redrives == life);
        // A record waits after each failed attempt, except for the one that killed it.
        let is_end = |copy: &&RecordCopy| copy.location == Location::Topic(TopicRole::DeadLetter);
        let waited = of_life().map(|copy| attempts(copy).saturating_sub(u32::from(is_end(&copy))));
        let waited = waited.max().unwrap_or(0);
        let waits: BTreeSet<u32> = of_life()
            .filter(|copy| copy.location.rank() == 0)
            .map(attempts)
            .collect();
        let kept = waits.iter().filter(|wait| (1..=waited).contains(*wait)).count();
        let missing = (waited as usize).saturating_sub(kept);
        if missing > 0 {
            let waits = if missing == 1 { "wait" } else { "waits" };
            gaps.push(format!(
                "{missing} {waits} after failed attempts {} not in Kafka any more{}",
                if missing == 1 { "is" } else { "are" },
                if life > 0 {
                    format!(", since redrive {life}")
                } else {
                    String::new()
                }
            ));
        }
    }
    gaps
}

/// Copies of a record, of which only the newest are kept.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    pub(crate) list: Vec<RecordCopy>,
    pub(crate) is_truncated: bool,
}

impl Copies {
    pub(crate) fn add(&mut self, copy: RecordCopy) {
        self.list.push(copy);
        if self.list.len() >= 2 * MAX_COPIES {
            self.shrink();
        }
    }

    pub(crate) fn extend(&mut self, copies: impl IntoIterator<Item = RecordCopy>) {
        for copy in copies {
            self.add(copy);
        }
    }

    fn shrink(&mut self) {
        if self.list.len() > MAX_COPIES {
            self.list.sort_by_key(|copy| Reverse(copy.facts.written));
            self.list.truncate(MAX_COPIES);
            self.is_truncated = true;
        }
    }

    /// The copies, and whether there are more.
    pub(crate) fn finish(mut self) -> (Vec<RecordCopy>, bool) {
        self.shrink();
        (self.list, self.is_truncated)
    }
}

#[cfg(test)]
mod tests {
    use redeliver_core::HumanDuration;

    use super::*;

    const TIER: Location = Location::Topic(TopicRole::Tier(HumanDuration::from_secs(5)));
    const DUE: Location = Location::Topic(TopicRole::Due);
    const DEAD: Location = Location::Topic(TopicRole::DeadLetter);
    const OUTPUT: Location = Location::Topic(TopicRole::Output);

    fn position(offset: i64) -> Position {
        Position {
            topic: "p".into(),
            partition: 0,
            offset,
        }
    }

    fn copy(location: Location, attempts: u32, written: i64) -> RecordCopy {
        RecordCopy {
            location,
            position: position(written),
            facts: Facts {
                attempts: Some(attempts),
                written: Some(Timestamp::from_millis(written)),
                due: Some(Timestamp::from_millis(written + 5)),
                ..Facts::default()
            },
            message: None,
            content: None,
            is_unread: false,
        }
    }

    fn unread(copy: RecordCopy) -> RecordCopy {
        RecordCopy {
            is_unread: true,
            ..copy
        }
    }

    fn redriven(copy: RecordCopy, redrives: u32) -> RecordCopy {
        let facts = Facts {
            redrives,
            ..copy.facts
        };
        RecordCopy { facts, ..copy }
    }

    fn entered() -> Entered {
        Entered {
            position: position(0),
            timestamp: Some(Timestamp::from_millis(0)),
            is_found: true,
            is_unread: false,
        }
    }

    fn of(copies: Vec<RecordCopy>) -> Timeline {
        let pipeline = Pipeline {
            output: Some("out".into()),
            ..Pipeline::new("p")
        };
        timeline(&pipeline, &entered(), copies, HashMap::new())
    }

    fn decided(copies: Vec<RecordCopy>, decisions: &[(&RecordCopy, Decision)]) -> Timeline {
        let decisions = decisions.iter();
        let decisions = decisions.map(|(copy, decision)| (copy.position.clone(), decision.clone()));
        timeline(&Pipeline::new("p"), &entered(), copies, decisions.collect())
    }

    fn redrive(id: &str, destination: &str) -> Decision {
        Decision {
            state: State::Redriven,
            redrive_id: id.to_owned(),
            destination: destination.to_owned(),
            ..Decision::default()
        }
    }

    fn events(timeline: &Timeline) -> Vec<Event> {
        timeline.steps.iter().map(|step| step.event).collect()
    }

    #[test]
    fn steps_are_in_order() {
        let mut copies = vec![
            copy(TIER, 1, 10),
            // The clock of the retry tier is behind.
            copy(DUE, 1, 12),
            copy(TIER, 2, 11),
            copy(DUE, 2, 30),
            copy(DEAD, 3, 40),
        ];
        for _ in 0..copies.len() {
            copies.rotate_left(1);
            let timeline = of(copies.clone());
            let expected = [
                Event::Entered,
                Event::Waits,
                Event::Released,
                Event::Waits,
                Event::Released,
                Event::Died,
            ];
            assert_eq!(events(&timeline), expected);
            assert_eq!((timeline.outcome, timeline.gaps), (Outcome::Dead, Vec::new()));
        }
    }

    #[test]
    fn a_redrive_starts_a_new_life() {
        let timeline = of(vec![
            copy(DEAD, 1, 10),
            redriven(copy(DUE, 0, 20), 1),
            redriven(copy(TIER, 1, 30), 1),
            redriven(copy(DUE, 1, 40), 1),
            redriven(copy(OUTPUT, 1, 50), 1),
        ]);
        let expected = [
            Event::Entered,
            Event::Died,
            Event::Redriven,
            Event::Waits,
            Event::Released,
            Event::Succeeded,
        ];
        assert_eq!(events(&timeline), expected);
        assert_eq!(
            (timeline.outcome, timeline.gaps),
            (Outcome::Succeeded, Vec::new())
        );
    }

    #[test]
    fn decision_belongs_to_its_copy() {
        let first = copy(DEAD, 1, 10);
        let second = redriven(copy(DEAD, 1, 30), 1);
        let by = |id: &str, copy: RecordCopy| {
            let facts = Facts {
                redrive_id: Some(id.to_owned()),
                ..copy.facts
            };
            RecordCopy { facts, ..copy }
        };
        let copies = vec![
            first.clone(),
            by("a", redriven(copy(DUE, 0, 20), 1)),
            second.clone(),
            // The endpoint works, and a redrive of another caller is in the ledger.
            unread(by("c", redriven(copy(DUE, 0, 40), 2))),
        ];
        let decisions = [
            (&first, redrive("a", "p-retry-due")),
            (&second, redrive("b", "p-retry-due")),
        ];
        let timeline = decided(copies, &decisions);
        let ids = timeline.steps.iter().map(|step| {
            let id = step.decision.as_ref().map(|decision| &*decision.redrive_id);
            (step.event, id)
        });
        let expected = [
            (Event::Entered, None),
            (Event::Died, None),
            (Event::Redriven, Some("a")),
            (Event::Died, None),
            (Event::Redriven, Some("b")),
            (Event::Redriven, None),
        ];
        assert_eq!(ids.collect::<Vec<_>>(), expected);
        assert_eq!(timeline.outcome, Outcome::Due);
    }

    #[test]
    fn last_decision_decides_the_outcome() {
        let dead = copy(DEAD, 1, 10);
        let of = |decision| {
            let timeline = decided(vec![dead.clone()], &[(&dead, decision)]);
            assert_eq!(timeline.steps.len(), 3);
            (timeline.steps[2].event, timeline.outcome, timeline.gaps.len())
        };
        let state = |state| Decision {
            state,
            ..Decision::default()
        };
        assert_eq!(
            of(state(State::Discarded)),
            (Event::Discarded, Outcome::Discarded, 0)
        );
        assert_eq!(of(state(State::Open)), (Event::Restored, Outcome::Dead, 0));
        let elsewhere = redrive("a", "other");
        assert_eq!(of(elsewhere), (Event::Redriven, Outcome::Redriven, 0));
        // Its copy should be there.
        for topic in ["p", "p-retry-due", ""] {
            assert_eq!(of(redrive("a", topic)), (Event::Redriven, Outcome::Unknown, 1));
        }
    }

    #[test]
    fn source_is_searched_if_possibly_chosen() {
        let pipeline = Pipeline::new("p");
        let is = |copies: &[RecordCopy], decisions: &[Decision]| {
            let decisions = decisions
                .iter()
                .map(|decision| (copy(DEAD, 1, 10).position, decision.clone()));
            may_be_in_source(&pipeline, copies, &decisions.collect())
        };
        let died = [copy(TIER, 1, 5), copy(DUE, 1, 7), copy(DEAD, 1, 10)];
        assert!(!is(&died, &[]));
        assert!(!is(&died, &[redrive("a", "p-retry-due")]));
        assert!(is(&died, &[redrive("a", "p")]));
        let again = redriven(copy(DEAD, 1, 20), 1);
        assert!(!is(&[redriven(copy(DUE, 0, 15), 1), again.clone()], &[]));
        // The first dead letter, whose entry in the ledger would say it, may be gone.
        assert!(is(&[again], &[]));
    }

    #[test]
    fn last_copy_decides_the_outcome() {
        let outcome = |copies| of(copies).outcome;
        assert_eq!(outcome(vec![unread(copy(TIER, 1, 10))]), Outcome::Waits);
        assert_eq!(outcome(vec![copy(TIER, 1, 10)]), Outcome::Unknown);
        assert_eq!(
            outcome(vec![copy(TIER, 1, 10), unread(copy(DUE, 1, 20))]),
            Outcome::Due
        );
        assert_eq!(
            outcome(vec![copy(TIER, 1, 10), copy(DUE, 1, 20)]),
            Outcome::Unknown
        );
        assert_eq!(outcome(Vec::new()), Outcome::Unknown);
        let new = Entered {
            is_unread: true,
            ..entered()
        };
        assert_eq!(
            timeline(&Pipeline::new("p"), &new, Vec::new(), HashMap::new()).outcome,
            Outcome::New
        );
        let waits = of(vec![unread(copy(TIER, 1, 10))]);
        assert_eq!(waits.next_due, Some(Timestamp::from_millis(15)));
    }

    #[test]
    fn scheduler_wait_is_one_step() {
        let command = copy(Location::Scheduler, 1, 10);
        let job = copy(Location::Scheduler, 1, 12);
        let retried = unread(copy(Location::Scheduler, 1, 14));
        let timeline = of(vec![retried, job, command]);
        assert_eq!(events(&timeline), [Event::Entered, Event::Waits]);
        assert_eq!(timeline.outcome, Outcome::Waits);
        assert_eq!(timeline.steps[1].copy.position.offset, 10);
    }

    #[test]
    fn throttled_record_has_no_failed_attempt() {
        let timeline = of(vec![unread(copy(Location::Scheduler, 0, 10))]);
        assert_eq!(events(&timeline), [Event::Entered, Event::Waits]);
        assert_eq!((timeline.outcome, timeline.gaps), (Outcome::Waits, Vec::new()));
    }

    #[test]
    fn gaps_are_reported() {
        let gone = Entered {
            is_found: false,
            ..entered()
        };
        let timeline = timeline(
            &Pipeline::new("p"),
            &gone,
            vec![copy(TIER, 3, 10), copy(DEAD, 4, 20)],
            HashMap::new(),
        );
        assert_eq!(
            timeline.gaps,
            [
                "the source record p/0/0 is not in Kafka any more",
                "2 waits after failed attempts are not in Kafka any more"
            ]
        );
        assert_eq!(timeline.outcome, Outcome::Dead);
    }

    #[test]
    fn the_newest_copies_are_kept() {
        let mut copies = Copies::default();
        for number in 0..5_000 {
            copies.add(copy(TIER, 1, number));
        }
        let (kept, is_truncated) = copies.finish();
        assert_eq!((kept.len(), is_truncated), (MAX_COPIES, true));
        assert!(kept.iter().all(|copy| copy.position.offset >= 4_000));
    }
}
