//! Redaction: secret properties, secrets in files, request headers, passwords and query parameters in URLs.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{Error, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The placeholder of a secret.
pub const REDACTED: &str = "<redacted>";

/// A secret text. `Debug` shows [`REDACTED`]; `Display` and serde are not implemented.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The secret itself.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Reads a secret from a file, without trailing newlines.
    ///
    /// # Errors
    /// When the file cannot be read, is not UTF-8, or is empty.
    pub fn from_file(path: &Path) -> Result<Self, String> {
        let bytes =
            std::fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        Self::in_file(&bytes, path)
    }

    /// As [`Secret::from_file`], for a file that was read from `path`.
    ///
    /// # Errors
    /// When it is not UTF-8, or is empty.
    pub fn in_file(bytes: &[u8], path: &Path) -> Result<Self, String> {
        let path = path.display();
        let text = std::str::from_utf8(bytes).map_err(|_| format!("the file {path} is not UTF-8"))?;
        let text = text.trim_end_matches(['\n', '\r']);
        if text.is_empty() {
            return Err(format!("the file {path} is empty"));
        }
        Ok(Self::new(text))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(REDACTED)
    }
}

/// A URL that may contain a secret. `Debug`, `Display` and serde show it as [`redact_url`] does.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Url(String);

impl Url {
    /// Wraps a URL.
    pub fn new(url: impl Into<String>) -> Self {
        Self(url.into())
    }

    /// The URL, including secrets.
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

/// Names with values. `Debug` and serde redact values that come from a file or whose name suggests a secret.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Settings(BTreeMap<String, Setting>);

#[derive(Clone, PartialEq, Eq)]
enum Setting {
    Text(String),
    File { path: PathBuf, content: Secret },
}

impl Settings {
    /// The names with their values, including secrets.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0
            .iter()
            .map(|(name, setting)| (name.as_str(), setting.expose()))
    }

    /// The value of a name, even if it is a secret.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(Setting::expose)
    }

    /// The names whose values come from a file, with its path.
    pub fn files(&self) -> impl Iterator<Item = (&str, &Path)> {
        self.0.iter().filter_map(|(name, setting)| match setting {
            Setting::Text(_) => None,
            Setting::File { path, .. } => Some((name.as_str(), path.as_path())),
        })
    }

    /// Adds or replaces a value.
    pub fn set(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.0.insert(name.into(), Setting::Text(value.into()));
    }

    /// Whether no value is set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A secret, or the file that contains it: `{ file: PATH }`. `Debug` and serde show no secret.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct SecretSetting(Setting);

impl SecretSetting {
    /// A secret that is not in a file.
    pub fn new(text: impl Into<String>) -> Self {
        Self(Setting::Text(text.into()))
    }

    /// The secret. A file is read again.
    ///
    /// # Errors
    /// As [`Secret::from_file`].
    pub fn read(&self) -> Result<Secret, String> {
        match &self.0 {
            Setting::Text(text) => Ok(Secret::new(text)),
            Setting::File { path, .. } => Secret::from_file(path),
        }
    }
}

impl fmt::Debug for SecretSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(REDACTED)
    }
}

impl Serialize for SecretSetting {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0 {
            Setting::Text(_) => serializer.serialize_str(REDACTED),
            Setting::File { path, .. } => BTreeMap::from([("file", path)]).serialize(serializer),
        }
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

/// Whether a librdkafka property of this name contains a secret.
fn is_secret_name(name: &str) -> bool {
    const SECRET_PARTS: [&str; 8] = [
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
    // sasl.oauthbearer.token.endpoint.url is an address.
    !name.ends_with(".url") && SECRET_PARTS.iter().any(|part| name.contains(part))
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.iter().map(|(name, _)| (name, self.redacted(name))))
            .finish()
    }
}

impl Settings {
    fn redacted(&self, name: &str) -> String {
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
                Setting::Text(_) => map.serialize_entry(name, &self.redacted(name))?,
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

/// Request headers. `Debug` and serde redact all values except those of a few known headers, because any header may
/// contain an API key.
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

    fn redacted(&self) -> impl Iterator<Item = (&str, &str)> {
        const PUBLIC: [&str; 3] = ["accept", "content-type", "user-agent"];
        self.iter().map(|(name, value)| {
            let is_public = PUBLIC.iter().any(|public| public.eq_ignore_ascii_case(name));
            (name, if is_public { value } else { REDACTED })
        })
    }
}

impl fmt::Debug for RequestHeaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.redacted()).finish()
    }
}

impl Serialize for RequestHeaders {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.redacted())
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
        f.write_str("a string, a number, true, false or { file: PATH }")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Setting, E> {
        Ok(Setting::Text(text.to_owned()))
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Setting, M::Error> {
        let mut path: Option<PathBuf> = None;
        while let Some(key) = map.next_key::<String>()? {
            if key != "file" {
                return Err(M::Error::custom(format!(
                    "unknown key `{key}`; expected {{ file: PATH }}"
                )));
            }
            path = Some(map.next_value()?);
        }
        let path =
            path.ok_or_else(|| M::Error::custom("is an empty mapping; expected a string or { file: PATH }"))?;
        let content = Secret::from_file(&path).map_err(M::Error::custom)?;
        Ok(Setting::File { path, content })
    }
}

/// A URL with its password and the values of its query redacted, because any parameter may be an API key. The parameters
/// that describe a Redis Cluster or Sentinel deployment are kept.
#[must_use]
pub fn redact_url(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.to_owned();
    };
    let authority_end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    // An `@` after the first `/` may follow a password with an unescaped `/`.
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
    let is_public = |name| scheme.starts_with("redis") && ["node", "sentinelServiceName"].contains(&name);
    let parameters = query.split('&').map(|parameter| match parameter.split_once('=') {
        Some((name, _)) if is_public(name) => parameter.to_owned(),
        Some((name, _)) => format!("{name}=redacted"),
        None => "redacted".to_owned(),
    });
    redacted + path + "?" + &parameters.collect::<Vec<_>>().join("&")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_properties_are_recognised() {
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
        for public in ["sasl.username", "sasl.mechanism", "ssl.key.location", "linger.ms"] {
            assert!(!is_secret_name(public), "{public}");
        }
    }

    #[test]
    fn url_secrets_are_redacted() {
        for (url, redacted) in [
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
            assert_eq!(redact_url(url), redacted);
        }
    }

    #[test]
    fn secret_file_is_reread_and_hidden() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        std::fs::write(&path, "hunter2\n").unwrap();
        let setting: SecretSetting = serde_json::from_value(serde_json::json!({ "file": path })).unwrap();
        assert_eq!(setting.read().unwrap().expose(), "hunter2");
        std::fs::write(&path, "swordfish\n").unwrap();
        assert_eq!(setting.read().unwrap().expose(), "swordfish");
        std::fs::remove_file(&path).unwrap();
        assert!(setting.read().unwrap_err().starts_with("cannot read "));
        for setting in [setting, SecretSetting::new("hunter2")] {
            let shown = format!("{setting:?} {}", serde_json::to_string(&setting).unwrap());
            assert!(
                !shown.contains("hunter2") && !shown.contains("swordfish"),
                "{shown}"
            );
        }
    }

    #[test]
    fn debug_and_serde_show_no_secrets() {
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
