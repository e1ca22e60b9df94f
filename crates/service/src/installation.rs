//! What tells an installation apart from others, for people who are about to change it.

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use redeliver_kafka::reader::TopicClient;
use tokio::task::spawn_blocking;

use crate::host::Host;

/// The time between two attempts to ask for the id of the cluster.
const DELAY: Duration = Duration::from_secs(1);

/// The Kafka cluster and the prefix of the ids that a process uses there. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Installation {
    cluster_id: Arc<OnceLock<String>>,
    id_prefix: Arc<str>,
}

impl Installation {
    /// That of a process, which asks a broker for the id of the cluster until it is told.
    pub fn of(host: &mut Host) -> Self {
        let installation = Self {
            cluster_id: Arc::default(),
            id_prefix: host.kafka.id_prefix.as_str().into(),
        };
        let (kafka, cluster_id) = (host.kafka.clone(), installation.cluster_id.clone());
        host.tasks.spawn_background("cluster-id", async move {
            // A client that cannot be created cannot be created for anything else.
            let Ok(client) = TopicClient::new(&kafka).map(Arc::new) else {
                return Ok(());
            };
            loop {
                let asked = client.clone();
                if let Ok(Some(id)) = spawn_blocking(move || asked.cluster_id()).await {
                    let _ = cluster_id.set(id);
                    return Ok::<(), io::Error>(());
                }
                tokio::time::sleep(DELAY).await;
            }
        });
        installation
    }

    /// The id of the cluster; empty until a broker has told it.
    pub(crate) fn cluster_id(&self) -> &str {
        self.cluster_id.get().map_or("", String::as_str)
    }

    pub(crate) fn id_prefix(&self) -> &str {
        &self.id_prefix
    }
}
