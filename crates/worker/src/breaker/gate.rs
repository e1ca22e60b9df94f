//! A breaker that drivers share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redeliver_core::headers::Origin;
use redeliver_core::{Failure, Outcome};
use tokio::sync::watch;
use tokio::time::Instant;

use super::{Admitted, Breaker, BreakerSettings, Change, Evidence, Offer, Phase, Verdict, View};
use crate::attempt_queue::Order;

/// Reports changes of a breaker to operators.
pub(crate) trait BreakerObserver: Send + Sync {
    /// The breaker has opened because of this failure.
    fn opened(&self, failure: &Failure);
    /// The endpoint has answered a probe of the open breaker, after this time.
    fn answered(&self, after: Duration);
    /// The breaker has closed, this long after its last opening.
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
    /// See [`Breaker::new`].
    pub(crate) fn new(
        settings: BreakerSettings,
        concurrency: usize,
        observer: Arc<dyn BreakerObserver>,
    ) -> Self {
        Self {
            breaker: Arc::new(Mutex::new(Breaker::new(settings, concurrency))),
            view: watch::Sender::new(View::default()),
            observer,
        }
    }

    /// Changes that may decide about held records, or about the attempts that may start.
    pub(crate) fn watch(&self) -> watch::Receiver<View> {
        self.view.subscribe()
    }

    pub(crate) fn view(&self) -> View {
        self.lock().view()
    }

    /// See [`Breaker::start`].
    pub(crate) fn start(&self, offer: Offer) -> Result<Permit, Option<Instant>> {
        let admitted = self.lock().start(offer, Instant::now())?;
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
        self.announce(&breaker);
    }

    /// The rate of attempts has changed. Makes all drivers look again.
    pub(crate) fn rate_changed(&self) {
        self.announce(&self.lock());
    }

    fn lock(&self) -> MutexGuard<'_, Breaker> {
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the drivers.
    fn announce(&self, breaker: &Breaker) {
        self.view.send_replace(breaker.view());
    }
}

impl Permit {
    /// Which record the attempt should be of.
    pub(crate) fn order(&self) -> Order {
        self.admitted.map(|admitted| admitted.order).unwrap_or_default()
    }

    /// Takes note of the outcome of the attempt.
    pub(crate) fn ended(mut self, origin: &Origin, is_retry: bool, outcome: &Outcome) -> Verdict {
        let Some(admitted) = self.admitted.take() else {
            return Verdict::Own;
        };
        let evidence = Evidence::of(outcome);
        let record = (origin.topic.clone(), origin.partition, origin.offset);
        let mut breaker = self.gate.lock();
        // The view changes with every answer, but while the breaker is closed, that matters only to held failures.
        let matters = breaker.view().phase != Phase::Closed || breaker.may_hold();
        let record = (record, is_retry);
        let (verdict, change) = breaker.ended(admitted, record, evidence, Instant::now(), fastrand::f64());
        // With the lock, so that the observer sees changes in their order.
        if let Some(Change { to, since_opening }) = change {
            let observer = &self.gate.observer;
            match (to, outcome) {
                (Phase::Closed, _) => observer.closed(since_opening),
                (Phase::HalfOpen, _) => observer.answered(since_opening),
                (Phase::Open, Outcome::Failed(failure)) => observer.opened(failure),
                (Phase::Open, Outcome::Success(_)) => unreachable!("a success opens no breaker"),
            }
        }
        if matters || change.is_some() {
            self.gate.announce(&breaker);
        }
        verdict
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(admitted) = self.admitted.take() {
            let mut breaker = self.gate.lock();
            breaker.abandoned(admitted);
            if breaker.view().phase != Phase::Closed {
                self.gate.announce(&breaker);
            }
        }
    }
}
