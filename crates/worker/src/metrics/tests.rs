use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;
use redeliver_core::Failure;
use redeliver_core::anchor::UnusableAnchor;

use super::*;

/// The series of these metrics whose value is not 0, without their common prefix.
fn series(registry: &Registry, prefix: &str) -> Vec<String> {
    let mut page = String::new();
    text::encode(&mut page, registry).unwrap();
    let series = page.lines().filter_map(|line| line.strip_prefix(prefix));
    series
        .filter(|line| !line.ends_with(" 0"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn attempts_are_measured_by_outcome() {
    let mut registry = Registry::default();
    let metrics = WorkerFamilies::register(&mut registry).of("docs");
    metrics.attempted(&Outcome::unchanged(), Duration::from_millis(1));
    for class in ErrorClass::ALL {
        let failed = Outcome::Failed(Failure::new(class, "code", "message"));
        metrics.attempted(&failed, Duration::from_millis(1));
    }
    let mut counted = series(&registry, "worker_handling_seconds_count");
    counted.sort();
    assert_eq!(
        counted,
        [
            r#"{pipeline="docs",outcome="malformed"} 1"#,
            r#"{pipeline="docs",outcome="permanent"} 3"#,
            r#"{pipeline="docs",outcome="succeeded"} 1"#,
            r#"{pipeline="docs",outcome="throttled"} 1"#,
            r#"{pipeline="docs",outcome="transient"} 1"#,
        ]
    );
}

#[test]
fn attempts_are_counted_at_the_end() {
    let mut registry = Registry::default();
    let metrics = WorkerFamilies::register(&mut registry).of("docs");
    metrics.written(Disposition::Succeeded, 1);
    metrics.written(Disposition::Succeeded, 4);
    metrics.written(Disposition::Dead(ErrorClass::Exhausted), 3);
    metrics.written(Disposition::Dead(ErrorClass::Malformed), 0);
    let waits = Disposition::Waiting {
        class: ErrorClass::Transient,
        due: redeliver_core::Timestamp::from_millis(0),
        queue: DelayQueue::Scheduler,
        unusable_anchor: Some(UnusableAnchor::NotATime),
    };
    metrics.written(waits, 2);
    let anchors = series(&registry, "worker_unusable_anchors_total");
    assert_eq!(anchors, [r#"{pipeline="docs"} 1"#]);
    let mut sums = series(&registry, "worker_attempts_sum");
    sums.sort();
    assert_eq!(
        sums,
        [
            r#"{pipeline="docs",outcome="dead"} 3.0"#,
            r#"{pipeline="docs",outcome="succeeded"} 5.0"#
        ]
    );
    let without_attempt = r#"{le="0.0",pipeline="docs",outcome="dead"} 1"#;
    let buckets = series(&registry, "worker_attempts_bucket");
    assert!(buckets.iter().any(|line| line == without_attempt), "{buckets:?}");
}

#[test]
fn waiting_records_of_drivers_are_summed() {
    let mut registry = Registry::default();
    let metrics = WorkerFamilies::register(&mut registry).of("docs");
    let (mut first, mut second) = (metrics.waiting(), metrics.waiting());
    let order = |order| WaitingCounts {
        order,
        ..WaitingCounts::default()
    };
    first.report(order(5));
    second.report(order(2));
    first.report(order(3));
    let waiting = |expected: &[&str]| assert_eq!(series(&registry, "worker_waiting_records"), expected);
    waiting(&[r#"{pipeline="docs",reason="order"} 5"#]);
    drop(first);
    waiting(&[r#"{pipeline="docs",reason="order"} 2"#]);
    drop(second);
    waiting(&[]);
}
