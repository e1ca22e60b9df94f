//! Looks up topic ids and committed positions on a separate thread.
//!
//! The client requests stable offsets (`require_stable`), so it returns a position only when no open transaction may still
//! change it. While a transaction of a peer is open, a request for any of its partitions is repeated until it times out,
//! and returns no position at all (`rd_kafka_handle_OffsetFetch` in librdkafka 2.12). So after a timeout, the positions are
//! requested one by one. The lane does not wait for that: its other partitions would be late.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionListElem};
use redeliver_kafka_ffi::TopicId;

use super::CALL;
use super::assignments::{Found, FoundPosition, Lookup, Partition, StoredCommit};
use super::events::Events;
use super::writer::Disconnected;
use crate::describe::describe_topics;
use crate::groups;
use crate::processor::Waker;
use crate::topic_watch::TopicWatch;

/// Timeout of a request for one position.
const SINGLE_CALL: Duration = Duration::from_millis(250);

enum Answer {
    Found(Found),
    /// The lookup has ended.
    Done,
}

/// The thread, with channels to it. Dropping it waits for the lookup in progress.
pub(super) struct Positions {
    /// `None` only while this is dropped.
    lookups: Option<SyncSender<Lookup>>,
    /// Lookups that wait for the one in progress.
    waiting: VecDeque<Lookup>,
    is_busy: bool,
    answers: Option<Receiver<Answer>>,
    thread: Option<JoinHandle<()>>,
}

impl Positions {
    /// Starts the thread. The embedded broker assigns all partitions together.
    pub(super) fn start(
        consumer: Arc<BaseConsumer<Events>>,
        watch: TopicWatch,
        waker: Waker,
        is_embedded: bool,
    ) -> io::Result<Self> {
        let (lookups, received) = sync_channel::<Lookup>(1);
        let (sender, answers) = sync_channel(1);
        let source = Source {
            consumer,
            watch,
            is_embedded,
        };
        let thread = thread::Builder::new()
            .name("positions".to_owned())
            .spawn(move || {
                for lookup in received {
                    let is_read = source.look_up(lookup, |answer| {
                        let sent = sender.send(answer);
                        waker.wake();
                        sent.is_ok()
                    });
                    if !is_read {
                        return;
                    }
                }
            })?;
        Ok(Self {
            lookups: Some(lookups),
            waiting: VecDeque::new(),
            is_busy: false,
            answers: Some(answers),
            thread: Some(thread),
        })
    }

    /// Begins a lookup. [`Positions::take`] returns the answers once the lane has been woken.
    pub(super) fn look_up(&mut self, lookup: Lookup) {
        self.waiting.push_back(lookup);
        self.send();
    }

    /// An answer that has arrived.
    ///
    /// # Errors
    /// If the thread has panicked.
    pub(super) fn take(&mut self) -> Result<Option<Found>, Disconnected> {
        let Some(answers) = &self.answers else {
            return Ok(None);
        };
        match answers.try_recv() {
            Ok(Answer::Found(found)) => Ok(Some(found)),
            Ok(Answer::Done) => {
                self.is_busy = false;
                self.send();
                Ok(None)
            }
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(Disconnected),
        }
    }

    fn send(&mut self) {
        if self.is_busy {
            return;
        }
        if let (Some(lookups), Some(lookup)) = (&self.lookups, self.waiting.pop_front()) {
            // If the thread has panicked, `take` reports it.
            self.is_busy = lookups.send(lookup).is_ok();
        }
    }
}

impl Drop for Positions {
    fn drop(&mut self) {
        // Closing the channels ends the thread, even if it waits for its answer to be read.
        self.lookups = None;
        self.answers = None;
        if let Some(thread) = self.thread.take() {
            // A panic has already been reported.
            let _ = thread.join();
        }
    }
}

struct Source {
    consumer: Arc<BaseConsumer<Events>>,
    watch: TopicWatch,
    is_embedded: bool,
}

impl Source {
    /// Passes the answers to a lookup to `send`, as they arrive. Returns false as soon as `send` does.
    fn look_up(&self, lookup: Lookup, mut send: impl FnMut(Answer) -> bool) -> bool {
        let Lookup {
            number,
            partitions,
            is_whole,
        } = lookup;
        let mut answer = |partitions: &[Partition], result: Result<Vec<FoundPosition>, String>| {
            let is_answered = result.is_ok();
            let positions = match result {
                Ok(positions) => partitions
                    .iter()
                    .cloned()
                    .zip(positions.into_iter().map(Ok))
                    .collect(),
                Err(reason) => partitions
                    .iter()
                    .map(|p| (p.clone(), Err(reason.clone())))
                    .collect(),
            };
            send(Answer::Found(Found {
                number,
                positions,
                is_answered,
            }))
        };
        // The ids are read before the offsets. If the topic is created again in between, an old offset meets the old id, and
        // the next check of the topics detects the change. In the other order, an old offset without a fingerprint would be
        // attributed to the new topic.
        let is_read = match self.topic_ids(&partitions) {
            Err(reason) => answer(&partitions, Err(reason)),
            Ok(ids) => {
                let result = self.positions(&partitions, &ids, CALL);
                if result.is_ok() || is_whole || self.is_embedded {
                    answer(&partitions, result)
                } else {
                    partitions
                        .chunks(1)
                        .all(|partition| answer(partition, self.positions(partition, &ids, SINGLE_CALL)))
                }
            }
        };
        is_read && send(Answer::Done)
    }

    fn positions(
        &self,
        partitions: &[Partition],
        ids: &BTreeMap<String, Option<TopicId>>,
        timeout: Duration,
    ) -> Result<Vec<FoundPosition>, String> {
        let mut list = TopicPartitionList::new();
        for (topic, partition) in partitions {
            list.add_partition(topic, *partition);
        }
        let failed = |error: &dyn std::fmt::Display| match partitions {
            [(topic, partition)] => {
                format!("cannot read the committed offset of {topic}/{partition}: {error}")
            }
            _ => format!("cannot read committed offsets: {error}"),
        };
        let list = self
            .consumer
            .committed_offsets(list, timeout)
            .map_err(|error| failed(&error))?;
        let position = |(topic, partition): &Partition| {
            let element = list
                .find_partition(topic, *partition)
                .ok_or_else(|| failed(&"the broker did not return it"))?;
            element.error().map_err(|error| failed(&error))?;
            Ok(FoundPosition {
                topic_id: ids.get(&**topic).copied().flatten(),
                stored: stored(&element),
            })
        };
        partitions.iter().map(position).collect()
    }

    /// The ids of the topics of these partitions. They are requested from the broker because those of the watch may be
    /// older than the assignment.
    fn topic_ids(&self, partitions: &[Partition]) -> Result<BTreeMap<String, Option<TopicId>>, String> {
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
            metadata: groups::any_metadata(element),
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
