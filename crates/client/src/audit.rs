//! A client for the audit log, which the inspector serves over gRPC.

use redeliver_core::{Position, Timestamp};
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::v1;
use redeliver_proto::v1::audit_service_client::AuditServiceClient;

use crate::endpoint::{Connection, Endpoint, MAX_RESPONSE};
use crate::error::{self, ClientError};
use crate::jobs::{text, time};

/// Lists who has changed or seen what. Clones share one connection.
#[derive(Clone, Debug)]
pub struct AuditClient {
    service: AuditServiceClient<Connection>,
    url: String,
}

/// A request for a page of entries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListAuditEntries {
    /// Only entries of this time or later; `None`: of the last 24 hours.
    pub from: Option<Timestamp>,
    /// Only entries before this time; `None`: up to the newest one.
    pub until: Option<Timestamp>,
    /// Only entries by this caller; empty: by all.
    pub by: String,
    /// Only entries with this action; `control.*` matches all that begin with `control.`; empty: all.
    pub action: String,
    /// Only entries with this target; empty: all.
    pub target: String,
    /// The maximum number of entries per page, at most 1000; 0 means 50.
    pub page_size: u16,
    /// [`AuditPage::next_page_token`] of the previous page. Empty: the first page.
    pub page_token: String,
}

/// A page of entries, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditPage {
    /// The entries of the page. There can be fewer than asked for, or none, although there are more pages.
    pub entries: Vec<AuditEntry>,
    /// The token for the next page; `None` on the last page.
    pub next_page_token: Option<String>,
    /// Whether later entries are missing on the last page, because a transaction of a writer is open.
    pub is_incomplete: bool,
}

/// Who has changed or seen what. Of an entry that the inspector cannot read, only the position is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditEntry {
    /// The position in the audit topic.
    pub position: Option<Position>,
    /// Whether the inspector could read it.
    pub is_readable: bool,
    /// When it was decided.
    pub time: Option<Timestamp>,
    /// The caller, with what it was identified by, such as `token:NAME`.
    pub by: String,
    /// What was done, such as `control.pause` or `dead-letters.payload`.
    pub action: String,
    /// What it was done to, such as `app/sms` or the id of a dead letter.
    pub target: Option<String>,
    /// Why, in the words of the caller.
    pub why: Option<String>,
    /// What was changed to what.
    pub details: Option<String>,
    /// The filter of a list or watch. `<value>` stands for what was searched for in payloads and messages.
    pub filter: Option<String>,
    /// How many payloads were sent.
    pub count: u64,
    /// The ids of the first dead letters whose payloads were sent, at most 100.
    pub ids: Vec<String>,
    /// Where the others are.
    pub ranges: Vec<DisclosedRange>,
    /// Whether keys, values or headers were masked, wholly or in part.
    pub is_masked: bool,
    /// The service that has decided it.
    pub service: String,
    /// Its instance.
    pub instance: String,
    /// Different for each entry.
    pub id: String,
}

/// Dead letters of one partition whose payloads were sent. Not all offsets in between need to be among them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DisclosedRange {
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: i32,
    /// The offset of the first one.
    pub first_offset: i64,
    /// The offset of the last one.
    pub last_offset: i64,
    /// How many there are.
    pub count: u64,
}

impl AuditClient {
    /// Connects to an inspector.
    ///
    /// # Errors
    /// If the endpoint is invalid or the inspector cannot be reached.
    pub async fn connect(endpoint: &Endpoint) -> Result<Self, ClientError> {
        let connection = endpoint.connect().await?;
        Ok(Self {
            service: AuditServiceClient::new(connection).max_decoding_message_size(MAX_RESPONSE),
            url: endpoint.url().to_owned(),
        })
    }

    /// Lists a page of entries.
    ///
    /// # Errors
    /// If the inspector is unavailable, or refuses the request.
    pub async fn list(&self, list: &ListAuditEntries) -> Result<AuditPage, ClientError> {
        let request = v1::ListAuditEntriesRequest {
            from: list.from.map(to_timestamp),
            until: list.until.map(to_timestamp),
            by: list.by.clone(),
            action: list.action.clone(),
            target: list.target.clone(),
            page_size: i32::from(list.page_size),
            page_token: list.page_token.clone(),
        };
        let answer = self.service.clone().list_audit_entries(request).await;
        let answer = error::answer(&self.url, answer).await?;
        let entries = answer.entries.into_iter().map(AuditEntry::from);
        Ok(AuditPage {
            entries: entries.collect(),
            next_page_token: text(answer.next_page_token),
            is_incomplete: answer.incomplete,
        })
    }
}

impl From<v1::ListedAuditEntry> for AuditEntry {
    fn from(listed: v1::ListedAuditEntry) -> Self {
        let is_readable = listed.entry.is_some();
        let entry = listed.entry.unwrap_or_default();
        Self {
            position: listed.position.map(|position| Position {
                topic: position.topic.into(),
                partition: position.partition,
                offset: position.offset,
            }),
            is_readable,
            time: time(entry.time),
            by: entry.by,
            action: entry.action,
            target: text(entry.target),
            why: text(entry.why),
            details: text(entry.details),
            filter: text(entry.filter),
            count: entry.count,
            ids: entry.ids,
            ranges: entry.ranges.into_iter().map(DisclosedRange::from).collect(),
            is_masked: entry.masked,
            service: entry.service,
            instance: entry.instance,
            id: entry.id,
        }
    }
}

impl From<v1::DisclosedRange> for DisclosedRange {
    fn from(range: v1::DisclosedRange) -> Self {
        Self {
            topic: range.topic,
            partition: range.partition,
            first_offset: range.first_offset,
            last_offset: range.last_offset,
            count: range.count,
        }
    }
}
