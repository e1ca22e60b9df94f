//! Certificates and passwords for Kafka that are replaced while the services run, as Kubernetes replaces a Secret.

use std::path::{Path, PathBuf};
use std::process::Command;

use redeliver_testkit::certificates::{Authority, Signed};
use redeliver_testkit::local_kafka::kafka_tool;
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{LocalKafka, ServiceProcess, ensure, eventually, free_port};

use crate::chaos::load::under_load;
use crate::services::path;
use crate::support::{DEADLINE, PLAN, Pipe, PipeBuilder, Sent, record, records, words};

/// The application of the scheduler.
const APP: &str = "demo";
const ALL_REPLACED: &str = "Kafka credentials replaced in all clients";
const STALE: &str = r#"redeliver_credentials_stale{setting="kafka.properties"}"#;
const OUTDATED: &str = "redeliver_kafka_clients_outdated";

/// A folder of files that Kubernetes mounts from a Secret: links to a link to the folder with the files.
struct Secret {
    scratch: Scratch,
    versions: u32,
}

impl Secret {
    fn new() -> Self {
        Self {
            scratch: Scratch::new("secret").unwrap(),
            versions: 0,
        }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// Replaces all files at once.
    fn set(&mut self, files: &[(&str, &str)]) {
        use std::os::unix::fs::symlink;
        let is_first = self.versions == 0;
        self.versions += 1;
        let version = format!("..{}", self.versions);
        std::fs::create_dir(self.at(&version)).unwrap();
        for (name, content) in files {
            std::fs::write(self.at(&version).join(name), content).unwrap();
            if is_first {
                symlink(Path::new("..data").join(name), self.at(name)).unwrap();
            }
        }
        symlink(version, self.at("..new")).unwrap();
        std::fs::rename(self.at("..new"), self.at("..data")).unwrap();
    }

    fn set_certificate(&mut self, signed: &Signed, brokers: &str) {
        self.set(&[
            ("tls.crt", &signed.certificate),
            ("tls.key", &signed.key),
            ("ca.crt", brokers),
        ]);
    }
}

/// A client certificate that expires in the far future.
fn client(authority: &Authority) -> Signed {
    authority.sign_client("redeliver", "urn:redeliver").unwrap()
}

/// A pipeline whose processes authenticate with the certificate of the secret.
fn with_certificate(name: &str, kafka: &LocalKafka, secret: &Secret) -> PipeBuilder {
    let file = |name: &str| secret.at(name).display().to_string();
    PipeBuilder::new(name)
        .brokers(&kafka.brokers())
        .set("kafka.brokers", &kafka.secured_brokers())
        .set("kafka.properties.security.protocol", "SSL")
        .set("kafka.properties.ssl.certificate.location", &file("tls.crt"))
        .set("kafka.properties.ssl.key.location", &file("tls.key"))
        .set("kafka.properties.ssl.ca.location", &file("ca.crt"))
        .set("kafka.credentials_spread", "1s")
        .plan(PLAN)
}

/// Waits until each service has replaced all of its clients, for the `count`th time.
fn until_replaced(services: &mut [ServiceProcess], count: usize) {
    for service in services {
        eventually("all clients are replaced", DEADLINE, || {
            let output = service.output();
            let times = output.matches(ALL_REPLACED).count();
            ensure(times >= count, output)
        });
        assert_eq!(service.metric(OUTDATED), 0);
        assert_eq!(service.metric(STALE), 0);
    }
}

/// Waits until this many jobs are dispatched, and everything in the source has ended once. No lane may have dropped an attempt
/// when it replaced its clients.
#[track_caller]
fn settle(pipe: &Pipe, sent: &[Sent], jobs: usize) {
    let all = eventually("all jobs are dispatched", DEADLINE, || {
        let read = pipe.read(std::slice::from_ref(&pipe.pipeline.source));
        let found = read.len() - sent.len();
        ensure(found == jobs, format!("{found} of {jobs}")).map(|()| read)
    });
    let all: Vec<Sent> = all.into_iter().map(Sent::from).collect();
    let ends = pipe.settle(&all, DEADLINE);
    ends.meets(&PLAN, &all);
    ends.were_called(&PLAN, &all, &pipe.endpoint);
}

#[test]
fn changed_certificates_are_used() {
    let (brokers, next_brokers) = (Authority::new().unwrap(), Authority::new().unwrap());
    let (clients, next_clients) = (Authority::new().unwrap(), Authority::new().unwrap());
    let both = |one: &Authority, other: &Authority| format!("{}{}", one.pem(), other.pem());
    let trusted = both(&clients, &next_clients);
    let mut kafka = LocalKafka::start_with_client_certificates(&brokers.sign().unwrap(), &trusted).unwrap();
    let mut secret = Secret::new();
    secret.set_certificate(&client(&clients), &brokers.pem());
    let data = Scratch::new("inspector").unwrap();
    let [scheduler, inspector] = [(), ()].map(|()| format!("127.0.0.1:{}", free_port()));
    let setup = with_certificate("certificates", &kafka, &secret);
    let (source, dead) = (setup.name().to_owned(), format!("[{}-dlq]", setup.name()));
    let pipe = setup
        .through_scheduler()
        .set("scheduler.listen", &scheduler)
        .set(&format!("scheduler.apps.{APP}.topic"), &source)
        .set("dlq_inspector.listen", &inspector)
        .set("dlq_inspector.topics", &dead)
        .set("dlq_inspector.data_dir", path(data.path()))
        .create();
    let names = ["enricher", "retry-tier", "scheduler", "dlq-inspector"];
    let mut services = names.map(|name| pipe.start(name, "a", &[]));

    // Clients exist that look up values of dead letters.
    let show = || {
        let listed = pipe.redeliver(&words("dlq ls -o jsonl --limit 1"));
        let letter: serde_json::Value = serde_json::from_str(listed.stdout.lines().next()?).ok()?;
        let id = letter["id"].as_str()?.to_owned();
        let shown = pipe.redeliver(&["dlq", "show", &id, "-o", "json"]);
        (shown.code == Some(0)).then_some(())
    };
    let schedule = |number: usize| {
        let job = format!("jobs schedule --app {APP} --in 1s --data job-{number}");
        let scheduled = pipe.redeliver(&words(&job));
        assert_eq!(scheduled.code, Some(0), "{scheduled:?}");
    };
    let sent = under_load(&pipe, 100, |load| {
        eventually("a dead letter is shown", DEADLINE, || show().ok_or("none"));
        schedule(1);
        secret.set_certificate(&client(&next_clients), &both(&brokers, &next_brokers));
        until_replaced(&mut services, 1);
        schedule(2);
        load.until_ended(100);
    });
    settle(&pipe, &sent, 2);

    // From here on, clients with the previous certificate are refused, and so is the previous CA of the broker.
    kafka
        .set_certificates(&next_brokers.sign().unwrap(), &next_clients.pem())
        .unwrap();
    kafka.restart().unwrap();
    services.iter_mut().for_each(ServiceProcess::until_ready);
    show().unwrap();
    schedule(3);
    let mut sent = sent;
    sent.extend(pipe.produce((0..100).map(|n| record(1_000_000 + n)).collect()));
    settle(&pipe, &sent, 3);
    let audited = pipe.redeliver(&["audit"]);
    assert_eq!(audited.code, Some(0), "{audited:?}");
    for service in &mut services {
        assert!(service.has_never_ended(), "{}", service.output());
        service.shut_down();
        let output = service.output();
        assert!(!output.contains("PRIVATE KEY"), "{output}");
    }
}

#[test]
#[ignore = "long"]
fn unusable_certificates_are_reported() {
    let (brokers, clients) = (Authority::new().unwrap(), Authority::new().unwrap());
    let kafka = LocalKafka::start_with_client_certificates(&brokers.sign().unwrap(), &clients.pem()).unwrap();
    let mut secret = Secret::new();
    let first = client(&clients);
    secret.set_certificate(&first, &brokers.pem());
    let pipe = with_certificate("bad-certificates", &kafka, &secret).create();
    let mut services = [pipe.enricher("a"), pipe.retry_tier("a")];
    let mut sent = pipe.produce(records(50));

    let second = client(&clients);
    let mismatched = Signed {
        certificate: second.certificate.clone(),
        key: first.key.clone(),
    };
    let unparsable = Signed {
        certificate: "x".to_owned(),
        key: second.key.clone(),
    };
    let stranger = client(&Authority::new().unwrap());
    let bad = [
        (&mismatched, "no Kafka client can be created with them: "),
        (&unparsable, "no Kafka client can be created with them: "),
        (
            &clients.sign_expired().unwrap(),
            "the client certificate has expired at 2020-01-31",
        ),
        (&stranger, " kafka "),
    ];
    for (signed, problem) in bad {
        let before = services.each_ref().map(|service| service.output().len());
        secret.set_certificate(signed, &brokers.pem());
        for (service, before) in services.iter_mut().zip(before) {
            eventually("the problem is reported", DEADLINE, || {
                let stale = service.metric(STALE);
                let output = service.output()[before..].to_owned();
                let reported = output.lines().any(|line| {
                    line.contains("changed Kafka credentials are unusable") && line.contains(problem)
                });
                ensure(stale == 1 && reported, format!("{stale} {problem} {output}"))
            });
        }
        sent.extend(pipe.produce(records(50)));
        pipe.settle(&sent, DEADLINE);
    }
    std::fs::remove_file(secret.at("tls.key")).unwrap();
    let unreadable = "kafka.properties.ssl.key.location";
    services
        .iter_mut()
        .for_each(|service| drop(service.wait_for_output(unreadable, DEADLINE)));
    for service in &mut services {
        service.until_ready();
        assert!(!service.output().contains(ALL_REPLACED));
    }
    std::os::unix::fs::symlink("..data/tls.key", secret.at("tls.key")).unwrap();
    secret.set_certificate(&second, &brokers.pem());
    until_replaced(&mut services, 1);
    sent.extend(pipe.produce(records(50)));
    pipe.settle(&sent, DEADLINE);
    for service in &mut services {
        assert!(service.has_never_ended(), "{}", service.output());
        service.shut_down();
        let output = service.output();
        assert!(!output.contains("PRIVATE KEY"), "{output}");
    }
}

#[test]
fn changed_password_is_used() {
    const USER: &str = "redeliver";
    let authority = Authority::new().unwrap();
    let mut kafka = LocalKafka::start_secured(&authority.sign().unwrap(), USER, "first-password").unwrap();
    let mut secret = Secret::new();
    secret.set(&[("password", "first-password\n"), ("ca.crt", &authority.pem())]);
    let password = format!("{{ file: {} }}", secret.at("password").display());
    let pipe = PipeBuilder::new("password")
        .brokers(&kafka.brokers())
        .set("kafka.brokers", &kafka.secured_brokers())
        .set("kafka.properties.security.protocol", "SASL_SSL")
        .set("kafka.properties.sasl.mechanism", "SCRAM-SHA-512")
        .set("kafka.properties.sasl.username", USER)
        .set("kafka.properties.sasl.password", &password)
        .set("kafka.properties.ssl.ca.location", path(&secret.at("ca.crt")))
        .set("kafka.credentials_spread", "1s")
        .plan(PLAN)
        .create();
    let mut services = [pipe.enricher("a"), pipe.retry_tier("a")];
    let mut sent = pipe.produce(records(50));
    let set_password = |password: &str| {
        let mut tool: Command = kafka_tool("kafka.admin.ConfigCommand").unwrap();
        let brokers = kafka.brokers();
        let login = format!("SCRAM-SHA-512=[password={password}]");
        let arguments = ["--bootstrap-server", &brokers, "--alter", "--add-config", &login];
        tool.args(arguments)
            .args(["--entity-type", "users", "--entity-name", USER]);
        let output = tool.output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    // Kafka does not accept the new password yet.
    secret.set(&[("password", "second-password\n"), ("ca.crt", &authority.pem())]);
    for service in &mut services {
        let output = service.wait_for_output("kafka refuses them: ", DEADLINE);
        assert!(output.contains("SASL authentication error"), "{output}");
        assert_eq!(service.metric(STALE), 1);
    }
    set_password("second-password");
    until_replaced(&mut services, 1);
    pipe.settle(&sent, DEADLINE);
    // All clients have to log in again.
    kafka.restart().unwrap();
    services.iter_mut().for_each(ServiceProcess::until_ready);
    sent.extend(pipe.produce(records(50)));
    pipe.settle(&sent, DEADLINE);
    for service in &mut services {
        assert!(service.has_never_ended(), "{}", service.output());
        service.shut_down();
        let output = service.output();
        assert!(
            !output.contains("first-password") && !output.contains("second-password"),
            "{output}"
        );
    }
}
