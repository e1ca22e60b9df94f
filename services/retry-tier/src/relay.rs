//! The relay of one tier: waiting records go to their return topic when they are due.
//!
//! Waiting happens in the lane between transactions, never inside of one and never by sleeping in the
//! consumer. How many records are held at once is bounded per partition, so a million waiting records
//! cost disk in Kafka and nothing here.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use redeliver_core::backoff::MAX_WAIT;
use redeliver_core::headers::{self, ReservedHeaders};
use redeliver_core::pipeline::Returns;
use redeliver_core::route;
use redeliver_core::{Failure, Output, Pipeline, Position, Record, Span, Timestamp};
use redeliver_kafka::{AssignmentId, Processor, Refused, TopicWatch, TransactionBatch};
use redeliver_runtime::telemetry::{SpanKind, Tracer};
use redeliver_runtime::trace_context::span_context;

use crate::metrics::TierMetrics;
use crate::window::{Waiting, Window};

/// How much one partition may hold.
#[derive(Clone, Copy, Debug)]
pub struct LookAhead {
    /// Records.
    pub records: usize,
    /// Bytes, about; one record more than fits may be held.
    pub bytes: usize,
}

/// A pipeline that a relay serves.
#[derive(Clone, Debug)]
pub(crate) struct Served {
    pipeline: Arc<Pipeline>,
    returns: Returns,
}

impl Served {
    /// `has_due`: whether the pipeline's due topic exists.
    pub(crate) fn new(pipeline: Arc<Pipeline>, has_due: bool) -> Self {
        Self {
            returns: pipeline.returns(has_due),
            pipeline,
        }
    }
}

/// A topic of the tier and what belongs to it.
#[derive(Clone, Debug)]
struct Source {
    served: Served,
    /// The tiers of the pipeline and their topics, to move a record to the right one.
    carriers: HashMap<Span, Arc<str>>,
}

/// Whether it is certain that a topic does not exist.
pub(crate) type IsMissing = Box<dyn Fn(&str) -> bool + Send>;

/// What the process's watch says.
pub(crate) fn is_missing(watch: &TopicWatch) -> IsMissing {
    let watch = watch.clone();
    Box::new(move |topic| watch.missing_for(topic).is_some())
}

/// The relay's [`Processor`].
pub(crate) struct Relay {
    tier: Span,
    look_ahead: LookAhead,
    sources: HashMap<Arc<str>, Arc<Source>>,
    partitions: HashMap<AssignmentId, Partition>,
    order: Vec<AssignmentId>,
    next: usize,
    metrics: TierMetrics,
    tracer: Tracer,
    /// Whether a topic does not exist. What should be written there stays where it is, however late it becomes.
    is_missing: IsMissing,
    /// When it was last said that records wait for a topic.
    said: Option<Timestamp>,
    /// In the order of the turn's outputs, of which every record has one.
    in_turn: Vec<Fate>,
}

struct Partition {
    source: Arc<Source>,
    number: i32,
    window: Window,
    /// What need not wait: dead letters of malformed records, and the offsets of these.
    rejected: VecDeque<(i64, Output)>,
    rejected_bytes: usize,
    /// When a full window was last searched for records that belong elsewhere.
    searched: Option<Timestamp>,
}

/// What becomes of a record of the turn.
#[derive(Clone, Copy)]
enum Fate {
    /// It is released; it was due then.
    Released(Timestamp),
    /// It goes to the end of another tier.
    Moved,
    /// It goes to the dead-letter topic.
    Rejected,
}

/// How often it is said that records wait for a topic.
const SAY: Span = Span::from_secs(30);
/// How often a full window is searched for records that belong elsewhere.
const SEARCH_INTERVAL: Span = Span::from_secs(1);

impl Relay {
    /// A relay for this tier of these pipelines, which need not have it any more.
    pub(crate) fn new(
        tier: Span,
        pipelines: &[Served],
        look_ahead: LookAhead,
        metrics: TierMetrics,
        tracer: Tracer,
        is_missing: IsMissing,
    ) -> Self {
        let sources = pipelines.iter().map(|served| {
            let pipeline = &served.pipeline;
            let tiers = pipeline.policy.tiers().into_iter();
            let source = Source {
                served: served.clone(),
                carriers: tiers.map(|tier| (tier, pipeline.tier_topic(tier))).collect(),
            };
            (pipeline.tier_topic(tier), Arc::new(source))
        });
        Self {
            tier,
            look_ahead,
            sources: sources.collect(),
            partitions: HashMap::new(),
            order: Vec::new(),
            next: 0,
            metrics,
            tracer,
            is_missing,
            said: None,
            in_turn: Vec::new(),
        }
    }

    /// The topics it writes.
    pub(crate) fn written_topics(&self) -> Vec<Arc<str>> {
        let mut topics = Vec::new();
        for source in self.sources.values() {
            topics.extend(source.served.returns.topics().cloned());
            topics.push(source.served.pipeline.dead_letter_topic());
            topics.extend(source.carriers.values().cloned());
        }
        topics
    }

    /// The topics it reads.
    pub(crate) fn topics(&self) -> Vec<Arc<str>> {
        self.sources.keys().cloned().collect()
    }

    fn held(&self) -> usize {
        self.partitions
            .values()
            .map(|partition| partition.window.len())
            .sum()
    }
}

impl Processor for Relay {
    fn assigned(&mut self, assignment: AssignmentId, topic: &Arc<str>, partition: i32) {
        // A lane is only ever assigned partitions of topics it subscribed to.
        let Some(source) = self.sources.get(topic).cloned() else {
            return;
        };
        self.partitions.insert(
            assignment,
            Partition {
                source,
                number: partition,
                window: Window::default(),
                rejected: VecDeque::new(),
                rejected_bytes: 0,
                searched: None,
            },
        );
        self.order.push(assignment);
    }

    fn revoked(&mut self, assignment: AssignmentId) {
        self.partitions.remove(&assignment);
        self.order.retain(|id| *id != assignment);
    }

    fn capacity(&self, assignment: AssignmentId) -> usize {
        let Some(partition) = self.partitions.get(&assignment) else {
            return 0;
        };
        partition.room(self.look_ahead)
    }

    fn accept(&mut self, assignment: AssignmentId, mut record: Record, now: Timestamp) {
        let Some(partition) = self.partitions.get_mut(&assignment) else {
            return;
        };
        let source = &partition.source;
        match lock_of(&source.served, &mut record, now) {
            Ok((due, to)) => partition.window.push(Waiting { due, to, record }),
            Err(failure) => {
                let offset = record.position.offset;
                let routing = route::reject(&source.served.pipeline, &record, &failure, now);
                for output in routing.outputs {
                    partition.rejected_bytes += output.size();
                    partition.rejected.push_back((offset, output));
                }
            }
        }
    }

    fn finish(&mut self, now: Timestamp, limit: usize, turn: &mut TransactionBatch) {
        self.in_turn.clear();
        let mut bytes = 0;
        let is_missing = &self.is_missing;
        let mut overdue = None;
        let count = self.order.len();
        for step in 0..count {
            let assignment = self.order[(self.next + step) % count];
            let Some(partition) = self.partitions.get_mut(&assignment) else {
                continue;
            };
            // All of a partition's go to one topic.
            let letter = partition.rejected.front();
            let may_reject = letter.is_some_and(|(_, letter)| !is_missing(&letter.topic));
            while may_reject
                && turn.completed.len() < limit
                && bytes < TransactionBatch::BYTES
                && let Some((offset, letter)) = partition.rejected.pop_front()
            {
                let size = letter.size();
                bytes += size;
                partition.rejected_bytes -= size;
                turn.outputs.push(letter);
                turn.completed.push((assignment, offset));
                self.in_turn.push(Fate::Rejected);
            }
            let mut existing: Option<Arc<str>> = None;
            while turn.completed.len() < limit && bytes < TransactionBatch::BYTES {
                let Some(next) = partition.window.next().filter(|next| next.due <= now) else {
                    break;
                };
                // Asked once for as many as go to the same topic.
                if existing
                    .as_ref()
                    .is_none_or(|known| !Arc::ptr_eq(known, &next.to))
                {
                    if is_missing(&next.to) {
                        overdue.get_or_insert_with(|| next.to.clone());
                        break;
                    }
                    existing = Some(next.to.clone());
                }
                let Some(waiting) = partition.window.pop_due(now) else {
                    break;
                };
                self.in_turn.push(Fate::Released(waiting.due));
                bytes += waiting.record.size();
                trace_wait(&self.tracer, self.tier, &waiting, now);
                turn.completed.push((assignment, waiting.record.position.offset));
                turn.outputs.push(forward(waiting.record, waiting.to));
            }
            if partition.room(self.look_ahead) == 0 && partition.may_search(now) {
                for (waiting, topic) in partition.misplaced(
                    self.tier,
                    now,
                    limit.saturating_sub(turn.completed.len()),
                    is_missing,
                ) {
                    self.in_turn.push(Fate::Moved);
                    turn.completed.push((assignment, waiting.record.position.offset));
                    turn.outputs.push(forward(waiting.record, topic));
                }
            }
        }
        self.next = self.next.wrapping_add(1);
        if let Some(topic) = overdue
            && self.said.is_none_or(|said| now.since(said) >= SAY.duration())
        {
            self.said = Some(now);
            tracing::warn!(
                tier = %self.tier,
                topic = &*topic,
                "records are overdue because their return topic does not exist; they are released once it does"
            );
        }
    }

    fn refused(&mut self, refused: &[Refused], turn: &mut TransactionBatch, now: Timestamp) -> bool {
        refused.iter().all(|Refused { index, failure }| {
            let output = &mut turn.outputs[*index];
            if matches!(self.in_turn[*index], Fate::Rejected) {
                return route::strip_payload(output);
            }
            let (assignment, offset) = turn.completed[*index];
            let Some(partition) = self.partitions.get(&assignment) else {
                return false;
            };
            let pipeline = &partition.source.served.pipeline;
            let record = Record {
                position: Position {
                    topic: pipeline.tier_topic(self.tier),
                    partition: partition.number,
                    offset,
                },
                timestamp: None,
                key: output.key.take(),
                value: output.value.take(),
                headers: std::mem::take(&mut output.headers),
                unreadable_headers: 0,
            };
            let mut outputs = route::reject(pipeline, &record, failure, now).outputs;
            let Some(letter) = outputs.pop() else { return false };
            *output = letter;
            self.in_turn[*index] = Fate::Rejected;
            true
        })
    }

    fn committed(&mut self, now: Timestamp) {
        for fate in self.in_turn.drain(..) {
            match fate {
                Fate::Released(due) => {
                    self.metrics.lateness.observe(now.since(due).as_secs_f64());
                    self.metrics.released.inc();
                }
                Fate::Moved => {
                    self.metrics.moved.inc();
                }
                Fate::Rejected => {
                    self.metrics.rejected.inc();
                }
            }
        }
        self.metrics
            .held
            .set(i64::try_from(self.held()).unwrap_or(i64::MAX));
    }

    fn next_due(&self) -> Option<Timestamp> {
        self.partitions
            .values()
            .filter_map(|partition| partition.window.next())
            .filter(|next| !(self.is_missing)(&next.to))
            .map(|next| next.due)
            .min()
    }

    fn is_busy(&self) -> bool {
        // What waits here waits in Kafka all the same.
        false
    }
}

impl Partition {
    /// How many more records it may hold.
    fn room(&self, look_ahead: LookAhead) -> usize {
        if self.window.bytes() + self.rejected_bytes >= look_ahead.bytes {
            return 0;
        }
        let held = self.window.len() + self.rejected.len();
        look_ahead.records.saturating_sub(held)
    }

    fn may_search(&mut self, now: Timestamp) -> bool {
        let may = self
            .searched
            .is_none_or(|last| now.since(last) >= SEARCH_INTERVAL.duration() || now < last);
        if may {
            self.searched = Some(now);
        }
        may
    }

    /// Records that would lose no time at the end of the tier they belong to, taken out of a window that
    /// is full of records that are not due, so that what stands behind them is not late.
    ///
    /// To the end of the same tier a record goes only after it has stood in it for the tier's delay. What stands
    /// behind it was written later and is not due sooner than that after its writing, so nothing is late by it, and
    /// a long wait in a short tier is not written again and again.
    fn misplaced(
        &mut self,
        tier: Span,
        now: Timestamp,
        limit: usize,
        is_missing: &IsMissing,
    ) -> Vec<(Waiting, Arc<str>)> {
        let source = self.source.clone();
        let fitting = |waiting: &Waiting| {
            let left = Span::from(waiting.due.since(now));
            (left, source.served.pipeline.tier_for(left))
        };
        let may_go = |waiting: &Waiting| {
            let (left, fitting) = fitting(waiting);
            let is_elsewhere = fitting != tier || waiting.has_stood(tier, now);
            fitting <= left && is_elsewhere && !is_missing(&source.carriers[&fitting])
        };
        let taken = self.window.take(limit, may_go);
        let with_topic = |waiting: Waiting| {
            let (_, tier) = fitting(&waiting);
            (waiting, source.carriers[&tier].clone())
        };
        taken.into_iter().map(with_topic).collect()
    }
}

/// Until when a record waits and where to, if what a tier relies on can be read.
///
/// The settings of today do not matter to a record that waits already: it was written under others. So any time lock
/// is kept that a configuration may ask for, and a wait ends in the topic that the record names, where that is one of
/// the pipeline's own. When it ends elsewhere, the record says so from then on.
fn lock_of(served: &Served, record: &mut Record, now: Timestamp) -> Result<(Timestamp, Arc<str>), Failure> {
    let ours = ReservedHeaders::read(record)?;
    let named = ours.return_topic()?;
    let to = served.returns.topic(named).clone();
    let due = ours.process_after(now, MAX_WAIT)?;
    if *named != *to {
        headers::readdress(&mut record.headers, &to);
    }
    Ok((due, to))
}

/// The span of a wait, from the failure to the release, as a child of the attempt that failed.
fn trace_wait(tracer: &Tracer, tier: Span, waiting: &Waiting, now: Timestamp) {
    if !tracer.is_on() {
        return;
    }
    let record = &waiting.record;
    let Some(parent) = span_context(&record.headers) else {
        return;
    };
    let failed_at = record.headers.last(headers::ERROR_TIMESTAMP);
    let failed_at = failed_at.and_then(|text| std::str::from_utf8(text).ok()?.parse().ok());
    let mut span = tracer.start(
        format!("wait {tier}"),
        SpanKind::Internal,
        Some(&parent),
        failed_at,
    );
    span.set("messaging.system", "kafka");
    span.set("messaging.destination.name", record.position.topic.to_string());
    span.set("redeliver.due", waiting.due.to_string());
    span.end_at(now);
}

fn forward(record: Record, topic: Arc<str>) -> Output {
    Output {
        topic,
        partition: None,
        key: record.key,
        value: record.value,
        headers: record.headers,
    }
}

#[cfg(test)]
mod tests;
