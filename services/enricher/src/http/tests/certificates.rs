//! A test CA and certificates that it signs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

pub(super) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate and its key, in PEM.
pub(super) struct Signed {
    certificate: String,
    key: String,
}

impl Authority {
    pub(super) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        Self { issuer }
    }

    pub(super) fn sign(&self, name: &str) -> Signed {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        Signed {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        }
    }

    pub(super) fn write(&self, path: PathBuf) -> PathBuf {
        std::fs::write(&path, self.issuer.pem()).unwrap();
        path
    }

    /// A server with a certificate for 127.0.0.1 that may require client certificates signed by `clients`.
    pub(super) fn server(&self, clients: Option<&Self>) -> ServerConfig {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .unwrap();
        let builder = match clients {
            None => builder.with_no_client_auth(),
            Some(clients) => {
                let mut roots = RootCertStore::empty();
                roots.add(clients.issuer.der().clone()).unwrap();
                let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider);
                builder.with_client_cert_verifier(verifier.build().unwrap())
            }
        };
        let signed = self.sign("127.0.0.1");
        let chain = vec![CertificateDer::from_pem_slice(signed.certificate.as_bytes()).unwrap()];
        let key = PrivateKeyDer::from_pem_slice(signed.key.as_bytes()).unwrap();
        builder.with_single_cert(chain, key).unwrap()
    }
}

impl Signed {
    /// Writes the certificate and the key. Returns their paths.
    pub(super) fn write(&self, directory: &Path, name: &str) -> (PathBuf, PathBuf) {
        let paths = (
            directory.join(format!("{name}.crt")),
            directory.join(format!("{name}.key")),
        );
        std::fs::write(&paths.0, &self.certificate).unwrap();
        std::fs::write(&paths.1, &self.key).unwrap();
        paths
    }
}
