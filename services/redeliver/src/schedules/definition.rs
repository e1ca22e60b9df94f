//! The definition of a schedule, from flags or from a file.

use clap::{ArgGroup, Args, ValueEnum};
use jiff::tz::TimeZone;
use redeliver_client::Timestamp;
use redeliver_client::messages::schedule_spec::Timing;
use redeliver_client::messages::{
    CronTiming, GapPolicy, Header, IntervalTiming, JobTemplate, MisfirePolicy, OverlapPolicy, ScheduleSpec,
    ScheduleState,
};
use redeliver_core::HumanDuration;
use redeliver_proto::convert::{to_duration, to_priority, to_timestamp};
use redeliver_scheduler::request::{Format, ReadSchedule, check_recurrence, other_state, read_schedule_json};
use redeliver_scheduler::schedules::{read_spec, write_spec};

use crate::config::Config;
use crate::connection::CliError;
use crate::record::{RecordArgs, read_file};

/// When a schedule recurs.
#[derive(Args)]
#[group(skip)]
pub(super) struct TimingArgs {
    /// Cron expression, such as `30 2 * * *`: five fields, six with the second first, or @hourly, @daily, @weekly, @monthly, @yearly
    #[arg(long, value_name = "EXPRESSION")]
    cron: Option<String>,
    /// Time zone of --cron, such as Europe/Berlin (default: scheduler.default_time_zone)
    #[arg(long, value_name = "NAME", conflicts_with = "every")]
    zone: Option<String>,
    /// Local times that do not exist on a day: shift (due later, by the length of the gap; default) or skip
    #[arg(
        long,
        value_name = "POLICY",
        hide_possible_values = true,
        conflicts_with = "every"
    )]
    gap: Option<Gap>,
    /// Local times that occur twice on a day: first or both (default: both if --cron selects every hour, or else first)
    #[arg(
        long,
        value_name = "POLICY",
        hide_possible_values = true,
        conflicts_with = "every"
    )]
    overlap: Option<Overlap>,
    /// Interval, such as 5m
    #[arg(long, value_name = "DURATION", conflicts_with = "cron")]
    every: Option<HumanDuration>,
    /// Time of one occurrence of --every (default: --start, or else 1970-01-01T00:00:00Z)
    #[arg(long, value_name = "TIME", conflicts_with = "cron", value_parser = crate::times::future)]
    anchor: Option<Timestamp>,
    /// Earliest nominal time
    #[arg(long, value_name = "TIME", value_parser = crate::times::future)]
    start: Option<Timestamp>,
    /// Latest nominal time
    #[arg(long, value_name = "TIME", value_parser = crate::times::future)]
    end: Option<Timestamp>,
    /// Number of occurrences to dispatch (default: unlimited)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    max_count: Option<u64>,
    /// Maximum random delay of an occurrence, at most 1d
    #[arg(long, value_name = "DURATION")]
    jitter: Option<HumanDuration>,
    /// Missed occurrences: skip, once (dispatch the latest one; default) or all
    #[arg(long, value_name = "POLICY", hide_possible_values = true)]
    misfire: Option<MisfireName>,
    /// With --misfire all: maximum missed occurrences to dispatch, 1 to 1000
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000), required_if_eq("misfire", "all"))]
    misfire_limit: Option<u32>,
    /// Maximum lateness of an occurrence before it is missed (default: 60s)
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
    /// File with the definition, in the JSON of REST; - for standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["app", "cron", "zone", "gap", "overlap", "every", "anchor", "start",
        "end", "max_count", "jitter", "misfire", "misfire_limit", "grace", "data", "data_file", "key", "headers", "priority",
        "expire_after"])]
    file: Option<String>,
    #[command(flatten)]
    timing: TimingArgs,
    #[command(flatten)]
    record: RecordArgs,
}

/// What of a schedule changes. The rest stays.
#[derive(Args)]
#[group(skip)]
#[command(group = ArgGroup::new("what").required(true).multiple(true).args(["app", "cron", "zone", "gap", "overlap", "every",
    "anchor", "start", "end", "max_count", "jitter", "misfire", "misfire_limit", "grace", "data", "data_file", "key", "headers",
    "removed_headers", "priority", "expire_after"]))]
pub(super) struct ChangesArgs {
    /// Application, one of scheduler.apps
    #[arg(long, value_name = "NAME")]
    app: Option<String>,
    /// Name of headers to remove from the record; can be repeated
    #[arg(long = "remove-header", value_name = "NAME")]
    removed_headers: Vec<String>,
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
                let mut spec = self.timing.spec()?;
                let job = spec.job.insert(JobTemplate {
                    app: self.app.clone().unwrap_or_default(),
                    ..JobTemplate::default()
                });
                self.record.change(job)?;
                check(&spec, &default_zone(config)?)?;
                Ok(Definition {
                    id: None,
                    spec,
                    state: None,
                    revision: None,
                })
            }
        }
    }
}

impl ChangesArgs {
    /// Changes only the fields that the flags name.
    pub(super) fn apply(&self, spec: &mut ScheduleSpec, zone: &TimeZone) -> Result<(), CliError> {
        self.timing.change(spec)?;
        let job = spec.job.get_or_insert_default();
        set(&mut job.app, self.app.clone());
        job.headers
            .retain(|header| !self.removed_headers.contains(&header.name));
        self.record.change(job)?;
        check(spec, zone)
    }
}

impl RecordArgs {
    fn change(&self, job: &mut JobTemplate) -> Result<(), CliError> {
        set(
            &mut job.priority,
            self.priority.map(|priority| to_priority(priority).into()),
        );
        set(&mut job.data, self.data()?.map(Into::into));
        set_some(&mut job.key, self.key.clone().map(|key| key.into_bytes().into()));
        set_some(&mut job.expire_after, self.expire_after.map(to_duration));
        job.headers
            .retain(|header| self.headers.iter().all(|(name, _)| *name != header.name));
        job.headers
            .extend(self.headers.iter().map(|(name, value)| Header {
                name: name.clone(),
                value: Some(value.clone().into_bytes().into()),
            }));
        Ok(())
    }
}

fn set<T>(field: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *field = value;
    }
}

fn set_some<T>(field: &mut Option<T>, value: Option<T>) {
    if value.is_some() {
        *field = value;
    }
}

/// The zone of cron expressions and times that name none.
pub(super) fn default_zone(config: &Config) -> Result<TimeZone, CliError> {
    let zone = config.scheduler.time_zone();
    zone.ok_or_else(|| CliError::Usage("scheduler.default_time_zone is unknown".to_owned()))
}

/// The definition in a file.
pub(super) fn read_definition(config: &Config, file: &str) -> Result<Definition, CliError> {
    let zone = default_zone(config)?;
    let text = read_file("--file", file)?.into();
    let ReadSchedule {
        id,
        spec,
        state,
        revision,
    } = read_schedule_json(&text, &zone)
        .map_err(|failure| CliError::Usage(format!("--file: {}", failure.message)))?;
    check_recurrence(&spec, &zone, Format::Json)
        .map_err(|failure| CliError::Usage(format!("--file: {}", failure.message)))?;
    Ok(Definition {
        id,
        spec,
        state,
        revision,
    })
}

/// Checks when a schedule recurs, before anything is sent.
fn check(spec: &ScheduleSpec, zone: &TimeZone) -> Result<(), CliError> {
    let checked = check_recurrence(spec, zone, Format::Protobuf);
    checked
        .map(drop)
        .map_err(|failure| CliError::Usage(failure.message))
}

impl TimingArgs {
    /// The definition without its job.
    pub(super) fn spec(&self) -> Result<ScheduleSpec, CliError> {
        let mut spec = ScheduleSpec::default();
        self.change(&mut spec)?;
        Ok(spec)
    }

    /// Changes only the fields that the flags name.
    fn change(&self, spec: &mut ScheduleSpec) -> Result<(), CliError> {
        let timing = spec.timing.take();
        spec.timing = match (timing, &self.cron, self.every) {
            (Some(Timing::Every(_)) | None, Some(_), _) => Some(Timing::Cron(CronTiming::default())),
            (Some(Timing::Cron(_)) | None, _, Some(_)) => Some(Timing::Every(IntervalTiming::default())),
            (timing, _, _) => timing,
        };
        match &mut spec.timing {
            Some(Timing::Cron(cron)) => self.change_cron(cron)?,
            Some(Timing::Every(every)) => self.change_interval(every)?,
            None => {}
        }
        set_some(&mut spec.start, self.start.map(to_timestamp));
        set_some(&mut spec.end, self.end.map(to_timestamp));
        set_some(&mut spec.max_count, self.max_count);
        set_some(&mut spec.jitter, self.jitter.map(to_duration));
        let misfire = spec.misfire.get_or_insert_default();
        if let Some(policy) = self.misfire {
            let policy = match policy {
                MisfireName::Skip => MisfirePolicy::Skip,
                MisfireName::Once => MisfirePolicy::Once,
                MisfireName::All => MisfirePolicy::All,
            };
            // The limit is that of the policy before.
            (misfire.policy, misfire.limit) = (policy.into(), None);
        }
        set_some(&mut misfire.limit, self.misfire_limit);
        set_some(&mut misfire.grace, self.grace.map(to_duration));
        Ok(())
    }

    fn change_cron(&self, cron: &mut CronTiming) -> Result<(), CliError> {
        if self.anchor.is_some() {
            let problem = "--anchor needs --every: the schedule has a cron expression";
            return Err(CliError::Usage(problem.to_owned()));
        }
        if self.cron.is_some() && has_default_overlap(cron) {
            // That of another expression may differ.
            cron.overlap = OverlapPolicy::Unspecified.into();
        }
        set(&mut cron.expression, self.cron.clone());
        set_some(&mut cron.zone, self.zone.clone());
        if let Some(gap) = self.gap {
            let gap = match gap {
                Gap::Shift => GapPolicy::Shift,
                Gap::Skip => GapPolicy::Skip,
            };
            cron.gap = gap.into();
        }
        if let Some(overlap) = self.overlap {
            let overlap = match overlap {
                Overlap::First => OverlapPolicy::First,
                Overlap::Both => OverlapPolicy::Both,
            };
            cron.overlap = overlap.into();
        }
        Ok(())
    }

    fn change_interval(&self, every: &mut IntervalTiming) -> Result<(), CliError> {
        if self.zone.is_some() || self.gap.is_some() || self.overlap.is_some() {
            let problem = "--zone, --gap and --overlap need --cron: the schedule has an interval";
            return Err(CliError::Usage(problem.to_owned()));
        }
        set_some(&mut every.interval, self.every.map(to_duration));
        set_some(&mut every.anchor, self.anchor.map(to_timestamp));
        Ok(())
    }
}

/// Whether the policy is the one that the expression has by default, which the scheduler fills in.
fn has_default_overlap(cron: &CronTiming) -> bool {
    let unspecified = CronTiming {
        overlap: OverlapPolicy::Unspecified.into(),
        ..cron.clone()
    };
    let spec = ScheduleSpec {
        timing: Some(Timing::Cron(unspecified)),
        ..ScheduleSpec::default()
    };
    let filled_in = read_spec(&spec).map(|recurrence| write_spec(&recurrence, None).timing);
    matches!(filled_in, Ok(Some(Timing::Cron(filled_in))) if filled_in.overlap == cron.overlap)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use redeliver_client::messages::Misfire;

    use super::*;

    #[derive(Parser)]
    struct Set {
        #[command(flatten)]
        changes: ChangesArgs,
    }

    fn changed(spec: &ScheduleSpec, flags: &[&str]) -> Result<ScheduleSpec, String> {
        let all = ["set"].iter().chain(flags);
        let set = Set::try_parse_from(all).map_err(|error| error.to_string())?;
        let mut spec = spec.clone();
        match set.changes.apply(&mut spec, &TimeZone::UTC) {
            Ok(()) => Ok(spec),
            Err(CliError::Usage(problem)) => Err(problem),
            Err(_) => Err("another error".to_owned()),
        }
    }

    fn header(name: &str, value: &'static str) -> Header {
        Header {
            name: name.to_owned(),
            value: Some(value.as_bytes().into()),
        }
    }

    fn cron(zone: &str) -> Timing {
        Timing::Cron(CronTiming {
            expression: "30 2 * * *".to_owned(),
            zone: Some(zone.to_owned()),
            gap: GapPolicy::Skip.into(),
            overlap: OverlapPolicy::Both.into(),
        })
    }

    fn full() -> ScheduleSpec {
        let at = |time: &str| Some(to_timestamp(time.parse().unwrap()));
        let seconds = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
        ScheduleSpec {
            timing: Some(cron("Europe/Berlin")),
            start: at("2027-01-01T00:00:00Z"),
            end: at("2028-01-01T00:00:00Z"),
            max_count: Some(7),
            jitter: seconds(60),
            misfire: Some(Misfire {
                policy: MisfirePolicy::All.into(),
                limit: Some(5),
                grace: seconds(90),
            }),
            job: Some(JobTemplate {
                app: "sms".to_owned(),
                priority: redeliver_client::messages::Priority::High.into(),
                data: bytes::Bytes::from_static(b"\xff\0"),
                key: Some(bytes::Bytes::from_static(b"\xfe")),
                headers: vec![header("a", "1"), header("b", "2"), header("a", "3")],
                expire_after: seconds(3_600),
            }),
        }
    }

    #[test]
    fn change_keeps_what_is_not_named() {
        let full = full();
        let with = |change: &dyn Fn(&mut ScheduleSpec)| {
            let mut spec = full.clone();
            change(&mut spec);
            Ok(spec)
        };
        let with_job = |change: &dyn Fn(&mut JobTemplate)| with(&|spec| change(spec.job.as_mut().unwrap()));
        let zone = changed(&full, &["--zone", "Europe/London"]);
        assert_eq!(zone, with(&|spec| spec.timing = Some(cron("Europe/London"))));
        assert_eq!(
            changed(&full, &["--max-count", "8"]),
            with(&|spec| spec.max_count = Some(8))
        );
        assert_eq!(
            changed(&full, &["--data", "x"]),
            with_job(&|job| job.data = "x".into())
        );
        assert_eq!(
            changed(&full, &["--app", "mail"]),
            with_job(&|job| job.app = "mail".to_owned())
        );
        assert_eq!(
            changed(&full, &["--header", "a=4", "--remove-header", "b"]),
            with_job(&|job| job.headers = vec![header("a", "4")])
        );
        let once = with(&|spec| {
            let misfire = spec.misfire.as_mut().unwrap();
            (misfire.policy, misfire.limit) = (MisfirePolicy::Once.into(), None);
        });
        assert_eq!(changed(&full, &["--misfire", "once"]), once);
        let every = changed(&full, &["--every", "2h"]).unwrap();
        let interval = IntervalTiming {
            interval: Some(prost_types::Duration {
                seconds: 7_200,
                nanos: 0,
            }),
            anchor: None,
        };
        assert_eq!(
            Ok(every.clone()),
            with(&|spec| spec.timing = Some(Timing::Every(interval)))
        );
        let back = changed(&every, &["--cron", "@daily"]).unwrap();
        assert_eq!(back.job, full.job);
    }

    #[test]
    fn new_expression_has_default_overlap() {
        let overlap = |expression: &str, overlap: OverlapPolicy, flags: &[&str]| {
            let timing = Timing::Cron(CronTiming {
                expression: expression.to_owned(),
                overlap: overlap.into(),
                ..CronTiming::default()
            });
            let spec = ScheduleSpec {
                timing: Some(timing),
                ..full()
            };
            match changed(&spec, flags).unwrap().timing {
                Some(Timing::Cron(cron)) => cron.overlap(),
                other => panic!("{other:?}"),
            }
        };
        use OverlapPolicy::{Both, First, Unspecified};
        let nightly = ["--cron", "30 2 * * *"];
        assert_eq!(overlap("@hourly", Both, &nightly), Unspecified);
        assert_eq!(overlap("0 3 * * *", First, &["--cron", "@hourly"]), Unspecified);
        // One that the user has chosen.
        assert_eq!(overlap("@hourly", First, &nightly), First);
        assert_eq!(overlap("0 3 * * *", Both, &nightly), Both);
        let both = [nightly[0], nightly[1], "--overlap", "both"];
        assert_eq!(overlap("@hourly", Both, &both), Both);
        assert_eq!(overlap("@hourly", Both, &["--zone", "Europe/Berlin"]), Both);
    }

    #[test]
    fn flag_of_other_timing_is_refused() {
        let every = changed(&full(), &["--every", "2h"]).unwrap();
        let refused = changed(&every, &["--zone", "UTC"]).unwrap_err();
        assert!(refused.contains("need --cron"), "{refused}");
        let refused = changed(&full(), &["--anchor", "2027-01-01T00:00:00Z"]).unwrap_err();
        assert!(refused.contains("needs --every"), "{refused}");
        let refused = changed(&full(), &[]).unwrap_err();
        assert!(refused.contains("required"), "{refused}");
    }
}
