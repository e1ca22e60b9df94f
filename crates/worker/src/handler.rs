//! The interface of handlers: a [`tower::Service`] from an [`Attempt`] to an [`Outcome`].

use std::sync::Arc;

use redeliver_core::headers::{Origin, TraceContext};
use redeliver_core::{Outcome, Record};
use tower::{BoxError, Service};

/// One run of the handler for a record.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// The record as it was read. A retry has the same key and value as the original record; its position is in the due
    /// topic, and Redeliver's headers are added.
    pub record: Arc<Record>,
    /// Where the record entered the pipeline. [`Origin::id`] is the same for every attempt, so it can serve as an
    /// idempotency key.
    pub origin: Origin,
    /// Number of failed attempts before this one.
    pub failed_attempts: u32,
    /// The trace context of this attempt, to pass on to other services. `None` when tracing is disabled.
    pub trace: Option<TraceContext>,
}

/// A handler: a cloneable [`tower::Service`]. `tower` layers can add timeouts and limits.
///
/// An error is a transient failure with the code `handler.error`, and a panic is one with the code `handler.panic`.
/// Neither affects other records. Each attempt runs in its own task. A handler must not block its thread: use
/// `tokio::task::spawn_blocking` for blocking work.
pub trait Handler:
    Service<Attempt, Response = Outcome, Error: Into<BoxError>, Future: Send> + Clone + Send + 'static
{
}

impl<S> Handler for S where
    S: Service<Attempt, Response = Outcome, Error: Into<BoxError>, Future: Send> + Clone + Send + 'static
{
}
