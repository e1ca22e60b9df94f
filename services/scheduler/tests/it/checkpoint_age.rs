//! The age of an index's checkpoint decides whether a scheduler continues from it only if the state topic has more records.

use redeliver_core::{Headers, Output, Timestamp};
use redeliver_scheduler::codec;
use redeliver_testkit::{ensure, eventually, redis_url};

use crate::env::{DEADLINE, SchedulerEnv, far};
use crate::index::own_redis::{Raw, key};
use crate::oracle::JobSpec;
use crate::requests::{Request, now};

const DAY: i64 = 86_400_000;

struct Checkpoint<'a> {
    env: &'a SchedulerEnv,
    raw: Raw,
    key: String,
}

impl<'a> Checkpoint<'a> {
    fn of(env: &'a SchedulerEnv) -> Self {
        Self {
            raw: env.block_on(Raw::connect(&redis_url())),
            key: key(env.test.name(), 0, "meta"),
            env,
        }
    }

    fn field(&self, name: &str) -> Option<String> {
        let value = self.env.block_on(self.raw.call(&["HGET", &self.key, name]));
        value.into_string()
    }

    fn set(&self, name: &str, value: &str) {
        self.env
            .block_on(self.raw.call(&["HSET", &self.key, name, value]));
    }

    /// Makes the checkpoint this old, and marks the index: a rebuild deletes the mark.
    fn age(&self, days: i64) {
        let at = Timestamp::from_millis(now().as_millis() - days * DAY);
        self.set("at", &at.as_millis().to_string());
        self.set("not-rebuilt", "1");
    }

    fn is_rebuilt(&self) -> bool {
        self.field("not-rebuilt").is_none()
    }

    fn until_offset_is(&self, offset: i64) {
        eventually("the index contains the records", DEADLINE, || {
            let found: i64 = self.field("offset").unwrap_or_default().parse().unwrap_or(-1);
            ensure(found >= offset, found)
        });
    }

    fn is_recent(&self) -> bool {
        let at: i64 = self.field("at").unwrap().parse().unwrap();
        now().as_millis() - at < DAY / 2
    }
}

#[test]
fn only_incomplete_index_can_be_old() {
    let env = SchedulerEnv::new(SchedulerEnv::builder("old-checkpoint").partitions(1));
    let checkpoint = Checkpoint::of(&env);
    let mut scheduler = env.start("a");
    let jobs = (0..3).map(|n| Request::protobuf(JobSpec::new("mail", n.to_string()).after(3_600_000)));
    env.send(jobs.collect());
    checkpoint.until_offset_is(3);
    scheduler.shut_down();

    // Nothing was written since: the age does not matter, and the new owner renews the time.
    checkpoint.age(400);
    scheduler.start_again();
    scheduler.until_ready();
    eventually("the checkpoint is renewed", DEADLINE, || {
        ensure(checkpoint.is_recent(), "old")
    });
    assert!(!checkpoint.is_rebuilt(), "{}", scheduler.output());
    scheduler.shut_down();

    // One could be the marker of a transaction.
    let records = [1_000, 2_000].map(|offset| {
        let job = far(offset, &env);
        Output {
            topic: env.topics.state.clone(),
            partition: Some(0),
            key: Some(job.id.to_string().into()),
            value: Some(codec::encode(&job)),
            headers: Headers::new(),
        }
    });
    env.write(&records);
    // The topic keeps tombstones for 7 days, so the limit is 3.5 days.
    checkpoint.age(4);
    let before: i64 = checkpoint.field("offset").unwrap().parse().unwrap();
    scheduler.start_again();
    scheduler.until_ready();
    checkpoint.until_offset_is(before + 2);
    let output = scheduler.output();
    assert!(checkpoint.is_rebuilt(), "{output}");
    assert!(output.contains("may lack tombstones"), "{output}");
}
