//! Changes of jobs and idempotency keys.

use super::*;

pub(crate) async fn idempotency_keys_are_counted<I: Index>(index: I) {
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

pub(crate) async fn an_idempotency_key_expires<I: Index>(index: I) {
    let (key, other) = (Lookup::Key([1; 16]), Lookup::Key([2; 16]));
    let expired = with_key(waits(2, 50), 2, 0);
    begin(&index, vec![with_key(waits(1, 50), 1, 1000), expired]).await;
    let value = key_value(id(1));
    assert_eq!(look_up_bytes(&index, key, 0).await, Some(value.clone()));
    assert_eq!(look_up_bytes(&index, key, 999).await, Some(value));
    assert_eq!(look_up_bytes(&index, key, 1000).await, None);
    assert_eq!(look_up_bytes(&index, other, 0).await, None);
    // The job itself is not changed.
    assert_eq!(all(&index, 10).await, [(50, 1), (50, 2)]);
}

pub(crate) async fn a_reused_key_has_the_new_value<I: Index>(index: I) {
    let key = Lookup::Key([1; 16]);
    begin(&index, vec![with_key(waits(1, 5000), 1, 1000)]).await;
    let (first, second) = (waits(1, 5000), with_key(waits(2, 50), 1, 10_000));
    let taken = batch(10, 11, vec![second.clone()]);
    index.apply(SHARD, ME, &taken, at(2000)).await.unwrap();
    let value = Some(key_value(id(2)));
    assert_eq!(look_up_bytes(&index, key, 2000).await, value);
    // The first job ends, with the key that it once had.
    let end = batch(11, 12, vec![with_key(ended(1, 9000), 1, 1000)]);
    index.apply(SHARD, ME, &end, at(5000)).await.unwrap();
    assert_eq!(look_up_bytes(&index, key, 5000).await, value);
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
    assert_eq!(look_up_bytes(&index, key, 5000).await, value);
    assert_eq!(look_up_bytes(&index, key, 10_000).await, None);
}

/// After the window was raised, a key is in use again that another job has taken over.
pub(crate) async fn old_job_takes_no_key_back<I: Index>(index: I) {
    let key = Lookup::Key([1; 16]);
    let (old, new) = (
        with_key(waits(1, 5000), 1, 9000),
        with_key(waits(2, 50), 1, 10_000),
    );
    let old_end = with_key(ended(1, 9000), 1, 9000);
    let new_end = with_key(ended(2, 9000), 1, 10_000);
    let value = Some(key_value(id(2)));
    let in_use =
        async |expected: &Option<Bytes>| assert_eq!(look_up_bytes(&index, key, 5000).await, *expected);
    begin(&index, vec![old.clone()]).await;
    in_use(&Some(key_value(id(1)))).await;
    for (from, change) in [(10, &new), (11, &old_end), (12, &new_end)] {
        let change = batch(from, from + 1, vec![change.clone()]);
        index.apply(SHARD, ME, &change, at(5000)).await.unwrap();
        in_use(&value).await;
    }
    // The same within one batch, in any order of the ends, as in a compacted topic.
    for changes in [
        vec![&old, &new, &old_end],
        vec![&old_end, &new_end],
        vec![&new, &old_end],
    ] {
        index.clear(SHARD, ME).await.unwrap();
        let changes = batch(0, 12, changes.into_iter().cloned().collect());
        index.apply(SHARD, ME, &changes, at(5000)).await.unwrap();
        in_use(&value).await;
    }
    // Once the later use has expired, it does not count.
    let earlier = batch(12, 13, vec![with_key(waits(1, 50), 1, 20_000)]);
    index.apply(SHARD, ME, &earlier, at(10_000)).await.unwrap();
    assert_eq!(look_up_bytes(&index, key, 10_000).await, Some(key_value(id(1))));
}

pub(crate) async fn a_rescheduled_job_has_only_its_new_due_time<I: Index>(index: I) {
    begin(&index, vec![waits(1, 50), waits(2, 60)]).await;
    apply(&index, 10, 11, vec![waits(1, 70)]).await.unwrap();
    assert_eq!(all(&index, 10).await, [(60, 2), (70, 1)]);
    assert_eq!(job(&index, 1).await.as_deref(), Some("job 1 due 70"));
    apply(&index, 11, 12, vec![waits(1, 1)]).await.unwrap();
    assert_eq!(all(&index, 10).await, [(1, 1), (60, 2)]);
}

pub(crate) async fn an_ended_job_is_not_due_and_is_kept<I: Index>(index: I) {
    let first = vec![waits(1, 50), waits(2, 60), with_key(ended(3, 900), 3, 1000)];
    begin(&index, first).await;
    apply(&index, 10, 11, vec![ended(2, 800), ended(1, 700)])
        .await
        .unwrap();
    assert_eq!(all(&index, 10).await, []);
    assert_eq!(job(&index, 1).await.as_deref(), Some("job 1 ended"));
    assert!(look_up_bytes(&index, Lookup::Key([3; 16]), 0).await.is_some());
    assert!(forgettable(&index, 699).await.is_empty());
    assert_eq!(forgettable(&index, 800).await, [1, 2]);
    let (_, oldest) = index.forgettable(SHARD, at(10_000), 2).await.unwrap();
    assert_eq!(oldest, [id(1), id(2)]);
    // It may end again, because a batch may be applied twice.
    apply(&index, 11, 12, vec![ended(1, 850)]).await.unwrap();
    assert_eq!(forgettable(&index, 10_000).await, [2, 1, 3]);
}

/// The index keeps the record of one ended job.
pub(crate) async fn a_job_that_has_just_ended_keeps_its_record<I: Index>(index: I) {
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
pub(crate) async fn only_the_jobs_that_ended_last_have_a_record<I: Index>(index: I) {
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
        let key = look_up_bytes(&index, Lookup::Key([hash; 16]), 0).await;
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

pub(crate) async fn a_forgotten_job_leaves_only_its_key<I: Index>(index: I) {
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
    assert!(look_up_bytes(&index, Lookup::Key([1; 16]), 999).await.is_some());
}

pub(crate) async fn the_last_change_of_a_job_in_a_batch_counts<I: Index>(index: I) {
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
    assert!(look_up_bytes(&index, Lookup::Key([2; 16]), 0).await.is_some());
}

pub(crate) async fn arbitrary_bytes_are_kept<I: Index>(index: I) {
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
