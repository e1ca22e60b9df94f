//! A paused application, which delays no other one, and dispatches by priority when it is resumed.

use redeliver_core::Record;
use redeliver_core::job::Priority;

use crate::env::{SchedulerEnv, header};
use crate::oracle::JobSpec;
use crate::requests::{Request, in_millis};

const PAUSED: &str = "mail";
const OTHER: &str = "sms";
const JOBS: usize = 10;

#[test]
fn resumed_application_dispatches_by_priority() {
    // More than one turn can dispatch.
    const OF_EACH: usize = 600;
    let env = SchedulerEnv::new(SchedulerEnv::builder("paused").partitions(1));
    let setting = format!("scheduler.apps.{PAUSED}.paused=true");
    let mut paused = env.test.start("scheduler", "a", &["--set", &setting]);
    let priorities = [Priority::Low, Priority::Normal, Priority::High];
    let due = in_millis(0);
    let jobs = (0..3 * OF_EACH).map(|n| {
        let spec = JobSpec::new(PAUSED, format!("{n}")).at(due);
        Request::protobuf(spec.priority(priorities[n % 3]))
    });
    let mut sent = env.send(jobs.collect());
    let others = (0..JOBS).map(|n| Request::protobuf(JobSpec::new(OTHER, format!("{n}"))));
    let others = env.send(others.collect());
    let mut watch = env.watch();
    watch.until_jobs_ended(others.len());
    let jobs = format!("redeliver_scheduler_paused_jobs{{lane=\"scheduler-0\",app=\"{PAUSED}\"}}");
    paused.until_metric(&jobs, |count| count == sent.len() as u64);
    paused.until_ready_but(&format!("paused applications: {PAUSED}"));
    paused.shut_down();
    let _resumed = env.start("a");
    sent.extend(others);
    watch.settle(&mut sent);
    let dispatched = watch.seen.apps.iter();
    let mut dispatched: Vec<_> = dispatched
        .filter(|record| record.position.topic == env.topics.apps[PAUSED])
        .collect();
    dispatched.sort_by_key(|record| record.position.offset);
    let first = |priority: Priority| {
        let is_it = |record: &&Record| header::<Priority>(record, "job-priority") == priority;
        dispatched.iter().position(is_it).unwrap()
    };
    // A job may be overtaken for a second at least.
    assert_eq!(
        [Priority::High, Priority::Normal, Priority::Low].map(first),
        [0, OF_EACH, 2 * OF_EACH]
    );
}
