//! Scopes: what a caller of an API may do. Token files, certificates and JWTs use the same notation.
//!
//! | scope | permits |
//! |---|---|
//! | `jobs:read` | to read the jobs of all applications |
//! | `jobs:write:billing-*` | to schedule, cancel and reschedule jobs of the applications whose name matches |
//! | `jobs:*` | to do everything with all jobs |
//! | `control:write:billing-*` | to pause and limit the applications whose name matches |
//! | `control:write:tier/docs/*` | to pause, limit and release the tiers of the pipeline `docs` |
//! | `dead-letters:read` | to see what is known of the dead letters of all topics, but not their keys, values and headers |
//! | `dead-letters:payload:*-dlq` | to see their keys, values and headers as well, in the topics whose name matches |
//! | `dead-letters:operate:*-dlq` | to decide about them, such as to resolve or mute a group, in the topics whose name matches |
//! | `dead-letters:unmasked:*-dlq` | to see what `dlq_inspector.masking` masks for others, of what the other scopes show |
//! | `dead-letters:edit:*-dlq` | to redrive them with other contents, with the other scopes that this needs |
//! | `audit:read` | to see who has changed or seen what |
//! | `*` | everything |

use std::fmt;
use std::str::FromStr;

use redeliver_core::{pattern, serde_as_text};

/// The maximum length of a scope, in bytes. Names of topics have at most 249.
const MAX_LENGTH: usize = 300;
/// The maximum number of scopes of one caller.
pub const MAX_SCOPES: usize = 100;
const ANY: &str = "*";

/// What a scope is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Area {
    /// Jobs, by the name of their application.
    Jobs,
    /// What runs and how fast, by the name of the application, or by the whole name of a pipeline or tier, such as `pipeline/docs`. Those who write jobs must not lift what an operator has paused.
    Control,
    /// Dead letters, by the name of their topic.
    DeadLetters,
    /// The records of who has changed or seen what. They have no name: only scopes for all of them have an effect.
    Audit,
}

/// What a scope permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// To see it.
    Read,
    /// To create or change it. Does not include [`Verb::Read`].
    Write,
    /// To see the contents of the records as well. Does not include [`Verb::Read`].
    Payload,
    /// To decide what becomes of it. Does not include [`Verb::Read`].
    Operate,
    /// To see what is masked for others. Includes no other verb.
    Unmasked,
    /// To have it written with other contents. Includes no other verb.
    Edit,
}

/// A permission: a verb, in an area, for the names that match a pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scope {
    /// `None`: all areas.
    area: Option<Area>,
    /// `None`: all verbs.
    verb: Option<Verb>,
    /// The application or the topic. `*` matches any text.
    pattern: String,
}

impl Area {
    const ALL: [Self; 4] = [Self::Jobs, Self::Control, Self::DeadLetters, Self::Audit];

    /// As it is written in scopes.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Jobs => "jobs",
            Self::Control => "control",
            Self::DeadLetters => "dead-letters",
            Self::Audit => "audit",
        }
    }

    /// The verbs that have a meaning in this area.
    const fn verbs(self) -> &'static [Verb] {
        match self {
            Self::Jobs | Self::Control => &[Verb::Read, Verb::Write],
            Self::DeadLetters => &[
                Verb::Read,
                Verb::Payload,
                Verb::Unmasked,
                Verb::Operate,
                Verb::Edit,
            ],
            Self::Audit => &[Verb::Read],
        }
    }
}

impl Verb {
    /// As it is written in scopes.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Payload => "payload",
            Self::Operate => "operate",
            Self::Unmasked => "unmasked",
            Self::Edit => "edit",
        }
    }
}

impl Scope {
    /// Permits everything.
    #[must_use]
    pub fn everything() -> Self {
        Self {
            area: None,
            verb: None,
            pattern: ANY.to_owned(),
        }
    }

    /// Whether it permits this for the application or topic `name`; `None` means for all of them.
    #[must_use]
    pub fn permits(&self, area: Area, verb: Verb, name: Option<&str>) -> bool {
        let matches = match name {
            Some(name) => pattern::matches(&self.pattern, name),
            None => self.pattern == ANY,
        };
        self.is_about(area, verb) && matches
    }

    /// Whether it permits this for some applications or topics.
    #[must_use]
    pub fn is_about(&self, area: Area, verb: Verb) -> bool {
        self.area.is_none_or(|of| of == area) && self.verb.is_none_or(|of| of == verb)
    }

    /// The scope that permits exactly this. `None` means all names.
    #[must_use]
    pub fn needed(area: Area, verb: Verb, name: Option<&str>) -> Self {
        Self {
            area: Some(area),
            verb: Some(verb),
            pattern: name.unwrap_or(ANY).to_owned(),
        }
    }
}

impl FromStr for Scope {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const VALID: &str = "write AREA:VERB or AREA:VERB:PATTERN, such as jobs:read or jobs:write:billing-*, or * for everything";
        if text.len() > MAX_LENGTH || text.contains(char::is_control) {
            return Err(format!(
                "is not a scope: it is longer than {MAX_LENGTH} bytes or contains control characters; {VALID}"
            ));
        }
        if text == ANY {
            return Ok(Self::everything());
        }
        // Names of applications may contain colons.
        let mut parts = text.splitn(3, ':');
        let (area, verb) = (parts.next().unwrap_or_default(), parts.next());
        let pattern = parts.next().unwrap_or(ANY);
        let Some(area) = Area::ALL.into_iter().find(|known| known.as_str() == area) else {
            return Err(format!(
                "`{text}` is not a scope: `{area}` is not jobs, control, dead-letters or audit; {VALID}"
            ));
        };
        let known: Vec<&str> = area.verbs().iter().map(|verb| verb.as_str()).collect();
        let verb = match verb {
            Some(ANY) => None,
            Some(verb) if known.contains(&verb) => {
                area.verbs().iter().find(|known| known.as_str() == verb).copied()
            }
            _ => {
                let verbs = known.join(", ");
                let area = area.as_str();
                return Err(format!(
                    "`{text}` is not a scope: the verbs of {area} are {verbs} and *; {VALID}"
                ));
            }
        };
        if pattern.is_empty() {
            return Err(format!("`{text}` is not a scope: the pattern is empty; {VALID}"));
        }
        Ok(Self {
            area: Some(area),
            verb,
            pattern: pattern.to_owned(),
        })
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(area) = self.area else {
            return f.write_str(ANY);
        };
        write!(f, "{}:{}", area.as_str(), self.verb.map_or(ANY, Verb::as_str))?;
        if self.pattern == ANY {
            return Ok(());
        }
        write!(f, ":{}", self.pattern)
    }
}

serde_as_text!(Scope);

pub(super) fn check_scopes(scopes: &[Scope]) -> Result<(), String> {
    match scopes.len() {
        0 => Err("scopes is empty; list at least one, such as jobs:read".to_owned()),
        1..=MAX_SCOPES => Ok(()),
        count => Err(format!("has {count} scopes; the maximum is {MAX_SCOPES}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(text: &str) -> Scope {
        text.parse().unwrap()
    }

    #[test]
    fn scope_permits_matching_names() {
        use Area::{Audit, Control, DeadLetters, Jobs};
        use Verb::{Edit, Operate, Payload, Read, Unmasked, Write};
        for (text, area, verb, name, expected) in [
            ("jobs:read", Jobs, Read, Some("mail"), true),
            ("jobs:read", Jobs, Read, None, true),
            ("jobs:read", Jobs, Write, Some("mail"), false),
            ("jobs:read", DeadLetters, Read, Some("mail"), false),
            ("jobs:write", Jobs, Read, Some("mail"), false),
            ("jobs:write:billing-*", Jobs, Write, Some("billing-eu"), true),
            ("jobs:write:billing-*", Jobs, Write, Some("mail"), false),
            ("jobs:write:billing-*", Jobs, Write, None, false),
            ("jobs:*:a:b", Jobs, Write, Some("a:b"), true),
            ("jobs:*:a:b", Jobs, Write, Some("a"), false),
            (
                "dead-letters:read:*-dlq",
                DeadLetters,
                Read,
                Some("docs-dlq"),
                true,
            ),
            ("dead-letters:read", DeadLetters, Payload, Some("docs-dlq"), false),
            ("dead-letters:payload:a", DeadLetters, Payload, Some("a"), true),
            ("dead-letters:payload", DeadLetters, Read, Some("a"), false),
            ("dead-letters:*", DeadLetters, Payload, None, true),
            ("dead-letters:read", DeadLetters, Operate, Some("a"), false),
            ("dead-letters:payload", DeadLetters, Operate, Some("a"), false),
            ("dead-letters:operate", DeadLetters, Read, Some("a"), false),
            ("dead-letters:operate:a", DeadLetters, Operate, Some("a"), true),
            ("dead-letters:operate:a", DeadLetters, Operate, Some("b"), false),
            ("dead-letters:*", DeadLetters, Operate, None, true),
            ("dead-letters:payload", DeadLetters, Unmasked, Some("a"), false),
            ("dead-letters:unmasked:a", DeadLetters, Unmasked, Some("a"), true),
            ("dead-letters:unmasked", DeadLetters, Payload, Some("a"), false),
            ("dead-letters:edit:a", DeadLetters, Edit, Some("a"), true),
            ("dead-letters:edit:a", DeadLetters, Operate, Some("a"), false),
            ("dead-letters:operate", DeadLetters, Edit, Some("a"), false),
            ("jobs:*", DeadLetters, Payload, Some("a"), false),
            // The right to write jobs does not include lifting a pause.
            ("jobs:write", Control, Write, Some("mail"), false),
            ("jobs:*", Control, Read, Some("mail"), false),
            ("control:*", Jobs, Read, Some("mail"), false),
            ("control:read", Control, Read, None, true),
            ("control:read", Control, Write, Some("mail"), false),
            ("control:write:mail", Control, Write, Some("mail"), true),
            ("control:write:mail", Control, Write, Some("sms"), false),
            ("*", Control, Write, Some("mail"), true),
            ("*", DeadLetters, Read, None, true),
            ("audit:read", Audit, Read, None, true),
            ("dead-letters:*", Audit, Read, None, false),
            ("*", Jobs, Write, Some("mail"), true),
        ] {
            assert_eq!(
                scope(text).permits(area, verb, name),
                expected,
                "{text} {verb:?} {name:?}"
            );
        }
    }

    #[test]
    fn scope_survives_a_round_trip() {
        for text in [
            "jobs:read",
            "jobs:*",
            "jobs:write:a-*",
            "control:write:a-*",
            "dead-letters:read:x",
            "*",
        ] {
            assert_eq!(scope(text).to_string(), text);
        }
        assert_eq!(scope("jobs:read:*").to_string(), "jobs:read");
        assert_eq!(
            Scope::needed(Area::Jobs, Verb::Write, Some("mail")),
            scope("jobs:write:mail")
        );
        assert_eq!(Scope::needed(Area::Jobs, Verb::Read, None), scope("jobs:read"));
    }

    #[test]
    fn invalid_scope_names_the_part() {
        for (text, says) in [
            ("", "`` is not jobs, control, dead-letters or audit"),
            ("job:read", "`job` is not jobs, control, dead-letters or audit"),
            ("jobs", "the verbs of jobs are read, write and *"),
            ("jobs:rite", "the verbs of jobs are read, write and *"),
            ("control:pause", "the verbs of control are read, write and *"),
            ("audit:write", "the verbs of audit are read and *"),
            (
                "dead-letters:write",
                "the verbs of dead-letters are read, payload, unmasked, operate, edit and *",
            ),
            ("jobs:read:", "the pattern is empty"),
            ("jobs:read:a\n", "control characters"),
        ] {
            let error = text.parse::<Scope>().unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
