//! TLS with client certificates on the ports of the services, the CLI, and the client crate.

use std::net::TcpStream;
use std::process::Command;
use std::sync::Arc;

use redeliver_client::{ClientError, DeadLetterClient, Endpoint, JobClient};
use redeliver_runtime::tls::{certificates, client_builder, private_key, trusted_roots};
use redeliver_testkit::certificates::Authority;
use redeliver_testkit::{
    CommandOutput, Process, ServiceProcess, ensure, eventually, free_port, kube_tools, run, until_seen,
};
use rustls::pki_types::{CertificateDer, ServerName};

use crate::client::block_on;
use crate::services::{Services, path};
use crate::support::{DEADLINE, Pipe, PipeBuilder};

/// Certificates of servers and clients, each kind with its own authority.
struct Certificates {
    servers: Authority,
    clients: Authority,
}

impl Certificates {
    /// Writes `tls.crt`, `tls.key`, `clients.crt`, `servers.crt`, `client.crt` and `client.key`.
    fn write(pipe: &Pipe) -> Self {
        let directory = pipe.env.directory();
        let certificates = Self {
            servers: Authority::new().unwrap(),
            clients: Authority::new().unwrap(),
        };
        certificates.renew(pipe);
        certificates.servers.write(directory, "servers.crt").unwrap();
        certificates.clients.write(directory, "clients.crt").unwrap();
        let client = certificates.clients.sign().unwrap();
        client.write(directory, "client").unwrap();
        certificates
    }

    /// Replaces the certificate of the servers by one of the same authority.
    fn renew(&self, pipe: &Pipe) {
        let server = self.servers.sign().unwrap();
        server.write(pipe.env.directory(), "tls").unwrap();
    }
}

fn file(pipe: &Pipe, name: &str) -> String {
    path(&pipe.env.directory().join(name)).to_owned()
}

/// The settings of a section.
fn settings(pipe: &Pipe, section: &str) -> Vec<String> {
    let files = [
        ("cert_file", "tls.crt"),
        ("key_file", "tls.key"),
        ("client_ca_file", "clients.crt"),
    ];
    let set = |(key, name)| format!("{section}.tls.{key}={}", file(pipe, name));
    let settings = files.map(set).into_iter();
    settings.flat_map(|set| ["--set".to_owned(), set]).collect()
}

fn borrowed(texts: &[String]) -> Vec<&str> {
    texts.iter().map(String::as_str).collect()
}

/// The certificate that a new connection to this address gets.
fn served_certificate(pipe: &Pipe, address: &str) -> CertificateDer<'static> {
    let at = |name: &str| pipe.env.directory().join(name);
    let config = client_builder()
        .unwrap()
        .with_root_certificates(trusted_roots(Some(&at("servers.crt"))).unwrap())
        .with_client_auth_cert(
            certificates(&at("client.crt")).unwrap(),
            private_key(&at("client.key")).unwrap(),
        )
        .unwrap();
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let mut connection = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    connection
        .complete_io(&mut TcpStream::connect(address).unwrap())
        .unwrap();
    connection.peer_certificates().unwrap()[0].clone().into_owned()
}

/// The number of clients that a listener has refused.
fn refused(service: &mut ServiceProcess, section: &str) -> u64 {
    service.metric(&format!(
        r#"redeliver_tls_handshake_failures_total{{listener="{section}"}}"#
    ))
}

/// Waits until a listener has refused more clients than before.
fn until_refused(service: &mut ServiceProcess, section: &str, before: u64) {
    until_seen("refused", || refused(service, section), |&n| n > before);
}

#[test]
fn apis_check_and_renew_certificates() {
    let services = Services::new("tls");
    let pipe = &services.pipe;
    let issued = Certificates::write(pipe);
    let set = [settings(pipe, "scheduler"), settings(pipe, "dlq_inspector")].concat();
    let mut scheduler = pipe.start("scheduler", "a", &borrowed(&set));
    let mut inspector = pipe.start("dlq-inspector", "a", &borrowed(&set));
    let [ca, certificate, key] = ["servers.crt", "client.crt", "client.key"].map(|name| file(pipe, name));
    let flags = ["--ca-file", &ca, "--cert-file", &certificate, "--key-file", &key];

    // The configuration has TLS, so the addresses are https.
    for command in [&["jobs", "stats"][..], &["dlq", "ls"], &["status"]] {
        let flags: Vec<&str> = [command, &borrowed(&set), &flags].concat();
        let printed = services.cli(&flags);
        assert!(!printed.contains("cannot connect"), "{printed}");
    }
    // A machine without CA certificates of its own.
    let stats = [&["jobs", "stats"][..], &borrowed(&set), &flags].concat();
    let stats = pipe.command("redeliver", &stats);
    let mut bare = Command::new("/usr/bin/env");
    bare.args(["SSL_CERT_FILE=/nowhere", "SSL_CERT_DIR=/nowhere"])
        .arg(stats.get_program())
        .args(stats.get_args());
    let printed = run(bare);
    assert_eq!((printed.code, &*printed.stderr), (Some(0), ""), "{printed:?}");

    assert_eq!(refused(&mut scheduler, "scheduler"), 0);
    let without = [&["jobs", "stats"][..], &borrowed(&set), &flags[..2]].concat();
    // With TLS 1.3, the server may close the connection before the client has read the reason.
    let printed = services.fails(1, &without);
    assert!(printed.stderr.starts_with("error: "), "{printed:?}");
    until_refused(&mut scheduler, "scheduler", 0);
    let half = [&["jobs", "stats"][..], &borrowed(&set), &flags[..4]].concat();
    let printed = services.fails(2, &half);
    assert!(printed.stderr.contains("--key-file <FILE>"), "{printed:?}");

    let endpoint = |address: &str| {
        Endpoint::new(format!("https://{address}"))
            .ca_file(&ca)
            .client_certificate(&certificate, &key)
    };
    block_on(async {
        let connected = JobClient::connect(&endpoint(&services.scheduler)).await.unwrap();
        assert_eq!(connected.stats(None, 1).await.unwrap().scheduled, 0);
        let inspected = DeadLetterClient::connect(&endpoint(&services.inspector))
            .await
            .unwrap();
        assert!(inspected.stats("").await.is_ok());

        let other = Authority::new().unwrap();
        let (wrong, wrong_key) = other
            .sign()
            .unwrap()
            .write(pipe.env.directory(), "wrong")
            .unwrap();
        let with_wrong = |address: &str| endpoint(address).client_certificate(&wrong, &wrong_key);
        let refused_before = [
            refused(&mut scheduler, "scheduler"),
            refused(&mut inspector, "dlq_inspector"),
        ];
        let strange = with_wrong(&services.scheduler);
        let jobs = async { JobClient::connect(&strange).await?.stats(None, 1).await.map(drop) };
        let strange = with_wrong(&services.inspector);
        let letters = async {
            DeadLetterClient::connect(&strange)
                .await?
                .stats("")
                .await
                .map(drop)
        };
        for error in [jobs.await.unwrap_err(), letters.await.unwrap_err()] {
            assert!(
                matches!(error, ClientError::Unreachable { .. }) || error.is_transient(),
                "{error:?}"
            );
        }
        until_refused(&mut scheduler, "scheduler", refused_before[0]);
        until_refused(&mut inspector, "dlq_inspector", refused_before[1]);

        let previous = served_certificate(pipe, &services.scheduler);
        issued.renew(pipe);
        for address in [&services.scheduler, &services.inspector] {
            eventually("the new certificate is served", DEADLINE, || {
                let served = served_certificate(pipe, address);
                let renewed = certificates(&pipe.env.directory().join("tls.crt"));
                let holds = served == renewed.unwrap()[0];
                ensure(holds, format!("still the previous one: {}", served == previous))
            });
        }
        // The previous connection, and a new one.
        assert_eq!(connected.stats(None, 1).await.unwrap().scheduled, 0);
        let renewed = JobClient::connect(&endpoint(&services.scheduler)).await.unwrap();
        assert_eq!(renewed.stats(None, 1).await.unwrap().scheduled, 0);
    });
    assert_eq!(
        scheduler.metric(r#"redeliver_tls_files_unusable{listener="scheduler"}"#),
        0
    );
    assert!(
        scheduler.metric(r#"redeliver_tls_certificate_expiry_timestamp_seconds{listener="scheduler"}"#) > 0
    );
}

#[test]
fn wrong_scheme_is_named() {
    let services = Services::new("tls-scheme");
    let pipe = &services.pipe;
    Certificates::write(pipe);
    let ca = file(pipe, "servers.crt");
    let set = [settings(pipe, "scheduler"), settings(pipe, "dlq_inspector")].concat();
    let addresses = [
        ("jobs", &services.scheduler, "scheduler"),
        ("dlq", &services.inspector, "dlq-inspector"),
    ];
    let clients = |url: &str| {
        let endpoint = Endpoint::new(url).ca_file(&ca);
        block_on(async {
            let scheduler = async { JobClient::connect(&endpoint).await?.stats(None, 1).await };
            let inspector = async { DeadLetterClient::connect(&endpoint).await?.stats("").await };
            [
                scheduler.await.map(drop).unwrap_err(),
                inspector.await.map(drop).unwrap_err(),
            ]
        })
    };
    let check = |command: &str, url: &str, problem: &str| {
        let flags = [command, "stats", "--server", url, "--ca-file", &ca];
        let printed = services.fails(1, &flags);
        let cause = format!("\ncaused by: {problem}\n");
        assert!(printed.stderr.ends_with(&cause), "{printed:?}");
        for error in clients(url) {
            assert!(error.is_transient(), "{error:?}");
            let ClientError::Unreachable { source, .. } = error else {
                panic!("{error:?}");
            };
            assert_eq!(source.to_string(), problem);
        }
    };
    // A watch names the reason too, even if it began before the inspector had TLS.
    let mut inspector = services.inspect();
    let mut watch = Process::spawn(pipe.command("redeliver", &["dlq", "watch"])).unwrap();
    watch.wait_for_output("caught up", DEADLINE);
    inspector.shut_down();
    // The servers have TLS, and the clients do not know it yet.
    for (command, address, service) in addresses {
        let _server = pipe.start(service, "a", &borrowed(&set));
        let problem = format!("the server speaks TLS; use https://{address}");
        if service == "dlq-inspector" {
            watch.wait_for_output(&problem, DEADLINE);
        }
        check(command, &format!("http://{address}"), &problem);
        let status = services.cli(&["status", "--inspector", address, "--scheduler", address]);
        assert_eq!(status.matches(&problem).count(), 2, "{status}");
    }
    // And the other way round.
    for (command, address, service) in addresses {
        let _server = pipe.start(service, "a", &[]);
        let problem =
            format!("the server does not speak TLS; use http://{address}, or configure TLS on the server");
        check(command, &format!("https://{address}"), &problem);
    }
}

#[test]
#[ignore = "long"]
fn grpcurl_works_with_certificate() {
    let services = Services::new("tls-grpcurl");
    let pipe = &services.pipe;
    Certificates::write(pipe);
    let _inspector = pipe.start("dlq-inspector", "a", &borrowed(&settings(pipe, "dlq_inspector")));
    let [ca, certificate, key] = ["servers.crt", "client.crt", "client.key"].map(|name| file(pipe, name));
    let flags = ["-cacert", &ca, "-cert", &certificate, "-key", &key];
    let program = kube_tools::grpcurl().unwrap();
    let grpcurl = |flags: &[&str], method: &str| -> CommandOutput {
        let mut command = Command::new(&program);
        command.args(flags).args([&services.inspector, method]);
        run(command)
    };
    let listed = grpcurl(&flags, "list");
    assert!(
        listed.stdout.contains("redeliver.v1.DeadLetterService\n"),
        "{listed:?}"
    );
    let called = grpcurl(&flags, "redeliver.v1.DeadLetterService/GetDeadLetterStats");
    assert_eq!((called.code, &*called.stderr), (Some(0), ""), "{called:?}");
    let without = grpcurl(&flags[..2], "list");
    assert_ne!(without.code, Some(0), "{without:?}");
}

#[test]
fn health_works_with_tls() {
    let pipe = PipeBuilder::new("tls-health").tiers(&[5_000]).create();
    Certificates::write(&pipe);
    let listen = format!("admin.listen=127.0.0.1:{}", free_port());
    let set = [vec!["--set".to_owned(), listen], settings(&pipe, "admin")].concat();
    let mut tier = pipe.env.spawn("retry-tier", "a", &borrowed(&set));
    let health = || -> CommandOutput {
        let arguments = [&["health"][..], &borrowed(&set)].concat();
        run(pipe.command("retry-tier", &arguments))
    };
    tier.admin();
    let printed = eventually("the process is ready", DEADLINE, || {
        let printed = health();
        ensure(printed.code == Some(0), format!("{printed:?}")).map(|()| printed)
    });
    assert!(printed.stdout.contains(r#""ready":true"#), "{printed:?}");
    drop(tier);
    assert_eq!(health().code, Some(1));
}

#[test]
fn tokens_without_tls_are_a_warning() {
    let pipe = PipeBuilder::new("tls-token")
        .set("dlq_inspector.data_dir", "{dir}/data")
        .without_topics();
    Certificates::write(&pipe);
    let token = pipe.env.directory().join("token");
    std::fs::write(&token, "s3cret\n").unwrap();
    let token = format!("dlq_inspector.token_file={}", path(&token));
    let set = ["--set", "dlq_inspector.listen=0.0.0.0:0", "--set", &token];
    let warning = "clients send their tokens unencrypted; set dlq_inspector.tls";
    let mut inspector = pipe.env.spawn("dlq-inspector", "a", &set);
    let output = inspector.wait_for_output(" api=", DEADLINE);
    assert!(output.contains(warning), "{output}");
    inspector.shut_down();

    let tls = settings(&pipe, "dlq_inspector");
    let set = [&set[..], &borrowed(&tls)].concat();
    let mut inspector = pipe.env.spawn("dlq-inspector", "b", &set);
    let output = inspector.wait_for_output(" api=", DEADLINE);
    assert!(!output.contains(warning), "{output}");
}
