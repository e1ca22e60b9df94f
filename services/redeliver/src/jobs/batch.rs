//! `redeliver jobs schedule --file`: the jobs of a file, in batches.
//!
//! Each line is a job in JSON, as for REST. A line that cannot be read fails on its own, and is not sent. A batch is sent when
//! it is full, so a file of any size needs little memory.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read as _};
use std::process::ExitCode;

use bytes::Bytes;
use redeliver_client::{ClientError, JobClient, JobRequest, Scheduled, When};
use redeliver_runtime::Config;
use redeliver_runtime::cli::EXIT_FAILURE;
use redeliver_runtime::error_chain::error_chain;
use redeliver_scheduler::request::{self, ConflictPolicy, Draft, ParsedRequest, read_json};
use serde_json::{Value, json};

use super::schedule::ScheduleArgs;
use crate::connection::CliError;
use crate::output::{Format, print_item};

/// The maximum size of a line, in bytes. A server accepts no larger one by default.
const MAX_LINE: u64 = 2 << 20;
/// A batch is sent when its lines have this size, in bytes. With one more line, it is below the default limit of a server.
const BATCH_BYTES: usize = 4 << 20;

/// A line that is not blank.
struct Line {
    number: u64,
    job: Result<JobRequest, String>,
}

pub(super) async fn run(config: &Config, args: &ScheduleArgs, file: &str) -> Result<ExitCode, CliError> {
    let unreadable = |error: io::Error| CliError::Usage(format!("--file: cannot read {file}: {error}"));
    let zone = config.scheduler.time_zone();
    let zone = zone.ok_or_else(|| CliError::Usage("scheduler.default_time_zone is unknown".to_owned()))?;
    let mut input: Box<dyn BufRead> = if file == "-" {
        Box::new(BufReader::new(io::stdin()))
    } else {
        Box::new(BufReader::new(File::open(file).map_err(unreadable)?))
    };
    let client = args.scheduler.connect(config).await?;
    let (mut number, mut failed) = (0, 0);
    loop {
        let (mut lines, mut bytes, mut is_end) = (Vec::new(), 0, false);
        while lines.len() < JobClient::MAX_BATCH && bytes < BATCH_BYTES {
            let Some(line) = read_line(&mut *input).map_err(unreadable)? else {
                is_end = true;
                break;
            };
            number += 1;
            bytes += line.len();
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let job = read_job(&line, &zone);
            lines.push(Line { number, job });
        }
        failed += send(&client, lines, args.output.format).await?;
        if is_end {
            break;
        }
    }
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        eprintln!("{failed} jobs failed");
        ExitCode::from(EXIT_FAILURE)
    })
}

/// The next line; `None` at the end. At most one byte more than the maximum is read, so a longer line is an error.
fn read_line(input: &mut dyn BufRead) -> io::Result<Option<Bytes>> {
    let mut line = Vec::new();
    input.take(MAX_LINE + 1).read_until(b'\n', &mut line)?;
    if line.len() as u64 > MAX_LINE {
        let problem = format!("a line is longer than {MAX_LINE} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    Ok((!line.is_empty()).then(|| line.into()))
}

fn read_job(line: &Bytes, zone: &jiff::tz::TimeZone) -> Result<JobRequest, String> {
    let job = match read_json(line, zone).map_err(|failure| failure.message)? {
        ParsedRequest::Schedule(draft) => to_request(*draft),
        ParsedRequest::Cancel(_) | ParsedRequest::Reschedule { .. } | ParsedRequest::LongWait(_) => {
            return Err("is not a new job".to_owned());
        }
    };
    job.check().map_err(|error| error.to_string())?;
    Ok(job)
}

fn to_request(draft: Draft) -> JobRequest {
    let when = match draft.when {
        request::When::At(time) => When::At(time),
        request::When::After(delay) => When::After(delay.duration()),
    };
    let mut job = JobRequest::new(draft.app, when)
        .priority(draft.priority)
        .data(draft.payload.value.unwrap_or_default());
    if let Some(key) = draft.payload.key {
        job = job.key(key);
    }
    for (name, value) in draft.payload.headers.iter() {
        job = match value {
            Some(value) => job.header(name, value),
            None => job.null_header(name),
        };
    }
    if let Some(key) = draft.idempotency_key {
        job = job.idempotency_key(key);
    }
    if draft.on_conflict == ConflictPolicy::Replace {
        job = job.replace();
    }
    if let Some(time) = draft.expire_after {
        job = job.expire_after(time.duration());
    }
    if let Some(id) = draft.request_id {
        job = job.request_id(id);
    }
    job
}

/// Sends the valid jobs of these lines, prints a result for each line, and returns how many failed.
async fn send(client: &JobClient, lines: Vec<Line>, format: Format) -> Result<u64, CliError> {
    let jobs: Vec<JobRequest> = lines.iter().filter_map(|line| line.job.clone().ok()).collect();
    let results = match jobs.is_empty() {
        true => Ok(Vec::new()),
        false => client.schedule_batch(&jobs).await,
    };
    let results = match results {
        Ok(results) => results,
        Err(error) => {
            let (first, last) = (lines.first(), lines.last());
            if let (Some(first), Some(last)) = (first, last) {
                eprintln!(
                    "the jobs of lines {} to {} have no result",
                    first.number, last.number
                );
            }
            return Err(error.into());
        }
    };
    let mut results = results.into_iter();
    let mut failed = 0;
    for line in lines {
        let result = match line.job {
            Ok(_) => match results.next() {
                Some(result) => result.map_err(|error| (error_chain(&error), code(&error))),
                None => return Err(ClientError::InvalidResponse("results").into()),
            },
            Err(problem) => Err((problem, None)),
        };
        failed += u64::from(result.is_err());
        print_item(
            format,
            || as_text(line.number, &result),
            || as_json(line.number, &result),
        );
    }
    Ok(failed)
}

/// The reason of an error, such as `REQUEST_INVALID`.
fn code(error: &ClientError) -> Option<String> {
    match error {
        ClientError::Refused { reason, .. } => reason.clone(),
        _ => None,
    }
}

/// The result of a line: an error has a message and, if the scheduler has refused the job, a reason.
type LineResult = Result<Scheduled, (String, Option<String>)>;

fn outcome(scheduled: &Scheduled) -> &'static str {
    if scheduled.is_duplicate {
        "duplicate"
    } else if scheduled.is_replacement {
        "replaced"
    } else {
        "scheduled"
    }
}

fn as_text(line: u64, result: &LineResult) -> String {
    match result {
        Ok(scheduled) => format!("{line}: {} {}", scheduled.id, outcome(scheduled)),
        Err((message, _)) => format!("{line}: error: {message}"),
    }
}

fn as_json(line: u64, result: &LineResult) -> Value {
    match result {
        Ok(scheduled) => json!({
            "line": line,
            "id": scheduled.id.to_string(),
            "outcome": outcome(scheduled),
        }),
        Err((message, reason)) => json!({ "line": line, "error": { "reason": reason, "message": message } }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_is_too_long_is_an_error_and_an_empty_file_has_none() {
        let mut input: &[u8] = b"{}\n\nlast";
        let mut read = || read_line(&mut input).unwrap();
        assert_eq!(read().as_deref(), Some(&b"{}\n"[..]));
        assert_eq!(read().as_deref(), Some(&b"\n"[..]));
        assert_eq!(read().as_deref(), Some(&b"last"[..]));
        assert_eq!(read(), None);
        let long = vec![b' '; usize::try_from(MAX_LINE).unwrap() + 1];
        assert!(read_line(&mut &long[..]).is_err());
    }

    #[test]
    fn a_job_of_a_file_has_all_fields() {
        let line = r#"{"appName":"sms","delay":"90s","jobData":{"a": 1.0},"key":"k","headers":{"h":"v","n":null},
            "idempotencyKey":"i","expireAfter":"5m","requestId":"r","priority":"high","onConflict":"replace"}"#;
        let job = format!(
            "{:?}",
            read_job(&Bytes::from(line), &jiff::tz::TimeZone::UTC).unwrap()
        );
        for part in [
            "sms",
            "90s",
            "a\\\": 1.0",
            "b\"k\"",
            "\"h\"",
            "\"n\"",
            "\"i\"",
            "300s",
            "\"r\"",
            "High",
            "replaces: true",
        ] {
            assert!(job.contains(part), "{part} in {job}");
        }
        let cancel = Bytes::from(r#"{"cancel":"01KAJQ6Z2B0003000000000A7X"}"#);
        assert_eq!(
            read_job(&cancel, &jiff::tz::TimeZone::UTC).unwrap_err(),
            "is not a new job"
        );
    }
}
