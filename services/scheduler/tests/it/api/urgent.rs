//! Copies of the API's commands in the urgent topic.

use redeliver_core::headers::{ORIGINAL_OFFSET, ORIGINAL_PARTITION, ORIGINAL_TOPIC};
use redeliver_testkit::eventually_async;
use reqwest::Method;

use super::server::Server;
use crate::env::DEADLINE;

#[tokio::test(flavor = "multi_thread")]
async fn each_command_that_names_a_job_has_a_copy_that_names_it() {
    let server =
        Server::start_with(|builder| builder.set("scheduler.topics.urgent", "{name}-jobs-urgent")).ready();
    let job = r#"{"appName":"sms","delay":"1h","jobData":1}"#;
    let job = server.json(Method::POST, "/v1/jobs", job).await.is(201);
    let path = format!("/v1/jobs/{}", job.text_of("id"));
    server
        .json(Method::PATCH, &path, r#"{"delay":"2h"}"#)
        .await
        .is(200);
    let cancelled = server.delete(&path).await.is(200);
    assert_eq!(cancelled.text_of("outcome"), "cancelled");
    let copies = eventually_async("copies", DEADLINE, async || {
        let copies = server.records("jobs-urgent");
        if copies.len() == 2 {
            Ok(copies)
        } else {
            Err(format!("{copies:?}"))
        }
    })
    .await;
    let commands = server.records("jobs-ingest");
    assert_eq!(commands.len(), 3);
    for (copy, original) in copies.iter().zip(&commands[1..]) {
        let names = [ORIGINAL_TOPIC, ORIGINAL_PARTITION, ORIGINAL_OFFSET].map(|name| {
            let value = copy.headers.last(name).unwrap();
            String::from_utf8(value.to_vec()).unwrap()
        });
        let position = &original.position;
        let expected = [
            server.topic("jobs-ingest"),
            position.partition.to_string(),
            position.offset.to_string(),
        ];
        assert_eq!(names, expected);
        assert_eq!(copy.position.partition, position.partition);
        assert_eq!(copy.value, original.value);
    }
}
