//! A client for records that wait for their next attempt, and for the life of single records. The inspector serves both over gRPC.

use std::time::Duration;

use redeliver_core::JobId;
use redeliver_proto::v1::waiting_service_client::WaitingServiceClient;
use redeliver_proto::v1::{
    ActOnWaitingRecordsRequest, FindRecordsRequest, FoundRecords, GetJobOutcomesRequest,
    GetWaitingActionsRequest, GetWaitingRecordRequest, GetWaitingStatsRequest, JobOutcome, JobOutcomeState,
    ListWaitingRequest, NamedText, PipelineTrace, Position, ScanProgress, TraceRecordRequest, WaitingAction,
    WaitingActions, WaitingRecordContents, WaitingRecords, WaitingStats, find_records_response,
    get_waiting_stats_response, list_waiting_response, trace_record_response,
};
use tonic::{Code, Response, Status, Streaming};

use crate::endpoint::client;
use crate::error::ClientError;
use crate::stream::Messages;

/// A scan fails if it receives nothing for this long. At its start, the inspector asks Kafka for positions of groups, which can take 30
/// seconds; later, it reports its progress several times per second.
const STREAM_TIMEOUT: Duration = Duration::from_secs(60);

client! {
    /// Lists and counts waiting records, acts on single ones, and traces records. Clones share one connection.
    ///
    /// The inspector reads topics for each call, which can take minutes. The functions call `progress` meanwhile.
    WaitingClient(WaitingServiceClient);
}

/// It is unknown what has become of a job, for this reason.
#[must_use]
pub fn unknown_outcome(reason: String) -> JobOutcome {
    JobOutcome {
        state: JobOutcomeState::Unknown.into(),
        reason,
        ..JobOutcome::default()
    }
}

/// A header or a JSON field as people write it, such as `tenant=x` or `/order/id=4711`. `None`: it has no `=`, or nothing before it.
#[must_use]
pub fn named_text(text: &str) -> Option<NamedText> {
    let (name, value) = text.split_once('=').filter(|(name, _)| !name.is_empty())?;
    Some(NamedText {
        name: name.to_owned(),
        value: value.to_owned(),
    })
}

/// A message of a scan.
enum Message<T> {
    Progress(ScanProgress),
    Answer(T),
    /// One that this client does not know.
    Other,
}

impl WaitingClient {
    /// Lists waiting records, those that are due first.
    ///
    /// # Errors
    /// If the inspector or Kafka is unavailable, the request is refused, or the scan takes too long.
    pub async fn list(
        &self,
        request: ListWaitingRequest,
        progress: impl FnMut(ScanProgress),
    ) -> Result<WaitingRecords, ClientError> {
        use list_waiting_response::Event;
        let answer = self.service.clone().list_waiting(request).await;
        let answer = self.follow(answer, progress, |message| match message.event {
            Some(Event::Progress(progress)) => Message::Progress(progress),
            Some(Event::Records(records)) => Message::Answer(records),
            None => Message::Other,
        });
        answer.await
    }

    /// Counts waiting records.
    ///
    /// # Errors
    /// As [`WaitingClient::list`].
    pub async fn stats(
        &self,
        request: GetWaitingStatsRequest,
        progress: impl FnMut(ScanProgress),
    ) -> Result<WaitingStats, ClientError> {
        use get_waiting_stats_response::Event;
        let answer = self.service.clone().get_waiting_stats(request).await;
        let answer = self.follow(answer, progress, |message| match message.event {
            Some(Event::Progress(progress)) => Message::Progress(progress),
            Some(Event::Stats(stats)) => Message::Answer(stats),
            None => Message::Other,
        });
        answer.await
    }

    /// Follows a record through its pipelines.
    ///
    /// # Errors
    /// As [`WaitingClient::list`], or if the record is unknown.
    pub async fn trace(
        &self,
        request: TraceRecordRequest,
        progress: impl FnMut(ScanProgress),
    ) -> Result<Vec<PipelineTrace>, ClientError> {
        use trace_record_response::Event;
        let answer = self.service.clone().trace_record(request).await;
        let answer = self.follow(answer, progress, |message| match message.event {
            Some(Event::Progress(progress)) => Message::Progress(progress),
            Some(Event::Trace(trace)) => Message::Answer(trace.pipelines),
            None => Message::Other,
        });
        answer.await
    }

    /// Finds records by a key, a header or a JSON field.
    ///
    /// # Errors
    /// As [`WaitingClient::list`].
    pub async fn find(
        &self,
        request: FindRecordsRequest,
        progress: impl FnMut(ScanProgress),
    ) -> Result<FoundRecords, ClientError> {
        use find_records_response::Event;
        let answer = self.service.clone().find_records(request).await;
        let answer = self.follow(answer, progress, |message| match message.event {
            Some(Event::Progress(progress)) => Message::Progress(progress),
            Some(Event::Found(found)) => Message::Answer(found),
            None => Message::Other,
        });
        answer.await
    }

    /// What has become of a job since its dispatch, in each pipeline that reads its topic: with a topic, at least one outcome. Without a topic, in those in which
    /// it is known.
    ///
    /// # Errors
    /// If the inspector or Kafka is unavailable, or the request is refused.
    pub async fn job_outcomes(&self, id: JobId, topic: &str) -> Result<Vec<JobOutcome>, ClientError> {
        let request = GetJobOutcomesRequest {
            id: id.to_string(),
            topic: topic.to_owned(),
        };
        let answer = self.service.clone().get_job_outcomes(request).await;
        let mut outcomes = self.answer(answer).await?.outcomes;
        if outcomes.is_empty() && !topic.is_empty() {
            let reason = format!("no pipeline that you may see has the source {topic}");
            outcomes.push(unknown_outcome(reason));
        }
        Ok(outcomes)
    }

    /// A record that waits in a tier, with its contents.
    ///
    /// # Errors
    /// If it does not wait there any more, the inspector or Kafka is unavailable, or the request is refused.
    pub async fn record(&self, position: Position) -> Result<WaitingRecordContents, ClientError> {
        let request = GetWaitingRecordRequest {
            position: Some(position),
            ..GetWaitingRecordRequest::default()
        };
        self.get(request).await
    }

    /// A record that waits with the scheduler as this job, with its contents. The inspector reads the topics of the scheduler.
    ///
    /// # Errors
    /// As [`WaitingClient::record`].
    pub async fn long_wait(&self, job: JobId) -> Result<WaitingRecordContents, ClientError> {
        let request = GetWaitingRecordRequest {
            job_id: job.to_string(),
            ..GetWaitingRecordRequest::default()
        };
        self.get(request).await
    }

    async fn get(&self, request: GetWaitingRecordRequest) -> Result<WaitingRecordContents, ClientError> {
        let answer = self.service.clone().get_waiting_record(request).await;
        self.answer(answer).await
    }

    /// Asks tiers to act on records. Safe to repeat with the same request id.
    ///
    /// # Errors
    /// If the inspector or Kafka is unavailable, or the request is refused.
    pub async fn act(&self, request: ActOnWaitingRecordsRequest) -> Result<WaitingActions, ClientError> {
        let answer = self.service.clone().act_on_waiting_records(request).await;
        self.answer(answer).await
    }

    /// What has become of a request.
    ///
    /// # Errors
    /// If it is unknown, the inspector is unavailable, or the request is refused.
    pub async fn actions(&self, request_id: &str) -> Result<WaitingActions, ClientError> {
        let request = GetWaitingActionsRequest {
            request_id: request_id.to_owned(),
        };
        let answer = self.service.clone().get_waiting_actions(request).await;
        self.answer(answer).await
    }

    /// The record at a position, to be edited by a request with this id. `Err` in the result: it was edited by that request before, with this outcome.
    ///
    /// # Errors
    /// As [`WaitingClient::record`].
    pub async fn record_to_edit(
        &self,
        position: Position,
        request_id: &str,
    ) -> Result<Result<WaitingRecordContents, WaitingActions>, ClientError> {
        let error = match self.record(position.clone()).await {
            Ok(record) => return Ok(Ok(record)),
            Err(error) if error.code() == Some(Code::NotFound) && !request_id.is_empty() => error,
            Err(error) => return Err(error),
        };
        let is_edit = |actions: &WaitingActions| {
            let mut acted = actions.acted.iter();
            let is_same = acted.any(|acted| acted.position.as_ref() == Some(&position));
            actions.action() == WaitingAction::Edit && is_same
        };
        match self.actions(request_id).await {
            Ok(actions) if is_edit(&actions) => Ok(Err(actions)),
            Err(failed) if failed.code() != Some(Code::NotFound) => Err(failed),
            Ok(_) | Err(_) => Err(error),
        }
    }

    /// Waits for the answer of a scan.
    async fn follow<M, T>(
        &self,
        answer: Result<Response<Streaming<M>>, Status>,
        mut progress: impl FnMut(ScanProgress),
        read: impl Fn(M) -> Message<T>,
    ) -> Result<T, ClientError> {
        let mut messages = Messages::of(&self.url, answer, STREAM_TIMEOUT).await?;
        loop {
            match read(messages.next().await?.ok_or(ClientError::Ended)?) {
                Message::Progress(read) => progress(read),
                Message::Answer(answer) => return Ok(answer),
                Message::Other => {}
            }
        }
    }
}
