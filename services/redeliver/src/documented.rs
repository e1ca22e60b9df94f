//! The commands in the docs and in the examples of `--help` are valid.

use std::path::Path;

use clap::error::ErrorKind;
use clap::{Command, CommandFactory as _, Parser as _};

use crate::Args;

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
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let pages = std::fs::read_dir(repository.join("docs")).unwrap();
    let pages = pages
        .map(|page| page.unwrap().path())
        .filter(|page| page.is_file());
    let mut count = 0;
    for page in pages.chain([repository.join("README.md")]) {
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
