//! `redeliver upcoming`: what becomes due soon: jobs and schedules, from the scheduler, and retries, from the inspector.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use redeliver_client::convert::time;
use redeliver_client::messages::preview_schedule_request::Schedule as Previewed;
use redeliver_client::messages::{
    Application, Control, GetWaitingStatsRequest, ListSchedulesRequest, PreviewScheduleRequest, Schedule,
    Stats, WaitingPlace,
};
use redeliver_client::{
    ClientError, Connection, ControlClient, JobClient, ScheduleClient, Timestamp, WaitingClient,
};
use redeliver_core::error_chain::error_chain;
use redeliver_core::{Clock as _, HumanDuration, SystemClock};
use redeliver_runtime::cli::EXIT_FAILURE;
use redeliver_service::queues::needs_scheduler;
use serde_json::json;

use crate::config::Config;
use crate::connection::{CliError, ServicesArgs, conclude};
use crate::controls::is_paused;
use crate::output::{Column, Json, OutputArgs, Text as _, due, in_one_line, print_items};
use crate::waiting::with_progress;

const MINUTE: Duration = Duration::from_secs(60);
/// The longest time for which the inspector counts retries.
const MAX_SPAN: Duration = Duration::from_secs(120 * 60);
/// How many applications and schedules are counted, each with a call.
const MAX_CALLS: usize = 100;
/// The limit of the scheduler.
const MAX_OCCURRENCES: u32 = 1_000;

#[derive(Args)]
pub(crate) struct UpcomingArgs {
    /// How far to look ahead, 1m to 2h; rounded up to whole minutes
    #[arg(long = "for", value_name = "DURATION", default_value = "10m", value_parser = span)]
    span: HumanDuration,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    services: ServicesArgs,
}

fn span(text: &str) -> Result<HumanDuration, String> {
    let span: HumanDuration = text.parse().map_err(|error| format!("{error}"))?;
    if !(MINUTE..=MAX_SPAN).contains(&span.duration()) {
        return Err(format!("`{text}` is not from 1m to 2h"));
    }
    Ok(span)
}

/// Something with a due time.
#[derive(Clone, Debug, PartialEq)]
struct Row {
    /// `jobs`, `schedule` or `retries`.
    what: &'static str,
    /// The application, the schedule, or the pipeline and the place.
    name: String,
    /// How many are due already.
    due: u64,
    /// How many become due.
    upcoming: u64,
    /// When the first of all of them is due, which can be in the past.
    next: Option<Timestamp>,
    /// What holds it up.
    problem: String,
}

const COLUMNS: [Column<Row>; 6] = [
    ("what", |row, _| row.what.text()),
    ("name", |row, _| row.name.text()),
    ("due now", |row, _| row.due.text()),
    ("upcoming", |row, _| row.upcoming.text()),
    ("next", |row, now| due(row.next, now)),
    ("problem", |row, _| row.problem.short(60)),
];

impl Row {
    fn of_jobs(app: &Application, stats: &Stats) -> Self {
        Self {
            what: "jobs",
            name: app.name.clone(),
            due: stats.due,
            upcoming: stats.per_minute.iter().sum(),
            next: time(stats.next_due),
            problem: problem(app.paused.unwrap_or_default()),
        }
    }

    fn of_schedule(schedule: &Schedule, upcoming: u64) -> Self {
        Self {
            what: "schedule",
            name: schedule.id.clone(),
            due: 0,
            upcoming,
            next: time(schedule.next_due_time),
            problem: schedule.problem.clone(),
        }
    }

    fn of_retries(place: &WaitingPlace, controls: &[Control]) -> Self {
        let counts = place.counts.clone().unwrap_or_default();
        let (pipeline, tier) = (&place.pipeline, &place.place);
        let names = [
            format!("pipeline/{pipeline}"),
            format!("tier/{pipeline}/{tier}"),
            format!("tier/{tier}"),
        ];
        let is_held = |control: &Control| is_paused(control) && names.contains(&control.name);
        Self {
            what: "retries",
            name: format!("{pipeline}/{tier}"),
            due: counts.overdue,
            upcoming: counts.forecast.unwrap_or_default().per_minute.iter().sum(),
            next: time(counts.next_due),
            problem: problem(controls.iter().any(is_held)),
        }
    }

    fn json(&self) -> Json {
        json!({
            "what": self.what,
            "name": self.name,
            "due": self.due,
            "upcoming": self.upcoming,
            "next_due": self.next.text(),
            "problem": self.problem.text(),
        })
    }
}

fn problem(is_paused: bool) -> String {
    if is_paused { "paused" } else { "" }.to_owned()
}

pub(crate) fn main(args: &UpcomingArgs) -> ExitCode {
    let config: Config = match args.services.common.configure(|_| Ok(())) {
        Ok(config) => config,
        Err(code) => return code,
    };
    conclude(async {
        let minutes = args.span.duration().as_millis().div_ceil(MINUTE.as_millis());
        let minutes = u32::try_from(minutes).unwrap_or(u32::MAX);
        let until = SystemClock.now().after(MINUTE * minutes);
        let (of_scheduler, of_inspector) = tokio::join!(
            of_scheduler(&config, &args.services, minutes, until),
            of_inspector(&config, &args.services, minutes)
        );
        let (mut rows, mut is_whole) = (Vec::new(), true);
        for (part, of_part) in [("jobs and schedules", of_scheduler), ("retries", of_inspector)] {
            match of_part {
                Ok(of_part) => rows.extend(of_part),
                Err(error) => {
                    eprintln!("{part} are missing: {}", in_one_line(&error_chain(&error)));
                    is_whole = false;
                }
            }
        }
        rows.retain(|row| row.due > 0 || row.upcoming > 0);
        rows.sort_by_key(|row| (row.next, row.what));
        print_items(args.output.format, &COLUMNS, &rows, Row::json);
        Ok(ExitCode::from(if is_whole { 0 } else { EXIT_FAILURE }))
    })
}

async fn of_scheduler(
    config: &Config,
    services: &ServicesArgs,
    minutes: u32,
    until: Timestamp,
) -> Result<Vec<Row>, CliError> {
    if services.scheduler.is_none() && !needs_scheduler(config) {
        return Ok(Vec::new());
    }
    let connection = services.scheduler(config).await?;
    let (jobs, schedules) = tokio::join!(jobs(&connection, minutes), schedules(&connection, until));
    Ok([jobs?, schedules?].concat())
}

async fn of_inspector(config: &Config, services: &ServicesArgs, minutes: u32) -> Result<Vec<Row>, CliError> {
    Ok(retries(&services.inspector(config).await?, minutes).await?)
}

/// By application: long waits of pipelines are retries.
async fn jobs(connection: &Connection, minutes: u32) -> Result<Vec<Row>, ClientError> {
    let client = JobClient::new(connection);
    let apps = client.applications().await?;
    let waiting: Vec<&Application> = apps.iter().filter(|app| app.next_due.is_some()).collect();
    let mut rows = Vec::new();
    for app in waiting.iter().take(MAX_CALLS) {
        rows.push(Row::of_jobs(app, &client.stats(Some(&app.name), minutes).await?));
    }
    if waiting.len() > MAX_CALLS {
        eprintln!(
            "only the first {MAX_CALLS} of {} applications are counted",
            waiting.len()
        );
    }
    Ok(rows)
}

/// Those with an occurrence until this time.
async fn schedules(connection: &Connection, until: Timestamp) -> Result<Vec<Row>, ClientError> {
    let client = ScheduleClient::new(connection);
    let mut rows = Vec::new();
    let mut page_token = String::new();
    loop {
        let request = ListSchedulesRequest {
            page_token,
            ..ListSchedulesRequest::default()
        };
        let page = client.list(request).await?;
        // By their next occurrence; those without one are the last ones.
        for schedule in &page.schedules {
            if time(schedule.next_due_time).is_none_or(|next| next > until) {
                return Ok(rows);
            }
            if rows.len() == MAX_CALLS {
                eprintln!("only the next {MAX_CALLS} schedules are counted");
                return Ok(rows);
            }
            let request = PreviewScheduleRequest {
                schedule: Some(Previewed::Id(schedule.id.clone())),
                count: MAX_OCCURRENCES,
                after: None,
            };
            let occurrences = client.preview(request).await?.occurrences;
            let times = occurrences
                .iter()
                .filter_map(|occurrence| time(occurrence.nominal_time));
            let upcoming = times.filter(|time| *time <= until).count() as u64;
            // The next one can be due already.
            rows.push(Row::of_schedule(schedule, upcoming.max(1)));
        }
        if page.next_page_token.is_empty() {
            return Ok(rows);
        }
        page_token = page.next_page_token;
    }
}

async fn retries(connection: &Connection, minutes: u32) -> Result<Vec<Row>, ClientError> {
    let request = GetWaitingStatsRequest {
        minutes,
        ..GetWaitingStatsRequest::default()
    };
    let client = WaitingClient::new(connection);
    let stats = with_progress(async |progress| client.stats(request, progress).await).await?;
    let controls = ControlClient::new(connection).list().await;
    let controls = controls.unwrap_or_else(|error| {
        eprintln!("what is paused is unknown: {}", in_one_line(&error_chain(&error)));
        Vec::new()
    });
    Ok(stats
        .places
        .iter()
        .map(|place| Row::of_retries(place, &controls))
        .collect())
}

#[cfg(test)]
mod tests {
    use redeliver_client::messages::control::Effective;
    use redeliver_client::messages::{
        PipelineControl, RunState, TierControl, WaitingCounts, WaitingForecast,
    };

    use super::*;

    #[test]
    fn spans_are_limited() {
        for (text, valid) in [
            ("1m", true),
            ("2h", true),
            ("59s", false),
            ("121m", false),
            ("x", false),
        ] {
            assert_eq!(span(text).is_ok(), valid, "{text}");
        }
    }

    #[test]
    fn paused_tiers_hold_up_retries() {
        let place = WaitingPlace {
            pipeline: "orders".to_owned(),
            place: "30s".to_owned(),
            counts: Some(WaitingCounts {
                overdue: 2,
                forecast: Some(WaitingForecast {
                    per_minute: vec![3, 0, 4],
                    later: 9,
                }),
                ..WaitingCounts::default()
            }),
        };
        let control = |name: &str, state: RunState| Control {
            name: name.to_owned(),
            effective: Some(match name.starts_with("tier/") {
                true => Effective::EffectiveTier(TierControl {
                    state: state.into(),
                    ..TierControl::default()
                }),
                false => Effective::EffectivePipeline(PipelineControl {
                    state: state.into(),
                    ..PipelineControl::default()
                }),
            }),
            ..Control::default()
        };
        for (name, state, expected) in [
            ("tier/30s", RunState::Paused, "paused"),
            ("tier/orders/30s", RunState::Paused, "paused"),
            ("pipeline/orders", RunState::Paused, "paused"),
            ("pipeline/orders", RunState::Running, ""),
            ("tier/other/30s", RunState::Paused, ""),
        ] {
            let row = Row::of_retries(&place, &[control(name, state)]);
            assert_eq!((row.due, row.upcoming, &*row.problem), (2, 7, expected), "{name}");
        }
    }
}
