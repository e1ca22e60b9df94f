//! What the programs of an installation may do in Kafka. The topics come from the specification that the programs check when
//! they start, see [`redeliver_service::topics`].

use std::collections::{BTreeMap, BTreeSet};

use clap::ValueEnum;
use redeliver_core::Pipeline;
use redeliver_core::pipeline::{TopicRole, retry_tier_group};
use redeliver_core::scheduler::SchedulerRole;
use redeliver_dlq_inspector::pattern::Patterns;
use redeliver_dlq_inspector::{group_states, ledger, redrive};
use redeliver_kafka::topology::{Role, TopologySpec};
use redeliver_runtime::config::PipelineConfig;
use redeliver_service::{control, topics, waiting_actions};

use crate::config::Config;

/// The prefix of the groups of tiers, of workers and of readers, and of all transactional ids, after `kafka.id_prefix`.
const OWN: &str = "redeliver-";
/// The prefix of the groups of tiers.
const OF_TIERS: &str = "redeliver-retry-";
/// The group id of clients that read outside of any group. librdkafka looks up its coordinator all the same.
const READER: &str = "redeliver-reader";

/// What the inspector does with dead-letter topics: it also reads their retention.
const OF_DEAD_LETTERS: [Operation; 2] = [Operation::Read, Operation::DescribeConfigs];

/// A program with the configuration of this installation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Program {
    Scheduler,
    RetryTier,
    Enricher,
    /// A worker with a handler of its own.
    Worker,
    DlqInspector,
    /// The optional program, which only reads.
    Lake,
    /// This command line.
    Redeliver,
}

/// What permissions are granted on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Resource {
    Cluster,
    Topic(Name),
    Group(Name),
    TransactionalId(Name),
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Name {
    Literal(String),
    Prefix(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Operation {
    Create,
    Describe,
    DescribeConfigs,
    Read,
    Write,
}

/// Permissions of one user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Permissions {
    granted: BTreeMap<Resource, BTreeSet<Operation>>,
    /// The beginnings of the names of instances; empty if they are not known.
    instances: Vec<String>,
    /// Patterns of dead-letter topics that no rule of Kafka can express.
    pub(crate) patterns: BTreeSet<String>,
}

impl Permissions {
    /// The permissions that these programs need together. `instances` are the beginnings of the names of their instances;
    /// empty if they are not known.
    pub(crate) fn of(programs: &[Program], config: &Config, instances: &[String]) -> Self {
        let mut permissions = Self {
            instances: instances.to_vec(),
            ..Self::default()
        };
        for program in programs {
            match program {
                Program::Scheduler => permissions.scheduler(config),
                Program::RetryTier => permissions.retry_tier(config),
                Program::Enricher => permissions.worker(config, &config.own.enricher.of(config, true)),
                Program::Worker => permissions.worker(config, &config.own.worker.of(config, false)),
                Program::DlqInspector => permissions.dlq_inspector(config),
                Program::Lake => permissions.lake(config),
                Program::Redeliver => permissions.redeliver(config),
            }
        }
        permissions
    }

    /// The resources, each with its operations. Operations that others imply are left out.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Resource, Vec<Operation>)> {
        self.granted.iter().map(|(resource, operations)| {
            // Kafka: Read, Write, Delete and Alter imply Describe.
            let implies = operations.contains(&Operation::Read) || operations.contains(&Operation::Write);
            let needed = operations
                .iter()
                .copied()
                .filter(|operation| !(implies && *operation == Operation::Describe));
            (resource, needed.collect())
        })
    }

    fn scheduler(&mut self, config: &Config) {
        let waiting: Vec<Pipeline> = topics::pipelines(config)
            .into_iter()
            .filter(|pipeline| pipeline.long_waits.is_some())
            .collect();
        if config.scheduler.apps.is_empty() && waiting.is_empty() {
            return;
        }
        self.checked(config, &topics::of_scheduler(config));
        for (topic, role) in config.scheduler.topics().topics() {
            let operations: &[Operation] = match role {
                SchedulerRole::Ingest | SchedulerRole::State | SchedulerRole::Answers => {
                    &[Operation::Read, Operation::Write]
                }
                SchedulerRole::DeadLetter | SchedulerRole::App => &[Operation::Write],
            };
            self.topic(&topic, operations);
        }
        for pipeline in &waiting {
            self.topic(&pipeline.return_topic(), &[Operation::Write]);
        }
        self.control_service(config);
        self.topic(&config.audit_topic(), &[Operation::Write]);
        self.group(config, &config.scheduler.group);
        self.transactions(config);
    }

    /// `redeliver.v1.ControlService`.
    fn control_service(&mut self, config: &Config) {
        let topic = config.control_topic();
        self.topic(&topic, &[Operation::Read, Operation::Write]);
        let writer = Name::Literal(control::transactional_id(&topic));
        self.allow(Resource::TransactionalId(writer), &[Operation::Write]);
        // A release looks up where the topics of a tier end.
        for pipeline in topics::pipelines(config) {
            for &tier in pipeline.policy.tiers() {
                self.topic(&pipeline.tier_topic(tier), &[Operation::Describe]);
            }
        }
    }

    fn retry_tier(&mut self, config: &Config) {
        let settings = &config.own.retry_tier;
        let pipelines: Vec<Pipeline> = redeliver_retry_tier::served_pipelines(config, settings)
            .iter()
            .map(|pipeline| (**pipeline).clone())
            .collect();
        if pipelines.is_empty() {
            return;
        }
        self.checked(config, &topics::of_pipelines(config, &pipelines));
        self.topic(&config.control_topic(), &[Operation::Read]);
        self.checked(config, &topics::of_waiting_actions(config));
        self.topic(
            &config.waiting_actions_topic(),
            &[Operation::Read, Operation::Write],
        );
        self.topic(&config.audit_topic(), &[Operation::Write]);
        let tiers = settings.served_tiers(config);
        for pipeline in &pipelines {
            // Records that wait in the wrong tier move to another one.
            for &tier in pipeline.policy.tiers() {
                self.topic(&pipeline.tier_topic(tier), &[Operation::Write]);
                if tiers.contains(&tier) {
                    self.topic(&pipeline.tier_topic(tier), &[Operation::Read]);
                }
            }
            // The header of a record names the topic, which may be that of a previous `return_to`.
            self.topic(&pipeline.due_topic(), &[Operation::Write]);
            if !pipeline.retired {
                self.topic(&pipeline.source, &[Operation::Write]);
            }
            self.topic(&pipeline.dead_letter_topic(), &[Operation::Write]);
            if settings.serves_leftovers() {
                let tiers = Name::Prefix(format!("{}-retry-", pipeline.name));
                self.allow(Resource::Topic(tiers), &[Operation::Read]);
            }
        }
        for tier in tiers {
            self.group(config, &retry_tier_group("", tier));
        }
        if settings.serves_leftovers() {
            let groups = Name::Prefix(config.kafka.id(OF_TIERS));
            self.allow(Resource::Group(groups), &[Operation::Read]);
        }
        self.transactions(config);
    }

    fn worker(&mut self, config: &Config, served: &[(&str, &PipelineConfig)]) {
        if served.is_empty() {
            return;
        }
        let is_served = |pipeline: &Pipeline| served.iter().any(|(name, _)| **name == *pipeline.name);
        let pipelines: Vec<Pipeline> = topics::pipelines(config).into_iter().filter(is_served).collect();
        self.checked(config, &topics::of_pipelines(config, &pipelines));
        self.topic(&config.control_topic(), &[Operation::Read]);
        self.topic(&config.status_topic(), &[Operation::Write]);
        for pipeline in &pipelines {
            for topic in pipeline.worker_topics(true) {
                self.topic(&topic, &[Operation::Read]);
            }
            for topic in pipeline.written_topics() {
                self.topic(&topic, &[Operation::Write]);
            }
            self.group(config, &pipeline.worker_group(""));
        }
        self.transactions(config);
    }

    fn dlq_inspector(&mut self, config: &Config) {
        let settings = &config.own.dlq_inspector;
        self.checked(
            config,
            &redeliver_dlq_inspector::topics(config, &settings.redrive),
        );
        self.checked(config, &topics::of_audit(config));
        self.checked(config, &topics::of_control(config));
        self.control_service(config);
        self.topic(&config.status_topic(), &[Operation::Read]);
        let redrives = settings.redrive.topic(&config.kafka);
        let actions = config.waiting_actions_topic();
        for topic in [
            ledger::TOPIC,
            group_states::TOPIC,
            &redrives,
            &actions,
            &*config.audit_topic(),
        ] {
            self.topic(topic, &[Operation::Read, Operation::Write]);
        }
        for id in [
            group_states::TRANSACTIONAL_ID.to_owned(),
            redrive::own_id(&redrives),
            waiting_actions::transactional_id(&actions),
        ] {
            let writer = Name::Literal(id);
            self.allow(Resource::TransactionalId(writer), &[Operation::Write]);
        }
        if settings.redrive.execute {
            self.redrives(config);
        }
        for source in settings.share_group_sources.values().flatten() {
            self.topic(source, &[Operation::Read]);
        }
        self.scans(config);
        self.dead_letters(config, &OF_DEAD_LETTERS);
        self.reader(config);
    }

    fn dead_letters(&mut self, config: &Config, operations: &[Operation]) {
        let patterns = &config.own.dlq_inspector.topics;
        let selected = Patterns::new(patterns);
        for topic in dead_letter_topics(config) {
            if selected.matches(&topic) {
                self.topic(&topic, operations);
            }
        }
        for pattern in patterns {
            match pattern.split_once('*') {
                None => self.topic(pattern, operations),
                Some((prefix, "")) if !prefix.is_empty() => {
                    self.allow(Resource::Topic(Name::Prefix(prefix.to_owned())), operations);
                }
                Some(_) => {
                    self.patterns.insert(pattern.clone());
                }
            }
        }
    }

    fn lake(&mut self, config: &Config) {
        for pipeline in topics::pipelines(config) {
            let outputs = pipeline.topics().into_iter();
            for (topic, _) in outputs.filter(|(_, role)| *role == TopicRole::Output) {
                self.topic(&topic, &[Operation::Read]);
            }
            let retries = Name::Prefix(format!("{}-retry-", pipeline.name));
            self.allow(Resource::Topic(retries), &[Operation::Read]);
        }
        let state = config.scheduler.topics().state;
        for topic in [ledger::TOPIC, &*config.audit_topic(), &*state] {
            self.topic(topic, &[Operation::Read]);
        }
        self.dead_letters(config, &[Operation::Read]);
        self.reader(config);
    }

    /// Executing redrives: writing to pipelines and to allowed topics.
    fn redrives(&mut self, config: &Config) {
        let settings = &config.own.dlq_inspector.redrive;
        for pipeline in topics::pipelines(config) {
            self.topic(&pipeline.return_topic(), &[Operation::Write]);
            if !pipeline.retired {
                self.topic(&pipeline.source, &[Operation::Write]);
            }
        }
        for pattern in &settings.destinations {
            match pattern.split_once('*') {
                None => self.topic(pattern, &[Operation::Write]),
                Some((prefix, "")) if !prefix.is_empty() => {
                    self.allow(
                        Resource::Topic(Name::Prefix(prefix.to_owned())),
                        &[Operation::Write],
                    );
                }
                Some(_) => {
                    self.patterns.insert(pattern.clone());
                }
            }
        }
        let group = Name::Literal(redrive::own_id(&settings.topic(&config.kafka)));
        self.allow(Resource::Group(group), &[Operation::Read]);
        self.transactions(config);
    }

    /// What the inspector reads for waiting records and traces.
    fn scans(&mut self, config: &Config) {
        let mut waits_long = false;
        // An audit asks whether they are compacted.
        let of_audited: &[Operation] = match config.own.dlq_inspector.pipeline_audit.enabled {
            true => &OF_DEAD_LETTERS,
            false => &[Operation::Read],
        };
        for pipeline in topics::pipelines(config) {
            for (topic, role) in pipeline.topics() {
                let operations = match role {
                    TopicRole::Output => of_audited,
                    _ => &[Operation::Read],
                };
                self.topic(&topic, operations);
            }
            // A retired pipeline has a source, too.
            self.topic(&pipeline.source, of_audited);
            let retries = Name::Prefix(format!("{}-retry-", pipeline.name));
            self.allow(Resource::Topic(retries), &[Operation::Read]);
            self.offsets(config, &pipeline.worker_group(""));
            // Also those of tiers that it no longer has.
            let of_tiers = Name::Prefix(config.kafka.id(OF_TIERS));
            self.allow(Resource::Group(of_tiers), &[Operation::Describe]);
            waits_long |= pipeline.long_waits.is_some();
        }
        if waits_long {
            let scheduler = config.scheduler.topics();
            self.topic(&scheduler.ingest, &[Operation::Read]);
            self.topic(&scheduler.state, &[Operation::Read]);
            self.offsets(config, &config.scheduler.group);
        }
    }

    /// To see what a group has committed.
    fn offsets(&mut self, config: &Config, group: &str) {
        let name = Name::Literal(config.kafka.id(group));
        self.allow(Resource::Group(name), &[Operation::Describe]);
    }

    /// `topics check`, `topics apply`, `topics migrate-offsets`, `status` and `audit`.
    fn redeliver(&mut self, config: &Config) {
        let spec = all_topics(config);
        self.checked(config, &spec);
        for topic in &spec.topics {
            self.topic(&topic.name, &[Operation::Create, Operation::Read]);
        }
        self.topic(&config.waiting_actions_topic(), &[Operation::Write]);
        self.allow(
            Resource::Group(Name::Prefix(config.kafka.id(OWN))),
            &[Operation::Read],
        );
        self.group(config, &config.scheduler.group);
    }

    /// Topics that a program checks, and creates if `kafka.topics.create` is set.
    fn checked(&mut self, config: &Config, spec: &TopologySpec) {
        for topic in &spec.topics {
            self.topic(&topic.name, &[Operation::Describe, Operation::DescribeConfigs]);
            if config.kafka.topics.create {
                self.topic(&topic.name, &[Operation::Create]);
            }
        }
        // For `offsets.retention.minutes`.
        self.allow(Resource::Cluster, &[Operation::DescribeConfigs]);
        self.reader(config);
    }

    fn reader(&mut self, config: &Config) {
        let name = Name::Literal(config.kafka.id(READER));
        self.allow(Resource::Group(name), &[Operation::Describe]);
    }

    /// A transactional id begins with the name of the instance, not with that of the program. It cannot change: during an
    /// upgrade, a new process must resolve the transactions of the old one and fence it.
    fn transactions(&mut self, config: &Config) {
        let mut prefixes: Vec<String> = self.instances.iter().map(|name| format!("{OWN}{name}")).collect();
        if prefixes.is_empty() {
            prefixes.push(OWN.to_owned());
        }
        for prefix in prefixes {
            let ids = Name::Prefix(config.kafka.id(&prefix));
            self.allow(Resource::TransactionalId(ids), &[Operation::Write]);
        }
    }

    fn group(&mut self, config: &Config, name: &str) {
        let name = Name::Literal(config.kafka.id(name));
        self.allow(Resource::Group(name), &[Operation::Read]);
    }

    fn topic(&mut self, name: &str, operations: &[Operation]) {
        self.allow(Resource::Topic(Name::Literal(name.to_owned())), operations);
    }

    fn allow(&mut self, resource: Resource, operations: &[Operation]) {
        self.granted.entry(resource).or_default().extend(operations);
    }
}

/// The topics that the installation needs.
pub(crate) fn all_topics(config: &Config) -> TopologySpec {
    topics::of_all(config)
        .join(topics::of_control(config))
        .join(topics::of_audit(config))
        .join(redeliver_dlq_inspector::topics(
            config,
            &config.own.dlq_inspector.redrive,
        ))
}

/// The dead-letter topics of the configuration.
fn dead_letter_topics(config: &Config) -> Vec<String> {
    let topics = topics::of_all(config).topics.into_iter();
    let dead = topics.filter(|topic| topic.role == Role::DeadLetters);
    dead.map(|topic| topic.name.to_string()).collect()
}
