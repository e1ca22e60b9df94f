use super::*;

const POLICIES: [MisfirePolicy; 4] = [
    MisfirePolicy::Skip,
    MisfirePolicy::Once,
    MisfirePolicy::All { limit: 1 },
    MisfirePolicy::All { limit: 7 },
];

fn with_policy(policy: MisfirePolicy, definition: Definition) -> Schedule {
    let misfire = Misfire {
        policy,
        ..Misfire::default()
    };
    schedule(Definition {
        misfire,
        ..definition
    })
}

fn minutes(decision: &Decision) -> Vec<i64> {
    let start = at("2026-01-01T00:00:00Z");
    let minute = |occurrence: &Occurrence| occurrence.nominal.since(start).as_secs().cast_signed() / 60;
    decision.dispatch.iter().map(minute).collect()
}

/// The decision of a schedule for every minute that was down from 00:00:00 to 00:10:30.
#[test]
fn the_policy_decides_about_missed_occurrences() {
    let start = at("2026-01-01T00:00:00Z");
    for (policy, dispatched, skipped) in [
        (MisfirePolicy::Skip, &[10][..], Some((9, 9))),
        (MisfirePolicy::Once, &[9, 10], Some((8, 8))),
        (MisfirePolicy::All { limit: 3 }, &[7, 8, 9, 10], Some((6, 6))),
        (
            MisfirePolicy::All { limit: 9 },
            &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
            None,
        ),
    ] {
        let schedule = with_policy(policy, every("1m", None));
        let decision = schedule.decide(
            Progress::new(start),
            plus(start, 10 * MINUTE + 30 * SECOND),
            MAX_DISPATCH,
        );
        assert_eq!(minutes(&decision), dispatched, "{policy:?}");
        let expected = skipped.map(|(count, until)| Skipped {
            count,
            until: plus(start, until * MINUTE),
        });
        assert_eq!(decision.skipped, expected, "{policy:?}");
        assert_eq!(decision.progress.position, plus(start, 10 * MINUTE));
        assert_eq!(decision.progress.count, dispatched.len() as u64);
        assert_eq!(decision.next.unwrap().nominal, plus(start, 11 * MINUTE));
        assert!(!decision.is_finished);
    }
}

#[test]
fn late_occurrence_is_missed() {
    let start = at("2026-01-01T00:00:00Z");
    let schedule = with_policy(MisfirePolicy::Skip, every("1h", None));
    let decide = |late: i64| schedule.decide(Progress::new(start), plus(start, HOUR + late), MAX_DISPATCH);
    assert_eq!(decide(-1).dispatch.len(), 0);
    assert_eq!(decide(-1).progress, Progress::new(start));
    assert_eq!(decide(0).dispatch.len(), 1);
    assert_eq!(decide(MINUTE).dispatch.len(), 1);
    let missed = decide(MINUTE + 1);
    assert_eq!((missed.dispatch.len(), missed.skipped.unwrap().count), (0, 1));
}

#[test]
fn long_outage_is_cheap() {
    let start = at("2026-01-01T00:00:00Z");
    let now = plus(start, 365 * DAY);
    for definition in [
        every("1s", None),
        cron("* * * * * *", "Europe/Berlin", Gap::Shift, None),
    ] {
        for (policy, missed) in [
            (MisfirePolicy::Skip, 0),
            (MisfirePolicy::Once, 1),
            (MisfirePolicy::All { limit: 900 }, 900),
        ] {
            let decision =
                with_policy(policy, definition.clone()).decide(Progress::new(start), now, MAX_DISPATCH);
            assert_eq!(decision.dispatch.len(), missed + 61);
            let skipped = decision.skipped.unwrap();
            assert_eq!(skipped.count + decision.dispatch.len() as u64, 365 * 86_400);
            assert_eq!(decision.progress.position, now);
        }
    }
}

#[test]
fn small_maximum_changes_no_occurrence() {
    let start = at("2026-01-01T00:00:00Z");
    let now = plus(start, DAY);
    let schedule = with_policy(MisfirePolicy::All { limit: 7 }, every("1h", None));
    let whole = schedule.decide(Progress::new(start), now, MAX_DISPATCH);
    assert_eq!((whole.dispatch.len(), whole.skipped.unwrap().count), (8, 16));
    let (mut dispatched, mut skipped, mut progress) = (Vec::new(), 0, Progress::new(start));
    loop {
        let part = schedule.decide(progress, now, 3);
        dispatched.extend(part.dispatch);
        skipped += part.skipped.map_or(0, |skipped| skipped.count);
        progress = part.progress;
        if part.next.unwrap().due > now {
            break;
        }
    }
    assert_eq!(
        (dispatched, skipped, progress),
        (whole.dispatch, 16, whole.progress)
    );
}

#[test]
fn schedule_ends_after_maximum_count() {
    let start = at("2026-01-01T00:00:00Z");
    let schedule = with_policy(
        MisfirePolicy::All { limit: 5 },
        Definition {
            max_count: Some(3),
            ..every("1h", None)
        },
    );
    // Skipped occurrences do not count, so the latest ones are the last ones.
    let decision = schedule.decide(
        Progress::new(start),
        plus(start, 10 * HOUR + 2 * MINUTE),
        MAX_DISPATCH,
    );
    let hours: Vec<i64> = minutes(&decision).iter().map(|minute| minute / 60).collect();
    assert_eq!((hours, decision.skipped.unwrap().count), (vec![8, 9, 10], 7));
    assert!(decision.is_finished && decision.next.is_none());
    let later = schedule.decide(decision.progress, plus(start, 20 * HOUR), MAX_DISPATCH);
    assert!(later.is_finished && later.dispatch.is_empty());
    assert_eq!(schedule.preview(decision.progress, start, start, 10), []);
    assert_eq!(schedule.preview(Progress::new(start), start, start, 10).len(), 3);
}

#[test]
fn preview_ends_with_maximum_count() {
    let created = at("2026-11-24T00:00:00Z");
    let start = at("2026-12-01T00:00:00Z");
    let schedule = schedule(Definition {
        start: Some(start),
        max_count: Some(3),
        ..every("1h", None)
    });
    let new = Progress::new(created);
    let second = Progress {
        position: start,
        count: 1,
        ..new
    };
    let later = at("2027-06-01T00:00:00Z");
    for (progress, now, after, hours) in [
        (new, created, created, &[0, 1, 2][..]),
        (new, created, start, &[1, 2]),
        (new, created, plus(start, HOUR), &[2]),
        (new, created, plus(start, 2 * HOUR), &[]),
        (new, created, later, &[]),
        (second, start, created, &[1, 2]),
        (second, start, plus(start, HOUR), &[2]),
        (second, start, plus(start, 2 * HOUR), &[]),
        // What fell due during a pause may be skipped.
        (second, plus(start, 9 * HOUR), plus(start, 9 * HOUR), &[10, 11]),
        (second, plus(start, 9 * HOUR), plus(start, 10 * HOUR), &[11]),
    ] {
        let preview = schedule.preview(progress, now, after, 10);
        let nominal: Vec<_> = preview.iter().map(|occurrence| occurrence.nominal).collect();
        let expected: Vec<_> = hours.iter().map(|hour| plus(start, hour * HOUR)).collect();
        assert_eq!(nominal, expected, "{progress:?} {after}");
    }
}

#[test]
fn a_paused_schedule_dispatches_nothing() {
    let start = at("2026-01-01T00:00:00Z");
    let schedule = with_policy(MisfirePolicy::All { limit: 5 }, every("1h", None));
    let paused = Progress::new(start).pause();
    assert_eq!((paused.is_paused, paused.revision), (true, 2));
    assert_eq!(paused.pause(), paused);
    let decision = schedule.decide(paused, plus(start, 10 * HOUR), MAX_DISPATCH);
    assert!(decision.dispatch.is_empty() && !decision.is_finished && decision.next.is_none());
    assert_eq!(decision.progress, paused);

    let now = plus(start, 10 * HOUR + 30 * MINUTE);
    let (resumed, skipped) = schedule.resume(paused, now, CatchUp::Skip);
    assert_eq!(
        skipped,
        Some(Skipped {
            count: 10,
            until: plus(start, 10 * HOUR)
        })
    );
    assert_eq!((resumed.is_paused, resumed.revision), (false, 3));
    let decision = schedule.decide(resumed, now, MAX_DISPATCH);
    assert!(decision.dispatch.is_empty());
    assert_eq!(decision.next.unwrap().nominal, plus(start, 11 * HOUR));
    assert_eq!(schedule.resume(resumed, now, CatchUp::Skip), (resumed, None));

    let (resumed, skipped) = schedule.resume(paused, now, CatchUp::Misfire);
    assert_eq!((resumed.position, skipped), (start, None));
    assert_eq!(schedule.decide(resumed, now, MAX_DISPATCH).dispatch.len(), 5);
}

#[test]
fn pause_skips_only_due_occurrences() {
    let start = at("2026-01-01T00:00:00Z");
    let definition = Definition {
        jitter: "30m".parse().unwrap(),
        ..every("1h", None)
    };
    let schedule = schedule(definition);
    let first = schedule.next_after(start).unwrap();
    assert!(first.due > first.nominal);
    let paused = Progress::new(start).pause();
    let (resumed, skipped) = schedule.resume(paused, first.nominal, CatchUp::Skip);
    assert_eq!(skipped, None);
    assert_eq!(
        schedule.decide(resumed, first.due, MAX_DISPATCH).dispatch,
        [first]
    );
    let (_, skipped) = schedule.resume(paused, first.due, CatchUp::Skip);
    assert_eq!(
        skipped,
        Some(Skipped {
            count: 1,
            until: first.nominal
        })
    );
}

#[test]
fn changed_definition_repeats_no_occurrence() {
    let start = at("2026-01-01T00:00:00Z");
    let hourly = schedule(every("1h", None));
    let progress = hourly
        .decide(Progress::new(start), plus(start, HOUR), MAX_DISPATCH)
        .progress;
    let often = schedule(every("10m", None));
    let late = progress.redefine(plus(start, 95 * MINUTE));
    assert_eq!((late.revision, late.count), (2, 1));
    let next = often
        .decide(late, plus(start, 95 * MINUTE), MAX_DISPATCH)
        .next
        .unwrap();
    assert_eq!(next.nominal, plus(start, 100 * MINUTE));
    // A clock that was set back does not repeat an occurrence.
    let early = progress.redefine(plus(start, 5 * MINUTE));
    let decision = often.decide(early, plus(start, 5 * MINUTE), MAX_DISPATCH);
    assert_eq!(decision.next.unwrap().nominal, plus(start, 70 * MINUTE));
}

/// The decision by the rules, one occurrence after another.
fn naive(schedule: &Schedule, progress: Progress, now: Timestamp) -> (Vec<Occurrence>, u64, Timestamp) {
    let definition = schedule.recurrence().definition();
    let grace = i64::try_from(definition.misfire.grace.as_millis()).unwrap();
    let limit = match definition.misfire.policy {
        MisfirePolicy::Skip => 0,
        MisfirePolicy::Once => 1,
        MisfirePolicy::All { limit } => limit as usize,
    };
    let remaining = definition.max_count.map_or(usize::MAX, |max| {
        usize::try_from(max.saturating_sub(progress.count)).unwrap()
    });
    let mut due = Vec::new();
    let mut position = progress.position;
    while let Some(next) = schedule.next_after(position).filter(|next| next.due <= now) {
        position = next.nominal;
        due.push(next);
    }
    let missed = due
        .iter()
        .filter(|occurrence| occurrence.due < plus(now, -grace))
        .count();
    let kept = missed.min(limit).min(remaining);
    let dispatched: Vec<_> = due[missed - kept..].iter().copied().take(remaining).collect();
    let decided = due[..missed]
        .iter()
        .chain(&dispatched)
        .map(|occurrence| occurrence.nominal);
    let position = decided.max().unwrap_or(progress.position);
    (dispatched, (missed - kept) as u64, position)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn decision_follows_the_rules(
        expression in expression(),
        interval in prop::option::of(1..3_000u64),
        policy in prop::sample::select(&POLICIES[..]),
        jitter in prop_oneof![Just(0), 0..5_000u64, 0..7_200_000u64],
        max_count in prop::option::of(1..20u64),
        count in 0..20u64,
        range in (-40_000..20_000i64, 0..60_000i64),
        start in 1_790_000_000..1_795_000_000i64,
        down in 0..40_000i64,
    ) {
        let position = Timestamp::from_millis(start * SECOND + 321);
        let definition = match interval {
            Some(seconds) => definition(Timing::Every {
                interval: HumanDuration::from_secs(seconds),
                anchor: None,
            }),
            None => cron(&expression, "Europe/Berlin", Gap::Shift, None),
        };
        let first = plus(position, range.0 * SECOND);
        let recurrence = Recurrence::new(Definition {
            start: Some(first),
            end: Some(plus(first, range.1 * SECOND)),
            max_count,
            jitter: HumanDuration::from_millis(jitter),
            misfire: Misfire { policy, ..Misfire::default() },
            ..definition
        });
        prop_assume!(recurrence.is_ok());
        let schedule = Schedule::new("nightly".parse().unwrap(), recurrence.unwrap());
        let definition = schedule.recurrence().definition();
        let progress = Progress { count, ..Progress::new(position) };
        let now = plus(position, down * SECOND);
        let decision = schedule.decide(progress, now, MAX_DISPATCH);
        let (dispatched, skipped, position) = naive(&schedule, progress, now);
        prop_assert_eq!(&decision.dispatch, &dispatched);
        prop_assert_eq!(decision.skipped.map_or(0, |skipped| skipped.count), skipped);
        let first = dispatched.first().map_or(now, |first| first.nominal);
        prop_assert!(decision.skipped.is_none_or(|skipped| skipped.until < first));
        prop_assert_eq!(decision.progress.position, position);
        prop_assert_eq!(decision.progress.count, count + dispatched.len() as u64);
        prop_assert_eq!(decision.is_finished, decision.next.is_none());
        prop_assert!(dispatched.is_sorted_by(|a, b| a.nominal < b.nominal && a.due < b.due));
        for occurrence in &dispatched {
            prop_assert!(occurrence.nominal <= occurrence.due && occurrence.due <= now);
            prop_assert!(definition.start <= Some(occurrence.nominal));
            prop_assert!(Some(occurrence.nominal) <= definition.end);
        }
        // Deciding again changes nothing, and a decision in two steps dispatches nothing twice.
        let again = schedule.decide(decision.progress, now, MAX_DISPATCH);
        prop_assert!(again.dispatch.is_empty() && again.skipped.is_none());
        prop_assert_eq!(again.progress, decision.progress);
    }
}
