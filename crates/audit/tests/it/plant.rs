//! A small pipeline with its own topics: a worker and a relay on the same lanes and with the same routing as the
//! services. The first word in the value of a record decides what they do with it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use futures::future::join_all;
use redeliver_core::backoff::RetryPolicy;
use redeliver_core::headers::ReservedHeaders;
use redeliver_core::pipeline::{ReturnTo, retry_tier_group};
use redeliver_core::route::{Arrival, RouteContext, reject};
use redeliver_core::{Failure, Headers, HumanDuration, Jitter, Outcome, Output, Pipeline, Record, Timestamp};
use redeliver_kafka::groups::{self, CommittedOffset, GroupOffsets};
use redeliver_kafka::producer::Producer;
use redeliver_kafka::topology::{self, TopicSettings, TopologySpec};
use redeliver_kafka::{
    AssignmentId, IfFenced, IfRecreated, KafkaSettings, Lane, LaneContext, LaneSpec, Processor, TopicWatch,
    TransactionBatch,
};
use redeliver_testkit::kafka_request::delete_topic;
use redeliver_testkit::unique;
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

/// The first word in the value of a record.
pub(crate) type Word = &'static str;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Worker,
    Relay,
}

pub(crate) type HeaderList = Vec<(String, Option<Vec<u8>>)>;

/// Changes the outputs of a stage for a record with this word.
type PlantDefect = fn(Stage, &str, &mut Vec<Output>);

pub(crate) struct Plant {
    pub(crate) settings: KafkaSettings,
    pub(crate) pipeline: Pipeline,
    tier: HumanDuration,
    running: Vec<(CancellationToken, JoinHandle<()>)>,
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn create_topics(settings: &KafkaSettings, pipeline: &Pipeline) {
    let topics = TopicSettings {
        partitions: 3,
        replication: 1,
        retention: HumanDuration::from_secs(86_400),
        dead_letter_retention: HumanDuration::from_secs(86_400),
    };
    let spec = TopologySpec::for_pipelines(std::slice::from_ref(pipeline), &topics);
    let client = settings.client();
    runtime()
        .block_on(topology::apply(&client, &spec, Duration::from_secs(30)))
        .unwrap();
}

impl Plant {
    pub(crate) fn new(name: &str, return_to: ReturnTo) -> Self {
        let name = unique(name);
        let settings = KafkaSettings::new(redeliver_testkit::brokers(), name.clone());
        // All pipelines with the same tier share its consumer group, so each test has its own delay.
        let number = name
            .bytes()
            .fold(0_u64, |hash, byte| (hash * 31 + u64::from(byte)) % 997);
        let tier = HumanDuration::from_millis(1_001 + number);
        let pipeline = Pipeline {
            output: Some(format!("{name}-out").into()),
            return_to,
            policy: RetryPolicy::listed(vec![tier], Some(2), Jitter::None).unwrap(),
            ..Pipeline::new(&name)
        };
        create_topics(&settings, &pipeline);
        Self {
            settings,
            pipeline,
            tier,
            running: Vec::new(),
        }
    }

    /// Writes a record for each word; returns the words by position.
    pub(crate) fn produce(&self, words: &[Word]) -> BTreeMap<String, Word> {
        let producer = Producer::new(&self.settings).unwrap();
        let outputs: Vec<Output> = words
            .iter()
            .enumerate()
            .map(|(number, word)| self.source_record(word, number))
            .collect();
        let written = runtime().block_on(join_all(outputs.iter().map(|output| producer.send(output))));
        written
            .into_iter()
            .zip(words)
            .map(|(written, word)| (written.unwrap().position.to_string(), *word))
            .collect()
    }

    /// Writes the words `rounds` times, slowly enough that audits find records in progress.
    pub(crate) fn produce_in_background(&self, rounds: u64, words: &'static [Word]) -> JoinHandle<()> {
        let producer = Producer::new(&self.settings).unwrap();
        let outputs: Vec<Output> = words
            .iter()
            .enumerate()
            .map(|(number, word)| self.source_record(word, number))
            .collect();
        thread::spawn(move || {
            let runtime = runtime();
            for _ in 0..rounds {
                for written in runtime.block_on(join_all(outputs.iter().map(|output| producer.send(output))))
                {
                    written.unwrap();
                }
            }
        })
    }

    fn source_record(&self, word: &str, number: usize) -> Output {
        let headers = [
            ("tenant", Some(&b"a"[..])),
            ("empty", Some(&b""[..])),
            ("tenant", None),
        ];
        Output {
            topic: self.pipeline.source.clone(),
            partition: None,
            // Every third record has no key.
            key: (!number.is_multiple_of(3)).then(|| format!("key-{}", number % 7).into()),
            value: Some(format!("{word} {number}").into()),
            headers: headers.into_iter().collect(),
        }
    }

    /// Sets the committed offsets of the source to the beginning.
    pub(crate) fn reset_offsets(&self) {
        let group = self.pipeline.worker_group(&self.settings.id_prefix);
        let committed = CommittedOffset::new(0, "");
        let source = self.pipeline.source.to_string();
        let offsets = (0..3).map(|partition| ((source.clone(), partition), committed.clone()));
        groups::commit(&self.settings, &group, &offsets.collect::<GroupOffsets>()).unwrap();
    }

    pub(crate) fn recreate_output(&self) {
        delete_topic(&self.settings.brokers, self.pipeline.output.as_ref().unwrap());
        create_topics(&self.settings, &self.pipeline);
    }

    /// Writes a record without reserved headers to the tier.
    pub(crate) fn forge_in_tier(&self) {
        let forged = Output {
            topic: self.pipeline.tier_topic(self.tier),
            partition: None,
            key: None,
            value: Some("forged".into()),
            headers: Headers::new(),
        };
        let producer = Producer::new(&self.settings).unwrap();
        runtime().block_on(producer.send(&forged)).unwrap();
    }

    pub(crate) fn start(&mut self, stage: Stage, plant_defect: PlantDefect) {
        let pipeline = &self.pipeline;
        let (name, group, topics) = match stage {
            Stage::Worker => ("worker", pipeline.worker_group(""), pipeline.worker_topics(false)),
            Stage::Relay => (
                "relay",
                retry_tier_group("", self.tier),
                vec![pipeline.tier_topic(self.tier)],
            ),
        };
        let spec = LaneSpec {
            name: name.into(),
            group,
            topics,
            batch: 100,
            grace: Duration::from_secs(1),
            changelog: None,
            if_recreated: IfRecreated::ReadFromBeginning,
            if_fenced: IfFenced::End,
        };
        let stop = CancellationToken::new();
        let machine = StageProcessor {
            stage,
            pipeline: pipeline.clone(),
            plant_defect,
            held: Vec::new(),
        };
        let watch = TopicWatch::start(&self.settings).unwrap();
        let context = LaneContext::new(self.settings.clone(), Arc::new(()), watch, stop.clone());
        let lane = Lane::new(context, spec, machine);
        self.running
            .push((stop, thread::spawn(move || lane.run().unwrap())));
    }

    pub(crate) fn stop(&mut self) {
        for (stop, thread) in self.running.drain(..) {
            stop.cancel();
            thread.join().unwrap();
        }
    }
}

pub(crate) fn change_headers(output: &mut Output, change: impl FnOnce(&mut HeaderList)) {
    let headers = output.headers.iter();
    let mut list = headers
        .map(|(name, value)| (name.to_owned(), value.map(<[u8]>::to_vec)))
        .collect();
    change(&mut list);
    output.headers = list
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_deref()))
        .collect();
}

/// Holds all records in memory and decides in each round which of them to complete.
struct StageProcessor {
    stage: Stage,
    pipeline: Pipeline,
    plant_defect: PlantDefect,
    held: Vec<(AssignmentId, Record)>,
}

impl StageProcessor {
    /// The outputs for a record; `None` while it has to wait.
    fn decide(&self, record: &Record, now: Timestamp) -> Option<Vec<Output>> {
        let value = record.value.clone().unwrap_or_default();
        let word = std::str::from_utf8(&value)
            .unwrap()
            .split(' ')
            .next()
            .unwrap()
            .to_owned();
        let mut outputs = match self.stage {
            Stage::Worker => self.work(record, &word, now)?,
            Stage::Relay => self.relay(record, &word, now)?,
        };
        (self.plant_defect)(self.stage, &word, &mut outputs);
        Some(outputs)
    }

    fn work(&self, record: &Record, word: &str, now: Timestamp) -> Option<Vec<Output>> {
        let arrival = match Arrival::read(&self.pipeline, record) {
            Ok(arrival) => arrival,
            Err(failure) => return Some(vec![reject(&self.pipeline, record, &failure, now)]),
        };
        let is_first = arrival.failed_attempts == 0;
        let transient = || Outcome::Failed(Failure::transient("http.503", "busy"));
        let context = RouteContext {
            pipeline: &self.pipeline,
            arrival: &arrival,
            trace: None,
            now,
            random: 0.5,
            partitions: &|_| Some(4),
        };
        let routed = |outcome| context.route(record, outcome).outputs;
        Some(match word {
            "stay" => return None,
            "due" if !is_first => return None,
            "dead" | "dead-changed" => routed(Outcome::Failed(Failure::permanent("http.400", "no"))),
            "fine" | "lost" | "doubled" | "output-changed" => routed(Outcome::unchanged()),
            "both" => [routed(Outcome::unchanged()), routed(transient())].concat(),
            _ if is_first => routed(transient()),
            _ => routed(Outcome::unchanged()),
        })
    }

    fn relay(&self, record: &Record, word: &str, now: Timestamp) -> Option<Vec<Output>> {
        let due = ReservedHeaders::read(record)
            .and_then(|reserved| reserved.process_after(now, self.pipeline.max_wait));
        match due {
            Err(failure) => Some(vec![reject(&self.pipeline, record, &failure, now)]),
            Ok(_) if matches!(word, "tier" | "both") => None,
            Ok(due) if due > now && word != "early" => None,
            Ok(_) => {
                let Record {
                    key, value, headers, ..
                } = record.clone();
                Some(vec![Output {
                    topic: self.pipeline.return_topic(),
                    partition: None,
                    key,
                    value,
                    headers,
                }])
            }
        }
    }
}

impl Processor for StageProcessor {
    fn assigned(&mut self, _assignment: AssignmentId, _topic: &Arc<str>, _partition: i32) {}

    fn revoked(&mut self, assignment: AssignmentId) {
        self.held.retain(|(id, _)| *id != assignment);
    }

    fn capacity(&self, _assignment: AssignmentId) -> usize {
        10_000
    }

    fn accept(&mut self, assignment: AssignmentId, record: Record, _now: Timestamp) {
        self.held.push((assignment, record));
    }

    fn finish(&mut self, now: Timestamp, limit: usize, batch: &mut TransactionBatch) {
        let mut kept = Vec::new();
        for (assignment, record) in std::mem::take(&mut self.held) {
            let decided = (batch.completed.len() < limit)
                .then(|| self.decide(&record, now))
                .flatten();
            match decided {
                Some(outputs) => {
                    batch.outputs.extend(outputs);
                    batch.completed.push((assignment, record.position.offset));
                }
                None => kept.push((assignment, record)),
            }
        }
        self.held = kept;
    }

    fn committed(&mut self, _now: Timestamp) {}

    fn next_due(&self) -> Option<Timestamp> {
        None
    }

    fn is_busy(&self) -> bool {
        false
    }
}
