//! Each of three brokers is killed in turn, with three replicas of everything, while records take every path: the worker,
//! the retry tiers, and the scheduler.

use std::time::Duration;

use redeliver_testkit::{Fate, LocalKafka, Reply, Request, chaos_with_permit, sleep_up_to, until_in_sync};

use super::load::under_load;
use super::{delayed, settle_stubborn, stubborn, stubborn_setup};
use crate::support::PLAN;

const REPLICAS: usize = 3;
/// Longer than every tier, so the record waits in the scheduler.
const LONG_WAIT: &str = "3";

/// As the stubborn endpoint, but every fourth record that succeeds first asks for a long wait. That uses no attempt, so
/// repeated calls do not change the expected result.
fn reply(request: &Request) -> Reply {
    match stubborn(PLAN.fate(&request.body)) {
        Fate::Succeeds if asks_to_wait(&request.body) && request.earlier_calls_of_body == 0 => {
            let headers = vec![("retry-after".to_owned(), LONG_WAIT.to_owned())];
            Reply::Status(503, headers, "later".into())
        }
        Fate::Succeeds => delayed(request, Reply::ok(request.body.clone())),
        Fate::Recovers { .. } => Reply::status(503),
        Fate::Refused => Reply::status(422),
    }
}

fn asks_to_wait(body: &[u8]) -> bool {
    body.iter()
        .map(|byte| u32::from(*byte))
        .sum::<u32>()
        .is_multiple_of(4)
}

#[test]
#[ignore = "long"]
fn kills_of_three_brokers_lose_nothing() {
    let (_permit, mut random) = chaos_with_permit("three-brokers");
    let mut brokers = LocalKafka::start_three().unwrap();
    let addresses = brokers.each_ref().map(LocalKafka::brokers).join(",");
    let pipe = stubborn_setup("three-brokers", &addresses)
        .set("kafka.topics.replication", &REPLICAS.to_string())
        .through_scheduler()
        .behave(reply)
        .create();
    let mut members = ["enricher", "retry-tier", "scheduler"].map(|service| pipe.start(service, "a", &[]));
    let sent = under_load(&pipe, 60, |load| {
        for (id, broker) in (1..).zip(&mut brokers) {
            until_in_sync(broker, REPLICAS, id);
            load.until_ended(50);
            sleep_up_to(&mut random, Duration::from_millis(1_000));
            broker.kill_9();
            // They end only if the other two brokers do their work.
            load.until_ended(100);
            broker.start_again().unwrap();
        }
        until_in_sync(&brokers[0], REPLICAS, 3);
        load.until_ended(100);
    });
    let [enricher, retry_tier, scheduler] = &mut members;
    for (process, metric) in [
        (enricher, "redeliver_worker_long_waits_total"),
        (retry_tier, "redeliver_tier_released_total"),
        (scheduler, "redeliver_scheduler_jobs_ended_total"),
    ] {
        assert!(process.metric(metric) > 0, "{process}: {metric}");
    }
    settle_stubborn(&pipe, &sent, &mut members);
}
