//! How the record of a dead letter is edited before it is redriven. No IO.
//!
//! A caller for whom the dead letter is masked may not edit it: results of edits could be compared.

use redeliver_core::redrive::{REDRIVE_EDITED, REDRIVE_OF, is_edit_header};
use redeliver_core::{Output, Record, Timestamp};
pub use redeliver_service::edit::{Edit, InvalidEdit};

use super::record::{Target, redriven};

/// The record to write for a dead letter.
#[must_use]
pub fn edited(edit: &Edit, letter: &Record, target: &Target, redrive_id: &str, now: Timestamp) -> Output {
    let mut output = redriven(&edit.apply(letter), target, redrive_id, now);
    // Those of an earlier edit: the dead letter has them.
    output.headers = output.headers.filtered(|name| !is_edit_header(name));
    output.headers.push_text(REDRIVE_OF, &letter.position.to_string());
    output.headers.push_text(REDRIVE_EDITED, &edit.parts().join(", "));
    output
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use redeliver_core::Headers;
    use redeliver_core::redrive::REDRIVE_ID;
    use redeliver_proto::v1;
    use redeliver_service::edit::{MAX_HEADERS, MAX_NAME};
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
        let edit = Edit::read(edit).unwrap();
        edited(&edit, &letter(), &target.unwrap(), "r1", NOW)
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
