//! `redeliver dlq import`: redrives the dead letters of a file that `redeliver dlq export` has written.
//!
//! The file says which dead letters they are and what they contained. What is written comes from Kafka: the inspector skips a dead letter that is gone or
//! has another content, and one that was redriven since.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::ExitCode;

use bytes::Bytes;
use clap::Args;
use redeliver_client::RedriveClient;
use redeliver_client::export::ExportReader;
use redeliver_client::messages::{PlanRedriveRequest, RedriveKind};
use redeliver_core::content::ContentHash;

use super::completeness::EXIT_INCOMPLETE;
use super::redrives::{self, Executed, RateLimit, RunArgs, WishArgs, has_reason};
use crate::connection::CliError;
use crate::output::in_one_line;

/// The inspector's limit of dead letters that are named in a plan.
const PER_JOB: usize = 10_000;

#[derive(Args)]
pub(super) struct ImportArgs {
    /// Uncompressed file of `redeliver dlq export`; - for standard input
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
    /// How many lack a part, so that they cannot be compared.
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
    let result = one_after_the_other(&contents.letters, async |number, letters| {
        let hashes = letters.iter().map(|(_, hash)| Bytes::copy_from_slice(hash));
        let plan = PlanRedriveRequest {
            kind: RedriveKind::Redrive.into(),
            ids: letters.iter().map(|(id, _)| id.clone()).collect(),
            content_hashes: hashes.collect(),
            destination: args.wish.destination.clone(),
            observe: args.wish.observe(),
            force: args.wish.force,
            why: args.run.why.clone(),
            request_id: request_id(&args.run.request_id, number),
            rate_per_second: args.rate.per_second,
            ..PlanRedriveRequest::default()
        };
        let executed = redrives::execute(client, &args.run, RedriveKind::Redrive, None, async || {
            client.plan(plan).await
        });
        match executed.await {
            // Perhaps these were redriven by an earlier import of the file, and others were not.
            Err(CliError::Client(error)) if has_reason(&error, "NOTHING_TO_REDRIVE") => {
                eprintln!("{}", in_one_line(&error.to_string()));
                Ok(Executed::Ended { has_done_all: false })
            }
            executed => executed,
        }
    });
    let Imported { exit_code, unplanned } = result.await?;
    if unplanned > 0 {
        eprintln!(
            "{unplanned} dead letters of the file were not planned; import it again to go on with them"
        );
    }
    if contents.partial > 0 {
        return Ok(ExitCode::from(EXIT_INCOMPLETE));
    }
    Ok(exit_code)
}

/// What became of a file.
#[derive(Debug, PartialEq)]
struct Imported {
    exit_code: ExitCode,
    /// How many are in no job, because one before was stopped.
    unplanned: usize,
}

/// Executes jobs for all dead letters, until one is stopped: what is wrong with its dead letters can be wrong with the others.
async fn one_after_the_other<L>(
    letters: &[L],
    mut execute: impl AsyncFnMut(usize, &[L]) -> Result<Executed, CliError>,
) -> Result<Imported, CliError> {
    let mut exit_code = ExitCode::SUCCESS;
    for (number, of_job) in letters.chunks(PER_JOB).enumerate() {
        let executed = execute(number, of_job).await?;
        if executed == Executed::Stopped {
            return Ok(Imported {
                exit_code: executed.exit_code(),
                unplanned: letters.len() - number * PER_JOB - of_job.len(),
            });
        }
        if executed.exit_code() != ExitCode::SUCCESS {
            exit_code = executed.exit_code();
        }
    }
    Ok(Imported {
        exit_code,
        unplanned: 0,
    })
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
    use redeliver_client::messages::{Completeness, DeadLetterState};
    use redeliver_client::{Headers, Position, Timestamp};

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
    fn partial_dead_letter_is_left_out() {
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
    fn cut_file_is_refused() {
        let mut cut = file(&[letter(1, Partial::default())]);
        cut.truncate(cut.len() - 10);
        let error = read(&*cut).unwrap_err().to_string();
        assert!(error.contains("cut off"), "{error}");
    }

    #[tokio::test]
    async fn import_ends_with_stopped_job() {
        use Executed::{Accepted, Ended, Stopped};

        let letters = vec![(); 2 * PER_JOB + 5];
        let import = async |jobs: [Executed; 3]| {
            let mut sizes = Vec::new();
            let imported = one_after_the_other(&letters, async |number, letters| {
                sizes.push(letters.len());
                Ok(jobs[number])
            });
            (imported.await.unwrap(), sizes)
        };
        let [all, some] = [true, false].map(|has_done_all| Ended { has_done_all });
        for (jobs, unplanned, code) in [
            ([all; 3], 0, 0),
            ([Accepted; 3], 0, 0),
            ([all, some, all], 0, EXIT_INCOMPLETE),
            ([Stopped, all, all], PER_JOB + 5, EXIT_INCOMPLETE),
            ([some, Stopped, all], 5, EXIT_INCOMPLETE),
            ([all, all, Stopped], 0, EXIT_INCOMPLETE),
        ] {
            let (imported, sizes) = import(jobs).await;
            let expected = Imported {
                exit_code: ExitCode::from(code),
                unplanned,
            };
            assert_eq!(imported, expected, "{jobs:?}");
            assert_eq!(sizes.iter().sum::<usize>() + unplanned, letters.len(), "{jobs:?}");
        }
    }

    #[test]
    fn jobs_have_own_request_ids() {
        let ids = [0, 1].map(|number| (request_id("", number), request_id("a", number)));
        assert_eq!(
            ids,
            [(String::new(), "a".to_owned()), (String::new(), "a/1".to_owned())]
        );
    }
}
