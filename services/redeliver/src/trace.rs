//! `redeliver trace`: the life of one record, or records by what is in them, from the inspector.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use redeliver_client::convert::{from_duration, time, to_timestamp};
use redeliver_client::messages::find_records_request::By;
use redeliver_client::messages::{
    FindRecordsRequest, FoundRecord, FoundRecords, NamedText, PipelineTrace, TraceEvent, TraceOutcome,
    TraceRecordRequest, TraceStep,
};
use redeliver_client::{Timestamp, WaitingClient, named_text};
use redeliver_core::{HumanDuration, JobId, Position};
use redeliver_dlq_inspector::id::parse_id;

use crate::connection::CliError;
use crate::dlq::{InspectorArgs, problem, with_inspector};
use crate::output::{
    Column, Format, Json, OutputArgs, Text, due, fields, in_one_line, object, print_items, print_json,
    rounded, table_of,
};
use crate::times::past;
use crate::waiting::with_progress;

#[derive(Args)]
pub(crate) struct TraceArgs {
    #[command(flatten)]
    what: What,
    /// Only in this pipeline (default: all that the caller may see)
    #[arg(
        short = 'p',
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true
    )]
    pipeline: String,
    /// Trace: search topics from their beginning, instead of 10 minutes before the timestamp of the record
    #[arg(long, conflicts_with_all = ["key", "header", "field"])]
    from_beginning: bool,
    /// Find: search topics from this time on, also for records that are complete (default: 1d)
    #[arg(long, value_name = "TIME", value_parser = past, conflicts_with_all = ["subject", "job"])]
    since: Option<Timestamp>,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    inspector: InspectorArgs,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct What {
    /// Position of any copy of the record: topic/partition/offset in any topic of the pipeline; or the id of a job
    #[arg(value_name = "POSITION|JOB", value_parser = subject)]
    subject: Option<Subject>,
    /// The id of a job
    #[arg(long, value_name = "ID")]
    job: Option<JobId>,
    /// Find records with this key
    #[arg(long)]
    key: Option<String>,
    /// Find records with this header
    #[arg(long, value_name = "NAME=VALUE", value_parser = named)]
    header: Option<NamedText>,
    /// Find records whose JSON value has this field, such as /order/id=4711
    #[arg(long, value_name = "/POINTER=VALUE", value_parser = named)]
    field: Option<NamedText>,
}

/// What to trace.
#[derive(Clone)]
enum Subject {
    Position(Position),
    Job(JobId),
}

fn subject(text: &str) -> Result<Subject, String> {
    if let Ok(id) = text.parse() {
        return Ok(Subject::Job(id));
    }
    let position = parse_id(text).map(Subject::Position);
    position.map_err(|error| format!("{error}, and not the id of a job"))
}

fn named(text: &str) -> Result<NamedText, String> {
    named_text(text).ok_or_else(|| "must have a name, = and a value".to_owned())
}

impl What {
    /// What the records have that are to be found.
    fn by(&self) -> Option<By> {
        let Self {
            key, header, field, ..
        } = self;
        let key = key.clone().map(By::Key);
        key.or_else(|| header.clone().map(By::Header))
            .or_else(|| field.clone().map(By::Field))
    }
}

pub(crate) fn main(args: &TraceArgs) -> ExitCode {
    with_inspector(&args.inspector, None, async |endpoint, service| {
        let client = WaitingClient::connect(endpoint).await;
        let client = client.map_err(|error| service.failure(error))?;
        match args.what.by() {
            Some(by) => find(&client, args, by).await,
            None => trace(&client, args).await,
        }
    })
}

async fn trace(client: &WaitingClient, args: &TraceArgs) -> Result<ExitCode, CliError> {
    let job = args.what.job.map(Subject::Job);
    let (position, job_id) = match args.what.subject.clone().or(job) {
        Some(Subject::Position(position)) => (Some((&position).into()), String::new()),
        Some(Subject::Job(id)) => (None, id.to_string()),
        None => (None, String::new()),
    };
    let request = TraceRecordRequest {
        position,
        job_id,
        pipeline: args.pipeline.clone(),
        from_beginning: args.from_beginning,
    };
    let traces = with_progress(async |progress| client.trace(request, progress).await).await?;
    match args.output.format {
        Format::Table => {
            let texts: Vec<String> = traces.iter().map(as_text).collect();
            crate::say(texts.join("\n\n"));
        }
        format => print_items(format, &[], &traces, |trace| object(trace).into()),
    }
    Ok(ExitCode::SUCCESS)
}

async fn find(client: &WaitingClient, args: &TraceArgs, by: By) -> Result<ExitCode, CliError> {
    let request = FindRecordsRequest {
        pipeline: args.pipeline.clone(),
        by: Some(by),
        since: args.since.map(to_timestamp),
    };
    let found = with_progress(async |progress| client.find(request, progress).await).await?;
    match args.output.format {
        Format::Json => print_json(Json::from(object(&found))),
        format => print_items(format, &FOUND, &found.records, |record| object(record).into()),
    }
    if let (Format::Table, Some(since)) = (args.output.format, found.searched_since.text()) {
        crate::say(format_args!(
            "searched since {since}, and what waits or is dead; --since changes it"
        ));
    }
    for gap in gaps(&found) {
        eprintln!("incomplete: {}", in_one_line(&gap));
    }
    Ok(ExitCode::SUCCESS)
}

fn gaps(found: &FoundRecords) -> Vec<String> {
    let mut gaps = found.gaps.clone();
    gaps.extend(found.completeness.as_ref().and_then(problem));
    if found.truncated {
        gaps.push(format!(
            "more records match; these are the newest {}",
            found.records.len()
        ));
    }
    gaps
}

const FOUND: [Column<FoundRecord>; 9] = [
    ("now", |record, _| record.outcome().name()),
    ("pipeline", |record, _| record.pipeline.text()),
    ("place", |record, _| record.place.text()),
    ("position", |record, _| record.position.text()),
    ("origin", |record, _| record.origin.text()),
    ("time", |record, _| record.time.text()),
    ("due", |record, now| due(time(record.due_at), now)),
    ("attempts", |record, _| record.attempts.text()),
    ("code", |record, _| record.error_code.short(40)),
];

fn as_text(trace: &PipelineTrace) -> String {
    let now = match trace.outcome() {
        TraceOutcome::New => "not processed yet".to_owned(),
        TraceOutcome::Waits => match trace.next_due.text() {
            Some(due) => format!("waits until {due}"),
            None => "waits".to_owned(),
        },
        TraceOutcome::Due => "due, and not processed yet".to_owned(),
        TraceOutcome::Succeeded => "succeeded".to_owned(),
        TraceOutcome::Dead => "dead".to_owned(),
        TraceOutcome::Discarded => "discarded".to_owned(),
        TraceOutcome::Redriven => "redriven to another topic".to_owned(),
        TraceOutcome::Unknown | TraceOutcome::Unspecified => "unknown".to_owned(),
    };
    let mut text = fields(&[
        ("pipeline", &trace.pipeline),
        ("origin", &trace.origin),
        ("timestamp", &trace.origin_timestamp),
        ("now", &now),
    ]);
    text.push('\n');
    text += &table_of(&COLUMNS, &trace.steps);
    for gap in &trace.gaps {
        let _ = write!(text, "\nunknown: {}", in_one_line(gap));
    }
    if trace.truncated {
        text += "\nthere are more steps, which are older";
    }
    if let Some(since) = trace.searched_since.text() {
        let _ = write!(
            text,
            "\nsearched since {since}; use --from-beginning to search everything"
        );
    }
    text
}

const COLUMNS: [Column<TraceStep>; 7] = [
    ("time", |step, _| step.time.text()),
    ("event", |step, _| match (step.event(), step.redrives) {
        (TraceEvent::Redriven, redrives) if redrives > 1 => Some(format!("redriven ({redrives})")),
        (event, _) => event.name(),
    }),
    ("place", |step, _| step.place.text()),
    ("attempts", |step, _| step.attempts.text()),
    ("reason", |step, _| reason(step).short(100)),
    ("wait", |step, _| {
        let wait = from_duration(step.wait.as_ref()?)?.duration();
        Some(shown_wait(wait))
    }),
    ("position", |step, _| step.position.text()),
];

/// Why a step was taken: the failure, or who has decided it.
fn reason(step: &TraceStep) -> String {
    let failure = [&step.error_class, &step.error_code, &step.error_message];
    let mut parts: Vec<String> = failure.into_iter().filter_map(Text::text).collect();
    let mut push = |word: &str, text: Option<String>| parts.extend(text.map(|text| format!("{word} {text}")));
    // Where the copy is, its position says.
    push(
        "to",
        step.destination.text().filter(|_| step.place == "dead-letters"),
    );
    push("edited", step.edited.join(", ").text());
    push("job", step.redrive_id.text());
    push("by", step.by.text());
    let decided = parts.join(" ");
    match step.reason.text() {
        Some(reason) => format!("{decided}: {reason}"),
        None => decided,
    }
}

/// Rounded if it is long: jitter makes odd numbers of milliseconds.
fn shown_wait(duration: Duration) -> String {
    if duration < Duration::from_secs(10) {
        HumanDuration::from(duration).to_string()
    } else {
        rounded(duration)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(event: TraceEvent, place: &str) -> TraceStep {
        TraceStep {
            event: event.into(),
            place: place.to_owned(),
            attempts: 1,
            ..TraceStep::default()
        }
    }

    #[test]
    fn a_reason_is_failure_or_decision() {
        let text = str::to_owned;
        let failed = TraceStep {
            error_class: text("transient"),
            error_code: text("http.503"),
            error_message: text("no answer"),
            ..step(TraceEvent::Waits, "5s")
        };
        assert_eq!(reason(&failed), "transient http.503 no answer");
        let redriven = |place, reason| TraceStep {
            redrive_id: text("01a212ee742fea04"),
            by: text("ann"),
            reason,
            destination: text("orders-retry-due"),
            ..step(TraceEvent::Redriven, place)
        };
        assert_eq!(
            reason(&redriven("due", text("INC-17"))),
            "job 01a212ee742fea04 by ann: INC-17"
        );
        let edited = TraceStep {
            edited: vec!["value".to_owned(), "headers".to_owned()],
            ..redriven("due", text("INC-17"))
        };
        assert_eq!(
            reason(&edited),
            "edited value, headers job 01a212ee742fea04 by ann: INC-17"
        );
        // No other field tells where it is.
        assert_eq!(
            reason(&redriven("dead-letters", String::new())),
            "to orders-retry-due job 01a212ee742fea04 by ann"
        );
    }

    #[test]
    fn a_long_wait_is_rounded() {
        for (millis, expected) in [
            (495, "495ms"),
            (5_000, "5s"),
            (3_706_894, "61m"),
            (9_000_000, "2h"),
        ] {
            assert_eq!(shown_wait(Duration::from_millis(millis)), expected);
        }
    }
}
