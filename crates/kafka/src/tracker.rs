//! Which offsets of one partition are done, when they get done out of order.
//!
//! Handlers finish in any order, but Kafka stores one number per partition. The tracker gives the lowest
//! offset that is not done as the number to commit, and the done ones beyond it as the commit's metadata,
//! so that whoever continues there repeats neither their output nor their call.
//!
//! Records in flight stand in a queue in the order of their offsets. Completing the first one pops it, any
//! other is found by its distance to the first one (or by bisection where the log has gaps) and marked.
//! Marked ones leave when they reach the front, or all at once when they are half of the queue: a record
//! that hangs for minutes then costs the queue no more than itself, and everything is O(1) amortised.
//!
//! What may be admitted is limited by what metadata can hold, see [`metadata`](METADATA_LIMIT): the queue
//! carries a weight that bounds the text of every set that can come out of it. Without gaps at least
//! 16,384 records fit between the lowest and the highest offset in flight; when only a few of them hang,
//! the rest may run ahead without limit.

mod metadata;

use std::collections::VecDeque;

use metadata::Weight;
pub use metadata::{METADATA_LIMIT, MetadataError, TopicFingerprint};

/// A range of offsets, from `start` up to and without `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffsetRange {
    /// The first one.
    pub start: i64,
    /// The first one that is no longer part of it.
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

/// Offsets beyond a commit that are done. Offsets that do not exist in the log may be among them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompletedSet {
    ranges: Vec<OffsetRange>,
}

impl CompletedSet {
    /// The ranges, ascending and apart from each other.
    #[must_use]
    pub fn ranges(&self) -> &[OffsetRange] {
        &self.ranges
    }

    /// Whether the offset is done.
    #[must_use]
    pub fn contains(&self, offset: i64) -> bool {
        let behind = self.ranges.partition_point(|range| range.end <= offset);
        self.ranges
            .get(behind)
            .is_some_and(|range| range.contains(offset))
    }

    /// Whether nothing is done beyond the commit.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }
}

/// What is stored of a partition: where a tracker begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The next offset to read; negative when nothing was ever committed.
    pub offset: i64,
    /// What is done at or beyond it.
    pub completed: CompletedSet,
    /// The topic it was committed in; `None` when the commit does not say.
    pub topic: Option<TopicFingerprint>,
}

impl Committed {
    /// Nothing was ever committed: the first offset that is observed sets the position.
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

    /// A commit as it is stored; empty metadata says that nothing is done beyond it.
    ///
    /// # Errors
    /// When the metadata is of another program, damaged, or more than a tracker could go on from. The
    /// caller may then take the commit as one without metadata, [`Committed::at`].
    pub fn decode(offset: i64, metadata: &str) -> Result<Self, MetadataError> {
        let (ranges, topic) = metadata::decode(offset, metadata)?;
        Ok(Self {
            offset,
            completed: CompletedSet { ranges },
            topic,
        })
    }

    /// Whether it was certainly made in another topic, which had the name of this one before.
    #[must_use]
    pub fn is_of_another(&self, topic: Option<TopicFingerprint>) -> bool {
        matches!((self.topic, topic), (Some(committed), Some(now)) if committed != now)
    }
}

/// What to commit of a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommitPosition {
    /// The next offset to read after a restart.
    pub offset: i64,
    /// What is done beyond it: printable ASCII, at most [`METADATA_LIMIT`] bytes, empty when nothing is.
    pub metadata: String,
}

/// What a delivered offset is to the tracker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Not done yet: process it, then call [`OffsetTracker::complete`].
    New,
    /// Done before the last restart: drop it.
    AlreadyDone,
    /// Below what was read already, as left over from a fetch before a rewind: drop it.
    Stale,
}

/// Keeps account of one partition. Offsets are observed ascending, and completed in any order.
#[derive(Clone, Debug)]
pub struct OffsetTracker {
    /// The next offset expected; `None` before the first one of a partition without a commit.
    position: Option<i64>,
    /// In the order of offsets; the first one is never done.
    queue: VecDeque<Entry>,
    done_in_queue: usize,
    /// Of the queue, the done ones included.
    weight: Weight,
    /// Done before the restart and not yet read again.
    restored: VecDeque<OffsetRange>,
    /// Whether everything not done at the restart and one more offset behind it fit into the metadata.
    restored_leaves_room: bool,
    /// The highest done offset, restored ones included.
    highest_done: i64,
    /// How many records were read, done ones included.
    read: u64,
    committed: Option<CommitPosition>,
    topic: Option<TopicFingerprint>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    offset: i64,
    /// How many records were read before it.
    ordinal: u64,
    done: bool,
}

impl OffsetTracker {
    /// Continues where a commit left off.
    ///
    /// The caller makes a new tracker whenever it is assigned the partition or rewinds it. In a topic that was
    /// recreated since the commit it has to begin with [`Committed::start`], or all would be stale. Commits name
    /// `topic` where they can.
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
            done_in_queue: 0,
            weight: Weight::default(),
            restored_leaves_room: true,
            highest_done: restored.back().map_or(-1, |range| range.end - 1),
            restored,
            read: 0,
            committed: None,
            topic,
        };
        if let (Some(position), false) = (position, tracker.restored.is_empty()) {
            let weight = Weight::of_holes(&tracker.holes(position));
            tracker.restored_leaves_room = weight.plus(Weight::HEAVIEST).fits();
        }
        tracker.committed = tracker.current_position();
        tracker
    }

    /// Takes note of a delivered offset.
    ///
    /// # Panics
    /// When it was called although [`OffsetTracker::may_admit`] said no, and the metadata of what may
    /// follow could become too long. Going on would do records twice.
    pub fn observe(&mut self, offset: i64) -> Admission {
        if self.position.is_some_and(|position| offset < position) {
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
            "offset {offset} was not to be read while the tracker is full"
        );
        self.position = Some(offset.saturating_add(1));
        let ordinal = self.read;
        self.read += 1;
        while self.restored.front().is_some_and(|range| range.end <= offset) {
            self.restored.pop_front();
        }
        if self.restored.front().is_some_and(|range| range.contains(offset)) {
            return Admission::AlreadyDone;
        }
        self.weight = weight;
        self.queue.push_back(Entry {
            offset,
            ordinal,
            done: false,
        });
        Admission::New
    }

    /// Whether one more record may be observed, whatever its offset: false when some set of done offsets
    /// that can follow would not fit into [`METADATA_LIMIT`]. Stop reading the partition then, until
    /// completions make it true again.
    #[must_use]
    pub fn may_admit(&self) -> bool {
        if self.restored.is_empty() {
            // Twice, so that after a restart one offset behind the restored ones fits at any time.
            self.weight.plus(Weight::HEAVIEST).plus(Weight::HEAVIEST).fits()
        } else {
            self.restored_leaves_room || self.queue.is_empty()
        }
    }

    /// Takes note that a record is done. Returns false when it is not in flight: never admitted, or done
    /// before.
    pub fn complete(&mut self, offset: i64) -> bool {
        let Some(index) = self.index_of(offset) else {
            return false;
        };
        let entry = &mut self.queue[index];
        if std::mem::replace(&mut entry.done, true) {
            return false;
        }
        self.highest_done = self.highest_done.max(offset);
        self.done_in_queue += 1;
        if index == 0 {
            self.pop_done();
        } else if self.done_in_queue * 2 >= self.queue.len()
            || (self.done_in_queue * 64 >= self.queue.len() && !self.may_admit())
        {
            self.drop_done();
        }
        true
    }

    /// How many admitted records are not done.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.queue.len() - self.done_in_queue
    }

    /// The lowest admitted offset that is not done.
    #[must_use]
    pub fn lowest_incomplete(&self) -> Option<i64> {
        self.queue.front().map(|entry| entry.offset)
    }

    /// The next offset to be read, one behind the last observed; `None` as long as it is unknown.
    #[must_use]
    pub fn position(&self) -> Option<i64> {
        self.position
    }

    /// What to commit; `None` when it is what was committed already, or nothing was ever read.
    #[must_use]
    pub fn commit_position(&self) -> Option<CommitPosition> {
        self.current_position()
            .filter(|position| self.committed.as_ref() != Some(position))
    }

    /// What to commit, also when it is what was committed already; `None` when nothing was ever read.
    #[must_use]
    pub fn current_position(&self) -> Option<CommitPosition> {
        let offset = self.lowest_incomplete().or(self.position)?;
        Some(self.position_at(offset))
    }

    /// As [`OffsetTracker::current_position`]; the beginning of the log when nothing was ever read.
    #[must_use]
    pub fn position_or_beginning(&self) -> CommitPosition {
        self.current_position().unwrap_or_else(|| self.position_at(0))
    }

    fn position_at(&self, offset: i64) -> CommitPosition {
        let end = offset.max(self.highest_done + 1);
        let metadata = if end == offset && self.topic.is_none() {
            String::new()
        } else {
            let holes = if end == offset {
                Vec::new()
            } else {
                self.holes(offset)
            };
            metadata::encode(offset, &holes, end, self.topic)
                .expect("nothing is admitted that could make the metadata too long")
        };
        CommitPosition { offset, metadata }
    }

    /// Takes note that a position is committed.
    pub fn mark_committed(&mut self, position: &CommitPosition) {
        self.committed = Some(position.clone());
    }

    /// The lowest offset that is not done, when nearly all records behind it are: it alone holds up the
    /// commit.
    #[must_use]
    pub fn blocked_by(&self) -> Option<i64> {
        const FEWEST_DONE: u64 = 100;
        const DONE_PER_IN_FLIGHT: u64 = 10;
        let first = self.queue.front()?;
        let in_flight_behind = self.in_flight() as u64 - 1;
        let done_behind = self.read - first.ordinal - 1 - in_flight_behind;
        (done_behind >= FEWEST_DONE && done_behind >= DONE_PER_IN_FLIGHT * in_flight_behind)
            .then_some(first.offset)
    }

    /// The runs of offsets from `start` up to the highest done one that are not done.
    fn holes(&self, start: i64) -> Vec<OffsetRange> {
        let mut holes: Vec<OffsetRange> = Vec::new();
        let mut push = |start: i64, end: i64| match holes.last_mut() {
            _ if start >= end => {}
            Some(last) if last.end == start => last.end = end,
            _ => holes.push(OffsetRange { start, end }),
        };
        for entry in &self.queue {
            if entry.offset > self.highest_done {
                break;
            }
            if !entry.done {
                push(entry.offset, entry.offset + 1);
            }
        }
        let mut unread = self.position.unwrap_or(start);
        for range in &self.restored {
            push(unread, range.start);
            unread = unread.max(range.end);
        }
        holes
    }

    fn index_of(&self, offset: i64) -> Option<usize> {
        let first = self.queue.front()?.offset;
        let ahead = usize::try_from(offset.checked_sub(first)?).ok()?;
        // Without gaps the distance is the index, with gaps the index is lower.
        let guess = ahead.min(self.queue.len() - 1);
        if self.queue[guess].offset == offset {
            return Some(guess);
        }
        self.queue
            .binary_search_by_key(&offset, |entry| entry.offset)
            .ok()
    }

    fn pop_done(&mut self) {
        while self.queue.front().is_some_and(|entry| entry.done) {
            let popped = self.queue.pop_front();
            self.done_in_queue -= 1;
            if let (Some(popped), Some(next)) = (popped, self.queue.front()) {
                self.weight = self
                    .weight
                    .minus(Weight::of_distance(next.offset - popped.offset));
            }
        }
    }

    fn drop_done(&mut self) {
        self.queue.retain(|entry| !entry.done);
        self.done_in_queue = 0;
        self.weight = self
            .queue
            .iter()
            .zip(self.queue.iter().skip(1))
            .map(|(entry, next)| Weight::of_distance(next.offset - entry.offset))
            .fold(Weight::default(), Weight::plus);
    }
}

#[cfg(test)]
mod tests;
