//! `kafka.login`: tokens with which Kafka clients log in (SASL/OAUTHBEARER).

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::error::Findings;
use super::http_request::issuer_url;
use super::secret::{SecretSetting, Settings, Url};

/// `kafka.login`. Exactly one of its keys is set.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoginConfig {
    /// Tokens of an OpenID Connect provider.
    pub oidc: Option<OidcConfig>,
}

/// `kafka.login.oidc`: tokens by client credentials (RFC 6749, section 4.4).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OidcConfig {
    /// The token endpoint of the issuer: https, or http on loopback.
    pub token_url: Url,
    /// The id of the client.
    pub client_id: String,
    /// The secret of the client. A file is read again for each token, so that the secret can be rotated.
    pub client_secret: SecretSetting,
    /// How id and secret are sent.
    #[serde(default)]
    pub client_auth: ClientAuth,
    /// The requested scopes, separated by spaces.
    #[serde(default)]
    pub scope: Option<String>,
    /// Further parameters of the token request, such as `audience`.
    #[serde(default)]
    pub parameters: Settings,
    /// SASL extensions that are sent to the broker together with the token.
    #[serde(default)]
    pub extensions: BTreeMap<String, String>,
    /// Additional CA certificates (PEM) for the connection to the issuer.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
}

/// How a client authenticates to the issuer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClientAuth {
    /// By the header `Authorization: Basic`.
    #[default]
    Basic,
    /// By `client_id` and `client_secret` in the body.
    Body,
}

/// Parameters of a token request that have their own setting.
const OWN_PARAMETERS: [(&str, &str); 4] = [
    ("grant_type", "is always client_credentials"),
    ("scope", "set kafka.login.oidc.scope instead"),
    ("client_id", "set kafka.login.oidc.client_id instead"),
    ("client_secret", "set kafka.login.oidc.client_secret instead"),
];

impl LoginConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        let Some(oidc) = &self.oidc else {
            findings.report(
                "oidc",
                "is missing; kafka.login needs it to know where tokens come from",
            );
            return;
        };
        findings.inside("oidc", |at| oidc.check(at));
    }

    /// Reports properties of the Kafka client that contradict a login by tokens, in the section `kafka.properties`.
    pub(super) fn check_properties(properties: &Settings, findings: &mut Findings<'_>) {
        for (name, value) in properties.iter() {
            let contradicts = match name {
                "security.protocol" => {
                    if !["sasl_ssl", "sasl_plaintext"].contains(&value.to_lowercase().as_str()) {
                        findings.report(
                            name,
                            "must be SASL_SSL or SASL_PLAINTEXT, or be omitted, with kafka.login",
                        );
                    }
                    false
                }
                "enable.sasl.oauthbearer.unsecure.jwt" => true,
                // Re-authentication and the like are not affected.
                _ => name.starts_with("sasl."),
            };
            if contradicts {
                findings.report(
                    name,
                    "cannot be set together with kafka.login, which logs in by itself",
                );
            }
        }
    }
}

impl OidcConfig {
    fn check(&self, findings: &mut Findings<'_>) {
        let because = "the client secret and the tokens are sent over this connection";
        if let Err(problem) = issuer_url(self.token_url.expose(), because) {
            findings.report("token_url", problem);
        }
        if self.client_id.is_empty() {
            findings.report("client_id", "is empty");
        }
        findings.inside("parameters", |at| {
            for (name, _) in self.parameters.iter() {
                if let Some((_, advice)) = OWN_PARAMETERS.iter().find(|(own, _)| *own == name) {
                    at.report(name, format!("cannot be set here: {advice}"));
                }
            }
        });
        findings.inside("extensions", |at| {
            for (name, value) in &self.extensions {
                if name.is_empty() || name == "auth" || !name.bytes().all(|byte| byte.is_ascii_alphabetic()) {
                    at.report(
                        name,
                        "is not the name of a SASL extension: use the letters a-z and A-Z, and not `auth`",
                    );
                }
                if !value.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ') {
                    at.report(name, "must consist of printable ASCII characters");
                }
            }
        });
    }
}
