//! Finds out whether Kafka accepts a client, and if not, why.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseProducer, DeliveryResult, Producer as _, ProducerContext};
use redeliver_kafka_ffi::KafkaClient;

use crate::client::ClientSettings;
use crate::recovery::error_code;

/// The timeout of the first request: a short one, so that a refusal is soon reported.
const FIRST_REQUEST: Duration = Duration::from_millis(50);
/// How long callbacks are waited for after a request.
const CALLBACKS: Duration = Duration::from_millis(50);

/// The result of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Probed {
    /// A broker has answered.
    Connected,
    /// The connection or the login was refused, for this reason.
    Refused(String),
    /// No broker answers. Contains the last error of a connection, if there was one: with TLS 1.3, a broker that rejects a
    /// certificate only closes the connection.
    Unanswered(Option<String>),
}

/// Connects with a new client. Blocks, for `timeout` at most. Requests only report that no broker is
/// available, and an admin client's callback reports only that, so this uses a producer, which reports errors
/// of connections.
///
/// # Errors
/// If the client cannot be created.
pub(crate) fn probe(config: &ClientSettings, timeout: Duration) -> Result<Probed, KafkaError> {
    let client: KafkaClient<BaseProducer<Refusal>> = config.create_with_context(Refusal::default())?;
    let end = Instant::now() + timeout;
    let mut request = FIRST_REQUEST.min(timeout);
    loop {
        // The request makes the client connect. Errors are reported to the callback.
        let answered = client.client().fetch_metadata(None, request);
        client.poll(CALLBACKS);
        let mut errors = client.context().lock();
        if let Some(reason) = errors.refusal.take() {
            return Ok(Probed::Refused(reason));
        }
        if answered.is_ok() {
            return Ok(Probed::Connected);
        }
        let remaining = end.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Ok(Probed::Unanswered(errors.other.take()));
        }
        drop(errors);
        request = next_request(request, remaining);
    }
}

/// The timeout of the request that follows one with the timeout `previous`. The last one gets all the time that remains, which is
/// about half of the time of the probe or more, so that a slow broker can answer it.
fn next_request(previous: Duration, remaining: Duration) -> Duration {
    let next = 2 * previous;
    if remaining < 4 * next { remaining } else { next }
}

/// The last errors of connections.
#[derive(Debug, Default)]
struct Errors {
    refusal: Option<String>,
    other: Option<String>,
}

#[derive(Debug, Default)]
struct Refusal(Mutex<Errors>);

impl Refusal {
    fn lock(&self) -> MutexGuard<'_, Errors> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientContext for Refusal {
    /// Does nothing: other clients log the same.
    fn log(&self, _level: RDKafkaLogLevel, _facility: &str, _message: &str) {}

    fn error(&self, error: KafkaError, reason: &str) {
        let reason = Some(reason.to_owned());
        match error_code(&error) {
            Some(RDKafkaErrorCode::Authentication | RDKafkaErrorCode::SSL) => self.lock().refusal = reason,
            // A consequence of the others.
            Some(RDKafkaErrorCode::AllBrokersDown) => {}
            _ => self.lock().other = reason,
        }
    }
}

impl ProducerContext for Refusal {
    type DeliveryOpaque = ();

    fn delivery(&self, _result: &DeliveryResult<'_>, _opaque: ()) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_request_takes_half_the_time() {
        for timeout in [1, 2, 5, 10, 30].map(Duration::from_secs) {
            let mut requests = vec![FIRST_REQUEST];
            let mut remaining = timeout - FIRST_REQUEST - CALLBACKS;
            while !remaining.is_zero() {
                let next = next_request(requests[requests.len() - 1], remaining);
                assert!(next <= remaining);
                requests.push(next);
                remaining = remaining.saturating_sub(next + CALLBACKS);
            }
            let last = requests[requests.len() - 1];
            assert!(last >= timeout.mul_f64(0.45), "{timeout:?} {requests:?}");
            assert!(requests.len() > 2, "{timeout:?} {requests:?}");
        }
    }
}
