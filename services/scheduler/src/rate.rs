//! How many jobs of an application may be dispatched per second.
//!
//! Each shard has an equal part of the rate of an application, because shards do not know of each other. A [`Bucket`] fills with
//! tokens at that rate, up to one second's worth and at least one, and each dispatched job takes one.
//!
//! The buckets belong to the process, not to its shards: a lane replaces its shards after each aborted transaction and each rebalance, and new
//! buckets would be full each time. So at most one second's worth is added when a shard moves to another process. The tokens of an aborted
//! transaction are used up, although its jobs are dispatched again: a rate is a maximum.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redeliver_core::token_bucket::Bucket;

/// The buckets of a process, by shard and application. Their number is bounded by the configuration. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Buckets(Arc<Mutex<HashMap<(i32, String), SharedBucket>>>);

/// A bucket of [`Buckets`]. Only one shard at a time uses it.
#[derive(Clone, Debug)]
pub(crate) struct SharedBucket(Arc<Mutex<Bucket>>);

impl SharedBucket {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Bucket> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The rates of applications in one shard, in jobs per second.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rates {
    rates: BTreeMap<String, f64>,
    shard: i32,
    buckets: Buckets,
}

impl Rates {
    /// Divides the rates of applications among shards.
    pub(crate) fn of_shard(rates: &BTreeMap<String, f64>, shard: i32, shards: i32, buckets: Buckets) -> Self {
        let rates = rates.iter();
        Self {
            rates: rates
                .map(|(app, rate)| (app.clone(), rate / f64::from(shards.max(1))))
                .collect(),
            shard,
            buckets,
        }
    }

    /// The bucket of an application with a rate. It is full if the process has never had one.
    pub(crate) fn bucket(&self, app: &str) -> Option<SharedBucket> {
        let rate = *self.rates.get(app)?;
        let mut buckets = self.buckets.0.lock().unwrap_or_else(PoisonError::into_inner);
        let bucket = buckets
            .entry((self.shard, app.to_owned()))
            .or_insert_with(|| SharedBucket(Arc::new(Mutex::new(Bucket::new(rate)))));
        bucket.lock().set_rate(rate);
        Some(bucket.clone())
    }

    pub(crate) fn is_limited(&self, app: &str) -> bool {
        self.rates.contains_key(app)
    }
}

#[cfg(test)]
mod tests {
    use redeliver_core::Timestamp;

    use super::*;

    fn taken(bucket: &mut Bucket, now: i64) -> usize {
        let now = Timestamp::from_millis(now);
        (0..10_000).take_while(|_| bucket.take(now).is_ok()).count()
    }

    #[test]
    fn shards_share_the_rate() {
        let apps = [("a".to_owned(), 24.0), ("b".to_owned(), 0.6)].into();
        let rates = Rates::of_shard(&apps, 0, 12, Buckets::default());
        assert_eq!(taken(&mut rates.bucket("a").unwrap().lock(), 0), 2);
        let slow = rates.bucket("b").unwrap();
        assert_eq!(taken(&mut slow.lock(), 0), 1);
        assert!(
            (20_000..20_010).contains(
                &slow
                    .lock()
                    .take(Timestamp::from_millis(0))
                    .unwrap_err()
                    .as_millis()
            )
        );
        assert!(rates.bucket("c").is_none());
    }

    #[test]
    fn replaced_shard_keeps_its_tokens() {
        let (apps, buckets) = ([("a".to_owned(), 20.0)].into(), Buckets::default());
        let rates = |shard| Rates::of_shard(&apps, shard, 2, buckets.clone());
        assert_eq!(taken(&mut rates(0).bucket("a").unwrap().lock(), 0), 10);
        assert_eq!(taken(&mut rates(0).bucket("a").unwrap().lock(), 500), 5);
        assert_eq!(taken(&mut rates(1).bucket("a").unwrap().lock(), 500), 10);
    }
}
