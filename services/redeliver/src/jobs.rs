//! `redeliver jobs`: scheduling, showing and changing jobs.

mod batch;
mod cancel;
mod list;
mod outcome;
mod schedule;
mod show;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use redeliver_client::convert::time;
use redeliver_client::messages::{Application, Job, JobOutcome, JobOutcomeState, JobState, Outcome, Stats};
use redeliver_client::{
    Answer, ClientError, Connection, Endpoint, JobClient, JobId, Timestamp, WaitingClient, When,
    unknown_outcome,
};
use redeliver_core::error_chain::error_chain;
use redeliver_core::{Clock as _, HumanDuration, SystemClock};
use redeliver_runtime::cli::{CommonArgs, EXIT_FAILURE};
use redeliver_service::host::check_kafka;
use serde_json::json;

use crate::config::Config;
use crate::connection::{
    CONNECTION, CliError, ConnectionArgs, Service, conclude, connect_to_change, inspector, scheduler,
};
use crate::obstacles::{Obstacle, of_inspector, of_scheduler};
use crate::output::{
    Column, Format, Json, OutputArgs, Text as _, fields, object, print_item, print_items, table,
};
use crate::times::future;
use show::{as_json, as_text};

#[derive(Args)]
pub(crate) struct JobsArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Schedule a job, or the jobs of a file
    #[command(
        after_help = "Examples:\n  redeliver jobs schedule --app sms --in 90s --data '{\"number\": 31}'\n  redeliver jobs schedule --app sms --at 2026-11-22T08:00:00Z --idempotency-key order-7\n  redeliver jobs schedule --file jobs.jsonl\n\nExit status: 1 if a job was not scheduled"
    )]
    Schedule(Box<schedule::ScheduleArgs>),
    /// Show one job, what has become of it in its pipeline, and what holds it up
    #[command(visible_alias = "why")]
    Get(GetArgs),
    /// Cancel a job, or all jobs of an application
    #[command(
        after_help = "Examples:\n  redeliver jobs cancel 01M7Z0Q7XE000G000000000000\n  redeliver jobs cancel --app sms --idempotency-key order-7 --reason 'paid'\n  redeliver jobs cancel --app sms --all --reason INC-17 --yes\n\nExit status: 1 if a job was dispatched or is unknown"
    )]
    Cancel(cancel::CancelArgs),
    /// Change the due time of a job
    #[command(
        after_help = "Examples:\n  redeliver jobs reschedule 01M7Z0Q7XE000G000000000000 --in 1h\n\nExit status: 1 if the job has ended or is unknown"
    )]
    Reschedule(RescheduleArgs),
    /// List waiting jobs by due time
    #[command(
        after_help = "Examples:\n  redeliver jobs ls --app sms\n  redeliver jobs ls --app sms --state expired -o jsonl"
    )]
    Ls(list::ListArgs),
    /// Count waiting jobs per minute of their due time
    Stats(StatsArgs),
    /// List applications with their topics, pauses, rates and due jobs
    Apps(AppsArgs),
}

#[derive(Args)]
pub(crate) struct SchedulerArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    /// URL of the scheduler, such as http://scheduler:50052; overrides REDELIVER_SCHEDULER (default: scheduler.listen)
    #[arg(long, value_name = "URL", env = "REDELIVER_SCHEDULER", hide_env = true, global = true, help_heading = CONNECTION)]
    server: Option<String>,
    #[command(flatten)]
    connection: ConnectionArgs,
}

/// The reason of a change.
#[derive(Args, Default)]
pub(crate) struct ReasonArgs {
    /// Reason for the audit log, at most 1000 bytes
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    reason: String,
}

impl ReasonArgs {
    pub(crate) fn add_to(&self, endpoint: Endpoint) -> Endpoint {
        if self.reason.is_empty() {
            return endpoint;
        }
        endpoint.reason(&self.reason)
    }
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct WhenArgs {
    /// Due time, such as 2026-11-22T08:00:00Z or tomorrow
    #[arg(long, value_name = "TIME", value_parser = future)]
    at: Option<Timestamp>,
    /// Delay from now, such as 90s
    #[arg(long = "in", value_name = "DURATION")]
    after: Option<HumanDuration>,
}

#[derive(Args)]
struct GetArgs {
    /// Job id
    #[arg(value_name = "ID", value_parser = id)]
    id: JobId,
    /// URL of the inspector, which knows what has become of a dispatched job; overrides REDELIVER_DLQ (default: dlq_inspector.listen)
    #[arg(long, value_name = "URL", env = "REDELIVER_DLQ", hide_env = true, help_heading = CONNECTION)]
    inspector: Option<String>,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    scheduler: SchedulerArgs,
}

/// The job that a command changes, by its id or by its idempotency key.
#[derive(Args)]
#[group(required = true, multiple = true)]
struct ChangedJobArgs {
    /// Job id
    #[arg(value_name = "ID", value_parser = id, conflicts_with_all = ["app", "idempotency_key"])]
    id: Option<JobId>,
    /// Application
    #[arg(long, value_name = "NAME")]
    app: Option<String>,
    /// Instead of an id: the newest job with this idempotency key, while the key is in use
    #[arg(long, value_name = "KEY", requires = "app")]
    idempotency_key: Option<String>,
}

/// A job that a command names.
enum ChangedJob<'a> {
    Id(JobId),
    Key { app: &'a str, key: &'a str },
}

#[derive(Args)]
struct ChangeArgs {
    #[command(flatten)]
    job: ChangedJobArgs,
    #[command(flatten)]
    reason: ReasonArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    scheduler: SchedulerArgs,
}

#[derive(Args)]
struct RescheduleArgs {
    #[command(flatten)]
    when: WhenArgs,
    #[command(flatten)]
    change: ChangeArgs,
}

#[derive(Args)]
struct StatsArgs {
    /// Count only jobs of this application, or long waits of this pipeline
    #[arg(long, value_name = "NAME")]
    app: Option<String>,
    /// Number of minutes to show
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=1440))]
    minutes: u32,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    scheduler: SchedulerArgs,
}

#[derive(Args)]
struct AppsArgs {
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    scheduler: SchedulerArgs,
}

const APPS: [Column<Application>; 7] = [
    ("app", |app, _| app.name.text()),
    ("topic", |app, _| app.topic.text()),
    ("state", |app, _| {
        Some(if app.paused? { "paused" } else { "running" }.to_owned())
    }),
    ("rate/s", |app, _| app.rate_per_second.text()),
    ("max waiting", |app, _| app.max_waiting.text()),
    ("due now", |app, _| app.due.text()),
    ("next due", |app, _| app.next_due.text()),
];

/// The due time that one of two flags gives.
fn due(at: Option<Timestamp>, after: Option<HumanDuration>) -> Result<When, CliError> {
    let at = at.map(When::At);
    at.or_else(|| after.map(|delay| When::After(delay.duration())))
        .ok_or_else(|| CliError::Usage("one of --at and --in is required".to_owned()))
}

fn id(text: &str) -> Result<JobId, String> {
    text.parse().map_err(|error| format!("`{text}` {error}"))
}

pub(crate) fn main(args: &JobsArgs) -> ExitCode {
    let common = match &args.verb {
        Verb::Schedule(args) => &args.scheduler.common,
        Verb::Get(args) => &args.scheduler.common,
        Verb::Cancel(args) => &args.change.scheduler.common,
        Verb::Reschedule(args) => &args.change.scheduler.common,
        Verb::Stats(args) => &args.scheduler.common,
        Verb::Apps(args) => &args.scheduler.common,
        Verb::Ls(args) => &args.common,
    };
    // Only `ls` reads from Kafka; the other commands call the scheduler.
    let check = |config: &Config| match &args.verb {
        Verb::Ls(args) if !args.api => check_kafka(config),
        _ => Ok(()),
    };
    let config: Config = match common.configure(check) {
        Ok(config) => config,
        Err(code) => return code,
    };
    conclude(async {
        match &args.verb {
            Verb::Schedule(args) => schedule::run(&config, args).await,
            Verb::Get(args) => get(&config, args).await,
            Verb::Cancel(args) => cancel::run(&config, args).await,
            Verb::Reschedule(args) => reschedule(&config, args).await,
            Verb::Stats(args) => stats(&config, args).await,
            Verb::Apps(args) => apps(&config, args).await,
            Verb::Ls(args) => list::run(&config, args).await,
        }
    })
}

impl SchedulerArgs {
    async fn connect(&self, config: &Config) -> Result<JobClient, CliError> {
        Ok(JobClient::new(&self.connection(config).await?))
    }

    async fn connection(&self, config: &Config) -> Result<Connection, CliError> {
        let service = scheduler(config);
        let connected = self.endpoint(&service)?.connect().await;
        connected.map_err(|error| service.failure(error))
    }

    async fn connect_to_change(&self, config: &Config, reason: &ReasonArgs) -> Result<JobClient, CliError> {
        let service = scheduler(config);
        let endpoint = reason.add_to(self.endpoint(&service)?);
        Ok(JobClient::new(&connect_to_change(&endpoint, &service).await?))
    }

    pub(crate) fn endpoint(&self, service: &Service) -> Result<Endpoint, CliError> {
        self.connection.endpoint(self.server.as_deref(), service)
    }
}

async fn get(config: &Config, args: &GetArgs) -> Result<ExitCode, CliError> {
    let connection = args.scheduler.connection(config).await?;
    let job = JobClient::new(&connection).get(args.id).await?;
    let (outcomes, obstacles) = match &job {
        Some(job) if job.state() == JobState::Scheduled => {
            let mut obstacles = of_scheduler(&connection, &job.app).await;
            let is_due = time(job.scheduled_time).is_some_and(|due| due <= SystemClock.now());
            obstacles.retain(|obstacle| is_due || !obstacle.is_limit());
            (Vec::new(), obstacles)
        }
        Some(job) if job.state() != JobState::Dispatched => (Vec::new(), Vec::new()),
        Some(job) => args.outcomes(config, &job.topic).await.unwrap_or_else(|error| {
            let reason = format!("cannot ask the inspector: {}", error_chain(&error));
            (vec![unknown_outcome(reason)], Vec::new())
        }),
        // The inspector can remember it for longer.
        None => match args.outcomes(config, "").await {
            Ok(known) if !known.0.is_empty() => known,
            Ok(_) => return Err(CliError::failed(ChangedJob::Id(args.id).unknown())),
            Err(error) => {
                let text = format!(
                    "{}; cannot ask the inspector: {}",
                    ChangedJob::Id(args.id).unknown(),
                    error_chain(&error)
                );
                return Err(CliError::failed(text));
            }
        },
    };
    let job = job.unwrap_or_else(|| Job {
        id: args.id.to_string(),
        ..Job::default()
    });
    print_item(
        args.output.format,
        || as_text(&job, &outcomes, &obstacles),
        || {
            let mut json = as_json(&job);
            if !outcomes.is_empty() {
                let outcomes = outcomes.iter().map(|outcome| Json::from(object(outcome)));
                json["outcomes"] = outcomes.collect();
            }
            if !obstacles.is_empty() {
                json["obstacles"] = obstacles.iter().map(Obstacle::json).collect();
            }
            json
        },
    );
    Ok(ExitCode::SUCCESS)
}

impl GetArgs {
    /// What has become of the job, as the inspector knows, and what holds it up. With a topic, there is at least one outcome.
    async fn outcomes(
        &self,
        config: &Config,
        topic: &str,
    ) -> Result<(Vec<JobOutcome>, Vec<Obstacle>), CliError> {
        let service = inspector(config).with_flag("--inspector");
        let endpoint = self
            .scheduler
            .connection
            .endpoint(self.inspector.as_deref(), &service)?;
        let connected = endpoint.connect().await;
        let connection = connected.map_err(|error| service.failure(error))?;
        let outcomes = WaitingClient::new(&connection)
            .job_outcomes(self.id, topic)
            .await?;
        let mut obstacles = Vec::new();
        for outcome in &outcomes {
            if let JobOutcomeState::Dispatched | JobOutcomeState::Running | JobOutcomeState::Waiting =
                outcome.state()
            {
                // A job that waits in no tier is held up only by what holds up the workers.
                let place = outcome.place.text().unwrap_or_else(|| "due".to_owned());
                obstacles.extend(of_inspector(&connection, &outcome.pipeline, &place).await);
            }
        }
        Ok((outcomes, obstacles))
    }
}

impl ChangedJobArgs {
    fn named(&self) -> Result<ChangedJob<'_>, CliError> {
        match (self.id, &self.app, &self.idempotency_key) {
            (Some(id), _, _) => Ok(ChangedJob::Id(id)),
            (None, Some(app), Some(key)) => Ok(ChangedJob::Key { app, key }),
            _ => Err(CliError::Usage(
                "an ID is required, or --app with --idempotency-key or, to cancel all, with --all".to_owned(),
            )),
        }
    }
}

impl ChangedJob<'_> {
    async fn cancel(&self, client: &JobClient) -> Result<Answer, ClientError> {
        match *self {
            Self::Id(id) => client.cancel(id).await,
            Self::Key { app, key } => client.cancel_by_key(app, key).await,
        }
    }

    async fn reschedule(&self, client: &JobClient, when: When) -> Result<Answer, ClientError> {
        match *self {
            Self::Id(id) => client.reschedule(id, when).await,
            Self::Key { app, key } => client.reschedule_by_key(app, key, when).await,
        }
    }

    fn unknown(&self) -> String {
        match *self {
            Self::Id(id) => {
                format!("job {id} not found: it never existed, or it ended and is no longer kept")
            }
            Self::Key { app, key } => {
                format!("no job of {app} has the idempotency key {key}, or the key is no longer in use")
            }
        }
    }
}

async fn reschedule(config: &Config, args: &RescheduleArgs) -> Result<ExitCode, CliError> {
    let when = due(args.when.at, args.when.after)?;
    let args = &args.change;
    let job = args.job.named()?;
    let client = args.scheduler.connect_to_change(config, &args.reason).await?;
    let answer = job.reschedule(&client, when).await?;
    print_answer(&job, args.output.format, &answer);
    Ok(match answer.outcome {
        Outcome::Rescheduled => ExitCode::SUCCESS,
        _ => ExitCode::from(EXIT_FAILURE),
    })
}

fn print_answer(named: &ChangedJob<'_>, format: Format, answer: &Answer) {
    // Only the answer tells the id of a job that is named by its key.
    let id = match *named {
        ChangedJob::Id(id) => Some(id),
        ChangedJob::Key { .. } => answer.id,
    };
    print_item(
        format,
        || {
            let Some(id) = id else {
                return named.unknown();
            };
            let with = |word: &str, text: Option<String>| {
                text.map_or_else(String::new, |text| format!(" {word} {text}"))
            };
            let job = answer.job.as_ref();
            let ended = with("at", job.and_then(|job| job.ended_at.text()));
            match answer.outcome {
                Outcome::Cancelled => format!("job {id} cancelled"),
                Outcome::Rescheduled => {
                    let due = with("to", job.and_then(|job| job.scheduled_time.text()));
                    format!("job {id} rescheduled{due}")
                }
                Outcome::AlreadyDispatched => {
                    let topic = with("to", job.and_then(|job| job.topic.text()));
                    format!("job {id} was already dispatched{topic}{ended}")
                }
                Outcome::AlreadyCancelled => format!("job {id} was already cancelled{ended}"),
                Outcome::Expired => format!("job {id} expired{ended}"),
                Outcome::Ended => format!("job {id} has ended and is no longer kept"),
                // The client returns no other outcome.
                _ => named.unknown(),
            }
        },
        || {
            json!({
                "id": id.map(|id| id.to_string()),
                "outcome": answer.outcome.name(),
                "job": answer.job.as_ref().map(as_json),
            })
        },
    );
}

async fn stats(config: &Config, args: &StatsArgs) -> Result<ExitCode, CliError> {
    let client = args.scheduler.connect(config).await?;
    let stats = client.stats(args.app.as_deref(), args.minutes).await?;
    print_item(
        args.output.format,
        || stats_text(&stats),
        || Json::from(object(&stats)),
    );
    Ok(ExitCode::SUCCESS)
}

async fn apps(config: &Config, args: &AppsArgs) -> Result<ExitCode, CliError> {
    let apps = args.scheduler.connect(config).await?.applications().await?;
    print_items(args.output.format, &APPS, &apps, |app| Json::from(object(app)));
    Ok(ExitCode::SUCCESS)
}

/// Length of the longest bar, in characters.
const BAR: u64 = 40;

fn stats_text(stats: &Stats) -> String {
    let mut text = fields(&[
        ("scheduled", &stats.scheduled),
        ("due now", &stats.due),
        ("next due", &stats.next_due),
    ]);
    let most = stats.per_minute.iter().copied().max().unwrap_or(0).max(1);
    let bar = |count: u64| {
        let length = (u128::from(count) * u128::from(BAR)).div_ceil(most.into());
        "█".repeat(usize::try_from(length).unwrap_or(0))
    };
    let minutes = stats
        .per_minute
        .iter()
        .enumerate()
        .filter(|(_, count)| **count > 0);
    let mut rows: Vec<Vec<String>> = minutes
        .map(|(minute, count)| vec![format!("{minute}m"), count.to_string(), bar(*count)])
        .collect();
    if stats.later > 0 {
        rows.push(vec!["later".to_owned(), stats.later.to_string(), " ".to_owned()]);
    }
    if !rows.is_empty() {
        text += "\n";
        text += &table(&["due in", "jobs", " "], rows);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_show_minutes_with_jobs() {
        let stats = Stats {
            scheduled: 14,
            due: 1,
            next_due: Some(prost_types::Timestamp::default()),
            per_minute: vec![2, 0, 4],
            later: 7,
        };
        let expected = format!(
            "scheduled  14\ndue now    1\nnext due   1970-01-01T00:00:00.000Z\n\n\
             DUE IN  JOBS\n0m      2     {}\n2m      4     {}\nlater   7",
            "█".repeat(20),
            "█".repeat(40)
        );
        assert_eq!(stats_text(&stats), expected);
        let none = Stats {
            scheduled: 0,
            due: 0,
            next_due: None,
            per_minute: vec![0; 60],
            later: 0,
        };
        assert_eq!(stats_text(&none), "scheduled  0\ndue now    0\n");
    }
}
