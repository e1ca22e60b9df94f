//! What is asked of the scheduler, whatever the protocol.
//!
//! A command is checked, written into the ingest topic, and its outcome waited for. What is known of jobs is
//! read from the index, which shows what is committed, by some milliseconds later.

use std::sync::Arc;
use std::time::Duration;

use redeliver_core::headers::{TRACEPARENT, TRACESTATE};
use redeliver_core::{Clock, Headers, Output, Timestamp};
use redeliver_kafka::murmur2::shard_of;
use redeliver_kafka::producer::Producer;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::v1;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::refusal::Refusal;
use crate::answers::{Place, Waiting};
use crate::codec;
use crate::index::{Index, Lookup};
use crate::job::{JobId, Kind};
use crate::request::{Command, Draft, Envelope, Field, Format, ParsedRequest, Rules, When, write_protobuf};
use crate::room::{self, INDEX_FULL};

/// How long an outcome is waited for.
const PATIENCE: Duration = Duration::from_secs(10);
/// A job that was requested so lately may not be in the index yet.
const FRESH: Duration = Duration::from_secs(5);
/// How long it is looked for then, and how often.
const LOOKING: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(25);
/// What a request may have beside its data: names, times, and what a protocol adds.
const AROUND_DATA: usize = 64 << 10;
/// Minutes that statistics show when nothing else is asked for, and at most.
const MINUTES: u32 = 60;
const MAX_MINUTES: u32 = 1_440;

/// The scheduler as its API sees it.
pub(crate) struct Jobs<I> {
    pub(crate) index: I,
    pub(crate) producer: Producer,
    pub(crate) ingest: Arc<str>,
    /// Of the ingest topic: the shards.
    pub(crate) partitions: i32,
    pub(crate) rules: Rules,
    /// How far ahead jobs are held in memory.
    pub(crate) window: Duration,
    pub(crate) waiting: Waiting,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) shutdown: CancellationToken,
}

/// A job that is accepted.
pub(crate) struct Accepted {
    pub(crate) id: JobId,
    /// Nothing when the outcome was not waited for.
    pub(crate) decided: Option<(v1::Outcome, v1::Job)>,
}

impl<I: Index> Jobs<I> {
    /// The longest request, in bytes.
    pub(crate) fn max_request(&self) -> usize {
        // JSON may take several bytes for one of a key or a header.
        self.rules.max_data.saturating_mul(2).saturating_add(AROUND_DATA)
    }

    /// Schedules a job. Without `wait` it is only made sure that the request is safe in Kafka.
    pub(crate) async fn schedule(
        &self,
        draft: Draft,
        format: Format,
        wait: bool,
        trace: Headers,
    ) -> Result<Accepted, Refusal> {
        let partition = match &draft.idempotency_key {
            Some(key) => shard_of(&draft.app, key, self.partitions),
            None => fastrand::i32(0..self.partitions),
        };
        let has_key = draft.idempotency_key.is_some();
        let wish = ParsedRequest::Schedule(Box::new(draft));
        let command = self.check(&wish, format)?;
        // Of a job with a key it is not known here whether it was accepted before.
        if let Command::Schedule(request) = command
            && !has_key
        {
            let room = self.index.usage().room;
            room::check(room, request.due, self.clock.now(), self.window)?;
        }
        let deadline = Instant::now() + PATIENCE;
        if !wait {
            let id = self.write(&wish, partition, "", trace, deadline).await?;
            return Ok(Accepted { id, decided: None });
        }
        let mut place = self.waiting.take_place()?;
        let id = self
            .write(&wish, partition, &place.name(), trace, deadline)
            .await?;
        let outcome = self.outcome(&mut place, id, deadline).await?;
        let job = outcome.job.clone().unwrap_or_default();
        match outcome.outcome() {
            decided @ (v1::Outcome::Scheduled | v1::Outcome::Duplicate) => {
                let job = self.filled(job).await;
                let id = job.id.parse().unwrap_or(id);
                Ok(Accepted {
                    id,
                    decided: Some((decided, job)),
                })
            }
            v1::Outcome::Conflict => Err(Refusal::Conflict {
                job: Box::new(self.filled(job).await),
                reason: outcome.reason,
            }),
            _ if outcome.code == INDEX_FULL => Err(Refusal::NoRoom(outcome.reason)),
            _ => Err(Refusal::Rejected(outcome.reason)),
        }
    }

    /// Cancels a job.
    pub(crate) async fn cancel(&self, id: JobId, trace: Headers) -> Result<v1::CommandOutcome, Refusal> {
        self.command(id, &ParsedRequest::Cancel(id), trace).await
    }

    /// Gives a job a new time.
    pub(crate) async fn reschedule(
        &self,
        id: JobId,
        when: When,
        format: Format,
        trace: Headers,
    ) -> Result<v1::CommandOutcome, Refusal> {
        let wish = ParsedRequest::Reschedule { id, when };
        self.check(&wish, format)?;
        self.command(id, &wish, trace).await
    }

    /// A job with all that is kept of it.
    pub(crate) async fn get(&self, id: JobId) -> Result<v1::Job, Refusal> {
        let asked = Instant::now();
        let now = self.clock.now();
        let is_fresh = id.requested_at().after(FRESH) > now;
        loop {
            let missing = match self.look_up(id).await {
                Ok(Some(job)) => return Ok(job),
                Ok(None) if is_fresh => Refusal::UnknownJob(id),
                Ok(None) => return Err(Refusal::UnknownJob(id)),
                // The shard may be changing hands.
                Err(Refusal::NoIndex) => Refusal::NoIndex,
                Err(refusal) => return Err(refusal),
            };
            if asked.elapsed() >= LOOKING {
                return Err(missing);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// How many jobs wait, and until when. `minutes` is that of the histogram; 0 takes the usual.
    pub(crate) async fn stats(&self, minutes: u32, format: Format) -> Result<v1::Stats, Refusal> {
        let minutes = match minutes {
            0 => MINUTES,
            1..=MAX_MINUTES => minutes,
            _ => {
                let problem = format!("is {minutes}; at most {MAX_MINUTES} can be shown");
                return Err(Field::Minutes.malformed(format, &problem).into());
            }
        };
        let now = self.clock.now();
        let mut total = v1::Stats {
            per_minute: vec![0; minutes as usize],
            ..v1::Stats::default()
        };
        let mut next_due: Option<Timestamp> = None;
        for shard in 0..self.partitions {
            let stats = self.index.stats(shard, now, minutes).await?;
            total.scheduled += stats.scheduled;
            total.due += stats.due;
            for (sum, count) in total.per_minute.iter_mut().zip(&stats.per_minute) {
                *sum += count;
            }
            next_due = match (next_due, stats.next_due) {
                (Some(one), Some(other)) => Some(one.min(other)),
                (one, other) => one.or(other),
            };
        }
        total.next_due = next_due.map(to_timestamp);
        let shown = total.due + total.per_minute.iter().sum::<u64>();
        total.later = total.scheduled.saturating_sub(shown);
        Ok(total)
    }

    /// By the rules with which the record will be read, so that a wrong request never becomes one.
    fn check(&self, wish: &ParsedRequest, format: Format) -> Result<Command, Refusal> {
        let now = self.clock.now();
        let envelope = Envelope {
            requested: now,
            now,
            key: None,
            headers: &Headers::new(),
        };
        Ok(wish.clone().check(format, &self.rules, &envelope)?)
    }

    async fn command(
        &self,
        id: JobId,
        wish: &ParsedRequest,
        trace: Headers,
    ) -> Result<v1::CommandOutcome, Refusal> {
        if id.shard() >= self.partitions {
            return Ok(v1::CommandOutcome {
                outcome: v1::Outcome::Unknown.into(),
                ..v1::CommandOutcome::default()
            });
        }
        let deadline = Instant::now() + PATIENCE;
        let mut place = self.waiting.take_place()?;
        self.write(wish, id.shard(), &place.name(), trace, deadline)
            .await?;
        let outcome = self.outcome(&mut place, id, deadline).await?;
        match outcome.outcome() {
            v1::Outcome::Rejected => Err(Refusal::Rejected(outcome.reason)),
            _ => Ok(outcome),
        }
    }

    /// Writes a command; the id is that of the job which it would make.
    async fn write(
        &self,
        wish: &ParsedRequest,
        partition: i32,
        answer_to: &str,
        trace: Headers,
        deadline: Instant,
    ) -> Result<JobId, Refusal> {
        let mut headers = trace;
        headers.push_text("content-type", redeliver_proto::CONTENT_TYPE);
        let output = Output {
            topic: self.ingest.clone(),
            partition: Some(partition),
            key: None,
            value: Some(write_protobuf(wish, answer_to)),
            headers,
        };
        let sent = tokio::time::timeout_at(deadline, self.producer.send(&output)).await;
        let written = sent.map_err(|_| Refusal::Unconfirmed)??;
        let timestamp = written.timestamp.ok_or(Refusal::Unconfirmed)?;
        Ok(JobId::new(
            timestamp,
            written.position.partition,
            written.position.offset,
        ))
    }

    /// The outcome of a command that is written, for the job `id`.
    async fn outcome(
        &self,
        place: &mut Place,
        id: JobId,
        deadline: Instant,
    ) -> Result<v1::CommandOutcome, Refusal> {
        tokio::select! {
            outcome = place.outcome() => Ok(outcome),
            () = tokio::time::sleep_until(deadline) => Err(Refusal::Undecided(id, PATIENCE)),
            () = self.shutdown.cancelled() => Err(Refusal::Leaving(id)),
        }
    }

    async fn look_up(&self, id: JobId) -> Result<Option<v1::Job>, Refusal> {
        if id.shard() >= self.partitions {
            return Ok(None);
        }
        let (applied, found) = self
            .index
            .look_up(id.shard(), &[Lookup::Job(id)], self.clock.now())
            .await?;
        let Some(record) = found.into_iter().next().flatten() else {
            return match applied {
                Some(_) => Ok(None),
                None => Err(Refusal::NoIndex),
            };
        };
        let job = codec::decode(id, &record).map_err(|error| {
            tracing::error!(job = %id, %error, "the index holds something that is no job");
            Refusal::NoIndex
        })?;
        // A record of a pipeline is nobody's job, as whoever cancels it is told, too.
        Ok((job.kind == Kind::App).then(|| codec::to_proto(&job, true)))
    }

    /// A job of which the answer told the id only, with what the index knows of it.
    async fn filled(&self, job: v1::Job) -> v1::Job {
        if job.state() != v1::JobState::Unspecified {
            return job;
        }
        let Ok(id) = job.id.parse() else { return job };
        match self.look_up(id).await {
            Ok(Some(mut known)) => {
                known.data.clear();
                known.key = None;
                known.headers.clear();
                known
            }
            // The outcome is certain without it.
            _ => job,
        }
    }
}

/// The headers of a caller's trace, ready for a record. What they say is checked where it is used.
pub(crate) fn trace_of<'a>(header: impl Fn(&str) -> Option<&'a [u8]>) -> Headers {
    let mut headers = Headers::new();
    if let Some(parent) = header(TRACEPARENT) {
        headers.push(TRACEPARENT, Some(parent));
        if let Some(state) = header(TRACESTATE) {
            headers.push(TRACESTATE, Some(state));
        }
    }
    headers
}
