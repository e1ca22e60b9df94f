//! Parses the headers in which frameworks describe a failure.
//!
//! The table `RULES` defines which header of each dialect contains which fact, how it is encoded, and which one counts if
//! a record has several headers of that name. A record can fail repeatedly. Frameworks that append headers have the newest
//! failure last, frameworks that prepend headers have it first, and the oldest headers contain the origin.
//!
//! Headers are untrusted: invalid ones are ignored here, and the index also stores the raw headers.
//!
//! | dialect | source |
//! |---|---|
//! | Redeliver | `redeliver_core::headers` |
//! | Spring | spring-kafka: `KafkaHeaders.DLT_*`, `DeadLetterPublishingRecoverer`, `RetryTopicHeaders` |
//! | Connect | Kafka: `DeadLetterQueueReporter` |
//! | Streams | KIP-1034: `ExceptionHandlerUtils` |
//! | `SmallRye` | smallrye-reactive-messaging: `KafkaDeadLetterQueue` |
//! | share groups | KIP-1191: `ShareGroupDLQStateManager` |

use std::collections::HashMap;
use std::sync::LazyLock;

use redeliver_core::failure::{MESSAGE_LIMIT, RESPONSE_LIMIT, bounded_text};
use redeliver_core::frameworks::{self, Framework};
use redeliver_core::headers::{self, JOB_ID, TRACEPARENT};
use redeliver_core::pipeline::is_topic_name;
use redeliver_core::{Headers, Timestamp};
use redeliver_proto::convert::time_of_record;

use crate::masking::text::{MASK, lower_case};

/// The framework whose headers describe the failure. The index and the protocol store these numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// No known dialect.
    #[default]
    Unknown = 0,
    /// Redeliver.
    Redeliver = 1,
    /// Spring for Apache Kafka.
    Spring = 2,
    /// Kafka Connect.
    Connect = 3,
    /// Kafka Streams.
    Streams = 4,
    /// `SmallRye` Reactive Messaging, which Quarkus uses.
    SmallRye = 5,
    /// Kafka share groups.
    ShareGroup = 6,
}

impl From<Framework> for Dialect {
    fn from(framework: Framework) -> Self {
        match framework {
            Framework::Spring => Self::Spring,
            Framework::Connect => Self::Connect,
            Framework::Streams => Self::Streams,
            Framework::SmallRye => Self::SmallRye,
            Framework::ShareGroup => Self::ShareGroup,
        }
    }
}

impl Dialect {
    /// All dialects but `Unknown`, by precedence. A record has headers of several dialects if it passed through one
    /// framework and failed in another.
    pub const KNOWN: [Self; 6] = [
        Self::Redeliver,
        Self::Spring,
        Self::Connect,
        Self::Streams,
        Self::SmallRye,
        Self::ShareGroup,
    ];

    /// The dialect with this number.
    #[must_use]
    pub fn from_number(number: i32) -> Self {
        let mut known = Self::KNOWN.into_iter();
        known.find(|known| *known as i32 == number).unwrap_or_default()
    }

    /// The name in filters.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unknown => "UNKNOWN",
            Self::Redeliver => "REDELIVER",
            Self::Spring => "SPRING",
            Self::Connect => "CONNECT",
            Self::Streams => "STREAMS",
            Self::SmallRye => "SMALLRYE",
            Self::ShareGroup => "SHARE_GROUP",
        }
    }
}

/// The position of a record before it became a dead letter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OriginPosition {
    /// The topic.
    pub topic: String,
    /// The partition, if the headers contain it.
    pub partition: Option<i32>,
    /// The offset, if the headers contain it.
    pub offset: Option<i64>,
}

/// What the headers of a record say about its failure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// The dialect of the headers.
    pub dialect: Dialect,
    /// The pipeline, consumer group or connector that gave up on the record.
    pub pipeline: String,
    /// The failure class; empty for other dialects than `Redeliver`.
    pub error_class: String,
    /// The error code, or the class name of the exception.
    pub error_code: String,
    /// The error message.
    pub error_message: String,
    /// The beginning of what the endpoint answered. The index does not store it.
    pub error_response: String,
    /// When processing failed.
    pub failed_at: Option<Timestamp>,
    /// Number of attempts.
    pub retry_count: u32,
    /// Where the record was first.
    pub origin: Option<OriginPosition>,
    /// The timestamp of the original record.
    pub origin_timestamp: Option<Timestamp>,
    /// The W3C trace id, 32 hex digits.
    pub trace_id: Option<String>,
    /// The id of the scheduled job that the record belongs to.
    pub job_id: Option<String>,
}

/// A fact that a header of a dialect contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Field {
    Pipeline,
    ErrorClass,
    ErrorCode,
    ErrorMessage,
    ErrorResponse,
    FailedAt,
    RetryCount,
    OriginTopic,
    OriginPartition,
    OriginOffset,
    OriginTimestamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    /// UTF-8.
    Text,
    /// UTF-8 of Java's `Throwable.toString`: the class, optionally followed by `: ` and the message. What comes before the first space is the
    /// class.
    Throwable,
    /// A decimal number in UTF-8.
    Decimal,
    /// A signed big-endian number of 1 to 8 bytes.
    BigEndian,
    /// RFC 3339 in UTF-8.
    Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pick {
    First,
    Last,
}

/// The header in which a dialect stores a fact. If a dialect has several rules for a fact, the first valid header counts.
struct Rule {
    dialect: Dialect,
    field: Field,
    header: &'static str,
    encoding: Encoding,
    pick: Pick,
    /// Whether this header alone proves that the dialect's framework gave up on the record.
    marks: bool,
}

macro_rules! rules {
    ($($dialect:ident $field:ident $header:expr, $encoding:ident, $pick:ident $(, $marks:ident)?;)*) => {
        &[$(Rule {
            dialect: Dialect::$dialect,
            field: Field::$field,
            header: $header,
            encoding: Encoding::$encoding,
            pick: Pick::$pick,
            marks: rules!(@ $($marks)?),
        },)*]
    };
    (@ marks) => { true };
    (@) => { false };
}

static RULES: &[Rule] = rules! {
    Redeliver  ErrorClass      headers::ERROR_CLASS,                      Text,      Last, marks;
    Redeliver  ErrorCode       headers::ERROR_CODE,                       Text,      Last, marks;
    Redeliver  ErrorMessage    headers::ERROR_MESSAGE,                    Text,      Last;
    Redeliver  ErrorResponse   headers::ERROR_RESPONSE,                   Text,      Last;
    Redeliver  FailedAt        headers::ERROR_TIMESTAMP,                  Time,      Last;
    Redeliver  Pipeline        headers::PIPELINE,                         Text,      Last;
    Redeliver  RetryCount      headers::RETRY_COUNT,                      Decimal,   Last;
    Redeliver  OriginTopic     headers::ORIGINAL_TOPIC,                   Text,      Last;
    Redeliver  OriginPartition headers::ORIGINAL_PARTITION,               Decimal,   Last;
    Redeliver  OriginOffset    headers::ORIGINAL_OFFSET,                  Decimal,   Last;
    Redeliver  OriginTimestamp headers::ORIGINAL_TIMESTAMP,               Time,      Last;
    // The exception is usually the wrapper that Spring throws for a listener; its cause says more.
    Spring     ErrorCode       "kafka_dlt-exception-cause-fqcn",          Text,      Last, marks;
    Spring     ErrorCode       "kafka_dlt-exception-fqcn",                Text,      Last, marks;
    Spring     ErrorCode       "kafka_dlt-key-exception-fqcn",            Text,      Last, marks;
    Spring     ErrorMessage    "kafka_dlt-exception-message",             Text,      Last, marks;
    Spring     ErrorMessage    "kafka_dlt-key-exception-message",         Text,      Last, marks;
    Spring     Pipeline        "kafka_dlt-original-consumer-group",       Text,      Last;
    Spring     OriginTopic     "kafka_dlt-original-topic",                Text,      First, marks;
    Spring     OriginPartition "kafka_dlt-original-partition",            BigEndian, First;
    Spring     OriginOffset    "kafka_dlt-original-offset",               BigEndian, First;
    Spring     OriginTimestamp "kafka_dlt-original-timestamp",            BigEndian, First;
    Spring     OriginTimestamp "retry_topic-original-timestamp",          BigEndian, First;
    Spring     RetryCount      "retry_topic-attempts",                    BigEndian, Last;
    Spring     RetryCount      "kafka_deliveryAttempt",                   BigEndian, Last;
    Connect    ErrorCode       "__connect.errors.exception.class.name",   Text,      Last, marks;
    Connect    ErrorMessage    "__connect.errors.exception.message",      Text,      Last;
    Connect    Pipeline        "__connect.errors.connector.name",         Text,      Last, marks;
    Connect    OriginTopic     "__connect.errors.topic",                  Text,      First, marks;
    Connect    OriginPartition "__connect.errors.partition",              Decimal,   First;
    Connect    OriginOffset    "__connect.errors.offset",                 Decimal,   First;
    Streams    ErrorCode       "__streams.errors.exception",              Throwable, Last, marks;
    Streams    ErrorMessage    "__streams.errors.message",                Text,      Last;
    Streams    OriginTopic     "__streams.errors.topic",                  Text,      First, marks;
    Streams    OriginPartition "__streams.errors.partition",              Decimal,   First;
    Streams    OriginOffset    "__streams.errors.offset",                 Decimal,   First;
    // SmallRye prepends its headers, so that the newest failure is the first. Those of the cause are not read: the message is that of the
    // exception, and the newest failure may have no cause while an older one has.
    SmallRye   ErrorCode       "dead-letter-exception-class-name",        Text,      First, marks;
    SmallRye   ErrorMessage    "dead-letter-reason",                      Text,      First, marks;
    SmallRye   OriginTopic     "dead-letter-topic",                       Text,      Last, marks;
    SmallRye   OriginPartition "dead-letter-partition",                   Decimal,   Last;
    SmallRye   OriginOffset    "dead-letter-offset",                      Decimal,   Last;
    ShareGroup ErrorMessage    "__dlq.errors.message",                    Text,      Last, marks;
    ShareGroup Pipeline        "__dlq.errors.group",                      Text,      Last, marks;
    ShareGroup RetryCount      "__dlq.errors.delivery.count",             Decimal,   Last;
    ShareGroup OriginTopic     "__dlq.errors.topic",                      Text,      First, marks;
    ShareGroup OriginPartition "__dlq.errors.partition",                  Decimal,   First;
    ShareGroup OriginOffset    "__dlq.errors.offset",                     Decimal,   First;
};

/// Whether [`Facts::read`], or a redrive, reads this header.
pub(crate) fn is_read(header: &str) -> bool {
    headers::is_reserved(header) || header == TRACEPARENT || BY_HEADER.contains_key(header)
}

/// The headers of all dialects that contain a fact.
pub(crate) fn headers_of(field: Field) -> impl Iterator<Item = &'static str> {
    RULES
        .iter()
        .filter(move |rule| rule.field == field)
        .map(|rule| rule.header)
}

/// Names of headers of all frameworks.
#[cfg(test)]
pub(crate) fn failure_headers() -> impl Iterator<Item = String> {
    let named = frameworks::FAILURE_HEADERS
        .into_iter()
        .map(|(_, name)| name.to_owned());
    let rules = RULES.iter().filter(|rule| rule.dialect != Dialect::Redeliver);
    let prefixed = frameworks::FAILURE_PREFIXES
        .into_iter()
        .map(|(_, prefix)| format!("{prefix}x"));
    named
        .chain(rules.map(|rule| rule.header.to_owned()))
        .chain(prefixed)
}

/// The framework other than Redeliver that adds a header of this name to a record because it failed.
pub(crate) fn framework_of(header: &str) -> Option<Dialect> {
    frameworks::framework_of(header).map(Dialect::from)
}

/// What the names of headers with error messages and stack traces contain, in lower case, also those of unknown frameworks.
const MESSAGE_NAMES: [&str; 7] = [
    "error",
    "exception",
    "message",
    "reason",
    "cause",
    "stack",
    "fail",
];

/// Whether a header may contain an error message, or a text with one, such as a stack trace.
pub(crate) fn may_contain_message(header: &str) -> bool {
    if let Some(index) = BY_HEADER.get(header) {
        let rule = &RULES[*index];
        let is_message = matches!(rule.field, Field::ErrorMessage | Field::ErrorResponse);
        return is_message || rule.encoding == Encoding::Throwable;
    }
    let name = lower_case(header);
    MESSAGE_NAMES.iter().any(|part| name.contains(part))
}

/// Whether a header may contain a copy of the key or the value: Spring serializes the exception of its deserializers, which has the data,
/// SmallRye writes the data, and endpoints repeat what they refuse.
pub(crate) fn may_contain_record(header: &str) -> bool {
    let name = lower_case(header);
    name == headers::ERROR_RESPONSE
        || name.starts_with("springdeserializerexception")
        || (name.starts_with("deserialization-failure-") && name.ends_with("data"))
}

/// Headers with binary numbers that say nothing about the failure.
const OTHER_NUMBERS: [&str; 1] = ["retry_topic-backoff-timestamp"];

/// The value of a header that is known to contain a binary number, as text; `None` for other headers and values. Such values are
/// not readable otherwise.
#[must_use]
pub fn readable_number(header: &str, value: &[u8]) -> Option<String> {
    let rule = BY_HEADER.get(header).map(|index| &RULES[*index]);
    let is_number = rule.is_some_and(|rule| rule.encoding == Encoding::BigEndian);
    if !is_number && !OTHER_NUMBERS.contains(&header) {
        return None;
    }
    let number = big_endian(value)?;
    let is_time = rule.is_none_or(|rule| rule.field == Field::OriginTimestamp);
    let time = (is_time && number >= 0)
        .then(|| Timestamp::from_millis(number).to_rfc3339())
        .flatten();
    Some(time.unwrap_or_else(|| number.to_string()))
}

/// The index of the rule for each header.
static BY_HEADER: LazyLock<HashMap<&'static str, usize>> = LazyLock::new(|| {
    RULES
        .iter()
        .enumerate()
        .map(|(index, rule)| (rule.header, index))
        .collect()
});

/// Maximum length of a text in bytes. Error messages have a limit of their own.
const TEXT_LIMIT: usize = 256;

impl Facts {
    /// Parses headers. Invalid headers are ignored.
    #[must_use]
    pub fn read(headers: &Headers) -> Self {
        // The header value for each rule.
        let mut values: Vec<Option<&[u8]>> = vec![None; RULES.len()];
        let mut traceparent = None;
        let mut job_id = None;
        for (name, value) in headers.iter() {
            match name {
                TRACEPARENT => traceparent = value,
                JOB_ID => job_id = value,
                _ => {
                    let Some(index) = BY_HEADER.get(name).copied() else {
                        continue;
                    };
                    if values[index].is_none() || RULES[index].pick == Pick::Last {
                        // A null value does not replace an earlier one.
                        values[index] = value.or(values[index]);
                    }
                }
            }
        }
        let is_marked = |dialect| {
            let mut rules = RULES.iter().zip(&values);
            rules.any(|(rule, value)| rule.dialect == dialect && rule.marks && value.is_some())
        };
        let dialect = Dialect::KNOWN.into_iter().find(|dialect| is_marked(*dialect));
        let mut facts = dialect.map_or_else(Self::default, |dialect| {
            let found = RULES.iter().zip(&values);
            let found = found.filter(|(rule, _)| rule.dialect == dialect);
            DialectHeaders {
                dialect,
                values: found
                    .filter_map(|(rule, value)| Some((rule, (*value)?)))
                    .collect(),
            }
            .facts()
        });
        facts.trace_id = traceparent.and_then(trace_id);
        facts.job_id = job_id
            .and_then(|value| text(value, TEXT_LIMIT))
            .filter(|id| !id.is_empty());
        facts
    }
}

/// The headers of a record, interpreted in one dialect.
struct DialectHeaders<'a> {
    dialect: Dialect,
    /// In the order of the rules.
    values: Vec<(&'static Rule, &'a [u8])>,
}

impl DialectHeaders<'_> {
    fn facts(&self) -> Facts {
        let number = |field| self.first(field, decode_number);
        // Kafka writes -1 for a record without a timestamp. A time that cannot be shown is none either.
        let time = |field| {
            let time = Timestamp::from_millis(number(field).filter(|millis| *millis >= 0)?);
            time_of_record(time).map(|_| time)
        };
        let topic = self.first(Field::OriginTopic, |value, encoding| {
            decode_text(value, encoding, TEXT_LIMIT).filter(|topic| is_topic_name(topic))
        });
        Facts {
            dialect: self.dialect,
            pipeline: self.text(Field::Pipeline, TEXT_LIMIT),
            error_class: self.text(Field::ErrorClass, TEXT_LIMIT),
            error_code: self.text(Field::ErrorCode, TEXT_LIMIT),
            error_message: self.text(Field::ErrorMessage, MESSAGE_LIMIT),
            error_response: self.text(Field::ErrorResponse, RESPONSE_LIMIT),
            failed_at: time(Field::FailedAt),
            retry_count: number(Field::RetryCount)
                .and_then(|count| u32::try_from(count).ok())
                .unwrap_or(0),
            origin: topic.map(|topic| OriginPosition {
                topic,
                partition: number(Field::OriginPartition)
                    .and_then(|partition| i32::try_from(partition).ok())
                    .filter(|partition| *partition >= 0),
                offset: number(Field::OriginOffset).filter(|offset| *offset >= 0),
            }),
            origin_timestamp: time(Field::OriginTimestamp),
            trace_id: None,
            job_id: None,
        }
    }

    fn text(&self, field: Field, limit: usize) -> String {
        self.first(field, |value, encoding| decode_text(value, encoding, limit))
            .unwrap_or_default()
    }

    /// The first valid value of a field.
    fn first<T>(&self, field: Field, decode: impl Fn(&[u8], Encoding) -> Option<T>) -> Option<T> {
        let mut values = self.values.iter().filter(|(rule, _)| rule.field == field);
        values.find_map(|(rule, value)| decode(value, rule.encoding))
    }
}

fn decode_text(value: &[u8], encoding: Encoding, limit: usize) -> Option<String> {
    let whole = text(value, limit)?;
    if encoding != Encoding::Throwable {
        return Some(whole);
    }
    // A class may print itself otherwise. The name of none contains a space or a bracket.
    let end = whole.find(|c: char| c.is_whitespace() || c == '[');
    let first = &whole[..end.unwrap_or(whole.len())];
    Some(first.strip_suffix(':').unwrap_or(first).to_owned()).filter(|class| !class.is_empty())
}

/// Up to `limit` bytes of a text. Invalid UTF-8 becomes replacement characters; an empty text is `None`.
fn text(value: &[u8], limit: usize) -> Option<String> {
    // Bounds the work for a huge value.
    let beginning = &value[..value.len().min(4 * limit)];
    Some(bounded_text(&String::from_utf8_lossy(beginning), limit)).filter(|text| !text.is_empty())
}

fn decode_number(value: &[u8], encoding: Encoding) -> Option<i64> {
    match encoding {
        Encoding::BigEndian => big_endian(value),
        Encoding::Decimal => std::str::from_utf8(value).ok()?.trim().parse().ok(),
        Encoding::Time => {
            let time: Timestamp = std::str::from_utf8(value).ok()?.trim().parse().ok()?;
            Some(time.as_millis())
        }
        Encoding::Text | Encoding::Throwable => None,
    }
}

fn big_endian(value: &[u8]) -> Option<i64> {
    let (first, length) = (value.first()?, value.len());
    // What stands for a masked value has 8 bytes.
    if length > 8 || value == MASK.as_bytes() {
        return None;
    }
    let fill = if first & 0x80 == 0 { 0 } else { 0xff };
    let mut bytes = [fill; 8];
    bytes[8 - length..].copy_from_slice(value);
    Some(i64::from_be_bytes(bytes))
}

/// The trace id of a `traceparent`: `00-<32 hex digits>-<16 hex digits>-<2 hex digits>`.
fn trace_id(value: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(value).ok()?;
    let mut parts = text.split('-');
    let (version, id, span) = (parts.next()?, parts.next()?, parts.next()?);
    let hex = |text: &str| text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let is_valid = version.len() == 2 && id.len() == 32 && span.len() == 16 && hex(id);
    // The W3C specification forbids an id of zeros.
    (is_valid && id.bytes().any(|byte| byte != b'0')).then(|| id.to_owned())
}

#[cfg(test)]
mod tests;
