//! The sections of single programs, and all sections together.

#![expect(
    clippy::disallowed_types,
    reason = "what Redeliver has written, which the tests compare"
)]

mod default_file;

use redeliver_runtime::config::Sources;

use super::Config;

/// Blocks of a file and, after `=> `, its problem. A block that begins with `#` is a heading.
const PROBLEMS: &str = include_str!("tests/errors.txt");

/// Loads a file, overridden by variables. Errors show its name without the directory.
fn load(file: &str, environment: &[(&str, &str)]) -> Result<Config, String> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("redeliver.yaml");
    std::fs::write(&path, file).unwrap();
    let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    let sources = Sources {
        file: Some(path),
        environment: environment.iter().map(owned).collect(),
        overrides: Vec::new(),
    };
    let folder = format!("{}/", directory.path().display());
    Config::load(&sources).map_err(|error| error.to_string().replace(&folder, ""))
}

#[test]
fn problems_name_field_and_place() {
    let blocks = PROBLEMS.trim_end().split("\n\n");
    for block in blocks.filter(|block| !block.starts_with('#')) {
        let (file, expected) = block.rsplit_once("\n=> ").expect(block);
        assert_eq!(load(file, &[]).expect_err(file), expected, "{file}");
    }
}

#[test]
fn valid_settings_are_accepted() {
    for file in [
        "dlq_inspector: { json_fields: [/order/id, '/a~1b', '/'] }",
        "dlq_inspector: { topics: ['dlq.*'], share_group_sources: { dlq.orders: [orders, payments.v1] } }",
        "dlq_inspector: { schema_registry: { url: 'http://registry:8081/apis/ccompat/v7' } }",
        "dlq_inspector: { schema_registry: { url: 'https://registry', username: me, password_file: Cargo.toml } }",
        "dlq_inspector: { auth: { jwt: { issuer: i, audience: a, jwks_url: 'https://idp/keys' } }, masking: [{ topics: ['*'], key: true, fields: ['/a/*/**/b~1'], headers: ['x-*'], messages: ['[0-9]{16}'] }] }",
        "pipelines: { crawl: { retry: { tiers: [5s, 1m] } } }\nretry_tier: { tiers: [5s, 2m], leftovers: true }",
    ] {
        if let Err(error) = load(file, &[]) {
            panic!("{file}: {error}");
        }
    }
}

#[test]
fn long_lists_are_refused() {
    let many: Vec<String> = (0..33).map(|number| format!("/{number}")).collect();
    let many = format!("json_fields: [{}]", many.join(", "));
    let fields = vec!["/a"; 64].join(", ");
    let rules = vec![format!("{{ topics: ['*'], fields: [{fields}] }}"); 8].join(", ");
    let masking = format!(
        "auth: {{ jwt: {{ issuer: i, audience: a, jwks_url: 'https://idp/keys' }} }}, masking: [{rules}]"
    );
    for (settings, problem) in [
        (many, "json_fields: lists 33 fields; the limit is 32"),
        (masking, "masking: has 512 paths in fields; the limit is 500"),
    ] {
        let error = load(&format!("dlq_inspector: {{ {settings} }}"), &[]).unwrap_err();
        assert_eq!(error, format!("dlq_inspector.{problem} (redeliver.yaml line 1)"));
    }
}

#[test]
fn each_service_selects_its_pipelines() {
    let file = "pipelines: { a: { http: { url: 'http://h' } }, b: {}, c: { http: { url: 'http://h' } } }\n";
    let served = |environment: &[(&str, &str)]| {
        let config = load(file, environment).unwrap();
        let names = |pipelines: Vec<(&str, &_)>| pipelines.iter().map(|(name, _)| *name).collect::<String>();
        (
            names(config.own.enricher.of(&config, true)),
            names(config.own.worker.of(&config, false)),
        )
    };
    assert_eq!(served(&[]), ("ac".to_owned(), "b".to_owned()));
    let selected = [
        ("REDELIVER__ENRICHER__PIPELINES", "c"),
        ("REDELIVER__WORKER__PIPELINES", "a,b"),
    ];
    assert_eq!(served(&selected), ("c".to_owned(), "ab".to_owned()));
}

#[test]
fn redis_prefix_and_ca_are_read() {
    for scheme in ["rediss", "rediss-cluster", "rediss-sentinel"] {
        let file = format!("redis: {{ url: '{scheme}://localhost:6379', ca_file: ca.pem }}");
        let config = load(&file, &[]).unwrap();
        assert_eq!(config.own.redis.ca_file, Some("ca.pem".into()));
    }
    let environment = [("REDELIVER__REDIS__PREFIX", "team:jobs")];
    let config = load("", &environment).unwrap();
    assert_eq!(config.own.redis.prefix(&config.kafka, "cluster"), "team:jobs");
    for (file, expected) in [
        ("", "redeliver:cluster"),
        ("kafka: { id_prefix: staging- }", "staging-redeliver:cluster"),
    ] {
        let config = load(file, &[]).unwrap();
        assert_eq!(config.own.redis.prefix(&config.kafka, "cluster"), expected);
    }
}
