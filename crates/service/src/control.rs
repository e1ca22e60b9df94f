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
//!
//! How the topic is followed and changed is in [`crate::followed`].
//!
//! A process waits for [`Host::control`] before it does anything that can be paused. So it never runs what was paused before it
//! started. If the topic cannot be read later, what it contained last applies, and readiness and a metric say so. What has a value that a process cannot
//! read, for example because a newer version has written it, is paused, and reported. Names of an unknown kind are only reported.

pub mod change;
pub mod name;
pub mod snapshot;
pub mod value;

use std::io;
use std::sync::Arc;

pub use name::ControlName;
pub use snapshot::Snapshot;

use crate::followed::Followed;
use crate::host::Host;

/// The transactional id of all writers of a control topic. It depends on nothing else, not even on `kafka.id_prefix`: writers with different ids
/// would not fence each other.
#[must_use]
pub fn transactional_id(topic: &str) -> String {
    format!("redeliver-control-{topic}")
}

/// What the control topic contains, as far as this process has read it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Control(Followed<Snapshot>);

impl Control {
    /// What applies now. Does not block. The same [`Arc`] is returned until something changes.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.0.contents().unwrap_or_default()
    }

    /// Waits until this process has read at least this revision, so that what it says next agrees with it. Gives up after a while: the change
    /// is in the topic in any case.
    pub async fn until_read(&self, name: &ControlName, revision: u64) {
        let has_read = |snapshot: &Snapshot| {
            let value = snapshot.get(name);
            value.is_some_and(|value| value.revision >= revision)
        };
        self.0.until_read(has_read).await;
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
        let topic = self.config.control_topic();
        let followed = self.follow(&topic)?;
        if !followed.until_known(self.tasks.shutdown()).await {
            return Ok(None);
        }
        Ok(Some(self.control.insert(Control(followed)).clone()))
    }
}
