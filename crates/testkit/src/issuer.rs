//! An issuer of tokens for OAuth 2.0 client credentials: an HTTP server that signs JWTs, as Kafka's validator expects them.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, anyhow};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};

use crate::fake_endpoint::{FakeEndpoint, Reply, Request};

/// The audience of all tokens.
pub const AUDIENCE: &str = "kafka";

/// An issuer with one client.
pub struct Issuer {
    endpoint: FakeEndpoint,
    shared: Arc<Shared>,
}

struct Shared {
    key: EcdsaKeyPair,
    client: String,
    secret: Mutex<String>,
    lifetime: Duration,
    issued: AtomicU64,
}

impl Issuer {
    /// Starts an issuer whose tokens have this lifetime. Its client authenticates by the header `Authorization`; neither id nor
    /// secret may contain characters that would have to be encoded.
    ///
    /// # Errors
    /// If no key can be made.
    pub fn start(client: &str, secret: &str, lifetime: Duration) -> Result<Self> {
        let random = SystemRandom::new();
        let failed = |error| anyhow!("making the key of an issuer: {error}");
        let encoded = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random);
        let encoded = encoded.map_err(|error| failed(error.to_string()))?;
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, encoded.as_ref(), &random);
        let shared = Arc::new(Shared {
            key: key.map_err(|error| failed(error.to_string()))?,
            client: client.to_owned(),
            secret: Mutex::new(secret.to_owned()),
            lifetime,
            issued: AtomicU64::new(0),
        });
        let issuing = shared.clone();
        Ok(Self {
            endpoint: FakeEndpoint::start(move |request| issuing.reply(request)),
            shared,
        })
    }

    /// The token endpoint.
    #[must_use]
    pub fn token_url(&self) -> String {
        self.endpoint.url()
    }

    /// The number of tokens issued so far.
    #[must_use]
    pub fn issued(&self) -> u64 {
        self.shared.issued.load(Ordering::SeqCst)
    }

    /// Closes every connection without a response until [`Issuer::resume`].
    pub fn interrupt(&self) {
        self.endpoint.behave(|_| Reply::Close);
    }

    /// Issues tokens again.
    pub fn resume(&self) {
        let issuing = self.shared.clone();
        self.endpoint.behave(move |request| issuing.reply(request));
    }

    /// Accepts only this secret from now on.
    pub fn rotate(&self, secret: &str) {
        *self.shared.secret.lock().unwrap_or_else(PoisonError::into_inner) = secret.to_owned();
    }

    /// Writes the public key as a JSON Web Key Set to a file in this directory.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write_keys(&self, directory: &Path) -> Result<PathBuf> {
        // An uncompressed point: a byte that says so, and two coordinates.
        let point = &self.shared.key.public_key().as_ref()[1..];
        let (x, y) = point.split_at(point.len() / 2);
        let keys = serde_json::json!({ "keys": [{
            "kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": "test",
            "x": URL_SAFE_NO_PAD.encode(x), "y": URL_SAFE_NO_PAD.encode(y),
        }] });
        let file = directory.join("jwks.json");
        std::fs::write(&file, keys.to_string()).with_context(|| format!("writing {}", file.display()))?;
        Ok(file)
    }
}

impl Shared {
    fn reply(&self, request: &Request) -> Reply {
        let body = String::from_utf8_lossy(&request.body);
        if !body
            .split('&')
            .any(|pair| pair == "grant_type=client_credentials")
        {
            return json(400, &serde_json::json!({ "error": "unsupported_grant_type" }));
        }
        let secret = self.secret.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let expected = format!("Basic {}", STANDARD.encode(format!("{}:{secret}", self.client)));
        let sent = request.headers.get("authorization");
        if sent.is_none_or(|sent| sent.as_bytes() != expected.as_bytes()) {
            let refusal = serde_json::json!({
                "error": "invalid_client", "error_description": "Invalid client credentials",
            });
            return json(401, &refusal);
        }
        match self.token() {
            Ok(token) => {
                self.issued.fetch_add(1, Ordering::SeqCst);
                let lifetime = self.lifetime.as_secs();
                json(
                    200,
                    &serde_json::json!({ "access_token": token, "token_type": "Bearer", "expires_in": lifetime }),
                )
            }
            Err(error) => json(500, &serde_json::json!({ "error": error.to_string() })),
        }
    }

    fn token(&self) -> Result<String> {
        #[expect(
            clippy::disallowed_methods,
            reason = "the broker compares the token with the real time"
        )]
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
        let claims = serde_json::json!({
            "sub": self.client, "aud": AUDIENCE, "scope": "kafka",
            // Whole seconds, rounded up: the token must not expire before the time that the response promises.
            "iat": now, "exp": now + self.lifetime.as_secs() + 1,
        });
        let header = serde_json::json!({ "alg": "ES256", "typ": "JWT", "kid": "test" });
        let encoded = |value: &serde_json::Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", encoded(&header), encoded(&claims));
        let signature = self.key.sign(&SystemRandom::new(), signed.as_bytes());
        let signature = signature.map_err(|error| anyhow!("signing a token: {error}"))?;
        Ok(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }
}

fn json(status: u16, body: &serde_json::Value) -> Reply {
    let headers = vec![("content-type".to_owned(), "application/json".to_owned())];
    Reply::Status(status, headers, body.to_string().into())
}
