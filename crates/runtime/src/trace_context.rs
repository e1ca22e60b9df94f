//! W3C trace context in record headers: extracting the trace of a record, and propagating it.
//!
//! Headers are untrusted. A header that is not exactly as <https://www.w3.org/TR/trace-context/> specifies is ignored,
//! and the record is processed without it.

use opentelemetry::Context;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState};
use redeliver_core::Headers;
use redeliver_core::headers::{TRACEPARENT, TRACESTATE, TraceContext};

/// Maximum length of a propagated `tracestate`, in bytes.
const MAX_STATE: usize = 512;

/// The trace context of a record. `None` if its headers contain none or an invalid one.
#[must_use]
pub fn span_context(headers: &Headers) -> Option<Context> {
    let parent = headers.single(TRACEPARENT).ok()???;
    let state = headers.single(TRACESTATE).ok().flatten().flatten();
    context(parent, state)
}

/// A context in which the span that this trace context propagates is the parent. `None` if it is invalid.
#[must_use]
pub fn context_of(trace: &TraceContext) -> Option<Context> {
    let state = trace.tracestate.as_deref().map(str::as_bytes);
    context(trace.traceparent.as_bytes(), state)
}

fn context(parent: &[u8], state: Option<&[u8]>) -> Option<Context> {
    let (trace, span, flags) = parse_parent(parent)?;
    let state = state.and_then(parse_state).unwrap_or_default();
    let remote = SpanContext::new(trace, span, flags, true, state);
    Some(Context::new().with_remote_span_context(remote))
}

/// The headers that propagate a span. `None` if the span is invalid.
#[must_use]
pub fn trace_of(span: &SpanContext) -> Option<TraceContext> {
    if !span.is_valid() {
        return None;
    }
    let flags = span.trace_flags() & TraceFlags::SAMPLED;
    let state = span.trace_state().header();
    Some(TraceContext {
        traceparent: format!(
            "00-{:032x}-{:016x}-{:02x}",
            span.trace_id(),
            span.span_id(),
            flags
        ),
        tracestate: (!state.is_empty()).then_some(state),
    })
}

/// Parses `00-<32 hex>-<16 hex>-<2 hex>`. Later versions may append fields.
fn parse_parent(bytes: &[u8]) -> Option<(TraceId, SpanId, TraceFlags)> {
    let hex = |range: std::ops::Range<usize>| {
        let digits = bytes.get(range)?;
        let lower = digits.iter().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        lower.then(|| std::str::from_utf8(digits).ok()).flatten()
    };
    let version = hex(0..2)?;
    let is_length_valid = match version {
        "00" => bytes.len() == 55,
        "ff" => false,
        _ => bytes.len() == 55 || bytes.get(55) == Some(&b'-'),
    };
    if !is_length_valid || [2, 35, 52].iter().any(|dash| bytes[*dash] != b'-') {
        return None;
    }
    let trace = TraceId::from_hex(hex(3..35)?).ok()?;
    let span = SpanId::from_hex(hex(36..52)?).ok()?;
    let flags = u8::from_str_radix(hex(53..55)?, 16).ok()?;
    let valid = trace != TraceId::INVALID && span != SpanId::INVALID;
    valid.then(|| (trace, span, TraceFlags::new(flags) & TraceFlags::SAMPLED))
}

/// Parses `key=value` members separated by commas. One invalid member invalidates the whole header, which the
/// specification permits.
fn parse_state(bytes: &[u8]) -> Option<TraceState> {
    let text = std::str::from_utf8(bytes)
        .ok()
        .filter(|text| text.len() <= MAX_STATE)?;
    let mut members = text.split(',').map(str::trim).filter(|member| !member.is_empty());
    members.all(is_member).then(|| text.parse().ok()).flatten()
}

fn is_member(member: &str) -> bool {
    let Some((key, value)) = member.split_once('=') else {
        return false;
    };
    let in_key = |b: u8| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'*' | b'/' | b'@');
    let in_value = |b: u8| matches!(b, b' '..=b'~') && b != b'=';
    !key.is_empty() && key.bytes().all(in_key) && !value.is_empty() && value.bytes().all(in_value)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn headers(parent: &[u8], state: Option<&[u8]>) -> Headers {
        let mut headers = Headers::new();
        headers.push(TRACEPARENT, Some(parent));
        if let Some(state) = state {
            headers.push(TRACESTATE, Some(state));
        }
        headers
    }

    fn propagated(headers: &Headers) -> Option<TraceContext> {
        trace_of(span_context(headers)?.span().span_context())
    }

    #[test]
    fn a_trace_context_is_propagated_unchanged() {
        let trace = propagated(&headers(PARENT.as_bytes(), Some(b"vendor=1,other=2"))).unwrap();
        assert_eq!(trace.traceparent, PARENT);
        assert_eq!(trace.tracestate.as_deref(), Some("vendor=1,other=2"));
        let again = trace_of(context_of(&trace).unwrap().span().span_context());
        assert_eq!(again, Some(trace));
        let unsampled = PARENT.replace("-01", "-00");
        assert_eq!(
            propagated(&headers(unsampled.as_bytes(), None))
                .unwrap()
                .traceparent,
            unsampled
        );
    }

    #[test]
    fn later_version_is_used() {
        let later = PARENT.replace("00-0af", "01-0af") + "-more";
        assert_eq!(
            propagated(&headers(later.as_bytes(), None)).unwrap().traceparent,
            PARENT
        );
    }

    #[test]
    fn an_invalid_trace_context_is_ignored() {
        let zero_trace = format!("00-{}-b7ad6b7169203331-01", "0".repeat(32));
        for invalid in [
            "",
            "00",
            "garbage",
            &PARENT[..54],
            &format!("{PARENT}-"),
            &PARENT.to_uppercase(),
            &PARENT.replace("00-0af", "ff-0af"),
            &PARENT.replace('-', "_"),
            &zero_trace,
        ] {
            assert!(
                span_context(&headers(invalid.as_bytes(), None)).is_none(),
                "{invalid}"
            );
        }
        let mut twice = headers(PARENT.as_bytes(), None);
        twice.push(TRACEPARENT, Some(PARENT.as_bytes()));
        assert!(span_context(&twice).is_none());
        assert!(span_context(&[(TRACEPARENT, None)].into_iter().collect()).is_none());
    }

    #[test]
    fn an_invalid_state_is_dropped() {
        for invalid in [&b"\xff"[..], b"=,=,", b"a=1,b", b"A=1", b"a=1=2", &[b'a'; 600]] {
            let trace = propagated(&headers(PARENT.as_bytes(), Some(invalid))).unwrap();
            assert_eq!((trace.traceparent.as_str(), trace.tracestate), (PARENT, None));
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(parent in proptest::collection::vec(any::<u8>(), 0..80), state in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = propagated(&headers(&parent, Some(&state)));
        }

        #[test]
        fn nearly_valid_headers_do_not_panic(at in 0_usize..55, byte in any::<u8>(), state in "[a-z=,@ ]{0,40}") {
            let mut parent = PARENT.as_bytes().to_vec();
            parent[at] = byte;
            let _ = propagated(&headers(&parent, Some(state.as_bytes())));
        }
    }
}
