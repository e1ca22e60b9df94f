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

mod keeper;
mod renewal;
mod replaceable;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

pub use keeper::{CredentialObserver, CredentialSource};
pub(crate) use renewal::Renewal;
pub use replaceable::Replaceable;

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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::sync_channel;
    use std::time::Duration;

    use redeliver_testkit::eventually;

    use super::*;
    use crate::client::{ClientSettings, KafkaSettings};
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
        let mut settings = settings.clone();
        // No broker listens there: each request fails, as with one that refuses the credentials.
        "127.0.0.1:1".clone_into(&mut settings.brokers);
        let mut follower = Follower::new(&settings, Waker::default()).unwrap();
        plan.set(Ok(contents("second")));
        eventually("it renews", DEADLINE, || {
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
