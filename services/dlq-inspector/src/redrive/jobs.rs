//! What the topic of jobs contains.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::{Position, Record};
use redeliver_proto::{Message as _, v1};
use redeliver_service::identity::CallerName;
use redeliver_store::{Document as _, State, Table};

use super::edit::Edit;
use super::job::{self, CHUNK, InvalidValue, Item, Job, Kind, Outcome, Progress, RedriveState};
use super::outcomes::{Outcomes, outcomes_key};

/// All jobs, by id. Ids increase with the time. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Jobs {
    /// The jobs alone.
    pub table: Table<Job>,
    /// Those that can be read, and what else is known of a job.
    entries: BTreeMap<String, Arc<JobEntry>>,
}

/// What is known of a job. The encoded values take less memory than the decoded ones.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JobEntry {
    job: Option<Arc<Job>>,
    progress: Option<Bytes>,
    plan: BTreeMap<u32, Bytes>,
    outcomes: BTreeMap<u32, Bytes>,
}

/// Why a value is not, or only partially, applied.
pub type JobProblem = redeliver_store::DocumentProblem<Job>;

/// What a key names beside the job.
enum Part {
    Progress,
    Plan(u32),
    Outcomes(u32),
}

fn parse(key: &str) -> Option<(Part, &str)> {
    let (kind, rest) = key.split_once('/')?;
    let numbered = || {
        let (id, number) = rest.split_once('/')?;
        Some((id, number.parse().ok()?))
    };
    let (part, id) = match kind {
        "progress" => (Part::Progress, rest),
        "plan" => numbered().map(|(id, number)| (Part::Plan(number), id))?,
        "outcomes" => numbered().map(|(id, number)| (Part::Outcomes(number), id))?,
        _ => return None,
    };
    job::is_hex(id).then_some((part, id))
}

/// The key in a record.
fn key_of(record: &Record) -> Option<&str> {
    std::str::from_utf8(record.key.as_deref()?).ok()
}

/// The key of a job.
#[must_use]
pub fn job_key(id: &str) -> String {
    Job::record_key(&id.to_owned())
}

/// The key of a job's progress.
#[must_use]
pub fn progress_key(id: &str) -> String {
    format!("progress/{id}")
}

/// The key of a chunk of a job's plan.
#[must_use]
pub fn plan_key(id: &str, chunk: u32) -> String {
    format!("plan/{id}/{chunk}")
}

impl Jobs {
    /// What is known of a job; `None` if it does not exist or cannot be read.
    #[must_use]
    pub fn get(&self, id: &str) -> Option<&Arc<JobEntry>> {
        self.entries.get(id).filter(|entry| entry.job.is_some())
    }

    /// All jobs that can be read, oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (&str, &Arc<JobEntry>, Job)> {
        let entries = self.entries.iter();
        entries.filter_map(|(id, entry)| Some((id.as_str(), entry, entry.job()?)))
    }

    /// The job that a caller has planned with this request id; `None` without an id.
    #[must_use]
    pub fn of_request(&self, by: &CallerName, request_id: &str) -> Option<Job> {
        let is_same = |job: &Job| job.record.request_id == request_id && job.spec().created_by == by.as_str();
        let mut jobs = self.iter().map(|(_, _, job)| job);
        jobs.find(|job| !request_id.is_empty() && is_same(job))
    }

    /// The newest job that has written the record of a dead letter, and where; `None` if no job has, or if it is removed.
    #[must_use]
    pub fn redriven_by(&self, item: &Item) -> Option<(Job, Option<Position>)> {
        let mut jobs = self.iter().rev().filter(|(_, _, job)| {
            let sources = &job.spec().sources;
            job.kind == Kind::Redrive && sources.iter().any(|count| *count.topic == *item.id.topic)
        });
        jobs.find_map(|(_, entry, job)| {
            let (chunk, index) = entry.place_of(item)?;
            let outcomes = entry.outcomes(chunk);
            let is_done = outcomes.numbers().get(index) == Some(&job::number(Outcome::Done));
            is_done.then(|| (job, outcomes.written(index)))
        })
    }

    /// Applies a record as the executor does, which knows its own progress and outcomes: those that it reads are older or the same.
    pub(crate) fn apply_of_callers(&mut self, record: &Record) {
        let part = key_of(record).and_then(parse);
        let is_own = matches!(part, Some((Part::Progress | Part::Outcomes(_), _)));
        if !is_own || record.value.is_none() {
            self.apply(record);
        }
    }

    /// Takes note of what the executor has written.
    pub(crate) fn apply_own(&mut self, id: &str, progress: &Progress, outcomes: Vec<(u32, Bytes)>) {
        self.update(id, |entry| {
            entry.progress = Some(progress.encode_to_vec().into());
            entry.outcomes.extend(outcomes);
        });
    }

    /// An entry without anything is removed.
    fn update(&mut self, id: &str, update: impl FnOnce(&mut JobEntry)) {
        let entry = Arc::make_mut(self.entries.entry(id.to_owned()).or_default());
        update(entry);
        if *entry == JobEntry::default() {
            self.entries.remove(id);
        }
    }
}

impl JobEntry {
    /// The job; `None` if it cannot be read.
    #[must_use]
    pub fn job(&self) -> Option<Job> {
        self.job.as_deref().cloned()
    }

    /// Its progress.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.known_progress().unwrap_or_default()
    }

    /// Whether its recorded progress can be read. Otherwise, its effects are unknown.
    #[must_use]
    pub fn is_progress_known(&self) -> bool {
        self.progress.is_none() || self.known_progress().is_some()
    }

    fn known_progress(&self) -> Option<Progress> {
        let progress = Progress::decode(self.progress.clone()?).ok()?;
        job::is_consistent(&progress).then_some(progress)
    }

    /// Whether it makes no progress until it is cancelled, because its progress is unknown.
    fn is_stuck(&self) -> bool {
        let is_cancelled = |job: Job| job.wanted == RedriveState::Cancelled;
        !self.is_progress_known() && self.job().is_some_and(|job| !is_cancelled(job))
    }

    /// Why nothing is done for it at the moment; empty if nothing is wrong.
    #[must_use]
    pub fn problem(&self) -> String {
        match self.job() {
            Some(job) if self.is_stuck() => {
                let key = progress_key(&job.spec().id);
                format!(
                    "its record `{key}` cannot be read, so its effects are unknown; cancel it, and plan it again"
                )
            }
            Some(job) => {
                let progress = self.progress();
                let is_running = job::state(&job, &progress) == v1::RedriveState::Running;
                if is_running {
                    progress.problem
                } else {
                    String::new()
                }
            }
            None => String::new(),
        }
    }

    /// The items of a chunk of its plan; `None` if the chunk is missing or cannot be read.
    #[must_use]
    pub fn items(&self, chunk: u32) -> Option<Vec<Item>> {
        let chunk = v1::RedrivePlanChunk::decode(self.plan.get(&chunk)?.clone()).ok()?;
        job::items(&chunk).ok()
    }

    /// The number of dead letters in its plan, as an upper limit.
    #[must_use]
    pub fn size(&self) -> usize {
        self.plan.len() * CHUNK as usize
    }

    /// The chunk of its plan that has an item, and the place of the item in it. Plans are in the order of ids.
    fn place_of(&self, item: &Item) -> Option<(u32, usize)> {
        let (mut from, mut to) = (0, u32::try_from(self.plan.len()).unwrap_or(u32::MAX));
        while from < to {
            let middle = from + (to - from) / 2;
            let items = self.items(middle)?;
            if items.last().is_none_or(|last| last.id < item.id) {
                from = middle + 1;
            } else if items.first().is_some_and(|first| first.id > item.id) {
                to = middle;
            } else {
                let index = items.iter().position(|found| found == item)?;
                return Some((middle, index));
            }
        }
        None
    }

    /// How the dead letter of the plan is edited; `None` if it is not.
    ///
    /// # Errors
    /// If the plan is missing, or the edit is not one that [`Edit::read`] accepts.
    pub fn edit(&self) -> Result<Option<Edit>, InvalidValue> {
        let chunk = self.plan.get(&0).cloned().map(v1::RedrivePlanChunk::decode);
        let chunk = chunk.and_then(Result::ok).ok_or(InvalidValue::Malformed)?;
        let edit = chunk.edit.map(Edit::read).transpose();
        edit.map_err(|_| InvalidValue::Malformed)
    }

    /// The size of what is stored for its edit, in bytes; 0 if there is none.
    #[must_use]
    pub fn edit_bytes(&self) -> usize {
        let is_edit = self.job().is_some_and(|job| job.is_edit());
        let chunks = self.plan.values().filter(|_| is_edit);
        chunks.map(Bytes::len).sum()
    }

    /// The items with these numbers; `None` if one of them is missing or cannot be read.
    #[must_use]
    pub fn items_in(&self, numbers: Range<u32>) -> Option<Vec<Item>> {
        let mut found = Vec::with_capacity(numbers.len());
        let chunks = numbers.start / CHUNK..numbers.end.div_ceil(CHUNK);
        for chunk in chunks {
            let first = chunk * CHUNK;
            let wanted = numbers.start.max(first)..numbers.end.min(first + CHUNK);
            let wanted = (wanted.start - first) as usize..(wanted.end - first) as usize;
            found.extend_from_slice(self.items(chunk)?.get(wanted)?);
        }
        Some(found)
    }

    /// The outcomes of a chunk, as far as they are known.
    #[must_use]
    pub fn outcomes(&self, chunk: u32) -> Outcomes {
        let value = self.outcomes.get(&chunk).cloned();
        value.map(Outcomes::read).unwrap_or_default()
    }

    /// Where its records were written, as far as it is known.
    #[must_use]
    pub fn written(&self) -> Vec<Position> {
        let outcomes = self.outcomes.values().cloned().map(Outcomes::read);
        outcomes
            .flat_map(|outcomes| outcomes.positions().collect::<Vec<_>>())
            .collect()
    }

    /// The keys of all its values.
    #[must_use]
    pub fn keys(&self, id: &str) -> Vec<String> {
        let mut keys = vec![job_key(id)];
        if self.progress.is_some() {
            keys.push(progress_key(id));
        }
        keys.extend(self.plan.keys().map(|chunk| plan_key(id, *chunk)));
        keys.extend(self.outcomes.keys().map(|chunk| outcomes_key(id, *chunk)));
        keys
    }
}

impl State for Jobs {
    type Document = Job;

    const TOPIC: &'static str = "topic of redrives";
    const NAME: &'static str = "dlq_redrives";
    // Without it, there are no jobs.
    const IS_OPTIONAL: bool = true;

    fn table(&self) -> &Table<Job> {
        &self.table
    }

    fn apply(&mut self, record: &Record) {
        let (key, value) = (key_of(record), record.value.clone());
        let Some((part, id)) = key.and_then(parse) else {
            self.table.apply_record(record);
            if let Some(id) = key.and_then(Job::parse_key) {
                let job = self.table.get(&id).cloned();
                self.update(&id, |entry| entry.job = job);
            }
            return;
        };
        let set = |chunks: &mut BTreeMap<u32, Bytes>, number, value| match value {
            Some(value) => drop(chunks.insert(number, value)),
            None => drop(chunks.remove(&number)),
        };
        self.update(id, |entry| match part {
            Part::Progress => entry.progress = value,
            Part::Plan(number) => set(&mut entry.plan, number, value),
            Part::Outcomes(number) => set(&mut entry.outcomes, number, value),
        });
    }

    fn problems(&self) -> BTreeMap<String, JobProblem> {
        let mut problems = self.table.document_problems();
        let stuck = self.entries.iter().filter(|(_, entry)| entry.is_stuck());
        let malformed = JobProblem::Unreadable(InvalidValue::Malformed);
        problems.extend(stuck.map(|(id, _)| (progress_key(id), malformed.clone())));
        problems
    }

    fn log_changes(&self, topic: &str, before: &Self) {
        let has_ended = |id: &str, job| {
            let progress = before.entries.get(id).map(|entry| entry.progress());
            job::has_ended(job::state(job, &progress.unwrap_or_default()))
        };
        let lost = self
            .table
            .lost(&before.table)
            .filter(|(id, job)| !has_ended(id, job));
        let jobs = lost.count();
        if jobs > 0 {
            tracing::warn!(topic, jobs, "unfinished redrives lost");
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use redeliver_testkit::record;

    use super::super::job::tests::{item, job};
    use super::*;

    /// A job `1f` with a plan of this many items.
    pub(crate) fn jobs(total: u32, wanted: RedriveState) -> Jobs {
        let mut jobs = Jobs::default();
        let planned: Vec<Item> = (0..i64::from(total))
            .map(|offset| item("a-dlq", offset))
            .collect();
        for (chunk, value) in (0..).zip(job::chunks(&planned)) {
            jobs.apply(&record(
                &plan_key("1f", chunk),
                Some(value.encode_to_vec().into()),
            ));
        }
        let mut written = job(total, wanted).record;
        if let Some(redrive) = &mut written.redrive {
            redrive.id = "1f".to_owned();
        }
        jobs.apply(&record(&job_key("1f"), Some(written.encode_to_vec().into())));
        jobs
    }

    #[test]
    fn job_keeps_its_parts_until_removed() {
        let mut jobs = jobs(501, RedriveState::Running);
        let entry = jobs.get("1f").unwrap();
        assert_eq!(entry.items(1).unwrap(), [item("a-dlq", 500)]);
        assert_eq!((entry.items(2), entry.progress()), (None, Progress::default()));
        let offsets = |numbers| -> Option<Vec<i64>> {
            let items = entry.items_in(numbers)?;
            Some(items.iter().map(|item| item.id.offset).collect())
        };
        assert_eq!(offsets(498..501), Some(vec![498, 499, 500]));
        assert_eq!(
            (offsets(500..501), offsets(3..5)),
            (Some(vec![500]), Some(vec![3, 4]))
        );
        assert_eq!((offsets(499..502), offsets(7..7)), (None, Some(vec![])));
        let mut progress = Progress::default();
        job::count(&mut progress, Outcome::Done);
        let outcomes = v1::RedriveOutcomes {
            outcomes: vec![1].into(),
            ..v1::RedriveOutcomes::default()
        };
        jobs.apply_own("1f", &progress, vec![(0, outcomes.encode_to_vec().into())]);
        // What the executor reads of its own is not newer than what it knows.
        jobs.apply_of_callers(&record(
            "progress/1f",
            Some(Progress::default().encode_to_vec().into()),
        ));
        let entry = jobs.get("1f").unwrap().clone();
        assert_eq!(
            (entry.progress(), entry.outcomes(0).numbers()),
            (progress, vec![1])
        );
        for key in entry.keys("1f") {
            assert_ne!(jobs, Jobs::default());
            jobs.apply_of_callers(&record(&key, None));
        }
        assert_eq!(jobs, Jobs::default());
    }

    #[test]
    fn job_of_redriven_letter_is_found() {
        let mut jobs = jobs(1_201, RedriveState::Running);
        let mut written = jobs.get("1f").unwrap().job().unwrap().record;
        written.redrive.as_mut().unwrap().sources = vec![v1::RedriveCount {
            topic: "a-dlq".to_owned(),
            count: 1_201,
        }];
        jobs.apply(&record(&job_key("1f"), Some(written.encode_to_vec().into())));
        let outcomes = v1::RedriveOutcomes {
            outcomes: vec![job::number(Outcome::Done), job::number(Outcome::Failed)].into(),
            topics: vec!["out".to_owned()],
            written_topics: vec![1, 0],
            written_partitions: vec![3, 0],
            written_offsets: vec![17, 0],
        };
        for chunk in 0..3 {
            let outcomes: Bytes = outcomes.encode_to_vec().into();
            jobs.apply(&record(&outcomes_key("1f", chunk), Some(outcomes)));
        }
        let found = |item: &Item| {
            let (job, written) = jobs.redriven_by(item)?;
            Some((job.spec().id.clone(), written.map(|written| written.to_string())))
        };
        for offset in [0, 500, 1_000] {
            let expected = Some(("1f".to_owned(), Some("out/3/17".to_owned())));
            assert_eq!(found(&item("a-dlq", offset)), expected, "{offset}");
        }
        // Failed, not tried, not in the plan, of another topic, and another record at the position.
        let other = Item {
            content: [201; 16],
            ..item("a-dlq", 0)
        };
        for item in [
            item("a-dlq", 501),
            item("a-dlq", 502),
            item("a-dlq", 1_201),
            item("b-dlq", 0),
            other,
        ] {
            assert_eq!(found(&item), None, "{item:?}");
        }
    }

    #[test]
    fn unreadable_jobs_are_reported() {
        let mut jobs = Jobs::default();
        jobs.apply(&record("job/1f", Some(Bytes::from_static(b"\xff"))));
        let newer = v1::RedriveRecord {
            format: 3,
            ..job(1, RedriveState::Running).record
        };
        jobs.apply(&record("job/2f", Some(newer.encode_to_vec().into())));
        // An edit whose parts are not named would be redriven as it is.
        let nameless = v1::RedriveRecord {
            format: 1,
            ..job(1, RedriveState::Running).record
        };
        jobs.apply(&record("job/3f", Some(nameless.encode_to_vec().into())));
        jobs.apply(&record("task/1", Some(Bytes::new())));
        assert_eq!((jobs.table.count(), jobs.get("1f")), (0, None));
        let problems: Vec<(String, String)> = jobs
            .problems()
            .into_iter()
            .map(|(key, problem)| (key, problem.to_string()))
            .collect();
        let expected = [
            ("job/1f", "cannot be read"),
            ("job/2f", "was written by a newer version"),
            ("job/3f", "cannot be read"),
            ("task/1", "is of an unknown kind, and ignored"),
        ];
        assert_eq!(
            problems,
            expected.map(|(key, problem)| (key.to_owned(), problem.to_owned()))
        );
        let progress = v1::RedriveProgress {
            next: 2,
            ..v1::RedriveProgress::default()
        };
        let broken = JobEntry {
            progress: Some(progress.encode_to_vec().into()),
            ..JobEntry::default()
        };
        assert!(!broken.is_progress_known());
    }

    #[test]
    fn unreadable_progress_is_reported_until_cancelled() {
        let unreadable = record("progress/1f", Some(Bytes::from_static(b"\xff")));
        for wanted in [
            RedriveState::Planned,
            RedriveState::Running,
            RedriveState::Paused,
            RedriveState::Cancelled,
        ] {
            let mut jobs = jobs(2, wanted);
            assert_eq!(jobs.get("1f").unwrap().problem(), "");
            jobs.apply(&unreadable);
            let problems = jobs.problems();
            let problem = jobs.get("1f").unwrap().problem();
            assert_eq!(jobs.table.problem("1f"), None);
            if wanted == RedriveState::Cancelled {
                assert_eq!((problems.len(), &*problem), (0, ""));
                continue;
            }
            assert_eq!(problems["progress/1f"].to_string(), "cannot be read");
            assert!(problem.contains("`progress/1f` cannot be read"), "{problem}");
        }
        // What compaction has kept of a job that was removed.
        let mut jobs = Jobs::default();
        jobs.apply(&unreadable);
        assert_eq!(jobs.problems().len(), 0);
    }
}
