//! Field names, and the operators and values that each field accepts.

use redeliver_core::{Position, Timestamp};

use super::{Ages, Comparison, Expr, NumberField, NumberTest, Restriction, TextField, TextTest};
use crate::dialect::Dialect;
use crate::fingerprint::{GroupId, InvalidGroupId};
use crate::id::parse_id;
use crate::ledger::State;

/// A field of a filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Field {
    Id,
    Text(TextField),
    Number(NumberField, NumberType),
    Header(String),
    Key,
    Json(String),
    Expiry,
}

/// How the value of a number field is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NumberType {
    Count,
    Time,
    State,
    Dialect,
    Group,
}

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
    /// An unquoted `*`.
    Any,
    Text(String),
}

const TEXT_FIELDS: [(&str, TextField); 9] = [
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

const NUMBER_FIELDS: [(&str, NumberField, NumberType); 14] = [
    ("partition", NumberField::Partition, NumberType::Count),
    ("position.partition", NumberField::Partition, NumberType::Count),
    ("offset", NumberField::Offset, NumberType::Count),
    ("position.offset", NumberField::Offset, NumberType::Count),
    ("dead_at", NumberField::DeadAt, NumberType::Time),
    ("failed_at", NumberField::FailedAt, NumberType::Time),
    ("retry_count", NumberField::RetryCount, NumberType::Count),
    ("state", NumberField::State, NumberType::State),
    ("dialect", NumberField::Dialect, NumberType::Dialect),
    ("group", NumberField::Group, NumberType::Group),
    (
        "origin.partition",
        NumberField::OriginPartition,
        NumberType::Count,
    ),
    ("origin.offset", NumberField::OriginOffset, NumberType::Count),
    ("origin_timestamp", NumberField::OriginTimestamp, NumberType::Time),
    ("value_size", NumberField::ValueSize, NumberType::Count),
];

/// All fields, for the error message about an unknown field.
pub(super) const FIELD_NAMES: &str = "id, topic, partition, offset, pipeline, error_class, error_code, error_message, \
    failed_at, dead_at, expires_at, retry_count, state, dialect, group, origin.topic, origin.partition, origin.offset, \
    origin_timestamp, key, value_size, job_id, trace_id, headers.NAME, json./POINTER";

impl Field {
    /// The field with this path. The parts after `headers` are the name of a header, which may contain dots; the part after
    /// `json` is a JSON pointer.
    pub(super) fn from_path(path: &[String]) -> Option<Self> {
        if let [first, rest @ ..] = path
            && first == "headers"
        {
            return (!rest.is_empty()).then(|| Self::Header(rest.join(".")));
        }
        if let [first, pointer] = path
            && first == "json"
            && pointer.starts_with('/')
        {
            return Some(Self::Json(pointer.clone()));
        }
        let path = path.join(".");
        if let Some((_, field)) = TEXT_FIELDS.iter().find(|(name, _)| *name == path) {
            return Some(Self::Text(*field));
        }
        if let Some((_, field, number_type)) = NUMBER_FIELDS.iter().find(|(name, ..)| *name == path) {
            return Some(Self::Number(*field, *number_type));
        }
        match path.as_str() {
            "id" => Some(Self::Id),
            "key" => Some(Self::Key),
            "expires_at" => Some(Self::Expiry),
            _ => None,
        }
    }

    /// Whether it contains what only some callers may see, whatever is masked.
    pub(super) fn is_secret(&self) -> bool {
        match self {
            Self::Key | Self::Header(_) | Self::Json(_) | Self::Text(TextField::ErrorMessage) => true,
            Self::Id | Self::Text(_) | Self::Number(..) | Self::Expiry => false,
        }
    }

    /// Builds a restriction, or returns an error message.
    pub(super) fn restriction(self, operator: Operator, value: Value) -> Result<Expr, String> {
        let equal = match self {
            Self::Id => Restriction::Id(id(operator, value)?),
            Self::Text(field) => Restriction::Text(field, text(operator, value)?),
            Self::Header(name) => Restriction::Header(name, text(operator, value)?),
            Self::Key => Restriction::Key(text(operator, value)?),
            Self::Json(pointer) => Restriction::Json(pointer, text(operator, value)?),
            Self::Expiry => Restriction::Expiry(number(NumberType::Time, operator, value)?, Ages::default()),
            Self::Number(field, number_type) => {
                Restriction::Number(field, number(number_type, operator, value)?)
            }
        };
        let equal = Expr::Is(equal);
        Ok(if operator == Operator::NotEqual {
            Expr::Not(Box::new(equal))
        } else {
            equal
        })
    }
}

fn id(operator: Operator, value: Value) -> Result<Position, String> {
    match (operator, value) {
        (Operator::Compare(Comparison::Equal) | Operator::NotEqual, Value::Text(text)) => {
            parse_id(&text).map_err(|error| format!("`{text}` {error}"))
        }
        _ => Err("expected = or != with topic/partition/offset".to_owned()),
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
        (Operator::Compare(_), _) => Err(unsupported(operator)),
    }
}

fn number(number_type: NumberType, operator: Operator, value: Value) -> Result<NumberTest, String> {
    let value = match (operator, value) {
        (Operator::Has, Value::Any) => return Ok(NumberTest::Present),
        (_, Value::Any) => return Err("`*` requires the operator :".to_owned()),
        (_, Value::Text(text)) => text,
    };
    let comparison = match operator {
        Operator::Compare(comparison) => comparison,
        Operator::NotEqual | Operator::Has => Comparison::Equal,
    };
    let number = match number_type {
        NumberType::Count => value
            .parse()
            .map_err(|_| format!("`{value}` is not an integer"))?,
        NumberType::Time => {
            let time: Timestamp = value.parse().map_err(|error| format!("`{value}` {error}"))?;
            time.as_millis()
        }
        NumberType::State | NumberType::Dialect | NumberType::Group if comparison != Comparison::Equal => {
            return Err(unsupported(operator));
        }
        NumberType::Group => {
            let id: GroupId = value
                .parse()
                .map_err(|error: InvalidGroupId| format!("`{value}` {error}"))?;
            id.number()
        }
        NumberType::State => enum_value(
            &value,
            "DEAD_LETTER_STATE_",
            State::ALL.map(|state| (state.name(), state as i64)),
        )?,
        NumberType::Dialect => {
            let known = Dialect::KNOWN.map(|dialect| (dialect.name(), dialect as i64));
            let unknown = (Dialect::Unknown.name(), Dialect::Unknown as i64);
            enum_value(&value, "HEADER_DIALECT_", known.into_iter().chain([unknown]))?
        }
    };
    Ok(NumberTest::Compare(comparison, number))
}

fn unsupported(operator: Operator) -> String {
    format!("unsupported operator {}; use =, != or :", operator.text())
}

/// Parses an enum value, case-insensitively, with or without the prefix that it has in the schema.
fn enum_value(
    value: &str,
    prefix: &str,
    values: impl IntoIterator<Item = (&'static str, i64)>,
) -> Result<i64, String> {
    let upper = value.to_uppercase();
    let bare = upper.strip_prefix(prefix).unwrap_or(&upper);
    let mut names = Vec::new();
    for (name, number) in values {
        if name == bare {
            return Ok(number);
        }
        names.push(name);
    }
    Err(format!("`{value}` is not one of {}", names.join(", ")))
}
