//! The oracle for jobs: it compares the requests that a test sent with the content of all topics. It shares no decision
//! with the scheduler, because the test itself states what each request means.
//!
//! A dispatched job is in its application's topic exactly once, unchanged, and not before it was due. A cancelled or
//! expired job is not in that topic. A rejected request is in the dead-letter topic exactly once, with the name of the
//! field. The commands of a job have one order, that of their partition: those that had an effect come first, and each
//! answer is the state of the job at that point.
//!
//! A request that replaces others with its key is such a command for the job that waits: it gives it another
//! content and another due time, or ends it, if the priority differs. Whether the job still waited is known
//! only to the scheduler, so the number of the job's revisions tells it. All other records must agree with
//! that: a replaced job is never dispatched.
//!
//! Pure. [`tests`] plants defects and checks that the oracle finds them.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::headers::{self, Origin, ReservedHeaders};
use redeliver_core::job::Priority;
use redeliver_core::{Headers, JobId, Position, Record, Timestamp};
use redeliver_kafka::murmur2::{partition_for_key, shard_of};
use redeliver_proto::convert::{from_headers, from_priority, from_timestamp};
use redeliver_proto::{Message as _, v1};
use redeliver_scheduler::index::MIN_KEPT;

use DefectKind::{Altered, Contradiction, Double, Early, Foreign, Lost};

use self::jobs::may_be_gone;
pub(crate) use self::report::{Defect, DefectKind, Report};
pub(crate) use self::request::{Intent, JobSpec, Sent, When};

mod answers;
mod expected;
mod jobs;
mod report;
mod request;
mod tests;

/// The code of a rejection because Redis is full.
const INDEX_FULL: &str = "scheduler.index-full";

/// The topics of a scheduler.
#[derive(Clone, Debug)]
pub(crate) struct Topics {
    pub(crate) ingest: Arc<str>,
    pub(crate) state: Arc<str>,
    pub(crate) dlq: Arc<str>,
    pub(crate) answers: Arc<str>,
    /// By application.
    pub(crate) apps: BTreeMap<String, Arc<str>>,
    /// Of each topic.
    pub(crate) partitions: i32,
    /// `scheduler.max_ended`, if so many jobs of a partition can end.
    pub(crate) max_ended: Option<usize>,
    /// `scheduler.window`, if Redis can be full: a job that is due later may be rejected.
    pub(crate) window_when_full: Option<Duration>,
}

/// The deletion of the topic of an application, whose records had been read before.
#[derive(Clone, Debug)]
pub(crate) struct Deletion {
    pub(crate) app: String,
    /// The records of the state topic between those that were read right before the records of the deleted topic, and those that were read once the
    /// schedulers had noticed the deletion. They are of the transactions whose records may be gone with the topic.
    pub(crate) states: Range<usize>,
}

/// All records of the topics, as a read_committed consumer sees them, in the order of their offsets.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) ingest: Vec<Record>,
    pub(crate) state: Vec<Record>,
    pub(crate) dlq: Vec<Record>,
    pub(crate) answers: Vec<Record>,
    pub(crate) apps: Vec<Record>,
    pub(crate) deletions: Vec<Deletion>,
}

/// Compares the requests with the topics. While jobs are in progress, the topics were read at different moments, so only
/// the report on an idle scheduler is reliable.
pub(crate) fn check(sent: &[Sent], topics: &Topics, seen: &Seen) -> Report {
    let mut checker = Checker {
        topics,
        report: Report::default(),
    };
    let commands = checker.commands(sent, &seen.ingest);
    let mut states = checker.states(&seen.state);
    let without_room = checker.without_room(&seen.dlq);
    let mut expectations = checker.expectations(&commands, &states, &without_room);
    let mut dispatched = checker.dispatched(&seen.apps);
    let may_be_gone = may_be_gone(seen);
    for (id, job) in &mut expectations.jobs {
        let states = states.remove(id).unwrap_or_default();
        let records = dispatched.remove(id).unwrap_or_default();
        checker.job(*id, job, &states, &records, &commands, &may_be_gone);
    }
    for id in states.keys() {
        checker.defect(
            Foreign,
            format!("the state topic contains job {id}, which was not requested"),
        );
    }
    for (id, records) in &dispatched {
        let position = &records[0].position;
        checker.defect(
            Foreign,
            format!("{position} belongs to job {id}, which was not requested"),
        );
    }
    checker.dead_letters(&commands, &expectations, &seen.dlq);
    checker.answers(&commands, &expectations, &seen.answers);
    checker.report
}

/// A command in the partition that decides it.
struct Command<'a> {
    sent: &'a Sent,
    position: Position,
    at: Timestamp,
}

impl Command<'_> {
    fn id(&self) -> JobId {
        JobId::new(self.at, self.position.partition, self.position.offset)
    }
}

/// The expected outcome of a command, as far as it follows from the commands before it.
enum Expected {
    Job(JobId),
    Duplicate(JobId),
    Conflict(JobId),
    Refused,
    /// A request that was rejected because Redis was full.
    NoRoom,
    /// A command for this job, with its index in the job's commands.
    JobCommand(JobId, usize),
    /// A request that gives this job another content, with its index in the job's commands.
    Replacement(JobId, usize),
    /// A request for another job in the place of one that waited.
    Successor(JobId),
    /// A command for a job that never existed.
    UnknownJob,
}

#[derive(Default)]
struct Expectations<'a> {
    jobs: BTreeMap<JobId, ExpectedJob<'a>>,
    /// One per command.
    expected: Vec<Expected>,
}

struct ExpectedJob<'a> {
    /// The newest content, and the request that it is from.
    spec: &'a JobSpec,
    request: &'a Sent,
    /// The first due time.
    due: Timestamp,
    accepted_after: Timestamp,
    /// The commands for the job, in their order.
    later: Vec<usize>,
    end: Ending,
}

/// The last known state of a job.
#[derive(Clone, Debug, Default)]
struct Ending {
    state: v1::JobState,
    revision: u32,
    due: Option<Timestamp>,
    ended: Option<Timestamp>,
    /// It was forgotten at once, because Redis was full.
    is_forgotten: bool,
}

/// The records of each job in the state topic, oldest first; `None` is a tombstone.
type States = HashMap<JobId, Vec<Option<v1::JobRecord>>>;

struct Checker<'a> {
    topics: &'a Topics,
    report: Report,
}

impl Checker<'_> {
    fn defect(&mut self, kind: DefectKind, what: String) {
        self.report.defects.push(Defect { kind, what });
    }

    fn waits(&mut self, what: String) {
        self.report.waiting.push(what);
    }

    fn equal<T: PartialEq + fmt::Debug>(
        &mut self,
        field: &str,
        of: &dyn fmt::Display,
        found: &T,
        expected: &T,
    ) {
        if found != expected {
            self.defect(
                Altered,
                format!("the {field} of {of} is {found:?}, not {expected:?}"),
            );
        }
    }
}

/// The number of commands that have changed a job.
fn changes(last: &v1::JobRecord) -> usize {
    usize::try_from(last.revision.saturating_sub(1)).unwrap_or(usize::MAX)
}

/// The value of a header that occurs exactly once.
fn header<'a>(record: &'a Record, name: &str) -> Option<&'a [u8]> {
    record.headers.single(name).ok().flatten().flatten()
}

fn parsed<T: std::str::FromStr>(text: Option<&[u8]>) -> Option<T> {
    std::str::from_utf8(text?).ok()?.parse().ok()
}
