//! Records that were redriven: what their headers say, and what follows from it.
//!
//! A redrive writes the record of a dead letter to its pipeline again. The record keeps its origin and begins
//! with no failed attempts. These headers are not reserved: every hop passes them on like user headers, also
//! into the next dead letter, so that the next redrive can count. Only the last header of each name counts. A
//! header that is not a number or time is one of a user.

use crate::headers::Origin;
use crate::record::Headers;
use crate::time::Timestamp;

/// The id of the redrive that wrote the record.
pub const REDRIVE_ID: &str = "redrive-id";
/// How often the record was redriven.
pub const REDRIVE_COUNT: &str = "redrive-count";
/// When the record was redriven.
pub const REDRIVE_TIME: &str = "redrive-time";
/// The dead letter whose edited copy the record is: `topic/partition/offset`. Later redrives without an edit keep it.
pub const REDRIVE_OF: &str = "redrive-of";
/// The edited parts: `value`, `key` and `headers`, separated by commas. Later redrives without an edit drop
/// it, because their record may not differ.
pub const REDRIVE_EDITED: &str = "redrive-edited";

/// The ends of the first batches of a redrive, as numbers of redriven records. After each of them, it waits, and counts how many have come back.
pub const BATCHES: [u32; 2] = [10, 110];

/// Whether a redrive pauses by itself when more than this share of its records comes back. The share is in 0 to 1.
#[must_use]
pub fn has_auto_pause(max_returned_share: f64) -> bool {
    max_returned_share < 1.0
}

/// Whether a redrive begins with [`BATCHES`]. Without auto-pause, nothing depends on the first records.
#[must_use]
pub fn has_batches(max_returned_share: f64, all_at_once: bool) -> bool {
    has_auto_pause(max_returned_share) && !all_at_once
}

/// Whether a redrive adds a header of this name, in place of those of an earlier one.
#[must_use]
pub fn is_redrive_header(name: &str) -> bool {
    [REDRIVE_ID, REDRIVE_COUNT, REDRIVE_TIME].contains(&name)
}

/// Whether a redrive that edits its record adds a header of this name, in place of those of an earlier edit.
#[must_use]
pub fn is_edit_header(name: &str) -> bool {
    [REDRIVE_OF, REDRIVE_EDITED].contains(&name)
}

/// The maximum size of a header of redrives that a dead letter keeps when its payload is left out, in bytes. `redrive-of` is the longest: the name of a topic, a partition and
/// an offset.
const MAX_KEPT: usize = 300;

/// Whether redrives add headers of this name.
#[must_use]
pub fn is_of_redrives(name: &str) -> bool {
    is_redrive_header(name) || is_edit_header(name)
}

/// The last header of each name that redrives add, except for those that are too long to be one of them. Producers can set them too.
pub fn last_of_redrives(headers: &Headers) -> impl Iterator<Item = (&'static str, &[u8])> {
    let names = [
        REDRIVE_ID,
        REDRIVE_COUNT,
        REDRIVE_TIME,
        REDRIVE_OF,
        REDRIVE_EDITED,
    ];
    let found = names
        .into_iter()
        .filter_map(|name| Some((name, headers.last(name)?)));
    found.filter(|(_, value)| value.len() <= MAX_KEPT)
}

/// How often a record was redriven; 0 if it never was.
#[must_use]
pub fn count(headers: &Headers) -> u32 {
    parse(headers, REDRIVE_COUNT).unwrap_or(0)
}

/// When a record was redriven last; `None` if it never was.
#[must_use]
pub fn time(headers: &Headers) -> Option<Timestamp> {
    parse(headers, REDRIVE_TIME)
}

fn parse<T: std::str::FromStr>(headers: &Headers, name: &str) -> Option<T> {
    std::str::from_utf8(headers.last(name)?).ok()?.parse().ok()
}

/// By what an endpoint recognises repeated calls of a record: its origin, and how often it was redriven. An endpoint that has stored the answer
/// to the calls before the redrive must not repeat that answer.
#[must_use]
pub fn idempotency_id(origin: &Origin, headers: &Headers) -> String {
    match count(headers) {
        0 => origin.id(),
        count => format!("{}-r{count}", origin.id()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&str, &str)]) -> Headers {
        pairs
            .iter()
            .map(|(name, value)| (*name, Some(value.as_bytes())))
            .collect()
    }

    #[test]
    fn last_valid_header_counts() {
        let redriven = headers(&[
            (REDRIVE_COUNT, "1"),
            (REDRIVE_COUNT, "2"),
            (REDRIVE_TIME, "2026-01-31T12:00:00.000Z"),
        ]);
        assert_eq!(count(&redriven), 2);
        assert_eq!(time(&redriven), Some("2026-01-31T12:00:00Z".parse().unwrap()));
        for text in ["", "often", "-1", "4294967296"] {
            assert_eq!(count(&headers(&[(REDRIVE_COUNT, text)])), 0, "{text}");
            assert_eq!(time(&headers(&[(REDRIVE_TIME, text)])), None, "{text}");
        }
    }

    #[test]
    fn each_redrive_has_another_idempotency_id() {
        let origin = Origin {
            topic: "docs".into(),
            partition: 3,
            offset: 7,
            timestamp: None,
        };
        let id = |count: &str| idempotency_id(&origin, &headers(&[(REDRIVE_COUNT, count)]));
        assert_eq!(idempotency_id(&origin, &Headers::new()), "docs-3-7");
        assert_eq!(
            [id("0"), id("1"), id("2")],
            ["docs-3-7", "docs-3-7-r1", "docs-3-7-r2"]
        );
    }
}
