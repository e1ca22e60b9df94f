//! A lane's membership in its consumer group.
//!
//! A static member that joins again gets its old assignment back at once, even if it now subscribes to other topics: the
//! broker does not compare subscriptions (KAFKA-12759). After a restart with a changed configuration, the member would
//! therefore keep its old topics forever. So before a lane joins, it reads the previous subscription of its member. If that
//! differs or cannot be read, the member first leaves the group. Only a live member can leave, so this takes two steps: the
//! member joins and receives its old assignment, of which it reads nothing; then it unsubscribes, and the client sends a
//! LeaveGroup request once the revocation is served. Subscribing before that would suppress the request.
//!
//! The lane does not rely on the result: [`examine`] checks the group as its coordinator describes it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer as _, ConsumerContext};
use redeliver_kafka_ffi::GroupDescription;

use super::driver::{Driver, broken};
use super::events::Events;
use super::state::LaneState;
use super::{CALL, Ended};
use crate::processor::Processor;
use crate::topic_watch::{PendingGroup, TopicState};

/// Timeout of listing the group. The request goes to all brokers, and waits this long if one of them is down.
const DESCRIBE: Duration = Duration::from_secs(4);
/// Interval of requests to the group's coordinator until the check passes.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Consecutive failed checks after which the lane joins again.
const MAX_FAILED_CHECKS: u32 = 6;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Membership {
    /// Joins with its old subscription, only to leave the group.
    Rejoining,
    /// Has unsubscribed and waits for the revocation.
    Leaving,
    /// Has subscribed and waits for its assignment.
    Joining,
    /// Has its assignment, which may be empty.
    Joined,
}

/// Whether this static member has to leave its group before it joins.
pub(super) fn must_leave<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    group: &str,
    instance: &str,
    topics: &[Arc<str>],
) -> bool {
    let groups = match consumer.fetch_group_list(Some(group), DESCRIBE) {
        Ok(groups) => groups,
        Err(error) => {
            tracing::info!(group, instance, %error, "cannot read the previous subscription; leaving the group before joining");
            return true;
        }
    };
    let known = groups.groups().iter().find(|known| known.name() == group);
    let Some(member) = known.and_then(|known| {
        let mut members = known.members().iter();
        members.find(|member| is_of_instance(member.id(), instance))
    }) else {
        return false;
    };
    let old = member.metadata().and_then(subscribed_topics);
    let new: BTreeSet<&str> = topics.iter().map(|topic| &**topic).collect();
    let is_same = old.is_some_and(|old| old.iter().map(String::as_str).eq(new));
    if !is_same {
        tracing::info!(
            group,
            instance,
            "subscription changed; leaving the group before joining"
        );
    }
    !is_same
}

/// Whether a member id, which the broker forms as `<instance id>-<UUID>`, belongs to this instance id.
fn is_of_instance(member: &str, instance: &str) -> bool {
    const UUID: usize = 36;
    let rest = member
        .strip_prefix(instance)
        .and_then(|rest| rest.strip_prefix('-'));
    rest.is_some_and(|uuid| uuid.len() == UUID)
}

/// Parses the topics of a member's subscription: the version of the consumer protocol, an array of names, and data of the
/// assignors. Returns `None` if it cannot be parsed.
fn subscribed_topics(metadata: &[u8]) -> Option<BTreeSet<String>> {
    let (_version, rest) = metadata.split_at_checked(2)?;
    let (count, mut rest) = rest.split_first_chunk::<4>()?;
    let mut topics = BTreeSet::new();
    for _ in 0..i32::from_be_bytes(*count) {
        let (length, names) = rest.split_first_chunk::<2>()?;
        let length = usize::try_from(i16::from_be_bytes(*length)).ok()?;
        let (name, remaining) = names.split_at_checked(length)?;
        topics.insert(std::str::from_utf8(name).ok()?.to_owned());
        rest = remaining;
    }
    Some(topics)
}

/// The state of the group from the view of one member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum GroupState {
    /// Every partition of the member's topics has an owner, and the member owns no partition of another topic.
    Valid,
    /// A rebalance is in progress.
    Rebalancing,
    /// Whether this topic exists is unknown.
    TopicUnknown(String),
    /// The member owns a partition of this topic, to which it did not subscribe.
    NotSubscribed(String),
    /// No member owns this partition of a subscribed topic.
    Unowned(String, i32),
}

/// Compares the group with a member's subscription. `topics` are those that exist, with their number of partitions;
/// `owned` are the topics of which this member owns partitions.
pub(super) fn examine<'a>(
    group: &GroupDescription,
    topics: &[(Arc<str>, i32)],
    subscribed: &[Arc<str>],
    mut owned: impl Iterator<Item = &'a str>,
) -> GroupState {
    if !group.is_stable {
        return GroupState::Rebalancing;
    }
    if let Some(topic) = owned.find(|topic| !subscribed.iter().any(|known| **known == **topic)) {
        return GroupState::NotSubscribed(topic.to_owned());
    }
    let assigned: BTreeSet<(&str, i32)> = group
        .members
        .iter()
        .flat_map(|member| &member.partitions)
        .map(|(topic, partition)| (topic.as_str(), *partition))
        .collect();
    for (topic, partitions) in topics {
        if let Some(partition) =
            (0..*partitions).find(|partition| !assigned.contains(&(&**topic, *partition)))
        {
            return GroupState::Unowned(topic.to_string(), partition);
        }
    }
    GroupState::Valid
}

pub(super) fn subscribe(consumer: &BaseConsumer<Events>, topics: &[Arc<str>]) -> Result<(), Ended> {
    let topics: Vec<&str> = topics.iter().map(|topic| &**topic).collect();
    consumer.subscribe(&topics).map_err(broken)
}

/// The check of the group after each rebalance, repeated until the group is valid.
pub(super) struct GroupCheck {
    pending: Option<PendingGroup>,
    /// When to check next; `None` once the check has passed, until the next rebalance.
    next: Option<Instant>,
    /// Consecutive failed checks.
    failed: u32,
}

impl GroupCheck {
    /// For a lane that is not a member of a group.
    pub(super) fn not_needed() -> Self {
        Self {
            next: None,
            ..Self::due_now()
        }
    }

    pub(super) fn has_passed(&self) -> bool {
        self.next.is_none()
    }

    pub(super) fn due_now() -> Self {
        Self {
            pending: None,
            next: Some(Instant::now()),
            failed: 0,
        }
    }
}

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

#[cfg(test)]
mod tests {
    use redeliver_kafka_ffi::MemberDescription;

    use super::*;

    #[test]
    fn damaged_subscription_is_refused() {
        // Version 3, two topics, no user data.
        let metadata = b"\x00\x03\x00\x00\x00\x02\x00\x01b\x00\x02aa\xff\xff\xff\xff";
        let topics: Vec<String> = subscribed_topics(metadata).unwrap().into_iter().collect();
        assert_eq!(topics, ["aa", "b"]);
        for end in 0..13 {
            assert_eq!(subscribed_topics(&metadata[..end]), None, "{end}");
        }
        assert_eq!(subscribed_topics(b"\x00\x00\x00\x00\x00\x01\xff\xff"), None);
    }

    #[test]
    fn member_id_matches_whole_instance_id() {
        let uuid = "7f9c24e8-3b12-4fef-91e0-56a2d5a8d5b1";
        assert!(is_of_instance(&format!("x-retry-5s-0-{uuid}"), "x-retry-5s-0"));
        assert!(!is_of_instance(&format!("x-retry-5s-0-b-{uuid}"), "x-retry-5s-0"));
        assert!(!is_of_instance("x-retry-5s-0", "x-retry-5s-0"));
    }

    #[test]
    fn valid_group_owns_its_partitions() {
        let group = |is_stable, partitions: &[(&str, i32)]| GroupDescription {
            is_stable,
            members: vec![MemberDescription {
                instance: None,
                partitions: partitions
                    .iter()
                    .map(|(topic, number)| ((*topic).to_owned(), *number))
                    .collect(),
            }],
        };
        let subscribed: Vec<Arc<str>> = vec!["a".into(), "b".into()];
        let topics = [("a".into(), 2)];
        let state = |group: &GroupDescription, owned: &[&'static str]| {
            examine(group, &topics, &subscribed, owned.iter().copied())
        };
        let all = [("a", 0), ("a", 1)];
        assert_eq!(state(&group(true, &all), &["a"]), GroupState::Valid);
        assert_eq!(state(&group(false, &all), &["a"]), GroupState::Rebalancing);
        assert_eq!(
            state(&group(true, &all[..1]), &["a"]),
            GroupState::Unowned("a".into(), 1)
        );
        assert_eq!(
            state(&group(true, &all), &["a", "old"]),
            GroupState::NotSubscribed("old".into())
        );
    }
}
