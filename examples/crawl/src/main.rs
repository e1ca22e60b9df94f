//! The crawl example's binary.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use redeliver_core::Span;
use redeliver_example_crawl::crawler::Settings;
use redeliver_example_crawl::fetch::Limits;
use redeliver_example_crawl::report::Report;
use redeliver_example_crawl::site::{Plan, Site};
use redeliver_example_crawl::worker::Crawl;
use redeliver_example_crawl::{demo, hosts, show};
use redeliver_kafka::producer::Producer;
use redeliver_runtime::cli::{CommonArgs, Start, main_with, report};
use redeliver_worker::host::{Host, check_kafka};
use redeliver_worker::topics;
use reqwest::Url;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A crawler made of Redeliver. Without a command it serves a site, crawls it, and says what came of it
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    common: CommonArgs,
    /// Bring a broker in memory and all services along, instead of using those that run
    #[arg(long, conflicts_with_all = ["config", "set"])]
    demo: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Only crawl what is scheduled
    Worker {
        /// A host that may be crawled, without port; may be repeated
        #[arg(long, value_name = "NAME", default_value = "127.0.0.1")]
        within: Vec<String>,
        /// How long a page may take to answer
        #[arg(long, default_value = "5s")]
        timeout: Span,
    },
    /// Only serve the site, on this port and the four that follow
    Site {
        /// The first port
        #[arg(long, default_value_t = 8101)]
        port: u16,
    },
    /// Only schedule these pages
    Seed {
        /// Their addresses
        #[arg(required = true)]
        pages: Vec<Url>,
    },
}

fn main() -> ExitCode {
    let Args {
        common,
        demo,
        command,
    } = Args::parse();
    let service = "crawl";
    match command {
        None if demo => run_demo(),
        None => main_with(service, &common, Vec::new(), check_kafka, run),
        Some(Command::Worker { within, timeout }) => {
            let settings = |crawl: &Crawl| Settings {
                hosts: hosts::Settings::default(),
                limits: Limits {
                    timeout: timeout.duration(),
                    ..Limits::default()
                },
                scheduling: crawl.scheduling.clone(),
                within,
            };
            main_with(service, &common, Vec::new(), check_kafka, |start| {
                work(start, settings)
            })
        }
        Some(Command::Site { port }) => main_with(service, &common, Vec::new(), check_kafka, |start| {
            serve(start, port)
        }),
        Some(Command::Seed { pages }) => main_with(service, &common, Vec::new(), check_kafka, |start| {
            seed(start, pages)
        }),
    }
}

fn run_demo() -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return report(&error),
    };
    match runtime.block_on(demo::run()).and_then(|report| judged(&report)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&*error),
    }
}

async fn run(start: Start) -> anyhow::Result<()> {
    let mut host = Host::new("crawl", start);
    let crawl = Crawl::of(&host.config)?;
    host.ensure_topics(&topics::of_all(&host.config)).await?;
    judged(&show::run(host, crawl).await?)
}

fn judged(report: &Report) -> anyhow::Result<()> {
    println!("\n{report}");
    anyhow::ensure!(report.problems.is_empty(), "the crawl was not as it must be");
    Ok(())
}

async fn work(start: Start, settings: impl FnOnce(&Crawl) -> Settings) -> anyhow::Result<()> {
    let mut host = Host::new("crawl", start);
    let crawl = Crawl::of(&host.config)?;
    host.ensure_topics(&topics::of_all(&host.config)).await?;
    crawl.mount(&mut host, settings(&crawl))?;
    Ok(host.run().await?)
}

async fn serve(start: Start, port: u16) -> anyhow::Result<()> {
    let site = Site::bind(Plan::demonstration(), Some(port))
        .await
        .context("serving the site")?;
    for page in site.map().seeds() {
        println!("The site is up. Its first page is {page}");
    }
    let (map, log) = (site.map().clone(), site.log());
    site.serve(start.shutdown).await?;
    for (host, plan) in map.hosts().iter().enumerate() {
        let asked = log.summary(host);
        let distance = asked.least_distance.unwrap_or_default().as_millis();
        println!(
            "{}: {} requests, at most {} at once, at least {distance} ms apart",
            plan.name, asked.requests, asked.most_at_once
        );
    }
    Ok(())
}

async fn seed(start: Start, pages: Vec<Url>) -> anyhow::Result<()> {
    let host = Host::new("crawl", start);
    let crawl = Crawl::of(&host.config)?;
    let producer = Producer::new(&host.kafka)?;
    for page in &pages {
        let written = producer.send(&crawl.scheduling.seed(page)).await?;
        println!("{page} is requested in {}", written.position);
    }
    producer.flush(Duration::from_secs(10))?;
    Ok(())
}
