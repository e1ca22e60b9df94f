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
