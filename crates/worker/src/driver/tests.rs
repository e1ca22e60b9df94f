use std::collections::BTreeSet;
use std::future::pending;
use std::sync::Mutex;

use redeliver_core::failure::FailureScope;
use redeliver_core::{Failure, SystemClock};
use redeliver_kafka::Processor;
use redeliver_runtime::telemetry::Tracer;
use redeliver_service::control::value::RateLimit as WantedRate;
use tower::{BoxError, service_fn};

use super::*;
use crate::breaker::{BreakerObserver, BreakerSettings};
use crate::engine::tests::{Bench, ROOMY};
use crate::groups::{GroupBy, GroupLimit, Ordering};
use crate::handler::Attempt;
use crate::rate_limit::RateLimit;

const SECOND: Duration = Duration::from_secs(1);
/// Longer than a test.
const NEVER: Duration = Duration::from_secs(86_400);

/// Limits of a driver, by default none.
#[derive(Clone, Copy, Default)]
struct Limits {
    timeout: Option<Duration>,
    rate_limit: Option<RateLimit>,
    repeated_slots: usize,
}

struct Silent;

impl BreakerObserver for Silent {
    fn opened(&self, _: &Failure) {}
    fn closed(&self, _: Duration) {}
}

/// A driver with a handler, and the engine of its only lane. Time is that of the test's runtime, which does not wait.
struct Rig {
    bench: Bench,
    /// Offsets of the records, one for each call of the handler.
    calls: Arc<Mutex<Vec<i64>>>,
    written: Vec<[String; 3]>,
    limiter: Arc<Limiter>,
    gate: Gate,
}

impl Rig {
    /// `handle` decides how the attempt ends with this number, from 0, of the record with this offset.
    fn start<F>(grouping: Grouping, breaker: BreakerSettings, handle: F) -> Self
    where
        F: Fn(i64, usize) -> Outcome + Send + Sync + 'static,
    {
        let calls: Arc<Mutex<Vec<i64>>> = Arc::default();
        let handle = Arc::new(handle);
        let handler = service_fn({
            let calls = calls.clone();
            move |attempt: Attempt| {
                let offset = attempt.record.position.offset;
                let mut calls = calls.lock().unwrap();
                let number = calls.iter().filter(|called| **called == offset).count();
                calls.push(offset);
                let outcome = handle(offset, number);
                async move { Ok::<_, BoxError>(outcome) }
            }
        });
        Self {
            calls,
            ..Self::with_handler(grouping, breaker, Limits::default(), handler)
        }
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the task ends with the runtime of the test"
    )]
    fn with_handler(
        grouping: Grouping,
        breaker: BreakerSettings,
        limits: Limits,
        handler: impl Handler,
    ) -> Self {
        let grouping = Arc::new(grouping);
        let bench = Bench::with_grouping(ROOMY, grouping.clone());
        let limiter = Arc::new(Limiter::new(limits.rate_limit, Box::new(|| Some(1.0))));
        let gate = Gate::new(breaker, Arc::new(Silent));
        let driver = Driver {
            handler,
            lanes: vec![bench.channel.clone()],
            changed: bench.changed.clone(),
            concurrency: 16,
            repeated_slots: limits.repeated_slots,
            context: Arc::new(AttemptContext {
                pipeline: bench.pipeline.clone(),
                clock: Arc::new(SystemClock),
                metrics: bench.metrics.clone(),
                runner: AttemptRunner {
                    pipeline: bench.pipeline.clone(),
                    group: bench.pipeline.worker_group(""),
                    metrics: bench.metrics.clone(),
                    tracer: Tracer::off(),
                    timeout: limits.timeout,
                    schema: None,
                },
                limiter: limiter.clone(),
                failures: Arc::new(FailureLog::new(bench.pipeline.name.clone())),
                grouping,
                partitions: Box::new(|_| None),
            }),
            gate: gate.clone(),
        };
        tokio::spawn(driver.run(vec![CancellationToken::new()]));
        Self {
            bench,
            calls: Arc::default(),
            written: Vec::new(),
            limiter,
            gate,
        }
    }

    /// An operator wants this rate.
    fn want_rate(&self, rate: Option<WantedRate>) {
        if self.limiter.set_wanted(rate) {
            self.gate.rate_changed();
        }
    }

    fn accept(&mut self, offsets: std::ops::Range<i64>) {
        offsets.for_each(|offset| self.bench.accept(offset, 10));
    }

    /// Lets time pass. Returns the topic, key and error code of everything that was written so far.
    async fn after(&mut self, time: Duration) -> &[[String; 3]] {
        tokio::time::sleep(time).await;
        self.bench.finish();
        let written = self.bench.written().into_iter();
        self.written
            .extend(written.map(|fields| fields.map(str::to_owned)));
        &self.written
    }

    /// How many records wait for this reason.
    fn waiting(&self, reason: &str) -> String {
        self.bench
            .metric(&format!("worker_waiting_records{{reason={reason:?}}}"))
    }

    fn calls(&self) -> Vec<i64> {
        self.calls.lock().unwrap().clone()
    }
}

fn in_order(key_blocking: Option<Duration>) -> Grouping {
    Grouping {
        ordering: Ordering::Partition,
        key_blocking,
        limit: None,
    }
}

fn breaker(poison_after: Duration) -> BreakerSettings {
    BreakerSettings {
        failures: 1,
        rate: None,
        open_max: SECOND,
        poison_after,
    }
}

fn unavailable() -> Outcome {
    Outcome::Failed(Failure::transient("http.503", "down").with_scope(FailureScope::Endpoint))
}

fn broken() -> Outcome {
    Outcome::Failed(Failure::transient("http.500", "broken").with_scope(FailureScope::Unknown))
}

#[tokio::test(start_paused = true)]
async fn while_the_breaker_is_open_records_that_wait_for_their_limit_are_probed_too() {
    const RECORDS: i64 = 40;
    let is_down = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let limit = Grouping {
        limit: Some(GroupLimit {
            by: GroupBy::Header("tenant".to_owned()),
            concurrency: 1,
        }),
        ..Grouping::default()
    };
    let mut rig = Rig::start(limit, breaker(5 * SECOND), {
        let is_down = is_down.clone();
        move |_, _| match is_down.load(std::sync::atomic::Ordering::SeqCst) {
            true => unavailable(),
            false => Outcome::unchanged(),
        }
    });
    rig.accept(0..RECORDS);
    let written = rig.after(25 * SECOND).await;
    assert!(written.is_empty(), "{written:?}");
    let calls = rig.calls();
    assert!(calls.len() >= 20, "{calls:?}");
    assert_eq!(
        calls.iter().collect::<BTreeSet<_>>().len(),
        calls.len(),
        "{calls:?}"
    );
    is_down.store(false, std::sync::atomic::Ordering::SeqCst);
    let written = rig.after(5 * SECOND).await;
    assert!(written.iter().all(|[topic, ..]| topic == "done"), "{written:?}");
    assert_eq!(written.len(), usize::try_from(RECORDS).unwrap());
}

#[tokio::test(start_paused = true)]
async fn an_outage_does_not_use_up_the_time_for_which_a_record_blocks() {
    let mut rig = Rig::start(
        in_order(Some(10 * SECOND)),
        breaker(NEVER),
        |offset, number| match (offset, number) {
            (0, 0) => broken(),
            (0, ..60) => unavailable(),
            (0, ..63) => broken(),
            _ => Outcome::unchanged(),
        },
    );
    rig.accept(0..3);
    assert!(rig.after(50 * SECOND).await.is_empty());
    let written = rig.after(60 * SECOND).await;
    let done = ["key-0", "key-1", "key-2"].map(|key| ["done", key, ""].map(str::to_owned));
    assert_eq!(written, done);
}

#[tokio::test(start_paused = true)]
async fn an_outage_that_others_notice_does_not_use_up_the_time_for_which_a_record_blocks() {
    let grouping = Grouping {
        ordering: Ordering::Key,
        ..in_order(Some(10 * SECOND))
    };
    let mut rig = Rig::start(grouping, breaker(NEVER), |offset, number| {
        match (offset, number) {
            // Its failures say nothing about the endpoint.
            (0, ..12) => broken(),
            (1.., ..20) => unavailable(),
            _ => Outcome::unchanged(),
        }
    });
    rig.accept(0..4);
    let written = rig.after(200 * SECOND).await;
    assert_eq!(written.len(), 4);
    assert!(written.iter().all(|[topic, ..]| topic == "done"), "{written:?}");
}

#[tokio::test(start_paused = true)]
async fn records_that_wait_for_their_limit_use_up_no_part_of_the_rate_limit() {
    let limit = Grouping {
        limit: Some(GroupLimit {
            by: GroupBy::Header("tenant".to_owned()),
            concurrency: 1,
        }),
        ..Grouping::default()
    };
    let two = RateLimit {
        attempts: 1,
        per: NEVER,
        burst: Some(2),
    };
    let first_may_end = Arc::new(Notify::new());
    let calls: Arc<Mutex<Vec<i64>>> = Arc::default();
    let handler = service_fn({
        let (first_may_end, calls) = (first_may_end.clone(), calls.clone());
        move |attempt: Attempt| {
            let offset = attempt.record.position.offset;
            calls.lock().unwrap().push(offset);
            let first_may_end = first_may_end.clone();
            async move {
                if offset == 0 {
                    first_may_end.notified().await;
                }
                Ok::<_, BoxError>(Outcome::unchanged())
            }
        }
    });
    let mut rig = Rig::with_handler(
        limit,
        breaker(NEVER),
        Limits {
            rate_limit: Some(two),
            ..Limits::default()
        },
        handler,
    );
    for offset in 0..3 {
        rig.accept(offset..offset + 1);
        rig.after(SECOND).await;
    }
    first_may_end.notify_one();
    rig.after(SECOND).await;
    assert_eq!(*calls.lock().unwrap(), [0, 1]);
}

#[tokio::test(start_paused = true)]
async fn an_attempt_after_a_failed_one_can_use_several_slots() {
    let grouping = Grouping {
        ordering: Ordering::Key,
        ..in_order(Some(NEVER))
    };
    let calls: Arc<Mutex<Vec<i64>>> = Arc::default();
    let handler = service_fn({
        let calls = calls.clone();
        move |attempt: Attempt| {
            calls.lock().unwrap().push(attempt.record.position.offset);
            async move {
                match attempt.is_repeated {
                    true => pending().await,
                    false => Ok::<_, BoxError>(broken()),
                }
            }
        }
    });
    let limits = Limits {
        repeated_slots: 8,
        ..Limits::default()
    };
    let mut rig = Rig::with_handler(grouping, breaker(NEVER), limits, handler);
    rig.accept(0..10);
    rig.after(60 * SECOND).await;
    // The first attempt of each, and two that use all 16 slots.
    assert_eq!(calls.lock().unwrap().len(), 10 + 2);
}

#[tokio::test(start_paused = true)]
async fn a_record_that_blocks_leaves_the_probes_to_others() {
    let grouping = Grouping {
        ordering: Ordering::Key,
        ..in_order(Some(10 * SECOND))
    };
    let mut rig = Rig::start(grouping, breaker(NEVER), |offset, number| {
        match (offset, number) {
            (0, _) => broken(),
            (_, ..3) => unavailable(),
            _ => Outcome::unchanged(),
        }
    });
    rig.accept(0..4);
    let mut written = rig.after(120 * SECOND).await.to_vec();
    written.sort();
    let written: Vec<_> = written.iter().map(|[topic, key, _]| (&**topic, &**key)).collect();
    assert_eq!(
        written,
        [
            ("docs-retry-5s", "key-0"),
            ("done", "key-1"),
            ("done", "key-2"),
            ("done", "key-3")
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_record_that_alone_keeps_the_breaker_open_does_not_block_its_followers() {
    let mut rig = Rig::start(
        in_order(Some(NEVER)),
        breaker(5 * SECOND),
        |offset, _| match offset {
            0 => unavailable(),
            _ => Outcome::unchanged(),
        },
    );
    rig.accept(0..3);
    let written = rig.after(20 * SECOND).await;
    let written: Vec<_> = written.iter().map(|[topic, key, _]| (&**topic, &**key)).collect();
    assert_eq!(
        written,
        [("docs-retry-5s", "key-0"), ("done", "key-1"), ("done", "key-2")]
    );
}

#[tokio::test(start_paused = true)]
async fn a_delay_without_end_does_not_block_followers() {
    let mut rig = Rig::start(in_order(Some(NEVER)), breaker(NEVER), |offset, _| match offset {
        0 => Outcome::Failed(Failure {
            retry_after: Some(Duration::MAX),
            ..Failure::transient("busy", "later")
        }),
        _ => Outcome::unchanged(),
    });
    rig.accept(0..2);
    let written = rig.after(SECOND).await;
    assert_eq!(written.len(), 2, "{written:?}");
    assert_eq!(written[1][0], "done");
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_a_cancelled_attempt_affects_no_other_record() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("in a destructor");
        }
    }
    let handler = service_fn(|attempt: Attempt| async move {
        if attempt.record.position.offset == 0 {
            let _bomb = Bomb;
            pending::<()>().await;
        }
        Ok::<_, BoxError>(Outcome::unchanged())
    });
    let mut rig = Rig::with_handler(
        in_order(None),
        breaker(NEVER),
        Limits {
            timeout: Some(SECOND),
            ..Limits::default()
        },
        handler,
    );
    rig.accept(0..2);
    let written = rig.after(5 * SECOND).await;
    let codes: Vec<_> = written
        .iter()
        .map(|[topic, _, code]| (&**topic, &**code))
        .collect();
    assert_eq!(codes, [("docs-retry-5s", "handler.panic"), ("done", "")]);
}

#[tokio::test(start_paused = true)]
async fn a_record_whose_attempt_ends_after_its_partition_was_revoked_does_not_wait_for_the_endpoint() {
    let handler = service_fn(|_: Attempt| async {
        tokio::time::sleep(10 * SECOND).await;
        Ok::<_, BoxError>(unavailable())
    });
    let mut rig = Rig::with_handler(Grouping::default(), breaker(NEVER), Limits::default(), handler);
    rig.accept(0..2);
    rig.after(5 * SECOND).await;
    rig.bench.engine.revoked(rig.bench.assignment);
    rig.after(SECOND).await;
    assert_eq!(rig.bench.in_flight(), 2);
    // The attempts have ended, and the first probe has not begun.
    let written = rig.after(4_500 * SECOND / 1_000).await;
    assert!(written.is_empty(), "{written:?}");
    assert_eq!(rig.bench.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn records_are_counted_by_what_they_wait_for() {
    const RECORDS: i64 = 20;
    let by_tenant = Grouping {
        limit: Some(GroupLimit {
            by: GroupBy::Header("tenant".to_owned()),
            concurrency: 3,
        }),
        ..Grouping::default()
    };
    let hanging = || service_fn(|_: Attempt| pending::<Result<Outcome, BoxError>>());
    let mut limited = Rig::with_handler(by_tenant, breaker(NEVER), Limits::default(), hanging());
    limited.accept(0..RECORDS);
    limited.after(SECOND).await;
    assert_eq!(
        ["attempt", "order", "limit"].map(|reason| limited.waiting(reason)),
        ["0", "0", "17"]
    );

    let mut unlimited = Rig::with_handler(Grouping::default(), breaker(NEVER), Limits::default(), hanging());
    unlimited.accept(0..RECORDS);
    unlimited.after(SECOND).await;
    assert_eq!(unlimited.waiting("attempt"), "4");

    let mut blocked = Rig::start(in_order(Some(NEVER)), breaker(NEVER), |_, _| broken());
    blocked.accept(0..RECORDS);
    blocked.after(50 * SECOND).await;
    assert_eq!(
        ["order", "blocking"].map(|reason| blocked.waiting(reason)),
        ["19", "1"]
    );

    // The breaker is open: one record is probed at a time, and fails.
    let mut forgotten = Rig::start(Grouping::default(), breaker(NEVER), |_, _| unavailable());
    forgotten.accept(0..RECORDS);
    forgotten.after(50 * SECOND).await;
    assert_eq!(forgotten.waiting("forgotten"), "20");

    let two_failures = BreakerSettings {
        failures: 2,
        ..breaker(NEVER)
    };
    let mut held = Rig::start(Grouping::default(), two_failures, |_, _| unavailable());
    held.accept(0..1);
    held.after(Duration::from_millis(1)).await;
    assert_eq!(held.waiting("held"), "1");
}

#[tokio::test(start_paused = true)]
async fn a_paused_pipeline_starts_no_attempt_and_accepts_nothing_until_it_runs_again() {
    let mut rig = Rig::start(Grouping::default(), BreakerSettings::default(), |_, _| {
        Outcome::unchanged()
    });
    let channel = rig.bench.channel.clone();
    rig.accept(0..2);
    assert_eq!(rig.after(SECOND).await.len(), 2);
    channel.set_paused(true);
    // In hand at the moment of the pause.
    rig.accept(2..4);
    assert_eq!(rig.after(3_600 * SECOND).await.len(), 2);
    assert_eq!(rig.calls(), [0, 1]);
    assert_eq!(rig.bench.engine.capacity(rig.bench.assignment), 0);
    channel.set_paused(false);
    assert_eq!(rig.after(SECOND).await.len(), 4);
    assert_eq!(rig.calls(), [0, 1, 2, 3]);
    assert!(rig.bench.engine.capacity(rig.bench.assignment) > 0);
}

#[tokio::test(start_paused = true)]
async fn an_attempt_in_progress_ends_although_the_pipeline_is_paused() {
    let handler = service_fn(|_: Attempt| async {
        tokio::time::sleep(10 * SECOND).await;
        Ok::<_, BoxError>(Outcome::unchanged())
    });
    let mut rig = Rig::with_handler(
        Grouping::default(),
        BreakerSettings::default(),
        Limits::default(),
        handler,
    );
    rig.accept(0..1);
    assert!(rig.after(SECOND).await.is_empty());
    rig.bench.channel.set_paused(true);
    assert_eq!(rig.after(20 * SECOND).await.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn attempts_start_in_their_order_at_the_rate_that_an_operator_wants_until_it_is_lifted() {
    let mut rig = Rig::start(in_order(None), BreakerSettings::default(), |_, _| {
        Outcome::unchanged()
    });
    rig.want_rate(Some(WantedRate::PerSecond(2.0)));
    rig.accept(0..40);
    // The tokens of the first second, and those that are added.
    rig.after(5 * SECOND).await;
    let calls = rig.calls().len();
    assert!((10..=12).contains(&calls), "{calls}");
    assert_eq!(rig.waiting("attempt"), "1");
    rig.want_rate(None);
    assert_eq!(rig.after(SECOND).await.len(), 40);
    assert_eq!(rig.calls(), (0..40).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn a_rate_that_is_lifted_no_longer_delays_the_probe_of_an_open_breaker() {
    let mut rig = Rig::start(Grouping::default(), breaker(NEVER), |_, number| match number {
        0 => unavailable(),
        _ => Outcome::unchanged(),
    });
    rig.want_rate(Some(WantedRate::PerSecond(0.001)));
    rig.accept(0..1);
    assert!(rig.after(100 * SECOND).await.is_empty());
    assert_eq!(rig.calls(), [0]);
    rig.want_rate(Some(WantedRate::Unlimited));
    let written = rig.after(SECOND).await;
    assert_eq!(written, [["done", "key-0", ""].map(str::to_owned)]);
}
