//! How the processes of a pipeline share the source and the due topic.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::thread;

use redeliver_core::{Outcome, Pipeline, Record};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_runtime::Config;
use redeliver_runtime::listen::Listener;
use redeliver_testkit::{brokers, eventually, http, unique};
use redeliver_worker::{Attempt, Handler};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tower::{BoxError, service_fn};

use crate::handler::{DEADLINE, IN_FLIGHT, by_value, output, work_with};

const PARTITIONS: i32 = 4;

/// The topic and the number of each partition that a process owns.
type Owned = BTreeSet<(String, i32)>;

/// A pipeline whose topics have four partitions each.
struct Shared {
    pipeline: Pipeline,
    is_static: bool,
    runtime: Runtime,
    kafka: KafkaSettings,
    /// Values of the records of which the handler was called, with the number of calls.
    calls: Arc<Mutex<BTreeMap<String, u32>>>,
}

impl Shared {
    fn new(is_static: bool) -> Self {
        Self {
            pipeline: Pipeline::new(&unique("shared")),
            is_static,
            runtime: Runtime::new().unwrap(),
            kafka: KafkaSettings::new(brokers(), "sharing-test"),
            calls: Arc::default(),
        }
    }

    fn config(&self, instance: &str) -> Arc<Config> {
        let name = &self.pipeline.name;
        let file = format!(
            "instance: {name}-{instance}\nadmin: {{ listen: 127.0.0.1:0 }}\n\
             kafka:\n  brokers: '{}'\n  static_membership: {}\n  session_timeout: 6s\n  \
             topics: {{ create: true, partitions: {PARTITIONS} }}\n\
             pipelines: {{ {name}: {{}} }}\n",
            brokers(),
            self.is_static,
        );
        Arc::new(Config::from_yaml(&file).unwrap())
    }

    /// Starts a process whose handler succeeds.
    fn start_default(&self, instance: &str) -> Process {
        let calls = self.calls.clone();
        let handler = service_fn(move |attempt: Attempt| {
            *calls.lock().unwrap().entry(value(&attempt.record)).or_default() += 1;
            async { Ok::<_, BoxError>(Outcome::unchanged()) }
        });
        self.start_with(instance, IN_FLIGHT, handler)
    }

    /// As [`Shared::start_default`], and waits until the process is ready.
    #[track_caller]
    fn start(&self, instance: &str) -> Process {
        let process = self.start_default(instance);
        process.until_ready();
        process
    }

    fn start_with<H: Handler>(&self, instance: &str, in_flight: usize, handler: H) -> Process {
        let config = self.config(instance);
        let guard = self.runtime.enter();
        let admin = Listener::bind("admin.listen", config.admin.listen).unwrap();
        drop(guard);
        let address = admin.local_addr().unwrap();
        let stop = CancellationToken::new();
        let name = self.pipeline.name.to_string();
        let working = work_with(config, name, handler, in_flight, admin, stop.clone());
        Process {
            admin: address,
            stop,
            working: self.runtime.spawn(working),
        }
    }

    fn stop(&self, process: Process) {
        process.stop.cancel();
        self.runtime.block_on(process.working).unwrap();
    }

    fn topics(&self) -> [Arc<str>; 2] {
        [self.pipeline.source.clone(), self.pipeline.due_topic()]
    }

    /// Writes one record to each partition of a topic. Its value is the prefix with the number of the partition.
    fn fill(&self, topic: &Arc<str>, prefix: &str) {
        let producer = Producer::new(&self.kafka).unwrap();
        for partition in 0..PARTITIONS {
            let output = output(topic, Some(partition), format!("{prefix} {partition}"));
            self.runtime.block_on(producer.send(&output)).unwrap();
        }
    }

    /// Waits until these processes own all partitions, each its fair part of each topic, and are ready. Returns what
    /// each of them owns.
    #[track_caller]
    fn until_fair(&self, processes: &[&Process]) -> Vec<Owned> {
        let count = i32::try_from(processes.len()).unwrap();
        let fair = PARTITIONS / count..=(PARTITIONS + count - 1) / count;
        eventually("each process owns its fair part of both topics", DEADLINE, || {
            let owned: Vec<Owned> = processes.iter().map(|process| process.owned()).collect();
            let is_fair = self.topics().iter().all(|topic| {
                let of_topic = |owned: &Owned| owned.iter().filter(|(owned, _)| **owned == **topic).count();
                let mut parts = owned.iter().map(of_topic);
                let total: usize = parts.clone().sum();
                i32::try_from(total) == Ok(PARTITIONS)
                    && parts.all(|part| i32::try_from(part).is_ok_and(|part| fair.contains(&part)))
            });
            let all: Owned = owned.iter().flatten().cloned().collect();
            let is_complete = i32::try_from(all.len()) == Ok(2 * PARTITIONS);
            if is_fair && is_complete && processes.iter().all(|process| process.is_ready()) {
                Ok(owned)
            } else {
                Err(format!("{owned:?}"))
            }
        })
    }
}

/// A running worker.
struct Process {
    admin: SocketAddr,
    stop: CancellationToken,
    working: JoinHandle<()>,
}

impl Process {
    fn is_ready(&self) -> bool {
        http::get(self.admin, "/readyz").is_ok_and(|(status, _)| status == 200)
    }

    #[track_caller]
    fn until_ready(&self) {
        eventually("the process is ready", DEADLINE, || {
            match http::get(self.admin, "/readyz") {
                Ok((200, _)) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }

    /// The partitions of which the process reports the lag.
    fn owned(&self) -> Owned {
        let Ok((200, metrics)) = http::get(self.admin, "/metrics") else {
            return Owned::new();
        };
        metrics.lines().filter_map(lag_of).collect()
    }
}

/// Parses `redeliver_lane_lag{topic="t",partition="0"} 0`.
fn lag_of(line: &str) -> Option<(String, i32)> {
    let labels = line.strip_prefix("redeliver_lane_lag{")?;
    let label = |name: &str| labels.split(&format!("{name}=\"")).nth(1)?.split('"').next();
    Some((label("topic")?.to_owned(), label("partition")?.parse().ok()?))
}

fn value(record: &Record) -> String {
    String::from_utf8(record.value.clone().unwrap_or_default().into()).unwrap()
}

#[test]
fn processes_own_fair_parts() {
    let scenario = |is_static| {
        let shared = Shared::new(is_static);
        let first = shared.start("0");
        shared.until_fair(&[&first]);
        let second = shared.start("1");
        shared.until_fair(&[&first, &second]);
        let third = shared.start("2");
        shared.until_fair(&[&first, &second, &third]);
        // The partitions of a static member move after the session timeout.
        shared.stop(third);
        shared.until_fair(&[&first, &second]);
        shared.stop(second);
        shared.until_fair(&[&first]);
        shared.stop(first);
    };
    thread::scope(|scope| {
        for is_static in [true, false] {
            scope.spawn(move || scenario(is_static));
        }
    });
}

#[test]
fn static_restart_moves_no_partition() {
    let shared = Shared::new(true);
    let (mut first, second) = (shared.start("0"), shared.start("1"));
    let before = shared.until_fair(&[&first, &second]);
    shared.stop(first);
    first = shared.start_default("0");
    eventually("the process is ready again", DEADLINE, || {
        assert_eq!(second.owned(), before[1]);
        if first.is_ready() {
            Ok(())
        } else {
            Err("not ready")
        }
    });
    assert_eq!(shared.until_fair(&[&first, &second]), before);
    shared.stop(first);
    shared.stop(second);
}

#[test]
fn busy_source_leaves_due_topic_room() {
    let shared = Shared::new(false);
    let released = CancellationToken::new();
    let handler = service_fn({
        let (calls, released) = (shared.calls.clone(), released.clone());
        move |attempt: Attempt| {
            *calls.lock().unwrap().entry(value(&attempt.record)).or_default() += 1;
            let released = released.clone();
            async move {
                released.cancelled().await;
                Ok::<_, BoxError>(Outcome::unchanged())
            }
        }
    });
    let process = shared.start_with("0", 4, handler);
    process.until_ready();
    let [source, due] = shared.topics();
    // More records than may be in flight.
    for round in 0..4 {
        shared.fill(&source, &format!("new {round}"));
    }
    let called = || shared.calls.lock().unwrap().len();
    eventually("attempts are running", DEADLINE, || match called() {
        3 | 4 => Ok(()),
        calls => Err(calls),
    });
    shared.fill(&due, "due");
    eventually("records of the due topic are processed", DEADLINE, || {
        let letters = by_value(&shared.kafka, &shared.pipeline.dead_letter_topic());
        match letters.len() {
            4 => Ok(()),
            letters => Err(letters),
        }
    });
    assert!(called() <= 4, "{}", called());
    released.cancel();
    eventually("all attempts end", DEADLINE, || match called() {
        16 => Ok(()),
        calls => Err(calls),
    });
    shared.stop(process);
}
