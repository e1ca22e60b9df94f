//! Long waits that are held back while the index is full. No client would send them again, so they are not rejected. Their commands stay undecided until the index
//! has memory, until they are due, or for half of the retention of the ingest topic, which would delete them: then they are accepted.

use std::collections::BTreeMap;

use redeliver_core::Timestamp;

use super::commands::PendingCommand;
use super::{ReadyItem, Shard};
use crate::index_messages::Found;
use crate::job::Kind;
use crate::request::Command;

/// The commands of the waits, by the time until which they can be held, and offset.
#[derive(Default)]
pub(super) struct HeldWaits(BTreeMap<(Timestamp, i64), Box<PendingCommand>>);

impl HeldWaits {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// When the first one cannot be held any more.
    pub(super) fn next_due(&self) -> Option<Timestamp> {
        self.0.keys().next().map(|(due, _)| *due)
    }

    pub(super) fn commands(&self) -> impl Iterator<Item = &PendingCommand> {
        self.0.values().map(|command| &**command)
    }
}

impl Shard {
    /// Keeps a command aside if it is a long wait for which the index has no memory. It stays incomplete.
    pub(super) fn hold_back(
        &mut self,
        command: Box<PendingCommand>,
        now: Timestamp,
    ) -> Option<Box<PendingCommand>> {
        let Ok(Command::Schedule(request)) = &command.incoming.command else {
            return Some(command);
        };
        let offset = command.record.position.offset;
        let retained = self.settings.rules.max_request_age.duration() / 2;
        let timestamp = command.record.timestamp;
        let until = timestamp.map_or(request.due, |at| request.due.min(at.after(retained)));
        let must_wait = request.kind == Kind::LongWait && until > now && self.is_full();
        if !must_wait || self.released_waits.includes(&request.app, offset) {
            return Some(command);
        }
        self.held_waits.0.insert((until, offset), command);
        None
    }

    /// Decides about the waits that cannot be held any more, or about all once the index has memory.
    pub(super) fn decide_held_waits(&mut self, now: Timestamp) {
        let undecided = if self.is_full() {
            self.held_waits.0.split_off(&(now, i64::MAX))
        } else {
            BTreeMap::new()
        };
        let decided = std::mem::replace(&mut self.held_waits.0, undecided);
        let commands = decided.into_values();
        self.ready
            .extend(commands.map(|command| ReadyItem::Command(command, Found::default())));
    }

    /// Decides again about all waits, of which an operator may have released some.
    pub(super) fn retry_held_waits(&mut self) {
        let commands = std::mem::take(&mut self.held_waits.0).into_values();
        self.ready
            .extend(commands.map(|command| ReadyItem::Command(command, Found::default())));
    }
}
