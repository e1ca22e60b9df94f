//! TLS: certificate files, and the configurations of servers and clients.
//!
//! The crypto provider is passed explicitly everywhere, so that nothing depends on a default of the process.

use std::path::Path;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ConfigBuilder, RootCertStore, WantsVerifier};

mod own_process;
mod server;

pub(crate) use own_process::connector_to_own_process;
pub use server::{ClientCertificates, Protocols, ServerTls, TlsMetrics};

use crate::watched_files::read;

pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// The first step of a client's configuration.
///
/// # Errors
/// When the crypto provider supports no version of TLS.
pub fn client_builder() -> Result<ConfigBuilder<ClientConfig, WantsVerifier>, rustls::Error> {
    ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()
}

/// The CA certificates of the system, and those of `ca_file`. Invalid certificates of the system are skipped, as in
/// other programs.
///
/// # Errors
/// What is wrong with `ca_file`. The message contains the path.
pub fn trusted_roots(ca_file: Option<&Path>) -> Result<RootCertStore, String> {
    let mut roots = system_roots();
    if let Some(path) = ca_file {
        add_roots(&mut roots, path, &read(path)?)?;
    }
    Ok(roots)
}

/// The CA certificates of the system, without invalid ones.
#[must_use]
pub fn system_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

/// Adds the certificates of a PEM file, which was read from `path`.
///
/// # Errors
/// What is wrong with the file. The message contains the path.
pub fn add_roots(roots: &mut RootCertStore, path: &Path, pem: &[u8]) -> Result<(), String> {
    for certificate in certificates_in(path, pem)? {
        roots
            .add(certificate)
            .map_err(|error| format!("{} contains an invalid certificate: {error}", path.display()))?;
    }
    Ok(())
}

/// The certificates of a PEM file, at least one.
///
/// # Errors
/// What is wrong with the file. The message contains the path.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    certificates_in(path, &read(path)?)
}

/// The private key of a PEM file.
///
/// # Errors
/// What is wrong with the file. The message contains the path.
pub fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    private_key_in(path, &read(path)?)
}

/// As [`certificates`], for a file that was read from `path`.
///
/// # Errors
/// As for [`certificates`].
pub fn certificates_in(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match read {
        Ok(certificates) if certificates.is_empty() => {
            Err(format!("{} contains no PEM certificate", path.display()))
        }
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(format!("{} is not valid PEM: {error}", path.display())),
    }
}

/// As [`private_key`], for a file that was read from `path`.
///
/// # Errors
/// As for [`private_key`].
pub fn private_key_in(path: &Path, pem: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|error| match error {
        rustls::pki_types::pem::Error::NoItemsFound => {
            format!(
                "{} contains no PEM private key without a password",
                path.display()
            )
        }
        error => format!("{} is not valid PEM: {error}", path.display()),
    })
}
