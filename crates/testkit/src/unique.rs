//! Names that no other test uses, in this run or an earlier one on the same broker, and delays that other tests rarely use.
//! So tests run in parallel, and a broker can be kept up for days.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// `name`, the random number of this run and a counter, joined by hyphens. The result is valid as a topic, group,
/// transactional id and Redis key.
pub fn unique(name: &str) -> String {
    static RUN: OnceLock<u64> = OnceLock::new();
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let run = RUN.get_or_init(random) & 0xffff_ffff;
    let counter = COUNTER.fetch_add(1, Ordering::Relaxed);
    format!("{name}-{run:08x}-{counter}")
}

/// These delays in milliseconds, each with a few milliseconds added. The consumer groups of retry tiers are named after
/// their delays, so tests with the same delays would share them.
pub fn unique_delays(millis: &[u64]) -> Vec<u64> {
    /// More than the tests that run at the same time, with those of a previous run whose groups have not ended.
    const DISTINCT: u64 = 600;
    static FIRST: OnceLock<u64> = OnceLock::new();
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let first = FIRST.get_or_init(random) % DISTINCT;
    let extra = 1 + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % DISTINCT;
    millis.iter().map(|millis| millis + extra).collect()
}

/// A number that differs between processes, because the standard library seeds its hash maps at random.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(std::process::id())
}
