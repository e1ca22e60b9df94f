//! The metrics registry of a process, with the metrics of every process.

#[cfg(target_os = "linux")]
mod process;

use std::fmt;
use std::hash::Hash;
use std::sync::{Arc, LazyLock, Mutex};

use prometheus_client::encoding::text;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use redeliver_core::Clock;

/// Version and commit of a build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct BuildInfo {
    /// The version of the workspace.
    pub version: &'static str,
    /// The git commit, from the environment variable `REDELIVER_COMMIT` at build time, or `unknown`.
    pub commit: &'static str,
}

const UNKNOWN: &str = "unknown";

/// The build of this binary.
#[must_use]
pub const fn build_info() -> BuildInfo {
    BuildInfo {
        version: env!("CARGO_PKG_VERSION"),
        commit: match option_env!("REDELIVER_COMMIT") {
            Some(commit) => commit,
            None => UNKNOWN,
        },
    }
}

/// The output of `--version`: the version, and the commit if it is known.
#[must_use]
pub fn version() -> &'static str {
    static VERSION: LazyLock<String> = LazyLock::new(|| version_of(build_info()));
    &VERSION
}

fn version_of(build: BuildInfo) -> String {
    match build.commit {
        "" | UNKNOWN => build.version.to_owned(),
        commit => format!("{} ({commit})", build.version),
    }
}

/// The metrics of a process.
pub type SharedRegistry = Arc<Mutex<Registry>>;

/// A registry with the prefix `redeliver_`, which contains nothing yet.
#[must_use]
pub fn empty_registry() -> Registry {
    Registry::with_prefix("redeliver")
}

/// A registry with the prefix `redeliver_`, which contains the build and the start time of the process.
#[must_use]
pub fn registry(service: &str, instance: &str, clock: &dyn Clock) -> Registry {
    let mut registry = empty_registry();
    register_process(&mut registry, service, instance, clock);
    registry
}

/// Adds the build and the start time of the process.
pub fn register_process(registry: &mut Registry, service: &str, instance: &str, clock: &dyn Clock) {
    let build = build_info();
    let labels = [
        ("service", service.to_owned()),
        ("instance_name", instance.to_owned()),
        ("version", build.version.to_owned()),
        ("commit", build.commit.to_owned()),
    ];
    let info = Family::<[(&'static str, String); 4], Gauge>::default();
    info.get_or_create(&labels).set(1);
    registry.register("build_info", "Always 1; the labels identify the build", info);
    let start: Gauge = Gauge::default();
    start.set(clock.now().as_millis() / 1000);
    registry.register_with_unit(
        "process_start_time",
        "When the process started, in seconds since 1970",
        Unit::Seconds,
        start,
    );
}

/// A family whose series with these labels exist from the start: an alert on the rate of a counter would miss the increment
/// that creates it.
#[must_use]
pub fn with_series<L: Clone + Hash + Eq, M: Default>(labels: impl IntoIterator<Item = L>) -> Family<L, M> {
    let family = Family::default();
    for labels in labels {
        drop(family.get_or_create(&labels));
    }
    family
}

/// Declares a struct of metrics: each one once, with its type, name, unit and help. Generates the struct, `Default`, and the
/// function `register`, which is as visible as the struct and returns its metrics after it has registered them.
///
/// The unit, a variant of `Unit`, and the initial value are optional. The crate must depend on `prometheus-client`.
///
/// ```text
/// families! {
///     /// Metrics of calls.
///     #[derive(Clone)]
///     pub struct Calls {
///         failed: Family<CodeLabel, Counter> = "calls_failed", "Failed calls, by code";
///         seconds: Histogram = "call" in Seconds, "Duration of a call", Histogram::new(SECONDS);
///     }
/// }
/// ```
#[macro_export]
macro_rules! families {
    (
        $(#[$attribute:meta])*
        $visibility:vis struct $Name:ident {
            $($field:ident: $Metric:ty = $name:literal $(in $unit:ident)?, $help:literal $(, $initial:expr)?;)+
        }
    ) => {
        $(#[$attribute])*
        $visibility struct $Name {
            $($field: $Metric,)+
        }

        impl Default for $Name {
            fn default() -> Self {
                Self {
                    $($field: $crate::families!(@initial $Metric $(, $initial)?),)+
                }
            }
        }

        impl $Name {
            /// Registers the metrics.
            #[must_use]
            $visibility fn register(registry: &mut ::prometheus_client::registry::Registry) -> Self {
                let metrics = Self::default();
                $($crate::families!(@register registry, $name $(in $unit)?, $help, metrics.$field.clone());)+
                metrics
            }
        }
    };
    (@initial $Metric:ty) => { <$Metric>::default() };
    (@initial $Metric:ty, $initial:expr) => { $initial };
    (@register $registry:ident, $name:literal, $help:literal, $metric:expr) => {
        $registry.register($name, $help, $metric)
    };
    (@register $registry:ident, $name:literal in $unit:ident, $help:literal, $metric:expr) => {
        $registry.register_with_unit($name, $help, ::prometheus_client::registry::Unit::$unit, $metric)
    };
}

/// What a scrape of these metrics returns, in the OpenMetrics format, with the standard metrics of the process.
///
/// # Errors
/// When a metric cannot be encoded.
pub fn page(registry: &Registry) -> Result<String, fmt::Error> {
    let mut page = String::with_capacity(16 * 1024);
    text::encode_registry(&mut page, registry)?;
    text::encode_registry(&mut page, &standard_registry())?;
    text::encode_eof(&mut page)?;
    Ok(page)
}

/// The metrics without the prefix `redeliver_`. Empty on other systems than Linux.
fn standard_registry() -> Registry {
    let mut registry = Registry::default();
    #[cfg(target_os = "linux")]
    registry.register_collector(Box::new(process::ProcessCollector));
    registry
}

#[cfg(test)]
mod tests {
    use redeliver_core::{ManualClock, Timestamp};

    use super::*;

    #[test]
    fn version_contains_the_commit() {
        let of = |commit| {
            version_of(BuildInfo {
                version: "1.2.3",
                commit,
            })
        };
        assert_eq!(
            ["abc1234", "unknown", ""].map(of),
            ["1.2.3 (abc1234)", "1.2.3", "1.2.3"]
        );
    }

    #[test]
    fn build_and_start_are_exposed() {
        let clock = ManualClock::new(Timestamp::from_millis(1_800_000_000_123));
        let registry = registry("enricher", "enricher-0", &clock);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(
            text.contains("redeliver_build_info{service=\"enricher\",instance_name=\"enricher-0\",version=")
        );
        assert!(
            text.contains("redeliver_process_start_time_seconds 1800000000\n"),
            "{text}"
        );
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn standard_process_metrics_are_exposed() {
        let clock = ManualClock::new(Timestamp::from_millis(1_800_000_000_123));
        let page = page(&registry("enricher", "enricher-0", &clock)).unwrap();
        for name in [
            "process_cpu_seconds_total",
            "process_resident_memory_bytes",
            "process_virtual_memory_bytes",
            "process_threads",
            "process_open_fds",
            "process_max_fds",
            "process_start_time_seconds",
            "redeliver_process_start_time_seconds",
        ] {
            let series = format!("\n{name} ");
            assert_eq!(page.matches(&series).count(), 1, "{name}: {page}");
        }
        assert_eq!(page.matches("# EOF").count(), 1);
    }
}
