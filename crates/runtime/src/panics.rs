//! Logging of panics: the location, but not the message, which may contain a payload.
//!
//! The code that catches a panic handles its effect: a panic of a handler is a failure of its record, and a panic of a
//! task shuts down the process. This module only logs the location. It is throttled by location, because a forged record
//! can make the Kafka client panic once per header.

use std::collections::HashMap;
use std::panic::PanicHookInfo;
use std::sync::{Mutex, PoisonError};
use std::thread;

use redeliver_core::wait::LogThrottle;

/// Replaces the standard panic hook of the process, which prints messages to stderr. If the log is not set up, the
/// location is printed to stderr.
pub fn log_locations() {
    let log = PanicLog::default();
    std::panic::set_hook(Box::new(move |panic| log.log(panic)));
}

/// A throttle per location. The number of locations in the program limits its size.
#[derive(Default)]
struct PanicLog(Mutex<HashMap<String, LogThrottle>>);

impl PanicLog {
    fn log(&self, panic: &PanicHookInfo<'_>) {
        let location = panic.location().map_or_else(String::new, ToString::to_string);
        if !self.should_log(&location) {
            return;
        }
        let thread = thread::current();
        let thread = thread.name().unwrap_or_default();
        if tracing::dispatcher::has_been_set() {
            tracing::warn!(location, thread, "panic");
        } else {
            eprintln!("panic at {location} in thread `{thread}`");
        }
    }

    fn should_log(&self, location: &str) -> bool {
        let mut throttles = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        throttles.entry(location.to_owned()).or_default().should_log()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_are_throttled_by_location() {
        let log = PanicLog::default();
        let logged = ["a", "a", "b", "a", "b"].map(|location| log.should_log(location));
        assert_eq!(logged, [true, false, true, false, false]);
    }
}
