//! What headers say of a failure, in all the dialects that write dead letters.
//!
//! One table, `RULES`, says where each dialect keeps each fact, how it is encoded, and which of several
//! headers of the same name counts: frameworks that append when a record dies again have the newest
//! failure last, those that prepend have it first, and where a record came from is told by the oldest.
//!
//! Headers are untrusted: what cannot be read is left out, and the raw headers are kept beside it.
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

use redeliver_core::failure::{MESSAGE_LIMIT, bounded_text};
use redeliver_core::headers::{self, JOB_ID, TRACEPARENT};
use redeliver_core::pipeline::is_topic_name;
use redeliver_core::{Headers, Timestamp};

/// Whose headers say why a record is dead. The numbers stand in the index and on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// None that is known.
    #[default]
    Unknown = 0,
    /// Ours.
    Redeliver = 1,
    /// Spring for Apache Kafka.
    Spring = 2,
    /// Kafka Connect.
    Connect = 3,
    /// Kafka Streams.
    Streams = 4,
    /// `SmallRye` Reactive Messaging, as Quarkus has it.
    SmallRye = 5,
    /// Kafka's share groups.
    ShareGroup = 6,
}

impl Dialect {
    /// All that are known, the ones that count first when a record has headers of several: a record that
    /// went through one framework and died in another.
    pub const KNOWN: [Self; 6] = [
        Self::Redeliver,
        Self::Spring,
        Self::Connect,
        Self::Streams,
        Self::SmallRye,
        Self::ShareGroup,
    ];

    /// As it is written in filters.
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

/// Where a record was before it died.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The topic.
    pub topic: String,
    /// The partition, if it is told.
    pub partition: Option<i32>,
    /// The offset, if it is told.
    pub offset: Option<i64>,
}

/// What the headers of one record say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Whose headers they are.
    pub dialect: Dialect,
    /// The pipeline, consumer group or connector that gave it up.
    pub pipeline: String,
    /// Our class of the failure; other dialects have none.
    pub error_class: String,
    /// Our code, or the name of the exception's class.
    pub error_code: String,
    /// For people.
    pub error_message: String,
    /// When it failed.
    pub failed_at: Option<Timestamp>,
    /// How many attempts were made.
    pub retry_count: u32,
    /// Where it was first.
    pub origin: Option<Place>,
    /// The record's timestamp there.
    pub origin_timestamp: Option<Timestamp>,
    /// W3C trace id, 32 hex digits.
    pub trace_id: Option<String>,
    /// The scheduled job it belongs to.
    pub job_id: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Pipeline,
    ErrorClass,
    ErrorCode,
    ErrorMessage,
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
    /// UTF-8 of what Java's `Throwable.toString` gives: the class, then perhaps `: ` and the message.
    Throwable,
    /// A decimal number in UTF-8.
    Decimal,
    /// A signed number of 1 to 8 bytes, the highest first.
    BigEndian,
    /// RFC 3339 in UTF-8.
    Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pick {
    First,
    Last,
}

/// Where a dialect keeps a fact. When it keeps it in several places, the first that can be read counts.
struct Rule {
    dialect: Dialect,
    field: Field,
    header: &'static str,
    encoding: Encoding,
    pick: Pick,
    /// Whether this header alone shows that the dialect's framework gave the record up.
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
    Redeliver  FailedAt        headers::ERROR_TIMESTAMP,                  Time,      Last;
    Redeliver  Pipeline        headers::PIPELINE,                         Text,      Last;
    Redeliver  RetryCount      headers::RETRY_COUNT,                      Decimal,   Last;
    Redeliver  OriginTopic     headers::ORIGINAL_TOPIC,                   Text,      Last;
    Redeliver  OriginPartition headers::ORIGINAL_PARTITION,               Decimal,   Last;
    Redeliver  OriginOffset    headers::ORIGINAL_OFFSET,                  Decimal,   Last;
    Redeliver  OriginTimestamp headers::ORIGINAL_TIMESTAMP,               Time,      Last;
    // The class of the exception is mostly that of the listener's wrapper; its cause says more.
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
    // It writes its own headers in front of those that the record has: the newest failure is the first.
    SmallRye   ErrorCode       "dead-letter-cause-class-name",            Text,      First, marks;
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

/// The rule of each header.
static BY_HEADER: LazyLock<HashMap<&'static str, usize>> = LazyLock::new(|| {
    RULES
        .iter()
        .enumerate()
        .map(|(index, rule)| (rule.header, index))
        .collect()
});

/// The longest text that is taken out of a header, in bytes; messages have a limit of their own.
const TEXT_LIMIT: usize = 256;

impl Facts {
    /// Reads what headers say. Never fails: what cannot be read is left out.
    #[must_use]
    pub fn read(headers: &Headers) -> Self {
        let mut found: Vec<Option<&[u8]>> = vec![None; RULES.len()];
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
                    if found[index].is_none() || RULES[index].pick == Pick::Last {
                        found[index] = value.or(found[index]);
                    }
                }
            }
        }
        let marked = |dialect| {
            let mut rules = RULES.iter().zip(&found);
            rules.any(|(rule, value)| rule.dialect == dialect && rule.marks && value.is_some())
        };
        let dialect = Dialect::KNOWN.into_iter().find(|dialect| marked(*dialect));
        let mut facts = dialect.map_or_else(Self::default, |dialect| {
            DialectHeaders {
                dialect,
                found: &found,
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

/// The headers of one dialect on one record.
struct DialectHeaders<'a> {
    dialect: Dialect,
    found: &'a [Option<&'a [u8]>],
}

impl DialectHeaders<'_> {
    fn facts(&self) -> Facts {
        let number = |field| self.first(field, number);
        let time = |field| number(field).map(Timestamp::from_millis);
        let topic = self.first(Field::OriginTopic, |value, encoding| {
            words(value, encoding, TEXT_LIMIT).filter(|topic| is_topic_name(topic))
        });
        Facts {
            dialect: self.dialect,
            pipeline: self.text(Field::Pipeline, TEXT_LIMIT),
            error_class: self.text(Field::ErrorClass, TEXT_LIMIT),
            error_code: self.text(Field::ErrorCode, TEXT_LIMIT),
            error_message: self.text(Field::ErrorMessage, MESSAGE_LIMIT),
            failed_at: time(Field::FailedAt),
            retry_count: number(Field::RetryCount)
                .and_then(|count| u32::try_from(count).ok())
                .unwrap_or(0),
            origin: topic.map(|topic| Place {
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
        self.first(field, |value, encoding| words(value, encoding, limit))
            .unwrap_or_default()
    }

    fn first<T>(&self, field: Field, read: impl Fn(&[u8], Encoding) -> Option<T>) -> Option<T> {
        let told = RULES.iter().zip(self.found);
        told.filter(|(rule, _)| rule.dialect == self.dialect && rule.field == field)
            .find_map(|(rule, value)| read((*value)?, rule.encoding))
    }
}

fn words(value: &[u8], encoding: Encoding, limit: usize) -> Option<String> {
    let whole = text(value, limit)?;
    Some(match (encoding, whole.split_once(": ")) {
        (Encoding::Throwable, Some((class, _))) => class.to_owned(),
        _ => whole,
    })
}

/// The beginning of a text; what is not UTF-8 becomes replacement characters.
fn text(value: &[u8], limit: usize) -> Option<String> {
    // A character has at most four bytes; a longer value is not looked at as a whole.
    let beginning = &value[..value.len().min(4 * limit)];
    Some(bounded_text(&String::from_utf8_lossy(beginning), limit)).filter(|text| !text.is_empty())
}

fn number(value: &[u8], encoding: Encoding) -> Option<i64> {
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
    if length > 8 {
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
    let right = version.len() == 2 && id.len() == 32 && span.len() == 16 && hex(id);
    (right && id.bytes().any(|byte| byte != b'0')).then(|| id.to_owned())
}

#[cfg(test)]
mod tests;
