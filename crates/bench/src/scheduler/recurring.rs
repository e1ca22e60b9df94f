//! Recurring schedules that are all due at each full minute, and meanwhile a trickle of jobs of another application.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use rdkafka::message::{BorrowedMessage, Headers as _, Message as _};
use redeliver_core::headers::JOB_OCCURRENCE;
use redeliver_core::{Clock, Headers, Output, SystemClock, Timestamp};
use redeliver_kafka::murmur2::shard_of;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::v1::change_schedule::{Change, Create};
use redeliver_proto::v1::job_command::Command;
use redeliver_proto::v1::schedule_spec::Timing;
use redeliver_proto::{CONTENT_TYPE, Message as _, v1};

use super::arrivals::{Arrivals, lateness, max_lateness};
use super::burst::lead;
use super::env::{BULK, SchedulerEnv, TIMEOUT, TRICKLE, app, wait_indexed};
use super::trickle::Trickle;
use super::{DATA, PARTITIONS};
use crate::figures::{Distribution, Figures, per_second};
use crate::kafka::Broker;
use crate::process::wait_until;
use crate::redis::Redis;

const MINUTE: i64 = 60_000;
/// Full minutes that are measured.
const MINUTES: usize = 3;

pub(super) async fn run(
    broker: &Broker,
    redis: &mut Redis,
    count: usize,
    apps: usize,
    figures: &mut Figures,
) -> anyhow::Result<()> {
    ensure!(apps > 0, "schedules need an application");
    let env = SchedulerEnv::build(broker, redis, "recurring")
        .await?
        .with_apps(apps);
    let process = env.start_and_wait("a")?;
    let memory = redis.used_memory()?;
    let earliest = SystemClock.now().after(lead(count)).as_millis();
    let start = Timestamp::from_millis((earliest / MINUTE + 1) * MINUTE);
    broker.fill(count, |number| create(&env, number, &app(number % apps), start))?;
    wait_until("all schedules are created", TIMEOUT, || {
        let created = process.metric("redeliver_scheduler_commands_total{outcome=\"schedule_changed\"")?;
        Ok(created >= count as f64)
    })?;
    wait_indexed(&process)?;
    ensure!(
        SystemClock.until(start) > Duration::from_secs(3),
        "creating the schedules took until the first occurrence"
    );
    figures.add(
        format!("Redis per schedule, {count} of {apps} applications with jobs of {DATA} bytes"),
        format!("{:.0} bytes", (redis.used_memory()? - memory) / count as f64),
    );
    let bulk = Arrivals::of(broker, &env.app_topic(BULK), occurrence)?;
    let others = Arrivals::at(broker, &env.app_topic(TRICKLE))?;
    std::thread::sleep(SystemClock.until(start).saturating_sub(Duration::from_secs(2)));
    let trickle = Trickle::start(&env, TRICKLE, 100.0, Duration::from_secs(1), &[0, 1, 2, 3]);
    let mut cpu = Duration::ZERO;
    let mut bursts = Vec::new();
    for minute in 0..MINUTES {
        let due = start.after(Duration::from_millis(minute as u64 * MINUTE as u64));
        std::thread::sleep(SystemClock.until(due));
        let before = process.cpu_time();
        bulk.wait_for(count * (minute + 1))?;
        cpu += process.cpu_time() - before;
        bursts.push(due..SystemClock.now());
    }
    let bulk = bulk.all(count * MINUTES)?;
    let others = others.all(trickle.stop()?)?;
    let (beside, between): (Vec<_>, Vec<_>) = others
        .into_iter()
        .partition(|arrival| bursts.iter().any(|burst| burst.contains(&arrival.due)));
    let micros = cpu.as_secs_f64() * 1e6 / bulk.len() as f64;
    figures.add(
        format!(
            "occurrences of {count} schedules of {apps} applications at a full minute, each once and none early, {MINUTES} minutes"
        ),
        format!(
            "at least {}, {}",
            per_second(count as f64 / (max_lateness(&bulk) / 1_000.0)),
            Distribution::of(lateness(&bulk))
        ),
    );
    figures.add(
        "processor time of the scheduler per occurrence, memory afterwards",
        format!("{micros:.1} us, {:.0} MiB", process.rss_mib()?),
    );
    figures.add(
        "lateness of 100/s of another application while occurrences are dispatched",
        Distribution::of(lateness(&beside)),
    );
    figures.add(
        "the same between the full minutes",
        Distribution::of(lateness(&between)),
    );
    process.stop()?;
    env.tear_down().await
}

/// The command for a schedule.
fn create(env: &SchedulerEnv, number: usize, app: &str, start: Timestamp) -> Output {
    let id = format!("s-{number}");
    let partition = shard_of("", &id, PARTITIONS);
    let spec = v1::ScheduleSpec {
        timing: Some(Timing::Cron(v1::CronTiming {
            expression: "* * * * *".into(),
            ..v1::CronTiming::default()
        })),
        start: Some(to_timestamp(start)),
        max_count: Some(MINUTES as u64),
        job: Some(v1::JobTemplate {
            app: app.into(),
            data: super::env::data(number, start).into(),
            ..v1::JobTemplate::default()
        }),
        ..v1::ScheduleSpec::default()
    };
    let change = v1::ChangeSchedule {
        id,
        change: Some(Change::Create(Create { spec: Some(spec) })),
        ..v1::ChangeSchedule::default()
    };
    let command = v1::JobCommand {
        command: Some(Command::ChangeSchedule(change)),
        ..v1::JobCommand::default()
    };
    let mut headers = Headers::new();
    headers.push_text("content-type", CONTENT_TYPE);
    Output {
        topic: env.ingest_topic(),
        partition: Some(partition),
        key: None,
        value: Some(command.encode_to_vec().into()),
        headers,
    }
}

/// A number for each occurrence, and its nominal time.
fn occurrence(message: &BorrowedMessage<'_>) -> anyhow::Result<(u64, Timestamp)> {
    let mut headers = message.headers().into_iter().flat_map(|headers| headers.iter());
    let occurrence = headers.find(|header| header.key == JOB_OCCURRENCE);
    let occurrence = occurrence
        .and_then(|header| header.value)
        .context(JOB_OCCURRENCE)?;
    let (schedule, nominal) = std::str::from_utf8(occurrence)?
        .split_once('@')
        .context("the nominal time")?;
    let schedule: u64 = schedule
        .strip_prefix("s-")
        .context("the number of the schedule")?
        .parse()?;
    let nominal: Timestamp = nominal.parse()?;
    let minute = u64::try_from(nominal.as_millis() / MINUTE)?;
    Ok((minute * 10_000_000 + schedule, nominal))
}
