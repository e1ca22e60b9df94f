//! W3C trace context in record headers: continuing a trace that comes with a record, and handing it on.
//!
//! Headers are untrusted. What is not a trace context, byte for byte as
//! <https://www.w3.org/TR/trace-context/> writes it, is none: the record is handled all the same.

use opentelemetry::Context;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState};
use redeliver_core::Headers;
use redeliver_core::headers::{TRACEPARENT, TRACESTATE, TraceContext};

/// The longest `tracestate` that is handed on.
const MAX_STATE: usize = 512;

/// The context of the trace that a record belongs to; none when its headers name none or no valid one.
#[must_use]
pub fn span_context(headers: &Headers) -> Option<Context> {
    let parent = headers.single(TRACEPARENT).ok()???;
    let (trace, span, flags) = parse_parent(parent)?;
    let state = headers
        .single(TRACESTATE)
        .ok()
        .flatten()
        .flatten()
        .and_then(parse_state)
        .unwrap_or_default();
    let remote = SpanContext::new(trace, span, flags, true, state);
    Some(Context::new().with_remote_span_context(remote))
}

/// The headers that hand on a span.
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

/// `00-<32 hex>-<16 hex>-<2 hex>`; a later version may have more behind it.
fn parse_parent(bytes: &[u8]) -> Option<(TraceId, SpanId, TraceFlags)> {
    let hex = |range: std::ops::Range<usize>| {
        let digits = bytes.get(range)?;
        let lower = digits.iter().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        lower.then(|| std::str::from_utf8(digits).ok()).flatten()
    };
    let version = hex(0..2)?;
    let length_is_right = match version {
        "00" => bytes.len() == 55,
        "ff" => false,
        _ => bytes.len() == 55 || bytes.get(55) == Some(&b'-'),
    };
    if !length_is_right || [2, 35, 52].iter().any(|dash| bytes[*dash] != b'-') {
        return None;
    }
    let trace = TraceId::from_hex(hex(3..35)?).ok()?;
    let span = SpanId::from_hex(hex(36..52)?).ok()?;
    let flags = u8::from_str_radix(hex(53..55)?, 16).ok()?;
    let valid = trace != TraceId::INVALID && span != SpanId::INVALID;
    valid.then(|| (trace, span, TraceFlags::new(flags) & TraceFlags::SAMPLED))
}

/// `key=value` members separated by commas; one wrong member makes the whole worthless.
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

    fn handed_on(headers: &Headers) -> Option<TraceContext> {
        trace_of(span_context(headers)?.span().span_context())
    }

    #[test]
    fn a_trace_context_is_handed_on_as_it_came() {
        let trace = handed_on(&headers(PARENT.as_bytes(), Some(b"vendor=1,other=2"))).unwrap();
        assert_eq!(trace.traceparent, PARENT);
        assert_eq!(trace.tracestate.as_deref(), Some("vendor=1,other=2"));
        let unsampled = PARENT.replace("-01", "-00");
        assert_eq!(
            handed_on(&headers(unsampled.as_bytes(), None))
                .unwrap()
                .traceparent,
            unsampled
        );
    }

    #[test]
    fn a_later_version_is_read_as_far_as_it_is_known() {
        let later = PARENT.replace("00-0af", "01-0af") + "-more";
        assert_eq!(
            handed_on(&headers(later.as_bytes(), None)).unwrap().traceparent,
            PARENT
        );
    }

    #[test]
    fn what_is_no_trace_context_is_none() {
        let zero_trace = format!("00-{}-b7ad6b7169203331-01", "0".repeat(32));
        for junk in [
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
            assert!(span_context(&headers(junk.as_bytes(), None)).is_none(), "{junk}");
        }
        let mut twice = headers(PARENT.as_bytes(), None);
        twice.push(TRACEPARENT, Some(PARENT.as_bytes()));
        assert!(span_context(&twice).is_none());
        assert!(span_context(&[(TRACEPARENT, None)].into_iter().collect()).is_none());
    }

    #[test]
    fn a_state_that_cannot_be_read_is_left_out() {
        for junk in [&b"\xff"[..], b"=,=,", b"a=1,b", b"A=1", b"a=1=2", &[b'a'; 600]] {
            let trace = handed_on(&headers(PARENT.as_bytes(), Some(junk))).unwrap();
            assert_eq!((trace.traceparent.as_str(), trace.tracestate), (PARENT, None));
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(parent in proptest::collection::vec(any::<u8>(), 0..80), state in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = handed_on(&headers(&parent, Some(&state)));
        }

        #[test]
        fn nearly_right_ones_never_panic(at in 0_usize..55, byte in any::<u8>(), state in "[a-z=,@ ]{0,40}") {
            let mut parent = PARENT.as_bytes().to_vec();
            parent[at] = byte;
            let _ = handed_on(&headers(&parent, Some(state.as_bytes())));
        }
    }
}
