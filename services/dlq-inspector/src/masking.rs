//! What only callers with the scope `dead-letters:unmasked` see of the dead letters that others see as well.
//!
//! Rules name fields of JSON values, keys, headers, and parts of error messages. Everything that is read from headers is read from the masked
//! headers, so that no field of an answer contains what its header does not show. The same is true for groups, see
//! [`Letter::read`](crate::letter::Letter::read): their ids and templates are made of what is left, for all callers.

mod json;
pub(crate) mod text;

use std::sync::LazyLock;

use bytes::Bytes;
use redeliver_core::Headers;
use redeliver_core::failure::{CUT, MESSAGE_LIMIT};
use redeliver_core::headers::{ERROR_MESSAGE, ERROR_RESPONSE, JOB_ID, TRACEPARENT};
use redeliver_core::pattern::matches;

use crate::config::{Expression, FieldPath, MaskingRule};
use crate::dialect::{self, Facts, Field};
use crate::filter::{NumberField, Restriction, TextField};
pub use text::MASK;
use text::lower_case;

/// Headers that are longer than this are masked as a whole, if parts of them would be, in bytes. To find all matches of an expression can take a
/// time that is quadratic in the length.
const MAX_SEARCHED: usize = 32 << 10;

/// Increases with each change of what is masked by the same rules, so that an index of an older version is not used.
const VERSION: u32 = 2;

/// How deserializers quote a value that they cannot read, which may then contain what rules for keys and fields mask.
static QUOTED_RECORDS: LazyLock<Vec<Expression>> = LazyLock::new(|| {
    let expressions = [
        // The bytes as numbers, as in `Can't deserialize data [[123, 34, 112]] from topic [orders]`.
        r"\[(?:\[-?[0-9]|-?[0-9]{1,3}(?:, ?-?[0-9]{1,3}){3})[-0-9, ]*",
        // As a text, as in `[Source: (byte[])"{"pan":4111}"[truncated 500 bytes]; line: 1, column: 8]`.
        r#"(?s)\[Source: ?\([^)]{1,64}\) ?"(?:.*"(?:\[truncated [^\]]{1,40}\])?; line: |.*)"#,
    ];
    let parsed = expressions.iter().map(|text| text.parse());
    parsed.collect::<Result<_, String>>().expect("a test parses them")
});

/// The rules of `dlq_inspector.masking`.
#[derive(Clone, Debug, Default)]
pub struct Masking {
    rules: Vec<MaskingRule>,
}

/// The rules for a topic.
#[derive(Clone, Debug, Default)]
pub struct Mask<'m>(Vec<&'m MaskingRule>);

/// Headers without what is masked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MaskedHeaders {
    /// The headers.
    pub headers: Headers,
    /// The names of those that differ, each once.
    pub masked: Vec<String>,
}

/// A value without what is masked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MaskedValue<'m> {
    /// With the paths that were found in it.
    Shown(Bytes, Vec<&'m FieldPath>),
    /// There are paths, and the value is not a JSON document in which they can be found.
    Withheld,
}

/// A part of a dead letter that the inspector reads from its headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fact {
    /// In the headers of the dialects.
    Of(Field),
    TraceId,
    JobId,
}

impl Masking {
    /// The rules of a configuration.
    #[must_use]
    pub fn new(rules: &[MaskingRule]) -> Self {
        let mut rules = rules.to_vec();
        for header in rules.iter_mut().flat_map(|rule| &mut rule.headers) {
            header.make_ascii_lowercase();
        }
        Self { rules }
    }

    /// The rules for a topic.
    #[must_use]
    pub fn of(&self, topic: &str) -> Mask<'_> {
        let applies = |rule: &&MaskingRule| rule.topics.iter().any(|pattern| matches(pattern, topic));
        Mask(self.rules.iter().filter(applies).collect())
    }

    /// The rules for all topics.
    pub(crate) fn all(&self) -> Mask<'_> {
        Mask(self.rules.iter().collect())
    }

    /// What the groups in an index depend on; `None` without rules.
    pub(crate) fn of_groups(&self) -> Option<String> {
        let parts: Vec<_> = self
            .rules
            .iter()
            .map(|rule| {
                let messages = rule.messages.iter().map(Expression::to_string);
                (
                    &rule.topics,
                    &rule.headers,
                    messages.collect::<Vec<_>>(),
                    rule.key || !rule.fields.is_empty(),
                )
            })
            .collect();
        (!parts.is_empty()).then(|| format!("masking {VERSION} {parts:?}"))
    }

    /// What an operator should know about the rules.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let rules = self.rules.iter().enumerate();
        let incomplete = rules.filter(|(_, rule)| {
            (rule.key || !rule.fields.is_empty()) && rule.messages.is_empty() && rule.headers.is_empty()
        });
        incomplete
            .map(|(index, _)| {
                format!(
                    "rule {}: masks keys or fields, and no messages; error messages can quote them",
                    index + 1
                )
            })
            .collect()
    }
}

impl<'m> Mask<'m> {
    /// Whether nothing is masked.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether keys are masked.
    #[must_use]
    pub fn has_key(&self) -> bool {
        self.0.iter().any(|rule| rule.key)
    }

    /// Whether fields of values are masked. The size of a value tells how long they are, or whether they are `true` or `false`.
    #[must_use]
    pub fn has_fields(&self) -> bool {
        self.paths().next().is_some()
    }

    fn paths(&self) -> impl Iterator<Item = &'m FieldPath> {
        self.0.iter().flat_map(|rule| &rule.fields)
    }

    /// For messages.
    fn expressions(&self) -> Vec<&'m Expression> {
        let quoted = self.copies_of_records_count().then_some(&*QUOTED_RECORDS);
        let configured = self.0.iter().flat_map(|rule| &rule.messages);
        configured.chain(quoted.into_iter().flatten()).collect()
    }

    /// Whether a copy of the record, or of a part of it, may contain what is masked.
    fn copies_of_records_count(&self) -> bool {
        self.has_key() || self.has_fields()
    }

    /// Whether the whole header is masked.
    fn hides_header(&self, name: &str) -> bool {
        if self.copies_of_records_count() && dialect::may_contain_record(name) {
            return true;
        }
        let mut patterns = self.0.iter().flat_map(|rule| &rule.headers).peekable();
        if patterns.peek().is_none() {
            return false;
        }
        let name = lower_case(name);
        patterns.any(|pattern| matches(pattern, &name))
    }

    /// Whether a fact is masked as a whole, because a header is from which it may come, in any dialect.
    pub(crate) fn hides(&self, fact: Fact) -> bool {
        match fact {
            Fact::Of(field) => dialect::headers_of(field).any(|header| self.hides_header(header)),
            Fact::TraceId => self.hides_header(TRACEPARENT),
            Fact::JobId => self.hides_header(JOB_ID),
        }
    }

    /// Whether a fact may be masked, wholly or in part, in any dialect.
    fn may_hide(&self, fact: Fact) -> bool {
        self.hides(fact)
            || match fact {
                Fact::Of(Field::ErrorMessage) => self.has_messages() || self.copies_of_records_count(),
                // The name of a class quotes no record, but an expression may find something in it.
                Fact::Of(field) => {
                    self.has_messages() && dialect::headers_of(field).any(dialect::may_contain_message)
                }
                Fact::TraceId | Fact::JobId => false,
            }
    }

    /// Whether the place where a record entered its pipeline, or the time, is masked.
    pub(crate) fn hides_origin(&self) -> bool {
        [
            Field::OriginTopic,
            Field::OriginPartition,
            Field::OriginOffset,
            Field::OriginTimestamp,
        ]
        .into_iter()
        .any(|field| self.hides(Fact::Of(field)))
    }

    /// Whether the job of a record is masked.
    pub(crate) fn hides_job(&self) -> bool {
        self.hides(Fact::JobId)
    }

    /// Whether what a filter tests may be masked. Its answer would tell it.
    pub(crate) fn hides_tested(&self, restriction: &Restriction) -> bool {
        if self.is_empty() {
            return false;
        }
        match restriction {
            Restriction::Key(_) => self.has_key(),
            Restriction::Header(name, _) => {
                let is_searched = self.has_messages() || self.copies_of_records_count();
                self.hides_header(name) || (is_searched && dialect::may_contain_message(name))
            }
            Restriction::Json(pointer, _) => {
                let names = pointer.split('/').skip(1);
                let names: Vec<String> = names
                    .map(|name| name.replace("~1", "/").replace("~0", "~"))
                    .collect();
                self.paths().any(|path| json::masks(path, &names))
            }
            Restriction::Text(field, _) => match text_fact(*field) {
                Some(fact) => self.may_hide(fact),
                None => false,
            },
            Restriction::Number(NumberField::ValueSize, _) => self.has_fields(),
            Restriction::Number(field, _) => number_fact(*field).is_some_and(|fact| self.may_hide(fact)),
            Restriction::Id(_) | Restriction::TopicIn(_) | Restriction::Expiry(..) => false,
        }
    }

    fn has_messages(&self) -> bool {
        self.0.iter().any(|rule| !rule.messages.is_empty())
    }

    /// Masks headers. All headers of the same name are masked.
    #[must_use]
    pub fn headers<'h>(&self, headers: impl Iterator<Item = (&'h str, Option<&'h [u8]>)>) -> MaskedHeaders {
        let expressions = self.expressions();
        let mut result = MaskedHeaders::default();
        for (name, value) in headers {
            let masked = if self.hides_header(name) {
                Some(MASK.to_owned())
            } else if !expressions.is_empty() && dialect::may_contain_message(name) {
                value.and_then(|value| masked_message(name, value, &expressions))
            } else {
                None
            };
            match masked {
                Some(text) => {
                    result.headers.push_text(name, &text);
                    if !result.masked.iter().any(|masked| masked == name) {
                        result.masked.push(name.to_owned());
                    }
                }
                None => result.headers.push(name, value),
            }
        }
        result
    }

    /// What headers say without what is masked; `None` if that makes no difference.
    pub(crate) fn facts<'h>(
        &self,
        headers: impl Iterator<Item = (&'h str, Option<&'h [u8]>)>,
    ) -> Option<Facts> {
        if self.is_empty() {
            return None;
        }
        let masked = self.headers(headers);
        (!masked.masked.is_empty()).then(|| Facts::read(&masked.headers))
    }

    /// Masks a value.
    #[must_use]
    pub fn value(&self, value: Bytes) -> MaskedValue<'m> {
        let paths: Vec<&FieldPath> = self.paths().collect();
        // An empty value says nothing.
        if paths.is_empty() || value.is_empty() {
            return MaskedValue::Shown(value, Vec::new());
        }
        match json::mask(&value, &paths) {
            Some(masked) => MaskedValue::Shown(masked.text.into(), masked.found),
            None => MaskedValue::Withheld,
        }
    }
}

/// A header with an error message without what the expressions find; `None` if they find nothing.
fn masked_message(name: &str, value: &[u8], expressions: &[&Expression]) -> Option<String> {
    let text = std::str::from_utf8(value).ok();
    let Some(text) = text.filter(|text| text.len() <= MAX_SEARCHED) else {
        return Some(MASK.to_owned());
    };
    let cut = text.strip_suffix(CUT).filter(|_| name == ERROR_RESPONSE);
    // The writer of the dead letter has cut the message, perhaps within a character.
    let is_cut = cut.is_some() || (name == ERROR_MESSAGE && text.len() + 3 >= MESSAGE_LIMIT);
    let shown = cut.unwrap_or(text);
    let masked = text::mask(shown, expressions, is_cut);
    (masked != shown).then(|| masked.into_owned())
}

fn text_fact(field: TextField) -> Option<Fact> {
    Some(match field {
        TextField::Topic => return None,
        TextField::Pipeline => Fact::Of(Field::Pipeline),
        TextField::ErrorClass => Fact::Of(Field::ErrorClass),
        TextField::ErrorCode => Fact::Of(Field::ErrorCode),
        TextField::ErrorMessage => Fact::Of(Field::ErrorMessage),
        TextField::OriginTopic => Fact::Of(Field::OriginTopic),
        TextField::JobId => Fact::JobId,
        TextField::TraceId => Fact::TraceId,
    })
}

fn number_fact(field: NumberField) -> Option<Fact> {
    Some(Fact::Of(match field {
        NumberField::FailedAt => Field::FailedAt,
        NumberField::RetryCount => Field::RetryCount,
        NumberField::OriginPartition => Field::OriginPartition,
        NumberField::OriginOffset => Field::OriginOffset,
        NumberField::OriginTimestamp => Field::OriginTimestamp,
        // Positions and states are not in headers. Groups are made of masked headers. Which dialect it is, the names of headers say.
        NumberField::Partition
        | NumberField::Offset
        | NumberField::DeadAt
        | NumberField::Group
        | NumberField::State
        | NumberField::Dialect
        | NumberField::ValueSize => return None,
    }))
}

#[cfg(test)]
mod tests;
