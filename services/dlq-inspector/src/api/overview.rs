//! The gRPC service `redeliver.v1.OverviewService`.

use std::sync::Arc;
use std::time::Duration;

use futures::stream;
use redeliver_core::pipeline::is_topic_name;
use redeliver_proto::error::{invalid, status};
use redeliver_proto::v1;
use redeliver_proto::v1::overview_service_server::OverviewService;
use redeliver_service::grpc::Reply;
use redeliver_service::identity::{self, Withdrawn};
use redeliver_service::memory_budget::Reservation;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Status};

use super::{Api, ResponseStream, WATCHERS, shutting_down};
use crate::access::Viewer;
use crate::dialect::Field;
use crate::masking::Fact;
use crate::metrics::WatcherGuard;
use crate::overview::task::Receiver;
use crate::overview::view::{Caller, Overview, Selection, digest};

/// A message follows after this time, if nothing changes.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How long a call waits for its first overview.
const FIRST_TIMEOUT: Duration = Duration::from_secs(30);
/// How many pipelines and problems a message has: by default, and at most.
const PIPELINES: (u32, u32) = (100, 1_000);
const PROBLEMS: (u32, u32) = (50, 500);

impl Caller for Viewer {
    fn sees(&self, topic: &str) -> bool {
        Self::sees(self, topic)
    }

    fn sees_control(&self, control: &str) -> bool {
        Self::sees_control(self, control)
    }

    fn lacks_codes(&self, topic: &str) -> bool {
        self.mask(topic).hides(Fact::Of(Field::ErrorCode))
    }
}

#[tonic::async_trait]
impl OverviewService for Api {
    async fn get_overview(&self, request: Request<v1::GetOverviewRequest>) -> Reply<v1::Overview> {
        let (viewer, request) = self.open(request)?;
        let response = self.newest_overview(&viewer, request.selection.unwrap_or_default());
        let response = self.observe("GetOverview", response);
        self.held(&viewer, response).await
    }

    type WatchOverviewStream = ResponseStream<v1::Overview>;

    async fn watch_overview(
        &self,
        request: Request<v1::WatchOverviewRequest>,
    ) -> Reply<Self::WatchOverviewStream> {
        let (viewer, request) = self.open(request)?;
        let stream = async { self.watch_overviews(viewer, request.selection.unwrap_or_default()) };
        self.observe("WatchOverview", stream).await
    }
}

/// A caller that watches overviews. It keeps nothing but the digest of what it has sent, so that it always continues with the newest one.
struct OverviewWatch {
    api: Api,
    viewer: Viewer,
    selection: Selection,
    receiver: Receiver,
    /// What was sent last, and when.
    sent: Option<(u64, Instant)>,
    /// The memory of the last message, which is sent once the next one is asked for.
    memory: Option<Reservation>,
    _permit: OwnedSemaphorePermit,
    _count: WatcherGuard,
}

impl Api {
    async fn newest_overview(
        &self,
        viewer: &Viewer,
        selection: v1::OverviewSelection,
    ) -> Result<v1::Overview, Status> {
        let selection = self.overview_selection(viewer, selection)?;
        let mut receiver = self.overviews.subscribe();
        let overview = first(&mut receiver, &self.stop).await?;
        Ok(overview.view(viewer, &selection))
    }

    fn watch_overviews(
        &self,
        viewer: Viewer,
        selection: v1::OverviewSelection,
    ) -> Result<ResponseStream<v1::Overview>, Status> {
        let selection = self.overview_selection(&viewer, selection)?;
        let Ok(permit) = self.limits.watchers.clone().try_acquire_owned() else {
            let text = format!("too many watchers; the limit is {WATCHERS}; retry later");
            return Err(status(Code::ResourceExhausted, text, "TOO_MANY_WATCHERS", []));
        };
        let watch = OverviewWatch {
            receiver: self.overviews.subscribe(),
            api: self.clone(),
            viewer,
            selection,
            sent: None,
            memory: None,
            _permit: permit,
            _count: self.metrics.count_overview_watcher(),
        };
        // It is asked for the next message once the client has read what was sent, apart from small buffers.
        Ok(Box::pin(stream::unfold(Some(watch), |watch| async move {
            let mut watch = watch?;
            let next = watch.next().await;
            let rest = next.is_ok().then_some(watch);
            Some((next, rest))
        })))
    }

    fn overview_selection(
        &self,
        viewer: &Viewer,
        requested: v1::OverviewSelection,
    ) -> Result<Selection, Status> {
        let order = requested.order();
        let v1::OverviewSelection {
            pipeline,
            prefix,
            after,
            ..
        } = requested;
        let wrong = |field: &str, problem: &str| Err(invalid(field, problem, "SELECTION_INVALID", []));
        for (field, text) in [("prefix", &prefix), ("after", &after)] {
            if !text.is_empty() && !is_topic_name(text) {
                return wrong(field, "is not the beginning of the name of a pipeline");
            }
        }
        let is_by_name = order == v1::OverviewOrder::ByName;
        if !after.is_empty() && !is_by_name {
            return wrong("after", "requires the order BY_NAME");
        }
        if !pipeline.is_empty() {
            self.pipelines(viewer, &pipeline)?;
        }
        Ok(Selection {
            pipeline,
            prefix,
            is_by_name,
            after,
            limit: limit("limit", requested.limit, PIPELINES)?,
            problem_limit: limit("problem_limit", requested.problem_limit, PROBLEMS)?,
        })
    }
}

/// A limit of a request: 0 stands for the default.
pub(super) fn limit(field: &str, limit: u32, (default, max): (u32, u32)) -> Result<usize, Status> {
    match limit {
        0 => Ok(default as usize),
        limit if limit <= max => Ok(limit as usize),
        _ => Err(invalid(
            field,
            format!("must be at most {max}"),
            "SELECTION_INVALID",
            [],
        )),
    }
}

/// The newest overview, or the first one.
async fn first(receiver: &mut Receiver, stop: &CancellationToken) -> Result<Arc<Overview>, Status> {
    let known = tokio::select! {
        known = timeout(FIRST_TIMEOUT, receiver.wait_for(Option::is_some)) => known,
        () = stop.cancelled() => return Err(shutting_down()),
    };
    match known {
        Ok(known) => known
            .map(|known| known.clone())
            .ok()
            .flatten()
            .ok_or_else(shutting_down),
        Err(_) => {
            let text = format!(
                "a survey takes more than {} s; retry later",
                FIRST_TIMEOUT.as_secs()
            );
            Err(status(Code::Unavailable, text, "OVERVIEW_UNAVAILABLE", []))
        }
    }
}

impl OverviewWatch {
    async fn next(&mut self) -> Result<v1::Overview, Status> {
        self.memory = None;
        let viewer = self.viewer.clone();
        let message = tokio::select! {
            message = self.changed() => message?,
            withdrawn = viewer.withdrawn() => return Err(match withdrawn {
                Withdrawn::Refused(refusal) => identity::grpc::status(&refusal),
                Withdrawn::ScopesChanged => super::waiting::scopes_changed(),
            }),
        };
        self.memory = Some(self.api.hold(&self.viewer, &message).await?);
        Ok(message)
    }

    /// The newest overview, once it differs from the last one, or after a while.
    async fn changed(&mut self) -> Result<v1::Overview, Status> {
        loop {
            let mut is_due = self.sent.is_none();
            if let Some((_, at)) = self.sent {
                tokio::select! {
                    changed = self.receiver.changed() => changed.map_err(|_| shutting_down())?,
                    () = sleep_until(at + KEEP_ALIVE) => is_due = true,
                    () = self.api.stop.cancelled() => return Err(shutting_down()),
                }
            }
            let overview = first(&mut self.receiver, &self.api.stop).await?;
            self.receiver.mark_unchanged();
            let message = overview.view(&self.viewer, &self.selection);
            let digest = digest(&message);
            if is_due || self.sent.is_none_or(|(sent, _)| sent != digest) {
                self.sent = Some((digest, Instant::now()));
                return Ok(message);
            }
        }
    }
}
