//! Whether the checkpoint of an index is recent enough to continue from it.
//!
//! Compaction deletes tombstones some time after they were written. An index that is behind for longer would miss them when it
//! reads the rest of the state topic, and bring back jobs that were dispatched long ago. Half of the time that the topic keeps
//! tombstones is the limit: they are also read some time after the checkpoint was found to be recent enough.
//!
//! The age does not matter if nothing was written after the checkpoint. So an idle shard is never rebuilt for its age, and the
//! owner renews the time of an idle shard's checkpoint, for the case that its successor finds new records.

use std::time::Duration;

/// A checkpoint of less than this age is always recent enough: half of the shortest `delete.retention.ms` with which a
/// scheduler starts.
pub(crate) const ALWAYS_RECENT: Duration = Duration::from_secs(12 * 3600);
/// The longest time between two renewals of an idle shard's checkpoint, well below [`ALWAYS_RECENT`].
const RENEWAL: Duration = Duration::from_secs(3600);
/// Renewals come earlier by up to this time, so that the shards of a process do not renew at the same moment.
const RENEWAL_JITTER: Duration = Duration::from_secs(360);

/// The age from which on a checkpoint is not continued, for a topic that keeps tombstones for this time, if that is known.
pub(crate) fn max_age(tombstones: Option<Duration>) -> Duration {
    tombstones.map_or(ALWAYS_RECENT, |kept| kept / 2)
}

/// Whether no record was written after the checkpoint at this offset, in a topic that ends at `end`. One offset can follow: the
/// marker of the transaction that wrote the last record. Two can be another record and its marker, of which compaction may have
/// left nothing.
pub(crate) fn is_at_end(checkpoint: i64, end: i64) -> bool {
    end <= checkpoint.saturating_add(1)
}

/// The time until the next renewal. `random` is from 0 to 1.
pub(crate) fn renewal_delay(random: f64) -> Duration {
    RENEWAL - RENEWAL_JITTER.mul_f64(random.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_is_half_of_retention() {
        let day = Duration::from_secs(86_400);
        assert_eq!(max_age(Some(7 * day)), 7 * day / 2);
        assert_eq!(max_age(Some(day)), ALWAYS_RECENT);
        assert_eq!(max_age(None), ALWAYS_RECENT);
        // Changed after the start of the process.
        assert_eq!(max_age(Some(day / 4)), day / 8);
    }

    #[test]
    fn only_markers_follow_the_last_record() {
        for (checkpoint, end, expected) in [(0, 0, true), (10, 10, true), (10, 11, true), (10, 12, false)] {
            assert_eq!(is_at_end(checkpoint, end), expected, "{checkpoint} {end}");
        }
    }
}
