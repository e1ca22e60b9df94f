//! Prints what happens to each record, as observed in the topics.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use redeliver_core::headers;
use redeliver_core::pipeline::TopicRole;
use redeliver_core::scheduler::SchedulerRole;
use redeliver_core::{HumanDuration, Pipeline, Record, SchedulerTopics, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::follow::{Follower, Origin};
use redeliver_kafka::reader::ReadError;
use redeliver_proto::convert::from_headers;
use redeliver_proto::{Message as _, v1};
use tokio_util::sync::CancellationToken;

#[derive(Clone, Debug, Default)]
pub(super) struct Totals {
    produced: u64,
    scheduled: u64,
    /// Dispatched jobs are counted as produced as well.
    dispatched: u64,
    rejected: u64,
    enriched: u64,
    dead: u64,
    redriven: u64,
    returned: u64,
    /// Lateness of released records and dispatched jobs in milliseconds, with counts. Negative values would be early.
    lateness: BTreeMap<i64, u64>,
}

impl Totals {
    fn unfinished(&self) -> u64 {
        (self.produced + self.redriven).saturating_sub(self.enriched + self.dead)
    }

    fn add_lateness(&mut self, record: &Record, due: Timestamp) -> Option<i64> {
        let late = record.timestamp?.as_millis() - due.as_millis();
        *self.lateness.entry(late).or_default() += 1;
        Some(late)
    }

    pub(super) fn line(&self) -> String {
        let redriven = match self.redriven {
            0 => String::new(),
            redriven => format!(" + {redriven} redriven"),
        };
        let mut line = format!(
            "{} in{redriven} = {} enriched + {} dead + {} waiting or in flight; {} released",
            self.produced,
            self.enriched,
            self.dead,
            self.unfinished(),
            self.returned
        );
        let _ = write!(
            line,
            "; {} jobs = {} dispatched + {} waiting; {} rejected",
            self.scheduled,
            self.dispatched,
            self.scheduled.saturating_sub(self.dispatched),
            self.rejected
        );
        let ends = (self.lateness.keys().next(), self.lateness.keys().next_back());
        if let ((Some(min), Some(max)), Some(median)) = (ends, self.median_lateness()) {
            let early = if *min < 0 {
                format!("EARLY by {} ms", -min)
            } else {
                "none early".to_owned()
            };
            let _ = write!(line, "; {early}; lateness p50 {median} ms, max {max} ms");
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

pub(super) struct Narrator {
    follower: Follower,
    roles: Vec<(Arc<str>, Role)>,
    totals: Arc<Mutex<Totals>>,
    began: Instant,
    stop: CancellationToken,
}

#[derive(Clone, Copy)]
enum Role {
    Pipeline(TopicRole),
    Scheduler(SchedulerRole),
}

/// Records are collected for this long and printed in the order of their timestamps.
const MOMENT: Duration = Duration::from_millis(100);

impl Narrator {
    pub(super) fn new(
        settings: &KafkaSettings,
        pipeline: &Pipeline,
        scheduler: &SchedulerTopics,
        totals: Arc<Mutex<Totals>>,
        began: Instant,
        stop: CancellationToken,
    ) -> Result<Self, ReadError> {
        let of_pipeline = pipeline.topics().into_iter();
        let of_scheduler = scheduler.topics().into_iter();
        // The application's topic is the source of the pipeline.
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
            follower: Follower::of_topics(settings, &topics, Origin::Beginning)?,
            roles,
            totals,
            began,
            stop,
        })
    }

    /// Prints what happens until the token is cancelled. Blocks its thread.
    pub(super) fn run(mut self, shutdown: &CancellationToken) -> Result<(), ReadError> {
        while !shutdown.is_cancelled() {
            for record in self.gather()? {
                let topic = &record.position.topic;
                let event = match self.roles.iter().find(|(known, _)| known == topic) {
                    Some((_, Role::Pipeline(role))) => {
                        let sentence = self.observe(*role, &record);
                        sentence.map(|sentence| (name(record.key.as_deref()), sentence))
                    }
                    Some((_, Role::Scheduler(role))) => self.observe_job(*role, &record),
                    None => None,
                };
                if let Some((name, sentence)) = event {
                    let at = self.began.elapsed().as_secs_f64();
                    super::tell(format_args!("{at:7.1}s  {name:<8} {sentence}"), &self.stop);
                }
            }
        }
        Ok(())
    }

    /// Sorts by timestamp, because partitions are read independently of each other.
    fn gather(&mut self) -> Result<Vec<Record>, ReadError> {
        let mut records = Vec::new();
        let until = Instant::now() + MOMENT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.follower.next(left)? {
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
                let late = totals.add_lateness(record, due)?;
                Some(format!("dispatched, {late} ms after its due time"))
            }
            TopicRole::Output => {
                totals.enriched += 1;
                let failed: u32 = text(headers::RETRY_COUNT).parse().unwrap_or(0);
                Some(match failed {
                    0 => "enriched".to_owned(),
                    failed => format!("enriched on attempt {}", failed + 1),
                })
            }
            TopicRole::Tier(tier) => Some(format!(
                "failed with {} (attempt {}); waiting {tier} in {}",
                text(headers::ERROR_CODE),
                text(headers::RETRY_COUNT),
                record.position.topic
            )),
            TopicRole::Due if record.headers.last(headers::PROCESS_AFTER).is_none() => {
                totals.redriven += 1;
                Some("redriven".to_owned())
            }
            TopicRole::Due => {
                totals.returned += 1;
                let due: Timestamp = text(headers::PROCESS_AFTER).parse().ok()?;
                let late = totals.add_lateness(record, due)?;
                Some(format!("released, {late} ms after its due time"))
            }
            TopicRole::DeadLetter => {
                totals.dead += 1;
                Some(format!(
                    "dead letter ({}): {}; see {}",
                    text(headers::ERROR_CLASS),
                    text(headers::ERROR_MESSAGE),
                    record.position.topic
                ))
            }
        }
    }

    /// The key of a job's record, and what happens to the job before its dispatch.
    fn observe_job(&self, role: SchedulerRole, record: &Record) -> Option<(String, String)> {
        let mut totals = self.totals.lock().unwrap_or_else(PoisonError::into_inner);
        match role {
            SchedulerRole::State => {
                if record
                    .key
                    .as_deref()
                    .is_some_and(|key| key.starts_with(b"schedule:"))
                {
                    return None;
                }
                let job = v1::JobRecord::decode(record.value.clone()?).ok()?;
                if job.long_wait {
                    return long_wait(&job);
                }
                // A job that is due on arrival is dispatched without this state.
                if job.revision == 1 && job.state() == v1::JobState::Scheduled {
                    totals.scheduled += 1;
                }
                let due = Timestamp::from_millis(job.due_ms);
                let wait = due.since(Timestamp::from_millis(job.accepted_ms)).as_secs_f64();
                let is_new = job.state() == v1::JobState::Scheduled;
                is_new.then(|| (name(job.key.as_deref()), format!("scheduled, due in {wait:.1} s")))
            }
            SchedulerRole::DeadLetter => {
                totals.rejected += 1;
                let reason = record.headers.last(headers::ERROR_MESSAGE).unwrap_or_default();
                let reason = String::from_utf8_lossy(reason);
                let sentence = format!(
                    "rejected by the scheduler: {reason}; see {}",
                    record.position.topic
                );
                Some((name(record.key.as_deref()), sentence))
            }
            SchedulerRole::Ingest | SchedulerRole::Answers | SchedulerRole::App => None,
        }
    }
}

/// A record of the pipeline that starts a long wait in the scheduler. Its release is observed in the due topic.
fn long_wait(job: &v1::JobRecord) -> Option<(String, String)> {
    if job.state() != v1::JobState::Scheduled {
        return None;
    }
    let list = from_headers(&job.headers);
    let text = |name| String::from_utf8_lossy(list.last(name).unwrap_or_default()).into_owned();
    let wait = Timestamp::from_millis(job.due_ms).since(Timestamp::from_millis(job.accepted_ms));
    // Rounded up, because a part of the delay has passed on the way to the scheduler.
    let wait = HumanDuration::from_secs(wait.as_secs() + u64::from(wait.subsec_nanos() > 0));
    let sentence = format!(
        "failed with {} (attempt {}); waiting {wait} (scheduler)",
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
    fn totals_include_every_lateness() {
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
        assert!(!totals.line().contains("lateness"), "{}", totals.line());
        let due = Timestamp::from_millis(1_000_000);
        for n in 0..30_000 {
            assert_eq!(
                totals.add_lateness(&record(1_000_001 + n % 3), due),
                Some(1 + n % 3)
            );
        }
        let end = |totals: &Totals| totals.line().rsplit_once("rejected; ").unwrap().1.to_owned();
        assert_eq!(end(&totals), "none early; lateness p50 2 ms, max 3 ms");
        totals.add_lateness(&record(1_000_900), due);
        assert_eq!(end(&totals), "none early; lateness p50 2 ms, max 900 ms");
        totals.add_lateness(&record(999_996), due);
        assert_eq!(end(&totals), "EARLY by 4 ms; lateness p50 2 ms, max 900 ms");
    }

    #[test]
    fn long_wait_is_printed_once() {
        let headers = [
            (headers::ERROR_CODE, Some(&b"http.500"[..])),
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
        let event = long_wait(&job).unwrap();
        let sentence = "failed with http.500 (attempt 1); waiting 2h (scheduler)";
        assert_eq!(event, ("doc-7".to_owned(), sentence.to_owned()));
        job.state = v1::JobState::Dispatched.into();
        assert_eq!(long_wait(&job), None);
    }
}
