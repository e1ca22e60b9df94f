//! Names that no other test uses, in this run or an earlier one on the same broker: every test owns its
//! topics, groups and key prefix, so tests run in parallel and a broker can be kept up for days.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// `name`, the run's random number and a counter, joined by hyphens: legal as topic, group,
/// transactional id and Redis key.
pub fn unique(name: &str) -> String {
    static RUN: OnceLock<u64> = OnceLock::new();
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let run = RUN.get_or_init(random) & 0xffff_ffff;
    let counter = COUNTER.fetch_add(1, Ordering::Relaxed);
    format!("{name}-{run:08x}-{counter}")
}

/// A number that differs from process to process: the standard library seeds its hash maps with it.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

#[cfg(test)]
mod tests {
    use super::unique;

    #[test]
    fn two_names_of_one_run_differ_and_keep_their_prefix() {
        let (first, second) = (unique("orders"), unique("orders"));
        assert_ne!(first, second);
        assert!(first.starts_with("orders-") && second.starts_with("orders-"));
    }
}
