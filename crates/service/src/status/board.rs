//! The statuses of this process, and when they are written.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use redeliver_core::failure::bounded_text;
use redeliver_core::{Clock, Headers, Output, Timestamp};
use redeliver_kafka::producer::ProduceError;
use redeliver_proto::Message as _;
use redeliver_proto::convert::{time, to_timestamp};
use redeliver_proto::v1::{BreakerState, BreakerStatus};
use redeliver_runtime::health::{self, Health};
use redeliver_store::Document as _;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::{HEARTBEAT, HOLDS_FOR, Status};
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
type Statuses = BTreeMap<Arc<str>, BreakerStatus>;

/// Whether this process has partitions of the pipeline.
type HasPartitions = Arc<dyn Fn() -> bool + Send + Sync>;

#[derive(Clone)]
struct Noted {
    status: BreakerStatus,
    has_partitions: HasPartitions,
}

/// What this process says about its circuit breakers. A task of its own writes it, and the readiness report shows it. Cheap to clone.
#[derive(Clone)]
pub struct StatusBoard {
    noted: watch::Sender<BTreeMap<Arc<str>, Noted>>,
    clock: Arc<dyn Clock>,
    health: Health,
}

/// The status of the breaker of a pipeline, which is closed at first.
pub struct BreakerNotes {
    board: StatusBoard,
    pipeline: Arc<str>,
}

impl StatusBoard {
    /// Begins with the status of a pipeline. Without partitions of it, an open breaker is not written: no call will close it.
    pub fn begin(
        &self,
        pipeline: Arc<str>,
        has_partitions: impl Fn() -> bool + Send + Sync + 'static,
    ) -> BreakerNotes {
        let mut status = BreakerStatus {
            since: Some(to_timestamp(self.clock.now())),
            ..BreakerStatus::default()
        };
        status.set_state(BreakerState::Closed);
        self.show(&pipeline, &status);
        let noted = Noted {
            status,
            has_partitions: Arc::new(has_partitions),
        };
        self.noted
            .send_modify(|all| drop(all.insert(pipeline.clone(), noted)));
        BreakerNotes {
            board: self.clone(),
            pipeline,
        }
    }

    fn show(&self, pipeline: &str, status: &BreakerStatus) {
        let breaker = health::Breaker {
            state: status.state().name().unwrap_or_default(),
            since: time(status.since).and_then(Timestamp::to_rfc3339),
            error_code: status.error_code.clone(),
        };
        self.health.show_breaker(pipeline, breaker);
    }
}

impl BreakerNotes {
    /// Notes a state. `error_code`: that of the failure that opened it; `None` if it is as before.
    pub fn note(&self, state: BreakerState, error_code: Option<&str>) {
        let is_closed = |state| state == BreakerState::Closed;
        self.board.noted.send_modify(|all| {
            let Some(Noted { status, .. }) = all.get_mut(&self.pipeline) else {
                return;
            };
            if is_closed(status.state()) != is_closed(state) {
                status.since = Some(to_timestamp(self.board.clock.now()));
            }
            if let Some(code) = error_code {
                status.error_code = bounded_text(code, MAX_CODE);
            }
            status.set_state(state);
            self.board.show(&self.pipeline, status);
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
            noted: watch::Sender::default(),
            clock: self.clock.clone(),
            health: self.health.clone(),
        };
        let publisher = Publisher {
            writer: RecordWriter::new(&self.kafka, self.config.status_topic().into())?,
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
        let (noted, stop) = (board.noted.subscribe(), self.tasks.shutdown().clone());
        self.tasks.spawn("status", publisher.run(noted, stop));
        Ok(self.share(board))
    }
}

/// The statuses that others may rely on.
fn current(noted: &BTreeMap<Arc<str>, Noted>) -> Statuses {
    let holds = noted
        .iter()
        .filter(|(_, noted)| noted.status.state() == BreakerState::Closed || (noted.has_partitions)());
    holds
        .map(|(pipeline, noted)| (pipeline.clone(), noted.status.clone()))
        .collect()
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
    async fn run(
        self,
        mut noted: watch::Receiver<BTreeMap<Arc<str>, Noted>>,
        stop: CancellationToken,
    ) -> Result<(), Infallible> {
        let mut written = Statuses::new();
        stop.run_until_cancelled(self.follow(&mut noted, &mut written))
            .await;
        let removed: Vec<Output> = written
            .keys()
            .map(|pipeline| self.record(pipeline, None))
            .collect();
        // If that fails, they expire.
        drop(timeout(self.removal, self.writer.write(&removed)).await);
        Ok(())
    }

    /// Writes each status when it changes, and all of them at each heartbeat.
    async fn follow(&self, noted: &mut watch::Receiver<BTreeMap<Arc<str>, Noted>>, written: &mut Statuses) {
        let (mut heartbeat, mut is_due) = (Instant::now() + HEARTBEAT, false);
        let mut has_failed = false;
        loop {
            let statuses = current(&noted.borrow_and_update());
            let records = self.changes(written, &statuses, is_due);
            // Also if the write fails, because some of the records may have been written.
            written.extend(statuses.clone());
            match self.writer.write(&records).await {
                Ok(()) => (*written, is_due, has_failed) = (statuses, false, false),
                Err(error) => {
                    is_due = true;
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
                is_due = true;
            }
        }
    }

    /// What has to be written: what differs, or everything, and that others are gone.
    fn changes(&self, written: &Statuses, statuses: &Statuses, everything: bool) -> Vec<Output> {
        let is_new = |(pipeline, status): &(&Arc<str>, &BreakerStatus)| {
            everything || written.get(*pipeline) != Some(*status)
        };
        let new = statuses.iter().filter(is_new);
        let gone = written
            .keys()
            .filter(|pipeline| !statuses.contains_key(*pipeline));
        new.map(|(pipeline, status)| self.record(pipeline, Some(status)))
            .chain(gone.map(|pipeline| self.record(pipeline, None)))
            .collect()
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
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use redeliver_core::ManualClock;

    #[test]
    fn time_is_kept_until_breaker_closes() {
        use BreakerState::{Closed, HalfOpen, Open};
        let clock = Arc::new(ManualClock::new(Timestamp::from_millis(1)));
        let board = StatusBoard {
            noted: watch::Sender::default(),
            clock: clock.clone(),
            health: Health::new(),
        };
        let has_partitions = Arc::new(AtomicBool::new(true));
        let docs = board.begin("docs".into(), {
            let has_partitions = has_partitions.clone();
            move || has_partitions.load(Ordering::SeqCst)
        });
        for (now, state, code, expected, name) in [
            (2, Open, Some("http.503"), (2, "http.503"), "open"),
            (3, HalfOpen, None, (2, "http.503"), "half_open"),
            (4, Open, Some("http.timeout"), (2, "http.timeout"), "open"),
            (5, HalfOpen, None, (2, "http.timeout"), "half_open"),
            (6, Closed, Some(""), (6, ""), "closed"),
            (7, Closed, Some(""), (6, ""), "closed"),
            (8, Open, Some("http.503"), (8, "http.503"), "open"),
        ] {
            clock.set(Timestamp::from_millis(now));
            docs.note(state, code);
            let noted = current(&board.noted.borrow())["docs"].clone();
            let since = time(noted.since).unwrap().as_millis();
            assert_eq!((since, &*noted.error_code), expected, "{now}");
            assert_eq!(noted.state(), state);
            let shown = board.health.report().breakers["docs"].clone();
            let since = Timestamp::from_millis(since).to_rfc3339();
            assert_eq!(
                (shown.state, shown.since, shown.error_code),
                (name.to_owned(), since, noted.error_code)
            );
        }
        // Others have its partitions: it never closes here.
        has_partitions.store(false, Ordering::SeqCst);
        assert_eq!(current(&board.noted.borrow()), Statuses::new());
        docs.note(Closed, Some(""));
        assert_eq!(current(&board.noted.borrow()).len(), 1);
    }
}
