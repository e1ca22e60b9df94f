//! Status: what workers say about their circuit breakers, for those who watch an installation.
//!
//! The status topic is compacted, with one partition. A worker writes the state of a breaker when it changes, and again before it expires, so that
//! what a crashed process has said does not stay. Nothing depends on it: without the topic, or with workers of an older version, states are unknown.

mod board;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::{Record, Timestamp};
use redeliver_proto::Message as _;
use redeliver_proto::convert::time;
use redeliver_proto::v1::{BreakerState, BreakerStatus};
use redeliver_store::{Document, State, Table};

pub use board::{BreakerNotes, StatusBoard};

/// The time between two writes of a status that does not change.
const HEARTBEAT: Duration = Duration::from_secs(30);
/// How long a status holds without another write.
const HOLDS_FOR: Duration = Duration::from_secs(120);
/// The maximum sizes of a key and of a value, in bytes. What this version writes is smaller.
const MAX_KEY: usize = 600;
const MAX_VALUE: usize = 4 << 10;
/// The maximum number of statuses.
const MAX_STATUSES: usize = 10_000;

/// The states of breakers, the worst one last.
const SEVERITY: [BreakerState; 3] = [BreakerState::Closed, BreakerState::HalfOpen, BreakerState::Open];

/// A value of the topic.
#[derive(Clone, Debug, PartialEq)]
pub struct Status(BreakerStatus);

/// The value of a record is too large, or of another type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not a redeliver.v1.BreakerStatus")]
pub struct InvalidStatus;

impl Document for Status {
    /// The pipeline and the instance.
    type Key = (String, String);
    type Invalid = InvalidStatus;

    const IF_UNREADABLE: &'static str = ", and ignored";

    fn parse_key(key: &str) -> Option<Self::Key> {
        let key = Some(key).filter(|key| key.len() <= MAX_KEY)?;
        let (pipeline, instance) = key.strip_prefix("breaker/")?.split_once('/')?;
        Some((pipeline.to_owned(), instance.to_owned()))
    }

    fn record_key((pipeline, instance): &Self::Key) -> String {
        format!("breaker/{pipeline}/{instance}")
    }

    fn decode(_key: &Self::Key, value: &Bytes) -> Result<Self, InvalidStatus> {
        let bounded = Some(value.clone()).filter(|value| value.len() <= MAX_VALUE);
        let status = bounded.and_then(|value| BreakerStatus::decode(value).ok());
        status.map(Self).ok_or(InvalidStatus)
    }

    // A status has one writer.
    fn revision(&self) -> u64 {
        0
    }

    fn change_id(&self) -> &Bytes {
        static NONE: Bytes = Bytes::new();
        &NONE
    }
}

/// What the topic contains.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Statuses(Table<Status>);

impl State for Statuses {
    type Document = Status;

    const TOPIC: &'static str = "status topic";
    const NAME: &'static str = "dlq_status";
    const IS_OPTIONAL: bool = true;

    fn table(&self) -> &Table<Status> {
        &self.0
    }

    fn apply(&mut self, record: &Record) {
        // Another version may write other statuses.
        let Some(key) = Status::key_of(record) else {
            return;
        };
        let is_new = record.value.is_some() && self.0.entry(&key).is_none();
        if is_new && self.0.entries().len() >= MAX_STATUSES {
            // Nearly all are of processes that have crashed, and the others are written again.
            *self = Self::default();
        }
        self.0.apply_record(record);
    }

    fn log_changes(&self, _topic: &str, _before: &Self) {}
}

impl Statuses {
    /// The circuit breakers of pipelines that are known at a time. Each worker of a pipeline has one: the worst of them counts, and of several the one that
    /// is so for longest.
    #[must_use]
    pub fn breakers(&self, now: Timestamp) -> BTreeMap<String, BreakerStatus> {
        let documents = self.0.documents();
        let known = documents.filter_map(|((pipeline, _), status)| {
            let status = &status.0;
            let severity = SEVERITY.iter().position(|state| *state == status.state())?;
            let expires = time(status.expires)?;
            // One that holds for longer is of a clock that is wrong.
            let holds = now < expires && expires.since(now) <= 2 * HOLDS_FOR;
            holds.then_some((severity, Reverse(time(status.since)), pipeline, status))
        });
        let mut known: Vec<_> = known.collect();
        known.sort_by_key(|(severity, since, ..)| (*severity, *since));
        // The last one of each pipeline replaces the others.
        let known = known.into_iter();
        known
            .map(|(.., pipeline, status)| (pipeline.clone(), status.clone()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use redeliver_proto::convert::to_timestamp;
    use redeliver_testkit::record;

    use super::*;

    const NOW: i64 = 1_000_000;

    fn status(state: BreakerState, since: i64, expires: i64) -> BreakerStatus {
        let at = |millis| Some(to_timestamp(Timestamp::from_millis(millis)));
        BreakerStatus {
            state: state.into(),
            since: at(since),
            error_code: format!("http.{since}"),
            expires: at(expires),
        }
    }

    fn statuses(of: &[(&str, BreakerStatus)]) -> Statuses {
        let mut statuses = Statuses::default();
        for (key, status) in of {
            statuses.apply(&record(key, Some(status.encode_to_vec().into())));
        }
        statuses
    }

    #[test]
    fn worst_breaker_of_pipeline_counts() {
        use BreakerState::{Closed, HalfOpen, Open, Unspecified};
        let later = NOW + 1;
        for (workers, expected) in [
            (vec![(Closed, 7, later)], Some((Closed, 7))),
            (vec![(Closed, 3, later), (Open, 7, later)], Some((Open, 7))),
            (vec![(Open, 7, later), (Closed, 3, later)], Some((Open, 7))),
            (vec![(HalfOpen, 3, later), (Open, 7, later)], Some((Open, 7))),
            (vec![(Open, 3, later), (Open, 7, later)], Some((Open, 3))),
            (vec![(Open, 3, NOW), (HalfOpen, 7, later)], Some((HalfOpen, 7))),
            // Of a crashed process, and of a newer version.
            (vec![(Open, 3, NOW)], None),
            (vec![(Unspecified, 3, later)], None),
            // Of a clock that is far ahead.
            (vec![(Open, 3, NOW + 86_400_000)], None),
        ] {
            let keys = ["breaker/docs/a", "breaker/docs/b"];
            let of: Vec<_> = keys
                .into_iter()
                .zip(&workers)
                .map(|(key, (state, since, expires))| (key, status(*state, *since, *expires)))
                .collect();
            let breakers = statuses(&of).breakers(Timestamp::from_millis(NOW));
            let found = breakers.get("docs").map(|found| {
                let since = time(found.since).unwrap().as_millis();
                assert_eq!(found.error_code, format!("http.{since}"));
                (found.state(), since)
            });
            assert_eq!(found, expected, "{workers:?}");
        }
    }

    #[test]
    fn unreadable_statuses_say_nothing() {
        let open = status(BreakerState::Open, 0, NOW);
        let long = format!("breaker/docs/{}", "x".repeat(MAX_KEY));
        let of = ["breaker/docs/a", "lane/docs/a", long.as_str()].map(|key| (key, open.clone()));
        let mut known = statuses(&of);
        assert_eq!((known.0.count(), known.problems().len()), (1, 0));
        let large = BreakerStatus {
            error_code: "x".repeat(MAX_VALUE),
            ..open
        };
        for unreadable in [large.encode_to_vec(), vec![0xff]] {
            known.apply(&record("breaker/docs/a", Some(unreadable.into())));
            assert!(known.breakers(Timestamp::from_millis(NOW - 1)).is_empty());
            assert_eq!(known.problems().len(), 1);
        }
        known.apply(&record("breaker/docs/a", None));
        assert_eq!(known, Statuses::default());
    }

    #[test]
    fn statuses_of_crashed_processes_are_bounded() {
        let closed = status(BreakerState::Closed, 0, NOW);
        let keys: Vec<String> = (0..=MAX_STATUSES).map(|n| format!("breaker/docs/{n}")).collect();
        let of: Vec<_> = keys.iter().map(|key| (key.as_str(), closed.clone())).collect();
        let mut known = statuses(&of[..MAX_STATUSES]);
        known.apply(&record(&keys[0], Some(closed.encode_to_vec().into())));
        // It replaces the one before, and nothing is removed for one that is not there.
        known.apply(&record("breaker/docs/other", None));
        assert_eq!(known.0.count(), MAX_STATUSES);
        assert_eq!(statuses(&of).0.count(), 1);
    }
}
