//! Control over REST: the same operations as over gRPC, and who may use them.

use redeliver_service::identity::NewToken;
use reqwest::Method;
use serde_json::json;

use super::server::Server;

const CONTROL: &str = "/v1/applications/sms/control";

#[tokio::test(flavor = "multi_thread")]
async fn application_is_paused_limited_and_reset() {
    let server = Server::start_with(|builder| {
        builder
            .set("scheduler.apps.sms.rate", "50")
            .set("scheduler.apps.free.topic", "{name}-free")
    });
    let post = async |verb: &str, body: &str| {
        server
            .json(Method::POST, &format!("{CONTROL}:{verb}"), body)
            .await
    };
    let none = server.get(CONTROL).await.is(200).body;
    assert_eq!(
        none,
        json!({"name": "app/sms", "revision": 0, "desired": {}, "effective": {"state": "running", "ratePerSecond": 50.0}})
    );
    // What the configuration limits is in the list, too.
    let list = server.get("/v1/controls").await.is(200).body;
    assert_eq!(list, json!({"controls": [none]}));

    let first = r#"{"reason":"outage","expectedRevision":0}"#;
    let paused = post("pause", first).await.is(200).body;
    assert_eq!(paused["revision"], 1);
    assert_eq!(paused["reason"], "outage");
    assert_eq!(paused["desired"], json!({"state": "paused"}));
    let effective = json!({"state": "paused", "ratePerSecond": 50.0});
    assert_eq!(paused["effective"], effective);
    assert!(paused["changedAt"].is_string() && paused["changedBy"].is_string());
    // A repetition has no effect, but a wrong revision is refused in any case.
    assert_eq!(post("pause", "").await.is(200).body, paused);
    let revised = post("pause", first).await;
    revised.problem(409, "control_revised", "has revision 1");
    assert_eq!(server.get(CONTROL).await.is(200).body, paused);

    let revised = post("resume", r#"{"expectedRevision":0}"#).await;
    revised.problem(409, "control_revised", "has revision 1; get it again");
    let limited = post("rate", r#"{"unlimited":true}"#).await.is(200).body;
    assert_eq!(limited["desired"], json!({"state": "paused", "unlimited": true}));
    assert_eq!(limited["effective"], json!({"state": "paused"}));
    let limited = post("rate", r#"{"ratePerSecond":2.5}"#).await.is(200).body;
    let effective = json!({"state": "paused", "ratePerSecond": 2.5});
    assert_eq!(limited["effective"], effective);
    let reset = post("reset", "{}").await.is(200).body;
    assert_eq!((&reset["revision"], &reset["desired"]), (&json!(4), &json!({})));
    assert_eq!(reset["effective"], none["effective"]);

    let invalid = "must be from 0.001 to 1000000 per second, or unlimited";
    for body in [r#"{"ratePerSecond":0}"#, r#"{"unlimited":false}"#] {
        post("rate", body).await.problem(422, "request.rate", invalid);
    }
    let both = post("rate", r#"{"ratePerSecond":1,"unlimited":true}"#).await;
    both.problem(422, "request.rate", "has both `ratePerSecond` and `unlimited`");
    let long = json!({"reason": "x".repeat(1_001)}).to_string();
    let refused = post("pause", &long).await;
    refused.problem(422, "request.reason", "at most 1000 bytes");
    for (method, path) in [
        (Method::GET, "/v1/applications/smss/control"),
        (Method::POST, "/v1/applications/smss/control:pause"),
    ] {
        let unknown = server.json(method, path, "").await;
        unknown.problem(404, "application_unknown", "no such application: smss");
    }
    server.shut_down();
}

#[tokio::test(flavor = "multi_thread")]
async fn control_needs_its_own_scopes() {
    let callers: [(&str, &[&str]); 4] = [
        ("owner", &["control:*:sms"]),
        ("reader", &["control:read"]),
        ("other", &["control:*:mail"]),
        ("producer", &["jobs:*"]),
    ];
    let (server, tokens) = Server::for_callers(callers, |builder| builder);
    let [owner, reader, other, producer] = &tokens;
    let call =
        async |token: &NewToken, method: Method, path: &str| server.ask(&token.token, method, path, "").await;
    let pause = format!("{CONTROL}:pause");
    for (token, read, write, listed) in [(owner, 200, 200, 1), (reader, 200, 403, 1), (other, 403, 403, 0)] {
        let paused = call(token, Method::POST, &pause).await.is(write);
        if write == 200 {
            assert_eq!(paused.body["changedBy"], "token:owner");
        }
        call(token, Method::GET, CONTROL).await.is(read);
        let list = call(token, Method::GET, "/v1/controls").await.is(200).body;
        assert_eq!(list["controls"].as_array().unwrap().len(), listed, "{list}");
    }
    for (method, path, scope) in [
        (Method::POST, format!("{CONTROL}:resume"), "control:write:sms"),
        (Method::POST, format!("{CONTROL}:reset"), "control:write:sms"),
        (Method::GET, CONTROL.to_owned(), "control:read:sms"),
        (
            Method::GET,
            "/v1/controls".to_owned(),
            "needs the scope control:read",
        ),
    ] {
        let refused = call(producer, method, &path).await;
        refused.problem(403, "permission_denied", scope);
    }
    assert_eq!(call(owner, Method::GET, CONTROL).await.body["revision"], 1);
    server.shut_down();
}
