//! Logs to stderr and spans to an OpenTelemetry collector.
//!
//! Spans are those of `tracing`, with [`TRACE_TARGET`] as their target; the layer of `tracing-opentelemetry` exports them, and no other ones. Without
//! that layer, their callsites are disabled, which costs nothing per record. Only waits begin in another process: [`record_wait`] creates their spans with
//! the API of OpenTelemetry, because a span of `tracing` begins now.

use std::borrow::Cow;
use std::io::{self, IsTerminal};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use opentelemetry::trace::Status;
use opentelemetry::trace::{Span as _, SpanBuilder, SpanContext, Tracer as _, TracerProvider as _};
pub use opentelemetry::trace::{SpanKind, TraceContextExt};
pub use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracer, SdkTracerProvider,
};
use redeliver_core::headers::TraceContext;
use redeliver_core::terminal::{json_line, multiline};
use redeliver_core::{TRACE_TARGET, Timestamp};
use tracing::Level;
pub use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt};

use crate::config::{LogFormat, OtlpConfig, TelemetryConfig};
use crate::metrics::build_info;
use crate::panics;
use crate::trace_context::trace_of;

/// The name of the instrumentation scope of all spans.
const SCOPE: &str = "redeliver";
/// Creates the spans of waits, which are none of `tracing`.
static WAITS: OnceLock<SdkTracer> = OnceLock::new();
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
}

/// Sets up logs, including the locations of panics, and traces for this process. `RUST_LOG` overrides `telemetry.level`.
/// Must be called within a tokio runtime.
///
/// # Errors
/// When a level is invalid, the exporter cannot be built, or it was already called.
pub fn init(config: &TelemetryConfig, identity: Identity<'_>) -> Result<TelemetryGuard, TelemetryError> {
    let (subscriber, guard) = build(config, identity)?;
    subscriber.try_init()?;
    if let Some(provider) = &guard.provider {
        let _first = WAITS.set(provider.tracer(SCOPE));
    }
    panics::log_locations();
    Ok(guard)
}

/// Libraries whose level `info` is about each of their calls.
const LOUD: &str = "delta_kernel";

/// What writes logs to stderr and exports spans. Traces are disabled if no endpoint is configured. Must be called within a tokio runtime.
///
/// # Errors
/// When a level is invalid, or the exporter cannot be built.
pub fn build(
    config: &TelemetryConfig,
    identity: Identity<'_>,
) -> Result<(Box<dyn tracing::Subscriber + Send + Sync>, TelemetryGuard), TelemetryError> {
    let rust_log = std::env::var("RUST_LOG")
        .ok()
        .filter(|directives| !directives.trim().is_empty());
    let filter = match &rust_log {
        Some(directives) => filter("RUST_LOG", directives)?,
        None => filter("telemetry.level", &config.level)?,
    };
    let provider = provider(&config.otlp, identity)?;
    let subscriber = subscriber(config.log, filter, io::stderr, provider.as_ref());
    Ok((subscriber, TelemetryGuard { provider }))
}

/// What exports spans. `None` if no endpoint is configured.
fn provider(
    config: &OtlpConfig,
    identity: Identity<'_>,
) -> Result<Option<SdkTracerProvider>, ExporterBuildError> {
    let Some(endpoint) = &config.endpoint else {
        return Ok(None);
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
    Ok(Some(provider))
}

fn filter(origin: &'static str, directives: &str) -> Result<EnvFilter, TelemetryError> {
    let level = match directives.trim() {
        "info" => format!("info,{LOUD}=warn"),
        others => others.to_owned(),
    };
    EnvFilter::builder()
        .parse(level)
        .map_err(|source| TelemetryError::Level {
            origin,
            directives: directives.to_owned(),
            source,
        })
}

/// Spans are not part of log lines, except for the ids of the current one.
fn lines<S, W>(format: LogFormat, writer: W) -> Box<dyn Layer<S> + Send + Sync>
where
    S: tracing::Subscriber + for<'s> LookupSpan<'s>,
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let lines = tracing_subscriber::fmt::layer();
    match format {
        LogFormat::Text if io::stderr().is_terminal() => lines
            .with_writer(Safe(writer, safe_colored_text, text_ids))
            .with_ansi(true)
            .boxed(),
        LogFormat::Text => lines
            .with_writer(Safe(writer, safe_text, text_ids))
            .with_ansi(false)
            .boxed(),
        LogFormat::Json => lines
            .with_writer(Safe(writer, safe_json, json_ids))
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false)
            .boxed(),
    }
}

fn subscriber<W>(
    format: LogFormat,
    filter: EnvFilter,
    writer: W,
    provider: Option<&SdkTracerProvider>,
) -> Box<dyn tracing::Subscriber + Send + Sync>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let no_spans = format!("{TRACE_TARGET}=off").parse();
    let filter = filter.add_directive(no_spans.expect("a target and a level"));
    let Some(provider) = provider else {
        // One filter for all: with a filter per layer, a span that all of them reject can still be created.
        return Box::new(
            tracing_subscriber::registry()
                .with(filter)
                .with(lines(format, writer)),
        );
    };
    let spans = tracing_opentelemetry::layer()
        .with_tracer(provider.tracer(SCOPE))
        .with_level(false)
        .with_location(false)
        .with_target(false)
        .with_threads(false)
        .with_tracked_inactivity(false);
    Box::new(
        tracing_subscriber::registry()
            .with(lines(format, writer).with_filter(filter))
            .with(spans.with_filter(Targets::new().with_target(TRACE_TARGET, Level::INFO))),
    )
}

/// Writes lines without control characters, and with the ids of the current span. The layer writes each line
/// at once, in the thread that logs it.
struct Safe<W>(W, fn(&str) -> String, fn(&mut String, &SpanContext));

impl<'w, W: MakeWriter<'w>> MakeWriter<'w> for Safe<W> {
    type Writer = Safe<W::Writer>;

    fn make_writer(&'w self) -> Self::Writer {
        Safe(self.0.make_writer(), self.1, self.2)
    }
}

impl<W: io::Write> io::Write for Safe<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut line = (self.1)(&String::from_utf8_lossy(bytes));
        Context::map_current(|context| {
            let span = context.span();
            if span.span_context().is_valid() {
                (self.2)(&mut line, span.span_context());
            }
        });
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

fn json_ids(line: &mut String, span: &SpanContext) {
    // The layer writes text if it cannot format an event.
    let Some(fields) = line.trim_end().strip_suffix('}') else {
        return;
    };
    let (trace_id, span_id) = (span.trace_id(), span.span_id());
    *line = format!("{fields},\"trace_id\":\"{trace_id}\",\"span_id\":\"{span_id}\"}}\n");
}

fn text_ids(line: &mut String, span: &SpanContext) {
    line.truncate(line.trim_end_matches('\n').len());
    let (trace_id, span_id) = (span.trace_id(), span.span_id());
    line.push_str(&format!(" trace_id={trace_id} span_id={span_id}\n"));
}

impl TelemetryGuard {
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

/// Whether spans are created. Check it before work that only a span needs, such as parsing a parent from headers.
#[must_use]
pub fn is_tracing() -> bool {
    WAITS.get().is_some()
}

/// The trace context headers of a span, which begins its export. `None` if tracing is disabled: a record keeps its own headers then.
#[must_use]
pub fn trace(span: &tracing::Span) -> Option<TraceContext> {
    trace_of(span.context().span().span_context())
}

/// Makes a span that was just created the child of a span in another process.
pub fn set_parent(span: &tracing::Span, parent: Option<Context>) {
    if let Some(parent) = parent
        && let Err(error) = span.set_parent(parent)
    {
        tracing::warn!(%error, "cannot continue a trace");
    }
}

/// How many spans a span links to, at most; further ones are left out.
pub const MAX_LINKS: usize = 128;

/// Marks a span as successful, even if it was marked as failed.
pub fn succeed(span: &tracing::Span) {
    span.set_status(Status::Ok);
}

/// Marks a span as failed. The description must not contain payloads or secrets.
pub fn fail(span: &tracing::Span, description: impl Into<Cow<'static, str>>) {
    span.set_status(Status::error(description));
}

/// A wait that began in another process.
#[derive(Debug)]
pub struct Wait {
    /// What waited, for people.
    pub name: String,
    /// The relationship to the parent.
    pub kind: SpanKind,
    /// The span that began to wait.
    pub parent: Option<Context>,
    /// The current time if it is not known.
    pub start: Option<Timestamp>,
    /// When it ended.
    pub end: Timestamp,
    /// Without payloads and secrets.
    pub attributes: Vec<KeyValue>,
}

/// Records the span of a wait. Returns its trace context, or `None` if tracing is disabled.
pub fn record_wait(wait: Wait) -> Option<TraceContext> {
    let tracer = WAITS.get()?;
    let mut builder = SpanBuilder::from_name(wait.name)
        .with_kind(wait.kind)
        .with_attributes(wait.attributes);
    builder.start_time = wait.start.map(system_time);
    let mut span = tracer.build_with_context(builder, &wait.parent.unwrap_or_default());
    span.end_with_timestamp(system_time(wait.end));
    trace_of(span.span_context())
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
        written_with(format, level, None, log)
    }

    fn written_with(
        format: LogFormat,
        level: &str,
        provider: Option<&SdkTracerProvider>,
        log: impl FnOnce(),
    ) -> String {
        let lines = Lines::default();
        let writer = lines.clone();
        let filter = filter("telemetry.level", level).unwrap();
        let subscriber = subscriber(format, filter, move || writer.clone(), provider);
        tracing::subscriber::with_default(subscriber, log);
        let bytes = lines.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn log_has_configured_format() {
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
    fn lines_inside_spans_have_ids() {
        let provider = SdkTracerProvider::builder().build();
        for format in [LogFormat::Text, LogFormat::Json] {
            let mut ids = None;
            let lines = written_with(format, "warn", Some(&provider), || {
                let span = tracing::info_span!(target: TRACE_TARGET, "attempt", secret = "no");
                ids = trace(&span);
                span.in_scope(|| tracing::warn!("inside"));
                tracing::warn!("outside");
            });
            let [inside, outside] = lines.lines().collect::<Vec<_>>()[..] else {
                panic!("{lines}");
            };
            let traceparent = ids.unwrap().traceparent;
            let [_, trace_id, span_id, _] = traceparent.split('-').collect::<Vec<_>>()[..] else {
                panic!("{traceparent}");
            };
            let in_line = match format {
                LogFormat::Text => format!("inside trace_id={trace_id} span_id={span_id}"),
                LogFormat::Json => format!(r#","trace_id":"{trace_id}","span_id":"{span_id}"}}"#),
            };
            assert!(inside.ends_with(&in_line), "{inside}");
            assert!(
                !lines.contains("secret") && !outside.contains("trace_id"),
                "{lines}"
            );
        }
    }

    #[test]
    fn spans_are_disabled_without_endpoint() {
        // The second one depends on fields of spans.
        for level in ["trace", "info,[x]=debug"] {
            let lines = written(LogFormat::Text, level, || {
                let span = tracing::info_span!(target: TRACE_TARGET, "attempt");
                assert!(span.is_disabled() && !is_tracing() && trace(&span).is_none());
                tracing::info!("not lost");
            });
            assert!(lines.contains("not lost"), "{lines}");
        }
    }
}
