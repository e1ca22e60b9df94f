//! Ended jobs are forgotten after `keep_ended`, and idempotency keys after `idempotency_window`.

use redeliver_testkit::{LocalRedis, ensure, eventually_async};
use reqwest::Method;

use super::only_record;
use super::server::Server;
use crate::env::DEADLINE;
use crate::index::own_redis::Raw;

const JOB: &str = r#"{"appName":"sms","delay":"0s","idempotencyKey":"k-1","jobData":"first"}"#;

/// The keys of all shards that contain data of jobs.
async fn keys_of_jobs(raw: &Raw) -> Vec<String> {
    let keys = raw.call(&["KEYS", "*"]).await.into_array().into_iter();
    let keys = keys.map(|key| String::from_utf8_lossy(key.as_bytes().unwrap()).into_owned());
    keys.filter(|key| {
        ["flows", "sizes", "due:", "ended", "buckets", "job:"]
            .iter()
            .any(|kind| key.contains(&format!("}}:{kind}")))
    })
    .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn ended_jobs_and_keys_are_forgotten() {
    let redis = LocalRedis::start().unwrap();
    let server = Server::start_with(|builder| {
        let builder = builder.redis(redis.url()).set("scheduler.keep_ended", "1s");
        builder.set("scheduler.idempotency_window", "1s")
    });
    let raw = Raw::connect(&redis.url()).await;
    let first = server.json(Method::POST, "/v1/jobs", JOB).await.is(201);
    let path = format!("/v1/jobs/{}", first.text_of("id"));
    only_record(&server, "sms").await;

    server
        .get_until(&path, |answer| answer.status.as_u16() == 404)
        .await;
    eventually_async("a tombstone", DEADLINE, async || {
        let records = tokio::task::block_in_place(|| server.records("jobs-state"));
        match records.last() {
            Some(last) if last.value.is_none() && last.key == records[0].key => Ok(()),
            last => Err(format!("{last:?}")),
        }
    })
    .await;
    eventually_async("nothing of it is in the index", DEADLINE, async || {
        let keys = keys_of_jobs(&raw).await;
        ensure(keys.is_empty(), format!("{keys:?}"))
    })
    .await;
    server
        .delete(&path)
        .await
        .problem(404, "job_unknown", "no such job");

    // The key can be used again, also for other content.
    let other = JOB.replace("first", "second");
    let second = server.json(Method::POST, "/v1/jobs", &other).await.is(201);
    assert_ne!(second.text_of("id"), first.text_of("id"));

    // After a rebuild from the topic, the index contains only the second job.
    raw.call(&["FLUSHALL"]).await;
    let far = r#"{"appName":"sms","delay":"1h","jobData":"third"}"#;
    let third = server.json(Method::POST, "/v1/jobs", far).await.is(201);
    let third = format!("/v1/jobs/{}", third.text_of("id"));
    eventually_async("all shards are there again", DEADLINE, async || {
        let stats = server.get("/v1/stats").await;
        let found = server.get(&third).await;
        let is_back = stats.body["scheduled"] == 1 && found.status.as_u16() == 200;
        ensure(is_back, format!("{stats:?} {found:?}"))
    })
    .await;
    server.get(&path).await.is(404);
    let dispatched = tokio::task::block_in_place(|| server.records("sms"));
    let data: Vec<_> = dispatched.iter().map(|record| record.value.as_deref()).collect();
    assert_eq!(data.len(), 2, "{data:?}");
    assert!(
        data.contains(&Some(br#""first""#)) && data.contains(&Some(br#""second""#)),
        "{data:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_index_is_repaired() {
    let redis = LocalRedis::start().unwrap();
    let server = Server::start_with(|builder| builder.redis(redis.url()));
    let raw = Raw::connect(&redis.url()).await;
    let far =
        |key: &str| format!(r#"{{"appName":"sms","delay":"1h","idempotencyKey":"{key}","jobData":"far"}}"#);
    let damaged = |pattern: &str, damage: &str| {
        format!(
            "local count = 0 for _, key in ipairs(redis.call('KEYS', '*{pattern}*')) do {damage} count = count + 1 end return count"
        )
    };
    let damages = [
        damaged("idem:", "redis.call('SET', key, '12345678 no value')"),
        damaged(
            "job:",
            "for _, id in ipairs(redis.call('HKEYS', key)) do redis.call('HSET', key, id, 'no job') end",
        ),
    ];
    for (number, damage) in damages.iter().enumerate() {
        let body = far(&format!("d-{number}"));
        let first = server.json(Method::POST, "/v1/jobs", &body).await.is(201);
        let id = first.text_of("id").to_owned();
        let path = format!("/v1/jobs/{id}");
        server
            .get_until(&path, |answer| answer.status.as_u16() == 200)
            .await;
        assert!(raw.call(&["EVAL", damage, "0"]).await.as_i64().unwrap() > 0);
        let again = server.json(Method::POST, "/v1/jobs", &body).await.is(200);
        assert_eq!(
            (again.text_of("outcome"), again.text_of("id")),
            ("duplicate", &*id)
        );
        let cancelled = server.delete(&path).await.is(200);
        assert_eq!(cancelled.text_of("outcome"), "cancelled");
    }
}
