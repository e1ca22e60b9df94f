//! Runs services within this process, as their `main` would.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use redeliver_runtime::Config;
use redeliver_runtime::cli::Start;
use redeliver_runtime::listen::Listener;
use redeliver_runtime::telemetry::Tracer;
use redeliver_service::Host;
use tokio_util::sync::CancellationToken;

/// A running host.
pub(crate) struct Service {
    stop: CancellationToken,
    running: tokio::task::JoinHandle<anyhow::Result<()>>,
}

impl Service {
    /// Starts a host with this configuration and the services that `mount` adds to it.
    pub(crate) fn start(
        config: &str,
        mount: impl FnOnce(&mut Host) -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let stop = CancellationToken::new();
        let start = Start {
            config: Arc::new(Config::from_yaml(config)?),
            shutdown: stop.clone(),
            tracer: Tracer::off(),
            admin: Listener::bind("admin.listen", SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?,
        };
        let mut host = Host::new("bench", start);
        mount(&mut host)?;
        #[expect(
            clippy::disallowed_methods,
            reason = "joined below; the host supervises its own tasks"
        )]
        let running = tokio::spawn(async move { Ok(host.run().await?) });
        Ok(Self { stop, running })
    }

    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        self.stop.cancel();
        self.running.await?
    }
}
