//! The inspector's gRPC service in plain types.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::{Headers, Position, Timestamp};
use redeliver_proto::convert::{from_duration, from_headers};
use redeliver_proto::v1;
use redeliver_proto::v1::dead_letter_service_client::DeadLetterServiceClient;
use redeliver_proto::v1::watch_dead_letters_response::Event;
use tonic::{Code, Status, Streaming};

use crate::endpoint::{Connection, Endpoint, LARGEST_ANSWER};
use crate::error::ClientError;
use crate::jobs::{text, time};

/// How long a watch may be silent. Heartbeats come every 15 seconds.
const LONGEST_SILENCE: Duration = Duration::from_secs(45);

/// Lists, reads and watches dead letters. Cheap to clone.
#[derive(Clone, Debug)]
pub struct DeadLetterClient {
    service: DeadLetterServiceClient<Connection>,
    url: String,
}

/// What was done with a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeadLetterState {
    /// Nothing yet.
    Open,
    /// It was sent to its pipeline again.
    Redriven,
    /// It was given up.
    Discarded,
}

/// Whose headers say why a record is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Ours.
    Redeliver,
    /// Spring Kafka's.
    Spring,
    /// Kafka Connect's.
    Connect,
    /// Kafka Streams'.
    Streams,
    /// `SmallRye`'s, of Quarkus.
    SmallRye,
    /// Those of Kafka's share groups.
    ShareGroup,
}

impl DeadLetterState {
    /// As it is written.
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
    /// As it is written.
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

/// A dead letter. What its headers do not say is `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    /// `topic/partition/offset`.
    pub id: String,
    /// Where it stands.
    pub position: Position,
    /// When it was written there.
    pub dead_at: Option<Timestamp>,
    /// What was done with it.
    pub state: DeadLetterState,
    /// Whose headers it has; `None`: none that are known.
    pub dialect: Option<Dialect>,
    /// The pipeline that failed it.
    pub pipeline: Option<String>,
    /// Why it failed, as a class.
    pub error_class: Option<String>,
    /// Why it failed, as a code.
    pub error_code: Option<String>,
    /// Why it failed, in words.
    pub error_message: Option<String>,
    /// When it failed.
    pub failed_at: Option<Timestamp>,
    /// How many attempts failed.
    pub retry_count: u32,
    /// Where it came from first.
    pub origin: Option<Position>,
    /// The timestamp that it had there.
    pub origin_timestamp: Option<Timestamp>,
    /// The record's key.
    pub key: Option<Bytes>,
    /// The size of the value in bytes; `None`: a null value.
    pub value_size: Option<u64>,
    /// The value, when all of the dead letter was asked for; at most 1 MiB of it.
    pub value: Option<Bytes>,
    /// Whether the value is longer than that.
    pub is_value_truncated: bool,
    /// The headers in order, when all of the dead letter was asked for.
    pub headers: Headers,
    /// The W3C trace id.
    pub trace_id: Option<String>,
    /// The scheduled job that it is of.
    pub job_id: Option<String>,
}

/// Which dead letters to list, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListDeadLetters {
    /// Such as `error_class = "permanent" AND retry_count > 3`; empty: all.
    pub filter: String,
    /// How many at once; 0: 50, at most 1000.
    pub page_size: u16,
    /// From the page before; empty: the first page.
    pub page_token: String,
    /// The oldest first instead of the newest.
    pub oldest_first: bool,
    /// With value and headers.
    pub full: bool,
}

/// One page of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// What is on it.
    pub dead_letters: Vec<DeadLetter>,
    /// For the next page; `None`: this was the last.
    pub next_page_token: Option<String>,
}

/// What is in one dead-letter topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicStats {
    /// The topic.
    pub topic: String,
    /// Those that wait for somebody.
    pub open: u64,
    /// All.
    pub total: u64,
    /// Those that came in the last minute.
    pub last_minute: u64,
    /// In the last hour.
    pub last_hour: u64,
    /// In the last day.
    pub last_day: u64,
    /// The oldest open one.
    pub oldest: Option<Timestamp>,
    /// The newest one.
    pub newest: Option<Timestamp>,
    /// How long until retention removes the oldest open one; `None`: it never does.
    pub until_removal: Option<Duration>,
    /// The open ones by class.
    pub open_by_class: BTreeMap<String, u64>,
}

/// Which dead letters to watch, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WatchDeadLetters {
    /// As in [`ListDeadLetters`].
    pub filter: String,
    /// With value and headers.
    pub full: bool,
    /// Go on behind the event that had this token; empty: begin with what is there.
    pub resume_token: String,
    /// Leave out what is there already.
    pub only_new: bool,
}

/// Something that a watch brings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchEvent {
    /// A dead letter.
    DeadLetter(Box<DeadLetter>),
    /// All that was there has been sent; what follows is new.
    Synced,
    /// The connection lives; the server's time.
    Heartbeat(Option<Timestamp>),
}

impl DeadLetterClient {
    /// Connects to an inspector.
    ///
    /// # Errors
    /// When the endpoint cannot be used or nobody answers there.
    pub async fn connect(endpoint: &Endpoint) -> Result<Self, ClientError> {
        let connection = endpoint.connect().await?;
        Ok(Self {
            service: DeadLetterServiceClient::new(connection).max_decoding_message_size(LARGEST_ANSWER),
            url: endpoint.url().to_owned(),
        })
    }

    /// One page of dead letters.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`] with what is wrong with the filter, and where.
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
        let answer = answer.map_err(|status| self.error(&status))?.into_inner();
        let dead_letters = answer.dead_letters.into_iter().map(DeadLetter::try_from);
        Ok(Page {
            dead_letters: dead_letters.collect::<Result<_, _>>()?,
            next_page_token: text(answer.next_page_token),
        })
    }

    /// A dead letter with value and headers; `None` when retention has removed it, or it never was.
    ///
    /// # Errors
    /// When the inspector does not answer.
    pub async fn get(&self, id: &str) -> Result<Option<DeadLetter>, ClientError> {
        let request = v1::GetDeadLetterRequest { id: id.to_owned() };
        match self.service.clone().get_dead_letter(request).await {
            Ok(answer) => DeadLetter::try_from(answer.into_inner()).map(Some),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(self.error(&status)),
        }
    }

    /// The whole value of a dead letter, in pieces.
    ///
    /// # Errors
    /// [`Code::NotFound`] when there is no such dead letter.
    pub async fn payload(&self, id: &str) -> Result<Payload, ClientError> {
        let request = v1::ReadPayloadRequest { id: id.to_owned() };
        let answer = self.service.clone().read_payload(request).await;
        Ok(Payload {
            stream: answer.map_err(|status| self.error(&status))?.into_inner(),
            url: self.url.clone(),
        })
    }

    /// How many there are of those that match, by topic.
    ///
    /// # Errors
    /// As [`DeadLetterClient::list`].
    pub async fn stats(&self, filter: &str) -> Result<Vec<TopicStats>, ClientError> {
        let request = v1::GetDeadLetterStatsRequest {
            filter: filter.to_owned(),
        };
        let answer = self.service.clone().get_dead_letter_stats(request).await;
        let answer = answer.map_err(|status| self.error(&status))?.into_inner();
        answer.topics.into_iter().map(TopicStats::try_from).collect()
    }

    /// Dead letters as they come.
    ///
    /// # Errors
    /// As [`DeadLetterClient::list`], and when the token cannot be resumed from.
    pub async fn watch(&self, watch: &WatchDeadLetters) -> Result<Watch, ClientError> {
        let request = v1::WatchDeadLettersRequest {
            filter: watch.filter.clone(),
            view: view(watch.full).into(),
            resume_token: watch.resume_token.clone(),
            only_new: watch.only_new,
        };
        let answer = self.service.clone().watch_dead_letters(request).await;
        Ok(Watch {
            stream: answer.map_err(|status| self.error(&status))?.into_inner(),
            resume_token: watch.resume_token.clone(),
            url: self.url.clone(),
        })
    }

    fn error(&self, status: &Status) -> ClientError {
        ClientError::from_status(&self.url, status)
    }
}

fn view(full: bool) -> v1::DeadLetterView {
    if full {
        v1::DeadLetterView::Full
    } else {
        v1::DeadLetterView::Basic
    }
}

/// A value that comes in pieces.
#[derive(Debug)]
pub struct Payload {
    stream: Streaming<v1::ReadPayloadResponse>,
    url: String,
}

impl Payload {
    /// The next piece; `None` at the end.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        let piece = self.stream.message().await;
        let piece = piece.map_err(|status| ClientError::from_status(&self.url, &status))?;
        Ok(piece.map(|piece| piece.chunk))
    }
}

/// Dead letters as they come. After an error that [is passing](ClientError::is_passing) a new watch from
/// [`Watch::resume_token`] goes on without a gap.
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
    /// When the connection breaks, shows no sign of life, or is ended by the inspector.
    pub async fn next(&mut self) -> Result<WatchEvent, ClientError> {
        loop {
            let waited = tokio::time::timeout(LONGEST_SILENCE, self.stream.message()).await;
            let Ok(message) = waited else {
                return Err(ClientError::Silent(LONGEST_SILENCE));
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
                // An event of a newer version.
                None => continue,
            });
        }
    }

    /// Behind the last event that came.
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
            v1::DeadLetterState::Unspecified => return Err(ClientError::Answer("state")),
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
        let place = letter.position.ok_or(ClientError::Answer("position"))?;
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
            .map(|span| from_duration(&span).ok_or(ClientError::Answer("until_removal")))
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
    fn a_dead_letter_is_read_and_what_its_headers_do_not_say_is_none() {
        let letter = DeadLetter::try_from(sent()).unwrap();
        assert_eq!(letter.position.to_string(), "a-dlq-1@2");
        assert_eq!(
            (letter.state, letter.dialect),
            (DeadLetterState::Open, Some(Dialect::Spring))
        );
        assert_eq!((letter.pipeline, letter.origin, letter.value), (None, None, None));
        let unknown = v1::DeadLetter { dialect: 0, ..sent() };
        assert_eq!(DeadLetter::try_from(unknown).unwrap().dialect, None);
    }

    #[test]
    fn an_answer_that_makes_no_sense_names_its_field() {
        let without = v1::DeadLetter {
            position: None,
            ..sent()
        };
        let stateless = v1::DeadLetter { state: 0, ..sent() };
        for (letter, field) in [(without, "position"), (stateless, "state")] {
            let error = DeadLetter::try_from(letter).unwrap_err();
            assert!(
                matches!(error, ClientError::Answer(found) if found == field),
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
