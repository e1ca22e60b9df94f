//! Environment variables and flags that override settings of the file.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::error::InvalidField;
use super::tree::{Node, Origin, Path, Value};
use super::yaml;

const PREFIX: &str = "REDELIVER__";

/// Applies every variable `REDELIVER__A__B` to the key `a.b`.
///
/// Names are case-insensitive. `_` also matches characters that the name of a variable cannot contain:
/// `REDELIVER__PIPELINES__CRAWL_JOBS__OUTPUT` sets the output of the pipeline `crawl-jobs` of the file, and
/// `REDELIVER__KAFKA__PROPERTIES__SASL_USERNAME` sets the property `sasl.username`.
pub(super) fn apply_environment(
    tree: &mut Node,
    environment: &BTreeMap<String, String>,
    problems: &mut Vec<InvalidField>,
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
            let problem = "has an empty level; separate levels by two underscores";
            problems.push(InvalidField::new(
                &Path::of(&[name.as_str()]),
                problem,
                &Origin::Default,
            ));
            continue;
        }
        let target = keys.iter().map(String::as_str);
        apply(tree, target, text, &origin, problems, resolve_key);
    }
}

/// Applies flags, each a dotted key and a value. A key of the file that contains dots is recognised. A new one must be
/// quoted: `pipelines."my.topic".output`.
pub(super) fn apply_flags(tree: &mut Node, flags: &[(String, String)], problems: &mut Vec<InvalidField>) {
    for (key, text) in flags {
        let origin = Origin::Flag(Arc::from(key.as_str()));
        match split(tree, key) {
            Ok(keys) => {
                let target = keys.iter().map(String::as_str);
                apply(tree, target, text, &origin, problems, |_, _, key| {
                    Ok(key.to_owned())
                });
            }
            Err(problem) => problems.push(InvalidField::new(&Path::of(&[key.as_str()]), problem, &origin)),
        }
    }
}

fn apply<'k>(
    tree: &mut Node,
    keys: impl Iterator<Item = &'k str>,
    text: &str,
    origin: &Origin,
    problems: &mut Vec<InvalidField>,
    resolve: impl Fn(&Node, &Path, &str) -> Result<String, String>,
) {
    let mut node = tree;
    let mut path = Path::default();
    for key in keys {
        if let Err(problem) = make_mapping(node, origin) {
            problems.push(InvalidField::new(&path, problem, origin));
            return;
        }
        let key = match resolve(node, &path, key) {
            Ok(key) => key,
            Err(problem) => {
                problems.push(InvalidField::new(&path.key(key), problem, origin));
                return;
            }
        };
        path = path.key(&key);
        // `make_mapping` ensures that it is one.
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

/// Turns a node into a mapping, so that a key can be set in it. An earlier override `{...}` of the node keeps its keys.
fn make_mapping(node: &mut Node, origin: &Origin) -> Result<(), String> {
    match &node.value {
        Value::Map(_) => {}
        Value::Raw(text) if text.trim_start().starts_with('{') => {
            *node = yaml::parse_inline(text, &node.origin)?;
        }
        _ => *node = Node::new(Value::Map(Vec::new()), origin.clone()),
    }
    Ok(())
}

/// The key that a segment of a variable's name refers to.
fn resolve_key(node: &Node, path: &Path, key: &str) -> Result<String, String> {
    let fold = |name: &str| name.to_lowercase().replace(['-', '.'], "_");
    let Value::Map(entries) = &node.value else {
        return Ok(key.to_owned());
    };
    if entries.iter().any(|(name, _)| name == key) {
        return Ok(key.to_owned());
    }
    let matching: Vec<&str> = entries
        .iter()
        .map(|(name, _)| name.as_str())
        .filter(|name| fold(name) == fold(key))
        .collect();
    match matching[..] {
        [name] => Ok(name.to_owned()),
        [] if is_properties(path) => Ok(key.replace('_', ".")),
        [] if is_headers(path) => Ok(key.replace('_', "-")),
        [] => Ok(key.to_owned()),
        _ => Err(format!(
            "is ambiguous: it matches {}; set it in the file instead",
            matching.join(", ")
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

/// Splits a dotted key into the keys of its levels.
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
            // Names of properties contain dots and are the last level.
            (rest, "")
        } else {
            let known = node.into_iter().flat_map(|node| match &node.value {
                Value::Map(entries) => entries.iter().map(|(name, _)| name.as_str()).collect(),
                _ => Vec::new(),
            });
            let is_prefix = |name: &&str| {
                rest.strip_prefix(*name)
                    .is_some_and(|after| after.is_empty() || after.starts_with('.'))
            };
            let length = known.filter(is_prefix).map(str::len).max();
            rest.split_at(length.unwrap_or_else(|| rest.find('.').unwrap_or(rest.len())))
        };
        if name.is_empty() {
            return Err("has an empty level; write a key such as kafka.brokers".to_owned());
        }
        node = node.and_then(|node| node.get(name));
        path = path.key(name);
        keys.push(name.to_owned());
        match after.strip_prefix('.') {
            Some(after) => rest = after,
            None if after.is_empty() => return Ok(keys),
            None => return Err("has text after a closing quote; separate levels by dots".to_owned()),
        }
    }
}
