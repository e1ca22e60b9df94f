use std::time::Duration;

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::anchor::Anchor;
use crate::backoff::{Jitter, RetryPolicy};
use crate::failure::Excerpt;
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

fn context<'a>(pipeline: &'a Pipeline, arrival: &'a Arrival) -> RouteContext<'a> {
    RouteContext {
        pipeline,
        arrival,
        trace: None,
        now: NOW,
        random: 0.5,
        partitions: &|_| Some(4),
    }
}

fn decide(pipeline: &Pipeline, record: &Record, outcome: Outcome) -> Routing {
    let arrival = Arrival::read(pipeline, record).unwrap();
    context(pipeline, &arrival).route(record, outcome)
}

fn transient() -> Outcome {
    Outcome::Failed(Failure::transient("x", "y"))
}

/// When the record is due that must wait.
#[track_caller]
fn due(routing: &Routing) -> Timestamp {
    match routing.disposition {
        Disposition::Waiting { due, .. } => due,
        _ => panic!("{routing:?}"),
    }
}

fn text<'a>(output: &'a Output, name: &str) -> &'a str {
    std::str::from_utf8(output.headers.single(name).unwrap().unwrap().unwrap()).unwrap()
}

#[test]
fn failing_record_passes_all_tiers() {
    let failure = || Failure::transient("http.503", "busy").with_response(Excerpt::of(b"closed", true));
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
            let routing = decide(&pipeline, &record, Outcome::Failed(failure()));
            let due = NOW.after(Duration::from_secs(wait));
            let tier = HumanDuration::from_secs(wait);
            assert_eq!(
                routing.disposition,
                Disposition::Waiting {
                    class: ErrorClass::Transient,
                    due,
                    queue: DelayQueue::Tier(tier),
                    unusable_anchor: None,
                }
            );
            let output = &routing.outputs[0];
            assert_eq!(output.topic, pipeline.tier_topic(tier));
            assert_eq!(text(output, headers::PROCESS_AFTER), due.to_string());
            assert_eq!(text(output, headers::RETRY_COUNT), attempt.to_string());
            assert_eq!(text(output, headers::ORIGINAL_TOPIC), "docs");
            assert_eq!(text(output, headers::ORIGINAL_OFFSET), "7");
            assert_eq!(output.headers.single(headers::ERROR_RESPONSE), Ok(None));
            assert_eq!(text(output, headers::RETURN_TOPIC), &*pipeline.return_topic());
            record = returned(output, &pipeline);
        }
        let routing = decide(&pipeline, &record, Outcome::Failed(failure()));
        assert_eq!(routing.disposition, Disposition::Dead(ErrorClass::Exhausted));
        let output = &routing.outputs[0];
        assert_eq!(&*output.topic, "docs-dlq");
        assert_eq!(text(output, headers::RETRY_COUNT), "4");
        assert_eq!(text(output, headers::ERROR_CLASS), "exhausted");
        assert_eq!(text(output, headers::ERROR_CODE), "http.503");
        assert_eq!(text(output, headers::ORIGINAL_PARTITION), "2");
        assert_eq!(text(output, headers::ERROR_RESPONSE), "closed");
        assert_eq!(output.headers.single(headers::PROCESS_AFTER), Ok(None));
    }
}

#[test]
fn undeliverable_record_is_stripped_stepwise() {
    let pipeline = pipeline();
    let record = source_record();
    let arrival = Arrival::new(&record);
    let failure = Failure::permanent("output.too-large", "`done` does not take it")
        .with_response(Excerpt::of(b"closed", true));
    let routing = undeliverable(&pipeline, &record, &arrival, &failure, NOW);
    assert_eq!(routing.disposition, Disposition::Dead(ErrorClass::Permanent));
    let mut letter = routing.outputs.into_iter().next().unwrap();
    assert_eq!((&letter.key, &letter.value), (&record.key, &record.value));
    assert_eq!(text(&letter, headers::ERROR_CODE), "output.too-large");
    assert_eq!(text(&letter, headers::RETRY_COUNT), "1");
    assert_eq!(text(&letter, headers::ERROR_RESPONSE), "closed");

    assert!(strip_payload(&mut letter));
    assert_eq!((&letter.key, &letter.value), (&record.key, &record.value));
    for removed in [headers::ERROR_RESPONSE, headers::PAYLOAD_OMITTED] {
        assert_eq!(letter.headers.single(removed), Ok(None));
    }

    assert!(strip_payload(&mut letter));
    assert_eq!((&letter.key, &letter.value), (&record.key, &None));
    assert_eq!(text(&letter, headers::PAYLOAD_OMITTED), "value");
    let hash = payload_hash(record.key.as_deref(), record.value.as_deref());
    assert_eq!(text(&letter, headers::PAYLOAD_OMITTED_HASH), hash);
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
    assert_eq!(text(&letter, headers::PAYLOAD_OMITTED_HASH), hash);
    assert!(letter.headers.iter().all(|(name, _)| headers::is_reserved(name)));
    assert_eq!(text(&letter, headers::ORIGINAL_OFFSET), "7");
    assert_eq!(text(&letter, headers::ERROR_CODE), "output.too-large");

    assert!(!strip_payload(&mut letter));
}

#[test]
fn source_record_is_new() {
    let arrival = Arrival::read(&pipeline(), &source_record()).unwrap();
    assert_eq!(arrival.failed_attempts, 0);
    assert_eq!(arrival.origin.offset, 7);
}

#[test]
fn retry_in_source_is_recognised() {
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
    // A record that names another return topic or pipeline is new.
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
fn user_content_is_not_changed() {
    let outcomes = [
        Outcome::unchanged(),
        transient(),
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
            .filter(|(name, _)| !headers::is_reserved(name))
            .collect();
        assert_eq!(users, [("tenant", Some(&b"a"[..])), ("tenant", None)]);
    }
}

#[test]
fn throttled_attempt_is_not_counted() {
    let routing = decide(
        &pipeline(),
        &source_record(),
        Outcome::Failed(Failure::throttled(Duration::from_secs(7), "http.429", "later")),
    );
    assert_eq!(text(&routing.outputs[0], headers::RETRY_COUNT), "0");
    let Disposition::Waiting { due, queue, .. } = routing.disposition else {
        panic!("{routing:?}")
    };
    assert_eq!(
        (due, queue),
        (
            // The third of four partitions has three quarters of the random addition.
            NOW.after(Duration::from_millis(8_050)),
            DelayQueue::Tier(HumanDuration::from_secs(5))
        )
    );
    assert_eq!(routing.outputs[0].partition, Some(2));
    let years = Failure::throttled(Duration::from_secs(1_000_000_000), "http.429", "later");
    let routing = decide(&pipeline(), &source_record(), Outcome::Failed(years));
    assert_eq!(self::due(&routing), NOW.after(pipeline().max_wait.duration()));
}

#[test]
fn scheduler_wait_has_tier_content() {
    let through_tiers = pipeline();
    let through_scheduler = Pipeline {
        long_waits: Some("ingest".into()),
        ..pipeline()
    };
    // Up to a fifth is added, and a wait that may become longer than every tier is long.
    for (seconds, is_long) in [(50, false), (51, true), (1_000_000_000, true)] {
        let throttled = || {
            let wait = Duration::from_secs(seconds);
            Outcome::Failed(Failure::throttled(wait, "http.503", "later"))
        };
        let routing = decide(&through_scheduler, &source_record(), throttled());
        let Disposition::Waiting { due, queue, .. } = routing.disposition else {
            panic!("{routing:?}")
        };
        let wait = seconds.saturating_mul(if is_long { 1_100 } else { 1_150 });
        let wait = HumanDuration::from_millis(wait).min(through_scheduler.max_wait);
        assert_eq!(due, NOW.after(wait.duration()));
        let output = &routing.outputs[0];
        let in_tier = &decide(&through_tiers, &source_record(), throttled()).outputs[0];
        let expected = match is_long {
            true => (DelayQueue::Scheduler, "ingest", None),
            false => (
                DelayQueue::Tier(HumanDuration::from_secs(30)),
                "docs-retry-30s",
                Some(2),
            ),
        };
        assert_eq!((queue, &*output.topic, output.partition), expected, "{seconds}");
        assert_eq!((&output.key, &output.value), (&in_tier.key, &in_tier.value));
        let others = |output: &Output| output.headers.filtered(|name| name != headers::PROCESS_AFTER);
        assert_eq!(others(output), others(in_tier));
        // The record that comes back is accepted as a retry, but not before its due time.
        let back = returned(output, &through_scheduler);
        assert!(Arrival::read_at(&through_scheduler, &back, due).is_ok());
        let before = Timestamp::from_millis(due.as_millis() - 300_001);
        assert!(Arrival::read_at(&through_scheduler, &back, before).is_err());
    }
}

#[test]
fn unknown_partition_count_needs_none() {
    let policy = RetryPolicy::listed(vec![HumanDuration::from_secs(30)], None, Jitter::Full).unwrap();
    let pipeline = Pipeline { policy, ..pipeline() };
    let record = source_record();
    let arrival = Arrival::new(&record);
    for (random, millis) in [(0.0, 30_000), (0.25, 29_750), (1.0, 29_000)] {
        let context = RouteContext {
            random,
            partitions: &|_| None,
            ..context(&pipeline, &arrival)
        };
        let routing = context.route(&record, transient());
        let due = due(&routing);
        assert_eq!(due, NOW.after(Duration::from_millis(millis)));
        assert_eq!(routing.outputs[0].partition, None);
    }
}

#[test]
fn random_delay_counts_from_anchor() {
    let policy = RetryPolicy::listed(vec![HumanDuration::from_secs(30)], None, Jitter::Full).unwrap();
    let pipeline = Pipeline {
        policy,
        anchor: Anchor::Payload("/at".into()),
        max_wait: HumanDuration::from_secs(60),
        ..pipeline()
    };
    let wait = |seconds_ahead: i64| {
        let at = NOW.as_millis() / 1_000 + seconds_ahead;
        let record = Record {
            value: Some(format!("{{\"at\":{at}}}").into()),
            ..source_record()
        };
        due(&decide(&pipeline, &record, transient())).as_millis() - NOW.as_millis()
    };
    // The third of four partitions has three quarters of the delay.
    assert_eq!(wait(10), 32_500);
    assert_eq!(wait(-25), 0);
    assert_eq!(wait(50), 60_000);
}

#[test]
fn an_unusable_anchor_is_reported() {
    let pipeline = Pipeline {
        anchor: Anchor::Payload("/at".into()),
        ..pipeline()
    };
    for (value, expected) in [
        (r#"{"at":1700000000,"n":1e400}"#, None),
        (r#"{"at":"soon"}"#, Some(UnusableAnchor::NotATime)),
        ("{}", Some(UnusableAnchor::NoField)),
        ("{", Some(UnusableAnchor::NotJson)),
    ] {
        let record = Record {
            value: Some(value.into()),
            ..source_record()
        };
        let Disposition::Waiting {
            due, unusable_anchor, ..
        } = decide(&pipeline, &record, transient()).disposition
        else {
            panic!("it waits")
        };
        assert_eq!(unusable_anchor, expected, "{value}");
        assert!(expected.is_none() || due > NOW, "{value}");
    }
}

#[test]
fn result_headers_replace_record_headers() {
    let mut record = source_record();
    record.headers.push_text("Content-Type", "text/csv");
    let mut headers = Headers::new();
    headers.push_text("content-type", "application/json");
    let result = Produced {
        headers,
        ..Produced::unchanged()
    };
    let routing = decide(&pipeline(), &record, Outcome::Success(vec![result]));
    let written = routing.outputs[0].headers.iter();
    let names: Vec<&str> = written
        .map(|(name, _)| name)
        .filter(|name| !headers::is_reserved(name))
        .collect();
    assert_eq!(names, ["tenant", "tenant", "content-type"]);
}

#[test]
fn old_anchor_hastens_one_retry() {
    let pipeline = Pipeline {
        anchor: Anchor::RecordTimestamp,
        ..pipeline()
    };
    let mut record = source_record();
    record.timestamp = Some(Timestamp::from_millis(NOW.as_millis() - 3_600_000));
    let mut waits = Vec::new();
    loop {
        let routing = decide(&pipeline, &record, transient());
        let Disposition::Waiting { due, .. } = routing.disposition else {
            break;
        };
        waits.push((due.as_millis() - NOW.as_millis()) / 1_000);
        record = returned(&routing.outputs[0], &pipeline);
    }
    assert_eq!(waits, [0, 30, 60]);
}

#[test]
fn old_anchor_expires() {
    let pipeline = Pipeline {
        anchor: Anchor::RecordTimestamp,
        max_age: Some(HumanDuration::from_secs(3_600)),
        ..pipeline()
    };
    for (age, is_expired) in [(3_600_000, false), (3_600_001, true), (86_400_000 * 365, true)] {
        let record = Record {
            timestamp: Some(Timestamp::from_millis(NOW.as_millis() - age)),
            ..source_record()
        };
        let disposition = decide(&pipeline, &record, transient()).disposition;
        let expired = Disposition::Dead(ErrorClass::Expired);
        assert_eq!(disposition == expired, is_expired, "{age}: {disposition:?}");
    }
}

#[test]
fn redriven_record_ages_from_redrive() {
    let pipeline = Pipeline {
        max_age: Some(HumanDuration::from_secs(60)),
        anchor: Anchor::RecordTimestamp,
        ..pipeline()
    };
    let mut record = source_record();
    record.timestamp = Some(Timestamp::from_millis(NOW.as_millis() - 86_400_000));
    let waits_in = |pipeline: &Pipeline, record: &Record, redriven_ago: i64| {
        let mut record = record.clone();
        let time = Timestamp::from_millis(NOW.as_millis() - redriven_ago);
        record.headers.push_text(redrive::REDRIVE_TIME, &time.to_string());
        let routing = decide(pipeline, &record, transient());
        match routing.disposition {
            Disposition::Waiting { due, .. } => Ok((due.as_millis() - NOW.as_millis()) / 1_000),
            other => Err(other),
        }
    };
    let waits = |record: &Record, redriven_ago| waits_in(&pipeline, record, redriven_ago);
    // As a redrive writes it: a retry without failed attempts.
    let mut redriven = record.clone();
    redriven.position.topic = pipeline.due_topic();
    redriven.headers = record.headers.filtered(|name| name != headers::RETRY_COUNT);
    headers::write_lineage(
        &mut redriven.headers,
        &pipeline.name,
        &headers::Origin::of(&record),
        0,
    );
    assert_eq!(waits(&redriven, 50_000), Ok(5));
    let expired = Err(Disposition::Dead(ErrorClass::Expired));
    assert_eq!(waits(&redriven, 56_000), expired);
    // A time in the future is as one of now.
    assert_eq!(waits(&redriven, -86_400_000), Ok(5));
    // A forged header, or a result of another pipeline whose record was redriven: the record is as old as it is.
    let mut result = record.clone();
    result.headers = record.headers.filtered(|name| name != headers::RETRY_COUNT);
    headers::write_lineage(&mut result.headers, "before", &headers::Origin::of(&record), 0);
    let from_now = Pipeline {
        anchor: Anchor::Failure,
        ..pipeline.clone()
    };
    for new in [&record, &result] {
        assert_eq!(waits(new, 0), expired);
        assert_eq!(waits_in(&from_now, new, 0), expired);
    }
    // A record that was never redriven counts from its anchor.
    let unlimited = Pipeline {
        max_age: None,
        ..pipeline.clone()
    };
    let routing = decide(&unlimited, &record, transient());
    let due = due(&routing);
    assert_eq!(due, NOW);
}

#[test]
fn result_can_set_everything() {
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
    let without_output = Pipeline {
        output: None,
        ..pipeline()
    };
    assert!(
        decide(&without_output, &source_record(), Outcome::unchanged())
            .outputs
            .is_empty()
    );
}

#[test]
fn undeclared_output_makes_dead_letter() {
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
fn malformed_retry_becomes_dead_letter() {
    let mut record = source_record();
    record.position.topic = pipeline().due_topic();
    let failure = Arrival::read(&pipeline(), &record).unwrap_err();
    assert_eq!(failure.class, ErrorClass::Malformed);
    let letter = reject(&pipeline(), &record, &failure, NOW);
    assert_eq!(text(&letter, headers::ORIGINAL_TOPIC), "docs-retry-due");
    assert_eq!(text(&letter, headers::RETRY_COUNT), "9");
    assert_eq!(text(&letter, headers::ERROR_CLASS), "malformed");
}

#[test]
fn early_retry_is_rejected() {
    let pipeline = pipeline();
    let waiting = decide(&pipeline, &source_record(), transient());
    let mut record = returned(&waiting.outputs[0], &pipeline);
    let read =
        |record: &Record, now| Arrival::read_at(&pipeline, record, now).map_err(|failure| failure.code);
    let due = NOW.after(Duration::from_secs(5));
    assert_eq!(read(&record, due).unwrap().failed_attempts, 1);
    // Within the accepted clock skew.
    assert!(read(&record, NOW).is_ok());
    let long_before = Timestamp::from_millis(due.as_millis() - 300_001);
    assert_eq!(read(&record, long_before), Err("header.process-after".into()));
    record.headers = record.headers.filtered(|name| name != headers::PROCESS_AFTER);
    assert!(read(&record, long_before).is_ok());
    assert!(read(&source_record(), long_before).is_ok());
}

proptest! {
    #[test]
    fn no_retry_is_due_early(attempts in 0_u32..6, random in 0.0_f64..1.0, base in 1_u64..100_000) {
        let policy = RetryPolicy::exponential(HumanDuration::from_millis(base), 2.0, 6, None, Jitter::Equal).unwrap();
        let pipeline = Pipeline { policy: policy.clone(), ..pipeline() };
        let record = source_record();
        let arrival = Arrival { failed_attempts: attempts, ..Arrival::new(&record) };
        let routing = RouteContext { random, ..context(&pipeline, &arrival) }.route(&record, transient());
        let Disposition::Waiting { due, queue, .. } = routing.disposition else { panic!("{routing:?}") };
        let (expected, partition) = policy.delays(attempts + 1).unwrap().in_tier(4, random);
        prop_assert_eq!(due, NOW.after(expected.duration()));
        // Jitter does not change the tier.
        let tier = policy.nominal_wait(attempts + 1).unwrap();
        prop_assert_eq!(queue, DelayQueue::Tier(tier));
        let output = &routing.outputs[0];
        prop_assert_eq!((&output.topic, output.partition), (&pipeline.tier_topic(tier), Some(partition)));
        let record = returned(&routing.outputs[0], &pipeline);
        let reserved = ReservedHeaders::read(&record).unwrap();
        prop_assert_eq!(reserved.process_after(NOW, pipeline.max_wait).unwrap(), due);
    }
}
