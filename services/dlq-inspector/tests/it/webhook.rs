//! Problems that are sent to another system.

use std::sync::mpsc::{Receiver, sync_channel};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use redeliver_core::{Clock as _, SystemClock};
use redeliver_proto::v1;
use redeliver_testkit::kafka_request::configure_topic;
use redeliver_testkit::{FakeEndpoint, Reply, Request, eventually};
use ring::hmac;
use serde_json::Value;

use crate::group_states::{change, changed};
use crate::redrive::{World, died, observe, plan, planned, start};
use crate::support::{DEADLINE, InspectorEnv, dead};

const SECRET: &str = "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// A request.
struct Sent {
    id: String,
    is_signed: bool,
    body: Value,
}

/// A receiver. The first request about each problem fails.
struct Webhooks {
    _endpoint: FakeEndpoint,
    requests: Receiver<Sent>,
    sent: Vec<Sent>,
}

impl Webhooks {
    /// What inspectors send that are started afterwards.
    fn start(env: &mut InspectorEnv) -> Self {
        let (sender, requests) = sync_channel(1_000);
        let endpoint = FakeEndpoint::start(move |request| {
            let sent = Sent {
                id: header(request, "webhook-id").to_owned(),
                is_signed: is_signed(request),
                body: serde_json::from_slice(&request.body).unwrap(),
            };
            sender.send(sent).unwrap();
            match request.earlier_calls_of_body {
                0 => Reply::status(500),
                _ => Reply::status(204),
            }
        });
        let file = env.base.directory().join("secret");
        std::fs::write(&file, format!("whsec_{SECRET}\n")).unwrap();
        env.base.set("dlq_inspector.webhook.url", &endpoint.url());
        env.base
            .set("dlq_inspector.webhook.secret_file", file.to_str().unwrap());
        Self {
            _endpoint: endpoint,
            requests,
            sent: Vec::new(),
        }
    }

    /// The requests about problems of this kind and topic, two for each problem.
    #[track_caller]
    fn until_sent(&mut self, kind: &str, topic: &str, problems: usize) -> Vec<&Sent> {
        let kind = format!("redeliver.{kind}");
        let is_of = |sent: &Sent| sent.body["type"] == *kind && sent.body["data"]["topic"] == topic;
        eventually(&format!("{problems} of {kind}"), DEADLINE, || {
            self.sent.extend(self.requests.try_iter());
            match self.sent.iter().filter(|sent| is_of(sent)).count() {
                count if count == 2 * problems => Ok(()),
                count => Err(count),
            }
        });
        assert!(self.sent.iter().all(|sent| sent.is_signed));
        self.sent.iter().filter(|sent| is_of(sent)).collect()
    }
}

fn header<'r>(request: &'r Request, name: &str) -> &'r str {
    request.headers[name].to_str().unwrap()
}

/// What a receiver of Standard Webhooks checks: one of the signatures, and the time.
fn is_signed(request: &Request) -> bool {
    let [id, time, signatures] =
        ["id", "timestamp", "signature"].map(|of| header(request, &format!("webhook-{of}")));
    let age = SystemClock.now().as_millis() / 1_000 - time.parse::<i64>().unwrap();
    let key = hmac::Key::new(hmac::HMAC_SHA256, &STANDARD.decode(SECRET).unwrap());
    let signed = [format!("{id}.{time}.").as_bytes(), &request.body].concat();
    let mut signatures = signatures.split(' ').filter_map(|one| one.strip_prefix("v1,"));
    let is_genuine = |signature| {
        let signature = STANDARD.decode(signature).unwrap_or_default();
        hmac::verify(&key, &signed, &signature).is_ok()
    };
    age.abs() < 300 && signatures.any(is_genuine)
}

#[tokio::test(flavor = "multi_thread")]
async fn new_groups_and_expiring_letters_are_sent() {
    let mut env = InspectorEnv::new("webhook");
    let topic = env.create_topic("a", 1).await;
    configure_topic(env.base.brokers(), &topic, &[("retention.ms", "3600000")]);
    let mut webhooks = Webhooks::start(&mut env);
    let mut inspector = env.start().await;
    let letter = |code| {
        let headers = [
            ("error-code", code),
            ("error-class", "permanent"),
            ("error-message", "private"),
        ];
        dead("k", "v", &headers)
    };
    env.put(
        &topic,
        0,
        vec![letter("http.404"), letter("http.404"), letter("http.410")],
    )
    .await;
    let mut group = String::new();
    let found = webhooks.until_sent("group_new", &topic, 2);
    for code in ["http.410", "http.404"] {
        let mut attempts = found
            .iter()
            .filter(|sent| sent.body["data"]["error_code"] == code);
        let (first, second) = (attempts.next().unwrap(), attempts.next().unwrap());
        assert_eq!((&first.id, &first.body), (&second.id, &second.body));
        assert!(!first.body.to_string().contains("private"), "{}", first.body);
        group = first.body["data"]["group_id"].as_str().unwrap().to_owned();
    }
    // No more for the same groups.
    env.put(&topic, 0, vec![letter("http.404")]).await;
    inspector.until_listed("error_code = \"http.404\"", 3).await;
    env.put(&topic, 0, vec![letter("http.411")]).await;
    let found = webhooks.until_sent("group_new", &topic, 3);
    assert_eq!(found[5].body["data"]["error_code"], "http.411");

    let client = inspector.client().await;
    changed(async || client.clone().resolve_group(change(&group)).await).await;
    env.put(&topic, 0, vec![letter("http.404")]).await;
    let regressed = webhooks.until_sent("group_regressed", &topic, 1);
    assert_eq!(regressed[0].body["data"]["group_id"], group);
    let expiring = webhooks.until_sent("letters_expire", &topic, 1);
    assert!(
        expiring[0].body["data"]["deadline"].is_string(),
        "{}",
        expiring[0].body
    );
    let sent = "redeliver_dlq_webhook_requests_total{outcome=\"sent\"}";
    assert!(inspector.metrics().lines().any(|line| line.starts_with(sent)));
}

#[tokio::test(flavor = "multi_thread")]
async fn auto_paused_redrives_are_sent() {
    let mut world = World::new("webhook-redrive", "").await;
    let mut webhooks = Webhooks::start(&mut world.env);
    world.put(40).await;
    let mut inspector = world.env.start().await;
    inspector.until_listed("", 40).await;
    let request = v1::PlanRedriveRequest {
        all_at_once: false,
        observe: Some(observe(10)),
        ..plan(v1::RedriveKind::Redrive, "")
    };
    let job = planned(&mut inspector, request).await.unwrap();
    start(&mut inspector, &job.id).await;
    let first = world.until_redriven(10).await;
    world.env.put(&world.dlq, 0, died(&first[..5])).await;
    let sent = webhooks.until_sent("redrive_auto_paused", &world.dlq, 1);
    assert_eq!(sent[0].body["data"]["redrive_id"], job.id.as_str());
}
