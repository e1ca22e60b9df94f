//! The end of a process whose clients still try to connect over TLS.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::mpsc;

use rdkafka::consumer::BaseConsumer;
use redeliver_kafka::{KafkaClient, KafkaSettings};

const BROKER: &str = "KAFKA_TEST_BROKER";
const CLIENTS: usize = 16;
const PROCESSES: usize = 20;

/// The child process. It exits once the parent says so.
#[test]
fn child() {
    let Ok(broker) = std::env::var(BROKER) else {
        return;
    };
    let mut settings = KafkaSettings::new(&broker, "exit");
    for (name, value) in [
        ("security.protocol", "ssl"),
        ("reconnect.backoff.ms", "1"),
        ("reconnect.backoff.max.ms", "1"),
    ] {
        settings.properties.insert(name.to_owned(), value.to_owned());
    }
    let clients: Vec<KafkaClient<BaseConsumer>> = (0..CLIENTS)
        .map(|_| settings.reader("read_committed").create().unwrap())
        .collect();
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    // As in a service whose tasks are still running.
    std::mem::forget(clients);
    std::process::exit(0);
}

/// Answers the first message of each handshake with nonsense.
fn refuse(mut connection: TcpStream) {
    // A client that has exited sends nothing.
    if connection.read(&mut [0; 512]).is_ok() {
        let _ = connection.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    }
}

#[test]
fn exit_beside_tls_clients_succeeds() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let broker = listener.local_addr().unwrap().to_string();
    let (refused, refusals) = mpsc::sync_channel(4 * CLIENTS);
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            refuse(connection.unwrap());
            if refused.send(()).is_err() {
                return;
            }
        }
    });
    for _ in 0..PROCESSES {
        // Those of the last process.
        while refusals.try_recv().is_ok() {}
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "exit::child", "--nocapture", "--quiet"])
            .env(BROKER, &broker)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        for _ in 0..4 * CLIENTS {
            refusals.recv().unwrap();
        }
        drop(child.stdin.take());
        let status = child.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}
