//! The registry of a process, and what every process says of itself there.

use std::sync::LazyLock;

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use redeliver_core::Clock;

/// Which build this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct BuildInfo {
    /// The version of the workspace.
    pub version: &'static str,
    /// The git commit it was built from, given as `REDELIVER_COMMIT` when building, or `unknown`.
    pub commit: &'static str,
}

const UNKNOWN: &str = "unknown";

/// The build of this program.
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

/// What `--version` shows: the version, with the commit where it is known.
#[must_use]
pub fn version() -> &'static str {
    static SHOWN: LazyLock<String> = LazyLock::new(|| shown(build_info()));
    &SHOWN
}

fn shown(build: BuildInfo) -> String {
    match build.commit {
        "" | UNKNOWN => build.version.to_owned(),
        commit => format!("{} ({commit})", build.version),
    }
}

/// A registry whose names begin with `redeliver_`, with the build and the start time of the process in it.
#[must_use]
pub fn registry(service: &str, instance: &str, clock: &dyn Clock) -> Registry {
    let mut registry = Registry::with_prefix("redeliver");
    let build = build_info();
    let labels = [
        ("service", service.to_owned()),
        ("instance_name", instance.to_owned()),
        ("version", build.version.to_owned()),
        ("commit", build.commit.to_owned()),
    ];
    let info = Family::<[(&'static str, String); 4], Gauge>::default();
    info.get_or_create(&labels).set(1);
    registry.register("build_info", "Always 1; the labels say which build this is", info);
    let start: Gauge = Gauge::default();
    start.set(clock.now().as_millis() / 1000);
    registry.register_with_unit(
        "process_start_time",
        "When the process started, in seconds since 1970",
        Unit::Seconds,
        start,
    );
    registry
}

#[cfg(test)]
mod tests {
    use redeliver_core::{ManualClock, Timestamp};

    use super::*;

    #[test]
    fn the_version_is_shown_with_the_commit_where_it_is_known() {
        let of = |commit| {
            shown(BuildInfo {
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
    fn every_process_says_which_build_it_is_and_when_it_started() {
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
}
