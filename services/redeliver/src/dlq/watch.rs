//! `redeliver dlq watch`: prints dead letters as they arrive, and reconnects if the inspector restarts.

use std::process::ExitCode;
use std::time::Duration;

use redeliver_client::{
    ClientError, Completeness, DeadLetter, DeadLetterClient, WatchDeadLetters, WatchEvent,
};
use redeliver_runtime::error_chain::error_chain;

use super::completeness::warn;
use super::{WatchArgs, as_json, row};
use crate::connection::CliError;
use crate::output::{Format, in_one_line, print_line};

/// The waits between attempts to reach an inspector that went away; the last one repeats.
const WAITS: [Duration; 4] = [
    Duration::from_millis(200),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
];

/// Runs until stdout is closed or the inspector rejects the request.
pub(super) async fn run(client: &DeadLetterClient, args: &WatchArgs) -> Result<ExitCode, CliError> {
    let mut request = WatchDeadLetters {
        filter: args.filter.filter.clone(),
        full: args.full,
        resume_token: String::new(),
        only_new: args.new,
    };
    let mut failures = 0;
    let mut reported = String::new();
    loop {
        let Err(error) = follow(client, args, &mut request, &mut failures).await else {
            return Ok(ExitCode::SUCCESS);
        };
        if !error.is_transient() {
            return Err(error.into());
        }
        // An inspector that comes back may be a different one, for example with TLS.
        let problem = error_chain(&error);
        if failures == 0 || problem != reported {
            eprintln!("connection lost; reconnecting: {problem}");
            reported = problem;
        }
        tokio::time::sleep(WAITS[failures.min(WAITS.len() - 1)]).await;
        failures += 1;
    }
}

/// Prints the events of one connection. Returns `Ok` only if stdout is closed.
async fn follow(
    client: &DeadLetterClient,
    args: &WatchArgs,
    request: &mut WatchDeadLetters,
    failures: &mut usize,
) -> Result<(), ClientError> {
    let mut watch = client.watch(request).await?;
    let mut was_complete = true;
    loop {
        let event = watch.next().await?;
        if *failures > 0 {
            eprintln!("reconnected");
            *failures = 0;
        }
        watch.resume_token().clone_into(&mut request.resume_token);
        match event {
            WatchEvent::DeadLetter(letter) => {
                if !print_line(shown(args.output.format, &letter)) {
                    return Ok(());
                }
            }
            WatchEvent::Synced(completeness) => {
                eprintln!("caught up; waiting for new dead letters");
                report(&completeness, &mut was_complete);
            }
            WatchEvent::Heartbeat { completeness, .. } => report(&completeness, &mut was_complete),
        }
    }
}

/// Reports when the index becomes incomplete, and when it is complete again.
fn report(completeness: &Completeness, was_complete: &mut bool) {
    let is_complete = completeness.is_complete;
    if std::mem::replace(was_complete, is_complete) == is_complete {
        return;
    }
    if is_complete {
        eprintln!("the index is complete again");
    } else {
        warn(completeness);
    }
}

fn shown(format: Format, letter: &DeadLetter) -> String {
    match format {
        Format::Table => {
            let cells = row(letter).into_iter().map(|cell| {
                if cell.is_empty() {
                    "-".to_owned()
                } else {
                    in_one_line(&cell)
                }
            });
            cells.collect::<Vec<_>>().join("  ")
        }
        Format::Json | Format::Jsonl => as_json(letter).to_string(),
    }
}
