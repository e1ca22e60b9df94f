use super::*;

const SECOND: Duration = Duration::from_secs(1);
const FAILED: Evidence = Evidence::Failed { shared_call: None };

/// A breaker at a time that only the test moves.
struct Bench {
    breaker: Breaker,
    now: Instant,
}

impl Bench {
    fn new(failures: usize) -> Self {
        let settings = BreakerSettings {
            failures,
            rate: None,
            open_max: 8 * SECOND,
            poison_after: 60 * SECOND,
        };
        Self {
            breaker: Breaker::new(settings),
            now: Instant::now(),
        }
    }

    fn start(&mut self) -> Admitted {
        self.breaker.start(false, self.now).unwrap()
    }

    fn end(&mut self, admitted: Admitted, record: i64, evidence: Evidence) -> (Verdict, Option<Change>) {
        let record = ("docs".into(), 0, record);
        self.breaker.ended(admitted, record, evidence, self.now, 0.0)
    }

    fn run(&mut self, record: i64, evidence: Evidence) -> (Verdict, Option<Change>) {
        let admitted = self.start();
        self.end(admitted, record, evidence)
    }

    fn held(&mut self, record: i64) -> Provisional {
        match self.run(record, FAILED) {
            (Verdict::Held(failure), None) => failure,
            other => panic!("{other:?}"),
        }
    }

    /// Opens the breaker.
    fn open(&mut self) {
        let failures = self.breaker.settings.failures;
        for record in 1..failures {
            self.held(i64::try_from(record).unwrap());
        }
        assert_eq!(self.run(0, FAILED), (Verdict::Forgotten, Some(Change::Opened)));
    }

    /// The time until the next probe.
    fn next_probe(&mut self) -> Duration {
        self.breaker.start(false, self.now).unwrap_err().unwrap() - self.now
    }

    fn advance_to_probe(&mut self) {
        let delay = self.next_probe();
        self.now += delay;
    }
}

#[test]
fn an_answer_to_a_later_attempt_makes_a_failure_the_records_own() {
    let mut bench = Bench::new(5);
    let failure = bench.held(1);
    assert_eq!(bench.breaker.view().decide(failure), Verdict::Held(failure));
    assert_eq!(bench.run(2, Evidence::Answered), (Verdict::Own, None));
    assert_eq!(bench.breaker.view().decide(failure), Verdict::Own);
}

#[test]
fn an_answer_to_an_attempt_that_started_before_the_failure_decides_nothing() {
    let mut bench = Bench::new(5);
    let slow = bench.start();
    let failure = bench.held(1);
    assert_eq!(bench.end(slow, 2, Evidence::Answered), (Verdict::Own, None));
    assert_eq!(bench.breaker.view().decide(failure), Verdict::Held(failure));
}

#[test]
fn consecutive_failures_open_the_breaker_and_none_of_them_counts() {
    let mut bench = Bench::new(3);
    let running = [bench.start(), bench.start()];
    let held = [bench.held(1), bench.held(2)];
    assert_eq!(bench.run(3, FAILED), (Verdict::Forgotten, Some(Change::Opened)));
    for failure in held {
        assert_eq!(bench.breaker.view().decide(failure), Verdict::Forgotten);
    }
    // Attempts that were in progress neither count nor close the breaker.
    assert_eq!(bench.end(running[0], 4, FAILED), (Verdict::Forgotten, None));
    assert_eq!(bench.end(running[1], 5, Evidence::Answered), (Verdict::Own, None));
    assert!(bench.breaker.view().is_open);
}

#[test]
fn the_failures_of_a_call_for_several_records_count_once() {
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
    let opened = (Verdict::Forgotten, Some(Change::Opened));
    assert_eq!(bench.run(-1, of_call(3)), opened);
}

#[test]
fn an_answer_between_failures_keeps_the_breaker_closed() {
    let mut bench = Bench::new(3);
    for round in 0..10 {
        bench.held(2 * round);
        bench.held(2 * round + 1);
        bench.run(-1, Evidence::Answered);
    }
    // A request for a delay is no answer.
    bench.held(1);
    bench.held(2);
    assert_eq!(bench.run(3, Evidence::None), (Verdict::Own, None));
    assert_eq!(bench.run(4, FAILED), (Verdict::Forgotten, Some(Change::Opened)));
}

#[test]
fn the_breaker_opens_if_too_many_of_the_calls_of_a_window_fail_although_others_are_answered() {
    let mut bench = Bench::new(5);
    let rate = FailureRate {
        share: 0.5,
        window: 10 * SECOND,
        calls: 20,
    };
    bench.breaker = Breaker::new(BreakerSettings {
        rate: Some(rate),
        ..bench.breaker.settings.clone()
    });
    // A third of the calls fails.
    for record in 0..100 {
        bench.now += SECOND / 10;
        let evidence = if record % 3 == 0 {
            FAILED
        } else {
            Evidence::Answered
        };
        assert_eq!(bench.run(record, evidence).1, None);
    }
    // From now on, two thirds do. The breaker opens when half of the calls of the last 10 s have failed.
    let opened = (100..200).find(|record| {
        bench.now += SECOND / 10;
        let evidence = if record % 3 == 0 {
            Evidence::Answered
        } else {
            FAILED
        };
        bench.run(*record, evidence).1 == Some(Change::Opened)
    });
    assert!((140..160).contains(&opened.unwrap()), "{opened:?}");
    // The calls from before do not open it again.
    bench.advance_to_probe();
    bench.run(200, Evidence::Answered);
    assert!(matches!(bench.run(201, FAILED), (Verdict::Held(_), None)));
}

#[test]
fn a_postponed_probe_makes_room_for_another_one_at_that_time() {
    let mut bench = Bench::new(1);
    bench.open();
    bench.advance_to_probe();
    let probe = bench.start();
    bench.breaker.postponed(probe, bench.now + 3 * SECOND);
    assert_eq!(bench.next_probe(), 3 * SECOND);
    // Another rate allows it at once.
    bench.breaker.rate_changed();
    assert!(bench.breaker.start(false, bench.now).is_ok());
}

#[test]
fn an_open_breaker_admits_one_probe_at_a_time_after_growing_delays() {
    let mut bench = Bench::new(2);
    bench.open();
    for (record, seconds) in [(1, 1), (2, 2), (3, 4), (4, 8), (5, 8)] {
        assert_eq!(bench.next_probe(), seconds * SECOND);
        bench.now += seconds * SECOND;
        let probe = bench.start();
        assert_eq!(bench.breaker.start(false, bench.now), Err(None), "one at a time");
        assert_eq!(bench.end(probe, record, FAILED), (Verdict::Forgotten, None));
    }
    bench.now += 8 * SECOND;
    let after = 31 * SECOND;
    assert_eq!(
        bench.run(6, Evidence::Answered),
        (Verdict::Own, Some(Change::Closed { after }))
    );
    bench.start();
    bench.start();
}

#[test]
fn drivers_with_other_records_probe_first() {
    let mut bench = Bench::new(1);
    bench.open();
    bench.advance_to_probe();
    let at = bench.breaker.start(true, bench.now).unwrap_err().unwrap();
    assert!(at > bench.now);
    bench.now = at;
    assert!(bench.breaker.start(true, bench.now).is_ok());
}

#[test]
fn an_attempt_that_started_before_the_breaker_opened_and_fails_after_it_has_closed_does_not_count() {
    let mut bench = Bench::new(2);
    let slow = [bench.start(), bench.start()];
    bench.open();
    bench.advance_to_probe();
    let (_, change) = bench.run(1, Evidence::Answered);
    assert!(matches!(change, Some(Change::Closed { .. })));
    for (record, attempt) in (2..).zip(slow) {
        assert_eq!(bench.end(attempt, record, FAILED), (Verdict::Forgotten, None));
    }
    assert!(!bench.breaker.view().is_open);
}

#[test]
fn a_probe_that_does_not_call_the_endpoint_makes_room_for_another_one_at_once() {
    let mut bench = Bench::new(1);
    bench.open();
    bench.advance_to_probe();
    assert_eq!(bench.run(1, Evidence::NotCalled), (Verdict::Own, None));
    bench.run(2, FAILED);
    assert_eq!(bench.next_probe(), 2 * SECOND);
}

#[test]
fn a_probe_without_a_result_makes_room_for_another_one() {
    let mut bench = Bench::new(1);
    bench.open();
    bench.now += SECOND;
    let probe = bench.start();
    bench.breaker.abandoned(probe);
    bench.start();
}

#[test]
fn records_that_are_probed_again_and_again_fail_on_their_own_once_there_is_no_other_record() {
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
fn the_time_of_a_pause_does_not_count_as_time_in_which_a_record_failed() {
    let mut bench = Bench::new(1);
    bench.open();
    let poison_after = bench.breaker.settings.poison_after;
    bench.advance_to_probe();
    assert_eq!(bench.run(1, FAILED).0, Verdict::Forgotten);
    let changes = bench.breaker.view().changes();
    bench.now += 10 * poison_after;
    bench.breaker.resumed(bench.now);
    assert_eq!(bench.run(1, FAILED).0, Verdict::Forgotten);
    // A record that blocks its followers may block them as long as before the pause.
    assert_ne!(bench.breaker.view().changes(), changes);
    bench.now += poison_after;
    assert_eq!(bench.run(1, FAILED).0, Verdict::Poison);
}

#[test]
fn while_other_records_arrive_records_that_are_probed_again_do_not_fail() {
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
fn an_outage_during_which_each_probe_is_another_record_burns_no_attempts() {
    let mut bench = Bench::new(2);
    bench.open();
    for record in 0..1_000 {
        bench.advance_to_probe();
        assert_eq!(bench.run(record, FAILED), (Verdict::Forgotten, None));
    }
}

#[test]
fn a_driver_with_nothing_else_repeats_a_held_record_after_growing_delays() {
    let mut bench = Bench::new(5);
    for seconds in [1, 2, 4, 8] {
        bench.held(1);
        assert_eq!(bench.breaker.repeat_at(true), Some(bench.now + seconds * SECOND));
        bench.now += seconds * SECOND;
    }
    assert_eq!(bench.run(1, FAILED), (Verdict::Forgotten, Some(Change::Opened)));
}

#[test]
fn a_driver_with_other_calls_repeats_a_held_record_after_the_longest_delay() {
    let mut bench = Bench::new(5);
    bench.held(1);
    assert_eq!(bench.breaker.repeat_at(false), Some(bench.now + 8 * SECOND));
}

#[test]
fn without_a_limit_of_failures_every_failure_is_the_records_own() {
    let mut bench = Bench::new(0);
    for record in 0..100 {
        assert_eq!(bench.run(record, FAILED), (Verdict::Own, None));
    }
}
