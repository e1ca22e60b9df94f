//! The gauges that are too expensive to update with every change.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::Clock;
use redeliver_core::error_chain::error_chain;
use redeliver_core::wait::LogThrottle;
use redeliver_store::Replica;
use tokio_util::sync::CancellationToken;

use crate::group_states::{GroupState, GroupStates};
use crate::index::{self, Pool, ReadError};
use crate::metrics::Metrics;
use crate::shared::SharedState;

/// Time between two updates.
const INTERVAL: Duration = Duration::from_secs(10);

/// What updates the gauges.
pub(crate) struct Gauges {
    pub(crate) pool: Pool,
    pub(crate) metrics: Metrics,
    pub(crate) shared: Arc<SharedState>,
    /// The directory of the index.
    pub(crate) directory: PathBuf,
    pub(crate) group_states: Replica<GroupStates>,
    pub(crate) clock: Arc<dyn Clock>,
}

impl Gauges {
    /// Updates the gauges until `stop` is cancelled. A query that fails is repeated with the next update: if the index is damaged,
    /// the writer rebuilds it.
    pub(crate) async fn run(self, stop: CancellationToken) -> Result<(), Infallible> {
        let mut log_throttle = LogThrottle::default();
        loop {
            let counted = tokio::select! {
                counted = self.count_open() => counted,
                () = stop.cancelled() => return Ok(()),
            };
            if let Err(error) = counted
                && log_throttle.should_log()
            {
                tracing::warn!(error = %error_chain(&error), "cannot count open dead letters; retrying");
            }
            self.metrics.set_size(index::size(&self.directory));
            tokio::select! {
                () = tokio::time::sleep(INTERVAL) => {}
                () = stop.cancelled() => return Ok(()),
            }
        }
    }

    async fn count_open(&self) -> Result<(), ReadError> {
        let (build, before) = (self.shared.build(), self.shared.completeness());
        let (states, now) = (self.group_states.state(), self.clock.now());
        let (open, groups) = self
            .pool
            .internal(move |connection| {
                let open = index::open_by_topic(connection)?;
                let groups = states
                    .as_ref()
                    .map(|states| index::open_groups(connection, states, now));
                Ok((open, groups.transpose()?))
            })
            .await?;
        let completeness = before.and(&self.shared.completeness());
        let is_current = completeness.as_of.is_some() && self.shared.build() == build;
        if !is_current || !completeness.are_states_known() {
            // The last values stay: alerts must not resolve because the index is rebuilt or the ledger cannot be read.
            return Ok(());
        }
        if let Some(groups) = groups {
            for state in GroupState::ALL {
                let count = groups.get(&state).copied().unwrap_or(0);
                self.metrics.set_groups(state, count);
            }
        }
        for (topic, status) in &*self.shared.topics() {
            let open = open.get(topic);
            let count = open.map_or(0, |open| open.count);
            if completeness.is_being_read(topic) {
                // The index has lost a topic that was created again, and does not have all of the new one.
                self.metrics.raise_open(topic, count);
                continue;
            }
            self.metrics.set_open(topic, count);
            let removal = open.and_then(|open| status.removes_at(open.oldest));
            self.metrics.set_removal(topic, removal);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;
    use redeliver_core::{Record, Timestamp};
    use redeliver_testkit::record_at;

    use super::*;
    use crate::completeness::{Completeness, Reason};
    use crate::index::{Change, Index, Writer};
    use crate::ledger;
    use crate::letter::Letter;
    use crate::shared::TopicStatus;

    fn letter(offset: i64) -> Letter {
        Letter::read(&Record {
            timestamp: Some(Timestamp::from_millis(1)),
            ..record_at("t-dlq", 0, offset)
        })
    }

    fn caught_up() -> Completeness {
        Completeness {
            as_of: Some(Timestamp::from_millis(1)),
            ..Completeness::default()
        }
    }

    /// Gauges of an index with the topic `t-dlq`.
    struct Fixture {
        writer: Writer,
        gauges: Gauges,
        shared: Arc<SharedState>,
        registry: Registry,
        _directory: tempfile::TempDir,
    }

    impl Fixture {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let Index { writer, pool, .. } = Index::open(directory.path(), &[]).unwrap();
            let mut registry = Registry::default();
            let shared = Arc::new(SharedState::new());
            shared.topics().insert("t-dlq".to_owned(), TopicStatus::default());
            let (group_states, _) = Replica::fixed(Some(GroupStates::default()));
            let gauges = Gauges {
                pool,
                metrics: Metrics::register(&mut registry),
                shared: shared.clone(),
                directory: directory.path().to_owned(),
                group_states,
                clock: Arc::new(redeliver_core::SystemClock),
            };
            Self {
                writer,
                gauges,
                shared,
                registry,
                _directory: directory,
            }
        }
    }

    /// The exported number of open dead letters.
    fn open(registry: &Registry) -> Option<String> {
        let mut text = String::new();
        encode(&mut text, registry).unwrap();
        let mut lines = text.lines();
        lines
            .find_map(|line| line.strip_prefix("dlq_open{topic=\"t-dlq\"} "))
            .map(str::to_owned)
    }

    #[tokio::test]
    async fn unknown_count_keeps_last_value() {
        let Fixture {
            mut writer,
            gauges,
            shared,
            registry,
            _directory,
        } = Fixture::new();
        let open = || open(&registry);
        let mut put = |offset| {
            let letters = [Change::Letters(vec![letter(offset)])];
            writer.write(&letters, Timestamp::from_millis(1)).unwrap();
        };
        put(1);
        // Not everything was read yet.
        gauges.count_open().await.unwrap();
        assert_eq!(open(), None);
        shared.set_completeness(caught_up());
        gauges.count_open().await.unwrap();
        assert_eq!(open().as_deref(), Some("1"));
        put(2);
        let without_ledger = Completeness {
            missing: [((ledger::TOPIC.into(), None), Reason::NotRead)].into(),
            ..caught_up()
        };
        for unknown in [Completeness::default(), without_ledger] {
            shared.set_completeness(unknown);
            gauges.count_open().await.unwrap();
            assert_eq!(open().as_deref(), Some("1"));
        }
        shared.set_completeness(caught_up());
        gauges.count_open().await.unwrap();
        assert_eq!(open().as_deref(), Some("2"));
    }

    #[tokio::test]
    async fn count_stays_while_topic_is_reread() {
        let Fixture {
            mut writer,
            gauges,
            shared,
            registry,
            _directory,
        } = Fixture::new();
        let open = || open(&registry);
        let time = Timestamp::from_millis(1);
        let of_partition = |partition, reason| Completeness {
            missing: [(("t-dlq".into(), partition), reason)].into(),
            ..caught_up()
        };
        let letters = Change::Letters((0..3).map(letter).collect());
        writer.write(&[letters], time).unwrap();
        shared.set_completeness(caught_up());
        gauges.count_open().await.unwrap();
        assert_eq!(open().as_deref(), Some("3"));
        // The topic was created again.
        let topic: Arc<str> = "t-dlq".into();
        writer.write(&[Change::Forget { topic }], time).unwrap();
        while writer.remove_slice().unwrap() {}
        for being_read in [
            of_partition(None, Reason::NotRemoved),
            of_partition(Some(7), Reason::NotRead),
        ] {
            shared.set_completeness(being_read);
            gauges.count_open().await.unwrap();
            assert_eq!(open().as_deref(), Some("3"));
        }
        // What cannot be read does not come back soon.
        shared.set_completeness(of_partition(Some(7), Reason::NoLeader));
        gauges.count_open().await.unwrap();
        assert_eq!(open().as_deref(), Some("0"));
        // What is read for the first time shows at once.
        writer.write(&[Change::Letters(vec![letter(1)])], time).unwrap();
        shared.set_completeness(of_partition(Some(7), Reason::NotRead));
        gauges.count_open().await.unwrap();
        assert_eq!(open().as_deref(), Some("1"));
    }
}
