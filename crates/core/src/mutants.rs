//! Planted defects, with which `cargo xtask mutants` proves that the tests see a defect of each kind.
//!
//! A build with `--cfg mutants` contains all of them, and the environment variable [`VARIABLE`] activates at most one. In
//! every other build, [`mutant!`](crate::mutant) is the constant `false`, so that the compiler removes the defects.
//!
//! The table of all planted defects, and of the tests that catch them, is in `crates/xtask/src/mutants/table.rs`.

use std::sync::{LazyLock, Once};

/// The environment variable that names the active defect.
pub const VARIABLE: &str = "REDELIVER_MUTANT";

/// Whether the planted defect with this name is active: always `false` without `--cfg mutants`. With two more arguments, the
/// right value, or the wrong one while the defect is active.
///
/// ```
/// use redeliver_core::mutant;
///
/// let is_complete = true && !mutant!("an-example");
/// let offset = mutant!("another-example", 41, 42);
/// assert_eq!((is_complete, offset), (true, 41));
/// ```
#[macro_export]
macro_rules! mutant {
    ($name:literal) => {
        ::core::cfg!(mutants) && $crate::mutants::is_active($name)
    };
    ($name:literal, $right:expr, $wrong:expr) => {
        if $crate::mutant!($name) { $wrong } else { $right }
    };
}

/// Whether [`VARIABLE`] names this defect. The first time, it reports that a site of the defect was reached: a test that
/// fails before that has not caught it.
#[doc(hidden)]
#[must_use]
pub fn is_active(name: &str) -> bool {
    static ACTIVE: LazyLock<Option<String>> = LazyLock::new(|| std::env::var(VARIABLE).ok());
    static REACHED: Once = Once::new();
    let is_active = ACTIVE.as_deref() == Some(name);
    if is_active {
        REACHED.call_once(|| eprintln!("mutant reached: {name}"));
    }
    is_active
}
