//! The public keys of an issuer: a JSON Web Key Set in a file or at a URL.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, PublicKeyUse};
use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey};
use prometheus_client::metrics::gauge::Gauge;
use redeliver_core::json;
use redeliver_core::wait::{Backoff, LogThrottle};
use redeliver_runtime::config::redact_url;
use redeliver_runtime::http_client;
use reqwest::Client;
use serde_json::value::RawValue;
use tokio::sync::watch;
use tokio::time::Instant;
use url::Url;

/// The maximum size of a key set in bytes, and the maximum number of its keys.
const MAX_BYTES: usize = 256 << 10;
const MAX_KEYS: usize = 100;
/// How long keys are used that can no longer be fetched. Longer than most outages, and short enough that an
/// attacker who interrupts the connection cannot keep a withdrawn key valid for ever.
const MAX_AGE: Duration = Duration::from_secs(24 * 3_600);
/// Maximum time of a fetch.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The time between two fetches.
const REFRESH: Duration = Duration::from_secs(300);
/// The minimum and maximum delay after a failed fetch.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// The minimum time between two fetches because of unknown keys: any client can invent the id of a key.
const UNKNOWN_KEY_INTERVAL: Duration = Duration::from_secs(10);

/// The keys with which an issuer signs tokens.
#[derive(Debug)]
pub(super) struct KeySet(Vec<Key>);

/// A public key.
#[derive(Debug)]
pub(super) struct Key {
    id: Option<String>,
    /// The algorithms for which it may be used. A key of one algorithm must not verify another.
    algorithms: Vec<Algorithm>,
    pub(super) key: DecodingKey,
}

impl KeySet {
    /// Parses a key set. Keys that cannot verify tokens are left out: symmetric ones, those for encryption, and those of
    /// other algorithms. An empty list withdraws all keys.
    ///
    /// # Errors
    /// What is wrong. A list in which no key can verify tokens is more likely a mistake than a withdrawal.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > MAX_BYTES {
            return Err(format!("is larger than {MAX_BYTES} bytes"));
        }
        let keys = json::at_each(bytes, &["/keys"]).map_err(|error| format!("is not JSON: {error}"))?;
        let keys = keys.into_iter().flatten().next();
        let keys = keys.and_then(|keys| serde_json::from_str::<Vec<&RawValue>>(keys.get()).ok());
        let Some(keys) = keys else {
            return Err("is not a JSON Web Key Set: it has no list `keys`".to_owned());
        };
        if keys.len() > MAX_KEYS {
            return Err(format!("has {} keys; the maximum is {MAX_KEYS}", keys.len()));
        }
        let is_withdrawn = keys.is_empty();
        let keys: Vec<Key> = keys.into_iter().filter_map(Key::read).collect();
        if keys.is_empty() && !is_withdrawn {
            return Err(
                "contains no key that can verify tokens with RS, PS, ES or EdDSA algorithms".to_owned(),
            );
        }
        Ok(Self(keys))
    }

    pub(super) fn of_file(bytes: &[u8], path: &Path) -> Result<Self, String> {
        Self::parse(bytes).map_err(|problem| format!("{} {problem}", path.display()))
    }

    /// The key for a token with this header. A token without the id of its key needs a set with one such key.
    pub(super) fn find(&self, id: Option<&str>, algorithm: Algorithm) -> Option<&Key> {
        let mut matching = self
            .0
            .iter()
            .filter(|key| key.algorithms.contains(&algorithm) && (id.is_none() || key.id.as_deref() == id));
        match (matching.next(), matching.next()) {
            (Some(key), None) => Some(key),
            _ => None,
        }
    }
}

impl Key {
    fn read(json: &RawValue) -> Option<Self> {
        let jwk: Jwk = serde_json::from_str(json.get()).ok()?;
        if jwk
            .common
            .public_key_use
            .as_ref()
            .is_some_and(|used| *used != PublicKeyUse::Signature)
        {
            return None;
        }
        let possible: &[Algorithm] = match &jwk.algorithm {
            AlgorithmParameters::RSA(_) => AlgorithmFamily::Rsa.algorithms(),
            AlgorithmParameters::EllipticCurve(key) if key.curve == EllipticCurve::P256 => {
                &[Algorithm::ES256]
            }
            AlgorithmParameters::EllipticCurve(key) if key.curve == EllipticCurve::P384 => {
                &[Algorithm::ES384]
            }
            AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => {
                &[Algorithm::EdDSA]
            }
            _ => return None,
        };
        let algorithms = match jwk.common.key_algorithm {
            None => possible.to_vec(),
            Some(only) => {
                let only = Algorithm::try_from(only).ok()?;
                possible.contains(&only).then(|| vec![only])?
            }
        };
        Some(Self {
            key: DecodingKey::from_jwk(&jwk).ok()?,
            id: jwk.common.key_id,
            algorithms,
        })
    }
}

/// The keys at a URL. A task fetches them; during an outage, the previous ones are kept for [`MAX_AGE`].
#[derive(Debug)]
pub(super) struct RemoteKeys {
    url: Url,
    client: Client,
    keys: watch::Sender<Arc<Option<KeySet>>>,
    /// The number of fetches that have begun and ended.
    fetches: watch::Sender<Fetches>,
    unknown: Mutex<Unknown>,
    stale: Gauge,
}

#[derive(Clone, Copy, Debug, Default)]
struct Fetches {
    begun: u64,
    ended: u64,
    /// The number of the fetch that a caller waits for.
    wanted: u64,
}

#[derive(Debug, Default)]
struct Unknown {
    /// When an unknown key last caused a fetch.
    last: Option<Instant>,
}

impl RemoteKeys {
    /// Does not connect yet.
    ///
    /// # Errors
    /// What is wrong with the CA certificates or the client.
    pub(super) fn new(url: &Url, ca_file: Option<&Path>, stale: Gauge) -> Result<Self, String> {
        let client = http_client::client(url, ca_file, TIMEOUT)?;
        Ok(Self {
            url: url.clone(),
            client,
            keys: watch::Sender::new(Arc::new(None)),
            fetches: watch::Sender::new(Fetches::default()),
            unknown: Mutex::default(),
            stale,
        })
    }

    /// The keys that were fetched last; `None` before the first fetch has succeeded, and if they are too old.
    pub(super) fn keys(&self) -> Arc<Option<KeySet>> {
        self.keys.borrow().clone()
    }

    /// Fetches the keys again because a token names an unknown one, or has been signed with another one of the same id, and waits for the result. Returns at once if that
    /// happened a short time ago.
    pub(super) async fn refresh(&self) {
        let wanted = {
            let mut unknown = self.unknown();
            if unknown
                .last
                .is_none_or(|last| last.elapsed() >= UNKNOWN_KEY_INTERVAL)
            {
                unknown.last = Some(Instant::now());
                // A fetch that has begun may return keys from before the token was signed.
                self.fetches
                    .send_modify(|fetches| fetches.wanted = fetches.begun + 1);
            }
            self.fetches.borrow().wanted
        };
        let mut fetches = self.fetches.subscribe();
        let fetched = fetches.wait_for(|fetches| fetches.ended >= wanted);
        // If the fetch takes longer than it may, the caller decides with the keys that are known.
        let _ = tokio::time::timeout(2 * TIMEOUT, fetched).await;
    }

    /// Fetches the keys again and again.
    pub(super) async fn run(&self) {
        let (mut backoff, mut throttle) = (Backoff::new(RETRY.0, RETRY.1), LogThrottle::default());
        let mut wanted = self.fetches.subscribe();
        let mut fetched_at = Instant::now();
        loop {
            self.fetches.send_modify(|fetches| fetches.begun += 1);
            let fetched = self.fetch().await;
            let delay = match fetched {
                Ok(keys) => {
                    self.keys.send_replace(Arc::new(Some(keys)));
                    self.stale.set(0);
                    fetched_at = Instant::now();
                    if throttle.has_logged() {
                        tracing::info!(
                            url = redact_url(self.url.as_str()),
                            "fetched the keys of the issuer"
                        );
                    }
                    throttle.reset();
                    backoff.reset();
                    REFRESH
                }
                Err(problem) => {
                    self.stale.set(1);
                    if fetched_at.elapsed() >= MAX_AGE && self.keys.send_replace(Arc::new(None)).is_some() {
                        throttle.reset();
                    }
                    if throttle.should_log() {
                        let has_keys = self.keys().is_some();
                        tracing::warn!(
                            url = redact_url(self.url.as_str()),
                            problem,
                            has_keys,
                            "cannot fetch the keys of the issuer; retrying"
                        );
                    }
                    backoff.next_delay()
                }
            };
            self.fetches.send_modify(|fetches| fetches.ended = fetches.begun);
            let is_wanted = wanted.wait_for(|fetches| fetches.wanted > fetches.ended);
            // Both ends of the wait lead to a fetch.
            let _ = tokio::time::timeout(delay, is_wanted).await;
        }
    }

    async fn fetch(&self) -> Result<KeySet, String> {
        let response = self.client.get(self.url.clone()).send().await;
        let response = response.map_err(http_client::problem)?;
        if response.status() != reqwest::StatusCode::OK {
            return Err(format!("the issuer answered {}", response.status()));
        }
        let body = http_client::body(response, MAX_BYTES).await?;
        KeySet::parse(&body).map_err(|problem| format!("the response {problem}"))
    }

    fn unknown(&self) -> MutexGuard<'_, Unknown> {
        self.unknown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
