use redeliver_core::Pipeline;

use super::needed::creation_config;
use super::*;

fn days(days: u64) -> HumanDuration {
    HumanDuration::from_secs(days * 86_400)
}

fn settings() -> TopicSettings {
    TopicSettings {
        partitions: 12,
        replication: 3,
        retention: days(7),
        dead_letter_retention: days(30),
    }
}

fn crawl() -> Pipeline {
    Pipeline {
        output: Some("crawl-results".into()),
        ..Pipeline::new("crawl-jobs")
    }
}

/// A pipeline whose long waits go through another service.
fn patient() -> Pipeline {
    Pipeline {
        max_wait: days(365),
        long_waits: Some(INGEST.into()),
        ..crawl()
    }
}

const INGEST: &str = "jobs-ingest";

/// The topics of a service between producers and users: commands that a pipeline writes, too, what waits, and what becomes of it.
pub(super) fn jobs(sources: &[&str], settings: &TopicSettings) -> TopologySpec {
    let new = |name: &str, role, records| TopicSpec::new(name, role, records, settings);
    let answered = HumanDuration::from_secs(3_600);
    TopologySpec::of([
        TopicSpec {
            sources: sources.iter().map(|source| (*source).into()).collect(),
            ..new(INGEST, Role::Input, "commands").deleted_after(settings.retention, MIN_RETENTION)
        },
        TopicSpec {
            partitions_as: Some(INGEST.into()),
            sources: vec![INGEST.into()],
            ..new("jobs-state", Role::State, "waiting jobs").compacted()
        },
        new("jobs-answers", Role::Broadcast, "answers").deleted_after(answered, answered),
        new("sms", Role::Output, "jobs"),
        new("crawl-jobs", Role::Output, "jobs"),
    ])
}

fn single(name: &str, role: Role, records: &'static str) -> TopicSpec {
    TopicSpec::of_one_partition(name, role, records, &settings())
}

fn spec_in(spec: TopologySpec, name: &str) -> TopicSpec {
    let mut topics = spec.topics.into_iter();
    topics.find(|topic| &*topic.name == name).unwrap()
}

/// The topics of each component, by itself.
fn spec_of(name: &str) -> TopicSpec {
    let settings = settings();
    let topics = [
        TopologySpec::for_pipelines(&[crawl()], &settings),
        jobs(&[], &settings),
        TopologySpec::of([
            TopicSpec::new("ledger", Role::Ledger, "states of letters", &settings).compacted(),
            single("groups", Role::Documents, "notes"),
            single("audit", Role::Audit, "entries").deleted_after(days(1), days(1)),
            single("redrives", Role::Progress, "redrives"),
            single("status", Role::Status, "states"),
        ]),
    ]
    .into_iter()
    .flat_map(|spec| spec.topics)
    .collect();
    spec_in(TopologySpec { topics }, name)
}

fn topic(partitions: i32, config: &[(&str, &str)]) -> ActualTopic {
    let valid = [
        ("cleanup.policy", "delete"),
        ("retention.ms", "2592000000"),
        ("retention.bytes", "-1"),
        ("max.message.bytes", "1064972"),
        ("message.timestamp.type", "CreateTime"),
    ];
    let config = valid.iter().chain(config);
    let config = config.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    ActualTopic {
        partitions,
        config: config.collect(),
    }
}

/// The findings for one topic, next to sources with default limits.
fn findings_for(spec: &TopicSpec, actual: ActualTopic) -> Vec<Finding> {
    let source = topic(12, &[("max.message.bytes", "1048588")]);
    let sources = ["crawl-jobs", "jobs-ingest"];
    let mut all = BTreeMap::from(sources.map(|name| (name.to_owned(), source.clone())));
    all.insert(spec.name.to_string(), actual);
    examine(spec, &all)
}

/// Asserts that each finding contains the parts of an expected text, which are separated by ` .. `.
#[track_caller]
fn assert_found(findings: &[Finding], expected: &[&str], case: &str) {
    let texts: Vec<_> = findings.iter().map(ToString::to_string).collect();
    assert_eq!(texts.len(), expected.len(), "{case}: {texts:?}");
    for (text, expected) in texts.iter().zip(expected) {
        let is_found = expected.split(" .. ").all(|part| text.contains(part));
        assert!(is_found, "{case}: {text} is not {expected}");
    }
}

/// Asserts the findings for one topic with this configuration.
#[track_caller]
fn check(name: &str, config: &[(&str, &str)], expected: &[&str]) {
    let spec = spec_of(name);
    let actual = topic(spec.partitions, config);
    assert_found(
        &findings_for(&spec, actual),
        expected,
        &format!("{name} {config:?}"),
    );
}

fn created(spec: &TopicSpec, limit: Option<i64>) -> ActualTopic {
    let config = creation_config(spec, limit).into_iter();
    ActualTopic {
        partitions: spec.partitions,
        config: config.map(|(name, value)| (name.to_owned(), value)).collect(),
    }
}

#[test]
fn shared_topics_occur_once() {
    let other = Pipeline {
        name: "again".into(),
        source: "crawl-jobs-dlq".into(),
        output: Some("crawl-jobs".into()),
        ..crawl()
    };
    // The dead-letter topic is managed although another pipeline reads it, in any order of the pipelines.
    for pipelines in [[crawl(), other.clone()], [other, crawl()]] {
        let spec = TopologySpec::for_pipelines(&pipelines, &settings());
        assert_eq!(distinct(&spec), 12);
        let dead = spec_in(spec, "crawl-jobs-dlq");
        assert_eq!((dead.role, dead.is_managed()), (Role::DeadLetters, true));
        assert_eq!(dead.sources, ["crawl-jobs".into()]);
    }

    let pipelines = TopologySpec::for_pipelines(&[patient()], &settings());
    let jobs = jobs(&["crawl-jobs"], &settings());
    for spec in [pipelines.clone().join(jobs.clone()), jobs.clone().join(pipelines)] {
        assert_eq!(distinct(&spec), 11);
        let managed = spec.topics.iter().filter(|topic| topic.is_managed()).count();
        // All but the source, the output and the topic of one application.
        assert_eq!(managed, 8);
    }
    let stages = jobs.stages().map(|topics| {
        let names = topics.iter().map(|topic| topic.name.to_string());
        names.collect::<Vec<_>>().join(" ")
    });
    assert_eq!(
        stages,
        ["sms crawl-jobs", "jobs-ingest jobs-answers", "jobs-state"]
    );
}

/// The number of topics, whose names are different.
#[track_caller]
fn distinct(spec: &TopologySpec) -> usize {
    let mut names: Vec<_> = spec.topics.iter().map(|topic| &*topic.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), spec.topics.len(), "{names:?}");
    names.len()
}

#[test]
fn tiers_retain_twice_the_longest_wait() {
    let waits = |max_wait| Pipeline { max_wait, ..crawl() };
    let short = TopicSettings {
        retention: HumanDuration::from_secs(1),
        ..settings()
    };
    let through_tiers = Pipeline {
        long_waits: None,
        ..patient()
    };
    let second = HumanDuration::from_secs(1);
    for (settings, pipeline, retention, required) in [
        (settings(), crawl(), "7d", "2d"),
        (settings(), waits(days(30)), "61d", "60d"),
        (settings(), waits(second), "7d", "10s"),
        (short, waits(second), "86410s", "10s"),
        // Long waits need no tier.
        (settings(), patient(), "7d", "2m"),
        (settings(), through_tiers, "731d", "730d"),
    ] {
        let spec = TopologySpec::for_pipelines(&[pipeline], &settings);
        let tier = spec_in(spec, "crawl-jobs-retry-5s");
        let found = [tier.retention, tier.required_retention].map(|time| time.unwrap().to_string());
        assert_eq!(found, [retention, required]);
    }
}

#[test]
fn created_topics_have_no_findings() {
    for spec in [
        TopologySpec::for_pipelines(&[crawl()], &settings()),
        jobs(&["crawl-jobs"], &settings()),
    ] {
        let of = |spec: &TopicSpec| {
            // The ingest topic is managed, so its limit already includes room for headers.
            let follows_ingest = spec.sources.contains(&"jobs-ingest".into());
            let limit = 1_048_588 + 16_384 * i64::from(follows_ingest);
            (spec.name.to_string(), created(spec, Some(limit)))
        };
        let actual: BTreeMap<_, _> = spec.topics.iter().map(of).collect();
        assert_eq!(examine_all(&spec, &actual), []);
    }
    // The broker's defaults.
    assert!(created(&spec_of("sms"), None).config.is_empty());
    for (name, property, value) in [
        ("jobs-state", "cleanup.policy", Some("compact")),
        ("jobs-state", "delete.retention.ms", Some("604800000")),
        ("jobs-state", "retention.ms", None),
        ("jobs-answers", "retention.ms", Some("3600000")),
        ("ledger", "cleanup.policy", Some("compact")),
        ("audit", "message.timestamp.type", Some("LogAppendTime")),
        ("redrives", "segment.bytes", Some("33554432")),
        ("redrives", "segment.ms", Some("600000")),
        ("status", "segment.ms", Some("600000")),
        ("redrives", "min.cleanable.dirty.ratio", Some("0.1")),
    ] {
        let config = created(&spec_of(name), None).config;
        assert_eq!(
            config.get(property).map(String::as_str),
            value,
            "{name} {property}"
        );
    }
}

#[test]
fn missing_topics_are_errors() {
    let missing = |spec: &TopologySpec| examine_all(spec, &BTreeMap::new());
    let pipelines = missing(&TopologySpec::for_pipelines(&[crawl()], &settings()));
    assert_eq!(
        pipelines[0].to_string(),
        "error: topic `crawl-jobs` does not exist; create it, or run `redeliver topics apply`"
    );
    assert_eq!(pipelines.len(), 7);
    // Without permission, it looks the same.
    let control = missing(&TopologySpec::of([single(
        "redeliver.control",
        Role::Documents,
        "what is paused",
    )]));
    let expected = "error: topic `redeliver.control` does not exist, or may not be described; create it, or run `redeliver \
                    topics apply`";
    assert_found(&control, &[expected], "control");
    // Nothing depends on it.
    let status = missing(&TopologySpec::of([single("status", Role::Status, "states")]));
    assert_eq!(status[0].severity, Severity::Warning);
}

#[test]
fn valid_topics_have_no_findings() {
    let bad = [
        ("cleanup.policy", "compact"),
        ("retention.ms", "1"),
        ("retention.bytes", "1"),
    ];
    let state = [("cleanup.policy", "compact"), ("delete.retention.ms", "86400000")];
    let redrives = [
        ("cleanup.policy", "compact"),
        ("segment.bytes", "67108864"),
        ("segment.ms", "600000"),
    ];
    let valid: [(&str, &[(&str, &str)]); 15] = [
        ("crawl-jobs-retry-1m", &[]),
        ("crawl-jobs-retry-1m", &[("retention.ms", "-1")]),
        (
            "crawl-jobs-retry-1m",
            &[("message.timestamp.type", "LogAppendTime")],
        ),
        ("crawl-jobs-retry-1m", &[("max.message.bytes", "9000000")]),
        ("crawl-jobs-retry-5s", &[("retention.ms", "172800000")]),
        ("crawl-jobs-retry-due", &[("retention.ms", "604800000")]),
        // What a newer broker may say.
        (
            "crawl-jobs-retry-5s",
            &[("retention.ms", "soon"), ("max.message.bytes", "")],
        ),
        // Topics of users.
        ("crawl-jobs", &bad),
        ("crawl-results", &bad),
        ("sms", &bad),
        ("groups", &state[..1]),
        ("jobs-state", &state),
        ("ledger", &state[..1]),
        ("audit", &[("message.timestamp.type", "LogAppendTime")]),
        ("redrives", &redrives),
    ];
    for (name, config) in valid {
        check(name, config, &[]);
    }
    for name in ["crawl-jobs-retry-5s", "jobs-state"] {
        let unknown = ActualTopic {
            partitions: 12,
            config: BTreeMap::new(),
        };
        assert_eq!(findings_for(&spec_of(name), unknown), []);
    }
}

#[test]
fn lossy_policies_are_errors() {
    for (name, policy, expected) in [
        (
            "crawl-jobs-retry-5s",
            "compact,delete",
            "error: topic `crawl-jobs-retry-5s` is compacted: compaction would drop waiting records that share a key; set \
             its cleanup.policy to delete",
        ),
        (
            "crawl-jobs-retry-due",
            "compact",
            "error: .. compacted .. released records",
        ),
        ("crawl-jobs-dlq", "compact", "error: .. compacted .. dead letters"),
        ("jobs-ingest", "compact", "error: .. commands"),
        ("jobs-answers", "compact", "error: .. answers"),
        (
            "jobs-state",
            "delete",
            "error: topic `jobs-state` deletes old records: waiting jobs would be lost before they are due; set \
             its cleanup.policy to compact",
        ),
        ("jobs-state", "compact,delete", "error: .. deletes old records"),
        (
            "jobs-state",
            "",
            "error: .. is not compacted: it would grow forever; set its cleanup.policy to compact",
        ),
        (
            "groups",
            "delete",
            "error: .. notes would be lost; set its cleanup.policy to compact",
        ),
        (
            "ledger",
            "compact,delete",
            "error: .. states of letters would be lost; set its cleanup.policy to compact",
        ),
    ] {
        check(name, &[("cleanup.policy", policy)], &[expected]);
    }
}

#[test]
fn short_retention_is_found() {
    for (name, retention, expected) in [
        (
            "crawl-jobs-retry-5s",
            "172799999",
            "error: topic `crawl-jobs-retry-5s` keeps records for 172799999ms, but they may wait for up to 1d: they could be \
             deleted before they are due, or after a short outage; at least 2d is required; set its retention.ms to \
             604800000 (7d) or more",
        ),
        (
            "crawl-jobs-retry-due",
            "60000",
            "error: .. deletes released records after 1m, but 7d is configured; set its retention.ms to 604800000 (7d)",
        ),
        (
            "crawl-jobs-dlq",
            "604800000",
            "warning: .. deletes dead letters after 7d, but 30d is configured; set its retention.ms to 2592000000 (30d)",
        ),
        (
            "crawl-jobs-dlq",
            "1",
            "warning: .. deletes dead letters after 1ms, but 30d",
        ),
        (
            "jobs-ingest",
            "3600000",
            "warning: .. deletes commands after 1h, but 7d is configured; set its retention.ms to 604800000 (7d)",
        ),
    ] {
        check(name, &[("retention.ms", retention)], &[expected]);
    }
    check(
        "crawl-jobs-retry-5s",
        &[("retention.bytes", "1000000"), ("cleanup.policy", "compact")],
        &["error: .. compacted", "warning: .. retention.bytes=1000000"],
    );
    check(
        "jobs-state",
        &[("cleanup.policy", "compact"), ("delete.retention.ms", "3600000")],
        &[
            "error: .. deletes tombstones after 1h: an index that was behind for longer could restore deleted jobs, and at \
           least 1d is required; set its delete.retention.ms to 604800000 (7d) or more",
        ],
    );
}

#[test]
fn narrow_limits_are_found() {
    for (limit, expected) in [
        (
            "1000",
            "error: topic `crawl-jobs-dlq` accepts records of up to 1000 bytes, but `crawl-jobs` accepts 1048588: larger \
             ones could not be forwarded; set its max.message.bytes to 1064972 or more",
        ),
        (
            "1048588",
            "warning: .. the largest could not be forwarded with additional headers; set its max.message.bytes to 1064972",
        ),
    ] {
        check("crawl-jobs-dlq", &[("max.message.bytes", limit)], &[expected]);
    }
    let narrow = ("max.message.bytes", "900000");
    let mut jobs = jobs(&["crawl-jobs"], &settings());
    jobs.expect(["sms", "jobs-state"], 900_000);
    let state = ("cleanup.policy", "compact");
    for (name, config, expected) in [
        (
            "jobs-ingest",
            vec![("max.message.bytes", "1000")],
            vec!["error: .. but `crawl-jobs` accepts 1048588"],
        ),
        ("sms", vec![], vec![]),
        (
            "sms",
            vec![narrow],
            vec![
                "warning: topic `sms` accepts records of up to 900000 bytes, but jobs may have 900000 plus headers: those \
                 that do not fit become dead letters; set its max.message.bytes to 916384 or more",
            ],
        ),
        ("jobs-state", vec![state], vec![]),
        (
            "jobs-state",
            vec![state, narrow],
            vec!["error: ", "error: .. waiting jobs may have 900000"],
        ),
    ] {
        let spec = spec_in(jobs.clone(), name);
        let findings = findings_for(&spec, topic(spec.partitions, &config));
        assert_found(&findings, &expected, name);
    }
}

#[test]
fn wrong_partition_counts_are_errors() {
    for (name, partitions, expected) in [
        (
            "groups",
            3,
            "error: topic `groups` has 3 partitions: only the first one is read; create it again",
        ),
        ("jobs-state", 11, "error: .. give it 12 partitions"),
        ("jobs-state", 13, "error: .. give `jobs-ingest` 13 partitions"),
    ] {
        let actual = topic(partitions, &[("cleanup.policy", "compact")]);
        assert_found(&findings_for(&spec_of(name), actual), &[expected], name);
    }
}

#[test]
fn late_compaction_and_times_warn() {
    let compacted = ("cleanup.policy", "compact");
    for (name, config, expected) in [
        (
            "audit",
            vec![("message.timestamp.type", "CreateTime")],
            "warning: topic `audit` has message.timestamp.type=CreateTime: entries by a server \
             whose clock is wrong would be found, and deleted, at the wrong time; set its message.timestamp.type to \
             LogAppendTime",
        ),
        (
            "redrives",
            vec![compacted, ("segment.bytes", "1073741824")],
            "warning: .. has segment.bytes=1073741824: it is compacted late, so that a process that starts reads much before it \
             goes on; set its segment.bytes to 33554432",
        ),
        (
            "redrives",
            vec![compacted, ("segment.ms", "604800000")],
            "warning: .. has segment.ms=604800000 .. set its segment.ms to 600000",
        ),
    ] {
        check(name, &config, &[expected]);
    }
}
