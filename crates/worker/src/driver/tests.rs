use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::future::pending;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use redeliver_core::failure::FailureScope;
use redeliver_core::headers::PROCESS_AFTER;
use redeliver_core::{
    Clock, ClockLimits, Failure, GuardedClock, ManualClock, Output, SystemClock, Timestamp,
};
use redeliver_kafka::Processor;
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
struct Limits {
    timeout: Option<Duration>,
    rate_limit: Option<RateLimit>,
    concurrency: usize,
    repeated_slots: usize,
    clock: Arc<dyn Clock>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            timeout: None,
            rate_limit: None,
            concurrency: 16,
            repeated_slots: 0,
            clock: Arc::new(SystemClock),
        }
    }
}

/// Counts how often the breaker has opened.
#[derive(Default)]
struct Openings(AtomicUsize);

impl BreakerObserver for Openings {
    fn opened(&self, _: &Failure) {
        self.0.fetch_add(1, SeqCst);
    }
    fn answered(&self, _: Duration) {}
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
    openings: Arc<Openings>,
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
        let openings = Arc::new(Openings::default());
        let gate = Gate::new(breaker, limits.concurrency, openings.clone());
        let driver = Driver {
            handler,
            lanes: vec![bench.channel.clone()],
            changed: bench.changed.clone(),
            concurrency: limits.concurrency,
            repeated_slots: limits.repeated_slots,
            context: Arc::new(AttemptContext {
                pipeline: bench.pipeline.clone(),
                clock: limits.clock,
                metrics: bench.metrics.clone(),
                runner: AttemptRunner {
                    pipeline: bench.pipeline.clone(),
                    group: bench.pipeline.worker_group(""),
                    metrics: bench.metrics.clone(),
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
            openings,
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

fn by_key(key_blocking: Option<Duration>) -> Grouping {
    Grouping {
        ordering: Ordering::Key,
        ..in_order(key_blocking)
    }
}

fn by_tenant(concurrency: usize) -> Grouping {
    Grouping {
        limit: Some(GroupLimit {
            by: GroupBy::Header("tenant".to_owned()),
            concurrency,
        }),
        ..Grouping::default()
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
async fn limited_records_are_probed_too() {
    const RECORDS: i64 = 40;
    let is_down = Arc::new(AtomicBool::new(true));
    let limit = by_tenant(1);
    let mut rig = Rig::start(limit, breaker(5 * SECOND), {
        let is_down = is_down.clone();
        move |_, _| match is_down.load(SeqCst) {
            true => unavailable(),
            false => Outcome::unchanged(),
        }
    });
    rig.accept(0..RECORDS);
    let written = rig.after(25 * SECOND).await;
    assert!(written.is_empty(), "{written:?}");
    let calls = rig.calls();
    // Every other one is a record that was not probed before.
    let probed = calls.iter().collect::<BTreeSet<_>>().len();
    assert!(probed >= 10 && 2 * probed >= calls.len(), "{calls:?}");
    is_down.store(false, SeqCst);
    let written = rig.after(5 * SECOND).await;
    assert!(written.iter().all(|[topic, ..]| topic == "done"), "{written:?}");
    assert_eq!(written.len(), usize::try_from(RECORDS).unwrap());
}

#[tokio::test(start_paused = true)]
async fn outage_uses_up_no_blocking_time() {
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
async fn outage_of_others_stops_blocking_time() {
    let grouping = by_key(Some(10 * SECOND));
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
async fn limited_records_use_up_no_rate() {
    let limit = by_tenant(1);
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
async fn repeated_attempts_use_several_slots() {
    let grouping = by_key(Some(NEVER));
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
async fn blocking_record_leaves_probes_to_others() {
    let grouping = by_key(Some(10 * SECOND));
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
async fn poison_record_does_not_block_followers() {
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
async fn endless_delay_does_not_block_followers() {
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
async fn panic_on_cancellation_affects_no_others() {
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
async fn revoked_record_waits_for_nothing() {
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
async fn records_are_counted_by_waiting_reason() {
    const RECORDS: i64 = 20;
    let by_tenant = by_tenant(3);
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
async fn paused_pipeline_starts_no_attempts() {
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
async fn running_attempt_survives_a_pause() {
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
async fn wanted_rate_applies_until_lifted() {
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
async fn lifted_rate_frees_the_probe() {
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

/// Otherwise, a retry could be early, or late without limit.
#[tokio::test(start_paused = true)]
async fn retries_wait_for_confirmed_time() {
    let start = Timestamp::from_millis(1_700_000_000_000);
    let clock = Arc::new(ManualClock::new(start));
    let bounds = ClockLimits {
        max_step: SECOND,
        confirm: NEVER,
    };
    let guarded = GuardedClock::new(clock.clone(), bounds, Box::new(|_| {}));
    let handler = service_fn(async |attempt: Attempt| {
        let failed = Failure::transient("busy", "later").with_scope(FailureScope::Record);
        Ok::<_, BoxError>(match attempt.record.position.offset {
            0 => Outcome::Failed(failed),
            _ => Outcome::unchanged(),
        })
    });
    let limits = Limits {
        clock: Arc::new(guarded),
        ..Limits::default()
    };
    limits.clock.now();
    let mut rig = Rig::with_handler(Grouping::default(), BreakerSettings::default(), limits, handler);
    clock.set(Timestamp::from_millis(start.as_millis() - 3_600_000));
    rig.accept(0..2);
    let written = rig.after(60 * SECOND).await;
    assert_eq!(written, [["done", "key-1", ""].map(str::to_owned)]);
    // Only undoing the step ends the hold.
    clock.set(start);
    assert_eq!(rig.after(5 * SECOND).await[1][0], "docs-retry-5s");
    let due = rig.bench.outputs()[0].headers.last(PROCESS_AFTER).unwrap();
    let due: Timestamp = std::str::from_utf8(due).unwrap().parse().unwrap();
    assert!(due >= start.after(5 * SECOND), "{due}");
}

/// A call of a record in a simulation.
#[derive(Clone, Copy)]
struct Call {
    record: i64,
    /// From 1.
    number: u32,
    since_first: Duration,
    /// Since the start of the simulation.
    at: Duration,
}

#[derive(Default)]
struct Simulated {
    /// When each record succeeded.
    succeeded: HashMap<i64, Duration>,
    /// How often a record was written to a tier.
    retried: usize,
    dead: BTreeSet<i64>,
    openings: usize,
}

impl Simulated {
    /// When the last one of these records succeeded.
    fn last(&self, of: impl Fn(i64) -> bool) -> Duration {
        let of = self.succeeded.iter().filter(|(record, _)| of(**record));
        of.map(|(_, at)| *at).max().unwrap_or_default()
    }
}

/// How long calls take that the endpoint answers, and those that fail, before jitter.
#[derive(Clone, Copy, Debug)]
struct Latency {
    answer: u64,
    failure: u64,
}

/// An endpoint that is fast, one with a usual latency, and one that fails at once and works for its answers.
const LATENCIES: [Latency; 3] = [
    Latency {
        answer: 5,
        failure: 5,
    },
    Latency {
        answer: 50,
        failure: 50,
    },
    Latency {
        answer: 100,
        failure: 1,
    },
];

impl Latency {
    /// Prolonged or shortened by up to a fifth.
    fn of(self, is_answered: bool) -> Duration {
        let millis = if is_answered { self.answer } else { self.failure };
        Duration::from_micros(fastrand::u64(800 * millis..=1_200 * millis))
    }
}

/// Simulates a pipeline with the tiers 1s, 2s and 4s, to whose source 200 records/s are written, and 32 calls at a time.
/// `answers` says which of them the endpoint answers; it has a failure for the others. Ends when this many have succeeded.
async fn simulate(
    breaker: BreakerSettings,
    latency: Latency,
    records: i64,
    successes: usize,
    answers: impl Fn(Call) -> bool + Send + Sync + 'static,
) -> Simulated {
    const TICK: Duration = Duration::from_millis(5);
    const IN_FLIGHT: usize = 1_000;
    fastrand::seed(7);
    let start = Instant::now();
    let calls: Mutex<HashMap<i64, (Instant, u32)>> = Mutex::default();
    let answers = Arc::new(move |record| {
        let now = Instant::now();
        let mut calls = calls.lock().unwrap();
        let (first, number) = calls.entry(record).or_insert((now, 0));
        *number += 1;
        answers(Call {
            record,
            number: *number,
            since_first: now - *first,
            at: now - start,
        })
    });
    let handler = service_fn(move |attempt: Attempt| {
        let is_answered = answers(attempt.origin.offset);
        async move {
            tokio::time::sleep(latency.of(is_answered)).await;
            Ok::<_, BoxError>(if is_answered {
                Outcome::unchanged()
            } else {
                unavailable()
            })
        }
    });
    let limits = Limits {
        concurrency: 32,
        ..Limits::default()
    };
    let mut rig = Rig::with_handler(Grouping::default(), breaker, limits, handler);
    let mut simulated = Simulated::default();
    let mut new = 0..records;
    let mut waiting: BTreeMap<(Duration, i64), Output> = BTreeMap::new();
    // Above those of the records of the source.
    let mut offsets = records..;
    while simulated.succeeded.len() < successes {
        let now = start.elapsed();
        assert!(now < 600 * SECOND, "{} of {successes}", simulated.succeeded.len());
        let room = |rig: &Rig| rig.bench.in_flight() < IN_FLIGHT;
        while room(&rig)
            && let Some(due) = waiting.first_entry().filter(|entry| entry.key().0 <= now)
        {
            rig.bench.accept_released(due.remove(), offsets.next().unwrap());
        }
        while room(&rig) && TICK * u32::try_from(new.start).unwrap() <= now {
            let Some(offset) = new.next() else { break };
            rig.bench.accept(offset, 1);
        }
        tokio::time::sleep(TICK).await;
        rig.bench.finish();
        let now = start.elapsed();
        for output in rig.bench.outputs() {
            let key = std::str::from_utf8(output.key.as_deref().unwrap()).unwrap();
            let record = key.strip_prefix("key-").unwrap().parse().unwrap();
            let wait = match &*output.topic {
                "docs-retry-5s" => 1,
                "docs-retry-30s" => 2,
                "docs-retry-1m" => 4,
                "done" => {
                    simulated.succeeded.insert(record, now);
                    continue;
                }
                _ => {
                    simulated.dead.insert(record);
                    continue;
                }
            };
            simulated.retried += 1;
            waiting.insert((now + wait * SECOND, offsets.next().unwrap()), output.clone());
        }
    }
    simulated.openings = rig.openings.0.load(SeqCst);
    simulated
}

/// Whether the endpoint fails for a while after the first call of a record, and whether it always does.
fn fails(record: i64) -> (bool, bool) {
    (record % 3 == 1, record % 100 == 99)
}

#[tokio::test(start_paused = true)]
async fn failing_third_stops_no_others() {
    for latency in LATENCIES {
        let simulated = simulate(
            BreakerSettings::default(),
            latency,
            5_000,
            4_950,
            |call| match fails(call.record) {
                (_, true) => false,
                (true, _) => {
                    call.since_first.as_millis()
                        >= 1_000 + u128::from(call.record.unsigned_abs() * 7_919 % 2_001)
                }
                _ => true,
            },
        )
        .await;
        // The last one is produced after 25 s.
        let last = simulated.last(|record| fails(record) == (false, false));
        assert!(last < 26 * SECOND, "{latency:?}: {last:?}");
        assert_eq!(simulated.openings, 0, "{latency:?}");
        // Those of the first half have used up their attempts long before.
        let dead: Vec<_> = simulated
            .dead
            .iter()
            .copied()
            .filter(|record| *record < 2_500)
            .collect();
        let expected: Vec<_> = (0..2_500).filter(|record| fails(*record).1).collect();
        assert_eq!(dead, expected, "{latency:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn filling_cache_delays_records_by_seconds() {
    let first_fails = |call: Call| call.number > 1;
    let off = BreakerSettings {
        failures: 0,
        ..BreakerSettings::default()
    };
    for latency in LATENCIES {
        let without = simulate(off.clone(), latency, 300, 300, first_fails).await;
        let with = simulate(BreakerSettings::default(), latency, 300, 300, first_fails).await;
        let longer = with.last(|_| true).saturating_sub(without.last(|_| true));
        assert!(longer < 10 * SECOND, "{latency:?}: {longer:?}");
        assert!(with.dead.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn outage_leaves_no_traces() {
    const OUTAGE: std::ops::Range<Duration> = Duration::from_secs(15)..Duration::from_secs(60);
    for latency in LATENCIES {
        let simulated = simulate(BreakerSettings::default(), latency, 15_000, 15_000, |call| {
            !OUTAGE.contains(&call.at)
        })
        .await;
        let after = simulated.succeeded.values().filter(|at| **at > OUTAGE.end);
        // Those of calls before the outage may end in it.
        let first = *after.min().unwrap() - OUTAGE.end;
        assert!(first < 5 * SECOND, "{latency:?}: {first:?}");
        let in_time = |second: u32| {
            let from = OUTAGE.end + second * SECOND;
            simulated
                .succeeded
                .values()
                .filter(|at| (from..from + SECOND).contains(*at))
                .count()
        };
        assert!(
            (9..12).all(|second| in_time(second) >= 200),
            "{latency:?}: {:?}",
            [9, 10, 11].map(in_time)
        );
        assert_eq!((simulated.retried, simulated.dead.len()), (0, 0), "{latency:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn outages_use_up_no_attempts() {
    let in_a_row = BreakerSettings {
        failures: 5,
        rate: None,
        open_max: 60 * SECOND,
        ..BreakerSettings::default()
    };
    for (settings, outage, openings) in [
        // Too short to open the breaker.
        (BreakerSettings::default(), 15 * SECOND..17 * SECOND, 0),
        (in_a_row, 5 * SECOND..25 * SECOND, 1),
    ] {
        for latency in LATENCIES {
            let outage = outage.clone();
            let answers = move |call: Call| !outage.contains(&call.at);
            let simulated = simulate(settings.clone(), latency, 4_000, 4_000, answers).await;
            assert_eq!(
                (simulated.retried, simulated.openings),
                (0, openings),
                "{latency:?}"
            );
        }
    }
}
