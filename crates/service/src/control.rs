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
//! | [`change`] | changes, which cannot overlap |
//! | [`settings`] | what the configuration says about applications |
//! | [`operations`] | what callers of an API may see and change |
//! | [`grpc`] | `redeliver.v1.ControlService`, for every service that offers it |
//!
//! How the topic is followed and changed is in [`redeliver_store`].
//!
//! A process waits for [`Host::control`] before it does anything that can be paused. So it never runs work
//! that was paused before it started. If the topic cannot be read later, what it contained last applies, and
//! readiness and a metric say so. What has a value that a process cannot read, for example because another
//! version has written it, is paused, and reported. Names of an unknown kind are only reported.

pub mod change;
pub mod error;
pub mod grpc;
pub mod name;
pub mod operations;
pub mod settings;
pub mod snapshot;
pub mod value;

use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use change::ChangeRequest;
pub use error::{ControlError, ControlField};
pub use name::ControlName;
pub use operations::Controls;
use redeliver_kafka::Waker;
use redeliver_store::{Replica, Writer};
pub use snapshot::Snapshot;
use tokio::sync::watch;

use crate::host::Host;

/// The transactional id of all writers of a control topic. It depends only on that, not even on
/// `kafka.id_prefix`: writers with different ids would not fence each other.
#[must_use]
pub fn transactional_id(topic: &str) -> String {
    format!("redeliver-control-{topic}")
}

/// What the control topic contains, as far as this process has read it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Control {
    replica: Replica<Snapshot>,
    /// The lanes that look at it.
    wakers: Arc<Mutex<Vec<Waker>>>,
}

impl Control {
    fn new(replica: Replica<Snapshot>) -> Self {
        Self {
            replica,
            wakers: Arc::default(),
        }
    }

    /// A control topic without a follower, for tests: it has the contents that the returned sender is given.
    #[must_use]
    pub fn fixed(contents: Snapshot) -> (Self, watch::Sender<Option<Arc<Snapshot>>>) {
        let (replica, sender) = Replica::fixed(Some(contents));
        (Self::new(replica), sender)
    }

    fn writer(&self, host: &Host) -> Writer<ChangeRequest> {
        let topic = host.config.control_topic();
        Writer::new(
            &host.kafka,
            &transactional_id(&topic),
            &topic,
            self.replica.clone(),
        )
    }

    /// The current state. Does not block. The same [`Arc`] is returned until something changes.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.replica.state().unwrap_or_default()
    }

    /// Whether the topic was read to its end, so that it is known what applies.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.replica.state().is_some()
    }

    /// Why what applies may be older than this; `None` if the topic was read to its end since.
    #[must_use]
    pub fn problem(&self, max_age: Duration) -> Option<Arc<str>> {
        self.replica.problem(max_age)
    }

    /// Completes with each change of what applies. Fails at the end of the process.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<Option<Arc<Snapshot>>> {
        self.replica.changes()
    }

    /// Wakes a lane with each change of what applies.
    pub fn wake(&self, waker: &Waker) {
        self.wakers().push(waker.clone());
    }

    fn wakers(&self) -> MutexGuard<'_, Vec<Waker>> {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn wake_all(self) -> Result<(), Infallible> {
        let mut changes = self.changes();
        while changes.changed().await.is_ok() {
            self.wakers().iter().for_each(Waker::wake);
        }
        Ok(())
    }

    /// Waits until this process has read at least this revision, so that what it says next agrees with it. Gives up after a while: the change
    /// is in the topic in any case.
    pub async fn wait_applied(&self, name: &ControlName, revision: u64) {
        let has_read = |snapshot: &Snapshot| {
            let value = snapshot.table.get(name);
            value.is_some_and(|value| value.revision >= revision)
        };
        self.replica.wait_applied(has_read).await;
    }
}

impl Host {
    /// The controls. The first call follows the control topic and waits until it was read to its end; `None`
    /// if the process shuts down before that. Call it after [`Host::ensure_topics`] and before anything is
    /// started that can be paused.
    ///
    /// # Errors
    /// When a thread or the watch of the topics cannot be started.
    pub async fn control(&mut self) -> io::Result<Option<Control>> {
        let control = match self.shared() {
            Some(control) => control,
            None => {
                let replica = self.follow(&self.config.control_topic())?;
                self.add_control(replica)
            }
        };
        let is_known = control.replica.wait_known(self.tasks.shutdown()).await;
        Ok(is_known.then_some(control))
    }

    /// The same for a process that runs nothing that can be paused: it does not wait for the topic, and is ready without it.
    ///
    /// # Errors
    /// See [`Host::control`].
    pub fn control_aside(&mut self) -> io::Result<Control> {
        if let Some(control) = self.shared() {
            return Ok(control);
        }
        let replica = self.follow_aside(&self.config.control_topic())?;
        Ok(self.add_control(replica))
    }

    /// Names in the readiness of the process what is paused of what it runs, without making it not ready. `paused` decides what that is.
    /// Call it after [`Host::control`].
    pub fn report_paused(
        &mut self,
        part: &str,
        title: &'static str,
        paused: impl Fn(&Snapshot) -> Vec<String> + Send + 'static,
    ) {
        let Some(control) = self.shared::<Control>() else {
            return;
        };
        let name = format!("paused-{part}");
        let part = self.health.part(name.as_str());
        let report = move |snapshot: &Snapshot| match paused(snapshot) {
            none if none.is_empty() => part.ready(),
            names => part.ready_but(format!("{title}: {}", names.join(", "))),
        };
        report(&control.snapshot());
        let mut changes = control.changes();
        self.tasks.spawn(name, async move {
            while changes.changed().await.is_ok() {
                report(&control.snapshot());
            }
            Ok::<(), Infallible>(())
        });
    }

    fn add_control(&mut self, replica: Replica<Snapshot>) -> Control {
        let control = Control::new(replica);
        self.tasks.spawn("control-changes", control.clone().wake_all());
        self.share(control)
    }
}
