//! The values of the scheduler's counters, with their labels, after requests of which everything is known.

use std::collections::BTreeMap;

use redeliver_core::Timestamp;
use redeliver_testkit::kafka_request::{configure_topic, delete_topic};

use crate::env::{SchedulerEnv, id};
use crate::oracle::{JobSpec, When};
use crate::requests::{Request, in_millis, now};

type Series = BTreeMap<String, u64>;

/// The metrics that are compared.
const COMPARED: [&str; 7] = [
    "scheduler_received_total",
    "scheduler_commands_total",
    "scheduler_jobs_ended_total",
    "scheduler_dead_letters_total",
    "scheduler_jobs_forgotten_total",
    "scheduler_lateness_seconds_count",
    "scheduler_idempotency_keys",
];

#[test]
fn counters_follow_outcomes() {
    let builder = SchedulerEnv::builder("metrics")
        .partitions(2)
        .set("kafka.topics.missing_timeout", "1s")
        .set("scheduler.keep_ended", "1s");
    let env = SchedulerEnv::new(builder);
    let mut scheduler = env.start("a");
    delete_topic(&env.kafka.brokers, &env.topics.apps["sms"]);
    let limit = [("max.message.bytes", "2000")];
    configure_topic(&env.kafka.brokers, &env.topics.apps["crawl"], &limit);

    let job = |text: &str| JobSpec::new("mail", text.to_owned());
    let keyed = |text: &str, key: &str| Request::protobuf(job(text).idempotency_key(key));
    let past = Timestamp::from_millis(now().as_millis() - 60_000);
    let mut requests: Vec<Request> = (0..5).map(|n| Request::protobuf(job(&n.to_string()))).collect();
    // The first and its two repetitions, and another request with its key.
    requests.extend((0..3).map(|_| keyed("first", "k")));
    requests.push(keyed("other", "k"));
    // Both partitions, of which one is the wrong one.
    requests.extend([0, 1].map(|partition| keyed("forwarded", "f").partition(partition)));
    requests.push(Request::protobuf(job("expired").at(past).expire_after(1)));
    requests.push(Request::refused(Some(b"no json"), "json", ""));
    requests.extend((0..2).map(|_| {
        Request::refused(
            Some(br#"{"appName":"unknown","delay":"1s","jobData":1}"#),
            "appName",
            "",
        )
    }));
    let far = ["cancelled", "moved"].map(|text| Request::protobuf(job(text).at(in_millis(3_600_000))));
    let waiting = env.send(far.into());
    let first = requests.len() + waiting.len();
    env.send(requests);
    let cancelled = id(&waiting[0]);
    let unknown = redeliver_core::JobId::new(now(), 0, 1 << 40);
    let changes = vec![
        Request::cancel(cancelled),
        Request::cancel(cancelled),
        Request::reschedule(cancelled, When::At(now())),
        Request::cancel(unknown),
        Request::reschedule(id(&waiting[1]), When::At(now())),
    ];
    let changes = env.send(changes).len();

    let commands = |outcome: &str| format!("scheduler_commands_total{{outcome={outcome:?}}}");
    let ended = |outcome: &str| format!("scheduler_jobs_ended_total{{outcome={outcome:?}}}");
    let dead = |code: &str| format!("scheduler_dead_letters_total{{code={code:?}}}");
    let received = u64::try_from(first + changes).unwrap() + 1;
    let dispatched = 5 + 1 + 1 + 1;
    let expected = [
        // The forwarded one is read again.
        ("scheduler_received_total".to_owned(), received),
        (commands("accepted"), 5 + 1 + 1 + 1 + 2),
        (commands("duplicate"), 2 + 1),
        (commands("conflict"), 1),
        (commands("rejected"), 3),
        (commands("forwarded"), 1),
        (commands("cancelled"), 1),
        (commands("rescheduled"), 1),
        (commands("refused"), 3),
        (ended("dispatched"), dispatched),
        (ended("expired"), 1),
        (dead("request.json"), 1),
        (dead("request.appName"), 2),
        (dead("request.conflict"), 1),
        ("scheduler_lateness_seconds_count".to_owned(), dispatched),
        // Of the dispatched, expired and cancelled ones, two keep their idempotency keys for longer.
        (
            "scheduler_jobs_forgotten_total".to_owned(),
            dispatched + 1 + 1 - 2,
        ),
        ("scheduler_idempotency_keys".to_owned(), 2),
    ];
    let expected: Series = expected.into();
    scheduler.until_series(&COMPARED, &expected);

    // The lane learns only from an abort that a topic does not exist or refuses a record, and reads the commands again. So the
    // number of records that were read is unknown from here on.
    env.send(vec![
        Request::protobuf(JobSpec::new("sms", "dead").at(past)),
        Request::protobuf(JobSpec::new("crawl", vec![b'x'; 10_000])),
    ]);
    let mut expected = expected;
    expected.remove("scheduler_received_total");
    for (series, added) in [
        (commands("accepted"), 2),
        (ended("dead"), 2),
        (dead("topic.missing"), 1),
        (dead("output.too-large"), 1),
        ("scheduler_jobs_forgotten_total".to_owned(), 2),
    ] {
        *expected.entry(series).or_default() += added;
    }
    scheduler.until_series(&COMPARED[1..], &expected);
    // Another process takes over, and the keys count there.
    let mut other = env.start("b");
    scheduler.shut_down();
    other.until_metric("redeliver_scheduler_idempotency_keys", |keys| keys == 2);
}

#[test]
fn rate_limited_jobs_are_counted() {
    const METRIC: &str = "scheduler_rate_limited_jobs";
    let builder = SchedulerEnv::builder("metrics-rate").partitions(1);
    // One job is dispatched at once, and no other one during this test.
    let env = SchedulerEnv::new(builder.set("scheduler.apps.mail.rate", "0.001"));
    let mut scheduler = env.start("a");
    let jobs = (0..3).map(|n: u32| Request::protobuf(JobSpec::new("mail", n.to_string())));
    let sent = env.send(jobs.collect());
    let held: Series = [(format!("{METRIC}{{lane=\"scheduler-0\",app=\"mail\"}}"), 2)].into();
    scheduler.until_series(&[METRIC], &held);
    env.send(sent.iter().map(|sent| Request::cancel(id(sent))).collect());
    scheduler.until_series(&[METRIC], &Series::new());
}
