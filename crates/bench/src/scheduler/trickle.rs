//! Schedules jobs at a steady rate in the background.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use redeliver_core::{Clock, SystemClock};

use super::env::{JobSpec, SchedulerEnv};

/// A producer on its own thread.
pub(super) struct Trickle {
    stop: Arc<AtomicBool>,
    sender: JoinHandle<anyhow::Result<usize>>,
}

impl Trickle {
    /// Starts to schedule jobs. Each is due `delay` after it is sent. The given partitions of the ingest topic take turns.
    pub(super) fn start(
        env: &SchedulerEnv,
        app: &'static str,
        per_second: f64,
        delay: Duration,
        partitions: &'static [i32],
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let sender = std::thread::spawn({
            let (env, stop) = (env.clone(), stop.clone());
            move || {
                env.broker.trickle(per_second, &stop, |number| {
                    let job = JobSpec {
                        number,
                        due: SystemClock.now().after(delay),
                        partition: partitions[number % partitions.len()],
                    };
                    env.request(app, job)
                })
            }
        });
        Self { stop, sender }
    }

    /// Stops, and returns the number of jobs that were sent.
    pub(super) fn stop(self) -> anyhow::Result<usize> {
        self.stop.store(true, Ordering::SeqCst);
        self.sender
            .join()
            .map_err(|_| anyhow::anyhow!("the producer panicked"))?
    }
}
