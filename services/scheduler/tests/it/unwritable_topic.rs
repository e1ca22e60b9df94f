//! The topic of an application may not be written: its jobs wait, and the jobs and commands of others do not.

use redeliver_core::JobId;
use redeliver_core::headers::JOB_ID;
use redeliver_proto::v1;
use redeliver_testkit::{acls, eventually};

use crate::env::{DEADLINE, SchedulerEnv, answers, header, id};
use crate::oracle::JobSpec;
use crate::requests::{Request, in_millis};

#[test]
fn jobs_for_denied_topic_wait_alone() {
    let kafka = acls::start().unwrap();
    let env = SchedulerEnv::new(SchedulerEnv::builder("denied").brokers(kafka.brokers()));
    let mut scheduler = env.start("a");
    let denied = env.topics.apps["sms"].clone();
    acls::deny_writes(env.test.brokers(), &denied).unwrap();
    let job = |app: &str, millis| Request::protobuf(JobSpec::new(app, "job").at(in_millis(millis)));
    let sent = env.send(vec![job("sms", 500), job("mail", 1_500), job("sms", 3_600_000)]);
    let mut watch = env.watch();
    let dispatched = |watch: &crate::env::Watch<'_>| -> Vec<JobId> {
        let records = watch.seen.apps.iter();
        records.map(|record| header(record, JOB_ID)).collect()
    };
    eventually("the job of the other application is dispatched", DEADLINE, || {
        watch.look();
        match dispatched(&watch) {
            jobs if jobs == [id(&sent[1])] => Ok(()),
            jobs => Err(format!("{jobs:?}")),
        }
    });
    env.send(vec![Request::cancel(id(&sent[2])).answer_to("cancelled")]);
    eventually("the cancellation is answered", DEADLINE, || {
        watch.look();
        match answers(&watch.seen).get("cancelled") {
            Some(v1::Outcome::Cancelled) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    scheduler.until_ready_but("which may not be written by this process");
    // A scheduler that begins meanwhile finds the job due.
    scheduler.kill_9();
    scheduler.start_again();
    let late = env.send(vec![job("mail", 0)]);
    eventually("the job of the other application is dispatched", DEADLINE, || {
        watch.look();
        match dispatched(&watch) {
            jobs if jobs == [id(&sent[1]), id(&late[0])] => Ok(()),
            jobs => Err(format!("{jobs:?}")),
        }
    });
    acls::permit_writes(env.test.brokers(), &denied).unwrap();
    watch.until_jobs_ended(4);
    watch.look();
    assert_eq!(dispatched(&watch), [id(&sent[1]), id(&late[0]), id(&sent[0])]);
}
