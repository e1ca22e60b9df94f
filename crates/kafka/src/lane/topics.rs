//! Topics that change under a lane: deleted and created again, or without the next offset in their log.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::thread;
use std::time::Instant;

use rdkafka::TopicPartitionList;
use rdkafka::consumer::Consumer as _;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::topic_partition_list::Offset;
use redeliver_kafka_ffi::{TopicId, describe_topics};

use super::membership::Examination;
use super::{CALL, Ended, IfRecreated, ROUND, Session};
use crate::processor::Processor;
use crate::topic_watch::TopicState;
use crate::tracker::{Committed, TopicFingerprint};

/// What happened to a log that does not have the offset that was to be read next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OutOfRange {
    /// It is the log of another topic of the same name.
    Recreated,
    /// It ends before the position, and nothing says that the position is one of this topic: the commit names no topic,
    /// or the broker knows no ids. Reading it from the beginning may repeat records, anything else would lose some.
    TakenForAnother,
    /// Records were deleted before they were read.
    DeletedUnread {
        /// How many at most; offsets without a record are counted too.
        records: u64,
    },
    /// Its end was lost.
    Truncated,
    /// It has the offset after all.
    InRange,
}

/// Decides from the log's offsets, the id of the topic that the position is certainly of, and the id of the topic of that
/// name now.
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
        OutOfRange::TakenForAnother
    } else {
        OutOfRange::Truncated
    }
}

impl<P: Processor> Session<'_, P> {
    /// Notices topics that were deleted and created again, and lets the client know of topics that are new or have grown.
    pub(super) fn look_at_topics(&mut self) -> Result<(), Ended> {
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
                // The partition may have arrived after the watch looked, so the broker is asked before it is believed.
                Some(known) => {
                    if self
                        .ids_of(&[&topic])
                        .is_ok_and(|ids| ids[&topic].is_some_and(|now| now != known))
                    {
                        return Err(self.recreated(&topic));
                    }
                    lane.watch.hurry();
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
        let is_new = now
            .iter()
            .zip(&self.seen_partitions)
            .any(|(now, seen)| now > seen);
        // The client looks for new topics and partitions every five minutes by itself, and at once when it is asked for
        // all topics. It then joins the group again if it is the leader.
        if is_new && !lane.settings.takes_all_partitions {
            if let Err(error) = self.consumer.fetch_metadata(None, CALL) {
                tracing::debug!(%error, "asking for all topics; asking again");
                return Ok(());
            }
            self.examination = Examination::due_now();
        }
        self.seen_partitions = now;
        self.seen_changes = Some(changes);
        Ok(())
    }

    /// Compares the ids under which the client reads topics with those of the topics that were assigned. The watch sees a new
    /// topic up to [`INTERVAL`](crate::topic_watch::INTERVAL) later than the client, which goes on in it at the offset of the
    /// old one. False while it is not known which of both is right.
    pub(super) fn are_topics_the_same(&mut self) -> Result<bool, Ended> {
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
                format!(
                    "the broker does not say yet which topics these are: `{}`",
                    topics.join("`, `")
                )
            }
            Err(problem) => problem,
        };
        self.waiting(&problem);
        thread::park_timeout(ROUND);
        Ok(false)
    }

    /// A topic did not exist when it was assigned. It may be another one than the one that was committed.
    fn exists_again(&mut self, topic: &str) -> Ended {
        self.remember_recreated(topic);
        Ended::StartOver(format!("topic `{topic}` exists again"))
    }

    fn remember_recreated(&mut self, topic: &str) {
        let assigned = self.slots.iter().flatten();
        let of_topic = assigned.filter(|assigned| *assigned.topic == *topic);
        let partitions = of_topic.map(|assigned| (assigned.topic.clone(), assigned.partition));
        self.lane.recreated.extend(partitions);
    }

    /// Whether a committed position is one of a topic that was deleted since.
    pub(super) fn is_foreign(
        &self,
        (topic, partition): (&str, i32),
        position: &Committed,
        id: Option<TopicId>,
    ) -> bool {
        let is_unnamed = position.topic.is_none();
        let recreated = &self.lane.recreated;
        position.is_of_another(id.map(TopicFingerprint::of))
            || is_unnamed
                && recreated
                    .iter()
                    .any(|(name, number)| **name == *topic && *number == partition)
    }

    /// A topic is not the one that was read. What is in hand of it is of records that are gone.
    pub(super) fn recreated(&mut self, topic: &str) -> Ended {
        for assigned in self
            .slots
            .iter()
            .flatten()
            .filter(|assigned| *assigned.topic == *topic)
        {
            let in_hand = assigned.tracker.in_flight();
            tracing::error!(
                topic,
                partition = assigned.partition,
                in_hand,
                position = assigned.tracker.position(),
                "the topic was deleted and created again; records in hand of the old topic are dropped"
            );
            self.lane.observer.recreated(topic, assigned.partition, in_hand);
        }
        self.remember_recreated(topic);
        self.ended_by_recreation(topic)
    }

    pub(super) fn ended_by_recreation(&self, topic: &str) -> Ended {
        let lane = &self.lane;
        match lane.spec.if_recreated {
            IfRecreated::ReadFromBeginning => {
                Ended::StartOver(format!("topic `{topic}` was deleted and created again"))
            }
            IfRecreated::Halt => Ended::Halted(format!(
                "topic `{topic}` was deleted and created again, and its offsets have a meaning beyond it; to go on with \
                 the new topic from its beginning, stop all processes of group `{group}`, delete the group's offsets of \
                 the topic (kafka-consumer-groups.sh --delete-offsets --group {group} --topic {topic}), and start them again",
                group = lane.spec.group
            )),
        }
    }

    /// The ids of the topics of these partitions, or nothing while the broker cannot say. They are asked for here and not
    /// taken from the watch, which may have looked before the topic was deleted.
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
                self.waiting(&format!("ids of topics are not known yet: {reason}"));
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
            // One broker that does not know it, such as one that has just started, proves nothing.
            None if self.lane.watch.state(topic).is_missing() => Ok(((*topic).to_owned(), None)),
            None => Err(format!("topic `{topic}` is not known to the broker")),
        };
        topics.iter().map(id_of).collect()
    }

    /// The log does not have the offset that was to be read next. Nothing is skipped silently: what happened decides.
    pub(super) fn out_of_range(&mut self, slot: usize) -> Result<(), Ended> {
        let Some(assigned) = &self.slots[slot] else {
            return Ok(());
        };
        let (topic, partition) = (assigned.topic.clone(), assigned.partition);
        let (in_hand, position) = (
            assigned.tracker.in_flight(),
            assigned.tracker.position().unwrap_or(0),
        );
        let topic_id = assigned.topic_id.filter(|_| assigned.is_confirmed);
        let of_topic = [(topic.to_string(), partition)];
        let bounds = self.consumer.fetch_watermarks(&topic, partition, CALL);
        let (Some(ids), Ok((low, high))) = (self.topic_ids(&of_topic), bounds) else {
            // Both are asked again: the client stopped reading this partition.
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
                    "records were deleted before they were read, by retention for example; reading on behind them"
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
                    "the end of the log lies before what was read, as after an unclean leader election; reading on at the end"
                );
                self.begin_at(slot, high)?;
            }
            OutOfRange::TakenForAnother => {
                if let ended @ Ended::Halted(_) = self.ended_by_recreation(&topic) {
                    return Err(ended);
                }
                tracing::error!(
                    topic = &*topic,
                    partition,
                    in_hand,
                    position,
                    end = high,
                    "the log ends before the committed offset, so it is of a topic that was created again; reading it from its beginning"
                );
                self.lane.observer.recreated(&topic, partition, in_hand);
                self.begin_at(slot, low)?;
            }
            OutOfRange::InRange => self.read_from(&topic, partition, position)?,
        }
        Ok(())
    }

    /// Forgets what is in hand of a partition and goes on at an offset, which is committed at once: after a restart the
    /// former position would skip what is written meanwhile, or not be found again.
    fn begin_at(&mut self, slot: usize, offset: i64) -> Result<(), Ended> {
        let Some(assigned) = &self.slots[slot] else {
            return Ok(());
        };
        let (topic, partition) = (assigned.topic.clone(), assigned.partition);
        self.start_again(&topic, partition, Some(Committed::at(offset)));
        self.commit_soon(slot);
        self.read_from(&topic, partition, offset)
    }

    /// Makes the client read a partition again that it has given up, which a seek cannot.
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
    fn ids_decide_and_then_offsets() {
        let id = |bits| Some(TopicId::from_bits(bits));
        let look = |position, read, now| out_of_range(position, 10..20, read, now);
        assert_eq!(look(15, id(1), id(2)), OutOfRange::Recreated);
        assert_eq!(look(25, id(1), None), OutOfRange::TakenForAnother);
        assert_eq!(look(25, None, id(1)), OutOfRange::TakenForAnother);
        assert_eq!(look(7, id(1), id(1)), OutOfRange::DeletedUnread { records: 3 });
        assert_eq!(look(7, None, None), OutOfRange::DeletedUnread { records: 3 });
        assert_eq!(look(21, id(1), id(1)), OutOfRange::Truncated);
        assert_eq!(look(21, None, None), OutOfRange::TakenForAnother);
        assert_eq!(look(20, id(1), id(1)), OutOfRange::InRange);
    }
}
