//! The one way in which tests wait: check a condition until it holds, and panic at a deadline with the state that was seen
//! last. A fixed sleep is either too long or, on a busy machine, too short.

use std::fmt::{Debug, Display};
use std::time::{Duration, Instant};

/// The longest delay between two checks. The first delays are shorter, because most conditions hold soon.
const MAX_DELAY: Duration = Duration::from_millis(100);

/// How long a condition may take to hold, on a slow machine that is busy with other tests.
pub const DEADLINE: Duration = Duration::from_secs(240);

/// Waits until `condition` returns `Ok`, and returns its value. `Err` contains the current state, which is printed if the
/// deadline passes. Blocks the thread: in asynchronous tests use [`eventually_async`].
///
/// # Panics
/// If the condition does not hold within `deadline`.
#[track_caller]
pub fn eventually<T, S: Display>(
    what: &str,
    deadline: Duration,
    condition: impl FnMut() -> Result<T, S>,
) -> T {
    match poll_until(deadline, condition) {
        Ok(value) => value,
        Err(state) => panic!("{what}: not within {deadline:?}; last seen: {state}"),
    }
}

/// As [`eventually`], for an asynchronous condition. A condition that hangs is cancelled at the deadline.
///
/// # Panics
/// If the condition does not hold within `deadline`.
pub async fn eventually_async<T, S: Display>(
    what: &str,
    deadline: Duration,
    mut condition: impl AsyncFnMut() -> Result<T, S>,
) -> T {
    let end = tokio::time::Instant::now() + deadline;
    let mut last = None;
    for delay in delays() {
        match tokio::time::timeout_at(end, condition()).await {
            Ok(Ok(value)) => return value,
            Ok(Err(state)) => last = Some(state),
            Err(_) => break,
        }
        if tokio::time::Instant::now() >= end {
            break;
        }
        tokio::time::sleep_until(end.min(tokio::time::Instant::now() + delay)).await;
    }
    match last {
        Some(state) => panic!("{what}: not within {deadline:?}; last seen: {state}"),
        None => panic!("{what}: not within {deadline:?}; the condition never returned"),
    }
}

/// How most conditions of [`eventually`] end: `Ok` if it holds, otherwise the state.
///
/// # Errors
/// If it does not hold.
pub fn ensure<S>(holds: bool, state: S) -> Result<(), S> {
    holds.then_some(()).ok_or(state)
}

/// Waits until what is observed is as wanted, and returns it.
///
/// # Panics
/// If it is not within [`DEADLINE`].
#[track_caller]
pub fn until_seen<T: Debug>(what: &str, mut observe: impl FnMut() -> T, is_wanted: impl Fn(&T) -> bool) -> T {
    eventually(what, DEADLINE, || {
        let seen = observe();
        ensure(is_wanted(&seen), format!("{seen:?}")).map(|()| seen)
    })
}

/// As [`eventually`], but returns the last state instead of panicking.
pub(crate) fn poll_until<T, S>(
    deadline: Duration,
    mut condition: impl FnMut() -> Result<T, S>,
) -> Result<T, S> {
    let end = Instant::now() + deadline;
    let mut delays = delays();
    loop {
        // The condition is checked once more after the last delay, even if the deadline is shorter than a
        // delay, or the machine was suspended.
        let state = match condition() {
            Ok(value) => return Ok(value),
            Err(state) => state,
        };
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(state);
        }
        std::thread::sleep(left.min(delays.next().unwrap_or(MAX_DELAY)));
    }
}

fn delays() -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(Duration::from_millis(2)), |delay| {
        Some((*delay * 2).min(MAX_DELAY))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "the moon: not within 20ms; last seen: still cheese")]
    fn deadline_prints_last_state() {
        eventually("the moon", Duration::from_millis(20), || {
            Err::<(), _>("still cheese")
        });
    }

    #[tokio::test]
    #[should_panic(expected = "the condition never returned")]
    async fn hanging_condition_is_cancelled() {
        let hang = async || std::future::pending::<Result<(), String>>().await;
        eventually_async("an answer", Duration::from_millis(20), hang).await;
    }
}
