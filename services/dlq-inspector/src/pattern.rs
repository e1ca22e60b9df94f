//! The patterns that select dead-letter topics.

use crate::ledger;

/// Topic names and patterns such as `*-dlq`, in which `*` matches any text, including none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patterns(Vec<String>);

impl Patterns {
    /// Creates the patterns from `dlq_inspector.topics`.
    #[must_use]
    pub fn new(patterns: &[String]) -> Self {
        Self(patterns.to_vec())
    }

    /// Whether a topic is a dead-letter topic. The ledger and internal topics never are.
    #[must_use]
    pub fn matches(&self, topic: &str) -> bool {
        topic != ledger::TOPIC
            && !topic.starts_with("__")
            && self.0.iter().any(|pattern| matches(pattern, topic))
    }
}

fn matches(pattern: &str, topic: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else {
        return pattern == topic;
    };
    let Some(mut topic) = topic.strip_prefix(head) else {
        return false;
    };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let tail = parts.pop().unwrap_or_default();
    // The leftmost match of each part leaves the longest rest for the parts after it.
    for part in parts {
        let Some(at) = topic.find(part) else {
            return false;
        };
        topic = &topic[at + part.len()..];
    }
    topic.ends_with(tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_matches_any_text() {
        for (pattern, topic, expected) in [
            ("*-dlq", "crawl-dlq", true),
            ("*-dlq", "-dlq", true),
            ("*-dlq", "crawl-dlq-2", false),
            ("scheduler.jobs.dlq", "scheduler.jobs.dlq", true),
            ("scheduler.jobs.dlq", "schedulerxjobsxdlq", false),
            ("dlq.*", "dlq.orders", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("a*a", "a", false),
            ("*", "anything", true),
            ("", "anything", false),
        ] {
            assert_eq!(matches(pattern, topic), expected, "{pattern} {topic}");
        }
    }

    #[test]
    fn the_ledger_and_internal_topics_never_match() {
        let all = Patterns::new(&["*".to_owned()]);
        assert!(all.matches("x") && !all.matches(ledger::TOPIC) && !all.matches("__consumer_offsets"));
    }
}
