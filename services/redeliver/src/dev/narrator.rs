//! Tells in plain words what happens to each record, from nothing but the topics: what any observer could
//! see.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use redeliver_core::headers;
use redeliver_core::pipeline::TopicRole;
use redeliver_core::{Pipeline, Record, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::reader::{ReadError, TopicTail};
use tokio_util::sync::CancellationToken;

/// How many records went where.
#[derive(Clone, Debug, Default)]
pub(super) struct Totals {
    produced: u64,
    enriched: u64,
    dead: u64,
    returned: u64,
    /// Released after due, in milliseconds; negative would be early.
    lateness: Vec<i64>,
}

impl Totals {
    fn in_retry_or_in_hand(&self) -> u64 {
        self.produced.saturating_sub(self.enriched + self.dead)
    }

    /// One line for people.
    pub(super) fn line(&self) -> String {
        let mut line = format!(
            "{} in = {} enriched + {} dead + {} waiting or in hand; {} came back",
            self.produced,
            self.enriched,
            self.dead,
            self.in_retry_or_in_hand(),
            self.returned
        );
        let mut lateness = self.lateness.clone();
        lateness.sort_unstable();
        if let (Some(least), Some(middle), Some(most)) = (
            lateness.first(),
            lateness.get(lateness.len() / 2),
            lateness.last(),
        ) {
            let early = if *least < 0 {
                format!("EARLY by {} ms", -least)
            } else {
                "none early".to_owned()
            };
            let _ = write!(line, ", {early}, late by p50 {middle} ms, max {most} ms");
        }
        line
    }
}

/// Follows the topics of a pipeline and prints.
pub(super) struct Narrator {
    tail: TopicTail,
    pipeline: Arc<Pipeline>,
    totals: Arc<Mutex<Totals>>,
    began: Instant,
}

/// How long records are gathered before they are told in order.
const MOMENT: Duration = Duration::from_millis(100);
/// How many latenesses are kept for the summary.
const KEPT: usize = 10_000;

impl Narrator {
    pub(super) fn new(
        settings: &KafkaSettings,
        pipeline: Arc<Pipeline>,
        totals: Arc<Mutex<Totals>>,
        began: Instant,
    ) -> Result<Self, ReadError> {
        let topics: Vec<Arc<str>> = pipeline.topics().into_iter().map(|(topic, _)| topic).collect();
        Ok(Self {
            tail: TopicTail::new(settings, &topics)?,
            pipeline,
            totals,
            began,
        })
    }

    /// Prints what happens until the token is cancelled. Blocks its thread.
    pub(super) fn run(mut self, shutdown: &CancellationToken) -> Result<(), ReadError> {
        let roles = self.pipeline.topics();
        while !shutdown.is_cancelled() {
            for record in self.gather()? {
                let role = roles.iter().find(|(topic, _)| *topic == record.position.topic);
                if let Some(sentence) = role.and_then(|(_, role)| self.observe(*role, &record)) {
                    let at = self.began.elapsed().as_secs_f64();
                    let name = record
                        .key
                        .as_deref()
                        .map(String::from_utf8_lossy)
                        .unwrap_or_default();
                    println!("{at:7.1}s  {name:<8} {sentence}");
                }
            }
        }
        Ok(())
    }

    /// What comes within a moment, in the order in which it was written: topics are read side by side.
    fn gather(&mut self) -> Result<Vec<Record>, ReadError> {
        let mut records = Vec::new();
        let until = Instant::now() + MOMENT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.tail.next(left)? {
                Some(record) if records.len() < 1000 => records.push(record),
                Some(record) => {
                    records.push(record);
                    break;
                }
                None if left.is_zero() => break,
                None => {}
            }
        }
        records.sort_by_key(|record| record.timestamp);
        Ok(records)
    }

    fn observe(&self, role: TopicRole, record: &Record) -> Option<String> {
        let text = |name| String::from_utf8_lossy(record.headers.last(name).unwrap_or_default()).into_owned();
        let mut totals = self.totals.lock().unwrap_or_else(PoisonError::into_inner);
        match role {
            TopicRole::Source => {
                totals.produced += 1;
                None
            }
            TopicRole::Output => {
                totals.enriched += 1;
                let failed: u32 = text(headers::RETRY_COUNT).parse().unwrap_or(0);
                Some(match failed {
                    0 => "enriched".to_owned(),
                    failed => format!("enriched at attempt {}", failed + 1),
                })
            }
            TopicRole::Tier(tier) => Some(format!(
                "failed with {} (attempt {}); waits {tier} in {}",
                text(headers::ERROR_CODE),
                text(headers::RETRY_COUNT),
                record.position.topic
            )),
            TopicRole::Due => {
                totals.returned += 1;
                let due: Timestamp = text(headers::PROCESS_AFTER).parse().ok()?;
                let late = record.timestamp?.as_millis() - due.as_millis();
                if totals.lateness.len() < KEPT {
                    totals.lateness.push(late);
                }
                Some(format!("is back, {late} ms after it was due"))
            }
            TopicRole::DeadLetter => {
                totals.dead += 1;
                Some(format!(
                    "is dead ({}): {}; see {}",
                    text(headers::ERROR_CLASS),
                    text(headers::ERROR_MESSAGE),
                    record.position.topic
                ))
            }
        }
    }
}
