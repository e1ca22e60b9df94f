//! What the oracle has found.

use super::*;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Defect {
    pub(crate) kind: DefectKind,
    pub(crate) what: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DefectKind {
    /// A record is missing.
    Lost,
    /// A record exists twice.
    Double,
    /// A record was written before it was due.
    Early,
    /// A record differs from the request.
    Altered,
    /// A record belongs to no request.
    Foreign,
    /// Two records contradict each other.
    Contradiction,
}

/// The outcome of all requests.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) jobs: usize,
    pub(crate) dispatched: usize,
    pub(crate) cancelled: usize,
    pub(crate) expired: usize,
    pub(crate) refused: usize,
    /// Requests that were rejected because Redis was full.
    pub(crate) without_room: usize,
    /// Dispatched jobs whose records may be gone with the topic of their application.
    pub(crate) gone: usize,
    pub(crate) conflicts: usize,
    pub(crate) duplicates: usize,
    /// Those of them that were requested after the job had ended.
    pub(crate) late_duplicates: usize,
    pub(crate) forwarded: usize,
    /// Reschedulings that had an effect.
    pub(crate) rescheduled: usize,
    /// Waiting jobs that got another content, or ended in favour of another job.
    pub(crate) replaced: usize,
    pub(crate) answers: usize,
    /// Requests and jobs without a final outcome.
    pub(crate) waiting: Vec<String>,
    pub(crate) defects: Vec<Defect>,
    /// From the due time to the record in the application's topic, in milliseconds, by application.
    pub(crate) lateness: BTreeMap<String, Vec<i64>>,
}

impl Report {
    /// Whether everything has ended as it should.
    pub(crate) fn is_clean(&self) -> bool {
        self.defects.is_empty() && self.waiting.is_empty()
    }

    /// A quantile of the lateness of an application's jobs, in milliseconds.
    fn lateness(&self, app: &str, share: f64) -> i64 {
        let mut all = self.lateness.get(app).cloned().unwrap_or_default();
        all.sort_unstable();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "the index of a quantile"
        )]
        let index = (all.len().saturating_sub(1) as f64 * share) as usize;
        all.get(index).copied().unwrap_or_default()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 10;
        let smallest = self.lateness.values().flatten().min();
        write!(
            f,
            "{} jobs: {} dispatched (smallest margin {smallest:?} ms), {} gone with their topic, {} cancelled, {} expired; {} \
             refused, {} without room, {} conflicts, {} duplicates ({} late), {} forwarded, {} rescheduled, {} replaced, {} answers; {} waiting, {} defects",
            self.jobs,
            self.dispatched,
            self.gone,
            self.cancelled,
            self.expired,
            self.refused,
            self.without_room,
            self.conflicts,
            self.duplicates,
            self.late_duplicates,
            self.forwarded,
            self.rescheduled,
            self.replaced,
            self.answers,
            self.waiting.len(),
            self.defects.len()
        )?;
        for app in self.lateness.keys() {
            let [median, p99, most] = [0.5, 0.99, 1.0].map(|share| self.lateness(app, share));
            write!(f, "\n  lateness of {app}: p50 {median}, p99 {p99}, max {most} ms")?;
        }
        for waiting in self.waiting.iter().take(SHOWN) {
            write!(f, "\n  waiting: {waiting}")?;
        }
        for defect in self.defects.iter().take(SHOWN) {
            write!(f, "\n  {:?}: {}", defect.kind, defect.what)?;
        }
        Ok(())
    }
}
