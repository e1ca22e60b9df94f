//! What becomes of some dead letters of a job, and what is written: all of it in one transaction. No IO.

use std::sync::Arc;

use redeliver_core::failure::bounded_text;
use redeliver_core::{Headers, Output, Record, Timestamp, mutant};
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::{Message as _, v1};
use redeliver_service::audit::{Action, AuditEntry, AuditLog, MAX_IDS};

use super::edit::{Edit, edited};
use super::job::{self, Item, Job, Kind, Outcome, Progress};
use super::jobs::progress_key;
use super::omitted::Restored;
use super::outcomes::{Outcomes, Report};
use super::record::{Candidate, Destinations, redriven};
use crate::ledger::{self, State};
use crate::letter::content_hash;

/// The maximum length of a problem, and of the details of an audit entry, in bytes.
const MAX_TEXT: usize = 500;

/// What became of an item, and the record that is written for it.
#[derive(Clone, Debug)]
pub struct Tried {
    /// The item.
    pub item: Item,
    /// What became of it.
    pub outcome: Outcome,
    /// The record at the destination; only for a redrive that is done.
    pub output: Option<Output>,
}

/// What is known of a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// It exists.
    Exists,
    /// It does not exist.
    Missing,
    /// Kafka does not let this process see it.
    Denied,
}

/// What an item is tried with.
pub struct Context<'c> {
    /// The job.
    pub job: &'c Job,
    /// How the dead letter of the job is edited.
    pub edit: Option<&'c Edit>,
    /// Where dead letters may go.
    pub destinations: &'c Destinations,
    /// What was read at the origin of a dead letter that has no payload; `None` if nothing was.
    pub restored: &'c dyn Fn(&Record) -> Option<Restored>,
    /// Whether a topic exists.
    pub presence: &'c dyn Fn(&str) -> Presence,
    /// The time of the step.
    pub now: Timestamp,
}

/// What becomes of an item if the ledger permits it.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The item.
    pub item: Item,
    /// The timestamp of the dead letter, if it was read.
    dead_at: Option<Timestamp>,
    /// The record at its destination, if its job writes one; or why nothing can be done.
    made: Result<Option<Output>, Outcome>,
}

impl Prepared {
    /// Tries the item. `state` is what the ledger, read to its end, says of an item with this timestamp.
    #[must_use]
    pub fn tried(self, kind: Kind, state: impl FnOnce(&Item, Option<Timestamp>) -> State) -> Tried {
        let Self { item, dead_at, made } = self;
        let state = state(&item, dead_at);
        let is_taken = state == kind.takes() || mutant!("redrive-ignores-the-ledger");
        let decided = if is_taken {
            made
        } else {
            Err(job::skipped_in(state))
        };
        let (outcome, output) = match decided {
            Ok(output) => (Outcome::Done, output),
            Err(skip) => (skip, None),
        };
        Tried {
            item,
            outcome,
            output,
        }
    }
}

impl Context<'_> {
    /// Prepares an item. `found` is the record at its position.
    #[must_use]
    pub fn prepare(&self, item: Item, found: Option<&Record>) -> Prepared {
        let made = self.make(&item, found);
        let planned = found.filter(|found| content_hash(found) == item.content);
        let dead_at = planned.and_then(|found| found.timestamp);
        Prepared { item, dead_at, made }
    }

    fn make(&self, item: &Item, found: Option<&Record>) -> Result<Option<Output>, Outcome> {
        if self.job.kind != Kind::Redrive {
            // The entry has the hash of the content, so it applies to no other record.
            return Ok(None);
        }
        let found = found.ok_or(Outcome::Gone)?;
        if content_hash(found) != item.content && !mutant!("redrive-ignores-the-content") {
            return Err(Outcome::Changed);
        }
        let restored = (self.restored)(found).transpose()?;
        let whole = restored.as_ref().unwrap_or(found);
        if whole.unreadable_headers > 0 {
            return Err(Outcome::UnreadableHeaders);
        }
        let candidate = match &restored {
            Some(whole) => Candidate::restored(found, whole),
            None => Candidate::of(found),
        };
        let target = self.destinations.target(candidate, &self.job.target_options())?;
        // The configuration may have changed since the plan, for which the caller needed a scope for each destination.
        let mut planned = self.job.spec().destinations.iter();
        if !planned.any(|planned| *planned.topic == *target.topic) {
            return Err(Outcome::DestinationNotAllowed);
        }
        match (self.presence)(&target.topic) {
            Presence::Exists => {}
            Presence::Missing => return Err(Outcome::DestinationMissing),
            Presence::Denied => return Err(Outcome::DestinationDenied),
        }
        let id = &self.job.spec().id;
        Ok(Some(match self.edit {
            Some(edit) => edited(edit, whole, &target, id, self.now),
            None => redriven(whole, &target, id, self.now),
        }))
    }
}

/// A step of a job that was decided.
#[derive(Clone, Debug)]
pub struct Step {
    /// The job.
    pub job: Job,
    /// Its progress before.
    pub before: Progress,
    /// The outcomes of the chunk of the first item before.
    pub outcomes: Outcomes,
    /// The items, from `before.next`.
    pub tried: Vec<Tried>,
    /// How many records have come back, if they were counted.
    pub returned: Option<u32>,
    /// Whether all were known that had come back by the end of the observation.
    pub is_observation: bool,
    /// Why the job is auto-paused.
    pub auto_pause: Option<String>,
    /// Why nothing was tried; empty if nothing is wrong.
    pub problem: String,
    /// When it was decided.
    pub now: Timestamp,
}

/// What a step writes.
#[derive(Clone, Debug)]
pub struct Written {
    /// All records but the outcomes: first those at destinations.
    pub outputs: Vec<Output>,
    /// The index in [`Step::tried`] of each record at a destination.
    pub tried: Vec<usize>,
    /// The progress after it.
    pub progress: Progress,
    /// The outcomes, which are written in the same transaction once the positions of the records are known.
    pub report: Report,
}

impl Step {
    /// A step that does nothing but tell why nothing is done.
    #[must_use]
    pub fn of_problem(job: Job, before: Progress, problem: &str, now: Timestamp) -> Self {
        Self {
            job,
            before,
            outcomes: Outcomes::default(),
            tried: Vec::new(),
            returned: None,
            is_observation: false,
            auto_pause: None,
            problem: bounded_text(problem, MAX_TEXT),
            now,
        }
    }

    /// Pauses the job, because it is not known in time what comes back. Once it is resumed, it goes on; or it
    /// waits again if everything was tried, because it does not end before it is known.
    pub fn give_up_waiting(&mut self, reason: String) {
        self.is_observation = self.before.next < self.job.spec().total;
        self.auto_pause = Some(reason);
    }

    /// Ends the step with the last of this many items that are done.
    pub fn end_after(&mut self, max_done: u32) {
        let done = self
            .tried
            .iter()
            .enumerate()
            .filter(|(_, tried)| tried.outcome == Outcome::Done);
        let last = max_done
            .checked_sub(1)
            .and_then(|index| done.map(|(index, _)| index).nth(index as usize));
        if let Some(last) = last {
            self.tried.truncate(last + 1);
        }
    }

    /// The records of these items are not written, and this becomes of the items.
    pub fn give_up(&mut self, tried: &[usize], outcome: Outcome) {
        for index in tried {
            if let Some(tried) = self.tried.get_mut(*index) {
                tried.outcome = outcome;
                tried.output = None;
            }
        }
    }

    /// What is written.
    #[must_use]
    pub fn written(&self, topic: &Arc<str>, audit: &AuditLog) -> Written {
        let mut progress = self.before.clone();
        let (mut outputs, mut tried) = (Vec::new(), Vec::new());
        for (index, item) in self.tried.iter().enumerate() {
            job::count(&mut progress, item.outcome);
            if let Some(output) = &item.output {
                outputs.push(output.clone());
                tried.push(index);
            }
        }
        let is_done = |tried: &&Tried| tried.outcome == Outcome::Done;
        if !mutant!("redrive-without-ledger") {
            outputs.extend(self.tried.iter().filter(is_done).map(|tried| self.entry(tried)));
        }
        progress.problem.clone_from(&self.problem);
        if let Some(returned) = self.returned {
            progress.returned = returned;
        }
        if progress.done > self.before.done {
            progress.sent_at = Some(to_timestamp(self.now));
        }
        if self.is_observation {
            progress.observed = progress.done;
        }
        if let Some(auto_pause) = &self.auto_pause {
            progress.auto_paused_run = self.job.record.run;
            progress.auto_pause_reason.clone_from(auto_pause);
            (progress.auto_paused_done, progress.auto_paused_returned) = (progress.done, progress.returned);
        }
        let id = &self.job.spec().id;
        outputs.push(Output {
            topic: topic.clone(),
            partition: Some(0),
            key: Some(progress_key(id).into()),
            value: Some(progress.encode_to_vec().into()),
            headers: Headers::new(),
        });
        let destination = |tried: &Tried| tried.output.as_ref().map(|output| output.topic.clone());
        let items = self.tried.iter().map(|tried| (tried.outcome, destination(tried)));
        let report = Report {
            id: id.clone(),
            topic: topic.clone(),
            from: self.before.next,
            before: self.outcomes.clone(),
            items: items.collect(),
        };
        let done: Vec<&Tried> = self.tried.iter().filter(is_done).collect();
        outputs.extend(
            done.chunks(MAX_IDS)
                .map(|done| audit.record(self.audited(done), self.now)),
        );
        Written {
            outputs,
            tried,
            progress,
            report,
        }
    }

    /// The ledger entry of a dead letter that is done.
    fn entry(&self, tried: &Tried) -> Output {
        let spec = self.job.spec();
        let destination = tried.output.as_ref().map(|output| output.topic.to_string());
        let entry = v1::LedgerEntry {
            state: (self.job.kind.leaves() as i32),
            time: Some(to_timestamp(self.now)),
            by: spec.created_by.clone(),
            reason: spec.reason.clone(),
            content_hash: tried.item.content.to_vec().into(),
            redrive_id: spec.id.clone(),
            destination: destination.unwrap_or_default(),
            edited: spec.edited.clone(),
        };
        Output {
            topic: ledger::TOPIC.into(),
            partition: None,
            key: Some(tried.item.id.to_string().into()),
            value: Some(entry.encode_to_vec().into()),
            headers: Headers::new(),
        }
    }

    fn audited(&self, done: &[&Tried]) -> AuditEntry {
        let action = match self.job.kind {
            Kind::Redrive => Action::RedriveDeadLetters,
            Kind::Discard => Action::DiscardDeadLetters,
            Kind::Restore => Action::RestoreDeadLetters,
        };
        let spec = self.job.spec();
        let mut details = Vec::new();
        if !spec.edited.is_empty() {
            details.push(format!("edited {}", spec.edited.join(", ")));
        }
        if !spec.origins.is_empty() {
            let topics: Vec<&str> = spec.origins.iter().map(|origin| &*origin.topic).collect();
            details.push(format!("payloads read from {}", topics.join(", ")));
        }
        AuditEntry {
            target: spec.id.clone(),
            reason: spec.reason.clone(),
            details: bounded_text(&details.join("; "), MAX_TEXT),
            count: done.len() as u64,
            ids: done.iter().map(|tried| tried.item.id.to_string()).collect(),
            ..AuditEntry::new(self.job.author(), action)
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use redeliver_core::Pipeline;
    use redeliver_runtime::Config;
    use redeliver_testkit::record_at;

    use super::super::job::tests::{item, job};
    use super::super::job::{EDIT_FORMAT, RedriveState};
    use super::super::ledger_states::LedgerStates;
    use super::super::{job, pace};
    use super::*;
    use crate::ledger::Update;

    const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);

    fn found(offset: i64) -> Record {
        Record {
            timestamp: Some(NOW),
            value: Some(Bytes::from_static(b"v")),
            headers: [("kafka_dlt-original-topic", Some(&b"docs"[..]))]
                .into_iter()
                .collect(),
            ..record_at("s-dlt", 0, offset)
        }
    }

    fn planned(offset: i64) -> Item {
        Item {
            content: content_hash(&found(offset)),
            ..item("s-dlt", offset)
        }
    }

    fn kind_of(job: &Job, kind: v1::RedriveKind) -> Job {
        let mut record = job.record.clone();
        record.redrive.as_mut().unwrap().kind = kind.into();
        Job::read(record).unwrap()
    }

    fn to(destinations: &[&str], job: &Job) -> Job {
        let mut record = job.record.clone();
        let destinations = destinations.iter().map(|topic| v1::RedriveCount {
            topic: (*topic).to_owned(),
            count: 1,
        });
        record.redrive.as_mut().unwrap().destinations = destinations.collect();
        Job::read(record).unwrap()
    }

    fn destinations() -> Destinations {
        Destinations::new(&[Pipeline::new("docs")], &[], Vec::new(), 3)
    }

    /// Every destination exists.
    fn context<'a>(job: &'a Job, destinations: &'a Destinations) -> Context<'a> {
        Context {
            job,
            edit: None,
            restored: &|_| None,
            destinations,
            presence: &|_| Presence::Exists,
            now: NOW,
        }
    }

    #[test]
    fn only_planned_open_record_is_done() {
        let destinations = destinations();
        let job = to(&["docs"], &job(1, RedriveState::Running));
        let outcome = |kind, state, found: Option<&Record>, presence: Presence| {
            let job = kind_of(&job, kind);
            let context = Context {
                presence: &|_| presence,
                ..context(&job, &destinations)
            };
            context
                .prepare(planned(1), found)
                .tried(job.kind, |_, _| state)
                .outcome
        };
        let record = found(1);
        let redrive = |state, found, presence| outcome(v1::RedriveKind::Redrive, state, found, presence);
        let exists = Presence::Exists;
        assert_eq!(redrive(State::Open, Some(&record), exists), Outcome::Done);
        assert_eq!(redrive(State::Redriven, Some(&record), exists), Outcome::Redriven);
        assert_eq!(
            redrive(State::Discarded, Some(&record), exists),
            Outcome::Discarded
        );
        assert_eq!(redrive(State::Open, None, exists), Outcome::Gone);
        assert_eq!(
            redrive(State::Open, Some(&record), Presence::Missing),
            Outcome::DestinationMissing
        );
        assert_eq!(
            redrive(State::Open, Some(&record), Presence::Denied),
            Outcome::DestinationDenied
        );
        let other = Record {
            value: None,
            ..record.clone()
        };
        assert_eq!(redrive(State::Open, Some(&other), exists), Outcome::Changed);
        let unreadable = Record {
            unreadable_headers: 1,
            ..record.clone()
        };
        assert_eq!(
            redrive(State::Open, Some(&unreadable), exists),
            Outcome::UnreadableHeaders
        );
        let discard = |state| outcome(v1::RedriveKind::Discard, state, None, exists);
        assert_eq!(
            (discard(State::Open), discard(State::Redriven)),
            (Outcome::Done, Outcome::Redriven)
        );
        let restore = |state| outcome(v1::RedriveKind::Restore, state, None, exists);
        assert_eq!(
            (restore(State::Discarded), restore(State::Open)),
            (Outcome::Done, Outcome::Open)
        );
    }

    #[test]
    fn letter_of_2090_is_redriven_once() {
        const IN_2089: Timestamp = Timestamp::from_millis(3_755_376_000_000);
        const IN_2090: Timestamp = Timestamp::from_millis(3_786_912_000_000);
        let destinations = destinations();
        let job = to(&["docs"], &job(1, RedriveState::Running));
        let letter = Record {
            timestamp: Some(IN_2090),
            ..found(1)
        };
        let planned = Item {
            content: content_hash(&letter),
            ..item("s-dlt", 1)
        };
        let audit = AuditLog::new(&Config::default(), "dlq-inspector");
        let redrive = |states: &mut LedgerStates, now| {
            let context = Context {
                now,
                ..context(&job, &destinations)
            };
            let prepared = context.prepare(planned.clone(), Some(&letter));
            let tried = prepared.tried(job.kind, |item, dead_at| states.state(item, dead_at));
            let outcome = tried.outcome;
            let step = Step {
                tried: vec![tried],
                ..Step::of_problem(job.clone(), Progress::default(), "", now)
            };
            let outputs = step.written(&"redrives".into(), &audit).outputs;
            for output in outputs
                .into_iter()
                .filter(|output| *output.topic == *ledger::TOPIC)
            {
                let entry = Record {
                    timestamp: Some(now),
                    key: output.key,
                    value: output.value,
                    ..found(0)
                };
                states.apply(Update::read(&entry).unwrap());
            }
            outcome
        };
        let mut states = LedgerStates::default();
        assert_eq!(redrive(&mut states, NOW), Outcome::Done);
        // Kafka keeps it for so long, and so its entry stays, however old that is.
        for now in [NOW, IN_2089] {
            assert_eq!(states.removable(|_, _| 1, now, 1), []);
            assert_eq!(redrive(&mut states, now), Outcome::Redriven);
        }
    }

    #[test]
    fn unplanned_destination_is_not_written_to() {
        // The pipeline has another name for its source than when the plan was made.
        let destinations = destinations();
        let outcome = |planned_destinations: &[&str]| {
            let job = to(planned_destinations, &job(1, RedriveState::Running));
            let prepared = context(&job, &destinations).prepare(planned(1), Some(&found(1)));
            let tried = prepared.tried(job.kind, |_, _| State::Open);
            assert_eq!(tried.output.is_some(), tried.outcome == Outcome::Done);
            tried.outcome
        };
        assert_eq!(outcome(&["papers", "docs"]), Outcome::Done);
        for planned in [&["papers"][..], &[]] {
            assert_eq!(outcome(planned), Outcome::DestinationNotAllowed);
        }
    }

    #[test]
    fn edited_record_replaces_the_original() {
        let destinations = destinations();
        let mut record = to(&["docs"], &job(1, RedriveState::Running)).record;
        record.format = EDIT_FORMAT;
        record.redrive.as_mut().unwrap().edited = vec!["value".to_owned()];
        let job = Job::read(record).unwrap();
        let value = v1::EditedBytes {
            bytes: Some(Bytes::from_static(b"new")),
        };
        let edit = Edit::read(v1::RedriveEdit {
            value: Some(value),
            ..v1::RedriveEdit::default()
        });
        let context = Context {
            edit: edit.as_ref().ok(),
            ..context(&job, &destinations)
        };
        let tried = |state| {
            context
                .prepare(planned(1), Some(&found(1)))
                .tried(job.kind, |_, _| state)
        };
        let other = tried(State::Redriven);
        assert!(other.output.is_none(), "{other:?}");
        let step = Step {
            tried: vec![tried(State::Open)],
            ..Step::of_problem(job.clone(), Progress::default(), "", NOW)
        };
        let audit = AuditLog::new(&Config::default(), "dlq-inspector");
        let outputs = step.written(&"redrives".into(), &audit).outputs;
        assert_eq!(outputs[0].value.as_deref(), Some(&b"new"[..]));
        let entry = v1::LedgerEntry::decode(outputs[1].value.clone().unwrap()).unwrap();
        assert_eq!(
            (entry.state(), &*entry.edited),
            (v1::DeadLetterState::Redriven, &["value".to_owned()][..])
        );
        let audited = outputs.last().unwrap().value.clone().unwrap();
        assert_eq!(v1::AuditEntry::decode(audited).unwrap().details, "edited value");
    }

    #[test]
    fn step_writes_everything_in_one_transaction() {
        let destinations = destinations();
        let job = to(&["docs"], &job(502, RedriveState::Running));
        let context = context(&job, &destinations);
        let tried = vec![
            context
                .prepare(planned(1), Some(&found(1)))
                .tried(job.kind, |_, _| State::Open),
            context
                .prepare(planned(2), Some(&found(2)))
                .tried(job.kind, |_, _| State::Discarded),
        ];
        let before = Progress {
            next: 500,
            done: 500,
            ..Progress::default()
        };
        let mut step = Step {
            tried,
            returned: Some(7),
            ..Step::of_problem(job.clone(), before, "", NOW)
        };
        let audit = AuditLog::new(&Config::default(), "dlq-inspector");
        let topics = |written: &Written| -> Vec<String> {
            written
                .outputs
                .iter()
                .map(|output| output.topic.to_string())
                .collect()
        };
        let topic: Arc<str> = "redrives".into();
        let written = step.written(&topic, &audit);
        assert_eq!(
            topics(&written),
            ["docs", ledger::TOPIC, &topic, audit.topic()].map(str::to_owned)
        );
        assert_eq!(written.tried, [0]);
        let Progress {
            next,
            done,
            skipped,
            returned,
            ..
        } = written.progress;
        assert_eq!((next, done, skipped, returned), (502, 501, 1, 7));
        let chunks = written.report.chunks(&[Some((3, 70))]);
        let outcomes = Outcomes::read(chunks[0].1.clone());
        assert_eq!((chunks[0].0, outcomes.numbers()), (1, vec![1, 19]));
        assert_eq!(outcomes.written(0).unwrap().to_string(), "docs/3/70");
        assert_eq!(written.report.outputs(&chunks)[0].topic, topic);
        let entry = Record {
            key: written.outputs[1].key.clone(),
            value: written.outputs[1].value.clone(),
            ..found(0)
        };
        let update = Update::read(&entry).unwrap();
        assert_eq!(update.id, planned(1).id);
        let entry = update.entry.unwrap();
        assert_eq!(
            (entry.state, entry.content),
            (State::Redriven, Some(planned(1).content))
        );
        // The destination refuses the record: no entry says that it was redriven.
        step.give_up(&[0], Outcome::Failed);
        let written = step.written(&topic, &audit);
        assert_eq!(topics(&written), [&*topic].map(str::to_owned));
        assert_eq!(written.report.items[0], (Outcome::Failed, None));
        assert_eq!((written.progress.done, written.progress.failed), (500, 1));
        // This process may not write there.
        step.give_up(&[0], Outcome::DestinationDenied);
        let written = step.written(&topic, &audit);
        assert_eq!((written.progress.failed, written.progress.skipped), (0, 2));
    }

    #[test]
    fn step_ends_with_its_batch() {
        let tried = |outcome| Tried {
            item: planned(1),
            outcome,
            output: None,
        };
        let (done, skipped) = (tried(Outcome::Done), tried(Outcome::Gone));
        let tried = [&skipped, &done, &skipped, &done, &skipped].map(Tried::clone);
        for (max_done, expected) in [(1, 2), (2, 4), (3, 5), (u32::MAX, 5)] {
            let mut step = Step::of_problem(job(5, RedriveState::Running), Progress::default(), "", NOW);
            step.tried = tried.to_vec();
            step.end_after(max_done);
            assert_eq!(step.tried.len(), expected, "{max_done}");
        }
    }

    #[test]
    fn problem_ends_with_next_step() {
        let before = Progress {
            next: 10,
            done: 10,
            sent_at: Some(to_timestamp(NOW)),
            ..Progress::default()
        };
        let audit = AuditLog::new(&Config::default(), "dlq-inspector");
        let mut step = Step::of_problem(job(500, RedriveState::Running), before.clone(), "no index", NOW);
        let written = step.written(&"redrives".into(), &audit);
        assert_eq!((written.outputs.len(), written.report.chunks(&[])), (1, vec![]));
        let with_problem = Progress {
            problem: "no index".to_owned(),
            ..before.clone()
        };
        assert_eq!(written.progress, with_problem);
        assert!(job::is_consistent(&with_problem));
        step.before = with_problem;
        step.problem.clear();
        assert_eq!(step.written(&"redrives".into(), &audit).progress, before);
    }

    #[test]
    fn impatient_job_is_paused() {
        let audit = AuditLog::new(&Config::default(), "dlq-inspector");
        for (next, state_after) in [(10, "takes more"), (500, "observes")] {
            let before = Progress {
                next,
                done: next,
                sent_at: Some(to_timestamp(NOW)),
                ..Progress::default()
            };
            let mut step = Step::of_problem(job(500, RedriveState::Running), before, "", NOW);
            step.give_up_waiting("3 wait".to_owned());
            let progress = step.written(&"redrives".into(), &audit).progress;
            assert_eq!(job::state(&step.job, &progress), v1::RedriveState::Paused);
            assert_eq!(progress.auto_pause_reason, "3 wait");
            // It is resumed.
            step.job.record.run += 1;
            let next = match pace::next(&step.job, &progress, pace::Memory::default(), NOW) {
                pace::Next::Take(_) => "takes more",
                pace::Next::Observe => "observes",
                other => panic!("{other:?}"),
            };
            assert_eq!(next, state_after);
        }
    }

    #[test]
    fn auto_pause_is_of_one_run() {
        let before = Progress {
            next: 10,
            done: 10,
            ..Progress::default()
        };
        let step = Step {
            returned: Some(5),
            is_observation: true,
            auto_pause: Some("too many".to_owned()),
            ..Step::of_problem(job(500, RedriveState::Running), before, "", NOW)
        };
        let audit = AuditLog::new(&Config::default(), "dlq-inspector");
        let written = step.written(&"redrives".into(), &audit);
        assert_eq!((written.outputs.len(), written.report.chunks(&[])), (1, vec![]));
        assert_eq!(
            written.progress,
            Progress {
                next: 10,
                done: 10,
                returned: 5,
                auto_paused_run: 1,
                auto_pause_reason: "too many".to_owned(),
                auto_paused_done: 10,
                auto_paused_returned: 5,
                observed: 10,
                ..Progress::default()
            }
        );
    }
}
