//! Schedules jobs at a steady rate in the background.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

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
                let filler = env.broker.filler()?;
                let started = Instant::now();
                let mut sent = 0;
                while !stop.load(Ordering::SeqCst) {
                    let target = (started.elapsed().as_secs_f64() * per_second) as usize;
                    while sent < target {
                        let job = JobSpec {
                            number: sent,
                            due: SystemClock.now().after(delay),
                            partition: partitions[sent % partitions.len()],
                        };
                        filler.send(&env.request(app, job))?;
                        sent += 1;
                    }
                    std::thread::park_timeout(Duration::from_millis(1));
                }
                filler.flush()?;
                Ok(sent)
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
