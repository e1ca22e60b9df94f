//! The time from which the delay before the first retry counts.

use std::fmt;

use crate::json::{self, Scalar};
use crate::record::Record;
use crate::time::Timestamp;

/// Numbers below ten to this power are seconds, others milliseconds.
const FIRST_MILLISECONDS: i64 = 11;

/// The time from which the delay before the first retry counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Anchor {
    /// The time of the failure.
    #[default]
    Failure,
    /// The timestamp of the source record.
    RecordTimestamp,
    /// A field of the JSON payload, by JSON pointer (RFC 6901). The field is an RFC 3339 time, in UTC if it has no offset, or a number since the
    /// Unix epoch, which can have a fraction: seconds below 100,000,000,000, otherwise milliseconds.
    Payload(String),
}

/// Why a record has no anchor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnusableAnchor {
    /// The record has no timestamp.
    NoTimestamp,
    /// The value is not JSON.
    NotJson,
    /// The value has no such field, or it is null.
    NoField,
    /// The field is not a time from the years 1 to 9999.
    NotATime,
}

impl UnusableAnchor {
    /// What is wrong, for logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NoTimestamp => "the record has no timestamp",
            Self::NotJson => "the value is not JSON",
            Self::NoField => "the value has no such field",
            Self::NotATime => "the field is not a time",
        }
    }
}

impl fmt::Display for UnusableAnchor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Anchor {
    /// The anchor of a record that failed at `failed_at`, rounded up to the millisecond.
    ///
    /// # Errors
    /// Why the record has none. The time of the failure is the one to use then: it is later, so that the record is not early.
    pub fn time(
        &self,
        record: &Record,
        original_timestamp: Option<Timestamp>,
        failed_at: Timestamp,
    ) -> Result<Timestamp, UnusableAnchor> {
        match self {
            Self::Failure => Ok(failed_at),
            Self::RecordTimestamp => original_timestamp.ok_or(UnusableAnchor::NoTimestamp),
            Self::Payload(pointer) => match &record.value {
                Some(value) => payload_time(value, pointer),
                None => Err(UnusableAnchor::NoField),
            },
        }
    }
}

fn payload_time(payload: &[u8], pointer: &str) -> Result<Timestamp, UnusableAnchor> {
    let field = json::at_each(payload, &[pointer]).map_err(|_| UnusableAnchor::NotJson)?;
    let field = field.into_iter().flatten().next();
    let field = field
        .filter(|field| field.get() != "null")
        .ok_or(UnusableAnchor::NoField)?;
    let time = match Scalar::of(field) {
        Some(Scalar::String(text)) => std::str::from_utf8(&text).ok().and_then(time),
        Some(Scalar::Number(number)) => {
            let shift = if number.is_below_power(FIRST_MILLISECONDS) {
                3
            } else {
                0
            };
            number.scaled(shift).map(Timestamp::from_millis)
        }
        Some(Scalar::Bool(_)) | None => None,
    };
    // Others cannot be written into a header.
    time.filter(|time| time.to_rfc3339().is_some())
        .ok_or(UnusableAnchor::NotATime)
}

fn time(text: &str) -> Option<Timestamp> {
    text.parse().or_else(|_| format!("{text}Z").parse()).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(field: &str) -> Result<i64, UnusableAnchor> {
        let payload = format!(r#"{{"meta":{{"created_at":{field}}},"x":[1e400,"\ud800"]}}"#);
        payload_time(payload.as_bytes(), "/meta/created_at").map(Timestamp::as_millis)
    }

    #[test]
    fn payload_field_is_a_time() {
        for (field, expected) in [
            (r#""2026-01-01T00:00:00Z""#, 1_767_225_600_000),
            (r#""2026-01-01T01:00:00.1234+01:00""#, 1_767_225_600_124),
            (r#""2026-01-01T00:00:00""#, 1_767_225_600_000),
            (r#""2026-01-01 00:00:00.5""#, 1_767_225_600_500),
            ("1767225600", 1_767_225_600_000),
            ("1767225600123", 1_767_225_600_123),
            ("1795822443.544", 1_795_822_443_544),
            ("1795822443.5440001", 1_795_822_443_545),
            ("1.795e9", 1_795_000_000_000),
            ("1.795822443544e12", 1_795_822_443_544),
            ("1795822443544.25", 1_795_822_443_545),
            ("99999999999", 99_999_999_999_000),
            ("100000000000", 100_000_000_000),
            ("0", 0),
            ("-1.5", -1_500),
        ] {
            assert_eq!(read(field), Ok(expected), "{field}");
        }
    }

    #[test]
    fn unusable_anchor_has_a_reason() {
        for field in [
            r#""soon""#,
            r#""2026-01-01""#,
            r#""1767225600""#,
            r#""\ud800""#,
            r#""2026-01-01T00:00:00+01:00Z""#,
            "1e300",
            "-9223372036854775",
            "-9223372036854775808",
            "9223372036854775807",
            "1e99999999999999999999",
            "true",
            "[1767225600]",
            "{}",
        ] {
            assert_eq!(read(field), Err(UnusableAnchor::NotATime), "{field}");
        }
        assert_eq!(read("null"), Err(UnusableAnchor::NoField));
        for (payload, expected) in [
            (r#"{"meta":{}}"#, UnusableAnchor::NoField),
            ("not json", UnusableAnchor::NotJson),
            ("", UnusableAnchor::NotJson),
        ] {
            assert_eq!(
                payload_time(payload.as_bytes(), "/meta/created_at"),
                Err(expected),
                "{payload}"
            );
        }
    }

    proptest! {
        #[test]
        fn arbitrary_payloads_never_panic(payload in proptest::collection::vec(any::<u8>(), 0..100), pointer in ".{0,20}") {
            let _ = payload_time(&payload, &pointer);
        }
    }
}
