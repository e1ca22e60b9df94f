//! Follows the topics of the crawl: tells what happens, and lets others wait for what is to happen.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redeliver_core::Pipeline;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::reader::{ReadError, TopicTail};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::ledger::Ledger;
use crate::site::SiteMap;

/// The ledger as it grows.
#[derive(Debug, Default)]
pub struct Watched {
    ledger: Mutex<Ledger>,
    changed: Notify,
}

impl Watched {
    /// What was seen so far.
    pub fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until this holds of the ledger.
    pub async fn until(&self, mut holds: impl FnMut(&Ledger) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // From here on no change is missed.
            changed.as_mut().enable();
            if holds(&self.ledger()) {
                return;
            }
            changed.await;
        }
    }
}

/// Reads the topics.
pub struct Watch {
    tail: TopicTail,
    pipeline: Arc<Pipeline>,
    watched: Arc<Watched>,
    began: Instant,
    /// What is told is about its pages.
    map: SiteMap,
}

impl Watch {
    /// At the beginning of all topics of the pipeline.
    ///
    /// # Errors
    /// When the broker does not answer or a topic is missing.
    pub fn new(
        kafka: &KafkaSettings,
        pipeline: Arc<Pipeline>,
        watched: Arc<Watched>,
        map: SiteMap,
    ) -> Result<Self, ReadError> {
        let topics: Vec<Arc<str>> = pipeline.topics().into_iter().map(|(topic, _)| topic).collect();
        Ok(Self {
            tail: TopicTail::new(kafka, &topics)?,
            pipeline,
            watched,
            began: Instant::now(),
            map,
        })
    }

    /// Tells what happens until the token is cancelled. Blocks its thread.
    ///
    /// # Errors
    /// When the broker refuses.
    pub fn run(mut self, ended: &CancellationToken) -> Result<(), ReadError> {
        let roles = self.pipeline.topics();
        while !ended.is_cancelled() {
            let Some(record) = self.tail.next(Duration::from_millis(100))? else {
                continue;
            };
            let role = roles.iter().find(|(topic, _)| *topic == record.position.topic);
            let Some((_, role)) = role else { continue };
            let told = self.watched.ledger().observe(&self.pipeline, *role, &record);
            self.watched.changed.notify_waiters();
            if let Some((page, told)) = told
                && let Some(name) = self.map.name_of(&page)
            {
                let at = self.began.elapsed().as_secs_f64();
                println!("{at:6.1}s  {name:<18} {told}");
            }
        }
        Ok(())
    }
}
