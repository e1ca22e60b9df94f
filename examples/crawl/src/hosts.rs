//! The hosts that are crawled: whose turn it is to ask which, who waits for it here, who is to come back later,
//! and what each host asks of crawlers.
//!
//! **Waiting here or in a tier.** A trip through a tier costs two transactions and three records, so a job
//! whose turn comes within [`Settings::patience`] waits here. One that would wait longer is turned away and
//! goes to a tier: there it takes no memory, and above all none of the attempts that a worker runs at the same
//! time, which other hosts need. For the same reason no more than [`Settings::places`] jobs wait here at once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redeliver_core::{Clock, Timestamp};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::pace::{Answer, Pace};
use crate::robots::Robots;

/// How patient and how polite.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The longest a job waits here.
    pub patience: Duration,
    /// The most jobs that wait here at once, over all hosts.
    pub places: usize,
    /// The pause after a request to a host that asks for none.
    pub delay: Duration,
    /// A longer `Crawl-delay` is cut to this.
    pub longest_delay: Duration,
    /// How long a `/robots.txt` holds (RFC 9309, section 2.4: at most a day).
    pub robots_hold: Duration,
    /// How long a host rests when its `/robots.txt` could not be had: nothing of it may be asked until then.
    pub robots_rest: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            patience: Duration::from_secs(1),
            places: 32,
            delay: Duration::from_millis(500),
            longest_delay: Duration::from_secs(60),
            robots_hold: Duration::from_secs(86_400),
            robots_rest: Duration::from_secs(5),
        }
    }
}

/// All hosts.
pub struct Hosts {
    common: Arc<Common>,
    hosts: Mutex<HashMap<String, Arc<Host>>>,
}

struct Common {
    clock: Arc<dyn Clock>,
    settings: Settings,
    places: Arc<Semaphore>,
}

/// One host, as the scheme, name and port of its addresses.
pub struct Host {
    common: Arc<Common>,
    state: Mutex<State>,
    /// One at a time, in the order in which they came.
    door: Arc<Semaphore>,
}

struct State {
    pace: Pace,
    /// What the host asks for, and until when that holds.
    robots: Option<(Arc<Robots>, Timestamp)>,
}

/// It is this job's turn: it may make one request to the host, and the pause begins when this is dropped.
pub struct Turn {
    // Dropped before the door opens: the next one must find the pause.
    standing: Standing,
    _door: OwnedSemaphorePermit,
    has_asked: bool,
}

/// The host is not free soon enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnedAway {
    /// The instant that is promised instead.
    pub until: Timestamp,
}

/// A job's standing in the line of a host, which it leaves when this is dropped.
struct Standing {
    host: Arc<Host>,
}

/// Idle hosts are looked for whenever so many more are known.
const SWEEP: usize = 1024;

impl Hosts {
    /// No host is known yet.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>, settings: Settings) -> Self {
        let places = Arc::new(Semaphore::new(settings.places));
        Self {
            common: Arc::new(Common {
                clock,
                settings,
                places,
            }),
            hosts: Mutex::default(),
        }
    }

    /// A host by its name.
    #[must_use]
    pub fn host(&self, name: &str) -> Arc<Host> {
        let mut hosts = lock(&self.hosts);
        if let Some(host) = hosts.get(name) {
            return host.clone();
        }
        if hosts.len() % SWEEP == SWEEP - 1 {
            let now = self.common.clock.now();
            hosts.retain(|_, host| Arc::strong_count(host) > 1 || !host.state().is_forgettable(now));
        }
        let host = Arc::new(Host {
            common: self.common.clone(),
            state: Mutex::new(State {
                pace: Pace::new(self.common.settings.delay),
                robots: None,
            }),
            door: Arc::new(Semaphore::new(1)),
        });
        hosts.insert(name.to_owned(), host.clone());
        host
    }
}

impl Host {
    /// What the host asks of crawlers, if that is known and still holds.
    #[must_use]
    pub fn robots(&self) -> Option<Arc<Robots>> {
        let (robots, until) = self.state().robots.clone()?;
        (self.common.clock.now() < until).then_some(robots)
    }

    /// The host has said what it asks of crawlers.
    pub fn learn(&self, robots: Robots) -> Arc<Robots> {
        let Settings {
            delay,
            longest_delay,
            robots_hold,
            ..
        } = self.common.settings;
        let robots = Arc::new(robots);
        let mut state = self.state();
        state
            .pace
            .set_delay(robots.crawl_delay().unwrap_or(delay).min(longest_delay));
        state.robots = Some((robots.clone(), self.common.clock.now().after(robots_hold)));
        robots
    }

    /// The host did not say what it asks of crawlers, so it is left alone for a while. All its jobs wait for that,
    /// and only the one that asked has failed.
    pub fn rest_without_robots(&self) {
        let until = self.common.clock.now().after(self.common.settings.robots_rest);
        self.state().pace.rest_until(until);
    }

    /// Waits for the turn to ask the host. `has_promise`: the job was turned away before, and this is the
    /// instant it was promised.
    ///
    /// # Errors
    /// When the turn does not come soon enough to wait for it here.
    pub async fn turn(self: &Arc<Self>, has_promise: bool) -> Result<Turn, TurnedAway> {
        let clock = &*self.common.clock;
        let place = self.common.places.clone().try_acquire_owned().ok();
        let patience = match place {
            Some(_) => self.common.settings.patience,
            None => Duration::ZERO,
        };
        if let Answer::ComeBack(until) = self.state().pace.ask(has_promise, clock.now(), patience) {
            return Err(TurnedAway { until });
        }
        let standing = Standing { host: self.clone() };
        let Ok(door) = self.door.clone().acquire_owned().await else {
            // Only a closed semaphore refuses, and nobody closes it.
            return Err(standing.give_up());
        };
        loop {
            let rests_until = self.state().pace.rests_until();
            let wait = rests_until.map_or(Duration::ZERO, |until| clock.until(until));
            if wait.is_zero() {
                break;
            }
            // The host was told to rest while we stood in line.
            if wait > patience {
                return Err(standing.give_up());
            }
            tokio::time::sleep(wait).await;
        }
        Ok(Turn {
            standing,
            _door: door,
            has_asked: false,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    fn is_forgettable(&self, now: Timestamp) -> bool {
        self.pace.is_idle(now) && self.robots.as_ref().is_none_or(|(_, until)| *until <= now)
    }
}

impl Turn {
    /// The request begins now. Without it the host does not rest afterwards.
    pub fn ask(&mut self) {
        self.has_asked = true;
    }

    /// The host wants to be left alone for that long.
    pub fn rest_for(&self, wait: Duration) {
        let host = &self.standing.host;
        host.state().pace.rest_until(host.common.clock.now().after(wait));
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.has_asked {
            let host = &self.standing.host;
            host.state().pace.rest(host.common.clock.now());
        }
    }
}

impl Standing {
    fn give_up(self) -> TurnedAway {
        let host = self.host.clone();
        drop(self);
        let until = host.state().pace.promise(host.common.clock.now());
        TurnedAway { until }
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        self.host.state().pace.leave();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;
    use tokio::time::Instant;

    use super::*;

    /// The runtime's own time, which a test with paused time runs ahead of.
    struct RuntimeClock(Instant);

    impl Clock for RuntimeClock {
        fn now(&self) -> Timestamp {
            let millis = i64::try_from(self.0.elapsed().as_millis()).unwrap();
            Timestamp::from_millis(1_800_000_000_000 + millis)
        }
    }

    const DELAY: Duration = Duration::from_millis(200);

    fn hosts(patience: Duration, places: usize) -> (Arc<Hosts>, Instant) {
        let start = Instant::now();
        let settings = Settings {
            patience,
            places,
            delay: DELAY,
            ..Settings::default()
        };
        (
            Arc::new(Hosts::new(Arc::new(RuntimeClock(start)), settings)),
            start,
        )
    }

    /// What one job did: when its request began and ended, and how often it was turned away before.
    struct Request {
        began: Duration,
        ended: Duration,
        trips: u32,
    }

    /// A job's way to its request, with tiers that release it somewhat late.
    async fn job(host: Arc<Host>, start: Instant, seed: u64) -> Request {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut trips = 0;
        let mut turn = loop {
            match host.turn(trips > 0).await {
                Ok(turn) => break turn,
                Err(TurnedAway { until }) => {
                    trips += 1;
                    let wait = host.common.clock.until(until);
                    tokio::time::sleep(wait + Duration::from_millis(random.u64(0..60))).await;
                }
            }
        };
        let began = start.elapsed();
        turn.ask();
        tokio::time::sleep(Duration::from_millis(random.u64(0..50))).await;
        Request {
            began,
            ended: start.elapsed(),
            trips,
        }
    }

    fn assert_polite(requests: &mut [Request], delay: Duration) {
        requests.sort_by_key(|request| request.began);
        for two in requests.windows(2) {
            let pause = two[1].began.checked_sub(two[0].ended);
            assert!(
                pause.is_some_and(|pause| pause >= delay),
                "a request at {:?}, after one that ended at {:?}",
                two[1].began,
                two[0].ended
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_crowd_asks_one_by_one_with_pauses_and_hardly_travels_in_vain() {
        const JOBS: u64 = 300;
        let (hosts, start) = hosts(Duration::from_millis(500), 16);
        let host = hosts.host("http://a.test");
        let mut requests = join_all((0..JOBS).map(|seed| job(host.clone(), start, seed))).await;
        assert_polite(&mut requests, DELAY);
        let trips: u32 = requests.iter().map(|request| request.trips).sum();
        // Told to come again after one pause each, they would make 300 * 299 / 2 trips.
        assert!(trips < 3 * 300, "{trips} trips");
        // A pause, a request and a little lateness for each: the host hardly idles either.
        let last = requests.last().unwrap().ended;
        assert!(last < 300 * Duration::from_millis(200 + 25 + 60), "{last:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_crowd_for_one_host_does_not_hold_up_another() {
        let (hosts, start) = hosts(Duration::from_millis(500), 4);
        let crowd = hosts.host("http://crowded.test");
        let crowd = join_all((0..100).map(|seed| job(crowd.clone(), start, seed)));
        let other = async {
            // After the crowd has taken all the places in which to wait.
            tokio::time::sleep(Duration::from_millis(50)).await;
            job(hosts.host("http://quiet.test"), start, 7).await
        };
        let (mut crowd, other) = tokio::join!(crowd, other);
        assert_polite(&mut crowd, DELAY);
        assert_eq!((other.began, other.trips), (Duration::from_millis(50), 0));
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_host_asks_for_holds_from_then_on() {
        let (hosts, start) = hosts(Duration::from_secs(2), 16);
        let host = hosts.host("http://slow.test");
        assert!(host.robots().is_none());
        let mut turn = host.turn(false).await.unwrap();
        turn.ask();
        host.learn(Robots::read("User-agent: *\nCrawl-delay: 1"));
        drop(turn);
        assert!(host.robots().is_some());
        let mut requests = join_all((0..10).map(|seed| job(host.clone(), start, seed))).await;
        assert!(
            requests
                .iter()
                .all(|request| request.began > Duration::from_secs(1))
        );
        assert_polite(&mut requests, Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_wish_for_rest_turns_those_in_line_away_until_it_is_over() {
        let (hosts, start) = hosts(Duration::from_millis(500), 16);
        let host = hosts.host("http://busy.test");
        let mut turn = host.turn(false).await.unwrap();
        turn.ask();
        let waiting = job(host.clone(), start, 1);
        let busy = async {
            tokio::time::sleep(Duration::from_millis(10)).await;
            turn.rest_for(Duration::from_secs(30));
            drop(turn);
        };
        let (waiting, ()) = tokio::join!(waiting, busy);
        assert!(waiting.began >= Duration::from_secs(30));
        assert_eq!(waiting.trips, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_without_a_request_costs_no_pause_and_one_given_up_frees_the_line() {
        let (hosts, start) = hosts(Duration::from_millis(500), 16);
        let host = hosts.host("http://a.test");
        drop(host.turn(false).await.unwrap());
        let mut turn = host.turn(false).await.unwrap();
        turn.ask();
        // Given up while it stands in line, as when a process ends.
        assert!(
            tokio::time::timeout(Duration::from_millis(20), host.turn(false))
                .await
                .is_err()
        );
        drop(turn);
        let next = job(host, start, 1).await;
        assert_eq!((next.began, next.trips), (Duration::from_millis(221), 0));
    }
}
