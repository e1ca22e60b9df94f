//! Fault injection for crash tests. Release builds have none.

/// Aborts the process when this point is passed for the Nth time, if `REDELIVER_FAULT=NAME:N` is set.
#[cfg(debug_assertions)]
pub fn point(name: &str) {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    static FAULT: LazyLock<Option<(String, u32)>> = LazyLock::new(|| {
        let fault = std::env::var("REDELIVER_FAULT").ok()?;
        let (name, count) = fault.split_once(':')?;
        Some((name.to_owned(), count.parse().ok()?))
    });
    static PASSED: AtomicU32 = AtomicU32::new(0);

    if let Some((fault, count)) = &*FAULT
        && fault == name
        && PASSED.fetch_add(1, Ordering::SeqCst) + 1 == *count
    {
        tracing::warn!(name, count, "fault injected: aborting");
        std::process::abort();
    }
}

/// Does nothing in release builds.
#[cfg(not(debug_assertions))]
#[inline]
pub fn point(_name: &str) {}
