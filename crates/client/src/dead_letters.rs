//! A client for the gRPC API of the inspector.

use bytes::Bytes;
use redeliver_proto::v1::dead_letter_service_client::DeadLetterServiceClient;
use redeliver_proto::v1::watch_dead_letters_response::Event;
use redeliver_proto::v1::{
    AnnotateGroupRequest, ChangeGroupRequest, DeadLetter, DeadLetterStats, GetDeadLetterRequest,
    GetDeadLetterStatsRequest, GetGroupRequest, Group, ListDeadLettersRequest, ListDeadLettersResponse,
    ListGroupsRequest, ListGroupsResponse, MuteGroupRequest, ReadPayloadRequest, ReadPayloadResponse,
    WatchDeadLettersRequest, WatchDeadLettersResponse,
};

use crate::endpoint::client;
use crate::error::{ClientError, found};
use crate::stream::{HEARTBEAT_TIMEOUT, Messages};

client! {
    /// Lists, reads and watches dead letters. Clones share one connection.
    DeadLetterClient(DeadLetterServiceClient);

    /// Lists a page of dead letters.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`](crate::Code::InvalidArgument) if the filter is invalid; the message contains the position of the error.
    list = list_dead_letters(ListDeadLettersRequest) -> ListDeadLettersResponse;

    /// Counts dead letters by the fields in [`GetDeadLetterStatsRequest::by`]. An inspector that does not know them answers without
    /// [`counts`](DeadLetterStats::counts).
    ///
    /// # Errors
    /// Like [`DeadLetterClient::list`].
    count = get_dead_letter_stats(GetDeadLetterStatsRequest) -> DeadLetterStats;

    /// Lists a page of groups of dead letters that fail for the same reason.
    ///
    /// # Errors
    /// Like [`DeadLetterClient::list`].
    groups = list_groups(ListGroupsRequest) -> ListGroupsResponse;

    /// Says that the reason of a group is gone, for everybody. A dead letter that is written later makes it
    /// [regressed](crate::messages::GroupState::Regressed). When this returns, the change is durable.
    ///
    /// # Errors
    /// [`Code::NotFound`](crate::Code::NotFound) if the group has no dead letters, [`Code::Aborted`](crate::Code::Aborted) if it has another revision than
    /// the expected one, [`Code::PermissionDenied`](crate::Code::PermissionDenied) unless the caller may change it. After
    /// [`Code::Unknown`](crate::Code::Unknown) and errors of the connection, the change may have taken effect: repeat it with
    /// [`ChangeGroupRequest::expected_revision`], because without it, it would also resolve what has regressed since.
    resolve_group = resolve_group(ChangeGroupRequest) -> Group;

    /// Mutes a group: it is in no alert about groups until this time; `None`: indefinitely. The expiry is
    /// silent.
    ///
    /// # Errors
    /// As for [`DeadLetterClient::resolve_group`].
    mute_group = mute_group(MuteGroupRequest) -> Group;

    /// Sets the state of a group back to open. Callers with the scopes for all topics can also reset a group that has no dead letters any more, and
    /// remove its note.
    ///
    /// # Errors
    /// As for [`DeadLetterClient::resolve_group`].
    reopen_group = reopen_group(ChangeGroupRequest) -> Group;

    /// Sets the note of a group, at most 2000 bytes; empty: there is none. The expected revision is that of a [`ChangeGroupRequest`].
    ///
    /// # Errors
    /// As for [`DeadLetterClient::resolve_group`].
    annotate_group = annotate_group(AnnotateGroupRequest) -> Group;
}

impl DeadLetterClient {
    /// Gets a dead letter with value and headers; `None` if it does not exist, for example because retention removed
    /// it.
    ///
    /// # Errors
    /// If the inspector is unavailable, or [`Code::Unavailable`](crate::Code::Unavailable) if it does not know whether the dead letter exists.
    pub async fn get(&self, id: &str) -> Result<Option<DeadLetter>, ClientError> {
        let request = GetDeadLetterRequest { id: id.to_owned() };
        let answer = self.service.clone().get_dead_letter(request).await;
        found(self.answer(answer).await)
    }

    /// Gets a group; `None` if it has no dead letters.
    ///
    /// # Errors
    /// If the id is invalid, the inspector is unavailable, or [`Code::Unavailable`](crate::Code::Unavailable) if it does not know whether the group has
    /// dead letters.
    pub async fn group(&self, id: &str) -> Result<Option<Group>, ClientError> {
        let request = GetGroupRequest { id: id.to_owned() };
        found(self.answer(self.service.clone().get_group(request).await).await)
    }

    /// Reads the whole value of a dead letter in chunks.
    ///
    /// # Errors
    /// [`Code::NotFound`](crate::Code::NotFound) if the dead letter does not exist.
    pub async fn payload(&self, id: &str) -> Result<Payload, ClientError> {
        let request = ReadPayloadRequest { id: id.to_owned() };
        let answer = self.service.clone().read_payload(request).await;
        Ok(Payload {
            chunks: Messages::of(&self.url, answer, HEARTBEAT_TIMEOUT).await?,
            masked_paths: Vec::new(),
        })
    }

    /// Counts the dead letters that match a filter, by topic. The answer has all pages.
    ///
    /// # Errors
    /// Like [`DeadLetterClient::list`].
    pub async fn stats(&self, filter: &str) -> Result<DeadLetterStats, ClientError> {
        let mut stats = self.page_of_stats(filter, String::new()).await?;
        while !stats.next_page_token.is_empty() {
            let page = self.page_of_stats(filter, stats.next_page_token).await?;
            stats.topics.extend(page.topics);
            if stats
                .completeness
                .as_ref()
                .is_some_and(|completeness| completeness.complete)
            {
                stats.completeness = page.completeness;
            }
            stats.next_page_token = page.next_page_token;
        }
        Ok(stats)
    }

    async fn page_of_stats(&self, filter: &str, page_token: String) -> Result<DeadLetterStats, ClientError> {
        let request = GetDeadLetterStatsRequest {
            filter: filter.to_owned(),
            page_token,
            ..GetDeadLetterStatsRequest::default()
        };
        self.count(request).await
    }

    /// Watches dead letters: first the existing ones, then each new one.
    ///
    /// # Errors
    /// Like [`DeadLetterClient::list`], and if the resume token is not valid any more.
    pub async fn watch(&self, request: WatchDeadLettersRequest) -> Result<Watch, ClientError> {
        let resume_token = request.resume_token.clone();
        let answer = self.service.clone().watch_dead_letters(request).await;
        Ok(Watch {
            events: Messages::of(&self.url, answer, HEARTBEAT_TIMEOUT).await?,
            resume_token,
        })
    }
}

/// The value of a dead letter, read in chunks.
#[derive(Debug)]
pub struct Payload {
    chunks: Messages<ReadPayloadResponse>,
    masked_paths: Vec<String>,
}

impl Payload {
    /// The next chunk; `None` at the end.
    ///
    /// # Errors
    /// If the connection is lost, or nothing arrives for 45 seconds.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        let message = self.chunks.next().await?;
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
    events: Messages<WatchDeadLettersResponse>,
    resume_token: String,
}

impl Watch {
    /// The next event.
    ///
    /// # Errors
    /// If the connection is lost, the inspector ends the stream, or no event and no heartbeat arrives for 45 seconds.
    pub async fn next(&mut self) -> Result<Event, ClientError> {
        loop {
            let message = self.events.next().await?.ok_or(ClientError::Ended)?;
            if !message.resume_token.is_empty() {
                self.resume_token = message.resume_token;
            }
            // Without an event: one that this client does not know.
            if let Some(event) = message.event {
                return Ok(event);
            }
        }
    }

    /// The token to continue after the last received event.
    #[must_use]
    pub fn resume_token(&self) -> &str {
        &self.resume_token
    }
}
