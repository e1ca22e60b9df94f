//! Collects the copies of the records of one pipeline and classifies defects. No IO.
//!
//! A record is identified by its origin, which its reserved headers contain. Each copy is compared with the first copy
//! that was read, by hash, so the order of reading does not matter. A record that does not belong to the pipeline is
//! foreign: it is counted separately and is not a defect.
//!
//! A redriven record keeps its origin and starts a new life, which differs from the one before only in its
//! edits. Each life can end once. The last life decides how the record is counted.
//!
//! A ledger can audit a pipeline in several passes ([`Ledger::begin_pass`]), and gets each copy once. It keeps only records of which something can
//! still follow: those that wait or have just ended, dead and redriven ones, and those with a defect. Of all others, it keeps counts
//! ([`Ledger::settle`]). A record of the part of the source that was read, and that is not kept, has ended as it should: another end, or a copy that
//! waits, is one too many.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use redeliver_core::headers::{ERROR_CLASS, Origin, PAYLOAD_OMITTED, PROCESS_AFTER, ReservedHeaders};
use redeliver_core::pipeline::{ReturnTo, TopicRole};
use redeliver_core::route::Arrival;
use redeliver_core::{HandlerChanges, HumanDuration, Pipeline, Position, Record, Timestamp};

use crate::content::{self, Content};
use crate::report::{Finding, Findings, Lateness, Report};
use crate::table::{Compare, Key, Life, Mark, Place, Role, Table};

/// A record of the pipeline in the scheduler.
#[derive(Clone, Copy, Debug)]
pub struct Scheduled(Key);

/// Copies in a partition, by offset.
type Copies = BTreeMap<i64, (Key, Role)>;

/// The part of a partition of the source that was read.
#[derive(Clone, Copy, Debug)]
struct SourceRange {
    /// The first offset.
    begin: i64,
    /// The offset after the last one, and the end of the partition, between which all records are unread; `None` if everything was read.
    unread: Option<(i64, i64)>,
}

/// The part of a partition of the source that was read ahead: after what its group had completed then.
#[derive(Clone, Debug, Default)]
struct Ahead {
    /// The offset after the last record.
    to: i64,
    /// Retries that have returned.
    returned: BTreeSet<i64>,
    /// The number of other records.
    others: u64,
}

/// Records that are not kept any more.
#[derive(Clone, Debug, Default)]
struct Settled {
    output: u64,
    uncounted: u64,
    retries: BTreeMap<u32, u64>,
}

/// Collects the records of a pipeline whose handler writes one result per success.
///
/// Read the source last. The other topics of a pipeline that is not running can be read in any order; for one that is
/// running, see [`crate::run`].
pub struct Ledger {
    pipeline: Pipeline,
    results: Compare,
    table: Table,
    source: BTreeMap<i32, SourceRange>,
    positions_are_known: bool,
    /// Lives that have ended since.
    later_ends: Vec<Key>,
    /// The copies that their groups had not processed when the committed offsets were read last, by topic and partition.
    unread: BTreeMap<(Arc<str>, i32), Copies>,
    /// Lives whose jobs have not ended.
    scheduled: Vec<Key>,
    settled: Settled,
    ahead: BTreeMap<i32, Ahead>,
    /// The position of the second end of a life, for the first [`Findings::LISTED`] lives that have one.
    second_ends: BTreeMap<Key, Position>,
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
            source: BTreeMap::new(),
            positions_are_known: false,
            later_ends: Vec::new(),
            unread: BTreeMap::new(),
            scheduled: Vec::new(),
            settled: Settled::default(),
            ahead: BTreeMap::new(),
            second_ends: BTreeMap::new(),
            early: Findings::default(),
            altered: Findings::default(),
            foreign: Findings::default(),
            lateness: BTreeMap::new(),
        }
    }

    /// Begins a pass: the committed offsets were read. All ends that were added were written before that.
    pub fn begin_pass(&mut self, is_unread: impl Fn(&Position) -> bool) {
        let table = &mut self.table;
        for key in std::mem::take(&mut self.later_ends) {
            if let Some(life) = table.get_mut(key) {
                life.mark(Mark::ENDED_BEFORE);
            }
        }
        for key in std::mem::take(&mut self.scheduled) {
            if let Some(life) = table.get_mut(key) {
                life.unmark(Mark::WAITS_WITH_SCHEDULER);
            }
        }
        self.unread.retain(|(topic, partition), copies| {
            copies.retain(|offset, (key, role)| {
                let position = Position {
                    topic: topic.clone(),
                    partition: *partition,
                    offset: *offset,
                };
                let is_kept = is_unread(&position);
                if !is_kept && let Some(life) = table.get_mut(*key) {
                    life.remove_unread(*role);
                }
                is_kept
            });
            !copies.is_empty()
        });
        self.positions_are_known = false;
    }

    /// A partition of the source was read from `begin` to `to`, and its group has completed no record from `to` to `end`. `begin` stays that of the first call:
    /// records before it are not checked.
    pub fn source_is_read(&mut self, partition: i32, begin: i64, to: i64, end: i64) {
        let unread = Some((to, end.max(to)));
        let range = self
            .source
            .entry(partition)
            .or_insert(SourceRange { begin, unread });
        range.unread = unread;
    }

    /// Adds a record of the source after what its group has completed: it waits there. Only a retry that has returned to the source has other copies, and is
    /// kept. The record is added again once the group has completed it. Read each partition in order.
    pub fn read_ahead(&mut self, record: &Record) {
        let (partition, offset) = (record.position.partition, record.position.offset);
        if offset < self.ahead_to(partition) {
            return;
        }
        let has_returned = !is_at(&self.origin_in_source(record), &record.position);
        let ahead = self.ahead.entry(partition).or_default();
        ahead.to = offset + 1;
        if has_returned {
            ahead.returned.insert(offset);
            self.in_source(record, true);
        } else {
            ahead.others += 1;
        }
    }

    /// Up to where a partition of the source was read ahead.
    #[must_use]
    pub fn ahead_to(&self, partition: i32) -> i64 {
        self.ahead.get(&partition).map_or(0, |ahead| ahead.to)
    }

    /// How many records and copies are kept.
    #[must_use]
    pub fn size(&self) -> usize {
        // Those that have just ended go with the next pass.
        let lives = self.table.len().saturating_sub(self.later_ends.len());
        lives + self.unread.values().map(Copies::len).sum::<usize>()
    }

    /// How many lives of records are kept now.
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// Forgets records that have ended as they should, and keeps their number, after a pass has read everything.
    pub fn settle(&mut self) {
        let needs_result = self.successes_counted();
        let (source, settled) = (&self.source, &mut self.settled);
        self.table.settle(|(partition, offset), is_redriven, life| {
            let read_to = source.get(&partition).and_then(|range| range.unread);
            let is_read = read_to.is_some_and(|(to, _)| offset < to) && life.has(Mark::IN_SOURCE);
            let is_last = !is_redriven && life.dead == 0 && life.waits_in().is_none();
            if !is_read || !is_last || life.outputs > 1 || life.has(Mark::COUNTED) {
                return false;
            }
            if life.outputs == 0 {
                settled.uncounted += u64::from(!needs_result);
                return !needs_result;
            }
            let is_settled = life.has(Mark::ENDED_BEFORE);
            if is_settled {
                settled.output += 1;
                *settled.retries.entry(u32::from(life.retries)).or_default() += 1;
            }
            is_settled
        });
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
    /// processed the command yet. Returns the argument for [`Ledger::still_scheduled`], unless the record is foreign or not checked.
    pub fn scheduled(&mut self, record: &Record, unread: bool) -> Option<Scheduled> {
        let origin = Arrival::salvaged(record).origin;
        let key = (origin.partition, origin.offset, content::life(record));
        self.copy(record, &origin, Role::Scheduler, unread)
            .then_some(Scheduled(key))
    }

    /// Marks a record as waiting in this pass, because its job has not ended.
    pub fn still_scheduled(&mut self, Scheduled(key): Scheduled) {
        self.add(key, true);
        self.table.life(key).mark(Mark::WAITS_WITH_SCHEDULER);
        self.scheduled.push(key);
    }

    /// Adds a record of the due topic. `unread`: whether the group of the workers has not processed it yet.
    pub fn due(&mut self, record: &Record, unread: bool) {
        let origin = Arrival::salvaged(record).origin;
        self.released(record, &origin, unread);
    }

    /// Adds a record of the source topic, which can be a retry that returned to the source. `unread`: whether the group
    /// of the workers has not processed it yet.
    pub fn source(&mut self, record: &Record, unread: bool) {
        let offset = record.position.offset;
        let ahead = self.ahead.get_mut(&record.position.partition);
        if let Some(ahead) = ahead.filter(|ahead| offset < ahead.to) {
            if ahead.returned.remove(&offset) {
                return;
            }
            ahead.others = ahead.others.saturating_sub(1);
        }
        self.in_source(record, unread);
    }

    fn in_source(&mut self, record: &Record, unread: bool) {
        let Position {
            partition, offset, ..
        } = record.position;
        let first = SourceRange {
            begin: offset,
            unread: None,
        };
        let range = self.source.entry(partition).or_insert(first);
        if range.unread.is_none() {
            range.begin = offset.min(range.begin);
        }
        let origin = self.origin_in_source(record);
        if is_at(&origin, &record.position) {
            self.copy(record, &origin, Role::Source, unread);
        } else {
            self.released(record, &origin, unread);
        }
    }

    fn origin_in_source(&self, record: &Record) -> Origin {
        let arrival = Arrival::read(&self.pipeline, record);
        arrival.unwrap_or_else(|_| Arrival::salvaged(record)).origin
    }

    fn released(&mut self, record: &Record, origin: &Origin, unread: bool) {
        if !self.copy(record, origin, Role::Due, unread) {
            return;
        }
        let (Some(released), Some(due)) = (record.timestamp, due_time(record)) else {
            return;
        };
        let margin = released.as_millis().saturating_sub(due.as_millis());
        *self.lateness.entry(rounded(margin)).or_default() += 1;
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

    /// Whether a record came in before the audit has begun.
    fn is_earlier(&self, origin: &Origin) -> bool {
        let range = self.source.get(&origin.partition);
        range.is_some_and(|range| range.unread.is_some() && origin.offset < range.begin)
    }

    /// Adds a copy that is not an end. Returns false if it is foreign, or not checked.
    fn copy(&mut self, record: &Record, origin: &Origin, role: Role, unread: bool) -> bool {
        if *origin.topic != *self.pipeline.source {
            self.add_foreign(record, Some(origin));
            return false;
        }
        if self.is_earlier(origin) {
            return false;
        }
        let key = (origin.partition, origin.offset, content::life(record));
        if role != Role::Source && !self.add(key, unread) {
            return true;
        }
        let life = self.table.life(key);
        life.mark(match role {
            Role::Source => Mark::IN_SOURCE,
            Role::Tier => Mark::IN_TIER,
            Role::Scheduler => Mark::WITH_SCHEDULER,
            Role::Due | Role::Output | Role::Dead => Mark::IN_DUE,
        });
        if unread {
            let Position {
                topic,
                partition,
                offset,
            } = &record.position;
            let copies = self.unread.entry((topic.clone(), *partition)).or_default();
            if copies.insert(*offset, (key, role)).is_none() {
                life.add_unread(role);
            }
        }
        compare(life, record, origin, role, Compare::Everything, &mut self.altered);
        true
    }

    /// Keeps a life from now on. Returns false if it is settled, and a copy that is not `news` changes nothing.
    fn add(&mut self, key: Key, is_news: bool) -> bool {
        let (partition, offset, _) = key;
        let first = (partition, offset, 0);
        let is_read = |range: &SourceRange| {
            let read_to = range.unread.map(|(to, _)| to);
            range.begin <= offset && read_to.is_some_and(|to| offset < to)
        };
        let is_settled = !self.table.contains(key)
            && !self.table.contains(first)
            && self.source.get(&partition).is_some_and(is_read);
        if !is_settled {
            return true;
        }
        if is_news {
            let needs_result = self.successes_counted();
            let life = self.table.life(first);
            life.mark(Mark::IN_SOURCE);
            if needs_result {
                life.mark(Mark::ENDED_BEFORE);
                life.mark(Mark::COUNTED);
                life.outputs = 1;
            } else {
                self.settled.uncounted = self.settled.uncounted.saturating_sub(1);
            }
        }
        is_news
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
        if self.is_earlier(origin) {
            return;
        }
        let retries = reserved
            .and_then(|reserved| reserved.retry_count().ok())
            .unwrap_or(0);
        let key = (origin.partition, origin.offset, content::life(record));
        self.add(key, true);
        let life = self.table.life(key);
        if life.has_ended() && self.second_ends.len() < Findings::LISTED {
            self.second_ends
                .entry(key)
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
        if self.positions_are_known {
            self.later_ends.push(key);
        } else {
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
        let settled = self.settled.clone();
        let mut report = Report {
            pipeline: self.pipeline.name.to_string(),
            source: settled.output + settled.uncounted,
            output: settled.output,
            uncounted: settled.uncounted,
            retries: settled.retries,
            successes_counted: self.successes_counted(),
            early: self.early.clone(),
            altered: self.altered.clone(),
            foreign: self.foreign.clone(),
            min_margin_ms: self.lateness.keys().next().copied(),
            lateness: Lateness::of(&self.lateness),
            ..Report::default()
        };
        let mut not_taken: u64 = self.ahead.values().map(|ahead| ahead.others).sum();
        for (place, lives) in self.table.origins() {
            // Whether any of its lives was read in the source, or is unread there, and whether any was known before the source was read.
            let (mut in_source, mut is_known) = (false, false);
            let mut is_unread = false;
            let mut before = None;
            for (number, life) in &lives {
                self.check_ends(&mut report, place, *number, life);
                if let Some(before) = before.replace((*number, *life)) {
                    self.check_redriven(&mut report, place, before, (*number, *life));
                }
                is_unread |= life.has(Mark::ENDED_BEFORE) && self.is_not_taken(place);
                in_source |= life.has(Mark::IN_SOURCE);
                is_known |= self.is_known_before_source(place, life);
            }
            if is_unread && !in_source {
                in_source = true;
                not_taken = not_taken.saturating_sub(u64::from(place.1 < self.ahead_to(place.0)));
            }
            let is_counted = lives.iter().any(|(_, life)| life.has(Mark::COUNTED));
            if let (Some((number, last)), false) = (lives.last(), is_counted) {
                report.redriven += u64::from(*number > 0 && in_source);
                self.count(&mut report, place, last, in_source, is_known);
            }
        }
        report.source += not_taken;
        report.waiting.in_source += not_taken;
        report
    }

    /// Reports a life that has ended more than once, or has ended and still waits.
    fn check_ends(&self, report: &mut Report, place: Place, number: u32, life: &Life) {
        let (outputs, dead) = (life.outputs, life.dead);
        let reason = if u16::from(outputs) + u16::from(dead) > 1 {
            format!("ended more than once: {outputs} in the output, {dead} dead")
        } else if let (true, Some(role)) = (life.has(Mark::ENDED_BEFORE), self.waits_in(place, life)) {
            format!("ended ({outputs} in the output, {dead} dead) and still waits in {role}")
        } else {
            return;
        };
        report.doubled.add(|| Finding {
            origin: self.name(place),
            at: self
                .second_ends
                .get(&(place.0, place.1, number))
                .map(ToString::to_string),
            reason,
        });
    }

    /// Reports a redriven record with differences from its dead letter that are not edits.
    fn check_redriven(
        &self,
        report: &mut Report,
        place: Place,
        (previous_number, previous): (u32, &Life),
        (number, life): (u32, &Life),
    ) {
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

    /// Whether all records of the source from this place on are unread.
    fn is_not_taken(&self, (partition, offset): Place) -> bool {
        let unread = self.source.get(&partition).and_then(|range| range.unread);
        unread.is_some_and(|(to, end)| (to..end).contains(&offset))
    }

    fn waits_in(&self, place: Place, life: &Life) -> Option<Role> {
        let in_source = || self.is_not_taken(place).then_some(Role::Source);
        life.waits_in().or_else(in_source)
    }

    /// Whether a copy was read before the source, so that the source must contain the record.
    fn is_known_before_source(&self, (partition, offset): Place, life: &Life) -> bool {
        if life.has(Mark::ENDED_BEFORE) {
            return true;
        }
        let unread = self.source.get(&partition).and_then(|range| range.unread);
        // It was completed after the committed offsets were read, up to which the source was read.
        if unread.is_some_and(|(to, _)| to <= offset) {
            return false;
        }
        let in_due = self.pipeline.return_to == ReturnTo::Due && life.has(Mark::IN_DUE);
        life.has(Mark::IN_TIER) || life.has(Mark::WITH_SCHEDULER) || in_due
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
            let range = self.source.get(&place.0);
            let is_kept = range.is_some_and(|range| range.begin <= place.1);
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
        } else if let Some(role) = self.waits_in(place, life) {
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

    /// Whether every success has a result.
    fn successes_counted(&self) -> bool {
        let topics = self.pipeline.topics();
        let has_output = topics.iter().any(|(_, role)| *role == TopicRole::Output);
        has_output && !self.pipeline.drops_results
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

fn is_at(origin: &Origin, position: &Position) -> bool {
    (&origin.topic, origin.partition, origin.offset) == (&position.topic, position.partition, position.offset)
}

/// Margins of at least ten seconds have three significant digits, so that the number of different ones is limited.
fn rounded(millis: i64) -> i64 {
    let digits = millis.unsigned_abs().checked_ilog10().unwrap_or(0);
    let unit = if digits < 4 { 1 } else { 10_i64.pow(digits - 2) };
    millis / unit * unit
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
