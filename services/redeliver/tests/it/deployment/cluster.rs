//! The Helm chart on a real API server whose nodes are fake: the objects, their admission and their controllers are real, but
//! no container runs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;

use redeliver_testkit::languages::run;
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{LocalKube, eventually, kube_tools};
use serde_json::Value;

use super::deploy;
use crate::services::path;
use crate::support::{DEADLINE, words};

pub(super) const NAMESPACE: &str = "apps";
pub(super) const RELEASE: &str = "test";

/// Two pipelines that share a tier, a scheduler, autoscaled enrichers, and all optional objects.
const VALUES: &str = r#"
config:
  pipelines:
    docs: { output: enriched, retry: { tiers: [5s, 30s] }, http: { url: "http://endpoint/" } }
    mails: { retry: { tiers: [30s, 1m] }, http: { url: "http://endpoint/" } }
  scheduler: { apps: { docs: { topic: docs } } }
scheduler:
  api: { tokenSecret: { name: token } }
enricher:
  autoscaling: { enabled: true, kind: keda, minReplicas: 1, maxReplicas: 12 }
dlqInspector:
  replicas: 2
  api: { allowUnauthenticated: true }
autoscaling: { prometheus: { serverAddress: "http://prometheus" } }
networkPolicy: { enabled: true }
podMonitor: { enabled: true }
prometheusRule: { enabled: true }
dashboards: { enabled: true }
"#;

/// What a second day adds to these values: TLS and logins on everything.
const SECURED: &str = r#"
config:
  kafka:
    brokers: kafka:9093
    login: { oidc: { token_url: "https://login.example.org/token", client_id: redeliver } }
  redis: { url: "rediss://:$(REDIS_PASSWORD)@redis:6379" }
kafka:
  tls: { enabled: true, caSecret: { name: kafka-ca }, clientSecret: { name: kafka-client } }
  oidc: { secret: { name: kafka-login }, caSecret: { name: login-ca } }
redis: { secret: redis, passwordKey: password, caSecret: { name: redis-ca } }
admin: { tls: { secret: { name: internal }, clientCaSecret: { name: clients } } }
certManager:
  issuerRef: { kind: ClusterIssuer, name: internal }
  spec: { duration: 720h, renewBefore: 240h, privateKey: { algorithm: ECDSA, size: 256 } }
scheduler:
  api:
    tokensSecret: { name: tokens }
    jwt:
      issuer: https://login.example.org
      audience: redeliver
      jwks_url: https://login.example.org/keys
      roles: { admin: ["jobs:*"] }
    tls: { secret: { name: scheduler } }
dlqInspector:
  api:
    allowUnauthenticated: false
    clientCertificates: [{ uri: "spiffe://example.org/*", scopes: ["dead-letters:read"] }]
    tls: { secret: { name: internal }, clientCaSecret: { name: clients } }
podMonitor:
  tlsConfig:
    serverName: test-redeliver.apps.svc
    ca: { secret: { name: internal, key: ca.crt } }
    cert: { secret: { name: prometheus, key: tls.crt } }
    keySecret: { name: prometheus, key: tls.key }
"#;

/// The Secrets that [`VALUES`] and [`SECURED`] name, except those that cert-manager writes.
const SECRETS: [(&str, &[&str]); 9] = [
    ("token", &["token"]),
    ("tokens", &["tokens.yaml"]),
    ("kafka-ca", &["ca.crt"]),
    ("kafka-client", &["tls.crt", "tls.key"]),
    ("kafka-login", &["client-secret"]),
    ("login-ca", &["ca.crt"]),
    ("redis", &["password"]),
    ("redis-ca", &["ca.crt"]),
    ("clients", &["ca.crt"]),
];

/// A cluster with the namespace of the release, which admits only pods that meet the Pod Security Standard `restricted`.
pub(super) struct Cluster {
    pub(super) kube: LocalKube,
    files: Scratch,
}

/// What identifies a state of an object: its resource version and its uid.
type Versions = BTreeMap<String, (String, String)>;

impl Cluster {
    /// Also has the custom resources and the Secrets of [`VALUES`] and [`SECURED`].
    fn start() -> Self {
        let cluster = Self::with_values(VALUES);
        std::fs::write(cluster.file("secured.yaml"), SECURED).unwrap();
        let definitions = kube_tools::custom_resources().unwrap();
        cluster.kubectl(&["apply", "--server-side", "--filename", path(&definitions)]);
        cluster.kubectl(&words("wait --for=condition=Established --timeout=60s crd --all"));
        for (secret, keys) in SECRETS {
            let keys: Vec<String> = keys
                .iter()
                .map(|key| format!("--from-literal={key}=secret"))
                .collect();
            let create = ["create", "secret", "generic", secret].into_iter();
            let create: Vec<&str> = create.chain(keys.iter().map(String::as_str)).collect();
            cluster.kubectl(&create);
        }
        cluster
    }

    /// A cluster for a release with these values.
    pub(super) fn with_values(values: &str) -> Self {
        let cluster = Self {
            kube: LocalKube::start().unwrap(),
            files: Scratch::new("cluster").unwrap(),
        };
        std::fs::write(cluster.file("values.yaml"), values).unwrap();
        cluster.kubectl(&["create", "namespace", NAMESPACE]);
        let pods = "pod-security.kubernetes.io/enforce";
        let labels = format!("label namespace {NAMESPACE} {pods}=restricted {pods}-version=latest");
        cluster.kubectl(&words(&labels));
        cluster
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    fn kubectl_command(&self, arguments: &[&str]) -> Command {
        let mut kubectl = self.kube.kubectl().unwrap();
        kubectl.args(["--namespace", NAMESPACE]).args(arguments);
        kubectl
    }

    /// Runs kubectl, which must succeed, and returns what it printed.
    #[track_caller]
    pub(super) fn kubectl(&self, arguments: &[&str]) -> String {
        run(&mut self.kubectl_command(arguments)).unwrap()
    }

    pub(super) fn objects(&self, kinds: &str) -> Vec<Value> {
        let selector = format!("app.kubernetes.io/instance={RELEASE}");
        let listed = self.kubectl(&["get", kinds, "--selector", &selector, "--output", "json"]);
        let mut listed: Value = serde_json::from_str(&listed).unwrap();
        std::mem::take(listed["items"].as_array_mut().unwrap())
    }

    fn helm_command(&self, verb: &str, arguments: &[&str]) -> Command {
        let mut helm = self.kube.helm().unwrap();
        helm.args(["--namespace", NAMESPACE, verb, RELEASE]);
        if ["install", "upgrade"].contains(&verb) {
            helm.arg(deploy().join("helm/redeliver"));
            helm.arg("--values").arg(self.file("values.yaml"));
        }
        helm.args(arguments);
        helm
    }

    /// Runs helm on the release, which must succeed.
    #[track_caller]
    pub(super) fn helm(&self, verb: &str, arguments: &[&str]) -> String {
        run(&mut self.helm_command(verb, arguments)).unwrap()
    }

    /// Upgrades the release with mistaken values, which must fail with this text in the error and change nothing.
    #[track_caller]
    fn refuses(&self, expected: &str, arguments: &[&str]) {
        let before = (self.versions(), self.revision());
        let output = self.helm_command("upgrade", arguments).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "accepted: {arguments:?}");
        assert!(error.contains(expected), "{arguments:?}: {error}");
        assert_eq!((self.versions(), self.revision()), before, "{arguments:?}");
    }

    fn revision(&self) -> u64 {
        let status: Value = serde_json::from_str(&self.helm("status", &["--output", "json"])).unwrap();
        assert_eq!(status["info"]["status"], "deployed");
        status["version"].as_u64().unwrap()
    }

    /// All objects of the release with their versions, once their controllers have nothing left to do.
    fn versions(&self) -> Versions {
        let mut previous = Versions::new();
        eventually("the objects do not change any more", DEADLINE, || {
            let found = self.objects(KINDS);
            let is_going = |object: &&Value| {
                let component = &object["metadata"]["labels"]["app.kubernetes.io/component"];
                // The job that applies topics is deleted when it has succeeded.
                object["kind"] == "Pod" && component == "topics"
                    || !object["metadata"]["deletionTimestamp"].is_null()
            };
            if let Some(going) = found.iter().find(is_going) {
                return Err(format!("{} is still there", name(going)));
            }
            let current: Versions = found.iter().map(versioned).collect();
            if current == previous {
                return Ok(current);
            }
            let changing: Vec<_> = current
                .iter()
                .filter(|(name, version)| previous.get(*name) != Some(*version))
                .map(|(name, _)| name.clone())
                .collect();
            previous = current;
            Err(format!("changing: {changing:?}"))
        })
    }

    /// What the chart has set in each object, without what the API server and controllers keep in it.
    fn desired(&self) -> BTreeMap<String, Value> {
        let kinds = KINDS.replace("pods,", "");
        let objects = self.objects(&kinds).into_iter();
        objects
            .map(|mut object| {
                let (name, _) = versioned(&object);
                object["status"] = Value::Null;
                let metadata = &mut object["metadata"];
                *metadata = serde_json::json!([metadata["labels"], metadata["annotations"]]);
                (name, object)
            })
            .collect()
    }

    /// The Secrets with their keys, as they are once cert-manager, which does not run here, has issued the certificates.
    fn secrets(&self) -> BTreeMap<String, BTreeSet<String>> {
        let mut secrets: BTreeMap<String, BTreeSet<String>> = SECRETS
            .iter()
            .map(|(name, keys)| ((*name).to_owned(), texts(keys)))
            .collect();
        for certificate in self.objects("certificates") {
            let secret = certificate["spec"]["secretName"].as_str().unwrap();
            let issued = texts(&["ca.crt", "tls.crt", "tls.key"]);
            assert_eq!(secrets.insert(secret.to_owned(), issued), None, "{secret}");
        }
        secrets
    }

    /// The schemes by which the kubelet probes the pods. Each Secret that a StatefulSet or a Job names must exist, with the keys
    /// that it names, or the pods would wait for it forever.
    fn probes_and_mounts(&self) -> BTreeSet<String> {
        let secrets = self.secrets();
        let mut schemes = BTreeSet::new();
        for workload in self.objects("statefulsets,jobs") {
            let template = &workload["spec"]["template"]["spec"];
            for volume in each(&template["volumes"]) {
                if let Some(secret) = volume["secret"]["secretName"].as_str() {
                    for item in each(&volume["secret"]["items"]) {
                        let key = item["key"].as_str().unwrap();
                        let has_key = secrets.get(secret).is_some_and(|keys| keys.contains(key));
                        assert!(has_key, "{}: {secret} {key}", name(&workload));
                    }
                }
            }
            for container in each(&template["containers"]) {
                for variable in each(&container["env"]) {
                    let from = &variable["valueFrom"]["secretKeyRef"];
                    if let (Some(secret), Some(key)) = (from["name"].as_str(), from["key"].as_str()) {
                        let has_key = secrets.get(secret).is_some_and(|keys| keys.contains(key));
                        assert!(has_key, "{}: {secret} {key}", name(&workload));
                    }
                }
                for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
                    let probe = &container[probe];
                    let scheme = &probe["httpGet"]["scheme"];
                    let grpc = (!probe["grpc"].is_null()).then_some("gRPC");
                    schemes.extend(scheme.as_str().or(grpc).map(str::to_owned));
                }
            }
        }
        schemes
    }

    /// The StatefulSets with the number of their ready pods, which must be all.
    fn ready(&self) -> BTreeMap<String, u64> {
        eventually("all pods are ready", DEADLINE, || {
            let mut ready = BTreeMap::new();
            for set in self.objects("statefulsets") {
                let wanted = set["spec"]["replicas"].as_u64();
                let current = set["status"]["readyReplicas"].as_u64();
                let observed = set["status"]["observedGeneration"] == set["metadata"]["generation"];
                if wanted != current || !observed {
                    return Err(format!("{}: {}", name(&set), set["status"]));
                }
                ready.insert(name(&set), current.unwrap_or(0));
            }
            Ok(ready)
        })
    }
}

/// So that the API server sees autoscalers of this kind, too.
const HPA: &str = r#"retryTier.autoscaling={"enabled":true,"kind":"hpa","minReplicas":1,"maxReplicas":3}"#;

/// Everything that the chart creates, and what controllers create from it.
const KINDS: &str = "statefulsets,pods,services,configmaps,serviceaccounts,poddisruptionbudgets,networkpolicies,\
                     scaledobjects,podmonitors,prometheusrules,kafkatopics,certificates";

pub(super) fn each(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

fn texts(texts: &[&str]) -> BTreeSet<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

pub(super) fn name(object: &Value) -> String {
    object["metadata"]["name"].as_str().unwrap().to_owned()
}

fn versioned(object: &Value) -> (String, (String, String)) {
    let metadata = |key: &str| object["metadata"][key].as_str().unwrap().to_owned();
    let name = format!("{}/{}", object["kind"].as_str().unwrap(), metadata("name"));
    (name, (metadata("resourceVersion"), metadata("uid")))
}

#[test]
#[ignore = "long"]
fn release_is_scaled_and_rolled_back() {
    let cluster = Cluster::start();

    // The namespace refuses pods that could be root, so a release that starts proves that its pods cannot.
    let refused = cluster
        .kubectl_command(&["run", "root", "--image=x"])
        .output()
        .unwrap();
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(
        error.contains("violates PodSecurity \"restricted:latest\""),
        "{error}"
    );

    cluster.helm("install", &["--wait", "--timeout", "2m"]);
    let set = |suffix: &str| format!("{RELEASE}-redeliver-{suffix}");
    let pods = |replicas: &[(&str, u64)]| -> BTreeMap<String, u64> {
        let named = replicas.iter().map(|(suffix, count)| (set(suffix), *count));
        named.collect()
    };
    let installed = [
        ("dlq-inspector", 2),
        ("enricher-docs", 1),
        ("enricher-mails", 1),
        ("retry-1m", 1),
        ("retry-30s", 1),
        ("retry-5s", 1),
        ("scheduler", 1),
    ];
    assert_eq!(cluster.ready(), pods(&installed));
    let kinds: BTreeSet<String> = cluster
        .objects(KINDS)
        .iter()
        .map(|object| object["kind"].as_str().unwrap().to_owned())
        .collect();
    for kind in ["ScaledObject", "PodMonitor", "PrometheusRule", "NetworkPolicy"] {
        assert!(kinds.contains(kind), "{kinds:?}");
    }
    let desired = cluster.desired();
    cluster.helm("test", &["--timeout", "2m"]);

    // Scaling a tier changes only its replicas.
    let before = cluster.versions();
    let scale = ["--wait", "--timeout", "2m", "--set", "retryTiers.5s.replicas=4"];
    cluster.helm("upgrade", &scale);
    let mut scaled = installed;
    scaled[5].1 = 4;
    assert_eq!(cluster.ready(), pods(&scaled));
    let after = cluster.versions();
    let changed: BTreeSet<&str> = after
        .iter()
        .filter(|(name, version)| before.get(*name) != Some(*version))
        .map(|(name, _)| name.as_str())
        .collect();
    let tier = set("retry-5s");
    let added = [1, 2, 3].map(|number| format!("Pod/{tier}-{number}"));
    let expected = [
        format!("StatefulSet/{tier}"),
        format!("PodDisruptionBudget/{tier}"),
    ];
    let expected: BTreeSet<&str> = expected.iter().chain(&added).map(String::as_str).collect();
    assert_eq!(changed, expected);
    assert!(before.keys().all(|name| after.contains_key(name)));

    // A mistake names the value.
    cluster.refuses("replica", &["--set", "retryTier.replica=2"]);
    cluster.refuses(
        "autoscalling",
        &["--set", "retryTiers.5s.autoscalling.enabled=true"],
    );
    cluster.refuses(
        "retryTiers.15s: no pipeline has this tier",
        &["--set", "retryTiers.15s.replicas=2"],
    );
    cluster.refuses(
        "maxReplicas",
        &[
            "--set-json",
            r#"retryTiers.30s.autoscaling={"enabled":true,"kind":"keda","minReplicas":1}"#,
        ],
    );

    // Records may wait in a tier that no pipeline has any more.
    let without = r#"config.pipelines.docs.retry.tiers=["30s"]"#;
    cluster.refuses(
        "leftovers.tiers: no pipeline has the tier 5s any more",
        &["--set-json", without],
    );
    let upgrade = ["--set-json", without, "--set", "leftovers.tiers={5s}"];
    cluster.helm("upgrade", &[&words("--wait --timeout 2m")[..], &upgrade].concat());
    let mut leftover = installed;
    leftover[5] = ("leftovers", 1);
    assert_eq!(cluster.ready(), pods(&leftover));
    // The configuration has changed, so all pods were replaced.
    let replaced = cluster.versions();
    let pods_of = |versions: &Versions| -> BTreeSet<String> {
        let test = format!("Pod/{}", set("test"));
        let pods = versions
            .iter()
            .filter(|(name, _)| name.starts_with("Pod/") && !name.starts_with(&test));
        pods.map(|(_, (_, uid))| uid.clone()).collect()
    };
    assert!(pods_of(&after).is_disjoint(&pods_of(&replaced)));

    cluster.helm("rollback", &["1", "--wait", "--timeout", "2m"]);
    assert_eq!(cluster.ready(), pods(&installed));
    assert_eq!(cluster.desired(), desired);

    cluster.helm("uninstall", &["--wait", "--timeout", "2m"]);
    let left = cluster.objects("statefulsets,services,poddisruptionbudgets,scaledobjects");
    assert!(left.is_empty(), "{left:?}");
}

#[test]
#[ignore = "long"]
fn upgrade_and_rollback_switch_tls() {
    let cluster = Cluster::start();
    cluster.helm("install", &["--wait", "--timeout", "2m"]);
    let plain = (cluster.ready(), cluster.desired());
    assert_eq!(cluster.probes_and_mounts(), texts(&["HTTP", "gRPC"]));
    let pods = |cluster: &Cluster| -> BTreeMap<String, String> {
        let versions = cluster.versions().into_iter();
        let pods = versions.filter(|(name, _)| name.starts_with("Pod/"));
        pods.map(|(name, (_, uid))| (name, uid)).collect()
    };
    let before = pods(&cluster);

    // A listener whose clients need certificates, but that has none itself, is refused before anything changes.
    cluster.refuses(
        "admin.tls.secret.name: is missing",
        &["--set", "admin.tls.clientCaSecret.name=clients"],
    );

    let secured = cluster.file("secured.yaml");
    let upgrade = ["--wait", "--timeout", "2m", "--values", path(&secured)];
    cluster.helm("upgrade", &upgrade);
    assert_eq!(cluster.ready(), plain.0);
    let after = pods(&cluster);
    assert!(before.keys().eq(after.keys()));
    for (name, uid) in &after {
        assert_ne!(before[name], *uid, "{name} has not been replaced");
    }
    // The kubelet probes by HTTPS only: its gRPC probes cannot.
    assert_eq!(cluster.probes_and_mounts(), texts(&["HTTPS"]));
    let certificates: BTreeMap<String, Value> = cluster
        .objects("certificates")
        .iter()
        .map(|certificate| (name(certificate), certificate["spec"]["dnsNames"].clone()))
        .collect();
    let hosts = |service: &str| {
        let name = format!("{RELEASE}-redeliver{service}");
        ["", ".apps", ".apps.svc", ".apps.svc.cluster.local"].map(|domain| format!("{name}{domain}"))
    };
    let has = |certificate: &str, hosts: &[String]| {
        let names: BTreeSet<String> = each(&certificates[certificate])
            .map(|host| host.as_str().unwrap().to_owned())
            .collect();
        assert!(hosts.iter().all(|host| names.contains(host)), "{names:?}");
    };
    assert!(
        certificates.keys().eq(["internal", "scheduler"]),
        "{certificates:?}"
    );
    has("scheduler", &hosts("-scheduler"));
    // The admin ports and the inspector share one.
    has("internal", &hosts(""));
    has("internal", &hosts("-dlq-inspector"));
    let [monitor] = <[Value; 1]>::try_from(cluster.objects("podmonitors")).unwrap();
    let [endpoint] =
        <[Value; 1]>::try_from(monitor["spec"]["podMetricsEndpoints"].as_array().unwrap().clone()).unwrap();
    assert_eq!(endpoint["scheme"], "https");
    assert_eq!(endpoint["tlsConfig"]["keySecret"]["name"], "prometheus");
    cluster.helm("test", &["--timeout", "2m"]);
    // The Job of `helm test` mounts Secrets too.
    assert_eq!(cluster.probes_and_mounts(), texts(&["HTTPS"]));

    // An upgrade without a change replaces nothing.
    let unchanged = cluster.versions();
    cluster.helm("upgrade", &upgrade);
    assert_eq!(cluster.versions(), unchanged);

    cluster.helm("rollback", &["1", "--wait", "--timeout", "2m"]);
    assert_eq!((cluster.ready(), cluster.desired()), plain);
    assert_eq!(cluster.objects("certificates"), Vec::<Value>::new());
    // Replaces the Job of the previous revision.
    cluster.helm("test", &["--timeout", "2m"]);
    assert_eq!(cluster.probes_and_mounts(), texts(&["HTTP", "gRPC"]));
}

#[test]
#[ignore = "long"]
fn server_accepts_examples_and_keeps_topics() {
    let cluster = Cluster::start();
    for example in std::fs::read_dir(deploy().join("helm/redeliver/examples")).unwrap() {
        let example = example.unwrap().path();
        let manifest = cluster.file("manifest.yaml");
        if example.ends_with("kind-servers.yaml") {
            std::fs::copy(&example, &manifest).unwrap();
        } else {
            let rendered = run(cluster
                .kube
                .helm()
                .unwrap()
                .args(["template", RELEASE, "--namespace", NAMESPACE])
                .args(["--validate", "--no-hooks"])
                .arg(deploy().join("helm/redeliver"))
                .arg("--values")
                .arg(&example)
                .args(["--set-json", HPA]))
            .unwrap();
            std::fs::write(&manifest, rendered).unwrap();
        }
        let apply = words("apply --dry-run=server --validate=strict --filename");
        cluster.kubectl(&[&apply[..], &[path(&manifest)]].concat());
    }

    // The namespace admits its pods.
    let job = deploy().join("one-shot/cronjob.yaml");
    cluster.kubectl(&words("create serviceaccount redeliver"));
    cluster.kubectl(&["apply", "--validate=strict", "--filename", path(&job)]);
    cluster.kubectl(&words("create job once --from=cronjob/redeliver"));
    eventually("the CronJob runs", DEADLINE, || {
        let pods = cluster.kubectl(&words("get pods --selector job-name=once --output name"));
        if pods.is_empty() { Err("no pod") } else { Ok(()) }
    });

    let strimzi = "--wait --timeout 2m --set topics.provisioner=strimzi --set topics.strimzi.cluster=main \
                   --set config.kafka.topics.replication=3";
    cluster.helm("install", &words(strimzi));
    let topics: BTreeSet<String> = cluster.objects("kafkatopics").iter().map(name).collect();
    assert!(
        topics.contains("docs-retry-5s") && topics.contains("mails-dlq"),
        "{topics:?}"
    );
    cluster.helm("uninstall", &["--wait", "--timeout", "2m"]);
    let kept: BTreeSet<String> = cluster.objects("kafkatopics").iter().map(name).collect();
    assert_eq!(kept, topics);
}
