//! Clients of the inspector and the scheduler, for the viewer of a page.

use std::time::Duration;

use redeliver_client::{
    AuditClient, ClientError, Connection, DeadLetterClient, Endpoint, JobClient, OverviewClient,
    RedriveClient, ScheduleClient, WaitingClient,
};

/// How long a page waits for a service. A viewer must know within two seconds that a service is gone.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(1_500);
const CALL_TIMEOUT: Duration = Duration::from_secs(15);

/// The services behind the console. Clones share their connections.
#[derive(Clone, Debug)]
pub struct Backend {
    inspector: Connection,
    scheduler: Connection,
}

impl Backend {
    /// Connects with the first call. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// If an endpoint is invalid.
    pub fn new(inspector: Endpoint, scheduler: Endpoint) -> Result<Self, ClientError> {
        let connect = |endpoint: Endpoint| {
            let endpoint = endpoint.connect_timeout(CONNECT_TIMEOUT).timeout(CALL_TIMEOUT);
            endpoint.connect_lazily()
        };
        Ok(Self {
            inspector: connect(inspector)?,
            scheduler: connect(scheduler)?,
        })
    }

    /// The address of the inspector.
    #[must_use]
    pub fn inspector(&self) -> &str {
        self.inspector.url()
    }

    /// The address of the scheduler.
    #[must_use]
    pub fn scheduler(&self) -> &str {
        self.scheduler.url()
    }

    pub(crate) fn dead_letters(&self) -> DeadLetterClient {
        DeadLetterClient::new(&self.inspector)
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

    pub(crate) fn jobs(&self) -> JobClient {
        JobClient::new(&self.scheduler)
    }

    pub(crate) fn schedules(&self) -> ScheduleClient {
        ScheduleClient::new(&self.scheduler)
    }
}
