//! The one way tests wait: ask for a condition again and again until it holds, and panic at a deadline
//! with the state that was seen last. A fixed sleep is either too long or, on a busy machine, too short.

use std::fmt::Display;
use std::time::{Duration, Instant};

/// The longest pause between two looks; the first pauses are shorter, because most conditions hold soon.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// Waits until `condition` gives `Ok` and returns its value. `Err` carries the state as it is now, to be
/// printed if the deadline passes. Blocks the thread: in asynchronous tests use [`eventually_async`].
///
/// # Panics
/// When `deadline` has passed since the call and the condition still does not hold.
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

/// As [`eventually`], for a condition that awaits. A condition that itself hangs is given up at the
/// deadline too.
///
/// # Panics
/// When `deadline` has passed since the call and the condition still does not hold.
pub async fn eventually_async<T, S: Display>(
    what: &str,
    deadline: Duration,
    mut condition: impl AsyncFnMut() -> Result<T, S>,
) -> T {
    let end = tokio::time::Instant::now() + deadline;
    let mut last = None;
    for pause in pauses() {
        match tokio::time::timeout_at(end, condition()).await {
            Ok(Ok(value)) => return value,
            Ok(Err(state)) => last = Some(state),
            Err(_) => break,
        }
        if tokio::time::Instant::now() >= end {
            break;
        }
        tokio::time::sleep_until(end.min(tokio::time::Instant::now() + pause)).await;
    }
    match last {
        Some(state) => panic!("{what}: not within {deadline:?}; last seen: {state}"),
        None => panic!("{what}: not within {deadline:?}; the condition never answered"),
    }
}

/// As [`eventually`], giving back the last state instead of a panic.
pub(crate) fn poll_until<T, S>(
    deadline: Duration,
    mut condition: impl FnMut() -> Result<T, S>,
) -> Result<T, S> {
    let end = Instant::now() + deadline;
    let mut pauses = pauses();
    loop {
        // The condition is asked once more after the last pause, so that a deadline shorter than a
        // pause, or a machine that slept through it, still gets a fresh look.
        let state = match condition() {
            Ok(value) => return Ok(value),
            Err(state) => state,
        };
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(state);
        }
        std::thread::sleep(left.min(pauses.next().unwrap_or(LONGEST_PAUSE)));
    }
}

fn pauses() -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(Duration::from_millis(2)), |pause| {
        Some((*pause * 2).min(LONGEST_PAUSE))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn third_time(calls: &mut u32) -> Result<u32, String> {
        *calls += 1;
        if *calls == 3 {
            Ok(*calls)
        } else {
            Err(format!("{calls} calls"))
        }
    }

    #[test]
    fn the_value_of_the_first_look_that_holds_is_returned() {
        let mut calls = 0;
        assert_eq!(
            eventually("third time", Duration::from_secs(5), || third_time(&mut calls)),
            3
        );
    }

    #[test]
    #[should_panic(expected = "the moon: not within 20ms; last seen: still cheese")]
    fn the_deadline_prints_what_was_seen_last() {
        eventually("the moon", Duration::from_millis(20), || {
            Err::<(), _>("still cheese")
        });
    }

    #[tokio::test]
    async fn an_awaited_condition_is_polled_too() {
        let mut calls = 0;
        let third = eventually_async("third time", Duration::from_secs(5), async || {
            third_time(&mut calls)
        })
        .await;
        assert_eq!(third, 3);
    }

    #[tokio::test]
    #[should_panic(expected = "the condition never answered")]
    async fn a_condition_that_hangs_is_given_up() {
        let hang = async || std::future::pending::<Result<(), String>>().await;
        eventually_async("an answer", Duration::from_millis(20), hang).await;
    }
}
