//! Row numbers that increase with `dead_at`, so that the full-text index and the table itself return rows in the order of time.
//!
//! A row number is a bucket of 8 ms of `dead_at` and a slot in the bucket. Rows of the same bucket are in no particular order;
//! readers sort them by `dead_at` and by the hash of the id. The slot comes from a number that the writer counts up, so that it
//! is almost always free.

use std::cmp::Ordering;

use redeliver_core::Timestamp;

const BUCKET_BITS: u32 = 3;
const SLOT_BITS: u32 = 23;
/// The buckets from 1970 to 2248. Earlier and later times share the first and the last one.
const LAST_BUCKET: i64 = (1 << 40) - 1;
const SLOTS: i64 = 1 << SLOT_BITS;
/// The distance between the slots of two attempts. It is odd, so that the attempts reach all slots, and about 0.618 of their number, so
/// that few attempts lead out of a long run of slots in use.
const STRIDE: i64 = 5_184_445;
/// After this many slots that are in use, the bucket counts as full: with random slots, one of which 99.3% are in use.
const ATTEMPTS_PER_BUCKET: i64 = 1_000;

/// A row that is not free after this many attempts, in a hundred buckets, will not be.
pub(super) const MAX_ATTEMPTS: i64 = 100 * ATTEMPTS_PER_BUCKET;

/// The bucket of a time.
pub(super) fn bucket(dead_at: Timestamp) -> i64 {
    (dead_at.as_millis() >> BUCKET_BITS).clamp(0, LAST_BUCKET)
}

/// The row number to try in the given attempt, counted from 0, less than [`MAX_ATTEMPTS`]. Rows beyond a full bucket, which has
/// several million rows of 8 ms, go to the next one, and those beyond the last bucket to the one before: [`time`] then tells
/// their place in lists.
pub(super) fn candidate(dead_at: Timestamp, number: i64, attempt: i64) -> i64 {
    let (bucket, away) = (bucket(dead_at), attempt / ATTEMPTS_PER_BUCKET);
    let bucket = if bucket + away <= LAST_BUCKET {
        bucket + away
    } else {
        LAST_BUCKET - away
    };
    let slot = number.wrapping_add(attempt * STRIDE).rem_euclid(SLOTS);
    bucket << SLOT_BITS | slot
}

/// The time by which a row is listed, in milliseconds: that of its dead letter or, beyond a full bucket, the nearest one in the bucket of the row. With its own
/// time, it would be outside of the rows that a page or a range of times reads.
pub(super) fn time(row: i64, dead_at: Timestamp) -> i64 {
    let of_row = row >> SLOT_BITS;
    match of_row.cmp(&bucket(dead_at)) {
        Ordering::Equal => dead_at.as_millis(),
        Ordering::Greater => of_row << BUCKET_BITS,
        Ordering::Less => ((of_row + 1) << BUCKET_BITS) - 1,
    }
}

/// The first row number of the bucket of a time.
pub(super) fn first(dead_at: Timestamp) -> i64 {
    bucket(dead_at) << SLOT_BITS
}

/// The last row number of the bucket of a time.
pub(super) fn last(dead_at: Timestamp) -> i64 {
    first(dead_at) | (SLOTS - 1)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const fn at(millis: i64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    #[test]
    fn later_buckets_have_higher_rows() {
        let times = [
            i64::MIN,
            -1,
            0,
            7,
            8,
            1_700_000_000_000,
            8_000_000_000_000,
            i64::MAX,
        ];
        for pair in times.windows(2) {
            let (earlier, later) = (at(pair[0]), at(pair[1]));
            assert!(bucket(earlier) <= bucket(later), "{pair:?}");
            if bucket(earlier) < bucket(later) {
                assert!(
                    candidate(earlier, i64::MAX, 0) < candidate(later, 0, 0),
                    "{pair:?}"
                );
                assert!(last(earlier) < first(later), "{pair:?}");
            }
        }
    }

    #[test]
    fn bucket_takes_millions_of_rows() {
        // Later numbers meet slots of earlier ones, after there were others in between.
        let numbers = (0..6).flat_map(|start| (0..1_000_000).map(move |number| start * 2_500_000 + number));
        let time = at(1_700_000_000_003);
        let mut is_used = vec![false; usize::try_from(SLOTS).unwrap()];
        let mut most_attempts = 0;
        for number in numbers {
            let free = (0..ATTEMPTS_PER_BUCKET).find(|attempt| {
                let slot = candidate(time, number, *attempt) - first(time);
                !std::mem::replace(&mut is_used[usize::try_from(slot).unwrap()], true)
            });
            most_attempts = most_attempts.max(free.expect("a free slot in the bucket"));
        }
        assert!((1..100).contains(&most_attempts), "{most_attempts}");
    }

    #[test]
    fn row_is_within_its_bucket() {
        let time = at(1_700_000_000_003);
        for number in [0, 1, SLOTS - 1, SLOTS, i64::MAX] {
            let row = candidate(time, number, 0);
            assert!((first(time)..=last(time)).contains(&row), "{number}");
            assert_ne!(row, candidate(time, number, 1), "{number}");
            assert!(candidate(time, number, ATTEMPTS_PER_BUCKET) > last(time));
            // Its time is in the bucket of the row, too.
            for (dead_at, attempt) in [
                (time, 0),
                (time, MAX_ATTEMPTS - 1),
                (at(i64::MIN), 0),
                (at(i64::MAX), 0),
                (at(i64::MAX), MAX_ATTEMPTS - 1),
            ] {
                let row = candidate(dead_at, number, attempt);
                let listed = at(super::time(row, dead_at));
                assert!(
                    (first(listed)..=last(listed)).contains(&row),
                    "{dead_at:?} {attempt}"
                );
                assert_eq!(listed == dead_at, attempt == 0);
            }
        }
        // The last bucket, which all times from 2248 on share, has others beside it, too.
        let attempts = (0..MAX_ATTEMPTS).step_by(usize::try_from(ATTEMPTS_PER_BUCKET).unwrap());
        let rows: HashSet<i64> = attempts
            .map(|attempt| candidate(at(i64::MAX), 7, attempt))
            .collect();
        assert_eq!(rows.len(), 100);
        assert!(rows.iter().all(|row| (0..=last(at(i64::MAX))).contains(row)));
    }
}
