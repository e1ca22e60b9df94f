//! The token endpoint of an OAuth 2.0 issuer (RFC 6749).

use std::error::Error;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use redeliver_core::Timestamp;
use redeliver_core::failure::bounded_text;
use redeliver_core::json::Scalar;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use reqwest::{Client, StatusCode};
use serde::Deserialize;
use serde_json::value::RawValue;
use url::form_urlencoded::{Serializer, byte_serialize};

use crate::config::{ClientAuth, Secret, redact_url};
use crate::http_client;

/// A token has a few kilobytes.
const MAX_RESPONSE_BYTES: usize = 256 << 10;

/// The endpoint, and the client that requests tokens.
#[derive(Clone, Copy, Debug)]
pub struct TokenEndpoint<'a> {
    /// The section of the configuration, for messages.
    pub section: &'static str,
    /// Its key that leads to the endpoint.
    pub key: &'static str,
    /// The address.
    pub url: &'a str,
    /// The id of the client.
    pub client_id: &'a str,
    /// `None` for a public client.
    pub client_secret: Option<&'a Secret>,
    /// How id and secret are sent.
    pub client_auth: ClientAuth,
}

/// Why there is no token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct TokenRequestError {
    /// The field of the configuration, and what is wrong. Contains no secret.
    pub problem: String,
    /// Whether the same request fails again.
    pub is_refusal: bool,
}

/// A successful response (RFC 6749, section 5.1).
#[derive(Deserialize)]
pub struct Granted {
    /// The token.
    pub access_token: String,
    /// The token about the user, if the scope `openid` was granted.
    pub id_token: Option<String>,
    /// What a later request for tokens is made with.
    pub refresh_token: Option<String>,
    /// Seconds. Some issuers send it as a text.
    #[serde(default)]
    expires_in: Option<Box<RawValue>>,
}

impl Granted {
    /// When the access token expires, in milliseconds, for a request that was sent at `sent`. `None` if nothing says it.
    #[must_use]
    pub fn expiry(&self, sent: Timestamp) -> Option<i64> {
        match self.expires_in.as_deref().and_then(seconds) {
            Some(lifetime) => Some(sent.after(lifetime).as_millis()),
            None => expiry_of_jwt(&self.access_token),
        }
    }
}

impl TokenEndpoint<'_> {
    /// Requests tokens with these parameters, among them `grant_type`.
    ///
    /// # Errors
    /// If the endpoint does not answer, refuses, or its answer has no token.
    pub async fn request<'p>(
        &self,
        client: &Client,
        parameters: impl IntoIterator<Item = (&'p str, &'p str)>,
    ) -> Result<Granted, TokenRequestError> {
        let mut request = client
            .post(self.url)
            .header(ACCEPT, "application/json")
            .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
            .body(self.body(parameters));
        if let (ClientAuth::Basic, Some(secret)) = (self.client_auth, self.client_secret) {
            request = request.header(AUTHORIZATION, self.basic(secret)?);
        }
        let response = request.send().await.map_err(|error| TokenRequestError {
            problem: format!("{} does not answer: {}", self.address(), cause(&error)),
            // The certificate of the issuer will not become trusted by itself.
            is_refusal: is_tls(&error),
        })?;
        let status = response.status();
        let body = http_client::body(response, MAX_RESPONSE_BYTES).await;
        let body = body.map_err(|problem| TokenRequestError {
            problem: format!(
                "{} answered {status}, but the response is incomplete: {problem}",
                self.address()
            ),
            is_refusal: false,
        })?;
        if status != StatusCode::OK {
            return Err(self.refusal(status, &body));
        }
        self.granted(&body)
    }

    fn granted(&self, body: &[u8]) -> Result<Granted, TokenRequestError> {
        serde_json::from_slice(body)
            .map_err(|_| self.unusable("the response is not JSON with `access_token`"))
    }

    /// The error for an answer that cannot be used.
    #[must_use]
    pub fn unusable(&self, problem: &str) -> TokenRequestError {
        TokenRequestError {
            problem: format!("{} answered 200 OK, but {problem}", self.address()),
            is_refusal: true,
        }
    }

    fn address(&self) -> String {
        format!("{}.{}: {}", self.section, self.key, redact_url(self.url))
    }

    fn body<'p>(&self, parameters: impl IntoIterator<Item = (&'p str, &'p str)>) -> String {
        let mut form = Serializer::new(String::new());
        form.extend_pairs(parameters);
        match self.client_secret {
            Some(_) if self.client_auth == ClientAuth::Basic => {}
            secret => {
                form.append_pair("client_id", self.client_id);
                form.extend_pairs(secret.map(|secret| ("client_secret", secret.expose())));
            }
        }
        form.finish()
    }

    /// The header for id and secret, which are form-encoded first (RFC 6749, section 2.3.1).
    fn basic(&self, secret: &Secret) -> Result<HeaderValue, TokenRequestError> {
        let encoded = |text: &str| byte_serialize(text.as_bytes()).collect::<String>();
        let pair = format!("{}:{}", encoded(self.client_id), encoded(secret.expose()));
        let value = HeaderValue::from_str(&format!("Basic {}", STANDARD.encode(pair)));
        let mut value = value.map_err(|_| TokenRequestError {
            problem: format!("{}.client_secret: cannot be sent", self.section),
            is_refusal: true,
        })?;
        value.set_sensitive(true);
        Ok(value)
    }

    fn refusal(&self, status: StatusCode, body: &[u8]) -> TokenRequestError {
        let is_refusal = !(status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS);
        // The body may be a page of a proxy, so only the known fields are shown.
        let Ok(Refusal {
            error,
            error_description,
        }) = serde_json::from_slice(body)
        else {
            let problem = format!("{} answered {status}", self.address());
            return TokenRequestError { problem, is_refusal };
        };
        let field = match error.as_str() {
            "invalid_client" | "unauthorized_client" => "client_id and client_secret",
            "invalid_scope" => "scope",
            "invalid_target" => "parameters",
            _ => self.key,
        };
        let description = error_description.map(|text| format!(" ({})", bounded_text(&text, 300)));
        let problem = format!(
            "{}: check {field}: {} answered {status}: {}{}",
            self.section,
            redact_url(self.url),
            bounded_text(&error, 100),
            description.unwrap_or_default()
        );
        TokenRequestError { problem, is_refusal }
    }
}

/// A refusal in the format of RFC 6749, section 5.2.
#[derive(Deserialize)]
struct Refusal {
    error: String,
    error_description: Option<String>,
}

fn seconds(value: &RawValue) -> Option<Duration> {
    let text = match Scalar::of(value)? {
        Scalar::Bool(_) => return None,
        scalar => scalar.into_text(),
    };
    let seconds = std::str::from_utf8(&text).ok()?.trim().parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// The claims of a JWT, without a check of its signature.
///
/// # Errors
/// If it is not a JWT with these claims.
pub fn unverified_claims<T: for<'de> Deserialize<'de>>(token: &str) -> Result<T, &'static str> {
    let claims = token.split('.').nth(1).ok_or("it has no dot")?;
    let claims = URL_SAFE_NO_PAD.decode(claims.trim_end_matches('='));
    let claims = claims.map_err(|_| "its claims are not Base64")?;
    serde_json::from_slice(&claims).map_err(|_| "its claims are missing or have other types")
}

#[derive(Deserialize)]
struct Expiry {
    exp: f64,
}

/// The claim `exp` of a JWT in milliseconds. Who gets the token checks the signature, not the client.
#[must_use]
pub fn expiry_of_jwt(token: &str) -> Option<i64> {
    let Expiry { exp } = unverified_claims(token).ok()?;
    let since = Duration::try_from_secs_f64(exp).ok()?;
    i64::try_from(since.as_millis()).ok()
}

/// The innermost cause. The errors around it repeat the URL with its query, which may contain secrets.
fn cause(error: &reqwest::Error) -> String {
    let innermost = causes(error).last().map(ToString::to_string);
    bounded_text(&innermost.unwrap_or_else(|| "unknown cause".to_owned()), 200)
}

fn is_tls(error: &reqwest::Error) -> bool {
    causes(error).any(<dyn Error>::is::<rustls::Error>)
}

/// The causes of an error, outermost first, without the error itself.
fn causes(error: &reqwest::Error) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(error.source(), |error| cause_of(*error))
}

/// Also returns the error inside an [`std::io::Error`], which [`Error::source`] skips.
fn cause_of<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
    match error
        .downcast_ref::<std::io::Error>()
        .and_then(std::io::Error::get_ref)
    {
        Some(inner) => Some(inner),
        None => error.source(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(client_auth: ClientAuth, client_secret: Option<&Secret>) -> TokenEndpoint<'_> {
        TokenEndpoint {
            section: "kafka.login.oidc",
            key: "token_url",
            url: "https://issuer/token",
            client_id: "a:b",
            client_secret,
            client_auth,
        }
    }

    #[test]
    fn id_and_secret_are_encoded() {
        let secret = Secret::new("p w&");
        let value = endpoint(ClientAuth::Basic, Some(&secret)).basic(&secret).unwrap();
        let encoded = value.to_str().unwrap().strip_prefix("Basic ").unwrap();
        assert_eq!(STANDARD.decode(encoded).unwrap(), b"a%3Ab:p+w%26");
        assert!(value.is_sensitive());
    }

    #[test]
    fn body_has_secret_when_configured() {
        let secret = Secret::new("p w&");
        let body = |client_auth, secret| endpoint(client_auth, secret).body([("scope", "x y")]);
        assert_eq!(body(ClientAuth::Basic, Some(&secret)), "scope=x+y");
        let expected = "scope=x+y&client_id=a%3Ab&client_secret=p+w%26";
        assert_eq!(body(ClientAuth::Body, Some(&secret)), expected);
        assert_eq!(body(ClientAuth::Basic, None), "scope=x+y&client_id=a%3Ab");
        let parameters = [
            ("grant_type", "client_credentials"),
            ("scope", "x y"),
            ("audience", "k&1"),
        ];
        let body = endpoint(ClientAuth::Basic, Some(&secret)).body(parameters);
        assert_eq!(body, "grant_type=client_credentials&scope=x+y&audience=k%261");
    }

    #[test]
    fn answers_without_token_are_refused() {
        let endpoint = endpoint(ClientAuth::Basic, None);
        assert!(endpoint.granted(br#"{"access_token":"t"}"#).is_ok());
        for body in ["", r#"{"token":"t"}"#] {
            let error = endpoint.granted(body.as_bytes()).map(drop).unwrap_err();
            let expected = "kafka.login.oidc.token_url: https://issuer/token answered 200 OK, but the response is not JSON with \
                            `access_token`";
            assert_eq!(
                (error.problem.as_str(), error.is_refusal),
                (expected, true),
                "{body}"
            );
        }
    }

    #[test]
    fn token_expiry_is_read() {
        let expiry = |body: &str| {
            let granted: Granted = serde_json::from_str(body).unwrap();
            granted.expiry(Timestamp::from_millis(1_000_000))
        };
        assert_eq!(expiry(r#"{"access_token":"t","expires_in":60}"#), Some(1_060_000));
        assert_eq!(
            expiry(r#"{"access_token":"t","expires_in":"60"}"#),
            Some(1_060_000)
        );
        let claims = URL_SAFE_NO_PAD.encode(r#"{"sub":"x","exp":2000}"#);
        assert_eq!(
            expiry(&format!(r#"{{"access_token":"h.{claims}.s"}}"#)),
            Some(2_000_000)
        );
        assert_eq!(expiry(r#"{"access_token":"t"}"#), None);
        assert_eq!(expiry(r#"{"access_token":"t","expires_in":-1}"#), None);
    }

    #[test]
    fn refusal_names_the_settings() {
        let endpoint = endpoint(ClientAuth::Basic, None);
        let wrong = endpoint.refusal(
            StatusCode::UNAUTHORIZED,
            br#"{"error":"invalid_client","error_description":"Invalid credentials"}"#,
        );
        let expected = "kafka.login.oidc: check client_id and client_secret: https://issuer/token answered 401 \
                        Unauthorized: invalid_client (Invalid credentials)";
        assert_eq!((wrong.problem.as_str(), wrong.is_refusal), (expected, true));
        let page = endpoint.refusal(StatusCode::BAD_GATEWAY, b"<html>upstream at 10.0.0.1</html>");
        let expected = "kafka.login.oidc.token_url: https://issuer/token answered 502 Bad Gateway";
        assert_eq!((page.problem.as_str(), page.is_refusal), (expected, false));
    }
}
