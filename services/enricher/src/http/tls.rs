//! TLS: trusted certificates and the client certificate.

use redeliver_runtime::tls::{certificates, client_builder, private_key, trusted_roots};
use rustls::ClientConfig;

use super::settings::{HttpSetupError, TlsFiles};

/// The TLS configuration of the client.
///
/// `needed`: whether the endpoint uses TLS. If not, a system without CA certificates is no error.
pub(super) fn client_config(files: &TlsFiles, needed: bool) -> Result<ClientConfig, HttpSetupError> {
    let problem_of = |field| move |problem: String| HttpSetupError::new(field, problem);
    let roots = trusted_roots(files.ca_file.as_deref()).map_err(problem_of("tls.ca_file"))?;
    if needed && roots.is_empty() {
        let problem = "is not set, and this system has no CA certificates; name a file with CA certificates";
        return Err(HttpSetupError::new("tls.ca_file", problem));
    }
    let builder = client_builder()
        .map_err(|error| HttpSetupError::new("tls", format!("cannot set up TLS: {error}")))?
        .with_root_certificates(roots);
    let mut config = match (&files.cert_file, &files.key_file) {
        (None, None) => builder.with_no_client_auth(),
        (Some(_), None) => return Err(HttpSetupError::new("tls.cert_file", "requires key_file")),
        (None, Some(_)) => return Err(HttpSetupError::new("tls.key_file", "requires cert_file")),
        (Some(certificate), Some(key)) => {
            let chain = certificates(certificate).map_err(problem_of("tls.cert_file"))?;
            let key = private_key(key).map_err(problem_of("tls.key_file"))?;
            builder.with_client_auth_cert(chain, key).map_err(|error| {
                let problem = format!("does not match {}: {error}", certificate.display());
                HttpSetupError::new("tls.key_file", problem)
            })?
        }
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}
