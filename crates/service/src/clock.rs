//! The guarded clock of a process: metrics, log and readiness.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use redeliver_core::clock_guard::{ClockChange, ClockObserver, StepDirection};
use redeliver_core::wait::LogThrottle;
use redeliver_core::{Clock, ClockLimits, GuardedClock};
use redeliver_runtime::Config;
use redeliver_runtime::health::{Health, Part};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StepLabel {
    direction: &'static str,
}

/// Reports steps of the wall clock. Cheap to clone.
#[derive(Clone)]
pub(crate) struct ClockReports {
    held: Gauge,
    steps: Family<StepLabel, Counter>,
    /// Set in a process that releases what is due.
    part: Arc<OnceLock<Part>>,
    log_throttle: Arc<Mutex<LogThrottle>>,
}

impl ClockReports {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let reports = Self {
            held: Gauge::default(),
            steps: Family::default(),
            part: Arc::default(),
            log_throttle: Arc::default(),
        };
        registry.register(
            "clock_held",
            "1 while the process holds after a step of the wall clock, else 0",
            reports.held.clone(),
        );
        registry.register(
            "clock_steps",
            "Steps of the wall clock that exceeded clock.max_step: forward, backward",
            reports.steps.clone(),
        );
        // These exist from the start: an alert on the rate would miss the first increment of a counter that did not
        // exist before.
        for direction in [StepDirection::Forward, StepDirection::Backward] {
            drop(reports.steps_in(direction));
        }
        reports
    }

    /// A clock with the configured limits that reports here.
    pub(crate) fn guard(&self, clock: impl Clock + 'static, config: &Config) -> Arc<dyn Clock> {
        let limits = ClockLimits {
            max_step: config.clock.max_step.duration(),
            confirm: config.clock.confirm.duration(),
        };
        Arc::new(GuardedClock::new(clock, limits, self.clone().observer()))
    }

    /// Makes the clock a part of the readiness of the process.
    pub(crate) fn add_part(&self, health: &Health) {
        self.part.get_or_init(|| {
            let part = health.part("clock");
            if self.held.get() == 0 {
                part.ready();
            }
            part
        });
    }

    fn steps_in(&self, direction: StepDirection) -> Counter {
        let direction = direction.as_str();
        self.steps.get_or_create(&StepLabel { direction }).clone()
    }

    fn observer(self) -> ClockObserver {
        Box::new(move |change| self.report(change))
    }

    fn report(&self, change: ClockChange) {
        match change {
            ClockChange::Stepped { step, continued } => {
                self.held.set(1);
                self.steps_in(step.direction).inc();
                if let Some(part) = self.part.get() {
                    part.not_ready(format!(
                        "the wall clock stepped {step}; nothing is released until the new time is confirmed"
                    ));
                }
                let mut log_throttle = self.log_throttle.lock().unwrap_or_else(PoisonError::into_inner);
                if log_throttle.should_log() {
                    tracing::error!(
                        %step, expected = %continued,
                        "wall clock stepped; releases wait until the new time is confirmed"
                    );
                }
            }
            ClockChange::Steady { now } => {
                self.held.set(0);
                if let Some(part) = self.part.get() {
                    part.ready();
                }
                tracing::info!(%now, "wall clock confirmed; releases continue");
            }
        }
    }
}
