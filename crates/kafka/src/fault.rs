//! Points at which tests make a process die, to see what is left. Release builds have none.

/// Ends the process, as a crash would, when the environment asks for it: `REDELIVER_FAULT=NAME:N` at the Nth time
/// that the point NAME is passed.
#[cfg(debug_assertions)]
pub fn point(name: &str) {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    static FAULT: LazyLock<Option<(String, u32)>> = LazyLock::new(|| {
        let wanted = std::env::var("REDELIVER_FAULT").ok()?;
        let (name, count) = wanted.split_once(':')?;
        Some((name.to_owned(), count.parse().ok()?))
    });
    static PASSED: AtomicU32 = AtomicU32::new(0);

    if let Some((wanted, count)) = &*FAULT
        && wanted == name
        && PASSED.fetch_add(1, Ordering::SeqCst) + 1 == *count
    {
        tracing::warn!(name, count, "dying here, as the environment asks");
        std::process::abort();
    }
}

/// Nothing: release builds have no such points.
#[cfg(not(debug_assertions))]
#[inline]
pub fn point(_name: &str) {}
