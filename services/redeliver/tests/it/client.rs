//! The client crate with a real scheduler: Kafka and gRPC address the same jobs.

use std::time::Duration;

use redeliver_client::convert::{from_headers, time};
use redeliver_client::messages::{Job, JobState, Outcome};
use redeliver_client::{
    ClientError, Code, Endpoint, JobClient, JobProducer, JobRequest, KafkaSettings, When,
};
use redeliver_testkit::{binary, brokers, eventually_async, run, unique};

use crate::services::{APP, Services};
use crate::support::DEADLINE;

const HOUR: Duration = Duration::from_secs(3600);

fn producer(services: &Services) -> JobProducer {
    let (_, topics) = services.pipe.jobs.as_ref().unwrap();
    let kafka = KafkaSettings::new(brokers(), unique("client"));
    JobProducer::new(&kafka, topics.ingest.clone()).unwrap()
}

pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build();
    runtime.unwrap().block_on(future)
}

/// The job, once a condition holds.
async fn until(jobs: &JobClient, id: redeliver_client::JobId, what: impl Fn(&Job) -> bool) -> Job {
    eventually_async("the job is as it should be", DEADLINE, async || {
        let job = jobs.get(id).await.unwrap();
        job.filter(&what).ok_or("not yet")
    })
    .await
}

#[test]
fn job_obeys_kafka_and_grpc() {
    let services = Services::new("client-kafka");
    let _scheduler = services.pipe.scheduler("a");
    block_on(one_job_over_kafka_and_grpc(&services));
}

async fn one_job_over_kafka_and_grpc(services: &Services) {
    let producer = producer(services);
    let jobs = JobClient::connect(&Endpoint::new(&services.scheduler))
        .await
        .unwrap();

    let request = JobRequest::after(APP, HOUR).data("x").key("k").header("a", "b");
    let free = producer.schedule(&request).await.unwrap();
    let keyed = request.clone().idempotency_key("once");
    let first = producer.schedule(&keyed).await.unwrap();
    let second = producer.schedule(&keyed).await.unwrap();
    for id in [free, first] {
        let job = until(&jobs, id, |_| true).await;
        assert_eq!(
            (job.id.parse(), job.state(), &job.data[..]),
            (Ok(id), JobState::Scheduled, &b"x"[..])
        );
        assert_eq!(
            (job.key.as_deref(), from_headers(&job.headers).last("a")),
            (Some(&b"k"[..]), Some(&b"b"[..]))
        );
    }
    // The same request over gRPC returns the first job, so all requests were written to one partition.
    let again = jobs.schedule(&keyed).await.unwrap();
    assert_eq!((again.id, again.is_duplicate), (first, true));
    assert_eq!(jobs.get(second).await.unwrap(), None);

    // The newest request can count instead, and the key names the job.
    let event = request.clone().idempotency_key("event").replace();
    let moving = jobs.schedule(&event).await.unwrap();
    assert_eq!((moving.is_duplicate, moving.is_replacement), (false, false));
    let moved = jobs.schedule(&event.clone().data("y")).await.unwrap();
    assert_eq!((moved.id, moved.is_replacement), (moving.id, true));
    producer
        .reschedule_by_key(APP, "event", When::After(2 * HOUR))
        .await
        .unwrap();
    let job = until(&jobs, moving.id, |job| job.revision == 3).await;
    assert_eq!(&job.data[..], b"y");
    let again = jobs
        .reschedule_by_key(APP, "event", When::After(HOUR))
        .await
        .unwrap();
    assert_eq!(again.outcome, Outcome::Rescheduled);
    producer.cancel_by_key(APP, "event").await.unwrap();
    until(&jobs, moving.id, |job| job.state() == JobState::Cancelled).await;
    let late = jobs.cancel_by_key(APP, "event").await.unwrap();
    assert_eq!(late.outcome, Outcome::AlreadyCancelled);

    producer.reschedule(free, When::After(2 * HOUR)).await.unwrap();
    let moved = until(&jobs, free, |job| job.revision == 2).await;
    assert!(
        time(moved.scheduled_time) >= time(moved.accepted_at).map(|at| at.after(2 * HOUR)),
        "{moved:?}"
    );
    producer.cancel(free).await.unwrap();
    until(&jobs, free, |job| job.state() == JobState::Cancelled).await;
    let late = jobs.cancel(free).await.unwrap();
    assert_eq!(late.outcome, Outcome::AlreadyCancelled);
    let cancelled = jobs.cancel(first).await.unwrap();
    assert_eq!(cancelled.outcome, Outcome::Cancelled);
    assert_eq!(cancelled.job.map(|job| job.state()), Some(JobState::Cancelled));
    assert_eq!(jobs.cancel(second).await.unwrap().outcome, Outcome::Unknown);
    assert_eq!(jobs.stats(None, 1).await.unwrap().scheduled, 0);
}

#[test]
fn token_of_cli_is_accepted() {
    let services = Services::new("client-scopes");
    let directory = services.pipe.env.directory();
    let scope = format!("jobs:write:{APP}");
    let new_token = |name: &str, scope: &str| {
        let mut command = binary("redeliver");
        command.args(["tokens", "new", "--name", name, "--scope", scope]);
        run(command)
    };
    let printed = new_token("writer", &scope);
    assert_eq!(
        (printed.code, printed.stderr.as_str()),
        (Some(0), ""),
        "{printed:?}"
    );
    let line = |start: &str| {
        printed
            .stdout
            .lines()
            .find(|line| line.starts_with(start))
            .unwrap()
    };
    let (token, entry) = (line("redeliver_"), line("  - {"));
    assert!(!entry.contains(token));
    let (token_file, tokens_file) = (directory.join("token"), directory.join("tokens.yaml"));
    std::fs::write(&token_file, token).unwrap();
    std::fs::write(&tokens_file, format!("tokens:\n{entry}\n")).unwrap();
    let setting = format!("scheduler.auth.tokens_file={}", tokens_file.display());
    let _scheduler = services.pipe.start("scheduler", "a", &["--set", &setting]);

    block_on(async {
        let endpoint = Endpoint::new(&services.scheduler).token(token);
        let jobs = JobClient::connect(&endpoint).await.unwrap();
        jobs.schedule(&JobRequest::after(APP, HOUR)).await.unwrap();
        let denied = jobs
            .schedule(&JobRequest::after("nobody", HOUR))
            .await
            .unwrap_err();
        assert_eq!(denied.code(), Some(Code::PermissionDenied), "{denied}");
        assert!(!denied.is_transient());
        assert!(
            matches!(&denied, ClientError::Refused { reason: Some(reason), .. } if reason == "PERMISSION_DENIED"),
            "{denied:?}"
        );
    });
    let refused = services.fails(
        1,
        &["jobs", "stats", "--token-file", token_file.to_str().unwrap()],
    );
    let says = "`token:writer` may not read jobs of all applications; it needs the scope jobs:read (PERMISSION_DENIED)\n";
    assert!(refused.stderr.ends_with(says), "{refused:?}");
    let unknown = new_token("x", "jobs:rite");
    assert_eq!(unknown.code, Some(2));
    assert!(
        unknown.stderr.contains("the verbs of jobs are read, write and *"),
        "{unknown:?}"
    );
}
