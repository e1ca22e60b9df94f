//! Changes of jobs by callers: plans, starts, pauses.

use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::Timestamp;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::{Message as _, v1};
use redeliver_service::audit::{Action, AuditEntry, AuditLog, MAX_IDS};
use redeliver_service::identity::CallerName;
use redeliver_store::{ChangeId, Decision};

use super::edit::Edit;
use super::job::{self, Item, Job, RedriveState};
use super::jobs::{JobEntry, Jobs, job_key, plan_key};
pub use super::refusal::RefusedChange;
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
    /// Where the change is recorded, in the same transaction.
    pub audit: AuditLog,
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

/// Why a change has failed.
pub type ChangeError = redeliver_store::ChangeError<Job, RefusedChange>;

impl redeliver_store::Change for ChangeRequest {
    type State = Jobs;
    type Refused = RefusedChange;

    fn key(&self, id: ChangeId) -> String {
        match &self.change {
            Change::Plan(..) | Change::Edit(..) => new_id(self.at, id),
            Change::Job(job, ..) => job.clone(),
        }
    }

    fn expected_revision(&self) -> Option<u64> {
        match &self.change {
            Change::Plan(..) | Change::Edit(..) => None,
            Change::Job(_, expected, _) => *expected,
        }
    }

    fn decide(&self, jobs: &Jobs, id: ChangeId) -> Result<Decision<Jobs>, RefusedChange> {
        match &self.change {
            Change::Plan(record, items) => self.plan(jobs, id, record, items, None),
            Change::Edit(record, item, edit) => {
                self.plan(jobs, id, record, std::slice::from_ref(item), Some(edit))
            }
            Change::Job(job, _, change) => self.change_job(jobs, id, job, *change),
        }
    }

    fn log(&self, job: &Job) {
        let (id, revision, by, wanted) = (&job.spec().id, job.record.revision, &self.by, job.wanted);
        tracing::info!(id, revision, %by, ?wanted, "redrive changed");
    }
}

impl ChangeRequest {
    fn plan(
        &self,
        jobs: &Jobs,
        id: ChangeId,
        record: &v1::RedriveRecord,
        items: &[Item],
        edit: Option<&Edit>,
    ) -> Result<Decision<Jobs>, RefusedChange> {
        let Self { by, at, .. } = self;
        if let Some(job) = jobs.of_request(by, &record.request_id) {
            let same = job.spec().id.clone();
            if job.record.request_hash != record.request_hash {
                return Err(RefusedChange::RequestIdUsed(same));
            }
            return Ok(Decision::Unchanged(same));
        }
        let mut chunks = job::chunks(items);
        let mut record = record.clone();
        if let (Some(edit), Some(chunk)) = (edit, chunks.first_mut()) {
            chunk.edit = Some(edit.to_record());
        }
        record.chunks = u32::try_from(chunks.len()).unwrap_or(u32::MAX);
        if let Some(redrive) = &mut record.redrive {
            redrive.id = new_id(*at, id);
            redrive.created_by = by.to_string();
            redrive.created_at = Some(to_timestamp(*at));
            let parts = edit.map(Edit::parts).unwrap_or_default();
            redrive.edited = parts.into_iter().map(str::to_owned).collect();
        }
        let job = self.changed(record, 1, id)?;
        let edit_bytes = chunks.first().filter(|_| edit.is_some());
        let edit_bytes = edit_bytes.map_or(0, v1::RedrivePlanChunk::encoded_len);
        let new = New {
            letters: u32::try_from(items.len()).unwrap_or(u32::MAX),
            edit_bytes,
        };
        let removed = room::make(jobs, new, *at)?;
        let plan = (0..).zip(&chunks).map(|(number, chunk)| {
            let key = plan_key(&job.spec().id, number);
            (key, Some(Bytes::from(chunk.encode_to_vec())))
        });
        let records = plan.chain([written(&job)]);
        let records = records.chain(removed.into_iter().map(|key| (key, None)));
        let ids = items.iter().take(MAX_IDS).map(|item| item.id.to_string());
        let entry = AuditEntry {
            filter: job.spec().filter.clone(),
            count: u64::from(job.spec().total),
            ids: ids.collect(),
            ..self.entry(&job, id, Action::PlanRedrive, planned(&job, edit))
        };
        Ok(Decision::Write {
            records: records.collect(),
            entry: self.audit.record(entry, *at),
            document: job,
        })
    }

    fn change_job(
        &self,
        jobs: &Jobs,
        id: ChangeId,
        job: &str,
        change: JobChange,
    ) -> Result<Decision<Jobs>, RefusedChange> {
        let entry = jobs.get(job).ok_or(RefusedChange::Missing)?;
        let job = entry.job().ok_or(RefusedChange::Missing)?;
        let Some(record) = next(&job, entry, change)? else {
            return Ok(Decision::Unchanged(job.spec().id.clone()));
        };
        let revision = record.revision + 1;
        let changed = self.changed(record, revision, id)?;
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
        let entry = self.entry(&changed, id, action, details);
        Ok(Decision::Write {
            records: vec![written(&changed)],
            entry: self.audit.record(entry, self.at),
            document: changed,
        })
    }

    /// A job that this request has changed.
    fn changed(
        &self,
        mut record: v1::RedriveRecord,
        revision: u64,
        id: ChangeId,
    ) -> Result<Job, RefusedChange> {
        record.revision = revision;
        record.change_id = id.bytes();
        if let Some(redrive) = &mut record.redrive {
            redrive.changed_by = self.by.to_string();
            redrive.changed_at = Some(to_timestamp(self.at));
            record.format = job::format_of(redrive);
        }
        Job::read(record).map_err(RefusedChange::Invalid)
    }

    fn entry(&self, job: &Job, id: ChangeId, action: Action, details: String) -> AuditEntry {
        AuditEntry {
            target: job.spec().id.clone(),
            reason: job.spec().reason.clone(),
            details,
            id: id.0,
            ..AuditEntry::new(self.by.clone(), action)
        }
    }
}

/// The record of a job.
fn written(job: &Job) -> (String, Option<Bytes>) {
    (job_key(&job.spec().id), Some(job.record.encode_to_vec().into()))
}

/// What the audit log says about a plan.
fn planned(job: &Job, edit: Option<&Edit>) -> String {
    let kind = job.kind;
    match (job.wanted, edit) {
        (RedriveState::Running, _) => format!("{kind:?}, started"),
        (_, Some(edit)) => format!("{kind:?}: {}", edit.names()),
        (_, None) => format!("{kind:?}"),
    }
}

/// The id of a new job. Ids increase with the time. [`is_job_id`](super::is_job_id) recognises them.
fn new_id(now: Timestamp, id: ChangeId) -> String {
    let millis = now.as_millis().max(0);
    format!("{millis:012x}{:04x}", id.0 & 0xffff)
}

/// What follows from a change; `None` if it has no effect.
fn next(job: &Job, entry: &JobEntry, change: JobChange) -> Result<Option<v1::RedriveRecord>, RefusedChange> {
    use v1::RedriveState::{Cancelled, Paused, Planned, Running};
    let progress = entry.progress();
    let state = job::state(job, &progress);
    let mut record = job.record.clone();
    let (wanted, starts) = match (change, state) {
        (JobChange::Start(_), Planned) => (RedriveState::Running, true),
        // It has not begun, and gets another time.
        (JobChange::Start(at), Running | Paused) if progress.next == 0 && job.start_at() != at => {
            (job.wanted, false)
        }
        // It has begun, or begins then.
        (JobChange::Start(at), state) if state != Cancelled && (at.is_none() || at == job.start_at()) => {
            return Ok(None);
        }
        (JobChange::Pause, Running) => (RedriveState::Paused, false),
        // It was auto-paused. Now it stays paused, even if its rate is changed.
        (JobChange::Pause, Paused) if job.wanted == RedriveState::Running => (RedriveState::Paused, false),
        (JobChange::Pause, Paused) | (JobChange::Resume, Running) | (JobChange::Cancel, Cancelled) => {
            return Ok(None);
        }
        (JobChange::Resume, Paused) => (RedriveState::Running, true),
        (JobChange::Cancel, Planned | Running | Paused) => (RedriveState::Cancelled, false),
        (JobChange::Rate(_), Planned | Running | Paused) => (job.wanted, false),
        (_, state) => return Err(RefusedChange::State(state)),
    };
    record.wanted = wanted.into();
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
    use redeliver_core::Record;
    use redeliver_runtime::Config;
    use redeliver_store::{Document as _, State as _};
    use redeliver_testkit::record;

    use super::super::job::tests::{item, job};
    use super::super::job::{Outcome, Progress};
    use super::super::jobs::tests::jobs;
    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);
    type Records = Vec<(String, Option<Bytes>)>;

    fn request(change: Change, by: &str) -> ChangeRequest {
        ChangeRequest {
            change,
            by: CallerName::recorded(by),
            at: NOW,
            audit: AuditLog::new(&Config::default(), "dlq-inspector"),
        }
    }

    /// The job that applies, and what is written.
    fn decide_by(by: &str, id: u128, change: Change, jobs: &Jobs) -> Result<(Job, Records), RefusedChange> {
        let (change, id) = (request(change, by), ChangeId(id));
        match redeliver_store::Change::decide(&change, jobs, id)? {
            Decision::Unchanged(id) => Ok((jobs.get(&id).unwrap().job().unwrap(), Records::new())),
            Decision::Write {
                document, records, ..
            } => {
                let key = redeliver_store::Change::key(&change, id);
                assert_eq!((&document.spec().id, document.change_id()), (&key, &id.bytes()));
                Ok((document, records))
            }
        }
    }

    fn decide(change: Change, jobs: &Jobs) -> Result<(Job, Records), RefusedChange> {
        decide_by("token:ann", 0x1_2345, change, jobs)
    }

    fn record_of(key: &str, value: Vec<u8>) -> Record {
        record(key, Some(value.into()))
    }

    fn read_again(records: Records, jobs: &mut Jobs) {
        for (key, value) in records {
            jobs.apply(&record(&key, value));
        }
    }

    fn plan(request_id: &str, total: u32) -> Change {
        let items: Vec<Item> = (0..i64::from(total))
            .map(|offset| item("a-dlq", offset))
            .collect();
        let mut record = job(total, RedriveState::Planned).record;
        record.request_id = request_id.to_owned();
        record.run = 0;
        Change::Plan(Box::new(record), items.into())
    }

    #[test]
    fn plan_is_written_once_per_request() {
        let (planned, records) = decide(plan("r", 3), &Jobs::default()).unwrap();
        assert_eq!(planned.spec().id, "018bcfe568002345");
        assert_eq!(planned.spec().created_by, "token:ann");
        let keys: Vec<&str> = records.iter().map(|(key, _)| &**key).collect();
        assert_eq!(keys, ["plan/018bcfe568002345/0", "job/018bcfe568002345"]);
        let mut jobs = Jobs::default();
        read_again(records, &mut jobs);
        let entry = jobs.get(&planned.spec().id).unwrap();
        assert_eq!(entry.items(0).unwrap().len(), 3);
        let again = |by, change| decide_by(by, 7, change, &jobs);
        // The call is repeated.
        assert_eq!(again("token:ann", plan("r", 9)), Ok((planned, Records::new())));
        let other = again("token:ann", plan("s", 9)).unwrap();
        assert_eq!(other.0.spec().total, 9);
        // Another request with the same id, and the same one of another caller.
        let Change::Plan(mut discard, items) = plan("r", 9) else {
            unreachable!("it is a plan");
        };
        discard.request_hash = Bytes::from_static(b"discard");
        let used = RefusedChange::RequestIdUsed("018bcfe568002345".to_owned());
        assert_eq!(again("token:ann", Change::Plan(discard, items)), Err(used));
        for name in [
            "token:bob",
            "jwt:https://login.test#ann",
            "certificate:CN=ann",
            "anonymous",
        ] {
            let other = again(name, plan("r", 9)).unwrap();
            assert_eq!(other.0.spec().total, 9, "{name}");
        }
    }

    #[test]
    fn job_with_unreadable_progress_can_stop() {
        let mut jobs = jobs(2, RedriveState::Running);
        jobs.apply(&record("progress/1f", Some(Bytes::from_static(b"\xff"))));
        for (change, expected) in [
            (JobChange::Pause, RedriveState::Paused),
            (JobChange::Cancel, RedriveState::Cancelled),
        ] {
            let (job, records) = decide(Change::Job("1f".to_owned(), None, change), &jobs).unwrap();
            assert_eq!(job.wanted, expected);
            read_again(records, &mut jobs);
        }
        assert_eq!(jobs.get("1f").unwrap().problem(), "");
        let missing = Change::Job("3f".to_owned(), None, JobChange::Pause);
        assert_eq!(decide(missing, &jobs).err(), Some(RefusedChange::Missing));
    }

    #[test]
    fn change_follows_from_state() {
        use v1::RedriveState::{Cancelled, Paused, Planned, Running, Succeeded};
        let after = |wanted, done: u32, change| {
            let mut jobs = jobs(2, wanted);
            let mut progress = Progress::default();
            (0..done).for_each(|_| job::count(&mut progress, Outcome::Done));
            progress.observed = progress.done;
            jobs.apply_own("1f", &progress, Vec::new());
            let change = Change::Job("1f".to_owned(), None, change);
            let (job, records) = decide(change, &jobs)?;
            Ok((job.record.wanted(), job.record.run, records.len()))
        };
        let refused = |state| Err(RefusedChange::State(state));
        for (wanted, done, change, expected) in [
            (
                RedriveState::Planned,
                0,
                JobChange::Start(None),
                Ok((Running, 2, 1)),
            ),
            (
                RedriveState::Running,
                1,
                JobChange::Start(None),
                Ok((Running, 1, 0)),
            ),
            (
                RedriveState::Cancelled,
                1,
                JobChange::Start(None),
                refused(Cancelled),
            ),
            (RedriveState::Running, 1, JobChange::Pause, Ok((Paused, 1, 1))),
            (RedriveState::Planned, 0, JobChange::Pause, refused(Planned)),
            (RedriveState::Paused, 1, JobChange::Resume, Ok((Running, 2, 1))),
            (RedriveState::Running, 1, JobChange::Resume, Ok((Running, 1, 0))),
            (RedriveState::Paused, 1, JobChange::Cancel, Ok((Cancelled, 1, 1))),
            (
                RedriveState::Cancelled,
                1,
                JobChange::Cancel,
                Ok((Cancelled, 1, 0)),
            ),
            (RedriveState::Running, 2, JobChange::Cancel, refused(Succeeded)),
            (RedriveState::Running, 1, JobChange::Rate(5), Ok((Running, 1, 1))),
            (RedriveState::Running, 1, JobChange::Rate(0), Ok((Running, 1, 0))),
        ] {
            assert_eq!(
                after(wanted, done, change),
                expected,
                "{wanted:?} {done} {change:?}"
            );
        }
    }

    #[test]
    fn unstarted_job_can_be_rescheduled() {
        use v1::RedriveState::{Paused, Running, Succeeded};
        let later = |seconds| Some(NOW.after(std::time::Duration::from_secs(seconds)));
        let changed_if = |wanted, start_at: Option<Timestamp>, done: u32, at| {
            let mut job = job(2, wanted).record;
            let redrive = job.redrive.as_mut().unwrap();
            redrive.start_at = start_at.map(to_timestamp);
            redrive.id = "1f".to_owned();
            let mut jobs = jobs(2, wanted);
            jobs.apply(&record_of(&job_key("1f"), job.encode_to_vec()));
            let mut progress = Progress::default();
            (0..done).for_each(|_| job::count(&mut progress, Outcome::Done));
            progress.observed = progress.done;
            jobs.apply_own("1f", &progress, Vec::new());
            let change = Change::Job("1f".to_owned(), None, JobChange::Start(at));
            let (job, records) = decide(change, &jobs)?;
            assert_eq!((job.wanted, job.record.run), (wanted, 1));
            Ok((job.start_at(), records.len()))
        };
        let changed = |start_at, done, at| changed_if(RedriveState::Running, start_at, done, at);
        assert_eq!(changed(later(60), 0, None), Ok((None, 1)));
        assert_eq!(changed(later(60), 0, later(5)), Ok((later(5), 1)));
        assert_eq!(changed(later(60), 0, later(90)), Ok((later(90), 1)));
        assert_eq!(changed(later(60), 0, later(60)), Ok((later(60), 0)), "repeated");
        assert_eq!(changed(None, 0, later(90)), Ok((later(90), 1)));
        // A paused one stays paused.
        assert_eq!(
            changed_if(RedriveState::Paused, later(60), 0, later(5)),
            Ok((later(5), 1))
        );
        // It has begun.
        let refused = |state| Err(RefusedChange::State(state));
        assert_eq!(changed(later(60), 1, None), Ok((later(60), 0)));
        assert_eq!(changed(later(60), 1, later(60)), Ok((later(60), 0)));
        assert_eq!(changed(later(60), 1, later(90)), refused(Running));
        assert_eq!(
            changed_if(RedriveState::Paused, None, 1, later(90)),
            refused(Paused)
        );
        assert_eq!(changed(None, 2, later(90)), refused(Succeeded));
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
    fn edit_is_stored_with_plan() {
        let Change::Plan(planned, items) = plan("r", 1) else {
            unreachable!("it is a plan");
        };
        let change = Change::Edit(planned, items[0].clone(), edit(3));
        let change = request(change, "token:ann");
        let decided = redeliver_store::Change::decide(&change, &Jobs::default(), ChangeId(7));
        let Ok(Decision::Write {
            document: planned,
            records,
            entry,
        }) = decided
        else {
            panic!("{decided:?}");
        };
        assert_eq!((planned.record.format, planned.is_edit()), (1, true));
        assert_eq!(planned.spec().edited, ["value"]);
        let audited = v1::AuditEntry::decode(entry.value.unwrap()).unwrap();
        assert_eq!(audited.details, "Redrive: edits value");
        let mut jobs = Jobs::default();
        read_again(records, &mut jobs);
        let id = planned.spec().id.clone();
        assert_eq!(jobs.get(&id).unwrap().edit(), Ok(Some(*edit(3))));
        // Starting it keeps the format.
        let start = Change::Job(id, None, JobChange::Start(None));
        assert_eq!(decide(start, &jobs).unwrap().0.record.format, 1);
    }

    #[test]
    fn job_id_is_recognised() {
        use super::super::is_job_id;
        assert!(is_job_id(&new_id(NOW, ChangeId(u128::MAX))));
        for other in ["", "0123456789abcdeF", "0123456789abcdef0", "customer-4711-xy"] {
            assert!(!is_job_id(other), "{other}");
        }
    }
}
