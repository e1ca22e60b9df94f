//! TLS: trusted certificates and the client certificate.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

use super::settings::{HttpSetupError, TlsFiles};

/// The TLS configuration of the client. The crypto provider is passed explicitly, so that the handler does not depend
/// on a default of the process.
///
/// `needed`: whether the endpoint uses TLS. If not, a system without CA certificates is no error.
pub(super) fn client_config(files: &TlsFiles, needed: bool) -> Result<ClientConfig, HttpSetupError> {
    let mut roots = RootCertStore::empty();
    // Unreadable system certificates are skipped, as is usual.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if let Some(path) = &files.ca_file {
        for certificate in certificates("tls.ca_file", path)? {
            roots.add(certificate).map_err(|error| {
                let problem = format!("{} contains an invalid certificate: {error}", path.display());
                HttpSetupError::new("tls.ca_file", problem)
            })?;
        }
    } else if needed && roots.is_empty() {
        let problem = "is not set, and this system has no CA certificates; name a file with CA certificates";
        return Err(HttpSetupError::new("tls.ca_file", problem));
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| HttpSetupError::new("tls", format!("cannot set up TLS: {error}")))?
        .with_root_certificates(roots);
    let mut config = match (&files.cert_file, &files.key_file) {
        (None, None) => builder.with_no_client_auth(),
        (Some(_), None) => return Err(HttpSetupError::new("tls.cert_file", "requires key_file")),
        (None, Some(_)) => return Err(HttpSetupError::new("tls.key_file", "requires cert_file")),
        (Some(certificate), Some(key)) => {
            let chain = certificates("tls.cert_file", certificate)?;
            builder
                .with_client_auth_cert(chain, private_key(key)?)
                .map_err(|error| {
                    let problem = format!("does not match {}: {error}", certificate.display());
                    HttpSetupError::new("tls.key_file", problem)
                })?
        }
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

fn certificates(field: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, HttpSetupError> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    match read {
        Ok(certificates) if certificates.is_empty() => Err(HttpSetupError::new(
            field,
            format!("{} contains no PEM certificate", path.display()),
        )),
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(HttpSetupError::new(
            field,
            format!("cannot read {}: {error}", path.display()),
        )),
    }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, HttpSetupError> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| {
        HttpSetupError::new("tls.key_file", format!("cannot read {}: {error}", path.display()))
    })
}
