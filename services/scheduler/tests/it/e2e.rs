//! Jobs of every kind through the real binary: what the oracle says of each request is what its author meant.

use std::time::Duration;

use bytes::Bytes;
use redeliver_core::job::Priority;
use redeliver_core::{Headers, JobId, Timestamp};
use redeliver_kafka::murmur2::shard_of;
use redeliver_proto::v1;
use redeliver_proto::v1::job_command::Command;
use redeliver_testkit::{LocalRedis, eventually};

use crate::env::{SchedulerEnv, Setup, Watch, answers, id};
use crate::index::own_redis::Raw;
use crate::oracle::{Asked, Wanted, When};
use crate::requests::{Request, in_millis, json, now};

const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
/// The time zone of these tests, hours before UTC, in which no clock is ever changed.
const ZONE: (&str, u64) = ("Asia/Tokyo", 9);

/// A scheduler that holds little in memory, so that jobs go through the index.
fn setup(name: &str) -> Setup {
    Setup::new(name)
        .set("scheduler.window", "500ms")
        .set("scheduler.default_time_zone", ZONE.0)
}

/// A time as people in another zone write it.
fn elsewhere(time: Timestamp, minutes: u64, offset: &str) -> String {
    let local = time.after(Duration::from_secs(60 * minutes)).to_string();
    format!("{}{offset}", local.trim_end_matches('Z'))
}

fn a_second_ago() -> Timestamp {
    Timestamp::from_millis(now().as_millis() - 1_000)
}

fn json_jobs() -> Vec<Request> {
    let base = Wanted::new("mail", r#"{"to":"a@example.com"}"#);
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
        // Times as they are written elsewhere.
        Request::written(soon.clone(), json(&soon, &written(&elsewhere(time, 330, "+05:30")))),
        Request::written(soon.clone(), json(&soon, &written(&elsewhere(time, 60 * ZONE.1, "")))),
        Request::written(
            soon.clone(),
            json(&soon, &format!("\"delay\":null, {}", written(&time.to_string().replace('T', " ")))),
        ),
        // Fields are in any order, and those that are null are left out.
        Request::written(
            base.clone().after(1_000).priority(Priority::High),
            br#" {"priority":"HIGH","key":null,"headers":{},"delay":"1s","jobData":{"to":"a@example.com"},"appName":"mail"} "#
                .as_slice(),
        ),
        Request::json(soon.clone().priority(Priority::Low)),
        Request::json(soon.clone().expire_after(60_000)),
        // Too late already.
        Request::json(base.clone().at(a_second_ago()).expire_after(0)),
        Request::json(base.clone().at(Timestamp::from_millis(1_000_000_000_000)).expire_after(1_000)),
        // Keys: the job's own, the record's, both.
        Request::json(soon.clone().key("customer 7")),
        Request::json(soon.clone()).record_key("customer 8"),
        Request::json(soon.clone()).record_key(vec![0xff, 0x00]),
        Request::json(soon.clone().key("customer 9")).record_key("not this one"),
        Request::json(soon.clone().key("")),
        // Headers: those of the job are its record's, those of the request are not, but for the trace.
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
    // What an application sends, byte for byte.
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
        let wanted = Wanted::new("sms", data.to_owned()).at(time);
        requests.push(Request::json(wanted));
    }
    let long = format!("\"{}\"", "x".repeat(800_000));
    requests.push(Request::json(Wanted::new("sms", long).after(500)));
    let named = Wanted {
        request_id: Some("r-1".to_owned()),
        ..soon
    };
    requests.push(Request::json(named));
    requests
}

fn protobuf_jobs() -> Vec<Request> {
    let base = Wanted::new("crawl", vec![0xff, 0x00, 0xfe]);
    let soon = base.clone().at(in_millis(700));
    let named = Wanted {
        request_id: Some("ü".to_owned()),
        ..soon.clone()
    };
    let requests = vec![
        Request::protobuf(base.clone()),
        Request::protobuf(base.clone().after(900)),
        Request::protobuf(soon.clone()),
        Request::protobuf(base.clone().at(Timestamp::from_millis(-1))),
        Request::protobuf(Wanted::new("crawl", "").after(600)),
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
        "`appName` names no application `fax`",
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
        "`appName` is `7`",
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
        "further ahead",
    );
    json(
        r#"{"appName":"sms","scheduledTime":"2026-02-01T00:00:00Z","delay":"1s","jobData":1}"#,
        "scheduledTime",
        "beside `delay`",
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
    json(r#"{"cancel":"7"}"#, "cancel", "not the id of a job");
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
    // A request that is dead keeps its key and headers, but for those that only we may write.
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
    let unknown = Request::refused_command(spec("fax", delay(1, 0)), "appName", "`app` names no application");
    requests.push(unknown.answer_to("unknown app"));
    let timeless =
        Request::refused_command(spec("sms", None), "scheduledTime", "`scheduled_time` is missing");
    requests.push(timeless.answer_to("no time"));
    let negative = Request::refused_command(spec("sms", delay(-1, 0)), "delay", "`delay`");
    requests.push(negative.answer_to("negative"));
    let cancel = Command::Cancel(v1::CancelJob { id: "x".to_owned() });
    requests.push(Request::refused_command(cancel, "cancel", "`id`").answer_to("no id"));
    requests
}

/// Commands for jobs that are far away, each of which comes to its end by them.
fn commands(env: &SchedulerEnv, far: &[Asked]) -> Vec<Request> {
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
        // Again and again; the last one holds.
        Request::reschedule(ids[6], minute).answer_to("first"),
        Request::reschedule(ids[6], When::After(Duration::from_millis(800))).answer_to("second"),
        Request::reschedule(ids[6], When::After(Duration::from_millis(300))).answer_to("third"),
        Request::reschedule(ids[7], minute),
        Request::cancel(ids[7]).answer_to("moved and cancelled"),
        // Nobody's.
        Request::cancel(JobId::new(now(), 0, 1_000_000)).answer_to("nobody's"),
        Request::cancel(JobId::new(now(), 7_000, 1)).answer_to("of no partition"),
        Request::reschedule(JobId::new(now(), 1, 1_000_000), minute).answer_to("nobody's new time"),
    ]
}

/// Requests with idempotency keys, two of the same and one of another content each, one of them elsewhere.
fn keyed(env: &SchedulerEnv) -> Vec<Request> {
    let mut requests = Vec::new();
    for n in 0..12_i32 {
        let key = format!("key {n}");
        let wanted = Wanted::new("sms", format!("{{\"n\": {n}}}"))
            .idempotency_key(key.clone())
            .key("customer")
            .header("h", Some(b"v"));
        let wanted = if n % 2 == 0 {
            wanted.at(in_millis(500))
        } else {
            wanted.after(500)
        };
        let other = Wanted {
            priority: Priority::High,
            ..wanted.clone()
        };
        let named = Wanted {
            request_id: Some(format!("again {n}")),
            ..wanted.clone()
        };
        let elsewhere = (shard_of("sms", &key, env.topics.partitions) + 1 + n % 2) % env.topics.partitions;
        requests.push(Request::json(wanted.clone()));
        requests.push(Request::protobuf(wanted.clone()).answer_to(format!("again {n}")));
        requests.push(Request::json(named).partition(elsewhere));
        requests.push(Request::protobuf(other.clone()).answer_to(format!("other {n}")));
        requests.push(Request::json(other).partition(elsewhere));
        // The same key of another application is another key.
        let of_another = Wanted {
            app: "mail".to_owned(),
            ..wanted
        };
        requests.push(Request::protobuf(of_another).answer_to(format!("another app {n}")));
    }
    requests
}

#[test]
fn jobs_of_every_kind_do_what_their_author_meant() {
    let env = setup("kinds").create();
    let _scheduler = env.start("a");
    let far = (0..8).map(|n| {
        let wanted = Wanted::new("crawl", format!("far {n}")).after(3_600_000);
        Request::protobuf(wanted).answer_to(format!("far {n}"))
    });
    let far = env.ask(far.collect());
    let mut asked = env.ask(json_jobs());
    asked.extend(env.ask(protobuf_jobs()));
    asked.extend(env.ask(refused()));
    asked.extend(env.ask(keyed(&env)));
    asked.extend(env.ask(commands(&env, &far)));
    asked.extend(far);
    let mut watch = env.watch();
    let verdict = watch.settle(&mut asked);
    assert_eq!((verdict.cancelled, verdict.rescheduled), (4, 7), "{verdict}");
    assert_eq!(verdict.expired, 3, "{verdict}");
    assert_eq!(verdict.forwarded, 1 + 24, "{verdict}");
    assert_eq!((verdict.duplicates, verdict.conflicts), (24, 24), "{verdict}");

    // Later, all of them are too late.
    let jobs = asked.iter().filter(|asked| asked.answer_to.is_some());
    let late: Vec<Request> = jobs
        .enumerate()
        .map(|(n, asked)| {
            let minute = When::After(Duration::from_secs(60));
            let request = if n % 2 == 0 {
                Request::cancel(id(asked))
            } else {
                Request::reschedule(id(asked), minute)
            };
            request.answer_to(format!("late {n}"))
        })
        .collect();
    asked.extend(env.ask(late));
    watch.settle(&mut asked);
    let told = answers(&watch.seen);
    for (name, outcome) in told.iter().filter(|(name, _)| name.starts_with("late ")) {
        let in_time = [v1::Outcome::Cancelled, v1::Outcome::Rescheduled];
        assert!(!in_time.contains(outcome), "{name} was told {outcome:?}");
    }
}

#[test]
fn idempotency_keys_are_remembered_over_restarts_and_without_redis() {
    let redis = LocalRedis::start().unwrap();
    let env = setup("keys").redis(redis.url()).create();
    let raw = env.block_on(Raw::connect(&redis.url()));
    let mut scheduler = env.start("a");
    // Some leave at once, some later, some never.
    let jobs = || {
        (0..60).map(|n| {
            let wanted = Wanted::new("mail", format!("{n}")).idempotency_key(format!("key {n}"));
            match n % 3 {
                0 => wanted,
                1 => wanted.after(4_000),
                _ => wanted.after(3_600_000),
            }
        })
    };
    let first = env.ask(jobs().map(Request::json).collect());
    let never = first.iter().skip(2).step_by(3);
    let mut asked = first.clone();
    asked.extend(env.ask(never.map(|asked| Request::cancel(id(asked))).collect()));
    let mut round = 0;
    let mut again = |asked: &mut Vec<Asked>| {
        round += 1;
        let same = jobs().enumerate().map(|(n, wanted)| {
            let request = Request::protobuf(wanted).answer_to(format!("round {round} same {n}"));
            // Also where it does not belong.
            if n % 7 == 0 { request.partition(0) } else { request }
        });
        let mut requests: Vec<Request> = same.collect();
        let other = jobs()
            .step_by(5)
            .map(|wanted| wanted.header("other", Some(b"content")));
        requests.extend(other.map(Request::json));
        asked.extend(env.ask(requests));
        watch_until_told(&env, &format!("round {round} same "), 60);
    };
    again(&mut asked);
    scheduler.kill_9();
    scheduler.start_again();
    again(&mut asked);
    env.block_on(raw.call(&["FLUSHALL"]));
    again(&mut asked);
    scheduler.end_in_order();
    env.block_on(raw.call(&["FLUSHALL"]));
    scheduler.start_again();
    again(&mut asked);
    let verdict = env.settle(asked);
    assert_eq!(
        (verdict.duplicates, verdict.conflicts),
        (4 * 60, 4 * 12),
        "{verdict}"
    );
    assert_eq!((verdict.dispatched, verdict.cancelled), (40 + 4, 20), "{verdict}");
    assert_eq!(scheduler.kills() + scheduler.ends(), 2);
}

/// Waits until so many of these names have been answered.
fn watch_until_told(env: &SchedulerEnv, names: &str, count: usize) {
    let mut watch = env.watch();
    eventually("commands are answered", crate::env::PATIENCE, || {
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
fn due_jobs_leave_by_priority() {
    let env = setup("priority").partitions(1).create();
    let mut scheduler = env.start("a");
    // More than one turn can take.
    let due = in_millis(4_000);
    let priorities = [Priority::Low, Priority::Normal, Priority::High];
    let jobs = (0..3_000).map(|n| {
        let wanted = Wanted::new("crawl", format!("{n}")).at(due);
        Request::protobuf(wanted.priority(priorities[n % 3]))
    });
    let mut asked = env.ask(jobs.collect());
    let mut watch = env.watch();
    eventually("all are waiting", crate::env::PATIENCE, || {
        watch.look_at_state();
        if watch.seen.state.len() == asked.len() {
            Ok(())
        } else {
            Err(watch.seen.state.len())
        }
    });
    scheduler.kill_9();
    eventually("they are due", crate::env::PATIENCE, || {
        if now() > due { Ok(()) } else { Err(now()) }
    });
    scheduler.start_again();
    watch.settle(&mut asked);
    let mut sent: Vec<_> = watch.seen.apps.iter().collect();
    sent.sort_by_key(|record| record.position.offset);
    let first = |priority: Priority| {
        let is_it = |headers: &Headers| headers.last("job-priority") == Some(priority.as_str().as_bytes());
        sent.iter().position(|record| is_it(&record.headers)).unwrap()
    };
    // All three were due at the same time, and a job may be overtaken for a second at least.
    assert_eq!(
        [Priority::High, Priority::Normal, Priority::Low].map(first),
        [0, 1_000, 2_000]
    );
}

/// Jobs that are cancelled at about the time at which they are due: as long as all of one storm are in time or all
/// are late, the next one blows later or earlier.
#[test]
fn cancellations_in_the_last_moment_get_answers_that_are_true() {
    const STORMS: u32 = 8;
    let env = Setup::new("storm").create();
    let _scheduler = env.start("a");
    let mut watch = env.watch();
    let mut asked = Vec::new();
    let mut total = Storm::default();
    // A command takes some milliseconds on its way; how many depends on the machine.
    let mut lead = 60;
    for round in 0..STORMS {
        let storm = blow(&mut watch, &mut asked, round, lead);
        println!("{lead} ms and less before they were due: {storm:?}");
        total.cancelled += storm.cancelled;
        total.moved += storm.moved;
        total.late += storm.late;
        if total.is_mixed() {
            break;
        }
        lead += if storm.late == 0 { -25 } else { 50 };
    }
    // A storm that was all in time, or all late, shows nothing.
    assert!(total.is_mixed(), "{STORMS} storms: {total:?}");
}

/// What became of the commands of a storm.
#[derive(Debug, Default)]
struct Storm {
    cancelled: usize,
    moved: usize,
    late: usize,
}

impl Storm {
    /// Whether some were in time, of both kinds, and some were late.
    fn is_mixed(&self) -> bool {
        self.cancelled > 0 && self.moved > 0 && self.late > 0
    }
}

/// Each of many jobs is cancelled or moved within 70 ms that begin so many milliseconds before it is due. Each
/// command has an answer, and all answers so far agree with what became of the jobs.
#[track_caller]
fn blow(watch: &mut Watch<'_>, asked: &mut Vec<Asked>, round: u32, lead: i64) -> Storm {
    const JOBS: u64 = 900;
    let env = watch.env();
    let mut random = fastrand::Rng::new();
    let start = in_millis(2_000);
    let due = |n: u64| start.after(Duration::from_millis(3 * n));
    let jobs =
        (0..JOBS).map(|n| Request::protobuf(Wanted::new("sms", Bytes::from(n.to_string())).at(due(n))));
    let jobs = env.ask(jobs.collect());
    let mut commands = Vec::new();
    for (n, job) in (0..JOBS).zip(&jobs) {
        let moment = due(n).as_millis() - lead + random.i64(0..70);
        let command = match n % 4 {
            0 => Request::reschedule(id(job), When::At(due(n).after(Duration::from_secs(1)))),
            _ => Request::cancel(id(job)),
        };
        let command = command.answer_to(format!("storm {round}: {n}"));
        commands.push((Timestamp::from_millis(moment), command));
    }
    asked.extend(jobs);
    asked.extend(env.ask_at(commands));
    let verdict = watch.settle(asked);
    let told = answers(&watch.seen);
    let all = |outcome| told.values().filter(|told| **told == outcome).count();
    assert_eq!(
        (all(v1::Outcome::Cancelled), all(v1::Outcome::Rescheduled)),
        (verdict.cancelled, verdict.rescheduled),
        "{verdict}"
    );
    let of_storm = format!("storm {round}: ");
    let told: Vec<v1::Outcome> = told
        .into_iter()
        .filter(|(name, _)| name.starts_with(&of_storm))
        .map(|(_, outcome)| outcome)
        .collect();
    let count = |outcome| told.iter().filter(|told| **told == outcome).count();
    let storm = Storm {
        cancelled: count(v1::Outcome::Cancelled),
        moved: count(v1::Outcome::Rescheduled),
        late: count(v1::Outcome::AlreadyDispatched),
    };
    assert_eq!(told.len() as u64, JOBS, "{verdict}");
    assert_eq!(
        storm.cancelled + storm.moved + storm.late,
        told.len(),
        "{storm:?}"
    );
    storm
}
