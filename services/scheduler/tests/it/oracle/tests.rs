//! The oracle finds what is planted in a world where all else is right.

use redeliver_core::{Failure, Span};
use redeliver_proto::convert::{to_headers, to_priority, to_timestamp};

use super::*;

const START: i64 = 1_763_722_800_000;
const PARTITIONS: i32 = 3;

fn topics() -> Topics {
    Topics {
        ingest: "ingest".into(),
        state: "state".into(),
        dlq: "dlq".into(),
        answers: "answers".into(),
        apps: [("app".to_owned(), "jobs".into())].into(),
        partitions: PARTITIONS,
    }
}

fn at(millis: i64) -> Timestamp {
    Timestamp::from_millis(START + millis)
}

fn wanted(name: &str) -> Wanted {
    Wanted {
        app: "app".to_owned(),
        when: When::After(Span::from_secs(1).duration()),
        priority: Priority::High,
        idempotency_key: None,
        request_id: None,
        key: Some(Bytes::from(format!("key of {name}"))),
        value: Bytes::from(format!("value of {name}")),
        headers: [("tenant", Some(&b"a"[..])), ("tenant", None)]
            .into_iter()
            .collect(),
        expire_after: None,
    }
}

/// All topics, as a scheduler without a fault leaves them.
struct World {
    asked: Vec<Asked>,
    seen: Seen,
    next: HashMap<(Arc<str>, i32), i64>,
    ids: HashMap<String, (JobId, Wanted, Timestamp)>,
}

impl World {
    /// A job that was dispatched, one that was moved and then cancelled, one that expired, a duplicate, a conflict,
    /// a request in a wrong partition, one that cannot be accepted; cancellations that came too late or for nobody.
    fn new() -> Self {
        let mut world = Self {
            asked: Vec::new(),
            seen: Seen::default(),
            next: HashMap::new(),
            ids: HashMap::new(),
        };
        world.schedule("sent", wanted("sent"));
        world.dispatch("sent", 1000, 1003);
        world.late_cancel("sent");

        world.schedule("moved", wanted("moved"));
        world.reschedule("moved", 5000);
        world.cancel("moved", 2000);
        world.cancel_again("moved");

        let short = Wanted {
            expire_after: Some(Duration::from_secs(1)),
            ..wanted("expired")
        };
        world.schedule("expired", short);
        world.expire("expired", 2001);

        let keyed = Wanted {
            idempotency_key: Some("k".to_owned()),
            ..wanted("keyed")
        };
        world.schedule("keyed", keyed.clone());
        world.dispatch("keyed", 1000, 1001);
        let again = Wanted {
            request_id: Some("another name".to_owned()),
            ..keyed.clone()
        };
        world.already("keyed", again, v1::Outcome::Duplicate);
        let other = Wanted {
            value: Bytes::from_static(b"other"),
            ..keyed
        };
        world.already("keyed", other, v1::Outcome::Conflict);

        let astray = Wanted {
            idempotency_key: Some("astray".to_owned()),
            ..wanted("astray")
        };
        world.schedule("astray", astray);
        world.dispatch("astray", 1000, 1001);

        world.refuse();
        world.cancel_nobody();
        world
    }

    fn place(&mut self, topic: &str, partition: i32) -> Position {
        let topic: Arc<str> = topic.into();
        let next = self.next.entry((topic.clone(), partition)).or_default();
        let offset = *next;
        // As if each record were followed by the marker of its transaction.
        *next += 2;
        Position {
            topic,
            partition,
            offset,
        }
    }

    fn record(&mut self, topic: &str, partition: i32, time: Timestamp) -> Record {
        Record {
            position: self.place(topic, partition),
            timestamp: Some(time),
            key: None,
            value: None,
            headers: Headers::new(),
            unreadable_headers: 0,
        }
    }

    /// Writes a request, and again where it belongs if that is another partition; gives its place there.
    fn ask(&mut self, name: &str, partition: i32, home: i32, wish: Wish) -> Record {
        let record = Record {
            key: Some(Bytes::from_static(b"request")),
            value: Some(Bytes::from(format!("request {name} {}", self.asked.len()))),
            headers: [(headers::TRACEPARENT, Some(&b"00-trace"[..]))]
                .into_iter()
                .collect(),
            ..self.record("ingest", partition, at(0))
        };
        self.asked.push(Asked {
            place: record.position.clone(),
            at: at(0),
            key: record.key.clone(),
            value: record.value.clone(),
            headers: record.headers.clone(),
            wish,
            answer_to: Some(format!("{name} {}", self.asked.len())),
        });
        self.seen.ingest.push(record.clone());
        if home == partition {
            return record;
        }
        let passed_on = Record {
            position: self.place("ingest", home),
            timestamp: Some(at(7)),
            headers: passed_on_headers(self.asked.last().unwrap()),
            ..record
        };
        self.seen.ingest.push(passed_on.clone());
        passed_on
    }

    fn answer(&mut self, outcome: v1::Outcome, job: Option<v1::Job>, reason: &str) {
        let answer = v1::CommandOutcome {
            code: String::new(),
            outcome: outcome.into(),
            job,
            reason: reason.to_owned(),
        };
        let name = self.asked.last().unwrap().answer_to.clone().unwrap();
        let record = Record {
            key: Some(name.into()),
            value: Some(answer.encode_to_vec().into()),
            ..self.record("answers", 0, at(9))
        };
        self.seen.answers.push(record);
    }

    fn schedule(&mut self, name: &str, wanted: Wanted) {
        let key = wanted.idempotency_key.as_deref();
        let home = key.map_or(1, |key| shard_of("app", key, PARTITIONS));
        let partition = if name == "astray" {
            (home + 1) % PARTITIONS
        } else {
            home
        };
        let wish = Wish::Job(Box::new(wanted.clone()));
        let request = self.ask(name, partition, home, wish);
        let requested = request.timestamp.unwrap();
        let id = JobId::new(requested, home, request.position.offset);
        let due = wanted.when.due(at(0));
        let shown = v1::Job {
            id: id.to_string(),
            scheduled_time: Some(to_timestamp(due)),
            ..v1::Job::default()
        };
        self.answer(v1::Outcome::Scheduled, Some(shown), "");
        self.ids.insert(name.to_owned(), (id, wanted, due));
        self.state(name, v1::JobState::Scheduled, 1, None);
    }

    fn state(&mut self, name: &str, state: v1::JobState, revision: u32, ended: Option<Timestamp>) {
        let (id, wanted, due) = self.ids[name].clone();
        let waits = state == v1::JobState::Scheduled;
        let mut list = wanted.headers.clone();
        list.push_text(headers::TRACEPARENT, "00-trace");
        let job = v1::JobRecord {
            app: wanted.app.clone(),
            state: state.into(),
            priority: to_priority(wanted.priority).into(),
            due_ms: due.as_millis(),
            accepted_ms: at(8).as_millis(),
            revision,
            idempotency_key: wanted.idempotency_key.clone().unwrap_or_default(),
            request_id: wanted.request_id.clone().unwrap_or_default(),
            data: waits.then(|| wanted.value.clone()),
            key: wanted.key.clone().filter(|_| waits),
            headers: if waits { to_headers(&list) } else { Vec::new() },
            topic: "jobs".to_owned(),
            ended_ms: ended.map(Timestamp::as_millis),
            expires_ms: wanted.expire_after.map(|span| due.after(span).as_millis()),
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
        let (id, wanted, planned) = self.ids[name].clone();
        assert!(planned >= at(due), "the world is wrong itself");
        let now = planned.after(Duration::from_millis(1));
        let mut list = wanted.headers.clone();
        list.push_text(headers::TRACEPARENT, "00-trace");
        for (name, value) in [
            (headers::JOB_ID, id.to_string()),
            (headers::JOB_APP, wanted.app.clone()),
            (headers::SCHEDULED_TIME, planned.to_string()),
            (headers::DISPATCHED_AT, now.to_string()),
            (headers::JOB_PRIORITY, wanted.priority.to_string()),
        ] {
            list.push_text(name, &value);
        }
        if let Some(key) = &wanted.idempotency_key {
            list.push_text(headers::IDEMPOTENCY_KEY, key);
        }
        let partition = partition_for_key(wanted.key.as_deref().unwrap(), PARTITIONS);
        let record = Record {
            key: wanted.key.clone(),
            value: Some(wanted.value.clone()),
            headers: list,
            ..self.record("jobs", partition, at(written + 7))
        };
        self.seen.apps.push(record);
        self.state(name, v1::JobState::Dispatched, 1, Some(now));
    }

    fn command(&mut self, name: &str, wish: impl FnOnce(JobId) -> Wish) {
        let id = self.ids[name].0;
        self.ask(name, id.shard(), id.shard(), wish(id));
    }

    fn ended(&self, name: &str, state: v1::JobState, ended: Timestamp) -> Option<v1::Job> {
        Some(v1::Job {
            id: self.ids[name].0.to_string(),
            state: state.into(),
            ended_at: Some(to_timestamp(ended)),
            ..v1::Job::default()
        })
    }

    fn late_cancel(&mut self, name: &str) {
        self.command(name, Wish::Cancel);
        let ended = self.ids[name].2.after(Duration::from_millis(1));
        let shown = self.ended(name, v1::JobState::Dispatched, ended);
        self.answer(v1::Outcome::AlreadyDispatched, shown, "");
    }

    fn reschedule(&mut self, name: &str, due: i64) {
        self.command(name, |id| Wish::Reschedule(id, When::At(at(due))));
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
        self.command(name, Wish::Cancel);
        let shown = self.ended(name, v1::JobState::Cancelled, at(now));
        self.answer(v1::Outcome::Cancelled, shown, "");
        self.state(name, v1::JobState::Cancelled, 2, Some(at(now)));
    }

    fn cancel_again(&mut self, name: &str) {
        self.command(name, Wish::Cancel);
        let shown = self.ended(name, v1::JobState::Cancelled, at(2000));
        self.answer(v1::Outcome::AlreadyCancelled, shown, "");
    }

    fn expire(&mut self, name: &str, now: i64) {
        self.state(name, v1::JobState::Expired, 1, Some(at(now)));
    }

    fn already(&mut self, name: &str, wanted: Wanted, outcome: v1::Outcome) {
        let home = self.ids[name].0.shard();
        let request = self.ask(name, home, home, Wish::Job(Box::new(wanted)));
        let shown = v1::Job {
            id: self.ids[name].0.to_string(),
            ..v1::Job::default()
        };
        self.answer(outcome, Some(shown), "");
        if outcome == v1::Outcome::Conflict {
            let failure = Failure::permanent("request.conflict", "idempotencyKey is taken");
            self.dead_letter(&request, &failure);
        }
    }

    fn refuse(&mut self) {
        let failure = Failure::malformed("request.jobData", "`jobData` is missing");
        let wish = Wish::Refused {
            code: failure.code.to_string(),
            says: "jobData".to_owned(),
        };
        let request = self.ask("refused", 2, 2, wish);
        self.answer(v1::Outcome::Rejected, None, &failure.message);
        self.dead_letter(&request, &failure);
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

    fn cancel_nobody(&mut self) {
        let nobody = JobId::new(at(0), 0, 999);
        self.ask("nobody", 0, 0, Wish::Cancel(nobody));
        self.answer(v1::Outcome::Unknown, None, "");
    }

    fn judged(&self) -> Verdict {
        judge(&self.asked, &topics(), &self.seen)
    }

    /// The record of a job in its application's topic.
    fn sent(&mut self, name: &str) -> &mut Record {
        let id = self.ids[name].0.to_string();
        let mut records = self.seen.apps.iter_mut();
        records
            .find(|record| header(record, headers::JOB_ID) == Some(id.as_bytes()))
            .unwrap()
    }

    /// The newest record of a job in the state topic, to be changed.
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
        panic!("nobody was told {outcome:?}");
    }
}

/// Plants something, of which the oracle must find faults of this kind and, unless more is given, of no other.
#[track_caller]
fn finds(kinds: &[Kind], plant: impl FnOnce(&mut World)) {
    let mut world = World::new();
    plant(&mut world);
    let verdict = world.judged();
    let mut found: Vec<Kind> = verdict.faults.iter().map(|fault| fault.kind).collect();
    found.sort_unstable();
    found.dedup();
    assert_eq!(found, kinds, "{verdict}");
    assert!(verdict.waiting.is_empty(), "{verdict}");
}

#[track_caller]
fn waits_for(words: &str, plant: impl FnOnce(&mut World)) {
    let mut world = World::new();
    plant(&mut world);
    let verdict = world.judged();
    assert!(!verdict.is_clean(), "{verdict}");
    assert!(
        verdict.waiting.iter().any(|what| what.contains(words)),
        "{verdict}"
    );
}

#[test]
fn a_world_without_a_fault_is_clean() {
    let verdict = World::new().judged();
    assert!(verdict.is_clean(), "{verdict}");
    let Verdict {
        jobs,
        dispatched,
        cancelled,
        expired,
        refused,
        conflicts,
        duplicates,
        forwarded,
        rescheduled,
        answers,
        ..
    } = verdict;
    assert_eq!((jobs, dispatched, cancelled, expired), (5, 3, 1, 1));
    assert_eq!((refused, conflicts, duplicates), (1, 1, 1));
    assert_eq!((forwarded, rescheduled, answers), (1, 1, 13));
}

#[test]
fn what_is_lost_is_found() {
    finds(&[Kind::Lost], |world| drop(world.seen.apps.remove(0)));
    // Nobody knows any more whose the rest is.
    finds(&[Kind::Lost, Kind::Foreign, Kind::Contradiction], |world| {
        world.seen.ingest.remove(0);
    });
    finds(&[Kind::Lost], |world| {
        let id = world.ids["keyed"].0;
        let forgotten = Record {
            key: Some(id.to_string().into()),
            ..world.record("state", id.shard(), at(2000))
        };
        world.seen.state.push(forgotten);
    });
    waits_for("is not answered", |world| drop(world.seen.answers.remove(1)));
    waits_for("is not dead yet", |world| drop(world.seen.dlq.pop()));
    waits_for("is in a wrong partition", |world| {
        let name = world
            .seen
            .ingest
            .iter()
            .rposition(|record| record.timestamp == Some(at(7)));
        world.seen.ingest.remove(name.unwrap());
    });
    waits_for("is not decided", |world| {
        let id = world.ids["sent"].0.to_string();
        world
            .seen
            .state
            .retain(|record| record.key.as_deref() != Some(id.as_bytes()));
        world.seen.apps.remove(0);
    });
    waits_for(", due ", |world| drop(world.seen.state.remove(1)));
}

#[test]
fn what_is_double_is_found() {
    finds(&[Kind::Double], |world| {
        let again = Record {
            position: Position {
                offset: 99,
                ..world.sent("sent").position.clone()
            },
            ..world.sent("sent").clone()
        };
        world.seen.apps.push(again);
    });
    finds(&[Kind::Double], |world| {
        let again = world.seen.state[1].clone();
        world.seen.state.push(again);
    });
    finds(&[Kind::Double], |world| {
        let again = world.seen.answers[0].clone();
        world.seen.answers.push(again);
    });
    finds(&[Kind::Double], |world| {
        let again = world.seen.dlq[0].clone();
        world.seen.dlq.push(again);
    });
    finds(&[Kind::Double], |world| {
        let mut again = world.seen.ingest.last().unwrap().clone();
        again.position.offset += 1;
        world.seen.ingest.push(again);
    });
}

#[test]
fn what_is_early_is_found() {
    finds(&[Kind::Early], |world| {
        world.sent("sent").timestamp = Some(at(999));
    });
    // All agree on a time of dispatch that is too early.
    finds(&[Kind::Early, Kind::Contradiction], |world| {
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
fn what_is_altered_is_found() {
    let altered = &[Kind::Altered];
    finds(altered, |world| {
        world.sent("sent").value = Some(Bytes::from_static(b"value of sent "));
    });
    finds(altered, |world| {
        world.sent("sent").headers.push("one-more", None);
    });
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
    finds(altered, |world| {
        world.newest("moved", |job| job.due_ms += 1);
    });
    finds(altered, |world| {
        world.newest("sent", |job| job.data = Some(Bytes::new()));
    });
    finds(altered, |world| {
        world.newest("sent", |job| job.idempotency_key = "k".to_owned());
    });
    finds(altered, |world| {
        world.seen.dlq[1].value = None;
    });
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
    // A reason that names another field.
    finds(altered, |world| {
        let refused = world.asked.iter_mut().find_map(|asked| match &mut asked.wish {
            Wish::Refused { says, .. } => Some(says),
            _ => None,
        });
        "appName".clone_into(refused.unwrap());
    });
}

#[test]
fn what_nobody_asked_for_is_found() {
    finds(&[Kind::Foreign], |world| {
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
    finds(&[Kind::Foreign], |world| {
        let record = world.record("jobs", 0, at(0));
        world.seen.apps.push(record);
    });
    finds(&[Kind::Foreign], |world| {
        let mut record = world.seen.answers[0].clone();
        record.key = Some("somebody".into());
        world.seen.answers.push(record);
    });
    finds(&[Kind::Foreign], |world| {
        let failure = Failure::malformed("request.json", "no");
        let request = world.seen.ingest[0].clone();
        world.dead_letter(&request, &failure);
    });
}

#[test]
fn stories_that_differ_are_found() {
    let contradiction = &[Kind::Contradiction];
    // Cancelled, and there.
    finds(contradiction, |world| {
        let id = world.ids["moved"].0.to_string();
        let mut record = world.sent("sent").clone();
        record.headers.push_text("unlike", "the first");
        let list = record.headers.filtered(|name| name != headers::JOB_ID);
        record.headers = list;
        record.headers.push_text(headers::JOB_ID, &id);
        world.seen.apps.push(record);
    });
    // There, and told that it is cancelled.
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
    // Cancelled by nobody.
    finds(&[Kind::Contradiction], |world| {
        world.newest("expired", |job| job.set_state(v1::JobState::Cancelled));
    });
    // Expired although it may be late.
    finds(contradiction, |world| {
        world.newest("expired", |job| job.ended_ms = Some(at(2000).as_millis()));
    });
    // Moved by nobody.
    finds(&[Kind::Contradiction], |world| {
        world.newest("expired", |job| job.revision = 2);
    });
    // Told of a duplicate, and accepted.
    finds(contradiction, |world| {
        world.change_answer(v1::Outcome::Duplicate, |answer| {
            answer.set_outcome(v1::Outcome::Scheduled);
        });
    });
}
