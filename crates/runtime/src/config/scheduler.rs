//! `scheduler`: applications, API, topics, and limits of jobs.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use redeliver_core::token_bucket::RATES;
use redeliver_core::{HumanDuration, SchedulerTopics};
use serde::{Deserialize, Serialize};

use super::api::ApiConfig;
use super::auth::AuthConfig;
use super::error::Findings;
use super::limits::ApiLimitsConfig;
use super::listen_address;
use super::process::check_hosts;
use super::tls::ServerTlsConfig;

/// `scheduler`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SchedulerConfig {
    /// The applications that may schedule jobs, by name.
    pub apps: BTreeMap<String, AppConfig>,
    /// The address of the gRPC and REST API.
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
    /// The values of the header `Host` that are accepted, without port. `None`: see [`SchedulerConfig::accepted_hosts`].
    pub allowed_hosts: Option<Vec<String>>,
    /// What clients of the API may use.
    pub limits: ApiLimitsConfig,
    /// The scheduler's own topics.
    pub topics: JobTopicsConfig,
    /// The consumer group of all schedulers.
    pub group: String,
    /// The IANA time zone of times without an offset.
    pub default_time_zone: String,
    /// How far in the future a job may be due.
    pub max_ahead: HumanDuration,
    /// Maximum size of a job's data, key and headers together, in bytes.
    pub max_data: u64,
    /// How long an idempotency key is remembered after its newest request was accepted.
    pub idempotency_window: HumanDuration,
    /// How long a dispatched, cancelled or expired job can be queried.
    pub keep_ended: HumanDuration,
    /// Maximum ended jobs that the index keeps per partition.
    pub max_ended: u32,
    /// Whether jobs are cancelled and rescheduled only after it was recorded in the audit topic by whom.
    pub record_job_changes: bool,
    /// How long before its due time a job is loaded into memory.
    pub window: HumanDuration,
    /// Maximum size of jobs in memory per partition, in bytes. Applications share it.
    pub window_bytes: u64,
}

/// `scheduler.apps.<name>`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AppConfig {
    /// The topic to which due jobs are dispatched.
    pub topic: String,
    /// How many jobs are dispatched per second at most, by all schedulers together. `None`: as many as are due.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// How many of its jobs may wait at most. `None`: as many as Redis has memory for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_waiting: Option<u64>,
    /// Whether its jobs are accepted, and none is dispatched.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
}

/// `scheduler.topics`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JobTopicsConfig {
    /// Requests: jobs and other commands.
    pub ingest: String,
    /// The current state of each job.
    pub state: String,
    /// Rejected commands.
    pub dlq: String,
    /// Results of commands, for callers that wait for them.
    pub answers: String,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            apps: BTreeMap::new(),
            listen: (Ipv4Addr::LOCALHOST, 50_052).into(),
            token_file: None,
            allow_remote: false,
            tls: ServerTlsConfig::default(),
            auth: AuthConfig::default(),
            allowed_hosts: None,
            limits: ApiLimitsConfig::default(),
            topics: JobTopicsConfig::default(),
            group: "redeliver-scheduler".to_owned(),
            default_time_zone: "UTC".to_owned(),
            max_ahead: HumanDuration::from_secs(3_650 * 86_400),
            max_data: 900_000,
            idempotency_window: HumanDuration::from_secs(86_400),
            keep_ended: HumanDuration::from_secs(86_400),
            max_ended: 50_000,
            record_job_changes: true,
            window: HumanDuration::from_secs(10),
            window_bytes: 64 << 20,
        }
    }
}

impl Default for JobTopicsConfig {
    fn default() -> Self {
        let SchedulerTopics {
            ingest,
            state,
            dlq,
            answers,
            apps: _,
        } = SchedulerTopics::default();
        Self {
            ingest: ingest.as_ref().to_owned(),
            state: state.as_ref().to_owned(),
            dlq: dlq.as_ref().to_owned(),
            answers: answers.as_ref().to_owned(),
        }
    }
}

impl JobTopicsConfig {
    /// All topics with their configuration keys.
    pub(super) fn by_key(&self) -> [(&'static str, &str); 4] {
        [
            ("ingest", self.ingest.as_str()),
            ("state", self.state.as_str()),
            ("dlq", self.dlq.as_str()),
            ("answers", self.answers.as_str()),
        ]
    }
}

impl SchedulerConfig {
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

    /// The hosts that requests may name, in lower case. `None`: any.
    ///
    /// A web page can let a browser send requests to a server on the same machine, after its own name in the DNS resolves to
    /// 127.0.0.1. Such requests name the host of the page. So a server that listens on loopback without authentication accepts
    /// only names of this machine by default.
    #[must_use]
    pub fn accepted_hosts(&self) -> Option<Vec<String>> {
        match &self.allowed_hosts {
            Some(hosts) => Some(hosts.iter().map(|host| host.to_ascii_lowercase()).collect()),
            None if self.listen.ip().is_loopback() && !self.api().is_authenticated() => {
                let own = self.listen.ip().to_string();
                Some(vec!["localhost".into(), "127.0.0.1".into(), "::1".into(), own])
            }
            None => None,
        }
    }

    /// The scheduler's own topics and those of its applications, without duplicates.
    #[must_use]
    pub fn topics(&self) -> SchedulerTopics {
        let mut apps: Vec<_> = self.apps.values().map(|app| app.topic.as_str()).collect();
        apps.sort_unstable();
        apps.dedup();
        SchedulerTopics {
            ingest: self.topics.ingest.as_str().into(),
            state: self.topics.state.as_str().into(),
            dlq: self.topics.dlq.as_str().into(),
            answers: self.topics.answers.as_str().into(),
            apps: apps.into_iter().map(Into::into).collect(),
        }
    }

    /// The time zone of times without an offset. `None` if it is unknown, which loading rejects.
    #[must_use]
    pub fn time_zone(&self) -> Option<jiff::tz::TimeZone> {
        jiff::tz::TimeZone::get(&self.default_time_zone).ok()
    }

    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        self.api().check(findings);
        findings.inside("limits", |at| self.limits.check(at));
        if self.allowed_hosts.as_ref().is_some_and(Vec::is_empty) {
            findings.report("allowed_hosts", "is empty; list at least one host, or omit it");
        }
        check_hosts(self.allowed_hosts.as_deref().unwrap_or_default(), findings);
        findings.inside("apps", |at| {
            for (name, app) in &self.apps {
                if let Err(problem) = check_app_name(name) {
                    at.report(name, problem);
                }
                at.inside(name, |at| {
                    at.topic("topic", &app.topic);
                    if let Some(rate) = app.rate {
                        at.range("rate", rate, RATES);
                    }
                    if let Some(max_waiting) = app.max_waiting {
                        at.range("max_waiting", max_waiting, 1..=1_000_000_000_000);
                    }
                });
            }
        });
        findings.inside("topics", |at| self.topics.check(at));
        if self.group.is_empty() || self.group.len() > 249 || self.group.contains(char::is_control) {
            findings.report(
                "group",
                "is not a valid consumer group: write 1 to 249 characters",
            );
        }
        if self.time_zone().is_none() {
            let problem = format!(
                "`{}` is not an IANA time zone: write a name such as UTC or Europe/Berlin",
                self.default_time_zone
            );
            findings.report("default_time_zone", problem);
        }
        let year = 365 * 86_400;
        findings.seconds("max_ahead", self.max_ahead, 1..=100 * year);
        findings.range("max_data", self.max_data, 1_000..=100_000_000);
        findings.seconds("idempotency_window", self.idempotency_window, 1..=10 * year);
        findings.seconds("keep_ended", self.keep_ended, 1..=10 * year);
        findings.range("max_ended", self.max_ended, 100..=10_000_000);
        let window = HumanDuration::from_millis(100)..=HumanDuration::from_secs(600);
        findings.range("window", self.window, window);
        findings.range("window_bytes", self.window_bytes, 1 << 20..=1 << 36);
    }
}

impl JobTopicsConfig {
    fn check(&self, findings: &mut Findings<'_>) {
        for (index, (key, topic)) in self.by_key().into_iter().enumerate() {
            findings.topic(key, topic);
            let same = self
                .by_key()
                .into_iter()
                .take(index)
                .find(|(_, other)| *other == topic);
            if let Some((other, _)) = same {
                findings.report(
                    key,
                    format!("`{topic}` is also scheduler.topics.{other}; choose another topic"),
                );
            }
        }
    }
}

/// Application names are used in headers and URLs. Some prefixes are reserved for what else has a name in ids and scopes.
fn check_app_name(name: &str) -> Result<(), String> {
    if name.is_empty() || name.len() > 100 || name.contains(char::is_control) {
        return Err(
            "is not a valid application name: write 1 to 100 bytes without control characters".to_owned(),
        );
    }
    let mut reserved = ["pipeline:", "pipeline/", "tier/"].into_iter();
    if let Some(prefix) = reserved.find(|prefix| name.starts_with(prefix)) {
        return Err(format!(
            "is not a valid application name: the prefix `{prefix}` is reserved"
        ));
    }
    Ok(())
}
