//! Who calls an API, and what the caller may do. All APIs use this module, so that one configuration, one set of errors
//! and one metric describe them.
//!
//! An [`Authenticator`] turns the bearer token or the client certificate of a request into an [`Identity`] with scopes.
//! The operation then requires what it needs of the identity, at the place where the application or the topic is known.
//! Both can end in a [`Refusal`]. No refusal contains a token.
//!
//! A caller proves who it is in one of these ways. A bearer token takes precedence over a certificate.
//!
//! | module | way |
//! |---|---|
//! | `tokens` | a token whose SHA-256 is in `auth.tokens_file`, or the token of `token_file`, which permits everything |
//! | `jwt` | a signed token of an issuer, whose keys (`jwks`) are in a file or at a URL |
//! | `certificates` | a client certificate with a name of `auth.client_certificates` |
//!
//! Without any of them, callers are anonymous and may do everything. If the listener verifies client
//! certificates and this is the only setting, each client with a certificate may do everything.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use prometheus_client::metrics::gauge::Gauge;
use redeliver_runtime::config::{ApiConfig, Area, ConfigError, Scope, Verb};
use redeliver_runtime::watched_files::{self, ConfiguredFile, WatchedFiles};
use rustls::pki_types::CertificateDer;
use tokio_util::sync::CancellationToken;

mod access;
mod audit;
mod certificates;
pub mod grpc;
mod jwks;
mod jwt;
mod layer;
mod name;
mod refusal;
mod tokens;

pub use access::{Access, Permissions, Withdrawn};
pub use audit::RefusalMetrics;
pub use layer::{Authentication, authenticate};
pub use name::CallerName;
pub use refusal::{Reason, Refusal};
pub use tokens::{NewToken, new_token};

use audit::Audit;
use certificates::Certificates;
use jwt::Jwt;
use tokens::Tokens;

use crate::host::Host;

/// The maximum size of a bearer token in bytes. Larger ones are not even hashed.
const MAX_TOKEN: usize = 16 << 10;

/// A caller and what it may do. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Identity {
    name: CallerName,
    scopes: Arc<[Scope]>,
}

impl Identity {
    fn new(name: CallerName, scopes: impl Into<Arc<[Scope]>>) -> Self {
        Self {
            name,
            scopes: scopes.into(),
        }
    }

    fn with_full_access(name: CallerName) -> Self {
        Self::new(name, [Scope::everything()])
    }

    /// Who it is.
    #[must_use]
    pub fn name(&self) -> &CallerName {
        &self.name
    }

    /// Whether the caller may do this with the application or topic `name`; `None` means with all of them.
    #[must_use]
    pub fn may(&self, area: Area, verb: Verb, name: Option<&str>) -> bool {
        self.scopes.iter().any(|scope| scope.permits(area, verb, name))
    }

    /// Whether the caller may do this with any application or topic.
    #[must_use]
    pub fn may_some(&self, area: Area, verb: Verb) -> bool {
        self.scopes.iter().any(|scope| scope.is_about(area, verb))
    }

    /// Requires that the caller may do this with any application or topic.
    ///
    /// # Errors
    /// A refusal that names the missing scope.
    pub fn require_some(&self, area: Area, verb: Verb) -> Result<(), Refusal> {
        if self.may_some(area, verb) {
            return Ok(());
        }
        Err(Refusal::denied(self, area, verb, None))
    }

    /// Requires that the caller may do this with the application or topic `name`; `None` means with all of them.
    ///
    /// # Errors
    /// A refusal that names the missing scope.
    pub fn require(&self, area: Area, verb: Verb, name: Option<&str>) -> Result<(), Refusal> {
        if self.may(area, verb, name) {
            return Ok(());
        }
        Err(Refusal::denied(self, area, verb, name))
    }
}

/// Decides who calls. Cloning is cheap.
#[derive(Clone)]
pub struct Authenticator(Arc<Inner>);

struct Inner {
    tokens: Option<Tokens>,
    jwt: Option<Jwt>,
    certificates: Certificates,
    audit: Audit,
}

impl fmt::Debug for Authenticator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Authenticator(<redacted>)")
    }
}

impl Authenticator {
    /// The authenticator of the API that the section `section` configures. Adds a task to the host that follows the files
    /// and URLs of the configuration.
    ///
    /// # Errors
    /// When a file cannot be used. The error names the field.
    pub fn start(host: &mut Host, section: &str, config: &ApiConfig) -> Result<Self, ConfigError> {
        let stale = host.stale_credentials.clone();
        let metrics = host.metric_families(|registry| RefusalMetrics::register(registry, stale));
        let authenticator = Self::new(section, config, metrics)?;
        let shutdown = host.tasks.shutdown().clone();
        host.tasks.spawn_background(
            format!("{section}-credentials"),
            authenticator.clone().follow(shutdown),
        );
        Ok(authenticator)
    }

    /// Checks the files of a configuration.
    ///
    /// # Errors
    /// When a file cannot be used. The error names the field.
    pub fn check(section: &str, config: &ApiConfig) -> Result<(), ConfigError> {
        Self::new(section, config, RefusalMetrics::default()).map(drop)
    }

    fn new(section: &str, config: &ApiConfig, metrics: RefusalMetrics) -> Result<Self, ConfigError> {
        let section = Section {
            name: section,
            metrics: &metrics,
        };
        Ok(Self(Arc::new(Inner {
            tokens: Tokens::load(config, &section)?,
            jwt: match &config.auth.jwt {
                Some(jwt) => Some(Jwt::new(jwt, &section)?),
                None => None,
            },
            certificates: Certificates::new(&config.auth.client_certificates),
            audit: Audit::new(metrics),
        })))
    }

    /// Who sent a request with this header `authorization` over a connection with these verified certificates.
    ///
    /// # Errors
    /// Why the request is refused.
    pub async fn authenticate(
        &self,
        authorization: Option<&[u8]>,
        certificates: &[CertificateDer<'_>],
    ) -> Result<Identity, Refusal> {
        let Inner {
            tokens,
            jwt,
            certificates: entries,
            ..
        } = &*self.0;
        let takes_tokens = tokens.is_some() || jwt.is_some();
        match (authorization, certificates.first()) {
            (Some(given), _) if takes_tokens => self.of_token(given).await,
            (_, Some(leaf)) if !entries.is_empty() => entries.identify(leaf),
            (_, None) if !entries.is_empty() && !takes_tokens => Err(Refusal::of(
                Reason::CertificateMissing,
                "a client certificate is required",
            )),
            _ if takes_tokens => Err(Refusal::of(
                Reason::TokenMissing,
                "a token is required: send `authorization: Bearer <token>`",
            )),
            (_, Some(leaf)) => Ok(Identity::with_full_access(certificates::name(leaf)?)),
            (_, None) => Ok(Identity::with_full_access(CallerName::anonymous())),
        }
    }

    async fn of_token(&self, authorization: &[u8]) -> Result<Identity, Refusal> {
        let Some(token) = bearer(authorization) else {
            return Err(Refusal::of(
                Reason::TokenMalformed,
                "the header `authorization` is not `Bearer <token>`",
            ));
        };
        if let Some(identity) = self.0.tokens.as_ref().and_then(|tokens| tokens.identify(token)) {
            return Ok(identity);
        }
        match &self.0.jwt {
            Some(jwt) if jwt::looks_like_one(token) => jwt.identify(token).await,
            _ => Err(Refusal::of(
                Reason::TokenWrong,
                "the token is wrong, or it was revoked; send `authorization: Bearer <token>`",
            )),
        }
    }

    /// Counts a refused request and writes it to the log. `operation` is the name of the call.
    pub fn refused(&self, refusal: &Refusal, operation: &str) {
        self.0.audit.refused(refusal, operation);
    }

    /// Follows the files and the URL until shutdown.
    async fn follow(self, shutdown: CancellationToken) -> Result<(), io::Error> {
        let fetches = async {
            if let Some(jwt) = &self.0.jwt {
                jwt.fetch_keys().await;
            }
        };
        let files = self.clone();
        let checks = watched_files::follow(move || files.check_files());
        tokio::select! {
            ((), checked) = async { tokio::join!(fetches, checks) } => checked,
            () = shutdown.cancelled() => Ok(()),
        }
    }

    fn check_files(&self) {
        if let Some(tokens) = &self.0.tokens {
            tokens.check_files();
        }
        if let Some(jwt) = &self.0.jwt {
            jwt.check_file();
        }
    }
}

/// The token of a header `authorization: Bearer <token>`.
fn bearer(authorization: &[u8]) -> Option<&[u8]> {
    const SCHEME: &str = "bearer";
    let (scheme, rest) = authorization.split_at_checked(SCHEME.len())?;
    let token = rest.strip_prefix(b" ")?;
    (scheme.eq_ignore_ascii_case(SCHEME.as_bytes()) && token.len() <= MAX_TOKEN).then_some(token)
}

/// The section of the configuration that the credentials belong to.
struct Section<'a> {
    name: &'a str,
    metrics: &'a RefusalMetrics,
}

impl Section<'_> {
    fn field(&self, field: &str) -> String {
        format!("{}.{field}", self.name)
    }

    /// An error of a field of this section.
    fn error(&self, field: &str, problem: String) -> ConfigError {
        ConfigError::of_field(self.field(field), problem)
    }

    /// The gauge that says whether changed contents of a field cannot be used.
    fn stale(&self, field: &str) -> Gauge {
        self.metrics.stale(self.field(field))
    }

    /// The file that a field of this section names.
    fn file<T: 'static>(
        &self,
        field: &str,
        path: &Path,
        parse: fn(&[u8], &Path) -> Result<T, String>,
    ) -> Result<WatchedFiles<T>, ConfigError> {
        let file = ConfiguredFile {
            field: self.field(field),
            path: PathBuf::from(path),
        };
        let file = WatchedFiles::load(vec![file], move |files| {
            parse(files[0].bytes, files[0].path()).map_err(|problem| files[0].problem(problem))
        })?;
        file.observe(self.stale(field));
        Ok(file)
    }
}

#[cfg(test)]
mod tests;
