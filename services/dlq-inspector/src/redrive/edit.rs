//! How the record of a dead letter is edited before it is redriven. No IO.
//!
//! An edit names what differs from the record in the dead-letter topic. The rest is read from Kafka when the
//! record is written, so that an edit never contains what its author has not seen. A caller for whom the dead
//! letter is masked may not edit it: results of edits could be compared.

use bytes::Bytes;
use redeliver_core::failure::bounded_text;
use redeliver_core::kept::is_editable;
use redeliver_core::redrive::{REDRIVE_EDITED, REDRIVE_OF, is_edit_header};
use redeliver_core::{Output, Record, Timestamp};
use redeliver_proto::v1;

use super::record::{Target, redriven};

/// The maximum number of headers that an edit sets, and of names that it removes.
const MAX_HEADERS: usize = 100;
/// The maximum length of the name of a header that an edit sets or removes, in bytes.
const MAX_NAME: usize = 1_000;
/// The maximum length of a name in an audit entry or a problem, in bytes.
const SHOWN_NAME: usize = 100;

/// A valid edit.
#[derive(Clone, Debug, PartialEq)]
pub struct Edit(v1::RedriveEdit);

/// Why an edit is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidEdit {
    /// It does nothing.
    #[error("changes nothing; set a value, a key or headers")]
    Nothing,
    /// It has too many headers.
    #[error("sets or removes more than {MAX_HEADERS} headers")]
    TooMany,
    /// A header cannot have this name.
    #[error(
        "the header `{0}` has an invalid name: it is empty, longer than {MAX_NAME} bytes, or has control characters"
    )]
    Name(String),
    /// A header is not one of the user.
    #[error("the header `{0}` cannot be set or removed: Redeliver or another framework sets it")]
    NotOfUser(String),
    /// A header is both set and removed.
    #[error("the header `{0}` is set and removed")]
    Both(String),
}

impl Edit {
    /// Checks an edit.
    ///
    /// # Errors
    /// If it changes nothing, or a header that is none of the user.
    pub fn read(edit: v1::RedriveEdit) -> Result<Self, InvalidEdit> {
        if edit.set_headers.len() > MAX_HEADERS || edit.removed_headers.len() > MAX_HEADERS {
            return Err(InvalidEdit::TooMany);
        }
        let set = edit.set_headers.iter().map(|header| &header.name);
        for name in set.chain(&edit.removed_headers) {
            let shown = || bounded_text(name, SHOWN_NAME);
            if name.is_empty() || name.len() > MAX_NAME || name.contains(char::is_control) {
                return Err(InvalidEdit::Name(shown()));
            }
            if !is_editable(name) {
                return Err(InvalidEdit::NotOfUser(shown()));
            }
        }
        let mut removed = edit.removed_headers.iter();
        if let Some(name) = removed.find(|name| edit.set_headers.iter().any(|header| header.name == **name)) {
            return Err(InvalidEdit::Both(bounded_text(name, SHOWN_NAME)));
        }
        let edit = Self(edit);
        if edit.parts().is_empty() {
            return Err(InvalidEdit::Nothing);
        }
        Ok(edit)
    }

    /// As it is stored.
    #[must_use]
    pub fn to_record(&self) -> v1::RedriveEdit {
        self.0.clone()
    }

    /// What it changes: `value`, `key` and `headers`.
    #[must_use]
    pub fn parts(&self) -> Vec<&'static str> {
        let edit = &self.0;
        let has_headers = !edit.set_headers.is_empty() || !edit.removed_headers.is_empty();
        [
            ("value", edit.value.is_some()),
            ("key", edit.key.is_some()),
            ("headers", has_headers),
        ]
        .into_iter()
        .filter_map(|(part, is_edited)| is_edited.then_some(part))
        .collect()
    }

    /// What it changes, with the names of headers and without contents.
    #[must_use]
    pub fn names(&self) -> String {
        let parts = self.parts().into_iter().filter(|part| *part != "headers");
        let mut names: Vec<String> = parts.map(str::to_owned).collect();
        for (does, headers) in [
            (
                "sets",
                self.0.set_headers.iter().map(|header| &header.name).collect(),
            ),
            ("removes", self.0.removed_headers.iter().collect::<Vec<_>>()),
        ] {
            for name in headers {
                names.push(format!("{does} header `{}`", bounded_text(name, SHOWN_NAME)));
            }
        }
        names.dedup();
        format!("edits {}", names.join(", "))
    }

    /// The record to write for a dead letter.
    #[must_use]
    pub fn redriven(&self, letter: &Record, target: &Target, redrive_id: &str, now: Timestamp) -> Output {
        let mut output = redriven(&self.apply(letter), target, redrive_id, now);
        // Those of an earlier edit: the dead letter has them.
        output.headers = output.headers.filtered(|name| !is_edit_header(name));
        output.headers.push_text(REDRIVE_OF, &letter.position.to_string());
        output.headers.push_text(REDRIVE_EDITED, &self.parts().join(", "));
        output
    }

    fn apply(&self, letter: &Record) -> Record {
        let edit = &self.0;
        let is_replaced = |name: &str| {
            edit.removed_headers.iter().any(|removed| removed == name)
                || edit.set_headers.iter().any(|header| header.name == name)
        };
        let mut headers = letter.headers.filtered(|name| !is_replaced(name));
        for header in &edit.set_headers {
            headers.push(&header.name, header.value.as_deref());
        }
        Record {
            key: edited(edit.key.as_ref(), letter.key.as_ref()),
            value: edited(edit.value.as_ref(), letter.value.as_ref()),
            headers,
            ..letter.clone()
        }
    }
}

fn edited(edited: Option<&v1::EditedBytes>, unedited: Option<&Bytes>) -> Option<Bytes> {
    match edited {
        Some(edited) => edited.bytes.clone(),
        None => unedited.cloned(),
    }
}

#[cfg(test)]
mod tests {
    use redeliver_core::Headers;
    use redeliver_core::redrive::REDRIVE_ID;
    use redeliver_testkit::record_at;

    use super::super::job::TargetOptions;
    use super::super::record::{Candidate, Destinations};
    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);

    fn header(name: &str, value: Option<&'static [u8]>) -> v1::Header {
        v1::Header {
            name: name.to_owned(),
            value: value.map(Bytes::from_static),
        }
    }

    fn value(value: Option<&'static [u8]>) -> Option<v1::EditedBytes> {
        Some(v1::EditedBytes {
            bytes: value.map(Bytes::from_static),
        })
    }

    fn letter() -> Record {
        let headers: Headers = [
            ("tenant", Some(&b"a"[..])),
            ("\u{e9}", Some(b"\xff")),
            ("tenant", None),
            ("kafka_dlt-original-topic", Some(b"docs")),
            ("other", Some(b"b")),
            (REDRIVE_OF, Some(b"x-dlq/0/1")),
        ]
        .into_iter()
        .collect();
        Record {
            timestamp: Some(NOW),
            key: Some(Bytes::from_static(b"k\0")),
            value: Some(Bytes::from_static(b"v\xff")),
            headers,
            ..record_at("s-dlt", 3, 17)
        }
    }

    fn written(edit: v1::RedriveEdit) -> Output {
        let destinations = Destinations::new(&[], &["docs".to_owned()], Vec::new(), 3);
        let target = destinations.target(Candidate::of(&letter()), &TargetOptions::default());
        Edit::read(edit)
            .unwrap()
            .redriven(&letter(), &target.unwrap(), "r1", NOW)
    }

    #[test]
    fn edit_changes_only_named_parts() {
        let output = written(v1::RedriveEdit {
            value: value(Some(b"new\0")),
            removed_headers: vec!["other".to_owned()],
            set_headers: vec![header("tenant", Some(b"\xfe")), header("tenant", None)],
            ..v1::RedriveEdit::default()
        });
        assert_eq!(output.key.as_deref(), Some(&b"k\0"[..]));
        assert_eq!(output.value.as_deref(), Some(&b"new\0"[..]));
        let headers: Vec<(&str, Option<&[u8]>)> = output.headers.iter().collect();
        let user = [
            ("\u{e9}", Some(&b"\xff"[..])),
            ("tenant", Some(b"\xfe")),
            ("tenant", None),
            (REDRIVE_ID, Some(b"r1")),
        ];
        assert_eq!(headers[..4], user);
        assert_eq!(
            headers[6..],
            [
                (REDRIVE_OF, Some(&b"s-dlt/3/17"[..])),
                (REDRIVE_EDITED, Some(b"value, headers"))
            ]
        );
        let null = written(v1::RedriveEdit {
            value: value(None),
            key: value(Some(b"")),
            ..v1::RedriveEdit::default()
        });
        assert_eq!((null.value, null.key.as_deref()), (None, Some(&b""[..])));
    }

    #[test]
    fn only_user_headers_can_be_edited() {
        let set = |name: &str| v1::RedriveEdit {
            set_headers: vec![header(name, None)],
            ..v1::RedriveEdit::default()
        };
        let removed = |name: &str| v1::RedriveEdit {
            removed_headers: vec![name.to_owned()],
            ..v1::RedriveEdit::default()
        };
        for name in [
            "retry-count",
            "original-topic",
            "pipeline",
            "error-code",
            "process-after",
            "payload-omitted",
            "redrive-count",
            "redrive-of",
            "redrive-edited",
            "kafka_dlt-original-topic",
            "__connect.errors.topic",
            "dead-letter-reason",
        ] {
            for edit in [set(name), removed(name)] {
                assert_eq!(Edit::read(edit), Err(InvalidEdit::NotOfUser(name.to_owned())));
            }
        }
        let long = "x".repeat(MAX_NAME + 1);
        for name in ["", "a\nb", &long] {
            assert!(
                matches!(Edit::read(set(name)), Err(InvalidEdit::Name(_))),
                "{name}"
            );
        }
        assert!(Edit::read(set("tenant")).is_ok());
        let both = v1::RedriveEdit {
            set_headers: vec![header("a", None)],
            ..removed("a")
        };
        assert_eq!(Edit::read(both), Err(InvalidEdit::Both("a".to_owned())));
        assert_eq!(Edit::read(v1::RedriveEdit::default()), Err(InvalidEdit::Nothing));
        let many = v1::RedriveEdit {
            removed_headers: vec!["a".to_owned(); MAX_HEADERS + 1],
            ..v1::RedriveEdit::default()
        };
        assert_eq!(Edit::read(many), Err(InvalidEdit::TooMany));
    }

    #[test]
    fn audit_entry_has_no_contents() {
        let edit = Edit::read(v1::RedriveEdit {
            value: value(Some(b"secret")),
            key: value(Some(b"secret")),
            removed_headers: vec!["old".to_owned()],
            set_headers: vec![header("tenant", Some(b"secret")), header("tenant", None)],
        });
        assert_eq!(
            edit.unwrap().names(),
            "edits value, key, sets header `tenant`, removes header `old`"
        );
    }
}
