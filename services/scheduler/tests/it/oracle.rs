//! The oracle for jobs: from what was asked and what all topics hold it proves what became of each request. It
//! shares no decision with the scheduler: what a request means, the test says that wrote it.
//!
//! A job is exactly once in its application's topic, not before it was due, as it was asked for; or it is
//! cancelled or expired and not there at all. A request that cannot be accepted is exactly once in the
//! dead-letter topic with the field's name. Commands of one job have one order, that of their partition: those
//! that had an effect come first, and each answer says what was so at its place.
//!
//! Pure: `tests` plants losses, doubles and the like and sees that they are found.

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
}

/// A record of the ingest topic that a test wrote.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) place: Position,
    pub(crate) at: Timestamp,
    pub(crate) key: Option<Bytes>,
    pub(crate) value: Option<Bytes>,
    pub(crate) headers: Headers,
    pub(crate) wish: Wish,
    pub(crate) answer_to: Option<String>,
}

/// What it means.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Wish {
    Job(Box<Wanted>),
    /// It cannot be accepted, which a dead letter says with this code and a message with these words.
    Refused {
        code: String,
        says: String,
    },
    Cancel(JobId),
    Reschedule(JobId, When),
}

/// A job as it is to be. Two of one idempotency key that are equal but for `request_id` are one job.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Wanted {
    pub(crate) app: String,
    pub(crate) when: When,
    pub(crate) priority: Priority,
    pub(crate) idempotency_key: Option<String>,
    pub(crate) request_id: Option<String>,
    pub(crate) key: Option<Bytes>,
    pub(crate) value: Bytes,
    /// Without the trace of the ingest record.
    pub(crate) headers: Headers,
    pub(crate) expire_after: Option<Duration>,
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

impl Wanted {
    fn is_same(&self, other: &Self) -> bool {
        let named = |wanted: &Self| Self {
            request_id: None,
            ..wanted.clone()
        };
        named(self) == named(other)
    }
}

/// All records of the topics, as a read_committed consumer sees them, each topic's in the order of offsets.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) ingest: Vec<Record>,
    pub(crate) state: Vec<Record>,
    pub(crate) dlq: Vec<Record>,
    pub(crate) answers: Vec<Record>,
    pub(crate) apps: Vec<Record>,
}

/// Something that must never be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    pub(crate) what: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// Something that should be there is not.
    Lost,
    /// It is there twice.
    Double,
    /// It is there before its time.
    Early,
    /// It is not as it was asked for.
    Altered,
    /// Nobody asked for it.
    Foreign,
    /// Two records tell different stories.
    Contradiction,
}

/// What became of everything.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    pub(crate) jobs: usize,
    pub(crate) dispatched: usize,
    pub(crate) cancelled: usize,
    pub(crate) expired: usize,
    pub(crate) refused: usize,
    pub(crate) conflicts: usize,
    pub(crate) duplicates: usize,
    pub(crate) forwarded: usize,
    /// Changes of time that had an effect.
    pub(crate) rescheduled: usize,
    pub(crate) answers: usize,
    /// What has not come to its end.
    pub(crate) waiting: Vec<String>,
    pub(crate) faults: Vec<Fault>,
    /// Record in the application's topic minus due time, in ms, by application.
    pub(crate) lateness: BTreeMap<String, Vec<i64>>,
}

impl Verdict {
    /// Whether all has ended as it should.
    pub(crate) fn is_clean(&self) -> bool {
        self.faults.is_empty() && self.waiting.is_empty()
    }

    /// The lateness in ms that this share of an application's jobs did not exceed.
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

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 10;
        let smallest = self.lateness.values().flatten().min();
        write!(
            f,
            "{} jobs: {} dispatched (smallest margin {smallest:?} ms), {} cancelled, {} expired; {} refused, {} \
             conflicts, {} duplicates, {} forwarded, {} rescheduled, {} answers; {} waiting, {} faults",
            self.jobs,
            self.dispatched,
            self.cancelled,
            self.expired,
            self.refused,
            self.conflicts,
            self.duplicates,
            self.forwarded,
            self.rescheduled,
            self.answers,
            self.waiting.len(),
            self.faults.len()
        )?;
        for waiting in self.waiting.iter().take(SHOWN) {
            write!(f, "\n  waiting: {waiting}")?;
        }
        for fault in self.faults.iter().take(SHOWN) {
            write!(f, "\n  {:?}: {}", fault.kind, fault.what)?;
        }
        Ok(())
    }
}

/// Judges what became of what was asked. While something waits, what is read of topics that belong together may
/// be of different moments, so only a verdict on a scheduler that has come to rest counts.
pub(crate) fn judge(asked: &[Asked], topics: &Topics, seen: &Seen) -> Verdict {
    let mut judge = Judge {
        topics,
        verdict: Verdict::default(),
    };
    let commands = judge.commands(asked, &seen.ingest);
    let mut plan = judge.plan(&commands);
    let mut states = judge.states(&seen.state);
    let mut dispatched = judge.dispatched(&seen.apps);
    for (id, job) in &mut plan.jobs {
        let states = states.remove(id).unwrap_or_default();
        let records = dispatched.remove(id).unwrap_or_default();
        judge.job(*id, job, &states, &records, &commands);
    }
    for id in states.keys() {
        judge.fault(
            Kind::Foreign,
            format!("the state topic knows job {id}, which nobody asked for"),
        );
    }
    for (id, records) in &dispatched {
        let place = &records[0].position;
        judge.fault(
            Kind::Foreign,
            format!("{place} is of job {id}, which nobody asked for"),
        );
    }
    judge.dead_letters(&commands, &plan, &seen.dlq);
    judge.answers(&commands, &plan, &seen.answers);
    judge.verdict
}

/// A command at the place where it is decided.
struct Command<'a> {
    asked: &'a Asked,
    place: Position,
    at: Timestamp,
}

impl Command<'_> {
    fn id(&self) -> JobId {
        JobId::new(self.at, self.place.partition, self.place.offset)
    }
}

/// What must come of a command, as far as it follows from the commands before it.
enum Expected {
    Job(JobId),
    Duplicate(JobId),
    Conflict(JobId),
    Refused,
    /// A command for this job, at this place in the job's list.
    Of(JobId, usize),
    /// A command for a job that there never was.
    OfNone,
}

#[derive(Default)]
struct Plan<'a> {
    jobs: BTreeMap<JobId, Planned<'a>>,
    /// One per command.
    expected: Vec<Expected>,
}

struct Planned<'a> {
    wanted: &'a Wanted,
    request: &'a Asked,
    /// When it was due at first.
    due: Timestamp,
    accepted_after: Timestamp,
    /// Commands for it, in their order.
    later: Vec<usize>,
    end: Ending,
}

/// How far a job has come.
#[derive(Clone, Debug, Default)]
struct Ending {
    state: v1::JobState,
    revision: u32,
    due: Option<Timestamp>,
    ended: Option<Timestamp>,
}

struct Judge<'a> {
    topics: &'a Topics,
    verdict: Verdict,
}

impl Judge<'_> {
    fn fault(&mut self, kind: Kind, what: String) {
        self.verdict.faults.push(Fault { kind, what });
    }

    fn waits(&mut self, what: String) {
        self.verdict.waiting.push(what);
    }

    fn equal<T: PartialEq + fmt::Debug>(&mut self, what: &dyn fmt::Display, found: &T, expected: &T) {
        if found != expected {
            self.fault(Kind::Altered, format!("{what} is {found:?}, not {expected:?}"));
        }
    }

    /// The partition where a command is decided.
    fn home(&self, asked: &Asked) -> i32 {
        let partitions = self.topics.partitions;
        match &asked.wish {
            Wish::Job(wanted) => match &wanted.idempotency_key {
                Some(key) => shard_of(&wanted.app, key, partitions),
                None => asked.place.partition,
            },
            Wish::Cancel(id) | Wish::Reschedule(id, _) if id.shard() < partitions => id.shard(),
            Wish::Refused { .. } | Wish::Cancel(_) | Wish::Reschedule(..) => asked.place.partition,
        }
    }

    /// All commands where they are decided, in the order of their partitions. What was written to a wrong partition
    /// must have been passed on exactly once, unchanged but for where it came from.
    fn commands<'a>(&mut self, asked: &'a [Asked], ingest: &[Record]) -> Vec<Command<'a>> {
        let mut records: BTreeMap<(i32, i64), &Record> = ingest
            .iter()
            .map(|record| ((record.position.partition, record.position.offset), record))
            .collect();
        let mut commands = Vec::with_capacity(asked.len());
        let mut astray = Vec::new();
        for asked in asked {
            let Some(record) = records.remove(&(asked.place.partition, asked.place.offset)) else {
                self.fault(Kind::Lost, format!("{} is not in the ingest topic", asked.place));
                continue;
            };
            self.is_as_asked(asked, record, &asked.headers);
            self.equal(
                &format_args!("the time of {}", asked.place),
                &record.timestamp,
                &Some(asked.at),
            );
            if self.home(asked) == asked.place.partition {
                commands.push(Command {
                    asked,
                    place: record.position.clone(),
                    at: asked.at,
                });
            } else {
                astray.push(asked);
            }
        }
        let mut passed_on: HashMap<_, VecDeque<&Record>> = HashMap::new();
        for record in records.into_values() {
            let origin = ReservedHeaders::read(record).and_then(|ours| ours.origin()).ok();
            let from = origin.map(|origin| (origin.partition, origin.offset));
            let home = record.position.partition;
            passed_on.entry((home, from)).or_default().push_back(record);
        }
        for asked in astray {
            let from = Some((asked.place.partition, asked.place.offset));
            let passed_on = passed_on.get_mut(&(self.home(asked), from));
            let Some(record) = passed_on.and_then(VecDeque::pop_front) else {
                self.waits(format!("{} is in a wrong partition", asked.place));
                continue;
            };
            self.verdict.forwarded += 1;
            self.is_as_asked(asked, record, &passed_on_headers(asked));
            let at = record.timestamp.unwrap_or(asked.at);
            if at < asked.at {
                self.fault(
                    Kind::Early,
                    format!("{} was passed on before it was written", asked.place),
                );
            }
            commands.push(Command {
                asked,
                place: record.position.clone(),
                at,
            });
        }
        for record in passed_on.into_values().flatten() {
            let place = &record.position;
            self.fault(
                Kind::Double,
                format!("nobody wrote {place}, or it was passed on twice"),
            );
        }
        commands.sort_by(|a, b| a.place.cmp(&b.place));
        commands
    }

    fn is_as_asked(&mut self, asked: &Asked, record: &Record, headers: &Headers) {
        let place = &record.position;
        self.equal(&format_args!("the key of {place}"), &record.key, &asked.key);
        self.equal(&format_args!("the value of {place}"), &record.value, &asked.value);
        self.equal(&format_args!("the headers of {place}"), &record.headers, headers);
    }

    /// Which jobs there are to be, by the order of commands alone.
    fn plan<'a>(&mut self, commands: &[Command<'a>]) -> Plan<'a> {
        let mut plan = Plan::default();
        let mut keys: HashMap<(&str, &str), (JobId, &Wanted)> = HashMap::new();
        for (index, command) in commands.iter().enumerate() {
            let asked: &'a Asked = command.asked;
            let expected = match &asked.wish {
                Wish::Refused { .. } => Expected::Refused,
                Wish::Cancel(id) | Wish::Reschedule(id, _) => match plan.jobs.get_mut(id) {
                    Some(job) => {
                        job.later.push(index);
                        Expected::Of(*id, job.later.len() - 1)
                    }
                    None => Expected::OfNone,
                },
                Wish::Job(wanted) => {
                    let key = wanted.idempotency_key.as_deref();
                    let taken = key.and_then(|key| keys.get(&(wanted.app.as_str(), key)));
                    match taken {
                        Some((id, first)) if first.is_same(wanted) => Expected::Duplicate(*id),
                        Some((id, _)) => Expected::Conflict(*id),
                        None => {
                            let id = command.id();
                            if let Some(key) = key {
                                keys.insert((&wanted.app, key), (id, wanted));
                            }
                            let job = Planned {
                                wanted,
                                request: asked,
                                due: wanted.when.due(asked.at),
                                accepted_after: command.at,
                                later: Vec::new(),
                                end: Ending::default(),
                            };
                            plan.jobs.insert(id, job);
                            Expected::Job(id)
                        }
                    }
                }
            };
            match &expected {
                Expected::Job(_) => self.verdict.jobs += 1,
                Expected::Duplicate(_) => self.verdict.duplicates += 1,
                Expected::Conflict(_) => self.verdict.conflicts += 1,
                Expected::Refused => self.verdict.refused += 1,
                Expected::Of(..) | Expected::OfNone => {}
            }
            plan.expected.push(expected);
        }
        plan
    }

    /// What the state topic says of each job, oldest first; `None` where it was forgotten.
    fn states(&mut self, records: &[Record]) -> HashMap<JobId, Vec<Option<v1::JobRecord>>> {
        let mut states: HashMap<JobId, Vec<_>> = HashMap::new();
        for record in records {
            let place = &record.position;
            let Some(id) = parsed::<JobId>(record.key.as_deref()) else {
                self.fault(Kind::Foreign, format!("{place} is not of a job"));
                continue;
            };
            if id.shard() != place.partition {
                self.fault(Kind::Foreign, format!("{place} is of job {id}"));
            }
            match record.value.clone().map(v1::JobRecord::decode).transpose() {
                Ok(state) => states.entry(id).or_default().push(state),
                Err(error) => self.fault(Kind::Altered, format!("{place}: {error}")),
            }
        }
        states
    }

    fn dispatched<'a>(&mut self, records: &'a [Record]) -> HashMap<JobId, Vec<&'a Record>> {
        let mut dispatched: HashMap<JobId, Vec<&Record>> = HashMap::new();
        for record in records {
            match parsed(header(record, headers::JOB_ID)) {
                Some(id) => dispatched.entry(id).or_default().push(record),
                None => self.fault(
                    Kind::Foreign,
                    format!("{} says no job: {record:?}", record.position),
                ),
            }
        }
        dispatched
    }

    fn job(
        &mut self,
        id: JobId,
        job: &mut Planned<'_>,
        states: &[Option<v1::JobRecord>],
        records: &[&Record],
        commands: &[Command<'_>],
    ) {
        for again in records.iter().skip(1) {
            let (first, again) = (&records[0].position, &again.position);
            self.fault(
                Kind::Double,
                format!("job {id} was dispatched to {first} and to {again}"),
            );
        }
        let Some(last) = states.last() else {
            if records.is_empty() {
                return self.waits(format!("{} is not decided", job.request.place));
            }
            return self.waits(format!(
                "job {id} is dispatched, which the state topic does not say"
            ));
        };
        let Some(last) = last else {
            return self.fault(Kind::Lost, format!("job {id} is forgotten"));
        };
        self.history(id, states);
        job.end = self.state(id, job, last, commands);
        match last.state() {
            v1::JobState::Scheduled => {
                self.waits(format!("job {id}, due {}", Timestamp::from_millis(last.due_ms)));
            }
            v1::JobState::Dispatched => {
                self.verdict.dispatched += 1;
                match records.first() {
                    Some(record) => self.record(id, job, record),
                    None => self.fault(
                        Kind::Lost,
                        format!("job {id} is said to be dispatched and is nowhere"),
                    ),
                }
            }
            ended => {
                if ended == v1::JobState::Cancelled {
                    self.verdict.cancelled += 1;
                } else {
                    self.verdict.expired += 1;
                }
                if let Some(record) = records.first() {
                    let place = &record.position;
                    self.fault(
                        Kind::Contradiction,
                        format!("job {id} is {ended:?} and was dispatched to {place}"),
                    );
                }
            }
        }
    }

    /// Each revision once, in their order, and at most one end, after which nothing comes.
    fn history(&mut self, id: JobId, states: &[Option<v1::JobRecord>]) {
        for pair in states.windows(2) {
            let [Some(before), Some(after)] = pair else {
                self.fault(
                    Kind::Contradiction,
                    format!("job {id} was forgotten and came back"),
                );
                continue;
            };
            if before.state() != v1::JobState::Scheduled {
                self.fault(
                    Kind::Double,
                    format!(
                        "job {id} was {:?}, and then it was {:?}",
                        before.state(),
                        after.state()
                    ),
                );
            }
            let step = u32::from(after.state() == v1::JobState::Scheduled);
            if after.revision != before.revision + step {
                self.fault(
                    Kind::Contradiction,
                    format!(
                        "revision {} of job {id} came after {}",
                        after.revision, before.revision
                    ),
                );
            }
        }
    }

    /// What the newest record of the state topic says must follow from the commands for the job, of which the
    /// first ones had an effect and the others came too late.
    fn state(
        &mut self,
        id: JobId,
        job: &Planned<'_>,
        last: &v1::JobRecord,
        commands: &[Command<'_>],
    ) -> Ending {
        let wanted = job.wanted;
        let moved = usize::try_from(last.revision.saturating_sub(1)).unwrap_or(usize::MAX);
        let mut due = job.due;
        for index in 0..moved {
            let command = job.later.get(index).map(|command| &commands[*command]);
            match command.map(|command| (&command.asked.wish, command.asked.at)) {
                Some((Wish::Reschedule(_, when), at)) => {
                    due = when.due(at);
                    self.verdict.rescheduled += 1;
                }
                other => self.fault(
                    Kind::Contradiction,
                    format!("change {index} of job {id} is {other:?}"),
                ),
            }
        }
        let next = job.later.get(moved).map(|command| &commands[*command].asked.wish);
        match (last.state(), next) {
            (v1::JobState::Cancelled, Some(Wish::Cancel(_)))
            | (v1::JobState::Dispatched | v1::JobState::Expired, _) => {}
            (v1::JobState::Scheduled, None) => {}
            (v1::JobState::Scheduled, Some(_)) => {
                self.waits(format!("command {moved} for job {id} is not decided"));
            }
            (state, next) => self.fault(
                Kind::Contradiction,
                format!("job {id} is {state:?}, and command {moved} is {next:?}"),
            ),
        }
        let expires = wanted.expire_after.map(|span| due.after(span));
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        self.equal(&format_args!("the app of job {id}"), &last.app, &wanted.app);
        self.equal(
            &format_args!("the priority of job {id}"),
            &from_priority(last.priority()),
            &wanted.priority,
        );
        self.equal(
            &format_args!("the due time of job {id}"),
            &last.due_ms,
            &due.as_millis(),
        );
        self.equal(
            &format_args!("the key of job {id}"),
            &last.idempotency_key,
            &text(&wanted.idempotency_key),
        );
        self.equal(
            &format_args!("the name of job {id}"),
            &last.request_id,
            &text(&wanted.request_id),
        );
        self.equal(
            &format_args!("the topic of job {id}"),
            &Some(&*last.topic),
            &self.topics.apps.get(&wanted.app).map(|topic| &**topic),
        );
        self.equal(
            &format_args!("the last moment of job {id}"),
            &last.expires_ms,
            &expires.map(Timestamp::as_millis),
        );
        if last.long_wait || last.accepted_ms < job.accepted_after.as_millis() {
            self.fault(Kind::Altered, format!("job {id} is {last:?}"));
        }
        let waits = last.state() == v1::JobState::Scheduled;
        let kept = (last.data.clone(), last.key.clone(), from_headers(&last.headers));
        let payload = (
            Some(wanted.value.clone()),
            wanted.key.clone(),
            job.wanted_headers(),
        );
        let expected = if waits { payload } else { Default::default() };
        self.equal(&format_args!("what is kept of job {id}"), &kept, &expected);
        let ended = last.ended_ms.map(Timestamp::from_millis);
        match (last.state(), ended, expires) {
            (v1::JobState::Scheduled, None, _) | (v1::JobState::Cancelled, Some(_), _) => {}
            (v1::JobState::Dispatched, Some(ended), expires)
                if ended >= due && expires.is_none_or(|expires| ended <= expires) => {}
            (v1::JobState::Expired, Some(ended), Some(expires)) if ended > expires => {}
            (state, ended, expires) => self.fault(
                Kind::Contradiction,
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

    /// The record in the application's topic: as it was asked for, and not early.
    fn record(&mut self, id: JobId, job: &Planned<'_>, record: &Record) {
        let wanted = job.wanted;
        let place = &record.position;
        let due = job.end.due.unwrap_or(job.due);
        let topic = self.topics.apps.get(&wanted.app);
        self.equal(&format_args!("the topic of {place}"), &Some(&place.topic), &topic);
        self.equal(&format_args!("the key of {place}"), &record.key, &wanted.key);
        self.equal(
            &format_args!("the value of {place}"),
            &record.value,
            &Some(wanted.value.clone()),
        );
        if let Some(key) = &record.key {
            let partition = partition_for_key(key, self.topics.partitions);
            self.equal(
                &format_args!("the partition of {place}"),
                &place.partition,
                &partition,
            );
        }
        let dispatched_at: Option<Timestamp> = parsed(header(record, headers::DISPATCHED_AT));
        let mut expected = job.wanted_headers();
        expected.push_text(headers::JOB_ID, &id.to_string());
        expected.push_text(headers::JOB_APP, &wanted.app);
        expected.push_text(headers::SCHEDULED_TIME, &due.to_string());
        let at = dispatched_at.unwrap_or(Timestamp::from_millis(0));
        expected.push_text(headers::DISPATCHED_AT, &at.to_string());
        expected.push_text(headers::JOB_PRIORITY, wanted.priority.as_str());
        if let Some(key) = &wanted.idempotency_key {
            expected.push_text(headers::IDEMPOTENCY_KEY, key);
        }
        self.equal(
            &format_args!("the headers of {place}"),
            &record.headers,
            &expected,
        );
        self.equal(
            &format_args!("the time of dispatch of {place}"),
            &dispatched_at,
            &job.end.ended,
        );
        let written = record.timestamp.unwrap_or(Timestamp::from_millis(0));
        if at < due || written < due {
            self.fault(
                Kind::Early,
                format!("job {id}, due {due}, was dispatched at {at} and written at {written}"),
            );
        }
        let margin = written.as_millis() - due.as_millis();
        self.verdict
            .lateness
            .entry(wanted.app.clone())
            .or_default()
            .push(margin);
    }

    /// Each request that cannot be accepted has one dead letter, and nothing else has any.
    fn dead_letters(&mut self, commands: &[Command<'_>], plan: &Plan<'_>, records: &[Record]) {
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
                Err(failure) => self.fault(Kind::Foreign, format!("{}: {failure}", record.position)),
            }
        }
        for (command, expected) in commands.iter().zip(&plan.expected) {
            let (code, says) = match (expected, &command.asked.wish) {
                (Expected::Refused, Wish::Refused { code, says }) => (code.as_str(), says.as_str()),
                (Expected::Conflict(_), _) => ("request.conflict", "idempotencyKey"),
                _ => continue,
            };
            let found = letters.remove(&command.place).unwrap_or_default();
            for again in found.iter().skip(1) {
                let again = &again.position;
                self.fault(
                    Kind::Double,
                    format!(
                        "{} is dead at {} and at {again}",
                        command.place, found[0].position
                    ),
                );
            }
            match found.first() {
                Some(letter) => self.dead_letter(command, code, says, letter),
                None => self.waits(format!("{} is not dead yet", command.place)),
            }
        }
        for letter in letters.into_values().flatten() {
            let message = header(letter, headers::ERROR_MESSAGE).map(String::from_utf8_lossy);
            self.fault(
                Kind::Foreign,
                format!("{} is dead for no reason: {message:?}", letter.position),
            );
        }
    }

    fn dead_letter(&mut self, command: &Command<'_>, code: &str, says: &str, letter: &Record) {
        let (asked, place) = (command.asked, &letter.position);
        self.equal(&format_args!("the key of {place}"), &letter.key, &asked.key);
        self.equal(&format_args!("the value of {place}"), &letter.value, &asked.value);
        let users = |list: &Headers| list.filtered(|name| !headers::is_ours(name));
        let (found, expected) = (users(&letter.headers), users(&asked.headers));
        self.equal(&format_args!("the headers of {place}"), &found, &expected);
        let text = |name| {
            header(letter, name)
                .map(|value| String::from_utf8_lossy(value).into_owned())
                .unwrap_or_default()
        };
        self.equal(
            &format_args!("the code of {place}"),
            &text(headers::ERROR_CODE),
            &code.to_owned(),
        );
        let message = text(headers::ERROR_MESSAGE);
        if !message.contains(says) {
            self.fault(
                Kind::Altered,
                format!("{place} does not say {says:?}: {message:?}"),
            );
        }
        let class = text(headers::ERROR_CLASS);
        if class != "malformed" && class != "permanent" {
            self.fault(Kind::Altered, format!("the class of {place} is {class}"));
        }
    }

    /// Who asked for an answer has exactly one, and it is true.
    fn answers(&mut self, commands: &[Command<'_>], plan: &Plan<'_>, records: &[Record]) {
        let mut answers: HashMap<String, Vec<&Record>> = HashMap::new();
        for record in records {
            let name = String::from_utf8_lossy(record.key.as_deref().unwrap_or_default());
            answers.entry(name.into_owned()).or_default().push(record);
        }
        let mut names = HashSet::new();
        for (command, expected) in commands.iter().zip(&plan.expected) {
            let Some(name) = &command.asked.answer_to else {
                continue;
            };
            assert!(names.insert(name), "the test asks twice for an answer to {name}");
            let found = answers.remove(name).unwrap_or_default();
            if let [first, again, ..] = found[..] {
                let (first, again) = (&first.position, &again.position);
                self.fault(
                    Kind::Double,
                    format!("{name} is answered at {first} and at {again}"),
                );
            }
            let Some(record) = found.first() else {
                self.waits(format!("{name} is not answered"));
                continue;
            };
            match record.value.clone().map(v1::CommandOutcome::decode) {
                Some(Ok(answer)) => {
                    self.verdict.answers += 1;
                    self.answer(command, expected, plan, &answer);
                }
                other => self.fault(Kind::Altered, format!("{}: {other:?}", record.position)),
            }
        }
        for name in answers.keys() {
            self.fault(
                Kind::Foreign,
                format!("{name} is answered, for which nobody asked"),
            );
        }
    }

    fn answer(
        &mut self,
        command: &Command<'_>,
        expected: &Expected,
        plan: &Plan<'_>,
        answer: &v1::CommandOutcome,
    ) {
        let name = command.asked.answer_to.as_deref().unwrap_or_default();
        let (outcome, id) = match expected {
            Expected::Job(id) => (v1::Outcome::Scheduled, Some(*id)),
            Expected::Duplicate(id) => (v1::Outcome::Duplicate, Some(*id)),
            Expected::Conflict(id) => (v1::Outcome::Conflict, Some(*id)),
            Expected::Refused => (v1::Outcome::Rejected, None),
            Expected::OfNone => (v1::Outcome::Unknown, None),
            Expected::Of(id, index) => (outcome_of(&plan.jobs[id].end, *index), Some(*id)),
        };
        if outcome == v1::Outcome::Unspecified {
            return self.waits(format!("{name} is answered, and its job is not decided"));
        }
        if answer.outcome() != outcome {
            let found = answer.outcome();
            self.fault(
                Kind::Contradiction,
                format!("{name} was told {found:?}, and it is {outcome:?} of job {id:?}"),
            );
            return;
        }
        let shown = answer.job.as_ref();
        self.equal(
            &format_args!("the job that {name} was told"),
            &shown.map(|job| job.id.as_str()),
            &id.map(|id| id.to_string()).as_deref(),
        );
        if let Wish::Refused { says, .. } = &command.asked.wish
            && !answer.reason.contains(says)
        {
            let reason = &answer.reason;
            self.fault(
                Kind::Altered,
                format!("{name} was not told {says:?}, but {reason:?}"),
            );
        }
        let (Some(job), Some(shown)) = (id.and_then(|id| plan.jobs.get(&id)), shown) else {
            return;
        };
        let time = |time: Option<_>| time.as_ref().and_then(from_timestamp);
        match (expected, outcome) {
            (Expected::Job(_), _) => {
                self.equal(
                    &format_args!("the due time that {name} was told"),
                    &time(shown.scheduled_time),
                    &Some(job.due),
                );
            }
            (Expected::Of(..), v1::Outcome::Rescheduled) => {
                let Wish::Reschedule(_, when) = command.asked.wish else {
                    return self.fault(Kind::Contradiction, format!("{name} did not ask for a new time"));
                };
                self.equal(
                    &format_args!("the due time that {name} was told"),
                    &time(shown.scheduled_time),
                    &Some(when.due(command.asked.at)),
                );
            }
            (Expected::Of(..), _) => {
                self.equal(
                    &format_args!("the end that {name} was told"),
                    &time(shown.ended_at),
                    &job.end.ended,
                );
                self.equal(
                    &format_args!("the state that {name} was told"),
                    &shown.state(),
                    &job.end.state,
                );
            }
            _ => {}
        }
    }
}

impl Planned<'_> {
    /// The headers that the record is to have, the trace of the request among them.
    fn wanted_headers(&self) -> Headers {
        let mut list = self.wanted.headers.clone();
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

/// The headers that a request has once it was passed on: it says where and when it was written first, from which a
/// delay counts.
fn passed_on_headers(asked: &Asked) -> Headers {
    let mut list = asked.headers.clone();
    let origin = Origin {
        topic: asked.place.topic.clone(),
        partition: asked.place.partition,
        offset: asked.place.offset,
        timestamp: Some(asked.at),
    };
    headers::write_lineage(&mut list, "scheduler", &origin, 0);
    list
}

/// What a command for a job must have been told, given how the job ended: the first ones were in time.
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

/// The value of a header that stands exactly once.
fn header<'a>(record: &'a Record, name: &str) -> Option<&'a [u8]> {
    record.headers.single(name).ok().flatten().flatten()
}

fn parsed<T: std::str::FromStr>(text: Option<&[u8]>) -> Option<T> {
    std::str::from_utf8(text?).ok()?.parse().ok()
}
