//! `bench outcomes`: what an inspector process knows of the jobs of a pipeline: its memory, and `GetJobOutcomes` over gRPC.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use futures::future::try_join_all;
use redeliver_core::headers::{self, JOB_ID, Origin};
use redeliver_core::{
    Clock, Failure, Headers, HumanDuration, Jitter, JobId, Output, Pipeline, RetryPolicy, SystemClock,
    Timestamp,
};
use redeliver_kafka::groups::{self, CommittedOffset, GroupOffsets};
use redeliver_proto::v1;
use redeliver_proto::v1::JobOutcomeState as State;
use redeliver_proto::v1::waiting_service_client::WaitingServiceClient;
use tokio::time::{Instant, sleep_until};

use crate::dlq::Inspector;
use crate::figures::{Distribution, Figures};
use crate::kafka::Broker;
use crate::process::wait_until;
use crate::records::VALUE;

const PARTITIONS: i32 = 4;
/// What becomes of jobs in turn: no worker is running, and each state has its proof.
const STATES: [State; 4] = [State::Dispatched, State::Waiting, State::Succeeded, State::Dead];
const TIMEOUT: Duration = Duration::from_secs(300);

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Jobs; the inspector knows at most 450,000 for certain
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1_000..=450_000))]
    count: u32,
    /// Calls per second
    #[arg(long, default_value_t = 50)]
    rate: u32,
    /// Seconds of calls
    #[arg(long, default_value_t = 30)]
    seconds: u32,
    /// The inspector to measure, if not the one beside this program
    #[arg(long, default_value = "dlq-inspector")]
    inspector: PathBuf,
}

/// The jobs of a pipeline, by their numbers.
struct Jobs<'p> {
    pipeline: &'p Pipeline,
    tier: HumanDuration,
    now: Timestamp,
}

impl Jobs<'_> {
    fn id(&self, number: u32) -> JobId {
        JobId::new(self.now, 0, number.into())
    }

    /// The partition and the offset of a job's record in the source, where one record of each partition precedes those of jobs. All states are in each partition.
    fn position(number: u32) -> (i32, i64) {
        let (states, partitions) = (STATES.len() as u32, PARTITIONS as u32);
        let (turn, state) = (number / states, number % states);
        let partition = (turn % partitions) as i32;
        (partition, i64::from(1 + turn / partitions * states + state))
    }

    fn state(number: u32) -> State {
        STATES[number as usize % STATES.len()]
    }

    /// A copy in a topic, after this many failed attempts; `None`: the record of the source.
    fn copy(&self, number: u32, topic: impl Into<std::sync::Arc<str>>, attempts: Option<u32>) -> Output {
        let (partition, offset) = Self::position(number);
        let mut list = Headers::new();
        list.push_text(JOB_ID, &self.id(number).to_string());
        if let Some(attempts) = attempts {
            let origin = Origin {
                topic: self.pipeline.source.clone(),
                partition,
                offset,
                timestamp: Some(self.now),
            };
            headers::write_lineage(&mut list, &self.pipeline.name, &origin, attempts);
        }
        Output {
            topic: topic.into(),
            partition: Some(partition),
            key: Some(format!("key-{number}").into()),
            value: Some(vec![b'x'; VALUE].into()),
            headers: list,
        }
    }

    /// The newest record of a job that has gone on.
    fn newest(&self, number: u32) -> Option<Output> {
        let failure = Failure::transient("http.503", "busy");
        match Self::state(number) {
            State::Waiting => {
                let mut copy = self.copy(number, self.pipeline.tier_topic(self.tier), Some(1));
                headers::write_failure(&mut copy.headers, &failure, self.now);
                let due = self.now.after(self.tier.duration()).to_string();
                copy.headers.push_text(headers::PROCESS_AFTER, &due);
                let to = self.pipeline.return_topic();
                copy.headers.push_text(headers::RETURN_TOPIC, &to);
                Some(copy)
            }
            State::Succeeded => {
                let output = self.pipeline.output.clone()?;
                Some(self.copy(number, output, Some(0)))
            }
            State::Dead => {
                let mut copy = self.copy(number, self.pipeline.dead_letter_topic(), Some(1));
                headers::write_failure(&mut copy.headers, &failure, self.now);
                Some(copy)
            }
            _ => None,
        }
    }
}

pub(crate) async fn run(broker: &Broker, options: &Options, figures: &mut Figures) -> anyhow::Result<()> {
    let (name, count) = (broker.name("outcomes"), options.count);
    let tier = HumanDuration::from_secs(3_600);
    let pipeline = Pipeline {
        policy: RetryPolicy::listed(vec![tier], None, Jitter::None)?,
        output: Some(format!("{name}-out").into()),
        ..Pipeline::new(&name)
    };
    broker.create_for(&pipeline, PARTITIONS).await?;
    let jobs = Jobs {
        pipeline: &pipeline,
        tier,
        now: SystemClock.now(),
    };
    let filler = broker.filler()?;
    // Workers have completed a record of each partition, which is of no job.
    let (settings, mut committed) = (broker.settings("outcomes"), GroupOffsets::new());
    for partition in 0..PARTITIONS {
        let record = Output {
            headers: Headers::new(),
            partition: Some(partition),
            ..jobs.copy(0, pipeline.source.clone(), None)
        };
        filler.send(&record)?;
        let position = CommittedOffset::new(1, "");
        committed.insert((pipeline.source.to_string(), partition), position);
    }
    filler.flush()?;
    groups::commit(&settings, &pipeline.worker_group(&settings.id_prefix), &committed)?;

    let data = std::env::temp_dir().join("redeliver-bench").join(&name);
    let config = format!(
        "pipelines: {{ {name}: {{ output: '{name}-out', retry: {{ tiers: [{tier}] }} }} }}
scheduler: {{ apps: {{ bench: {{ topic: '{name}' }} }} }}
"
    );
    let letters = pipeline.dead_letter_topic();
    let inspector = Inspector::start(broker, &options.inspector, &data, &letters, &config)?;
    inspector.until_ready()?;
    let before = inspector.process.rss_mib()?;
    for number in 0..count {
        filler.send(&jobs.copy(number, pipeline.source.clone(), None))?;
    }
    filler.flush()?;
    let process = &inspector.process;
    wait_until("all jobs are known", TIMEOUT, || {
        Ok(process.metric("redeliver_dlq_job_outcomes")? >= f64::from(count))
    })?;
    let after = process.rss_mib()?;
    figures.add(
        format!("memory before and with {count} jobs"),
        format!(
            "{before:.0} MiB, {after:.0} MiB: {:.0} MiB per million",
            (after - before) / f64::from(count) * 1e6
        ),
    );

    for number in 0..count {
        if let Some(newest) = jobs.newest(number) {
            filler.send(&newest)?;
        }
    }
    filler.flush()?;
    let dead = (0..count)
        .filter(|number| Jobs::state(*number) == State::Dead)
        .count();
    wait_until("all dead letters are indexed", TIMEOUT, || {
        Ok(process.metric("redeliver_dlq_indexed_total")? >= dead as f64)
    })?;
    for (kind, distribution) in calls(&inspector, options, &jobs).await? {
        figures.add(format!("{kind}, at {}/s", options.rate), distribution);
    }
    figures.add("memory after the calls", format!("{:.0} MiB", process.rss_mib()?));
    inspector.process.stop()?;
    broker.delete_of(&pipeline).await?;
    std::fs::remove_dir_all(&data).context("removing the index")
}

/// Calls at their times, however long others take. The times from when they are due, of all and by state.
async fn calls(
    inspector: &Inspector,
    options: &Options,
    jobs: &Jobs<'_>,
) -> anyhow::Result<Vec<(String, Distribution)>> {
    let client = WaitingServiceClient::new(inspector.channel().await?);
    let call = async |number: u32| {
        let request = v1::GetJobOutcomesRequest {
            id: jobs.id(number).to_string(),
            topic: jobs.pipeline.source.to_string(),
        };
        let answer = client.clone().get_job_outcomes(request).await?;
        anyhow::Ok(answer.into_inner().outcomes)
    };
    // Opens connections, and waits until the inspector has read everything.
    let started = Instant::now();
    for number in 0..32 {
        while call(number).await?.first().map(v1::JobOutcome::state) != Some(Jobs::state(number)) {
            ensure!(started.elapsed() < TIMEOUT, "the state of a job is not known");
        }
    }
    let started = Instant::now();
    let call = &call;
    let calling = (0..options.rate * options.seconds).map(|index| async move {
        let due = started + Duration::from_secs(1) * index / options.rate;
        sleep_until(due).await;
        let number = index.wrapping_mul(7_919) % options.count;
        let outcomes = call(number).await?;
        let millis = due.elapsed().as_secs_f64() * 1_000.0;
        let state = outcomes.first().map(v1::JobOutcome::state);
        ensure!(state == Some(Jobs::state(number)), "{outcomes:?}");
        anyhow::Ok((Jobs::state(number), millis))
    });
    let measured = try_join_all(calling).await?;
    let times = |of: Option<State>| {
        let of_state = measured
            .iter()
            .filter(|(state, _)| of.is_none_or(|of| of == *state));
        Distribution::of(of_state.map(|(_, millis)| *millis).collect())
    };
    let mut found = vec![("GetJobOutcomes".to_owned(), times(None))];
    for state in STATES {
        let name = state
            .as_str_name()
            .trim_start_matches("JOB_OUTCOME_STATE_")
            .to_lowercase();
        found.push((format!("GetJobOutcomes, {name}"), times(Some(state))));
    }
    Ok(found)
}
