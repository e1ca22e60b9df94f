//! What happens to a due job: it is dispatched, kept for a while, or becomes a dead letter.

use std::sync::Arc;
use std::time::Duration;

use redeliver_core::{Failure, Headers, Output, Timestamp, headers, mutant};

use super::turn::Dispatched;
use super::{Obstacle, Shard, Target, Writes};
use crate::controls::AppStates;
use crate::index::Cursor;
use crate::job::{Flow, Job, JobState, Kind};
use crate::refused::{self, Replacement};
use crate::settings::Settings;
use crate::spans;
use crate::topics::Presence;

/// How long a topic must be missing before a job that was due long ago becomes a dead letter.
const CONFIRMED_MISSING: Duration = Duration::from_secs(30);
/// The code of a dead letter for a job whose topic does not exist.
pub(super) const TOPIC_MISSING: &str = "topic.missing";

/// What to do with a due job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DueAction {
    Dispatch,
    /// Keep it until its topic is available and its application is not paused.
    Block,
    /// Write a dead letter: the topic has been missing for too long.
    DeadLetter,
}

impl Settings {
    /// Whether a topic has been missing for so long that it is not expected to exist a moment later.
    pub(super) fn is_confirmed_missing(&self, lasting: Duration) -> bool {
        lasting >= CONFIRMED_MISSING.min(self.missing_topic_timeout)
    }

    /// The topic to which a job is dispatched. For the long wait of a pipeline, it is the return topic that the record names,
    /// as long as the pipeline still uses that topic, and otherwise the pipeline's current return topic. Of a pipeline that is not configured, it is the one that was
    /// known when the job was accepted.
    pub(super) fn destination(&self, job: &Job) -> Arc<str> {
        match (job.kind, self.rules.pipelines.get(&*job.app)) {
            (Kind::LongWait, Some(pipeline)) => {
                let named = job.payload.headers.last(headers::RETURN_TOPIC);
                let named = named.and_then(|name| std::str::from_utf8(name).ok());
                let due_topic = self.topics.presence(&pipeline.due_topic());
                let returns = pipeline.returns(!matches!(due_topic, Presence::Missing { .. }));
                returns.topic(named.unwrap_or(&job.topic)).clone()
            }
            _ => job.topic.clone(),
        }
    }

    /// What to do with a due job, depending on whether its topic is available and its application is paused.
    pub(super) fn due_action(
        &self,
        presence: Presence,
        apps: &AppStates,
        job: &Job,
        now: Timestamp,
    ) -> DueAction {
        let has_expired = job.expires.is_some_and(|expires| expires < now);
        if apps.pauses(job) && !has_expired {
            return DueAction::Block;
        }
        match presence {
            Presence::Exists => DueAction::Dispatch,
            // The dispatch of an expired job writes nothing to the topic.
            _ if has_expired => DueAction::Dispatch,
            Presence::Missing { lasting }
                if self.is_confirmed_missing(lasting)
                    && job.ready_since().after(self.missing_topic_timeout) <= now =>
            {
                DueAction::DeadLetter
            }
            Presence::Missing { .. } | Presence::Unwritable { .. } | Presence::Unknown => DueAction::Block,
        }
    }

    /// Whether it is known that dead letters cannot be written to a topic.
    pub(super) fn lacks(&self, dead_letters: &Arc<str>) -> bool {
        self.topics.presence(dead_letters).is_unavailable()
    }

    /// The dead-letter topic of the pipeline of a long wait, if it cannot be written. The record is not dispatched then: its topic may refuse
    /// it, and only a dead letter can replace it.
    pub(super) fn lacking(&self, job: &Job) -> Option<Target> {
        let pipeline = (job.kind == Kind::LongWait).then(|| self.rules.pipeline(&job.app));
        let topic = pipeline.flatten()?.dead_letter_topic();
        self.lacks(&topic).then(|| (topic, job.app.clone()))
    }

    /// The topic and the application of a job.
    pub(super) fn target(&self, job: &Job) -> Target {
        (self.destination(job), job.app.clone())
    }
}

impl Shard {
    pub(super) fn dispatch(&mut self, job: &Arc<Job>, topic: Arc<str>, now: Timestamp, writes: &mut Writes) {
        debug_assert!(job.due <= now || mutant!("shard-dispatches-early"), "never early");
        if job.expires.is_some_and(|expires| expires < now) {
            writes.tally.expired += 1;
            self.end_job(job, JobState::Expired, now, writes);
            return;
        }
        writes.tally.dispatched.push(Dispatched {
            due: job.due,
            ready: self.window.ready_at(job),
        });
        let mut headers = self.dispatch_headers(job, now);
        if job.kind == Kind::LongWait && headers.last(headers::RETURN_TOPIC) != Some(topic.as_bytes()) {
            headers::set_return_topic(&mut headers, &topic);
        }
        writes.push(Output {
            topic,
            partition: None,
            key: job.payload.key.clone(),
            value: job.payload.value.clone(),
            headers,
        });
        self.end_job(job, JobState::Dispatched, now, writes);
    }

    /// Replaces a job whose topic was missing for too long by a dead letter.
    pub(super) fn dead_letter(
        &mut self,
        job: &Arc<Job>,
        target: Target,
        now: Timestamp,
        writes: &mut Writes,
    ) {
        let topic = &target.0;
        let message = format!("topic `{topic}` does not exist; the job was due at {}", job.due);
        let mut output = Output {
            topic: topic.clone(),
            partition: None,
            key: job.payload.key.clone(),
            value: job.payload.value.clone(),
            headers: self.dispatch_headers(job, now),
        };
        let failure = Failure::permanent(TOPIC_MISSING, message);
        if refused::replace(&self.settings, &mut output, &failure, now) == Replacement::Nothing {
            tracing::error!(job = %job.id, topic = &**topic, "cannot write a dead letter for the job; keeping it");
            return self.block(job, target, now);
        }
        writes.tally.dead += 1;
        writes.push(output);
        self.end_job(job, JobState::Expired, now, writes);
    }

    /// Keeps a due job out of the window, and all jobs of its flow with it, until its topic is available and its application is not paused.
    pub(super) fn block(&mut self, job: &Job, target: Target, now: Timestamp) {
        let flow = Flow::of(job);
        let obstacle = if self.apps.pauses(job) {
            Obstacle::Paused(job.app.clone())
        } else {
            Obstacle::UnavailableTopic(target)
        };
        self.window.remove_flow(&flow);
        self.look_ahead.block(&flow, obstacle, Cursor::of(job), now);
    }

    fn dispatch_headers(&self, job: &Job, now: Timestamp) -> Headers {
        let trace = spans::dispatched(job, now);
        if job.kind == Kind::LongWait {
            return job.payload.headers.clone();
        }
        let mut list = headers::user_headers(&job.payload.headers, trace.as_ref());
        list.push_text(headers::JOB_ID, &job.id.to_string());
        list.push_text(headers::JOB_APP, &job.app);
        list.push_text(headers::SCHEDULED_TIME, &job.due.to_string());
        list.push_text(headers::DISPATCHED_AT, &now.to_string());
        list.push_text(headers::JOB_PRIORITY, job.priority.as_str());
        if let Some(key) = &job.idempotency_key {
            list.push_text(headers::IDEMPOTENCY_KEY, key);
        }
        if let Some(occurrence) = &job.occurrence {
            list.push_text(headers::JOB_OCCURRENCE, occurrence);
        }
        list
    }
}
