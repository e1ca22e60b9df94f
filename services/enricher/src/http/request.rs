//! The headers of a request: the configured ones, the content type, the idempotency key, and the trace context.

use redeliver_core::headers::{self, TraceContext};
use redeliver_core::{Failure, Headers, redrive};
use redeliver_worker::Attempt;
use reqwest::header::{ACCEPT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};

/// The same for all calls of a record until it is redriven, so that the endpoint can recognise repeated calls.
pub(super) const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
pub(super) const TRACEPARENT: HeaderName = HeaderName::from_static(headers::TRACEPARENT);
pub(super) const TRACESTATE: HeaderName = HeaderName::from_static(headers::TRACESTATE);

/// The headers of an attempt's request. Other headers of the record are not passed on, because producers may have put
/// secrets into them.
pub(super) fn headers_for(attempt: &Attempt, configured: &HeaderMap) -> Result<HeaderMap, Failure> {
    let mut headers = common(configured);
    if !headers.contains_key(CONTENT_TYPE) {
        let octets = || HeaderValue::from_static("application/octet-stream");
        headers.insert(
            CONTENT_TYPE,
            content_type(&attempt.record.headers).unwrap_or_else(octets),
        );
    }
    headers.insert(IDEMPOTENCY_KEY, idempotency_key(attempt)?);
    insert_trace(&mut headers, trace(attempt));
    Ok(headers)
}

/// The headers of every request. Without `accept-encoding`, a server may choose any encoding (RFC 9110, section 12.5.3).
fn common(configured: &HeaderMap) -> HeaderMap {
    let mut headers = configured.clone();
    let identity = HeaderValue::from_static("identity");
    headers.entry(ACCEPT_ENCODING).or_insert(identity);
    headers
}

/// Replaces the trace context of a request.
pub(super) fn set_trace(headers: &mut HeaderMap, trace: &TraceContext) {
    headers.remove(TRACEPARENT);
    headers.remove(TRACESTATE);
    insert_trace(headers, attempt_trace(trace));
}

fn insert_trace(headers: &mut HeaderMap, (parent, state): Trace) {
    if let Some(parent) = parent {
        headers.insert(TRACEPARENT, parent);
        if let Some(state) = state {
            headers.insert(TRACESTATE, state);
        }
    }
}

/// The headers of a request for several records. What differs between them is part of the body.
pub(super) fn headers_for_batch(configured: &HeaderMap) -> HeaderMap {
    let mut headers = common(configured);
    let json = HeaderValue::from_static("application/json");
    headers.entry(CONTENT_TYPE).or_insert(json);
    headers
}

/// What identifies a record in calls.
pub(super) fn id(attempt: &Attempt) -> String {
    redrive::idempotency_id(&attempt.origin, &attempt.record.headers)
}

fn idempotency_key(attempt: &Attempt) -> Result<HeaderValue, Failure> {
    HeaderValue::try_from(id(attempt)).map_err(|_| {
        let message = "the name of the original topic is not a valid value of the header `Idempotency-Key`";
        Failure::permanent("http.invalid-request", message)
    })
}

/// The record's content type, if the record has exactly one and it is valid.
pub(super) fn content_type(own: &Headers) -> Option<HeaderValue> {
    let value = HeaderValue::from_bytes(only(own, CONTENT_TYPE.as_str())?.trim_ascii()).ok()?;
    let (kind, rest) = value.to_str().ok()?.split_once('/')?;
    let is_type = !kind.is_empty()
        && kind
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"!#$&^_.+-".contains(&byte));
    (is_type && !rest.is_empty()).then_some(value)
}

type Trace = (Option<HeaderValue>, Option<HeaderValue>);

/// The `traceparent` and the `tracestate` of an attempt.
pub(super) fn trace(attempt: &Attempt) -> Trace {
    match &attempt.trace {
        Some(trace) => attempt_trace(trace),
        None => producer_trace(&attempt.record.headers),
    }
}

fn attempt_trace(trace: &TraceContext) -> Trace {
    let state = trace.tracestate.as_deref().map(HeaderValue::from_str);
    (
        HeaderValue::from_str(&trace.traceparent).ok(),
        state.and_then(Result::ok),
    )
}

/// The trace context of the record's producer, if it is valid.
fn producer_trace(own: &Headers) -> Trace {
    let value = |name, is_valid: fn(&[u8]) -> bool| {
        let value = only(own, name).filter(|value| is_valid(value))?;
        HeaderValue::from_bytes(value).ok()
    };
    let state = value(headers::TRACESTATE, is_tracestate);
    (value(headers::TRACEPARENT, is_traceparent), state)
}

/// `version-trace-parent-flags` in lower-case hex (W3C Trace Context, section 3.2). A later version may add fields
/// after another hyphen.
fn is_traceparent(value: &[u8]) -> bool {
    let hex = |part: &[u8]| part.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let zero = |part: &[u8]| part.iter().all(|byte| *byte == b'0');
    let Some((head, more)) = value.split_at_checked(55) else {
        return false;
    };
    let (version, trace, parent, flags) = (&head[..2], &head[3..35], &head[36..52], &head[53..]);
    let ends = more.is_empty() || (version != b"00" && more[0] == b'-' && more.len() <= 200);
    ends && [2, 35, 52].iter().all(|at| head[*at] == b'-')
        && [version, trace, parent, flags].into_iter().all(hex)
        && version != b"ff"
        && !zero(trace)
        && !zero(parent)
}

/// Vendors should propagate at least 512 characters (W3C Trace Context, section 3.3.1.5); longer values are dropped.
fn is_tracestate(value: &[u8]) -> bool {
    (1..=512).contains(&value.len()) && value.iter().all(|byte| matches!(byte, b' '..=b'~'))
}

/// The value of a header, if there is exactly one with this name, regardless of case.
fn only<'a>(own: &'a Headers, name: &str) -> Option<&'a [u8]> {
    let mut values = own.iter().filter(|(other, _)| other.eq_ignore_ascii_case(name));
    let (_, value) = values.next()?;
    values.next().is_none().then_some(value)?
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn traceparent_is_validated() {
        let right = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        assert!(is_traceparent(right.as_bytes()));
        assert!(is_traceparent(right.replacen("00", "cc", 1).as_bytes()));
        assert!(is_traceparent(format!("cc{}-what-comes", &right[2..]).as_bytes()));
        for wrong in [
            "",
            "00",
            &right[..54],
            &format!("{right}-"),
            &format!("cc{}x", &right[2..]),
            &right.replacen("00", "ff", 1),
            &right.to_uppercase(),
            &right.replace('-', "_"),
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        ] {
            assert!(!is_traceparent(wrong.as_bytes()), "{wrong}");
        }
    }

    #[test]
    fn only_valid_content_type_is_used() {
        let read = |values: &[&[u8]]| {
            let headers: Headers = values
                .iter()
                .map(|value| ("Content-Type", Some(*value)))
                .collect();
            content_type(&headers).map(|value| value.to_str().unwrap().to_owned())
        };
        assert_eq!(
            read(&[b"application/json; charset=utf-8"]).as_deref(),
            Some("application/json; charset=utf-8")
        );
        for wrong in [
            &b""[..],
            b"json",
            b"/json",
            b"text/",
            b"text/plain\r\nx: y",
            b"\xff/a",
            b"a b/c",
        ] {
            assert_eq!(read(&[wrong]), None, "{wrong:?}");
        }
        assert_eq!(read(&[b"a/b", b"c/d"]), None);
    }

    proptest! {
        #[test]
        fn arbitrary_headers_never_panic(name in "content-type|traceparent|tracestate", value in proptest::collection::vec(any::<u8>(), 0..80)) {
            let headers: Headers = [(name.as_str(), Some(&value[..]))].into_iter().collect();
            let _ = (content_type(&headers), producer_trace(&headers));
        }
    }
}
