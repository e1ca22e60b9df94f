//! What was seen of one pipeline, and what follows from it. No IO.
//!
//! A record's identity is its origin, its place in the source topic, which travels with it in our headers.
//! Copies are compared with the first one that was seen, by hash, so the order in which topics are read does
//! not matter for them. What cannot be a record of this pipeline is foreign: counted apart, no error.
//!
//! A record that the inspector redrives keeps its origin and begins a new life: each life may end once, and
//! the last one says what became of the record.

use std::collections::BTreeMap;

use redeliver_core::headers::{ERROR_CLASS, Origin, PAYLOAD_OMITTED, PROCESS_AFTER, ReservedHeaders};
use redeliver_core::pipeline::{ReturnTo, TopicRole};
use redeliver_core::route::Arrival;
use redeliver_core::{Pipeline, Position, Record, Span, Timestamp};

use crate::content::{self, Content};
use crate::report::{Finding, Findings, Lateness, Report};
use crate::table::{Compare, Life, Mark, Place, Role, Table};

/// What must be equal between a source record and its result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutputCheck {
    /// Key, value and user headers.
    #[default]
    Unchanged,
    /// Key and user headers: the handler replaces the value.
    ValueReplaced,
    /// Nothing: the handler also replaces keys or adds headers.
    Free,
}

impl OutputCheck {
    fn compare(self) -> Compare {
        match self {
            Self::Unchanged => Compare::Everything,
            Self::ValueReplaced => Compare::KeyAndHeaders,
            Self::Free => Compare::Nothing,
        }
    }
}

/// A record of the pipeline that is with the scheduler.
#[derive(Clone, Copy, Debug)]
pub struct Scheduled(Place, u32);

/// Collects observations of one pipeline whose handler writes one result for each success.
///
/// The topics of a pipeline at rest may be read in any order, only the source last. For one that is running,
/// see [`crate::run`].
pub struct Ledger {
    pipeline: Pipeline,
    check: OutputCheck,
    table: Table,
    /// The first offset that was seen in each partition of the source.
    source_begins: BTreeMap<i32, i64>,
    positions_are_known: bool,
    /// Where the second end of a record stands, of the first ones that have a second.
    second_ends: BTreeMap<(Place, u32), Position>,
    early: Findings,
    altered: Findings,
    foreign: Findings,
    lateness: BTreeMap<i64, u64>,
}

impl Ledger {
    /// An empty ledger.
    #[must_use]
    pub fn new(pipeline: &Pipeline, check: OutputCheck) -> Self {
        Self {
            pipeline: pipeline.clone(),
            check,
            table: Table::default(),
            source_begins: BTreeMap::new(),
            positions_are_known: false,
            second_ends: BTreeMap::new(),
            early: Findings::default(),
            altered: Findings::default(),
            foreign: Findings::default(),
            lateness: BTreeMap::new(),
        }
    }

    /// A record in the output topic.
    pub fn output(&mut self, record: &Record) {
        self.end(record, Role::Output, self.check.compare());
    }

    /// A record in the dead-letter topic. What it was written without, for its size, is not compared.
    pub fn dead(&mut self, record: &Record) {
        let check = match record.headers.last(PAYLOAD_OMITTED) {
            None => Compare::Everything,
            Some(b"value") => Compare::KeyAndHeaders,
            Some(_) => Compare::Nothing,
        };
        self.end(record, Role::Dead, check);
    }

    /// The positions of all groups have been asked for just now: what is unread follows from them, and what
    /// ends from now on may still have been unread.
    pub fn positions_known(&mut self) {
        self.positions_are_known = true;
    }

    /// A record in a tier; whether the tier's group has yet to read it.
    pub fn tier(&mut self, record: &Record, unread: bool) {
        let origin = Arrival::salvaged(record).origin;
        self.copy(record, &origin, Role::Tier, unread);
    }

    /// A record with the scheduler: in a command, whether the scheduler's group has yet to read it, or in a
    /// job, which may have ended since. Gives what [`Ledger::still_scheduled`] takes.
    pub fn scheduled(&mut self, record: &Record, unread: bool) -> Option<Scheduled> {
        let origin = Arrival::salvaged(record).origin;
        let life = content::life(record);
        self.copy(record, &origin, Role::Scheduler, unread)
            .then_some(Scheduled((origin.partition, origin.offset), life))
    }

    /// The job that a record is in has not ended.
    pub fn still_scheduled(&mut self, Scheduled(place, life): Scheduled) {
        self.table.life(place, life).mark(Mark::WAITS_WITH_SCHEDULER);
    }

    /// A record in the due topic; whether the worker's group has yet to read it.
    pub fn due(&mut self, record: &Record, unread: bool) {
        let origin = Arrival::salvaged(record).origin;
        self.released(record, &origin, unread);
    }

    /// A record in the source topic; whether the worker's group has yet to read it. Where retries come back
    /// to the source topic, they are told apart here.
    pub fn source(&mut self, record: &Record, unread: bool) {
        let Position {
            partition, offset, ..
        } = record.position;
        let begin = self.source_begins.entry(partition).or_insert(offset);
        *begin = offset.min(*begin);
        let arrival = Arrival::read(&self.pipeline, record);
        let origin = arrival.unwrap_or_else(|_| Arrival::salvaged(record)).origin;
        let is_new =
            (&*origin.topic, origin.partition, origin.offset) == (&*self.pipeline.source, partition, offset);
        if is_new {
            self.copy(record, &origin, Role::Source, unread);
        } else {
            self.released(record, &origin, unread);
        }
    }

    fn released(&mut self, record: &Record, origin: &Origin, unread: bool) {
        if !self.copy(record, origin, Role::Due, unread) {
            return;
        }
        let (Some(released), Some(due)) = (record.timestamp, due_time(record)) else {
            return;
        };
        let margin = released.as_millis().saturating_sub(due.as_millis());
        *self.lateness.entry(margin).or_default() += 1;
        if margin < 0 {
            self.early.add(|| {
                let reason = format!(
                    "released {} ms before it was due, at {released}",
                    margin.unsigned_abs()
                );
                finding(origin, record, reason)
            });
        }
    }

    /// Notes a copy that is not an end. Returns false when it is foreign.
    fn copy(&mut self, record: &Record, origin: &Origin, role: Role, unread: bool) -> bool {
        if *origin.topic != *self.pipeline.source {
            self.add_foreign(record, Some(origin));
            return false;
        }
        let life = self
            .table
            .life((origin.partition, origin.offset), content::life(record));
        let (seen, waits) = match role {
            Role::Source => (Mark::IN_SOURCE, Mark::UNREAD_IN_SOURCE),
            Role::Tier => (Mark::IN_TIER, Mark::UNREAD_IN_TIER),
            Role::Scheduler => (Mark::WITH_SCHEDULER, Mark::WAITS_WITH_SCHEDULER),
            Role::Due | Role::Output | Role::Dead => (Mark::IN_DUE, Mark::UNREAD_IN_DUE),
        };
        life.mark(seen);
        if unread {
            life.mark(waits);
        }
        compare(life, record, origin, role, Compare::Everything, &mut self.altered);
        true
    }

    fn end(&mut self, record: &Record, role: Role, check: Compare) {
        let ours = ReservedHeaders::read(record).ok();
        let origin = ours.as_ref().and_then(|ours| ours.origin().ok());
        let is_own = |origin: &Origin| {
            *origin.topic == *self.pipeline.source
                && ours
                    .as_ref()
                    .is_some_and(|ours| ours.is_retry_of(&self.pipeline.name))
        };
        let Some(origin) = origin.as_ref().filter(|origin| is_own(origin)) else {
            self.add_foreign(record, origin.as_ref());
            return;
        };
        let retries = ours.and_then(|ours| ours.retry_count().ok()).unwrap_or(0);
        let place = (origin.partition, origin.offset);
        let number = content::life(record);
        let life = self.table.life(place, number);
        if life.has_ended() && self.second_ends.len() < Findings::LISTED {
            self.second_ends
                .entry((place, number))
                .or_insert_with(|| record.position.clone());
        }
        if role == Role::Dead {
            life.dead = life.dead.saturating_add(1);
            let class = record
                .headers
                .last(ERROR_CLASS)
                .and_then(|class| std::str::from_utf8(class).ok());
            life.class = class.and_then(|class| class.parse().ok());
        } else {
            life.outputs = life.outputs.saturating_add(1);
        }
        life.retries = u16::try_from(retries).unwrap_or(u16::MAX);
        if !self.positions_are_known {
            life.mark(Mark::ENDED_BEFORE);
        }
        compare(life, record, origin, role, check, &mut self.altered);
    }

    fn add_foreign(&mut self, record: &Record, origin: Option<&Origin>) {
        let position = record.position.to_string();
        self.foreign.add(|| match origin {
            Some(origin) => finding(origin, record, "comes from elsewhere".to_owned()),
            None => Finding {
                origin: position.clone(),
                at: Some(position),
                reason: "names no origin that can be read".to_owned(),
            },
        });
    }

    /// What follows from all that was seen.
    #[must_use]
    pub fn report(&self) -> Report {
        let mut report = Report {
            pipeline: self.pipeline.name.to_string(),
            successes_counted: self.has_output(),
            early: self.early.clone(),
            altered: self.altered.clone(),
            foreign: self.foreign.clone(),
            min_margin_ms: self.lateness.keys().next().copied(),
            lateness: Lateness::of(&self.lateness),
            ..Report::default()
        };
        let last_lives = self.table.last_lives();
        // Of redriven records: whether any of their lives has been seen in the source, and was known early.
        let mut redriven: BTreeMap<Place, (bool, bool)> = BTreeMap::new();
        for (place, number, life) in self.table.lives() {
            self.judge_ends(&mut report, place, number, life);
            self.judge_redriven(&mut report, place, number, life);
            let (in_source, known_early) = (life.has(Mark::IN_SOURCE), self.is_known_early(life));
            match last_lives.get(&place) {
                None => self.settle(&mut report, place, life, in_source, known_early),
                Some(_) => {
                    let known = redriven.entry(place).or_default();
                    *known = (known.0 || in_source, known.1 || known_early);
                }
            }
        }
        for (place, number, life) in self.table.lives().filter(|(_, number, _)| *number > 0) {
            if last_lives.get(&place) == Some(&number) {
                let (in_source, known_early) = redriven[&place];
                report.redriven += u64::from(in_source);
                self.settle(&mut report, place, life, in_source, known_early);
            }
        }
        report
    }

    /// A life ends once, and then nobody has it yet to read.
    fn judge_ends(&self, report: &mut Report, place: Place, number: u32, life: &Life) {
        let (outputs, dead) = (life.outputs, life.dead);
        let reason = if u16::from(outputs) + u16::from(dead) > 1 {
            format!("ended more than once: {outputs} in the output, {dead} dead")
        } else if let (true, Some(role)) = (life.has(Mark::ENDED_BEFORE), life.waits_in()) {
            format!("ended ({outputs} in the output, {dead} dead), and waits in {role} to end again")
        } else {
            return;
        };
        report.doubled.add(|| Finding {
            origin: self.name(place),
            at: self.second_ends.get(&(place, number)).map(ToString::to_string),
            reason,
        });
    }

    /// A redriven record is the one that died.
    fn judge_redriven(&self, report: &mut Report, place: Place, number: u32, life: &Life) {
        let first = self.table.first_life(place).filter(|_| number > 0);
        if first.is_some_and(|first| !first.equals(life)) && !life.has(Mark::ALTERED) {
            report.altered.add(|| Finding {
                origin: self.name(place),
                at: None,
                reason: format!("redrive {number} is not what was there before the first redrive"),
            });
        }
    }

    /// Whether it had been seen before the source was read, so that the source must have it.
    fn is_known_early(&self, life: &Life) -> bool {
        let in_due = self.pipeline.return_to == ReturnTo::Due && life.has(Mark::IN_DUE);
        let marks = [Mark::ENDED_BEFORE, Mark::IN_TIER, Mark::WITH_SCHEDULER];
        marks.into_iter().any(|mark| life.has(mark)) || in_due
    }

    /// Puts an origin where its last life says it belongs.
    fn settle(&self, report: &mut Report, place: Place, life: &Life, in_source: bool, known_early: bool) {
        if !in_source {
            let is_kept = self
                .source_begins
                .get(&place.0)
                .is_some_and(|begin| place.1 >= *begin);
            if !is_kept {
                report.source_gone += 1;
            } else if known_early {
                report.unknown.add(|| Finding {
                    origin: self.name(place),
                    at: None,
                    reason: "is not in the source, though older and newer records are kept there".to_owned(),
                });
            } else {
                report.newer += 1;
            }
            return;
        }
        report.source += 1;
        if life.has_ended() {
            *report.retries.entry(u32::from(life.retries)).or_default() += 1;
        }
        if life.outputs > 0 {
            report.output += 1;
        } else if life.dead > 0 {
            report.dead += 1;
            let class = life.class.map_or("unknown", |class| class.as_str());
            *report.dead_by_class.entry(class.to_owned()).or_default() += 1;
        } else if let Some(role) = life.waits_in() {
            match role {
                Role::Source => report.waiting.in_source += 1,
                Role::Tier => report.waiting.in_tiers += 1,
                Role::Scheduler => report.waiting.in_scheduler += 1,
                Role::Due | Role::Output | Role::Dead => report.waiting.in_due += 1,
            }
        } else if !report.successes_counted {
            report.uncounted += 1;
        } else {
            let last = if life.has(Mark::IN_DUE) {
                "was last seen in the due topic"
            } else if life.has(Mark::WITH_SCHEDULER) {
                "was last seen with the scheduler"
            } else if life.has(Mark::IN_TIER) {
                "was last seen in a tier"
            } else {
                "was only seen in the source"
            };
            report.lost.add(|| Finding {
                origin: self.name(place),
                at: None,
                reason: format!("{last}, where it is done, and is nowhere else"),
            });
        }
    }

    fn has_output(&self) -> bool {
        self.pipeline
            .topics()
            .iter()
            .any(|(_, role)| *role == TopicRole::Output)
    }

    fn name(&self, (partition, offset): Place) -> String {
        Position {
            topic: self.pipeline.source.clone(),
            partition,
            offset,
        }
        .to_string()
    }
}

fn compare(
    life: &mut Life,
    record: &Record,
    origin: &Origin,
    role: Role,
    check: Compare,
    altered: &mut Findings,
) {
    let Some(difference) = life.compare(role, Content::of(record), check) else {
        return;
    };
    if !life.has(Mark::ALTERED) {
        life.mark(Mark::ALTERED);
        altered.add(|| finding(origin, record, difference));
    }
}

fn finding(origin: &Origin, record: &Record, reason: String) -> Finding {
    let position = Position {
        topic: origin.topic.clone(),
        partition: origin.partition,
        offset: origin.offset,
    };
    Finding {
        origin: position.to_string(),
        at: Some(record.position.to_string()),
        reason,
    }
}

/// The time lock that the record carries, however far away it is.
fn due_time(record: &Record) -> Option<Timestamp> {
    record.headers.single(PROCESS_AFTER).ok()??;
    let end_of_time = Timestamp::from_millis(i64::MAX);
    ReservedHeaders::read(record)
        .ok()?
        .process_after(end_of_time, Span::default())
        .ok()
}

#[cfg(test)]
mod tests;
