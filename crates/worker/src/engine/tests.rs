use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;
use redeliver_core::outcome::Produced;
use redeliver_core::route::RouteContext;
use redeliver_core::{Headers, Outcome, Position, headers};
use redeliver_kafka::Unwritable;

use super::*;
use crate::groups::Ordering as Order;
use crate::metrics::WorkerFamilies;

const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);

/// After all due times.
const LATER: Timestamp = Timestamp::from_millis(4_000_000_000_000);

const TIMEOUT: Duration = Duration::from_secs(900);

/// An engine that owns one partition of its source, and a substitute for its driver.
pub(crate) struct Bench {
    pub(crate) engine: Engine,
    pub(crate) channel: Arc<LaneChannel>,
    pub(crate) changed: Arc<Notify>,
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) metrics: Arc<WorkerMetrics>,
    registry: Registry,
    pub(crate) assignment: AssignmentId,
    batch: TransactionBatch,
    /// Unavailable topics.
    unavailable: Arc<Mutex<HashMap<String, Presence>>>,
}

impl Bench {
    fn new(limit: InFlight) -> Self {
        Self::with_grouping(limit, Arc::default())
    }

    pub(crate) fn with_grouping(limit: InFlight, grouping: Arc<Grouping>) -> Self {
        let pipeline = Arc::new(Pipeline {
            output: Some("done".into()),
            other_outputs: vec!["other".into()],
            ..Pipeline::new("docs")
        });
        let changed: Arc<Notify> = Arc::default();
        let channel = Arc::new(LaneChannel::new(Waker::new(), changed.clone()));
        let mut registry = Registry::default();
        let families = WorkerFamilies::register(&mut registry);
        let metrics = Arc::new(families.of("docs"));
        let unavailable: Arc<Mutex<HashMap<String, Presence>>> = Arc::default();
        let topics = OutputTopics {
            presence: Box::new({
                let unavailable = unavailable.clone();
                move |topic| {
                    let presence = unavailable.lock().unwrap().get(topic).copied();
                    presence.unwrap_or(Presence::Exists)
                }
            }),
            written: pipeline.written_topics(),
            timeout: TIMEOUT,
            gauges: families.unavailable_topics(&pipeline.name, "lane", &pipeline.written_topics()),
        };
        let context = EngineContext {
            pipeline: pipeline.clone(),
            grouping,
            metrics: metrics.clone(),
            failures: Arc::new(FailureLog::new(pipeline.name.clone())),
            on_dead: None,
            partitions: OwnedPartitions::default(),
        };
        let mut engine = Engine::new(
            context,
            channel.clone(),
            Gauge::default(),
            topics,
            BudgetShare::split(limit, 1).pop().unwrap(),
        );
        let assignment = AssignmentId::for_tests(0, 1);
        engine.assigned(assignment, &pipeline.source, 0);
        Self {
            engine,
            channel,
            changed,
            pipeline,
            metrics,
            registry,
            assignment,
            batch: TransactionBatch::default(),
            unavailable,
        }
    }

    pub(crate) fn accept(&mut self, offset: i64, size: usize) {
        self.accept_with_key(offset, size, &format!("key-{offset}"));
    }

    /// Accepts a record that a tier has released.
    pub(crate) fn accept_released(&mut self, waiting: Output, offset: i64) {
        let record = Record {
            position: Position {
                topic: self.pipeline.due_topic(),
                partition: 0,
                offset,
            },
            timestamp: Some(NOW),
            key: waiting.key,
            value: waiting.value,
            headers: waiting.headers,
            unreadable_headers: 0,
        };
        self.engine.accept(self.assignment, record, LATER);
        self.engine.accepted_all();
    }

    /// What the transaction writes.
    pub(crate) fn outputs(&self) -> &[Output] {
        &self.batch.outputs
    }

    fn accept_with_key(&mut self, offset: i64, size: usize, key: &str) {
        let record = Record {
            position: Position {
                topic: self.pipeline.source.clone(),
                partition: 0,
                offset,
            },
            timestamp: Some(NOW),
            key: Some(key.to_owned().into()),
            value: Some(vec![b'v'; size].into()),
            headers: Headers::new(),
            unreadable_headers: 0,
        };
        self.engine.accept(self.assignment, record, NOW);
        self.engine.accepted_all();
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.engine.in_flight.own().records
    }

    /// The value of a series of the pipeline, such as `worker_dead_total{class="permanent"}`.
    pub(crate) fn metric(&self, series: &str) -> String {
        let mut page = String::new();
        text::encode(&mut page, &self.registry).unwrap();
        let series = series.replacen('{', "{pipeline=\"docs\",", 1) + " ";
        let value = page.lines().find_map(|line| line.strip_prefix(&*series));
        value.unwrap_or_else(|| panic!("no {series}in {page}")).to_owned()
    }

    fn set(&self, topic: &str, presence: Presence) {
        self.unavailable
            .lock()
            .unwrap()
            .insert(topic.to_owned(), presence);
    }

    /// The offsets that the transaction completes.
    fn completed(&self) -> Vec<i64> {
        self.batch.completed.iter().map(|(_, offset)| *offset).collect()
    }

    /// The number and size of records in flight.
    fn own(&self) -> (usize, usize) {
        let own = self.engine.in_flight.own();
        (own.records, own.bytes)
    }

    /// Runs the driver for all accepted records, with an outcome by offset.
    fn handle(&mut self, outcome: impl Fn(i64) -> Outcome) {
        let queued = self.channel.take_queued();
        self.handle_queued(queued, outcome);
    }

    fn handle_queued(&mut self, queued: Vec<QueuedRecord>, outcome: impl Fn(i64) -> Outcome) {
        let mut finished = queued
            .into_iter()
            .map(|queued| {
                let outcome = outcome(queued.offset);
                let context = RouteContext {
                    pipeline: &self.pipeline,
                    arrival: &queued.arrival,
                    trace: None,
                    now: NOW,
                    random: 0.5,
                    partitions: &|_| Some(4),
                };
                let routing = context.route(&queued.record, outcome);
                FinishedRecord {
                    assignment: queued.assignment,
                    offset: queued.offset,
                    routing: Some(routing),
                    attempts: queued.arrival.failed_attempts + 1,
                    original: Some((queued.record, queued.arrival)),
                    ordered: queued.groups.ordered,
                    size: queued.size,
                }
            })
            .collect();
        self.channel.send_finished(&mut finished);
    }

    pub(crate) fn finish(&mut self) {
        self.batch = TransactionBatch::default();
        self.engine.finish(NOW, 100, &mut self.batch);
    }

    fn refuse(&mut self, indexes: &[usize]) -> bool {
        let refused: Vec<Refused> = indexes
            .iter()
            .map(|index| Refused {
                index: *index,
                failure: Failure::permanent("output.too-large", "no"),
            })
            .collect();
        self.engine.refused(&refused, &mut self.batch, NOW)
    }

    /// Topic, key and error code of all outputs in the transaction. A missing key or code is empty.
    pub(crate) fn written(&self) -> Vec<[&str; 3]> {
        fn text(bytes: Option<&[u8]>) -> &str {
            std::str::from_utf8(bytes.unwrap_or_default()).unwrap()
        }
        let outputs = self.batch.outputs.iter();
        let written = outputs.map(|output| {
            let code = output.headers.last(headers::ERROR_CODE);
            [&*output.topic, text(output.key.as_deref()), text(code)]
        });
        written.collect()
    }
}

pub(crate) const ROOMY: InFlight = InFlight {
    records: 100,
    bytes: usize::MAX,
};

#[test]
fn refused_result_makes_a_dead_letter() {
    let mut bench = Bench::new(ROOMY);
    for offset in 0..3 {
        bench.accept(offset, 10);
    }
    bench.handle(|offset| match offset {
        1 => Outcome::Success(vec![Produced::unchanged(), Produced::unchanged()]),
        _ => Outcome::unchanged(),
    });
    bench.finish();
    assert_eq!(bench.written().len(), 4);
    assert!(bench.refuse(&[1, 2]));
    let letter = ["docs-dlq", "key-1", "output.too-large"];
    assert_eq!(
        bench.written(),
        [["done", "key-0", ""], letter, ["done", "key-2", ""]]
    );
    assert_eq!(bench.batch.outputs[1].value.as_deref(), Some(&[b'v'; 10][..]));
    assert_eq!(bench.batch.completed.len(), 3);

    // The dead letter is refused as well, until there is nothing left to remove.
    assert!(bench.refuse(&[1]));
    assert_eq!(bench.batch.outputs[1].value, None);
    assert_eq!(bench.written()[1], letter);
    assert!(bench.refuse(&[1]));
    assert_eq!(bench.written()[1], ["docs-dlq", "", "output.too-large"]);
    assert!(!bench.refuse(&[1]));
}

#[test]
fn attempts_are_counted_on_commit() {
    let mut bench = Bench::new(ROOMY);
    (0..4).for_each(|offset| bench.accept(offset, 10));
    bench.handle(|offset| match offset {
        1 => Outcome::Failed(Failure::permanent("bad", "no")),
        2 => Outcome::Failed(Failure::transient("busy", "later")),
        _ => Outcome::unchanged(),
    });
    bench.finish();
    assert!(bench.refuse(&[3]));
    // The attempts stay with a batch that is written again.
    let mut batch = std::mem::take(&mut bench.batch);
    assert!(bench.engine.take_back(&mut batch));
    assert_eq!(bench.metric(r#"worker_attempts_sum{outcome="succeeded"}"#), "0.0");
    bench.finish();
    bench.engine.committed(NOW);
    for (series, expected) in [
        (r#"worker_attempts_sum{outcome="succeeded"}"#, "1.0"),
        (r#"worker_attempts_sum{outcome="dead"}"#, "2.0"),
        (r#"worker_attempts_count{outcome="dead"}"#, "2"),
        (r#"worker_dead_total{class="permanent"}"#, "2"),
        (r#"worker_retried_total{class="transient"}"#, "1"),
    ] {
        assert_eq!(bench.metric(series), expected, "{series}");
    }
}

#[test]
fn dead_letters_are_reported_on_commit() {
    let mut bench = Bench::new(ROOMY);
    let reported: Arc<Mutex<Vec<(String, usize)>>> = Arc::default();
    bench.engine.context.on_dead = Some(OnDead::new({
        let reported = reported.clone();
        move |letter| {
            let size = letter.record.value.map_or(0, |value| value.len());
            reported.lock().unwrap().push((letter.failure.code, size));
            panic!("does not matter");
        }
    }));
    (0..3).for_each(|offset| bench.accept(offset, 10));
    bench.handle(|offset| match offset {
        1 => Outcome::Failed(Failure::permanent("bad", "no")),
        _ => Outcome::unchanged(),
    });
    bench.finish();
    bench.engine.aborted();
    assert!(reported.lock().unwrap().is_empty());

    (0..3).for_each(|offset| bench.accept(offset, 10));
    bench.handle(|offset| match offset {
        1 => Outcome::Failed(Failure::permanent("bad", "no")),
        _ => Outcome::unchanged(),
    });
    bench.finish();
    assert!(bench.refuse(&[1, 2]));
    bench.engine.committed(NOW);
    let expected = [("bad", 0), ("output.too-large", 10)];
    assert_eq!(
        *reported.lock().unwrap(),
        expected.map(|(code, size)| (code.to_owned(), size))
    );
    bench.engine.committed(NOW);
    assert_eq!(reported.lock().unwrap().len(), 2);
}

#[test]
fn refused_dead_letter_keeps_its_reason() {
    let mut bench = Bench::new(ROOMY);
    bench.accept(0, 10);
    bench.accept(1, 10);
    bench.handle(|offset| match offset {
        0 => Outcome::Failed(Failure::transient("http.503", "busy")),
        _ => Outcome::Failed(Failure::permanent("http.400", "no")),
    });
    bench.finish();
    assert_eq!(bench.written()[0][0], "docs-retry-5s");
    assert!(bench.refuse(&[0, 1]));
    let letters = bench.written();
    assert_eq!(letters[0], ["docs-dlq", "key-0", "output.too-large"]);
    assert_eq!(letters[1], ["docs-dlq", "key-1", "http.400"]);
    assert!(bench.batch.outputs[0].value.is_some());
    assert_eq!(bench.batch.outputs[1].value, None);
}

#[test]
fn taken_back_result_keeps_its_size() {
    let mut bench = Bench::new(ROOMY);
    bench.accept(0, 1_000);
    bench.handle(|_| Outcome::unchanged());
    bench.finish();
    // A dead letter of which nothing but the headers is left.
    assert!((0..3).all(|_| bench.refuse(&[0])));
    let replaced = bench.batch.outputs[0].size();
    assert!(bench.engine.take_back(&mut bench.batch));
    let original = bench.engine.finished[0].size - replaced;
    assert_eq!(bench.engine.in_flight.own().bytes, original + replaced);
    assert!((1_000..1_200).contains(&original), "{original}");
    bench.finish();
    assert_eq!(bench.engine.in_flight.own().bytes, 0);
}

#[test]
fn taken_back_wait_has_no_partition() {
    let mut bench = Bench::new(ROOMY);
    bench.accept(0, 10);
    let later = || Outcome::Failed(Failure::throttled(Duration::from_secs(5), "http.429", "later"));
    bench.handle(|_| later());
    bench.finish();
    let partitions = |bench: &Bench| {
        let outputs = bench.batch.outputs.iter();
        outputs.map(|output| output.partition).collect::<Vec<_>>()
    };
    assert_eq!(partitions(&bench), [Some(2)]);
    assert!(bench.engine.take_back(&mut bench.batch));
    bench.finish();
    assert_eq!(partitions(&bench), [None]);
    assert_eq!(bench.written()[0][0], "docs-retry-5s");
}

#[test]
fn records_and_results_are_bounded() {
    let mut bench = Bench::new(InFlight {
        records: 100,
        bytes: 10_000,
    });
    let assignment = bench.assignment;
    bench.accept(0, 4_000);
    assert!(bench.engine.capacity(assignment) > 0);
    bench.handle(|_| Outcome::value(vec![0; 8_000]));
    bench.engine.collect();
    assert_eq!(bench.engine.capacity(assignment), 0);
    bench.finish();
    bench.engine.committed(NOW);
    assert_eq!(bench.engine.capacity(assignment), 100);
    assert_eq!(bench.engine.in_flight.own().bytes, 0);
}

#[test]
fn transactions_are_bounded_in_bytes() {
    let mut bench = Bench::new(ROOMY);
    for offset in 0..4 {
        bench.accept(offset, 10);
    }
    let sizes = [
        TransactionBatch::BYTES * 2,
        TransactionBatch::BYTES / 3,
        TransactionBatch::BYTES / 3,
        TransactionBatch::BYTES / 2,
    ];
    bench.handle(|offset| Outcome::value(vec![0; sizes[usize::try_from(offset).unwrap()]]));
    let mut batches = Vec::new();
    while batches.iter().sum::<usize>() < 4 {
        bench.finish();
        batches.push(bench.batch.completed.len());
    }
    assert_eq!(batches, [1, 2, 1]);
}

fn to(topic: &str) -> Produced {
    Produced {
        topic: Some(topic.into()),
        ..Produced::unchanged()
    }
}

fn missing(lasting: Duration) -> Presence {
    Presence::Missing { lasting }
}

#[test]
fn unwritable_topic_waits_without_limit() {
    let mut bench = Bench::new(ROOMY);
    let unwritable = Presence::Unwritable {
        reason: Unwritable::Denied,
        lasting: 2 * TIMEOUT,
    };
    bench.set("other", unwritable);
    bench.accept(0, 10);
    bench.accept(1, 10);
    bench.handle(|offset| Outcome::Success(vec![to(if offset == 0 { "other" } else { "done" })]));
    bench.finish();
    bench.engine.committed(NOW);
    assert_eq!(bench.written(), [["done", "key-1", ""]]);
    bench.unavailable.lock().unwrap().clear();
    bench.finish();
    bench.engine.committed(NOW);
    assert_eq!(bench.written(), [["other", "key-0", ""]]);
}

#[test]
fn only_records_for_missing_topic_wait() {
    let mut bench = Bench::new(ROOMY);
    bench.set("other", missing(TIMEOUT / 2));
    for offset in 0..4 {
        bench.accept(offset, 10);
    }
    bench.handle(|offset| Outcome::Success(vec![to(if offset % 2 == 0 { "done" } else { "other" })]));
    bench.finish();
    bench.engine.committed(NOW);
    assert_eq!(bench.written(), [["done", "key-0", ""], ["done", "key-2", ""]]);
    assert_eq!(bench.engine.in_flight.own().records, 2);
    assert!(!bench.engine.is_busy());
    bench.finish();
    assert!(bench.written().is_empty());
    // The topic exists again.
    bench.unavailable.lock().unwrap().clear();
    bench.finish();
    bench.engine.committed(NOW);
    assert_eq!(bench.written(), [["other", "key-1", ""], ["other", "key-3", ""]]);
    assert_eq!(bench.own(), (0, 0));
}

#[test]
fn waiting_results_are_written_first() {
    let mut bench = Bench::new(ROOMY);
    bench.set("done", missing(TIMEOUT / 2));
    bench.accept(0, 10);
    bench.accept(1, 10);
    // The second one waits for another topic, too.
    bench.handle(|offset| match offset {
        0 => Outcome::unchanged(),
        _ => Outcome::Success(vec![to("other"), Produced::unchanged()]),
    });
    bench.set("other", missing(TIMEOUT / 2));
    bench.finish();
    assert!(bench.written().is_empty());
    bench.unavailable.lock().unwrap().remove("other");
    bench.finish();
    bench.unavailable.lock().unwrap().clear();
    bench.accept(2, 10);
    bench.handle(|_| Outcome::unchanged());
    bench.finish();
    let keys = bench.written().into_iter().map(|[topic, key, _]| (topic, key));
    let done: Vec<_> = keys.filter(|(topic, _)| *topic == "done").collect();
    assert_eq!(done, [("done", "key-0"), ("done", "key-1"), ("done", "key-2")]);
}

#[test]
fn ordered_results_do_not_overtake() {
    let written = |ordering| {
        let grouping = Grouping {
            ordering,
            ..Grouping::default()
        };
        let mut bench = Bench::with_grouping(ROOMY, Arc::new(grouping));
        bench.set("other", missing(TIMEOUT / 2));
        for (offset, key) in ["a", "b", "a"].into_iter().enumerate() {
            bench.accept_with_key(offset.try_into().unwrap(), 10, key);
        }
        bench.handle(|offset| {
            Outcome::Success(match offset {
                0 => vec![to("done"), to("other")],
                _ => vec![to("done")],
            })
        });
        bench.finish();
        let first = bench.completed();
        bench.unavailable.lock().unwrap().clear();
        bench.finish();
        [first, bench.completed()]
    };
    assert_eq!(written(Order::None), [vec![1, 2], vec![0]]);
    assert_eq!(written(Order::Key), [vec![1], vec![0, 2]]);
    assert_eq!(written(Order::Partition), [vec![], vec![0, 1, 2]]);
}

#[test]
fn accepted_records_precede_their_revocation() {
    let mut bench = Bench::new(ROOMY);
    let record = Record {
        position: Position {
            topic: bench.pipeline.source.clone(),
            partition: 0,
            offset: 0,
        },
        timestamp: None,
        key: None,
        value: None,
        headers: Headers::new(),
        unreadable_headers: 0,
    };
    bench.engine.accept(bench.assignment, record, NOW);
    bench.engine.revoked(bench.assignment);
    assert!(bench.channel.take_revoked());
    assert_eq!(bench.channel.take_queued().len(), 1);
}

#[test]
fn missing_output_times_out_retries_wait() {
    let mut bench = Bench::new(ROOMY);
    bench.set("done", missing(TIMEOUT / 2));
    bench.set("docs-retry-5s", missing(TIMEOUT * 2));
    bench.accept(0, 10);
    bench.accept(1, 10);
    bench.handle(|offset| match offset {
        0 => Outcome::unchanged(),
        _ => Outcome::Failed(Failure::transient("http.503", "busy")),
    });
    bench.finish();
    assert!(bench.written().is_empty());
    // The dead-letter topic is missing as well.
    bench.set("done", missing(TIMEOUT));
    bench.set("docs-dlq", missing(TIMEOUT));
    bench.finish();
    assert!(bench.written().is_empty());
    bench.unavailable.lock().unwrap().remove("docs-dlq");
    bench.finish();
    bench.engine.committed(NOW);
    assert_eq!(bench.written(), [["docs-dlq", "key-0", "output.missing"]]);
    bench.unavailable.lock().unwrap().clear();
    bench.finish();
    bench.engine.committed(NOW);
    assert_eq!(bench.written()[0][0], "docs-retry-5s");
    assert_eq!(bench.engine.in_flight.own().bytes, 0);
}

#[test]
fn revoked_records_do_not_wait() {
    let mut bench = Bench::new(ROOMY);
    bench.set("done", missing(TIMEOUT / 2));
    bench.accept(0, 10);
    bench.handle(|_| Outcome::unchanged());
    bench.finish();
    assert_eq!(bench.engine.waiting.len(), 1);
    bench.engine.revoked(bench.assignment);
    bench.finish();
    assert!(bench.batch.completed.is_empty());
    assert_eq!(bench.engine.waiting.len(), 0);
    assert_eq!(bench.engine.in_flight.own().records, 0);
}

#[test]
fn results_of_earlier_assignment_are_dropped() {
    let mut bench = Bench::new(ROOMY);
    bench.accept(0, 10);
    let queued = bench.channel.take_queued();
    // The lane loses the partition while the handler runs, gets it back, and reads the record again.
    bench.engine.revoked(bench.assignment);
    bench.assignment = AssignmentId::for_tests(0, 2);
    bench.engine.assigned(bench.assignment, &bench.pipeline.source, 0);
    bench.accept(0, 10);
    assert!(
        !queued[0].is_assigned.load(Ordering::SeqCst),
        "the driver skips it"
    );
    bench.handle_queued(queued, |_| Outcome::unchanged());
    bench.finish();
    assert_eq!((bench.written().len(), bench.batch.completed.len()), (0, 0));
    assert_eq!(bench.engine.in_flight.own().records, 1);
    bench.handle(|_| Outcome::unchanged());
    bench.finish();
    assert_eq!(bench.written(), [["done", "key-0", ""]]);
    assert_eq!(bench.batch.completed, [(bench.assignment, 0)]);
    assert_eq!(bench.own(), (0, 0));
}

#[test]
fn unattempted_records_are_given_back() {
    let mut bench = Bench::new(ROOMY);
    for offset in 0..3 {
        bench.accept(offset, 10);
    }
    bench.engine.stopping();
    let queued = bench.channel.take_queued().into_iter();
    let mut returned = queued.map(QueuedRecord::into_unprocessed).collect();
    bench.channel.send_finished(&mut returned);
    bench.finish();
    assert!(bench.written().is_empty() && bench.batch.completed.is_empty());
    assert_eq!(bench.own(), (0, 0));
    assert!(!bench.engine.is_busy());
}

#[test]
fn owned_partitions_follow_assignments() {
    let mut bench = Bench::new(ROOMY);
    let owned = bench.engine.context.partitions.clone();
    assert_eq!(owned.part_of(4), Some(0.25));
    let other = AssignmentId::for_tests(1, 1);
    let source = bench.pipeline.source.clone();
    bench.engine.assigned(other, &source, 1);
    assert_eq!(owned.part_of(4), Some(0.5));
    // The lane may revoke an assignment that it has not announced.
    for revoked in [other, other, AssignmentId::for_tests(2, 1)] {
        bench.engine.revoked(revoked);
    }
    assert_eq!(owned.part_of(4), Some(0.25));
}
