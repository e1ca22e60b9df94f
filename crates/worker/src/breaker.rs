//! The circuit breaker of a pipeline: an outage of the endpoint uses up no attempts.
//!
//! A call is *answered* if it shows that the endpoint works: it succeeds, or it fails with the scope
//! [`FailureScope::Record`]. A failure with the scope [`FailureScope::Endpoint`] is no answer, and neither is one with the scope
//! [`FailureScope::Unknown`] or a request for a delay. An *outage* is a time in which no call that starts is answered.
//!
//! - **Closed**: attempts start freely, every other one that of a record whose attempt was forgotten, if there is one. While nearly as many
//!   calls fail as open it, retries go before new records, if the last one was answered. The breaker opens if more than a share of the calls of a time failed, or, with too few calls, if the last ones failed, see
//!   [`BreakerSettings`]. Failures often come faster than answers, so a call that started less than a second ago counts as
//!   one that is answered.
//! - **Open**: one probe at a time, after 1, 2, 4 s, in turn of a record whose attempt was forgotten and of another one. The first answer
//!   makes the breaker half open.
//! - **Half open**: 2 attempts at a time; twice as many with each answer. Every other one is that of a record whose attempt was
//!   forgotten. When all permits would be as many as the attempts of the process (`concurrency`), the breaker closes. If as many
//!   attempts as there are permits end without an answer in between, besides those that started less than a second ago, it
//!   opens again.
//!
//! A failure with the scope of the endpoint is provisional, and its record stays in hand:
//!
//! - It is forgotten if its call began before the breaker opened last, or if it is one of at least [`BreakerSettings::failures`] in
//!   a row, and the first of the calls in progress that is answered started after so many of them. Those that end while that call is
//!   in progress belong to the outage, too: their calls can have begun before its end.
//! - It is the record's own once a call that started later is answered.
//!
//! Records that always fail must not wait for ever if no others arrive. So once no other record has been probed for
//! [`BreakerSettings::poison_after`] without the breaker having closed, a record that has been probed for as long fails on its own.
//!
//! [`Breaker`] decides and has no clock. [`Gate`] shares it between the drivers of a process.

mod gate;
mod window;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::failure::FailureScope;
use redeliver_core::{Outcome, mutant};
use tokio::time::Instant;

pub(crate) use gate::{BreakerObserver, Gate, Permit};
use window::CallWindow;

use crate::attempt_queue::Order;

/// The delay before the first probe. It doubles with each probe that fails.
const FIRST_DELAY: Duration = Duration::from_secs(1);
/// By how much the delay before a probe is prolonged at random, at most, as a share of it: processes do not probe at the
/// same moment.
const JITTER: f64 = 0.2;
/// For how long drivers that have no record of the kind that is probed next leave the probe to drivers that have one.
const PRECEDENCE: Duration = Duration::from_millis(200);
/// For how long a call in progress counts as one that is answered.
const YOUNG: Duration = Duration::from_secs(1);
/// From this part of the share of failures that opens the breaker on, retries go first.
const NEAR: f64 = 0.9;
/// How many attempts at a time a breaker permits that has just become half open.
const FIRST_PERMITS: usize = 2;

/// When a breaker opens and closes.
#[derive(Clone, Debug, PartialEq)]
pub struct BreakerSettings {
    /// Failures of the endpoint in a row after which the breaker opens, unless `rate` decides. With 0 it never opens, and every
    /// failure is the record's own.
    pub failures: usize,
    /// The share of failures that opens the breaker as soon as there are enough calls. `None`: `failures` always decides.
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
    /// The breaker opens if more than this share fails, from 0 to 1.
    pub share: f64,
    /// The time whose calls count.
    pub window: Duration,
    /// How many calls there must have been.
    pub calls: usize,
}

impl Default for BreakerSettings {
    /// Opens if more than half of at least 20 calls fail within 10 s or, with fewer calls, if 5 in a row do. Probes at least every
    /// 4 s, and gives up on a lone record after 15 minutes.
    fn default() -> Self {
        Self {
            failures: 5,
            rate: Some(FailureRate {
                share: 0.5,
                window: Duration::from_secs(10),
                calls: 20,
            }),
            open_max: Duration::from_secs(4),
            poison_after: Duration::from_secs(900),
        }
    }
}

impl BreakerSettings {
    fn delay(&self, doublings: usize) -> Duration {
        let factor = u32::try_from(doublings).map_or(u32::MAX, |doublings| 2_u32.saturating_pow(doublings));
        FIRST_DELAY.saturating_mul(factor).min(self.open_max)
    }

    fn probe_at(&self, failed_probes: usize, now: Instant, random: f64) -> Instant {
        now + self.delay(failed_probes).mul_f64(1.0 + JITTER * random)
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

/// Which records a driver could call next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    /// Some whose attempt was forgotten since the breaker opened.
    pub(crate) forgotten: bool,
    /// Some others.
    pub(crate) others: bool,
}

/// An attempt that the breaker has admitted. Attempts are numbered in the order in which they start, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Admitted {
    number: u64,
    /// Which record it should be of.
    order: Order,
}

/// A failure of the endpoint that is not decided yet. Failures are numbered in the order in which they end, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Provisional {
    number: u64,
    /// How many attempts had started when it ended.
    after: u64,
    /// How often the breaker had opened.
    openings: u64,
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

/// The name of a breaker's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    #[default]
    Closed,
    Open,
    HalfOpen,
}

/// What decides about provisional failures. Changes are announced to all drivers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct View {
    pub(crate) phase: Phase,
    /// How often the breaker has changed its state, or the pipeline has gone on after a pause. Time before the last one says
    /// nothing about a record.
    pub(crate) changes: u64,
    /// The highest number of an attempt that the endpoint answered.
    answered: u64,
    openings: u64,
    /// The last outage after which the breaker did not have to open: failures with a number above the first and up to the
    /// second one.
    outage: (u64, u64),
}

impl View {
    /// What becomes of a held failure.
    pub(crate) fn decide(&self, failure: Provisional) -> Verdict {
        let (from, to) = self.outage;
        if self.openings > failure.openings || (failure.number > from && failure.number <= to) {
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
    /// How many attempts the process makes at a time: a half-open breaker closes when it permits as many.
    concurrency: usize,
    started: u64,
    failed: u64,
    /// When the attempts in progress started that have done so since the last opening, by number.
    in_progress: BTreeMap<u64, Instant>,
    /// The last failure that was held since the breaker opened, and when it ended.
    last_held: Option<(Provisional, Instant)>,
    /// When the breaker last opened, and how many attempts had started.
    last_opening: Option<(Instant, u64)>,
    probed: Probed,
    view: View,
    state: State,
}

#[derive(Debug)]
enum State {
    Closed(Closed),
    Open(Open),
    HalfOpen(HalfOpen),
}

#[derive(Debug)]
struct Closed {
    window: CallWindow,
    /// Whether the last retry was answered.
    retry_answered: bool,
    /// Failures since the last answer.
    run: Option<Run>,
}

/// Failures in a row: no attempt that started after the first one was answered.
#[derive(Debug)]
struct Run {
    /// The number of the first attempt that failed.
    first: u64,
    /// How many failures there were before.
    failed_before: u64,
    /// How many calls failed that were not shared.
    own_calls: usize,
    shared_calls: HashSet<u64>,
    /// How many attempts had started when there were enough failures for an outage.
    enough_after: Option<u64>,
}

impl Run {
    fn calls(&self) -> usize {
        self.own_calls + self.shared_calls.len()
    }
}

#[derive(Debug)]
struct Open {
    next_probe: Instant,
    failed_probes: usize,
}

/// The records whose probes failed since the breaker was closed last.
#[derive(Debug)]
struct Probed {
    /// With the time of the first failed probe that is not part of a failed attempt.
    since: HashMap<RecordId, Instant>,
    /// When a record was probed that had not been probed before, or a pause ended: no other record could be probed before.
    last_other: Instant,
}

#[derive(Debug)]
struct HalfOpen {
    permits: usize,
    /// How many attempts have ended since the last answer.
    unanswered: usize,
}

impl Closed {
    fn new(settings: &BreakerSettings) -> Self {
        let length = settings.rate.map_or(Duration::ZERO, |rate| rate.window);
        Self {
            window: CallWindow::new(length),
            retry_answered: true,
            run: None,
        }
    }

    /// Whether nearly as many calls failed as open the breaker, and retries are answered. Calls in progress do not count: most of them would start
    /// before it shows.
    fn prefers_retries(&self, rate: FailureRate, now: Instant) -> bool {
        let near = FailureRate {
            share: NEAR * rate.share,
            ..rate
        };
        self.retry_answered && self.window.exceeds(near, 0, now) == Some(true)
    }

    /// Takes note of an answer. `failed` counts all failures. Returns the failures that an outage explains, see [`View::outage`].
    fn answered(&mut self, admitted: Admitted, failed: u64, now: Instant) -> Option<(u64, u64)> {
        self.window.add(false, now);
        let run = self.run.take_if(|run| run.first < admitted.number)?;
        let is_outage = run.enough_after.is_some_and(|after| admitted.number > after);
        is_outage.then_some((run.failed_before, failed))
    }

    /// Takes note of a failure. `young` is the number of attempts in progress that may still be answered. Returns true if the
    /// breaker opens.
    fn failed(
        &mut self,
        admitted: Admitted,
        shared_call: Option<u64>,
        failure: Provisional,
        young: usize,
        settings: &BreakerSettings,
        now: Instant,
    ) -> bool {
        self.window.add(true, now);
        let run = self.run.get_or_insert_with(|| Run {
            first: admitted.number,
            failed_before: failure.number - 1,
            own_calls: 0,
            shared_calls: HashSet::new(),
            enough_after: None,
        });
        match shared_call {
            Some(call) => drop(run.shared_calls.insert(call)),
            None => run.own_calls += 1,
        }
        let Some(rate) = settings.rate else {
            return run.calls() >= settings.failures;
        };
        let is_outage = run.calls() >= settings.failures.max(young + 1);
        if is_outage {
            run.enough_after.get_or_insert(failure.after);
        }
        self.window.exceeds(rate, young, now).unwrap_or(is_outage)
    }
}

impl Probed {
    fn new(now: Instant) -> Self {
        Self {
            since: HashMap::new(),
            last_other: now,
        }
    }

    /// Takes note of a failed probe. Returns whether the failure is the record's own.
    fn is_poison(&mut self, record: RecordId, poison_after: Duration, now: Instant) -> bool {
        let since = self.since.entry(record).or_insert_with(|| {
            self.last_other = now;
            now
        });
        let is_poison = now - (*since).max(self.last_other) >= poison_after;
        if is_poison {
            // A retry of this record is not another one.
            *since = now;
        }
        is_poison
    }
}

impl HalfOpen {
    /// Takes note of the result of an attempt. `young` is the number of those in progress that may still be answered. Returns the
    /// next state if it is another one.
    fn ended(&mut self, evidence: Evidence, young: usize, concurrency: usize) -> Option<Phase> {
        match evidence {
            Evidence::NotCalled => None,
            Evidence::Answered => {
                self.permits = self.permits.saturating_mul(2);
                self.unanswered = 0;
                let is_closed = self.permits >= concurrency || mutant!("breaker-closes-after-one-answer");
                is_closed.then_some(Phase::Closed)
            }
            Evidence::Failed { .. } | Evidence::None => {
                self.unanswered += 1;
                (self.unanswered >= self.permits + young).then_some(Phase::Open)
            }
        }
    }
}

/// A change that operators should know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) to: Phase,
    /// The time since the last opening before it; 0 if it is the first one.
    pub(crate) since_opening: Duration,
}

impl Breaker {
    /// `concurrency` is the maximum number of attempts at a time.
    pub(crate) fn new(settings: BreakerSettings, concurrency: usize) -> Self {
        Self {
            state: State::Closed(Closed::new(&settings)),
            settings,
            concurrency,
            started: 0,
            failed: 0,
            in_progress: BTreeMap::new(),
            last_held: None,
            last_opening: None,
            probed: Probed::new(Instant::now()),
            view: View::default(),
        }
    }

    pub(crate) fn view(&self) -> View {
        self.view
    }

    /// Admits an attempt of one of the records of a driver.
    ///
    /// # Errors
    /// The time of the next probe, or `None` if an attempt in progress has to end first.
    pub(crate) fn start(&mut self, offer: Offer, now: Instant) -> Result<Admitted, Option<Instant>> {
        let is_turn_of_forgotten = (self.started - self.started_before_opening()).is_multiple_of(2);
        let mut order = Order {
            forgotten_first: is_turn_of_forgotten,
            retries_first: false,
        };
        match &self.state {
            State::Closed(closed) => {
                let rate = self.settings.rate;
                order.retries_first = rate.is_some_and(|rate| closed.prefers_retries(rate, now));
            }
            State::Open(open) => {
                let is_offered = if is_turn_of_forgotten {
                    offer.forgotten
                } else {
                    offer.others
                };
                let at = open.next_probe + if is_offered { Duration::ZERO } else { PRECEDENCE };
                if !self.in_progress.is_empty() {
                    return Err(None);
                }
                if now < at {
                    return Err(Some(at));
                }
            }
            State::HalfOpen(half_open) if self.in_progress.len() >= half_open.permits => return Err(None),
            State::HalfOpen(_) => {}
        }
        self.started += 1;
        self.in_progress.insert(self.started, now);
        Ok(Admitted {
            number: self.started,
            order,
        })
    }

    fn started_before_opening(&self) -> u64 {
        self.last_opening.map_or(0, |(_, started)| started)
    }

    /// Takes note of the result of an attempt. `random` is a number from 0 to 1.
    pub(crate) fn ended(
        &mut self,
        admitted: Admitted,
        (record, is_retry): (RecordId, bool),
        evidence: Evidence,
        now: Instant,
        random: f64,
    ) -> (Verdict, Option<Change>) {
        self.in_progress.remove(&admitted.number);
        let is_failure = matches!(evidence, Evidence::Failed { .. });
        if is_failure && (self.settings.failures == 0 || mutant!("breaker-burns-attempts")) {
            return (Verdict::Own, None);
        }
        if admitted.number <= self.started_before_opening() {
            let verdict = if is_failure {
                Verdict::Forgotten
            } else {
                Verdict::Own
            };
            return (verdict, None);
        }
        if evidence == Evidence::Answered {
            self.view.answered = self.view.answered.max(admitted.number);
        }
        if is_retry && let State::Closed(closed) = &mut self.state {
            closed.retry_answered = evidence == Evidence::Answered;
        }
        self.failed += u64::from(is_failure);
        let held = Provisional {
            number: self.failed,
            after: self.started,
            openings: self.view.openings,
        };
        let settings = &self.settings;
        let in_progress = self.in_progress.values().rev();
        let young = || in_progress.take_while(|at| now - **at < YOUNG).count();
        let (if_failed, next) = match (&mut self.state, evidence) {
            (State::Closed(closed), Evidence::Answered) => {
                if let Some(outage) = closed.answered(admitted, self.failed, now) {
                    self.view.outage = outage;
                }
                (Verdict::Own, None)
            }
            (State::Closed(closed), Evidence::Failed { shared_call }) => {
                let opens = closed.failed(admitted, shared_call, held, young(), settings, now);
                (Verdict::Held(held), opens.then_some(Phase::Open))
            }
            (State::Closed(_), Evidence::None | Evidence::NotCalled)
            | (State::Open(_), Evidence::NotCalled) => (Verdict::Own, None),
            (State::Open(_), Evidence::Answered) => (Verdict::Own, Some(Phase::HalfOpen)),
            (State::Open(open), Evidence::Failed { .. } | Evidence::None) => {
                open.failed_probes += 1;
                open.next_probe = settings.probe_at(open.failed_probes, now, random);
                let is_poison = is_failure && self.probed.is_poison(record, settings.poison_after, now);
                let verdict = if is_poison {
                    Verdict::Poison
                } else {
                    Verdict::Forgotten
                };
                (verdict, None)
            }
            (State::HalfOpen(half_open), evidence) => (
                Verdict::Held(held),
                half_open.ended(evidence, young(), self.concurrency),
            ),
        };
        let change = next.map(|next| self.enter(next, now, random));
        let verdict = match (is_failure, change) {
            (false, _) => Verdict::Own,
            (true, None) => if_failed,
            // It is one of those that have opened the breaker.
            (true, Some(_)) => Verdict::Forgotten,
        };
        if verdict == Verdict::Held(held) {
            self.last_held = Some((held, now));
        }
        (verdict, change)
    }

    fn enter(&mut self, next: Phase, now: Instant, random: f64) -> Change {
        let since_opening = self.last_opening.map_or(Duration::ZERO, |(at, _)| now - at);
        // The answered probe is the first of its doublings.
        let next = match next {
            Phase::HalfOpen if FIRST_PERMITS >= self.concurrency => Phase::Closed,
            next => next,
        };
        self.state = match next {
            Phase::Closed => State::Closed(Closed::new(&self.settings)),
            Phase::Open => {
                if self.view.phase == Phase::Closed {
                    self.probed = Probed::new(now);
                }
                self.view.openings += 1;
                self.last_opening = Some((now, self.started));
                self.last_held = None;
                self.in_progress.clear();
                State::Open(Open {
                    next_probe: self.settings.probe_at(0, now, random),
                    failed_probes: 0,
                })
            }
            Phase::HalfOpen => State::HalfOpen(HalfOpen {
                permits: FIRST_PERMITS,
                unanswered: 0,
            }),
        };
        self.view.phase = next;
        self.view.changes += 1;
        Change {
            to: next,
            since_opening,
        }
    }

    /// Whether a failure may be held that is not decided yet.
    fn may_hold(&self) -> bool {
        self.last_held
            .is_some_and(|(failure, _)| self.view.decide(failure) == Verdict::Held(failure))
    }

    /// When a driver should call a held record again. Without other records to call, only that can decide
    /// about the record. Otherwise, it does so in case the results of its other calls decide nothing for a
    /// long time.
    pub(crate) fn repeat_at(&self, is_alone: bool) -> Option<Instant> {
        let failures = match &self.state {
            State::Closed(closed) => closed.run.as_ref().map_or(0, Run::calls),
            State::HalfOpen(half_open) => half_open.unanswered,
            State::Open(_) => 0,
        };
        let delay = match is_alone {
            true => self.settings.delay(failures.saturating_sub(1)),
            false => self.settings.open_max,
        };
        Some(self.last_held?.1 + delay)
    }

    /// The pipeline goes on after a pause.
    pub(crate) fn resumed(&mut self, now: Instant) {
        self.view.changes += 1;
        self.probed.last_other = now;
    }

    /// An attempt ended without a result.
    pub(crate) fn abandoned(&mut self, admitted: Admitted) {
        self.in_progress.remove(&admitted.number);
    }
}

#[cfg(test)]
mod tests;
