//! The default file documents every key, and its values are the defaults.

use std::collections::BTreeSet;

use redeliver_runtime::config::DEFAULT_FILE;
use serde_json::Value;

use super::{Config, load};

/// Mappings whose keys the user chooses.
const USER_KEYED: [&str; 11] = [
    "pipelines",
    "retired",
    "apps",
    "extensions",
    "parameters",
    "properties",
    "headers",
    "header_files",
    "classification",
    "share_group_sources",
    "topics",
];

fn as_json(config: &Config) -> Value {
    serde_json::from_str(&config.to_json()).unwrap()
}

/// JSON pointers of all mappings with fixed keys.
fn mappings(document: &Value) -> Vec<String> {
    let mut found = Vec::new();
    collect(document, String::new(), &mut found);
    found
}

fn collect(value: &Value, pointer: String, found: &mut Vec<String>) {
    let Value::Object(entries) = value else { return };
    let last = pointer.rsplit('/').next().unwrap_or_default();
    let user_keyed = USER_KEYED.contains(&last) && pointer != "/kafka/topics";
    for (key, value) in entries {
        collect(value, format!("{pointer}/{key}"), found);
    }
    // The mapping of an anchor is an enum variant.
    if !user_keyed && last != "anchor" {
        found.push(pointer);
    }
}

/// The default file with the commented example login and pipelines uncommented.
fn with_example() -> String {
    with_pipelines(&with_login("login"))
}

fn with_login(name: &str) -> String {
    let (before, rest) = DEFAULT_FILE.split_once(&format!("  # {name}>\n")).unwrap();
    let (example, after) = rest.split_once(&format!("  # <{name}\n")).unwrap();
    let lines = example
        .lines()
        .map(|line| line.strip_prefix("  # ").unwrap_or_else(|| panic!("{line}")));
    let example: String = lines.map(|line| format!("  {line}\n")).collect();
    format!(
        "{before}  login:\n{example}{}",
        after.replacen("  login: null\n", "", 1)
    )
}

fn with_pipelines(text: &str) -> String {
    let (before, rest) = text.split_once("# example>\n").unwrap();
    let (example, after) = rest.split_once("# <example\n").unwrap();
    let lines = example
        .lines()
        .map(|line| line.strip_prefix("# ").unwrap_or_else(|| panic!("{line}")));
    let example: String = lines.map(|line| format!("{line}\n")).collect();
    format!(
        "{before}pipelines:\n{example}{}",
        after.strip_prefix("pipelines: {}\n").unwrap()
    )
}

#[test]
fn the_default_file_contains_the_defaults() {
    let from_file = Config::from_yaml(DEFAULT_FILE).unwrap();
    let from_nothing = load("", &[]).unwrap();
    assert_eq!(from_file, from_nothing);
}

#[test]
fn example_pipeline_has_the_defaults() {
    let example = load(&with_example(), &[]).unwrap();
    let minimal = "pipelines: { crawl-jobs: { output: crawl-results, http: { url: 'http://localhost:8080/crawl', \
                   headers: { content-type: application/json }, classification: { 404: transient } } } }";
    let minimal = load(minimal, &[]).unwrap();
    assert_eq!(example.pipelines["crawl-jobs"], minimal.pipelines["crawl-jobs"]);
    let documents = load("pipelines: { d: { retry: { base: 2m, cap: 1h } } }", &[]).unwrap();
    assert_eq!(
        example.pipelines["documents"].retry,
        documents.pipelines["d"].retry
    );
}

#[test]
fn example_login_has_the_defaults() {
    let example = load(&with_example(), &[]).unwrap();
    let minimal = "kafka: { login: { oidc: { token_url: 'https://issuer.example/oauth2/token', client_id: redeliver, \
                   client_secret: change-me } } }";
    assert_eq!(example.kafka.login, load(minimal, &[]).unwrap().kafka.login);
    let example = load(&with_login("login-msk"), &[]).unwrap();
    let minimal = load("kafka: { login: { msk_iam: {} } }", &[]).unwrap();
    assert_eq!(example.kafka.login, minimal.kafka.login);
}

#[test]
fn the_default_file_has_every_key() {
    let texts = [with_example(), with_login("login-msk")];
    let mut keys = 0;
    for text in &texts {
        let document = as_json(&load(text, &[]).unwrap());
        for pointer in mappings(&document) {
            let mut changed = document.clone();
            changed
                .pointer_mut(&pointer)
                .unwrap()
                .as_object_mut()
                .unwrap()
                .insert("zzqqxx".to_owned(), 1.into());
            let error = load(&changed.to_string(), &[]).unwrap_err();
            let (_, known) = error
                .split_once("unknown key; expected one of ")
                .unwrap_or_else(|| panic!("{error}"));
            let known: BTreeSet<&str> = known.rsplit_once(" (").unwrap().0.split(", ").collect();
            for key in known {
                let line = format!("{}{key}:", "  ".repeat(pointer.matches('/').count()));
                let mut lines = texts.iter().flat_map(|text| text.lines());
                assert!(
                    lines.any(|written| written.starts_with(&line)),
                    "{pointer}: {key} is not in the default file"
                );
                keys += 1;
            }
        }
    }
    assert!(keys >= 80, "only {keys} keys");
}

#[test]
fn default_sections_have_every_key() {
    // Searches within each section, except for pipelines, which the default file only has in comments.
    let document = as_json(&load(DEFAULT_FILE, &[]).unwrap());
    for (section, value) in document.as_object().unwrap() {
        let heading = format!("\n{section}:");
        let start = DEFAULT_FILE
            .find(&heading)
            .unwrap_or_else(|| panic!("no section {section}"));
        let body = &DEFAULT_FILE[start + heading.len()..];
        let end = body.find("\n\n").unwrap_or(body.len());
        for key in value.as_object().into_iter().flatten().map(|(key, _)| key) {
            assert!(
                body[..end].contains(&format!("\n  {key}:")),
                "{section}.{key} is not in the default file"
            );
        }
    }
}
