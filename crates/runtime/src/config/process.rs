//! The sections that every process uses: `clock`, `admin`, `telemetry`, `shutdown`.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use redeliver_core::HumanDuration;
use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;

use super::error::Findings;
use super::http_request::endpoint_url;
use super::listen_address;
use super::secret::Url;
use super::tls::ServerTlsConfig;

/// `clock`: steps of the wall clock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClockConfig {
    /// The greatest step of the wall clock after which releases continue at once.
    pub max_step: HumanDuration,
    /// How long the wall clock must run without another step before its new time is used.
    pub confirm: HumanDuration,
}

/// `admin`: health, metrics and configuration over HTTP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdminConfig {
    /// The address to listen on. Port 0 selects a free port.
    #[serde(with = "listen_address")]
    pub listen: SocketAddr,
    /// Whether it may listen on other interfaces than loopback without client certificates.
    pub allow_remote: bool,
    /// The names in the header `Host` that are accepted in addition to addresses, names without a dot, and that of the machine; without port.
    pub allowed_hosts: Vec<String>,
    /// Certificates of the listener. `/livez` and `/readyz` require no client certificate.
    pub tls: ServerTlsConfig,
}

/// `telemetry`: logs and traces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TelemetryConfig {
    /// The format of the log on stderr.
    pub log: LogFormat,
    /// A log level, or directives such as `info,redeliver_kafka=debug`.
    pub level: String,
    /// Export of traces.
    pub otlp: OtlpConfig,
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// Human-readable text.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// `telemetry.otlp`: export of traces to an OpenTelemetry collector.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OtlpConfig {
    /// The gRPC address of the collector. `None`: no traces.
    pub endpoint: Option<Url>,
    /// The fraction of new traces that are sampled, 0 to 1. The trace of an incoming record keeps its sampling decision.
    pub sample_ratio: f64,
    /// The attribute `service.name`. Default: the name of the service.
    pub service_name: Option<String>,
}

/// `shutdown`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShutdownConfig {
    /// How long a process may take to shut down.
    pub grace: HumanDuration,
}

impl Default for ClockConfig {
    fn default() -> Self {
        Self {
            max_step: HumanDuration::from_secs(2),
            confirm: HumanDuration::from_secs(10),
        }
    }
}

impl Default for AdminConfig {
    fn default() -> Self {
        Self {
            listen: (Ipv4Addr::LOCALHOST, 9_464).into(),
            allow_remote: false,
            allowed_hosts: Vec::new(),
            tls: ServerTlsConfig::default(),
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
            grace: HumanDuration::from_secs(25),
        }
    }
}

impl ClockConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        let (least, hour) = (HumanDuration::from_millis(100), HumanDuration::from_secs(3_600));
        findings.range("max_step", self.max_step, least..=hour);
        findings.seconds("confirm", self.confirm, 1..=3_600);
    }
}

impl AdminConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        let is_authenticated = self.tls.requires_client_certificate();
        if !self.listen.ip().is_loopback() && !is_authenticated && !self.allow_remote {
            let problem = format!(
                "{} is reachable from other machines without authentication: listen on 127.0.0.1, set \
                 tls.client_ca_file, or set allow_remote: true",
                self.listen
            );
            findings.report("listen", problem);
        }
        check_hosts(&self.allowed_hosts, findings);
        self.tls.check(findings);
    }
}

/// Reports invalid entries of `allowed_hosts` in the current section of `findings`.
pub(super) fn check_hosts(hosts: &[String], findings: &mut Findings<'_>) {
    for host in hosts {
        let has_port = host.contains(':') && host.parse::<Ipv6Addr>().is_err();
        if host.is_empty() || has_port || host.contains(['/', ' ', '[', ']']) {
            let problem = format!(
                "`{host}` is not a host: write names such as scheduler.example or addresses such as ::1, without port"
            );
            findings.report("allowed_hosts", problem);
        }
    }
}

impl TelemetryConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        if !is_level(&self.level) {
            let problem = format!(
                "`{}` is not a log level: write error, warn, info, debug or trace",
                self.level
            );
            findings.report(
                "level",
                problem + ", or directives such as info,redeliver_kafka=debug",
            );
        }
        findings.inside("otlp", |at| {
            if let Some(Err(problem)) = self.otlp.endpoint.as_ref().map(|url| endpoint_url(url.expose())) {
                at.report("endpoint", problem);
            }
            at.range("sample_ratio", self.otlp.sample_ratio, 0.0..=1.0);
        });
    }
}

impl ShutdownConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        findings.seconds("grace", self.grace, 0..=3_600);
    }
}

/// Whether a text is a valid log filter. A bare word must be a level: `EnvFilter` would interpret a
/// misspelled one as the name of a module, and log only that.
fn is_level(text: &str) -> bool {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let is_known = |part: &str| part.contains(['=', '[']) || LEVELS.contains(&part.to_lowercase().as_str());
    text.split(',').all(|part| is_known(part.trim())) && EnvFilter::builder().parse(text).is_ok()
}

#[cfg(test)]
mod tests {
    use super::is_level;

    #[test]
    fn misspelled_level_is_no_module() {
        for valid in [
            "info",
            "WARN",
            "off",
            "info,redeliver_kafka=debug",
            "warn,h2=error",
        ] {
            assert!(is_level(valid), "{valid}");
        }
        for invalid in ["", "inof", "info,", "info,redeliver_kafka", "my=loud"] {
            assert!(!is_level(invalid), "{invalid}");
        }
    }
}
