//! A Kafka that asks for TLS and a password, as docs/operations.md configures it.

use std::path::PathBuf;
use std::time::Duration;

use redeliver_testkit::certificates::Authority;
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{LocalKafka, Plan};

use crate::services::path;
use crate::support::{Pipe, Setup, records};

const PLAN: Plan = Plan {
    transient_percent: 30,
    permanent_percent: 2,
    hang_per_mille: 0,
    close_per_mille: 0,
    latency: Duration::ZERO,
};
const DEADLINE: Duration = Duration::from_secs(90);
const USER: &str = "redeliver";
const PASSWORD: &str = "hunter2";
const GUESSED: &str = "swordfish";

/// A broker that only lets in who knows the password, with a certificate that only who is told trusts. The tests
/// themselves write and read over another listener.
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

    /// A pipeline whose processes come with this password, and trust this authority.
    fn setup(&self, name: &str, password: &str, authority: &Authority) -> Setup {
        let password = self.file(&format!("{name}.password"), &format!("{password}\n"));
        let authority = authority
            .write(self.files.path(), &format!("{name}.crt"))
            .unwrap();
        Setup::new(name)
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
fn all_services_work_on_a_kafka_that_asks_for_tls_and_a_password() {
    let guarded = Guarded::start();
    let data = Scratch::new("inspector").unwrap();
    let setup = guarded.setup("secured", PASSWORD, &guarded.authority);
    let dead = format!("[{}-dlq]", setup.name());
    let pipe = setup
        .through_scheduler()
        .plan(PLAN)
        .set("dlq_inspector.listen", "127.0.0.1:0")
        .set("dlq_inspector.topics", &dead)
        .set("dlq_inspector.data_dir", path(data.path()))
        .create();
    let names = ["enricher", "retry-tier", "scheduler", "dlq-inspector"];
    let mut services = names.map(|name| pipe.start(name, "a", &[]));
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
        assert_eq!(service.end(), Some(0));
        let output = service.process.output();
        assert!(!output.contains(PASSWORD), "{output}");
    }
    // The other mechanism of brokers with passwords of their own.
    let plain = [
        "topics",
        "check",
        "--set",
        "kafka.properties.sasl.mechanism=PLAIN",
    ];
    let checked = pipe.redeliver(&plain);
    assert_eq!(checked.code, Some(0), "{checked:?}");
}

/// That a service stays up, is not ready, and says why, and that the CLI fails for the same reason.
#[track_caller]
fn is_refused(pipe: &Pipe, reason: &str) {
    let mut service = pipe.spawn("enricher", "a", &[]);
    let output = service
        .process
        .wait_for_output("kafka does not answer; trying again", DEADLINE);
    assert!(output.contains(reason), "{output}");
    let (status, body) = service.get("/readyz");
    assert!(status == 503 && body.contains(reason), "{status} {body}");
    assert_eq!(service.get("/livez").0, 200);
    assert_eq!(service.end(), Some(0));
    let checked = pipe.redeliver(&["topics", "check"]);
    assert_eq!(checked.code, Some(1), "{checked:?}");
    assert!(
        checked.stderr.starts_with("error: asking kafka at ") && checked.stderr.contains(reason),
        "{checked:?}"
    );
    for text in [service.process.output(), checked.stderr, checked.stdout] {
        assert!(!text.contains(PASSWORD) && !text.contains(GUESSED), "{text}");
    }
}

#[test]
fn a_wrong_password_and_a_certificate_that_nobody_vouches_for_are_named() {
    let guarded = Guarded::start();
    let wrong = guarded.setup("wrong-password", GUESSED, &guarded.authority);
    is_refused(&wrong.without_topics(), "SASL authentication error");
    let other = Authority::new().unwrap();
    let untrusted = guarded.setup("untrusted", PASSWORD, &other);
    is_refused(&untrusted.without_topics(), "certificate verify failed");
}
