//! Several jobs with one request.

use std::collections::BTreeSet;

use redeliver_proto::auth::SendToken;
use redeliver_proto::v1;
use redeliver_proto::v1::batch_schedule_result::Result as OfJob;
use redeliver_proto::v1::job_service_client::JobServiceClient;
use redeliver_service::identity::new_token;
use reqwest::Method;
use serde_json::json;
use tonic::Code;

use super::identity::write_tokens;
use super::server::{Server, send, with_json};

const PATH: &str = "/v1/jobs:batch";

fn spec(app: &str, key: &str) -> v1::JobSpec {
    v1::JobSpec {
        app: app.to_owned(),
        when: Some(v1::job_spec::When::Delay(prost_types::Duration {
            seconds: 3600,
            nanos: 0,
        })),
        idempotency_key: Some(key.to_owned()),
        data: "1".into(),
        ..v1::JobSpec::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_job_of_a_batch_succeeds_or_fails_on_its_own_over_rest() {
    let server = Server::start();
    let job = |key: &str, data: u32| json!({"appName": "sms", "delay": "1h", "idempotencyKey": key, "jobData": data});
    let jobs = json!({"jobs": [
        job("a", 1), {"appName": "fax", "delay": "1h", "jobData": 1}, job("b", 1), job("a", 1), job("a", 2), 7,
    ]});
    let answer = server.json(Method::POST, PATH, &jobs.to_string()).await.is(200);
    let results = answer.body["results"].as_array().unwrap();
    let statuses: Vec<_> = results
        .iter()
        .map(|result| result["status"].as_u64().unwrap())
        .collect();
    assert_eq!(statuses, [201, 422, 201, 200, 409, 400], "{answer:?}");
    assert_eq!(results[0]["outcome"], "scheduled");
    assert_eq!(results[1]["error"]["code"], "request.appName");
    assert_eq!(results[1]["error"]["field"], "appName");
    assert_eq!(
        (&results[3]["outcome"], &results[3]["id"]),
        (&"duplicate".into(), &results[0]["id"])
    );
    assert_eq!(results[4]["error"]["code"], "idempotency_conflict");
    assert_eq!(results[4]["error"]["jobId"], results[0]["id"]);
    for result in [&results[0], &results[2]] {
        let path = format!("/v1/jobs/{}", result["id"].as_str().unwrap());
        assert_eq!(server.get(&path).await.is(200).body["jobData"], 1);
    }
    let early = server
        .json(
            Method::POST,
            &format!("{PATH}?wait=false"),
            &json!({"jobs": [job("c", 1)]}).to_string(),
        )
        .await
        .is(200);
    assert_eq!(early.body["results"][0]["status"], 202);

    for (body, code, says) in [
        (json!({"jobs": []}), "request.jobs", "write 1 to 1000"),
        (
            json!({"jobs": vec![job("d", 1); 1_001]}),
            "request.jobs",
            "has 1001 jobs",
        ),
    ] {
        server
            .json(Method::POST, PATH, &body.to_string())
            .await
            .problem(422, code, says);
    }
    server.json(Method::POST, PATH, r#"{"job": []}"#).await.problem(
        400,
        "request.json",
        "unknown field `job`",
    );
    let keyed = with_json(server.request(Method::POST, PATH), &jobs.to_string());
    send(keyed.header("idempotency-key", "k")).await.problem(
        422,
        "request.idempotencyKey",
        "belongs in each job",
    );
    let small = Server::start_with(|builder| builder.set("scheduler.limits.batch_bytes", "4000"));
    let large = json!({"jobs": [{"jobData": "x".repeat(8_000)}]}).to_string();
    small
        .json(Method::POST, PATH, &large)
        .await
        .problem(413, "body", "scheduler.limits.batch_bytes");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_the_maximum_size_is_scheduled_in_order() {
    let server = Server::start();
    let jobs: Vec<_> = (0..1_000)
        .map(|number| spec("sms", &number.to_string()))
        .collect();
    let request = || v1::BatchScheduleJobsRequest {
        jobs: jobs.clone(),
        no_wait: false,
    };
    let mut client = server.grpc().await;
    let results = client
        .batch_schedule_jobs(request())
        .await
        .unwrap()
        .into_inner()
        .results;
    let ids = |results: &[v1::BatchScheduleResult], outcome: v1::Outcome| -> Vec<String> {
        let id = |result: &v1::BatchScheduleResult| match &result.result {
            Some(OfJob::Scheduled(scheduled)) if scheduled.outcome() == outcome => scheduled.id.clone(),
            other => panic!("{other:?}"),
        };
        results.iter().map(id).collect()
    };
    let first = ids(&results, v1::Outcome::Scheduled);
    assert_eq!(first.iter().collect::<BTreeSet<_>>().len(), 1_000);
    let keys = results.iter().map(|result| match &result.result {
        Some(OfJob::Scheduled(scheduled)) => scheduled.job.clone().unwrap().idempotency_key,
        other => panic!("{other:?}"),
    });
    assert!(keys.eq((0..1_000).map(|number| number.to_string())));
    let again = client
        .batch_schedule_jobs(request())
        .await
        .unwrap()
        .into_inner()
        .results;
    assert_eq!(ids(&again, v1::Outcome::Duplicate), first);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_needs_the_scope_of_each_job_of_a_batch() {
    let token = new_token().unwrap();
    let server = Server::start_prepared(
        |builder| builder.set("scheduler.auth.tokens_file", "{dir}/tokens"),
        |directory| {
            write_tokens(
                &directory.join("tokens"),
                &[("texts", &token, &["jobs:write:sms"])],
            );
        },
    );
    let token = SendToken::new(Some(token.token.as_str())).unwrap();
    let mut client = JobServiceClient::with_interceptor(server.channel().await, token);
    let request = v1::BatchScheduleJobsRequest {
        jobs: vec![spec("sms", "1"), spec("fax", "1"), spec("sms", "2")],
        no_wait: false,
    };
    let results = client
        .batch_schedule_jobs(request)
        .await
        .unwrap()
        .into_inner()
        .results;
    let codes: Vec<_> = results
        .into_iter()
        .map(|result| match result.result.unwrap() {
            OfJob::Scheduled(_) => Code::Ok,
            OfJob::Error(error) => Code::from(error.code),
        })
        .collect();
    assert_eq!(codes, [Code::Ok, Code::PermissionDenied, Code::Ok]);
}
