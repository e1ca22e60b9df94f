//! The section of the configuration that only the inspector reads.

mod masking;
mod pipeline_audit;
mod redrive;
mod schema_registry;
mod webhook;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use redeliver_runtime::Config;
use redeliver_runtime::config::{
    ApiConfig, AuthConfig, Findings, OwnSections, ServerTlsConfig, is_pointer, listen_address,
    pointer_problem,
};
use serde::{Deserialize, Serialize};

use crate::pattern::Patterns;

pub use self::masking::MaskingRule;
pub(crate) use self::masking::{Expression, FieldPath, Step};
pub use self::pipeline_audit::PipelineAuditConfig;
pub use self::redrive::RedriveConfig;
pub(crate) use self::schema_registry::SchemaRegistryConfig;
pub use self::webhook::WebhookConfig;
pub(crate) use self::webhook::secrets;

/// The section of the inspector.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sections {
    /// The API, the index, masking and redrives.
    pub dlq_inspector: DlqInspectorConfig,
}

impl OwnSections for Sections {
    fn check(&self, _: &Config, findings: &mut Findings<'_>) {
        findings.inside("dlq_inspector", |at| self.dlq_inspector.check(at));
    }
}

/// `dlq_inspector`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DlqInspectorConfig {
    /// The address of the gRPC API.
    #[serde(with = "listen_address")]
    pub listen: SocketAddr,
    /// See [`ApiConfig::token_file`].
    pub token_file: Option<PathBuf>,
    /// See [`ApiConfig::allow_remote`].
    pub allow_remote: bool,
    /// See [`ApiConfig::tls`].
    pub tls: ServerTlsConfig,
    /// See [`ApiConfig::auth`].
    pub auth: AuthConfig,
    /// Names of dead-letter topics. `*` matches any text.
    pub topics: Vec<String>,
    /// The topics in which the payloads are that share groups have not copied, by dead-letter topic.
    pub share_group_sources: BTreeMap<String, Vec<String>>,
    /// The directory of the index, which can be rebuilt at any time.
    pub data_dir: PathBuf,
    /// JSON pointers to the fields of JSON values that filters can use.
    pub json_fields: Vec<String>,
    /// What only callers with the scope `dead-letters:unmasked` see.
    pub masking: Vec<MaskingRule>,
    /// Whether payloads are sent only after it was recorded in the audit topic who gets them.
    pub record_disclosures: bool,
    /// Where the schemas of values are.
    pub schema_registry: Option<SchemaRegistryConfig>,
    /// Redrives, discards and restores of dead letters.
    pub redrive: RedriveConfig,
    /// Of how many jobs the newest records in pipelines are known; 0: of none, and no topics are read for it.
    pub max_job_outcomes: u32,
    /// Audits of all pipelines.
    pub pipeline_audit: PipelineAuditConfig,
    /// Who is told about problems.
    pub webhook: Option<WebhookConfig>,
}

impl Default for DlqInspectorConfig {
    fn default() -> Self {
        Self {
            listen: (Ipv4Addr::LOCALHOST, 50_051).into(),
            token_file: None,
            allow_remote: false,
            tls: ServerTlsConfig::default(),
            auth: AuthConfig::default(),
            topics: vec!["*-dlq".to_owned(), "scheduler.jobs.dlq".to_owned()],
            share_group_sources: BTreeMap::new(),
            data_dir: "./data".into(),
            json_fields: Vec::new(),
            masking: Vec::new(),
            record_disclosures: true,
            schema_registry: None,
            redrive: RedriveConfig::default(),
            max_job_outcomes: 900_000,
            pipeline_audit: PipelineAuditConfig::default(),
            webhook: None,
        }
    }
}

impl DlqInspectorConfig {
    /// The listener of the API.
    #[must_use]
    pub fn api(&self) -> ApiConfig {
        ApiConfig {
            listen: self.listen,
            token_file: self.token_file.clone(),
            allow_remote: self.allow_remote,
            tls: self.tls.clone(),
            auth: self.auth.clone(),
        }
    }

    /// Reports values that are out of range, or contradict each other.
    pub fn check(&self, findings: &mut Findings<'_>) {
        self.api().check(findings);
        for (index, pointer) in self.json_fields.iter().enumerate() {
            if !is_pointer(pointer) {
                findings.report("json_fields", pointer_problem(pointer));
            } else if self.json_fields[..index].contains(pointer) {
                findings.report("json_fields", format!("lists {pointer} twice"));
            }
        }
        if self.json_fields.len() > JSON_FIELDS {
            findings.report(
                "json_fields",
                format!(
                    "lists {} fields; the limit is {JSON_FIELDS}",
                    self.json_fields.len()
                ),
            );
        }
        if let Some(registry) = &self.schema_registry {
            findings.inside("schema_registry", |at| registry.check(at));
        }
        if !self.masking.is_empty() && !self.auth.has_scopes() {
            findings.report(
                "masking",
                "hides nothing, because every caller has all scopes; set dlq_inspector.auth",
            );
        }
        self.check_letters(findings);
        self.check_sources(findings);
        self.redrive.check(findings);
        self.pipeline_audit.check(findings);
        if let Some(webhook) = &self.webhook {
            findings.inside("webhook", |at| webhook.check(at));
        }
    }

    fn check_sources(&self, findings: &mut Findings<'_>) {
        let field = "share_group_sources";
        let patterns = Patterns::new(&self.topics);
        for (topic, sources) in &self.share_group_sources {
            if !patterns.matches(topic) {
                findings.report(
                    field,
                    format!("`{topic}` matches nothing in dlq_inspector.topics"),
                );
            }
            for source in sources {
                findings.topic(field, source);
                // Its masking rules would not apply.
                if patterns.matches(source) {
                    findings.report(
                        field,
                        format!("`{source}` matches dlq_inspector.topics, so it is a dead-letter topic"),
                    );
                }
            }
        }
        let count: usize = self.share_group_sources.values().map(Vec::len).sum();
        if count > SOURCES {
            findings.report(field, format!("lists {count} sources; the limit is {SOURCES}"));
        }
    }

    /// The part of [`Self::check`] about what other programs use: what dead letters are, and what is masked in them.
    pub fn check_letters(&self, findings: &mut Findings<'_>) {
        masking::check(&self.masking, findings);
        for topic in &self.topics {
            if !redeliver_core::pipeline::is_topic_name(&topic.replace('*', "x")) {
                findings.report(
                    "topics",
                    format!("`{topic}` is not a topic name or a pattern such as *-dlq"),
                );
            }
        }
    }
}

/// Maximum number of topics in `dlq_inspector.share_group_sources`.
const SOURCES: usize = 1_000;
/// Maximum number of `dlq_inspector.json_fields`.
const JSON_FIELDS: usize = 32;
