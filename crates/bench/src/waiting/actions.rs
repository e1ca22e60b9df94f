//! Actions on single records of a tier, while it releases the records of another pipeline.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::ensure;
use redeliver_core::{Clock, HumanDuration, Output, Pipeline, SystemClock, Timestamp};
use redeliver_proto::v1;
use redeliver_proto::v1::waiting_service_client::WaitingServiceClient;
use tonic::transport::Channel;

use crate::figures::{Distribution, Figures, per_second, rate};
use crate::kafka::Broker;
use crate::process::Running;
use crate::records::waiting;
use crate::scheduler::PARTITIONS;
use crate::scheduler::arrivals::Arrivals;
use crate::scheduler::env::data;

/// Records of the other pipeline per second, and how long each waits.
const OTHERS: (f64, Duration) = (200.0, Duration::from_secs(1));
/// For how long they are released without actions.
const QUIET: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(200);
const TIMEOUT: Duration = Duration::from_secs(300);

/// Moves records of a tier, which has `records` in its topic, to the dead letters: by their positions, and as many by a filter.
pub(super) async fn run(
    broker: &Broker,
    (pipeline, tier, records): (&Pipeline, HumanDuration, usize),
    actions: u32,
    client: &mut WaitingServiceClient<Channel>,
    figures: &mut Figures,
) -> anyhow::Result<()> {
    let name = &pipeline.name;
    // The same thread serves both pipelines, because they have the same tiers.
    let others = Pipeline {
        policy: pipeline.policy.clone(),
        ..Pipeline::new(&format!("{name}-others"))
    };
    broker.create_for(&others, PARTITIONS).await?;
    let tiers: Vec<_> = pipeline.policy.tiers().iter().map(ToString::to_string).collect();
    let retry = format!("retry: {{ tiers: [{}] }}", tiers.join(", "));
    let config = format!(
        "instance: {name}
kafka: {{ brokers: '{}', topics: {{ create: true }} }}
pipelines: {{ {name}: {{ output: '{name}-out', {retry} }}, {name}-others: {{ {retry} }} }}
",
        broker.address
    );
    let process = Running::start("retry-tier", name, &config)?;
    process.wait_until_ready()?;
    let arrivals = Arrivals::at(broker, &others.due_topic())?;
    let stop = Arc::new(AtomicBool::new(false));
    let sender = std::thread::spawn({
        let (broker, others, stop) = (broker.clone(), others.clone(), stop.clone());
        move || broker.trickle(OTHERS.0, &stop, |number| other(&others, tier, number))
    });
    // The first records wait for the partitions.
    tokio::time::sleep(OTHERS.1 * 5).await;
    let began = SystemClock.now();
    tokio::time::sleep(QUIET).await;
    let mut times = vec![("no", began..SystemClock.now())];
    let before = process.rss_mib()?;
    for kind in ["id", "filter"] {
        let mut request = v1::ActOnWaitingRecordsRequest {
            max_records: actions,
            action: v1::WaitingAction::Dead.into(),
            request_id: format!("{name}-{kind}"),
            ..v1::ActOnWaitingRecordsRequest::default()
        };
        if kind == "id" {
            request.positions = positions(&pipeline.tier_topic(tier), records, actions)?;
        } else {
            request.filter.get_or_insert_default().place = tier.to_string();
        }
        let (asked, took, during) = act(client, request, actions).await?;
        figures.add(
            format!("{actions} actions by {kind}: the request, and until all were done"),
            format!(
                "{asked:.1?}, {took:.1?} ({})",
                per_second(rate(actions as usize, took))
            ),
        );
        times.push((kind, during));
    }
    stop.store(true, Ordering::SeqCst);
    let sent = sender
        .join()
        .map_err(|_| anyhow::anyhow!("the producer panicked"))??;
    let arrivals = arrivals.all(sent)?;
    for (kind, times) in times {
        let meanwhile = arrivals.iter().filter(|arrival| times.contains(&arrival.due));
        figures.add(
            format!("lateness of another pipeline in the same tier during actions by: {kind}"),
            Distribution::of(meanwhile.map(|arrival| arrival.lateness).collect()),
        );
    }
    figures.add(
        "memory of the tier before the actions, and at most",
        format!("{before:.0} MiB, {:.0} MiB", process.peak_rss_mib()?),
    );
    process.stop()?;
    broker.delete_of(&others).await
}

fn other(pipeline: &Pipeline, tier: HumanDuration, number: usize) -> Output {
    let due = SystemClock.now().after(OTHERS.1);
    Output {
        value: Some(data(number, due).into()),
        ..waiting(pipeline, tier, number, due)
    }
}

/// Positions all over the second half of each partition, which keys make nearly equal.
fn positions(topic: &str, records: usize, actions: u32) -> anyhow::Result<Vec<v1::Position>> {
    let partitions = i64::from(super::PARTITIONS);
    let half = i64::try_from(records)? / partitions / 2;
    let step = half * 9 / 10 * partitions / i64::from(actions);
    ensure!(step > 0, "{records} records are too few for {actions} actions");
    let position = |number: i64| v1::Position {
        topic: topic.to_owned(),
        partition: (number % partitions) as i32,
        offset: half + number / partitions * step,
    };
    Ok((0..actions.into()).map(position).collect())
}

/// How long the request took, how long it took until all records had left the tier, and when that was.
async fn act(
    client: &mut WaitingServiceClient<Channel>,
    request: v1::ActOnWaitingRecordsRequest,
    actions: u32,
) -> anyhow::Result<(Duration, Duration, Range<Timestamp>)> {
    let (from, started) = (SystemClock.now(), Instant::now());
    let mut answer = client.act_on_waiting_records(request).await?.into_inner();
    let asked = started.elapsed();
    while answer.pending > 0 {
        ensure!(started.elapsed() < TIMEOUT, "{} are pending", answer.pending);
        tokio::time::sleep(POLL).await;
        let request_id = answer.request_id;
        let request = v1::GetWaitingActionsRequest { request_id };
        answer = client.get_waiting_actions(request).await?.into_inner();
    }
    let took = started.elapsed();
    let is_dead = |acted: &&v1::WaitingActed| acted.state() == v1::WaitingActionState::Dead;
    let dead = answer.acted.iter().filter(is_dead).count();
    ensure!(
        dead == actions as usize,
        "{dead} of {actions} records are dead letters"
    );
    Ok((asked, took, from..SystemClock.now()))
}
