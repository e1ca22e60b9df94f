//! The patterns that select dead-letter topics.

use redeliver_core::pattern::matches;
use redeliver_runtime::config::{AUDIT_TOPIC, CONTROL_TOPIC, STATUS_TOPIC, WAITING_ACTIONS_TOPIC};

use crate::{group_states, ledger};

/// Topic names and patterns such as `*-dlq`, in which `*` matches any text, including none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patterns {
    patterns: Vec<String>,
    excluded: Vec<String>,
}

/// How the names of the audit, control, status and actions topics of all installations end, unless they are configured otherwise.
const OF_INSTALLATIONS: [&str; 4] = [AUDIT_TOPIC, CONTROL_TOPIC, STATUS_TOPIC, WAITING_ACTIONS_TOPIC];

impl Patterns {
    /// Creates the patterns from `dlq_inspector.topics`.
    #[must_use]
    pub fn new(patterns: &[String]) -> Self {
        Self {
            patterns: patterns.to_vec(),
            excluded: Vec::new(),
        }
    }

    /// Without these topics, such as the audit topic: access to dead letters does not include who has read
    /// them.
    #[must_use]
    pub fn without(self, excluded: impl Into<Vec<String>>) -> Self {
        Self {
            excluded: excluded.into(),
            ..self
        }
    }

    /// The topics that are named in full.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let names = self.patterns.iter().map(String::as_str);
        names.filter(|pattern| !pattern.contains('*') && self.matches(pattern))
    }

    /// Whether a topic is a dead-letter topic. The inspector's own topics and internal ones never are, nor are the audit, control, status and actions topics of
    /// all installations.
    #[must_use]
    pub fn matches(&self, topic: &str) -> bool {
        ![ledger::TOPIC, group_states::TOPIC].contains(&topic)
            && !topic.starts_with("__")
            && !OF_INSTALLATIONS.iter().any(|name| topic.ends_with(name))
            && !self.excluded.iter().any(|excluded| excluded == topic)
            && self.patterns.iter().any(|pattern| matches(pattern, topic))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_and_internal_topics_never_match() {
        let all = Patterns::new(&["*".to_owned()]);
        assert_eq!(all.names().next(), None);
        let named = ["*-dlq", "a", ledger::TOPIC, group_states::TOPIC].map(str::to_owned);
        assert_eq!(Patterns::new(&named).names().collect::<Vec<_>>(), ["a"]);
        let others = all.clone().without(["audit".to_owned()]);
        assert!(others.matches("x") && !others.matches("audit"));
        assert!(all.matches("x") && !all.matches("__consumer_offsets"));
        assert!(all.matches("redeliver.audit-dlq"));
        for other in [
            "redeliver.audit",
            "staging-redeliver.audit",
            "staging-redeliver.control",
            "redeliver.status",
            "eu-redeliver.waiting.actions",
        ] {
            assert!(!all.matches(other), "{other}");
        }
        assert!(!all.matches(ledger::TOPIC) && !all.matches(group_states::TOPIC));
    }
}
