//! Permissions as a policy of AWS IAM, for Amazon MSK. The actions are those of the service authorization reference, "Apache
//! Kafka APIs for Amazon MSK clusters"; they do not imply each other.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde_json::json;

use super::permissions::{Name, Operation, Permissions, Resource};
use crate::output::Json;

/// The ARN of a cluster: `arn:aws:kafka:REGION:ACCOUNT:cluster/NAME/UUID`.
#[derive(Clone)]
pub(super) struct ClusterArn {
    /// Up to the type of the resource.
    prefix: String,
    /// `NAME/UUID`
    name: String,
}

impl ClusterArn {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let is_plain = |part: &str| {
            !part.is_empty()
                && part
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "-_:".contains(c))
        };
        let parts: Vec<&str> = text.split('/').collect();
        if let [start, name, id] = parts[..]
            && let Some(prefix) = start.strip_suffix(":cluster")
            && prefix.starts_with("arn:")
            && prefix.contains(":kafka:")
            && [prefix, name, id].into_iter().all(is_plain)
        {
            return Ok(Self {
                prefix: prefix.to_owned(),
                name: format!("{name}/{id}"),
            });
        }
        Err("write the ARN of the cluster: arn:aws:kafka:REGION:ACCOUNT:cluster/NAME/UUID".to_owned())
    }

    fn of(&self, resource: &Resource) -> String {
        let (kind, name) = match resource {
            Resource::Cluster => return format!("{}:cluster/{}", self.prefix, self.name),
            Resource::Topic(name) => ("topic", name),
            Resource::Group(name) => ("group", name),
            Resource::TransactionalId(name) => ("transactional-id", name),
        };
        let (name, rest) = match name {
            Name::Literal(name) => (name, ""),
            Name::Prefix(name) => (name, "*"),
        };
        format!("{}:{kind}/{}/{name}{rest}", self.prefix, self.name)
    }
}

fn actions(resource: &Resource, operation: Operation) -> &'static [&'static str] {
    match (resource, operation) {
        (Resource::Cluster, Operation::DescribeConfigs) => &["DescribeClusterDynamicConfiguration"],
        (Resource::Cluster, _) => &["DescribeCluster"],
        (Resource::Topic(_), Operation::Create) => &["CreateTopic"],
        (Resource::Topic(_), Operation::Describe) => &["DescribeTopic"],
        (Resource::Topic(_), Operation::DescribeConfigs) => &["DescribeTopicDynamicConfiguration"],
        (Resource::Topic(_), Operation::Read) => &["DescribeTopic", "ReadData"],
        (Resource::Topic(_), Operation::Write) => &["DescribeTopic", "WriteData"],
        (Resource::Group(_), Operation::Read) => &["AlterGroup", "DescribeGroup"],
        (Resource::Group(_), _) => &["DescribeGroup"],
        (Resource::TransactionalId(_), Operation::Write) => {
            &["AlterTransactionalId", "DescribeTransactionalId"]
        }
        (Resource::TransactionalId(_), _) => &["DescribeTransactionalId"],
    }
}

/// A policy document.
pub(super) struct Policy<'a> {
    pub(super) permissions: &'a Permissions,
    pub(super) cluster: &'a ClusterArn,
}

impl Policy<'_> {
    fn document(&self) -> Json {
        let mut granted: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let mut allow = |resource: &Resource, names: &[&str]| {
            let actions = names.iter().map(|name| format!("kafka-cluster:{name}"));
            granted
                .entry(self.cluster.of(resource))
                .or_default()
                .extend(actions);
        };
        allow(&Resource::Cluster, &["Connect"]);
        for (resource, operations) in self.permissions.iter() {
            for operation in operations {
                allow(resource, actions(resource, operation));
                if matches!((resource, operation), (Resource::Topic(_), Operation::Write)) {
                    // All producers are idempotent.
                    allow(&Resource::Cluster, &["WriteDataIdempotently"]);
                }
            }
        }
        // The size of a policy is limited, so resources with the same actions share a statement.
        let mut statements: BTreeMap<BTreeSet<String>, Vec<String>> = BTreeMap::new();
        for (resource, actions) in granted {
            statements.entry(actions).or_default().push(resource);
        }
        let statements: Vec<Json> = statements
            .into_iter()
            .map(
                |(actions, resources)| json!({ "Effect": "Allow", "Action": actions, "Resource": resources }),
            )
            .collect();
        json!({ "Version": "2012-10-17", "Statement": statements })
    }
}

impl fmt::Display for Policy<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#}", self.document())
    }
}

#[cfg(test)]
mod tests {
    use super::super::permissions::Program;
    use super::*;
    use crate::config::Config;

    const ARN: &str = "arn:aws:kafka:eu-central-1:123456789012:cluster/main/0a-1";

    #[test]
    fn only_cluster_arns_are_accepted() {
        assert!(ClusterArn::parse(ARN).is_ok());
        for text in [
            "",
            "main",
            "arn:aws:kafka:eu-central-1:123456789012:topic/main/0a-1",
            "arn:aws:kafka:eu-central-1:123456789012:cluster/main",
            "arn:aws:kafka:eu-central-1:123456789012:cluster/main/*",
            "arn:aws:iam::123456789012:cluster/main/0a-1",
        ] {
            assert!(ClusterArn::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn policy_grants_exactly_the_needed() {
        let config = "kafka: { id_prefix: pay- }\n\
                      pipelines: { a: { output: b, retry: { tiers: [5s] }, http: { url: 'http://e/' } } }\n\
                      retry_tier: { leftovers: false }";
        let config = Config::from_yaml(config).unwrap();
        let permissions = Permissions::of(&[Program::Enricher], &config, &[]);
        let policy = Policy {
            permissions: &permissions,
            cluster: &ClusterArn::parse(ARN).unwrap(),
        };
        let document = policy.document();
        let of = |resource: &str| -> Vec<&str> {
            let statements = document["Statement"].as_array().unwrap();
            let resource = format!("arn:aws:kafka:eu-central-1:123456789012:{resource}");
            let found: Vec<&Json> = statements
                .iter()
                .filter(|it| it["Resource"].as_array().unwrap().contains(&json!(resource)))
                .collect();
            assert!(found.len() <= 1, "{found:?}");
            let actions = found
                .first()
                .map(|it| it["Action"].as_array().unwrap().as_slice());
            let names = actions
                .unwrap_or_default()
                .iter()
                .map(|name| name.as_str().unwrap());
            names
                .map(|name| name.strip_prefix("kafka-cluster:").unwrap())
                .collect()
        };
        assert_eq!(
            of("cluster/main/0a-1"),
            [
                "Connect",
                "DescribeClusterDynamicConfiguration",
                "WriteDataIdempotently"
            ]
        );
        assert_eq!(
            of("topic/main/0a-1/a"),
            ["DescribeTopic", "DescribeTopicDynamicConfiguration", "ReadData"]
        );
        assert_eq!(
            of("topic/main/0a-1/b"),
            ["DescribeTopic", "DescribeTopicDynamicConfiguration", "WriteData"]
        );
        assert_eq!(
            of("transactional-id/main/0a-1/pay-redeliver-*"),
            ["AlterTransactionalId", "DescribeTransactionalId"]
        );
        assert_eq!(of("group/main/0a-1/pay-redeliver-reader"), ["DescribeGroup"]);
        assert_eq!(of("topic/main/0a-1/other"), [""; 0]);
    }
}
