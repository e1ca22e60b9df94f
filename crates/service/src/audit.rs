//! The audit topic: who has changed or seen what.
//!
//! An entry of a change is written in the transaction of the change: [`AuditLog::record`] makes the record,
//! and the writer of the change writes it too. An entry of a disclosure, or of a command for the scheduler,
//! is written by an [`AuditWriter`], and acknowledged, before the answer or the command is sent.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use redeliver_core::error_chain::error_chain;
use redeliver_core::{Headers, Output, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::{ProduceError, Producer};
use redeliver_kafka::reader::{ReadError, partitions};
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::{Message as _, v1};
use redeliver_runtime::Config;

use crate::Host;
use crate::identity::CallerName;

/// The maximum number of ids in an entry. Others are recorded as ranges.
pub const MAX_IDS: usize = 100;

/// How long a caller waits until an entry is written.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// That the topic exists is checked again after this time.
const CHECKED_FOR: Duration = Duration::from_secs(5);

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
    producer: Producer,
    kafka: KafkaSettings,
    /// When the topic was found to exist.
    checked: Arc<Mutex<Option<Instant>>>,
}

/// Why an entry was not written, or may not have been.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NotWritten(String);

impl AuditWriter {
    /// A writer for a service of this process.
    ///
    /// # Errors
    /// When the producer cannot be created.
    pub fn new(host: &Host, service: &'static str) -> Result<Self, ProduceError> {
        Ok(Self {
            log: AuditLog::new(&host.config, service),
            producer: Producer::new(&host.kafka)?,
            kafka: host.kafka.clone(),
            checked: Arc::default(),
        })
    }

    /// Writes an entry about a decision at this time, and waits until it is acknowledged.
    ///
    /// # Errors
    /// When the topic does not exist, or there is no acknowledgement within 10 seconds.
    pub async fn write(&self, entry: AuditEntry, time: Timestamp) -> Result<(), NotWritten> {
        let record = self.log.record(entry, time);
        let writing = async {
            self.check_topic().await.map_err(|error| error_chain(&error))?;
            let written = self.producer.send(&record).await;
            written.map(drop).map_err(|error| error_chain(&error))
        };
        let written = tokio::time::timeout(WRITE_TIMEOUT, writing).await;
        let written = written
            .unwrap_or_else(|_| Err(format!("no acknowledgement within {} s", WRITE_TIMEOUT.as_secs())));
        written.map_err(NotWritten)
    }

    /// Checks that the topic exists. If not, a write could make the broker create it, with the settings of no audit topic.
    async fn check_topic(&self) -> Result<(), ReadError> {
        let checked = || self.checked.lock().unwrap_or_else(PoisonError::into_inner);
        if checked().is_some_and(|at| at.elapsed() < CHECKED_FOR) {
            return Ok(());
        }
        let (kafka, topic) = (self.kafka.clone(), self.log.topic().clone());
        if let Some(found) = blocking(move || partitions(&kafka, &topic)).await {
            found?;
            *checked() = Some(Instant::now());
        }
        Ok(())
    }
}

/// Runs what blocks; `None` if the runtime is shutting down.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => Some(result),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => None,
        },
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
