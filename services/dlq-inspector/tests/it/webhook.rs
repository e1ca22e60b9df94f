//! Problems that are sent to another system.

use std::sync::mpsc::sync_channel;

use redeliver_testkit::{FakeEndpoint, Reply, eventually};

use crate::support::{DEADLINE, InspectorEnv, dead};

#[tokio::test(flavor = "multi_thread")]
async fn new_groups_are_sent_once() {
    let (sender, requests) = sync_channel(100);
    let receiver = FakeEndpoint::start(move |request| {
        // The first request of each problem fails.
        let id = request.headers["webhook-id"].to_str().unwrap().to_owned();
        let signature = request.headers["webhook-signature"].to_str().unwrap().to_owned();
        sender
            .send((id, signature, String::from_utf8(request.body.to_vec()).unwrap()))
            .unwrap();
        match request.earlier_calls_of_body {
            0 => Reply::status(500),
            _ => Reply::status(204),
        }
    });
    let mut env = InspectorEnv::new("webhook");
    let topic = env.create_topic("a", 1).await;
    let file = env.base.directory().join("secret");
    std::fs::write(&file, "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n").unwrap();
    env.base.set("dlq_inspector.webhook.url", &receiver.url());
    env.base
        .set("dlq_inspector.webhook.secret_file", file.to_str().unwrap());
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
    let of_this_test =
        |body: &str| body.contains("\"type\":\"redeliver.group_new\"") && body.contains(&*topic);
    let mut found = Vec::new();
    eventually("both groups are sent", DEADLINE, || {
        found.extend(requests.try_iter().filter(|(_, _, body)| of_this_test(body)));
        if found.len() == 4 {
            Ok(())
        } else {
            Err(found.len())
        }
    });
    for code in ["http.404", "http.410"] {
        let mut attempts = found.iter().filter(|(_, _, body)| body.contains(code));
        let (first, second) = (attempts.next().unwrap(), attempts.next().unwrap());
        assert_eq!((&first.0, &first.2), (&second.0, &second.2));
        assert!(first.1.starts_with("v1,"), "{first:?}");
        assert!(!first.2.contains("private"), "{first:?}");
    }
    // No more for the same groups.
    env.put(&topic, 0, vec![letter("http.404")]).await;
    inspector.until_listed("error_code = \"http.404\"", 3).await;
    env.put(&topic, 0, vec![letter("http.411")]).await;
    let next = eventually("the next group is sent", DEADLINE, || {
        let next = requests.try_iter().find(|(_, _, body)| of_this_test(body));
        next.ok_or("none")
    });
    assert!(next.2.contains("http.411"), "{next:?}");
    let sent = "redeliver_dlq_webhook_requests_total{outcome=\"sent\"}";
    assert!(inspector.metrics().lines().any(|line| line.starts_with(sent)));
}
