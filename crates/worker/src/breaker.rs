//! The circuit breaker of a pipeline: an outage of the endpoint burns no attempts.
//!
//! A failure whose scope is the endpoint is provisional, and its record stays in hand. A call that starts later and that
//! the endpoint answers shows that the failure was the record's own: it counts as a failed attempt. If more failures
//! follow instead, the breaker opens and the failure is forgotten. While the breaker is open, records wait, and one at a
//! time is a probe. The first probe that is answered closes the breaker.
//!
//! Records that always fail must not wait for ever if no others arrive. So once no other record has been probed for
//! [`BreakerSettings::poison_after`], a record that has been probed for as long fails on its own. While new records arrive,
//! each probe is another record, so that a long outage burns no attempts.
//!
//! An endpoint that fails for a part of the calls opens the breaker as well if [`BreakerSettings::rate`] says so.
//!
//! [`Breaker`] decides and has no clock. [`Gate`] shares it between the drivers of a process.

mod window;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redeliver_core::failure::FailureScope;
use redeliver_core::headers::Origin;
use redeliver_core::{Failure, Outcome, mutant};
use tokio::sync::watch;
use tokio::time::Instant;

use window::CallWindow;

/// The delay before the first probe. It doubles with each probe that fails.
const FIRST_DELAY: Duration = Duration::from_secs(1);
/// By how much the delay before a probe is prolonged at random, at most, as a share of it: processes do not probe at the
/// same moment.
const JITTER: f64 = 0.2;
/// For how long drivers that have only records whose probes failed leave the next probe to drivers that have others.
const PRECEDENCE: Duration = Duration::from_millis(200);

/// When a breaker opens and closes.
#[derive(Clone, Debug, PartialEq)]
pub struct BreakerSettings {
    /// Consecutive failures of the endpoint after which the breaker opens. With 0 it never opens, and every failure is the
    /// record's own.
    pub failures: usize,
    /// The breaker also opens if this share of the calls of a window fails.
    pub rate: Option<FailureRate>,
    /// Maximum delay between two probes, without jitter.
    pub open_max: Duration,
    /// For how long no other record may have been probed, and how long a record is probed, before its failure counts as a
    /// failed attempt.
    pub poison_after: Duration,
}

/// The share of calls at whose failure the breaker opens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FailureRate {
    /// The share, from 0 to 1.
    pub share: f64,
    /// The time whose calls count.
    pub window: Duration,
    /// How many calls there must have been.
    pub calls: usize,
}

impl Default for BreakerSettings {
    /// Opens after 5 failures, probes at least once per minute, and gives up on a lone record after 15 minutes.
    fn default() -> Self {
        Self {
            failures: 5,
            rate: None,
            open_max: Duration::from_secs(60),
            poison_after: Duration::from_secs(900),
        }
    }
}

/// Identifies a record and its retries: topic, partition and offset of the origin.
pub(crate) type RecordId = (Arc<str>, i32, i64);

/// What the result of an attempt shows about the endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Evidence {
    /// It answered.
    Answered,
    /// It failed. With the number of the call if it was for several records.
    Failed { shared_call: Option<u64> },
    /// It asked for a delay, or the record may be the cause as well.
    None,
    /// It was not called.
    NotCalled,
}

impl Evidence {
    pub(crate) fn of(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Success(_) => Self::Answered,
            Outcome::Failed(failure) if failure.is_throttled() => Self::None,
            Outcome::Failed(failure) => match failure.scope {
                FailureScope::Record => Self::Answered,
                FailureScope::Endpoint => Self::Failed {
                    shared_call: failure.shared_call,
                },
                FailureScope::Unknown => Self::None,
                FailureScope::NotCalled => Self::NotCalled,
            },
        }
    }
}

/// An attempt that the breaker has admitted. Attempts are numbered in the order in which they start, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Admitted {
    number: u64,
    is_probe: bool,
}

/// A failure of the endpoint that is not decided yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Provisional {
    /// How many attempts had started when it ended.
    after: u64,
    /// How often the breaker had opened.
    openings: u64,
}

/// A call that failed.
#[derive(Debug)]
struct Undecided {
    /// The first failure of the call.
    failure: Provisional,
    shared_call: Option<u64>,
}

/// What becomes of a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The result is final.
    Own,
    /// The result is final although the endpoint fails: no other record has been probed for too long. The record must not
    /// block others any longer.
    Poison,
    /// The record waits for the results of others, see [`View::decide`].
    Held(Provisional),
    /// The attempt does not count; the record waits until the breaker closes or it is probed.
    Forgotten,
}

/// What decides about provisional failures. Changes are announced to all drivers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct View {
    /// The highest number of an attempt that the endpoint answered.
    answered: u64,
    openings: u64,
    pub(crate) is_open: bool,
    /// How often the pipeline has gone on after a pause.
    resumptions: u64,
}

impl View {
    /// How often the breaker has opened or closed, or the pipeline has gone on after a pause. Time before the last one says nothing about
    /// a record.
    pub(crate) fn changes(&self) -> u64 {
        2 * self.openings - u64::from(self.is_open) + self.resumptions
    }

    /// What becomes of a held failure.
    pub(crate) fn decide(&self, failure: Provisional) -> Verdict {
        if self.openings > failure.openings {
            Verdict::Forgotten
        } else if self.answered > failure.after {
            Verdict::Own
        } else {
            Verdict::Held(failure)
        }
    }
}

#[derive(Debug)]
pub(crate) struct Breaker {
    settings: BreakerSettings,
    started: u64,
    view: View,
    /// How many attempts had started when the breaker last opened.
    started_before_opening: u64,
    /// Failed calls since the last answer that are not decided, oldest first.
    undecided: VecDeque<Undecided>,
    last_failure: Option<Instant>,
    /// The calls that decide by [`BreakerSettings::rate`].
    window: CallWindow,
    open: Option<Open>,
}

#[derive(Debug)]
struct Open {
    since: Instant,
    next_probe: Instant,
    /// The rate of attempts allows no probe before this time.
    postponed: Option<Instant>,
    is_probing: bool,
    failed_probes: u32,
    /// The records whose probes failed, with the time of the first one that is not part of a failed attempt.
    probed: HashMap<RecordId, Instant>,
    /// When a record was probed that had not been probed before, or a pause ended: no other record could be probed before.
    last_other: Instant,
}

/// A change that operators should know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Opened,
    Closed { after: Duration },
}

impl Breaker {
    pub(crate) fn new(settings: BreakerSettings) -> Self {
        let window = settings.rate.map_or(Duration::ZERO, |rate| rate.window);
        Self {
            settings,
            window: CallWindow::new(window),
            started: 0,
            started_before_opening: 0,
            view: View::default(),
            undecided: VecDeque::new(),
            last_failure: None,
            open: None,
        }
    }

    pub(crate) fn view(&self) -> View {
        self.view
    }

    /// Admits an attempt of a record. `is_forgotten`: an attempt of it was forgotten since the breaker opened.
    ///
    /// # Errors
    /// The time of the next probe, or `None` while one is in progress.
    pub(crate) fn start(&mut self, is_forgotten: bool, now: Instant) -> Result<Admitted, Option<Instant>> {
        let is_probe = self.open.is_some();
        if let Some(open) = &mut self.open {
            let next = open
                .postponed
                .map_or(open.next_probe, |at| at.max(open.next_probe));
            let at = next + if is_forgotten { PRECEDENCE } else { Duration::ZERO };
            if open.is_probing {
                return Err(None);
            }
            if now < at {
                return Err(Some(at));
            }
            open.is_probing = true;
        }
        self.started += 1;
        Ok(Admitted {
            number: self.started,
            is_probe,
        })
    }

    /// When a driver should call a held record again. If it has nothing else to call, only that can decide about the
    /// record. Otherwise, it does so in case the results of its other calls decide nothing for a long time.
    pub(crate) fn repeat_at(&self, is_alone: bool) -> Option<Instant> {
        let failures = u32::try_from(self.undecided.len()).unwrap_or(u32::MAX);
        let delay = match is_alone {
            true => self.delay(failures.saturating_sub(1)),
            false => self.settings.open_max,
        };
        Some(self.last_failure? + delay)
    }

    fn delay(&self, doublings: u32) -> Duration {
        FIRST_DELAY
            .saturating_mul(2_u32.saturating_pow(doublings))
            .min(self.settings.open_max)
    }

    /// Takes note of the result of an attempt. `random` is a number from 0 to 1.
    pub(crate) fn ended(
        &mut self,
        admitted: Admitted,
        record: RecordId,
        evidence: Evidence,
        now: Instant,
        random: f64,
    ) -> (Verdict, Option<Change>) {
        if admitted.is_probe {
            return self.probed(admitted, record, evidence, now, random);
        }
        match evidence {
            Evidence::Answered => {
                self.count(false, now);
                self.answered(admitted.number);
                (Verdict::Own, None)
            }
            Evidence::None | Evidence::NotCalled => (Verdict::Own, None),
            Evidence::Failed { .. } if self.settings.failures == 0 || mutant!("breaker-burns-attempts") => {
                (Verdict::Own, None)
            }
            // The breaker has opened since the attempt started. It may have closed, too.
            Evidence::Failed { .. }
                if admitted.number <= self.started_before_opening && !mutant!("breaker-burns-stragglers") =>
            {
                (Verdict::Forgotten, None)
            }
            Evidence::Failed { shared_call } => {
                let failure = Provisional {
                    after: self.started,
                    openings: self.view.openings,
                };
                let mut calls = self.undecided.iter().map(|undecided| undecided.shared_call);
                if shared_call.is_none() || calls.all(|call| call != shared_call) {
                    self.undecided.push_back(Undecided { failure, shared_call });
                }
                self.last_failure = Some(now);
                self.count(true, now);
                let rate = self.settings.rate;
                let is_exceeded = rate.is_some_and(|rate| self.window.exceeds(rate.share, rate.calls));
                if self.undecided.len() < self.settings.failures && !is_exceeded {
                    return (Verdict::Held(failure), None);
                }
                self.open(now, random);
                (Verdict::Forgotten, Some(Change::Opened))
            }
        }
    }

    fn count(&mut self, is_failure: bool, now: Instant) {
        if self.settings.rate.is_some() {
            self.window.add(is_failure, now);
        }
    }

    fn open(&mut self, now: Instant, random: f64) {
        self.undecided.clear();
        self.window.clear();
        self.view.openings += 1;
        self.view.is_open = true;
        self.started_before_opening = self.started;
        self.open = Some(Open {
            since: now,
            next_probe: now + self.delay(0).mul_f64(1.0 + JITTER * random),
            postponed: None,
            is_probing: false,
            failed_probes: 0,
            probed: HashMap::new(),
            last_other: now,
        });
    }

    fn answered(&mut self, number: u64) {
        self.view.answered = self.view.answered.max(number);
        let answered = self.view.answered;
        self.undecided
            .retain(|undecided| undecided.failure.after >= answered);
    }

    fn probed(
        &mut self,
        admitted: Admitted,
        record: RecordId,
        evidence: Evidence,
        now: Instant,
        random: f64,
    ) -> (Verdict, Option<Change>) {
        let delay = self
            .open
            .as_ref()
            .map(|open| self.delay(open.failed_probes.saturating_add(1)));
        let poison_after = self.settings.poison_after;
        let (Some(open), Some(delay)) = (&mut self.open, delay) else {
            return (Verdict::Own, None);
        };
        open.is_probing = false;
        let after = now - open.since;
        if evidence == Evidence::Answered {
            self.answered(admitted.number);
            return (Verdict::Own, Some(self.close(after)));
        }
        if evidence == Evidence::NotCalled {
            return (Verdict::Own, None);
        }
        open.failed_probes = open.failed_probes.saturating_add(1);
        open.next_probe = now + delay.mul_f64(1.0 + JITTER * random);
        if evidence == Evidence::None {
            return (Verdict::Own, None);
        }
        let first = open.probed.entry(record).or_insert_with(|| {
            open.last_other = now;
            now
        });
        if now - (*first).max(open.last_other) >= poison_after {
            // A retry of this record is not another one.
            *first = now;
            return (Verdict::Poison, None);
        }
        (Verdict::Forgotten, None)
    }

    fn close(&mut self, after: Duration) -> Change {
        self.open = None;
        self.view.is_open = false;
        self.last_failure = None;
        Change::Closed { after }
    }

    /// The pipeline goes on after a pause.
    pub(crate) fn resumed(&mut self, now: Instant) {
        self.view.resumptions += 1;
        if let Some(open) = &mut self.open {
            open.last_other = now;
        }
    }

    /// A probe must not start before this time, and has not.
    pub(crate) fn postponed(&mut self, probe: Admitted, until: Instant) {
        self.abandoned(probe);
        if let Some(open) = &mut self.open {
            open.postponed = Some(until);
        }
    }

    /// Another rate may allow a probe earlier.
    pub(crate) fn rate_changed(&mut self) {
        if let Some(open) = &mut self.open {
            open.postponed = None;
        }
    }

    /// A probe ended without a result.
    pub(crate) fn abandoned(&mut self, probe: Admitted) {
        if let Some(open) = &mut self.open
            && probe.is_probe
        {
            open.is_probing = false;
        }
    }
}

/// Reports changes of a breaker to operators.
pub(crate) trait BreakerObserver: Send + Sync {
    /// The breaker has opened because of this failure.
    fn opened(&self, failure: &Failure);
    /// The breaker has closed.
    fn closed(&self, after: Duration);
}

/// The breaker of a pipeline, which all drivers of the process share. Clones are handles.
#[derive(Clone)]
pub(crate) struct Gate {
    breaker: Arc<Mutex<Breaker>>,
    view: watch::Sender<View>,
    observer: Arc<dyn BreakerObserver>,
}

/// An attempt in progress. If it is dropped without a result, the breaker admits another one in its place.
pub(crate) struct Permit {
    admitted: Option<Admitted>,
    gate: Gate,
}

impl Gate {
    pub(crate) fn new(settings: BreakerSettings, observer: Arc<dyn BreakerObserver>) -> Self {
        Self {
            breaker: Arc::new(Mutex::new(Breaker::new(settings))),
            view: watch::Sender::new(View::default()),
            observer,
        }
    }

    /// Changes that may decide about held records, or open or close the breaker.
    pub(crate) fn watch(&self) -> watch::Receiver<View> {
        self.view.subscribe()
    }

    pub(crate) fn view(&self) -> View {
        self.lock().view()
    }

    /// See [`Breaker::start`].
    pub(crate) fn start(&self, is_forgotten: bool) -> Result<Permit, Option<Instant>> {
        let admitted = self.lock().start(is_forgotten, Instant::now())?;
        Ok(Permit {
            admitted: Some(admitted),
            gate: self.clone(),
        })
    }

    /// See [`Breaker::repeat_at`].
    pub(crate) fn repeat_at(&self, is_alone: bool) -> Option<Instant> {
        self.lock().repeat_at(is_alone)
    }

    /// The pipeline goes on after a pause: records have not failed for the time of the pause.
    pub(crate) fn resumed(&self) {
        let mut breaker = self.lock();
        breaker.resumed(Instant::now());
        self.announce(breaker.view());
    }

    /// The rate of attempts has changed. Makes all drivers look again.
    pub(crate) fn rate_changed(&self) {
        let mut breaker = self.lock();
        breaker.rate_changed();
        self.announce(breaker.view());
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Breaker> {
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the drivers.
    fn announce(&self, view: View) {
        self.view.send_replace(view);
    }
}

impl Permit {
    /// Takes note of the outcome of the attempt.
    pub(crate) fn ended(mut self, origin: &Origin, outcome: &Outcome) -> Verdict {
        let Some(admitted) = self.admitted.take() else {
            return Verdict::Own;
        };
        let evidence = Evidence::of(outcome);
        let record = (origin.topic.clone(), origin.partition, origin.offset);
        let mut breaker = self.gate.lock();
        let were_undecided = !breaker.undecided.is_empty();
        let (verdict, change) = breaker.ended(admitted, record, evidence, Instant::now(), fastrand::f64());
        // With the lock, so that the observer sees changes in their order.
        match (change, outcome) {
            (Some(Change::Opened), Outcome::Failed(failure)) => self.gate.observer.opened(failure),
            (Some(Change::Closed { after }), _) => self.gate.observer.closed(after),
            _ => {}
        }
        // The view changes with every answer, but that matters only while failures are undecided or the breaker is open.
        if were_undecided || change.is_some() || admitted.is_probe {
            self.gate.announce(breaker.view());
        }
        verdict
    }
}

impl Permit {
    /// The attempt must not start before this time.
    pub(crate) fn postpone(mut self, until: Instant) {
        self.give_back(|breaker, probe| breaker.postponed(probe, until));
    }

    fn give_back(&mut self, give_back: impl FnOnce(&mut Breaker, Admitted)) {
        if let Some(probe) = self.admitted.take().filter(|admitted| admitted.is_probe) {
            let mut breaker = self.gate.lock();
            give_back(&mut breaker, probe);
            self.gate.announce(breaker.view());
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.give_back(Breaker::abandoned);
    }
}

#[cfg(test)]
mod tests;
