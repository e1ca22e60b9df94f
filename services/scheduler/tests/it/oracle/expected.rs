//! What follows from the requests: the order of the commands and the jobs that they ask for.

use super::*;

impl Checker<'_> {
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
    pub(super) fn commands<'a>(&mut self, sent: &'a [Sent], ingest: &[Record]) -> Vec<Command<'a>> {
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

    /// The requests that were rejected because Redis was full, if that can be. Only the scheduler knows when it was.
    pub(super) fn without_room(&self, dead_letters: &[Record]) -> HashSet<(i32, i64)> {
        let rejected = dead_letters.iter().filter(|letter| {
            self.topics.window_when_full.is_some()
                && header(letter, headers::ERROR_CODE) == Some(INDEX_FULL.as_bytes())
        });
        let origins = rejected.filter_map(|letter| ReservedHeaders::read(letter).ok()?.origin().ok());
        origins.map(|origin| (origin.partition, origin.offset)).collect()
    }

    /// The expected jobs, which follow from the order of the commands.
    pub(super) fn expectations<'a>(
        &mut self,
        commands: &[Command<'a>],
        states: &States,
        without_room: &HashSet<(i32, i64)>,
    ) -> Expectations<'a> {
        let mut expectations = Expectations::default();
        // The job of each key, and the newest request that it is from.
        let mut keys: HashMap<(&str, &str), (JobId, &JobSpec)> = HashMap::new();
        for (index, command) in commands.iter().enumerate() {
            let sent: &'a Sent = command.sent;
            let position = (command.position.partition, command.position.offset);
            let expected = match &sent.intent {
                Intent::Refused { .. } => Expected::Refused,
                Intent::Reschedule(..) if without_room.contains(&position) => Expected::NoRoom,
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
                    // What repeats a request needs no room, and neither does a conflict.
                    let is_new = taken.is_none() || replaced.is_some();
                    if is_new && without_room.contains(&position) {
                        self.report.without_room += 1;
                        expectations.expected.push(Expected::NoRoom);
                        continue;
                    }
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
                Expected::Duplicate(id) => {
                    self.report.duplicates += 1;
                    let last = states.get(id).and_then(|states| states.last()?.as_ref());
                    let ended = last.and_then(|last| last.ended_ms).map(Timestamp::from_millis);
                    self.report.late_duplicates += usize::from(ended.is_some_and(|ended| ended < command.at));
                }
                Expected::Conflict(_) => self.report.conflicts += 1,
                Expected::Refused => self.report.refused += 1,
                Expected::NoRoom
                | Expected::JobCommand(..)
                | Expected::Replacement(..)
                | Expected::UnknownJob => {}
            }
            expectations.expected.push(expected);
        }
        expectations
    }
}

/// What a request becomes that replaces others with its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Becomes {
    /// The content of the job that waits.
    Content,
    /// Another job, in the place of the one that waits.
    Successor,
    /// Another job, because the previous one has ended.
    Job,
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
    pub(super) fn expected_headers(&self) -> Headers {
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
pub(super) fn forwarded_headers(sent: &Sent) -> Headers {
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
