//! AIP-160 filters: parses text into an [`Expr`], and translates it into a SQL condition with bound parameters.
//!
//! ```text
//! error_class = "permanent" AND headers.tenant = "x" AND (retry_count > 3 OR NOT error_code : "http")
//! ```
//!
//! As in AIP-160, OR binds more tightly than AND, adjacent restrictions are joined by AND, and `-` means NOT. `:` tests
//! whether a text contains another one, compared by byte; `field:*` tests whether the field is present. A restriction on
//! a field that a dead letter does not have is false, for every operator, and NOT inverts it.
//!
//! The fields of a JSON value are `json./pointer`; only those that the configuration names are indexed.
//!
//! No IO. The length of a filter, its nesting and the number of its restrictions are limited.

mod dictionary;
mod field;
mod parse;
mod sql;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use redeliver_core::Position;

pub use dictionary::{Dictionary, Lookups, MessageMatches};
pub use parse::{parse, parse_recorded, without_secrets};
pub use sql::{Condition, Param};

/// Maximum length of a filter in bytes.
pub const MAX_LENGTH: usize = 8 * 1024;
/// Maximum nesting of parentheses and NOT.
pub const MAX_DEPTH: usize = 32;
/// Maximum number of restrictions in a filter.
pub const MAX_RESTRICTIONS: usize = 100;

/// A parsed filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expr {
    /// All of these. If empty, always true.
    And(Vec<Expr>),
    /// At least one of these.
    Or(Vec<Expr>),
    /// The negation of an expression.
    Not(Box<Expr>),
    /// A single restriction.
    Is(Restriction),
}

/// A test of one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Restriction {
    /// The dead letter with this id.
    Id(Position),
    /// A test of a text field.
    Text(TextField, TextTest),
    /// The dead letter is in one of these topics, with their ids in the index. Filters that people write have no such test.
    TopicIn(Vec<(i64, String)>),
    /// A test of a number field. Times are in milliseconds.
    Number(NumberField, NumberTest),
    /// A test of the headers with this name. One match is enough.
    Header(String, TextTest),
    /// A test of the record's key, as bytes.
    Key(TextTest),
    /// A test of the field of a JSON value at this JSON pointer.
    Json(String, TextTest),
    /// A test of the time from which Kafka may remove the dead letter because of its age. Those of topics without an age have none.
    Expiry(NumberTest, Ages),
}

/// The age in milliseconds from which the records of topics may be removed. A parsed filter does not know them, see [`Expr::with_ages`].
pub type Ages = Arc<BTreeMap<String, i64>>;

impl Expr {
    /// Whether a dead letter matches only if all of these expressions do. Parts that are joined by AND are listed one by one.
    #[must_use]
    pub fn conjuncts(&self) -> Vec<&Self> {
        match self {
            Self::And(all) => all.iter().flat_map(Self::conjuncts).collect(),
            _ => vec![self],
        }
    }

    /// Whether any restriction tests this field.
    #[must_use]
    pub fn tests(&self, field: NumberField) -> bool {
        !self.all(&|restriction| !matches!(restriction, Restriction::Number(tested, _) if *tested == field))
    }

    /// Whether any restriction tests when dead letters expire.
    #[must_use]
    pub fn tests_expiry(&self) -> bool {
        !self.all(&|restriction| !matches!(restriction, Restriction::Expiry(..)))
    }

    /// The filter for topics with these ages.
    #[must_use]
    pub fn with_ages(self, ages: &Ages) -> Self {
        let each = |parts: Vec<Self>| parts.into_iter().map(|part| part.with_ages(ages)).collect();
        match self {
            Self::And(parts) => Self::And(each(parts)),
            Self::Or(parts) => Self::Or(each(parts)),
            Self::Not(inner) => Self::Not(Box::new(inner.with_ages(ages))),
            Self::Is(Restriction::Expiry(test, _)) => Self::Is(Restriction::Expiry(test, ages.clone())),
            Self::Is(_) => self,
        }
    }

    /// Whether it can match dead letters of this topic, as far as its restrictions of topics tell.
    #[must_use]
    pub fn can_match_in(&self, topic: &str) -> bool {
        match self {
            Self::And(parts) => parts.iter().all(|part| part.can_match_in(topic)),
            Self::Or(parts) => parts.iter().any(|part| part.can_match_in(topic)),
            Self::Is(Restriction::Id(id)) => *id.topic == *topic,
            Self::Is(Restriction::Text(TextField::Topic, TextTest::Equal(name))) => name == topic,
            Self::Is(Restriction::Text(TextField::Topic, TextTest::Has(part))) => topic.contains(part),
            Self::Is(_) | Self::Not(_) => true,
        }
    }

    /// Whether the negation of a restriction that satisfies a condition may decide.
    pub fn negates(&self, condition: &impl Fn(&Restriction) -> bool) -> bool {
        match self {
            Self::And(parts) | Self::Or(parts) => parts.iter().any(|part| part.negates(condition)),
            Self::Not(inner) => !inner.all(&|restriction| !condition(restriction)),
            Self::Is(_) => false,
        }
    }

    /// Whether all restrictions satisfy a condition.
    pub fn all(&self, condition: &impl Fn(&Restriction) -> bool) -> bool {
        match self {
            Self::And(parts) | Self::Or(parts) => parts.iter().all(|part| part.all(condition)),
            Self::Not(inner) => inner.all(condition),
            Self::Is(restriction) => condition(restriction),
        }
    }
}

/// A test of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextTest {
    /// It equals this text.
    Equal(String),
    /// It contains this text.
    Has(String),
    /// It is present. A text field or a key must also not be empty.
    Present,
}

/// A test of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumberTest {
    /// It compares to this number.
    Compare(Comparison, i64),
    /// It is present.
    Present,
}

/// A comparison. `!=` is parsed as NOT `=`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// `=`
    Equal,
    /// `<`
    Less,
    /// `<=`
    LessOrEqual,
    /// `>`
    Greater,
    /// `>=`
    GreaterOrEqual,
}

/// Text fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextField {
    /// The dead-letter topic.
    Topic,
    /// The pipeline, consumer group or connector that gave up on the record.
    Pipeline,
    /// The failure class.
    ErrorClass,
    /// The error code, or the class of an exception.
    ErrorCode,
    /// The error message.
    ErrorMessage,
    /// The topic in which the record was first.
    OriginTopic,
    /// The id of a scheduled job.
    JobId,
    /// The W3C trace id.
    TraceId,
}

/// Fields that are stored as numbers: numbers, times and enums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumberField {
    /// The partition of the dead-letter topic.
    Partition,
    /// The offset in the dead-letter topic.
    Offset,
    /// The timestamp in the dead-letter topic.
    DeadAt,
    /// When processing failed.
    FailedAt,
    /// Number of attempts.
    RetryCount,
    /// The group, as the number of its id.
    Group,
    /// The state according to the ledger.
    State,
    /// The dialect of its headers.
    Dialect,
    /// The partition in which the record was first.
    OriginPartition,
    /// The offset at which the record was first.
    OriginOffset,
    /// The timestamp of the original record.
    OriginTimestamp,
    /// The size of the value in bytes.
    ValueSize,
}

/// Why a filter is invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilterError {
    /// The character of the error, counted from 1.
    pub position: usize,
    /// The error, and what would be valid.
    pub problem: String,
}

impl fmt::Display for FilterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at character {}", self.problem, self.position)
    }
}

#[cfg(test)]
mod tests;
