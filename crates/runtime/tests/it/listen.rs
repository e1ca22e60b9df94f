//! Listeners on real sockets.

use std::net::SocketAddr;

use redeliver_runtime::listen::{ListenError, Listener};
use tokio::net::TcpStream;

fn any_port() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

#[tokio::test]
async fn accepted_connections_have_nodelay_set() {
    let mut listener = Listener::bind("admin.listen", any_port()).unwrap();
    let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (accepted, _) = axum::serve::Listener::accept(&mut listener).await;
    assert!(accepted.tcp().nodelay().unwrap());
}

#[tokio::test]
async fn a_port_in_use_is_reported_with_its_field() {
    let first = Listener::bind("admin.listen", any_port()).unwrap();
    let address = first.local_addr().unwrap();
    let error = Listener::bind("scheduler.listen", address).unwrap_err();
    assert!(matches!(error, ListenError::InUse { .. }));
    let expected = format!(
        "scheduler.listen: {address} is in use by another process; choose another port, or 0 for a free one"
    );
    assert_eq!(error.to_string(), expected);
}
