//! `tls` of a listener.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::error::Findings;

/// `tls` of a listener: PEM files. [`ServerTls`](crate::tls::ServerTls) checks what they contain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServerTlsConfig {
    /// The certificate, followed by intermediate certificates. `None`: plain text.
    pub cert_file: Option<PathBuf>,
    /// The private key of the certificate.
    pub key_file: Option<PathBuf>,
    /// CA certificates of clients. If set, clients must present a certificate that one of them has signed.
    pub client_ca_file: Option<PathBuf>,
}

impl ServerTlsConfig {
    /// Whether the listener uses TLS.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.cert_file.is_some()
    }

    /// Whether clients need a certificate.
    #[must_use]
    pub fn requires_client_certificate(&self) -> bool {
        self.client_ca_file.is_some()
    }

    /// Reports problems of `tls` in the current section of `findings`.
    pub fn check(&self, findings: &mut Findings<'_>) {
        findings.inside("tls", |at| match (&self.cert_file, &self.key_file) {
            (Some(_), None) => at.report("cert_file", "requires key_file"),
            (None, Some(_)) => at.report("key_file", "requires cert_file"),
            (None, None) if self.client_ca_file.is_some() => {
                at.report("client_ca_file", "requires cert_file and key_file");
            }
            (None, None) | (Some(_), Some(_)) => {}
        });
    }
}
