//! How long a failed record waits before it is tried again.

use std::time::Duration;

use crate::span::Span;

/// The waits between attempts.
#[derive(Clone, Debug, PartialEq)]
pub struct RetryPolicy {
    schedule: Schedule,
    max_retries: u32,
    jitter: Jitter,
}

/// Where the nominal waits come from.
#[derive(Clone, Debug, PartialEq)]
enum Schedule {
    /// One wait per retry; the last one repeats.
    Listed(Vec<Span>),
    /// `base * factor^n`, at most `cap`.
    Exponential {
        base: Span,
        factor: f64,
        cap: Option<Span>,
    },
}

/// How a nominal wait `d` is spread, so that what failed together does not come back together. The names
/// are those of "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015).
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

/// A policy that cannot be followed; the text names the field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct InvalidPolicy {
    /// The field of the configuration that is wrong, such as `retry.base`.
    pub field: &'static str,
    /// What is wrong and what would be right.
    pub problem: String,
}

/// The most retries a policy may ask for.
pub const MAX_RETRIES: u32 = 1_000;
/// The most distinct waits: each is a topic with partitions and a consumer group of its own.
pub const MAX_TIERS: usize = 20;
/// The longest single wait: 366 days.
pub const MAX_WAIT: Span = Span::from_secs(366 * 86_400);

impl RetryPolicy {
    /// One wait per retry, in order. `max_retries` defaults to the number of waits; when it is larger the
    /// last wait repeats.
    ///
    /// # Errors
    /// When there is no wait, there are too many, a wait is zero or too long, waits do not grow, or `max_retries` is
    /// too large.
    pub fn listed(waits: Vec<Span>, max_retries: Option<u32>, jitter: Jitter) -> Result<Self, InvalidPolicy> {
        let wrong = |problem: String| InvalidPolicy {
            field: "retry.tiers",
            problem,
        };
        if waits.is_empty() {
            return Err(wrong(
                "is empty; name at least one delay, such as [5s, 30s, 1m]".into(),
            ));
        }
        if let Some(wait) = waits
            .iter()
            .find(|wait| wait.as_millis() == 0 || **wait > MAX_WAIT)
        {
            return Err(wrong(format!(
                "{wait} is out of range; a delay is between 1ms and {MAX_WAIT}"
            )));
        }
        if let Some(pair) = waits.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(wrong(format!(
                "{} stands before {}; delays must grow",
                pair[0], pair[1]
            )));
        }
        let listed = u32::try_from(waits.len()).unwrap_or(u32::MAX);
        Self::checked(Schedule::Listed(waits), max_retries.unwrap_or(listed), jitter)
    }

    /// `base * factor^n` for n = 0, 1, 2, ..., at most `cap`.
    ///
    /// # Errors
    /// When `base` is zero or too long, `factor` is below 1 or above 100, `cap` is below `base`,
    /// `max_retries` is 0 or too large, or so many retries have too many distinct waits.
    pub fn exponential(
        base: Span,
        factor: f64,
        max_retries: u32,
        cap: Option<Span>,
        jitter: Jitter,
    ) -> Result<Self, InvalidPolicy> {
        if base.as_millis() == 0 || base > MAX_WAIT {
            let problem = format!("{base} is out of range; it is between 1ms and {MAX_WAIT}");
            return Err(InvalidPolicy {
                field: "retry.base",
                problem,
            });
        }
        if !(1.0..=100.0).contains(&factor) {
            let problem = format!("{factor} is out of range; it is between 1 and 100");
            return Err(InvalidPolicy {
                field: "retry.factor",
                problem,
            });
        }
        if let Some(cap) = cap.filter(|cap| *cap < base || *cap > MAX_WAIT) {
            let problem = format!("{cap} is out of range; it is between the base {base} and {MAX_WAIT}");
            return Err(InvalidPolicy {
                field: "retry.cap",
                problem,
            });
        }
        Self::checked(Schedule::Exponential { base, factor, cap }, max_retries, jitter)
    }

    fn checked(schedule: Schedule, max_retries: u32, jitter: Jitter) -> Result<Self, InvalidPolicy> {
        if !(1..=MAX_RETRIES).contains(&max_retries) {
            let problem = format!("{max_retries} is out of range; it is between 1 and {MAX_RETRIES}");
            return Err(InvalidPolicy {
                field: "retry.max_retries",
                problem,
            });
        }
        let policy = Self {
            schedule,
            max_retries,
            jitter,
        };
        let tiers = policy.tiers().len();
        if tiers <= MAX_TIERS {
            return Ok(policy);
        }
        Err(match policy.schedule {
            Schedule::Listed(_) => InvalidPolicy {
                field: "retry.tiers",
                problem: format!("has {tiers} delays, and each is a topic; name at most {MAX_TIERS}"),
            },
            Schedule::Exponential { .. } => InvalidPolicy {
                field: "retry.max_retries",
                problem: format!(
                    "{max_retries} retries have {tiers} different delays, and each is a topic; at most {MAX_TIERS} may \
                     be: ask for fewer retries, or for a lower retry.cap, from which on the delay repeats"
                ),
            },
        })
    }

    /// How often a record is tried again after its first attempt.
    #[must_use]
    pub fn max_retries(&self) -> u32 {
        self.max_retries
    }

    /// How waits are spread.
    #[must_use]
    pub fn jitter(&self) -> Jitter {
        self.jitter
    }

    /// The wait before retry number `retry` (1 is the first), before jitter; `None` when the retries are
    /// used up.
    #[must_use]
    pub fn nominal_wait(&self, retry: u32) -> Option<Span> {
        if retry == 0 || retry > self.max_retries {
            return None;
        }
        Some(match &self.schedule {
            Schedule::Listed(waits) => waits[(retry as usize - 1).min(waits.len() - 1)],
            Schedule::Exponential { base, factor, cap } => {
                let limit = cap.unwrap_or(MAX_WAIT).duration();
                let exponent = i32::try_from(retry - 1).unwrap_or(i32::MAX);
                let seconds = base.duration().as_secs_f64() * factor.powi(exponent);
                let wait = Duration::try_from_secs_f64(seconds).map_or(limit, |wait| wait.min(limit));
                Span::from(Duration::from_millis(
                    u64::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(u64::MAX),
                ))
            }
        })
    }

    /// The wait before retry number `retry`, spread by `random`, a number from 0 (inclusive) to 1.
    #[must_use]
    pub fn wait(&self, retry: u32, random: f64) -> Option<Span> {
        let nominal = self.nominal_wait(retry)?;
        let random = random.clamp(0.0, 1.0);
        let spread = |share: f64| Span::from(nominal.duration().mul_f64(share)).min(nominal);
        Some(match self.jitter {
            Jitter::None => nominal,
            Jitter::Equal => spread(0.5 + random / 2.0),
            Jitter::Full => spread(random),
        })
    }

    /// The distinct nominal waits, growing: the tiers of a pipeline.
    #[must_use]
    pub fn tiers(&self) -> Vec<Span> {
        let mut tiers: Vec<Span> = (1..=self.max_retries)
            .filter_map(|n| self.nominal_wait(n))
            .collect();
        tiers.dedup();
        tiers
    }
}

impl Default for RetryPolicy {
    /// 5 s, 30 s, 1 min, no jitter.
    fn default() -> Self {
        let waits = vec![Span::from_secs(5), Span::from_secs(30), Span::from_secs(60)];
        Self {
            max_retries: 3,
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
    fn the_default_ladder_is_5s_30s_1m() {
        assert_eq!(waits(&RetryPolicy::default()), ["5s", "30s", "1m"]);
    }

    #[test]
    fn base_2m_with_5_retries_waits_2_4_8_16_32_minutes() {
        let policy = RetryPolicy::exponential(Span::from_secs(120), 2.0, 5, None, Jitter::None).unwrap();
        assert_eq!(waits(&policy), ["2m", "4m", "8m", "16m", "32m"]);
        assert_eq!(policy.tiers().len(), 5);
    }

    #[test]
    fn a_cap_ends_the_growth_and_the_last_listed_wait_repeats() {
        let capped =
            RetryPolicy::exponential(Span::from_secs(1), 2.0, 5, Some(Span::from_secs(3)), Jitter::None);
        assert_eq!(waits(&capped.unwrap()), ["1s", "2s", "3s", "3s", "3s"]);
        let listed = RetryPolicy::listed(
            vec![Span::from_secs(1), Span::from_secs(2)],
            Some(4),
            Jitter::None,
        );
        let listed = listed.unwrap();
        assert_eq!(waits(&listed), ["1s", "2s", "2s", "2s"]);
        assert_eq!(listed.tiers().len(), 2);
    }

    #[test]
    fn a_policy_that_cannot_be_followed_names_its_field() {
        let s = Span::from_secs;
        let field = |result: Result<RetryPolicy, InvalidPolicy>| result.unwrap_err().field;
        assert_eq!(
            field(RetryPolicy::listed(vec![], None, Jitter::None)),
            "retry.tiers"
        );
        assert_eq!(
            field(RetryPolicy::listed(vec![s(5), s(5)], None, Jitter::None)),
            "retry.tiers"
        );
        assert_eq!(
            field(RetryPolicy::listed(vec![s(0)], None, Jitter::None)),
            "retry.tiers"
        );
        assert_eq!(
            field(RetryPolicy::listed(vec![s(5)], Some(0), Jitter::None)),
            "retry.max_retries"
        );
        assert_eq!(
            field(RetryPolicy::exponential(s(0), 2.0, 5, None, Jitter::None)),
            "retry.base"
        );
        assert_eq!(
            field(RetryPolicy::exponential(s(5), 0.5, 5, None, Jitter::None)),
            "retry.factor"
        );
        assert_eq!(
            field(RetryPolicy::exponential(s(5), f64::NAN, 5, None, Jitter::None)),
            "retry.factor"
        );
        assert_eq!(
            field(RetryPolicy::exponential(s(5), 2.0, 5, Some(s(1)), Jitter::None)),
            "retry.cap"
        );
    }

    #[test]
    fn each_distinct_wait_is_a_topic_so_there_are_not_many() {
        let s = Span::from_secs;
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
        fn jitter_stays_within_its_bounds(base in 1_u64..1_000_000, retry in 1_u32..=20, random in 0.0_f64..1.0) {
            for (jitter, low) in [(Jitter::None, 1.0), (Jitter::Equal, 0.5), (Jitter::Full, 0.0)] {
                let policy = RetryPolicy::exponential(Span::from_millis(base), 2.0, 20, None, jitter).unwrap();
                let nominal = policy.nominal_wait(retry).unwrap();
                let wait = policy.wait(retry, random).unwrap();
                prop_assert!(wait <= nominal && nominal <= MAX_WAIT);
                prop_assert!(wait.duration().as_secs_f64() >= nominal.duration().as_secs_f64() * low - 1e-6);
            }
        }

        #[test]
        fn waits_never_shrink(base in 1_u64..1_000_000, factor in 1.0_f64..10.0, retry in 1_u32..20) {
            let policy = RetryPolicy::exponential(Span::from_millis(base), factor, 20, None, Jitter::None).unwrap();
            prop_assert!(policy.nominal_wait(retry) <= policy.nominal_wait(retry + 1));
        }
    }
}
