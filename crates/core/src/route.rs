//! Decides from an attempt's outcome where a record goes next, and with which headers.
//!
//! All dead letters are built here, see [`DeadLetter`].

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::anchor::UnusableAnchor;
use crate::backoff::MAX_WAIT;
use crate::content::payload_hash;
use crate::delay::DelayRange;
use crate::failure::{ErrorClass, Failure, MESSAGE_LIMIT, bounded_text};
use crate::headers::{self, Origin, RecordedFailure, ReservedHeaders, TraceContext};
use crate::human_duration::HumanDuration;
use crate::kept::{is_of_user, is_same_header};
use crate::outcome::{Outcome, Produced};
use crate::pipeline::{DelayQueue, Pipeline, ReturnTo};
use crate::record::{Headers, Output, Record};
use crate::redrive;
use crate::time::Timestamp;

/// The error code of a record whose handler chose a topic that the pipeline does not declare.
pub const UNKNOWN_OUTPUT: &str = "output.unknown";
/// The error code of a record whose output topic was missing for too long.
pub const MISSING_OUTPUT: &str = "output.missing";
/// By how much a requested delay is prolonged at random, at most, as a share of it. Many records are throttled at the same
/// moment, often until the same one, and must not come back all at once.
const THROTTLED_SPREAD: f64 = 0.2;

/// The history of a record when it arrives at a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Where the record entered the pipeline.
    pub origin: Origin,
    /// How many attempts have failed so far.
    pub failed_attempts: u32,
    /// When the record was redriven to this pipeline; `None` if it is new to it. Another pipeline leaves the header in its results, and a
    /// producer can set it: neither makes a record younger.
    pub redriven_at: Option<Timestamp>,
}

impl Arrival {
    /// Reads the history of a record that arrived at a worker.
    ///
    /// A record in the due topic must be a retry. A record in the source topic is new, unless it names this pipeline:
    /// other reserved headers were left by the pipeline that wrote it. With [`ReturnTo::Due`] it must also name the
    /// source as its return topic, as a record does that failed while `return_to` was `source`. Results never name
    /// a return topic.
    ///
    /// # Errors
    /// A malformed failure if the headers of a retry are invalid.
    pub fn read(pipeline: &Pipeline, record: &Record) -> Result<Self, Failure> {
        Self::with_headers(pipeline, record).map(|(arrival, _)| arrival)
    }

    /// Like [`Arrival::read`], and checks the time lock of a retry.
    ///
    /// # Errors
    /// A malformed failure if the headers of a retry are invalid, or if its time lock is still in the future.
    pub fn read_at(pipeline: &Pipeline, record: &Record, now: Timestamp) -> Result<Self, Failure> {
        let (arrival, retry_headers) = Self::with_headers(pipeline, record)?;
        if let Some(headers) = retry_headers {
            headers.check_time_lock(now)?;
        }
        Ok(arrival)
    }

    /// Returns the reserved headers too if the record is a retry.
    fn with_headers<'r>(
        pipeline: &Pipeline,
        record: &'r Record,
    ) -> Result<(Self, Option<ReservedHeaders<'r>>), Failure> {
        let from_source = record.position.topic == pipeline.source;
        let new = || Ok((Self::new(record), None));
        let reserved = match ReservedHeaders::read(record) {
            Ok(reserved) => reserved,
            // With `return_to: due` this pipeline writes no retries to the source, so a duplicate header there comes
            // from the pipeline that wrote the record.
            Err(_)
                if from_source && pipeline.return_to == ReturnTo::Due && record.unreadable_headers == 0 =>
            {
                return new();
            }
            Err(failure) => return Err(failure),
        };
        if from_source {
            let names_source = match pipeline.return_to {
                ReturnTo::Due => reserved
                    .return_topic()
                    .is_ok_and(|topic| *topic == *pipeline.source),
                ReturnTo::Source => true,
            };
            if !names_source || !reserved.is_retry_of(&pipeline.name) {
                return new();
            }
        }
        let arrival = Self {
            origin: reserved.origin()?,
            failed_attempts: reserved.retry_count()?,
            redriven_at: redrive::time(&record.headers),
        };
        Ok((arrival, Some(reserved)))
    }

    /// A new record: its origin is its position.
    #[must_use]
    pub fn new(record: &Record) -> Self {
        Self {
            origin: Origin::of(record),
            failed_attempts: 0,
            redriven_at: None,
        }
    }

    /// The history of a malformed record, as far as its headers are valid. Without a valid origin in the headers, the
    /// origin is the record's position.
    #[must_use]
    pub fn salvaged(record: &Record) -> Self {
        Self::salvaged_from(ReservedHeaders::read(record), Origin::of(record))
    }

    fn salvaged_from(reserved: Result<ReservedHeaders<'_>, Failure>, fallback: Origin) -> Self {
        let reserved = reserved.unwrap_or_default();
        Self {
            origin: reserved.origin().unwrap_or(fallback),
            failed_attempts: reserved.retry_count().unwrap_or(0),
            redriven_at: None,
        }
    }
}

/// What is written for a record.
#[derive(Clone, Debug)]
pub struct Routing {
    /// The outputs, written in one transaction with the record's offset. With [`DelayQueue::Scheduler`] the output is
    /// the record as it should come back: the caller wraps it in a scheduler command.
    pub outputs: Vec<Output>,
    /// The kind of `outputs`.
    pub disposition: Disposition,
}

impl Routing {
    /// Why the record becomes a dead letter, if it does.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        let Disposition::Dead(_) = self.disposition else {
            return None;
        };
        let recorded = headers::RecordedFailure::read(&self.outputs.first()?.headers)?;
        Some(Failure::new(recorded.class, recorded.code, recorded.message))
    }

    /// The routing of a record that becomes a dead letter.
    #[must_use]
    pub fn dead(letter: Output, class: ErrorClass) -> Self {
        Self {
            outputs: vec![letter],
            disposition: Disposition::Dead(class),
        }
    }
}

/// What happened to a record, for metrics and logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// It was processed.
    Succeeded,
    /// It waits for its next attempt.
    Waiting {
        /// The class of the failure.
        class: ErrorClass,
        /// The due time of the next attempt.
        due: Timestamp,
        /// Where the record waits.
        queue: DelayQueue,
        /// Why the delay counts from the failure and not from the record's anchor.
        unusable_anchor: Option<UnusableAnchor>,
    },
    /// It became a dead letter.
    Dead(ErrorClass),
}

/// Everything that decides where a record goes, except the record and the outcome.
#[derive(Clone, Copy)]
pub struct RouteContext<'a> {
    /// The pipeline of the record.
    pub pipeline: &'a Pipeline,
    /// The record's history before this attempt.
    pub arrival: &'a Arrival,
    /// Replaces the record's trace context in what is written.
    pub trace: Option<&'a TraceContext>,
    /// The time at which the attempt ended.
    pub now: Timestamp,
    /// A number from 0 to 1, for random delays.
    pub random: f64,
    /// The number of partitions of a tier's topic, for random delays; `None` if it is not known.
    pub partitions: &'a dyn Fn(&str) -> Option<u32>,
}

/// How long a record waits for its next attempt, and where.
struct Wait {
    due: Timestamp,
    queue: DelayQueue,
    topic: Arc<str>,
    /// `None` chooses it by the key.
    partition: Option<i32>,
    unusable_anchor: Option<UnusableAnchor>,
}

impl RouteContext<'_> {
    /// Decides where the record goes after an attempt with this outcome.
    #[must_use]
    pub fn route(&self, record: &Record, outcome: Outcome) -> Routing {
        let failure = match outcome {
            Outcome::Success(results) => match self.check_topics(&results) {
                Ok(()) => return self.route_success(record, results),
                Err(failure) => failure,
            },
            Outcome::Failed(failure) => failure,
        };
        let counts = failure.class.counts();
        let failed_attempts = self.arrival.failed_attempts.saturating_add(u32::from(counts));
        match self.next_attempt(record, failed_attempts, &failure) {
            Ok(wait) => self.route_retry(record, failed_attempts, &failure, wait),
            Err(last) => Routing::dead(self.dead_letter(record, failed_attempts, &last), last.class),
        }
    }

    fn check_topics(&self, results: &[Produced]) -> Result<(), Failure> {
        let mut topics = results.iter().filter_map(|result| result.topic.as_deref());
        let Some(topic) = topics.find(|topic| !self.pipeline.has_output(topic)) else {
            return Ok(());
        };
        let message = format!(
            "the handler chose the topic `{}`, which is not an output of the pipeline `{}`",
            topic.escape_debug(),
            self.pipeline.name
        );
        let message = bounded_text(&message, MESSAGE_LIMIT);
        Err(Failure::permanent(UNKNOWN_OUTPUT, message))
    }

    fn route_success(&self, record: &Record, results: Vec<Produced>) -> Routing {
        let outputs = results.into_iter().filter_map(|result| {
            let topic = result.topic.or_else(|| self.pipeline.output.clone())?;
            let mut headers = headers::user_headers(&record.headers, self.trace);
            if !result.headers.is_empty() {
                headers = headers.filtered(|name| !replaces(&result.headers, name));
            }
            for (name, value) in result.headers.iter() {
                headers.push(name, value);
            }
            self.write_lineage(&mut headers, self.arrival.failed_attempts);
            Some(Output {
                topic,
                partition: None,
                key: result.key.unwrap_or_else(|| record.key.clone()),
                value: result.value.unwrap_or_else(|| record.value.clone()),
                headers,
            })
        });
        Routing {
            outputs: outputs.collect(),
            disposition: Disposition::Succeeded,
        }
    }

    /// The wait for the next attempt, or why there is none.
    fn next_attempt(
        &self,
        record: &Record,
        failed_attempts: u32,
        failure: &Failure,
    ) -> Result<Wait, Failure> {
        let Self { pipeline, now, .. } = *self;
        // The anchor applies to the first retry only. An old anchor would put all later due times into the past, and a short
        // outage would use up all retries at once.
        // For the same reason, it does not apply to a redriven record.
        // A time in the future would prolong its life.
        let redriven_at = self.arrival.redriven_at.map(|at| at.min(now));
        let is_first = self.arrival.failed_attempts == 0 && redriven_at.is_none();
        let (delays, anchor) = match failure.class {
            ErrorClass::Transient => {
                let anchor = if is_first {
                    pipeline.anchor.time(record, self.arrival.origin.timestamp, now)
                } else {
                    Ok(now)
                };
                (pipeline.policy.delays(failed_attempts), anchor)
            }
            ErrorClass::Throttled => (self.throttled_delays(failure), Ok(now)),
            ErrorClass::Permanent | ErrorClass::Exhausted | ErrorClass::Expired | ErrorClass::Malformed => {
                return Err(failure.clone());
            }
        };
        let Some(delays) = delays else {
            return Err(Failure {
                class: ErrorClass::Exhausted,
                message: format!("gave up after {failed_attempts} attempts: {}", failure.message),
                ..failure.clone()
            });
        };
        let wait = Wait {
            unusable_anchor: anchor.err(),
            ..self.wait(delays, anchor.unwrap_or(now))
        };
        // A record that was dead for longer than `max_age` gets all its attempts again.
        let created = redriven_at.or(self.arrival.origin.timestamp).unwrap_or(now);
        match pipeline.max_age {
            Some(max_age) if wait.due > created.after(max_age.duration()) => Err(Failure {
                class: ErrorClass::Expired,
                message: format!(
                    "would be older than {max_age} at its next attempt: {}",
                    failure.message
                ),
                ..failure.clone()
            }),
            _ => Ok(wait),
        }
    }

    /// Chooses one of the delays, which count from `anchor`.
    fn wait(&self, delays: DelayRange, anchor: Timestamp) -> Wait {
        let Self {
            pipeline,
            now,
            random,
            ..
        } = *self;
        let latest = now.after(pipeline.max_wait.duration());
        // An anchor can be long past. The next attempt is not: a due time before now would be no age of the record and no lateness.
        let due = |delay: HumanDuration| anchor.after(delay.duration()).clamp(now, latest);
        let remaining = |delay| HumanDuration::from(due(delay).since(now));
        let (queue, topic) = pipeline.delay_queue(remaining(delays.nominal), remaining(delays.max));
        let (delay, partition) = match queue {
            DelayQueue::Tier(_) if delays.is_random() => match (self.partitions)(&topic) {
                Some(partitions) => {
                    let (delay, partition) = delays.in_tier(partitions, random);
                    (delay, Some(partition))
                }
                None => (delays.in_tier(1, random).0, None),
            },
            DelayQueue::Tier(_) => (delays.nominal, None),
            DelayQueue::Scheduler => (delays.anywhere(random), None),
        };
        Wait {
            due: due(delay),
            queue,
            topic,
            partition,
            unusable_anchor: None,
        }
    }

    fn throttled_delays(&self, failure: &Failure) -> Option<DelayRange> {
        let requested = failure.retry_after.map(|after| {
            let after = after.min(MAX_WAIT.duration());
            DelayRange {
                max: HumanDuration::from(after.mul_f64(1.0 + THROTTLED_SPREAD)),
                ..DelayRange::exactly(HumanDuration::from(after))
            }
        });
        requested
            .or_else(|| self.pipeline.policy.delays(1))
            .map(|delays| delays.at_most(self.pipeline.max_wait))
    }

    fn route_retry(&self, record: &Record, failed_attempts: u32, failure: &Failure, wait: Wait) -> Routing {
        let Wait {
            due,
            queue,
            topic,
            partition,
            unusable_anchor,
        } = wait;
        let mut headers = headers::user_headers(&record.headers, self.trace);
        self.write_lineage(&mut headers, failed_attempts);
        headers::write_failure(&mut headers, failure, self.now);
        headers.push_text(headers::PROCESS_AFTER, &due.to_string());
        headers.push_text(headers::RETURN_TOPIC, &self.pipeline.return_topic());
        let waiting = Output {
            topic,
            partition,
            key: record.key.clone(),
            value: record.value.clone(),
            headers,
        };
        Routing {
            outputs: vec![waiting],
            disposition: Disposition::Waiting {
                class: failure.class,
                due,
                queue,
                unusable_anchor,
            },
        }
    }

    fn write_lineage(&self, headers: &mut Headers, failed_attempts: u32) {
        headers::write_lineage(
            headers,
            &self.pipeline.name,
            &self.arrival.origin,
            failed_attempts,
        );
    }

    fn dead_letter(&self, record: &Record, failed_attempts: u32, failure: &Failure) -> Output {
        let arrival = Arrival {
            failed_attempts,
            ..self.arrival.clone()
        };
        DeadLetter {
            trace: self.trace,
            ..DeadLetter::of_pipeline(self.pipeline, arrival, failure, self.now)
        }
        .with_content_of(record)
    }
}

fn replaces(headers: &Headers, name: &str) -> bool {
    headers.iter().any(|(own, _)| is_same_header(own, name))
}

/// A dead letter without the key, value and headers of the record.
#[derive(Clone, Debug)]
pub struct DeadLetter<'a> {
    /// The dead-letter topic.
    pub topic: Arc<str>,
    /// The value of the header `pipeline`.
    pub pipeline: &'a str,
    /// The history of the record, if it is known.
    pub arrival: Option<Arrival>,
    /// Why the record is not tried again.
    pub failure: &'a Failure,
    /// Replaces the record's trace context.
    pub trace: Option<&'a TraceContext>,
    /// The time of the failure.
    pub now: Timestamp,
}

impl<'a> DeadLetter<'a> {
    fn of_pipeline(pipeline: &'a Pipeline, arrival: Arrival, failure: &'a Failure, now: Timestamp) -> Self {
        Self {
            topic: pipeline.dead_letter_topic(),
            pipeline: &pipeline.name,
            arrival: Some(arrival),
            failure,
            trace: None,
            now,
        }
    }

    /// The dead letter of a record that was read.
    #[must_use]
    pub fn with_content_of(self, record: &Record) -> Output {
        self.build(record.key.clone(), record.value.clone(), &record.headers)
    }

    /// Replaces an output that its topic refuses by its dead letter.
    pub fn replace(self, output: &mut Output) {
        *output = self.build(output.key.take(), output.value.take(), &output.headers);
    }

    fn build(self, key: Option<Bytes>, value: Option<Bytes>, content: &Headers) -> Output {
        let mut headers = headers::user_headers(content, self.trace);
        if let Some(arrival) = &self.arrival {
            headers::write_lineage(
                &mut headers,
                self.pipeline,
                &arrival.origin,
                arrival.failed_attempts,
            );
        }
        headers::write_failure(&mut headers, self.failure, self.now);
        if let Some(response) = &self.failure.response {
            headers.push_text(headers::ERROR_RESPONSE, response.as_str());
        }
        Output {
            topic: self.topic,
            partition: None,
            key,
            value,
            headers,
        }
    }
}

/// The dead letter of a malformed record.
#[must_use]
pub fn reject(pipeline: &Pipeline, record: &Record, failure: &Failure, now: Timestamp) -> Output {
    DeadLetter::of_pipeline(pipeline, Arrival::salvaged(record), failure, now).with_content_of(record)
}

/// The code of a record on which an operator has given up, if it has no code of a failure.
pub const OPERATOR_DEAD: &str = "operator.dead";

/// Why the dead letter of a waiting record with these headers is one, on which an operator has given up: its last failure, who wanted it, and why.
#[must_use]
pub fn given_up(headers: &Headers, by: impl fmt::Display, reason: &str) -> Failure {
    let last = RecordedFailure::read(headers);
    let (code, message) = last.map_or_else(Default::default, |last| (last.code, last.message));
    let code = if code.is_empty() {
        OPERATOR_DEAD.to_owned()
    } else {
        code
    };
    let reason = match reason {
        "" => String::new(),
        reason => format!(" ({reason})"),
    };
    let message = format!("{by} has given up its retries{reason}: {message}");
    Failure::new(ErrorClass::Exhausted, code, bounded_text(&message, MESSAGE_LIMIT))
}

/// Replaces an output of a pipeline that its topic refuses by its dead letter. `fallback` is its origin if its headers
/// contain none.
pub fn replace_refused(
    pipeline: &Pipeline,
    output: &mut Output,
    fallback: Origin,
    failure: &Failure,
    now: Timestamp,
) {
    let arrival = Arrival::salvaged_from(ReservedHeaders::from_headers(&output.headers), fallback);
    DeadLetter::of_pipeline(pipeline, arrival, failure, now).replace(output);
}

/// The dead letter of a record that a handler has processed but whose outputs cannot be written. That is a
/// failed attempt, as any permanent failure, even if the endpoint had asked for a delay.
#[must_use]
pub fn undeliverable(
    pipeline: &Pipeline,
    record: &Record,
    arrival: &Arrival,
    failure: &Failure,
    now: Timestamp,
) -> Routing {
    let arrival = Arrival {
        failed_attempts: arrival.failed_attempts.saturating_add(1),
        ..arrival.clone()
    };
    let letter = DeadLetter::of_pipeline(pipeline, arrival, failure, now).with_content_of(record);
    Routing::dead(letter, failure.class)
}

/// Removes the response of the endpoint from a dead letter that its topic refuses; if there is none, the value; otherwise, the key and the user
/// headers, except for those that say how often the record was redriven. The header `payload-omitted` names
/// the removed parts, and `payload-omitted-hash` has the hash of the previous key and value. Returns false if
/// nothing is left to remove.
pub fn strip_payload(letter: &mut Output) -> bool {
    // It is no part of the record.
    if letter.headers.last(headers::ERROR_RESPONSE).is_some() {
        letter.headers = letter.headers.filtered(|name| name != headers::ERROR_RESPONSE);
        return true;
    }
    let hash = letter.headers.last(headers::PAYLOAD_OMITTED_HASH).is_none();
    let hash = hash.then(|| payload_hash(letter.key.as_deref(), letter.value.as_deref()));
    let is_bare = letter.key.is_none() && !letter.headers.iter().any(|(name, _)| is_of_user(name));
    let omitted = if letter.value.take().is_some() {
        "value"
    } else if !is_bare {
        letter.key = None;
        "key, value, headers"
    } else {
        return false;
    };
    let is_kept =
        |name: &str| name != headers::PAYLOAD_OMITTED && (omitted == "value" || headers::is_reserved(name));
    let mut kept = letter.headers.filtered(is_kept);
    if omitted != "value" {
        for (name, value) in redrive::last_of_redrives(&letter.headers) {
            kept.push(name, Some(value));
        }
    }
    letter.headers = kept;
    letter.headers.push_text(headers::PAYLOAD_OMITTED, omitted);
    if let Some(hash) = hash {
        letter.headers.push_text(headers::PAYLOAD_OMITTED_HASH, &hash);
    }
    true
}

#[cfg(test)]
mod tests;
