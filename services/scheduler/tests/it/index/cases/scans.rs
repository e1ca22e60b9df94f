//! Scans of what is due, flow by flow.

use super::*;

fn of(app: &str, first: i64, due: u64, rows: &[u64], is_complete: bool) -> Found {
    (app.to_owned(), first, due, rows.to_vec(), is_complete)
}

pub(crate) async fn burst_hides_no_other_flow<I: Index>(index: I) {
    const JOBS: i64 = 20_000;
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
        of("burst", 0, 20_000, &first, false),
        of("x", 5, 1, &[20_001], true),
        of("y", 5, 1, &[20_002], true),
        of("z", 5, 1, &[20_003], true),
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
        id: id(12_345),
    };
    let request = ScanRequest {
        after: Some(cursor),
        jobs_per_flow: 2,
        ..request
    };
    let seen = scanned(&index, &request).await;
    assert_eq!(seen[0], of("burst", 0, 20_000, &[12_346, 12_347], false));
    index.clear(SHARD, ME).await.unwrap();
    assert_eq!(scanned(&index, &request).await, []);
}

pub(crate) async fn many_flows_are_indexed_and_removed<I: Index>(index: I) {
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
