//! Sends problems of the overview to another system, each once, as [Standard Webhooks](https://www.standardwebhooks.com). They contain no payloads, keys,
//! headers or messages.

mod notices;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use redeliver_core::Clock;
use redeliver_core::wait::{Backoff, LogThrottle};
use redeliver_runtime::config::{ConfigError, endpoint_url};
use redeliver_runtime::http_client;
use reqwest::{Client, StatusCode};
use ring::hmac;
use tokio_util::sync::CancellationToken;
use url::Url;

use self::notices::{Notice, Notices};
use crate::config::WebhookConfig;
use crate::config::secrets;
use crate::dialect::Field;
use crate::masking::{Fact, Masking};
use crate::metrics::Metrics;
use crate::overview::task::Receiver;
use crate::overview::view::{Caller, Selection};

/// Maximum time of a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The time between two requests.
const PAUSE: Duration = Duration::from_secs(1);
/// The delays after failed requests.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(300));

/// Sends problems.
pub(crate) struct Webhook {
    config: WebhookConfig,
    url: Url,
    client: Client,
    masking: Arc<Masking>,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
}

impl Caller for Webhook {
    fn sees(&self, _topic: &str) -> bool {
        true
    }

    fn sees_control(&self, _control: &str) -> bool {
        false
    }

    fn lacks_codes(&self, topic: &str) -> bool {
        self.masking.of(topic).hides(Fact::Of(Field::ErrorCode))
    }
}

impl Webhook {
    /// Does not connect yet.
    ///
    /// # Errors
    /// What is wrong with the configuration.
    pub(crate) fn new(
        config: &WebhookConfig,
        masking: Arc<Masking>,
        clock: Arc<dyn Clock>,
        metrics: Metrics,
    ) -> Result<Self, ConfigError> {
        let of = |key: &str, problem: String| {
            ConfigError::of_field(format!("dlq_inspector.webhook.{key}"), problem)
        };
        let url = endpoint_url(config.url.expose()).map_err(|problem| of("url", problem))?;
        let client = http_client::client(&url, config.ca_file.as_deref(), TIMEOUT);
        Ok(Self {
            config: config.clone(),
            url,
            client: client.map_err(|problem| of("ca_file", problem))?,
            masking,
            clock,
            metrics,
        })
    }

    /// Sends what is new in each overview, until `stop` is cancelled.
    pub(crate) async fn run(self, overviews: Receiver, stop: CancellationToken) -> Result<(), Infallible> {
        stop.run_until_cancelled(self.send_all(overviews)).await;
        Ok(())
    }

    async fn send_all(&self, mut overviews: Receiver) {
        let (mut notices, mut log) = (Notices::default(), LogThrottle::default());
        let mut backoff = Backoff::new(BACKOFF.0, BACKOFF.1);
        let all = Selection {
            problem_limit: usize::MAX,
            ..Selection::default()
        };
        loop {
            let overview = overviews.borrow_and_update().clone();
            if let Some(overview) = overview {
                let problems = overview.view(self, &all).problems;
                notices.add(&problems, self.clock.now(), self.config.breaker_after.duration());
            }
            let Some(notice) = notices.next() else {
                // The other end exists for as long as the process.
                let _ = overviews.changed().await;
                continue;
            };
            match self.send(notice).await {
                Ok(is_accepted) => {
                    let outcome = if is_accepted { "sent" } else { "refused" };
                    self.metrics.add_webhook_request(outcome);
                    notices.done();
                    backoff.reset();
                    log.reset();
                    tokio::time::sleep(PAUSE).await;
                }
                Err(problem) => {
                    self.metrics.add_webhook_request("failed");
                    if log.should_log() {
                        tracing::warn!(problem, "cannot send to dlq_inspector.webhook.url; retrying");
                    }
                    tokio::time::sleep(backoff.next_delay()).await;
                }
            }
        }
    }

    /// Whether the receiver has accepted it. It may refuse some problems for good, which must not hold up others.
    async fn send(&self, notice: &Notice) -> Result<bool, String> {
        let now = self.clock.now().as_millis().div_euclid(1_000);
        let signatures = signatures(&secrets(&self.config.secret_file)?, notice, now);
        let request = self
            .client
            .post(self.url.clone())
            .header("content-type", "application/json")
            .header("webhook-id", &notice.id)
            .header("webhook-timestamp", now)
            .header("webhook-signature", signatures)
            .body(notice.body.clone());
        // The URL may contain credentials.
        let answer = request
            .send()
            .await
            .map_err(|error| redeliver_core::error_chain::error_chain(&error.without_url()))?;
        match answer.status() {
            status if status.is_success() => Ok(true),
            status @ (StatusCode::BAD_REQUEST
            | StatusCode::PAYLOAD_TOO_LARGE
            | StatusCode::UNPROCESSABLE_ENTITY) => {
                tracing::warn!(id = notice.id, %status, "dlq_inspector.webhook.url has refused a problem");
                Ok(false)
            }
            status => Err(format!("answered {status}")),
        }
    }
}

/// One signature for each secret, so that receivers can replace them one after the other.
fn signatures(secrets: &[Vec<u8>], Notice { id, body }: &Notice, seconds: i64) -> String {
    let signed = [format!("{id}.{seconds}.").as_bytes(), body].concat();
    let signatures = secrets.iter().map(|secret| {
        let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), &signed);
        format!("v1,{}", STANDARD.encode(tag))
    });
    signatures.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the specification.
    #[test]
    fn signature_is_that_of_the_specification() {
        let secret = STANDARD.decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
        let notice = Notice {
            id: "msg_p5jXN8AQM9LWM0D4loKWxJek".to_owned(),
            body: br#"{"test": 2432232314}"#.to_vec(),
        };
        let expected = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";
        let signatures = signatures(&[secret.clone(), secret], &notice, 1_614_265_330);
        assert_eq!(signatures, format!("{expected} {expected}"));
    }
}
