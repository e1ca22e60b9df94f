//! The definition of a schedule, from flags or from a file.

use clap::{ArgGroup, Args, ValueEnum};
use redeliver_client::Timestamp;
use redeliver_client::messages::schedule_spec::Timing;
use redeliver_client::messages::{
    CronTiming, GapPolicy, Header, IntervalTiming, JobTemplate, Misfire, MisfirePolicy, OverlapPolicy,
    ScheduleSpec, ScheduleState,
};
use redeliver_core::HumanDuration;
use redeliver_proto::convert::{to_duration, to_priority, to_timestamp};
use redeliver_runtime::Config;
use redeliver_scheduler::request::{Format, ReadSchedule, check_recurrence, other_state, read_schedule_json};

use crate::connection::CliError;
use crate::record::{RecordArgs, read_file};

/// When a schedule recurs.
#[derive(Args)]
#[group(skip)]
pub(super) struct TimingArgs {
    /// Cron expression, such as `30 2 * * *`: five fields, or six with the second in front, or @hourly, @daily, @weekly, @monthly,
    /// @yearly
    #[arg(long, value_name = "EXPRESSION")]
    cron: Option<String>,
    /// Time zone of --cron, such as Europe/Berlin (default: UTC)
    #[arg(long, value_name = "NAME", requires = "cron", conflicts_with = "every")]
    zone: Option<String>,
    /// What happens to a local time that a day does not have (default: shift)
    #[arg(long, value_name = "POLICY", requires = "cron", conflicts_with = "every")]
    gap: Option<Gap>,
    /// What happens to a local time that a day has twice (default: both if --cron selects every hour, and otherwise first)
    #[arg(long, value_name = "POLICY", requires = "cron", conflicts_with = "every")]
    overlap: Option<Overlap>,
    /// Interval, such as 5m
    #[arg(long, value_name = "DURATION")]
    every: Option<HumanDuration>,
    /// One of the times of --every, which decides its phase (default: --start, or else 1970-01-01T00:00:00Z)
    #[arg(long, value_name = "TIME", requires = "every", conflicts_with = "cron", value_parser = crate::jobs::time)]
    anchor: Option<Timestamp>,
    /// No nominal time before this one
    #[arg(long, value_name = "TIME", value_parser = crate::jobs::time)]
    start: Option<Timestamp>,
    /// No nominal time after this one
    #[arg(long, value_name = "TIME", value_parser = crate::jobs::time)]
    end: Option<Timestamp>,
    /// Number of occurrences to dispatch (default: without a limit)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    max_count: Option<u64>,
    /// How much later than its nominal time an occurrence may be due, at most 1d
    #[arg(long, value_name = "DURATION")]
    jitter: Option<HumanDuration>,
    /// What happens to missed occurrences: skip, once or all (default: once)
    #[arg(long, value_name = "POLICY", hide_possible_values = true)]
    misfire: Option<MisfireName>,
    /// With --misfire all: how many missed occurrences are dispatched late, from 1 to 1000
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000), required_if_eq("misfire", "all"))]
    misfire_limit: Option<u32>,
    /// How late an occurrence can be without being missed (default: 60s)
    #[arg(long, value_name = "DURATION")]
    grace: Option<HumanDuration>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Gap {
    /// It is later by the length of the gap
    Shift,
    /// It has no occurrence
    Skip,
}

#[derive(Clone, Copy, ValueEnum)]
enum Overlap {
    /// Only the first one is an occurrence
    First,
    /// Both are occurrences
    Both,
}

#[derive(Clone, Copy, ValueEnum)]
enum MisfireName {
    Skip,
    Once,
    All,
}

/// A definition.
#[derive(Args)]
#[group(skip)]
#[command(group = ArgGroup::new("what").required(true).args(["cron", "every", "file"]))]
pub(super) struct DefinitionArgs {
    /// Application, one of scheduler.apps
    #[arg(long, value_name = "NAME", required_unless_present = "file")]
    app: Option<String>,
    /// File with the definition in JSON, as for REST; - for standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["app", "cron", "zone", "gap", "overlap", "every", "anchor", "start",
        "end", "max_count", "jitter", "misfire", "misfire_limit", "grace", "data", "data_file", "key", "headers", "priority",
        "expire_after"])]
    file: Option<String>,
    #[command(flatten)]
    timing: TimingArgs,
    #[command(flatten)]
    record: RecordArgs,
}

/// A definition that is valid as far as it can be checked without a scheduler.
pub(super) struct Definition {
    /// The id, if the file contains one.
    pub(super) id: Option<String>,
    pub(super) spec: ScheduleSpec,
    /// The state that the schedule has, if the file contains one. A definition cannot change it.
    pub(super) state: Option<ScheduleState>,
    /// The revision that the schedule has, if the file contains one.
    pub(super) revision: Option<u32>,
}

impl Definition {
    /// Checks that a schedule has the state that the file contains.
    pub(super) fn check_state(&self, is: ScheduleState) -> Result<(), CliError> {
        match self.state {
            Some(expected) if expected != is => {
                let message = other_state(expected, is).message;
                Err(CliError::Usage(format!("--file: {message}")))
            }
            _ => Ok(()),
        }
    }
}

impl DefinitionArgs {
    pub(super) fn read(&self, config: &Config) -> Result<Definition, CliError> {
        match &self.file {
            Some(file) => read_definition(config, file),
            None => {
                let spec = ScheduleSpec {
                    job: Some(self.job()?),
                    ..self.timing.spec()
                };
                check(&spec)?;
                Ok(Definition {
                    id: None,
                    spec,
                    state: None,
                    revision: None,
                })
            }
        }
    }

    fn job(&self) -> Result<JobTemplate, CliError> {
        let record = &self.record;
        let headers = record.headers.iter().map(|(name, value)| Header {
            name: name.clone(),
            value: Some(value.clone().into_bytes().into()),
        });
        Ok(JobTemplate {
            app: self.app.clone().unwrap_or_default(),
            priority: to_priority(record.priority).into(),
            data: record.data()?.into(),
            key: record.key.clone().map(|key| key.into_bytes().into()),
            headers: headers.collect(),
            expire_after: record.expire_after.map(to_duration),
        })
    }
}

/// The definition in a file.
pub(super) fn read_definition(config: &Config, file: &str) -> Result<Definition, CliError> {
    let zone = config.scheduler.time_zone();
    let zone = zone.ok_or_else(|| CliError::Usage("scheduler.default_time_zone is unknown".to_owned()))?;
    let text = read_file("--file", file)?.into();
    let ReadSchedule {
        id,
        spec,
        state,
        revision,
    } = read_schedule_json(&text, &zone)
        .map_err(|failure| CliError::Usage(format!("--file: {}", failure.message)))?;
    check_recurrence(&spec, Format::Json)
        .map_err(|failure| CliError::Usage(format!("--file: {}", failure.message)))?;
    Ok(Definition {
        id,
        spec,
        state,
        revision,
    })
}

/// Checks when a schedule recurs, before anything is sent.
fn check(spec: &ScheduleSpec) -> Result<(), CliError> {
    let checked = check_recurrence(spec, Format::Protobuf);
    checked
        .map(drop)
        .map_err(|failure| CliError::Usage(failure.message))
}

impl TimingArgs {
    /// The definition without its job.
    pub(super) fn spec(&self) -> ScheduleSpec {
        let timing = match (&self.cron, self.every) {
            (Some(expression), _) => Some(Timing::Cron(CronTiming {
                expression: expression.clone(),
                zone: self.zone.clone().unwrap_or_default(),
                gap: match self.gap {
                    None => GapPolicy::Unspecified,
                    Some(Gap::Shift) => GapPolicy::Shift,
                    Some(Gap::Skip) => GapPolicy::Skip,
                }
                .into(),
                overlap: match self.overlap {
                    None => OverlapPolicy::Unspecified,
                    Some(Overlap::First) => OverlapPolicy::First,
                    Some(Overlap::Both) => OverlapPolicy::Both,
                }
                .into(),
            })),
            (None, Some(interval)) => Some(Timing::Every(IntervalTiming {
                interval: Some(to_duration(interval)),
                anchor: self.anchor.map(to_timestamp),
            })),
            (None, None) => None,
        };
        let policy = match self.misfire {
            None => MisfirePolicy::Unspecified,
            Some(MisfireName::Skip) => MisfirePolicy::Skip,
            Some(MisfireName::Once) => MisfirePolicy::Once,
            Some(MisfireName::All) => MisfirePolicy::All,
        };
        ScheduleSpec {
            timing,
            start: self.start.map(to_timestamp),
            end: self.end.map(to_timestamp),
            max_count: self.max_count.unwrap_or_default(),
            jitter: self.jitter.map(to_duration),
            misfire: Some(Misfire {
                policy: policy.into(),
                limit: self.misfire_limit.unwrap_or_default(),
                grace: self.grace.map(to_duration),
            }),
            job: None,
        }
    }
}
