//! A web crawler: jobs from the scheduler, a worker that is polite to each site, and retries by the retry tier.

mod crawler;
mod demo;
mod demo_sites;
mod fetch;
mod page;
mod robots;
mod sites;
mod worker;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser};
use redeliver_runtime::ProgramConfig;
use redeliver_runtime::cli::{CommonArgs, Start};
use redeliver_service::{Host, main_with, topics};
use redeliver_worker::Sections;
use reqwest::Url;

use crate::worker::Crawl;

/// A web crawler built with Redeliver
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    common: CommonArgs,
    /// Run the demonstration: an embedded broker, the services and sites to crawl in one process
    #[arg(long, exclusive = true)]
    demo: bool,
    /// A host name that may be crawled, on any port; may be repeated
    #[arg(long, value_name = "NAME", default_value = "127.0.0.1")]
    within: Vec<String>,
    /// Pages to start from
    #[arg(value_name = "URL", value_parser = page::parse)]
    pages: Vec<Url>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.demo {
        return demo::main();
    }
    let mut pages = args.pages.iter();
    if let Some(page) = pages.find(|page| !page::is_within(page, &args.within)) {
        let message = format!("{page} is outside of --within {}", args.within.join(", "));
        Args::command().error(ErrorKind::ValueValidation, message).exit();
    }
    let common = args.common.clone();
    let check = |config: &ProgramConfig<Sections>| Crawl::from_config(config, &config.own).map(drop);
    main_with("crawl", &common, check, |start, own| run(start, own, args))
}

async fn run(start: Start, own: Sections, args: Args) -> anyhow::Result<()> {
    let mut host = Host::new("crawl", start);
    let crawl = Crawl::from_config(&host.config, &own)?;
    host.ensure_topics(&topics::of_all(&host.config)).await?;
    crawl.mount(&mut host, args.within, fetch::client()?).await?;
    crawl.schedule(&host, &args.pages).await?;
    Ok(host.run().await?)
}
