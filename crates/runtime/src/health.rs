//! Readiness: the named parts of a process, each of which says whether it is ready.
//!
//! A process is ready when all of its parts are and it is not ending. A part registers before it is ready,
//! so that nothing that has not begun yet is overlooked.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;

/// All parts of a process. A cheap handle.
#[derive(Clone, Debug, Default)]
pub struct Health {
    parts: Arc<Mutex<BTreeMap<String, State>>>,
}

/// One part of a process. A cheap handle; the part stays in the report when the handle is dropped.
#[derive(Clone, Debug)]
pub struct Part {
    name: Arc<str>,
    health: Health,
}

/// What the parts say together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Whether all parts are ready.
    pub ready: bool,
    /// What each part says.
    pub parts: BTreeMap<String, String>,
}

#[derive(Clone, Debug)]
enum State {
    Ready,
    /// Ready, and somebody must know something.
    ReadyBut(String),
    Waiting(String),
}

impl Health {
    /// No parts yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers a part, which is not ready at first.
    #[must_use]
    pub fn part(&self, name: impl Into<Arc<str>>) -> Part {
        let part = Part {
            name: name.into(),
            health: self.clone(),
        };
        part.not_ready("starting");
        part
    }

    /// What the parts say now.
    #[must_use]
    pub fn report(&self) -> Report {
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let said = |state: &State| match state {
            State::Ready => "ready".to_owned(),
            State::ReadyBut(note) => format!("ready, but {note}"),
            State::Waiting(reason) => format!("waiting: {reason}"),
        };
        Report {
            ready: !parts.values().any(|state| matches!(state, State::Waiting(_))),
            parts: parts
                .iter()
                .map(|(name, state)| (name.clone(), said(state)))
                .collect(),
        }
    }
}

impl Part {
    /// The part is ready.
    pub fn ready(&self) {
        self.set(State::Ready);
    }

    /// The part is ready, and does not do all that it does otherwise.
    pub fn ready_but(&self, note: impl Into<String>) {
        self.set(State::ReadyBut(note.into()));
    }

    /// The part is not ready, or not any more.
    pub fn not_ready(&self, reason: impl Into<String>) {
        self.set(State::Waiting(reason.into()));
    }

    /// The part is not there any more.
    pub fn leave(&self) {
        let mut parts = self.health.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.remove(&*self.name);
    }

    fn set(&self, state: State) {
        let mut parts = self.health.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.insert(self.name.to_string(), state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_ready_when_all_of_its_parts_are() {
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
        kafka.leave();
        assert!(health.report().ready);
        assert!(!health.report().parts.contains_key("kafka"));
    }
}
