//! Jobs of every kind through the real binary. The oracle checks that each request has the effect that its author meant.

use std::time::Duration;

use bytes::Bytes;
use redeliver_core::job::Priority;
use redeliver_core::{Headers, JobId, Timestamp};
use redeliver_kafka::murmur2::shard_of;
use redeliver_proto::v1;
use redeliver_proto::v1::job_command::Command;
use redeliver_testkit::{EnvBuilder, LocalRedis, eventually};

use crate::env::{SchedulerEnv, Watch, answers, id};
use crate::index::own_redis::Raw;
use crate::oracle::{JobSpec, Sent, When};
use crate::requests::{Request, in_millis, json, now};

const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
/// The time zone of these tests and its hours ahead of UTC. It has no daylight-saving time.
const ZONE: (&str, u64) = ("Asia/Tokyo", 9);

/// A scheduler with a short window, so that jobs go through the index.
fn setup(name: &str) -> EnvBuilder {
    SchedulerEnv::builder(name)
        .partitions(4)
        .set("scheduler.window", "500ms")
        .set("scheduler.default_time_zone", ZONE.0)
}

/// A time in another time zone.
fn local_time(time: Timestamp, minutes: u64, offset: &str) -> String {
    let local = time.after(Duration::from_secs(60 * minutes)).to_string();
    format!("{}{offset}", local.trim_end_matches('Z'))
}

fn a_second_ago() -> Timestamp {
    Timestamp::from_millis(now().as_millis() - 1_000)
}

fn json_jobs() -> Vec<Request> {
    let base = JobSpec::new("mail", r#"{"to":"a@example.com"}"#);
    let soon = base.clone().at(in_millis(700));
    let When::At(time) = soon.when else {
        unreachable!("it was set above")
    };
    let written = |text: &str| format!(r#""scheduledTime":"{text}""#);
    let mut requests = vec![
        Request::json(soon.clone()),
        Request::json(base.clone().after(900)),
        Request::json(base.clone()),
        Request::json(base.clone().at(Timestamp::from_millis(1_000_000_000_000))),
        // Times in other time zones and notations.
        Request::written(soon.clone(), json(&soon, &written(&local_time(time, 330, "+05:30")))),
        Request::written(soon.clone(), json(&soon, &written(&local_time(time, 60 * ZONE.1, "")))),
        Request::written(
            soon.clone(),
            json(&soon, &format!("\"delay\":null, {}", written(&time.to_string().replace('T', " ")))),
        ),
        // Fields may be in any order, and null is the same as no field.
        Request::written(
            base.clone().after(1_000).priority(Priority::High),
            br#" {"priority":"HIGH","key":null,"headers":{},"delay":"1s","jobData":{"to":"a@example.com"},"appName":"mail"} "#
                .as_slice(),
        ),
        Request::json(soon.clone().priority(Priority::Low)),
        Request::json(soon.clone().expire_after(60_000)),
        // Already too late.
        Request::json(base.clone().at(a_second_ago()).expire_after(0)),
        Request::json(base.clone().at(Timestamp::from_millis(1_000_000_000_000)).expire_after(1_000)),
        // Keys: the job's own, the record's, both.
        Request::json(soon.clone().key("customer 7")),
        Request::json(soon.clone()).record_key("customer 8"),
        Request::json(soon.clone()).record_key(vec![0xff, 0x00]),
        Request::json(soon.clone().key("customer 9")).record_key("not this one"),
        Request::json(soon.clone().key("")),
        // The headers of the job become those of its record. Of the request's own headers, only the trace does.
        Request::json(
            soon.clone()
                .header("tenant", Some(b"a"))
                .header("tenant", Some(b"b"))
                .header("nothing", None)
                .header("tenant", Some(b"")),
        ),
        Request::written(
            soon.clone().header("a", Some(b"1")),
            json(&soon, &format!(r#"{},"headers":{{"a":"1"}}"#, written(&time.to_string()))),
        ),
        Request::json(soon.clone()).header("traceparent", TRACE).header("tracestate", "a=b"),
        Request::json(soon.clone().header("traceparent", Some(b"its own"))).header("traceparent", TRACE),
        Request::json(soon.clone())
            .header("content-type", "application/json; charset=utf-8")
            .header("x-request", "not the job's"),
    ];
    // The data of a job is passed on byte for byte.
    for data in [
        "null",
        "0",
        "1.50",
        "-0.0e+10",
        "12345678901234567890123",
        r#""""#,
        r#""\u00e9 é \ud83d\ude00 \/ \\ \"""#,
        "[ ]",
        "[1,  2 , {\"a\" : [\n\t] } ]",
        r#"{"b":1, "a":2, "b":3}"#,
    ] {
        let spec = JobSpec::new("sms", data.to_owned()).at(time);
        requests.push(Request::json(spec));
    }
    let long = format!("\"{}\"", "x".repeat(800_000));
    requests.push(Request::json(JobSpec::new("sms", long).after(500)));
    let named = JobSpec {
        request_id: Some("r-1".to_owned()),
        ..soon
    };
    requests.push(Request::json(named));
    requests
}

fn protobuf_jobs() -> Vec<Request> {
    let base = JobSpec::new("crawl", vec![0xff, 0x00, 0xfe]);
    let soon = base.clone().at(in_millis(700));
    let named = JobSpec {
        request_id: Some("ü".to_owned()),
        ..soon.clone()
    };
    let requests = vec![
        Request::protobuf(base.clone()),
        Request::protobuf(base.clone().after(900)),
        Request::protobuf(soon.clone()),
        Request::protobuf(base.clone().at(Timestamp::from_millis(-1))),
        Request::protobuf(JobSpec::new("crawl", "").after(600)),
        Request::protobuf(soon.clone().priority(Priority::High).key(vec![0x80])),
        Request::protobuf(soon.clone().priority(Priority::Low).key("")),
        Request::protobuf(soon.clone()).record_key("host-1"),
        Request::protobuf(
            soon.clone()
                .header("binary", Some(&[0x00, 0xff]))
                .header("binary", None)
                .header("binary", Some(b"")),
        ),
        Request::protobuf(soon.clone()).header("traceparent", TRACE),
        Request::protobuf(base.expire_after(60_000)),
        Request::protobuf(soon.clone().at(a_second_ago()).expire_after(0)),
        Request::protobuf(named),
    ];
    let answered = requests.into_iter().enumerate();
    answered
        .map(|(n, request)| request.answer_to(format!("job {n}")))
        .collect()
}

fn refused() -> Vec<Request> {
    let mut requests = Vec::new();
    let mut json = |value: &str, code: &str, says: &str| {
        requests.push(Request::refused(Some(value.as_bytes()), code, says));
    };
    json(
        r#"{"appName":"fax","delay":"1s","jobData":1}"#,
        "appName",
        "`appName` is `fax`, which is not an application",
    );
    json(
        r#"{"appName":"smss","delay":"1s","jobData":1}"#,
        "appName",
        "did you mean `sms`?",
    );
    json(r#"{"delay":"1s","jobData":1}"#, "appName", "`appName` is missing");
    json(
        r#"{"appName":7,"delay":"1s","jobData":1}"#,
        "appName",
        "`appName` is integer `7`",
    );
    json(
        r#"{"appName":"sms","delay":"1s"}"#,
        "jobData",
        "`jobData` is missing",
    );
    json(
        r#"{"appName":"sms","jobData":1}"#,
        "scheduledTime",
        "`scheduledTime` is missing",
    );
    json(
        r#"{"appName":"sms","scheduledTime":"tomorrow","jobData":1}"#,
        "scheduledTime",
        "`tomorrow`",
    );
    json(
        r#"{"appName":"sms","scheduledTime":"2026-02-30T00:00:00Z","jobData":1}"#,
        "scheduledTime",
        "`scheduledTime`",
    );
    json(
        r#"{"appName":"sms","scheduledTime":"2326-02-01T00:00:00Z","jobData":1}"#,
        "scheduledTime",
        "too far ahead",
    );
    json(
        r#"{"appName":"sms","scheduledTime":"2026-02-01T00:00:00Z","delay":"1s","jobData":1}"#,
        "scheduledTime",
        "combined with `delay`",
    );
    json(
        r#"{"appName":"sms","delay":"soon","jobData":1}"#,
        "delay",
        "`delay`",
    );
    json(
        r#"{"appName":"sms","delay":"1s","priority":"urgent","jobData":1}"#,
        "priority",
        "`urgent`",
    );
    json(
        r#"{"appName":"sms","delay":"1s","idempotencyKey":"","jobData":1}"#,
        "idempotencyKey",
        "empty",
    );
    json(
        r#"{"appName":"sms","delay":"1s","headers":{"job-id":"x"},"jobData":1}"#,
        "headers",
        "`job-id`",
    );
    json(
        r#"{"appName":"sms","delay":"1s","headers":7,"jobData":1}"#,
        "headers",
        "`headers`",
    );
    json(
        r#"{"appName":"sms","delay":"1s","jobDate":1}"#,
        "unknownField",
        "did you mean `jobData`?",
    );
    json(
        r#"{"appName":"sms","cron":"* * * * *","jobData":1}"#,
        "cron",
        "recurring",
    );
    json(r#"{"cancel":"7"}"#, "cancel", "is not a job id");
    json(
        r#"{"reschedule":"01KAJQ6Z2B0003000000000A7X"}"#,
        "scheduledTime",
        "missing",
    );
    json(
        r#"{"appName":"sms","delay":"1s","delay":"2s","jobData":1}"#,
        "delay",
        "more than once",
    );
    json(r#"{"appName":"sms","#, "json", "not a JSON object");
    json("[1]", "json", "not a JSON object");
    json("", "json", "not a JSON object");
    requests.push(Request::refused(
        Some(b"{\"appName\":\"\xff\"}"),
        "json",
        "not UTF-8 at byte 12",
    ));
    requests.push(Request::refused(None, "value", "no value"));
    let right = br#"{"appName":"sms","delay":"1s","jobData":1}"#;
    requests.push(
        Request::refused(Some(right), "contentType", "`text/plain`").header("content-type", "text/plain"),
    );
    requests.push(
        Request::refused(Some(right), "contentType", "more than once")
            .header("content-type", "application/json")
            .header("content-type", "application/json"),
    );
    requests.push(
        Request::refused(Some(right), "protobuf", "not a JobCommand")
            .header("content-type", "application/x-protobuf"),
    );
    // A rejected request keeps its key and its headers, except for reserved ones.
    requests.push(
        Request::refused(Some(b"{}"), "jobData", "`jobData`")
            .record_key("k")
            .header("retry-count", "7")
            .header("tenant", "a"),
    );
    let spec = |app: &str, when| {
        Command::Schedule(v1::JobSpec {
            app: app.to_owned(),
            when,
            ..v1::JobSpec::default()
        })
    };
    let delay = |seconds, nanos| {
        Some(v1::job_spec::When::Delay(prost_types::Duration {
            seconds,
            nanos,
        }))
    };
    let unknown = Request::refused_command(
        spec("fax", delay(1, 0)),
        "appName",
        "`app` is `fax`, which is not an application",
    );
    requests.push(unknown.answer_to("unknown app"));
    let timeless =
        Request::refused_command(spec("sms", None), "scheduledTime", "`scheduled_time` is missing");
    requests.push(timeless.answer_to("no time"));
    let negative = Request::refused_command(spec("sms", delay(-1, 0)), "delay", "`delay`");
    requests.push(negative.answer_to("negative"));
    let cancel = Command::Cancel(v1::CancelJob {
        id: "x".to_owned(),
        ..v1::CancelJob::default()
    });
    requests.push(Request::refused_command(cancel, "cancel", "`id`").answer_to("no id"));
    requests
}

/// Commands that end jobs with distant due times.
fn commands(env: &SchedulerEnv, far: &[Sent]) -> Vec<Request> {
    let ids: Vec<JobId> = far.iter().map(id).collect();
    let elsewhere = |id: JobId| (id.shard() + 1) % env.topics.partitions;
    let minute = When::After(Duration::from_secs(60));
    vec![
        Request::cancel(ids[0]).answer_to("cancel"),
        Request::cancel(ids[0]).answer_to("cancel again"),
        Request::reschedule(ids[0], minute).answer_to("too late"),
        Request::cancel_json(ids[1]),
        Request::cancel(ids[2])
            .partition(elsewhere(ids[2]))
            .answer_to("astray"),
        Request::reschedule(ids[3], When::After(Duration::from_millis(400))).answer_to("later"),
        Request::reschedule_json(ids[4], When::At(in_millis(600))),
        Request::reschedule(ids[5], When::At(Timestamp::from_millis(7))).answer_to("at once"),
        // Repeated; the last one counts.
        Request::reschedule(ids[6], minute).answer_to("first"),
        Request::reschedule(ids[6], When::After(Duration::from_millis(800))).answer_to("second"),
        Request::reschedule(ids[6], When::After(Duration::from_millis(300))).answer_to("third"),
        Request::reschedule(ids[7], minute),
        Request::cancel(ids[7]).answer_to("moved and cancelled"),
        // Of unknown jobs.
        Request::cancel(JobId::new(now(), 0, 1_000_000)).answer_to("unknown job"),
        Request::cancel(JobId::new(now(), 7_000, 1)).answer_to("of no partition"),
        Request::reschedule(JobId::new(now(), 1, 1_000_000), minute).answer_to("unknown job's new time"),
    ]
}

/// Requests with idempotency keys: for each key, two with the same content and one with other content. One of them is sent
/// to a wrong partition.
fn keyed(env: &SchedulerEnv) -> Vec<Request> {
    let mut requests = Vec::new();
    for n in 0..12_i32 {
        let key = format!("key {n}");
        let spec = JobSpec::new("sms", format!("{{\"n\": {n}}}"))
            .idempotency_key(key.clone())
            .key("customer")
            .header("h", Some(b"v"));
        let spec = if n % 2 == 0 {
            spec.at(in_millis(500))
        } else {
            spec.after(500)
        };
        let other = JobSpec {
            priority: Priority::High,
            ..spec.clone()
        };
        let named = JobSpec {
            request_id: Some(format!("again {n}")),
            ..spec.clone()
        };
        let elsewhere = (shard_of("sms", &key, env.topics.partitions) + 1 + n % 2) % env.topics.partitions;
        requests.push(Request::json(spec.clone()));
        requests.push(Request::protobuf(spec.clone()).answer_to(format!("again {n}")));
        requests.push(Request::json(named).partition(elsewhere));
        requests.push(Request::protobuf(other.clone()).answer_to(format!("other {n}")));
        requests.push(Request::json(other).partition(elsewhere));
        // The same key of another application is another key.
        let of_another = JobSpec {
            app: "mail".to_owned(),
            ..spec
        };
        requests.push(Request::protobuf(of_another).answer_to(format!("another app {n}")));
    }
    requests
}

#[test]
fn jobs_of_every_kind_have_the_intended_effect() {
    let env = SchedulerEnv::new(setup("kinds"));
    let _scheduler = env.start("a");
    let far = (0..8).map(|n| {
        let spec = JobSpec::new("crawl", format!("far {n}")).after(3_600_000);
        Request::protobuf(spec).answer_to(format!("far {n}"))
    });
    let far = env.send(far.collect());
    let mut sent = env.send(json_jobs());
    sent.extend(env.send(protobuf_jobs()));
    sent.extend(env.send(refused()));
    sent.extend(env.send(keyed(&env)));
    sent.extend(env.send(commands(&env, &far)));
    sent.extend(far);
    let mut watch = env.watch();
    let report = watch.settle(&mut sent);
    assert_eq!((report.cancelled, report.rescheduled), (4, 7), "{report}");
    assert_eq!(report.expired, 3, "{report}");
    assert_eq!(report.forwarded, 1 + 24, "{report}");
    assert_eq!((report.duplicates, report.conflicts), (24, 24), "{report}");

    // Now all commands are too late.
    let jobs = sent.iter().filter(|sent| sent.answer_to.is_some());
    let late: Vec<Request> = jobs
        .enumerate()
        .map(|(n, sent)| {
            let minute = When::After(Duration::from_secs(60));
            let request = if n % 2 == 0 {
                Request::cancel(id(sent))
            } else {
                Request::reschedule(id(sent), minute)
            };
            request.answer_to(format!("late {n}"))
        })
        .collect();
    sent.extend(env.send(late));
    watch.settle(&mut sent);
    let told = answers(&watch.seen);
    for (name, outcome) in told.iter().filter(|(name, _)| name.starts_with("late ")) {
        let in_time = [v1::Outcome::Cancelled, v1::Outcome::Rescheduled];
        assert!(!in_time.contains(outcome), "{name} was told {outcome:?}");
    }
}

#[test]
fn idempotency_keys_survive_restarts_and_the_loss_of_redis() {
    let redis = LocalRedis::start().unwrap();
    let env = SchedulerEnv::new(setup("keys").redis(redis.url()));
    let raw = env.block_on(Raw::connect(&redis.url()));
    let mut scheduler = env.start("a");
    // Some are dispatched at once, some later, some not at all.
    let jobs = || {
        (0..60).map(|n| {
            let spec = JobSpec::new("mail", format!("{n}")).idempotency_key(format!("key {n}"));
            match n % 3 {
                0 => spec,
                1 => spec.after(4_000),
                _ => spec.after(3_600_000),
            }
        })
    };
    let first = env.send(jobs().map(Request::json).collect());
    let never = first.iter().skip(2).step_by(3);
    let mut sent = first.clone();
    sent.extend(env.send(never.map(|sent| Request::cancel(id(sent))).collect()));
    let mut round = 0;
    let mut again = |sent: &mut Vec<Sent>| {
        round += 1;
        let same = jobs().enumerate().map(|(n, spec)| {
            let request = Request::protobuf(spec).answer_to(format!("round {round} same {n}"));
            // Also in a wrong partition.
            if n % 7 == 0 { request.partition(0) } else { request }
        });
        let mut requests: Vec<Request> = same.collect();
        let other = jobs()
            .step_by(5)
            .map(|spec| spec.header("other", Some(b"content")));
        requests.extend(other.map(Request::json));
        sent.extend(env.send(requests));
        until_answered(&env, &format!("round {round} same "), 60);
    };
    again(&mut sent);
    scheduler.kill_9();
    scheduler.start_again();
    again(&mut sent);
    env.block_on(raw.call(&["FLUSHALL"]));
    again(&mut sent);
    scheduler.shut_down();
    env.block_on(raw.call(&["FLUSHALL"]));
    scheduler.start_again();
    again(&mut sent);
    let report = env.settle(sent);
    assert_eq!(
        (report.duplicates, report.conflicts),
        (4 * 60, 4 * 12),
        "{report}"
    );
    assert_eq!((report.dispatched, report.cancelled), (40 + 4, 20), "{report}");
    assert_eq!(scheduler.kills() + scheduler.shutdowns(), 2);
}

/// Waits until this many requests with these names are answered.
fn until_answered(env: &SchedulerEnv, names: &str, count: usize) {
    let mut watch = env.watch();
    eventually("commands are answered", crate::env::DEADLINE, || {
        watch.look();
        let told = answers(&watch.seen);
        let found = told.keys().filter(|name| name.starts_with(names)).count();
        if found == count {
            Ok(())
        } else {
            Err(format!("{found} of {count}"))
        }
    });
}

#[test]
fn due_jobs_are_dispatched_by_priority() {
    let env = SchedulerEnv::new(setup("priority").partitions(1));
    let mut scheduler = env.start("a");
    // More than one turn can dispatch.
    let due = in_millis(15_000);
    let priorities = [Priority::Low, Priority::Normal, Priority::High];
    let jobs = (0..3_000).map(|n| {
        let spec = JobSpec::new("crawl", format!("{n}")).at(due);
        Request::protobuf(spec.priority(priorities[n % 3]))
    });
    let mut sent = env.send(jobs.collect());
    let mut watch = env.watch();
    eventually("all are waiting", crate::env::DEADLINE, || {
        watch.look_at_state();
        if watch.seen.state.len() == sent.len() {
            Ok(())
        } else {
            Err(watch.seen.state.len())
        }
    });
    scheduler.kill_9();
    eventually("they are due", crate::env::DEADLINE, || {
        if now() > due { Ok(()) } else { Err(now()) }
    });
    scheduler.start_again();
    watch.settle(&mut sent);
    let mut dispatched: Vec<_> = watch.seen.apps.iter().collect();
    dispatched.sort_by_key(|record| record.position.offset);
    let first = |priority: Priority| {
        let is_it = |headers: &Headers| headers.last("job-priority") == Some(priority.as_str().as_bytes());
        dispatched
            .iter()
            .position(|record| is_it(&record.headers))
            .unwrap()
    };
    // All three were due at the same time, and a job may be overtaken for a second at least.
    assert_eq!(
        [Priority::High, Priority::Normal, Priority::Low].map(first),
        [0, 1_000, 2_000]
    );
}

/// Jobs are cancelled at about their due time. If all cancellations of a round are in time, or all are late, the next round
/// sends them later or earlier.
#[test]
fn cancellations_at_the_due_time_get_true_answers() {
    const ROUNDS: u32 = 8;
    let env = SchedulerEnv::new(SchedulerEnv::builder("round"));
    let _scheduler = env.start("a");
    let mut watch = env.watch();
    let mut sent = Vec::new();
    let mut total = Round::default();
    // A command takes a few milliseconds; how many depends on the machine.
    let mut lead = 60;
    for round in 0..ROUNDS {
        let round = run_round(&mut watch, &mut sent, round, lead);
        println!("{lead} ms and less before they were due: {round:?}");
        total.cancelled += round.cancelled;
        total.moved += round.moved;
        total.late += round.late;
        if total.is_mixed() {
            break;
        }
        lead += if round.late == 0 { -25 } else { 50 };
    }
    // Rounds whose commands were all in time, or all late, prove nothing.
    assert!(total.is_mixed(), "{ROUNDS} rounds: {total:?}");
}

/// The outcomes of the commands of a round.
#[derive(Debug, Default)]
struct Round {
    cancelled: usize,
    moved: usize,
    late: usize,
}

impl Round {
    /// Whether some of both kinds were in time, and some were late.
    fn is_mixed(&self) -> bool {
        self.cancelled > 0 && self.moved > 0 && self.late > 0
    }
}

/// Cancels or reschedules each of many jobs in a period of 70 ms that starts `lead` milliseconds before the due time. Each
/// command must be answered, and all answers so far must agree with the jobs.
#[track_caller]
fn run_round(watch: &mut Watch<'_>, sent: &mut Vec<Sent>, round: u32, lead: i64) -> Round {
    const JOBS: u64 = 900;
    let env = watch.env();
    let mut random = fastrand::Rng::new();
    let start = in_millis(2_000);
    let due = |n: u64| start.after(Duration::from_millis(3 * n));
    let jobs =
        (0..JOBS).map(|n| Request::protobuf(JobSpec::new("sms", Bytes::from(n.to_string())).at(due(n))));
    let jobs = env.send(jobs.collect());
    let mut commands = Vec::new();
    for (n, job) in (0..JOBS).zip(&jobs) {
        let moment = due(n).as_millis() - lead + random.i64(0..70);
        let command = match n % 4 {
            0 => Request::reschedule(id(job), When::At(due(n).after(Duration::from_secs(1)))),
            _ => Request::cancel(id(job)),
        };
        let command = command.answer_to(format!("round {round}: {n}"));
        commands.push((Timestamp::from_millis(moment), command));
    }
    sent.extend(jobs);
    sent.extend(env.send_at(commands));
    let report = watch.settle(sent);
    let told = answers(&watch.seen);
    let all = |outcome| told.values().filter(|told| **told == outcome).count();
    assert_eq!(
        (all(v1::Outcome::Cancelled), all(v1::Outcome::Rescheduled)),
        (report.cancelled, report.rescheduled),
        "{report}"
    );
    let of_round = format!("round {round}: ");
    let told: Vec<v1::Outcome> = told
        .into_iter()
        .filter(|(name, _)| name.starts_with(&of_round))
        .map(|(_, outcome)| outcome)
        .collect();
    let count = |outcome| told.iter().filter(|told| **told == outcome).count();
    let round = Round {
        cancelled: count(v1::Outcome::Cancelled),
        moved: count(v1::Outcome::Rescheduled),
        late: count(v1::Outcome::AlreadyDispatched),
    };
    assert_eq!(told.len() as u64, JOBS, "{report}");
    assert_eq!(
        round.cancelled + round.moved + round.late,
        told.len(),
        "{round:?}"
    );
    round
}
