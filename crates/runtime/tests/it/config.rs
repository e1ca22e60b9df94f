//! Loading: precedence, environment, flags, secrets, printing.

use std::collections::BTreeMap;

use proptest::prelude::*;
use redeliver_core::anchor::Anchor;
use redeliver_core::pipeline::ReturnTo;
use redeliver_core::{ErrorClass, HumanDuration};
use redeliver_runtime::config::{
    ChosenBy, ChosenOutput, Config, Findings, OutputConfig, OwnSections, ProgramConfig, ResponseMode,
    SchemaConfig, Sources,
};
use serde::{Deserialize, Serialize};

/// The example of the protocol's description.
pub(crate) const EXAMPLE: &str = r#"
kafka:
  brokers: localhost:9092
redis:
  url: redis://localhost:6379
scheduler:
  apps:
    crawl: { topic: crawl-jobs }
pipelines:
  crawl-jobs:                       # the name; the source topic unless `source:` says otherwise
    output: crawl-results
    retry: { tiers: [5s, 30s, 1m] } # or { base: 2m, factor: 2, max_retries: 5 }
    http: { url: "http://localhost:8080/crawl", timeout: 5s, concurrency: 16 }
retry_tier:
  tiers: [5s, 30s, 1m]              # which tiers this process serves; --tier 30s narrows it
dlq_inspector:
  listen: 127.0.0.1:50051
  topics: ["*-dlq", "scheduler.jobs.dlq"]
  data_dir: ./data
admin:
  listen: 127.0.0.1:9464            # /livez /readyz /metrics /config, one per process
"#;

/// Loads a file, overridden by variables and flags. Errors show its name without the directory.
pub(crate) fn load(
    file: &str,
    environment: &[(&str, &str)],
    flags: &[(&str, &str)],
) -> Result<ProgramConfig, String> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("redeliver.yaml");
    std::fs::write(&path, file).unwrap();
    let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    let sources = Sources {
        file: Some(path.clone()),
        environment: environment.iter().map(owned).collect(),
        overrides: flags.iter().map(owned).collect(),
    };
    let folder = format!("{}/", directory.path().display());
    ProgramConfig::load(&sources).map_err(|error| error.to_string().replace(&folder, ""))
}

#[test]
fn protocol_example_is_valid() {
    let config = load(EXAMPLE, &[], &[]).unwrap();
    let pipeline = config.pipelines["crawl-jobs"].pipeline("crawl-jobs", &config.scheduler);
    assert_eq!((&*pipeline.name, &*pipeline.source), ("crawl-jobs", "crawl-jobs"));
    assert_eq!(pipeline.output.as_deref(), Some("crawl-results"));
    assert_eq!(pipeline.return_to, ReturnTo::Due);
    assert_eq!(config.tiers(), [5, 30, 60].map(HumanDuration::from_secs));
    assert_eq!(config.scheduler.apps["crawl"].topic, "crawl-jobs");
    let http = config.pipelines["crawl-jobs"].http.as_ref().unwrap();
    assert_eq!(
        (http.method.as_str(), &http.response),
        ("POST", &ResponseMode::Replace)
    );
}

#[test]
fn flags_override_environment_overrides_file() {
    let file = "kafka: { brokers: 'file:1', lanes: 2, batch: 10 }";
    let environment = [
        ("REDELIVER__KAFKA__BROKERS", "env:1"),
        ("redeliver__kafka__lanes", "3"),
    ];
    let config = load(file, &environment, &[("kafka.brokers", "flag:1")]).unwrap();
    assert_eq!(
        (
            config.kafka.brokers.as_str(),
            config.kafka.lanes,
            config.kafka.batch
        ),
        ("flag:1", 3, 10)
    );
}

#[test]
fn environment_names_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("from-env.yaml");
    std::fs::write(&path, "kafka: { lanes: 7 }").unwrap();
    let variable = ("REDELIVER_CONFIG".to_owned(), path.display().to_string());
    let sources = Sources {
        environment: [variable].into(),
        ..Sources::default()
    };
    assert_eq!(<ProgramConfig>::load(&sources).unwrap().kafka.lanes, 7);
}

#[test]
fn underscores_match_dashes_and_dots() {
    let file =
        "pipelines: { crawl-jobs: { output: a }, my.topic: {} }\nkafka: { properties: { linger.ms: 1 } }";
    let environment = [
        ("REDELIVER__PIPELINES__CRAWL_JOBS__OUTPUT", "b"),
        ("REDELIVER__PIPELINES__MY_TOPIC__RETRY__TIERS", "1s,2s"),
        ("REDELIVER__KAFKA__PROPERTIES__LINGER_MS", "7"),
        ("REDELIVER__KAFKA__PROPERTIES__SASL_USERNAME", "me"),
        (
            "REDELIVER__PIPELINES__CRAWL_JOBS__HTTP",
            "{url: 'http://h', concurrency: 3}",
        ),
        (
            "REDELIVER__PIPELINES__CRAWL_JOBS__HTTP__HEADERS__CONTENT_TYPE",
            "text/plain",
        ),
    ];
    let config = load(file, &environment, &[]).unwrap();
    let crawl = &config.pipelines["crawl-jobs"];
    assert_eq!(crawl.output, Some(OutputConfig::Topic("b".to_owned())));
    assert_eq!(
        config.pipelines["my.topic"].retry.tiers,
        Some(vec![HumanDuration::from_secs(1), HumanDuration::from_secs(2)])
    );
    let properties: BTreeMap<_, _> = config.kafka.properties.iter().collect();
    assert_eq!(properties, [("linger.ms", "7"), ("sasl.username", "me")].into());
    let http = crawl.http.as_ref().unwrap();
    assert_eq!(
        (http.concurrency, http.headers.get("content-type")),
        (3, Some("text/plain"))
    );
}

#[test]
fn overrides_can_choose_outputs() {
    let two = || OutputConfig::AnyOf(["a", "b"].map(str::to_owned).into());
    let chosen = OutputConfig::Chosen(ChosenOutput {
        by: ChosenBy::Payload,
        pointer: Some("/kind".to_owned()),
        topics: [("a", Some("done")), ("b", None)]
            .map(|(value, topic)| (value.to_owned(), topic.map(str::to_owned)))
            .into(),
        default: None,
    });
    for (text, expected) in [
        ("a,b", two()),
        ("[a, b]", two()),
        ("[a]", OutputConfig::AnyOf(vec!["a".to_owned()])),
        (
            "{ pointer: /kind, topics: { a: done, b: null }, default: ~ }",
            chosen,
        ),
    ] {
        let http = if text.starts_with('{') {
            "http: { url: http://localhost }"
        } else {
            ""
        };
        let file = format!("pipelines: {{ p: {{ {http} }} }}");
        let flag = ("pipelines.p.output", text);
        let variable = ("REDELIVER__PIPELINES__P__OUTPUT", text);
        for (variables, flags) in [(vec![variable], vec![]), (vec![], vec![flag])] {
            let config = load(&file, &variables, &flags).unwrap();
            assert_eq!(config.pipelines["p"].output.as_ref(), Some(&expected), "{text}");
        }
    }
}

#[test]
fn password_in_braces_is_text() {
    for password in ["{hunter2}", "{a,b}", "{a: }", "{a: , b: 1}"] {
        let flags = [("kafka.properties.sasl.password", password)];
        let config = load("{}", &[], &flags).unwrap();
        assert_eq!(config.kafka.properties.get("sasl.password"), Some(password));
    }
}

#[test]
fn flags_can_name_dotted_keys() {
    let file = "pipelines: { my.topic: { output: a } }";
    let flags = [
        ("pipelines.my.topic.output", "b"),
        ("pipelines.\"new.topic\".output", "c"),
        ("kafka.properties.sasl.mechanism", "PLAIN"),
        ("pipelines.my.topic.retry.tiers", "[5s, 2m]"),
    ];
    let config = load(file, &[], &flags).unwrap();
    assert_eq!(
        config.pipelines["my.topic"].output,
        Some(OutputConfig::Topic("b".to_owned()))
    );
    assert_eq!(
        config.pipelines["new.topic"].output,
        Some(OutputConfig::Topic("c".to_owned()))
    );
    assert_eq!(config.kafka.properties.get("sasl.mechanism"), Some("PLAIN"));
    assert_eq!(
        config.pipelines["my.topic"].retry.tiers,
        Some(vec![HumanDuration::from_secs(5), HumanDuration::from_secs(120)])
    );
}

#[test]
fn properties_keep_their_text() {
    let file = "kafka: { properties: { a: 1.10, b: true, c: 'null', d: 0x10, e: yes } }";
    let password = "{not: yaml # at all";
    let variable = ("REDELIVER__KAFKA__PROPERTIES__SASL_PASSWORD", password);
    let config = load(file, &[], &[]).unwrap();
    let values: Vec<_> = config
        .kafka
        .properties
        .iter()
        .map(|(_, value)| value.to_owned())
        .collect();
    assert_eq!(values, ["1.10", "true", "null", "0x10", "yes"]);
    let config = load("", &[variable], &[]).unwrap();
    assert_eq!(config.kafka.properties.get("sasl.password"), Some(password));
}

#[test]
fn secrets_of_files_are_hidden() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("password");
    std::fs::write(&path, "from-file-hunter2\n").unwrap();
    let file = format!(
        r#"
kafka:
  properties:
    sasl.password: {{ file: {} }}
    ssl.key.password: inline-hunter2
    sasl.username: me
pipelines:
  p:
    http:
      url: "http://localhost/x?api_key=query-hunter2&sig=hunter2&hunter2"
      headers: {{ authorization: Bearer header-hunter2, x-functions-key: hunter2, accept: text/plain }}
      header_files: {{ x-token: {} }}
telemetry: {{ otlp: {{ endpoint: "https://localhost:4317/?code=hunter2" }} }}
"#,
        path.display(),
        path.display()
    );
    let config = load(&file, &[], &[]).unwrap();
    assert_eq!(
        config.kafka.properties.get("sasl.password"),
        Some("from-file-hunter2")
    );
    for shown in [config.to_yaml(), config.to_json(), format!("{config:?}")] {
        assert!(!shown.contains("hunter2"), "{shown}");
        assert!(shown.contains("text/plain") && shown.contains("me"));
    }
}

#[test]
fn printed_configuration_can_be_loaded() {
    for file in [
        EXAMPLE,
        "",
        "instance: i-0\npipelines: { p: { retry: { base: 2m, cap: 1h }, anchor: { pointer: /a } } }",
        "pipelines: { p: { schema: { const: '5', enum: [5, 'true', true, null, '~'], maximum: 1.5e3 } } }",
        "pipelines: { p: { http: { url: 'http://h', batch: { records: 10 }, connections: { proxy: none } } } }",
    ] {
        let config = load(file, &[], &[]).unwrap();
        let printed = config.to_yaml();
        let again = load(&printed, &[], &[]).unwrap_or_else(|error| panic!("{error}\n{printed}"));
        assert_eq!(again.to_yaml(), printed);
        assert_eq!(again.to_json(), config.to_json());
        let json = load(&config.to_json(), &[], &[]).unwrap();
        assert_eq!(json.to_json(), config.to_json());
    }
}

#[test]
fn inline_schema_scalars_are_json() {
    let block = "
pipelines:
  p:
    schema:
      type: object
      properties:
        quantity: { type: integer, minimum: -1, maximum: 10000 }
        size: { multipleOf: 0.01, const: 5, enum: ['5', \"true\", true, null] }
        version: { pattern: 1.10.0, default: 2026-11-24, const: !!str 7 }
      additionalProperties: false
";
    let expected = serde_json::json!({
        "type": "object",
        "properties": {
            "quantity": { "type": "integer", "minimum": -1, "maximum": 10_000 },
            "size": { "multipleOf": 0.01, "const": 5, "enum": ["5", "true", true, null] },
            "version": { "pattern": "1.10.0", "default": "2026-11-24", "const": "7" },
        },
        "additionalProperties": false,
    });
    let schema = |config: &Config| config.pipelines["p"].schema.clone();
    let inline = Some(SchemaConfig::Inline(expected.as_object().unwrap().clone()));
    assert_eq!(schema(&load(block, &[], &[]).unwrap()), inline);
    let text = expected.to_string();
    let flag = ("pipelines.p.schema", text.as_str());
    assert_eq!(schema(&load("", &[], &[flag]).unwrap()), inline);
    let file = load("pipelines: { p: { schema: /etc/order.json } }", &[], &[]).unwrap();
    assert_eq!(schema(&file), Some(SchemaConfig::File("/etc/order.json".into())));
}

#[test]
fn configured_instance_is_static_member() {
    let configured = load("instance: enricher-0", &[], &[]).unwrap();
    assert!(configured.static_membership());
    assert_eq!(configured.kafka.static_membership, Some(true));
    let disabled = load(
        "instance: enricher-0\nkafka: { static_membership: false }",
        &[],
        &[],
    )
    .unwrap();
    assert!(!disabled.static_membership());
    let from_environment = load("", &[("REDELIVER__INSTANCE", "enricher-1")], &[]).unwrap();
    assert_eq!(
        (
            from_environment.instance.as_str(),
            from_environment.static_membership()
        ),
        ("enricher-1", true)
    );
    let null = load("instance: null", &[], &[]).unwrap();
    assert!(!null.static_membership());
}

#[test]
fn pipeline_converts_to_domain_type() {
    let file = "
pipelines:
  docs:
    source: documents
    output: { pointer: /meta/queue, topics: { a: topic-a, b: topic-b }, default: topic-c }
    return_to: source
    retry: { base: 2m, max_retries: 5, jitter: full }
    anchor: { pointer: /meta/created_at }
    max_wait: 2h
    max_age: 7d
    http: { url: 'https://h/x', classification: { 404: transient, 503: permanent, 409: success } }
";
    let config = load(file, &[], &[]).unwrap();
    let docs = &config.pipelines["docs"];
    let pipeline = docs.pipeline("docs", &config.scheduler);
    assert_eq!(
        (&*pipeline.source, pipeline.output.as_deref()),
        ("documents", Some("topic-c"))
    );
    assert_eq!(pipeline.return_to, ReturnTo::Source);
    assert_eq!(pipeline.anchor, Anchor::Payload("/meta/created_at".to_owned()));
    assert_eq!(
        pipeline.policy.nominal_wait(5),
        Some(HumanDuration::from_secs(32 * 60))
    );
    assert_eq!(
        (pipeline.max_wait, pipeline.max_age),
        (
            HumanDuration::from_secs(7200),
            Some(HumanDuration::from_secs(7 * 86_400))
        )
    );
    assert_eq!(pipeline.other_outputs, ["topic-a".into(), "topic-b".into()]);
    assert_eq!(pipeline.long_waits, None);
    let table = docs.http.as_ref().unwrap().classification();
    let class = |status| table.of_status(status, true).map_err(|(class, _)| class);
    assert_eq!(class(404), Err(ErrorClass::Transient));
    assert_eq!(class(503), Err(ErrorClass::Permanent));
    assert_eq!(table.of_status(409, false), Ok(()));
}

#[test]
fn long_waits_use_the_ingest_topic() {
    let file = "
scheduler: { topics: { ingest: jobs } }
pipelines: { docs: { long_waits: scheduler, max_wait: 200d } }
";
    let config = load(file, &[], &[]).unwrap();
    let pipeline = config.pipelines["docs"].pipeline("docs", &config.scheduler);
    assert_eq!(pipeline.long_waits.as_deref(), Some("jobs"));
    assert_eq!(pipeline.max_wait, HumanDuration::from_secs(200 * 86_400));
}

/// The section of a program.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Own {
    redis: BTreeMap<String, u32>,
}

impl OwnSections for Own {
    fn check(&self, shared: &Config, findings: &mut Findings<'_>) {
        let lanes = shared.kafka.lanes;
        findings.inside("redis", |at| {
            for (key, value) in &self.redis {
                at.range(key, *value, 0..=lanes);
            }
        });
    }
}

#[test]
fn program_reads_only_its_sections() {
    let problems = |file| ProgramConfig::<Own>::from_yaml(file).unwrap_err().to_string();
    let valid = "{ redis: { a: 2 }, kafka: { lanes: 2 }, retry_tier: { no: such key } }";
    let config = ProgramConfig::<Own>::from_yaml(valid).unwrap();
    assert_eq!(config.own.redis["a"], 2);
    let shown = config.to_yaml();
    assert!(
        shown.contains("redis:\n  a: 2\n") && !shown.contains("retry_tier"),
        "{shown}"
    );
    assert_eq!(
        problems("{ redis: { a: 3 }, kafka: { lanes: 2 } }"),
        "redis.a: 3 is out of range: must be between 0 and 2 (configuration line 1)"
    );
    let both = problems("{ redis: { a: x }, kafka: { lanes: x }, retry-tier: {} }");
    for problem in [
        "redis.a: `x` is not",
        "kafka.lanes: `x` is not",
        "retry-tier: unknown key, did you mean `retry_tier`?",
    ] {
        assert!(both.contains(problem), "{both}");
    }
    assert_eq!(
        problems("text"),
        "the configuration is a string; expected a mapping of keys to values (configuration line 1)"
    );
}

#[test]
fn invalid_override_names_are_rejected() {
    let environment = |name| load("pipelines: { a-b: {}, a.b: {} }", &[(name, "x")], &[]).unwrap_err();
    assert_eq!(
        environment("REDELIVER__KAFKA____LANES"),
        "REDELIVER__KAFKA____LANES: has an empty level; separate levels by two underscores"
    );
    assert_eq!(
        environment("REDELIVER__PIPELINES__A_B__OUTPUT"),
        "pipelines.a_b: is ambiguous: it matches a-b, a.b; set it in the file instead \
         (environment variable REDELIVER__PIPELINES__A_B__OUTPUT)"
    );
    let flag = |key| load("", &[], &[(key, "x")]).unwrap_err();
    assert_eq!(
        flag("kafka..lanes"),
        "kafka..lanes: has an empty level; write a key such as kafka.brokers (--set kafka..lanes)"
    );
    assert!(flag("pipelines.\"a").contains("an opening quote without a closing one"));
    assert!(flag("pipelines.\"a\"b").contains("text after a closing quote"));
    assert!(
        load(
            "",
            &[
                ("REDELIVER_LANES", "x"),
                ("REDELIVERY__KAFKA", "x"),
                ("PATH", "x")
            ],
            &[]
        )
        .is_ok()
    );
}

proptest! {
    #[test]
    fn arbitrary_overrides_do_not_panic(
        keys in proptest::collection::vec(prop_oneof![
            Just("kafka"), Just("lanes"), Just("pipelines"), Just("p"), Just("retry"), Just("tiers"), Just("http"),
            Just("output"), Just("anchor"), Just("properties"), Just("instance"), Just("headers"), Just("x")
        ], 1..5),
        value in prop_oneof![
            Just("{a: {b: c}}".to_owned()), Just("[5s, x]".to_owned()), Just("{file: /nowhere}".to_owned()),
            Just("{pointer: 1}".to_owned()), "[-a-c0-9:{}, \\[\\]'\"&*!]{0,12}"
        ],
    ) {
        let flags = vec![(keys.join("."), value.clone())];
        let _ = <ProgramConfig>::load(&Sources { overrides: flags, ..Sources::default() });
        let variable = (format!("REDELIVER__{}", keys.join("__")), value);
        let _ = <ProgramConfig>::load(&Sources { environment: [variable].into(), ..Sources::default() });
    }

    #[test]
    fn arbitrary_files_do_not_panic(text in "((kafka|pipelines|p|retry|http|output|anchor|url|topics|tiers)?[:{},\\[\\] \n\"'&*!-]{0,3}){0,14}") {
        let _ = Config::from_yaml(&text);
    }
}

#[test]
fn a_worker_may_declare_several_outputs() {
    let config = load("pipelines: { p: { output: [b, a, b] } }", &[], &[]).unwrap();
    let pipeline = config.pipelines["p"].pipeline("p", &config.scheduler);
    assert_eq!(pipeline.output.as_deref(), Some("b"));
    assert_eq!(pipeline.other_outputs, ["a".into()]);
}
