//! The dead-letter inspector lists, filters, counts and streams the dead letters of all topics of a cluster over gRPC.
//!
//! Dead letters stay in their topics, and a ledger topic records their states. The index of both is a local
//! file that can be rebuilt from Kafka at any time.
//!
//! | module | responsibility |
//! |---|---|
//! | [`dialect`] | parses the headers in which frameworks describe a failure |
//! | [`filter`] | AIP-160 filters: parser, expression, SQL condition |
//! | [`fingerprint`] | which dead letters fail for the same reason |
//! | [`index`] | the database: schema, writer, readers |
//! | [`json_fields`] | the fields of JSON values that are indexed |
//! | `ingest` | reads topics into the index |
//! | `completeness` | whether an answer contains everything that it should |
//! | [`ledger`] | the ledger topic |
//! | [`redrive`] | redrives, discards and restores, as jobs |
//! | [`group_states`] | states and notes of groups, and the topic that holds them |
//! | `config` | the section of the configuration |
//! | `access` | what each call requires, and what its caller sees |
//! | `masking` | what callers see of values, keys, headers and messages |
//! | `decoding` | values that were written with a schema, as JSON |
//! | `decoding_pool` | the threads that parse schemas and decode values |
//! | `schema_registry` | fetches and keeps schemas |
//! | `waiting` | records that wait for their next attempt, and the life of a record, read from Kafka on demand |
//! | `job_outcomes` | what becomes of jobs in pipelines, in memory |
//! | `overview` | what happens in all pipelines, and what is wrong, for all callers together |
//! | `pipeline_audit` | whether each record of the pipelines is exactly once in the output, dead or waiting |
//! | `webhook` | sends problems to another system |
//! | `audit` | the audit topic: recording who gets payloads, and reading it |
//! | `api` | the gRPC services |
//! | [`server`] | the gRPC server: health, reflection, identities, graceful shutdown |

pub mod dialect;
pub mod filter;
pub mod fingerprint;
pub mod group_states;
pub mod header_list;
pub mod id;
pub mod index;
pub mod json_fields;
pub mod ledger;
pub mod letter;
pub mod masking;
pub mod pattern;
pub mod redrive;
pub mod server;

mod access;
mod api;
mod audit;
mod completeness;
mod config;
mod decoding;
mod decoding_pool;
mod gauges;
mod ingest;
mod job_outcomes;
mod lookup_pool;
mod metrics;
mod overview;
mod pipeline_audit;
mod problem;
mod schema_registry;
mod shared;
mod waiting;
mod webhook;

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use anyhow::Context as _;
use redeliver_core::{Clock as _, Timestamp};
use redeliver_kafka::Waker;
use redeliver_kafka::survey::Surveyor;
use redeliver_kafka::topology::{Role, TopicSpec, TopologySpec};
use redeliver_runtime::cli::Start;
use redeliver_runtime::config::ConfigError;
use redeliver_runtime::listen::Listener;
use redeliver_runtime::tls::Protocols;
use redeliver_runtime::{Config, ProgramConfig};
use redeliver_service::Host;
use redeliver_service::audit::AuditLog;
use redeliver_service::control::Controls;
use redeliver_service::host::api_tls;
use redeliver_service::identity::Authenticator;
use redeliver_service::installation::Installation;
use redeliver_service::limit_metrics::LimitMetrics;
use redeliver_service::topics::{of_audit, of_control, of_waiting_actions, topic_settings, warn_about};
use redeliver_service::waiting_actions;
use redeliver_store::Writer;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api::{ActionRequests, Api, Groups, Limits, Redrives};
use crate::audit::Audit;
pub use crate::config::{
    DlqInspectorConfig, MaskingRule, PipelineAuditConfig, RedriveConfig, Sections, WebhookConfig,
};
use crate::decoding_pool::DecodingPool;
use crate::gauges::Gauges;
use crate::index::Pool;
use crate::ingest::contents::Contents;
use crate::ingest::reader::Reader;
use crate::ingest::survey::{SurveyTask, refresh_retention};
use crate::ingest::writer::WriterThread;
use crate::job_outcomes::JobOutcomes;
use crate::job_outcomes::follower::Following;
use crate::json_fields::JsonFields;
use crate::lookup_pool::LookupPool;
use crate::masking::Masking;
use crate::metrics::Metrics;
use crate::overview::surveyor::{Sources, Surveyor as OverviewSurveyor};
use crate::overview::task::Overviews;
use crate::pattern::Patterns;
use crate::pipeline_audit::{AuditStatuses, Audits};
use crate::redrive::returns::Returns;
use crate::schema_registry::SchemaRegistry;
use crate::shared::SharedState;
use crate::waiting::scans::Scans;
use crate::webhook::Webhook;

/// Capacity of the queue of batches between the reader and the writer.
const QUEUED_BATCHES: usize = 4;

/// The section of the configuration.
const SECTION: &str = "dlq_inspector";

/// Checks a configuration without connecting to anything.
///
/// # Errors
/// When the certificates, tokens or keys of the API cannot be used.
pub fn check(config: &ProgramConfig<Sections>) -> Result<(), ConfigError> {
    let api = config.own.dlq_inspector.api();
    api_tls(SECTION, &api, Protocols::Grpc)?;
    Authenticator::check(SECTION, &api)
}

/// The topics that the inspector needs apart from dead-letter topics: the ledger, the states of groups, the redrives, and the actions on
/// waiting records.
#[must_use]
pub fn topics(config: &Config, redrive: &RedriveConfig) -> TopologySpec {
    let settings = topic_settings(config);
    let (states, redrives) = ("states and notes of groups", "redrives and their progress");
    TopologySpec::of([
        TopicSpec::new(ledger::TOPIC, Role::Ledger, "states of dead letters", &settings).compacted(),
        TopicSpec::of_one_partition(group_states::TOPIC, Role::Documents, states, &settings),
        TopicSpec::of_one_partition(redrive.topic(&config.kafka), Role::Progress, redrives, &settings),
    ])
    .join(of_waiting_actions(config))
}

/// Runs the service until shutdown.
///
/// # Errors
/// If the ledger topic or that of group states has unsuitable settings, the listen address cannot be used, or a task fails: for
/// example, the directory of the index cannot be used.
pub async fn run(start: Start, own: Sections) -> anyhow::Result<()> {
    let mut host = Host::new("dlq-inspector", start);
    // A missing topic is not an error if topics are created elsewhere: the inspector serves dead letters and groups without
    // their states until the topics exist, no payloads until the audit topic exists, and no control until the control topic exists.
    let config = own.dlq_inspector;
    let topics = topics(&host.config, &config.redrive)
        .join(of_audit(&host.config))
        .join(of_control(&host.config));
    if host.config.kafka.topics.create {
        host.ensure_topics(&topics).await?;
    } else {
        host.log_in().await;
        let (kafka, stop) = (host.kafka.clone(), host.tasks.shutdown().clone());
        host.tasks.spawn("own-topics", async move {
            warn_about(&kafka, &topics, &stop).await;
            Ok::<(), Infallible>(())
        });
    }
    let listener = host.listen(SECTION, &config.api(), Protocols::Grpc)?;
    mount(&mut host, config, listener)?;
    Ok(host.run().await?)
}

/// Adds the inspector to a host, with the listener of its API. Must be called within a Tokio runtime.
///
/// # Errors
/// If the settings of callers cannot be used. An index that cannot be used ends the process later.
pub fn mount(host: &mut Host, config: DlqInspectorConfig, listener: Listener) -> anyhow::Result<()> {
    let api = config.api();
    let authenticator = Authenticator::start(host, SECTION, &api)?;
    let address = listener.local_addr().context("reading the address of the API")?;

    let metrics = Metrics::register(&mut host.registry());
    let limits = LimitMetrics::register(
        &mut host.registry(),
        "dlq_api_limited",
        "Connections and calls refused by limits of the API; answer_bytes: no memory for an answer",
        &["answer_bytes"],
    );
    let part = host.health.part("dlq-index");
    let stop = host.tasks.shutdown().clone();
    let masking = Arc::new(Masking::new(&config.masking));
    for warning in masking.warnings() {
        tracing::warn!(warning, "check dlq_inspector.masking");
    }
    let registry = config.schema_registry.as_ref();
    let decoding = DecodingPool::new();
    let schemas = registry.map(|registry| SchemaRegistry::new(registry, decoding.clone(), metrics.clone()));
    let schemas = schemas.transpose()?;
    let contents = Contents {
        json_fields: JsonFields::new(&config.json_fields),
        masking: masking.clone(),
    };
    let pool = Pool::new(&config.data_dir, &contents.settings());
    tracing::info!(api = %address, data_dir = %config.data_dir.display(), "serving the dead-letter API");

    let states = host.follow(group_states::TOPIC)?;
    let redrives_topic = config.redrive.topic(&host.config.kafka);
    let jobs = host.follow(&redrives_topic)?;
    let shared = Arc::new(SharedState::new());
    let lookups = LookupPool::new(host.kafka.clone());
    let audit = Audit::new(host, config.record_disclosures, metrics.clone())?;
    let control = host.control_aside()?;
    let overview_control = control.clone();
    let controls = Controls::new(
        host,
        "dlq-inspector",
        control,
        authenticator.clone(),
        // The server gives up calls in progress after its grace period.
        CancellationToken::new(),
    );
    let waker = Waker::new();
    let (survey_sender, surveys) = sync_channel(1);
    let (work_sender, work) = sync_channel(QUEUED_BATCHES);
    let (opened_sender, opened) = sync_channel(1);
    let writer = WriterThread {
        directory: config.data_dir.clone(),
        pool: pool.clone(),
        work,
        opened: opened_sender,
        shared: shared.clone(),
        clock: host.clock.clone(),
        part: part.clone(),
        metrics: metrics.clone(),
        group_states: states.clone(),
        stop: stop.clone(),
    };
    let reader = Reader {
        settings: host.kafka.clone(),
        surveys,
        writer: work_sender,
        contents,
        sources: config.share_group_sources.clone(),
        waker: waker.clone(),
        shared: shared.clone(),
        part: part.clone(),
        metrics: metrics.clone(),
        stop: stop.clone(),
    };
    let destinations = Arc::new(redrive::start::destinations(&host.config, &config));
    let surveyor = Surveyor::new(&host.kafka)?;
    let actions_topic = host.config.waiting_actions_topic();
    let actions = host.waiting_actions_aside()?;
    let scans = Scans::new(&host.config, &host.kafka, surveyor.clone(), actions.clone());
    let outcomes = JobOutcomes::new(
        &host.config,
        &host.kafka,
        config.max_job_outcomes,
        overview_control.clone(),
    );
    if outcomes.is_enabled() {
        let keep = host.config.scheduler.keep_ended.as_millis();
        let since = host.clock.now().as_millis();
        let following = Following {
            outcomes: outcomes.clone(),
            surveyor: surveyor.clone(),
            since: Timestamp::from_millis(since.saturating_sub_unsigned(keep)),
            metrics: metrics.clone(),
            stop: stop.clone(),
        };
        host.tasks.spawn_thread("dlq-job-outcomes", move || {
            following.run();
            Ok::<(), Infallible>(())
        })?;
    }
    let survey = SurveyTask {
        patterns: Patterns::new(&config.topics).without([
            host.config.audit_topic(),
            host.config.control_topic(),
            redrives_topic.clone(),
        ]),
        surveyor: surveyor.clone(),
        pool: pool.clone(),
        lookups: lookups.clone(),
        shared: shared.clone(),
        clock: host.clock.clone(),
        part,
        remove_after: config.redrive.remove_entries_after(),
        reader: survey_sender,
        waker,
        stop: stop.clone(),
    };
    let redrive_surveyor = surveyor.clone();
    let retention = refresh_retention(surveyor, shared.clone(), stop.clone());
    let gauges = Gauges {
        pool: pool.clone(),
        metrics: metrics.clone(),
        shared: shared.clone(),
        directory: config.data_dir,
        group_states: states.clone(),
        clock: host.clock.clone(),
    }
    .run(stop.clone());
    let audit_log = AuditLog::new(&host.config, "dlq-inspector");
    if config.redrive.execute {
        redrive::start::execute(
            host,
            &config.redrive,
            jobs.clone(),
            Returns::new(pool.clone(), shared.clone(), destinations.clone(), scans.clone()),
            metrics.clone(),
        )?;
    }
    let pipeline_audits = AuditStatuses::default();
    if config.pipeline_audit.enabled {
        let scheduler = &host.config.scheduler;
        let audits = Audits {
            config: config.pipeline_audit,
            kafka: host.kafka.clone(),
            scheduler: (host.kafka.id(&scheduler.group), scheduler.topics()),
            audits: pipeline_audit::audits(&host.config),
            statuses: pipeline_audits.clone(),
            metrics: metrics.clone(),
            clock: host.clock.clone(),
            stop: stop.clone(),
        };
        host.tasks
            .spawn("dlq-pipeline-audit", audits.run_until(stop.clone()));
    }
    let overviews = Overviews::new();
    let overview_surveyor = OverviewSurveyor::new(Sources {
        config: host.config.clone(),
        kafka: host.kafka.clone(),
        surveyor: redrive_surveyor.clone(),
        pool: pool.clone(),
        shared: shared.clone(),
        group_states: states.clone(),
        jobs: jobs.clone(),
        control: overview_control,
        statuses: host.follow_aside(&host.config.status_topic())?,
        pipeline_audits,
        clock: host.clock.clone(),
    });
    let surveying = overviews
        .clone()
        .run(overview_surveyor, metrics.clone(), stop.clone());
    host.tasks.spawn("dlq-overview", surveying);
    if let Some(webhook) = &config.webhook {
        let webhook = Webhook::new(webhook, masking.clone(), host.clock.clone(), metrics.clone())?;
        let sending = webhook.run(overviews.subscribe(), stop.clone());
        host.tasks.spawn("dlq-webhook", sending);
    }
    let redrives = redrive::start::count(jobs.clone(), metrics.clone(), stop.clone());
    host.tasks.spawn("dlq-redrives", redrives);
    let service = Api {
        pool,
        json_fields: config.json_fields.into(),
        masking,
        audit,
        lookups,
        schemas,
        scans,
        outcomes,
        decoding,
        shared,
        groups: Groups {
            writer: Writer::new(
                &host.kafka,
                group_states::TRANSACTIONAL_ID,
                group_states::TOPIC,
                states.clone(),
            ),
            audit: audit_log.clone(),
            states,
        },
        redrives: Redrives {
            writer: Writer::new(
                &host.kafka,
                &redrive::own_id(&redrives_topic),
                &redrives_topic,
                jobs.clone(),
            ),
            audit: audit_log.clone(),
            jobs,
            destinations,
            surveyor: redrive_surveyor,
            topic: redrives_topic.as_str().into(),
            accepts_edits: config.redrive.edit,
        },
        requests: ActionRequests {
            writer: Writer::new(
                &host.kafka,
                &waiting_actions::transactional_id(&actions_topic),
                &actions_topic,
                actions.clone(),
            ),
            audit: audit_log,
            topic: actions_topic,
            replica: actions,
        },
        overviews,
        kafka: host.kafka.clone(),
        clock: host.clock.clone(),
        metrics,
        stop,
        watchers: TaskTracker::new(),
        limits: Limits::new(limits.of("answer_bytes")),
    };
    // Less than the grace period of the process, after which a task that is still running is an error.
    let grace = host.config.shutdown.grace.duration() / 2;

    host.tasks.spawn_thread("dlq-writer", move || writer.run())?;
    host.tasks
        .spawn_thread("dlq-reader", move || match opened.recv() {
            Ok(indexed) => reader.run(indexed),
            // The writer has stopped before the index was open.
            Err(_) => Ok(()),
        })?;
    host.tasks.spawn("dlq-survey", survey.run());
    host.tasks.spawn("dlq-retention", retention);
    host.tasks.spawn("dlq-measures", gauges);
    let installation = Installation::of(host);
    let http = limits.http();
    host.tasks.spawn(
        "dlq-api",
        server::serve(
            listener,
            service,
            controls,
            authenticator,
            installation,
            http,
            grace,
        ),
    );
    Ok(())
}
