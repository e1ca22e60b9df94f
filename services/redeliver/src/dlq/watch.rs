//! `redeliver dlq watch`: prints dead letters as they arrive, and reconnects if the inspector restarts.

use std::process::ExitCode;

use redeliver_client::messages::watch_dead_letters_response::Event;
use redeliver_client::messages::{Completeness, DeadLetter, DeadLetterView, WatchDeadLettersRequest};
use redeliver_client::{ClientError, DeadLetterClient};
use redeliver_core::{Clock as _, SystemClock};

use super::completeness::warn;
use super::outage::Outage;
use super::{AGE, COLUMNS, WatchArgs, as_json};
use crate::connection::CliError;
use crate::output::{self, Format, json_line, print_line};

/// Runs until stdout is closed or the inspector rejects the request.
pub(super) async fn run(client: &DeadLetterClient, args: &WatchArgs) -> Result<ExitCode, CliError> {
    let view = if args.full {
        DeadLetterView::Full
    } else {
        DeadLetterView::Basic
    };
    let mut request = WatchDeadLettersRequest {
        filter: args.filter.text()?,
        view: view.into(),
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
    request: &mut WatchDeadLettersRequest,
    outage: &mut Outage,
) -> Result<(), ClientError> {
    let mut watch = client.watch(request.clone()).await?;
    let mut was_complete = true;
    loop {
        let event = watch.next().await?;
        outage.ends();
        watch.resume_token().clone_into(&mut request.resume_token);
        match event {
            Event::DeadLetter(letter) => {
                if !print_line(shown(args.output.format, &letter)) {
                    return Ok(());
                }
            }
            Event::Synced(synced) => {
                eprintln!("caught up; waiting for new dead letters");
                report(&synced.completeness.unwrap_or_default(), &mut was_complete);
            }
            Event::Heartbeat(heartbeat) => {
                report(&heartbeat.completeness.unwrap_or_default(), &mut was_complete);
            }
        }
    }
}

/// Reports when the index becomes incomplete, and when it is complete again.
fn report(completeness: &Completeness, was_complete: &mut bool) {
    let is_complete = completeness.complete;
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
            let columns = COLUMNS.iter().filter(|(name, _)| *name != AGE);
            let cells = columns.map(|(_, cell)| cell(letter, SystemClock.now()).unwrap_or_default());
            cells
                .map(|cell| output::shown(&cell))
                .collect::<Vec<_>>()
                .join("  ")
        }
        Format::Json | Format::Jsonl => json_line(&as_json(letter).to_string()).into_owned(),
    }
}
