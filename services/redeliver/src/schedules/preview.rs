//! `redeliver schedules preview`: the next occurrences. Those of a definition are computed here, without a scheduler.

use std::process::ExitCode;

use clap::{ArgGroup, Args};
use redeliver_client::Timestamp;
use redeliver_client::convert::to_timestamp;
use redeliver_client::messages::preview_schedule_request::Schedule as Previewed;
use redeliver_client::messages::{OccurrencePreview, OccurrenceReason, PreviewScheduleRequest};
use redeliver_core::{Clock as _, SystemClock};
use redeliver_recurrence::{Progress, Schedule, ScheduleId};
use redeliver_scheduler::api::OccurrenceView;
use redeliver_scheduler::request::{Format, check_recurrence};
use redeliver_scheduler::schedules::write_preview;
use serde_json::json;

use super::definition::{TimingArgs, default_zone, read_definition};
use super::{Scheduler, failure};
use crate::config::Config;
use crate::connection::CliError;
use crate::output::{Column, OutputArgs, Text as _, print_items};

#[derive(Args)]
#[command(group = ArgGroup::new("what").required(true).args(["cron", "every", "file", "id"]))]
pub(super) struct PreviewArgs {
    /// Show the occurrences of this schedule of the scheduler
    #[arg(long, value_name = "ID", conflicts_with_all = ["cron", "zone", "gap", "overlap", "every", "anchor", "start", "end",
        "max_count", "jitter", "misfire", "misfire_limit", "grace"])]
    id: Option<String>,
    /// File with a definition, in the JSON of REST; - for standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["cron", "zone", "gap", "overlap", "every", "anchor", "start", "end",
        "max_count", "jitter", "misfire", "misfire_limit", "grace"])]
    file: Option<String>,
    #[command(flatten)]
    timing: TimingArgs,
    /// Number of occurrences
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    count: u32,
    /// Show occurrences after this time (default: now)
    #[arg(long, value_name = "TIME", value_parser = crate::times::future)]
    after: Option<Timestamp>,
    #[command(flatten)]
    output: OutputArgs,
}

impl PreviewArgs {
    /// The occurrences of a definition.
    fn of_definition(&self, config: &Config) -> Result<Vec<OccurrencePreview>, CliError> {
        let spec = match &self.file {
            Some(file) => read_definition(config, file)?.spec,
            None => self.timing.spec()?,
        };
        let recurrence = check_recurrence(&spec, &default_zone(config)?, Format::Protobuf)
            .map_err(|failure| CliError::Usage(failure.message))?;
        // Nominal times do not depend on the id.
        let id: ScheduleId = "preview".parse().map_err(CliError::failed)?;
        let now = SystemClock.now();
        let after = self.after.unwrap_or(now);
        let count = usize::try_from(self.count).unwrap_or(usize::MAX);
        let occurrences =
            Schedule::new(id, recurrence).preview(Progress::new(now.min(after)), now, after, count);
        Ok(occurrences.iter().map(write_preview).collect())
    }
}

pub(super) async fn run(scheduler: Scheduler<'_>, args: &PreviewArgs) -> Result<ExitCode, CliError> {
    let occurrences = match &args.id {
        Some(id) => {
            let client = scheduler.connect().await?;
            let request = PreviewScheduleRequest {
                schedule: Some(Previewed::Id(id.clone())),
                after: args.after.map(to_timestamp),
                count: args.count,
            };
            let preview = client.preview(request).await;
            preview.map_err(|error| failure(id, error))?.occurrences
        }
        None => args.of_definition(scheduler.config)?,
    };
    let as_json = |occurrence: &OccurrencePreview| json!(OccurrenceView::from(occurrence.clone()));
    print_items(args.output.format, &COLUMNS, &occurrences, as_json);
    Ok(ExitCode::SUCCESS)
}

const COLUMNS: [Column<OccurrencePreview>; 4] = [
    ("nominal time", |occurrence, _| occurrence.nominal_time.text()),
    ("local time", |occurrence, _| occurrence.local_time.text()),
    ("latest due", |occurrence, _| {
        let latest = occurrence.latest_due_time.text();
        latest.filter(|_| occurrence.latest_due_time != occurrence.nominal_time)
    }),
    ("reason", |occurrence, _| match occurrence.reason() {
        OccurrenceReason::Unspecified | OccurrenceReason::Regular => None,
        OccurrenceReason::Anchor => "anchor".text(),
        OccurrenceReason::ShiftedByGap => {
            let missing = &occurrence.missing_local_time;
            Some(format!("shifted: {missing} does not exist"))
        }
        OccurrenceReason::FirstOfOverlap => "first of two".text(),
        OccurrenceReason::SecondOfOverlap => "second of two".text(),
    }),
];
