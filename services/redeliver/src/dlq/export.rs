//! `redeliver dlq export`: all dead letters that match, in a file that keeps every byte.

mod target;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use redeliver_client::export::{ExportWriter, ExportedDeadLetter, Gap};
use redeliver_client::messages::{Completeness, DeadLetter, DeadLetterView, ListDeadLettersRequest};
use redeliver_client::{ClientError, Code, DeadLetterClient};
use redeliver_core::{Clock as _, SystemClock};
use redeliver_runtime::shutdown::on_signals;
use tokio_util::sync::CancellationToken;

use super::completeness::{EXIT_INCOMPLETE, warn};
use super::outage::Outage;
use super::{RangeArgs, ReasonArgs};
use crate::connection::CliError;
use crate::progress::Progress;
use target::Target;

/// The inspector reads the value of each dead letter from Kafka, so that a page takes much longer than one without values.
const PAGE: i32 = 200;
/// How long to wait for an inspector that went away.
const MAX_OUTAGE: Duration = Duration::from_secs(600);

#[derive(Args)]
pub(super) struct ExportArgs {
    /// Filter, such as 'state = OPEN AND pipeline = "greetings"'
    #[arg(
        long,
        value_name = "FILTER",
        required_unless_present = "all",
        conflicts_with = "all",
        value_parser = NonEmptyStringValueParser::new()
    )]
    filter: Option<String>,
    /// All dead letters
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    range: RangeArgs,
    /// File, created once it is complete and readable only by its owner (default: stdout)
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Overwrite the file
    #[arg(long, requires = "file")]
    force: bool,
    #[command(flatten)]
    pub(super) reason: ReasonArgs,
}

impl ExportArgs {
    /// Where to write.
    pub(super) fn target(&self) -> Result<Target, CliError> {
        match &self.file {
            None => Ok(Target::stdout()),
            Some(path) => Target::file(path, self.force),
        }
    }
}

pub(super) async fn run(
    client: &DeadLetterClient,
    args: &ExportArgs,
    target: Target,
    timeout: Duration,
) -> Result<ExitCode, CliError> {
    let filter = args.range.add_to(args.filter.as_deref().unwrap_or_default())?;
    let export = Export::new(client, timeout, &filter);
    if !target.is_file() {
        return export.write(target).await;
    }
    // So that the temporary file is removed.
    let interrupted = CancellationToken::new();
    on_signals(interrupted.clone()).map_err(|error| CliError::Io("handling signals", error))?;
    tokio::select! {
        result = export.write(target) => result,
        () = interrupted.cancelled() => Err(CliError::failed("interrupted; the file was not written")),
    }
}

struct Export<'a> {
    client: &'a DeadLetterClient,
    filter: &'a str,
    /// How long a piece of a value may take.
    timeout: Duration,
    outage: Outage,
    progress: Progress,
    /// How many dead letters have a part that is missing for this reason.
    partial: BTreeMap<&'static str, u64>,
}

impl<'a> Export<'a> {
    fn new(client: &'a DeadLetterClient, timeout: Duration, filter: &'a str) -> Self {
        Self {
            client,
            filter,
            timeout,
            outage: Outage::new(Some(MAX_OUTAGE)),
            progress: Progress::new("dead letters"),
            partial: BTreeMap::new(),
        }
    }

    async fn write(mut self, target: Target) -> Result<ExitCode, CliError> {
        let writing = |error| CliError::Io("writing the export", error);
        let client = self.client;
        if self.progress.is_shown() {
            let filter = self.filter;
            let stats = self.repeated(async || client.stats(filter).await);
            let topics = stats.await?.topics;
            self.progress
                .set_total(topics.iter().map(|topic| topic.total).sum());
        }
        let mut writer = ExportWriter::new(target, self.filter, SystemClock.now()).map_err(writing)?;
        let mut completeness: Option<Completeness> = None;
        let mut request = ListDeadLettersRequest {
            filter: self.filter.to_owned(),
            page_size: PAGE,
            // Those that retention removes next come first.
            order_by: "dead_at".to_owned(),
            view: DeadLetterView::Full.into(),
            page_token: String::new(),
        };
        loop {
            // A page token is valid on every inspector, also after its index was rebuilt.
            let page = self.repeated(async || client.list(request.clone()).await).await?;
            // The export is as complete as its first incomplete page.
            if completeness.as_ref().is_none_or(|before| before.complete) {
                completeness = Some(page.completeness.unwrap_or_default());
            }
            for letter in page.gone {
                self.add(&mut writer, &ExportedDeadLetter::gone(letter)?)
                    .map_err(writing)?;
            }
            for letter in page.dead_letters {
                let letter = self.whole(letter).await?;
                self.add(&mut writer, &letter).map_err(writing)?;
            }
            request.page_token = page.next_page_token;
            if request.page_token.is_empty() {
                break;
            }
        }
        let completeness = completeness.unwrap_or_default();
        let (count, partial) = (writer.dead_letters(), writer.partial());
        let target = writer.finish(&completeness).map_err(writing)?;
        target.keep()?;
        self.progress.clear();
        eprintln!("{}", summary(count, partial, &self.partial));
        warn(&completeness);
        Ok(if partial == 0 && completeness.complete {
            ExitCode::SUCCESS
        } else {
            ExitCode::from(EXIT_INCOMPLETE)
        })
    }

    fn add(&mut self, writer: &mut ExportWriter<Target>, letter: &ExportedDeadLetter) -> std::io::Result<()> {
        writer.write(letter)?;
        let partial = &letter.partial;
        let mut reasons: Vec<&str> = [partial.key, partial.headers, partial.value]
            .into_iter()
            .flatten()
            .map(reason)
            .collect();
        reasons.sort_unstable();
        reasons.dedup();
        for reason in reasons {
            *self.partial.entry(reason).or_default() += 1;
        }
        self.progress.draw(writer.dead_letters());
        Ok(())
    }

    /// A listed dead letter, with all of its value.
    async fn whole(&mut self, letter: DeadLetter) -> Result<ExportedDeadLetter, CliError> {
        let client = self.client;
        if !letter.value_truncated {
            return Ok(ExportedDeadLetter::listed(letter)?);
        }
        let timeout = self.timeout;
        let value = self
            .repeated(async || read_value(client, &letter, timeout).await)
            .await?;
        let mut exported = ExportedDeadLetter::listed(letter)?;
        match value {
            Some((value, is_masked)) => {
                exported.value = Some(value);
                let masked = is_masked.then_some(Gap::Masked);
                exported.partial.value = exported.partial.value.or(masked);
            }
            None => exported.lose_value(),
        }
        Ok(exported)
    }

    /// The result of a call, which is repeated during an outage.
    async fn repeated<T>(
        &mut self,
        call: impl AsyncFn() -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        loop {
            match call().await {
                Ok(answer) => {
                    self.outage.ends();
                    return Ok(answer);
                }
                Err(error) => {
                    self.progress.clear();
                    self.outage.wait(error).await?;
                }
            }
        }
    }
}

/// The whole value of a dead letter, and whether parts of it are masked. `None` if Kafka does not have it any more, or has another record at its position.
async fn read_value(
    client: &DeadLetterClient,
    letter: &DeadLetter,
    timeout: Duration,
) -> Result<Option<(Bytes, bool)>, ClientError> {
    let gone = |error: &ClientError| error.code() == Some(Code::NotFound);
    let mut payload = match client.payload(&letter.id).await {
        Err(error) if gone(&error) => return Ok(None),
        payload => payload?,
    };
    let mut value = Vec::new();
    loop {
        let piece = tokio::time::timeout(timeout, payload.next()).await;
        let Some(piece) = piece.map_err(|_| ClientError::StreamTimeout(timeout))?? else {
            break;
        };
        value.extend_from_slice(&piece);
    }
    let is_masked = !payload.masked_paths().is_empty();
    Ok(is_value_of(letter, &value).then(|| (value.into(), is_masked)))
}

/// Whether a value can be that of a dead letter whose first part was listed. After the topic was deleted and created again, another record can be at its
/// position.
fn is_value_of(letter: &DeadLetter, value: &[u8]) -> bool {
    let has_size = letter.value_size.is_none_or(|size| size == value.len() as u64);
    has_size && value.starts_with(letter.value.as_deref().unwrap_or_default())
}

fn reason(gap: Gap) -> &'static str {
    match gap {
        Gap::Withheld => "withheld",
        Gap::Masked => "masked",
        Gap::Gone => "gone",
        Gap::Unreadable => "with headers whose names are not UTF-8",
        Gap::TooLarge => "with a key or headers that are too large",
    }
}

fn summary(count: u64, partial: u64, reasons: &BTreeMap<&str, u64>) -> String {
    if partial == 0 {
        return format!("{count} dead letters exported");
    }
    let reasons = reasons.iter().map(|(reason, count)| format!("{count} {reason}"));
    format!(
        "{count} dead letters exported, {partial} of them without all parts: {}",
        reasons.collect::<Vec<_>>().join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_counts_partial_dead_letters() {
        assert_eq!(summary(3, 0, &BTreeMap::new()), "3 dead letters exported");
        let reasons = BTreeMap::from([("gone", 1), ("masked", 2)]);
        assert_eq!(
            summary(3, 2, &reasons),
            "3 dead letters exported, 2 of them without all parts: 1 gone, 2 masked"
        );
    }
}
