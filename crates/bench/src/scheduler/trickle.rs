//! Jobs that are scheduled at a steady rate while something else happens.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use redeliver_core::{Clock, SystemClock};

use super::env::{SchedulerEnv, Wanted};

/// A producer on a thread of its own.
pub(super) struct Trickle {
    stop: Arc<AtomicBool>,
    sending: JoinHandle<anyhow::Result<usize>>,
}

impl Trickle {
    /// Each job is due so long after it is sent. Partitions of the ingest topic take turns.
    pub(super) fn start(
        env: &SchedulerEnv,
        app: &'static str,
        per_second: f64,
        ahead: Duration,
        partitions: &'static [i32],
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let sending = std::thread::spawn({
            let (env, stop) = (env.clone(), stop.clone());
            move || {
                let filler = env.broker.filler()?;
                let began = Instant::now();
                let mut sent = 0;
                while !stop.load(Ordering::SeqCst) {
                    let should = (began.elapsed().as_secs_f64() * per_second) as usize;
                    while sent < should {
                        let wanted = Wanted {
                            number: sent,
                            due: SystemClock.now().after(ahead),
                            partition: partitions[sent % partitions.len()],
                        };
                        filler.send(&env.request(app, wanted))?;
                        sent += 1;
                    }
                    std::thread::park_timeout(Duration::from_millis(1));
                }
                filler.flush()?;
                Ok(sent)
            }
        });
        Self { stop, sending }
    }

    /// How many were sent.
    pub(super) fn stop(self) -> anyhow::Result<usize> {
        self.stop.store(true, Ordering::SeqCst);
        self.sending
            .join()
            .map_err(|_| anyhow::anyhow!("the producer panicked"))?
    }
}
