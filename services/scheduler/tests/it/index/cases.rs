//! The behaviour of every index. The cases are in the modules; here is what they share.

mod changes;
mod lists;
mod owners;
mod scans;

use std::collections::BTreeSet;

use bytes::Bytes;
use redeliver_core::Timestamp;
use redeliver_core::job::JobId;
use redeliver_kafka::TopicId;
use redeliver_scheduler::index::{
    Batch, Change, Cursor, Effect, FinishedRelease, FlowPosition, Index, IndexError, KeyEntry,
    LastRecordDigest, ListRequest, Lookup, Owner, Page, Scan, ScanRequest,
};
use redeliver_scheduler::job::{Flow, Priority};

pub(super) use self::changes::*;
pub(super) use self::lists::*;
pub(super) use self::owners::*;
pub(super) use self::scans::*;

pub(super) const SHARD: i32 = 3;
pub(super) const ME: Owner = Owner(u64::MAX - 6);
pub(super) const OTHER: Owner = Owner(7);

/// An instant, in milliseconds since the start of the tests.
pub(super) fn at(millis: i64) -> Timestamp {
    Timestamp::from_millis(1_763_722_800_000 + millis)
}

/// The job of the request at this offset.
pub(super) fn id(offset: i64) -> JobId {
    JobId::new(at(0), SHARD, offset)
}

/// A flow of an application with its own topic.
pub(super) fn flow(app: &str) -> Flow {
    Flow {
        app: app.into(),
        topic: format!("{app}-jobs").into(),
        priority: Priority::Normal,
    }
}

/// The flow of a job of which a case names none: one of two.
pub(super) fn flow_of(job: i64) -> Flow {
    flow(if job % 2 == 1 { "mail" } else { "sms" })
}

pub(super) fn waits(job: i64, due: i64) -> Change {
    waits_in(&flow_of(job), job, due)
}

pub(super) fn waits_in(flow: &Flow, job: i64, due: i64) -> Change {
    let record = Bytes::from(format!("job {job} due {due}"));
    let effect = Effect::Waits {
        flow: flow.clone(),
        due: at(due),
        record,
        key: None,
    };
    Change::of_job(id(job), effect)
}

pub(super) fn ended(job: i64, forget: i64) -> Change {
    ended_in(&flow_of(job), job, forget)
}

pub(super) fn ended_in(flow: &Flow, job: i64, forget: i64) -> Change {
    let record = Bytes::from(format!("job {job} ended"));
    let effect = Effect::Ended {
        flow: flow.clone(),
        // Long ago.
        ended: at(-1_000_000),
        forget: at(forget),
        record,
        key: None,
    };
    Change::of_job(id(job), effect)
}

pub(super) fn forgotten(job: i64) -> Change {
    Change::of_job(id(job), Effect::Forgotten)
}

/// The value of the idempotency key of a job.
pub(super) fn key_value(job: JobId) -> Bytes {
    Bytes::copy_from_slice(&job.to_bytes())
}

/// The same with an idempotency key.
pub(super) fn with_key(mut change: Change, hash: u8, expires: i64) -> Change {
    let entry = KeyEntry {
        hash: [hash; 16],
        value: key_value(change.id),
        expires: at(expires),
    };
    match &mut change.effect {
        Effect::Waits { key, .. } | Effect::Ended { key, .. } => *key = Some(entry),
        Effect::Forgotten => panic!("a forgotten job has no key"),
    }
    change
}

pub(super) fn batch(from: i64, to: i64, changes: Vec<Change>) -> Batch {
    Batch {
        from,
        to,
        changes,
        last_record: None,
        force: false,
    }
}

/// Claims and clears the shard, and applies a first batch, from offset 0 to 10.
pub(super) async fn begin<I: Index>(index: &I, changes: Vec<Change>) {
    index.claim(SHARD, ME).await.unwrap();
    index.clear(SHARD, ME).await.unwrap();
    index
        .apply(SHARD, ME, &batch(0, 10, changes), at(0))
        .await
        .unwrap();
}

pub(super) async fn apply<I: Index>(
    index: &I,
    from: i64,
    to: i64,
    changes: Vec<Change>,
) -> Result<(), String> {
    let applied = index.apply(SHARD, ME, &batch(from, to, changes), at(from)).await;
    applied.map_err(|error| format!("{error:?}"))
}

/// The jobs of all flows.
pub(super) async fn due_scan<I: Index>(
    index: &I,
    after: Option<Cursor>,
    until: Timestamp,
    limit: usize,
    bytes: usize,
) -> Result<Page, IndexError> {
    let request = ListRequest {
        app: None,
        after,
        from: None,
        until,
        limit,
        bytes,
    };
    index.list(SHARD, &request).await
}

/// All waiting jobs as (due, offset), read in pages of this size.
pub(super) async fn all<I: Index>(index: &I, page: usize) -> Vec<(i64, u64)> {
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let ahead = due_scan(index, after, at(1 << 40), page, 1 << 20).await.unwrap();
        found.extend(ahead.rows.iter().map(|row| {
            let due = row.cursor.due.as_millis() - at(0).as_millis();
            (due, row.cursor.id.offset())
        }));
        if ahead.is_complete {
            return found;
        }
        after = Some(
            ahead
                .rows
                .last()
                .expect("a page that is not the last has rows")
                .cursor,
        );
    }
}

/// A scan of all jobs that are due up to a time, without limits.
fn everything(until: i64) -> ScanRequest {
    ScanRequest {
        until: at(until),
        now: at(0),
        after: None,
        jobs_per_flow: usize::MAX,
        positions: Vec::new(),
        jobs: usize::MAX,
        bytes: usize::MAX,
        rotation: 0,
    }
}

/// What a scan has found in a flow: application, first due time, number of due jobs, offsets of the rows, whether they are
/// complete.
type Found = (String, i64, u64, Vec<u64>, bool);

fn found(scan: &Scan) -> Vec<Found> {
    let flows = scan.flows.iter().map(|found| {
        let first = found.first.as_millis() - at(0).as_millis();
        let rows = found.rows.iter().map(|row| row.cursor.id.offset()).collect();
        (
            found.flow.app.to_string(),
            first,
            found.due,
            rows,
            found.is_complete,
        )
    });
    flows.collect()
}

async fn scanned<I: Index>(index: &I, request: &ScanRequest) -> Vec<Found> {
    found(&index.scan(SHARD, request).await.unwrap())
}

fn list_all() -> ListRequest<'static> {
    ListRequest {
        app: None,
        after: None,
        from: None,
        until: at(1 << 40),
        limit: 100,
        bytes: 1 << 20,
    }
}
