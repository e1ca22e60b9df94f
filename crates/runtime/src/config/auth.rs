//! `auth` of an API: who may call it, and what for.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::error::Findings;
use super::http_request::issuer_url;
use super::scope::{Scope, check_scopes};
use super::secret::Url;
use super::tokens::{MAX_CALLER_NAME, TokensFile, caller_name};

/// `auth` of an API: the ways in which callers prove who they are, besides `token_file`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AuthConfig {
    /// The file with the SHA-256 hashes of tokens and their scopes; see [`TokensFile`]. Changes take effect within seconds.
    pub tokens_file: Option<PathBuf>,
    /// The scopes of clients that present a certificate. The first entry that matches applies.
    pub client_certificates: Vec<ClientCertificateConfig>,
    /// Tokens of an issuer such as Keycloak, Entra ID or Kubernetes.
    pub jwt: Option<JwtConfig>,
}

/// `auth.client_certificates`: exactly one of `cn`, `dns` and `uri`, in which `*` matches any text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientCertificateConfig {
    /// The common name of the subject.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cn: Option<String>,
    /// A DNS name among the alternative names of the subject.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns: Option<String>,
    /// A URI among the alternative names of the subject, such as a SPIFFE id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uri: Option<String>,
    /// What these clients may do.
    pub scopes: Vec<Scope>,
}

/// `auth.jwt`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JwtConfig {
    /// The claim `iss` of accepted tokens.
    pub issuer: String,
    /// The claim `aud` of accepted tokens, or one of its values.
    pub audience: String,
    /// The file with the issuer's public keys (JWKS). Changes take effect within seconds.
    #[serde(default)]
    pub jwks_file: Option<PathBuf>,
    /// The URL of the issuer's public keys (JWKS).
    #[serde(default)]
    pub jwks_url: Option<Url>,
    /// Additional CA certificates for `jwks_url`.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
    /// The claim with the name of the caller, which is recorded with the issuer.
    #[serde(default = "defaults::name_claim")]
    pub name_claim: String,
    /// The claim with the scopes: a text of words separated by spaces, or a list. A name, or a JSON pointer such as
    /// `/realm_access/roles`.
    #[serde(default = "defaults::scopes_claim")]
    pub scopes_claim: String,
    /// The scopes of values of that claim that are not scopes themselves, such as the roles of the issuer.
    #[serde(default)]
    pub roles: BTreeMap<String, Vec<Scope>>,
}

impl AuthConfig {
    /// Whether callers have scopes of their own. Without, every caller has all of them.
    #[must_use]
    pub fn has_scopes(&self) -> bool {
        self.accepts_tokens() || !self.client_certificates.is_empty()
    }

    /// Whether callers that present no client certificate can prove who they are.
    #[must_use]
    pub fn accepts_tokens(&self) -> bool {
        self.tokens_file.is_some() || self.jwt.is_some()
    }

    /// Reports problems in the current section of `findings`. `verifies_clients`: whether the listener verifies the
    /// certificates of clients.
    pub(super) fn check(&self, verifies_clients: bool, findings: &mut Findings<'_>) {
        findings.inside("auth", |at| {
            if let Some(path) = &self.tokens_file
                && let Err(problem) = TokensFile::read(path)
            {
                at.report("tokens_file", problem);
            }
            if !self.client_certificates.is_empty() && !verifies_clients {
                at.report(
                    "client_certificates",
                    "requires tls.client_ca_file of the same section",
                );
            }
            for (index, entry) in self.client_certificates.iter().enumerate() {
                if let Err(problem) = entry.check() {
                    at.report("client_certificates", format!("entry {}: {problem}", index + 1));
                }
            }
            if let Some(jwt) = &self.jwt {
                at.inside("jwt", |at| jwt.check(at));
            }
        });
    }
}

impl ClientCertificateConfig {
    fn check(&self) -> Result<(), String> {
        let names: Vec<&String> = [&self.cn, &self.dns, &self.uri].into_iter().flatten().collect();
        match names[..] {
            [name] if name.is_empty() => Err("the pattern is empty; write * for any name".to_owned()),
            [_] => check_scopes(&self.scopes),
            _ => Err("set exactly one of cn, dns and uri".to_owned()),
        }
    }
}

impl JwtConfig {
    fn check(&self, findings: &mut Findings<'_>) {
        for (key, value) in [
            ("issuer", &self.issuer),
            ("audience", &self.audience),
            ("name_claim", &self.name_claim),
            ("scopes_claim", &self.scopes_claim),
        ] {
            if value.is_empty() {
                findings.report(key, "is empty");
            }
        }
        // The issuer is a part of the names of callers, up to the first `#`.
        let is_usable = caller_name(&self.issuer).is_ok() && !self.issuer.contains('#');
        if !self.issuer.is_empty() && !is_usable {
            let problem = format!(
                "must have at most {MAX_CALLER_NAME} bytes, no `#`, and no control or invisible characters"
            );
            findings.report("issuer", problem);
        }
        match (&self.jwks_file, &self.jwks_url) {
            (None, None) => findings.report("jwks_url", "is missing; set it, or jwks_file"),
            (Some(_), Some(_)) => findings.report(
                "jwks_url",
                "cannot be combined with jwks_file; set one of the two",
            ),
            (Some(path), None) => {
                if let Err(error) = std::fs::metadata(path) {
                    findings.report("jwks_file", format!("cannot read {}: {error}", path.display()));
                }
                if self.ca_file.is_some() {
                    findings.report("ca_file", "requires jwks_url");
                }
            }
            (None, Some(url)) => {
                if let Err(problem) =
                    issuer_url(url.expose(), "an attacker who replaces the keys can issue tokens")
                {
                    findings.report("jwks_url", problem);
                }
            }
        }
        findings.inside("roles", |at| {
            for (role, scopes) in &self.roles {
                if let Err(problem) = check_scopes(scopes) {
                    at.report(role, problem);
                }
            }
        });
    }
}

mod defaults {
    pub(super) fn name_claim() -> String {
        "sub".to_owned()
    }

    pub(super) fn scopes_claim() -> String {
        "scope".to_owned()
    }
}
