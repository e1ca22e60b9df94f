//! gRPC errors with an `ErrorInfo`, so that a program can handle them without parsing the message.

use std::collections::HashMap;
use std::time::Duration;

use redeliver_core::failure::bounded_text;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

/// The descriptors of error details as a `FileDescriptorSet`, for server reflection.
pub const DESCRIPTORS: &[u8] = tonic_types::pb::FILE_DESCRIPTOR_SET;

/// The `domain` of every `ErrorInfo`.
pub const DOMAIN: &str = "redeliver";

/// The reasons that clients tell apart.
pub mod reasons {
    /// The command is in Kafka, and there was no outcome in time.
    pub const PENDING: &str = "PENDING";
    /// Kafka did not confirm the change: it may or may not be written.
    pub const UNCONFIRMED: &str = "UNCONFIRMED";
    /// No recurring schedule has this id.
    pub const SCHEDULE_UNKNOWN: &str = "SCHEDULE_UNKNOWN";
}

/// Maximum length of a message and of the values of metadata, in bytes. They are sent in headers, percent-encoded or in Base64, and clients refuse headers
/// of more than 16 KiB: to them, an error with a long text of their own would be a broken connection.
const MAX_MESSAGE: usize = 1_500;
const MAX_METADATA: usize = 500;

/// An error with a message for humans, and with a reason in `UPPER_SNAKE_CASE` and metadata for programs.
#[must_use]
pub fn status<'a>(
    code: Code,
    message: impl Into<String>,
    reason: &str,
    metadata: impl IntoIterator<Item = (&'a str, String)>,
) -> Status {
    let details = ErrorDetails::with_error_info(reason, DOMAIN, bounded_metadata(metadata));
    Status::with_error_details(code, bounded(message, MAX_MESSAGE), details)
}

/// An INVALID_ARGUMENT error that names the invalid field of the request.
#[must_use]
pub fn invalid<'a>(
    field: &str,
    problem: impl Into<String>,
    reason: &str,
    metadata: impl IntoIterator<Item = (&'a str, String)>,
) -> Status {
    let problem = bounded(problem, MAX_MESSAGE);
    let mut details = ErrorDetails::with_error_info(reason, DOMAIN, bounded_metadata(metadata));
    details.add_bad_request_violation(field, &problem);
    Status::with_error_details(Code::InvalidArgument, format!("{field}: {problem}"), details)
}

/// An error after which the client should wait for `after` before it tries again.
#[must_use]
pub fn retry_later(code: Code, message: impl Into<String>, reason: &str, after: Duration) -> Status {
    let mut details = ErrorDetails::with_error_info(reason, DOMAIN, HashMap::new());
    details.set_retry_info(Some(after));
    Status::with_error_details(code, bounded(message, MAX_MESSAGE), details)
}

fn bounded(text: impl Into<String>, limit: usize) -> String {
    let text = text.into();
    if text.len() <= limit {
        return text;
    }
    bounded_text(&text, limit)
}

fn bounded_metadata<'a>(metadata: impl IntoIterator<Item = (&'a str, String)>) -> HashMap<String, String> {
    let metadata = metadata.into_iter();
    metadata
        .map(|(name, value)| (name.to_owned(), bounded(value, MAX_METADATA)))
        .collect()
}

/// The reason in the `ErrorInfo` of a status, if there is one.
#[must_use]
pub fn reason(status: &Status) -> Option<String> {
    status.get_details_error_info().map(|info| info.reason)
}

/// When to send the same request again, if the status says so. Then nothing was written.
#[must_use]
pub fn retry_after(status: &Status) -> Option<Duration> {
    status.get_details_retry_info()?.retry_delay
}

/// The invalid field of the request, if the status names one.
#[must_use]
pub fn field(status: &Status) -> Option<String> {
    let violations = status.get_details_bad_request()?.field_violations;
    violations.into_iter().next().map(|violation| violation.field)
}

/// The metadata in the `ErrorInfo` of a status; empty if there is none.
#[must_use]
pub fn metadata(status: &Status) -> HashMap<String, String> {
    let info = status.get_details_error_info();
    info.map(|info| info.metadata).unwrap_or_default()
}

/// The name of a code in the documentation of gRPC.
#[must_use]
pub const fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_contains_reason_and_field() {
        let status = invalid(
            "filter",
            "unknown field `x`",
            "FILTER",
            [("position", "3".to_owned())],
        );
        assert_eq!(status.code(), Code::InvalidArgument);
        assert_eq!(status.message(), "filter: unknown field `x`");
        assert_eq!(reason(&status).as_deref(), Some("FILTER"));
        let info = status.get_details_error_info().unwrap();
        assert_eq!(
            (info.domain.as_str(), info.metadata["position"].as_str()),
            (DOMAIN, "3")
        );
        let violations = status.get_details_bad_request().unwrap().field_violations;
        assert_eq!(violations[0].field, "filter");
        assert_eq!(field(&status).as_deref(), Some("filter"));
        assert_eq!(metadata(&status)["position"], "3");
        assert_eq!(retry_after(&status), None);
        let later = retry_later(Code::Unavailable, "x", "BUSY", Duration::from_millis(20));
        assert_eq!(retry_after(&later), Some(Duration::from_millis(20)));
        let plain = Status::unknown("x");
        assert_eq!(
            (reason(&plain), field(&plain), metadata(&plain).len()),
            (None, None, 0)
        );
    }

    #[test]
    fn error_fits_into_headers() {
        // Each character has 2 bytes, which are sent as 6.
        let long = "\u{e4}".repeat(100_000);
        for status in [
            invalid(
                "filter",
                long.clone(),
                "FILTER",
                [("a", long.clone()), ("b", long.clone())],
            ),
            status(
                Code::NotFound,
                long.clone(),
                "MISSING",
                [("a", long.clone()), ("b", long.clone())],
            ),
            retry_later(Code::Unavailable, long.clone(), "BUSY", Duration::from_secs(1)),
        ] {
            let size = 3 * status.message().len() + status.details().len() * 4 / 3;
            assert!(size < 12 << 10, "{size}");
            assert!(reason(&status).is_some() && status.message().contains('\u{e4}'));
        }
    }
}
