//! Looks up topic ids and committed positions on a separate thread.
//!
//! The client requests stable offsets (`require_stable`), so it returns a position only when no open transaction may still
//! change it. While a peer's transaction is open, the request takes several hundred milliseconds and returns no position
//! for the partitions of that transaction. The lane must not wait for it: other partitions would be late.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionListElem};
use redeliver_kafka_ffi::{TopicId, describe_topics};

use super::CALL;
use super::assignments::{Found, FoundPosition, Lookup, Partition, StoredCommit};
use super::events::Events;
use crate::processor::Waker;
use crate::reader;
use crate::topic_watch::TopicWatch;

/// The thread, with channels to it. Dropping it waits for the lookup in progress.
pub(super) struct Positions {
    /// `None` only while it is dropped.
    lookups: Option<SyncSender<Lookup>>,
    /// Lookups that wait for the one in progress.
    waiting: VecDeque<Lookup>,
    is_busy: bool,
    found: Receiver<Found>,
    thread: Option<JoinHandle<()>>,
}

impl Positions {
    /// Starts the thread. Without topic ids, as on the embedded broker, one unknown position hides the others of its lookup:
    /// all partitions have to be assigned together.
    pub(super) fn start(
        consumer: Arc<BaseConsumer<Events>>,
        watch: TopicWatch,
        waker: Waker,
        has_topic_ids: bool,
    ) -> io::Result<Self> {
        let (lookups, received) = sync_channel::<Lookup>(1);
        let (sender, found) = sync_channel(1);
        let source = Source {
            consumer,
            watch,
            has_topic_ids,
        };
        let thread = thread::Builder::new()
            .name("positions".to_owned())
            .spawn(move || {
                for lookup in received {
                    if sender.send(source.look_up(lookup)).is_err() {
                        return;
                    }
                    waker.wake();
                }
            })?;
        Ok(Self {
            lookups: Some(lookups),
            waiting: VecDeque::new(),
            is_busy: false,
            found,
            thread: Some(thread),
        })
    }

    /// Begins a lookup. [`Positions::take`] returns the answer once the lane has been woken.
    pub(super) fn look_up(&mut self, lookup: Lookup) {
        self.waiting.push_back(lookup);
        self.send();
    }

    /// An answer that has arrived.
    pub(super) fn take(&mut self) -> Option<Found> {
        let found = self.found.try_recv().ok()?;
        self.is_busy = false;
        self.send();
        Some(found)
    }

    fn send(&mut self) {
        if self.is_busy {
            return;
        }
        if let (Some(lookups), Some(lookup)) = (&self.lookups, self.waiting.pop_front()) {
            // The thread ends only when this is dropped.
            self.is_busy = lookups.send(lookup).is_ok();
        }
    }
}

impl Drop for Positions {
    fn drop(&mut self) {
        // Closing the channel ends the thread.
        self.lookups = None;
        if let Some(thread) = self.thread.take() {
            // A panic has already been reported.
            let _ = thread.join();
        }
    }
}

struct Source {
    consumer: Arc<BaseConsumer<Events>>,
    watch: TopicWatch,
    has_topic_ids: bool,
}

impl Source {
    fn look_up(&self, lookup: Lookup) -> Found {
        let Lookup { number, partitions } = lookup;
        match self.find(&partitions) {
            Ok(positions) => Found {
                number,
                positions,
                is_answered: true,
            },
            Err(reason) => Found {
                number,
                positions: partitions
                    .into_iter()
                    .map(|partition| (partition, Err(reason.clone())))
                    .collect(),
                is_answered: false,
            },
        }
    }

    #[expect(clippy::type_complexity, reason = "the type of a field of `Found`")]
    fn find(
        &self,
        partitions: &[Partition],
    ) -> Result<Vec<(Partition, Result<FoundPosition, String>)>, String> {
        // The ids are read before the offsets. If the topic is created again in between, an old offset meets the old id, and
        // the next check of the topics detects the change. In the other order, an old offset without a fingerprint would be
        // attributed to the new topic.
        let ids = self.topic_ids(partitions)?;
        let mut list = TopicPartitionList::new();
        for (topic, partition) in partitions {
            list.add_partition(topic, *partition);
        }
        let list = self
            .consumer
            .committed_offsets(list, CALL)
            .map_err(|error| format!("cannot read committed offsets: {error}"))?;
        let found = partitions.iter().map(|(topic, partition)| {
            let element = list.find_partition(topic, *partition).ok_or_else(|| {
                format!("the broker did not return the committed offset of {topic}/{partition}")
            })?;
            element.error().map_err(|error| {
                format!("cannot read the committed offset of {topic}/{partition}: {error}")
            })?;
            Ok(FoundPosition {
                topic_id: ids.get(&**topic).copied().flatten(),
                stored: stored(&element),
            })
        });
        let found: Vec<Result<FoundPosition, String>> = found.collect();
        if let Some(Err(reason)) = found.iter().find(|found| !self.has_topic_ids && found.is_err()) {
            return Err(reason.clone());
        }
        Ok(partitions.iter().cloned().zip(found).collect())
    }

    /// The ids of the topics of these partitions. They are requested from the broker because those of the watch may be
    /// older than the assignment.
    fn topic_ids(&self, partitions: &[Partition]) -> Result<BTreeMap<String, Option<TopicId>>, String> {
        // The embedded broker answers no administrative requests, and its topics are never deleted.
        if !self.has_topic_ids {
            return Ok(BTreeMap::new());
        }
        let topics: BTreeSet<&str> = partitions.iter().map(|(topic, _)| &**topic).collect();
        let topics: Vec<&str> = topics.into_iter().collect();
        ids_of(&self.consumer, &self.watch, &topics)
            .map_err(|reason| format!("cannot read topic ids: {reason}"))
    }
}

fn stored(element: &TopicPartitionListElem<'_>) -> StoredCommit {
    match element.offset() {
        Offset::Offset(offset) => StoredCommit {
            offset: Some(offset),
            metadata: reader::metadata(element),
        },
        _ => StoredCommit::default(),
    }
}

/// The current ids of topics, from the broker; `None` for a missing topic.
pub(super) fn ids_of(
    consumer: &BaseConsumer<Events>,
    watch: &TopicWatch,
    topics: &[&str],
) -> Result<BTreeMap<String, Option<TopicId>>, String> {
    let found = describe_topics(consumer.client(), topics, CALL).map_err(|error| error.to_string())?;
    let id_of = |topic: &&str| match found.get(*topic) {
        Some(Ok(found)) => Ok(((*topic).to_owned(), found.id)),
        Some(Err(error)) => Err(format!("topic `{topic}`: {error}")),
        // A broker that has just started may not know the topic yet. The watch confirms that a topic is missing.
        None if watch.state(topic).is_missing() => Ok(((*topic).to_owned(), None)),
        None => Err(format!("the broker does not know topic `{topic}`")),
    };
    topics.iter().map(id_of).collect()
}
