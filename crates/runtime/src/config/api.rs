//! The settings that the listeners of all APIs share: address, bearer token and TLS.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::error::{ConfigError, Findings};
use super::secret::Secret;
use super::tls::ServerTlsConfig;

/// The listener of an API. Each service's section contains these keys directly, because the default address differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiConfig {
    /// The address to listen on. Port 0 selects a free port.
    pub listen: SocketAddr,
    /// The file with the bearer token that every request must contain. `None`: no authentication.
    pub token_file: Option<PathBuf>,
    /// Whether it may listen on other interfaces than loopback without a token or client certificates.
    pub allow_remote: bool,
    /// Certificates of the listener.
    pub tls: ServerTlsConfig,
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
        let token = Secret::from_file(path)?;
        if !token.expose().bytes().all(|byte| byte.is_ascii_graphic()) {
            let path = path.display();
            return Err(format!(
                "the file {path} must contain one line of printable ASCII characters without spaces"
            ));
        }
        Ok(Some(token))
    }

    /// Whether other machines can read the tokens that clients send.
    #[must_use]
    pub fn exposes_token(&self) -> bool {
        self.token_file.is_some() && !self.tls.is_enabled() && !self.listen.ip().is_loopback()
    }

    /// Reports problems of `listen`, `token_file` and `tls` in the current section of `findings`.
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        let is_authenticated = self.token_file.is_some() || self.tls.requires_client_certificate();
        if !self.listen.ip().is_loopback() && !is_authenticated && !self.allow_remote {
            let problem = format!(
                "{} is reachable from other machines without authentication: listen on 127.0.0.1, set token_file or \
                 tls.client_ca_file, or set allow_remote: true",
                self.listen
            );
            findings.report("listen", problem);
        }
        self.tls.check(findings);
        if let Err(problem) = self.read_token() {
            findings.report("token_file", problem);
        }
    }
}
