//! Clients that several threads share.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::{Credentials, Owner};
use crate::client::KafkaSettings;

/// How long previous clients may still be used.
const MAX_USE: Duration = Duration::from_secs(30);
/// How often that is checked.
const ROUND: Duration = Duration::from_millis(20);

/// Clients that several threads share, and that are replaced without waiting for their next use.
pub struct Replaceable<T> {
    current: RwLock<Arc<T>>,
    version: AtomicU64,
    name: &'static str,
    create: Box<dyn Fn() -> Result<T, String> + Send + Sync>,
    close: fn(&T),
}

impl<T: Send + Sync + 'static> Replaceable<T> {
    /// Creates the first clients. `create` is called again when they have to be replaced. `name` is for logs.
    ///
    /// # Errors
    /// That of `create`.
    pub fn new<E: Display>(
        settings: &KafkaSettings,
        name: &'static str,
        create: impl Fn() -> Result<T, E> + Send + Sync + 'static,
    ) -> Result<Arc<Self>, E> {
        Self::with_closing(settings, name, create, |_| ())
    }

    /// As [`Replaceable::new`]. `close` is called before replaced clients are dropped. It may block.
    ///
    /// # Errors
    /// That of `create`.
    pub(crate) fn with_closing<E: Display>(
        settings: &KafkaSettings,
        name: &'static str,
        create: impl Fn() -> Result<T, E> + Send + Sync + 'static,
        close: fn(&T),
    ) -> Result<Arc<Self>, E> {
        // Before the clients are created. If the credentials change meanwhile, the clients count as outdated.
        let version = settings.credentials.as_ref().map_or(0, Credentials::version);
        let shared = Arc::new(Self {
            current: RwLock::new(Arc::new(create()?)),
            version: AtomicU64::new(version),
            name,
            create: Box::new(move || create().map_err(|error| error.to_string())),
            close,
        });
        if let Some(credentials) = &settings.credentials {
            let owner: Weak<Self> = Arc::downgrade(&shared);
            credentials.add(owner);
        }
        Ok(shared)
    }
}

impl<T> Replaceable<T> {
    /// The current clients. Do not keep them for longer than one operation takes.
    #[must_use]
    pub fn get(&self) -> Arc<T> {
        self.current
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl<T: Send + Sync> Owner for Replaceable<T> {
    fn name(&self) -> &str {
        self.name
    }

    fn replace(&self, version: u64) {
        let new = match (self.create)() {
            Ok(new) => Arc::new(new),
            Err(error) => {
                tracing::warn!(owner = self.name, error, "cannot create Kafka clients; retrying");
                return;
            }
        };
        let mut previous = {
            let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *current, new)
        };
        self.version.fetch_max(version, Ordering::AcqRel);
        (self.close)(&previous);
        // Dropping a client takes time. So this thread drops it, after all others have finished with it.
        let began = Instant::now();
        while let Err(used) = Arc::try_unwrap(previous) {
            if began.elapsed() >= MAX_USE {
                return;
            }
            previous = used;
            thread::park_timeout(ROUND);
        }
    }

    /// Never, as [`Owner::replace`] returns when it has finished or failed.
    fn is_replacing(&self) -> bool {
        false
    }

    fn has(&self, version: u64) -> bool {
        self.version.load(Ordering::Acquire) >= version
    }
}
