//! What a site was asked, and when: measured where it matters, at the site.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// All requests to a site, in the order in which they came.
#[derive(Debug, Default)]
pub struct Log(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    requests: Vec<Request>,
    /// How often each path of each host was asked for.
    counts: HashMap<(usize, String), u32>,
    /// Requests that are not over, by host, and the most there ever were.
    open: HashMap<usize, (u32, u32)>,
}

#[derive(Debug)]
struct Request {
    host: usize,
    path: String,
    arrived: Instant,
    status: Option<u16>,
}

/// What one host was asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostSummary {
    /// All requests, those for `/robots.txt` included.
    pub requests: usize,
    /// The shortest time from the arrival of one request to the arrival of the next.
    pub least_distance: Option<Duration>,
    /// The most requests that were open at the same time.
    pub most_at_once: u32,
}

/// A request that is being answered. It is over when this is dropped.
#[derive(Debug)]
pub(super) struct Entry {
    log: Arc<Log>,
    host: usize,
    index: usize,
    earlier: u32,
}

impl Log {
    pub(super) fn arrived(self: &Arc<Self>, host: usize, path: &str) -> Entry {
        let arrived = Instant::now();
        let mut entries = self.entries();
        let index = entries.requests.len();
        entries.requests.push(Request {
            host,
            path: path.to_owned(),
            arrived,
            status: None,
        });
        let (open, most) = entries.open.entry(host).or_default();
        *open += 1;
        *most = (*most).max(*open);
        let count = entries.counts.entry((host, path.to_owned())).or_default();
        let earlier = *count;
        *count += 1;
        Entry {
            log: self.clone(),
            host,
            index,
            earlier,
        }
    }

    /// What a host was asked so far.
    #[must_use]
    pub fn summary(&self, host: usize) -> HostSummary {
        let entries = self.entries();
        let arrivals: Vec<Instant> = entries
            .requests
            .iter()
            .filter(|request| request.host == host)
            .map(|request| request.arrived)
            .collect();
        let distances = arrivals.windows(2).map(|two| two[1].duration_since(two[0]));
        HostSummary {
            requests: arrivals.len(),
            least_distance: distances.min(),
            most_at_once: entries.open.get(&host).map_or(0, |(_, most)| *most),
        }
    }

    /// How often a page of a host was delivered, with a status below 400.
    #[must_use]
    pub fn deliveries(&self, host: usize, path: &str) -> usize {
        let entries = self.entries();
        let delivered = entries.requests.iter().filter(|request| {
            request.host == host && request.path == path && request.status.is_some_and(|status| status < 400)
        });
        delivered.count()
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    /// How often the same was asked before.
    pub(super) fn earlier(&self) -> u32 {
        self.earlier
    }

    pub(super) fn answered(&mut self, status: u16) {
        self.log.entries().requests[self.index].status = Some(status);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some((open, _)) = self.log.entries().open.get_mut(&self.host) {
            *open -= 1;
        }
    }
}
