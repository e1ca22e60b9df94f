//! Encodes the completed set and the topic fingerprint as the metadata of a commit.
//!
//! There are two forms, of which the shorter one is written (except as described below). Both are base64url without padding
//! after a prefix, and both describe the *incomplete* offsets: a gap in the log (a transaction marker, an aborted or
//! compacted record) is never delivered and counts as completed.
//!
//! - `r1:` lengths of alternating runs as LEB128 varints, beginning with an incomplete run;
//! - `b1:` segments of (varint number of completed offsets to skip, varint number of bits, bitmap with 1 for incomplete,
//!   lowest bit first), and a final varint of completed offsets. A segment begins and ends with an incomplete offset, so a
//!   wide gap costs a new segment instead of one bit per offset.
//!
//! # The topic of the commit
//! An `r1:` text may end with an additional incomplete run, the [`TopicFingerprint`]. It is at least 2^48 long, longer than
//! any other run. It tells whether the commit belongs to the current topic of this name or to a deleted one. `b1:` has
//! no room for a fingerprint, so `r1:` is preferred up to [`PREFERRED_RUNS`] bytes.
//!
//! # Why admitted records always fit
//! Let d be the distances between neighbouring incomplete offsets. `b1` takes at most the sum of w(d) = min(d, 104) bits plus
//! a constant: a distance up to 40 is written as bits, a wider one as a new segment, whose two varints and padding take at
//! most 31 + 8 * len(d - 1) bits, which is neither more than d nor more than 104. `r1` takes at most the sum of
//! u(d) = 8 + 8 * len(d - 1) bits plus a constant, with u(1) = 8. Both w and u are subadditive, so completing an offset
//! (which replaces two distances by their sum) never increases either bound. A tracker that admits records only while one
//! of the bounds is below the limit can therefore encode every set that completions produce, in any order.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use redeliver_core::mutant;
use redeliver_kafka_ffi::TopicId;

use super::OffsetRange;

/// The maximum size of a commit's metadata in bytes: the broker's default of `offset.metadata.max.bytes`.
pub const METADATA_LIMIT: usize = 4096;

const PREFIX_LENGTH: usize = 3;
const RUNS: &str = "r1:";
const BITMAP: &str = "b1:";
/// Bytes after the prefix, before base64.
const PAYLOAD_LIMIT: usize = (METADATA_LIMIT - PREFIX_LENGTH) / 4 * 3;
/// The header, padding and first bit of the first segment, and the final varint. `r1` needs less.
const CONSTANT_BITS: u64 = 192;
/// Up to this distance, bits are cheaper than a new segment.
const WIDEST_IN_SEGMENT: i64 = 40;
/// Up to this many bytes, `r1` with a fingerprint is preferred even if `b1` is shorter.
const PREFERRED_RUNS: usize = 512;

/// The first 48 bits of a topic's id, and a bit above them that is always set. Two consecutive topics of the same name have
/// the same fingerprint with a probability of 2^-48.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TopicFingerprint(u64);

impl TopicFingerprint {
    const MARK: u64 = 1 << 48;

    /// The fingerprint of the topic with this id.
    #[must_use]
    pub fn of(id: TopicId) -> Self {
        let high = u64::try_from(id.bits() >> 80).unwrap_or_default();
        Self(Self::MARK | high)
    }

    /// Interprets the length of a trailing incomplete run.
    fn from_run(length: u64) -> Option<Self> {
        (Self::MARK..2 * Self::MARK)
            .contains(&length)
            .then_some(Self(length))
    }
}

/// Why metadata could not be decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetadataError {
    /// It has neither of the prefixes.
    #[error("commit metadata was not written by redeliver")]
    Foreign,
    /// It describes more than a tracker would write.
    #[error("commit metadata describes more incomplete offsets than fit into {METADATA_LIMIT} bytes")]
    TooLarge,
    /// It has one of the prefixes but cannot be parsed.
    #[error("commit metadata is damaged: {0}")]
    Damaged(&'static str),
}

/// An upper bound of the encoded size of a set, now and after any completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Weight {
    bitmap_bits: u64,
    runs_bits: u64,
}

impl Weight {
    /// The maximum weight of one more offset.
    pub(super) const HEAVIEST: Self = Self {
        bitmap_bits: 104,
        runs_bits: 8 + 8 * 9,
    };

    /// The weight of an offset at this distance (at least 1) from the previous one.
    pub(super) fn of_distance(distance: i64) -> Self {
        let distance = distance.unsigned_abs();
        Self {
            bitmap_bits: distance.min(Self::HEAVIEST.bitmap_bits),
            runs_bits: if distance <= 1 {
                8
            } else {
                8 + 8 * varint_length(distance - 1)
            },
        }
    }

    /// The weight of all but the first of `length` adjacent offsets.
    fn of_run(length: u64) -> Self {
        let more = length.saturating_sub(1);
        Self {
            bitmap_bits: more,
            runs_bits: more.saturating_mul(8),
        }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            bitmap_bits: self.bitmap_bits.saturating_add(other.bitmap_bits),
            runs_bits: self.runs_bits.saturating_add(other.runs_bits),
        }
    }

    pub(super) fn minus(self, other: Self) -> Self {
        Self {
            bitmap_bits: self.bitmap_bits - other.bitmap_bits,
            runs_bits: self.runs_bits - other.runs_bits,
        }
    }

    /// Whether the encoded set certainly fits.
    pub(super) fn fits(self) -> bool {
        let limit = 8 * PAYLOAD_LIMIT as u64 - CONSTANT_BITS;
        self.bitmap_bits <= limit || self.runs_bits <= limit
    }

    /// The weight of these runs of incomplete offsets.
    pub(super) fn of_holes(holes: &[OffsetRange]) -> Self {
        let mut weight = Self::default();
        let mut last: Option<i64> = None;
        for hole in holes {
            if let Some(last) = last {
                weight = weight.plus(Self::of_distance(hole.start - last));
            }
            weight = weight.plus(Self::of_run(hole.length()));
            last = Some(hole.end - 1);
        }
        weight
    }
}

/// Encodes the completed offsets of `[commit, end)`: all except the holes, which are sorted, not adjacent, and within the
/// range. Returns `None` only if the holes are too heavy. Omits the fingerprint if it does not fit.
pub(super) fn encode(
    commit: i64,
    holes: &[OffsetRange],
    end: i64,
    topic: Option<TopicFingerprint>,
) -> Option<String> {
    let mut runs = encode_runs(commit, holes, end);
    let bitmap = encode_bitmap(commit, holes, end);
    let with_topic = match (&mut runs, topic) {
        (Some(runs), Some(TopicFingerprint(fingerprint)))
            if runs.len() <= PREFERRED_RUNS && !mutant!("metadata-omits-the-fingerprint") =>
        {
            push_varint(runs, fingerprint);
            true
        }
        _ => false,
    };
    let (prefix, bytes) = match (runs, bitmap) {
        (Some(runs), _) if with_topic => (RUNS, runs),
        (Some(runs), Some(bitmap)) if bitmap.len() < runs.len() => (BITMAP, bitmap),
        (Some(runs), _) => (RUNS, runs),
        (None, Some(bitmap)) => (BITMAP, bitmap),
        (None, None) => return None,
    };
    let mut text = String::with_capacity(PREFIX_LENGTH + bytes.len().div_ceil(3) * 4);
    text.push_str(prefix);
    URL_SAFE_NO_PAD.encode_string(bytes, &mut text);
    Some(text)
}

fn encode_runs(commit: i64, holes: &[OffsetRange], end: i64) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut at = commit;
    if holes.first().is_none_or(|hole| hole.start != commit) {
        bytes.push(0);
    }
    for hole in holes {
        if hole.start != at {
            push_varint(&mut bytes, (hole.start - at).unsigned_abs());
        }
        push_varint(&mut bytes, hole.length());
        at = hole.end;
        if bytes.len() > PAYLOAD_LIMIT {
            return None;
        }
    }
    push_varint(&mut bytes, (end - at).unsigned_abs());
    (bytes.len() <= PAYLOAD_LIMIT).then_some(bytes)
}

fn encode_bitmap(commit: i64, holes: &[OffsetRange], end: i64) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut at = commit;
    let mut rest = holes;
    while let Some(first) = rest.first() {
        let joined = rest
            .windows(2)
            .take_while(|pair| pair[1].start - (pair[0].end - 1) <= WIDEST_IN_SEGMENT)
            .count();
        let (segment, remaining) = rest.split_at(joined + 1);
        rest = remaining;
        let segment_end = segment[joined].end;
        let bits = usize::try_from(segment_end - first.start).ok()?;
        push_varint(&mut bytes, (first.start - at).unsigned_abs());
        push_varint(&mut bytes, bits as u64);
        let bitmap = bytes.len();
        if bits.div_ceil(8) > PAYLOAD_LIMIT.saturating_sub(bitmap) {
            return None;
        }
        bytes.resize(bitmap + bits.div_ceil(8), 0);
        for hole in segment {
            for offset in hole.start..hole.end {
                let bit = usize::try_from(offset - first.start).ok()?;
                let is_dropped = bit % 8 == 7 && mutant!("metadata-drops-a-bit");
                bytes[bitmap + bit / 8] |= u8::from(!is_dropped) << (bit % 8);
            }
        }
        at = segment_end;
    }
    push_varint(&mut bytes, (end - at).unsigned_abs());
    (bytes.len() <= PAYLOAD_LIMIT).then_some(bytes)
}

/// Decodes the completed ranges after a commit, and the topic fingerprint if there is one. Accepts any text, and uses memory
/// proportional to its length: other programs can write metadata too.
pub(super) fn decode(
    commit: i64,
    metadata: &str,
) -> Result<(Vec<OffsetRange>, Option<TopicFingerprint>), MetadataError> {
    if metadata.is_empty() {
        return Ok((Vec::new(), None));
    }
    let Some((form @ (RUNS | BITMAP), text)) = metadata.split_at_checked(PREFIX_LENGTH) else {
        return Err(MetadataError::Foreign);
    };
    if metadata.len() > METADATA_LIMIT {
        return Err(MetadataError::TooLarge);
    }
    let bytes = URL_SAFE_NO_PAD
        .decode(text)
        .map_err(|_| MetadataError::Damaged("not base64url"))?;
    let mut reader = Reader { bytes: &bytes };
    let mut ranges = Ranges::new(commit);
    let mut topic = None;
    if form == RUNS {
        let mut is_completed = false;
        while !reader.bytes.is_empty() {
            let length = reader.varint()?;
            // A trailing incomplete run is a fingerprint, or has no meaning.
            if !is_completed && reader.bytes.is_empty() {
                topic = TopicFingerprint::from_run(length);
                break;
            }
            if is_completed {
                ranges.complete(length)?;
            } else {
                ranges.hole(length)?;
            }
            is_completed = !is_completed;
        }
    } else {
        while !reader.bytes.is_empty() {
            ranges.complete(reader.varint()?)?;
            if reader.bytes.is_empty() {
                break;
            }
            let bits = reader.varint()?;
            let bitmap = reader.take(bits.div_ceil(8))?;
            for bit in 0..bits {
                // The bitmap is in memory, so the index of a bit fits.
                let bit = usize::try_from(bit).map_err(|_| MetadataError::TooLarge)?;
                if bitmap[bit / 8] >> (bit % 8) & 1 == 1 {
                    ranges.hole(1)?;
                } else {
                    ranges.complete(1)?;
                }
            }
        }
    }
    Ok((ranges.finish()?, topic))
}

/// Collects the decoded ranges and checks that a tracker can continue from them.
struct Ranges {
    at: i64,
    completed: Vec<OffsetRange>,
    holes: Vec<OffsetRange>,
}

impl Ranges {
    fn new(commit: i64) -> Self {
        Self {
            at: commit,
            completed: Vec::new(),
            holes: Vec::new(),
        }
    }

    fn complete(&mut self, length: u64) -> Result<(), MetadataError> {
        Self::push(&mut self.completed, &mut self.at, length)
    }

    fn hole(&mut self, length: u64) -> Result<(), MetadataError> {
        Self::push(&mut self.holes, &mut self.at, length)
    }

    fn push(ranges: &mut Vec<OffsetRange>, at: &mut i64, length: u64) -> Result<(), MetadataError> {
        let end = at.checked_add_unsigned(length).ok_or(MetadataError::TooLarge)?;
        let start = std::mem::replace(at, end);
        match ranges.last_mut() {
            _ if length == 0 => {}
            Some(last) if last.end == start => last.end = end,
            _ => ranges.push(OffsetRange { start, end }),
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Vec<OffsetRange>, MetadataError> {
        let end = self.completed.last().map_or(i64::MIN, |range| range.end);
        while self.holes.last().is_some_and(|hole| hole.start >= end) {
            self.holes.pop();
        }
        if Weight::of_holes(&self.holes).fits() {
            Ok(self.completed)
        } else {
            Err(MetadataError::TooLarge)
        }
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    fn varint(&mut self) -> Result<u64, MetadataError> {
        let mut value = 0u64;
        for shift in (0..63).step_by(7) {
            let (byte, rest) = self
                .bytes
                .split_first()
                .ok_or(MetadataError::Damaged("it ends within a number"))?;
            self.bytes = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(MetadataError::Damaged("a number is out of range"))
    }

    fn take(&mut self, length: u64) -> Result<&'a [u8], MetadataError> {
        let (taken, rest) = usize::try_from(length)
            .ok()
            .and_then(|length| self.bytes.split_at_checked(length))
            .ok_or(MetadataError::Damaged("it ends within a bitmap"))?;
        self.bytes = rest;
        Ok(taken)
    }
}

fn varint_length(value: u64) -> u64 {
    u64::from((64 - (value | 1).leading_zeros()).div_ceil(7))
}

fn push_varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    bytes.push(value.to_le_bytes()[0]);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(start: i64, end: i64) -> OffsetRange {
        OffsetRange { start, end }
    }

    fn ranges(commit: i64, metadata: &str) -> Result<Vec<OffsetRange>, MetadataError> {
        decode(commit, metadata).map(|(ranges, _)| ranges)
    }

    fn completed_between(commit: i64, holes: &[OffsetRange], end: i64) -> Vec<OffsetRange> {
        let mut at = commit;
        let mut completed = Vec::new();
        for hole in holes {
            completed.push(range(at, hole.start));
            at = hole.end;
        }
        completed.push(range(at, end));
        completed.retain(|range| range.start < range.end);
        completed
    }

    #[test]
    fn both_encodings_are_stable() {
        assert_eq!(encode(10, &[range(10, 11)], 15, None).as_deref(), Some("r1:AQQ"));
        assert_eq!(ranges(10, "r1:AQQ"), Ok(vec![range(11, 15)]));
        let every_second: Vec<_> = (0..20).map(|n| range(10 + 2 * n, 11 + 2 * n)).collect();
        let text = encode(10, &every_second, 50, None).unwrap();
        assert_eq!(text, "b1:ACdVVVVVVQE");
        assert_eq!(ranges(10, &text), Ok(completed_between(10, &every_second, 50)));
    }

    #[test]
    fn commit_contains_a_fingerprint() {
        let topic = TopicFingerprint::of(TopicId::from_bits(0x0123_4567_89ab << 80 | 7));
        let text = encode(10, &[range(10, 11)], 15, Some(topic)).unwrap();
        assert_eq!(text, "r1:AQSrk56rtKRA");
        assert_eq!(decode(10, &text), Ok((vec![range(11, 15)], Some(topic))));
        let nothing_completed = encode(10, &[], 10, Some(topic)).unwrap();
        assert_eq!(decode(10, &nothing_completed), Ok((vec![], Some(topic))));
        // A short run is not a fingerprint.
        assert_eq!(decode(10, "r1:AQQF"), Ok((vec![range(11, 15)], None)));
    }

    #[test]
    fn wide_gap_costs_one_segment() {
        let mut holes: Vec<_> = (0..8_000).map(|n| range(2 * n, 2 * n + 1)).collect();
        holes.push(range(1 << 50, (1 << 50) + 1));
        let text = encode(0, &holes, 1 << 51, None).unwrap();
        assert!(text.starts_with(BITMAP) && text.len() < 2_800, "{}", text.len());
        assert_eq!(ranges(0, &text), Ok(completed_between(0, &holes, 1 << 51)));
    }

    #[test]
    fn foreign_metadata_is_not_damaged() {
        for foreign in ["x", "r2:AQ", "{\"a\":1}", "ééé", "leader-epoch=5"] {
            assert_eq!(ranges(0, foreign), Err(MetadataError::Foreign), "{foreign}");
        }
        for damaged in ["r1:!", "r1:gA", "b1:AP8", "r1:____________________"] {
            assert!(
                matches!(ranges(0, damaged), Err(MetadataError::Damaged(_))),
                "{damaged}"
            );
        }
        let long = format!("r1:{}", "A".repeat(METADATA_LIMIT));
        assert_eq!(ranges(0, &long), Err(MetadataError::TooLarge));
        // A hole of 2^40 offsets, then one completed offset: more than a tracker can hold.
        let mut bytes = Vec::new();
        push_varint(&mut bytes, 1 << 40);
        push_varint(&mut bytes, 1);
        let absurd = format!("r1:{}", URL_SAFE_NO_PAD.encode(bytes));
        assert_eq!(ranges(0, &absurd), Err(MetadataError::TooLarge));
        assert_eq!(ranges(i64::MAX - 1, "r1:AQQ"), Err(MetadataError::TooLarge));
    }

    proptest! {
        #[test]
        fn any_text_is_decoded_or_refused(commit in any::<i64>(), text in "(r1:|b1:)?[-_a-zA-Z0-9]{0,80}|.{0,40}") {
            if let Ok(ranges) = ranges(commit, &text) {
                prop_assert!(ranges.iter().all(|range| range.start < range.end && range.start >= commit));
                prop_assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
            }
        }

        #[test]
        fn weights_are_subadditive(
            a in prop_oneof![1i64..300, 1i64..(1 << 61)],
            b in prop_oneof![1i64..300, 1i64..(1 << 61)],
        ) {
            let joined = Weight::of_distance(a + b);
            let apart = Weight::of_distance(a).plus(Weight::of_distance(b));
            prop_assert!(joined.bitmap_bits <= apart.bitmap_bits && joined.runs_bits <= apart.runs_bits);
            prop_assert!(joined.bitmap_bits <= Weight::HEAVIEST.bitmap_bits);
            prop_assert!(joined.runs_bits <= Weight::HEAVIEST.runs_bits);
        }

        #[test]
        fn encodings_fit_and_decode(
            commit in 0i64..(1 << 40),
            skipped in 0i64..3,
            steps in prop::collection::vec(
                (prop_oneof![6 => 2i64..5, 2 => 2i64..300, 1 => 2i64..(1 << 45)], 1i64..40), 0..400),
            tail in 1i64..(1 << 20),
        ) {
            let mut holes = Vec::new();
            let mut at = commit + skipped - 1;
            for (distance, length) in steps {
                let start = if holes.is_empty() { commit + skipped } else { at - 1 + distance };
                holes.push(range(start, start + length));
                at = start + length;
            }
            let end = at.max(commit) + tail;
            let weight = Weight::of_holes(&holes);
            if let Some(bytes) = encode_bitmap(commit, &holes, end) {
                prop_assert!(8 * bytes.len() as u64 <= weight.bitmap_bits + CONSTANT_BITS);
                let text = format!("{BITMAP}{}", URL_SAFE_NO_PAD.encode(bytes));
                prop_assert_eq!(ranges(commit, &text), Ok(completed_between(commit, &holes, end)));
            }
            if let Some(bytes) = encode_runs(commit, &holes, end) {
                prop_assert!(8 * bytes.len() as u64 <= weight.runs_bits + CONSTANT_BITS);
                let text = format!("{RUNS}{}", URL_SAFE_NO_PAD.encode(bytes));
                if weight.fits() {
                    prop_assert_eq!(ranges(commit, &text), Ok(completed_between(commit, &holes, end)));
                }
            }
            if weight.fits() {
                for topic in [None, Some(TopicFingerprint::of(TopicId::from_bits(u128::MAX)))] {
                    let text = encode(commit, &holes, end, topic).unwrap();
                    prop_assert!(text.len() <= METADATA_LIMIT && text.is_ascii());
                    let (ranges, read) = decode(commit, &text).unwrap();
                    prop_assert_eq!(ranges, completed_between(commit, &holes, end));
                    prop_assert!(read.is_none() || read == topic);
                }
            }
        }
    }
}
