//! Lists the jobs that wait, those that are due next first, over all shards.
//!
//! Each shard lists its jobs in the order of their due times, and [`merge`] merges these lists. A shard whose index lacks jobs is an
//! error, so a list never lacks them silently.
//!
//! The entries of a list are those of the statistics: the jobs of applications, and the long waits of pipelines, which are marked. The
//! latter belong to their pipelines, so no other operation knows them.

use redeliver_core::{Failure, Timestamp};
use redeliver_proto::v1;
use redeliver_runtime::config::Verb;

use self::merge::{MergedPage, PageMerge, ShardRead};
use self::token::Filters;
use super::call::Call;
use super::completeness::{KafkaWait, read_complete};
use super::error::RequestError;
use super::jobs::Jobs;
use crate::codec;
use crate::index::{self, Cursor, Index, Row};
use crate::job::JobState;
use crate::request::{Field, Format, check_listed};

mod merge;
mod schedules;
mod token;

pub(crate) use schedules::{ListSchedules, SchedulePage};

/// The default and the maximum number of jobs of a page.
const DEFAULT_PAGE_SIZE: usize = 100;
const MAX_PAGE_SIZE: usize = 1_000;
/// About the maximum number of bytes of records that a list reads of a shard at once, because records contain the data of jobs.
const SHARD_BYTES: usize = 512 << 10;

/// Which jobs to list.
#[derive(Debug, Default)]
pub(crate) struct ListJobs {
    /// The application, or the pipeline of long waits. `None`: all.
    pub(crate) app: Option<String>,
    /// Only jobs that are due at or after this time.
    pub(crate) due_from: Option<Timestamp>,
    /// Only jobs that are due before this time.
    pub(crate) due_until: Option<Timestamp>,
    /// The state of the jobs. `None`: scheduled.
    pub(crate) state: Option<JobState>,
    /// The maximum number of jobs. 0 means the default.
    pub(crate) page_size: i32,
    /// The token of the previous page, or empty.
    pub(crate) page_token: String,
}

/// A page of jobs.
#[derive(Debug)]
pub(crate) struct JobPage {
    pub(crate) jobs: Vec<v1::Job>,
    /// Empty on the last page.
    pub(crate) next_page_token: String,
}

/// A valid request.
#[derive(Debug, PartialEq, Eq)]
struct Query<'a> {
    filters: Filters<'a>,
    after: Option<Cursor>,
    limit: usize,
}

impl ListJobs {
    fn check(&self, format: Format) -> Result<Query<'_>, Failure> {
        if let Some(state) = self.state.filter(|state| *state != JobState::Scheduled) {
            let problem = format!(
                "is `{state}`; only scheduled jobs can be listed: get an ended job by its id, or read the state topic \
                 with `redeliver jobs ls --state {state}`"
            );
            return Err(Field("state").malformed(format, &problem));
        }
        if let (Some(from), Some(until)) = (self.due_from, self.due_until)
            && from >= until
        {
            let from = Field("dueFrom").name(format);
            return Err(Field("dueUntil").malformed(format, &format!("is not later than `{from}`")));
        }
        let limit = match usize::try_from(self.page_size) {
            Ok(0) => DEFAULT_PAGE_SIZE,
            Ok(size) => size.min(MAX_PAGE_SIZE),
            Err(_) => {
                let problem =
                    format!("is negative; write 1 to {MAX_PAGE_SIZE}, or 0 for {DEFAULT_PAGE_SIZE}");
                return Err(Field("pageSize").malformed(format, &problem));
            }
        };
        let filters = Filters {
            app: self.app.as_deref(),
            from: self.due_from,
            until: self.due_until,
        };
        let after = token::decode(&filters, &self.page_token)
            .map_err(|error| Field("pageToken").malformed(format, &error.to_string()))?;
        Ok(Query {
            filters,
            after,
            limit,
        })
    }
}

impl<I: Index> Jobs<I> {
    /// A page of the scheduled jobs, without their payloads.
    pub(crate) async fn list(&self, call: &Call, request: &ListJobs) -> Result<JobPage, RequestError> {
        self.require(&call.caller, Verb::Read, request.app.as_deref(), "list")?;
        let query = request.check(call.format)?;
        let wait = KafkaWait::new();
        let MergedPage { rows, next } = self
            .merge_page(&query.filters, query.limit, query.after, &wait, to_entry)
            .await?;
        if rows.is_empty() && query.after.is_none() {
            self.check_empty(request.app.as_deref(), call.format)?;
        }
        let token = next.map(|next| token::encode(&query.filters, next));
        Ok(JobPage {
            jobs: rows,
            next_page_token: token.unwrap_or_default(),
        })
    }

    /// Checks the application of which there is nothing. One that is not in the configuration any more may have some.
    pub(super) fn check_empty(&self, app: Option<&str>, format: Format) -> Result<(), RequestError> {
        Ok(app.map_or(Ok(()), |app| check_listed(app, format, &self.rules))?)
    }

    /// The next entries of all shards, in the order of their cursors.
    async fn merge_page<T>(
        &self,
        filters: &Filters<'_>,
        limit: usize,
        after: Option<Cursor>,
        wait: &KafkaWait,
        to_entry: impl Fn(&Row) -> Result<(Cursor, T), RequestError> + Copy,
    ) -> Result<MergedPage<T>, RequestError> {
        let shards = usize::try_from(self.partitions).unwrap_or(0);
        let mut merge = PageMerge::new(shards, limit, after);
        loop {
            let reads = merge.next_reads().into_iter();
            let reads: Vec<_> = reads
                .map(|read| self.list_shard(filters, read, wait, to_entry))
                .collect();
            if reads.is_empty() {
                return Ok(merge.finish());
            }
            for (shard, entries, is_complete) in Self::read_shards(reads).await? {
                merge.add(shard, entries, is_complete);
            }
        }
    }

    /// The next entries of a shard, and whether these are all.
    async fn list_shard<T>(
        &self,
        filters: &Filters<'_>,
        read: ShardRead,
        wait: &KafkaWait,
        to_entry: impl Fn(&Row) -> Result<(Cursor, T), RequestError>,
    ) -> Result<(usize, Vec<(Cursor, T)>, bool), RequestError> {
        let shard = i32::try_from(read.shard).unwrap_or(i32::MAX);
        let request = index::ListRequest {
            app: filters.app,
            after: read.after,
            from: filters.from,
            until: last_due(filters.until),
            limit: read.limit,
            bytes: SHARD_BYTES,
        };
        let page = read_complete(&self.partition_end(shard), wait, || async {
            let page = self.index.list(shard, &request).await?;
            Ok((page.applied, page))
        })
        .await?;
        if page.rows.is_empty() && !page.is_complete {
            // Not possible, but then jobs would be missing.
            return Err(RequestError::IndexIncomplete);
        }
        let entries: Result<Vec<_>, RequestError> = page.rows.iter().map(to_entry).collect();
        Ok((read.shard, entries?, page.is_complete))
    }
}

/// The last due time before this one.
fn last_due(until: Option<Timestamp>) -> Timestamp {
    let last = until.map_or(i64::MAX, |until| until.as_millis().saturating_sub(1));
    Timestamp::from_millis(last)
}

fn to_entry(row: &Row) -> Result<(Cursor, v1::Job), RequestError> {
    let id = row.cursor.id;
    let job = codec::decode(id, &row.record).map_err(|error| {
        tracing::error!(job = %id, %error, "invalid job record in the index");
        RequestError::IndexIncomplete
    })?;
    Ok((row.cursor, codec::to_proto(&job, false)))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use redeliver_proto::Message as _;

    use super::*;
    use crate::job::{Job, JobId, Kind, Payload, Priority, RequestHash};
    use crate::request::MAX_NAME;

    fn problem(list: &ListJobs) -> String {
        list.check(Format::Json).unwrap_err().message
    }

    #[test]
    fn a_list_has_bounds_and_defaults() {
        let limit = |page_size| {
            let list = ListJobs {
                page_size,
                ..ListJobs::default()
            };
            list.check(Format::Json).map(|query| query.limit)
        };
        assert_eq!(limit(0), Ok(100));
        assert_eq!(limit(7), Ok(7));
        assert_eq!(limit(i32::MAX), Ok(1_000));
        let negative = "`pageSize` is negative; write 1 to 1000, or 0 for 100";
        assert_eq!(limit(-1).unwrap_err().message, negative);
        let time = |millis| Some(Timestamp::from_millis(millis));
        for from in [5, 6] {
            let list = ListJobs {
                due_from: time(from),
                due_until: time(5),
                ..ListJobs::default()
            };
            assert_eq!(problem(&list), "`dueUntil` is not later than `dueFrom`");
        }
        assert_eq!(last_due(time(5)), Timestamp::from_millis(4));
        assert_eq!(last_due(None), Timestamp::from_millis(i64::MAX));
    }

    #[test]
    fn largest_page_fits_into_message() {
        let name = |bytes: usize| -> Arc<str> { "n".repeat(bytes).into() };
        let last = Timestamp::from_millis(i64::MAX);
        let job = Job {
            id: JobId::new(Timestamp::from_millis(0), 0, 0),
            // As long as the name of a pipeline can be.
            app: name(249),
            kind: Kind::LongWait,
            state: JobState::Scheduled,
            priority: Priority::Low,
            due: last,
            accepted: last,
            revision: u32::MAX,
            idempotency_key: Some(name(MAX_NAME)),
            request_hash: RequestHash::default(),
            request_id: Some(name(MAX_NAME)),
            topic: name(249),
            payload: Payload {
                value: Some(vec![0; 100_000].into()),
                ..Payload::default()
            },
            ended: Some(last),
            expires: Some(last),
            // Of a schedule with the longest id.
            occurrence: Some(name(200)),
            released: None,
        };
        let page = v1::ListJobsResponse {
            jobs: vec![codec::to_proto(&job, false); MAX_PAGE_SIZE],
            next_page_token: token::encode(
                &ListJobs::default().check(Format::Json).unwrap().filters,
                Cursor::end_of(last),
            ),
        };
        // What clients of gRPC accept by default.
        assert!(page.encoded_len() < 4 << 20, "{} bytes", page.encoded_len());
    }

    #[test]
    fn ended_jobs_are_not_listed() {
        for state in [JobState::Dispatched, JobState::Cancelled, JobState::Expired] {
            let list = ListJobs {
                state: Some(state),
                ..ListJobs::default()
            };
            assert!(problem(&list).contains(&format!("`redeliver jobs ls --state {state}`")));
        }
        let scheduled = ListJobs {
            state: Some(JobState::Scheduled),
            ..ListJobs::default()
        };
        assert!(scheduled.check(Format::Json).is_ok());
    }
}
