//! Static tokens, by their hashes.

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use redeliver_runtime::config::{ApiConfig, ConfigError, Sha256, TokensFile, token_in};
use redeliver_runtime::watched_files::WatchedFiles;
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom as _, SystemRandom};
use subtle::ConstantTimeEq as _;

use super::{CallerName, Identity, Section};

/// The tokens of one API.
#[derive(Debug)]
pub(super) struct Tokens {
    /// `token_file`, whose token permits everything.
    single: Option<WatchedFiles<Entry>>,
    /// `auth.tokens_file`.
    listed: Option<WatchedFiles<Vec<Entry>>>,
}

#[derive(Debug)]
struct Entry {
    hash: [u8; 32],
    identity: Identity,
}

impl Tokens {
    /// The tokens of the configuration; `None` if it has none.
    pub(super) fn load(config: &ApiConfig, section: &Section<'_>) -> Result<Option<Self>, ConfigError> {
        let single_path = config.token_file.as_deref();
        let single = single_path.map(|path| section.file("token_file", path, single));
        let listed_path = config.auth.tokens_file.as_deref();
        let listed = listed_path.map(|path| section.file("auth.tokens_file", path, listed));
        let tokens = Self {
            single: single.transpose()?,
            listed: listed.transpose()?,
        };
        Ok((tokens.single.is_some() || tokens.listed.is_some()).then_some(tokens))
    }

    /// The holder of a token.
    pub(super) fn identify(&self, token: &[u8]) -> Option<Identity> {
        let hash = sha256(token);
        let listed = self.listed.as_ref().map(WatchedFiles::value);
        let single = self.single.as_ref().map(WatchedFiles::value);
        let all = listed
            .iter()
            .flat_map(|entries| entries.iter())
            .chain(single.as_deref());
        // Compares with every entry in constant time, so that the duration reveals nothing about the hashes.
        let mut found = None;
        for entry in all {
            if bool::from(entry.hash.ct_eq(&hash)) {
                found = Some(entry.identity.clone());
            }
        }
        found
    }

    pub(super) fn check_files(&self) {
        if let Some(file) = &self.single {
            file.check();
        }
        if let Some(file) = &self.listed {
            file.check();
        }
    }
}

fn single(bytes: &[u8], path: &Path) -> Result<Entry, String> {
    let token = token_in(bytes, path)?;
    Ok(Entry {
        hash: sha256(token.expose().as_bytes()),
        identity: Identity::with_full_access(CallerName::token_file()),
    })
}

fn listed(bytes: &[u8], path: &Path) -> Result<Vec<Entry>, String> {
    let file = TokensFile::parse(bytes, path)?;
    let entry = |token: redeliver_runtime::config::TokenConfig| Entry {
        hash: token.sha256.0,
        identity: Identity::new(CallerName::token(&token.name), token.scopes),
    };
    Ok(file.tokens.into_iter().map(entry).collect())
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest(&SHA256, bytes).as_ref());
    hash
}

/// A new token.
#[derive(Clone)]
pub struct NewToken {
    /// The token, for its holder only.
    pub token: String,
    /// Its hash, for the tokens file.
    pub sha256: Sha256,
}

/// Creates a token with 256 random bits. `None` if the operating system has no randomness.
#[must_use]
pub fn new_token() -> Option<NewToken> {
    let mut random = [0; 32];
    SystemRandom::new().fill(&mut random).ok()?;
    // The prefix lets scanners recognise a leaked token.
    let token = format!("redeliver_{}", URL_SAFE_NO_PAD.encode(random));
    Some(NewToken {
        sha256: Sha256(sha256(token.as_bytes())),
        token,
    })
}
