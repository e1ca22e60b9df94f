//! The [`Processor`] of a lane of the scheduler: one [`Shard`] per partition of the ingest topic, each with a
//! [`ShardIndexer`].
//!
//! After a step of the wall clock, nothing is dispatched and no command is read until the new time is confirmed: due times
//! and idempotency keys depend on it. The index is brought up to date meanwhile.

use std::collections::BTreeMap;
use std::sync::Arc;

use redeliver_core::wait::LogThrottle;
use redeliver_core::{Clock, Record, Timestamp};
use redeliver_kafka::{AssignmentId, KafkaSettings, Processor, Refused, TopicId, TransactionBatch};
use redeliver_service::due::Waiting;
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::controls::AppStates;
use crate::index::{Index, MemoryPressure, Usage};
use crate::index_messages::IndexRequest;
use crate::indexer::{IndexResponses, ShardIndexer};
use crate::limits::{MemoryShare, ProcessLimits};
use crate::metrics::SchedulerMetrics;
use crate::readiness::ShardReadiness;
use crate::settings::Settings;
use crate::shard::{Obstacle, Shard, Target};
use crate::topic_changes::TopicChanges;
use crate::topics::TopicState;
use crate::turns::{AssignedShard, Turns};

/// The capacity of the channel to an indexer: at least one per kind of request, since one of each can be in progress.
const INDEX_REQUESTS: usize = 8;

/// The scheduler's [`Processor`].
pub(crate) struct Scheduler<I> {
    pub(crate) settings: Arc<Settings>,
    pub(crate) index: I,
    pub(crate) kafka: KafkaSettings,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) metrics: SchedulerMetrics,
    /// To the task that runs the indexers.
    pub(crate) indexers: mpsc::Sender<ShardIndexer<I>>,
    pub(crate) responses: Arc<IndexResponses>,
    pub(crate) readiness: Arc<ShardReadiness>,
    pub(crate) topic_changes: TopicChanges,
    pub(crate) limits: Arc<ProcessLimits>,
    /// What the shards of this lane use of them.
    pub(crate) memory: MemoryShare,
    pub(crate) lane: LaneShards,
}

/// The shards of a lane.
#[derive(Default)]
pub(crate) struct LaneShards {
    shards: BTreeMap<AssignmentId, ShardHandle>,
    turns: Turns,
    next_due: Option<Timestamp>,
    /// The clock was not certain when it was last read.
    is_held: bool,
    pressure: MemoryPressure,
    /// Which applications are paused or limited.
    app_states: Arc<AppStates>,
    /// The number of jobs that wait for unavailable topics.
    blocked: BTreeMap<Target, usize>,
    /// The dead letters of the turn, by error code.
    turn_dead_letters: BTreeMap<String, u64>,
    /// Why all shards have stopped.
    problem: Option<String>,
    problem_log: LogThrottle,
}

struct ShardHandle {
    shard: Shard,
    number: i32,
    /// Commands that the lane had read when the clock stepped.
    deferred: Vec<Record>,
    /// Where the lane has reached the end of the partition behind them.
    end: Option<i64>,
    requests: mpsc::Sender<IndexRequest>,
    _cancel_indexer: DropGuard,
}

impl ShardHandle {
    fn send_index_requests(&mut self, now: Timestamp) {
        for request in self.shard.index_requests(now) {
            // The channel has room for one request of each kind, so this only fails if the indexer has ended. Indexers end
            // early only when the process shuts down.
            if self.requests.try_send(request).is_err() {
                tracing::debug!(shard = self.number, "indexer has ended");
            }
        }
    }
}

impl LaneShards {
    fn turns(&mut self) -> (&mut Turns, Vec<AssignedShard<'_>>) {
        let shards = self.shards.iter_mut();
        let shards = shards.map(|(id, handle)| (*id, &mut handle.shard));
        (&mut self.turns, shards.collect())
    }

    fn collect(&mut self, now: Timestamp, limit: usize, batch: &mut TransactionBatch) {
        let (turns, mut shards) = self.turns();
        turns.collect(&mut shards, now, limit, batch);
    }
}

impl<I: Index> Scheduler<I> {
    /// Passes on what the lane had read when the clock stepped, and the ends behind it.
    fn accept_deferred(&mut self, now: Timestamp) {
        for handle in self.lane.shards.values_mut() {
            for record in std::mem::take(&mut handle.deferred) {
                handle.shard.accept(record, now);
            }
            if let Some(end) = handle.end.take() {
                handle.shard.start_at(end);
            }
        }
    }

    fn send_index_requests(&mut self, now: Timestamp) {
        for handle in self.lane.shards.values_mut() {
            handle.send_index_requests(now);
        }
        self.update_memory();
    }

    fn update_memory(&mut self) {
        let shards = self.lane.shards.values();
        self.memory.set(shards.map(|handle| handle.shard.memory()).sum());
    }

    /// Reads the memory pressure of the index, and reports a change.
    fn update_memory_pressure(&mut self) {
        let Usage { mut pressure, share } = self.index.usage();
        for handle in self.lane.shards.values_mut() {
            handle.shard.set_memory_pressure(pressure);
        }
        if self
            .lane
            .shards
            .values()
            .any(|handle| handle.shard.is_index_full())
        {
            pressure = MemoryPressure::Full;
        }
        self.metrics.index_memory(share);
        if std::mem::replace(&mut self.lane.pressure, pressure) == pressure {
            return;
        }
        match pressure {
            MemoryPressure::Low => tracing::info!("Redis has free memory; accepting all jobs"),
            MemoryPressure::High | MemoryPressure::Full => {
                tracing::warn!(
                    ?pressure,
                    share,
                    "Redis is short of memory; rejecting jobs that are not due soon"
                );
            }
        }
        self.update_readiness_note();
    }

    /// Reads which applications are paused or limited, and passes a change on to the shards.
    fn update_app_states(&mut self) {
        let now = self.settings.app_states.current();
        if Arc::ptr_eq(&now, &self.lane.app_states) {
            return;
        }
        for handle in self.lane.shards.values_mut() {
            handle.shard.set_app_states(now.clone());
        }
        let before = std::mem::replace(&mut self.lane.app_states, now);
        let now = &self.lane.app_states;
        for app in before.paused.difference(&now.paused) {
            self.metrics.set_paused(app, 0);
        }
        for app in before.rates.keys().filter(|app| !now.rates.contains_key(*app)) {
            self.metrics.set_rate_limited(app, 0);
        }
        self.update_readiness_note();
    }

    /// Stops all shards after a change of the topics that only a new process can handle.
    fn check_topics(&mut self) {
        if let TopicState::Exists { partitions, .. } = self.settings.topics.state(&self.settings.ingest) {
            self.topic_changes.observe_partitions(partitions);
        }
        if let TopicState::Exists { id: Some(id), .. } = self.settings.topics.state(&self.settings.state) {
            self.topic_changes.observe_state(id);
        }
        let problem = self.topic_changes.problem();
        if let Some(problem) = &problem
            && self.lane.problem_log.should_log()
        {
            tracing::error!(problem, "shards halted");
        }
        if problem != self.lane.problem {
            self.readiness.set_halted(problem.clone());
            self.lane.problem = problem;
        }
    }

    /// Reads which jobs wait for unavailable topics, and reports a change. Also reports how many wait because their application is
    /// paused.
    fn update_blocked(&mut self) {
        let mut blocked: BTreeMap<Target, usize> = BTreeMap::new();
        let apps = self.lane.app_states.clone();
        let paused = apps.paused.iter().map(|app| (app.as_str(), 0));
        let mut paused: BTreeMap<&str, usize> = paused.collect();
        for handle in self.lane.shards.values() {
            for (obstacle, count) in handle.shard.blocked() {
                match obstacle {
                    Obstacle::UnavailableTopic(target) => *blocked.entry(target).or_default() += count,
                    Obstacle::Paused(app) => {
                        if let Some(sum) = paused.get_mut(&*app) {
                            *sum += count;
                        }
                    }
                }
            }
        }
        for (app, count) in paused {
            self.metrics.set_paused(app, count);
        }
        if blocked.is_empty() && self.lane.blocked.is_empty() {
            return;
        }
        for ((topic, app), count) in &blocked {
            let lasting = self.settings.topics.presence(topic).lasting();
            self.metrics.set_blocked(app, topic, *count, lasting);
        }
        let before = std::mem::replace(&mut self.lane.blocked, blocked);
        let blocked = &self.lane.blocked;
        for (topic, app) in before.keys().filter(|target| !blocked.contains_key(*target)) {
            tracing::info!(%app, %topic, "topic available again, or its due jobs gone");
            self.metrics.clear_blocked(app, topic);
        }
        for (topic, app) in blocked.keys().filter(|target| !before.contains_key(*target)) {
            tracing::warn!(
                %app, %topic,
                reason = %self.settings.topics.presence(topic),
                "topic unavailable; its due jobs wait (if it is missing, until kafka.topics.missing_timeout)"
            );
        }
        if !before.keys().eq(blocked.keys()) {
            self.update_readiness_note();
        }
    }

    /// Sets the note that readiness reports while the shards are ready.
    fn update_readiness_note(&self) {
        let mut notes = Vec::new();
        match self.lane.pressure {
            MemoryPressure::Low => {}
            MemoryPressure::High => {
                notes
                    .push("Redis is above redis.high_water: rejecting jobs that are not due soon".to_owned());
            }
            MemoryPressure::Full => {
                notes.push(
                    "Redis is full: rejecting jobs that are not due soon or have idempotency keys".to_owned(),
                );
            }
        }
        let paused = &self.lane.app_states.paused;
        if !paused.is_empty() {
            let paused: Vec<&str> = paused.iter().map(String::as_str).collect();
            notes.push(format!("paused applications: {}", paused.join(", ")));
        }
        if let Some((topic, app)) = self.lane.blocked.keys().next() {
            let reason = self.settings.topics.presence(topic);
            let first = format!("jobs of {app} wait for topic {topic}, which {reason}");
            notes.push(match self.lane.blocked.len() - 1 {
                0 => first,
                others => format!("{first}, and jobs for {others} more unavailable topics"),
            });
        }
        let is_any = !notes.is_empty();
        self.readiness.set_note(is_any.then(|| notes.join("; ")));
    }

    /// Counts the dead letters of a turn. Only their commit makes them count.
    fn count_dead_letters(&mut self, turn: &TransactionBatch) {
        self.lane.turn_dead_letters.clear();
        for code in turn
            .outputs
            .iter()
            .filter_map(|output| self.settings.dead_letter_code(output))
        {
            *self.lane.turn_dead_letters.entry(code.to_owned()).or_default() += 1;
        }
    }

    fn report_waiting(&mut self, now: Timestamp) {
        let shards = self.lane.shards.values();
        let waiting = shards.map(|handle| handle.shard.waiting(now));
        self.metrics.due.set(waiting.reduce(Waiting::and));
        self.report_rate_limited(now);
    }

    fn report_rate_limited(&mut self, now: Timestamp) {
        let apps = self.lane.app_states.clone();
        let mut rate_limited: BTreeMap<&str, usize> =
            apps.rates.keys().map(|app| (app.as_str(), 0)).collect();
        if rate_limited.is_empty() {
            return;
        }
        for handle in self.lane.shards.values_mut() {
            for (app, jobs) in handle.shard.rate_limited(now) {
                if let Some(sum) = rate_limited.get_mut(&*app) {
                    *sum += jobs;
                }
            }
        }
        for (app, jobs) in rate_limited {
            self.metrics.set_rate_limited(app, jobs);
        }
    }

    fn update_gauges(&self) {
        let (mut window_jobs, mut index_lag, mut live) = (0, 0, 0);
        for handle in self.lane.shards.values() {
            window_jobs += handle.shard.window_len();
            index_lag += handle.shard.index_lag();
            live += usize::from(handle.shard.is_live() && !self.topic_changes.must_stop());
        }
        self.metrics.gauges(window_jobs, index_lag, live);
    }
}

impl<I: Index> Processor for Scheduler<I> {
    fn assigned(&mut self, assignment: AssignmentId, _topic: &Arc<str>, partition: i32) {
        // The group can learn of new partitions before the topic watch does.
        self.topic_changes.observe_partitions(partition.saturating_add(1));
        self.check_topics();
        let (requests, receiver) = mpsc::channel(INDEX_REQUESTS);
        let cancelled = CancellationToken::new();
        let indexer = ShardIndexer {
            index: self.index.clone(),
            kafka: self.kafka.clone(),
            topic: self.settings.state.clone(),
            shard: partition,
            assignment,
            retention: self.settings.retention,
            clock: self.clock.clone(),
            requests: receiver,
            responses: self.responses.clone(),
            readiness: self.readiness.clone(),
            limits: self.limits.clone(),
            known_keys: self.metrics.known_keys(),
            cancelled: cancelled.clone(),
        };
        self.readiness.add(assignment, partition);
        // The task outlives the lane, so this only fails if the task has failed.
        if self.indexers.blocking_send(indexer).is_err() {
            tracing::error!(shard = partition, "index task is not running");
        }
        let handle = ShardHandle {
            shard: Shard::new(self.settings.clone(), partition),
            number: partition,
            deferred: Vec::new(),
            end: None,
            requests,
            _cancel_indexer: cancelled.drop_guard(),
        };
        self.lane.shards.insert(assignment, handle);
        // The shard may have begun with newer states than the others.
        self.update_app_states();
        self.update_readiness_note();
    }

    fn reads_topic(&mut self, assignment: AssignmentId, topic: Option<TopicId>) {
        if let Some(handle) = self.lane.shards.get_mut(&assignment) {
            handle.shard.set_topic(topic);
        }
    }

    fn starts_at(&mut self, assignment: AssignmentId, offset: i64) {
        if let Some(handle) = self.lane.shards.get_mut(&assignment) {
            handle.shard.start_at(offset);
        }
    }

    fn revoked(&mut self, assignment: AssignmentId) {
        self.readiness.remove(assignment);
        self.lane.shards.remove(&assignment);
        self.lane.turns.revoked(assignment);
        self.update_memory();
        self.update_gauges();
        self.report_waiting(self.clock.now());
    }

    fn capacity(&self, assignment: AssignmentId) -> usize {
        if self.lane.is_held || self.topic_changes.must_stop() {
            return 0;
        }
        match self.lane.shards.get(&assignment) {
            Some(handle) if self.memory.may_accept(handle.shard.memory()) => handle.shard.capacity(),
            _ => 0,
        }
    }

    fn accept(&mut self, assignment: AssignmentId, record: Record, _of_round: Timestamp) {
        if let Some(handle) = self.lane.shards.get_mut(&assignment) {
            self.metrics.received();
            // The round may have begun before the record was written. A delay must not count from then.
            match self.clock.confirmed() {
                Some(now) if handle.deferred.is_empty() => handle.shard.accept(record, now),
                _ => {
                    handle.deferred.push(record);
                    self.lane.is_held = true;
                }
            }
        }
    }

    fn reached_end(&mut self, assignment: AssignmentId, offset: i64) {
        if let Some(handle) = self.lane.shards.get_mut(&assignment) {
            handle.end = Some(offset);
        }
    }

    fn accepted_all(&mut self) {
        self.send_index_requests(self.clock.now());
    }

    fn finish(&mut self, of_round: Timestamp, limit: usize, turn: &mut TransactionBatch) {
        self.lane.turns.clear();
        self.lane.turn_dead_letters.clear();
        // Read again: the time of the round may be from before a step that another lane has seen since.
        let confirmed = self.clock.confirmed();
        self.lane.is_held = confirmed.is_none();
        let now = confirmed.unwrap_or(of_round);
        let responses = self.responses.drain();
        let has_responses = !responses.is_empty();
        for (id, response) in responses {
            if let Some(handle) = self.lane.shards.get_mut(&id) {
                handle.shard.handle_response(response, now);
            }
        }
        self.check_topics();
        if self.topic_changes.must_stop() {
            // The index still receives the previous commits.
            self.send_index_requests(now);
            self.update_gauges();
            self.lane.next_due = None;
            return;
        }
        self.update_memory_pressure();
        self.update_app_states();
        // Before jobs are taken out: they are not dispatched until the transaction is committed.
        self.report_waiting(now);
        if confirmed.is_some() {
            self.accept_deferred(now);
            self.lane.collect(now, limit, turn);
            self.count_dead_letters(turn);
        }
        self.update_blocked();
        if has_responses {
            self.update_gauges();
        }
        self.send_index_requests(now);
        let shards = self.lane.shards.values_mut();
        // During a hold, the lane looks again after its longest wait. A due time in the past would make it spin.
        self.lane.next_due = shards
            .filter_map(|handle| handle.shard.next_due())
            .min()
            .filter(|_| confirmed.is_some());
    }

    fn refused(&mut self, refused: &[Refused], turn: &mut TransactionBatch, now: Timestamp) -> bool {
        let (turns, mut shards) = self.lane.turns();
        let are_replaced = turns.refused(&mut shards, &self.settings, refused, turn, now);
        self.count_dead_letters(turn);
        are_replaced
    }

    fn changelog_written(&mut self, partition: i32, end: i64) -> Result<(), String> {
        let (turns, shards) = self.lane.turns();
        let written = turns.changelog_written(&shards, partition, end);
        written.map_err(|problem| {
            tracing::error!(shard = partition, %problem, "state topic has lost records; comparing the index with it");
            problem.to_string()
        })
    }

    fn committed(&mut self, now: Timestamp) {
        for (code, count) in std::mem::take(&mut self.lane.turn_dead_letters) {
            self.metrics.dead_letters(code, count);
        }
        let (turns, mut shards) = self.lane.turns();
        for tally in turns.committed(&mut shards) {
            self.metrics.count(tally, now);
        }
        self.send_index_requests(now);
        self.update_gauges();
        self.report_waiting(now);
    }

    fn aborted(&mut self) {
        // The lane assigns every shard again after an abort. The new shards begin with what the topics contain.
        self.lane.turns.clear();
        self.lane.turn_dead_letters.clear();
    }

    fn next_due(&self) -> Option<Timestamp> {
        self.lane.next_due
    }

    fn is_busy(&self) -> bool {
        // Undecided commands are in memory only, and are read again by the next owner.
        false
    }
}

/// Runs the indexers of a lane until the lane has ended.
///
/// # Errors
/// When an indexer panicked.
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

#[cfg(test)]
mod tests;
