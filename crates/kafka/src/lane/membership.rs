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

use super::Ended;
use super::events::Events;
use crate::topic_watch::PendingGroup;

/// Timeout of listing the group. The request goes to all brokers, and waits this long if one of them is down.
const DESCRIBE: Duration = Duration::from_secs(4);

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
    Ok(consumer.subscribe(&topics)?)
}

/// The check of the group after each rebalance, repeated until the group is valid.
pub(super) struct GroupCheck {
    pub(super) pending: Option<PendingGroup>,
    /// When to check next; `None` once the check has passed, until the next rebalance.
    pub(super) next: Option<Instant>,
    /// Consecutive failed checks.
    pub(super) failed: u32,
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

#[cfg(test)]
mod tests {
    use redeliver_kafka_ffi::MemberDescription;

    use super::*;

    #[test]
    fn a_subscription_is_parsed_and_a_damaged_one_is_not() {
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
    fn a_member_id_matches_only_its_whole_instance_id() {
        let uuid = "7f9c24e8-3b12-4fef-91e0-56a2d5a8d5b1";
        assert!(is_of_instance(&format!("x-retry-5s-0-{uuid}"), "x-retry-5s-0"));
        assert!(!is_of_instance(&format!("x-retry-5s-0-b-{uuid}"), "x-retry-5s-0"));
        assert!(!is_of_instance("x-retry-5s-0", "x-retry-5s-0"));
    }

    #[test]
    fn a_group_is_valid_when_all_partitions_have_owners_and_the_member_owns_no_other_topic() {
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
