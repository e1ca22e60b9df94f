//! The wall clock of a retry tier in this process steps.

use std::sync::Arc;

use redeliver_core::headers::{
    ERROR_CLASS, ERROR_CODE, ERROR_MESSAGE, ERROR_TIMESTAMP, Origin, PROCESS_AFTER, RETURN_TOPIC,
    write_lineage,
};
use redeliver_core::{AdjustableClock, Clock as _, Headers, HumanDuration, Record, SystemClock, Timestamp};
use redeliver_retry_tier::RetryTierConfig;
use redeliver_runtime::cli::Start;
use redeliver_runtime::health::Health;
use redeliver_runtime::listen::Listener;
use redeliver_runtime::tasks::TaskError;
use redeliver_service::{Host, topics};
use redeliver_testkit::{ensure, eventually, until_seen};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder, load};

const HOUR: i64 = 3_600_000;

/// A retry tier that runs in this process.
struct Running {
    runtime: Runtime,
    clock: Arc<AdjustableClock>,
    health: Health,
    stop: CancellationToken,
    task: JoinHandle<Result<(), TaskError>>,
}

impl Running {
    fn start(pipe: &Pipe, confirm: HumanDuration) -> Self {
        let clock = Arc::new(AdjustableClock::default());
        let stop = CancellationToken::new();
        let mut env = pipe.env.clone();
        env.set("instance", pipe.name());
        let mut config = load(&env);
        config.clock.confirm = confirm;
        let runtime = Runtime::new().unwrap();
        let host = runtime.block_on(async {
            let listener = Listener::bind("admin.listen", ([127, 0, 0, 1], 0).into()).unwrap();
            let start = Start::new(Arc::new(config), stop.clone(), listener);
            let mut host = Host::new("retry-tier", start);
            host.set_clock(clock.clone());
            let needed = topics::of_all(&host.config);
            host.ensure_topics(&needed).await.unwrap();
            redeliver_retry_tier::mount(&mut host, &RetryTierConfig::default())
                .await
                .unwrap();
            host
        });
        let health = host.health.clone();
        let task = runtime.spawn(host.run());
        let running = Self {
            runtime,
            clock,
            health,
            stop,
            task,
        };
        eventually("the service is ready", DEADLINE, || {
            let report = running.health.report();
            ensure(report.ready, format!("{report:?}"))
        });
        running
    }

    #[track_caller]
    fn until_clock_is(&self, expected: &str) {
        eventually("the readiness follows the clock", DEADLINE, || {
            let state = self.health.report().parts["clock"].clone();
            let is_so = state.starts_with(expected);
            ensure(is_so, state)
        });
    }

    fn shut_down(self) {
        self.stop.cancel();
        self.runtime.block_on(self.task).unwrap().unwrap();
    }
}

fn waiting(pipe: &Pipe, due: Timestamp) -> Draft {
    let mut list = Headers::new();
    let origin = Origin {
        topic: "upstream".into(),
        partition: 0,
        offset: 7,
        timestamp: None,
    };
    write_lineage(&mut list, pipe.name(), &origin, 1);
    list.push_text(ERROR_CLASS, "transient");
    list.push_text(ERROR_CODE, "http.503");
    list.push_text(ERROR_MESSAGE, "busy");
    list.push_text(ERROR_TIMESTAMP, &SystemClock.now().to_string());
    list.push_text(PROCESS_AFTER, &due.to_string());
    list.push_text(RETURN_TOPIC, &pipe.pipeline.return_topic());
    Draft {
        headers: list,
        ..Draft::new("key", "waits")
    }
}

fn in_millis(millis: u64) -> Timestamp {
    SystemClock.now().after(std::time::Duration::from_millis(millis))
}

fn released(pipe: &Pipe) -> Vec<Record> {
    pipe.read(&[pipe.pipeline.due_topic()])
}

#[track_caller]
fn until_released(pipe: &Pipe, count: usize) -> Vec<Record> {
    until_seen("released", || released(pipe), |all| all.len() >= count)
}

#[test]
fn undone_step_releases_no_record_early() {
    let pipe = PipeBuilder::new("clock-undone").partitions(1).create();
    // Longer than the test: only undoing the step ends the hold.
    let running = Running::start(&pipe, HumanDuration::from_secs(3_600));
    running.clock.set_error(HOUR);
    running.until_clock_is("waiting: the wall clock stepped 3600.0 s forward");
    let due = in_millis(5_000);
    // A malformed record after the waiting one, in the same partition: once it is a dead letter, the lane has read both.
    let malformed = Draft::new("key", "malformed");
    pipe.produce_to(&pipe.first_tier(), vec![waiting(&pipe, due), malformed]);
    let dead_letters = [pipe.pipeline.dead_letter_topic()];
    let dead = || pipe.read(&dead_letters).len();
    until_seen("the malformed record", dead, |&count| count == 1);
    assert!(released(&pipe).is_empty());
    running.clock.set_error(0);
    running.until_clock_is("ready");
    // The timestamp is from the clock of the system.
    let records = until_released(&pipe, 1);
    assert!(records[0].timestamp.unwrap() >= due, "{records:?}");
    running.shut_down();
}
