//! The TLS configuration of a listener, which follows its files.
//!
//! The contents of the files are compared, not their times: Kubernetes replaces a Secret by changing a symbolic link to the
//! directory of its files. A certificate and its key cannot be read at the same instant, so files that do not fit together
//! are reported only if they are still the same at the next check.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use redeliver_core::{Clock as _, SystemClock, Timestamp};
use rustls::pki_types::CertificateDer;
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::{add_roots, certificates_in, private_key_in, provider, read};
use crate::config::{ConfigError, ServerTlsConfig};

/// Maximum time from the start of a connection to the end of its handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The protocols that a listener offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocols {
    /// HTTP/2 and HTTP/1.1.
    Http,
    /// HTTP/2 only.
    Grpc,
}

/// What a listener with CA certificates for clients does with a client that presents no certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientCertificates {
    /// The handshake fails.
    Required,
    /// The handshake succeeds. Requests tell the difference by
    /// [`PeerCertificates`](crate::listen::PeerCertificates).
    Optional,
}

/// The TLS configuration of one listener. Cloning is cheap.
#[derive(Clone)]
pub struct ServerTls(Arc<Shared>);

struct Shared {
    section: &'static str,
    files: Files,
    protocols: Protocols,
    clients: ClientCertificates,
    state: Mutex<State>,
    metrics: OnceLock<ListenerMetrics>,
}

struct Files {
    certificate: PathBuf,
    key: PathBuf,
    client_ca: Option<PathBuf>,
}

/// What the files contain. Has no `Debug`, because it contains the private key.
#[derive(PartialEq, Eq)]
struct Contents {
    certificate: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

/// Why files cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Unusable {
    /// The key of the section `tls`.
    key: &'static str,
    problem: String,
}

struct Loaded {
    config: Arc<ServerConfig>,
    validity: Validity,
}

/// When all certificates of a chain are valid.
#[derive(Clone, Copy)]
struct Validity {
    from: Timestamp,
    until: Timestamp,
}

struct State {
    served: Loaded,
    contents: Contents,
    /// The last files that could not be used, if there were none that could since.
    unusable: Option<UnusableFiles>,
    /// Whether unusable files were reported, and there were no usable ones since.
    is_outdated: bool,
}

struct UnusableFiles {
    read: Result<Contents, Unusable>,
    reason: Unusable,
    is_reported: bool,
}

/// Metrics of all listeners with TLS.
#[derive(Clone, Debug, Default)]
pub struct TlsMetrics {
    expiry: Family<ListenerLabels, Gauge>,
    unusable: Family<ListenerLabels, Gauge>,
    failures: Family<ListenerLabels, Counter>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ListenerLabels {
    listener: &'static str,
}

struct ListenerMetrics {
    expiry: Gauge,
    unusable: Gauge,
    failures: Counter,
}

impl TlsMetrics {
    /// Registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register_with_unit(
            "tls_certificate_expiry_timestamp",
            "When the certificate of a listener expires, in seconds since 1970",
            Unit::Seconds,
            metrics.expiry.clone(),
        );
        registry.register(
            "tls_files_unusable",
            "1 while a listener cannot use its changed certificate files and serves the former ones, else 0",
            metrics.unusable.clone(),
        );
        registry.register(
            "tls_handshake_failures",
            "Connections that ended before the TLS handshake was complete",
            metrics.failures.clone(),
        );
        metrics
    }
}

impl ServerTls {
    /// Reads the files of the configuration section `section`. `None` if it does not enable TLS. Logs a warning if the
    /// certificate is not valid now.
    ///
    /// # Errors
    /// When a file cannot be used. The error names the field and the file.
    pub fn load(
        section: &'static str,
        config: &ServerTlsConfig,
        protocols: Protocols,
        clients: ClientCertificates,
    ) -> Result<Option<Self>, ConfigError> {
        let (Some(certificate), Some(key)) = (&config.cert_file, &config.key_file) else {
            return Ok(None);
        };
        let files = Files {
            certificate: certificate.clone(),
            key: key.clone(),
            client_ca: config.client_ca_file.clone(),
        };
        let read = files.read();
        let loaded = read.and_then(|contents| Ok((load(&files, &contents, protocols, clients)?, contents)));
        let (served, contents) = loaded.map_err(|Unusable { key, problem }| {
            ConfigError::of_field(format!("{section}.tls.{key}"), problem)
        })?;
        let server = Self(Arc::new(Shared {
            section,
            files,
            protocols,
            clients,
            state: Mutex::new(State {
                served,
                contents,
                unusable: None,
                is_outdated: false,
            }),
            metrics: OnceLock::new(),
        }));
        server.warn_if_not_valid(&server.state());
        Ok(Some(server))
    }

    /// The TLS of the admin port. Probes reach it without a certificate; see [`crate::admin`].
    ///
    /// # Errors
    /// See [`ServerTls::load`].
    pub fn of_admin(config: &ServerTlsConfig) -> Result<Option<Self>, ConfigError> {
        Self::load("admin", config, Protocols::Http, ClientCertificates::Optional)
    }

    pub(crate) fn observe(&self, metrics: &TlsMetrics) {
        let labels = ListenerLabels {
            listener: self.0.section,
        };
        let state = self.state();
        let of_listener = self.0.metrics.get_or_init(|| ListenerMetrics {
            expiry: metrics.expiry.get_or_create(&labels).clone(),
            unusable: metrics.unusable.get_or_create(&labels).clone(),
            failures: metrics.failures.get_or_create(&labels).clone(),
        });
        of_listener.update(&state);
    }

    /// Does the handshake. Failures are counted, and logged at debug level, because anybody can cause them.
    pub(crate) async fn handshake(
        &self,
        stream: TcpStream,
        peer: SocketAddr,
    ) -> Option<TlsStream<TcpStream>> {
        let acceptor = TlsAcceptor::from(self.state().served.config.clone());
        let listener = self.0.section;
        let error = match tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
            Ok(Ok(stream)) => return Some(stream),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("not complete within {} s", HANDSHAKE_TIMEOUT.as_secs()),
        };
        tracing::debug!(listener, %peer, error, "TLS handshake failed");
        if let Some(metrics) = self.0.metrics.get() {
            metrics.failures.inc();
        }
        None
    }

    /// Reads the files, and serves what they contain if it has changed and can be used. Blocks.
    pub(crate) fn check_files(&self) {
        let section = self.0.section;
        let read = self.0.files.read();
        let mut state = self.state();
        if read.as_ref() == Ok(&state.contents) {
            state.unusable = None;
            state.is_outdated = false;
        } else if let Some(known) = state.unusable.as_mut().filter(|known| known.read == read) {
            if !known.is_reported {
                known.is_reported = true;
                let Unusable { key, problem } = &known.reason;
                let field = format!("{section}.tls.{key}");
                tracing::warn!(
                    field,
                    problem,
                    "cannot use changed certificate files; serving the former ones"
                );
            }
            state.is_outdated = true;
        } else {
            match self.0.load(read) {
                Ok(changed) => {
                    *state = changed;
                    let expires = state.served.validity.until;
                    tracing::info!(listener = section, %expires, "serving the changed certificate files");
                    self.warn_if_not_valid(&state);
                }
                Err(unusable) => state.unusable = Some(unusable),
            }
        }
        if let Some(metrics) = self.0.metrics.get() {
            metrics.update(&state);
        }
    }

    fn warn_if_not_valid(&self, state: &State) {
        let Validity { from, until } = state.served.validity;
        let (now, file) = (SystemClock.now(), self.0.files.certificate.display());
        let listener = self.0.section;
        if until <= now {
            tracing::warn!(listener, %file, expired = %until, "the certificate has expired");
        } else if from > now {
            tracing::warn!(listener, %file, valid_from = %from, "the certificate is not valid yet");
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerTls")
            .field("section", &self.0.section)
            .field("certificate", &self.0.files.certificate)
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// The state after these files were read.
    fn load(&self, read: Result<Contents, Unusable>) -> Result<State, UnusableFiles> {
        let unusable = |read, reason| UnusableFiles {
            read,
            reason,
            is_reported: false,
        };
        let contents = read.map_err(|reason| unusable(Err(reason.clone()), reason))?;
        match load(&self.files, &contents, self.protocols, self.clients) {
            Ok(served) => Ok(State {
                served,
                contents,
                unusable: None,
                is_outdated: false,
            }),
            Err(reason) => Err(unusable(Ok(contents), reason)),
        }
    }
}

impl ListenerMetrics {
    fn update(&self, state: &State) {
        self.expiry.set(state.served.validity.until.as_millis() / 1_000);
        self.unusable.set(state.is_outdated.into());
    }
}

impl Files {
    fn read(&self) -> Result<Contents, Unusable> {
        Ok(Contents {
            certificate: read(&self.certificate).map_err(Unusable::of("cert_file"))?,
            key: read(&self.key).map_err(Unusable::of("key_file"))?,
            client_ca: match &self.client_ca {
                Some(path) => Some(read(path).map_err(Unusable::of("client_ca_file"))?),
                None => None,
            },
        })
    }
}

impl Unusable {
    fn of(key: &'static str) -> impl Fn(String) -> Self {
        move |problem| Self { key, problem }
    }
}

fn load(
    files: &Files,
    contents: &Contents,
    protocols: Protocols,
    clients: ClientCertificates,
) -> Result<Loaded, Unusable> {
    let chain =
        certificates_in(&files.certificate, &contents.certificate).map_err(Unusable::of("cert_file"))?;
    let validity = Validity::of(&files.certificate, &chain).map_err(Unusable::of("cert_file"))?;
    let key = private_key_in(&files.key, &contents.key).map_err(Unusable::of("key_file"))?;
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| Unusable::of("cert_file")(format!("cannot set up TLS: {error}")))?;
    let builder = match files.client_ca.as_deref().zip(contents.client_ca.as_deref()) {
        None => builder.with_no_client_auth(),
        Some((path, pem)) => {
            let unusable = Unusable::of("client_ca_file");
            let mut roots = RootCertStore::empty();
            add_roots(&mut roots, path, pem).map_err(&unusable)?;
            let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider());
            let verifier = match clients {
                ClientCertificates::Required => verifier,
                ClientCertificates::Optional => verifier.allow_unauthenticated(),
            };
            let verifier = verifier
                .build()
                .map_err(|error| unusable(format!("{} cannot be used: {error}", path.display())))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder
        .with_single_cert(chain, key)
        .map_err(|error| unusable_pair(files, &error))?;
    let (h2, http1) = (b"h2".to_vec(), b"http/1.1".to_vec());
    config.alpn_protocols = match protocols {
        Protocols::Http => vec![h2, http1],
        Protocols::Grpc => vec![h2],
    };
    Ok(Loaded {
        config: Arc::new(config),
        validity,
    })
}

fn unusable_pair(files: &Files, error: &rustls::Error) -> Unusable {
    let (certificate, key) = (files.certificate.display(), files.key.display());
    match error {
        rustls::Error::InconsistentKeys(_) => Unusable::of("key_file")(format!(
            "{key} does not contain the private key of the certificate in {certificate}"
        )),
        rustls::Error::InvalidCertificate(_) => {
            Unusable::of("cert_file")(format!("{certificate} contains an invalid certificate: {error}"))
        }
        error => Unusable::of("key_file")(format!("{key} cannot be used: {error}")),
    }
}

impl Validity {
    fn of(path: &Path, chain: &[CertificateDer<'_>]) -> Result<Self, String> {
        let mut all: Option<Self> = None;
        for der in chain {
            let (_, certificate) = x509_parser::parse_x509_certificate(der)
                .map_err(|error| format!("{} contains an invalid certificate: {error}", path.display()))?;
            let validity = certificate.validity();
            let of_this = Self {
                from: Timestamp::from_millis(validity.not_before.timestamp().saturating_mul(1_000)),
                until: Timestamp::from_millis(validity.not_after.timestamp().saturating_mul(1_000)),
            };
            all = Some(match all {
                None => of_this,
                Some(all) => Self {
                    from: all.from.max(of_this.from),
                    until: all.until.min(of_this.until),
                },
            });
        }
        all.ok_or_else(|| format!("{} contains no PEM certificate", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use redeliver_testkit::certificates::Authority;
    use redeliver_testkit::scratch::Scratch;

    use super::*;

    #[test]
    fn files_that_are_replaced_one_after_the_other_are_reported_only_if_they_stay_unusable() {
        let scratch = Scratch::new("tls-files").unwrap();
        let authority = Authority::new().unwrap();
        let (first, second) = (authority.sign().unwrap(), authority.sign_expired().unwrap());
        let (certificate, key) = first.write(scratch.path(), "tls").unwrap();
        let config = ServerTlsConfig {
            cert_file: Some(certificate.clone()),
            key_file: Some(key.clone()),
            client_ca_file: None,
        };
        let server = ServerTls::of_admin(&config).unwrap().unwrap();
        let metrics = TlsMetrics::default();
        server.observe(&metrics);
        let labels = ListenerLabels { listener: "admin" };
        // Whether the unusable files are reported, and when the served certificate expires.
        let check = || {
            server.check_files();
            let (unusable, expiry) = (
                metrics.unusable.get_or_create(&labels).get(),
                metrics.expiry.get_or_create(&labels).get(),
            );
            (unusable == 1, expiry)
        };
        let (reported, former) = check();
        assert!(!reported);
        let expired = 1_580_428_800;

        std::fs::write(&key, &second.key).unwrap();
        assert_eq!(check(), (false, former));
        std::fs::write(&certificate, &second.certificate).unwrap();
        assert_eq!(check(), (false, expired));

        std::fs::write(&key, &first.key).unwrap();
        assert_eq!(check(), (false, expired));
        assert_eq!(check(), (true, expired));
        std::fs::remove_file(&key).unwrap();
        assert_eq!(check(), (true, expired));
        std::fs::write(&key, &second.key).unwrap();
        assert_eq!(check(), (false, expired));
    }
}
