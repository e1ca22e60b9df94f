//! Scans of what is due, flow by flow.

use super::*;

fn of(app: &str, first: i64, due: u64, rows: &[u64], is_complete: bool) -> Found {
    (app.to_owned(), first, due, rows.to_vec(), is_complete)
}

pub(crate) async fn a_scan_reads_all_flows_that_are_due<I: Index>(index: I) {
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

pub(crate) async fn flows_of_one_application_are_separate<I: Index>(index: I) {
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

pub(crate) async fn a_scan_reads_a_flow_from_its_position<I: Index>(index: I) {
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

pub(crate) async fn the_limits_cut_a_scan_off<I: Index>(index: I) {
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

pub(crate) async fn a_burst_hides_no_other_flow<I: Index>(index: I) {
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

pub(crate) async fn a_flow_without_jobs_is_gone<I: Index>(index: I) {
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
