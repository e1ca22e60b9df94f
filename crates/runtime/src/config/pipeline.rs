//! `pipelines`: topics, retries and endpoint of each pipeline.

use redeliver_core::anchor::Anchor;
use redeliver_core::pipeline::{Pipeline, ReturnTo, is_topic_name};
use redeliver_core::{HumanDuration, RetryPolicy};
use serde::{Deserialize, Serialize};

use super::breaker::BreakerConfig;
use super::error::{Findings, TOPIC_RULE};
use super::grouping::{LimitByConfig, OrderingConfig};
use super::http::HttpConfig;
use super::output::{OutputConfig, is_pointer, pointer_problem};
use super::rate_limit::RateLimitConfig;
use super::retry::RetryConfig;
use super::scheduler::SchedulerConfig;
use super::schema::SchemaConfig;

/// Longer than the calls of most handlers. A pipeline must not wait for a handler that hangs without limit.
const DEFAULT_ATTEMPT_TIMEOUT: HumanDuration = HumanDuration::from_secs(300);
/// Concurrent attempts of a custom handler.
const DEFAULT_CONCURRENCY: u32 = 16;

/// `pipelines.<name>`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PipelineConfig {
    /// The source topic. Default: the pipeline's name. Always set after loading.
    pub source: Option<String>,
    /// Where results go. `None`: results are discarded.
    pub output: Option<OutputConfig>,
    /// Where a record goes when it is due.
    pub return_to: ReturnTarget,
    /// How often a failed record is retried, and after which delays.
    pub retry: RetryConfig,
    /// The instant at which a wait begins.
    pub anchor: AnchorConfig,
    /// The upper limit of new waits.
    pub max_wait: HumanDuration,
    /// What holds records that wait longer than the longest tier.
    pub long_waits: LongWaitsConfig,
    /// A record that would be older at its next attempt becomes a dead letter (`expired`). `None`: no limit.
    pub max_age: Option<HumanDuration>,
    /// The endpoint that the enricher calls for each record. `None`: a worker with a custom handler serves the pipeline.
    pub http: Option<HttpConfig>,
    /// What the values of records must look like. Others become dead letters without an attempt.
    pub schema: Option<SchemaConfig>,
    /// Maximum number of concurrent attempts of a custom handler. Always set after loading, unless `http` is.
    pub concurrency: Option<u32>,
    /// Records that are processed one after the other.
    pub ordering: OrderingConfig,
    /// With an ordering: for how long a record whose attempts fail blocks its followers before it waits in a tier. `None`: it
    /// does not.
    pub key_blocking: Option<HumanDuration>,
    /// How many attempts may start in a time.
    pub rate_limit: Option<RateLimitConfig>,
    /// A limit of concurrent attempts for records with the same property.
    pub limit_by: Option<LimitByConfig>,
    /// Maximum duration of an attempt of a custom handler. Always set after loading, unless `http` is.
    pub attempt_timeout: Option<HumanDuration>,
    /// When the pipeline stops calling an endpoint that fails.
    pub breaker: BreakerConfig,
    /// Maximum records in flight per lane.
    pub in_flight: u32,
    /// Approximate maximum size of records in flight and their results per lane, in bytes.
    pub in_flight_bytes: u64,
    #[serde(skip)]
    is_retired: bool,
}

/// The key `return_to`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReturnTarget {
    /// `<pipeline>-retry-due`.
    #[default]
    Due,
    /// The source topic.
    Source,
}

/// The key `long_waits`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LongWaitsConfig {
    /// The longest tier.
    #[default]
    Tiers,
    /// The scheduler.
    Scheduler,
}

/// The key `anchor`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnchorConfig {
    /// The moment of the failure.
    #[default]
    Failure,
    /// The timestamp of the source record.
    RecordTimestamp,
    /// A field of the JSON payload, by JSON pointer.
    Pointer(String),
}

impl Default for PipelineConfig {
    fn default() -> Self {
        Self {
            source: None,
            output: None,
            return_to: ReturnTarget::default(),
            retry: RetryConfig::default(),
            anchor: AnchorConfig::default(),
            max_wait: HumanDuration::from_secs(86_400),
            long_waits: LongWaitsConfig::default(),
            max_age: None,
            http: None,
            schema: None,
            concurrency: None,
            ordering: OrderingConfig::default(),
            key_blocking: None,
            rate_limit: None,
            limit_by: None,
            attempt_timeout: None,
            breaker: BreakerConfig::default(),
            in_flight: 4_096,
            in_flight_bytes: 256 << 20,
            is_retired: false,
        }
    }
}

fn other_topics(output: &OutputConfig) -> impl Iterator<Item = &str> {
    output
        .topics()
        .into_iter()
        .filter(|topic| Some(*topic) != output.default_topic())
}

impl PipelineConfig {
    /// The pipeline as `redeliver_core` defines it. If the payload chooses the output topic, `output` is the default
    /// topic.
    #[must_use]
    pub fn pipeline(&self, name: &str, scheduler: &SchedulerConfig) -> Pipeline {
        Pipeline {
            name: name.into(),
            source: self.source(name).into(),
            output: self
                .output
                .as_ref()
                .and_then(|output| output.default_topic())
                .map(Into::into),
            other_outputs: self
                .output
                .iter()
                .flat_map(other_topics)
                .map(Into::into)
                .collect(),
            return_to: match self.return_to {
                ReturnTarget::Due => ReturnTo::Due,
                ReturnTarget::Source => ReturnTo::Source,
            },
            // Loading has rejected invalid policies.
            policy: self.policy().unwrap_or_default(),
            anchor: match &self.anchor {
                AnchorConfig::Failure => Anchor::Failure,
                AnchorConfig::RecordTimestamp => Anchor::RecordTimestamp,
                AnchorConfig::Pointer(pointer) => Anchor::Payload(pointer.clone()),
            },
            max_wait: self.max_wait,
            max_age: self.max_age,
            long_waits: match self.long_waits {
                LongWaitsConfig::Tiers => None,
                LongWaitsConfig::Scheduler => Some(scheduler.topics.ingest.as_str().into()),
            },
            drops_results: self.output.as_ref().is_some_and(OutputConfig::drops_results),
            retired: self.is_retired,
        }
    }

    /// The source topic.
    #[must_use]
    pub fn source<'a>(&'a self, name: &'a str) -> &'a str {
        self.source.as_deref().unwrap_or(name)
    }

    fn policy(&self) -> Option<RetryPolicy> {
        self.retry.policy().ok()
    }

    /// Whether the pipeline is listed under `retired`: it accepts no new records and finishes the waiting ones.
    #[must_use]
    pub fn is_retired(&self) -> bool {
        self.is_retired
    }

    pub(super) fn retire(&mut self) {
        self.is_retired = true;
    }

    /// Fills in omitted fields whose defaults depend on other fields.
    pub(super) fn resolve(&mut self, name: &str) {
        self.source.get_or_insert_with(|| name.to_owned());
        self.retry.resolve();
        if self.http.is_none() {
            self.attempt_timeout.get_or_insert(DEFAULT_ATTEMPT_TIMEOUT);
            self.concurrency
                .get_or_insert(DEFAULT_CONCURRENCY.min(self.in_flight));
        }
    }

    /// Maximum number of concurrent attempts in a process.
    #[must_use]
    pub fn concurrency(&self) -> u32 {
        let of_http = self.http.as_ref().map(HttpConfig::records_in_calls);
        of_http.or(self.concurrency).unwrap_or(DEFAULT_CONCURRENCY)
    }

    /// A limit of attempts makes sense only up to `in_flight`. `findings` must be where `concurrency` is.
    fn check_concurrency(&self, findings: &mut Findings<'_>) {
        if self.concurrency() > self.in_flight && self.in_flight > 0 {
            let (records, limit) = (self.concurrency(), self.in_flight);
            let batch = self.http.as_ref().and_then(|http| http.batch);
            let problem = match batch {
                Some(batch) => {
                    let calls = (limit / batch.records.max(1)).max(1);
                    format!(
                        "{records} records in calls, with batches of {}, are more than in_flight ({limit}): must be at most \
                         {calls}, with smaller batches or a larger in_flight",
                        batch.records
                    )
                }
                None => format!("{records} is more than in_flight: must be at most {limit}"),
            };
            findings.report("concurrency", problem);
        }
    }

    pub(super) fn check(&self, name: &str, scheduler: &SchedulerConfig, findings: &mut Findings<'_>) {
        findings.topic("source", self.source(name));
        if let Some(output) = &self.output {
            output.check("output", findings);
            if output.topics().contains(&self.source(name)) {
                findings.report(
                    "output",
                    format!(
                        "`{}` is also the source; the pipeline would read its own results",
                        self.source(name)
                    ),
                );
            }
        }
        self.retry.check(findings);
        if let AnchorConfig::Pointer(pointer) = &self.anchor
            && !is_pointer(pointer)
        {
            findings.inside("anchor", |at| at.report("pointer", pointer_problem(pointer)));
        }
        findings.range(
            "max_wait",
            self.max_wait,
            HumanDuration::from_millis(1)..=redeliver_core::backoff::MAX_WAIT,
        );
        if let Some(max_age) = self.max_age {
            findings.range(
                "max_age",
                max_age,
                HumanDuration::from_millis(1)..=redeliver_core::backoff::MAX_WAIT,
            );
        }
        if let Some(longest) = self.policy().and_then(|policy| policy.tiers().last().copied())
            && longest > self.max_wait
        {
            findings.report(
                "max_wait",
                format!(
                    "{} is shorter than the longest retry delay: must be at least {longest}",
                    self.max_wait
                ),
            );
        }
        if self.long_waits == LongWaitsConfig::Scheduler && self.max_wait > scheduler.max_ahead {
            findings.report(
                "max_wait",
                format!(
                    "{} is longer than scheduler.max_ahead: must be at most {}",
                    self.max_wait, scheduler.max_ahead
                ),
            );
        }
        findings.inside("breaker", |at| self.breaker.check(at));
        findings.range("in_flight", self.in_flight, 1..=20_000);
        findings.range("in_flight_bytes", self.in_flight_bytes, 1 << 20..=1 << 36);
        if let Some(blocking) = self.key_blocking {
            let limits = HumanDuration::from_millis(100)..=HumanDuration::from_secs(3_600);
            findings.range("key_blocking", blocking, limits);
            if self.ordering == OrderingConfig::None {
                findings.report(
                    "key_blocking",
                    "has no effect without an order: write `ordering: key` or `ordering: partition`",
                );
            }
        }
        if let Some(limit) = &self.rate_limit {
            findings.inside("rate_limit", |at| limit.check(at));
        }
        if let Some(limit) = &self.limit_by {
            findings.inside("limit_by", |at| limit.check(at));
        }
        if let Some(timeout) = self.attempt_timeout {
            let (milli, day) = (HumanDuration::from_millis(1), HumanDuration::from_secs(86_400));
            findings.range("attempt_timeout", timeout, milli..=day);
        }
        if let Some(http) = &self.http {
            if self.concurrency.is_some() {
                findings.report(
                    "concurrency",
                    "applies to custom handlers only; with `http`, write `http.concurrency`",
                );
            }
            if self.attempt_timeout.is_some() {
                findings.report(
                    "attempt_timeout",
                    "applies to custom handlers only; with `http`, write `http.timeout`",
                );
            }
            if let Some(OutputConfig::AnyOf(_)) = &self.output {
                findings.report(
                    "output",
                    "is a list, from which only a custom handler can choose; with `http`, write one topic or \
                     { by, pointer, topics, default }",
                );
            }
            findings.inside("http", |at| {
                http.check(at);
                self.check_concurrency(at);
            });
        } else {
            findings.range("concurrency", self.concurrency(), 1..=10_000);
            self.check_concurrency(findings);
            if let Some(OutputConfig::Chosen(_)) = &self.output {
                findings.report(
                    "output",
                    "is chosen by a document or a status, which needs `http`; without it, the handler chooses: write one topic or a \
                     list of topics",
                );
            }
        }
    }

    /// Reports invalid names of the pipeline and its topics. `findings` must be at `pipelines` or `retired`.
    pub(super) fn check_names(&self, name: &str, scheduler: &SchedulerConfig, findings: &mut Findings<'_>) {
        if !is_topic_name(name) {
            findings.report(
                name,
                format!("is not a valid pipeline name, because topics are named after it: {TOPIC_RULE}"),
            );
            return;
        }
        if let Some(problem) = name_problem(name, scheduler) {
            findings.report(name, format!("is not a valid pipeline name: {problem}"));
        }
        let topics = self.pipeline(name, scheduler).topics();
        let derived = topics.iter().filter(|(topic, _)| topic.starts_with(name));
        if let Some((topic, _)) = derived
            .max_by_key(|(topic, _)| topic.len())
            .filter(|(topic, _)| topic.len() > 249)
        {
            let excess = topic.len() - 249;
            findings.report(
                name,
                format!(
                    "is too long by {excess}: the name of the topic `{topic}` may have at most 249 characters"
                ),
            );
        }
    }
}

/// Why a pipeline of this name would collide: its consumer group with that of a tier or the scheduler, or its topics
/// with those of another pipeline.
fn name_problem(name: &str, scheduler: &SchedulerConfig) -> Option<String> {
    let group = Pipeline::new(name).worker_group("");
    if let Some(tier) = name
        .strip_prefix("retry-")
        .and_then(|tier| tier.parse::<HumanDuration>().ok())
    {
        return Some(format!(
            "its consumer group would be `{group}`, which is the group of the tier {tier}; choose a name that is not \
             `retry-` followed by a delay"
        ));
    }
    if let Some((other, role)) = name.rsplit_once("-retry-")
        && (role == "due" || role.parse::<HumanDuration>().is_ok())
    {
        return Some(format!(
            "it looks like a retry topic of a pipeline `{other}`; choose a name that does not end in `-retry-due`, or in \
             `-retry-` followed by a delay"
        ));
    }
    (group == scheduler.group).then(|| {
        format!(
            "its consumer group would be `{group}`, which is scheduler.group; choose another name or change \
             scheduler.group"
        )
    })
}
