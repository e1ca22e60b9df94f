//! `dlq_inspector.masking`: which parts of dead letters only callers with the scope `dead-letters:unmasked` see.

use std::fmt;
use std::str::FromStr;

use redeliver_core::serde_as_text;
use redeliver_runtime::config::{Findings, is_pointer, pointer_problem};
use regex::{Regex, RegexBuilder};
use regex_automata::hybrid::dfa::{Cache, DFA};
use regex_automata::nfa::thompson;
use regex_automata::{Anchored, Input};
use regex_syntax::hir::{Hir, HirKind, LookSet, Repetition};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Maximum number of rules.
const MAX_RULES: usize = 100;
/// Maximum number of entries of each list of a rule.
const MAX_ENTRIES: usize = 64;
/// Maximum number of expressions of all rules: each takes memory and time.
const MAX_EXPRESSIONS: usize = 200;
/// Maximum number of paths of all rules: each takes the time to scan a value.
const MAX_FIELDS: usize = 500;
/// Maximum number of names in a path.
const MAX_STEPS: usize = 32;
/// Maximum length of an expression or the pattern of a header, in bytes.
const MAX_LENGTH: usize = 512;
/// Maximum size of a compiled expression, in bytes.
const MAX_COMPILED: usize = 1 << 20;
/// Maximum memory for the states of an expression that a search meets, in bytes.
const MAX_STATES: usize = 256 << 10;

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
pub struct Expression {
    regex: Regex,
    /// Tells after each byte whether a match is still possible, which `regex` does not.
    automaton: DFA,
}

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
    let fields: usize = rules.iter().map(|rule| rule.fields.len()).sum();
    if fields > MAX_FIELDS {
        findings.report(
            "masking",
            format!("has {fields} paths in fields; the limit is {MAX_FIELDS}"),
        );
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
        &self.regex
    }

    /// Where in a text, of which the end may be missing, the first match begins that may go on beyond the end.
    #[must_use]
    pub fn begins_at(&self, text: &str) -> Option<usize> {
        let mut cache = self.automaton.create_cache();
        let mut starts = text.char_indices().map(|(at, _)| at);
        starts.find(|at| self.may_go_on(&mut cache, text, *at))
    }

    /// Whether a match from this place to the end of the text may go on beyond it.
    fn may_go_on(&self, cache: &mut Cache, text: &str, at: usize) -> bool {
        let from = Input::new(text).range(at..).anchored(Anchored::Yes);
        let Ok(mut state) = self.automaton.start_state_forward(cache, &from) else {
            return true;
        };
        for byte in &text.as_bytes()[at..] {
            match self.automaton.next_state(cache, state, *byte) {
                Ok(next) if next.is_dead() => return false,
                Ok(next) => state = next,
                Err(_) => return true,
            }
        }
        true
    }
}

fn automaton(expression: &str) -> Result<DFA, String> {
    let hir = regex_syntax::parse(expression).map_err(|error| error.to_string())?;
    let nfa = thompson::Compiler::new()
        .configure(thompson::Config::new().nfa_size_limit(Some(MAX_COMPILED)))
        .build_from_hir(&without_word_boundaries(hir))
        .map_err(|error| error.to_string())?;
    let states = DFA::config()
        .cache_capacity(MAX_STATES)
        .skip_cache_capacity_check(true);
    let automaton = DFA::builder().configure(states).build_from_nfa(nfa);
    automaton.map_err(|error| error.to_string())
}

/// An expression that matches at least as much, without what an automaton cannot decide: where words of all scripts begin and end.
fn without_word_boundaries(hir: Hir) -> Hir {
    let all = |parts: Vec<Hir>| parts.into_iter().map(without_word_boundaries).collect();
    match hir.into_kind() {
        HirKind::Empty => Hir::empty(),
        HirKind::Literal(literal) => Hir::literal(literal.0),
        HirKind::Class(class) => Hir::class(class),
        HirKind::Look(look) if LookSet::singleton(look).contains_word_unicode() => Hir::empty(),
        HirKind::Look(look) => Hir::look(look),
        HirKind::Repetition(repetition) => Hir::repetition(Repetition {
            sub: Box::new(without_word_boundaries(*repetition.sub)),
            ..repetition
        }),
        HirKind::Capture(capture) => without_word_boundaries(*capture.sub),
        HirKind::Concat(parts) => Hir::concat(all(parts)),
        HirKind::Alternation(parts) => Hir::alternation(all(parts)),
    }
}

impl FromStr for Expression {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() || text.len() > MAX_LENGTH {
            return Err(format!("an expression has 1 to {MAX_LENGTH} bytes"));
        }
        let regex = RegexBuilder::new(text)
            .size_limit(MAX_COMPILED)
            .dfa_size_limit(MAX_STATES)
            .build();
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
        let automaton = automaton(text).map_err(|problem| format!("`{text}` cannot be used: {problem}"))?;
        Ok(Self { regex, automaton })
    }
}

impl fmt::Display for Expression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.regex.as_str())
    }
}

impl PartialEq for Expression {
    fn eq(&self, other: &Self) -> bool {
        self.regex.as_str() == other.regex.as_str()
    }
}

impl Eq for Expression {}

serde_as_text!(FieldPath);

impl Serialize for Expression {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
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
    fn paths_have_names_and_wildcards() {
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
    fn expression_is_bounded_and_matches() {
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

    #[test]
    fn cut_match_is_found() {
        let begins = |expression: &str, text: &str| expression.parse::<Expression>().unwrap().begins_at(text);
        assert_eq!(begins("[0-9]{16}", "card 411111"), Some(5));
        assert_eq!(begins("[0-9]{16}", "card 411111 x"), None);
        // Whatever its length.
        let token = format!("of eyJ{}", "a".repeat(900));
        assert_eq!(begins("eyJ[a-zA-Z0-9_.-]+", &token), Some(3));
        assert_eq!(begins("(?s)BEGIN.*END", &format!("ß BEGIN {token}")), Some(3));
        // A match that is certain to have ended is found by a search.
        assert_eq!(begins("[a-z]+@[a-z.]+", "bob@example.com, "), None);
        assert_eq!(begins("[a-z]+@[a-z.]+", "no mail to b"), Some(11));
        assert_eq!(begins(r"\b[0-9]{16}\b", "größe 4111"), Some(8));
        assert_eq!(begins("a", ""), None);
    }
}
