//! Changes of jobs by callers: plans, starts, pauses.

use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::{Headers, Output, Record, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::exclusive::{Decide, ExclusiveError};
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::{Message as _, v1};
use redeliver_service::audit::{Action, AuditLog, Entry as AuditEntry, MAX_IDS};
use redeliver_service::followed::{Contents as _, Followed, FollowedWriter, change_id};
use redeliver_service::identity::CallerName;

use super::edit::Edit;
use super::job::{self, InvalidValue, Item, Job, Wanted};
use super::jobs::{Entry, Jobs, Problem, job_key, plan_key};
use super::own_id;
use super::room::{self, New};

/// A request.
#[derive(Clone, Debug)]
pub struct ChangeRequest {
    /// What to change.
    pub change: Change,
    /// Who wants it.
    pub by: CallerName,
    /// When.
    pub at: Timestamp,
}

/// What to change.
#[derive(Clone, Debug)]
pub enum Change {
    /// Adds a job. Its revision, run and author are those of the change.
    Plan(Box<v1::RedriveRecord>, Arc<[Item]>),
    /// Adds a job that redrives a dead letter with an edit.
    Edit(Box<v1::RedriveRecord>, Item, Box<Edit>),
    /// Changes the job with this id, if it has the expected revision.
    Job(String, Option<u64>, JobChange),
}

/// How to change a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobChange {
    /// Starts it, perhaps later. Until it begins, it can get another time.
    Start(Option<Timestamp>),
    /// Pauses it.
    Pause,
    /// Resumes it.
    Resume,
    /// Cancels it for good.
    Cancel,
    /// Sets its rate; 0: as fast as possible.
    Rate(u32),
}

/// Why a change is refused. Nothing was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RefusedChange {
    /// There is no such job.
    Missing,
    /// It has another revision than the expected one.
    Revised(u64),
    /// The change makes no sense in this state.
    State(v1::RedriveState),
    /// This version would lose something of the job.
    Unknown(Problem),
    /// The caller has planned this job with the same request id and another request.
    RequestIdUsed(String),
    /// There is no room for another job.
    TooMany,
    /// There is no room for another edit, see [`MAX_EDIT_BYTES`](super::room::MAX_EDIT_BYTES).
    TooManyEdits,
}

/// Why a change has failed.
pub type ChangeError = ExclusiveError<RefusedChange>;

/// Changes the topic that `jobs` follows. Cheap to clone.
#[derive(Clone)]
pub struct JobWriter {
    writer: FollowedWriter<Jobs>,
    audit: AuditLog,
    jobs: Followed<Jobs>,
}

impl JobWriter {
    /// A writer. Each change is recorded in the audit log, in the same transaction.
    #[must_use]
    pub fn new(kafka: &KafkaSettings, topic: &str, audit: AuditLog, jobs: Followed<Jobs>) -> Self {
        Self {
            writer: FollowedWriter::new(kafka, &own_id(topic), topic, &jobs),
            audit,
            jobs,
        }
    }

    /// Makes a change, and returns the id of the job. When this returns, the change is durable, and this process has read it.
    ///
    /// # Errors
    /// [`ChangeError`] says whether something may have been written.
    pub async fn change(&self, request: ChangeRequest) -> Result<String, ChangeError> {
        let request = Arc::new(request);
        let (pending, audit) = (request.clone(), self.audit.clone());
        let changing = self.writer.write(move |topic, id, jobs| PendingChange {
            request: pending.clone(),
            audit: audit.clone(),
            id,
            change_id: change_id(id),
            topic: topic.clone(),
            jobs,
        });
        let job = changing.await?;
        let (id, revision) = (job.spec().id.clone(), job.record.revision);
        let wanted = job.wanted;
        tracing::info!(id, revision, by = %request.by, ?wanted, "redrive changed");
        let has_read = |jobs: &Jobs| {
            let known = jobs.get(&id).and_then(|entry| entry.job());
            known.is_some_and(|known| known.record.revision >= revision)
        };
        self.jobs.until_read(has_read).await;
        Ok(id)
    }
}

/// A change that is being decided.
struct PendingChange {
    request: Arc<ChangeRequest>,
    audit: AuditLog,
    id: u128,
    change_id: Bytes,
    topic: Arc<str>,
    jobs: Jobs,
}

impl Decide for PendingChange {
    type Decision = Job;
    type Error = RefusedChange;

    fn read(&mut self, record: Record) {
        self.jobs.apply(&record);
    }

    fn decide(self) -> Result<(Job, Vec<Output>), RefusedChange> {
        // What a previous attempt has written, whose outcome was unknown.
        let own = self
            .jobs
            .iter()
            .find(|(_, _, job)| job.record.change_id == self.change_id);
        if let Some((_, _, job)) = own {
            return Ok((job, Vec::new()));
        }
        match &self.request.change {
            Change::Plan(record, items) => self.plan(record, items, None),
            Change::Edit(record, item, edit) => self.plan(record, std::slice::from_ref(item), Some(edit)),
            Change::Job(id, expected, change) => self.change(id, *expected, *change),
        }
    }
}

impl PendingChange {
    fn plan(
        &self,
        record: &v1::RedriveRecord,
        items: &[Item],
        edit: Option<&Edit>,
    ) -> Result<(Job, Vec<Output>), RefusedChange> {
        let ChangeRequest { by, at, .. } = &*self.request;
        let same = self.jobs.of_request(by, &record.request_id);
        if let Some(job) = same {
            if job.record.request_hash != record.request_hash {
                return Err(RefusedChange::RequestIdUsed(job.spec().id.clone()));
            }
            return Ok((job, Vec::new()));
        }
        let mut chunks = job::chunks(items);
        let mut record = record.clone();
        if let (Some(edit), Some(chunk)) = (edit, chunks.first_mut()) {
            chunk.edit = Some(edit.to_record());
        }
        record.revision = 1;
        record.change_id = self.change_id.clone();
        record.chunks = u32::try_from(chunks.len()).unwrap_or(u32::MAX);
        if let Some(redrive) = &mut record.redrive {
            redrive.id = new_id(*at, self.id);
            redrive.created_by = by.to_string();
            redrive.created_at = Some(to_timestamp(*at));
            let parts = edit.map(Edit::parts).unwrap_or_default();
            redrive.edited = parts.into_iter().map(str::to_owned).collect();
        }
        let job = self.changed(record)?;
        let edit_bytes = chunks.first().filter(|_| edit.is_some());
        let edit_bytes = edit_bytes.map_or(0, v1::RedrivePlanChunk::encoded_len);
        let new = New {
            letters: u32::try_from(items.len()).unwrap_or(u32::MAX),
            edit_bytes,
        };
        let removed = room::make(&self.jobs, new, *at)?;
        let id = &job.spec().id;
        let mut outputs: Vec<Output> = Vec::new();
        for (number, chunk) in (0..).zip(chunks) {
            outputs.push(self.output(plan_key(id, number), Some(chunk.encode_to_vec())));
        }
        outputs.push(self.output(job_key(id), Some(job.record.encode_to_vec())));
        for key in removed {
            outputs.push(self.output(key, None));
        }
        let ids = items.iter().take(MAX_IDS).map(|item| item.id.to_string());
        let entry = AuditEntry {
            filter: job.spec().filter.clone(),
            count: u64::from(job.spec().total),
            ids: ids.collect(),
            ..self.entry(&job, Action::PlanRedrive, planned(&job, edit))
        };
        outputs.push(self.audit.record(entry, *at));
        Ok((job, outputs))
    }

    fn change(
        &self,
        id: &str,
        expected: Option<u64>,
        change: JobChange,
    ) -> Result<(Job, Vec<Output>), RefusedChange> {
        let Some(entry) = self.jobs.get(id) else {
            let problem = self.jobs.problem(id);
            return Err(problem.map_or(RefusedChange::Missing, RefusedChange::Unknown));
        };
        let job = entry.job().ok_or(RefusedChange::Missing)?;
        if entry.has_unknown_fields() {
            return Err(RefusedChange::Unknown(Problem::Value(InvalidValue::Newer)));
        }
        if expected.is_some_and(|expected| expected != job.record.revision) {
            return Err(RefusedChange::Revised(job.record.revision));
        }
        let Some(mut record) = next(&job, entry, change)? else {
            return Ok((job, Vec::new()));
        };
        record.revision += 1;
        record.change_id = self.change_id.clone();
        let changed = self.changed(record)?;
        let action = match change {
            JobChange::Start(_) => Action::StartRedrive,
            JobChange::Pause => Action::PauseRedrive,
            JobChange::Resume => Action::ResumeRedrive,
            JobChange::Cancel => Action::CancelRedrive,
            JobChange::Rate(_) => Action::SetRedriveRate,
        };
        let details = match change {
            JobChange::Start(Some(at)) => format!("at {at}"),
            JobChange::Start(None) if job.start_at().is_some() => "now".to_owned(),
            JobChange::Rate(0) => "no rate".to_owned(),
            JobChange::Rate(rate) => format!("rate {rate}/s"),
            _ => String::new(),
        };
        let entry = self.entry(&changed, action, details);
        let outputs = vec![
            self.output(job_key(id), Some(changed.record.encode_to_vec())),
            self.audit.record(entry, self.request.at),
        ];
        Ok((changed, outputs))
    }

    /// A job that this request has changed.
    fn changed(&self, mut record: v1::RedriveRecord) -> Result<Job, RefusedChange> {
        if let Some(redrive) = &mut record.redrive {
            redrive.changed_by = self.request.by.to_string();
            redrive.changed_at = Some(to_timestamp(self.request.at));
            record.format = job::format_of(redrive);
        }
        Job::read(record).map_err(|invalid| RefusedChange::Unknown(Problem::Value(invalid)))
    }

    fn entry(&self, job: &Job, action: Action, details: String) -> AuditEntry {
        AuditEntry {
            target: job.spec().id.clone(),
            why: job.spec().why.clone(),
            details,
            id: self.id,
            ..AuditEntry::new(self.request.by.clone(), action)
        }
    }

    fn output(&self, key: String, value: Option<Vec<u8>>) -> Output {
        Output {
            topic: self.topic.clone(),
            partition: Some(0),
            key: Some(key.into()),
            value: value.map(Bytes::from),
            headers: Headers::new(),
        }
    }
}

/// What the audit log says about a plan.
fn planned(job: &Job, edit: Option<&Edit>) -> String {
    let kind = job.kind;
    match (job.wanted, edit) {
        (Wanted::Running, _) => format!("{kind:?}, started"),
        (_, Some(edit)) => format!("{kind:?}: {}", edit.names()),
        (_, None) => format!("{kind:?}"),
    }
}

/// The id of a new job. Ids increase with the time. [`is_job_id`](super::is_job_id) recognises them.
fn new_id(now: Timestamp, random: u128) -> String {
    let millis = now.as_millis().max(0);
    format!("{millis:012x}{:04x}", random & 0xffff)
}

/// What follows from a change; `None` if it has no effect.
fn next(job: &Job, entry: &Entry, change: JobChange) -> Result<Option<v1::RedriveRecord>, RefusedChange> {
    use v1::RedriveState::{Cancelled, Paused, Planned, Running};
    let progress = entry.progress();
    let state = job::state(job, &progress);
    let mut record = job.record.clone();
    let (wanted, starts) = match (change, state) {
        (JobChange::Start(_), Planned) => (Wanted::Running, true),
        // It has not begun, and gets another time.
        (JobChange::Start(at), Running | Paused) if progress.next == 0 && job.start_at() != at => {
            (job.wanted, false)
        }
        // It has begun, or begins then.
        (JobChange::Start(at), state) if state != Cancelled && (at.is_none() || at == job.start_at()) => {
            return Ok(None);
        }
        (JobChange::Pause, Running) => (Wanted::Paused, false),
        // The brake has paused it. Now it stays paused, also if somebody changes the rate.
        (JobChange::Pause, Paused) if job.wanted == Wanted::Running => (Wanted::Paused, false),
        (JobChange::Pause, Paused) | (JobChange::Resume, Running) | (JobChange::Cancel, Cancelled) => {
            return Ok(None);
        }
        (JobChange::Resume, Paused) => (Wanted::Running, true),
        (JobChange::Cancel, Planned | Running | Paused) => (Wanted::Cancelled, false),
        (JobChange::Rate(_), Planned | Running | Paused) => (job.wanted, false),
        (_, state) => return Err(RefusedChange::State(state)),
    };
    record.wanted = wanted.to_wire().into();
    record.run += u32::from(starts);
    if let Some(redrive) = &mut record.redrive {
        match change {
            JobChange::Start(at) => redrive.start_at = at.map(to_timestamp),
            JobChange::Rate(rate) if redrive.rate_per_second == rate => return Ok(None),
            JobChange::Rate(rate) => redrive.rate_per_second = rate,
            JobChange::Pause | JobChange::Resume | JobChange::Cancel => {}
        }
    }
    Ok(Some(record))
}

#[cfg(test)]
mod tests {
    use redeliver_runtime::Config;

    use super::super::job::tests::{item, job};
    use super::super::job::{Outcome, Progress};
    use super::super::jobs::tests::{jobs, record};
    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);
    const TOPIC: &str = "redrives";

    fn pending(change: Change, jobs: Jobs) -> PendingChange {
        PendingChange {
            request: Arc::new(ChangeRequest {
                change,
                by: CallerName::recorded("token:ann"),
                at: NOW,
            }),
            audit: AuditLog::new(&Config::default(), "dlq-inspector"),
            id: 0x1_2345,
            change_id: change_id(0x1_2345),
            topic: TOPIC.into(),
            jobs,
        }
    }

    fn record_of(key: &str, value: Vec<u8>) -> Record {
        record(key, Some(value.into()))
    }

    fn read_again(outputs: &[Output], jobs: &mut Jobs) {
        for output in outputs.iter().filter(|output| &*output.topic == TOPIC) {
            let key = std::str::from_utf8(output.key.as_deref().unwrap()).unwrap();
            jobs.apply(&record(key, output.value.clone()));
        }
    }

    fn plan(request_id: &str, total: u32) -> Change {
        let items: Vec<Item> = (0..i64::from(total))
            .map(|offset| item("a-dlq", offset))
            .collect();
        let mut record = job(total, Wanted::Planned).record;
        record.request_id = request_id.to_owned();
        record.run = 0;
        Change::Plan(Box::new(record), items.into())
    }

    #[test]
    fn a_plan_is_written_once_for_a_request() {
        let (planned, outputs) = pending(plan("r", 3), Jobs::default()).decide().unwrap();
        assert_eq!(planned.spec().id, "018bcfe568002345");
        assert_eq!(planned.spec().created_by, "token:ann");
        let topics: Vec<&str> = outputs.iter().map(|output| &*output.topic).collect();
        assert_eq!(topics, [TOPIC, TOPIC, "redeliver.audit"]);
        let mut jobs = Jobs::default();
        read_again(&outputs, &mut jobs);
        let entry = jobs.get(&planned.spec().id).unwrap();
        assert_eq!(entry.items(0).unwrap().len(), 3);
        // The outcome of the first attempt was unknown.
        let (again, outputs) = pending(plan("", 3), jobs.clone()).decide().unwrap();
        assert_eq!((again.spec().id.as_str(), outputs.len()), ("018bcfe568002345", 0));
        // Somebody repeats the call.
        let repeated = PendingChange {
            change_id: change_id(7),
            id: 7,
            ..pending(plan("r", 9), jobs.clone())
        };
        let (same, outputs) = repeated.decide().unwrap();
        assert_eq!((same.spec().total, outputs.len()), (3, 0));
        let other = PendingChange {
            change_id: change_id(7),
            id: 7,
            ..pending(plan("s", 9), jobs.clone())
        };
        assert_eq!(other.decide().unwrap().0.spec().total, 9);
        // Another request with the same id, and the same one of somebody else.
        let Change::Plan(mut discard, items) = plan("r", 9) else {
            unreachable!("it is a plan");
        };
        discard.request_hash = Bytes::from_static(b"discard");
        let discard = PendingChange {
            change_id: change_id(7),
            ..pending(Change::Plan(discard, items), jobs.clone())
        };
        let used = RefusedChange::RequestIdUsed("018bcfe568002345".to_owned());
        assert_eq!(discard.decide().err(), Some(used));
        for name in [
            "token:bob",
            "jwt:https://login.test#ann",
            "certificate:CN=ann",
            "anonymous",
        ] {
            let mut other = PendingChange {
                change_id: change_id(7),
                ..pending(plan("r", 9), jobs.clone())
            };
            Arc::make_mut(&mut other.request).by = CallerName::recorded(name);
            assert_eq!(other.decide().unwrap().0.spec().total, 9, "{name}");
        }
    }

    #[test]
    fn a_job_with_unreadable_progress_can_be_stopped() {
        let mut jobs = jobs(2, Wanted::Running);
        jobs.apply(&record("progress/1f", Some(Bytes::from_static(b"\xff"))));
        for (number, change, expected) in [
            (7, JobChange::Pause, Wanted::Paused),
            (8, JobChange::Cancel, Wanted::Cancelled),
        ] {
            let change = Change::Job("1f".to_owned(), None, change);
            let change_id = change_id(number);
            let pending = PendingChange {
                change_id,
                ..pending(change, jobs.clone())
            };
            let (job, outputs) = pending.decide().unwrap();
            assert_eq!(job.wanted, expected);
            read_again(&outputs, &mut jobs);
        }
        assert_eq!(jobs.get("1f").unwrap().problem(), "");
    }

    #[test]
    fn a_change_follows_from_the_state() {
        use v1::RedriveState::{Cancelled, Paused, Planned, Running, Succeeded};
        let after = |wanted, done: u32, change| {
            let mut jobs = jobs(2, wanted);
            let mut progress = Progress::default();
            (0..done).for_each(|_| progress.count(Outcome::Done));
            progress.observed = progress.done;
            jobs.apply_own("1f", &progress, Vec::new());
            let change = Change::Job("1f".to_owned(), None, change);
            let (job, outputs) = pending(change, jobs).decide()?;
            Ok((job.record.wanted(), job.record.run, outputs.len()))
        };
        let refused = |state| Err(RefusedChange::State(state));
        for (wanted, done, change, expected) in [
            (Wanted::Planned, 0, JobChange::Start(None), Ok((Running, 2, 2))),
            (Wanted::Running, 1, JobChange::Start(None), Ok((Running, 1, 0))),
            (Wanted::Cancelled, 1, JobChange::Start(None), refused(Cancelled)),
            (Wanted::Running, 1, JobChange::Pause, Ok((Paused, 1, 2))),
            (Wanted::Planned, 0, JobChange::Pause, refused(Planned)),
            (Wanted::Paused, 1, JobChange::Resume, Ok((Running, 2, 2))),
            (Wanted::Running, 1, JobChange::Resume, Ok((Running, 1, 0))),
            (Wanted::Paused, 1, JobChange::Cancel, Ok((Cancelled, 1, 2))),
            (Wanted::Cancelled, 1, JobChange::Cancel, Ok((Cancelled, 1, 0))),
            (Wanted::Running, 2, JobChange::Cancel, refused(Succeeded)),
            (Wanted::Running, 1, JobChange::Rate(5), Ok((Running, 1, 2))),
            (Wanted::Running, 1, JobChange::Rate(0), Ok((Running, 1, 0))),
        ] {
            assert_eq!(
                after(wanted, done, change),
                expected,
                "{wanted:?} {done} {change:?}"
            );
        }
    }

    #[test]
    fn a_job_that_has_not_begun_can_get_another_time() {
        use v1::RedriveState::{Paused, Running, Succeeded};
        let later = |seconds| Some(NOW.after(std::time::Duration::from_secs(seconds)));
        let changed_if = |wanted, start_at: Option<Timestamp>, done: u32, at| {
            let mut job = job(2, wanted).record;
            job.redrive.as_mut().unwrap().start_at = start_at.map(to_timestamp);
            let mut jobs = jobs(2, wanted);
            jobs.apply(&record_of(&job_key("1f"), job.encode_to_vec()));
            let mut progress = Progress::default();
            (0..done).for_each(|_| progress.count(Outcome::Done));
            progress.observed = progress.done;
            jobs.apply_own("1f", &progress, Vec::new());
            let change = Change::Job("1f".to_owned(), None, JobChange::Start(at));
            let (job, outputs) = pending(change, jobs).decide()?;
            assert_eq!((job.wanted, job.record.run), (wanted, 1));
            Ok((job.start_at(), outputs.len()))
        };
        let changed = |start_at, done, at| changed_if(Wanted::Running, start_at, done, at);
        assert_eq!(changed(later(60), 0, None), Ok((None, 2)));
        assert_eq!(changed(later(60), 0, later(5)), Ok((later(5), 2)));
        assert_eq!(changed(later(60), 0, later(90)), Ok((later(90), 2)));
        assert_eq!(changed(later(60), 0, later(60)), Ok((later(60), 0)), "repeated");
        assert_eq!(changed(None, 0, later(90)), Ok((later(90), 2)));
        // A paused one stays paused.
        assert_eq!(
            changed_if(Wanted::Paused, later(60), 0, later(5)),
            Ok((later(5), 2))
        );
        // It has begun.
        let refused = |state| Err(RefusedChange::State(state));
        assert_eq!(changed(later(60), 1, None), Ok((later(60), 0)));
        assert_eq!(changed(later(60), 1, later(60)), Ok((later(60), 0)));
        assert_eq!(changed(later(60), 1, later(90)), refused(Running));
        assert_eq!(changed_if(Wanted::Paused, None, 1, later(90)), refused(Paused));
        assert_eq!(changed(None, 2, later(90)), refused(Succeeded));
    }

    #[test]
    fn a_change_needs_the_expected_revision_and_a_job_that_can_be_read() {
        let refusal = |id: &str, expected| {
            let change = Change::Job(id.to_owned(), expected, JobChange::Pause);
            let mut jobs = jobs(2, Wanted::Running);
            jobs.apply(&record("job/2f", Some(Bytes::from_static(b"\xff"))));
            pending(change, jobs).decide().err()
        };
        assert_eq!(refusal("1f", Some(2)), None);
        assert_eq!(refusal("1f", Some(1)), Some(RefusedChange::Revised(2)));
        assert_eq!(refusal("3f", None), Some(RefusedChange::Missing));
        assert!(matches!(refusal("2f", None), Some(RefusedChange::Unknown(_))));
    }

    #[test]
    fn what_a_newer_version_has_written_is_not_changed() {
        let spec = job(2, Wanted::Running).record.redrive.unwrap();
        let written = |format, unknown: &[u8]| {
            let record = v1::RedriveRecord {
                format,
                redrive: Some(v1::Redrive {
                    id: "1f".to_owned(),
                    ..spec.clone()
                }),
                ..job(2, Wanted::Running).record
            };
            let value = [&record.encode_to_vec()[..], unknown].concat();
            let mut jobs = jobs(2, Wanted::Running);
            jobs.apply(&record_of(&job_key("1f"), value));
            let change = Change::Job("1f".to_owned(), None, JobChange::Pause);
            let (job, _) = pending(change, jobs).decide()?;
            Ok(job.record.format)
        };
        let newer = Err(RefusedChange::Unknown(Problem::Value(InvalidValue::Newer)));
        assert_eq!(written(2, &[]), newer);
        // The field 1000.
        assert_eq!(written(0, &[0xc0, 0x3e, 1]), newer);
        assert_eq!(written(0, &[]), Ok(0));
    }

    fn edit(bytes: usize) -> Box<Edit> {
        let value = v1::EditedBytes {
            bytes: Some(vec![7; bytes].into()),
        };
        let edit = v1::RedriveEdit {
            value: Some(value),
            ..v1::RedriveEdit::default()
        };
        Box::new(Edit::read(edit).unwrap())
    }

    #[test]
    fn an_edit_is_stored_with_the_plan_for_versions_that_know_edits() {
        let Change::Plan(planned, items) = plan("r", 1) else {
            unreachable!("it is a plan");
        };
        let change = Change::Edit(planned, items[0].clone(), edit(3));
        let (planned, outputs) = pending(change, Jobs::default()).decide().unwrap();
        assert_eq!((planned.record.format, planned.is_edit()), (1, true));
        assert_eq!(planned.spec().edited, ["value"]);
        let audited = v1::AuditEntry::decode(outputs[2].value.clone().unwrap()).unwrap();
        assert_eq!(audited.details, "Redrive: edits value");
        let mut jobs = Jobs::default();
        read_again(&outputs, &mut jobs);
        let id = planned.spec().id.clone();
        assert_eq!(jobs.get(&id).unwrap().edit(), Ok(Some(*edit(3))));
        // Starting it keeps the format.
        let start = Change::Job(id, None, JobChange::Start(None));
        let start = PendingChange {
            change_id: change_id(7),
            ..pending(start, jobs)
        };
        assert_eq!(start.decide().unwrap().0.record.format, 1);
    }

    #[test]
    fn the_id_of_a_job_is_recognised() {
        use super::super::is_job_id;
        assert!(is_job_id(&new_id(NOW, u128::MAX)));
        for other in ["", "0123456789abcdeF", "0123456789abcdef0", "customer-4711-xy"] {
            assert!(!is_job_id(other), "{other}");
        }
    }
}
