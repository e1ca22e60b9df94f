//! Tracks the completed offsets of one partition when records complete out of order.
//!
//! Handlers finish in any order, but Kafka stores one offset per partition. The tracker commits the lowest incomplete offset,
//! and stores the completed offsets after it in the commit's metadata. The lane that continues from the commit repeats
//! neither their outputs nor their handler calls.
//!
//! Records in flight are in a queue, ordered by offset. Completing the first one removes it. Any other is found by its
//! distance from the first (or by binary search where the log has gaps) and marked. Marked records are removed when they
//! reach the front, or all together when they are half of the queue. So a record that takes minutes does not make the queue
//! grow, and all operations are O(1) amortised.
//!
//! The space in the metadata limits how many records are admitted, see [`METADATA_LIMIT`]. The queue has a weight that bounds
//! the encoded size of every completed set that can result from it. Without gaps, at least 16,384 records fit between the
//! lowest and the highest offset in flight; if only a few of them are incomplete, there is no limit.

mod metadata;

use std::collections::VecDeque;

use redeliver_core::mutant;

use metadata::Weight;
pub use metadata::{METADATA_LIMIT, MetadataError, TopicFingerprint};

/// A range of offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffsetRange {
    /// The first offset.
    pub start: i64,
    /// The end, exclusive.
    pub end: i64,
}

impl OffsetRange {
    fn length(self) -> u64 {
        (self.end - self.start).unsigned_abs()
    }

    fn contains(self, offset: i64) -> bool {
        self.start <= offset && offset < self.end
    }
}

/// The completed offsets after a committed offset. They may include offsets that do not exist in the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompletedSet {
    ranges: Vec<OffsetRange>,
}

impl CompletedSet {
    /// The ranges in ascending order, neither overlapping nor adjacent.
    #[must_use]
    pub fn ranges(&self) -> &[OffsetRange] {
        &self.ranges
    }

    /// Whether the offset is complete.
    #[must_use]
    pub fn contains(&self, offset: i64) -> bool {
        let index = self.ranges.partition_point(|range| range.end <= offset);
        self.ranges.get(index).is_some_and(|range| range.contains(offset))
    }

    /// Whether no offset after the committed one is complete.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }
}

/// The committed position of a partition, from which a tracker continues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The next offset to read; negative if nothing was committed.
    pub offset: i64,
    /// The completed offsets at or after it.
    pub completed: CompletedSet,
    /// The topic of the commit; `None` if the commit has no fingerprint.
    pub topic: Option<TopicFingerprint>,
}

impl Committed {
    /// The position if nothing was committed: the first observed offset sets it.
    #[must_use]
    pub fn start() -> Self {
        Self::at(-1)
    }

    /// A commit without metadata.
    #[must_use]
    pub fn at(offset: i64) -> Self {
        Self {
            offset,
            completed: CompletedSet::default(),
            topic: None,
        }
    }

    /// Decodes a stored commit. Empty metadata means an empty completed set.
    ///
    /// # Errors
    /// If another program wrote the metadata, or it is damaged, or it describes more than a tracker can hold. The caller may
    /// then treat the commit as one without metadata, [`Committed::at`].
    pub fn decode(offset: i64, metadata: &str) -> Result<Self, MetadataError> {
        let (ranges, topic) = metadata::decode(offset, metadata)?;
        Ok(Self {
            offset,
            completed: CompletedSet { ranges },
            topic,
        })
    }

    /// Whether the commit certainly belongs to another topic, which had the same name before.
    #[must_use]
    pub fn is_of_another(&self, topic: Option<TopicFingerprint>) -> bool {
        matches!((self.topic, topic), (Some(committed), Some(now)) if committed != now)
    }
}

/// The position of a partition to commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommitPosition {
    /// The next offset to read after a restart.
    pub offset: i64,
    /// The completed set and the topic fingerprint: printable ASCII, at most [`METADATA_LIMIT`] bytes, empty if there is
    /// neither.
    pub metadata: String,
}

/// How to handle an observed offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Process the record, then call [`OffsetTracker::complete`].
    New,
    /// Drop the record: it was completed before the last restart.
    AlreadyCompleted,
    /// Drop the record: it is below the position, left over from a fetch before a rewind.
    Stale,
}

/// Tracks one partition. Offsets are observed in ascending order and completed in any order.
#[derive(Clone, Debug)]
pub struct OffsetTracker {
    /// The next expected offset; `None` before the first record of a partition without a commit.
    position: Option<i64>,
    /// Ordered by offset. The first record is never complete.
    queue: VecDeque<TrackedRecord>,
    completed_in_queue: usize,
    /// The weight of the queue, including completed records.
    weight: Weight,
    /// Completed before the restart and not read again yet.
    restored: VecDeque<OffsetRange>,
    /// Whether everything that was incomplete at the restart and one more offset after it fit into the metadata.
    restored_leaves_room: bool,
    /// The highest completed offset, including restored ones.
    highest_completed: i64,
    /// The number of records read, including those that were already completed.
    read: u64,
    committed: Option<CommitPosition>,
    topic: Option<TopicFingerprint>,
}

#[derive(Clone, Copy, Debug)]
struct TrackedRecord {
    offset: i64,
    /// The number of records read before this one.
    ordinal: u64,
    is_completed: bool,
}

impl OffsetTracker {
    /// Continues from a commit.
    ///
    /// Create a new tracker whenever the partition is assigned or read again from its committed offset. If the topic was
    /// created again after the commit, begin with [`Committed::start`]; otherwise all its offsets would be stale. Commits
    /// contain the fingerprint `topic` if there is room for it.
    #[must_use]
    pub fn new(committed: Committed, topic: Option<TopicFingerprint>) -> Self {
        let position = (committed.offset >= 0).then_some(committed.offset);
        let restored: VecDeque<_> = committed
            .completed
            .ranges
            .into_iter()
            .filter_map(|range| {
                let start = range.start.max(position?);
                (start < range.end).then_some(OffsetRange {
                    start,
                    end: range.end,
                })
            })
            .collect();
        let mut tracker = Self {
            position,
            queue: VecDeque::new(),
            completed_in_queue: 0,
            weight: Weight::default(),
            restored_leaves_room: true,
            highest_completed: restored.back().map_or(-1, |range| range.end - 1),
            restored,
            read: 0,
            committed: None,
            topic,
        };
        // Usually there is room, because `may_admit` has kept it. A commit can be fuller if the log has lost restored records.
        if let (Some(position), false) = (position, tracker.restored.is_empty()) {
            let weight = Weight::of_holes(&tracker.holes(position));
            tracker.restored_leaves_room = weight.plus(Weight::HEAVIEST).fits();
        }
        tracker.committed = tracker.current_position();
        tracker
    }

    /// Observes the offset of a record that was read.
    ///
    /// # Panics
    /// If [`OffsetTracker::may_admit`] returned false and the metadata could become too long. To continue would process
    /// records twice.
    pub fn observe(&mut self, offset: i64) -> Admission {
        if self.position.is_some_and(|position| offset < position) && !mutant!("tracker-admits-stale-records")
        {
            return Admission::Stale;
        }
        let distance = self.queue.back().map(|last| offset - last.offset);
        let weight = match distance {
            Some(distance) => self.weight.plus(Weight::of_distance(distance)),
            None => self.weight,
        };
        let within_restored = self.restored.back().is_some_and(|range| offset < range.end);
        assert!(
            within_restored || weight.fits(),
            "offset {offset} was read although the tracker is full"
        );
        self.position = Some(offset.saturating_add(1));
        let ordinal = self.read;
        self.read += 1;
        // Ranges below the offset have been passed. Records in them may be missing from the log.
        while self.restored.front().is_some_and(|range| range.end <= offset) {
            self.restored.pop_front();
        }
        let is_restored = self.restored.front().is_some_and(|range| range.contains(offset));
        if is_restored && !mutant!("tracker-admits-completed-records") {
            return Admission::AlreadyCompleted;
        }
        self.weight = weight;
        self.queue.push_back(TrackedRecord {
            offset,
            ordinal,
            is_completed: false,
        });
        Admission::New
    }

    /// Whether one more record with any offset may be observed. False if a completed set that can result would not fit into
    /// [`METADATA_LIMIT`]. Do not read the partition until completions make it true again.
    #[must_use]
    pub fn may_admit(&self) -> bool {
        if self.restored.is_empty() {
            // Room for two offsets: the next one, and one more, so that after a restart from the resulting commit there is
            // room for an offset beyond the restored set. Without it, records would then be admitted one at a time.
            self.weight.plus(Weight::HEAVIEST).plus(Weight::HEAVIEST).fits()
        } else {
            self.restored_leaves_room || self.queue.is_empty()
        }
    }

    /// Completes a record. Returns false if the record is not in flight: it was never admitted, or is already complete.
    pub fn complete(&mut self, offset: i64) -> bool {
        let Some(index) = self.index_of(offset) else {
            return false;
        };
        let record = &mut self.queue[index];
        if std::mem::replace(&mut record.is_completed, true) && !mutant!("tracker-completes-twice") {
            return false;
        }
        self.highest_completed = self.highest_completed.max(offset);
        self.completed_in_queue += 1;
        // Removing completed records can lower the weight, since a merged distance weighs at most as much as its parts. So a
        // full tracker removes them earlier, to admit records again soon.
        if index == 0 {
            self.pop_completed();
        } else if self.completed_in_queue * 2 >= self.queue.len()
            || (self.completed_in_queue * 64 >= self.queue.len() && !self.may_admit())
        {
            self.remove_completed();
        }
        true
    }

    /// The number of admitted records that are incomplete.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.queue.len() - self.completed_in_queue
    }

    /// The lowest admitted offset that is incomplete.
    #[must_use]
    pub fn lowest_incomplete(&self) -> Option<i64> {
        self.queue.front().map(|record| record.offset)
    }

    /// The next offset to read, one after the last observed; `None` while it is unknown.
    #[must_use]
    pub fn position(&self) -> Option<i64> {
        self.position
    }

    /// What to commit; `None` if it is committed already, or nothing was read.
    #[must_use]
    pub fn commit_position(&self) -> Option<CommitPosition> {
        self.current_position()
            .filter(|position| self.committed.as_ref() != Some(position))
    }

    /// What to commit, even if it is committed already; `None` if nothing was read.
    #[must_use]
    pub fn current_position(&self) -> Option<CommitPosition> {
        let lowest = mutant!("tracker-commits-the-position", self.lowest_incomplete(), None);
        let offset = lowest.or(self.position)?;
        Some(self.position_at(offset))
    }

    /// As [`OffsetTracker::current_position`], or the beginning of the log if nothing was read.
    #[must_use]
    pub fn position_or_beginning(&self) -> CommitPosition {
        self.current_position().unwrap_or_else(|| self.position_at(0))
    }

    fn position_at(&self, offset: i64) -> CommitPosition {
        let end = offset.max(self.highest_completed + 1);
        let metadata = if end == offset && self.topic.is_none() {
            String::new()
        } else {
            let holes = if end == offset {
                Vec::new()
            } else {
                self.holes(offset)
            };
            metadata::encode(offset, &holes, end, self.topic)
                .expect("the weight of the admitted records bounds the metadata")
        };
        CommitPosition {
            offset: mutant!("tracker-commits-one-too-many", offset, offset + 1),
            metadata: mutant!("tracker-loses-metadata", metadata, String::new()),
        }
    }

    /// Records that a position was committed.
    pub fn mark_committed(&mut self, position: &CommitPosition) {
        let position = Some(position.clone());
        self.committed = mutant!(
            "tracker-marks-the-position-committed",
            position,
            self.current_position()
        );
    }

    /// The lowest incomplete offset, if nearly all records after it are complete: then it alone holds up the commit.
    #[must_use]
    pub fn blocked_by(&self) -> Option<i64> {
        const MIN_COMPLETED: u64 = 100;
        const MIN_COMPLETED_PER_IN_FLIGHT: u64 = 10;
        let first = self.queue.front()?;
        let in_flight_after = self.in_flight() as u64 - 1;
        let completed_after = self.read - first.ordinal - 1 - in_flight_after;
        (completed_after >= MIN_COMPLETED && completed_after >= MIN_COMPLETED_PER_IN_FLIGHT * in_flight_after)
            .then_some(first.offset)
    }

    /// The runs of incomplete offsets from `start` up to the highest completed one.
    fn holes(&self, start: i64) -> Vec<OffsetRange> {
        let mut holes: Vec<OffsetRange> = Vec::new();
        let mut push = |start: i64, end: i64| match holes.last_mut() {
            _ if start >= end => {}
            Some(last) if last.end == start => last.end = end,
            _ => holes.push(OffsetRange { start, end }),
        };
        // Offsets between two records of the queue were completed, or are gaps in the log. Gaps are never delivered, so they
        // count as completed.
        for record in &self.queue {
            if record.offset > self.highest_completed {
                break;
            }
            if !record.is_completed && (record.offset == start || !mutant!("tracker-drops-a-hole")) {
                push(record.offset, record.offset + 1);
            }
        }
        // Offsets that have not been read yet count as incomplete, except restored ones.
        let mut unread = self.position.unwrap_or(start);
        for range in &self.restored {
            if !mutant!("tracker-drops-unread-holes") {
                push(unread, range.start);
            }
            unread = unread.max(range.end);
        }
        holes
    }

    fn index_of(&self, offset: i64) -> Option<usize> {
        let first = self.queue.front()?.offset;
        let distance = usize::try_from(offset.checked_sub(first)?).ok()?;
        // Without gaps the distance is the index. With gaps the index is lower.
        let guess = distance.min(self.queue.len() - 1);
        if self.queue[guess].offset == offset {
            return Some(guess);
        }
        self.queue
            .binary_search_by_key(&offset, |record| record.offset)
            .ok()
    }

    fn pop_completed(&mut self) {
        while self.queue.front().is_some_and(|record| record.is_completed) {
            let popped = self.queue.pop_front();
            self.completed_in_queue -= 1;
            if let (Some(popped), Some(next)) = (popped, self.queue.front()) {
                self.weight = self
                    .weight
                    .minus(Weight::of_distance(next.offset - popped.offset));
            }
        }
    }

    fn remove_completed(&mut self) {
        self.queue.retain(|record| !record.is_completed);
        self.completed_in_queue = 0;
        self.weight = self
            .queue
            .iter()
            .zip(self.queue.iter().skip(1))
            .map(|(record, next)| Weight::of_distance(next.offset - record.offset))
            .fold(Weight::default(), Weight::plus);
    }
}

#[cfg(test)]
mod tests;
