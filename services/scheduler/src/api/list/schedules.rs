//! Lists recurring schedules, those whose next occurrence is due first, over all shards; paused and finished ones come last.
//!
//! A schedule that cannot be read hides no other one: the list says which one it is, and in which shard.

use redeliver_core::Failure;
use redeliver_proto::v1;
use redeliver_runtime::config::Verb;
use redeliver_runtime::error_chain::error_chain;

use super::merge::MergedPage;
use super::token::{self, Filters};
use super::{DEFAULT_PAGE_SIZE, Jobs, MAX_PAGE_SIZE, RequestError};
use crate::api::call::Call;
use crate::api::completeness::KafkaWait;
use crate::index::{Cursor, Index, Row};
use crate::request::{Field, Format};
use crate::schedules;

/// How many pages of schedules of all applications are read for a page of one application. Then it may have fewer schedules than its
/// limit.
const MAX_READS: usize = 10;

/// The entries of the index that are schedules.
const SCHEDULES: Filters<'_> = Filters {
    app: Some(""),
    from: None,
    until: None,
};

/// Which schedules to list.
#[derive(Debug, Default)]
pub(crate) struct ListSchedules {
    /// The application. `None`: all.
    pub(crate) app: Option<String>,
    /// The maximum number of schedules. 0 means the default.
    pub(crate) page_size: u32,
    /// The token of the previous page, or empty.
    pub(crate) page_token: String,
}

/// A page of schedules.
#[derive(Debug)]
pub(crate) struct SchedulePage {
    pub(crate) schedules: Vec<v1::Schedule>,
    /// What cannot be read. With an application, also those whose application cannot be read.
    pub(crate) unreadable: Vec<v1::UnreadableSchedule>,
    /// Empty on the last page.
    pub(crate) next_page_token: String,
}

impl ListSchedules {
    /// What a token belongs to: NUL and the application. No application has such a name, so a token of another list is refused.
    fn token_app(&self) -> String {
        format!("\0{}", self.app.as_deref().unwrap_or_default())
    }

    fn limit(&self) -> usize {
        match usize::try_from(self.page_size).unwrap_or(usize::MAX) {
            0 => DEFAULT_PAGE_SIZE,
            size => size.min(MAX_PAGE_SIZE),
        }
    }

    fn after(&self, format: Format) -> Result<Option<Cursor>, Failure> {
        token::decode(&token_filters(&self.token_app()), &self.page_token)
            .map_err(|error| Field("pageToken").malformed(format, &error.to_string()))
    }
}

fn token_filters(app: &str) -> Filters<'_> {
    Filters {
        app: Some(app),
        ..SCHEDULES
    }
}

/// An entry of a list.
#[derive(Debug, PartialEq)]
enum Entry {
    Schedule(Box<v1::Schedule>),
    Unreadable(v1::UnreadableSchedule),
}

impl Entry {
    /// The entry for a row of the index; `None` if it is known to be one of another application. What is of others is not decoded
    /// further.
    fn of(row: &Row, app: Option<&str>) -> Option<Self> {
        let known = schedules::id_and_app(&row.record);
        if let (Some(app), Some((_, of))) = (app, &known)
            && app != of
        {
            return None;
        }
        Some(match schedules::show(&row.record, false) {
            Ok(schedule) => Self::Schedule(Box::new(schedule)),
            Err(error) => {
                let (entry, shard) = (row.cursor.id, row.cursor.id.shard());
                let id = known.map(|(id, _)| id).unwrap_or_default();
                let problem = error_chain(&error);
                tracing::error!(%entry, shard, id, problem, "invalid schedule record in the index");
                Self::Unreadable(v1::UnreadableSchedule { id, shard, problem })
            }
        })
    }
}

/// A page of one application, while the pages of all applications are being read.
struct Filtered<T> {
    limit: usize,
    found: Vec<T>,
    /// After which position the next page begins; `None` on the last page.
    next: Option<Cursor>,
}

impl<T> Filtered<T> {
    /// Adds the rows of a page of all applications, of which `None` are those of other applications. Returns the position from which
    /// to read on, if the page has room and there may be further rows.
    fn add(&mut self, rows: Vec<(Cursor, Option<T>)>, next: Option<Cursor>) -> Option<Cursor> {
        let mut rows = rows.into_iter().peekable();
        while let Some((cursor, row)) = rows.next() {
            self.found.extend(row);
            if self.found.len() == self.limit {
                let has_more = next.is_some() || rows.peek().is_some();
                self.next = has_more.then_some(cursor);
                return None;
            }
        }
        self.next = next;
        next
    }
}

impl<I: Index> Jobs<I> {
    /// A page of the schedules, without their payloads. One that cannot be read does not prevent that.
    pub(crate) async fn list_schedules(
        &self,
        call: &Call,
        request: &ListSchedules,
    ) -> Result<SchedulePage, RequestError> {
        let app = request.app.as_deref();
        self.require(&call.caller, Verb::Read, app, "list_schedules")?;
        let limit = request.limit();
        let read_limit = if app.is_some() { MAX_PAGE_SIZE } else { limit };
        let (mut after, wait) = (request.after(call.format)?, KafkaWait::new());
        let mut page = Filtered {
            limit,
            found: Vec::new(),
            next: None,
        };
        for _ in 0..MAX_READS {
            let to_entry = |row: &Row| Ok((row.cursor, (row.cursor, Entry::of(row, app))));
            let MergedPage { rows, next } = self
                .merge_page(&SCHEDULES, read_limit, after, &wait, to_entry)
                .await?;
            after = page.add(rows, next);
            // A page of all applications is as full as it can be at once.
            if after.is_none() || app.is_none() {
                break;
            }
        }
        let next = page.next;
        let token = next.map(|next| token::encode(&token_filters(&request.token_app()), next));
        let (mut schedules, mut unreadable) = (Vec::new(), Vec::new());
        for entry in page.found {
            match entry {
                Entry::Schedule(schedule) => schedules.push(*schedule),
                Entry::Unreadable(entry) => unreadable.push(entry),
            }
        }
        if schedules.is_empty() && unreadable.is_empty() && request.page_token.is_empty() && token.is_none() {
            self.check_empty(app, call.format)?;
        }
        Ok(SchedulePage {
            schedules,
            unreadable,
            next_page_token: token.unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use bytes::Bytes;
    use redeliver_core::Timestamp;
    use redeliver_proto::Message as _;

    use super::*;
    use crate::request::{Rules, check_listed};

    fn cursor(due: i64) -> Cursor {
        Cursor::end_of(Timestamp::from_millis(due))
    }

    /// Pages of one application from pages of 3 rows of all.
    fn pages(is_of_app: &[bool], limit: usize) -> Vec<Vec<i64>> {
        let rows: Vec<_> = (0..)
            .zip(is_of_app)
            .map(|(due, of_app)| (cursor(due), of_app.then_some(due)))
            .collect();
        let (mut pages, mut start) = (Vec::new(), None);
        loop {
            let mut page = Filtered {
                limit,
                found: Vec::new(),
                next: None,
            };
            let mut after = start;
            loop {
                let rest = rows.iter().filter(|(cursor, _)| Some(*cursor) > after);
                let rest: Vec<_> = rest.copied().collect();
                let read: Vec<_> = rest.iter().take(3).copied().collect();
                let last = read.last().map(|(cursor, _)| *cursor);
                let next = last.filter(|_| rest.len() > read.len());
                after = page.add(read, next);
                if after.is_none() {
                    break;
                }
            }
            pages.push(page.found);
            match page.next {
                Some(next) => start = Some(next),
                None => return pages,
            }
        }
    }

    #[test]
    fn pages_skip_other_applications() {
        let (own, other) = (true, false);
        for (rows, limit, expected) in [
            (&[][..], 2, vec![vec![]]),
            (&[other, other, other, other], 2, vec![vec![]]),
            (&[own, own], 2, vec![vec![0, 1]]),
            (&[own, own, own], 2, vec![vec![0, 1], vec![2]]),
            (
                &[other, own, other, other, own, own, own],
                2,
                vec![vec![1, 4], vec![5, 6]],
            ),
            (&[own, other, own, other], 1, vec![vec![0], vec![2], vec![]]),
        ] {
            assert_eq!(pages(rows, limit), expected, "{rows:?}");
        }
    }

    #[test]
    fn unreadable_entry_is_named() {
        let newer = v1::ScheduleRecord {
            id: "nightly".into(),
            spec: Some(v1::ScheduleSpec {
                job: Some(v1::JobTemplate {
                    app: "sms".into(),
                    ..v1::JobTemplate::default()
                }),
                ..v1::ScheduleSpec::default()
            }),
            format: schedules::FORMAT + 1,
            ..v1::ScheduleRecord::default()
        };
        let of = |record: Bytes, app: Option<&str>| {
            let id = schedules::entry_id("nightly", 3);
            let due = Timestamp::from_millis(0);
            let cursor = Cursor { due, id };
            match Entry::of(&Row { cursor, record }, app)? {
                Entry::Unreadable(entry) => Some((entry.id, entry.shard, entry.problem)),
                Entry::Schedule(schedule) => panic!("{schedule:?}"),
            }
        };
        let newer = Bytes::from(newer.encode_to_vec());
        let problem = "its format is 1, but this version supports only formats up to 0".to_owned();
        let named = Some(("nightly".to_owned(), 3, problem));
        assert_eq!(of(newer.clone(), None), named);
        assert_eq!(of(newer.clone(), Some("sms")), named);
        assert_eq!(of(newer, Some("mail")), None);
        // It may belong to any application.
        let damaged = Bytes::from_static(b"\xff");
        for app in [None, Some("mail")] {
            let (id, shard, problem) = of(damaged.clone(), app).unwrap();
            assert_eq!((&*id, shard), ("", 3));
            assert!(problem.starts_with("not a schedule record: "), "{problem}");
        }
    }

    #[test]
    fn largest_page_fits_into_message() {
        let time = Some(prost_types::Timestamp {
            seconds: i64::MAX,
            nanos: i32::MAX,
        });
        let span = Some(prost_types::Duration {
            seconds: i64::MAX,
            nanos: i32::MAX,
        });
        // It is not in the configuration any more, which names many others.
        let (app, others) = ("a".repeat(100), (0..30).map(|number| format!("{number:0>100}")));
        let rules = Rules {
            apps: others.map(|name| (name, "jobs".into())).collect(),
            pipelines: BTreeMap::new(),
            time_zone: jiff::tz::TimeZone::UTC,
            max_ahead: "1d".parse().unwrap(),
            max_request_age: "1d".parse().unwrap(),
            max_data: 1_000,
        };
        let problem = check_listed(&app, Format::Protobuf, &rules).unwrap_err().message;
        let schedule = v1::Schedule {
            id: "i".repeat(redeliver_recurrence::MAX_ID),
            spec: Some(v1::ScheduleSpec {
                timing: Some(v1::schedule_spec::Timing::Cron(v1::CronTiming {
                    expression: "e".repeat(redeliver_recurrence::MAX_EXPRESSION),
                    zone: Some("z".repeat(64)),
                    gap: i32::MAX,
                    overlap: i32::MAX,
                })),
                start: time,
                end: time,
                max_count: Some(u64::MAX),
                jitter: span,
                misfire: Some(v1::Misfire {
                    policy: i32::MAX,
                    limit: Some(u32::MAX),
                    grace: span,
                }),
                job: Some(v1::JobTemplate {
                    app,
                    priority: i32::MAX,
                    expire_after: span,
                    ..v1::JobTemplate::default()
                }),
            }),
            state: i32::MAX,
            revision: u32::MAX,
            created_at: time,
            decided_until: time,
            dispatched: u64::MAX,
            skipped: u64::MAX,
            next_nominal_time: time,
            next_due_time: time,
            problem,
        };
        let page = v1::ListSchedulesResponse {
            schedules: vec![schedule; MAX_PAGE_SIZE],
            ..v1::ListSchedulesResponse::default()
        };
        // What clients of gRPC accept by default.
        assert!(page.encoded_len() < 4 << 20, "{} bytes", page.encoded_len());
    }

    #[test]
    fn token_belongs_to_its_application() {
        let list = |app: Option<&str>, token: &str| ListSchedules {
            app: app.map(str::to_owned),
            page_token: token.to_owned(),
            ..ListSchedules::default()
        };
        let token = token::encode(&token_filters(&list(Some("sms"), "").token_app()), cursor(5));
        assert_eq!(list(Some("sms"), &token).after(Format::Json), Ok(Some(cursor(5))));
        for app in [None, Some("mail")] {
            let error = list(app, &token).after(Format::Json).unwrap_err();
            assert_eq!(error.code, "request.pageToken");
        }
        // A list of the jobs of the same application.
        let jobs = Filters {
            app: Some("sms"),
            ..SCHEDULES
        };
        assert!(
            list(Some("sms"), &token::encode(&jobs, cursor(5)))
                .after(Format::Json)
                .is_err()
        );
    }
}
