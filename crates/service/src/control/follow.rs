//! Follows the control topic.
//!
//! The topic is small and changes rarely, so it is asked for its end twice a second. Every error is then an error of a request,
//! and it is certain how old the state is. After an error, and when the topic was created again, everything is read again. What
//! applied before applies until that is complete.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use redeliver_core::error_chain::error_chain;
use redeliver_core::wait::LogThrottle;
use redeliver_kafka::reader::{ReadError, TopicReader};
use redeliver_kafka::{KafkaSettings, TopicId, TopicState, TopicWatch};
use redeliver_runtime::health::Part;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::ControlMetrics;
use super::snapshot::{Problem, Snapshot};

/// The time between two looks at the end of the topic.
const POLL: Duration = Duration::from_millis(500);
/// How long one read of the topic may take.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// How many problems readiness names.
const NAMED: usize = 3;

/// The follower, on a thread of its own.
pub(super) struct Follow {
    pub(super) kafka: KafkaSettings,
    pub(super) topic: Arc<str>,
    pub(super) watch: TopicWatch,
    pub(super) part: Part,
    pub(super) metrics: ControlMetrics,
    pub(super) snapshot: watch::Sender<Option<Arc<Snapshot>>>,
    /// When to look at once.
    pub(super) woken: Receiver<()>,
    pub(super) stop: CancellationToken,
}

/// What was read of one topic since its beginning.
struct Session {
    reader: TopicReader,
    /// The topic; `None` if it is not known yet.
    id: Option<TopicId>,
    snapshot: Snapshot,
}

impl Follow {
    /// Follows the topic until the process shuts down.
    pub(super) fn run(self) {
        let (mut session, mut log) = (None, LogThrottle::default());
        self.part.not_ready("reading the control topic");
        while !self.stop.is_cancelled() {
            match self.read(&mut session) {
                Ok(()) => {
                    self.metrics.readable.set(1);
                    self.set_ready();
                    log = LogThrottle::default();
                }
                Err(error) => {
                    // Read again from the beginning: after an error, the topic may be another one.
                    session = None;
                    self.report(&error, &mut log);
                }
            }
            match self.woken.recv_timeout(POLL) {
                Ok(()) | Err(RecvTimeoutError::Timeout) => {}
                // Nobody is interested in the topic any more, until the process shuts down.
                Err(RecvTimeoutError::Disconnected) => std::thread::park_timeout(POLL),
            }
        }
    }

    /// Reads the topic to its end.
    fn read(&self, session: &mut Option<Session>) -> Result<(), ReadError> {
        let id = match self.watch.state(&self.topic) {
            TopicState::Exists { id, .. } => id,
            TopicState::Unknown | TopicState::Missing { .. } => None,
        };
        if let Some(known) = session {
            let is_other = matches!((known.id, id), (Some(known), Some(now)) if known != now);
            let end = known.reader.high_watermark(&self.topic, 0)?;
            let position = known.reader.position(&self.topic, 0).unwrap_or(0);
            if is_other || end < position {
                *session = None;
            } else {
                known.id = known.id.or(id);
                if end == position {
                    return Ok(());
                }
            }
        }
        let is_new = session.is_none();
        let known = match session {
            Some(known) => known,
            None => session.insert(Session {
                reader: TopicReader::of_partition(&self.kafka, &self.topic, 0, None)?,
                id,
                snapshot: Snapshot::default(),
            }),
        };
        let Session { reader, snapshot, .. } = known;
        let mut has_changed = is_new;
        reader.read_to_end(READ_TIMEOUT, |record| {
            snapshot.apply(&record);
            has_changed = true;
        })?;
        if has_changed {
            self.publish(snapshot);
        }
        Ok(())
    }

    /// Makes a state apply, if it differs from what applies.
    fn publish(&self, snapshot: &Snapshot) {
        let before = self.snapshot.borrow().clone();
        if before.as_deref() == Some(snapshot) {
            return;
        }
        self.metrics
            .values
            .set(i64::try_from(snapshot.values().count()).unwrap_or(i64::MAX));
        self.metrics
            .problems
            .set(i64::try_from(snapshot.problems().count()).unwrap_or(i64::MAX));
        log_changes(&self.topic, before.as_deref(), snapshot);
        self.snapshot.send_replace(Some(Arc::new(snapshot.clone())));
    }

    fn set_ready(&self) {
        let snapshot = self.snapshot.borrow().clone();
        let problems: Vec<_> = snapshot.iter().flat_map(|snapshot| snapshot.problems()).collect();
        if problems.is_empty() {
            return self.part.ready();
        }
        let named = problems.iter().take(NAMED);
        let named: Vec<String> = named.map(|(key, problem)| format!("`{key}` {problem}")).collect();
        let others = match problems.len().saturating_sub(NAMED) {
            0 => String::new(),
            others => format!("; and {others} more"),
        };
        self.part
            .ready_but(format!("in the control topic, {}{others}", named.join("; ")));
    }

    fn report(&self, error: &ReadError, log: &mut LogThrottle) {
        let mut reason = error_chain(error);
        if matches!(error, ReadError::Missing(_)) {
            // Kafka does not tell these apart.
            reason += ", or this process may not describe it";
        }
        self.metrics.readable.set(0);
        let applies = self.snapshot.borrow().is_some();
        if log.should_log() {
            tracing::warn!(
                topic = &*self.topic,
                reason,
                applies,
                "cannot read the control topic; retrying"
            );
        }
        if applies {
            let note =
                format!("the control topic cannot be read, so what it contained last applies: {reason}");
            self.part.ready_but(note);
        } else {
            self.part
                .not_ready(format!("cannot read the control topic: {reason}"));
        }
    }
}

/// Logs what has changed. If values are gone, the topic was deleted: what was paused by it runs again.
fn log_changes(topic: &str, before: Option<&Snapshot>, now: &Snapshot) {
    let nothing = Snapshot::default();
    let known = before.unwrap_or(&nothing);
    for (name, value) in now.values() {
        if known.get(name) != Some(value) {
            tracing::info!(
                %name, revision = value.revision, by = value.changed_by, why = value.why, desired = ?value.desired,
                "control value"
            );
        }
    }
    for name in lost(known, now) {
        tracing::error!(topic, %name, "a control value is gone, and the configuration applies again");
    }
    let reported: BTreeMap<String, Problem> = known.problems().collect();
    for (key, problem) in now.problems() {
        if reported.get(&key) == Some(&problem) {
            continue;
        }
        match problem {
            Problem::Unreadable(_) => {
                tracing::error!(topic, key, %problem, "a control value cannot be read");
            }
            Problem::Name | Problem::Newer => {
                tracing::warn!(topic, key, %problem, "a control value is not completely obeyed");
            }
        }
    }
}

/// The names whose values are gone or older than before. No change does that: a reset leaves a value. One that cannot be read is
/// a problem of its own.
fn lost(before: &Snapshot, now: &Snapshot) -> Vec<String> {
    let before = before.values();
    let lost = before.filter(|(name, value)| match now.get(name) {
        Some(now) => now.revision < value.revision,
        None => !now.contains(name),
    });
    lost.map(|(name, _)| name.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::super::snapshot::tests::{paused, record};
    use super::*;

    #[test]
    fn a_value_that_is_gone_or_older_is_lost() {
        let with = |values: &[(&str, u64)]| {
            let mut snapshot = Snapshot::default();
            for (name, revision) in values {
                snapshot.apply(&record(0, name, Some(paused(*revision).encode())));
            }
            snapshot
        };
        let before = with(&[("app/a", 2), ("app/b", 2), ("app/c", 2)]);
        let now = with(&[("app/a", 2), ("app/b", 1), ("app/d", 1)]);
        assert_eq!(lost(&before, &now), ["app/b", "app/c"]);
        assert!(lost(&now, &with(&[("app/a", 3), ("app/b", 1), ("app/d", 2)])).is_empty());
        let mut unreadable = before.clone();
        unreadable.apply(&record(1, "app/a", Some(Bytes::from_static(b"\xff"))));
        assert!(lost(&before, &unreadable).is_empty());
    }
}
