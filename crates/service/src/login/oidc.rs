//! Requests tokens for client credentials (RFC 6749, section 4.4).

use std::error::Error;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use redeliver_core::failure::bounded_text;
use redeliver_core::json::Scalar;
use redeliver_core::{Clock as _, SystemClock, Timestamp};
use redeliver_kafka::{Token, TokenError, TokenSource};
use redeliver_runtime::config::{ClientAuth, OidcConfig, Secret};
use redeliver_runtime::tls;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use reqwest::{Client, Response, StatusCode, redirect};
use serde::Deserialize;
use serde_json::value::RawValue;
use url::form_urlencoded::{Serializer, byte_serialize};

use super::{refused, unavailable};

/// Maximum duration of a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// A token has a few kilobytes.
const MAX_RESPONSE_BYTES: usize = 256 << 10;

/// Requests tokens from an issuer.
pub(super) struct Oidc {
    config: OidcConfig,
}

impl Oidc {
    pub(super) fn new(config: OidcConfig) -> Self {
        Self { config }
    }
}

impl TokenSource for Oidc {
    fn request(&mut self) -> Result<Token, TokenError> {
        // Requests are rare, so nothing is kept between them. So a new secret and new CA certificates are used at once.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| unavailable(format!("cannot send requests: {error}")))?;
        runtime.block_on(request(&self.config))
    }
}

async fn request(config: &OidcConfig) -> Result<Token, TokenError> {
    let secret = config.client_secret.read();
    let secret = secret.map_err(|problem| refused(format!("kafka.login.oidc.client_secret: {problem}")))?;
    let mut request = client(config)?
        .post(config.token_url.expose())
        .header(ACCEPT, "application/json")
        .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
        .body(body(config, &secret));
    if config.client_auth == ClientAuth::Basic {
        request = request.header(AUTHORIZATION, basic(&config.client_id, &secret)?);
    }
    let sent = SystemClock.now();
    let url = &config.token_url;
    let response = request.send().await.map_err(|error| {
        let problem = format!(
            "kafka.login.oidc.token_url: {url} does not answer: {}",
            cause(&error)
        );
        // The certificate of the issuer will not become trusted by itself.
        if is_tls(&error) {
            refused(problem)
        } else {
            unavailable(problem)
        }
    })?;
    let status = response.status();
    let body = read(response).await.map_err(|problem| {
        unavailable(format!(
            "kafka.login.oidc.token_url: {url} answered {status}, but {problem}"
        ))
    })?;
    if status != StatusCode::OK {
        return Err(refusal(config, status, &body));
    }
    token(config, &body, sent).map_err(|problem| {
        refused(format!(
            "kafka.login.oidc.token_url: {url} answered {status}, but {problem}"
        ))
    })
}

fn client(config: &OidcConfig) -> Result<Client, TokenError> {
    let tls = tls(config).map_err(|problem| refused(format!("kafka.login.oidc.ca_file: {problem}")))?;
    Client::builder()
        .tls_backend_preconfigured(tls)
        .timeout(TIMEOUT)
        // A redirect would send the secret elsewhere.
        .redirect(redirect::Policy::none())
        .no_proxy()
        .user_agent(concat!("redeliver/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|error| {
            unavailable(format!(
                "cannot set up the connection to the issuer: {}",
                cause(&error)
            ))
        })
}

fn tls(config: &OidcConfig) -> Result<rustls::ClientConfig, String> {
    let roots = tls::trusted_roots(config.ca_file.as_deref())?;
    let mut tls = tls::client_builder()
        .map_err(|error| format!("cannot set up TLS: {error}"))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(tls)
}

fn body(config: &OidcConfig, secret: &Secret) -> String {
    let mut form = Serializer::new(String::new());
    form.append_pair("grant_type", "client_credentials");
    if let Some(scope) = &config.scope {
        form.append_pair("scope", scope);
    }
    if config.client_auth == ClientAuth::Body {
        form.append_pair("client_id", &config.client_id);
        form.append_pair("client_secret", secret.expose());
    }
    form.extend_pairs(config.parameters.iter());
    form.finish()
}

/// The header for id and secret, which are form-encoded first (RFC 6749, section 2.3.1).
fn basic(id: &str, secret: &Secret) -> Result<HeaderValue, TokenError> {
    let encoded = |text: &str| byte_serialize(text.as_bytes()).collect::<String>();
    let pair = format!("{}:{}", encoded(id), encoded(secret.expose()));
    let mut value = HeaderValue::from_str(&format!("Basic {}", STANDARD.encode(pair)))
        .map_err(|_| refused("kafka.login.oidc.client_secret: cannot be sent".to_owned()))?;
    value.set_sensitive(true);
    Ok(value)
}

/// The body of a response, up to a limit.
async fn read(mut response: Response) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) if body.len() + chunk.len() > MAX_RESPONSE_BYTES => {
                return Err(format!("the response is longer than {MAX_RESPONSE_BYTES} bytes"));
            }
            Ok(Some(chunk)) => body.extend_from_slice(&chunk),
            Ok(None) => return Ok(body),
            Err(error) => return Err(format!("the response is incomplete: {}", cause(&error))),
        }
    }
}

/// A refusal in the format of RFC 6749, section 5.2.
#[derive(Deserialize)]
struct Refusal {
    error: String,
    error_description: Option<String>,
}

fn refusal(config: &OidcConfig, status: StatusCode, body: &[u8]) -> TokenError {
    let url = &config.token_url;
    // The body may be a page of a proxy, so only the known fields are shown.
    let Ok(Refusal {
        error,
        error_description,
    }) = serde_json::from_slice(body)
    else {
        let problem = format!("kafka.login.oidc.token_url: {url} answered {status}");
        let may_pass = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
        return if may_pass {
            unavailable(problem)
        } else {
            refused(problem)
        };
    };
    let field = match error.as_str() {
        "invalid_client" | "unauthorized_client" => "client_id and client_secret",
        "invalid_scope" => "scope",
        "invalid_target" => "parameters",
        _ => "token_url",
    };
    let description = error_description.map(|text| format!(" ({})", bounded_text(&text, 300)));
    let problem = format!(
        "kafka.login.oidc: check {field}: {url} answered {status}: {}{}",
        bounded_text(&error, 100),
        description.unwrap_or_default()
    );
    if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
        unavailable(problem)
    } else {
        refused(problem)
    }
}

/// A successful response (RFC 6749, section 5.1).
#[derive(Deserialize)]
struct Granted {
    access_token: String,
    /// Seconds. Some issuers send it as a text.
    #[serde(default)]
    expires_in: Option<Box<RawValue>>,
}

#[derive(Deserialize)]
struct Claims {
    exp: f64,
}

/// The token of a response to a request that was sent at `sent`.
fn token(config: &OidcConfig, body: &[u8], sent: Timestamp) -> Result<Token, String> {
    let granted: Granted = serde_json::from_slice(body)
        .map_err(|_| "the response is not JSON with `access_token`".to_owned())?;
    let lifetime = granted.expires_in.as_deref().and_then(seconds);
    let expires = match lifetime {
        Some(lifetime) => sent.after(lifetime).as_millis(),
        None => expiry_of_jwt(&granted.access_token)
            .ok_or("the response has no `expires_in`, and the token no claim `exp`")?,
    };
    if expires <= sent.as_millis() {
        return Err("the token has expired already; compare the clocks of issuer and client".to_owned());
    }
    let extensions = config
        .extensions
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_str()));
    Token::new(&granted.access_token, &config.client_id, extensions, expires)
        .map_err(|error| error.to_string())
}

fn seconds(value: &RawValue) -> Option<Duration> {
    let text = match Scalar::of(value)? {
        Scalar::Bool(_) => return None,
        scalar => scalar.into_text(),
    };
    let seconds = std::str::from_utf8(&text).ok()?.trim().parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// The claim `exp` of a JWT in milliseconds. The broker checks the signature, not the client.
fn expiry_of_jwt(token: &str) -> Option<i64> {
    let claims = token.split('.').nth(1)?;
    let claims = URL_SAFE_NO_PAD.decode(claims.trim_end_matches('=')).ok()?;
    let Claims { exp } = serde_json::from_slice(&claims).ok()?;
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

    fn config(extra: &str) -> OidcConfig {
        let text = format!(
            "kafka: {{ login: {{ oidc: {{ token_url: 'https://issuer/token', client_id: 'a:b', client_secret: 'p w&', {extra} }} }} }}"
        );
        let config = redeliver_runtime::Config::from_yaml(&text).unwrap();
        config.kafka.login.unwrap().oidc.unwrap()
    }

    #[test]
    fn id_and_secret_are_encoded() {
        let value = basic("a:b", &Secret::new("p w&")).unwrap();
        let encoded = value.to_str().unwrap().strip_prefix("Basic ").unwrap();
        assert_eq!(STANDARD.decode(encoded).unwrap(), b"a%3Ab:p+w%26");
        assert!(value.is_sensitive());
    }

    #[test]
    fn body_has_secret_when_configured() {
        let basic = config("scope: 'x y', parameters: { audience: kafka }");
        let secret = Secret::new("p w&");
        let common = "grant_type=client_credentials&scope=x+y";
        assert_eq!(body(&basic, &secret), format!("{common}&audience=kafka"));
        let in_body = config("scope: 'x y', client_auth: body");
        let expected = format!("{common}&client_id=a%3Ab&client_secret=p+w%26");
        assert_eq!(body(&in_body, &secret), expected);
    }

    #[test]
    fn token_expiry_is_read() {
        let sent = Timestamp::from_millis(1_000_000);
        let expiry = |body: &str| token(&config(""), body.as_bytes(), sent).map(|token| token.expires_at());
        assert_eq!(expiry(r#"{"access_token":"t","expires_in":60}"#), Ok(1_060_000));
        assert_eq!(expiry(r#"{"access_token":"t","expires_in":"60"}"#), Ok(1_060_000));
        let claims = URL_SAFE_NO_PAD.encode(r#"{"sub":"x","exp":2000}"#);
        assert_eq!(
            expiry(&format!(r#"{{"access_token":"h.{claims}.s"}}"#)),
            Ok(2_000_000)
        );
        for (body, problem) in [
            ("", "not JSON with `access_token`"),
            (r#"{"token":"t"}"#, "not JSON with `access_token`"),
            (r#"{"access_token":"t"}"#, "no `expires_in`"),
            (r#"{"access_token":"t","expires_in":-1}"#, "no `expires_in`"),
            (r#"{"access_token":"t","expires_in":0}"#, "expired already"),
            (r#"{"access_token":"t t","expires_in":9}"#, "printable ASCII"),
        ] {
            let error = expiry(body).unwrap_err();
            assert!(error.contains(problem), "{body}: {error}");
        }
    }

    #[test]
    fn refusal_names_the_settings() {
        let shown = |status, body: &str| refusal(&config(""), status, body.as_bytes());
        let wrong = shown(
            StatusCode::UNAUTHORIZED,
            r#"{"error":"invalid_client","error_description":"Invalid credentials"}"#,
        );
        let expected = "kafka.login.oidc: check client_id and client_secret: https://issuer/token answered 401 \
                        Unauthorized: invalid_client (Invalid credentials)";
        assert_eq!(wrong, refused(expected.to_owned()));
        let page = shown(StatusCode::BAD_GATEWAY, "<html>upstream at 10.0.0.1</html>");
        let expected = "kafka.login.oidc.token_url: https://issuer/token answered 502 Bad Gateway";
        assert_eq!(page, unavailable(expected.to_owned()));
    }
}
