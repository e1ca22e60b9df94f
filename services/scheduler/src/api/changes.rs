//! Records who changes recurring schedules, jobs and long waits, and why, before the command is written: if the entry cannot be written, nothing is
//! changed.
//!
//! Whether a command takes effect is decided by its shard, later. An entry that another one about a refusal follows had no effect.

use std::convert::Infallible;
use std::sync::Arc;

use futures::future::join_all;
use prometheus_client::metrics::counter::Counter;
use redeliver_core::{Clock, Failure};
use redeliver_proto::v1::change_schedule::Change;
use redeliver_proto::{auth, v1};
use redeliver_service::audit::{Action as Recorded, AuditEntry, AuditWriter, MAX_IDS};
use redeliver_service::identity::Identity;
use tokio::sync::{mpsc, oneshot};

use super::call::Call;
use super::error::RequestError;
use super::schedules::view::ScheduleView;
use crate::request::{JobRef, WaitAction, WaitChange, When};

/// The maximum number of entries that wait to be written. Further callers wait for room.
pub(super) const ENTRIES: usize = 1_000;

/// The maximum size of a reason in bytes.
const MAX_REASON: usize = 1_000;

/// Records changes. Cheap to clone.
#[derive(Clone)]
pub(crate) struct ChangeLog {
    /// `scheduler.record_job_changes`.
    pub(super) records_jobs: bool,
    /// To [`run_entries`].
    pub(super) entries: mpsc::Sender<PendingEntry>,
}

/// An entry that is to be written.
pub(super) struct PendingEntry {
    entry: AuditEntry,
    /// Gets whether it was written.
    written: oneshot::Sender<bool>,
}

/// The reason in the header `redeliver-reason`.
///
/// # Errors
/// When it is not percent-encoded UTF-8, too long, or has control characters.
pub(crate) fn read_reason(encoded: &[u8]) -> Result<String, Failure> {
    let invalid = |problem: &str| {
        let problem = format!("`{}` {problem}", auth::REASON);
        Failure::permanent("request.reason", problem)
    };
    let reason = auth::decode_reason(encoded).ok_or_else(|| invalid("is not percent-encoded UTF-8"))?;
    if reason.len() > MAX_REASON || reason.contains(|c: char| c.is_control() && c != '\n') {
        return Err(invalid("must be a text of at most 1000 bytes"));
    }
    Ok(reason)
}

impl ChangeLog {
    /// Records a change of a schedule.
    pub(super) async fn record_schedule(
        &self,
        call: &Call,
        change: &v1::ChangeSchedule,
    ) -> Result<(), RequestError> {
        let (action, details) = described(change);
        let entry = entry(&call.caller, action, &change.id, details, &call.reason);
        self.record(entry).await
    }

    /// Records that a change of a schedule was refused, after it was recorded. Its caller gets the refusal in any case.
    pub(super) async fn record_refusal(&self, caller: &Identity, change: &v1::ChangeSchedule, refusal: &str) {
        let (action, _) = described(change);
        let refused = entry(caller, action, &change.id, format!("refused: {refusal}"), "");
        if self.record(refused).await.is_err() {
            tracing::warn!(
                schedule = change.id,
                refusal,
                "cannot record in the audit topic that the change was refused"
            );
        }
    }

    /// Records the cancellation of a job.
    pub(super) async fn record_cancellation(&self, call: &Call, job: &JobRef) -> Result<(), RequestError> {
        self.record_job(call, Recorded::CancelJobs, job, String::new())
            .await
    }

    /// Records the new due time of a job.
    pub(super) async fn record_new_time(
        &self,
        call: &Call,
        job: &JobRef,
        when: When,
    ) -> Result<(), RequestError> {
        let details = match when {
            When::At(time) => format!("due at {time}"),
            When::After(delay) => format!("due after {delay}"),
        };
        self.record_job(call, Recorded::RescheduleJobs, job, details)
            .await
    }

    /// Records what is done with a long wait.
    pub(super) async fn record_wait(
        &self,
        caller: &Identity,
        change: &WaitChange,
    ) -> Result<(), RequestError> {
        let entry = of_wait(caller, change, String::new(), &change.reason);
        self.record(AuditEntry { count: 1, ..entry }).await
    }

    /// Records that it was refused, after it was recorded.
    pub(super) async fn record_wait_refusal(&self, caller: &Identity, change: &WaitChange, refusal: &str) {
        let refused = of_wait(caller, change, format!("refused: {refusal}"), "");
        if self.record(refused).await.is_err() {
            tracing::warn!(job = %change.job, refusal, "cannot record in the audit topic that the change was refused");
        }
    }

    async fn record_job(
        &self,
        call: &Call,
        action: Recorded,
        job: &JobRef,
        details: String,
    ) -> Result<(), RequestError> {
        if !self.records_jobs {
            return Ok(());
        }
        let target = match job {
            JobRef::Id(id) => id.to_string(),
            JobRef::Key { app, key } => format!("{app}/{key}"),
        };
        let entry = entry(&call.caller, action, &target, details, &call.reason);
        self.record(AuditEntry { count: 1, ..entry }).await
    }

    async fn record(&self, entry: AuditEntry) -> Result<(), RequestError> {
        let (written, is_written) = oneshot::channel();
        // Both only fail when the process shuts down.
        let sent = self.entries.send(PendingEntry { entry, written }).await;
        match (sent, is_written.await) {
            (Ok(()), Ok(true)) => Ok(()),
            _ => Err(RequestError::NotRecorded),
        }
    }
}

fn entry(caller: &Identity, action: Recorded, target: &str, details: String, reason: &str) -> AuditEntry {
    AuditEntry {
        target: target.to_owned(),
        details,
        reason: reason.to_owned(),
        ..AuditEntry::new(caller.name().clone(), action)
    }
}

fn of_wait(caller: &Identity, change: &WaitChange, details: String, reason: &str) -> AuditEntry {
    let action = match change.action {
        WaitAction::Retry => Recorded::RetryWaiting,
        WaitAction::Dead => Recorded::BuryWaiting,
    };
    entry(caller, action, &change.job.to_string(), details, reason)
}

/// What is recorded of a change, without keys, data and the values of headers.
fn described(change: &v1::ChangeSchedule) -> (Recorded, String) {
    match &change.change {
        Some(Change::Create(create)) => (Recorded::CreateSchedule, definition(create.spec.as_ref())),
        Some(Change::Update(update)) => {
            let expected = update.expected_revision;
            let expected = expected.map(|revision| format!("expects revision {revision}, "));
            let definition = definition(update.spec.as_ref());
            let details = format!("{}{definition}", expected.unwrap_or_default());
            (Recorded::UpdateSchedule, details)
        }
        Some(Change::Pause(_)) => (Recorded::PauseSchedule, String::new()),
        Some(Change::Resume(resume)) if resume.catch_up => {
            (Recorded::ResumeSchedule, "catches up".to_owned())
        }
        Some(Change::Resume(_)) => (Recorded::ResumeSchedule, String::new()),
        Some(Change::Trigger(_)) => (Recorded::TriggerSchedule, String::new()),
        Some(Change::Delete(_)) | None => (Recorded::DeleteSchedule, String::new()),
    }
}

fn definition(spec: Option<&v1::ScheduleSpec>) -> String {
    let mut spec = spec.cloned().unwrap_or_default();
    let job = spec.job.get_or_insert_default();
    let (data, key) = (job.data.len(), job.key.take().map(|key| key.len()));
    let headers: Vec<String> = job.headers.drain(..).map(|header| header.name).collect();
    job.data.clear();
    let key = key.map_or_else(|| "no key".to_owned(), |bytes| format!("key of {bytes} bytes"));
    let headers = match headers.is_empty() {
        true => "no headers".to_owned(),
        false => format!("headers {}", headers.join(", ")),
    };
    let definition = ScheduleView::definition(spec);
    format!("data of {data} bytes, {key}, {headers}, {definition}")
}

/// Writes entries until there are none to come. Those that arrive while others are written are written together, and those of jobs
/// that differ only in the job are one entry.
pub(super) async fn run_entries(
    mut pending: mpsc::Receiver<PendingEntry>,
    writer: AuditWriter,
    clock: Arc<dyn Clock>,
    failures: Counter,
) -> Result<(), Infallible> {
    let mut arrived = Vec::new();
    while pending.recv_many(&mut arrived, ENTRIES).await > 0 {
        let writes = combined(arrived.drain(..))
            .into_iter()
            .map(async |(entry, callers)| {
                let written = writer.write(entry, clock.now()).await;
                if let Err(problem) = &written {
                    failures.inc();
                    tracing::error!(%problem, "cannot record a change in the audit topic; refusing it");
                }
                for caller in callers {
                    // It may be gone.
                    let _ = caller.send(written.is_ok());
                }
            });
        join_all(writes).await;
    }
    Ok(())
}

type Combined = (AuditEntry, Vec<oneshot::Sender<bool>>);

fn combined(pending: impl Iterator<Item = PendingEntry>) -> Vec<Combined> {
    let mut all: Vec<Combined> = Vec::new();
    for PendingEntry { mut entry, written } in pending {
        let mut open = all.iter_mut().filter(|(of, _)| of.ids.len() < MAX_IDS);
        match open.find(|(of, _)| is_combinable(of, &entry)) {
            Some((of, callers)) => {
                if of.ids.is_empty() {
                    of.ids.push(std::mem::take(&mut of.target));
                }
                of.ids.push(std::mem::take(&mut entry.target));
                of.count += entry.count;
                callers.push(written);
            }
            None => all.push((entry, vec![written])),
        }
    }
    all
}

fn is_combinable(a: &AuditEntry, b: &AuditEntry) -> bool {
    use Recorded::{BuryWaiting, CancelJobs, RescheduleJobs, RetryWaiting};
    matches!(a.action, CancelJobs | RescheduleJobs | RetryWaiting | BuryWaiting)
        && (&a.by, a.action, &a.details, &a.reason) == (&b.by, b.action, &b.details, &b.reason)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use redeliver_service::identity::CallerName;

    use super::*;

    fn of_job(by: &str, job: usize) -> PendingEntry {
        let by = CallerName::recorded(by);
        let (written, _) = oneshot::channel();
        PendingEntry {
            entry: AuditEntry {
                target: format!("job-{job}"),
                count: 1,
                ..AuditEntry::new(by, Recorded::CancelJobs)
            },
            written,
        }
    }

    #[test]
    fn combined_entries_name_each_job() {
        let others = [of_job("bob", 0), of_job("ann", 1)];
        let pending = others.into_iter().chain((0..250).map(|job| of_job("eve", job)));
        let all = combined(pending);
        let shown: Vec<_> = all
            .iter()
            .map(|(entry, callers)| (entry.by.as_str(), entry.count, entry.ids.len(), callers.len()))
            .collect();
        let expected = [
            ("bob", 1, 0, 1),
            ("ann", 1, 0, 1),
            ("eve", 100, 100, 100),
            ("eve", 100, 100, 100),
            ("eve", 50, 50, 50),
        ];
        assert_eq!(shown, expected);
        assert_eq!((&*all[0].0.target, &*all[2].0.target), ("job-0", ""));
        let named: Vec<&String> = all[2..].iter().flat_map(|(entry, _)| &entry.ids).collect();
        assert!(
            named
                .iter()
                .enumerate()
                .all(|(job, id)| **id == format!("job-{job}"))
        );
    }

    #[test]
    fn entries_of_schedules_are_not_combined() {
        let pending = || {
            let mut pending = of_job("bob", 0);
            pending.entry.action = Recorded::PauseSchedule;
            pending
        };
        assert_eq!(combined([pending(), pending()].into_iter()).len(), 2);
    }

    #[test]
    fn entry_describes_definition_without_contents() {
        let spec = v1::ScheduleSpec {
            timing: Some(v1::schedule_spec::Timing::Cron(v1::CronTiming {
                expression: "30 2 * * *".into(),
                zone: Some("Europe/London".into()),
                ..v1::CronTiming::default()
            })),
            job: Some(v1::JobTemplate {
                app: "sms".into(),
                data: Bytes::from_static(b"secret"),
                key: Some(Bytes::from_static(b"secret")),
                headers: vec![v1::Header {
                    name: "tenant".into(),
                    value: Some(Bytes::from_static(b"secret")),
                }],
                ..v1::JobTemplate::default()
            }),
            ..v1::ScheduleSpec::default()
        };
        let update = v1::ChangeSchedule {
            change: Some(Change::Update(v1::change_schedule::Update {
                spec: Some(spec),
                expected_revision: Some(3),
            })),
            ..v1::ChangeSchedule::default()
        };
        let expected = r#"expects revision 3, data of 6 bytes, key of 6 bytes, headers tenant, {"appName":"sms","cron":{"expression":"30 2 * * *","zone":"Europe/London"}}"#;
        assert_eq!(
            described(&update),
            (Recorded::UpdateSchedule, expected.to_owned())
        );
    }

    #[test]
    fn a_reason_is_text() {
        assert_eq!(read_reason(b"incident%2042").unwrap(), "incident 42");
        for invalid in [&b"%ff"[..], b"%07", &[b'a'; 1_001]] {
            assert_eq!(read_reason(invalid).unwrap_err().code, "request.reason");
        }
    }
}
