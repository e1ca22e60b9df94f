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
    /// Tokens that are signed with AWS credentials, for Amazon MSK.
    pub msk_iam: Option<MskIamConfig>,
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

/// `kafka.login.msk_iam`: IAM access control of Amazon MSK. A token is a request that is signed with AWS credentials.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MskIamConfig {
    /// The region of the cluster, such as `eu-central-1`; see [`MskIamConfig::region`].
    pub region: Option<String>,
    /// The profile in AWS's shared files whose credentials are used, instead of the default chain.
    pub profile: Option<String>,
    /// The role that is assumed with these credentials.
    pub role_arn: Option<String>,
    /// The name of the sessions of the assumed role, which AWS CloudTrail shows.
    pub role_session_name: String,
    /// The external id that the trust policy of the assumed role requires.
    pub external_id: Option<String>,
}

impl Default for MskIamConfig {
    fn default() -> Self {
        Self {
            region: None,
            profile: None,
            role_arn: None,
            role_session_name: "redeliver".to_owned(),
            external_id: None,
        }
    }
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
    pub(super) fn check(&self, brokers: &str, findings: &mut Findings<'_>) {
        match (&self.oidc, &self.msk_iam) {
            (None, None) => findings.report(
                "oidc",
                "is missing, and so is msk_iam; kafka.login needs one of them to know where tokens come from",
            ),
            (Some(oidc), None) => findings.inside("oidc", |at| oidc.check(at)),
            (None, Some(msk_iam)) => findings.inside("msk_iam", |at| msk_iam.check(brokers, at)),
            (Some(_), Some(_)) => findings.report(
                "msk_iam",
                "cannot be set together with kafka.login.oidc; remove one of them",
            ),
        }
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

impl MskIamConfig {
    /// The region of the cluster, if it is configured or part of the names of `brokers`. Otherwise, the region of AWS's
    /// environment is used.
    #[must_use]
    pub fn region<'a>(&'a self, brokers: &'a str) -> Option<&'a str> {
        self.region.as_deref().or_else(|| region_of(brokers))
    }

    fn check(&self, brokers: &str, findings: &mut Findings<'_>) {
        if let Some(region) = &self.region {
            if !is_region(region) {
                findings.report("region", "is not the name of an AWS region, such as eu-central-1");
            } else if let Some(other) = region_of(brokers).filter(|other| other != region) {
                findings.report(
                    "region",
                    format!("is {region}, but kafka.brokers are in {other}; correct or omit it"),
                );
            }
        }
        if self.profile.as_deref() == Some("") {
            findings.report("profile", "is empty; omit it to use AWS's default credentials");
        }
        match &self.role_arn {
            Some(role) if !is_role(role) => findings.report(
                "role_arn",
                "is not the ARN of a role, such as arn:aws:iam::123456789012:role/redeliver",
            ),
            None if self.external_id.is_some() => {
                findings.report(
                    "external_id",
                    "needs kafka.login.msk_iam.role_arn, the role that is assumed",
                );
            }
            _ => {}
        }
        let name = &self.role_session_name;
        if !(2..=64).contains(&name.len()) || !name.bytes().all(is_session_character) {
            findings.report(
                "role_session_name",
                "must have 2 to 64 of the characters a-z, A-Z, 0-9, `_`, `+`, `=`, `,`, `.`, `@` and `-`",
            );
        }
    }
}

fn is_region(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    text.len() <= 64 && text.contains('-') && text.bytes().all(is_allowed)
}

fn is_role(text: &str) -> bool {
    text.starts_with("arn:") && text.contains(":iam::") && text.contains(":role/") && !text.contains(' ')
}

fn is_session_character(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_+=,.@-".contains(&byte)
}

/// The region in the name of a broker of Amazon MSK, such as
/// `b-1.main.abcdef.c2.kafka.eu-central-1.amazonaws.com:9098`.
fn region_of(brokers: &str) -> Option<&str> {
    brokers.split(',').find_map(|broker| {
        let (host, _port) = broker.trim().rsplit_once(':')?;
        let host = host.strip_suffix(".cn").unwrap_or(host);
        let (host, region) = host.strip_suffix(".amazonaws.com")?.rsplit_once('.')?;
        let (_, service) = host.rsplit_once('.')?;
        (service == "kafka" || service == "kafka-serverless").then_some(region)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broker_name_contains_region() {
        for (brokers, region) in [
            (
                "b-1.main.abcdef.c2.kafka.eu-central-1.amazonaws.com:9098",
                Some("eu-central-1"),
            ),
            (
                "localhost:9092, boot-x1.c1.kafka-serverless.us-east-1.amazonaws.com:9098",
                Some("us-east-1"),
            ),
            (
                "b-1.main.abcdef.c2.kafka.cn-north-1.amazonaws.com.cn:9098",
                Some("cn-north-1"),
            ),
            ("kafka.example.com:9098", None),
            ("s3.eu-central-1.amazonaws.com:443", None),
            ("amazonaws.com:9098", None),
        ] {
            assert_eq!(MskIamConfig::default().region(brokers), region, "{brokers}");
        }
        let config = MskIamConfig {
            region: Some("eu-west-1".to_owned()),
            ..MskIamConfig::default()
        };
        assert_eq!(config.region("localhost:9092"), Some("eu-west-1"));
    }
}
