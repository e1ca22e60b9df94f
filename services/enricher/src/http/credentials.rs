//! The headers and the connections of calls, which follow the files of the configuration.
//!
//! Changed files are used within seconds. After a call was refused, they are read at once, so that a change of
//! credentials costs no record an attempt.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;
use redeliver_runtime::watched_files::{self, WatchedFiles};
use reqwest::Url;
use reqwest::header::HeaderMap;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::client::{self, Clients};
use super::headers;
use super::settings::{HttpSettings, HttpSetupError};

/// How long a refused call waits for the check of the files.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct Credentials {
    headers: WatchedFiles<HeaderMap>,
    clients: WatchedFiles<Clients>,
    /// When the last check because of a refusal began. Locked during the check, so that there is one at a time.
    last_check: Mutex<Option<Instant>>,
}

/// What one call uses.
pub(super) struct InUse {
    pub(super) headers: Arc<HeaderMap>,
    pub(super) clients: Arc<Clients>,
}

impl InUse {
    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.headers, &other.headers) && Arc::ptr_eq(&self.clients, &other.clients)
    }
}

impl Credentials {
    pub(super) fn load(settings: &HttpSettings, url: &Url) -> Result<Self, HttpSetupError> {
        Ok(Self {
            headers: headers::load(settings)?,
            clients: client::load(settings, url)?,
            last_check: Mutex::default(),
        })
    }

    pub(super) fn in_use(&self) -> InUse {
        InUse {
            headers: self.headers.value(),
            clients: self.clients.value(),
        }
    }

    /// Credentials other than `refused`, if the files contain some that can be used. Calls that were refused before a check
    /// began share it.
    pub(super) async fn other_than(self: &Arc<Self>, refused: &InUse) -> Option<InUse> {
        let refused_at = Instant::now();
        let mut last_check = self.last_check.lock().await;
        let is_checked = last_check.is_some_and(|began| began >= refused_at);
        if self.in_use().is(refused) && !is_checked && self.has_files() {
            let (began, files) = (Instant::now(), self.clone());
            let checked = tokio::task::spawn_blocking(move || {
                files.headers.check_now();
                files.clients.check_now();
            });
            // A file on a server that does not answer must not keep the attempts.
            match tokio::time::timeout(CHECK_TIMEOUT, checked).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::error!(%error, "cannot check the files of an endpoint"),
                Err(_) => tracing::warn!(
                    "checking the files of an endpoint takes longer than {} s",
                    CHECK_TIMEOUT.as_secs()
                ),
            }
            *last_check = Some(began);
        }
        Some(self.in_use()).filter(|in_use| !in_use.is(refused))
    }

    /// Keeps the gauges at 1 while changed files cannot be used, else at 0. `gauge` returns the gauge of a field.
    pub(super) fn observe(&self, gauge: impl Fn(&str) -> Gauge) {
        if !self.headers.is_empty() {
            self.headers.observe(gauge("header_files"));
        }
        if !self.clients.is_empty() {
            self.clients.observe(gauge("tls"));
        }
    }

    pub(super) fn has_files(&self) -> bool {
        !self.headers.is_empty() || !self.clients.is_empty()
    }

    /// Follows the files. Ends only with an error.
    pub(super) async fn follow(self: Arc<Self>) -> io::Result<()> {
        watched_files::follow(move || self.check()).await
    }

    /// Blocks.
    pub(super) fn check(&self) {
        self.headers.check();
        self.clients.check();
    }
}
