//! `bench console`: pages of a console for many viewers, with an inspector that has indexed many dead letters and a scheduler, next to a static page.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use axum::Router;
use axum::response::Html;
use axum::routing::get;
use futures::future::try_join_all;
use redeliver_core::{Clock as _, SystemClock};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep_until};

use crate::dlq::{self, Inspector};
use crate::figures::{Distribution, Figures};
use crate::kafka::Broker;
use crate::process::Running;
use crate::redis::Redis;
use crate::scheduler::env::{self, SchedulerEnv};

const PARTITIONS: i32 = 4;
const PIPELINES: usize = 20;
/// The time after which a page that stays live is read again.
const LIVE_INTERVAL: Duration = Duration::from_secs(2);

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Dead letters
    #[arg(long, default_value_t = 1_000_000)]
    count: usize,
    /// Viewers of pages that stay live
    #[arg(long, default_value_t = 500)]
    viewers: u32,
    /// Other pages per second, a tenth of them with a filter
    #[arg(long, default_value_t = 50)]
    pages: u32,
    /// Seconds of load
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Waiting jobs of the next hour
    #[arg(long, default_value_t = 10_000)]
    jobs: usize,
    /// URL of the Redis to use; all its data is deleted
    #[arg(long, env = "REDIS_URL")]
    redis: String,
}

/// Of the inspector.
const SURVEYS: &str = "redeliver_dlq_overview_surveys_total";

/// The time after which such a page asks whether the inspector answers.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// The kinds of requests.
const KINDS: [&str; 4] = [
    "live pages",
    "pages",
    "pages with a filter",
    "questions of live pages",
];

/// The times of each kind of request, in milliseconds.
type Times = [Vec<f64>; KINDS.len()];

/// Requests at their times, however long others take, so that slow ones cannot reduce the load.
struct Load<'a> {
    options: &'a Options,
    /// The paths of each kind.
    paths: [Vec<String>; KINDS.len()],
    client: reqwest::Client,
}

impl Load<'_> {
    /// When a request begins, and its kind.
    fn plan(&self) -> Vec<(Duration, usize)> {
        let Options {
            viewers,
            pages,
            seconds,
            ..
        } = *self.options;
        let every = |interval: Duration, kind_of: fn(u32) -> usize| {
            let count = (Duration::from_secs(seconds.into()).as_secs_f64() / interval.as_secs_f64()) as u32;
            (0..count).map(move |number| (interval * number, kind_of(number)))
        };
        let live = every(LIVE_INTERVAL / viewers, |_| 0);
        let others = every(Duration::from_secs(1) / pages, |number| {
            if number % 10 == 0 { 2 } else { 1 }
        });
        let heartbeats = every(HEARTBEAT / viewers, |_| 3);
        live.chain(others).chain(heartbeats).collect()
    }

    async fn run(&self, address: SocketAddr) -> anyhow::Result<Times> {
        let start = Instant::now();
        let plan = self.plan().into_iter().enumerate();
        let requests = plan.map(|(number, (after, kind))| {
            let path = &self.paths[kind][number % self.paths[kind].len()];
            let request = self.client.get(format!("http://{address}{path}"));
            let at = start + after;
            async move {
                sleep_until(at).await;
                let response = request.send().await?.error_for_status()?;
                response.bytes().await?;
                anyhow::Ok((kind, at.elapsed().as_secs_f64() * 1_000.0))
            }
        });
        let mut times = Times::default();
        for (kind, millis) in try_join_all(requests).await? {
            times[kind].push(millis);
        }
        Ok(times)
    }
}

pub(crate) async fn run(broker: &Broker, options: &Options, figures: &mut Figures) -> anyhow::Result<()> {
    ensure!(
        options.viewers > 0 && options.pages > 0 && options.seconds > 0,
        "there must be viewers, pages and seconds"
    );
    let pipelines: Vec<String> = (0..PIPELINES)
        .map(|number| broker.name(&format!("pipe-{number}")))
        .collect();
    let letters: Vec<String> = pipelines
        .iter()
        .map(|pipeline| format!("{pipeline}-dlq"))
        .collect();
    let names: Vec<&str> = letters.iter().map(String::as_str).collect();
    broker.create(&names, PARTITIONS).await?;
    dlq::fill(broker, &letters, &pipelines[0], options.count)?;

    let data = std::env::temp_dir()
        .join("redeliver-bench")
        .join(broker.name("console-data"));
    let sections = pipelines
        .iter()
        .map(|pipeline| format!("  {pipeline}: {{ output: '{pipeline}-out' }}\n"));
    let sections = format!("pipelines:\n{}", sections.collect::<String>());
    let inspector = Inspector::start(
        broker,
        "dlq-inspector".as_ref(),
        &data,
        &broker.name("*-dlq"),
        &sections,
    )?;
    inspector.until_ready()?;

    // The ports are free once the listeners are dropped. If another process takes one first, the service does not start.
    let free = || std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr();
    let (listen, scheduler_listen) = (free()?, free()?);
    let mut redis = Redis::connect(&options.redis)?;
    let scheduler = SchedulerEnv::build(broker, &mut redis, "console-jobs")
        .await?
        .listening_at(scheduler_listen);
    let scheduling = scheduler.start_and_wait("a")?;
    let now = SystemClock.now();
    let hour = Duration::from_secs(3_600).as_secs_f64();
    scheduler.schedule(options.jobs, |number| {
        let share = number as f64 / options.jobs as f64;
        now.after(Duration::from_secs_f64(hour * share))
    })?;
    env::wait_accepted(&scheduling, options.jobs)?;
    env::wait_indexed(&scheduling)?;
    let config = format!(
        "console: {{ listen: '{listen}', inspector: {{ url: 'http://{}' }}, scheduler: {{ url: 'http://{scheduler_listen}' }} }}\n",
        inspector.listen
    );
    let console = Running::start("console", &broker.name("console"), &config)?;
    console.wait_until_ready()?;

    let client = reqwest::Client::builder().no_proxy().build()?;
    let page = client
        .get(format!("http://{listen}/"))
        .send()
        .await?
        .error_for_status()?;
    let page: &'static str = page.text().await?.leak();
    let open = |filter: &str| format!("/letters?filter=state%20%3D%20OPEN%20AND%20{filter}");
    let pipeline = format!("/pipelines/{}", pipelines[0]);
    let mut load = Load {
        options,
        paths: [
            vec!["/".to_owned(), "/groups".to_owned(), pipeline.clone()],
            vec![
                "/".to_owned(),
                "/groups".to_owned(),
                "/letters".to_owned(),
                "/redrives".to_owned(),
                "/audit".to_owned(),
                "/due".to_owned(),
                "/jobs".to_owned(),
                "/schedules".to_owned(),
                format!("/letters/{}/0/0", letters[0]),
                pipeline,
            ],
            vec![
                open("error_code%20%3D%20http.404"),
                open("headers.tenant%20%3D%20t7"),
                open("key%20%3D%20key-4711"),
            ],
            vec!["/silent".to_owned()],
        ],
        client,
    };
    let before = (console.cpu_time(), inspector.process.cpu_time());
    let surveyed = inspector.process.metric(SURVEYS)?;
    let started = Instant::now();
    let times = load.run(listen).await?;
    let elapsed = started.elapsed();
    let surveyed = inspector.process.metric(SURVEYS)? - surveyed;
    let requests = load.plan().len() as f64;
    for (kind, millis) in KINDS.iter().zip(times) {
        figures.add(format!("{kind} (goal p99 100 ms)"), Distribution::of(millis));
    }
    figures.add(
        "surveys of Kafka for all viewers (goal 1/s)",
        format!("{surveyed:.0} in {:.0} s", elapsed.as_secs_f64()),
    );
    let each = |now: Duration, before: Duration| (now - before).as_secs_f64() * 1_000.0 / requests;
    figures.add(
        "processor time of a request, console and inspector",
        format!(
            "{:.1} and {:.1} ms",
            each(console.cpu_time(), before.0),
            each(inspector.process.cpu_time(), before.1)
        ),
    );
    figures.add(
        "most memory of the console (goal 128 MiB), and of the inspector since its start",
        format!(
            "{:.0} and {:.0} MiB",
            console.peak_rss_mib()?,
            inspector.process.peak_rss_mib()?
        ),
    );

    let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = server.local_addr()?;
    let router = Router::new().route("/", get(move || async move { Html(page) }));
    load.paths = std::array::from_fn(|_| vec!["/".to_owned()]);
    let millis = tokio::select! {
        times = load.run(address) => times?.concat(),
        ended = axum::serve(server, router) => bail!("the server has ended: {ended:?}"),
    };
    figures.add(
        format!("a static page of {} bytes", page.len()),
        Distribution::of(millis),
    );

    console.stop()?;
    scheduling.stop()?;
    scheduler.tear_down().await?;
    inspector.process.stop()?;
    broker.delete(&names).await?;
    std::fs::remove_dir_all(&data).context("removing the index")
}
