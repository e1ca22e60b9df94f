//! The lane's steps that join, leave and check its consumer group.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::consumer::Consumer as _;
use redeliver_kafka_ffi::GroupDescription;

use super::driver::Driver;
use super::membership::{GroupCheck, GroupState, Membership, examine, subscribe};
use super::state::LaneState;
use super::{CALL, Ended};
use crate::processor::Processor;
use crate::topic_watch::{PendingGroup, TopicState};

/// Interval of requests to the group's coordinator until the check passes.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Consecutive failed checks after which the lane joins again.
const MAX_FAILED_CHECKS: u32 = 6;

impl Driver<'_> {
    /// Records an assignment, or leaves the group if the assignment belongs to the old subscription.
    pub(super) fn assigned<P: Processor>(
        &mut self,
        partitions: Vec<(String, i32)>,
        state: &mut LaneState<P>,
    ) -> Result<(), Ended> {
        if self.membership == Membership::Rejoining {
            self.consumer.unsubscribe();
            self.membership = Membership::Leaving;
            // An empty assignment causes no revocation, and the member has already left.
            if partitions.is_empty() {
                self.join()?;
            }
            return Ok(());
        }
        // These partitions of the old subscription are not started either, and revoked together with the others.
        if self.membership == Membership::Leaving {
            return Ok(());
        }
        self.membership = Membership::Joined;
        let topics = &self.lane.spec.topics;
        let shared = |name: String| {
            let known = topics.iter().find(|topic| ***topic == *name);
            known.cloned().unwrap_or_else(|| name.into())
        };
        let partitions = partitions.into_iter();
        state.assigned(partitions.map(|(topic, partition)| (shared(topic), partition)));
        self.group_check = GroupCheck::due_now();
        Ok(())
    }

    /// Joins the group with the new subscription, after the member has left it.
    pub(super) fn join(&mut self) -> Result<(), Ended> {
        subscribe(&self.consumer, &self.lane.spec.topics)?;
        self.membership = Membership::Joining;
        Ok(())
    }

    /// Checks the group as its coordinator describes it, until every partition of the lane's topics has an owner.
    pub(super) fn check_group<P: Processor>(&mut self, state: &mut LaneState<P>) -> Result<(), Ended> {
        if let Some(result) = self.group_check.pending.as_ref().and_then(PendingGroup::take) {
            self.group_check.pending = None;
            self.group_check.next = Some(Instant::now() + CHECK_INTERVAL);
            match result {
                Ok(group) => {
                    let group = self.group_state(&group, state);
                    self.apply_group_state(group, state)?;
                }
                Err(error) => state.waiting(&format!("group coordinator unavailable: {error}")),
            }
        }
        let is_due = self.group_check.next.is_some_and(|next| Instant::now() >= next);
        if is_due && self.membership == Membership::Joined {
            let lane = &self.lane;
            // The thread of the topic watch sends the request, so that the lane never blocks on it.
            let describe = || lane.watch.describe_group(&lane.spec.group, &lane.waker);
            self.group_check.pending.get_or_insert_with(describe);
        } else if is_due {
            self.group_check.next = Some(Instant::now() + CHECK_INTERVAL);
            let mut topics = self.lane.spec.topics.iter();
            // The client does not join the group while none of the topics exists.
            if topics.all(|topic| self.lane.watch.state(topic).is_missing()) {
                let topics = self.lane.spec.topics.join("`, `");
                state.waiting(&format!("none of its topics exists: `{topics}`"));
            }
        }
        Ok(())
    }

    fn group_state<P: Processor>(&self, group: &GroupDescription, state: &LaneState<P>) -> GroupState {
        let lane = &self.lane;
        let mut topics: Vec<(Arc<str>, i32)> = Vec::new();
        for topic in &lane.spec.topics {
            match lane.watch.state(topic) {
                TopicState::Exists { partitions, .. } => topics.push((topic.clone(), partitions)),
                TopicState::Missing { .. } => {}
                TopicState::Unknown => return GroupState::TopicUnknown(topic.to_string()),
            }
        }
        let owned = state.assignments.iter().map(|assigned| &*assigned.topic);
        examine(group, &topics, &lane.spec.topics, owned)
    }

    fn apply_group_state<P: Processor>(
        &mut self,
        group: GroupState,
        state: &mut LaneState<P>,
    ) -> Result<(), Ended> {
        let problem = match group {
            GroupState::Valid => {
                self.group_check.next = None;
                self.group_check.failed = 0;
                self.lane.rejoins = 0;
                return Ok(());
            }
            GroupState::Rebalancing => {
                self.group_check.failed = 0;
                return Ok(());
            }
            GroupState::TopicUnknown(topic) => {
                self.group_check.failed = 0;
                state.waiting(&format!("checking whether topic `{topic}` exists"));
                return Ok(());
            }
            GroupState::NotSubscribed(topic) => {
                format!(
                    "the group assigned partitions of topic `{topic}`, to which this lane does not subscribe"
                )
            }
            GroupState::Unowned(topic, partition) => {
                format!("{topic}/{partition} is not assigned to any member of the group")
            }
        };
        state.waiting(&problem);
        self.group_check.failed += 1;
        // The leader of the group may not know a new topic or partition yet. A request for all topics tells the client, and
        // it then joins the group again if it is the leader.
        if self.group_check.failed == 1
            && let Err(error) = self.consumer.fetch_metadata(None, CALL)
        {
            tracing::debug!(%error, "metadata request failed");
        }
        // The interval doubles, because joining again causes a rebalance for all members and may not help.
        if self.group_check.failed >= MAX_FAILED_CHECKS << self.lane.rejoins.min(6) {
            self.lane.rejoins += 1;
            self.lane.must_leave = true;
            return Err(Ended::Restart(problem));
        }
        Ok(())
    }
}
