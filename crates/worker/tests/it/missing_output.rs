//! Results for topics that are missing, or that the pipeline does not declare.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use redeliver_core::headers::{ERROR_CODE, ORIGINAL_OFFSET};
use redeliver_core::outcome::Produced;
use redeliver_core::{Outcome, Pipeline};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::partitions;
use redeliver_runtime::Config;
use redeliver_service::topics;
use redeliver_testkit::{brokers, ensure, eventually, kafka_request, unique};
use redeliver_worker::Attempt;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tower::{BoxError, service_fn};

use crate::handler::{DEADLINE, by_value, output, text, work};

/// A pipeline whose handler writes each record to the output in its value: `a 1` goes to `NAME-a`.
struct Bench {
    kafka: KafkaSettings,
    config: Arc<Config>,
    pipeline: Pipeline,
    calls: Arc<Mutex<BTreeMap<String, u32>>>,
    runtime: Runtime,
    producer: Producer,
    stop: CancellationToken,
    working: JoinHandle<()>,
}

impl Bench {
    fn start(timeout: &str) -> Self {
        let brokers = brokers();
        let name = unique("outputs");
        let file = format!(
            "instance: {name}\nadmin: {{ listen: 127.0.0.1:0 }}\n\
             kafka:\n  brokers: '{brokers}'\n  topics: {{ create: true, partitions: 1, missing_timeout: {timeout} }}\n\
             pipelines: {{ {name}: {{ output: [{name}-a, {name}-b] }} }}\n"
        );
        let config = Arc::new(Config::from_yaml(&file).unwrap());
        let pipeline = config.pipelines[&name].pipeline(&name, &config.scheduler);
        let calls: Arc<Mutex<BTreeMap<String, u32>>> = Arc::default();
        let handler = service_fn({
            let (calls, name) = (calls.clone(), name.clone());
            move |attempt: Attempt| {
                let value = attempt.record.value.clone().unwrap_or_default();
                let value = String::from_utf8(value.into()).unwrap();
                let topic = format!("{name}-{}", value.split(' ').next().unwrap());
                *calls.lock().unwrap().entry(value).or_default() += 1;
                let result = Produced {
                    topic: Some(topic.into()),
                    ..Produced::unchanged()
                };
                async move { Ok::<_, BoxError>(Outcome::Success(vec![result])) }
            }
        });
        let kafka = KafkaSettings::new(brokers, "outputs-test");
        let (runtime, stop) = (Runtime::new().unwrap(), CancellationToken::new());
        let working = runtime.spawn(work(config.clone(), name, handler, stop.clone()));
        for (topic, _) in pipeline.topics() {
            eventually("the pipeline's topics exist", DEADLINE, || {
                partitions(&kafka, &topic).map_err(|error| error.to_string())
            });
        }
        Self {
            producer: Producer::new(&kafka).unwrap(),
            kafka,
            config,
            pipeline,
            calls,
            runtime,
            stop,
            working,
        }
    }

    fn topic(&self, output: &str) -> Arc<str> {
        format!("{}-{output}", self.pipeline.name).into()
    }

    fn send(&self, value: String) {
        let output = output(&self.pipeline.source, value);
        self.runtime.block_on(self.producer.send(&output)).unwrap();
    }

    /// Sends one record for each output and number.
    fn send_all(&self, outputs: &[&str], numbers: std::ops::Range<u32>) {
        for number in numbers {
            for output in outputs {
                self.send(format!("{output} {number}"));
            }
        }
    }

    fn delete(&self, output: &str) {
        kafka_request::delete_topic(&self.kafka.brokers, &self.topic(output));
    }

    fn create_again(&self) {
        let needed = topics::of_pipelines(&self.config, std::slice::from_ref(&self.pipeline));
        let kafka = self.kafka.client();
        eventually("the topic is created again", DEADLINE, || {
            let applied = redeliver_kafka::topology::apply(&kafka, &needed, DEADLINE);
            let applied = self.runtime.block_on(applied);
            applied.map(drop).map_err(|error| error.to_string())
        });
    }

    /// Waits until a topic contains these records, each once.
    #[track_caller]
    fn has(&self, topic: &Arc<str>, output: &str, numbers: std::ops::Range<u32>) {
        let expected: Vec<String> = numbers.map(|number| format!("{output} {number}")).collect();
        eventually("all records are written", DEADLINE, || {
            let there = by_value(&self.kafka, topic);
            let missing = expected.iter().filter(|value| !there.contains_key(*value));
            let missing = missing.count();
            ensure(
                missing == 0,
                format!("{missing} of {} are missing in {topic}", expected.len()),
            )
        });
    }

    #[track_caller]
    fn is_dead(&self, value: &str, code: &str) {
        let letters = self.pipeline.dead_letter_topic();
        let letter = eventually("the record is a dead letter", DEADLINE, || {
            by_value(&self.kafka, &letters)
                .remove(value)
                .ok_or_else(|| format!("no dead letter of `{value}`"))
        });
        assert_eq!(text(&letter, ERROR_CODE).as_deref(), Some(code), "{letter:?}");
    }

    /// The handler was called once for each record, although transactions were aborted.
    #[track_caller]
    fn called_once(&self) {
        let calls = self.calls.lock().unwrap().clone();
        let again: Vec<_> = calls.iter().filter(|(_, calls)| **calls != 1).collect();
        assert!(again.is_empty(), "{again:?}");
    }

    fn end(self) {
        self.stop.cancel();
        self.runtime.block_on(self.working).unwrap();
    }
}

#[test]
fn only_records_for_missing_output_wait() {
    let bench = Bench::start("15m");
    let (a, b) = (bench.topic("a"), bench.topic("b"));
    bench.send_all(&["a", "b"], 0..20);
    bench.has(&a, "a", 0..20);
    bench.has(&b, "b", 0..20);

    // The topic is deleted while records flow.
    bench.send_all(&["a", "b"], 20..100);
    bench.delete("b");
    bench.send_all(&["a", "b"], 100..200);
    bench.has(&a, "a", 0..200);

    bench.create_again();
    // Records that were written before the deletion are gone.
    bench.has(&b, "b", 100..200);
    bench.send_all(&["a", "b"], 200..220);
    bench.has(&b, "b", 100..220);
    bench.has(&a, "a", 0..220);
    assert!(by_value(&bench.kafka, &bench.pipeline.dead_letter_topic()).is_empty());
    bench.called_once();
    bench.end();
}

#[test]
fn unusable_outputs_make_dead_letters() {
    let bench = Bench::start("3s");
    bench.send_all(&["a", "b"], 0..5);
    bench.has(&bench.topic("b"), "b", 0..5);
    bench.delete("b");
    bench.send_all(&["a", "b"], 5..10);
    for number in 5..10 {
        bench.is_dead(&format!("b {number}"), "output.missing");
    }
    bench.has(&bench.topic("a"), "a", 0..10);
    let letters = by_value(&bench.kafka, &bench.pipeline.dead_letter_topic());
    assert_eq!(letters.len(), 5);
    assert_eq!(text(&letters["b 5"], ORIGINAL_OFFSET).as_deref(), Some("11"));
    // At once for topics that the pipeline does not declare.
    for value in ["undeclared 1", "nul\0 1"] {
        bench.send(value.to_owned());
        bench.is_dead(value, "output.unknown");
    }
    bench.called_once();
    bench.end();
}
