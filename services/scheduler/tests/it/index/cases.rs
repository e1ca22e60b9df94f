//! The behaviour of every index.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::Timestamp;
use redeliver_core::job::JobId;
use redeliver_kafka::TopicId;
use redeliver_scheduler::index::{
    Applied, Batch, Change, Checkpoint, Cursor, Effect, FORMAT, FinishedRelease, FlowPosition, Index,
    IndexError, KeyEntry, LastRecordDigest, ListRequest, Lookup, Owner, Page, Scan, ScanRequest, ShardStats,
};
use redeliver_scheduler::job::{Flow, Priority};

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

/// The same with an idempotency key.
pub(super) fn with_key(mut change: Change, hash: u8, expires: i64) -> Change {
    let entry = KeyEntry {
        hash: [hash; 16],
        value: Bytes::from(format!("key of {}", change.id)),
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

pub(super) async fn job<I: Index>(index: &I, job: i64) -> Option<String> {
    look_up(index, Lookup::Job(id(job)), 0).await
}

pub(super) async fn look_up<I: Index>(index: &I, lookup: Lookup, now: i64) -> Option<String> {
    let (_, mut found) = index.look_up(SHARD, &[lookup], at(now)).await.unwrap();
    assert_eq!(found.len(), 1);
    let bytes = found.remove(0)?;
    Some(String::from_utf8(bytes.to_vec()).unwrap())
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

pub(super) async fn forgettable<I: Index>(index: &I, now: i64) -> Vec<u64> {
    let (_, ids) = index.forgettable(SHARD, at(now), 100).await.unwrap();
    ids.into_iter().map(JobId::offset).collect()
}

pub(super) async fn a_claim_returns_the_checkpoint_of_the_shard<I: Index>(index: I) {
    assert_eq!(index.claim(SHARD, ME).await.unwrap(), None);
    begin(&index, vec![]).await;
    let applied = Applied {
        offset: 10,
        at: at(0),
    };
    let claimed = Checkpoint {
        applied,
        last_record: None,
        format: FORMAT,
    };
    assert_eq!(index.claim(SHARD, OTHER).await.unwrap(), Some(claimed));
    assert_eq!(
        index.look_up(SHARD, &[], at(0)).await.unwrap(),
        (Some(applied), vec![])
    );
    assert_eq!(
        index.forgettable(SHARD, at(0), 1).await.unwrap(),
        (Some(applied), vec![])
    );
    let ahead = due_scan(&index, None, at(0), 1, 1).await.unwrap();
    assert_eq!((ahead.applied, ahead.is_complete), (Some(applied), true));
}

pub(super) async fn a_claim_returns_the_newest_digest<I: Index>(index: I) {
    begin(&index, vec![]).await;
    let seal = async || index.claim(SHARD, ME).await.unwrap().unwrap().last_record;
    let some = |offset: i64| Some(LastRecordDigest::of(offset, Some(b"key"), Some(&[0xff, 0x00])));
    let sealed = |to: i64, seal| Batch {
        last_record: seal,
        ..batch(to - 1, to, vec![waits(1, to)])
    };
    for (to, given, kept) in [
        (11, some(10), some(10)),
        // An unknown digest keeps the one before.
        (12, None, some(10)),
        (13, some(-1), some(-1)),
        (14, some(i64::MAX), some(i64::MAX)),
    ] {
        index.apply(SHARD, ME, &sealed(to, given), at(0)).await.unwrap();
        assert_eq!(seal().await, kept);
    }
    // An applied batch changes nothing.
    index.apply(SHARD, ME, &sealed(14, some(7)), at(0)).await.unwrap();
    assert_eq!(seal().await, some(i64::MAX));
    begin(&index, vec![]).await;
    assert_eq!(seal().await, None);
}

pub(super) async fn a_batch_after_a_gap_is_rejected<I: Index>(index: I) {
    begin(&index, vec![]).await;
    let refused = apply(&index, 12, 15, vec![waits(1, 5)]).await;
    assert_eq!(refused, Err("Gap { found: Some(10), expected: 12 }".to_owned()));
    assert_eq!(job(&index, 1).await, None);
    assert_eq!(apply(&index, 10, 15, vec![waits(1, 5)]).await, Ok(()));
    assert_eq!(all(&index, 10).await, [(5, 1)]);
}

pub(super) async fn a_replaced_owner_is_fenced<I: Index>(index: I) {
    begin(&index, vec![waits(1, 5)]).await;
    index.claim(SHARD, OTHER).await.unwrap();
    assert_eq!(
        apply(&index, 10, 11, vec![waits(2, 6)]).await,
        Err("Fenced".to_owned())
    );
    // Even what would change nothing: its answer would say that all is well.
    assert_eq!(apply(&index, 0, 5, vec![]).await, Err("Fenced".to_owned()));
    assert!(matches!(index.clear(SHARD, ME).await, Err(IndexError::Fenced)));
    assert_eq!(all(&index, 10).await, [(5, 1)]);
    index
        .apply(SHARD, OTHER, &batch(10, 11, vec![waits(2, 6)]), at(1))
        .await
        .unwrap();
    assert_eq!(all(&index, 10).await, [(5, 1), (6, 2)]);
}

pub(super) async fn applying_a_batch_twice_changes_nothing<I: Index>(index: I) {
    begin(&index, vec![waits(1, 5)]).await;
    assert_eq!(apply(&index, 10, 20, vec![ended(1, 9)]).await, Ok(()));
    for (from, to) in [(0, 10), (10, 20), (0, 20), (19, 20)] {
        assert_eq!(
            apply(&index, from, to, vec![waits(1, 5), waits(2, 5)]).await,
            Ok(())
        );
    }
    assert_eq!(all(&index, 10).await, []);
    assert_eq!(job(&index, 1).await.as_deref(), Some("job 1 ended"));
    assert_eq!(
        index.claim(SHARD, ME).await.unwrap().unwrap().applied,
        Applied {
            offset: 20,
            at: at(10)
        }
    );
}

pub(super) async fn a_renewal_moves_only_the_time_of_the_checkpoint<I: Index>(index: I) {
    begin(&index, vec![waits(1, 5)]).await;
    let renew = async |owner, offset, now| {
        let renewed = index.apply(SHARD, owner, &Batch::renewal(offset), at(now)).await;
        let (applied, _) = index.look_up(SHARD, &[], at(now)).await.unwrap();
        (renewed.map_err(|error| format!("{error:?}")), applied.unwrap())
    };
    let applied = |offset, millis| Applied {
        offset,
        at: at(millis),
    };
    assert_eq!(renew(ME, 10, 500).await, (Ok(()), applied(10, 500)));
    // The checkpoint is further.
    assert_eq!(renew(ME, 9, 600).await, (Ok(()), applied(10, 500)));
    let gap = Err("Gap { found: Some(10), expected: 11 }".to_owned());
    assert_eq!(renew(ME, 11, 700).await, (gap, applied(10, 500)));
    let fenced = Err("Fenced".to_owned());
    assert_eq!(renew(OTHER, 10, 800).await, (fenced, applied(10, 500)));
    assert_eq!(all(&index, 10).await, [(5, 1)]);
}

pub(super) async fn idempotency_keys_are_counted<I: Index>(index: I) {
    begin(&index, vec![]).await;
    let day = 86_400_000;
    let count = async || index.known_keys(SHARD, at(0)).await.unwrap();
    assert_eq!(count().await, 0);
    // In the logs of different times.
    let keys = (0..200).map(|n| with_key(waits(i64::from(n), 5), n, day + 3_600_000 * i64::from(n % 3)));
    apply(&index, 10, 300, keys.collect()).await.unwrap();
    assert_eq!(count().await, 200);
    // The key outlives its job, and another change of a job does not count twice.
    let changes = vec![with_key(ended(1, 9), 1, day + 3_600_000), forgotten(2)];
    apply(&index, 300, 302, changes).await.unwrap();
    assert_eq!(count().await, 200);
    // Nor does a key that is used again and again within a short time.
    for n in 0..5 {
        let again = with_key(waits(1_000 + n, 5), 7, day + 3_600_001 + n);
        apply(&index, 302 + n, 303 + n, vec![again]).await.unwrap();
    }
    assert_eq!(count().await, 200);
    index.clear(SHARD, ME).await.unwrap();
    assert_eq!(count().await, 0);
}

pub(super) async fn a_partly_applied_batch_is_applied_completely<I: Index>(index: I) {
    begin(&index, vec![waits(1, 5), waits(2, 6)]).await;
    let changes = vec![waits(1, 5), waits(2, 6), ended(1, 9), waits(3, 7)];
    assert_eq!(apply(&index, 8, 12, changes).await, Ok(()));
    assert_eq!(all(&index, 10).await, [(6, 2), (7, 3)]);
    assert_eq!(job(&index, 1).await.as_deref(), Some("job 1 ended"));
    assert_eq!(index.claim(SHARD, ME).await.unwrap().unwrap().applied.offset, 12);
}

pub(super) async fn an_empty_shard_accepts_a_batch_only_after_a_clear<I: Index>(index: I) {
    let gap = Err("Gap { found: None, expected: 0 }".to_owned());
    assert_eq!(apply(&index, 0, 1, vec![waits(1, 5)]).await, gap);
    index.claim(SHARD, ME).await.unwrap();
    assert_eq!(apply(&index, 0, 1, vec![waits(1, 5)]).await, gap);
    index.clear(SHARD, ME).await.unwrap();
    index.claim(SHARD, ME).await.unwrap();
    assert_eq!(apply(&index, 0, 1, vec![waits(1, 5)]).await, gap);
    index.clear(SHARD, ME).await.unwrap();
    index.claim(SHARD, OTHER).await.unwrap();
    let stolen = index
        .apply(SHARD, OTHER, &batch(0, 1, vec![waits(1, 5)]), at(0))
        .await;
    assert!(
        matches!(
            stolen,
            Err(IndexError::Gap {
                found: None,
                expected: 0
            })
        ),
        "{stolen:?}"
    );
    assert_eq!(all(&index, 10).await, []);
}

pub(super) async fn a_finished_release_is_remembered_until_the_index_is_cleared<I: Index>(index: I) {
    let finished = |before| FinishedRelease {
        topic: TopicId::from_bits(u128::MAX - 7),
        before,
    };
    let known = async |pipeline: &'static str| {
        let (applied, finished) = index.finished_release(SHARD, pipeline).await.unwrap();
        (applied.map(|applied| applied.offset), finished)
    };
    assert_eq!(known("docs").await, (None, None));
    index.claim(SHARD, ME).await.unwrap();
    // Without its content, the shard cannot tell anything.
    let early = index.finish_release(SHARD, ME, "docs", &finished(5)).await;
    assert!(matches!(early, Err(IndexError::Gap { .. })), "{early:?}");
    begin(&index, vec![waits(1, 5)]).await;
    let (applied, _) = known("docs").await;
    assert!(applied.is_some());
    for before in [5, i64::MAX] {
        index
            .finish_release(SHARD, ME, "docs", &finished(before))
            .await
            .unwrap();
        assert_eq!(known("docs").await, (applied, Some(finished(before))));
    }
    assert_eq!(known("mail").await, (applied, None));
    // The next owner knows it, and the former one changes nothing any more.
    index.claim(SHARD, OTHER).await.unwrap();
    let fenced = index.finish_release(SHARD, ME, "mail", &finished(5)).await;
    assert!(matches!(fenced, Err(IndexError::Fenced)), "{fenced:?}");
    assert_eq!(known("docs").await, (applied, Some(finished(i64::MAX))));
    assert_eq!(known("mail").await, (applied, None));
    index.clear(SHARD, OTHER).await.unwrap();
    assert_eq!(known("docs").await, (None, None));
    let first = batch(0, 1, vec![waits(1, 5)]);
    index.apply(SHARD, OTHER, &first, at(0)).await.unwrap();
    assert_eq!(known("docs").await, (Some(1), None));
}

pub(super) async fn a_cleared_shard_is_empty_and_accepts_a_batch_at_any_offset<I: Index>(index: I) {
    begin(&index, vec![with_key(waits(1, 5), 1, 1_000_000), ended(2, 9)]).await;
    index.clear(SHARD, ME).await.unwrap();
    let lookups = [Lookup::Job(id(1)), Lookup::Job(id(2)), Lookup::Key([1; 16])];
    let nothing = (None, vec![None; 3]);
    assert_eq!(index.look_up(SHARD, &lookups, at(0)).await.unwrap(), nothing);
    let ahead = due_scan(&index, None, at(100), 10, 1000).await.unwrap();
    assert_eq!(
        (ahead.applied, ahead.rows.len(), ahead.is_complete),
        (None, 0, true)
    );
    assert_eq!(
        index.forgettable(SHARD, at(100), 10).await.unwrap(),
        (None, vec![])
    );
    let stats = index.stats(SHARD, None, at(0), 2).await.unwrap();
    assert_eq!(
        stats,
        ShardStats {
            per_minute: vec![0, 0],
            ..ShardStats::default()
        }
    );
    assert_eq!(apply(&index, 777, 779, vec![waits(3, 6)]).await, Ok(()));
    assert_eq!(all(&index, 10).await, [(6, 3)]);
    let (mark, found) = index.look_up(SHARD, &lookups, at(0)).await.unwrap();
    assert_eq!((mark.unwrap().offset, found), (779, vec![None; 3]));
    // The first batch was not empty, so the next one has to follow it.
    let refused = apply(&index, 780, 781, vec![]).await;
    assert_eq!(refused, Err("Gap { found: Some(779), expected: 780 }".to_owned()));
}

pub(super) async fn concurrent_calls_take_effect_in_order<I: Index>(index: I) {
    begin(&index, vec![]).await;
    let batches: Vec<Batch> = (10..110)
        .map(|offset| batch(offset, offset + 1, vec![waits(1, offset)]))
        .collect();
    let calls = batches.iter().map(|batch| index.apply(SHARD, ME, batch, at(0)));
    for answer in futures::future::join_all(calls).await {
        answer.unwrap();
    }
    assert_eq!(all(&index, 10).await, [(109, 1)]);
}

pub(super) async fn shards_are_independent<I: Index>(index: I) {
    begin(&index, vec![with_key(waits(1, 5), 1, 1_000_000)]).await;
    index.claim(SHARD + 1, OTHER).await.unwrap();
    index.clear(SHARD + 1, OTHER).await.unwrap();
    let (mark, found) = index
        .look_up(SHARD + 1, &[Lookup::Job(id(1)), Lookup::Key([1; 16])], at(0))
        .await
        .unwrap();
    assert_eq!((mark, found), (None, vec![None, None]));
    assert_eq!(all(&index, 10).await, [(5, 1)]);
}

pub(super) async fn an_idempotency_key_expires<I: Index>(index: I) {
    let (key, other) = (Lookup::Key([1; 16]), Lookup::Key([2; 16]));
    let expired = with_key(waits(2, 50), 2, 0);
    begin(&index, vec![with_key(waits(1, 50), 1, 1000), expired]).await;
    let value = format!("key of {}", id(1));
    assert_eq!(look_up(&index, key, 0).await, Some(value.clone()));
    assert_eq!(look_up(&index, key, 999).await, Some(value));
    assert_eq!(look_up(&index, key, 1000).await, None);
    assert_eq!(look_up(&index, other, 0).await, None);
    // The job itself is not changed.
    assert_eq!(all(&index, 10).await, [(50, 1), (50, 2)]);
}

pub(super) async fn a_reused_key_has_the_new_value<I: Index>(index: I) {
    let key = Lookup::Key([1; 16]);
    begin(&index, vec![with_key(waits(1, 5000), 1, 1000)]).await;
    let (first, second) = (waits(1, 5000), with_key(waits(2, 50), 1, 10_000));
    let taken = batch(10, 11, vec![second.clone()]);
    index.apply(SHARD, ME, &taken, at(2000)).await.unwrap();
    let value = Some(format!("key of {}", id(2)));
    assert_eq!(look_up(&index, key, 2000).await, value);
    // The first job ends, with the key that it once had.
    let end = batch(11, 12, vec![with_key(ended(1, 9000), 1, 1000)]);
    index.apply(SHARD, ME, &end, at(5000)).await.unwrap();
    assert_eq!(look_up(&index, key, 5000).await, value);
    // The same within one batch, as after a restart.
    index.clear(SHARD, ME).await.unwrap();
    let all = batch(
        0,
        12,
        vec![
            with_key(first, 1, 1000),
            second,
            with_key(ended(1, 9000), 1, 1000),
        ],
    );
    index.apply(SHARD, ME, &all, at(5000)).await.unwrap();
    assert_eq!(look_up(&index, key, 5000).await, value);
    assert_eq!(look_up(&index, key, 10_000).await, None);
}

pub(super) async fn a_rescheduled_job_has_only_its_new_due_time<I: Index>(index: I) {
    begin(&index, vec![waits(1, 50), waits(2, 60)]).await;
    apply(&index, 10, 11, vec![waits(1, 70)]).await.unwrap();
    assert_eq!(all(&index, 10).await, [(60, 2), (70, 1)]);
    assert_eq!(job(&index, 1).await.as_deref(), Some("job 1 due 70"));
    apply(&index, 11, 12, vec![waits(1, 1)]).await.unwrap();
    assert_eq!(all(&index, 10).await, [(1, 1), (60, 2)]);
}

pub(super) async fn an_ended_job_is_not_due_and_is_kept<I: Index>(index: I) {
    let first = vec![waits(1, 50), waits(2, 60), with_key(ended(3, 900), 3, 1000)];
    begin(&index, first).await;
    apply(&index, 10, 11, vec![ended(2, 800), ended(1, 700)])
        .await
        .unwrap();
    assert_eq!(all(&index, 10).await, []);
    assert_eq!(job(&index, 1).await.as_deref(), Some("job 1 ended"));
    assert!(look_up(&index, Lookup::Key([3; 16]), 0).await.is_some());
    assert!(forgettable(&index, 699).await.is_empty());
    assert_eq!(forgettable(&index, 800).await, [1, 2]);
    let (_, oldest) = index.forgettable(SHARD, at(10_000), 2).await.unwrap();
    assert_eq!(oldest, [id(1), id(2)]);
    // It may end again, because a batch may be applied twice.
    apply(&index, 11, 12, vec![ended(1, 850)]).await.unwrap();
    assert_eq!(forgettable(&index, 10_000).await, [2, 1, 3]);
}

/// The index keeps the record of one ended job.
pub(super) async fn a_job_that_has_just_ended_keeps_its_record<I: Index>(index: I) {
    let ended_at = |job, millis| {
        let mut change = ended(job, 1_000_000);
        if let Effect::Ended { ended, .. } = &mut change.effect {
            *ended = at(millis);
        }
        change
    };
    // The jobs of the batch are not in the order of their ids.
    begin(&index, vec![ended_at(3, 0), ended_at(1, 0), ended_at(2, 1)]).await;
    for (from, now, change, kept) in [
        (10, 59_999, waits(9, 9), vec![1, 2, 3]),
        (11, 60_000, waits(9, 9), vec![2]),
        (12, 60_000, ended_at(4, 60_000), vec![2, 4]),
        (13, 60_001, ended_at(5, 60_001), vec![4, 5]),
        // The clock was put back.
        (14, 0, waits(9, 9), vec![5]),
    ] {
        let next = batch(from, from + 1, vec![change]);
        index.apply(SHARD, ME, &next, at(now)).await.unwrap();
        let mut found = Vec::new();
        for number in 1..=5 {
            found.extend(job(&index, number).await.map(|_| number));
        }
        assert_eq!(found, kept, "at {now} ms");
    }
}

/// The index keeps the records of three ended jobs.
pub(super) async fn only_the_jobs_that_ended_last_have_a_record<I: Index>(index: I) {
    // Job 3 is forgotten late. Jobs 1 to 7 share a bucket with one that waits.
    let forget = |job: i64| if job == 3 { 5_000_000 } else { 1_000_000 + job };
    begin(&index, (1..=8).map(|job| waits(job, job)).collect()).await;
    for job in 1..=7 {
        let change = with_key(ended(job, forget(job)), u8::try_from(job).unwrap(), 9_000_000);
        apply(&index, 9 + job, 10 + job, vec![change]).await.unwrap();
    }
    let records = async || {
        let mut found = Vec::new();
        for number in 1..=8 {
            found.extend(job(&index, number).await.map(|_| number));
        }
        found
    };
    assert_eq!(records().await, [5, 6, 7, 8]);
    assert_eq!(all(&index, 10).await, [(8, 8)]);
    let applied = index.claim(SHARD, ME).await.unwrap().unwrap().applied;
    assert_eq!(applied.offset, 17);
    // All keys are in use.
    for hash in 1..=7 {
        let key = look_up(&index, Lookup::Key([hash; 16]), 0).await;
        assert!(key.is_some(), "key {hash}");
    }

    // They are forgotten all the same, not before their time, and are returned until then.
    assert!(forgettable(&index, 1_000_000).await.is_empty());
    assert_eq!(forgettable(&index, 1_000_006).await.last(), Some(&6));
    let mut over = forgettable(&index, 2_000_000).await;
    over.sort_unstable();
    assert_eq!(over, [1, 2, 4, 5, 6, 7]);
    apply(&index, 17, 18, vec![forgotten(1), forgotten(6)])
        .await
        .unwrap();
    let mut over = forgettable(&index, 2_000_000).await;
    over.sort_unstable();
    assert_eq!(over, [2, 4, 5, 7]);
    let rest = over.into_iter().map(|job| forgotten(i64::try_from(job).unwrap()));
    apply(&index, 18, 19, rest.collect()).await.unwrap();
    assert!(forgettable(&index, 4_000_000).await.is_empty());
    assert_eq!(forgettable(&index, 6_000_000).await, [3]);
    apply(&index, 19, 20, vec![forgotten(3)]).await.unwrap();
    assert!(forgettable(&index, 9_000_000).await.is_empty());
    assert_eq!(records().await, [8]);
    assert!(index.claim(SHARD, ME).await.unwrap().is_some());
}

pub(super) async fn a_forgotten_job_leaves_only_its_key<I: Index>(index: I) {
    begin(
        &index,
        vec![with_key(ended(1, 5), 1, 1000), waits(2, 50), waits(3, 50)],
    )
    .await;
    apply(&index, 10, 11, vec![forgotten(1), forgotten(2), forgotten(9)])
        .await
        .unwrap();
    assert_eq!((job(&index, 1).await, job(&index, 2).await), (None, None));
    assert!(forgettable(&index, 1000).await.is_empty());
    assert_eq!(all(&index, 10).await, [(50, 3)]);
    assert!(look_up(&index, Lookup::Key([1; 16]), 999).await.is_some());
}

pub(super) async fn the_last_change_of_a_job_in_a_batch_counts<I: Index>(index: I) {
    let changes = vec![
        waits(1, 50),
        with_key(waits(2, 50), 2, 1000),
        ended(3, 60),
        waits(4, 50),
        forgotten(2),
        ended(1, 60),
        waits(3, 70),
        waits(4, 40),
    ];
    begin(&index, changes).await;
    assert_eq!(all(&index, 10).await, [(40, 4), (70, 3)]);
    assert_eq!(forgettable(&index, 60).await, [1]);
    assert_eq!(job(&index, 2).await, None);
    assert!(look_up(&index, Lookup::Key([2; 16]), 0).await.is_some());
}

pub(super) async fn jobs_are_ordered_by_due_time_and_id<I: Index>(index: I) {
    // Ids that differ in the highest bit of a byte, and due times next to the boundary of a bucket.
    let offsets = [1 << 39, 255, 256, 1023, 1024, 1025, 128, 127, 0];
    let mut changes: Vec<Change> = offsets.iter().map(|offset| waits(*offset, 5)).collect();
    changes.extend([
        waits(7, 4),
        waits(8, 6),
        waits(9, -60_000_000_000),
        waits(10, 251_638_577_999_999),
    ]);
    begin(&index, changes).await;
    let mut expected = vec![(-60_000_000_000, 9), (4, 7)];
    expected.extend([0, 127, 128, 255, 256, 1023, 1024, 1025, 1 << 39].map(|offset| (5, offset)));
    expected.push((6, 8));
    for page in [1, 2, 3, 100] {
        assert_eq!(all(&index, page).await, expected);
    }
    // The last millisecond of the year 9999.
    let last = due_scan(&index, None, at(251_638_577_999_999), 100, 1 << 20)
        .await
        .unwrap();
    let last = last.rows.last().unwrap().cursor;
    assert_eq!(
        (last.id, last.due),
        (id(10), Timestamp::from_millis(253_402_300_799_999))
    );
    let due = due_scan(&index, None, at(5), 3, 1 << 20).await.unwrap();
    assert_eq!((due.rows.len(), due.is_complete), (3, false));
    let none = due_scan(&index, None, at(-60_000_000_001), 3, 1 << 20)
        .await
        .unwrap();
    assert_eq!((none.rows.len(), none.is_complete), (0, true));
}

pub(super) async fn a_page_continues_after_a_removed_job<I: Index>(index: I) {
    let changes = (0..10).map(|job| waits(job, 5)).chain([waits(20, 6)]);
    begin(&index, changes.collect()).await;
    let behind = async |due, job| {
        let after = Cursor {
            due: at(due),
            id: id(job),
        };
        let ahead = due_scan(&index, Some(after), at(6), 2, 1 << 20).await.unwrap();
        let offsets: Vec<u64> = ahead.rows.iter().map(|row| row.cursor.id.offset()).collect();
        (offsets, ahead.is_complete)
    };
    assert_eq!(behind(5, 4).await, (vec![5, 6], false));
    apply(&index, 10, 11, vec![ended(4, 9), forgotten(5), waits(6, 7)])
        .await
        .unwrap();
    assert_eq!(behind(5, 4).await, (vec![7, 8], false));
    assert_eq!(behind(5, 8).await, (vec![9, 20], true));
    assert_eq!(behind(5, 9).await, (vec![20], true));
    assert_eq!(behind(6, 20).await, (vec![], true));
    assert_eq!(behind(6, 0).await, (vec![20], true));
    assert_eq!(behind(4, 100).await, (vec![0, 1], false));
    assert_eq!(behind(100, 0).await, (vec![], true));
}

pub(super) async fn pages_are_bounded_by_bytes_and_never_empty<I: Index>(index: I) {
    let changes = (0..10).map(|job| {
        let effect = Effect::Waits {
            flow: flow_of(job),
            due: at(5),
            record: vec![b'x'; 1000].into(),
            key: None,
        };
        Change::of_job(id(job), effect)
    });
    begin(&index, changes.collect()).await;
    for (bytes, rows) in [(0, 1), (1000, 1), (1001, 2), (5000, 5), (100_000, 10)] {
        let page = due_scan(&index, None, at(5), 100, bytes).await.unwrap();
        assert_eq!(
            (page.rows.len(), page.is_complete),
            (rows, rows == 10),
            "{bytes} bytes"
        );
    }
}

pub(super) async fn jobs_of_one_instant_are_paged_exactly_once<I: Index>(index: I) {
    const JOBS: i64 = 200_000;
    begin(&index, vec![waits(JOBS, 4)]).await;
    for start in (0..JOBS).step_by(10_000) {
        let changes = (start..start + 10_000).map(|job| waits(job, 5)).collect();
        apply(&index, 10 + start, 20_010 + start, changes).await.unwrap();
    }
    let found = all(&index, 5_000).await;
    let different: BTreeSet<u64> = found.iter().map(|(_, offset)| *offset).collect();
    assert_eq!((found.len(), different.len()), (200_001, 200_001));
    assert!(found.is_sorted());
    let stats = index.stats(SHARD, None, at(5), 1).await.unwrap();
    assert_eq!((stats.scheduled, stats.due), (200_001, 200_001));
    index.clear(SHARD, ME).await.unwrap();
    assert_eq!(all(&index, 10).await, []);
}

pub(super) async fn a_long_batch_is_applied_and_cleared_completely<I: Index>(index: I) {
    // More than two of the chunks in which a script passes values on.
    const JOBS: i64 = 9_000;
    let hash = |job: i64| {
        let mut hash = [0; 16];
        hash[..8].copy_from_slice(&job.to_le_bytes());
        hash
    };
    let key = |job: i64| KeyEntry {
        hash: hash(job),
        value: Bytes::copy_from_slice(&job.to_be_bytes()),
        // In many time slices, and so in many key logs.
        expires: at(1000 + job * 10_000),
    };
    let changes = (0..JOBS).map(|job| {
        let effect = Effect::Waits {
            flow: flow_of(job * 7),
            due: at(job),
            record: Bytes::copy_from_slice(&job.to_be_bytes()),
            key: Some(key(job)),
        };
        Change::of_job(id(job * 7), effect)
    });
    begin(&index, changes.collect()).await;
    let jobs = (0..JOBS).map(|job| Lookup::Job(id(job * 7)));
    let lookups: Vec<Lookup> = jobs.chain((0..JOBS).map(|job| Lookup::Key(hash(job)))).collect();
    let (_, found) = index.look_up(SHARD, &lookups, at(0)).await.unwrap();
    assert_eq!(found.len(), 18_000);
    let number = |found: &Option<Bytes>| {
        found
            .as_ref()
            .map(|bytes| i64::from_be_bytes(bytes[..].try_into().unwrap()))
    };
    assert!(found.iter().map(number).eq((0..JOBS).chain(0..JOBS).map(Some)));

    let half = (0..JOBS).map(|job| {
        if job % 2 == 0 {
            ended(job * 7, 5)
        } else {
            forgotten(job * 7)
        }
    });
    apply(&index, 10, 20, half.collect()).await.unwrap();
    let (_, over) = index.forgettable(SHARD, at(5), 100_000).await.unwrap();
    assert_eq!(over.len(), 4_500);
    let (_, found) = index.look_up(SHARD, &lookups, at(0)).await.unwrap();
    assert_eq!(found.iter().filter(|found| found.is_some()).count(), 13_500);
    index.clear(SHARD, ME).await.unwrap();
    apply(&index, 0, 1, vec![]).await.unwrap();
    let (_, found) = index.look_up(SHARD, &lookups, at(0)).await.unwrap();
    assert!(found.iter().all(Option::is_none));
}

pub(super) async fn arbitrary_bytes_are_kept<I: Index>(index: I) {
    let every: Vec<u8> = (0..=255).collect();
    let records = [
        Bytes::new(),
        Bytes::from_static(b"\0"),
        Bytes::from_static(b"OK\r\n$-1\r\n"),
        Bytes::from(every.clone()),
        Bytes::from(vec![0xff; 100_000]),
    ];
    let ids = [
        [0; 16],
        [0xff; 16],
        *b"\r\n\0\0\"'%{}*?\x80\xc3\x28\n\r",
        [0x80; 16],
        *b"1234567890123456",
    ];
    let change = |(id, record): (&[u8; 16], &Bytes)| {
        let effect = Effect::Waits {
            flow: flow(&String::from_utf8_lossy(id)),
            due: at(5),
            record: record.clone(),
            key: Some(KeyEntry {
                hash: *id,
                value: record.clone(),
                expires: at(1000),
            }),
        };
        Change::of_job(JobId::from_bytes(*id), effect)
    };
    begin(&index, ids.iter().zip(&records).map(change).collect()).await;
    let jobs = ids.iter().map(|id| Lookup::Job(JobId::from_bytes(*id)));
    let keys = ids.iter().map(|id| Lookup::Key(*id));
    // In any order, with one of them twice.
    let lookups: Vec<Lookup> = keys.clone().chain(jobs).chain(keys).collect();
    let (_, found) = index.look_up(SHARD, &lookups, at(0)).await.unwrap();
    let expected = records.iter().cycle().take(15).cloned().map(Some);
    assert!(found.into_iter().eq(expected));

    let ahead = due_scan(&index, None, at(5), 10, 1 << 20).await.unwrap();
    let mut expected: Vec<(JobId, Bytes)> = ids.map(JobId::from_bytes).into_iter().zip(records).collect();
    expected.sort();
    let rows = ahead.rows.into_iter().map(|row| (row.cursor.id, row.record));
    assert!(rows.eq(expected));
}

pub(super) async fn jobs_are_counted_by_minute<I: Index>(index: I) {
    let minute = 60_000;
    let dues = [
        -5,
        0,
        1,
        minute,
        minute + 1,
        3 * minute,
        3 * minute + 1,
        90 * minute,
    ];
    let mut changes: Vec<Change> = (0..).zip(dues).map(|(job, due)| waits(job, due)).collect();
    changes.push(ended(100, 5));
    begin(&index, changes).await;
    let stats = index.stats(SHARD, None, at(0), 4).await.unwrap();
    let expected = ShardStats {
        applied: stats.applied,
        scheduled: 8,
        due: 2,
        next_due: Some(at(-5)),
        per_minute: vec![2, 1, 1, 1],
    };
    assert_eq!(stats, expected);
    assert!(
        index
            .stats(SHARD, None, at(0), 0)
            .await
            .unwrap()
            .per_minute
            .is_empty()
    );
    let day = at(0).after(Duration::from_secs(86_400));
    let stats = index.stats(SHARD, None, day, 1_440).await.unwrap();
    assert_eq!((stats.due, stats.per_minute.iter().sum::<u64>()), (8, 0));
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

fn of(app: &str, first: i64, due: u64, rows: &[u64], is_complete: bool) -> Found {
    (app.to_owned(), first, due, rows.to_vec(), is_complete)
}

/// Three flows: `a` has the jobs 1 to 3, `b` 11 and 12, `c` 21, which is due later.
async fn three_flows<I: Index>(index: &I) -> [Flow; 3] {
    let [a, b, c] = ["a", "b", "c"].map(flow);
    let changes = vec![
        waits_in(&a, 1, -5),
        waits_in(&a, 2, 0),
        waits_in(&a, 3, 10),
        waits_in(&b, 11, -4),
        waits_in(&b, 12, 20),
        waits_in(&c, 21, 100),
    ];
    begin(index, changes).await;
    [a, b, c]
}

pub(super) async fn a_scan_reads_all_flows_that_are_due<I: Index>(index: I) {
    assert_eq!(index.scan(SHARD, &everything(5)).await.unwrap(), Scan::default());
    three_flows(&index).await;
    let scan = index.scan(SHARD, &everything(20)).await.unwrap();
    assert_eq!(scan.applied.unwrap().offset, 10);
    let both = [of("a", -5, 2, &[1, 2, 3], true), of("b", -4, 1, &[11, 12], true)];
    assert_eq!(found(&scan), both);
    assert_eq!(scan.flows[0].rows[1].record, "job 2 due 0");
    assert_eq!(scan.flows[0].flow, flow("a"));
    assert_eq!(scanned(&index, &everything(-6)).await, []);
    assert_eq!(
        scanned(&index, &everything(-5)).await,
        [of("a", -5, 2, &[1], true)],
        "due jobs are counted up to now"
    );
}

pub(super) async fn flows_of_one_application_are_separate<I: Index>(index: I) {
    let flow = |topic: &str, priority| Flow {
        app: "a:b".into(),
        topic: topic.into(),
        priority,
    };
    let flows = [
        flow("t", Priority::High),
        flow("t-2", Priority::High),
        flow("t", Priority::Normal),
        flow("t", Priority::Low),
    ];
    let changes = (1..).zip(&flows).map(|(job, flow)| waits_in(flow, job, 5));
    begin(&index, changes.collect()).await;
    let scan = index.scan(SHARD, &everything(5)).await.unwrap();
    let seen = scan
        .flows
        .iter()
        .map(|found| (&found.flow, found.rows[0].cursor.id.offset()));
    let seen: BTreeSet<_> = seen.collect();
    assert_eq!(seen, flows.iter().zip(1..).collect());
    let ends = (1..).zip(&flows).map(|(job, flow)| ended_in(flow, job, 5));
    apply(&index, 10, 11, ends.collect()).await.unwrap();
    assert_eq!(scanned(&index, &everything(5)).await, []);
}

pub(super) async fn a_scan_reads_a_flow_from_its_position<I: Index>(index: I) {
    let [a, b, _] = three_flows(&index).await;
    let cursor = |due, job| {
        Some(Cursor {
            due: at(due),
            id: id(job),
        })
    };
    let position = |cursor, until, jobs| FlowPosition::After {
        cursor,
        until: at(until),
        jobs,
    };
    let request = ScanRequest {
        positions: vec![
            (a.clone(), position(cursor(-5, 1), 20, 1)),
            (flow("unknown"), position(None, 20, 1)),
        ],
        ..everything(20)
    };
    let seen = scanned(&index, &request).await;
    let all_of_b = of("b", -4, 1, &[11, 12], true);
    assert_eq!(seen, [of("a", -5, 2, &[2], false), all_of_b.clone()]);
    for (position, rows, is_complete) in [
        (position(None, 20, 3), &[1, 2, 3][..], true),
        (position(None, 5, 3), &[1, 2], true),
        (position(None, 5, 2), &[1, 2], true),
        (position(None, 1_000, 9), &[1, 2, 3], true),
        (position(None, 20, 0), &[], false),
        (position(cursor(10, 3), 20, 0), &[], true),
        (position(cursor(0, 1), 20, 9), &[2, 3], true),
        (position(cursor(0, 2), 20, 9), &[3], true),
        (position(cursor(0, 2), -5, 9), &[], true),
        (position(cursor(1_000, 2), 20, 9), &[], true),
        (FlowPosition::CountOnly, &[], false),
    ] {
        let request = ScanRequest {
            positions: vec![(a.clone(), position)],
            ..everything(20)
        };
        let seen = scanned(&index, &request).await;
        assert_eq!(
            seen,
            [of("a", -5, 2, rows, is_complete), all_of_b.clone()],
            "{position:?}"
        );
    }
    // Without positions.
    let request = ScanRequest {
        after: cursor(-4, 11),
        jobs_per_flow: 1,
        positions: vec![(b, FlowPosition::CountOnly)],
        ..everything(200)
    };
    let rest = [
        of("a", -5, 2, &[2], false),
        of("b", -4, 1, &[], false),
        of("c", 100, 0, &[21], true),
    ];
    assert_eq!(scanned(&index, &request).await, rest);
}

pub(super) async fn the_limits_cut_a_scan_off<I: Index>(index: I) {
    three_flows(&index).await;
    let record = "job 1 due -5".len();
    for (jobs, bytes, rotation, rows) in [
        (4, usize::MAX, 0, [&[1, 2, 3][..], &[11], &[]]),
        (3, usize::MAX, 0, [&[1, 2, 3], &[], &[]]),
        (2, usize::MAX, 0, [&[1, 2], &[], &[]]),
        (0, usize::MAX, 0, [&[], &[], &[]]),
        (3, usize::MAX, 1, [&[], &[11, 12], &[21]]),
        (4, usize::MAX, 4, [&[1], &[11, 12], &[21]]),
        (4, usize::MAX, 2, [&[1, 2, 3], &[], &[21]]),
        (9, 0, 0, [&[1], &[], &[]]),
        (9, record, 0, [&[1], &[], &[]]),
        (9, record + 1, 0, [&[1, 2], &[], &[]]),
        (9, 1, 5, [&[], &[], &[21]]),
    ] {
        let request = ScanRequest {
            jobs,
            bytes,
            rotation,
            ..everything(100)
        };
        let mut seen = scanned(&index, &request).await;
        let start = rotation % 3;
        assert_eq!(seen[0].0, ["a", "b", "c"][start]);
        seen.sort();
        for (flow, (rows, all)) in seen.iter().zip(rows.into_iter().zip([3, 2, 1])) {
            assert_eq!((&flow.3[..], flow.4), (rows, rows.len() == all), "{request:?}");
        }
    }
}

pub(super) async fn a_burst_hides_no_other_flow<I: Index>(index: I) {
    const JOBS: i64 = 200_000;
    let (burst, others) = (flow("burst"), ["x", "y", "z"].map(flow));
    let other_jobs = (1..)
        .zip(&others)
        .map(|(job, flow)| waits_in(flow, JOBS + job, 5));
    begin(&index, other_jobs.collect()).await;
    for start in (0..JOBS).step_by(10_000) {
        let changes = (start..start + 10_000).map(|job| waits_in(&burst, job, 0));
        apply(&index, 10 + start, 20_010 + start, changes.collect())
            .await
            .unwrap();
    }
    let request = ScanRequest {
        now: at(5),
        jobs_per_flow: 100,
        ..everything(5)
    };
    let seen = scanned(&index, &request).await;
    let first: Vec<u64> = (0..100).collect();
    let expected = [
        of("burst", 0, 200_000, &first, false),
        of("x", 5, 1, &[200_001], true),
        of("y", 5, 1, &[200_002], true),
        of("z", 5, 1, &[200_003], true),
    ];
    assert_eq!(seen, expected);

    // Scans that are too small for all flows.
    let mut reached = BTreeSet::new();
    for rotation in 7..11 {
        let request = ScanRequest {
            jobs: 2,
            rotation,
            ..request.clone()
        };
        let seen = scanned(&index, &request).await;
        assert_eq!(seen.len(), 4);
        assert_eq!(seen.iter().map(|flow| flow.3.len()).sum::<usize>(), 2);
        reached.extend(
            seen.into_iter()
                .filter(|flow| !flow.3.is_empty())
                .map(|flow| flow.0),
        );
    }
    assert!(reached.iter().eq(["burst", "x", "y", "z"]), "{reached:?}");

    // In the middle of the burst.
    let cursor = Cursor {
        due: at(0),
        id: id(123_456),
    };
    let request = ScanRequest {
        after: Some(cursor),
        jobs_per_flow: 2,
        ..request
    };
    let seen = scanned(&index, &request).await;
    assert_eq!(seen[0], of("burst", 0, 200_000, &[123_457, 123_458], false));
    index.clear(SHARD, ME).await.unwrap();
    assert_eq!(scanned(&index, &request).await, []);
}

pub(super) async fn many_flows_are_indexed_and_removed<I: Index>(index: I) {
    // More than two of the chunks in which a script passes values on.
    const FLOWS: i64 = 9_000;
    let flow_number = |job: i64| flow(&format!("app {job}"));
    let changes = (0..FLOWS).map(|job| waits_in(&flow_number(job), job, job));
    begin(&index, changes.collect()).await;
    let scan = index.scan(SHARD, &everything(FLOWS)).await.unwrap();
    let expected = (0..FLOWS).map(|job| (flow_number(job), at(job), 1));
    let seen = scan.flows.iter();
    let seen = seen.map(|found| (found.flow.clone(), found.first, found.rows.len()));
    assert!(seen.eq(expected));
    let stats = index.stats(SHARD, None, at(4_499), 1).await.unwrap();
    assert_eq!(
        (stats.scheduled, stats.due, stats.per_minute),
        (9_000, 4_500, vec![4_500])
    );

    let positions = (0..FLOWS).map(|job| (flow_number(job), FlowPosition::CountOnly));
    let request = ScanRequest {
        positions: positions.collect(),
        ..everything(FLOWS)
    };
    let seen = scanned(&index, &request).await;
    assert_eq!(seen.len(), 9_000);
    assert!(seen.iter().all(|flow| flow.3.is_empty() && !flow.4));

    let page = ListRequest {
        app: Some("app 8000"),
        ..list_all()
    };
    let page = index.list(SHARD, &page).await.unwrap();
    assert_eq!((page.rows.len(), page.is_complete), (1, true));
    assert_eq!(page.rows[0].cursor.id, id(8_000));

    let changes = (0..FLOWS).map(|job| match job % 300 {
        0..100 => ended_in(&flow_number(job), job, 5),
        100 => forgotten(job),
        _ => waits_in(&flow_number(job), job, 9),
    });
    apply(&index, 10, 20, changes.collect()).await.unwrap();
    let seen = scanned(&index, &everything(FLOWS)).await;
    assert_eq!(seen.len(), 9_000 - 3_000 - 30);
    assert!(seen.iter().all(|flow| flow.1 == 9 && flow.3.len() == 1));
    assert!(index.claim(SHARD, ME).await.unwrap().is_some());
    index.clear(SHARD, ME).await.unwrap();
    apply(&index, 0, 1, vec![]).await.unwrap();
    assert_eq!(scanned(&index, &everything(FLOWS)).await, []);
}

pub(super) async fn a_flow_without_jobs_is_gone<I: Index>(index: I) {
    let [a, b, _] = three_flows(&index).await;
    let changes = vec![ended_in(&a, 1, 5), ended_in(&a, 2, 5), waits_in(&b, 11, 15)];
    apply(&index, 10, 11, changes).await.unwrap();
    let rest = [of("a", 10, 0, &[3], true), of("b", 15, 0, &[11, 12], true)];
    assert_eq!(scanned(&index, &everything(20)).await, rest);
    // Scheduled jobs that are forgotten, in any flow, next to others that are unknown or have ended.
    let changes = [1, 3, 12, 77, 11].map(forgotten).to_vec();
    apply(&index, 11, 12, changes).await.unwrap();
    assert_eq!(
        scanned(&index, &everything(100)).await,
        [of("c", 100, 0, &[21], true)]
    );
    assert_eq!(forgettable(&index, 5).await, [2]);
    assert_eq!(index.claim(SHARD, ME).await.unwrap().unwrap().applied.offset, 12);
    // Ended and forgotten in one batch.
    let changes = vec![ended_in(&flow("c"), 21, 5), forgotten(21)];
    apply(&index, 12, 13, changes).await.unwrap();
    assert_eq!(scanned(&index, &everything(1 << 40)).await, []);
    assert_eq!(index.claim(SHARD, ME).await.unwrap().unwrap().applied.offset, 13);
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

/// The offsets of the jobs of each page.
async fn pages<I: Index>(index: &I, request: ListRequest<'_>) -> Vec<Vec<u64>> {
    let (mut pages, mut request) = (Vec::new(), request);
    loop {
        let page = index.list(SHARD, &request).await.unwrap();
        pages.push(page.rows.iter().map(|row| row.cursor.id.offset()).collect());
        if page.is_complete {
            return pages;
        }
        let last = page.rows.last().expect("a page that is not the last has rows");
        request.after = Some(last.cursor);
    }
}

pub(super) async fn jobs_are_listed_in_order_by_application_and_due_time<I: Index>(index: I) {
    let page = index.list(SHARD, &list_all()).await.unwrap();
    assert_eq!((page.applied, page.rows.len(), page.is_complete), (None, 0, true));
    let high = Flow {
        priority: Priority::High,
        ..flow("a")
    };
    let [a, _, _] = three_flows(&index).await;
    apply(&index, 10, 11, vec![waits_in(&high, 4, 5), waits_in(&a, 5, 10)])
        .await
        .unwrap();
    let page = index.list(SHARD, &list_all()).await.unwrap();
    assert_eq!(page.applied.unwrap().offset, 11);
    let all = [1, 11, 2, 4, 3, 5, 12, 21];
    let all_of_a = [1, 2, 4, 3, 5];
    for limit in [1, 2, 3, 100] {
        for bytes in [0, 25, 1 << 20] {
            let request = ListRequest {
                limit,
                bytes,
                ..list_all()
            };
            let seen = pages(&index, request).await;
            assert_eq!(seen.concat(), all, "{request:?}");
            assert!(seen.iter().all(|page| page.len() <= limit), "{seen:?}");
            let request = ListRequest {
                app: Some("a"),
                ..request
            };
            assert_eq!(pages(&index, request).await.concat(), all_of_a, "{request:?}");
        }
    }
    for (app, from, until, jobs) in [
        (None, Some(0), 20, &[2, 4, 3, 5, 12][..]),
        (Some("a"), Some(0), 9, &[2, 4]),
        (Some("a"), Some(1), 10, &[4, 3, 5]),
        (Some("b"), None, 19, &[11]),
        (Some("b"), Some(21), 100, &[]),
        (Some("d"), None, 100, &[]),
    ] {
        let request = ListRequest {
            app,
            from: from.map(at),
            until: at(until),
            limit: 2,
            ..list_all()
        };
        assert_eq!(pages(&index, request).await.concat(), jobs, "{request:?}");
    }
    let nothing = ListRequest {
        limit: 0,
        ..list_all()
    };
    let page = index.list(SHARD, &nothing).await.unwrap();
    assert_eq!((page.rows.len(), page.is_complete), (0, false));
}

pub(super) async fn jobs_are_counted_by_application<I: Index>(index: I) {
    three_flows(&index).await;
    let stats = async |app| index.stats(SHARD, app, at(0), 1).await.unwrap();
    let applied = index.claim(SHARD, ME).await.unwrap().map(|found| found.applied);
    assert_eq!(applied.unwrap().offset, 10);
    let counts = |scheduled, due, next_due, minute| ShardStats {
        applied,
        scheduled,
        due,
        next_due,
        per_minute: vec![minute],
    };
    assert_eq!(stats(None).await, counts(6, 3, Some(at(-5)), 3));
    assert_eq!(stats(Some("a")).await, counts(3, 2, Some(at(-5)), 1));
    assert_eq!(stats(Some("b")).await, counts(2, 1, Some(at(-4)), 1));
    assert_eq!(stats(Some("c")).await, counts(1, 0, Some(at(100)), 1));
    assert_eq!(stats(Some("d")).await, counts(0, 0, None, 0));
}

pub(super) async fn flows_without_an_application_are_not_jobs<I: Index>(index: I) {
    let schedules = flow("");
    let mut changes: Vec<Change> = (0..300).map(|job| waits_in(&schedules, job, -9)).collect();
    begin(&index, changes.clone()).await;
    // An index without jobs is complete.
    let page = index.list(SHARD, &list_all()).await.unwrap();
    assert_eq!((page.rows.len(), page.is_complete), (0, true));
    assert!(page.applied.is_some());
    let stats = index.stats(SHARD, None, at(0), 1).await.unwrap();
    assert_eq!(
        (stats.applied, stats.scheduled, stats.due, stats.next_due),
        (page.applied, 0, 0, None)
    );

    changes = (0..5).map(|job| waits_in(&flow("a"), 1_000 + job, job)).collect();
    apply(&index, 10, 11, changes).await.unwrap();
    for limit in [1, 2, 100] {
        for bytes in [0, 25, 1 << 20] {
            let request = ListRequest {
                limit,
                bytes,
                ..list_all()
            };
            let seen = pages(&index, request).await;
            assert_eq!(seen.concat(), [1_000, 1_001, 1_002, 1_003, 1_004], "{request:?}");
        }
    }
    let stats = index.stats(SHARD, None, at(0), 1).await.unwrap();
    assert_eq!((stats.scheduled, stats.next_due), (5, Some(at(0))));
    // They are scheduled all the same.
    let scan = scanned(&index, &everything(0)).await;
    assert_eq!(scan.iter().map(|(_, _, due, ..)| due).sum::<u64>(), 301);
}
