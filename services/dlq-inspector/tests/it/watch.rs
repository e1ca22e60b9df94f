//! Watching dead letters: existing and new ones, resuming, slow clients, revoked tokens, shutdown.

use std::time::Duration;

use redeliver_core::{Clock as _, Output, SystemClock};
use redeliver_kafka::producer::Producer;
use redeliver_proto::auth::SendToken;
use redeliver_proto::v1;
use redeliver_proto::v1::watch_dead_letters_response::Event;
use redeliver_service::identity::{NewToken, new_token};
use redeliver_testkit::jwt::{Issuer, jwks};
use redeliver_testkit::kafka_request::create_partitions;
use redeliver_testkit::{ensure, eventually_async};
use serde_json::json;
use tokio::time::timeout;
use tonic::{Code, Status, Streaming};

use crate::support::{Client, DEADLINE, Dead, InspectorEnv, Sending, assert_refused, dead};

type Stream = Streaming<v1::WatchDeadLettersResponse>;

async fn watch(client: &mut Client, filter: &str, resume_token: &str, only_new: bool) -> Stream {
    let request = v1::WatchDeadLettersRequest {
        filter: filter.to_owned(),
        resume_token: resume_token.to_owned(),
        only_new,
        ..v1::WatchDeadLettersRequest::default()
    };
    client.watch_dead_letters(request).await.unwrap().into_inner()
}

/// The next event, with its token.
async fn next(stream: &mut Stream) -> Result<(Event, String), Status> {
    let message = timeout(DEADLINE, stream.message())
        .await
        .expect("an event before the deadline");
    let message = message?.expect("the stream has not ended");
    Ok((message.event.unwrap(), message.resume_token))
}

/// The keys of the next `count` dead letters, or of all up to `SYNCED`; and the last token.
async fn keys(stream: &mut Stream, count: Option<usize>) -> (Vec<String>, String) {
    let (mut keys, mut last) = (Vec::new(), String::new());
    while count.is_none_or(|count| keys.len() < count) {
        let (event, token) = next(stream).await.unwrap();
        last = token;
        match event {
            Event::DeadLetter(letter) => {
                keys.push(String::from_utf8(letter.key.unwrap().to_vec()).unwrap());
            }
            Event::Synced(_) => {
                assert_eq!(count, None, "unexpected SYNCED");
                break;
            }
            Event::Heartbeat(_) => {}
        }
    }
    (keys, last)
}

fn numbered(name: &str, count: usize, class: &str) -> Vec<Dead> {
    (0..count)
        .map(|number| dead(&format!("{name}{number}"), "v", &[("error-class", class)]))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn watch_sends_old_then_new_letters() {
    let env = InspectorEnv::new("watch");
    let topic = env.create_topic("a", 1).await;
    env.put(&topic, 0, numbered("a", 3, "permanent")).await;
    env.put(&topic, 0, numbered("x", 2, "expired")).await;
    let mut inspector = env.start().await;
    let mut client = inspector.client().await;
    let filter = "error_class = permanent";
    let mut all = watch(&mut client, filter, "", false).await;
    let mut new = watch(&mut client, filter, "", true).await;
    assert_eq!(keys(&mut all, None).await.0, ["a0", "a1", "a2"]);
    assert_eq!(keys(&mut new, None).await.0, [""; 0]);
    env.put(&topic, 0, numbered("y", 2, "expired")).await;
    env.put(&topic, 0, numbered("b", 3, "permanent")).await;
    let (first, token) = keys(&mut all, Some(2)).await;
    assert_eq!(first, ["b0", "b1"]);
    assert_eq!(keys(&mut new, Some(3)).await.0, ["b0", "b1", "b2"]);

    // Watches end with the inspector, and their tokens survive its restart.
    inspector.process.process().terminate();
    let status = next(&mut new).await.unwrap_err();
    assert_refused(&status, Code::Unavailable, "SHUTTING_DOWN");
    drop((all, new));
    assert_eq!(inspector.process.wait(DEADLINE).code(), Some(0));
    env.put(&topic, 0, numbered("c", 1, "permanent")).await;
    let mut inspector = env.start().await;
    let mut client = inspector.client().await;
    // `only_new` has no effect with a resume token.
    for only_new in [false, true] {
        let mut resumed = watch(&mut client, filter, &token, only_new).await;
        assert_eq!(keys(&mut resumed, None).await.0, ["b2", "c0"]);
    }
    let request = v1::WatchDeadLettersRequest {
        resume_token: token.clone(),
        ..v1::WatchDeadLettersRequest::default()
    };
    let refused = client.watch_dead_letters(request).await.unwrap_err();
    assert_refused(&refused, Code::InvalidArgument, "TOKEN_OF_ANOTHER_QUESTION");

    // An added partition begins at its start.
    create_partitions(&env.kafka.brokers, &topic, 2);
    let output = Output {
        topic: topic.clone(),
        partition: Some(1),
        key: Some("d0".into()),
        value: None,
        headers: [("error-class", Some(&b"permanent"[..]))].into_iter().collect(),
    };
    // The metadata of a new producer may still lack the partition.
    eventually_async("the partition is known", DEADLINE, async || {
        let producer = Producer::new(&env.kafka).unwrap();
        producer.send(&output).await
    })
    .await;
    inspector.until_listed("partition = 1", 1).await;
    let mut resumed = watch(&mut client, filter, &token, false).await;
    let (mut resumed, _) = keys(&mut resumed, None).await;
    resumed.sort();
    assert_eq!(resumed, ["b2", "c0", "d0"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_watch_sends_heartbeats_with_tokens() {
    let env = InspectorEnv::new("silent");
    let topic = env.create_topic("a", 1).await;
    env.put(&topic, 0, numbered("x", 50_001, "expired")).await;
    let mut inspector = env.start().await;
    let mut client = inspector.client().await;
    let filter = "error_class = permanent";
    // While it reads a long backlog without a match, and after it.
    let mut stream = watch(&mut client, filter, "", false).await;
    let mut heartbeats = Vec::new();
    let synced = loop {
        match next(&mut stream).await.unwrap() {
            (Event::Heartbeat(_), token) => heartbeats.push(token),
            (Event::Synced(_), token) => break token,
            (event, _) => panic!("{event:?}"),
        }
    };
    let last = heartbeats.last().expect("a heartbeat");
    assert_ne!(*last, synced);
    let (event, idle) = next(&mut stream).await.unwrap();
    assert!(
        matches!(event, Event::Heartbeat(v1::Heartbeat { time: Some(_), .. })),
        "{event:?}"
    );
    drop(stream);
    // A watch that resumes there does not read the rows again.
    let mut resumed = watch(&mut client, filter, last, false).await;
    let (event, _) = next(&mut resumed).await.unwrap();
    assert!(matches!(event, Event::Synced(_)), "{event:?}");
    env.put(&topic, 0, numbered("a", 1, "permanent")).await;
    inspector.until_listed(filter, 1).await;
    let mut resumed = watch(&mut client, filter, &idle, false).await;
    assert_eq!(keys(&mut resumed, None).await.0, ["a0"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_watchers_are_bounded_and_resume() {
    const WATCHERS: usize = 24;
    const LETTERS: usize = 40;
    let env = InspectorEnv::new("slow");
    let topic = env.create_topic("a", 1).await;
    // Together, the watchers would hold a gigabyte.
    for number in 0..LETTERS {
        let letter = dead(&number.to_string(), vec![7; 900_000], &[]);
        env.put(&topic, 0, vec![letter]).await;
    }
    let mut inspector = env.start().await;
    let mut client = inspector.client().await;
    let request = v1::WatchDeadLettersRequest {
        view: v1::DeadLetterView::Full.into(),
        ..v1::WatchDeadLettersRequest::default()
    };
    let mut streams = Vec::new();
    for _ in 0..WATCHERS {
        let watched = client.watch_dead_letters(request.clone()).await;
        streams.push(watched.unwrap().into_inner());
    }
    // Each watch ends once its client has accepted no message for a while.
    let mut most = 0;
    redeliver_testkit::eventually("the watches have ended", Duration::from_secs(180), || {
        most = most.max(inspector.process.process().rss_kib());
        let metrics = inspector.metrics();
        ensure(metrics.contains("redeliver_dlq_watchers 0\n"), metrics)
    });
    assert!(most < 600 << 10, "{most} KiB");
    let mut stream = streams.swap_remove(0);
    drop(streams);
    let (mut seen, mut token) = (Vec::new(), String::new());
    let status = loop {
        match next(&mut stream).await {
            Ok((Event::DeadLetter(letter), last)) => {
                assert_eq!(letter.value.unwrap().len(), 900_000);
                seen.push(letter.id);
                token = last;
            }
            Ok((event, _)) => panic!("{event:?}"),
            Err(status) => break status,
        }
    };
    assert_refused(&status, Code::ResourceExhausted, "WATCHER_TOO_SLOW");
    assert!(seen.len() < LETTERS, "all {} fit into the buffers", seen.len());
    let resumed = v1::WatchDeadLettersRequest {
        resume_token: token,
        ..request
    };
    let mut stream = client.watch_dead_letters(resumed).await.unwrap().into_inner();
    while seen.len() < LETTERS {
        if let (Event::DeadLetter(letter), _) = next(&mut stream).await.unwrap() {
            seen.push(letter.id);
        }
    }
    let expected: Vec<String> = (0..LETTERS).map(|offset| format!("{topic}/0/{offset}")).collect();
    assert_eq!(seen, expected);
}

fn tokens_file(entries: &[(&str, &NewToken, &str)]) -> String {
    let entries = entries.iter().map(
        |(name, token, scope)| json!({"name": name, "sha256": token.sha256.to_string(), "scopes": [scope]}),
    );
    json!({"tokens": entries.collect::<Vec<_>>()}).to_string()
}

/// The status with which a stream ends; heartbeats may come first.
async fn end_of(stream: &mut Stream) -> Status {
    loop {
        match timeout(DEADLINE, stream.message()).await.expect("the end") {
            Ok(Some(message)) => assert!(!matches!(message.event, Some(Event::DeadLetter(_)))),
            Ok(None) => panic!("the stream ended without a status"),
            Err(status) => return status,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn watch_ends_with_its_token() {
    let mut env = InspectorEnv::new("withdrawn");
    let directory = env.base.directory().to_owned();
    let write = |name: &str, text: &str| {
        // In one step, as an editor or Kubernetes does.
        std::fs::write(directory.join("new"), text).unwrap();
        std::fs::rename(directory.join("new"), directory.join(name)).unwrap();
    };
    let [revoked, limited, kept] = [0; 3].map(|_| new_token().unwrap());
    let read = "dead-letters:read";
    let all = [
        ("revoked", &revoked, read),
        ("limited", &limited, read),
        ("kept", &kept, read),
    ];
    write("tokens", &tokens_file(&all));
    let issuer = Issuer::new("k1").unwrap();
    write("jwks", &jwks(&[&issuer]));
    let path = |name: &str| directory.join(name).display().to_string();
    env.base.set("dlq_inspector.auth.tokens_file", &path("tokens"));
    env.base
        .set("dlq_inspector.auth.jwt.issuer", "https://login.test");
    env.base.set("dlq_inspector.auth.jwt.audience", "redeliver");
    env.base.set("dlq_inspector.auth.jwt.jwks_file", &path("jwks"));
    let topic = env.create_topic("a", 1).await;
    let mut inspector = env.start().await;
    // Tokens are accepted for 30 seconds after they have expired.
    let expires = SystemClock.now().as_millis() / 1_000 - 20;
    let jwt =
        json!({"iss": "https://login.test", "aud": "redeliver", "sub": "x", "exp": expires, "scope": read});
    let jwt = issuer.sign(&jwt).unwrap();
    let mut streams = Vec::new();
    for token in [&revoked.token, &limited.token, &kept.token, &jwt] {
        let interceptor = SendToken::new(Some(token)).unwrap();
        let mut client = Client::new(Sending::new(inspector.channel().await, interceptor));
        let watched = client.watch_dead_letters(v1::WatchDeadLettersRequest::default());
        streams.push(watched.await.unwrap().into_inner());
    }
    let [revoked_stream, limited_stream, kept_stream, jwt_stream] = &mut streams[..] else {
        panic!("four streams");
    };
    assert_refused(&end_of(jwt_stream).await, Code::Unauthenticated, "TOKEN_EXPIRED");
    let fewer = [("limited", &limited, "jobs:read"), ("kept", &kept, read)];
    write("tokens", &tokens_file(&fewer));
    assert_refused(
        &end_of(revoked_stream).await,
        Code::Unauthenticated,
        "TOKEN_WRONG",
    );
    assert_refused(
        &end_of(limited_stream).await,
        Code::PermissionDenied,
        "PERMISSION_DENIED",
    );
    // The others go on.
    env.put(&topic, 0, vec![dead("k", "v", &[])]).await;
    loop {
        let message = timeout(DEADLINE, kept_stream.message()).await.expect("an event");
        if let Some(Event::DeadLetter(_)) = message.unwrap().expect("no end").event {
            break;
        }
    }
    // A watch does not go on with the topics that its caller saw before.
    let others = [("kept", &kept, "dead-letters:read:other-*")];
    write("tokens", &tokens_file(&others));
    assert_refused(&end_of(kept_stream).await, Code::Unavailable, "SCOPES_CHANGED");
    let refused = |reason: &str| format!(r#"redeliver_api_requests_refused_total{{reason="{reason}"}}"#);
    for reason in ["token_expired", "token_wrong", "permission_denied"] {
        assert_eq!(inspector.process.metric(&refused(reason)), 1, "{reason}");
    }
}
