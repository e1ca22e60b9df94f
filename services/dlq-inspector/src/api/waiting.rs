//! The gRPC service `redeliver.v1.WaitingService`.

mod actions;
mod find;

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use futures::{Stream, stream};
use redeliver_core::backoff::MAX_WAIT;
use redeliver_core::error_chain::error_chain;
use redeliver_core::headers::Origin;
use redeliver_core::pipeline::is_topic_name;
use redeliver_core::{ErrorClass, Pipeline, Position, Timestamp};
use redeliver_kafka::reader::ReadError;
use redeliver_kafka::scan::Progress;
use redeliver_proto::convert::{from_duration, time_of_record, to_duration, to_timestamp};
use redeliver_proto::error::{invalid, status};
use redeliver_proto::v1::waiting_service_server::WaitingService;
use redeliver_proto::{Message, v1};
use redeliver_service::grpc::Reply;
use redeliver_service::identity::{self, Withdrawn};
use redeliver_service::memory_budget::Reservation;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Status};

use super::list::page_size;
use super::redrives::visible::{HIDDEN, sees_destination};
use super::token::{WaitingToken, query_hash};
use super::{Api, ResponseStream, bounded, shutting_down};
use crate::access::Viewer;
use crate::metrics::Metrics;
use crate::waiting::counts::Counts;
use crate::waiting::limit::QUEUE_TIMEOUT;
use crate::waiting::page::{Listing, Order, Row};
use crate::waiting::scans::{OnProgress, TIMEOUT, TraceError, Traced};
use crate::waiting::tally::{Detail, Filter, Found};
use crate::waiting::timeline::{Event, Step};

pub(crate) use actions::ActionRequests;

/// The time between two messages about the progress of a scan.
const PROGRESS: Duration = Duration::from_millis(200);
/// A call ends if its client does not accept the answer for this long.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// How many error codes an answer contains.
const CODES: usize = 20;
/// The maximum size of the steps of a trace in bytes: clients accept 4 MiB by default.
const MAX_TRACE: usize = 3 << 20;
/// How many minutes a forecast can have.
const MAX_MINUTES: u32 = 120;
/// Maximum length of a text in a filter in bytes.
const MAX_TEXT: usize = 250;

/// What a call is about.
struct Selection {
    pipelines: Vec<Pipeline>,
    filter: Filter,
    now: Timestamp,
}

#[tonic::async_trait]
impl WaitingService for Api {
    type ListWaitingStream = ResponseStream<v1::ListWaitingResponse>;

    async fn list_waiting(&self, request: Request<v1::ListWaitingRequest>) -> Reply<Self::ListWaitingStream> {
        let (viewer, request) = self.open(request)?;
        let response = self.list_of_waiting(&viewer, request);
        self.observe("ListWaiting", response).await
    }

    type GetWaitingStatsStream = ResponseStream<v1::GetWaitingStatsResponse>;

    async fn get_waiting_stats(
        &self,
        request: Request<v1::GetWaitingStatsRequest>,
    ) -> Reply<Self::GetWaitingStatsStream> {
        let (viewer, request) = self.open(request)?;
        let response = self.waiting_stats(&viewer, request);
        self.observe("GetWaitingStats", response).await
    }

    type TraceRecordStream = ResponseStream<v1::TraceRecordResponse>;

    async fn trace_record(&self, request: Request<v1::TraceRecordRequest>) -> Reply<Self::TraceRecordStream> {
        let (viewer, request) = self.open(request)?;
        self.observe("TraceRecord", self.trace(&viewer, request)).await
    }

    type FindRecordsStream = ResponseStream<v1::FindRecordsResponse>;

    async fn find_records(&self, request: Request<v1::FindRecordsRequest>) -> Reply<Self::FindRecordsStream> {
        let (viewer, request) = self.open(request)?;
        let response = self.found_records(&viewer, request);
        self.call("FindRecords", &viewer, response).await
    }

    async fn get_job_outcomes(
        &self,
        request: Request<v1::GetJobOutcomesRequest>,
    ) -> Reply<v1::GetJobOutcomesResponse> {
        let (viewer, request) = self.open(request)?;
        let response = self.job_outcomes(&viewer, &request);
        self.observe("GetJobOutcomes", response).await
    }

    async fn get_waiting_record(
        &self,
        request: Request<v1::GetWaitingRecordRequest>,
    ) -> Reply<v1::WaitingRecordContents> {
        let (viewer, request) = self.open(request)?;
        let response = self.observe("GetWaitingRecord", self.waiting_record(&viewer, request));
        self.held(&viewer, response).await
    }

    async fn act_on_waiting_records(
        &self,
        request: Request<v1::ActOnWaitingRecordsRequest>,
    ) -> Reply<v1::WaitingActions> {
        let (viewer, request) = self.open(request)?;
        let response = self.observe("ActOnWaitingRecords", self.act(&viewer, request));
        self.held(&viewer, response).await
    }

    async fn get_waiting_actions(
        &self,
        request: Request<v1::GetWaitingActionsRequest>,
    ) -> Reply<v1::WaitingActions> {
        let (viewer, request) = self.open(request)?;
        let response = async { self.actions_of(&viewer, &request.request_id) };
        let response = self.observe("GetWaitingActions", response);
        self.held(&viewer, response).await
    }
}

impl Api {
    async fn list_of_waiting(
        &self,
        viewer: &Viewer,
        request: v1::ListWaitingRequest,
    ) -> Result<ResponseStream<v1::ListWaitingResponse>, Status> {
        use v1::list_waiting_response::Event;
        let order = match v1::WaitingOrder::try_from(request.order) {
            Ok(v1::WaitingOrder::Unspecified) => Order::Due,
            Ok(v1::WaitingOrder::Attempts) => Order::Attempts,
            Ok(v1::WaitingOrder::Age) => Order::Age,
            Err(_) => {
                let problem = "must be 0 (due), 1 (attempts) or 2 (age)";
                return Err(invalid("order", problem, "FILTER_INVALID", []));
            }
        };
        let filter = request.filter.unwrap_or_default();
        let query = query_hash(&["waiting", &format!("{order:?} {filter:?}")]);
        let after = WaitingToken::decode(query, &request.page_token)?;
        let limit = page_size(request.limit)?;
        let selection = self.waiting_selection(viewer, filter)?;
        let topics = selection.pipelines.iter().map(Pipeline::dead_letter_topic);
        let keys: Vec<bool> = topics
            .map(|topic| viewer.sees_payloads(&topic) && !viewer.mask(&topic).has_key())
            .collect();
        let listing = Listing {
            order,
            after,
            limit,
            keys: keys.clone(),
        };
        let scan = self.waiting(
            viewer,
            selection,
            Detail::Rows(listing),
            move |selection, found| {
                let rows = found.rows.iter();
                let rows = rows.map(|row| v1::WaitingRecord {
                    key_withheld: !keys[row.pipeline],
                    ..record_message(row, &selection.pipelines[row.pipeline])
                });
                let next = found.next.as_ref();
                v1::WaitingRecords {
                    next_page_token: next.map_or_else(String::new, |next| WaitingToken::encode(query, next)),
                    records: rows.collect(),
                    matching: found.counts.values().map(|counts| counts.records).sum(),
                    coverage: Some(coverage(selection, found)),
                }
            },
        );
        let event = |event| v1::ListWaitingResponse { event: Some(event) };
        self.stream(
            viewer,
            scan,
            move |progress| event(Event::Progress(progress)),
            move |records| event(Event::Records(records)),
        )
        .await
    }

    async fn waiting_stats(
        &self,
        viewer: &Viewer,
        request: v1::GetWaitingStatsRequest,
    ) -> Result<ResponseStream<v1::GetWaitingStatsResponse>, Status> {
        use v1::get_waiting_stats_response::Event;
        let selection = self.waiting_selection(viewer, request.filter.unwrap_or_default())?;
        if request.minutes > MAX_MINUTES {
            let problem = format!("must be at most {MAX_MINUTES}");
            return Err(invalid("minutes", problem, "FILTER_INVALID", []));
        }
        let detail = Detail::Forecast(request.minutes as usize);
        let scan = self.waiting(viewer, selection, detail, |selection, found| {
            let places = found.counts.iter();
            let places = places.map(|((pipeline, place), counts)| v1::WaitingPlace {
                pipeline: selection.pipelines[*pipeline].name.to_string(),
                place: place.to_string(),
                counts: Some(counts_message(counts)),
            });
            v1::WaitingStats {
                places: places.collect(),
                total: Some(counts_message(&found.total())),
                coverage: Some(coverage(selection, found)),
            }
        });
        let event = |event| v1::GetWaitingStatsResponse { event: Some(event) };
        self.stream(
            viewer,
            scan,
            move |progress| event(Event::Progress(progress)),
            move |stats| event(Event::Stats(stats)),
        )
        .await
    }

    /// A scan for what waits, whose answer is made of what it finds.
    fn waiting<R>(
        &self,
        viewer: &Viewer,
        selection: Selection,
        detail: Detail,
        answer: impl FnOnce(&Selection, &Found) -> R + Send + 'static,
    ) -> Work<R> {
        let (scans, viewer) = (self.scans.clone(), viewer.clone());
        Box::new(move |on_progress| {
            let Selection {
                pipelines,
                filter,
                now,
            } = &selection;
            let found = scans.waiting(&viewer, pipelines, filter.clone(), detail, *now, on_progress);
            let found = found.map_err(|error| scan_failed(&error))?;
            Ok(answer(&selection, &found))
        })
    }

    async fn trace(
        &self,
        viewer: &Viewer,
        request: v1::TraceRecordRequest,
    ) -> Result<ResponseStream<v1::TraceRecordResponse>, Status> {
        use v1::trace_record_response::Event;
        let position = match (&*request.job_id, request.position) {
            ("", position) => requested_position(position)?,
            (id, None) => self.position_of_job(viewer, id, &request.pipeline).await?,
            (_, Some(_)) => {
                let problem = "must not be set together with job_id";
                return Err(invalid("position", problem, "POSITION_INVALID", []));
            }
        };
        let pipelines = self.pipelines(viewer, &request.pipeline)?;
        if pipelines.is_empty() {
            // Says nothing about what exists.
            viewer.require(&position.topic)?;
        }
        for pipeline in &pipelines {
            let topic = pipeline.dead_letter_topic();
            if viewer.mask(&topic).hides_origin() {
                viewer.require_unmasked(&topic)?;
            }
        }
        let (scans, of_viewer) = (self.scans.clone(), viewer.clone());
        let destinations = self.redrives.destinations.clone();
        let (now, from_beginning) = (self.clock.now(), request.from_beginning);
        let scan: Work<v1::Trace> = Box::new(move |on_progress| {
            let traced = scans.trace(
                &of_viewer,
                &pipelines,
                &position,
                from_beginning,
                now,
                on_progress,
            );
            let traced = traced.map_err(trace_failed)?;
            let share = MAX_TRACE / traced.len().max(1);
            let messages = traced.into_iter().map(|traced| {
                let mut message = trace_message(traced);
                for step in &mut message.steps {
                    let topic = &mut step.destination;
                    if !topic.is_empty() && !sees_destination(&of_viewer, &destinations, topic) {
                        HIDDEN.clone_into(topic);
                    }
                }
                keep_last_steps(&mut message, share);
                message
            });
            Ok(v1::Trace {
                pipelines: messages.collect(),
            })
        });
        let event = |event| v1::TraceRecordResponse { event: Some(event) };
        self.stream(
            viewer,
            scan,
            move |progress| event(Event::Progress(progress)),
            move |trace| event(Event::Trace(trace)),
        )
        .await
    }

    /// The pipelines that the caller sees, or the one with this name, which the caller must see.
    pub(super) fn pipelines(&self, viewer: &Viewer, name: &str) -> Result<Vec<Pipeline>, Status> {
        if name.is_empty() {
            return Ok(self.scans.visible(viewer, ""));
        }
        if !is_topic_name(name) {
            return Err(invalid(
                "pipeline",
                "is not the name of a pipeline",
                "PIPELINE_UNKNOWN",
                [],
            ));
        }
        viewer.require(&Pipeline::new(name).dead_letter_topic())?;
        let found = self.scans.visible(viewer, name);
        if found.is_empty() {
            let problem = format!("`{name}` is not in the configuration of the server");
            return Err(invalid("pipeline", problem, "PIPELINE_UNKNOWN", []));
        }
        Ok(found)
    }

    fn waiting_selection(&self, viewer: &Viewer, filter: v1::WaitingFilter) -> Result<Selection, Status> {
        let now = self.clock.now();
        let pipelines = self.pipelines(viewer, &filter.pipeline)?;
        Ok(Selection {
            pipelines,
            filter: parse_filter(filter, now)?,
            now,
        })
    }

    /// Runs a scan in a thread of its own, and streams its progress and its answer. It ends with its caller.
    async fn stream<T, R>(
        &self,
        viewer: &Viewer,
        scan: Work<R>,
        to_progress: impl Fn(v1::ScanProgress) -> T + Send + 'static,
        to_answer: impl FnOnce(R) -> T + Send + 'static,
    ) -> Result<ResponseStream<T>, Status>
    where
        T: Message + 'static,
        R: Send + 'static,
    {
        let permit = self.scans.limit.enter().await.ok_or_else(too_many_scans)?;
        let (sender, receiver) = mpsc::channel(4);
        let (stop, viewer, metrics) = (self.stop.clone(), viewer.clone(), self.metrics.clone());
        let api = self.clone();
        let (cancelled, progress) = (CancellationToken::new(), sender.clone());
        let mut reporter = Reporter {
            send: move |message| {
                // A slow caller does not hold up the scan.
                let _ = progress.try_send(Ok((to_progress(message), None)));
            },
            metrics: metrics.clone(),
            cancelled: cancelled.clone(),
            last: Progress::default(),
            counted: 0,
            calls: 0,
            sent: None,
        };
        let reading = tokio::task::spawn_blocking(move || {
            let (_permit, _count) = (permit, metrics.count_scan());
            scan(&mut |progress| reporter.report(progress))
        });
        self.watchers.spawn(async move {
            // However the call ends, the rest is no longer needed.
            let _cancels = cancelled.drop_guard();
            let answering = async {
                match reading.await {
                    Ok(Ok(answer)) => api.with_memory(&viewer, to_answer(answer)).await,
                    Ok(Err(status)) => Err(status),
                    // Without a status, the stream would just end. The log has the panic.
                    Err(error) if error.is_panic() => Err(Status::internal("the scan has failed")),
                    // The runtime is shutting down.
                    Err(_) => Err(shutting_down()),
                }
            };
            let answer = tokio::select! {
                answer = answering => answer,
                () = stop.cancelled() => Err(shutting_down()),
                withdrawn = viewer.withdrawn() => Err(match withdrawn {
                    Withdrawn::Refused(refusal) => identity::grpc::status(&refusal),
                    Withdrawn::ScopesChanged => scopes_changed(),
                }),
                () = sender.closed() => return,
            };
            // Fails if the caller has gone, or does not read.
            let _ = sender.send_timeout(answer, SEND_TIMEOUT).await;
        });
        Ok(Box::pin(messages(receiver)))
    }

    /// An answer with its memory. The scan has an answer of a bounded size before the size is known.
    async fn with_memory<T: Message>(&self, viewer: &Viewer, answer: T) -> Answered<T> {
        let memory = self.hold(viewer, &answer).await?;
        Ok((answer, Some(memory)))
    }
}

/// A message of a call, with the memory of an answer.
type Answered<T> = Result<(T, Option<Reservation>), Status>;

/// The messages of a call. Each is sent once the next one is asked for. Until then, it holds its memory.
fn messages<T>(receiver: mpsc::Receiver<Answered<T>>) -> impl Stream<Item = Result<T, Status>> {
    stream::unfold((receiver, None), |(mut receiver, previous)| async move {
        drop(previous);
        Some(match receiver.recv().await? {
            Ok((message, memory)) => (Ok(message), (receiver, memory)),
            Err(status) => (Err(status), (receiver, None)),
        })
    })
}

/// A scan, which returns its answer. Blocks.
type Work<R> = Box<dyn FnOnce(OnProgress<'_>) -> Result<R, Status> + Send>;

/// Reports the progress of a scan to its caller and in the metrics.
struct Reporter<S> {
    send: S,
    metrics: Metrics,
    cancelled: CancellationToken,
    last: Progress,
    /// How much the metrics contain.
    counted: u64,
    calls: u64,
    sent: Option<Instant>,
}

impl<S: Fn(v1::ScanProgress)> Reporter<S> {
    /// Breaks if no caller waits for the answer.
    fn report(&mut self, progress: Progress) -> ControlFlow<()> {
        let is_idle = progress == self.last;
        self.last = progress;
        self.calls += 1;
        // Looking at the clock for each record would cost as much as counting it.
        if !is_idle && self.calls % 256 != 1 {
            return ControlFlow::Continue(());
        }
        self.count();
        if self.cancelled.is_cancelled() {
            return ControlFlow::Break(());
        }
        if self.sent.is_none_or(|sent| sent.elapsed() >= PROGRESS) {
            self.sent = Some(Instant::now());
            let Progress { read, total } = progress;
            (self.send)(v1::ScanProgress { read, total });
        }
        ControlFlow::Continue(())
    }
}

impl<S> Reporter<S> {
    fn count(&mut self) {
        self.metrics
            .add_scanned(self.last.read.saturating_sub(self.counted));
        self.counted = self.last.read;
    }
}

impl<S> Drop for Reporter<S> {
    fn drop(&mut self) {
        self.count();
    }
}

fn parse_filter(filter: v1::WaitingFilter, now: Timestamp) -> Result<Filter, Status> {
    let wrong = |field: &str, problem: String| invalid(field, problem, "FILTER_INVALID", []);
    for (field, text) in [
        ("place", &filter.place),
        ("error_code", &filter.error_code),
        ("error_class", &filter.error_class),
        ("origin_topic", &filter.origin_topic),
    ] {
        if text.len() > MAX_TEXT {
            return Err(wrong(field, format!("must have at most {MAX_TEXT} bytes")));
        }
    }
    let text = |text: String| (!text.is_empty()).then_some(text);
    let place = text(filter.place).map(|place| {
        place.parse().map_err(|_| {
            let problem = format!(
                "`{}` is not due, scheduler or a tier such as 30s",
                bounded(&place)
            );
            wrong("place", problem)
        })
    });
    let class = text(filter.error_class);
    if let Some(class) = &class
        && class.parse::<ErrorClass>().is_err()
    {
        let known = ErrorClass::ALL.map(ErrorClass::as_str).join(", ");
        return Err(wrong(
            "error_class",
            format!("`{}` is not one of {known}", bounded(class)),
        ));
    }
    let entered_before = filter.older_than.map(|age| -> Result<Timestamp, Status> {
        let age = from_duration(&age).filter(|age| *age <= MAX_WAIT);
        let age =
            age.ok_or_else(|| wrong("older_than", format!("must be a duration from 0 to {MAX_WAIT}")))?;
        let age = i64::try_from(age.as_millis()).unwrap_or(i64::MAX);
        Ok(Timestamp::from_millis(now.as_millis().saturating_sub(age)))
    });
    Ok(Filter {
        place: place.transpose()?,
        code: text(filter.error_code),
        class,
        entered_before: entered_before.transpose()?,
        more_attempts_than: filter.more_attempts_than,
        origin_topic: text(filter.origin_topic),
        origin_partition: filter.origin_partition,
        origin_offset: filter.origin_offset,
        in_tiers: false,
        job: None,
        states_since: None,
    })
}

fn requested_position(position: Option<v1::Position>) -> Result<Position, Status> {
    let position = position
        .filter(|position| is_topic_name(&position.topic) && position.partition >= 0 && position.offset >= 0);
    let position = position.ok_or_else(|| {
        let problem = "must have the name of a topic, and a partition and an offset of at least 0";
        invalid("position", problem, "POSITION_INVALID", [])
    })?;
    Ok(Position {
        topic: position.topic.into(),
        partition: position.partition,
        offset: position.offset,
    })
}

fn scan_failed(error: &ReadError) -> Status {
    match error {
        ReadError::Late { .. } => {
            let text = format!(
                "the scan took more than {} s; narrow the filter",
                TIMEOUT.as_secs()
            );
            status(Code::DeadlineExceeded, text, "SCAN_TOO_LONG", [])
        }
        error => {
            let text = format!("cannot read from Kafka: {}", error_chain(error));
            status(Code::Unavailable, text, "KAFKA_UNAVAILABLE", [])
        }
    }
}

fn trace_failed(error: TraceError) -> Status {
    match error {
        TraceError::Read(error) => scan_failed(&error),
        error @ TraceError::OtherTopic(_) => invalid("position", error.to_string(), "POSITION_INVALID", []),
        error @ (TraceError::Gone(_) | TraceError::NoPartition(..) | TraceError::NotWritten(..)) => {
            status(Code::NotFound, error.to_string(), "RECORD_NOT_FOUND", [])
        }
        error @ TraceError::NoOrigin(_) => status(Code::NotFound, error.to_string(), "ORIGIN_UNKNOWN", []),
    }
}

/// A new call with the same credentials has the new scopes from its start.
pub(super) fn scopes_changed() -> Status {
    let text = "the scopes of the caller have changed; repeat the call";
    status(Code::Unavailable, text, "SCOPES_CHANGED", [])
}

fn coverage(selection: &Selection, found: &Found) -> v1::WaitingCoverage {
    v1::WaitingCoverage {
        as_of: Some(to_timestamp(selection.now)),
        scheduler_truncated: found.is_truncated,
    }
}

fn counts_message(counts: &Counts) -> v1::WaitingCounts {
    let (codes, other_codes) = counts.codes(CODES);
    v1::WaitingCounts {
        records: counts.records,
        overdue: counts.overdue,
        malformed: counts.malformed,
        average_attempts: counts.average_attempts(),
        max_attempts: counts.max_attempts,
        next_due: counts.next_due.and_then(time_of_record),
        oldest: counts.oldest.and_then(time_of_record),
        codes: codes
            .into_iter()
            .map(|(code, records)| v1::WaitingCode {
                error_code: code.to_owned(),
                records,
            })
            .collect(),
        other_codes,
        forecast: (!counts.per_minute.is_empty()).then(|| v1::WaitingForecast {
            per_minute: counts.per_minute.clone(),
            later: counts.later,
        }),
    }
}

fn origin_message(origin: &Origin) -> v1::Position {
    v1::Position {
        topic: origin.topic.to_string(),
        partition: origin.partition,
        offset: origin.offset,
    }
}

fn record_message(row: &Row, pipeline: &Pipeline) -> v1::WaitingRecord {
    let facts = &row.facts;
    let origin = facts.origin.as_ref();
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let (key, key_truncated) = row.details.key.clone().unzip();
    v1::WaitingRecord {
        pipeline: pipeline.name.to_string(),
        place: row.place.to_string(),
        position: Some((&row.position).into()),
        due_at: facts.due.and_then(time_of_record),
        attempts: facts.attempts.unwrap_or(0),
        error_class: text(&facts.class),
        error_code: text(&facts.code),
        error_message: text(&row.details.message),
        failed_at: facts.failed_at.and_then(time_of_record),
        origin: origin.map(origin_message),
        origin_timestamp: origin
            .and_then(|origin| origin.timestamp)
            .and_then(time_of_record),
        malformed: facts.is_malformed,
        key,
        key_truncated: key_truncated.unwrap_or(false),
        key_withheld: false,
        job_id: row.job.map_or_else(String::new, |job| job.to_string()),
    }
}

fn trace_message(traced: Traced) -> v1::PipelineTrace {
    v1::PipelineTrace {
        pipeline: traced.pipeline.to_string(),
        origin: Some((&traced.origin).into()),
        origin_timestamp: traced.origin_timestamp.and_then(time_of_record),
        steps: traced.timeline.steps.into_iter().map(step_message).collect(),
        truncated: traced.is_truncated,
        outcome: traced.timeline.outcome.into(),
        next_due: traced.timeline.next_due.and_then(time_of_record),
        gaps: traced.timeline.gaps,
        searched_since: traced.since.and_then(time_of_record),
    }
}

/// Leaves out the first steps of a trace that is too large: the outcome follows from the last ones.
fn keep_last_steps(trace: &mut v1::PipelineTrace, bytes: usize) {
    let mut size = trace.encoded_len();
    let is_left_out = |step: &&v1::TraceStep| {
        let is_too_large = size > bytes;
        size = size.saturating_sub(step.encoded_len());
        is_too_large
    };
    let left_out = trace.steps.iter().take_while(is_left_out).count();
    trace.truncated |= left_out > 0;
    trace.steps.drain(..left_out);
}

fn step_message(
    Step {
        event,
        copy,
        decision,
    }: Step,
) -> v1::TraceStep {
    // Nothing was written for it, or it is not there.
    let has_copy = decision.is_none() || !copy.is_dead();
    let facts = copy.facts;
    let due = facts.due.filter(|_| event == Event::Waits);
    // Released copies still have the headers of their last failure.
    let has_failed = matches!(event, Event::Waits | Event::Died);
    let text = |text: Option<String>| text.filter(|_| has_failed).unwrap_or_default();
    let failed_at = facts.failed_at.filter(|_| has_failed);
    let wait = due
        .zip(failed_at.or(facts.written))
        .map(|(due, from)| to_duration(due.since(from).into()));
    let decision = decision.unwrap_or_default();
    let redrive_id = match &*decision.redrive_id {
        "" if event == Event::Redriven => facts.redrive_id.unwrap_or_default(),
        _ => decision.redrive_id,
    };
    v1::TraceStep {
        event: event.into(),
        time: facts
            .written
            .filter(|_| has_copy)
            .or(decision.time)
            .and_then(time_of_record),
        position: Some((&copy.position).into()),
        place: copy.location.to_string(),
        attempts: facts.attempts.unwrap_or(0),
        error_class: text(facts.class),
        error_code: text(facts.code),
        error_message: text(copy.message),
        failed_at: failed_at.and_then(time_of_record),
        due_at: due.and_then(time_of_record),
        wait,
        redrives: facts.redrives,
        by: decision.by,
        reason: decision.reason,
        redrive_id,
        destination: decision.destination,
        edited: decision.edited,
    }
}

/// Others took too long.
pub(super) fn too_many_scans() -> Status {
    let text = format!(
        "other calls took more than {} s; retry later",
        QUEUE_TIMEOUT.as_secs()
    );
    status(Code::ResourceExhausted, text, "TOO_MANY_SCANS", [])
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{SyncSender, sync_channel};

    use prometheus_client::registry::Registry;

    use futures::StreamExt as _;
    use redeliver_service::memory_budget::{Caller, MemoryBudget};

    use super::*;

    fn reporter(cancelled: &CancellationToken, sent: SyncSender<u64>) -> Reporter<impl Fn(v1::ScanProgress)> {
        Reporter {
            send: move |progress: v1::ScanProgress| sent.send(progress.read).unwrap(),
            metrics: Metrics::register(&mut Registry::default()),
            cancelled: cancelled.clone(),
            last: Progress::default(),
            counted: 0,
            calls: 0,
            sent: None,
        }
    }

    #[tokio::test]
    async fn answers_hold_memory_until_read() {
        let (budget, caller) = (MemoryBudget::new(4 << 20), Caller::Anonymous(None));
        let is_free = || budget.try_reserve(&caller, 512 << 10).is_some();
        let memory = budget.reserve(&caller, 4 << 20).await;
        assert!(memory.is_some() && !is_free());
        let (sender, receiver) = mpsc::channel(1);
        sender.send(Ok(((), memory))).await.unwrap();
        drop(sender);
        let mut messages = std::pin::pin!(messages(receiver));
        assert!(messages.next().await.unwrap().is_ok() && !is_free());
        assert!(messages.next().await.is_none() && is_free());
    }

    #[test]
    fn cancelled_scan_ends() {
        for arrives in [1, 0] {
            let cancelled = CancellationToken::new();
            let (sender, _receiver) = sync_channel(10_000);
            let mut reporter = reporter(&cancelled, sender);
            let mut progress = Progress {
                read: 0,
                total: 10_000,
            };
            let mut report = || {
                progress.read += arrives;
                reporter.report(progress)
            };
            for _ in 0..1_000 {
                assert!(report().is_continue());
            }
            cancelled.cancel();
            let more = (0..1_000).take_while(|_| report().is_continue()).count();
            assert!(more < 256, "{more} more records");
        }
    }

    #[test]
    fn large_trace_keeps_last_steps() {
        let trace = |steps: u32, message: usize| v1::PipelineTrace {
            steps: (0..steps)
                .map(|attempts| v1::TraceStep {
                    attempts,
                    error_message: "x".repeat(message),
                    ..v1::TraceStep::default()
                })
                .collect(),
            ..v1::PipelineTrace::default()
        };
        let mut small = trace(1_000, 100);
        keep_last_steps(&mut small, MAX_TRACE);
        assert_eq!((small.steps.len(), small.truncated), (1_000, false));
        let mut large = trace(1_000, 10_000);
        keep_last_steps(&mut large, MAX_TRACE);
        assert!(large.truncated && large.encoded_len() <= MAX_TRACE);
        let attempts: Vec<u32> = large.steps.iter().map(|step| step.attempts).collect();
        assert!(attempts.len() > 300 && attempts.is_sorted() && attempts.last() == Some(&999));
        // Also one step can be too large.
        let mut one = trace(1, 10_000);
        keep_last_steps(&mut one, 1_000);
        assert_eq!((one.steps.len(), one.truncated), (0, true));
    }

    #[test]
    fn progress_is_throttled() {
        let (sender, receiver) = sync_channel(10_000);
        let cancelled = CancellationToken::new();
        let mut reporter = reporter(&cancelled, sender);
        for read in 1..=10_000 {
            let progress = Progress { read, total: 10_000 };
            assert!(reporter.report(progress).is_continue());
        }
        drop(reporter);
        let sent: Vec<u64> = receiver.iter().collect();
        assert!(sent[0] == 1 && sent.len() < 100, "{sent:?}");
    }
}
