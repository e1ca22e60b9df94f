//! An OpenID Connect provider with one user and one client, the console. Its sign-in page has one button. It grants tokens for codes with PKCE,
//! and renews them.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use bytes::Bytes;
use redeliver_core::{Clock as _, SystemClock};
use ring::digest::{SHA256, digest};
use serde_json::json;
use url::form_urlencoded::{self, Serializer};

use crate::fake_endpoint::{FakeEndpoint, Reply, Request};
use crate::jwt::{Issuer, jwks};

/// The audience of access tokens.
pub const AUDIENCE: &str = "redeliver";
/// The code of a sign-in that has begun. It is granted tokens once.
pub const CODE: &str = "c1";

/// The provider; see the module.
pub struct OidcProvider {
    /// The server, which a test can make to answer something else.
    pub endpoint: FakeEndpoint,
    state: Arc<Mutex<ProviderState>>,
}

/// What a test can change, and learn.
pub struct ProviderState {
    url: String,
    /// The key that signs tokens.
    pub key: Issuer,
    /// Claims of the next ID tokens that differ from valid ones.
    pub wrong: BTreeMap<&'static str, String>,
    /// How long the next tokens are valid, in seconds.
    pub lifetime: i64,
    /// How often tokens were granted.
    pub issued: u32,
    /// Whether refresh tokens are accepted, each once.
    pub refreshes: bool,
    /// The scopes of the next access tokens, which are JWTs then. `None`: they are `access-1` and so on.
    pub scopes: Option<&'static str>,
    begun: Option<Begun>,
    nonce: String,
}

/// A sign-in to which the user has agreed.
struct Begun {
    challenge: String,
    redirect_uri: String,
}

type Parameters = HashMap<String, String>;

impl OidcProvider {
    /// Starts a provider.
    ///
    /// # Errors
    /// If no key can be made.
    pub fn start() -> Result<Self> {
        let endpoint = FakeEndpoint::start(|_| Reply::status(404));
        let state = Arc::new(Mutex::new(ProviderState {
            url: endpoint.url(),
            key: Issuer::new("key")?,
            wrong: BTreeMap::new(),
            lifetime: 3_600,
            issued: 0,
            refreshes: true,
            scopes: None,
            begun: None,
            nonce: String::new(),
        }));
        let answering = state.clone();
        endpoint.behave(move |request| lock(&answering).reply(request));
        Ok(Self { endpoint, state })
    }

    /// Its state, until the guard is dropped: meanwhile, it does not answer.
    pub fn state(&self) -> MutexGuard<'_, ProviderState> {
        lock(&self.state)
    }

    /// The issuer.
    #[must_use]
    pub fn url(&self) -> String {
        self.endpoint.url()
    }

    /// What the section of the console has for it, and `more` keys of its `oidc`, each after a comma.
    #[must_use]
    pub fn settings(&self, more: &str) -> String {
        format!(
            "  sign_in: oidc\n  oidc: {{ issuer: '{}', client_id: console, client_secret: hunter2, \
             scope: openid offline_access, parameters: {{ audience: {AUDIENCE} }}{more} }}\n",
            self.url()
        )
    }

    /// Does what the button of the sign-in page does at this address, and returns where it leads.
    #[must_use]
    pub fn agree(&self, address: &str) -> String {
        let (_, query) = address.split_once('?').unwrap_or((address, ""));
        self.state().agree(query)
    }
}

fn lock(state: &Mutex<ProviderState>) -> MutexGuard<'_, ProviderState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn parameters(encoded: &[u8]) -> Parameters {
    form_urlencoded::parse(encoded).into_owned().collect()
}

/// The value of a parameter; empty without it.
fn value<'p>(sent: &'p Parameters, name: &str) -> &'p str {
    sent.get(name).map_or("", String::as_str)
}

fn redirect(location: String) -> Reply {
    Reply::Status(303, vec![("location".to_owned(), location)], Bytes::new())
}

fn refusal(error: &str) -> Reply {
    Reply::Status(400, Vec::new(), json!({ "error": error }).to_string().into())
}

impl ProviderState {
    fn reply(&mut self, request: &Request) -> Reply {
        let url = &self.url;
        let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
        match (request.method.as_str(), path) {
            ("GET", "/.well-known/openid-configuration") => Reply::ok(
                json!({
                    "issuer": url,
                    "authorization_endpoint": format!("{url}/authorize?tenant=1"),
                    "token_endpoint": format!("{url}/token"),
                    "end_session_endpoint": format!("{url}/logout"),
                    "jwks_uri": format!("{url}/keys"),
                })
                .to_string(),
            ),
            ("GET", "/keys") => Reply::ok(jwks(&[&self.key])),
            ("GET", "/authorize") => {
                let headers = vec![("content-type".to_owned(), "text/html".to_owned())];
                let page = "<!doctype html><html lang=\"en\"><title>Provider</title>\
                            <form method=\"post\"><button>Sign in as Ada</button></form>";
                Reply::Status(200, headers, page.into())
            }
            ("POST", "/authorize") => redirect(self.agree(query)),
            ("GET", "/logout") => {
                redirect(value(&parameters(query.as_bytes()), "post_logout_redirect_uri").to_owned())
            }
            ("POST", "/token") => self.grant(request),
            _ => Reply::status(404),
        }
    }

    fn agree(&mut self, query: &str) -> String {
        let sent = parameters(query.as_bytes());
        let sent = |name: &str| value(&sent, name).to_owned();
        let redirect_uri = sent("redirect_uri");
        let answer = Serializer::new(String::new())
            .append_pair("code", CODE)
            .append_pair("state", &sent("state"))
            .finish();
        let location = format!("{redirect_uri}?{answer}");
        self.nonce = sent("nonce");
        self.begun = Some(Begun {
            challenge: sent("code_challenge"),
            redirect_uri,
        });
        location
    }

    fn grant(&mut self, request: &Request) -> Reply {
        let sent = parameters(&request.body);
        let sent = |name: &str| value(&sent, name);
        let expected = format!("Basic {}", STANDARD.encode("console:hunter2"));
        let authorization = request.headers.get("authorization");
        let is_client = authorization.is_some_and(|sent| *sent == *expected);
        let is_granted = match sent("grant_type") {
            "authorization_code" => self.begun.take().is_some_and(|begun| {
                let challenge = digest(&SHA256, sent("code_verifier").as_bytes());
                sent("code") == CODE
                    && sent("redirect_uri") == begun.redirect_uri
                    && URL_SAFE_NO_PAD.encode(challenge) == begun.challenge
            }),
            "refresh_token" => self.refreshes && sent("refresh_token") == format!("refresh-{}", self.issued),
            _ => false,
        };
        if !is_client || !is_granted {
            return refusal("invalid_grant");
        }
        self.issued += 1;
        let tokens = self.tokens();
        tokens.map_or_else(|error| refusal(&error.to_string()), Reply::ok)
    }

    fn tokens(&self) -> Result<String> {
        let Self {
            url,
            lifetime,
            issued,
            ..
        } = self;
        let expires = SystemClock.now().as_millis() / 1_000 + lifetime;
        let mut claims = json!({
            "iss": url, "aud": "console", "sub": "u1", "exp": expires, "nonce": self.nonce,
            "preferred_username": "Ada <ada@example>",
        });
        for (name, value) in &self.wrong {
            claims[*name] = value
                .parse()
                .map_or_else(|_| json!(value), |number: i64| json!(number));
        }
        let mut access_token = format!("access-{issued}");
        if let Some(scopes) = self.scopes {
            let claims = json!({
                "iss": url, "aud": AUDIENCE, "sub": "u1", "exp": expires, "jti": access_token, "scope": scopes,
            });
            access_token = self.key.sign(&claims)?;
        }
        let granted = json!({
            "access_token": access_token, "token_type": "Bearer", "expires_in": lifetime,
            "id_token": self.key.sign(&claims)?, "refresh_token": format!("refresh-{issued}"),
        });
        Ok(granted.to_string())
    }
}
