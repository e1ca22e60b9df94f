//! Jobs that redrive dead letters as fast as they can, next to a loop that only copies the same dead letters.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use redeliver_core::{Clock, HumanDuration, Pipeline, SystemClock};
use redeliver_proto::convert::to_duration;
use redeliver_proto::v1;
use redeliver_proto::v1::redrive_service_client::RedriveServiceClient;
use tonic::transport::Channel;

use super::{Inspector, Letter, Options, PARTITIONS, TIMEOUT};
use crate::bare;
use crate::figures::{Figures, median, per_second, rate};
use crate::kafka::Broker;

/// With its headers, a dead letter has about 1 KB.
const VALUE: usize = 600;
/// The records in a transaction of the loop.
const BATCH: usize = 5_000;

pub(super) async fn run(broker: &Broker, options: &Options, figures: &mut Figures) -> anyhow::Result<()> {
    let count = options.redriven;
    let name = |round: usize| broker.name(&format!("redrive-{round}"));
    let pipelines: Vec<Pipeline> = (0..options.rounds)
        .map(|round| Pipeline::new(&name(round)))
        .collect();
    let mut config = "pipelines:\n".to_owned();
    for pipeline in &pipelines {
        broker.create_for(pipeline, PARTITIONS).await?;
        config += &format!("  {}: {{ output: '{0}-out' }}\n", pipeline.name);
        let now = SystemClock.now();
        let topic = pipeline.dead_letter_topic();
        let filler = broker.filler()?;
        for index in 0..count {
            let letter = Letter {
                topic: &topic,
                pipeline: &pipeline.name,
                value: VALUE,
            };
            filler.send(&letter.output(index, now)?)?;
        }
        filler.flush()?;
    }
    let data = std::env::temp_dir()
        .join("redeliver-bench")
        .join(broker.name("redrive-data"));
    let topics = broker.name("redrive-*-dlq");
    let inspector = Inspector::start(broker, &options.inspector, &data, &topics, &config)?;
    inspector.until_ready()?;
    let mut client = RedriveServiceClient::new(inspector.channel().await?);

    let (mut copies, mut jobs, mut times) = (Vec::new(), Vec::new(), Vec::new());
    for pipeline in &pipelines {
        let (from, to) = (pipeline.dead_letter_topic(), format!("{}-copy", pipeline.name));
        broker.create(&[&to], PARTITIONS).await?;
        let copied = bare::copy(&broker.address, &to, &from, &to, count, BATCH)?;
        copies.push(rate(count, copied));
        broker.delete(&[&to]).await?;

        let before = inspector.process.cpu_time();
        let elapsed = redrive(broker, &mut client, pipeline, count).await?;
        jobs.push(rate(count, elapsed));
        let used = inspector.process.cpu_time().saturating_sub(before);
        times.push(used.as_secs_f64() * 1e6 / count as f64);
    }
    let (copied, redriven) = (median(&copies), median(&jobs));
    figures.add(
        format!("bare copy of {count} dead letters, median of {}", options.rounds),
        per_second(copied),
    );
    figures.add(
        format!("redrive of {count} dead letters, median of {}", options.rounds),
        format!(
            "{} (goal 30,000/s), {:.2} of the bare copy, {:.1} us of processor time each",
            per_second(redriven),
            redriven / copied,
            median(&times)
        ),
    );
    figures.add(
        "memory after the jobs",
        format!("{:.0} MiB", inspector.process.rss_mib()?),
    );
    inspector.process.stop()?;
    for pipeline in &pipelines {
        broker.delete_of(pipeline).await?;
    }
    std::fs::remove_dir_all(&data).context("removing the index")
}

/// Plans and starts a job. Returns the time from its start until a consumer can read all records.
async fn redrive(
    broker: &Broker,
    client: &mut RedriveServiceClient<Channel>,
    pipeline: &Pipeline,
    count: usize,
) -> anyhow::Result<Duration> {
    let request = v1::PlanRedriveRequest {
        kind: v1::RedriveKind::Redrive.into(),
        filter: format!("topic = {}", pipeline.dead_letter_topic()),
        all_at_once: true,
        observe: Some(to_duration(HumanDuration::default())),
        reason: "benchmark".to_owned(),
        ..v1::PlanRedriveRequest::default()
    };
    let job = client.plan_redrive(request).await?.into_inner();
    ensure!(
        job.total as usize == count,
        "{} of {count} are planned",
        job.total
    );
    let due = pipeline.due_topic();
    let watch = broker.watch(&due, PARTITIONS)?;
    let started = Instant::now();
    let request = v1::ChangeRedriveRequest {
        id: job.id.clone(),
        ..v1::ChangeRedriveRequest::default()
    };
    client.start_redrive(request).await?;
    // The ends contain the markers of the transactions, about as many as there are steps and partitions.
    while watch.end()? < i64::try_from(count)? {
        ensure!(started.elapsed() < TIMEOUT, "the records are not redriven");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let elapsed = started.elapsed();
    loop {
        let request = v1::GetRedriveRequest { id: job.id.clone() };
        let job = client.get_redrive(request).await?.into_inner();
        match job.state() {
            v1::RedriveState::Succeeded => {
                ensure!(job.done as usize == count, "{job:?}");
                return Ok(elapsed);
            }
            v1::RedriveState::Running => {}
            state => anyhow::bail!("the job is {}: {job:?}", state.as_str_name()),
        }
        ensure!(started.elapsed() < TIMEOUT, "the job has not ended: {job:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
