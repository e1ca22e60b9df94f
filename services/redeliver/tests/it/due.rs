//! The metrics by which tiers are scaled.

use redeliver_testkit::kafka_request::delete_topic;
use redeliver_testkit::{Reply, Request, ServiceProcess, eventually};

use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder};

const RECORDS: usize = 20;

/// What a tier reports: records that are due, for how many seconds they have been due, and when the next one is.
#[track_caller]
fn reported(pipe: &Pipe, relay: &mut ServiceProcess) -> Option<(f64, f64, f64)> {
    let (_, metrics) = relay.get("/metrics");
    let tier = pipe.first_tier();
    let (_, tier) = tier.rsplit_once('-').unwrap();
    let labels = format!(
        "{{pipeline=\"{}\",tier=\"{tier}\",group=\"redeliver-retry-{tier}\"}} ",
        pipe.pipeline.name
    );
    let value = |name: &str| {
        let series = format!("redeliver_tier_{name}{labels}");
        let mut values = metrics.lines().filter_map(|line| line.strip_prefix(&series));
        values.next().map(|value| value.parse::<f64>().unwrap())
    };
    Some((
        value("due")?,
        value("overdue_seconds")?,
        value("next_due_seconds")?,
    ))
}

#[test]
fn only_stuck_due_records_are_load() {
    let fails_once = |request: &Request| match request.earlier_calls_of_key {
        0 => Reply::Status(503, Vec::new(), "busy".into()),
        _ => Reply::ok(request.body.clone()),
    };
    let pipe = PipeBuilder::new("overdue")
        .tiers(&[10_000])
        .behave(fails_once)
        .create();
    let mut relay = pipe.retry_tier("a");
    relay.until_ready();
    let nothing_waits = Some((0.0, 0.0, f64::INFINITY));
    eventually("the relay has partitions", DEADLINE, || {
        match reported(&pipe, &mut relay) {
            reported if reported == nothing_waits => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });

    let enricher = pipe.enricher("a");
    let drafts = (0..RECORDS).map(|n| Draft::new(format!("key-{n}"), format!("record {n}")));
    let sent = pipe.produce(drafts.collect::<Vec<_>>());
    pipe.until_waiting(RECORDS);
    drop(enricher);
    delete_topic(&pipe.kafka.brokers, &pipe.pipeline.due_topic());
    eventually("the relay has read the records", DEADLINE, || {
        match reported(&pipe, &mut relay) {
            Some((0.0, 0.0, next)) if next > 0.0 && next <= 10.0 => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    let all = RECORDS as f64;
    eventually("all records are overdue", DEADLINE, || {
        match reported(&pipe, &mut relay) {
            Some((due, overdue, 0.0)) if due == all && overdue > 0.0 => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });

    assert_eq!(pipe.redeliver(&["topics", "apply"]).code, Some(0));
    let _enricher = pipe.enricher("b");
    pipe.settle(&sent, DEADLINE);
    eventually("nothing waits", DEADLINE, || match reported(&pipe, &mut relay) {
        reported if reported == nothing_waits => Ok(()),
        other => Err(format!("{other:?}")),
    });
}
