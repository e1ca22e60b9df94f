//! A small pipeline of its own topics: a worker and a relay that do what the word in a record's value says,
//! built on the same lanes and decisions as the services.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use futures::future::join_all;
use redeliver_core::backoff::RetryPolicy;
use redeliver_core::headers::ReservedHeaders;
use redeliver_core::pipeline::{ReturnTo, retry_tier_group};
use redeliver_core::route::{Arrival, reject, route};
use redeliver_core::{Failure, Headers, Jitter, Outcome, Output, Pipeline, Record, Span, Timestamp};
use redeliver_kafka::producer::Producer;
use redeliver_kafka::topology::{self, TopicSettings, TopologySpec};
use redeliver_kafka::{
    AssignmentId, IfRecreated, KafkaSettings, Lane, LaneContext, LaneObserver, LaneSpec, Processor,
    TopicWatch, TransactionBatch,
};
use redeliver_testkit::unique;
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

/// What a record is to meet; the first word of its value.
pub(crate) type Word = &'static str;

/// Who is at work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Worker,
    Relay,
}

/// A record's headers, to be changed.
pub(crate) type HeaderList = Vec<(String, Option<Vec<u8>>)>;

/// Changes what a stage is about to write for a record with this word.
type Sabotage = fn(Stage, &str, &mut Vec<Output>);

pub(crate) struct Plant {
    pub(crate) settings: KafkaSettings,
    pub(crate) pipeline: Pipeline,
    tier: Span,
    running: Vec<(CancellationToken, JoinHandle<()>)>,
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

impl Plant {
    pub(crate) fn new(name: &str, return_to: ReturnTo) -> Self {
        let name = unique(name);
        let settings = KafkaSettings::new(redeliver_testkit::brokers(), name.clone());
        // All pipelines with a tier share the group of it; an odd delay keeps other tests out.
        let number = name
            .bytes()
            .fold(0_u64, |hash, byte| (hash * 31 + u64::from(byte)) % 997);
        let tier = Span::from_millis(1_001 + number);
        let pipeline = Pipeline {
            output: Some(format!("{name}-out").into()),
            return_to,
            policy: RetryPolicy::listed(vec![tier], Some(2), Jitter::None).unwrap(),
            ..Pipeline::new(&name)
        };
        let topics = TopicSettings {
            partitions: 3,
            replication: 1,
            retention: Span::from_secs(86_400),
            dead_letter_retention: Span::from_secs(86_400),
        };
        let spec = TopologySpec::for_pipelines(std::slice::from_ref(&pipeline), &topics);
        let client = settings.client();
        runtime()
            .block_on(topology::apply(&client, &spec, Duration::from_secs(30)))
            .unwrap();
        Self {
            settings,
            pipeline,
            tier,
            running: Vec::new(),
        }
    }

    /// Writes a record for each word; says which word is at which place.
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

    /// Writes the words so many times, at a pace that lets audits see records under way.
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
            // Some without a key.
            key: (!number.is_multiple_of(3)).then(|| format!("key-{}", number % 7).into()),
            value: Some(format!("{word} {number}").into()),
            headers: headers.into_iter().collect(),
        }
    }

    /// Writes a record to the tier that no worker has written.
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

    pub(crate) fn start(&mut self, stage: Stage, sabotage: Sabotage) {
        let pipeline = &self.pipeline;
        let (name, group, topics) = match stage {
            Stage::Worker => ("worker", pipeline.worker_group(), pipeline.worker_topics(false)),
            Stage::Relay => (
                "relay",
                retry_tier_group(self.tier),
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
        };
        let stop = CancellationToken::new();
        let machine = Machine {
            stage,
            pipeline: pipeline.clone(),
            sabotage,
            held: Vec::new(),
        };
        let watch = TopicWatch::start(&self.settings).unwrap();
        let context = LaneContext::new(self.settings.clone(), Arc::new(Quiet), watch, stop.clone());
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

struct Quiet;

impl LaneObserver for Quiet {}

/// Holds all records and asks of each, again and again, whether it is time.
struct Machine {
    stage: Stage,
    pipeline: Pipeline,
    sabotage: Sabotage,
    held: Vec<(AssignmentId, Record)>,
}

impl Machine {
    /// What is written for a record; nothing while it has to stay.
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
        (self.sabotage)(self.stage, &word, &mut outputs);
        Some(outputs)
    }

    fn work(&self, record: &Record, word: &str, now: Timestamp) -> Option<Vec<Output>> {
        let arrival = match Arrival::read(&self.pipeline, record) {
            Ok(arrival) => arrival,
            Err(failure) => return Some(reject(&self.pipeline, record, &failure, now).outputs),
        };
        let is_first = arrival.failed_attempts == 0;
        let transient = || Outcome::Failed(Failure::transient("http.503", "busy"));
        let routed = |outcome| route(&self.pipeline, record, &arrival, outcome, None, now, 0.5).outputs;
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
        let due =
            ReservedHeaders::read(record).and_then(|ours| ours.process_after(now, self.pipeline.max_wait));
        match due {
            Err(failure) => Some(reject(&self.pipeline, record, &failure, now).outputs),
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

impl Processor for Machine {
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

    fn finish(&mut self, now: Timestamp, limit: usize, turn: &mut TransactionBatch) {
        let mut kept = Vec::new();
        for (assignment, record) in std::mem::take(&mut self.held) {
            let decided = (turn.completed.len() < limit)
                .then(|| self.decide(&record, now))
                .flatten();
            match decided {
                Some(outputs) => {
                    turn.outputs.extend(outputs);
                    turn.completed.push((assignment, record.position.offset));
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
