//! The wall clock of a scheduler in this process steps.

use std::sync::Arc;

use redeliver_core::headers::{DISPATCHED_AT, SCHEDULED_TIME};
use redeliver_core::{AdjustableClock, HumanDuration, Timestamp};
use redeliver_runtime::Config;
use redeliver_runtime::cli::Start;
use redeliver_runtime::health::Health;
use redeliver_runtime::listen::Listener;
use redeliver_runtime::tasks::TaskError;
use redeliver_scheduler::index::memory::MemoryIndex;
use redeliver_service::{Host, topics};
use redeliver_testkit::{ensure, eventually};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::env::{DEADLINE, SchedulerEnv, header};
use crate::oracle::JobSpec;
use crate::recurring::EachSecond;
use crate::requests::{Request, in_millis, now};

const HOUR: i64 = 3_600_000;

struct Running {
    clock: Arc<AdjustableClock>,
    health: Health,
    stop: CancellationToken,
    task: JoinHandle<Result<(), TaskError>>,
}

impl Running {
    fn start(env: &SchedulerEnv, confirm: HumanDuration) -> Self {
        let clock = Arc::new(AdjustableClock::default());
        let stop = CancellationToken::new();
        let yaml = format!("instance: {}\n{}", env.test.name(), env.test.yaml());
        let mut config = Config::from_yaml(&yaml).unwrap();
        config.clock.confirm = confirm;
        let host = env.block_on(async {
            let start = Start::new(
                Arc::new(config),
                stop.clone(),
                Listener::bind("admin.listen", ([127, 0, 0, 1], 0).into()).unwrap(),
            );
            let mut host = Host::new("scheduler", start);
            host.set_clock(clock.clone());
            let spec = topics::of_scheduler(&host.config);
            host.ensure_topics(&spec).await.unwrap();
            redeliver_scheduler::mount(&mut host, MemoryIndex::new())
                .await
                .unwrap();
            host
        });
        let running = Self {
            clock,
            health: host.health.clone(),
            stop,
            task: env.spawn_task(host.run()),
        };
        eventually("the scheduler is ready", DEADLINE, || {
            let report = running.health.report();
            ensure(report.ready, format!("{report:?}"))
        });
        running
    }

    #[track_caller]
    fn until_clock_is(&self, expected: &str) {
        eventually("the readiness follows the clock", DEADLINE, || {
            let state = self.health.report().parts["clock"].clone();
            ensure(state.starts_with(expected), state)
        });
    }

    fn shut_down(self, env: &SchedulerEnv) {
        self.stop.cancel();
        env.block_on(self.task).unwrap().unwrap();
    }
}

fn job(text: &'static str, due: Timestamp) -> Request {
    Request::protobuf(JobSpec::new("mail", text).at(due))
}

#[test]
fn lasting_step_is_confirmed() {
    let env = SchedulerEnv::new(SchedulerEnv::builder("clock-lasts").partitions(1));
    let confirm = HumanDuration::from_secs(2);
    let running = Running::start(&env, confirm);
    let due = in_millis(1_800_000);
    env.send(vec![job("in half an hour", due)]);
    let mut watch = env.watch();
    watch.until_known(1);
    let stepped = now();
    running.clock.set_error(HOUR);
    watch.until_jobs_ended(1);
    watch.look();
    let [dispatched] = &watch.seen.apps[..] else {
        panic!("{:?}", watch.seen.apps)
    };
    assert!(header::<Timestamp>(dispatched, DISPATCHED_AT) >= due);
    // The clocks of the system may run a little differently.
    let held = dispatched.timestamp.unwrap().since(stepped);
    assert!(held >= confirm.duration().mul_f64(0.9), "{held:?}");

    running.clock.set_error(0);
    let due = in_millis(100);
    env.send(vec![job("after the step backwards", due)]);
    watch.until_jobs_ended(2);
    watch.look();
    assert!(watch.seen.apps[1].timestamp.unwrap() >= due);
    running.shut_down(&env);
}

#[test]
#[ignore = "long"]
fn repeated_steps_dispatch_each_job_once() {
    let env = SchedulerEnv::new(SchedulerEnv::builder("clock-back-and-forth").partitions(2));
    let running = Running::start(&env, HumanDuration::from_secs(1));
    let mut watch = env.watch();
    let (mut sent, mut ended) = (0, 0);
    for error in [
        2 * HOUR,
        0,
        -2 * HOUR,
        2 * HOUR,
        -2 * HOUR,
        HOUR,
        0,
        -HOUR,
        2 * HOUR,
        0,
    ] {
        // By the clock of the scheduler after the step: soon, and during a later step.
        for ahead in [3_000, HOUR + 1_000] {
            let due = Timestamp::from_millis(now().as_millis() + error + ahead);
            env.send(vec![job("across steps", due)]);
            sent += 1;
        }
        watch.until_known(sent);
        running.clock.set_error(error);
        running.until_clock_is("waiting: the wall clock stepped");
        running.until_clock_is("ready");
        ended += 1;
        watch.until_jobs_ended(ended);
    }
    running.clock.set_error(4 * HOUR);
    watch.until_jobs_ended(sent);
    watch.look();
    assert_eq!(watch.seen.apps.len(), sent);
    for record in &watch.seen.apps {
        let dispatched_at = header::<Timestamp>(record, DISPATCHED_AT);
        let due = header::<Timestamp>(record, SCHEDULED_TIME);
        assert!(dispatched_at >= due, "{record:?}");
    }
    running.shut_down(&env);
}

#[test]
fn lasting_step_skips_no_occurrence() {
    const STEP: i64 = 4_000;
    let env = SchedulerEnv::new(SchedulerEnv::builder("clock-recurring").partitions(2));
    let running = Running::start(&env, HumanDuration::from_secs(1));
    let schedules = EachSecond {
        schedules: 3,
        occurrences: 13,
    };
    schedules.create(&env);
    let mut watch = env.watch();
    schedules.until(&mut watch, 3);
    for (error, occurrences) in [(STEP, 9), (0, 11)] {
        running.clock.set_error(error);
        running.until_clock_is("waiting: the wall clock stepped 4.0 s");
        running.until_clock_is("ready");
        schedules.until(&mut watch, occurrences);
    }
    schedules.until_finished(&mut watch);
    running.shut_down(&env);
}
