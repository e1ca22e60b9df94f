//! What handlers can learn about dead letters.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use redeliver_core::headers::RecordedFailure;
use redeliver_core::{Output, Pipeline};

/// A dead letter that has been written.
#[derive(Clone, Debug)]
pub struct DeadLetter {
    /// The name of the pipeline.
    pub pipeline: Arc<str>,
    /// Why the record failed for good.
    pub failure: RecordedFailure,
    /// The record in the dead-letter topic. Its headers are described in `docs/protocol.md`.
    pub record: Output,
}

impl DeadLetter {
    /// `None` if the headers of the record describe no failure.
    pub(crate) fn new(pipeline: &Pipeline, record: Output) -> Option<Self> {
        Some(Self {
            pipeline: pipeline.name.clone(),
            failure: RecordedFailure::read(&record.headers)?,
            record,
        })
    }
}

/// A function that learns of each dead letter.
#[derive(Clone)]
pub struct OnDead(Arc<dyn Fn(DeadLetter) + Send + Sync>);

impl OnDead {
    /// `function` runs after the transaction of the dead letter has been committed, in the thread of its lane, so it must not
    /// block. It runs at most once for each dead letter: it does not if the process ends in between.
    pub fn new(function: impl Fn(DeadLetter) + Send + Sync + 'static) -> Self {
        Self(Arc::new(function))
    }

    /// A panic of the function does not affect the lane. The panic handler reports it.
    pub(crate) fn call(&self, letter: DeadLetter) {
        let _ = catch_unwind(AssertUnwindSafe(|| (self.0)(letter)));
    }
}

impl fmt::Debug for OnDead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnDead")
    }
}
