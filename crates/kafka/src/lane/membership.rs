//! A lane's membership in its consumer group.
//!
//! A static member that joins again gets its old assignment back at once, even if it subscribes to other topics now: the
//! broker does not compare subscriptions (KAFKA-12759). A restart with a changed configuration would therefore keep the
//! old topics for ever. So a lane reads the subscription that its member had before it joins, and if that differs, or cannot be
//! read, the member leaves the group before it joins it for good. Only a live member can leave, so this takes two steps:
//! it joins, is told its old assignment, of which it reads nothing, and unsubscribes, which makes the client send a
//! LeaveGroup request once the revocation is served. Subscribing before that suppresses the request.
//!
//! Whether that worked is not taken on trust: [`examine`] looks at the group as its coordinator sees it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer as _, ConsumerContext};
use redeliver_kafka_ffi::GroupDescription;

use super::events::Events;
use super::{CALL, Ended, Session};
use crate::processor::Processor;
use crate::topic_watch::{PendingGroup, TopicState};

/// How long the group may take to be described. Every broker is asked, and one that is down uses this up.
const DESCRIBE: Duration = Duration::from_secs(4);
/// How often the group's coordinator is asked whether the lane has its place in the group.
const EXAMINE: Duration = Duration::from_millis(500);
/// How often in a row it must see a partition without an owner before the lane joins anew.
const UNSOUND: u32 = 6;

/// How a member takes its place in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Membership {
    /// It waits for the assignment of its old subscription, in order to give it up.
    Rejoining,
    /// It has unsubscribed and waits for the revocation.
    Leaving,
    /// It has subscribed and waits for its assignment.
    Joining,
    /// It has its assignment, which may be empty.
    Joined,
}

/// Whether this static member has to leave its group first.
pub(super) fn must_leave<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    group: &str,
    instance: &str,
    topics: &[Arc<str>],
) -> bool {
    let groups = match consumer.fetch_group_list(Some(group), DESCRIBE) {
        Ok(groups) => groups,
        Err(error) => {
            tracing::info!(group, instance, %error, "the old subscription is not known; joining anew");
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
    let wanted: BTreeSet<&str> = topics.iter().map(|topic| &**topic).collect();
    let is_same = old.is_some_and(|old| old.iter().map(String::as_str).eq(wanted));
    if !is_same {
        tracing::info!(group, instance, "the subscription has changed; joining anew");
    }
    !is_same
}

/// The broker makes the id of a static member of its instance id, a hyphen and a UUID.
fn is_of_instance(member: &str, instance: &str) -> bool {
    const UUID: usize = 36;
    let rest = member
        .strip_prefix(instance)
        .and_then(|rest| rest.strip_prefix('-'));
    rest.is_some_and(|uuid| uuid.len() == UUID)
}

/// The topics of a subscription as members send it: the consumer protocol's version, an array of names, and what assignors
/// add. `None` when it cannot be read.
fn subscribed_topics(metadata: &[u8]) -> Option<BTreeSet<String>> {
    let (_version, rest) = metadata.split_at_checked(2)?;
    let (count, mut rest) = rest.split_first_chunk::<4>()?;
    let mut topics = BTreeSet::new();
    for _ in 0..i32::from_be_bytes(*count) {
        let (length, names) = rest.split_first_chunk::<2>()?;
        let length = usize::try_from(i16::from_be_bytes(*length)).ok()?;
        let (name, behind) = names.split_at_checked(length)?;
        topics.insert(std::str::from_utf8(name).ok()?.to_owned());
        rest = behind;
    }
    Some(topics)
}

/// What a look at the group says about a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Every partition of its topics belongs to some member, and it owns none of other topics.
    Sound,
    /// A rebalance is under way.
    Unsettled,
    /// It is not known whether this topic exists.
    Unknown(String),
    /// It owns a partition of a topic that it did not subscribe to.
    Foreign(String),
    /// Nobody owns this partition of a topic that it subscribed to.
    Unowned(String, i32),
}

/// Compares a group with a member's subscription. `topics`: those that exist, with their number of partitions;
/// `owned`: the topics of which this member owns partitions.
pub(super) fn examine<'a>(
    group: &GroupDescription,
    topics: &[(Arc<str>, i32)],
    subscribed: &[Arc<str>],
    mut owned: impl Iterator<Item = &'a str>,
) -> Place {
    if !group.is_stable {
        return Place::Unsettled;
    }
    if let Some(foreign) = owned.find(|topic| !subscribed.iter().any(|known| **known == **topic)) {
        return Place::Foreign(foreign.to_owned());
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
            return Place::Unowned(topic.to_string(), partition);
        }
    }
    Place::Sound
}

/// Subscribes, which joins the group.
pub(super) fn subscribe(consumer: &BaseConsumer<Events>, topics: &[Arc<str>]) -> Result<(), Ended> {
    let topics: Vec<&str> = topics.iter().map(|topic| &**topic).collect();
    consumer.subscribe(&topics).map_err(Ended::Broken)
}

/// A look at the group, which tells whether the lane has its place in it.
pub(super) struct Examination {
    pending: Option<PendingGroup>,
    /// When to ask next; `None` once all was found sound, until the next rebalance.
    next: Option<Instant>,
    /// How often in a row something was unsound.
    unsound: u32,
}

impl Examination {
    /// Nothing to look at: the member belongs to no group.
    pub(super) fn none() -> Self {
        Self {
            next: None,
            ..Self::due_now()
        }
    }

    /// Whether all was found sound.
    pub(super) fn is_over(&self) -> bool {
        self.next.is_none()
    }

    pub(super) fn due_now() -> Self {
        Self {
            pending: None,
            next: Some(Instant::now()),
            unsound: 0,
        }
    }
}

impl<P: Processor> Session<'_, P> {
    /// Takes note of an assignment, or gives it up when it is that of an old subscription.
    pub(super) fn assigned(&mut self, partitions: Vec<(String, i32)>) -> Result<(), Ended> {
        if self.membership == Membership::Rejoining {
            self.consumer.unsubscribe();
            self.membership = Membership::Leaving;
            // Nothing is revoked then, and the member has left already.
            if partitions.is_empty() {
                self.join()?;
            }
            return Ok(());
        }
        // Declined as well, and revoked with the rest.
        if self.membership == Membership::Leaving {
            return Ok(());
        }
        self.membership = Membership::Joined;
        self.arriving.extend(partitions);
        self.examination = Examination::due_now();
        Ok(())
    }

    /// Joins the group for good, after the member has left it.
    pub(super) fn join(&mut self) -> Result<(), Ended> {
        self.consumer.context().decline(false);
        subscribe(&self.consumer, &self.lane.spec.topics)?;
        self.membership = Membership::Joining;
        Ok(())
    }

    /// Asks the group's coordinator whether all partitions of our topics have an owner, until it says so.
    pub(super) fn look_at_group(&mut self) -> Result<(), Ended> {
        if let Some(answer) = self.examination.pending.as_ref().and_then(PendingGroup::take) {
            self.examination.pending = None;
            self.examination.next = Some(Instant::now() + EXAMINE);
            match answer {
                Ok(group) => {
                    let place = self.place(&group);
                    self.take_place(place)?;
                }
                Err(error) => self.waiting(&format!("the group's coordinator does not answer: {error}")),
            }
        }
        let is_time = self.examination.next.is_some_and(|next| Instant::now() >= next);
        if is_time && self.membership == Membership::Joined {
            let lane = &self.lane;
            let ask = || lane.watch.ask_group(&lane.spec.group, &lane.waker);
            self.examination.pending.get_or_insert_with(ask);
        } else if is_time {
            self.examination.next = Some(Instant::now() + EXAMINE);
            let mut topics = self.lane.spec.topics.iter();
            // The client does not join a group for topics of which none exists.
            if topics.all(|topic| self.lane.watch.state(topic).is_missing()) {
                let topics = self.lane.spec.topics.join("`, `");
                self.waiting(&format!("none of its topics exists: `{topics}`"));
            }
        }
        Ok(())
    }

    fn place(&self, group: &GroupDescription) -> Place {
        let lane = &self.lane;
        let mut topics: Vec<(Arc<str>, i32)> = Vec::new();
        for topic in &lane.spec.topics {
            match lane.watch.state(topic) {
                TopicState::Exists { partitions, .. } => topics.push((topic.clone(), partitions)),
                TopicState::Missing { .. } => {}
                TopicState::Unknown => return Place::Unknown(topic.to_string()),
            }
        }
        let arriving = self.arriving.iter().map(|(topic, _)| topic.as_str());
        let owned = self.slots.iter().flatten().map(|assigned| &*assigned.topic);
        examine(group, &topics, &lane.spec.topics, owned.chain(arriving))
    }

    fn take_place(&mut self, place: Place) -> Result<(), Ended> {
        let problem = match place {
            Place::Sound => {
                self.examination.next = None;
                self.examination.unsound = 0;
                self.lane.joined_anew = 0;
                return Ok(());
            }
            Place::Unsettled => {
                self.examination.unsound = 0;
                return Ok(());
            }
            Place::Unknown(topic) => {
                self.examination.unsound = 0;
                self.waiting(&format!("whether topic `{topic}` exists is not known yet"));
                return Ok(());
            }
            Place::Foreign(topic) => {
                format!(
                    "the group still gives this lane partitions of topic `{topic}`, which it does not read any more"
                )
            }
            Place::Unowned(topic, partition) => {
                format!("{topic}/{partition} is not assigned to any member of the group")
            }
        };
        self.waiting(&problem);
        self.examination.unsound += 1;
        // The leader of the group may have to hear of a new topic or partition, and whoever asks for all of them does.
        if self.examination.unsound == 1
            && let Err(error) = self.consumer.fetch_metadata(None, CALL)
        {
            tracing::debug!(%error, "asking for all topics");
        }
        // Each time later, since it disturbs the other members and may not help.
        if self.examination.unsound >= UNSOUND << self.lane.joined_anew.min(6) {
            self.lane.joined_anew += 1;
            self.lane.must_leave = true;
            return Err(Ended::StartOver(problem));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use redeliver_kafka_ffi::MemberDescription;

    use super::*;

    #[test]
    fn a_subscription_is_read_and_a_damaged_one_is_none() {
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
    fn a_member_is_found_by_its_instance_and_not_by_one_that_begins_like_it() {
        let uuid = "7f9c24e8-3b12-4fef-91e0-56a2d5a8d5b1";
        assert!(is_of_instance(&format!("x-retry-5s-0-{uuid}"), "x-retry-5s-0"));
        assert!(!is_of_instance(&format!("x-retry-5s-0-b-{uuid}"), "x-retry-5s-0"));
        assert!(!is_of_instance("x-retry-5s-0", "x-retry-5s-0"));
    }

    #[test]
    fn a_place_is_sound_when_all_is_owned_and_nothing_is_foreign() {
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
        let look = |group: &GroupDescription, owned: &[&'static str]| {
            examine(group, &topics, &subscribed, owned.iter().copied())
        };
        let all = [("a", 0), ("a", 1)];
        assert_eq!(look(&group(true, &all), &["a"]), Place::Sound);
        assert_eq!(look(&group(false, &all), &["a"]), Place::Unsettled);
        assert_eq!(
            look(&group(true, &all[..1]), &["a"]),
            Place::Unowned("a".into(), 1)
        );
        assert_eq!(
            look(&group(true, &all), &["a", "old"]),
            Place::Foreign("old".into())
        );
    }
}
