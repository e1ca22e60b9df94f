//! What a record says, as a row. No IO.
//!
//! Every record becomes one row, also one that says nothing valid: its cells are null. Headers are read without what `dlq_inspector.masking` masks.

use std::borrow::Cow;
use std::str::FromStr;

use bytes::Bytes;
use redeliver_core::headers::{
    ORIGINAL_OFFSET, ORIGINAL_PARTITION, ORIGINAL_TIMESTAMP, ORIGINAL_TOPIC, PAYLOAD_OMITTED, PIPELINE,
    PROCESS_AFTER, RETRY_COUNT,
};
use redeliver_core::job::{JobState, Priority};
use redeliver_core::{Headers, Record, Timestamp, redrive};
use redeliver_dlq_inspector::dialect::{Dialect, Facts, OriginPosition};
use redeliver_dlq_inspector::fingerprint::{GroupId, template_of};
use redeliver_dlq_inspector::id::parse_id;
use redeliver_dlq_inspector::ledger::State;
use redeliver_dlq_inspector::masking::{MASK, Mask, MaskedValue, Masking};
use redeliver_proto::convert::{from_priority, from_state, time};
use redeliver_proto::{Message, v1};

use crate::batch::{Batch, Row};
use crate::config::LakeConfig;
use crate::schema::Schema;
use crate::schema::{ATTEMPTS, AUDIT, DEAD_LETTERS, DECISIONS, JOBS, OUTCOMES};

/// Why a header, key or value does not fit that is not what it must be.
const INVALID: &str = "invalid";

/// What the rows of a topic have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) topic_id: String,
    /// The delay of the tier, if it is one.
    pub(crate) tier: Option<String>,
    /// Whether its records are dead letters.
    pub(crate) is_dead: bool,
    /// Whether each success of its pipeline has a result.
    pub(crate) expects_result: bool,
    /// The dead-letter topic whose masking rules apply.
    pub(crate) masked_as: String,
}

/// Reads records as rows.
pub(crate) struct Rows {
    masking: Masking,
    /// Whether values of dead letters are read.
    payloads: bool,
    /// The names of headers that are read.
    headers: Vec<String>,
}

impl Rows {
    pub(crate) fn new(masking: Masking, lake: &LakeConfig) -> Self {
        Self {
            masking,
            payloads: lake.payloads,
            headers: lake.headers.clone(),
        }
    }

    /// Adds the row of a record.
    pub(crate) fn add(&self, batch: &mut Batch, schema: &Schema, record: &Record, origin: &Origin) {
        let mask = self.masking.of(&origin.masked_as);
        let headers = match mask.is_empty() {
            true => Cow::Borrowed(&record.headers),
            false => Cow::Owned(mask.headers(record.headers.iter()).headers),
        };
        let mut row = batch.row();
        row.text("kafka_topic", Some(&record.position.topic));
        row.text("kafka_topic_id", Some(&origin.topic_id));
        row.int("kafka_partition", Some(record.position.partition));
        row.long("kafka_offset", Some(record.position.offset));
        row.time("kafka_timestamp", record.timestamp);
        match schema.table {
            table if table == ATTEMPTS.table => {
                attempt(&mut row, record, origin, &headers, &mask);
                self.headers(&mut row, &headers);
                row.nulls_before("expects_result");
                row.flag("expects_result", Some(origin.expects_result));
            }
            table if table == OUTCOMES.table => {
                outcome(&mut row, record, origin, &headers, &mask);
                self.headers(&mut row, &headers);
            }
            table if table == DEAD_LETTERS.table => self.dead_letter(&mut row, record, &headers, &mask),
            table if table == DECISIONS.table => decision(&mut row, record),
            table if table == JOBS.table => job(&mut row, record),
            table if table == AUDIT.table => audit(&mut row, record),
            table => unreachable!("{table} has no rows of records"),
        }
        row.end();
    }

    fn dead_letter(&self, row: &mut Row<'_>, record: &Record, headers: &Headers, mask: &Mask<'_>) {
        let facts = Facts::read(headers);
        let is_known = facts.dialect != Dialect::Unknown;
        row.text("dialect", is_known.then(|| facts.dialect.name()));
        row.text("pipeline", non_empty(&facts.pipeline));
        position(row, facts.origin.as_ref(), facts.origin_timestamp);
        row.long("retry_count", is_known.then_some(facts.retry_count));
        failure(row, &facts);
        row.text(
            "group_id",
            Some(&GroupId::of(&record.position.topic, &facts).to_string()),
        );
        row.text("job_id", facts.job_id.as_deref());
        row.text("trace_id", facts.trace_id.as_deref());
        row.long("redrive_count", Some(redrive::count(headers)));
        row.bytes("payload_omitted", headers.last(PAYLOAD_OMITTED));
        match &record.key {
            Some(_) if mask.has_key() => row.text("key", Some(MASK)),
            key => row.bytes("key", key.as_deref()),
        }
        match record.value.clone().filter(|_| self.payloads) {
            None => row.text("value", None),
            Some(value) => match mask.value(value) {
                MaskedValue::Shown(value, _) => row.bytes("value", Some(&value)),
                MaskedValue::Withheld => row.text("value", Some(MASK)),
            },
        }
        value_size(row, record, mask);
        self.headers(row, headers);
    }

    /// The named headers, as a JSON object.
    fn headers(&self, row: &mut Row<'_>, headers: &Headers) {
        let mut found = serde_json::Map::new();
        for name in &self.headers {
            match headers.last(name).map(std::str::from_utf8) {
                Some(Ok(text)) => drop(found.insert(name.clone(), text.into())),
                Some(Err(_)) => return row.does_not_fit("headers", "not UTF-8"),
                None => {}
            }
        }
        let found = (!found.is_empty()).then(|| serde_json::Value::Object(found).to_string());
        row.text("headers", found.as_deref());
    }
}

/// Adds the row of records that could not be read.
pub(crate) fn gap(batch: &mut Batch, gap: &Gap<'_>) {
    let mut row = batch.row();
    row.text("kafka_topic", Some(gap.topic));
    row.text("kafka_topic_id", Some(gap.topic_id));
    row.int("kafka_partition", Some(gap.partition));
    row.long("kafka_offset", Some(gap.from));
    row.time("kafka_timestamp", None);
    row.text("table_name", Some(gap.table));
    row.long("until_offset", Some(gap.until));
    row.text("cause", Some(gap.cause));
    row.time("noticed_at", Some(gap.noticed_at));
    row.end();
}

/// Records of a partition that a table lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Gap<'g> {
    pub(crate) table: &'static str,
    pub(crate) topic: &'g str,
    pub(crate) topic_id: &'g str,
    pub(crate) partition: i32,
    /// The first offset that is missing.
    pub(crate) from: i64,
    /// The first one after it that is not.
    pub(crate) until: i64,
    pub(crate) cause: &'static str,
    pub(crate) noticed_at: Timestamp,
}

fn attempt(row: &mut Row<'_>, record: &Record, origin: &Origin, headers: &Headers, mask: &Mask<'_>) {
    let facts = Facts::read(headers);
    row.text("pipeline", non_empty(&facts.pipeline));
    row.text("tier", origin.tier.as_deref());
    position(row, facts.origin.as_ref(), facts.origin_timestamp);
    row.long(
        "retry_count",
        (facts.dialect == Dialect::Redeliver).then_some(facts.retry_count),
    );
    let due = parsed(row, headers, PROCESS_AFTER, "process_after");
    row.time("process_after", due);
    failure(row, &facts);
    row.text("job_id", facts.job_id.as_deref());
    row.text("trace_id", facts.trace_id.as_deref());
    value_size(row, record, mask);
}

fn outcome(row: &mut Row<'_>, record: &Record, origin: &Origin, headers: &Headers, mask: &Mask<'_>) {
    let facts = Facts::read(headers);
    row.text("outcome", Some(if origin.is_dead { "died" } else { "succeeded" }));
    if origin.is_dead {
        row.text("pipeline", non_empty(&facts.pipeline));
        position(row, facts.origin.as_ref(), facts.origin_timestamp);
        row.long(
            "retry_count",
            (facts.dialect != Dialect::Unknown).then_some(facts.retry_count),
        );
        row.text("error_class", non_empty(&facts.error_class));
        row.text("error_code", non_empty(&facts.error_code));
    } else {
        // Without a failure, no header proves that a record is of Redeliver.
        row.bytes("pipeline", headers.last(PIPELINE));
        let found = OriginPosition {
            topic: parsed(row, headers, ORIGINAL_TOPIC, "origin_topic").unwrap_or_default(),
            partition: parsed(row, headers, ORIGINAL_PARTITION, "origin_partition"),
            offset: parsed(row, headers, ORIGINAL_OFFSET, "origin_offset"),
        };
        let time = parsed(row, headers, ORIGINAL_TIMESTAMP, "origin_timestamp");
        position(row, Some(&found), time);
        let count: Option<u32> = parsed(row, headers, RETRY_COUNT, "retry_count");
        row.long("retry_count", count);
        row.nulls_before("job_id");
    }
    row.text("job_id", facts.job_id.as_deref());
    row.text("trace_id", facts.trace_id.as_deref());
    value_size(row, record, mask);
}

fn decision(row: &mut Row<'_>, record: &Record) {
    let key = record
        .key
        .as_deref()
        .and_then(|key| std::str::from_utf8(key).ok());
    let Some(Ok(letter)) = key.map(parse_id) else {
        row.does_not_fit("letter_topic", INVALID);
        return;
    };
    row.text("letter_topic", Some(&letter.topic));
    row.int("letter_partition", Some(letter.partition));
    row.long("letter_offset", Some(letter.offset));
    let Some(entry) = message::<v1::LedgerEntry>(row, record, "state") else {
        // A null value is the same as an open dead letter.
        row.text("state", record.value.is_none().then(|| State::Open.name()));
        return;
    };
    let state = State::from_number(entry.state.into());
    row.text("state", state.map(State::name));
    row.time("decided_at", time(entry.time));
    row.text("decided_by", non_empty(&entry.by));
    row.text("reason", non_empty(&entry.reason));
    row.text("redrive_id", non_empty(&entry.redrive_id));
    row.text("destination", non_empty(&entry.destination));
    row.text("edited", non_empty(&entry.edited.join(",")));
}

fn job(row: &mut Row<'_>, record: &Record) {
    let key = record
        .key
        .as_deref()
        .and_then(|key| std::str::from_utf8(key).ok());
    // Records that are not jobs have a key `<kind>:<name>`.
    let (kind, name) = match key.map(|key| key.split_once(':').unwrap_or(("job", key))) {
        Some((kind, name)) => (Some(kind), Some(name)),
        None => (None, None),
    };
    row.text("record_kind", kind);
    row.text("job_id", name);
    row.flag("forgotten", Some(record.value.is_none()));
    if kind != Some("job") {
        return;
    }
    let Some(job) = message::<v1::JobRecord>(row, record, "state") else {
        return;
    };
    row.text("app", non_empty(&job.app));
    row.text("topic", non_empty(&job.topic));
    let state = v1::JobState::try_from(job.state).ok().and_then(from_state);
    row.text("state", state.map(JobState::as_str));
    let priority = v1::Priority::try_from(job.priority).ok().map(from_priority);
    row.text("priority", priority.map(Priority::as_str));
    row.time("due_at", Some(Timestamp::from_millis(job.due_ms)));
    row.time("accepted_at", Some(Timestamp::from_millis(job.accepted_ms)));
    row.time("released_at", job.released_ms.map(Timestamp::from_millis));
    row.time("ended_at", job.ended_ms.map(Timestamp::from_millis));
    row.time("expires_at", job.expires_ms.map(Timestamp::from_millis));
    row.long("revision", Some(job.revision));
    row.text("occurrence", non_empty(&job.occurrence));
    row.flag("long_wait", Some(job.long_wait));
    row.long("value_size", job.data.map(|data| data.len()));
}

fn audit(row: &mut Row<'_>, record: &Record) {
    let Some(entry) = message::<v1::AuditEntry>(row, record, "entry_id") else {
        return;
    };
    row.text("entry_id", non_empty(&entry.id));
    row.time("decided_at", time(entry.time));
    row.text("caller", non_empty(&entry.by));
    row.text("action", non_empty(&entry.action));
    row.text("target", non_empty(&entry.target));
    row.text("reason", non_empty(&entry.reason));
    row.text("details", non_empty(&entry.details));
    row.text("filter_text", non_empty(&entry.filter));
    row.long("affected", Some(entry.count));
    row.text("ids", non_empty(&entry.ids.join(",")));
    row.flag("masked", Some(entry.masked));
    row.text("service", non_empty(&entry.service));
    row.text("instance", non_empty(&entry.instance));
}

fn position(row: &mut Row<'_>, origin: Option<&OriginPosition>, time: Option<Timestamp>) {
    row.text("origin_topic", origin.and_then(|origin| non_empty(&origin.topic)));
    row.int("origin_partition", origin.and_then(|origin| origin.partition));
    row.long("origin_offset", origin.and_then(|origin| origin.offset));
    row.time("origin_timestamp", time);
}

fn failure(row: &mut Row<'_>, facts: &Facts) {
    row.time("failed_at", facts.failed_at);
    row.text("error_class", non_empty(&facts.error_class));
    row.text("error_code", non_empty(&facts.error_code));
    row.text("error_message", non_empty(&facts.error_message));
    row.text("error_template", non_empty(&template_of(facts)));
}

/// The size of a value tells something about its masked parts.
fn value_size(row: &mut Row<'_>, record: &Record, mask: &Mask<'_>) {
    let value = record.value.as_ref().filter(|_| !mask.has_fields());
    row.long("value_size", value.map(Bytes::len));
}

/// The value of a header. One that is not valid does not fit into the column.
fn parsed<T: FromStr>(row: &mut Row<'_>, headers: &Headers, header: &str, column: &str) -> Option<T> {
    let value = headers.last(header)?;
    let parsed = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
    if parsed.is_none() {
        row.does_not_fit(column, INVALID);
    }
    parsed
}

/// The value of a record. One that is not this message does not fit into the column.
fn message<M: Message + Default>(row: &mut Row<'_>, record: &Record, column: &str) -> Option<M> {
    let message = M::decode(record.value.clone()?);
    if message.is_err() {
        row.does_not_fit(column, INVALID);
    }
    message.ok()
}

fn non_empty(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests;
