//! A Redis Cluster that belongs to one test: three masters without replicas, on 127.0.0.1 and without persistence. Needs
//! `redis-server` 7 in the PATH.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::free_port;
use crate::local_redis::LocalRedis;

const MASTERS: u16 = 3;
/// The number of hash slots of every cluster.
const SLOTS: u16 = 16_384;
/// The nodes learn of each other within about a second.
const START_DEADLINE: Duration = Duration::from_secs(30);

/// One cluster; see the module.
#[derive(Debug)]
pub struct LocalRedisCluster {
    masters: Vec<LocalRedis>,
}

impl LocalRedisCluster {
    /// Starts a new, empty cluster, and waits until all of its nodes serve clients.
    ///
    /// # Errors
    /// If a node cannot be started, or the nodes do not agree in time.
    pub fn start() -> Result<Self> {
        let mut masters = Vec::new();
        let mut first: Option<(u16, u16)> = None;
        for number in 0..MASTERS {
            let bus = free_port();
            let flags = [
                ("--cluster-enabled", "yes".to_owned()),
                ("--cluster-port", bus.to_string()),
                ("--cluster-config-file", "nodes.conf".to_owned()),
            ];
            let flags = flags
                .into_iter()
                .flat_map(|(name, value)| [name.to_owned(), value]);
            let redis = LocalRedis::start_with(flags.collect())?;
            let (begin, end) = (SLOTS / MASTERS * number, SLOTS / MASTERS * (number + 1) - 1);
            let end = if number + 1 == MASTERS { SLOTS - 1 } else { end };
            redis.ask(&format!("CLUSTER SET-CONFIG-EPOCH {}", number + 1))?;
            redis.ask(&format!("CLUSTER ADDSLOTSRANGE {begin} {end}"))?;
            match first {
                Some((port, bus)) => {
                    redis.ask(&format!("CLUSTER MEET 127.0.0.1 {port} {bus}"))?;
                }
                None => first = Some((redis.port(), bus)),
            }
            masters.push(redis);
        }
        let cluster = Self { masters };
        let began = Instant::now();
        loop {
            let state = cluster.state()?;
            if state.is_none() {
                return Ok(cluster);
            }
            ensure!(
                began.elapsed() < START_DEADLINE,
                "the cluster is not up: {}",
                state.unwrap_or_default()
            );
            std::thread::park_timeout(Duration::from_millis(50));
        }
    }

    /// What a node reports that does not know the whole cluster; `None` if all of them do.
    fn state(&self) -> Result<Option<String>> {
        for master in &self.masters {
            let state = master.ask("CLUSTER INFO").context("asking for the state")?;
            let is_known = state.contains(&format!("cluster_known_nodes:{MASTERS}\r\n"));
            if !is_known || !state.contains("cluster_state:ok\r\n") {
                return Ok(Some(state));
            }
        }
        Ok(None)
    }

    /// `redis-cluster://127.0.0.1:port?node=...` with all nodes.
    pub fn url(&self) -> String {
        let nodes: Vec<String> = self
            .masters
            .iter()
            .map(|master| format!("127.0.0.1:{}", master.port()))
            .collect();
        format!("redis-cluster://{}?node={}", nodes[0], nodes[1..].join("&node="))
    }

    /// The masters, each of which has a third of the slots.
    pub fn masters(&self) -> &[LocalRedis] {
        &self.masters
    }
}
