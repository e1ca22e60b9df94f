//! JSON Web Tokens of an issuer.

use std::collections::BTreeMap;
use std::time::Duration;

use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, Header, Validation, decode, decode_header};
use redeliver_core::json::{Scalar, at_each};
use redeliver_runtime::config::{ConfigError, JwtConfig, MAX_SCOPES, Scope, endpoint_url};
use redeliver_runtime::watched_files::WatchedFiles;
use serde_json::value::RawValue;

use super::jwks::{KeySet, RemoteKeys};
use super::refusal::{Reason, Refusal};
use super::{CallerName, Identity, Section};

mod signatures;

/// How much the clocks of the issuer and of this host may differ.
const LEEWAY: Duration = Duration::from_secs(30);

/// `auth.jwt`.
#[derive(Debug)]
pub(super) struct Jwt {
    config: JwtConfig,
    keys: Keys,
}

#[derive(Debug)]
enum Keys {
    File(WatchedFiles<KeySet>),
    Url(Box<RemoteKeys>),
}

/// What the keys of the issuer say about a token.
enum Checked {
    Valid(Box<RawValue>),
    UnknownKey,
    NoKeys,
    /// It is forged, or the issuer has replaced a key without a new id.
    WrongSignature,
    Invalid(Refusal),
}

/// Whether a token has the form of a JWT: three parts.
pub(super) fn looks_like_one(token: &[u8]) -> bool {
    token.iter().filter(|byte| **byte == b'.').count() == 2
}

impl Jwt {
    pub(super) fn new(config: &JwtConfig, section: &Section<'_>) -> Result<Self, ConfigError> {
        const URL: &str = "auth.jwt.jwks_url";
        signatures::install();
        let keys = match (&config.jwks_file, &config.jwks_url) {
            (Some(path), _) => Keys::File(section.file("auth.jwt.jwks_file", path, KeySet::of_file)?),
            (None, Some(url)) => {
                let url = endpoint_url(url.expose()).map_err(|problem| section.error(URL, problem))?;
                let remote = RemoteKeys::new(&url, config.ca_file.as_deref(), section.stale(URL));
                Keys::Url(Box::new(
                    remote.map_err(|problem| section.error("auth.jwt.ca_file", problem))?,
                ))
            }
            (None, None) => return Err(section.error(URL, "is missing; set it, or jwks_file".to_owned())),
        };
        Ok(Self {
            config: config.clone(),
            keys,
        })
    }

    /// The caller that a token describes.
    pub(super) async fn identify(&self, token: &[u8]) -> Result<Identity, Refusal> {
        let header = decode_header(token).map_err(|_| {
            Refusal::of(
                Reason::TokenMalformed,
                "the token is not a JWT with a supported algorithm: RS256, RS384, RS512, PS256, PS384, PS512, ES256, \
                 ES384 or EdDSA",
            )
        })?;
        if header.crit.is_some() {
            return Err(wrong("has critical extensions, which are not supported"));
        }
        let mut checked = self.check(token, &header);
        let may_be_new = matches!(
            checked,
            Checked::UnknownKey | Checked::NoKeys | Checked::WrongSignature
        );
        if let (true, Keys::Url(remote)) = (may_be_new, &self.keys) {
            remote.refresh().await;
            checked = self.check(token, &header);
        }
        match checked {
            Checked::Valid(claims) => identity(&self.config, &claims),
            Checked::Invalid(refusal) => Err(refusal),
            Checked::WrongSignature => Err(wrong("has an invalid signature")),
            Checked::UnknownKey => Err(wrong(
                "is signed with a key that its issuer does not publish for this algorithm",
            )),
            Checked::NoKeys => Err(Refusal::of(
                Reason::KeysUnavailable,
                "the keys of the issuer cannot be fetched, so the token cannot be checked; retry later",
            )),
        }
    }

    fn check(&self, token: &[u8], header: &Header) -> Checked {
        match &self.keys {
            Keys::File(file) => check(&self.config, &file.value(), token, header),
            Keys::Url(remote) => match &*remote.keys() {
                Some(keys) => check(&self.config, keys, token, header),
                None => Checked::NoKeys,
            },
        }
    }

    /// Fetches the keys again and again, if they are at a URL.
    pub(super) async fn fetch_keys(&self) {
        if let Keys::Url(remote) = &self.keys {
            remote.run().await;
        }
    }

    pub(super) fn check_file(&self) {
        if let Keys::File(file) = &self.keys {
            file.check();
        }
    }
}

/// Checks signature, issuer, audience and times.
fn check(config: &JwtConfig, keys: &KeySet, token: &[u8], header: &Header) -> Checked {
    // Only public keys are in the set, so no algorithm with a shared secret has a key.
    let algorithm: Algorithm = header.alg;
    let Some(key) = keys.find(header.kid.as_deref(), algorithm) else {
        return Checked::UnknownKey;
    };
    let mut validation = Validation::new(algorithm);
    validation.leeway = LEEWAY.as_secs();
    validation.validate_nbf = true;
    validation.set_issuer(&[&config.issuer]);
    validation.set_audience(&[&config.audience]);
    validation.set_required_spec_claims(&["exp", "iss", "aud"]);
    match decode::<Box<RawValue>>(token, &key.key, &validation) {
        Ok(token) => Checked::Valid(token.claims),
        Err(error) if *error.kind() == ErrorKind::InvalidSignature => Checked::WrongSignature,
        Err(error) => Checked::Invalid(match error.kind() {
            ErrorKind::ExpiredSignature => {
                Refusal::of(Reason::TokenExpired, "the token has expired; request a new one")
            }
            ErrorKind::ImmatureSignature => wrong("is not valid yet (claim `nbf`)"),
            ErrorKind::InvalidIssuer => wrong(&format!("has another issuer; expected `{}`", config.issuer)),
            ErrorKind::InvalidAudience => {
                wrong(&format!("has another audience; expected `{}`", config.audience))
            }
            ErrorKind::MissingRequiredClaim(claim) => {
                wrong(&format!("has no claim `{claim}`, or one of another type"))
            }
            ErrorKind::InvalidClaimFormat(claim) => wrong(&format!("has an invalid claim `{claim}`")),
            _ => wrong("is not a valid JWT"),
        }),
    }
}

fn wrong(problem: &str) -> Refusal {
    Refusal::of(Reason::TokenWrong, format!("the token {problem}"))
}

/// The caller, from the claims of a valid token. Scopes of other systems are ignored.
fn identity(config: &JwtConfig, claims: &RawValue) -> Result<Identity, Refusal> {
    let claim = |name: &str| {
        let pointer = match name.starts_with('/') {
            true => name.to_owned(),
            false => format!("/{}", name.replace('~', "~0").replace('/', "~1")),
        };
        at_each(claims.get().as_bytes(), &[pointer]).ok()?.pop()?
    };
    let Some(name) = claim(&config.name_claim).and_then(text) else {
        return Err(wrong(&format!("has no claim `{}`", config.name_claim)));
    };
    let words = |listed: &RawValue| match text(listed) {
        Some(words) => words.split_whitespace().map(str::to_owned).collect(),
        None => {
            let list: Vec<&RawValue> = serde_json::from_str(listed.get()).unwrap_or_default();
            list.into_iter().filter_map(text).collect()
        }
    };
    let words: Vec<String> = claim(&config.scopes_claim).map(words).unwrap_or_default();
    let name = CallerName::jwt(&config.issuer, &name).map_err(|problem| {
        wrong(&format!(
            "has an unusable claim `{}`: it {problem}",
            config.name_claim
        ))
    })?;
    Ok(Identity::new(name, scopes(&config.roles, &words)))
}

fn text(value: &RawValue) -> Option<String> {
    match Scalar::of(value)? {
        Scalar::String(text) => String::from_utf8(text.into_owned()).ok(),
        _ => None,
    }
}

fn scopes(roles: &BTreeMap<String, Vec<Scope>>, words: &[String]) -> Vec<Scope> {
    let mut scopes = Vec::new();
    for word in words {
        match roles.get(word) {
            Some(of_role) => scopes.extend_from_slice(of_role),
            // Other systems have a scope `*` too. Only a role of the configuration gives access to everything.
            None => scopes.extend(word.parse().ok().filter(|scope| *scope != Scope::everything())),
        }
    }
    scopes.truncate(MAX_SCOPES);
    scopes
}
