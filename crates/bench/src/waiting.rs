//! `bench waiting`: scans of the records that wait in two tiers, by an inspector process over gRPC, and actions on them.

mod actions;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use redeliver_core::{Clock, HumanDuration, Jitter, Pipeline, RetryPolicy, SystemClock};
use redeliver_proto::v1;
use redeliver_proto::v1::waiting_service_client::WaitingServiceClient;
use tonic::transport::Channel;

use crate::dlq::Inspector;
use crate::figures::{Figures, median, per_second, rate};
use crate::kafka::Broker;
use crate::records::waiting;

const PARTITIONS: i32 = 4;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Waiting records
    #[arg(long, default_value_t = 1_000_000)]
    count: usize,
    /// Scans of each kind
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Records that are moved to the dead letters, by their positions and again by a filter; 0: none
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    actions: u32,
    /// The inspector to measure, if not the one beside this program
    #[arg(long, default_value = "dlq-inspector")]
    inspector: PathBuf,
}

pub(crate) async fn run(broker: &Broker, options: &Options, figures: &mut Figures) -> anyhow::Result<()> {
    let tiers = [3_600, 7_200].map(HumanDuration::from_secs);
    let name = broker.name("waiting");
    let pipeline = Pipeline {
        policy: RetryPolicy::listed(tiers.to_vec(), None, Jitter::None)?,
        output: Some(format!("{name}-out").into()),
        ..Pipeline::new(&name)
    };
    broker.create_for(&pipeline, PARTITIONS).await?;
    let now = SystemClock.now();
    broker.fill(options.count, |index| {
        let tier = tiers[index % 2];
        waiting(&pipeline, tier, index, now.after(tier.duration()))
    })?;

    let data = std::env::temp_dir().join("redeliver-bench").join(&name);
    let [first, second] = tiers;
    let config = format!(
        "pipelines: {{ {name}: {{ output: '{name}-out', retry: {{ tiers: [{first}, {second}] }} }} }}\n"
    );
    let inspector = Inspector::start(broker, &options.inspector, &data, &broker.name("dlq-*"), &config)?;
    inspector.until_ready()?;
    let before = inspector.process.rss_mib()?;
    let client = WaitingServiceClient::new(inspector.channel().await?);

    for (kind, limit) in [("stats", None), ("list of 1000", Some(1_000))] {
        let mut rates = Vec::new();
        for _ in 0..options.rounds {
            let started = Instant::now();
            let counted = scan(&mut client.clone(), limit).await?;
            ensure!(
                counted == options.count as u64,
                "{kind}: {counted} of {} records",
                options.count
            );
            rates.push(rate(options.count, started.elapsed()));
        }
        figures.add(
            format!("{kind} of {} waiting records", options.count),
            per_second(median(&rates)),
        );
    }
    figures.add(
        "memory, before and after the scans",
        format!("{before:.0} MiB, {:.0} MiB", inspector.process.rss_mib()?),
    );
    if options.actions > 0 {
        let waiting = (&pipeline, first, options.count / 2);
        actions::run(broker, waiting, options.actions, &mut client.clone(), figures).await?;
    }
    inspector.process.stop()?;
    broker.delete_of(&pipeline).await?;
    std::fs::remove_dir_all(&data).context("removing the index")
}

/// Scans once, and returns how many records it has found.
async fn scan(client: &mut WaitingServiceClient<Channel>, limit: Option<i32>) -> anyhow::Result<u64> {
    /// A scan that reports nothing for this long has failed.
    const SILENCE: Duration = Duration::from_secs(60);
    match limit {
        None => {
            use v1::get_waiting_stats_response::Event;
            let request = v1::GetWaitingStatsRequest::default();
            let mut stream = client.get_waiting_stats(request).await?.into_inner();
            while let Some(message) = tokio::time::timeout(SILENCE, stream.message()).await?? {
                if let Some(Event::Stats(stats)) = message.event {
                    return Ok(stats.total.context("the total")?.records);
                }
            }
        }
        Some(limit) => {
            use v1::list_waiting_response::Event;
            let request = v1::ListWaitingRequest {
                limit,
                ..v1::ListWaitingRequest::default()
            };
            let mut stream = client.list_waiting(request).await?.into_inner();
            while let Some(message) = tokio::time::timeout(SILENCE, stream.message()).await?? {
                if let Some(Event::Records(list)) = message.event {
                    ensure!(list.records.len() == 1_000, "{} records", list.records.len());
                    return Ok(list.matching);
                }
            }
        }
    }
    anyhow::bail!("the scan has ended without an answer")
}
