//! Time zones as segments of constant offset.
//!
//! Within a segment, local time and instant differ by a constant, so occurrences are found and counted by arithmetic. All that
//! is special about daylight saving time is what happens where two segments meet: local times are missing, or occur twice.
//!
//! The zone data of the system is used if there is any, and otherwise the data that is built in, as for the other zones in the
//! configuration.

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

use crate::invalid::Invalid;

/// The name of the field in errors.
const FIELD: &str = "cron.zone";
/// The maximum length of a zone's name in bytes. The longest one in the IANA database has 32.
const MAX_NAME: usize = 64;

/// An IANA time zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Zone(TimeZone);

/// The seconds with one offset. Seconds are since the Unix epoch, offsets are east of UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// The first second.
    pub(crate) first: i64,
    /// The last second.
    pub(crate) last: i64,
    /// The offset in seconds. `local = instant + offset`.
    pub(crate) offset: i64,
    /// The offset before `first`.
    pub(crate) before: i64,
    /// The offset after `last`.
    pub(crate) after: i64,
}

impl Segment {
    /// The number of local seconds that are missing before the segment.
    pub(crate) fn gap(&self) -> i64 {
        (self.offset - self.before).max(0)
    }

    /// The number of local seconds at the beginning of the segment that have already occurred before it.
    pub(crate) fn repeated(&self) -> i64 {
        (self.before - self.offset).max(0)
    }

    /// The number of local seconds at the end of the segment that occur once more after it.
    pub(crate) fn repeats(&self) -> i64 {
        (self.offset - self.after).max(0)
    }
}

impl Zone {
    /// The zone of cron expressions that name none, and of intervals.
    pub(crate) const UTC: Self = Self(TimeZone::UTC);

    /// Looks up a zone by its name in the IANA database.
    ///
    /// # Errors
    /// If the name is unknown. The error contains a similar name if there is one.
    pub(crate) fn named(name: &str) -> Result<Self, Invalid> {
        if name.is_empty() {
            return Err(Invalid::new(FIELD, "is empty; use a name such as Europe/Berlin"));
        }
        if name.len() > MAX_NAME {
            let problem = format!("has {} bytes; no IANA zone has more than {MAX_NAME}", name.len());
            return Err(Invalid::new(FIELD, problem));
        }
        match TimeZone::get(name) {
            Ok(zone) if !zone.is_unknown() => Ok(Self(zone)),
            _ => {
                let problem = format!("`{}` is not an IANA time zone{}", name.escape_debug(), hint(name));
                Err(Invalid::new(FIELD, problem))
            }
        }
    }

    /// The name of the zone, with the letter case of the IANA database.
    pub(crate) fn name(&self) -> &str {
        self.0.iana_name().unwrap_or("UTC")
    }

    /// The local time with offset and zone, as in RFC 9557.
    pub(crate) fn text(&self, millis: i64) -> Option<String> {
        let instant = Timestamp::from_millisecond(millis).ok()?;
        Some(instant.to_zoned(self.0.clone()).to_string())
    }

    /// The segment that contains a second. Seconds outside of what jiff supports are in the first or last segment.
    pub(crate) fn segment(&self, second: i64) -> Segment {
        let at = timestamp(second);
        let offset_at = |at| i64::from(self.0.to_offset(at).seconds());
        let offset = offset_at(at);
        let mut segment = Segment {
            first: i64::MIN,
            last: i64::MAX,
            offset,
            before: offset,
            after: offset,
        };
        // Some transitions change only the abbreviation.
        for transition in self.0.preceding(just_after(at)) {
            let start = transition.timestamp().as_second();
            let before = offset_at(timestamp(start - 1));
            if before != offset {
                (segment.first, segment.before) = (start, before);
                break;
            }
        }
        let next = self
            .0
            .following(at)
            .find(|transition| i64::from(transition.offset().seconds()) != offset);
        if let Some(next) = next {
            segment.last = next.timestamp().as_second() - 1;
            segment.after = i64::from(next.offset().seconds());
        }
        segment
    }
}

fn timestamp(second: i64) -> Timestamp {
    let second = second.clamp(Timestamp::MIN.as_second(), Timestamp::MAX.as_second());
    Timestamp::from_second(second).unwrap_or(Timestamp::MAX)
}

fn just_after(at: Timestamp) -> Timestamp {
    at.checked_add(SignedDuration::from_nanos(1))
        .unwrap_or(Timestamp::MAX)
}

/// `, did you mean ...?` if a zone has a similar name or is in the same place.
fn hint(name: &str) -> String {
    let folded = name.to_lowercase().replace(' ', "_");
    let last_part = |name: &str| name.rsplit('/').next().unwrap_or(name).to_owned();
    let limit = (name.len() / 3).max(2);
    let nearest = jiff::tz::db()
        .available()
        .filter_map(|known| {
            let known = known.as_str();
            let lower = known.to_lowercase();
            // A distance is at least the difference of the lengths, and takes quadratic time to compute.
            let is_near = |one: &str, other: &str| one.len().abs_diff(other.len()) <= limit;
            if !is_near(&folded, &lower) && !is_near(&last_part(&folded), &last_part(&lower)) {
                return None;
            }
            // Most wrong names lack the region, or have another one: `Berlin`, `Germany/Berlin`.
            let whole = strsim::damerau_levenshtein(&folded, &lower);
            let part = strsim::damerau_levenshtein(&last_part(&folded), &last_part(&lower));
            Some((whole.min(part + 1), whole, known.to_owned()))
        })
        .min();
    match nearest {
        Some((distance, _, nearest)) if distance <= limit => {
            format!(", did you mean `{nearest}`?")
        }
        _ => "; use a name such as Europe/Berlin".to_owned(),
    }
}
