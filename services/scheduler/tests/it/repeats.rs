//! Idempotency keys that are repeated in a backlog of large jobs: the changes of one transaction reach the index in several parts.

use redeliver_testkit::chaos_with_permit;

use crate::env::SchedulerEnv;
use crate::oracle::JobSpec;
use crate::requests::{Request, distance, in_millis, noise};

/// Each key is repeated, at any distance, and some again after their jobs have been dispatched.
#[test]
fn repeated_keys_are_accepted_once() {
    const KEYS: usize = 200;
    const MAX_DATA: usize = 900_001;
    let (_permit, mut random) = chaos_with_permit("repeats");
    let builder = SchedulerEnv::builder("repeats").partitions(1);
    let env = SchedulerEnv::new(builder.set("scheduler.window", "1s"));
    env.create_topics();
    let noise = noise(&mut random, MAX_DATA);
    // Far enough ahead for all keys to be looked up in the index.
    let due = in_millis(15_000);
    let mut jobs: Vec<JobSpec> = Vec::with_capacity(KEYS);
    let mut requests = Vec::new();
    for key in 0..KEYS {
        let size = random.usize(1_000..MAX_DATA);
        let job = JobSpec::new("crawl", noise[..size].to_owned()).at(due);
        jobs.push(job.idempotency_key(key.to_string()));
        // Few, so that new jobs fill the transactions.
        let any = (key % 10 == 0).then(|| key - distance(&mut random, jobs.len()));
        // Most find their key in neither the same turn nor a complete index.
        let far = key.checked_sub(random.usize(KEYS / 25..KEYS));
        let keys = [Some(key), any, far].into_iter().flatten();
        requests.extend(keys.map(|key| Request::protobuf(jobs[key].clone())));
    }
    let mut sent = env.send(requests);
    let _scheduler = env.start("a");
    let mut watch = env.watch();
    watch.until_jobs_ended(KEYS);
    sent.extend(env.send(jobs.into_iter().step_by(10).map(Request::protobuf).collect()));
    let report = watch.settle(&mut sent);
    assert_eq!(report.dispatched, KEYS + 1, "{report}");
    assert_eq!(report.late_duplicates, KEYS / 10, "{report}");
}
