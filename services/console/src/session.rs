//! The session of a viewer, which only the browser keeps, encrypted.
//!
//! A browser keeps at most 4,096 bytes of a cookie, so a session with a large token is divided into several ones.

use axum::http::{HeaderMap, HeaderValue};
use redeliver_core::Timestamp;
use serde::{Deserialize, Serialize};

use crate::cookie_keys::CookieKeys;
use crate::cookies::{self, SameSite};
use crate::site::Site;

const PURPOSE: &str = "session";
/// The length of a part. Name and attributes of its cookie need the rest.
const PART: usize = 3_800;
/// The maximum number of parts. All headers of a request may have 64 KiB.
const MAX_PARTS: usize = 8;

/// What the services get, and until when.
#[derive(Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(Debug, PartialEq))]
pub(crate) struct Session {
    /// The token that the services get.
    pub(crate) token: String,
    pub(crate) refresh_token: Option<String>,
    /// The user at the provider: a renewal must be for the same one.
    #[serde(default)]
    pub(crate) subject: Option<String>,
    /// Who has signed in, if the issuer says it.
    pub(crate) name: Option<String>,
    /// When the token expires, in milliseconds.
    pub(crate) expires: Option<i64>,
    /// When to ask for a new token.
    pub(crate) renews: Option<i64>,
    /// When the viewer must sign in again, in milliseconds.
    pub(crate) ends: i64,
}

/// The session does not fit into cookies.
#[derive(Debug, thiserror::Error)]
#[error("the token is too large: with the refresh token, at most about 22,000 bytes fit into cookies")]
pub(crate) struct TooLarge;

impl Session {
    /// The session of a request; `None` if there is none, it was changed, or it has ended.
    pub(crate) fn of(headers: &HeaderMap, site: &Site, keys: &CookieKeys, now: Timestamp) -> Option<Self> {
        let part = |index| cookies::get(headers, site, &part(index));
        let (count, first) = part(0)?.split_once('.')?;
        let count: usize = count.parse().ok().filter(|count| *count <= MAX_PARTS)?;
        let mut sealed = first.to_owned();
        for index in 1..count {
            sealed.push_str(part(index)?);
        }
        let session: Self = serde_json::from_slice(&keys.open(PURPOSE, &sealed)?).ok()?;
        (session.ends > now.as_millis()).then_some(session)
    }

    /// Whether the services still accept the token.
    pub(crate) fn is_valid(&self, now: Timestamp) -> bool {
        self.expires.is_none_or(|expires| expires > now.as_millis())
    }

    /// The cookies that keep this session, in place of those of the request.
    ///
    /// # Errors
    /// If it is too large.
    pub(crate) fn cookies(
        &self,
        request: &HeaderMap,
        site: &Site,
        keys: &CookieKeys,
        now: Timestamp,
    ) -> Result<Vec<HeaderValue>, TooLarge> {
        let json = serde_json::to_vec(self).expect("a session has a form in JSON");
        let sealed = keys.seal(PURPOSE, &json);
        let count = sealed.len().div_ceil(PART);
        if count > MAX_PARTS {
            return Err(TooLarge);
        }
        let seconds = u64::try_from(self.ends - now.as_millis()).unwrap_or(0) / 1_000;
        let mut set = Vec::new();
        for (index, value) in sealed.as_bytes().chunks(PART).enumerate() {
            let count = if index == 0 {
                format!("{count}.")
            } else {
                String::new()
            };
            let value = format!("{count}{}", String::from_utf8_lossy(value));
            set.push(cookies::set(
                site,
                &part(index),
                &value,
                SameSite::Strict,
                Some(seconds),
            ));
        }
        set.extend(remove(request, site, count));
        Ok(set)
    }
}

/// What removes the session of a request.
pub(crate) fn end(request: &HeaderMap, site: &Site) -> impl Iterator<Item = HeaderValue> {
    remove(request, site, 0)
}

/// What removes the parts of a session from this one on.
fn remove(request: &HeaderMap, site: &Site, from: usize) -> impl Iterator<Item = HeaderValue> {
    let parts = (from..MAX_PARTS).map(part);
    let sent = parts.filter(|part| cookies::get(request, site, part).is_some());
    sent.map(|part| cookies::set(site, &part, "", SameSite::Strict, Some(0)))
}

fn part(index: usize) -> String {
    format!("session-{index}")
}

#[cfg(test)]
pub(crate) mod tests {
    use axum::http::header;
    use redeliver_core::Timestamp;

    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_000_000);

    /// The header of a browser with these cookies.
    pub(crate) fn sent(set: &[HeaderValue]) -> HeaderMap {
        let kept = set.iter().filter_map(|value| {
            let value = value.to_str().ok()?;
            let pair = value.split(';').next()?;
            (!value.contains("Max-Age=0")).then_some(pair)
        });
        let all = kept.collect::<Vec<_>>().join("; ");
        HeaderMap::from_iter([(header::COOKIE, HeaderValue::try_from(all).unwrap())])
    }

    fn session(length: usize) -> Session {
        Session {
            token: "t".repeat(length),
            refresh_token: None,
            subject: None,
            name: Some("Ada".to_owned()),
            expires: Some(NOW.as_millis() + 60_000),
            renews: None,
            ends: NOW.as_millis() + 3_600_000,
        }
    }

    fn site() -> Site {
        let origin = "https://console.example".to_owned();
        Site {
            origin,
            is_secure: true,
        }
    }

    fn keys() -> CookieKeys {
        CookieKeys::random()
    }

    #[test]
    fn large_tokens_are_divided() {
        let keys = keys();
        for (length, count) in [(10, 1), (4_000, 2), (16 << 10, 6)] {
            let set = session(length)
                .cookies(&HeaderMap::new(), &site(), &keys, NOW)
                .unwrap();
            assert_eq!(set.len(), count, "{length}");
            assert!(set.iter().all(|cookie| cookie.len() <= 4_096));
            let read = Session::of(&sent(&set), &site(), &keys, NOW);
            assert_eq!(read, Some(session(length)));
        }
        assert!(
            session(24 << 10)
                .cookies(&HeaderMap::new(), &site(), &keys, NOW)
                .is_err()
        );
    }

    #[test]
    fn later_parts_of_older_session_are_removed() {
        let keys = keys();
        let large = session(8_000)
            .cookies(&HeaderMap::new(), &site(), &keys, NOW)
            .unwrap();
        let small = session(10).cookies(&sent(&large), &site(), &keys, NOW).unwrap();
        let text = |value: &HeaderValue| value.to_str().unwrap().to_owned();
        assert_eq!(small.len(), large.len());
        for removed in small.iter().skip(1).map(text) {
            assert!(
                removed.contains("=; ") && removed.contains("Max-Age=0"),
                "{removed}"
            );
        }
        assert_eq!(end(&sent(&large), &site()).count(), large.len());
    }

    #[test]
    fn changed_and_ended_sessions_are_refused() {
        let keys = keys();
        let set = session(8_000)
            .cookies(&HeaderMap::new(), &site(), &keys, NOW)
            .unwrap();
        let read = |set: &[HeaderValue], now| Session::of(&sent(set), &site(), &keys, now);
        assert!(read(&set, NOW).is_some());
        assert_eq!(read(&set, NOW.after(std::time::Duration::from_secs(3_600))), None);
        assert_eq!(read(&set[..1], NOW), None);
        assert_eq!(read(&set[1..], NOW), None);
        let other = CookieKeys::random();
        assert_eq!(Session::of(&sent(&set), &site(), &other, NOW), None);
        for forged in ["99999999999999999999.x", "9.x", "1.", "x", "0.x"] {
            let header = format!("__Host-redeliver-session-0={forged}");
            let header = HeaderMap::from_iter([(header::COOKIE, HeaderValue::try_from(header).unwrap())]);
            assert_eq!(Session::of(&header, &site(), &keys, NOW), None, "{forged}");
        }
    }
}
