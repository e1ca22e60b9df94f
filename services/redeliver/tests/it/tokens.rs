//! A Kafka that requires tokens of an OIDC issuer, as docs/secure.md configures it.

use std::path::PathBuf;
use std::time::Duration;

use redeliver_core::{Clock as _, SystemClock};
use redeliver_testkit::issuer::{AUDIENCE, Issuer};
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{LocalKafka, ServiceProcess, ensure, eventually};

use crate::chaos::settle;
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
fn services_log_in_and_renew_tokens() {
    let guarded = Guarded::start();
    let pipe = guarded
        .setup("tokens", SECRET)
        .through_scheduler()
        .plan(PLAN)
        .with_inspector()
        .create();

    // With a wrong secret, services wait, and commands fail.
    std::fs::write(guarded.secret_file(), GUESSED).unwrap();
    let reason = "kafka.login.oidc: check client_id and client_secret: ";
    let refusal = "answered 401 Unauthorized: invalid_client (Invalid client credentials)";
    let mut services = SERVICES.map(|name| pipe.spawn(name, "a", &[]));
    for service in &mut services {
        let output = service.wait_for_output("cannot get a token for Kafka; retrying", DEADLINE);
        assert!(output.contains(reason) && output.contains(refusal), "{output}");
        service.until_not_ready(refusal);
        assert_eq!(service.get("/livez").0, 200);
    }
    let commands = [&["audit"] as &[_], &["topics", "check"], &["status"]];
    for command in commands {
        let output = pipe.redeliver(command);
        assert_eq!(output.code, Some(1), "{output:?}");
        let shown = format!("{}{}", output.stdout, output.stderr);
        assert!(shown.contains(reason) && shown.contains(refusal), "{output:?}");
        has_no_secret(&shown);
    }
    // Once the file has the right one, they start. One that is rotated later is used for the next token.
    std::fs::write(guarded.secret_file(), SECRET).unwrap();
    services.iter_mut().for_each(ServiceProcess::until_ready);
    std::fs::write(guarded.secret_file(), GUESSED).unwrap();
    guarded.issuer.rotate(GUESSED);

    let mut unsent = records(RECORDS).into_iter();
    let mut sent = pipe.produce(unsent.by_ref().take(50).collect());
    let first = services.each_mut().map(|service| service.metric(EXPIRY));
    let expired = first.iter().max().unwrap() + 2;
    eventually("the first tokens of all processes have expired", DEADLINE, || {
        sent.extend(pipe.produce(unsent.by_ref().take(10).collect()));
        let now = SystemClock.now().as_millis() / 1_000;
        ensure(now > i64::try_from(expired).unwrap(), format!("{first:?} {now}"))
    });
    let last = services.each_mut().map(|service| service.metric(EXPIRY));
    assert!(
        first.iter().zip(&last).all(|(first, last)| first < last),
        "{first:?} {last:?}"
    );
    settle(&pipe, &sent, &PLAN);
    for command in commands {
        let output = pipe.redeliver(command);
        assert_eq!(output.code, Some(0), "{command:?}: {output:?}");
    }
    for service in &mut services {
        let (_, config) = service.get("/config");
        assert!(config.contains("token_url"), "{config}");
        has_no_secret(&config);
        service.shut_down();
        let output = service.output();
        // Kafka never refused a token. A connection that ends while it logs in is another matter.
        let mut refusals = output
            .lines()
            .filter(|line| line.contains("Authentication") && !line.contains("Broker transport failure"));
        assert_eq!(refusals.next(), None, "{output}");
        has_no_secret(&output);
    }
}

#[test]
#[ignore = "long"]
fn long_outage_of_issuer_loses_nothing() {
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
        ensure(expired == [true; 2], format!("{expired:?}"))
    });
    sent.extend(produce());
    for service in &mut services {
        let output = service.wait_for_output("cannot get a token for Kafka; retrying", DEADLINE);
        assert!(output.contains("does not answer"), "{output}");
        assert!(service.metric("redeliver_kafka_token_failures_total") > 0);
    }
    guarded.issuer.resume();
    settle(&pipe, &sent, &PLAN);
    for service in &mut services {
        service.shut_down();
    }
}
