//! The controls of the topics of a tier, and how fast they may be released. No IO.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::token_bucket::Bucket;
use redeliver_core::{HumanDuration, Timestamp};
use redeliver_service::control::snapshot::TierState;
use redeliver_service::control::{Control, Snapshot};

/// When to look again for the number of partitions of a topic.
const UNKNOWN_PARTITIONS: Duration = Duration::from_millis(100);

/// The controls of the topics of a lane, which are numbered from 0.
pub(crate) struct TierControls {
    tier: HumanDuration,
    control: Control,
    /// The pipelines, by the number of their topic.
    pipelines: Vec<Arc<str>>,
    /// What the states were computed from.
    seen: Option<Arc<Snapshot>>,
    states: Vec<TierState>,
    buckets: Buckets,
}

/// The tokens of the partitions of topics with a rate. They belong to the lane, not to an assignment: a partition that is read again has no
/// more of them than before.
#[derive(Default)]
struct Buckets(HashMap<(usize, i32), Bucket>);

impl TierControls {
    /// `pipelines`: by the number of their topic.
    pub(crate) fn new(tier: HumanDuration, control: Control, pipelines: Vec<Arc<str>>) -> Self {
        Self {
            tier,
            control,
            states: vec![TierState::default(); pipelines.len()],
            pipelines,
            seen: None,
            buckets: Buckets::default(),
        }
    }

    /// Takes note of what applies now. Returns whether something has changed.
    pub(crate) fn refresh(&mut self) -> bool {
        let now = self.control.snapshot();
        if self.seen.as_ref().is_some_and(|seen| Arc::ptr_eq(seen, &now)) {
            return false;
        }
        let states = self
            .pipelines
            .iter()
            .map(|pipeline| now.tier(pipeline, self.tier));
        self.states = states.collect();
        self.seen = Some(now);
        for (number, state) in self.states.iter().enumerate() {
            if state.rate.is_none() {
                self.buckets.0.retain(|(topic, _), _| *topic != number);
            }
        }
        true
    }

    /// The state of a topic.
    pub(crate) fn state(&self, topic: usize) -> &TierState {
        &self.states[topic]
    }

    /// Takes note that a record of this partition is released. `partitions`: of the topic, which have equal parts of its rate; `None` if
    /// their number is not known.
    ///
    /// # Errors
    /// When to ask again, if the rate allows none now.
    pub(crate) fn take(
        &mut self,
        topic: usize,
        partition: i32,
        partitions: impl FnOnce() -> Option<u32>,
        now: Timestamp,
    ) -> Result<(), Timestamp> {
        let Some(rate) = self.states[topic].rate else {
            return Ok(());
        };
        let Some(partitions) = partitions() else {
            return Err(now.after(UNKNOWN_PARTITIONS));
        };
        let part = rate / f64::from(partitions.max(1));
        let bucket = self.buckets.0.entry((topic, partition));
        let bucket = bucket.or_insert_with(|| Bucket::new(part));
        bucket.set_rate(part);
        bucket.take(now).map(drop)
    }

    /// A record of a partition was not released after all.
    pub(crate) fn give_back(&mut self, topic: usize, partition: i32) {
        if let Some(bucket) = self.buckets.0.get_mut(&(topic, partition)) {
            bucket.give_back();
        }
    }
}

#[cfg(test)]
mod tests {
    use redeliver_service::control::value::{Desired, RateLimit, Run, TierControl, Value};

    use super::*;

    const TIER: HumanDuration = HumanDuration::from_secs(30);

    fn wanted(name: &str, tier: TierControl) -> Snapshot {
        let mut snapshot = Snapshot::default();
        let value = Value {
            revision: 1,
            changed_at: None,
            changed_by: String::new(),
            reason: String::new(),
            change_id: bytes::Bytes::new(),
            desired: Desired::Tier(tier),
        };
        snapshot.table.insert(name.parse().unwrap(), value);
        snapshot
    }

    #[test]
    fn controls_follow_the_topic() {
        let (control, sender) = Control::fixed(Snapshot::default());
        let mut controls = TierControls::new(TIER, control, vec!["docs".into(), "mail".into()]);
        assert!(controls.refresh() && !controls.refresh());
        assert!(!controls.state(0).is_paused);
        let paused = TierControl {
            run: Some(Run::Paused),
            ..TierControl::default()
        };
        sender.send_replace(Some(Arc::new(wanted("tier/mail/30s", paused))));
        assert!(controls.refresh() && !controls.refresh());
        assert!(controls.state(1).is_paused && !controls.state(0).is_paused);
    }

    #[test]
    fn partitions_share_the_rate() {
        let limited = |rate| {
            wanted(
                "tier/docs/30s",
                TierControl {
                    rate: Some(RateLimit::PerSecond(rate)),
                    ..TierControl::default()
                },
            )
        };
        let (control, sender) = Control::fixed(limited(20.0));
        let mut controls = TierControls::new(TIER, control, vec!["docs".into()]);
        controls.refresh();
        let now = Timestamp::from_millis(0);
        let taken = |controls: &mut TierControls, partition| {
            (0..1_000)
                .take_while(|_| controls.take(0, partition, || Some(4), now).is_ok())
                .count()
        };
        assert_eq!((taken(&mut controls, 0), taken(&mut controls, 0)), (5, 0));
        assert_eq!(taken(&mut controls, 3), 5);
        let unknown = controls.take(0, 2, || None, now);
        assert_eq!(unknown, Err(now.after(UNKNOWN_PARTITIONS)));
        // A higher rate adds no tokens at once; without a rate, there is no limit.
        sender.send_replace(Some(Arc::new(limited(40.0))));
        controls.refresh();
        assert_eq!(taken(&mut controls, 0), 0);
        sender.send_replace(Some(Arc::default()));
        controls.refresh();
        assert_eq!(taken(&mut controls, 0), 1_000);
    }
}
