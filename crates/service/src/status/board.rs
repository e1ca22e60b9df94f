//! The statuses of this process, and when they are written.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use redeliver_core::failure::bounded_text;
use redeliver_core::{Clock, Headers, Output};
use redeliver_kafka::producer::ProduceError;
use redeliver_proto::Message as _;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::v1::{BreakerState, BreakerStatus};
use redeliver_store::Document as _;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::{HEARTBEAT, HOLDS_FOR, Status, topic};
use crate::Host;
use crate::host::lane_grace;
use crate::record_writer::RecordWriter;

/// The least time between two writes, however often breakers change.
const SPACING: Duration = Duration::from_secs(1);
/// How long the end of the process waits until its statuses are removed, at most.
const REMOVAL: Duration = Duration::from_secs(3);

/// The maximum size of an error code, in bytes: handlers choose them.
const MAX_CODE: usize = 120;

/// By pipeline.
type Breakers = BTreeMap<Arc<str>, BreakerStatus>;

/// What this process says about its circuit breakers. A task of its own writes it. Cheap to clone.
#[derive(Clone)]
pub struct StatusBoard {
    breakers: watch::Sender<Breakers>,
    clock: Arc<dyn Clock>,
}

impl StatusBoard {
    /// Notes the state of the breaker of a pipeline. `error_code`: that of the failure that opened it; `None` if it is as before.
    pub fn note(&self, pipeline: &Arc<str>, state: BreakerState, error_code: Option<&str>) {
        let is_closed = |state| state == BreakerState::Closed;
        self.breakers.send_modify(|breakers| {
            let status = breakers.entry(pipeline.clone()).or_default();
            if status.since.is_none() || is_closed(status.state()) != is_closed(state) {
                status.since = Some(to_timestamp(self.clock.now()));
            }
            if let Some(code) = error_code {
                status.error_code = bounded_text(code, MAX_CODE);
            }
            status.set_state(state);
        });
    }
}

impl Host {
    /// The statuses of this process. The first call starts the task that writes them.
    ///
    /// # Errors
    /// When the producer cannot be created.
    pub fn status_board(&mut self) -> Result<StatusBoard, ProduceError> {
        if let Some(board) = self.shared() {
            return Ok(board);
        }
        let board = StatusBoard {
            breakers: watch::Sender::default(),
            clock: self.clock.clone(),
        };
        let publisher = Publisher {
            writer: RecordWriter::new(&self.kafka, topic(&self.config).into())?,
            instance: self.config.instance.clone(),
            clock: self.clock.clone(),
            failures: Counter::default(),
            removal: lane_grace(&self.config).min(REMOVAL),
        };
        self.registry().register(
            "worker_status_write_failures",
            "Failed writes to the status topic: others do not know the circuit breakers of this process",
            publisher.failures.clone(),
        );
        let (noted, stop) = (board.breakers.subscribe(), self.tasks.shutdown().clone());
        self.tasks.spawn("status", publisher.run(noted, stop));
        Ok(self.share(board))
    }
}

struct Publisher {
    writer: RecordWriter,
    instance: String,
    clock: Arc<dyn Clock>,
    failures: Counter,
    removal: Duration,
}

impl Publisher {
    /// Writes statuses until `stop` is cancelled, and then removes them.
    async fn run(self, noted: watch::Receiver<Breakers>, stop: CancellationToken) -> Result<(), Infallible> {
        stop.run_until_cancelled(self.follow(noted.clone())).await;
        let breakers = noted.borrow().clone();
        let removed: Vec<Output> = breakers
            .keys()
            .map(|pipeline| self.record(pipeline, None))
            .collect();
        // If that fails, they expire.
        drop(timeout(self.removal, self.writer.write(&removed)).await);
        Ok(())
    }

    /// Writes each status when it changes, and all of them at each heartbeat.
    async fn follow(&self, mut noted: watch::Receiver<Breakers>) {
        let (mut written, mut heartbeat) = (Breakers::new(), Instant::now() + HEARTBEAT);
        let mut has_failed = false;
        loop {
            let breakers = noted.borrow_and_update().clone();
            let changed = breakers
                .iter()
                .filter(|(pipeline, status)| written.get(*pipeline) != Some(*status));
            let records = changed.map(|(pipeline, status)| self.record(pipeline, Some(status)));
            match self.writer.write(&records.collect::<Vec<_>>()).await {
                Ok(()) => (written, has_failed) = (breakers, false),
                Err(error) => {
                    self.failures.inc();
                    // Once: an installation can do without the topic.
                    if !std::mem::replace(&mut has_failed, true) {
                        let topic = &*self.writer.topic;
                        tracing::warn!(topic, %error, "cannot write the states of circuit breakers; retrying");
                    }
                }
            }
            sleep(SPACING).await;
            // It ends with a change or in time. Another change must not delay the heartbeat.
            let _ = timeout_at(heartbeat, noted.changed()).await;
            if Instant::now() >= heartbeat {
                heartbeat = Instant::now() + HEARTBEAT;
                written.clear();
            }
        }
    }

    /// The record of a status; `None` removes it.
    fn record(&self, pipeline: &str, status: Option<&BreakerStatus>) -> Output {
        let status = status.map(|status| BreakerStatus {
            expires: Some(to_timestamp(self.clock.now().after(HOLDS_FOR))),
            ..status.clone()
        });
        Output {
            topic: self.writer.topic.clone(),
            partition: Some(0),
            key: Some(Status::record_key(&(pipeline.to_owned(), self.instance.clone())).into()),
            value: status.map(|status| status.encode_to_vec().into()),
            headers: Headers::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use redeliver_core::{ManualClock, Timestamp};
    use redeliver_proto::convert::time;

    use super::*;

    #[test]
    fn time_is_kept_until_breaker_closes() {
        use BreakerState::{Closed, HalfOpen, Open};
        let clock = Arc::new(ManualClock::new(Timestamp::from_millis(0)));
        let board = StatusBoard {
            breakers: watch::Sender::default(),
            clock: clock.clone(),
        };
        let docs = Arc::from("docs");
        for (now, state, code, expected) in [
            (1, Closed, None, (1, "")),
            (2, Open, Some("http.503"), (2, "http.503")),
            (3, HalfOpen, None, (2, "http.503")),
            (4, Open, Some("http.timeout"), (2, "http.timeout")),
            (5, HalfOpen, None, (2, "http.timeout")),
            (6, Closed, Some(""), (6, "")),
            (7, Closed, Some(""), (6, "")),
        ] {
            clock.set(Timestamp::from_millis(now));
            board.note(&docs, state, code);
            let noted = board.breakers.borrow()[&docs].clone();
            let since = time(noted.since).unwrap().as_millis();
            assert_eq!((since, &*noted.error_code), expected, "{now}");
            assert_eq!(noted.state(), state);
        }
    }
}
