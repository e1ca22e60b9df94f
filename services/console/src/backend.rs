//! Clients of the inspector and the scheduler, for the viewer of a page.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{FromRequestParts, Request, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::Response;
use redeliver_client::messages::{GetAccessRequest, GetAccessResponse};
use redeliver_client::{
    AccessClient, AuditClient, ClientError, Connection, ControlClient, DeadLetterClient, Endpoint, JobClient,
    OverviewClient, RedriveClient, ScheduleClient, WaitingClient,
};
use redeliver_core::error_chain::error_chain;
use redeliver_runtime::config::{ConfigError, Secret};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

use crate::access::Access;
use crate::config::{BackendConfig, ConsoleConfig};

/// How long a page waits for a service that is silent. Whoever opens it must know within two seconds.
const PATIENCE: Duration = Duration::from_millis(1_500);
/// How long an open page waits for an answer to its question whether the inspector is there. It asks each second, so its viewer knows within two, also while the
/// page is read.
const HEARTBEAT: Duration = Duration::from_millis(900);
/// Longer than the patience, which says what is wrong without a second connection that asks for the reason.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long it waits for one that works.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);
/// A machine that is gone does not close its connections. Calls wait for its return until the connection is given up, after twice this time.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// How long an answer to it counts for other viewers.
const HEARD: Duration = Duration::from_millis(100);
/// How many payloads are downloaded at the same time.
pub(crate) const MAX_DOWNLOADS: usize = 4;

/// The services behind the console, called with the token of the viewer. Clones share their connections. Handlers get it as an extractor.
#[derive(Clone, Debug)]
pub(crate) struct Backend {
    inspector: Connection,
    scheduler: Connection,
    /// Another connection to the inspector: all calls of one share a window, which a download fills if its viewer is slow.
    downloads: Connection,
    permits: Arc<Semaphore>,
    /// Whether the inspector was silent, and when it was asked.
    heard: Arc<Mutex<Option<(Instant, bool)>>>,
    token: Option<Secret>,
}

/// A service behind the console.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Service {
    Inspector,
    Scheduler,
}

/// What viewers call the services, by their addresses.
pub(crate) type Names = Arc<[(String, &'static str)]>;

tokio::task_local! {
    static NAMES: Names;
}

/// Makes pages that can name these services.
pub(crate) async fn name_services(State(names): State<Names>, request: Request, next: Next) -> Response {
    NAMES.scope(names, next.run(request)).await
}

/// What viewers call the service at an address, as the beginning of a sentence.
pub(crate) fn name_of(url: &str) -> String {
    let known = |names: &Names| {
        let named: Vec<&str> = names
            .iter()
            .filter(|(of, _)| of == url)
            .map(|(_, name)| *name)
            .collect();
        (!named.is_empty()).then(|| format!("The {}", named.join(" and ")))
    };
    NAMES
        .try_with(known)
        .ok()
        .flatten()
        .unwrap_or_else(|| url.to_owned())
}

impl Service {
    /// The one that controls what has this name. Only the scheduler knows applications.
    pub(crate) fn of_control(name: &str) -> Self {
        if name.starts_with("app/") {
            Self::Scheduler
        } else {
            Self::Inspector
        }
    }
}

impl Backend {
    /// Connects with the first call. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// If an endpoint is invalid.
    pub(crate) fn new(config: &ConsoleConfig) -> Result<Self, ConfigError> {
        let connect = |field, config: &BackendConfig| {
            let connection = endpoint(config).connect_lazily();
            connection.map_err(|error| ConfigError::of_field(field, error_chain(&error)))
        };
        Ok(Self {
            inspector: connect("console.inspector", &config.inspector)?,
            scheduler: connect("console.scheduler", &config.scheduler)?,
            downloads: connect("console.inspector", &config.inspector)?,
            permits: Arc::new(Semaphore::new(MAX_DOWNLOADS)),
            heard: Arc::default(),
            token: None,
        })
    }

    /// The same services, called with this token.
    ///
    /// # Errors
    /// If the token cannot be sent.
    pub(crate) fn with_token(&self, token: Secret) -> Result<Self, ClientError> {
        Self {
            token: Some(token),
            ..self.clone()
        }
        .with_reason("")
    }

    /// The same viewer, with this reason for the audit log if it is not empty.
    ///
    /// # Errors
    /// If the token cannot be sent.
    pub(crate) fn with_reason(&self, reason: &str) -> Result<Self, ClientError> {
        let token = self.token.as_ref().map(Secret::expose);
        Ok(Self {
            inspector: self.inspector.with_caller(token, reason)?,
            scheduler: self.scheduler.with_caller(token, reason)?,
            downloads: self.downloads.with_caller(token, reason)?,
            permits: self.permits.clone(),
            heard: self.heard.clone(),
            token: self.token.clone(),
        })
    }

    pub(crate) fn names(&self) -> Names {
        let named = [(&self.inspector, "inspector"), (&self.scheduler, "scheduler")];
        named
            .map(|(connection, name)| (connection.url().to_owned(), name))
            .into()
    }

    pub(crate) fn dead_letters(&self) -> DeadLetterClient {
        DeadLetterClient::new(&self.inspector)
    }

    /// For one download, which the permit allows; `None` if there are too many.
    pub(crate) fn download(&self) -> Option<(DeadLetterClient, OwnedSemaphorePermit)> {
        let permit = self.permits.clone().try_acquire_owned().ok()?;
        Some((DeadLetterClient::new(&self.downloads), permit))
    }

    pub(crate) fn redrives(&self) -> RedriveClient {
        RedriveClient::new(&self.inspector)
    }

    pub(crate) fn waiting(&self) -> WaitingClient {
        WaitingClient::new(&self.inspector)
    }

    pub(crate) fn audit(&self) -> AuditClient {
        AuditClient::new(&self.inspector)
    }

    pub(crate) fn overview(&self) -> OverviewClient {
        OverviewClient::new(&self.inspector)
    }

    /// For what has this name.
    pub(crate) fn controls(&self, name: &str) -> ControlClient {
        ControlClient::new(self.connection(Service::of_control(name)))
    }

    /// What the viewer may do in a service.
    pub(crate) async fn access(&self, service: Service) -> Access {
        Access::of(self.permissions(service).await)
    }

    /// The scopes of the viewer in a service.
    ///
    /// # Errors
    /// If the service is unavailable, or does not accept the token.
    pub(crate) async fn permissions(&self, service: Service) -> Result<GetAccessResponse, ClientError> {
        let client = AccessClient::new(self.connection(service));
        client.get(GetAccessRequest {}).await
    }

    /// Who does not answer, if it is the inspector: what pages show that stay live is from there. One question is for all viewers that wait for its answer.
    pub(crate) async fn silence(&self) -> Option<String> {
        let mut heard = self.heard.lock().await;
        let is_silent = match *heard {
            Some((at, is_silent)) if at.elapsed() < HEARD => is_silent,
            _ => {
                let asked = timeout(HEARTBEAT, self.permissions(Service::Inspector)).await;
                // A refusal is an answer.
                let is_silent = matches!(asked, Err(_) | Ok(Err(ClientError::Unreachable { .. })));
                *heard = Some((Instant::now(), is_silent));
                is_silent
            }
        };
        is_silent.then(|| format!("{} does not answer", name_of(self.inspector.url())))
    }

    fn connection(&self, service: Service) -> &Connection {
        match service {
            Service::Inspector => &self.inspector,
            Service::Scheduler => &self.scheduler,
        }
    }

    pub(crate) fn jobs(&self) -> JobClient {
        JobClient::new(&self.scheduler)
    }

    pub(crate) fn schedules(&self) -> ScheduleClient {
        ScheduleClient::new(&self.scheduler)
    }
}

fn endpoint(config: &BackendConfig) -> Endpoint {
    let mut endpoint = Endpoint::new(config.url.as_str())
        .patience(PATIENCE)
        .connect_timeout(CONNECT_TIMEOUT)
        .timeout(CALL_TIMEOUT)
        .keep_alive(KEEP_ALIVE);
    if let Some(path) = &config.ca_file {
        endpoint = endpoint.ca_file(path);
    }
    if let (Some(certificate), Some(key)) = (&config.cert_file, &config.key_file) {
        endpoint = endpoint.client_certificate(certificate, key);
    }
    if config.allow_plaintext_token {
        endpoint = endpoint.allow_plaintext_token();
    }
    endpoint
}

impl<S: Sync> FromRequestParts<S> for Backend {
    type Rejection = StatusCode;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, StatusCode> {
        // A layer has put it there, or has refused the request.
        parts
            .extensions
            .get::<Self>()
            .cloned()
            .ok_or(StatusCode::UNAUTHORIZED)
    }
}
