//! What the control topic contains.

use std::collections::BTreeMap;
use std::fmt;

use redeliver_core::Record;
use redeliver_core::failure::bounded_text;

use super::name::ControlName;
use super::value::{ApplicationControl, Desired, InvalidValue, Value};

/// The maximum length of an unknown key in reports, in bytes.
const SHOWN: usize = 100;

/// The values of the topic. The newest one of each key counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    values: BTreeMap<ControlName, Value>,
    /// What is ignored, or obeyed only as far as this version knows it, by key.
    problems: BTreeMap<String, Problem>,
}

/// Why a value is not, or not completely, obeyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Problem {
    /// Its key is of an unknown kind.
    Name,
    /// It is ignored.
    Ignored(InvalidValue),
    /// A newer version has written it, which may want more.
    Newer,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name => f.write_str("is of an unknown kind, and ignored"),
            Self::Ignored(invalid) => write!(f, "{invalid}, and is ignored"),
            Self::Newer => {
                f.write_str("was written by a newer version, and obeyed as far as this one knows it")
            }
        }
    }
}

impl Snapshot {
    /// Takes note of a record, which is newer than all before.
    pub fn apply(&mut self, record: &Record) {
        let key = record.key.as_deref().unwrap_or_default();
        let key = String::from_utf8_lossy(key);
        let shown = bounded_text(&key, SHOWN);
        self.problems.remove(&shown);
        let Ok(name) = key.parse::<ControlName>() else {
            if record.value.is_some() {
                self.problems.insert(shown, Problem::Name);
            }
            return;
        };
        self.values.remove(&name);
        match record.value.as_ref().map(Value::decode) {
            None => {}
            Some(Ok(value)) => {
                if value.is_newer {
                    self.problems.insert(shown, Problem::Newer);
                }
                self.values.insert(name, value);
            }
            Some(Err(invalid)) => drop(self.problems.insert(shown, Problem::Ignored(invalid))),
        }
    }

    /// The value of a name.
    #[must_use]
    pub fn get(&self, name: &ControlName) -> Option<&Value> {
        self.values.get(name)
    }

    /// All values that are obeyed, by name.
    pub fn values(&self) -> impl Iterator<Item = (&ControlName, &Value)> {
        self.values.iter()
    }

    /// What is wanted of applications, by name.
    pub fn applications(&self) -> impl Iterator<Item = (&str, &ApplicationControl)> {
        self.values
            .iter()
            .map(|(name, value)| match (name, &value.desired) {
                (ControlName::Application(app), Desired::Application(desired)) => (&**app, desired),
            })
    }

    /// What is not, or not completely, obeyed, by key. Long keys are cut off.
    pub fn problems(&self) -> impl ExactSizeIterator<Item = (&str, Problem)> {
        self.problems
            .iter()
            .map(|(key, problem)| (key.as_str(), *problem))
    }

    /// The problem of a name, if there is one.
    #[must_use]
    pub fn problem(&self, name: &ControlName) -> Option<Problem> {
        self.problems
            .get(&bounded_text(&name.to_string(), SHOWN))
            .copied()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use bytes::Bytes;
    use redeliver_core::{Headers, Position};

    use super::super::value::Run;
    use super::*;

    pub(crate) fn record(offset: i64, key: &str, value: Option<Bytes>) -> Record {
        Record {
            position: Position {
                topic: "control".into(),
                partition: 0,
                offset,
            },
            timestamp: None,
            key: Some(Bytes::copy_from_slice(key.as_bytes())),
            value,
            headers: Headers::new(),
            unreadable_headers: 0,
        }
    }

    pub(crate) fn paused(revision: u64) -> Value {
        Value {
            revision,
            changed_at: None,
            changed_by: "ann".to_owned(),
            why: "outage".to_owned(),
            change_id: Bytes::new(),
            desired: Desired::Application(ApplicationControl {
                run: Some(Run::Paused),
                rate: None,
            }),
            is_newer: false,
        }
    }

    #[test]
    fn the_newest_value_of_a_name_counts() {
        let (mut snapshot, name) = (Snapshot::default(), ControlName::application("sms"));
        for revision in [1, 2] {
            snapshot.apply(&record(0, "app/sms", Some(paused(revision).encode())));
            assert_eq!(snapshot.get(&name), Some(&paused(revision)));
        }
        assert_eq!(snapshot.applications().count(), 1);
        snapshot.apply(&record(0, "app/sms", None));
        assert_eq!(snapshot, Snapshot::default());
    }

    #[test]
    fn unknown_kinds_are_reported_and_stop_nothing() {
        let mut snapshot = Snapshot::default();
        snapshot.apply(&record(0, "app/sms", Some(paused(1).encode())));
        snapshot.apply(&record(1, "planet/mars", Some(Bytes::from_static(b"x"))));
        snapshot.apply(&record(2, "app/mail", Some(Bytes::from_static(b"\xff"))));
        let problems: Vec<_> = snapshot.problems().collect();
        let malformed = Problem::Ignored(InvalidValue::Malformed);
        assert_eq!(
            problems,
            [("app/mail", malformed), ("planet/mars", Problem::Name)]
        );
        assert_eq!(snapshot.applications().count(), 1);
        // An invalid value takes the place of a valid one, as after a restart.
        snapshot.apply(&record(3, "app/sms", Some(Bytes::from_static(b"\xff"))));
        assert_eq!(
            (snapshot.applications().count(), snapshot.problems().len()),
            (0, 3)
        );
        for key in ["app/sms", "app/mail", "planet/mars"] {
            snapshot.apply(&record(4, key, None));
        }
        assert_eq!(snapshot, Snapshot::default());
    }
}
