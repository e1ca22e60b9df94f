//! Requests tokens for client credentials (RFC 6749, section 4.4).

use std::time::Duration;

use redeliver_core::{Clock as _, SystemClock, Timestamp};
use redeliver_kafka::{Token, TokenError, TokenSource};
use redeliver_runtime::config::OidcConfig;
use redeliver_runtime::tls;
use redeliver_runtime::token_endpoint::{Granted, TokenEndpoint, TokenRequestError};
use reqwest::{Client, redirect};

use super::{refused, unavailable};

/// Maximum duration of a request.
const TIMEOUT: Duration = Duration::from_secs(10);

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
    let endpoint = TokenEndpoint {
        section: "kafka.login.oidc",
        key: "token_url",
        url: config.token_url.expose(),
        client_id: &config.client_id,
        client_secret: Some(&secret),
        client_auth: config.client_auth,
    };
    let failed = |error: TokenRequestError| TokenError {
        problem: error.problem,
        is_refusal: error.is_refusal,
    };
    let sent = SystemClock.now();
    let scope = config.scope.as_deref().map(|scope| ("scope", scope));
    let parameters = [("grant_type", "client_credentials")].into_iter().chain(scope);
    let parameters = parameters.chain(config.parameters.iter());
    let granted = endpoint
        .request(&client(config)?, parameters)
        .await
        .map_err(failed)?;
    token(config, &granted, sent).map_err(|problem| failed(endpoint.unusable(&problem)))
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
        .map_err(|error| unavailable(format!("cannot set up the connection to the issuer: {error}")))
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

/// The token of a response to a request that was sent at `sent`.
fn token(config: &OidcConfig, granted: &Granted, sent: Timestamp) -> Result<Token, String> {
    let expires = granted
        .expiry(sent)
        .ok_or("the response has no `expires_in`, and the token no claim `exp`")?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unusable_tokens_are_refused() {
        let text = "kafka: { login: { oidc: { token_url: 'https://issuer/token', client_id: a, client_secret: b } } }";
        let config = redeliver_runtime::Config::from_yaml(text).unwrap();
        let config = config.kafka.login.unwrap().oidc.unwrap();
        for (body, problem) in [
            (r#"{"access_token":"t"}"#, "no `expires_in`"),
            (r#"{"access_token":"t","expires_in":0}"#, "expired already"),
            (r#"{"access_token":"t t","expires_in":9}"#, "printable ASCII"),
        ] {
            let granted = serde_json::from_str(body).unwrap();
            let error = token(&config, &granted, Timestamp::from_millis(1_000_000)).unwrap_err();
            assert!(error.contains(problem), "{body}: {error}");
        }
    }
}
