//! `scheduler`: who may schedule jobs, how far ahead, and how long things are remembered.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use redeliver_core::{SchedulerTopics, Span};
use serde::{Deserialize, Serialize};

use super::api::ApiConfig;
use super::problem::Findings;
use super::text;

/// `scheduler`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SchedulerConfig {
    /// The applications that may schedule jobs, by name.
    pub apps: BTreeMap<String, AppConfig>,
    /// Where its gRPC and REST listen.
    #[serde(serialize_with = "text::serialize", deserialize_with = "text::listen")]
    pub listen: SocketAddr,
    /// See [`ApiConfig::token_file`].
    pub token_file: Option<PathBuf>,
    /// See [`ApiConfig::allow_remote`].
    pub allow_remote: bool,
    /// The topics of its own.
    pub topics: JobTopicsConfig,
    /// The consumer group of all schedulers.
    pub group: String,
    /// Where times without an offset are meant: a name of the IANA time zone database.
    pub default_time_zone: String,
    /// No job may be due further ahead.
    #[serde(with = "text")]
    pub max_ahead: Span,
    /// The most bytes of a job's data, key and headers together.
    pub max_data: u64,
    /// How long an idempotency key is taken, from the acceptance of its job.
    #[serde(with = "text")]
    pub idempotency_window: Span,
    /// How long a job that ended can be asked for.
    #[serde(with = "text")]
    pub keep_ended: Span,
    /// How far ahead of their time jobs are held in memory.
    #[serde(with = "text")]
    pub window: Span,
    /// The most of them per partition.
    pub window_jobs: u32,
    /// The most bytes of them per partition.
    pub window_bytes: u64,
}

/// `scheduler.apps.<name>`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AppConfig {
    /// The topic to which its jobs go when they are due.
    pub topic: String,
}

/// `scheduler.topics`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JobTopicsConfig {
    /// Commands arrive here.
    pub ingest: String,
    /// What is known of each job.
    pub state: String,
    /// Commands that cannot be accepted.
    pub dlq: String,
    /// What became of commands, for those who wait to hear it.
    pub answers: String,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            apps: BTreeMap::new(),
            listen: (Ipv4Addr::LOCALHOST, 50_052).into(),
            token_file: None,
            allow_remote: false,
            topics: JobTopicsConfig::default(),
            group: "redeliver-scheduler".to_owned(),
            default_time_zone: "UTC".to_owned(),
            max_ahead: Span::from_secs(3_650 * 86_400),
            max_data: 900_000,
            idempotency_window: Span::from_secs(86_400),
            keep_ended: Span::from_secs(86_400),
            window: Span::from_secs(10),
            window_jobs: 50_000,
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
    /// Every topic with its key.
    pub(super) fn by_key(&self) -> [(&'static str, &str); 4] {
        [
            ("ingest", &self.ingest),
            ("state", &self.state),
            ("dlq", &self.dlq),
            ("answers", &self.answers),
        ]
    }
}

impl SchedulerConfig {
    /// Its listener.
    #[must_use]
    pub fn api(&self) -> ApiConfig {
        ApiConfig {
            listen: self.listen,
            token_file: self.token_file.clone(),
            allow_remote: self.allow_remote,
        }
    }

    /// Its topics and those of its applications, each once.
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

    /// The zone of times without an offset; `None` when there is none of that name, which loading refuses.
    #[must_use]
    pub fn time_zone(&self) -> Option<jiff::tz::TimeZone> {
        jiff::tz::TimeZone::get(&self.default_time_zone).ok()
    }

    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        self.api().check(findings);
        findings.inside("apps", |at| {
            for (name, app) in &self.apps {
                if let Err(problem) = check_app_name(name) {
                    at.wrong(name, problem);
                }
                at.inside(name, |at| at.topic("topic", &app.topic));
            }
        });
        findings.inside("topics", |at| self.topics.check(at));
        if self.group.is_empty() || self.group.len() > 249 || self.group.contains(char::is_control) {
            findings.wrong("group", "cannot name a group: write 1 to 249 characters");
        }
        if self.time_zone().is_none() {
            let problem = format!(
                "`{}` is not in the time zone database; write a name such as UTC or Europe/Berlin",
                self.default_time_zone
            );
            findings.wrong("default_time_zone", problem);
        }
        let (second, day) = (Span::from_secs(1), 86_400);
        findings.range(
            "max_ahead",
            self.max_ahead,
            second..=Span::from_secs(36_500 * day),
        );
        findings.range("max_data", self.max_data, 1_000..=100_000_000);
        let years = Span::from_secs(3_650 * day);
        findings.range("idempotency_window", self.idempotency_window, second..=years);
        findings.range("keep_ended", self.keep_ended, second..=years);
        findings.range(
            "window",
            self.window,
            Span::from_millis(100)..=Span::from_secs(600),
        );
        findings.range("window_jobs", self.window_jobs, 100..=10_000_000);
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
                findings.wrong(key, format!("`{topic}` is {other} too; a topic has one meaning"));
            }
        }
    }
}

/// Names stand in records and URLs; `pipeline:` is kept for ours.
fn check_app_name(name: &str) -> Result<(), String> {
    if name.is_empty() || name.len() > 100 || name.contains(char::is_control) {
        return Err("cannot name an application: write 1 to 100 bytes without control characters".to_owned());
    }
    if name.starts_with("pipeline:") {
        return Err("cannot name an application: `pipeline:` stands before names of pipelines".to_owned());
    }
    Ok(())
}
