//! The section of the configuration that only the console reads.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use axum::http::uri::Authority;
use redeliver_core::HumanDuration;
use redeliver_runtime::Config;
use redeliver_runtime::config::{
    ClientAuth, Findings, OwnSections, SecretSetting, ServerTlsConfig, Settings, Url, endpoint_url,
    is_loopback, issuer_url, listen_address,
};
use serde::{Deserialize, Serialize};

/// The section of the console.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sections {
    /// The console.
    pub console: ConsoleConfig,
}

impl OwnSections for Sections {
    fn check(&self, _: &Config, findings: &mut Findings<'_>) {
        findings.inside("console", |at| self.console.check(at));
    }
}

/// `console`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConsoleConfig {
    /// The address of the pages.
    #[serde(with = "listen_address")]
    pub listen: SocketAddr,
    /// Whether it may listen on other interfaces than loopback without TLS, or without sign-in.
    pub allow_remote: bool,
    /// The host names under which browsers reach it, besides those of this machine.
    pub hosts: Vec<String>,
    /// Certificates of the listener.
    pub tls: ServerTlsConfig,
    /// How the inspector is called.
    pub inspector: BackendConfig,
    /// How the scheduler is called.
    pub scheduler: BackendConfig,
    /// How viewers prove who they are.
    pub sign_in: SignIn,
    /// The issuer, for `sign_in: oidc`.
    pub oidc: Option<SignInOidcConfig>,
    /// The file with the keys of cookies, one a line. The first one encrypts. `None`: a random key of this process.
    pub cookie_keys_file: Option<PathBuf>,
    /// How long a viewer stays signed in at most.
    pub session: HumanDuration,
}

/// `console.inspector` and `console.scheduler`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackendConfig {
    /// `http://host:port`, or `https://host:port` with TLS.
    pub url: String,
    /// Additional CA certificates (PEM) for TLS.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
    /// The client certificate, followed by intermediate certificates.
    #[serde(default)]
    pub cert_file: Option<PathBuf>,
    /// The private key of the client certificate.
    #[serde(default)]
    pub key_file: Option<PathBuf>,
    /// Whether the tokens of viewers are sent to another machine without TLS.
    #[serde(default)]
    pub allow_plaintext_token: bool,
}

/// `console.sign_in`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SignIn {
    /// They do not. The services are called without a token.
    #[default]
    None,
    /// By a token of the services, which they enter.
    Token,
    /// At an OpenID Connect provider.
    Oidc,
}

/// `console.oidc`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SignInOidcConfig {
    /// The issuer, whose metadata are at `/.well-known/openid-configuration` below it: https, or http on loopback.
    pub issuer: Url,
    /// The id of the client.
    pub client_id: String,
    /// The secret of the client. `None` for a public client.
    #[serde(default)]
    pub client_secret: Option<SecretSetting>,
    /// How id and secret are sent.
    #[serde(default)]
    pub client_auth: ClientAuth,
    /// The requested scopes, separated by spaces.
    #[serde(default = "scope")]
    pub scope: String,
    /// Further parameters of the authorization request, such as `audience`.
    #[serde(default)]
    pub parameters: Settings,
    /// Which token the services get.
    #[serde(default)]
    pub token: SentToken,
    /// Additional CA certificates (PEM) for the connection to the issuer.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
}

/// `console.oidc.token`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SentToken {
    /// The access token.
    #[default]
    AccessToken,
    /// The ID token.
    IdToken,
}

fn scope() -> String {
    "openid".to_owned()
}

/// Parameters of the authorization request that the console sets itself.
const OWN_PARAMETERS: [&str; 8] = [
    "client_id",
    "code_challenge",
    "code_challenge_method",
    "nonce",
    "redirect_uri",
    "response_type",
    "scope",
    "state",
];

impl Default for ConsoleConfig {
    fn default() -> Self {
        Self {
            listen: (Ipv4Addr::LOCALHOST, 8_484).into(),
            allow_remote: false,
            hosts: Vec::new(),
            tls: ServerTlsConfig::default(),
            inspector: BackendConfig::new("http://127.0.0.1:50051"),
            scheduler: BackendConfig::new("http://127.0.0.1:50052"),
            sign_in: SignIn::None,
            oidc: None,
            cookie_keys_file: None,
            session: HumanDuration::from_secs(12 * 3_600),
        }
    }
}

impl ConsoleConfig {
    /// Reports what is out of range or contradictory.
    pub fn check(&self, findings: &mut Findings<'_>) {
        let identifies = self.sign_in != SignIn::None || self.tls.requires_client_certificate();
        let lacks = match (self.tls.is_enabled(), identifies) {
            _ if self.listen.ip().is_loopback() || self.allow_remote => None,
            (_, false) => Some("without sign-in: set sign_in"),
            (false, true) => Some("without TLS, so that others can read tokens and cookies: set tls"),
            (true, true) => None,
        };
        if let Some(lacks) = lacks {
            let problem = format!(
                "{} is reachable from other machines {lacks}, listen on 127.0.0.1, or set allow_remote: true",
                self.listen
            );
            findings.report("listen", problem);
        }
        for host in &self.hosts {
            let is_host = Authority::try_from(host.as_str()).is_ok_and(|authority| authority.host() == host);
            if !is_host {
                let problem = format!(
                    "`{host}` is not a host name: write it without scheme and port, such as console.example.com"
                );
                findings.report("hosts", problem);
            }
        }
        self.tls.check(findings);
        findings.inside("inspector", |at| self.inspector.check(self.sign_in, at));
        findings.inside("scheduler", |at| self.scheduler.check(self.sign_in, at));
        match (&self.oidc, self.sign_in) {
            (None, SignIn::Oidc) => findings.report("oidc", "is missing; sign_in: oidc needs its issuer"),
            (Some(oidc), SignIn::Oidc) => findings.inside("oidc", |at| oidc.check(at)),
            (Some(_), SignIn::None | SignIn::Token) => {
                findings.report(
                    "oidc",
                    "has no effect without sign_in: oidc; set it, or remove this",
                );
            }
            (None, SignIn::None | SignIn::Token) => {}
        }
        if self.cookie_keys_file.is_some() && self.sign_in == SignIn::None {
            findings.report(
                "cookie_keys_file",
                "has no effect with sign_in: none; set sign_in, or remove this",
            );
        }
        findings.seconds("session", self.session, 60..=31 * 86_400);
    }
}

impl BackendConfig {
    fn new(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            ca_file: None,
            cert_file: None,
            key_file: None,
            allow_plaintext_token: false,
        }
    }

    fn check(&self, sign_in: SignIn, findings: &mut Findings<'_>) {
        match endpoint_url(&self.url) {
            Err(problem) => findings.report("url", problem),
            Ok(url) => {
                let is_plain = url.scheme() == "http";
                let sends_token = sign_in != SignIn::None && !self.allow_plaintext_token;
                if is_plain && sends_token && !is_loopback(&url) {
                    let problem = "would send the tokens of viewers to another machine without TLS: write https://, or set \
                                   allow_plaintext_token: true";
                    findings.report("url", problem);
                }
                if is_plain && (self.ca_file.is_some() || self.cert_file.is_some()) {
                    findings.report(
                        "url",
                        "must begin with https://, because ca_file or cert_file is set",
                    );
                }
            }
        }
        match (&self.cert_file, &self.key_file) {
            (Some(_), None) => findings.report("cert_file", "requires key_file"),
            (None, Some(_)) => findings.report("key_file", "requires cert_file"),
            _ => {}
        }
    }
}

impl SignInOidcConfig {
    fn check(&self, findings: &mut Findings<'_>) {
        let because = "codes and tokens are sent over this connection";
        if let Err(problem) = issuer_url(self.issuer.expose(), because) {
            findings.report("issuer", problem);
        }
        if self.client_id.is_empty() {
            findings.report("client_id", "is empty");
        }
        if !self.scope.split(' ').any(|scope| scope == "openid") {
            findings.report("scope", "must contain openid");
        }
        findings.inside("parameters", |at| {
            for (name, _) in self.parameters.iter() {
                if OWN_PARAMETERS.contains(&name) {
                    at.report(name, "is set by Redeliver and cannot be configured");
                }
            }
        });
    }
}
