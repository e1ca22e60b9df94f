//! Pages of scheduled jobs in one order, merged from the flows of scans.
//!
//! A scan reads only some jobs of each flow, and may read nothing of some flows. Their next jobs can precede jobs of other flows
//! that were read. So further scans continue those flows, until enough jobs are known that no other job can precede.

use std::collections::HashMap;

use redeliver_core::Timestamp;

use super::{
    Applied, Cursor, FlowPosition, Index, IndexError, ListRequest, Page, Row, Scan, ScanRequest, is_requested,
};
use crate::job::{Flow, JobId};

/// After this number of scans, a page may have fewer jobs than its limit.
const MAX_SCANS: usize = 4;

/// See [`Index::list`].
pub(super) async fn list<I: Index>(
    index: &I,
    shard: i32,
    request: &ListRequest<'_>,
) -> Result<Page, IndexError> {
    let (mut merge, mut scan_request) = Merge::begin(request);
    loop {
        let scan = index.scan(shard, &scan_request).await?;
        match merge.add(scan) {
            Some(next) => scan_request = next,
            None => return Ok(merge.finish()),
        }
    }
}

/// The rows of a page, while they are being read.
struct Merge<'a> {
    request: &'a ListRequest<'a>,
    after: Option<Cursor>,
    applied: Option<Applied>,
    scans: usize,
    /// Sorted, and possibly more than the limit. Unread rows of open flows can be between them.
    rows: Vec<Row>,
    /// The flows with unread rows that may belong to the page.
    open: HashMap<Flow, Progress>,
    /// Whether there are jobs behind the page.
    has_more: bool,
}

/// How far a flow was read.
#[derive(Clone, Copy)]
struct Progress {
    /// The last row that was read; `None`: none was read.
    last: Option<Cursor>,
    /// The due time of the first job of the flow.
    first: Timestamp,
}

impl<'a> Merge<'a> {
    /// Also returns the first scan. With an application, it finds only the flows.
    fn begin(request: &'a ListRequest<'a>) -> (Self, ScanRequest) {
        let from = request.from.map(|due| {
            let first = JobId::from_bytes([0; 16]);
            Cursor { due, id: first }.before()
        });
        let merge = Self {
            request,
            after: request.after.max(from),
            applied: None,
            scans: 0,
            rows: Vec::new(),
            open: HashMap::new(),
            has_more: false,
        };
        let jobs_per_flow = if request.app.is_none() { request.limit } else { 0 };
        let scan = merge.scan(jobs_per_flow, request.limit, Vec::new());
        (merge, scan)
    }

    fn scan(&self, jobs_per_flow: usize, jobs: usize, positions: Vec<(Flow, FlowPosition)>) -> ScanRequest {
        ScanRequest {
            until: self.request.until,
            // No jobs need to be counted.
            now: Timestamp::from_millis(i64::MIN),
            after: self.after,
            jobs_per_flow,
            positions,
            jobs,
            bytes: self.request.bytes,
            rotation: 0,
        }
    }

    /// The last row of the page, as far as it is known: no row behind it belongs to the page.
    fn bound(&self) -> Option<Cursor> {
        let last = self.request.limit.checked_sub(1)?;
        self.rows.get(last).map(|row| row.cursor)
    }

    /// Adds the result of a scan, and returns the next scan, unless the page is known.
    fn add(&mut self, scan: Scan) -> Option<ScanRequest> {
        let Some(applied) = scan.applied else {
            // The index is empty, or has lost its content since the last scan.
            self.applied = None;
            self.rows.clear();
            self.open.clear();
            self.has_more = false;
            return None;
        };
        // The oldest one, so that a caller notices an index that is rebuilt meanwhile.
        if self.applied.is_none_or(|known| applied.offset < known.offset) {
            self.applied = Some(applied);
        }
        let requested = self.requested();
        for flow in requested.keys() {
            self.open.remove(flow);
        }
        for found in scan.flows {
            let before = requested.get(&found.flow);
            if before.is_none() && (self.scans > 0 || !is_requested(&found.flow, self.request.app)) {
                continue;
            }
            let last = found.rows.last().map(|row| row.cursor);
            if !found.is_complete {
                let progress = Progress {
                    last: last.or_else(|| before?.last),
                    first: found.first,
                };
                self.open.insert(found.flow, progress);
            }
            self.rows.extend(found.rows);
        }
        self.scans += 1;
        self.rows.sort_unstable_by_key(|row| row.cursor);
        if let Some(bound) = self.bound() {
            self.has_more |= !self.open.is_empty();
            self.open.retain(|_, progress| match progress.last {
                Some(last) => last < bound,
                None => progress.first <= bound.due,
            });
        }
        self.next_scan()
    }

    /// The open flows that the next scan continues: those of which nothing was read, because without them no row is certain, or
    /// else all.
    fn requested(&self) -> HashMap<Flow, Progress> {
        let is_unread = |progress: &Progress| progress.last.is_none();
        let only_unread = self.open.values().any(is_unread);
        let requested = self.open.iter();
        let requested = requested.filter(|(_, progress)| !only_unread || is_unread(progress));
        requested
            .map(|(flow, progress)| (flow.clone(), *progress))
            .collect()
    }

    fn next_scan(&self) -> Option<ScanRequest> {
        let limit = self.request.limit;
        let requested = self.requested();
        let is_certain =
            self.scans >= MAX_SCANS && requested.values().all(|progress| progress.last.is_some());
        if requested.is_empty() || limit == 0 || is_certain {
            return None;
        }
        let until = self.request.until;
        let until = self.bound().map_or(until, |bound| bound.due.min(until));
        // About as many rows as fit, by the mean size of the rows so far, and at least one of each flow.
        let size: usize = self.rows.iter().map(|row| row.record.len()).sum();
        let fitting = self.request.bytes.saturating_mul(self.rows.len()) / size.max(1);
        let jobs_per_flow = if size == 0 { limit } else { limit.min(fitting) };
        let jobs_per_flow = (jobs_per_flow / requested.len()).max(1);
        let jobs = jobs_per_flow.saturating_mul(requested.len());
        let positions = requested.into_iter().map(|(flow, progress)| {
            let position = FlowPosition::After {
                cursor: progress.last.or(self.after),
                until,
                jobs: jobs_per_flow,
            };
            (flow, position)
        });
        Some(self.scan(0, jobs, positions.collect()))
    }

    fn finish(mut self) -> Page {
        let unread = self.open.values().filter_map(|progress| progress.last).min();
        if let Some(last) = unread {
            self.rows.retain(|row| row.cursor <= last);
        }
        let (mut count, mut bytes) = (0, 0);
        for row in self.rows.iter().take(self.request.limit) {
            if count > 0 && bytes >= self.request.bytes {
                break;
            }
            bytes += row.record.len();
            count += 1;
        }
        let is_complete = !self.has_more && self.open.is_empty() && count == self.rows.len();
        self.rows.truncate(count);
        Page {
            applied: self.applied,
            rows: self.rows,
            is_complete,
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::index::memory::MemoryIndex;
    use crate::index::{Batch, Change, Effect, Owner};
    use crate::job::Priority;

    /// An index with the jobs `0..jobs`, which take turns in this number of flows and are due in their order.
    async fn index(jobs: i64, flows: i64) -> MemoryIndex {
        let index = MemoryIndex::new();
        let changes = (0..jobs).map(|job| {
            let effect = Effect::Waits {
                flow: Flow {
                    app: format!("app-{}", job % flows).into(),
                    topic: "jobs".into(),
                    priority: Priority::Normal,
                },
                due: Timestamp::from_millis(job),
                record: Bytes::from_static(b"0123456789"),
                key: None,
            };
            Change::of_job(JobId::new(Timestamp::from_millis(0), 0, job), effect)
        });
        let batch = Batch {
            to: 1,
            changes: changes.collect(),
            ..Batch::default()
        };
        let now = Timestamp::from_millis(0);
        index.claim(0, Owner(1)).await.unwrap();
        index.clear(0, Owner(1)).await.unwrap();
        index.apply(0, Owner(1), &batch, now).await.unwrap();
        index
    }

    /// The number of rows of the first page, and of the scans that it takes.
    async fn first_page(index: &MemoryIndex, limit: usize, bytes: usize) -> (usize, usize) {
        let request = ListRequest {
            app: None,
            after: None,
            from: None,
            until: Timestamp::from_millis(i64::MAX),
            limit,
            bytes,
        };
        let (mut merge, mut scan_request) = Merge::begin(&request);
        while let Some(next) = merge.add(index.scan(0, &scan_request).await.unwrap()) {
            scan_request = next;
        }
        let scans = merge.scans;
        let page = merge.finish();
        let offsets = page.rows.iter().map(|row| row.cursor.id.offset());
        assert!(offsets.eq(0..page.rows.len() as u64), "the first jobs in order");
        (page.rows.len(), scans)
    }

    #[tokio::test]
    async fn page_takes_few_scans() {
        for (flows, limit, scans) in [
            (1, 100, 1),
            // The first scan reads 100 jobs of the first flow, the second one what precedes them of the second flow.
            (2, 100, 2),
            (10, 100, 2),
            (100, 100, 3),
            (1_000, 100, 3),
        ] {
            let index = index(10_000, flows).await;
            assert_eq!(
                first_page(&index, limit, usize::MAX).await,
                (limit, scans),
                "{flows} flows"
            );
        }
    }

    #[tokio::test]
    async fn large_records_leave_no_page_empty() {
        let index = index(1_000, 10).await;
        // One record in each scan.
        assert_eq!(first_page(&index, 100, 1).await, (1, 10));
        assert_eq!(first_page(&index, 100, 50).await, (5, 4));
    }
}
