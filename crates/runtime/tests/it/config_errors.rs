//! Every configuration error names the field, says what is valid, and says where the value comes from.

use redeliver_runtime::config::{Config, Sources};

use crate::config::{EXAMPLE, load};

/// Loads files and compares the problem, which is in the given line.
#[track_caller]
fn check(cases: &[(&str, u32, &str)]) {
    for (file, line, problem) in cases {
        let expected = format!("{problem} (redeliver.yaml line {line})");
        assert_eq!(load(file, &[], &[]).unwrap_err(), expected, "{file}");
    }
}

/// As [`check`], for a section that is written in one line.
#[track_caller]
fn check_section(section: &str, cases: &[(&str, &str)]) {
    for (settings, problem) in cases {
        let file = format!("{section}: {{ {settings} }}");
        check(&[(&file, 1, &format!("{section}.{problem}"))]);
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
fn unknown_keys_name_their_path_and_the_most_similar_key() {
    check(&[
        (
            "kafka: { brokerz: x }",
            1,
            "kafka.brokerz: unknown key, did you mean `brokers`?",
        ),
        (
            "pipelines:\n  crawl-jobs:\n    retry:\n      max-retries: 3",
            4,
            "pipelines.crawl-jobs.retry.max-retries: unknown key, did you mean `max_retries`?",
        ),
        (
            "shutdown: { patience: 5s }",
            1,
            "shutdown.patience: unknown key; expected one of grace",
        ),
        (
            "pipelines: { p: { output: { pointer: /a, topic: {}, default: d } } }",
            1,
            "pipelines.p.output.topic: unknown key, did you mean `topics`?",
        ),
    ]);
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
fn values_of_the_wrong_type_are_rejected() {
    check(&[
        (
            "pipelines: { crawl-jobs: { http: { url: 'http://h', timeout: 5 } } }",
            1,
            "pipelines.crawl-jobs.http.timeout: `5` is not a duration: write a whole number and a unit, such as \
             500ms, 5s, 2m, 1h or 7d",
        ),
        (
            "pipelines: { p: { retry: { tiers: [5s, 30] } } }",
            1,
            "pipelines.p.retry.tiers[1]: `30` is not a duration: write a whole number and a unit, such as 500ms, \
             5s, 2m, 1h or 7d",
        ),
        (
            "kafka: { lanes: many }",
            1,
            "kafka.lanes: `many` is not a whole number",
        ),
        (
            "kafka: { lanes: -1 }",
            1,
            "kafka.lanes: -1 is out of range: must be between 0 and 4294967295",
        ),
        (
            "kafka: { lanes: }",
            1,
            "kafka.lanes: has no value; expected a whole number",
        ),
        (
            "redis: { high_water: nan }",
            1,
            "redis.high_water: `nan` is not a number",
        ),
        (
            "kafka: localhost",
            1,
            "kafka: is a string; expected a mapping of keys to values",
        ),
        (
            "retry_tier: { tiers: 5s }",
            1,
            "retry_tier.tiers: `5s` is not a list such as [a, b]",
        ),
        (
            "admin: { allow_remote: yes }",
            1,
            "admin.allow_remote: `yes` is not true or false",
        ),
        (
            "admin: { listen: 9464 }",
            1,
            "admin.listen: `9464` is not an address: write an IP address and a port, such as 127.0.0.1:9464",
        ),
        (
            "telemetry: { log: xml }",
            1,
            "telemetry.log: `xml` is not one of text, json",
        ),
        (
            "pipelines: { p: { anchor: yesterday } }",
            1,
            "pipelines.p.anchor: `yesterday` is not one of failure, record_timestamp, pointer",
        ),
        (
            "pipelines: { p: { anchor: pointer } }",
            1,
            "pipelines.p.anchor.pointer: has no value; write it as the key of a mapping",
        ),
        (
            "pipelines: { p: { anchor: { failure: x } } }",
            1,
            "pipelines.p.anchor.failure: takes no value; write only the name",
        ),
        (
            "pipelines: { p: { anchor: [failure] } }",
            1,
            "pipelines.p.anchor: is a list; expected one of failure, record_timestamp, pointer",
        ),
        (
            "pipelines: { p: { http: { url: 'http://h', classification: { 99: success } } } }",
            1,
            "pipelines.p.http.classification.99: `99` is not an HTTP status: write a number from 100 to 599",
        ),
        (
            "pipelines: { p: { http: {} } }",
            1,
            "pipelines.p.http.url: is missing",
        ),
        (
            "kafka: { properties: { sasl.password: [hunter2] } }",
            1,
            "kafka.properties.sasl.password: is a list; expected a string, a number, true, false or { file: PATH }",
        ),
        (
            "kafka: { properties: { sasl.password: { path: a } } }",
            1,
            "kafka.properties.sasl.password: unknown key `path`; expected { file: PATH }",
        ),
        (
            "kafka: { properties: { sasl.password: {} } }",
            1,
            "kafka.properties.sasl.password: is an empty mapping; expected a string or { file: PATH }",
        ),
        (
            "[1, 2]",
            1,
            "the configuration is a list; expected a mapping of keys to values",
        ),
    ]);
}

#[test]
fn values_out_of_range_are_rejected() {
    let range = |section: &str, cases: &[(&str, &str, &str)]| {
        for (key, value, range) in cases {
            let problem = format!("{key}: {value} is out of range: must be between {range}");
            check_section(section, &[(&format!("{key}: {value}"), &problem)]);
        }
    };
    range(
        "kafka",
        &[
            ("lanes", "65", "1 and 64"),
            ("batch", "0", "1 and 100000"),
            ("session_timeout", "1s", "6s and 30m"),
            ("transaction_timeout", "20m", "1s and 15m"),
        ],
    );
    range(
        "retry_tier",
        &[
            ("look_ahead", "1", "16 and 16384"),
            ("look_ahead_bytes", "1", "65536 and 1073741824"),
        ],
    );
    range("redis", &[("high_water", "2", "0.1 and 1")]);
    range("shutdown", &[("grace", "2h", "0s and 1h")]);
    range(
        "clock",
        &[
            ("max_step", "99ms", "100ms and 1h"),
            ("max_step", "2h", "100ms and 1h"),
            ("confirm", "999ms", "1s and 1h"),
            ("confirm", "2h", "1s and 1h"),
        ],
    );
    range(
        "scheduler",
        &[
            ("max_ahead", "99999d", "1s and 36500d"),
            ("max_data", "7", "1000 and 100000000"),
            ("idempotency_window", "0s", "1s and 3650d"),
            ("keep_ended", "500ms", "1s and 3650d"),
            ("max_ended", "99", "100 and 10000000"),
            ("window", "1h", "100ms and 10m"),
            ("window_bytes", "1", "1048576 and 68719476736"),
        ],
    );
    let nested = |section: &str, others: &str, cases: &[(&str, &str, &str)]| {
        for (key, value, range) in cases {
            let keys = section.split('.').collect::<Vec<_>>().join(": { ");
            let file = format!(
                "{keys}: {{ {others}{key}: {value} {}",
                "}".repeat(section.split('.').count())
            );
            let problem = format!("{section}.{key}: {value} is out of range: must be between {range}");
            check(&[(&file, 1, &problem)]);
        }
    };
    nested(
        "kafka.topics",
        "",
        &[
            ("partitions", "0", "1 and 10000"),
            ("replication", "101", "1 and 100"),
            ("retention", "1s", "1m and 3660d"),
            ("dead_letter_retention", "1s", "1m and 3660d"),
            ("missing_timeout", "8d", "1s and 7d"),
        ],
    );
    nested("telemetry.otlp", "", &[("sample_ratio", "1.5", "0 and 1")]);
    nested(
        "pipelines.p",
        "",
        &[
            ("max_wait", "400d", "1ms and 366d"),
            ("max_age", "400d", "1ms and 366d"),
            ("in_flight", "20001", "1 and 20000"),
            ("in_flight_bytes", "1", "1048576 and 68719476736"),
        ],
    );
    nested(
        "pipelines.p.http",
        "url: 'http://h', ",
        &[
            ("timeout", "2h", "1ms and 1h"),
            ("connect_timeout", "2h", "1ms and 1h"),
            ("concurrency", "0", "1 and 10000"),
            ("quick_retries", "6", "0 and 5"),
            ("max_response_bytes", "0", "1 and 1073741824"),
            ("max_retry_after", "1ms", "1s and 366d"),
        ],
    );
}

#[test]
fn invalid_settings_of_a_process_are_rejected() {
    check(&[
        (
            "instance: 'a b'",
            1,
            "instance: `a b` is not a valid instance name: use 1 to 100 of the characters a-z, A-Z, 0-9, `.`, `_` and \
             `-`",
        ),
        (
            "kafka: { brokers: 'a:1,b' }",
            1,
            "kafka.brokers: `b` is not a broker address: write host:port, such as localhost:9092",
        ),
        (
            "kafka: { id_prefix: 'my staging/' }",
            1,
            "kafka.id_prefix: `my staging/` is not a valid prefix of ids: use up to 64 of the characters a-z, A-Z, 0-9, `.`, `_` and `-`",
        ),
        (
            "kafka: { properties: { bootstrap.servers: x } }",
            1,
            "kafka.properties.bootstrap.servers: cannot be set here; set kafka.brokers instead",
        ),
        (
            "kafka: { login: {} }",
            1,
            "kafka.login.oidc: is missing, and so is msk_iam; kafka.login needs one of them to know where tokens come from",
        ),
        (
            "kafka: { login: { msk_iam: {}, oidc: { token_url: 'https://i', client_id: a, client_secret: b } } }",
            1,
            "kafka.login.msk_iam: cannot be set together with kafka.login.oidc; remove one of them",
        ),
        (
            "kafka: { login: { msk_iam: { region: Frankfurt } } }",
            1,
            "kafka.login.msk_iam.region: is not the name of an AWS region, such as eu-central-1",
        ),
        (
            "kafka: { brokers: 'b-1.a.b.c2.kafka.eu-central-1.amazonaws.com:9098', login: { msk_iam: { region: eu-west-1 } } }",
            1,
            "kafka.login.msk_iam.region: is eu-west-1, but kafka.brokers are in eu-central-1; correct or omit it",
        ),
        (
            "kafka: { login: { msk_iam: { profile: '' } } }",
            1,
            "kafka.login.msk_iam.profile: is empty; omit it to use AWS's default credentials",
        ),
        (
            "kafka: { login: { msk_iam: { role_arn: redeliver } } }",
            1,
            "kafka.login.msk_iam.role_arn: is not the ARN of a role, such as arn:aws:iam::123456789012:role/redeliver",
        ),
        (
            "kafka: { login: { msk_iam: { external_id: abc } } }",
            1,
            "kafka.login.msk_iam.external_id: needs kafka.login.msk_iam.role_arn, the role that is assumed",
        ),
        (
            "kafka: { login: { msk_iam: { role_session_name: 'a b' } } }",
            1,
            "kafka.login.msk_iam.role_session_name: must have 2 to 64 of the characters a-z, A-Z, 0-9, `_`, `+`, `=`, `,`, `.`, \
             `@` and `-`",
        ),
        (
            "kafka: { login: { oidc: { token_url: issuer, client_id: a, client_secret: b } } }",
            1,
            "kafka.login.oidc.token_url: is not a URL (relative URL without a base): write http:// or https:// and a host, such \
             as http://localhost:8080/path",
        ),
        (
            "kafka: { login: { oidc: { token_url: 'http://issuer/token', client_id: a, client_secret: b } } }",
            1,
            "kafka.login.oidc.token_url: must begin with https://, because the client secret and the tokens are sent over this \
             connection",
        ),
        (
            "kafka: { login: { oidc: { token_url: 'https://i', client_id: '', client_secret: b } } }",
            1,
            "kafka.login.oidc.client_id: is empty",
        ),
        (
            "kafka: { login: { oidc: { token_url: 'https://i', client_id: a, client_secret: b, parameters: { scope: c } } } }",
            1,
            "kafka.login.oidc.parameters.scope: cannot be set here: set kafka.login.oidc.scope instead",
        ),
        (
            "kafka: { login: { oidc: { token_url: 'https://i', client_id: a, client_secret: b, extensions: { auth: c } } } }",
            1,
            "kafka.login.oidc.extensions.auth: is not the name of a SASL extension: use the letters a-z and A-Z, and not `auth`",
        ),
        (
            "kafka:\n  login: { oidc: { token_url: 'https://i', client_id: a, client_secret: b } }\n  properties: { sasl.username: c }",
            3,
            "kafka.properties.sasl.username: cannot be set together with kafka.login, which logs in by itself",
        ),
        (
            "kafka:\n  login: { oidc: { token_url: 'https://i', client_id: a, client_secret: b } }\n  properties: { security.protocol: SSL }",
            3,
            "kafka.properties.security.protocol: must be SASL_SSL or SASL_PLAINTEXT, or be omitted, with kafka.login",
        ),
        (
            "kafka: { properties: { delivery.timeout.ms: 1000 } }",
            1,
            "kafka.properties.delivery.timeout.ms: cannot be set here; set kafka.transaction_timeout instead",
        ),
        (
            "kafka: { properties: { linger.ms: 5000 } }",
            1,
            "kafka.properties.linger.ms: 5000 is out of range: must be between 0 and 1000",
        ),
        (
            "kafka: { properties: { topic.linger.ms: -1 } }",
            1,
            "kafka.properties.topic.linger.ms: -1 is out of range: must be between 0 and 1000",
        ),
        (
            "kafka: { properties: { request.required.acks: 1 } }",
            1,
            "kafka.properties.request.required.acks: cannot be set; Redeliver relies on its value",
        ),
        (
            "kafka: { properties: { topic.auto.offset.reset: latest } }",
            1,
            "kafka.properties.topic.auto.offset.reset: cannot be set; Redeliver relies on its value",
        ),
        (
            "kafka: { topics: { create: true, retention: 1h } }\npipelines: { p: { retry: { tiers: [45m] } } }",
            1,
            "kafka.topics.retention: 1h is too short for the tier 45m: must be at least twice as long as the longest \
             tier",
        ),
        (
            "telemetry: { level: 'my=loud' }",
            1,
            "telemetry.level: `my=loud` is not a log level: write error, warn, info, debug or trace, or directives \
             such as info,redeliver_kafka=debug",
        ),
        (
            "admin: { listen: '0.0.0.0:9464' }",
            1,
            "admin.listen: 0.0.0.0:9464 is reachable from other machines without authentication: listen on 127.0.0.1, \
             set tls.client_ca_file, or set allow_remote: true",
        ),
    ]);
    accepts(&[
        "admin: { listen: '0.0.0.0:9464', allow_remote: true }",
        // Whoever has no certificate sees only whether the process is alive and ready.
        "admin: { listen: '0.0.0.0:9464', tls: { cert_file: a, key_file: b, client_ca_file: c } }",
    ]);
}

#[test]
fn half_set_tls_of_a_listener_is_rejected() {
    for section in ["admin", "scheduler", "dlq_inspector"] {
        check_section(
            section,
            &[
                ("tls: { cert_file: a }", "tls.cert_file: requires key_file"),
                ("tls: { key_file: a }", "tls.key_file: requires cert_file"),
                (
                    "tls: { client_ca_file: a }",
                    "tls.client_ca_file: requires cert_file and key_file",
                ),
            ],
        );
    }
    accepts(&[
        "scheduler: { listen: '0.0.0.0:50052', tls: { cert_file: a, key_file: b, client_ca_file: c } }",
    ]);
}

#[test]
fn invalid_settings_of_a_pipeline_are_rejected() {
    check(&[
        (
            "pipelines:\n  p:\n    retry:\n      tiers: [5s]\n      base: 2m",
            5,
            "pipelines.p.retry.base: cannot be combined with retry.tiers; set either tiers, or base with factor and \
             cap",
        ),
        (
            "pipelines: { p: { retry: { factor: 3 } } }",
            1,
            "pipelines.p.retry.factor: requires retry.base, such as 2m",
        ),
        (
            "pipelines: { p: { retry: { tiers: [30s, 5s] } } }",
            1,
            "pipelines.p.retry.tiers: 30s is listed before 5s; delays must be in ascending order",
        ),
        (
            "pipelines: { p: { retry: { tiers: [2d] } } }",
            1,
            "pipelines.p.max_wait: 1d is shorter than the longest retry delay: must be at least 2d",
        ),
        (
            "pipelines: { p: { key_blocking: 1s } }",
            1,
            "pipelines.p.key_blocking: has no effect without an order: write `ordering: key` or `ordering: partition`",
        ),
        (
            "pipelines: { p: { ordering: key, key_blocking: 2h } }",
            1,
            "pipelines.p.key_blocking: 2h is out of range: must be between 100ms and 1h",
        ),
        (
            "pipelines: { p: { limit_by: { pointer: tenant, concurrency: 1 } } }",
            1,
            "pipelines.p.limit_by.pointer: `tenant` is not a JSON pointer: write the path of a field, such as /meta/queue",
        ),
        (
            "pipelines: { p: { limit_by: { header: a, pointer: /b, concurrency: 1 } } }",
            1,
            "pipelines.p.limit_by.pointer: cannot be combined with `header`: write one of them",
        ),
        (
            "pipelines: { p: { attempt_timeout: 1s, http: { url: 'http://h' } } }",
            1,
            "pipelines.p.attempt_timeout: applies to custom handlers only; with `http`, write `http.timeout`",
        ),
        (
            "pipelines: { p: { concurrency: 2, http: { url: 'http://h' } } }",
            1,
            "pipelines.p.concurrency: applies to custom handlers only; with `http`, write `http.concurrency`",
        ),
        (
            "pipelines: { p: { rate_limit: { attempts: 1, per: 1d, burst: 366 } } }",
            1,
            "pipelines.p.rate_limit.burst: has as many attempts as the limit allows in over 365d: write fewer",
        ),
        (
            "pipelines: { p: { rate_limit: { attempts: 0 } } }",
            1,
            "pipelines.p.rate_limit.attempts: 0 is out of range: must be between 1 and 1000000",
        ),
        (
            "pipelines: { p: { output: { by: status, topics: { 20x: a, 204: null }, default: b }, http: { url: 'http://h' } } }",
            1,
            "pipelines.p.output.topics.20x: is not a status: write a number from 100 to 599",
        ),
        (
            "pipelines: { p: { output: { by: response, topics: { a: b }, default: null }, http: { url: 'http://h' } } }",
            1,
            "pipelines.p.output.pointer: is missing: write the path of a field, such as /meta/queue",
        ),
        (
            "pipelines: { p: { output: { pointer: /a, topics: { a: null }, default: null }, http: { url: 'http://h' } } }",
            1,
            "pipelines.p.output.topics: names no topic; to drop all results, omit `output`",
        ),
        (
            "pipelines: { p: { http: { url: 'http://h', response: { merge: a } } } }",
            1,
            "pipelines.p.http.response.merge: `a` is not a JSON pointer: write the path of a field, such as /meta/queue",
        ),
        (
            "pipelines: { p: { concurrency: 20, in_flight: 10 } }",
            1,
            "pipelines.p.concurrency: 20 is more than in_flight: must be at most 10",
        ),
        (
            "pipelines: { p: { schema: [1] } }",
            1,
            "pipelines.p.schema: must be the path of a file, or a JSON Schema: an object",
        ),
        (
            "pipelines: { p: { long_waits: scheduler, max_wait: 30d } }\nscheduler: { max_ahead: 7d }",
            1,
            "pipelines.p.max_wait: 30d is longer than scheduler.max_ahead: must be at most 7d",
        ),
        (
            "pipelines: { p: { anchor: { pointer: a } } }",
            1,
            "pipelines.p.anchor.pointer: `a` is not a JSON pointer: write the path of a field, such as /meta/queue",
        ),
        (
            "pipelines: { p: { output: [] } }",
            1,
            "pipelines.p.output: is empty; list at least one topic",
        ),
        (
            "pipelines: { p: { output: { pointer: /a, topics: {}, default: d }, http: { url: 'http://h' } } }",
            1,
            "pipelines.p.output.topics: is empty; list at least one value with its topic",
        ),
        (
            "pipelines: { p: { output: { pointer: /a, topics: { a: b }, default: null } } }",
            1,
            "pipelines.p.output: is chosen by a document or a status, which needs `http`; without it, the handler chooses: write \
             one topic or a list of topics",
        ),
        (
            "pipelines: { p: { output: [a, b], http: { url: 'http://h' } } }",
            1,
            "pipelines.p.output: is a list, from which only a custom handler can choose; with `http`, write one topic \
             or { by, pointer, topics, default }",
        ),
    ]);
}

#[test]
fn requests_that_cannot_be_sent_are_rejected() {
    for (http, problem) in [
        (
            "url: 'http://h', headers: { content-length: '1' }",
            "headers.content-length: is set by Redeliver and cannot be configured",
        ),
        (
            "url: 'http://h', headers: { Idempotency-Key: '1' }",
            "headers.Idempotency-Key: is set by Redeliver and cannot be configured",
        ),
        (
            "url: 'http://h', headers: { 'a b': '1' }",
            "headers.a b: is not a valid HTTP header name",
        ),
        (
            r#"url: 'http://h', headers: { a: "hunter2\nhunter2" }"#,
            "headers.a: is not a valid HTTP header value: write one line of text",
        ),
        (
            "url: 'http://h', headers: { a: b }, header_files: { A: c }",
            "header_files.A: is also set under headers; set it once",
        ),
        (
            "url: 'http://h', method: CONNECT",
            "method: `CONNECT` is not a supported method: write POST, PUT or another method in upper case",
        ),
        (
            "url: 'http://h:99999/'",
            "url: is not a URL (invalid port number): write http:// or https:// and a host, such as \
             http://localhost:8080/path",
        ),
        (
            "url: 'ftp://h'",
            "url: is not an HTTP URL: write http:// or https:// and a host, such as http://localhost:8080/path",
        ),
        (
            "url: 'http://me:pw@h'",
            "url: contains a user name or password; set the header `authorization` instead",
        ),
        (
            "url: 'http://h', concurrency: 4097",
            "concurrency: 4097 is more than in_flight: must be at most 4096",
        ),
        (
            "url: 'http://h', batch: { records: 10, wait: 2m }",
            "batch.wait: 2m is out of range: must be between 0s and 1m",
        ),
        (
            "url: 'http://h', batch: { records: 0 }",
            "batch.records: 0 is out of range: must be between 1 and 10000",
        ),
        (
            "url: 'http://h', method: DELETE, batch: { records: 10 }",
            "batch: needs a method with a body, such as POST; method is DELETE",
        ),
        (
            "url: 'http://h', connections: { max_age: 999ms }",
            "connections.max_age: 999ms is out of range: must be between 1s and 1d",
        ),
        (
            "url: 'http://h', headers: { Host: a }, connections: { version: auto }",
            "connections.version: must be http1, because the header `host` is configured",
        ),
        (
            "url: 'http://h', connections: { idle_timeout: 2d }",
            "connections.idle_timeout: 2d is out of range: must be between 1ms and 1d",
        ),
        (
            "url: 'http://h', connections: { proxy: 'socks5://me:pw@h' }",
            "connections.proxy: is not an HTTP URL: write none, or the URL of an HTTP proxy, such as \
             http://proxy.example:3128",
        ),
        (
            "url: 'http://h', batch: { records: 1000 }, concurrency: 5",
            "concurrency: 5000 records in calls, with batches of 1000, are more than in_flight (4096): must be at most 4, with \
             smaller batches or a larger in_flight",
        ),
        (
            "url: 'http://h', tls: { cert_file: a }",
            "tls.cert_file: requires key_file",
        ),
        (
            "url: 'http://h', tls: { key_file: a }",
            "tls.key_file: requires cert_file",
        ),
    ] {
        let file = format!("pipelines: {{ p: {{ http: {{ {http} }} }} }}");
        check(&[(&file, 1, &format!("pipelines.p.http.{problem}"))]);
    }
}

#[test]
fn json_fields_are_pointers() {
    check_section(
        "dlq_inspector",
        &[
            (
                "json_fields: [order.id]",
                "json_fields: `order.id` is not a JSON pointer: write the path of a field, such as /meta/queue",
            ),
            (
                "json_fields: ['/a~2']",
                "json_fields: `/a~2` is not a JSON pointer: write the path of a field, such as /meta/queue",
            ),
            ("json_fields: [/a, /b, /a]", "json_fields: lists /a twice"),
        ],
    );
    let many: Vec<String> = (0..33).map(|number| format!("/{number}")).collect();
    let many = format!("json_fields: [{}]", many.join(", "));
    check_section(
        "dlq_inspector",
        &[(&many, "json_fields: lists 33 fields; the limit is 32")],
    );
    let valid = "dlq_inspector: { json_fields: [/order/id, '/a~1b', '/'] }";
    assert!(load(valid, &[], &[]).is_ok());
}

#[test]
fn masking_rules_are_checked() {
    check_section(
        "dlq_inspector",
        &[
            (
                "masking: [{ topics: ['*'], key: true }]",
                "masking: hides nothing, because every caller has all scopes; set dlq_inspector.auth",
            ),
            (
                "auth: { jwt: { issuer: i, audience: a, jwks_url: 'https://idp/keys' } }, masking: [{ topics: ['*'] }]",
                "masking: rule 1: masks nothing; set at least one of key, fields, headers and messages",
            ),
            (
                "auth: { jwt: { issuer: i, audience: a, jwks_url: 'https://idp/keys' } }, masking: [{ topics: [], key: true }]",
                "masking: rule 1: topics is empty; write [\"*\"] for all dead-letter topics",
            ),
            (
                "auth: { jwt: { issuer: i, audience: a, jwks_url: 'https://idp/keys' } }, masking: [{ topics: ['a b'], key: true }]",
                "masking: rule 1: topics: `a b` is not a topic name or a pattern such as *-dlq",
            ),
            (
                "auth: { jwt: { issuer: i, audience: a, jwks_url: 'https://idp/keys' } }, masking: [{ topics: ['*'], fields: [card] }]",
                "masking[0].fields[0]: `card` is not a JSON pointer: write the path of a field, such as /meta/queue",
            ),
            (
                "auth: { jwt: { issuer: i, audience: a, jwks_url: 'https://idp/keys' } }, masking: [{ topics: ['*'], messages: ['a*'] }]",
                "masking[0].messages[0]: `a*` matches the empty text, so that it would match everywhere; use + instead of *",
            ),
            (
                "auth: { jwt: { issuer: i, audience: a, jwks_url: 'https://idp/keys' } }, masking: [{ topics: ['*'], headers: [''] }]",
                "masking: rule 1: headers: the pattern of a name has 1 to 512 bytes",
            ),
        ],
    );
    let valid = "dlq_inspector: { auth: { jwt: { issuer: i, audience: a, jwks_url: 'https://idp/keys' } }, masking: [{ topics: ['*'], key: true, fields: ['/a/*/**/b~1'], headers: ['x-*'], messages: ['[0-9]{16}'] }] }";
    assert!(load(valid, &[], &[]).is_ok());
    let fields = vec!["/a"; 64].join(", ");
    let rule = format!("{{ topics: ['*'], fields: [{fields}] }}");
    let many = format!(
        "dlq_inspector: {{ auth: {{ jwt: {{ issuer: i, audience: a, jwks_url: 'https://idp/keys' }} }}, masking: [{}] }}",
        vec![rule; 8].join(", ")
    );
    check(&[(
        &many,
        1,
        "dlq_inspector.masking: has 512 paths in fields; the limit is 500",
    )]);
}

#[test]
fn the_schema_registry_is_checked() {
    check_section(
        "dlq_inspector",
        &[
            (
                "schema_registry: { url: 'registry:8081' }",
                "schema_registry.url: is not an HTTP URL: write http:// or https:// and a host, such as http://localhost:8080/path",
            ),
            (
                "schema_registry: { url: 'http://registry:8081', token_file: Cargo.toml }",
                "schema_registry.url: must begin with https://, because credentials are sent there",
            ),
            (
                "schema_registry: { url: 'https://registry', username: me }",
                "schema_registry.password_file: username and password_file need each other",
            ),
            (
                "schema_registry: { url: 'https://registry', username: me, password_file: Cargo.toml, token_file: Cargo.toml }",
                "schema_registry.token_file: cannot be combined with username",
            ),
            (
                "schema_registry: { url: 'https://registry', token_file: /nowhere/token }",
                "schema_registry.token_file: cannot read /nowhere/token: No such file or directory (os error 2)",
            ),
        ],
    );
    accepts(&[
        "dlq_inspector: { schema_registry: { url: 'http://registry:8081/apis/ccompat/v7' } }",
        "dlq_inspector: { schema_registry: { url: 'https://registry', username: me, password_file: Cargo.toml } }",
    ]);
}

#[test]
fn a_remote_api_requires_a_token_or_allow_remote() {
    check_section(
        "dlq_inspector",
        &[
            (
                "listen: '0.0.0.0:50051'",
                "listen: 0.0.0.0:50051 is reachable from other machines without authentication: listen on 127.0.0.1, \
                 set token_file, auth or tls.client_ca_file, or set allow_remote: true",
            ),
            (
                "token_file: /nowhere/token",
                "token_file: cannot read /nowhere/token: No such file or directory (os error 2)",
            ),
        ],
    );
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    let with = |content: &str| {
        std::fs::write(&path, content).unwrap();
        let file = format!(
            "dlq_inspector: {{ listen: '0.0.0.0:50051', token_file: {} }}",
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
    let api = config.dlq_inspector.api();
    let token = api.token("dlq_inspector").unwrap().unwrap();
    assert_eq!(token.expose(), "s3cret.token");
    assert!(!config.to_yaml().contains("s3cret"));
    let without_token = "dlq_inspector: { listen: '0.0.0.0:50051', allow_remote: true }";
    let api = load(without_token, &[], &[]).unwrap().dlq_inspector.api();
    assert_eq!(api.token("x").unwrap(), None);
}

#[test]
fn the_callers_of_an_api_are_checked() {
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
            (
                "auth: { tokens_file: /nowhere/tokens }",
                "auth.tokens_file: cannot read /nowhere/tokens: No such file or directory (os error 2)",
            ),
            (&neither, "auth.jwt.jwks_url: is missing; set it, or jwks_file"),
            (
                &both,
                "auth.jwt.jwks_url: cannot be combined with jwks_file; set one of the two",
            ),
            (
                &plain,
                "auth.jwt.jwks_url: must begin with https://, because whoever can change the keys can issue tokens",
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
                "auth: { jwt: { issuer: 'https://issuer/#', audience: a, jwks_url: 'https://issuer/keys' } }",
                "auth.jwt.issuer: must have at most 512 bytes, no `#`, and no control or invisible characters",
            ),
            (
                "auth: { client_certificates: [{ cn: a, scopes: [jobs:read] }] }",
                "auth.client_certificates: requires tls.client_ca_file of the same section",
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
fn a_topic_has_only_one_role() {
    check(&[
        (
            "pipelines: { p: { output: p } }",
            1,
            "pipelines.p.output: `p` is also the source; the pipeline would read its own results",
        ),
        (
            "pipelines:\n  a: { source: t }\n  b:\n    source: t",
            4,
            "pipelines.b.source: `t` is the source of this pipeline and the source of `a`; a topic can have only one \
             role",
        ),
        (
            "pipelines:\n  a: {}\n  b: { source: a-dlq }",
            3,
            "pipelines.b.source: `a-dlq` is the source of this pipeline and a retry or dead-letter topic of `a`; a \
             topic can have only one role",
        ),
        (
            "pipelines:\n  a: { output: b-retry-5s }\n  b: {}",
            3,
            "pipelines.b: `b-retry-5s` is a retry or dead-letter topic of this pipeline and an output of `a`; a topic \
             can have only one role",
        ),
        (
            "pipelines: { a: {} }\nscheduler: { apps: { x: { topic: a-dlq } } }",
            2,
            "scheduler.apps.x.topic: `a-dlq` is a retry or dead-letter topic of the pipeline `a`; choose a source \
             topic",
        ),
        (
            "pipelines: { a: {} }\nscheduler: { topics: { answers: a } }",
            2,
            "scheduler.topics.answers: `a` is also the source of the pipeline `a`; a topic can have only one role",
        ),
    ]);
    accepts(&[
        // A pipeline may read the results of another one, and outputs may be shared.
        "pipelines: { a: { output: b }, b: { output: z }, c: { output: z } }",
        "pipelines: { z: { output: a }, y: { output: a }, a: {} }",
        // Results may be jobs, and a pipeline may read rejected jobs.
        "pipelines: { a: { output: scheduler.jobs.ingest }, scheduler.jobs.dlq: {} }",
    ]);
}

#[test]
fn invalid_settings_of_the_scheduler_are_rejected() {
    check_section(
        "scheduler",
        &[
            (
                "default_time_zone: Europe/Berlim",
                "default_time_zone: `Europe/Berlim` is not an IANA time zone: write a name such as UTC or \
                 Europe/Berlin",
            ),
            (
                "group: ''",
                "group: is not a valid consumer group: write 1 to 249 characters",
            ),
            (
                "topics: { state: 'a b' }",
                "topics.state: `a b` is not a valid topic name: use 1 to 249 of the characters a-z, A-Z, 0-9, `.`, `_` \
                 and `-`",
            ),
            (
                "topics: { dlq: scheduler.jobs.state }",
                "topics.dlq: `scheduler.jobs.state` is also scheduler.topics.state; choose another topic",
            ),
            (
                "apps: { a: { topic: scheduler.jobs.ingest } }",
                "apps.a.topic: `scheduler.jobs.ingest` is scheduler.topics.ingest; choose a topic of the application",
            ),
            (
                "apps: { 'pipeline:a': { topic: t } }",
                "apps.pipeline:a: is not a valid application name: the prefix `pipeline:` is reserved",
            ),
            (
                "apps: { 'tier/a/1h': { topic: t } }",
                "apps.tier/a/1h: is not a valid application name: the prefix `tier/` is reserved",
            ),
            (
                "apps: { a: { topic: t, rate: 0 } }",
                "apps.a.rate: 0 is out of range: must be between 0.001 and 1000000",
            ),
            (
                "apps: { a: { topic: t, rate: .nan } }",
                "apps.a.rate: `.nan` is not a number",
            ),
            (
                "apps: { '': { topic: t } }",
                "apps.: is not a valid application name: write 1 to 100 bytes without control characters",
            ),
            (
                "listen: 0.0.0.0:50052",
                "listen: 0.0.0.0:50052 is reachable from other machines without authentication: listen on 127.0.0.1, \
                 set token_file, auth or tls.client_ca_file, or set allow_remote: true",
            ),
        ],
    );
}

#[test]
fn an_invalid_selection_lists_what_exists() {
    let pipelines =
        "pipelines: { crawl: { retry: { tiers: [5s, 1m] } }, docs: { http: { url: 'http://h' } } }\n";
    for (line, problem) in [
        (
            "retry_tier: { tiers: [5s, 2m] }",
            "retry_tier.tiers: no pipeline has the tier 2m; expected one of 5s, 30s, 1m. To serve a leftover tier, set \
             retry_tier.leftovers: true",
        ),
        (
            "retry_tier: { tiers: [5s, 5s] }",
            "retry_tier.tiers: lists 5s twice",
        ),
        (
            "retry_tier: { tiers: [] }",
            "retry_tier.tiers: is empty; omit it to serve all tiers",
        ),
        (
            "enricher: { pipelines: [doc] }",
            "enricher.pipelines: there is no pipeline `doc`, did you mean `docs`?",
        ),
        (
            "enricher: { pipelines: [crawl] }",
            "enricher.pipelines: `crawl` has no endpoint; set its http.url",
        ),
    ] {
        check(&[(&format!("{pipelines}{line}"), 2, problem)]);
    }
    accepts(&[&format!(
        "{pipelines}retry_tier: {{ tiers: [5s, 2m], leftovers: true }}"
    )]);
    check_section(
        "retry_tier",
        &[(
            "tiers: [5s]",
            "tiers: no pipeline has the tier 5s: no pipelines are configured",
        )],
    );
}

#[test]
fn pipeline_names_that_collide_are_rejected() {
    let topic = "it looks like a retry topic of a pipeline `a`; choose a name that does not end in `-retry-due`, or in \
                 `-retry-` followed by a delay";
    for (name, problem) in [
        (
            "retry-5s",
            "its consumer group would be `redeliver-retry-5s`, which is the group of the tier 5s; choose a name that \
             is not `retry-` followed by a delay",
        ),
        ("a-retry-5s", topic),
        ("a-retry-due", topic),
        (
            "scheduler",
            "its consumer group would be `redeliver-scheduler`, which is scheduler.group; choose another name or \
             change scheduler.group",
        ),
    ] {
        let file = format!("pipelines: {{ {name}: {{}} }}");
        let problem = format!("pipelines.{name}: is not a valid pipeline name: {problem}");
        check(&[(&file, 1, &problem)]);
    }
    for name in ["retry", "retry-soon", "retry-5", "a-retry", "scheduler2"] {
        accepts(&[&format!("pipelines: {{ {name}: {{}} }}")]);
    }
    accepts(&["pipelines: { scheduler: {} }\nscheduler: { group: jobs }"]);
    let too_long = load(&format!("pipelines: {{ {}: {{}} }}", "p".repeat(240)), &[], &[]).unwrap_err();
    assert!(
        too_long.contains(" is too long by 1: the name of the topic `ppp"),
        "{too_long}"
    );
}

#[test]
fn a_retired_pipeline_is_checked_except_for_its_source() {
    check(&[
        (
            "pipelines: { a: {} }\nretired: { a: { output: b } }",
            2,
            "retired.a: is also listed under `pipelines`; remove one of the two",
        ),
        (
            "retired: { a: { max_wait: 1s } }",
            1,
            "retired.a.max_wait: 1s is shorter than the longest retry delay: must be at least 1m",
        ),
    ]);
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
    let served: Vec<&str> = config.worker_pipelines().iter().map(|(name, _)| *name).collect();
    assert_eq!(served, ["b", "a"]);
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
fn files_that_cannot_be_read_are_named() {
    let sources = Sources {
        file: Some("/nowhere/redeliver.yaml".into()),
        ..Sources::default()
    };
    let error = Config::load(&sources).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot read the configuration file /nowhere/redeliver.yaml"
    );
    assert!(std::error::Error::source(&error).is_some());
    check(&[(
        "kafka: { properties: { sasl.password: { file: /nowhere/pw } } }",
        1,
        "kafka.properties.sasl.password: cannot read /nowhere/pw: No such file or directory (os error 2)",
    )]);
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

#[test]
fn invalid_settings_of_redis_are_rejected() {
    let prefix =
        "prefix: is not a valid prefix: use 1 to 100 of the characters a-z, A-Z, 0-9, `.`, `_`, `:` and `-`";
    check_section(
        "redis",
        &[
            (
                "url: 'http://:hunter2@localhost:6379'",
                "url: is not a Redis URL: write redis://HOST:PORT, or rediss:// for TLS",
            ),
            (
                "url: 'redis://localhost:6379', ca_file: ca.pem",
                "ca_file: requires TLS: change the scheme of redis.url to rediss, rediss-cluster or rediss-sentinel",
            ),
            ("prefix: ''", prefix),
            ("prefix: 'a b'", prefix),
            ("prefix: 'a{1}'", prefix),
        ],
    );
    for scheme in ["rediss", "rediss-cluster", "rediss-sentinel"] {
        let file = format!("redis: {{ url: '{scheme}://localhost:6379', ca_file: ca.pem }}");
        let config = load(&file, &[], &[]).unwrap();
        assert_eq!(config.redis.ca_file, Some("ca.pem".into()));
    }
    let environment = [("REDELIVER__REDIS__PREFIX", "team:jobs")];
    let config = load("", &environment, &[]).unwrap();
    assert_eq!(config.redis.prefix(&config.kafka, "cluster"), "team:jobs");
    for (file, expected) in [
        ("", "redeliver:cluster"),
        ("kafka: { id_prefix: staging- }", "staging-redeliver:cluster"),
    ] {
        let config = load(file, &[], &[]).unwrap();
        assert_eq!(config.redis.prefix(&config.kafka, "cluster"), expected);
    }
}

#[test]
fn every_mapping_of_the_example_rejects_unknown_keys() {
    let config = load(EXAMPLE, &[], &[]).unwrap();
    let mut rejected = 0;
    let document = config.to_json();
    for pointer in crate::default_file::mappings(&document) {
        let mut changed = document.clone();
        let mapping = changed.pointer_mut(&pointer).unwrap().as_object_mut().unwrap();
        mapping.insert("zzqqxx".to_owned(), 1.into());
        let path = format!("{pointer}/zzqqxx").replace('/', ".");
        let error = load(&changed.to_string(), &[], &[]).unwrap_err();
        assert!(
            error.contains(&format!("{}: unknown key; expected one of ", &path[1..])),
            "{error}"
        );
        rejected += 1;
    }
    assert!(rejected >= 18, "only {rejected} mappings");
}
