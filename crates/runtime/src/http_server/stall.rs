//! The time for which something makes no progress.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Sleep;

/// A timer that runs while something makes no progress.
#[derive(Debug)]
pub(super) struct Stall {
    limit: Duration,
    /// What is waited for, and until when.
    waiting: Option<(u64, Pin<Box<Sleep>>)>,
}

impl Stall {
    pub(super) fn new(limit: Duration) -> Self {
        Self { limit, waiting: None }
    }

    /// There is nothing to wait for.
    pub(super) fn clear(&mut self) {
        self.waiting = None;
    }

    /// Completes when this has been waited for longer than the limit. Another `number` is progress.
    pub(super) fn poll(&mut self, number: u64, context: &mut Context<'_>) -> Poll<()> {
        self.waiting.take_if(|(previous, _)| *previous != number);
        let (_, limit) = self
            .waiting
            .get_or_insert_with(|| (number, Box::pin(tokio::time::sleep(self.limit))));
        limit.as_mut().poll(context)
    }
}
