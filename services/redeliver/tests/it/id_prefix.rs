//! `kafka.id_prefix`: installations that share a cluster, and what happens when the prefix of one changes.

use std::collections::BTreeSet;
use std::sync::Arc;

use redeliver_core::pipeline::retry_tier_group;
use redeliver_kafka::groups;
use redeliver_testkit::{
    CommandOutput, Fate, Reply, Request, ServiceProcess, Trouble, ensure, eventually, run, unique_delays,
};

use crate::retries::drafts;
use crate::support::{DEADLINE, Pipe, PipeBuilder, Sent, Variant};

/// Each record fails once.
fn fails_once(request: &Request) -> Reply {
    match request.earlier_calls_of_key {
        0 => Reply::status(503),
        _ => Reply::ok(request.body.clone()),
    }
}

const FAILS_ONCE: Fate = Fate::Recovers {
    failures: 1,
    trouble: Trouble::Unavailable,
};

/// The same configuration with this prefix.
pub(crate) fn with_prefix(pipe: &Pipe, prefix: &str) -> Variant {
    pipe.variant(
        str::to_owned,
        &[("kafka.id_prefix".to_owned(), prefix.to_owned())],
    )
}

pub(crate) fn migrate(variant: &Variant, from: &str) -> CommandOutput {
    variant
        .env
        .run("redeliver", &["topics", "migrate-offsets", "--from-prefix", from])
}

/// A process whose instance has the same name as that of another installation.
fn start_as(pipe: &Pipe, service: &'static str, instance: &str) -> ServiceProcess {
    let (env, instance) = (pipe.env.clone(), format!("instance={instance}"));
    let name = format!("{service} of {}", pipe.name());
    let mut process = ServiceProcess::spawn(name, move || {
        let mut command = env.command(service, &[]);
        command.args(["--set", &instance]);
        command
    });
    process.until_ready();
    process
}

#[test]
fn installations_do_not_disturb_each_other() {
    let tiers = unique_delays(&[1_500]);
    let pipes = ["prefix-one", "prefix-two"].map(|name| {
        let builder = PipeBuilder::new(name).shared_tiers(&tiers).behave(fails_once);
        let prefix = format!("{}-", builder.name());
        let mut pipe = builder.set("kafka.id_prefix", &prefix).create();
        pipe.kafka.id_prefix = prefix;
        pipe
    });
    let instance = format!("{}-shared", pipes[0].name());
    let mut processes: Vec<ServiceProcess> = Vec::new();
    for service in ["enricher", "retry-tier"] {
        processes.extend(pipes.iter().map(|pipe| start_as(pipe, service, &instance)));
    }
    let sent: Vec<Vec<Sent>> = pipes
        .iter()
        .map(|pipe| pipe.produce(drafts("record", 40)))
        .collect();
    for (pipe, sent) in pipes.iter().zip(&sent) {
        pipe.settle(sent, DEADLINE).meets_with(sent, |_| FAILS_ONCE);
        assert_eq!(pipe.endpoint.calls(), 2 * sent.len() as u64);
    }
    // Processes with the same ids would take the group from each other.
    let tier_topics: Vec<Arc<str>> = pipes.iter().map(Pipe::first_tier).collect();
    for pipe in &pipes {
        let group = retry_tier_group(&pipe.kafka.id_prefix, pipe.pipeline.policy.tiers()[0]);
        let offsets = groups::offsets(&pipe.kafka, &group, &tier_topics).unwrap();
        let read: BTreeSet<&str> = offsets.keys().map(|(topic, _)| topic.as_str()).collect();
        assert_eq!(read, BTreeSet::from([&*pipe.first_tier()]), "{group}");
    }
    assert!(processes.iter().all(ServiceProcess::has_never_ended));
}

#[test]
fn changed_prefix_needs_migrated_offsets() {
    const DONE: usize = 30;
    const WAITING: usize = 20;
    let reply = |request: &Request| match request.earlier_calls_of_key {
        0 if request.body.starts_with(b"waits") => {
            Reply::Status(503, vec![("retry-after".to_owned(), "10".to_owned())], "".into())
        }
        0 => Reply::status(503),
        _ => Reply::ok(request.body.clone()),
    };
    let mut pipe = PipeBuilder::new("prefix-changed")
        .tiers(&[2_000])
        .set("kafka.session_timeout", "6s")
        .behave(reply)
        .create();
    let prefix = format!("{}-", pipe.name());
    let worker_group = format!("redeliver-{}", pipe.name());
    let changed = with_prefix(&pipe, &prefix);

    let previous = [pipe.enricher("a"), pipe.retry_tier("a")];
    let mut sent = pipe.produce(drafts("done", DONE));
    pipe.settle(&sent, DEADLINE);

    // Nothing is copied while there are members.
    let refused = migrate(&changed, "");
    assert_eq!(
        (refused.code, refused.stdout.as_str()),
        (Some(1), ""),
        "{refused:?}"
    );
    assert!(
        refused.stderr.contains("has members; stop all processes"),
        "{refused:?}"
    );

    // Topics with the prefix, such as the control topic, are new.
    let applied = changed.env.run("redeliver", &["topics", "apply"]);
    assert_eq!(applied.code, Some(0), "{applied:?}");
    // Both services refuse the prefix: they would read their topics from the beginning.
    for service in ["enricher", "retry-tier"] {
        let printed = run(changed.env.command(service, &[]));
        assert_eq!(printed.code, Some(1), "{printed:?}");
        let expected = format!(
            "kafka.id_prefix: is `{prefix}`, but the consumer group `{worker_group}` has committed offsets of topic \
             `{}`, and `{prefix}{worker_group}` has none",
            pipe.name()
        );
        assert!(printed.stderr.contains(&expected), "{printed:?}");
        let command = "run `redeliver topics migrate-offsets --from-prefix=`";
        assert!(printed.stderr.contains(command), "{printed:?}");
    }
    sent.extend(pipe.produce(drafts("waits", WAITING)));
    pipe.until_waiting(DONE + WAITING);
    for mut process in previous {
        process.shut_down();
    }

    // Static members stay in the group until the session timeout.
    let copied = eventually("the offsets are copied", DEADLINE, || {
        match migrate(&changed, "") {
            copied if copied.code == Some(0) => Ok(copied),
            refused if refused.stderr.contains("has members") => Err(refused.stderr),
            other => panic!("{other:?}"),
        }
    });
    let line = format!("copied   {worker_group} -> {prefix}{worker_group}: ");
    assert!(copied.stdout.contains(&line), "{copied:?}");
    let (actions, groups) = copied.stdout.split_once('\n').unwrap();
    assert!(actions.contains("redeliver.waiting.actions -> "), "{copied:?}");
    assert_eq!(groups.lines().count(), 2, "{copied:?}");
    let again = migrate(&changed, "");
    assert_eq!(again.code, Some(0), "{again:?}");
    assert_eq!(again.stdout, groups.replace("copied ", "exists "));

    // Processes with the new prefix continue: no record is lost, and none is processed again.
    let processes = changed.start("a");
    pipe.kafka.id_prefix.clone_from(&prefix);
    sent.extend(pipe.produce(drafts("done", DONE)));
    // A wait that the endpoint requests does not count as a failed attempt.
    let fate = |sent: &Sent| match sent.body() {
        body if body.starts_with(b"waits") => Fate::Succeeds,
        _ => FAILS_ONCE,
    };
    pipe.settle(&sent, DEADLINE).meets_with(&sent, fate);
    assert_eq!(pipe.endpoint.calls(), 2 * sent.len() as u64);

    // Offsets of processes that have moved on are not replaced.
    for mut process in processes {
        process.shut_down();
    }
    eventually("a second copy is refused", DEADLINE, || {
        let refused = migrate(&changed, "");
        assert_eq!(
            (refused.code, refused.stdout.as_str()),
            (Some(1), ""),
            "{refused:?}"
        );
        let holds = refused.stderr.contains("has committed other offsets than");
        ensure(holds, refused.stderr)
    });
}
