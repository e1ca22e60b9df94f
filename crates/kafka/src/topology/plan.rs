//! The topics that would be created on an empty cluster, for clusters on which Redeliver may not create topics itself.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::admin::MissingTopic;
use super::{ActualTopic, TopologySpec};

/// The default of Kafka's `message.max.bytes`, which limits the size of a batch in topics without a limit of their own.
const BROKER_LIMIT: i64 = 1_048_588;

/// A topic to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedTopic {
    /// The name.
    pub name: Arc<str>,
    /// Whether Redeliver relies on its configuration. Other topics belong to users.
    pub is_managed: bool,
    /// The number of partitions.
    pub partitions: i32,
    /// The replication factor; -1 means the broker's default.
    pub replication: i32,
    /// The configuration.
    pub config: Vec<(&'static str, String)>,
}

/// The topics of a specification as [`super::apply`] creates them on a cluster with Kafka's defaults and none of them, in the
/// order of their creation.
#[must_use]
pub fn plan(spec: &TopologySpec) -> Vec<PlannedTopic> {
    let mut created: BTreeMap<String, ActualTopic> = BTreeMap::new();
    let mut planned = Vec::new();
    for topic in spec.stages().into_iter().flatten() {
        let missing = MissingTopic::of(topic, &created);
        let mut config: BTreeMap<String, String> = missing
            .config
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone()))
            .collect();
        config
            .entry("max.message.bytes".to_owned())
            .or_insert_with(|| BROKER_LIMIT.to_string());
        let actual = ActualTopic {
            partitions: missing.partitions,
            config,
        };
        created.insert(topic.name.to_string(), actual);
        planned.push(PlannedTopic {
            name: topic.name.clone(),
            is_managed: topic.is_managed(),
            partitions: missing.partitions,
            replication: topic.replication,
            config: missing.config,
        });
    }
    planned
}
