//! Whether a connection has requests in progress, and since when it has none.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::time::Instant;

use super::unprotected::Counted;

/// The activity of a connection. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Activity(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    in_progress: usize,
    /// How many of them protect the connection from being replaced.
    protecting: usize,
    /// Whether there was one that does.
    was_protected: bool,
    /// Whether there was a request.
    is_used: bool,
    /// When the last request ended, or the connection began.
    idle_since: Instant,
    /// When the last request that protects the connection ended, or the connection began.
    unprotected_since: Instant,
}

/// A request is in progress until this is dropped.
#[derive(Debug)]
pub(super) struct InProgress(Arc<Request>);

#[derive(Debug)]
struct Request {
    activity: Activity,
    protects: AtomicBool,
    /// Until it protects.
    unprotected: Mutex<Option<Counted>>,
}

/// Lets a request protect its connection from being replaced by a new one while the request is in progress. Each request has this in
/// its extensions.
#[derive(Clone, Debug)]
pub struct Protection(Weak<Request>);

impl Protection {
    /// The request protects its connection from now on. Without an effect if it does, or if it has ended.
    pub fn protect(&self) {
        if let Some(request) = self.0.upgrade() {
            request.protect();
        }
    }
}

impl InProgress {
    pub(super) fn protection(&self) -> Protection {
        Protection(Arc::downgrade(&self.0))
    }

    /// Its stream counts until it protects its connection, or ends.
    pub(super) fn count(&self, stream: Counted) {
        *self.0.unprotected() = Some(stream);
    }
}

impl Request {
    fn unprotected(&self) -> MutexGuard<'_, Option<Counted>> {
        self.unprotected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn protect(&self) {
        if !self.protects.swap(true, Ordering::Relaxed) {
            drop(self.unprotected().take());
            let mut state = self.activity.state();
            state.protecting += 1;
            state.was_protected = true;
        }
    }
}

impl Activity {
    /// A connection that begins now.
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self(Arc::new(Mutex::new(State {
            in_progress: 0,
            protecting: 0,
            was_protected: false,
            is_used: false,
            idle_since: now,
            unprotected_since: now,
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request begins. It does not protect the connection yet.
    pub(super) fn begin(&self) -> InProgress {
        let mut state = self.state();
        state.in_progress += 1;
        state.is_used = true;
        InProgress(Arc::new(Request {
            activity: self.clone(),
            protects: AtomicBool::new(false),
            unprotected: Mutex::default(),
        }))
    }

    /// Something waits for the client to read. It protects the connection if a request has done so: then it is for that client that
    /// the connection was protected.
    pub(super) fn begin_write(&self) -> InProgress {
        let was_protected = self.state().was_protected;
        let write = self.begin();
        if was_protected {
            write.0.protect();
        }
        write
    }

    /// Since when no request has been in progress; `None` if there is one.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let state = self.state();
        (state.in_progress == 0).then_some(state.idle_since)
    }

    /// Since when no request has protected the connection from being replaced; `None` if one does.
    pub(super) fn unprotected_since(&self) -> Option<Instant> {
        let state = self.state();
        (state.protecting == 0).then_some(state.unprotected_since)
    }

    /// Completes when no request has been in progress for a while: for `first` before the first request, and for `later` after it.
    /// The time before this call does not count.
    pub(super) async fn idle(&self, first: Duration, later: Duration) {
        let started = Instant::now();
        loop {
            let now = Instant::now();
            let limit = if self.state().is_used { later } else { first };
            let ends = self.idle_since().map(|since| since.max(started) + limit);
            if ends.is_some_and(|ends| ends <= now) {
                return;
            }
            // A request that begins and ends meanwhile is followed by `later`, so looking again then is early enough. No request
            // has to wake this task.
            let look_again = now + later;
            tokio::time::sleep_until(ends.map_or(look_again, |ends| ends.min(look_again))).await;
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let mut state = self.activity.state();
        let now = Instant::now();
        state.in_progress -= 1;
        state.idle_since = now;
        if self.protects.load(Ordering::Relaxed) {
            state.protecting -= 1;
            state.unprotected_since = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Duration = Duration::from_secs(60);
    const LATER: Duration = Duration::from_secs(10);

    /// After how many seconds a connection with requests at these times, in seconds, was idle for too long.
    async fn idle_after(requests: &[(u64, u64)]) -> u64 {
        let (activity, started) = (Activity::new(), Instant::now());
        let work = async {
            for (begin, end) in requests {
                tokio::time::sleep_until(started + Duration::from_secs(*begin)).await;
                let _request = activity.begin();
                tokio::time::sleep_until(started + Duration::from_secs(*end)).await;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = activity.idle(FIRST, LATER) => {}
            () = work => {}
        }
        started.elapsed().as_secs()
    }

    #[tokio::test(start_paused = true)]
    async fn connection_idles_after_last_request() {
        for (requests, after) in [
            (&[][..], 60),
            (&[(59, 59)], 69),
            (&[(1, 1)], 11),
            (&[(1, 500)], 510),
            (&[(1, 2), (11, 12), (20, 23)], 33),
            // The second one comes too late.
            (&[(1, 2), (13, 14)], 12),
        ] {
            assert_eq!(idle_after(requests).await, after, "{requests:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn protection_lasts_until_request_ends() {
        let activity = Activity::new();
        let began = Instant::now();
        let request = activity.begin();
        let protection = request.protection();
        assert_eq!(activity.unprotected_since(), Some(began));
        // Nor does a client protect its connection that does not read.
        let write = activity.begin_write();
        assert_eq!(activity.unprotected_since(), Some(began));
        drop(write);
        protection.protect();
        protection.protect();
        assert_eq!(activity.unprotected_since(), None);
        tokio::time::advance(LATER).await;
        drop(request);
        let ended = Instant::now();
        assert_eq!(activity.unprotected_since(), Some(ended));
        protection.protect();
        assert_eq!(activity.unprotected_since(), Some(ended));
        let write = activity.begin_write();
        assert_eq!(activity.unprotected_since(), None);
        drop(write);
        assert_eq!(activity.unprotected_since(), Some(ended));
        assert_eq!(activity.state().in_progress, 0);
    }
}
