//! A client for records that wait for their next attempt, and for the life of single records. The inspector serves both over gRPC.

use std::time::Duration;

use redeliver_core::{Position, Timestamp};
use redeliver_proto::convert::{from_duration, to_duration};
use redeliver_proto::v1;
use redeliver_proto::v1::waiting_service_client::WaitingServiceClient;
use tonic::Streaming;

use crate::endpoint::{Connection, Endpoint, MAX_RESPONSE};
use crate::error::{self, ClientError};
use crate::jobs::{text, time};

/// A scan fails if it receives nothing for this long. At its start, the inspector asks Kafka for positions of groups, which can take 30
/// seconds; later, it reports its progress several times per second.
const STREAM_TIMEOUT: Duration = Duration::from_secs(60);

/// Lists and counts waiting records, and traces records. Clones share one connection.
///
/// The inspector reads topics for each call, which can take minutes. The functions call `progress` meanwhile.
#[derive(Clone, Debug)]
pub struct WaitingClient {
    service: WaitingServiceClient<Connection>,
    url: String,
}

/// How much of the topics has been read, in offsets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanProgress {
    /// How many were read.
    pub read: u64,
    /// How many there are.
    pub total: u64,
}

/// Which waiting records count. Texts that are empty and `None` apply to all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WaitingFilter {
    /// Only records of this pipeline.
    pub pipeline: String,
    /// Only records that wait here: `due`, `scheduler` or a tier such as `30s`.
    pub place: String,
    /// Only records whose last failure has this code.
    pub error_code: String,
    /// Only records whose last failure has this class: `transient` or `throttled`.
    pub error_class: String,
    /// Only records that entered the pipeline longer ago than this.
    pub older_than: Option<Duration>,
    /// Only records with more failed attempts than this.
    pub more_attempts_than: Option<u32>,
    /// Only records that entered the pipeline in this topic.
    pub origin_topic: String,
    /// Only records that entered the pipeline in this partition.
    pub origin_partition: Option<i32>,
    /// Only records that entered the pipeline at this offset.
    pub origin_offset: Option<i64>,
}

/// What an answer is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitingCoverage {
    /// The answer is about this moment.
    pub as_of: Option<Timestamp>,
    /// Whether long waits are missing, because the scheduler holds more than a scan remembers.
    pub is_scheduler_truncated: bool,
}

/// Waiting records, those that are due first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WaitingList {
    /// The records, up to the limit.
    pub records: Vec<WaitingRecord>,
    /// How many match, with those beyond the limit.
    pub matching: u64,
    /// What the list is about.
    pub coverage: WaitingCoverage,
}

/// A failed record that waits. Fields that its headers do not contain are `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingRecord {
    /// The pipeline.
    pub pipeline: String,
    /// Where it waits: `due`, `scheduler` or a tier such as `30s`.
    pub place: String,
    /// The position of the copy that waits.
    pub position: Position,
    /// When it is due.
    pub due_at: Option<Timestamp>,
    /// The number of failed attempts.
    pub attempts: u32,
    /// The class of the last failure.
    pub error_class: Option<String>,
    /// The code of the last failure.
    pub error_code: Option<String>,
    /// The message of the last failure; `None` if the record waits with the scheduler.
    pub error_message: Option<String>,
    /// When the last attempt failed.
    pub failed_at: Option<Timestamp>,
    /// Where it entered the pipeline.
    pub origin: Option<Position>,
    /// Its timestamp there.
    pub origin_timestamp: Option<Timestamp>,
    /// Its reserved headers are not valid, so that it becomes a dead letter.
    pub is_malformed: bool,
}

/// Counts of waiting records.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WaitingStats {
    /// All that match.
    pub total: WaitingCounts,
    /// By pipeline and place.
    pub places: Vec<WaitingPlace>,
    /// What the counts are about.
    pub coverage: WaitingCoverage,
}

/// The records of a pipeline that wait in one place.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WaitingPlace {
    /// The pipeline.
    pub pipeline: String,
    /// `due`, `scheduler` or a tier such as `30s`.
    pub place: String,
    /// The counts.
    pub counts: WaitingCounts,
}

/// Counts of records.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WaitingCounts {
    /// How many there are.
    pub records: u64,
    /// How many are due.
    pub overdue: u64,
    /// How many have no valid reserved headers.
    pub malformed: u64,
    /// The average number of failed attempts.
    pub average_attempts: f64,
    /// The maximum number of failed attempts.
    pub max_attempts: u32,
    /// The earliest due time, which can be in the past.
    pub next_due: Option<Timestamp>,
    /// When the record entered its pipeline that did so first.
    pub oldest: Option<Timestamp>,
    /// The most frequent error codes, each with its number of records. An empty code: there is none.
    pub codes: Vec<(String, u64)>,
    /// How many records have other codes.
    pub other_codes: u64,
}

/// Which record to trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceRecord {
    /// The position of any copy of it.
    pub position: Position,
    /// Only in this pipeline; empty: in all.
    pub pipeline: String,
    /// Search topics from their beginning.
    pub from_beginning: bool,
}

/// The life of a record in a pipeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordTrace {
    /// The pipeline.
    pub pipeline: String,
    /// Where it entered the pipeline.
    pub origin: Position,
    /// Its timestamp there.
    pub origin_timestamp: Option<Timestamp>,
    /// What has happened, in the order of time.
    pub steps: Vec<TraceStep>,
    /// Whether there are more steps.
    pub is_truncated: bool,
    /// Where it is now.
    pub outcome: TraceOutcome,
    /// When it is due, if it waits.
    pub next_due: Option<Timestamp>,
    /// What cannot be known any more, and why.
    pub gaps: Vec<String>,
    /// Topics were searched from this time on; `None`: from their beginning.
    pub searched_since: Option<Timestamp>,
}

/// Where a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceOutcome {
    /// It was not processed yet.
    New,
    /// It waits for its next attempt.
    Waits,
    /// It was released, and its next attempt is not complete.
    Due,
    /// It has a result.
    Succeeded,
    /// It is a dead letter.
    Dead,
    /// It is a dead letter that was discarded.
    Discarded,
    /// It was redriven to a topic that is none of the pipeline.
    Redriven,
    /// Its last copy is complete, and the next one is not there.
    Unknown,
}

/// Something that has happened to a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceStep {
    /// What has happened.
    pub event: TraceEvent,
    /// When the copy was written; without a copy, when it was decided.
    pub time: Option<Timestamp>,
    /// The position of the copy; without a copy, that of the dead letter.
    pub position: Position,
    /// Where it is: `source`, `due`, `scheduler`, `output`, `dead-letters` or a tier such as `30s`.
    pub place: String,
    /// The number of failed attempts so far.
    pub attempts: u32,
    /// Why it waits or is dead: the class of the failure.
    pub error_class: Option<String>,
    /// The code of the failure.
    pub error_code: Option<String>,
    /// The message of the failure.
    pub error_message: Option<String>,
    /// When the attempt failed.
    pub failed_at: Option<Timestamp>,
    /// When the wait ends.
    pub due_at: Option<Timestamp>,
    /// How long the wait is.
    pub wait: Option<Duration>,
    /// How often the record has been redriven before; a redrive that has written a copy counts.
    pub redrives: u32,
    /// Who has redriven, discarded or restored the dead letter.
    pub by: Option<String>,
    /// Why.
    pub why: Option<String>,
    /// The job that did so.
    pub redrive_id: Option<String>,
    /// The topic to which a redrive has written the record.
    pub destination: Option<String>,
    /// What was edited in it: `value`, `key` and `headers`.
    pub edited: Vec<String>,
}

/// What has happened to a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceEvent {
    /// Something that this client does not know.
    Other,
    /// It entered the pipeline.
    Entered,
    /// An attempt has failed, and it waits for the next one.
    Waits,
    /// Its wait has ended.
    Released,
    /// An attempt has succeeded.
    Succeeded,
    /// It became a dead letter.
    Died,
    /// A dead letter was sent back to its pipeline.
    Redriven,
    /// A dead letter was discarded.
    Discarded,
    /// A discarded dead letter was opened again.
    Restored,
}

impl TraceOutcome {
    /// The name in lower case.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Waits => "waits",
            Self::Due => "due",
            Self::Succeeded => "succeeded",
            Self::Dead => "dead",
            Self::Discarded => "discarded",
            Self::Redriven => "redriven",
            Self::Unknown => "unknown",
        }
    }
}

impl TraceEvent {
    /// The name in lower case.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Other => "other",
            Self::Entered => "entered",
            Self::Waits => "waits",
            Self::Released => "released",
            Self::Succeeded => "succeeded",
            Self::Died => "died",
            Self::Redriven => "redriven",
            Self::Discarded => "discarded",
            Self::Restored => "restored",
        }
    }
}

/// A message of a scan.
enum Message<T> {
    Progress(v1::ScanProgress),
    Answer(T),
    /// One that this client does not know.
    Other,
}

impl WaitingClient {
    /// Connects to an inspector.
    ///
    /// # Errors
    /// If the endpoint is invalid or the inspector cannot be reached.
    pub async fn connect(endpoint: &Endpoint) -> Result<Self, ClientError> {
        let connection = endpoint.connect().await?;
        Ok(Self {
            service: WaitingServiceClient::new(connection).max_decoding_message_size(MAX_RESPONSE),
            url: endpoint.url().to_owned(),
        })
    }

    /// Lists waiting records, those that are due first. `limit`: at most 1000; 0 means 50.
    ///
    /// # Errors
    /// If the inspector or Kafka is unavailable, the request is refused, or the scan takes too long.
    pub async fn list(
        &self,
        filter: &WaitingFilter,
        limit: u16,
        progress: impl FnMut(ScanProgress),
    ) -> Result<WaitingList, ClientError> {
        use v1::list_waiting_response::Event;
        let request = v1::ListWaitingRequest {
            filter: Some(filter.into()),
            limit: i32::from(limit),
        };
        let stream = self.service.clone().list_waiting(request).await;
        let stream = error::answer(&self.url, stream).await?;
        let answer = self.follow(stream, progress, |message| match message.event {
            Some(Event::Progress(progress)) => Message::Progress(progress),
            Some(Event::Records(records)) => Message::Answer(records),
            None => Message::Other,
        });
        let answer = answer.await?;
        let records = answer.records.into_iter().map(WaitingRecord::try_from);
        Ok(WaitingList {
            records: records.collect::<Result<_, _>>()?,
            matching: answer.matching,
            coverage: coverage(answer.coverage)?,
        })
    }

    /// Counts waiting records.
    ///
    /// # Errors
    /// As [`WaitingClient::list`].
    pub async fn stats(
        &self,
        filter: &WaitingFilter,
        progress: impl FnMut(ScanProgress),
    ) -> Result<WaitingStats, ClientError> {
        use v1::get_waiting_stats_response::Event;
        let request = v1::GetWaitingStatsRequest {
            filter: Some(filter.into()),
        };
        let stream = self.service.clone().get_waiting_stats(request).await;
        let stream = error::answer(&self.url, stream).await?;
        let answer = self.follow(stream, progress, |message| match message.event {
            Some(Event::Progress(progress)) => Message::Progress(progress),
            Some(Event::Stats(stats)) => Message::Answer(stats),
            None => Message::Other,
        });
        let answer = answer.await?;
        let places = answer.places.into_iter().map(|place| {
            Ok(WaitingPlace {
                pipeline: place.pipeline,
                place: place.place,
                counts: counts(place.counts)?,
            })
        });
        Ok(WaitingStats {
            total: counts(answer.total)?,
            places: places.collect::<Result<_, ClientError>>()?,
            coverage: coverage(answer.coverage)?,
        })
    }

    /// Follows a record through its pipelines.
    ///
    /// # Errors
    /// As [`WaitingClient::list`], or if the record is unknown.
    pub async fn trace(
        &self,
        trace: &TraceRecord,
        progress: impl FnMut(ScanProgress),
    ) -> Result<Vec<RecordTrace>, ClientError> {
        use v1::trace_record_response::Event;
        let request = v1::TraceRecordRequest {
            position: Some(v1::Position {
                topic: trace.position.topic.to_string(),
                partition: trace.position.partition,
                offset: trace.position.offset,
            }),
            pipeline: trace.pipeline.clone(),
            from_beginning: trace.from_beginning,
        };
        let stream = self.service.clone().trace_record(request).await;
        let stream = error::answer(&self.url, stream).await?;
        let answer = self.follow(stream, progress, |message| match message.event {
            Some(Event::Progress(progress)) => Message::Progress(progress),
            Some(Event::Trace(trace)) => Message::Answer(trace),
            None => Message::Other,
        });
        let answer = answer.await?;
        answer.pipelines.into_iter().map(RecordTrace::try_from).collect()
    }

    /// Waits for the answer of a scan.
    async fn follow<M, T>(
        &self,
        mut stream: Streaming<M>,
        mut progress: impl FnMut(ScanProgress),
        read: impl Fn(M) -> Message<T>,
    ) -> Result<T, ClientError> {
        loop {
            let received = tokio::time::timeout(STREAM_TIMEOUT, stream.message()).await;
            let Ok(message) = received else {
                return Err(ClientError::StreamTimeout(STREAM_TIMEOUT));
            };
            let message = message.map_err(|status| ClientError::from_status(&self.url, &status))?;
            match read(message.ok_or(ClientError::Ended)?) {
                Message::Progress(v1::ScanProgress { read, total }) => progress(ScanProgress { read, total }),
                Message::Answer(answer) => return Ok(answer),
                Message::Other => {}
            }
        }
    }
}

impl From<&WaitingFilter> for v1::WaitingFilter {
    fn from(filter: &WaitingFilter) -> Self {
        Self {
            pipeline: filter.pipeline.clone(),
            place: filter.place.clone(),
            error_code: filter.error_code.clone(),
            error_class: filter.error_class.clone(),
            older_than: filter.older_than.map(|age| to_duration(age.into())),
            more_attempts_than: filter.more_attempts_than,
            origin_topic: filter.origin_topic.clone(),
            origin_partition: filter.origin_partition,
            origin_offset: filter.origin_offset,
        }
    }
}

impl TryFrom<v1::WaitingRecord> for WaitingRecord {
    type Error = ClientError;

    fn try_from(record: v1::WaitingRecord) -> Result<Self, ClientError> {
        Ok(Self {
            pipeline: record.pipeline,
            place: record.place,
            position: position(record.position, "position")?,
            due_at: time(record.due_at),
            attempts: record.attempts,
            error_class: text(record.error_class),
            error_code: text(record.error_code),
            error_message: text(record.error_message),
            failed_at: time(record.failed_at),
            origin: record
                .origin
                .map(|origin| position(Some(origin), "origin"))
                .transpose()?,
            origin_timestamp: time(record.origin_timestamp),
            is_malformed: record.malformed,
        })
    }
}

impl TryFrom<v1::PipelineTrace> for RecordTrace {
    type Error = ClientError;

    fn try_from(trace: v1::PipelineTrace) -> Result<Self, ClientError> {
        let outcome = match trace.outcome() {
            v1::TraceOutcome::New => TraceOutcome::New,
            v1::TraceOutcome::Waits => TraceOutcome::Waits,
            v1::TraceOutcome::Due => TraceOutcome::Due,
            v1::TraceOutcome::Succeeded => TraceOutcome::Succeeded,
            v1::TraceOutcome::Dead => TraceOutcome::Dead,
            v1::TraceOutcome::Discarded => TraceOutcome::Discarded,
            v1::TraceOutcome::Redriven => TraceOutcome::Redriven,
            v1::TraceOutcome::Unknown | v1::TraceOutcome::Unspecified => TraceOutcome::Unknown,
        };
        let steps = trace.steps.into_iter().map(TraceStep::try_from);
        Ok(Self {
            pipeline: trace.pipeline,
            origin: position(trace.origin, "origin")?,
            origin_timestamp: time(trace.origin_timestamp),
            steps: steps.collect::<Result<_, _>>()?,
            is_truncated: trace.truncated,
            outcome,
            next_due: time(trace.next_due),
            gaps: trace.gaps,
            searched_since: time(trace.searched_since),
        })
    }
}

impl TryFrom<v1::TraceStep> for TraceStep {
    type Error = ClientError;

    fn try_from(step: v1::TraceStep) -> Result<Self, ClientError> {
        let event = match step.event() {
            v1::TraceEvent::Unspecified => TraceEvent::Other,
            v1::TraceEvent::Entered => TraceEvent::Entered,
            v1::TraceEvent::Waits => TraceEvent::Waits,
            v1::TraceEvent::Released => TraceEvent::Released,
            v1::TraceEvent::Succeeded => TraceEvent::Succeeded,
            v1::TraceEvent::Died => TraceEvent::Died,
            v1::TraceEvent::Redriven => TraceEvent::Redriven,
            v1::TraceEvent::Discarded => TraceEvent::Discarded,
            v1::TraceEvent::Restored => TraceEvent::Restored,
        };
        let wait = step.wait.as_ref().and_then(from_duration);
        Ok(Self {
            event,
            time: time(step.time),
            position: position(step.position, "position")?,
            place: step.place,
            attempts: step.attempts,
            error_class: text(step.error_class),
            error_code: text(step.error_code),
            error_message: text(step.error_message),
            failed_at: time(step.failed_at),
            due_at: time(step.due_at),
            wait: wait.map(Duration::from),
            redrives: step.redrives,
            by: text(step.by),
            why: text(step.why),
            redrive_id: text(step.redrive_id),
            destination: text(step.destination),
            edited: step.edited,
        })
    }
}

fn position(position: Option<v1::Position>, field: &'static str) -> Result<Position, ClientError> {
    let position = position.ok_or(ClientError::InvalidResponse(field))?;
    Ok(Position {
        topic: position.topic.into(),
        partition: position.partition,
        offset: position.offset,
    })
}

fn counts(counts: Option<v1::WaitingCounts>) -> Result<WaitingCounts, ClientError> {
    let counts = counts.ok_or(ClientError::InvalidResponse("counts"))?;
    let codes = counts.codes.into_iter();
    Ok(WaitingCounts {
        records: counts.records,
        overdue: counts.overdue,
        malformed: counts.malformed,
        average_attempts: counts.average_attempts,
        max_attempts: counts.max_attempts,
        next_due: time(counts.next_due),
        oldest: time(counts.oldest),
        codes: codes.map(|code| (code.error_code, code.records)).collect(),
        other_codes: counts.other_codes,
    })
}

fn coverage(coverage: Option<v1::WaitingCoverage>) -> Result<WaitingCoverage, ClientError> {
    let coverage = coverage.ok_or(ClientError::InvalidResponse("coverage"))?;
    Ok(WaitingCoverage {
        as_of: time(coverage.as_of),
        is_scheduler_truncated: coverage.scheduler_truncated,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_this_client_does_not_know_is_shown_as_such() {
        let step = v1::TraceStep {
            event: 77,
            position: Some(v1::Position::default()),
            ..v1::TraceStep::default()
        };
        assert_eq!(
            TraceStep::try_from(step.clone()).unwrap().event,
            TraceEvent::Other
        );
        let without = v1::TraceStep {
            position: None,
            ..step
        };
        let error = TraceStep::try_from(without).unwrap_err();
        assert!(
            matches!(error, ClientError::InvalidResponse("position")),
            "{error}"
        );
    }

    #[test]
    fn an_outcome_that_this_client_does_not_know_is_unknown() {
        let trace = v1::PipelineTrace {
            outcome: 77,
            origin: Some(v1::Position::default()),
            ..v1::PipelineTrace::default()
        };
        assert_eq!(
            RecordTrace::try_from(trace).unwrap().outcome,
            TraceOutcome::Unknown
        );
    }
}
