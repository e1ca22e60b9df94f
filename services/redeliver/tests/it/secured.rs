//! A Kafka that requires TLS and a password, as docs/secure.md configures it.

use std::path::PathBuf;

use redeliver_kafka::{KafkaSettings, topology};
use redeliver_testkit::LocalKafka;
use redeliver_testkit::certificates::Authority;
use redeliver_testkit::scratch::Scratch;

use crate::client::block_on;
use crate::services::path;
use crate::support::{DEADLINE, PLAN, PipeBuilder, SERVICES, records};

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
fn services_work_with_tls_and_password() {
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

#[track_caller]
fn has_no_password(text: &str) {
    assert!(!text.contains(PASSWORD) && !text.contains(GUESSED), "{text}");
}

/// A service keeps running. A request does not wait for its timeout.
#[test]
fn refused_connections_are_reported() {
    let guarded = Guarded::start();
    let other = Authority::new().unwrap();
    for (name, password, authority, reason) in [
        (
            "wrong-password",
            GUESSED,
            &guarded.authority,
            "SASL authentication error",
        ),
        ("untrusted", PASSWORD, &other, "certificate verify failed"),
    ] {
        let pipe = guarded.setup(name, password, authority).without_topics();
        let mut service = pipe.spawn("enricher", "a", &[]);
        let output = service.wait_for_output("Kafka unavailable; retrying", DEADLINE);
        assert!(output.contains(reason), "{output}");
        let (status, body) = service.get("/readyz");
        assert!(status == 503 && body.contains(reason), "{status} {body}");
        assert_eq!(service.get("/livez").0, 200);
        service.shut_down();
        has_no_password(&service.output());

        let checked = pipe.redeliver(&["topics", "check"]);
        assert_eq!(checked.code, Some(1), "{checked:?}");
        let expected = "error: requesting the topics of Kafka at ";
        assert!(
            checked.stderr.starts_with(expected) && checked.stderr.contains(reason),
            "{checked:?}"
        );
        has_no_password(&format!("{checked:?}"));
    }
    let mut settings = KafkaSettings::new(guarded.kafka.secured_brokers(), "refused");
    let authority = guarded.authority.write(guarded.files.path(), "ca.crt").unwrap();
    for (name, value) in [
        ("security.protocol", "SASL_SSL"),
        ("sasl.mechanism", "SCRAM-SHA-512"),
        ("sasl.username", USER),
        ("sasl.password", GUESSED),
        ("ssl.ca.location", path(&authority)),
    ] {
        settings.properties.insert(name.to_owned(), value.to_owned());
    }
    let client = settings.client();
    let error = block_on(topology::names(&client, 10 * DEADLINE)).unwrap_err();
    assert!(error.to_string().contains("SASL authentication error"), "{error}");
}
