//! The HTTP client: connections, trusted certificates and the client certificate.
//!
//! A client has no limit for the age of its connections, so [`Clients`] replaces it by another one from time to time. Calls
//! in progress end on the connections of the previous one.

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use redeliver_runtime::config::{ConnectionsConfig, HttpVersion, InvalidField, ProxyChoice};
use redeliver_runtime::tls::{add_roots, certificates_in, client_builder, private_key_in, system_roots};
use redeliver_runtime::watched_files::{FileContents, WatchedFiles};
use reqwest::{Client, Proxy, Url, redirect};
use rustls::ClientConfig;
use tokio::time::Instant;

use super::call_error;
use super::settings::{HttpSettings, HttpSetupError, TlsFiles};

/// How often the client finds out whether an HTTP/2 connection with calls in progress still works, and how long it waits for
/// the answer. All calls share such a connection, so they would all time out.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// Clients with the same settings, one after the other.
pub(super) struct Clients {
    builder: Builder,
    tls: ClientConfig,
    newest: Mutex<(Client, Instant)>,
}

impl Clients {
    fn new(builder: Builder, tls: ClientConfig) -> Result<Self, InvalidField> {
        let client = builder.client(&tls)?;
        // The ages of different processes end at different times.
        let max_age = builder.connections.max_age.duration();
        let renewed = Instant::now() + max_age.mul_f64(0.5 + 0.5 * fastrand::f64());
        Ok(Self {
            builder,
            tls,
            newest: Mutex::new((client, renewed)),
        })
    }

    /// The client of the next call.
    pub(super) fn client(&self) -> Client {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let (client, renewed) = &mut *newest;
        if now >= *renewed {
            *renewed = now + self.builder.connections.max_age.duration();
            match self.builder.client(&self.tls) {
                Ok(other) => *client = other,
                Err(InvalidField { field, problem, .. }) => {
                    tracing::warn!(
                        field,
                        problem,
                        "cannot renew the connections to an endpoint; using the previous ones"
                    );
                }
            }
        }
        client.clone()
    }
}

/// Reads the certificate files and creates the clients. A change of the files replaces them and thereby their
/// connections; calls in progress end on the previous ones.
pub(super) fn load(settings: &HttpSettings, url: &Url) -> Result<WatchedFiles<Clients>, HttpSetupError> {
    let TlsFiles {
        ca_file,
        cert_file,
        key_file,
    } = &settings.tls;
    match (cert_file, key_file) {
        (Some(_), None) => return Err(settings.wrong("tls.cert_file", "requires key_file")),
        (None, Some(_)) => return Err(settings.wrong("tls.key_file", "requires cert_file")),
        (None, None) | (Some(_), Some(_)) => {}
    }
    let named = [
        ("tls.ca_file", ca_file),
        ("tls.cert_file", cert_file),
        ("tls.key_file", key_file),
    ];
    let files = named
        .into_iter()
        .filter_map(|(field, path)| Some(settings.file(field, path.as_deref()?)));
    let builder = Builder {
        section: settings.section.clone(),
        connect_timeout: settings.connect_timeout,
        connections: settings.connections.clone(),
        uses_tls: url.scheme() == "https",
        is_this_machine: is_this_machine(url),
        has_ca_file: ca_file.is_some(),
    };
    Ok(WatchedFiles::load(files.collect(), move |files| {
        Clients::new(builder.clone(), builder.tls(files)?)
    })?)
}

/// What all clients have in common.
#[derive(Clone)]
struct Builder {
    section: String,
    connect_timeout: Duration,
    connections: ConnectionsConfig,
    uses_tls: bool,
    is_this_machine: bool,
    has_ca_file: bool,
}

impl Builder {
    fn client(&self, tls: &ClientConfig) -> Result<Client, InvalidField> {
        let mut client = Client::builder()
            .tls_backend_preconfigured(tls.clone())
            .redirect(redirect::Policy::none())
            .connect_timeout(self.connect_timeout)
            .pool_idle_timeout(self.connections.idle_timeout.duration())
            .http2_keep_alive_interval(PING_INTERVAL)
            .http2_keep_alive_timeout(PING_TIMEOUT);
        client = match self.connections.version {
            HttpVersion::Auto => client,
            HttpVersion::Http1 => client.http1_only(),
            HttpVersion::Http2 => client.http2_prior_knowledge(),
        };
        client = match self.connections.proxy() {
            ProxyChoice::Environment if !self.is_this_machine => client,
            ProxyChoice::Environment | ProxyChoice::Direct => client.no_proxy(),
            ProxyChoice::Url(url) => client.proxy(Proxy::all(url).map_err(|error| {
                let cause = call_error::cause(&error);
                self.problem("connections.proxy", format!("cannot be used: {cause}"))
            })?),
        };
        client.build().map_err(|error| {
            let cause = call_error::cause(&error);
            self.problem("url", format!("cannot create the HTTP client: {cause}"))
        })
    }

    /// The TLS configuration. A system without CA certificates is not an error if the endpoint does not use
    /// TLS.
    fn tls(&self, files: &[FileContents<'_>]) -> Result<ClientConfig, InvalidField> {
        let (ca, identity) = files.split_at(usize::from(self.has_ca_file));
        let mut roots = system_roots();
        for file in ca {
            add_roots(&mut roots, file.path(), file.bytes).map_err(|problem| file.problem(problem))?;
        }
        if self.uses_tls && roots.is_empty() {
            let problem =
                "is not set, and this system has no CA certificates; name a file with CA certificates";
            return Err(self.problem("tls.ca_file", problem));
        }
        let builder = client_builder()
            .map_err(|error| self.problem("tls", format!("cannot set up TLS: {error}")))?
            .with_root_certificates(roots);
        let mut config = match identity {
            [certificate, key] => {
                let chain = certificates_in(certificate.path(), certificate.bytes)
                    .map_err(|problem| certificate.problem(problem))?;
                let private_key =
                    private_key_in(key.path(), key.bytes).map_err(|problem| key.problem(problem))?;
                builder
                    .with_client_auth_cert(chain, private_key)
                    .map_err(|error| {
                        let certificate = certificate.path().display();
                        key.problem(format!("does not match {certificate}: {error}"))
                    })?
            }
            _ => builder.with_no_client_auth(),
        };
        // In the order of preference.
        config.alpn_protocols = match self.connections.version {
            HttpVersion::Auto => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
            HttpVersion::Http1 => vec![b"http/1.1".to_vec()],
            HttpVersion::Http2 => vec![b"h2".to_vec()],
        };
        Ok(config)
    }

    fn problem(&self, field: &str, problem: impl Into<String>) -> InvalidField {
        InvalidField {
            field: format!("{}.{field}", self.section),
            problem: problem.into(),
            place: None,
        }
    }
}

fn is_this_machine(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let address = host
        .trim_start_matches('[')
        .trim_end_matches(']')
        .parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}
