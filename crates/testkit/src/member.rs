//! One of our services under one name, over all its lives: killed, frozen, ended, and started again on what it
//! left behind. What became of it is counted, since a run that killed nothing proves nothing; and all it
//! printed in all its lives is shown when the test fails.

use std::fmt;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::eventually;
use crate::process::Process;

/// How long a process may take to be ready, and a condition of it to come true, on a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(60);

/// Starts a life with these variables in its environment.
type Spawn<'a> = Box<dyn Fn(&[(&str, &str)]) -> Process + Send + 'a>;

/// A named process that is started again after each death.
pub struct ServiceProcess<'a> {
    name: String,
    spawn: Spawn<'a>,
    /// The last one lives.
    lives: Vec<Process>,
    kills: u32,
    kills_at_work: u32,
    crashes: u32,
    ends: u32,
    freezes: u32,
    /// From when it was dead until it was ready again.
    until_ready: Vec<Duration>,
    dead_since: Option<Instant>,
    began: Instant,
}

impl<'a> ServiceProcess<'a> {
    /// A process that has just been started.
    pub fn spawn(name: impl Into<String>, spawn: impl Fn(&[(&str, &str)]) -> Process + Send + 'a) -> Self {
        Self {
            name: name.into(),
            lives: vec![spawn(&[])],
            spawn: Box::new(spawn),
            kills: 0,
            kills_at_work: 0,
            crashes: 0,
            ends: 0,
            freezes: 0,
            until_ready: Vec::new(),
            dead_since: None,
            began: Instant::now(),
        }
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Kills it without warning; it must be running.
    #[track_caller]
    pub fn kill_9(&mut self) {
        let at_work = self.was_ready();
        self.life().kill_9();
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
    pub fn end_in_order(&mut self) {
        self.life().terminate();
        let status = self.life().wait(PATIENCE);
        assert_eq!(status.code(), Some(0), "{}", self.output());
        self.dead_since = Some(Instant::now());
        self.ends += 1;
        self.note("ended");
    }

    /// Waits until it has died by itself, of a signal, as [`ServiceProcess::start_again_with`] asked it to.
    #[track_caller]
    pub fn until_crashed(&mut self) {
        let at_work = self.was_ready();
        let status = self.life().wait(PATIENCE);
        assert_eq!(
            status.code(),
            None,
            "{} ended with {status}:\n{}",
            self.name,
            self.output()
        );
        self.dead_since = Some(Instant::now());
        self.crashes += 1;
        self.note(if at_work {
            "crashed at work"
        } else {
            "crashed while starting"
        });
    }

    /// Starts it again under its name, on what it left behind.
    #[track_caller]
    pub fn start_again(&mut self) {
        self.start_again_with(&[]);
    }

    /// As [`ServiceProcess::start_again`], with variables in the environment of this life.
    #[track_caller]
    pub fn start_again_with(&mut self, environment: &[(&str, &str)]) {
        assert!(!self.is_running(), "{} is running already", self.name);
        let life = (self.spawn)(environment);
        self.lives.push(life);
    }

    /// Freezes it.
    #[track_caller]
    pub fn freeze(&mut self) {
        self.life().stop();
        self.freezes += 1;
        self.note("frozen");
    }

    /// Thaws it.
    #[track_caller]
    pub fn thaw(&mut self) {
        self.life().cont();
        self.note("thawed");
    }

    /// Where its admin port is, once it has said so.
    #[track_caller]
    pub fn admin(&mut self) -> SocketAddr {
        let output = self.life().wait_for_output(" admin=127.0.0.1:", PATIENCE);
        let address = output.split(" admin=").nth(1).unwrap_or_default();
        let address = address.split_whitespace().next().unwrap_or_default();
        address
            .parse()
            .unwrap_or_else(|_| panic!("no address: `{address}`"))
    }

    /// A page of its admin port: status and body.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn get(&mut self, path: &str) -> std::io::Result<(u16, String)> {
        get(self.admin(), path)
    }

    /// Waits until all its parts are ready.
    #[track_caller]
    pub fn until_ready(&mut self) {
        let what = format!("{} is ready", self.name);
        let address = self.admin();
        eventually(&what, PATIENCE, || match get(address, "/readyz") {
            Ok((200, _)) => Ok(()),
            Ok((status, body)) => Err(format!("{status} {body}")),
            Err(error) => Err(error.to_string()),
        });
        if let Some(since) = self.dead_since.take() {
            self.until_ready.push(since.elapsed());
        }
        self.note("ready");
    }

    /// Waits until it says that it is not ready, with these words.
    #[track_caller]
    pub fn until_not_ready(&mut self, words: &str) {
        let what = format!("{} is not ready because of {words:?}", self.name);
        let address = self.admin();
        let reason = eventually(&what, PATIENCE, || match get(address, "/readyz") {
            Ok((503, body)) if body.contains(words) => Ok(body),
            Ok((status, body)) => Err(format!("{status} {body}")),
            Err(error) => Err(error.to_string()),
        });
        self.note(&format!("not ready: {reason}"));
    }

    /// Waits until it owns so many partitions.
    #[track_caller]
    pub fn until_owning(&mut self, count: u64) {
        let what = format!("{} owns {count} partitions", self.name);
        eventually(&what, PATIENCE, || match self.owned() {
            owned if owned == count => Ok(()),
            owned => Err(format!("{owned} of {count}")),
        });
        self.note(&format!("owns {count} partitions"));
    }

    /// How many partitions it owns now.
    #[track_caller]
    pub fn owned(&mut self) -> u64 {
        self.metric("redeliver_lane_partitions")
    }

    /// The sum of a metric's values over all its labels.
    #[track_caller]
    pub fn metric(&mut self, name: &str) -> u64 {
        let (status, metrics) = self.get("/metrics").unwrap();
        assert_eq!(status, 200);
        let values = metrics.lines().filter_map(|line| {
            let (found, value) = line.rsplit_once(' ')?;
            let found = found.split('{').next()?;
            (found == name).then(|| value.parse::<u64>().ok())?
        });
        values.sum()
    }

    /// Whether it is running, frozen or not.
    pub fn is_running(&self) -> bool {
        self.lives.last().is_some_and(Process::is_running)
    }

    /// Whether it has been running from the beginning, without a restart.
    pub fn is_in_its_first_life(&self) -> bool {
        self.lives.len() == 1 && self.is_running()
    }

    /// What it has printed in its present life.
    pub fn output(&self) -> String {
        self.lives.last().map(Process::output).unwrap_or_default()
    }

    /// How often it was killed.
    pub fn kills(&self) -> u32 {
        self.kills
    }

    /// How often it was killed after it had been ready.
    pub fn kills_at_work(&self) -> u32 {
        self.kills_at_work
    }

    /// How often it died by itself.
    pub fn crashes(&self) -> u32 {
        self.crashes
    }

    /// How often it ended in order.
    pub fn ends(&self) -> u32 {
        self.ends
    }

    /// How often it was frozen.
    pub fn freezes(&self) -> u32 {
        self.freezes
    }

    /// Half of the times it was ready again in less.
    pub fn median_until_ready(&self) -> Duration {
        let mut times = self.until_ready.clone();
        times.sort_unstable();
        times.get(times.len() / 2).copied().unwrap_or_default()
    }

    /// The process of its present life, to be measured or waited for.
    ///
    /// # Panics
    /// Never: there is one from the beginning.
    pub fn life(&mut self) -> &mut Process {
        self.lives.last_mut().expect("it was started")
    }

    fn was_ready(&self) -> bool {
        self.output().contains("lane is ready")
    }

    /// The timeline, which is shown when the test fails.
    fn note(&self, what: &str) {
        println!(
            "{:7.2} {}: {}",
            self.began.elapsed().as_secs_f64(),
            self.name,
            what.trim_end()
        );
    }
}

impl fmt::Display for ServiceProcess<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            kills,
            kills_at_work,
            crashes,
            ends,
            freezes,
            ..
        } = self;
        write!(
            f,
            "{name}: {kills} kills, {kills_at_work} of them at work, {crashes} crashes, {ends} ends, {freezes} \
             freezes; ready again after {:?} at the median, {:?} at most",
            self.median_until_ready(),
            self.until_ready.iter().max().copied().unwrap_or_default(),
        )
    }
}

/// One GET over HTTP/1.1: status and body.
///
/// # Errors
/// When there is no answer, or it is not HTTP.
pub fn get(address: SocketAddr, path: &str) -> std::io::Result<(u16, String)> {
    let patience = Duration::from_secs(5);
    let mut stream = TcpStream::connect_timeout(&address, patience)?;
    stream.set_read_timeout(Some(patience))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned());
    status
        .zip(body)
        .ok_or_else(|| std::io::Error::other(format!("no HTTP answer: `{answer}`")))
}
