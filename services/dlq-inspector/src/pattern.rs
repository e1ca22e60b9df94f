//! Which topics are dead-letter topics, by the patterns of the configuration.

use crate::ledger;

/// Names and patterns such as `*-dlq`; `*` stands for any text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patterns(Vec<String>);

impl Patterns {
    /// With the patterns of the configuration.
    #[must_use]
    pub fn new(patterns: &[String]) -> Self {
        Self(patterns.to_vec())
    }

    /// Whether a topic is one of dead letters. The ledger and Kafka's own topics are none, whatever the
    /// patterns say.
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
    // The leftmost place for each part leaves the most room for those behind it.
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
    fn a_star_stands_for_any_text() {
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
    fn the_ledger_and_internal_topics_are_no_dead_letters() {
        let all = Patterns::new(&["*".to_owned()]);
        assert!(all.matches("x") && !all.matches(ledger::TOPIC) && !all.matches("__consumer_offsets"));
    }
}
