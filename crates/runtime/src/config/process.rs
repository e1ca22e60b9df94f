//! What every process has: an admin port, telemetry, a way to end.

use std::net::{Ipv4Addr, SocketAddr};

use redeliver_core::Span;
use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;

use super::http_request::endpoint_url;
use super::problem::Findings;
use super::secret::Url;
use super::text;

/// `admin`: health, metrics and configuration over HTTP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdminConfig {
    /// Where it listens; port 0 takes a free one.
    #[serde(serialize_with = "text::serialize", deserialize_with = "text::listen")]
    pub listen: SocketAddr,
    /// Whether it may listen on more than the loopback interface.
    pub allow_remote: bool,
}

/// `telemetry`: logs and traces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TelemetryConfig {
    /// The form of log lines on stderr.
    pub log: LogFormat,
    /// What is logged: a level, or directives such as `info,redeliver_kafka=debug`.
    pub level: String,
    /// Where spans go.
    pub otlp: OtlpConfig,
}

/// The form of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// `telemetry.otlp`: traces to an OpenTelemetry collector.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OtlpConfig {
    /// The collector's gRPC address; without it there are no traces.
    pub endpoint: Option<Url>,
    /// The share of new traces that is kept, 0 to 1. Traces that come with a record keep their decision.
    pub sample_ratio: f64,
    /// `service.name`; left out, the name of the service.
    pub service_name: Option<String>,
}

/// `shutdown`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShutdownConfig {
    /// How long a process may take to end.
    #[serde(with = "text")]
    pub grace: Span,
}

impl Default for AdminConfig {
    fn default() -> Self {
        Self {
            listen: (Ipv4Addr::LOCALHOST, 9_464).into(),
            allow_remote: false,
        }
    }
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        Self {
            log: LogFormat::default(),
            level: "info".to_owned(),
            otlp: OtlpConfig::default(),
        }
    }
}

impl Default for OtlpConfig {
    fn default() -> Self {
        Self {
            endpoint: None,
            sample_ratio: 1.0,
            service_name: None,
        }
    }
}

impl Default for ShutdownConfig {
    fn default() -> Self {
        Self {
            grace: Span::from_secs(25),
        }
    }
}

impl AdminConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        if !self.listen.ip().is_loopback() && !self.allow_remote {
            let problem = format!(
                "{} can be reached from other machines, and nothing asks for a password there: \
                 write 127.0.0.1, or set admin.allow_remote: true",
                self.listen
            );
            findings.wrong("listen", problem);
        }
    }
}

impl TelemetryConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        if !is_level(&self.level) {
            let problem = format!(
                "`{}` is not a level: write error, warn, info, debug or trace",
                self.level
            );
            findings.wrong(
                "level",
                problem + ", or directives such as info,redeliver_kafka=debug",
            );
        }
        findings.inside("otlp", |at| {
            if let Some(Err(problem)) = self.otlp.endpoint.as_ref().map(|url| endpoint_url(url.expose())) {
                at.wrong("endpoint", problem);
            }
            at.range("sample_ratio", self.otlp.sample_ratio, 0.0..=1.0);
        });
    }
}

impl ShutdownConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        findings.range("grace", self.grace, Span::from_millis(0)..=Span::from_secs(3_600));
    }
}

/// Whether a text says what is logged. A bare word must be a level: the filter itself would take a misspelled
/// one for the name of a module, and log nothing.
fn is_level(text: &str) -> bool {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let is_known = |part: &str| part.contains(['=', '[']) || LEVELS.contains(&part.to_lowercase().as_str());
    text.split(',').all(|part| is_known(part.trim())) && EnvFilter::builder().parse(text).is_ok()
}

#[cfg(test)]
mod tests {
    use super::is_level;

    #[test]
    fn a_misspelled_level_is_not_taken_for_a_module() {
        for right in [
            "info",
            "WARN",
            "off",
            "info,redeliver_kafka=debug",
            "warn,h2=error",
        ] {
            assert!(is_level(right), "{right}");
        }
        for wrong in ["", "inof", "info,", "info,redeliver_kafka", "my=loud"] {
            assert!(!is_level(wrong), "{wrong}");
        }
    }
}
