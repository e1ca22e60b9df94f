//! The names of what can be controlled: the keys of the control topic.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The maximum size of a name, in bytes. Names of topics have at most 249.
pub(super) const MAX_NAME: usize = 600;
const APPLICATION: &str = "app/";

/// What can be controlled.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ControlName {
    /// An application of the scheduler: `app/<name>`.
    Application(Arc<str>),
}

/// A name of an unknown kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not the name of something that can be controlled; write app/ and the name of an application")]
pub struct UnknownName;

impl ControlName {
    /// The application of this name.
    #[must_use]
    pub fn application(app: &str) -> Self {
        Self::Application(app.into())
    }
}

impl FromStr for ControlName {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let app = text.strip_prefix(APPLICATION).ok_or(UnknownName)?;
        if app.is_empty() || text.len() > MAX_NAME || text.contains(char::is_control) {
            return Err(UnknownName);
        }
        Ok(Self::application(app))
    }
}

impl fmt::Display for ControlName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Application(app) => write!(f, "{APPLICATION}{app}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_a_kind_and_reads_as_it_is_written() {
        for text in ["app/sms", "app/a/b", "app/pipeline: ä"] {
            assert_eq!(text.parse::<ControlName>().unwrap().to_string(), text);
        }
        let long = format!("app/{}", "x".repeat(MAX_NAME));
        for text in ["", "app", "app/", "sms", "pipeline/docs", "app/\n", &long] {
            assert_eq!(text.parse::<ControlName>(), Err(UnknownName), "{text}");
        }
    }
}
