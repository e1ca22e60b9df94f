use std::time::Duration;

use bytes::Bytes;
use prometheus_client::registry::Registry;
use redeliver_core::headers::JOB_ID;
use redeliver_core::job::JobState;
use redeliver_core::{ClockLimits, Failure, GuardedClock, Headers, ManualClock, Position};
use redeliver_kafka::Waker;
use redeliver_runtime::health::Health;
use redeliver_service::control::value::Release;

use super::*;
use crate::codec;
use crate::controls::LiveAppStates;
use crate::index::memory::MemoryIndex;
use crate::index::{Change, Effect, Scan};
use crate::index_messages::IndexResponse;
use crate::metrics::SchedulerFamilies;
use crate::shard::tests::settings;
use crate::turns::SHORT_TURN;

const START: Timestamp = Timestamp::from_millis(1_763_722_800_000);
const HOUR: Duration = Duration::from_secs(3_600);
const CONFIRM: Duration = Duration::from_secs(10);

/// The processor of a lane with one shard whose index is up to date.
struct Bench {
    processor: Scheduler<MemoryIndex>,
    clock: Arc<ManualClock>,
    assignment: AssignmentId,
    offset: i64,
    /// The end of the state topic.
    end: i64,
    indexer: ShardIndexer<MemoryIndex>,
}

impl Bench {
    fn new() -> Self {
        Self::with(settings())
    }

    fn with(settings: Settings) -> Self {
        let clock = Arc::new(ManualClock::new(START));
        let limits = ClockLimits {
            max_step: Duration::from_secs(2),
            confirm: CONFIRM,
        };
        let (indexers, mut started) = mpsc::channel(1);
        let process = Arc::new(ProcessLimits::new());
        let partitions = settings.partitions;
        let mut processor = Scheduler {
            settings: Arc::new(Settings {
                window: CONFIRM,
                ..settings
            }),
            index: MemoryIndex::new(),
            kafka: KafkaSettings::new("localhost:1", "test"),
            clock: Arc::new(GuardedClock::new(clock.clone(), limits, Box::new(|_| {}))),
            metrics: SchedulerFamilies::register(&mut Registry::default(), clock.clone()).of("lane", "group"),
            indexers,
            responses: Arc::new(IndexResponses::new(Waker::new())),
            readiness: Arc::new(ShardReadiness::new(Health::new().part("shards"))),
            topic_changes: TopicChanges::new("ingest".into(), "state".into(), partitions, None),
            memory: MemoryShare::new(process.clone()),
            limits: process,
            lane: LaneShards::default(),
        };
        let assignment = AssignmentId::for_tests(0, 1);
        processor.assigned(assignment, &"ingest".into(), 0);
        processor
            .responses
            .push(assignment, IndexResponse::Ready { end: 0 });
        let mut bench = Self {
            processor,
            clock,
            assignment,
            offset: 0,
            end: 0,
            indexer: started.try_recv().unwrap(),
        };
        assert!(bench.turn().is_empty());
        assert!(bench.capacity() > 0);
        bench
    }

    fn capacity(&self) -> usize {
        self.processor.capacity(self.assignment)
    }

    /// A request with a delay, written at this time.
    fn schedule(&mut self, delay: &str, written: Timestamp) {
        let request = format!(r#"{{"appName":"app","delay":"{delay}","jobData":{{}}}}"#);
        let record = Record {
            timestamp: Some(written),
            ..command(0, self.offset, &request)
        };
        self.offset += 1;
        self.processor.accept(self.assignment, record, written);
        self.processor.accepted_all();
    }

    /// Applies what the shard has sent to the index.
    fn apply(&mut self) -> Vec<Change> {
        let mut changes = Vec::new();
        while let Ok(request) = self.indexer.requests.try_recv() {
            if let IndexRequest::Apply { turn, batch } = request {
                changes.extend(batch.changes);
                let forced = batch.force;
                let applied = IndexResponse::Applied { turn, forced };
                self.processor.responses.push(self.assignment, applied);
            }
        }
        changes
    }

    /// The topics of a turn and the due times of the jobs whose state it writes.
    fn turn(&mut self) -> Vec<(String, Option<Timestamp>)> {
        let now = self.clock.now();
        let mut turn = TransactionBatch::default();
        self.processor.finish(now, 100, &mut turn);
        let states = turn.outputs.iter().filter(|output| &*output.topic == "state");
        let states = i64::try_from(states.count()).unwrap();
        if states > 0 {
            self.end += states;
            self.processor.changelog_written(0, self.end).unwrap();
        }
        self.processor.committed(now);
        let outputs = turn.outputs.iter().map(|output| {
            let due = (&*output.topic == "state").then(|| {
                let id = std::str::from_utf8(output.key.as_deref().unwrap()).unwrap();
                let job = codec::decode(id.parse().unwrap(), output.value.as_ref().unwrap());
                job.unwrap().due
            });
            (output.topic.to_string(), due)
        });
        outputs.collect()
    }
}

#[test]
fn unconfirmed_step_dispatches_nothing() {
    for step_is_forward in [true, false] {
        let mut bench = Bench::new();
        bench.schedule("5s", START);
        let due = START.after(Duration::from_secs(5));
        assert_eq!(bench.turn(), [("state".to_owned(), Some(due))]);
        assert_eq!(bench.processor.next_due(), Some(due));
        // Due, but the lane has not got to it.
        bench.clock.advance(Duration::from_secs(5));
        bench.clock.set(if step_is_forward {
            due.after(HOUR)
        } else {
            Timestamp::from_millis(due.as_millis() - 3_600_000)
        });
        assert!(bench.turn().is_empty());
        assert_eq!((bench.capacity(), bench.processor.next_due()), (0, None));
        bench.clock.advance(CONFIRM - Duration::from_millis(1));
        assert!(bench.turn().is_empty());
        bench.clock.advance(Duration::from_millis(1));
        if !step_is_forward {
            assert!(bench.turn().is_empty(), "the job is due in an hour");
            assert_eq!(bench.processor.next_due(), Some(due));
            bench.clock.advance(HOUR - CONFIRM - Duration::from_millis(1));
            assert!(bench.turn().is_empty());
            bench.clock.advance(Duration::from_millis(1));
        }
        let topics: Vec<String> = bench.turn().into_iter().map(|(topic, _)| topic).collect();
        assert_eq!(topics, ["jobs", "state"]);
        assert!(bench.capacity() > 0);
    }
}

#[test]
fn delays_count_from_confirmed_times() {
    // A delay counts from the earlier one of the record's timestamp and the current time. During a hold, the current time is
    // not known: it is either the new time, or the previous one.
    for is_confirmed in [true, false] {
        let mut bench = Bench::new();
        let stepped = START.after(HOUR);
        // The lane has read the command before it notices that the clock was set.
        bench.clock.set(stepped);
        bench.schedule("60s", stepped);
        assert_eq!(bench.capacity(), 0);
        bench.schedule("2h", START);
        assert!(bench.turn().is_empty());
        if is_confirmed {
            bench.clock.advance(CONFIRM);
        } else {
            bench.clock.set(START);
        }
        let counts_from = if is_confirmed { stepped } else { START };
        let due = [counts_from.after(Duration::from_secs(60)), START.after(2 * HOUR)];
        assert_eq!(bench.turn(), due.map(|due| ("state".to_owned(), Some(due))));
        assert!(bench.capacity() > 0);
    }
}

#[test]
fn release_ends_at_a_transaction_marker() {
    let topic = TopicId::from_bits(7);
    let release = Release {
        topic,
        ends: vec![2],
        at: None,
    };
    let app_states = AppStates {
        released_waits: [("docs".into(), Arc::new(release))].into(),
        ..AppStates::default()
    };
    let mut bench = Bench::with(Settings {
        app_states: LiveAppStates::fixed(app_states),
        ..settings()
    });
    bench.processor.reads_topic(bench.assignment, Some(topic));
    let finishes = |bench: &mut Bench| {
        let mut finishes = false;
        for _ in 0..3 {
            bench.turn();
            while let Ok(request) = bench.indexer.requests.try_recv() {
                let response = match request {
                    IndexRequest::FinishedRelease(_) => IndexResponse::FinishedRelease(None),
                    IndexRequest::ScanWaits(_) => IndexResponse::ScannedWaits(Scan::default()),
                    IndexRequest::FinishRelease(..) => {
                        finishes = true;
                        IndexResponse::ReleaseFinished
                    }
                    IndexRequest::Apply { turn, batch } => {
                        let forced = batch.force;
                        IndexResponse::Applied { turn, forced }
                    }
                    _ => continue,
                };
                bench.processor.responses.push(bench.assignment, response);
            }
        }
        finishes
    };
    // One command and, behind it, the marker of its transaction. The clock steps before the command is decided.
    bench.clock.set(START.after(HOUR));
    bench.schedule("2h", START);
    bench.processor.reached_end(bench.assignment, 2);
    assert!(!finishes(&mut bench), "finished before the command is decided");
    bench.clock.advance(CONFIRM);
    assert!(finishes(&mut bench));
}

#[test]
fn dispatch_without_command_proves_ownership() {
    let mut bench = Bench::new();
    bench.schedule("5s", START);
    assert_eq!(bench.turn().len(), 1);
    bench.clock.advance(Duration::from_secs(5));
    // Nothing is completed, so only the position that is committed again proves to the broker who owns the partition.
    let mut turn = TransactionBatch::default();
    bench.processor.finish(bench.clock.now(), 100, &mut turn);
    let topics: Vec<&str> = turn.outputs.iter().map(|output| &*output.topic).collect();
    assert_eq!(topics, ["jobs", "state"]);
    assert_eq!((turn.completed, turn.owners), (vec![], vec![bench.assignment]));
}

#[test]
fn refused_job_is_not_dispatched() {
    let mut bench = Bench::new();
    for delay in ["0s", "1s"] {
        bench.schedule(delay, START);
    }
    assert_eq!(bench.turn().len(), 3, "the record of the first and both states");
    assert_eq!(bench.apply().len(), 2);
    bench.schedule("0s", START);
    bench.clock.advance(Duration::from_secs(1));
    let now = bench.clock.now();
    let mut turn = TransactionBatch::default();
    bench.processor.finish(now, 100, &mut turn);
    let state_of = |turn: &TransactionBatch, key: &str| {
        let mut states = turn.outputs.iter().filter(|output| &*output.topic == "state");
        let state = states.rfind(|output| output.key.as_deref() == Some(key.as_bytes()));
        codec::decode(key.parse().unwrap(), state.unwrap().value.as_ref().unwrap())
            .unwrap()
            .state
    };
    let jobs: Vec<usize> = (0..turn.outputs.len())
        .filter(|index| &*turn.outputs[*index].topic == "jobs")
        .collect();
    let ids = jobs.iter().map(|index| {
        let id = turn.outputs[*index].headers.last(JOB_ID);
        std::str::from_utf8(id.unwrap()).unwrap().to_owned()
    });
    let ids: Vec<String> = ids.collect();
    let refused = Refused {
        index: jobs[0],
        failure: Failure::permanent("output.too-large", "no"),
    };
    assert!(bench.processor.refused(&[refused], &mut turn, now));
    assert_eq!(&*turn.outputs[jobs[0]].topic, "dlq");
    assert_eq!(state_of(&turn, &ids[0]), JobState::Expired);
    assert_eq!(state_of(&turn, &ids[1]), JobState::Dispatched);
    let (_, tally) = &bench.processor.lane.turns.tallies[0];
    assert_eq!((tally.dispatched.len(), tally.dead), (1, 1));
    let dead_letters: Vec<(&str, u64)> = bench
        .processor
        .lane
        .turn_dead_letters
        .iter()
        .map(|(code, count)| (code.as_str(), *count))
        .collect();
    assert_eq!(dead_letters, [("output.too-large", 1)]);
    // The index gets the same record as the state topic.
    bench.processor.changelog_written(0, 10).unwrap();
    bench.processor.committed(now);
    let changes = bench.apply();
    let change = changes
        .iter()
        .rfind(|change| change.id.to_string() == ids[0])
        .unwrap();
    let Effect::Ended { record, .. } = &change.effect else {
        panic!("{change:?}")
    };
    assert_eq!(codec::decode(change.id, record).unwrap().state, JobState::Expired);
}

#[test]
fn full_memory_pauses_shards_with_commands() {
    let mut bench = Bench::new();
    let mut other_lane = MemoryShare::new(bench.processor.limits.clone());
    other_lane.set(1 << 30);
    assert!(bench.capacity() > 0);
    let record = command(0, 0, &"x".repeat(2 * MEGABYTE));
    bench.processor.accept(bench.assignment, record, START);
    bench.processor.accepted_all();
    assert_eq!(bench.capacity(), 0);
    other_lane.set(0);
    assert!(bench.capacity() > 0);
    other_lane.set(1 << 30);
    // The command becomes a dead letter, which frees its memory.
    assert_eq!(bench.turn(), [("dlq".to_owned(), None)]);
    assert!(bench.capacity() > 0);
}

const MEGABYTE: usize = 1_000_000;

/// A lane of live shards, each with this many invalid commands with this content.
fn lane(shards: u32, commands: i64, value: &Bytes, headers: &Headers) -> LaneShards {
    lane_with(settings(), shards, commands, value, headers)
}

fn lane_with(settings: Settings, shards: u32, commands: i64, value: &Bytes, headers: &Headers) -> LaneShards {
    let settings = Arc::new(settings);
    let mut lane = LaneShards::default();
    for slot in 0..shards {
        let number = i32::try_from(slot).unwrap();
        let mut shard = Shard::new(settings.clone(), number);
        shard.handle_response(IndexResponse::Ready { end: 0 }, START);
        for offset in 0..commands {
            let record = Record {
                value: Some(value.clone()),
                headers: headers.clone(),
                ..command(number, offset, "")
            };
            shard.accept(record, START);
        }
        let handle = ShardHandle {
            shard,
            number,
            requests: mpsc::channel(INDEX_REQUESTS).0,
            deferred: Vec::new(),
            end: None,
            _cancel_indexer: CancellationToken::new().drop_guard(),
        };
        let id = AssignmentId::for_tests(slot, 1);
        lane.shards.insert(id, handle);
    }
    lane
}

fn command(partition: i32, offset: i64, json: &str) -> Record {
    Record {
        position: Position {
            topic: "ingest".into(),
            partition,
            offset,
        },
        timestamp: Some(START),
        key: None,
        value: Some(Bytes::copy_from_slice(json.as_bytes())),
        headers: Headers::new(),
        unreadable_headers: 0,
    }
}

#[test]
fn other_applications_shorten_burst_transactions() {
    // The size of the second transaction of a lane with two shards: one with a burst, and one that may have other jobs.
    let second = |others: &[&'static str], after: Duration| {
        let settings = Settings {
            window_jobs: 50_000,
            window_bytes: 64 << 20,
            ..settings()
        };
        let mut lane = lane_with(settings, 2, 0, &Bytes::new(), &Headers::new());
        for handle in lane.shards.values_mut() {
            let jobs = if handle.number == 0 {
                vec![r#"{"appName":"app","delay":"0s","jobData":1}"#; 3_000]
            } else {
                others.to_vec()
            };
            for (offset, job) in (0..).zip(jobs) {
                handle.shard.accept(command(handle.number, offset, job), START);
            }
        }
        // Decides all commands, and dispatches some of the jobs.
        lane.collect(START, 5_000, &mut TransactionBatch::default());
        let mut turn = TransactionBatch::default();
        lane.collect(START.after(after), 5_000, &mut turn);
        turn.outputs.len()
    };
    let soon = r#"{"appName":"other","delay":"50ms","jobData":1}"#;
    let later = r#"{"appName":"other","delay":"150ms","jobData":1}"#;
    let now = Duration::ZERO;
    assert!(second(&[], now) > SHORT_TURN && second(&[later], now) > SHORT_TURN);
    assert!((1..=SHORT_TURN).contains(&second(&[soon], now)));
    // Otherwise, the jobs that become due meanwhile would be late as well, and so on.
    let is_due = Duration::from_millis(60);
    assert!((1..=SHORT_TURN).contains(&second(&[soon, later], is_due)));
    assert!((1..=SHORT_TURN).contains(&second(&[soon], is_due)));
}

/// Checks that transactions of a limited size write a dead letter for each command of each shard.
fn check_transactions(mut lane: LaneShards, dead_letters: usize) {
    let mut written = 0;
    let mut transactions = 0;
    while written < dead_letters {
        let mut turn = TransactionBatch::default();
        lane.collect(START, 5_000, &mut turn);
        let bytes: usize = turn.outputs.iter().map(redeliver_core::Output::size).sum();
        // The last record may exceed the maximum.
        let max = TransactionBatch::BYTES + 2 * MEGABYTE;
        assert!(bytes <= max, "{bytes} bytes in one transaction");
        assert!(
            turn.outputs
                .iter()
                .all(|output| *output.topic == *settings().dead_letters)
        );
        assert!(!turn.outputs.is_empty(), "{written} of {dead_letters}");
        assert_eq!(turn.outputs.len(), turn.completed.len());
        written += turn.outputs.len();
        transactions += 1;
    }
    assert_eq!(written, dead_letters);
    assert!(transactions > 1);
}

#[test]
fn shards_share_the_transaction_size() {
    let value = Bytes::from(vec![b'x'; MEGABYTE]);
    check_transactions(lane(8, 10, &value, &Headers::new()), 80);
    let mut headers = Headers::new();
    headers.push("user", Some(&[b'x'; MEGABYTE]));
    check_transactions(lane(2, 40, &Bytes::from_static(b"x"), &headers), 80);
}

#[test]
fn due_jobs_shorten_command_transactions() {
    // The size of the second transaction of a lane whose shard has an accepted job and then many commands.
    let second = |delay: &str| {
        let settings = Settings {
            window_jobs: 50_000,
            window_bytes: 64 << 20,
            ..settings()
        };
        let mut lane = lane_with(settings, 1, 0, &Bytes::new(), &Headers::new());
        let accept = |lane: &mut LaneShards, offset, job: &str| {
            let handle = lane.shards.values_mut().next().unwrap();
            handle.shard.accept(command(0, offset, job), START);
        };
        let accepted = format!(r#"{{"appName":"other","delay":"{delay}","jobData":1}}"#);
        accept(&mut lane, 0, &accepted);
        lane.collect(START, 5_000, &mut TransactionBatch::default());
        for offset in 1..=3_000 {
            accept(&mut lane, offset, r#"{"appName":"app","delay":"1h","jobData":1}"#);
        }
        let mut turn = TransactionBatch::default();
        lane.collect(START.after(Duration::from_millis(60)), 5_000, &mut turn);
        turn.outputs.len()
    };
    assert!((1..=SHORT_TURN).contains(&second("50ms")), "due");
    assert!((1..=SHORT_TURN).contains(&second("150ms")), "due soon");
    assert!(second("1h") > SHORT_TURN);
}
