//! Actions on single records that wait in tiers: what operators have asked for, and what became of it, see
//! `docs/adr/0057-actions-on-single-waiting-records.md`.
//!
//! Servers write requests by compare-and-set. The lane that owns the partition of a record writes its outcome, in the transaction that acts on it.

mod request;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::convert::Infallible;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use redeliver_core::content::ContentHash;
use redeliver_core::{Headers, Output, Position, Record, Timestamp};
use redeliver_kafka::{TopicId, Waker};
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::{Message as _, v1};
use redeliver_store::{Document as _, Replica, State, Table};

pub use redeliver_proto::v1::WaitingActionState;
pub use request::{Invalid, MAX_RECORDS, NewRequest, Passed, Refused, Request, is_request_id};

use crate::host::Host;

/// What is done with a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// It is retried now.
    Retry,
    /// It becomes a dead letter.
    Dead,
    /// It waits on with other contents.
    Edit,
}

/// A partition of a tier's topic.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TierPartition {
    /// The topic.
    pub topic: Arc<str>,
    /// Its number.
    pub partition: i32,
    /// The id of the topic; `None` if the broker has no ids.
    pub topic_id: Option<TopicId>,
}

impl TierPartition {
    fn done_key(&self, offset: i64) -> String {
        let Self { topic, partition, .. } = self;
        let id = self
            .topic_id
            .map_or_else(|| "-".to_owned(), |id| format!("{:032x}", id.bits()));
        format!("done/{id}/{topic}/{partition}/{offset}")
    }

    fn parse_done_key(key: &str) -> Option<(Self, i64)> {
        let mut parts = key.strip_prefix("done/")?.split('/');
        let topic_id = match parts.next()? {
            "-" => None,
            id => Some(TopicId::from_bits(u128::from_str_radix(id, 16).ok()?)),
        };
        let partition = Self {
            topic_id,
            topic: parts.next()?.into(),
            partition: parts.next()?.parse().ok()?,
        };
        let offset = parts.next()?.parse().ok()?;
        parts.next().is_none().then_some((partition, offset))
    }
}

/// What became of a record.
#[derive(Clone, Debug, PartialEq)]
pub struct Done {
    /// The id of the request.
    pub request: String,
    /// The state.
    pub state: WaitingActionState,
    /// Where it was written; `None` if that is not known.
    pub written: Option<Position>,
    /// What went wrong; empty if nothing did.
    pub problem: String,
    /// Whether the record was written elsewhere, so that its tier skips it.
    pub is_moved: bool,
    /// The hash of the record's content: another record at its offset is not skipped. `None` if it is not known.
    pub content: Option<ContentHash>,
}

impl Done {
    /// The record of an outcome.
    #[must_use]
    pub fn output(&self, topic: &Arc<str>, of: &TierPartition, offset: i64, now: Timestamp) -> Output {
        let done = v1::WaitingDone {
            request_id: self.request.clone(),
            state: self.state.into(),
            written: self.written.as_ref().map(v1::Position::from),
            problem: self.problem.clone(),
            time: Some(to_timestamp(now)),
            moved: self.is_moved,
            content_hash: self
                .content
                .map(|hash| Bytes::copy_from_slice(&hash))
                .unwrap_or_default(),
        };
        Output {
            topic: topic.clone(),
            partition: Some(0),
            key: Some(of.done_key(offset).into()),
            value: Some(Bytes::from(done.encode_to_vec())),
            headers: Headers::new(),
        }
    }
}

/// Everything in the topic. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WaitingActions {
    table: Table<Request>,
    partitions: BTreeMap<TierPartition, Arc<PartitionActions>>,
}

/// Actions on the records of a partition, by their offsets.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PartitionActions {
    /// Requests without an outcome. If there are several for a record, the first one.
    pub pending: BTreeMap<i64, Arc<Request>>,
    /// Outcomes.
    pub done: BTreeMap<i64, Arc<v1::WaitingDone>>,
    /// Further requests about records with a pending one, in their order.
    others: BTreeMap<i64, Vec<Arc<Request>>>,
}

impl WaitingActions {
    /// The request with this id.
    #[must_use]
    pub fn request(&self, id: &str) -> Option<&Arc<Request>> {
        self.table.get(id)
    }

    /// All requests that can be read.
    pub fn requests(&self) -> impl Iterator<Item = &Arc<Request>> {
        self.table.documents().map(|(_, request)| request)
    }

    /// Whether there are no requests and no outcomes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.partitions.is_empty()
    }

    /// The actions on records of this partition.
    #[must_use]
    pub fn of_partition(&self, partition: &TierPartition) -> Option<&Arc<PartitionActions>> {
        self.partitions.get(partition)
    }

    /// The outcome of a record.
    #[must_use]
    pub fn done(&self, partition: &TierPartition, offset: i64) -> Option<&Arc<v1::WaitingDone>> {
        self.partitions.get(partition)?.done.get(&offset)
    }

    /// The outcome of the record at a position, if it was written elsewhere. `ids`: of the topics.
    #[must_use]
    pub fn moved(
        &self,
        position: &Position,
        ids: &BTreeMap<String, TopicId>,
    ) -> Option<&Arc<v1::WaitingDone>> {
        let partition = TierPartition {
            topic: position.topic.clone(),
            partition: position.partition,
            topic_id: ids.get(&*position.topic).copied(),
        };
        self.done(&partition, position.offset).filter(|done| done.moved)
    }

    /// Whether the record at a position was written elsewhere. `ids`: of the topics.
    #[must_use]
    pub fn is_moved(&self, position: &Position, ids: &BTreeMap<String, TopicId>) -> bool {
        self.moved(position, ids).is_some()
    }

    /// The same partition of previous topics of this name, with requests.
    pub fn previous<'a>(
        &'a self,
        of: &'a TierPartition,
    ) -> impl Iterator<Item = (&'a TierPartition, &'a Arc<PartitionActions>)> {
        let from = TierPartition {
            topic_id: None,
            ..of.clone()
        };
        let same = self.partitions.range(from..);
        let same = same.take_while(|(other, _)| other.topic == of.topic && other.partition == of.partition);
        same.filter(|(other, _)| {
            let ids = other.topic_id.zip(of.topic_id);
            ids.is_some_and(|(other, own)| other != own)
        })
    }

    fn update(&mut self, partition: &TierPartition, update: impl FnOnce(&mut PartitionActions)) {
        let actions = Arc::make_mut(self.partitions.entry(partition.clone()).or_default());
        update(actions);
        if actions.pending.is_empty() && actions.done.is_empty() {
            self.partitions.remove(partition);
        }
    }

    fn apply_request(&mut self, id: &str, record: &Record) {
        let before = self.table.get(id).cloned();
        for (partition, offsets) in before.iter().flat_map(|before| before.partitions()) {
            self.update(&partition, |actions| {
                for offset in offsets {
                    actions.forget(*offset, id);
                }
            });
        }
        self.table.apply_record(record);
        // What a newer version has asked for may be something else.
        let request = self.table.get(id).cloned().filter(|request| !request.is_newer());
        let Some(request) = request else { return };
        for (partition, offsets) in request.partitions() {
            self.update(&partition, |actions| {
                for offset in offsets {
                    actions.ask(*offset, request.clone());
                }
            });
        }
    }
}

impl PartitionActions {
    /// A request about a record, after all others.
    fn ask(&mut self, offset: i64, request: Arc<Request>) {
        if self.done.contains_key(&offset) {
            return;
        }
        match self.pending.entry(offset) {
            Entry::Occupied(_) => self.others.entry(offset).or_default().push(request),
            Entry::Vacant(vacant) => {
                vacant.insert(request);
            }
        }
    }

    /// A request is gone, so the next one about the record counts. Outcomes are removed only with the last request about their record.
    fn forget(&mut self, offset: i64, id: &str) {
        let first = self.pending.remove(&offset).into_iter();
        let requests = first.chain(self.others.remove(&offset).unwrap_or_default());
        for request in requests.filter(|request| request.id() != id) {
            self.ask(offset, request);
        }
    }
}

impl State for WaitingActions {
    type Document = Request;

    const TOPIC: &'static str = "actions topic";
    const NAME: &'static str = "waiting_actions";
    // A tier that does not know what was acted on would write it again.
    const IS_OPTIONAL: bool = false;

    fn table(&self) -> &Table<Request> {
        &self.table
    }

    fn apply(&mut self, record: &Record) {
        let key = record
            .key
            .as_deref()
            .and_then(|key| std::str::from_utf8(key).ok());
        if let Some((partition, offset)) = key.and_then(TierPartition::parse_done_key) {
            let value = record.value.clone();
            self.update(&partition, |actions| {
                let Some(value) = value else {
                    actions.done.remove(&offset);
                    return;
                };
                // Somebody has acted on the record, even if it is not readable how: it is not written twice.
                let unreadable = v1::WaitingDone {
                    moved: true,
                    ..v1::WaitingDone::default()
                };
                let done = v1::WaitingDone::decode(value).unwrap_or(unreadable);
                actions.pending.remove(&offset);
                actions.others.remove(&offset);
                actions.done.insert(offset, Arc::new(done));
            });
            return;
        }
        match key.and_then(Request::parse_key) {
            Some(id) => self.apply_request(&id, record),
            None => self.table.apply_record(record),
        }
    }

    fn log_changes(&self, topic: &str, before: &Self) {
        let partitions = before.partitions.len();
        // Requests are removed one by one. If all are gone at once, the topic was created again.
        if partitions > 0 && self.partitions.is_empty() {
            tracing::error!(
                topic,
                partitions,
                "outcomes of waiting records lost; tiers may write records again that were acted on"
            );
        }
    }
}

/// The topic as a tier follows it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Actions {
    replica: Replica<WaitingActions>,
    /// The lanes that look at it.
    wakers: Arc<Mutex<Vec<Waker>>>,
}

impl Actions {
    /// What was read last. The same [`Arc`] is returned until something changes. Does not block.
    #[must_use]
    pub fn state(&self) -> Arc<WaitingActions> {
        self.replica.state().unwrap_or_default()
    }

    /// Whether [`Actions::state`] contains everything that was committed before this time. If not, has the topic read now.
    #[must_use]
    pub fn are_known_since(&self, time: Instant) -> bool {
        self.replica.is_read_since(time)
    }

    /// Wakes a lane with each change.
    pub fn wake(&self, waker: &Waker) {
        self.wakers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(waker.clone());
    }

    /// Without a topic, for tests.
    #[must_use]
    pub fn fixed(state: WaitingActions) -> (Self, tokio::sync::watch::Sender<Option<Arc<WaitingActions>>>) {
        let (replica, sender) = Replica::fixed(Some(state));
        (Self::of(replica), sender)
    }

    fn of(replica: Replica<WaitingActions>) -> Self {
        Self {
            replica,
            wakers: Arc::default(),
        }
    }
}

impl Host {
    /// The actions on waiting records. The first call follows their topic and waits until it was read; `None` if the process shuts down before that. While
    /// their topic or the audit topic cannot be written, the process is ready, and says so. Call it after [`Host::ensure_topics`].
    ///
    /// # Errors
    /// When a thread or the watch of the topics cannot be started.
    pub async fn waiting_actions(&mut self) -> io::Result<Option<Actions>> {
        let actions = match self.shared() {
            Some(actions) => actions,
            None => {
                let topic = self.config.waiting_actions_topic();
                let written = [topic.clone(), self.config.audit_topic()];
                let replica = self.follow_and_write(&topic, &written)?;
                self.add_waiting_actions(replica)
            }
        };
        let is_known = actions.replica.wait_known(self.tasks.shutdown()).await;
        Ok(is_known.then_some(actions))
    }

    /// The same for a process without tiers: it does not wait for the topic, and is ready without it.
    ///
    /// # Errors
    /// See [`Host::waiting_actions`].
    pub fn waiting_actions_aside(&mut self) -> io::Result<Replica<WaitingActions>> {
        if let Some(Actions { replica, .. }) = self.shared() {
            return Ok(replica);
        }
        let replica = self.follow_aside(&self.config.waiting_actions_topic())?;
        Ok(self.add_waiting_actions(replica).replica)
    }

    fn add_waiting_actions(&mut self, replica: Replica<WaitingActions>) -> Actions {
        let mut changes = replica.changes();
        let actions = Actions::of(replica);
        let wakers = actions.wakers.clone();
        self.tasks.spawn("waiting-actions", async move {
            while changes.changed().await.is_ok() {
                let wakers = wakers.lock().unwrap_or_else(PoisonError::into_inner);
                wakers.iter().for_each(Waker::wake);
            }
            Ok::<(), Infallible>(())
        });
        self.share(actions)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Retry => "retry",
            Self::Dead => "dead",
            Self::Edit => "edit",
        })
    }
}

/// The transactional id of all writers of requests. It depends only on the topic: writers with different ids would not fence each other.
#[must_use]
pub fn transactional_id(topic: &str) -> String {
    format!("redeliver-waiting-actions-{topic}")
}
