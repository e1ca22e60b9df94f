//! Settings before they have types: a tree of strings, each with its origin.
//!
//! Scalars keep their original text, and the type of the field decides how it is interpreted. So the value `1.10` of a
//! librdkafka property does not become `1.1`.

use std::fmt;
use std::sync::Arc;

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) value: Value,
    pub(super) origin: Origin,
}

#[derive(Clone, Debug)]
pub(super) enum Value {
    /// `~` or `null`.
    Null,
    /// A key without a value, which means the same as `null` where it is certain that a mapping is meant.
    Empty,
    /// A scalar of a YAML file. A quoted scalar is text even if it looks like null.
    Scalar(String),
    /// A scalar of a YAML file without quotes, which may be a number or a boolean.
    Plain(String),
    /// The text of an environment variable or a flag. The type of the field decides whether it is a scalar, a list
    /// `a,b`, or YAML in brackets.
    Raw(String),
    List(Vec<Node>),
    /// Keys and values in the order of the file.
    Map(Vec<(String, Node)>),
}

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    Default,
    /// Name and line, which counts from 1.
    File(Arc<str>, usize),
    /// The name of the variable.
    Environment(Arc<str>),
    /// The key of `--set`.
    Flag(Arc<str>),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(name, line) => write!(f, "{name} line {line}"),
            Self::Environment(name) => write!(f, "environment variable {name}"),
            Self::Flag(key) => write!(f, "--set {key}"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Key(String),
    Index(usize),
}

/// A path from the root, displayed as `pipelines.crawl.retry.tiers[2]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Path(pub(super) Vec<Step>);

impl Path {
    pub(super) fn of(keys: &[&str]) -> Self {
        Self(keys.iter().map(|key| Step::Key((*key).to_owned())).collect())
    }

    pub(super) fn key(&self, key: &str) -> Self {
        self.step(Step::Key(key.to_owned()))
    }

    pub(super) fn index(&self, index: usize) -> Self {
        self.step(Step::Index(index))
    }

    /// The path one level up. The root is its own parent.
    pub(super) fn parent(&self) -> Self {
        Self(self.0[..self.0.len().saturating_sub(1)].to_vec())
    }

    /// Whether this path is `other` or below it.
    pub(super) fn is_within(&self, other: &Self) -> bool {
        self.0.starts_with(&other.0)
    }

    fn step(&self, step: Step) -> Self {
        let mut steps = self.0.clone();
        steps.push(step);
        Self(steps)
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (depth, step) in self.0.iter().enumerate() {
            match step {
                Step::Key(key) if depth == 0 => f.write_str(key)?,
                Step::Key(key) => write!(f, ".{key}")?,
                Step::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

impl Node {
    pub(super) fn new(value: Value, origin: Origin) -> Self {
        Self { value, origin }
    }

    pub(super) fn empty() -> Self {
        Self::new(Value::Map(Vec::new()), Origin::Default)
    }

    /// The keys and values of a mapping. Nothing, if this is none.
    pub(super) fn entries(&self) -> &[(String, Self)] {
        match &self.value {
            Value::Map(entries) => entries,
            _ => &[],
        }
    }

    /// The value of a key, if this is a mapping that contains it.
    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        let mut entries = self.entries().iter();
        entries.find(|(name, _)| name == key).map(|(_, node)| node)
    }

    pub(super) fn at(&self, path: &Path) -> Option<&Self> {
        path.0
            .iter()
            .try_fold(self, |node, step| match (step, &node.value) {
                (Step::Key(key), _) => node.get(key),
                (Step::Index(index), Value::List(items)) => items.get(*index),
                (Step::Index(_), _) => None,
            })
    }

    /// The path itself, or its nearest ancestor that exists.
    pub(super) fn nearest(&self, path: &Path) -> Path {
        let depths = (0..=path.0.len())
            .rev()
            .map(|depth| Path(path.0[..depth].to_vec()));
        depths
            .into_iter()
            .find(|path| self.at(path).is_some())
            .unwrap_or_default()
    }

    /// The origin of the value at a path, or of its nearest ancestor that exists.
    pub(super) fn origin_of(&self, path: &Path) -> &Origin {
        self.at(&self.nearest(path))
            .map_or(&Origin::Default, |node| &node.origin)
    }

    /// Removes a value from the tree. Does nothing if there is none.
    pub(super) fn remove(&mut self, path: &Path) {
        let Some((step, rest)) = path.0.split_first() else {
            return;
        };
        let last = rest.is_empty();
        match (step, &mut self.value) {
            (Step::Key(key), Value::Map(entries)) if last => entries.retain(|(name, _)| name != key),
            (Step::Key(key), Value::Map(entries)) => {
                if let Some((_, node)) = entries.iter_mut().find(|(name, _)| name == key) {
                    node.remove(&Path(rest.to_vec()));
                }
            }
            (Step::Index(index), Value::List(items)) if *index < items.len() => {
                if last {
                    items.remove(*index);
                } else {
                    items[*index].remove(&Path(rest.to_vec()));
                }
            }
            _ => {}
        }
    }
}
