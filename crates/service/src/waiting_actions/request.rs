//! Requests about waiting records, and how they are added.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::backoff::MAX_WAIT;
use redeliver_core::pipeline::parse_retry_topic;
use redeliver_core::{Position, Timestamp};
use redeliver_kafka::TopicId;
use redeliver_kafka::backlog::GroupPositions;
use redeliver_proto::convert::time;
use redeliver_proto::{Message as _, has_unknown_fields, v1};
use redeliver_store::{Change, ChangeId, Decision, Document};

use super::{Action, TierPartition, WaitingActions};
use crate::audit::{self, AuditEntry, AuditLog, MAX_IDS};
use crate::edit::Edit;
use crate::identity::CallerName;

/// The maximum number of records of a request.
pub const MAX_RECORDS: usize = 10_000;
/// The maximum number of records of all requests: each tier holds them in memory.
const MAX_TOTAL: usize = 100_000;
/// The maximum size of all requests, in bytes.
const MAX_BYTES: usize = 32 << 20;
/// A request is removed after this time, once its records are completed. Until then, its id has no second effect.
const KEPT: Duration = Duration::from_secs(86_400);
const MAX_ID: usize = 100;

/// What an operator has asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    id: String,
    record: v1::WaitingRequestRecord,
    action: Action,
    edit: Option<Edit>,
    is_newer: bool,
}

/// The value of a request cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is malformed")]
pub struct Invalid;

/// Whether a text can be the id of a request.
#[must_use]
pub fn is_request_id(id: &str) -> bool {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    !id.is_empty() && id.len() <= MAX_ID && id.bytes().all(is_valid)
}

impl Request {
    /// A request from its record.
    ///
    /// # Errors
    /// If the record is not valid.
    pub fn read(id: &str, record: v1::WaitingRequestRecord) -> Result<Self, Invalid> {
        let action = match record.action() {
            v1::WaitingAction::Retry => Action::Retry,
            v1::WaitingAction::Dead => Action::Dead,
            v1::WaitingAction::Edit => Action::Edit,
            v1::WaitingAction::Unspecified => return Err(Invalid),
        };
        let edit = record
            .edit
            .clone()
            .map(Edit::read)
            .transpose()
            .map_err(|_| Invalid)?;
        let has_ids = record
            .partitions
            .iter()
            .all(|of| matches!(of.topic_id.len(), 0 | 16));
        if edit.is_some() != (action == Action::Edit) || !has_ids {
            return Err(Invalid);
        }
        Ok(Self {
            id: id.to_owned(),
            record,
            action,
            edit,
            is_newer: false,
        })
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// What to do.
    #[must_use]
    pub fn action(&self) -> Action {
        self.action
    }

    /// What differs, of an edit.
    #[must_use]
    pub fn edit(&self) -> Option<&Edit> {
        self.edit.as_ref()
    }

    /// Who has asked for it.
    #[must_use]
    pub fn by(&self) -> CallerName {
        CallerName::recorded(&self.record.by)
    }

    /// Why.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.record.reason
    }

    /// When.
    #[must_use]
    pub fn at(&self) -> Timestamp {
        time(self.record.at).unwrap_or(Timestamp::from_millis(0))
    }

    /// The record of its value.
    #[must_use]
    pub fn record(&self) -> &v1::WaitingRequestRecord {
        &self.record
    }

    /// Its records, by partition.
    pub fn partitions(&self) -> impl Iterator<Item = (TierPartition, &[i64])> {
        self.record.partitions.iter().map(|of| {
            let id = <[u8; 16]>::try_from(&of.topic_id[..]).ok();
            let partition = TierPartition {
                topic: of.topic.as_str().into(),
                partition: of.partition,
                topic_id: id.map(|id| TopicId::from_bits(u128::from_be_bytes(id))),
            };
            (partition, &of.offsets[..])
        })
    }

    /// The number of its records.
    #[must_use]
    pub fn count(&self) -> usize {
        self.record.partitions.iter().map(|of| of.offsets.len()).sum()
    }
}

impl Document for Request {
    type Key = String;
    type Invalid = Invalid;

    const IF_UNREADABLE: &'static str = ", and ignored";
    const IF_NEWER: &'static str = ", and ignored";

    fn parse_key(key: &str) -> Option<String> {
        let id = key.strip_prefix("request/")?;
        is_request_id(id).then(|| id.to_owned())
    }

    fn record_key(id: &String) -> String {
        format!("request/{id}")
    }

    fn decode(id: &String, value: &Bytes) -> Result<Self, Invalid> {
        let record = v1::WaitingRequestRecord::decode(value.clone()).map_err(|_| Invalid)?;
        let is_newer = has_unknown_fields(value, &record);
        Ok(Self {
            is_newer,
            ..Self::read(id, record)?
        })
    }

    fn revision(&self) -> u64 {
        1
    }

    fn change_id(&self) -> &Bytes {
        &self.record.change_id
    }

    fn is_newer(&self) -> bool {
        self.is_newer
    }
}

/// Which records their tiers have left behind.
#[derive(Debug, Default)]
pub struct Passed {
    /// The ids of the topics that exist.
    pub ids: BTreeMap<String, TopicId>,
    /// The positions of the groups of the tiers.
    pub positions: GroupPositions,
    /// Topics that do not exist.
    pub missing: BTreeSet<String>,
}

impl Passed {
    /// Nothing can write the record again: the group has completed it, or the topic is another one or gone.
    fn contains(&self, partition: &TierPartition, offset: i64) -> bool {
        if self.missing.contains(&*partition.topic) {
            return true;
        }
        let current = self.ids.get(&*partition.topic);
        if let (Some(known), Some(current)) = (partition.topic_id, current)
            && known != *current
        {
            return true;
        }
        let position = Position {
            topic: partition.topic.clone(),
            partition: partition.partition,
            offset,
        };
        current.is_some() && !self.positions.is_unread(&position)
    }
}

/// Adds a request.
#[derive(Debug)]
pub struct NewRequest {
    /// The request, without the id of a change.
    pub request: Request,
    /// What makes room for it.
    pub passed: Arc<Passed>,
    /// Where it is recorded, in the same transaction.
    pub audit: AuditLog,
}

/// Why a request is refused. Nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// A request that differs has the same id.
    #[error("was used for another request")]
    IdUsed,
    /// There is no room.
    #[error(
        "the requests are about more than {MAX_TOTAL} records or take more than {MAX_BYTES} bytes, or those of a pipeline more than half of what others leave; they are removed a day later, once tiers have passed their records"
    )]
    TooMany,
}

impl Change for NewRequest {
    type State = WaitingActions;
    type Refused = Refused;

    fn key(&self, _id: ChangeId) -> String {
        self.request.id.clone()
    }

    fn expected_revision(&self) -> Option<u64> {
        None
    }

    fn decide(&self, state: &WaitingActions, id: ChangeId) -> Result<Decision<WaitingActions>, Refused> {
        let Self { request, audit, .. } = self;
        if let Some(known) = state.request(&request.id) {
            let (known, own) = (&known.record, &request.record);
            let is_same = known.request_hash == own.request_hash && known.by == own.by;
            return is_same
                .then(|| Decision::Unchanged(request.id.clone()))
                .ok_or(Refused::IdUsed);
        }
        let removed = make_room(state, request, &self.passed)?;
        let mut document = request.clone();
        document.record.change_id = id.bytes();
        let value = Bytes::from(document.record.encode_to_vec());
        let records = [(Request::record_key(&request.id), Some(value))];
        let ids = request.partitions().flat_map(|(partition, offsets)| {
            offsets
                .iter()
                .map(move |offset| format!("{}/{}/{offset}", partition.topic, partition.partition))
        });
        let details = request
            .edit
            .as_ref()
            .map_or_else(|| request.action.to_string(), Edit::names);
        let entry = AuditEntry {
            target: request.id.clone(),
            reason: request.record.reason.clone(),
            details,
            count: request.count() as u64,
            ids: ids.take(MAX_IDS).collect(),
            id: id.0,
            ..AuditEntry::new(request.by(), audit::Action::ActOnWaiting)
        };
        Ok(Decision::Write {
            records: records
                .into_iter()
                .chain(removed.into_iter().map(|key| (key, None)))
                .collect(),
            entry: audit.record(entry, request.at()),
            document,
        })
    }

    fn log(&self, request: &Request) {
        let (id, action, records) = (request.id(), request.action, request.count());
        tracing::info!(id, %action, records, by = %request.by(), "waiting records requested");
    }
}

/// The keys to remove for a new request: those of what is old.
fn make_room(state: &WaitingActions, new: &Request, passed: &Passed) -> Result<Vec<String>, Refused> {
    let is_old = |request: &Request| {
        let age = new.at().since(request.at());
        // After the longest wait, no tier has its records any more.
        let has_passed = || {
            let mut all = request.partitions();
            age > MAX_WAIT.duration() + KEPT
                || all.all(|(partition, offsets)| {
                    offsets.iter().all(|offset| passed.contains(&partition, *offset))
                })
        };
        age > KEPT && has_passed()
    };
    let requests = state.requests().map(|request| &**request);
    let (mut old, mut kept): (Vec<&Request>, Vec<&Request>) = requests.partition(|request| is_old(request));
    old.sort_by_key(|request| request.at());
    kept.push(new);
    if is_over_limit(&kept) || exceeds_share(&kept, new) {
        return Err(Refused::TooMany);
    }
    // The outcome of a record stays as long as a request is about it, which would be pending without it.
    let mut named: BTreeMap<TierPartition, BTreeSet<i64>> = BTreeMap::new();
    for (partition, offsets) in kept.iter().flat_map(|request| request.partitions()) {
        if !old.is_empty() {
            named.entry(partition).or_default().extend(offsets);
        }
    }
    let mut keys = BTreeSet::new();
    for (partition, offsets) in old.iter().flat_map(|request| request.partitions()) {
        let is_named = |offset: &i64| named.get(&partition).is_some_and(|named| named.contains(offset));
        let known = offsets
            .iter()
            .filter(|offset| state.done(&partition, **offset).is_some());
        let forgotten = known.filter(|offset| !is_named(offset));
        keys.extend(forgotten.map(|offset| partition.done_key(*offset)));
    }
    let requests = old.iter().map(|request| Request::record_key(&request.id));
    Ok(requests.chain(keys).collect())
}

fn is_over_limit(kept: &[&Request]) -> bool {
    let records: usize = kept.iter().map(|request| request.count()).sum();
    let bytes: usize = kept.iter().map(|request| request.record.encoded_len()).sum();
    records > MAX_TOTAL || bytes > MAX_BYTES
}

/// Whether a pipeline of a new request, which is one of those that are kept, has more than half of what the others leave. So none takes the room of all.
fn exceeds_share(kept: &[&Request], new: &Request) -> bool {
    let named: Vec<(TierPartition, &[i64])> = new.partitions().collect();
    let pipelines: BTreeSet<&str> = named.iter().map(|(of, _)| pipeline_of(&of.topic)).collect();
    pipelines.iter().any(|pipeline| {
        let (mut own, mut others) = ((0, 0), (0, 0));
        for request in kept {
            let of_pipeline = request.record.partitions.iter();
            let of_pipeline = of_pipeline.filter(|of| pipeline_of(&of.topic) == *pipeline);
            let records: usize = of_pipeline.map(|of| of.offsets.len()).sum();
            let bytes = request.record.encoded_len();
            own.0 += records;
            others.0 += request.count() - records;
            *(if records > 0 { &mut own.1 } else { &mut others.1 }) += bytes;
        }
        own.0 > MAX_TOTAL.saturating_sub(others.0) / 2 || own.1 > MAX_BYTES.saturating_sub(others.1) / 2
    })
}

/// The pipeline of a tier's topic.
fn pipeline_of(topic: &str) -> &str {
    parse_retry_topic(topic).map_or(topic, |(pipeline, _)| pipeline)
}

#[cfg(test)]
mod tests {
    use redeliver_core::Record;
    use redeliver_proto::convert::to_timestamp;
    use redeliver_runtime::Config;
    use redeliver_store::State as _;

    use super::super::Done;
    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);

    fn partition(topic_id: u128) -> TierPartition {
        TierPartition {
            topic: "p-retry-1m".into(),
            partition: 3,
            topic_id: Some(TopicId::from_bits(topic_id)),
        }
    }

    fn request(id: &str, offsets: &[i64], at: Timestamp) -> Request {
        let record = v1::WaitingRequestRecord {
            action: v1::WaitingAction::Retry.into(),
            by: "token:ann".to_owned(),
            at: Some(to_timestamp(at)),
            request_hash: Bytes::copy_from_slice(format!("{offsets:?}").as_bytes()),
            partitions: vec![v1::WaitingPartition {
                topic: "p-retry-1m".to_owned(),
                topic_id: Bytes::copy_from_slice(&7_u128.to_be_bytes()),
                partition: 3,
                offsets: offsets.to_vec(),
            }],
            ..v1::WaitingRequestRecord::default()
        };
        Request::read(id, record).unwrap()
    }

    fn written(key: String, value: Option<Bytes>) -> Record {
        Record {
            key: Some(key.into()),
            value,
            ..redeliver_testkit::record_at("actions", 0, 0)
        }
    }

    fn change(request: Request, passed: Passed) -> NewRequest {
        NewRequest {
            request,
            passed: passed.into(),
            audit: AuditLog::new(&Config::default(), "dlq-inspector"),
        }
    }

    /// Makes a change, and returns the keys that it removes.
    fn add(state: &mut WaitingActions, change: &NewRequest) -> Result<Vec<String>, Refused> {
        match change.decide(state, ChangeId(1))? {
            Decision::Unchanged(_) => Ok(Vec::new()),
            Decision::Write { records, .. } => {
                let removed = records.iter().filter(|(_, value)| value.is_none());
                let removed = removed.map(|(key, _)| key.clone()).collect();
                for (key, value) in records {
                    state.apply(&written(key, value));
                }
                Ok(removed)
            }
        }
    }

    fn done(state: &mut WaitingActions, offset: i64, id: &str) {
        let done = Done {
            request: id.to_owned(),
            state: v1::WaitingActionState::Retried,
            written: None,
            problem: String::new(),
            is_moved: true,
            content: None,
        };
        let output = done.output(&"actions".into(), &partition(7), offset, NOW);
        let key = String::from_utf8(output.key.unwrap().to_vec()).unwrap();
        state.apply(&written(key, output.value));
    }

    fn pending(state: &WaitingActions) -> Vec<(i64, String)> {
        let actions = state.of_partition(&partition(7)).cloned().unwrap_or_default();
        let pending = actions.pending.iter();
        pending
            .map(|(offset, request)| (*offset, request.id().to_owned()))
            .collect()
    }

    #[test]
    fn first_request_of_record_counts() {
        let mut state = WaitingActions::default();
        add(&mut state, &change(request("a", &[1, 2], NOW), Passed::default())).unwrap();
        add(&mut state, &change(request("b", &[2, 3], NOW), Passed::default())).unwrap();
        let of = |pairs: &[(i64, &str)]| -> Vec<(i64, String)> {
            pairs
                .iter()
                .map(|(offset, id)| (*offset, (*id).to_owned()))
                .collect()
        };
        assert_eq!(pending(&state), of(&[(1, "a"), (2, "a"), (3, "b")]));
        done(&mut state, 2, "a");
        assert_eq!(pending(&state), of(&[(1, "a"), (3, "b")]));
        // A request that comes late finds what was done.
        add(&mut state, &change(request("c", &[2], NOW), Passed::default())).unwrap();
        assert_eq!(pending(&state).len(), 2);
        let other = partition(8);
        assert_eq!(
            state
                .previous(&other)
                .map(|(_, actions)| actions.pending.len())
                .collect::<Vec<_>>(),
            [2]
        );
        assert_eq!(state.previous(&partition(7)).count(), 0);
    }

    #[test]
    fn repeated_request_has_no_effect() {
        let mut state = WaitingActions::default();
        add(&mut state, &change(request("a", &[1], NOW), Passed::default())).unwrap();
        let again = change(request("a", &[1], NOW.after(KEPT)), Passed::default());
        assert!(matches!(
            again.decide(&state, ChangeId(2)),
            Ok(Decision::Unchanged(_))
        ));
        let other = change(request("a", &[2], NOW), Passed::default());
        assert_eq!(add(&mut state, &other), Err(Refused::IdUsed));
    }

    #[test]
    fn passed_requests_make_room() {
        let mut state = WaitingActions::default();
        add(&mut state, &change(request("a", &[1, 2], NOW), Passed::default())).unwrap();
        done(&mut state, 1, "a");
        let later = NOW.after(2 * KEPT);
        // The tier may still have its records.
        let kept = add(&mut state, &change(request("b", &[5], later), Passed::default()));
        assert_eq!(kept, Ok(Vec::new()));
        let other_topic = || Passed {
            ids: BTreeMap::from([("p-retry-1m".to_owned(), TopicId::from_bits(8))]),
            ..Passed::default()
        };
        let removed = add(&mut state, &change(request("c", &[6], later), other_topic()));
        assert_eq!(
            removed.unwrap(),
            ["request/a".to_owned(), partition(7).done_key(1)]
        );
        assert_eq!(pending(&state).len(), 2);
        let many: Vec<i64> = (0..100_000).collect();
        // What is younger stays: its id would act again.
        let full = change(request("d", &many, later.after(KEPT)), other_topic());
        assert_eq!(add(&mut state, &full), Err(Refused::TooMany));
    }

    #[test]
    fn outcome_stays_for_later_request() {
        let mut state = WaitingActions::default();
        add(&mut state, &change(request("a", &[1, 2], NOW), Passed::default())).unwrap();
        let later = NOW.after(2 * KEPT);
        add(&mut state, &change(request("b", &[2], later), Passed::default())).unwrap();
        done(&mut state, 1, "a");
        done(&mut state, 2, "a");
        let missing = || Passed {
            missing: BTreeSet::from(["p-retry-1m".to_owned()]),
            ..Passed::default()
        };
        let removed = add(&mut state, &change(request("c", &[9], later), missing()));
        let first = ["request/a".to_owned(), partition(7).done_key(1)];
        assert_eq!(removed.unwrap(), first);
        assert!(state.done(&partition(7), 2).is_some(), "the request b is gone");
        let much_later = later.after(2 * KEPT);
        let removed = add(&mut state, &change(request("d", &[9], much_later), missing()));
        let second = [
            "request/b".to_owned(),
            "request/c".to_owned(),
            partition(7).done_key(2),
        ];
        assert_eq!(removed.unwrap(), second);
    }

    #[test]
    fn removed_request_makes_room_for_next() {
        let mut state = WaitingActions::default();
        add(&mut state, &change(request("a", &[1, 2], NOW), Passed::default())).unwrap();
        add(&mut state, &change(request("b", &[2, 3], NOW), Passed::default())).unwrap();
        state.apply(&written("request/a".to_owned(), None));
        assert_eq!(pending(&state), [(2, "b".to_owned()), (3, "b".to_owned())]);
    }

    #[test]
    fn pipeline_has_half_of_room() {
        let of = |id: &str, topic: &str, offsets: std::ops::Range<i64>| {
            let offsets: Vec<i64> = offsets.collect();
            let mut request = request(id, &offsets, NOW);
            topic.clone_into(&mut request.record.partitions[0].topic);
            change(request, Passed::default())
        };
        let mut state = WaitingActions::default();
        assert!(add(&mut state, &of("a", "p-retry-1m", 0..50_000)).is_ok());
        let another = of("b", "p-retry-5m", 0..1);
        assert_eq!(add(&mut state, &another), Err(Refused::TooMany));
        let other = of("c", "q-retry-1m", 0..25_001);
        assert_eq!(add(&mut state, &other), Err(Refused::TooMany));
        assert!(add(&mut state, &of("d", "q-retry-1m", 0..25_000)).is_ok());
        assert!(add(&mut state, &of("e", "r-retry-1m", 0..12_500)).is_ok());
    }

    #[test]
    fn requests_of_deleted_topics_have_passed() {
        let mut state = WaitingActions::default();
        add(&mut state, &change(request("a", &[1], NOW), Passed::default())).unwrap();
        let passed = Passed {
            missing: BTreeSet::from(["p-retry-1m".to_owned()]),
            ..Passed::default()
        };
        let removed = add(
            &mut state,
            &change(request("b", &[2], NOW.after(2 * KEPT)), passed),
        );
        assert_eq!(removed, Ok(vec!["request/a".to_owned()]));
    }

    #[test]
    fn done_key_names_its_record() {
        for topic_id in [None, Some(TopicId::from_bits(9))] {
            let partition = TierPartition {
                topic_id,
                ..partition(7)
            };
            let parsed = TierPartition::parse_done_key(&partition.done_key(17));
            assert_eq!(parsed, Some((partition, 17)));
        }
        for key in ["done/-/t/0", "done/x/t/0/1", "done/-/t/0/1/2", "request/a"] {
            assert_eq!(TierPartition::parse_done_key(key), None, "{key}");
        }
    }
}
