//! The OpenAPI document and its page.

use reqwest::Method;
use serde_json::Value;

use super::server::Server;

mod tools;

const METHODS: [&str; 5] = ["get", "post", "put", "patch", "delete"];
const JOB: &str = r#"{"appName":"sms","delay":"1h","idempotencyKey":"k","jobData":1}"#;

/// Sends a request, and checks that the document contains its status.
async fn documented(
    server: &Server,
    document: &Value,
    method: &str,
    route: &str,
    path: &str,
    body: &str,
) -> u16 {
    let answer = server
        .json(method.to_uppercase().parse().unwrap(), path, body)
        .await;
    let status = answer.status.as_u16();
    let known = &document["paths"][route][method]["responses"][status.to_string()];
    assert!(known.is_object(), "{method} {route} answers {status}: {answer:?}");
    assert!(
        known["content"][&answer.kind].is_object(),
        "{method} {route} {status}: {answer:?} {known}"
    );
    status
}

#[tokio::test(flavor = "multi_thread")]
async fn document_contains_routes_and_statuses() {
    let server = Server::start_with(|builder| builder.set("scheduler.token_file", "{dir}/token"));
    // The document needs no token.
    let document = server.get("/v1/openapi.json").await.is(200).body;
    assert!(
        document["openapi"].as_str().unwrap().starts_with("3.1."),
        "{document}"
    );
    let server = Server::start();
    let paths = document["paths"].as_object().unwrap();
    for (path, item) in paths {
        for method in METHODS {
            let concrete = path
                .replace("{id}", "01KAJQ6Z2B0001G00000000A7X")
                .replace("{app}", "sms");
            let answer = server
                .json(method.to_uppercase().parse().unwrap(), &concrete, "{}")
                .await;
            let is_served = answer.status.as_u16() != 405 && answer.body["code"] != "path";
            assert_eq!(
                item.get(method).is_some(),
                is_served,
                "{method} {path}: {answer:?}"
            );
        }
    }
    assert_eq!(
        paths.keys().collect::<Vec<_>>(),
        [
            "/v1/applications",
            "/v1/applications/{app}/control",
            "/v1/applications/{app}/control:pause",
            "/v1/applications/{app}/control:rate",
            "/v1/applications/{app}/control:reset",
            "/v1/applications/{app}/control:resume",
            "/v1/controls",
            "/v1/jobs",
            "/v1/jobs/{id}",
            "/v1/jobs:batch",
            "/v1/schedules",
            "/v1/schedules/{id}",
            "/v1/schedules/{id}/preview",
            "/v1/schedules/{id}:pause",
            "/v1/schedules/{id}:resume",
            "/v1/schedules/{id}:trigger",
            "/v1/schedules:preview",
            "/v1/stats"
        ]
    );

    let ask = async |method: &str, route: &str, path: &str, body: &str| {
        documented(&server, &document, method, route, path, body).await
    };
    let other = JOB.replace(":1}", ":2}");
    for (path, body, status) in [
        ("/v1/jobs", JOB, 201),
        ("/v1/jobs", JOB, 200),
        ("/v1/jobs", other.as_str(), 409),
        ("/v1/jobs?wait=false", JOB, 202),
        ("/v1/jobs", "{", 400),
        ("/v1/jobs", "{}", 422),
        ("/v1/jobs?x=1", JOB, 422),
    ] {
        assert_eq!(ask("post", "/v1/jobs", path, body).await, status);
    }
    let batch = format!("{{\"jobs\":[{JOB}]}}");
    assert_eq!(ask("post", "/v1/jobs:batch", "/v1/jobs:batch", &batch).await, 200);
    assert_eq!(ask("post", "/v1/jobs:batch", "/v1/jobs:batch", "{").await, 400);
    let id = server
        .json(Method::POST, "/v1/jobs", JOB)
        .await
        .text_of("id")
        .to_owned();
    let job = format!("/v1/jobs/{id}");
    let route = "/v1/jobs/{id}";
    assert_eq!(ask("patch", route, &job, r#"{"delay":"2h"}"#).await, 200);
    assert_eq!(ask("patch", route, &job, "{").await, 400);
    assert_eq!(ask("delete", route, &job, "").await, 200);
    assert_eq!(ask("patch", route, &job, r#"{"delay":"2h"}"#).await, 409);
    assert_eq!(ask("delete", route, "/v1/jobs/x", "").await, 422);
    let never = "/v1/jobs/01KAJQ6Z2B0001G00000000A7X";
    assert_eq!(ask("delete", route, never, "").await, 404);
    for (path, status) in [
        ("/v1/jobs", 200),
        ("/v1/jobs?app=sms&pageSize=1", 200),
        ("/v1/jobs?pageSize=x", 422),
        ("/v1/jobs?state=expired", 422),
    ] {
        assert_eq!(ask("get", "/v1/jobs", path, "").await, status);
    }
    let route = "/v1/jobs";
    let by_key = "/v1/jobs?appName=sms&idempotencyKey=k";
    assert_eq!(ask("delete", route, by_key, "").await, 200);
    assert_eq!(ask("patch", route, by_key, r#"{"delay":"2h"}"#).await, 409);
    assert_eq!(ask("delete", route, "/v1/jobs?appName=sms", "").await, 422);
    assert_eq!(ask("delete", route, &format!("{by_key}unused"), "").await, 404);
    let replacing = JOB
        .replace("1h", "2h")
        .replace("{", r#"{"onConflict":"replace","#);
    assert_eq!(ask("post", route, "/v1/jobs", &replacing).await, 201);
    assert_eq!(ask("post", route, "/v1/jobs", &replacing).await, 200);
    assert_eq!(ask("patch", route, by_key, r#"{"delay":"2h"}"#).await, 200);
    assert_eq!(ask("get", "/v1/stats", "/v1/stats", "").await, 200);
    assert_eq!(ask("get", "/v1/stats", "/v1/stats?minutes=x", "").await, 422);
    let applications = "/v1/applications";
    assert_eq!(ask("get", applications, applications, "").await, 200);
    let schedule = r#"{"id":"s","every":"1h","appName":"sms","jobData":1}"#;
    let other = schedule.replace(":1}", ":2}");
    let schedules = "/v1/schedules";
    for (body, status) in [
        (schedule, 201),
        (schedule, 200),
        (&*other, 409),
        ("{", 400),
        ("{}", 422),
    ] {
        assert_eq!(ask("post", schedules, schedules, body).await, status);
    }
    assert_eq!(ask("get", schedules, schedules, "").await, 200);
    let (route, path) = ("/v1/schedules/{id}", "/v1/schedules/s");
    assert_eq!(ask("get", route, path, "").await, 200);
    let update = other.replace("\"id\":\"s\",", "");
    assert_eq!(
        ask("put", route, "/v1/schedules/s?expectedRevision=7", &update).await,
        409
    );
    assert_eq!(ask("put", route, path, &update).await, 200);
    for verb in ["pause", "resume", "trigger"] {
        let route = format!("{route}:{verb}");
        assert_eq!(ask("post", &route, &format!("{path}:{verb}"), "{}").await, 200);
        let unknown = format!("/v1/schedules/x:{verb}");
        assert_eq!(ask("post", &route, &unknown, "{}").await, 404);
        assert_eq!(ask("post", &route, &unknown, "[]").await, 400);
    }
    let route_of_preview = "/v1/schedules/{id}/preview";
    assert_eq!(
        ask("get", route_of_preview, "/v1/schedules/s/preview", "").await,
        200
    );
    let preview = "/v1/schedules:preview";
    assert_eq!(ask("post", preview, preview, r#"{"every":"1h"}"#).await, 200);
    assert_eq!(ask("delete", route, path, "").await, 200);
    assert_eq!(ask("delete", route, path, "").await, 404);
    assert_eq!(ask("get", "/v1/controls", "/v1/controls", "").await, 200);
    let (route, path) = ("/v1/applications/{app}/control", "/v1/applications/sms/control");
    assert_eq!(ask("get", route, path, "").await, 200);
    assert_eq!(ask("get", route, "/v1/applications/x/control", "").await, 404);
    for verb in ["pause", "rate", "resume", "reset"] {
        let (route, path) = (format!("{route}:{verb}"), format!("{path}:{verb}"));
        assert_eq!(ask("post", &route, &path, r#"{"reason":"test"}"#).await, 200);
        assert_eq!(ask("post", &route, &path, "[]").await, 400);
        assert_eq!(ask("post", &route, &path, r#"{"reason":1}"#).await, 400);
        let unknown = format!("/v1/applications/x/control:{verb}");
        assert_eq!(ask("post", &route, &unknown, "").await, 404);
    }
    // It has another revision by now.
    let (route, path) = (format!("{route}:pause"), format!("{path}:pause"));
    assert_eq!(ask("post", &route, &path, r#"{"expectedRevision":1}"#).await, 409);
    // Each reference has a target.
    let text = document.to_string();
    for reference in text.split("\"$ref\":\"#").skip(1) {
        let target = reference.split('"').next().unwrap();
        assert!(document.pointer(target).is_some(), "{target}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn page_loads_only_its_files() {
    let server = Server::start();
    for (path, kind) in [
        ("/v1/docs", "text/html; charset=utf-8"),
        ("/v1/docs/page.js", "text/javascript; charset=utf-8"),
        ("/v1/docs/page.css", "text/css; charset=utf-8"),
    ] {
        let response = server.request(Method::GET, path).send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        assert_eq!(response.headers()["content-type"], kind);
        let policy = response.headers()["content-security-policy"].to_str().unwrap();
        assert!(
            policy.starts_with("default-src 'none'; script-src 'self'"),
            "{policy}"
        );
    }
}
