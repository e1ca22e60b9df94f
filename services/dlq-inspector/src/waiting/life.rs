//! The steps of a record's life in a pipeline, from the copies that Kafka still contains.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fmt;

use redeliver_core::pipeline::TopicRole;
use redeliver_core::{Pipeline, Position, Timestamp};

use super::facts::Facts;

/// The maximum number of copies of a record that a trace remembers.
pub(crate) const MAX_COPIES: usize = 1_000;

/// Where a copy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spot {
    /// In a topic of the pipeline.
    Topic(TopicRole),
    /// With the scheduler.
    Scheduler,
}

/// A copy of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Copy {
    pub(crate) spot: Spot,
    pub(crate) position: Position,
    pub(crate) facts: Facts,
    pub(crate) message: Option<String>,
    /// Whether its reader has not completed it. False in topics that nobody of ours reads.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Entered,
    Waits,
    Released,
    Succeeded,
    Died,
    Redriven,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) event: Event,
    pub(crate) copy: Copy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    New,
    Waits,
    Due,
    Succeeded,
    Dead,
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Life {
    pub(crate) steps: Vec<Step>,
    pub(crate) outcome: Outcome,
    pub(crate) next_due: Option<Timestamp>,
    pub(crate) gaps: Vec<String>,
}

impl fmt::Display for Spot {
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

impl Spot {
    /// The place in a life of copies with equal attempts and times.
    fn rank(self) -> u8 {
        match self {
            Self::Topic(TopicRole::Tier(_)) | Self::Scheduler => 0,
            Self::Topic(TopicRole::Due | TopicRole::Source) => 1,
            Self::Topic(TopicRole::Output | TopicRole::DeadLetter) => 2,
        }
    }
}

impl Copy {
    /// Whether both are the same wait: the scheduler has a command and a job of each.
    fn is_same_wait(&self, other: &Self) -> bool {
        let wait = |copy: &Self| (copy.facts.redrives, copy.facts.attempts, copy.facts.due);
        self.spot == Spot::Scheduler && other.spot == Spot::Scheduler && wait(self) == wait(other)
    }
}

/// The life of a record from its copies, in any order. `entered`: its place in the source.
pub(crate) fn life(pipeline: &Pipeline, entered: &Entered, mut copies: Vec<Copy>) -> Life {
    // Clocks of different processes differ, so the number of attempts comes first.
    copies.sort_by_key(|copy| {
        let facts = &copy.facts;
        let order = (facts.redrives, facts.attempts, facts.written, copy.spot.rank());
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
        steps.push(Step {
            event: Event::Entered,
            copy: Copy {
                spot: Spot::Topic(TopicRole::Source),
                position: entered.position.clone(),
                facts: Facts {
                    attempts: Some(0),
                    written: entered.timestamp,
                    ..Facts::default()
                },
                message: None,
                is_unread: entered.is_unread,
            },
        });
    }
    let mut redrives = 0;
    for copy in copies {
        let event = match copy.spot {
            Spot::Scheduler | Spot::Topic(TopicRole::Tier(_)) => Event::Waits,
            Spot::Topic(TopicRole::Output) => Event::Succeeded,
            Spot::Topic(TopicRole::DeadLetter) => Event::Died,
            Spot::Topic(TopicRole::Due | TopicRole::Source) if copy.facts.redrives > redrives => {
                Event::Redriven
            }
            Spot::Topic(TopicRole::Due | TopicRole::Source) => Event::Released,
        };
        redrives = redrives.max(copy.facts.redrives);
        steps.push(Step { event, copy });
    }

    let last = steps.last();
    let outcome = match last.map(|step| (step.event, step.copy.is_unread)) {
        Some((Event::Succeeded, _)) => Outcome::Succeeded,
        Some((Event::Died, _)) => Outcome::Dead,
        Some((Event::Entered, true)) => Outcome::New,
        Some((Event::Waits, true)) => Outcome::Waits,
        Some((Event::Released | Event::Redriven, true)) => Outcome::Due,
        Some((_, false)) | None => Outcome::Unknown,
    };
    if outcome == Outcome::Unknown && last.is_some() {
        gaps.push(if pipeline.output.is_none() || pipeline.drops_results {
            "the last copy is complete and nothing follows it: the record has succeeded without a result, or retention has removed what \
             follows"
                .to_owned()
        } else {
            "the last copy is complete and nothing follows it: retention has removed what follows, or the search began too late".to_owned()
        });
    }
    Life {
        next_due: last
            .filter(|_| outcome == Outcome::Waits)
            .and_then(|step| step.copy.facts.due),
        outcome,
        steps,
        gaps,
    }
}

/// What retention has removed.
fn gaps(entered: &Entered, copies: &[Copy]) -> Vec<String> {
    let mut gaps = Vec::new();
    if !entered.is_found {
        gaps.push(format!(
            "the source record {} is not in Kafka any more",
            entered.position
        ));
    }
    let attempts = |copy: &Copy| copy.facts.attempts.unwrap_or(0);
    let lives: BTreeSet<u32> = copies.iter().map(|copy| copy.facts.redrives).collect();
    for life in lives {
        let of_life = || copies.iter().filter(|copy| copy.facts.redrives == life);
        // A record waits after each failed attempt, except for the one that killed it.
        let is_end = |copy: &&Copy| copy.spot == Spot::Topic(TopicRole::DeadLetter);
        let waited = of_life().map(|copy| attempts(copy).saturating_sub(u32::from(is_end(&copy))));
        let waited = waited.max().unwrap_or(0);
        let waits: BTreeSet<u32> = of_life()
            .filter(|copy| copy.spot.rank() == 0)
            .map(attempts)
            .collect();
        let kept = waits.range(1..=waited).count();
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
    pub(crate) list: Vec<Copy>,
    pub(crate) is_truncated: bool,
}

impl Copies {
    pub(crate) fn add(&mut self, copy: Copy) {
        self.list.push(copy);
        if self.list.len() >= 2 * MAX_COPIES {
            self.shrink();
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
    pub(crate) fn finish(mut self) -> (Vec<Copy>, bool) {
        self.shrink();
        (self.list, self.is_truncated)
    }
}

#[cfg(test)]
mod tests {
    use redeliver_core::HumanDuration;

    use super::*;

    const TIER: Spot = Spot::Topic(TopicRole::Tier(HumanDuration::from_secs(5)));
    const DUE: Spot = Spot::Topic(TopicRole::Due);
    const DEAD: Spot = Spot::Topic(TopicRole::DeadLetter);
    const OUTPUT: Spot = Spot::Topic(TopicRole::Output);

    fn position(offset: i64) -> Position {
        Position {
            topic: "p".into(),
            partition: 0,
            offset,
        }
    }

    fn copy(spot: Spot, attempts: u32, written: i64) -> Copy {
        Copy {
            spot,
            position: position(written),
            facts: Facts {
                attempts: Some(attempts),
                written: Some(Timestamp::from_millis(written)),
                due: Some(Timestamp::from_millis(written + 5)),
                ..Facts::default()
            },
            message: None,
            is_unread: false,
        }
    }

    fn unread(copy: Copy) -> Copy {
        Copy {
            is_unread: true,
            ..copy
        }
    }

    fn redriven(copy: Copy, redrives: u32) -> Copy {
        let facts = Facts {
            redrives,
            ..copy.facts
        };
        Copy { facts, ..copy }
    }

    fn entered() -> Entered {
        Entered {
            position: position(0),
            timestamp: Some(Timestamp::from_millis(0)),
            is_found: true,
            is_unread: false,
        }
    }

    fn of(copies: Vec<Copy>) -> Life {
        let pipeline = Pipeline {
            output: Some("out".into()),
            ..Pipeline::new("p")
        };
        life(&pipeline, &entered(), copies)
    }

    fn events(life: &Life) -> Vec<Event> {
        life.steps.iter().map(|step| step.event).collect()
    }

    #[test]
    fn a_life_has_its_steps_in_order_whatever_the_order_of_the_copies_and_the_clocks() {
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
            let life = of(copies.clone());
            let expected = [
                Event::Entered,
                Event::Waits,
                Event::Released,
                Event::Waits,
                Event::Released,
                Event::Died,
            ];
            assert_eq!(events(&life), expected);
            assert_eq!((life.outcome, life.gaps), (Outcome::Dead, Vec::new()));
        }
    }

    #[test]
    fn a_redrive_starts_a_new_life() {
        let life = of(vec![
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
        assert_eq!(events(&life), expected);
        assert_eq!((life.outcome, life.gaps), (Outcome::Succeeded, Vec::new()));
    }

    #[test]
    fn the_last_copy_decides_where_a_record_is_now() {
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
        assert_eq!(life(&Pipeline::new("p"), &new, Vec::new()).outcome, Outcome::New);
        let waits = of(vec![unread(copy(TIER, 1, 10))]);
        assert_eq!(waits.next_due, Some(Timestamp::from_millis(15)));
    }

    #[test]
    fn a_wait_with_the_scheduler_is_one_step_and_goes_on_while_its_job_does() {
        let command = copy(Spot::Scheduler, 1, 10);
        let mut job = unread(copy(Spot::Scheduler, 1, 12));
        job.facts.due = command.facts.due;
        let life = of(vec![job, command]);
        assert_eq!(events(&life), [Event::Entered, Event::Waits]);
        assert_eq!(life.outcome, Outcome::Waits);
        assert_eq!(life.steps[1].copy.position.offset, 10);
    }

    #[test]
    fn what_is_missing_is_said() {
        let gone = Entered {
            is_found: false,
            ..entered()
        };
        let life = life(
            &Pipeline::new("p"),
            &gone,
            vec![copy(TIER, 3, 10), copy(DEAD, 4, 20)],
        );
        assert_eq!(
            life.gaps,
            [
                "the source record p/0/0 is not in Kafka any more",
                "2 waits after failed attempts are not in Kafka any more"
            ]
        );
        assert_eq!(life.outcome, Outcome::Dead);
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
