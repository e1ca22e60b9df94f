//! Clients that are used by one loop.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Credentials, Owner};
use crate::client::KafkaSettings;

/// Tells a loop when to replace its clients. The default never does.
#[derive(Default)]
pub(crate) struct Renewal(Option<Member>);

struct Member {
    credentials: Credentials,
    versions: Arc<Versions>,
}

/// Versions of credentials.
struct Versions {
    name: String,
    /// What the clients have to use.
    required: AtomicU64,
    /// What the clients use.
    used: AtomicU64,
    /// What the clients use that are known to work.
    working: AtomicU64,
}

impl Renewal {
    /// The renewal of this owner; `name` is for logs. It is never due if the credentials of the process do not change.
    pub(crate) fn new(settings: &KafkaSettings, name: impl Into<String>) -> Self {
        Self(settings.credentials.clone().map(|credentials| {
            let version = credentials.version();
            let versions = Arc::new(Versions {
                name: name.into(),
                required: AtomicU64::new(version),
                used: AtomicU64::new(version),
                working: AtomicU64::new(version),
            });
            let owner: Arc<dyn Owner> = versions.clone();
            credentials.add(Arc::downgrade(&owner));
            Member {
                credentials,
                versions,
            }
        }))
    }

    /// Whether the clients have to be replaced now.
    pub(crate) fn is_due(&self) -> bool {
        let Some(Member { versions, .. }) = &self.0 else {
            return false;
        };
        versions.required.load(Ordering::Acquire) > versions.used.load(Ordering::Acquire)
    }

    /// Call this before new clients are created, for whatever reason.
    pub(crate) fn begin(&self) {
        if let Some(Member {
            credentials,
            versions,
        }) = &self.0
        {
            versions.used.store(credentials.version(), Ordering::Release);
        }
    }

    /// New clients could not be created, so the previous ones stay in use. The owner is asked again after a while.
    pub(crate) fn failed(&self) {
        if let Some(Member { versions, .. }) = &self.0 {
            let working = versions.working.load(Ordering::Acquire);
            versions.used.store(working, Ordering::Release);
            versions.required.store(working, Ordering::Release);
        }
    }

    /// The new clients work, so the next owner may begin.
    pub(crate) fn end(&self) {
        if let Some(Member { versions, .. }) = &self.0 {
            let used = versions.used.load(Ordering::Acquire);
            versions.working.store(used, Ordering::Release);
        }
    }
}

impl Owner for Versions {
    fn name(&self) -> &str {
        &self.name
    }

    fn replace(&self, version: u64) {
        self.required.fetch_max(version, Ordering::AcqRel);
    }

    fn is_replacing(&self) -> bool {
        !self.has(self.required.load(Ordering::Acquire))
    }

    fn has(&self, version: u64) -> bool {
        self.working.load(Ordering::Acquire) >= version
    }
}
