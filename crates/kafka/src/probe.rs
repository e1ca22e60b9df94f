//! Finds out whether Kafka accepts a client, and if not, why.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseProducer, DeliveryResult, Producer as _, ProducerContext};
use redeliver_kafka_ffi::KafkaClient;

use crate::client::ClientSettings;

/// Timeouts of requests: a short one first, so that a refusal is soon reported.
const FIRST_REQUEST: Duration = Duration::from_millis(50);
const MAX_REQUEST: Duration = Duration::from_secs(2);
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

/// Connects with a new client. Blocks, for `timeout` at most. Requests only report that no broker is available, and an admin
/// client's callback reports nothing else, so this uses a producer, which reports errors of connections.
///
/// # Errors
/// If the client cannot be created.
pub(crate) fn probe(config: &ClientSettings, timeout: Duration) -> Result<Probed, KafkaError> {
    let client: KafkaClient<BaseProducer<Refusal>> = config.create_with_context(Refusal::default())?;
    let end = Instant::now() + timeout;
    let mut request = FIRST_REQUEST;
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
        if Instant::now() >= end {
            return Ok(Probed::Unanswered(errors.other.take()));
        }
        drop(errors);
        request = (2 * request).min(MAX_REQUEST).min(timeout);
    }
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
        match error.rdkafka_error_code() {
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
