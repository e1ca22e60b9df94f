//! Applications with a rate, whose jobs are spread over time, and paused applications. Neither delays other applications.

use std::collections::BTreeMap;
use std::time::Duration;

use redeliver_core::job::Priority;
use redeliver_core::{JobId, Record, Timestamp};
use redeliver_testkit::eventually;

use crate::env::{DEADLINE, SchedulerEnv, header};
use crate::oracle::JobSpec;
use crate::requests::{Request, in_millis};

const LIMITED: &str = "mail";
const OTHER: &str = "sms";
/// Jobs per second in each partition.
const RATE: i32 = 2;
const JOBS: i32 = 10;

#[test]
fn jobs_beyond_rate_delay_no_others() {
    let partitions = 3;
    let builder = SchedulerEnv::builder("rate").partitions(3);
    let rate = (RATE * partitions).to_string();
    let env = SchedulerEnv::new(builder.set(&format!("scheduler.apps.{LIMITED}.rate"), &rate));
    let mut scheduler = env.start("a");
    let due = in_millis(500);
    let job = |app: &str, n: i32| {
        let spec = JobSpec::new(app, format!("{n}")).at(due);
        Request::protobuf(spec).partition(n % partitions)
    };
    let jobs = (0..JOBS * partitions).flat_map(|n| [job(LIMITED, n), job(OTHER, n)]);
    let mut sent = env.send(jobs.collect());
    let rate_limited =
        format!("redeliver_scheduler_rate_limited_jobs{{lane=\"scheduler-0\",app=\"{LIMITED}\"}}");
    eventually("jobs are rate-limited", DEADLINE, || {
        match scheduler.metric(&rate_limited) {
            0 => Err("none"),
            _ => Ok(()),
        }
    });
    let mut watch = env.watch();
    watch.settle(&mut sent);

    let mut times: BTreeMap<(&str, i32), Vec<Timestamp>> = BTreeMap::new();
    for record in &watch.seen.apps {
        let mut apps = [LIMITED, OTHER].into_iter();
        let Some(app) = apps.find(|app| record.position.topic == env.topics.apps[*app]) else {
            continue;
        };
        let shard = header::<JobId>(record, "job-id").shard();
        let at = header(record, "dispatched-at");
        times.entry((app, shard)).or_default().push(at);
    }
    let allowed = Duration::from_millis(1_000) / RATE.unsigned_abs();
    let burst = usize::try_from(RATE).unwrap();
    for shard in 0..partitions {
        let limited = times.get_mut(&(LIMITED, shard)).unwrap();
        limited.sort_unstable();
        assert_eq!(limited.len(), usize::try_from(JOBS).unwrap());
        // No more than in a burst, and then one for each token.
        for (n, at) in limited.iter().enumerate().skip(burst) {
            let tokens = u32::try_from(n + 1 - burst).unwrap();
            let earliest = limited[0].after(allowed * tokens);
            // The times are whole milliseconds.
            assert!(at.after(Duration::from_millis(2)) >= earliest, "{n}: {limited:?}");
        }
    }
    let last = |app| {
        let of_app = times.iter().filter(|((of, _), _)| *of == app);
        of_app.flat_map(|(_, times)| times).max().unwrap()
    };
    assert!(last(OTHER) < last(LIMITED), "{times:?}");
    eventually("no job is rate-limited", DEADLINE, || {
        match scheduler.metric(&rate_limited) {
            0 => Ok(()),
            jobs => Err(jobs),
        }
    });
}

#[test]
fn resumed_application_dispatches_by_priority() {
    // More than one turn can dispatch.
    const OF_EACH: usize = 600;
    let env = SchedulerEnv::new(SchedulerEnv::builder("paused").partitions(1));
    let setting = format!("scheduler.apps.{LIMITED}.paused=true");
    let mut paused = env.test.start("scheduler", "a", &["--set", &setting]);
    let priorities = [Priority::Low, Priority::Normal, Priority::High];
    let due = in_millis(0);
    let jobs = (0..3 * OF_EACH).map(|n| {
        let spec = JobSpec::new(LIMITED, format!("{n}")).at(due);
        Request::protobuf(spec.priority(priorities[n % 3]))
    });
    let mut sent = env.send(jobs.collect());
    let others = (0..JOBS).map(|n| Request::protobuf(JobSpec::new(OTHER, format!("{n}"))));
    let others = env.send(others.collect());
    let mut watch = env.watch();
    watch.until_jobs_ended(others.len());
    let jobs = format!("redeliver_scheduler_paused_jobs{{lane=\"scheduler-0\",app=\"{LIMITED}\"}}");
    eventually("all jobs wait", DEADLINE, || match paused.metric(&jobs) {
        count if count == sent.len() as u64 => Ok(()),
        count => Err(count),
    });
    paused.until_ready_but(&format!("paused applications: {LIMITED}"));
    paused.shut_down();
    let _resumed = env.start("a");
    sent.extend(others);
    watch.settle(&mut sent);
    let limited = watch.seen.apps.iter();
    let mut limited: Vec<_> = limited
        .filter(|record| record.position.topic == env.topics.apps[LIMITED])
        .collect();
    limited.sort_by_key(|record| record.position.offset);
    let first = |priority: Priority| {
        let is_it = |record: &&Record| header::<Priority>(record, "job-priority") == priority;
        limited.iter().position(is_it).unwrap()
    };
    // A job may be overtaken for a second at least.
    assert_eq!(
        [Priority::High, Priority::Normal, Priority::Low].map(first),
        [0, OF_EACH, 2 * OF_EACH]
    );
}
