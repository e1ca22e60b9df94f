//! Certificates for servers on 127.0.0.1, and with the feature `tls` an authority that signs them.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

#[cfg(feature = "tls")]
pub use authority::Authority;

/// A certificate for 127.0.0.1 and its key, as PEM.
#[derive(Clone, Debug)]
pub struct Signed {
    /// The certificate.
    pub certificate: String,
    /// Its key, PKCS #8, not encrypted.
    pub key: String,
}

impl Signed {
    /// Writes `NAME.crt` and `NAME.key`, and returns their paths.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn write(&self, directory: &Path, name: &str) -> Result<(PathBuf, PathBuf)> {
        Ok((
            write(directory.join(format!("{name}.crt")), &self.certificate)?,
            write(directory.join(format!("{name}.key")), &self.key)?,
        ))
    }
}

/// Writes a file and returns its path.
pub(crate) fn write(path: PathBuf, content: &str) -> Result<PathBuf> {
    std::fs::write(&path, content).with_context(|| format!("writing {}", path.display()))?;
    Ok(path)
}

#[cfg(feature = "tls")]
mod authority {
    use std::path::{Path, PathBuf};

    use anyhow::{Context as _, Result};
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, SanType};

    use super::{Signed, write};
    use crate::unique;

    /// A certificate authority that belongs to one test. Only clients with its certificate trust it.
    pub struct Authority {
        issuer: CertifiedIssuer<'static, KeyPair>,
    }

    impl Authority {
        /// Creates an authority with a new key.
        ///
        /// # Errors
        /// If no key can be made.
        pub fn new() -> Result<Self> {
            let mut params = CertificateParams::new(Vec::new()).context("describing an authority")?;
            // A server with the same name would look self-signed, and a certificate of another authority with the same
            // name would look invalid instead of untrusted.
            params
                .distinguished_name
                .push(DnType::CommonName, unique("authority"));
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            let key = KeyPair::generate().context("making the key of an authority")?;
            let issuer = CertifiedIssuer::self_signed(params, key).context("making an authority")?;
            Ok(Self { issuer })
        }

        /// A certificate for a server on 127.0.0.1.
        ///
        /// # Errors
        /// If no key can be made.
        pub fn sign(&self) -> Result<Signed> {
            self.sign_with(|_| {})
        }

        /// As [`Authority::sign`], but it expired in 2020.
        ///
        /// # Errors
        /// If no key can be made.
        pub fn sign_expired(&self) -> Result<Signed> {
            self.sign_with(|params| params.not_after = rcgen::date_time_ymd(2020, 1, 31))
        }

        fn sign_with(&self, change: impl FnOnce(&mut CertificateParams)) -> Result<Signed> {
            let key = KeyPair::generate().context("making the key of a server")?;
            let name = "127.0.0.1".to_owned();
            let mut params = CertificateParams::new(vec![name]).context("describing a server")?;
            change(&mut params);
            let certificate = params
                .signed_by(&key, &self.issuer)
                .context("signing the certificate of a server")?;
            Ok(Signed {
                certificate: certificate.pem(),
                key: key.serialize_pem(),
            })
        }

        /// Its certificate, as PEM.
        pub fn pem(&self) -> String {
            self.issuer.pem()
        }

        /// Writes its certificate to a file for clients, and returns the path.
        ///
        /// # Errors
        /// If it cannot be written.
        pub fn write(&self, directory: &Path, name: &str) -> Result<PathBuf> {
            write(directory.join(name), &self.issuer.pem())
        }
    }

    impl Authority {
        /// A certificate for a client with this common name and this URI as alternative name.
        ///
        /// # Errors
        /// If no key can be made, or the URI is not ASCII.
        pub fn sign_client(&self, common_name: &str, uri: &str) -> Result<Signed> {
            let key = KeyPair::generate().context("making the key of a client")?;
            let mut params = CertificateParams::new(Vec::new()).context("describing a client")?;
            params.distinguished_name.push(DnType::CommonName, common_name);
            let uri = uri.try_into().context("describing the URI of a client")?;
            params.subject_alt_names.push(SanType::URI(uri));
            let certificate = params
                .signed_by(&key, &self.issuer)
                .context("signing the certificate of a client")?;
            Ok(Signed {
                certificate: certificate.pem(),
                key: key.serialize_pem(),
            })
        }
    }
}
