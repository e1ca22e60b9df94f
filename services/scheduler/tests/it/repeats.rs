//! Idempotency keys that are repeated in a backlog of large jobs: the changes of one transaction reach the index in several parts.

use redeliver_testkit::{ChaosPermit, chaos_random};

use crate::env::SchedulerEnv;
use crate::oracle::JobSpec;
use crate::requests::{Request, in_millis};

const KEYS: usize = 8_000;
/// The size of a job's data in bytes. Of these jobs, a transaction has more than the index gets at once.
const DATA: usize = 4_000;
/// How many keys after a request its repetition comes at least, and at most.
const LAG: std::ops::Range<usize> = 300..KEYS;

#[test]
fn repeated_keys_are_accepted_once() {
    let _permit = ChaosPermit::acquire();
    let mut random = chaos_random("repeats");
    let builder = SchedulerEnv::builder("repeats").partitions(1);
    let env = SchedulerEnv::new(builder.set("scheduler.window", "1s"));
    env.create_topics();
    // Far enough ahead for all keys to be looked up in the index.
    let due = in_millis(25_000);
    let request = |key: usize| {
        let job = JobSpec::new("crawl", vec![b'x'; DATA]).at(due);
        Request::protobuf(job.idempotency_key(key.to_string()))
    };
    let mut sent = Vec::with_capacity(2 * KEYS);
    let mut requests = Vec::new();
    for key in 0..KEYS {
        requests.push(request(key));
        let lag = random.usize(LAG);
        if let Some(earlier) = key.checked_sub(lag) {
            requests.push(request(earlier));
        }
        if requests.len() >= 1_000 {
            sent.extend(env.send(std::mem::take(&mut requests)));
        }
    }
    sent.extend(env.send(requests));
    let _scheduler = env.start("a");
    let report = env.settle(sent);
    assert_eq!(report.dispatched, KEYS + 1, "{report}");
}
