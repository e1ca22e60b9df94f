use prometheus_client::registry::Registry;
use redeliver_core::outcome::Produced;
use redeliver_core::{Headers, Outcome, Position, headers};

use super::*;
use crate::metrics::WorkerFamilies;

const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);

const TIMEOUT: Duration = Duration::from_secs(900);

/// An engine with one partition of its source, and what its driver would do.
struct Bench {
    engine: Engine,
    exchange: Arc<Exchange>,
    pipeline: Arc<Pipeline>,
    assignment: AssignmentId,
    turn: TransactionBatch,
    /// Topics that do not exist, and for how long.
    missing: Arc<Mutex<HashMap<String, Duration>>>,
}

impl Bench {
    fn new(limit: InFlight) -> Self {
        let pipeline = Arc::new(Pipeline {
            output: Some("done".into()),
            other_outputs: vec!["other".into()],
            ..Pipeline::new("docs")
        });
        let exchange = Arc::new(Exchange::new(Waker::new()));
        let families = WorkerFamilies::register(&mut Registry::default());
        let metrics = Arc::new(families.of("docs"));
        let missing: Arc<Mutex<HashMap<String, Duration>>> = Arc::default();
        let topics = Topics {
            missing_for: Box::new({
                let missing = missing.clone();
                move |topic| missing.lock().unwrap().get(topic).copied()
            }),
            written: pipeline.written_topics(),
            timeout: TIMEOUT,
            gauges: families.missing_topics("lane", &pipeline.written_topics()),
        };
        let mut engine = Engine::new(
            pipeline.clone(),
            exchange.clone(),
            metrics,
            Gauge::default(),
            topics,
            limit,
        );
        let assignment = AssignmentId::for_tests(0, 1);
        engine.assigned(assignment, &pipeline.source, 0);
        Self {
            engine,
            exchange,
            pipeline,
            assignment,
            turn: TransactionBatch::default(),
            missing,
        }
    }

    fn accept(&mut self, offset: i64, size: usize) {
        let record = Record {
            position: Position {
                topic: self.pipeline.source.clone(),
                partition: 0,
                offset,
            },
            timestamp: Some(NOW),
            key: Some(format!("key-{offset}").into()),
            value: Some(vec![b'v'; size].into()),
            headers: Headers::new(),
            unreadable_headers: 0,
        };
        self.engine.accept(self.assignment, record, NOW);
        self.engine.accepted_all();
    }

    /// Handles all that was accepted, each as this says of its offset.
    fn handle(&mut self, outcome: impl Fn(i64) -> Outcome) {
        let jobs = self.exchange.take_jobs().into_iter();
        let mut done = jobs
            .map(|job| {
                let outcome = outcome(job.offset);
                let routing =
                    route::route(&self.pipeline, &job.record, &job.arrival, outcome, None, NOW, 0.5);
                Done {
                    assignment: job.assignment,
                    offset: job.offset,
                    routing: Some(routing),
                    handled: Some((job.record, job.arrival)),
                    size: job.size,
                }
            })
            .collect();
        self.exchange.give(&mut done);
    }

    fn finish(&mut self) {
        self.turn = TransactionBatch::default();
        self.engine.finish(NOW, 100, &mut self.turn);
    }

    fn refuse(&mut self, indexes: &[usize]) -> bool {
        let refused: Vec<Refused> = indexes
            .iter()
            .map(|index| Refused {
                index: *index,
                failure: Failure::permanent("output.too-large", "no"),
            })
            .collect();
        self.engine.refused(&refused, &mut self.turn, NOW)
    }

    /// Topic, key and error code of all outputs of the turn, empty where there is none.
    fn written(&self) -> Vec<[&str; 3]> {
        fn text(bytes: Option<&[u8]>) -> &str {
            std::str::from_utf8(bytes.unwrap_or_default()).unwrap()
        }
        let outputs = self.turn.outputs.iter();
        let written = outputs.map(|output| {
            let code = output.headers.last(headers::ERROR_CODE);
            [&*output.topic, text(output.key.as_deref()), text(code)]
        });
        written.collect()
    }
}

const ROOMY: InFlight = InFlight {
    records: 100,
    bytes: usize::MAX,
};

#[test]
fn of_a_record_with_a_refused_result_nothing_is_written_but_a_dead_letter() {
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
    assert_eq!(bench.turn.outputs[1].value.as_deref(), Some(&[b'v'; 10][..]));
    assert_eq!(bench.turn.completed.len(), 3);

    // The dead letter is refused too, and what is left of it, and so on.
    assert!(bench.refuse(&[1]));
    assert_eq!(bench.turn.outputs[1].value, None);
    assert_eq!(bench.written()[1], letter);
    assert!(bench.refuse(&[1]));
    assert_eq!(bench.written()[1], ["docs-dlq", "", "output.too-large"]);
    assert!(!bench.refuse(&[1]));
}

#[test]
fn a_refused_wait_ends_at_once_and_a_refused_dead_letter_keeps_its_reason() {
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
    assert!(bench.turn.outputs[0].value.is_some());
    assert_eq!(bench.turn.outputs[1].value, None);
}

#[test]
fn records_and_their_results_are_bounded_in_bytes() {
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
    assert_eq!(bench.engine.in_flight.bytes, 0);
}

#[test]
fn a_turn_is_bounded_in_bytes_and_never_empty() {
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
    let mut turns = Vec::new();
    while turns.iter().sum::<usize>() < 4 {
        bench.finish();
        turns.push(bench.turn.completed.len());
    }
    assert_eq!(turns, [1, 2, 1]);
}

#[test]
fn a_record_waits_for_its_missing_topic_and_no_other_record_does() {
    let mut bench = Bench::new(ROOMY);
    let to = |topic: &str| {
        let topic = Some(topic.into());
        Outcome::Success(vec![Produced {
            topic,
            ..Produced::unchanged()
        }])
    };
    bench.missing.lock().unwrap().insert("other".into(), TIMEOUT / 2);
    for offset in 0..4 {
        bench.accept(offset, 10);
    }
    bench.handle(|offset| to(if offset % 2 == 0 { "done" } else { "other" }));
    bench.finish();
    bench.engine.committed(NOW);
    assert_eq!(bench.written(), [["done", "key-0", ""], ["done", "key-2", ""]]);
    assert_eq!(bench.engine.in_flight.records, 2);
    assert!(!bench.engine.is_busy());
    bench.finish();
    assert!(bench.written().is_empty());
    // It exists again.
    bench.missing.lock().unwrap().clear();
    bench.finish();
    bench.engine.committed(NOW);
    assert_eq!(bench.written(), [["other", "key-1", ""], ["other", "key-3", ""]]);
    assert_eq!(bench.engine.in_flight.records, 0);
    assert_eq!(bench.engine.in_flight.bytes, 0);
}

#[test]
fn a_result_whose_topic_was_missing_for_too_long_is_dead_and_a_wait_is_not() {
    let mut bench = Bench::new(ROOMY);
    let missing = bench.missing.clone();
    let set = |topic: &str, missing_for| missing.lock().unwrap().insert(topic.into(), missing_for);
    set("done", TIMEOUT / 2);
    set("docs-retry-5s", TIMEOUT * 2);
    bench.accept(0, 10);
    bench.accept(1, 10);
    bench.handle(|offset| match offset {
        0 => Outcome::unchanged(),
        _ => Outcome::Failed(Failure::transient("http.503", "busy")),
    });
    bench.finish();
    assert!(bench.written().is_empty());
    // Its dead-letter topic is missing too.
    set("done", TIMEOUT);
    set("docs-dlq", TIMEOUT);
    bench.finish();
    assert!(bench.written().is_empty());
    missing.lock().unwrap().remove("docs-dlq");
    bench.finish();
    bench.engine.committed(NOW);
    assert_eq!(bench.written(), [["docs-dlq", "key-0", "output.missing"]]);
    missing.lock().unwrap().clear();
    bench.finish();
    bench.engine.committed(NOW);
    assert_eq!(bench.written()[0][0], "docs-retry-5s");
    assert_eq!(bench.engine.in_flight.bytes, 0);
}

#[test]
fn what_is_held_back_of_a_lost_partition_is_forgotten() {
    let mut bench = Bench::new(ROOMY);
    bench.missing.lock().unwrap().insert("done".into(), TIMEOUT / 2);
    bench.accept(0, 10);
    bench.handle(|_| Outcome::unchanged());
    bench.finish();
    assert_eq!(bench.engine.held.len(), 1);
    bench.engine.revoked(bench.assignment);
    bench.finish();
    assert!(bench.turn.completed.is_empty());
    assert_eq!(bench.engine.held.len(), 0);
    assert_eq!(bench.engine.in_flight.records, 0);
}
