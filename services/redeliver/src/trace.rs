//! `redeliver trace`: the life of one record, from the inspector.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use redeliver_client::{
    Position, RecordTrace, Timestamp, TraceEvent, TraceOutcome, TraceRecord, TraceStep, WaitingClient,
};
use redeliver_core::HumanDuration;
use redeliver_dlq_inspector::id::LetterId;
use serde_json::json;

use crate::connection::CliError;
use crate::dlq::{InspectorArgs, rounded, with_inspector};
use crate::output::{Format, Json, OutputArgs, fields, print_items, table};
use crate::waiting::with_progress;

#[derive(Args)]
pub(crate) struct TraceArgs {
    /// Position of any copy of the record, topic/partition/offset: in the source, a tier, the due topic, an output or the dead letters
    #[arg(value_name = "POSITION")]
    position: LetterId,
    /// Only in this pipeline (default: in all that have the topic)
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pipeline: String,
    /// Search topics from their beginning, and not from 10 minutes before the timestamp of the record on
    #[arg(long)]
    from_beginning: bool,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    inspector: InspectorArgs,
}

pub(crate) fn main(args: &TraceArgs) -> ExitCode {
    with_inspector(&args.inspector, None, async |endpoint, service| {
        let client = WaitingClient::connect(endpoint).await;
        let client = client.map_err(|error| service.failure(error))?;
        run(&client, args).await
    })
}

async fn run(client: &WaitingClient, args: &TraceArgs) -> Result<ExitCode, CliError> {
    let request = TraceRecord {
        position: Position {
            topic: args.position.topic.as_str().into(),
            partition: args.position.partition,
            offset: args.position.offset,
        },
        pipeline: args.pipeline.clone(),
        from_beginning: args.from_beginning,
    };
    let traces = with_progress(async |progress| client.trace(&request, progress).await).await?;
    match args.output.format {
        Format::Table => {
            let texts: Vec<String> = traces.iter().map(as_text).collect();
            crate::say(texts.join("\n\n"));
        }
        format => print_items(format, &[], &traces, |_| Vec::new(), as_json),
    }
    Ok(ExitCode::SUCCESS)
}

fn as_text(trace: &RecordTrace) -> String {
    let time = |time: Option<Timestamp>| time.map(|time| time.to_string());
    let now = match trace.outcome {
        TraceOutcome::New => "not processed yet".to_owned(),
        TraceOutcome::Waits => match trace.next_due {
            Some(due) => format!("waits until {due}"),
            None => "waits".to_owned(),
        },
        TraceOutcome::Due => "due, and not processed yet".to_owned(),
        TraceOutcome::Succeeded => "succeeded".to_owned(),
        TraceOutcome::Dead => "dead".to_owned(),
        TraceOutcome::Discarded => "discarded".to_owned(),
        TraceOutcome::Redriven => "redriven to another topic".to_owned(),
        TraceOutcome::Unknown => "unknown".to_owned(),
    };
    let mut text = fields(&[
        ("pipeline", Some(trace.pipeline.clone())),
        ("origin", Some(trace.origin.to_string())),
        ("timestamp", time(trace.origin_timestamp)),
        ("now", Some(now)),
    ]);
    text.push('\n');
    let columns = ["time", "event", "place", "attempts", "reason", "wait", "position"];
    text += &table(&columns, trace.steps.iter().map(row));
    for gap in &trace.gaps {
        let _ = write!(text, "\nunknown: {}", crate::output::in_one_line(gap));
    }
    if trace.is_truncated {
        text += "\nthere are more steps, which are older";
    }
    if let Some(since) = trace.searched_since {
        let _ = write!(
            text,
            "\nsearched since {since}; use --from-beginning to search everything"
        );
    }
    text
}

fn row(step: &TraceStep) -> Vec<String> {
    let event = match (step.event, step.redrives) {
        (TraceEvent::Redriven, redrives) if redrives > 1 => format!("redriven ({redrives})"),
        (event, _) => event.as_str().to_owned(),
    };
    vec![
        step.time.map(|time| time.to_string()).unwrap_or_default(),
        event,
        step.place.clone(),
        step.attempts.to_string(),
        crate::output::shortened(&reason(step), 100),
        step.wait.map(shown_wait).unwrap_or_default(),
        step.position.to_string(),
    ]
}

/// Why a step was taken: the failure, or who has decided it.
fn reason(step: &TraceStep) -> String {
    let failure = [&step.error_class, &step.error_code, &step.error_message];
    let mut parts: Vec<String> = failure.into_iter().flatten().cloned().collect();
    // Where the copy is, its position says.
    let destination = step.destination.as_ref();
    let elsewhere = destination.filter(|topic| step.place == "dead-letters" && !topic.is_empty());
    parts.extend(elsewhere.map(|topic| format!("to {topic}")));
    parts.extend((!step.edited.is_empty()).then(|| format!("edited {}", step.edited.join(", "))));
    parts.extend(step.redrive_id.as_ref().map(|id| format!("job {id}")));
    parts.extend(step.by.as_ref().map(|by| format!("by {by}")));
    let decided = parts.join(" ");
    match &step.why {
        Some(why) => format!("{decided}: {why}"),
        None => decided,
    }
}

fn wait(wait: Duration) -> String {
    HumanDuration::from(wait).to_string()
}

/// Rounded if it is long: jitter makes odd numbers of milliseconds.
fn shown_wait(duration: Duration) -> String {
    if duration < Duration::from_secs(10) {
        wait(duration)
    } else {
        rounded(duration)
    }
}

fn as_json(trace: &RecordTrace) -> Json {
    let time = |time: Option<Timestamp>| time.map(|time| time.to_string());
    let steps = trace.steps.iter().map(|step| {
        json!({
            "event": step.event.as_str(),
            "time": time(step.time),
            "position": step.position.to_string(),
            "place": step.place,
            "attempts": step.attempts,
            "error_class": step.error_class,
            "error_code": step.error_code,
            "error_message": step.error_message,
            "failed_at": time(step.failed_at),
            "due_at": time(step.due_at),
            "wait": step.wait.map(wait),
            "redrives": step.redrives,
            "redrive_id": step.redrive_id,
            "by": step.by,
            "why": step.why,
            "destination": step.destination,
            "edited": step.edited,
        })
    });
    json!({
        "pipeline": trace.pipeline,
        "origin": trace.origin.to_string(),
        "origin_timestamp": time(trace.origin_timestamp),
        "outcome": trace.outcome.as_str(),
        "next_due": time(trace.next_due),
        "steps": steps.collect::<Vec<_>>(),
        "truncated": trace.is_truncated,
        "gaps": trace.gaps,
        "searched_since": time(trace.searched_since),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(event: TraceEvent, place: &str) -> TraceStep {
        TraceStep {
            event,
            time: None,
            position: Position {
                topic: "orders-dlq".into(),
                partition: 0,
                offset: 7,
            },
            place: place.to_owned(),
            attempts: 1,
            error_class: None,
            error_code: None,
            error_message: None,
            failed_at: None,
            due_at: None,
            wait: None,
            redrives: 0,
            by: None,
            why: None,
            redrive_id: None,
            destination: None,
            edited: Vec::new(),
        }
    }

    #[test]
    fn reason_is_failure_or_decision() {
        let text = |text: &str| Some(text.to_owned());
        let failed = TraceStep {
            error_class: text("transient"),
            error_code: text("http.503"),
            error_message: text("no answer"),
            ..step(TraceEvent::Waits, "5s")
        };
        assert_eq!(reason(&failed), "transient http.503 no answer");
        let redriven = |place, why| TraceStep {
            redrive_id: text("01a212ee742fea04"),
            by: text("ann"),
            why,
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
        // Nothing else says where it is.
        assert_eq!(
            reason(&redriven("dead-letters", None)),
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
