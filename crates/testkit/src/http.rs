//! The HTTP client of all tests.

use std::net::SocketAddr;
use std::sync::{LazyLock, mpsc};
use std::time::Duration;

use reqwest::Client;
pub use reqwest::Method;
use reqwest::header::HeaderMap;
use reqwest::redirect::Policy;
use tokio::runtime::{Builder, Runtime};

/// How long [`get`] waits for a response.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A client for plain HTTP that ignores the proxies of the environment, and does not follow redirects.
///
/// # Panics
/// If the client cannot be built, which no option of it can cause.
pub fn client() -> Client {
    // Cargo unifies features: where another package enables TLS in reqwest, a client cannot be built without a
    // default crypto provider. This fails if a test of the same process was first, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Client::builder()
        .no_proxy()
        .redirect(Policy::none())
        .build()
        .expect("a client without options")
}

/// A response.
#[derive(Debug)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// Its headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: String,
}

/// Sends a GET request, and returns the status and the body. Blocks, and may be called in asynchronous tests too.
///
/// # Errors
/// If there is no response within 30 seconds.
///
/// # Panics
/// If the runtime for requests cannot be started.
pub fn get(address: SocketAddr, path: &str) -> reqwest::Result<(u16, String)> {
    let answer = exchange(Method::GET, address, path, &[], String::new())?;
    Ok((answer.status, answer.body))
}

/// Sends a request, and does not follow redirects. Otherwise like [`get`].
///
/// # Errors
/// If there is no response within 30 seconds.
///
/// # Panics
/// If the runtime for requests cannot be started.
pub fn exchange(
    method: Method,
    address: SocketAddr,
    path: &str,
    headers: &[(&str, &str)],
    body: String,
) -> reqwest::Result<Answer> {
    // Blocking on a request inside the runtime of an asynchronous test would panic, so requests have their own.
    static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(1).enable_all().build().expect("a runtime")
    });
    static CLIENT: LazyLock<Client> = LazyLock::new(client);
    let request = CLIENT
        .request(method, format!("http://{address}{path}"))
        // A connection that stays open would take part in the shutdown of the process under test.
        .header("connection", "close")
        .body(body)
        .timeout(TIMEOUT);
    let request = headers
        .iter()
        .fold(request, |request, (name, value)| request.header(*name, *value));
    let (sender, receiver) = mpsc::sync_channel(1);
    RUNTIME.spawn(async move {
        let exchange = async {
            let response = request.send().await?;
            Ok(Answer {
                status: response.status().as_u16(),
                headers: response.headers().clone(),
                body: response.text().await?,
            })
        };
        sender.send(exchange.await)
    });
    receiver.recv().expect("every request ends")
}
