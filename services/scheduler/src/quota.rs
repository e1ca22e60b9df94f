//! How many jobs of an application may wait.
//!
//! Each shard has an equal part of the quota of an application, rounded up, because shards do not know of
//! each other. The index counts the jobs that wait when a shard starts. From then on the shard counts: only
//! it changes its jobs.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use redeliver_core::Failure;

use crate::admission::RejectedForNow;
use crate::job::{Job, Kind};

/// The quotas of applications in one shard.
#[derive(Clone, Debug, Default)]
pub(crate) struct Quotas {
    apps: HashMap<Arc<str>, AppQuota>,
    state: Counting,
}

/// Whether the jobs that waited when the shard started have been counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Counting {
    #[default]
    Needed,
    Requested,
    Done,
}

#[derive(Clone, Debug)]
struct AppQuota {
    /// Of all shards.
    max_waiting: u64,
    max_in_shard: u64,
    waiting: u64,
}

impl Quotas {
    /// Divides the quotas of applications among this number of shards.
    pub(crate) fn of_shard(max_waiting: &BTreeMap<Arc<str>, u64>, shards: i32) -> Self {
        let shards = u64::try_from(shards).unwrap_or_default().max(1);
        let quota = |max_waiting: u64| AppQuota {
            max_waiting,
            max_in_shard: max_waiting.div_ceil(shards),
            waiting: 0,
        };
        let apps = max_waiting.iter();
        let apps: HashMap<_, _> = apps.map(|(app, max)| (app.clone(), quota(*max))).collect();
        let state = if apps.is_empty() {
            Counting::Done
        } else {
            Counting::Needed
        };
        Self { apps, state }
    }

    /// The applications whose waiting jobs are to be counted now.
    pub(crate) fn take_uncounted(&mut self) -> Option<Vec<Arc<str>>> {
        if self.state != Counting::Needed {
            return None;
        }
        self.state = Counting::Requested;
        Some(self.apps.keys().cloned().collect())
    }

    /// Takes the numbers of waiting jobs.
    pub(crate) fn counted(&mut self, waiting: Vec<(Arc<str>, u64)>) {
        for (app, waiting) in waiting {
            if let Some(quota) = self.apps.get_mut(&app) {
                quota.waiting = waiting;
            }
        }
        self.state = Counting::Done;
    }

    pub(crate) fn is_counted(&self) -> bool {
        self.state == Counting::Done
    }

    /// How many more jobs of an application may wait.
    pub(crate) fn room(&self, app: &str) -> u64 {
        self.apps
            .get(app)
            .map_or(u64::MAX, |quota| quota.max_in_shard.saturating_sub(quota.waiting))
    }

    /// Checks whether another job of an application may wait.
    pub(crate) fn check(&self, app: &str) -> Result<(), Failure> {
        let Some(quota) = self.apps.get(app).filter(|quota| quota.is_used_up()) else {
            return Ok(());
        };
        let message = format!(
            "{} jobs of application `{app}` wait in this partition, which is its part of scheduler.apps.{app}.max_waiting ({}); \
             until some have been dispatched or cancelled, no others are accepted",
            quota.waiting, quota.max_waiting
        );
        Err(RejectedForNow::QuotaExceeded.failure(message))
    }

    /// Counts a new job.
    pub(crate) fn add(&mut self, job: &Job) {
        self.change(job, |waiting| waiting.saturating_add(1));
    }

    /// Counts a job that has waited, and has ended.
    pub(crate) fn remove(&mut self, job: &Job) {
        self.change(job, |waiting| waiting.saturating_sub(1));
    }

    fn change(&mut self, job: &Job, count: impl FnOnce(u64) -> u64) {
        // A pipeline can have the name of an application.
        if job.kind == Kind::App
            && let Some(quota) = self.apps.get_mut(&job.app)
        {
            quota.waiting = count(quota.waiting);
        }
    }
}

impl AppQuota {
    fn is_used_up(&self) -> bool {
        self.waiting >= self.max_in_shard
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_have_equal_parts_rounded_up() {
        for (max_waiting, shards, expected) in [(1, 16, 1), (16, 16, 1), (17, 16, 2), (1_000, 12, 84)] {
            let mut quotas = Quotas::of_shard(&[("app".into(), max_waiting)].into(), shards);
            quotas.counted(vec![("app".into(), expected - 1)]);
            assert!(quotas.check("app").is_ok(), "{max_waiting} in {shards}");
            quotas.counted(vec![("app".into(), expected)]);
            let refused = quotas.check("app").unwrap_err();
            assert_eq!(
                RejectedForNow::of(&refused.code),
                Some(RejectedForNow::QuotaExceeded)
            );
            assert!(refused.retry_after.is_some());
        }
    }

    #[test]
    fn applications_with_quotas_are_counted_once() {
        let mut none = Quotas::of_shard(&BTreeMap::new(), 4);
        assert!(none.is_counted() && none.take_uncounted().is_none() && none.check("app").is_ok());
        let mut quotas = Quotas::of_shard(&[("app".into(), 5)].into(), 4);
        assert_eq!(quotas.take_uncounted(), Some(vec!["app".into()]));
        assert!(quotas.take_uncounted().is_none() && !quotas.is_counted());
        quotas.counted(vec![("app".into(), 9)]);
        assert!(quotas.is_counted() && quotas.take_uncounted().is_none());
        assert!(quotas.check("app").is_err() && quotas.check("other").is_ok());
    }
}
