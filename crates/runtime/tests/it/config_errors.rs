//! What a wrong configuration is told: the field, what is wrong, what would be right, and the place.

use redeliver_runtime::config::{Config, Sources};

use crate::config::{EXAMPLE, load};

fn check(file: &str, expected: &str) {
    assert_eq!(load(file, &[], &[]).unwrap_err(), expected, "{file}");
}

#[test]
fn unknown_keys_name_their_path_and_the_nearest_right_name() {
    check(
        "kafka: { brokerz: x }",
        "kafka.brokerz: unknown key, did you mean `brokers`? (redeliver.yaml line 1)",
    );
    check(
        "pipelines:\n  crawl-jobs:\n    retry:\n      max-retries: 3",
        "pipelines.crawl-jobs.retry.max-retries: unknown key, did you mean `max_retries`? (redeliver.yaml line 4)",
    );
    check(
        "shutdown: { patience: 5s }",
        "shutdown.patience: unknown key; known are grace (redeliver.yaml line 1)",
    );
    check(
        "pipelines: { p: { output: { pointer: /a, topic: {}, default: d } } }",
        "pipelines.p.output.topic: unknown key, did you mean `topics`? (redeliver.yaml line 1)",
    );
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
fn values_of_the_wrong_kind_say_what_would_be_right() {
    check(
        "pipelines: { crawl-jobs: { http: { url: 'http://h', timeout: 5 } } }",
        "pipelines.crawl-jobs.http.timeout: `5` is not a duration: write a whole number and a unit, \
         such as 500ms, 5s, 2m, 1h or 7d (redeliver.yaml line 1)",
    );
    check(
        "pipelines: { p: { retry: { tiers: [5s, 30] } } }",
        "pipelines.p.retry.tiers[1]: `30` is not a duration: write a whole number and a unit, \
         such as 500ms, 5s, 2m, 1h or 7d (redeliver.yaml line 1)",
    );
    check(
        "kafka: { lanes: many }",
        "kafka.lanes: `many` is not a whole number (redeliver.yaml line 1)",
    );
    check(
        "kafka: { lanes: -1 }",
        "kafka.lanes: -1 is out of range; it is between 0 and 4294967295 (redeliver.yaml line 1)",
    );
    check(
        "kafka: { lanes: }",
        "kafka.lanes: has no value; expected a whole number (redeliver.yaml line 1)",
    );
    check(
        "kafka: localhost",
        "kafka: is a text; expected a mapping of keys to values (redeliver.yaml line 1)",
    );
    check(
        "retry_tier: { tiers: 5s }",
        "retry_tier.tiers: `5s` is not a list, written [a, b] (redeliver.yaml line 1)",
    );
    check(
        "admin: { allow_remote: yes }",
        "admin.allow_remote: `yes` is not true or false (redeliver.yaml line 1)",
    );
    check(
        "admin: { listen: 9464 }",
        "admin.listen: `9464` is not an address: write an IP address and a port, such as 127.0.0.1:9464 \
         (redeliver.yaml line 1)",
    );
    check(
        "telemetry: { log: xml }",
        "telemetry.log: `xml` is not one of text, json (redeliver.yaml line 1)",
    );
    check(
        "pipelines: { p: { anchor: yesterday } }",
        "pipelines.p.anchor: `yesterday` is not one of failure, record_timestamp, pointer (redeliver.yaml line 1)",
    );
    check(
        "pipelines: { p: { http: { url: 'http://h', classification: { 99: success } } } }",
        "pipelines.p.http.classification.99: `99` is not a status: write a number from 100 to 599 \
         (redeliver.yaml line 1)",
    );
    check(
        "pipelines: { p: { http: {} } }",
        "pipelines.p.http.url: is missing (redeliver.yaml line 1)",
    );
    check(
        "[1, 2]",
        "the configuration is a list; expected a mapping of keys to values (redeliver.yaml line 1)",
    );
}

#[test]
fn values_out_of_range_and_contradictions_are_refused() {
    check(
        "kafka: { lanes: 65 }",
        "kafka.lanes: 65 is out of range; it is between 1 and 64 (redeliver.yaml line 1)",
    );
    check(
        "kafka: { session_timeout: 1s }",
        "kafka.session_timeout: 1s is out of range; it is between 6s and 30m (redeliver.yaml line 1)",
    );
    check(
        "kafka: { brokers: 'a:1,b' }",
        "kafka.brokers: `b` is not a broker: write host:port, such as localhost:9092 (redeliver.yaml line 1)",
    );
    check(
        "kafka: { properties: { bootstrap.servers: x } }",
        "kafka.properties.bootstrap.servers: write kafka.brokers instead (redeliver.yaml line 1)",
    );
    check(
        "instance: 'a b'",
        "instance: `a b` cannot name a process: write 1 to 100 of the characters a-z, A-Z, 0-9, `.`, `_` and `-` \
         (redeliver.yaml line 1)",
    );
    check(
        "pipelines:\n  p:\n    retry:\n      tiers: [5s]\n      base: 2m",
        "pipelines.p.retry.base: stands beside retry.tiers; write either tiers, or base with factor and cap \
         (redeliver.yaml line 5)",
    );
    check(
        "pipelines: { p: { retry: { factor: 3 } } }",
        "pipelines.p.retry.factor: needs retry.base beside it, such as 2m (redeliver.yaml line 1)",
    );
    check(
        "pipelines: { p: { retry: { tiers: [30s, 5s] } } }",
        "pipelines.p.retry.tiers: 30s stands before 5s; delays must grow (redeliver.yaml line 1)",
    );
    check(
        "pipelines: { p: { retry: { tiers: [2d] } } }",
        "pipelines.p.max_wait: 1d is shorter than the longest retry delay 2d (redeliver.yaml line 1)",
    );
    check(
        "pipelines: { p: { in_flight: 8, http: { url: 'http://h' } } }",
        "pipelines.p.http.concurrency: 16 is more than in_flight 8; a request needs a record in hand \
         (redeliver.yaml line 1)",
    );
    check(
        "pipelines: { p: { http: { url: 'ftp://h' } } }",
        "pipelines.p.http.url: is not an HTTP URL: write http:// or https:// and a host, such as \
         http://localhost:8080/path (redeliver.yaml line 1)",
    );
    check(
        "pipelines: { p: { http: { url: 'http://me:pw@h' } } }",
        "pipelines.p.http.url: holds a user name or a password; give them in a header `authorization` \
         (redeliver.yaml line 1)",
    );
    check(
        "pipelines: { p: { http: { url: 'http://h', tls: { cert_file: a } } } }",
        "pipelines.p.http.tls.cert_file: needs key_file beside it (redeliver.yaml line 1)",
    );
    check(
        "telemetry: { level: 'my=loud' }",
        "telemetry.level: `my=loud` is not a level: write error, warn, info, debug or trace, or directives such as \
         info,redeliver_kafka=debug (redeliver.yaml line 1)",
    );
    check(
        "kafka: { topics: { create: true, retention: 1h } }\npipelines: { p: { retry: { tiers: [45m] } } }",
        "kafka.topics.retention: 1h is too short for the tier 45m: keep records at least twice as long as they wait \
         (redeliver.yaml line 1)",
    );
    check(
        "pipelines: { p: { long_waits: scheduler, max_wait: 30d } }\nscheduler: { max_ahead: 7d }",
        "pipelines.p.max_wait: 30d is longer than scheduler.max_ahead 7d; the scheduler would refuse such a wait \
         (redeliver.yaml line 1)",
    );
    check(
        "admin: { listen: '0.0.0.0:9464' }",
        "admin.listen: 0.0.0.0:9464 can be reached from other machines, and nothing asks for a password there: \
         write 127.0.0.1, or set admin.allow_remote: true (redeliver.yaml line 1)",
    );
    assert!(load("admin: { listen: '0.0.0.0:9464', allow_remote: true }", &[], &[]).is_ok());
}

#[test]
fn an_api_on_the_network_needs_a_token_or_a_word() {
    check(
        "dlq_inspector: { listen: '0.0.0.0:50051' }",
        "dlq_inspector.listen: 0.0.0.0:50051 can be reached from other machines, and nothing asks for a token there: \
         write 127.0.0.1, or give a token_file, or set allow_remote: true beside it (redeliver.yaml line 1)",
    );
    check(
        "dlq_inspector: { token_file: /nowhere/token }",
        "dlq_inspector.token_file: cannot read /nowhere/token: No such file or directory (os error 2) \
         (redeliver.yaml line 1)",
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
    for wrong in ["two words\n", "two\nlines\n", "ümlaut"] {
        let error = with(wrong).unwrap_err();
        assert!(error.contains("must hold one line of ASCII letters"), "{error}");
    }
    assert!(with("").unwrap_err().contains("is empty"));
    let config = with("s3cret.token\n").unwrap();
    let api = config.dlq_inspector.api();
    let token = api.token("dlq_inspector").unwrap().unwrap();
    assert_eq!(token.expose(), "s3cret.token");
    assert!(!config.to_yaml().contains("s3cret"));
    let bold = "dlq_inspector: { listen: '0.0.0.0:50051', allow_remote: true }";
    assert_eq!(
        load(bold, &[], &[])
            .unwrap()
            .dlq_inspector
            .api()
            .token("x")
            .unwrap(),
        None
    );
}

#[test]
fn a_topic_has_one_meaning() {
    check(
        "pipelines: { p: { output: p } }",
        "pipelines.p.output: `p` is the source; results would be read again (redeliver.yaml line 1)",
    );
    check(
        "pipelines:\n  a: { source: t }\n  b:\n    source: t",
        "pipelines.b.source: `t` is the source of this pipeline and the source of `a`; a topic has one meaning \
         (redeliver.yaml line 4)",
    );
    check(
        "pipelines:\n  a: {}\n  b: { source: a-dlq }",
        "pipelines.b.source: `a-dlq` is the source of this pipeline and a retry or dead-letter topic of `a`; \
         a topic has one meaning (redeliver.yaml line 3)",
    );
    check(
        "pipelines:\n  a: { output: b-retry-5s }\n  b: {}",
        "pipelines.b: `b-retry-5s` is a retry or dead-letter topic of this pipeline and an output of `a`; \
         a topic has one meaning (redeliver.yaml line 3)",
    );
    check(
        "pipelines: { a: {} }\nscheduler: { apps: { x: { topic: a-dlq } } }",
        "scheduler.apps.x.topic: `a-dlq` is a retry or dead-letter topic of the pipeline `a`; jobs go to a source \
         (redeliver.yaml line 2)",
    );
    check(
        "pipelines: { 'a b': {} }",
        "the configuration has 2 problems\
         \n  pipelines.a b.source: `a b` cannot be a topic: its name has 1 to 249 of the characters a-z, A-Z, 0-9, \
         `.`, `_` and `-` (redeliver.yaml line 1)\
         \n  pipelines.a b: cannot be the name of a pipeline, because topics are named after it: its name has 1 to \
         249 of the characters a-z, A-Z, 0-9, `.`, `_` and `-` (redeliver.yaml line 1)",
    );
    let long = load(&format!("pipelines: {{ {}: {{}} }}", "p".repeat(240)), &[], &[]).unwrap_err();
    assert!(
        long.contains(" is 1 characters too long: the topic `ppp"),
        "{long}"
    );
    // One pipeline's results may be another's source, and outputs may be shared.
    assert!(
        load(
            "pipelines: { a: { output: b }, b: { output: z }, c: { output: z } }",
            &[],
            &[]
        )
        .is_ok()
    );
    assert!(
        load(
            "pipelines: { z: { output: a }, y: { output: a }, a: {} }",
            &[],
            &[]
        )
        .is_ok()
    );
}

#[test]
fn settings_of_the_scheduler_are_checked() {
    let of = |yaml: &str| load(&format!("scheduler: {{ {yaml} }}"), &[], &[]).unwrap_err();
    for (yaml, problem) in [
        (
            "default_time_zone: Europe/Berlim",
            "default_time_zone: `Europe/Berlim` is not in the time zone database; write a name such as UTC or \
             Europe/Berlin",
        ),
        (
            "max_ahead: 99999d",
            "max_ahead: 99999d is out of range; it is between 1s and 36500d",
        ),
        (
            "max_data: 7",
            "max_data: 7 is out of range; it is between 1000 and 100000000",
        ),
        (
            "idempotency_window: 0s",
            "idempotency_window: 0s is out of range; it is between 1s and 3650d",
        ),
        (
            "keep_ended: 500ms",
            "keep_ended: 500ms is out of range; it is between 1s and 3650d",
        ),
        (
            "window: 1h",
            "window: 1h is out of range; it is between 100ms and 10m",
        ),
        (
            "window_jobs: 1",
            "window_jobs: 1 is out of range; it is between 100 and 10000000",
        ),
        (
            "window_bytes: 1",
            "window_bytes: 1 is out of range; it is between 1048576 and 68719476736",
        ),
        (
            "group: ''",
            "group: cannot name a group: write 1 to 249 characters",
        ),
        (
            "topics: { state: 'a b' }",
            "topics.state: `a b` cannot be a topic: its name has 1 to 249 of the characters a-z, A-Z, 0-9, `.`, \
             `_` and `-`",
        ),
        (
            "topics: { dlq: scheduler.jobs.state }",
            "topics.dlq: `scheduler.jobs.state` is state too; a topic has one meaning",
        ),
        (
            "apps: { a: { topic: scheduler.jobs.ingest } }",
            "apps.a.topic: `scheduler.jobs.ingest` is scheduler.topics.ingest; jobs go to a topic of their \
             application",
        ),
        (
            "apps: { 'pipeline:a': { topic: t } }",
            "apps.pipeline:a: cannot name an application: `pipeline:` stands before names of pipelines",
        ),
        (
            "apps: { '': { topic: t } }",
            "apps.: cannot name an application: write 1 to 100 bytes without control characters",
        ),
        (
            "listen: 0.0.0.0:50052",
            "listen: 0.0.0.0:50052 can be reached from other machines, and nothing asks for a token there: write \
             127.0.0.1, or give a token_file, or set allow_remote: true beside it",
        ),
    ] {
        assert_eq!(of(yaml), format!("scheduler.{problem} (redeliver.yaml line 1)"));
    }
    check(
        "pipelines: { a: {} }\nscheduler: { topics: { answers: a } }",
        "scheduler.topics.answers: `a` is the source of the pipeline `a` too; a topic has one meaning \
         (redeliver.yaml line 2)",
    );
    // Results may be jobs, and what could not be scheduled may be looked at by a pipeline.
    let meeting = "pipelines: { a: { output: scheduler.jobs.ingest }, scheduler.jobs.dlq: {} }";
    assert!(load(meeting, &[], &[]).is_ok());
}

#[test]
fn a_service_is_told_what_exists() {
    let pipelines =
        "pipelines: { crawl: { retry: { tiers: [5s, 1m] } }, docs: { http: { url: 'http://h' } } }\n";
    let with = |line: &str| load(&format!("{pipelines}{line}"), &[], &[]).unwrap_err();
    assert_eq!(
        with("retry_tier: { tiers: [5s, 2m] }"),
        "retry_tier.tiers: no pipeline has the tier 2m; there are 5s, 30s, 1m; to serve one that is left over, set \
         retry_tier.leftovers: true (redeliver.yaml line 2)"
    );
    let leftover = "retry_tier: { tiers: [5s, 2m], leftovers: true }";
    assert!(load(&format!("{pipelines}{leftover}"), &[], &[]).is_ok());
    assert_eq!(
        with("enricher: { pipelines: [doc] }"),
        "enricher.pipelines: there is no pipeline `doc`, did you mean `docs`? (redeliver.yaml line 2)"
    );
    assert_eq!(
        with("enricher: { pipelines: [crawl] }"),
        "enricher.pipelines: `crawl` has no endpoint: give it http.url (redeliver.yaml line 2)"
    );
    check(
        "retry_tier: { tiers: [5s] }",
        "retry_tier.tiers: no pipeline has the tier 5s; there is no pipeline (redeliver.yaml line 1)",
    );
}

#[test]
fn a_pipeline_is_not_called_like_a_tier_or_the_scheduler() {
    let wrong = |name: &str, problem: &str| {
        check(
            &format!("pipelines: {{ {name}: {{}} }}"),
            &format!("pipelines.{name}: cannot be the name of a pipeline: {problem} (redeliver.yaml line 1)"),
        );
    };
    wrong(
        "retry-5s",
        "its consumer group would be `redeliver-retry-5s`, which is that of the tier 5s; choose a name that is not \
         `retry-` and a delay",
    );
    let taken = "it would be taken for a retry topic of a pipeline `a`; choose a name that does not end in \
                 `-retry-due` or in `-retry-` and a delay";
    wrong("a-retry-5s", taken);
    wrong("a-retry-due", taken);
    wrong(
        "scheduler",
        "its consumer group would be `redeliver-scheduler`, which is scheduler.group; choose another name, or another \
         scheduler.group",
    );
    for right in ["retry", "retry-soon", "retry-5", "a-retry", "scheduler2"] {
        assert!(
            load(&format!("pipelines: {{ {right}: {{}} }}"), &[], &[]).is_ok(),
            "{right}"
        );
    }
    assert!(
        load(
            "pipelines: { scheduler: {} }\nscheduler: { group: jobs }",
            &[],
            &[]
        )
        .is_ok()
    );
}

#[test]
fn a_retired_pipeline_is_checked_like_any_other_but_for_its_source() {
    check(
        "pipelines: { a: {} }\nretired: { a: { output: b } }",
        "retired.a: stands under `pipelines` too; a pipeline is in use or retired (redeliver.yaml line 2)",
    );
    check(
        "retired: { a: { max_wait: 1s } }",
        "retired.a.max_wait: 1s is shorter than the longest retry delay 1m (redeliver.yaml line 1)",
    );
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
fn all_problems_are_told_at_once() {
    check(
        "kafka:\n  lanes: x\n  brokerz: y\npipelines:\n  p:\n    http:\n      url: [1]\n      timeout: 5\n",
        "the configuration has 4 problems\
         \n  kafka.brokerz: unknown key, did you mean `brokers`? (redeliver.yaml line 3)\
         \n  kafka.lanes: `x` is not a whole number (redeliver.yaml line 2)\
         \n  pipelines.p.http.url: is a list; expected a text (redeliver.yaml line 7)\
         \n  pipelines.p.http.timeout: `5` is not a duration: write a whole number and a unit, \
         such as 500ms, 5s, 2m, 1h or 7d (redeliver.yaml line 8)",
    );
    let inline = load("", &[("REDELIVER__KAFKA", "{lanes: x, brokerz: y}")], &[]).unwrap_err();
    assert_eq!(
        inline,
        "kafka.brokerz: unknown key, did you mean `brokers`? (environment variable REDELIVER__KAFKA)"
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
    check(
        "kafka: { properties: { sasl.password: { file: /nowhere/pw } } }",
        "kafka.properties.sasl.password: cannot read /nowhere/pw: No such file or directory (os error 2) \
         (redeliver.yaml line 1)",
    );
    check(
        "kafka: [\n",
        "redeliver.yaml line 1: is not YAML: unclosed bracket '['",
    );
    check(
        "kafka: { lanes: 1 }\nkafka: { lanes: 2 }",
        "redeliver.yaml line 2: has the key `kafka` twice in the same place",
    );
}

#[test]
fn a_redis_that_cannot_be_one_is_refused() {
    check(
        "redis: { url: 'http://:hunter2@localhost:6379' }",
        "redis.url: is not a Redis URL: write redis://HOST:PORT, or rediss:// for TLS (redeliver.yaml line 1)",
    );
    check(
        "redis: { url: 'redis://localhost:6379', ca_file: ca.pem }",
        "redis.ca_file: is for TLS, and redis.url does not ask for it: write rediss:// (redeliver.yaml line 1)",
    );
    for scheme in ["rediss", "rediss-cluster", "rediss-sentinel"] {
        let file = format!("redis: {{ url: '{scheme}://localhost:6379', ca_file: ca.pem }}");
        assert_eq!(
            load(&file, &[], &[]).unwrap().redis.ca_file,
            Some("ca.pem".into())
        );
    }
    let rule = "has 1 to 100 of the characters a-z, A-Z, 0-9, `.`, `_`, `:` and `-`";
    for prefix in ["''", "'a b'", "'a{1}'"] {
        let expected = format!("redis.prefix: {rule} (redeliver.yaml line 1)");
        check(&format!("redis: {{ prefix: {prefix} }}"), &expected);
    }
    let environment = [("REDELIVER__REDIS__PREFIX", "team:jobs")];
    assert_eq!(load("", &environment, &[]).unwrap().redis.prefix, "team:jobs");
}

#[test]
fn every_mapping_of_the_example_refuses_unknown_keys() {
    let config = load(EXAMPLE, &[], &[]).unwrap();
    let mut refused = 0;
    let document = config.to_json();
    for pointer in crate::default_file::mappings(&document) {
        let mut changed = document.clone();
        let mapping = changed.pointer_mut(&pointer).unwrap().as_object_mut().unwrap();
        mapping.insert("zzqqxx".to_owned(), 1.into());
        let path = format!("{pointer}/zzqqxx").replace('/', ".");
        let error = load(&changed.to_string(), &[], &[]).unwrap_err();
        assert!(
            error.contains(&format!("{}: unknown key; known are ", &path[1..])),
            "{error}"
        );
        refused += 1;
    }
    assert!(refused >= 18, "only {refused} mappings");
}

#[test]
fn a_list_of_outputs_is_for_handlers_of_the_users_own() {
    check(
        "pipelines: { p: { output: [] } }",
        "pipelines.p.output: is empty; name at least one topic (redeliver.yaml line 1)",
    );
    check(
        "pipelines: { p: { output: [a, b], http: { url: 'http://h' } } }",
        "pipelines.p.output: is a list, of which only a handler of your own can choose; with `http` write one topic, or \
         { pointer, topics, default } (redeliver.yaml line 1)",
    );
}
