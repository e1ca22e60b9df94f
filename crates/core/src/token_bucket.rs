//! How much may happen per second.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::time::Timestamp;

/// The valid rates that people set, per second.
pub const RATES: RangeInclusive<f64> = 0.001..=1_000_000.0;
/// The minimum time until a bucket without tokens is looked at again. So a look at a high rate finds several tokens, instead of one each.
const MIN_PAUSE: Duration = Duration::from_millis(20);
/// Less than the error of the sum of many parts of tokens.
const ROUNDING: f64 = 1e-6;

/// A bucket that fills with tokens at a rate, up to one second's worth and at least one.
#[derive(Clone, Debug)]
pub struct Bucket {
    /// How many tokens are added per millisecond.
    per_milli: f64,
    capacity: f64,
    tokens: f64,
    /// Up to when tokens were added; `None`: no token has been taken yet.
    filled: Option<Timestamp>,
    /// When the last of the tokens was added.
    newest: Timestamp,
}

impl Bucket {
    /// A full bucket for this rate, in tokens per second.
    #[must_use]
    pub fn new(rate: f64) -> Self {
        let capacity = rate.max(1.0);
        Self {
            per_milli: rate / 1_000.0,
            capacity,
            tokens: capacity,
            filled: None,
            newest: Timestamp::from_millis(0),
        }
    }

    /// Changes the rate. The bucket has as many tokens as before, as far as they still fit.
    pub fn set_rate(&mut self, rate: f64) {
        let Self {
            per_milli, capacity, ..
        } = Self::new(rate);
        (self.per_milli, self.capacity) = (per_milli, capacity);
        self.tokens = self.tokens.min(capacity);
    }

    /// Takes the oldest token, and returns since when it was there.
    ///
    /// # Errors
    /// When to ask again, if there is no token.
    pub fn take(&mut self, now: Timestamp) -> Result<Timestamp, Timestamp> {
        self.fill(now);
        let spare = self.tokens - 1.0 + ROUNDING;
        if spare < 0.0 {
            return Err(now.after(self.time_for(-spare).max(MIN_PAUSE)));
        }
        self.tokens -= 1.0;
        let age = i64::try_from(self.time_for(spare).as_millis()).unwrap_or(i64::MAX);
        Ok(Timestamp::from_millis(
            self.newest.as_millis().saturating_sub(age),
        ))
    }

    /// Returns a token that was not used.
    pub fn give_back(&mut self) {
        self.tokens = (self.tokens + 1.0).min(self.capacity);
    }

    fn fill(&mut self, now: Timestamp) {
        // A clock that is set back adds nothing, and takes nothing away.
        let passed = self.filled.map_or(Duration::ZERO, |filled| now.since(filled));
        let room = self.capacity - self.tokens;
        let added = (passed.as_secs_f64() * 1_000.0 * self.per_milli).min(room);
        if added > 0.0 {
            let start = self.filled.unwrap_or(now);
            self.newest = start.after(self.time_for(added)).min(now);
            self.tokens += added;
        }
        self.filled = Some(now);
    }

    /// How long it takes to add so many tokens, at most a year.
    fn time_for(&self, tokens: f64) -> Duration {
        const YEAR_SECONDS: f64 = 365.0 * 86_400.0;
        let seconds = (tokens / self.per_milli / 1_000.0).min(YEAR_SECONDS);
        Duration::from_secs_f64(seconds.max(0.0)) + Duration::from_millis(1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    fn taken(bucket: &mut Bucket, now: i64) -> usize {
        (0..10_000).take_while(|_| bucket.take(at(now)).is_ok()).count()
    }

    #[test]
    fn full_bucket_has_one_second() {
        for (rate, tokens) in [(100.0, 100), (1.5, 1), (1.0, 1), (0.001, 1)] {
            assert_eq!(taken(&mut Bucket::new(rate), 0), tokens, "{rate}");
            let mut bucket = Bucket::new(rate);
            bucket.take(at(0)).unwrap();
            assert_eq!(taken(&mut bucket, 1_000_000_000), tokens, "{rate}");
        }
    }

    #[test]
    fn parts_of_tokens_add_up() {
        let mut bucket = Bucket::new(0.01);
        assert_eq!(taken(&mut bucket, 0), 1);
        // Asking often makes no difference.
        let tokens: usize = (0..=100_000).step_by(7).map(|now| taken(&mut bucket, now)).sum();
        assert_eq!(tokens, 0);
        assert_eq!(taken(&mut bucket, 100_001), 1);
        let next = bucket.take(at(100_001)).unwrap_err();
        assert!((200_000..200_010).contains(&next.as_millis()), "{next:?}");
    }

    #[test]
    fn token_tells_its_age() {
        let mut bucket = Bucket::new(1.0);
        bucket.take(at(0)).unwrap();
        let since = bucket.take(at(1_000)).unwrap();
        assert!((998..=1_000).contains(&since.as_millis()), "{since:?}");
        let mut bucket = Bucket::new(10.0);
        assert_eq!(taken(&mut bucket, 0), 10);
        let since = bucket.take(at(450)).unwrap();
        assert!((98..=100).contains(&since.as_millis()), "{since:?}");
    }

    #[test]
    fn returned_token_can_be_used() {
        let mut bucket = Bucket::new(0.5);
        bucket.take(at(0)).unwrap();
        assert!(bucket.take(at(0)).is_err());
        bucket.give_back();
        bucket.give_back();
        assert_eq!(taken(&mut bucket, 0), 1);
    }

    #[test]
    fn rate_change_keeps_tokens() {
        let mut bucket = Bucket::new(10.0);
        assert_eq!((0..4).filter(|_| bucket.take(at(0)).is_ok()).count(), 4);
        bucket.set_rate(100.0);
        assert_eq!(taken(&mut bucket, 0), 6);
        bucket.set_rate(2.0);
        assert_eq!(taken(&mut bucket, 500), 1);
        bucket.set_rate(100.0);
        assert_eq!(taken(&mut bucket, 1_000), 50);
        bucket.set_rate(3.0);
        bucket.fill(at(10_000));
        bucket.set_rate(0.5);
        assert_eq!(taken(&mut bucket, 10_000), 1);
    }

    proptest! {
        #[test]
        fn tokens_match_the_rate(
            rate in prop_oneof![0.05..2.0, 2.0..500.0],
            steps in proptest::collection::vec(-500_i64..3_000, 1..50),
        ) {
            let mut bucket = Bucket::new(rate);
            let (mut now, mut advanced, mut count) = (0_i64, 0_i64, taken(&mut bucket, 0));
            for step in steps {
                // The clock can be set back.
                now += step;
                advanced += step.max(0);
                count += taken(&mut bucket, now);
                let most = rate.max(1.0) + rate * Duration::from_millis(advanced.unsigned_abs()).as_secs_f64();
                prop_assert!(f64::from(u32::try_from(count).unwrap()) <= most + 0.01, "{count} of {most}");
                // Waiting as told always leads to a token.
                let next = bucket.take(at(now)).unwrap_err();
                prop_assert!(next.as_millis() > now);
                let waited = next.as_millis() - now;
                now += waited;
                advanced += waited;
                prop_assert!(bucket.take(at(now)).is_ok());
                count += 1;
            }
        }
    }
}
