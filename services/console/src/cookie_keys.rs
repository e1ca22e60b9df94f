//! The keys of cookies: what the browser keeps for the console, it can neither read nor change.

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use redeliver_runtime::config::{ConfigError, InvalidField};
use redeliver_runtime::watched_files::{ConfiguredFile, FileContents, WatchedFiles};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Salt};
use ring::rand::{SecureRandom as _, SystemRandom};

/// The field of the configuration.
pub(crate) const FIELD: &str = "console.cookie_keys_file";
/// The minimum length of a key in characters.
const MIN_KEY: usize = 32;
/// The maximum number of keys. Each one is tried for each request.
const MAX_KEYS: usize = 4;

/// Keys, of which the first one encrypts.
pub(crate) struct CookieKeys(Vec<LessSafeKey>);

impl CookieKeys {
    /// The keys in this file, or a random one.
    ///
    /// # Errors
    /// If the file cannot be used.
    pub(crate) fn load(file: Option<&Path>) -> Result<WatchedFiles<Self>, ConfigError> {
        let files = file.map(|path| ConfiguredFile {
            field: FIELD.to_owned(),
            path: path.to_owned(),
        });
        Ok(WatchedFiles::load(files.into_iter().collect(), Self::parse)?)
    }

    pub(crate) fn random() -> Self {
        Self(vec![key(&random::<32>())])
    }

    fn parse(files: &[FileContents<'_>]) -> Result<Self, InvalidField> {
        let Some(file) = files.first() else {
            return Ok(Self::random());
        };
        let lines = file.bytes.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
        let lines: Vec<&[u8]> = lines.filter(|line| !line.is_empty()).collect();
        let path = file.path().display();
        if !(1..=MAX_KEYS).contains(&lines.len()) {
            let found = lines.len();
            return Err(file.problem(format!(
                "{path} has {found} keys: write 1 to {MAX_KEYS} lines, each with a key"
            )));
        }
        if lines.iter().any(|line| line.len() < MIN_KEY) {
            return Err(file.problem(format!(
                "{path} has a key with fewer than {MIN_KEY} characters: make one with `openssl rand -hex 32`"
            )));
        }
        Ok(Self(lines.into_iter().map(key).collect()))
    }

    /// Encrypts a value. `purpose` keeps a cookie from being used as another one.
    pub(crate) fn seal(&self, purpose: &str, value: &[u8]) -> String {
        let nonce: [u8; NONCE_LEN] = random();
        let mut sealed = value.to_vec();
        self.0[0]
            .seal_in_place_append_tag(
                Nonce::assume_unique_for_key(nonce),
                Aad::from(purpose.as_bytes()),
                &mut sealed,
            )
            .expect("a cookie is shorter than what a key can encrypt");
        sealed.splice(..0, nonce);
        URL_SAFE_NO_PAD.encode(sealed)
    }

    /// Decrypts what [`Self::seal`] has returned for the same purpose. `None` if it was changed, or its key is gone.
    pub(crate) fn open(&self, purpose: &str, sealed: &str) -> Option<Vec<u8>> {
        let sealed = URL_SAFE_NO_PAD.decode(sealed).ok()?;
        let (nonce, sealed) = sealed.split_first_chunk::<NONCE_LEN>()?;
        self.0.iter().find_map(|key| {
            let mut opened = sealed.to_vec();
            let nonce = Nonce::assume_unique_for_key(*nonce);
            let length = key.open_in_place(nonce, Aad::from(purpose.as_bytes()), &mut opened);
            let length = length.ok()?.len();
            opened.truncate(length);
            Some(opened)
        })
    }
}

/// A key for this secret.
fn key(secret: &[u8]) -> LessSafeKey {
    let salt = Salt::new(HKDF_SHA256, b"redeliver console").extract(secret);
    let key = salt.expand(&[b"cookies"], &AES_256_GCM).map(UnboundKey::from);
    LessSafeKey::new(key.expect("HKDF returns as many bytes as a key has"))
}

/// Random bytes that nobody can guess.
pub(crate) fn random<const LENGTH: usize>() -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    let filled = SystemRandom::new().fill(&mut bytes);
    filled.expect("the operating system has random numbers");
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(secrets: &[&[u8]]) -> CookieKeys {
        CookieKeys(secrets.iter().map(|secret| key(secret)).collect())
    }

    #[test]
    fn changed_values_are_refused() {
        let keys = keys(&[b"one"]);
        let sealed = keys.seal("session", b"token");
        assert_ne!(sealed, keys.seal("session", b"token"));
        assert_eq!(keys.open("session", &sealed).as_deref(), Some(&b"token"[..]));
        assert_eq!(keys.open("sign-in", &sealed), None);
        for index in 0..sealed.len() {
            let mut changed = sealed.clone().into_bytes();
            changed[index] = if changed[index] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).unwrap();
            assert_eq!(keys.open("session", &changed), None, "{index}");
        }
        for short in ["", "AAAA", &sealed[..16], "%"] {
            assert_eq!(keys.open("session", short), None, "{short}");
        }
    }

    #[test]
    fn rotated_keys_still_decrypt() {
        let sealed = keys(&[b"old"]).seal("session", b"token");
        let both = keys(&[b"new", b"old"]);
        assert_eq!(both.open("session", &sealed).as_deref(), Some(&b"token"[..]));
        let resealed = both.seal("session", b"token");
        let new = keys(&[b"new"]);
        assert!(new.open("session", &resealed).is_some() && new.open("session", &sealed).is_none());
    }

    #[test]
    fn unusable_key_files_are_refused() {
        let scratch = redeliver_testkit::scratch::Scratch::new("cookie-keys").unwrap();
        let path = scratch.path().join("keys");
        let long = "k".repeat(32);
        for (content, problem) in [
            (String::new(), "has 0 keys"),
            ("short\n".to_owned(), "fewer than 32 characters"),
            (format!("{long}\n").repeat(5), "has 5 keys"),
        ] {
            std::fs::write(&path, content).unwrap();
            let error = CookieKeys::load(Some(&path)).map(drop).unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
        std::fs::write(&path, format!("{long}\r\n\n {long}x\n")).unwrap();
        assert_eq!(CookieKeys::load(Some(&path)).unwrap().value().0.len(), 2);
    }
}
