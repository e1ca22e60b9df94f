//! One process under one name, over all its lives.

use std::fmt;
use std::time::{Duration, Instant};

use redeliver_testkit::eventually;

use super::CHANGE;
use crate::support::{Pipe, START, Service};

/// A named process that is started again after each death. What became of it is counted, and all it printed in
/// all its lives is shown when the test fails.
pub(crate) struct Member<'a> {
    pipe: &'a Pipe,
    service: &'static str,
    instance: &'static str,
    /// The last one lives.
    lives: Vec<Service>,
    kills_at_work: u32,
    kills: u32,
    ends: u32,
    freezes: u32,
    /// From when it was dead until it was ready again.
    until_ready: Vec<Duration>,
    dead_since: Option<Instant>,
    began: Instant,
}

impl<'a> Member<'a> {
    /// A process that has just been started.
    pub(crate) fn spawn(pipe: &'a Pipe, service: &'static str, instance: &'static str) -> Self {
        Self {
            pipe,
            service,
            instance,
            lives: vec![pipe.spawn(service, instance, &[])],
            kills_at_work: 0,
            kills: 0,
            ends: 0,
            freezes: 0,
            until_ready: Vec::new(),
            dead_since: None,
            began: Instant::now(),
        }
    }

    /// A process that is ready.
    pub(crate) fn start(pipe: &'a Pipe, service: &'static str, instance: &'static str) -> Self {
        let mut member = Self::spawn(pipe, service, instance);
        member.until_ready();
        member
    }

    /// Its service.
    pub(crate) fn service(&self) -> &'static str {
        self.service
    }

    /// Kills it without warning; it must be running.
    #[track_caller]
    pub(crate) fn kill_9(&mut self) {
        let at_work = self.output().contains("lane is ready");
        let life = self.life();
        assert!(life.process.is_running(), "there is nothing to kill");
        life.process.kill_9();
        self.dead_since = Some(Instant::now());
        self.kills += 1;
        self.kills_at_work += u32::from(at_work);
        self.note(if at_work {
            "killed at work"
        } else {
            "killed while starting"
        });
    }

    /// Asks it to end, which it must do without an error.
    #[track_caller]
    pub(crate) fn end_in_order(&mut self) {
        let code = self.life().end();
        assert_eq!(code, Some(0), "{}", self.output());
        self.dead_since = Some(Instant::now());
        self.ends += 1;
        self.note("ended");
    }

    /// Asks it to end and waits for nothing.
    #[track_caller]
    pub(crate) fn ask_to_end(&mut self) {
        self.life().process.terminate();
        self.note("asked to end");
    }

    /// Starts it again under its name, on what it left behind.
    #[track_caller]
    pub(crate) fn start_again(&mut self) {
        assert!(!self.is_running(), "it is running already");
        let life = self.pipe.spawn(self.service, self.instance, &[]);
        self.lives.push(life);
    }

    /// Freezes it.
    #[track_caller]
    pub(crate) fn freeze(&mut self) {
        self.life().process.stop();
        self.freezes += 1;
        self.note("frozen");
    }

    /// Thaws it.
    #[track_caller]
    pub(crate) fn thaw(&mut self) {
        self.life().process.cont();
        self.note("thawed");
    }

    /// Waits until it is ready.
    #[track_caller]
    pub(crate) fn until_ready(&mut self) {
        self.life().until_ready();
        if let Some(since) = self.dead_since.take() {
            self.until_ready.push(since.elapsed());
        }
        self.note("ready");
    }

    /// Waits until it says that it is not ready.
    #[track_caller]
    pub(crate) fn until_not_ready(&mut self) {
        let what = format!("{} {} is not ready", self.service, self.instance);
        let reason = eventually(&what, CHANGE, || match self.life().get("/readyz") {
            (503, body) => Ok(body),
            (status, body) => Err(format!("{status} {body}")),
        });
        self.note(&format!("not ready: {reason}"));
    }

    /// Waits until it owns so many partitions.
    #[track_caller]
    pub(crate) fn until_owning(&mut self, count: u64) {
        let what = format!("{} {} owns {count} partitions", self.service, self.instance);
        eventually(&what, CHANGE, || match self.owned() {
            owned if owned == count => Ok(()),
            owned => Err(format!("{owned} of {count}")),
        });
        self.note(&format!("owns {count} partitions"));
    }

    /// How many partitions it owns now.
    #[track_caller]
    pub(crate) fn owned(&mut self) -> u64 {
        let (status, metrics) = self.life().get("/metrics");
        assert_eq!(status, 200);
        let values = metrics.lines().filter_map(|line| {
            let (name, value) = line.split_once(' ')?;
            name.contains("lane_partitions{")
                .then(|| value.parse::<u64>().ok())?
        });
        values.sum()
    }

    /// Whether it is running, frozen or not.
    pub(crate) fn is_running(&self) -> bool {
        self.lives.last().is_some_and(|life| life.process.is_running())
    }

    /// Whether it has been running from the beginning, without a restart.
    pub(crate) fn is_in_its_first_life(&self) -> bool {
        self.lives.len() == 1 && self.is_running()
    }

    /// The exit code of one that has ended or is about to.
    #[track_caller]
    pub(crate) fn code(&mut self) -> Option<i32> {
        self.dead_since = Some(Instant::now());
        self.life().process.wait(START).code()
    }

    /// What it has printed in its present life.
    pub(crate) fn output(&self) -> String {
        self.lives
            .last()
            .map(|life| life.process.output())
            .unwrap_or_default()
    }

    /// How often it was killed.
    pub(crate) fn kills(&self) -> u32 {
        self.kills
    }

    /// How often it was killed after it had been ready.
    pub(crate) fn kills_at_work(&self) -> u32 {
        self.kills_at_work
    }

    /// How often it ended in order.
    pub(crate) fn ends(&self) -> u32 {
        self.ends
    }

    /// How often it was frozen.
    pub(crate) fn freezes(&self) -> u32 {
        self.freezes
    }

    /// Half of the times it was ready again in less.
    pub(crate) fn median_until_ready(&self) -> Duration {
        let mut times = self.until_ready.clone();
        times.sort_unstable();
        times.get(times.len() / 2).copied().unwrap_or_default()
    }

    fn life(&mut self) -> &mut Service {
        self.lives.last_mut().expect("it was started")
    }

    /// The timeline, which is shown when the test fails.
    fn note(&self, what: &str) {
        let Self {
            service, instance, ..
        } = self;
        println!(
            "{:7.2} {service} {instance}: {}",
            self.began.elapsed().as_secs_f64(),
            what.trim_end()
        );
    }
}

impl fmt::Display for Member<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            service,
            instance,
            kills,
            kills_at_work,
            ends,
            freezes,
            ..
        } = self;
        write!(
            f,
            "{service} {instance}: {kills} kills, {kills_at_work} of them at work, {ends} ends, {freezes} freezes; \
             ready again after {:?} at the median, {:?} at most",
            self.median_until_ready(),
            self.until_ready.iter().max().copied().unwrap_or_default(),
        )
    }
}
