//! A Redis Cluster that belongs to one test: three masters, on 127.0.0.1 and without persistence. Each may have a replica, which takes
//! over when its master is killed. Needs `redis-server` 7 in the PATH.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::free_port;
use crate::local_redis::LocalRedis;

const MASTERS: u16 = 3;
/// The number of hash slots of every cluster.
const SLOTS: u16 = 16_384;
/// The nodes learn of each other within about a second, and a replica takes over within a few.
const DEADLINE: Duration = Duration::from_secs(60);
/// How long a node can be silent before the others take it for dead.
const NODE_TIMEOUT_MS: u16 = 2_000;
/// How many keys of a slot move at once.
const MOVED_KEYS: u16 = 20;

/// One cluster; see the module.
#[derive(Debug)]
pub struct LocalRedisCluster {
    masters: Vec<LocalRedis>,
    /// None, or one of each master.
    replicas: Vec<LocalRedis>,
}

impl LocalRedisCluster {
    /// Starts a new, empty cluster without replicas, and waits until all of its nodes serve clients.
    ///
    /// # Errors
    /// If a node cannot be started, or the nodes do not agree in time.
    pub fn start() -> Result<Self> {
        let mut masters: Vec<LocalRedis> = Vec::new();
        for number in 0..MASTERS {
            let redis = start_node()?;
            let (begin, end) = (SLOTS / MASTERS * number, SLOTS / MASTERS * (number + 1) - 1);
            let end = if number + 1 == MASTERS { SLOTS - 1 } else { end };
            redis.ask(&format!("CLUSTER SET-CONFIG-EPOCH {}", number + 1))?;
            redis.ask(&format!("CLUSTER ADDSLOTSRANGE {begin} {end}"))?;
            join(&redis, masters.first())?;
            masters.push(redis);
        }
        let cluster = Self {
            masters,
            replicas: Vec::new(),
        };
        cluster.until_up()?;
        Ok(cluster)
    }

    /// As [`LocalRedisCluster::start`], with a replica of each master.
    ///
    /// # Errors
    /// As [`LocalRedisCluster::start`].
    pub fn start_with_replicas() -> Result<Self> {
        let mut cluster = Self::start()?;
        for _ in 0..MASTERS {
            let redis = start_node()?;
            join(&redis, cluster.masters.first())?;
            cluster.replicas.push(redis);
        }
        cluster.until_up()?;
        for (master, replica) in cluster.masters.iter().zip(&cluster.replicas) {
            replica.ask(&format!("CLUSTER REPLICATE {}", id(master)?))?;
        }
        for replica in &cluster.replicas {
            until_synchronized(replica)?;
        }
        Ok(cluster)
    }

    /// Waits until every node knows all others, and all slots are served.
    fn until_up(&self) -> Result<()> {
        let known = format!(
            "cluster_known_nodes:{}\r\n",
            self.masters.len() + self.replicas.len()
        );
        until("the cluster is up", || {
            for node in self.masters.iter().chain(&self.replicas) {
                let state = node.ask("CLUSTER INFO").context("asking for the state")?;
                if !state.contains(&known) || !state.contains("cluster_state:ok\r\n") {
                    return Ok(Err(state));
                }
            }
            Ok(Ok(()))
        })
    }

    /// Kills a master, waits until its replica has taken over, and starts the killed node again, which becomes the replica. Writes that
    /// the replica had not received are lost.
    ///
    /// # Errors
    /// If the replica does not take over in time.
    pub fn fail_over(&mut self, master: usize) -> Result<()> {
        self.masters[master].kill_9();
        let replica = &self.replicas[master];
        until("the replica takes over", || {
            let role = replica.ask("ROLE")?;
            Ok(if role.contains("\r\nmaster\r\n") {
                Ok(())
            } else {
                Err(role)
            })
        })?;
        std::mem::swap(&mut self.masters[master], &mut self.replicas[master]);
        let previous = &mut self.replicas[master];
        previous.start_again()?;
        until_synchronized(previous)?;
        self.until_up()
    }

    /// Moves the slot of a key to the next master, some keys at a time. Calls `between` after each of these steps.
    ///
    /// # Errors
    /// If a node refuses it.
    pub fn move_slot_of(&self, key: &str, mut between: impl FnMut()) -> Result<()> {
        let slot = self.masters[0].ask(&format!("CLUSTER KEYSLOT {key}"))?;
        let slot: u16 = slot
            .trim_start_matches(':')
            .lines()
            .next()
            .unwrap_or_default()
            .parse()?;
        let mut owner = None;
        for (number, master) in self.masters.iter().enumerate() {
            if serves(&master.ask("CLUSTER NODES")?, slot) {
                owner = Some(number);
            }
        }
        let owner = owner.with_context(|| format!("no master serves slot {slot}"))?;
        let (from, to) = (
            &self.masters[owner],
            &self.masters[(owner + 1) % self.masters.len()],
        );
        let (from_id, to_id) = (id(from)?, id(to)?);
        to.ask(&format!("CLUSTER SETSLOT {slot} IMPORTING {from_id}"))?;
        from.ask(&format!("CLUSTER SETSLOT {slot} MIGRATING {to_id}"))?;
        loop {
            let keys = from.ask_for_bytes(&format!("CLUSTER GETKEYSINSLOT {slot} {MOVED_KEYS}"))?;
            let keys: Vec<String> = texts(&keys)?.into_iter().map(quoted).collect();
            if keys.is_empty() {
                break;
            }
            let timeout = DEADLINE.as_millis();
            from.ask(&format!(
                "MIGRATE 127.0.0.1 {} \"\" 0 {timeout} KEYS {}",
                to.port(),
                keys.join(" ")
            ))?;
            between();
        }
        for node in [to, from].into_iter().chain(&self.masters) {
            node.ask(&format!("CLUSTER SETSLOT {slot} NODE {to_id}"))?;
        }
        Ok(())
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

/// Starts a node that knows no other one.
fn start_node() -> Result<LocalRedis> {
    let flags = [
        ("--cluster-enabled", "yes".to_owned()),
        ("--cluster-port", free_port().to_string()),
        ("--cluster-config-file", "nodes.conf".to_owned()),
        ("--cluster-node-timeout", NODE_TIMEOUT_MS.to_string()),
    ];
    let flags = flags
        .into_iter()
        .flat_map(|(name, value)| [name.to_owned(), value]);
    LocalRedis::start_with(flags.collect())
}

/// Makes a node a member of the cluster of another one, if there is one.
fn join(node: &LocalRedis, first: Option<&LocalRedis>) -> Result<()> {
    let Some(first) = first else {
        return Ok(());
    };
    let bus = first.ask("CONFIG GET cluster-port")?;
    let bus = bus.lines().nth(4).context("the port of the cluster bus")?;
    node.ask(&format!("CLUSTER MEET 127.0.0.1 {} {bus}", first.port()))?;
    Ok(())
}

/// The texts of a reply that is an array of them.
fn texts(reply: &[u8]) -> Result<Vec<&[u8]>> {
    let (count, mut rest) = number(reply, b'*')?;
    let mut texts = Vec::new();
    for _ in 0..count {
        let (length, text) = number(rest, b'$')?;
        let (text, end) = text.split_at_checked(length).context("a text is cut")?;
        texts.push(text);
        rest = end.strip_prefix(b"\r\n").context("the end of a text")?;
    }
    Ok(texts)
}

/// The number in a line of a reply that begins with `kind`, and what follows the line.
fn number(reply: &[u8], kind: u8) -> Result<(usize, &[u8])> {
    let reply = reply.strip_prefix(&[kind]).context("another kind of reply")?;
    let end = reply
        .iter()
        .position(|byte| *byte == b'\r')
        .context("a line is cut")?;
    let (number, rest) = reply.split_at(end);
    Ok((std::str::from_utf8(number)?.parse()?, &rest[2..]))
}

/// A text as an argument of a command.
fn quoted(text: &[u8]) -> String {
    let bytes: String = text.iter().map(|byte| format!("\\x{byte:02x}")).collect();
    format!("\"{bytes}\"")
}

/// The id of a node.
fn id(node: &LocalRedis) -> Result<String> {
    let reply = node.ask("CLUSTER MYID")?;
    Ok(reply.lines().nth(1).context("the id of a node")?.to_owned())
}

/// Whether a node serves a slot, by its reply to `CLUSTER NODES`.
fn serves(nodes: &str, slot: u16) -> bool {
    let own = nodes.lines().find(|line| line.contains("myself"));
    own.into_iter()
        .flat_map(|line| line.split(' ').skip(8))
        .any(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            match (first.parse::<u16>(), last.parse::<u16>()) {
                (Ok(first), Ok(last)) => (first..=last).contains(&slot),
                // A slot that moves.
                _ => false,
            }
        })
}

/// Waits until a replica has the data of its master.
fn until_synchronized(replica: &LocalRedis) -> Result<()> {
    until("the replica has the data of its master", || {
        let state = replica.ask("INFO replication")?;
        let is_up = state.contains("role:slave\r\n") && state.contains("master_link_status:up\r\n");
        Ok(if is_up { Ok(()) } else { Err(state) })
    })
}

/// Waits until a condition is true; it returns what it sees instead.
fn until(what: &str, mut condition: impl FnMut() -> Result<Result<(), String>>) -> Result<()> {
    let began = Instant::now();
    while let Err(seen) = condition()? {
        ensure!(began.elapsed() < DEADLINE, "not in time: {what}: {seen}");
        std::thread::park_timeout(Duration::from_millis(50));
    }
    Ok(())
}
