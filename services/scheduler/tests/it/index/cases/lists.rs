//! Orders and pages of jobs.

use super::*;

pub(crate) async fn jobs_are_ordered_by_due_time<I: Index>(index: I) {
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

pub(crate) async fn jobs_of_one_instant_are_paged<I: Index>(index: I) {
    const JOBS: i64 = 20_000;
    begin(&index, vec![waits(JOBS, 4)]).await;
    for start in (0..JOBS).step_by(10_000) {
        let changes = (start..start + 10_000).map(|job| waits(job, 5)).collect();
        apply(&index, 10 + start, 20_010 + start, changes).await.unwrap();
    }
    let found = all(&index, 5_000).await;
    let different: BTreeSet<u64> = found.iter().map(|(_, offset)| *offset).collect();
    assert_eq!((found.len(), different.len()), (20_001, 20_001));
    assert!(found.is_sorted());
    let stats = index.stats(SHARD, None, at(5), 1).await.unwrap();
    assert_eq!((stats.scheduled, stats.due), (20_001, 20_001));
    index.clear(SHARD, ME).await.unwrap();
    assert_eq!(all(&index, 10).await, []);
}
