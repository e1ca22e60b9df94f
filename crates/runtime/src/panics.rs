//! What is said of a panic: its place, in the log like everything else, and not its message, which may hold
//! what was being handled.
//!
//! Whoever catches a panic says what becomes of it: a handler's is a failure of its record, a task's ends the
//! process. This says where it happened, once per place and while, because a forged record can make
//! Kafka's client panic as often as it has headers.

use std::collections::HashMap;
use std::panic::PanicHookInfo;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long a place is not named again.
const INTERVAL: Duration = Duration::from_secs(10);

/// Takes the place of the standard hook, which prints messages to stderr, for the whole process. Before the log is
/// set up, or in a process without one, the line goes to stderr.
pub fn log_places() {
    let places = Places::default();
    std::panic::set_hook(Box::new(move |panic| places.log(panic)));
}

/// When each place was named last. There are as many as the program has.
#[derive(Default)]
struct Places(Mutex<HashMap<String, Instant>>);

impl Places {
    fn log(&self, panic: &PanicHookInfo<'_>) {
        let place = panic.location().map_or_else(String::new, ToString::to_string);
        if !self.is_time(&place, Instant::now()) {
            return;
        }
        let thread = thread::current();
        let thread = thread.name().unwrap_or_default();
        if tracing::dispatcher::has_been_set() {
            tracing::warn!(place, thread, "panic");
        } else {
            eprintln!("panic at {place} in thread `{thread}`");
        }
    }

    fn is_time(&self, place: &str, now: Instant) -> bool {
        let mut named = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if named
            .get(place)
            .is_some_and(|then| now.saturating_duration_since(*then) < INTERVAL)
        {
            return false;
        }
        named.insert(place.to_owned(), now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_named_once_in_a_while() {
        let places = Places::default();
        let now = Instant::now();
        let asked = [
            ("a", 0),
            ("a", 1),
            ("b", 1),
            ("a", 9),
            ("a", 10),
            ("a", 11),
            ("b", 12),
        ];
        let named = asked.map(|(place, second)| places.is_time(place, now + Duration::from_secs(second)));
        assert_eq!(named, [true, false, true, false, true, false, true]);
    }
}
