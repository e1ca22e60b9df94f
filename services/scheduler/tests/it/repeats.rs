//! Idempotency keys that are repeated in a backlog of large jobs: the changes of one transaction reach the index in several parts.

use std::ops::Range;

use redeliver_testkit::{ChaosPermit, chaos_random};

use crate::env::SchedulerEnv;
use crate::oracle::JobSpec;
use crate::requests::{Request, distance, in_millis, noise};

#[test]
fn repeated_keys_are_accepted_once() {
    // Of these jobs, a transaction has more than the index gets at once.
    accept_once("repeats", 8_000, 4_000..4_001);
}

#[test]
fn repeated_large_jobs_are_accepted_once() {
    accept_once("large-repeats", 200, 1_000..900_001);
}

/// Each of `keys` is repeated, at any distance, and some again after their jobs have been dispatched. `data` is the size of a job in bytes.
fn accept_once(name: &str, keys: usize, data: Range<usize>) {
    let _permit = ChaosPermit::acquire();
    let mut random = chaos_random(name);
    let builder = SchedulerEnv::builder(name).partitions(1);
    let env = SchedulerEnv::new(builder.set("scheduler.window", "1s"));
    env.create_topics();
    let noise = noise(&mut random, data.end);
    // Far enough ahead for all keys to be looked up in the index.
    let due = in_millis(25_000);
    let mut jobs: Vec<JobSpec> = Vec::with_capacity(keys);
    let mut sent = Vec::with_capacity(3 * keys);
    let mut requests = Vec::new();
    for key in 0..keys {
        let size = random.usize(data.clone());
        let job = JobSpec::new("crawl", noise[..size].to_owned()).at(due);
        jobs.push(job.idempotency_key(key.to_string()));
        // Few, so that new jobs fill the transactions.
        let any = (key % 10 == 0).then(|| key - distance(&mut random, jobs.len()));
        // Most find their key in neither the same turn nor a complete index.
        let far = key.checked_sub(random.usize(keys / 25..keys));
        let keys = [Some(key), any, far].into_iter().flatten();
        requests.extend(keys.map(|key| Request::protobuf(jobs[key].clone())));
        if requests.len() >= 1_000 {
            sent.extend(env.send(std::mem::take(&mut requests)));
        }
    }
    sent.extend(env.send(requests));
    let _scheduler = env.start("a");
    let mut watch = env.watch();
    watch.until_jobs_ended(keys);
    sent.extend(env.send(jobs.into_iter().step_by(10).map(Request::protobuf).collect()));
    let report = watch.settle(&mut sent);
    assert_eq!(report.dispatched, keys + 1, "{report}");
    assert_eq!(report.late_duplicates, keys / 10, "{report}");
}
