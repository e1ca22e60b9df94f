//! Pages of scheduled jobs in one order, merged from the flows of scans.
//!
//! A scan that its limits cut off has read nothing of some flows. Their jobs can precede the jobs of other flows that it has
//! read, so further scans read these flows. Each of them is limited to the range in which all other flows are known.

use std::collections::HashSet;

use redeliver_core::Timestamp;

use super::{Applied, Cursor, FlowPosition, Index, IndexError, ListRequest, Page, Row, Scan, ScanRequest};
use crate::job::{Flow, JobId};

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
    /// In the order in which they were read. Those behind `known` are useless, because other rows can precede them.
    rows: Vec<Row>,
    /// The last row of the flow that ends first among those that have more jobs; `None` if all flows were read completely.
    known: Option<Cursor>,
    /// The flows that still have to be read; `None` before the first scan.
    unread: Option<HashSet<Flow>>,
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
            rows: Vec::new(),
            known: None,
            unread: None,
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

    /// Adds the result of a scan, and returns the next scan, unless the page is known.
    fn add(&mut self, scan: Scan) -> Option<ScanRequest> {
        let Some(applied) = scan.applied else {
            // The index is empty, or has lost its content since the last scan.
            self.applied = None;
            self.rows.clear();
            return None;
        };
        // The oldest one, so that a caller notices an index that is rebuilt meanwhile.
        if self.applied.is_none_or(|known| applied.offset < known.offset) {
            self.applied = Some(applied);
        }
        let requested = self.unread.take();
        let mut unread = Vec::new();
        for found in scan.flows {
            let is_requested = match &requested {
                Some(flows) => flows.contains(&found.flow),
                None => self.request.app.is_none_or(|app| *app == *found.flow.app),
            };
            if !is_requested {
                continue;
            }
            match found.rows.last() {
                Some(last) if !found.is_complete => {
                    self.known = Some(self.known.map_or(last.cursor, |known| known.min(last.cursor)));
                }
                None if !found.is_complete => unread.push((found.flow, found.first)),
                _ => {}
            }
            self.rows.extend(found.rows);
        }
        // A flow that begins behind what is known adds nothing.
        let known = self.known;
        unread.retain(|(_, first)| known.is_none_or(|known| *first <= known.due));
        let next = self.next_scan(&unread);
        self.unread = Some(unread.into_iter().map(|(flow, _)| flow).collect());
        next
    }

    fn next_scan(&self, unread: &[(Flow, Timestamp)]) -> Option<ScanRequest> {
        let limit = self.request.limit;
        if unread.is_empty() || limit == 0 {
            return None;
        }
        let until = self.request.until;
        let position = FlowPosition::After {
            cursor: self.after,
            until: self.known.map_or(until, |known| known.due.min(until)),
            jobs: limit.div_ceil(unread.len()),
        };
        let positions = unread.iter().map(|(flow, _)| (flow.clone(), position));
        // At least one job of each flow, so that one scan is enough unless the records are large.
        Some(self.scan(0, limit.max(unread.len()), positions.collect()))
    }

    fn finish(mut self) -> Page {
        let mut is_complete = self.known.is_none() && self.unread.is_none_or(|unread| unread.is_empty());
        self.rows.sort_unstable_by_key(|row| row.cursor);
        if let Some(known) = self.known {
            self.rows.retain(|row| row.cursor <= known);
        }
        let (mut count, mut bytes) = (0, 0);
        for row in self.rows.iter().take(self.request.limit) {
            if count > 0 && bytes >= self.request.bytes {
                break;
            }
            bytes += row.record.len();
            count += 1;
        }
        if count < self.rows.len() {
            self.rows.truncate(count);
            is_complete = false;
        }
        Page {
            applied: self.applied,
            rows: self.rows,
            is_complete,
        }
    }
}
