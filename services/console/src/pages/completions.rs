//! What a filter box offers: fields of the filter language, and values that the viewer has seen beside it.

use std::collections::BTreeSet;

use redeliver_client::messages::{DeadLetter, Group};
use redeliver_core::terminal::is_harmful;

use super::groups;
use crate::backend::Backend;
use crate::page::literal;

/// The most values, and the longest one in bytes.
const VALUES: usize = 50;
const MAX_VALUE: usize = 200;
/// Groups whose values are offered where the page has no rows of its own.
const GROUPS: i32 = 100;

/// The beginning of a condition on each field, or all conditions if there are few.
const CONDITIONS: [&str; 36] = [
    "state = OPEN",
    "state = REDRIVEN",
    "state = DISCARDED",
    "error_code = ",
    "error_class = ",
    "error_message : ",
    "pipeline = ",
    "topic = ",
    "headers.",
    "json./",
    "key = ",
    "dead_at > ",
    "failed_at > ",
    "expires_at < ",
    "origin_timestamp > ",
    "retry_count > ",
    "value_size > ",
    "group = ",
    "id = ",
    "job_id = ",
    "trace_id = ",
    "partition = ",
    "offset = ",
    "origin.topic = ",
    "origin.partition = ",
    "origin.offset = ",
    "job_id :*",
    "expires_at :*",
    "dialect = REDELIVER",
    "dialect = SPRING",
    "dialect = CONNECT",
    "dialect = STREAMS",
    "dialect = SMALLRYE",
    "dialect = SHARE_GROUP",
    "dialect = UNKNOWN",
    "NOT ",
];

/// What completes a filter.
pub(super) struct Completions {
    /// Conditions on values, such as `error_code = "http.422"`.
    values: BTreeSet<String>,
    /// What is in the box.
    filter: String,
}

impl Completions {
    pub(super) fn of_letters(filter: &str, letters: &[DeadLetter]) -> Self {
        let mut completions = Self::of(filter);
        for letter in letters {
            let DeadLetter {
                error_code,
                error_class,
                pipeline,
                ..
            } = letter;
            completions.add([
                ("error_code", error_code),
                ("error_class", error_class),
                ("pipeline", pipeline),
            ]);
            if let Some(position) = &letter.position {
                completions.add([("topic", &position.topic)]);
            }
        }
        completions
    }

    pub(super) fn of_groups(filter: &str, groups: &[Group]) -> Self {
        let mut completions = Self::of(filter);
        for group in groups {
            let Group {
                error_code,
                error_class,
                pipeline,
                ..
            } = group;
            completions.add([
                ("error_code", error_code),
                ("error_class", error_class),
                ("pipeline", pipeline),
            ]);
        }
        completions
    }

    /// For a page without rows, such as one whose filter is not complete yet: with values of the groups that need attention.
    pub(super) async fn without_rows(filter: &str, backend: &Backend) -> Self {
        let found = backend.dead_letters().groups(groups::open("", GROUPS)).await;
        // Without them, there are fewer completions; what is wrong is on the page already.
        let found = found.map(|answer| answer.groups).unwrap_or_default();
        Self::of_groups(filter, &found)
    }

    fn of(filter: &str) -> Self {
        Self {
            values: BTreeSet::new(),
            filter: filter.trim().to_owned(),
        }
    }

    fn add<'v>(&mut self, values: impl IntoIterator<Item = (&'static str, &'v String)>) {
        for (field, value) in values {
            let is_usable = !value.is_empty() && value.len() <= MAX_VALUE && !value.contains(is_harmful);
            if is_usable && self.values.len() < VALUES {
                self.values.insert(format!("{field} = {}", literal(value)));
            }
        }
    }

    /// Conditions, for a box that is empty or for a script that completes the last condition.
    pub(super) fn conditions(&self) -> impl Iterator<Item = &str> {
        self.values.iter().map(String::as_str).chain(CONDITIONS)
    }

    /// The filter in the box with one more condition.
    pub(super) fn longer(&self) -> impl Iterator<Item = String> {
        let conditions = self.conditions().filter(move |_| !self.filter.is_empty());
        conditions.map(move |condition| format!("{} AND {condition}", self.filter))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_is_offered() {
        let docs = include_str!("../../../../docs/dead-letters.md");
        let rows = docs
            .split("\n## Filters")
            .nth(1)
            .unwrap()
            .split("\n| fields |")
            .nth(1)
            .unwrap();
        let rows = rows.lines().skip(2).take_while(|line| line.starts_with('|'));
        let mut fields = 0;
        for column in rows.map(|row| row.split('|').nth(1).unwrap()) {
            for field in column
                .split('`')
                .skip(1)
                .step_by(2)
                .filter(|field| *field != "topic/partition/offset")
            {
                let begin = field.trim_end_matches("NAME").trim_end_matches("POINTER");
                assert!(
                    CONDITIONS.iter().any(|condition| condition.starts_with(begin)),
                    "{field}"
                );
                fields += 1;
            }
        }
        assert!(fields > 20, "{fields}");
    }

    #[test]
    fn values_are_quoted_and_harmless() {
        let letter = |code: &str| DeadLetter {
            error_code: code.to_owned(),
            ..DeadLetter::default()
        };
        let long = "x".repeat(MAX_VALUE + 1);
        let letters = ["http.422", "a\"b", "\u{202e}x", long.as_str(), "http.422"].map(letter);
        let completions = Completions::of_letters(" state = OPEN ", &letters);
        let values: Vec<&str> = completions.conditions().take(3).collect();
        assert_eq!(
            values,
            [
                "error_code = \"a\\\"b\"",
                "error_code = \"http.422\"",
                "state = OPEN"
            ]
        );
        let longer = completions.longer().nth(1);
        assert_eq!(
            longer.as_deref(),
            Some("state = OPEN AND error_code = \"http.422\"")
        );
        assert_eq!(Completions::of_letters("", &[]).longer().count(), 0);
    }
}
