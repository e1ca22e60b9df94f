//! A client for the gRPC API of the inspector.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::{Headers, Position, Timestamp};
use redeliver_proto::convert::{from_duration, from_headers};
use redeliver_proto::v1;
use redeliver_proto::v1::dead_letter_service_client::DeadLetterServiceClient;
use redeliver_proto::v1::watch_dead_letters_response::Event;
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeadLetterState {
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
    /// When it was written to the dead-letter topic.
    pub dead_at: Option<Timestamp>,
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
    /// The key of the record.
    pub key: Option<Bytes>,
    /// The size of the value in bytes; `None` for a null value.
    pub value_size: Option<u64>,
    /// The first MiB of the value, if the request has `full`. [`DeadLetterClient::payload`] reads the whole value.
    pub value: Option<Bytes>,
    /// Whether `value` is truncated.
    pub is_value_truncated: bool,
    /// The headers in order, if the request has `full`; otherwise empty.
    pub headers: Headers,
    /// The trace id of the W3C trace context, as 32 hex digits.
    pub trace_id: Option<String>,
    /// The id of the job from which the record was dispatched.
    pub job_id: Option<String>,
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
    /// The token for the next page; `None` on the last page.
    pub next_page_token: Option<String>,
}

/// The statistics of a dead-letter topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicStats {
    /// The name of the topic.
    pub topic: String,
    /// The number of open dead letters.
    pub open: u64,
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
    /// The time until retention removes the oldest open dead letter; `None` if it is never removed.
    pub until_removal: Option<Duration>,
    /// The number of open dead letters by failure class.
    pub open_by_class: BTreeMap<String, u64>,
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
    /// All existing dead letters were sent. All later ones are new.
    Synced,
    /// The connection is alive. Contains the time of the server.
    Heartbeat(Option<Timestamp>),
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
        let dead_letters = answer.dead_letters.into_iter().map(DeadLetter::try_from);
        Ok(Page {
            dead_letters: dead_letters.collect::<Result<_, _>>()?,
            next_page_token: text(answer.next_page_token),
        })
    }

    /// Gets a dead letter with value and headers; `None` if it does not exist, for example because retention removed
    /// it.
    ///
    /// # Errors
    /// If the inspector is unavailable.
    pub async fn get(&self, id: &str) -> Result<Option<DeadLetter>, ClientError> {
        let request = v1::GetDeadLetterRequest { id: id.to_owned() };
        match self.service.clone().get_dead_letter(request).await {
            Err(status) if status.code() == Code::NotFound => Ok(None),
            answer => DeadLetter::try_from(self.answer(answer).await?).map(Some),
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
        })
    }

    /// Counts the dead letters that match a filter, by topic.
    ///
    /// # Errors
    /// Like [`DeadLetterClient::list`].
    pub async fn stats(&self, filter: &str) -> Result<Vec<TopicStats>, ClientError> {
        let request = v1::GetDeadLetterStatsRequest {
            filter: filter.to_owned(),
        };
        let answer = self.service.clone().get_dead_letter_stats(request).await;
        let answer = self.answer(answer).await?;
        answer.topics.into_iter().map(TopicStats::try_from).collect()
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
}

impl Payload {
    /// The next chunk; `None` at the end.
    ///
    /// # Errors
    /// If the connection is lost.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        let message = self.stream.message().await;
        let message = message.map_err(|status| ClientError::from_status(&self.url, &status))?;
        Ok(message.map(|message| message.chunk))
    }
}

/// A stream of dead letters. After a [transient error](ClientError::is_transient), a new watch with
/// [`Watch::resume_token`] continues without a gap.
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
                Some(Event::Synced(v1::Synced {})) => WatchEvent::Synced,
                Some(Event::Heartbeat(heartbeat)) => WatchEvent::Heartbeat(time(heartbeat.time, "time")?),
                // A newer inspector may send events that this client does not know.
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

fn position(position: v1::Position) -> Position {
    Position {
        topic: position.topic.into(),
        partition: position.partition,
        offset: position.offset,
    }
}

impl TryFrom<v1::DeadLetter> for DeadLetter {
    type Error = ClientError;

    fn try_from(letter: v1::DeadLetter) -> Result<Self, ClientError> {
        let state = match letter.state() {
            v1::DeadLetterState::Unspecified => return Err(ClientError::InvalidResponse("state")),
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
        let place = letter.position.ok_or(ClientError::InvalidResponse("position"))?;
        Ok(Self {
            id: letter.id,
            position: position(place),
            dead_at: time(letter.dead_at, "dead_at")?,
            state,
            dialect,
            pipeline: text(letter.pipeline),
            error_class: text(letter.error_class),
            error_code: text(letter.error_code),
            error_message: text(letter.error_message),
            failed_at: time(letter.failed_at, "failed_at")?,
            retry_count: letter.retry_count,
            origin: letter.origin.map(position),
            origin_timestamp: time(letter.origin_timestamp, "origin_timestamp")?,
            key: letter.key,
            value_size: letter.value_size,
            value: letter.value,
            is_value_truncated: letter.value_truncated,
            headers: from_headers(&letter.headers),
            trace_id: text(letter.trace_id),
            job_id: text(letter.job_id),
        })
    }
}

impl TryFrom<v1::TopicStats> for TopicStats {
    type Error = ClientError;

    fn try_from(stats: v1::TopicStats) -> Result<Self, ClientError> {
        let until_removal = stats
            .until_removal
            .map(|duration| from_duration(&duration).ok_or(ClientError::InvalidResponse("until_removal")))
            .transpose()?;
        let open_by_class: HashMap<String, u64> = stats.open_by_class;
        Ok(Self {
            topic: stats.topic,
            open: stats.open,
            total: stats.total,
            last_minute: stats.last_minute,
            last_hour: stats.last_hour,
            last_day: stats.last_day,
            oldest: time(stats.oldest, "oldest")?,
            newest: time(stats.newest, "newest")?,
            until_removal: until_removal.map(Duration::from),
            open_by_class: open_by_class.into_iter().collect(),
        })
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
        let stateless = v1::DeadLetter { state: 0, ..sent() };
        for (letter, field) in [(without, "position"), (stateless, "state")] {
            let error = DeadLetter::try_from(letter).unwrap_err();
            assert!(
                matches!(error, ClientError::InvalidResponse(found) if found == field),
                "{error}"
            );
        }
        let negative = v1::TopicStats {
            until_removal: Some(prost_types::Duration {
                seconds: -1,
                nanos: 0,
            }),
            ..v1::TopicStats::default()
        };
        assert!(TopicStats::try_from(negative).is_err());
    }
}
