//! Answers of Kafka that would skip dead letters for good. A broker that has just started, or does not know of a change yet, gives them too. So they count once
//! Kafka has given them for a while; until then, a redrive tries again. No IO.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How long Kafka must give the same answer.
const CERTAIN: Duration = Duration::from_secs(5);
/// After this time without a question, an answer counts as the first one. Redrives try again at least every 30 seconds.
const FORGOTTEN: Duration = Duration::from_secs(120);

/// What Kafka has said, by what it is about: a topic with the id that it should have, or a position.
#[derive(Debug, Default)]
pub struct Doubts(HashMap<String, Doubt>);

#[derive(Clone, Copy, Debug)]
struct Doubt {
    since: Instant,
    last: Instant,
}

impl Doubts {
    /// Kafka has given such an answer. Returns whether it counts.
    pub fn is_certain(&mut self, about: &str, now: Instant) -> bool {
        self.0
            .retain(|_, doubt| now.saturating_duration_since(doubt.last) < FORGOTTEN);
        let first = Doubt {
            since: now,
            last: now,
        };
        let doubt = self.0.entry(about.to_owned()).or_insert(first);
        doubt.last = now;
        now.saturating_duration_since(doubt.since) >= CERTAIN
    }

    /// Kafka has given another answer.
    pub fn clear(&mut self, about: &str) {
        self.0.remove(about);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lasting_answers_count() {
        let start = Instant::now();
        let mut doubts = Doubts::default();
        let mut is_certain = |millis, is_cleared| {
            if is_cleared {
                doubts.clear("orders");
            }
            doubts.is_certain("orders", start + Duration::from_millis(millis))
        };
        assert!(!is_certain(0, false) && !is_certain(4_999, false));
        assert!(is_certain(5_000, false) && is_certain(60_000, false));
        assert!(!is_certain(60_001, true) && is_certain(66_000, false));
        // Nobody has asked for long.
        assert!(!is_certain(300_000, false));
        assert!(!doubts.is_certain("payments", start + Duration::from_millis(310_000)));
    }
}
