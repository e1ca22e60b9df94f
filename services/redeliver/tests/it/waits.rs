//! Where records wait and for how long: the default tiers, jitter, anchors, the upper limit, tiers with processes of their own.

use std::time::Duration;

use redeliver_core::headers::{ERROR_TIMESTAMP, PROCESS_AFTER, RETRY_COUNT};
use redeliver_core::{Clock, HumanDuration, Record, SystemClock, Timestamp};
use redeliver_testkit::kafka_request::delete_topic;
use redeliver_testkit::{ChaosPermit, Fate, Reply, Request, ServiceProcess, Trouble, until_seen};

use crate::chaos::load::under_load;
use crate::retries::{drafts, header};
use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder, distinct};

/// Fails this many times, then succeeds.
pub(crate) fn recovers_after(failures: u32) -> impl Fn(&Request) -> Reply + Send + Sync {
    move |request| {
        if request.earlier_calls_of_key < failures {
            Reply::status(503)
        } else {
            Reply::ok(request.body.clone())
        }
    }
}

pub(crate) fn recovered_after(failures: u32) -> Fate {
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
pub(crate) fn none_was_early(pipe: &Pipe, count: usize) {
    let released = pipe.read(&[pipe.pipeline.return_topic()]);
    assert_eq!(released.len(), count);
    for record in &released {
        assert!(
            record.timestamp >= Some(header(record, PROCESS_AFTER)),
            "early: {record:?}"
        );
    }
}

#[test]
fn jitter_spreads_waits_over_partitions() {
    const PARTITIONS: i64 = 4;
    let pipe = PipeBuilder::new("waits-jitter")
        .partitions(4)
        .tiers(&[1_500, 6_000])
        .pipeline("retry.jitter", "full")
        .behave(recovers_after(2))
        .create();
    let mut relay = pipe.retry_tier("a");
    let _enricher = pipe.enricher("a");
    let sent = pipe.produce(drafts("jitter", 200));
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
        let part = delay / PARTITIONS;
        for record in &records {
            assert_eq!(header::<u32>(record, RETRY_COUNT), retry);
            let after = i64::from(record.position.partition) + 1;
            let end = delay - part * (PARTITIONS - after);
            // Durations are rounded to milliseconds.
            let allowed = end - part.min(1_000) - 2..=end + 2;
            let wait = wait_of(record);
            assert!(allowed.contains(&wait), "{wait} ms, not {allowed:?}: {record:?}");
            assert!((0..=delay).contains(&wait), "{wait} ms in {tier}");
        }
        // Delays in a partition are random as well.
        assert!(distinct(records.iter().map(wait_of)) > 40, "{tier}");
    }
    assert_eq!(relay.metric("redeliver_tier_moved_total"), 0);
}

/// A worker chooses partitions for random delays. The topic may lose them.
#[test]
fn records_reach_tier_with_fewer_partitions() {
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
    pipe.endpoint.until_in_flight(60);
    delete_topic(&pipe.kafka.brokers, &pipe.first_tier());
    enricher.until_metric("redeliver_worker_unavailable_topic_records", |count| count == 60);
    let fewer = [("kafka.topics.partitions".to_owned(), "1".to_owned())];
    pipe.variant(str::to_owned, &fewer).apply_topics();
    let _tier = pipe.retry_tier("a");
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets_with(&sent, |_| recovered_after(1));
    let waited = waited(&pipe, pipe.pipeline.policy.tiers()[0]);
    assert_eq!(distinct(waited.iter().map(|record| record.position.partition)), 1);
}

#[test]
fn option_limits_process_to_a_tier() {
    let pipe = PipeBuilder::new("waits-option")
        .tiers(&[300, 600])
        .behave(recovers_after(2))
        .create();
    let served = pipe.pipeline.policy.tiers();
    let tiers = [served[0], served[1]].map(|tier| tier.to_string());
    let _enricher = pipe.enricher("a");
    let mut first = pipe.start("retry-tier", "a", &["--tier", &tiers[0]]);
    let sent = pipe.produce(drafts("tier", 50));
    let condition = "the records wait in the second tier";
    until_seen(condition, || waited(&pipe, served[1]).len(), |&count| count == 50);
    let mut other = pipe.start("retry-tier", "b", &["--tier", &tiers[1]]);
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets_with(&sent, |_| recovered_after(2));
    let released = |process: &mut ServiceProcess| {
        tiers.clone().map(|tier| {
            process.metric(&format!(
                "redeliver_tier_released_total{{pipeline=\"{}\",tier=\"{tier}\",group=\"redeliver-retry-{tier}\"}}",
                pipe.name()
            ))
        })
    };
    assert_eq!([released(&mut first), released(&mut other)], [[50, 0], [0, 50]]);
}

#[test]
fn first_wait_counts_from_anchor() {
    // A wait that counted from the failure would not end within the test.
    let pipe = PipeBuilder::new("waits-anchor")
        .tiers(&[3_600_000])
        .pipeline("anchor", "{ pointer: /meta/at }")
        .behave(recovers_after(1))
        .create();
    let tier = pipe.pipeline.policy.tiers()[0];
    // The delay ends in a few seconds.
    let at = SystemClock.now().as_millis() - i64::try_from(tier.as_millis()).unwrap() + 4_000;
    let draft = |n: usize| {
        let value = format!("{{\"n\":{n},\"meta\":{{\"at\":{at}}}}}");
        Draft::new(format!("key-{n}"), value)
    };
    let sent = pipe.produce((0..30).map(draft).collect());
    let _running = (pipe.enricher("a"), pipe.retry_tier("a"));
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets_with(&sent, |_| recovered_after(1));
    assert!(ends.report.min_margin_ms >= Some(0), "{}", ends.report);
    none_was_early(&pipe, sent.len());
    let waited = waited(&pipe, tier);
    assert_eq!(waited.len(), sent.len());
    for record in waited {
        // On a busy machine, the attempt may fail after that.
        let due = Timestamp::from_millis(at).after(tier.duration());
        let due = due.max(header(&record, ERROR_TIMESTAMP));
        assert_eq!(header::<Timestamp>(&record, PROCESS_AFTER), due, "{record:?}");
    }
}

#[test]
#[ignore = "long"]
fn scaled_tier_loses_and_repeats_nothing() {
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
    first.until_metric("redeliver_tier_held", |held| held == 0);
    println!("{}", ends.report);
}
