//! The oracle finds planted defects, and nothing in topics without a defect.

use redeliver_core::{ErrorClass, Failure, HumanDuration};
use redeliver_proto::convert::{to_headers, to_priority, to_timestamp};

use super::expected::forwarded_headers;
use super::*;

const START: i64 = 1_763_722_800_000;
const PARTITIONS: i32 = 3;
const WINDOW: Duration = Duration::from_secs(10);

fn topics() -> Topics {
    Topics {
        ingest: "ingest".into(),
        state: "state".into(),
        dlq: "dlq".into(),
        answers: "answers".into(),
        apps: [("app".to_owned(), "jobs".into())].into(),
        partitions: PARTITIONS,
        max_ended: None,
        window_when_full: Some(WINDOW),
    }
}

fn at(millis: i64) -> Timestamp {
    Timestamp::from_millis(START + millis)
}

fn spec(name: &str) -> JobSpec {
    JobSpec {
        app: "app".to_owned(),
        when: When::After(HumanDuration::from_secs(1).duration()),
        priority: Priority::High,
        idempotency_key: None,
        request_id: None,
        key: Some(Bytes::from(format!("key of {name}"))),
        value: Bytes::from(format!("value of {name}")),
        headers: [("tenant", Some(&b"a"[..])), ("tenant", None)]
            .into_iter()
            .collect(),
        expire_after: None,
        replaces: false,
    }
}

/// All topics, as a correct scheduler leaves them.
struct World {
    sent: Vec<Sent>,
    seen: Seen,
    next: HashMap<(Arc<str>, i32), i64>,
    ids: HashMap<String, (JobId, JobSpec, Timestamp)>,
}

impl World {
    /// A dispatched job, one that was rescheduled and then cancelled, an expired one, a duplicate, a conflict, a forwarded
    /// request, a rejected one, cancellations that were too late or of an unknown job, and requests that replace a job that waits, one of
    /// another priority, and one that has ended.
    fn new() -> Self {
        let mut world = Self {
            sent: Vec::new(),
            seen: Seen::default(),
            next: HashMap::new(),
            ids: HashMap::new(),
        };
        world.schedule("sent", spec("sent"));
        world.dispatch("sent", 1000, 1003);
        world.cancel_too_late("sent");

        world.schedule("moved", spec("moved"));
        world.reschedule("moved", 5000);
        world.cancel("moved", 2000);
        world.cancel_again("moved");

        let short = JobSpec {
            expire_after: Some(Duration::from_secs(1)),
            ..spec("expired")
        };
        world.schedule("expired", short);
        world.expire("expired", 2001);

        let keyed = JobSpec {
            idempotency_key: Some("k".to_owned()),
            ..spec("keyed")
        };
        world.schedule("keyed", keyed.clone());
        world.dispatch("keyed", 1000, 1001);
        let again = JobSpec {
            request_id: Some("another name".to_owned()),
            ..keyed.clone()
        };
        world.already("keyed", again, v1::Outcome::Duplicate);
        let other = JobSpec {
            value: Bytes::from_static(b"other"),
            ..keyed
        };
        world.already("keyed", other, v1::Outcome::Conflict);

        let misplaced = JobSpec {
            idempotency_key: Some("misplaced".to_owned()),
            ..spec("misplaced")
        };
        world.schedule("misplaced", misplaced);
        world.dispatch("misplaced", 1000, 1001);

        world.refuse();
        world.cancel_unknown();
        world.reject_for_memory();

        let debounced = |name: &str, seconds: i64| JobSpec {
            idempotency_key: Some("debounced".to_owned()),
            when: When::At(at(seconds * 1000)),
            replaces: true,
            ..spec(name)
        };
        world.schedule("debounced", debounced("first", 1));
        world.replace("debounced", debounced("second", 3));
        world.already("debounced", debounced("second", 3), v1::Outcome::Duplicate);
        let high = JobSpec {
            priority: Priority::Low,
            ..debounced("third", 4)
        };
        world.succeed("debounced", "third", high.clone());
        world.dispatch("third", 4000, 4003);
        // After the end of that job.
        let again = JobSpec {
            when: When::At(at(6000)),
            ..high
        };
        world.schedule("fourth", again);
        world.replace(
            "fourth",
            JobSpec {
                value: Bytes::from_static(b"replaced"),
                when: When::At(at(8000)),
                priority: Priority::Low,
                ..debounced("fourth", 8)
            },
        );
        world.dispatch("fourth", 8000, 8001);
        world
    }

    fn position(&mut self, topic: &str, partition: i32) -> Position {
        let topic: Arc<str> = topic.into();
        let next = self.next.entry((topic.clone(), partition)).or_default();
        let offset = *next;
        // A transaction marker follows each record.
        *next += 2;
        Position {
            topic,
            partition,
            offset,
        }
    }

    fn record(&mut self, topic: &str, partition: i32, time: Timestamp) -> Record {
        Record {
            position: self.position(topic, partition),
            timestamp: Some(time),
            key: None,
            value: None,
            headers: Headers::new(),
            unreadable_headers: 0,
        }
    }

    /// Writes a request, and forwards it if another partition decides it. Returns the record in that partition.
    fn send(&mut self, name: &str, partition: i32, home: i32, intent: Intent) -> Record {
        let record = Record {
            key: Some(Bytes::from_static(b"request")),
            value: Some(Bytes::from(format!("request {name} {}", self.sent.len()))),
            headers: [(headers::TRACEPARENT, Some(&b"00-trace"[..]))]
                .into_iter()
                .collect(),
            ..self.record("ingest", partition, at(0))
        };
        self.sent.push(Sent {
            position: record.position.clone(),
            at: at(0),
            key: record.key.clone(),
            value: record.value.clone(),
            headers: record.headers.clone(),
            intent,
            answer_to: Some(format!("{name} {}", self.sent.len())),
        });
        self.seen.ingest.push(record.clone());
        if home == partition {
            return record;
        }
        let forwarded = Record {
            position: self.position("ingest", home),
            timestamp: Some(at(7)),
            headers: forwarded_headers(self.sent.last().unwrap()),
            ..record
        };
        self.seen.ingest.push(forwarded.clone());
        forwarded
    }

    fn answer(&mut self, outcome: v1::Outcome, job: Option<v1::Job>, reason: &str) {
        let answer = v1::CommandOutcome {
            outcome: outcome.into(),
            job,
            reason: reason.to_owned(),
            ..v1::CommandOutcome::default()
        };
        let name = self.sent.last().unwrap().answer_to.clone().unwrap();
        let record = Record {
            key: Some(name.into()),
            value: Some(answer.encode_to_vec().into()),
            ..self.record("answers", 0, at(9))
        };
        self.seen.answers.push(record);
    }

    fn schedule(&mut self, name: &str, spec: JobSpec) {
        let key = spec.idempotency_key.as_deref();
        let home = key.map_or(1, |key| shard_of("app", key, PARTITIONS));
        let partition = if name == "misplaced" {
            (home + 1) % PARTITIONS
        } else {
            home
        };
        let intent = Intent::Job(Box::new(spec.clone()));
        let request = self.send(name, partition, home, intent);
        let requested = request.timestamp.unwrap();
        let id = JobId::new(requested, home, request.position.offset);
        let due = spec.when.due(at(0));
        let shown = v1::Job {
            id: id.to_string(),
            scheduled_time: Some(to_timestamp(due)),
            ..v1::Job::default()
        };
        self.answer(v1::Outcome::Scheduled, Some(shown), "");
        self.ids.insert(name.to_owned(), (id, spec, due));
        self.state(name, v1::JobState::Scheduled, 1, None);
    }

    fn state(&mut self, name: &str, state: v1::JobState, revision: u32, ended: Option<Timestamp>) {
        let (id, spec, due) = self.ids[name].clone();
        let waits = state == v1::JobState::Scheduled;
        let mut list = spec.headers.clone();
        list.push_text(headers::TRACEPARENT, "00-trace");
        let job = v1::JobRecord {
            app: spec.app.clone(),
            state: state.into(),
            priority: to_priority(spec.priority).into(),
            due_ms: due.as_millis(),
            accepted_ms: at(8).as_millis(),
            revision,
            idempotency_key: spec.idempotency_key.clone().unwrap_or_default(),
            request_id: spec.request_id.clone().unwrap_or_default(),
            data: waits.then(|| spec.value.clone()),
            key: spec.key.clone().filter(|_| waits),
            headers: if waits { to_headers(&list) } else { Vec::new() },
            topic: "jobs".to_owned(),
            ended_ms: ended.map(Timestamp::as_millis),
            expires_ms: spec.expire_after.map(|span| due.after(span).as_millis()),
            ..v1::JobRecord::default()
        };
        let record = Record {
            key: Some(id.to_string().into()),
            value: Some(job.encode_to_vec().into()),
            ..self.record("state", id.shard(), at(9))
        };
        self.seen.state.push(record);
    }

    fn dispatch(&mut self, name: &str, due: i64, written: i64) {
        let (id, spec, planned) = self.ids[name].clone();
        assert!(planned >= at(due), "the test data is wrong");
        let now = planned.after(Duration::from_millis(1));
        let mut list = spec.headers.clone();
        list.push_text(headers::TRACEPARENT, "00-trace");
        for (name, value) in [
            (headers::JOB_ID, id.to_string()),
            (headers::JOB_APP, spec.app.clone()),
            (headers::SCHEDULED_TIME, planned.to_string()),
            (headers::DISPATCHED_AT, now.to_string()),
            (headers::JOB_PRIORITY, spec.priority.as_str().to_owned()),
        ] {
            list.push_text(name, &value);
        }
        if let Some(key) = &spec.idempotency_key {
            list.push_text(headers::IDEMPOTENCY_KEY, key);
        }
        let partition = partition_for_key(spec.key.as_deref().unwrap(), PARTITIONS);
        let record = Record {
            key: spec.key.clone(),
            value: Some(spec.value.clone()),
            headers: list,
            ..self.record("jobs", partition, at(written + 7))
        };
        self.seen.apps.push(record);
        let revision = self.revision(name);
        self.state(name, v1::JobState::Dispatched, revision, Some(now));
    }

    /// The revision of the newest record of a job.
    fn revision(&mut self, name: &str) -> u32 {
        let mut revision = 0;
        self.newest(name, |job| revision = job.revision);
        revision
    }

    /// A request that gives a waiting job another content.
    fn replace(&mut self, name: &str, spec: JobSpec) {
        let id = self.ids[name].0;
        self.send(name, id.shard(), id.shard(), Intent::Job(Box::new(spec.clone())));
        let due = spec.when.due(at(0));
        let revision = self.revision(name) + 1;
        let shown = v1::Job {
            id: id.to_string(),
            scheduled_time: Some(to_timestamp(due)),
            revision,
            ..v1::Job::default()
        };
        self.answer(v1::Outcome::Replaced, Some(shown), "");
        self.ids.insert(name.to_owned(), (id, spec, due));
        self.state(name, v1::JobState::Scheduled, revision, None);
    }

    /// A request for another job, which ends a waiting one.
    fn succeed(&mut self, name: &str, new: &str, spec: JobSpec) {
        let revision = self.revision(name);
        self.state(name, v1::JobState::Cancelled, revision, Some(at(2000)));
        self.schedule(new, spec);
        let answer = self.seen.answers.last_mut().unwrap();
        let mut outcome = v1::CommandOutcome::decode(answer.value.clone().unwrap()).unwrap();
        outcome.set_outcome(v1::Outcome::Replaced);
        answer.value = Some(outcome.encode_to_vec().into());
    }

    fn command(&mut self, name: &str, intent: impl FnOnce(JobId) -> Intent) {
        let id = self.ids[name].0;
        self.send(name, id.shard(), id.shard(), intent(id));
    }

    fn ended(&self, name: &str, state: v1::JobState, ended: Timestamp) -> Option<v1::Job> {
        Some(v1::Job {
            id: self.ids[name].0.to_string(),
            state: state.into(),
            ended_at: Some(to_timestamp(ended)),
            ..v1::Job::default()
        })
    }

    fn cancel_too_late(&mut self, name: &str) {
        self.command(name, Intent::Cancel);
        let ended = self.ids[name].2.after(Duration::from_millis(1));
        let shown = self.ended(name, v1::JobState::Dispatched, ended);
        self.answer(v1::Outcome::AlreadyDispatched, shown, "");
    }

    fn reschedule(&mut self, name: &str, due: i64) {
        self.command(name, |id| Intent::Reschedule(id, When::At(at(due))));
        self.ids.get_mut(name).unwrap().2 = at(due);
        let shown = v1::Job {
            id: self.ids[name].0.to_string(),
            scheduled_time: Some(to_timestamp(at(due))),
            ..v1::Job::default()
        };
        self.answer(v1::Outcome::Rescheduled, Some(shown), "");
        self.state(name, v1::JobState::Scheduled, 2, None);
    }

    fn cancel(&mut self, name: &str, now: i64) {
        self.command(name, Intent::Cancel);
        let shown = self.ended(name, v1::JobState::Cancelled, at(now));
        self.answer(v1::Outcome::Cancelled, shown, "");
        self.state(name, v1::JobState::Cancelled, 2, Some(at(now)));
    }

    fn cancel_again(&mut self, name: &str) {
        self.command(name, Intent::Cancel);
        let shown = self.ended(name, v1::JobState::Cancelled, at(2000));
        self.answer(v1::Outcome::AlreadyCancelled, shown, "");
    }

    fn expire(&mut self, name: &str, now: i64) {
        self.state(name, v1::JobState::Expired, 1, Some(at(now)));
    }

    fn already(&mut self, name: &str, spec: JobSpec, outcome: v1::Outcome) {
        let home = self.ids[name].0.shard();
        let request = self.send(name, home, home, Intent::Job(Box::new(spec)));
        let shown = v1::Job {
            id: self.ids[name].0.to_string(),
            ..v1::Job::default()
        };
        self.answer(outcome, Some(shown), "");
        if outcome == v1::Outcome::Conflict {
            let failure = Failure::permanent("request.conflict", "idempotencyKey is in use");
            self.dead_letter(&request, &failure);
        }
    }

    fn refuse(&mut self) {
        let failure = Failure::malformed("request.jobData", "`jobData` is missing");
        let intent = Intent::Refused {
            code: failure.code.to_string(),
            says: "jobData".to_owned(),
        };
        let request = self.send("refused", 2, 2, intent);
        self.answer(v1::Outcome::Rejected, None, &failure.message);
        self.dead_letter(&request, &failure);
    }

    /// A request that is rejected because Redis is full, and a second one with its key, which is not.
    fn reject_for_memory(&mut self) {
        let far = JobSpec {
            idempotency_key: Some("far".to_owned()),
            when: When::At(at(10_011)),
            ..spec("far")
        };
        let home = shard_of("app", "far", PARTITIONS);
        let request = self.send("far", home, home, Intent::Job(Box::new(far.clone())));
        let failure = Failure::new(
            ErrorClass::Permanent,
            "scheduler.index-full",
            "Redis is full; until it has more free memory, only jobs that are due within 10 s are accepted",
        );
        self.answer(v1::Outcome::Rejected, None, &failure.message);
        self.dead_letter(&request, &failure);
        self.schedule("far", far);
        self.dispatch("far", 10_011, 10_012);
    }

    fn dead_letter(&mut self, request: &Record, failure: &Failure) {
        let mut list = request.headers.clone();
        headers::write_lineage(&mut list, "scheduler", &Origin::of(request), 0);
        headers::write_failure(&mut list, failure, at(10));
        let record = Record {
            key: request.key.clone(),
            value: request.value.clone(),
            headers: list,
            ..self.record("dlq", 0, at(10))
        };
        self.seen.dlq.push(record);
    }

    fn cancel_unknown(&mut self) {
        let unknown = JobId::new(at(0), 0, 999);
        self.send("unknown", 0, 0, Intent::Cancel(unknown));
        self.answer(v1::Outcome::Unknown, None, "");
    }

    fn report(&self) -> Report {
        check(&self.sent, &topics(), &self.seen)
    }

    /// The record of a job in its application's topic.
    fn sent(&mut self, name: &str) -> &mut Record {
        let id = self.ids[name].0.to_string();
        let mut records = self.seen.apps.iter_mut();
        records
            .find(|record| header(record, headers::JOB_ID) == Some(id.as_bytes()))
            .unwrap()
    }

    /// Changes the newest record of a job in the state topic.
    fn newest(&mut self, name: &str, change: impl FnOnce(&mut v1::JobRecord)) {
        let id = self.ids[name].0.to_string();
        let mut records = self.seen.state.iter_mut().rev();
        let record = records
            .find(|record| record.key.as_deref() == Some(id.as_bytes()))
            .unwrap();
        let mut job = v1::JobRecord::decode(record.value.clone().unwrap()).unwrap();
        change(&mut job);
        record.value = Some(job.encode_to_vec().into());
    }

    fn change_answer(&mut self, outcome: v1::Outcome, change: impl FnOnce(&mut v1::CommandOutcome)) {
        for record in &mut self.seen.answers {
            let mut answer = v1::CommandOutcome::decode(record.value.clone().unwrap()).unwrap();
            if answer.outcome() == outcome {
                change(&mut answer);
                record.value = Some(answer.encode_to_vec().into());
                return;
            }
        }
        panic!("no answer is {outcome:?}");
    }
}

/// Plants a defect, for which the oracle must report these kinds and no others.
#[track_caller]
fn finds(kinds: &[DefectKind], plant: impl FnOnce(&mut World)) {
    let mut world = World::new();
    plant(&mut world);
    let report = world.report();
    let mut found: Vec<DefectKind> = report.defects.iter().map(|defect| defect.kind).collect();
    found.sort_unstable();
    found.dedup();
    assert_eq!(found, kinds, "{report}");
    assert!(report.waiting.is_empty(), "{report}");
}

#[track_caller]
fn is_waiting(reason: &str, plant: impl FnOnce(&mut World)) {
    let mut world = World::new();
    plant(&mut world);
    let report = world.report();
    assert!(!report.is_clean(), "{report}");
    assert!(
        report.waiting.iter().any(|what| what.contains(reason)),
        "{report}"
    );
}

#[test]
fn correct_topics_are_clean() {
    let report = World::new().report();
    assert!(report.is_clean(), "{report}");
    let Report {
        jobs,
        dispatched,
        cancelled,
        expired,
        refused,
        without_room,
        gone,
        conflicts,
        duplicates,
        forwarded,
        rescheduled,
        replaced,
        answers,
        ..
    } = report;
    assert_eq!((jobs, dispatched, cancelled, expired, gone), (9, 6, 2, 1, 0));
    assert_eq!((refused, without_room, conflicts, duplicates), (1, 1, 1, 2));
    assert_eq!((forwarded, rescheduled, replaced, answers), (1, 1, 3, 21));
}

#[test]
fn missing_records_are_found() {
    finds(&[Lost], |world| drop(world.seen.apps.remove(0)));
    // Without the request, its other records belong to nothing.
    finds(&[Lost, Foreign, Contradiction], |world| {
        world.seen.ingest.remove(0);
    });
    finds(&[Lost], |world| {
        let id = world.ids["keyed"].0;
        let forgotten = Record {
            key: Some(id.to_string().into()),
            ..world.record("state", id.shard(), at(2000))
        };
        world.seen.state.push(forgotten);
    });
    // Without a key, it was forgotten at its end in a full Redis.
    finds(&[], |world| {
        let id = world.ids["sent"].0;
        let forgotten = Record {
            key: Some(id.to_string().into()),
            ..world.record("state", id.shard(), at(2000))
        };
        world.seen.state.push(forgotten);
    });
    is_waiting("is not answered", |world| drop(world.seen.answers.remove(1)));
    is_waiting("has no dead letter", |world| drop(world.seen.dlq.remove(0)));
    is_waiting("is in a wrong partition", |world| {
        let name = world
            .seen
            .ingest
            .iter()
            .rposition(|record| record.timestamp == Some(at(7)));
        world.seen.ingest.remove(name.unwrap());
    });
    is_waiting("is not decided", |world| {
        let id = world.ids["sent"].0.to_string();
        world
            .seen
            .state
            .retain(|record| record.key.as_deref() != Some(id.as_bytes()));
        world.seen.apps.remove(0);
    });
    is_waiting(", due ", |world| drop(world.seen.state.remove(1)));
}

#[test]
fn duplicate_records_are_found() {
    finds(&[Double], |world| {
        let again = Record {
            position: Position {
                offset: 99,
                ..world.sent("sent").position.clone()
            },
            ..world.sent("sent").clone()
        };
        world.seen.apps.push(again);
    });
    finds(&[Double], |world| {
        let again = world.seen.state[1].clone();
        world.seen.state.push(again);
    });
    finds(&[Double], |world| {
        let again = world.seen.answers[0].clone();
        world.seen.answers.push(again);
    });
    finds(&[Double], |world| {
        let again = world.seen.dlq[0].clone();
        world.seen.dlq.push(again);
    });
    finds(&[Double], |world| {
        let mut again = world.seen.ingest.last().unwrap().clone();
        again.position.offset += 1;
        world.seen.ingest.push(again);
    });
}

#[test]
fn early_records_are_found() {
    finds(&[Early], |world| world.sent("sent").timestamp = Some(at(999)));
    // All records have the same time of dispatch, which is too early.
    finds(&[Early, Contradiction], |world| {
        world.newest("keyed", |job| job.ended_ms = Some(at(999).as_millis()));
        let text = at(999).to_string();
        let record = world.sent("keyed");
        let list: Vec<(String, Option<Vec<u8>>)> = record
            .headers
            .iter()
            .map(|(name, value)| (name.to_owned(), value.map(<[u8]>::to_vec)))
            .collect();
        let changed = list.iter().map(|(name, value)| {
            let value = value.as_deref();
            let is_it = name == headers::DISPATCHED_AT;
            (name.as_str(), if is_it { Some(text.as_bytes()) } else { value })
        });
        record.headers = changed.collect();
    });
}

#[test]
fn altered_records_are_found() {
    let altered = &[Altered];
    finds(altered, |world| {
        world.sent("sent").value = Some(Bytes::from_static(b"value of sent "));
    });
    finds(altered, |world| world.sent("sent").headers.push("one-more", None));
    finds(altered, |world| {
        world.sent("sent").headers = world
            .sent("sent")
            .headers
            .filtered(|name| name != headers::JOB_PRIORITY);
    });
    finds(altered, |world| world.sent("sent").position.partition += 1);
    finds(altered, |world| {
        world.sent("sent").position.topic = "elsewhere".into();
    });
    finds(altered, |world| world.sent("sent").key = None);
    finds(altered, |world| world.newest("moved", |job| job.due_ms += 1));
    finds(altered, |world| world.seen.dlq[1].value = None);
    finds(altered, |world| {
        world.change_answer(v1::Outcome::Rejected, |answer| answer.reason.clear());
    });
    finds(altered, |world| {
        world.change_answer(v1::Outcome::Rescheduled, |answer| {
            answer.job.as_mut().unwrap().scheduled_time = Some(to_timestamp(at(5001)));
        });
    });
    finds(altered, |world| {
        world.change_answer(v1::Outcome::Duplicate, |answer| {
            answer.job.as_mut().unwrap().id.clear();
        });
    });
    finds(altered, |world| {
        world.change_answer(v1::Outcome::AlreadyDispatched, |answer| {
            answer.job.as_mut().unwrap().ended_at = None;
        });
    });
    // The reason names another field.
    finds(altered, |world| {
        let refused = world.sent.iter_mut().find_map(|sent| match &mut sent.intent {
            Intent::Refused { says, .. } => Some(says),
            _ => None,
        });
        "appName".clone_into(refused.unwrap());
    });
}

#[test]
fn records_without_a_request_are_found() {
    finds(&[Foreign], |world| {
        let id = JobId::new(at(0), 0, 77).to_string();
        let record = world.seen.state[0].clone();
        world.seen.state.push(Record {
            key: Some(id.into()),
            position: Position {
                partition: 0,
                ..record.position.clone()
            },
            ..record
        });
    });
    finds(&[Foreign], |world| {
        let record = world.record("jobs", 0, at(0));
        world.seen.apps.push(record);
    });
    finds(&[Foreign], |world| {
        let mut record = world.seen.answers[0].clone();
        record.key = Some("somebody".into());
        world.seen.answers.push(record);
    });
    finds(&[Foreign], |world| {
        let failure = Failure::malformed("request.json", "no");
        let request = world.seen.ingest[0].clone();
        world.dead_letter(&request, &failure);
    });
}

#[test]
fn contradictions_are_found() {
    let contradiction = &[Contradiction];
    // Cancelled and dispatched.
    finds(contradiction, |world| {
        let id = world.ids["moved"].0.to_string();
        let mut record = world.sent("sent").clone();
        record.headers.push_text("unlike", "the first");
        let list = record.headers.filtered(|name| name != headers::JOB_ID);
        record.headers = list;
        record.headers.push_text(headers::JOB_ID, &id);
        world.seen.apps.push(record);
    });
    // Dispatched, but answered as cancelled.
    finds(contradiction, |world| {
        world.change_answer(v1::Outcome::AlreadyDispatched, |answer| {
            answer.set_outcome(v1::Outcome::Cancelled);
        });
    });
    finds(contradiction, |world| {
        world.change_answer(v1::Outcome::Cancelled, |answer| {
            answer.set_outcome(v1::Outcome::AlreadyDispatched);
        });
    });
    // Cancelled without a command.
    finds(&[Contradiction], |world| {
        world.newest("expired", |job| job.set_state(v1::JobState::Cancelled));
    });
    // Expired too soon.
    finds(contradiction, |world| {
        world.newest("expired", |job| job.ended_ms = Some(at(2000).as_millis()));
    });
    // Rescheduled without a command.
    finds(&[Contradiction], |world| {
        world.newest("expired", |job| job.revision = 2);
    });
    // A duplicate that is answered as accepted.
    finds(contradiction, |world| {
        world.change_answer(v1::Outcome::Duplicate, |answer| {
            answer.set_outcome(v1::Outcome::Scheduled);
        });
    });
}

#[test]
fn dispatched_replaced_jobs_are_found() {
    // The previous content.
    finds(&[Altered], |world| {
        world.sent("fourth").value = Some(Bytes::from_static(b"value of third"));
    });
    // The previous due time.
    finds(&[Early], |world| world.sent("fourth").timestamp = Some(at(6_001)));
    // The job that was to end.
    finds(&[Contradiction], |world| {
        let id = world.ids["debounced"].0.to_string();
        let mut record = world.sent("third").clone();
        record.headers = record.headers.filtered(|name| name != headers::JOB_ID);
        record.headers.push_text(headers::JOB_ID, &id);
        world.seen.apps.push(record);
    });
    // The replacement was answered, and had no effect.
    is_waiting("is not decided", |world| {
        world.newest("fourth", |job| job.revision = 1);
    });
    // A waiting job was not ended, but the answer claims that it was replaced.
    finds(&[Lost, Contradiction], |world| {
        world.newest("debounced", |job| job.set_state(v1::JobState::Dispatched));
    });
    finds(&[Contradiction], |world| {
        world.change_answer(v1::Outcome::Replaced, |answer| {
            answer.set_outcome(v1::Outcome::Scheduled);
        });
    });
    finds(&[Altered], |world| {
        world.change_answer(v1::Outcome::Replaced, |answer| {
            answer.job.as_mut().unwrap().revision = 1;
        });
    });
}
