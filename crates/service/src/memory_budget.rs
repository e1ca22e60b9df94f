//! Memory that the requests of all callers share.
//!
//! A request reserves what it needs before it takes the memory, all of it at once. So no request waits for memory while it keeps others
//! from theirs. So that no caller locks others out, the memory is divided twice:
//!
//! - A sixteenth is for small requests, which also use the rest while it has room.
//! - A caller has a quarter of each of these two parts. A request that is larger than this share takes all of it.
//!
//! Those that wait do so in the order in which they came: first for the share of their caller, and then for the part. This order is
//! always the same, so they do not wait for each other in a circle.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

use crate::identity::{CallerName, Identity};

/// The maximum size of a small request, in bytes. The least budget has room for one in the part for them.
const SMALL: u64 = 64 << 10;
/// Which part of the budget is only for small requests.
const SMALL_PART: u32 = 16;
/// Which part of the memory a caller may use.
const CALLER_PART: u32 = 4;
/// The number of callers from which on those that hold no memory are forgotten.
const MANY_CALLERS: usize = 10_000;

/// The memory. Clones share it.
#[derive(Clone, Debug)]
pub struct MemoryBudget {
    of_all: SharedMemory,
    of_small: SharedMemory,
}

/// Who shares a part of the memory: everybody with the same identity, or every anonymous caller with the same address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Caller {
    /// An identity, by its name.
    Named(CallerName),
    /// A caller without one.
    Anonymous(Option<IpAddr>),
}

impl Caller {
    /// The caller with this identity, at this address if it is known.
    #[must_use]
    pub fn of(identity: &Identity, address: Option<SocketAddr>) -> Self {
        if identity.name().is_anonymous() {
            Self::Anonymous(address.map(|address| address.ip().to_canonical()))
        } else {
            Self::Named(identity.name().clone())
        }
    }
}

/// What a request has reserved, until all clones are dropped.
#[derive(Clone, Debug)]
pub struct Reservation(Arc<Mutex<Reserved>>);

impl Reservation {
    /// How many bytes are reserved.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let reserved = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        reserved.of_all.num_permits() as u64
    }

    /// Gives back what is more than this many bytes.
    pub fn shrink_to(&self, bytes: u64) {
        let mut reserved = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        shrink(&mut reserved.of_all, bytes);
        shrink(&mut reserved.of_caller, bytes);
    }
}

impl MemoryBudget {
    /// A budget of this many bytes, at most 4 GiB.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let of_small = bytes / SMALL_PART;
        Self {
            of_all: SharedMemory::new(bytes - of_small),
            of_small: SharedMemory::new(of_small),
        }
    }

    /// Reserves this many bytes for a caller, and waits for them. A request that needs more than there are
    /// takes all of its caller's share. `None`: never, because the semaphores are not closed.
    pub async fn reserve(&self, caller: &Caller, bytes: u64) -> Option<Reservation> {
        if let Some(reservation) = self.try_reserve(caller, bytes) {
            return Some(reservation);
        }
        let reserved = self.part(bytes).reserve(caller, bytes).await;
        reserved.ok().map(Reserved::shared)
    }

    /// Reserves what is free at once, unless others wait for it.
    #[must_use]
    pub fn try_reserve(&self, caller: &Caller, bytes: u64) -> Option<Reservation> {
        let reserved = self.of_all.try_reserve(caller, bytes);
        let reserved = reserved.or_else(|| self.part(bytes).try_reserve(caller, bytes));
        reserved.map(Reserved::shared)
    }

    /// The memory for requests of this size that do not fit into that for all.
    fn part(&self, bytes: u64) -> &SharedMemory {
        if bytes <= SMALL {
            &self.of_small
        } else {
            &self.of_all
        }
    }
}

/// Memory of which no caller may use more than its share. Clones share it.
#[derive(Clone, Debug)]
struct SharedMemory {
    /// A permit for each byte.
    free: Arc<Semaphore>,
    bytes: u32,
    callers: Arc<Mutex<Callers>>,
}

/// What is free of the share of each caller.
#[derive(Debug, Default)]
struct Callers {
    free: HashMap<Caller, Arc<Semaphore>>,
    /// The number of callers from which on some are forgotten.
    many: usize,
}

impl Callers {
    /// The share of a caller, which has this size in bytes.
    fn share(&mut self, caller: &Caller, bytes: u32) -> Arc<Semaphore> {
        if let Some(free) = self.free.get(caller) {
            return free.clone();
        }
        if self.free.len() >= self.many.max(MANY_CALLERS) {
            // Reservations, and those who wait for one, refer to the share.
            self.free.retain(|_, free| Arc::strong_count(free) > 1);
            // If most of them stay, looking again soon would cost much and gain little.
            self.many = 2 * self.free.len();
        }
        let free = Arc::new(Semaphore::new(usize::try_from(bytes).unwrap_or(usize::MAX)));
        self.free.insert(caller.clone(), free.clone());
        free
    }
}

/// What is reserved for a request.
#[derive(Debug)]
struct Reserved {
    of_caller: OwnedSemaphorePermit,
    of_all: OwnedSemaphorePermit,
}

impl Reserved {
    fn shared(self) -> Reservation {
        Reservation(Arc::new(Mutex::new(self)))
    }
}

/// Gives back what is more than this many bytes.
fn shrink(permit: &mut OwnedSemaphorePermit, bytes: u64) {
    let kept = usize::try_from(bytes).unwrap_or(usize::MAX);
    let rest = permit.num_permits().saturating_sub(kept);
    drop(permit.split(rest));
}

impl SharedMemory {
    fn new(bytes: u32) -> Self {
        Self {
            free: Arc::new(Semaphore::new(usize::try_from(bytes).unwrap_or(usize::MAX))),
            bytes,
            callers: Arc::default(),
        }
    }

    /// The share of a caller, and how many bytes of it and of all a request of this size takes: no more than there are.
    fn shares(&self, caller: &Caller, bytes: u64) -> (Arc<Semaphore>, u32, u32) {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let share = self.bytes / CALLER_PART;
        let mut callers = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
        (
            callers.share(caller, share),
            bytes.min(share),
            bytes.min(self.bytes),
        )
    }

    async fn reserve(&self, caller: &Caller, bytes: u64) -> Result<Reserved, AcquireError> {
        let (share, of_caller, of_all) = self.shares(caller, bytes);
        Ok(Reserved {
            of_caller: share.acquire_many_owned(of_caller).await?,
            of_all: self.free.clone().acquire_many_owned(of_all).await?,
        })
    }

    fn try_reserve(&self, caller: &Caller, bytes: u64) -> Option<Reserved> {
        let (share, of_caller, of_all) = self.shares(caller, bytes);
        Some(Reserved {
            of_caller: share.try_acquire_many_owned(of_caller).ok()?,
            of_all: self.free.clone().try_acquire_many_owned(of_all).ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A budget of which 15 MiB are for all requests, and 1 MiB for small ones.
    fn budget() -> MemoryBudget {
        MemoryBudget::new(16 * MIB)
    }

    fn caller(name: &str) -> Caller {
        Caller::Named(CallerName::recorded(name))
    }

    /// How many bytes of the share of a caller and of all a reservation holds.
    fn held(reservation: &Reservation) -> (u64, u64) {
        let reserved = reservation.0.lock().unwrap();
        let bytes = |permit: &OwnedSemaphorePermit| permit.num_permits() as u64;
        (bytes(&reserved.of_caller), bytes(&reserved.of_all))
    }

    fn free(memory: &SharedMemory) -> u64 {
        memory.free.available_permits() as u64
    }

    #[tokio::test]
    async fn exhausted_caller_blocks_no_others() {
        let (budget, a) = (budget(), caller("a"));
        let mut large = Vec::new();
        for _ in 0..3 {
            large.push(budget.try_reserve(&a, MIB).unwrap());
        }
        // It has 3.75 MiB of 15.
        assert!(budget.try_reserve(&a, MIB).is_none());
        let mut waiting = Box::pin(budget.reserve(&a, MIB));
        assert!(waiting.as_mut().now_or_never().is_none());
        // Those that wait hold nothing of what others use.
        assert_eq!(free(&budget.of_all), 12 * MIB);
        for name in ["b", "c", "d"] {
            large.push(budget.try_reserve(&caller(name), 3 * MIB).unwrap());
        }
        // Small ones have memory of their own, also of this no more than a quarter.
        let mut small = Vec::new();
        while let Some(reservation) = budget.try_reserve(&a, SMALL) {
            small.push(reservation);
        }
        assert_eq!(free(&budget.of_small), 3 * MIB / 4);
        for name in ["b", "e"] {
            budget.try_reserve(&caller(name), SMALL).unwrap();
        }
        drop(large);
        waiting.now_or_never().unwrap().unwrap();
        drop(small);
        assert_eq!((free(&budget.of_all), free(&budget.of_small)), (15 * MIB, MIB));
    }

    #[tokio::test]
    async fn requests_wait_in_order() {
        let (budget, a) = (budget(), caller("a"));
        let first = budget.reserve(&a, 3 * MIB).await.unwrap();
        let mut large = Box::pin(budget.reserve(&a, 3 * MIB));
        assert!(large.as_mut().now_or_never().is_none());
        // It would fit, but does not overtake.
        let mut next = Box::pin(budget.reserve(&a, MIB / 2));
        assert!(next.as_mut().now_or_never().is_none());
        first.shrink_to(MIB / 2);
        let large = large.now_or_never().unwrap().unwrap();
        assert!(next.as_mut().now_or_never().is_none());
        drop(first);
        drop(next.now_or_never().unwrap().unwrap());
        drop(large);
        assert_eq!(free(&budget.of_all), 15 * MIB);
    }

    #[tokio::test]
    async fn large_request_takes_whole_share() {
        let (budget, a) = (budget(), caller("a"));
        let large = budget.try_reserve(&a, 8 * MIB).unwrap();
        assert_eq!(held(&large), (15 * MIB / 4, 8 * MIB));
        assert!(budget.try_reserve(&a, MIB).is_none());
        drop(large);
        let all = budget.try_reserve(&a, u64::MAX).unwrap();
        assert_eq!(held(&all), (15 * MIB / 4, 15 * MIB));
        // It needs the memory of others while it is read.
        assert!(budget.try_reserve(&caller("b"), MIB).is_none());
        budget.try_reserve(&caller("b"), SMALL).unwrap();
        all.shrink_to(5);
        assert_eq!(held(&all), (5, 5));
    }

    #[tokio::test]
    async fn small_request_fits_least_budget() {
        let budget = MemoryBudget::new(MIB);
        let _large = budget.try_reserve(&caller("a"), 8 * MIB).unwrap();
        budget.try_reserve(&caller("a"), SMALL).unwrap();
        let small = budget.try_reserve(&caller("b"), SMALL).unwrap();
        assert_eq!(held(&small), (SMALL / 4, SMALL));
    }

    #[tokio::test]
    async fn callers_that_hold_nothing_are_forgotten() {
        let budget = budget();
        let kept = budget.try_reserve(&caller("kept"), 1).unwrap();
        for number in 0..MANY_CALLERS {
            let other = caller(&number.to_string());
            budget.try_reserve(&other, 1).unwrap();
        }
        let known: Vec<Caller> = {
            let callers = budget.of_all.callers.lock().unwrap();
            callers.free.keys().cloned().collect()
        };
        assert_eq!(known.len(), 2);
        assert!(known.contains(&caller("kept")));
        drop(kept);
    }
}
