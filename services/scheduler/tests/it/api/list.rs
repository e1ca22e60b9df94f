//! Lists of waiting jobs, and statistics of one application, over REST and gRPC.

use redeliver_core::Timestamp;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::v1;
use redeliver_testkit::{EnvBuilder, LocalRedis, ensure, eventually_async};
use reqwest::Method;
use serde_json::json;
use tonic::Code;

use super::server::{Answer, Server};
use crate::env::DEADLINE;
use crate::index::own_redis::Raw;

/// 2098-01-01, plus seconds.
fn at(seconds: i64) -> Timestamp {
    Timestamp::from_millis(4_039_372_800_000 + seconds * 1_000)
}

fn two_apps(builder: EnvBuilder) -> EnvBuilder {
    builder
        .set("scheduler.max_ahead", "36500d")
        .scheduler(&[("sms", "{name}-sms"), ("mail", "{name}-mail")])
}

/// Schedules jobs that are due at these seconds, in the order of the seconds. Returns their ids.
async fn schedule(server: &Server, app: &str, seconds: impl IntoIterator<Item = i64>) -> Vec<String> {
    let job = |seconds: i64| {
        json!({"appName": app, "scheduledTime": at(seconds).to_string(), "jobData": seconds, "key": "k",
               "headers": {"h": "v"}, "requestId": seconds.to_string()})
    };
    let jobs: Vec<_> = seconds.into_iter().map(job).collect();
    let body = json!({ "jobs": jobs }).to_string();
    let answer = server.json(Method::POST, "/v1/jobs:batch", &body).await.is(200);
    let results = answer.body["results"].as_array().unwrap();
    let id = |result: &serde_json::Value| {
        assert_eq!(result["status"], 201, "{result}");
        result["id"].as_str().unwrap().to_owned()
    };
    results.iter().map(id).collect()
}

fn ids(answer: &Answer) -> Vec<String> {
    let jobs = answer.body["jobs"].as_array().unwrap();
    jobs.iter()
        .map(|job| job["id"].as_str().unwrap().to_owned())
        .collect()
}

/// All pages of a list over REST: the ids of each page.
async fn pages(server: &Server, query: &str) -> Vec<Vec<String>> {
    let (mut pages, mut token) = (Vec::new(), String::new());
    loop {
        let page = server
            .get(&format!("/v1/jobs?{query}&pageToken={token}"))
            .await
            .is(200);
        pages.push(ids(&page));
        match page.body["nextPageToken"].as_str() {
            Some(next) => next.clone_into(&mut token),
            None => return pages,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_are_listed_by_due_time() {
    let server = Server::start_with(two_apps);
    assert_eq!(pages(&server, "").await, [[""; 0]]);
    let sms = schedule(&server, "sms", (0..60).map(|job| job * 2)).await;
    let mail = schedule(&server, "mail", (0..60).map(|job| job * 2 + 1)).await;
    let both: Vec<String> = sms
        .iter()
        .zip(&mail)
        .flat_map(|(sms, mail)| [sms.clone(), mail.clone()])
        .collect();

    // An answer that was final before the call is in the list.
    for size in [1, 7, 50, 1_000] {
        let all = pages(&server, &format!("pageSize={size}")).await;
        assert_eq!(all.concat(), both, "{size}");
        assert!(all.iter().all(|page| page.len() <= size), "{all:?}");
    }
    let default = server.get("/v1/jobs").await.is(200);
    assert_eq!(ids(&default), both[..100]);
    assert_eq!(pages(&server, "app=mail").await.concat(), mail);
    assert_eq!(
        pages(&server, "app=mail&state=scheduled&pageSize=9")
            .await
            .concat(),
        mail
    );
    let range = format!("dueFrom={}&dueUntil={}&pageSize=3", at(10), at(20));
    assert_eq!(pages(&server, &range).await.concat(), both[10..20]);

    // Jobs are shown as GetJob shows them, but without the record to dispatch.
    let mut shown = default.body["jobs"][1].clone();
    let mut whole = server.get(&format!("/v1/jobs/{}", mail[0])).await.is(200).body;
    for field in ["jobData", "key", "headers"] {
        assert!(whole.as_object_mut().unwrap().remove(field).is_some());
    }
    assert_eq!(shown.as_object_mut().unwrap().remove("longWait"), None);
    assert_eq!(shown, whole);

    // An ended job is not listed.
    server.delete(&format!("/v1/jobs/{}", sms[0])).await.is(200);
    assert_eq!(pages(&server, "app=sms").await.concat(), sms[1..]);
    let stats = server.get("/v1/stats?app=sms").await.is(200);
    assert_eq!(
        (&stats.body["scheduled"], &stats.body["later"]),
        (&59.into(), &59.into())
    );
    assert_eq!(stats.body["nextDue"], at(2).to_string());
    assert_eq!(server.get("/v1/stats").await.is(200).body["scheduled"], 119);
    list_over_grpc(&server, &sms).await;
    // A typing error is not an application without jobs.
    for path in [
        "/v1/stats?app=smss",
        "/v1/jobs?app=smss",
        "/v1/schedules?app=smss",
    ] {
        let unknown = server.get(path).await;
        unknown.problem(422, "request.appName", "did you mean `sms`");
    }
    server.shut_down();
}

#[tokio::test(flavor = "multi_thread")]
async fn applications_are_listed() {
    let server = Server::start_with(|builder| {
        two_apps(builder)
            .set("scheduler.apps.sms.rate", "2.5")
            .set("scheduler.apps.sms.max_waiting", "9")
    });
    schedule(&server, "sms", [4, 2]).await;
    let pause = server.json(Method::POST, "/v1/applications/mail/control:pause", "{}");
    pause.await.is(200);
    let now = json!({"appName": "mail", "delay": "0s", "jobData": 1}).to_string();
    server.json(Method::POST, "/v1/jobs", &now).await.is(201);
    let sms = json!({"name": "sms", "paused": false, "ratePerSecond": 2.5, "maxWaiting": 9, "due": 0,
                     "nextDue": at(2).to_string()});
    // The pause and the due job are known a moment later.
    eventually_async("the applications", DEADLINE, async || {
        let mut apps = server.get("/v1/applications").await.is(200).body["applications"].take();
        for app in apps.as_array_mut().unwrap() {
            let name = app["name"].as_str().unwrap().to_owned();
            let topic = app.as_object_mut().unwrap().remove("topic").unwrap();
            assert!(topic.as_str().unwrap().ends_with(&format!("-{name}")), "{topic}");
        }
        let mail = apps[0].as_object_mut().unwrap();
        if mail.remove("nextDue").is_none() || mail["paused"] == false {
            return Err(apps);
        }
        assert_eq!(apps, json!([{"name": "mail", "paused": true, "due": 1}, sms]));
        Ok(())
    })
    .await;
    server.shut_down();
}

/// The same over gRPC. A page token is valid in both protocols.
async fn list_over_grpc(server: &Server, sms: &[String]) {
    let mut client = server.grpc().await;
    let request = v1::ListJobsRequest {
        app: "sms".to_owned(),
        due_from: Some(to_timestamp(at(10))),
        due_until: Some(to_timestamp(at(30))),
        page_size: 4,
        ..v1::ListJobsRequest::default()
    };
    let first = client.list_jobs(request.clone()).await.unwrap().into_inner();
    assert!(first.jobs.iter().all(|job| job.app == "sms"
        && job.data.is_empty()
        && job.key.is_none()
        && job.headers.is_empty()
        && !job.long_wait));
    let mut seen: Vec<String> = first.jobs.into_iter().map(|job| job.id).collect();
    let token = first.next_page_token;
    let query = format!("app=sms&dueFrom={}&dueUntil={}&pageToken={token}", at(10), at(30));
    seen.extend(ids(&server.get(&format!("/v1/jobs?{query}")).await.is(200)));
    assert_eq!(seen, sms[5..15]);
    let stats = v1::GetStatsRequest {
        app: "mail".to_owned(),
        minutes: 1,
    };
    let stats = client.get_stats(stats).await.unwrap().into_inner();
    assert_eq!((stats.scheduled, stats.per_minute.len()), (60, 1));

    for (request, says) in [
        (
            v1::ListJobsRequest {
                page_token: token.clone(),
                ..v1::ListJobsRequest::default()
            },
            "page_token: belongs to a list with other filters",
        ),
        (
            v1::ListJobsRequest {
                due_until: request.due_from,
                ..request.clone()
            },
            "due_until: is not later than `due_from`",
        ),
        (
            v1::ListJobsRequest {
                due_from: Some(prost_types::Timestamp {
                    seconds: i64::MAX,
                    nanos: 0,
                }),
                ..request.clone()
            },
            "due_from: is out of range",
        ),
        (
            v1::ListJobsRequest { state: 9, ..request },
            "state: is 9; expected 1 (scheduled)",
        ),
    ] {
        let status = client.list_jobs(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        assert!(status.message().starts_with(says), "{status:?}");
    }
    for (query, code, says) in [
        (
            "dueFrom=tomorrow",
            "request.dueFrom",
            "`dueFrom` is `tomorrow`; expected a date and time",
        ),
        (
            "state=done",
            "request.state",
            "`state` is `done`, which is not one of scheduled",
        ),
        ("page_size=1", "request.query", "unknown field `page_size`"),
    ] {
        server
            .get(&format!("/v1/jobs?{query}"))
            .await
            .problem(422, code, says);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rebuilt_shards_are_not_left_out() {
    const JOBS: usize = 90;
    let redis = LocalRedis::start().unwrap();
    let server = Server::start_with(|builder| two_apps(builder.redis(redis.url())));
    let raw = Raw::connect(&redis.url()).await;
    let all = schedule(&server, "sms", (0..JOBS).map(|job| i64::try_from(job).unwrap())).await;
    raw.call(&["FLUSHALL"]).await;
    // A shard notices the loss when it asks its index, for example for the idempotency key of a request.
    let keyed = |key: i64| json!({"appName": "mail", "scheduledTime": at(key).to_string(), "idempotencyKey": key.to_string(), "jobData": 1});
    let body = json!({ "jobs": (0..30).map(keyed).collect::<Vec<_>>() }).to_string();
    let scheduling = server.json(Method::POST, "/v1/jobs:batch", &body);
    let reading = eventually_async("lists and counts are complete again", DEADLINE, async || {
        let (list, stats) = (
            server.get("/v1/jobs?app=sms&pageSize=1000").await,
            server.get("/v1/stats?app=sms").await,
        );
        let mut is_complete = true;
        for answer in [&list, &stats] {
            if answer.status == 503 {
                assert_eq!(answer.body["code"], "index_incomplete", "{answer:?}");
                assert_eq!(answer.retry_after.as_deref(), Some("1"));
                is_complete = false;
            } else {
                assert_eq!(answer.status, 200, "{answer:?}");
            }
        }
        if list.status == 200 {
            assert_eq!(ids(&list), all);
        }
        if stats.status == 200 {
            assert_eq!(stats.body["scheduled"], JOBS);
        }
        ensure(is_complete, list.text + &stats.text)
    });
    let (scheduled, ()) = tokio::join!(scheduling, reading);
    scheduled.is(200);
    server.shut_down();
}
