//! Long waits and other records of pipelines.

use super::*;

#[test]
fn forwarded_delay_counts_from_first_record() {
    let mut first = World::with(Settings {
        partitions: 2,
        ..settings()
    });
    // Some of these keys belong to the other shard.
    for key in 0..8_u8 {
        let spec = v1::JobSpec {
            idempotency_key: Some(key.to_string()),
            ..spec("app", after(HumanDuration::from_secs(60)))
        };
        first.send_job(spec);
    }
    let written = first.now;
    first.run(&Step::AdvanceClock(30_000));
    let writes = first.shard.finish(first.now, records(100));
    let forwarded: Vec<Output> = writes
        .outputs
        .into_iter()
        .filter(|output| &*output.topic == "ingest")
        .collect();
    assert!(!forwarded.is_empty());
    let mut shard = Shard::new(first.settings.clone(), 1);
    let now = first.now.after(Duration::from_secs(5));
    shard.handle_response(IndexResponse::Ready { end: 0 }, now);
    for (offset, output) in (0..).zip(forwarded) {
        assert_eq!(output.partition, Some(1));
        let record = Record {
            position: Position {
                topic: output.topic,
                partition: 1,
                offset,
            },
            timestamp: Some(now),
            key: output.key,
            value: output.value,
            headers: output.headers,
            unreadable_headers: 0,
        };
        shard.accept(record, now);
    }
    let requests = shard.index_requests(now);
    let keys = requests.iter().find_map(|request| match request {
        IndexRequest::LookUp(keys) => Some(keys.len()),
        _ => None,
    });
    let nothing = vec![Found::default(); keys.unwrap()];
    shard.handle_response(IndexResponse::LookedUp(nothing), now);
    let due: HashSet<i64> = shard
        .finish(now, records(100))
        .outputs
        .into_iter()
        .filter(|output| &*output.topic == "state")
        .map(|output| v1::JobRecord::decode(output.value.unwrap()).unwrap().due_ms)
        .collect();
    assert_eq!(
        due,
        HashSet::from([written.after(Duration::from_secs(60)).as_millis()])
    );
}

/// One pipeline that is configured, and one that only other processes know, as while a change of the configuration is rolled out.
const PIPELINES: [&str; 2] = ["docs", "mail"];

#[test]
fn rejected_long_wait_becomes_dead_letter() {
    for pipeline in PIPELINES {
        let mut world = World::new();
        let mut lineage = Headers::new();
        lineage.push("tenant", Some(b"a"));
        let origin = Origin {
            topic: pipeline.into(),
            partition: 3,
            offset: 7,
            timestamp: None,
        };
        headers::write_lineage(&mut lineage, pipeline, &origin, 2);
        let far = world.now.after(Duration::from_secs(86_400 * 366));
        world.send(ProtoCommand::LongWait(v1::LongWait {
            pipeline: pipeline.to_owned(),
            due: Some(to_timestamp(far)),
            key: Some(Bytes::from_static(b"key")),
            value: Some(Bytes::from_static(b"document")),
            headers: to_headers(&lineage),
        }));
        world.turn(50, false);
        assert_eq!(world.answers["0"].outcome(), v1::Outcome::Rejected);
        let [dead] = &world.dead_long_waits[..] else {
            panic!("{:?}", world.dead_long_waits)
        };
        assert_eq!(*dead.topic, format!("{pipeline}-dlq"));
        assert_eq!(
            (dead.key.as_deref(), dead.value.as_deref()),
            (Some(&b"key"[..]), Some(&b"document"[..]))
        );
        let before = dead.headers.filtered(|name| !name.starts_with("error-"));
        assert_eq!(before, lineage);
        let code = dead.headers.last(headers::ERROR_CODE).unwrap();
        assert_eq!(code, b"request.due");
        assert_eq!(world.settings.dead_letter_code(dead), Some("request.due"));
    }
}

#[test]
fn long_wait_needs_dead_letter_topic() {
    PIPELINES.into_iter().for_each(wait_for_dead_letter_topic);
}

fn wait_for_dead_letter_topic(pipeline: &str) {
    let mut world = World::new();
    let dead_letters = format!("{pipeline}-dlq");
    let reason = Unwritable::NoLeader;
    let lasting = Duration::from_secs(600);
    world
        .topics
        .set_of(&dead_letters, Presence::Unwritable { reason, lasting });
    let wait = |due: Timestamp| {
        ProtoCommand::LongWait(v1::LongWait {
            pipeline: pipeline.to_owned(),
            due: Some(to_timestamp(due)),
            value: Some(Bytes::from_static(b"document")),
            ..v1::LongWait::default()
        })
    };
    // One is rejected, one is due at once, and one later.
    for ahead in [86_400 * 366, 0, 1] {
        world.send(wait(world.now.after(Duration::from_secs(ahead))));
    }
    let job = world.schedule("app", 0, None);
    for _ in 0..100 {
        world.run(&Step::AdvanceClock(20));
        world.turn(50, false);
        world.serve_index();
    }
    assert!(world.was_dispatched(job));
    let ended = |world: &World| (world.returned_waits.len(), world.dead_long_waits.len());
    assert_eq!((ended(&world), world.completed.contains(&0)), ((0, 0), false));
    assert_eq!(world.completed.len(), 3);
    // Another owner reads what is not completed again.
    world.restart();
    world.settle();
    assert_eq!(ended(&world), (0, 0));
    world.topics.set_of(&dead_letters, Presence::Exists);
    world.settle();
    assert_eq!((ended(&world), world.completed.len()), ((2, 1), 4));
}

#[test]
fn long_wait_ignores_commands() {
    let mut world = World::new();
    let due = world.now.after(Duration::from_secs(2));
    world.send(ProtoCommand::LongWait(v1::LongWait {
        pipeline: "docs".to_owned(),
        due: Some(to_timestamp(due)),
        value: Some(Bytes::from_static(b"document")),
        ..v1::LongWait::default()
    }));
    world.turn(50, false);
    world.run(&Step::Cancel(0));
    world.run(&Step::Reschedule(0, 1));
    world.settle();
    let outcomes = ["1", "2"].map(|offset| world.answers[offset].outcome());
    assert_eq!(outcomes, [v1::Outcome::Unknown; 2]);
    let [(value, at)] = &world.returned_waits[..] else {
        panic!("{:?}", world.returned_waits)
    };
    assert_eq!(value.as_deref(), Some(&b"document"[..]));
    assert!(*at >= due, "{at} is before {due}");
}

#[test]
fn long_wait_ends_in_named_topic() {
    let mut world = World::new();
    // The topic that was configured when the wait began does not matter, even if it is missing.
    let missing = Presence::Missing {
        lasting: Duration::from_secs(3_600),
    };
    world.topics.set(missing);
    let payload = |named: &str| Payload {
        headers: [(headers::RETURN_TOPIC, Some(named.as_bytes()))]
            .into_iter()
            .collect(),
        ..Payload::default()
    };
    for (named, expected) in [
        ("docs-retry-due", "docs-retry-due"),
        ("docs", "docs"),
        (GONE, "docs-retry-due"),
        ("payments", "docs-retry-due"),
    ] {
        let job = Job {
            kind: Kind::LongWait,
            app: "docs".into(),
            // The return topic when the wait began.
            topic: GONE.into(),
            payload: payload(named),
            ..Job::for_tests(0)
        };
        world.shard.window.insert(Arc::new(job));
        let writes = world.shard.finish(world.now, records(10));
        let output = writes.outputs.first().unwrap_or_else(|| panic!("{named}"));
        assert_eq!(&*output.topic, expected, "{named}");
        assert_eq!(
            output.headers.last(headers::RETURN_TOPIC),
            Some(expected.as_bytes())
        );
    }
}

#[test]
fn refused_record_becomes_dead_letter() {
    let settings = settings();
    let now = Timestamp::from_millis(START);
    let failure = Failure::permanent("output.too-large", "no");
    let output = |topic: &str, headers: Headers| Output {
        topic: topic.into(),
        partition: None,
        key: Some("k".into()),
        value: Some("v".into()),
        headers,
    };
    let text = |letter: &Output, name: &str| {
        let value = letter.headers.single(name).unwrap().flatten();
        value.map(|value| std::str::from_utf8(value).unwrap().to_owned())
    };

    // The topic of a job: its id contains the position of the request.
    let mut headers = Headers::new();
    headers.push_text("tenant", "a");
    let id = JobId::new(now, 3, 44);
    headers.push_text(headers::JOB_ID, &id.to_string());
    let mut letter = output(APP, headers);
    let replace = |output: &mut Output| refused::replace(&settings, output, &failure, now);
    assert_eq!(replace(&mut letter), Replacement::OfJob(id));
    assert_eq!(
        (&*letter.topic, letter.value.as_deref()),
        ("dlq", Some(&b"v"[..]))
    );
    assert_eq!(text(&letter, headers::ORIGINAL_TOPIC).as_deref(), Some("ingest"));
    assert_eq!(text(&letter, headers::ORIGINAL_PARTITION).as_deref(), Some("3"));
    assert_eq!(text(&letter, headers::ORIGINAL_OFFSET).as_deref(), Some("44"));
    assert_eq!(text(&letter, headers::PIPELINE).as_deref(), Some("scheduler"));
    assert_eq!(
        text(&letter, headers::ERROR_CODE).as_deref(),
        Some("output.too-large")
    );
    assert_eq!(text(&letter, "tenant").as_deref(), Some("a"));
    // A refused dead letter is stripped of its value.
    assert_eq!(replace(&mut letter), Replacement::DeadLetter);
    assert_eq!((&*letter.topic, &letter.value), ("dlq", &None));

    // The return topic of a long wait.
    for pipeline in PIPELINES {
        let origin = Origin {
            topic: pipeline.into(),
            partition: 1,
            offset: 7,
            timestamp: None,
        };
        let mut lineage = Headers::new();
        headers::write_lineage(&mut lineage, pipeline, &origin, 2);
        // A header of a user.
        lineage.push_text(headers::JOB_ID, &id.to_string());
        let mut letter = output(&format!("{pipeline}-retry-due"), lineage);
        let dead_letters = format!("{pipeline}-dlq");
        assert_eq!(replace(&mut letter), Replacement::DeadLetter);
        assert_eq!(
            (&*letter.topic, letter.value.as_deref()),
            (&*dead_letters, Some(&b"v"[..]))
        );
        assert_eq!(text(&letter, headers::ORIGINAL_OFFSET).as_deref(), Some("7"));
        assert_eq!(text(&letter, headers::RETRY_COUNT).as_deref(), Some("2"));
        assert_eq!(replace(&mut letter), Replacement::DeadLetter);
        assert_eq!((&*letter.topic, &letter.value), (&*dead_letters, &None));
    }

    // A state record cannot be replaced.
    let mut state = output("state", Headers::new());
    assert_eq!(replace(&mut state), Replacement::Nothing);
}

#[test]
fn unknown_pipelines_wait_is_returned() {
    let mut world = World::new();
    world.topics.set_of(
        OTHER_RETURN_TOPIC,
        Presence::Missing {
            lasting: Duration::ZERO,
        },
    );
    let due = world.now.after(Duration::from_millis(300));
    world.send(ProtoCommand::LongWait(v1::LongWait {
        pipeline: "mail".to_owned(),
        due: Some(to_timestamp(due)),
        value: Some(Bytes::from_static(b"document")),
        ..v1::LongWait::default()
    }));
    world.advance(600);
    assert_eq!((world.returned_waits.len(), world.dead_long_waits.len()), (0, 0));
    world.topics.set_of(OTHER_RETURN_TOPIC, Presence::Exists);
    world.settle();
    let [(value, at)] = &world.returned_waits[..] else {
        panic!("{:?}", world.returned_waits)
    };
    assert_eq!(value.as_deref(), Some(&b"document"[..]));
    assert!(*at >= due, "{at} is before {due}");
}
