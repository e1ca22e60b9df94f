//! `bench worker`: wall time of a worker with transactional output, compared to the lower bound `work / concurrency`, and
//! over HTTP also to a bare client that makes the same calls of the same endpoint. In process also with the order of keys. With calls
//! for several records, the rate compared to that of calls for one.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use axum::Router;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::routing::post;
use redeliver_core::{Headers, HumanDuration, Outcome, Output, Pipeline, SystemClock};
use redeliver_enricher::http::{HttpHandler, HttpSettings};
use redeliver_runtime::config::{BatchConfig, BatchValues};
use redeliver_worker::{Attempt, BreakerSettings, Grouping, Handler, WorkerSpec};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::task::JoinSet;

use crate::figures::{Figures, median};
use crate::kafka::Broker;
use crate::service::Service;

const PARTITIONS: i32 = 4;
const KEYS: usize = 10_000;

/// A workload: the duration of calls, and how many run concurrently.
struct Workload {
    name: &'static str,
    concurrency: usize,
    count: usize,
    work: fn(usize) -> Duration,
}

const WORKLOADS: [Workload; 2] = [
    Workload {
        name: "0-5 ms, 16 at once",
        concurrency: 16,
        count: 30_000,
        work: |i| Duration::from_micros((i as u64 * 7919) % 5001),
    },
    Workload {
        name: "50 ms, 500 at once",
        concurrency: 500,
        count: 50_000,
        work: |_| Duration::from_millis(50),
    },
];

/// The wall time of one measurement, from the first call to the last result, and its lower bound.
#[derive(Clone, Copy)]
struct Measured {
    wall: Duration,
    bound: Duration,
}

/// The measurements of one workload, one of each kind per round.
#[derive(Default)]
struct Rounds {
    in_process: Vec<Measured>,
    key_order: Vec<Measured>,
    bare_client: Vec<Measured>,
    http: Vec<Measured>,
}

pub(crate) async fn run(broker: &Broker, rounds: usize, figures: &mut Figures) -> anyhow::Result<()> {
    let endpoint = endpoint().await?;
    for (index, workload) in WORKLOADS.iter().enumerate() {
        let url = format!("http://{endpoint}/{index}");
        let mut measured = Rounds::default();
        for round in 0..rounds {
            let work = workload.work;
            let in_process = tower::service_fn(move |attempt: Attempt| async move {
                let value = attempt.record.value.as_deref().unwrap_or_default();
                perform(work(number(value))).await;
                Ok::<_, Infallible>(Outcome::unchanged())
            });
            let name = |kind: &str| format!("worker-{index}-{kind}-{round}");
            let as_it_is = |_: &mut WorkerSpec| {};
            let result = measure(broker, workload, &name("in-process"), in_process, as_it_is).await?;
            measured.in_process.push(result);
            let by_key = |spec: &mut WorkerSpec| spec.grouping.ordering = redeliver_worker::Ordering::Key;
            let result = measure(broker, workload, &name("key-order"), in_process, by_key).await?;
            measured.key_order.push(result);
            measured.bare_client.push(bare_client(workload, &url).await?);
            let http = HttpHandler::new(HttpSettings::new(&url), Arc::new(SystemClock))?;
            let result = measure(broker, workload, &name("http"), http, as_it_is).await?;
            measured.http.push(result);
        }
        measured.report(workload.name, figures);
    }
    batches(broker, &endpoint.to_string(), rounds, figures).await
}

/// Calls that take 5 ms, for one record and for up to 100.
async fn batches(
    broker: &Broker,
    endpoint: &str,
    rounds: usize,
    figures: &mut Figures,
) -> anyhow::Result<()> {
    const RECORDS: u32 = 100;
    let of_calls = |count| Workload {
        name: "5 ms, 16 at once",
        concurrency: 16,
        count,
        work: |_| CALL_FOR_SEVERAL,
    };
    let (one, several) = (of_calls(20_000), of_calls(400_000));
    let (mut singly, mut together, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        let http = |path: &str, batch| {
            let settings = HttpSettings {
                batch,
                ..HttpSettings::new(format!("http://{endpoint}/{path}"))
            };
            HttpHandler::new(settings, Arc::new(SystemClock))
        };
        let name = format!("worker-single-{round}");
        let measured = measure(broker, &one, &name, http("single", None)?, |_| {}).await?;
        singly.push(one.count as f64 / measured.wall.as_secs_f64());
        let batch = BatchConfig {
            records: RECORDS,
            bytes: 1_000_000,
            wait: HumanDuration::from_millis(5),
            values: BatchValues::Json,
        };
        let name = format!("worker-batch-{round}");
        let handler = http("batch", Some(batch))?;
        let measured = measure(broker, &several, &name, handler, |spec| {
            spec.concurrency *= RECORDS as usize;
            spec.repeated_slots = RECORDS as usize;
        });
        together.push(several.count as f64 / measured.await?.wall.as_secs_f64());
        ratios.push(together[round] / singly[round]);
    }
    figures.add(
        format!("{}, HTTP, batches of {RECORDS}, median of {rounds}", one.name),
        format!(
            "{:.0} records/s; {:.0}/s with a call for each: {:.1} times as many",
            median(&together),
            median(&singly),
            median(&ratios),
        ),
    );
    Ok(())
}

impl Rounds {
    fn report(&self, workload: &str, figures: &mut Figures) {
        let mut add = |kind: &str, measured: &[Measured], note: String| {
            let of = |value: fn(&Measured) -> f64| median(&measured.iter().map(value).collect::<Vec<_>>());
            figures.add(
                format!("{workload}, {kind}, median of {}", measured.len()),
                format!(
                    "wall {:.2} s, bound {:.2} s: {:.3}{note}",
                    of(|one| one.wall.as_secs_f64()),
                    of(|one| one.bound.as_secs_f64()),
                    of(|one| one.wall.as_secs_f64() / one.bound.as_secs_f64()),
                ),
            );
        };
        add("in process", &self.in_process, " (goal 1.05)".to_owned());
        let pairs = self.key_order.iter().zip(&self.in_process);
        let ratios: Vec<f64> = pairs
            .map(|(ordered, not)| ordered.wall.as_secs_f64() / not.wall.as_secs_f64())
            .collect();
        let note = format!("; {:.3} of that without an order", median(&ratios));
        add(
            &format!("in process, order of {KEYS} keys"),
            &self.key_order,
            note,
        );
        add("bare HTTP client", &self.bare_client, String::new());
        let ratios = self.http.iter().zip(&self.bare_client);
        let ratios: Vec<f64> = ratios
            .map(|(worker, bare)| worker.wall.as_secs_f64() / bare.wall.as_secs_f64())
            .collect();
        let note = format!("; {:.3} of the bare client (goal 1.05)", median(&ratios));
        add("HTTP", &self.http, note);
    }
}

/// Makes the calls of a workload with the HTTP client alone.
async fn bare_client(workload: &Workload, url: &str) -> anyhow::Result<Measured> {
    let client = reqwest::Client::builder().http1_only().no_proxy().build()?;
    let next = Arc::new(AtomicUsize::new(0));
    let count = workload.count;
    WORK_NANOS.store(0, Ordering::Relaxed);
    let started = Instant::now();
    let mut callers = JoinSet::new();
    for _ in 0..workload.concurrency {
        let (client, next, url) = (client.clone(), next.clone(), url.to_owned());
        callers.spawn(async move {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= count {
                    return anyhow::Ok(());
                }
                let response = client.post(&url).body(index.to_string()).send().await?;
                response.error_for_status()?.bytes().await?;
            }
        });
    }
    while let Some(ended) = callers.join_next().await {
        ended??;
    }
    Ok(Measured {
        wall: started.elapsed(),
        bound: bound(workload)?,
    })
}

/// The duration of all calls, divided by the concurrency.
fn bound(workload: &Workload) -> anyhow::Result<Duration> {
    Ok(Duration::from_nanos(WORK_NANOS.load(Ordering::Relaxed)) / u32::try_from(workload.concurrency)?)
}

fn number(value: &[u8]) -> usize {
    std::str::from_utf8(value)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(0)
}

/// The total duration of calls in nanoseconds, measured because timers fire late. That delay is not the worker's.
static WORK_NANOS: AtomicU64 = AtomicU64::new(0);

async fn perform(work: Duration) {
    let started = Instant::now();
    tokio::time::sleep(work).await;
    WORK_NANOS.fetch_add(
        u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX),
        Ordering::Relaxed,
    );
}

/// The duration of a call for several records.
const CALL_FOR_SEVERAL: Duration = Duration::from_millis(5);

#[derive(Deserialize)]
struct Batch<'a> {
    #[serde(borrow)]
    records: Vec<BatchRecord<'a>>,
}

#[derive(Deserialize, Serialize)]
struct BatchRecord<'a> {
    id: &'a str,
    #[serde(borrow)]
    value: &'a RawValue,
}

#[derive(Serialize)]
struct BatchResults<'a> {
    results: Vec<BatchRecord<'a>>,
}

/// Returns the records as results.
async fn call_for_several(body: Bytes) -> Result<Vec<u8>, StatusCode> {
    perform(CALL_FOR_SEVERAL).await;
    let batch: Batch<'_> = serde_json::from_slice(&body).map_err(|_| StatusCode::BAD_REQUEST)?;
    let results = BatchResults {
        results: batch.records,
    };
    serde_json::to_vec(&results).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
}

async fn endpoint() -> anyhow::Result<SocketAddr> {
    let handler = |index: usize| {
        post(move |body: Bytes| async move {
            perform((WORKLOADS[index].work)(number(&body))).await;
            body
        })
    };
    let single = |body: Bytes| async move {
        perform(CALL_FOR_SEVERAL).await;
        body
    };
    let app = Router::new()
        .route("/0", handler(0))
        .route("/1", handler(1))
        .route("/single", post(single))
        .route("/batch", post(call_for_several));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    #[expect(clippy::disallowed_methods, reason = "ends with the process")]
    tokio::spawn(async move { axum::serve(listener, app).await });
    Ok(address)
}

async fn measure<H: Handler>(
    broker: &Broker,
    workload: &Workload,
    name: &str,
    handler: H,
    change: impl FnOnce(&mut WorkerSpec),
) -> anyhow::Result<Measured> {
    let name = broker.name(name);
    let pipeline = Pipeline {
        output: Some(format!("{name}-out").into()),
        ..Pipeline::new(&name)
    };
    broker.create_for(&pipeline, PARTITIONS).await?;
    let topic = pipeline.source.clone();
    broker.fill(workload.count, |index| Output {
        topic: topic.clone(),
        partition: None,
        key: Some(format!("key-{}", index % KEYS).into()),
        value: Some(index.to_string().into()),
        headers: Headers::new(),
    })?;
    let output = pipeline.output.clone().context("the pipeline has an output")?;
    let mut spec = WorkerSpec {
        pipeline: Arc::new(pipeline.clone()),
        lanes: 1,
        batch: 5000,
        concurrency: workload.concurrency,
        repeated_slots: 1,
        in_flight: 4096,
        in_flight_bytes: 256 << 20,
        grace: Duration::from_secs(10),
        grouping: Grouping::default(),
        breaker: BreakerSettings::default(),
        timeout: None,
        rate_limit: None,
        schema: None,
        on_dead: None,
    };
    change(&mut spec);
    let config = format!(
        "instance: {name}\nkafka: {{ brokers: '{}', static_membership: false }}",
        broker.address
    );
    WORK_NANOS.store(0, Ordering::Relaxed);
    let first_call = Arc::new(OnceLock::new());
    let handler = Timed {
        inner: handler,
        first_call: first_call.clone(),
    };
    let reader = std::thread::spawn({
        let (broker, count) = (broker.clone(), workload.count);
        move || read_results(&broker, &output, count)
    });
    let service = Service::start(&config, async |host| {
        Ok(redeliver_worker::spawn(host, &spec, handler).await?)
    })
    .await?;
    let (last, results) = reader
        .join()
        .map_err(|_| anyhow::anyhow!("the reader panicked"))??;
    service.stop().await?;
    broker.delete_of(&pipeline).await?;
    let measured = Measured {
        wall: last - *first_call.get().context("no call was made")?,
        bound: bound(workload)?,
    };
    anyhow::ensure!(
        results == workload.count,
        "{results} results of {}",
        workload.count
    );
    Ok(measured)
}

/// Reads all results, and returns when the last one arrived and how many there were. Continues to read for 500 ms, so that
/// duplicates are noticed.
fn read_results(broker: &Broker, topic: &str, count: usize) -> anyhow::Result<(Instant, usize)> {
    let consumer = broker.tail(topic, PARTITIONS)?;
    let mut seen = 0;
    let mut last = Instant::now();
    while seen < count || last.elapsed() < Duration::from_millis(500) {
        anyhow::ensure!(
            last.elapsed() < Duration::from_secs(60),
            "{seen} of {count} results"
        );
        if let Some(message) = consumer.poll(Duration::from_millis(50)) {
            message?;
            seen += 1;
            last = Instant::now();
        }
    }
    Ok((last, seen))
}

/// Records the time of the first call.
#[derive(Clone)]
struct Timed<H> {
    inner: H,
    first_call: Arc<OnceLock<Instant>>,
}

impl<H: Handler> tower::Service<Attempt> for Timed<H> {
    type Response = Outcome;
    type Error = H::Error;
    type Future = H::Future;

    fn poll_ready(&mut self, context: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), H::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, attempt: Attempt) -> H::Future {
        self.first_call.get_or_init(Instant::now);
        self.inner.call(attempt)
    }
}
