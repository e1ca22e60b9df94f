//! Makes room for a new job: which jobs are removed, and which job keeps what the automatic ones of them have not done. No IO.
//!
//! Of each pipeline with automatic jobs, one job is the carrier: the new job, or the newest one of the pipeline, which is not removed. It keeps what removed jobs
//! have not done, in further chunks of its plan.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::Timestamp;
use redeliver_proto::v1;

use super::automatic::{self, MAX_LEFT};
use super::change::RefusedChange;
use super::job::{self, CHUNK, Item, Job};
use super::jobs::{Entry, Jobs, plan_key};

/// The maximum number of jobs.
pub const MAX_JOBS: usize = 200;
/// The maximum number of dead letters in all plans: each inspector holds them in memory.
pub const MAX_TOTAL: u32 = 1_000_000;
/// The maximum size of all edits, in bytes: each inspector holds them in memory.
pub const MAX_EDIT_BYTES: usize = 64 << 20;
/// A job that has ended is removed after this time, or earlier if there is no room.
pub const KEPT: Duration = Duration::from_secs(30 * 86_400);
/// A plan that was not started is as one that has ended after this time.
const PLAN_KEPT: Duration = Duration::from_secs(86_400);
/// The maximum number of jobs that one change removes without need.
const MAX_REMOVED: usize = 10;

/// A new job, and how much it takes of what is limited for all jobs together.
#[derive(Clone, Copy, Debug)]
pub struct New<'n> {
    /// The pipeline of which it is an automatic job; empty if it is none.
    pub pipeline: &'n str,
    /// The number of its dead letters.
    pub letters: u32,
    /// The size of its edit.
    pub edit_bytes: usize,
}

/// The changes that make room.
#[derive(Debug, Default, PartialEq)]
pub struct Room {
    /// The keys to remove.
    pub removed: Vec<String>,
    /// Further chunks of the plans of other jobs, with their keys.
    pub chunks: Vec<(String, v1::RedrivePlanChunk)>,
    /// What earlier automatic jobs of the pipeline have left: the new job keeps it in further chunks.
    pub left: Vec<Item>,
}

/// Makes room for a new job. Of what has ended, removes what is superseded, some of what is old, and as much as is needed: automatic jobs before those of
/// callers, oldest first.
///
/// # Errors
/// If there is no room.
pub fn make(jobs: &Jobs, new: New<'_>, now: Timestamp) -> Result<Room, RefusedChange> {
    let superseded = automatic::superseded(new.pipeline, jobs);
    let mut plan = Plan::new(jobs, new, now);
    plan.remove_if(|plan, known| {
        let is_old = known.age > KEPT && plan.removed < MAX_REMOVED;
        is_old || superseded.contains(known.id)
    });
    plan.remove_if(|plan, known| known.is_automatic() && plan.is_full());
    plan.remove_if(|plan, known| {
        plan.is_full() || (known.entry.edit_bytes() > 0 && plan.has_too_many_edits())
    });
    if plan.is_full() {
        return Err(RefusedChange::TooMany);
    }
    if plan.has_too_many_edits() {
        return Err(RefusedChange::TooManyEdits);
    }
    Ok(plan.room())
}

/// A job that exists.
struct Known<'j> {
    id: &'j str,
    entry: &'j Arc<Entry>,
    job: Job,
    age: Duration,
    is_removed: bool,
}

impl Known<'_> {
    fn pipeline(&self) -> &str {
        &self.job.spec().automatic_pipeline
    }

    fn is_automatic(&self) -> bool {
        !self.pipeline().is_empty()
    }

    fn has_ended(&self) -> bool {
        match job::state(&self.job, &self.entry.progress()) {
            v1::RedriveState::Planned => self.age > PLAN_KEPT,
            state => job::has_ended(state),
        }
    }

    /// The numbers of the chunks of its plan with what earlier jobs have left.
    fn further(&self) -> impl Iterator<Item = u32> {
        let own = self.job.record.chunks;
        self.entry.chunks().filter(move |chunk| *chunk >= own)
    }

    /// The number of its own dead letters, as an upper limit.
    fn own_size(&self) -> usize {
        (self.entry.chunks().count() - self.further().count()) * CHUNK as usize
    }

    /// What earlier jobs have left, as far as this job keeps it.
    fn kept(&self) -> Vec<Item> {
        let chunks = self.further();
        chunks
            .flat_map(|chunk| self.entry.items(chunk).unwrap_or_default())
            .collect()
    }
}

/// The automatic jobs of a pipeline.
#[derive(Default)]
struct Automatic {
    /// The index of the job that keeps what others have left; `None`: the new job.
    carrier: Option<usize>,
    /// The number of dead letters that are left.
    left: usize,
    has_removed: bool,
}

impl Automatic {
    /// The number of dead letters that the carrier keeps, as an upper limit.
    fn size(&self) -> usize {
        self.left.min(MAX_LEFT).next_multiple_of(CHUNK as usize)
    }
}

/// What is removed, as far as it is decided.
struct Plan<'j> {
    /// Oldest first.
    jobs: Vec<Known<'j>>,
    pipelines: BTreeMap<String, Automatic>,
    is_edit: bool,
    /// How much there would be with the new job. Of `letters`, without what carriers keep.
    count: usize,
    letters: usize,
    edit_bytes: usize,
    removed: usize,
}

impl<'j> Plan<'j> {
    fn new(jobs: &'j Jobs, new: New<'_>, now: Timestamp) -> Self {
        let known = jobs.iter().map(|(id, entry, job)| Known {
            id,
            entry,
            age: now.since(job.created_at()),
            job,
            is_removed: false,
        });
        let jobs: Vec<Known<'_>> = known.collect();
        let mut pipelines: BTreeMap<String, Automatic> = BTreeMap::new();
        for (index, known) in jobs.iter().enumerate().filter(|(_, known)| known.is_automatic()) {
            let pipeline = pipelines.entry(known.pipeline().to_owned()).or_default();
            pipeline.carrier = (known.pipeline() != new.pipeline).then_some(index);
            pipeline.left += known.kept().len();
        }
        let letters: usize = jobs.iter().map(Known::own_size).sum();
        let edit_bytes: usize = jobs.iter().map(|known| known.entry.edit_bytes()).sum();
        Self {
            pipelines,
            is_edit: new.edit_bytes > 0,
            count: jobs.len() + 1,
            letters: letters + new.letters as usize,
            edit_bytes: edit_bytes + new.edit_bytes,
            removed: 0,
            jobs,
        }
    }

    fn is_full(&self) -> bool {
        let kept: usize = self.pipelines.values().map(Automatic::size).sum();
        self.count > MAX_JOBS || self.letters + kept > MAX_TOTAL as usize
    }

    fn has_too_many_edits(&self) -> bool {
        self.is_edit && self.edit_bytes > MAX_EDIT_BYTES
    }

    /// Removes those of which this is true, oldest first, as far as they have ended and are no carriers.
    fn remove_if(&mut self, is_removed: impl Fn(&Self, &Known<'j>) -> bool) {
        for index in 0..self.jobs.len() {
            let known = &self.jobs[index];
            if !known.is_removed && is_removed(self, known) && !self.is_carrier(index) && known.has_ended() {
                self.remove(index);
            }
        }
    }

    fn is_carrier(&self, index: usize) -> bool {
        let pipeline = self.pipelines.get(self.jobs[index].pipeline());
        pipeline.is_some_and(|pipeline| pipeline.carrier == Some(index))
    }

    fn remove(&mut self, index: usize) {
        let known = &mut self.jobs[index];
        known.is_removed = true;
        self.removed += 1;
        self.count -= 1;
        self.letters -= known.own_size();
        self.edit_bytes -= known.entry.edit_bytes();
        if let Some(pipeline) = self.pipelines.get_mut(known.pipeline()) {
            pipeline.left += automatic::not_done(known.entry, &known.job).len();
            pipeline.has_removed = true;
        }
    }

    fn room(self) -> Room {
        let mut room = Room::default();
        for (name, pipeline) in &self.pipelines {
            match pipeline.carrier {
                None => room.left = self.left(name),
                Some(carrier) if pipeline.has_removed => {
                    let known = &self.jobs[carrier];
                    let numbered = (known.job.record.chunks..).zip(job::chunks(&self.left(name)));
                    let keyed = numbered.map(|(number, chunk)| (plan_key(known.id, number), chunk));
                    room.chunks.extend(keyed);
                }
                Some(_) => continue,
            }
            // What others have kept so far is kept by the carrier now.
            let others = self.jobs.iter().filter(|known| known.pipeline() == name);
            for known in others.filter(|known| !known.is_removed) {
                room.removed
                    .extend(known.further().map(|chunk| plan_key(known.id, chunk)));
            }
        }
        let written: BTreeSet<&String> = room.chunks.iter().map(|(key, _)| key).collect();
        room.removed.retain(|key| !written.contains(key));
        let removed = self.jobs.iter().filter(|known| known.is_removed);
        room.removed
            .extend(removed.flat_map(|known| known.entry.keys(known.id)));
        room
    }

    /// What the carrier of a pipeline keeps: what others have kept, and what those that are removed now have not done.
    fn left(&self, pipeline: &str) -> Vec<Item> {
        let jobs = || self.jobs.iter().filter(|known| known.pipeline() == pipeline);
        let removed = jobs().filter(|known| known.is_removed);
        let not_done = removed.flat_map(|known| automatic::not_done(known.entry, &known.job));
        let mut left: Vec<Item> = jobs().flat_map(Known::kept).chain(not_done).collect();
        left.drain(..left.len().saturating_sub(MAX_LEFT));
        left
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use redeliver_proto::Message as _;
    use redeliver_proto::convert::to_timestamp;
    use redeliver_service::followed::Contents as _;

    use super::super::edit::Edit;
    use super::super::job::Wanted;
    use super::super::job::tests::{item, job};
    use super::super::jobs::job_key;
    use super::super::jobs::tests::record;
    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);

    const ONE: New<'_> = New {
        pipeline: "",
        letters: 1,
        edit_bytes: 0,
    };

    fn removed(jobs: &Jobs, new: New<'_>, now: Timestamp) -> Result<Vec<String>, RefusedChange> {
        make(jobs, new, now).map(|room| room.removed)
    }

    fn of_pipeline(pipeline: &str) -> New<'_> {
        New { pipeline, ..ONE }
    }

    /// An automatic job that was cancelled before it did anything. It keeps what others have left.
    fn add(jobs: &mut Jobs, pipeline: &str, id: &str, own: Range<i64>, kept: Range<i64>) {
        let items =
            |offsets: Range<i64>| -> Vec<Item> { offsets.map(|offset| item("docs-dlq", offset)).collect() };
        let mut written = job(1, Wanted::Cancelled).record;
        let own = job::chunks(&items(own));
        written.chunks = u32::try_from(own.len()).unwrap();
        let spec = written.redrive.as_mut().unwrap();
        spec.id = id.to_owned();
        spec.automatic_pipeline = pipeline.to_owned();
        spec.created_at = Some(to_timestamp(NOW));
        written.format = job::format_of(spec);
        for (number, chunk) in (0..).zip(own.into_iter().chain(job::chunks(&items(kept)))) {
            jobs.apply(&record(&plan_key(id, number), Some(chunk.encode_to_vec().into())));
        }
        jobs.apply(&record(&job_key(id), Some(written.encode_to_vec().into())));
    }

    /// Makes room for a job of somebody, and reads what is written.
    fn make_room(jobs: &mut Jobs, now: Timestamp) {
        let room = make(jobs, ONE, now).unwrap();
        for (key, chunk) in room.chunks {
            jobs.apply(&record(&key, Some(chunk.encode_to_vec().into())));
        }
        for key in room.removed {
            jobs.apply(&record(&key, None));
        }
        assert_eq!(room.left, []);
    }

    fn offsets(items: impl IntoIterator<Item = Item>) -> Vec<i64> {
        items.into_iter().map(|item| item.id.offset).collect()
    }

    /// The jobs of a pipeline with the dead letters that no automatic job takes because of them.
    fn taken(jobs: &Jobs, pipeline: &str) -> Vec<(String, Vec<i64>)> {
        let of_pipeline = jobs
            .iter()
            .filter(|(_, _, job)| job.spec().automatic_pipeline == pipeline);
        let taken = of_pipeline.map(|(id, entry, _)| {
            let chunks = entry.chunks();
            (
                id.to_owned(),
                offsets(chunks.flat_map(|chunk| entry.items(chunk).unwrap())),
            )
        });
        taken.collect()
    }

    #[test]
    fn what_old_automatic_jobs_have_not_done_stays_known() {
        let mut jobs = Jobs::default();
        for (id, offset) in [("1", 1), ("2", 2), ("3", 3)] {
            add(&mut jobs, "docs", id, offset..offset + 1, 0..0);
        }
        let later = NOW.after(KEPT + Duration::from_secs(1));
        make_room(&mut jobs, NOW);
        assert_eq!(taken(&jobs, "docs").len(), 3);
        for _ in 0..2 {
            make_room(&mut jobs, later);
            assert_eq!(taken(&jobs, "docs"), [("3".to_owned(), vec![3, 1, 2])]);
        }
        // The next job of the pipeline keeps it from then on.
        let room = make(&jobs, of_pipeline("docs"), later).unwrap();
        assert_eq!(offsets(room.left), [1, 2, 3]);
        assert_eq!(room.removed, jobs.get("3").unwrap().keys("3"));
        assert_eq!(room.chunks, []);
    }

    #[test]
    fn without_room_fewer_automatic_jobs_are_kept_but_what_they_have_not_done() {
        let mut jobs = Jobs::default();
        let per_pipeline = i64::try_from(MAX_JOBS).unwrap() / 2 - 1;
        // Jobs of callers stay as long as there are others.
        add(&mut jobs, "", "0001", 0..1, 0..0);
        add(&mut jobs, "", "0002", 0..1, 0..0);
        for number in 0..per_pipeline {
            add(
                &mut jobs,
                "docs",
                &format!("a{number:03}"),
                number..number + 1,
                0..0,
            );
            add(
                &mut jobs,
                "mail",
                &format!("b{number:03}"),
                number..number + 1,
                0..0,
            );
        }
        make_room(&mut jobs, NOW);
        assert_eq!(jobs.iter().count(), MAX_JOBS - 1);
        let expected = |last: i64, taken: Vec<i64>| (format!("a{last:03}"), taken);
        let of_docs = taken(&jobs, "docs");
        assert_eq!(of_docs.first(), Some(&expected(1, vec![1])));
        assert_eq!(
            of_docs.last(),
            Some(&expected(per_pipeline - 1, vec![per_pipeline - 1, 0]))
        );
        // Other jobs of callers take their place, until each pipeline has one job.
        for number in 0..2 * per_pipeline - 1 {
            make_room(&mut jobs, NOW);
            add(&mut jobs, "", &format!("c{number:03}"), 0..1, 0..0);
        }
        for pipeline in ["docs", "mail"] {
            let taken = taken(&jobs, pipeline);
            assert_eq!(taken.len(), 1, "{pipeline}");
            let mut offsets = taken[0].1.clone();
            offsets.sort_unstable();
            assert_eq!(offsets, (0..per_pipeline).collect::<Vec<_>>());
        }
        assert!(jobs.get("0001").is_none() && jobs.get("0002").is_some());
        let mut full = Jobs::default();
        for number in 0..MAX_JOBS {
            add(
                &mut full,
                &format!("p{number}"),
                &format!("{number:04}"),
                0..1,
                0..0,
            );
        }
        assert_eq!(make(&full, ONE, NOW), Err(RefusedChange::TooMany));
    }

    #[test]
    fn what_is_left_of_a_pipeline_is_bounded_and_takes_room_once() {
        let mut jobs = Jobs::default();
        add(&mut jobs, "docs", "1", 0..1, 1..6_000);
        add(&mut jobs, "docs", "2", 6_000..6_001, 7_000..13_000);
        let room = make(&jobs, of_pipeline("docs"), NOW).unwrap();
        let all = (1..6_000).chain(7_000..13_000);
        assert_eq!(offsets(room.left), all.skip(1_999).collect::<Vec<_>>());
        // The jobs stay, without what the new one keeps.
        let further = |id: &'static str| (1..=12).map(move |chunk| plan_key(id, chunk));
        assert_eq!(room.removed, further("1").chain(further("2")).collect::<Vec<_>>());
        // It takes part in the limit of all plans.
        let letters = MAX_TOTAL - 1_000;
        let full = |letters| {
            make(
                &jobs,
                New {
                    letters,
                    ..of_pipeline("docs")
                },
                NOW,
            )
            .err()
        };
        assert_eq!(full(letters), Some(RefusedChange::TooMany));
        assert_eq!(full(letters - 10_000), None);
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
        assert_eq!(removed(&jobs, ONE, NOW), Ok(vec!["job/0000".to_owned()]));
        // After a long time, some more.
        let later = NOW.after(KEPT + Duration::from_secs(1));
        assert_eq!(removed(&jobs, ONE, later).unwrap().len(), MAX_REMOVED);
        let running: Jobs = {
            let mut running = Jobs::default();
            for (id, _, job) in jobs.iter() {
                let mut written = job.record.clone();
                written.wanted = v1::RedriveState::Running.into();
                running.apply(&record(&job_key(id), Some(written.encode_to_vec().into())));
            }
            running
        };
        assert_eq!(removed(&running, ONE, later), Err(RefusedChange::TooMany));
    }

    fn edit(bytes: usize) -> Edit {
        let value = v1::EditedBytes {
            bytes: Some(vec![7; bytes].into()),
        };
        let edit = v1::RedriveEdit {
            value: Some(value),
            ..v1::RedriveEdit::default()
        };
        Edit::read(edit).unwrap()
    }

    #[test]
    fn edits_that_have_ended_make_room_for_others() {
        let mut jobs = Jobs::default();
        for (number, wanted) in [Wanted::Running, Wanted::Cancelled].into_iter().enumerate() {
            let mut chunk = job::chunks(&[item("a-dlq", 1)]).remove(0);
            chunk.edit = Some(edit(MAX_EDIT_BYTES / 2).to_record());
            let mut written = job(1, wanted).record;
            written.format = job::EDIT_FORMAT;
            let spec = written.redrive.as_mut().unwrap();
            spec.edited = vec!["value".to_owned()];
            spec.created_at = Some(to_timestamp(NOW));
            let id = format!("{number:04x}");
            jobs.apply(&record(&plan_key(&id, 0), Some(chunk.encode_to_vec().into())));
            jobs.apply(&record(&job_key(&id), Some(written.encode_to_vec().into())));
        }
        let edit = |edit_bytes| New { edit_bytes, ..ONE };
        let freed = vec!["job/0001".to_owned(), "plan/0001/0".to_owned()];
        assert_eq!(removed(&jobs, edit(1_000), NOW), Ok(freed));
        let refused = removed(&jobs, edit(MAX_EDIT_BYTES), NOW);
        assert_eq!(refused, Err(RefusedChange::TooManyEdits));
        // A job without an edit needs none of that room.
        assert_eq!(removed(&jobs, ONE, NOW), Ok(Vec::new()));
    }
}
