//! Where a dead letter may go, and the record that is written there. No IO.
//!
//! Headers are untrusted: they choose among topics that the configuration allows.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::headers::{self, ReservedHeaders};
use redeliver_core::pattern::matches;
use redeliver_core::pipeline::{is_topic_name, parse_retry_topic};
use redeliver_core::redrive::{self, REDRIVE_COUNT, REDRIVE_ID, REDRIVE_TIME};
use redeliver_core::{Headers, HumanDuration, Output, Pipeline, Position, Record, Timestamp};

use super::job::{Outcome, TargetOptions};
use crate::dialect::{Dialect, Facts, framework_of};
use crate::index::IndexedLetter;

/// The longest time that a job waits for what comes back.
pub const MAX_OBSERVE: Duration = Duration::from_secs(86_400);
/// How long the attempts of a record are assumed to take, and what is read and written between them.
const ATTEMPTS_TAKE: Duration = Duration::from_secs(30);

/// The topics to which dead letters may be written.
#[derive(Clone, Debug, Default)]
pub struct Destinations {
    /// By dead-letter topic.
    pipelines: BTreeMap<Arc<str>, OwnTopics>,
    /// Other topics, as patterns.
    others: Vec<String>,
    /// Topics that are never a destination, as patterns: their records have a form of their own.
    excluded: Vec<String>,
    /// Topics with dead letters, as patterns. Records that are written there are not processed.
    dead_letters: Vec<String>,
    /// The topics in which the payloads are that share groups have not copied, by dead-letter topic.
    sources: BTreeMap<String, Vec<String>>,
    max_count: u32,
}

/// The topics of a pipeline in which it accepts a record again.
#[derive(Clone, Debug)]
struct OwnTopics {
    pipeline: Arc<str>,
    return_topic: Arc<str>,
    source: Option<Arc<str>>,
    /// The source, also of a retired pipeline.
    origin: Arc<str>,
    /// How long the retries of a record take, without the attempts.
    retries_take: Duration,
}

impl OwnTopics {
    /// Whether the pipeline has written a dead letter with these headers. Its topics may contain records of others, such as an older pipeline.
    fn is_of(&self, headers: &Headers) -> bool {
        headers.last(headers::PIPELINE) == Some(self.pipeline.as_bytes())
    }
}

/// What decides where a dead letter goes.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'l> {
    /// The dead-letter topic.
    pub topic: &'l str,
    /// Its headers.
    pub headers: &'l Headers,
    /// How often its record was redriven.
    pub redrives: u32,
    /// Whether it has neither a key nor a value.
    pub is_empty: bool,
    /// Whether its payload is read at its [origin](Destinations::original), before it is written.
    pub is_restorable: bool,
}

impl<'l> Candidate<'l> {
    /// A record of a dead-letter topic.
    #[must_use]
    pub fn of(record: &'l Record) -> Self {
        Self {
            topic: &record.position.topic,
            headers: &record.headers,
            redrives: redrive::count(&record.headers),
            is_empty: record.key.is_none() && record.value.is_none(),
            is_restorable: false,
        }
    }

    /// As [`Candidate::of`], with what was read at its origin.
    #[must_use]
    pub fn restored(record: &'l Record, whole: &Record) -> Self {
        Self {
            redrives: redrive::count(&whole.headers),
            is_restorable: true,
            ..Self::of(record)
        }
    }

    /// Whether it lacks the payload of the record whose failure it describes.
    fn lacks_payload(&self) -> bool {
        !self.is_restorable
            && (self.headers.last(headers::PAYLOAD_OMITTED).is_some()
                || is_uncopied(self.is_empty, self.headers))
    }
}

/// Whether a share group has not copied key and value: a broker does not unless errors.deadletterqueue.copy.record.enable is set for the group, and does not say
/// so.
fn is_uncopied(is_empty: bool, headers: &Headers) -> bool {
    is_empty && Facts::read(headers).dialect == Dialect::ShareGroup
}

/// Where a dead letter goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The topic.
    pub topic: Arc<str>,
    /// The framework that gave up on the record.
    dialect: Dialect,
    /// Whether it is a topic of the pipeline that gave up on the record, which goes on with the record's history.
    is_own: bool,
    /// Whether the pipeline accepts retries in it only if they name it as their return topic.
    is_source: bool,
}

impl Destinations {
    /// The topics of these pipelines and those that match a pattern.
    #[must_use]
    pub fn new<'p>(
        pipelines: impl IntoIterator<Item = &'p Pipeline>,
        others: &[String],
        excluded: Vec<String>,
        max_count: u32,
    ) -> Self {
        let own = |pipeline: &Pipeline| OwnTopics {
            pipeline: pipeline.name.clone(),
            return_topic: pipeline.return_topic(),
            source: (!pipeline.retired).then(|| pipeline.source.clone()),
            origin: pipeline.source.clone(),
            retries_take: retries_take(pipeline),
        };
        Self {
            pipelines: pipelines
                .into_iter()
                .map(|pipeline| (pipeline.dead_letter_topic(), own(pipeline)))
                .collect(),
            others: others.to_vec(),
            excluded,
            dead_letters: Vec::new(),
            sources: BTreeMap::new(),
            max_count,
        }
    }

    /// With the topics in which the payloads are that share groups have not copied, by dead-letter topic.
    #[must_use]
    pub fn with_sources(self, sources: BTreeMap<String, Vec<String>>) -> Self {
        Self { sources, ..self }
    }

    /// All of these topics.
    pub(crate) fn sources(&self) -> impl Iterator<Item = &str> {
        self.sources.values().flatten().map(String::as_str)
    }

    /// Where the record is that a share group has not copied to a dead letter. `is_empty`: the dead letter has neither a key nor a value. Only in the sources of its
    /// topic, as in [`Destinations::original`]. Nothing proves that the record there is that of the dead letter.
    #[must_use]
    pub fn uncopied(&self, topic: &str, headers: &Headers, is_empty: bool) -> Option<Position> {
        let sources = self.sources.get(topic)?;
        if !is_uncopied(is_empty, headers) || headers.last(headers::PAYLOAD_OMITTED).is_some() {
            return None;
        }
        let origin = Facts::read(headers).origin?;
        sources.contains(&origin.topic).then_some(Position {
            partition: origin.partition?,
            offset: origin.offset?,
            topic: origin.topic.into(),
        })
    }

    /// Without topics that match one of these patterns of dead-letter topics, unless a pipeline has one as its source.
    #[must_use]
    pub fn without_dead_letters(self, patterns: &[String]) -> Self {
        Self {
            dead_letters: patterns.to_vec(),
            ..self
        }
    }

    /// The dead-letter topics of the pipelines that read one of these topics: what is written there comes back here.
    pub fn dead_letter_topics<'d>(&'d self, of: &'d [&str]) -> impl Iterator<Item = &'d Arc<str>> {
        self.readers(of).map(|(topic, _)| topic)
    }

    /// How long the retries of a record can take that is written to one of these topics: until then, it is
    /// unknown whether it comes back.
    #[must_use]
    pub fn retries_take(&self, of: &[&str]) -> HumanDuration {
        let longest = self.readers(of).map(|(_, own)| own.retries_take).max();
        longest.unwrap_or_default().into()
    }

    /// How long a job waits for what comes back, unless its caller says so: until the retries are over, and a while for the attempts.
    #[must_use]
    pub fn observe(&self, of: &[&str]) -> HumanDuration {
        let retries = self.retries_take(of).duration();
        (retries + ATTEMPTS_TAKE).min(MAX_OBSERVE).into()
    }

    /// The pipelines that read one of these topics.
    fn readers<'d>(&'d self, of: &'d [&str]) -> impl Iterator<Item = (&'d Arc<str>, &'d OwnTopics)> {
        self.pipelines.iter().filter(move |(_, own)| {
            let mut topics = own.source.iter().chain([&own.return_topic]);
            topics.any(|topic| of.contains(&&**topic))
        })
    }

    /// The pipeline that has written a dead letter.
    fn own(&self, topic: &str, headers: &Headers) -> Option<&OwnTopics> {
        self.pipelines.get(topic).filter(|own| own.is_of(headers))
    }

    /// Where the record is whose payload was left out of a dead letter; `None` if nothing was left out, or
    /// the record could not be recognised. Headers choose no other topic than the source of the pipeline, so
    /// that they cannot make the inspector copy records of another one.
    #[must_use]
    pub fn original(&self, topic: &str, headers: &Headers) -> Option<Position> {
        let omitted = headers.last(headers::PAYLOAD_OMITTED)?;
        headers.last(headers::PAYLOAD_OMITTED_HASH)?;
        // The origin does not have the headers of an edit, also of an earlier redrive, and the hash does not cover headers.
        if omitted != b"value" && headers.last(redrive::REDRIVE_OF).is_some() {
            return None;
        }
        let own = self.own(topic, headers)?;
        let origin = ReservedHeaders::from_headers(headers).ok()?.origin().ok()?;
        (origin.topic == own.origin).then_some(Position {
            topic: origin.topic,
            partition: origin.partition,
            offset: origin.offset,
        })
    }

    /// As [`Destinations::uncopied`], of a record of a dead-letter topic.
    #[must_use]
    pub fn uncopied_of(&self, letter: &Record) -> Option<Position> {
        let is_empty = letter.key.is_none() && letter.value.is_none();
        self.uncopied(&letter.position.topic, &letter.headers, is_empty)
    }

    /// What decides where an indexed dead letter with these headers goes.
    #[must_use]
    pub fn candidate<'l>(&self, letter: &'l IndexedLetter, headers: &'l Headers) -> Candidate<'l> {
        let topic = &letter.id.topic;
        let is_empty = letter.key.is_none() && letter.value_size.is_none();
        Candidate {
            topic,
            headers,
            redrives: redrive::count(headers),
            is_empty,
            is_restorable: self.original(topic, headers).is_some()
                || self.uncopied(topic, headers, is_empty).is_some(),
        }
    }

    /// Where a dead letter goes.
    ///
    /// # Errors
    /// Why it goes nowhere.
    pub fn target(&self, letter: Candidate<'_>, options: &TargetOptions) -> Result<Target, Outcome> {
        let Candidate { topic, headers, .. } = letter;
        if letter.lacks_payload() {
            return Err(Outcome::PayloadOmitted);
        }
        if letter.redrives >= self.max_count && !options.force {
            return Err(Outcome::TooOften);
        }
        let facts = Facts::read(headers);
        if let Some(own) = self.own(topic, headers) {
            let reserved = ReservedHeaders::from_headers(headers).map_err(|_| Outcome::InvalidHeaders)?;
            // Only the pipeline itself looks at them: in another topic, the record is a new one.
            let is_valid = reserved.origin().is_ok() && reserved.retry_count().is_ok();
            let wanted = match &*options.destination {
                "" => &own.return_topic,
                wanted => match [Some(&own.return_topic), own.source.as_ref()]
                    .into_iter()
                    .flatten()
                    .find(|topic| ***topic == *wanted)
                {
                    Some(topic) => topic,
                    None => return self.other(wanted, facts.dialect),
                },
            };
            if !is_valid {
                return Err(Outcome::InvalidHeaders);
            }
            return Ok(Target {
                topic: wanted.clone(),
                dialect: facts.dialect,
                is_own: true,
                is_source: own.source.as_ref() == Some(wanted),
            });
        }
        if !options.destination.is_empty() {
            return self.other(&options.destination, facts.dialect);
        }
        let origin = facts.origin.ok_or(Outcome::NoDestination)?;
        self.other(&origin.topic, facts.dialect)
    }

    /// A topic in which the record is a new one.
    fn other(&self, topic: &str, dialect: Dialect) -> Result<Target, Outcome> {
        let is_one_of = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, topic));
        // Only Kafka itself writes to its internal topics.
        let is_excluded = topic.starts_with("__") || is_one_of(&self.excluded);
        let mut sources = self.pipelines.values().filter_map(|own| own.source.as_ref());
        // Tiers, workers and the inspector expect headers in these topics that the record does not have.
        let is_of_redeliver = parse_retry_topic(topic).is_some()
            || self.pipelines.contains_key(topic)
            || is_one_of(&self.dead_letters);
        let is_allowed = !is_excluded
            && is_topic_name(topic)
            && (sources.any(|source| **source == *topic) || is_one_of(&self.others) && !is_of_redeliver);
        if !is_allowed {
            return Err(Outcome::DestinationNotAllowed);
        }
        Ok(Target {
            topic: topic.into(),
            dialect,
            is_own: false,
            is_source: false,
        })
    }
}

/// The sum of the delays of a pipeline.
fn retries_take(pipeline: &Pipeline) -> Duration {
    let delays = (1..=pipeline.policy.max_retries()).filter_map(|retry| pipeline.policy.nominal_wait(retry));
    delays.fold(Duration::ZERO, |sum, delay| sum.saturating_add(delay.duration()))
}

/// The record to write for a dead letter. Without the headers of the framework that gave up on the record: those of others are user
/// headers, such as of a record that was read from the dead letters of another framework.
#[must_use]
pub fn redriven(letter: &Record, target: &Target, redrive_id: &str, now: Timestamp) -> Output {
    let is_dropped = |name: &str| {
        // Only the record of an edit may differ from the one before.
        let is_of_job = redrive::is_redrive_header(name) || name == redrive::REDRIVE_EDITED;
        if is_of_job || framework_of(name) == Some(target.dialect) {
            return true;
        }
        let is_lineage = [
            headers::PIPELINE,
            headers::ORIGINAL_TOPIC,
            headers::ORIGINAL_PARTITION,
            headers::ORIGINAL_OFFSET,
            headers::ORIGINAL_TIMESTAMP,
        ]
        .contains(&name);
        headers::is_reserved(name) && !(target.is_own && is_lineage)
    };
    let mut headers = letter.headers.filtered(|name| !is_dropped(name));
    if target.is_own {
        headers.push_text(headers::RETRY_COUNT, "0");
        if target.is_source {
            headers.push_text(headers::RETURN_TOPIC, &target.topic);
        }
    }
    headers.push_text(REDRIVE_ID, redrive_id);
    let count = redrive::count(&letter.headers).saturating_add(1);
    headers.push_text(REDRIVE_COUNT, &count.to_string());
    headers.push_text(REDRIVE_TIME, &now.to_string());
    Output {
        topic: target.topic.clone(),
        partition: None,
        key: letter.key.clone(),
        value: letter.value.clone(),
        headers,
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;
    use redeliver_core::Failure;
    use redeliver_core::kept::is_kept;
    use redeliver_core::pipeline::ReturnTo;
    use redeliver_core::route::{Arrival, reject};
    use redeliver_runtime::ProgramConfig;
    use redeliver_testkit::record_at;

    use super::super::start;
    use super::*;
    use crate::config::Sections;
    use crate::dialect::failure_headers;

    const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);

    fn pipeline(return_to: ReturnTo) -> Pipeline {
        Pipeline {
            return_to,
            ..Pipeline::new("docs")
        }
    }

    fn destinations(return_to: ReturnTo) -> Destinations {
        Destinations::new(
            &[pipeline(return_to)],
            &["legacy-*".to_owned()],
            vec!["*-ingest".into()],
            3,
        )
    }

    fn record(topic: &str, headers: Headers) -> Record {
        Record {
            timestamp: Some(NOW),
            key: Some(Bytes::from_static(b"k\0")),
            value: Some(Bytes::from_static(b"\xff\0v")),
            headers,
            ..record_at(topic, 2, 7)
        }
    }

    /// The dead letter of a record of `docs` with these headers.
    fn dead(headers: Headers) -> Record {
        let failure = Failure::permanent("x", "y");
        let letter = reject(&Pipeline::new("docs"), &record("docs", headers), &failure, NOW);
        Record {
            key: letter.key,
            value: letter.value,
            ..record("docs-dlq", letter.headers)
        }
    }

    fn headers_of(pairs: &[(&str, &[u8])]) -> Headers {
        pairs.iter().map(|(name, value)| (*name, Some(*value))).collect()
    }

    fn options(destination: &str) -> TargetOptions {
        TargetOptions {
            destination: destination.to_owned(),
            force: false,
        }
    }

    #[test]
    fn record_returns_without_failed_attempts() {
        for (return_to, wanted, expected) in [
            (ReturnTo::Due, "", "docs-retry-due"),
            (ReturnTo::Source, "", "docs"),
            (ReturnTo::Due, "docs", "docs"),
        ] {
            let letter = dead(headers_of(&[("tenant", b"a"), ("tenant", b"b")]));
            let target = destinations(return_to).target(Candidate::of(&letter), &options(wanted));
            let output = redriven(&letter, &target.unwrap(), "r1", NOW);
            assert_eq!(&*output.topic, expected);
            assert_eq!((&output.key, &output.value), (&letter.key, &letter.value));
            let back = Record {
                key: output.key,
                value: output.value,
                ..record(expected, output.headers.clone())
            };
            let arrival = Arrival::read(&pipeline(return_to), &back).unwrap();
            assert_eq!(arrival.failed_attempts, 0);
            assert_eq!(arrival.origin.id(), "docs-2-7");
            assert_eq!(arrival.origin.timestamp, Some(NOW));
            assert!(output.headers.last(headers::ERROR_CODE).is_none());
            assert_eq!(output.headers.last(REDRIVE_ID), Some(&b"r1"[..]));
            assert_eq!(
                (redrive::count(&output.headers), redrive::time(&output.headers)),
                (1, Some(NOW))
            );
        }
    }

    #[test]
    fn unedited_redrive_keeps_its_link() {
        let (of, edited) = (redrive::REDRIVE_OF, redrive::REDRIVE_EDITED);
        let mut letter = dead(headers_of(&[(of, b"docs-dlq/0/1"), (edited, b"value, headers")]));
        let destinations = destinations(ReturnTo::Due);
        let target = destinations.target(Candidate::of(&letter), &options(""));
        letter.headers = redriven(&letter, &target.unwrap(), "r1", NOW).headers;
        assert_eq!(letter.headers.last(of), Some(&b"docs-dlq/0/1"[..]));
        assert_eq!(letter.headers.last(edited), None);
        // The headers at the origin are still other ones.
        letter.headers.push_text("payload-omitted", "value");
        letter.headers.push_text("payload-omitted-hash", "00");
        assert!(destinations.original("docs-dlq", &letter.headers).is_some());
        letter.headers.push_text("payload-omitted", "value,headers");
        assert_eq!(destinations.original("docs-dlq", &letter.headers), None);
    }

    #[test]
    fn forged_headers_choose_no_topic() {
        let destinations = destinations(ReturnTo::Due);
        let spring = |topic: &[u8]| {
            headers_of(&[
                ("kafka_dlt-original-topic", topic),
                ("kafka_dlt-exception-fqcn", b"E"),
            ])
        };
        let target = |topic: &str, headers: &Headers, wanted: &str| {
            let candidate = Candidate {
                topic,
                headers,
                redrives: 0,
                is_empty: false,
                is_restorable: false,
            };
            let target = destinations.target(candidate, &options(wanted));
            target.map(|target| target.topic.to_string())
        };
        assert_eq!(
            target("s-dlt", &spring(b"legacy-orders"), ""),
            Ok("legacy-orders".to_owned())
        );
        assert_eq!(target("s-dlt", &spring(b"docs"), ""), Ok("docs".to_owned()));
        for forged in [
            "payments",
            "docs-dlq",
            "docs-retry-due",
            "legacy-ingest",
            "__consumer_offsets",
        ] {
            let refused = Err(Outcome::DestinationNotAllowed);
            assert_eq!(
                target("s-dlt", &spring(forged.as_bytes()), ""),
                refused,
                "{forged}"
            );
            assert_eq!(target("s-dlt", &Headers::new(), forged), refused, "{forged}");
        }
        assert_eq!(target("s-dlt", &Headers::new(), ""), Err(Outcome::NoDestination));
        // A record that only says that it is of the pipeline is in another topic.
        let letter = dead(Headers::new());
        assert_eq!(target("s-dlt", &letter.headers, ""), Ok("docs".to_owned()));
        assert_eq!(
            target("docs-dlq", &letter.headers, "payments"),
            Err(Outcome::DestinationNotAllowed)
        );
    }

    #[test]
    fn patterns_admit_no_internal_topics() {
        let config = ProgramConfig::<Sections>::from_yaml(
            "{ kafka: { id_prefix: eu- }, control: { topic: ours }, pipelines: { docs: {}, again: { source: orders-dlq } }, \
             dlq_inspector: { redrive: { destinations: ['*'] } } }",
        );
        let config = config.unwrap();
        let destinations = start::destinations(&config, &config.own.dlq_inspector);
        for (topic, is_allowed) in [
            ("payments", true),
            ("docs", true),
            // The source of a pipeline.
            ("orders-dlq", true),
            ("docs-retry-due", false),
            ("docs-retry-30s", false),
            ("unknown-retry-5s", false),
            ("docs-dlq", false),
            ("payments-dlq", false),
            ("__consumer_offsets", false),
            ("ours", false),
            ("staging-redeliver.dlq.ledger", false),
            ("staging-redeliver.dlq.groups", false),
            ("eu-redeliver.dlq.redrives", false),
            ("eu-redeliver.audit", false),
            ("eu-redeliver.status", false),
            ("eu-redeliver.waiting.actions", false),
            ("staging-redeliver.waiting.actions", false),
            ("staging-redeliver.control", false),
            ("scheduler.jobs.ingest", false),
            ("scheduler.jobs.state", false),
        ] {
            let candidate = Candidate {
                topic: "s-dlt",
                headers: &Headers::new(),
                redrives: 0,
                is_empty: false,
                is_restorable: false,
            };
            let target = destinations.target(candidate, &options(topic));
            assert_eq!(target.is_ok(), is_allowed, "{topic}: {target:?}");
        }
        let returning = |topics: &[&str]| -> Vec<String> {
            let topics = destinations.dead_letter_topics(topics);
            topics.map(ToString::to_string).collect()
        };
        assert_eq!(returning(&["docs-retry-due", "payments"]), ["docs-dlq"]);
        assert_eq!(returning(&["orders-dlq", "docs"]), ["again-dlq", "docs-dlq"]);
    }

    #[test]
    fn incomplete_record_is_not_redriven() {
        let destinations = destinations(ReturnTo::Due);
        let target = |add: &[(&str, &[u8])], force| {
            let mut letter = dead(Headers::new());
            for (name, value) in add {
                letter.headers.push(name, Some(value));
            }
            let options = TargetOptions { force, ..options("") };
            destinations.target(Candidate::of(&letter), &options).map(|_| ())
        };
        assert_eq!(
            target(&[("payload-omitted", b"value")], true),
            Err(Outcome::PayloadOmitted)
        );
        assert_eq!(target(&[("redrive-count", b"2")], false), Ok(()));
        assert_eq!(target(&[("redrive-count", b"3")], false), Err(Outcome::TooOften));
        assert_eq!(target(&[("redrive-count", b"3")], true), Ok(()));
        assert_eq!(
            target(&[("original-offset", b"1")], false),
            Err(Outcome::InvalidHeaders)
        );
    }

    #[test]
    fn empty_share_group_letter_is_skipped() {
        let destinations = destinations(ReturnTo::Due);
        let share = [("__dlq.errors.topic", &b"legacy-a"[..])];
        let spring = [("kafka_dlt-original-topic", &b"legacy-a"[..])];
        let target = |headers: &[(&str, &[u8])], key: Option<&'static str>, value: Option<&'static str>| {
            let letter = Record {
                key: key.map(Bytes::from),
                value: value.map(Bytes::from),
                ..record("s-dlt", headers_of(headers))
            };
            let target = destinations.target(Candidate::of(&letter), &options(""));
            target.map(|target| target.topic.to_string())
        };
        assert_eq!(target(&share, None, None), Err(Outcome::PayloadOmitted));
        for (headers, key, value) in [
            (&share, Some("k"), None),
            (&share, None, Some("v")),
            // Other frameworks always copy the record.
            (&spring, None, None),
        ] {
            assert_eq!(target(headers, key, value), Ok("legacy-a".to_owned()));
        }
    }

    #[test]
    fn only_headers_of_dialect_are_removed() {
        let of_dialects: [(Dialect, &str, &[&str]); 6] = [
            (
                Dialect::Spring,
                "kafka_dlt-original-topic",
                &[
                    "kafka_dlt-exception-stacktrace",
                    "retry_topic-backoff-timestamp",
                    "kafka_deliveryAttempt",
                    "springDeserializerExceptionValue",
                ],
            ),
            (
                Dialect::Connect,
                "__connect.errors.topic",
                &["__connect.errors.stage", "__connect.errors.task.id"],
            ),
            (
                Dialect::Streams,
                "__streams.errors.topic",
                &["__streams.errors.stacktrace"],
            ),
            (
                Dialect::SmallRye,
                "dead-letter-topic",
                &[
                    "dead-letter-cause",
                    "deserialization-failure-data",
                    "deserialization-failure-dlq",
                ],
            ),
            (
                Dialect::ShareGroup,
                "__dlq.errors.topic",
                &["__dlq.errors.message"],
            ),
            (
                Dialect::Redeliver,
                "error-code",
                &["error-message", "process-after"],
            ),
        ];
        for (dialect, mark, others) in of_dialects {
            // Of all other frameworks, only what does not make the record a dead letter of theirs.
            let foreign = of_dialects.iter().filter(|(other, ..)| *other != dialect);
            let foreign =
                foreign.flat_map(|(other, _, names)| names.iter().filter(|_| *other != Dialect::Redeliver));
            let foreign: Vec<&str> = foreign
                .copied()
                .filter(|name| *name != "__dlq.errors.message")
                .collect();
            let users = ["kafka_correlationId", "dead-letter-office"];
            let names = others.iter().copied().chain([mark, "redrive-id"]);
            let names = names.chain(foreign.iter().copied()).chain(users);
            let headers: Headers = names.map(|name| (name, Some(&b"1"[..]))).collect();
            assert_eq!(Facts::read(&headers).dialect, dialect);
            let letter = record("s-dlt", headers);
            let target = destinations(ReturnTo::Due).target(Candidate::of(&letter), &options("legacy-a"));
            let output = redriven(&letter, &target.unwrap(), "r1", NOW);
            let kept: Vec<&str> = output.headers.iter().map(|(name, _)| name).collect();
            let added = [REDRIVE_ID, REDRIVE_COUNT, REDRIVE_TIME];
            let expected: Vec<&str> = foreign.into_iter().chain(users).chain(added).collect();
            assert_eq!(kept, expected, "{dialect:?}");
        }
    }

    /// Names of user headers: also those that other frameworks write, and those that look like ours.
    fn any_name() -> impl Strategy<Value = String> {
        let of_frameworks: Vec<String> = failure_headers().collect();
        let alike = ["Error-Code", "redrive", "job-id", "content-type", ""].map(str::to_owned);
        prop_oneof![
            "[a-z]{1,3}",
            proptest::sample::select(of_frameworks),
            proptest::sample::select(alike.to_vec()),
        ]
    }

    proptest! {
        #[test]
        fn user_headers_stay_byte_for_byte(
            user in proptest::collection::vec((any_name(), proptest::option::of(proptest::collection::vec(any::<u8>(), 0..4))), 0..8),
        ) {
            let user: Headers = user.iter().map(|(name, value)| (name.as_str(), value.as_deref())).collect();
            let mut letter = dead(user.clone());
            for count in 1..3_u32 {
                let target = destinations(ReturnTo::Due).target(Candidate::of(&letter), &options("")).unwrap();
                let output = redriven(&letter, &target, "r1", NOW);
                let kept = output.headers.filtered(is_kept);
                prop_assert_eq!(&kept, &user);
                prop_assert_eq!(redrive::count(&output.headers), count);
                // It fails again.
                let failure = Failure::permanent("x", "y");
                let back = Record { headers: output.headers, ..record("docs-retry-due", Headers::new()) };
                let again = reject(&Pipeline::new("docs"), &back, &failure, NOW);
                letter = Record { headers: again.headers, ..letter };
            }
        }
    }

    #[test]
    fn observation_lasts_as_long_as_retries() {
        let patient = Pipeline {
            policy: redeliver_core::RetryPolicy::listed(
                vec![HumanDuration::from_secs(600)],
                Some(3),
                redeliver_core::Jitter::Full,
            )
            .unwrap(),
            ..Pipeline::new("patient")
        };
        let eternal = Pipeline {
            policy: redeliver_core::RetryPolicy::listed(
                vec![HumanDuration::from_secs(86_400)],
                Some(9),
                redeliver_core::Jitter::None,
            )
            .unwrap(),
            ..Pipeline::new("eternal")
        };
        let pipelines = [Pipeline::new("docs"), patient, eternal];
        let destinations = Destinations::new(&pipelines, &[], Vec::new(), 3);
        for (of, expected) in [
            (&["docs-retry-due"][..], 5 + 30 + 60 + 30),
            (&["docs"], 5 + 30 + 60 + 30),
            (&["docs", "patient"], 1_800 + 30),
            (&["eternal-retry-due"], 86_400),
            (&["legacy"], 30),
        ] {
            assert_eq!(
                destinations.observe(of),
                HumanDuration::from_secs(expected),
                "{of:?}"
            );
        }
        assert_eq!(destinations.retries_take(&["legacy"]), HumanDuration::default());
    }
}
