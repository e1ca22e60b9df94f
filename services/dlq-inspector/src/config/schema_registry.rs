//! `dlq_inspector.schema_registry`: where the schemas of values are.

use std::path::PathBuf;

use redeliver_runtime::config::{Findings, Secret, Url, endpoint_url, issuer_url};
use serde::{Deserialize, Serialize};

/// A registry with the API of Confluent's schema registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SchemaRegistryConfig {
    /// Its URL.
    pub url: Url,
    /// The user name for basic authentication; requires `password_file`.
    #[serde(default)]
    pub username: Option<String>,
    /// The file with the password. It is read for each request.
    #[serde(default)]
    pub password_file: Option<PathBuf>,
    /// The file with a bearer token. It is read for each request.
    #[serde(default)]
    pub token_file: Option<PathBuf>,
    /// Additional CA certificates (PEM) for https.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
}

impl SchemaRegistryConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        let has_credentials = self.username.is_some() || self.token_file.is_some();
        let url = if has_credentials {
            issuer_url(self.url.expose(), "credentials are sent there")
        } else {
            endpoint_url(self.url.expose())
        };
        if let Err(problem) = url {
            findings.report("url", problem);
        }
        if self.username.is_some() != self.password_file.is_some() {
            findings.report("password_file", "username and password_file need each other");
        }
        if self.username.is_some() && self.token_file.is_some() {
            findings.report("token_file", "cannot be combined with username");
        }
        for (key, file) in [
            ("password_file", &self.password_file),
            ("token_file", &self.token_file),
        ] {
            if let Some(path) = file
                && let Err(problem) = Secret::from_file(path)
            {
                findings.report(key, problem);
            }
        }
    }
}
