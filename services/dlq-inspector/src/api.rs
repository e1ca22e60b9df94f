//! The gRPC service `redeliver.v1.DeadLetterService`.

mod audit;
mod breakdown;
mod convert;
mod decoded;
mod group_changes;
mod groups;
mod list;
mod origin;
mod outcomes;
mod overview;
mod payload;
mod progress;
mod redrives;
mod stats;
mod token;
mod value;
mod waiting;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::Stream;
use prometheus_client::metrics::counter::Counter;
use redeliver_core::Clock;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::lookup::StoredRecord;
use redeliver_kafka::reader::ReadError as KafkaReadError;
use redeliver_proto::error::{invalid, status};
use redeliver_proto::v1::dead_letter_service_server::DeadLetterService;
use redeliver_proto::{Message, auth, v1};
use redeliver_service::audit::AuditLog;
use redeliver_service::grpc::Reply;
use redeliver_service::memory_budget::{MemoryBudget, Reservation};
use redeliver_store::{Replica, Writer};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Code, Request, Response, Status};

use crate::access::Viewer;
use crate::audit::Audit;
use crate::completeness::Completeness;
use crate::decoding_pool::DecodingPool;
use crate::filter::{self, Expr, FilterError, Restriction};
use crate::group_states::change::{Change, ChangeRequest};
use crate::group_states::{Decided, GroupStates};
use crate::id::parse_id;
use crate::index::{self, IndexedLetter, Pool, QUERY_TIMEOUT, QUEUE_TIMEOUT, ReadError};
use crate::job_outcomes::JobOutcomes;
use crate::letter::content_hash;
use crate::lookup_pool::LookupPool;
use crate::masking::Masking;
use crate::metrics::Metrics;
use crate::overview::task::Overviews;
use crate::schema_registry::SchemaRegistry;
use crate::shared::SharedState;
use crate::waiting::scans::Scans;

pub(crate) use redrives::Redrives;
pub(crate) use waiting::ActionRequests;
pub(crate) use watch::SEND_TIMEOUT;

/// Maximum number of retention times of the topics of a filter on `expires_at`: each is an alternative in the query.
const MAX_AGES: usize = 100;
/// Maximum number of concurrent watchers.
const WATCHERS: usize = 256;
/// Maximum size of the answers that are made, or wait for their clients to read them, in bytes.
const ANSWERS: u64 = 128 << 20;
/// Maximum number of calls that wait for memory with an answer that is made already.
const WAITING: usize = 16;
/// How long a call waits for memory for its answer.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(5);

/// The service. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) pool: Pool,
    /// The JSON pointers that are indexed.
    pub(crate) json_fields: Arc<[String]>,
    pub(crate) masking: Arc<Masking>,
    pub(crate) audit: Audit,
    pub(crate) lookups: LookupPool,
    /// `None`: values are not decoded.
    pub(crate) schemas: Option<SchemaRegistry>,
    pub(crate) scans: Scans,
    pub(crate) outcomes: JobOutcomes,
    pub(crate) decoding: DecodingPool,
    pub(crate) shared: Arc<SharedState>,
    pub(crate) groups: Groups,
    pub(crate) redrives: Redrives,
    /// Actions on waiting records.
    pub(crate) requests: ActionRequests,
    pub(crate) overviews: Overviews,
    pub(crate) kafka: KafkaSettings,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) metrics: Metrics,
    pub(crate) stop: CancellationToken,
    /// The tasks of watchers and scans. Each ends with its client or when `stop` is cancelled.
    pub(crate) watchers: TaskTracker,
    pub(crate) limits: Limits,
}

/// What all calls share. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Limits {
    watchers: Arc<Semaphore>,
    /// The memory for answers: what they are made of, until their clients have read them.
    memory: MemoryBudget,
    /// The calls that wait for it with their answers.
    waiting: Arc<Semaphore>,
    /// Counts calls for whose answers there was no memory.
    no_memory: Counter,
}

impl Limits {
    pub(crate) fn new(no_memory: Counter) -> Self {
        Self {
            watchers: Arc::new(Semaphore::new(WATCHERS)),
            memory: MemoryBudget::new(ANSWERS),
            waiting: Arc::new(Semaphore::new(WAITING)),
            no_memory,
        }
    }
}

/// The states of groups. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Groups {
    pub(crate) states: Replica<GroupStates>,
    pub(crate) writer: Writer<ChangeRequest>,
    pub(crate) audit: AuditLog,
}

/// The response of a streaming call.
pub(crate) type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Api {
    /// Takes a request apart: its caller, and its message.
    fn open<T>(&self, request: Request<T>) -> Result<(Viewer, T), Status> {
        let reason = auth::reason(request.metadata())
            .ok_or_else(|| invalid(auth::REASON, "is not percent-encoded UTF-8", "REASON_INVALID", []))?;
        group_changes::check_reason(auth::REASON, &reason)?;
        let viewer = Viewer::of(&request, reason, self.masking.clone())?;
        Ok((viewer, request.into_inner()))
    }

    /// Reserves memory for an answer, before anything of it is read.
    async fn reserve(&self, viewer: &Viewer, bytes: u64) -> Result<Reservation, Status> {
        let waiting =
            tokio::time::timeout(MEMORY_TIMEOUT, self.limits.memory.reserve(viewer.caller(), bytes));
        waiting.await.ok().flatten().ok_or_else(|| self.no_memory())
    }

    fn no_memory(&self) -> Status {
        self.limits.no_memory.inc();
        let text =
            "answers that clients have not read yet use up the memory for answers; read them, or retry later";
        status(Code::ResourceExhausted, text, "TOO_MANY_ANSWERS", [])
    }

    /// Reserves memory for a message that was made without, because its size was unknown. Few calls wait with
    /// such a message.
    async fn hold<T: Message>(&self, viewer: &Viewer, message: &T) -> Result<Reservation, Status> {
        self.hold_bytes(viewer, message.encoded_len() as u64).await
    }

    /// As [`Api::hold`], for what was read.
    async fn hold_bytes(&self, viewer: &Viewer, size: u64) -> Result<Reservation, Status> {
        if let Some(memory) = self.limits.memory.try_reserve(viewer.caller(), size) {
            return Ok(memory);
        }
        let _turn = self.limits.waiting.try_acquire().map_err(|_| self.no_memory())?;
        self.reserve(viewer, size).await
    }

    /// The response of a call, which holds memory until its client has read it.
    async fn held<T: Message>(&self, viewer: &Viewer, response: impl Future<Output = Reply<T>>) -> Reply<T> {
        let message = response.await?.into_inner();
        let memory = self.hold(viewer, &message).await?;
        Ok(with_memory((message, memory)))
    }

    /// Runs a call and records its duration and its status.
    async fn observe<T>(
        &self,
        method: &'static str,
        response: impl Future<Output = Result<T, Status>>,
    ) -> Reply<T> {
        let started = Instant::now();
        let result = response.await;
        let code = result.as_ref().map_or_else(Status::code, |_| Code::Ok);
        self.metrics.observe_call(method, started, code);
        if code == Code::Internal {
            tracing::error!(
                method,
                error = result.as_ref().err().map(Status::message),
                "call failed"
            );
        }
        result.map(Response::new)
    }

    /// As [`Api::observe`], for a call that is answered from the index. Calls fail until the index has caught up: a part of the list would look like
    /// the whole list.
    async fn call<T>(
        &self,
        method: &'static str,
        viewer: &Viewer,
        response: impl Future<Output = Result<T, Status>>,
    ) -> Reply<T> {
        let response = async {
            let build = self.shared.build();
            let result = match self.check_caught_up(viewer) {
                Ok(()) => response.await,
                Err(unavailable) => Err(unavailable),
            };
            // The index was rebuilt meanwhile, so that its damage may have caused the failure, or the result may come from an empty index.
            if self.shared.build() == build {
                result
            } else {
                Err(self.catching_up(viewer))
            }
        };
        self.observe(method, response).await
    }

    /// As [`Api::call`], for a call that reserves the memory for its answer itself.
    async fn call_with_memory<T>(
        &self,
        method: &'static str,
        viewer: &Viewer,
        response: impl Future<Output = Result<(T, Reservation), Status>>,
    ) -> Reply<T> {
        let answer = self.call(method, viewer, response).await?;
        Ok(with_memory(answer.into_inner()))
    }

    fn check_caught_up(&self, viewer: &Viewer) -> Result<(), Status> {
        if *self.shared.caught_up.borrow() {
            return Ok(());
        }
        Err(self.catching_up(viewer))
    }

    fn catching_up(&self, viewer: &Viewer) -> Status {
        let lag = self.shared.lag(|topic| viewer.sees(topic));
        let text = format!("index is catching up; {lag} dead letters left; retry later");
        status(
            Code::Unavailable,
            text,
            "INDEX_CATCHING_UP",
            [("lag", lag.to_string())],
        )
    }

    /// The record of a dead letter.
    async fn record_of(&self, letter: &IndexedLetter) -> Result<StoredRecord, Status> {
        let records = self.lookup(&[letter]).await?;
        same_record(letter, records.into_iter().next().flatten())
    }

    /// The records of dead letters; `None` if Kafka does not have one any more.
    async fn records_of(&self, letters: &[&IndexedLetter]) -> Result<Vec<Option<StoredRecord>>, Status> {
        let records = self.lookup(letters).await?;
        // The topic may have been created again since the index read it.
        let is_same = |(stored, letter): (Option<StoredRecord>, &&IndexedLetter)| {
            stored.filter(|stored| content_hash(&stored.record) == letter.content)
        };
        Ok(records.into_iter().zip(letters).map(is_same).collect())
    }

    /// What Kafka has at the positions of dead letters.
    async fn lookup(&self, letters: &[&IndexedLetter]) -> Result<Vec<Option<StoredRecord>>, Status> {
        let positions = letters.iter().map(|letter| letter.id.clone());
        let records = self.lookups.get(positions.collect()).await;
        records.map_err(|error| kafka_unavailable(&error))
    }

    fn parse_filter(&self, text: &str) -> Result<Expr, Status> {
        let filter = filter::parse(text, &self.json_fields).map_err(|error| filter_invalid(&error))?;
        if !filter.tests_expiry() {
            return Ok(filter);
        }
        let topics = self.shared.topics();
        let topics: Vec<_> = topics
            .iter()
            .filter(|(topic, _)| filter.can_match_in(topic))
            .collect();
        if topics.iter().any(|(_, status)| status.retention.is_none()) {
            let text = "expires_at: the retention of a topic is not known; wait, permit DescribeConfigs, or add topic = NAME";
            return Err(status(Code::Unavailable, text, "RETENTION_UNKNOWN", []));
        }
        let ages = topics.into_iter().filter_map(|(topic, status)| {
            let age = status.retention?.age?.as_millis();
            Some((topic.clone(), i64::try_from(age).unwrap_or(i64::MAX)))
        });
        let ages: BTreeMap<String, i64> = ages.collect();
        if ages.values().collect::<BTreeSet<_>>().len() > MAX_AGES {
            let text =
                format!("expires_at: topics have more than {MAX_AGES} retention times; add topic = NAME");
            return Err(invalid("filter", text, "FILTER_INVALID", []));
        }
        Ok(filter.with_ages(&ages.into()))
    }

    /// A filter as it is recorded.
    fn recorded_filter(&self, text: &str) -> Result<String, Status> {
        let mask = self.masking.all();
        let is_masked = |restriction: &Restriction| mask.hides_tested(restriction);
        filter::without_secrets(text, &self.json_fields, &is_masked).map_err(|error| filter_invalid(&error))
    }

    /// What the index contains, for an answer that is read from it after this call.
    fn completeness(&self) -> Arc<Completeness> {
        self.shared.completeness()
    }

    /// What an answer contains that was read from the index since the call of [`Api::completeness`] that returned `before`.
    fn completeness_since(&self, before: &Completeness) -> Completeness {
        before.and(&self.shared.completeness())
    }

    /// Refuses a filter on the state while the states are unknown: a dead letter that was redriven would be OPEN.
    fn check_states(filter_tests_states: bool, completeness: &Completeness) -> Result<(), Status> {
        if completeness.are_states_known() || !filter_tests_states {
            return Ok(());
        }
        Err(status(
            Code::Unavailable,
            "filter: states are unknown, because the ledger cannot be read",
            "STATES_UNKNOWN",
            [],
        ))
    }

    /// What an answer says about its completeness, as far as its caller may know.
    fn completeness_message(&self, completeness: &Completeness, viewer: &Viewer) -> v1::Completeness {
        let visible = completeness.of_topics(|topic| viewer.sees(topic));
        visible.to_message(self.clock.now())
    }

    /// The dead letter with this id, if the caller sees its topic.
    async fn find(&self, viewer: &Viewer, id: &str) -> Result<IndexedLetter, Status> {
        let letter_id = parse_id(id)
            .map_err(|error| invalid("id", format!("`{}` {error}", bounded(id)), "ID_INVALID", []))?;
        viewer.require(&letter_id.topic)?;
        let completeness = self.completeness();
        let (topic, partition) = (letter_id.topic.clone(), letter_id.partition);
        let letter = self
            .pool
            .query(move |connection| index::get(connection, &letter_id))
            .await?;
        letter.ok_or_else(|| {
            let completeness = self.completeness_since(&completeness);
            if completeness.covers(&topic, partition, self.clock.now()) {
                not_found(id)
            } else {
                index_incomplete(id)
            }
        })
    }
}

#[tonic::async_trait]
impl DeadLetterService for Api {
    async fn list_dead_letters(
        &self,
        request: Request<v1::ListDeadLettersRequest>,
    ) -> Reply<v1::ListDeadLettersResponse> {
        let (viewer, request) = self.open(request)?;
        let response = self.list(&viewer, request);
        self.call_with_memory("ListDeadLetters", &viewer, response).await
    }

    async fn get_dead_letter(&self, request: Request<v1::GetDeadLetterRequest>) -> Reply<v1::DeadLetter> {
        let (viewer, request) = self.open(request)?;
        let response = self.get(&viewer, request.id);
        self.call_with_memory("GetDeadLetter", &viewer, response).await
    }

    type ReadPayloadStream = ResponseStream<v1::ReadPayloadResponse>;

    async fn read_payload(&self, request: Request<v1::ReadPayloadRequest>) -> Reply<Self::ReadPayloadStream> {
        let (viewer, request) = self.open(request)?;
        let response = self.payload(&viewer, request.id);
        self.call_with_memory("ReadPayload", &viewer, response).await
    }

    async fn get_dead_letter_stats(
        &self,
        request: Request<v1::GetDeadLetterStatsRequest>,
    ) -> Reply<v1::DeadLetterStats> {
        let (viewer, request) = self.open(request)?;
        let response = self.call("GetDeadLetterStats", &viewer, self.stats(&viewer, request));
        self.held(&viewer, response).await
    }

    async fn list_groups(&self, request: Request<v1::ListGroupsRequest>) -> Reply<v1::ListGroupsResponse> {
        let (viewer, request) = self.open(request)?;
        let response = self.call("ListGroups", &viewer, self.list_of_groups(&viewer, request));
        self.held(&viewer, response).await
    }

    async fn get_group(&self, request: Request<v1::GetGroupRequest>) -> Reply<v1::Group> {
        let (viewer, request) = self.open(request)?;
        let response = self.group(&viewer, request.id);
        self.call("GetGroup", &viewer, response).await
    }

    async fn resolve_group(&self, request: Request<v1::ChangeGroupRequest>) -> Reply<v1::Group> {
        let (viewer, request) = self.open(request)?;
        let response = self.change_group(&viewer, request, Change::Decide(Decided::Resolved));
        self.call("ResolveGroup", &viewer, response).await
    }

    async fn mute_group(&self, request: Request<v1::MuteGroupRequest>) -> Reply<v1::Group> {
        let (viewer, request) = self.open(request)?;
        self.call("MuteGroup", &viewer, self.mute(&viewer, request)).await
    }

    async fn reopen_group(&self, request: Request<v1::ChangeGroupRequest>) -> Reply<v1::Group> {
        let (viewer, request) = self.open(request)?;
        let response = self.change_group(&viewer, request, Change::Decide(Decided::Open));
        self.call("ReopenGroup", &viewer, response).await
    }

    async fn annotate_group(&self, request: Request<v1::AnnotateGroupRequest>) -> Reply<v1::Group> {
        let (viewer, request) = self.open(request)?;
        let response = self.annotate(&viewer, request);
        self.call("AnnotateGroup", &viewer, response).await
    }

    type WatchDeadLettersStream = ResponseStream<v1::WatchDeadLettersResponse>;

    async fn watch_dead_letters(
        &self,
        request: Request<v1::WatchDeadLettersRequest>,
    ) -> Reply<Self::WatchDeadLettersStream> {
        let (viewer, request) = self.open(request)?;
        let response = self.watch(&request, viewer.clone());
        self.call("WatchDeadLetters", &viewer, response).await
    }
}

/// A response that holds memory until its client has read it.
fn with_memory<T>((message, memory): (T, Reservation)) -> Response<T> {
    let mut response = Response::new(message);
    response.extensions_mut().insert(memory);
    response
}

/// The record of a dead letter, given what Kafka has at its position.
fn same_record(letter: &IndexedLetter, stored: Option<StoredRecord>) -> Result<StoredRecord, Status> {
    let id = letter.id.to_string();
    match stored {
        None => Err(not_found(&id)),
        // The topic was created again, and the index does not contain the new record yet.
        Some(stored) if content_hash(&stored.record) != letter.content => Err(index_incomplete(&id)),
        Some(stored) => Ok(stored),
    }
}

fn filter_invalid(error: &FilterError) -> Status {
    let position = ("position", error.position.to_string());
    invalid("filter", error.to_string(), "FILTER_INVALID", [position])
}

fn not_found(id: &str) -> Status {
    let text = format!(
        "no such dead letter: `{}`; it may have been removed by retention",
        bounded(id)
    );
    status(
        Code::NotFound,
        text,
        "DEAD_LETTER_NOT_FOUND",
        [("id", bounded(id))],
    )
}

fn index_incomplete(id: &str) -> Status {
    let text = format!(
        "the index does not contain all dead letters of the partition of `{}` yet; retry later",
        bounded(id)
    );
    status(Code::Unavailable, text, "INDEX_INCOMPLETE", [("id", bounded(id))])
}

/// The index cannot be read.
impl From<ReadError> for Status {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::TooLong => status(
                Code::DeadlineExceeded,
                format!("query exceeded {} s; narrow the filter", QUERY_TIMEOUT.as_secs()),
                "QUESTION_TOO_LONG",
                [],
            ),
            ReadError::Busy => status(
                Code::ResourceExhausted,
                format!(
                    "other slow queries took more than {} s; retry later, or narrow the filter",
                    QUEUE_TIMEOUT.as_secs()
                ),
                "TOO_MANY_QUESTIONS",
                [],
            ),
            ReadError::Rebuilding => index_is_damaged(),
            // The writer rebuilds it within moments.
            ReadError::Database(source) if index::is_damage(&source) => index_is_damaged(),
            ReadError::ShuttingDown => shutting_down(),
            ReadError::Database(source) => status(
                Code::Internal,
                format!("cannot read the index: {source}"),
                "INDEX_FAILED",
                [],
            ),
        }
    }
}

fn index_is_damaged() -> Status {
    status(
        Code::Unavailable,
        "index was damaged and is being rebuilt; retry later",
        "INDEX_CATCHING_UP",
        [],
    )
}

fn kafka_unavailable(error: &KafkaReadError) -> Status {
    let text = format!("cannot read the record from Kafka: {error}");
    status(Code::Unavailable, text, "KAFKA_UNAVAILABLE", [])
}

/// Does work that blocks.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Status> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Ok(done),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Cancelled, because the runtime is shutting down.
            Err(_) => Err(shutting_down()),
        },
    }
}

fn shutting_down() -> Status {
    status(
        Code::Unavailable,
        "server is shutting down; retry",
        "SHUTTING_DOWN",
        [],
    )
}

/// The beginning of a client's text, for an error message.
fn bounded(text: &str) -> String {
    redeliver_core::failure::bounded_text(text, 300)
}

#[cfg(test)]
mod tests {
    use redeliver_core::{Record, Timestamp, TimestampType};
    use redeliver_proto::error::reason;
    use redeliver_testkit::record_at;

    use super::*;
    use crate::index::{Change, Index};
    use crate::letter::Letter;

    #[test]
    fn another_record_is_not_yet_indexed() {
        let record = |value: &'static str| Record {
            timestamp: Some(Timestamp::from_millis(1)),
            value: Some(value.into()),
            ..record_at("t-dlq", 0, 1)
        };
        let directory = tempfile::tempdir().unwrap();
        let Index { mut writer, pool, .. } = Index::open(directory.path(), &[]).unwrap();
        let letters = vec![Letter::read(&record("old"))];
        writer
            .write(&[Change::Letters(letters)], Timestamp::from_millis(1))
            .unwrap();
        let id = parse_id("t-dlq/0/1").unwrap();
        let letter = pool.read_blocking(|connection| index::get(connection, &id));
        let letter = letter.unwrap().unwrap();
        let stored = |value| StoredRecord {
            record: record(value),
            timestamp_type: Some(TimestampType::CreateTime),
        };
        let refused = |found| {
            let status = same_record(&letter, found).unwrap_err();
            (status.code(), reason(&status).unwrap())
        };
        assert!(same_record(&letter, Some(stored("old"))).is_ok());
        // Whether the new record is a dead letter is not known yet, so it is not certain that there is none.
        let incomplete = (Code::Unavailable, "INDEX_INCOMPLETE".to_owned());
        assert_eq!(refused(Some(stored("new"))), incomplete);
        let gone = (Code::NotFound, "DEAD_LETTER_NOT_FOUND".to_owned());
        assert_eq!(refused(None), gone);
    }
}
