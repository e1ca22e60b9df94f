//! `redeliver dlq import`: redrives the dead letters of a file that `redeliver dlq export` has written.
//!
//! The file says which dead letters they are and what they contained. What is written comes from Kafka: the inspector skips a dead letter that is gone or
//! has another content, and one that was redriven since.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use redeliver_client::export::ExportReader;
use redeliver_client::{ClientError, PlanRedrive, RedriveClient, RedriveKind, RedriveSelection};
use redeliver_core::content::ContentHash;

use super::completeness::EXIT_INCOMPLETE;
use super::redrives::{self, RateLimit, RunArgs, WishArgs};
use crate::connection::CliError;

/// The inspector's limit of dead letters that are named in a plan.
const PER_JOB: usize = 10_000;

#[derive(Args)]
pub(super) struct ImportArgs {
    /// File that `redeliver dlq export` has written, not compressed; - for standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    wish: WishArgs,
    #[command(flatten)]
    rate: RateLimit,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

/// What a file contains.
#[derive(Debug, Default, PartialEq, Eq)]
struct Contents {
    letters: Vec<(String, ContentHash)>,
    /// How many lack a part, so that nobody knows whether they are the same now.
    partial: u64,
}

pub(super) async fn run(client: &RedriveClient, args: &ImportArgs) -> Result<ExitCode, CliError> {
    args.run.check()?;
    let contents = if args.file.as_os_str() == "-" {
        read(std::io::stdin().lock())?
    } else {
        let file = File::open(&args.file);
        let unreadable = |error| CliError::Usage(format!("cannot read {}: {error}", args.file.display()));
        read(BufReader::new(file.map_err(unreadable)?))?
    };
    if contents.partial > 0 {
        eprintln!(
            "{} dead letters of the file lack a part, and are left out: export them with dead-letters:payload and dead-letters:unmasked",
            contents.partial
        );
    }
    if contents.letters.is_empty() {
        return Err(CliError::failed(
            "the file has no dead letter that can be redriven",
        ));
    }
    let mut result = ExitCode::SUCCESS;
    for (number, letters) in contents.letters.chunks(PER_JOB).enumerate() {
        let plan = PlanRedrive {
            destination: args.wish.destination.clone(),
            force: args.wish.force,
            why: args.run.why.clone(),
            request_id: request_id(&args.run.request_id, number),
            rate_per_second: args.rate.per_second,
            ..PlanRedrive::new(RedriveKind::Redrive, RedriveSelection::Contents(letters.to_vec()))
        };
        let done = redrives::execute(client, &args.run, None, async || client.plan(&plan).await).await;
        let done = match done {
            // Perhaps these were redriven by an earlier import of the file, and others were not.
            Err(CliError::Client(error)) if has_nothing_to_do(&error) => {
                eprintln!("{error}");
                ExitCode::from(EXIT_INCOMPLETE)
            }
            done => done?,
        };
        if done != ExitCode::SUCCESS {
            result = done;
        }
    }
    if contents.partial > 0 && result == ExitCode::SUCCESS {
        result = ExitCode::from(EXIT_INCOMPLETE);
    }
    Ok(result)
}

fn has_nothing_to_do(error: &ClientError) -> bool {
    let ClientError::Refused { reason, .. } = error else {
        return false;
    };
    reason.as_deref() == Some("NOTHING_TO_REDRIVE")
}

/// Each job of a large file needs a request id of its own.
fn request_id(given: &str, number: usize) -> String {
    match (given, number) {
        ("", _) | (_, 0) => given.to_owned(),
        (given, number) => format!("{given}/{number}"),
    }
}

/// Reads the whole file, so that nothing is done with one that was cut off.
fn read(from: impl BufRead) -> Result<Contents, CliError> {
    let failed = |error| {
        CliError::failed(format_args!(
            "{}",
            redeliver_core::error_chain::error_chain(&error)
        ))
    };
    let mut contents = Contents::default();
    for letter in ExportReader::new(from).map_err(failed)? {
        let letter = letter.map_err(failed)?;
        match letter.content_hash() {
            Some(content) => contents.letters.push((letter.position.to_string(), content)),
            None => contents.partial += 1,
        }
    }
    Ok(contents)
}

#[cfg(test)]
mod tests {
    use redeliver_client::export::{ExportWriter, ExportedDeadLetter, Gap, Partial};
    use redeliver_client::{Completeness, DeadLetterState, Headers, Position, Timestamp};

    use super::*;

    fn letter(offset: i64, partial: Partial) -> ExportedDeadLetter {
        ExportedDeadLetter {
            position: Position {
                topic: "a-dlq".into(),
                partition: 2,
                offset,
            },
            timestamp: Some(Timestamp::from_millis(5)),
            timestamp_type: None,
            state: DeadLetterState::Open,
            group: None,
            key: None,
            headers: Headers::new(),
            value: None,
            partial,
        }
    }

    fn file(letters: &[ExportedDeadLetter]) -> Vec<u8> {
        let mut file = Vec::new();
        let mut writer = ExportWriter::new(&mut file, "", Timestamp::from_millis(0)).unwrap();
        letters.iter().for_each(|letter| writer.write(letter).unwrap());
        writer.finish(&Completeness::default()).unwrap();
        file
    }

    #[test]
    fn a_dead_letter_without_all_of_its_parts_is_left_out() {
        let masked = Partial {
            value: Some(Gap::Masked),
            ..Partial::default()
        };
        let whole = letter(1, Partial::default());
        let contents = read(&*file(&[whole.clone(), letter(2, masked)])).unwrap();
        let expected = ("a-dlq/2/1".to_owned(), whole.content_hash().unwrap());
        assert_eq!(contents.letters, [expected]);
        assert_eq!(contents.partial, 1);
    }

    #[test]
    fn a_file_that_was_cut_off_is_refused() {
        let mut cut = file(&[letter(1, Partial::default())]);
        cut.truncate(cut.len() - 10);
        let error = read(&*cut).unwrap_err().to_string();
        assert!(error.contains("cut off"), "{error}");
    }

    #[test]
    fn each_job_of_a_file_has_a_request_id_of_its_own() {
        let ids = [0, 1].map(|number| (request_id("", number), request_id("a", number)));
        assert_eq!(
            ids,
            [(String::new(), "a".to_owned()), (String::new(), "a/1".to_owned())]
        );
    }
}
