//! The audit topic: who has changed or seen what.
//!
//! An entry of a change is written in the transaction of the change: [`AuditLog::record`] makes the record,
//! and the writer of the change writes it too. An entry of a disclosure, or of a command for the scheduler,
//! is written by an [`AuditWriter`], and acknowledged, before the answer or the command is sent.

use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::{Headers, Output, Timestamp};
use redeliver_kafka::producer::ProduceError;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::{Message as _, v1};
use redeliver_runtime::Config;

use crate::Host;
use crate::identity::CallerName;
use crate::record_writer::RecordWriter;
pub use crate::record_writer::{NotWritten, blocking};

/// The maximum number of ids in an entry. Others are recorded as ranges.
pub const MAX_IDS: usize = 100;

/// Where the entries of a process are written. Cheap to clone.
#[derive(Clone, Debug)]
pub struct AuditLog {
    topic: Arc<str>,
    service: &'static str,
    instance: Arc<str>,
}

/// The audited action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A control was paused.
    PauseControl,
    /// A control runs again.
    ResumeControl,
    /// The rate of a control was changed.
    SetControlRate,
    /// What waits in a tier is released.
    ReleaseTier,
    /// A control is as the configuration says.
    ResetControl,
    /// A group was resolved.
    ResolveGroup,
    /// A group was muted.
    MuteGroup,
    /// A group was opened again.
    ReopenGroup,
    /// The note of a group was changed.
    AnnotateGroup,
    /// A recurring schedule was created.
    CreateSchedule,
    /// Its definition was replaced.
    UpdateSchedule,
    /// It was paused.
    PauseSchedule,
    /// It was resumed.
    ResumeSchedule,
    /// An additional job of it was created.
    TriggerSchedule,
    /// It was deleted.
    DeleteSchedule,
    /// Jobs were cancelled.
    CancelJobs,
    /// Jobs were given another due time.
    RescheduleJobs,
    /// A redrive, discard or restore was planned.
    PlanRedrive,
    /// It was started.
    StartRedrive,
    /// It was paused.
    PauseRedrive,
    /// It was resumed.
    ResumeRedrive,
    /// It was cancelled.
    CancelRedrive,
    /// Its rate was changed.
    SetRedriveRate,
    /// Dead letters were redriven.
    RedriveDeadLetters,
    /// Dead letters were discarded.
    DiscardDeadLetters,
    /// Discarded dead letters are open again.
    RestoreDeadLetters,
    /// An action on waiting records was requested.
    ActOnWaiting,
    /// Waiting records were retried before they were due.
    RetryWaiting,
    /// Waiting records became dead letters.
    BuryWaiting,
    /// Waiting records were edited.
    EditWaiting,
    /// A waiting record was sent to a caller.
    GetWaitingRecord,
    /// A dead letter was sent to a caller.
    GetDeadLetter,
    /// A page of dead letters was sent to a caller.
    ListDeadLetters,
    /// Dead letters were sent to a watcher.
    WatchDeadLetters,
    /// The payload of a dead letter was sent to a caller.
    ReadPayload,
}

/// An entry.
#[derive(Clone, Debug)]
pub struct AuditEntry {
    /// The caller.
    pub by: CallerName,
    /// The action.
    pub action: Action,
    /// The target.
    pub target: String,
    /// Why, in the words of the caller.
    pub reason: String,
    /// The change.
    pub details: String,
    /// The filter of a list or watch, without the search texts for payloads.
    pub filter: String,
    /// How many payloads were sent, or dead letters or jobs changed.
    pub count: u64,
    /// The ids of the first dead letters, or of the jobs.
    pub ids: Vec<String>,
    /// Where the others are.
    pub ranges: Vec<v1::DisclosedRange>,
    /// Whether parts of payloads were masked.
    pub is_masked: bool,
    /// Different for each entry.
    pub id: u128,
}

impl Action {
    /// As it is recorded.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::PauseControl => "control.pause",
            Self::ResumeControl => "control.resume",
            Self::SetControlRate => "control.rate",
            Self::ReleaseTier => "control.release",
            Self::ResetControl => "control.reset",
            Self::ResolveGroup => "groups.resolve",
            Self::MuteGroup => "groups.mute",
            Self::ReopenGroup => "groups.reopen",
            Self::AnnotateGroup => "groups.annotate",
            Self::CreateSchedule => "schedules.create",
            Self::UpdateSchedule => "schedules.update",
            Self::PauseSchedule => "schedules.pause",
            Self::ResumeSchedule => "schedules.resume",
            Self::TriggerSchedule => "schedules.trigger",
            Self::DeleteSchedule => "schedules.delete",
            Self::CancelJobs => "jobs.cancel",
            Self::RescheduleJobs => "jobs.reschedule",
            Self::PlanRedrive => "redrives.plan",
            Self::StartRedrive => "redrives.start",
            Self::PauseRedrive => "redrives.pause",
            Self::ResumeRedrive => "redrives.resume",
            Self::CancelRedrive => "redrives.cancel",
            Self::SetRedriveRate => "redrives.rate",
            Self::RedriveDeadLetters => "dead-letters.redrive",
            Self::DiscardDeadLetters => "dead-letters.discard",
            Self::RestoreDeadLetters => "dead-letters.restore",
            Self::ActOnWaiting => "waiting.act",
            Self::RetryWaiting => "waiting.retry",
            Self::BuryWaiting => "waiting.dead",
            Self::EditWaiting => "waiting.edit",
            Self::GetWaitingRecord => "waiting.get",
            Self::GetDeadLetter => "dead-letters.get",
            Self::ListDeadLetters => "dead-letters.list",
            Self::WatchDeadLetters => "dead-letters.watch",
            Self::ReadPayload => "dead-letters.payload",
        }
    }
}

impl AuditEntry {
    /// An entry without what not all entries have.
    #[must_use]
    pub fn new(by: CallerName, action: Action) -> Self {
        Self {
            by,
            action,
            target: String::new(),
            reason: String::new(),
            details: String::new(),
            filter: String::new(),
            count: 0,
            ids: Vec::new(),
            ranges: Vec::new(),
            is_masked: false,
            id: fastrand::u128(..),
        }
    }
}

impl AuditLog {
    /// The audit log of an installation, for a service of this process.
    #[must_use]
    pub fn new(config: &Config, service: &'static str) -> Self {
        Self {
            topic: config.audit_topic().into(),
            service,
            instance: config.instance.as_str().into(),
        }
    }

    /// The topic.
    #[must_use]
    pub fn topic(&self) -> &Arc<str> {
        &self.topic
    }

    /// The record of an entry about a decision at this time.
    #[must_use]
    pub fn record(&self, entry: AuditEntry, time: Timestamp) -> Output {
        let entry = v1::AuditEntry {
            time: Some(to_timestamp(time)),
            by: entry.by.to_string(),
            action: entry.action.as_str().to_owned(),
            target: entry.target,
            reason: entry.reason,
            details: entry.details,
            filter: entry.filter,
            count: entry.count,
            ids: entry.ids,
            ranges: entry.ranges,
            masked: entry.is_masked,
            service: self.service.to_owned(),
            instance: self.instance.to_string(),
            id: format!("{:032x}", entry.id),
        };
        Output {
            topic: self.topic.clone(),
            partition: Some(0),
            key: None,
            value: Some(Bytes::from(entry.encode_to_vec())),
            headers: Headers::new(),
        }
    }
}

/// Writes entries that are not part of a transaction. Cheap to clone.
#[derive(Clone)]
pub struct AuditWriter {
    log: AuditLog,
    writer: RecordWriter,
}

impl AuditWriter {
    /// A writer for a service of this process.
    ///
    /// # Errors
    /// When the producer cannot be created.
    pub fn new(host: &Host, service: &'static str) -> Result<Self, ProduceError> {
        let log = AuditLog::new(&host.config, service);
        let writer = RecordWriter::new(&host.kafka, log.topic().clone())?;
        Ok(Self { log, writer })
    }

    /// Writes an entry about a decision at this time, and waits until it is acknowledged.
    ///
    /// # Errors
    /// When the topic does not exist, or there is no acknowledgement within 10 seconds.
    pub async fn write(&self, entry: AuditEntry, time: Timestamp) -> Result<(), NotWritten> {
        self.writer.write(&[self.log.record(entry, time)]).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_says_who_did_what() {
        let config = Config::from_yaml("{ instance: s-1, kafka: { id_prefix: staging- } }").unwrap();
        let log = AuditLog::new(&config, "scheduler");
        let by = CallerName::recorded("token:bob");
        let entry = AuditEntry {
            target: "app/sms".to_owned(),
            reason: "outage".to_owned(),
            ids: vec!["a-dlq/0/1".to_owned()],
            id: 7,
            ..AuditEntry::new(by, Action::PauseControl)
        };
        let record = log.record(entry, Timestamp::from_millis(1_000));
        assert_eq!(
            (&*record.topic, record.partition),
            ("staging-redeliver.audit", Some(0))
        );
        let written = v1::AuditEntry::decode(record.value.unwrap()).unwrap();
        assert_eq!(written.time.unwrap().seconds, 1);
        assert_eq!(
            (&*written.by, &*written.action, &*written.target, &*written.reason),
            ("token:bob", "control.pause", "app/sms", "outage")
        );
        assert_eq!((&*written.service, &*written.instance), ("scheduler", "s-1"));
        assert_eq!(
            (written.ids, written.id.len()),
            (vec!["a-dlq/0/1".to_owned()], 32)
        );
    }
}
