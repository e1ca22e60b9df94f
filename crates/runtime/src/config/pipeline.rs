//! One pipeline: its topics, its retries, its endpoint.

use redeliver_core::pipeline::{Anchor, Pipeline, ReturnTo, is_topic_name};
use redeliver_core::{RetryPolicy, Span};
use serde::{Deserialize, Serialize};

use super::http::HttpConfig;
use super::output::{OutputConfig, is_pointer, pointer_problem};
use super::problem::{Findings, TOPIC_RULE};
use super::retry::RetryConfig;
use super::scheduler::SchedulerConfig;
use super::text;

/// `pipelines.<name>`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PipelineConfig {
    /// The topic it reads. After loading it is always set; left out it is the pipeline's name.
    pub source: Option<String>,
    /// Where results go; without it none are written.
    pub output: Option<OutputConfig>,
    /// Where a record goes when its wait is over.
    pub return_to: ReturnTarget,
    /// How often and after which waits a record is tried again.
    pub retry: RetryConfig,
    /// From which instant a wait counts.
    pub anchor: AnchorConfig,
    /// No wait that begins is longer.
    #[serde(with = "text")]
    pub max_wait: Span,
    /// Who holds records that wait longer than the longest tier.
    pub long_waits: LongWaitsConfig,
    /// A record that would be tried again at a greater age is dead instead.
    #[serde(with = "text::optional")]
    pub max_age: Option<Span>,
    /// The endpoint that is called for each record; none when the handler is a program of the user's.
    pub http: Option<HttpConfig>,
    /// The most records of this pipeline that one lane has in hand.
    pub in_flight: u32,
    /// The most bytes of them and of their results, about.
    pub in_flight_bytes: u64,
    /// Whether it stands under `retired`.
    #[serde(skip)]
    is_retired: bool,
}

/// `return_to`, as it is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReturnTarget {
    /// `<pipeline>-retry-due`.
    #[default]
    Due,
    /// The source topic.
    Source,
}

/// `long_waits`, as it is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LongWaitsConfig {
    /// The longest tier.
    #[default]
    Tiers,
    /// The scheduler.
    Scheduler,
}

/// `anchor`, as it is written.
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
            max_wait: Span::from_secs(86_400),
            long_waits: LongWaitsConfig::default(),
            max_age: None,
            http: None,
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
        .filter(|topic| *topic != output.default_topic())
}

impl PipelineConfig {
    /// What the domain needs to know of the pipeline, beside this scheduler. Its `output` is the default one
    /// when the topic is chosen by the payload.
    #[must_use]
    pub fn pipeline(&self, name: &str, scheduler: &SchedulerConfig) -> Pipeline {
        Pipeline {
            source: self.source(name).into(),
            output: self.output.as_ref().map(|output| output.default_topic().into()),
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
            // A configuration that was loaded has a policy that can be followed.
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
            retired: self.is_retired,
            ..Pipeline::new(name)
        }
    }

    /// The topic it reads.
    #[must_use]
    pub fn source<'a>(&'a self, name: &'a str) -> &'a str {
        self.source.as_deref().unwrap_or(name)
    }

    fn policy(&self) -> Option<RetryPolicy> {
        self.retry.policy().ok()
    }

    /// Whether it stands under `retired`: it takes nothing new and finishes what waits.
    #[must_use]
    pub fn is_retired(&self) -> bool {
        self.is_retired
    }

    /// Notes that it stands under `retired`.
    pub(super) fn retire(&mut self) {
        self.is_retired = true;
    }

    /// Writes out what was left out.
    pub(super) fn resolve(&mut self, name: &str) {
        self.source.get_or_insert_with(|| name.to_owned());
        self.retry.resolve();
    }

    pub(super) fn check(&self, name: &str, scheduler: &SchedulerConfig, findings: &mut Findings<'_>) {
        findings.topic("source", self.source(name));
        if let Some(output) = &self.output {
            output.check("output", findings);
            if output.topics().contains(&self.source(name)) {
                findings.wrong(
                    "output",
                    format!(
                        "`{}` is the source; results would be read again",
                        self.source(name)
                    ),
                );
            }
        }
        self.retry.check(findings);
        if let AnchorConfig::Pointer(pointer) = &self.anchor
            && !is_pointer(pointer)
        {
            findings.inside("anchor", |at| at.wrong("pointer", pointer_problem(pointer)));
        }
        findings.range(
            "max_wait",
            self.max_wait,
            Span::from_millis(1)..=redeliver_core::backoff::MAX_WAIT,
        );
        if let Some(max_age) = self.max_age {
            findings.range(
                "max_age",
                max_age,
                Span::from_millis(1)..=redeliver_core::backoff::MAX_WAIT,
            );
        }
        if let Some(longest) = self.policy().and_then(|policy| policy.tiers().last().copied())
            && longest > self.max_wait
        {
            findings.wrong(
                "max_wait",
                format!(
                    "{} is shorter than the longest retry delay {longest}",
                    self.max_wait
                ),
            );
        }
        if self.long_waits == LongWaitsConfig::Scheduler && self.max_wait > scheduler.max_ahead {
            findings.wrong(
                "max_wait",
                format!(
                    "{} is longer than scheduler.max_ahead {}; the scheduler would refuse such a wait",
                    self.max_wait, scheduler.max_ahead
                ),
            );
        }
        findings.range("in_flight", self.in_flight, 1..=20_000);
        findings.range("in_flight_bytes", self.in_flight_bytes, 1 << 20..=1 << 36);
        if let Some(http) = &self.http {
            if let Some(OutputConfig::AnyOf(_)) = &self.output {
                findings.wrong(
                    "output",
                    "is a list, of which only a handler of your own can choose; with `http` write one topic, or \
                     { pointer, topics, default }",
                );
            }
            findings.inside("http", |at| {
                http.check(at);
                if http.concurrency > self.in_flight && self.in_flight > 0 {
                    at.wrong(
                        "concurrency",
                        format!(
                            "{} is more than in_flight {}; a request needs a record in hand",
                            http.concurrency, self.in_flight
                        ),
                    );
                }
            });
        }
    }

    /// Whether all topics of this pipeline can be named; `findings` stands at `pipelines`.
    pub(super) fn check_names(&self, name: &str, scheduler: &SchedulerConfig, findings: &mut Findings<'_>) {
        if !is_topic_name(name) {
            findings.wrong(
                name,
                format!("cannot be the name of a pipeline, because topics are named after it: {TOPIC_RULE}"),
            );
            return;
        }
        if let Some(problem) = name_problem(name, scheduler) {
            findings.wrong(name, format!("cannot be the name of a pipeline: {problem}"));
        }
        let topics = self.pipeline(name, scheduler).topics();
        let derived = topics.iter().filter(|(topic, _)| topic.starts_with(name));
        if let Some((topic, _)) = derived
            .max_by_key(|(topic, _)| topic.len())
            .filter(|(topic, _)| topic.len() > 249)
        {
            let over = topic.len() - 249;
            findings.wrong(
                name,
                format!("is {over} characters too long: the topic `{topic}` may have at most 249"),
            );
        }
    }
}

/// What a pipeline of this name would be mistaken for: its consumer group for that of a tier or of the scheduler, its
/// topics for those of another pipeline.
fn name_problem(name: &str, scheduler: &SchedulerConfig) -> Option<String> {
    let group = Pipeline::new(name).worker_group();
    if let Some(tier) = name
        .strip_prefix("retry-")
        .and_then(|tier| tier.parse::<Span>().ok())
    {
        return Some(format!(
            "its consumer group would be `{group}`, which is that of the tier {tier}; choose a name that is not \
             `retry-` and a delay"
        ));
    }
    if let Some((other, role)) = name.rsplit_once("-retry-")
        && (role == "due" || role.parse::<Span>().is_ok())
    {
        return Some(format!(
            "it would be taken for a retry topic of a pipeline `{other}`; choose a name that does not end in \
             `-retry-due` or in `-retry-` and a delay"
        ));
    }
    (group == scheduler.group).then(|| {
        format!(
            "its consumer group would be `{group}`, which is scheduler.group; choose another name, or another \
             scheduler.group"
        )
    })
}
