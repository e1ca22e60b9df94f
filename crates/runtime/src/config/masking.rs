//! `dlq_inspector.masking`: which parts of dead letters only callers with the scope `dead-letters:unmasked` see.

use std::fmt;
use std::str::FromStr;

use regex::{Regex, RegexBuilder};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::display_from_str;
use super::error::Findings;
use super::output::{is_pointer, pointer_problem};

/// Maximum number of rules.
const MAX_RULES: usize = 100;
/// Maximum number of entries of each list of a rule.
const MAX_ENTRIES: usize = 64;
/// Maximum number of expressions of all rules: each takes memory and time.
const MAX_EXPRESSIONS: usize = 200;
/// Maximum number of names in a path.
const MAX_STEPS: usize = 32;
/// Maximum length of an expression or the pattern of a header, in bytes.
const MAX_LENGTH: usize = 512;
/// Maximum size of a compiled expression, in bytes.
const MAX_COMPILED: usize = 1 << 20;

/// A rule of `dlq_inspector.masking`. What several rules of a topic mask, all of them mask.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MaskingRule {
    /// The topics of the dead letters. `*` matches any text.
    pub topics: Vec<String>,
    /// Whether keys are masked.
    #[serde(default)]
    pub key: bool,
    /// The fields of JSON values that are masked.
    #[serde(default)]
    pub fields: Vec<FieldPath>,
    /// The names of the headers that are masked. `*` matches any text; the case of ASCII letters does not matter.
    #[serde(default)]
    pub headers: Vec<String>,
    /// What is masked in error messages.
    #[serde(default)]
    pub messages: Vec<Expression>,
}

/// A JSON pointer in which `*` is any name or index, and `**` any number of them, also none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldPath {
    text: String,
    steps: Vec<Step>,
}

/// A part of a [`FieldPath`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// This member of an object, or the element of an array with this index.
    Name(String),
    /// `*`: any member or element.
    Any,
    /// `**`: any number of steps.
    Deep,
}

/// A regular expression for parts of texts. It never matches the empty text everywhere.
#[derive(Clone, Debug)]
pub struct Expression(Regex);

impl MaskingRule {
    fn check(&self) -> Result<(), String> {
        if self.topics.is_empty() {
            return Err("topics is empty; write [\"*\"] for all dead-letter topics".to_owned());
        }
        for topic in &self.topics {
            if !redeliver_core::pipeline::is_topic_name(&topic.replace('*', "x")) {
                return Err(format!(
                    "topics: `{topic}` is not a topic name or a pattern such as *-dlq"
                ));
            }
        }
        for header in &self.headers {
            if header.is_empty() || header.len() > MAX_LENGTH {
                return Err(format!(
                    "headers: the pattern of a name has 1 to {MAX_LENGTH} bytes"
                ));
            }
        }
        for (list, length) in [
            ("topics", self.topics.len()),
            ("fields", self.fields.len()),
            ("headers", self.headers.len()),
            ("messages", self.messages.len()),
        ] {
            if length > MAX_ENTRIES {
                return Err(format!("{list} has {length} entries; the limit is {MAX_ENTRIES}"));
            }
        }
        if !self.key && self.fields.is_empty() && self.headers.is_empty() && self.messages.is_empty() {
            return Err("masks nothing; set at least one of key, fields, headers and messages".to_owned());
        }
        Ok(())
    }
}

/// Reports problems of the rules in the current section of `findings`.
pub(super) fn check(rules: &[MaskingRule], findings: &mut Findings<'_>) {
    if rules.len() > MAX_RULES {
        findings.report(
            "masking",
            format!("has {} rules; the limit is {MAX_RULES}", rules.len()),
        );
    }
    let expressions: usize = rules.iter().map(|rule| rule.messages.len()).sum();
    if expressions > MAX_EXPRESSIONS {
        let problem = format!("has {expressions} expressions in messages; the limit is {MAX_EXPRESSIONS}");
        findings.report("masking", problem);
    }
    for (index, rule) in rules.iter().enumerate() {
        if let Err(problem) = rule.check() {
            findings.report("masking", format!("rule {}: {problem}", index + 1));
        }
    }
}

impl FieldPath {
    /// The path as it is written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Its parts.
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }
}

impl FromStr for FieldPath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !is_pointer(text) {
            return Err(pointer_problem(text));
        }
        let steps: Vec<Step> = text
            .split('/')
            .skip(1)
            .map(|step| match step {
                "*" => Step::Any,
                "**" => Step::Deep,
                name => Step::Name(name.replace("~1", "/").replace("~0", "~")),
            })
            .collect();
        if steps.len() > MAX_STEPS {
            return Err(format!(
                "`{text}` has {} names; the limit is {MAX_STEPS}",
                steps.len()
            ));
        }
        Ok(Self {
            text: text.to_owned(),
            steps,
        })
    }
}

impl fmt::Display for FieldPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Expression {
    /// The compiled expression.
    #[must_use]
    pub fn regex(&self) -> &Regex {
        &self.0
    }
}

impl FromStr for Expression {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() || text.len() > MAX_LENGTH {
            return Err(format!("an expression has 1 to {MAX_LENGTH} bytes"));
        }
        let regex = RegexBuilder::new(text).size_limit(MAX_COMPILED).build();
        let regex = regex.map_err(|error| match error {
            regex::Error::CompiledTooBig(_) => {
                format!("`{text}` is too large, mostly because of counted repetitions such as {{1,1000}}")
            }
            error => {
                let error = error.to_string();
                // The last line of a syntax error is its description.
                let cause = error.lines().last().unwrap_or_default().to_owned();
                format!("`{text}` is not a regular expression: {cause}")
            }
        })?;
        if regex.is_match("") {
            return Err(format!(
                "`{text}` matches the empty text, so that it would match everywhere; use + instead of *"
            ));
        }
        Ok(Self(regex))
    }
}

impl fmt::Display for Expression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.as_str())
    }
}

impl PartialEq for Expression {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

impl Eq for Expression {}

impl Serialize for FieldPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        display_from_str::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for FieldPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        display_from_str::deserialize(deserializer)
    }
}

impl Serialize for Expression {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        display_from_str::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for Expression {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // White space at the ends is part of an expression.
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_consists_of_names_and_wildcards() {
        let path: FieldPath = "/a~1b/*/**/~0/0".parse().unwrap();
        let name = |text: &str| Step::Name(text.to_owned());
        assert_eq!(
            path.steps(),
            [name("a/b"), Step::Any, Step::Deep, name("~"), name("0")]
        );
        assert_eq!(path.to_string(), "/a~1b/*/**/~0/0");
        for invalid in ["", "a", "/~2", &"/a".repeat(33)] {
            assert!(invalid.parse::<FieldPath>().is_err(), "{invalid}");
        }
    }

    #[test]
    fn an_expression_is_bounded_and_matches_something() {
        assert!("[0-9]{13,19}".parse::<Expression>().is_ok());
        for (invalid, says) in [
            ("", "1 to 512 bytes"),
            ("(", "unclosed group"),
            ("[0-9]*", "matches the empty text"),
            (r"(\w{1000}){1000}", "is too large"),
            (r"(a)\1", "backreferences are not supported"),
        ] {
            let error = invalid.parse::<Expression>().unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
