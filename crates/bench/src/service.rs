//! Runs services within this process, as their `main` would.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use redeliver_kafka::topology;
use redeliver_runtime::Config;
use redeliver_runtime::cli::Start;
use redeliver_runtime::listen::Listener;
use redeliver_service::{Host, topics};
use tokio_util::sync::CancellationToken;

const CREATE_TIMEOUT: Duration = Duration::from_secs(10);

/// A running host.
pub(crate) struct Service {
    admin: SocketAddr,
    stop: CancellationToken,
    running: tokio::task::JoinHandle<anyhow::Result<()>>,
}

impl Service {
    /// Starts a host with this configuration and the services that `mount` adds to it.
    pub(crate) async fn start(
        config: &str,
        mount: impl AsyncFnOnce(&mut Host) -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let stop = CancellationToken::new();
        let admin = Listener::bind("admin.listen", SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let address = admin.local_addr()?;
        let start = Start::new(Arc::new(Config::from_yaml(config)?), stop.clone(), admin);
        let mut host = Host::new("bench", start);
        // Services wait for them.
        let needed = topics::of_control(&host.config).join(topics::of_waiting_actions(&host.config));
        topology::apply(&host.kafka.client(), &needed, CREATE_TIMEOUT).await?;
        mount(&mut host).await?;
        #[expect(
            clippy::disallowed_methods,
            reason = "joined below; the host supervises its own tasks"
        )]
        let running = tokio::spawn(async move { Ok(host.run().await?) });
        Ok(Self {
            admin: address,
            stop,
            running,
        })
    }

    /// Waits until all parts of the host are ready.
    pub(crate) async fn until_ready(&self, timeout: Duration) -> anyhow::Result<()> {
        let url = format!("http://{}/readyz", self.admin);
        let client = reqwest::Client::builder().no_proxy().build()?;
        let started = Instant::now();
        loop {
            let answer = client.get(&url).send().await;
            if answer.is_ok_and(|answer| answer.status().is_success()) {
                return Ok(());
            }
            ensure!(started.elapsed() < timeout, "the service is not ready");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        self.stop.cancel();
        self.running.await?
    }
}
