//! Several jobs with one request.

use std::collections::BTreeSet;

use redeliver_proto::v1;
use redeliver_proto::v1::batch_schedule_result::Result as OfJob;
use reqwest::Method;
use serde_json::json;

use super::hours;
use super::server::{Server, send, with_json};

const PATH: &str = "/v1/jobs:batch";

fn spec(key: &str) -> v1::JobSpec {
    v1::JobSpec {
        app: "sms".to_owned(),
        when: Some(v1::job_spec::When::Delay(hours(1))),
        idempotency_key: Some(key.to_owned()),
        data: "1".into(),
        ..v1::JobSpec::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_batches_fail_separately() {
    let server = Server::start_with(|builder| builder.set("scheduler.limits.batch_bytes", "400000"));
    let job = |key: &str, data: u32| json!({"appName": "sms", "delay": "1h", "idempotencyKey": key, "jobData": data});
    let jobs = json!({"jobs": [
        job("a", 1), {"appName": "fax", "delay": "1h", "jobData": 1}, job("b", 1), job("a", 1), job("a", 2), 7,
    ]});
    let answer = server.json(Method::POST, PATH, &jobs.to_string()).await.is(200);
    let results = answer.body["results"].as_array().unwrap();
    let statuses = results.iter().map(|result| result["status"].as_u64().unwrap());
    let statuses: Vec<_> = statuses.collect();
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
    let one = json!({"jobs": [job("c", 1)]}).to_string();
    let path = format!("{PATH}?wait=false");
    let early = server.json(Method::POST, &path, &one).await.is(200);
    assert_eq!(early.body["results"][0]["status"], 202);

    let many = json!({"jobs": vec![job("d", 1); 1_001]}).to_string();
    let large = json!({"jobs": [{"jobData": "x".repeat(800_000)}]}).to_string();
    for (body, status, code, says) in [
        (&*many, 422, "request.jobs", "has 1001 jobs"),
        (r#"{"job": []}"#, 400, "request.json", "unknown field `job`"),
        (&*large, 413, "body", "scheduler.limits.batch_bytes"),
    ] {
        let refused = server.json(Method::POST, PATH, body).await;
        refused.problem(status, code, says);
    }
    let keyed = with_json(server.request(Method::POST, PATH), &jobs.to_string());
    let refused = send(keyed.header("idempotency-key", "k")).await;
    refused.problem(422, "request.idempotencyKey", "belongs in each job");
    schedule_largest_batch(&server).await;
}

/// The jobs are scheduled in their order.
async fn schedule_largest_batch(server: &Server) {
    let jobs: Vec<_> = (0..1_000).map(|number| spec(&number.to_string())).collect();
    let request = || v1::BatchScheduleJobsRequest {
        jobs: jobs.clone(),
        no_wait: false,
    };
    let mut client = server.grpc().await;
    let results = client.batch_schedule_jobs(request()).await;
    let results = results.unwrap().into_inner().results;
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
    let again = client.batch_schedule_jobs(request()).await;
    let again = again.unwrap().into_inner().results;
    assert_eq!(ids(&again, v1::Outcome::Duplicate), first);
}
