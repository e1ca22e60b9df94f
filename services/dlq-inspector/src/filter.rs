//! Filters as AIP-160 describes them: text -> [`Expr`] -> a condition for SQL with bound parameters.
//!
//! ```text
//! error_class = "permanent" AND headers.tenant = "x" AND (retry_count > 3 OR NOT error_code : "http")
//! ```
//!
//! As in AIP-160, OR binds tighter than AND, restrictions side by side are joined by AND, and `-` is NOT.
//! `:` asks whether a text contains another, byte for byte; `field:*` whether there is anything. A
//! restriction on what a dead letter does not have is false, also under `<` and `>`, and NOT turns it round.
//!
//! Everything here is pure. The length of a filter, its depth and the number of its restrictions are bounded.

mod field;
mod parse;
mod sql;

use std::fmt;

pub use parse::parse;
pub use sql::{Condition, Param};

use crate::id::LetterId;

/// The longest filter, in bytes.
pub const MAX_LENGTH: usize = 8 * 1024;
/// How deep parentheses and NOT may be nested.
pub const MAX_DEPTH: usize = 32;
/// How many restrictions a filter may have.
pub const MAX_RESTRICTIONS: usize = 100;

/// A filter that was understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expr {
    /// All of them; none is always true.
    And(Vec<Expr>),
    /// One of them.
    Or(Vec<Expr>),
    /// Not this one.
    Not(Box<Expr>),
    /// One restriction.
    Is(Restriction),
}

/// What one field must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Restriction {
    /// This one dead letter.
    Id(LetterId),
    /// A text.
    Text(TextField, TextTest),
    /// A number; times are milliseconds.
    Number(NumberField, NumberTest),
    /// Any of the headers of this name.
    Header(String, TextTest),
    /// The record's key, which is bytes.
    Key(TextTest),
}

/// How a text is looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextTest {
    /// It is this text.
    Equal(String),
    /// It contains this text.
    Has(String),
    /// There is one, and it is not empty.
    Present,
}

/// How a number is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumberTest {
    /// It compares to this one.
    Compare(Comparison, i64),
    /// There is one.
    Present,
}

/// `!=` is NOT `=`, so it is none of its own.
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

/// Fields that hold text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextField {
    /// The dead-letter topic.
    Topic,
    /// The pipeline, group or connector that gave it up.
    Pipeline,
    /// Our class of the failure.
    ErrorClass,
    /// Our code or the exception's class.
    ErrorCode,
    /// The message.
    ErrorMessage,
    /// Where it was first.
    OriginTopic,
    /// The scheduled job.
    JobId,
    /// W3C trace id.
    TraceId,
}

/// Fields that hold a number, a time or one of a few words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumberField {
    /// Of the dead-letter topic.
    Partition,
    /// In the dead-letter topic.
    Offset,
    /// When it was written there.
    DeadAt,
    /// When it failed.
    FailedAt,
    /// How many attempts were made.
    RetryCount,
    /// What was done with it.
    State,
    /// Whose headers it has.
    Dialect,
    /// Where it was first.
    OriginPartition,
    /// Where it was first.
    OriginOffset,
    /// Its timestamp there.
    OriginTimestamp,
    /// Bytes of its value.
    ValueSize,
}

/// What is wrong with a filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilterError {
    /// The character at which it is wrong, from 1.
    pub position: usize,
    /// What is wrong and what would be right.
    pub problem: String,
}

impl fmt::Display for FilterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at character {}", self.problem, self.position)
    }
}

#[cfg(test)]
mod tests;
