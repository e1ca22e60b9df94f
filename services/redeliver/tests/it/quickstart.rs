//! `docs/quickstart.md`: its configuration, its endpoint, its commands, and what they print.

use std::collections::BTreeMap;
use std::process::Command;

use redeliver_testkit::{EnvBuilder, Process, eventually, free_port};

use crate::docs::repository;
use crate::polyglot::produce_as_documented;
use crate::support::{DEADLINE, without_other_tests};

const PAGE: &str = include_str!("../../../../docs/quickstart.md");

/// The first block of a step.
#[track_caller]
fn block(step: u32) -> &'static str {
    let (_, text) = PAGE.split_once(&format!("\n**{step}. ")).unwrap();
    let block = text.split("```").nth(1).unwrap();
    block.split_once('\n').unwrap().1
}

/// The words of a line, however they are aligned.
fn words(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn quickstart_ends_as_documented() {
    let address = format!("127.0.0.1:{}", free_port());
    let (_, pipelines) = block(3).split_once("pipelines:").unwrap();
    let pipelines = pipelines
        .replace("greetings:", "{name}:")
        .replace("greeted", "{name}-greeted")
        .replace("127.0.0.1:8080", &address);
    let env = EnvBuilder::new("quickstart")
        .yaml(&format!("pipelines:{pipelines}"))
        // Tests with the same tiers would share their groups.
        .set("kafka.id_prefix", "{name}-")
        .set("dlq_inspector.listen", "127.0.0.1:0")
        .set("dlq_inspector.topics", "[{name}-dlq]")
        .set("dlq_inspector.data_dir", "{dir}/index")
        .build();
    let checked = env.run("enricher", &["--check"]);
    let shown = format!("$ enricher --check\n{}", checked.stdout);
    assert!(checked.code == Some(0) && PAGE.contains(&shown), "{checked:?}");
    let applied = env.run("redeliver", &["topics", "apply"]);
    assert_eq!(applied.code, Some(0), "{applied:?}");
    let last = without_other_tests(&applied.stdout)
        .lines()
        .last()
        .map(str::to_owned);
    assert_eq!(last.as_deref(), block(4).lines().last(), "{applied:?}");

    let mut endpoint = Command::new("python3");
    endpoint
        .arg(repository().join("deploy/compose/endpoint.py"))
        .arg(&address);
    let _endpoint = Process::spawn(endpoint).unwrap();
    let started = block(5).lines().filter_map(|line| line.strip_prefix("$ "));
    let programs = started.filter_map(|line| line.split(' ').next());
    let mut services: BTreeMap<&str, _> = programs
        .filter(|program| *program != "curl")
        .map(|program| (program, env.start(program, "a", &[])))
        .collect();
    assert_eq!(services.len(), 3);
    let enricher = services.get_mut("enricher").unwrap();
    let in_test = |text: &str| text.replace("greetings", env.name());
    let (_, readiness) = block(5).split_once("/readyz\n").unwrap();
    let readiness = in_test(readiness.trim_end().trim_end_matches(",..."));
    let ready = enricher.get("/readyz").1;
    assert!(ready.starts_with(&readiness), "{readiness} {ready}");

    produce_as_documented(env.name());
    let (audit, metric) = block(6).split_once("$ curl ").unwrap();
    let expected: Vec<String> = audit
        .lines()
        .filter(|line| !line.starts_with('$') && !["", "..."].contains(&line.trim()))
        .map(|line| words(&in_test(line)))
        .collect();
    assert!(expected.len() > 5, "{expected:?}");
    let metric = in_test(metric.lines().nth(1).unwrap());
    eventually("the audit and the metric are as documented", DEADLINE, || {
        let audited = env.run("redeliver", &["audit"]);
        let lines: Vec<String> = audited.stdout.lines().map(words).collect();
        let is_shown = audited.code == Some(0) && expected.iter().all(|line| lines.contains(line));
        let is_counted = enricher.get("/metrics").1.lines().any(|line| line == metric);
        match is_shown && is_counted {
            true => Ok(()),
            false => Err(format!("{metric}: {is_counted}\n{}", audited.stdout)),
        }
    });
}
