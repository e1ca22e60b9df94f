//! Copies of the API's commands in the urgent topic.

use std::collections::BTreeSet;
use std::time::Duration;

use redeliver_core::headers::{ORIGINAL_OFFSET, ORIGINAL_PARTITION, ORIGINAL_TOPIC};
use redeliver_core::{JobId, Record};
use redeliver_testkit::eventually_async;
use reqwest::Method;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::server::Server;
use crate::env::DEADLINE;
use crate::requests::now;

fn server() -> Server {
    Server::start_with(|builder| builder.set("scheduler.topics.urgent", "{name}-jobs-urgent")).ready()
}

/// The values of the headers that name the original of a copy.
fn original(copy: &Record) -> [String; 3] {
    [ORIGINAL_TOPIC, ORIGINAL_PARTITION, ORIGINAL_OFFSET].map(|name| {
        let value = copy.headers.last(name).unwrap();
        String::from_utf8(value.to_vec()).unwrap()
    })
}

/// The same of the copy that a command must have.
fn expected(command: &Record) -> [String; 3] {
    let position = &command.position;
    [
        position.topic.to_string(),
        position.partition.to_string(),
        position.offset.to_string(),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn each_command_that_names_a_job_has_a_copy_that_names_it() {
    let server = server();
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
    for (copy, command) in copies.iter().zip(&commands[1..]) {
        assert_eq!(original(copy), expected(command));
        assert_eq!(copy.position.partition, command.position.partition);
        assert_eq!(copy.value, command.value);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_of_callers_that_disconnect_have_copies() {
    const CALLERS: u16 = 200;
    let server = server();
    for number in 0..CALLERS {
        let id = JobId::new(now(), i32::from(number % 3), number.into());
        let mut caller = TcpStream::connect(server.address()).await.unwrap();
        let request = format!(
            "DELETE /v1/jobs/{id} HTTP/1.1\r\nhost: {}\r\n\r\n",
            server.address()
        );
        caller.write_all(request.as_bytes()).await.unwrap();
        // At any moment up to the answer, and some with it.
        match number % 4 {
            0 => drop(caller.read_u8().await.unwrap()),
            _ => tokio::time::sleep(Duration::from_micros(50 * u64::from(number % 100))).await,
        }
    }
    let copied = eventually_async("a copy of each command", DEADLINE, async || {
        let copies = server.records("jobs-urgent");
        let copies: BTreeSet<_> = copies.iter().map(original).collect();
        let commands = server.records("jobs-ingest");
        let commands: BTreeSet<_> = commands.iter().map(expected).collect();
        let missing: Vec<_> = commands.difference(&copies).collect();
        match missing.is_empty() && commands.len() >= usize::from(CALLERS / 4) {
            true => Ok(copies.len()),
            false => Err(format!("of {} commands, {missing:?}", commands.len())),
        }
    })
    .await;
    println!("{copied} of {CALLERS} commands were written");
}
