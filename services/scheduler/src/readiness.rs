//! The readiness of a lane's shards. A shard is ready once its index is up to date, and for as long as the index is
//! available.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use redeliver_kafka::AssignmentId;
use redeliver_runtime::health::Part;

/// The readiness of a lane's shards. The lane adds and removes shards; reports of an indexer about a removed shard are
/// ignored.
#[derive(Debug)]
pub(crate) struct ShardReadiness {
    part: Part,
    reasons: Mutex<Reasons>,
}

#[derive(Debug, Default)]
struct Reasons {
    waiting: BTreeMap<AssignmentId, Option<String>>,
    /// Reported while all shards are ready.
    note: Option<String>,
    /// Why all shards have stopped.
    halted: Option<String>,
}

impl ShardReadiness {
    /// Without shards, the lane is ready.
    pub(crate) fn new(part: Part) -> Self {
        part.ready();
        Self {
            part,
            reasons: Mutex::default(),
        }
    }

    /// Adds a shard, which is not ready yet.
    pub(crate) fn add(&self, id: AssignmentId, shard: i32) {
        let mut reasons = self.lock();
        let reason = format!("shard {shard}: bringing the index up to date");
        reasons.waiting.insert(id, Some(reason));
        self.report(&reasons);
    }

    /// Removes a shard.
    pub(crate) fn remove(&self, id: AssignmentId) {
        let mut reasons = self.lock();
        reasons.waiting.remove(&id);
        self.report(&reasons);
    }

    /// Sets why a shard is not ready.
    pub(crate) fn set_waiting(&self, id: AssignmentId, reason: String) {
        self.set(id, Some(reason));
    }

    /// Sets a shard to ready.
    pub(crate) fn set_ready(&self, id: AssignmentId) {
        self.set(id, None);
    }

    /// Sets or clears what to report while all shards are ready.
    pub(crate) fn set_note(&self, note: Option<String>) {
        let mut reasons = self.lock();
        reasons.note = note;
        self.report(&reasons);
    }

    /// Sets or clears why all shards have stopped. They are not ready then.
    pub(crate) fn set_halted(&self, reason: Option<String>) {
        let mut reasons = self.lock();
        reasons.halted = reason;
        self.report(&reasons);
    }

    fn set(&self, id: AssignmentId, reason: Option<String>) {
        let mut reasons = self.lock();
        if let Some(known) = reasons.waiting.get_mut(&id) {
            *known = reason;
            self.report(&reasons);
        }
    }

    fn report(&self, reasons: &Reasons) {
        if let Some(halted) = &reasons.halted {
            return self.part.not_ready(halted.as_str());
        }
        let mut waiting = reasons.waiting.values().flatten();
        match (waiting.next(), &reasons.note) {
            (None, None) => self.part.ready(),
            (None, Some(note)) => self.part.ready_but(note.as_str()),
            (Some(first), _) => match waiting.count() {
                0 => self.part.not_ready(first.as_str()),
                others => self
                    .part
                    .not_ready(format!("{first}; and {others} more shards wait")),
            },
        }
    }

    fn lock(&self) -> MutexGuard<'_, Reasons> {
        self.reasons.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use redeliver_runtime::health::Health;

    use super::*;

    #[test]
    fn lane_is_ready_with_its_shards() {
        let health = Health::new();
        let readiness = ShardReadiness::new(health.part("shards"));
        let reasons = || health.report().parts["shards"].clone();
        assert_eq!(reasons(), "ready");
        let ids = [AssignmentId::for_tests(0, 1), AssignmentId::for_tests(1, 1)];
        readiness.add(ids[0], 7);
        readiness.add(ids[1], 8);
        let catching_up = "waiting: shard 7: bringing the index up to date";
        assert_eq!(reasons(), format!("{catching_up}; and 1 more shards wait"));
        readiness.set_ready(ids[1]);
        assert_eq!(reasons(), catching_up);
        readiness.set_waiting(ids[0], "no answer".to_owned());
        assert_eq!(reasons(), "waiting: no answer");
        readiness.remove(ids[0]);
        assert_eq!(reasons(), "ready");
        readiness.set_note(Some("full".to_owned()));
        assert_eq!(reasons(), "ready, but full");
        readiness.set_note(None);
        readiness.set_waiting(ids[0], "late".to_owned());
        assert_eq!(reasons(), "ready");
        readiness.set_halted(Some("halted".to_owned()));
        readiness.remove(ids[1]);
        assert_eq!(reasons(), "waiting: halted");
        readiness.set_halted(None);
        assert_eq!(reasons(), "ready");
    }
}
