//! Where records wait and for how long: the default tiers, jitter, anchors, the upper limit, tiers with processes of their own.

use std::time::Duration;

use redeliver_core::headers::{ERROR_CLASS, ERROR_TIMESTAMP, ORIGINAL_TIMESTAMP, PROCESS_AFTER, RETRY_COUNT};
use redeliver_core::{Clock, HumanDuration, Record, SystemClock, Timestamp};
use redeliver_testkit::kafka_request::delete_topic;
use redeliver_testkit::{ChaosPermit, Fate, Reply, Request, Trouble, eventually};

use crate::chaos::load::under_load;
use crate::retries::{begins_with, drafts, header};
use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder, distinct, text, without_other_tests};

/// Fails this many times, then succeeds.
fn recovers_after(failures: u32) -> impl Fn(&Request) -> Reply + Send + Sync {
    move |request| {
        if request.earlier_calls_of_key < failures {
            Reply::status(503)
        } else {
            Reply::ok(request.body.clone())
        }
    }
}

fn recovered_after(failures: u32) -> Fate {
    Fate::Recovers {
        failures,
        trouble: Trouble::Unavailable,
    }
}

/// From the failure to the due time in milliseconds.
#[track_caller]
fn wait_of(record: &Record) -> i64 {
    let [failed_at, due] = [ERROR_TIMESTAMP, PROCESS_AFTER].map(|name| header::<Timestamp>(record, name));
    due.as_millis() - failed_at.as_millis()
}

/// What has waited in a tier so far.
fn waited(pipe: &Pipe, tier: HumanDuration) -> Vec<Record> {
    pipe.read(&[pipe.pipeline.tier_topic(tier)])
}

/// No record may have been written to the due topic before its due time.
#[track_caller]
fn none_was_early(pipe: &Pipe, count: usize) {
    let released = pipe.read(&[pipe.pipeline.return_topic()]);
    assert_eq!(released.len(), count);
    for record in &released {
        assert!(
            record.timestamp >= Some(header(record, PROCESS_AFTER)),
            "early: {record:?}"
        );
    }
}

/// `least`: the share of a delay that remains at least, in percent.
#[track_caller]
fn check_jitter(jitter: &str, least: i64) {
    const PARTITIONS: i64 = 4;
    let pipe = PipeBuilder::new(&format!("waits-{jitter}"))
        .partitions(4)
        .tiers(&[1_500, 8_000])
        .pipeline("retry.jitter", jitter)
        .behave(recovers_after(2))
        .create();
    let mut relay = pipe.retry_tier("a");
    let _enricher = pipe.enricher("a");
    let sent = pipe.produce(drafts("jitter", 400));
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets_with(&sent, |_| recovered_after(2));
    assert!(ends.report.min_margin_ms >= Some(0), "{}", ends.report);
    none_was_early(&pipe, 2 * sent.len());
    // Each retry waited in the tier of its delay without jitter.
    for (retry, tier) in (1_u32..).zip(pipe.pipeline.policy.tiers()) {
        let records = waited(&pipe, *tier);
        assert_eq!(records.len(), sent.len(), "{tier}");
        assert_eq!(
            distinct(records.iter().map(|record| record.position.partition)),
            4
        );
        let delay = i64::try_from(tier.as_millis()).unwrap();
        let min = delay * least / 100;
        let part = (delay - min) / PARTITIONS;
        for record in &records {
            assert_eq!(header::<u32>(record, RETRY_COUNT), retry);
            let after = i64::from(record.position.partition) + 1;
            let end = delay - part * (PARTITIONS - after);
            // Durations are rounded to milliseconds.
            let allowed = end - part.min(1_000) - 2..=end + 2;
            let wait = wait_of(record);
            assert!(allowed.contains(&wait), "{wait} ms, not {allowed:?}: {record:?}");
            assert!((min..=delay).contains(&wait), "{wait} ms in {tier}");
        }
        // Delays in a partition are random as well.
        assert!(distinct(records.iter().map(wait_of)) > 40, "{tier}");
    }
    assert_eq!(relay.metric("redeliver_tier_moved_total"), 0);
}

#[test]
fn equal_jitter_spreads_waits_over_the_partitions_of_their_tier_and_none_ends_early() {
    check_jitter("equal", 50);
}

#[test]
fn full_jitter_spreads_waits_over_the_partitions_of_their_tier_and_none_ends_early() {
    check_jitter("full", 0);
}

/// A worker chooses partitions for random delays. The topic may lose them.
#[test]
fn records_for_a_tier_that_is_created_again_with_fewer_partitions_still_reach_it() {
    let reply = |request: &Request| match request.earlier_calls_of_key {
        0 => Reply::Delay(Duration::from_secs(6), Box::new(Reply::status(503))),
        _ => Reply::ok(request.body.clone()),
    };
    let pipe = PipeBuilder::new("waits-fewer")
        .tiers(&[1_000])
        .pipeline("http.timeout", "30s")
        .pipeline("retry.jitter", "full")
        .behave(reply)
        .create();
    let mut enricher = pipe.enricher("a");
    let sent = pipe.produce(drafts("fewer", 60));
    eventually("all calls are in flight", DEADLINE, || {
        match pipe.endpoint.in_flight() {
            60 => Ok(()),
            count => Err(count),
        }
    });
    delete_topic(&pipe.kafka.brokers, &pipe.first_tier());
    eventually("the records wait for the topic", DEADLINE, || {
        match enricher.metric("redeliver_worker_unavailable_topic_records") {
            60 => Ok(()),
            count => Err(count),
        }
    });
    let fewer = [("kafka.topics.partitions".to_owned(), "1".to_owned())];
    pipe.variant(str::to_owned, &fewer).apply_topics();
    let _tier = pipe.retry_tier("a");
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets_with(&sent, |_| recovered_after(1));
    let waited = waited(&pipe, pipe.pipeline.policy.tiers()[0]);
    assert_eq!(distinct(waited.iter().map(|record| record.position.partition)), 1);
}

#[test]
fn a_process_with_an_option_for_a_tier_serves_only_that_tier() {
    let pipe = PipeBuilder::new("waits-option")
        .tiers(&[500, 1_000, 1_500])
        .behave(recovers_after(3))
        .create();
    let served = pipe.pipeline.policy.tiers();
    let tiers: Vec<String> = served.iter().map(ToString::to_string).collect();
    let _enricher = pipe.enricher("a");
    let mut first = pipe.start("retry-tier", "a", &["--tier", &tiers[0]]);
    let sent = pipe.produce(drafts("tier", 50));
    eventually(
        "the records wait in the second tier",
        DEADLINE,
        || match waited(&pipe, served[1]).len() {
            50 => Ok(()),
            count => Err(count),
        },
    );
    let mut others = pipe.start("retry-tier", "b", &["--tier", &tiers[1], "--tier", &tiers[2]]);
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets_with(&sent, |_| recovered_after(3));
    let released = |tier: &str| {
        format!(
            "redeliver_tier_released_total{{pipeline=\"{}\",tier=\"{tier}\",group=\"redeliver-retry-{tier}\"}}",
            pipe.name()
        )
    };
    let mut of = |process: usize| {
        let process = if process == 0 { &mut first } else { &mut others };
        tiers
            .iter()
            .map(|tier| process.metric(&released(tier)))
            .collect::<Vec<_>>()
    };
    assert_eq!([of(0), of(1)], [[50, 0, 0], [0, 50, 50]]);
}

/// The wait begins at a time in the payload, or at the timestamp of the record.
#[test]
fn the_first_wait_counts_from_the_anchor() {
    // A wait that counted from the failure would not end within the test.
    let hour = 3_600_000;
    for (name, anchor) in [
        ("payload", "{ pointer: /meta/at }"),
        ("record", "record_timestamp"),
    ] {
        let tier = if name == "payload" { hour } else { 3_000 };
        let pipe = PipeBuilder::new(&format!("waits-anchor-{name}"))
            .tiers(&[tier])
            .pipeline("anchor", anchor)
            .behave(recovers_after(1))
            .create();
        let delay = pipe.pipeline.policy.tiers()[0].duration();
        let began = SystemClock.now();
        // The delay ends in a few seconds.
        let at = began.as_millis() - i64::try_from(delay.as_millis()).unwrap() + 4_000;
        let draft = |n: i64| {
            // In seconds, in milliseconds, and as text.
            let at = match n % 3 {
                0 => (at / 1_000).to_string(),
                1 => at.to_string(),
                _ => format!("\"{}\"", Timestamp::from_millis(at)),
            };
            Draft::new(
                format!("key-{n}"),
                format!("{{\"n\":{n},\"meta\":{{\"at\":{at}}}}}"),
            )
        };
        let sent = pipe.produce((0..60).map(draft).collect());
        let _running = (pipe.enricher("a"), pipe.retry_tier("a"));
        let ends = pipe.settle(&sent, DEADLINE);
        ends.meets_with(&sent, |_| recovered_after(1));
        assert!(ends.report.min_margin_ms >= Some(0), "{}", ends.report);
        none_was_early(&pipe, sent.len());
        let waited = waited(&pipe, pipe.pipeline.policy.tiers()[0]);
        assert_eq!(waited.len(), sent.len());
        for record in waited {
            let key = String::from_utf8(record.key.clone().unwrap().into()).unwrap();
            let number: i64 = key.strip_prefix("key-").unwrap().parse().unwrap();
            let anchor = match (name, number % 3) {
                ("payload", 0) => Timestamp::from_millis(at / 1_000 * 1_000),
                ("payload", _) => Timestamp::from_millis(at),
                _ => header(&record, ORIGINAL_TIMESTAMP),
            };
            // On a busy machine, the attempt may fail after that.
            let due = anchor.after(delay).max(header(&record, ERROR_TIMESTAMP));
            assert_eq!(header::<Timestamp>(&record, PROCESS_AFTER), due, "{record:?}");
        }
    }
}

#[test]
fn an_anchor_in_the_past_makes_the_first_retry_due_at_once_and_no_other() {
    let hour = Duration::from_secs(3_600);
    let reply = |request: &Request| match request.earlier_calls_of_key {
        0 => Reply::status(503),
        1 if begins_with(&request.body, "{\"twice") => Reply::status(503),
        _ => Reply::ok(request.body.clone()),
    };
    let pipe = PipeBuilder::new("waits-past")
        .tiers(&[3_600_000, 7_200_000])
        .pipeline("anchor", "{ pointer: /at }")
        .behave(reply)
        .create();
    let _running = (pipe.enricher("a"), pipe.retry_tier("a"));
    let at = SystemClock.now().as_millis() / 1_000 - 2 * 3_600;
    let draft =
        |word: &str, n: usize| Draft::new(format!("{word}-{n}"), format!("{{\"{word}\":{n},\"at\":{at}}}"));
    pipe.produce((0..20).map(|n| draft("once", n)).collect());
    pipe.produce((0..20).map(|n| draft("twice", n)).collect());
    // Their wait would be an hour.
    pipe.watch().until_ended(20, DEADLINE);
    let [first, second] = [0, 1].map(|tier| pipe.pipeline.policy.tiers()[tier]);
    eventually("the others wait again", DEADLINE, || {
        match waited(&pipe, second).len() {
            20 => Ok(()),
            count => Err(count),
        }
    });
    let waited_first = waited(&pipe, first);
    assert_eq!(waited_first.len(), 40);
    for record in waited_first {
        assert_eq!(wait_of(&record), 0, "{record:?}");
    }
    for record in waited(&pipe, second) {
        assert!(
            wait_of(&record) > i64::try_from(hour.as_millis()).unwrap(),
            "{record:?}"
        );
    }
    let report = pipe.audit();
    assert!(report.is_clean() && report.output == 20, "{report}");
}

/// A wait is cut off at `max_wait`, although the endpoint or the payload asks for more. See docs/pipelines.md.
#[test]
fn a_wait_that_would_exceed_max_wait_ends_after_max_wait() {
    let reply = |request: &Request| match request.earlier_calls_of_key {
        0 if begins_with(&request.body, "{\"asks") => Reply::Status(
            429,
            vec![("retry-after".to_owned(), "3000".to_owned())],
            "later".into(),
        ),
        0 => Reply::status(503),
        _ => Reply::ok(request.body.clone()),
    };
    let pipe = PipeBuilder::new("waits-longest")
        .tiers(&[1_000])
        .pipeline("max_wait", "4s")
        .pipeline("anchor", "{ pointer: /at }")
        .behave(reply)
        .create();
    let _running = (pipe.enricher("a"), pipe.retry_tier("a"));
    let at = SystemClock.now().after(Duration::from_secs(3_000));
    let draft = |word: &str, n: usize| {
        Draft::new(
            format!("{word}-{n}"),
            format!("{{\"{word}\":{n},\"at\":\"{at}\"}}"),
        )
    };
    let asks = pipe.produce((0..20).map(|n| draft("asks", n)).collect());
    let plans = pipe.produce((0..20).map(|n| draft("plans", n)).collect());
    let sent = [&asks[..], &plans].concat();
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets_with(&sent, |sent| match begins_with(sent.body(), "{\"asks") {
        true => Fate::Succeeds,
        false => recovered_after(1),
    });
    none_was_early(&pipe, sent.len());
    let waited = waited(&pipe, pipe.pipeline.policy.tiers()[0]);
    assert_eq!(waited.len(), sent.len());
    for record in waited {
        assert_eq!(wait_of(&record), 4_000, "{record:?}");
    }
}

/// The records do not wait that long: this test returns them to the worker instead of a retry tier.
#[test]
fn a_base_of_2m_makes_five_retries_after_2_4_8_16_and_32_minutes() {
    const RECORDS: usize = 5;
    let pipe = PipeBuilder::new("waits-minutes")
        .pipeline("retry", "{ base: 2m, factor: 2, max_retries: 5 }")
        .behave(recovers_after(u32::MAX))
        .create();
    let names: Vec<String> = pipe
        .pipeline
        .policy
        .tiers()
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(names, ["2m", "4m", "8m", "16m", "32m"]);
    let _enricher = pipe.enricher("a");
    pipe.produce(drafts("minutes", RECORDS));
    for (retry, tier) in (1_u32..).zip(pipe.pipeline.policy.tiers()) {
        let records = eventually("the records wait", DEADLINE, || match waited(&pipe, *tier) {
            records if records.len() == RECORDS => Ok(records),
            records => Err(format!("{} in {tier}", records.len())),
        });
        let returned = records.into_iter().map(|record| {
            assert_eq!(header::<u32>(&record, RETRY_COUNT), retry);
            let minutes = 1_i64 << retry;
            assert_eq!(wait_of(&record), minutes * 60_000, "{record:?}");
            let mut headers = record.headers.filtered(|name| name != PROCESS_AFTER);
            headers.push_text(PROCESS_AFTER, &SystemClock.now().to_string());
            Draft {
                key: record.key,
                value: record.value,
                headers,
            }
        });
        pipe.produce_to(&pipe.pipeline.return_topic(), returned.collect());
    }
    let mut watch = pipe.watch();
    watch.until_ended(RECORDS, DEADLINE);
    for end in &watch.records {
        assert_eq!(end.position.topic, pipe.pipeline.dead_letter_topic());
        assert_eq!(text(end, ERROR_CLASS).unwrap().as_deref(), Some("exhausted"));
        assert_eq!(header::<u32>(end, RETRY_COUNT), 6);
    }
}

/// The configuration of the services says nothing about retries.
#[test]
fn without_retry_settings_there_are_the_tiers_5s_30s_and_1m_and_the_first_retry_comes_after_5s() {
    let pipe = PipeBuilder::new("waits-unset")
        .shared_tiers(&[5_000, 30_000, 60_000])
        .behave(recovers_after(1))
        .without_topics();
    let has_no_retry = |line: &&str| !line.trim_start().starts_with("retry:");
    let unset = |yaml: &str| {
        let lines: Vec<&str> = yaml.lines().filter(has_no_retry).collect();
        assert_eq!(lines.len() + 1, yaml.lines().count(), "{yaml}");
        lines.join("\n")
    };
    let services = pipe.variant(unset, &[]);
    services.apply_topics();
    let listed = services.env.run("redeliver", &["topics", "check"]);
    // Source, output, three tiers, due topic, dead letters, the control topic, the audit topic, and the three topics of the inspector.
    assert_eq!(
        without_other_tests(&listed.stdout),
        "all 12 topics OK\n",
        "{listed:?}"
    );
    let _running = services.start("a");
    let sent = pipe.produce(drafts("unset", 10));
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets_with(&sent, |_| recovered_after(1));
    none_was_early(&pipe, sent.len());
    let mut counts = Vec::new();
    for tier in ["5s", "30s", "1m"] {
        let topic = format!("{}-retry-{tier}", pipe.name());
        let records = pipe.read(&[topic.as_str().into()]);
        assert!(
            records.iter().all(|record| wait_of(record) == 5_000),
            "{records:?}"
        );
        counts.push(records.len());
    }
    assert_eq!(counts, [sent.len(), 0, 0]);
}

#[test]
#[ignore = "long"]
fn by_default_a_record_waits_5s_30s_and_1m_and_is_dead_after_the_fourth_attempt() {
    let reply = |request: &Request| match &request.body {
        body if begins_with(body, "recovers") && request.earlier_calls_of_key == 3 => Reply::ok(body.clone()),
        _ => Reply::status(503),
    };
    let pipe = PipeBuilder::new("waits-default")
        .shared_tiers(&[5_000, 30_000, 60_000])
        .behave(reply)
        .create();
    let default = redeliver_core::RetryPolicy::default();
    assert_eq!(pipe.pipeline.policy, default);
    let _running = (pipe.enricher("a"), pipe.retry_tier("a"));
    let recovers = pipe.produce(drafts("recovers", 20));
    let sent = [recovers, pipe.produce(drafts("never", 20))].concat();
    let ends = pipe.settle(&sent, DEADLINE + Duration::from_secs(95));
    ends.meets_with(&sent, |sent| {
        recovered_after(if begins_with(sent.body(), "recovers") {
            3
        } else {
            u32::MAX
        })
    });
    none_was_early(&pipe, 3 * sent.len());
    for (tier, millis) in default.tiers().iter().zip([5_000, 30_000, 60_000]) {
        let records = waited(&pipe, *tier);
        assert_eq!(records.len(), sent.len(), "{tier}");
        assert!(records.iter().all(|record| wait_of(record) == millis), "{tier}");
    }
}

#[test]
#[ignore = "long"]
fn a_tier_scaled_from_one_process_to_three_and_back_under_load_loses_and_repeats_nothing() {
    const PARTITIONS: u32 = 6;
    let _permit = ChaosPermit::acquire();
    let pipe = PipeBuilder::new("waits-scaled")
        .partitions(PARTITIONS)
        .tiers(&[2_000])
        .pipeline("retry.jitter", "full")
        .set("kafka.session_timeout", "6s")
        .behave(recovers_after(1))
        .create();
    let _enricher = pipe.enricher("a");
    let mut first = pipe.retry_tier("a");
    let all = u64::from(PARTITIONS);
    first.until_owning(all);
    let sent = under_load(&pipe, 300, |load| {
        for _ in 0..2 {
            load.until_ended(500);
            let mut more = ["b", "c"].map(|instance| pipe.retry_tier(instance));
            for process in more.iter_mut().chain([&mut first]) {
                process.until_owning(all / 3);
            }
            load.until_ended(500);
            for process in &mut more {
                assert!(process.metric("redeliver_tier_released_total") > 0, "{process}");
                process.shut_down();
            }
            first.until_owning(all);
            load.until_ended(500);
        }
    });
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets_with(&sent, |_| recovered_after(1));
    none_was_early(&pipe, sent.len());
    eventually("the look-ahead is empty", DEADLINE, || {
        match first.metric("redeliver_tier_held") {
            0 => Ok(()),
            held => Err(held),
        }
    });
    println!("{}", ends.report);
}
