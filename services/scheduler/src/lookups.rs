//! Lookups of a shard in its index, for commands that it cannot decide without them.
//!
//! The job that uses an idempotency key takes a second lookup, because only the value of the key names the job. Nothing changes
//! in between: the indexer is the only one that changes its shard, and does one thing after the other. So a shard gets one
//! answer for each command, in the order of its commands.

use bytes::Bytes;
use redeliver_core::Timestamp;

use crate::codec::KeyValue;
use crate::index::{Applied, Index, IndexError, Lookup};
use crate::index_messages::{Found, Query};

/// Answers queries in their order. `is_current` checks the state of the index after each lookup.
pub(crate) async fn answer<I: Index>(
    index: &I,
    shard: i32,
    queries: &[Query],
    now: Timestamp,
    is_current: impl Fn(Option<Applied>) -> Result<(), IndexError>,
) -> Result<Vec<Found>, IndexError> {
    let (applied, results) = index.look_up(shard, &first_lookups(queries), now).await?;
    is_current(applied)?;
    let mut found = first_results(queries, results);
    let jobs = jobs_of_keys(queries, &found);
    if !jobs.is_empty() {
        let (applied, records) = index.look_up(shard, &jobs, now).await?;
        is_current(applied)?;
        add_jobs_of_keys(queries, &mut found, records);
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

fn first_results(queries: &[Query], results: Vec<Option<Bytes>>) -> Vec<Found> {
    let found = queries.iter().zip(results).map(|(query, result)| match query {
        Query::Job(_) => Found {
            key: None,
            job: result,
        },
        Query::Key(_) | Query::JobOfKey(_) => Found {
            key: result.and_then(|value| KeyValue::decode(&value)),
            job: None,
        },
    });
    found.collect()
}

/// The jobs that use the keys of queries for them.
fn jobs_of_keys(queries: &[Query], found: &[Found]) -> Vec<Lookup> {
    let used = queries
        .iter()
        .zip(found)
        .filter_map(|(query, found)| match query {
            Query::JobOfKey(_) => found.key,
            Query::Job(_) | Query::Key(_) => None,
        });
    used.map(|key| Lookup::Job(key.id)).collect()
}

fn add_jobs_of_keys(queries: &[Query], found: &mut [Found], records: Vec<Option<Bytes>>) {
    let lacking = queries
        .iter()
        .zip(found)
        .filter_map(|(query, found)| match query {
            Query::JobOfKey(_) if found.key.is_some() => Some(found),
            _ => None,
        });
    for (found, record) in lacking.zip(records) {
        found.job = record;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::RetentionPolicy;
    use crate::index::memory::MemoryIndex;
    use crate::index::{Batch, Owner};
    use crate::job::{Job, JobId, JobState, Kind, Payload, Priority};
    use crate::request::key_hash;
    use crate::{codec, index};

    const NOW: Timestamp = Timestamp::from_millis(1_763_722_800_000);

    fn job(offset: i64, key: &str) -> Job {
        Job {
            id: JobId::new(NOW, 0, offset),
            app: "app".into(),
            kind: Kind::App,
            state: JobState::Scheduled,
            priority: Priority::Normal,
            due: NOW,
            accepted: NOW,
            revision: 1,
            idempotency_key: Some(key.into()),
            request_hash: [7; 16],
            request_id: None,
            topic: "jobs".into(),
            payload: Payload::default(),
            ended: None,
            expires: None,
            occurrence: None,
        }
    }

    #[tokio::test]
    async fn the_job_of_a_key_comes_with_the_key_and_in_the_order_of_the_queries() {
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
        let found = answer(&index, 0, &queries, NOW, |_| Ok(())).await.unwrap();
        let of = |job: &Job, has_key: bool, has_job: bool| Found {
            key: has_key.then(|| KeyValue::of(job)),
            job: has_job.then(|| codec::encode(job)),
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
    async fn an_outdated_index_gives_no_answer() {
        let outdated = |applied: Option<Applied>| match applied {
            Some(_) => Ok(()),
            None => Err(IndexError::Fenced),
        };
        let queries = [Query::JobOfKey([0; 16])];
        let answered = answer(&MemoryIndex::default(), 0, &queries, NOW, outdated).await;
        assert!(matches!(answered, Err(IndexError::Fenced)), "{answered:?}");
    }
}
