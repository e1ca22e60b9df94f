//! The topic of an application is deleted: its jobs wait or become dead letters, and the jobs of others stay on time.

use std::time::Duration;

use redeliver_core::headers::{self, JOB_ID};
use redeliver_core::{JobId, Record, Timestamp};
use redeliver_proto::v1;
use redeliver_testkit::{ChaosPermit, ServiceProcess, ensure, eventually};

use crate::env::{DEADLINE, SchedulerEnv, answers, header, id};
use crate::oracle::{JobSpec, Sent, When};
use crate::requests::{Request, in_millis};

/// The application whose topic is deleted.
const GONE: &str = "sms";

#[track_caller]
fn until_waiting(scheduler: &mut ServiceProcess, jobs: u64) {
    scheduler.until_metric("redeliver_scheduler_unavailable_topic_jobs", |waiting| {
        waiting == jobs
    });
}

fn job(app: &str, text: String, due: Timestamp) -> Request {
    Request::protobuf(JobSpec::new(app, text).at(due))
}

/// The job ids of records.
fn ids(records: &[Record]) -> Vec<JobId> {
    let mut ids: Vec<JobId> = records.iter().map(|record| header(record, JOB_ID)).collect();
    ids.sort_unstable();
    ids
}

fn sorted(sent: &[Sent]) -> Vec<JobId> {
    let mut ids: Vec<JobId> = sent.iter().map(id).collect();
    ids.sort_unstable();
    ids
}

#[test]
fn jobs_wait_for_missing_topic() {
    let _permit = ChaosPermit::acquire();
    let env = SchedulerEnv::new(SchedulerEnv::builder("missing"));
    let mut scheduler = env.start("a");
    env.delete_topic(GONE);
    let due = in_millis(3_000);
    let gone = env.send((0..3).map(|n| job(GONE, format!("{n}"), due)).collect());
    // 100 per second, before and after.
    let others = (0..300).map(|n| {
        let due = Timestamp::from_millis(due.as_millis() - 1_000).after(Duration::from_millis(10 * n));
        job("mail", format!("{n}"), due)
    });
    let others = env.send(others.collect());
    let mut watch = env.watch_without(GONE);
    watch.until_jobs_ended(others.len());
    until_waiting(&mut scheduler, 3);
    watch.look();
    assert_eq!(ids(&watch.seen.apps), sorted(&others));
    let (status, body) = scheduler.get("/readyz");
    assert!(
        status == 200 && body.contains(&*env.topics.apps[GONE]),
        "{status} {body}"
    );

    // One job is cancelled while it waits, and another one is rescheduled.
    env.send(vec![
        Request::cancel(id(&gone[0])).answer_to("cancelled"),
        Request::reschedule(id(&gone[1]), When::At(in_millis(500))).answer_to("rescheduled"),
    ]);
    eventually("they are answered", DEADLINE, || {
        watch.look();
        let answers = answers(&watch.seen);
        let found =
            [answers.get("cancelled"), answers.get("rescheduled")].map(Option::<&v1::Outcome>::copied);
        let wanted = [v1::Outcome::Cancelled, v1::Outcome::Rescheduled].map(Some);
        ensure(found == wanted, format!("{found:?}"))
    });
    until_waiting(&mut scheduler, 2);
    env.create_topics();
    watch.until_jobs_ended(others.len() + 3);
    until_waiting(&mut scheduler, 0);
    let mut seen = env.watch();
    seen.look();
    let of_gone: Vec<Record> = seen
        .seen
        .apps
        .iter()
        .filter(|record| record.position.topic == env.topics.apps[GONE])
        .cloned()
        .collect();
    assert_eq!(ids(&of_gone), sorted(&gone[1..]));
    assert_eq!((seen.seen.apps.len(), seen.seen.dlq.len()), (others.len() + 2, 0));
}

#[test]
fn missing_topic_timeout_makes_dead_letter() {
    let env =
        SchedulerEnv::new(SchedulerEnv::builder("missing-dead").set("kafka.topics.missing_timeout", "3s"));
    let mut scheduler = env.start("a");
    env.delete_topic(GONE);
    let due = in_millis(1_000);
    let gone = env.send(vec![job(GONE, "dead".to_owned(), due)]);
    until_waiting(&mut scheduler, 1);
    let mut watch = env.watch_without(GONE);
    watch.until_jobs_ended(1);
    watch.look();
    let [letter] = &watch.seen.dlq[..] else {
        panic!("{:?}", watch.seen.dlq)
    };
    let text = |name: &str| header::<String>(letter, name);
    assert_eq!(text(headers::ERROR_CODE), "topic.missing");
    assert_eq!(letter.value.as_deref(), Some(&b"dead"[..]));
    assert_eq!(
        text(headers::ORIGINAL_OFFSET),
        gone[0].position.offset.to_string()
    );
    assert!(header::<Timestamp>(letter, headers::ERROR_TIMESTAMP) >= due.after(Duration::from_secs(3)));
    until_waiting(&mut scheduler, 0);
}
