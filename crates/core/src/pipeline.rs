//! A pipeline: its topics, tiers and settings.

use std::fmt;
use std::sync::Arc;

use crate::anchor::Anchor;
use crate::backoff::RetryPolicy;
use crate::human_duration::HumanDuration;

/// The settings of a pipeline.
#[derive(Clone, Debug)]
pub struct Pipeline {
    /// The name, which is the prefix of the pipeline's own topics.
    pub name: Arc<str>,
    /// The source topic.
    pub source: Arc<str>,
    /// The first output topic; `None`: no results are written unless the handler names another output.
    pub output: Option<Arc<str>>,
    /// Other topics that the handler can choose for a result.
    pub other_outputs: Vec<Arc<str>>,
    /// The topic in which waits end.
    pub return_to: ReturnTo,
    /// The number of retries and their delays.
    pub policy: RetryPolicy,
    /// The time from which the delay before the first retry counts.
    pub anchor: Anchor,
    /// The maximum duration of a new wait.
    pub max_wait: HumanDuration,
    /// The maximum age of a record at its next attempt. A record that would be older becomes a dead letter.
    pub max_age: Option<HumanDuration>,
    /// The scheduler's ingest topic, if long waits go to the scheduler; `None`: they go to the longest tier.
    pub long_waits: Option<Arc<str>>,
    /// Whether results can be dropped, so that a record can succeed without a trace.
    pub drops_results: bool,
    /// Whether the pipeline is retired: it does not read its source, and all waits end in its due topic.
    pub retired: bool,
}

/// Where a record waits until it is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DelayQueue {
    /// The tier with this delay.
    Tier(HumanDuration),
    /// The scheduler.
    Scheduler,
}

impl fmt::Display for DelayQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tier(tier) => tier.fmt(f),
            Self::Scheduler => f.write_str("scheduler"),
        }
    }
}

/// The topic in which waits end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReturnTo {
    /// The due topic `<pipeline>-retry-due`. Only this pipeline reads it, so other consumers of the source see no
    /// retries.
    #[default]
    Due,
    /// The source topic.
    Source,
}

/// The return topics of a pipeline.
#[derive(Clone, Debug)]
pub struct ReturnTopics {
    due: Option<Arc<str>>,
    source: Option<Arc<str>>,
    current: Arc<str>,
}

impl ReturnTopics {
    /// The topic in which the wait of a record ends whose header `return-topic` is `named`.
    ///
    /// The header was written with an older configuration, so both the due topic and the source are accepted: workers
    /// read retries from both. Any other name, such as a previous source, is replaced by the configured return topic, so
    /// a forged header cannot choose an arbitrary topic.
    #[must_use]
    pub fn topic(&self, named: &str) -> &Arc<str> {
        let mut own = self.due.iter().chain(&self.source);
        own.find(|own| ***own == *named).unwrap_or(&self.current)
    }

    /// All topics in which waits can end; the same topic can occur twice.
    pub fn topics(&self) -> impl Iterator<Item = &Arc<str>> {
        let current = std::iter::once(&self.current);
        self.due.iter().chain(&self.source).chain(current)
    }
}

/// The role of a topic in a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopicRole {
    /// The source topic.
    Source,
    /// An output topic.
    Output,
    /// The topic of a tier.
    Tier(HumanDuration),
    /// The due topic.
    Due,
    /// The dead-letter topic.
    DeadLetter,
}

impl Pipeline {
    /// A pipeline with default settings. Its source has the same name, and it writes no results.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            source: name.into(),
            output: None,
            other_outputs: Vec::new(),
            return_to: ReturnTo::default(),
            policy: RetryPolicy::default(),
            anchor: Anchor::default(),
            max_wait: HumanDuration::from_secs(86_400),
            max_age: None,
            long_waits: None,
            drops_results: false,
            retired: false,
        }
    }

    /// The topic of a tier: `<pipeline>-retry-<tier>`.
    #[must_use]
    pub fn tier_topic(&self, tier: HumanDuration) -> Arc<str> {
        format!("{}-retry-{tier}", self.name).into()
    }

    /// The due topic: `<pipeline>-retry-due`.
    #[must_use]
    pub fn due_topic(&self) -> Arc<str> {
        format!("{}-retry-due", self.name).into()
    }

    /// The dead-letter topic: `<pipeline>-dlq`.
    #[must_use]
    pub fn dead_letter_topic(&self) -> Arc<str> {
        format!("{}-dlq", self.name).into()
    }

    /// Whether new waits end in the due topic, so that it must exist.
    #[must_use]
    pub fn needs_due_topic(&self) -> bool {
        self.retired || self.return_to == ReturnTo::Due
    }

    /// The topic in which new waits end.
    #[must_use]
    pub fn return_topic(&self) -> Arc<str> {
        if self.needs_due_topic() {
            self.due_topic()
        } else {
            self.source.clone()
        }
    }

    /// Whether this topic is an output of the pipeline.
    #[must_use]
    pub fn has_output(&self, topic: &str) -> bool {
        let mut outputs = self.output.iter().chain(&self.other_outputs);
        outputs.any(|output| **output == *topic)
    }

    /// The topics in which waits can end. `has_due`: whether the due topic exists.
    #[must_use]
    pub fn returns(&self, has_due: bool) -> ReturnTopics {
        let has_due = has_due || self.needs_due_topic();
        ReturnTopics {
            due: has_due.then(|| self.due_topic()),
            source: (!self.retired).then(|| self.source.clone()),
            current: self.return_topic(),
        }
    }

    /// The topics that the pipeline's workers read. `has_due`: whether the due topic exists. It is read even with
    /// [`ReturnTo::Source`], because it can contain records from before `return_to` was changed.
    #[must_use]
    pub fn worker_topics(&self, has_due: bool) -> Vec<Arc<str>> {
        let source = (!self.retired).then(|| self.source.clone());
        let due = (has_due || self.needs_due_topic()).then(|| self.due_topic());
        source.into_iter().chain(due).collect()
    }

    /// The consumer group of the pipeline's workers: `<prefix>redeliver-<pipeline>`. The prefix is that of all ids of this
    /// installation.
    #[must_use]
    pub fn worker_group(&self, prefix: &str) -> String {
        format!("{prefix}redeliver-{}", self.name)
    }

    /// The consumer group that reads the topics of a role of this pipeline, with the prefix of all ids of this installation. `None` if
    /// none of ours does.
    #[must_use]
    pub fn reading_group(&self, role: TopicRole, prefix: &str) -> Option<String> {
        match role {
            TopicRole::Source | TopicRole::Due => Some(self.worker_group(prefix)),
            TopicRole::Tier(tier) => Some(retry_tier_group(prefix, tier)),
            TopicRole::Output | TopicRole::DeadLetter => None,
        }
    }

    /// Every topic that the pipeline needs, with its role. A retired pipeline does not need its source.
    #[must_use]
    pub fn topics(&self) -> Vec<(Arc<str>, TopicRole)> {
        let mut topics = Vec::new();
        if !self.retired {
            topics.push((self.source.clone(), TopicRole::Source));
        }
        let outputs = self.output.iter().chain(&self.other_outputs).cloned();
        topics.extend(outputs.map(|topic| (topic, TopicRole::Output)));
        topics.extend(
            self.policy
                .tiers()
                .iter()
                .map(|tier| (self.tier_topic(*tier), TopicRole::Tier(*tier))),
        );
        if self.needs_due_topic() {
            topics.push((self.due_topic(), TopicRole::Due));
        }
        topics.push((self.dead_letter_topic(), TopicRole::DeadLetter));
        topics
    }

    /// The topics that the pipeline's workers write to.
    #[must_use]
    pub fn written_topics(&self) -> Vec<Arc<str>> {
        let topics = self.topics().into_iter();
        let written = topics.filter(|(_, role)| {
            matches!(
                role,
                TopicRole::Output | TopicRole::Tier(_) | TopicRole::DeadLetter
            )
        });
        written
            .map(|(topic, _)| topic)
            .chain(self.long_waits.clone())
            .collect()
    }

    /// Where a record waits, and the topic to write it to: the scheduler if the wait may be longer than every tier and
    /// `long_waits` is set; otherwise a tier, see [`Pipeline::tier_for`]. `nominal` is the wait without randomness, and `max`
    /// the longest possible one.
    #[must_use]
    pub fn delay_queue(&self, nominal: HumanDuration, max: HumanDuration) -> (DelayQueue, Arc<str>) {
        match &self.long_waits {
            Some(ingest) if max > self.longest_tier() => (DelayQueue::Scheduler, ingest.clone()),
            _ => {
                let tier = self.tier_for(nominal);
                (DelayQueue::Tier(tier), self.tier_topic(tier))
            }
        }
    }

    /// The tier for a wait without randomness: the longest tier that is not longer than the wait, or the shortest tier for
    /// a wait that is shorter than every tier. A topic is read in order: behind records with longer waits, a record would be late.
    #[must_use]
    pub fn tier_for(&self, wait: HumanDuration) -> HumanDuration {
        let tiers = self.policy.tiers();
        let fitting = tiers.iter().copied().take_while(|tier| *tier <= wait).last();
        fitting.unwrap_or(tiers[0])
    }

    /// The delay of the longest tier.
    #[must_use]
    pub fn longest_tier(&self) -> HumanDuration {
        self.policy.tiers().last().copied().unwrap_or_default()
    }

    /// The maximum wait of a record in a tier.
    #[must_use]
    pub fn longest_wait_in_tiers(&self) -> HumanDuration {
        match self.long_waits {
            Some(_) => self.longest_tier().min(self.max_wait),
            None => self.max_wait,
        }
    }
}

/// The consumer group of a tier: `<prefix>redeliver-retry-<tier>`. All pipelines with this tier share it. The prefix is that
/// of all ids of this installation.
#[must_use]
pub fn retry_tier_group(prefix: &str, tier: HumanDuration) -> String {
    format!("{prefix}redeliver-retry-{tier}")
}

/// Parses the name of a tier's topic or of a due topic into the pipeline and the tier; the due topic has no tier.
#[must_use]
pub fn parse_retry_topic(name: &str) -> Option<(&str, Option<HumanDuration>)> {
    let (pipeline, role) = name.rsplit_once("-retry-")?;
    if pipeline.is_empty() {
        return None;
    }
    if role == "due" {
        return Some((pipeline, None));
    }
    // Only the canonical form of a duration names a tier: `1m` does, `60s` does not.
    let tier: HumanDuration = role.parse().ok()?;
    (tier.as_millis() > 0 && tier.to_string() == role).then_some((pipeline, Some(tier)))
}

/// Whether a name is valid for a Kafka topic: 1 to 249 characters of `a-z A-Z 0-9 . _ -`, except `.` and `..`.
#[must_use]
pub fn is_topic_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 249
        && name != "."
        && name != ".."
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topics_are_named_after_the_pipeline() {
        let mut pipeline = Pipeline::new("crawl-jobs");
        pipeline.output = Some("crawl-results".into());
        let names: Vec<_> = pipeline
            .topics()
            .into_iter()
            .map(|(name, _)| name.to_string())
            .collect();
        assert_eq!(
            names,
            [
                "crawl-jobs",
                "crawl-results",
                "crawl-jobs-retry-5s",
                "crawl-jobs-retry-30s",
                "crawl-jobs-retry-1m",
                "crawl-jobs-retry-due",
                "crawl-jobs-dlq"
            ]
        );
    }

    #[test]
    fn retired_pipeline_processes_waiting_records() {
        let pipeline = Pipeline {
            return_to: ReturnTo::Source,
            retired: true,
            ..Pipeline::new("p")
        };
        assert_eq!(pipeline.worker_topics(true), ["p-retry-due".into()]);
        assert_eq!(&*pipeline.return_topic(), "p-retry-due");
        assert_eq!(&**pipeline.returns(false).topic("p"), "p-retry-due");
        let roles: Vec<_> = pipeline.topics().into_iter().map(|(_, role)| role).collect();
        assert!(!roles.contains(&TopicRole::Source) && roles.contains(&TopicRole::Due));
    }

    #[test]
    fn wait_ends_in_owned_topic() {
        for return_to in [ReturnTo::Due, ReturnTo::Source] {
            let pipeline = Pipeline {
                return_to,
                source: "in".into(),
                ..Pipeline::new("p")
            };
            let current = pipeline.return_topic();
            let returns = pipeline.returns(true);
            assert_eq!(&**returns.topic("in"), "in");
            assert_eq!(&**returns.topic("p-retry-due"), "p-retry-due");
            for foreign in [
                "previous-source",
                "p",
                "p-dlq",
                "q-retry-due",
                "__consumer_offsets",
            ] {
                assert_eq!(*returns.topic(foreign), current, "{foreign}");
            }
            // A missing due topic is never written to, even if a header names it.
            assert_eq!(*pipeline.returns(false).topic("p-retry-due"), current);
        }
    }

    #[test]
    fn retry_topics_are_parsed_by_name() {
        let tier = |millis| Some(HumanDuration::from_millis(millis));
        for (name, expected) in [
            ("p-retry-5s", Some(("p", tier(5_000)))),
            ("p-retry-1503ms", Some(("p", tier(1_503)))),
            ("p-retry-due", Some(("p", None))),
            ("p-retry-5s-retry-1m", Some(("p-retry-5s", tier(60_000)))),
            ("retry-retry-1m", Some(("retry", tier(60_000)))),
            ("p-retry-60s", None),
            ("p-retry-0s", None),
            ("p-retry-5000", None),
            ("p-retry-soon", None),
            ("p-retry-", None),
            ("-retry-5s", None),
            ("retry-5s", None),
            ("p-dlq", None),
            ("p", None),
        ] {
            assert_eq!(parse_retry_topic(name), expected, "{name}");
        }
    }

    #[test]
    fn tier_delay_fits_the_wait() {
        let pipeline = Pipeline::new("p");
        let tier = |millis| pipeline.tier_for(HumanDuration::from_millis(millis)).to_string();
        assert_eq!(tier(0), "5s");
        assert_eq!(tier(5_000), "5s");
        assert_eq!(tier(29_999), "5s");
        assert_eq!(tier(30_000), "30s");
        assert_eq!(tier(3_600_000), "1m");
    }

    #[test]
    fn long_wait_uses_the_scheduler() {
        let between = |pipeline: &Pipeline, nominal, max| {
            let millis = HumanDuration::from_millis;
            let (queue, topic) = pipeline.delay_queue(millis(nominal), millis(max));
            format!("{queue} {topic}")
        };
        let queue = |pipeline: &Pipeline, millis| between(pipeline, millis, millis);
        let mut pipeline = Pipeline::new("p");
        assert_eq!(queue(&pipeline, 60_001), "1m p-retry-1m");
        assert_eq!(pipeline.longest_wait_in_tiers(), pipeline.max_wait);
        pipeline.long_waits = Some("ingest".into());
        assert_eq!(queue(&pipeline, 60_001), "scheduler ingest");
        assert_eq!(queue(&pipeline, 60_000), "1m p-retry-1m");
        assert_eq!(queue(&pipeline, 1), "5s p-retry-5s");
        assert_eq!(between(&pipeline, 29_000, 31_000), "5s p-retry-5s");
        assert_eq!(between(&pipeline, 59_000, 61_000), "scheduler ingest");
        assert_eq!(pipeline.longest_wait_in_tiers(), HumanDuration::from_secs(60));
    }
}
