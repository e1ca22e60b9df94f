//! `redeliver dlq watch`: prints dead letters as they arrive, and reconnects if the inspector restarts.

use std::process::ExitCode;

use redeliver_client::{
    ClientError, Completeness, DeadLetter, DeadLetterClient, WatchDeadLetters, WatchEvent,
};

use super::completeness::warn;
use super::outage::Outage;
use super::{WatchArgs, as_json, row};
use crate::connection::CliError;
use crate::output::{Format, in_one_line, json_line, print_line};

/// Runs until stdout is closed or the inspector rejects the request.
pub(super) async fn run(client: &DeadLetterClient, args: &WatchArgs) -> Result<ExitCode, CliError> {
    let mut request = WatchDeadLetters {
        filter: args.filter.filter.clone(),
        full: args.full,
        resume_token: String::new(),
        only_new: args.new,
    };
    let mut outage = Outage::new(None);
    loop {
        let Err(error) = follow(client, args, &mut request, &mut outage).await else {
            return Ok(ExitCode::SUCCESS);
        };
        outage.wait(error).await?;
    }
}

/// Prints the events of one connection. Returns `Ok` only if stdout is closed.
async fn follow(
    client: &DeadLetterClient,
    args: &WatchArgs,
    request: &mut WatchDeadLetters,
    outage: &mut Outage,
) -> Result<(), ClientError> {
    let mut watch = client.watch(request).await?;
    let mut was_complete = true;
    loop {
        let event = watch.next().await?;
        outage.ends();
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
        Format::Json | Format::Jsonl => json_line(&as_json(letter).to_string()).into_owned(),
    }
}
