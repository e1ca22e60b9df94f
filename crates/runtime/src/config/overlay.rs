//! Environment variables and flags laid over the file.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::problem::Problem;
use super::tree::{Node, Origin, Path, Value};
use super::yaml;

/// What the names of environment variables begin with.
const PREFIX: &str = "REDELIVER__";

/// Lays every variable `REDELIVER__A__B` over the value `a.b`.
///
/// Names do not depend on case. Where a key of the file has characters that a variable's name cannot have,
/// `_` stands for them: `REDELIVER__PIPELINES__CRAWL_JOBS__OUTPUT` finds the pipeline `crawl-jobs`, and
/// `REDELIVER__KAFKA__PROPERTIES__SASL_USERNAME` is the property `sasl.username`.
pub(super) fn lay_environment(
    tree: &mut Node,
    environment: &BTreeMap<String, String>,
    problems: &mut Vec<Problem>,
) {
    for (name, text) in environment {
        let Some(prefix) = name.get(..PREFIX.len()) else {
            continue;
        };
        if !prefix.eq_ignore_ascii_case(PREFIX) {
            continue;
        }
        let origin = Origin::Environment(name.as_str().into());
        let keys: Vec<String> = name[PREFIX.len()..].split("__").map(str::to_lowercase).collect();
        if keys.iter().any(String::is_empty) {
            let problem = "names an empty level; levels are separated by two underscores";
            problems.push(Problem::new(
                &Path::of(&[name.as_str()]),
                problem,
                &Origin::Default,
            ));
            continue;
        }
        let target = keys.iter().map(String::as_str);
        lay(tree, target, text, &origin, problems, |node, path, key| {
            spelled(node, path, key)
        });
    }
}

/// Lays `(dotted key, value)` over the value of that key. A key with dots of its own is found when the file
/// has it; otherwise it is written in double quotes: `pipelines."my.topic".output`.
pub(super) fn lay_flags(tree: &mut Node, flags: &[(String, String)], problems: &mut Vec<Problem>) {
    for (key, text) in flags {
        let origin = Origin::Flag(Arc::from(key.as_str()));
        match split(tree, key) {
            Ok(keys) => {
                let target = keys.iter().map(String::as_str);
                lay(tree, target, text, &origin, problems, |_, _, key| {
                    Ok(key.to_owned())
                });
            }
            Err(problem) => problems.push(Problem::new(&Path::of(&[key.as_str()]), problem, &origin)),
        }
    }
}

fn lay<'k>(
    tree: &mut Node,
    keys: impl Iterator<Item = &'k str>,
    text: &str,
    origin: &Origin,
    problems: &mut Vec<Problem>,
    spell: impl Fn(&Node, &Path, &str) -> Result<String, String>,
) {
    let mut node = tree;
    let mut path = Path::default();
    for key in keys {
        if let Err(problem) = open(node, origin) {
            problems.push(Problem::new(&path, problem, origin));
            return;
        }
        let key = match spell(node, &path, key) {
            Ok(key) => key,
            Err(problem) => {
                problems.push(Problem::new(&path.key(key), problem, origin));
                return;
            }
        };
        path = path.key(&key);
        let Value::Map(entries) = &mut node.value else {
            return;
        };
        let position = entries
            .iter()
            .position(|(name, _)| *name == key)
            .unwrap_or_else(|| {
                entries.push((key, Node::new(Value::Null, origin.clone())));
                entries.len() - 1
            });
        node = &mut entries[position].1;
    }
    *node = Node::new(Value::Raw(text.to_owned()), origin.clone());
}

/// Makes a mapping of a node that gets a key.
fn open(node: &mut Node, origin: &Origin) -> Result<(), String> {
    match &node.value {
        Value::Map(_) => {}
        Value::Raw(text) if text.trim_start().starts_with('{') => {
            *node = yaml::parse_inline(text, &node.origin)?;
        }
        _ => *node = Node::new(Value::Map(Vec::new()), origin.clone()),
    }
    Ok(())
}

/// The key that a variable's name means.
fn spelled(node: &Node, path: &Path, key: &str) -> Result<String, String> {
    let fold = |name: &str| name.to_lowercase().replace(['-', '.'], "_");
    let Value::Map(entries) = &node.value else {
        return Ok(key.to_owned());
    };
    if entries.iter().any(|(name, _)| name == key) {
        return Ok(key.to_owned());
    }
    let alike: Vec<&str> = entries
        .iter()
        .map(|(name, _)| name.as_str())
        .filter(|name| fold(name) == fold(key))
        .collect();
    match alike[..] {
        [name] => Ok(name.to_owned()),
        [] if is_properties(path) => Ok(key.replace('_', ".")),
        [] if is_headers(path) => Ok(key.replace('_', "-")),
        [] => Ok(key.to_owned()),
        _ => Err(format!(
            "may mean any of {}; write it in the file instead",
            alike.join(", ")
        )),
    }
}

fn is_properties(path: &Path) -> bool {
    *path == Path::of(&["kafka", "properties"])
}

fn is_headers(path: &Path) -> bool {
    let text = path.to_string();
    (text.starts_with("pipelines.") || text.starts_with("retired."))
        && (text.ends_with(".http.headers") || text.ends_with(".http.header_files"))
}

/// Splits a dotted key into the keys of the levels.
fn split(tree: &Node, key: &str) -> Result<Vec<String>, String> {
    let mut node = Some(tree);
    let mut path = Path::default();
    let mut rest = key;
    let mut keys = Vec::new();
    loop {
        let (name, after) = if let Some(quoted) = rest.strip_prefix('"') {
            quoted
                .split_once('"')
                .ok_or("has an opening quote without a closing one")?
        } else if is_properties(&path) {
            (rest, "")
        } else {
            let known = node.into_iter().flat_map(|node| match &node.value {
                Value::Map(entries) => entries.iter().map(|(name, _)| name.as_str()).collect(),
                _ => Vec::new(),
            });
            let fits = |name: &&str| {
                rest.strip_prefix(*name)
                    .is_some_and(|after| after.is_empty() || after.starts_with('.'))
            };
            let length = known.filter(fits).map(str::len).max();
            rest.split_at(length.unwrap_or_else(|| rest.find('.').unwrap_or(rest.len())))
        };
        if name.is_empty() {
            return Err("names an empty level; a key is written kafka.brokers".to_owned());
        }
        node = node.and_then(|node| node.get(name));
        path = path.key(name);
        keys.push(name.to_owned());
        match after.strip_prefix('.') {
            Some(after) => rest = after,
            None if after.is_empty() => return Ok(keys),
            None => return Err("has text behind a closing quote; levels are separated by dots".to_owned()),
        }
    }
}
