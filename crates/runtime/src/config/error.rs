//! Configuration errors: each names the field, says what is wrong and what is valid, and where the value comes from.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use redeliver_core::HumanDuration;

use super::tree::{Node, Origin, Path};

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The configuration file cannot be read.
    #[error("cannot read the configuration file {}", path.display())]
    Unreadable {
        /// The path of the file.
        path: PathBuf,
        /// The error of the file system.
        source: std::io::Error,
    },
    /// The file is not valid YAML, or uses a YAML feature that is not supported.
    #[error("{place}: {problem}")]
    Syntax {
        /// File and line.
        place: String,
        /// What is wrong.
        problem: String,
    },
    /// Fields are invalid. All invalid fields are listed.
    #[error("{}", ProblemList(.0))]
    Invalid(Vec<InvalidField>),
}

impl ConfigError {
    /// An error of one field, whose value may come from anywhere.
    #[must_use]
    pub fn of_field(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid(vec![InvalidField {
            field: field.into(),
            problem: problem.into(),
            place: None,
        }])
    }
}

impl From<InvalidField> for ConfigError {
    fn from(problem: InvalidField) -> Self {
        Self::Invalid(vec![problem])
    }
}

/// One invalid field. `Display` shows field, problem and place in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidField {
    /// The field as a dotted path, such as `kafka.lanes`.
    pub field: String,
    /// What is wrong, and what is valid.
    pub problem: String,
    /// Where the value comes from: a line of a file, an environment variable or a flag.
    pub place: Option<String>,
}

impl InvalidField {
    pub(super) fn new(path: &Path, problem: impl Into<String>, origin: &Origin) -> Self {
        Self {
            field: path.to_string(),
            problem: problem.into(),
            place: (*origin != Origin::Default).then(|| origin.to_string()),
        }
    }
}

impl fmt::Display for InvalidField {
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

struct ProblemList<'a>(&'a [InvalidField]);

impl fmt::Display for ProblemList<'_> {
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

/// Collects problems while the sections check themselves. Tracks the path of the current section.
pub struct Findings<'t> {
    tree: &'t Node,
    path: Path,
    problems: Vec<InvalidField>,
}

impl<'t> Findings<'t> {
    pub(super) fn new(tree: &'t Node) -> Self {
        Self {
            tree,
            path: Path::default(),
            problems: Vec::new(),
        }
    }

    pub(super) fn into_problems(self) -> Vec<InvalidField> {
        self.problems
    }

    /// Runs checks one level deeper, below `key`.
    pub fn inside(&mut self, key: &str, check: impl FnOnce(&mut Self)) {
        let outer = std::mem::take(&mut self.path);
        self.path = outer.key(key);
        check(self);
        self.path = outer;
    }

    /// Reports an invalid field of the current section.
    pub fn report(&mut self, key: &str, problem: impl Into<String>) {
        let path = self.path.key(key);
        self.problems
            .push(InvalidField::new(&path, problem, self.tree.origin_of(&path)));
    }

    /// Reports a number or a duration that is out of range.
    pub fn range<T: Copy + PartialOrd + fmt::Display>(
        &mut self,
        key: &str,
        value: T,
        allowed: RangeInclusive<T>,
    ) {
        if !allowed.contains(&value) {
            let (low, high) = allowed.into_inner();
            self.report(
                key,
                format!("{value} is out of range: must be between {low} and {high}"),
            );
        }
    }

    /// Reports a duration that is out of range, in seconds.
    pub fn seconds(&mut self, key: &str, value: HumanDuration, allowed: RangeInclusive<u64>) {
        let (low, high) = allowed.into_inner();
        self.range(
            key,
            value,
            HumanDuration::from_secs(low)..=HumanDuration::from_secs(high),
        );
    }

    /// Reports an invalid topic name.
    pub fn topic(&mut self, key: &str, name: &str) {
        if !redeliver_core::pipeline::is_topic_name(name) {
            self.report(key, format!("`{name}` is not a valid topic name: {TOPIC_RULE}"));
        }
    }
}

/// Kafka's rule for topic names.
pub(super) const TOPIC_RULE: &str = "use 1 to 249 of the characters a-z, A-Z, 0-9, `.`, `_` and `-`";

/// The end of an error message about an unknown name: the most similar known name, or all known names.
#[must_use]
pub fn suggestion<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
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
        None => format!("; expected one of {}", known.join(", ")),
    }
}

fn fold(name: &str) -> String {
    name.to_lowercase().replace('-', "_")
}
