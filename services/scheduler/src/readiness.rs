//! What the process's readiness says of a lane's shards: each is ready once its index was brought up to date,
//! and for as long as the index answers.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use redeliver_kafka::AssignmentId;
use redeliver_runtime::health::Part;

/// What the shards of a lane wait for. Shards come and go by the lane's word; what an indexer says of one that has
/// gone is not heard any more.
#[derive(Debug)]
pub(crate) struct ShardReadiness {
    part: Part,
    reasons: Mutex<Reasons>,
}

#[derive(Debug, Default)]
struct Reasons {
    waiting: BTreeMap<AssignmentId, Option<String>>,
    /// What is to be known although all are ready.
    note: Option<String>,
}

impl ShardReadiness {
    /// Of no shard yet, which is ready.
    pub(crate) fn new(part: Part) -> Self {
        part.ready();
        Self {
            part,
            reasons: Mutex::default(),
        }
    }

    /// A shard is the lane's from now on.
    pub(crate) fn begins(&self, id: AssignmentId, shard: i32) {
        let mut reasons = self.lock();
        let reason = format!("shard {shard}: bringing the index up to date");
        reasons.waiting.insert(id, Some(reason));
        self.tell(&reasons);
    }

    /// A shard is the lane's no longer.
    pub(crate) fn ends(&self, id: AssignmentId) {
        let mut reasons = self.lock();
        reasons.waiting.remove(&id);
        self.tell(&reasons);
    }

    /// A shard waits for something.
    pub(crate) fn waits(&self, id: AssignmentId, reason: String) {
        self.set(id, Some(reason));
    }

    /// A shard waits for nothing.
    pub(crate) fn is_ready(&self, id: AssignmentId) {
        self.set(id, None);
    }

    /// Something is to be known of the lane although its shards are ready, or nothing any more.
    pub(crate) fn set_note(&self, note: Option<String>) {
        let mut reasons = self.lock();
        reasons.note = note;
        self.tell(&reasons);
    }

    fn set(&self, id: AssignmentId, reason: Option<String>) {
        let mut reasons = self.lock();
        if let Some(known) = reasons.waiting.get_mut(&id) {
            *known = reason;
            self.tell(&reasons);
        }
    }

    fn tell(&self, reasons: &Reasons) {
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
    fn all_shards_must_be_ready_and_those_that_have_gone_say_nothing() {
        let health = Health::new();
        let readiness = ShardReadiness::new(health.part("shards"));
        let reasons = || health.report().parts["shards"].clone();
        assert_eq!(reasons(), "ready");
        let ids = [AssignmentId::for_tests(0, 1), AssignmentId::for_tests(1, 1)];
        readiness.begins(ids[0], 7);
        readiness.begins(ids[1], 8);
        let catching_up = "waiting: shard 7: bringing the index up to date";
        assert_eq!(reasons(), format!("{catching_up}; and 1 more shards wait"));
        readiness.is_ready(ids[1]);
        assert_eq!(reasons(), catching_up);
        readiness.waits(ids[0], "no answer".to_owned());
        assert_eq!(reasons(), "waiting: no answer");
        readiness.ends(ids[0]);
        assert_eq!(reasons(), "ready");
        readiness.set_note(Some("full".to_owned()));
        assert_eq!(reasons(), "ready, but full");
        readiness.set_note(None);
        readiness.waits(ids[0], "late".to_owned());
        assert_eq!(reasons(), "ready");
    }
}
