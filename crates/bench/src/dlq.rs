//! `bench dlq`: an inspector process that indexes dead letters with 12 headers each, its queries over gRPC, and its redrives.

mod redrive;

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use futures::future::try_join_all;
use redeliver_core::headers::{self, Origin};
use redeliver_core::{Clock, Failure, Headers, Output, SystemClock, Timestamp};
use redeliver_proto::v1;
use redeliver_proto::v1::dead_letter_service_client::DeadLetterServiceClient;
use redeliver_proto::v1::watch_dead_letters_response::Event;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

use crate::figures::{Distribution, Figures, per_second, rate};
use crate::kafka::Broker;
use crate::process::Running;

const PARTITIONS: i32 = 4;
const TOPICS: usize = 2;
const VALUE: usize = 200;
/// Enough for ten million dead letters.
const TIMEOUT: Duration = Duration::from_secs(3_600);
const TENANTS: usize = 50;
const CODES: [&str; 4] = ["http.503", "http.404", "http.422", "tcp.refused"];
/// Slow queries that run while fast ones are measured.
const SCANS: usize = 4;
/// Clients that watch large dead letters. Every other one reads nothing.
const WATCHERS: usize = 200;
const LARGE: usize = 20;
/// With headers, nearly the largest record that brokers accept by default.
const LARGE_VALUE: usize = 990_000;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Dead letters
    #[arg(long, default_value_t = 1_000_000)]
    count: usize,
    /// Dead letters of a redrive, at most 100,000
    #[arg(long, default_value_t = 100_000)]
    redriven: usize,
    /// Number of redrives
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Measure only these parts, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Part::ALL)]
    only: Vec<Part>,
    /// Calls of each kind
    #[arg(long, default_value_t = 200)]
    calls: usize,
    /// The inspector to measure, if not the one beside this program
    #[arg(long, default_value = "dlq-inspector")]
    inspector: PathBuf,
}

/// The parts of the benchmark.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Part {
    /// Indexing, memory, disk and queries
    Index,
    /// Jobs without a rate
    Redrive,
}

impl Part {
    const ALL: [Self; 2] = [Self::Index, Self::Redrive];
}

/// Dead letters as a worker writes them, with 12 headers.
struct Letter<'l> {
    topic: &'l str,
    pipeline: &'l str,
    /// The size of the value in bytes.
    value: usize,
}

impl Letter<'_> {
    fn output(&self, index: usize, now: Timestamp) -> anyhow::Result<Output> {
        let mut list = Headers::new();
        list.push_text("tenant", &format!("t{}", index % TENANTS));
        list.push_text(
            "traceparent",
            &format!("00-{:032x}-{:016x}-01", index + 1, index + 1),
        );
        let origin = Origin {
            topic: "documents".into(),
            partition: i32::try_from(index % 8)?,
            offset: i64::try_from(index / 8)?,
            timestamp: Some(now),
        };
        headers::write_lineage(&mut list, self.pipeline, &origin, 3);
        let code = CODES[index / TOPICS % CODES.len()];
        let message = format!("worker-{}: no answer after {} ms", index % 40, index % 5_000);
        let failure = match index / 2 % 3 {
            0 => Failure::transient(code, &message),
            _ => Failure::permanent(code, &message),
        };
        headers::write_failure(&mut list, &failure, now);
        ensure!(list.len() == 12, "{} headers", list.len());
        Ok(Output {
            topic: self.topic.into(),
            partition: None,
            key: Some(format!("key-{index}").into()),
            value: Some(vec![b'x'; self.value].into()),
            headers: list,
        })
    }
}

/// An inspector process.
pub(crate) struct Inspector {
    pub(crate) process: Running,
    pub(crate) listen: SocketAddr,
}

impl Inspector {
    /// Starts a program. `topics`: a pattern of the dead-letter topics. `more`: a part of its configuration.
    pub(crate) fn start(
        broker: &Broker,
        program: &Path,
        data: &Path,
        topics: &str,
        more: &str,
    ) -> anyhow::Result<Self> {
        // The port is free once the listener is dropped. If another process takes it first, the inspector does not start.
        let listen = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        let program = program.to_str().context("the path of the inspector")?;
        let config = format!(
            "instance: {name}
kafka: {{ brokers: '{}', topics: {{ create: true }} }}
dlq_inspector: {{ listen: '{listen}', data_dir: '{}', topics: ['{topics}'] }}
{more}",
            broker.address,
            data.display(),
            name = broker.name("dlq"),
        );
        let process = Running::start(program, &broker.name("dlq"), &config)?;
        Ok(Self { process, listen })
    }

    /// Waits until the inspector is ready. Returns the time and the most memory meanwhile.
    pub(crate) fn until_ready(&self) -> anyhow::Result<(Duration, f64)> {
        let (started, mut most) = (Instant::now(), 0.0_f64);
        while !self.process.is_ready() {
            ensure!(started.elapsed() < TIMEOUT, "the inspector is not ready");
            most = most.max(self.process.rss_mib()?);
            std::thread::park_timeout(Duration::from_millis(50));
        }
        Ok((started.elapsed(), most))
    }

    async fn client(&self) -> anyhow::Result<DeadLetterServiceClient<Channel>> {
        let client = DeadLetterServiceClient::new(self.channel().await?);
        Ok(client.max_decoding_message_size(64 << 20))
    }

    pub(crate) async fn channel(&self) -> anyhow::Result<Channel> {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.listen))?;
        Ok(endpoint.connect().await?)
    }
}

/// A call to measure.
#[derive(Clone)]
enum Call {
    List(String),
    Stats(String),
    Groups {
        filter: &'static str,
        order_by: &'static str,
    },
}

impl Call {
    async fn run(&self, client: &mut DeadLetterServiceClient<Channel>) -> anyhow::Result<()> {
        match self {
            Self::List(filter) => {
                let filter = filter.clone();
                let request = v1::ListDeadLettersRequest {
                    filter,
                    ..v1::ListDeadLettersRequest::default()
                };
                client.list_dead_letters(request).await?;
            }
            Self::Stats(filter) => {
                let request = v1::GetDeadLetterStatsRequest {
                    filter: filter.clone(),
                    ..v1::GetDeadLetterStatsRequest::default()
                };
                client.get_dead_letter_stats(request).await?;
            }
            Self::Groups { filter, order_by } => {
                let request = v1::ListGroupsRequest {
                    filter: (*filter).to_owned(),
                    order_by: (*order_by).to_owned(),
                    ..v1::ListGroupsRequest::default()
                };
                client.list_groups(request).await?;
            }
        }
        Ok(())
    }
}

/// The time of each of several calls, one after the other, in milliseconds.
async fn measure(
    client: &mut DeadLetterServiceClient<Channel>,
    calls: usize,
    call: impl Fn(usize) -> Call,
) -> anyhow::Result<Distribution> {
    // Opens the connections and fills the caches.
    call(0).run(client).await?;
    let mut millis = Vec::new();
    for number in 0..calls {
        let started = Instant::now();
        call(number).run(client).await?;
        millis.push(started.elapsed().as_secs_f64() * 1_000.0);
    }
    Ok(Distribution::of(millis))
}

/// A kind of call, whose values depend on its number.
type Kind = (&'static str, Box<dyn Fn(usize) -> Call>);

fn groups(filter: &'static str, order_by: &'static str) -> Box<dyn Fn(usize) -> Call> {
    Box::new(move |_| Call::Groups { filter, order_by })
}

/// The calls that an index should answer.
fn kinds(topic: &str, count: usize) -> Vec<Kind> {
    let any = move |number: usize| number * 7_919 % count;
    let first = topic.to_owned();
    vec![
        ("newest", Box::new(|_| Call::List(String::new()))),
        (
            "class",
            Box::new(|_| Call::List("error_class = permanent".to_owned())),
        ),
        (
            "code",
            Box::new(|_| Call::List("error_code = http.404".to_owned())),
        ),
        (
            "topic and state",
            Box::new(move |_| Call::List(format!("topic = {first} AND state = OPEN"))),
        ),
        (
            "key",
            Box::new(move |number| Call::List(format!("key = key-{}", any(number)))),
        ),
        (
            "common header",
            Box::new(|number| Call::List(format!("headers.tenant = t{}", number % TENANTS))),
        ),
        (
            "rare header",
            Box::new(move |number| {
                let index = any(number) + 1;
                Call::List(format!(
                    "headers.traceparent = \"00-{index:032x}-{index:016x}-01\""
                ))
            }),
        ),
        (
            "absent header",
            Box::new(|number| Call::List(format!("headers.tenant = none{number}"))),
        ),
        (
            "origin",
            Box::new(move |number| {
                let (partition, offset) = (any(number) % 8, any(number) / 8);
                Call::List(format!(
                    "origin.topic = documents AND origin.partition = {partition} AND origin.offset = {offset}"
                ))
            }),
        ),
        (
            "trace",
            Box::new(move |number| Call::List(format!("trace_id = {:032x}", any(number) + 1))),
        ),
        (
            "rare combination",
            Box::new(move |number| {
                let tenant = any(number) % TENANTS;
                Call::List(format!(
                    "headers.tenant = t{tenant} AND error_code = tcp.refused AND pipeline = bench AND key = key-{}",
                    any(number)
                ))
            }),
        ),
        ("stats", Box::new(|_| Call::Stats(String::new()))),
        (
            "stats of a class",
            Box::new(|_| Call::Stats("error_class = permanent".to_owned())),
        ),
        ("groups", groups("", "")),
        ("groups of a class", groups("error_class = permanent", "")),
        ("largest groups", groups("", "count desc")),
        (
            "message contains words",
            Box::new(|_| Call::List("error_message : \"no answer\"".to_owned())),
        ),
        (
            "message contains none",
            Box::new(|_| Call::List("error_message : \"connection reset\"".to_owned())),
        ),
    ]
}

pub(crate) async fn run(broker: &Broker, options: &Options, figures: &mut Figures) -> anyhow::Result<()> {
    if options.only.contains(&Part::Index) {
        index(broker, options, figures).await?;
    }
    if options.only.contains(&Part::Redrive) {
        redrive::run(broker, options, figures).await?;
    }
    Ok(())
}

/// Writes dead letters of a pipeline to topics in turn.
pub(crate) fn fill(broker: &Broker, topics: &[String], pipeline: &str, count: usize) -> anyhow::Result<()> {
    let filler = broker.filler()?;
    for index in 0..count {
        let letter = Letter {
            topic: &topics[index % topics.len()],
            pipeline,
            value: VALUE,
        };
        filler.send(&letter.output(index, SystemClock.now())?)?;
    }
    filler.flush()
}

async fn index(broker: &Broker, options: &Options, figures: &mut Figures) -> anyhow::Result<()> {
    let count = options.count;
    let topics: Vec<String> = (0..TOPICS)
        .map(|number| broker.name(&format!("dlq-{number}")))
        .collect();
    let large = broker.name("dlq-large");
    let names: Vec<&str> = topics.iter().chain([&large]).map(String::as_str).collect();
    broker.create(&names, PARTITIONS).await?;
    fill(broker, &topics, "bench", count)?;

    let data = std::env::temp_dir()
        .join("redeliver-bench")
        .join(broker.name("dlq-data"));
    let pattern = broker.name("dlq-*");
    let inspector = Inspector::start(broker, &options.inspector, &data, &pattern, "")?;
    let (elapsed, most) = inspector.until_ready()?;
    let cpu = inspector.process.cpu_time().as_secs_f64() * 1e6 / count as f64;
    figures.add(
        "indexing, from the start to ready",
        format!(
            "{}, {cpu:.1} us of processor time each",
            per_second(rate(count, elapsed))
        ),
    );
    figures.add("memory while indexing", format!("{most:.0} MiB"));
    figures.add(
        "disk",
        format!(
            "{:.0} bytes per dead letter",
            directory_size(&data)? as f64 / count as f64
        ),
    );

    let mut client = inspector.client().await?;
    for (name, call) in &kinds(&topics[0], count) {
        figures.add(*name, measure(&mut client, options.calls, call).await?);
    }
    // These read all rows.
    let scans: [Kind; 2] = [
        (
            "message contains a number",
            Box::new(|number| Call::List(format!("error_message : \"after {}\"", 900_000 + number))),
        ),
        (
            "header contains",
            Box::new(|number| Call::List(format!("headers.traceparent : \"none{number}\""))),
        ),
    ];
    for (name, call) in scans {
        figures.add(name, measure(&mut client, options.calls.min(10), call).await?);
    }
    let any = |number: usize| number * 7_919 % count;
    figures.add(
        format!("key, while {SCANS} clients scan"),
        next_to_scans(&inspector, options, any).await?,
    );

    let (most, elapsed) = watched(broker, &inspector, &large).await?;
    figures.add(
        format!(
            "memory with {WATCHERS} watchers of values of {LARGE_VALUE} bytes, half of which read nothing"
        ),
        format!("{most:.0} MiB"),
    );
    figures.add(
        "such values to those that read",
        per_second(rate(LARGE * WATCHERS.div_ceil(2), elapsed)),
    );

    inspector.process.kill()?;
    let again = Inspector::start(broker, &options.inspector, &data, &pattern, "")?;
    figures.add(
        "ready after a crash",
        format!("{:.1} s", again.until_ready()?.0.as_secs_f64()),
    );
    again.process.stop()?;
    broker.delete(&names).await?;
    std::fs::remove_dir_all(&data).context("removing the index")
}

/// Queries that an index answers, while several clients read all rows. Their errors are expected: they wait for each other.
async fn next_to_scans(
    inspector: &Inspector,
    options: &Options,
    any: impl Fn(usize) -> usize,
) -> anyhow::Result<Distribution> {
    let scanners = (0..SCANS).map(|_| inspector.client());
    let scanners = try_join_all(scanners)
        .await?
        .into_iter()
        .map(|mut client| async move {
            let scan = Call::List("headers.traceparent : \"none\"".to_owned());
            while scan.run(&mut client).await.is_ok() {}
            // The others still wait for their turn.
            std::future::pending::<()>().await;
        });
    let mut client = inspector.client().await?;
    let measured = measure(&mut client, options.calls, |number| {
        Call::List(format!("key = key-{}", any(number)))
    });
    tokio::select! {
        measured = measured => measured,
        _ = futures::future::join_all(scanners) => anyhow::bail!("the scans ended"),
    }
}

/// Clients that watch a topic while large dead letters are written to it. Every other one reads nothing. Returns the most memory of the inspector,
/// and the time until the others have received all.
async fn watched(broker: &Broker, inspector: &Inspector, topic: &str) -> anyhow::Result<(f64, Duration)> {
    let watching = (0..WATCHERS).map(|_| async {
        let request = v1::WatchDeadLettersRequest {
            filter: format!("topic = {topic}"),
            view: v1::DeadLetterView::Full.into(),
            only_new: true,
            ..v1::WatchDeadLettersRequest::default()
        };
        let mut client = inspector.client().await?;
        let mut stream = client.watch_dead_letters(request).await?.into_inner();
        // After this event, all dead letters are new.
        while !matches!(next(&mut stream).await?, Event::Synced(_)) {}
        anyhow::Ok(stream)
    });
    let (idle, reading): (Vec<_>, Vec<_>) = try_join_all(watching)
        .await?
        .into_iter()
        .enumerate()
        .partition(|(number, _)| number % 2 == 1);
    let filler = broker.filler()?;
    for number in 0..LARGE {
        filler.send(&Output {
            topic: topic.into(),
            partition: None,
            key: Some(format!("large-{number}").into()),
            value: Some(vec![b'x'; LARGE_VALUE].into()),
            headers: Headers::new(),
        })?;
    }
    filler.flush()?;
    let started = Instant::now();
    let readers = reading.into_iter().map(|(_, mut stream)| async move {
        let mut received = 0;
        while received < LARGE {
            received += usize::from(matches!(next(&mut stream).await?, Event::DeadLetter(_)));
        }
        anyhow::Ok(())
    });
    let mut readers = std::pin::pin!(try_join_all(readers));
    let mut most = 0.0_f64;
    loop {
        most = most.max(inspector.process.rss_mib()?);
        ensure!(started.elapsed() < TIMEOUT, "the watchers have not received all");
        tokio::select! {
            read = &mut readers => {
                read?;
                drop(idle);
                return Ok((most, started.elapsed()));
            }
            () = tokio::time::sleep(Duration::from_millis(20)) => {}
        }
    }
}

async fn next(stream: &mut Streaming<v1::WatchDeadLettersResponse>) -> anyhow::Result<Event> {
    let message = stream.message().await?.context("the watch has ended")?;
    message.event.context("an event")
}

fn directory_size(directory: &Path) -> anyhow::Result<u64> {
    let mut size = 0;
    for entry in std::fs::read_dir(directory)? {
        size += entry?.metadata()?.len();
    }
    Ok(size)
}
