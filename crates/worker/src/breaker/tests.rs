use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const FAILED: Evidence = Evidence::Failed { shared_call: None };
const BOTH: Offer = Offer {
    forgotten: true,
    others: true,
};

/// A breaker at a time that only the test moves.
struct Bench {
    breaker: Breaker,
    now: Instant,
}

impl Bench {
    /// Opens after this many failures in a row, whatever the share.
    fn new(failures: usize) -> Self {
        Self::with_rate(failures, None)
    }

    fn with_rate(failures: usize, rate: Option<FailureRate>) -> Self {
        let settings = BreakerSettings {
            failures,
            rate,
            open_max: 8 * SECOND,
            poison_after: 60 * SECOND,
        };
        Self {
            breaker: Breaker::new(settings, 16),
            now: Instant::now(),
        }
    }

    fn start(&mut self) -> Admitted {
        self.breaker.start(BOTH, self.now).unwrap()
    }

    fn end(&mut self, admitted: Admitted, record: i64, evidence: Evidence) -> (Verdict, Option<Phase>) {
        let record = (("docs".into(), 0, record), false);
        let (verdict, change) = self.breaker.ended(admitted, record, evidence, self.now, 0.0);
        (verdict, change.map(|change| change.to))
    }

    fn run(&mut self, record: i64, evidence: Evidence) -> (Verdict, Option<Phase>) {
        let admitted = self.start();
        self.end(admitted, record, evidence)
    }

    fn held(&mut self, record: i64) -> Provisional {
        match self.run(record, FAILED) {
            (Verdict::Held(failure), None) => failure,
            other => panic!("{other:?}"),
        }
    }

    fn decide(&self, failure: Provisional) -> Verdict {
        self.breaker.view().decide(failure)
    }

    #[track_caller]
    fn assert_all(&self, failures: &[Provisional], expected: Verdict) {
        for failure in failures {
            assert_eq!(self.decide(*failure), expected);
        }
    }

    /// A bench with calls that were answered.
    fn answered(calls: i64) -> Self {
        let mut bench = Self::with_rate(5, HALF);
        for record in 0..calls {
            bench.run(record, Evidence::Answered);
        }
        bench
    }

    fn phase(&self) -> Phase {
        self.breaker.view().phase
    }

    /// Opens the breaker.
    fn open(&mut self) {
        for _ in 1..self.breaker.settings.failures {
            self.held(0);
        }
        assert_eq!(self.run(0, FAILED), OPENED);
    }

    /// Opens the breaker, and has a probe answered.
    fn half_open(&mut self) {
        self.open();
        self.advance_to_probe();
        assert_eq!(
            self.run(0, Evidence::Answered),
            (Verdict::Own, Some(Phase::HalfOpen))
        );
    }

    /// The time until the next probe.
    fn next_probe(&mut self) -> Duration {
        self.breaker.start(BOTH, self.now).unwrap_err().unwrap() - self.now
    }

    fn advance_to_probe(&mut self) {
        let delay = self.next_probe();
        self.now += delay;
    }

    /// All attempts that may start now.
    fn start_all(&mut self) -> Vec<Admitted> {
        std::iter::from_fn(|| self.breaker.start(BOTH, self.now).ok())
            .take(1_000)
            .collect()
    }
}

const OPENED: (Verdict, Option<Phase>) = (Verdict::Forgotten, Some(Phase::Open));

/// More than half of 20 calls within 10 s.
const HALF: Option<FailureRate> = Some(FailureRate {
    share: 0.5,
    window: Duration::from_secs(10),
    calls: 20,
});

#[test]
fn opening_failures_are_forgotten() {
    let mut bench = Bench::new(3);
    let running = [bench.start(), bench.start()];
    let held = [bench.held(1), bench.held(2)];
    assert_eq!(bench.run(3, FAILED), OPENED);
    for failure in held {
        assert_eq!(bench.decide(failure), Verdict::Forgotten);
    }
    // Attempts that were in progress neither count nor change anything.
    assert_eq!(bench.end(running[0], 4, FAILED), (Verdict::Forgotten, None));
    assert_eq!(bench.end(running[1], 5, Evidence::Answered), (Verdict::Own, None));
    assert_eq!(bench.phase(), Phase::Open);
}

#[test]
fn shared_call_fails_once() {
    let mut bench = Bench::new(3);
    let of_call = |call| Evidence::Failed {
        shared_call: Some(call),
    };
    let mut record = 0;
    for call in [1, 2] {
        for _ in 0..100 {
            record += 1;
            let (verdict, change) = bench.run(record, of_call(call));
            assert!(matches!(verdict, Verdict::Held(_)), "{verdict:?}");
            assert_eq!(change, None);
        }
    }
    assert_eq!(bench.run(-1, of_call(3)), OPENED);
}

#[test]
fn answer_keeps_the_breaker_closed() {
    let mut bench = Bench::new(3);
    for round in 0..10 {
        bench.held(2 * round);
        bench.held(2 * round + 1);
        bench.run(-1, Evidence::Answered);
    }
    // Neither a request for a delay nor the answer to a call from before the failures is one.
    let slow = bench.start();
    bench.held(1);
    bench.held(2);
    assert_eq!(bench.run(3, Evidence::None), (Verdict::Own, None));
    assert_eq!(bench.end(slow, 4, Evidence::Answered), (Verdict::Own, None));
    assert_eq!(bench.run(5, FAILED), OPENED);
}

#[test]
fn failing_majority_opens_the_breaker() {
    let mut bench = Bench::with_rate(5, HALF);
    for record in 0..1_000 {
        bench.now += SECOND / 10;
        let is_answered = record % 2 == 0;
        let evidence = if is_answered { Evidence::Answered } else { FAILED };
        assert_eq!(bench.run(record, evidence).1, None, "half of them");
    }
    assert_eq!(bench.run(-1, FAILED), OPENED);
}

#[test]
fn few_calls_open_after_consecutive_failures() {
    let mut bench = Bench::with_rate(5, HALF);
    for record in 0..14 {
        assert_eq!(bench.run(record, Evidence::Answered).1, None);
    }
    for record in 0..4 {
        bench.held(record);
    }
    assert_eq!(bench.run(4, FAILED), OPENED);
}

#[test]
fn consecutive_failures_are_forgotten() {
    let mut bench = Bench::answered(100);
    let outage: Vec<_> = (0..5).map(|record| bench.held(record)).collect();
    bench.run(5, Evidence::Answered);
    bench.assert_all(&outage, Verdict::Forgotten);
    let short: Vec<_> = (0..4).map(|record| bench.held(record)).collect();
    bench.run(5, Evidence::Answered);
    bench.assert_all(&short, Verdict::Own);
}

#[test]
fn late_failures_of_outage_are_forgotten() {
    let mut bench = Bench::answered(100);
    let hanging = bench.start();
    bench.now += YOUNG;
    for record in 0..5 {
        bench.held(record);
    }
    let answered = bench.start();
    let (Verdict::Held(late), None) = bench.end(hanging, 5, FAILED) else {
        panic!("not held");
    };
    bench.end(answered, 6, Evidence::Answered);
    assert_eq!(bench.decide(late), Verdict::Forgotten);
}

#[test]
fn fast_failures_wait_for_slow_answers() {
    let mut bench = Bench::with_rate(5, HALF);
    let slow: Vec<_> = (0..10).map(|_| bench.start()).collect();
    // Enough calls for the share with the seventh of them.
    let failures: Vec<_> = (0..10).map(|record| bench.held(record)).collect();
    for (record, attempt) in (10..).zip(slow) {
        assert_eq!(
            bench.end(attempt, record, Evidence::Answered),
            (Verdict::Own, None)
        );
    }
    assert!(
        failures
            .iter()
            .all(|failure| bench.decide(*failure) == Verdict::Held(*failure))
    );
    bench.run(20, Evidence::Answered);
    bench.assert_all(&failures, Verdict::Own);
}

#[test]
fn long_unanswered_calls_are_ignored() {
    let mut bench = Bench::with_rate(5, HALF);
    let slow: Vec<_> = (0..10).map(|_| bench.start()).collect();
    bench.now += YOUNG;
    for record in 0..4 {
        bench.held(record);
    }
    assert_eq!(bench.run(4, FAILED), OPENED);
    for attempt in slow {
        assert_eq!(bench.end(attempt, 5, FAILED), (Verdict::Forgotten, None));
    }
}

#[test]
fn failures_around_an_answer_count() {
    let mut bench = Bench::answered(100);
    let first = bench.held(0);
    let slow = bench.start();
    let failures: Vec<_> = (1..10).map(|record| bench.held(record)).chain([first]).collect();
    bench.end(slow, 10, Evidence::Answered);
    bench.run(11, Evidence::Answered);
    bench.assert_all(&failures, Verdict::Own);
}

#[test]
fn a_closing_breaker_repeats_held_failures() {
    let mut bench = Bench::new(5);
    bench.half_open();
    while bench.phase() == Phase::HalfOpen {
        let attempts = bench.start_all();
        bench.end(attempts[0], 1, FAILED);
        bench.end(attempts[1], 2, Evidence::Answered);
        attempts[2..]
            .iter()
            .for_each(|attempt| bench.breaker.abandoned(*attempt));
    }
    assert_eq!(bench.phase(), Phase::Closed);
    assert_eq!(bench.breaker.repeat_at(true), Some(bench.now + SECOND));
}

#[test]
fn window_starts_empty_after_closing() {
    let mut bench = Bench::answered(30);
    let opened = (0..).find(|record| bench.run(*record, FAILED) == OPENED);
    assert_eq!(opened, Some(30));
    bench.advance_to_probe();
    for _ in 0..4 {
        bench.run(0, Evidence::Answered);
    }
    assert_eq!(bench.phase(), Phase::Closed);
    // With the calls from before, these would be more than half.
    for record in 0..20 {
        bench.run(record, Evidence::Answered);
    }
    for record in 0..20 {
        bench.held(record);
    }
}

#[test]
fn open_breaker_probes_with_growing_delays() {
    let mut bench = Bench::new(2);
    bench.open();
    for (record, seconds) in [(1, 1), (2, 2), (3, 4), (4, 8), (5, 8)] {
        assert_eq!(bench.next_probe(), seconds * SECOND);
        bench.now += seconds * SECOND;
        let probe = bench.start();
        assert_eq!(bench.breaker.start(BOTH, bench.now), Err(None), "one at a time");
        assert_eq!(bench.end(probe, record, FAILED), (Verdict::Forgotten, None));
    }
}

#[test]
fn probes_alternate_between_records() {
    let mut bench = Bench::new(1);
    let only = |forgotten| Offer {
        forgotten,
        others: !forgotten,
    };
    bench.open();
    for is_turn_of_forgotten in [true, false, true, false] {
        bench.advance_to_probe();
        // Drivers with the other kind only come later.
        let at = bench.breaker.start(only(!is_turn_of_forgotten), bench.now);
        assert_eq!(at, Err(Some(bench.now + PRECEDENCE)));
        let probe = bench
            .breaker
            .start(only(is_turn_of_forgotten), bench.now)
            .unwrap();
        assert_eq!(probe.order.forgotten_first, is_turn_of_forgotten);
        bench.end(probe, 1, FAILED);
    }
    bench.advance_to_probe();
    bench.now += PRECEDENCE;
    assert!(bench.breaker.start(only(false), bench.now).is_ok());
}

#[test]
fn retries_are_first_near_opening() {
    let mut bench = Bench::answered(20);
    let is_preferred = |bench: &mut Bench| {
        let admitted = bench.start();
        bench.breaker.abandoned(admitted);
        admitted.order.retries_first
    };
    for record in 0..17 {
        assert!(!is_preferred(&mut bench));
        bench.held(record);
    }
    bench.held(17);
    assert!(is_preferred(&mut bench), "18 of 38");
    // Retries that are not answered would open it.
    for (evidence, expected) in [(Evidence::None, false), (Evidence::Answered, true)] {
        let retry = bench.start();
        let record = (("docs".into(), 0, 18), true);
        bench.breaker.ended(retry, record, evidence, bench.now, 0.0);
        assert_eq!(is_preferred(&mut bench), expected, "18 of 38, then of 39");
    }
    bench.run(19, Evidence::Answered);
    assert!(!is_preferred(&mut bench), "18 of 40");
    bench.held(20);
    assert!(is_preferred(&mut bench), "19 of 41");
    bench.now += 10 * SECOND;
    assert!(!is_preferred(&mut bench), "the window is empty");
}

#[test]
fn permits_double_until_closed() {
    let mut bench = Bench::new(2);
    bench.half_open();
    for permits in [2, 4, 8] {
        let started = bench.start_all();
        assert_eq!(started.len(), permits);
        let forgotten_first = started.iter().filter(|admitted| admitted.order.forgotten_first);
        assert_eq!(forgotten_first.count(), permits / 2);
        started[1..]
            .iter()
            .for_each(|admitted| bench.breaker.abandoned(*admitted));
        let expected = (permits == 8).then_some(Phase::Closed);
        assert_eq!(
            bench.end(started[0], 1, Evidence::Answered),
            (Verdict::Own, expected)
        );
    }
    assert_eq!(bench.start_all().len(), 1_000);
}

#[test]
fn unanswered_round_reopens_the_breaker() {
    let mut bench = Bench::new(2);
    bench.half_open();
    let failure = bench.held(1);
    // The permits of this round are 4.
    assert_eq!(bench.run(2, Evidence::Answered), (Verdict::Own, None));
    assert_eq!(bench.decide(failure), Verdict::Own);
    let round: Vec<_> = (0..2).map(|record| bench.held(record)).collect();
    assert_eq!(bench.run(5, Evidence::None), (Verdict::Own, None));
    assert_eq!(bench.run(6, Evidence::NotCalled), (Verdict::Own, None));
    let straggler = bench.start();
    // It may be answered.
    let last = bench.held(7);
    bench.now += YOUNG;
    assert_eq!(bench.run(8, FAILED), OPENED);
    assert_eq!(bench.decide(last), Verdict::Forgotten);
    bench.assert_all(&round, Verdict::Forgotten);
    assert_eq!(bench.end(straggler, 9, FAILED), (Verdict::Forgotten, None));
    assert_eq!(bench.next_probe(), SECOND);
    bench.now += SECOND;
    bench.run(10, Evidence::Answered);
    assert_eq!(bench.start_all().len(), FIRST_PERMITS);
}

#[test]
fn probe_without_call_is_repeated() {
    let mut bench = Bench::new(1);
    bench.open();
    bench.advance_to_probe();
    assert_eq!(bench.run(1, Evidence::NotCalled), (Verdict::Own, None));
    bench.run(2, FAILED);
    assert_eq!(bench.next_probe(), 2 * SECOND);
}

#[test]
fn lone_probed_records_fail() {
    let mut bench = Bench::new(2);
    bench.open();
    let poison_after = bench.breaker.settings.poison_after;
    // The time from which each record has been alone with the other one.
    let mut since: [Option<Instant>; 2] = [None; 2];
    let mut failures = [0; 2];
    for record in (0..60).map(|probe| probe % 2) {
        bench.advance_to_probe();
        let is_own = since[record].is_some_and(|since| bench.now - since >= poison_after);
        let ended = bench.run(i64::try_from(record).unwrap(), FAILED);
        assert_eq!(
            ended.0,
            if is_own {
                Verdict::Poison
            } else {
                Verdict::Forgotten
            }
        );
        failures[record] += u32::from(is_own);
        if is_own || since[record].is_none() {
            since[record] = Some(bench.now);
        }
        // The second record is another one for the first.
        if since[1] == Some(bench.now) && failures == [0; 2] {
            since[0] = since[1];
        }
    }
    // A retry of a record is not another one, so that both go on to use up their attempts.
    assert!(failures.iter().all(|failures| *failures >= 3), "{failures:?}");
}

#[test]
fn lone_record_fails_after_half_open() {
    let mut bench = Bench::new(1);
    bench.open();
    let poison_after = bench.breaker.settings.poison_after;
    bench.advance_to_probe();
    assert_eq!(bench.run(1, FAILED).0, Verdict::Forgotten);
    bench.advance_to_probe();
    bench.run(2, Evidence::Answered);
    while bench.phase() == Phase::HalfOpen {
        bench.run(1, FAILED);
    }
    bench.now += poison_after;
    assert_eq!(bench.run(1, FAILED).0, Verdict::Poison);
}

#[test]
fn paused_time_does_not_count() {
    let mut bench = Bench::new(1);
    bench.open();
    let poison_after = bench.breaker.settings.poison_after;
    bench.advance_to_probe();
    assert_eq!(bench.run(1, FAILED).0, Verdict::Forgotten);
    let changes = bench.breaker.view().changes;
    bench.now += 10 * poison_after;
    bench.breaker.resumed(bench.now);
    assert_eq!(bench.run(1, FAILED).0, Verdict::Forgotten);
    // A record that blocks its followers may block them as long as before the pause.
    assert_ne!(bench.breaker.view().changes, changes);
    bench.now += poison_after;
    assert_eq!(bench.run(1, FAILED).0, Verdict::Poison);
}

#[test]
fn probed_records_survive_new_arrivals() {
    let mut bench = Bench::new(2);
    bench.open();
    for probe in 0..1_000 {
        bench.advance_to_probe();
        // Every fifth probe is that of a new record, and the others are those of the same one.
        let record = if probe % 5 == 0 { probe } else { -1 };
        assert_eq!(bench.run(record, FAILED), (Verdict::Forgotten, None));
    }
}

#[test]
fn held_record_repeats_with_growing_delays() {
    let mut bench = Bench::new(5);
    for seconds in [1, 2, 4, 8] {
        bench.held(1);
        assert_eq!(bench.breaker.repeat_at(true), Some(bench.now + seconds * SECOND));
        bench.now += seconds * SECOND;
    }
    assert_eq!(bench.run(1, FAILED), OPENED);
    // A driver with other calls waits longer.
    let mut bench = Bench::new(5);
    bench.held(1);
    assert_eq!(bench.breaker.repeat_at(false), Some(bench.now + 8 * SECOND));
}

#[test]
fn disabled_breaker_forgets_no_failure() {
    let mut bench = Bench::new(0);
    for record in 0..100 {
        assert_eq!(bench.run(record, FAILED), (Verdict::Own, None));
    }
}

/// What happens to a breaker.
#[derive(Clone, Copy, Debug)]
enum Op {
    Start { forgotten: bool, others: bool },
    End { which: usize, evidence: Evidence },
    Abandon { which: usize },
    Pass { millis: u64 },
}

fn ops() -> impl Strategy<Value = Op> {
    let evidence = prop_oneof![
        6 => Just(FAILED),
        4 => Just(Evidence::Answered),
        1 => Just(Evidence::None),
        1 => Just(Evidence::NotCalled),
    ];
    prop_oneof![
        8 => (any::<bool>(), any::<bool>()).prop_map(|(forgotten, others)| Op::Start { forgotten, others }),
        8 => (any::<usize>(), evidence).prop_map(|(which, evidence)| Op::End { which, evidence }),
        1 => any::<usize>().prop_map(|which| Op::Abandon { which }),
        4 => (0..3_000_u64).prop_map(|millis| Op::Pass { millis }),
    ]
}

/// What the rules say about a history of attempts.
#[derive(Default)]
struct History {
    started: u64,
    answered: u64,
    /// How many attempts had started at each opening.
    openings: Vec<u64>,
    /// Failures that are held, and how many attempts had started when they ended.
    held: Vec<(Provisional, u64)>,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    /// Whatever happens when: permits are kept, no failure counts without a later answer, and an endpoint that answers closes the
    /// breaker.
    #[test]
    fn random_histories_keep_the_rules(
        has_rate in any::<bool>(),
        failures in 1..6_usize,
        ops in proptest::collection::vec(ops(), 0..200),
    ) {
        let mut bench = Bench::with_rate(failures, HALF.filter(|_| has_rate));
        let mut history = History::default();
        let mut running: Vec<Admitted> = Vec::new();
        for op in ops {
            match op {
                Op::Pass { millis } => bench.now += Duration::from_millis(millis),
                Op::Start { forgotten, others } => {
                    let Ok(admitted) = bench.breaker.start(Offer { forgotten, others }, bench.now) else {
                        continue;
                    };
                    history.started += 1;
                    prop_assert_eq!(admitted.number, history.started);
                    running.push(admitted);
                    let opened_after = history.openings.last().copied().unwrap_or(0);
                    let since_opening = running.iter().filter(|other| other.number > opened_after).count();
                    match bench.phase() {
                        Phase::Closed => {}
                        Phase::Open => prop_assert_eq!(since_opening, 1),
                        Phase::HalfOpen => prop_assert!(since_opening < 16, "{}", since_opening),
                    }
                }
                Op::Abandon { which } if !running.is_empty() => {
                    bench.breaker.abandoned(running.remove(which % running.len()));
                }
                Op::End { which, evidence } if !running.is_empty() => {
                    let admitted = running.remove(which % running.len());
                    let is_straggler = history.openings.last().is_some_and(|after| admitted.number <= *after);
                    let before = bench.phase();
                    let (verdict, change) = bench.end(admitted, i64::try_from(which % 3).unwrap(), evidence);
                    match verdict {
                        _ if evidence != FAILED => prop_assert_eq!(verdict, Verdict::Own),
                        Verdict::Held(failure) => {
                            prop_assert!(!is_straggler && before != Phase::Open);
                            history.held.push((failure, history.started));
                        }
                        Verdict::Forgotten => {
                            prop_assert!(is_straggler || before == Phase::Open || change == Some(Phase::Open));
                        }
                        Verdict::Own | Verdict::Poison => prop_assert!(verdict == Verdict::Poison && before == Phase::Open),
                    }
                    if evidence == Evidence::Answered && !is_straggler {
                        history.answered = history.answered.max(admitted.number);
                    }
                    if change == Some(Phase::Open) {
                        history.openings.push(history.started);
                        prop_assert!(evidence != Evidence::Answered && before != Phase::Open);
                    }
                }
                Op::Abandon { .. } | Op::End { .. } => {}
            }
            let view = bench.breaker.view();
            let mut ends: Vec<u64> = history.held.iter().map(|(_, after)| *after).collect();
            ends.sort_unstable();
            let is_outage = ends.get(failures - 1).is_some_and(|after| history.answered > *after);
            for (failure, after) in std::mem::take(&mut history.held) {
                let is_answered_later = history.answered > after;
                let has_opened = history.openings.last().is_some_and(|opened| *opened >= after);
                match view.decide(failure) {
                    Verdict::Held(_) => {
                        prop_assert!(!is_answered_later && !has_opened);
                        history.held.push((failure, after));
                    }
                    Verdict::Own => prop_assert!(is_answered_later && !has_opened),
                    Verdict::Forgotten => prop_assert!(is_outage || has_opened),
                    Verdict::Poison => prop_assert!(false, "a held failure"),
                }
            }
        }
        // The endpoint works from now on.
        for admitted in running {
            bench.breaker.abandoned(admitted);
        }
        for _ in 0..5 {
            bench.now += 10 * SECOND;
            bench.run(0, Evidence::Answered);
        }
        prop_assert_eq!(bench.phase(), Phase::Closed);
        prop_assert!(history.held.iter().all(|(failure, _)| bench.decide(*failure) != Verdict::Held(*failure)));
    }
}
