//! What `deploy/` contains: the Helm chart, the compose file, the alerts and the dashboards.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use redeliver_testkit::languages::run;
use redeliver_testkit::{binary, kube_tools};
use serde_json::Value;

mod autoscaling;
mod cluster;

pub(crate) fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../deploy")
        .canonicalize()
        .unwrap()
}

/// A file of this folder.
pub(crate) fn yaml(path: &str) -> Value {
    let path = deploy().join(path);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn chart_renders_valid_objects() {
    let python = kube_tools::kube_python().unwrap();
    let programs = [
        kube_tools::helm().unwrap(),
        kube_tools::kubeconform().unwrap(),
        python,
    ];
    let path = std::env::var_os("PATH").unwrap();
    let folders = programs
        .iter()
        .map(|program| program.parent().unwrap().to_owned());
    let path = std::env::join_paths(folders.chain(std::env::split_paths(&path))).unwrap();
    let mut test = Command::new(deploy().join("helm/test.sh"));
    test.env("PATH", path)
        .env("SCHEMAS", kube_tools::schemas().unwrap())
        .env(
            "BINARIES",
            Path::new(binary("redeliver").get_program()).parent().unwrap(),
        );
    let printed = run(&mut test).unwrap();
    assert!(printed.trim_end().ends_with(" passed, 0 failed"), "{printed}");
}

/// A setting in the environment overrides the configuration, so that the chart could not set it.
#[test]
fn image_of_lake_sets_no_location() {
    let images = std::fs::read_to_string(deploy().join("Dockerfile")).unwrap();
    assert!(!images.contains("REDELIVER__LAKE"));
    let compose = yaml("../docker-compose.yml");
    let volumes = compose["services"]["lake"]["volumes"].as_array().unwrap();
    let location = yaml("compose/redeliver.yaml")["lake"]["location"].clone();
    assert!(volumes.contains(&format!("lake:{}", location.as_str().unwrap()).into()));
}

#[test]
fn workflows_pass_actionlint() {
    let root = deploy().parent().unwrap().to_owned();
    let mut check = Command::new(kube_tools::actionlint().unwrap());
    // What else is installed does not matter.
    check.args(["-no-color", "-shellcheck=", "-pyflakes="]);
    let workflows = std::fs::read_dir(root.join(".github/workflows")).unwrap();
    check.args(workflows.map(|workflow| workflow.unwrap().path()));
    run(check.current_dir(root)).unwrap();
}

#[test]
fn alerts_pass_their_tests() {
    let promtool = |arguments: &[&str]| {
        run(Command::new("promtool")
            .args(arguments)
            .current_dir(deploy().join("observe")))
        .unwrap()
    };
    // It names the rules as its container has them.
    promtool(&["check", "config", "--syntax-only", "prometheus.yml"]);
    promtool(&["check", "rules", "rules.yml"]);
    let printed = promtool(&["test", "rules", "rules_test.yml"]);
    assert!(printed.contains("SUCCESS"), "{printed}");
}

#[test]
fn severity_chooses_who_is_notified() {
    let file = deploy().join("observe/alertmanager.yml");
    let amtool = |arguments: &[&str]| run(Command::new("amtool").args(arguments)).unwrap();
    amtool(&["check-config", file.to_str().unwrap()]);
    let option = format!("--config.file={}", file.display());
    let receiver = |severity: &str| {
        let labels = ["alertname=RedeliverStuck", &format!("severity={severity}")];
        amtool(&[&["config", "routes", "test", &option][..], &labels].concat())
    };
    assert_eq!(receiver("critical").trim_end(), "pager");
    assert_eq!(receiver("warning").trim_end(), "tickets");
}

#[test]
fn alerts_have_runbooks_and_tests() {
    let checked = run(&mut Command::new(deploy().join("observe/check.py"))).unwrap();
    assert!(checked.ends_with(": OK\n"), "{checked}");
}

/// The compose file runs one container per tier of its configuration, and its Prometheus scrapes every service. Those of profiles are optional.
#[test]
fn compose_and_prometheus_name_same_processes() {
    let compose = yaml("../docker-compose.yml");
    let services = compose["services"].as_object().unwrap();
    let is_ours = |name: &str| {
        let image = services[name]["image"].as_str().unwrap_or_default();
        image.starts_with("redeliver-") && services[name]["profiles"].is_null()
    };
    let running: BTreeSet<String> = services.keys().filter(|name| is_ours(name)).cloned().collect();

    let config = yaml("compose/redeliver.yaml");
    let pipelines = config["pipelines"].as_object().unwrap();
    let delays: BTreeSet<&str> = pipelines
        .values()
        .flat_map(|pipeline| pipeline["retry"]["tiers"].as_array().unwrap())
        .map(|delay| delay.as_str().unwrap())
        .collect();
    let mut expected: BTreeMap<String, Value> = delays
        .iter()
        .map(|delay| {
            (
                format!("retry-tier-{delay}"),
                serde_json::json!(["--tier", delay]),
            )
        })
        .collect();
    for name in ["console", "dlq-inspector", "enricher", "scheduler"] {
        expected.insert(name.to_owned(), Value::Null);
    }
    assert_eq!(running, expected.keys().cloned().collect());
    for (name, command) in &expected {
        assert_eq!(services[name]["command"], *command, "{name}");
    }

    let prometheus = yaml("observe/prometheus.yml");
    let targets = prometheus["scrape_configs"][0]["static_configs"][0]["targets"].as_array();
    let scraped: BTreeSet<String> = targets
        .unwrap()
        .iter()
        .map(|target| target.as_str().unwrap().to_owned())
        .collect();
    let (_, port) = config["admin"]["listen"]
        .as_str()
        .unwrap()
        .split_once(':')
        .unwrap();
    assert_eq!(
        scraped,
        running.iter().map(|name| format!("{name}:{port}")).collect()
    );
}
