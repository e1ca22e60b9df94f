//! The seed of random choices, with which a run can be repeated.

use crate::unique::random;

/// The random choices of a test. Prints the seed; `REDELIVER_CHAOS_SEED` sets it.
///
/// # Panics
/// If `REDELIVER_CHAOS_SEED` is not a number.
#[track_caller]
pub fn chaos_random(test: &str) -> fastrand::Rng {
    let seed = std::env::var("REDELIVER_CHAOS_SEED").ok();
    let seed = seed.map_or_else(
        || random() % 1_000_000_000,
        |text| text.parse().expect("REDELIVER_CHAOS_SEED is a number"),
    );
    println!("{test}: REDELIVER_CHAOS_SEED={seed}");
    fastrand::Rng::with_seed(seed)
}
