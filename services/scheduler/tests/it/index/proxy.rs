//! A proxy for Redis whose connections can fall silent: they pass nothing on and stay open, as if a firewall dropped their
//! state.

use std::net::SocketAddr;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub(super) struct Proxy {
    address: SocketAddr,
    silence: tokio::sync::watch::Sender<CancellationToken>,
    _listening: JoinSet<()>,
}

impl Proxy {
    pub(super) async fn to(url: &str) -> Self {
        let target = url.strip_prefix("redis://").unwrap().to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (silence, current) = tokio::sync::watch::channel(CancellationToken::new());
        let mut listening = JoinSet::new();
        listening.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((near, _)) = listener.accept().await {
                let far = TcpStream::connect(&target).await.unwrap();
                connections.spawn(forward(near, far, current.borrow().clone()));
            }
        });
        Self {
            address,
            silence,
            _listening: listening,
        }
    }

    pub(super) fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// Silences all current connections, but not new ones.
    pub(super) fn silence(&self) {
        self.silence.send_replace(CancellationToken::new()).cancel();
    }
}

async fn forward(mut near: TcpStream, mut far: TcpStream, silence: CancellationToken) {
    let is_silent = tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => false,
        () = silence.cancelled() => true,
    };
    if is_silent {
        std::future::pending::<()>().await;
    }
}
