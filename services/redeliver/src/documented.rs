//! The commands, configurations, requests and exports in the docs, and the commands in the examples of `--help`, are valid.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use clap::error::ErrorKind;
use clap::{Command, CommandFactory as _, Parser as _};
use jiff::tz::TimeZone;
use redeliver_client::export::ExportReader;
use redeliver_runtime::config::Sources;
use redeliver_scheduler::request::{read_json, read_schedule_json};

use crate::Args;
use crate::config::Config;

/// The pages of the docs, and the READMEs of the repository and its examples.
fn pages() -> Vec<PathBuf> {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let entries = |folder: &str| {
        let entries = std::fs::read_dir(repository.join(folder)).unwrap();
        entries.map(|entry| entry.unwrap().path())
    };
    let readmes = ["examples", "examples/clients"].into_iter().flat_map(entries);
    let readmes = readmes.map(|example| example.join("README.md"));
    let mut pages = vec![repository.join("README.md"), repository.join("deploy/README.md")];
    pages.extend(entries("docs").chain(readmes).filter(|page| page.is_file()));
    pages
}

/// The blocks of a page in this language.
fn blocks<'a>(page: &'a str, language: &'a str) -> impl Iterator<Item = &'a str> {
    let blocks = page.split("```").skip(1).step_by(2);
    blocks.filter_map(move |block| block.strip_prefix(language)?.strip_prefix('\n'))
}

/// The words of a line of a shell, up to a comment, a pipe or a redirection.
fn words(line: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut letters = line.chars();
    while let Some(letter) = letters.next() {
        match letter {
            _ if quote == Some(letter) => quote = None,
            _ if quote.is_some() => word.get_or_insert_default().push(letter),
            '\'' | '"' => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            '\\' => word.get_or_insert_default().extend(letters.next()),
            ' ' => words.extend(word.take()),
            '#' | '|' | '>' if word.is_none() => break,
            _ => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    words
}

fn error(line: &str) -> Option<clap::Error> {
    Args::try_parse_from(words(line)).err()
}

/// The commands among these lines.
fn commands<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<String> {
    lines
        .map(|line| line.trim_start().trim_start_matches("$ "))
        .filter(|line| line.starts_with("redeliver "))
        .map(str::to_owned)
        .collect()
}

fn examples(command: &Command) -> Vec<String> {
    let help = command
        .get_after_help()
        .map(ToString::to_string)
        .unwrap_or_default();
    let mut found = commands(help.lines());
    found.extend(command.get_subcommands().flat_map(examples));
    found
}

#[test]
fn examples_of_help_are_valid() {
    let examples = examples(&Args::command());
    assert!(examples.len() > 30, "{examples:?}");
    for example in examples {
        let error = error(&example).map(|error| error.to_string());
        assert_eq!(error, None, "{example}");
    }
}

#[test]
fn commands_of_docs_are_valid() {
    let mut count = 0;
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        let (page, parts) = (page.display(), text.split("```"));
        for (number, part) in parts.enumerate() {
            if number % 2 == 1 {
                for line in commands(part.lines()) {
                    count += 1;
                    let error = error(&line).map(|error| error.to_string());
                    assert_eq!(error, None, "{page}: {line}");
                }
                continue;
            }
            // Commands in a sentence have placeholders, or are not complete.
            for line in commands(part.split('`').skip(1).step_by(2)) {
                count += 1;
                let unknown = [ErrorKind::UnknownArgument, ErrorKind::InvalidSubcommand];
                let unknown = error(&line).filter(|error| unknown.contains(&error.kind()));
                let unknown = unknown.map(|error| error.to_string());
                assert_eq!(unknown, None, "{page}: {line}");
            }
        }
    }
    assert!(count > 100, "only {count} commands");
}

/// A block as a whole configuration, in which a file that exists takes the place of those that the block names.
fn configuration(block: &str, file: &str) -> String {
    let mut parts = block.split(": /");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find([' ', ',', '}', '\n']).unwrap_or(part.len());
        text += &format!(": {file}{}", &part[end..]);
    }
    let in_pipeline = |more: &str| {
        let lines = text.lines().map(|line| format!("    {line}\n"));
        format!("pipelines:\n  orders:\n{}{more}", lines.collect::<String>())
    };
    let (section, _) = block.split_once(':').unwrap_or_default();
    // With what these parts need.
    match section {
        "http" => in_pipeline("      url: 'http://endpoint'\n"),
        "output" => in_pipeline("    http: { url: 'http://endpoint' }\n"),
        "dlq_inspector" => text.replacen(
            ":\n",
            ":\n  topics: ['dlq.*']\n  auth: { jwt: { issuer: i, audience: a, jwks_url: 'https://idp/keys' } }\n",
            1,
        ),
        _ => text,
    }
}

#[test]
fn configurations_of_docs_are_valid() {
    let files = tempfile::tempdir().unwrap();
    let (whole, named) = (files.path().join("redeliver.yaml"), files.path().join("named"));
    std::fs::write(&named, "{}").unwrap();
    let mut count = 0;
    // Values of the chart are tested with the chart.
    for page in pages()
        .into_iter()
        .filter(|page| !page.ends_with("docs/kubernetes.md"))
    {
        let text = std::fs::read_to_string(&page).unwrap();
        for block in blocks(&text, "yaml") {
            // Parts of files with tokens.
            if block.starts_with("tokens:") || block.starts_with('-') {
                continue;
            }
            count += 1;
            std::fs::write(&whole, configuration(block, named.to_str().unwrap())).unwrap();
            let sources = Sources {
                file: Some(whole.clone()),
                environment: BTreeMap::new(),
                overrides: Vec::new(),
            };
            let problem = Config::load(&sources).err().map(|error| error.to_string());
            assert_eq!(problem, None, "{}:\n{block}", page.display());
        }
    }
    assert!(count > 15, "only {count} configurations");
}

#[test]
fn requests_of_docs_are_valid() {
    let zone = TimeZone::UTC;
    let page = include_str!("../../../docs/scheduler.md");
    let changes = blocks(page, "")
        .flat_map(str::lines)
        .filter(|line| line.starts_with('{'));
    let by_curl = page
        .split("-d '")
        .skip(1)
        .filter_map(|rest| rest.split('\'').next());
    let requests: Vec<&str> = blocks(page, "json").chain(changes).chain(by_curl).collect();
    assert!(requests.len() >= 5, "{requests:?}");
    for request in requests
        .into_iter()
        .filter(|request| !request.contains("\"outcome\""))
    {
        let problem = read_json(&Bytes::from(request.to_owned()), &zone).err();
        assert_eq!(problem.map(|failure| failure.message), None, "{request}");
    }
    let page = include_str!("../../../docs/schedules.md");
    for schedule in blocks(page, "json") {
        let problem = read_schedule_json(&Bytes::from(schedule.to_owned()), &zone).err();
        assert_eq!(problem.map(|failure| failure.message), None, "{schedule}");
    }
}

#[test]
fn export_of_docs_is_read() {
    let page = include_str!("../../../docs/dead-letters.md");
    let export = blocks(page, "").find(|block| block.starts_with("{\"redeliver_dead_letters\""));
    let mut reader = ExportReader::new(export.unwrap().as_bytes()).unwrap();
    let letters = reader.by_ref().collect::<Result<Vec<_>, _>>().unwrap();
    assert_eq!(letters.len(), 1);
    assert_eq!(reader.is_complete(), Some(true));
}
