//! How the processes of a pipeline share the source and the due topic.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;

use redeliver_core::{Outcome, Pipeline};
use redeliver_runtime::Config;
use redeliver_runtime::listen::Listener;
use redeliver_testkit::{brokers, ensure, eventually, http, unique, until_seen};
use redeliver_worker::Attempt;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tower::{BoxError, service_fn};

use crate::handler::{DEADLINE, work_with};

const PARTITIONS: i32 = 4;

/// The topic and the number of each partition that a process owns.
type Owned = BTreeSet<(String, i32)>;

/// A pipeline whose topics have four partitions each.
struct Shared {
    pipeline: Pipeline,
    is_static: bool,
    runtime: Runtime,
}

impl Shared {
    fn new(is_static: bool) -> Self {
        Self {
            pipeline: Pipeline::new(&unique("shared")),
            is_static,
            runtime: Runtime::new().unwrap(),
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
        let config = self.config(instance);
        let guard = self.runtime.enter();
        let admin = Listener::bind("admin.listen", config.admin.listen).unwrap();
        drop(guard);
        let address = admin.local_addr().unwrap();
        let stop = CancellationToken::new();
        let name = self.pipeline.name.to_string();
        let handler = service_fn(async |_: Attempt| Ok::<_, BoxError>(Outcome::unchanged()));
        let working = work_with(config, name, handler, admin, stop.clone());
        Process {
            admin: address,
            stop,
            working: self.runtime.spawn(working),
        }
    }

    /// As [`Shared::start_default`], and waits until the process is ready.
    #[track_caller]
    fn start(&self, instance: &str) -> Process {
        let process = self.start_default(instance);
        process.until_ready();
        process
    }

    fn stop(&self, process: Process) {
        process.stop.cancel();
        self.runtime.block_on(process.working).unwrap();
    }

    fn topics(&self) -> [Arc<str>; 2] {
        [self.pipeline.source.clone(), self.pipeline.due_topic()]
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
            let holds = is_fair && is_complete && processes.iter().all(|process| process.is_ready());
            ensure(holds, format!("{owned:?}")).map(|()| owned)
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
        let ready = || http::get(self.admin, "/readyz").ok();
        until_seen("the process is ready", ready, |ready| {
            matches!(ready, Some((200, _)))
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
        ensure(first.is_ready(), "not ready")
    });
    assert_eq!(shared.until_fair(&[&first, &second]), before);
    shared.stop(first);
    shared.stop(second);
}
