//! A Kafka that requires tokens of an OIDC issuer, as docs/secure.md configures it.

use std::path::PathBuf;
use std::time::Duration;

use redeliver_core::{Clock as _, SystemClock};
use redeliver_testkit::issuer::{AUDIENCE, Issuer};
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{LocalKafka, ServiceProcess, eventually};

use crate::chaos::settle;
use crate::services::path;
use crate::support::{DEADLINE, PLAN, PipeBuilder, SERVICES, records};

const CLIENT: &str = "redeliver";
const SECRET: &str = "hunter2";
const GUESSED: &str = "swordfish";
/// Short, so that tokens expire during a test. The broker closes connections whose token has expired. A connection that
/// is opened with a token just before its renewal has a tenth of the rest of that token's lifetime to present the next
/// one, which is 0.6 s here, and too little on a busy machine with a much shorter lifetime.
const LIFETIME: Duration = Duration::from_secs(30);
/// Enough for any machine; the endpoint tells records apart by their values, so each occurs once.
const RECORDS: usize = 20_000;
const EXPIRY: &str = "redeliver_kafka_token_expiry_timestamp_seconds";

/// An issuer, and a broker that accepts its tokens. The tests themselves use another listener.
struct Guarded {
    kafka: LocalKafka,
    issuer: Issuer,
    files: Scratch,
}

impl Guarded {
    fn start() -> Self {
        let files = Scratch::new("tokens").unwrap();
        let issuer = Issuer::start(CLIENT, SECRET, LIFETIME).unwrap();
        let keys = issuer.write_keys(files.path()).unwrap();
        Self {
            kafka: LocalKafka::start_with_tokens(&keys, AUDIENCE).unwrap(),
            issuer,
            files,
        }
    }

    fn secret_file(&self) -> PathBuf {
        self.files.path().join("secret")
    }

    /// A pipeline whose processes log in with this secret.
    fn setup(&self, name: &str, secret: &str) -> PipeBuilder {
        std::fs::write(self.secret_file(), format!("{secret}\n")).unwrap();
        PipeBuilder::new(name)
            .brokers(&self.kafka.brokers())
            .set("kafka.brokers", &self.kafka.secured_brokers())
            .set("kafka.properties.security.protocol", "SASL_PLAINTEXT")
            .set("kafka.login.oidc.token_url", &self.issuer.token_url())
            .set("kafka.login.oidc.client_id", CLIENT)
            .set(
                "kafka.login.oidc.client_secret",
                &format!("{{ file: {} }}", self.secret_file().display()),
            )
            .set("kafka.login.oidc.scope", "kafka")
    }
}

#[track_caller]
fn has_no_secret(text: &str) {
    assert!(!text.contains(SECRET) && !text.contains(GUESSED), "{text}");
}

fn token_has_expired(service: &mut ServiceProcess) -> bool {
    let expiry = service.metric(EXPIRY);
    // The issuer rounds up.
    expiry > 0 && i64::try_from(expiry + 2).unwrap() * 1_000 < SystemClock.now().as_millis()
}

#[test]
fn all_services_log_in_and_renew_their_tokens_while_records_flow() {
    let guarded = Guarded::start();
    let pipe = guarded
        .setup("tokens", SECRET)
        .through_scheduler()
        .plan(PLAN)
        .with_inspector()
        .create();
    let mut services = SERVICES.map(|name| pipe.start(name, "a", &[]));
    let mut unsent = records(RECORDS).into_iter();
    let mut sent = pipe.produce(unsent.by_ref().take(50).collect());
    let first = services.each_mut().map(|service| service.metric(EXPIRY));
    let expired = first.iter().max().unwrap() + 2;
    eventually("the first tokens of all processes have expired", DEADLINE, || {
        sent.extend(pipe.produce(unsent.by_ref().take(10).collect()));
        let now = SystemClock.now().as_millis() / 1_000;
        if now > i64::try_from(expired).unwrap() {
            Ok(())
        } else {
            Err(format!("{first:?} {now}"))
        }
    });
    let last = services.each_mut().map(|service| service.metric(EXPIRY));
    assert!(
        first.iter().zip(&last).all(|(first, last)| first < last),
        "{first:?} {last:?}"
    );
    settle(&pipe, &sent, &PLAN);
    for command in [&["audit"] as &[_], &["topics", "check"], &["status"]] {
        let output = pipe.redeliver(command);
        assert_eq!(output.code, Some(0), "{command:?}: {output:?}");
    }
    for service in &mut services {
        let (_, config) = service.get("/config");
        assert!(config.contains("token_url"), "{config}");
        has_no_secret(&config);
        service.shut_down();
        let output = service.output();
        // No token was ever refused. A connection that ends while it logs in is another matter.
        let mut refusals = output
            .lines()
            .filter(|line| line.contains("Authentication") && !line.contains("Broker transport failure"));
        assert_eq!(refusals.next(), None, "{output}");
        has_no_secret(&output);
    }
}

#[test]
#[ignore = "long"]
fn an_outage_of_the_issuer_that_outlasts_the_token_loses_nothing() {
    let guarded = Guarded::start();
    let pipe = guarded.setup("issuer-down", SECRET).plan(PLAN).create();
    let mut services = ["enricher", "retry-tier"].map(|name| pipe.start(name, "a", &[]));
    let mut unsent = records(300).into_iter();
    let mut produce = || pipe.produce(unsent.by_ref().take(100).collect());
    let mut sent = produce();
    guarded.issuer.interrupt();
    sent.extend(produce());
    eventually("the tokens of all processes have expired", DEADLINE, || {
        let expired = services.each_mut().map(token_has_expired);
        if expired == [true; 2] {
            Ok(())
        } else {
            Err(format!("{expired:?}"))
        }
    });
    sent.extend(produce());
    for service in &mut services {
        let output = service.wait_for_output("cannot get a token for kafka; retrying", DEADLINE);
        assert!(output.contains("does not answer"), "{output}");
        assert!(service.metric("redeliver_kafka_token_failures_total") > 0);
    }
    guarded.issuer.resume();
    settle(&pipe, &sent, &PLAN);
    for service in &mut services {
        service.shut_down();
    }
}

#[test]
fn a_service_with_a_wrong_secret_says_so_and_starts_once_the_file_has_the_right_one() {
    let guarded = Guarded::start();
    let data = Scratch::new("inspector").unwrap();
    let pipe = guarded
        .setup("wrong-secret", SECRET)
        .set("dlq_inspector.listen", "127.0.0.1:0")
        .set("dlq_inspector.data_dir", path(data.path()))
        .create();
    std::fs::write(guarded.secret_file(), GUESSED).unwrap();
    let reason = "kafka.login.oidc: check client_id and client_secret: ";
    let refusal = "answered 401 Unauthorized: invalid_client (Invalid client credentials)";
    // An inspector that does not create its topic waits too.
    let mut services = ["enricher", "dlq-inspector"].map(|name| pipe.spawn(name, "a", &[]));
    for service in &mut services {
        let output = service.wait_for_output("cannot get a token for kafka; retrying", DEADLINE);
        assert!(output.contains(reason) && output.contains(refusal), "{output}");
        eventually("/readyz shows the reason", DEADLINE, || {
            let (status, body) = service.get("/readyz");
            if status == 503 && body.contains(refusal) {
                Ok(())
            } else {
                Err(format!("{status} {body}"))
            }
        });
        assert_eq!(service.get("/livez").0, 200);
    }
    for command in [&["topics", "check"] as &[_], &["audit"], &["status"]] {
        let output = pipe.redeliver(command);
        assert_eq!(output.code, Some(1), "{output:?}");
        let shown = format!("{}{}", output.stdout, output.stderr);
        assert!(shown.contains(reason) && shown.contains(refusal), "{output:?}");
        has_no_secret(&shown);
    }
    std::fs::write(guarded.secret_file(), SECRET).unwrap();
    services.iter_mut().for_each(ServiceProcess::until_ready);
    // A secret that is rotated later is used for the next token.
    guarded.issuer.rotate(GUESSED);
    std::fs::write(guarded.secret_file(), GUESSED).unwrap();
    let issued = guarded.issuer.issued();
    eventually("a token was issued for the new secret", DEADLINE, || {
        let now = guarded.issuer.issued();
        if now > issued { Ok(()) } else { Err(now) }
    });
    for service in &mut services {
        service.shut_down();
        has_no_secret(&service.output());
    }
}
