//! `redeliver jobs schedule --file`: the jobs of a file, in batches.
//!
//! Each line is a job in JSON, as for REST. A line that cannot be read fails on its own, and is not sent. A batch is sent when
//! it is full, so a file of any size needs little memory. Jobs that the scheduler refuses for now, such as those that exceed a rate, are
//! sent again when it says so.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read as _};
use std::panic::resume_unwind;
use std::process::ExitCode;
use std::time::Duration;

use bytes::Bytes;
use jiff::tz::TimeZone;
use redeliver_client::{ClientError, JobClient, JobRequest, Scheduled};
use redeliver_proto::v1::job_command::Command;
use redeliver_runtime::cli::EXIT_FAILURE;
use redeliver_runtime::error_chain::error_chain;
use redeliver_scheduler::request::read_json;
use serde_json::json;
use tokio::time::Instant;

use super::SchedulerArgs;
use crate::config::Config;
use crate::connection::CliError;
use crate::output::{Format, Json, in_one_line, print_item};

/// The maximum size of a line, in bytes. A server accepts no larger one by default.
const MAX_LINE: u64 = 2 << 20;
/// A batch is sent when its lines have this size, in bytes. With one more line, it is below the default limit of a server.
const BATCH_BYTES: usize = 4 << 20;

/// Jobs that the scheduler refuses for now are not sent again if for this long, and for the last pause that it asked for, no job had
/// a result.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);
/// The time between attempts to reach a scheduler that refuses connections.
const RECONNECT: Duration = Duration::from_secs(1);

/// A line that is not blank.
struct Line {
    number: u64,
    job: Result<JobRequest, String>,
}

pub(super) async fn run(
    config: &Config,
    scheduler: &SchedulerArgs,
    format: Format,
    file: &str,
) -> Result<ExitCode, CliError> {
    let unreadable = |error: io::Error| CliError::Usage(format!("--file: cannot read {file}: {error}"));
    let zone = config.scheduler.time_zone();
    let zone = zone.ok_or_else(|| CliError::Usage("scheduler.default_time_zone is unknown".to_owned()))?;
    let input: Box<dyn BufRead + Send> = if file == "-" {
        Box::new(BufReader::new(io::stdin()))
    } else {
        Box::new(BufReader::new(File::open(file).map_err(unreadable)?))
    };
    let mut reader = LineReader {
        input,
        number: 0,
        zone,
    };
    let client = scheduler
        .connect_to_change(config, &super::ReasonArgs::default())
        .await?;
    let (mut repetition, mut failed) = (Repetition::new(), 0);
    loop {
        // On another thread: standard input can pause, and meanwhile the connection must notice when the scheduler ends it.
        let read = tokio::task::spawn_blocking(move || reader.next_batch().map(|batch| (batch, reader)));
        let read = read
            .await
            .unwrap_or_else(|error| resume_unwind(error.into_panic()));
        let (batch, rest) = read.map_err(unreadable)?;
        failed += send(&client, batch.lines, format, &mut repetition).await?;
        if batch.is_last {
            break;
        }
        reader = rest;
    }
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        eprintln!("{failed} jobs failed");
        ExitCode::from(EXIT_FAILURE)
    })
}

/// Reads the lines of a file.
struct LineReader {
    input: Box<dyn BufRead + Send>,
    /// The number of lines that were read.
    number: u64,
    /// The time zone of times without an offset.
    zone: TimeZone,
}

/// The lines to send with one call.
struct Batch {
    lines: Vec<Line>,
    is_last: bool,
}

impl LineReader {
    /// Blocks.
    fn next_batch(&mut self) -> io::Result<Batch> {
        let (mut lines, mut bytes) = (Vec::new(), 0);
        while lines.len() < JobClient::MAX_BATCH && bytes < BATCH_BYTES {
            let Some(line) = read_line(&mut *self.input)? else {
                return Ok(Batch { lines, is_last: true });
            };
            self.number += 1;
            if let Ok(line) = &line {
                bytes += line.len();
                if line.iter().all(u8::is_ascii_whitespace) {
                    continue;
                }
            }
            lines.push(Line {
                number: self.number,
                job: line.and_then(|line| read_job(&line, &self.zone)),
            });
        }
        Ok(Batch {
            lines,
            is_last: false,
        })
    }
}

/// The next line, or what is wrong with it; `None` at the end. Of a line that is too long, only the beginning is kept in memory.
fn read_line(input: &mut dyn BufRead) -> io::Result<Option<Result<Bytes, String>>> {
    let mut line = Vec::new();
    (&mut *input).take(MAX_LINE + 1).read_until(b'\n', &mut line)?;
    if line.len() as u64 > MAX_LINE {
        if line.last() != Some(&b'\n') {
            input.skip_until(b'\n')?;
        }
        return Ok(Some(Err(format!("the line is longer than {MAX_LINE} bytes"))));
    }
    Ok((!line.is_empty()).then(|| Ok(line.into())))
}

fn read_job(line: &Bytes, zone: &TimeZone) -> Result<JobRequest, String> {
    let Command::Schedule(spec) = read_json(line, zone).map_err(|failure| failure.message)? else {
        return Err("is not a new job".to_owned());
    };
    let job = JobRequest::from(spec);
    job.check().map_err(|error| error.to_string())?;
    Ok(job)
}

/// Decides how long jobs that the scheduler refuses for now are sent again.
struct Repetition {
    /// When a job had a result last.
    progress: Instant,
    /// The last pause since then.
    pause: Duration,
    /// The reason that was reported last.
    reported: String,
}

impl Repetition {
    fn new() -> Self {
        Self {
            progress: Instant::now(),
            pause: Duration::ZERO,
            reported: String::new(),
        }
    }

    fn has_progress(&mut self) {
        self.progress = Instant::now();
        self.pause = Duration::ZERO;
    }

    /// Whether the next attempt is the last one unless a job has a result.
    fn is_last(&self, now: Instant) -> bool {
        now.duration_since(self.progress) >= STALL_TIMEOUT.saturating_add(self.pause)
    }

    async fn wait(&mut self, pause: Duration, reason: String) {
        if reason != self.reported {
            eprintln!(
                "the scheduler refuses jobs for now; they are sent again: {}",
                in_one_line(&reason)
            );
            self.reported = reason;
        }
        self.pause = pause;
        tokio::time::sleep(pause).await;
    }
}

/// Sends the valid jobs of these lines, prints a result for each line, and returns how many failed.
async fn send(
    client: &JobClient,
    lines: Vec<Line>,
    format: Format,
    repetition: &mut Repetition,
) -> Result<u64, CliError> {
    let mut call = Call::new(lines);
    repetition.has_progress();
    let stopped = loop {
        let jobs = call.jobs();
        if jobs.is_empty() {
            break None;
        }
        let is_last = repetition.is_last(Instant::now());
        let again = match client.schedule_batch(&jobs).await {
            Ok(results) => {
                let again = call.note(results, is_last);
                if call.jobs().len() < jobs.len() {
                    repetition.has_progress();
                }
                again
            }
            Err(error) => match repeat_after(&error).filter(|_| !is_last) {
                Some(pause) => Some((pause, error_chain(&error))),
                None => break Some(error),
            },
        };
        if let Some((pause, reason)) = again {
            repetition.wait(pause, reason).await;
        }
    };
    let failed = call.print(format);
    match stopped {
        Some(error) => Err(error.into()),
        None => Ok(failed),
    }
}

/// When to send a job again that has this error. Only jobs of which nothing was written are sent again, because all others could be
/// scheduled twice. An idempotency key does not rule that out: it can be in use for other content by then.
fn repeat_after(error: &ClientError) -> Option<Duration> {
    match error {
        // For example while the scheduler restarts.
        ClientError::Unreachable { is_refused: true, .. } => Some(RECONNECT),
        error => error.retry_after(),
    }
}

/// The lines whose jobs are sent with one call, and repeatedly as long as the scheduler refuses them for now.
struct Call(Vec<(Line, Option<LineResult>)>);

impl Call {
    /// The result of a line that cannot be read is known.
    fn new(lines: Vec<Line>) -> Self {
        let with_result = |line: Line| {
            let problem = line.job.as_ref().err();
            let result = problem.map(|problem| Err((problem.clone(), None)));
            (line, result)
        };
        Self(lines.into_iter().map(with_result).collect())
    }

    /// The jobs without a result.
    fn jobs(&self) -> Vec<JobRequest> {
        let missing = self.0.iter().filter(|(_, result)| result.is_none());
        missing.filter_map(|(line, _)| line.job.clone().ok()).collect()
    }

    /// Takes note of the results of [`Call::jobs`]. Returns when to send those again that were refused for now, and why. If it was the
    /// last time, they have failed.
    fn note(
        &mut self,
        results: Vec<Result<Scheduled, ClientError>>,
        is_last: bool,
    ) -> Option<(Duration, String)> {
        let mut again: Option<(Duration, String)> = None;
        let missing = self.0.iter_mut().filter(|(_, result)| result.is_none());
        for ((_, known), result) in missing.zip(results) {
            let result = result.map_err(|error| (repeat_after(&error).filter(|_| !is_last), error));
            match result {
                Err((Some(pause), error)) => {
                    if again.as_ref().is_none_or(|(longest, _)| pause > *longest) {
                        again = Some((pause, error_chain(&error)));
                    }
                }
                Err((None, error)) => *known = Some(Err((error_chain(&error), code(&error)))),
                Ok(scheduled) => *known = Some(Ok(scheduled)),
            }
        }
        again
    }

    /// Prints the results, and says which are missing. Returns how many jobs failed.
    fn print(&self, format: Format) -> u64 {
        let mut failed = 0;
        for (line, result) in &self.0 {
            if let Some(result) = result {
                failed += u64::from(result.is_err());
                print_item(
                    format,
                    || as_text(line.number, result),
                    || as_json(line.number, result),
                );
            }
        }
        let missing = self.0.iter().filter(|(_, result)| result.is_none());
        let missing: Vec<u64> = missing.map(|(line, _)| line.number).collect();
        if let (Some(first), Some(last)) = (missing.first(), missing.last()) {
            eprintln!("{} jobs of lines {first} to {last} have no result", missing.len());
        }
        failed
    }
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

fn as_json(line: u64, result: &LineResult) -> Json {
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
    use redeliver_client::{Code, ErrorDetails};

    use super::*;

    #[test]
    fn too_long_line_is_skipped() {
        let max = usize::try_from(MAX_LINE).unwrap();
        let long = |length: usize| vec![b' '; length];
        let mut text = b"{}\n\n".to_vec();
        for length in [max - 1, max, 3 * max] {
            text.extend(long(length));
            text.push(b'\n');
        }
        text.extend(b"last");
        let mut input = &text[..];
        let mut read = || {
            read_line(&mut input)
                .unwrap()
                .map(|line| line.map(|line| line.len()))
        };
        let too_long = || Some(Err("the line is longer than 2097152 bytes".to_owned()));
        assert_eq!(read(), Some(Ok(3)));
        assert_eq!(read(), Some(Ok(1)));
        assert_eq!(read(), Some(Ok(max)));
        assert_eq!(read(), too_long());
        assert_eq!(read(), too_long());
        assert_eq!(read(), Some(Ok(4)));
        assert_eq!(read(), None);
        // At the end of the file.
        assert!(read_line(&mut &long(max + 1)[..]).unwrap().unwrap().is_err());
    }

    fn refused(reason: &str, retry_after: Option<u64>) -> ClientError {
        ClientError::Refused {
            code: Code::Unavailable,
            message: reason.to_owned(),
            reason: Some(reason.to_owned()),
            details: Box::new(ErrorDetails {
                retry_after: retry_after.map(Duration::from_secs),
                ..ErrorDetails::default()
            }),
        }
    }

    /// A call with jobs in the lines 1, 3 and 4.
    fn call() -> Call {
        let job = |number: u64| {
            let valid = Ok(JobRequest::after("sms", Duration::ZERO).idempotency_key(number.to_string()));
            if number == 2 {
                Err("invalid".to_owned())
            } else {
                valid
            }
        };
        let lines = (1..=4).map(|number| Line {
            number,
            job: job(number),
        });
        Call::new(lines.collect())
    }

    fn scheduled() -> Result<Scheduled, ClientError> {
        Ok(Scheduled {
            id: "01KAJQ6Z2B0003000000000A7X".parse().unwrap(),
            is_duplicate: false,
            is_replacement: false,
            job: None,
        })
    }

    fn results(call: &Call) -> Vec<Option<bool>> {
        let results = call
            .0
            .iter()
            .map(|(_, result)| result.as_ref().map(Result::is_ok));
        results.collect()
    }

    #[test]
    fn only_unwritten_jobs_are_sent_again() {
        let mut call = call();
        assert_eq!(
            (call.jobs().len(), results(&call)),
            (3, vec![None, Some(false), None, None])
        );
        let pause = call.note(
            vec![
                Err(refused("SHUTTING_DOWN", Some(1))),
                Err(refused("PENDING", None)),
                Err(refused("INDEX_FULL", Some(30))),
            ],
            false,
        );
        let expected = (Duration::from_secs(30), "INDEX_FULL (UNAVAILABLE)".to_owned());
        assert_eq!(pause, Some(expected));
        assert_eq!(results(&call), [None, Some(false), Some(false), None]);
        // The results belong to the lines that were sent again.
        let pause = call.note(vec![scheduled(), Err(refused("RATE_LIMITED", Some(2)))], false);
        assert_eq!(pause.map(|(pause, _)| pause), Some(Duration::from_secs(2)));
        assert_eq!(results(&call), [Some(true), Some(false), Some(false), None]);
        assert_eq!(call.note(vec![Err(refused("RATE_LIMITED", Some(2)))], true), None);
        assert_eq!(
            results(&call),
            [Some(true), Some(false), Some(false), Some(false)]
        );
        assert!(call.jobs().is_empty());
    }

    #[test]
    fn long_pause_leaves_another_attempt() {
        for (pause, attempts) in [(1, 61), (30, 3), (59, 3), (60, 2), (65, 2), (1_000, 2)] {
            let (mut repetition, pause) = (Repetition::new(), Duration::from_secs(pause));
            let (mut now, mut count) = (repetition.progress, 0);
            while !repetition.is_last(now) {
                repetition.pause = pause;
                now += pause;
                count += 1;
            }
            assert_eq!(count, attempts, "{pause:?}");
        }
    }

    #[test]
    fn only_unsent_call_is_repeated() {
        let unreachable = |is_refused| ClientError::Unreachable {
            url: "http://x".to_owned(),
            source: "lost".into(),
            is_refused,
        };
        assert_eq!(repeat_after(&unreachable(true)), Some(RECONNECT));
        assert_eq!(repeat_after(&unreachable(false)), None);
        assert_eq!(repeat_after(&refused("UNCONFIRMED", None)), None);
        let wait = repeat_after(&refused("BUSY", Some(1)));
        assert_eq!(wait, Some(Duration::from_secs(1)));
    }

    #[test]
    fn job_of_file_has_all_fields() {
        let line = r#"{"appName":"sms","delay":"90s","jobData":{"a": 1.0},"key":"k","headers":{"h":"v","n":null},
            "idempotencyKey":"i","expireAfter":"5m","requestId":"r","priority":"high","onConflict":"replace"}"#;
        let job = format!("{:?}", read_job(&Bytes::from(line), &TimeZone::UTC).unwrap());
        for part in [
            "sms",
            "seconds: 90",
            "a\\\": 1.0",
            "b\"k\"",
            "\"h\"",
            "\"n\"",
            "\"i\"",
            "seconds: 300",
            "\"r\"",
            "High",
            "Replace",
        ] {
            assert!(job.contains(part), "{part} in {job}");
        }
        let cancel = Bytes::from(r#"{"cancel":"01KAJQ6Z2B0003000000000A7X"}"#);
        assert_eq!(read_job(&cancel, &TimeZone::UTC).unwrap_err(), "is not a new job");
    }
}
