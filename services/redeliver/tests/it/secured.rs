//! A Kafka that requires TLS and a password, as docs/secure.md configures it.

use std::path::PathBuf;
use std::time::Duration;

use redeliver_kafka::{KafkaSettings, topology};
use redeliver_testkit::LocalKafka;
use redeliver_testkit::certificates::Authority;
use redeliver_testkit::scratch::Scratch;

use crate::services::path;
use crate::support::{DEADLINE, PLAN, Pipe, PipeBuilder, SERVICES, records};

const USER: &str = "redeliver";
const PASSWORD: &str = "hunter2";
const GUESSED: &str = "swordfish";

/// A broker that requires a password, with a certificate of an authority that no machine trusts. The tests themselves
/// use another listener.
struct Guarded {
    kafka: LocalKafka,
    authority: Authority,
    files: Scratch,
}

impl Guarded {
    fn start() -> Self {
        let authority = Authority::new().unwrap();
        let signed = authority.sign().unwrap();
        Self {
            kafka: LocalKafka::start_secured(&signed, USER, PASSWORD).unwrap(),
            authority,
            files: Scratch::new("guarded").unwrap(),
        }
    }

    fn file(&self, name: &str, content: &str) -> PathBuf {
        let file = self.files.path().join(name);
        std::fs::write(&file, content).unwrap();
        file
    }

    /// A pipeline whose processes use this password and trust this authority.
    fn setup(&self, name: &str, password: &str, authority: &Authority) -> PipeBuilder {
        let password = self.file(&format!("{name}.password"), &format!("{password}\n"));
        let authority = authority
            .write(self.files.path(), &format!("{name}.crt"))
            .unwrap();
        PipeBuilder::new(name)
            .brokers(&self.kafka.brokers())
            .set("kafka.brokers", &self.kafka.secured_brokers())
            .set("kafka.properties.security.protocol", "SASL_SSL")
            .set("kafka.properties.sasl.mechanism", "SCRAM-SHA-512")
            .set("kafka.properties.sasl.username", USER)
            .set(
                "kafka.properties.sasl.password",
                &format!("{{ file: {} }}", password.display()),
            )
            .set("kafka.properties.ssl.ca.location", path(&authority))
    }
}

#[test]
fn all_services_work_with_tls_and_a_password() {
    let guarded = Guarded::start();
    let pipe = guarded
        .setup("secured", PASSWORD, &guarded.authority)
        .through_scheduler()
        .plan(PLAN)
        .with_inspector()
        .create();
    let mut services = SERVICES.map(|name| pipe.start(name, "a", &[]));
    let sent = pipe.produce(records(200));
    pipe.settle(&sent, DEADLINE).meets(&PLAN, &sent);
    let audited = pipe.redeliver(&["audit"]);
    assert_eq!(audited.code, Some(0), "{audited:?}");
    for service in &mut services {
        let (_, config) = service.get("/config");
        assert!(
            config.contains("SCRAM-SHA-512") && !config.contains(PASSWORD),
            "{config}"
        );
        service.shut_down();
        let output = service.output();
        assert!(!output.contains(PASSWORD), "{output}");
    }
    // The other mechanism for passwords that the broker itself stores.
    let plain = [
        "topics",
        "check",
        "--set",
        "kafka.properties.sasl.mechanism=PLAIN",
    ];
    let checked = pipe.redeliver(&plain);
    assert_eq!(checked.code, Some(0), "{checked:?}");
}

/// Calls `check` for a pipeline with a wrong password and one that trusts another authority, each with the reason that
/// must be reported.
fn for_each_refusal(check: impl Fn(&Pipe, &str)) {
    let guarded = Guarded::start();
    let wrong = guarded.setup("wrong-password", GUESSED, &guarded.authority);
    check(&wrong.without_topics(), "SASL authentication error");
    let other = Authority::new().unwrap();
    let untrusted = guarded.setup("untrusted", PASSWORD, &other);
    check(&untrusted.without_topics(), "certificate verify failed");
}

#[track_caller]
fn has_no_password(text: &str) {
    assert!(!text.contains(PASSWORD) && !text.contains(GUESSED), "{text}");
}

#[test]
fn a_service_reports_a_wrong_password_and_an_untrusted_certificate_and_keeps_running() {
    for_each_refusal(|pipe, reason| {
        let mut service = pipe.spawn("enricher", "a", &[]);
        let output = service.wait_for_output("Kafka unavailable; retrying", DEADLINE);
        assert!(output.contains(reason), "{output}");
        let (status, body) = service.get("/readyz");
        assert!(status == 503 && body.contains(reason), "{status} {body}");
        assert_eq!(service.get("/livez").0, 200);
        service.shut_down();
        has_no_password(&service.output());
    });
}

#[test]
fn the_cli_reports_a_wrong_password_and_an_untrusted_certificate() {
    for_each_refusal(|pipe, reason| {
        let checked = pipe.redeliver(&["topics", "check"]);
        assert_eq!(checked.code, Some(1), "{checked:?}");
        assert!(
            checked
                .stderr
                .starts_with("error: requesting the topics of Kafka at ")
                && checked.stderr.contains(reason),
            "{checked:?}"
        );
        has_no_password(&checked.stderr);
        has_no_password(&checked.stdout);
    });
}

#[tokio::test]
async fn a_refused_connection_is_reported_without_waiting_for_the_timeout() {
    let guarded = Guarded::start();
    let authority = guarded.authority.write(guarded.files.path(), "ca.crt").unwrap();
    let mut settings = KafkaSettings::new(guarded.kafka.secured_brokers(), "refused");
    let properties = [
        ("security.protocol", "SASL_SSL"),
        ("sasl.mechanism", "SCRAM-SHA-512"),
        ("sasl.username", USER),
        ("sasl.password", GUESSED),
        ("ssl.ca.location", path(&authority)),
    ];
    let properties = properties.map(|(name, value)| (name.to_owned(), value.to_owned()));
    settings.properties.extend(properties);
    let client = settings.client();
    let names = topology::names(&client, Duration::from_secs(86_400));
    let error = tokio::time::timeout(DEADLINE, names).await.unwrap().unwrap_err();
    assert!(error.to_string().contains("SASL authentication error"), "{error}");
}
