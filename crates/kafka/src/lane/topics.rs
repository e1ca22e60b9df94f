//! Topics that change while a lane reads them: deleted and created again, or with a log that lacks the next offset.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::thread;

use rdkafka::TopicPartitionList;
use rdkafka::consumer::Consumer as _;
use rdkafka::topic_partition_list::Offset;
use redeliver_kafka_ffi::TopicId;

use super::driver::Driver;
use super::membership::GroupCheck;
use super::positions::ids_of;
use super::state::LaneState;
use super::{CALL, Ended, ROUND};
use crate::processor::Processor;
use crate::topic_watch::TopicState;
use crate::tracker::OffsetTracker;

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

impl Driver<'_> {
    /// Detects topics that were deleted and created again, and makes the client aware of new topics and partitions.
    pub(super) fn check_topics<P: Processor>(&mut self, state: &mut LaneState<P>) -> Result<(), Ended> {
        let lane = &*self.lane;
        let changes = lane.watch.changes();
        if self.seen_changes == Some(changes) {
            return Ok(());
        }
        let fetched = state.assignments.iter().filter(|assigned| assigned.is_fetched);
        let assigned: BTreeMap<Arc<str>, Option<TopicId>> = fetched
            .map(|assigned| (assigned.topic.clone(), assigned.topic_id))
            .collect();
        for (topic, known) in assigned {
            let TopicState::Exists { id: Some(id), .. } = lane.watch.state(&topic) else {
                continue;
            };
            match known {
                Some(known) if known == id => {}
                // The watch may have read the id before the topic was deleted and this partition assigned, so its id may be
                // the older one. The broker's current answer decides.
                Some(known) => {
                    if self
                        .ids_of(&[&topic])
                        .is_ok_and(|ids| ids[&*topic].is_some_and(|now| now != known))
                    {
                        return Err(state.recreated(&topic));
                    }
                    lane.watch.refresh();
                    return Ok(());
                }
                None => return Err(state.exists_again(&topic)),
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
        if has_grown && !lane.settings.is_embedded {
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
    /// old offset. While the ids differ and the broker does not report a changed id yet, nothing is processed.
    pub(super) fn verify_topic_ids<P: Processor>(&mut self, state: &mut LaneState<P>) -> Result<(), Ended> {
        if !self.must_compare_ids {
            return Ok(());
        }
        let assigned = state.assignments.iter().filter(|assigned| assigned.is_fetched);
        let differing: BTreeMap<&str, Option<TopicId>> = assigned
            .filter(|assigned| {
                let seen = self.client_ids.get(&*assigned.topic);
                seen.is_some_and(|seen| Some(*seen) != assigned.topic_id)
            })
            .map(|assigned| (&*assigned.topic, assigned.topic_id))
            .collect();
        if differing.is_empty() {
            self.must_compare_ids = false;
            return Ok(());
        }
        let topics: Vec<&str> = differing.keys().copied().collect();
        let problem = match self.ids_of(&topics) {
            Ok(ids) => {
                let changed = differing.iter().find(|(topic, known)| ids[**topic] != **known);
                if let Some((topic, known)) = changed.map(|(topic, known)| ((*topic).to_owned(), *known)) {
                    return Err(match known {
                        Some(_) => state.recreated(&topic),
                        None => state.exists_again(&topic),
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
        state.unverified(&problem);
        thread::park_timeout(ROUND);
        Ok(())
    }

    fn ids_of(&self, topics: &[&str]) -> Result<BTreeMap<String, Option<TopicId>>, String> {
        ids_of(&self.consumer, &self.lane.watch, topics)
    }

    /// Handles a log that does not have the next offset. No record is skipped without a log line and a count.
    pub(super) fn out_of_range<P: Processor>(
        &mut self,
        slot: usize,
        state: &mut LaneState<P>,
    ) -> Result<(), Ended> {
        let Some(assigned) = state.assignments.get(slot) else {
            return Ok(());
        };
        let (topic, partition) = (assigned.topic.clone(), assigned.partition);
        let in_flight = assigned.in_flight();
        let position = assigned.tracker().and_then(OffsetTracker::position).unwrap_or(0);
        let topic_id = assigned.topic_id.filter(|_| assigned.is_confirmed);
        // The client has stopped reading this partition, so after an error only a new session tries again.
        let ids = self.ids_of(&[&topic]);
        let ids = ids.map_err(|reason| Ended::Broken(format!("cannot read topic ids: {reason}")))?;
        let id = ids.get(&*topic).copied().flatten();
        let (low, high) = self.consumer.fetch_watermarks(&topic, partition, CALL)?;
        match out_of_range(position, low..high, topic_id, id) {
            OutOfRange::Recreated => return Err(state.recreated(&topic)),
            OutOfRange::DeletedUnread { records } => {
                tracing::error!(
                    topic = &*topic,
                    partition,
                    from = position,
                    to = low,
                    records,
                    "records were deleted before they were read, for example by retention; continuing after them"
                );
                state.observer().deleted_unread(&topic, partition, records);
                self.read_from(&topic, partition, Offset::Offset(low))?;
            }
            OutOfRange::Truncated => {
                tracing::error!(
                    topic = &*topic,
                    partition,
                    position,
                    end = high,
                    "log was truncated, for example by an unclean leader election; continuing at its end"
                );
                state.restart_at(slot, high);
                self.read_from(&topic, partition, Offset::Offset(high))?;
            }
            OutOfRange::AssumedRecreated => {
                if let ended @ Ended::Halted(_) = state.ended_by_recreation(&topic) {
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
                state.observer().recreated(&topic, partition, in_flight);
                state.restart_at(slot, low);
                self.read_from(&topic, partition, Offset::Offset(low))?;
            }
            OutOfRange::InRange => self.read_from(&topic, partition, Offset::Offset(position))?,
        }
        Ok(())
    }

    /// Makes the client fetch a partition again after it has stopped. A seek would not.
    pub(super) fn read_from(&mut self, topic: &str, partition: i32, offset: Offset) -> Result<(), Ended> {
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(topic, partition, offset)?;
        let result = if self.lane.settings.is_embedded {
            self.consumer.seek_partitions(list, 5 * CALL).map(drop)
        } else {
            let unassigned = self.consumer.incremental_unassign(&list);
            unassigned.and_then(|()| self.consumer.incremental_assign(&list))
        };
        Ok(result?)
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
