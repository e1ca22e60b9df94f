//! Changes of jobs by callers: plans, starts, pauses.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::{Headers, Output, Record, Timestamp, mutant};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::exclusive::{Decide, ExclusiveError};
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::{Message as _, v1};
use redeliver_service::audit::{Action, AuditLog, Author, Entry as AuditEntry, MAX_IDS};
use redeliver_service::followed::{Contents as _, Followed, FollowedWriter, change_id};

use super::job::{self, Item, Job, Wanted};
use super::jobs::{Entry, Jobs, Problem, job_key, plan_key};
use super::own_id;

/// The maximum number of jobs.
pub const MAX_JOBS: usize = 200;
/// The maximum number of dead letters in all plans: each inspector holds them in memory.
pub const MAX_TOTAL: u32 = 1_000_000;
/// A job that has ended is removed after this time, or earlier if there is no room.
pub const KEPT: Duration = Duration::from_secs(30 * 86_400);
/// A plan that was not started is as one that has ended after this time.
const PLAN_KEPT: Duration = Duration::from_secs(86_400);
/// The maximum number of jobs that one change removes without need.
const MAX_REMOVED: usize = 10;

/// A request.
#[derive(Clone, Debug)]
pub struct ChangeRequest {
    /// What to change.
    pub change: Change,
    /// Who wants it.
    pub by: Author,
    /// When.
    pub at: Timestamp,
}

/// What to change.
#[derive(Clone, Debug)]
pub enum Change {
    /// Adds a job. Its revision, run and author are those of the change.
    Plan(Box<v1::RedriveRecord>, Arc<[Item]>),
    /// Changes the job with this id, if it has the expected revision.
    Job(String, Option<u64>, JobChange),
}

/// How to change a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobChange {
    /// Starts it, perhaps later.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusedChange {
    /// There is no such job.
    Missing,
    /// It has another revision than the expected one.
    Revised(u64),
    /// The change makes no sense in this state.
    State(v1::RedriveState),
    /// This version would lose something of the job.
    Unknown(Problem),
    /// There is no room for another job.
    TooMany,
}

/// Why a change has failed.
pub type ChangeError = ExclusiveError<RefusedChange>;

/// Changes the topic that `jobs` follows. Cheap to clone.
#[derive(Clone)]
pub struct JobWriter {
    writer: FollowedWriter,
    audit: AuditLog,
    jobs: Followed<Jobs>,
}

impl JobWriter {
    /// A writer. Each change is recorded in the audit log, in the same transaction.
    #[must_use]
    pub fn new(kafka: &KafkaSettings, topic: &str, audit: AuditLog, jobs: Followed<Jobs>) -> Self {
        Self {
            writer: FollowedWriter::new(kafka, &own_id(topic), topic),
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
        let changing = self.writer.write(move |topic, id| PendingChange {
            request: pending.clone(),
            audit: audit.clone(),
            id,
            change_id: change_id(id),
            topic: topic.clone(),
            jobs: Jobs::default(),
        });
        let job = changing.await?;
        let (id, revision) = (job.spec().id.clone(), job.record.revision);
        let wanted = job.wanted;
        tracing::info!(id, revision, by = &*request.by.name, ?wanted, "redrive changed");
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
        // What a former attempt has written, whose outcome was unknown.
        let own = self
            .jobs
            .iter()
            .find(|(_, _, job)| job.record.change_id == self.change_id);
        if let Some((_, _, job)) = own {
            return Ok((job, Vec::new()));
        }
        match &self.request.change {
            Change::Plan(record, items) => self.plan(record, items),
            Change::Job(id, expected, change) => self.change(id, *expected, *change),
        }
    }
}

impl PendingChange {
    fn plan(&self, record: &v1::RedriveRecord, items: &[Item]) -> Result<(Job, Vec<Output>), RefusedChange> {
        let ChangeRequest { by, at, .. } = &*self.request;
        let same = self.jobs.of_request(&by.name, &record.request_id);
        if let Some(job) = same.filter(|_| !mutant!("redrive-forgets-requests")) {
            return Ok((job, Vec::new()));
        }
        let chunks = job::chunks(items);
        let mut record = record.clone();
        record.revision = 1;
        record.change_id = self.change_id.clone();
        record.anonymous = by.is_anonymous;
        record.chunks = u32::try_from(chunks.len()).unwrap_or(u32::MAX);
        if let Some(redrive) = &mut record.redrive {
            redrive.id = new_id(*at, self.id);
            redrive.created_by = by.name.to_string();
            redrive.created_at = Some(to_timestamp(*at));
        }
        let job = self.changed(record)?;
        let removed = removed(&self.jobs, job.spec().total, *at).ok_or(RefusedChange::TooMany)?;
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
            ..self.entry(&job, Action::PlanRedrive, format!("{:?}", job.kind))
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
            let problem = self.jobs.problems().get(&job_key(id)).copied();
            return Err(problem.map_or(RefusedChange::Missing, RefusedChange::Unknown));
        };
        let job = entry.job().ok_or(RefusedChange::Missing)?;
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
            redrive.changed_by = self.request.by.name.to_string();
            redrive.changed_at = Some(to_timestamp(self.request.at));
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
        // It was started before.
        (JobChange::Start(_), state) if state != Cancelled => return Ok(None),
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

/// The keys to remove, so that a job of this size fits; `None` if there is no room. Removes what has ended, oldest first.
fn removed(jobs: &Jobs, total: u32, now: Timestamp) -> Option<Vec<String>> {
    let all: Vec<_> = jobs.iter().collect();
    let mut count = all.len();
    let mut size = all
        .iter()
        .fold(total, |size, (_, entry, _)| size.saturating_add(entry.size()));
    let (mut keys, mut removed) = (Vec::new(), 0);
    for (id, entry, job) in all {
        let age = now.since(job.created_at());
        let has_ended = match job::state(&job, &entry.progress()) {
            v1::RedriveState::Planned => age > PLAN_KEPT,
            state => job::has_ended(state),
        };
        let is_needed = count >= MAX_JOBS || size > MAX_TOTAL;
        if has_ended && (is_needed || (age > KEPT && removed < MAX_REMOVED)) {
            keys.extend(entry.keys(id));
            count -= 1;
            size -= entry.size();
            removed += 1;
        }
    }
    (count < MAX_JOBS && size <= MAX_TOTAL).then_some(keys)
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
                by: Author {
                    name: "ann".into(),
                    is_anonymous: false,
                },
                at: NOW,
            }),
            audit: AuditLog::new(&Config::default(), "dlq-inspector"),
            id: 0x1_2345,
            change_id: change_id(0x1_2345),
            topic: TOPIC.into(),
            jobs,
        }
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
        assert_eq!(planned.spec().created_by, "ann");
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
            ..pending(plan("s", 9), jobs)
        };
        assert_eq!(other.decide().unwrap().0.spec().total, 9);
    }

    #[test]
    fn a_change_follows_from_the_state() {
        use v1::RedriveState::{Cancelled, Paused, Planned, Running, Succeeded};
        let after = |wanted, done: u32, change| {
            let mut jobs = jobs(2, wanted);
            let mut progress = Progress::default();
            (0..done).for_each(|_| progress.count(Outcome::Done));
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
    fn what_has_ended_makes_room_and_what_runs_stays() {
        let mut jobs = Jobs::default();
        for number in 0..MAX_JOBS {
            let id = format!("{number:04x}");
            let wanted = if number % 2 == 0 {
                Wanted::Cancelled
            } else {
                Wanted::Running
            };
            let mut written = job(3, wanted).record;
            let spec = written.redrive.as_mut().unwrap();
            spec.id.clone_from(&id);
            spec.created_at = Some(to_timestamp(NOW));
            jobs.apply(&record(&job_key(&id), Some(written.encode_to_vec().into())));
        }
        assert_eq!(removed(&jobs, 1, NOW), Some(vec!["job/0000".to_owned()]));
        // After a long time, some more.
        let later = NOW.after(KEPT + Duration::from_secs(1));
        assert_eq!(removed(&jobs, 1, later).unwrap().len(), MAX_REMOVED);
        let running: Jobs = {
            let mut running = Jobs::default();
            for (id, _, job) in jobs.iter() {
                let mut written = job.record.clone();
                written.wanted = v1::RedriveState::Running.into();
                running.apply(&record(&job_key(id), Some(written.encode_to_vec().into())));
            }
            running
        };
        assert_eq!(removed(&running, 1, later), None);
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
