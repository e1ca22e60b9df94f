use redeliver_core::{Pipeline, SchedulerTopics};

use super::needed::creation_config;
use super::*;

fn settings() -> TopicSettings {
    TopicSettings {
        partitions: 12,
        replication: 3,
        retention: HumanDuration::from_secs(7 * 86_400),
        dead_letter_retention: HumanDuration::from_secs(30 * 86_400),
    }
}

fn crawl() -> Pipeline {
    Pipeline {
        output: Some("crawl-results".into()),
        ..Pipeline::new("crawl-jobs")
    }
}

fn spec_of(name: &str) -> TopicSpec {
    let spec = TopologySpec::for_pipelines(&[crawl()], &settings());
    spec.topics
        .into_iter()
        .find(|topic| &*topic.name == name)
        .unwrap()
}

fn topic(config: &[(&str, &str)]) -> ActualTopic {
    let mut actual = ActualTopic {
        partitions: 12,
        config: BTreeMap::new(),
    };
    for (name, value) in [
        ("cleanup.policy", "delete"),
        ("retention.ms", "2592000000"),
        ("retention.bytes", "-1"),
        ("max.message.bytes", "1064972"),
        ("message.timestamp.type", "CreateTime"),
    ]
    .iter()
    .chain(config)
    {
        actual.config.insert((*name).to_owned(), (*value).to_owned());
    }
    actual
}

/// The findings for one topic, next to others with default limits.
fn findings_for(spec: &TopicSpec, actual: ActualTopic) -> Vec<Finding> {
    let source = topic(&[("max.message.bytes", "1048588")]);
    let mut all =
        BTreeMap::from(["crawl-jobs", "scheduler.jobs.ingest"].map(|name| (name.to_owned(), source.clone())));
    all.insert(spec.name.to_string(), actual);
    examine(spec, &all)
}

/// Asserts the findings for one topic with this configuration, next to a source with default limits.
#[track_caller]
fn check(name: &str, config: &[(&str, &str)], expected: &[&str]) {
    let findings = findings_for(&spec_of(name), topic(config));
    let texts: Vec<_> = findings.iter().map(ToString::to_string).collect();
    assert_eq!(texts, expected, "{name} {config:?}");
}

#[test]
fn each_topic_of_pipelines_occurs_once_and_a_managed_role_wins() {
    let other = Pipeline {
        name: "again".into(),
        source: "crawl-jobs-dlq".into(),
        output: Some("crawl-jobs".into()),
        ..crawl()
    };
    // The dead-letter topic is managed although another pipeline reads it, in any order of the pipelines.
    for pipelines in [[crawl(), other.clone()], [other, crawl()]] {
        let spec = TopologySpec::for_pipelines(&pipelines, &settings());
        let mut names: Vec<_> = spec.topics.iter().map(|topic| &*topic.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!((spec.topics.len(), names.len()), (12, 12), "{names:?}");
        let dead = spec
            .topics
            .iter()
            .find(|topic| &*topic.name == "crawl-jobs-dlq")
            .unwrap();
        assert_eq!(
            (dead.role, dead.is_managed()),
            (Role::Pipeline(TopicRole::DeadLetter), true)
        );
        assert_eq!(dead.sources, ["crawl-jobs".into()]);
    }
}

#[test]
fn a_tier_keeps_records_for_twice_the_longest_wait_and_a_day() {
    let retention = |settings: &TopicSettings, pipeline: Pipeline| {
        let spec = TopologySpec::for_pipelines(&[pipeline], settings);
        let tier = spec
            .topics
            .iter()
            .find(|topic| &*topic.name == "crawl-jobs-retry-5s")
            .unwrap();
        (
            tier.retention.unwrap().to_string(),
            tier.required_retention.unwrap().to_string(),
        )
    };
    let of = |retention: &str, required: &str| (retention.to_owned(), required.to_owned());
    assert_eq!(retention(&settings(), crawl()), of("7d", "2d"));
    let patient = Pipeline {
        max_wait: HumanDuration::from_secs(30 * 86_400),
        ..crawl()
    };
    assert_eq!(retention(&settings(), patient), of("61d", "60d"));
    let hasty = Pipeline {
        max_wait: HumanDuration::from_secs(1),
        ..crawl()
    };
    assert_eq!(retention(&settings(), hasty.clone()), of("7d", "10s"));
    let short = TopicSettings {
        retention: HumanDuration::from_secs(1),
        ..settings()
    };
    assert_eq!(retention(&short, hasty), of("86410s", "10s"));
}

#[test]
fn valid_topics_have_no_findings() {
    let spec = TopologySpec::for_pipelines(&[crawl()], &settings());
    let mut actual: BTreeMap<_, _> = spec
        .topics
        .iter()
        .map(|spec| (spec.name.to_string(), topic(&[])))
        .collect();
    actual.insert(
        "crawl-jobs".to_owned(),
        topic(&[("max.message.bytes", "1048588")]),
    );
    assert_eq!(examine_all(&spec, &actual), []);
    for valid in [
        ("retention.ms", "-1"),
        ("message.timestamp.type", "LogAppendTime"),
        ("max.message.bytes", "9000000"),
    ] {
        check("crawl-jobs-retry-1m", &[valid], &[]);
    }
    for created in &spec.topics {
        let config = creation_config(created, Some(1_048_588));
        let created_topic = actual.get_mut(&*created.name).unwrap();
        created_topic.config = config
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
    }
    assert_eq!(examine_all(&spec, &actual), []);
}

#[test]
fn a_missing_control_topic_may_be_one_without_permission() {
    let spec = TopologySpec::for_control("redeliver.control", &settings());
    let findings = examine_all(&spec, &BTreeMap::new());
    let expected = "error: topic `redeliver.control` does not exist, or may not be described; create it, or run `redeliver \
                    topics apply`";
    assert_eq!(
        findings.iter().map(Finding::to_string).collect::<Vec<_>>(),
        [expected]
    );
}

#[test]
fn the_topic_of_group_states_is_compacted_and_has_one_partition() {
    let spec = TopologySpec::for_group_states("groups", &settings());
    let [topic] = &spec.topics[..] else {
        panic!("{spec:?}");
    };
    assert_eq!(topic.partitions, 1);
    let find = |partitions, policy: &str| {
        let config = [("cleanup.policy".to_owned(), policy.to_owned())];
        let actual = ActualTopic {
            partitions,
            config: config.into(),
        };
        let actual = BTreeMap::from([("groups".to_owned(), actual)]);
        let findings = examine(topic, &actual);
        findings.iter().map(Finding::to_string).collect::<Vec<_>>()
    };
    assert_eq!(find(1, "compact"), [""; 0]);
    assert_eq!(
        find(3, "compact"),
        [
            "error: topic `groups` has 3 partitions: only the first one is read; create it again with one partition"
        ]
    );
    assert_eq!(
        find(1, "delete"),
        [
            "error: topic `groups` deletes old records: states and notes of groups would be lost; set its cleanup.policy \
             to compact"
        ]
    );
}

#[test]
fn topics_of_users_are_not_checked_but_must_exist() {
    let bad = [
        ("cleanup.policy", "compact"),
        ("retention.ms", "1"),
        ("retention.bytes", "1"),
    ];
    for name in ["crawl-jobs", "crawl-results"] {
        check(name, &bad, &[]);
        let findings = examine(&spec_of(name), &BTreeMap::new());
        assert_eq!(
            findings[0].to_string(),
            format!("error: topic `{name}` does not exist; create it, or run `redeliver topics apply`")
        );
    }
}

#[test]
fn a_compacted_topic_for_waiting_records_is_an_error() {
    check(
        "crawl-jobs-retry-5s",
        &[("cleanup.policy", "compact,delete")],
        &[
            "error: topic `crawl-jobs-retry-5s` is compacted: compaction would drop waiting records that \
           share a key; set its cleanup.policy to delete",
        ],
    );
    for (name, records) in [
        ("crawl-jobs-retry-due", "released records"),
        ("crawl-jobs-dlq", "dead letters"),
    ] {
        let findings = findings_for(&spec_of(name), topic(&[("cleanup.policy", "compact")]));
        assert!(findings[0].problem.contains(records) && findings.len() == 1);
    }
}

#[test]
fn a_tier_with_less_than_twice_the_longest_wait_as_retention_is_an_error() {
    check("crawl-jobs-retry-5s", &[("retention.ms", "172800000")], &[]);
    check(
        "crawl-jobs-retry-5s",
        &[("retention.ms", "172799999")],
        &[
            "error: topic `crawl-jobs-retry-5s` keeps records for 172799999ms, but they may wait for up \
           to 1d: they could be deleted before they are due, or after a short outage; at least 2d is required; set \
           its retention.ms to 604800000 (7d) or more",
        ],
    );
}

#[test]
fn a_shorter_retention_of_dead_letters_is_a_warning() {
    for (retention, shown) in [("900000", "15m"), ("604800000", "7d"), ("1", "1ms")] {
        let expected = format!(
            "warning: topic `crawl-jobs-dlq` deletes dead letters after {shown}, but 30d is configured; set its \
             retention.ms to 2592000000 (30d) or more"
        );
        check("crawl-jobs-dlq", &[("retention.ms", retention)], &[&expected]);
    }
}

#[test]
fn due_topics_need_the_configured_retention() {
    check("crawl-jobs-retry-due", &[("retention.ms", "604800000")], &[]);
    check(
        "crawl-jobs-retry-due",
        &[("retention.ms", "60000")],
        &[
            "error: topic `crawl-jobs-retry-due` deletes released records after 1m, but 7d is configured; \
           set its retention.ms to 604800000 (7d) or more",
        ],
    );
}

#[test]
fn records_of_the_source_must_fit_into_all_topics() {
    check(
        "crawl-jobs-dlq",
        &[("max.message.bytes", "1000")],
        &[
            "error: topic `crawl-jobs-dlq` accepts records of up to 1000 bytes, but `crawl-jobs` accepts 1048588: \
           larger ones could not be forwarded; set its max.message.bytes to 1064972 or more",
        ],
    );
    check(
        "crawl-jobs-dlq",
        &[("max.message.bytes", "1048588")],
        &[
            "warning: topic `crawl-jobs-dlq` accepts records of up to 1048588 bytes, but `crawl-jobs` accepts 1048588: the \
             largest could not be forwarded with additional headers; set its max.message.bytes to 1064972 or more",
        ],
    );
}

#[test]
fn too_small_a_limit_is_a_warning_for_topics_of_users_and_an_error_for_the_state_topic() {
    let mut spec = TopologySpec::for_scheduler(&scheduler(), &[], &settings());
    spec.expect(["sms", "scheduler.jobs.state"], 900_000);
    let findings_with = |name: &str, config: &[(&str, &str)]| -> Vec<String> {
        let spec = spec.topics.iter().find(|topic| &*topic.name == name).unwrap();
        let findings = findings_for(
            &TopicSpec {
                partitions_as: None,
                ..spec.clone()
            },
            topic(config),
        );
        findings.iter().map(ToString::to_string).collect()
    };
    let narrow = ("max.message.bytes", "900000");
    let state = [
        ("cleanup.policy", "compact"),
        ("delete.retention.ms", "604800000"),
    ];
    assert_eq!(findings_with("sms", &[]), [""; 0]);
    assert_eq!(findings_with("scheduler.jobs.state", &state), [""; 0]);
    assert_eq!(
        findings_with("sms", &[narrow]),
        [
            "warning: topic `sms` accepts records of up to 900000 bytes, but jobs may have 900000 plus headers: those that do \
             not fit become dead letters; set its max.message.bytes to 916384 or more"
        ]
    );
    let found = findings_with("scheduler.jobs.state", &[state[0], state[1], narrow]);
    assert!(
        found
            .iter()
            .any(|found| found.starts_with("error:") && found.contains("waiting jobs may have 900000")),
        "{found:?}"
    );
}

#[test]
fn limited_retention_bytes_is_a_warning_and_comes_after_errors() {
    let findings = findings_for(
        &spec_of("crawl-jobs-retry-5s"),
        topic(&[("retention.bytes", "1000000"), ("cleanup.policy", "compact")]),
    );
    let severities: Vec<_> = findings.iter().map(|finding| finding.severity).collect();
    assert_eq!(severities, [Severity::Error, Severity::Warning]);
    assert!(findings[1].problem.contains("retention.bytes=1000000"));
}

#[test]
fn unknown_configuration_is_not_checked() {
    let unknown = ActualTopic {
        partitions: 1,
        config: BTreeMap::new(),
    };
    assert_eq!(findings_for(&spec_of("crawl-jobs-retry-5s"), unknown.clone()), []);
    let state = TopicSpec {
        partitions_as: None,
        ..scheduler_spec_of("scheduler.jobs.state")
    };
    assert_eq!(findings_for(&state, unknown), []);
    check(
        "crawl-jobs-retry-5s",
        &[("retention.ms", "soon"), ("max.message.bytes", "")],
        &[],
    );
}

fn scheduler() -> SchedulerTopics {
    SchedulerTopics {
        apps: vec!["sms".into(), "crawl-jobs".into()],
        ..SchedulerTopics::default()
    }
}

fn scheduler_spec_of(name: &str) -> TopicSpec {
    let spec = TopologySpec::for_scheduler(&scheduler(), &[], &settings());
    let mut topics = spec.topics.into_iter();
    topics.find(|topic| &*topic.name == name).unwrap()
}

/// Asserts the findings for one topic of the scheduler, next to a valid ingest topic.
#[track_caller]
fn check_scheduler(name: &str, config: &[(&str, &str)], expected: &[&str]) {
    let findings = findings_for(&scheduler_spec_of(name), topic(config));
    let texts: Vec<_> = findings.iter().map(ToString::to_string).collect();
    assert_eq!(texts, expected, "{name} {config:?}");
}

/// A pipeline whose long waits go through the scheduler.
fn patient() -> Pipeline {
    Pipeline {
        max_wait: HumanDuration::from_secs(365 * 86_400),
        long_waits: Some(scheduler().ingest),
        ..crawl()
    }
}

#[test]
fn pipelines_and_the_scheduler_are_one_topology() {
    let pipelines = TopologySpec::for_pipelines(&[patient()], &settings());
    let jobs = TopologySpec::for_scheduler(&scheduler(), &[crawl(), patient()], &settings());
    for spec in [pipelines.clone().join(jobs.clone()), jobs.clone().join(pipelines)] {
        let mut names: Vec<_> = spec.topics.iter().map(|topic| &*topic.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!((spec.topics.len(), names.len()), (12, 12), "{names:?}");
        let managed = spec.topics.iter().filter(|topic| topic.is_managed()).count();
        assert_eq!(
            managed, 9,
            "all but the source, the output and the topic of one application"
        );
    }
    let ingest = &jobs.topics[0];
    assert_eq!(
        ingest.sources,
        ["crawl-jobs".into()],
        "only the sources of pipelines whose long waits go through it"
    );
    let stages = jobs.stages().map(|topics| {
        let names = topics.iter().map(|topic| topic.name.to_string());
        names.collect::<Vec<_>>().join(" ")
    });
    assert_eq!(
        stages,
        [
            "sms crawl-jobs",
            "scheduler.jobs.ingest scheduler.jobs.answers",
            "scheduler.jobs.state scheduler.jobs.dlq"
        ]
    );
}

#[test]
fn tiers_need_not_retain_records_that_wait_in_the_scheduler() {
    let tier = |pipeline: Pipeline| {
        let spec = TopologySpec::for_pipelines(&[pipeline], &settings());
        let topic = spec.topics.iter().find(|topic| topic.name.ends_with("-retry-5s"));
        topic.unwrap().required_retention.unwrap().to_string()
    };
    assert_eq!(tier(patient()), "2m");
    let through_tiers = Pipeline {
        long_waits: None,
        ..patient()
    };
    assert_eq!(tier(through_tiers), "730d");
}

#[test]
fn created_topics_of_the_scheduler_have_no_findings() {
    let spec = TopologySpec::for_scheduler(&scheduler(), &[patient()], &settings());
    let follows_ingest = |spec: &TopicSpec| spec.sources.contains(&"scheduler.jobs.ingest".into());
    let created = |spec: &TopicSpec| ActualTopic {
        partitions: spec.partitions,
        // The ingest topic is managed, so its limit already includes room for headers.
        config: creation_config(spec, Some(1_048_588 + 16_384 * i64::from(follows_ingest(spec))))
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect(),
    };
    let actual: BTreeMap<_, _> = spec
        .topics
        .iter()
        .map(|spec| (spec.name.to_string(), created(spec)))
        .collect();
    assert_eq!(examine_all(&spec, &actual), []);
    let state = &actual["scheduler.jobs.state"].config;
    let of_state = |name: &str| state.get(name).map(String::as_str);
    assert_eq!(of_state("cleanup.policy"), Some("compact"));
    assert_eq!(of_state("delete.retention.ms"), Some("604800000"));
    assert_eq!(of_state("retention.ms"), None);
    let answers = &actual["scheduler.jobs.answers"];
    assert_eq!(
        (answers.partitions, answers.config["retention.ms"].as_str()),
        (4, "3600000")
    );
    assert!(actual["sms"].config.is_empty(), "the broker's defaults");
}

#[test]
fn the_state_topic_must_only_be_compacted() {
    check_scheduler("scheduler.jobs.state", &[("cleanup.policy", "compact")], &[]);
    check_scheduler(
        "scheduler.jobs.state",
        &[("cleanup.policy", "delete")],
        &[
            "error: topic `scheduler.jobs.state` deletes old records: waiting jobs would be lost before they \
             are due; set its cleanup.policy to compact",
        ],
    );
    let both = findings_for(
        &scheduler_spec_of("scheduler.jobs.state"),
        topic(&[("cleanup.policy", "compact,delete")]),
    );
    assert!(
        both.len() == 1 && both[0].problem.starts_with("deletes old records"),
        "{both:?}"
    );
    check_scheduler(
        "scheduler.jobs.state",
        &[("cleanup.policy", "")],
        &[
            "error: topic `scheduler.jobs.state` is not compacted: it would grow forever; set its \
             cleanup.policy to compact",
        ],
    );
    check_scheduler(
        "scheduler.jobs.state",
        &[("cleanup.policy", "compact"), ("delete.retention.ms", "86400000")],
        &[],
    );
    check_scheduler(
        "scheduler.jobs.state",
        &[("cleanup.policy", "compact"), ("delete.retention.ms", "3600000")],
        &[
            "error: topic `scheduler.jobs.state` deletes tombstones after 1h: an index that was behind for longer could \
             restore deleted jobs, and at least 1d is required; set its delete.retention.ms to 604800000 (7d) or more",
        ],
    );
}

#[test]
fn the_state_topic_must_have_as_many_partitions_as_the_ingest_topic() {
    for (partitions, remedy) in [
        (11, "give it 12 partitions"),
        (13, "give `scheduler.jobs.ingest` 13 partitions"),
    ] {
        let actual = ActualTopic {
            partitions,
            ..topic(&[("cleanup.policy", "compact")])
        };
        let findings = findings_for(&scheduler_spec_of("scheduler.jobs.state"), actual);
        assert_eq!((findings.len(), findings[0].severity), (1, Severity::Error));
        assert_eq!(findings[0].remedy, remedy);
    }
}

#[test]
fn topics_of_commands_answers_and_dead_letters_must_not_be_compacted() {
    for (name, records) in [
        ("scheduler.jobs.ingest", "commands"),
        ("scheduler.jobs.answers", "answers"),
        ("scheduler.jobs.dlq", "dead letters"),
    ] {
        let findings = findings_for(&scheduler_spec_of(name), topic(&[("cleanup.policy", "compact")]));
        assert_eq!((findings.len(), findings[0].severity), (1, Severity::Error));
        assert!(findings[0].problem.contains(records), "{findings:?}");
    }
    check_scheduler(
        "scheduler.jobs.ingest",
        &[("retention.ms", "3600000")],
        &[
            "warning: topic `scheduler.jobs.ingest` deletes commands after 1h, but 7d is configured; set its \
             retention.ms to 604800000 (7d) or more",
        ],
    );
    let jobs = TopologySpec::for_scheduler(&scheduler(), &[patient()], &settings());
    let small = findings_for(&jobs.topics[0], topic(&[("max.message.bytes", "1000")]));
    assert!(
        small.len() == 1 && small[0].problem.contains("but `crawl-jobs` accepts 1048588"),
        "{small:?}"
    );
}

#[test]
fn topics_of_applications_are_not_checked() {
    check_scheduler(
        "sms",
        &[("cleanup.policy", "compact"), ("retention.ms", "1")],
        &[],
    );
}

#[test]
fn the_ledger_must_be_compacted() {
    let spec = TopologySpec::for_ledger("ledger", &settings());
    let [ledger] = &spec.topics[..] else {
        panic!("{spec:?}")
    };
    let config = creation_config(ledger, None);
    assert!(
        config.contains(&("cleanup.policy", "compact".to_owned())),
        "{config:?}"
    );
    let findings = |policy: &str| {
        let findings = findings_for(
            ledger,
            topic(&[("cleanup.policy", policy), ("delete.retention.ms", "604800000")]),
        );
        findings.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(findings("compact"), [""; 0]);
    assert_eq!(
        findings("compact,delete"),
        [
            "error: topic `ledger` deletes old records: states of dead letters would be lost; set its cleanup.policy \
             to compact"
        ]
    );
}

#[test]
fn brokers_set_the_times_of_the_audit_topic() {
    let spec = TopologySpec::for_audit("audit", HumanDuration::from_secs(86_400), &settings());
    let [audit] = &spec.topics[..] else {
        panic!("{spec:?}")
    };
    let config = creation_config(audit, None);
    assert!(
        config.contains(&("message.timestamp.type", "LogAppendTime".to_owned())),
        "{config:?}"
    );
    let findings = |kind: &str| {
        let found = topic(&[("cleanup.policy", "delete"), ("message.timestamp.type", kind)]);
        let found = ActualTopic {
            partitions: 1,
            ..found
        };
        let findings = findings_for(audit, found);
        findings.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(findings("LogAppendTime"), [""; 0]);
    assert_eq!(
        findings("CreateTime"),
        [
            "warning: topic `audit` has message.timestamp.type=CreateTime: records of changes and disclosures by a server \
             whose clock is wrong would be found, and deleted, at the wrong time; set its message.timestamp.type to \
             LogAppendTime"
        ]
    );
}

#[test]
fn the_topic_of_redrives_is_compacted_soon() {
    let spec = TopologySpec::for_redrives("redeliver.dlq.redrives", &settings())
        .topics
        .remove(0);
    let created: BTreeMap<_, _> = creation_config(&spec, None).into_iter().collect();
    assert_eq!(created["segment.bytes"], "33554432");
    assert_eq!(created["segment.ms"], "600000");
    assert_eq!(created["min.cleanable.dirty.ratio"], "0.1");
    let findings = |config: &[(&str, &str)]| -> Vec<String> {
        let compacted = [("cleanup.policy", "compact")];
        let actual = ActualTopic {
            partitions: 1,
            ..topic(&[&compacted[..], config].concat())
        };
        let findings = findings_for(&spec, actual);
        findings.iter().map(ToString::to_string).collect()
    };
    assert_eq!(
        findings(&[("segment.bytes", "67108864"), ("segment.ms", "600000")]),
        [""; 0]
    );
    for (name, found, wanted) in [
        ("segment.bytes", "1073741824", "33554432"),
        ("segment.ms", "604800000", "600000"),
    ] {
        let expected = format!(
            "warning: topic `redeliver.dlq.redrives` has {name}={found}: it is compacted late, so that a new executor reads much before it goes on; \
             set its {name} to {wanted}"
        );
        assert_eq!(findings(&[(name, found)]), [expected]);
    }
}
