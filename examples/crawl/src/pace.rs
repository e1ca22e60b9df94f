//! When one host may be asked: one request at a time, and a pause after each. Pure.
//!
//! A job whose host is not free is not simply told to come again: all that were told so would come back at
//! once, and all but one in vain. Each gets the *promise* of an instant of its own, a pause after the promise
//! before it. The promise is the record's time lock, so it travels with the record: nothing is kept here for
//! each waiting job, and a restart forgets none.

use std::time::Duration;

use redeliver_core::Timestamp;

/// The state of one host.
#[derive(Clone, Debug)]
pub struct Pace {
    delay: Duration,
    /// When the last request was over.
    ended: Option<Timestamp>,
    /// The host wants to be left alone until then.
    wish: Option<Timestamp>,
    /// The last instant that was promised to a job.
    promised_until: Option<Timestamp>,
    /// The jobs that stay: one that has its turn, and those behind it.
    line: u32,
}

/// What a job is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Stay; the turn comes within the patience.
    Stay,
    /// Leave, and come back at this instant.
    ComeBack(Timestamp),
}

impl Pace {
    /// A host that nothing is known of.
    #[must_use]
    pub fn new(delay: Duration) -> Self {
        Self {
            delay,
            ended: None,
            wish: None,
            promised_until: None,
            line: 0,
        }
    }

    /// A job asks for a turn. `has_promise`: it comes back at the instant that was promised to it. It stays in
    /// line if its turn comes within `patience`.
    pub fn ask(&mut self, has_promise: bool, now: Timestamp, patience: Duration) -> Answer {
        let here = self.turn_in_line(now);
        let turn = match self.promised_until {
            // Those that were sent away go before those that come later.
            Some(promised) if !has_promise => here.max(promised.after(self.delay)),
            _ => here,
        };
        if turn.since(now) <= patience {
            self.line += 1;
            return Answer::Stay;
        }
        Answer::ComeBack(self.promise(now))
    }

    /// A job leaves the line.
    pub fn leave(&mut self) {
        self.line = self.line.saturating_sub(1);
    }

    /// The request of the job that had its turn is over. The pause counts from its end and not from its
    /// beginning: then the host, too, sees a whole pause between two requests, however long they travelled.
    pub fn rest(&mut self, now: Timestamp) {
        // The clock rounds down, so the request ended within the millisecond that follows.
        self.ended = Some(now.after(Duration::from_millis(1)));
    }

    /// The host wants to be left alone until then.
    pub fn rest_until(&mut self, until: Timestamp) {
        self.wish = self.wish.max(Some(until));
    }

    /// The pause that the host asks for, from the last request on.
    pub fn set_delay(&mut self, delay: Duration) {
        self.delay = delay;
    }

    /// No request before this; `None` when the host was never asked.
    #[must_use]
    pub fn rests_until(&self) -> Option<Timestamp> {
        self.ended.map(|ended| ended.after(self.delay)).max(self.wish)
    }

    /// Whether there is nothing to be remembered of the host.
    #[must_use]
    pub fn is_idle(&self, now: Timestamp) -> bool {
        self.line == 0 && self.rests_until() <= Some(now) && self.promised_until <= Some(now)
    }

    /// The instant at which a job that does not stand in line is to come back.
    pub fn promise(&mut self, now: Timestamp) -> Timestamp {
        let here = self.turn_in_line(now);
        let promise = match self.promised_until {
            Some(promised) => here.max(promised.after(self.delay)),
            None => here,
        };
        self.promised_until = Some(promise);
        promise
    }

    /// When whoever stands in line next would have its turn.
    fn turn_in_line(&self, now: Timestamp) -> Timestamp {
        let free = self.rests_until().map_or(now, |until| until.max(now));
        free.after(self.delay * self.line)
    }
}

#[cfg(test)]
mod tests {
    use redeliver_core::Clock as _;
    use redeliver_core::time::ManualClock;

    use super::*;

    const START: Timestamp = Timestamp::from_millis(1_800_000_000_000);
    const DELAY: Duration = Duration::from_millis(500);
    const PATIENCE: Duration = Duration::from_secs(1);

    fn in_ms(millis: u64) -> Timestamp {
        START.after(Duration::from_millis(millis))
    }

    #[test]
    fn a_host_that_is_free_is_asked_at_once_and_then_rests() {
        let clock = ManualClock::new(START);
        let mut pace = Pace::new(DELAY);
        assert_eq!(pace.ask(false, clock.now(), Duration::ZERO), Answer::Stay);
        assert_eq!(pace.rests_until(), None);
        clock.advance(Duration::from_millis(40));
        pace.rest(clock.now());
        pace.leave();
        assert_eq!(pace.rests_until(), Some(in_ms(541)));
        clock.advance(Duration::from_millis(500));
        assert_eq!(
            pace.ask(false, clock.now(), Duration::ZERO),
            Answer::ComeBack(in_ms(541))
        );
        clock.advance(Duration::from_millis(1));
        assert_eq!(pace.ask(true, clock.now(), Duration::ZERO), Answer::Stay);
    }

    #[test]
    fn those_that_come_together_are_told_to_come_back_one_by_one() {
        let mut pace = Pace::new(DELAY);
        let answers: Vec<Answer> = (0..6).map(|_| pace.ask(false, START, PATIENCE)).collect();
        assert_eq!(
            answers,
            [
                Answer::Stay,
                Answer::Stay,
                Answer::Stay,
                Answer::ComeBack(in_ms(1_500)),
                Answer::ComeBack(in_ms(2_000)),
                Answer::ComeBack(in_ms(2_500)),
            ]
        );
    }

    #[test]
    fn who_comes_later_stands_behind_the_promises_and_who_was_promised_does_not() {
        let mut pace = Pace::new(DELAY);
        for _ in 0..6 {
            pace.ask(false, START, PATIENCE);
        }
        for _ in 0..3 {
            pace.leave();
        }
        assert_eq!(
            pace.ask(false, in_ms(1_400), PATIENCE),
            Answer::ComeBack(in_ms(3_000))
        );
        assert_eq!(pace.ask(true, in_ms(1_500), PATIENCE), Answer::Stay);
    }

    #[test]
    fn a_host_that_asks_for_rest_gets_it_and_those_in_line_come_back_later() {
        let mut pace = Pace::new(DELAY);
        assert_eq!(pace.ask(false, START, PATIENCE), Answer::Stay);
        assert_eq!(pace.ask(false, START, PATIENCE), Answer::Stay);
        pace.rest(in_ms(10));
        pace.rest_until(in_ms(9_000));
        pace.leave();
        pace.leave();
        assert_eq!(pace.rests_until(), Some(in_ms(9_000)));
        assert_eq!(pace.promise(in_ms(10)), in_ms(9_000));
        assert_eq!(
            pace.ask(false, in_ms(20), PATIENCE),
            Answer::ComeBack(in_ms(9_500))
        );
        assert!(!pace.is_idle(in_ms(9_499)));
        assert!(pace.is_idle(in_ms(9_500)));
    }

    #[test]
    fn a_longer_pause_holds_already_for_the_request_that_told_of_it() {
        let mut pace = Pace::new(DELAY);
        pace.rest(START);
        pace.set_delay(Duration::from_secs(3));
        assert_eq!(pace.rests_until(), Some(in_ms(3_001)));
    }

    #[test]
    fn a_shorter_wish_does_not_end_a_longer_rest() {
        let mut pace = Pace::new(DELAY);
        pace.rest_until(in_ms(9_000));
        pace.rest_until(in_ms(100));
        assert_eq!(pace.rests_until(), Some(in_ms(9_000)));
    }
}
