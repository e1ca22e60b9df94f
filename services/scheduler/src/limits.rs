//! What the shards of a process share: memory, and take-overs that run at the same time. A process owns any number of shards, so
//! limits per shard do not limit the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Semaphore, SemaphorePermit};

/// The maximum size of commands, results of lookups, and changes that the index does not contain yet, of all shards.
const MEMORY: usize = 256 << 20;
/// A shard with less than this accepts commands also while the others use up the memory, so that none of them starves.
const RESERVE: usize = 1 << 20;
/// The maximum number of shards that read the state topic at the same time. Each reader takes up to about 44 MiB. A shard with an
/// intact index needs some tenths of a second, most of which it waits for Kafka, so a dozen take two rounds.
const TAKE_OVERS: usize = 8;
/// How many of them may rebuild their index, which can take minutes. Redis applies one batch at a time, so one rebuild that reads
/// while another one writes is as fast as many. The others stay free for shards with intact indexes.
const REBUILDS: usize = 2;

/// The limits of a process. All lanes share them.
#[derive(Debug)]
pub(crate) struct ProcessLimits {
    memory: AtomicUsize,
    take_overs: Semaphore,
    rebuilds: Semaphore,
}

/// What a shard does with the state topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TakeOver {
    /// Reads what follows the checkpoint.
    Resume,
    /// Reads all of it.
    Rebuild,
}

/// The right to read the state topic, until it is dropped.
#[derive(Debug)]
pub(crate) struct TakeOverPermit<'l> {
    _rebuild: Option<SemaphorePermit<'l>>,
    _take_over: Option<SemaphorePermit<'l>>,
}

impl ProcessLimits {
    pub(crate) fn new() -> Self {
        Self {
            memory: AtomicUsize::new(0),
            take_overs: Semaphore::new(TAKE_OVERS),
            rebuilds: Semaphore::new(REBUILDS),
        }
    }

    /// Whether a shard that uses `own` bytes may accept commands.
    pub(crate) fn may_accept(&self, own: usize) -> bool {
        own < RESERVE || self.memory.load(Ordering::Relaxed) < MEMORY
    }

    /// A permit, if there is one now.
    pub(crate) fn try_take_over(&self, kind: TakeOver) -> Option<TakeOverPermit<'_>> {
        let rebuild = match kind {
            TakeOver::Resume => None,
            TakeOver::Rebuild => Some(self.rebuilds.try_acquire().ok()?),
        };
        let take_over = self.take_overs.try_acquire().ok()?;
        Some(TakeOverPermit {
            _rebuild: rebuild,
            _take_over: Some(take_over),
        })
    }

    /// Waits for a permit, in the order of the calls. The semaphores are never closed, so there always is one.
    pub(crate) async fn take_over(&self, kind: TakeOver) -> TakeOverPermit<'_> {
        // In this order, shards that wait for a rebuild keep no other shard waiting.
        let rebuild = match kind {
            TakeOver::Resume => None,
            TakeOver::Rebuild => self.rebuilds.acquire().await.ok(),
        };
        TakeOverPermit {
            _rebuild: rebuild,
            _take_over: self.take_overs.acquire().await.ok(),
        }
    }
}

/// The part of the memory that the shards of a lane use.
#[derive(Debug)]
pub(crate) struct MemoryShare {
    limits: Arc<ProcessLimits>,
    bytes: usize,
}

impl MemoryShare {
    pub(crate) fn new(limits: Arc<ProcessLimits>) -> Self {
        Self { limits, bytes: 0 }
    }

    /// Sets what the shards of the lane use now.
    pub(crate) fn set(&mut self, bytes: usize) {
        let before = std::mem::replace(&mut self.bytes, bytes);
        if bytes >= before {
            self.limits.memory.fetch_add(bytes - before, Ordering::Relaxed);
        } else {
            self.limits.memory.fetch_sub(before - bytes, Ordering::Relaxed);
        }
    }

    /// Whether a shard of the lane that uses `own` bytes may accept commands.
    pub(crate) fn may_accept(&self, own: usize) -> bool {
        self.limits.may_accept(own)
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_share_memory_without_starving() {
        let limits = Arc::new(ProcessLimits::new());
        let (mut one, mut other) = (MemoryShare::new(limits.clone()), MemoryShare::new(limits));
        one.set(MEMORY / 2);
        assert!(other.may_accept(MEMORY / 2));
        other.set(MEMORY / 2);
        assert!(!one.may_accept(RESERVE) && !other.may_accept(RESERVE));
        assert!(one.may_accept(RESERVE - 1) && other.may_accept(RESERVE - 1));
        other.set(MEMORY / 2 - 1);
        assert!(one.may_accept(RESERVE));
        one.set(MEMORY);
        assert!(!other.may_accept(RESERVE));
        // A lane that ends returns its part.
        drop(one);
        assert!(other.may_accept(RESERVE));
    }

    #[tokio::test]
    async fn rebuilds_leave_room_for_others() {
        let limits = ProcessLimits::new();
        let rebuilds: Vec<_> = std::iter::from_fn(|| limits.try_take_over(TakeOver::Rebuild)).collect();
        assert_eq!(rebuilds.len(), REBUILDS);
        let resumes: Vec<_> = std::iter::from_fn(|| limits.try_take_over(TakeOver::Resume)).collect();
        assert_eq!(resumes.len(), TAKE_OVERS - REBUILDS);
        drop(rebuilds);
        let _rebuild = limits.take_over(TakeOver::Rebuild).await;
        drop(resumes);
        // Rebuilds that wait for each other do not take up what others need.
        let _other = limits.take_over(TakeOver::Rebuild).await;
        assert!(limits.try_take_over(TakeOver::Rebuild).is_none());
        assert!(limits.try_take_over(TakeOver::Resume).is_some());
    }
}
