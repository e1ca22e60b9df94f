//! The thread that reads the files again, and lets the owners of clients replace them.

use std::convert::Infallible;
use std::io;
use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use redeliver_core::wait::{Backoff, LogThrottle};

use super::{Credentials, Handle, SecretProperties, Shared, State};
use crate::client::KafkaSettings;
use crate::probe::{Probed, probe};

/// How long a connection with new contents may take.
const PROBE: Duration = Duration::from_secs(10);
/// Delays between connections that fail.
const MIN_DELAY: Duration = Duration::from_secs(2);
const MAX_DELAY: Duration = Duration::from_secs(60);
/// How long one owner may take before the next one begins.
const MAX_RENEWAL: Duration = Duration::from_secs(60);
/// How often the thread checks whether the current owner has finished.
const ROUND: Duration = Duration::from_millis(20);

/// The files with which clients authenticate. All calls come from one thread.
pub trait CredentialSource: Send + 'static {
    /// Reads the files, and returns the properties that result from the last contents that are complete. Called every
    /// [`CredentialSource::INTERVAL`]. Blocks.
    ///
    /// # Errors
    /// Why these contents cannot be used, without secrets.
    fn check(&mut self) -> Result<SecretProperties, String>;

    /// The interval of checks.
    const INTERVAL: Duration;
}

/// Is told about changes, for metrics. Called on the thread that reads the files.
pub trait CredentialObserver: Send + 'static {
    /// Whether changed files cannot be used.
    fn stale(&self, _is_stale: bool) {}
    /// Clients are created with these properties from now on. Also called once at the start.
    fn using(&self, _properties: &SecretProperties) {}
    /// The number of owners that still have clients with previous contents.
    fn outdated(&self, _owners: usize) {}
}

/// No observer.
impl CredentialObserver for () {}

impl Credentials {
    /// Starts the thread. `initial` is what the files contain now. `settings` are those of the process; their properties
    /// must not contain those of the source. The pauses between two owners add up to about `spread`.
    ///
    /// # Errors
    /// If the operating system cannot create a thread.
    pub fn start(
        source: impl CredentialSource,
        initial: SecretProperties,
        settings: KafkaSettings,
        spread: Duration,
        observer: impl CredentialObserver,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared(Mutex::new(State {
            properties: initial,
            ..State::default()
        })));
        let (stop, stopped) = sync_channel::<()>(0);
        let keeper = Keeper {
            source,
            observer,
            settings,
            spread,
            shared: shared.clone(),
            stopped,
            refused: None,
            backoff: Backoff::new(MIN_DELAY, MAX_DELAY),
            next_probe: None,
            log_throttle: LogThrottle::default(),
            next_check: Instant::now(),
            outdated: 0,
        };
        thread::Builder::new()
            .name("kafka-credentials".to_owned())
            .spawn(move || keeper.run())?;
        Ok(Self(Arc::new(Handle { shared, _stop: stop })))
    }
}

/// The thread's part.
struct Keeper<S, O> {
    source: S,
    observer: O,
    settings: KafkaSettings,
    spread: Duration,
    shared: Arc<Shared>,
    stopped: Receiver<()>,
    /// The last contents with which no connection was possible, and why.
    refused: Option<(SecretProperties, String)>,
    backoff: Backoff,
    /// No connection is tried with them before this time.
    next_probe: Option<Instant>,
    log_throttle: LogThrottle,
    /// When the files are read again.
    next_check: Instant,
    /// The number of outdated owners that was last reported.
    outdated: usize,
}

impl<S: CredentialSource, O: CredentialObserver> Keeper<S, O> {
    fn run(mut self) {
        self.observer.stale(false);
        self.observer.outdated(0);
        let initial = self.shared.lock().properties.clone();
        self.observer.using(&initial);
        // Breaks when the process stops.
        let ControlFlow::Break(()) = self.replace_outdated();
    }

    /// Replaces outdated clients until the process stops: after a change, and again where that has failed.
    fn replace_outdated(&mut self) -> ControlFlow<(), Infallible> {
        // The version of the last round, and when owners that it has left behind are asked again.
        let mut last_round = (self.shared.version(), Instant::now());
        let mut backoff = Backoff::new(MIN_DELAY, MAX_DELAY);
        loop {
            self.pause(S::INTERVAL)?;
            if self.outdated == 0 {
                continue;
            }
            let version = self.shared.version();
            let spread = if version > last_round.0 {
                backoff.reset();
                self.spread
            } else if Instant::now() >= last_round.1 {
                Duration::ZERO
            } else {
                continue;
            };
            self.replace_all(spread)?;
            last_round = (version, Instant::now() + backoff.next_delay());
        }
    }

    /// Reads the files meanwhile. Breaks when the process stops.
    fn pause(&mut self, time: Duration) -> ControlFlow<()> {
        let end = Instant::now() + time;
        loop {
            let until = end.min(self.next_check);
            match self
                .stopped
                .recv_timeout(until.saturating_duration_since(Instant::now()))
            {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return ControlFlow::Break(()),
            }
            if Instant::now() >= self.next_check {
                self.check();
                self.report();
                self.next_check = Instant::now() + S::INTERVAL;
            }
            if Instant::now() >= end {
                return ControlFlow::Continue(());
            }
        }
    }

    /// Reports how many owners have clients with previous contents.
    fn report(&mut self) {
        let outdated = self.shared.outdated().len();
        if outdated == self.outdated {
            return;
        }
        self.outdated = outdated;
        self.observer.outdated(outdated);
        if outdated == 0 {
            tracing::info!("Kafka credentials replaced in all clients");
        }
    }

    /// Reads the files, and uses what they contain if it has changed and works.
    fn check(&mut self) {
        let used = self.shared.lock().properties.clone();
        let tried = match self.source.check() {
            Ok(properties) if properties == used => Ok(None),
            Ok(properties) => self.try_out(properties).map(Some),
            Err(problem) => Err(problem),
        };
        match tried {
            Ok(changed) => {
                self.refused = None;
                self.log_throttle.reset();
                self.observer.stale(false);
                if let Some(properties) = changed {
                    self.install(properties);
                }
            }
            Err(problem) => {
                self.observer.stale(true);
                if self.log_throttle.should_log() {
                    tracing::error!(
                        problem,
                        "changed Kafka credentials are unusable; clients keep the previous ones"
                    );
                }
            }
        }
    }

    /// Connects with these properties, unless that has failed a moment ago.
    fn try_out(&mut self, properties: SecretProperties) -> Result<SecretProperties, String> {
        match &self.refused {
            Some((refused, problem)) if *refused == properties => {
                if self.next_probe.is_some_and(|next| Instant::now() < next) {
                    return Err(problem.clone());
                }
            }
            _ => {
                self.backoff.reset();
                self.log_throttle.reset();
            }
        }
        match self.try_connecting(&properties) {
            Ok(()) => Ok(properties),
            Err(problem) => {
                self.next_probe = Some(Instant::now() + self.backoff.next_delay());
                self.refused = Some((properties, problem.clone()));
                Err(problem)
            }
        }
    }

    fn try_connecting(&self, properties: &SecretProperties) -> Result<(), String> {
        let mut client = self.settings.client();
        for (name, value) in properties.iter() {
            client.set(name, value);
        }
        match probe(&client, PROBE) {
            Ok(Probed::Connected) => Ok(()),
            Ok(Probed::Refused(reason)) => Err(format!("kafka refuses them: {reason}")),
            Ok(Probed::Unanswered(Some(reason))) => {
                Err(format!("cannot connect to kafka with them: {reason}"))
            }
            Ok(Probed::Unanswered(None)) => Err("kafka does not answer".to_owned()),
            Err(error) => Err(format!("no Kafka client can be created with them: {error}")),
        }
    }

    fn install(&mut self, properties: SecretProperties) {
        self.observer.using(&properties);
        tracing::info!("Kafka credentials changed; replacing clients one by one");
        let mut state = self.shared.lock();
        state.properties = properties;
        state.version += 1;
    }

    /// Lets all outdated owners replace their clients, one after the other. The contents may change again meanwhile: the
    /// owners that follow then get the latest ones, and the previous ones are outdated again.
    fn replace_all(&mut self, spread: Duration) -> ControlFlow<()> {
        let mut owners = self.shared.outdated();
        let longest_pause = spread.mul_f64(2.0) / u32::try_from(owners.len() + 1).unwrap_or(u32::MAX);
        // Otherwise, the lanes of a pipeline would do it in the same order in all processes.
        fastrand::shuffle(&mut owners);
        for owner in owners {
            self.pause(longest_pause.mul_f64(fastrand::f64()))?;
            let version = self.shared.version();
            if let Some(owner) = owner.upgrade().filter(|owner| !owner.has(version)) {
                owner.replace(version);
            }
            let began = Instant::now();
            // An owner that is gone has no clients.
            while let Some(owner) = owner.upgrade().filter(|owner| owner.is_replacing()) {
                if began.elapsed() >= MAX_RENEWAL {
                    tracing::warn!(
                        owner = owner.name(),
                        "Kafka clients not replaced yet; continuing with other owners"
                    );
                    break;
                }
                drop(owner);
                self.pause(ROUND)?;
            }
            self.report();
        }
        ControlFlow::Continue(())
    }
}
