//! What holds up records and jobs, in `redeliver status`, `jobs get` and `waiting ls`.

use redeliver_testkit::kafka_request::delete_topic;
use redeliver_testkit::{Reply, ensure, eventually, free_port};
use serde_json::Value;

use crate::support::{DEADLINE, Pipe, PipeBuilder, words};

/// The name of what is held up, the cause, and a part of the sentence.
type Expected<'e> = (&'e str, &'e str, &'e str);

#[track_caller]
fn cli(pipe: &Pipe, command: &str) -> String {
    let printed = pipe.redeliver(&words(command));
    assert_eq!(printed.code, Some(0), "{command}: {printed:?}");
    printed.stdout
}

#[track_caller]
fn json(pipe: &Pipe, command: &str) -> Value {
    let printed = cli(pipe, &format!("{command} -o json"));
    serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {printed}"))
}

fn names(shown: &Value, (name, cause, part): Expected<'_>) -> bool {
    let is_it = |obstacle: &Value| {
        let detail = obstacle["detail"].as_str().unwrap();
        obstacle["name"] == name && obstacle["cause"] == cause && detail.contains(part)
    };
    shown["obstacles"].as_array().into_iter().flatten().any(is_it)
}

/// Waits until a command names all of these.
#[track_caller]
fn until_named(pipe: &Pipe, command: &str, expected: &[Expected<'_>]) {
    eventually(command, DEADLINE, || {
        let shown = json(pipe, command);
        let is_complete = expected.iter().all(|obstacle| names(&shown, *obstacle));
        ensure(is_complete, shown)
    });
}

fn schedule(pipe: &Pipe, app: &str, after: &str) -> String {
    let command = format!("jobs schedule --app {app} --in {after} --data 1");
    cli(pipe, &command).trim_end().to_owned()
}

#[test]
fn each_command_names_obstacles() {
    let address = || format!("127.0.0.1:{}", free_port());
    let pipe = PipeBuilder::new("obstacles")
        .tiers(&[300])
        .through_scheduler()
        .with_inspector()
        .set("scheduler.listen", &address())
        .set("dlq_inspector.listen", &address())
        .set("scheduler.apps.demo.topic", "{name}")
        .set("scheduler.apps.gone.topic", "{name}-gone")
        .set("control.topic", "{name}-control")
        .set("audit.topic", "{name}-audit")
        .behave(|_| Reply::status(503))
        .create();
    let (_scheduler, mut enricher) = (pipe.scheduler("a"), pipe.enricher("a"));
    let _inspector = pipe.start("dlq-inspector", "a", &[]);
    let pipeline = format!("pipeline/{}", pipe.name());
    let tier = format!("tier/{}/{}", pipe.name(), pipe.pipeline.policy.tiers()[0]);
    let gone = format!("{}-gone", pipe.name());
    let output = pipe.pipeline.output.clone().unwrap();
    let change = |command: &str| cli(&pipe, &format!("{command} --reason INC-17"));
    let get = |job: &str| format!("jobs get {job}");

    // A record that has failed, and whose tier is paused. No retry tier is running.
    let failed = schedule(&pipe, "demo", "1ms");
    eventually("the job waits", DEADLINE, || {
        let shown = json(&pipe, &get(&failed));
        let holds = shown["outcomes"][0]["state"] == "waiting" && shown["obstacles"].is_null();
        ensure(holds, shown)
    });
    change(&format!("pause {tier}"));
    let paused_tier = (&*tier, "paused", ": INC-17");
    until_named(&pipe, &get(&failed), &[paused_tier]);
    until_named(&pipe, "waiting ls", &[paused_tier]);
    let listed = pipe.redeliver(&["waiting", "ls"]);
    let line = format!("held up: {tier}: paused since ");
    assert!(listed.stderr.starts_with(&line), "{listed:?}");

    // Jobs in the source of a pipeline that is paused, then limited: there is one attempt in a quarter of an hour.
    change(&format!("pause {pipeline}"));
    enricher.until_ready_but("paused pipelines: ");
    let queued = [(); 3].map(|()| schedule(&pipe, "demo", "1ms"));
    for job in &queued {
        until_named(&pipe, &get(job), &[(&pipeline, "paused", ": INC-17")]);
        // Its record is in no tier.
        assert!(!names(&json(&pipe, &get(job)), paused_tier), "{job}");
    }
    let why = cli(&pipe, &format!("jobs why {}", queued[0]));
    let line = format!("\nheld up by   {pipeline}: paused since ");
    assert!(why.contains(&line) && why.contains(": INC-17\n"), "{why}");
    change(&format!("rate {pipeline} 0.001"));
    cli(&pipe, &format!("resume {pipeline}"));
    let limited = (&*pipeline, "limited", "limited to 0.001/s");
    eventually("jobs wait for the limit", DEADLINE, || {
        let shown = queued.each_ref().map(|job| json(&pipe, &get(job)));
        let holds = shown.iter().any(|job| names(job, limited));
        ensure(holds, Value::from(shown.to_vec()))
    });

    // Jobs that are not dispatched.
    change("pause app/demo");
    let paused_app = ("app/demo", "paused", ": INC-17");
    until_named(&pipe, &get(&schedule(&pipe, "demo", "1h")), &[paused_app]);
    delete_topic(&pipe.kafka.brokers, &gone);
    let missing = format!("topic {gone} does not exist");
    let missing_of_app = ("app/gone", "topic", &*missing);
    until_named(&pipe, &get(&schedule(&pipe, "gone", "1h")), &[missing_of_app]);

    delete_topic(&pipe.kafka.brokers, &output);
    let missing = format!("topic {output} does not exist");
    let missing_of_pipeline = (&*pipeline, "topic", &*missing);
    let all = [
        paused_tier,
        limited,
        missing_of_pipeline,
        paused_app,
        missing_of_app,
    ];
    until_named(&pipe, "status", &all);
    until_named(&pipe, "waiting ls", &all[..3]);
    let status = cli(&pipe, "status");
    let (_, table) = status.split_once("\nHELD UP ").unwrap();
    for (name, _, part) in all {
        let mut lines = table.lines().filter(|line| line.starts_with(name));
        assert!(lines.any(|line| line.contains(part)), "{name} {part}: {status}");
    }
}
