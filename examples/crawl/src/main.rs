//! A web crawler: jobs from the scheduler, a worker that is polite to each host, and retries by the retry tier.

mod crawler;
mod demo;
mod fetch;
mod hosts;
mod page;
mod robots;
mod site;
mod worker;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use redeliver_runtime::cli::{CommonArgs, Start, main_with, report};
use redeliver_service::{Host, host::check_kafka, topics};
use reqwest::Url;

use crate::worker::Crawl;

const TIMEOUT: Duration = Duration::from_secs(5);

/// A web crawler built with Redeliver
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    common: CommonArgs,
    /// Run the demonstration: an embedded broker, the services and a site to crawl in one process
    #[arg(long, conflicts_with_all = ["config", "set", "pages"])]
    demo: bool,
    /// A host that may be crawled, without port; may be repeated
    #[arg(long, value_name = "NAME", default_value = "127.0.0.1")]
    within: Vec<String>,
    /// Pages to start from
    #[arg(value_name = "URL")]
    pages: Vec<Url>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.demo {
        return match demo::prepare() {
            Ok((_broker, common)) => main_with("crawl-demo", &common, Vec::new(), check_kafka, demo::run),
            Err(error) => report(&*error),
        };
    }
    let run = |start| run(start, args.within, args.pages);
    main_with("crawl", &args.common, Vec::new(), check_kafka, run)
}

async fn run(start: Start, within: Vec<String>, pages: Vec<Url>) -> anyhow::Result<()> {
    let mut host = Host::new("crawl", start);
    let crawl = Crawl::from_config(&host.config)?;
    host.ensure_topics(&topics::of_all(&host.config)).await?;
    crawl.mount(&mut host, within, TIMEOUT)?;
    crawl.schedule(&host.kafka, &pages).await?;
    Ok(host.run().await?)
}
