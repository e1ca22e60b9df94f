//! Cookies of the console: only for this host, and neither for scripts nor for requests that other sites make.

use axum::http::{HeaderMap, HeaderValue, header};
use url::Url;

use crate::site::Site;

/// When a browser sends a cookie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SameSite {
    /// With requests of the console's own pages.
    Strict,
    /// Also when another site leads to the console.
    Lax,
}

/// The name of a cookie. With HTTPS, its prefix makes the browser accept it only from this host. Without, it has the port, because the ports of a host
/// share their cookies.
fn name(site: &Site, name: &str) -> String {
    if site.is_secure {
        return format!("__Host-redeliver-{name}");
    }
    let url = Url::parse(&site.origin).ok();
    let port = url.and_then(|url| url.port_or_known_default()).unwrap_or(80);
    format!("redeliver-{port}-{name}")
}

/// The value of a cookie that the browser has sent.
pub(crate) fn get<'h>(headers: &'h HeaderMap, site: &Site, cookie: &str) -> Option<&'h str> {
    let name = name(site, cookie);
    let headers = headers.get_all(header::COOKIE).iter();
    let pairs = headers
        .filter_map(|header| header.to_str().ok())
        .flat_map(|header| header.split(';'));
    let mut pairs = pairs.filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(known, _)| *known == name).map(|(_, value)| value)
}

/// The value of a header `Set-Cookie`. The browser removes the cookie after this number of seconds, at once with 0, and when it ends without a number. The
/// value must consist of characters of base64url.
pub(crate) fn set(
    site: &Site,
    cookie: &str,
    value: &str,
    same_site: SameSite,
    seconds: Option<u64>,
) -> HeaderValue {
    let name = name(site, cookie);
    let secure = if site.is_secure { "; Secure" } else { "" };
    let age = seconds.map_or_else(String::new, |seconds| format!("; Max-Age={seconds}"));
    let text = format!("{name}={value}; Path=/; HttpOnly; SameSite={same_site:?}{secure}{age}");
    let mut value = HeaderValue::try_from(text).expect("names and values are ASCII");
    value.set_sensitive(true);
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(is_secure: bool) -> Site {
        let origin = if is_secure {
            "https://console.example"
        } else {
            "http://localhost:8484"
        };
        Site {
            origin: origin.to_owned(),
            is_secure,
        }
    }

    #[test]
    fn cookies_have_all_flags() {
        let value = set(&site(true), "session-0", "abc", SameSite::Strict, Some(60));
        let expected =
            "__Host-redeliver-session-0=abc; Path=/; HttpOnly; SameSite=Strict; Secure; Max-Age=60";
        assert_eq!(value, expected);
        assert!(value.is_sensitive());
        let value = set(&site(false), "sign-in", "abc", SameSite::Lax, None);
        assert_eq!(
            value,
            "redeliver-8484-sign-in=abc; Path=/; HttpOnly; SameSite=Lax"
        );
    }

    #[test]
    fn cookies_are_read_by_full_name() {
        let mut headers = HeaderMap::new();
        headers.append(
            header::COOKIE,
            HeaderValue::from_static("a=1; redeliver-8484-x=plain;b"),
        );
        headers.append(header::COOKIE, HeaderValue::from_static("__Host-redeliver-x=2=="));
        assert_eq!(get(&headers, &site(true), "x"), Some("2=="));
        assert_eq!(get(&headers, &site(false), "x"), Some("plain"));
        assert_eq!(get(&headers, &site(true), "y"), None);
    }
}
