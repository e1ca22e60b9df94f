//! The operations of the API, independent of the protocol.
//!
//! A command is checked and written to the ingest topic, and its outcome comes back through the answers topic. Jobs and
//! statistics are read from the index, which contains committed changes after some milliseconds.
//!
//! Nothing is read from the memory of the process: each answer comes from Redis, and what is complete or unknown is told from the end of
//! the state topic at the time of the request. So a process that shuts down, and owns no shards any more, answers as another one would.
//!
//! Each operation requires a scope of its caller, as soon as it knows the application:
//!
//! | operation | scope |
//! |---|---|
//! | schedule, also in a batch | `jobs:write` for the application of the request |
//! | get | `jobs:read` for the application of the job |
//! | cancel, reschedule | `jobs:write` for the application of the job, which the request names or which is looked up |
//! | list of applications | `jobs:read` for some application; the list contains those for which the caller has it |
//! | act on a long wait | `dead-letters:operate` for the dead-letter topic of its pipeline, which is looked up |
//! | list, stats | `jobs:read` for the application of the request, or for all applications if it names none |
//!
//! A job of an application that the caller may neither read nor write is unknown to the caller, and so is a long wait whose dead letters the caller may not
//! operate on: it is looked up as often as one that does not exist. So neither an answer nor the time that it takes tells which ids exist.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use redeliver_core::{Clock, Headers, Output, Pipeline, Position, Timestamp};
use redeliver_kafka::TopicWatch;
use redeliver_kafka::murmur2::shard_of;
use redeliver_kafka::producer::Producer;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::v1::job_command::Command as Message;
use redeliver_proto::{Message as _, v1};
use redeliver_runtime::config::{Area, Verb};
use redeliver_runtime::error_chain::error_chain;
use redeliver_service::control::Controls;
use redeliver_service::identity::{Authenticator, Identity, Refusal};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::body_budget::BodyBudget;
use super::call::Call;
use super::changes::ChangeLog;
use super::completeness::{self, Completeness, KafkaWait, PartitionEnd, StatePartition, read_complete};
use super::error::RequestError;
use super::error_parts::{NoOutcome, Pending, PendingJob};
use super::rates::CallerRates;
use super::state_end::StateEnd;
use crate::admission;
use crate::answers::{PendingOutcome, PendingOutcomes};
use crate::codec;
use crate::controls::LiveAppStates;
use crate::index::{Index, Lookup, ShardStats};
use crate::job::{JobId, Kind};
use crate::request::{self, Command, Envelope, Field, Format, JobRef, Rules, When};

/// How long to wait for an outcome.
pub(super) const OUTCOME_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a lookup waits for an entry that was requested recently, once a complete index does not contain it.
const RECENT_TIMEOUT: Duration = Duration::from_secs(1);
/// The longest time between two lookups.
const LONGEST_INTERVAL: Duration = Duration::from_millis(200);
/// A job that was requested within this time may not be in the index yet.
const RECENT: Duration = Duration::from_secs(5);
/// An id that is further ahead is usually not that of a job: from version 4.0 on, Kafka refuses records whose timestamps are further in the
/// future (`message.timestamp.after.max.ms`). But older brokers accept what a producer writes whose clock is fast, and the clock of
/// this process may be slow. So such an id is looked up, and a command is written only if a job has it.
const MAX_AHEAD: Duration = Duration::from_secs(3_600);
/// The size of a request besides the job's data: names, times, and the overhead of the protocol.
const REQUEST_OVERHEAD: usize = 64 << 10;
/// The maximum number of jobs of a batch.
const MAX_BATCH: usize = 1_000;
/// The maximum number of shards that one request reads at the same time.
const SHARDS_AT_ONCE: usize = 4;
/// The default and the maximum number of minutes in statistics.
const DEFAULT_MINUTES: u32 = 60;
const MAX_MINUTES: u32 = 1_440;

/// The operations of the API.
pub(crate) struct Jobs<I> {
    pub(crate) index: I,
    pub(crate) producer: Producer,
    /// The ingest topic, to which commands are written.
    pub(crate) ingest: Arc<str>,
    pub(crate) changes: ChangeLog,
    /// The number of partitions of the ingest topic, which is the number of shards.
    pub(crate) partitions: i32,
    pub(crate) rules: Rules,
    /// Whether the topics of applications can be written.
    pub(crate) topics: TopicWatch,
    /// How many jobs of applications with a quota may wait.
    pub(crate) max_waiting: BTreeMap<Arc<str>, u64>,
    /// Which applications are paused or limited.
    pub(crate) app_states: LiveAppStates,
    pub(crate) controls: Arc<Controls>,
    /// The scheduler's window: jobs that are due within it need no index.
    pub(crate) window: Duration,
    pub(crate) outcomes: PendingOutcomes,
    pub(crate) state_end: StateEnd,
    pub(crate) clock: Arc<dyn Clock>,
    /// Cancelled when the process cannot wait for outcomes any longer.
    pub(crate) gave_up: CancellationToken,
    pub(crate) authenticator: Authenticator,
    pub(crate) rates: CallerRates,
    pub(crate) bodies: BodyBudget,
    /// The maximum size of a batch in bytes.
    pub(crate) max_batch: usize,
}

/// A request that was accepted.
pub(crate) struct Accepted {
    /// The id of the job. Without a result, no job has it if the idempotency key of the request was in use.
    pub(crate) id: JobId,
    /// The outcome and the job; `None` if the caller did not wait for the outcome.
    pub(crate) result: Option<(v1::Outcome, v1::Job)>,
}

impl<I: Index> Jobs<I> {
    /// The maximum size of a request in bytes.
    pub(crate) fn max_request(&self) -> usize {
        // JSON can need several bytes for one byte of a key or a header.
        self.rules
            .max_data
            .saturating_mul(2)
            .saturating_add(REQUEST_OVERHEAD)
    }

    /// Schedules a job. Without `wait`, returns as soon as the request is in Kafka.
    pub(crate) async fn schedule(
        &self,
        call: &Call,
        spec: v1::JobSpec,
        wait: bool,
    ) -> Result<Accepted, RequestError> {
        self.schedule_one(call, spec, wait, Instant::now() + OUTCOME_TIMEOUT)
            .await
    }

    /// Checks and counts the jobs of a batch, before any of them is parsed: a parsed job takes many times the memory of its text.
    pub(crate) fn check_batch(&self, call: &Call, jobs: usize) -> Result<(), RequestError> {
        if jobs == 0 || jobs > MAX_BATCH {
            let problem = format!("has {jobs} jobs; write 1 to {MAX_BATCH}");
            return Err(Field("jobs").malformed(call.format, &problem).into());
        }
        let counted = self.rates.take_batch(&call.caller, jobs);
        counted.map_err(RequestError::RateLimited)
    }

    /// Schedules several jobs, of which some may be invalid. The results are in the order of the jobs. All commands are written
    /// at once, so they take as long as the slowest one. [`Jobs::check_batch`] has checked their number.
    pub(crate) async fn schedule_batch(
        &self,
        call: &Call,
        specs: Vec<Result<v1::JobSpec, RequestError>>,
        wait: bool,
    ) -> Vec<Result<Accepted, RequestError>> {
        let deadline = Instant::now() + OUTCOME_TIMEOUT;
        let scheduling = specs
            .into_iter()
            .map(async |spec| self.schedule_one(call, spec?, wait, deadline).await);
        // Commands with the same key are written in this order.
        join_all(scheduling).await
    }

    async fn schedule_one(
        &self,
        call: &Call,
        spec: v1::JobSpec,
        wait: bool,
        deadline: Instant,
    ) -> Result<Accepted, RequestError> {
        // Before the application is looked up, so that the answer does not reveal which applications exist.
        self.require(&call.caller, Verb::Write, Some(&spec.app), "schedule")?;
        let trace = call.trace.clone();
        let partition = match &spec.idempotency_key {
            Some(key) => shard_of(&spec.app, key, self.partitions),
            None => fastrand::i32(0..self.partitions),
        };
        let has_key = spec.idempotency_key.is_some();
        let message = Message::Schedule(spec);
        let command = self.check(&message, call.format)?;
        // A job with an idempotency key may be a repetition that was accepted before, which only its shard knows.
        if let Command::Schedule(job) = command
            && !has_key
        {
            let pressure = self.index.usage().pressure;
            admission::check(pressure, job.due, self.clock.now(), self.window)?;
        }
        if !wait {
            let _registered = self.outcomes.register_write()?;
            let id = self.write(message, partition, "", trace, deadline).await?;
            return Ok(Accepted { id, result: None });
        }
        // Registered before the write: the outcome can arrive before Kafka has confirmed the command.
        let mut pending = self.outcomes.register()?;
        let id = self
            .write(message, partition, &pending.answer_to(), trace, deadline)
            .await?;
        let outcome = self.outcome(&mut pending, id, deadline).await;
        let outcome = outcome.map_err(|pending| {
            let job = match has_key {
                true => PendingJob::New(id),
                false => PendingJob::Id(id),
            };
            RequestError::Pending(job, pending)
        })?;
        let job = outcome.job.clone().unwrap_or_default();
        match outcome.outcome() {
            result @ (v1::Outcome::Scheduled | v1::Outcome::Duplicate | v1::Outcome::Replaced) => {
                let job = self.with_details(job).await;
                let id = job.id.parse().unwrap_or(id);
                Ok(Accepted {
                    id,
                    result: Some((result, job)),
                })
            }
            v1::Outcome::Conflict => Err(RequestError::Conflict {
                job: Box::new(self.with_details(job).await),
                reason: outcome.reason,
            }),
            _ => Err(outcome.into()),
        }
    }

    /// Cancels a job. The outcome says if it was too late.
    pub(crate) async fn cancel(&self, call: &Call, job: &JobRef) -> Result<v1::CommandOutcome, RequestError> {
        if !self.may_change(&call.caller, job, "cancel").await? {
            return Ok(unknown_job());
        }
        let message = Message::Cancel(job.cancel());
        self.check(&message, call.format)?;
        self.changes.record_cancellation(call, job).await?;
        self.command(job, message, call).await
    }

    /// Reschedules a job. The outcome says if it was too late.
    pub(crate) async fn reschedule(
        &self,
        call: &Call,
        job: &JobRef,
        when: When,
    ) -> Result<v1::CommandOutcome, RequestError> {
        if !self.may_change(&call.caller, job, "reschedule").await? {
            return Ok(unknown_job());
        }
        let message = Message::Reschedule(request::reschedule(job.cancel(), when));
        self.check(&message, call.format)?;
        self.changes.record_new_time(call, job, when).await?;
        self.command(job, message, call).await
    }

    /// Acts on a long wait. The outcome says if it was too late.
    pub(crate) async fn act_on_wait(
        &self,
        call: &Call,
        mut act: v1::ActOnLongWait,
    ) -> Result<v1::CommandOutcome, RequestError> {
        let caller = &call.caller;
        caller
            .require_some(Area::DeadLetters, Verb::Operate)
            .map_err(|refusal| self.refused(refusal, "act_on_long_wait"))?;
        (act.by, act.reason) = (caller.name().to_string(), call.reason.clone());
        let message = Message::ActOnLongWait(act);
        let Command::ActOnWait(change) = self.check(&message, call.format)? else {
            return Ok(unknown_job());
        };
        match self.find_wait(caller, change.job).await {
            Ok(_) => {}
            Err(RequestError::UnknownJob(_)) => return Ok(unknown_job()),
            Err(error) => return Err(error),
        }
        self.changes.record_wait(caller, &change).await?;
        let outcome = self.command(&JobRef::Id(change.job), message, call).await;
        let outcome = outcome.map_err(|error| match error {
            RequestError::Pending(_, pending) => {
                RequestError::Pending(PendingJob::OfAct(change.job), pending)
            }
            RequestError::Unconfirmed(reason) => RequestError::UnconfirmedAct(change.job, reason),
            error => error,
        });
        let refusal = match &outcome {
            Ok(outcome) if matches!(outcome.outcome(), v1::Outcome::Rescheduled | v1::Outcome::Dead) => None,
            Ok(outcome) => Some(outcome.outcome().as_str_name().to_owned()),
            // It takes effect later, or may do so.
            Err(RequestError::Pending(..) | RequestError::UnconfirmedAct(..)) => None,
            Err(RequestError::Rejected(reason)) => Some(reason.clone()),
            Err(_) => Some("the scheduler did not accept it".to_owned()),
        };
        if let Some(refusal) = refusal {
            self.changes.record_wait_refusal(caller, &change, &refusal).await;
        }
        outcome
    }

    /// A long wait whose dead letters the caller may see and operate on, as for an act on a record of a tier.
    async fn find_wait(&self, caller: &Identity, id: JobId) -> Result<v1::Job, RequestError> {
        let refusal = |job: &v1::Job| {
            let topic = Pipeline::new(&job.app).dead_letter_topic();
            let require = |verb| caller.require(Area::DeadLetters, verb, Some(&topic));
            require(Verb::Read).and_then(|()| require(Verb::Operate)).err()
        };
        let may_act = |job: &v1::Job| refusal(job).is_none();
        let found = self.find_visible(id, Kind::LongWait, may_act).await;
        found.map_err(|(error, hidden)| {
            if let Some(refusal) = hidden.and_then(|job| refusal(&job)) {
                // Only operators learn that this was a refusal.
                drop(self.refused(refusal, "act_on_long_wait"));
            }
            error
        })
    }

    /// A job with its payload.
    pub(crate) async fn get(&self, call: &Call, id: JobId) -> Result<v1::Job, RequestError> {
        self.require_some(&call.caller, Verb::Read, "get")?;
        self.find(&call.caller, Verb::Read, id, "get").await
    }

    /// A job for which the caller has the scope `verb`, which `operation` needs.
    async fn find(
        &self,
        caller: &Identity,
        verb: Verb,
        id: JobId,
        operation: &str,
    ) -> Result<v1::Job, RequestError> {
        let is_known = |job: &v1::Job| is_visible(caller, &job.app);
        let found = self.find_visible(id, Kind::App, is_known).await;
        let job = found.map_err(|(error, hidden)| {
            if let Some(job) = hidden {
                // Only operators learn that this was a refusal, from the log and the metric.
                drop(self.require(caller, verb, Some(&job.app), operation));
            }
            error
        })?;
        self.require(caller, verb, Some(&job.app), operation)?;
        Ok(job)
    }

    /// A job of this kind that is known to the caller. With the error comes one that is not.
    async fn find_visible(
        &self,
        id: JobId,
        kind: Kind,
        is_known: impl Fn(&v1::Job) -> bool,
    ) -> Result<v1::Job, (RequestError, Option<Box<v1::Job>>)> {
        if !self.has_shard(id) {
            return Err((RequestError::UnknownJob(Some(id)), None));
        }
        let now = self.clock.now();
        let requested = id.requested_at();
        let is_recent = requested.after(RECENT) > now && now.after(RECENT) > requested;
        let unknown = || RequestError::UnknownJob(Some(id));
        let state_end = self.partition_end(id.shard());
        let wait = KafkaWait::new();
        let completeness = Completeness::within(&wait);
        look_up_until_known(unknown, is_recent, is_known, &state_end, completeness, || {
            self.look_up(id, kind)
        })
        .await
    }

    /// The number of scheduled jobs of one application or of all (`None`), in all and by minute. 0 `minutes` means the default.
    pub(crate) async fn stats(
        &self,
        call: &Call,
        app: Option<&str>,
        minutes: u32,
    ) -> Result<v1::Stats, RequestError> {
        self.require(&call.caller, Verb::Read, app, "stats")?;
        let minutes = match minutes {
            0 => DEFAULT_MINUTES,
            1..=MAX_MINUTES => minutes,
            _ => {
                let problem = format!("is {minutes}; the maximum is {MAX_MINUTES}");
                return Err(Field("minutes").malformed(call.format, &problem).into());
            }
        };
        let now = self.clock.now();
        let wait = KafkaWait::new();
        let shards = (0..self.partitions).map(|shard| self.shard_stats(shard, app, now, minutes, &wait));
        let shards = Self::read_shards(shards.collect()).await?;
        let mut total = v1::Stats {
            per_minute: vec![0; minutes as usize],
            ..v1::Stats::default()
        };
        for stats in &shards {
            total.scheduled += stats.scheduled;
            total.due += stats.due;
            for (sum, count) in total.per_minute.iter_mut().zip(&stats.per_minute) {
                *sum += count;
            }
        }
        if total.scheduled == 0 {
            self.check_empty(app, call.format)?;
        }
        let next_due = shards.iter().filter_map(|stats| stats.next_due).min();
        total.next_due = next_due.map(to_timestamp);
        let shown = total.due + total.per_minute.iter().sum::<u64>();
        total.later = total.scheduled.saturating_sub(shown);
        Ok(total)
    }

    async fn shard_stats(
        &self,
        shard: i32,
        app: Option<&str>,
        now: Timestamp,
        minutes: u32,
        wait: &KafkaWait,
    ) -> Result<ShardStats, RequestError> {
        read_complete(&self.partition_end(shard), wait, || async {
            let stats = self.index.stats(shard, app, now, minutes).await?;
            Ok((stats.applied, stats))
        })
        .await
    }

    /// Reads several shards, of which only some at the same time. The results are in no particular order.
    pub(super) async fn read_shards<T>(
        reads: Vec<impl Future<Output = Result<T, RequestError>>>,
    ) -> Result<Vec<T>, RequestError> {
        stream::iter(reads)
            .buffer_unordered(SHARDS_AT_ONCE)
            .try_collect()
            .await
    }

    pub(super) fn partition_end(&self, partition: i32) -> PartitionEnd<'_> {
        PartitionEnd {
            ends: &self.state_end,
            partition,
        }
    }

    /// Requires a scope for the jobs of an application, or of all of them. Refusals are counted and logged.
    pub(super) fn require(
        &self,
        caller: &Identity,
        verb: Verb,
        app: Option<&str>,
        operation: &str,
    ) -> Result<(), RequestError> {
        let required = caller.require(Area::Jobs, verb, app);
        required.map_err(|refusal| self.refused(refusal, operation))
    }

    /// Counts and logs a refusal.
    fn refused(&self, refusal: Refusal, operation: &str) -> RequestError {
        self.authenticator.refused(&refusal, operation);
        refusal.into()
    }

    /// Refuses a caller that may do this with no application, before anything is looked up.
    pub(super) fn require_some(
        &self,
        caller: &Identity,
        verb: Verb,
        operation: &str,
    ) -> Result<(), RequestError> {
        if caller.may_some(Area::Jobs, verb) {
            return Ok(());
        }
        self.require(caller, verb, None, operation)
    }

    /// Requires that the caller may change a job; `false` if the caller knows no such job. An id does not tell the
    /// application, so the job is looked up unless the caller may change all jobs and the id is likely that of a job.
    async fn may_change(
        &self,
        caller: &Identity,
        job: &JobRef,
        operation: &str,
    ) -> Result<bool, RequestError> {
        let id = match job {
            JobRef::Id(id) => *id,
            // Before the application is looked up, so that the answer does not reveal which applications exist.
            JobRef::Key { app, .. } => {
                return self
                    .require(caller, Verb::Write, Some(app), operation)
                    .map(|()| true);
            }
        };
        self.require_some(caller, Verb::Write, operation)?;
        if caller.may(Area::Jobs, Verb::Write, None) && self.is_likely(id) {
            return Ok(true);
        }
        match self.find(caller, Verb::Write, id, operation).await {
            Ok(_) => Ok(true),
            Err(RequestError::UnknownJob(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Checks a request with the rules of the shard that will read it, so that no invalid request is written.
    pub(super) fn check(&self, message: &Message, format: Format) -> Result<Command, RequestError> {
        let now = self.clock.now();
        let envelope = Envelope {
            requested: now,
            now,
            key: None,
            headers: &Headers::new(),
        };
        let checked = request::check(Some(message.clone()), format, &self.rules, &envelope);
        Ok(checked.map_err(|rejected| rejected.failure)?)
    }

    async fn command(
        &self,
        job: &JobRef,
        message: Message,
        call: &Call,
    ) -> Result<v1::CommandOutcome, RequestError> {
        let (partition, concerned) = match job {
            JobRef::Id(id) => (id.shard(), PendingJob::Id(*id)),
            JobRef::Key { app, key } => (shard_of(app, key, self.partitions), PendingJob::Key),
        };
        let deadline = Instant::now() + OUTCOME_TIMEOUT;
        let mut pending = self.outcomes.register()?;
        let trace = call.trace.clone();
        let written = self
            .write(message, partition, &pending.answer_to(), trace, deadline)
            .await?;
        let outcome = self.outcome(&mut pending, written, deadline).await;
        let outcome = outcome.map_err(|pending| RequestError::Pending(concerned, pending))?;
        match outcome.outcome() {
            v1::Outcome::Rejected => Err(outcome.into()),
            _ => Ok(outcome),
        }
    }

    /// Writes a command. The id is that of the job that a request to schedule creates.
    pub(super) async fn write(
        &self,
        message: Message,
        partition: i32,
        answer_to: &str,
        trace: Headers,
        deadline: Instant,
    ) -> Result<JobId, RequestError> {
        let mut headers = trace;
        headers.push_text("content-type", redeliver_proto::CONTENT_TYPE);
        let command = v1::JobCommand {
            command: Some(message),
            answer_to: answer_to.to_owned(),
        };
        let record = Output {
            topic: self.ingest.clone(),
            partition: Some(partition),
            key: None,
            value: Some(command.encode_to_vec().into()),
            headers,
        };
        let unconfirmed = |reason: &str| RequestError::Unconfirmed(reason.to_owned());
        let sent = tokio::select! {
            biased;
            sent = self.producer.send(&record) => sent,
            () = tokio::time::sleep_until(deadline) => return Err(unconfirmed("timed out")),
            () = self.gave_up.cancelled() => return Err(unconfirmed("this scheduler is shutting down")),
        };
        let written = sent?;
        let timestamp = written
            .timestamp
            .ok_or_else(|| unconfirmed("the topic keeps no timestamps"))?;
        if written.position.offset < 0 {
            // A retry of the client found that the command was written before.
            return Err(unconfirmed("the offset of the request is unknown"));
        }
        Ok(JobId::new(
            timestamp,
            written.position.partition,
            written.position.offset,
        ))
    }

    /// Waits for the outcome of a command. `written` is what [`Jobs::write`] has returned for it.
    pub(super) async fn outcome(
        &self,
        pending: &mut PendingOutcome,
        written: JobId,
        deadline: Instant,
    ) -> Result<v1::CommandOutcome, Pending> {
        let reason = tokio::select! {
            biased;
            outcome = pending.outcome() => return Ok(outcome),
            () = tokio::time::sleep_until(deadline) => NoOutcome::Timeout(OUTCOME_TIMEOUT),
            () = self.gave_up.cancelled() => NoOutcome::ShuttingDown,
        };
        let position = Position {
            topic: self.ingest.clone(),
            partition: written.shard(),
            offset: i64::try_from(written.offset()).unwrap_or(i64::MAX),
        };
        Err(Pending { position, reason })
    }

    /// Whether the shard of an id exists. Otherwise, no job has the id.
    fn has_shard(&self, id: JobId) -> bool {
        id.shard() < self.partitions
    }

    /// Whether an id looks like that of a job: its shard exists, and its time is not far ahead.
    fn is_likely(&self, id: JobId) -> bool {
        self.has_shard(id) && id.requested_at() <= self.clock.now().after(MAX_AHEAD)
    }

    async fn look_up(&self, id: JobId, kind: Kind) -> Result<Found<v1::Job>, RequestError> {
        let (applied, found) = self
            .index
            .look_up(id.shard(), &[Lookup::Job(id)], self.clock.now())
            .await?;
        let applied = applied.ok_or(RequestError::IndexIncomplete)?.offset;
        let Some(record) = found.into_iter().next().flatten() else {
            return Ok(Found { applied, entry: None });
        };
        let job = codec::decode(id, &record).map_err(|error| {
            tracing::error!(job = %id, %error, "invalid job record in the index");
            RequestError::IndexIncomplete
        })?;
        // Records of pipelines are not visible to clients that ask for jobs, as in the outcomes of commands.
        let entry = (job.kind == kind).then(|| codec::to_proto(&job, true));
        Ok(Found { applied, entry })
    }

    /// Completes a job of which the answer contains only the id, from the index. The payload is left out, as in answers.
    async fn with_details(&self, job: v1::Job) -> v1::Job {
        if job.state() != v1::JobState::Unspecified {
            return job;
        }
        let Some(id) = job.id.parse().ok().filter(|id| self.has_shard(*id)) else {
            return job;
        };
        match self.look_up(id, Kind::App).await {
            Ok(Found {
                entry: Some(mut found),
                ..
            }) => {
                found.data.clear();
                found.key = None;
                found.headers.clear();
                found
            }
            // The outcome is final even if the job cannot be read.
            _ => job,
        }
    }
}

/// The result of a lookup.
pub(super) struct Found<T> {
    /// The offset up to which the index contains the state topic.
    pub(super) applied: i64,
    /// The job, or another entry of the index.
    pub(super) entry: Option<T>,
}

/// Whether a caller may know the jobs of an application.
pub(super) fn is_visible(caller: &Identity, app: &str) -> bool {
    let may = |verb| caller.may(Area::Jobs, verb, Some(app));
    may(Verb::Read) || may(Verb::Write)
}

/// Looks up a job or another entry that exists, or that was requested so recently that the index may not contain it yet. It is
/// unknown only if an index that is complete does not contain it. With the error comes an entry that is not known to the caller.
pub(super) async fn look_up_until_known<T, F>(
    unknown: impl Fn() -> RequestError,
    is_recent: bool,
    is_known: impl Fn(&T) -> bool,
    state: &impl StatePartition,
    mut completeness: Completeness<'_>,
    look_up: impl Fn() -> F,
) -> Result<T, (RequestError, Option<Box<T>>)>
where
    F: Future<Output = Result<Found<T>, RequestError>>,
{
    let started = Instant::now();
    let (mut complete_since, mut interval) = (None, completeness::INTERVAL);
    loop {
        let (error, may_appear, hidden) = match look_up().await {
            Ok(Found {
                entry: Some(entry), ..
            }) if is_known(&entry) => return Ok(entry),
            Ok(Found { applied, entry }) => {
                let hidden = entry.map(Box::new);
                match completeness.check(state, applied).await {
                    Ok(true) => {
                        complete_since.get_or_insert_with(Instant::now);
                        (unknown(), is_recent, hidden)
                    }
                    Ok(false) => (RequestError::IndexIncomplete, true, hidden),
                    Err(error) => {
                        tracing::warn!(
                            reason = error_chain(&error),
                            "cannot read the end of the state topic"
                        );
                        (RequestError::IndexIncomplete, true, hidden)
                    }
                }
            }
            // The shard may be moving to another scheduler.
            Err(RequestError::IndexIncomplete) => (RequestError::IndexIncomplete, true, None),
            Err(error) => (error, false, None),
        };
        let is_over = match (&error, complete_since) {
            (RequestError::IndexIncomplete, _) | (_, None) => {
                started.elapsed() >= completeness::TIMEOUT || completeness.is_over()
            }
            (_, Some(since)) => since.elapsed() >= RECENT_TIMEOUT,
        };
        if !may_appear || is_over {
            return Err((error, hidden));
        }
        tokio::time::sleep(interval).await;
        interval = (interval * 2).min(LONGEST_INTERVAL);
    }
}

fn unknown_job() -> v1::CommandOutcome {
    v1::CommandOutcome {
        outcome: v1::Outcome::Unknown.into(),
        ..v1::CommandOutcome::default()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::ready;

    use super::super::completeness::tests::Topic;
    use super::*;

    /// Looks up a job in an index that is complete up to 5. Returns the number of lookups, and the result.
    async fn lookups(
        is_recent: bool,
        job: Option<&str>,
        state: &Topic,
    ) -> (u32, Result<v1::Job, RequestError>) {
        let (id, count) = (JobId::new(Timestamp::from_millis(1), 0, 0), Cell::new(0));
        let is_known = |job: &v1::Job| job.app == "own";
        let unknown = || RequestError::UnknownJob(Some(id));
        let wait = KafkaWait::new();
        let completeness = Completeness::within(&wait);
        let found = look_up_until_known(unknown, is_recent, is_known, state, completeness, || {
            count.set(count.get() + 1);
            let entry = job.map(|app| v1::Job {
                app: app.to_owned(),
                ..v1::Job::default()
            });
            ready(Ok(Found { applied: 5, entry }))
        })
        .await;
        (count.get(), found.map_err(|(error, _)| error))
    }

    const COMPLETE: Topic = Topic {
        end: 5,
        empty_from: 5,
    };

    #[tokio::test(start_paused = true)]
    async fn foreign_job_looks_like_unknown_job() {
        for is_recent in [true, false] {
            let (unknown, result) = lookups(is_recent, None, &COMPLETE).await;
            assert!(matches!(result, Err(RequestError::UnknownJob(_))), "{result:?}");
            let (other, result) = lookups(is_recent, Some("other"), &COMPLETE).await;
            assert!(matches!(result, Err(RequestError::UnknownJob(_))), "{result:?}");
            assert_eq!((other, other > 1), (unknown, is_recent));
            let (own, result) = lookups(is_recent, Some("own"), &COMPLETE).await;
            assert_eq!((own, result.is_ok()), (1, true));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn recent_jobs_appear_after_shards_move() {
        let began = Instant::now();
        let wait = KafkaWait::new();
        let unknown = || RequestError::UnknownJob(None);
        let completeness = Completeness::within(&wait);
        let found = look_up_until_known(
            unknown,
            true,
            |_: &u8| true,
            &COMPLETE,
            completeness,
            || {
                let after = began.elapsed().as_millis();
                ready(match after {
                    // The next owner has no index, and then none of what it has yet to read.
                    0..3_000 => Err(RequestError::IndexIncomplete),
                    3_000..3_700 => Ok(Found {
                        applied: 5,
                        entry: None,
                    }),
                    _ => Ok(Found {
                        applied: 5,
                        entry: Some(1),
                    }),
                })
            },
        );
        assert_eq!(found.await.unwrap(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn incomplete_index_knows_no_unknown_jobs() {
        let behind = Topic {
            end: 9,
            empty_from: 8,
        };
        let (count, result) = lookups(false, None, &behind).await;
        assert!(matches!(result, Err(RequestError::IndexIncomplete)), "{result:?}");
        assert!(count > 1);
        assert_eq!(lookups(false, Some("own"), &behind).await.0, 1);
        // A transaction marker follows the last record.
        let marker = Topic {
            end: 6,
            empty_from: 5,
        };
        let (count, result) = lookups(false, None, &marker).await;
        assert!(matches!(result, Err(RequestError::UnknownJob(_))), "{result:?}");
        assert_eq!(count, 2);
    }
}
