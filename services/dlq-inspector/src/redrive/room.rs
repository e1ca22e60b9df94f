//! Makes room for a new job: which jobs are removed. No IO.

use std::time::Duration;

use redeliver_core::Timestamp;
use redeliver_proto::v1;

use super::job::{self, Job};
use super::jobs::{JobEntry, Jobs};
use super::refusal::RefusedChange;

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

/// How much a new job takes of what is limited for all jobs together.
#[derive(Clone, Copy, Debug)]
pub struct New {
    /// The number of its dead letters.
    pub letters: u32,
    /// The size of its edit.
    pub edit_bytes: usize,
}

/// Makes room for a new job, and returns the keys to remove. Of what has ended, removes some of what is old, and as much as is needed, oldest first.
///
/// # Errors
/// If there is no room.
pub fn make(jobs: &Jobs, new: New, now: Timestamp) -> Result<Vec<String>, RefusedChange> {
    let (mut count, mut letters, mut edit_bytes) = (1, new.letters as usize, new.edit_bytes);
    for (_, entry, _) in jobs.iter() {
        count += 1;
        letters += entry.size();
        edit_bytes += entry.edit_bytes();
    }
    let is_full = |count, letters| count > MAX_JOBS || letters > MAX_TOTAL as usize;
    let has_too_many_edits = |edit_bytes| new.edit_bytes > 0 && edit_bytes > MAX_EDIT_BYTES;
    let (mut removed, mut keys) = (0, Vec::new());
    for (id, entry, job) in jobs.iter() {
        let age = now.since(job.created_at());
        let is_old = age > KEPT && removed < MAX_REMOVED;
        let is_needed = is_full(count, letters) || (entry.edit_bytes() > 0 && has_too_many_edits(edit_bytes));
        if (is_old || is_needed) && has_ended(entry, &job, age) {
            removed += 1;
            count -= 1;
            letters -= entry.size();
            edit_bytes -= entry.edit_bytes();
            keys.extend(entry.keys(id));
        }
    }
    if is_full(count, letters) {
        return Err(RefusedChange::TooMany);
    }
    if has_too_many_edits(edit_bytes) {
        return Err(RefusedChange::TooManyEdits);
    }
    Ok(keys)
}

fn has_ended(entry: &JobEntry, job: &Job, age: Duration) -> bool {
    match job::state(job, &entry.progress()) {
        v1::RedriveState::Planned => age > PLAN_KEPT,
        state => job::has_ended(state),
    }
}

#[cfg(test)]
mod tests {
    use redeliver_proto::Message as _;
    use redeliver_proto::convert::to_timestamp;
    use redeliver_store::State as _;
    use redeliver_testkit::record;

    use super::super::edit::Edit;
    use super::super::job::RedriveState;
    use super::super::job::tests::{item, job};
    use super::super::jobs::tests::jobs;
    use super::super::jobs::{job_key, plan_key};
    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);

    const ONE: New = New {
        letters: 1,
        edit_bytes: 0,
    };

    #[test]
    fn ended_jobs_make_room() {
        let mut jobs = Jobs::default();
        for number in 0..MAX_JOBS {
            let id = format!("{number:04x}");
            let wanted = if number % 2 == 0 {
                RedriveState::Cancelled
            } else {
                RedriveState::Running
            };
            let mut written = job(3, wanted).record;
            let spec = written.redrive.as_mut().unwrap();
            spec.id.clone_from(&id);
            spec.created_at = Some(to_timestamp(NOW));
            jobs.apply(&record(&job_key(&id), Some(written.encode_to_vec().into())));
        }
        assert_eq!(make(&jobs, ONE, NOW), Ok(vec!["job/0000".to_owned()]));
        // After a long time, some more.
        let later = NOW.after(KEPT + Duration::from_secs(1));
        assert_eq!(make(&jobs, ONE, later).unwrap().len(), MAX_REMOVED);
        let running: Jobs = {
            let mut running = Jobs::default();
            for (id, _, job) in jobs.iter() {
                let mut written = job.record.clone();
                written.wanted = v1::RedriveState::Running.into();
                running.apply(&record(&job_key(id), Some(written.encode_to_vec().into())));
            }
            running
        };
        assert_eq!(make(&running, ONE, later), Err(RefusedChange::TooMany));
    }

    #[test]
    fn all_plans_together_are_bounded() {
        let new = New {
            letters: MAX_TOTAL - job::CHUNK + 1,
            ..ONE
        };
        let made = |wanted| make(&jobs(2, wanted), new, NOW);
        assert_eq!(made(RedriveState::Running), Err(RefusedChange::TooMany));
        let freed = vec!["job/1f".to_owned(), "plan/1f/0".to_owned()];
        assert_eq!(made(RedriveState::Cancelled), Ok(freed));
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
    fn ended_edits_make_room() {
        let mut jobs = Jobs::default();
        for (number, wanted) in [RedriveState::Running, RedriveState::Cancelled]
            .into_iter()
            .enumerate()
        {
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
        assert_eq!(make(&jobs, edit(1_000), NOW), Ok(freed));
        let refused = make(&jobs, edit(MAX_EDIT_BYTES), NOW);
        assert_eq!(refused, Err(RefusedChange::TooManyEdits));
        // A job without an edit needs none of that room.
        assert_eq!(make(&jobs, ONE, NOW), Ok(Vec::new()));
    }
}
