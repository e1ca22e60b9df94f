//! Dead letters and answers.

use super::*;

impl Checker<'_> {
    /// Each rejected request must have one dead letter, and no other request may have one.
    pub(super) fn dead_letters(
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
                (Expected::NoRoom, _) => (INDEX_FULL, "Redis is full"),
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
                Some(letter) => {
                    self.dead_letter(command, code, says, letter);
                    if let (Expected::NoRoom, Intent::Job(spec)) = (expected, &command.sent.intent) {
                        self.is_beyond_window(spec, command, letter);
                    }
                }
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

    /// Even a full Redis is no reason to reject a job that needs no index. A job with an idempotency key does.
    fn is_beyond_window(&mut self, spec: &JobSpec, command: &Command<'_>, letter: &Record) {
        let rejected: Option<Timestamp> = parsed(header(letter, headers::ERROR_TIMESTAMP));
        let due = spec.when.due(command.sent.at);
        let window = self.topics.window_when_full.unwrap_or_default();
        let needs_index = spec.idempotency_key.is_some();
        if !needs_index && rejected.is_none_or(|rejected| due <= rejected.after(window)) {
            self.defect(
                Contradiction,
                format!(
                    "{} is due at {due}, and was rejected at {rejected:?}",
                    command.position
                ),
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
    pub(super) fn answers(
        &mut self,
        commands: &[Command<'_>],
        expectations: &Expectations<'_>,
        records: &[Record],
    ) {
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
        if expectations.jobs[&id].end.is_forgotten {
            return true;
        }
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
            Expected::Refused | Expected::NoRoom => (v1::Outcome::Rejected, None),
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
