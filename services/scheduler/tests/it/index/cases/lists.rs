//! Orders, pages, lists and counts of jobs.

use super::*;

pub(crate) async fn jobs_are_ordered_by_due_time_and_id<I: Index>(index: I) {
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

pub(crate) async fn a_page_continues_after_a_removed_job<I: Index>(index: I) {
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

pub(crate) async fn pages_are_bounded_by_bytes_and_never_empty<I: Index>(index: I) {
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

pub(crate) async fn jobs_of_one_instant_are_paged_exactly_once<I: Index>(index: I) {
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

pub(crate) async fn jobs_are_counted_by_minute<I: Index>(index: I) {
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

pub(crate) async fn jobs_are_listed_in_order_by_application_and_due_time<I: Index>(index: I) {
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

pub(crate) async fn jobs_are_counted_by_application<I: Index>(index: I) {
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

pub(crate) async fn flows_without_an_application_are_not_jobs<I: Index>(index: I) {
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
