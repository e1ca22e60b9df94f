//! The settings that the listeners of all APIs share: address, authentication and TLS.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use super::auth::AuthConfig;
use super::error::{ConfigError, Findings};
use super::secret::Secret;
use super::tls::ServerTlsConfig;
use crate::watched_files::read;

/// The listener of an API. Each service's section contains these keys directly, because the default address differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiConfig {
    /// The address to listen on. Port 0 selects a free port.
    pub listen: SocketAddr,
    /// The file with a bearer token that permits everything.
    pub token_file: Option<PathBuf>,
    /// Whether it may listen on other interfaces than loopback without authentication.
    pub allow_remote: bool,
    /// Certificates of the listener.
    pub tls: ServerTlsConfig,
    /// Callers with scopes.
    pub auth: AuthConfig,
}

impl ApiConfig {
    /// Reads the token from its file. Errors name the configuration section `section`.
    ///
    /// # Errors
    /// When the file cannot be read or does not contain a valid token.
    pub fn token(&self, section: &str) -> Result<Option<Secret>, ConfigError> {
        let token = self.read_token();
        token.map_err(|problem| ConfigError::of_field(format!("{section}.token_file"), problem))
    }

    fn read_token(&self) -> Result<Option<Secret>, String> {
        let Some(path) = &self.token_file else {
            return Ok(None);
        };
        token_in(&read(path)?, path).map(Some)
    }

    /// Whether other machines can read the tokens that clients send.
    #[must_use]
    pub fn exposes_token(&self) -> bool {
        self.accepts_tokens() && !self.tls.is_enabled() && !self.listen.ip().is_loopback()
    }

    /// Whether clients may send a token.
    #[must_use]
    pub fn accepts_tokens(&self) -> bool {
        self.token_file.is_some() || self.auth.accepts_tokens()
    }

    /// Whether clients must prove who they are.
    #[must_use]
    pub fn is_authenticated(&self) -> bool {
        self.accepts_tokens() || self.tls.requires_client_certificate()
    }

    /// Whether a client needs a certificate even if it sends a token. With `auth.client_certificates`, a client proves who
    /// it is in one of the two ways.
    #[must_use]
    pub fn requires_client_certificate(&self) -> bool {
        let is_alternative = self.accepts_tokens() && !self.auth.client_certificates.is_empty();
        self.tls.requires_client_certificate() && !is_alternative
    }

    /// Reports problems of `listen`, `token_file`, `tls` and `auth` in the current section of `findings`.
    pub fn check(&self, findings: &mut Findings<'_>) {
        let verifies_clients = self.tls.requires_client_certificate();
        if !self.listen.ip().is_loopback() && !self.is_authenticated() && !self.allow_remote {
            let problem = format!(
                "{} is reachable from other machines without authentication: listen on 127.0.0.1, set token_file, auth \
                 or tls.client_ca_file, or set allow_remote: true",
                self.listen
            );
            findings.report("listen", problem);
        }
        self.tls.check(findings);
        self.auth.check(verifies_clients, findings);
        if let Err(problem) = self.read_token() {
            findings.report("token_file", problem);
        }
    }
}

/// The token in the contents of a token file. `path` is for messages.
///
/// # Errors
/// What is wrong, with the path.
pub fn token_in(bytes: &[u8], path: &Path) -> Result<Secret, String> {
    let path = path.display();
    let token = bytes.trim_ascii_end();
    if token.is_empty() {
        return Err(format!("the file {path} is empty"));
    }
    match std::str::from_utf8(token) {
        Ok(text) if token.iter().all(u8::is_ascii_graphic) => Ok(Secret::new(text)),
        _ => Err(format!(
            "the file {path} must contain one line of printable ASCII characters without spaces"
        )),
    }
}
