//! Every configuration error names the field, says what is valid, and says where the value comes from.

use redeliver_runtime::config::{ProgramConfig, Sources};

use crate::config::load;

/// Blocks of a file and, after `=> `, its problem. A block that begins with `#` is a heading.
const PROBLEMS: &str = include_str!("config_errors.txt");

#[track_caller]
fn check(file: &str, line: u32, problem: &str) {
    let expected = format!("{problem} (redeliver.yaml line {line})");
    assert_eq!(load(file, &[], &[]).unwrap_err(), expected, "{file}");
}

/// As [`check`], for a section that is written in one line.
#[track_caller]
fn check_section(section: &str, cases: &[(&str, &str)]) {
    for (settings, problem) in cases {
        let file = format!("{section}: {{ {settings} }}");
        check(&file, 1, &format!("{section}.{problem}"));
    }
}

#[track_caller]
fn accepts(files: &[&str]) {
    for file in files {
        if let Err(error) = load(file, &[], &[]) {
            panic!("{file}: {error}");
        }
    }
}

#[test]
fn problems_name_field_and_place() {
    let blocks = PROBLEMS.trim_end().split("\n\n");
    for block in blocks.filter(|block| !block.starts_with('#')) {
        let (file, expected) = block.rsplit_once("\n=> ").expect(block);
        assert_eq!(load(file, &[], &[]).expect_err(file), expected, "{file}");
    }
    assert_eq!(
        load("", &[("REDELIVER__KAFKA__BROKERZ", "x")], &[]).unwrap_err(),
        "kafka.brokerz: unknown key, did you mean `brokers`? (environment variable REDELIVER__KAFKA__BROKERZ)"
    );
    assert_eq!(
        load("", &[], &[("kafak.brokers", "x")]).unwrap_err(),
        "kafak: unknown key, did you mean `kafka`? (--set kafak.brokers)"
    );
}

#[test]
fn valid_settings_are_accepted() {
    accepts(&[
        "admin: { listen: '0.0.0.0:9464', allow_remote: true }",
        // A client without a certificate sees only whether the process is alive and ready.
        "admin: { listen: '0.0.0.0:9464', tls: { cert_file: a, key_file: b, client_ca_file: c } }",
        "scheduler: { listen: '0.0.0.0:50052', tls: { cert_file: a, key_file: b, client_ca_file: c } }",
        // A pipeline may read the results of another one, and outputs may be shared.
        "pipelines: { a: { output: b }, b: { output: z }, c: { output: z } }",
        "pipelines: { z: { output: a }, y: { output: a }, a: {} }",
        // Results may be jobs, and a pipeline may read rejected jobs.
        "pipelines: { a: { output: scheduler.jobs.ingest }, scheduler.jobs.dlq: {} }",
        "pipelines: { retry: {}, retry-soon: {}, retry-5: {}, a-retry: {}, scheduler2: {} }",
        "pipelines: { scheduler: {} }\nscheduler: { group: jobs }",
    ]);
}

#[test]
fn long_names_are_refused() {
    let too_long = load(&format!("pipelines: {{ {}: {{}} }}", "p".repeat(240)), &[], &[]).unwrap_err();
    assert!(
        too_long.contains(" is too long by 1: the name of the topic `ppp"),
        "{too_long}"
    );
}

#[test]
fn api_token_file_is_checked() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    let with = |content: &str| {
        std::fs::write(&path, content).unwrap();
        let file = format!(
            "scheduler: {{ listen: '0.0.0.0:50052', token_file: {} }}",
            path.display()
        );
        load(&file, &[], &[])
    };
    for invalid in ["two words\n", "two\nlines\n", "ümlaut"] {
        let error = with(invalid).unwrap_err();
        assert!(
            error.contains("must contain one line of printable ASCII"),
            "{error}"
        );
    }
    assert!(with("").unwrap_err().contains("is empty"));
    let config = with("s3cret.token\n").unwrap();
    let api = config.scheduler.api();
    let token = api.token("scheduler").unwrap().unwrap();
    assert_eq!(token.expose(), "s3cret.token");
    assert!(!config.to_yaml().contains("s3cret"));
    let without_token = "scheduler: { listen: '0.0.0.0:50052', allow_remote: true }";
    let api = load(without_token, &[], &[]).unwrap().scheduler.api();
    assert_eq!(api.token("x").unwrap(), None);
}

#[test]
fn api_callers_are_checked() {
    let directory = tempfile::tempdir().unwrap();
    let tokens = directory.path().join("tokens");
    std::fs::write(
        &tokens,
        "tokens: [{ name: a, sha256: s3cret, scopes: [jobs:read] }]",
    )
    .unwrap();
    let tokens_file = format!("auth: {{ tokens_file: {} }}", tokens.display());
    let invalid = format!(
        "auth.tokens_file: {path} is not valid: tokens[0].sha256: is not the SHA-256 of a token: write 64 hexadecimal digits, as \
         `redeliver tokens new` prints them ({path} line 1)",
        path = tokens.display()
    );
    let jwt = |keys: &str| format!("auth: {{ jwt: {{ issuer: i, audience: a, {keys} }} }}");
    let plain = jwt("jwks_url: 'http://issuer/keys'");
    let both = jwt("jwks_url: 'https://issuer/keys', jwks_file: /nowhere");
    let missing = jwt("jwks_file: /nowhere/keys");
    let neither = jwt("");
    let roles = jwt("jwks_url: 'https://issuer/keys', roles: { admin: [] }");
    let certificates = |entry: &str| {
        format!(
            "tls: {{ cert_file: a, key_file: b, client_ca_file: c }}, auth: {{ client_certificates: [{entry}] }}"
        )
    };
    let (two, scope) = (
        certificates("{ cn: a, dns: b, scopes: [jobs:read] }"),
        certificates("{ cn: a, scopes: [job:read] }"),
    );
    check_section(
        "scheduler",
        &[
            (&tokens_file, &invalid),
            (&neither, "auth.jwt.jwks_url: is missing; set it, or jwks_file"),
            (
                &both,
                "auth.jwt.jwks_url: cannot be combined with jwks_file; set one of the two",
            ),
            (
                &plain,
                "auth.jwt.jwks_url: must begin with https://, because an attacker who replaces the keys can issue tokens",
            ),
            (
                &missing,
                "auth.jwt.jwks_file: cannot read /nowhere/keys: No such file or directory (os error 2)",
            ),
            (
                &roles,
                "auth.jwt.roles.admin: scopes is empty; list at least one, such as jobs:read",
            ),
            (
                &two,
                "auth.client_certificates: entry 1: set exactly one of cn, dns and uri",
            ),
            (
                &scope,
                "auth.client_certificates[0].scopes[0]: `job:read` is not a scope: `job` is not jobs, control, dead-letters or audit; write \
                 AREA:VERB or AREA:VERB:PATTERN, such as jobs:read or jobs:write:billing-*, or * for everything",
            ),
        ],
    );
    std::fs::write(&tokens, "tokens: []").unwrap();
    let remote = format!("scheduler: {{ listen: '0.0.0.0:1', {tokens_file} }}");
    let jwt = jwt("jwks_url: 'https://issuer/keys'");
    let remote_jwt = format!("scheduler: {{ listen: '0.0.0.0:1', {jwt} }}");
    accepts(&[
        &remote,
        &remote_jwt,
        &format!(
            "scheduler: {{ {} }}",
            certificates("{ cn: a, scopes: [jobs:read] }")
        ),
    ]);
}

#[test]
fn retired_source_may_be_reused() {
    // Another pipeline may have taken over the source.
    let config = load(
        "pipelines: { b: { source: a } }\nretired: { a: { return_to: source } }",
        &[],
        &[],
    )
    .unwrap();
    let pipeline = config.retired["a"].pipeline("a", &config.scheduler);
    assert!(pipeline.retired && !config.pipelines["b"].pipeline("b", &config.scheduler).retired);
    assert_eq!(&*pipeline.return_topic(), "a-retry-due");
    let all: Vec<&str> = config.all_pipelines().map(|(name, _)| name).collect();
    assert_eq!(all, ["b", "a"]);
}

#[test]
fn all_problems_are_reported_at_once() {
    let problems = |file: &str| load(file, &[], &[]).unwrap_err();
    assert_eq!(
        problems(
            "kafka:\n  lanes: x\n  brokerz: y\npipelines:\n  p:\n    http:\n      url: [1]\n      timeout: 5\n"
        ),
        "the configuration has 4 problems\
         \n  kafka.lanes: `x` is not a whole number (redeliver.yaml line 2)\
         \n  kafka.brokerz: unknown key, did you mean `brokers`? (redeliver.yaml line 3)\
         \n  pipelines.p.http.url: is a list; expected a string (redeliver.yaml line 7)\
         \n  pipelines.p.http.timeout: `5` is not a duration: write a whole number and a unit, such as 500ms, 5s, 2m, \
         1h or 7d (redeliver.yaml line 8)",
    );
    assert_eq!(
        problems("pipelines: { 'a b': {} }"),
        "the configuration has 2 problems\
         \n  pipelines.a b.source: `a b` is not a valid topic name: use 1 to 249 of the characters a-z, A-Z, 0-9, `.`, \
         `_` and `-` (redeliver.yaml line 1)\
         \n  pipelines.a b: is not a valid pipeline name, because topics are named after it: use 1 to 249 of the \
         characters a-z, A-Z, 0-9, `.`, `_` and `-` (redeliver.yaml line 1)",
    );
    // The text of a variable is read as a whole, so only its first problem is reported.
    let inline = load("", &[("REDELIVER__KAFKA", "{lanes: x, brokerz: y}")], &[]).unwrap_err();
    assert_eq!(
        inline,
        "kafka.lanes: `x` is not a whole number (environment variable REDELIVER__KAFKA)"
    );
}

#[test]
fn unreadable_files_are_named() {
    let sources = Sources {
        file: Some("/nowhere/redeliver.yaml".into()),
        ..Sources::default()
    };
    let error = <ProgramConfig>::load(&sources).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot read the configuration file /nowhere/redeliver.yaml"
    );
    assert!(std::error::Error::source(&error).is_some());
    for (file, expected) in [
        (
            "kafka: [\n",
            "redeliver.yaml line 1: invalid YAML: unclosed bracket '['",
        ),
        (
            "kafka: { lanes: 1 }\nkafka: { lanes: 2 }",
            "redeliver.yaml line 2: duplicate key `kafka`",
        ),
    ] {
        assert_eq!(load(file, &[], &[]).unwrap_err(), expected);
    }
}
