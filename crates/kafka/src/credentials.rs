//! Replaces the clients of a process when the files with which they authenticate have changed: certificates, keys, CAs and
//! passwords.
//!
//! librdkafka reads certificate files once, when a client is created, and uses the same certificate for all later
//! connections. So a client that lives longer than its certificate can never connect again. One thread per process reads the
//! files again and again. When they have changed, it
//!
//! 1. connects to Kafka with a client that uses the new contents; while that fails, clients keep the previous ones,
//! 2. lets the owners of clients replace them, one after the other, with random pauses, so that at most one lane of the
//!    process reads nothing, and the processes of an installation do not all do it at the same time. Owners that fail are
//!    asked again. A change in the meantime is used at once, and begins the round again.
//!
//! Clients get the contents of the files and not their paths
//! ([`ClientSettings`](crate::client::ClientSettings)). So a client that is created for another reason, while the files are
//! incomplete or wrong, gets the last contents that worked.
//!
//! An owner whose loop uses the clients has a `Renewal`. Clients that several threads share are in a [`Replaceable`]. Clients
//! that live for one request only need nothing.

mod renewal;
mod replaceable;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::io;
use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use redeliver_core::wait::{Backoff, LogThrottle};

use crate::client::KafkaSettings;
use crate::probe::{Probed, probe};
pub(crate) use renewal::Renewal;
pub use replaceable::Replaceable;

/// How long a connection with new contents may take.
const PROBE: Duration = Duration::from_secs(10);
/// Delays between connections that fail.
const MIN_DELAY: Duration = Duration::from_secs(2);
const MAX_DELAY: Duration = Duration::from_secs(60);
/// How long one owner may take before the next one begins.
const MAX_RENEWAL: Duration = Duration::from_secs(60);
/// How often the thread checks whether the current owner has finished.
const ROUND: Duration = Duration::from_millis(20);

/// Properties of clients with secret values. `Debug` shows only the names.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct SecretProperties(BTreeMap<String, String>);

impl SecretProperties {
    /// Adds or replaces a property.
    pub fn set(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.0.insert(name.into(), value.into());
    }

    /// The value of a property.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

impl fmt::Debug for SecretProperties {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

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

/// The credentials of a process that come from files. The thread ends when the last handle is dropped.
#[derive(Clone, Debug)]
pub struct Credentials(Arc<Handle>);

#[derive(Debug)]
struct Handle {
    shared: Arc<Shared>,
    /// Ends the thread when it is dropped.
    _stop: SyncSender<()>,
}

#[derive(Default)]
struct Shared(Mutex<State>);

#[derive(Default)]
struct State {
    properties: SecretProperties,
    /// The number of changes.
    version: u64,
    owners: Vec<Weak<dyn Owner>>,
}

/// Something that has clients.
trait Owner: Send + Sync {
    fn name(&self) -> &str;

    /// Replaces the clients, or asks for it, so that they have at least this version.
    fn replace(&self, version: u64);

    /// Whether it still does what [`Owner::replace`] has asked for.
    fn is_replacing(&self) -> bool;

    /// Whether the clients have this version or a later one, and work.
    fn has(&self, version: u64) -> bool;
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shared")
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of changes.
    fn version(&self) -> u64 {
        self.lock().version
    }

    /// The owners that do not have the current version yet.
    fn outdated(&self) -> Vec<Weak<dyn Owner>> {
        let mut state = self.lock();
        let version = state.version;
        state.owners.retain(|owner| owner.strong_count() > 0);
        let owners = state.owners.iter();
        let outdated = owners.filter(|owner| owner.upgrade().is_some_and(|owner| !owner.has(version)));
        outdated.cloned().collect()
    }
}

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

    /// The current properties.
    pub(crate) fn properties(&self) -> SecretProperties {
        self.0.shared.lock().properties.clone()
    }

    /// Clients that are created after this call have at least this version.
    fn version(&self) -> u64 {
        self.0.shared.version()
    }

    fn add(&self, owner: Weak<dyn Owner>) {
        self.0.shared.lock().owners.push(owner);
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
            tracing::info!("all kafka clients use the changed credentials");
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
                        "cannot use the credentials for kafka that the files contain; clients keep what they have"
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
            Err(error) => Err(format!("no kafka client can be created with them: {error}")),
        }
    }

    fn install(&mut self, properties: SecretProperties) {
        self.observer.using(&properties);
        tracing::info!("credentials for kafka have changed; replacing clients one after the other");
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
                        "has not replaced its kafka clients yet; continuing with others"
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use redeliver_testkit::eventually;

    use super::*;
    use crate::client::ClientSettings;
    use crate::embedded::EmbeddedBroker;
    use crate::follow::Follower;
    use crate::processor::Waker;

    const DEADLINE: Duration = Duration::from_secs(60);

    /// What the files contain, and what was observed.
    #[derive(Clone, Default)]
    struct Plan(Arc<Mutex<Planned>>);

    #[derive(Default)]
    struct Planned {
        contents: Option<Result<SecretProperties, String>>,
        is_stale: bool,
        outdated: Vec<usize>,
    }

    impl Plan {
        fn lock(&self) -> MutexGuard<'_, Planned> {
            self.0.lock().unwrap()
        }

        fn set(&self, contents: Result<SecretProperties, String>) {
            self.lock().contents = Some(contents);
        }

        fn until(&self, what: &str, condition: impl Fn(&Planned) -> bool) {
            eventually(what, DEADLINE, || {
                let planned = self.lock();
                let state = format!("{} {:?}", planned.is_stale, planned.outdated);
                if condition(&planned) { Ok(()) } else { Err(state) }
            });
        }
    }

    impl CredentialSource for Plan {
        const INTERVAL: Duration = Duration::from_millis(5);

        fn check(&mut self) -> Result<SecretProperties, String> {
            self.lock().contents.clone().unwrap()
        }
    }

    impl CredentialObserver for Plan {
        fn stale(&self, is_stale: bool) {
            self.lock().is_stale = is_stale;
        }

        fn outdated(&self, owners: usize) {
            self.lock().outdated.push(owners);
        }
    }

    /// A property that shows which contents a client uses.
    const PROPERTY: &str = "client.software.name";

    fn contents(value: &str) -> SecretProperties {
        let mut properties = SecretProperties::default();
        properties.set(PROPERTY, value);
        properties
    }

    struct Process {
        _broker: EmbeddedBroker,
        plan: Plan,
        settings: KafkaSettings,
    }

    fn process() -> Process {
        let broker = EmbeddedBroker::start(&[]).unwrap();
        let mut settings = KafkaSettings::new(broker.brokers(), "test");
        let plan = Plan::default();
        plan.set(Ok(contents("first")));
        let credentials = Credentials::start(
            plan.clone(),
            contents("first"),
            settings.clone(),
            Duration::ZERO,
            plan.clone(),
        );
        settings.credentials = Some(credentials.unwrap());
        Process {
            _broker: broker,
            plan,
            settings,
        }
    }

    fn until_used(client: &ClientSettings, expected: &str) {
        eventually("the contents are used", DEADLINE, || {
            let is_used = used(client).as_deref() == Some(expected);
            if is_used { Ok(()) } else { Err("not yet") }
        });
    }

    fn used(client: &ClientSettings) -> Option<String> {
        client.current().get(PROPERTY).map(str::to_owned)
    }

    #[test]
    fn owners_renew_one_by_one() {
        let Process { plan, settings, .. } = &process();
        // Its configuration is older than the change, as that of a lane.
        let client = settings.client();
        let renewals = [1, 2, 3].map(|number| Renewal::new(settings, format!("owner {number}")));
        let dropped = Renewal::new(settings, "dropped");
        let (created, is_created) = sync_channel(9);
        let shared = Replaceable::new(settings, "shared", {
            let client = client.clone();
            move || {
                let _ = created.send(used(&client));
                Ok::<_, String>(used(&client))
            }
        });
        let shared = shared.unwrap();
        assert_eq!(used(&client).as_deref(), Some("first"));
        assert_eq!(is_created.recv().unwrap().as_deref(), Some("first"));
        drop(dropped);

        plan.set(Ok(contents("second")));
        let mut replaced = BTreeSet::new();
        while replaced.len() < renewals.len() {
            let due = eventually("some owner renews", DEADLINE, || {
                let due = renewals.iter().position(Renewal::is_due);
                due.ok_or("none")
            });
            assert_eq!(renewals.iter().filter(|renewal| renewal.is_due()).count(), 1);
            assert!(replaced.insert(due));
            renewals[due].begin();
            assert_eq!(used(&client).as_deref(), Some("second"));
            // While the new clients are not known to work, no other owner renews.
            assert!(!renewals.iter().any(Renewal::is_due));
            renewals[due].end();
        }
        plan.until("all are replaced", |planned| planned.outdated.ends_with(&[1, 0]));
        assert_eq!(plan.lock().outdated, [0, 4, 3, 2, 1, 0]);
        assert_eq!(is_created.recv().unwrap().as_deref(), Some("second"));
        assert_eq!(shared.get().as_deref(), Some("second"));

        // Owners that come later begin with the current contents.
        let late = Renewal::new(settings, "late");
        assert!(!late.is_due());
        // An owner that replaces its clients by itself is left out.
        plan.set(Ok(contents("third")));
        until_used(&client, "third");
        for renewal in renewals.iter().chain([&late]) {
            renewal.begin();
            renewal.end();
        }
        plan.until("all are replaced", |planned| planned.outdated.ends_with(&[0]));
        assert!(!renewals.iter().any(Renewal::is_due));
    }

    #[test]
    fn follower_renews_while_asking() {
        let Process { plan, settings, .. } = &process();
        let mut follower = Follower::new(settings, Waker::default()).unwrap();
        plan.set(Ok(contents("second")));
        eventually("it renews", DEADLINE, || {
            // The embedded broker answers with an error, as one that refuses the credentials.
            let asked = follower.topic_ids(&["topic"]);
            assert!(asked.is_err(), "{asked:?}");
            let outdated = plan.lock().outdated.clone();
            if outdated.ends_with(&[1, 0]) {
                Ok(())
            } else {
                Err(format!("{outdated:?}"))
            }
        });
    }

    #[test]
    fn unusable_contents_are_not_used() {
        let Process { plan, settings, .. } = &process();
        let renewal = Renewal::new(settings, "owner");
        let client = settings.client();
        let mut unknown = contents("second");
        unknown.set("sasl.pasword", "hunter2");
        let mut unreachable = contents("second");
        unreachable.set("security.protocol", "SSL");
        for bad in [Ok(unknown), Ok(unreachable), Err("expired".to_owned())] {
            plan.set(bad);
            plan.until("they are reported", |planned| planned.is_stale);
            assert_eq!(used(&client).as_deref(), Some("first"));
            assert!(!renewal.is_due());
            plan.set(Ok(contents("first")));
            plan.until("the problem is gone", |planned| !planned.is_stale);
        }
        plan.set(Ok(contents("second")));
        eventually("it renews", DEADLINE, || {
            if renewal.is_due() { Ok(()) } else { Err("not yet") }
        });
        assert_eq!(used(&client).as_deref(), Some("second"));
    }

    #[test]
    fn failed_creation_is_repeated() {
        let Process { plan, settings, .. } = &process();
        let client = settings.client();
        let (created, is_created) = sync_channel(9);
        let attempts = AtomicUsize::new(0);
        let shared = Replaceable::new(settings, "shared", move || {
            if attempts.fetch_add(1, Ordering::Relaxed) == 1 {
                return Err("no thread".to_owned());
            }
            let _ = created.send(used(&client));
            Ok(used(&client))
        });
        let shared = shared.unwrap();
        assert_eq!(is_created.recv().unwrap().as_deref(), Some("first"));

        plan.set(Ok(contents("second")));
        let second = is_created.recv_timeout(DEADLINE);
        assert_eq!(second.unwrap().as_deref(), Some("second"));
        plan.until("all are replaced", |planned| planned.outdated.ends_with(&[1, 0]));
        assert_eq!(shared.get().as_deref(), Some("second"));
    }

    #[test]
    fn failed_renewal_is_repeated() {
        let Process { plan, settings, .. } = &process();
        let renewal = Renewal::new(settings, "owner");
        plan.set(Ok(contents("second")));
        let is_due = || if renewal.is_due() { Ok(()) } else { Err("not yet") };
        eventually("it renews", DEADLINE, is_due);
        renewal.begin();
        renewal.failed();
        assert!(!renewal.is_due());
        assert_eq!(plan.lock().outdated.last(), Some(&1));
        eventually("it renews again", DEADLINE, is_due);
        renewal.begin();
        renewal.end();
        plan.until("all are replaced", |planned| planned.outdated.ends_with(&[1, 0]));
    }

    #[test]
    fn change_during_creation_is_used() {
        let Process { plan, settings, .. } = &process();
        let client = settings.client();
        let changing = plan.clone();
        let (created, is_created) = sync_channel(9);
        let shared = Replaceable::new(settings, "shared", move || {
            // What a client that is created here uses.
            let contents_used = used(&client);
            changing.set(Ok(contents("second")));
            until_used(&client, "second");
            let _ = created.send(contents_used.clone());
            Ok::<_, String>(contents_used)
        });
        let shared = shared.unwrap();
        assert_eq!(is_created.recv().unwrap().as_deref(), Some("first"));
        let second = is_created.recv_timeout(DEADLINE);
        assert_eq!(second.unwrap().as_deref(), Some("second"));
        plan.until("all are replaced", |planned| planned.outdated.ends_with(&[0]));
        assert_eq!(shared.get().as_deref(), Some("second"));
    }

    #[test]
    fn change_during_renewals_is_used() {
        let Process { plan, settings, .. } = &process();
        let client = settings.client();
        // Each may take a minute, which is longer than the test waits for all.
        let renewals = [1, 2, 3].map(|number| Renewal::new(settings, format!("owner {number}")));
        plan.set(Ok(contents("second")));
        let due = || {
            let due = renewals.iter().position(Renewal::is_due);
            due.ok_or("none")
        };
        let first = eventually("some owner renews", DEADLINE, due);
        renewals[first].begin();
        plan.set(Ok(contents("third")));
        until_used(&client, "third");
        // It has the second contents only, so its turn comes again.
        renewals[first].end();
        let mut turns = Vec::new();
        while turns.len() < renewals.len() {
            let due = eventually("some owner renews", DEADLINE, due);
            turns.push(due);
            renewals[due].begin();
            renewals[due].end();
        }
        assert_eq!(BTreeSet::from_iter(&turns).len(), renewals.len());
        assert_eq!(turns.last(), Some(&first));
        plan.until("all are replaced", |planned| planned.outdated.ends_with(&[1, 0]));
    }

    #[test]
    fn values_are_not_shown() {
        let shown = format!("{:?}", contents("hunter2"));
        assert_eq!(shown, r#"{"client.software.name"}"#);
    }
}
