//! What happens to occurrences that could not be dispatched in time.

use redeliver_core::HumanDuration;

use crate::invalid::Invalid;

/// The shortest grace: 10 s. A takeover after a crash takes up to 7 s, and must not make occurrences miss.
pub const MIN_GRACE: HumanDuration = HumanDuration::from_secs(10);
/// The longest grace: 366 days.
pub const MAX_GRACE: HumanDuration = HumanDuration::from_secs(366 * 86_400);
/// The maximum number of missed occurrences that [`MisfirePolicy::All`] dispatches.
pub const MAX_LIMIT: u32 = 1_000;

/// Which missed occurrences are dispatched late. An occurrence is missed if it has been due for longer than `grace` when
/// the scheduler decides on it. One that is late by less is dispatched, whatever the policy says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Misfire {
    /// Which missed occurrences are dispatched.
    pub policy: MisfirePolicy,
    /// From [`MIN_GRACE`] to [`MAX_GRACE`].
    pub grace: HumanDuration,
}

/// Which missed occurrences are dispatched. The others are skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MisfirePolicy {
    /// None.
    Skip,
    /// The latest one. The default: most jobs do what all the missed ones would have done.
    #[default]
    Once,
    /// The latest ones, up to a limit.
    All {
        /// From 1 to [`MAX_LIMIT`].
        limit: u32,
    },
}

impl Default for Misfire {
    /// The latest missed one, after a grace of 60 s.
    fn default() -> Self {
        Self {
            policy: MisfirePolicy::Once,
            grace: HumanDuration::from_secs(60),
        }
    }
}

impl Misfire {
    /// The maximum number of missed occurrences to dispatch.
    pub(crate) fn limit(self) -> u64 {
        match self.policy {
            MisfirePolicy::Skip => 0,
            MisfirePolicy::Once => 1,
            MisfirePolicy::All { limit } => limit.into(),
        }
    }

    pub(crate) fn check(self) -> Result<(), Invalid> {
        if !(MIN_GRACE..=MAX_GRACE).contains(&self.grace) {
            let problem = format!(
                "{} is out of range: must be between {MIN_GRACE} and {MAX_GRACE}",
                self.grace
            );
            return Err(Invalid::new("misfire.grace", problem));
        }
        match self.policy {
            MisfirePolicy::All { limit } if !(1..=MAX_LIMIT).contains(&limit) => {
                let problem = format!("{limit} is out of range: must be between 1 and {MAX_LIMIT}");
                Err(Invalid::new("misfire.limit", problem))
            }
            MisfirePolicy::Skip | MisfirePolicy::Once | MisfirePolicy::All { .. } => Ok(()),
        }
    }
}
