//! The address of a service, and how to connect to it.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use redeliver_proto::auth::SendToken;
use rustls::RootCertStore;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Identity, Uri};

use crate::caller::{Caller, Patience};
use crate::error::ClientError;

/// A connection to a service, and who calls. Clones share the connection. If it is lost, the next call reconnects.
#[derive(Clone, Debug)]
pub struct Connection {
    channel: Channel,
    endpoint: Endpoint,
    sent: SendToken,
    patience: Option<Patience>,
}

impl Connection {
    /// The same connection for calls with this token, and with this reason for the audit log if it is not empty. `None` sends no token.
    ///
    /// # Errors
    /// [`ClientError::Token`] if the token cannot be sent, and [`ClientError::PlaintextToken`] if other machines could read it.
    pub fn with_caller(&self, token: Option<&str>, reason: &str) -> Result<Self, ClientError> {
        let endpoint = Endpoint {
            token: token.map(str::to_owned),
            reason: (!reason.is_empty()).then(|| reason.to_owned()),
            ..self.endpoint.clone()
        };
        Ok(Self {
            channel: self.channel.clone(),
            sent: endpoint.sent()?,
            endpoint,
            patience: self.patience.clone(),
        })
    }

    /// The address of the service.
    #[must_use]
    pub fn url(&self) -> &str {
        self.endpoint.url()
    }

    /// The timeout of a call; for a stream, of its start.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.endpoint.timeout
    }

    pub(crate) fn caller(&self) -> Caller {
        Caller::new(self.channel.clone(), self.sent.clone(), self.patience.clone())
    }
}

/// The maximum size of a response, in bytes. A page of dead letters with values can be large.
pub(crate) const MAX_RESPONSE: usize = 256 << 20;

/// Defines a client of a gRPC service, and its calls whose answers are messages.
macro_rules! client {
    (
        $(#[$about:meta])*
        $client:ident($service:ident);
        $($(#[$doc:meta])* $name:ident = $call:ident($request:ty) -> $answer:ty;)*
    ) => {
        $(#[$about])*
        #[derive(Clone, Debug)]
        pub struct $client {
            service: $service<$crate::caller::Caller>,
            url: String,
        }

        impl $client {
            /// Connects to the service.
            ///
            /// # Errors
            /// If the endpoint is invalid or the service cannot be reached.
            pub async fn connect(endpoint: &$crate::Endpoint) -> Result<Self, $crate::ClientError> {
                Ok(Self::new(&endpoint.connect().await?))
            }

            /// Calls the service over a connection that other clients and other callers share.
            #[must_use]
            pub fn new(connection: &$crate::Connection) -> Self {
                Self {
                    service: $service::new(connection.caller()).max_decoding_message_size($crate::endpoint::MAX_RESPONSE),
                    url: connection.url().to_owned(),
                }
            }

            $($(#[$doc])*
            pub async fn $name(&self, request: $request) -> Result<$answer, $crate::ClientError> {
                self.answer(self.service.clone().$call(request).await).await
            })*

            async fn answer<T>(
                &self,
                answer: Result<tonic::Response<T>, tonic::Status>,
            ) -> Result<T, $crate::ClientError> {
                $crate::error::answer(&self.url, answer).await
            }
        }
    };
}
pub(crate) use client;

/// The address, token and timeouts of a service.
#[derive(Clone)]
pub struct Endpoint {
    url: String,
    token: Option<String>,
    allows_plaintext_token: bool,
    reason: Option<String>,
    ca_file: Option<PathBuf>,
    /// The files of the certificate and of its key.
    client_certificate: Option<(PathBuf, PathBuf)>,
    connect_timeout: Duration,
    timeout: Duration,
    patience: Option<Duration>,
    keep_alive: Duration,
}

impl Endpoint {
    /// A service at `http://host:port`, or at `https://host:port` with TLS. `host:port` means `http`.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        let url = url.into();
        Self {
            url: if url.contains("://") {
                url
            } else {
                format!("http://{url}")
            },
            token: None,
            allows_plaintext_token: false,
            reason: None,
            ca_file: None,
            client_certificate: None,
            connect_timeout: Duration::from_secs(5),
            timeout: Duration::from_secs(30),
            patience: None,
            keep_alive: Duration::from_secs(20),
        }
    }

    /// The bearer token to send with each call. Default: none. With `http`, it is sent to this machine only; see
    /// [`allow_plaintext_token`](Self::allow_plaintext_token).
    #[must_use]
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(token.into());
        self
    }

    /// Sends the token to other machines with `http`, too. Everyone on the way can read and use it.
    #[must_use]
    pub fn allow_plaintext_token(mut self) -> Self {
        self.allows_plaintext_token = true;
        self
    }

    /// The reason, for the audit log: sent with each call, and recorded with the payloads of dead letters
    /// that the inspector sends. At most 1000 bytes.
    #[must_use]
    pub fn reason(mut self, reason: impl Into<String>) -> Self {
        self.reason = Some(reason.into());
        self
    }

    /// A PEM file with CA certificates to trust in addition to those of the system. Only used with `https`.
    #[must_use]
    pub fn ca_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.ca_file = Some(path.into());
        self
    }

    /// PEM files with the client certificate, followed by intermediate certificates, and with its private key. Only used with
    /// `https`. They are read for each connection.
    #[must_use]
    pub fn client_certificate(
        mut self,
        certificate: impl Into<PathBuf>,
        private_key: impl Into<PathBuf>,
    ) -> Self {
        self.client_certificate = Some((certificate.into(), private_key.into()));
        self
    }

    /// The timeout of a connection attempt. Default: 5 seconds.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// The timeout of a call; for a stream, of its start. Default: 30 seconds.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long a service may be silent: a call fails with [`ClientError::Unreachable`] if the service answers neither to it nor to a small question
    /// within this time. If it answers to that one, the call takes as long as it may. Default: it may be silent until the timeout of the call.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    /// How often the connection is checked, and how long the service has time for it. Default: 20 seconds.
    #[must_use]
    pub fn keep_alive(mut self, interval: Duration) -> Self {
        self.keep_alive = interval;
        self
    }

    /// The address of the service.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Connects. If the connection is lost, the next call reconnects.
    ///
    /// # Errors
    /// If the endpoint is invalid or the service cannot be reached.
    pub async fn connect(&self) -> Result<Connection, ClientError> {
        let (sent, transport) = (self.sent()?, self.transport()?);
        match transport.connect().await {
            Ok(channel) => Ok(self.connection(channel, sent)),
            Err(error) => Err(ClientError::unreachable(&self.url, &error).explained().await),
        }
    }

    /// Connects with the first call, and again with a later one if the connection is lost. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// If the endpoint is invalid.
    pub fn connect_lazily(&self) -> Result<Connection, ClientError> {
        let (sent, transport) = (self.sent()?, self.transport()?);
        Ok(self.connection(transport.connect_lazy(), sent))
    }

    fn connection(&self, channel: Channel, sent: SendToken) -> Connection {
        Connection {
            channel,
            endpoint: self.clone(),
            sent,
            patience: self.patience.map(Patience::new),
        }
    }

    /// What is sent with each call.
    fn sent(&self) -> Result<SendToken, ClientError> {
        let sent = SendToken::new(self.token.as_deref()).map_err(ClientError::Token)?;
        let is_exposed = || {
            self.url
                .parse()
                .is_ok_and(|uri| is_plaintext(&uri) && !is_loopback(&uri))
        };
        if self.token.is_some() && !self.allows_plaintext_token && is_exposed() {
            return Err(ClientError::PlaintextToken {
                url: self.url.clone(),
            });
        }
        Ok(match &self.reason {
            Some(reason) => sent.with_reason(reason),
            None => sent,
        })
    }

    fn transport(&self) -> Result<tonic::transport::Endpoint, ClientError> {
        let invalid = |problem: String| ClientError::Endpoint {
            url: self.url.clone(),
            problem,
        };
        let endpoint = tonic::transport::Endpoint::from_shared(self.url.clone())
            .map_err(|_| {
                invalid("is not an address; expected one such as http://127.0.0.1:50051".to_owned())
            })?
            .connect_timeout(self.connect_timeout)
            .timeout(self.timeout)
            .http2_keep_alive_interval(self.keep_alive)
            .keep_alive_timeout(self.keep_alive)
            .keep_alive_while_idle(true);
        let read = |kind: &str, path: &Path| {
            std::fs::read(path).map_err(|error| {
                let path = path.display();
                invalid(format!("cannot be used: cannot read the {kind} {path}: {error}"))
            })
        };
        match endpoint.uri().scheme_str() {
            Some("http") => Ok(endpoint),
            Some("https") => {
                let mut tls = ClientTlsConfig::new().trust_anchors(system_roots().roots);
                if let Some(path) = &self.ca_file {
                    tls = tls.ca_certificate(Certificate::from_pem(read("CA file", path)?));
                }
                if let Some((certificate, key)) = &self.client_certificate {
                    let certificate = read("certificate file", certificate)?;
                    tls = tls.identity(Identity::from_pem(certificate, read("key file", key)?));
                }
                let with_tls = endpoint.tls_config(tls);
                with_tls.map_err(|error| invalid(format!("cannot be reached with TLS: {error}")))
            }
            Some(_) | None => Err(invalid("must begin with http:// or https://".to_owned())),
        }
    }
}

fn is_plaintext(uri: &Uri) -> bool {
    uri.scheme_str() == Some("http")
}

/// Whether the host of an address is this machine.
fn is_loopback(uri: &Uri) -> bool {
    let host = uri.host().unwrap_or_default();
    let ip = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || ip.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The CA certificates of the system. There may be none, as in small images. Then only those of the CA file are trusted.
fn system_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The token is a secret and must not be logged.
        f.debug_struct("Endpoint")
            .field("url", &self.url)
            .field("has_token", &self.token.is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn problem(endpoint: Endpoint) -> String {
        endpoint.connect().await.map(drop).unwrap_err().to_string()
    }

    #[tokio::test]
    async fn unusable_endpoint_names_the_problem() {
        let cases = [
            (
                "ftp://localhost:1",
                "`ftp://localhost:1` must begin with http:// or https://",
            ),
            (
                "http://",
                "`http://` is not an address; expected one such as http://127.0.0.1:50051",
            ),
        ];
        for (url, expected) in cases {
            assert_eq!(problem(Endpoint::new(url)).await, expected);
        }
        let token = Endpoint::new("localhost:1").token("a\nb");
        assert_eq!(problem(token).await, "the token cannot be used");
        let missing = Endpoint::new("https://localhost:1").ca_file("/nowhere/ca.pem");
        let expected = "`https://localhost:1` cannot be used: cannot read the CA file /nowhere/ca.pem: No such file or directory (os error 2)";
        assert_eq!(problem(missing).await, expected);
        let missing =
            Endpoint::new("https://localhost:1").client_certificate("/nowhere/tls.crt", "/nowhere/tls.key");
        let expected = "`https://localhost:1` cannot be used: cannot read the certificate file /nowhere/tls.crt: No such file or directory (os error 2)";
        assert_eq!(problem(missing).await, expected);
    }

    #[tokio::test]
    async fn a_plaintext_token_stays_on_loopback() {
        let connect = async |endpoint: Endpoint| endpoint.connect().await.map(drop).unwrap_err();
        // `.invalid` has no addresses, and nothing listens on port 1.
        for other in [
            "inspector.invalid:1",
            "http://inspector.invalid",
            "http://127.0.0.1@inspector.invalid:1",
            "http://127.0.0.1.inspector.invalid:1",
            "http://localhost.invalid:1",
            "http://[::ffff:c000:201]:1",
            "http://0.0.0.0:1",
        ] {
            let endpoint = Endpoint::new(other).token("s3cret");
            let error = connect(endpoint).await;
            assert!(
                matches!(error, ClientError::PlaintextToken { .. }),
                "{other}: {error:?}"
            );
        }
        let other = Endpoint::new("inspector.invalid:1");
        let allowed = [
            other.clone(),
            other.clone().token("s3cret").allow_plaintext_token(),
            Endpoint::new("https://inspector.invalid:1").token("s3cret"),
            Endpoint::new("LocalHost:1").token("s3cret"),
            Endpoint::new("127.1.2.3:1").token("s3cret"),
            Endpoint::new("http://[::1]:1").token("s3cret"),
        ];
        for endpoint in allowed {
            let error = connect(endpoint.clone()).await;
            assert!(
                matches!(error, ClientError::Unreachable { .. }),
                "{endpoint:?}: {error:?}"
            );
        }
        let error = connect(other.token("s3cret")).await;
        let expected = "the token is not sent to http://inspector.invalid:1 in plaintext; use https://";
        assert_eq!(error.to_string(), expected);
    }

    #[tokio::test]
    async fn unreachable_service_hides_the_token() {
        let endpoint = Endpoint::new("127.0.0.1:1").token("s3cret");
        assert!(!format!("{endpoint:?}").contains("s3cret"));
        let error = endpoint.connect().await.map(drop).unwrap_err();
        assert!(matches!(error, ClientError::Unreachable { .. }), "{error:?}");
        assert_eq!(error.to_string(), "the connection to http://127.0.0.1:1 failed");
    }
}
