//! All processes of an installation are killed at the same moment, as by a power failure, and start again together.

use std::time::Duration;

use redeliver_testkit::{Reply, Request, chaos_with_permit, sleep_up_to};

use super::load::under_load_of;
use super::{LONG_SESSION, PLAN, delayed, settle, setup};
use crate::support::{Draft, record};

/// Longer than each tier, so that the scheduler holds the record.
const LONG_WAIT_SECS: u64 = 3;

/// One of ten records must wait for long, before anything else happens to it.
fn asks_for_a_long_wait(request: &Request) -> bool {
    let sum: u64 = request.body.iter().map(|byte| u64::from(*byte)).sum();
    request.earlier_calls_of_key == 0 && sum % 10 == 3
}

/// Some records are large: with all else, the job of a long wait has at most `scheduler.max_data`.
fn sometimes_large(n: usize, random: &mut fastrand::Rng) -> Draft {
    let mut draft = record(n);
    if n % 50 == 1 {
        let mut value = draft.value.map_or_else(Vec::new, Vec::from);
        let small = value.len();
        value.resize(small + random.usize(1_000..890_000), 0);
        random.fill(&mut value[small..]);
        draft.value = Some(value.into());
    }
    draft
}

#[test]
#[ignore = "long"]
fn power_failures_lose_nothing() {
    const KILLS: u32 = 3;
    let (_permit, mut random) = chaos_with_permit("house");
    let pipe = setup("house")
        .set("kafka.session_timeout", &format!("{}s", LONG_SESSION.as_secs()))
        .through_scheduler()
        .behave(|request| {
            if asks_for_a_long_wait(request) {
                let retry_after = ("retry-after".to_owned(), LONG_WAIT_SECS.to_string());
                return Reply::Status(503, vec![retry_after], "later".into());
            }
            delayed(request, PLAN.reply(request))
        })
        .create();
    let mut members = ["enricher", "retry-tier", "scheduler"].map(|service| pipe.start(service, "a", &[]));
    let mut sizes = random.fork();
    let record = move |n| sometimes_large(n, &mut sizes);
    let sent = under_load_of(&pipe, 150, record, |load| {
        for _ in 0..KILLS {
            load.until_ended(50);
            sleep_up_to(&mut random, Duration::from_millis(1_000));
            for member in &mut members {
                member.kill_9();
            }
            for member in &mut members {
                member.start_again();
            }
            for member in &mut members {
                member.until_ready();
            }
        }
        load.until_ended(100);
    });
    settle(&pipe, &sent, &PLAN);
    for member in &members {
        println!("{member}");
        assert_eq!(
            (member.kills(), member.kills_when_ready()),
            (KILLS, KILLS),
            "{member}"
        );
        assert!(member.median_restart() < LONG_SESSION / 2, "{member}");
    }
    let (_, topics) = pipe.jobs.as_ref().unwrap();
    let waited = pipe.read(std::slice::from_ref(&topics.ingest)).len();
    assert!(
        waited > sent.len() / 20,
        "{waited} of {} went through the scheduler",
        sent.len()
    );
}
