//! An index in a real Redis with a unique prefix, and a connection to that Redis without the index.

use std::fmt::Display;

use fred::prelude::{Client, ClientLike as _, Config, Value};
use fred::types::{ClusterHash, CustomCommand};
use redeliver_kafka::TopicId;
use redeliver_runtime::config::Url;
use redeliver_runtime::tasks::Tasks;
use redeliver_scheduler::index::Installation;
use redeliver_scheduler::index::redis::{ConnectError, RedisConfig, RedisIndex};
use redeliver_testkit::{redis_url, unique};

pub(crate) struct OwnRedis {
    pub(crate) index: RedisIndex,
    pub(crate) raw: Raw,
    pub(crate) config: RedisConfig,
    /// They keep the connection.
    _tasks: Tasks,
}

pub(crate) fn config(url: &str) -> RedisConfig {
    RedisConfig {
        url: Url::new(url),
        prefix: Some(unique("index")),
        ..RedisConfig::default()
    }
}

/// A key of a shard of an index with this prefix.
pub(crate) fn key(prefix: &str, shard: impl Display, name: &str) -> String {
    format!("{prefix}:v2:{{{shard}}}:{name}")
}

pub(crate) async fn connect(config: &RedisConfig) -> Result<(RedisIndex, Tasks), ConnectError> {
    connect_as(config, installation()).await
}

pub(crate) async fn connect_as(
    config: &RedisConfig,
    installation: Installation,
) -> Result<(RedisIndex, Tasks), ConnectError> {
    let mut tasks = Tasks::new(Default::default());
    let prefix = config.prefix.as_deref().unwrap();
    let index = RedisIndex::connect(config, prefix, installation, &mut tasks).await?;
    Ok((index, tasks))
}

pub(crate) fn installation() -> Installation {
    Installation {
        cluster: "cluster".to_owned(),
        topic: "state".into(),
        topic_id: Some(TopicId::from_bits(1)),
    }
}

impl OwnRedis {
    /// On the shared Redis.
    pub(crate) async fn connect() -> Self {
        Self::connect_to(&redis_url()).await
    }

    pub(crate) async fn connect_to(url: &str) -> Self {
        let config = config(url);
        let (index, tasks) = connect(&config).await.unwrap();
        Self {
            index,
            raw: Raw::connect(url).await,
            config,
            _tasks: tasks,
        }
    }

    pub(crate) fn prefix(&self) -> &str {
        self.config.prefix.as_deref().unwrap()
    }

    /// A key of a shard.
    pub(crate) fn key(&self, shard: i32, name: &str) -> String {
        key(self.prefix(), shard, name)
    }

    /// All keys of the prefix.
    pub(crate) async fn keys(&self) -> Vec<Value> {
        self.keys_of(&format!("{}:", self.prefix())).await
    }

    /// All keys that begin with this text.
    pub(crate) async fn keys_of(&self, prefix: &str) -> Vec<Value> {
        let pattern = format!("{prefix}*");
        let (mut keys, mut cursor) = (Vec::new(), "0".to_owned());
        loop {
            let page = self
                .raw
                .call(&["SCAN", &cursor, "MATCH", &pattern, "COUNT", "1000"])
                .await;
            let mut page = page.into_array().into_iter();
            cursor = page.next().unwrap().into_string().unwrap();
            keys.extend(page.next().unwrap().into_array());
            if cursor == "0" {
                return keys;
            }
        }
    }

    /// The names of the keys of a shard, without the common prefix, if they are text.
    pub(crate) async fn names(&self, shard: i32) -> Vec<String> {
        let prefix = self.key(shard, "");
        let names = self.keys().await.into_iter();
        let mut names: Vec<String> = names
            .map(|key| String::from_utf8_lossy(key.as_bytes().unwrap()).into_owned())
            .filter_map(|key| key.strip_prefix(&prefix).map(ToOwned::to_owned))
            .collect();
        names.sort_unstable();
        names
    }

    /// Removes all keys of the prefix.
    pub(crate) async fn remove(&self) {
        for some in self.keys().await.chunks(1000) {
            let mut command = vec![Value::from("UNLINK")];
            command.extend_from_slice(some);
            self.raw.call_with(command).await;
        }
    }
}

/// A connection for any command.
pub(crate) struct Raw(Client);

impl Raw {
    pub(crate) async fn connect(url: &str) -> Self {
        let client = Client::new(Config::from_url(url).unwrap(), None, None, None);
        client.init().await.unwrap();
        Self(client)
    }

    pub(crate) async fn call(&self, command: &[&str]) -> Value {
        self.call_with(command.iter().map(|word| Value::from(*word)).collect())
            .await
    }

    /// The number of scheduled jobs in a shard of an index with this prefix.
    pub(crate) async fn scheduled(&self, prefix: &str, shard: i32) -> u64 {
        let sizes = self.call(&["HVALS", &key(prefix, shard, "sizes")]).await;
        sizes.into_array().iter().map(|size| size.as_u64().unwrap()).sum()
    }

    pub(crate) async fn call_with(&self, mut command: Vec<Value>) -> Value {
        let name = command.remove(0).into_string().unwrap();
        let kind = CustomCommand::new(name.as_str(), ClusterHash::Random, false);
        self.0.custom(kind, command).await.unwrap()
    }
}
