//! The loop of autoscaling, closed: the controller of Kubernetes scales a tier by what its processes report to Prometheus, and real
//! processes run in place of its pods, on a real Kafka.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use redeliver_testkit::{
    ChaosPermit, Process, ServiceProcess, TestEnv, ensure, eventually, free_port, kube_tools,
};
use serde_json::{Value, json};

use super::cluster::{Cluster, NAMESPACE, RELEASE, each, name};
use super::deploy;
use crate::retries::drafts;
use crate::services::path;
use crate::support::{DEADLINE, Pipe, PipeBuilder};
use crate::waits::{none_was_early, recovered_after, recovers_after};

/// The maximum, with a partition for each.
const PODS: u32 = 4;
/// Records that have not ended. At one record per transaction, it takes more than one process to have none overdue for 5 s.
const BACKLOG: usize = 5_000;
/// Records that are produced at a time.
const BATCH: usize = 500;

/// One tier, which scales without the usual delays.
fn values(pipe: &Pipe) -> Value {
    let mut config: Value = serde_saphyr::from_str(&pipe.env.yaml()).unwrap();
    // The chart has a default for all pods.
    config.as_object_mut().unwrap().remove("admin");
    let behavior = |window: u32| {
        json!({
            "stabilizationWindowSeconds": window,
            "policies": [{ "type": "Pods", "value": PODS, "periodSeconds": 1 }],
        })
    };
    json!({
        "config": config,
        "retryTier": {
            "autoscaling": { "enabled": true, "kind": "hpa", "minReplicas": 1, "maxReplicas": PODS },
            "extraEnv": [{ "name": "REDELIVER__KAFKA__BATCH", "value": "1" }],
        },
        "dlqInspector": { "enabled": false },
        // While partitions move to new pods, nothing may seem to be overdue.
        "autoscaling": { "behavior": { "scaleUp": behavior(0), "scaleDown": behavior(20) } },
    })
}

/// The processes of the tier's pods, which are the targets of Prometheus.
struct Pods<'c> {
    cluster: &'c Cluster,
    /// With the configuration that the chart mounts.
    env: TestEnv,
    /// By the uid of the pod.
    running: BTreeMap<String, ServiceProcess>,
}

impl<'c> Pods<'c> {
    fn new(cluster: &'c Cluster, pipe: &Pipe) -> Self {
        let release = format!("{RELEASE}-redeliver");
        let config = cluster.kubectl(&["get", "configmap", &release, "--output", "json"]);
        let config: Value = serde_json::from_str(&config).unwrap();
        let mut env = pipe
            .env
            .with_yaml(config["data"]["redeliver.yaml"].as_str().unwrap());
        // All pods share an address, and the test reads their ports in their logs.
        env.set("admin.listen", "127.0.0.1:0");
        env.set("telemetry.log", "text");
        Self {
            cluster,
            env,
            running: BTreeMap::new(),
        }
    }

    /// What kubelets do: runs a process for each pod, and stops those of deleted ones. Returns the status of the autoscaler.
    fn sync(&mut self) -> Value {
        let objects = self.cluster.objects("pods,horizontalpodautoscalers").into_iter();
        let (pods, autoscalers): (Vec<Value>, Vec<Value>) =
            objects.partition(|object| object["kind"] == "Pod");
        let pods: BTreeMap<String, Value> = pods
            .into_iter()
            .filter(|pod| {
                let metadata = &pod["metadata"];
                metadata["labels"]["app.kubernetes.io/component"] == "retry-tier"
                    && metadata["deletionTimestamp"].is_null()
            })
            .map(|pod| (pod["metadata"]["uid"].as_str().unwrap().to_owned(), pod))
            .collect();
        let are_same = pods.keys().eq(self.running.keys());
        self.running.retain(|uid, process| {
            let stays = pods.contains_key(uid);
            if !stays {
                process.shut_down();
            }
            stays
        });
        let new = pods.iter().filter(|(uid, _)| !self.running.contains_key(*uid));
        let started: Vec<_> = new.map(|(uid, pod)| (uid.clone(), self.start(pod))).collect();
        self.running.extend(started);
        if !are_same {
            self.show_to_prometheus();
        }
        let [autoscaler] = <[Value; 1]>::try_from(autoscalers).unwrap();
        autoscaler["status"].clone()
    }

    /// Runs the container of a pod, with its arguments and variables.
    fn start(&self, pod: &Value) -> ServiceProcess {
        let (env, pod_name) = (self.env.clone(), name(pod));
        let container = &pod["spec"]["containers"][0];
        let arguments: Vec<String> = each(&container["args"])
            .map(|argument| argument.as_str().unwrap().to_owned())
            .collect();
        let variables: Vec<(String, String)> = each(&container["env"])
            .filter_map(|variable| Some((variable["name"].as_str()?, variable["value"].as_str()?)))
            // Not the path of the mounted configuration.
            .filter(|(variable, _)| variable.starts_with("REDELIVER__"))
            .map(|(variable, value)| (variable.to_owned(), value.to_owned()))
            .collect();
        ServiceProcess::spawn(pod_name.clone(), move || {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let mut command = env.command("retry-tier", &arguments);
            command.env("REDELIVER__INSTANCE", &pod_name);
            command.envs(variables.iter().map(|(variable, value)| (variable, value)));
            command
        })
    }

    /// As a PodMonitor does, with the labels that it adds.
    fn show_to_prometheus(&mut self) {
        let target = |process: &mut ServiceProcess| {
            json!({
                "targets": [process.admin().to_string()],
                "labels": { "namespace": NAMESPACE, "pod": process.name() },
            })
        };
        let targets: Vec<Value> = self.running.values_mut().map(target).collect();
        // Prometheus reads the file when it changes, so it must change at once.
        let partial = self.cluster.file("targets.partial");
        std::fs::write(&partial, Value::from(targets).to_string()).unwrap();
        std::fs::rename(partial, targets_file(self.cluster)).unwrap();
    }

    /// How many records each pod has released.
    fn released(&mut self) -> Vec<u64> {
        let processes = self.running.values_mut();
        processes
            .map(|process| process.metric("redeliver_tier_released_total"))
            .collect()
    }
}

fn targets_file(cluster: &Cluster) -> PathBuf {
    cluster.file("targets.json")
}

/// Starts Prometheus, which scrapes the pods.
fn prometheus(cluster: &Cluster, port: u16) -> Process {
    let config = json!({
        "global": { "scrape_interval": "1s" },
        "scrape_configs": [
            { "job_name": "redeliver", "file_sd_configs": [{ "files": [path(&targets_file(cluster))] }] },
        ],
    });
    let file = cluster.file("prometheus.yml");
    std::fs::write(&file, config.to_string()).unwrap();
    let mut prometheus = Command::new("prometheus");
    prometheus.arg(format!("--config.file={}", file.display()));
    prometheus.arg(format!(
        "--storage.tsdb.path={}",
        cluster.file("prometheus").display()
    ));
    prometheus.arg(format!("--web.listen-address=127.0.0.1:{port}"));
    Process::spawn(prometheus).unwrap()
}

/// The rules for the adapter in the README of the chart, which has them as values of the adapter's own chart.
fn rules() -> Value {
    let readme = std::fs::read_to_string(deploy().join("helm/redeliver/README.md")).unwrap();
    let (_, rules) = readme.split_once("```yaml\nrules:\n").unwrap();
    let (rules, _) = rules.split_once("```").unwrap();
    let mut rules: Value = serde_saphyr::from_str(rules).unwrap();
    json!({ "externalRules": rules["external"].take() })
}

/// Starts the Prometheus adapter, and adds it to the API server.
fn adapter(cluster: &Cluster, program: &Path, prometheus: u16) -> Process {
    let port = free_port();
    let config = cluster.file("adapter.yaml");
    std::fs::write(&config, rules().to_string()).unwrap();
    let kubeconfig = cluster.kube.kubeconfig();
    let mut adapter = Command::new(program);
    for purpose in ["lister", "authentication", "authorization"] {
        adapter.arg(format!("--{purpose}-kubeconfig={}", kubeconfig.display()));
    }
    adapter.arg(format!("--config={}", config.display()));
    adapter.arg(format!("--cert-dir={}", cluster.file("adapter").display()));
    adapter.arg(format!("--prometheus-url=http://127.0.0.1:{prometheus}"));
    adapter.arg(format!("--secure-port={port}"));
    // A metric exists after the first scrape.
    adapter.args([
        "--bind-address=127.0.0.1",
        "--metrics-relist-interval=1s",
        "--metrics-max-age=1m",
    ]);
    let process = Process::spawn(adapter).unwrap();

    let api = "external.metrics.k8s.io";
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "name": "adapter" },
        // No proxy serves the addresses of Services here.
        "spec": { "type": "ExternalName", "externalName": "localhost" },
    });
    let registration = json!({
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": { "name": format!("v1beta1.{api}") },
        "spec": {
            "group": api,
            "version": "v1beta1",
            "service": { "name": "adapter", "namespace": NAMESPACE, "port": port },
            "insecureSkipTLSVerify": true,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
        },
    });
    let objects = json!({ "apiVersion": "v1", "kind": "List", "items": [service, registration] });
    let manifest = cluster.file("adapter.json");
    std::fs::write(&manifest, objects.to_string()).unwrap();
    cluster.kubectl(&["apply", "--filename", path(&manifest)]);
    until(cluster, "Available", &format!("apiservice/v1beta1.{api}"));
    process
}

/// Waits for a condition of an object.
#[track_caller]
fn until(cluster: &Cluster, condition: &str, object: &str) {
    let condition = format!("--for=condition={condition}");
    cluster.kubectl(&["wait", &condition, "--timeout=120s", object]);
}

#[test]
#[ignore = "long"]
fn autoscaler_follows_overdue_records() {
    let program = kube_tools::prometheus_adapter().unwrap();
    let _permit = ChaosPermit::acquire();
    let pipe = PipeBuilder::new("autoscaled")
        .partitions(PODS)
        .tiers(&[1_000])
        .set("kafka.session_timeout", "6s")
        .behave(recovers_after(1))
        .create();
    let cluster = Cluster::with_values(&values(&pipe).to_string());
    cluster.helm("install", &["--wait", "--timeout", "2m"]);
    let mut pods = Pods::new(&cluster, &pipe);
    pods.sync();
    assert_eq!(pods.running.len(), 1);
    let port = free_port();
    let _prometheus = prometheus(&cluster, port);
    let _adapter = adapter(&cluster, &program, port);
    let tier = pipe.pipeline.policy.tiers()[0];
    let autoscaler = format!("horizontalpodautoscaler/{RELEASE}-redeliver-retry-{tier}");
    until(&cluster, "ScalingActive", &autoscaler);

    let _enricher = pipe.enricher("a");
    let (mut sent, mut ends) = (Vec::new(), pipe.watch());
    eventually("all pods of a larger tier release records", DEADLINE, || {
        if sent.len() < ends.look().len() + BACKLOG {
            sent.extend(pipe.produce(drafts(&format!("batch-{}", sent.len()), BATCH)));
        }
        let status = pods.sync();
        let released = pods.released();
        let holds = released.len() == PODS as usize && !released.contains(&0);
        ensure(holds, format!("{released:?}; {status}"))
    });
    eventually("the tier is small again", DEADLINE, || {
        let status = pods.sync();
        let count = pods.running.len();
        ensure(count == 1, format!("{count} pods; {status}"))
    });

    // The last one has the work of those that were stopped.
    for process in pods.running.values_mut() {
        process.until_owning(u64::from(PODS));
    }
    sent.extend(pipe.produce(drafts("afterwards", 100)));
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets_with(&sent, |_| recovered_after(1));
    none_was_early(&pipe, sent.len());
}
