//! Whether a server that cannot be reached speaks TLS although its address begins with `http://`, or the other way round. The
//! error of the connection does not tell: it depends on who notices first, and is something like `frame with invalid size` or
//! `broken pipe`.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::transport::Uri;

/// The server has just been reached, or could not be. Either does not take long to find out.
const TIMEOUT: Duration = Duration::from_secs(2);

/// What begins a connection of HTTP/2; see RFC 9113, section 3.4.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The address has the wrong scheme.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WrongScheme {
    #[error("the server speaks TLS; use https://{0}")]
    ServerHasTls(String),
    #[error("the server does not speak TLS; use http://{0}, or configure TLS on the server")]
    ServerHasNoTls(String),
}

/// Connects to the server of a URL once more, and reads which protocol it answers with. `None` if the scheme is right, or the
/// answer proves nothing.
pub(crate) async fn check(url: &str) -> Option<WrongScheme> {
    let uri: Uri = url.parse().ok()?;
    let uses_tls = match uri.scheme_str()? {
        "http" => false,
        "https" => true,
        _ => return None,
    };
    // Not the authority, which may contain a password.
    let host = uri.host()?;
    let port = uri.port_u16();
    let server = format!("{host}:{}", port.unwrap_or(if uses_tls { 443 } else { 80 }));
    let answer = tokio::time::timeout(TIMEOUT, answer(&server)).await.ok()?.ok()?;
    let address = port.map_or_else(|| host.to_owned(), |_| server.clone());
    match (uses_tls, speaks_tls(answer)?) {
        (false, true) => Some(WrongScheme::ServerHasTls(address)),
        (true, false) => Some(WrongScheme::ServerHasNoTls(address)),
        _ => None,
    }
}

/// The first bytes of the answer to a client without TLS.
async fn answer(host: &str) -> std::io::Result<[u8; 4]> {
    let mut stream = TcpStream::connect(host).await?;
    stream.write_all(PREFACE).await?;
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).await?;
    Ok(answer)
}

/// `None` for something other than the two protocols, such as the HTTP/1 answer of a proxy, which may come from either.
fn speaks_tls(answer: [u8; 4]) -> Option<bool> {
    match answer {
        // A TLS alert: its content type, and the major version.
        [21, 3, ..] => Some(true),
        // A SETTINGS frame of HTTP/2: the first byte of its length, and its type.
        [0, _, _, 4] => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn foreign_answer_proves_nothing() {
        assert_eq!(speaks_tls([21, 3, 3, 0]), Some(true));
        assert_eq!(speaks_tls([0, 0, 24, 4]), Some(false));
        assert_eq!(speaks_tls(*b"HTTP"), None);
        assert_eq!(speaks_tls([0, 0, 8, 7]), None);
    }

    #[tokio::test]
    async fn password_in_address_is_hidden() {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = server.local_addr().unwrap().to_string();
        let alert = async {
            let (mut stream, _) = server.accept().await.unwrap();
            let mut preface = vec![0; PREFACE.len()];
            stream.read_exact(&mut preface).await.unwrap();
            stream.write_all(&[21, 3, 3, 0]).await.unwrap();
        };
        let url = format!("http://user:hunter2@{address}");
        let (found, ()) = tokio::join!(check(&url), alert);
        assert_eq!(found, Some(WrongScheme::ServerHasTls(address)));
    }

    #[tokio::test]
    async fn unreachable_server_proves_nothing() {
        for url in [
            "http://127.0.0.1:1",
            "https://127.0.0.1:1",
            "ftp://127.0.0.1",
            "/",
        ] {
            assert_eq!(check(url).await, None, "{url}");
        }
    }
}
