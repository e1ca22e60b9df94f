//! `redeliver dlq edit`: redrives one dead letter with another value, other headers or another key.

use std::io::{IsTerminal as _, Write as _};
use std::process::{Command, ExitCode};

use bytes::Bytes;
use clap::Args;
use redeliver_client::messages::{
    DeadLetter, EditedBytes, Header, PlanEditRequest, RedriveEdit, RedriveKind,
};
use redeliver_client::{DeadLetterClient, RedriveClient};

use super::completeness::EXIT_INCOMPLETE;
use super::redrives::{self, RunArgs, TargetArgs};
use crate::connection::CliError;
use crate::record::{header, read_file};

/// The editor, if neither VISUAL nor EDITOR is set.
const EDITOR: &str = "vi";

#[derive(Args)]
pub(super) struct EditArgs {
    /// Position in the dead-letter topic: topic/partition/offset
    #[arg(value_name = "ID")]
    id: String,
    #[command(flatten)]
    contents: ContentArgs,
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

/// What differs from the record.
#[derive(Args)]
pub(crate) struct ContentArgs {
    /// New value, as text (default: unchanged; without any change, VISUAL or EDITOR opens the value)
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["value_file", "null_value"])]
    value: Option<String>,
    /// File with the new value; - for standard input
    #[arg(long, value_name = "FILE", conflicts_with = "null_value")]
    value_file: Option<String>,
    /// Set the value to null
    #[arg(long)]
    null_value: bool,
    /// New key, as text, which can change the partition (default: unchanged)
    #[arg(long, value_name = "KEY", conflicts_with = "null_key")]
    key: Option<String>,
    /// Set the key to null
    #[arg(long)]
    null_key: bool,
    /// Header that replaces all with the same name; can be repeated, even with the same name
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = header)]
    headers: Vec<(String, String)>,
    /// Name of headers to remove; can be repeated
    #[arg(long = "remove-header", value_name = "NAME")]
    removed_headers: Vec<String>,
}

impl ContentArgs {
    /// Whether nothing is changed.
    fn is_empty(&self) -> bool {
        let has_value = self.value.is_some() || self.value_file.is_some() || self.null_value;
        let has_key = self.key.is_some() || self.null_key;
        !has_value && !has_key && self.headers.is_empty() && self.removed_headers.is_empty()
    }

    pub(crate) fn edit(&self) -> Result<RedriveEdit, CliError> {
        let text = |text: &String| Bytes::copy_from_slice(text.as_bytes());
        let value = match (&self.value, &self.value_file) {
            (Some(value), _) => Some(Some(text(value))),
            (None, Some(path)) => Some(Some(read_file("--value-file", path)?.into())),
            (None, None) => self.null_value.then_some(None),
        };
        let key = match &self.key {
            Some(key) => Some(Some(text(key))),
            None => self.null_key.then_some(None),
        };
        let edited = |bytes: Option<Option<Bytes>>| bytes.map(|bytes| EditedBytes { bytes });
        let headers = self.headers.iter().map(|(name, value)| Header {
            name: name.clone(),
            value: Some(text(value)),
        });
        Ok(RedriveEdit {
            value: edited(value),
            key: edited(key),
            set_headers: headers.collect(),
            removed_headers: self.removed_headers.clone(),
        })
    }
}

pub(super) async fn run(
    letters: &DeadLetterClient,
    redrives: &RedriveClient,
    args: &EditArgs,
) -> Result<ExitCode, CliError> {
    args.run.check()?;
    let contents = &args.contents;
    let mut edit = contents.edit()?;
    if contents.is_empty() && !std::io::stdin().is_terminal() {
        let text = "set what to change, such as --value-file FILE or --header NAME=VALUE; an editor needs a terminal";
        return Err(CliError::Usage(text.to_owned()));
    }
    let Some(letter) = letters.get(&args.id).await? else {
        return Err(super::not_found(&args.id));
    };
    let content_hash = seen(&letter)?;
    if contents.is_empty() {
        let Some(edited) = open_editor(letters, &args.id).await? else {
            eprintln!("the value was not changed; nothing was done");
            return Ok(ExitCode::from(EXIT_INCOMPLETE));
        };
        edit.value = Some(EditedBytes { bytes: Some(edited) });
    }
    let plan = PlanEditRequest {
        id: args.id.clone(),
        content_hash,
        edit: Some(edit),
        destination: args.target.destination.clone(),
        reason: args.run.reason.clone(),
        request_id: args.run.request_id.clone(),
        observe: args.target.observe(),
        force: args.target.force,
    };
    let executed = redrives::execute(redrives, &args.run, RedriveKind::Redrive, None, async || {
        redrives.plan_edit(plan).await
    });
    Ok(executed.await?.exit_code())
}

/// The hash of the contents that the caller has seen.
pub(crate) fn seen(letter: &DeadLetter) -> Result<Bytes, CliError> {
    if letter.content_hash.is_empty() {
        let scope = if letter.payload_withheld == 0 {
            "dead-letters:unmasked"
        } else {
            "dead-letters:payload"
        };
        return Err(CliError::failed(format_args!(
            "`{}` is not shown as it is, so that it cannot be edited; it needs the scope {scope}",
            letter.id
        )));
    }
    Ok(letter.content_hash.clone())
}

/// The value after the editor has closed; `None` if it is the same.
async fn open_editor(letters: &DeadLetterClient, id: &str) -> Result<Option<Bytes>, CliError> {
    let mut payload = letters.payload(id).await?;
    let mut value = Vec::new();
    while let Some(piece) = payload.next().await? {
        value.extend_from_slice(&piece);
    }
    if std::str::from_utf8(&value).is_err() {
        return Err(CliError::failed(format_args!(
            "the value of `{id}` is not text; write it with `redeliver dlq show {id} --payload`, change it, and use --value-file"
        )));
    }
    let file = |error| CliError::Io("editing the value", error);
    // Only its owner can read it, and it is removed at the end.
    let mut edited = tempfile::Builder::new()
        .prefix("redeliver-")
        .suffix(".txt")
        .tempfile()
        .map_err(file)?;
    edited
        .write_all(&value)
        .and_then(|()| edited.flush())
        .map_err(file)?;
    let set = ["VISUAL", "EDITOR"]
        .into_iter()
        .find_map(|name| std::env::var_os(name).filter(|value| !value.is_empty()));
    let editor = set.unwrap_or_else(|| EDITOR.into());
    // The variable may have arguments, such as `code --wait`.
    let status = Command::new("sh")
        .arg("-c")
        .arg("exec $0 \"$1\"")
        .arg(&editor)
        .arg(edited.path())
        .status()
        .map_err(file)?;
    if !status.success() {
        return Err(CliError::failed(format_args!(
            "the editor `{}` failed ({status}); nothing was done",
            editor.display()
        )));
    }
    let saved = std::fs::read(edited.path()).map_err(file)?;
    let saved = saved_text(&value, saved);
    Ok((saved != value).then(|| saved.into()))
}

/// What an editor has saved, without the line break that it adds to the last line.
fn saved_text(before: &[u8], mut saved: Vec<u8>) -> Vec<u8> {
    if !before.ends_with(b"\n") && saved.ends_with(b"\n") {
        saved.pop();
    }
    saved
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_break_of_editor_is_ignored() {
        for (before, saved, expected) in [
            ("a", "a\n", "a"),
            ("a\n", "a\n", "a\n"),
            ("a\n", "b", "b"),
            ("a", "a\n\n", "a\n"),
            ("", "\n", ""),
        ] {
            let saved = saved_text(before.as_bytes(), saved.as_bytes().to_vec());
            assert_eq!(saved, expected.as_bytes(), "{before:?}");
        }
    }
}
