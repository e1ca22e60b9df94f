//! `redeliver jobs ls`: reads the state topic, so that it works without a scheduler, or asks the scheduler, so that it works without
//! permissions in Kafka.
//!
//! The state topic contains ended jobs too, usually many more than waiting ones. So they are listed only on request, and after
//! the waiting ones. The scheduler lists only waiting jobs.

mod api;

use std::cmp::Reverse;
use std::collections::HashMap;
use std::process::ExitCode;

use clap::Args;
use redeliver_client::convert::{from_state, time, time_of_record};
use redeliver_client::messages::{Job, JobRecord};
use redeliver_client::{JobId, Timestamp};
use redeliver_core::job::JobState;
use redeliver_core::{HumanDuration, Record};
use redeliver_kafka::reader::TopicReader;
use redeliver_proto::Message as _;
use redeliver_runtime::cli::CommonArgs;
use redeliver_service::login::kafka_of_command;

use crate::config::Config;
use crate::connection::{CONNECTION, CliError, CredentialArgs};
use crate::output::{Column, Format, Json, OutputArgs, Text as _, object, print_items};
use crate::times::{check_range, future};

#[derive(Args)]
pub(super) struct ListArgs {
    /// List only jobs of this application, or long waits of this pipeline
    #[arg(long, value_name = "NAME")]
    app: Option<String>,
    /// List jobs in this state: scheduled (default), dispatched, cancelled or expired
    #[arg(long, value_name = "STATE", value_parser = state)]
    state: Option<JobState>,
    /// Also list ended jobs, the newest first, after the waiting ones
    #[arg(long, conflicts_with = "state")]
    all: bool,
    /// List only jobs that are due at this time or later, such as 10m (from now), --from=-10m (ago), today or 2026-11-22T08:00:00Z
    #[arg(long, value_name = "TIME", value_parser = future)]
    from: Option<Timestamp>,
    /// List only jobs that are due before this time
    #[arg(long, value_name = "TIME", value_parser = future)]
    until: Option<Timestamp>,
    /// Maximum number of jobs
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    /// Timeout of reading the topic or, with --api, of a request
    #[arg(long, value_name = "DURATION", default_value = "5m")]
    timeout: HumanDuration,
    /// Ask the scheduler, which lists only waiting jobs, instead of reading the state topic
    #[arg(long, conflicts_with = "all")]
    pub(super) api: bool,
    /// URL of the scheduler, such as http://scheduler:50052; overrides REDELIVER_SCHEDULER (default: scheduler.listen)
    #[arg(long, value_name = "URL", requires = "api", help_heading = CONNECTION)]
    server: Option<String>,
    #[command(flatten)]
    credentials: CredentialArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    pub(super) common: CommonArgs,
}

const COLUMNS: [Column<Job>; 7] = [
    ("id", |job, _| job.id.text()),
    ("app", |job, _| match job.long_wait {
        true => Some(format!("{} (long wait)", job.app)),
        false => job.app.text(),
    }),
    ("state", |job, _| job.state().name()),
    ("due", |job, _| job.scheduled_time.text()),
    ("priority", |job, _| job.priority().name()),
    ("ended", |job, _| job.ended_at.text()),
    ("idempotency key", |job, _| job.idempotency_key.short(40)),
];

/// What a list does not have.
const UNLISTED: [&str; 9] = [
    "accepted_at",
    "data",
    "data_base64",
    "expires_at",
    "headers",
    "key",
    "key_base64",
    "occurrence",
    "request_id",
];

impl ListArgs {
    /// The state of the jobs to list; `None` for all of them.
    fn state(&self) -> Option<JobState> {
        (!self.all).then(|| self.state.unwrap_or(JobState::Scheduled))
    }
}

fn state(text: &str) -> Result<JobState, String> {
    text.parse().map_err(|error| format!("`{text}` {error}"))
}

pub(super) async fn run(config: &Config, args: &ListArgs) -> Result<ExitCode, CliError> {
    check_range(("--from", args.from), args.until)?;
    if args.api {
        return api::run(config, args).await;
    }
    read_topic(config, args)
}

fn read_topic(config: &Config, args: &ListArgs) -> Result<ExitCode, CliError> {
    let topic = config.scheduler.topics().state;
    let mut jobs = Jobs::new(Filter {
        app: args.app.clone(),
        state: args.state(),
        from: args.from,
        until: args.until,
    });
    let read = TopicReader::new(&kafka_of_command(config)?, std::slice::from_ref(&topic))
        .and_then(|mut reader| reader.read_to_end(args.timeout.duration(), |record| jobs.note(&record)));
    read.map_err(|source| CliError::Read {
        topic: topic.to_string(),
        brokers: config.kafka.brokers.clone(),
        source: Box::new(source),
    })?;
    let limit = usize::try_from(args.limit).unwrap_or(usize::MAX);
    let (found, unreadable) = (jobs.found.len(), jobs.unreadable);
    // One that is not in the configuration any more may have jobs.
    if let Some(app) = args.app.as_deref().filter(|_| found == 0)
        && !config.scheduler.apps.contains_key(app)
        && config.any_pipeline(app).is_none()
    {
        return Err(CliError::failed(format_args!(
            "{app} is neither an application nor a pipeline of the configuration, and there is no job of it"
        )));
    }
    let jobs = jobs.first(limit);
    print_jobs(args.output.format, &jobs);
    if found > jobs.len() {
        eprintln!("showing {} of {found} jobs; use --limit to show more", jobs.len());
    }
    if unreadable > 0 {
        eprintln!("skipped {unreadable} records of the state topic that are not jobs");
    }
    Ok(ExitCode::SUCCESS)
}

fn print_jobs(format: Format, jobs: &[Job]) {
    print_items(format, &COLUMNS, jobs, as_json);
}

fn as_json(job: &Job) -> Json {
    let mut object = object(job);
    object.retain(|name, _| !UNLISTED.contains(&&**name));
    object.into()
}

/// Which jobs of the state topic to list.
#[derive(Default)]
struct Filter {
    app: Option<String>,
    state: Option<JobState>,
    /// The first due time.
    from: Option<Timestamp>,
    /// The end of the due times, exclusive.
    until: Option<Timestamp>,
}

impl Filter {
    fn matches(&self, job: &JobRecord) -> bool {
        let due = Timestamp::from_millis(job.due_ms);
        self.app.as_ref().is_none_or(|app| *app == job.app)
            && self
                .state
                .is_none_or(|state| Some(state) == from_state(job.state()))
            && self.from.is_none_or(|from| due >= from)
            && self.until.is_none_or(|until| due < until)
    }
}

/// The latest state of each job that matches.
struct Jobs {
    filter: Filter,
    found: HashMap<JobId, Job>,
    unreadable: u64,
}

impl Jobs {
    fn new(filter: Filter) -> Self {
        Self {
            filter,
            found: HashMap::new(),
            unreadable: 0,
        }
    }

    /// Records of one job are in one partition and thus arrive in order.
    fn note(&mut self, record: &Record) {
        let key = record
            .key
            .as_deref()
            .and_then(|key| std::str::from_utf8(key).ok());
        if key.is_some_and(|key| key.starts_with("schedule:")) {
            return;
        }
        let Some(id) = key.and_then(|key| key.parse::<JobId>().ok()) else {
            self.unreadable += 1;
            return;
        };
        let Some(value) = &record.value else {
            self.found.remove(&id);
            return;
        };
        let record = JobRecord::decode(value.clone()).ok();
        let Some(record) = record.filter(|record| from_state(record.state()).is_some()) else {
            self.unreadable += 1;
            return;
        };
        if self.filter.matches(&record) {
            self.found.insert(id, job(id, record));
        } else {
            // An earlier record of the job may have matched.
            self.found.remove(&id);
        }
    }

    /// Waiting jobs, those that are due next first, then ended ones, those that ended last first.
    fn first(self, limit: usize) -> Vec<Job> {
        let mut jobs: Vec<(JobId, Job)> = self.found.into_iter().collect();
        jobs.sort_unstable_by_key(|(id, job)| {
            (time(job.ended_at).map(Reverse), time(job.scheduled_time), *id)
        });
        jobs.into_iter().take(limit).map(|(_, job)| job).collect()
    }
}

/// A job of the state topic.
fn job(id: JobId, record: JobRecord) -> Job {
    let time = |millis| time_of_record(Timestamp::from_millis(millis));
    Job {
        id: id.to_string(),
        app: record.app,
        state: record.state,
        priority: record.priority,
        scheduled_time: time(record.due_ms),
        ended_at: record.ended_ms.and_then(time),
        revision: record.revision,
        idempotency_key: record.idempotency_key,
        topic: record.topic,
        long_wait: record.long_wait,
        ..Job::default()
    }
}

#[cfg(test)]
mod tests {
    use redeliver_client::messages::JobState as State;

    use super::*;

    fn id(offset: i64) -> JobId {
        JobId::new(Timestamp::from_millis(5), 0, offset)
    }

    fn record(key: &str, value: Option<&JobRecord>) -> Record {
        redeliver_testkit::record(key, value.map(|job| job.encode_to_vec().into()))
    }

    fn job(app: &str, state: State, due: i64) -> JobRecord {
        JobRecord {
            app: app.to_owned(),
            state: state.into(),
            due_ms: due,
            ..JobRecord::default()
        }
    }

    fn listed(jobs: Jobs) -> Vec<u64> {
        let ids = jobs.first(10).into_iter().map(|job| job.id.parse::<JobId>());
        ids.map(|id| id.unwrap().offset()).collect()
    }

    #[test]
    fn the_latest_record_counts() {
        let waits = job("a", State::Scheduled, 50);
        let gone = job("a", State::Dispatched, 50);
        let mut all = Jobs::new(Filter::default());
        let mut waiting = Jobs::new(Filter {
            state: Some(JobState::Scheduled),
            ..Filter::default()
        });
        for jobs in [&mut all, &mut waiting] {
            for offset in 1..=3 {
                jobs.note(&record(&id(offset).to_string(), Some(&waits)));
            }
            jobs.note(&record(&id(2).to_string(), Some(&gone)));
            jobs.note(&record(&id(3).to_string(), None));
        }
        assert_eq!(listed(all), [1, 2]);
        assert_eq!(listed(waiting), [1]);
    }

    #[test]
    fn matching_jobs_are_ordered() {
        let mut jobs = Jobs::new(Filter {
            app: Some("a".to_owned()),
            from: Some(Timestamp::from_millis(20)),
            until: Some(Timestamp::from_millis(31)),
            ..Filter::default()
        });
        for (offset, app, due) in [
            (1, "a", 30),
            (2, "b", 20),
            (3, "a", 20),
            (4, "a", 20),
            (5, "a", 19),
            (6, "a", 31),
        ] {
            let job = job(app, State::Scheduled, due);
            jobs.note(&record(&id(offset).to_string(), Some(&job)));
        }
        assert_eq!(listed(jobs), [3, 4, 1]);
    }

    #[test]
    fn ended_jobs_follow_waiting_ones() {
        let mut jobs = Jobs::new(Filter::default());
        for (offset, due, ended) in [(1, 10, Some(70)), (2, 90, None), (3, 20, Some(80)), (4, 50, None)] {
            let job = JobRecord {
                ended_ms: ended,
                ..job("a", State::Scheduled, due)
            };
            jobs.note(&record(&id(offset).to_string(), Some(&job)));
        }
        assert_eq!(listed(jobs), [4, 2, 3, 1]);
    }

    #[test]
    fn other_records_are_counted() {
        let mut jobs = Jobs::new(Filter::default());
        jobs.note(&record("x", None));
        jobs.note(&record(
            &id(1).to_string(),
            Some(&job("a", State::Unspecified, 1)),
        ));
        let mut broken = record(&id(1).to_string(), None);
        broken.value = Some(bytes::Bytes::from_static(b"\xff"));
        jobs.note(&broken);
        assert_eq!((jobs.unreadable, jobs.found.len()), (3, 0));
    }
}
