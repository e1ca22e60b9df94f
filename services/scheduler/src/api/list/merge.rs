//! Merges the pages of all shards to one page. There is no IO: the caller reads the shards.
//!
//! A page of a shard may end before the shard does. Behind its last row, rows of the shard can be missing, so up to there, and not
//! further, the order of all rows is certain. A page contains only rows whose places are certain.

use crate::index::Cursor;

/// After this number of rounds, a page may have fewer rows than its limit.
const MAX_ROUNDS: usize = 4;
/// How many more rows than its share are read of each shard at first, because some shards contain more of the next rows than others.
const SPARE: usize = 10;

/// What to read of a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ShardRead {
    /// The number of the shard.
    pub(super) shard: usize,
    /// Only rows after this position; `None`: from the first.
    pub(super) after: Option<Cursor>,
    /// The maximum number of rows, at least 1.
    pub(super) limit: usize,
}

/// A page of all shards.
#[derive(Debug)]
pub(super) struct MergedPage<T> {
    /// In the order of their cursors. At least one, unless there is none.
    pub(super) rows: Vec<T>,
    /// The position after which the next page begins; `None` on the last page.
    pub(super) next: Option<Cursor>,
}

/// A page, while the shards are being read.
pub(super) struct PageMerge<T> {
    limit: usize,
    shards: Vec<Progress>,
    rows: Vec<(Cursor, T)>,
    rounds: usize,
}

/// How far a shard was read.
#[derive(Clone)]
struct Progress {
    /// The last row that was read, or else the end of the previous page.
    last: Option<Cursor>,
    is_complete: bool,
}

impl<T> PageMerge<T> {
    /// A page of at most `limit` rows, at least 1, after the position `after`.
    pub(super) fn new(shards: usize, limit: usize, after: Option<Cursor>) -> Self {
        let unread = Progress {
            last: after,
            is_complete: false,
        };
        Self {
            limit: limit.max(1),
            shards: vec![unread; shards],
            rows: Vec::new(),
            rounds: 0,
        }
    }

    /// What to read next; nothing if the page is known. Each shard appears at most once.
    pub(super) fn next_reads(&mut self) -> Vec<ShardRead> {
        if self.rounds == MAX_ROUNDS {
            return Vec::new();
        }
        self.rounds += 1;
        if self.rounds == 1 {
            let share = self.limit.div_ceil(self.shards.len().max(1));
            return self.reads(self.limit.min(2 * share + SPARE), None);
        }
        self.rows.sort_unstable_by_key(|(cursor, _)| *cursor);
        let missing = self.limit - self.certain().min(self.limit);
        // No row behind this one belongs to the page.
        let last = self.rows.get(self.limit - 1).map(|(cursor, _)| *cursor);
        if missing == 0 {
            Vec::new()
        } else {
            self.reads(missing, last)
        }
    }

    /// The shards that may have rows up to `until`, and this many of them.
    fn reads(&self, limit: usize, until: Option<Cursor>) -> Vec<ShardRead> {
        let may_have_rows = |progress: &Progress| {
            !progress.is_complete && until.is_none_or(|until| progress.last < Some(until))
        };
        let shards = self.shards.iter().enumerate();
        let shards = shards.filter(|(_, progress)| may_have_rows(progress));
        let read = shards.map(|(shard, progress)| ShardRead {
            shard,
            after: progress.last,
            limit,
        });
        read.collect()
    }

    /// Adds a page of a shard: rows in the order of their cursors, and whether no further rows follow.
    /// Without rows, there must be no further ones.
    pub(super) fn add(&mut self, shard: usize, rows: Vec<(Cursor, T)>, is_complete: bool) {
        let last = rows.last().map(|(cursor, _)| *cursor);
        if let Some(progress) = self.shards.get_mut(shard) {
            progress.last = last.or(progress.last);
            progress.is_complete = is_complete || rows.is_empty();
        }
        self.rows.extend(rows);
    }

    /// The number of rows whose places are certain, if the rows are sorted.
    fn certain(&self) -> usize {
        let incomplete = self.shards.iter().filter(|progress| !progress.is_complete);
        match incomplete.map(|progress| progress.last).min() {
            Some(bound) => self.rows.partition_point(|(cursor, _)| Some(*cursor) <= bound),
            None => self.rows.len(),
        }
    }

    /// The page, once there is nothing left to read.
    pub(super) fn finish(mut self) -> MergedPage<T> {
        self.rows.sort_unstable_by_key(|(cursor, _)| *cursor);
        let count = self.certain().min(self.limit);
        let is_complete = count == self.rows.len() && self.shards.iter().all(|progress| progress.is_complete);
        self.rows.truncate(count);
        let last = self.rows.last().map(|(cursor, _)| *cursor);
        MergedPage {
            next: last.filter(|_| !is_complete),
            rows: self.rows.into_iter().map(|(_, row)| row).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use redeliver_core::Timestamp;

    use super::*;
    use crate::job::JobId;

    fn cursor(due: i64, shard: usize, job: i64) -> Cursor {
        Cursor {
            due: Timestamp::from_millis(due),
            id: JobId::new(Timestamp::from_millis(0), i32::try_from(shard).unwrap(), job),
        }
    }

    /// The rows of each shard, in the order of their cursors. Few due times, so that shards share them.
    fn shards() -> impl Strategy<Value = Vec<Vec<Cursor>>> {
        let dues = prop::collection::vec(0..12_i64, 0..30);
        prop::collection::vec(dues, 1..7).prop_map(|shards| {
            let shards = shards.into_iter().enumerate().map(|(shard, dues)| {
                let rows = (0..).zip(dues).map(|(job, due)| cursor(due, shard, job));
                let mut rows: Vec<_> = rows.collect();
                rows.sort_unstable();
                rows
            });
            shards.collect()
        })
    }

    /// What a shard returns: all rows, up to the limit of the read and of `cut` rows, but at least one. It may not know that it has
    /// no further row.
    fn read(rows: &[Cursor], read: &ShardRead, cut: u8) -> (Vec<(Cursor, Cursor)>, bool) {
        let after = rows.iter().filter(|row| Some(**row) > read.after);
        let all: Vec<_> = after.map(|row| (*row, *row)).collect();
        let count = all.len().min(read.limit).min(usize::from(cut / 2) + 1);
        let is_complete = count == all.len() && (count == 0 || cut.is_multiple_of(2));
        (all[..count].to_vec(), is_complete)
    }

    /// All pages of at most `limit` rows. Returns the pages, and the number of reads.
    fn pages(shards: &[Vec<Cursor>], limit: usize, cuts: &[u8]) -> (Vec<Vec<Cursor>>, usize) {
        let mut cuts = cuts.iter().copied().cycle();
        let (mut pages, mut after, mut reads) = (Vec::new(), None, 0);
        loop {
            let mut merge = PageMerge::new(shards.len(), limit, after);
            loop {
                let next = merge.next_reads();
                if next.is_empty() {
                    break;
                }
                reads += next.len();
                for one in next {
                    let (rows, is_complete) = read(&shards[one.shard], &one, cuts.next().unwrap());
                    merge.add(one.shard, rows, is_complete);
                }
            }
            let MergedPage { rows, next } = merge.finish();
            assert!(rows.len() <= limit);
            assert!(
                next.is_none() || next == rows.last().copied(),
                "{next:?} {rows:?}"
            );
            pages.push(rows);
            match next {
                Some(next) => after = Some(next),
                None => return (pages, reads),
            }
        }
    }

    proptest! {
        #[test]
        fn pages_have_each_row_once(
            shards in shards(),
            limit in 1..40_usize,
            cuts in prop::collection::vec(0..30_u8, 1..20),
        ) {
            let mut all: Vec<Cursor> = shards.concat();
            all.sort_unstable();
            let (pages, _) = pages(&shards, limit, &cuts);
            prop_assert_eq!(pages.concat(), all);
        }

        #[test]
        fn obedient_shards_fill_pages(
            shards in shards(),
            limit in 1..40_usize,
        ) {
            let count = shards.iter().map(Vec::len).sum::<usize>();
            let (pages, _) = pages(&shards, limit, &[u8::MAX - 1]);
            prop_assert!(pages.len() <= count / limit + 1, "{} rows on {} pages of {limit}", count, pages.len());
        }
    }

    #[test]
    fn short_page_hides_no_row() {
        let shards = [vec![cursor(1, 0, 0), cursor(2, 0, 1)], vec![cursor(3, 1, 0)]];
        let mut merge = PageMerge::new(2, 10, None);
        assert_eq!(merge.next_reads().len(), 2);
        merge.add(0, vec![(shards[0][0], 1)], false);
        merge.add(1, vec![(shards[1][0], 3)], true);
        // Only the shard that may have further rows is read again.
        let again = ShardRead {
            shard: 0,
            after: Some(shards[0][0]),
            limit: 9,
        };
        assert_eq!(merge.next_reads(), [again]);
        let page = merge.finish();
        assert_eq!((page.rows, page.next), (vec![1], Some(shards[0][0])));
    }

    #[test]
    fn page_takes_few_reads() {
        let shards: Vec<Vec<Cursor>> = (0..16)
            .map(|shard| (0..400).map(|job| cursor(job, shard, job)).collect())
            .collect();
        let (all, reads) = pages(&shards, 1_000, &[254]);
        assert_eq!(all.len(), 7);
        assert!(reads <= 16 * 8, "{reads}");
    }
}
