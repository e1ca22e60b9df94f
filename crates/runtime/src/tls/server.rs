//! The TLS configuration of a listener, which follows its files.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use redeliver_core::{Clock as _, SystemClock, Timestamp};
use rustls::pki_types::CertificateDer;
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::{add_roots, certificates_in, private_key_in, provider};
use crate::config::{ConfigError, InvalidField, ServerTlsConfig};
use crate::families;
use crate::watched_files::{ConfiguredFile, FileContents, WatchedFiles};

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
    files: WatchedFiles<Loaded>,
    metrics: OnceLock<ListenerMetrics>,
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

families! {
    /// Metrics of all listeners with TLS.
    #[derive(Clone, Debug)]
    pub struct TlsMetrics {
        expiry: Family<ListenerLabels, Gauge> = "tls_certificate_expiry_timestamp" in Seconds,
            "When the certificate of a listener expires, in seconds since 1970";
        unusable: Family<ListenerLabels, Gauge> = "tls_files_unusable",
            "1 while the listener uses previous certificate files because changed ones are unusable, else 0";
        failures: Family<ListenerLabels, Counter> = "tls_handshake_failures", "Failed TLS handshakes";
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ListenerLabels {
    listener: &'static str,
}

struct ListenerMetrics {
    expiry: Gauge,
    failures: Counter,
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
        let file = |key: &str, path: &PathBuf| ConfiguredFile {
            field: format!("{section}.tls.{key}"),
            path: path.clone(),
        };
        let mut files = vec![file("cert_file", certificate), file("key_file", key)];
        files.extend(
            config
                .client_ca_file
                .iter()
                .map(|path| file("client_ca_file", path)),
        );
        let files = WatchedFiles::load(files, move |files| {
            let loaded = load(files[0], files[1], files.get(2).copied(), protocols, clients)?;
            warn_if_not_valid(section, files[0].path(), loaded.validity);
            Ok(loaded)
        })?;
        Ok(Some(Self(Arc::new(Shared {
            section,
            files,
            metrics: OnceLock::new(),
        }))))
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
        self.0
            .files
            .observe(metrics.unusable.get_or_create(&labels).clone());
        let of_listener = self.0.metrics.get_or_init(|| ListenerMetrics {
            expiry: metrics.expiry.get_or_create(&labels).clone(),
            failures: metrics.failures.get_or_create(&labels).clone(),
        });
        of_listener.update(&self.0.files.value());
    }

    /// Does the handshake. Failures are counted, and logged at debug level, because any client can cause
    /// them.
    pub(crate) async fn handshake(
        &self,
        stream: TcpStream,
        peer: SocketAddr,
    ) -> Option<TlsStream<TcpStream>> {
        let acceptor = TlsAcceptor::from(self.0.files.value().config.clone());
        let listener = self.0.section;
        let error = match tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
            Ok(Ok(stream)) => return Some(stream),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("not complete within {} s", HANDSHAKE_TIMEOUT.as_secs()),
        };
        tracing::debug!(listener, %peer, error, "TLS handshake failed");
        self.count_failure();
        None
    }

    /// Counts a handshake that was aborted because too many were in progress.
    pub(crate) fn handshake_aborted(&self) {
        tracing::debug!(
            listener = self.0.section,
            "TLS handshake aborted; too many are in progress"
        );
        self.count_failure();
    }

    fn count_failure(&self) {
        if let Some(metrics) = self.0.metrics.get() {
            metrics.failures.inc();
        }
    }

    /// Reads the files, and serves what they contain if it has changed and can be used. Blocks.
    pub(crate) fn check_files(&self) {
        if self.0.files.check()
            && let Some(metrics) = self.0.metrics.get()
        {
            metrics.update(&self.0.files.value());
        }
    }
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerTls")
            .field("section", &self.0.section)
            .field("files", &self.0.files)
            .finish_non_exhaustive()
    }
}

impl ListenerMetrics {
    fn update(&self, loaded: &Loaded) {
        self.expiry.set(loaded.validity.until.as_millis() / 1_000);
    }
}

fn warn_if_not_valid(listener: &str, file: &Path, validity: Validity) {
    let Validity { from, until } = validity;
    let (now, file) = (SystemClock.now(), file.display());
    if until <= now {
        tracing::warn!(listener, %file, expired = %until, "certificate expired");
    } else if from > now {
        tracing::warn!(listener, %file, valid_from = %from, "certificate not valid yet");
    }
}

fn load(
    certificate: FileContents<'_>,
    key: FileContents<'_>,
    client_ca: Option<FileContents<'_>>,
    protocols: Protocols,
    clients: ClientCertificates,
) -> Result<Loaded, InvalidField> {
    let of_certificate = |problem| certificate.problem(problem);
    let chain = certificates_in(certificate.path(), certificate.bytes).map_err(of_certificate)?;
    let validity = Validity::of(certificate.path(), &chain).map_err(of_certificate)?;
    let private_key = private_key_in(key.path(), key.bytes).map_err(|problem| key.problem(problem))?;
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| certificate.problem(format!("cannot set up TLS: {error}")))?;
    let builder = match client_ca {
        None => builder.with_no_client_auth(),
        Some(file) => {
            let mut roots = RootCertStore::empty();
            add_roots(&mut roots, file.path(), file.bytes).map_err(|problem| file.problem(problem))?;
            let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider());
            let verifier = match clients {
                ClientCertificates::Required => verifier,
                ClientCertificates::Optional => verifier.allow_unauthenticated(),
            };
            let verifier = verifier.build().map_err(|error| {
                file.problem(format!("{} cannot be used: {error}", file.path().display()))
            })?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder
        .with_single_cert(chain, private_key)
        .map_err(|error| unusable_pair(certificate, key, &error))?;
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

fn unusable_pair(
    certificate: FileContents<'_>,
    key: FileContents<'_>,
    error: &rustls::Error,
) -> InvalidField {
    let (of_certificate, of_key) = (certificate.path().display(), key.path().display());
    match error {
        rustls::Error::InconsistentKeys(_) => key.problem(format!(
            "{of_key} does not contain the private key of the certificate in {of_certificate}"
        )),
        rustls::Error::InvalidCertificate(_) => certificate.problem(format!(
            "{of_certificate} contains an invalid certificate: {error}"
        )),
        error => key.problem(format!("{of_key} cannot be used: {error}")),
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
    fn certificate_and_key_change_together() {
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
        let (reported, previous) = check();
        assert!(!reported);
        let expired = 1_580_428_800;

        std::fs::write(&key, &second.key).unwrap();
        assert_eq!(check(), (false, previous));
        std::fs::write(&certificate, &second.certificate).unwrap();
        assert_eq!(check(), (false, previous));
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
