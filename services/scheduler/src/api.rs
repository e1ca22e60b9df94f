//! The API: gRPC and REST on one port, with the same operations.
//!
//! | module | purpose |
//! |---|---|
//! | `jobs` | the operations: commands through Kafka, queries of the index |
//! | `list` | the list of waiting jobs |
//! | `flows` | the list of applications; what is left to dispatch, for the one-shot mode |
//! | `control` | what operators pause and limit, over REST: `/v1/controls` and `/v1/applications` |
//! | `completeness` | whether the index contains everything that the state topic contains |
//! | `error` | errors of requests |
//! | `problem` | problem documents of REST |
//! | `limits` | limits for clients |
//! | `hosts` | the hosts that requests may name |
//! | `rates` | the rate of requests of each caller |
//! | `call` | what all operations need of a request |
//! | `changes` | records who changes schedules and jobs |
//! | `body_budget` | the memory for the bodies of all requests |
//! | `grpc` | `redeliver.v1.JobService` |
//! | `schedules` | recurring schedules: the operations, `redeliver.v1.ScheduleService` and `/v1/schedules` |
//! | `health` | gRPC health |
//! | `state_end` | whether the index lacks records of the state topic |
//! | `rest` | `/v1/jobs` and `/v1/stats` |
//! | `openapi` | the OpenAPI document of REST, and its page |
//! | `view` | jobs as JSON |

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::http::Request;
use axum::middleware;
use axum::response::{IntoResponse as _, Response};
use prometheus_client::metrics::counter::Counter;
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::{ReadError, TopicClient};
use redeliver_proto::v1::control_service_server::ControlServiceServer;
use redeliver_proto::v1::job_service_server::JobServiceServer;
use redeliver_proto::v1::schedule_service_server::ScheduleServiceServer;
use redeliver_runtime::config::{ConfigError, SchedulerConfig};
use redeliver_runtime::hosts::Host as AcceptedHost;
use redeliver_runtime::http_server::{self, HttpLimits};
use redeliver_runtime::listen::Listener;
use redeliver_runtime::tls::Protocols;
use redeliver_service::audit::AuditWriter;
use redeliver_service::control::Controls;
use redeliver_service::control::grpc::Service as ControlService;
use redeliver_service::control::settings::AppSettings;
use redeliver_service::grpc::{is_grpc, with_status_of_timeout};
use redeliver_service::host::{Host, api_tls};
use redeliver_service::identity::{self, Authentication, Authenticator, authenticate};
use redeliver_service::installation::Installation;
use redeliver_service::limit_metrics::LimitMetrics;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::service::Routes;
use tonic_health::pb::health_server::{Health, HealthServer};
use tower::Layer as _;

use crate::answers::PendingOutcomes;
use crate::config::rules;
use crate::controls::LiveAppStates;
use crate::index::Index;
use crate::service::max_waiting;

mod body_budget;
mod call;
mod changes;
mod completeness;
mod control;
mod documented;
mod error;
mod error_parts;
mod flows;
mod grpc;
mod health;
mod hosts;
mod jobs;
mod list;
mod openapi;
mod problem;
mod rates;
mod rest;
mod schedules;
mod state_end;
mod view;

use body_budget::{BodyBudget, reserve_body};
use changes::{ChangeLog, ENTRIES, run_entries};
use hosts::check_host;
use jobs::Jobs;
use rates::{CallerRates, limit_rate};
pub use schedules::{OccurrenceView, ScheduleView};
use state_end::StateEnd;

/// The share of `shutdown.grace` for which commands that are written wait for their outcomes once the process shuts down. Its
/// lanes, which have a share of their own, run on meanwhile.
const DRAIN_SHARE: f64 = 0.15;
/// The maximum size of a message for control, health and reflection, in bytes. They contain a name, and a reason.
const SMALL_MESSAGE: usize = 4 << 10;
/// How long responses may take afterwards.
const CLOSING: Duration = Duration::from_secs(2);
/// The section of the configuration.
const SECTION: &str = "scheduler";

/// A failure of the API server.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The server failed.
    #[error("serving the API")]
    Serve(#[source] io::Error),
    /// The OpenAPI document cannot be written.
    #[error("writing the OpenAPI document")]
    Document(#[from] serde_json::Error),
    /// The descriptors for gRPC reflection are invalid.
    #[error("setting up gRPC reflection")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// Checks the files of the API: certificates, tokens, keys.
pub(crate) fn check(config: &SchedulerConfig) -> Result<(), ConfigError> {
    let api = config.api();
    api_tls(SECTION, &api, Protocols::Http)?;
    Authenticator::check(SECTION, &api)
}

/// Binds the listener of the API.
pub(crate) fn listen(host: &Host) -> anyhow::Result<Listener> {
    host.listen(SECTION, &host.config.scheduler.api(), Protocols::Http)
}

/// Adds the API to a host. The lanes of [`crate::mount`] can run in this process or in others. Until the API follows the answers
/// topic, it is not ready and refuses commands. Does nothing if the process shuts down before the control topic was read.
///
/// # Errors
/// When the token or the partitions of the ingest topic cannot be read, or a thread cannot be started.
pub async fn mount<I: Index>(host: &mut Host, index: I, listener: Listener) -> anyhow::Result<()> {
    let Some(control) = host.control().await? else {
        return Ok(());
    };
    let config = host.config.clone();
    let scheduler = &config.scheduler;
    let ingest: Arc<str> = scheduler.topics.ingest.as_str().into();
    let (kafka, topic) = (host.kafka.clone(), ingest.clone());
    let state: Arc<str> = scheduler.topics.state.as_str().into();
    let opened = tokio::task::spawn_blocking(move || {
        let topics = TopicClient::new(&kafka)?;
        let (id, partitions) = (topics.known_id(&topic), topics.partitions(&topic)?);
        Ok::<_, ReadError>((id, partitions, StateEnd::new(&kafka, state)?))
    });
    let (ingest_id, partitions, state_end) = opened
        .await
        .context("reading the partitions of the ingest topic and of the state topic")??;
    let authenticator = Authenticator::start(host, SECTION, &scheduler.api())?;
    let outcomes = PendingOutcomes::new();
    let address = listener.local_addr().context("reading the address of the API")?;
    let ending = Ending {
        shutdown: host.tasks.shutdown().clone(),
        drain: config.shutdown.grace.duration().mul_f64(DRAIN_SHARE),
        gave_up: CancellationToken::new(),
        ended: CancellationToken::new(),
        // The lanes of this process decide the commands that it has written.
        lanes: host.hold_lanes(),
    };
    let metrics = LimitMetrics::register(
        &mut host.registry(),
        "scheduler_api_limited",
        "Connections and requests refused by limits of the API",
        &["host", "rate", "request_bytes"],
    );
    let unrecorded = Counter::default();
    host.registry().register(
        "scheduler_audit_failures",
        "Changes refused because the audit topic cannot be written",
        unrecorded.clone(),
    );
    let (entries, pending_entries) = mpsc::channel(ENTRIES);
    let writer = AuditWriter::new(host, "scheduler")?;
    host.tasks.spawn(
        "scheduler-audit",
        run_entries(pending_entries, writer, host.clock.clone(), unrecorded),
    );
    let jobs = Arc::new(Jobs {
        changes: ChangeLog {
            records_jobs: scheduler.record_job_changes,
            entries,
        },
        index,
        producer: Producer::new(&host.kafka)?,
        ingest,
        partitions,
        rules: rules(&config)?,
        topics: host.topic_watch()?,
        max_waiting: max_waiting(scheduler),
        app_states: LiveAppStates::new(AppSettings::of(&config), Some(control.clone())),
        controls: Arc::new(Controls::new(
            host,
            "scheduler",
            control,
            authenticator.clone(),
            ending.gave_up.clone(),
        )),
        window: config.scheduler.window.duration(),
        outcomes: outcomes.clone(),
        state_end,
        clock: host.clock.clone(),
        gave_up: ending.gave_up.clone(),
        authenticator: authenticator.clone(),
        rates: CallerRates::new(scheduler.limits.requests_per_second, &metrics),
        bodies: BodyBudget::new(scheduler.limits.request_bytes, &metrics),
        max_batch: usize::try_from(scheduler.limits.batch_bytes).unwrap_or(usize::MAX),
    });
    flows::run_until_dispatched(host, &jobs, ingest_id);
    let hosts = scheduler.accepted_hosts();
    let server = Server {
        installation: Installation::of(host),
        hosts: hosts.map(|hosts| hosts.iter().map(|host| AcceptedHost::new(host)).collect()),
        http: HttpLimits {
            connections: usize::try_from(scheduler.limits.connections).unwrap_or(usize::MAX),
            idle_timeout: scheduler.limits.idle_timeout.duration(),
            body_timeout: scheduler.limits.body_timeout.duration(),
            ..metrics.http()
        },
        refused_hosts: metrics.of("host"),
    };

    let part = host.health.part("scheduler-answers");
    let (started, follows) = oneshot::channel();
    let (kafka, topic) = (host.kafka.clone(), scheduler.topics.answers.as_str().into());
    host.tasks.spawn_thread("scheduler-answers", {
        let ended = ending.ended.clone();
        move || {
            outcomes.follow(&kafka, &topic, &part, started, &ended);
            Ok::<(), io::Error>(())
        }
    })?;
    let ready = host.health.is_ready();
    host.tasks.spawn("scheduler-api", async move {
        let announce = async {
            if follows.await.is_ok() {
                tracing::info!(%address, "serving the job API (gRPC and REST)");
            }
            std::future::pending::<Infallible>().await
        };
        tokio::select! {
            served = serve(listener, server, jobs, authenticator, ready, ending) => served,
            never = announce => match never {},
        }
    });
    Ok(())
}

/// What the server is, and its limits.
struct Server {
    installation: Installation,
    /// The hosts that requests may name. `None`: any.
    hosts: Option<Arc<[AcceptedHost]>>,
    refused_hosts: Counter,
    http: HttpLimits,
}

impl Server {
    /// Adds the check of hosts.
    fn check_hosts(&self, router: Router) -> Router {
        let Some(hosts) = self.hosts.clone() else {
            return router;
        };
        let refused = self.refused_hosts.clone();
        router.layer(middleware::from_fn(move |request, next| {
            check_host(hosts.clone(), refused.clone(), request, next)
        }))
    }
}

/// How the API ends. On shutdown, it is not ready and refuses commands. Those that are written wait for their outcomes, at most
/// for `drain`; then it gives them up, and is ended.
struct Ending {
    shutdown: CancellationToken,
    drain: Duration,
    gave_up: CancellationToken,
    /// From now on, no connection is accepted, and no outcome is read.
    ended: CancellationToken,
    /// Keeps the lanes running.
    lanes: DropGuard,
}

impl Ending {
    async fn run(self, outcomes: &PendingOutcomes) {
        if tokio::time::timeout(self.drain, outcomes.close()).await.is_err() {
            tracing::warn!("commands still pending at shutdown; answering them as pending");
            self.gave_up.cancel();
            outcomes.close().await;
        }
        self.ended.cancel();
        drop(self.lanes);
    }
}

/// Serves requests until the shutdown, and gives those in progress some time to complete.
async fn serve<I: Index>(
    listener: Listener,
    server: Server,
    jobs: Arc<Jobs<I>>,
    authenticator: Authenticator,
    ready: watch::Receiver<bool>,
    ending: Ending,
) -> Result<(), ApiError> {
    // The thread that reads the answers topic must end in any case.
    let _ended = ending.ended.clone().drop_guard();
    let (reporter, health_service) = tonic_health::server::health_reporter();
    // Before the first request.
    health::set(&reporter, false).await;
    let outcomes = jobs.outcomes.clone();
    let router = router(jobs, authenticator, health_service, &server)?;
    let serving = http_server::serve(
        listener,
        router,
        server.http,
        ending.ended.clone().cancelled_owned(),
    );
    let ending = async {
        health::report(&reporter, ready, &ending.shutdown).await;
        ending.run(&outcomes).await;
        health::end_watches(reporter).await;
        tokio::time::sleep(CLOSING).await;
    };
    tokio::select! {
        result = serving => result.map_err(ApiError::Serve),
        () = ending => {
            tracing::warn!("grace period exceeded; dropping requests in progress");
            Ok(())
        }
    }
}

fn router<I: Index>(
    jobs: Arc<Jobs<I>>,
    authenticator: Authenticator,
    health: HealthServer<impl Health>,
    server: &Server,
) -> Result<Router, ApiError> {
    let max_message = jobs.max_request().max(jobs.max_batch);
    let service =
        JobServiceServer::new(grpc::Service::new(jobs.clone())).max_decoding_message_size(max_message);
    let schedules = ScheduleServiceServer::new(schedules::grpc::Service::new(jobs.clone()))
        .max_decoding_message_size(max_message);
    let controls = ControlServiceServer::new(ControlService::new(jobs.controls.clone()))
        .max_decoding_message_size(SMALL_MESSAGE);
    let authentication = Authentication {
        authenticator: authenticator.clone(),
        required: None,
        refuse: |refusal| identity::grpc::status(refusal).into_http(),
    };
    let (rates, bodies) = (jobs.rates.clone(), jobs.bodies.clone());
    let authenticated = Routes::new(service)
        .add_service(schedules)
        .add_service(identity::grpc::access_service(server.installation.clone()))
        .add_service(controls)
        .into_axum_router()
        .reset_fallback()
        .route_layer(middleware::from_fn(move |caller, request, next| {
            reserve_body(bodies.clone(), max_message, caller, request, next)
        }))
        .route_layer(middleware::from_fn(move |caller, request, next| {
            limit_rate(rates.clone(), caller, request, next)
        }))
        .route_layer(middleware::from_fn_with_state(authentication, authenticate));
    // Health and reflection require no identity, so that probes and tools work.
    let mut reflected = Routes::builder();
    reflected
        .add_service(reflection().build_v1()?.max_decoding_message_size(SMALL_MESSAGE))
        .add_service(
            reflection()
                .build_v1alpha()?
                .max_decoding_message_size(SMALL_MESSAGE),
        );
    let reflected = reflected.routes().into_axum_router().reset_fallback();
    // Probes name the address of a pod. They learn nothing that a web page could use, so they may name any host.
    let health = Routes::new(health.max_decoding_message_size(SMALL_MESSAGE))
        .into_axum_router()
        .reset_fallback();
    let (rest, paths) = rest::router(jobs, authenticator);
    let checked = rest
        .merge(authenticated)
        .merge(openapi::router(&openapi::document(paths))?)
        .merge(reflected)
        .fallback(not_found);
    let routes = server.check_hosts(checked).merge(health);
    let routes = routes.layer(middleware::map_request(async |request| {
        with_status_of_timeout(request)
    }));
    // A layer of the router would come after it has chosen the route.
    let routes = middleware::map_request(rest::split_verb).layer(routes);
    Ok(Router::new().fallback_service(routes))
}

fn reflection() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(redeliver_proto::DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .with_service_name("redeliver.v1.JobService")
        .with_service_name("redeliver.v1.ScheduleService")
        .with_service_name("redeliver.v1.ControlService")
        .with_service_name("redeliver.v1.AccessService")
        .with_service_name("grpc.health.v1.Health")
}

async fn not_found(request: Request<axum::body::Body>) -> Response {
    if is_grpc(request.headers()) {
        let status = tonic::Status::unimplemented("unknown service or method");
        return status.into_http::<axum::body::Body>();
    }
    rest::not_found().into_response()
}
