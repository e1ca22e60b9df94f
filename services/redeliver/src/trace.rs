//! `redeliver trace`: the life of one record, from the inspector.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use redeliver_client::WaitingClient;
use redeliver_client::convert::from_duration;
use redeliver_client::messages::{PipelineTrace, TraceEvent, TraceOutcome, TraceRecordRequest, TraceStep};
use redeliver_core::{HumanDuration, JobId, Position};
use redeliver_dlq_inspector::id::parse_id;

use crate::connection::CliError;
use crate::dlq::{InspectorArgs, with_inspector};
use crate::output::{
    Column, Format, OutputArgs, Text, fields, in_one_line, object, print_items, rounded, table_of,
};
use crate::waiting::with_progress;

#[derive(Args)]
pub(crate) struct TraceArgs {
    /// Position of any copy of the record: topic/partition/offset in any topic of the pipeline; or the id of a job
    #[arg(value_name = "POSITION|JOB", value_parser = subject)]
    subject: Subject,
    /// Only in this pipeline (default: all pipelines with the topic)
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pipeline: String,
    /// Search topics from their beginning, instead of 10 minutes before the timestamp of the record
    #[arg(long)]
    from_beginning: bool,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    inspector: InspectorArgs,
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

pub(crate) fn main(args: &TraceArgs) -> ExitCode {
    with_inspector(&args.inspector, None, async |endpoint, service| {
        let client = WaitingClient::connect(endpoint).await;
        let client = client.map_err(|error| service.failure(error))?;
        run(&client, args).await
    })
}

async fn run(client: &WaitingClient, args: &TraceArgs) -> Result<ExitCode, CliError> {
    let (position, job_id) = match &args.subject {
        Subject::Position(position) => (Some(position.into()), String::new()),
        Subject::Job(id) => (None, id.to_string()),
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
