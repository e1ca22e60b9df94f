//! Limits for clients, as seen from outside. Those of the HTTP server itself are tested in `redeliver-runtime`.

use std::net::SocketAddr;
use std::process::Command;

use futures::StreamExt as _;
use redeliver_proto::error::reason;
use redeliver_proto::v1;
use redeliver_proto::v1::dead_letter_service_client::DeadLetterServiceClient;
use redeliver_testkit::{ServiceProcess, eventually_async};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tonic::transport::Endpoint;
use tonic::{Status, Streaming};

use crate::redrive;
use crate::support::{DEADLINE, Inspector, InspectorEnv, dead};

/// Silent clients of HTTP/2.
async fn connect_silently(address: SocketAddr, count: usize) -> Vec<TcpStream> {
    let mut silent = Vec::new();
    for _ in 0..count {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let begun = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
        // A connection that is closed at once is not a defect.
        drop(stream.write_all(begun).await);
        silent.push(stream);
    }
    silent
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_lock_nobody_out() {
    let env = InspectorEnv::new("silent");
    let topic = env.create_topic("a", 1).await;
    env.put(&topic, 0, vec![dead("k", "v", &[])]).await;
    let base = env.base.clone();
    let limited = move || {
        let command = base.command("dlq-inspector", &[]);
        let mut shell = Command::new("sh");
        let script = r#"ulimit -n 512; exec "$0" "$@""#;
        shell.args(["-c", script]).arg(command.get_program());
        shell.args(command.get_args());
        shell
    };
    let mut inspector = Inspector {
        process: ServiceProcess::spawn("dlq-inspector", limited),
    };
    inspector.until_serving().await;
    inspector.until_listed("", 1).await;
    let api = inspector.process.word_after(" api=").parse().unwrap();
    let admin = inspector.process.admin();
    for address in [api, admin] {
        let _silent = connect_silently(address, 520).await;
        let answers = async {
            assert_eq!(inspector.list("").await.len(), 1);
            let mut admin = TcpStream::connect(admin).await.unwrap();
            let request = b"GET /readyz HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n";
            admin.write_all(request).await.unwrap();
            let mut answer = String::new();
            tokio::io::AsyncReadExt::read_to_string(&mut admin, &mut answer)
                .await
                .unwrap();
            assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        };
        let answered = tokio::time::timeout(DEADLINE, answers).await;
        answered.expect("other clients are served");
    }
    let closed = "redeliver_dlq_api_limited_total{limit=\"connections\"}";
    assert!(inspector.process.metric(closed) > 0);
}

/// How many clients do not read the payloads that they have asked for.
const STALLED: usize = 200;
const PAYLOAD: usize = 10 << 20;

/// Asks for a payload, with a window that has room for a small part of it.
async fn ask(address: SocketAddr, id: &str) -> Result<Streaming<v1::ReadPayloadResponse>, Status> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let channel = endpoint.initial_stream_window_size(1 << 10).connect().await;
    let mut client = DeadLetterServiceClient::new(channel.unwrap());
    let request = v1::ReadPayloadRequest { id: id.to_owned() };
    let answer = client.read_payload(request).await?;
    Ok(answer.into_inner())
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_readers_take_a_bounded_part() {
    let mut env = InspectorEnv::new("stalled");
    let topic = env.create_topic("a", 1).await;
    env.compress("zstd");
    let large = dead("large", vec![b'x'; PAYLOAD], &[]);
    env.put(&topic, 0, vec![large, dead("small", "v", &[])]).await;
    let mut inspector = env.start().await;
    inspector.until_listed("", 2).await;
    let (id, api) = (format!("{topic}/0/0"), inspector.process.word_after(" api="));
    let api: SocketAddr = api.parse().unwrap();

    let before = inspector.process.process().rss_kib();
    let answers = futures::future::join_all((0..STALLED).map(|_| ask(api, &id))).await;
    let (mut stalled, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(Result::is_ok);
    for refused in &refused {
        let status = refused.as_ref().err().unwrap();
        assert_eq!(reason(status).as_deref(), Some("TOO_MANY_ANSWERS"), "{status:?}");
    }
    assert!(!stalled.is_empty() && !refused.is_empty(), "{}", stalled.len());
    let grown = inspector.process.process().rss_kib().saturating_sub(before);
    assert!(grown < 100 << 10, "{grown} KiB for {} answers", stalled.len());
    // Small answers have memory of their own; the index and the executor go on.
    env.put(&topic, 0, vec![dead("other", "v", &[])]).await;
    inspector.until_listed("key = other", 1).await;
    let plan = redrive::plan(v1::RedriveKind::Discard, "key = other");
    let done = redrive::done(&mut inspector, plan).await;
    assert_eq!((done.state(), done.done), (v1::RedriveState::Succeeded, 1));

    // Those that read get all of it, and make room for others.
    let mut one = stalled.pop().unwrap().unwrap();
    let mut read = 0;
    while let Some(part) = one.next().await {
        read += part.unwrap().chunk.len();
    }
    assert_eq!(read, PAYLOAD);
    drop(stalled);
    eventually_async("there is room again", DEADLINE, async || {
        ask(api, &id).await.map(drop)
    })
    .await;
}

/// The client does not count headers against the limit of its queue: there, these letters would take 550 MiB.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "long"]
async fn letters_with_many_headers_are_bounded() {
    let mut env = InspectorEnv::new("headers");
    let flooded = env.create_topic("a", 1).await;
    let other = env.create_topic("b", 1).await;
    env.compress("zstd");
    let mut inspector = env.start().await;
    let names: Vec<String> = (0..100_000).map(|number| format!("h{number}")).collect();
    let headers: Vec<(&str, &str)> = names.iter().map(|name| (&**name, "")).collect();
    let large = dead("k", "v", &headers);

    let before = inspector.process.process().rss_kib();
    let mut largest = 0;
    for _ in 0..60 {
        env.put(&flooded, 0, vec![large.clone(); 10]).await;
        largest = largest.max(inspector.process.process().rss_kib());
    }
    env.put(&other, 0, vec![dead("other", "v", &[])]).await;
    inspector.until_listed("key = other", 1).await;
    largest = largest.max(inspector.process.process().rss_kib());
    let grown = largest.saturating_sub(before);
    assert!(grown < 250 << 10, "{grown} KiB");
}
