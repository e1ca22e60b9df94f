//! What a record says about its job. No IO.

use redeliver_core::headers::{ERROR_TIMESTAMP, JOB_ID, Origin, PROCESS_AFTER, ReservedHeaders};
use redeliver_core::pipeline::TopicRole;
use redeliver_core::route::Arrival;
use redeliver_core::{JobId, Pipeline, Record, Timestamp, redrive};

use crate::waiting::timeline::Location;

/// Where in the life of a job a copy was written. Later copies are greater, also if the clocks of processes differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Stage {
    pub(crate) redrives: u8,
    /// A result or a dead letter.
    pub(crate) is_end: bool,
    pub(crate) attempts: u16,
    /// When its last attempt failed, in milliseconds; 0 before that. Throttled attempts do not count, so only this tells their waits apart. The due time
    /// does not: a record that an operator has released or retried has an earlier one than its copy in the tier.
    pub(crate) failed: i64,
    /// Within a wait.
    pub(crate) rank: u8,
}

/// A record of a job in a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JobCopy {
    pub(crate) id: JobId,
    pub(crate) stage: Stage,
    /// When its last wait ends or has ended.
    pub(crate) due: Option<Timestamp>,
    /// Identifies where it entered the pipeline, nearly always.
    pub(crate) origin: u32,
}

/// The job that a record names; `None` if it names none.
pub(crate) fn job_id(record: &Record) -> Option<JobId> {
    std::str::from_utf8(record.headers.last(JOB_ID)?)
        .ok()?
        .parse()
        .ok()
}

impl JobCopy {
    /// Reads a record of a topic of a pipeline, or the one in a command for the scheduler. `None` if it is not of a job, or other
    /// records of the topic are those of the pipeline.
    pub(crate) fn read(pipeline: &Pipeline, location: Location, record: &Record) -> Option<Self> {
        let id = job_id(record)?;
        let (origin, attempts) = if location == Location::Topic(TopicRole::Source) {
            let arrival = Arrival::read(pipeline, record).unwrap_or_else(|_| Arrival::salvaged(record));
            (arrival.origin, arrival.failed_attempts)
        } else {
            let reserved = ReservedHeaders::read(record).ok()?;
            if !reserved.is_retry_of(&pipeline.name) {
                return None;
            }
            (reserved.origin().ok()?, reserved.retry_count().ok()?)
        };
        let is_new = Origin::of(record) == origin;
        let time = |name| -> Option<Timestamp> {
            let text = record.headers.last(name).filter(|_| !is_new)?;
            std::str::from_utf8(text).ok()?.parse().ok()
        };
        let is_end = matches!(
            location,
            Location::Topic(TopicRole::Output | TopicRole::DeadLetter)
        );
        Some(Self {
            id,
            stage: Stage {
                redrives: u8::try_from(redrive::count(&record.headers)).unwrap_or(u8::MAX),
                is_end,
                attempts: u16::try_from(attempts).unwrap_or(u16::MAX),
                failed: time(ERROR_TIMESTAMP).map_or(0, Timestamp::as_millis),
                rank: location.rank(),
            },
            due: time(PROCESS_AFTER),
            origin: hash(&origin),
        })
    }
}

fn hash(origin: &Origin) -> u32 {
    let offset = origin.offset.unsigned_abs();
    let [low, high] = [offset, offset >> 32].map(|half| u32::try_from(half & 0xffff_ffff).unwrap_or(0));
    origin.partition.unsigned_abs().wrapping_mul(0x9e37_79b1) ^ low ^ high.rotate_left(16)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use redeliver_core::HumanDuration;
    use redeliver_core::headers::{set_process_after, write_lineage};
    use redeliver_core::redrive::REDRIVE_COUNT;
    use redeliver_testkit::record_at;

    use super::*;

    const TIER: Location = Location::Topic(TopicRole::Tier(HumanDuration::from_secs(5)));
    const DUE: Location = Location::Topic(TopicRole::Due);
    const SOURCE: Location = Location::Topic(TopicRole::Source);
    const OUTPUT: Location = Location::Topic(TopicRole::Output);
    const DEAD: Location = Location::Topic(TopicRole::DeadLetter);

    /// A copy of the job's record at `jobs/0/7`, with the second in which its last attempt failed.
    fn record(topic: &str, attempts: Option<u32>, failed: Option<i64>, redrives: u32) -> Record {
        let mut record = record_at(topic, 0, 7);
        let id = JobId::new(Timestamp::from_millis(1), 0, 1);
        record.headers.push_text(JOB_ID, &id.to_string());
        if redrives > 0 {
            record.headers.push_text(REDRIVE_COUNT, &redrives.to_string());
        }
        if let Some(attempts) = attempts {
            let origin = Origin::of(&record_at("jobs", 0, 7));
            write_lineage(&mut record.headers, "jobs", &origin, attempts);
        }
        if let Some(failed) = failed {
            let failed = Timestamp::from_millis(failed * 1_000);
            record.headers.push_text(ERROR_TIMESTAMP, &failed.to_string());
            set_process_after(&mut record.headers, failed.after(Duration::from_secs(60)));
        }
        record
    }

    /// The same, released by an operator before it was due.
    fn released(mut record: Record) -> Record {
        set_process_after(&mut record.headers, Timestamp::from_millis(2_000));
        record
    }

    #[test]
    fn later_copies_are_greater() {
        let pipeline = Pipeline::new("jobs");
        let life = [
            (SOURCE, record("jobs", None, None, 0)),
            // Throttled twice, and failed once.
            (TIER, record("jobs-retry-5s", Some(0), Some(10), 0)),
            (DUE, released(record("jobs-retry-due", Some(0), Some(10), 0))),
            (TIER, record("jobs-retry-5s", Some(0), Some(20), 0)),
            (DUE, record("jobs-retry-due", Some(0), Some(20), 0)),
            (TIER, record("jobs-retry-5s", Some(1), Some(30), 0)),
            (DUE, released(record("jobs-retry-due", Some(1), Some(30), 0))),
            (DEAD, record("jobs-dlq", Some(2), None, 0)),
            (DUE, record("jobs-retry-due", Some(0), None, 1)),
            (TIER, record("jobs-retry-5s", Some(1), Some(50), 1)),
            (OUTPUT, record("out", Some(1), None, 1)),
        ];
        let copies = life.map(|(location, record)| JobCopy::read(&pipeline, location, &record).unwrap());
        assert!(
            copies.is_sorted_by(|first, next| first.stage < next.stage),
            "{copies:?}"
        );
        assert!(copies.iter().all(|copy| copy.origin == copies[0].origin));
    }

    #[test]
    fn other_records_are_left_out() {
        let pipeline = Pipeline::new("jobs");
        // The output can be the source of another pipeline, which leaves its own headers there.
        let of_other = record("out", None, None, 0);
        assert_eq!(JobCopy::read(&pipeline, OUTPUT, &of_other), None);
        let no_job = record_at("jobs", 0, 7);
        assert_eq!(JobCopy::read(&pipeline, SOURCE, &no_job), None);
        let mut forged = record_at("jobs", 0, 7);
        forged.headers.push_text(JOB_ID, "17");
        assert_eq!(JobCopy::read(&pipeline, SOURCE, &forged), None);
    }
}
