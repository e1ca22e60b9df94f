//! Recurring schedules while something goes wrong: each of their occurrences is dispatched once and none early.

use std::collections::BTreeMap;

use redeliver_core::{HumanDuration, Output, Record, Timestamp};
use redeliver_proto::convert::to_duration;
use redeliver_proto::v1::change_schedule::{Change, Create};
use redeliver_proto::v1::job_command::Command;
use redeliver_proto::v1::schedule_spec::Timing;
use redeliver_proto::{CONTENT_TYPE, Message as _, v1};
use redeliver_scheduler::schedules::shard;
use redeliver_testkit::kafka_request::create_partitions;
use redeliver_testkit::{LocalRedis, ensure, eventually};

use crate::env::{DEADLINE, SchedulerEnv, Watch, header};
use crate::index::own_redis::Raw;

/// Schedules with an occurrence per second.
pub(crate) struct EachSecond {
    pub(crate) schedules: usize,
    /// Of each schedule.
    pub(crate) occurrences: usize,
}

impl EachSecond {
    /// Creates the schedules. However late an occurrence is, it is not skipped.
    pub(crate) fn create(&self, env: &SchedulerEnv) {
        let commands: Vec<Output> = (0..self.schedules)
            .map(|number| self.command(env, number))
            .collect();
        env.write(&commands);
    }

    fn command(&self, env: &SchedulerEnv, number: usize) -> Output {
        let id = format!("s-{number}");
        let interval = v1::IntervalTiming {
            interval: Some(to_duration(HumanDuration::from_secs(1))),
            anchor: None,
        };
        let spec = v1::ScheduleSpec {
            timing: Some(Timing::Every(interval)),
            max_count: Some(self.occurrences as u64),
            misfire: Some(v1::Misfire {
                policy: v1::MisfirePolicy::All.into(),
                limit: Some(1_000),
                grace: None,
            }),
            job: Some(v1::JobTemplate {
                app: "sms".into(),
                ..v1::JobTemplate::default()
            }),
            ..v1::ScheduleSpec::default()
        };
        let partition = shard(&id, env.topics.partitions);
        let change = v1::ChangeSchedule {
            id,
            change: Some(Change::Create(Create { spec: Some(spec) })),
            ..v1::ChangeSchedule::default()
        };
        let command = v1::JobCommand {
            command: Some(Command::ChangeSchedule(change)),
            ..v1::JobCommand::default()
        };
        let mut output = Output {
            topic: env.topics.ingest.clone(),
            partition: Some(partition),
            key: None,
            value: Some(command.encode_to_vec().into()),
            headers: redeliver_core::Headers::new(),
        };
        output.headers.push_text("content-type", CONTENT_TYPE);
        output
    }

    /// Waits until this many occurrences of each schedule, on average, are dispatched.
    #[track_caller]
    pub(crate) fn until(&self, watch: &mut Watch<'_>, occurrences: usize) {
        let expected = self.schedules * occurrences;
        eventually("occurrences are dispatched", DEADLINE, || {
            watch.look();
            let found = watch.seen.apps.len();
            ensure(found >= expected, found)
        });
    }

    /// Waits until all occurrences are dispatched. There must be no other record, and no gap.
    #[track_caller]
    pub(crate) fn until_finished(&self, watch: &mut Watch<'_>) {
        self.until(watch, self.occurrences);
        let found = by_schedule(&watch.seen.apps);
        assert_eq!(found.len(), self.schedules);
        for (schedule, mut nominal) in found {
            nominal.sort_unstable();
            let first = nominal[0].as_millis();
            let expected =
                (0..self.occurrences as i64).map(|number| Timestamp::from_millis(first + 1_000 * number));
            assert!(nominal.iter().copied().eq(expected), "{schedule}: {nominal:?}");
        }
    }
}

/// The nominal times of the occurrences in these records, by schedule.
fn by_schedule(records: &[Record]) -> BTreeMap<String, Vec<Timestamp>> {
    let mut occurrences: BTreeMap<String, Vec<Timestamp>> = BTreeMap::new();
    for record in records {
        let occurrence: String = header(record, "job-occurrence");
        let (schedule, nominal) = occurrence.split_once('@').unwrap();
        let nominal = nominal.parse().unwrap();
        let dispatched: Timestamp = header(record, "dispatched-at");
        assert!(dispatched >= nominal, "early: {record:?}");
        occurrences.entry(schedule.to_owned()).or_default().push(nominal);
    }
    occurrences
}

#[test]
fn emptied_redis_repeats_no_occurrence() {
    let redis = LocalRedis::start().unwrap();
    let builder = SchedulerEnv::builder("recurring-flush").partitions(2);
    let env = SchedulerEnv::new(builder.redis(redis.url()));
    let mut scheduler = env.start("a");
    let schedules = EachSecond {
        schedules: 4,
        occurrences: 11,
    };
    schedules.create(&env);
    let mut watch = env.watch();
    let flush = || drop(env.block_on(async { Raw::connect(&redis.url()).await.call(&["FLUSHALL"]).await }));
    schedules.until(&mut watch, 3);
    flush();
    schedules.until(&mut watch, 6);
    scheduler.kill_9();
    flush();
    scheduler.start_again();
    schedules.until(&mut watch, 9);
    flush();
    schedules.until_finished(&mut watch);
}

#[test]
fn growing_topic_repeats_no_occurrence() {
    let mut env = SchedulerEnv::new(SchedulerEnv::builder("recurring-grown").partitions(2));
    let mut scheduler = env.start("a");
    let schedules = EachSecond {
        schedules: 4,
        occurrences: 8,
    };
    schedules.create(&env);
    schedules.until(&mut env.watch(), 3);
    for topic in [&env.topics.state, &env.topics.ingest] {
        create_partitions(&env.kafka.brokers, topic, 5);
    }
    env.grown_to(5);
    scheduler.until_not_ready("has 5 partitions; it had 2");
    scheduler.restart();
    schedules.until_finished(&mut env.watch());
}
