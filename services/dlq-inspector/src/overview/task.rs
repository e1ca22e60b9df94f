//! When to survey: at most once per second, while there are callers, and for a while after the last one.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::surveyor::Surveyor;
use super::view::Overview;
use crate::metrics::Metrics;

/// The time between two surveys, unless they take long.
const INTERVAL: Duration = Duration::from_secs(1);
/// The maximum time between two surveys.
const MAX_INTERVAL: Duration = Duration::from_secs(10);
/// The time between two surveys is at least this many times as long as a survey, so that large clusters are not asked all the time.
const PAUSE: u32 = 4;
/// How long surveys go on without callers: a page that is loaded again, or the next call of a script, finds rates.
const GRACE: Duration = Duration::from_secs(30);

/// The newest overview, for any number of callers. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Overviews(Arc<Shared>);

struct Shared {
    newest: watch::Sender<Option<Arc<Overview>>>,
    wanted: Notify,
}

/// Receives each overview that is newer than the one before, or the newest of them.
pub(crate) type Receiver = watch::Receiver<Option<Arc<Overview>>>;

impl Overviews {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Shared {
            newest: watch::Sender::new(None),
            wanted: Notify::new(),
        }))
    }

    /// Surveys go on as long as there is a receiver.
    pub(crate) fn subscribe(&self) -> Receiver {
        let receiver = self.0.newest.subscribe();
        self.0.wanted.notify_one();
        receiver
    }

    /// Surveys while there are receivers, until `stop` is cancelled.
    pub(crate) async fn run(
        self,
        mut surveyor: Surveyor,
        metrics: Metrics,
        stop: CancellationToken,
    ) -> Result<(), Infallible> {
        let surveying = async {
            let mut number = 0;
            loop {
                // A caller that came during surveys has left a permit, and may be gone.
                while self.0.newest.receiver_count() == 0 {
                    self.0.wanted.notified().await;
                }
                self.while_wanted(&mut surveyor, &metrics, &mut number).await;
                self.0.newest.send_replace(None);
                surveyor.forget();
            }
        };
        tokio::select! {
            never = surveying => never,
            () = stop.cancelled() => Ok(()),
        }
    }

    async fn while_wanted(&self, surveyor: &mut Surveyor, metrics: &Metrics, number: &mut u64) {
        let mut unwanted_since: Option<Instant> = None;
        loop {
            if self.0.newest.receiver_count() > 0 {
                unwanted_since = None;
            } else if unwanted_since.get_or_insert_with(Instant::now).elapsed() >= GRACE {
                return;
            }
            let began = Instant::now();
            *number += 1;
            let overview = surveyor.survey(*number).await;
            metrics.add_overview_survey();
            self.0.newest.send_replace(Some(Arc::new(overview)));
            tokio::time::sleep(pause(began.elapsed())).await;
        }
    }
}

/// The time until the next survey, after one that took this long.
fn pause(took: Duration) -> Duration {
    (took * PAUSE).clamp(INTERVAL, MAX_INTERVAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::overview::tests::overview;

    #[test]
    fn slow_receiver_gets_newest() {
        let overviews = Overviews::new();
        let mut receivers = [overviews.subscribe(), overviews.subscribe()];
        for number in 1..=3 {
            let newest = Some(Arc::new(overview(number)));
            overviews.0.newest.send_replace(newest);
            // The first one reads each of them, the second one only the last.
            let _ = receivers[0].borrow_and_update();
        }
        let [fast, slow] = &mut receivers;
        assert!(!fast.has_changed().unwrap() && slow.has_changed().unwrap());
        let newest = slow.borrow_and_update().clone().unwrap();
        assert_eq!(newest.number(), 3);
        assert!(!slow.has_changed().unwrap());
    }
}
