//! What has become of jobs, as far as it depends on the inspector alone. `services/redeliver/tests/it/outcomes.rs` has schedulers and workers.

use std::sync::Arc;

use redeliver_core::headers::{Origin, write_lineage};
use redeliver_core::{Headers, Position, Record, Timestamp};
use redeliver_proto::v1;
use redeliver_proto::v1::JobOutcomeState as State;
use redeliver_proto::v1::waiting_service_client::WaitingServiceClient;
use redeliver_testkit::kafka_request::delete_topic;
use redeliver_testkit::{ensure, eventually_async};
use tonic::{Code, Status};

use crate::access::Callers;
use crate::support::{DEADLINE, Dead, Inspector, InspectorEnv, assert_refused, dead};

/// A job.
const JOB: &str = "01KAJQ6Z2B0003000000000A7X";

/// A pipeline with an output that reads the topic of an application.
struct World {
    env: InspectorEnv,
    pipeline: Arc<str>,
    output: Arc<str>,
}

impl World {
    fn new(name: &str) -> Self {
        let mut env = InspectorEnv::new(name);
        let pipeline: Arc<str> = env.base.name().into();
        let output: Arc<str> = format!("{pipeline}-out").into();
        env.base.set(&format!("pipelines.{pipeline}.output"), &output);
        env.base.set("scheduler.apps.shop.topic", &pipeline);
        Self {
            env,
            pipeline,
            output,
        }
    }

    /// Writes the record of a job, and returns its copy in the pipeline.
    async fn dispatch(&self, job: &str) -> Dead {
        let record = dead("k", "job", &[("job-id", job)]);
        let headers = record.headers.clone();
        let written = self.env.put(&self.pipeline, 0, vec![record]).await;
        copy(&self.pipeline, &written[0], headers)
    }
}

fn copy(pipeline: &str, position: &Position, headers: Headers) -> Dead {
    let record = Record {
        position: position.clone(),
        timestamp: Some(Timestamp::from_millis(1_700_000_000_000)),
        key: None,
        value: None,
        headers,
        unreadable_headers: 0,
    };
    let mut copy = dead("k", "copy", &[]);
    copy.headers = record.headers.clone();
    write_lineage(&mut copy.headers, pipeline, &Origin::of(&record), 0);
    copy
}

async fn outcomes(inspector: &mut Inspector, job: &str, topic: &str) -> Vec<v1::JobOutcome> {
    let request = v1::GetJobOutcomesRequest {
        id: job.to_owned(),
        topic: topic.to_owned(),
    };
    let mut client = WaitingServiceClient::new(inspector.channel().await);
    let answer = client.get_job_outcomes(request).await;
    answer.unwrap().into_inner().outcomes
}

/// The outcome in the pipeline, once it has this state.
async fn until(inspector: &mut Inspector, job: &str, topic: &str, state: State) -> v1::JobOutcome {
    eventually_async(&format!("{job} is {state:?}"), DEADLINE * 2, async || {
        let outcome = outcomes(inspector, job, topic).await.swap_remove(0);
        ensure(outcome.state() == state, format!("{outcome:?}")).map(|()| outcome)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn recreated_topic_has_fewer_partitions() {
    const LATER: &str = "01KAJQ6Z2B0003000000000A7Y";
    let world = World::new("outcomes-fewer");
    let (env, output) = (&world.env, &world.output);
    env.recreate_topic(&world.pipeline, 1).await;
    env.recreate_topic(output, 2).await;
    let copy = world.dispatch(JOB).await;
    env.put(output, 1, vec![copy]).await;
    let mut inspector = env.start().await;
    let found = until(&mut inspector, JOB, &world.pipeline, State::Succeeded).await;
    assert_eq!(found.position.unwrap().partition, 1);

    delete_topic(env.base.brokers(), output);
    env.recreate_topic(output, 1).await;
    until(&mut inspector, JOB, &world.pipeline, State::Unknown).await;
    let copy = world.dispatch(LATER).await;
    env.put(output, 0, vec![copy]).await;
    let found = until(&mut inspector, LATER, &world.pipeline, State::Succeeded).await;
    assert_eq!(found.position.unwrap().partition, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn disabled_index_says_so() {
    let mut world = World::new("outcomes-disabled");
    world.env.base.set("dlq_inspector.max_job_outcomes", "0");
    let mut inspector = world.env.start().await;
    let found = outcomes(&mut inspector, JOB, &world.pipeline).await;
    let [outcome] = &found[..] else {
        panic!("{found:?}");
    };
    assert_eq!(
        (outcome.state(), &*outcome.reason),
        (State::Unknown, "dlq_inspector.max_job_outcomes is 0")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn outcome_contains_nothing_masked() {
    let scopes: [(&str, &[&str]); 2] = [
        ("all", &["dead-letters:*"]),
        ("masked", &["dead-letters:read", "dead-letters:payload"]),
    ];
    let mut callers = Callers::without_dead_letters("outcomes-masked", &scopes).await;
    let [orders, people] = callers.topics.clone();
    let rules = format!(
        r#"[{{"topics": ["{orders}"], "headers": ["error-code"]}}, {{"topics": ["{people}"], "headers": ["original-*"]}}]"#
    );
    callers.env.base.set("dlq_inspector.masking", &rules);
    for (app, letters) in [("orders", &orders), ("people", &people)] {
        let pipeline = letters.strip_suffix("-dlq").unwrap();
        callers.env.base.set(&format!("pipelines.{pipeline}.retry"), "{}");
        callers
            .env
            .base
            .set(&format!("scheduler.apps.{app}.topic"), pipeline);
        let origin = Position {
            topic: pipeline.into(),
            partition: 0,
            offset: 7,
        };
        let mut letter = copy(
            pipeline,
            &origin,
            [("job-id", Some(JOB.as_bytes()))].into_iter().collect(),
        );
        for (name, value) in [
            ("error-class", "permanent"),
            ("error-code", "s3cret.code"),
            ("error-message", "s3cret message"),
        ] {
            letter.headers.push_text(name, value);
        }
        callers.env.put(letters, 0, vec![letter]).await;
    }
    let mut inspector = callers.env.start().await;
    let channel = inspector.channel().await;
    let ask = async |caller: &str, letters: &str| -> Result<v1::JobOutcome, Status> {
        let sending = callers.interceptor(caller);
        let mut client = WaitingServiceClient::with_interceptor(channel.clone(), sending);
        let request = v1::GetJobOutcomesRequest {
            id: JOB.to_owned(),
            topic: letters.strip_suffix("-dlq").unwrap().to_owned(),
        };
        let answer = client.get_job_outcomes(request).await?;
        Ok(answer.into_inner().outcomes.swap_remove(0))
    };
    let whole = eventually_async("the job is dead", DEADLINE, async || {
        let outcome = ask("all", &orders).await.unwrap();
        ensure(outcome.state() == State::Dead, format!("{outcome:?}")).map(|()| outcome)
    })
    .await;
    assert_eq!(
        (&*whole.error_class, &*whole.error_code),
        ("permanent", "s3cret.code")
    );
    let masked = ask("masked", &orders).await.unwrap();
    assert_eq!((masked.state(), &*masked.error_class), (State::Dead, "permanent"));
    assert!(!format!("{masked:?}").contains("s3cret"), "{masked:?}");
    // Positions tell where a record comes from.
    let refused = ask("masked", &people).await.unwrap_err();
    assert_refused(&refused, Code::PermissionDenied, "PERMISSION_DENIED");
}
