//! The partitions that a lane owns, their trackers, and what the next transaction commits for them.
//!
//! A partition that was assigned a moment ago, or whose records were dropped, has no position until its committed
//! position has been looked up. Only from then on does it have an [`AssignmentId`] and a tracker.

use std::collections::BTreeSet;
use std::sync::Arc;

use redeliver_core::mutant;
use redeliver_kafka_ffi::TopicId;

use crate::groups;
use crate::processor::{AssignmentId, TransactionBatch};
use crate::tracker::{Admission, CommitPosition, Committed, OffsetTracker, TopicFingerprint};

/// A partition of a topic.
pub(super) type Partition = (Arc<str>, i32);

/// A request for the topic ids and the committed positions of partitions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lookup {
    /// Identifies the request, so that the answer to an outdated one is ignored.
    pub(super) number: u64,
    pub(super) partitions: Vec<Partition>,
    /// Whether only the positions of all partitions together are of use.
    pub(super) is_whole: bool,
}

/// An answer to a [`Lookup`]: the position of each partition, or why it is unknown. Unless the lookup is whole, several
/// answers may arrive, each about other partitions.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) number: u64,
    pub(super) positions: Vec<(Partition, Result<FoundPosition, String>)>,
    /// Whether the broker answered at all.
    pub(super) is_answered: bool,
}

/// A topic and the position in it that the group has stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FoundPosition {
    pub(super) topic_id: Option<TopicId>,
    pub(super) stored: StoredCommit,
}

/// A position as the group stores it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct StoredCommit {
    /// `None` if nothing was committed.
    pub(super) offset: Option<i64>,
    pub(super) metadata: String,
}

impl StoredCommit {
    /// Decodes the metadata. Metadata of other programs is ignored, with a log line.
    pub(super) fn decode(&self) -> Option<Committed> {
        self.offset
            .map(|offset| groups::committed(offset, &self.metadata))
    }
}

/// A partition that the group has assigned to the lane.
pub(super) struct Assigned {
    pub(super) topic: Arc<str>,
    pub(super) partition: i32,
    /// `None` if the topic was missing when it was assigned, or the broker does not support topic ids.
    pub(super) topic_id: Option<TopicId>,
    /// Whether the position certainly belongs to that topic: the commit has its fingerprint, or a record was read.
    pub(super) is_confirmed: bool,
    /// Whether the client fetches the partition, so that it continues elsewhere after a seek.
    pub(super) is_fetched: bool,
    /// The number of the lookup in progress.
    lookup: Option<u64>,
    reading: Option<Reading>,
}

/// A partition whose position is known.
struct Reading {
    id: AssignmentId,
    tracker: OffsetTracker,
    /// What the group has stored.
    stored: StoredCommit,
    /// Its position may have to be committed with the next transaction.
    is_touched: bool,
    /// The next transaction commits the position even if it has not changed.
    must_commit: bool,
    /// The tracker without the completions of the batch. It observes the same offsets as the other one.
    before_batch: Option<OffsetTracker>,
}

impl Assigned {
    /// The tracker; `None` while the position is unknown.
    pub(super) fn tracker(&self) -> Option<&OffsetTracker> {
        self.reading.as_ref().map(|reading| &reading.tracker)
    }

    /// The number of admitted records that are incomplete.
    pub(super) fn in_flight(&self) -> usize {
        self.tracker().map_or(0, OffsetTracker::in_flight)
    }

    pub(super) fn is(&self, topic: &str, partition: i32) -> bool {
        self.partition == partition && *self.topic == *topic
    }

    pub(super) fn id(&self) -> Option<AssignmentId> {
        self.reading.as_ref().map(|reading| reading.id)
    }
}

/// A position that a transaction commits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Commit {
    id: AssignmentId,
    pub(super) topic: Arc<str>,
    pub(super) partition: i32,
    pub(super) position: CommitPosition,
    /// What the group had stored before.
    before: StoredCommit,
}

impl Commit {
    fn attempted(&self) -> StoredCommit {
        StoredCommit {
            offset: Some(self.position.offset),
            metadata: self.position.metadata.clone(),
        }
    }
}

/// The outcome of a transaction, as the group's positions show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resolution {
    Committed,
    Aborted,
    /// The positions would be the same either way, or another process has changed them.
    Undecided,
}

/// Compares the positions that a transaction was to commit with those that the group has stored.
pub(super) fn resolve<'a>(
    commits: &[Commit],
    stored: impl Fn(&Commit) -> Option<&'a StoredCommit>,
) -> Resolution {
    let all = |expected: fn(&Commit) -> StoredCommit| {
        commits
            .iter()
            .all(|commit| stored(commit).is_some_and(|stored| *stored == expected(commit)))
    };
    let is_attempted = all(Commit::attempted);
    let is_as_before = all(|commit| commit.before.clone());
    match (is_attempted, is_as_before) {
        (true, false) => mutant!(
            "lane-takes-committed-for-aborted",
            Resolution::Committed,
            Resolution::Aborted
        ),
        (false, true) => mutant!(
            "lane-takes-aborted-for-committed",
            Resolution::Aborted,
            Resolution::Committed
        ),
        (true, true) | (false, false) => mutant!(
            "lane-takes-undecided-for-aborted",
            Resolution::Undecided,
            Resolution::Aborted
        ),
    }
}

/// A result that matches no record in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unmatched {
    pub(super) id: AssignmentId,
    /// `None` for an owner of outputs.
    pub(super) offset: Option<i64>,
}

/// The partitions of a lane by slot. A slot is used again after its partition was revoked.
#[derive(Default)]
pub(super) struct Assignments {
    slots: Vec<Option<Assigned>>,
    /// The last generation in an [`AssignmentId`]. It is never reset, because results of an earlier session may still
    /// arrive and must not match a record of the current one.
    generation: u32,
    last_lookup: u64,
    /// Slots of partitions with `is_touched`.
    touched: Vec<usize>,
    /// Where the next round of admissions begins: after the slot that has admitted the last record.
    first: usize,
}

impl Assignments {
    /// Adds partitions of unknown position. One that is already owned is kept.
    pub(super) fn add(&mut self, topic: Arc<str>, partition: i32) {
        if self.find(&topic, partition).is_some() {
            return;
        }
        let assigned = Assigned {
            topic,
            partition,
            topic_id: None,
            is_confirmed: false,
            is_fetched: false,
            lookup: None,
            reading: None,
        };
        match self.slots.iter_mut().find(|slot| slot.is_none()) {
            Some(slot) => *slot = Some(assigned),
            None => self.slots.push(Some(assigned)),
        }
    }

    pub(super) fn remove(&mut self, slot: usize) -> Option<Assigned> {
        self.touched.retain(|touched| *touched != slot);
        self.slots.get_mut(slot)?.take()
    }

    pub(super) fn find(&self, topic: &str, partition: i32) -> Option<usize> {
        self.slots.iter().position(|slot| {
            slot.as_ref()
                .is_some_and(|assigned| assigned.is(topic, partition))
        })
    }

    pub(super) fn get(&self, slot: usize) -> Option<&Assigned> {
        self.slots.get(slot)?.as_ref()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Assigned> {
        self.slots.iter().flatten()
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = usize> + use<> {
        0..self.slots.len()
    }

    /// Whether the positions of all partitions are known.
    pub(super) fn are_all_read(&self) -> bool {
        self.iter().all(|assigned| assigned.reading.is_some())
    }

    /// The next lookup, of all partitions whose position is unknown and not being looked up.
    pub(super) fn next_lookup(&mut self) -> Option<Lookup> {
        let unknown = |assigned: &&mut Assigned| assigned.reading.is_none() && assigned.lookup.is_none();
        let number = self.last_lookup + 1;
        let mut partitions = Vec::new();
        for assigned in self.slots.iter_mut().flatten().filter(unknown) {
            assigned.lookup = Some(number);
            partitions.push((assigned.topic.clone(), assigned.partition));
        }
        if partitions.is_empty() {
            return None;
        }
        self.last_lookup = number;
        Some(Lookup {
            number,
            partitions,
            is_whole: false,
        })
    }

    /// A lookup of the partitions of a transaction.
    pub(super) fn lookup_of(&mut self, commits: &[Commit]) -> Lookup {
        self.last_lookup += 1;
        Lookup {
            number: self.last_lookup,
            partitions: commits
                .iter()
                .map(|commit| (commit.topic.clone(), commit.partition))
                .collect(),
            is_whole: true,
        }
    }

    /// What the group has stored for a partition that is read.
    pub(super) fn stored(&self, slot: usize) -> Option<&StoredCommit> {
        Some(&self.get(slot)?.reading.as_ref()?.stored)
    }

    /// Ends a lookup of a partition. Returns its slot if the partition is still owned and waits for this lookup.
    pub(super) fn end_lookup(&mut self, number: u64, topic: &str, partition: i32) -> Option<usize> {
        let slot = self.find(topic, partition)?;
        let assigned = self.slots[slot].as_mut()?;
        assigned.lookup.take_if(|lookup| *lookup == number).map(|_| slot)
    }

    /// Starts a partition at a position, under a new id.
    pub(super) fn start(
        &mut self,
        slot: usize,
        topic_id: Option<TopicId>,
        position: Committed,
        stored: StoredCommit,
    ) -> Option<AssignmentId> {
        let assigned = self.slots.get_mut(slot)?.as_mut()?;
        self.generation += mutant!("lane-repeats-assignment-ids", 1, 0);
        let id = AssignmentId {
            slot: u32::try_from(slot).unwrap_or(u32::MAX),
            generation: self.generation,
        };
        // An id that a record has confirmed stays confirmed for the same topic.
        assigned.is_confirmed &= assigned.topic_id == topic_id;
        assigned.is_confirmed |= position.topic.is_some();
        assigned.topic_id = topic_id;
        assigned.is_fetched = true;
        assigned.reading = Some(Reading {
            id,
            tracker: OffsetTracker::new(position, topic_id.map(TopicFingerprint::of)),
            stored,
            is_touched: false,
            must_commit: false,
            before_batch: None,
        });
        Some(id)
    }

    /// Makes the position of a partition unknown. Returns the id under which it was read.
    pub(super) fn rewind(&mut self, slot: usize) -> Option<AssignmentId> {
        self.touched.retain(|touched| *touched != slot);
        let assigned = self.slots.get_mut(slot)?.as_mut()?;
        assigned.lookup = None;
        assigned.reading.take().map(|reading| reading.id)
    }

    /// The slots in the order in which records are admitted. It begins after the slot that has admitted the last record, so that a busy partition does not
    /// use up the capacity every time. Calls that admit nothing must not move it on: while there is no capacity, as under a rate, their number between
    /// two records can be such that the same partitions come first each time.
    pub(super) fn admission_order(&self) -> impl Iterator<Item = usize> + use<> {
        let (first, count) = (self.first, self.slots.len());
        (0..count).map(move |step| (first + step) % count)
    }

    /// The id and the tracker of a partition that is read.
    pub(super) fn reading(&self, slot: usize) -> Option<(AssignmentId, &OffsetTracker)> {
        let reading = self.get(slot)?.reading.as_ref()?;
        Some((reading.id, &reading.tracker))
    }

    /// Whether one more record may be observed, even if the completions of the batch are undone.
    pub(super) fn may_admit(&self, slot: usize) -> bool {
        let reading = self.get(slot).and_then(|assigned| assigned.reading.as_ref());
        reading.is_some_and(|reading| {
            let before = reading.before_batch.as_ref();
            reading.tracker.may_admit() && before.is_none_or(OffsetTracker::may_admit)
        })
    }

    /// Observes the offset of a record that was read.
    pub(super) fn observe(
        &mut self,
        slot: usize,
        offset: i64,
    ) -> Option<(AssignmentId, &Arc<str>, Admission)> {
        let assigned = self.slots.get_mut(slot)?.as_mut()?;
        let reading = assigned.reading.as_mut()?;
        // A record was read at the position, so the position belongs to the assigned topic.
        assigned.is_confirmed = true;
        let admission = reading.tracker.observe(offset);
        if admission == Admission::New {
            self.first = slot + 1;
        }
        if let Some(before) = &mut reading.before_batch {
            before.observe(offset);
        }
        // The position may advance without any work, and that is worth a commit.
        if admission == Admission::AlreadyCompleted && !std::mem::replace(&mut reading.is_touched, true) {
            self.touched.push(slot);
        }
        Some((reading.id, &assigned.topic, admission))
    }

    /// Makes the next transaction commit the position of a partition, even if it has not changed.
    pub(super) fn commit_soon(&mut self, slot: usize) {
        if let Some(reading) = self.slots[slot]
            .as_mut()
            .and_then(|assigned| assigned.reading.as_mut())
        {
            reading.must_commit = true;
            if !std::mem::replace(&mut reading.is_touched, true) {
                self.touched.push(slot);
            }
        }
    }

    /// Whether the next transaction may have to commit a position although the batch is empty.
    pub(super) fn has_touched(&self) -> bool {
        !self.touched.is_empty()
    }

    /// Completes the records of a batch.
    ///
    /// # Errors
    /// If a result matches no record in flight. It belongs to an earlier assignment, whose records were read again, by this
    /// lane or another one. Writing it would duplicate its outputs.
    pub(super) fn complete(&mut self, batch: &TransactionBatch) -> Result<(), Unmatched> {
        for (id, offset) in &batch.completed {
            let unmatched = Unmatched {
                id: *id,
                offset: Some(*offset),
            };
            let reading = self.touch(*id).ok_or(unmatched)?;
            if !reading.tracker.complete(*offset) {
                return Err(unmatched);
            }
        }
        for id in &batch.owners {
            let unmatched = Unmatched {
                id: *id,
                offset: None,
            };
            // Without offsets the broker would not check the group's generation, and a lane that has lost the partition
            // could still write.
            self.touch(*id).ok_or(unmatched)?.must_commit = !mutant!("lane-forgets-the-owner");
        }
        Ok(())
    }

    fn reading_of(&mut self, id: AssignmentId) -> Option<&mut Reading> {
        let reading = self.slots.get_mut(id.slot as usize)?.as_mut()?.reading.as_mut()?;
        (reading.id == id).then_some(reading)
    }

    fn touch(&mut self, id: AssignmentId) -> Option<&mut Reading> {
        let slot = id.slot as usize;
        let reading = self.slots.get_mut(slot)?.as_mut()?.reading.as_mut()?;
        if reading.id != id && !mutant!("lane-accepts-stale-assignments") {
            return None;
        }
        if !std::mem::replace(&mut reading.is_touched, true) {
            self.touched.push(slot);
        }
        if reading.before_batch.is_none() {
            reading.before_batch = Some(reading.tracker.clone());
        }
        Some(reading)
    }

    /// The positions that the next transaction commits.
    pub(super) fn take_commits(&mut self) -> Vec<Commit> {
        let mut commits = Vec::with_capacity(self.touched.len());
        for slot in self.touched.drain(..) {
            let Some(assigned) = &mut self.slots[slot] else {
                continue;
            };
            let Some(reading) = &mut assigned.reading else {
                continue;
            };
            reading.is_touched = false;
            let position = if std::mem::take(&mut reading.must_commit) {
                Some(reading.tracker.position_or_beginning())
            } else {
                reading.tracker.commit_position()
            };
            if let Some(mut position) = position {
                if mutant!("lane-drops-the-completed-set") {
                    position.metadata.clear();
                }
                commits.push(Commit {
                    id: reading.id,
                    topic: assigned.topic.clone(),
                    partition: assigned.partition,
                    position,
                    before: reading.stored.clone(),
                });
            }
        }
        commits
    }

    /// Records that a transaction was committed. Only from here on do trackers rely on the new positions.
    pub(super) fn mark_committed(&mut self, commits: &[Commit]) {
        for commit in commits {
            if let Some(reading) = self.reading_of(commit.id) {
                reading.tracker.mark_committed(&commit.position);
                reading.stored = commit.attempted();
            }
        }
        self.end_batch();
    }

    /// The completions of the current batch are final.
    pub(super) fn end_batch(&mut self) {
        for reading in self
            .slots
            .iter_mut()
            .flatten()
            .filter_map(|slot| slot.reading.as_mut())
        {
            reading.before_batch = None;
        }
    }

    /// Makes the records of the batch incomplete again, after its transaction was aborted.
    pub(super) fn roll_back(&mut self, commits: &[Commit]) {
        for reading in self
            .slots
            .iter_mut()
            .flatten()
            .filter_map(|slot| slot.reading.as_mut())
        {
            if let Some(before) = reading.before_batch.take() {
                reading.tracker = before;
            }
        }
        // Positions that were to be committed for another reason than a completed record.
        for commit in commits {
            self.commit_soon(commit.id.slot as usize);
        }
    }

    pub(super) fn partitions_of(&self, topic: &str) -> BTreeSet<Partition> {
        let of_topic = self.iter().filter(|assigned| *assigned.topic == *topic);
        of_topic
            .map(|assigned| (assigned.topic.clone(), assigned.partition))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_share_scarce_capacity() {
        const PARTITIONS: usize = 4;
        for calls_without_capacity in 0..PARTITIONS {
            let mut assignments = Assignments::default();
            for partition in (0..).take(PARTITIONS) {
                assignments.add("docs".into(), partition);
            }
            for slot in assignments.slots() {
                let beginning = Committed::at(0);
                let started = assignments.start(slot, None, beginning, StoredCommit::default());
                assert!(started.is_some());
            }
            let mut admitted = [0; PARTITIONS];
            for _ in 0..5 * PARTITIONS {
                for _ in 0..calls_without_capacity {
                    drop(assignments.admission_order());
                }
                let slot = assignments.admission_order().next().unwrap();
                assignments.observe(slot, admitted[slot]);
                admitted[slot] += 1;
            }
            assert_eq!(admitted, [5; PARTITIONS], "{calls_without_capacity}");
        }
    }
}
