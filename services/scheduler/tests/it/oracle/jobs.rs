//! The states of jobs in the state topic, and their records in the topics of applications.

use super::*;

/// The dispatched jobs whose records may be gone with the topic of their application.
pub(super) fn may_be_gone(seen: &Seen) -> HashSet<JobId> {
    let mut ids = HashSet::new();
    for Deletion { app, states } in &seen.deletions {
        let states = states.start..states.end.min(seen.state.len());
        for record in seen.state.get(states).unwrap_or_default() {
            let job = record.value.clone().map(v1::JobRecord::decode);
            if matches!(job, Some(Ok(job)) if job.app == *app && job.state() == v1::JobState::Dispatched) {
                ids.extend(parsed::<JobId>(record.key.as_deref()));
            }
        }
    }
    ids
}

impl Checker<'_> {
    /// The records of each job in the state topic, oldest first; `None` is a tombstone.
    pub(super) fn states(&mut self, records: &[Record]) -> States {
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

    pub(super) fn dispatched<'a>(&mut self, records: &'a [Record]) -> HashMap<JobId, Vec<&'a Record>> {
        let mut dispatched: HashMap<JobId, Vec<&Record>> = HashMap::new();
        for record in records {
            match parsed(header(record, headers::JOB_ID)) {
                Some(id) => dispatched.entry(id).or_default().push(record),
                None => self.defect(Foreign, format!("{} has no job id: {record:?}", record.position)),
            }
        }
        dispatched
    }

    pub(super) fn job<'a>(
        &mut self,
        id: JobId,
        job: &mut ExpectedJob<'a>,
        states: &[Option<v1::JobRecord>],
        records: &[&Record],
        commands: &[Command<'a>],
        may_be_gone: &HashSet<JobId>,
    ) {
        for again in records.iter().skip(1) {
            let (first, again) = (&records[0].position, &again.position);
            self.defect(Double, format!("job {id} was dispatched to {first} and {again}"));
        }
        let may_forget = self.topics.window_when_full.is_some() && job.spec.idempotency_key.is_none();
        let (states, is_forgotten) = match states {
            [states @ .., None] if may_forget => (states, true),
            states => (states, false),
        };
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
        job.end = Ending {
            is_forgotten,
            ..self.state(id, job, last, commands)
        };
        if is_forgotten && last.state() == v1::JobState::Scheduled {
            self.defect(Lost, format!("job {id} is forgotten before its end"));
        }
        match last.state() {
            v1::JobState::Scheduled => {
                self.waits(format!("job {id}, due {}", Timestamp::from_millis(last.due_ms)));
            }
            v1::JobState::Dispatched => {
                self.report.dispatched += 1;
                match records.first() {
                    Some(record) => self.record(id, job, record),
                    None if may_be_gone.contains(&id) => self.report.gone += 1,
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
            is_forgotten: false,
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
}
