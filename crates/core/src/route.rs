//! From an outcome to what is written: the one place that decides where a record goes next.

use std::sync::Arc;

use crate::failure::{ErrorClass, Failure, MESSAGE_LIMIT, bounded_text};
use crate::headers::{self, Origin, ReservedHeaders, TraceContext};
use crate::outcome::{Outcome, Produced};
use crate::pipeline::{DelayQueue, Pipeline, ReturnTo};
use crate::record::{Headers, Output, Record};
use crate::span::Span;
use crate::time::Timestamp;

/// The code of a record whose result has a topic that the pipeline does not declare.
pub const UNKNOWN_OUTPUT: &str = "output.unknown";
/// The code of a record whose result had a topic that did not exist for too long.
pub const MISSING_OUTPUT: &str = "output.missing";

/// A record as a worker received it: who it is and what has happened to it so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Where it entered the pipeline.
    pub origin: Origin,
    /// How many attempts have failed so far.
    pub failed_attempts: u32,
}

impl Arrival {
    /// Reads a record that arrived at a worker.
    ///
    /// On the due topic a record must be a retry. On the source topic it is new, whatever headers it carries: those
    /// of ours were left by a pipeline before this one. Only one that names this pipeline is a retry; with
    /// [`ReturnTo::Due`] it must also name the source as the topic in which its wait ended, as one does that failed
    /// while `return_to` was `source`. Results never name such a topic.
    ///
    /// # Errors
    /// A malformed failure when a retry's headers cannot be trusted.
    pub fn read(pipeline: &Pipeline, record: &Record) -> Result<Self, Failure> {
        Self::with_headers(pipeline, record).map(|(arrival, _)| arrival)
    }

    /// As [`Arrival::read`], for a record that is to be handled now.
    ///
    /// # Errors
    /// Also when the record is a retry whose time lock cannot be read or is not over.
    pub fn read_at(pipeline: &Pipeline, record: &Record, now: Timestamp) -> Result<Self, Failure> {
        let (arrival, ours) = Self::with_headers(pipeline, record)?;
        if let Some(ours) = ours {
            ours.lock_is_over(now)?;
        }
        Ok(arrival)
    }

    /// Our headers come along when the record is a retry.
    fn with_headers<'r>(
        pipeline: &Pipeline,
        record: &'r Record,
    ) -> Result<(Self, Option<ReservedHeaders<'r>>), Failure> {
        let from_source = record.position.topic == pipeline.source;
        let new = || Ok((Self::new(record), None));
        let ours = match ReservedHeaders::read(record) {
            Ok(ours) => ours,
            // What stands twice was left by somebody else, unless it is for us to write to the source.
            Err(_)
                if from_source && pipeline.return_to == ReturnTo::Due && record.unreadable_headers == 0 =>
            {
                return new();
            }
            Err(failure) => return Err(failure),
        };
        if from_source {
            let came_back = match pipeline.return_to {
                ReturnTo::Due => ours.return_topic().is_ok_and(|topic| *topic == *pipeline.source),
                ReturnTo::Source => true,
            };
            if !came_back || !ours.is_retry_of(&pipeline.name) {
                return new();
            }
        }
        let arrival = Self {
            origin: ours.origin()?,
            failed_attempts: ours.retry_count()?,
        };
        Ok((arrival, Some(ours)))
    }

    /// A record that is seen for the first time.
    #[must_use]
    pub fn new(record: &Record) -> Self {
        Self {
            origin: Origin::of(record),
            failed_attempts: 0,
        }
    }

    /// As much as can be trusted of a malformed record: its own account of its origin when that is well
    /// formed, else the place where it was read.
    #[must_use]
    pub fn salvaged(record: &Record) -> Self {
        let ours = ReservedHeaders::read(record).unwrap_or_default();
        Self {
            origin: ours.origin().unwrap_or_else(|_| Origin::of(record)),
            failed_attempts: ours.retry_count().unwrap_or(0),
        }
    }
}

/// What becomes of a record.
#[derive(Clone, Debug)]
pub struct Routing {
    /// What is written, in one transaction with the record's offset. What waits with the scheduler stands
    /// here as it is to come back; whoever writes it puts it into the command that the scheduler reads.
    pub outputs: Vec<Output>,
    /// In one word.
    pub disposition: Disposition,
}

/// What became of a record, for metrics and logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Handled.
    Succeeded,
    /// Waits for its next attempt.
    Waiting {
        /// Why.
        class: ErrorClass,
        /// Not before.
        due: Timestamp,
        /// With whom.
        carrier: DelayQueue,
    },
    /// In the dead-letter topic.
    Dead(ErrorClass),
}

/// Decides what becomes of a record. `random` is a number from 0 to 1 for jitter.
#[must_use]
pub fn route(
    pipeline: &Pipeline,
    record: &Record,
    arrival: &Arrival,
    outcome: Outcome,
    trace: Option<&TraceContext>,
    now: Timestamp,
    random: f64,
) -> Routing {
    let failure = match outcome {
        Outcome::Success(results) => match undeclared(pipeline, &results) {
            None => return succeeded(pipeline, record, arrival, results, trace),
            Some(failure) => failure,
        },
        Outcome::Failed(failure) => failure,
    };

    let counted = u32::from(!matches!(
        failure.class,
        ErrorClass::Throttled | ErrorClass::Malformed
    ));
    let failed_attempts = arrival.failed_attempts.saturating_add(counted);
    let wait = match failure.class {
        ErrorClass::Transient => pipeline.policy.wait(failed_attempts, random),
        ErrorClass::Throttled => {
            let asked = failure.retry_after.map(Span::from);
            asked
                .or_else(|| pipeline.policy.wait(1, random))
                .map(|wait| wait.min(pipeline.max_wait))
        }
        ErrorClass::Permanent | ErrorClass::Exhausted | ErrorClass::Expired | ErrorClass::Malformed => {
            return dead(
                pipeline,
                record,
                &arrival.origin,
                failed_attempts,
                &failure,
                trace,
                now,
            );
        }
    };
    let Some(wait) = wait else {
        let exhausted = Failure {
            class: ErrorClass::Exhausted,
            message: format!("gave up after {failed_attempts} attempts: {}", failure.message),
            ..failure
        };
        return dead(
            pipeline,
            record,
            &arrival.origin,
            failed_attempts,
            &exhausted,
            trace,
            now,
        );
    };
    // A wish of the other side counts from now; a wait of the policy counts from the configured anchor.
    let anchor = match failure.class {
        ErrorClass::Throttled => now,
        _ => pipeline.anchor_of(record, arrival.origin.timestamp, now),
    };
    let due = anchor
        .after(wait.duration())
        .min(now.after(pipeline.max_wait.duration()));
    if let Some(max_age) = pipeline.max_age {
        let born = arrival.origin.timestamp.unwrap_or(now);
        if due > born.after(max_age.duration()) {
            let expired = Failure {
                class: ErrorClass::Expired,
                message: format!(
                    "would be older than {max_age} at its next attempt: {}",
                    failure.message
                ),
                ..failure
            };
            return dead(
                pipeline,
                record,
                &arrival.origin,
                failed_attempts,
                &expired,
                trace,
                now,
            );
        }
    }
    let (carrier, topic) = pipeline.carrier(Span::from(due.since(now)));
    let mut list = headers::user_headers(&record.headers, trace);
    headers::write_lineage(&mut list, &pipeline.name, &arrival.origin, failed_attempts);
    headers::write_failure(&mut list, &failure, now);
    list.push_text(headers::PROCESS_AFTER, &due.to_string());
    list.push_text(headers::RETURN_TOPIC, &pipeline.return_topic());
    Routing {
        outputs: vec![output(topic, record, list)],
        disposition: Disposition::Waiting {
            class: failure.class,
            due,
            carrier,
        },
    }
}

/// What is wrong with results of which one goes to a topic that the pipeline does not declare.
fn undeclared(pipeline: &Pipeline, results: &[Produced]) -> Option<Failure> {
    let topics = results.iter().filter_map(|result| result.topic.as_deref());
    let topic = topics.into_iter().find(|topic| !pipeline.has_output(topic))?;
    let message = format!(
        "the handler chose the topic `{}`, which is not an output of the pipeline `{}`",
        topic.escape_debug(),
        pipeline.name
    );
    Some(Failure::permanent(
        UNKNOWN_OUTPUT,
        bounded_text(&message, MESSAGE_LIMIT),
    ))
}

fn succeeded(
    pipeline: &Pipeline,
    record: &Record,
    arrival: &Arrival,
    results: Vec<Produced>,
    trace: Option<&TraceContext>,
) -> Routing {
    let outputs = results.into_iter().filter_map(|result| {
        let topic = result.topic.or_else(|| pipeline.output.clone())?;
        let mut headers = headers::user_headers(&record.headers, trace);
        for (name, value) in result.headers.iter() {
            headers.push(name, value);
        }
        headers::write_lineage(
            &mut headers,
            &pipeline.name,
            &arrival.origin,
            arrival.failed_attempts,
        );
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

/// A malformed record's way into the dead-letter topic, whichever service found it.
#[must_use]
pub fn reject(pipeline: &Pipeline, record: &Record, failure: &Failure, now: Timestamp) -> Routing {
    let arrival = Arrival::salvaged(record);
    dead(
        pipeline,
        record,
        &arrival.origin,
        arrival.failed_attempts,
        failure,
        None,
        now,
    )
}

/// The way into the dead-letter topic of a record that was handled, when what came of it cannot be written.
#[must_use]
pub fn undeliverable(
    pipeline: &Pipeline,
    record: &Record,
    arrival: &Arrival,
    failure: &Failure,
    now: Timestamp,
) -> Routing {
    let failed_attempts = arrival.failed_attempts.saturating_add(1);
    dead(
        pipeline,
        record,
        &arrival.origin,
        failed_attempts,
        failure,
        None,
        now,
    )
}

/// Takes the value out of a dead letter that its topic does not take, then all that is not ours; a header says
/// so. False when there is nothing left to take out.
pub fn strip_payload(letter: &mut Output) -> bool {
    let is_bare = letter.key.is_none() && letter.headers.iter().all(|(name, _)| headers::is_ours(name));
    let omitted = if letter.value.take().is_some() {
        "value"
    } else if !is_bare {
        letter.key = None;
        "key, value, headers"
    } else {
        return false;
    };
    let is_kept =
        |name: &str| name != headers::PAYLOAD_OMITTED && (omitted == "value" || headers::is_ours(name));
    letter.headers = letter.headers.filtered(is_kept);
    letter.headers.push_text(headers::PAYLOAD_OMITTED, omitted);
    true
}

fn dead(
    pipeline: &Pipeline,
    record: &Record,
    origin: &Origin,
    failed_attempts: u32,
    failure: &Failure,
    trace: Option<&TraceContext>,
    now: Timestamp,
) -> Routing {
    let mut list = headers::user_headers(&record.headers, trace);
    headers::write_lineage(&mut list, &pipeline.name, origin, failed_attempts);
    headers::write_failure(&mut list, failure, now);
    Routing {
        outputs: vec![output(pipeline.dead_letter_topic(), record, list)],
        disposition: Disposition::Dead(failure.class),
    }
}

fn output(topic: Arc<str>, record: &Record, headers: Headers) -> Output {
    Output {
        topic,
        partition: None,
        key: record.key.clone(),
        value: record.value.clone(),
        headers,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;
    use crate::backoff::{Jitter, RetryPolicy};
    use crate::pipeline::Anchor;
    use crate::record::Position;

    const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);

    fn pipeline() -> Pipeline {
        Pipeline {
            output: Some("done".into()),
            ..Pipeline::new("docs")
        }
    }

    fn source_record() -> Record {
        let headers = [
            ("tenant", Some(&b"a"[..])),
            ("tenant", None),
            (headers::RETRY_COUNT, Some(&b"9"[..])),
        ];
        Record {
            position: Position {
                topic: "docs".into(),
                partition: 2,
                offset: 7,
            },
            timestamp: Some(Timestamp::from_millis(NOW.as_millis() - 1_000)),
            key: Some(Bytes::from_static(b"k")),
            value: Some(Bytes::from_static(b"{\"at\":1699999000}")),
            headers: headers.into_iter().collect(),
            unreadable_headers: 0,
        }
    }

    fn returned(output: &Output, pipeline: &Pipeline) -> Record {
        Record {
            position: Position {
                topic: pipeline.return_topic(),
                partition: 0,
                offset: 1,
            },
            timestamp: Some(NOW),
            key: output.key.clone(),
            value: output.value.clone(),
            headers: output.headers.clone(),
            unreadable_headers: 0,
        }
    }

    fn decide(pipeline: &Pipeline, record: &Record, outcome: Outcome) -> Routing {
        let arrival = Arrival::read(pipeline, record).unwrap();
        route(pipeline, record, &arrival, outcome, None, NOW, 0.5)
    }

    fn text<'a>(output: &'a Output, name: &str) -> &'a str {
        std::str::from_utf8(output.headers.single(name).unwrap().unwrap().unwrap()).unwrap()
    }

    #[test]
    fn a_record_climbs_the_ladder_and_dies_exhausted() {
        for return_to in [ReturnTo::Due, ReturnTo::Source] {
            let pipeline = Pipeline {
                return_to,
                ..pipeline()
            };
            let mut record = source_record();
            if return_to == ReturnTo::Source {
                record.headers = record.headers.filtered(|name| name == "tenant");
            }
            for (attempt, wait) in [(1_u32, 5_u64), (2, 30), (3, 60)] {
                let routing = decide(
                    &pipeline,
                    &record,
                    Outcome::Failed(Failure::transient("http.503", "busy")),
                );
                let due = NOW.after(Duration::from_secs(wait));
                let tier = Span::from_secs(wait);
                assert_eq!(
                    routing.disposition,
                    Disposition::Waiting {
                        class: ErrorClass::Transient,
                        due,
                        carrier: DelayQueue::Tier(tier)
                    }
                );
                let output = &routing.outputs[0];
                assert_eq!(output.topic, pipeline.tier_topic(tier));
                assert_eq!(text(output, headers::PROCESS_AFTER), due.to_string());
                assert_eq!(text(output, headers::RETRY_COUNT), attempt.to_string());
                assert_eq!(text(output, headers::ORIGINAL_TOPIC), "docs");
                assert_eq!(text(output, headers::ORIGINAL_OFFSET), "7");
                assert_eq!(text(output, headers::RETURN_TOPIC), &*pipeline.return_topic());
                record = returned(output, &pipeline);
            }
            let routing = decide(
                &pipeline,
                &record,
                Outcome::Failed(Failure::transient("http.503", "busy")),
            );
            assert_eq!(routing.disposition, Disposition::Dead(ErrorClass::Exhausted));
            let output = &routing.outputs[0];
            assert_eq!(&*output.topic, "docs-dlq");
            assert_eq!(text(output, headers::RETRY_COUNT), "4");
            assert_eq!(text(output, headers::ERROR_CLASS), "exhausted");
            assert_eq!(text(output, headers::ERROR_CODE), "http.503");
            assert_eq!(text(output, headers::ORIGINAL_PARTITION), "2");
            assert_eq!(output.headers.single(headers::PROCESS_AFTER), Ok(None));
        }
    }

    #[test]
    fn what_cannot_be_delivered_dies_with_all_it_has_and_with_less_where_that_is_too_much() {
        let pipeline = pipeline();
        let record = source_record();
        let arrival = Arrival::new(&record);
        let failure = Failure::permanent("output.too-large", "`done` does not take it");
        let routing = undeliverable(&pipeline, &record, &arrival, &failure, NOW);
        assert_eq!(routing.disposition, Disposition::Dead(ErrorClass::Permanent));
        let mut letter = routing.outputs.into_iter().next().unwrap();
        assert_eq!((&letter.key, &letter.value), (&record.key, &record.value));
        assert_eq!(text(&letter, headers::ERROR_CODE), "output.too-large");
        assert_eq!(text(&letter, headers::RETRY_COUNT), "1");
        assert_eq!(letter.headers.single(headers::PAYLOAD_OMITTED), Ok(None));

        assert!(strip_payload(&mut letter));
        assert_eq!((&letter.key, &letter.value), (&record.key, &None));
        assert_eq!(text(&letter, headers::PAYLOAD_OMITTED), "value");
        assert_eq!(
            letter
                .headers
                .iter()
                .filter(|(name, _)| *name == "tenant")
                .count(),
            2
        );

        assert!(strip_payload(&mut letter));
        assert_eq!((&letter.key, &letter.value), (&None, &None));
        assert_eq!(text(&letter, headers::PAYLOAD_OMITTED), "key, value, headers");
        assert!(letter.headers.iter().all(|(name, _)| headers::is_ours(name)));
        assert_eq!(text(&letter, headers::ORIGINAL_OFFSET), "7");
        assert_eq!(text(&letter, headers::ERROR_CODE), "output.too-large");

        assert!(!strip_payload(&mut letter));
    }

    #[test]
    fn a_new_record_is_not_a_retry_whatever_headers_it_brings() {
        let arrival = Arrival::read(&pipeline(), &source_record()).unwrap();
        assert_eq!(arrival.failed_attempts, 0);
        assert_eq!(arrival.origin.offset, 7);
    }

    #[test]
    fn a_retry_that_comes_back_to_the_source_is_one_whatever_return_to_says_now() {
        let classic = Pipeline {
            return_to: ReturnTo::Source,
            ..pipeline()
        };
        let failed = Outcome::Failed(Failure::transient("http.503", "busy"));
        let new = Record {
            headers: Headers::new(),
            ..source_record()
        };
        let back = returned(&decide(&classic, &new, failed).outputs[0], &classic);
        assert_eq!(back.position.topic, pipeline().source);
        for pipeline in [&classic, &pipeline()] {
            let arrival = Arrival::read_at(pipeline, &back, NOW.after(Duration::from_secs(5))).unwrap();
            assert_eq!((arrival.failed_attempts, arrival.origin.offset), (1, 7));
            let before = Timestamp::from_millis(NOW.as_millis() - 300_000);
            assert!(Arrival::read_at(pipeline, &back, before).is_err());
        }
        // It says where its wait ended, and whose it is: what says something else is new.
        let attempts = |headers: Headers| {
            let record = Record {
                headers,
                ..back.clone()
            };
            Arrival::read(&pipeline(), &record).unwrap().failed_attempts
        };
        let without = |name: &str| back.headers.filtered(|kept| kept != name);
        assert_eq!(attempts(without(headers::RETURN_TOPIC)), 0);
        assert_eq!(attempts(without(headers::PIPELINE)), 0);
        for (name, value) in [
            (headers::RETURN_TOPIC, "docs-retry-due"),
            (headers::PIPELINE, "other"),
        ] {
            let mut headers = without(name);
            headers.push_text(name, value);
            assert_eq!(attempts(headers), 0, "{name}");
        }
        let mut twice = back.headers.clone();
        twice.push_text(headers::RETRY_COUNT, "1");
        assert_eq!(attempts(twice), 0);
    }

    #[test]
    fn key_value_and_user_headers_leave_as_they_came() {
        let outcomes = [
            Outcome::unchanged(),
            Outcome::Failed(Failure::transient("x", "y")),
            Outcome::Failed(Failure::permanent("x", "y")),
        ];
        for outcome in outcomes {
            let record = source_record();
            let routing = decide(&pipeline(), &record, outcome);
            let output = &routing.outputs[0];
            assert_eq!((&output.key, &output.value), (&record.key, &record.value));
            let users: Vec<_> = output
                .headers
                .iter()
                .filter(|(name, _)| !headers::is_ours(name))
                .collect();
            assert_eq!(users, [("tenant", Some(&b"a"[..])), ("tenant", None)]);
        }
    }

    #[test]
    fn being_throttled_burns_no_attempt_and_is_clamped() {
        let routing = decide(
            &pipeline(),
            &source_record(),
            Outcome::Failed(Failure::throttled(Duration::from_secs(7), "http.429", "later")),
        );
        assert_eq!(text(&routing.outputs[0], headers::RETRY_COUNT), "0");
        let Disposition::Waiting { due, carrier, .. } = routing.disposition else {
            panic!("{routing:?}")
        };
        assert_eq!(
            (due, carrier),
            (
                NOW.after(Duration::from_secs(7)),
                DelayQueue::Tier(Span::from_secs(5))
            )
        );
        let years = Failure::throttled(Duration::from_secs(1_000_000_000), "http.429", "later");
        let Disposition::Waiting { due, .. } =
            decide(&pipeline(), &source_record(), Outcome::Failed(years)).disposition
        else {
            panic!("it waits")
        };
        assert_eq!(due, NOW.after(pipeline().max_wait.duration()));
    }

    #[test]
    fn a_wait_longer_than_every_tier_goes_to_the_scheduler_in_the_same_form() {
        let through_tiers = pipeline();
        let through_scheduler = Pipeline {
            long_waits: Some("ingest".into()),
            ..pipeline()
        };
        for (seconds, is_long) in [(60, false), (61, true), (1_000_000_000, true)] {
            let asked = || {
                let wait = Duration::from_secs(seconds);
                Outcome::Failed(Failure::throttled(wait, "http.503", "later"))
            };
            let routing = decide(&through_scheduler, &source_record(), asked());
            let Disposition::Waiting { due, carrier, .. } = routing.disposition else {
                panic!("{routing:?}")
            };
            let wait = Span::from_secs(seconds).min(through_scheduler.max_wait);
            assert_eq!(due, NOW.after(wait.duration()));
            let output = &routing.outputs[0];
            let in_tier = &decide(&through_tiers, &source_record(), asked()).outputs[0];
            let expected = match is_long {
                true => (DelayQueue::Scheduler, "ingest"),
                false => (DelayQueue::Tier(Span::from_secs(60)), "docs-retry-1m"),
            };
            assert_eq!((carrier, &*output.topic), expected, "{seconds}");
            assert_eq!((&output.key, &output.value), (&in_tier.key, &in_tier.value));
            assert_eq!(output.headers, in_tier.headers);
            // And what comes back is taken as a retry when it is due, not before.
            let back = returned(output, &through_scheduler);
            assert!(Arrival::read_at(&through_scheduler, &back, due).is_ok());
            let before = Timestamp::from_millis(due.as_millis() - 300_001);
            assert!(Arrival::read_at(&through_scheduler, &back, before).is_err());
        }
    }

    #[test]
    fn a_wait_that_counts_from_the_payload_may_lie_in_the_past() {
        let pipeline = Pipeline {
            anchor: Anchor::Payload("/at".into()),
            ..pipeline()
        };
        let routing = decide(
            &pipeline,
            &source_record(),
            Outcome::Failed(Failure::transient("x", "y")),
        );
        let Disposition::Waiting { due, carrier, .. } = routing.disposition else {
            panic!("{routing:?}")
        };
        assert_eq!(
            (due, carrier),
            (
                Timestamp::from_millis(1_699_999_005_000),
                DelayQueue::Tier(Span::from_secs(5))
            )
        );
    }

    #[test]
    fn a_record_that_would_be_too_old_expires() {
        let pipeline = Pipeline {
            max_age: Some(Span::from_secs(5)),
            ..pipeline()
        };
        let routing = decide(
            &pipeline,
            &source_record(),
            Outcome::Failed(Failure::transient("x", "y")),
        );
        assert_eq!(routing.disposition, Disposition::Dead(ErrorClass::Expired));
    }

    #[test]
    fn results_may_choose_their_topic_key_and_headers() {
        let result = crate::outcome::Produced {
            topic: Some("elsewhere".into()),
            key: Some(None),
            value: Some(Some(Bytes::from_static(b"new"))),
            headers: [("score", Some(&b"9"[..]))].into_iter().collect(),
        };
        let pipeline = || Pipeline {
            other_outputs: vec!["elsewhere".into()],
            ..pipeline()
        };
        let routing = decide(&pipeline(), &source_record(), Outcome::Success(vec![result]));
        let output = &routing.outputs[0];
        assert_eq!((&*output.topic, &output.key), ("elsewhere", &None));
        assert_eq!(text(output, "score"), "9");
        assert_eq!(text(output, headers::PIPELINE), "docs");
        let silent = Pipeline {
            output: None,
            ..pipeline()
        };
        assert!(
            decide(&silent, &source_record(), Outcome::unchanged())
                .outputs
                .is_empty()
        );
    }

    #[test]
    fn a_result_with_a_topic_that_is_not_declared_is_dead_at_once() {
        for topic in ["elsewhere", "nul\0", "", "docs-dlq"] {
            let result = Produced {
                topic: Some(topic.into()),
                ..Produced::unchanged()
            };
            let results = vec![Produced::unchanged(), result];
            let routing = decide(&pipeline(), &source_record(), Outcome::Success(results));
            assert_eq!(routing.disposition, Disposition::Dead(ErrorClass::Permanent));
            let [letter] = &routing.outputs[..] else {
                panic!("{routing:?}")
            };
            assert_eq!(&*letter.topic, "docs-dlq");
            assert_eq!(text(letter, headers::ERROR_CODE), UNKNOWN_OUTPUT);
        }
    }

    #[test]
    fn a_forged_retry_is_malformed_and_its_dead_letter_well_formed() {
        let mut record = source_record();
        record.position.topic = pipeline().due_topic();
        let failure = Arrival::read(&pipeline(), &record).unwrap_err();
        assert_eq!(failure.class, ErrorClass::Malformed);
        let routing = reject(&pipeline(), &record, &failure, NOW);
        let output = &routing.outputs[0];
        assert_eq!(text(output, headers::ORIGINAL_TOPIC), "docs-retry-due");
        assert_eq!(text(output, headers::RETRY_COUNT), "9");
        assert_eq!(text(output, headers::ERROR_CLASS), "malformed");
    }

    #[test]
    fn a_retry_whose_lock_is_not_over_was_released_by_no_tier() {
        let failed = Outcome::Failed(Failure::transient("x", "y"));
        let pipeline = pipeline();
        let waiting = decide(&pipeline, &source_record(), failed);
        let mut record = returned(&waiting.outputs[0], &pipeline);
        let read =
            |record: &Record, now| Arrival::read_at(&pipeline, record, now).map_err(|failure| failure.code);
        let due = NOW.after(Duration::from_secs(5));
        assert_eq!(read(&record, due).unwrap().failed_attempts, 1);
        // Clocks differ.
        assert!(read(&record, NOW).is_ok());
        let long_before = Timestamp::from_millis(due.as_millis() - 300_001);
        assert_eq!(read(&record, long_before), Err("header.process-after".into()));
        record.headers = record.headers.filtered(|name| name != headers::PROCESS_AFTER);
        assert!(read(&record, long_before).is_ok());
        assert!(read(&source_record(), long_before).is_ok());
    }

    proptest! {
        #[test]
        fn no_wait_ends_early(attempts in 0_u32..6, random in 0.0_f64..1.0, base in 1_u64..100_000) {
            let policy = RetryPolicy::exponential(Span::from_millis(base), 2.0, 6, None, Jitter::Equal).unwrap();
            let pipeline = Pipeline { policy: policy.clone(), ..pipeline() };
            let record = source_record();
            let arrival = Arrival { failed_attempts: attempts, ..Arrival::new(&record) };
            let failed = Outcome::Failed(Failure::transient("x", "y"));
            let routing = route(&pipeline, &record, &arrival, failed, None, NOW, random);
            let Disposition::Waiting { due, .. } = routing.disposition else { panic!("{routing:?}") };
            let expected = policy.wait(attempts + 1, random).unwrap();
            prop_assert_eq!(due, NOW.after(expected.duration()));
            let record = returned(&routing.outputs[0], &pipeline);
            let ours = ReservedHeaders::read(&record).unwrap();
            prop_assert_eq!(ours.process_after(NOW, pipeline.max_wait).unwrap(), due);
        }
    }
}
