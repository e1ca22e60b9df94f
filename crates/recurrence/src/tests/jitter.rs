use super::*;

fn with_jitter(jitter: &str, definition: Definition) -> Schedule {
    schedule(Definition {
        jitter: jitter.parse().unwrap(),
        ..definition
    })
}

#[test]
fn due_time_is_deterministic() {
    let schedule = with_jitter("10m", every("1h", None));
    let due = |schedule: &Schedule, hour: i64| {
        let nominal = Timestamp::from_millis(hour * HOUR - 1);
        let occurrence = schedule.next_after(nominal).unwrap();
        occurrence.due.as_millis() - occurrence.nominal.as_millis()
    };
    // Fixed, because a later version must compute the same.
    let offsets: Vec<i64> = (490_000..490_004).map(|hour| due(&schedule, hour)).collect();
    assert_eq!(offsets, [257_147, 48_628, 459_058, 179_333]);
    let other = Schedule::new("other".parse().unwrap(), schedule.recurrence().clone());
    assert_ne!(due(&other, 490_000), offsets[0]);
}

#[test]
fn offsets_are_spread_over_the_jitter() {
    let schedule = with_jitter("10s", every("1h", None));
    let mut seconds = [0; 10];
    let mut position = at("2026-01-01T00:00:00Z");
    for _ in 0..1_000 {
        let occurrence = schedule.next_after(position).unwrap();
        position = occurrence.nominal;
        let offset = occurrence.due.since(occurrence.nominal);
        assert!(offset.as_millis() <= 10_000);
        seconds[usize::try_from(offset.as_secs().min(9)).unwrap()] += 1;
    }
    assert!(
        seconds.iter().all(|count| (50..150).contains(count)),
        "{seconds:?}"
    );
}

#[test]
fn jitter_ends_before_next_occurrence() {
    let schedule = with_jitter("1d", cron("0,1 * * * *", "UTC", Gap::Shift, None));
    let preview = schedule.preview(
        Progress::new(at("2026-01-01T00:00:00Z")),
        at("2026-01-01T00:00:00Z"),
        at("2026-01-01T00:00:00Z"),
        2,
    );
    let latest: Vec<_> = preview.iter().map(|preview| preview.latest_due).collect();
    assert_eq!(
        latest,
        [at("2026-01-01T00:59:59.999Z"), at("2026-01-01T01:00:59.999Z")]
    );
    assert_eq!(preview[0].nominal, at("2026-01-01T00:01:00Z"));
}
