//! Readiness of a process: it is ready when all of its parts are ready and it is not shutting down.
//!
//! A part must register before it starts, so that the process does not become ready without it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;
use tokio::sync::watch;

/// All parts of a process. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Health {
    parts: Arc<Mutex<BTreeMap<String, PartState>>>,
    breakers: Arc<Mutex<BTreeMap<String, Breaker>>>,
    /// Whether all parts are ready.
    ready: watch::Sender<bool>,
}

impl Default for Health {
    /// A process without parts.
    fn default() -> Self {
        Self {
            parts: Arc::default(),
            breakers: Arc::default(),
            ready: watch::Sender::new(true),
        }
    }
}

/// One part of a process. Cloning is cheap. A part stays in the report when its handle is dropped.
#[derive(Clone, Debug)]
pub struct Part {
    name: Arc<str>,
    health: Health,
}

/// The readiness of a process and its parts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Whether all parts are ready.
    pub ready: bool,
    /// The state of each part: `ready`, `ready, but NOTE` or `waiting: REASON`.
    pub parts: BTreeMap<String, String>,
    /// The circuit breaker of each pipeline that the process works on. It does not decide about readiness.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub breakers: BTreeMap<String, Breaker>,
}

/// A circuit breaker, as the report shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Breaker {
    /// `closed`, `open` or `half_open`.
    pub state: String,
    /// Since when it is closed, or has not been (RFC 3339).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// The code of the failure that opened it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub error_code: String,
}

#[derive(Clone, Debug)]
enum PartState {
    Ready,
    /// Ready, with a restriction that operators should know.
    ReadyBut(String),
    Waiting(String),
}

impl Health {
    /// A process without parts.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers a part, which is initially not ready.
    #[must_use]
    pub fn part(&self, name: impl Into<Arc<str>>) -> Part {
        let part = Part {
            name: name.into(),
            health: self.clone(),
        };
        part.not_ready("starting");
        part
    }

    /// Whether all parts are ready, now and whenever that changes.
    #[must_use]
    pub fn is_ready(&self) -> watch::Receiver<bool> {
        self.ready.subscribe()
    }

    /// Shows the state of the circuit breaker of a pipeline.
    pub fn show_breaker(&self, pipeline: &str, breaker: Breaker) {
        let mut breakers = self.breakers.lock().unwrap_or_else(PoisonError::into_inner);
        breakers.insert(pipeline.to_owned(), breaker);
    }

    /// The current state of all parts, and of the circuit breakers.
    #[must_use]
    pub fn report(&self) -> Report {
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        Report {
            ready: are_ready(&parts),
            parts: parts
                .iter()
                .map(|(name, state)| (name.clone(), state.to_string()))
                .collect(),
            breakers: self
                .breakers
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone(),
        }
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<String, PartState>)) {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut parts);
        let now = are_ready(&parts);
        self.ready
            .send_if_modified(|ready| std::mem::replace(ready, now) != now);
    }
}

fn are_ready(parts: &BTreeMap<String, PartState>) -> bool {
    !parts.values().any(|state| matches!(state, PartState::Waiting(_)))
}

impl fmt::Display for PartState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready => f.write_str("ready"),
            Self::ReadyBut(note) => write!(f, "ready, but {note}"),
            Self::Waiting(reason) => write!(f, "waiting: {reason}"),
        }
    }
}

impl Part {
    /// Marks the part as ready.
    pub fn ready(&self) {
        self.set(PartState::Ready);
    }

    /// Marks the part as ready with a restriction.
    pub fn ready_but(&self, note: impl Into<String>) {
        self.set(PartState::ReadyBut(note.into()));
    }

    /// Marks the part as not ready.
    pub fn not_ready(&self, reason: impl Into<String>) {
        self.set(PartState::Waiting(reason.into()));
    }

    /// Removes the part from the report.
    pub fn remove(&self) {
        self.health.change(|parts| drop(parts.remove(&*self.name)));
    }

    fn set(&self, state: PartState) {
        self.health
            .change(|parts| drop(parts.insert(self.name.to_string(), state)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_needs_all_parts_ready() {
        let health = Health::new();
        assert!(health.report().ready);
        let (kafka, lane) = (health.part("kafka"), health.part("lane-0"));
        kafka.ready();
        assert_eq!(health.report().parts["lane-0"], "waiting: starting");
        assert!(!health.report().ready);
        lane.ready_but("slow");
        assert_eq!(health.report().parts["lane-0"], "ready, but slow");
        assert!(health.report().ready);
        kafka.not_ready("no broker answers");
        assert_eq!(health.report().parts["kafka"], "waiting: no broker answers");
        assert!(!health.report().ready);
        kafka.remove();
        assert!(health.report().ready);
        let breaker = Breaker {
            state: "open".to_owned(),
            since: None,
            error_code: String::new(),
        };
        health.show_breaker("docs", breaker.clone());
        assert_eq!(
            (health.report().ready, &health.report().breakers["docs"]),
            (true, &breaker)
        );
        assert!(!health.report().parts.contains_key("kafka"));
    }

    #[test]
    fn last_part_decides_readiness() {
        let health = Health::new();
        let mut ready = health.is_ready();
        assert!(*ready.borrow_and_update());
        let (kafka, lane) = (health.part("kafka"), health.part("lane-0"));
        assert!(!*ready.borrow_and_update());
        kafka.ready();
        assert!(!ready.has_changed().unwrap());
        lane.ready();
        assert!(*ready.borrow_and_update());
        lane.ready_but("slow");
        assert!(!ready.has_changed().unwrap());
    }
}
