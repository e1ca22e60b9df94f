//! The scheduler's part of a lane: one [`Shard`] per partition of the ingest topic, each with a [`ShardIndexer`].

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::{Clock, Record, Timestamp};
use redeliver_kafka::{AssignmentId, KafkaSettings, Processor, Refused, TransactionBatch};
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::index::{Index, Room, Usage};
use crate::indexer::{Answers, ShardIndexer};
use crate::metrics::SchedulerMetrics;
use crate::readiness::ShardReadiness;
use crate::refused;
use crate::shard::{IndexRequest, Missed, Settings, Shard, Tally, Writes};
use crate::topics::Presence;

/// One question of each kind may be under way.
const ASKS: usize = 8;

/// The scheduler's [`Processor`].
pub(crate) struct Scheduler<I> {
    pub(crate) settings: Arc<Settings>,
    pub(crate) index: I,
    pub(crate) kafka: KafkaSettings,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) metrics: SchedulerMetrics,
    /// Keepers go to the task that runs them.
    pub(crate) indexers: mpsc::Sender<ShardIndexer<I>>,
    pub(crate) answers: Arc<Answers>,
    pub(crate) readiness: Arc<ShardReadiness>,
    pub(crate) held: Held,
}

/// The shards of a lane.
#[derive(Default)]
pub(crate) struct Held {
    shards: HashMap<AssignmentId, Kept>,
    order: Vec<AssignmentId>,
    next: usize,
    next_due: Option<Timestamp>,
    room: Room,
    /// Jobs that wait for topics that do not exist.
    missed: BTreeMap<Missed, usize>,
    in_turn: Vec<(AssignmentId, Tally)>,
    /// How far the turn has written the state topic, by partition.
    ends: HashMap<i32, i64>,
}

struct Kept {
    shard: Shard,
    number: i32,
    asks: mpsc::Sender<IndexRequest>,
    _gone: DropGuard,
}

impl Kept {
    fn ask(&mut self, now: Timestamp) {
        for ask in self.shard.asks(now) {
            // There is room for one of each kind. An indexer that has ended is only seen while all ends.
            if self.asks.try_send(ask).is_err() {
                tracing::debug!(shard = self.number, "the indexer of the shard has ended");
            }
        }
    }
}

impl<I: Index> Scheduler<I> {
    /// Lets shards write, each up to its share, and then again as far as there is room.
    fn collect(&mut self, now: Timestamp, limit: usize, turn: &mut TransactionBatch) {
        let count = self.held.order.len().max(1);
        let share = (limit / count).max(limit.min(64));
        for of_each in [share, limit] {
            for step in 0..self.held.order.len() {
                let id = self.held.order[(self.held.next + step) % count];
                let room = limit.saturating_sub(turn.outputs.len()).min(of_each);
                let Some(kept) = self.held.shards.get_mut(&id).filter(|_| room > 0) else {
                    continue;
                };
                let Writes {
                    outputs,
                    completed,
                    tally,
                    ..
                } = kept.shard.finish(now, room);
                if outputs.is_empty() && completed.is_empty() {
                    continue;
                }
                if !turn.owners.contains(&id) {
                    turn.owners.push(id);
                }
                turn.outputs.extend(outputs);
                turn.completed
                    .extend(completed.into_iter().map(|offset| (id, offset)));
                self.held.in_turn.push((id, tally));
            }
        }
        self.held.next = self.held.next.wrapping_add(1);
    }

    fn ask(&mut self, now: Timestamp) {
        for kept in self.held.shards.values_mut() {
            kept.ask(now);
        }
    }

    /// Looks how full the index is, and says when that has changed what is accepted.
    fn look_at_room(&mut self) {
        let Usage { mut room, share } = self.index.usage();
        for kept in self.held.shards.values_mut() {
            kept.shard.set_room(room);
        }
        if self.held.shards.values().any(|kept| kept.shard.is_refused()) {
            room = Room::None;
        }
        self.metrics.index_memory(share);
        if std::mem::replace(&mut self.held.room, room) == room {
            return;
        }
        match room {
            Room::Enough => tracing::info!("the index has room again; jobs of any time are accepted"),
            Room::Scarce | Room::None => {
                tracing::warn!(
                    ?room,
                    share,
                    "the memory of the index runs out; far jobs are refused"
                );
            }
        }
        self.note();
    }

    /// Looks which jobs wait for topics that do not exist.
    fn look_at_topics(&mut self) {
        let mut missed: BTreeMap<Missed, usize> = BTreeMap::new();
        for kept in self.held.shards.values() {
            for (of, count) in kept.shard.parked() {
                *missed.entry(of).or_default() += count;
            }
        }
        if missed.is_empty() && self.held.missed.is_empty() {
            return;
        }
        for ((topic, app), count) in &missed {
            let lasting = match self.settings.topics.presence(topic) {
                Presence::Missing { lasting } => lasting,
                Presence::Exists | Presence::Unknown => Duration::ZERO,
            };
            self.metrics.missed(app, topic, *count, lasting);
        }
        let before = std::mem::replace(&mut self.held.missed, missed);
        let missed = &self.held.missed;
        for (topic, app) in before.keys().filter(|of| !missed.contains_key(*of)) {
            tracing::info!(%app, %topic, "no job waits for this topic any more");
            self.metrics.not_missed(app, topic);
        }
        for (topic, app) in missed.keys().filter(|of| !before.contains_key(*of)) {
            tracing::warn!(
                %app, %topic,
                "the topic of due jobs does not exist; they wait for it until kafka.topics.missing_timeout"
            );
        }
        if !before.keys().eq(missed.keys()) {
            self.note();
        }
    }

    /// What readiness says beside that the shards are ready.
    fn note(&self) {
        let mut notes = Vec::new();
        match self.held.room {
            Room::Enough => {}
            Room::Scarce => {
                notes.push(
                    "the memory of the index is above its high-water mark: far jobs are refused".to_owned(),
                );
            }
            Room::None => notes.push("the memory of the index is full: far jobs are refused".to_owned()),
        }
        if let Some((topic, app)) = self.held.missed.keys().next() {
            notes.push(match self.held.missed.len() - 1 {
                0 => format!("jobs of {app} wait for the topic {topic}, which does not exist"),
                others => format!(
                    "jobs of {app} wait for the topic {topic}, which does not exist, and others for {others} more"
                ),
            });
        }
        let is_any = !notes.is_empty();
        self.readiness.set_note(is_any.then(|| notes.join("; ")));
    }

    fn gauge(&self) {
        let (mut held, mut behind, mut live) = (0, 0, 0);
        for kept in self.held.shards.values() {
            held += kept.shard.held();
            behind += kept.shard.behind();
            live += usize::from(kept.shard.is_live());
        }
        self.metrics.gauges(held, behind, live);
    }
}

impl<I: Index> Processor for Scheduler<I> {
    fn assigned(&mut self, assignment: AssignmentId, _topic: &Arc<str>, partition: i32) {
        let (asks, receiver) = mpsc::channel(ASKS);
        let gone = CancellationToken::new();
        let indexer = ShardIndexer {
            index: self.index.clone(),
            kafka: self.kafka.clone(),
            topic: self.settings.state.clone(),
            shard: partition,
            assignment,
            memory: self.settings.memory,
            clock: self.clock.clone(),
            asks: receiver,
            answers: self.answers.clone(),
            readiness: self.readiness.clone(),
            gone: gone.clone(),
        };
        self.readiness.begins(assignment, partition);
        // The task ends only after the lane.
        if self.indexers.blocking_send(indexer).is_err() {
            tracing::error!(
                shard = partition,
                "there is nobody to keep the index of the shard"
            );
        }
        let kept = Kept {
            shard: Shard::new(self.settings.clone(), partition),
            number: partition,
            asks,
            _gone: gone.drop_guard(),
        };
        self.held.shards.insert(assignment, kept);
        self.held.order.push(assignment);
    }

    fn revoked(&mut self, assignment: AssignmentId) {
        self.readiness.ends(assignment);
        self.held.shards.remove(&assignment);
        self.held.order.retain(|id| *id != assignment);
        self.held.in_turn.retain(|(id, _)| *id != assignment);
        self.gauge();
    }

    fn capacity(&self, assignment: AssignmentId) -> usize {
        let kept = self.held.shards.get(&assignment);
        kept.map_or(0, |kept| kept.shard.capacity())
    }

    fn accept(&mut self, assignment: AssignmentId, record: Record, _of_round: Timestamp) {
        if let Some(kept) = self.held.shards.get_mut(&assignment) {
            self.metrics.received.inc();
            // The round's time may be from before the record was written, and its delay must not begin then.
            kept.shard.accept(record, self.clock.now());
        }
    }

    fn accepted_all(&mut self) {
        self.ask(self.clock.now());
    }

    fn finish(&mut self, now: Timestamp, limit: usize, turn: &mut TransactionBatch) {
        self.held.in_turn.clear();
        self.held.ends.clear();
        let answers = self.answers.take();
        let has_heard = !answers.is_empty();
        for (id, answer) in answers {
            if let Some(kept) = self.held.shards.get_mut(&id) {
                kept.shard.answer(answer, now);
            }
        }
        self.look_at_room();
        self.collect(now, limit, turn);
        self.look_at_topics();
        if has_heard {
            self.gauge();
        }
        self.ask(now);
        let shards = self.held.shards.values_mut();
        self.held.next_due = shards.filter_map(|kept| kept.shard.next_due()).min();
    }

    fn refused(&mut self, refused: &[Refused], turn: &mut TransactionBatch, now: Timestamp) -> bool {
        refused.iter().all(|Refused { index, failure }| {
            refused::replace(&self.settings, &mut turn.outputs[*index], failure, now)
        })
    }

    fn changelog_written(&mut self, partition: i32, end: i64) {
        self.held.ends.insert(partition, end);
    }

    fn committed(&mut self, now: Timestamp) {
        for (id, tally) in self.held.in_turn.drain(..) {
            self.metrics.count(tally, now);
            if let Some(kept) = self.held.shards.get_mut(&id)
                && let Some(end) = self.held.ends.remove(&kept.number)
            {
                kept.shard.committed(end);
            }
        }
        self.ask(now);
        self.gauge();
    }

    fn aborted(&mut self) {
        // Every shard is given anew after this, and begins with what the topic holds.
        self.held.in_turn.clear();
        self.held.ends.clear();
    }

    fn next_due(&self) -> Option<Timestamp> {
        self.held.next_due
    }

    fn is_busy(&self) -> bool {
        // What is not decided yet is read again.
        false
    }
}

/// Runs the indexers of a lane until it has ended.
///
/// # Errors
/// When one of them panicked.
pub(crate) async fn run_indexers<I: Index>(
    mut indexers: mpsc::Receiver<ShardIndexer<I>>,
    lane_ended: CancellationToken,
) -> Result<(), JoinError> {
    let mut running = JoinSet::new();
    loop {
        tokio::select! {
            () = lane_ended.cancelled() => return Ok(()),
            Some(indexer) = indexers.recv() => {
                running.spawn(indexer.run());
            }
            Some(ended) = running.join_next(), if !running.is_empty() => ended?,
        }
    }
}
