//! What a shard reads of its index: lookups for commands that it cannot decide without them, and the jobs that are due next.
//!
//! The job that uses an idempotency key takes a second lookup, because only the value of the key names the job. Nothing changes
//! in between: the indexer is the only one that changes its shard, and does one thing after the other. So a shard gets one
//! answer for each command, in the order of its commands.

use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::Timestamp;

use crate::codec::{self, KeyValue};
use crate::index::{FlowScan, Index, IndexError, Lookup, Row, Scan};
use crate::index_messages::{Found, Query, ScannedJob};
use crate::job::{Job, JobId};

/// Answers queries in their order.
pub(crate) async fn answer<I: Index>(
    index: &I,
    shard: i32,
    queries: &[Query],
    now: Timestamp,
) -> Result<Vec<Found>, IndexError> {
    let (_, results) = index.look_up(shard, &first_lookups(queries), now).await?;
    let mut found = first_results(queries, results)?;
    let jobs = jobs_of_keys(queries, &found);
    if !jobs.is_empty() {
        let lookups: Vec<Lookup> = jobs.iter().copied().map(Lookup::Job).collect();
        let (_, records) = index.look_up(shard, &lookups, now).await?;
        let mut records = jobs.into_iter().zip(records);
        for found in lacking_jobs(queries, &mut found) {
            if let Some((id, record)) = records.next() {
                found.job = record.map(|record| read_job(id, &record)).transpose()?;
            }
        }
    }
    Ok(found)
}

fn first_lookups(queries: &[Query]) -> Vec<Lookup> {
    let lookups = queries.iter().map(|query| match query {
        Query::Job(id) => Lookup::Job(*id),
        Query::Key(hash) | Query::JobOfKey(hash) => Lookup::Key(*hash),
    });
    lookups.collect()
}

fn first_results(queries: &[Query], results: Vec<Option<Bytes>>) -> Result<Vec<Found>, IndexError> {
    let found = queries.iter().zip(results).map(|(query, result)| {
        Ok(match query {
            Query::Job(id) => Found {
                key: None,
                job: result.map(|record| read_job(*id, &record)).transpose()?,
            },
            Query::Key(_) | Query::JobOfKey(_) => Found {
                key: read_key(result)?,
                job: None,
            },
        })
    });
    found.collect()
}

/// Decodes the jobs of a scan. One that cannot be read must not be left out: it would not be dispatched.
pub(crate) fn read_scan(scan: Scan) -> Result<Scan<ScannedJob>, IndexError> {
    let read = |Row { cursor, record }| {
        let job = read_job(cursor.id, &record)?;
        Ok(ScannedJob { cursor, job })
    };
    let flows = scan.flows.into_iter().map(|found| {
        let rows = found.rows.into_iter().map(read);
        Ok(FlowScan {
            rows: rows.collect::<Result<_, IndexError>>()?,
            flow: found.flow,
            first: found.first,
            due: found.due,
            is_complete: found.is_complete,
        })
    });
    Ok(Scan {
        applied: scan.applied,
        flows: flows.collect::<Result<_, IndexError>>()?,
    })
}

/// A job that cannot be read must not pass for one that is unknown, nor a key for one that is not in use.
fn read_job(id: JobId, record: &Bytes) -> Result<Arc<Job>, IndexError> {
    match codec::decode(id, record) {
        Ok(job) => Ok(Arc::new(job)),
        Err(error) => Err(IndexError::Damaged(format!("the record of job {id}: {error}"))),
    }
}

fn read_key(value: Option<Bytes>) -> Result<Option<KeyValue>, IndexError> {
    let key = value.map(|value| KeyValue::decode(&value)).transpose();
    key.map_err(|error| IndexError::Damaged(error.to_string()))
}

/// The jobs that use the keys of queries for them.
fn jobs_of_keys(queries: &[Query], found: &[Found]) -> Vec<JobId> {
    let used = queries
        .iter()
        .zip(found)
        .filter_map(|(query, found)| match query {
            Query::JobOfKey(_) => found.key,
            Query::Job(_) | Query::Key(_) => None,
        });
    used.map(|key| key.id).collect()
}

/// The results that lack the job that uses the key, in the order of [`jobs_of_keys`].
fn lacking_jobs<'a>(queries: &'a [Query], found: &'a mut [Found]) -> impl Iterator<Item = &'a mut Found> {
    let found = queries.iter().zip(found);
    found.filter_map(|(query, found)| match query {
        Query::JobOfKey(_) if found.key.is_some() => Some(found),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::RetentionPolicy;
    use crate::index;
    use crate::index::memory::MemoryIndex;
    use crate::index::{Batch, Effect, Owner, ScanRequest};
    use crate::request::key_hash;

    const NOW: Timestamp = Timestamp::from_millis(1_763_722_800_000);

    fn job(offset: i64, key: &str) -> Job {
        Job {
            id: JobId::new(NOW, 0, offset),
            due: NOW,
            accepted: NOW,
            idempotency_key: Some(key.into()),
            ..Job::for_tests(offset)
        }
    }

    #[tokio::test]
    async fn answers_follow_order_of_queries() {
        let index = MemoryIndex::default();
        let hour = std::time::Duration::from_secs(3600);
        let retention = RetentionPolicy {
            keys: hour,
            ended: hour,
        };
        let (one, other) = (job(1, "a"), job(2, "b"));
        let changes = [&one, &other].map(|job| codec::change(job, codec::encode(job), retention));
        let batch = Batch {
            from: 0,
            to: 2,
            changes: changes.into(),
            ..Batch::default()
        };
        index.claim(0, Owner(1)).await.unwrap();
        index.clear(0, Owner(1)).await.unwrap();
        index::Index::apply(&index, 0, Owner(1), &batch, NOW)
            .await
            .unwrap();
        let hash = |key| key_hash("app", key);
        let queries = [
            Query::JobOfKey(hash("b")),
            Query::JobOfKey(hash("unused")),
            Query::Key(hash("b")),
            Query::Job(one.id),
            Query::JobOfKey(hash("a")),
        ];
        let found = answer(&index, 0, &queries, NOW).await.unwrap();
        let of = |job: &Job, has_key: bool, has_job: bool| Found {
            key: has_key.then(|| KeyValue::of(job)),
            job: has_job.then(|| Arc::new(job.clone())),
        };
        let expected = [
            of(&other, true, true),
            Found::default(),
            of(&other, true, false),
            of(&one, false, true),
            of(&one, true, true),
        ];
        assert_eq!(found, expected);
    }

    #[tokio::test]
    async fn unreadable_record_is_damage() {
        let hour = std::time::Duration::from_secs(3600);
        let retention = RetentionPolicy {
            keys: hour,
            ended: hour,
        };
        let job = job(1, "a");
        let key = Query::JobOfKey(key_hash("app", "a"));
        for (damages_record, queries) in [
            (true, vec![Query::Job(job.id)]),
            (true, vec![Query::Job(JobId::new(NOW, 0, 9)), key]),
            (false, vec![Query::Key(key_hash("app", "a"))]),
            (false, vec![key]),
        ] {
            let mut change = codec::change(&job, codec::encode(&job), retention);
            let Effect::Waits { record, key, .. } = &mut change.effect else {
                panic!("the job waits")
            };
            if damages_record {
                *record = Bytes::from_static(b"no job");
            } else if let Some(key) = key {
                key.value = key.value.slice(1..);
            }
            let batch = Batch {
                from: 0,
                to: 2,
                changes: vec![change],
                ..Batch::default()
            };
            let index = MemoryIndex::default();
            index.claim(0, Owner(1)).await.unwrap();
            index.clear(0, Owner(1)).await.unwrap();
            index::Index::apply(&index, 0, Owner(1), &batch, NOW)
                .await
                .unwrap();
            let answered = answer(&index, 0, &queries, NOW).await;
            assert!(matches!(answered, Err(IndexError::Damaged(_))), "{answered:?}");
            let due = ScanRequest {
                now: job.due,
                until: job.due,
                after: None,
                positions: Vec::new(),
                jobs: 10,
                jobs_per_flow: 10,
                bytes: 1_000,
                rotation: 0,
            };
            let scanned = read_scan(index.scan(0, &due).await.unwrap());
            assert_eq!(
                matches!(scanned, Err(IndexError::Damaged(_))),
                damages_record,
                "{scanned:?}"
            );
        }
    }
}
