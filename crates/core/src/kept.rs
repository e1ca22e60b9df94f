//! What a record keeps on its way through a pipeline, and what its handler may change: one definition for the routing, which writes the
//! copies of a record, for redrives, which write it again, and for the audit, which compares them.

use crate::frameworks::framework_of;
use crate::headers::{CONTENT_TYPE, TRACEPARENT, TRACESTATE, is_reserved};
use crate::redrive::is_of_redrives;

/// Whether a header of this name came with the record, whatever framework has written it. Redeliver writes the others: the reserved
/// headers and those of redrives.
#[must_use]
pub fn is_of_user(name: &str) -> bool {
    !is_reserved(name) && !is_of_redrives(name)
}

/// Whether a redrive may set or remove headers of this name: no framework has added them because the record failed.
#[must_use]
pub fn is_editable(name: &str) -> bool {
    is_of_user(name) && framework_of(name).is_none()
}

/// Whether all copies of a record have the same headers of this name, in the same order, apart from what its handler changes in
/// results: the user headers except for the trace context, which each hop may replace.
#[must_use]
pub fn is_kept(name: &str) -> bool {
    is_of_user(name) && ![TRACEPARENT, TRACESTATE].contains(&name)
}

/// Whether a header describes the value, so that who replaces the value may replace the header, too.
#[must_use]
pub fn describes_value(name: &str) -> bool {
    is_same_header(name, CONTENT_TYPE)
}

/// Whether a header of a result replaces one of its record: names are compared as in HTTP, regardless of case.
#[must_use]
pub fn is_same_header(one: &str, other: &str) -> bool {
    one.eq_ignore_ascii_case(other)
}

/// What a handler may change in its results. Tiers, the scheduler, dead letters and redrives change nothing of a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HandlerChanges {
    /// Nothing: the result is the record.
    #[default]
    Nothing,
    /// The value, and the [header that describes it](describes_value), which it may add, replace or leave. Keys and all other user headers
    /// are those of the record.
    Value,
    /// Key, value and any header: a custom handler.
    Anything,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redrive::{REDRIVE_COUNT, REDRIVE_EDITED};

    #[test]
    fn user_headers_are_kept() {
        for name in ["tenant", "content-type", "__connect.errors.topic", "job-id", ""] {
            assert!(is_kept(name) && is_of_user(name), "{name}");
        }
        for name in [
            "error-code",
            "pipeline",
            TRACEPARENT,
            REDRIVE_COUNT,
            REDRIVE_EDITED,
        ] {
            assert!(!is_kept(name), "{name}");
            assert_eq!(is_of_user(name), name == TRACEPARENT, "{name}");
        }
        assert!(describes_value("Content-Type") && !describes_value("content-encoding"));
    }
}
