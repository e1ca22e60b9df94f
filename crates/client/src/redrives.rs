//! A client for redrives, discards and restores of dead letters, which the inspector serves over gRPC.

use std::time::Duration;

use bytes::Bytes;
use redeliver_core::content::ContentHash;
use redeliver_core::{Headers, HumanDuration, Position, Timestamp};
use redeliver_proto::convert::{to_duration, to_headers, to_timestamp};
use redeliver_proto::v1;
use redeliver_proto::v1::redrive_service_client::RedriveServiceClient;
use tonic::{Response, Status};

use crate::dead_letters::position;
use crate::endpoint::{Connection, Endpoint, MAX_RESPONSE};
use crate::error::{self, ClientError};
use crate::jobs::{text, time};

/// Plans, starts and watches redrives. Clones share one connection.
#[derive(Clone, Debug)]
pub struct RedriveClient {
    service: RedriveServiceClient<Connection>,
    url: String,
}

/// What a job does with its dead letters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RedriveKind {
    /// Writes their records again.
    #[default]
    Redrive,
    /// Discards them, until they are restored.
    Discard,
    /// Opens discarded ones again.
    Restore,
}

/// The state of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RedriveState {
    /// Not started.
    Planned,
    /// Started.
    Running,
    /// Paused by a caller or by the brake.
    Paused,
    /// All dead letters were done.
    Succeeded,
    /// All were tried, and some were not done.
    PartiallySucceeded,
    /// Cancelled before all were tried.
    Cancelled,
    /// All were tried, and none was done.
    Failed,
}

/// Which dead letters a plan takes, of those in the state that its kind needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RedriveSelection {
    /// Those that match a filter.
    Filter(String),
    /// All.
    All,
    /// Those with these ids, at most 10,000.
    Ids(Vec<String>),
    /// Those with these ids that still have these contents, at most 10,000. See [`ExportedDeadLetter::content_hash`](crate::export::ExportedDeadLetter::content_hash).
    Contents(Vec<(String, ContentHash)>),
    /// Those of a group.
    Group(String),
    /// Those of another job that were not done.
    RetryOf(String),
}

/// A plan to make.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanRedrive {
    /// What to do.
    pub kind: RedriveKind,
    /// With which dead letters.
    pub selection: RedriveSelection,
    /// The topic to write to; empty: that of each dead letter.
    pub destination: String,
    /// Why, for others. At most 1000 bytes.
    pub why: String,
    /// Different for each plan, so that a repeated call returns the same job; empty: each call plans another one.
    pub request_id: String,
    /// Dead letters per second; 0: as fast as possible.
    pub rate_per_second: u32,
    /// Whether to begin with all instead of a few.
    pub all_at_once: bool,
    /// The brake acts when a larger share has come back, from 0 to 1. `None`: the default of the inspector.
    pub max_returned_share: Option<f64>,
    /// How long to wait for what comes back, after each of the first batches and at the end. `None`: until the retries of the pipelines are over.
    pub observe: Option<Duration>,
    /// Whether to redrive also what has come back often.
    pub force: bool,
}

/// A redrive of one dead letter with other contents, to plan. What is `None` stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanEdit {
    /// The id of the dead letter.
    pub id: String,
    /// Its [content hash](crate::FoundDeadLetter::content_hash), so that nobody edits what he has not seen.
    pub content_hash: Bytes,
    /// The new value; `Some(None)`: null.
    pub value: Option<Option<Bytes>>,
    /// The new key; `Some(None)`: null.
    pub key: Option<Option<Bytes>>,
    /// Headers to add at the end. They replace all headers with their names.
    pub set_headers: Headers,
    /// The names of headers to remove.
    pub removed_headers: Vec<String>,
    /// The topic to write to; empty: that of the dead letter.
    pub destination: String,
    /// Why, for others. At most 1000 bytes.
    pub why: String,
    /// Different for each plan, so that a repeated call returns the same job; empty: each call plans another one.
    pub request_id: String,
    /// How long to wait for what comes back. `None`: until the retries of the pipeline are over.
    pub observe: Option<Duration>,
    /// Whether to redrive it also if it has come back often.
    pub force: bool,
}

/// A change of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RedriveChange {
    /// The id of the job.
    pub id: String,
    /// The revision that it must have; `None`: any.
    pub expected_revision: Option<u64>,
}

/// A job.
#[derive(Clone, Debug, PartialEq)]
pub struct Redrive {
    /// The id.
    pub id: String,
    /// The revision, which increases with each change by a caller.
    pub revision: u64,
    /// What it does.
    pub kind: RedriveKind,
    /// Its state.
    pub state: RedriveState,
    /// The filter of the plan.
    pub filter: Option<String>,
    /// Why.
    pub why: Option<String>,
    /// Who has planned it.
    pub created_by: String,
    /// When.
    pub created_at: Option<Timestamp>,
    /// Who has changed it last.
    pub changed_by: String,
    /// When.
    pub changed_at: Option<Timestamp>,
    /// The number of dead letters: the sum of the next four.
    pub total: u32,
    /// How many were done.
    pub done: u32,
    /// How many were refused by their destinations.
    pub failed: u32,
    /// How many were skipped.
    pub skipped: u32,
    /// How many were not tried yet.
    pub pending: u32,
    /// How many of the redriven ones have come back.
    pub returned: u32,
    /// The number of dead letters by topic.
    pub sources: Vec<(String, u32)>,
    /// The number of dead letters by destination.
    pub destinations: Vec<(String, u32)>,
    /// What matched but was not planned: the reason, how many, and the id of one of them.
    pub refused: Vec<(String, u32, String)>,
    /// Some ids.
    pub samples: Vec<String>,
    /// What to know before the start.
    pub warnings: Vec<String>,
    /// Dead letters per second; 0: as fast as possible.
    pub rate_per_second: u32,
    /// Why the brake has paused it.
    pub brake: Option<String>,
    /// Until when it waits, for its start or for what comes back.
    pub waits_until: Option<Timestamp>,
    /// The job whose dead letters it tries again.
    pub retry_of: Option<String>,
    /// Why the last attempt did nothing, while the job runs. The inspector tries again.
    pub problem: Option<String>,
    /// Whether more dead letters match than a plan can have.
    pub has_more: bool,
    /// What is edited: `value`, `key` and `headers`; empty: nothing.
    pub edited: Vec<String>,
}

/// What became of a dead letter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedriveItem {
    /// Its id.
    pub id: String,
    /// `pending`, `done`, `failed`, or why it was skipped, such as `gone`.
    pub outcome: String,
    /// Where its record was written; `None` if nothing was, or if nobody knows.
    pub written: Option<Position>,
}

impl PlanRedrive {
    /// A plan without options.
    #[must_use]
    pub fn new(kind: RedriveKind, selection: RedriveSelection) -> Self {
        Self {
            kind,
            selection,
            destination: String::new(),
            why: String::new(),
            request_id: String::new(),
            rate_per_second: 0,
            all_at_once: false,
            max_returned_share: None,
            observe: None,
            force: false,
        }
    }
}

impl RedriveKind {
    /// The name, in lower case.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Redrive => "redrive",
            Self::Discard => "discard",
            Self::Restore => "restore",
        }
    }
}

impl RedriveState {
    /// The name, in lower case.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Planned => "planned",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Succeeded => "succeeded",
            Self::PartiallySucceeded => "partially succeeded",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        }
    }

    /// Whether nothing happens any more.
    #[must_use]
    pub fn has_ended(self) -> bool {
        !matches!(self, Self::Planned | Self::Running | Self::Paused)
    }
}

impl RedriveClient {
    /// Connects to an inspector.
    ///
    /// # Errors
    /// If the endpoint is invalid or the inspector cannot be reached.
    pub async fn connect(endpoint: &Endpoint) -> Result<Self, ClientError> {
        let connection = endpoint.connect().await?;
        Ok(Self {
            service: RedriveServiceClient::new(connection).max_decoding_message_size(MAX_RESPONSE),
            url: endpoint.url().to_owned(),
        })
    }

    /// Plans a job. Nothing is done before it is started.
    ///
    /// # Errors
    /// [`Code::NotFound`](crate::Code::NotFound) if no dead letter can be taken, and if the caller lacks a permission or the request is invalid.
    pub async fn plan(&self, plan: &PlanRedrive) -> Result<Redrive, ClientError> {
        let kind = match plan.kind {
            RedriveKind::Redrive => v1::RedriveKind::Redrive,
            RedriveKind::Discard => v1::RedriveKind::Discard,
            RedriveKind::Restore => v1::RedriveKind::Restore,
        };
        let mut request = v1::PlanRedriveRequest {
            kind: kind.into(),
            destination: plan.destination.clone(),
            why: plan.why.clone(),
            request_id: plan.request_id.clone(),
            rate_per_second: plan.rate_per_second,
            all_at_once: plan.all_at_once,
            max_returned_share: plan.max_returned_share,
            observe: plan
                .observe
                .map(|observe| to_duration(HumanDuration::from(observe))),
            force: plan.force,
            ..v1::PlanRedriveRequest::default()
        };
        match &plan.selection {
            RedriveSelection::Filter(filter) => request.filter.clone_from(filter),
            RedriveSelection::All => request.all = true,
            RedriveSelection::Ids(ids) => request.ids.clone_from(ids),
            RedriveSelection::Contents(letters) => {
                for (id, content) in letters {
                    request.ids.push(id.clone());
                    request.content_hashes.push(Bytes::copy_from_slice(content));
                }
            }
            RedriveSelection::Group(group) => request.group.clone_from(group),
            RedriveSelection::RetryOf(id) => request.retry_of.clone_from(id),
        }
        let answer = self.service.clone().plan_redrive(request).await;
        self.redrive(answer).await
    }

    /// Plans a redrive of one dead letter with other contents. Nothing is done before it is started.
    ///
    /// # Errors
    /// [`Code::FailedPrecondition`](crate::Code::FailedPrecondition) if the inspector accepts no edits, [`Code::Aborted`](crate::Code::Aborted) if the dead
    /// letter has another content, [`Code::InvalidArgument`](crate::Code::InvalidArgument) for headers that cannot be set, and if the record would
    /// be too large. Otherwise as for [`RedriveClient::plan`].
    pub async fn plan_edit(&self, plan: &PlanEdit) -> Result<Redrive, ClientError> {
        let edited = |bytes: &Option<Option<Bytes>>| {
            let bytes = bytes.clone();
            bytes.map(|bytes| v1::EditedBytes { bytes })
        };
        let request = v1::PlanEditRequest {
            observe: plan
                .observe
                .map(|observe| to_duration(HumanDuration::from(observe))),
            id: plan.id.clone(),
            content_hash: plan.content_hash.clone(),
            edit: Some(v1::RedriveEdit {
                value: edited(&plan.value),
                key: edited(&plan.key),
                removed_headers: plan.removed_headers.clone(),
                set_headers: to_headers(&plan.set_headers),
            }),
            destination: plan.destination.clone(),
            why: plan.why.clone(),
            request_id: plan.request_id.clone(),
            force: plan.force,
        };
        let answer = self.service.clone().plan_edit(request).await;
        self.redrive(answer).await
    }

    /// Starts a planned job, now or at a time in the future. Until a delayed job begins, this gives it another time, or begins it now.
    ///
    /// # Errors
    /// [`Code::NotFound`](crate::Code::NotFound) if it does not exist, [`Code::Aborted`](crate::Code::Aborted) if it has another revision,
    /// [`Code::FailedPrecondition`](crate::Code::FailedPrecondition) if it is cancelled, or has begun and `at` is another time.
    pub async fn start(&self, change: &RedriveChange, at: Option<Timestamp>) -> Result<Redrive, ClientError> {
        let request = v1::ChangeRedriveRequest {
            start_at: at.map(to_timestamp),
            ..request(change)
        };
        self.redrive(self.service.clone().start_redrive(request).await)
            .await
    }

    /// Pauses a job.
    ///
    /// # Errors
    /// As for [`RedriveClient::start`]; [`Code::FailedPrecondition`](crate::Code::FailedPrecondition) if it does not run.
    pub async fn pause(&self, change: &RedriveChange) -> Result<Redrive, ClientError> {
        self.redrive(self.service.clone().pause_redrive(request(change)).await)
            .await
    }

    /// Continues a paused job.
    ///
    /// # Errors
    /// As for [`RedriveClient::pause`].
    pub async fn resume(&self, change: &RedriveChange) -> Result<Redrive, ClientError> {
        self.redrive(self.service.clone().resume_redrive(request(change)).await)
            .await
    }

    /// Cancels a job for good.
    ///
    /// # Errors
    /// As for [`RedriveClient::pause`].
    pub async fn cancel(&self, change: &RedriveChange) -> Result<Redrive, ClientError> {
        self.redrive(self.service.clone().cancel_redrive(request(change)).await)
            .await
    }

    /// Sets the rate of a job; 0: as fast as possible.
    ///
    /// # Errors
    /// As for [`RedriveClient::pause`].
    pub async fn set_rate(
        &self,
        change: &RedriveChange,
        rate_per_second: u32,
    ) -> Result<Redrive, ClientError> {
        let request = v1::SetRedriveRateRequest {
            id: change.id.clone(),
            expected_revision: change.expected_revision,
            rate_per_second,
        };
        self.redrive(self.service.clone().set_redrive_rate(request).await)
            .await
    }

    /// Gets a job.
    ///
    /// # Errors
    /// [`Code::NotFound`](crate::Code::NotFound) if it does not exist, or the caller does not see all of its topics.
    pub async fn get(&self, id: &str) -> Result<Redrive, ClientError> {
        let request = v1::GetRedriveRequest { id: id.to_owned() };
        self.redrive(self.service.clone().get_redrive(request).await)
            .await
    }

    /// Lists a page of jobs, newest first, with the token for the next page.
    ///
    /// # Errors
    /// If the inspector is unavailable, or the token is invalid.
    pub async fn list(
        &self,
        page_size: u16,
        page_token: &str,
    ) -> Result<(Vec<Redrive>, Option<String>), ClientError> {
        let request = v1::ListRedrivesRequest {
            page_size: page_size.into(),
            page_token: page_token.to_owned(),
        };
        let answer = self.service.clone().list_redrives(request).await;
        let answer = error::answer(&self.url, answer).await?;
        let redrives = answer.redrives.into_iter().map(Redrive::try_from);
        Ok((redrives.collect::<Result<_, _>>()?, text(answer.next_page_token)))
    }

    /// Lists a page of what became of each dead letter of a job, in the order of its plan, with the token for the next page.
    ///
    /// # Errors
    /// As for [`RedriveClient::get`].
    pub async fn items(
        &self,
        id: &str,
        page_size: u16,
        page_token: &str,
    ) -> Result<(Vec<RedriveItem>, Option<String>), ClientError> {
        let request = v1::ListRedriveItemsRequest {
            id: id.to_owned(),
            page_size: page_size.into(),
            page_token: page_token.to_owned(),
        };
        let answer = self.service.clone().list_redrive_items(request).await;
        let answer = error::answer(&self.url, answer).await?;
        let items = answer.items.into_iter().map(|item| RedriveItem {
            outcome: outcome(item.outcome()),
            id: item.id,
            written: item.written.map(position),
        });
        Ok((items.collect(), text(answer.next_page_token)))
    }

    async fn redrive(&self, answer: Result<Response<v1::Redrive>, Status>) -> Result<Redrive, ClientError> {
        Redrive::try_from(error::answer(&self.url, answer).await?)
    }
}

fn request(change: &RedriveChange) -> v1::ChangeRedriveRequest {
    v1::ChangeRedriveRequest {
        id: change.id.clone(),
        expected_revision: change.expected_revision,
        start_at: None,
    }
}

/// The name of an outcome, in lower case.
fn outcome(outcome: v1::RedriveOutcome) -> String {
    match outcome {
        v1::RedriveOutcome::Unspecified => "pending".to_owned(),
        other => other
            .as_str_name()
            .trim_start_matches("REDRIVE_OUTCOME_")
            .to_lowercase()
            .replace('_', "-"),
    }
}

impl TryFrom<v1::Redrive> for Redrive {
    type Error = ClientError;

    fn try_from(redrive: v1::Redrive) -> Result<Self, ClientError> {
        let kind = match redrive.kind() {
            v1::RedriveKind::Redrive => RedriveKind::Redrive,
            v1::RedriveKind::Discard => RedriveKind::Discard,
            v1::RedriveKind::Restore => RedriveKind::Restore,
            v1::RedriveKind::Unspecified => return Err(ClientError::InvalidResponse("kind")),
        };
        let state = match redrive.state() {
            v1::RedriveState::Planned => RedriveState::Planned,
            v1::RedriveState::Running => RedriveState::Running,
            v1::RedriveState::Paused => RedriveState::Paused,
            v1::RedriveState::Succeeded => RedriveState::Succeeded,
            v1::RedriveState::PartiallySucceeded => RedriveState::PartiallySucceeded,
            v1::RedriveState::Cancelled => RedriveState::Cancelled,
            v1::RedriveState::Failed => RedriveState::Failed,
            v1::RedriveState::Unspecified => return Err(ClientError::InvalidResponse("state")),
        };
        let counts = |counts: Vec<v1::RedriveCount>| {
            let counts = counts.into_iter();
            counts.map(|count| (count.topic, count.count)).collect()
        };
        let refused = redrive.refused.into_iter();
        let refused = refused.map(|refusal| (outcome(refusal.reason()), refusal.count, refusal.sample));
        Ok(Self {
            kind,
            state,
            refused: refused.collect(),
            id: redrive.id,
            revision: redrive.revision,
            filter: text(redrive.filter),
            why: text(redrive.why),
            created_by: redrive.created_by,
            created_at: time(redrive.created_at),
            changed_by: redrive.changed_by,
            changed_at: time(redrive.changed_at),
            total: redrive.total,
            done: redrive.done,
            failed: redrive.failed,
            skipped: redrive.skipped,
            pending: redrive.pending,
            returned: redrive.returned,
            sources: counts(redrive.sources),
            destinations: counts(redrive.destinations),
            samples: redrive.samples,
            warnings: redrive.warnings,
            rate_per_second: redrive.rate_per_second,
            brake: text(redrive.brake),
            waits_until: time(redrive.waits_until),
            retry_of: text(redrive.retry_of),
            problem: text(redrive.problem),
            has_more: redrive.has_more,
            edited: redrive.edited,
        })
    }
}
