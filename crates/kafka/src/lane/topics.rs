//! Topics that change while a lane reads them: deleted and created again, or with a log that lacks the next offset.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::thread;
use std::time::Instant;

use rdkafka::TopicPartitionList;
use rdkafka::consumer::Consumer as _;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::topic_partition_list::Offset;
use redeliver_kafka_ffi::{TopicId, describe_topics};

use super::membership::GroupCheck;
use super::{CALL, Ended, IfRecreated, ROUND, Session};
use crate::processor::Processor;
use crate::topic_watch::TopicState;
use crate::tracker::{Committed, TopicFingerprint};

/// Why the log does not have the next offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OutOfRange {
    /// The log belongs to a new topic of the same name.
    Recreated,
    /// The log ends before the position, and it is unknown whether the position belongs to this topic: the commit has no
    /// fingerprint, or the broker does not support topic ids. Reading from the beginning may repeat records, but everything
    /// else may lose some.
    AssumedRecreated,
    /// Records were deleted before they were read.
    DeletedUnread {
        /// An upper bound: offsets without a record count too.
        records: u64,
    },
    /// The log lost its end.
    Truncated,
    /// The log has the offset.
    InRange,
}

/// Decides from the position, the bounds of the log, the id of the topic to which the position certainly belongs, and the
/// current id of the topic.
fn out_of_range(position: i64, log: Range<i64>, read: Option<TopicId>, now: Option<TopicId>) -> OutOfRange {
    if matches!((read, now), (Some(read), Some(now)) if read != now) {
        return OutOfRange::Recreated;
    }
    if position < log.start {
        return OutOfRange::DeletedUnread {
            records: log.start.abs_diff(position),
        };
    }
    if position <= log.end {
        return OutOfRange::InRange;
    }
    if read.is_none() || now.is_none() {
        OutOfRange::AssumedRecreated
    } else {
        OutOfRange::Truncated
    }
}

impl<P: Processor> Session<'_, P> {
    /// Detects topics that were deleted and created again, and makes the client aware of new topics and partitions.
    pub(super) fn check_topics(&mut self) -> Result<(), Ended> {
        let lane = &*self.lane;
        let changes = lane.watch.changes();
        if self.seen_changes == Some(changes) {
            return Ok(());
        }
        for assigned in self.slots.iter().flatten() {
            let TopicState::Exists { id: Some(id), .. } = lane.watch.state(&assigned.topic) else {
                continue;
            };
            let topic = assigned.topic.to_string();
            match assigned.topic_id {
                Some(known) if known == id => {}
                // The watch may have read the id before the topic was deleted and this partition assigned, so its id may be
                // the older one. The broker's current answer decides.
                Some(known) => {
                    if self
                        .ids_of(&[&topic])
                        .is_ok_and(|ids| ids[&topic].is_some_and(|now| now != known))
                    {
                        return Err(self.recreated(&topic));
                    }
                    lane.watch.refresh();
                    return Ok(());
                }
                None => return Err(self.exists_again(&topic)),
            }
        }
        let partitions = |topic| match lane.watch.state(topic) {
            TopicState::Exists { partitions, .. } => partitions,
            TopicState::Unknown | TopicState::Missing { .. } => 0,
        };
        let now: Vec<i32> = lane.spec.topics.iter().map(|topic| partitions(topic)).collect();
        let has_grown = now
            .iter()
            .zip(&self.seen_partitions)
            .any(|(now, seen)| now > seen);
        // By itself, the client looks for new topics and partitions every five minutes. A request for all topics makes it
        // look at once, and it then joins the group again if it is the leader.
        if has_grown && !lane.settings.takes_all_partitions {
            if let Err(error) = self.consumer.fetch_metadata(None, CALL) {
                tracing::debug!(%error, "metadata request failed; retrying");
                return Ok(());
            }
            self.group_check = GroupCheck::due_now();
        }
        self.seen_partitions = now;
        self.seen_changes = Some(changes);
        Ok(())
    }

    /// Compares the ids under which the client fetches topics with the ids of the assigned topics. The watch may detect a new
    /// topic up to [`INTERVAL`](crate::topic_watch::INTERVAL) later than the client, which continues in the new topic at the
    /// old offset. Returns false while the ids differ and the broker does not report a changed id yet.
    pub(super) fn verify_topic_ids(&mut self) -> Result<bool, Ended> {
        if !self.must_compare_ids || self.lane.settings.takes_all_partitions {
            return Ok(true);
        }
        let assigned = self.slots.iter().flatten();
        let differing: BTreeMap<&str, Option<TopicId>> = assigned
            .filter(|assigned| {
                let seen = self.client_ids.get(&*assigned.topic);
                seen.is_some_and(|seen| Some(*seen) != assigned.topic_id)
            })
            .map(|assigned| (&*assigned.topic, assigned.topic_id))
            .collect();
        if differing.is_empty() {
            self.must_compare_ids = false;
            return Ok(true);
        }
        let topics: Vec<&str> = differing.keys().copied().collect();
        let problem = match self.ids_of(&topics) {
            Ok(ids) => {
                let changed = differing.iter().find(|(topic, known)| ids[**topic] != **known);
                if let Some((topic, known)) = changed.map(|(topic, known)| ((*topic).to_owned(), *known)) {
                    return Err(match known {
                        Some(_) => self.recreated(&topic),
                        None => self.exists_again(&topic),
                    });
                }
                // The broker that answered may not have heard of the new topic yet.
                format!(
                    "brokers disagree about the ids of these topics: `{}`",
                    topics.join("`, `")
                )
            }
            Err(problem) => problem,
        };
        self.waiting(&problem);
        thread::park_timeout(ROUND);
        Ok(false)
    }

    /// Handles a topic that did not exist when it was assigned and exists now. Committed offsets may belong to an older
    /// topic of the same name.
    fn exists_again(&mut self, topic: &str) -> Ended {
        self.remember_recreated(topic);
        Ended::Restart(format!("topic `{topic}` exists again"))
    }

    fn remember_recreated(&mut self, topic: &str) {
        let assigned = self.slots.iter().flatten();
        let of_topic = assigned.filter(|assigned| *assigned.topic == *topic);
        let partitions = of_topic.map(|assigned| (assigned.topic.clone(), assigned.partition));
        self.lane.recreated.extend(partitions);
    }

    /// Whether a committed position belongs to a topic that was deleted.
    pub(super) fn is_of_deleted_topic(
        &self,
        (topic, partition): (&str, i32),
        position: &Committed,
        id: Option<TopicId>,
    ) -> bool {
        // A commit without a fingerprint is treated as one of the old topic until this lane has committed a position of the
        // new one, which removes the partition from `recreated`.
        let lacks_fingerprint = position.topic.is_none();
        let recreated = &self.lane.recreated;
        position.is_of_another(id.map(TopicFingerprint::of))
            || lacks_fingerprint
                && recreated
                    .iter()
                    .any(|(name, number)| **name == *topic && *number == partition)
    }

    /// Handles a topic that was created again. The records in flight belong to the old topic, so their offsets must not be
    /// committed.
    pub(super) fn recreated(&mut self, topic: &str) -> Ended {
        for assigned in self
            .slots
            .iter()
            .flatten()
            .filter(|assigned| *assigned.topic == *topic)
        {
            let in_flight = assigned.tracker.in_flight();
            tracing::error!(
                topic,
                partition = assigned.partition,
                in_flight,
                position = assigned.tracker.position(),
                "topic was deleted and created again; dropping records in flight of the old topic"
            );
            self.lane.observer.recreated(topic, assigned.partition, in_flight);
        }
        self.remember_recreated(topic);
        self.ended_by_recreation(topic)
    }

    pub(super) fn ended_by_recreation(&self, topic: &str) -> Ended {
        let lane = &self.lane;
        match lane.spec.if_recreated {
            IfRecreated::ReadFromBeginning => {
                Ended::Restart(format!("topic `{topic}` was deleted and created again"))
            }
            IfRecreated::Halt => Ended::Halted(format!(
                "topic `{topic}` was deleted and created again, but other data refers to the offsets of the old topic; to continue with \
                 the new topic from its beginning, stop all processes of group `{group}`, delete the group's offsets of \
                 the topic (kafka-consumer-groups.sh --delete-offsets --group {group} --topic {topic}), and start them again",
                group = lane.spec.group
            )),
        }
    }

    /// The ids of the topics of these partitions; `None` while they cannot be read. They are requested from the broker
    /// because those of the watch may be older than the assignment.
    pub(super) fn topic_ids(
        &mut self,
        partitions: &[(String, i32)],
    ) -> Option<BTreeMap<String, Option<TopicId>>> {
        // The embedded broker answers no administrative requests, and its topics are never deleted.
        if self.lane.settings.takes_all_partitions {
            return Some(BTreeMap::new());
        }
        let topics: BTreeSet<&str> = partitions.iter().map(|(topic, _)| topic.as_str()).collect();
        let topics: Vec<&str> = topics.into_iter().collect();
        match self.ids_of(&topics) {
            Ok(ids) => Some(ids),
            Err(reason) => {
                self.waiting(&format!("cannot read topic ids: {reason}"));
                self.stuck_since.get_or_insert_with(Instant::now);
                thread::park_timeout(ROUND);
                None
            }
        }
    }

    fn ids_of(&self, topics: &[&str]) -> Result<BTreeMap<String, Option<TopicId>>, String> {
        let found =
            describe_topics(self.consumer.client(), topics, CALL).map_err(|error| error.to_string())?;
        let id_of = |topic: &&str| match found.get(*topic) {
            Some(Ok(found)) => Ok(((*topic).to_owned(), found.id)),
            Some(Err(error)) => Err(format!("topic `{topic}`: {error}")),
            // A broker that has just started may not know the topic yet. The watch confirms that a topic is missing.
            None if self.lane.watch.state(topic).is_missing() => Ok(((*topic).to_owned(), None)),
            None => Err(format!("the broker does not know topic `{topic}`")),
        };
        topics.iter().map(id_of).collect()
    }

    /// Handles a log that does not have the next offset. No record is skipped without a log line and a count.
    pub(super) fn out_of_range(&mut self, slot: usize) -> Result<(), Ended> {
        let Some(assigned) = &self.slots[slot] else {
            return Ok(());
        };
        let (topic, partition) = (assigned.topic.clone(), assigned.partition);
        let (in_flight, position) = (
            assigned.tracker.in_flight(),
            assigned.tracker.position().unwrap_or(0),
        );
        let topic_id = assigned.topic_id.filter(|_| assigned.is_confirmed);
        let of_topic = [(topic.to_string(), partition)];
        let bounds = self.consumer.fetch_watermarks(&topic, partition, CALL);
        let (Some(ids), Ok((low, high))) = (self.topic_ids(&of_topic), bounds) else {
            // The client has stopped reading this partition, so only a new session tries again.
            return Err(Ended::Broken(KafkaError::MessageConsumption(
                RDKafkaErrorCode::AutoOffsetReset,
            )));
        };
        let id = ids.get(&*topic).copied().flatten();
        match out_of_range(position, low..high, topic_id, id) {
            OutOfRange::Recreated => return Err(self.recreated(&topic)),
            OutOfRange::DeletedUnread { records } => {
                tracing::error!(
                    topic = &*topic,
                    partition,
                    from = position,
                    to = low,
                    records,
                    "records were deleted before they were read, for example by retention; continuing after them"
                );
                self.lane.observer.deleted_unread(&topic, partition, records);
                self.read_from(&topic, partition, low)?;
            }
            OutOfRange::Truncated => {
                tracing::error!(
                    topic = &*topic,
                    partition,
                    position,
                    end = high,
                    "log was truncated, for example by an unclean leader election; continuing at its end"
                );
                self.begin_at(slot, high)?;
            }
            OutOfRange::AssumedRecreated => {
                if let ended @ Ended::Halted(_) = self.ended_by_recreation(&topic) {
                    return Err(ended);
                }
                tracing::error!(
                    topic = &*topic,
                    partition,
                    in_flight,
                    position,
                    end = high,
                    "log ends before the committed offset, so the topic was probably created again; reading it from its beginning"
                );
                self.lane.observer.recreated(&topic, partition, in_flight);
                self.begin_at(slot, low)?;
            }
            OutOfRange::InRange => self.read_from(&topic, partition, position)?,
        }
        Ok(())
    }

    /// Restarts a partition at an offset and drops its records in flight. The offset is committed with the next transaction:
    /// after a restart, the previous position would skip records written in the meantime, or be out of range again.
    fn begin_at(&mut self, slot: usize, offset: i64) -> Result<(), Ended> {
        let Some(assigned) = &self.slots[slot] else {
            return Ok(());
        };
        let (topic, partition) = (assigned.topic.clone(), assigned.partition);
        self.reset_assignment(&topic, partition, Some(Committed::at(offset)));
        self.commit_soon(slot);
        self.read_from(&topic, partition, offset)
    }

    /// Makes the client fetch a partition again after it has stopped. A seek would not.
    fn read_from(&mut self, topic: &str, partition: i32, offset: i64) -> Result<(), Ended> {
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(topic, partition, Offset::Offset(offset))
            .map_err(Ended::Broken)?;
        let result = if self.lane.settings.takes_all_partitions {
            self.consumer.seek_partitions(list, 5 * CALL).map(drop)
        } else {
            let unassigned = self.consumer.incremental_unassign(&list);
            unassigned.and_then(|()| self.consumer.incremental_assign(&list))
        };
        result.map_err(Ended::Broken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topic_ids_decide_before_offsets() {
        let id = |bits| Some(TopicId::from_bits(bits));
        let reason = |position, read, now| out_of_range(position, 10..20, read, now);
        assert_eq!(reason(15, id(1), id(2)), OutOfRange::Recreated);
        assert_eq!(reason(25, id(1), None), OutOfRange::AssumedRecreated);
        assert_eq!(reason(25, None, id(1)), OutOfRange::AssumedRecreated);
        assert_eq!(reason(7, id(1), id(1)), OutOfRange::DeletedUnread { records: 3 });
        assert_eq!(reason(7, None, None), OutOfRange::DeletedUnread { records: 3 });
        assert_eq!(reason(21, id(1), id(1)), OutOfRange::Truncated);
        assert_eq!(reason(21, None, None), OutOfRange::AssumedRecreated);
        assert_eq!(reason(20, id(1), id(1)), OutOfRange::InRange);
    }
}
