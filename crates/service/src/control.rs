//! Control: what operators have paused or limited at run time, for all services.
//!
//! The truth is the control topic: compacted, with one partition. Its keys are names such as `app/sms`, its values the desired
//! state, and who changed it, when and why. What a process does about it is up to its service.
//!
//! | module | contents |
//! |---|---|
//! | [`name`] | the names of what can be controlled |
//! | [`value`] | values: reading and writing them |
//! | [`snapshot`] | what the topic contains |
//! | `follow` | following the topic |
//! | [`change`] | changes, which cannot overlap |
//!
//! A process waits for [`Host::control`] before it does anything that can be paused. So it never runs what was paused before it
//! started. If the topic cannot be read later, what it contained last applies, and readiness and a metric say so. What has a value that a process cannot
//! read, for example because a newer version has written it, is paused, and reported. Names of an unknown kind are only reported.

pub mod change;
mod follow;
pub mod name;
pub mod snapshot;
pub mod value;

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

pub use name::ControlName;
pub use snapshot::Snapshot;

use self::follow::Follow;
use crate::host::Host;

/// The transactional id of all writers of a control topic. It depends on nothing else, not even on `kafka.id_prefix`: writers with different ids
/// would not fence each other.
#[must_use]
pub fn transactional_id(topic: &str) -> String {
    format!("redeliver-control-{topic}")
}

/// How long a caller waits until its own process has read a change.
const READ_OWN_CHANGE: Duration = Duration::from_secs(2);

/// What the control topic contains, as far as this process has read it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Control {
    snapshot: watch::Receiver<Option<Arc<Snapshot>>>,
    /// Makes the follower look at once.
    wake: SyncSender<()>,
}

impl Control {
    /// What applies now. Does not block. The same [`Arc`] is returned until something changes.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.borrow().clone().unwrap_or_default()
    }

    /// Waits until this process has read at least this revision, so that what it says next agrees with it. Gives up after a while: the change
    /// is in the topic in any case.
    pub async fn until_read(&self, name: &ControlName, revision: u64) {
        // Full: the follower is about to look.
        let _ = self.wake.try_send(());
        let mut snapshot = self.snapshot.clone();
        let has_read = |snapshot: &Option<Arc<Snapshot>>| {
            let value = snapshot.as_ref().and_then(|snapshot| snapshot.get(name));
            value.is_some_and(|value| value.revision >= revision)
        };
        // Fails only at the end of the process.
        drop(tokio::time::timeout(READ_OWN_CHANGE, snapshot.wait_for(has_read)).await);
    }
}

/// The metrics of control.
#[derive(Clone, Debug, Default)]
struct ControlMetrics {
    readable: Gauge,
    values: Gauge,
    problems: Gauge,
}

impl ControlMetrics {
    fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "control_readable",
            "1 if the control topic was read to its end at the last attempt; at 0, what it contained last applies",
            metrics.readable.clone(),
        );
        registry.register(
            "control_values",
            "Values of the control topic that this process knows",
            metrics.values.clone(),
        );
        registry.register(
            "control_problems",
            "Values of the control topic that this process does not know or cannot read, in part or completely",
            metrics.problems.clone(),
        );
        metrics
    }
}

impl Host {
    /// What operators have paused or limited. The first call follows the control topic and waits until it was read to its end; `None` if the
    /// process shuts down before that. Call it after [`Host::ensure_topics`] and before anything is started that can be paused.
    ///
    /// # Errors
    /// When a thread or the watch of the topics cannot be started.
    pub async fn control(&mut self) -> io::Result<Option<Control>> {
        if let Some(control) = &self.control {
            return Ok(Some(control.clone()));
        }
        let (sender, mut snapshot) = watch::channel(None);
        let (wake, woken) = sync_channel(1);
        let follow = Follow {
            kafka: self.kafka.clone(),
            topic: self.config.control_topic().into(),
            watch: self.topic_watch()?,
            part: self.health.part("control"),
            metrics: ControlMetrics::register(&mut self.registry()),
            snapshot: sender,
            woken,
            stop: self.tasks.shutdown().clone(),
        };
        self.tasks.spawn_thread("control", move || {
            follow.run();
            Ok::<(), io::Error>(())
        })?;
        let stop = self.tasks.shutdown().clone();
        let is_read = tokio::select! {
            read = snapshot.wait_for(Option::is_some) => read.is_ok(),
            () = stop.cancelled() => false,
        };
        if !is_read {
            return Ok(None);
        }
        let control = Control { snapshot, wake };
        Ok(Some(self.control.insert(control).clone()))
    }
}
