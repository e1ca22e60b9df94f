//! `GetDeadLetterStats` with `by`: counts by the values of fields.

use jiff::tz::TimeZone;
use redeliver_proto::error::invalid;
use redeliver_proto::v1;
use redeliver_service::audit::Action;
use tonic::Status;

use super::overview::limit;
use super::{Api, bounded};
use crate::access::Viewer;
use crate::audit::Disclosure;
use crate::filter::{NumberField, Restriction};
use crate::index::{self, Breakdown, COUNT_FIELDS, CountField, Shown};
use crate::masking::MASK;

const MAX_FIELDS: usize = 5;
/// The number of counts: the default and the maximum.
const COUNTS: (u32, u32) = (50, 1_000);
/// Stands for headers of topics whose payloads the caller does not see.
const WITHHELD: &str = "<withheld>";

impl Api {
    pub(super) async fn count_by(
        &self,
        viewer: &Viewer,
        request: v1::GetDeadLetterStatsRequest,
    ) -> Result<v1::DeadLetterStats, Status> {
        let filter = viewer.limit(self.parse_filter(&request.filter)?)?;
        let by = fields(&request.by)?;
        let (zone, limit) = (zone(&request.zone)?, limit("limit", request.limit, COUNTS)?);
        let discloses = by.iter().any(|field| matches!(field, CountField::Header(_)));
        if discloses {
            viewer.require_some_payloads()?;
        }
        let completeness = self.completeness();
        let needs_states = filter.written().tests(NumberField::State) || by.contains(&CountField::State);
        Self::check_states(needs_states, &completeness)?;
        let of = viewer.clone();
        let counted = self.pool.query(move |connection| {
            let filter = filter.resolve(connection)?;
            let query = Breakdown {
                filter: &filter,
                by: &by,
                zone: &zone,
                limit,
            };
            index::count_by(connection, &query, |topic| shown(&of, topic, &by))
        });
        let counted = counted.await?;
        // The states were read by the query, which may have waited for its turn.
        let completeness = self.completeness_since(&completeness);
        Self::check_states(needs_states, &completeness)?;
        if counted.disclosed > 0 || counted.is_masked {
            let filter = self.recorded_filter(&request.filter)?;
            let disclosure = Disclosure {
                count: counted.disclosed,
                is_masked: counted.is_masked,
                target: request.by.join(","),
                ..Disclosure::of(Action::ListDeadLetters, &filter, [])
            };
            self.audit.record(viewer, disclosure, self.clock.now()).await?;
        }
        let counts = counted.counts.into_iter();
        let counts = counts.map(|(values, count)| v1::DeadLetterCount { values, count });
        Ok(v1::DeadLetterStats {
            counts: Some(v1::DeadLetterCounts {
                counts: counts.collect(),
                total: counted.total,
                other: counted.other,
                partial: counted.is_partial,
            }),
            lag: self.shared.lag(|topic| viewer.sees(topic)),
            completeness: Some(self.completeness_message(&completeness, viewer)),
            ..v1::DeadLetterStats::default()
        })
    }
}

/// What a caller sees of these fields in a topic.
fn shown(viewer: &Viewer, topic: &str, by: &[CountField]) -> Vec<Shown> {
    let mask = viewer.mask(topic);
    let shown = |field: &CountField| match field.restriction() {
        Some(Restriction::Header(..)) if !viewer.sees_payloads(topic) => Shown::Text(WITHHELD),
        Some(restriction) if mask.hides_tested(&restriction) => match restriction {
            Restriction::Header(..) => Shown::Text(MASK),
            _ => Shown::OfGroup,
        },
        _ => Shown::Value,
    };
    by.iter().map(shown).collect()
}

fn fields(names: &[String]) -> Result<Vec<CountField>, Status> {
    let refused = |problem: String| invalid("by", problem, "BY_INVALID", []);
    if names.len() > MAX_FIELDS {
        return Err(refused(format!(
            "has {} fields; at most {MAX_FIELDS}",
            names.len()
        )));
    }
    let mut fields = Vec::new();
    for name in names {
        let field = CountField::named(name)
            .ok_or_else(|| refused(format!("`{}` is not one of {COUNT_FIELDS}", bounded(name))))?;
        if fields.contains(&field) {
            return Err(refused(format!("`{}` is there twice", bounded(name))));
        }
        fields.push(field);
    }
    Ok(fields)
}

fn zone(name: &str) -> Result<TimeZone, Status> {
    if name.is_empty() {
        return Ok(TimeZone::UTC);
    }
    let zone = TimeZone::get(name).ok().filter(|zone| !zone.is_unknown());
    zone.ok_or_else(|| {
        let problem = format!(
            "`{}` is not an IANA time zone such as Europe/Berlin",
            bounded(name)
        );
        invalid("zone", problem, "ZONE_INVALID", [])
    })
}
