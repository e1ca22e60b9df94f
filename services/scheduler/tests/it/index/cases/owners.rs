//! Claims, batches and owners: who may change a shard, and what a crash in the middle leaves.

use super::*;

pub(crate) async fn claim_returns_newest_digest<I: Index>(index: I) {
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

pub(crate) async fn previous_owner_queries_are_fenced<I: Index>(index: I) {
    begin(&index, vec![waits(1, 5)]).await;
    let mine = index.of_owner(ME, 10);
    let answers = async || {
        [
            mine.look_up(SHARD, &[], at(0)).await.map(drop),
            due_scan(&mine, None, at(5), 1, 1).await.map(drop),
            mine.finished_release(SHARD, "docs").await.map(drop),
            mine.forgettable(SHARD, at(0), 1).await.map(drop),
            mine.known_keys(SHARD, at(0)).await.map(drop),
            mine.stats(SHARD, None, at(0), 0).await.map(drop),
        ]
    };
    for answer in answers().await {
        answer.unwrap();
    }
    index.claim(SHARD, OTHER).await.unwrap();
    for answer in answers().await {
        assert!(matches!(answer, Err(IndexError::Fenced)), "{answer:?}");
    }
    // Any process may read, as an API does.
    assert_eq!(all(&index, 10).await, [(5, 1)]);
}

pub(crate) async fn query_behind_expected_offset_is_gap<I: Index>(index: I) {
    begin(&index, vec![waits(1, 5)]).await;
    let gap = |expected, found: Option<i64>, answer: Result<(), IndexError>| {
        let is_gap =
            matches!(answer, Err(IndexError::Gap { found: f, expected: e }) if (f, e) == (found, expected));
        assert!(is_gap, "{answer:?}");
    };
    let ahead = index.of_owner(ME, 11);
    gap(11, Some(10), ahead.look_up(SHARD, &[], at(0)).await.map(drop));
    gap(11, Some(10), ahead.forgettable(SHARD, at(0), 1).await.map(drop));
    // The state topic has lost records.
    let refused = apply(&index, 12, 5, vec![]).await;
    assert_eq!(refused, Err("Gap { found: Some(10), expected: 12 }".to_owned()));
    index.clear(SHARD, ME).await.unwrap();
    gap(11, None, due_scan(&ahead, None, at(5), 1, 1).await.map(drop));
}

pub(crate) async fn clear_forgets_finished_releases<I: Index>(index: I) {
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
    // The next owner knows it, and the previous one changes nothing any more.
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

pub(crate) async fn shards_are_independent<I: Index>(index: I) {
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

pub(crate) async fn long_batch_is_applied_and_cleared<I: Index>(index: I) {
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
