//! The HTTP client: connections, trusted certificates and the client certificate.

use std::net::IpAddr;
use std::time::Duration;

use redeliver_runtime::config::Problem;
use redeliver_runtime::tls::{add_roots, certificates_in, client_builder, private_key_in, system_roots};
use redeliver_runtime::watched_files::{FileContents, WatchedFiles};
use reqwest::{Client, Url, redirect};
use rustls::ClientConfig;

use super::call_error;
use super::settings::{HttpSettings, HttpSetupError, TlsFiles};

/// Reads the certificate files and creates the client. A change of the files replaces the client and thereby its
/// connections; calls in progress end on the former ones.
pub(super) fn load(settings: &HttpSettings, url: &Url) -> Result<WatchedFiles<Client>, HttpSetupError> {
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
        uses_tls: url.scheme() == "https",
        is_this_machine: is_this_machine(url),
        has_ca_file: ca_file.is_some(),
    };
    Ok(WatchedFiles::load(files.collect(), move |files| {
        builder.client(files)
    })?)
}

/// Creates the client anew for each change of the files.
struct Builder {
    section: String,
    connect_timeout: Duration,
    uses_tls: bool,
    is_this_machine: bool,
    has_ca_file: bool,
}

impl Builder {
    fn client(&self, files: &[FileContents<'_>]) -> Result<Client, Problem> {
        let mut client = Client::builder()
            .tls_backend_preconfigured(self.tls(files)?)
            .http1_only()
            .redirect(redirect::Policy::none())
            .connect_timeout(self.connect_timeout);
        if self.is_this_machine {
            client = client.no_proxy();
        }
        client.build().map_err(|error| {
            let cause = call_error::cause(&error);
            self.problem("url", format!("cannot create the HTTP client: {cause}"))
        })
    }

    /// The TLS configuration. A system without CA certificates is no error if the endpoint does not use TLS.
    fn tls(&self, files: &[FileContents<'_>]) -> Result<ClientConfig, Problem> {
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
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }

    fn problem(&self, field: &str, problem: impl Into<String>) -> Problem {
        Problem {
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
