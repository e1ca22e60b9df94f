//! `redeliver.v1.DeadLetterService`.

mod convert;
mod list;
mod payload;
mod stats;
mod token;
mod watch;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use futures::Stream;
use redeliver_core::{Clock, Position, Record};
use redeliver_kafka::reader::ReadError as KafkaReadError;
use redeliver_proto::error::{invalid, status};
use redeliver_proto::v1;
use redeliver_proto::v1::dead_letter_service_server::DeadLetterService;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Code, Request, Response, Status};

use crate::filter::{self, Expr};
use crate::id::LetterId;
use crate::index::{self, Found, Generation, Pool, ReadError};
use crate::letter::content_hash;
use crate::metrics::Metrics;
use crate::shared::Shared;
use crate::values::Values;

/// How many clients may watch at the same time.
const WATCHERS: usize = 64;

/// The service. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) pool: Pool,
    pub(crate) generation: Generation,
    pub(crate) values: Values,
    pub(crate) shared: Arc<Shared>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) metrics: Metrics,
    pub(crate) stop: CancellationToken,
    /// Tasks of watchers, each of which ends with its watcher or when `stop` is cancelled.
    pub(crate) watchers: TaskTracker,
    places: Arc<Semaphore>,
}

/// A stream of answers.
pub(crate) type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Api {
    #[expect(
        clippy::too_many_arguments,
        reason = "the parts are put together here and nowhere else"
    )]
    pub(crate) fn new(
        pool: Pool,
        generation: Generation,
        values: Values,
        shared: Arc<Shared>,
        clock: Arc<dyn Clock>,
        metrics: Metrics,
        stop: CancellationToken,
        watchers: TaskTracker,
    ) -> Self {
        Self {
            pool,
            generation,
            values,
            shared,
            clock,
            metrics,
            stop,
            watchers,
            places: Arc::new(Semaphore::new(WATCHERS)),
        }
    }

    /// Answers a call, measured. Until the index has caught up there is no right answer.
    async fn answer<T>(
        &self,
        method: &'static str,
        answer: impl Future<Output = Result<T, Status>>,
    ) -> Result<Response<T>, Status> {
        let began = Instant::now();
        let answered = match self.check_caught_up() {
            Ok(()) => answer.await,
            Err(not_yet) => Err(not_yet),
        };
        let code = answered.as_ref().map_or_else(Status::code, |_| Code::Ok);
        self.metrics.called(method, began, code);
        if code == Code::Internal {
            tracing::error!(
                method,
                error = answered.as_ref().err().map(Status::message),
                "a call failed"
            );
        }
        answered.map(Response::new)
    }

    fn check_caught_up(&self) -> Result<(), Status> {
        if *self.shared.caught_up.borrow() {
            return Ok(());
        }
        let lag = self.shared.lag();
        let text = format!("the index is being built, {lag} dead letters are left; try again in a while");
        Err(status(
            Code::Unavailable,
            text,
            "INDEX_CATCHING_UP",
            [("lag", lag.to_string())],
        ))
    }

    /// The record of a dead letter, if it still stands where the index says.
    async fn record_of(&self, found: &Found) -> Result<Option<Record>, Status> {
        let records = self.records_of(std::slice::from_ref(found)).await?;
        Ok(records.into_iter().next().flatten())
    }

    async fn records_of(&self, found: &[Found]) -> Result<Vec<Option<Record>>, Status> {
        let positions = found.iter().map(|found| Position {
            topic: found.id.topic.as_str().into(),
            partition: found.id.partition,
            offset: found.id.offset,
        });
        let records = self
            .values
            .get(positions.collect())
            .await
            .map_err(|error| no_kafka(&error))?;
        let same = |(record, found): (Option<Record>, &Found)| {
            record.filter(|record| content_hash(record) == found.content)
        };
        Ok(records.into_iter().zip(found).map(same).collect())
    }

    /// A dead letter of the index.
    async fn find(&self, id: &str) -> Result<Found, Status> {
        let wanted: LetterId = id
            .parse()
            .map_err(|error| invalid("id", format!("`{}` {error}", shown(id)), "ID_INVALID", []))?;
        let found = self
            .pool
            .read(move |connection| index::get(connection, &wanted))
            .await
            .map_err(|error| no_index(&error))?;
        found.ok_or_else(|| not_found(id))
    }
}

#[tonic::async_trait]
impl DeadLetterService for Api {
    async fn list_dead_letters(
        &self,
        request: Request<v1::ListDeadLettersRequest>,
    ) -> Result<Response<v1::ListDeadLettersResponse>, Status> {
        self.answer("ListDeadLetters", self.list(request.into_inner()))
            .await
    }

    async fn get_dead_letter(
        &self,
        request: Request<v1::GetDeadLetterRequest>,
    ) -> Result<Response<v1::DeadLetter>, Status> {
        self.answer("GetDeadLetter", self.get(request.into_inner().id))
            .await
    }

    type ReadPayloadStream = Answers<v1::ReadPayloadResponse>;

    async fn read_payload(
        &self,
        request: Request<v1::ReadPayloadRequest>,
    ) -> Result<Response<Self::ReadPayloadStream>, Status> {
        self.answer("ReadPayload", self.payload(request.into_inner().id))
            .await
    }

    async fn get_dead_letter_stats(
        &self,
        request: Request<v1::GetDeadLetterStatsRequest>,
    ) -> Result<Response<v1::DeadLetterStats>, Status> {
        self.answer("GetDeadLetterStats", self.stats(request.into_inner().filter))
            .await
    }

    type WatchDeadLettersStream = Answers<v1::WatchDeadLettersResponse>;

    async fn watch_dead_letters(
        &self,
        request: Request<v1::WatchDeadLettersRequest>,
    ) -> Result<Response<Self::WatchDeadLettersStream>, Status> {
        self.answer("WatchDeadLetters", async { self.watch(request.get_ref()) })
            .await
    }
}

fn parse_filter(text: &str) -> Result<Expr, Status> {
    filter::parse(text).map_err(|error| {
        let position = ("position", error.position.to_string());
        invalid("filter", error.to_string(), "FILTER_INVALID", [position])
    })
}

fn not_found(id: &str) -> Status {
    let text = format!(
        "there is no dead letter `{}`; retention may have removed it",
        shown(id)
    );
    status(Code::NotFound, text, "DEAD_LETTER_NOT_FOUND", [("id", shown(id))])
}

fn no_index(error: &ReadError) -> Status {
    match error {
        ReadError::TooLong => status(
            Code::DeadlineExceeded,
            "the question took too long; ask for less, or with a narrower filter",
            "QUESTION_TOO_LONG",
            [],
        ),
        ReadError::Ending => ending(),
        ReadError::Database(source) => status(
            Code::Internal,
            format!("the index cannot be read: {source}"),
            "INDEX_FAILED",
            [],
        ),
    }
}

fn no_kafka(error: &KafkaReadError) -> Status {
    let text = format!("the record cannot be read from kafka: {error}");
    status(Code::Unavailable, text, "KAFKA_UNAVAILABLE", [])
}

fn ending() -> Status {
    status(
        Code::Unavailable,
        "the process is ending; try again",
        "SHUTTING_DOWN",
        [],
    )
}

/// What a client sent, cut to what fits into a message.
fn shown(text: &str) -> String {
    redeliver_core::failure::bounded_text(text, 300)
}
