//! Counts of waiting records.

use std::collections::HashMap;

use redeliver_core::Timestamp;

use super::facts::Facts;

/// The maximum number of different codes that are counted. Codes can contain anything, so that their number has no limit.
const MAX_CODES: usize = 1_000;

/// Counts of records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) records: u64,
    pub(crate) overdue: u64,
    pub(crate) malformed: u64,
    /// Of the records whose attempts are known.
    attempts: u64,
    with_attempts: u64,
    pub(crate) max_attempts: u32,
    pub(crate) next_due: Option<Timestamp>,
    pub(crate) oldest: Option<Timestamp>,
    by_code: HashMap<String, u64>,
    other_codes: u64,
    /// How many are due in each of the next minutes, and after them. Empty without a forecast.
    pub(crate) per_minute: Vec<u64>,
    pub(crate) later: u64,
}

const MINUTE: i64 = 60_000;

impl Counts {
    /// Counts with a forecast of this many minutes.
    pub(crate) fn forecasting(minutes: usize) -> Self {
        Self {
            per_minute: vec![0; minutes],
            ..Self::default()
        }
    }

    pub(crate) fn add(&mut self, facts: &Facts, now: Timestamp) {
        self.records += 1;
        self.overdue += u64::from(facts.due.is_some_and(|due| due <= now));
        self.malformed += u64::from(facts.is_malformed);
        if let Some(attempts) = facts.attempts {
            self.attempts += u64::from(attempts);
            self.with_attempts += 1;
            self.max_attempts = self.max_attempts.max(attempts);
        }
        self.next_due = earlier(self.next_due, facts.due);
        self.oldest = earlier(self.oldest, facts.entered());
        self.add_code(facts.code.as_deref().unwrap_or_default(), 1);
        if let Some(due) = facts.due.filter(|due| *due > now && !self.per_minute.is_empty()) {
            let minute = due.as_millis().saturating_sub(now.as_millis()) / MINUTE;
            let minute = usize::try_from(minute).unwrap_or(usize::MAX);
            *self.per_minute.get_mut(minute).unwrap_or(&mut self.later) += 1;
        }
    }

    /// Adds the records of other counts.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.records += other.records;
        self.overdue += other.overdue;
        self.malformed += other.malformed;
        self.attempts += other.attempts;
        self.with_attempts += other.with_attempts;
        self.max_attempts = self.max_attempts.max(other.max_attempts);
        self.next_due = earlier(self.next_due, other.next_due);
        self.oldest = earlier(self.oldest, other.oldest);
        for (code, records) in &other.by_code {
            self.add_code(code, *records);
        }
        self.other_codes += other.other_codes;
        let minutes = self.per_minute.len().max(other.per_minute.len());
        self.per_minute.resize(minutes, 0);
        for (sum, count) in self.per_minute.iter_mut().zip(&other.per_minute) {
            *sum += count;
        }
        self.later += other.later;
    }

    fn add_code(&mut self, code: &str, records: u64) {
        if let Some(count) = self.by_code.get_mut(code) {
            *count += records;
        } else if self.by_code.len() < MAX_CODES {
            self.by_code.insert(code.to_owned(), records);
        } else {
            self.other_codes += records;
        }
    }

    /// The average number of attempts; 0 without records.
    #[expect(clippy::cast_precision_loss, reason = "a rounded average suffices")]
    pub(crate) fn average_attempts(&self) -> f64 {
        match self.with_attempts {
            0 => 0.0,
            records => self.attempts as f64 / records as f64,
        }
    }

    /// The most frequent codes, and the number of records with others.
    pub(crate) fn codes(&self, limit: usize) -> (Vec<(&str, u64)>, u64) {
        let by_code = self.by_code.iter();
        let mut codes: Vec<(&str, u64)> = by_code.map(|(code, count)| (code.as_str(), *count)).collect();
        codes.sort_unstable_by(|(one, ones), (other, others)| others.cmp(ones).then(one.cmp(other)));
        let rest = codes.split_off(limit.min(codes.len()));
        let rest: u64 = rest.iter().map(|(_, count)| count).sum();
        (codes, rest + self.other_codes)
    }
}

fn earlier(one: Option<Timestamp>, other: Option<Timestamp>) -> Option<Timestamp> {
    one.into_iter().chain(other).min()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn facts() -> impl Strategy<Value = Facts> {
        let time = || prop::option::of((0_i64..1_000).prop_map(Timestamp::from_millis));
        (
            time(),
            prop::option::of(0_u32..9),
            prop::option::of("[a-c]"),
            time(),
            any::<bool>(),
        )
            .prop_map(|(due, attempts, code, written, is_malformed)| Facts {
                due,
                attempts,
                code,
                written,
                is_malformed,
                ..Facts::default()
            })
    }

    proptest! {
        #[test]
        fn counts_equal_those_of_list(
            records in prop::collection::vec(facts(), 0..60), split in 0_usize..60, now in 0_i64..1_000
        ) {
            let now = Timestamp::from_millis(now);
            let count = |records: &[Facts]| {
                let mut counts = Counts::default();
                for facts in records {
                    counts.add(facts, now);
                }
                counts
            };
            let all = count(&records);
            let (one, other) = records.split_at(split.min(records.len()));
            let mut merged = count(one);
            merged.merge(&count(other));
            prop_assert_eq!(&merged, &all);

            prop_assert_eq!(all.records, records.len() as u64);
            let overdue = records.iter().filter(|facts| facts.due.is_some_and(|due| due <= now));
            prop_assert_eq!(all.overdue, overdue.count() as u64);
            prop_assert_eq!(all.next_due, records.iter().filter_map(|facts| facts.due).min());
            prop_assert_eq!(all.oldest, records.iter().filter_map(|facts| facts.written).min());
            let attempts: Vec<u32> = records.iter().filter_map(|facts| facts.attempts).collect();
            prop_assert_eq!(all.max_attempts, attempts.iter().copied().max().unwrap_or(0));
            let sum = all.average_attempts() * f64::from(u32::try_from(attempts.len()).unwrap());
            prop_assert!((sum - f64::from(attempts.iter().sum::<u32>())).abs() < 1e-6);
            for limit in [0, 1, 2, 9] {
                let (codes, others) = all.codes(limit);
                prop_assert!(codes.len() <= limit && codes.is_sorted_by(|one, other| one.1 >= other.1));
                prop_assert_eq!(codes.iter().map(|(_, count)| count).sum::<u64>() + others, all.records);
            }
        }
    }

    #[test]
    fn forecast_counts_what_is_not_due() {
        let now = Timestamp::from_millis(1_000_000);
        let mut counts = Counts::forecasting(2);
        for wait in [-1, 0, 1, 59_999, 60_000, 119_999, 120_000, i64::MAX - 1_000_000] {
            let facts = Facts {
                due: Some(Timestamp::from_millis(1_000_000 + wait)),
                ..Facts::default()
            };
            counts.add(&facts, now);
        }
        let mut total = Counts::default();
        total.merge(&counts);
        total.merge(&counts);
        assert_eq!((total.per_minute, total.later), (vec![4, 4], 4));
        assert_eq!((counts.records, counts.overdue), (8, 2));
    }

    #[test]
    fn excess_codes_are_counted_as_others() {
        let mut counts = Counts::default();
        for number in 0..MAX_CODES + 7 {
            let facts = Facts {
                code: Some(format!("code-{number}")),
                ..Facts::default()
            };
            counts.add(&facts, Timestamp::from_millis(0));
        }
        assert_eq!(counts.by_code.len(), MAX_CODES);
        assert_eq!(counts.codes(MAX_CODES).1, 7);
    }
}
