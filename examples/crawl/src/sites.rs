//! Politeness: one request at a time per site, a delay after each, and the rules of its `/robots.txt`.
//!
//! A job whose site is busy reserves a *slot*, an instant for its request. The slots of a site are one delay apart, so
//! jobs that wait return one by one and not all at once. A job waits here if its slot is near. Otherwise it is
//! throttled until its slot, and waits in a tier: there it uses no memory and occupies none of the concurrent attempts,
//! which other sites need.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;
use tokio::time::{Instant, sleep_until, timeout};

use crate::robots::Robots;

/// For sites that specify no `Crawl-delay`.
pub(crate) const DEFAULT_DELAY: Duration = Duration::from_millis(500);
/// The limit of RFC 9309, section 2.4.
const RULES_TTL: Duration = Duration::from_secs(24 * 60 * 60);
/// A tier costs two transactions and three records, so shorter waits are cheaper here.
pub(crate) const MAX_LOCAL_WAIT: Duration = Duration::from_secs(1);

/// Sites by origin: scheme, name and port, which is the scope of a `/robots.txt`.
#[derive(Default)]
pub(crate) struct Sites(Mutex<HashMap<String, Arc<Site>>>);

pub(crate) struct Site {
    schedule: Mutex<Schedule>,
    /// Held by the job that may send a request.
    permit: Arc<tokio::sync::Mutex<()>>,
}

struct Schedule {
    delay: Duration,
    /// No request before this instant.
    not_before: Instant,
    /// The earliest slot that is not reserved.
    next_slot: Instant,
    rules: Option<(Arc<Robots>, Instant)>,
}

/// Permission for one request. The delay starts when it is dropped, at the end of the request: then the site, too, sees
/// the whole delay, however long the request took.
pub(crate) struct Turn {
    site: Arc<Site>,
    _permit: OwnedMutexGuard<()>,
}

impl Sites {
    pub(crate) fn get(&self, origin: &str) -> Arc<Site> {
        let mut sites = lock(&self.0);
        sites.entry(origin.to_owned()).or_insert_with(Site::new).clone()
    }
}

impl Site {
    fn new() -> Arc<Self> {
        let now = Instant::now();
        Arc::new(Self {
            schedule: Mutex::new(Schedule {
                delay: DEFAULT_DELAY,
                not_before: now,
                next_slot: now,
                rules: None,
            }),
            permit: Arc::default(),
        })
    }

    pub(crate) fn rules(&self) -> Option<Arc<Robots>> {
        let (rules, expiry) = lock(&self.schedule).rules.clone()?;
        (Instant::now() < expiry).then_some(rules)
    }

    /// Applies the rules of the site, and returns its delay.
    pub(crate) fn set_rules(&self, rules: Arc<Robots>) -> Duration {
        let mut schedule = lock(&self.schedule);
        schedule.delay = rules.crawl_delay.unwrap_or(DEFAULT_DELAY);
        schedule.rules = Some((rules, Instant::now() + RULES_TTL));
        schedule.delay
    }

    pub(crate) fn rest_for(&self, wait: Duration) {
        let mut schedule = lock(&self.schedule);
        schedule.not_before = schedule.not_before.max(Instant::now() + wait);
    }

    /// Waits for permission to send a request. `has_slot`: the job has waited for the slot it had reserved. The error
    /// is the reserved slot if it is not near.
    pub(crate) async fn turn(self: &Arc<Self>, has_slot: bool) -> Result<Turn, Instant> {
        if !has_slot {
            let slot = self.reserve();
            if slot > Instant::now() + MAX_LOCAL_WAIT {
                return Err(slot);
            }
            sleep_until(slot).await;
        }
        // Requests take time as well, so jobs with earlier slots may still be waiting for the permit.
        let permit = timeout(MAX_LOCAL_WAIT, self.permit.clone().lock_owned()).await;
        let permit = permit.map_err(|_| self.reserve())?;
        let not_before = lock(&self.schedule).not_before;
        if not_before > Instant::now() + MAX_LOCAL_WAIT {
            // The site asked for a rest after this job had reserved its slot.
            return Err(self.reserve());
        }
        sleep_until(not_before).await;
        Ok(Turn {
            site: self.clone(),
            _permit: permit,
        })
    }

    /// Reserves the next slot.
    pub(crate) fn reserve(&self) -> Instant {
        let mut schedule = lock(&self.schedule);
        let slot = schedule.next_slot.max(schedule.not_before).max(Instant::now());
        schedule.next_slot = slot + schedule.delay;
        slot
    }
}

impl Drop for Turn {
    // Runs before the permit is released, so that the next job waits for the delay.
    fn drop(&mut self) {
        let delay = lock(&self.site.schedule).delay;
        self.site.rest_for(delay);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;
    use tokio::time::sleep;

    use super::*;

    /// A job until its request has ended: the beginning and the end of the request, and how often the job was throttled. Tiers
    /// release it up to 60 ms late.
    async fn job(site: Arc<Site>, seed: u64) -> (Instant, Instant, u32) {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut throttled = 0;
        let turn = loop {
            match site.turn(throttled > 0).await {
                Ok(turn) => break turn,
                Err(slot) => sleep_until(slot + Duration::from_millis(random.u64(0..60))).await,
            }
            throttled += 1;
        };
        let began = Instant::now();
        sleep(Duration::from_millis(random.u64(0..50))).await;
        drop(turn);
        (began, Instant::now(), throttled)
    }

    fn assert_polite(requests: &mut [(Instant, Instant, u32)], delay: Duration) {
        requests.sort();
        for pair in requests.windows(2) {
            assert!(pair[1].0 >= pair[0].1 + delay, "{pair:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn sites_run_independently() {
        let (sites, start) = (Sites::default(), Instant::now());
        let busy = join_all((0..300).map(|seed| job(sites.get("http://busy.test"), seed)));
        let (mut requests, other) = tokio::join!(busy, job(sites.get("http://a.test"), 7));
        assert_polite(&mut requests, DEFAULT_DELAY);
        // With one common delay instead of slots, it would be 300 * 299 / 2.
        let throttled: u32 = requests.iter().map(|request| request.2).sum();
        assert!(throttled < 3 * 300, "{throttled}");
        // The site is rarely idle: each job takes a delay, a request and some lateness.
        let limit = 300 * (DEFAULT_DELAY + Duration::from_millis(25 + 60));
        assert!(requests[299].1 - start < limit, "{:?}", requests[299].1 - start);
        assert!(other.0 < start + Duration::from_millis(5) && other.2 == 0);
    }

    #[tokio::test(start_paused = true)]
    async fn sites_get_the_wanted_delay() {
        let site = Sites::default().get("http://slow.test");
        let (turn, rest) = (site.turn(false).await, Instant::now() + Duration::from_secs(30));
        site.set_rules(Robots::parse("User-agent: *\nCrawl-delay: 3").into());
        site.rest_for(Duration::from_secs(30));
        drop(turn);
        let mut requests = join_all((0..10).map(|seed| job(site.clone(), seed))).await;
        assert_polite(&mut requests, Duration::from_secs(3));
        assert!(requests[0].0 >= rest);
    }
}
