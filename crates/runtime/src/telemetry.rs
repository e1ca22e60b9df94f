//! Logs to stderr and spans to an OpenTelemetry collector.
//!
//! Spans of records are created with [`Tracer`] instead of the macros of `tracing`: their parents come from record
//! headers and from other processes, and a disabled tracer costs nothing per record.

use std::borrow::Cow;
use std::io::{self, IsTerminal};
use std::time::{Duration, SystemTime};

pub use opentelemetry::Context;
use opentelemetry::KeyValue;
pub use opentelemetry::trace::SpanKind;
use opentelemetry::trace::{
    Link, Span as _, SpanBuilder, Status, TraceContextExt, Tracer as _, TracerProvider as _,
};
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracer, SdkTracerProvider, Span as SdkSpan,
};
use redeliver_core::Timestamp;
use redeliver_core::headers::TraceContext;
use redeliver_core::terminal::{json_line, multiline};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt};

use crate::config::{LogFormat, OtlpConfig, TelemetryConfig};
use crate::metrics::build_info;
use crate::panics;
use crate::trace_context::trace_of;

const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// Further spans are dropped, so that an outage of the collector does not use up memory.
const MAX_QUEUED_SPANS: usize = 16_384;

/// Why telemetry cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// `telemetry.level` or `RUST_LOG` is not a log filter.
    #[error("{origin}: `{directives}` is not a log level: write error, warn, info, debug or trace")]
    Level {
        /// `telemetry.level` or `RUST_LOG`.
        origin: &'static str,
        /// The invalid value.
        directives: String,
        /// The error of the parser.
        source: tracing_subscriber::filter::ParseError,
    },
    /// The exporter cannot be built.
    #[error("telemetry.otlp.endpoint: cannot export spans")]
    Exporter(#[from] ExporterBuildError),
    /// [`init`] was already called in this process.
    #[error("logging is already set up in this process")]
    AlreadySet(#[from] tracing_subscriber::util::TryInitError),
}

/// Attributes of the process in its telemetry.
#[derive(Clone, Copy, Debug)]
pub struct Identity<'a> {
    /// The name of the service, such as `enricher`.
    pub service: &'a str,
    /// The configured instance name.
    pub instance: &'a str,
}

/// Flushes the remaining spans when it is dropped.
#[derive(Debug)]
pub struct TelemetryGuard {
    provider: Option<SdkTracerProvider>,
    tracer: Tracer,
}

/// Sets up logs, including the locations of panics, and traces for this process. `RUST_LOG` overrides `telemetry.level`.
/// Must be called within a tokio runtime.
///
/// # Errors
/// When a level is invalid, the exporter cannot be built, or it was already called.
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
    panics::log_locations();
    Ok(guard)
}

/// Sets up traces only. They are disabled if no endpoint is configured. Must be called within a tokio runtime.
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
        .with_max_queue_size(MAX_QUEUED_SPANS)
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
        // The trace of an incoming record keeps its sampling decision. The ratio applies to new traces only.
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

fn subscriber<W>(format: LogFormat, filter: EnvFilter, writer: W) -> impl tracing::Subscriber + Send + Sync
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let lines = tracing_subscriber::fmt::layer();
    let lines = match format {
        LogFormat::Text if io::stderr().is_terminal() => lines
            .with_writer(Safe(writer, safe_colored_text))
            .with_ansi(true)
            .boxed(),
        LogFormat::Text => lines
            .with_writer(Safe(writer, safe_text))
            .with_ansi(false)
            .boxed(),
        LogFormat::Json => lines
            .with_writer(Safe(writer, safe_json))
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false)
            .boxed(),
    };
    tracing_subscriber::registry().with(filter).with(lines)
}

/// Writes lines without characters that a terminal obeys. The layer writes each line at once.
struct Safe<W>(W, fn(&str) -> String);

impl<'w, W: MakeWriter<'w>> MakeWriter<'w> for Safe<W> {
    type Writer = Safe<W::Writer>;

    fn make_writer(&'w self) -> Self::Writer {
        Safe(self.0.make_writer(), self.1)
    }
}

impl<W: io::Write> io::Write for Safe<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let line = (self.1)(&String::from_utf8_lossy(bytes));
        self.0.write_all(line.as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

fn safe_json(line: &str) -> String {
    json_line(line.trim_end_matches('\n')).into_owned() + "\n"
}

fn safe_text(line: &str) -> String {
    multiline(line)
}

/// As [`safe_text`], with the colors of the layer.
fn safe_colored_text(line: &str) -> String {
    let mut parts = line.split('\u{1b}');
    let mut safe = safe_text(parts.next().unwrap_or_default());
    for part in parts {
        let codes = part.strip_prefix('[').and_then(|rest| rest.split_once('m'));
        let is_color =
            codes.is_some_and(|(codes, _)| codes.bytes().all(|byte| byte.is_ascii_digit() || byte == b';'));
        safe.push_str(if is_color { "\u{1b}" } else { "\\u{1b}" });
        safe.push_str(&safe_text(part));
    }
    safe
}

impl TelemetryGuard {
    /// A handle that creates spans.
    #[must_use]
    pub fn tracer(&self) -> Tracer {
        self.tracer.clone()
    }

    /// Flushes the remaining spans. Waits for at most 5 s.
    pub async fn shutdown(mut self) {
        let Some(provider) = self.provider.take() else {
            return;
        };
        // `flush` blocks, and the exporter needs the runtime meanwhile.
        let flushed = tokio::task::spawn_blocking(move || flush(&provider));
        if flushed.await.is_err() {
            tracing::warn!("flushing spans failed; some may be lost");
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
        tracing::warn!(%error, "flushing spans failed; some may be lost");
    }
}

/// Creates spans, or nothing if tracing is disabled. Cloning is cheap.
#[derive(Clone, Debug, Default)]
pub struct Tracer(Option<SdkTracer>);

/// A span that ends when it is dropped. Empty if tracing is disabled.
#[derive(Debug, Default)]
pub struct RecordSpan(Option<Box<SdkSpan>>);

impl Tracer {
    /// A disabled tracer.
    #[must_use]
    pub const fn off() -> Self {
        Self(None)
    }

    /// Whether tracing is enabled. Check it before work that only a span needs, such as parsing the parent from headers.
    #[must_use]
    pub const fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Starts a span: a child of `parent`, or the root of a new trace. `start` defaults to the current time.
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

impl Tracer {
    /// Starts the root span of a new trace, with links to the spans that are the parents in these contexts. For work that
    /// several records have in common.
    #[must_use]
    pub fn start_linked(
        &self,
        name: impl Into<Cow<'static, str>>,
        kind: SpanKind,
        linked: &[Context],
    ) -> RecordSpan {
        let Some(tracer) = &self.0 else {
            return RecordSpan(None);
        };
        let links = linked
            .iter()
            .map(|context| Link::with_context(context.span().span_context().clone()));
        let builder = SpanBuilder::from_name(name)
            .with_kind(kind)
            .with_links(links.collect());
        RecordSpan(Some(Box::new(
            tracer.build_with_context(builder, &Context::new()),
        )))
    }
}

impl RecordSpan {
    /// Sets an attribute.
    pub fn set(&mut self, name: &'static str, value: impl Into<opentelemetry::Value>) {
        if let Some(span) = &mut self.0
            && span.is_recording()
        {
            span.set_attribute(KeyValue::new(name, value));
        }
    }

    /// Marks the span as failed. The description must not contain payloads or secrets.
    pub fn fail(&mut self, description: impl Into<Cow<'static, str>>) {
        if let Some(span) = &mut self.0 {
            span.set_status(Status::error(description));
        }
    }

    /// Ends the span with the given time instead of the current time.
    pub fn end_at(mut self, end: Timestamp) {
        if let Some(span) = &mut self.0 {
            span.end_with_timestamp(system_time(end));
        }
    }

    /// The trace context headers of this span. `None` if tracing is disabled: a record keeps its own headers then.
    #[must_use]
    pub fn trace(&self) -> Option<TraceContext> {
        self.0.as_ref().and_then(|span| trace_of(span.span_context()))
    }

    /// A context in which this span is the parent. `None` if tracing is disabled.
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

    use redeliver_core::json::{Scalar, scalar_at};
    use redeliver_core::terminal::is_harmful;

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
        written(format, level, || {
            tracing::info!(lane = 3, "lane started");
            tracing::debug!("not at info");
        })
    }

    fn written(format: LogFormat, level: &str, log: impl FnOnce()) -> String {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = subscriber(format, filter("telemetry.level", level).unwrap(), move || {
            writer.clone()
        });
        tracing::subscriber::with_default(subscriber, log);
        let bytes = lines.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn the_log_has_the_configured_format_and_level() {
        let text = logged(LogFormat::Text, "info");
        assert!(
            text.contains("lane started") && text.contains("lane=3") && text.lines().count() == 1,
            "{text}"
        );
        let json = logged(LogFormat::Json, "info");
        let field = |pointer: &str| {
            scalar_at(json.as_bytes(), pointer)
                .unwrap()
                .map(Scalar::into_text)
        };
        assert_eq!(field("/message").as_deref(), Some(&b"lane started"[..]));
        assert_eq!(field("/lane").as_deref(), Some(&b"3"[..]));
        assert_eq!(logged(LogFormat::Text, "debug").lines().count(), 2);
        assert_eq!(logged(LogFormat::Text, "warn"), "");
    }

    #[test]
    fn harmful_characters_are_escaped_in_logs() {
        let hostile = "a\u{1b}]0;x\u{7}\u{7f}\u{9b}31m\u{202e}\u{2028}";
        for format in [LogFormat::Text, LogFormat::Json] {
            let line = written(
                format,
                "info",
                || tracing::info!(id = %hostile, "received {hostile}"),
            );
            let harmless = line.trim_end_matches('\n');
            assert!(!harmless.contains(is_harmful), "{line:?}");
            if format == LogFormat::Json {
                let id = scalar_at(line.as_bytes(), "/id").unwrap().map(Scalar::into_text);
                assert_eq!(id.as_deref(), Some(hostile.as_bytes()));
            }
        }
        let colored = safe_colored_text("\u{1b}[32mINFO\u{1b}[0m \u{1b}]0;x\u{7} \u{1b}[2J\n");
        assert_eq!(colored, "\u{1b}[32mINFO\u{1b}[0m \\u{1b}]0;x\\u{7} \\u{1b}[2J\n");
    }

    #[test]
    fn a_disabled_tracer_creates_no_spans() {
        let tracer = Tracer::off();
        let mut span = tracer.start("attempt", SpanKind::Consumer, None, None);
        span.set("attempt", 1_i64);
        span.fail("no");
        assert!(!tracer.is_on() && span.trace().is_none() && span.context().is_none());
        assert!(size_of::<RecordSpan>() == size_of::<usize>());
    }
}
