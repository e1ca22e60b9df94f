//! What a user of the worker writes: a [`tower::Service`] from an [`Attempt`] to an [`Outcome`].

use std::sync::Arc;

use redeliver_core::headers::{Origin, TraceContext};
use redeliver_core::{Outcome, Record};
use tower::{BoxError, Service};

/// One attempt at one record.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// The record as it was read; after a wait it comes from the due topic, byte for byte the same.
    pub record: Arc<Record>,
    /// Where the record entered the pipeline. [`Origin::id`] is the same for every attempt: an
    /// idempotency key for whatever the handler calls.
    pub origin: Origin,
    /// How many attempts have failed before this one.
    pub failed_attempts: u32,
    /// The trace this attempt belongs to, for the handler to pass on.
    pub trace: Option<TraceContext>,
}

/// A handler: a cloneable [`tower::Service`]. Layers of `tower` add timeouts and limits.
///
/// An error of the service counts as a transient failure with the code `handler.error`, a panic as one
/// with the code `handler.panic`; neither touches any other record. A handler that blocks its thread
/// holds up the other records of its lane: use `tokio::task::spawn_blocking` for such work.
pub trait Handler:
    Service<Attempt, Response = Outcome, Error: Into<BoxError>, Future: Send> + Clone + Send + 'static
{
}

impl<S> Handler for S where
    S: Service<Attempt, Response = Outcome, Error: Into<BoxError>, Future: Send> + Clone + Send + 'static
{
}
