//! `bench relay`: the throughput of a tier, the throughput of the whole retry path, and lateness.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rdkafka::consumer::BaseConsumer;
use rdkafka::message::{Headers as _, Message as _};
use redeliver_core::headers;
use redeliver_core::route::{Arrival, RouteContext};
use redeliver_core::{
    Clock, Failure, HumanDuration, Jitter, Outcome, Output, Pipeline, Position, Record, RetryPolicy,
    SystemClock, Timestamp,
};
use redeliver_retry_tier::RetryTierConfig;
use redeliver_service::Host;
use redeliver_worker::{Attempt, BreakerSettings, Grouping, WorkerSpec};
use tokio_util::sync::CancellationToken;

use crate::figures::{Distribution, Figures, cpu_time, median, millis_since, per_second, rate};
use crate::kafka::Broker;
use crate::records::{VALUE, waiting};
use crate::service::Service;
use crate::{bare, lane, transactions};

const PARTITIONS: i32 = 4;
const TIMEOUT: Duration = Duration::from_secs(300);

/// A pipeline with one tier.
fn pipeline(name: &str, tier: HumanDuration) -> Pipeline {
    with_jitter(name, tier, Jitter::None)
}

fn with_jitter(name: &str, tier: HumanDuration, jitter: Jitter) -> Pipeline {
    let policy = RetryPolicy::listed(vec![tier], None, jitter).expect("one tier is a policy");
    Pipeline {
        policy,
        output: Some(format!("{name}-out").into()),
        ..Pipeline::new(name)
    }
}

fn config(broker: &Broker, instance: &str, pipeline: &Pipeline, tier: HumanDuration) -> String {
    format!(
        "instance: {}
kafka: {{ brokers: '{}', static_membership: false }}
pipelines:
  {}: {{ output: '{}', retry: {{ tiers: [{tier}] }} }}
",
        broker.name(instance),
        broker.address,
        pipeline.name,
        pipeline.output.as_deref().unwrap_or_default(),
    )
}

async fn mount_relay(host: &mut Host) -> anyhow::Result<()> {
    redeliver_retry_tier::mount(host, &RetryTierConfig::default()).await
}

/// As [`waiting`], with the due time and the partition that a worker chooses.
fn failed(pipeline: &Pipeline, index: usize) -> anyhow::Result<Output> {
    let now = SystemClock.now();
    let record = Record {
        position: Position {
            topic: pipeline.source.clone(),
            partition: 0,
            offset: i64::try_from(index)?,
        },
        timestamp: Some(now),
        key: Some(format!("key-{index}").into()),
        value: Some(vec![b'x'; VALUE].into()),
        headers: [("tenant", Some(&b"a"[..]))].into_iter().collect(),
        unreadable_headers: 0,
    };
    let context = RouteContext {
        pipeline,
        arrival: &Arrival::new(&record),
        trace: None,
        now,
        random: fastrand::f64(),
        partitions: &|_| u32::try_from(PARTITIONS).ok(),
    };
    let failure = Failure::transient("http.503", "busy");
    let routing = context.route(&record, Outcome::Failed(failure));
    routing.outputs.into_iter().next().context("the record waits")
}

/// The parts of the benchmark.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Part {
    /// A tier in which everything is due
    Throughput,
    /// Worker and tier: each record fails once, waits, and succeeds
    Path,
    /// Time from due time to arrival
    Lateness,
}

impl Part {
    pub(crate) const ALL: [Self; 3] = [Self::Throughput, Self::Path, Self::Lateness];
}

pub(crate) async fn run(
    broker: &Broker,
    count: usize,
    rounds: usize,
    parts: &[Part],
    figures: &mut Figures,
) -> anyhow::Result<()> {
    if parts.contains(&Part::Throughput) {
        throughput(broker, count, rounds, figures).await?;
    }
    if parts.contains(&Part::Path) {
        let mut rates = Vec::new();
        for round in 0..rounds {
            rates.push(path(broker, count / 3, round).await?);
        }
        figures.add(
            format!("whole retry path without the wait, median of {rounds}"),
            format!("{} (goal 60,000/s)", per_second(median(&rates))),
        );
    }
    if parts.contains(&Part::Lateness) {
        let (slow, fast) = (HumanDuration::from_secs(5), HumanDuration::from_secs(2));
        for (per_sec, tier, duration) in [(500, slow, 20), (20_000, fast, 10)] {
            let (mut bares, mut tiers) = (Vec::new(), Vec::new());
            for round in 0..rounds {
                let name = format!("late-{per_sec}-{round}");
                bares
                    .push(bare_lateness(broker, &format!("{name}-bare"), per_sec, duration * per_sec).await?);
                let pipeline = pipeline(&broker.name(&name), tier);
                let write = |index| {
                    let due = SystemClock.now().after(tier.duration());
                    Ok(waiting(&pipeline, tier, index, due))
                };
                let total = duration * per_sec;
                tiers.push(lateness(broker, &name, &pipeline, tier, per_sec, total, write).await?);
            }
            for (name, distributions) in [("bare transactions", bares), ("the tier", tiers)] {
                figures.add(
                    format!("lateness at the consumer, {per_sec}/s, {name}, medians of {rounds}"),
                    Distribution::median(&distributions),
                );
            }
        }
        let (per_sec, tier, duration) = (5_000, HumanDuration::from_secs(30), 20);
        let mut jittered = Vec::new();
        for round in 0..rounds {
            let name = format!("late-jitter-{round}");
            let pipeline = with_jitter(&broker.name(&name), tier, Jitter::Full);
            let write = |index| failed(&pipeline, index);
            let total = duration * per_sec;
            jittered.push(lateness(broker, &name, &pipeline, tier, per_sec, total, write).await?);
        }
        figures.add(
            format!("lateness at the consumer, {per_sec}/s in a tier of {tier} with full jitter, medians of {rounds}"),
            Distribution::median(&jittered),
        );
    }
    Ok(())
}

/// Everything is due: measures the bare loop, a lane that only copies, and the relay, in turn.
async fn throughput(
    broker: &Broker,
    count: usize,
    rounds: usize,
    figures: &mut Figures,
) -> anyhow::Result<()> {
    let tier = HumanDuration::from_secs(1);
    let (mut bares, mut lanes, mut relays) = (Vec::new(), Vec::new(), Vec::new());
    let total = i64::try_from(count)?;
    for round in 0..rounds {
        let pipeline = pipeline(&broker.name(&format!("relay-{round}")), tier);
        broker.create_for(&pipeline, PARTITIONS).await?;
        broker.fill(count, |index| {
            waiting(&pipeline, tier, index, Timestamp::from_millis(0))
        })?;
        let from = pipeline.tier_topic(tier);

        let to = broker.name(&format!("bare-{round}"));
        broker.create(&[&to], PARTITIONS).await?;
        let cpu = cpu_time();
        let elapsed = bare::copy(&broker.address, &to, &from, &to, count, 5000)?;
        bares.push(rate(count, elapsed));
        let bare_cpu = cpu_time() - cpu;
        broker.delete(&[&to]).await?;

        let to = broker.name(&format!("lane-{round}"));
        broker.create(&[&to], PARTITIONS).await?;
        let watch = broker.watch(&to, PARTITIONS)?;
        let cpu = cpu_time();
        let (stop, thread) = lane::start(broker.settings("lane"), &to, &from, &to);
        lanes.push(rate(count, watch.time_until(total, TIMEOUT)?));
        let lane_cpu = cpu_time() - cpu;
        stop.cancel();
        thread.join().map_err(|_| anyhow::anyhow!("the lane panicked"))?;
        broker.delete(&[&to]).await?;

        let watch = broker.watch(&pipeline.due_topic(), PARTITIONS)?;
        let config = config(broker, &format!("relay-{round}"), &pipeline, tier);
        let cpu = cpu_time();
        let service = Service::start(&config, mount_relay).await?;
        relays.push(rate(count, watch.time_until(total, TIMEOUT)?));
        service.stop().await?;
        broker.delete_of(&pipeline).await?;
        let relay_cpu = cpu_time() - cpu;
        let micros = |cpu: Duration| cpu.as_secs_f64() * 1e6 / count as f64;
        println!(
            "round {round}: bare {:.0}/s, lane {:.0}/s, relay {:.0}/s; processor time per record: {:.1}, {:.1}, {:.1} us",
            bares[round],
            lanes[round],
            relays[round],
            micros(bare_cpu),
            micros(lane_cpu),
            micros(relay_cpu)
        );
    }
    let ratio = |a: &[f64]| median(&a.iter().zip(&bares).map(|(a, b)| a / b).collect::<Vec<_>>());
    figures.add(
        "bare transactional loop, batches of 5,000, median",
        per_second(median(&bares)),
    );
    figures.add(
        "lane that copies, median",
        format!("{} ({:.2} of bare)", per_second(median(&lanes)), ratio(&lanes)),
    );
    figures.add(
        "relay with everything due, median",
        format!(
            "{} ({:.2} of bare; goal 0.95)",
            per_second(median(&relays)),
            ratio(&relays)
        ),
    );
    Ok(())
}

/// The whole retry path: the handler fails once, the record waits in a tier, returns, and succeeds.
async fn path(broker: &Broker, count: usize, round: usize) -> anyhow::Result<f64> {
    let tier = HumanDuration::from_secs(1);
    let pipeline = pipeline(&broker.name(&format!("path-{round}")), tier);
    broker.create_for(&pipeline, PARTITIONS).await?;
    let topic = pipeline.source.clone();
    broker.fill(count, |index| Output {
        topic: topic.clone(),
        partition: None,
        key: Some(format!("key-{index}").into()),
        value: Some(vec![b'x'; VALUE].into()),
        headers: [("tenant", Some(&b"a"[..]))].into_iter().collect(),
    })?;
    let output = pipeline.output.clone().context("the pipeline has an output")?;
    let watch = broker.watch(&output, PARTITIONS)?;
    let spec = WorkerSpec {
        pipeline: Arc::new(pipeline.clone()),
        lanes: 1,
        batch: 5000,
        concurrency: 5000,
        repeated_slots: 1,
        in_flight: 20_000,
        in_flight_bytes: 256 << 20,
        grace: Duration::from_secs(10),
        grouping: Grouping::default(),
        breaker: BreakerSettings::default(),
        timeout: None,
        rate_limit: None,
        schema: None,
        on_dead: None,
    };
    // The first calls wait until all lanes have joined their groups, which takes up to two seconds.
    let gate = CancellationToken::new();
    let opened = gate.clone();
    let fails_once = tower::service_fn(move |attempt: Attempt| {
        let opened = opened.clone();
        async move {
            if !opened.is_cancelled() {
                opened.cancelled().await;
            }
            Ok::<_, Infallible>(match attempt.failed_attempts {
                0 => Outcome::Failed(Failure::transient("bench.first", "fails once")),
                _ => Outcome::unchanged(),
            })
        }
    });
    let service = Service::start(
        &config(broker, &format!("path-{round}"), &pipeline, tier),
        async |host| {
            mount_relay(host).await?;
            Ok(redeliver_worker::spawn(host, &spec, fails_once.clone()).await?)
        },
    )
    .await?;
    service.until_ready(TIMEOUT).await?;
    let started = Instant::now();
    gate.cancel();
    watch.time_until(i64::try_from(count)?, TIMEOUT)?;
    let elapsed = started.elapsed();
    service.stop().await?;
    broker.delete_of(&pipeline).await?;
    let net = elapsed.saturating_sub(tier.duration());
    println!(
        "round {round}: whole retry path, {count} records: {} from the first call to the last result; {} without the wait of {tier}",
        per_second(rate(count, elapsed)),
        per_second(rate(count, net))
    );
    Ok(rate(count, net))
}

/// Writes records when they are due, without a tier, and measures their lateness at a read_committed consumer.
async fn bare_lateness(
    broker: &Broker,
    name: &str,
    per_sec: u64,
    total: u64,
) -> anyhow::Result<Distribution> {
    let tier = HumanDuration::from_secs(1);
    let pipeline = pipeline(&broker.name(name), tier);
    let topic = broker.name(name);
    broker.create(&[&topic], PARTITIONS).await?;
    let done = Arc::new(AtomicBool::new(false));
    let reader = std::thread::spawn({
        let (broker, topic, done) = (broker.clone(), topic.clone(), done.clone());
        move || arrivals(&broker, &topic, total, &done)
    });
    let waiting = |index, due| waiting(&pipeline, tier, index, due);
    transactions::release(broker, &topic, per_sec, usize::try_from(total)?, waiting)?;
    let lateness = reader
        .join()
        .map_err(|_| anyhow::anyhow!("the reader panicked"))??;
    broker.delete(&[&topic]).await?;
    let distribution = Distribution::of(lateness);
    println!("{name}: {distribution}");
    Ok(distribution)
}

/// Writes records to a tier at a fixed rate, and measures their lateness at a read_committed consumer.
async fn lateness(
    broker: &Broker,
    name: &str,
    pipeline: &Pipeline,
    tier: HumanDuration,
    per_sec: u64,
    total: u64,
    waiting: impl Fn(usize) -> anyhow::Result<Output>,
) -> anyhow::Result<Distribution> {
    broker.create_for(pipeline, PARTITIONS).await?;
    let service = Service::start(&config(broker, name, pipeline, tier), mount_relay).await?;
    let done = Arc::new(AtomicBool::new(false));
    let reader = std::thread::spawn({
        let (broker, topic, done) = (broker.clone(), pipeline.due_topic(), done.clone());
        move || arrivals(&broker, &topic, total, &done)
    });
    let filler = broker.filler()?;
    let started = Instant::now();
    let mut sent = 0;
    while sent < total {
        let target = u64::try_from(started.elapsed().as_millis())? * per_sec / 1000;
        while sent < target.min(total) {
            filler.send(&waiting(usize::try_from(sent)?)?)?;
            sent += 1;
        }
        std::thread::park_timeout(Duration::from_millis(1));
    }
    filler.flush()?;
    let lateness = reader
        .join()
        .map_err(|_| anyhow::anyhow!("the reader panicked"))??;
    done.store(true, Ordering::SeqCst);
    service.stop().await?;
    broker.delete_of(pipeline).await?;
    let distribution = Distribution::of(lateness);
    println!("{name}: {distribution}");
    Ok(distribution)
}

/// Arrival at a read_committed consumer minus due time, in milliseconds. A negative value would be early.
fn arrivals(broker: &Broker, topic: &str, total: u64, done: &AtomicBool) -> anyhow::Result<Vec<f64>> {
    let consumer: BaseConsumer = broker.tail(topic, PARTITIONS)?;
    let mut lateness = Vec::with_capacity(usize::try_from(total)?);
    let mut seen = 0;
    let mut last = Instant::now();
    while seen < total && !done.load(Ordering::SeqCst) && last.elapsed() < Duration::from_secs(60) {
        let Some(message) = consumer.poll(Duration::from_millis(100)) else {
            continue;
        };
        let message = message?;
        last = Instant::now();
        let list = message.headers().context("headers")?;
        let due = list
            .iter()
            .find(|header| header.key == headers::PROCESS_AFTER)
            .and_then(|header| header.value);
        let due: Timestamp = std::str::from_utf8(due.context("due time")?)?
            .parse()
            .context("due time")?;
        seen += 1;
        lateness.push(millis_since(due));
    }
    anyhow::ensure!(seen == total, "{seen} of {total} arrived");
    Ok(lateness)
}
