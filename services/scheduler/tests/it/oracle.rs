//! The oracle for jobs: it compares the requests that a test sent with the content of all topics. It shares no decision
//! with the scheduler, because the test itself states what each request means.
//!
//! A dispatched job is in its application's topic exactly once, unchanged, and not before it was due. A cancelled or
//! expired job is not in that topic. A rejected request is in the dead-letter topic exactly once, with the name of the
//! field. The commands of a job have one order, that of their partition: those that had an effect come first, and each
//! answer is the state of the job at that point.
//!
//! A request that replaces others with its key is such a command for the job that waits: it gives it another content and another due time,
//! or ends it, if the priority differs. Whether the job still waited is known only to the scheduler, so the number of the job's revisions
//! tells it. All other records must agree with that: what was replaced is never dispatched.
//!
//! Pure. [`tests`] plants defects and checks that the oracle finds them.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fmt;
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

mod tests;

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
}

/// A request that a test wrote to the ingest topic.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) position: Position,
    pub(crate) at: Timestamp,
    pub(crate) key: Option<Bytes>,
    pub(crate) value: Option<Bytes>,
    pub(crate) headers: Headers,
    pub(crate) intent: Intent,
    pub(crate) answer_to: Option<String>,
}

/// What a request means.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Intent {
    Job(Box<JobSpec>),
    /// The scheduler must reject it with this code and a message that contains `says`.
    Refused {
        code: String,
        says: String,
    },
    Cancel(JobId),
    Reschedule(JobId, When),
}

/// A requested job. Two with the same idempotency key that differ only in `request_id` are one job, unless the second one `replaces` the
/// first.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct JobSpec {
    pub(crate) app: String,
    pub(crate) when: When,
    pub(crate) priority: Priority,
    pub(crate) idempotency_key: Option<String>,
    pub(crate) request_id: Option<String>,
    pub(crate) key: Option<Bytes>,
    pub(crate) value: Bytes,
    /// Without the trace headers of the ingest record.
    pub(crate) headers: Headers,
    pub(crate) expire_after: Option<Duration>,
    /// `onConflict` is `replace`.
    pub(crate) replaces: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum When {
    At(Timestamp),
    After(Duration),
}

impl When {
    fn due(self, requested: Timestamp) -> Timestamp {
        match self {
            Self::At(time) => time,
            Self::After(delay) => requested.after(delay),
        }
    }
}

impl JobSpec {
    fn is_same(&self, other: &Self) -> bool {
        let named = |spec: &Self| Self {
            request_id: None,
            replaces: false,
            ..spec.clone()
        };
        named(self) == named(other)
    }

    /// Whether a request that replaces others is the newest one with its key, sent again.
    fn is_repetition_of(&self, newest: &Self) -> bool {
        let is_certain = self.request_id.is_some() || matches!(self.when, When::At(_));
        is_certain && self.request_id == newest.request_id && self.is_same(newest)
    }
}

/// All records of the topics, as a read_committed consumer sees them, in the order of their offsets.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) ingest: Vec<Record>,
    pub(crate) state: Vec<Record>,
    pub(crate) dlq: Vec<Record>,
    pub(crate) answers: Vec<Record>,
    pub(crate) apps: Vec<Record>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Defect {
    pub(crate) kind: DefectKind,
    pub(crate) what: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DefectKind {
    /// A record is missing.
    Lost,
    /// A record exists twice.
    Double,
    /// A record was written before it was due.
    Early,
    /// A record differs from the request.
    Altered,
    /// A record belongs to no request.
    Foreign,
    /// Two records contradict each other.
    Contradiction,
}

/// The outcome of all requests.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) jobs: usize,
    pub(crate) dispatched: usize,
    pub(crate) cancelled: usize,
    pub(crate) expired: usize,
    pub(crate) refused: usize,
    pub(crate) conflicts: usize,
    pub(crate) duplicates: usize,
    pub(crate) forwarded: usize,
    /// Reschedulings that had an effect.
    pub(crate) rescheduled: usize,
    /// Waiting jobs that got another content, or ended in favour of another job.
    pub(crate) replaced: usize,
    pub(crate) answers: usize,
    /// Requests and jobs without a final outcome.
    pub(crate) waiting: Vec<String>,
    pub(crate) defects: Vec<Defect>,
    /// From the due time to the record in the application's topic, in milliseconds, by application.
    pub(crate) lateness: BTreeMap<String, Vec<i64>>,
}

impl Report {
    /// Whether everything has ended as it should.
    pub(crate) fn is_clean(&self) -> bool {
        self.defects.is_empty() && self.waiting.is_empty()
    }

    /// A quantile of the lateness of an application's jobs, in milliseconds.
    pub(crate) fn lateness(&self, app: &str, share: f64) -> i64 {
        let mut all = self.lateness.get(app).cloned().unwrap_or_default();
        all.sort_unstable();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "the index of a quantile"
        )]
        let index = (all.len().saturating_sub(1) as f64 * share) as usize;
        all.get(index).copied().unwrap_or_default()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 10;
        let smallest = self.lateness.values().flatten().min();
        write!(
            f,
            "{} jobs: {} dispatched (smallest margin {smallest:?} ms), {} cancelled, {} expired; {} refused, {} \
             conflicts, {} duplicates, {} forwarded, {} rescheduled, {} replaced, {} answers; {} waiting, {} defects",
            self.jobs,
            self.dispatched,
            self.cancelled,
            self.expired,
            self.refused,
            self.conflicts,
            self.duplicates,
            self.forwarded,
            self.rescheduled,
            self.replaced,
            self.answers,
            self.waiting.len(),
            self.defects.len()
        )?;
        for app in self.lateness.keys() {
            let [median, p99, most] = [0.5, 0.99, 1.0].map(|share| self.lateness(app, share));
            write!(f, "\n  lateness of {app}: p50 {median}, p99 {p99}, max {most} ms")?;
        }
        for waiting in self.waiting.iter().take(SHOWN) {
            write!(f, "\n  waiting: {waiting}")?;
        }
        for defect in self.defects.iter().take(SHOWN) {
            write!(f, "\n  {:?}: {}", defect.kind, defect.what)?;
        }
        Ok(())
    }
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
    let mut expectations = checker.expectations(&commands, &states);
    let mut dispatched = checker.dispatched(&seen.apps);
    for (id, job) in &mut expectations.jobs {
        let states = states.remove(id).unwrap_or_default();
        let records = dispatched.remove(id).unwrap_or_default();
        checker.job(*id, job, &states, &records, &commands);
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

    /// The partition that decides a command.
    fn home(&self, sent: &Sent) -> i32 {
        let partitions = self.topics.partitions;
        match &sent.intent {
            Intent::Job(spec) => match &spec.idempotency_key {
                Some(key) => shard_of(&spec.app, key, partitions),
                None => sent.position.partition,
            },
            Intent::Cancel(id) | Intent::Reschedule(id, _) if id.shard() < partitions => id.shard(),
            Intent::Refused { .. } | Intent::Cancel(_) | Intent::Reschedule(..) => sent.position.partition,
        }
    }

    /// All commands in the partition that decides them, in the order of positions. A command in another partition must
    /// have been forwarded exactly once, with its lineage and otherwise unchanged.
    fn commands<'a>(&mut self, sent: &'a [Sent], ingest: &[Record]) -> Vec<Command<'a>> {
        let mut records: BTreeMap<(i32, i64), &Record> = ingest
            .iter()
            .map(|record| ((record.position.partition, record.position.offset), record))
            .collect();
        let mut commands = Vec::with_capacity(sent.len());
        let mut misplaced = Vec::new();
        for sent in sent {
            let Some(record) = records.remove(&(sent.position.partition, sent.position.offset)) else {
                self.defect(Lost, format!("{} is not in the ingest topic", sent.position));
                continue;
            };
            self.is_as_sent(sent, record, &sent.headers);
            self.equal("time", &sent.position, &record.timestamp, &Some(sent.at));
            if self.home(sent) == sent.position.partition {
                commands.push(Command {
                    sent,
                    position: record.position.clone(),
                    at: sent.at,
                });
            } else {
                misplaced.push(sent);
            }
        }
        let mut forwarded: HashMap<_, VecDeque<&Record>> = HashMap::new();
        for record in records.into_values() {
            let origin = ReservedHeaders::read(record).and_then(|ours| ours.origin()).ok();
            let from = origin.map(|origin| (origin.partition, origin.offset));
            let home = record.position.partition;
            forwarded.entry((home, from)).or_default().push_back(record);
        }
        for sent in misplaced {
            let from = Some((sent.position.partition, sent.position.offset));
            let forwarded = forwarded.get_mut(&(self.home(sent), from));
            let Some(record) = forwarded.and_then(VecDeque::pop_front) else {
                self.waits(format!("{} is in a wrong partition", sent.position));
                continue;
            };
            self.report.forwarded += 1;
            self.is_as_sent(sent, record, &forwarded_headers(sent));
            let at = record.timestamp.unwrap_or(sent.at);
            if at < sent.at {
                self.defect(
                    Early,
                    format!("{} was forwarded before it was written", sent.position),
                );
            }
            commands.push(Command {
                sent,
                position: record.position.clone(),
                at,
            });
        }
        for record in forwarded.into_values().flatten() {
            let position = &record.position;
            self.defect(Double, format!("{position} was not sent, or was forwarded twice"));
        }
        commands.sort_by(|a, b| a.position.cmp(&b.position));
        commands
    }

    fn is_as_sent(&mut self, sent: &Sent, record: &Record, headers: &Headers) {
        let position = &record.position;
        self.equal("key", position, &record.key, &sent.key);
        self.equal("value", position, &record.value, &sent.value);
        self.equal("headers", position, &record.headers, headers);
    }

    /// The expected jobs, which follow from the order of the commands.
    fn expectations<'a>(&mut self, commands: &[Command<'a>], states: &States) -> Expectations<'a> {
        let mut expectations = Expectations::default();
        // The job of each key, and the newest request that it is from.
        let mut keys: HashMap<(&str, &str), (JobId, &JobSpec)> = HashMap::new();
        for (index, command) in commands.iter().enumerate() {
            let sent: &'a Sent = command.sent;
            let expected = match &sent.intent {
                Intent::Refused { .. } => Expected::Refused,
                Intent::Cancel(id) | Intent::Reschedule(id, _) => match expectations.jobs.get_mut(id) {
                    Some(job) => {
                        job.later.push(index);
                        Expected::JobCommand(*id, job.later.len() - 1)
                    }
                    None => Expected::UnknownJob,
                },
                Intent::Job(spec) => {
                    let key = spec.idempotency_key.as_deref();
                    let taken = key.and_then(|key| keys.get(&(spec.app.as_str(), key)).copied());
                    let replaced =
                        taken.filter(|(_, newest)| spec.replaces && !spec.is_repetition_of(newest));
                    let job = replaced.and_then(|(id, _)| Some((id, expectations.jobs.get_mut(&id)?)));
                    let mut becomes = Becomes::Job;
                    if let Some((id, job)) = job {
                        becomes = job.replaced_by(spec, states.get(&id).map(Vec::as_slice));
                        if becomes != Becomes::Job {
                            job.later.push(index);
                        }
                    }
                    match (taken, replaced, becomes) {
                        (Some((id, first)), None, _) if spec.replaces || first.is_same(spec) => {
                            Expected::Duplicate(id)
                        }
                        (Some((id, _)), None, _) => Expected::Conflict(id),
                        (_, Some((id, _)), Becomes::Content) => {
                            keys.extend(key.map(|key| ((spec.app.as_str(), key), (id, &**spec))));
                            Expected::Replacement(id, expectations.jobs[&id].later.len() - 1)
                        }
                        (_, _, becomes) => {
                            let id = command.id();
                            if let Some(key) = key {
                                keys.insert((&spec.app, key), (id, spec));
                            }
                            let job = ExpectedJob {
                                spec,
                                request: sent,
                                due: spec.when.due(sent.at),
                                accepted_after: command.at,
                                later: Vec::new(),
                                end: Ending::default(),
                            };
                            expectations.jobs.insert(id, job);
                            match becomes {
                                Becomes::Successor => Expected::Successor(id),
                                Becomes::Content | Becomes::Job => Expected::Job(id),
                            }
                        }
                    }
                }
            };
            match &expected {
                Expected::Job(_) => self.report.jobs += 1,
                Expected::Successor(_) => {
                    self.report.jobs += 1;
                    self.report.replaced += 1;
                }
                Expected::Duplicate(_) => self.report.duplicates += 1,
                Expected::Conflict(_) => self.report.conflicts += 1,
                Expected::Refused => self.report.refused += 1,
                Expected::JobCommand(..) | Expected::Replacement(..) | Expected::UnknownJob => {}
            }
            expectations.expected.push(expected);
        }
        expectations
    }

    /// The records of each job in the state topic, oldest first; `None` is a tombstone.
    fn states(&mut self, records: &[Record]) -> States {
        let mut states = States::new();
        for record in records {
            let position = &record.position;
            let Some(id) = parsed::<JobId>(record.key.as_deref()) else {
                self.defect(Foreign, format!("{position} belongs to no job"));
                continue;
            };
            if id.shard() != position.partition {
                self.defect(
                    Foreign,
                    format!("{position} belongs to job {id} of another shard"),
                );
            }
            match record.value.clone().map(v1::JobRecord::decode).transpose() {
                Ok(state) => states.entry(id).or_default().push(state),
                Err(error) => self.defect(Altered, format!("{position}: {error}")),
            }
        }
        states
    }

    fn dispatched<'a>(&mut self, records: &'a [Record]) -> HashMap<JobId, Vec<&'a Record>> {
        let mut dispatched: HashMap<JobId, Vec<&Record>> = HashMap::new();
        for record in records {
            match parsed(header(record, headers::JOB_ID)) {
                Some(id) => dispatched.entry(id).or_default().push(record),
                None => self.defect(Foreign, format!("{} has no job id: {record:?}", record.position)),
            }
        }
        dispatched
    }

    fn job<'a>(
        &mut self,
        id: JobId,
        job: &mut ExpectedJob<'a>,
        states: &[Option<v1::JobRecord>],
        records: &[&Record],
        commands: &[Command<'a>],
    ) {
        for again in records.iter().skip(1) {
            let (first, again) = (&records[0].position, &again.position);
            self.defect(Double, format!("job {id} was dispatched to {first} and {again}"));
        }
        let Some(last) = states.last() else {
            if records.is_empty() {
                return self.waits(format!("{} is not decided", job.request.position));
            }
            return self.waits(format!("job {id} is dispatched, but not in the state topic"));
        };
        let Some(last) = last else {
            return self.defect(Lost, format!("job {id} has a tombstone"));
        };
        self.history(id, states);
        job.end = self.state(id, job, last, commands);
        match last.state() {
            v1::JobState::Scheduled => {
                self.waits(format!("job {id}, due {}", Timestamp::from_millis(last.due_ms)));
            }
            v1::JobState::Dispatched => {
                self.report.dispatched += 1;
                match records.first() {
                    Some(record) => self.record(id, job, record),
                    None => self.defect(
                        Lost,
                        format!("job {id} is dispatched in the state topic, but has no record"),
                    ),
                }
            }
            ended => {
                if ended == v1::JobState::Cancelled {
                    self.report.cancelled += 1;
                } else {
                    self.report.expired += 1;
                }
                if let Some(record) = records.first() {
                    let position = &record.position;
                    self.defect(
                        Contradiction,
                        format!("job {id} is {ended:?} and was dispatched to {position}"),
                    );
                }
            }
        }
    }

    /// Every revision must exist once, in order, and at most one final state, which is the last record.
    fn history(&mut self, id: JobId, states: &[Option<v1::JobRecord>]) {
        for pair in states.windows(2) {
            let [Some(before), Some(after)] = pair else {
                self.defect(
                    Contradiction,
                    format!("job {id} has a record after its tombstone"),
                );
                continue;
            };
            if before.state() != v1::JobState::Scheduled {
                self.defect(
                    Double,
                    format!("job {id} was {:?}, then {:?}", before.state(), after.state()),
                );
            }
            let step = u32::from(after.state() == v1::JobState::Scheduled);
            if after.revision != before.revision + step {
                self.defect(
                    Contradiction,
                    format!(
                        "revision {} of job {id} came after {}",
                        after.revision, before.revision
                    ),
                );
            }
        }
    }

    /// The newest record of the state topic must follow from the commands for the job: the first ones had an effect, and
    /// the others were too late.
    fn state<'a>(
        &mut self,
        id: JobId,
        job: &mut ExpectedJob<'a>,
        last: &v1::JobRecord,
        commands: &[Command<'a>],
    ) -> Ending {
        let moved = changes(last);
        let mut due = job.due;
        for index in 0..moved {
            let command = job.later.get(index).map(|command| &commands[*command]);
            match command.map(|command| (&command.sent.intent, command.sent)) {
                Some((Intent::Reschedule(_, when), sent)) => {
                    due = when.due(sent.at);
                    self.report.rescheduled += 1;
                }
                Some((Intent::Job(spec), sent)) => {
                    due = spec.when.due(sent.at);
                    job.spec = spec;
                    job.request = sent;
                    self.report.replaced += 1;
                }
                other => self.defect(Contradiction, format!("change {index} of job {id} is {other:?}")),
            }
        }
        let (spec, of) = (job.spec, format!("job {id}"));
        let next = job
            .later
            .get(moved)
            .map(|command| &commands[*command].sent.intent);
        match (last.state(), next) {
            (v1::JobState::Cancelled, Some(Intent::Cancel(_)))
            | (v1::JobState::Dispatched | v1::JobState::Expired, _) => {}
            (v1::JobState::Cancelled, Some(Intent::Job(new))) if new.priority != spec.priority => {}
            (v1::JobState::Scheduled, None) => {}
            (v1::JobState::Scheduled, Some(_)) => {
                self.waits(format!("command {moved} for job {id} is not decided"));
            }
            (state, next) => self.defect(
                Contradiction,
                format!("job {id} is {state:?}, and command {moved} is {next:?}"),
            ),
        }
        let expires = spec.expire_after.map(|span| due.after(span));
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        self.equal("app", &of, &last.app, &spec.app);
        self.equal("priority", &of, &from_priority(last.priority()), &spec.priority);
        self.equal("due time", &of, &last.due_ms, &due.as_millis());
        self.equal("key", &of, &last.idempotency_key, &text(&spec.idempotency_key));
        self.equal("request id", &of, &last.request_id, &text(&spec.request_id));
        self.equal(
            "topic",
            &of,
            &Some(&*last.topic),
            &self.topics.apps.get(&spec.app).map(|topic| &**topic),
        );
        self.equal(
            "expiry",
            &of,
            &last.expires_ms,
            &expires.map(Timestamp::as_millis),
        );
        if last.long_wait || last.accepted_ms < job.accepted_after.as_millis() {
            self.defect(Altered, format!("job {id} is {last:?}"));
        }
        let waits = last.state() == v1::JobState::Scheduled;
        let kept = (last.data.clone(), last.key.clone(), from_headers(&last.headers));
        let payload = (Some(spec.value.clone()), spec.key.clone(), job.expected_headers());
        let expected = if waits { payload } else { Default::default() };
        self.equal("payload", &of, &kept, &expected);
        let ended = last.ended_ms.map(Timestamp::from_millis);
        match (last.state(), ended, expires) {
            (v1::JobState::Scheduled, None, _) | (v1::JobState::Cancelled, Some(_), _) => {}
            (v1::JobState::Dispatched, Some(ended), expires)
                if ended >= due && expires.is_none_or(|expires| ended <= expires) => {}
            (v1::JobState::Expired, Some(ended), Some(expires)) if ended > expires => {}
            (state, ended, expires) => self.defect(
                Contradiction,
                format!("job {id}, due {due}, is {state:?} since {ended:?} and expires at {expires:?}"),
            ),
        }
        Ending {
            state: last.state(),
            revision: last.revision,
            due: Some(due),
            ended,
        }
    }

    /// The record in the application's topic must be as requested, and not early.
    fn record(&mut self, id: JobId, job: &ExpectedJob<'_>, record: &Record) {
        let spec = job.spec;
        let position = &record.position;
        let due = job.end.due.unwrap_or(job.due);
        let topic = self.topics.apps.get(&spec.app);
        self.equal("topic", position, &Some(&position.topic), &topic);
        self.equal("key", position, &record.key, &spec.key);
        self.equal("value", position, &record.value, &Some(spec.value.clone()));
        if let Some(key) = &record.key {
            let partition = partition_for_key(key, self.topics.partitions);
            self.equal("partition", position, &position.partition, &partition);
        }
        let dispatched_at: Option<Timestamp> = parsed(header(record, headers::DISPATCHED_AT));
        let mut expected = job.expected_headers();
        expected.push_text(headers::JOB_ID, &id.to_string());
        expected.push_text(headers::JOB_APP, &spec.app);
        expected.push_text(headers::SCHEDULED_TIME, &due.to_string());
        let at = dispatched_at.unwrap_or(Timestamp::from_millis(0));
        expected.push_text(headers::DISPATCHED_AT, &at.to_string());
        expected.push_text(headers::JOB_PRIORITY, spec.priority.as_str());
        if let Some(key) = &spec.idempotency_key {
            expected.push_text(headers::IDEMPOTENCY_KEY, key);
        }
        self.equal("headers", position, &record.headers, &expected);
        self.equal("time of dispatch", position, &dispatched_at, &job.end.ended);
        let written = record.timestamp.unwrap_or(Timestamp::from_millis(0));
        if at < due || written < due {
            self.defect(
                Early,
                format!("job {id}, due {due}, was dispatched at {at} and written at {written}"),
            );
        }
        let margin = written.as_millis() - due.as_millis();
        self.report
            .lateness
            .entry(spec.app.clone())
            .or_default()
            .push(margin);
    }

    /// Each rejected request must have one dead letter, and no other request may have one.
    fn dead_letters(
        &mut self,
        commands: &[Command<'_>],
        expectations: &Expectations<'_>,
        records: &[Record],
    ) {
        let mut letters: HashMap<Position, Vec<&Record>> = HashMap::new();
        for record in records {
            match ReservedHeaders::read(record).and_then(|ours| ours.origin()) {
                Ok(origin) => letters
                    .entry(Position {
                        topic: origin.topic,
                        partition: origin.partition,
                        offset: origin.offset,
                    })
                    .or_default()
                    .push(record),
                Err(failure) => self.defect(Foreign, format!("{}: {failure}", record.position)),
            }
        }
        for (command, expected) in commands.iter().zip(&expectations.expected) {
            let (code, says) = match (expected, &command.sent.intent) {
                (Expected::Refused, Intent::Refused { code, says }) => (code.as_str(), says.as_str()),
                (Expected::Conflict(_), _) => ("request.conflict", "idempotencyKey"),
                _ => continue,
            };
            let found = letters.remove(&command.position).unwrap_or_default();
            for again in found.iter().skip(1) {
                let again = &again.position;
                self.defect(
                    Double,
                    format!(
                        "{} has dead letters at {} and {again}",
                        command.position, found[0].position
                    ),
                );
            }
            match found.first() {
                Some(letter) => self.dead_letter(command, code, says, letter),
                None => self.waits(format!("{} has no dead letter", command.position)),
            }
        }
        for letter in letters.into_values().flatten() {
            let message = header(letter, headers::ERROR_MESSAGE).map(String::from_utf8_lossy);
            self.defect(
                Foreign,
                format!("{} is an unexpected dead letter: {message:?}", letter.position),
            );
        }
    }

    fn dead_letter(&mut self, command: &Command<'_>, code: &str, says: &str, letter: &Record) {
        let (sent, position) = (command.sent, &letter.position);
        self.equal("key", position, &letter.key, &sent.key);
        self.equal("value", position, &letter.value, &sent.value);
        let users = |list: &Headers| list.filtered(|name| !headers::is_reserved(name));
        let (found, expected) = (users(&letter.headers), users(&sent.headers));
        self.equal("headers", position, &found, &expected);
        let text = |name| {
            header(letter, name)
                .map(|value| String::from_utf8_lossy(value).into_owned())
                .unwrap_or_default()
        };
        self.equal("code", position, &text(headers::ERROR_CODE), &code.to_owned());
        let message = text(headers::ERROR_MESSAGE);
        if !message.contains(says) {
            self.defect(
                Altered,
                format!("the message of {position} is {message:?}, which does not contain {says:?}"),
            );
        }
        let class = text(headers::ERROR_CLASS);
        if class != "malformed" && class != "permanent" {
            self.defect(Altered, format!("the class of {position} is {class}"));
        }
        let failed: Option<Timestamp> = text(headers::ERROR_TIMESTAMP).parse().ok();
        let written = letter.timestamp;
        if failed.is_none_or(|failed| failed < sent.at || written.is_some_and(|written| failed > written)) {
            self.defect(
                Altered,
                format!(
                    "the error-timestamp of {position} is {failed:?}, but the request is of {} and the letter of {written:?}",
                    sent.at
                ),
            );
        }
    }

    /// Each request for an answer must have exactly one, which is true.
    fn answers(&mut self, commands: &[Command<'_>], expectations: &Expectations<'_>, records: &[Record]) {
        let mut answers: HashMap<String, Vec<&Record>> = HashMap::new();
        for record in records {
            let name = String::from_utf8_lossy(record.key.as_deref().unwrap_or_default());
            answers.entry(name.into_owned()).or_default().push(record);
        }
        let mut names = HashSet::new();
        for (command, expected) in commands.iter().zip(&expectations.expected) {
            let Some(name) = &command.sent.answer_to else {
                continue;
            };
            assert!(names.insert(name), "the test requests two answers to {name}");
            let found = answers.remove(name).unwrap_or_default();
            if let [first, again, ..] = found[..] {
                let (first, again) = (&first.position, &again.position);
                self.defect(Double, format!("{name} is answered at {first} and {again}"));
            }
            let Some(record) = found.first() else {
                self.waits(format!("{name} is not answered"));
                continue;
            };
            match record.value.clone().map(v1::CommandOutcome::decode) {
                Some(Ok(answer)) => {
                    self.report.answers += 1;
                    self.answer(command, expected, expectations, (&answer, record.timestamp));
                }
                other => self.defect(Altered, format!("{}: {other:?}", record.position)),
            }
        }
        for name in answers.keys() {
            self.defect(Foreign, format!("{name} is answered, but requested no answer"));
        }
    }

    /// Whether the index may have no record of an ended job any more when a command for it is answered.
    fn may_be_evicted(&self, id: JobId, answered: Timestamp, expectations: &Expectations<'_>) -> bool {
        let (Some(max_ended), Some(ended)) = (self.topics.max_ended, expectations.jobs[&id].end.ended) else {
            return false;
        };
        let of_shard = expectations
            .jobs
            .iter()
            .filter(|(other, _)| other.shard() == id.shard());
        let ends = of_shard.filter_map(|(_, job)| job.end.ended);
        let later = ends.filter(|end| (ended..=answered).contains(end)).count();
        // Without the job itself.
        later > max_ended && answered.since(ended) >= MIN_KEPT
    }

    fn answer(
        &mut self,
        command: &Command<'_>,
        expected: &Expected,
        expectations: &Expectations<'_>,
        (answer, answered): (&v1::CommandOutcome, Option<Timestamp>),
    ) {
        let name = command.sent.answer_to.as_deref().unwrap_or_default();
        let (outcome, id) = match expected {
            Expected::Job(id) => (v1::Outcome::Scheduled, Some(*id)),
            Expected::Duplicate(id) => (v1::Outcome::Duplicate, Some(*id)),
            Expected::Conflict(id) => (v1::Outcome::Conflict, Some(*id)),
            Expected::Refused => (v1::Outcome::Rejected, None),
            Expected::UnknownJob => (v1::Outcome::Unknown, None),
            Expected::JobCommand(id, index) => (outcome_of(&expectations.jobs[id].end, *index), Some(*id)),
            Expected::Replacement(id, index) => match outcome_of(&expectations.jobs[id].end, *index) {
                // The job waited, so the request has changed it.
                v1::Outcome::Rescheduled => (v1::Outcome::Replaced, Some(*id)),
                _ => (v1::Outcome::Unspecified, Some(*id)),
            },
            Expected::Successor(id) => (v1::Outcome::Replaced, Some(*id)),
        };
        if outcome == v1::Outcome::Unspecified {
            return self.waits(format!("{name} is answered, and its job is not decided"));
        }
        let has_ended = matches!(
            outcome,
            v1::Outcome::AlreadyDispatched | v1::Outcome::AlreadyCancelled | v1::Outcome::Expired
        );
        if has_ended
            && answer.outcome() == v1::Outcome::Unknown
            && let (Some(id), Some(answered)) = (id, answered)
            && self.may_be_evicted(id, answered, expectations)
        {
            return;
        }
        if answer.outcome() != outcome {
            let found = answer.outcome();
            self.defect(
                Contradiction,
                format!("the answer to {name} is {found:?}, not {outcome:?} of job {id:?}"),
            );
            return;
        }
        let (shown, of) = (answer.job.as_ref(), format!("the answer to {name}"));
        self.equal(
            "job",
            &of,
            &shown.map(|job| job.id.as_str()),
            &id.map(|id| id.to_string()).as_deref(),
        );
        if let Intent::Refused { says, .. } = &command.sent.intent
            && !answer.reason.contains(says)
        {
            let reason = &answer.reason;
            self.defect(
                Altered,
                format!("the answer to {name} is {reason:?}, which does not contain {says:?}"),
            );
        }
        let (Some(job), Some(shown)) = (id.and_then(|id| expectations.jobs.get(&id)), shown) else {
            return;
        };
        let time = |time: Option<_>| time.as_ref().and_then(from_timestamp);
        match (expected, outcome) {
            (Expected::Job(_) | Expected::Successor(_), _) => {
                self.equal("due time", &of, &time(shown.scheduled_time), &Some(job.due));
            }
            (Expected::Replacement(_, index), _) => {
                if let Intent::Job(spec) = &command.sent.intent {
                    let due = Some(spec.when.due(command.sent.at));
                    self.equal("due time", &of, &time(shown.scheduled_time), &due);
                }
                let revision = u32::try_from(index + 2).unwrap_or(u32::MAX);
                self.equal("revision", &of, &shown.revision, &revision);
            }
            (Expected::JobCommand(..), v1::Outcome::Rescheduled) => {
                let Intent::Reschedule(_, when) = command.sent.intent else {
                    return self.defect(Contradiction, format!("{name} did not request another due time"));
                };
                self.equal(
                    "due time",
                    &of,
                    &time(shown.scheduled_time),
                    &Some(when.due(command.sent.at)),
                );
            }
            (Expected::JobCommand(..), _) => {
                self.equal("end", &of, &time(shown.ended_at), &job.end.ended);
                self.equal("state", &of, &shown.state(), &job.end.state);
            }
            _ => {}
        }
    }
}

/// What a request becomes that replaces others with its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Becomes {
    /// The content of the job that waits.
    Content,
    /// Another job, in the place of the one that waits.
    Successor,
    /// Another job, because the former one has ended.
    Job,
}

/// The number of commands that have changed a job.
fn changes(last: &v1::JobRecord) -> usize {
    usize::try_from(last.revision.saturating_sub(1)).unwrap_or(usize::MAX)
}

impl ExpectedJob<'_> {
    /// What the next request that replaces this job becomes, according to the records of the job.
    fn replaced_by(&self, spec: &JobSpec, states: Option<&[Option<v1::JobRecord>]>) -> Becomes {
        let Some(Some(last)) = states.and_then(<[_]>::last) else {
            return Becomes::Content;
        };
        let index = self.later.len();
        match last.state() {
            _ if index < changes(last) => Becomes::Content,
            // Not decided yet.
            v1::JobState::Scheduled => Becomes::Content,
            v1::JobState::Cancelled
                if index == changes(last) && from_priority(last.priority()) != spec.priority =>
            {
                Becomes::Successor
            }
            _ => Becomes::Job,
        }
    }

    /// The headers that the record must have, including the trace of the request.
    fn expected_headers(&self) -> Headers {
        let mut list = self.spec.headers.clone();
        let trace = [headers::TRACEPARENT, headers::TRACESTATE];
        if list.iter().any(|(name, _)| trace.contains(&name)) {
            return list;
        }
        for name in trace {
            if let Some(value) = self.request.headers.last(name) {
                list.push(name, Some(value));
            }
        }
        list
    }
}

/// The headers of a forwarded request. They include its first position and time, because a delay starts there.
fn forwarded_headers(sent: &Sent) -> Headers {
    let mut list = sent.headers.clone();
    let origin = Origin {
        topic: sent.position.topic.clone(),
        partition: sent.position.partition,
        offset: sent.position.offset,
        timestamp: Some(sent.at),
    };
    headers::write_lineage(&mut list, "scheduler", &origin, 0);
    list
}

/// The expected answer to a command for a job. It follows from the end of the job, because the first commands were in time.
fn outcome_of(end: &Ending, index: usize) -> v1::Outcome {
    let moved = usize::try_from(end.revision.saturating_sub(1)).unwrap_or(usize::MAX);
    match end.state {
        v1::JobState::Unspecified => v1::Outcome::Unspecified,
        _ if index < moved => v1::Outcome::Rescheduled,
        v1::JobState::Scheduled => v1::Outcome::Unspecified,
        v1::JobState::Dispatched => v1::Outcome::AlreadyDispatched,
        v1::JobState::Cancelled if index == moved => v1::Outcome::Cancelled,
        v1::JobState::Cancelled => v1::Outcome::AlreadyCancelled,
        v1::JobState::Expired => v1::Outcome::Expired,
    }
}

/// The value of a header that occurs exactly once.
fn header<'a>(record: &'a Record, name: &str) -> Option<&'a [u8]> {
    record.headers.single(name).ok().flatten().flatten()
}

fn parsed<T: std::str::FromStr>(text: Option<&[u8]>) -> Option<T> {
    std::str::from_utf8(text?).ok()?.parse().ok()
}
