//! Streams of HTTP/2 with requests that do not protect their connection: they are not accepted yet, or never
//! will be, such as watches of the health.
//!
//! Each stream takes some memory, and a client without credentials can begin as many as it likes. So when there are too many, the oldest
//! one ends. A semaphore would let those that stay for long refuse all others, among them the probes of Kubernetes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::future::AbortHandle;
use prometheus_client::metrics::counter::Counter;

/// The streams of a server. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Unprotected {
    most: usize,
    too_many: Counter,
    streams: Arc<Mutex<Streams>>,
}

#[derive(Debug, Default)]
struct Streams {
    begun: u64,
    /// By the order in which they began.
    open: BTreeMap<u64, AbortHandle>,
}

/// A stream that counts, until this is dropped.
#[derive(Debug)]
pub(super) struct Counted {
    number: u64,
    of: Unprotected,
}

impl Unprotected {
    pub(super) fn new(most: usize, too_many: Counter) -> Self {
        Self {
            most,
            too_many,
            streams: Arc::default(),
        }
    }

    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a stream, and ends the oldest one if that makes too many.
    pub(super) fn begin(&self, stream: AbortHandle) -> Counted {
        let mut streams = self.streams();
        streams.begun += 1;
        let number = streams.begun;
        streams.open.insert(number, stream);
        if streams.open.len() > self.most
            && let Some((_, oldest)) = streams.open.pop_first()
        {
            oldest.abort();
            self.too_many.inc();
            tracing::debug!("stream reset: unknown callers have too many streams");
        }
        Counted {
            number,
            of: self.clone(),
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.of.streams().open.remove(&self.number);
    }
}
