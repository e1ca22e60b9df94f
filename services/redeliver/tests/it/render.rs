//! Topics that are created with what `redeliver topics render` prints.

use std::collections::BTreeMap;
use std::time::Duration;

use redeliver_testkit::kafka_tools::{KAFKA_TOPICS, run_script};
use redeliver_testkit::{CommandOutput, EnvBuilder, TestEnv, eventually};

use crate::raw;

const PIPELINES: &str = "pipelines:
  '{name}_A':
    source: '{name}'
    output: '{name}-out'
    retry: { tiers: [30s] }
    max_wait: 20d
    long_waits: scheduler
";

fn env(test: &str) -> TestEnv {
    EnvBuilder::new(test)
        .partitions(3)
        .scheduler(&[("app", "{name}-jobs")])
        .yaml(PIPELINES)
        .build()
}

fn printed(env: &TestEnv, arguments: &[&str]) -> String {
    let CommandOutput { code, stdout, stderr } = env.run("redeliver", arguments);
    let said = stderr.lines().find(|line| !line.starts_with("cluster "));
    assert_eq!((code, said), (Some(0), None), "{arguments:?}: {stdout}");
    stdout
}

/// Waits until `topics check` finds nothing in the topics of this test: the broker knows them a moment after the script. It has topics of
/// other tests too.
fn until_topics_are_right(env: &TestEnv) {
    eventually("topics without findings", Duration::from_secs(30), || {
        let checked = env.run("redeliver", &["topics", "check"]);
        let lines = checked.stdout.lines().chain(checked.stderr.lines());
        let own: Vec<&str> = lines.filter(|line| line.contains(env.name())).collect();
        if checked.code == Some(0) && own.is_empty() {
            return Ok(());
        }
        Err(format!("{own:?}"))
    });
}

#[test]
fn script_creates_missing_topics() {
    let env = env("render-script");
    // A topic that exists is left as it is.
    raw::create_topic(env.brokers(), env.name(), &[]);
    let script = printed(&env, &["topics", "render", "--format", "script"]);
    let created = run_script(&env, &KAFKA_TOPICS, &script);
    assert_eq!(created.code, Some(0), "{created:?}");
    until_topics_are_right(&env);
    let applied = printed(&env, &["topics", "apply"]);
    assert!(!applied.contains("created"), "{applied}");
}

/// The settings of each topic, from either format.
type Topics = BTreeMap<String, BTreeMap<String, String>>;

fn of_script(script: &str) -> Topics {
    let lines = script
        .lines()
        .filter_map(|line| line.strip_prefix("create --topic "));
    lines
        .map(|line| {
            let (name, flags) = line.split_once(' ').unwrap();
            let flags: Vec<&str> = flags.split(' ').collect();
            let settings = flags.chunks(2).map(|pair| match pair {
                ["--config", config] => {
                    let (name, value) = config.split_once('=').unwrap();
                    (name.to_owned(), value.to_owned())
                }
                [flag, value] => (flag.trim_start_matches('-').to_owned(), (*value).to_owned()),
                _ => panic!("{line}"),
            });
            (name.to_owned(), settings.collect())
        })
        .collect()
}

fn of_objects(yaml: &str) -> Topics {
    let text = |value: &serde_json::Value| match value {
        serde_json::Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    // A comment comes before the first object.
    let objects = yaml.split("---\n").skip(1);
    objects
        .map(|object| {
            let object: serde_json::Value = serde_saphyr::from_str(object).unwrap();
            assert_eq!(object["kind"], "KafkaTopic");
            assert_eq!(object["metadata"]["labels"]["strimzi.io/cluster"], "my-cluster");
            let spec = &object["spec"];
            let mut settings: BTreeMap<String, String> = BTreeMap::new();
            if let Some(config) = spec["config"].as_object() {
                settings.extend(config.iter().map(|(name, value)| (name.clone(), text(value))));
            }
            settings.insert("partitions".to_owned(), text(&spec["partitions"]));
            settings.insert("replication-factor".to_owned(), text(&spec["replicas"]));
            (text(&spec["topicName"]), settings)
        })
        .collect()
}

#[test]
fn formats_have_same_topics() {
    let env = env("render-formats");
    let script = of_script(&printed(&env, &["topics", "render", "--format", "script"]));
    let yaml = printed(
        &env,
        &[
            "topics",
            "render",
            "--format",
            "strimzi",
            "--cluster",
            "my-cluster",
        ],
    );
    let is_managed = |settings: &BTreeMap<String, String>| settings.contains_key("cleanup.policy");
    let (managed, of_users): (Topics, Topics) =
        script.into_iter().partition(|(_, settings)| is_managed(settings));
    assert_eq!(of_objects(&yaml), managed);
    // Strimzi would change topics of users that exist.
    assert_eq!(of_users.len(), 3, "{of_users:?}");
    for topic in of_users.keys() {
        assert!(
            yaml.contains(&format!(" {topic}")) && !yaml.contains(&format!("\"{topic}\"")),
            "{yaml}"
        );
    }
    let tier = &managed[&format!("{}_A-retry-30s", env.name())];
    assert_eq!(tier["cleanup.policy"], "delete");
    assert_eq!(tier["partitions"], "3");
    // Names of objects have no capital letters and no underscores.
    let dead = format!("{}_A-dlq", env.name());
    assert!(yaml.contains(&format!("topicName: \"{dead}\"")) && !yaml.contains(&format!("name: \"{dead}\"")));
}

#[test]
fn cluster_name_is_required_and_checked() {
    let env = env("render-cluster");
    let strimzi = ["topics", "render", "--format", "strimzi"];
    let missing = env.run("redeliver", &strimzi);
    assert_eq!(missing.code, Some(2));
    assert!(missing.stderr.contains("--cluster <NAME>"), "{missing:?}");
    let wrong = env.run(
        "redeliver",
        &[&strimzi[..], &["--cluster", "My\"Cluster"]].concat(),
    );
    assert_eq!(wrong.code, Some(2));
    assert!(
        wrong.stderr.contains("write the name of a Kubernetes object"),
        "{wrong:?}"
    );
}
