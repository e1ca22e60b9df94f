//! A Kafka that denies everything but what `redeliver acls render` grants. Each program has a user of its own.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use redeliver_testkit::acls::{ONLY_GRANTED, deny_writes};
use redeliver_testkit::certificates::Authority;
use redeliver_testkit::kafka_tools::{KAFKA_ACLS, KAFKA_CONFIGS, run_script};
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{LocalKafka, ensure, eventually};

use crate::services::path;
use crate::support::{DEADLINE, PLAN, PipeBuilder, SERVICES, records, words};

const PASSWORD: &str = "hunter2";

/// What the broker has denied: user, operation and resource.
fn denied_to(log: &str) -> BTreeSet<String> {
    let lines = log.lines().filter(|line| line.contains(" is Denied "));
    lines
        .map(|line| {
            let from = line.find("Principal = ").unwrap();
            let line = &line[from..];
            let word = |after: &str| {
                let rest = line.split_once(after).unwrap().1;
                rest.split_once([' ', ','])
                    .map_or(rest, |(word, _)| word)
                    .to_owned()
            };
            format!(
                "{} {} {}",
                word("Principal = User:"),
                word("operation = "),
                word("on resource = ")
            )
        })
        .collect()
}

#[test]
fn programs_work_with_rendered_permissions_only() {
    let authority = Authority::new().unwrap();
    let kafka =
        LocalKafka::start_secured_with(&authority.sign().unwrap(), "first", PASSWORD, &ONLY_GRANTED).unwrap();
    let files = Scratch::new("acls").unwrap();
    let setup = PipeBuilder::new("acls")
        .brokers(&kafka.brokers())
        .set("kafka.id_prefix", "staging-")
        .set("kafka.properties.security.protocol", "SASL_SSL")
        .set("kafka.properties.sasl.mechanism", "SCRAM-SHA-512")
        .set("kafka.properties.sasl.password", PASSWORD)
        .set(
            "kafka.properties.ssl.ca.location",
            path(&authority.write(files.path(), "ca.crt").unwrap()),
        );
    let jobs = format!("{}-jobs", setup.name());
    let pipe = setup
        .through_scheduler()
        .set("scheduler.apps.billing.topic", &jobs)
        .set("kafka.brokers", &kafka.secured_brokers())
        .with_inspector()
        .plan(PLAN)
        .without_topics();
    let programs = SERVICES.into_iter().chain(["redeliver"]);
    let mut users = String::from("set -eu\n");
    for program in programs.clone() {
        writeln!(
            users,
            "kafka-configs.sh --bootstrap-server \"$BOOTSTRAP_SERVER\" --alter --entity-type users --entity-name {program} \
             --add-config SCRAM-SHA-512=[password={PASSWORD}]"
        )
        .unwrap();
    }
    let created = run_script(&pipe.env, &KAFKA_CONFIGS, &users);
    assert_eq!(created.code, Some(0), "{created:?}");

    let as_user = |name: &str| format!("kafka.properties.sasl.username={name}");
    let instance = |name: &str| format!("{}-{name}-1", pipe.env.name());
    let redeliver = |command: &[&str]| pipe.redeliver(&[command, &["--set", &as_user("redeliver")]].concat());
    let refused = redeliver(&["topics", "apply"]);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    let grant = |user: &str, programs: &str| {
        let instances = instance(user);
        let render = format!(
            "acls render --format script --user {user} --programs {programs} --instances {instances}"
        );
        let script = pipe.redeliver(&words(&render));
        assert_eq!((script.code, &*script.stderr), (Some(0), ""), "{script:?}");
        let granted = run_script(&pipe.env, &KAFKA_ACLS, &script.stdout);
        assert_eq!(granted.code, Some(0), "{script:?} {granted:?}");
    };
    for program in programs {
        grant(program, program);
    }
    let before = denied_to(&kafka.process().output());
    assert!(!before.is_empty(), "nothing was denied without permissions");

    let applied = redeliver(&["topics", "apply"]);
    assert_eq!(applied.code, Some(0), "{applied:?}");
    let start = |name: &str, own: &str| pipe.spawn(name, &format!("{own}-1"), &["--set", &as_user(name)]);
    let mut services = SERVICES.map(|name| start(name, name));
    let sent = pipe.produce(records(200));
    pipe.settle(&sent, DEADLINE).meets(&PLAN, &sent);
    for command in ["audit", "status"] {
        let output = redeliver(&[command]);
        assert_eq!(output.code, Some(0), "{output:?}");
    }
    let inspector = format!("http://{}", services[3].word_after(" api="));
    let copy = sent[0].position.to_string();
    for question in [&["waiting", "stats"][..], &["waiting", "ls"], &["trace", &copy]] {
        let answer = pipe.redeliver(&[question, &["--server", &inspector]].concat());
        assert_eq!(answer.code, Some(0), "{answer:?}");
    }
    // The inspector writes the request, and the tier what has become of it.
    let gone = pipe.read(&[pipe.first_tier()])[0].position.to_string();
    let acted = pipe.redeliver(&["waiting", "retry", &gone, "--server", &inspector, "--wait", "1m"]);
    assert_eq!(acted.code, Some(3), "{acted:?}");
    assert!(acted.stdout.contains(" gone"), "{acted:?}");
    for service in &mut services {
        service.shut_down();
    }
    let after = denied_to(&kafka.process().output());
    let denied: Vec<&String> = after.difference(&before).collect();
    assert!(denied.is_empty(), "{denied:#?}");

    // A one-shot run that waits for retries also needs to see the tiers. It does not take what it cannot see for empty.
    let one_shot = |name: &str, until_idle: &str| {
        let user = as_user(name);
        pipe.spawn(name, &format!("{name}-1"), &[until_idle, "--set", &user])
    };
    for name in ["enricher", "retry-tier"] {
        let mut process = one_shot(name, "--until-idle");
        assert_eq!(process.wait(DEADLINE).code(), Some(0), "{}", process.output());
    }
    let mut blind = one_shot("enricher", "--until-idle=0s");
    blind.wait_for_output("cannot check for remaining work", DEADLINE);
    blind.shut_down();
    grant("enricher", "enricher,retry-tier");
    assert_eq!(
        one_shot("enricher", "--until-idle=0s").wait(DEADLINE).code(),
        Some(0)
    );

    // A tier that cannot act on single records says so, and does all else.
    let actions = "staging-redeliver.waiting.actions";
    deny_writes(&kafka.brokers(), actions).unwrap();
    let mut tier = start("retry-tier", "retry-tier");
    tier.until_ready_but(&format!("topic `{actions}` may not be written by this process"));
    tier.shut_down();

    // A program cannot use the transactional ids of another one, and so cannot fence it.
    let _stranger = start("enricher", "retry-tier");
    let expected = format!(
        "TransactionalId:LITERAL:staging-redeliver-{}",
        instance("retry-tier")
    );
    eventually("the id of another program is denied", DEADLINE, || {
        let all = denied_to(&kafka.process().output());
        let is_denied = |line: &String| line.starts_with("enricher ") && line.contains(&expected);
        ensure(all.iter().any(is_denied), format!("{all:#?}"))
    });
}
