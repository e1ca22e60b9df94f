//! A pipeline: the topics its records travel through and the rules of its retries.

use std::fmt;
use std::sync::Arc;

use crate::backoff::RetryPolicy;
use crate::record::Record;
use crate::span::Span;
use crate::time::Timestamp;

/// What the services need to know of one pipeline.
#[derive(Clone, Debug)]
pub struct Pipeline {
    /// Its name, from which the names of its own topics are made.
    pub name: Arc<str>,
    /// The topic it reads.
    pub source: Arc<str>,
    /// Where results go; `None` writes no results.
    pub output: Option<Arc<str>>,
    /// Further topics that a handler may choose for single results.
    pub other_outputs: Vec<Arc<str>>,
    /// Where a record goes when its wait is over.
    pub return_to: ReturnTo,
    /// How often and after which waits a record is tried again.
    pub policy: RetryPolicy,
    /// From which instant a wait counts.
    pub anchor: Anchor,
    /// No wait that begins is longer.
    pub max_wait: Span,
    /// A record that would be tried again at a greater age than this is dead instead.
    pub max_age: Option<Span>,
    /// The scheduler's ingest topic, when the scheduler holds the records that wait longer than the longest
    /// tier; `None`: the longest tier holds them.
    pub long_waits: Option<Arc<str>>,
    /// Whether it only finishes what waits: its source is not read, and waits end in its due topic.
    pub retired: bool,
}

/// Who holds a record until it is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DelayQueue {
    /// A tier.
    Tier(Span),
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

/// The topic to which a retry tier releases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReturnTo {
    /// `<pipeline>-retry-due`, read only by this pipeline: other groups on the source never see retries.
    #[default]
    Due,
    /// The source topic, the classic requeue to main.
    Source,
}

/// The topics in which waits of a pipeline may end.
#[derive(Clone, Debug)]
pub struct Returns {
    due: Option<Arc<str>>,
    source: Option<Arc<str>>,
    current: Arc<str>,
}

impl Returns {
    /// The topic in which the wait of a record ends whose header `return-topic` names this one. The header was
    /// written under the configuration of that time: it may name the due topic or the source, whichever is in use
    /// now, since workers take retries from both. Any other name, such as that of a former source, leads to the one
    /// in use, so a forged header does not choose where is written.
    #[must_use]
    pub fn topic(&self, named: &str) -> &Arc<str> {
        let mut own = self.due.iter().chain(&self.source);
        own.find(|own| ***own == *named).unwrap_or(&self.current)
    }

    /// All topics in which waits may end; one may be named twice.
    pub fn topics(&self) -> impl Iterator<Item = &Arc<str>> {
        let current = std::iter::once(&self.current);
        self.due.iter().chain(&self.source).chain(current)
    }
}

/// From which instant a wait counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Anchor {
    /// The moment of the failure.
    #[default]
    Failure,
    /// The timestamp of the source record.
    RecordTimestamp,
    /// A field of the JSON payload, by JSON pointer (RFC 6901): an RFC 3339 time, or a number of seconds
    /// (milliseconds from 100,000,000,000 on) since 1970.
    Payload(String),
}

/// How a topic belongs to a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopicRole {
    /// Records arrive here.
    Source,
    /// Results.
    Output,
    /// Records wait here.
    Tier(Span),
    /// Records whose wait is over.
    Due,
    /// Dead letters.
    DeadLetter,
}

impl Pipeline {
    /// A pipeline with all defaults: its source has its own name and it writes no results.
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
            max_wait: Span::from_secs(86_400),
            max_age: None,
            long_waits: None,
            retired: false,
        }
    }

    /// `<pipeline>-retry-<tier>`.
    #[must_use]
    pub fn tier_topic(&self, tier: Span) -> Arc<str> {
        format!("{}-retry-{tier}", self.name).into()
    }

    /// `<pipeline>-retry-due`.
    #[must_use]
    pub fn due_topic(&self) -> Arc<str> {
        format!("{}-retry-due", self.name).into()
    }

    /// `<pipeline>-dlq`.
    #[must_use]
    pub fn dead_letter_topic(&self) -> Arc<str> {
        format!("{}-dlq", self.name).into()
    }

    /// Whether waits end in the due topic, so that it must exist.
    #[must_use]
    pub fn needs_due_topic(&self) -> bool {
        self.retired || self.return_to == ReturnTo::Due
    }

    /// Where the waits of records end that fail now.
    #[must_use]
    pub fn return_topic(&self) -> Arc<str> {
        if self.needs_due_topic() {
            self.due_topic()
        } else {
            self.source.clone()
        }
    }

    /// Whether results may go to this topic.
    #[must_use]
    pub fn has_output(&self, topic: &str) -> bool {
        let mut outputs = self.output.iter().chain(&self.other_outputs);
        outputs.any(|output| **output == *topic)
    }

    /// Where waits may end. `has_due`: whether the due topic exists.
    #[must_use]
    pub fn returns(&self, has_due: bool) -> Returns {
        let has_due = has_due || self.needs_due_topic();
        Returns {
            due: has_due.then(|| self.due_topic()),
            source: (!self.retired).then(|| self.source.clone()),
            current: self.return_topic(),
        }
    }

    /// The topics a worker of this pipeline reads. `has_due`: whether the due topic exists. It is read whenever it
    /// does, because it may hold records from before `return_to` was changed.
    #[must_use]
    pub fn worker_topics(&self, has_due: bool) -> Vec<Arc<str>> {
        let source = (!self.retired).then(|| self.source.clone());
        let due = (has_due || self.needs_due_topic()).then(|| self.due_topic());
        source.into_iter().chain(due).collect()
    }

    /// The consumer group of the pipeline's workers.
    #[must_use]
    pub fn worker_group(&self) -> String {
        format!("redeliver-{}", self.name)
    }

    /// Every topic that the pipeline needs, with its role. A retired one does not need its source any more.
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
                .into_iter()
                .map(|tier| (self.tier_topic(tier), TopicRole::Tier(tier))),
        );
        if self.needs_due_topic() {
            topics.push((self.due_topic(), TopicRole::Due));
        }
        topics.push((self.dead_letter_topic(), TopicRole::DeadLetter));
        topics
    }

    /// The topics that a worker of this pipeline writes.
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

    /// Who holds a record for so long, and the topic to write it to: the scheduler what is longer than every
    /// tier, where it may; else a tier, see [`Pipeline::tier_for`].
    #[must_use]
    pub fn carrier(&self, wait: Span) -> (DelayQueue, Arc<str>) {
        match &self.long_waits {
            Some(ingest) if wait > self.longest_tier() => (DelayQueue::Scheduler, ingest.clone()),
            _ => {
                let tier = self.tier_for(wait);
                (DelayQueue::Tier(tier), self.tier_topic(tier))
            }
        }
    }

    /// The tier for a wait: the longest one that is not longer than the wait, so that the record
    /// never stands behind records that wait longer than it; the shortest tier for what is shorter still.
    #[must_use]
    pub fn tier_for(&self, wait: Span) -> Span {
        let tiers = self.policy.tiers();
        let fitting = tiers.iter().copied().take_while(|tier| *tier <= wait).last();
        fitting.unwrap_or(tiers[0])
    }

    /// The longest tier.
    #[must_use]
    pub fn longest_tier(&self) -> Span {
        self.policy.tiers().last().copied().unwrap_or_default()
    }

    /// No record waits longer than this in a tier.
    #[must_use]
    pub fn longest_wait_in_tiers(&self) -> Span {
        match self.long_waits {
            Some(_) => self.longest_tier().min(self.max_wait),
            None => self.max_wait,
        }
    }

    /// The instant from which a wait of this record counts. A payload without the configured field falls
    /// back to the moment of the failure, which is the later and therefore the safe one.
    #[must_use]
    pub fn anchor_of(
        &self,
        record: &Record,
        original_timestamp: Option<Timestamp>,
        now: Timestamp,
    ) -> Timestamp {
        match &self.anchor {
            Anchor::Failure => None,
            Anchor::RecordTimestamp => original_timestamp,
            Anchor::Payload(pointer) => record
                .value
                .as_deref()
                .and_then(|value| payload_time(value, pointer)),
        }
        .unwrap_or(now)
    }
}

fn payload_time(payload: &[u8], pointer: &str) -> Option<Timestamp> {
    const FIRST_MILLISECONDS: i64 = 100_000_000_000;
    let document: serde_json::Value = serde_json::from_slice(payload).ok()?;
    match document.pointer(pointer)? {
        serde_json::Value::String(text) => text.parse().ok(),
        serde_json::Value::Number(number) => {
            let number = number.as_i64()?;
            let millis = if number < FIRST_MILLISECONDS {
                number.checked_mul(1000)?
            } else {
                number
            };
            Some(Timestamp::from_millis(millis))
        }
        _ => None,
    }
}

/// The consumer group of the processes that serve a tier, for all pipelines that have it.
#[must_use]
pub fn retry_tier_group(tier: Span) -> String {
    format!("redeliver-retry-{tier}")
}

/// What the name of a topic says when it is that of a tier or of a due topic: the pipeline, and the tier, or nothing
/// for the due topic.
#[must_use]
pub fn parse_retry_topic(name: &str) -> Option<(&str, Option<Span>)> {
    let (pipeline, role) = name.rsplit_once("-retry-")?;
    if pipeline.is_empty() {
        return None;
    }
    if role == "due" {
        return Some((pipeline, None));
    }
    // Topics are named with the largest unit that fits: `60s` names no topic of ours.
    let tier: Span = role.parse().ok()?;
    (tier.as_millis() > 0 && tier.to_string() == role).then_some((pipeline, Some(tier)))
}

/// Whether a name may be a Kafka topic: 1 to 249 of `a-z A-Z 0-9 . _ -`, not `.` or `..`.
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
    use proptest::prelude::*;

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
    fn a_retired_pipeline_finishes_what_waits_and_takes_nothing_new() {
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
    fn a_wait_ends_in_the_topic_that_its_header_names_if_that_is_the_pipelines_own() {
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
            for foreign in ["former-source", "p", "p-dlq", "q-retry-due", "__consumer_offsets"] {
                assert_eq!(*returns.topic(foreign), current, "{foreign}");
            }
            // Nothing is written to a topic that does not exist because a header names it.
            assert_eq!(*pipeline.returns(false).topic("p-retry-due"), current);
        }
    }

    #[test]
    fn retry_topics_are_told_by_their_names() {
        let tier = |millis| Some(Span::from_millis(millis));
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
    fn the_tier_never_waits_longer_than_the_record() {
        let pipeline = Pipeline::new("p");
        let tier = |millis| pipeline.tier_for(Span::from_millis(millis)).to_string();
        assert_eq!(tier(0), "5s");
        assert_eq!(tier(5_000), "5s");
        assert_eq!(tier(29_999), "5s");
        assert_eq!(tier(30_000), "30s");
        assert_eq!(tier(3_600_000), "1m");
    }

    #[test]
    fn what_is_longer_than_every_tier_goes_to_the_scheduler_if_it_may() {
        let carrier = |pipeline: &Pipeline, millis| {
            let (carrier, topic) = pipeline.carrier(Span::from_millis(millis));
            format!("{carrier} {topic}")
        };
        let mut pipeline = Pipeline::new("p");
        assert_eq!(carrier(&pipeline, 60_001), "1m p-retry-1m");
        assert_eq!(pipeline.longest_wait_in_tiers(), pipeline.max_wait);
        pipeline.long_waits = Some("ingest".into());
        assert_eq!(carrier(&pipeline, 60_001), "scheduler ingest");
        assert_eq!(carrier(&pipeline, 60_000), "1m p-retry-1m");
        assert_eq!(carrier(&pipeline, 1), "5s p-retry-5s");
        assert_eq!(pipeline.longest_wait_in_tiers(), Span::from_secs(60));
    }

    #[test]
    fn a_wait_can_count_from_a_field_of_the_payload() {
        let now = Timestamp::from_millis(1_800_000_000_000);
        let read =
            |payload: &str| payload_time(payload.as_bytes(), "/meta/created_at").map(Timestamp::as_millis);
        assert_eq!(
            read(r#"{"meta":{"created_at":"2026-01-01T00:00:00Z"}}"#),
            Some(1_767_225_600_000)
        );
        assert_eq!(
            read(r#"{"meta":{"created_at":1767225600}}"#),
            Some(1_767_225_600_000)
        );
        assert_eq!(
            read(r#"{"meta":{"created_at":1767225600123}}"#),
            Some(1_767_225_600_123)
        );
        for unusable in [
            r#"{"meta":{}}"#,
            r#"{"meta":{"created_at":"soon"}}"#,
            "not json",
            "",
            r#"{"meta":{"created_at":1e300}}"#,
        ] {
            assert_eq!(read(unusable), None, "{unusable}");
        }
        let pipeline = Pipeline {
            anchor: Anchor::RecordTimestamp,
            ..Pipeline::new("p")
        };
        let record = crate::record::Record {
            position: crate::record::Position {
                topic: "p".into(),
                partition: 0,
                offset: 0,
            },
            timestamp: None,
            key: None,
            value: None,
            headers: crate::record::Headers::new(),
            unreadable_headers: 0,
        };
        assert_eq!(pipeline.anchor_of(&record, None, now), now);
        let written = Timestamp::from_millis(5);
        assert_eq!(pipeline.anchor_of(&record, Some(written), now), written);
    }

    proptest! {
        #[test]
        fn arbitrary_payloads_never_panic(payload in proptest::collection::vec(any::<u8>(), 0..100), pointer in ".{0,20}") {
            let _ = payload_time(&payload, &pointer);
        }
    }
}
