use redeliver_core::{Pipeline, SchedulerTopics};

use super::needed::creation_config;
use super::*;

fn settings() -> TopicSettings {
    TopicSettings {
        partitions: 12,
        replication: 3,
        retention: Span::from_secs(7 * 86_400),
        dead_letter_retention: Span::from_secs(30 * 86_400),
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

/// The findings of one topic, beside others with default limits.
fn judge(spec: &TopicSpec, actual: ActualTopic) -> Vec<Finding> {
    let source = topic(&[("max.message.bytes", "1048588")]);
    let mut all =
        BTreeMap::from(["crawl-jobs", "scheduler.jobs.ingest"].map(|name| (name.to_owned(), source.clone())));
    all.insert(spec.name.to_string(), actual);
    examine(spec, &all)
}

/// The findings of one topic with this configuration, beside a source with default limits.
#[track_caller]
fn check(name: &str, config: &[(&str, &str)], expected: &[&str]) {
    let findings = judge(&spec_of(name), topic(config));
    let texts: Vec<_> = findings.iter().map(ToString::to_string).collect();
    assert_eq!(texts, expected, "{name} {config:?}");
}

#[test]
fn a_pipeline_needs_its_topics_each_once() {
    let other = Pipeline {
        name: "again".into(),
        source: "crawl-jobs-dlq".into(),
        output: Some("crawl-jobs".into()),
        ..crawl()
    };
    // The dead letters are ours, in whichever order the pipelines come.
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
        max_wait: Span::from_secs(30 * 86_400),
        ..crawl()
    };
    assert_eq!(retention(&settings(), patient), of("61d", "60d"));
    let hasty = Pipeline {
        max_wait: Span::from_secs(1),
        ..crawl()
    };
    assert_eq!(retention(&settings(), hasty.clone()), of("7d", "10s"));
    let short = TopicSettings {
        retention: Span::from_secs(1),
        ..settings()
    };
    assert_eq!(retention(&short, hasty), of("86410s", "10s"));
}

#[test]
fn sound_topics_give_no_findings() {
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
    for sound in [
        ("retention.ms", "-1"),
        ("message.timestamp.type", "LogAppendTime"),
        ("max.message.bytes", "9000000"),
    ] {
        check("crawl-jobs-retry-1m", &[sound], &[]);
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
fn users_own_topics_are_not_judged_but_must_exist() {
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
fn compaction_is_refused_where_records_wait() {
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
        let findings = judge(&spec_of(name), topic(&[("cleanup.policy", "compact")]));
        assert!(findings[0].problem.contains(records) && findings.len() == 1);
    }
}

#[test]
fn a_tier_that_forgets_before_the_wait_is_over_twice_is_refused() {
    check("crawl-jobs-retry-5s", &[("retention.ms", "172800000")], &[]);
    check(
        "crawl-jobs-retry-5s",
        &[("retention.ms", "172799999")],
        &[
            "error: topic `crawl-jobs-retry-5s` keeps records for 172799999ms while they may wait for up \
           to 1d: they would be deleted before they are due, or after a short outage; needed is 2d; set \
           its retention.ms to 604800000 (7d) or more",
        ],
    );
}

#[test]
fn due_and_dead_letters_are_kept_as_configured() {
    check("crawl-jobs-retry-due", &[("retention.ms", "604800000")], &[]);
    check(
        "crawl-jobs-dlq",
        &[("retention.ms", "604800000")],
        &[
            "warning: topic `crawl-jobs-dlq` deletes dead letters after 7d, and 30d is configured; set its \
           retention.ms to 2592000000 (30d) or more",
        ],
    );
    check(
        "crawl-jobs-retry-due",
        &[("retention.ms", "60000")],
        &[
            "error: topic `crawl-jobs-retry-due` deletes released records after 1m, and 7d is configured; \
           set its retention.ms to 604800000 (7d) or more",
        ],
    );
}

#[test]
fn what_the_source_takes_must_fit_everywhere() {
    check(
        "crawl-jobs-dlq",
        &[("max.message.bytes", "1000")],
        &[
            "error: topic `crawl-jobs-dlq` takes records of 1000 bytes while `crawl-jobs` takes 1048588: \
           larger ones could not move on; set its max.message.bytes to 1064972 or more",
        ],
    );
    check(
        "crawl-jobs-dlq",
        &[("max.message.bytes", "1048588")],
        &[
            "warning: topic `crawl-jobs-dlq` takes records of 1048588 bytes while `crawl-jobs` takes 1048588: the \
             largest could not move on, because headers are added; set its max.message.bytes to 1064972 or more",
        ],
    );
}

#[test]
fn what_is_written_into_topics_of_users_should_fit_and_states_of_jobs_must() {
    let mut spec = TopologySpec::for_scheduler(&scheduler(), &[], &settings());
    spec.expect(["sms", "scheduler.jobs.state"], 900_000);
    let judge_with = |name: &str, config: &[(&str, &str)]| -> Vec<String> {
        let spec = spec.topics.iter().find(|topic| &*topic.name == name).unwrap();
        let findings = judge(
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
    assert_eq!(judge_with("sms", &[]), [""; 0]);
    assert_eq!(judge_with("scheduler.jobs.state", &state), [""; 0]);
    assert_eq!(
        judge_with("sms", &[narrow]),
        [
            "warning: topic `sms` takes records of 900000 bytes, and jobs may have 900000 and headers: those that do \
             not fit become dead letters; set its max.message.bytes to 916384 or more"
        ]
    );
    let found = judge_with("scheduler.jobs.state", &[state[0], state[1], narrow]);
    assert!(
        found
            .iter()
            .any(|found| found.starts_with("error:") && found.contains("waiting jobs may have 900000")),
        "{found:?}"
    );
}

#[test]
fn a_size_limit_is_a_warning_and_comes_after_errors() {
    let findings = judge(
        &spec_of("crawl-jobs-retry-5s"),
        topic(&[("retention.bytes", "1000000"), ("cleanup.policy", "compact")]),
    );
    let severities: Vec<_> = findings.iter().map(|finding| finding.severity).collect();
    assert_eq!(severities, [Severity::Error, Severity::Warning]);
    assert!(findings[1].problem.contains("retention.bytes=1000000"));
}

#[test]
fn what_the_broker_does_not_tell_is_not_judged() {
    let unknown = ActualTopic {
        partitions: 1,
        config: BTreeMap::new(),
    };
    assert_eq!(judge(&spec_of("crawl-jobs-retry-5s"), unknown.clone()), []);
    let state = TopicSpec {
        partitions_as: None,
        ..scheduler_spec_of("scheduler.jobs.state")
    };
    assert_eq!(judge(&state, unknown), []);
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

/// The findings of one topic of the scheduler, beside a sound ingest topic.
#[track_caller]
fn check_scheduler(name: &str, config: &[(&str, &str)], expected: &[&str]) {
    let findings = judge(&scheduler_spec_of(name), topic(config));
    let texts: Vec<_> = findings.iter().map(ToString::to_string).collect();
    assert_eq!(texts, expected, "{name} {config:?}");
}

/// A pipeline whose long waits go through the scheduler.
fn patient() -> Pipeline {
    Pipeline {
        max_wait: Span::from_secs(365 * 86_400),
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
            "all but source, output and the one application of its own"
        );
    }
    let ingest = &jobs.topics[0];
    assert_eq!(
        ingest.sources,
        ["crawl-jobs".into()],
        "only what may arrive there"
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
fn tiers_need_not_keep_what_waits_with_the_scheduler() {
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
fn topics_of_the_scheduler_are_sound_as_they_are_created() {
    let spec = TopologySpec::for_scheduler(&scheduler(), &[patient()], &settings());
    let follows_ingest = |spec: &TopicSpec| spec.sources.contains(&"scheduler.jobs.ingest".into());
    let created = |spec: &TopicSpec| ActualTopic {
        partitions: spec.partitions,
        // What follows the ingest topic follows one of ours, which has room already.
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
    assert!(actual["sms"].config.is_empty(), "as the broker makes topics");
}

#[test]
fn the_state_topic_is_compacted_and_nothing_else() {
    check_scheduler("scheduler.jobs.state", &[("cleanup.policy", "compact")], &[]);
    check_scheduler(
        "scheduler.jobs.state",
        &[("cleanup.policy", "delete")],
        &[
            "error: topic `scheduler.jobs.state` deletes old records: waiting jobs would be lost before they \
             are due; set its cleanup.policy to compact",
        ],
    );
    let both = judge(
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
            "error: topic `scheduler.jobs.state` is not compacted: it would grow for ever; set its \
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
            "error: topic `scheduler.jobs.state` forgets after 1h that a job was forgotten: an index that was \
             behind for longer would bring it back, and 1d is the least; set its delete.retention.ms to 604800000 \
             (7d) or more",
        ],
    );
}

#[test]
fn the_state_topic_has_as_many_partitions_as_the_ingest_topic() {
    for (partitions, remedy) in [
        (11, "give it 12 partitions"),
        (13, "give `scheduler.jobs.ingest` 13 partitions"),
    ] {
        let actual = ActualTopic {
            partitions,
            ..topic(&[("cleanup.policy", "compact")])
        };
        let findings = judge(&scheduler_spec_of("scheduler.jobs.state"), actual);
        assert_eq!((findings.len(), findings[0].severity), (1, Severity::Error));
        assert_eq!(findings[0].remedy, remedy);
    }
}

#[test]
fn commands_answers_and_dead_letters_are_not_compacted_and_fit() {
    for (name, records) in [
        ("scheduler.jobs.ingest", "commands"),
        ("scheduler.jobs.answers", "answers"),
        ("scheduler.jobs.dlq", "dead letters"),
    ] {
        let findings = judge(&scheduler_spec_of(name), topic(&[("cleanup.policy", "compact")]));
        assert_eq!((findings.len(), findings[0].severity), (1, Severity::Error));
        assert!(findings[0].problem.contains(records), "{findings:?}");
    }
    check_scheduler(
        "scheduler.jobs.ingest",
        &[("retention.ms", "3600000")],
        &[
            "warning: topic `scheduler.jobs.ingest` deletes commands after 1h, and 7d is configured; set its \
             retention.ms to 604800000 (7d) or more",
        ],
    );
    let jobs = TopologySpec::for_scheduler(&scheduler(), &[patient()], &settings());
    let small = judge(&jobs.topics[0], topic(&[("max.message.bytes", "1000")]));
    assert!(
        small.len() == 1 && small[0].problem.contains("while `crawl-jobs` takes 1048588"),
        "{small:?}"
    );
}

#[test]
fn topics_of_applications_are_not_judged() {
    check_scheduler(
        "sms",
        &[("cleanup.policy", "compact"), ("retention.ms", "1")],
        &[],
    );
}

#[test]
fn the_ledger_of_dead_letters_is_compacted() {
    let spec = TopologySpec::for_ledger("ledger", &settings());
    let [ledger] = &spec.topics[..] else {
        panic!("{spec:?}")
    };
    let config = creation_config(ledger, None);
    assert!(
        config.contains(&("cleanup.policy", "compact".to_owned())),
        "{config:?}"
    );
    let judged = |policy: &str| {
        let findings = judge(
            ledger,
            topic(&[("cleanup.policy", policy), ("delete.retention.ms", "604800000")]),
        );
        findings.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(judged("compact"), [""; 0]);
    assert_eq!(
        judged("compact,delete"),
        [
            "error: topic `ledger` deletes old records: states of dead letters would be lost; set its cleanup.policy \
             to compact"
        ]
    );
}
