//! What must not be shown: values that are secrets by their name, secrets in files, headers of requests, passwords and
//! parameters in URLs.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{Error, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What stands in the place of a secret.
pub const REDACTED: &str = "<redacted>";

/// A text that is never shown: neither by `Debug`, nor by `Display`, nor by serde.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The secret itself.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Reads a secret from a file, without the newline at its end.
    ///
    /// # Errors
    /// When the file cannot be read, is not UTF-8, or is empty.
    pub fn from_file(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        let text = text.trim_end_matches(['\n', '\r']);
        if text.is_empty() {
            return Err(format!("the file {} is empty", path.display()));
        }
        Ok(Self::new(text))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(REDACTED)
    }
}

/// A URL that may hold a secret; it is shown without it, by `Debug`, `Display` and serde.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Url(String);

impl Url {
    /// Wraps a URL.
    pub fn new(url: impl Into<String>) -> Self {
        Self(url.into())
    }

    /// The whole URL.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&redact_url(&self.0))
    }
}

impl fmt::Debug for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Url {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Names with values, some of which are secrets by their name or come from a file. `Debug` and serde show
/// [`REDACTED`] in the place of secrets.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Settings(BTreeMap<String, Setting>);

#[derive(Clone, PartialEq, Eq)]
enum Setting {
    Text(String),
    File { path: PathBuf, content: Secret },
}

impl Settings {
    /// The names with their values, secrets included.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0
            .iter()
            .map(|(name, setting)| (name.as_str(), setting.expose()))
    }

    /// The value of a name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(Setting::expose)
    }

    /// Adds or replaces a value.
    pub fn set(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.0.insert(name.into(), Setting::Text(value.into()));
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Setting {
    fn expose(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::File { content, .. } => content.expose(),
        }
    }
}

/// Whether a property of the Kafka client of this name is a secret.
fn is_secret_name(name: &str) -> bool {
    const SECRET: [&str; 8] = [
        "password",
        "passphrase",
        "secret",
        "key.pem",
        "jaas",
        "credential",
        "token",
        "oauthbearer.config",
    ];
    let name = name.to_lowercase();
    !name.ends_with(".url") && SECRET.iter().any(|part| name.contains(part))
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.iter().map(|(name, _)| (name, self.shown(name))))
            .finish()
    }
}

impl Settings {
    fn shown(&self, name: &str) -> String {
        match self.0.get(name) {
            Some(Setting::Text(text)) if !is_secret_name(name) => redact_url(text),
            _ => REDACTED.to_owned(),
        }
    }
}

impl Serialize for Settings {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, setting) in &self.0 {
            match setting {
                Setting::Text(_) => map.serialize_entry(name, &self.shown(name))?,
                Setting::File { path, .. } => map.serialize_entry(name, &BTreeMap::from([("file", path)]))?,
            }
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Settings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        BTreeMap::deserialize(deserializer).map(Self)
    }
}

/// Headers of requests, names with values. `Debug` and serde show [`REDACTED`] in the place of values: any header may
/// be somebody's key, whatever its name. A few are known to be none.
#[derive(Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct RequestHeaders(BTreeMap<String, String>);

impl RequestHeaders {
    /// The names with their values.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// The value of a name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    fn shown(&self) -> impl Iterator<Item = (&str, &str)> {
        const OPEN: [&str; 3] = ["accept", "content-type", "user-agent"];
        self.iter().map(|(name, value)| {
            let is_open = OPEN.iter().any(|open| open.eq_ignore_ascii_case(name));
            (name, if is_open { value } else { REDACTED })
        })
    }
}

impl fmt::Debug for RequestHeaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.shown()).finish()
    }
}

impl Serialize for RequestHeaders {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.shown())
    }
}

impl<'de> Deserialize<'de> for Setting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SettingVisitor)
    }
}

struct SettingVisitor;

impl<'de> Visitor<'de> for SettingVisitor {
    type Value = Setting;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, a number, true, false or { file: PATH }")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Setting, E> {
        Ok(Setting::Text(text.to_owned()))
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Setting, M::Error> {
        let mut path: Option<PathBuf> = None;
        while let Some(key) = map.next_key::<String>()? {
            if key != "file" {
                return Err(M::Error::custom(format!(
                    "`{key}` is not known here; expected {{ file: PATH }}"
                )));
            }
            path = Some(map.next_value()?);
        }
        let path = path.ok_or_else(|| M::Error::custom("has no value; expected a text or { file: PATH }"))?;
        let content = Secret::from_file(&path).map_err(M::Error::custom)?;
        Ok(Setting::File { path, content })
    }
}

/// A URL without its password, and without the values of its query, since any parameter may be a key, and its
/// fragment. What tells nodes and names of a Redis deployment is no key.
#[must_use]
pub fn redact_url(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.to_owned();
    };
    let authority_end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    // An `@` behind the first `/` may still belong to a password that was not escaped.
    let (user_info, host) = match rest.rfind('@') {
        Some(at) if at < authority_end || rest[..at].contains(':') => (Some(&rest[..at]), &rest[at + 1..]),
        _ => (None, rest),
    };
    let mut redacted = format!("{scheme}://");
    if let Some(user_info) = user_info {
        let user = user_info.split(':').next().unwrap_or_default();
        let password = if user_info.contains(':') { ":redacted" } else { "" };
        redacted += &format!("{user}{password}@");
    }
    let Some((path, query)) = host.split_once('?') else {
        return redacted + host;
    };
    let is_open = |name| scheme.starts_with("redis") && ["node", "sentinelServiceName"].contains(&name);
    let parameters = query.split('&').map(|parameter| match parameter.split_once('=') {
        Some((name, _)) if is_open(name) => parameter.to_owned(),
        Some((name, _)) => format!("{name}=redacted"),
        None => "redacted".to_owned(),
    });
    redacted + path + "?" + &parameters.collect::<Vec<_>>().join("&")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_secrets_are_known() {
        for secret in [
            "sasl.password",
            "ssl.key.password",
            "ssl.keystore.password",
            "ssl.key.pem",
            "sasl.oauthbearer.client.secret",
            "sasl.oauthbearer.config",
        ] {
            assert!(is_secret_name(secret), "{secret}");
        }
        for open in ["sasl.username", "sasl.mechanism", "ssl.key.location", "linger.ms"] {
            assert!(!is_secret_name(open), "{open}");
        }
    }

    #[test]
    fn urls_lose_their_passwords_and_what_their_parameters_say() {
        for (url, shown) in [
            ("redis://localhost:6379", "redis://localhost:6379"),
            (
                "redis://:pw@localhost:6379/0",
                "redis://:redacted@localhost:6379/0",
            ),
            ("rediss://me:p@w/x@host", "rediss://me:redacted@host"),
            (
                "http://host/a?code=abc&sig=d%3D=&e",
                "http://host/a?code=redacted&sig=redacted&redacted",
            ),
            ("http://host/a@b?key=d#e", "http://host/a@b?key=redacted"),
            (
                "redis-cluster://a:1?node=b:2&password=c",
                "redis-cluster://a:1?node=b:2&password=redacted",
            ),
            ("no url: at all", "no url: at all"),
        ] {
            assert_eq!(redact_url(url), shown);
        }
    }

    #[test]
    fn no_way_of_printing_shows_a_secret() {
        let mut settings = Settings::default();
        settings.set("sasl.password", "hunter2");
        settings.set("linger.ms", "5");
        let shown = format!("{settings:?} {:?}", Secret::new("hunter2"));
        assert!(!shown.contains("hunter2") && shown.contains("\"5\""), "{shown}");
        assert_eq!(settings.get("sasl.password"), Some("hunter2"));
        let headers = [("x-functions-key", "hunter2"), ("Content-Type", "text/plain")];
        let headers = RequestHeaders(
            headers
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
        );
        let json = serde_json::to_string(&headers).unwrap();
        let shown = format!("{headers:?} {json}");
        assert!(!shown.contains("hunter2"), "{shown}");
        assert_eq!(shown.matches("text/plain").count(), 2, "{shown}");
        assert_eq!(headers.get("x-functions-key"), Some("hunter2"));
    }
}
