//! Why a definition is refused.

/// A field of a definition is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct Invalid {
    /// The field, with the name that it has in `schedules.proto`, such as `cron.expression`.
    pub field: &'static str,
    /// What is wrong, and which values are valid.
    pub problem: String,
}

impl Invalid {
    pub(crate) fn new(field: &'static str, problem: impl Into<String>) -> Self {
        Self {
            field,
            problem: problem.into(),
        }
    }
}
