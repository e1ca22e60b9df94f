//! The header `Retry-After` (RFC 9110, section 10.2.3): a number of seconds, also with a fraction, or a date.
//!
//! A date is compared with the header `Date` of the same response, so a difference between the clocks of both sides does
//! not matter. Our own clock replaces a `Date` that is missing or invalid.

use std::time::{Duration, UNIX_EPOCH};

use redeliver_core::Timestamp;
use reqwest::header::{DATE, HeaderMap, HeaderName, RETRY_AFTER};

/// The requested delay, at most `max`. Zero for a date in the past; `None` if there is no such header or it is invalid.
pub(super) fn read(headers: &HeaderMap, now: Timestamp, max: Duration) -> Option<Duration> {
    let requested = text(headers, &RETRY_AFTER)?;
    let wait = match seconds(requested) {
        Some(wait) => wait,
        None => {
            let sent = text(headers, &DATE).and_then(parse_date).unwrap_or(now);
            parse_date(requested)?.since(sent)
        }
    };
    Some(wait.min(max))
}

/// A number of seconds. RFC 9110 has no fraction, but some servers send one: it is rounded up, because a call that is too early is in vain.
pub(super) fn seconds(text: &str) -> Option<Duration> {
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    if !is_number(whole) || !is_number(fraction) {
        return None;
    }
    // Parsing fails only if the number exceeds 64 bits.
    let whole = whole.parse().unwrap_or(u64::MAX);
    let up = u64::from(fraction.bytes().any(|digit| digit != b'0'));
    Some(Duration::from_secs(whole.saturating_add(up)))
}

fn text<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h str> {
    headers.get(name)?.to_str().ok().map(str::trim)
}

fn parse_date(text: &str) -> Option<Timestamp> {
    let date = httpdate::parse_http_date(text).ok()?;
    let since_epoch = date.duration_since(UNIX_EPOCH).unwrap_or_default();
    let millis = i64::try_from(since_epoch.as_millis()).unwrap_or(i64::MAX);
    Some(Timestamp::from_millis(millis))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use reqwest::header::HeaderValue;

    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(784_111_777_000); // Sun, 06 Nov 1994 08:49:37 GMT
    const HOUR: Duration = Duration::from_secs(3_600);

    fn wait(value: &str) -> Option<u64> {
        let headers = [(RETRY_AFTER, HeaderValue::from_str(value).unwrap())]
            .into_iter()
            .collect();
        read(&headers, NOW, HOUR).map(|wait| wait.as_secs())
    }

    #[test]
    fn seconds_and_dates_are_parsed() {
        for (value, expected) in [
            ("120", 120),
            (" 0 ", 0),
            ("299.997", 300),
            ("1.000", 1),
            ("0.001", 1),
            ("Sun, 06 Nov 1994 08:50:37 GMT", 60),
            ("Sunday, 06-Nov-94 08:50:37 GMT", 60),
            ("Sun Nov  6 08:50:37 1994", 60),
            // Past, and limited.
            ("Sun, 06 Nov 1994 08:49:36 GMT", 0),
            ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
            ("Fri, 31 Dec 9999 23:59:59 GMT", 3_600),
            ("3601", 3_600),
            ("99999999999999999999999999", 3_600),
            ("99999999999999999999999999.9", 3_600),
            ("3599.1", 3_600),
        ] {
            assert_eq!(wait(value), Some(expected), "{value}");
        }
    }

    #[test]
    fn date_counts_from_the_response() {
        let until = |date: &'static str| {
            let until = "Sun, 06 Nov 1994 08:50:37 GMT";
            let headers = [(RETRY_AFTER, until), (DATE, date)];
            let headers = headers.map(|(name, value)| (name, HeaderValue::from_static(value)));
            read(&headers.into_iter().collect(), NOW, HOUR).map(|wait| wait.as_secs())
        };
        assert_eq!(until("Sun, 06 Nov 1994 08:40:37 GMT"), Some(600));
        assert_eq!(until("Sun, 06 Nov 1994 09:00:00 GMT"), Some(0));
        assert_eq!(until("yesterday"), Some(60));
    }

    #[test]
    fn anything_else_is_ignored() {
        for value in [
            "",
            "soon",
            "-5",
            "+5",
            "1.",
            ".5",
            "1.5.2",
            "1.5e3",
            "1,5",
            "5s",
            "Sun, 06 Nov 1994",
            "1994-11-06T08:49:37Z",
        ] {
            assert_eq!(wait(value), None, "{value}");
        }
        assert_eq!(read(&HeaderMap::new(), NOW, HOUR), None);
    }

    proptest! {
        #[test]
        fn fraction_is_never_early(millis in 0_u64..3_600_000) {
            let found = wait(&format!("{}.{:03}", millis / 1_000, millis % 1_000)).unwrap();
            prop_assert!((millis..millis + 1_000).contains(&(found * 1_000)));
        }
    }
}
