//! Sign-in at an OpenID Connect provider: the authorization code flow with PKCE.
//!
//! The signature of the ID token is not checked: it comes from the provider over TLS (OpenID Connect Core, section 3.1.3.7), and gives no rights here.
//! The services check the signature of the token that they get with each call.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use redeliver_core::failure::bounded_text;
use redeliver_core::{Clock as _, SystemClock, Timestamp};
use redeliver_runtime::config::{ConfigError, SecretSetting, issuer_url};
use redeliver_runtime::http_client;
use redeliver_runtime::token_endpoint::{
    Granted, TokenEndpoint, TokenRequestError, expiry_of_jwt, unverified_claims,
};
use reqwest::{Client, StatusCode};
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use url::Url;

use crate::config::{SentToken, SignInOidcConfig};
use crate::cookie_keys::random;

const SECTION: &str = "console.oidc";
/// Maximum duration of a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of the metadata in bytes.
const MAX_METADATA: usize = 256 << 10;
/// How long the metadata are used.
const METADATA_AGE: Duration = Duration::from_secs(3_600);
/// How long after a failure the provider is not asked again.
pub(crate) const RETRY: Duration = Duration::from_secs(5);
/// How long a person may take at the provider.
pub(crate) const FLOW: Duration = Duration::from_secs(600);
/// How much the clocks of the provider and of this host may differ.
const LEEWAY: i64 = 30_000;
/// How long before its end a token is renewed: at most this, and at most a quarter of its life.
const RENEWAL: i64 = 60_000;

/// A provider, and the console as its client.
#[derive(Debug)]
pub(crate) struct Oidc {
    config: SignInOidcConfig,
    client: Client,
    metadata: Mutex<Option<Cached>>,
    /// Held by who reads the metadata.
    reading: tokio::sync::Mutex<()>,
}

/// The metadata, or why there are none.
#[derive(Clone, Debug)]
struct Cached {
    metadata: Result<Arc<Metadata>, String>,
    read_again: Instant,
}

/// What a provider publishes about itself.
#[derive(Debug, Deserialize)]
struct Metadata {
    issuer: String,
    authorization_endpoint: String,
    token_endpoint: String,
    end_session_endpoint: Option<String>,
}

/// A sign-in that has begun. A cookie keeps it in the browser, encrypted.
#[derive(Serialize, Deserialize)]
pub(crate) struct Flow {
    pub(crate) state: String,
    nonce: String,
    verifier: String,
    /// Where the viewer comes from.
    pub(crate) return_to: String,
    /// What identifies the refresh token of the session that this sign-in replaces.
    pub(crate) replaces: Option<String>,
    /// In milliseconds.
    ends: i64,
}

impl Flow {
    /// A sign-in that leads back to this page.
    pub(crate) fn new(return_to: String, replaces: Option<String>) -> Self {
        let random = || URL_SAFE_NO_PAD.encode(random::<32>());
        Self {
            state: random(),
            nonce: random(),
            verifier: random(),
            return_to,
            replaces,
            ends: SystemClock.now().after(FLOW).as_millis(),
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        SystemClock.now().as_millis() >= self.ends
    }
}

/// What the provider has returned.
pub(crate) struct Tokens {
    /// The token that the services get.
    pub(crate) token: String,
    pub(crate) refresh_token: Option<String>,
    /// The user, if there is an ID token.
    pub(crate) subject: Option<String>,
    pub(crate) name: Option<String>,
    /// When the token expires, in milliseconds, and when to renew it.
    pub(crate) expires: Option<i64>,
    pub(crate) renews: Option<i64>,
}

/// The claims of an ID token.
#[derive(Deserialize)]
struct Claims {
    iss: String,
    aud: Audience,
    azp: Option<String>,
    nonce: Option<String>,
    sub: String,
    preferred_username: Option<String>,
    email: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Audience {
    One(String),
    Several(Vec<String>),
}

impl Oidc {
    /// Does not connect yet.
    ///
    /// # Errors
    /// What is wrong with the configuration.
    pub(crate) fn new(config: &SignInOidcConfig) -> Result<Self, ConfigError> {
        let of = |key: &str, problem| ConfigError::of_field(format!("{SECTION}.{key}"), problem);
        let issuer = checked(config.issuer.expose()).map_err(|problem| of("issuer", problem))?;
        let client = http_client::client(&issuer, config.ca_file.as_deref(), TIMEOUT);
        Ok(Self {
            client: client.map_err(|problem| of("ca_file", problem))?,
            config: config.clone(),
            metadata: Mutex::default(),
            reading: tokio::sync::Mutex::default(),
        })
    }

    /// The host of the provider, for people.
    pub(crate) fn host(&self) -> String {
        let url = Url::parse(self.config.issuer.expose()).ok();
        url.and_then(|url| url.host_str().map(str::to_owned))
            .unwrap_or_default()
    }

    /// The address at which a person signs in.
    ///
    /// # Errors
    /// If the metadata of the provider cannot be read.
    pub(crate) async fn authorization(&self, flow: &Flow, redirect_uri: &str) -> Result<String, String> {
        let metadata = self.metadata().await?;
        let mut url = checked(&metadata.authorization_endpoint)?;
        let challenge = digest(&SHA256, flow.verifier.as_bytes());
        url.query_pairs_mut()
            .append_pair("response_type", "code")
            .append_pair("client_id", &self.config.client_id)
            .append_pair("redirect_uri", redirect_uri)
            .append_pair("scope", &self.config.scope)
            .append_pair("state", &flow.state)
            .append_pair("nonce", &flow.nonce)
            .append_pair("code_challenge", &URL_SAFE_NO_PAD.encode(challenge))
            .append_pair("code_challenge_method", "S256")
            .extend_pairs(self.config.parameters.iter());
        Ok(url.into())
    }

    /// The address at which a person signs out of the provider, too.
    pub(crate) async fn end_session(&self, return_to: &str) -> Option<String> {
        let metadata = self.metadata().await.ok()?;
        let mut url = checked(metadata.end_session_endpoint.as_ref()?).ok()?;
        url.query_pairs_mut()
            .append_pair("client_id", &self.config.client_id)
            .append_pair("post_logout_redirect_uri", return_to);
        Some(url.into())
    }

    /// The tokens for the code with which the provider has sent a browser back.
    ///
    /// # Errors
    /// If there are none, or the ID token is not for this sign-in.
    pub(crate) async fn exchange(
        &self,
        flow: &Flow,
        code: &str,
        redirect_uri: &str,
    ) -> Result<Tokens, String> {
        let parameters = [
            ("grant_type", "authorization_code"),
            ("code", code),
            ("redirect_uri", redirect_uri),
            ("code_verifier", &flow.verifier),
        ];
        let tokens = self.request(&parameters, Some(&flow.nonce)).await;
        tokens.map_err(|error| error.problem)
    }

    /// New tokens. `None` if the provider refuses, so that the viewer must sign in again.
    ///
    /// # Errors
    /// If the provider does not answer.
    pub(crate) async fn refresh(&self, refresh_token: &str) -> Result<Option<Tokens>, String> {
        let parameters = [("grant_type", "refresh_token"), ("refresh_token", refresh_token)];
        match self.request(&parameters, None).await {
            Ok(tokens) => Ok(Some(tokens)),
            Err(TokenRequestError { problem, is_refusal }) if is_refusal => {
                tracing::info!(problem, "a session is not renewed");
                Ok(None)
            }
            Err(error) => Err(error.problem),
        }
    }

    async fn request(
        &self,
        parameters: &[(&str, &str)],
        nonce: Option<&str>,
    ) -> Result<Tokens, TokenRequestError> {
        let config = &self.config;
        let unavailable = |problem| TokenRequestError {
            problem,
            is_refusal: false,
        };
        let metadata = self.metadata().await.map_err(unavailable)?;
        let secret = config.client_secret.as_ref().map(SecretSetting::read);
        let secret = secret
            .transpose()
            .map_err(|problem| unavailable(format!("{SECTION}.client_secret: {problem}")))?;
        let endpoint = TokenEndpoint {
            section: SECTION,
            key: "issuer",
            url: &metadata.token_endpoint,
            client_id: &config.client_id,
            client_secret: secret.as_ref(),
            client_auth: config.client_auth,
        };
        let sent = SystemClock.now();
        let granted = endpoint.request(&self.client, parameters.iter().copied()).await?;
        tokens(config, granted, nonce, sent).map_err(|problem| endpoint.unusable(&problem))
    }

    /// The metadata. While somebody reads them again, others get the old ones.
    async fn metadata(&self) -> Result<Arc<Metadata>, String> {
        let old = match self.cached() {
            Some(cached) if Instant::now() < cached.read_again => return cached.metadata,
            cached => cached.and_then(|cached| cached.metadata.ok()),
        };
        let _reading = match (self.reading.try_lock(), &old) {
            (Ok(reading), _) => reading,
            (Err(_), Some(old)) => return Ok(old.clone()),
            (Err(_), None) => self.reading.lock().await,
        };
        if let Some(cached) = self.cached()
            && Instant::now() < cached.read_again
        {
            return cached.metadata;
        }
        let (metadata, age) = match (self.fetch_metadata().await, old) {
            (Ok(metadata), _) => (Ok(Arc::new(metadata)), METADATA_AGE),
            (Err(problem), Some(old)) => {
                tracing::warn!(problem, "using the previous metadata of the provider");
                (Ok(old), RETRY)
            }
            (Err(problem), None) => (Err(problem), RETRY),
        };
        *self.metadata.lock().unwrap_or_else(PoisonError::into_inner) = Some(Cached {
            metadata: metadata.clone(),
            read_again: Instant::now() + age,
        });
        metadata
    }

    fn cached(&self) -> Option<Cached> {
        self.metadata
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    async fn fetch_metadata(&self) -> Result<Metadata, String> {
        let issuer = self.config.issuer.expose();
        let url = format!(
            "{}/.well-known/openid-configuration",
            issuer.trim_end_matches('/')
        );
        let failed = |problem| format!("{SECTION}.issuer: {url} {problem}");
        let response = self.client.get(&url).send().await.map_err(http_client::problem);
        let response = response.map_err(|problem| failed(format!("does not answer: {problem}")))?;
        if response.status() != StatusCode::OK {
            return Err(failed(format!("answered {}", response.status())));
        }
        let body = http_client::body(response, MAX_METADATA).await.map_err(failed)?;
        let metadata: Metadata = serde_json::from_slice(&body)
            .map_err(|_| failed("answered no metadata of an OpenID Connect provider".to_owned()))?;
        if metadata.issuer != issuer {
            let found = bounded_text(&metadata.issuer, 200);
            return Err(failed(format!("names another issuer: write {found}")));
        }
        for endpoint in [&metadata.authorization_endpoint, &metadata.token_endpoint] {
            checked(endpoint).map_err(|problem| failed(format!("has an endpoint that {problem}")))?;
        }
        Ok(metadata)
    }
}

fn checked(url: &str) -> Result<Url, String> {
    issuer_url(url, "codes and tokens are sent over this connection")
}

/// Checks what a provider has granted. `nonce` is that of a sign-in; a renewed ID token has none.
fn tokens(
    config: &SignInOidcConfig,
    granted: Granted,
    nonce: Option<&str>,
    sent: Timestamp,
) -> Result<Tokens, String> {
    let claims = match (&granted.id_token, nonce) {
        (Some(token), _) => Some(claims(config, token, nonce, sent)?),
        (None, Some(_)) => return Err("the response has no `id_token`".to_owned()),
        (None, None) => None,
    };
    let access_expiry = granted.expiry(sent);
    let (token, expires) = match (config.token, granted.id_token) {
        (SentToken::AccessToken, _) => (granted.access_token, access_expiry),
        (SentToken::IdToken, Some(token)) => {
            let expires = expiry_of_jwt(&token);
            (token, expires)
        }
        (SentToken::IdToken, None) => return Err("the response has no `id_token`".to_owned()),
    };
    let early = |expires: i64| RENEWAL.min((expires - sent.as_millis()) / 4);
    Ok(Tokens {
        token,
        renews: expires.map(|expires| expires - early(expires)),
        expires,
        subject: claims.as_ref().map(|claims| claims.sub.clone()),
        name: claims.map(|claims| claims.preferred_username.or(claims.email).unwrap_or(claims.sub)),
        refresh_token: granted.refresh_token,
    })
}

/// The claims of an ID token for this client.
fn claims(
    config: &SignInOidcConfig,
    token: &str,
    nonce: Option<&str>,
    now: Timestamp,
) -> Result<Claims, String> {
    let wrong = |problem: &str| format!("the ID token is not valid: {problem}");
    let claims: Claims = unverified_claims(token).map_err(wrong)?;
    let is_client = |text: &String| *text == config.client_id;
    let is_for_client = match &claims.aud {
        Audience::One(audience) => is_client(audience),
        Audience::Several(audiences) => audiences.iter().any(is_client),
    };
    if claims.iss != config.issuer.expose() {
        return Err(wrong("`iss` is another issuer"));
    }
    if !is_for_client || claims.azp.as_ref().is_some_and(|party| !is_client(party)) {
        return Err(wrong("`aud` or `azp` is another client"));
    }
    if expiry_of_jwt(token).is_none_or(|expiry| expiry + LEEWAY <= now.as_millis()) {
        return Err(wrong("it has expired; compare the clocks of issuer and console"));
    }
    if nonce.is_some() && claims.nonce.as_deref() != nonce {
        return Err(wrong("`nonce` is that of another sign-in"));
    }
    Ok(claims)
}
