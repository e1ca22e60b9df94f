//! Retry policies: the delay before each retry.

use std::sync::Arc;
use std::time::Duration;

use crate::delay::DelayRange;
use crate::human_duration::HumanDuration;

/// The number of retries and the delay before each of them.
#[derive(Clone, Debug, PartialEq)]
pub struct RetryPolicy {
    schedule: Schedule,
    max_retries: u32,
    jitter: Jitter,
    /// See [`RetryPolicy::tiers`]. Computed once, because every retry looks for its tier.
    tiers: Arc<[HumanDuration]>,
}

/// The delays before jitter.
#[derive(Clone, Debug, PartialEq)]
enum Schedule {
    /// One delay per retry; the last one repeats.
    Listed(Vec<HumanDuration>),
    /// `base * factor^n`, at most `cap`.
    Exponential {
        base: HumanDuration,
        factor: f64,
        cap: Option<HumanDuration>,
    },
}

/// Randomizes a delay `d`, so that records that failed together are not tried again together. The names are those of
/// "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015). [`DelayRange::in_tier`] chooses the delay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Jitter {
    /// Exactly `d`.
    #[default]
    None,
    /// Between `d/2` and `d`.
    Equal,
    /// Between 0 and `d`.
    Full,
}

/// The policy is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct InvalidPolicy {
    /// The invalid field of the configuration, such as `retry.base`.
    pub field: &'static str,
    /// What is wrong, and which values are valid.
    pub problem: String,
}

/// The maximum number of retries.
pub const MAX_RETRIES: u32 = 1_000;
/// The maximum number of tiers. Each tier is a topic with partitions and a consumer group.
pub const MAX_TIERS: usize = 20;
/// The maximum delay: 366 days.
pub const MAX_WAIT: HumanDuration = HumanDuration::from_secs(366 * 86_400);

impl RetryPolicy {
    /// A policy with one delay per retry. `max_retries` defaults to the number of delays. If it is greater, the last
    /// delay repeats.
    ///
    /// # Errors
    /// If there is no delay or more than [`MAX_TIERS`], a delay is zero or greater than [`MAX_WAIT`], a delay is not
    /// greater than the previous one, or `max_retries` is 0 or greater than [`MAX_RETRIES`].
    pub fn listed(
        waits: Vec<HumanDuration>,
        max_retries: Option<u32>,
        jitter: Jitter,
    ) -> Result<Self, InvalidPolicy> {
        let wrong = |problem: String| InvalidPolicy {
            field: "retry.tiers",
            problem,
        };
        if waits.is_empty() {
            return Err(wrong(
                "is empty; list at least one delay, such as [5s, 30s, 1m]".into(),
            ));
        }
        if let Some(wait) = waits
            .iter()
            .find(|wait| wait.as_millis() == 0 || **wait > MAX_WAIT)
        {
            return Err(wrong(format!(
                "{wait} is out of range: must be between 1ms and {MAX_WAIT}"
            )));
        }
        if let Some(pair) = waits.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(wrong(format!(
                "{} is listed before {}; delays must be in ascending order",
                pair[0], pair[1]
            )));
        }
        let listed = u32::try_from(waits.len()).unwrap_or(u32::MAX);
        Self::checked(Schedule::Listed(waits), max_retries.unwrap_or(listed), jitter)
    }

    /// A policy with the delays `base * factor^n` for n = 0, 1, 2, ..., each at most `cap`.
    ///
    /// # Errors
    /// If `base` is zero or greater than [`MAX_WAIT`], `factor` is not from 1 to 100, `cap` is less than `base` or
    /// greater than [`MAX_WAIT`], `max_retries` is 0 or greater than [`MAX_RETRIES`], or the delays would need more
    /// than [`MAX_TIERS`] tiers.
    pub fn exponential(
        base: HumanDuration,
        factor: f64,
        max_retries: u32,
        cap: Option<HumanDuration>,
        jitter: Jitter,
    ) -> Result<Self, InvalidPolicy> {
        if base.as_millis() == 0 || base > MAX_WAIT {
            let problem = format!("{base} is out of range: must be between 1ms and {MAX_WAIT}");
            return Err(InvalidPolicy {
                field: "retry.base",
                problem,
            });
        }
        if !(1.0..=100.0).contains(&factor) {
            let problem = format!("{factor} is out of range: must be between 1 and 100");
            return Err(InvalidPolicy {
                field: "retry.factor",
                problem,
            });
        }
        if let Some(cap) = cap.filter(|cap| *cap < base || *cap > MAX_WAIT) {
            let problem = format!("{cap} is out of range: must be between the base {base} and {MAX_WAIT}");
            return Err(InvalidPolicy {
                field: "retry.cap",
                problem,
            });
        }
        Self::checked(Schedule::Exponential { base, factor, cap }, max_retries, jitter)
    }

    fn checked(schedule: Schedule, max_retries: u32, jitter: Jitter) -> Result<Self, InvalidPolicy> {
        if !(1..=MAX_RETRIES).contains(&max_retries) {
            let problem = format!("{max_retries} is out of range: must be between 1 and {MAX_RETRIES}");
            return Err(InvalidPolicy {
                field: "retry.max_retries",
                problem,
            });
        }
        let mut waits: Vec<HumanDuration> = (1..=max_retries).map(|retry| schedule.wait(retry)).collect();
        waits.dedup();
        let tiers = waits.len();
        if tiers <= MAX_TIERS {
            return Ok(Self {
                schedule,
                max_retries,
                jitter,
                tiers: waits.into(),
            });
        }
        Err(match schedule {
            Schedule::Listed(_) => InvalidPolicy {
                field: "retry.tiers",
                problem: format!("has {tiers} delays, and each is a topic; list at most {MAX_TIERS}"),
            },
            Schedule::Exponential { .. } => InvalidPolicy {
                field: "retry.max_retries",
                problem: format!(
                    "{max_retries} retries have {tiers} different delays, and each is a topic; at most {MAX_TIERS} are \
                     allowed: use fewer retries, or a lower retry.cap"
                ),
            },
        })
    }

    /// The maximum number of retries after the first attempt.
    #[must_use]
    pub fn max_retries(&self) -> u32 {
        self.max_retries
    }

    /// The jitter of the delays.
    #[must_use]
    pub fn jitter(&self) -> Jitter {
        self.jitter
    }

    /// The delay before retry number `retry` without jitter; the first retry is 1. `None` if no retries are left.
    #[must_use]
    pub fn nominal_wait(&self, retry: u32) -> Option<HumanDuration> {
        if retry == 0 || retry > self.max_retries {
            return None;
        }
        Some(self.schedule.wait(retry))
    }

    /// The delays before retry number `retry` that its jitter allows. `None` if no retries are left.
    #[must_use]
    pub fn delays(&self, retry: u32) -> Option<DelayRange> {
        let nominal = self.nominal_wait(retry)?;
        let min = match self.jitter {
            Jitter::None => nominal,
            Jitter::Equal => HumanDuration::from(nominal.duration() / 2),
            Jitter::Full => HumanDuration::default(),
        };
        Some(DelayRange {
            min,
            ..DelayRange::exactly(nominal)
        })
    }

    /// The distinct delays without jitter, in ascending order. Each is a tier. There is at least one.
    #[must_use]
    pub fn tiers(&self) -> &[HumanDuration] {
        &self.tiers
    }
}

impl Schedule {
    /// The delay before retry number `retry`; the first retry is 1.
    fn wait(&self, retry: u32) -> HumanDuration {
        match self {
            Self::Listed(waits) => waits[(retry as usize - 1).min(waits.len() - 1)],
            Self::Exponential { base, factor, cap } => {
                let limit = cap.unwrap_or(MAX_WAIT).duration();
                let exponent = i32::try_from(retry - 1).unwrap_or(i32::MAX);
                let seconds = base.duration().as_secs_f64() * factor.powi(exponent);
                let wait = Duration::try_from_secs_f64(seconds).map_or(limit, |wait| wait.min(limit));
                HumanDuration::from(Duration::from_millis(
                    u64::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(u64::MAX),
                ))
            }
        }
    }
}

impl Default for RetryPolicy {
    /// Delays of 5 s, 30 s and 1 min, without jitter.
    fn default() -> Self {
        let waits = vec![
            HumanDuration::from_secs(5),
            HumanDuration::from_secs(30),
            HumanDuration::from_secs(60),
        ];
        Self {
            max_retries: 3,
            tiers: waits.as_slice().into(),
            schedule: Schedule::Listed(waits),
            jitter: Jitter::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn waits(policy: &RetryPolicy) -> Vec<String> {
        (1..)
            .map_while(|retry| policy.nominal_wait(retry))
            .map(|wait| wait.to_string())
            .collect()
    }

    #[test]
    fn delays_double_from_two_minutes() {
        let base = HumanDuration::from_secs(120);
        let doubling = RetryPolicy::exponential(base, 2.0, 5, None, Jitter::None).unwrap();
        assert_eq!(waits(&doubling), ["2m", "4m", "8m", "16m", "32m"]);
        assert_eq!(doubling.tiers().len(), 5);
    }

    #[test]
    fn delays_are_capped_or_repeat() {
        let capped = RetryPolicy::exponential(
            HumanDuration::from_secs(1),
            2.0,
            5,
            Some(HumanDuration::from_secs(3)),
            Jitter::None,
        );
        assert_eq!(waits(&capped.unwrap()), ["1s", "2s", "3s", "3s", "3s"]);
        let listed = RetryPolicy::listed(
            vec![HumanDuration::from_secs(1), HumanDuration::from_secs(2)],
            Some(4),
            Jitter::None,
        );
        let listed = listed.unwrap();
        assert_eq!(waits(&listed), ["1s", "2s", "2s", "2s"]);
        assert_eq!(listed.tiers().len(), 2);
    }

    #[test]
    fn invalid_policy_names_the_field() {
        let s = HumanDuration::from_secs;
        let listed = |waits, retries| RetryPolicy::listed(waits, retries, Jitter::None);
        let growing = |base, factor, cap| RetryPolicy::exponential(base, factor, 5, cap, Jitter::None);
        for (policy, field) in [
            (listed(vec![], None), "retry.tiers"),
            (listed(vec![s(5), s(5)], None), "retry.tiers"),
            (listed(vec![s(0)], None), "retry.tiers"),
            (listed(vec![s(5)], Some(0)), "retry.max_retries"),
            (growing(s(0), 2.0, None), "retry.base"),
            (growing(s(5), 0.5, None), "retry.factor"),
            (growing(s(5), f64::NAN, None), "retry.factor"),
            (growing(s(5), 2.0, Some(s(1))), "retry.cap"),
        ] {
            assert_eq!(policy.unwrap_err().field, field);
        }
    }

    #[test]
    fn the_number_of_tiers_is_limited() {
        let s = HumanDuration::from_secs;
        let field =
            |result: Result<RetryPolicy, InvalidPolicy>| result.map_err(|error| error.field).map(drop);
        let listed = |count: u64| {
            let waits = (1..=count).map(s).collect();
            field(RetryPolicy::listed(waits, Some(1_000), Jitter::None))
        };
        assert_eq!((listed(20), listed(21)), (Ok(()), Err("retry.tiers")));
        let growing = |retries, cap| field(RetryPolicy::exponential(s(1), 2.0, retries, cap, Jitter::None));
        assert_eq!(growing(20, None), Ok(()));
        assert_eq!(growing(21, None), Err("retry.max_retries"));
        assert_eq!(growing(1_000, Some(s(3_600))), Ok(()));
        let slowly = RetryPolicy::exponential(s(1), 1.01, 1_000, Some(s(3_600)), Jitter::None);
        assert_eq!(field(slowly), Err("retry.max_retries"));
    }

    proptest! {
        #[test]
        fn jitter_stays_within_its_bounds(
            base in 1_u64..1_000_000, retry in 1_u32..=20, partitions in 1_u32..50, random in 0.0_f64..1.0,
        ) {
            for (jitter, low) in [(Jitter::None, 1.0), (Jitter::Equal, 0.5), (Jitter::Full, 0.0)] {
                let policy = RetryPolicy::exponential(HumanDuration::from_millis(base), 2.0, 20, None, jitter).unwrap();
                let nominal = policy.nominal_wait(retry).unwrap();
                let delays = policy.delays(retry).unwrap();
                prop_assert_eq!(delays.nominal, nominal);
                let (wait, _) = delays.in_tier(partitions, random);
                prop_assert!(wait <= nominal && nominal <= MAX_WAIT);
                prop_assert!(wait.duration().as_secs_f64() >= nominal.duration().as_secs_f64() * low - 1e-6);
            }
        }

        #[test]
        fn delays_never_shrink(base in 1_u64..1_000_000, factor in 1.0_f64..10.0, retry in 1_u32..20) {
            let policy = RetryPolicy::exponential(HumanDuration::from_millis(base), factor, 20, None, Jitter::None).unwrap();
            prop_assert!(policy.nominal_wait(retry) <= policy.nominal_wait(retry + 1));
        }
    }
}
