//! Logs to stderr, spans to an OpenTelemetry collector.
//!
//! Spans of records are made with [`Tracer`] and not with the macros of `tracing`: a tracer that is off is a
//! `None`, so that a hundred thousand records a second pay nothing for it.

use std::borrow::Cow;
use std::io::{self, IsTerminal};
use std::time::{Duration, SystemTime};

pub use opentelemetry::trace::SpanKind;
use opentelemetry::trace::{
    Span as _, SpanBuilder, Status, TraceContextExt, Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracer, SdkTracerProvider, Span as SdkSpan,
};
use redeliver_core::Timestamp;
use redeliver_core::headers::TraceContext;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt};

use crate::config::{LogFormat, OtlpConfig, TelemetryConfig};
use crate::metrics::build_info;
use crate::panics;
use crate::trace_context::trace_of;

/// How long the end of a process waits for spans to be sent.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// Spans that wait to be sent; more are dropped, so that a collector's outage costs no more memory.
const QUEUE: usize = 16_384;

/// Telemetry cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// `telemetry.level` or `RUST_LOG` cannot be read.
    #[error("{origin}: `{directives}` is not a log level")]
    Level {
        /// Which of the two.
        origin: &'static str,
        /// The text.
        directives: String,
        /// Why.
        source: tracing_subscriber::filter::ParseError,
    },
    /// The exporter cannot be built.
    #[error("telemetry.otlp.endpoint: cannot export spans")]
    Exporter(#[from] ExporterBuildError),
    /// Logging was set up before in this process.
    #[error("logging is already set up in this process")]
    AlreadySet(#[from] tracing_subscriber::util::TryInitError),
}

/// Who sends telemetry.
#[derive(Clone, Copy, Debug)]
pub struct Identity<'a> {
    /// The service, such as `enricher`.
    pub service: &'a str,
    /// The instance's name.
    pub instance: &'a str,
}

/// Keeps telemetry alive; sends what is left when it is dropped.
#[derive(Debug)]
pub struct TelemetryGuard {
    provider: Option<SdkTracerProvider>,
    tracer: Tracer,
}

/// Sets up logs, places of panics included, and traces for this process. `RUST_LOG` goes before `telemetry.level`. Must be called within
/// a runtime.
///
/// # Errors
/// When a level cannot be read, the exporter cannot be built, or it was called before.
pub fn init(config: &TelemetryConfig, identity: Identity<'_>) -> Result<TelemetryGuard, TelemetryError> {
    let rust_log = std::env::var("RUST_LOG")
        .ok()
        .filter(|directives| !directives.trim().is_empty());
    let filter = match &rust_log {
        Some(directives) => filter("RUST_LOG", directives)?,
        None => filter("telemetry.level", &config.level)?,
    };
    let guard = traces(&config.otlp, identity)?;
    subscriber(config.log, filter, io::stderr).try_init()?;
    panics::log_places();
    Ok(guard)
}

/// Sets up traces alone: off when there is no endpoint. Must be called within a runtime.
///
/// # Errors
/// When the exporter cannot be built.
pub fn traces(config: &OtlpConfig, identity: Identity<'_>) -> Result<TelemetryGuard, TelemetryError> {
    let Some(endpoint) = &config.endpoint else {
        return Ok(TelemetryGuard {
            provider: None,
            tracer: Tracer::off(),
        });
    };
    let exporter = SpanExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint.expose())
        .build()?;
    let batches = BatchConfigBuilder::default()
        .with_max_queue_size(QUEUE)
        .with_scheduled_delay(Duration::from_secs(1))
        .build();
    let service = config
        .service_name
        .clone()
        .unwrap_or_else(|| identity.service.to_owned());
    let resource = Resource::builder()
        .with_service_name(service)
        .with_attribute(KeyValue::new("service.instance.id", identity.instance.to_owned()))
        .with_attribute(KeyValue::new("service.version", build_info().version))
        .build();
    let provider = SdkTracerProvider::builder()
        .with_span_processor(
            BatchSpanProcessor::builder(exporter)
                .with_batch_config(batches)
                .build(),
        )
        .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(
            config.sample_ratio,
        ))))
        .with_resource(resource)
        .build();
    let tracer = Tracer(Some(provider.tracer("redeliver")));
    Ok(TelemetryGuard {
        provider: Some(provider),
        tracer,
    })
}

fn filter(origin: &'static str, directives: &str) -> Result<EnvFilter, TelemetryError> {
    EnvFilter::builder()
        .parse(directives)
        .map_err(|source| TelemetryError::Level {
            origin,
            directives: directives.to_owned(),
            source,
        })
}

/// The log lines of a process, written to `writer`.
fn subscriber<W>(format: LogFormat, filter: EnvFilter, writer: W) -> impl tracing::Subscriber + Send + Sync
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let lines = tracing_subscriber::fmt::layer().with_writer(writer);
    let lines = match format {
        LogFormat::Text => lines.with_ansi(io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false)
            .boxed(),
    };
    tracing_subscriber::registry().with(filter).with(lines)
}

impl TelemetryGuard {
    /// Makes spans.
    #[must_use]
    pub fn tracer(&self) -> Tracer {
        self.tracer.clone()
    }

    /// Sends the spans that are left, for at most five seconds.
    pub async fn shutdown(mut self) {
        let Some(provider) = self.provider.take() else {
            return;
        };
        // The exporter needs this runtime, which must not be blocked meanwhile.
        let flushed = tokio::task::spawn_blocking(move || flush(&provider));
        if flushed.await.is_err() {
            tracing::warn!("the last spans may not have been sent");
        }
    }
}

impl Drop for TelemetryGuard {
    fn drop(&mut self) {
        if let Some(provider) = self.provider.take() {
            flush(&provider);
        }
    }
}

fn flush(provider: &SdkTracerProvider) {
    if let Err(error) = provider.shutdown_with_timeout(FLUSH_TIMEOUT) {
        tracing::warn!(%error, "the last spans may not have been sent");
    }
}

/// Makes spans; a cheap handle that may be off.
#[derive(Clone, Debug, Default)]
pub struct Tracer(Option<SdkTracer>);

/// A span that ends when it is dropped; nothing when tracing is off or the trace is not sampled.
#[derive(Debug, Default)]
pub struct RecordSpan(Option<Box<SdkSpan>>);

impl Tracer {
    /// A tracer that makes nothing.
    #[must_use]
    pub const fn off() -> Self {
        Self(None)
    }

    /// Whether spans are made at all. Ask it before work that only a span needs, such as reading the parent
    /// out of headers.
    #[must_use]
    pub const fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Starts a span: a child of `parent`, or the root of a new trace. `start` is now when it is not given.
    #[must_use]
    pub fn start(
        &self,
        name: impl Into<Cow<'static, str>>,
        kind: SpanKind,
        parent: Option<&Context>,
        start: Option<Timestamp>,
    ) -> RecordSpan {
        let Some(tracer) = &self.0 else {
            return RecordSpan(None);
        };
        let mut builder = SpanBuilder::from_name(name).with_kind(kind);
        builder.start_time = start.map(system_time);
        let root = Context::new();
        RecordSpan(Some(Box::new(
            tracer.build_with_context(builder, parent.unwrap_or(&root)),
        )))
    }
}

impl RecordSpan {
    /// Adds an attribute.
    pub fn set(&mut self, name: &'static str, value: impl Into<opentelemetry::Value>) {
        if let Some(span) = &mut self.0
            && span.is_recording()
        {
            span.set_attribute(KeyValue::new(name, value));
        }
    }

    /// Marks the span as failed. No payload and no secret belongs into the text.
    pub fn fail(&mut self, description: impl Into<Cow<'static, str>>) {
        if let Some(span) = &mut self.0 {
            span.set_status(Status::error(description));
        }
    }

    /// Ends the span at an instant other than now.
    pub fn end_at(mut self, end: Timestamp) {
        if let Some(span) = &mut self.0 {
            span.end_with_timestamp(system_time(end));
        }
    }

    /// The headers that hand on this span; none when tracing is off, so that a record keeps its own.
    #[must_use]
    pub fn trace(&self) -> Option<TraceContext> {
        self.0.as_ref().and_then(|span| trace_of(span.span_context()))
    }

    /// The context of which this span is the parent; none when tracing is off.
    #[must_use]
    pub fn context(&self) -> Option<Context> {
        self.0
            .as_ref()
            .map(|span| Context::new().with_remote_span_context(span.span_context().clone()))
    }
}

fn system_time(instant: Timestamp) -> SystemTime {
    let millis = instant.as_millis();
    let distance = Duration::from_millis(millis.unsigned_abs());
    let time = if millis < 0 {
        SystemTime::UNIX_EPOCH.checked_sub(distance)
    } else {
        SystemTime::UNIX_EPOCH.checked_add(distance)
    };
    time.unwrap_or(SystemTime::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(format: LogFormat, level: &str) -> String {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = subscriber(format, filter("telemetry.level", level).unwrap(), move || {
            writer.clone()
        });
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(lane = 3, "lane started");
            tracing::debug!("not at info");
        });
        let bytes = lines.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn lines_are_text_or_json_and_obey_the_level() {
        let text = logged(LogFormat::Text, "info");
        assert!(
            text.contains("lane started") && text.contains("lane=3") && text.lines().count() == 1,
            "{text}"
        );
        let json: serde_json::Value = serde_json::from_str(&logged(LogFormat::Json, "info")).unwrap();
        assert_eq!(
            (&json["message"], &json["lane"]),
            (&"lane started".into(), &3.into())
        );
        assert_eq!(logged(LogFormat::Text, "debug").lines().count(), 2);
        assert_eq!(logged(LogFormat::Text, "warn"), "");
    }

    #[test]
    fn a_tracer_that_is_off_makes_nothing() {
        let tracer = Tracer::off();
        let mut span = tracer.start("attempt", SpanKind::Consumer, None, None);
        span.set("attempt", 1_i64);
        span.fail("no");
        assert!(!tracer.is_on() && span.trace().is_none() && span.context().is_none());
        assert!(size_of::<RecordSpan>() == size_of::<usize>());
    }
}
