//! Which waiting records match a filter, and what is known of them.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use redeliver_core::{JobId, Position, Record, Timestamp};

use super::Place;
use super::counts::Counts;
use super::facts::{Facts, Visible};
use super::page::{Cursor, Details, Listing, Order, Page, Row};
use crate::masking::Mask;

/// The maximum number of long waits that a scan remembers. Which of them still wait is known at the end of the scan.
const MAX_SCHEDULED: usize = 200_000;

/// Which records count. What is not set applies to all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Filter {
    pub(crate) place: Option<Place>,
    pub(crate) code: Option<String>,
    pub(crate) class: Option<String>,
    pub(crate) entered_before: Option<Timestamp>,
    pub(crate) more_attempts_than: Option<u32>,
    pub(crate) origin_topic: Option<String>,
    pub(crate) origin_partition: Option<i32>,
    pub(crate) origin_offset: Option<i64>,
    /// Only what waits in a tier.
    pub(crate) in_tiers: bool,
    /// Only what waits with the scheduler as this job.
    pub(crate) job: Option<JobId>,
    /// Only what the scheduler has written since.
    pub(crate) states_since: Option<Timestamp>,
}

impl Filter {
    /// Whether records match that wait at this place.
    pub(crate) fn has_place(&self, place: Place) -> bool {
        let is_wanted = !self.in_tiers || matches!(place, Place::Tier(_));
        is_wanted && self.place.is_none_or(|wanted| wanted == place)
    }

    /// What the caller does not see does not match.
    pub(crate) fn matches(&self, facts: &Facts) -> bool {
        let origin = facts.origin.as_ref();
        let is = |wanted: &Option<String>, found: Option<&str>| {
            wanted
                .as_ref()
                .is_none_or(|wanted| found == Some(wanted.as_str()))
        };
        is(&self.code, facts.code.as_deref())
            && is(&self.class, facts.class.as_deref())
            && self
                .entered_before
                .is_none_or(|before| facts.entered().is_some_and(|entered| entered < before))
            && self
                .more_attempts_than
                .is_none_or(|than| facts.attempts.is_some_and(|attempts| attempts > than))
            && is(&self.origin_topic, origin.map(|origin| &*origin.topic))
            && self
                .origin_partition
                .is_none_or(|wanted| origin.is_some_and(|origin| origin.partition == wanted))
            && self
                .origin_offset
                .is_none_or(|wanted| origin.is_some_and(|origin| origin.offset == wanted))
    }
}

/// The maximum size of a key in a list, in bytes.
const MAX_KEY: usize = 1 << 10;

/// What is wanted beside counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Detail {
    /// These records.
    Rows(Listing),
    /// How many are due in each of this number of minutes.
    Forecast(usize),
}

/// Counts the records of pipelines that match.
#[derive(Debug)]
pub(crate) struct Tally {
    filter: Filter,
    now: Timestamp,
    /// By pipeline and place.
    counts: BTreeMap<(usize, Place), Counts>,
    /// Of the forecast of each count.
    minutes: usize,
    order: Order,
    keys: Vec<bool>,
    page: Page,
    /// Long waits that were scheduled when their newest state was read, and match.
    scheduled: HashMap<JobId, Row>,
    max_scheduled: usize,
    is_truncated: bool,
}

/// What a scan has found.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) counts: BTreeMap<(usize, Place), Counts>,
    minutes: usize,
    pub(crate) rows: Vec<Row>,
    /// Where the next page begins.
    pub(crate) next: Option<Cursor>,
    /// Long waits are missing.
    pub(crate) is_truncated: bool,
}

impl Found {
    /// All counts together. A forecast of nothing has zeros.
    pub(crate) fn total(&self) -> Counts {
        let mut total = Counts::forecasting(self.minutes);
        for counts in self.counts.values() {
            total.merge(counts);
        }
        total
    }
}

impl Tally {
    pub(crate) fn new(filter: Filter, detail: Detail, now: Timestamp) -> Self {
        let (listing, minutes) = match detail {
            Detail::Rows(listing) => (listing, 0),
            Detail::Forecast(minutes) => (Listing::default(), minutes),
        };
        Self {
            filter,
            now,
            counts: BTreeMap::new(),
            minutes,
            order: listing.order,
            keys: listing.keys,
            page: Page::new(listing.limit, listing.after),
            scheduled: HashMap::new(),
            max_scheduled: MAX_SCHEDULED,
            is_truncated: false,
        }
    }

    /// Adds a record that waits.
    pub(crate) fn add(&mut self, pipeline: usize, place: Place, record: &Record, mask: &Mask<'_>) {
        let visible = Visible::of(record, mask);
        let job = (place == Place::Scheduler)
            .then(|| job_of_command(record))
            .flatten();
        if let Some(row) = self.row(pipeline, place, job, record, &visible) {
            let shows_key = self.keys.get(pipeline).is_some_and(|shows| *shows);
            let details = || Details {
                message: visible.message(),
                key: record.key.as_ref().filter(|_| shows_key).map(|key| {
                    // Copied, so that the page does not keep the record.
                    let shown = Bytes::copy_from_slice(&key[..key.len().min(MAX_KEY)]);
                    (shown, key.len() > MAX_KEY)
                }),
            };
            self.count(row, details);
        }
    }

    /// Adds the state of a job: a record that waits with the scheduler, or `None`. The newest state of a job counts.
    pub(crate) fn add_state(&mut self, job: JobId, waiting: Option<(usize, &Record, &Mask<'_>)>) {
        let row = waiting.and_then(|(pipeline, record, mask)| {
            self.row(
                pipeline,
                Place::Scheduler,
                Some(job),
                record,
                &Visible::of(record, mask),
            )
        });
        match row {
            None => drop(self.scheduled.remove(&job)),
            Some(row) if self.scheduled.len() < self.max_scheduled || self.scheduled.contains_key(&job) => {
                self.scheduled.insert(job, row);
            }
            Some(_) => self.is_truncated = true,
        }
    }

    fn row(
        &self,
        pipeline: usize,
        place: Place,
        job: Option<JobId>,
        record: &Record,
        visible: &Visible<'_>,
    ) -> Option<Row> {
        if self.filter.job.is_some() && self.filter.job != job {
            return None;
        }
        let facts = visible.facts(record, true, self.now);
        self.filter.matches(&facts).then(|| Row {
            pipeline,
            place,
            position: record.position.clone(),
            job,
            rank: self.order.rank(&facts),
            facts,
            details: Details::default(),
        })
    }

    fn count(&mut self, row: Row, details: impl FnOnce() -> Details) {
        let counts = self.counts.entry((row.pipeline, row.place));
        let counts = counts.or_insert_with(|| Counts::forecasting(self.minutes));
        counts.add(&row.facts, self.now);
        self.page.offer(row, details);
    }

    pub(crate) fn finish(mut self) -> Found {
        for row in std::mem::take(&mut self.scheduled).into_values() {
            self.count(row, Details::default);
        }
        let (rows, next) = self.page.into_rows();
        Found {
            counts: self.counts,
            minutes: self.minutes,
            rows,
            next,
            is_truncated: self.is_truncated,
        }
    }
}

/// The job that the scheduler will make of the record in this command: its id is that of the command.
pub(crate) fn job_of_command(record: &Record) -> Option<JobId> {
    let Position {
        partition, offset, ..
    } = record.position;
    Some(JobId::new(record.timestamp?, partition, offset))
}

#[cfg(test)]
mod tests {
    use redeliver_core::headers::{self, Origin};
    use redeliver_core::{Failure, Headers, HumanDuration};
    use redeliver_testkit::record_at;

    use super::*;
    use crate::config::MaskingRule;
    use crate::masking::Masking;

    const NOW: Timestamp = Timestamp::from_millis(1_000_000);
    const TIER: Place = Place::Tier(HumanDuration::from_secs(30));

    fn waiting(offset: i64, attempts: u32, code: &str, due: i64) -> Record {
        let mut list = Headers::new();
        let origin = Origin {
            topic: "p".into(),
            partition: 1,
            offset,
            timestamp: Some(Timestamp::from_millis(offset)),
        };
        headers::write_lineage(&mut list, "p", &origin, attempts);
        headers::write_failure(&mut list, &Failure::transient(code, "secret 4711"), NOW);
        list.push_text(headers::PROCESS_AFTER, &Timestamp::from_millis(due).to_string());
        Record {
            timestamp: Some(NOW),
            headers: list,
            ..record_at("p-retry-30s", 0, offset)
        }
    }

    fn rows() -> Detail {
        Detail::Rows(Listing {
            limit: 10,
            ..Listing::default()
        })
    }

    fn found(filter: Filter, mask: &Mask<'_>) -> Found {
        listed(filter, mask, rows())
    }

    fn listed(filter: Filter, mask: &Mask<'_>, detail: Detail) -> Found {
        let mut tally = Tally::new(filter, detail, NOW);
        tally.add(0, TIER, &waiting(10, 1, "a", 2_000_000), mask);
        tally.add(0, TIER, &waiting(20, 3, "b", 900_000), mask);
        tally.add(1, Place::Due, &waiting(30, 2, "a", 500_000), mask);
        tally.finish()
    }

    fn offsets(found: &Found) -> Vec<i64> {
        found.rows.iter().map(|row| row.position.offset).collect()
    }

    #[test]
    fn records_match_if_all_conditions_apply() {
        let is = |filter: Filter, expected: &[i64]| {
            let found = found(filter.clone(), &Mask::default());
            assert_eq!(offsets(&found), expected, "{filter:?}");
            assert_eq!(found.total().records, expected.len() as u64);
        };
        let all = Filter::default;
        is(all(), &[30, 20, 10]);
        is(
            Filter {
                code: Some("a".into()),
                ..all()
            },
            &[30, 10],
        );
        is(
            Filter {
                class: Some("throttled".into()),
                ..all()
            },
            &[],
        );
        is(
            Filter {
                entered_before: Some(Timestamp::from_millis(20)),
                ..all()
            },
            &[10],
        );
        is(
            Filter {
                more_attempts_than: Some(2),
                ..all()
            },
            &[20],
        );
        is(
            Filter {
                origin_topic: Some("p".into()),
                origin_offset: Some(30),
                ..all()
            },
            &[30],
        );
        is(
            Filter {
                origin_topic: Some("q".into()),
                ..all()
            },
            &[],
        );
        is(
            Filter {
                origin_partition: Some(0),
                ..all()
            },
            &[],
        );
    }

    #[test]
    fn records_have_the_wanted_order() {
        for (order, expected) in [
            (Order::Due, [30, 20, 10]),
            (Order::Attempts, [20, 30, 10]),
            (Order::Age, [10, 20, 30]),
        ] {
            let mut listing = Listing {
                order,
                limit: 2,
                ..Listing::default()
            };
            let first = listed(Filter::default(), &Mask::default(), Detail::Rows(listing.clone()));
            assert_eq!(offsets(&first), expected[..2], "{order:?}");
            listing.after = first.next;
            let last = listed(Filter::default(), &Mask::default(), Detail::Rows(listing));
            assert_eq!(
                (offsets(&last), last.next.clone()),
                (expected[2..].to_vec(), None),
                "{order:?}"
            );
            assert_eq!(last.total().records, 3, "all of them count");
        }
    }

    #[test]
    fn keys_are_shown_by_pipeline() {
        let listing = Listing {
            limit: 10,
            keys: vec![false, true],
            ..Listing::default()
        };
        let mut tally = Tally::new(Filter::default(), Detail::Rows(listing), NOW);
        for (offset, (pipeline, length)) in (0..).zip([(0, 1), (1, 1), (1, MAX_KEY + 1)]) {
            let record = Record {
                key: Some(vec![b'k'; length].into()),
                ..waiting(offset, 1, "a", 2_000_000)
            };
            tally.add(pipeline, TIER, &record, &Mask::default());
        }
        let keys: Vec<_> = tally
            .finish()
            .rows
            .into_iter()
            .map(|row| row.details.key)
            .collect();
        let key = |length, is_cut| Some((Bytes::from(vec![b'k'; length]), is_cut));
        assert_eq!(keys, [None, key(1, false), key(MAX_KEY, true)]);
    }

    #[test]
    fn masked_fields_are_hidden_and_unmatched() {
        let rule = MaskingRule {
            topics: vec!["*".to_owned()],
            key: false,
            fields: Vec::new(),
            headers: vec!["error-code".to_owned(), "retry-count".to_owned()],
            messages: vec!["[0-9]+".parse().unwrap()],
        };
        let masking = Masking::new(&[rule]);
        let mask = masking.of("p-dlq");
        let all = found(Filter::default(), &mask);
        for row in &all.rows {
            assert_eq!(row.facts.code.as_deref(), Some("<masked>"));
            assert_eq!(row.facts.attempts, None);
            assert_eq!(row.details.message.as_deref(), Some("secret <masked>"));
            assert!(!row.facts.is_malformed);
        }
        assert_eq!(all.total().codes(9).0, [("<masked>", 3)]);
        assert_eq!(all.total().max_attempts, 0);
        for filter in [
            Filter {
                code: Some("a".into()),
                ..Filter::default()
            },
            Filter {
                more_attempts_than: Some(0),
                ..Filter::default()
            },
        ] {
            assert_eq!(offsets(&found(filter, &mask)), [0_i64; 0]);
        }
    }

    #[test]
    fn newest_job_state_decides_the_wait() {
        let mask = Mask::default();
        let id = |number| JobId::new(NOW, 0, number);
        let record = |offset| waiting(offset, 1, "a", 2_000_000);
        let mut tally = Tally::new(Filter::default(), rows(), NOW);
        tally.max_scheduled = 2;
        tally.add_state(id(1), Some((0, &record(1), &mask)));
        tally.add_state(id(2), Some((0, &record(2), &mask)));
        // Too many, which is said.
        tally.add_state(id(3), Some((0, &record(3), &mask)));
        tally.add_state(id(1), None);
        tally.add_state(id(2), Some((0, &record(4), &mask)));
        let found = tally.finish();
        assert_eq!((offsets(&found), found.is_truncated), (vec![4], true));
        assert_eq!(found.counts[&(0, Place::Scheduler)].records, 1);
        assert_eq!(found.rows[0].job, Some(id(2)));
    }

    #[test]
    fn long_wait_is_found_by_job() {
        let mask = Mask::default();
        let job = JobId::new(NOW, 0, 2);
        let filter = Filter {
            job: Some(job),
            ..Filter::default()
        };
        let mut tally = Tally::new(filter, rows(), NOW);
        for offset in 0..4 {
            tally.add(0, TIER, &waiting(offset, 1, "a", 2_000_000), &mask);
        }
        // The command of the job is not decided yet.
        tally.add(0, Place::Scheduler, &waiting(2, 1, "a", 2_000_000), &mask);
        tally.add_state(
            JobId::new(NOW, 0, 9),
            Some((0, &waiting(3, 1, "a", 2_000_000), &mask)),
        );
        let found = tally.finish();
        assert_eq!((offsets(&found), found.rows[0].job), (vec![2], Some(job)));
    }

    #[test]
    fn forecast_of_nothing_has_zeros() {
        let found = Tally::new(Filter::default(), Detail::Forecast(3), NOW).finish();
        assert_eq!((found.total().per_minute, found.total().later), (vec![0; 3], 0));
        // It is not wanted.
        let found = Tally::new(Filter::default(), rows(), NOW).finish();
        assert!(found.total().per_minute.is_empty());
    }

    #[test]
    fn malformed_record_is_last() {
        let mut record = waiting(40, 1, "a", 1);
        record.headers = record.headers.filtered(|name| name != headers::RETRY_COUNT);
        let mut tally = Tally::new(Filter::default(), rows(), NOW);
        let mut without_due = waiting(50, 1, "a", 1);
        without_due.headers.push_text(headers::PROCESS_AFTER, "soon");
        for record in [&without_due, &record, &waiting(60, 1, "a", 2)] {
            tally.add(0, TIER, record, &Mask::default());
        }
        let found = tally.finish();
        assert_eq!((found.total().records, found.total().malformed), (3, 2));
        assert_eq!(offsets(&found), [40, 60, 50]);
    }
}
