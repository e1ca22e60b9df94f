//! Collects the copies of the records of one pipeline and classifies defects. No IO.
//!
//! A record is identified by its origin, which its reserved headers contain. Each copy is compared with the first copy
//! that was read, by hash, so the order of reading does not matter. A record that does not belong to the pipeline is
//! foreign: it is counted separately and is not a defect.
//!
//! A redriven record keeps its origin and starts a new life, which differs from the one before only in its
//! edits. Each life can end once. The last life decides how the record is counted.

use std::collections::BTreeMap;

use redeliver_core::headers::{ERROR_CLASS, Origin, PAYLOAD_OMITTED, PROCESS_AFTER, ReservedHeaders};
use redeliver_core::pipeline::{ReturnTo, TopicRole};
use redeliver_core::route::Arrival;
use redeliver_core::{HandlerChanges, HumanDuration, Pipeline, Position, Record, Timestamp};

use crate::content::{self, Content};
use crate::report::{Finding, Findings, Lateness, Report};
use crate::table::{Compare, Life, Mark, Place, Role, Table};

/// A record of the pipeline in the scheduler.
#[derive(Clone, Copy, Debug)]
pub struct Scheduled(Place, u32);

/// Collects the records of a pipeline whose handler writes one result per success.
///
/// Read the source last. The other topics of a pipeline that is not running can be read in any order; for one that is
/// running, see [`crate::run`].
pub struct Ledger {
    pipeline: Pipeline,
    results: Compare,
    table: Table,
    /// The first offset that was read in each partition of the source.
    source_begins: BTreeMap<i32, i64>,
    positions_are_known: bool,
    /// The position of the second end of a life, for the first [`Findings::LISTED`] lives that have one.
    second_ends: BTreeMap<(Place, u32), Position>,
    early: Findings,
    altered: Findings,
    foreign: Findings,
    lateness: BTreeMap<i64, u64>,
}

impl Ledger {
    /// An empty ledger. `changes`: what the handler of the pipeline may change in a result.
    #[must_use]
    pub fn new(pipeline: &Pipeline, changes: HandlerChanges) -> Self {
        Self {
            pipeline: pipeline.clone(),
            results: match changes {
                HandlerChanges::Nothing => Compare::Everything,
                HandlerChanges::Value => Compare::AllButValue,
                HandlerChanges::Anything => Compare::Nothing,
            },
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

    /// Adds a record of an output topic.
    pub fn output(&mut self, record: &Record) {
        self.end(record, Role::Output, self.results);
    }

    /// Adds a record of the dead-letter topic. An omitted payload is not compared.
    pub fn dead(&mut self, record: &Record) {
        let check = match record.headers.last(PAYLOAD_OMITTED) {
            None => Compare::Everything,
            Some(b"value") => Compare::AllButValue,
            Some(_) => Compare::Nothing,
        };
        self.end(record, Role::Dead, check);
    }

    /// Must be called when the committed offsets of all groups have been read. A record whose end is read later may
    /// have been unread at that time.
    pub fn positions_known(&mut self) {
        self.positions_are_known = true;
    }

    /// Adds a record of a tier. `unread`: whether the group of the tier has not processed it yet.
    pub fn tier(&mut self, record: &Record, unread: bool) {
        let origin = Arrival::salvaged(record).origin;
        self.copy(record, &origin, Role::Tier, unread);
    }

    /// Adds a record in the scheduler, from a command or a job. `unread`: whether the scheduler's group has not
    /// processed the command yet. Returns the argument for [`Ledger::still_scheduled`], unless the record is foreign.
    pub fn scheduled(&mut self, record: &Record, unread: bool) -> Option<Scheduled> {
        let origin = Arrival::salvaged(record).origin;
        let life = content::life(record);
        self.copy(record, &origin, Role::Scheduler, unread)
            .then_some(Scheduled((origin.partition, origin.offset), life))
    }

    /// Marks a record as waiting, because its job has not ended.
    pub fn still_scheduled(&mut self, Scheduled(place, life): Scheduled) {
        self.table.life(place, life).mark(Mark::WAITS_WITH_SCHEDULER);
    }

    /// Adds a record of the due topic. `unread`: whether the group of the workers has not processed it yet.
    pub fn due(&mut self, record: &Record, unread: bool) {
        let origin = Arrival::salvaged(record).origin;
        self.released(record, &origin, unread);
    }

    /// Adds a record of the source topic, which can be a retry that returned to the source. `unread`: whether the group
    /// of the workers has not processed it yet.
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

    /// Adds a copy that is not an end. Returns false if it is foreign.
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
        let reserved = ReservedHeaders::read(record).ok();
        let origin = reserved.as_ref().and_then(|reserved| reserved.origin().ok());
        let is_own = |origin: &Origin| {
            *origin.topic == *self.pipeline.source
                && reserved
                    .as_ref()
                    .is_some_and(|reserved| reserved.is_retry_of(&self.pipeline.name))
        };
        let Some(origin) = origin.as_ref().filter(|origin| is_own(origin)) else {
            self.add_foreign(record, origin.as_ref());
            return;
        };
        let retries = reserved
            .and_then(|reserved| reserved.retry_count().ok())
            .unwrap_or(0);
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
            Some(origin) => finding(origin, record, "comes from another topic or pipeline".to_owned()),
            None => Finding {
                origin: position.clone(),
                at: Some(position),
                reason: "has no valid origin".to_owned(),
            },
        });
    }

    /// The report about all records that were added.
    #[must_use]
    pub fn report(&self) -> Report {
        let mut report = Report {
            pipeline: self.pipeline.name.to_string(),
            successes_counted: self.has_output() && !self.pipeline.drops_results,
            early: self.early.clone(),
            altered: self.altered.clone(),
            foreign: self.foreign.clone(),
            min_margin_ms: self.lateness.keys().next().copied(),
            lateness: Lateness::of(&self.lateness),
            ..Report::default()
        };
        let last_lives = self.table.last_lives();
        // For each redriven record: whether any of its lives was read in the source, and whether any was known before
        // the source was read.
        let mut redriven: BTreeMap<Place, (bool, bool)> = BTreeMap::new();
        for (place, number, life) in self.table.lives() {
            self.check_ends(&mut report, place, number, life);
            self.check_redriven(&mut report, place, number, life);
            let (in_source, known_before_source) =
                (life.has(Mark::IN_SOURCE), self.is_known_before_source(life));
            match last_lives.get(&place) {
                None => self.count(&mut report, place, life, in_source, known_before_source),
                Some(_) => {
                    let known = redriven.entry(place).or_default();
                    *known = (known.0 || in_source, known.1 || known_before_source);
                }
            }
        }
        for (place, number, life) in self.table.lives().filter(|(_, number, _)| *number > 0) {
            if last_lives.get(&place) == Some(&number) {
                let (in_source, known_before_source) = redriven[&place];
                report.redriven += u64::from(in_source);
                self.count(&mut report, place, life, in_source, known_before_source);
            }
        }
        report
    }

    /// Reports a life that has ended more than once, or has ended and still waits.
    fn check_ends(&self, report: &mut Report, place: Place, number: u32, life: &Life) {
        let (outputs, dead) = (life.outputs, life.dead);
        let reason = if u16::from(outputs) + u16::from(dead) > 1 {
            format!("ended more than once: {outputs} in the output, {dead} dead")
        } else if let (true, Some(role)) = (life.has(Mark::ENDED_BEFORE), life.waits_in()) {
            format!("ended ({outputs} in the output, {dead} dead) and still waits in {role}")
        } else {
            return;
        };
        report.doubled.add(|| Finding {
            origin: self.name(place),
            at: self.second_ends.get(&(place, number)).map(ToString::to_string),
            reason,
        });
    }

    /// Reports a redriven record with differences from its dead letter that are not edits.
    fn check_redriven(&self, report: &mut Report, place: Place, number: u32, life: &Life) {
        let Some((previous_number, previous)) = self.table.life_before(place, number) else {
            return;
        };
        // Of several edits in between, only the last one is known.
        let is_edited = life.has(Mark::EDITED_VALUE) || life.has(Mark::EDITED_REST);
        if is_edited && previous_number + 1 < number {
            return;
        }
        if previous.redriven_as(life) || life.has(Mark::ALTERED) {
            return;
        }
        report.altered.add(|| Finding {
            origin: self.name(place),
            at: None,
            reason: format!("redrive {number} differs from the record before it"),
        });
    }

    /// Whether a copy was read before the source, so that the source must contain the record.
    fn is_known_before_source(&self, life: &Life) -> bool {
        let in_due = self.pipeline.return_to == ReturnTo::Due && life.has(Mark::IN_DUE);
        let marks = [Mark::ENDED_BEFORE, Mark::IN_TIER, Mark::WITH_SCHEDULER];
        marks.into_iter().any(|mark| life.has(mark)) || in_due
    }

    /// Counts an origin by its last life.
    fn count(
        &self,
        report: &mut Report,
        place: Place,
        life: &Life,
        in_source: bool,
        known_before_source: bool,
    ) {
        if !in_source {
            let is_kept = self
                .source_begins
                .get(&place.0)
                .is_some_and(|begin| place.1 >= *begin);
            if !is_kept {
                report.source_gone += 1;
            } else if known_before_source {
                report.unknown.add(|| Finding {
                    origin: self.name(place),
                    at: None,
                    reason: "is not in the source, which still has older records".to_owned(),
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
                reason: format!("{last}, where it is completed, and is in no other topic"),
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
    let edited = content::edited(record);
    for (is_edited, mark) in [
        (edited.value, Mark::EDITED_VALUE),
        (edited.rest, Mark::EDITED_REST),
    ] {
        if is_edited {
            life.mark(mark);
        }
    }
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

/// The due time of a record, however far in the future it is.
fn due_time(record: &Record) -> Option<Timestamp> {
    record.headers.single(PROCESS_AFTER).ok()??;
    let end_of_time = Timestamp::from_millis(i64::MAX);
    ReservedHeaders::read(record)
        .ok()?
        .process_after(end_of_time, HumanDuration::default())
        .ok()
}

#[cfg(test)]
mod tests;
