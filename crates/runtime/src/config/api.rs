//! What every listener of an API has: where it listens, and the token that it asks for.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::problem::{ConfigError, Findings, Problem};
use super::secret::Secret;

/// A listener of an API, as a service's section describes it. The section itself has the three keys beside
/// its others, because each service has an address of its own by default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiConfig {
    /// Where it listens; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The file that holds the bearer token which every request must bring; without it none is asked for.
    pub token_file: Option<PathBuf>,
    /// Whether it may listen on more than the loopback interface without a token.
    pub allow_remote: bool,
}

impl ApiConfig {
    /// The token, read from its file. `section` names the configuration's section in an error.
    ///
    /// # Errors
    /// When the file cannot be read or holds what cannot be a token.
    pub fn token(&self, section: &str) -> Result<Option<Secret>, ConfigError> {
        self.read_token().map_err(|problem| {
            ConfigError::Invalid(vec![Problem {
                field: format!("{section}.token_file"),
                problem,
                place: None,
            }])
        })
    }

    fn read_token(&self) -> Result<Option<Secret>, String> {
        let Some(path) = &self.token_file else {
            return Ok(None);
        };
        let token = Secret::from_file(path)?;
        if !token.expose().bytes().all(|byte| byte.is_ascii_graphic()) {
            let path = path.display();
            return Err(format!(
                "the file {path} must hold one line of ASCII letters, digits and signs without spaces"
            ));
        }
        Ok(Some(token))
    }

    /// Reports under the keys `listen` and `token_file` of where `findings` stands.
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        if !self.listen.ip().is_loopback() && self.token_file.is_none() && !self.allow_remote {
            let problem = format!(
                "{} can be reached from other machines, and nothing asks for a token there: write 127.0.0.1, \
                 or give a token_file, or set allow_remote: true beside it",
                self.listen
            );
            findings.wrong("listen", problem);
        }
        if let Err(problem) = self.read_token() {
            findings.wrong("token_file", problem);
        }
    }
}
