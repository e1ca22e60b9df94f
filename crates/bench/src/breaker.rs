//! `bench breaker`: an enricher process with the default circuit breaker, while a part of the calls fails and after an outage; next to
//! the same load without failures, or without the breaker.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use redeliver_core::{Clock, Headers, Output, SystemClock, Timestamp};
use redeliver_testkit::{FakeEndpoint, Reply, Request};

use crate::figures::{Distribution, Figures, median};
use crate::kafka::Broker;
use crate::process::Running;
use crate::scheduler::PARTITIONS;
use crate::scheduler::arrivals::{Arrival, Arrivals};
use crate::scheduler::env::data;

const CONCURRENCY: usize = 32;
/// The settings of the default breaker, and of none.
const DEFAULT: &str = "";
const OFF: &str = "breaker: { failures: 0 }";
/// More records per second than are processed.
const AT_ONCE: u32 = 1_000_000;
/// Milliseconds after which the endpoint answers: a success, and a failure.
const USUAL: [u64; 2] = [20, 20];
const FAILS_FAST: [u64; 2] = [100, 1];
/// When the outage begins and ends, from the first call.
const OUTAGE: [Duration; 2] = [Duration::from_secs(3), Duration::from_secs(48)];

/// A call, as the endpoint sees it.
struct Call {
    /// The number of the record.
    number: usize,
    /// The time since the first call of the record, which is 0 for this one.
    since_first: Duration,
    /// The time since the first call of any record.
    since_start: Duration,
}

/// The records that never fail while a third of them does.
fn is_healthy(number: usize) -> bool {
    !number.is_multiple_of(3)
}

/// A third of the records fails for 1 to 3 s after its first call.
fn a_third(call: &Call) -> bool {
    let lasts = Duration::from_millis(1_000 + (call.number as u64 * 7919) % 2_001);
    !is_healthy(call.number) && call.since_first < lasts
}

fn in_outage(call: &Call) -> bool {
    (OUTAGE[0]..OUTAGE[1]).contains(&call.since_start)
}

/// What is written, and what the endpoint answers.
#[derive(Clone, Copy)]
struct Load {
    count: usize,
    per_second: u32,
    times: [u64; 2],
    fails: fn(&Call) -> bool,
}

/// The calls so far.
#[derive(Default)]
struct Calls {
    first_of: HashMap<usize, Instant>,
    /// When the first call came.
    start: Option<(Instant, Timestamp)>,
    count: usize,
    /// When calls came that succeeded, from the first call.
    successes: Vec<Duration>,
}

impl Calls {
    fn answer(&mut self, request: &Request, load: &Load) -> Reply {
        let body = std::str::from_utf8(&request.body).unwrap_or_default();
        let number = body.trim_start_matches(r#"{"n":"#).split(',').next();
        let Some(number) = number.and_then(|number| number.parse().ok()) else {
            return Reply::status(400);
        };
        let now = Instant::now();
        let (start, _) = *self.start.get_or_insert_with(|| (now, SystemClock.now()));
        self.count += 1;
        let call = Call {
            number,
            since_first: now - *self.first_of.entry(number).or_insert(now),
            since_start: now - start,
        };
        let [success, failure] = load.times.map(Duration::from_millis);
        if (load.fails)(&call) {
            return Reply::Delay(failure, Box::new(Reply::status(503)));
        }
        self.successes.push(call.since_start);
        Reply::Delay(success, Box::new(Reply::ok(request.body.clone())))
    }
}

struct Measured {
    arrivals: Vec<Arrival>,
    calls: Calls,
    openings: f64,
}

impl Measured {
    fn of(&self, of: fn(usize) -> bool) -> impl Iterator<Item = &Arrival> {
        let arrivals = self.arrivals.iter();
        arrivals.filter(move |arrival| of(arrival.number as usize))
    }

    /// The seconds from the first call to the last result of these records.
    fn wall(&self, of: fn(usize) -> bool) -> f64 {
        let start = self.calls.start.map_or(0, |(_, at)| at.as_millis());
        let ends = self.of(of);
        let ends = ends.map(|arrival| (arrival.due.as_millis() - start) as f64 + arrival.lateness);
        ends.fold(0.0, f64::max) / 1000.0
    }

    /// The time from the writing of healthy records to their results.
    fn latency(&self) -> Distribution {
        Distribution::of(self.of(is_healthy).map(|arrival| arrival.lateness).collect())
    }
}

/// The median of each column.
fn medians<const N: usize>(rounds: &[[f64; N]]) -> [f64; N] {
    std::array::from_fn(|column| median(&rounds.iter().map(|round| round[column]).collect::<Vec<_>>()))
}

pub(crate) fn run(broker: &Broker, rounds: usize, figures: &mut Figures) -> anyhow::Result<()> {
    for (count, per_second) in [(3_000, AT_ONCE), (5_000, 200)] {
        for times in [USUAL, FAILS_FAST] {
            let load = |fails| Load {
                count,
                per_second,
                times,
                fails,
            };
            a_part_fails(broker, rounds, &load, figures)?;
        }
    }
    for count in [300, 2_000] {
        first_calls_fail(broker, rounds, count, figures)?;
    }
    outage(broker, rounds, figures)
}

fn a_part_fails(
    broker: &Broker,
    rounds: usize,
    load: &dyn Fn(fn(&Call) -> bool) -> Load,
    figures: &mut Figures,
) -> anyhow::Result<()> {
    let (mut walls, mut latencies) = (Vec::new(), [Vec::new(), Vec::new(), Vec::new()]);
    for _ in 0..rounds {
        let all = [
            measure(broker, load(|_| false), DEFAULT)?,
            measure(broker, load(a_third), DEFAULT)?,
            // Repeated calls take time without a breaker, too.
            measure(broker, load(a_third), OFF)?,
        ];
        let [usual, on, off] = all.each_ref().map(|measured| measured.wall(is_healthy));
        walls.push([on, usual, on / usual, off, off / usual, all[1].openings]);
        for (of_case, measured) in latencies.iter_mut().zip(all) {
            of_case.push(measured.latency());
        }
    }
    let [on, usual, on_ratio, off, off_ratio, openings] = medians(&walls);
    let Load {
        count,
        per_second,
        times: [success, failure],
        ..
    } = load(a_third);
    let written = match per_second {
        AT_ONCE => "at once".to_owned(),
        _ => format!("at {per_second}/s"),
    };
    figures.add(
        format!("{count} records {written}, successes in {success} ms, a third of the keys fails in {failure} ms for 1 to 3 s: healthy records, median of {rounds}"),
        format!("{on:.2} s; {usual:.2} s without failures: {on_ratio:.2} times as long (goal 1.2), {openings} openings; {off:.2} s with the breaker off: {off_ratio:.2} times as long"),
    );
    for (rounds, name) in latencies
        .iter()
        .zip(["without failures", "with failures", "with the breaker off"])
    {
        figures.add(
            format!("latency of healthy records, {name}"),
            Distribution::median(rounds),
        );
    }
    Ok(())
}

fn first_calls_fail(
    broker: &Broker,
    rounds: usize,
    count: usize,
    figures: &mut Figures,
) -> anyhow::Result<()> {
    let load = Load {
        count,
        per_second: AT_ONCE,
        times: USUAL,
        fails: |call| call.since_first.is_zero(),
    };
    let mut walls = Vec::new();
    for _ in 0..rounds {
        let on = measure(broker, load, DEFAULT)?;
        let off = measure(broker, load, OFF)?;
        let [with, without] = [&on, &off].map(|measured| measured.wall(|_| true));
        walls.push([with, without, with - without, on.openings]);
    }
    let [with, without, longer, openings] = medians(&walls);
    figures.add(
        format!("{count} records, each first call fails, median of {rounds}"),
        format!("{with:.2} s; {without:.2} s with the breaker off: {longer:.2} s longer (goal 10 s), {openings} openings"),
    );
    Ok(())
}

fn outage(broker: &Broker, rounds: usize, figures: &mut Figures) -> anyhow::Result<()> {
    const STEP: Duration = Duration::from_millis(250);
    let load = Load {
        // More than the endpoint answers before the outage and in 10 s after it.
        count: 24_000,
        per_second: AT_ONCE,
        times: USUAL,
        fails: in_outage,
    };
    let mut times = Vec::new();
    for _ in 0..rounds {
        let successes = measure(broker, load, DEFAULT)?.calls.successes;
        let per_second = |from: Duration, time: Duration| {
            let counted = successes.iter().filter(|at| (from..from + time).contains(*at));
            counted.count() as f64 / time.as_secs_f64()
        };
        let before = per_second(Duration::from_secs(1), Duration::from_secs(2));
        let first = successes.iter().find(|at| **at >= OUTAGE[1]);
        let mut steps = (0..1_000).map(|step| OUTAGE[1] + STEP * step);
        let full = steps.find(|from| per_second(*from, STEP) >= 0.9 * before);
        let [first, full] = [first.copied(), full.map(|from| from + STEP)]
            .map(|at| at.map_or(f64::INFINITY, |at| (at - OUTAGE[1]).as_secs_f64()));
        times.push([first, full, before]);
    }
    let [first, full, before] = medians(&times);
    figures.add(
        format!("outage of 45 s, median of {rounds}"),
        format!("first success {first:.2} s after its end (goal 5 s), 90% of the rate before it ({before:.0}/s) after {full:.2} s (goal 10 s)"),
    );
    Ok(())
}

/// Writes the records of a new pipeline, and waits until each has one result.
fn measure(broker: &Broker, load: Load, breaker: &str) -> anyhow::Result<Measured> {
    let name = broker.name(&format!("breaker-{:08x}", fastrand::u32(..)));
    let calls = Arc::new(Mutex::new(Calls::default()));
    let server = FakeEndpoint::start({
        let calls = calls.clone();
        move |request| {
            let mut calls = calls.lock().unwrap_or_else(PoisonError::into_inner);
            calls.answer(request, &load)
        }
    });
    // With more retries than these failures need, no record becomes a dead letter.
    let config = format!(
        "instance: {name}
kafka: {{ brokers: '{}', static_membership: false, topics: {{ create: true, partitions: {PARTITIONS} }} }}
pipelines:
  {name}:
    output: {name}-out
    retry: {{ tiers: [1s, 2s, 4s], max_retries: 20 }}
    http: {{ url: '{}', concurrency: {CONCURRENCY} }}
    {breaker}
",
        broker.address,
        server.url()
    );
    let start = |program: &str| Running::start(program, &format!("{name}-{program}"), &config);
    let (enricher, tier) = (start("enricher")?, start("retry-tier")?);
    enricher.wait_until_ready()?;
    tier.wait_until_ready()?;
    let results = Arrivals::at(broker, &format!("{name}-out"))?;
    let filler = broker.filler()?;
    let started = Instant::now();
    for number in 0..load.count {
        let at = started + Duration::from_secs(1) * u32::try_from(number)? / load.per_second;
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
        filler.send(&Output {
            topic: name.as_str().into(),
            partition: None,
            key: Some(format!("key-{number}").into()),
            value: Some(data(number, SystemClock.now()).into()),
            headers: Headers::new(),
        })?;
    }
    filler.flush()?;
    let arrivals = results.all(load.count)?;
    let openings = enricher.metric("redeliver_worker_breaker_openings_total")?;
    enricher.stop()?;
    tier.stop()?;
    let calls = std::mem::take(&mut *calls.lock().unwrap_or_else(PoisonError::into_inner));
    calls.start.context("no call came")?;
    println!(
        "{name}: {} calls of {} records, {openings} openings",
        calls.count, load.count
    );
    Ok(Measured {
        arrivals,
        calls,
        openings,
    })
}
