//! `dlq_inspector.webhook`: who is told about problems.

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use redeliver_core::HumanDuration;
use redeliver_runtime::config::{Findings, Secret, Url, endpoint_url};
use serde::{Deserialize, Serialize};

/// A receiver of [Standard Webhooks](https://www.standardwebhooks.com).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WebhookConfig {
    /// The URL to which problems are sent.
    pub url: Url,
    /// The file with the secrets that sign them, one per line: `whsec_` and 24 to 64 bytes in base64. It is read for each request.
    pub secret_file: PathBuf,
    /// Additional CA certificates (PEM) for https.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
    /// How long a circuit breaker is open before it is sent.
    #[serde(default = "breaker_after")]
    pub breaker_after: HumanDuration,
}

fn breaker_after() -> HumanDuration {
    HumanDuration::from_secs(300)
}

impl WebhookConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        if let Err(problem) = endpoint_url(self.url.expose()) {
            findings.report("url", problem);
        }
        if let Err(problem) = secrets(&self.secret_file) {
            findings.report("secret_file", problem);
        }
    }
}

/// The secrets in a file.
///
/// # Errors
/// What is wrong with it, without a part of it.
pub(crate) fn secrets(file: &Path) -> Result<Vec<Vec<u8>>, String> {
    let text = Secret::from_file(file)?;
    let lines = text.expose().lines().map(|line| {
        let key = line
            .strip_prefix("whsec_")
            .and_then(|key| STANDARD.decode(key).ok());
        key.filter(|key| (24..=64).contains(&key.len())).ok_or_else(|| {
            let file = file.display();
            format!("each line of {file} must be a secret: whsec_ and 24 to 64 bytes in base64")
        })
    });
    lines.collect()
}
