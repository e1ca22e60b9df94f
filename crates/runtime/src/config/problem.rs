//! What can be wrong with a configuration, and how it is said: the field, what is wrong, what would be
//! right, and where it was written.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use super::tree::{Node, Origin, Path};

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file that was named cannot be read.
    #[error("cannot read the configuration file {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The text is not YAML that a configuration can be.
    #[error("{place}: {problem}")]
    Syntax {
        /// File and line.
        place: String,
        /// What is wrong.
        problem: String,
    },
    /// Fields are wrong; all that were found.
    #[error("{}", Listed(.0))]
    Invalid(Vec<Problem>),
}

/// One wrong field. `Display` gives field, problem and place in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The field as a dotted path, such as `kafka.lanes`.
    pub field: String,
    /// What is wrong and what would be right.
    pub problem: String,
    /// Where it was written: a line of a file, an environment variable or a flag.
    pub place: Option<String>,
}

impl Problem {
    pub(super) fn new(path: &Path, problem: impl Into<String>, origin: &Origin) -> Self {
        Self {
            field: path.to_string(),
            problem: problem.into(),
            place: (*origin != Origin::Default).then(|| origin.to_string()),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.field.is_empty() {
            write!(f, "the configuration {}", self.problem)?;
        } else {
            write!(f, "{}: {}", self.field, self.problem)?;
        }
        match &self.place {
            Some(place) => write!(f, " ({place})"),
            None => Ok(()),
        }
    }
}

struct Listed<'a>(&'a [Problem]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [single] => write!(f, "{single}"),
            several => {
                write!(f, "the configuration has {} problems", several.len())?;
                several.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
            }
        }
    }
}

/// Collects what is wrong while the sections check themselves; knows where it stands in the tree.
pub(super) struct Findings<'t> {
    tree: &'t Node,
    path: Path,
    problems: Vec<Problem>,
}

impl<'t> Findings<'t> {
    pub(super) fn new(tree: &'t Node) -> Self {
        Self {
            tree,
            path: Path::default(),
            problems: Vec::new(),
        }
    }

    pub(super) fn into_problems(self) -> Vec<Problem> {
        self.problems
    }

    /// Checks a part one level down.
    pub(super) fn inside(&mut self, key: &str, check: impl FnOnce(&mut Self)) {
        let outer = std::mem::take(&mut self.path);
        self.path = outer.key(key);
        check(self);
        self.path = outer;
    }

    /// Notes that a field is wrong.
    pub(super) fn wrong(&mut self, key: &str, problem: impl Into<String>) {
        let path = self.path.key(key);
        self.problems
            .push(Problem::new(&path, problem, self.tree.origin_of(&path)));
    }

    /// Notes a number or a duration outside of its range.
    pub(super) fn range<T: Copy + PartialOrd + fmt::Display>(
        &mut self,
        key: &str,
        value: T,
        allowed: RangeInclusive<T>,
    ) {
        if !allowed.contains(&value) {
            let (low, high) = allowed.into_inner();
            self.wrong(
                key,
                format!("{value} is out of range; it is between {low} and {high}"),
            );
        }
    }

    /// Notes a name that cannot be a topic.
    pub(super) fn topic(&mut self, key: &str, name: &str) {
        if !redeliver_core::pipeline::is_topic_name(name) {
            self.wrong(key, format!("`{name}` cannot be a topic: {TOPIC_RULE}"));
        }
    }
}

/// What a topic may be called.
pub(super) const TOPIC_RULE: &str = "its name has 1 to 249 of the characters a-z, A-Z, 0-9, `.`, `_` and `-`";

/// `, did you mean ...?` when a known name is near, else the names that are known.
pub(super) fn hint<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.into_iter().collect();
    let folded = fold(name);
    let nearest = known
        .iter()
        .map(|candidate| (strsim::damerau_levenshtein(&folded, &fold(candidate)), *candidate))
        .min_by_key(|(distance, _)| *distance)
        .filter(|(distance, candidate)| *distance <= (candidate.len() / 3).max(1));
    match nearest {
        Some((_, nearest)) => format!(", did you mean `{nearest}`?"),
        None if known.is_empty() => String::new(),
        None => format!("; known are {}", known.join(", ")),
    }
}

fn fold(name: &str) -> String {
    name.to_lowercase().replace('-', "_")
}
