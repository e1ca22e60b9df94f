//! The names of fields, and what may be asked of each.

use redeliver_core::Timestamp;

use super::{Comparison, Expr, NumberField, NumberTest, Restriction, TextField, TextTest};
use crate::dialect::Dialect;
use crate::ledger::State;

/// A field as it is named in a filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Field {
    Id,
    Text(TextField),
    Number(NumberField, Kind),
    Header(String),
    Key,
}

/// What a number stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Count,
    Time,
    State,
    Dialect,
}

/// What stands between a field and its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operator {
    Compare(Comparison),
    NotEqual,
    Has,
}

impl Operator {
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Compare(Comparison::Equal) => "=",
            Self::Compare(Comparison::Less) => "<",
            Self::Compare(Comparison::LessOrEqual) => "<=",
            Self::Compare(Comparison::Greater) => ">",
            Self::Compare(Comparison::GreaterOrEqual) => ">=",
            Self::NotEqual => "!=",
            Self::Has => ":",
        }
    }
}

/// The value of a restriction.
pub(super) enum Value {
    /// `*` without quotes.
    Any,
    Text(String),
}

const TEXTS: [(&str, TextField); 9] = [
    ("topic", TextField::Topic),
    ("position.topic", TextField::Topic),
    ("pipeline", TextField::Pipeline),
    ("error_class", TextField::ErrorClass),
    ("error_code", TextField::ErrorCode),
    ("error_message", TextField::ErrorMessage),
    ("origin.topic", TextField::OriginTopic),
    ("job_id", TextField::JobId),
    ("trace_id", TextField::TraceId),
];

const NUMBERS: [(&str, NumberField, Kind); 13] = [
    ("partition", NumberField::Partition, Kind::Count),
    ("position.partition", NumberField::Partition, Kind::Count),
    ("offset", NumberField::Offset, Kind::Count),
    ("position.offset", NumberField::Offset, Kind::Count),
    ("dead_at", NumberField::DeadAt, Kind::Time),
    ("failed_at", NumberField::FailedAt, Kind::Time),
    ("retry_count", NumberField::RetryCount, Kind::Count),
    ("state", NumberField::State, Kind::State),
    ("dialect", NumberField::Dialect, Kind::Dialect),
    ("origin.partition", NumberField::OriginPartition, Kind::Count),
    ("origin.offset", NumberField::OriginOffset, Kind::Count),
    ("origin_timestamp", NumberField::OriginTimestamp, Kind::Time),
    ("value_size", NumberField::ValueSize, Kind::Count),
];

/// All fields, for the message about one that is not known.
pub(super) const KNOWN: &str = "id, topic, partition, offset, pipeline, error_class, error_code, error_message, \
    failed_at, dead_at, retry_count, state, dialect, origin.topic, origin.partition, origin.offset, \
    origin_timestamp, key, value_size, job_id, trace_id, headers.NAME";

impl Field {
    /// The field with this path; the parts behind `headers` are the name of a header.
    pub(super) fn named(path: &[String]) -> Option<Self> {
        if let [first, rest @ ..] = path
            && first == "headers"
        {
            return (!rest.is_empty()).then(|| Self::Header(rest.join(".")));
        }
        let path = path.join(".");
        if let Some((_, field)) = TEXTS.iter().find(|(name, _)| *name == path) {
            return Some(Self::Text(*field));
        }
        if let Some((_, field, kind)) = NUMBERS.iter().find(|(name, ..)| *name == path) {
            return Some(Self::Number(*field, *kind));
        }
        match path.as_str() {
            "id" => Some(Self::Id),
            "key" => Some(Self::Key),
            _ => None,
        }
    }

    /// The restriction that this field, operator and value make.
    pub(super) fn restriction(self, operator: Operator, value: Value) -> Result<Expr, String> {
        let equal = match self {
            Self::Id => Restriction::Id(id(operator, value)?),
            Self::Text(field) => Restriction::Text(field, text(operator, value)?),
            Self::Header(name) => Restriction::Header(name, text(operator, value)?),
            Self::Key => Restriction::Key(text(operator, value)?),
            Self::Number(field, kind) => Restriction::Number(field, number(kind, operator, value)?),
        };
        let equal = Expr::Is(equal);
        Ok(if operator == Operator::NotEqual {
            Expr::Not(Box::new(equal))
        } else {
            equal
        })
    }
}

fn id(operator: Operator, value: Value) -> Result<crate::id::LetterId, String> {
    match (operator, value) {
        (Operator::Compare(Comparison::Equal) | Operator::NotEqual, Value::Text(text)) => text
            .parse()
            .map_err(|error: crate::id::InvalidId| format!("`{text}` {error}")),
        _ => Err("`id` takes = and != with topic/partition/offset".to_owned()),
    }
}

fn text(operator: Operator, value: Value) -> Result<TextTest, String> {
    match (operator, value) {
        (Operator::Has, Value::Any) => Ok(TextTest::Present),
        (Operator::Has, Value::Text(text)) => Ok(TextTest::Has(text)),
        (Operator::Compare(Comparison::Equal) | Operator::NotEqual, Value::Text(text)) => {
            Ok(TextTest::Equal(text))
        }
        (Operator::Compare(Comparison::Equal) | Operator::NotEqual, Value::Any) => {
            Ok(TextTest::Equal("*".to_owned()))
        }
        (Operator::Compare(_), _) => Err(format!("a text takes =, != and :, not {}", operator.text())),
    }
}

fn number(kind: Kind, operator: Operator, value: Value) -> Result<NumberTest, String> {
    let value = match (operator, value) {
        (Operator::Has, Value::Any) => return Ok(NumberTest::Present),
        (_, Value::Any) => return Err("`*` goes with : only".to_owned()),
        (_, Value::Text(text)) => text,
    };
    let comparison = match operator {
        Operator::Compare(comparison) => comparison,
        Operator::NotEqual | Operator::Has => Comparison::Equal,
    };
    let number = match kind {
        Kind::Count => value
            .parse()
            .map_err(|_| format!("`{value}` is not a whole number"))?,
        Kind::Time => {
            let time: Timestamp = value.parse().map_err(|error| format!("`{value}` {error}"))?;
            time.as_millis()
        }
        Kind::State | Kind::Dialect if comparison != Comparison::Equal => {
            return Err(format!("this field takes =, != and :, not {}", operator.text()));
        }
        Kind::State => word(
            &value,
            "DEAD_LETTER_STATE_",
            State::ALL.map(|state| (state.name(), state as i64)),
        )?,
        Kind::Dialect => {
            let known = Dialect::KNOWN.map(|dialect| (dialect.name(), dialect as i64));
            let unknown = (Dialect::Unknown.name(), Dialect::Unknown as i64);
            word(&value, "HEADER_DIALECT_", known.into_iter().chain([unknown]))?
        }
    };
    Ok(NumberTest::Compare(comparison, number))
}

/// One of a few words, in any case, with or without the prefix that it has in the schema.
fn word(
    value: &str,
    prefix: &str,
    words: impl IntoIterator<Item = (&'static str, i64)>,
) -> Result<i64, String> {
    let upper = value.to_uppercase();
    let bare = upper.strip_prefix(prefix).unwrap_or(&upper);
    let mut known = Vec::new();
    for (name, number) in words {
        if name == bare {
            return Ok(number);
        }
        known.push(name);
    }
    Err(format!("`{value}` is not one of {}", known.join(", ")))
}
