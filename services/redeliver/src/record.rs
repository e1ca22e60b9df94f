//! The flags that describe the record of a job.

use std::io::Read as _;

use clap::Args;
use redeliver_client::Priority;
use redeliver_core::HumanDuration;

use crate::connection::CliError;

/// What the record of a job contains, and how it is dispatched.
#[derive(Args)]
#[group(skip)]
pub(crate) struct RecordArgs {
    /// Value of the record, as text (default: empty)
    #[arg(long, value_name = "TEXT", conflicts_with = "data_file")]
    data: Option<String>,
    /// File with the value of the record; - for standard input
    #[arg(long, value_name = "FILE")]
    data_file: Option<String>,
    /// Key of the record (default: null)
    #[arg(long, value_name = "KEY")]
    pub(crate) key: Option<String>,
    /// Header of the record; can be repeated
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = header)]
    pub(crate) headers: Vec<(String, String)>,
    /// Priority among due jobs: high, normal or low (default: normal)
    #[arg(long, value_name = "PRIORITY", value_parser = priority)]
    pub(crate) priority: Option<Priority>,
    /// Expire the job this long after its due time (default: never)
    #[arg(long, value_name = "DURATION")]
    pub(crate) expire_after: Option<HumanDuration>,
}

/// A header as a flag names it.
pub(crate) fn header(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("must be NAME=VALUE, such as tenant=x".to_owned()),
    }
}

fn priority(text: &str) -> Result<Priority, String> {
    text.parse().map_err(|error| format!("`{text}` {error}"))
}

impl RecordArgs {
    /// The value of the record, if a flag names it.
    pub(crate) fn data(&self) -> Result<Option<Vec<u8>>, CliError> {
        match (&self.data, self.data_file.as_deref()) {
            (Some(text), _) => Ok(Some(text.clone().into_bytes())),
            (None, Some(path)) => read_file("--data-file", path).map(Some),
            (None, None) => Ok(None),
        }
    }
}

/// The content of a file, or of standard input for `-`.
pub(crate) fn read_file(flag: &str, path: &str) -> Result<Vec<u8>, CliError> {
    let unreadable = |name: &str, error| CliError::Usage(format!("{flag}: cannot read {name}: {error}"));
    if path == "-" {
        let mut data = Vec::new();
        let read = std::io::stdin().read_to_end(&mut data);
        return read
            .map(|_| data)
            .map_err(|error| unreadable("standard input", error));
    }
    std::fs::read(path).map_err(|error| unreadable(path, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_needs_a_name() {
        assert_eq!(header("a=b=c"), Ok(("a".to_owned(), "b=c".to_owned())));
        assert_eq!(header("a="), Ok(("a".to_owned(), String::new())));
        assert!(header("a").is_err() && header("=b").is_err());
    }
}
