//! Listeners on real sockets.

use std::net::SocketAddr;

use redeliver_runtime::listen::Listener;
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
