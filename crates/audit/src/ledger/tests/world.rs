//! The harness: topics of a correct pipeline, and changes of single records.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::headers::{TRACEPARENT, TraceContext, is_reserved};
use redeliver_core::pipeline::DelayQueue;
use redeliver_core::redrive::is_redrive_header;
use redeliver_core::route::{Disposition, RouteContext, Routing};
use redeliver_core::{Failure, Headers, Outcome, Output};

use super::*;

pub(super) const START: Timestamp = Timestamp::from_millis(1_700_000_000_000);
/// Exceeds the longest tier.
const LONG: Duration = Duration::from_secs(3600);

type HeaderList = Vec<(String, Option<Vec<u8>>)>;

/// A copy of a record in a topic.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) role: Role,
    pub(super) record: Record,
    pub(super) unread: bool,
}

/// The topics of a correct pipeline, written with the same routing as that of the services.
#[derive(Debug)]
pub(super) struct World {
    pub(super) pipeline: Pipeline,
    next_offset: HashMap<Arc<str>, i64>,
    pub(super) seen: Vec<Seen>,
}

/// Where a record is at the time of the audit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Location {
    Output,
    Dead,
    WaitsInTier,
    WaitsInDue,
    WaitsInSource,
}

impl World {
    pub(super) fn new(return_to: ReturnTo) -> Self {
        let pipeline = Pipeline {
            output: Some("done".into()),
            return_to,
            ..Pipeline::new("docs")
        };
        Self {
            pipeline,
            next_offset: HashMap::new(),
            seen: Vec::new(),
        }
    }

    /// A world with one record.
    pub(super) fn with_one(return_to: ReturnTo, failures: u32, location: Location) -> Self {
        let mut world = Self::new(return_to);
        world.add(failures, location, 0);
        world
    }

    /// Adds a record with this many failed attempts.
    pub(super) fn add(&mut self, failures: u32, location: Location, late: u64) {
        let record = self.plain();
        self.live(record, failures, location, late);
    }

    pub(super) fn write(
        &mut self,
        role: Role,
        output: Output,
        partition: i32,
        timestamp: Timestamp,
    ) -> Record {
        let next = self.next_offset.entry(output.topic.clone()).or_default();
        // Offsets have gaps, as markers of transactions leave them.
        *next += 1 + i64::from(*next % 7 == 3);
        let record = Record {
            position: Position {
                topic: output.topic,
                partition,
                offset: *next,
            },
            timestamp: Some(timestamp),
            key: output.key,
            value: output.value,
            headers: output.headers,
            unreadable_headers: 0,
        };
        self.seen.push(Seen {
            role,
            record: record.clone(),
            unread: false,
        });
        record
    }

    pub(super) fn source(
        &mut self,
        key: Option<&[u8]>,
        value: Option<&[u8]>,
        headers: Headers,
        partition: i32,
    ) -> Record {
        let bytes = |bytes: Option<&[u8]>| bytes.map(Bytes::copy_from_slice);
        let output = Output {
            topic: self.pipeline.source.clone(),
            partition: None,
            key: bytes(key),
            value: bytes(value),
            headers,
        };
        self.write(Role::Source, output, partition, START)
    }

    pub(super) fn plain(&mut self) -> Record {
        let headers = [
            ("tenant", Some(&b"a"[..])),
            ("tenant", None),
            ("x", Some(&b""[..])),
        ];
        self.source(Some(b"k"), Some(b"v"), headers.into_iter().collect(), 0)
    }

    fn attempt(&self, record: &Record, outcome: Outcome, late: u64, now: Timestamp) -> Routing {
        RouteContext {
            pipeline: &self.pipeline,
            arrival: &Arrival::read(&self.pipeline, record).unwrap(),
            trace: Some(&TraceContext {
                traceparent: format!("00-{late}"),
                tracestate: None,
            }),
            now,
            random: 0.5,
            partitions: &|_| Some(4),
        }
        .route(record, outcome)
    }

    /// Processes a record: this many failed attempts, each released `late` milliseconds after its due time, then on to
    /// its location.
    pub(super) fn live(&mut self, record: Record, failures: u32, location: Location, late: u64) {
        self.live_with(record, failures, location, late, Outcome::unchanged());
    }

    /// As [`World::live`], with what the handler returns at last.
    pub(super) fn live_with(
        &mut self,
        mut record: Record,
        failures: u32,
        location: Location,
        late: u64,
        success: Outcome,
    ) {
        let mut now = START;
        let stay = |world: &mut Self| world.seen.last_mut().unwrap().unread = true;
        let back = match self.pipeline.return_to {
            ReturnTo::Due => Role::Due,
            ReturnTo::Source => Role::Source,
        };
        for failure in 1..=failures {
            // The first wait goes through the scheduler, if there is one.
            let failed = match self.pipeline.long_waits {
                Some(_) if failure == 1 => Failure::throttled(LONG, "http.503", "busy"),
                _ => Failure::transient("http.503", "busy"),
            };
            let mut routing = self.attempt(&record, Outcome::Failed(failed), late, now);
            let role = match routing.disposition {
                Disposition::Waiting {
                    queue: DelayQueue::Scheduler,
                    ..
                } => Role::Scheduler,
                _ => Role::Tier,
            };
            let waiting = self.write(role, routing.outputs.remove(0), 1, now);
            if failure == failures && location == Location::WaitsInTier {
                return stay(self);
            }
            now = due_time(&waiting).unwrap().after(Duration::from_millis(late));
            let output = Output {
                topic: self.pipeline.return_topic(),
                partition: None,
                key: waiting.key,
                value: waiting.value,
                headers: waiting.headers,
            };
            record = self.write(back, output, 0, now);
            if failure == failures && location == Location::WaitsInDue {
                return stay(self);
            }
        }
        let (role, outcome) = match location {
            Location::Output => (Role::Output, success),
            Location::Dead => (Role::Dead, Outcome::Failed(Failure::permanent("http.400", "no"))),
            Location::WaitsInSource | Location::WaitsInDue | Location::WaitsInTier => return stay(self),
        };
        let mut routing = self.attempt(&record, outcome, late, now);
        self.write(role, routing.outputs.remove(0), 2, now);
    }

    pub(super) fn ledger(&self) -> Ledger {
        Ledger::new(&self.pipeline, HandlerChanges::Nothing)
    }

    pub(super) fn report_with(&self, changes: HandlerChanges) -> Report {
        let mut ledger = Ledger::new(&self.pipeline, changes);
        for seen in &self.seen {
            match seen.role {
                Role::Source => ledger.source(&seen.record, seen.unread),
                Role::Tier => ledger.tier(&seen.record, seen.unread),
                Role::Scheduler => drop(ledger.scheduled(&seen.record, seen.unread)),
                Role::Due => ledger.due(&seen.record, seen.unread),
                Role::Output => ledger.output(&seen.record),
                Role::Dead => ledger.dead(&seen.record),
            }
        }
        ledger.report()
    }

    pub(super) fn report(&self) -> Report {
        self.report_with(HandlerChanges::Nothing)
    }

    /// A second copy of the first record with this role, at another offset.
    pub(super) fn second_copy(&self, role: Role) -> Seen {
        let mut copy = self.seen.iter().find(|seen| seen.role == role).unwrap().clone();
        copy.record.position.offset += 100;
        copy
    }

    pub(super) fn last_of(&mut self, role: Role) -> &mut Record {
        &mut self
            .seen
            .iter_mut()
            .rfind(|seen| seen.role == role)
            .unwrap()
            .record
    }
}

/// A world with one record in each location. The record in the output has two failed attempts.
pub(super) fn all_locations(return_to: ReturnTo) -> World {
    let mut world = World::new(return_to);
    for (failures, location) in [
        (2, Location::Output),
        (0, Location::Dead),
        (1, Location::WaitsInTier),
        (3, Location::WaitsInDue),
        (0, Location::WaitsInSource),
    ] {
        world.add(failures, location, 4);
    }
    world
}

/// The defects of a report with their counts.
pub(super) fn defects(report: &Report) -> Vec<(&'static str, u64)> {
    let defects = report.defects().map(|(name, found)| (name, found.count));
    defects.into_iter().filter(|(_, count)| *count > 0).collect()
}

#[track_caller]
pub(super) fn check(world: &World, expected: &[(&str, u64)]) -> Report {
    let report = world.report();
    assert_eq!(defects(&report), expected, "{report}");
    assert_eq!(report.is_clean(), expected.is_empty());
    report
}

/// Changes the user headers of a record.
fn change_headers(record: &mut Record, change: impl FnOnce(&mut HeaderList)) {
    let owned = |(name, value): (&str, Option<&[u8]>)| (name.to_owned(), value.map(<[u8]>::to_vec));
    let is_user = |name: &str| !is_reserved(name) && name != TRACEPARENT;
    let (mut list, rest): (HeaderList, HeaderList) = record
        .headers
        .iter()
        .map(owned)
        .partition(|(name, _)| is_user(name));
    change(&mut list);
    let headers = list.iter().chain(&rest);
    record.headers = headers
        .map(|(name, value)| (name.as_str(), value.as_deref()))
        .collect();
}

pub(super) fn set_header(record: &mut Record, name: &str, value: &str) {
    record.headers = record.headers.filtered(|kept| kept != name);
    record.headers.push_text(name, value);
}

fn set_value(list: &mut HeaderList, index: usize, value: Option<&[u8]>) {
    if let Some(header) = list.get_mut(index) {
        header.1 = value.map(<[u8]>::to_vec);
    }
}

fn longer(bytes: Option<&Bytes>) -> Option<Bytes> {
    Some([bytes.map_or(&b""[..], |bytes| bytes), b"!"].concat().into())
}

/// A change of one copy of a record.
#[derive(Clone, Copy)]
pub(super) enum Change {
    Value(fn(Option<&Bytes>) -> Option<Bytes>),
    Key(fn(Option<&Bytes>) -> Option<Bytes>),
    /// Without the headers that it would change, the list stays as it is.
    Headers(fn(&mut HeaderList)),
}

impl Change {
    pub(super) const ALL: [Self; 16] = [
        Self::Value(|_| Some(Bytes::from_static(b"w"))),
        Self::Value(|_| None),
        Self::Value(|_| Some(Bytes::new())),
        Self::Value(longer),
        Self::Key(|_| None),
        Self::Key(|_| Some(Bytes::new())),
        Self::Key(longer),
        Self::Headers(|list| set_value(list, 0, Some(b"b"))),
        Self::Headers(|list| set_value(list, 0, None)),
        // In a plain record: null becomes empty, and empty becomes null.
        Self::Headers(|list| set_value(list, 1, Some(b""))),
        Self::Headers(|list| set_value(list, 2, None)),
        Self::Headers(|list| list.iter_mut().take(1).for_each(|header| header.0.push('x'))),
        Self::Headers(|list| list.push((String::new(), None))),
        Self::Headers(|list| drop(list.pop())),
        Self::Headers(|list| {
            if let [first, second, ..] = &mut list[..] {
                std::mem::swap(first, second);
            }
        }),
        // The same bytes with another boundary between a value and the name after it.
        Self::Headers(|list| {
            if let [(_, Some(value)), _, (name, _), ..] = &mut list[..] {
                name.extend(value.pop().map(char::from));
            }
        }),
    ];

    pub(super) fn apply(self, record: &mut Record) {
        match self {
            Self::Value(change) => record.value = change(record.value.as_ref()),
            Self::Key(change) => record.key = change(record.key.as_ref()),
            Self::Headers(change) => change_headers(record, change),
        }
    }

    /// The reason that the report must contain.
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::Value(_) => "value or content-type differs",
            Self::Key(_) | Self::Headers(_) => "key or headers differ",
        }
    }
}

/// A world whose long waits go to the scheduler.
pub(super) fn with_scheduler(return_to: ReturnTo) -> World {
    let mut world = World::new(return_to);
    world.pipeline.long_waits = Some("ingest".into());
    world
}

/// Redrives the last dead letter: writes it to the due topic.
pub(super) fn redrive(world: &mut World, count: u32) -> Record {
    redrive_with(world, count, |_| {})
}

/// As [`redrive`], of the dead letter with an edit.
pub(super) fn redrive_with(world: &mut World, count: u32, edit: impl FnOnce(&mut Record)) -> Record {
    let mut dead = world.last_of(Role::Dead).clone();
    dead.headers = dead
        .headers
        .filtered(|name| !name.starts_with("error-") && !is_redrive_header(name));
    edit(&mut dead);
    let mut headers = dead.headers;
    headers.push_text("redrive-id", "r");
    headers.push_text("redrive-count", &count.to_string());
    let output = Output {
        topic: world.pipeline.due_topic(),
        partition: None,
        key: dead.key,
        value: dead.value,
        headers,
    };
    world.write(Role::Due, output, 0, START)
}
