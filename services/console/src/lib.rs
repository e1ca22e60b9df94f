//! The web console: pages about what fails, what waits and what is due, rendered by the server.
//!
//! It has no access to Kafka and no rights of its own. Each page calls the inspector and the scheduler over gRPC with the token of its
//! viewer, so scopes, masking and the audit of disclosures are those of the APIs. It stores nothing, and keeps for a short time the triggers of schedules
//! and the renewals of sessions that it would otherwise repeat.
//!
//! | module | contents |
//! |---|---|
//! | `backend` | clients of the inspector and the scheduler |
//! | `access` | what a viewer may do in each of them |
//! | `command` | the command that does the same as a page |
//! | `site` | the addresses of the console |
//! | `security` | headers of every response, and which requests are refused |
//! | `sign_in` | sign-in, sign-out, and the session of each request |
//! | `oidc` | sign-in at an OpenID Connect provider |
//! | `session` | what the browser keeps about a viewer |
//! | `cookies`, `cookie_keys` | reads and sets cookies; encrypts them |
//! | `viewer` | who looks at the page that is made |
//! | `html` | times, numbers, bytes and small charts as HTML |
//! | `config` | the section of the configuration |
//! | `form` | forms: their fields, what protects them, and how one acts once |
//! | `page` | what pages share: frame, problems, addresses |
//! | `parameters` | parameters of addresses |
//! | `pages` | one module per page |
//! | `assets` | style sheet and scripts |

mod access;
mod assets;
mod backend;
mod command;
mod config;
mod cookie_keys;
mod cookies;
mod form;
mod html;
mod oidc;
mod page;
mod pages;
mod parameters;
mod security;
mod session;
mod sign_in;
mod site;
mod viewer;

use std::io;
use std::sync::PoisonError;

use anyhow::Context as _;
use axum::middleware::from_fn_with_state;
use axum::{Extension, Router};
use redeliver_core::SystemClock;
use redeliver_runtime::ProgramConfig;
use redeliver_runtime::admin::{self, Admin};
use redeliver_runtime::cli::Start;
use redeliver_runtime::config::ConfigError;
use redeliver_runtime::health::Health;
use redeliver_runtime::http_server::{self, HttpLimits};
use redeliver_runtime::listen::Listener;
use redeliver_runtime::metrics::register_process;
use redeliver_runtime::tasks::Tasks;
use redeliver_runtime::tls::{ClientCertificates, Protocols, ServerTls, TlsMetrics};
use redeliver_runtime::watched_files::{StaleCredentials, follow};
use tokio_util::sync::CancellationToken;

use backend::Backend;
pub use config::{ConsoleConfig, Sections};
use sign_in::Gate;
use site::Sites;

/// All pages.
pub struct Console {
    routes: Router,
    gate: Option<Gate>,
}

impl Console {
    /// Connects to the services with the first page. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// What is wrong with the configuration, or with a file that it names.
    pub fn new(config: &ConsoleConfig) -> Result<Self, ConfigError> {
        let backend = Backend::new(config)?;
        let gate = Gate::new(config, &backend)?;
        let names = backend.names();
        let pages = match &gate {
            None => pages::routes().layer(Extension(backend)),
            Some(gate) => pages::routes()
                .layer(from_fn_with_state(gate.clone(), sign_in::require_session))
                .merge(gate.routes()),
        };
        let sites = Sites::new(&config.hosts, config.tls.is_enabled());
        let routes = pages
            .merge(assets::routes())
            .fallback(pages::not_found)
            .layer(from_fn_with_state(names, backend::name_services))
            .layer(from_fn_with_state(sites, security::protect));
        Ok(Self { routes, gate })
    }

    /// Serves all pages until `stop` is cancelled.
    ///
    /// # Errors
    /// None at present: errors of a connection end this connection only.
    pub async fn serve(self, listener: Listener, stop: CancellationToken) -> io::Result<()> {
        let limits = HttpLimits::default();
        let served = http_server::serve(listener, self.routes, limits, stop.cancelled_owned()).await;
        if let Some(gate) = self.gate {
            gate.finish().await;
        }
        served
    }
}

/// Checks the files that the configuration names.
///
/// # Errors
/// When one cannot be used. The error names the field and the file.
pub fn check(config: &ProgramConfig<Sections>) -> Result<(), ConfigError> {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let runtime = runtime.map_err(|error| ConfigError::of_field("console", error.to_string()))?;
    let _guard = runtime.enter();
    tls(&config.own.console)?;
    Console::new(&config.own.console).map(drop)
}

fn tls(config: &ConsoleConfig) -> Result<Option<ServerTls>, ConfigError> {
    ServerTls::load(
        "console",
        &config.tls,
        Protocols::Http,
        ClientCertificates::Required,
    )
}

/// Runs the console until the process shuts down.
///
/// # Errors
/// When an address cannot be bound, a file cannot be used, or a task has failed.
pub async fn run(start: Start, own: Sections) -> anyhow::Result<()> {
    let config = &own.console;
    let mut listener = Listener::bind("console.listen", config.listen)?;
    if let Some(tls) = tls(config)? {
        listener = listener.with_tls(tls);
    }
    let console = Console::new(config)?;
    let keys = console
        .gate
        .as_ref()
        .map(Gate::keys)
        .filter(|keys| !keys.is_empty());
    {
        let mut registry = start.registry.lock().unwrap_or_else(PoisonError::into_inner);
        register_process(&mut registry, "console", &start.config.instance, &SystemClock);
        if let Some(keys) = keys.as_ref() {
            keys.observe(StaleCredentials::register(&mut registry).of(cookie_keys::FIELD));
        }
        let metrics = TlsMetrics::register(&mut registry);
        start.admin.observe(&metrics);
        listener.observe(&metrics);
    }
    let stop = start.shutdown.clone();
    let mut tasks = Tasks::new(start.shutdown);
    let health = Health::new();
    // It is ready as soon as it serves: if a service does not answer, its pages say so.
    health.part("console").ready();
    if let Some(keys) = keys {
        let check = move || {
            keys.check();
        };
        tasks.spawn_background("cookie-keys", follow(check));
    }
    let admin = Admin {
        health,
        registry: start.registry,
        config: start.config.clone(),
        effective: start.effective,
        shutdown: stop.clone(),
    };
    tasks.spawn_background("admin", admin::serve(start.admin, admin));
    let address = listener.local_addr().context("the address of the console")?;
    tracing::info!(%address, sign_in = ?config.sign_in, "serving the console");
    tasks.spawn("console", console.serve(listener, stop));
    Ok(tasks
        .run_until_shutdown(start.config.shutdown.grace.duration())
        .await?)
}
