//! A client for the gRPC API of the inspector.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::{Headers, Position, Timestamp, TimestampType};
use redeliver_proto::convert::{from_duration, from_headers, to_timestamp};
use redeliver_proto::v1;
use redeliver_proto::v1::dead_letter_service_client::DeadLetterServiceClient;
use redeliver_proto::v1::watch_dead_letters_response::Event;
use serde::{Deserialize, Serialize};
use tonic::{Code, Response, Status, Streaming};

use crate::endpoint::{Connection, Endpoint, MAX_RESPONSE};
use crate::error::{self, ClientError};
use crate::jobs::{text, time};

/// A watch fails if it receives nothing for this long. The inspector sends a heartbeat every 15 seconds.
const STREAM_TIMEOUT: Duration = Duration::from_secs(45);

/// Lists, reads and watches dead letters. Clones share one connection.
#[derive(Clone, Debug)]
pub struct DeadLetterClient {
    service: DeadLetterServiceClient<Connection>,
    url: String,
}

/// What was done with a dead letter, as the ledger says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeadLetterState {
    /// It is unknown what was done, because the ledger cannot be read.
    Unknown,
    /// Nothing was done yet.
    Open,
    /// The record was sent back to its pipeline.
    Redriven,
    /// The record was discarded.
    Discarded,
}

/// The framework whose headers describe the dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Redeliver.
    Redeliver,
    /// Spring Kafka.
    Spring,
    /// Kafka Connect.
    Connect,
    /// Kafka Streams.
    Streams,
    /// `SmallRye` Reactive Messaging, as in Quarkus.
    SmallRye,
    /// A Kafka share group.
    ShareGroup,
}

impl DeadLetterState {
    /// The name of the state in lower case.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Open => "open",
            Self::Redriven => "redriven",
            Self::Discarded => "discarded",
        }
    }
}

impl Dialect {
    /// The name of the dialect in lower case.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Redeliver => "redeliver",
            Self::Spring => "spring",
            Self::Connect => "connect",
            Self::Streams => "streams",
            Self::SmallRye => "smallrye",
            Self::ShareGroup => "share_group",
        }
    }
}

/// A dead letter. Fields that its headers do not contain are `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    /// The id: its position, written `topic/partition/offset`.
    pub id: String,
    /// The position in the dead-letter topic.
    pub position: Position,
    /// The timestamp of the record in the dead-letter topic: when it was written, or what its producer has set, as Kafka Connect and Kafka Streams do. `None` if the record has none, which is known only if the
    /// request has `full`.
    pub dead_at: Option<Timestamp>,
    /// Who has set `dead_at`. `None` if that is not known, or if there is no timestamp.
    pub timestamp_type: Option<TimestampType>,
    /// What was done with it.
    pub state: DeadLetterState,
    /// The dialect of its headers; `None` if it is unknown.
    pub dialect: Option<Dialect>,
    /// The pipeline in which it failed.
    pub pipeline: Option<String>,
    /// The failure class, such as `permanent`.
    pub error_class: Option<String>,
    /// The error code, such as `http.404`.
    pub error_code: Option<String>,
    /// The error message.
    pub error_message: Option<String>,
    /// When the last attempt failed.
    pub failed_at: Option<Timestamp>,
    /// The number of failed attempts.
    pub retry_count: u32,
    /// Where the record entered the pipeline. Partition and offset are -1 if only the topic is known.
    pub origin: Option<Position>,
    /// The timestamp with which the record entered the pipeline.
    pub origin_timestamp: Option<Timestamp>,
    /// The key of the record, or its first MiB.
    pub key: Option<Bytes>,
    /// Whether `key` is truncated.
    pub is_key_truncated: bool,
    /// The size of the value in bytes; `None` for a null value, or if it is masked.
    pub value_size: Option<u64>,
    /// The first MiB of the value, if the request has `full`. [`DeadLetterClient::payload`] reads the whole value.
    pub value: Option<Bytes>,
    /// Whether `value` is truncated.
    pub is_value_truncated: bool,
    /// The headers in order, if the request has `full`; otherwise empty. As many as fit into 1.5 MiB together with the key.
    pub headers: Headers,
    /// Whether `headers` lacks the last headers.
    pub are_headers_truncated: bool,
    /// The number of headers that `headers` lacks because their names are not UTF-8, if the request has `full`; otherwise 0.
    pub unreadable_headers: u32,
    /// Whether `key`, `value` and `headers` are withheld, because the caller lacks the scope `dead-letters:payload`.
    pub is_payload_withheld: bool,
    /// What is masked, because the caller lacks the scope `dead-letters:unmasked`.
    pub masked: Masked,
    /// The trace id of the W3C trace context, as 32 hex digits.
    pub trace_id: Option<String>,
    /// The id of the job from which the record was dispatched.
    pub job_id: Option<String>,
    /// The id of its [`Group`].
    pub group: Option<String>,
}

/// What is masked in a dead letter: `<masked>` stands in its place, or it is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Masked {
    /// The names of the fields of the dead letter, such as `error_message`, as in the protocol.
    pub fields: Vec<String>,
    /// The names of headers.
    pub headers: Vec<String>,
    /// The paths of fields that were found in the value.
    pub paths: Vec<String>,
}

impl Masked {
    /// Whether a field is masked.
    #[must_use]
    pub fn has(&self, field: &str) -> bool {
        self.fields.iter().any(|masked| masked == field)
    }
}

/// Whether an answer contains everything that it should.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Completeness {
    /// Whether no partition is missing, `as_of` is at most 30 seconds ago, and the states of groups are current. False if the inspector does not say it.
    pub is_complete: bool,
    /// The answer reflects everything that Kafka contained at this time, except for missing partitions.
    pub as_of: Option<Timestamp>,
    /// The first missing partitions, at most 20.
    pub missing: Vec<MissingPartition>,
    /// The number of all missing partitions.
    pub missing_count: u32,
    /// Whether the states of dead letters are known.
    pub are_states_known: bool,
    /// In answers about groups: why their states and notes may not be those of the last 30 seconds.
    pub group_states_problem: Option<String>,
}

/// A partition whose dead letters, or entries of the ledger, may be missing in an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingPartition {
    /// The topic.
    pub topic: String,
    /// The partition; `None` if the whole topic is missing.
    pub partition: Option<i32>,
    /// Why it is missing.
    pub reason: MissingReason,
    /// The error of Kafka, if it refuses.
    pub error: Option<String>,
}

/// Why a partition is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingReason {
    /// A reason that this client does not know.
    Other,
    /// It has no leader, or its leader does not answer.
    NoLeader,
    /// Kafka does not let the inspector read it.
    Refused,
    /// It was not read to its end yet.
    NotRead,
    /// The topic was deleted, or retention has removed records, and the answer may still contain some of them.
    NotRemoved,
}

impl MissingReason {
    /// The name of the reason in lower case.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Other => "other",
            Self::NoLeader => "no_leader",
            Self::Refused => "refused",
            Self::NotRead => "not_read",
            Self::NotRemoved => "not_removed",
        }
    }
}

/// A dead letter, and whether its state is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundDeadLetter {
    /// The dead letter, with value and headers.
    pub dead_letter: DeadLetter,
    /// What the index contained.
    pub completeness: Completeness,
    /// The value, decoded with its schema; `None` if the inspector knows no schema registry, or the value has no schema.
    pub decoded: Option<DecodedValue>,
    /// A hash of timestamp, key, value and headers; empty if it is withheld or masked.
    pub content_hash: Bytes,
    /// What it was redriven as; `None` if it is not redriven, or if no job that the inspector still has, and that the caller sees, has done it.
    pub redriven_as: Option<RedrivenAs>,
}

/// The record that a job has written for a dead letter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedrivenAs {
    /// The id of the job.
    pub redrive_id: String,
    /// What was edited in it: `value`, `key` and `headers`; empty: nothing.
    pub edited: Vec<String>,
    /// Where it was written; `None` if nobody knows.
    pub written: Option<Position>,
}

impl From<v1::RedrivenAs> for RedrivenAs {
    fn from(redriven: v1::RedrivenAs) -> Self {
        Self {
            redrive_id: redriven.redrive_id,
            edited: redriven.edited,
            written: redriven.written.map(position),
        }
    }
}

/// A value that was decoded with a schema of a registry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DecodedValue {
    /// The id of the schema.
    pub schema_id: u32,
    /// The language of the schema; `None` if it is not known.
    pub format: Option<SchemaFormat>,
    /// The full name of the record or message type.
    pub name: Option<String>,
    /// The value as JSON; `None` if it was not decoded, or is masked as a whole.
    pub json: Option<String>,
    /// Why it was not decoded.
    pub problem: Option<String>,
}

/// The language of a schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchemaFormat {
    /// Avro.
    Avro,
    /// Protobuf.
    Protobuf,
    /// JSON Schema.
    Json,
}

impl SchemaFormat {
    /// The name in lower case.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Avro => "avro",
            Self::Protobuf => "protobuf",
            Self::Json => "json",
        }
    }
}

impl From<v1::DecodedValue> for DecodedValue {
    fn from(decoded: v1::DecodedValue) -> Self {
        Self {
            schema_id: decoded.schema_id,
            format: match decoded.format() {
                v1::SchemaFormat::Unspecified => None,
                v1::SchemaFormat::Avro => Some(SchemaFormat::Avro),
                v1::SchemaFormat::Protobuf => Some(SchemaFormat::Protobuf),
                v1::SchemaFormat::Json => Some(SchemaFormat::Json),
            },
            name: text(decoded.name),
            json: text(decoded.json),
            problem: text(decoded.problem),
        }
    }
}

/// A request for a page of dead letters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListDeadLetters {
    /// A filter such as `error_class = "permanent" AND retry_count > 3`. Empty: all dead letters.
    pub filter: String,
    /// The maximum number of dead letters per page, at most 1000; 0 means 50.
    pub page_size: u16,
    /// [`Page::next_page_token`] of the previous page. Empty: the first page.
    pub page_token: String,
    /// Sort by ascending time instead of descending.
    pub oldest_first: bool,
    /// Include values and headers.
    pub full: bool,
}

/// A page of dead letters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// The dead letters of the page.
    pub dead_letters: Vec<DeadLetter>,
    /// If the request has `full`: dead letters that Kafka does not have any more, and the index still does. They have no values and no
    /// headers.
    pub gone: Vec<DeadLetter>,
    /// The token for the next page; `None` on the last page.
    pub next_page_token: Option<String>,
    /// Whether the page contains everything that it should.
    pub completeness: Completeness,
}

/// Dead letters that fail for the same reason: with the same pipeline (or topic, if their headers name no pipeline), error class, error
/// code and message template. Counts and times are those of the dead letters that match the filter of the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The id, which the filter `group = ID` accepts. It is the same on every server.
    pub id: String,
    /// The version of the rules by which ids and templates are made.
    pub fingerprint_version: u32,
    /// The pipeline.
    pub pipeline: Option<String>,
    /// The failure class.
    pub error_class: Option<String>,
    /// The error code.
    pub error_code: Option<String>,
    /// The template of the messages, in which placeholders such as `<number>` stand for what differs.
    pub template: Option<String>,
    /// The number of dead letters.
    pub count: u64,
    /// The number of open ones; `None` if the states are unknown.
    pub open: Option<u64>,
    /// The time of the first dead letter.
    pub first_dead_at: Option<Timestamp>,
    /// The time of the last dead letter.
    pub last_dead_at: Option<Timestamp>,
    /// The number of dead letters by topic.
    pub topics: BTreeMap<String, u64>,
    /// The number of all dead letters of the group in each of the last 24 hours of the clock; the current one is the last one.
    pub trend: Vec<u64>,
    /// The id of the newest dead letter.
    pub sample_id: Option<String>,
    /// What somebody has decided, and what has followed.
    pub state: GroupState,
    /// When it was resolved, muted or opened again; `None` if nobody has done so.
    pub state_time: Option<Timestamp>,
    /// By whom.
    pub state_by: Option<String>,
    /// Why.
    pub state_why: Option<String>,
    /// Until when it is muted; `None`: until somebody changes it.
    pub muted_until: Option<Timestamp>,
    /// A text for others.
    pub note: Option<String>,
    /// When it was written.
    pub note_time: Option<Timestamp>,
    /// By whom.
    pub note_by: Option<String>,
    /// Increases by 1 with each change of state or note; 0: nobody has changed anything.
    pub revision: u64,
    /// Why state and note are not, or not completely, shown as they were written.
    pub problem: Option<String>,
}

/// The state of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupState {
    /// A state that this client does not know.
    Unknown,
    /// Nobody has decided anything, it was opened again, or the time for which it was muted is over.
    Open,
    /// The reason is gone, and no dead letter was written since.
    Resolved,
    /// It is known and wanted.
    Muted,
    /// It was resolved, and a dead letter was written since.
    Regressed,
}

impl GroupState {
    /// The name of the state in lower case.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Open => "open",
            Self::Resolved => "resolved",
            Self::Muted => "muted",
            Self::Regressed => "regressed",
        }
    }

    fn of(state: v1::GroupState) -> Self {
        match state {
            v1::GroupState::Unspecified => Self::Unknown,
            v1::GroupState::Open => Self::Open,
            v1::GroupState::Resolved => Self::Resolved,
            v1::GroupState::Muted => Self::Muted,
            v1::GroupState::Regressed => Self::Regressed,
        }
    }

    fn to_wire(self) -> v1::GroupState {
        match self {
            Self::Unknown => v1::GroupState::Unspecified,
            Self::Open => v1::GroupState::Open,
            Self::Resolved => v1::GroupState::Resolved,
            Self::Muted => v1::GroupState::Muted,
            Self::Regressed => v1::GroupState::Regressed,
        }
    }
}

/// A change of the state of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupChange {
    /// The id of the group.
    pub id: String,
    /// Why, for others; at most 1000 bytes.
    pub why: String,
    /// The revision that it must have; 0: nobody has changed it yet. `None`: any.
    pub expected_revision: Option<u64>,
}

/// A group, and whether its counts contain everything that they should.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundGroup {
    /// The group.
    pub group: Group,
    /// What the index contained.
    pub completeness: Completeness,
}

/// The order of a list of groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GroupOrder {
    /// Those with the last dead letters first.
    #[default]
    LastSeen,
    /// New groups first.
    FirstSeen,
    /// Those with the most dead letters first.
    Count,
}

/// A request for a page of groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListGroups {
    /// A filter as in [`ListDeadLetters::filter`].
    pub filter: String,
    /// The maximum number of groups per page, at most 1000; 0 means 50.
    pub page_size: u16,
    /// [`GroupPage::next_page_token`] of the previous page. Empty: the first page.
    pub page_token: String,
    /// The order.
    pub order: GroupOrder,
    /// Only groups in one of these states; if empty, in any.
    pub states: Vec<GroupState>,
    /// Only groups that have a state or a note but no dead letters, those first that have not changed for longest. The filter must be empty, and the
    /// order does not matter. Requires the scope `dead-letters:read` for all topics.
    pub without_dead_letters: bool,
}

/// A page of groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupPage {
    /// The groups of the page.
    pub groups: Vec<Group>,
    /// The token for the next page; `None` on the last page.
    pub next_page_token: Option<String>,
    /// Whether the page contains everything that it should.
    pub completeness: Completeness,
}

/// The statistics of the dead-letter topics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetterStats {
    /// The statistics by topic.
    pub topics: Vec<TopicStats>,
    /// The number of records that are in the topics but not in the index yet.
    pub lag: u64,
    /// Whether the counts contain everything that they should.
    pub completeness: Completeness,
}

/// How retention removes the records of a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// Unknown, because the configuration of the topic cannot be read.
    Unknown,
    /// Never.
    Never,
    /// By age.
    ByAge,
    /// When a partition exceeds a size. Nobody knows when.
    BySize,
    /// By age, or earlier by size.
    ByAgeOrSize,
}

impl Removal {
    /// The name in lower case.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Never => "never",
            Self::ByAge => "by_age",
            Self::BySize => "by_size",
            Self::ByAgeOrSize => "by_age_or_size",
        }
    }
}

/// The statistics of a dead-letter topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicStats {
    /// The name of the topic.
    pub topic: String,
    /// The number of open dead letters; `None` if the states are unknown, as are the oldest and newest one, the time until removal, and
    /// the classes.
    pub open: Option<u64>,
    /// The number of all dead letters.
    pub total: u64,
    /// The number of dead letters of the last minute.
    pub last_minute: u64,
    /// The number of dead letters of the last hour.
    pub last_hour: u64,
    /// The number of dead letters of the last day.
    pub last_day: u64,
    /// The time of the oldest open dead letter.
    pub oldest: Option<Timestamp>,
    /// The time of the newest open dead letter.
    pub newest: Option<Timestamp>,
    /// How retention removes dead letters.
    pub removal: Removal,
    /// The time until retention can remove the oldest open dead letter because of its age; `None` if there is none, or if `removal`
    /// does not depend on the age.
    pub until_removal: Option<Duration>,
    /// The number of open dead letters by failure class.
    pub open_by_class: BTreeMap<String, u64>,
    /// Whether `open_by_class` is empty because failure classes are masked.
    pub are_classes_masked: bool,
}

/// A request to watch dead letters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WatchDeadLetters {
    /// A filter as in [`ListDeadLetters::filter`].
    pub filter: String,
    /// Include values and headers.
    pub full: bool,
    /// Continue after the event with this token. Empty: start with the existing dead letters.
    pub resume_token: String,
    /// Skip existing dead letters.
    pub only_new: bool,
}

/// An event of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchEvent {
    /// An existing or new dead letter.
    DeadLetter(Box<DeadLetter>),
    /// All existing dead letters were sent. All later ones are new, except for those of partitions that were missing.
    Synced(Completeness),
    /// The connection is alive.
    Heartbeat {
        /// The time of the server.
        time: Option<Timestamp>,
        /// What the index contains.
        completeness: Completeness,
    },
}

impl DeadLetterClient {
    /// Connects to an inspector.
    ///
    /// # Errors
    /// If the endpoint is invalid or the inspector cannot be reached.
    pub async fn connect(endpoint: &Endpoint) -> Result<Self, ClientError> {
        let connection = endpoint.connect().await?;
        Ok(Self {
            service: DeadLetterServiceClient::new(connection).max_decoding_message_size(MAX_RESPONSE),
            url: endpoint.url().to_owned(),
        })
    }

    /// Lists a page of dead letters.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`] if the filter is invalid; the message contains the position of the error.
    pub async fn list(&self, list: &ListDeadLetters) -> Result<Page, ClientError> {
        let request = v1::ListDeadLettersRequest {
            filter: list.filter.clone(),
            page_size: i32::from(list.page_size),
            page_token: list.page_token.clone(),
            order_by: if list.oldest_first {
                "dead_at"
            } else {
                "dead_at desc"
            }
            .to_owned(),
            view: view(list.full).into(),
        };
        let answer = self.service.clone().list_dead_letters(request).await;
        let answer = self.answer(answer).await?;
        let read = |letters: Vec<v1::DeadLetter>| {
            let letters = letters.into_iter().map(DeadLetter::try_from);
            letters.collect::<Result<Vec<_>, ClientError>>()
        };
        Ok(Page {
            dead_letters: read(answer.dead_letters)?,
            gone: read(answer.gone)?,
            next_page_token: text(answer.next_page_token),
            completeness: completeness(answer.completeness),
        })
    }

    /// Gets a dead letter with value and headers; `None` if it does not exist, for example because retention removed
    /// it.
    ///
    /// # Errors
    /// If the inspector is unavailable, or [`Code::Unavailable`] if it does not know whether the dead letter exists.
    pub async fn get(&self, id: &str) -> Result<Option<FoundDeadLetter>, ClientError> {
        let request = v1::GetDeadLetterRequest { id: id.to_owned() };
        match self.service.clone().get_dead_letter(request).await {
            Err(status) if status.code() == Code::NotFound => Ok(None),
            answer => {
                let mut letter = self.answer(answer).await?;
                Ok(Some(FoundDeadLetter {
                    completeness: completeness(letter.completeness.take()),
                    decoded: letter.decoded.take().map(DecodedValue::from),
                    content_hash: std::mem::take(&mut letter.content_hash),
                    redriven_as: letter.redriven_as.take().map(RedrivenAs::from),
                    dead_letter: DeadLetter::try_from(letter)?,
                }))
            }
        }
    }

    /// Reads the whole value of a dead letter in chunks.
    ///
    /// # Errors
    /// [`Code::NotFound`] if the dead letter does not exist.
    pub async fn payload(&self, id: &str) -> Result<Payload, ClientError> {
        let request = v1::ReadPayloadRequest { id: id.to_owned() };
        let answer = self.service.clone().read_payload(request).await;
        Ok(Payload {
            stream: self.answer(answer).await?,
            url: self.url.clone(),
            masked_paths: Vec::new(),
        })
    }

    /// Counts the dead letters that match a filter, by topic.
    ///
    /// # Errors
    /// Like [`DeadLetterClient::list`].
    pub async fn stats(&self, filter: &str) -> Result<DeadLetterStats, ClientError> {
        let (mut stats, mut next) = self.page_of_stats(filter, String::new()).await?;
        while !next.is_empty() {
            let (page, token) = self.page_of_stats(filter, next).await?;
            stats.topics.extend(page.topics);
            if stats.completeness.is_complete {
                stats.completeness = page.completeness;
            }
            next = token;
        }
        Ok(stats)
    }

    /// Also the token of the next page, which is empty on the last page.
    async fn page_of_stats(
        &self,
        filter: &str,
        page_token: String,
    ) -> Result<(DeadLetterStats, String), ClientError> {
        let request = v1::GetDeadLetterStatsRequest {
            filter: filter.to_owned(),
            page_token,
        };
        let answer = self.service.clone().get_dead_letter_stats(request).await;
        let mut answer = self.answer(answer).await?;
        let next = std::mem::take(&mut answer.next_page_token);
        Ok((answer.into(), next))
    }

    /// Lists a page of groups of dead letters that fail for the same reason.
    ///
    /// # Errors
    /// Like [`DeadLetterClient::list`].
    pub async fn groups(&self, list: &ListGroups) -> Result<GroupPage, ClientError> {
        let request = v1::ListGroupsRequest {
            filter: list.filter.clone(),
            page_size: i32::from(list.page_size),
            page_token: list.page_token.clone(),
            order_by: match list.order {
                _ if list.without_dead_letters => "",
                GroupOrder::LastSeen => "last_dead_at desc",
                GroupOrder::FirstSeen => "first_dead_at desc",
                GroupOrder::Count => "count desc",
            }
            .to_owned(),
            without_dead_letters: list.without_dead_letters,
            states: list.states.iter().map(|state| state.to_wire().into()).collect(),
        };
        let answer = self.service.clone().list_groups(request).await;
        let answer = self.answer(answer).await?;
        Ok(GroupPage {
            groups: answer.groups.into_iter().map(Group::from).collect(),
            next_page_token: text(answer.next_page_token),
            completeness: completeness(answer.completeness),
        })
    }

    /// Gets a group; `None` if it has no dead letters.
    ///
    /// # Errors
    /// If the id is invalid, the inspector is unavailable, or [`Code::Unavailable`] if it does not know whether the group has dead
    /// letters.
    pub async fn group(&self, id: &str) -> Result<Option<FoundGroup>, ClientError> {
        let request = v1::GetGroupRequest { id: id.to_owned() };
        match self.service.clone().get_group(request).await {
            Err(status) if status.code() == Code::NotFound => Ok(None),
            answer => {
                let mut group = self.answer(answer).await?;
                Ok(Some(FoundGroup {
                    completeness: completeness(group.completeness.take()),
                    group: Group::from(group),
                }))
            }
        }
    }

    /// Says that the reason of a group is gone, for everybody. A dead letter that is written later makes it
    /// [regressed](GroupState::Regressed). When this returns, the change is durable.
    ///
    /// # Errors
    /// [`Code::NotFound`] if the group has no dead letters, [`Code::Aborted`] if it has another revision than the expected one,
    /// [`Code::PermissionDenied`] unless the caller may change it. After [`Code::Unknown`] and errors of the connection, the change may have taken
    /// effect: repeat it with [`GroupChange::expected_revision`], because without it, it would also resolve what has regressed since.
    pub async fn resolve_group(&self, change: &GroupChange) -> Result<Group, ClientError> {
        let answer = self.service.clone().resolve_group(change_request(change)).await;
        Ok(Group::from(self.answer(answer).await?))
    }

    /// Says that a group is known and wanted, so that it is in no alert about groups until this time; `None`: until somebody changes it. Nothing tells
    /// that the time is over.
    ///
    /// # Errors
    /// As for [`DeadLetterClient::resolve_group`]; [`Code::InvalidArgument`] if the time is not in the future.
    pub async fn mute_group(
        &self,
        change: &GroupChange,
        until: Option<Timestamp>,
    ) -> Result<Group, ClientError> {
        let v1::ChangeGroupRequest {
            id,
            why,
            expected_revision,
        } = change_request(change);
        let request = v1::MuteGroupRequest {
            id,
            why,
            expected_revision,
            until: until.map(to_timestamp),
        };
        let answer = self.service.clone().mute_group(request).await;
        Ok(Group::from(self.answer(answer).await?))
    }

    /// Sets the state of a group back to open. Callers with the scopes for all topics can also reset a group that has no dead letters any more, and
    /// remove its note.
    ///
    /// # Errors
    /// As for [`DeadLetterClient::resolve_group`].
    pub async fn reopen_group(&self, change: &GroupChange) -> Result<Group, ClientError> {
        let answer = self.service.clone().reopen_group(change_request(change)).await;
        Ok(Group::from(self.answer(answer).await?))
    }

    /// Sets the note of a group, at most 2000 bytes; empty: there is none. The expected revision is that of [`GroupChange`].
    ///
    /// # Errors
    /// As for [`DeadLetterClient::resolve_group`].
    pub async fn annotate_group(
        &self,
        id: &str,
        note: &str,
        expected_revision: Option<u64>,
    ) -> Result<Group, ClientError> {
        let request = v1::AnnotateGroupRequest {
            id: id.to_owned(),
            note: note.to_owned(),
            expected_revision,
        };
        let answer = self.service.clone().annotate_group(request).await;
        Ok(Group::from(self.answer(answer).await?))
    }

    /// Watches dead letters: first the existing ones, then each new one.
    ///
    /// # Errors
    /// Like [`DeadLetterClient::list`], and if the resume token is not valid any more.
    pub async fn watch(&self, watch: &WatchDeadLetters) -> Result<Watch, ClientError> {
        let request = v1::WatchDeadLettersRequest {
            filter: watch.filter.clone(),
            view: view(watch.full).into(),
            resume_token: watch.resume_token.clone(),
            only_new: watch.only_new,
        };
        let answer = self.service.clone().watch_dead_letters(request).await;
        Ok(Watch {
            stream: self.answer(answer).await?,
            resume_token: watch.resume_token.clone(),
            url: self.url.clone(),
        })
    }

    async fn answer<T>(&self, answer: Result<Response<T>, Status>) -> Result<T, ClientError> {
        error::answer(&self.url, answer).await
    }
}

fn change_request(change: &GroupChange) -> v1::ChangeGroupRequest {
    v1::ChangeGroupRequest {
        id: change.id.clone(),
        why: change.why.clone(),
        expected_revision: change.expected_revision,
    }
}

fn view(full: bool) -> v1::DeadLetterView {
    if full {
        v1::DeadLetterView::Full
    } else {
        v1::DeadLetterView::Basic
    }
}

/// The value of a dead letter, read in chunks.
#[derive(Debug)]
pub struct Payload {
    stream: Streaming<v1::ReadPayloadResponse>,
    url: String,
    masked_paths: Vec<String>,
}

impl Payload {
    /// The next chunk; `None` at the end.
    ///
    /// # Errors
    /// If the connection is lost.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        let message = self.stream.message().await;
        let message = message.map_err(|status| ClientError::from_status(&self.url, &status))?;
        Ok(message.map(|message| {
            self.masked_paths.extend(message.masked_paths);
            message.chunk
        }))
    }

    /// The paths of the masked fields that were found in the value, known with the first chunk. The caller lacks the scope
    /// `dead-letters:unmasked`.
    #[must_use]
    pub fn masked_paths(&self) -> &[String] {
        &self.masked_paths
    }
}

/// A stream of dead letters. After a [transient error](ClientError::is_transient), a new watch with
/// [`Watch::resume_token`] continues without a gap, and may repeat dead letters.
#[derive(Debug)]
pub struct Watch {
    stream: Streaming<v1::WatchDeadLettersResponse>,
    resume_token: String,
    url: String,
}

impl Watch {
    /// The next event.
    ///
    /// # Errors
    /// If the connection is lost, the inspector ends the stream, or no event and no heartbeat arrives for 45 seconds.
    pub async fn next(&mut self) -> Result<WatchEvent, ClientError> {
        loop {
            let received = tokio::time::timeout(STREAM_TIMEOUT, self.stream.message()).await;
            let Ok(message) = received else {
                return Err(ClientError::StreamTimeout(STREAM_TIMEOUT));
            };
            let message = message.map_err(|status| ClientError::from_status(&self.url, &status))?;
            let message = message.ok_or(ClientError::Ended)?;
            if !message.resume_token.is_empty() {
                self.resume_token = message.resume_token;
            }
            return Ok(match message.event {
                Some(Event::DeadLetter(letter)) => {
                    WatchEvent::DeadLetter(Box::new(DeadLetter::try_from(letter)?))
                }
                Some(Event::Synced(synced)) => WatchEvent::Synced(completeness(synced.completeness)),
                Some(Event::Heartbeat(heartbeat)) => WatchEvent::Heartbeat {
                    time: time(heartbeat.time),
                    completeness: completeness(heartbeat.completeness),
                },
                // An event that this client does not know.
                None => continue,
            });
        }
    }

    /// The token to continue after the last received event.
    #[must_use]
    pub fn resume_token(&self) -> &str {
        &self.resume_token
    }
}

fn completeness(completeness: Option<v1::Completeness>) -> Completeness {
    let completeness = completeness.unwrap_or_default();
    let missing = completeness.missing.into_iter().map(|missing| MissingPartition {
        reason: match missing.reason() {
            v1::MissingReason::Unspecified => MissingReason::Other,
            v1::MissingReason::NoLeader => MissingReason::NoLeader,
            v1::MissingReason::Refused => MissingReason::Refused,
            v1::MissingReason::NotRead => MissingReason::NotRead,
            v1::MissingReason::NotRemoved => MissingReason::NotRemoved,
        },
        topic: missing.topic,
        partition: missing.partition,
        error: text(missing.error),
    });
    Completeness {
        is_complete: completeness.complete,
        missing: missing.collect(),
        missing_count: completeness.missing_count,
        are_states_known: completeness.states_known,
        group_states_problem: text(completeness.group_states_problem),
        as_of: time(completeness.as_of),
    }
}

pub(crate) fn position(position: v1::Position) -> Position {
    Position {
        topic: position.topic.into(),
        partition: position.partition,
        offset: position.offset,
    }
}

impl From<v1::Group> for Group {
    fn from(group: v1::Group) -> Self {
        let state = GroupState::of(group.state());
        let topics = group.topics.into_iter();
        Self {
            id: group.id,
            fingerprint_version: group.fingerprint_version,
            pipeline: text(group.pipeline),
            error_class: text(group.error_class),
            error_code: text(group.error_code),
            template: text(group.template),
            count: group.count,
            open: group.open,
            first_dead_at: time(group.first_dead_at),
            last_dead_at: time(group.last_dead_at),
            topics: topics.map(|topic| (topic.topic, topic.count)).collect(),
            trend: group.trend,
            sample_id: text(group.sample_id),
            state,
            state_time: time(group.state_time),
            state_by: text(group.state_by),
            state_why: text(group.state_why),
            muted_until: time(group.muted_until),
            note: text(group.note),
            note_time: time(group.note_time),
            note_by: text(group.note_by),
            revision: group.revision,
            problem: text(group.problem),
        }
    }
}

impl TryFrom<v1::DeadLetter> for DeadLetter {
    type Error = ClientError;

    fn try_from(letter: v1::DeadLetter) -> Result<Self, ClientError> {
        let state = match letter.state() {
            v1::DeadLetterState::Unspecified => DeadLetterState::Unknown,
            v1::DeadLetterState::Open => DeadLetterState::Open,
            v1::DeadLetterState::Redriven => DeadLetterState::Redriven,
            v1::DeadLetterState::Discarded => DeadLetterState::Discarded,
        };
        let dialect = match letter.dialect() {
            v1::HeaderDialect::Unspecified => None,
            v1::HeaderDialect::Redeliver => Some(Dialect::Redeliver),
            v1::HeaderDialect::Spring => Some(Dialect::Spring),
            v1::HeaderDialect::Connect => Some(Dialect::Connect),
            v1::HeaderDialect::Streams => Some(Dialect::Streams),
            v1::HeaderDialect::Smallrye => Some(Dialect::SmallRye),
            v1::HeaderDialect::ShareGroup => Some(Dialect::ShareGroup),
        };
        let timestamp_type = match letter.timestamp_type() {
            v1::TimestampType::Unspecified | v1::TimestampType::None => None,
            v1::TimestampType::CreateTime => Some(TimestampType::CreateTime),
            v1::TimestampType::LogAppendTime => Some(TimestampType::LogAppendTime),
        };
        let has_timestamp = letter.timestamp_type() != v1::TimestampType::None;
        let place = letter.position.ok_or(ClientError::InvalidResponse("position"))?;
        Ok(Self {
            id: letter.id,
            position: position(place),
            dead_at: time(letter.dead_at).filter(|_| has_timestamp),
            timestamp_type,
            state,
            dialect,
            pipeline: text(letter.pipeline),
            error_class: text(letter.error_class),
            error_code: text(letter.error_code),
            error_message: text(letter.error_message),
            failed_at: time(letter.failed_at),
            retry_count: letter.retry_count,
            origin: letter.origin.map(position),
            origin_timestamp: time(letter.origin_timestamp),
            is_payload_withheld: letter.payload_withheld != 0,
            masked: letter.masked.map_or_else(Masked::default, |masked| Masked {
                fields: masked.fields,
                headers: masked.headers,
                paths: masked.paths,
            }),
            key: letter.key,
            is_key_truncated: letter.key_truncated,
            value_size: letter.value_size,
            value: letter.value,
            is_value_truncated: letter.value_truncated,
            headers: from_headers(&letter.headers),
            are_headers_truncated: letter.headers_truncated,
            unreadable_headers: letter.unreadable_headers,
            trace_id: text(letter.trace_id),
            job_id: text(letter.job_id),
            group: text(letter.group),
        })
    }
}

impl From<v1::DeadLetterStats> for DeadLetterStats {
    fn from(answer: v1::DeadLetterStats) -> Self {
        Self {
            topics: answer.topics.into_iter().map(TopicStats::from).collect(),
            lag: answer.lag,
            completeness: completeness(answer.completeness),
        }
    }
}

impl From<v1::TopicStats> for TopicStats {
    fn from(stats: v1::TopicStats) -> Self {
        let removal = match stats.removal() {
            v1::Removal::Unspecified => Removal::Unknown,
            v1::Removal::Never => Removal::Never,
            v1::Removal::ByAge => Removal::ByAge,
            v1::Removal::BySize => Removal::BySize,
            v1::Removal::ByAgeOrSize => Removal::ByAgeOrSize,
        };
        let until_removal = stats.until_removal.as_ref().and_then(from_duration);
        let open_by_class: HashMap<String, u64> = stats.open_by_class;
        Self {
            topic: stats.topic,
            open: stats.open,
            total: stats.total,
            last_minute: stats.last_minute,
            last_hour: stats.last_hour,
            last_day: stats.last_day,
            oldest: time(stats.oldest),
            newest: time(stats.newest),
            removal,
            until_removal: until_removal.map(Duration::from),
            open_by_class: open_by_class.into_iter().collect(),
            are_classes_masked: stats.classes_masked,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent() -> v1::DeadLetter {
        v1::DeadLetter {
            id: "a-dlq/1/2".to_owned(),
            position: Some(v1::Position {
                topic: "a-dlq".to_owned(),
                partition: 1,
                offset: 2,
            }),
            state: v1::DeadLetterState::Open.into(),
            dialect: v1::HeaderDialect::Spring.into(),
            ..v1::DeadLetter::default()
        }
    }

    #[test]
    fn a_missing_field_of_a_dead_letter_is_none() {
        let letter = DeadLetter::try_from(sent()).unwrap();
        assert_eq!(letter.position.to_string(), "a-dlq/1/2");
        assert_eq!(
            (letter.state, letter.dialect),
            (DeadLetterState::Open, Some(Dialect::Spring))
        );
        assert_eq!((letter.pipeline, letter.origin, letter.value), (None, None, None));
        let unknown = v1::DeadLetter { dialect: 0, ..sent() };
        assert_eq!(DeadLetter::try_from(unknown).unwrap().dialect, None);
    }

    #[test]
    fn the_error_for_an_invalid_response_names_the_field() {
        let without = v1::DeadLetter {
            position: None,
            ..sent()
        };
        let error = DeadLetter::try_from(without).unwrap_err();
        assert!(
            matches!(error, ClientError::InvalidResponse("position")),
            "{error}"
        );
    }
    #[test]
    fn a_state_that_the_inspector_does_not_know_is_not_open() {
        let unknown = v1::DeadLetter { state: 0, ..sent() };
        let letter = DeadLetter::try_from(unknown).unwrap();
        assert_eq!(letter.state, DeadLetterState::Unknown);
        let stats = TopicStats::from(v1::TopicStats::default());
        assert_eq!((stats.open, stats.removal), (None, Removal::Unknown));
    }

    #[test]
    fn an_answer_without_completeness_is_not_complete() {
        assert_eq!(completeness(None), Completeness::default());
        let sent = v1::Completeness {
            complete: false,
            as_of: Some(prost_types::Timestamp { seconds: 1, nanos: 0 }),
            missing: vec![v1::MissingPartition {
                topic: "a-dlq".to_owned(),
                partition: Some(3),
                reason: v1::MissingReason::Refused.into(),
                error: "denied".to_owned(),
            }],
            missing_count: 7,
            states_known: true,
            group_states_problem: "missing".to_owned(),
        };
        let expected = Completeness {
            is_complete: false,
            as_of: Some(Timestamp::from_millis(1_000)),
            missing: vec![MissingPartition {
                topic: "a-dlq".to_owned(),
                partition: Some(3),
                reason: MissingReason::Refused,
                error: Some("denied".to_owned()),
            }],
            missing_count: 7,
            are_states_known: true,
            group_states_problem: Some("missing".to_owned()),
        };
        assert_eq!(completeness(Some(sent)), expected);
    }
}
