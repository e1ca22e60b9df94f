//! Records with a key, a header or a JSON field, and which of their copies tells the most.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use redeliver_core::json::{Scalar, scalar_at};
use redeliver_core::pipeline::TopicRole;
use redeliver_core::{Position, Record, Timestamp};

use super::timeline::{Location, Outcome};
use crate::filter::{Restriction, TextTest};
use crate::json_fields::text_of_number;

/// The maximum number of records that are found.
pub(crate) const MAX_FOUND: usize = 100;

/// What a record must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    Key(String),
    /// A header with this name and value.
    Header(String, String),
    /// A string, number or boolean at this JSON pointer.
    Field(String, String),
}

impl Wanted {
    /// The same of an indexed dead letter.
    pub(crate) fn restriction(&self) -> Restriction {
        let equal = |text: &String| TextTest::Equal(text.clone());
        match self {
            Self::Key(key) => Restriction::Key(equal(key)),
            Self::Header(name, value) => Restriction::Header(name.clone(), equal(value)),
            Self::Field(pointer, value) => Restriction::Json(pointer.clone(), equal(value)),
        }
    }

    pub(crate) fn is_in(&self, record: &Record) -> bool {
        match self {
            Self::Key(key) => record.key.as_deref() == Some(key.as_bytes()),
            Self::Header(name, value) => record
                .headers
                .iter()
                .any(|(of, found)| of == name && found == Some(value.as_bytes())),
            Self::Field(pointer, value) => record.value.as_deref().is_some_and(|document| {
                let scalar = scalar_at(document, pointer).ok().flatten();
                scalar.is_some_and(|scalar| is_equal(scalar, value))
            }),
        }
    }
}

/// As the index compares.
fn is_equal(scalar: Scalar<'_>, value: &str) -> bool {
    match &scalar {
        Scalar::Number(number) => text_of_number(value).is_some_and(|text| text == number.text()),
        Scalar::String(_) | Scalar::Bool(_) => *scalar.into_text() == *value.as_bytes(),
    }
}

/// What a copy tells about its record, alone.
pub(crate) fn outcome(location: Location, is_new: bool, is_unread: bool) -> Outcome {
    match location {
        Location::Topic(TopicRole::Output) => Outcome::Succeeded,
        _ if !is_unread => Outcome::Unknown,
        Location::Topic(TopicRole::Source) if is_new => Outcome::New,
        Location::Topic(TopicRole::Source | TopicRole::Due) => Outcome::Due,
        Location::Topic(TopicRole::Tier(_)) | Location::Scheduler => Outcome::Waits,
        // The index knows what was decided about it.
        Location::Topic(TopicRole::DeadLetter) => Outcome::Unknown,
    }
}

/// A record: the number of its pipeline, and where it entered it; of others, where it is.
pub(crate) type Id = (Option<usize>, Position);

/// Copies that are incomplete come before ends, and these before the others. Of equal ones, the newest one counts.
type Rank = (u8, Option<Timestamp>);

fn rank(outcome: Outcome, time: Option<Timestamp>) -> Rank {
    let certainty = match outcome {
        Outcome::Waits | Outcome::Due => 3,
        Outcome::New => 2,
        Outcome::Succeeded | Outcome::Dead | Outcome::Discarded => 1,
        Outcome::Redriven | Outcome::Unknown | Outcome::Unspecified => 0,
    };
    (certainty, time)
}

/// The copy of each record that tells the most, of the newest records.
#[derive(Debug)]
pub(crate) struct Best<T> {
    found: HashMap<Id, (Rank, T)>,
    is_truncated: bool,
}

impl<T> Best<T> {
    pub(crate) fn new() -> Self {
        Self {
            found: HashMap::new(),
            is_truncated: false,
        }
    }

    pub(crate) fn add(&mut self, id: Id, outcome: Outcome, time: Option<Timestamp>, copy: T) {
        let rank = rank(outcome, time);
        match self.found.entry(id) {
            Entry::Occupied(known) if known.get().0 > rank => {}
            Entry::Occupied(mut known) => _ = known.insert((rank, copy)),
            Entry::Vacant(entry) => _ = entry.insert((rank, copy)),
        }
        if self.found.len() > 2 * MAX_FOUND {
            self.found = self.newest().into_iter().collect();
        }
    }

    pub(crate) fn copies(&self) -> impl Iterator<Item = &T> {
        self.found.values().map(|(_, copy)| copy)
    }

    /// Some records are left out.
    pub(crate) fn truncate(&mut self) {
        self.is_truncated = true;
    }

    fn newest(&mut self) -> Vec<(Id, (Rank, T))> {
        let mut found: Vec<_> = self.found.drain().collect();
        found.sort_by(|(id, (rank, _)), (other_id, (other, _))| (other.1, id).cmp(&(rank.1, other_id)));
        self.is_truncated |= found.len() > MAX_FOUND;
        found.truncate(MAX_FOUND);
        found
    }

    /// The newest first, and whether some are left out.
    pub(crate) fn finish(mut self) -> (Vec<T>, bool) {
        let found = self.newest().into_iter().map(|(_, (_, copy))| copy);
        (found.collect(), self.is_truncated)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use redeliver_core::{Headers, HumanDuration};
    use redeliver_testkit::record_at;

    use super::*;

    #[test]
    fn keys_headers_and_fields_match() {
        let text = str::to_owned;
        let mut headers = Headers::new();
        headers.push_text("tenant", "a");
        headers.push("tenant", None);
        let record = Record {
            key: Some(Bytes::from_static(b"k")),
            value: Some(Bytes::from_static(
                br#"{"id": {"n": 1.50, "s": "1.5", "b": true, "z": null}}"#,
            )),
            headers,
            ..record_at("t", 0, 0)
        };
        for (wanted, expected) in [
            (Wanted::Key(text("k")), true),
            (Wanted::Key(text("K")), false),
            (Wanted::Header(text("tenant"), text("a")), true),
            (Wanted::Header(text("tenant"), text("")), false),
            (Wanted::Header(text("Tenant"), text("a")), false),
            (Wanted::Field(text("/id/n"), text("15e-1")), true),
            (Wanted::Field(text("/id/n"), text("1.5x")), false),
            (Wanted::Field(text("/id/s"), text("1.5")), true),
            (Wanted::Field(text("/id/s"), text("1.50")), false),
            (Wanted::Field(text("/id/b"), text("true")), true),
            (Wanted::Field(text("/id/z"), text("null")), false),
            (Wanted::Field(text("/id"), text("")), false),
        ] {
            assert_eq!(wanted.is_in(&record), expected, "{wanted:?}");
            let empty = record_at("t", 0, 1);
            assert!(!wanted.is_in(&empty), "{wanted:?}");
        }
    }

    #[test]
    fn only_incomplete_copies_wait() {
        let tier = Location::Topic(TopicRole::Tier(HumanDuration::from_secs(5)));
        let source = Location::Topic(TopicRole::Source);
        for (location, is_new, is_unread, expected) in [
            (source, true, true, Outcome::New),
            (source, false, true, Outcome::Due),
            (source, true, false, Outcome::Unknown),
            (tier, false, true, Outcome::Waits),
            (tier, false, false, Outcome::Unknown),
            (Location::Scheduler, false, true, Outcome::Waits),
            (Location::Topic(TopicRole::Due), false, true, Outcome::Due),
            (
                Location::Topic(TopicRole::Output),
                false,
                false,
                Outcome::Succeeded,
            ),
            (
                Location::Topic(TopicRole::DeadLetter),
                false,
                false,
                Outcome::Unknown,
            ),
        ] {
            let found = outcome(location, is_new, is_unread);
            assert_eq!(found, expected, "{location} {is_new} {is_unread}");
        }
    }

    #[test]
    fn best_copy_of_newest_remains() {
        let id = |pipeline, offset| (Some(pipeline), record_at("t", 0, offset).position);
        let at = |millis| Some(Timestamp::from_millis(millis));
        let mut best = Best::new();
        best.add(id(0, 1), Outcome::Unknown, at(1), "source");
        best.add(id(0, 1), Outcome::Waits, at(3), "tier");
        best.add(id(0, 1), Outcome::Dead, at(2), "earlier dead letter");
        best.add(id(0, 1), Outcome::Unknown, at(5), "passed");
        best.add(id(1, 1), Outcome::Unknown, at(7), "source of another");
        best.add(id(0, 2), Outcome::Dead, at(4), "dead letter");
        best.add(id(0, 2), Outcome::Succeeded, at(9), "result of a redrive");
        assert_eq!(best.copies().count(), 3);
        let expected = vec!["result of a redrive", "source of another", "tier"];
        assert_eq!(best.finish(), (expected, false));

        let mut best = Best::new();
        for offset in (0..1_000).rev() {
            best.add(id(0, offset), Outcome::Unknown, at(offset), offset);
        }
        let (found, is_truncated) = best.finish();
        assert!(is_truncated && found.iter().rev().eq(&(900..1_000).collect::<Vec<_>>()));
    }
}
