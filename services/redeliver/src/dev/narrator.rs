//! Tells in plain words what happens to each record, from nothing but the topics: what any observer could
//! see.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use redeliver_core::headers;
use redeliver_core::pipeline::TopicRole;
use redeliver_core::scheduler::SchedulerRole;
use redeliver_core::{Pipeline, Record, SchedulerTopics, Span, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::reader::{ReadError, TopicTail};
use redeliver_proto::convert::from_headers;
use redeliver_proto::{Message as _, v1};
use tokio_util::sync::CancellationToken;

/// How many records went where.
#[derive(Clone, Debug, Default)]
pub(super) struct Totals {
    produced: u64,
    /// Jobs that were accepted, those that were dispatched (they are produced then), and those that were refused.
    scheduled: u64,
    dispatched: u64,
    refused: u64,
    enriched: u64,
    dead: u64,
    returned: u64,
    /// How long after their due time records were released and jobs dispatched, in milliseconds; negative
    /// would be early: how many there were of each.
    lateness: BTreeMap<i64, u64>,
}

impl Totals {
    fn in_retry_or_in_hand(&self) -> u64 {
        self.produced.saturating_sub(self.enriched + self.dead)
    }

    /// Notes how long after its due time a record was written.
    fn late(&mut self, record: &Record, due: Timestamp) -> Option<i64> {
        let late = record.timestamp?.as_millis() - due.as_millis();
        *self.lateness.entry(late).or_default() += 1;
        Some(late)
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
        let _ = write!(
            line,
            "; {} jobs = {} dispatched + {} waiting, {} refused",
            self.scheduled,
            self.dispatched,
            self.scheduled.saturating_sub(self.dispatched),
            self.refused
        );
        let ends = (self.lateness.keys().next(), self.lateness.keys().next_back());
        if let ((Some(least), Some(most)), Some(middle)) = (ends, self.median_lateness()) {
            let early = if *least < 0 {
                format!("EARLY by {} ms", -least)
            } else {
                "none early".to_owned()
            };
            let _ = write!(line, ", {early}, late by p50 {middle} ms, max {most} ms");
        }
        line
    }

    fn median_lateness(&self) -> Option<i64> {
        let half = self.lateness.values().sum::<u64>() / 2;
        let mut counted = 0;
        let middle = self.lateness.iter().find(|(_, count)| {
            counted += **count;
            counted > half
        });
        middle.map(|(late, _)| *late)
    }
}

/// Follows the topics of a pipeline and prints.
pub(super) struct Narrator {
    tail: TopicTail,
    roles: Vec<(Arc<str>, Role)>,
    totals: Arc<Mutex<Totals>>,
    began: Instant,
}

/// What a topic is to the demonstration.
#[derive(Clone, Copy)]
enum Role {
    Pipeline(TopicRole),
    Scheduler(SchedulerRole),
}

/// How long records are gathered before they are told in order.
const MOMENT: Duration = Duration::from_millis(100);

impl Narrator {
    pub(super) fn new(
        settings: &KafkaSettings,
        pipeline: &Pipeline,
        scheduler: &SchedulerTopics,
        totals: Arc<Mutex<Totals>>,
        began: Instant,
    ) -> Result<Self, ReadError> {
        let of_pipeline = pipeline.topics().into_iter();
        let of_scheduler = scheduler.topics().into_iter();
        // What an application's jobs go to is the pipeline's source here.
        let roles: Vec<(Arc<str>, Role)> = of_pipeline
            .map(|(topic, role)| (topic, Role::Pipeline(role)))
            .chain(
                of_scheduler
                    .filter(|(_, role)| *role != SchedulerRole::App)
                    .map(|(topic, role)| (topic, Role::Scheduler(role))),
            )
            .collect();
        let topics: Vec<Arc<str>> = roles.iter().map(|(topic, _)| topic.clone()).collect();
        Ok(Self {
            tail: TopicTail::new(settings, &topics)?,
            roles,
            totals,
            began,
        })
    }

    /// Prints what happens until the token is cancelled. Blocks its thread.
    pub(super) fn run(mut self, shutdown: &CancellationToken) -> Result<(), ReadError> {
        while !shutdown.is_cancelled() {
            for record in self.gather()? {
                let topic = &record.position.topic;
                let told = match self.roles.iter().find(|(known, _)| known == topic) {
                    Some((_, Role::Pipeline(role))) => {
                        let sentence = self.observe(*role, &record);
                        sentence.map(|sentence| (name(record.key.as_deref()), sentence))
                    }
                    Some((_, Role::Scheduler(role))) => self.observe_job(*role, &record),
                    None => None,
                };
                if let Some((name, sentence)) = told {
                    let at = self.began.elapsed().as_secs_f64();
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
                let due: Timestamp = text(headers::SCHEDULED_TIME).parse().ok()?;
                totals.dispatched += 1;
                let late = totals.late(record, due)?;
                Some(format!("is dispatched, {late} ms after it was due"))
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
                let late = totals.late(record, due)?;
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

    /// What happens to a job before it is in its topic, and the name of what it is to bring there.
    fn observe_job(&self, role: SchedulerRole, record: &Record) -> Option<(String, String)> {
        let mut totals = self.totals.lock().unwrap_or_else(PoisonError::into_inner);
        match role {
            SchedulerRole::State => {
                let job = v1::JobRecord::decode(record.value.clone()?).ok()?;
                if job.long_wait {
                    return long_wait(&job);
                }
                // Jobs that are due at once are dispatched without having waited.
                if job.revision == 1 && job.state() == v1::JobState::Scheduled {
                    totals.scheduled += 1;
                }
                let due = Timestamp::from_millis(job.due_ms);
                let wait = due.since(Timestamp::from_millis(job.accepted_ms)).as_secs_f64();
                let is_new = job.state() == v1::JobState::Scheduled;
                is_new.then(|| {
                    (
                        name(job.key.as_deref()),
                        format!("is scheduled, due in {wait:.1} s"),
                    )
                })
            }
            SchedulerRole::DeadLetter => {
                totals.refused += 1;
                let why = record.headers.last(headers::ERROR_MESSAGE).unwrap_or_default();
                let why = String::from_utf8_lossy(why);
                let sentence = format!(
                    "is refused by the scheduler: {why}; see {}",
                    record.position.topic
                );
                Some((name(record.key.as_deref()), sentence))
            }
            SchedulerRole::Ingest | SchedulerRole::Answers | SchedulerRole::App => None,
        }
    }
}

/// A record of the pipeline that begins to wait with the scheduler; when it comes back it is told from the
/// due topic.
fn long_wait(job: &v1::JobRecord) -> Option<(String, String)> {
    if job.state() != v1::JobState::Scheduled {
        return None;
    }
    let list = from_headers(&job.headers);
    let text = |name| String::from_utf8_lossy(list.last(name).unwrap_or_default()).into_owned();
    let wait = Timestamp::from_millis(job.due_ms).since(Timestamp::from_millis(job.accepted_ms));
    // The way here took a moment of it.
    let wait = Span::from_secs(wait.as_secs() + u64::from(wait.subsec_nanos() > 0));
    let sentence = format!(
        "failed with {} (attempt {}); waits {wait} (scheduler)",
        text(headers::ERROR_CODE),
        text(headers::RETRY_COUNT),
    );
    Some((name(job.key.as_deref()), sentence))
}

fn name(key: Option<&[u8]>) -> String {
    key.map(String::from_utf8_lossy).unwrap_or_default().into_owned()
}

#[cfg(test)]
mod tests {
    use redeliver_core::{Headers, Position};
    use redeliver_proto::convert::to_headers;

    use super::*;

    #[test]
    fn the_summary_tells_of_every_lateness_however_many_came_before() {
        let record = |at: i64| Record {
            position: Position {
                topic: "docs-retry-due".into(),
                partition: 0,
                offset: 0,
            },
            timestamp: Some(Timestamp::from_millis(at)),
            key: None,
            value: None,
            headers: Headers::new(),
            unreadable_headers: 0,
        };
        let mut totals = Totals::default();
        assert!(!totals.line().contains("late"), "{}", totals.line());
        let due = Timestamp::from_millis(1_000_000);
        for n in 0..30_000 {
            assert_eq!(totals.late(&record(1_000_001 + n % 3), due), Some(1 + n % 3));
        }
        let end = |totals: &Totals| totals.line().rsplit_once("refused, ").unwrap().1.to_owned();
        assert_eq!(end(&totals), "none early, late by p50 2 ms, max 3 ms");
        totals.late(&record(1_000_900), due);
        assert_eq!(end(&totals), "none early, late by p50 2 ms, max 900 ms");
        totals.late(&record(999_996), due);
        assert_eq!(end(&totals), "EARLY by 4 ms, late by p50 2 ms, max 900 ms");
    }

    #[test]
    fn a_record_that_begins_to_wait_with_the_scheduler_is_told_once() {
        let headers = [
            (headers::ERROR_CODE, Some(&b"http.503"[..])),
            (headers::RETRY_COUNT, Some(&b"1"[..])),
        ];
        let mut job = v1::JobRecord {
            long_wait: true,
            state: v1::JobState::Scheduled.into(),
            accepted_ms: 1_000_012,
            due_ms: 8_200_000,
            key: Some("doc-7".into()),
            headers: to_headers(&headers.into_iter().collect()),
            ..v1::JobRecord::default()
        };
        let told = long_wait(&job).unwrap();
        let sentence = "failed with http.503 (attempt 1); waits 2h (scheduler)";
        assert_eq!(told, ("doc-7".to_owned(), sentence.to_owned()));
        job.state = v1::JobState::Dispatched.into();
        assert_eq!(long_wait(&job), None);
    }
}
