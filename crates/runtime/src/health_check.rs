//! The command `health` of a service: asks the running process whether it is ready. For the health checks of containers,
//! whose images contain neither a shell nor an HTTP client.

use std::net::SocketAddr;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{Request, StatusCode, header};
use futures::future;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::config::AdminConfig;
use crate::listen::reachable;
use crate::tls::connector_to_own_process;

/// Shorter than the time that container engines allow by default, so that the reason is shown.
const TIMEOUT: Duration = Duration::from_secs(5);
/// A report has a line per part of the process.
const MAX_REPORT_BYTES: usize = 1 << 20;

/// Why the state of a process is unknown.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HealthError {
    #[error("cannot start the runtime")]
    Start(#[source] std::io::Error),
    #[error("admin.listen: the port is 0, so the process listens on an unknown port; set a port")]
    AnyPort,
    #[error("no answer from the admin port {address} within {}s", TIMEOUT.as_secs())]
    Timeout { address: SocketAddr },
    #[error("cannot read {path} from the admin port {address}")]
    Read {
        path: &'static str,
        address: SocketAddr,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// The readiness of the process that runs with this configuration: the status, and the report.
pub(crate) fn check(config: &AdminConfig) -> Result<(StatusCode, String), HealthError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(HealthError::Start)?.block_on(readiness(config))
}

async fn readiness(admin: &AdminConfig) -> Result<(StatusCode, String), HealthError> {
    const PATH: &str = "/readyz";
    if admin.listen.port() == 0 {
        return Err(HealthError::AnyPort);
    }
    let address = reachable(admin.listen);
    let answer = async {
        let stream = TcpStream::connect(address).await?;
        if admin.tls.is_enabled() {
            let name = ServerName::from(address.ip());
            let stream = connector_to_own_process()?.connect(name, stream).await?;
            get(stream, address, PATH).await
        } else {
            get(stream, address, PATH).await
        }
    };
    match tokio::time::timeout(TIMEOUT, answer).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(HealthError::Read {
            path: PATH,
            address,
            source,
        }),
        Err(_) => Err(HealthError::Timeout { address }),
    }
}

async fn get(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    address: SocketAddr,
    path: &str,
) -> Result<(StatusCode, String), Box<dyn std::error::Error + Send + Sync>> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let request = Request::get(path)
        .header(header::HOST, address.to_string())
        .body(Empty::<Bytes>::new())?;
    // Takes the sender, so that the connection ends after the answer.
    let exchange = async move {
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_REPORT_BYTES)
            .collect()
            .await?;
        Ok((status, String::from_utf8_lossy(&body.to_bytes()).into_owned()))
    };
    // An error of the connection is also one of the exchange.
    let (_, answer) = future::join(connection, exchange).await;
    answer
}
