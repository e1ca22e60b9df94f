//! Every record ends exactly once, where its fate says, and unchanged.

use std::sync::Arc;
use std::time::Duration;

use redeliver_core::headers::{ERROR_CODE, ERROR_MESSAGE, ERROR_RESPONSE};
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{Plan, Reply, ensure, eventually, until_seen};

use crate::services::path;
use crate::support::{DEADLINE, Draft, PipeBuilder, SERVICES, records, text};

const PLAN: Plan = Plan {
    transient_percent: 30,
    permanent_percent: 2,
    hang_per_mille: 0,
    close_per_mille: 10,
    latency: Duration::ZERO,
};

#[test]
fn records_end_once_as_planned() {
    let plan = Plan {
        hang_per_mille: 2,
        ..PLAN
    };
    // Much longer than an answer takes on a busy machine, because each call that times out is another attempt.
    let setup = PipeBuilder::new("e2e-due").pipeline("http.timeout", "10s");
    let pipe = setup.set("kafka.lanes", "2").plan(plan).create();
    let (mut enricher, _tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let sent = pipe.produce(records(1_500));
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets(&plan, &sent);
    ends.were_called(&plan, &sent, &pipe.endpoint);
    // Both lanes of the source have worked.
    let metrics = enricher.get("/metrics").1;
    let completed = metrics
        .lines()
        .filter(|line| line.starts_with("redeliver_lane_completed_total{") && !line.contains("-due\""));
    let counts: Vec<u64> = completed
        .map(|line| line.rsplit(' ').next().unwrap_or_default().parse().unwrap())
        .collect();
    assert!(
        counts.len() == 2 && counts.iter().all(|count| *count > 0),
        "{counts:?}"
    );
}

/// Retries return through the source, and the command finds what the audit of the tests finds.
#[test]
fn exhausted_record_becomes_dead_letter() {
    let setup = PipeBuilder::new("e2e-exhausted")
        .tiers(&[200])
        .pipeline("return_to", "source");
    let pipe = setup.plan(PLAN).create();
    let (_enricher, _tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let sent = pipe.produce(records(300));
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets(&PLAN, &sent);
    ends.were_called(&PLAN, &sent, &pipe.endpoint);
    let exhausted = ends.report.dead_by_class["exhausted"];
    assert!(exhausted > 20, "{}", ends.report);
    let dead = ends
        .dead()
        .find(|dead| text(dead, ERROR_CODE).unwrap().as_deref() == Some("http.503"));
    let message = text(dead.unwrap(), ERROR_MESSAGE).unwrap().unwrap();
    assert!(
        message.starts_with("gave up after 2 attempts: POST http://127.0.0.1:"),
        "{message}"
    );
    let audited = pipe.redeliver(&["audit"]);
    assert_eq!(audited.code, Some(0), "{audited:?}");
    let clean = "clean: every record is exactly once in the output, dead or waiting\n";
    assert!(audited.stdout.ends_with(clean), "{audited:?}");
    let json = pipe.redeliver(&["audit", "--output", "json"]);
    let json: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(
        (&json["source"], &json["output"]),
        (&ends.report.source.into(), &ends.report.output.into())
    );
}

#[test]
fn response_chooses_output_and_is_merged() {
    const OF_EACH: usize = 20;
    let verdict = |n: usize| ["fraud", "fine", "ignore", "unknown"][n % 4];
    let choice = "{ by: response, pointer: /verdict, topics: { fraud: '{name}-a', ignore: null }, default: '{name}-b' }";
    let pipe = PipeBuilder::new("e2e-choice")
        .output(choice)
        .pipeline("http.response", "{ merge: /meta/checked }")
        .behave(move |request| {
            let document: serde_json::Value = serde_json::from_slice(&request.body).unwrap();
            Reply::ok(format!(r#"{{"verdict":{}}}"#, document["verdict"]))
        })
        .create();
    let draft = |n: usize| {
        let value = format!(r#"{{"n":{n}.0,"verdict":"{}"}}"#, verdict(n));
        Draft::new(format!("k{n}"), value)
    };
    let _services = (pipe.enricher("a"), pipe.retry_tier("a"));
    pipe.produce((0..4 * OF_EACH).map(draft).collect());
    pipe.watch().until_ended(3 * OF_EACH, DEADLINE);
    let audited = eventually("the audit agrees", DEADLINE, || {
        let audited = pipe.redeliver(&["audit"]);
        ensure(audited.code == Some(0), format!("{audited:?}")).map(|()| audited)
    });
    let line = "clean, except that successes without a result cannot be checked";
    assert!(audited.stdout.contains(line), "{audited:?}");
    for (topic, of) in [("a", &["fraud"][..]), ("b", &["fine", "unknown"])] {
        let topic = format!("{}-{topic}", pipe.name()).as_str().into();
        let values: Vec<String> = pipe
            .read(&[topic])
            .iter()
            .map(|record| String::from_utf8(record.value.clone().unwrap().into()).unwrap())
            .collect();
        assert_eq!(values.len(), of.len() * OF_EACH);
        for n in (0..4 * OF_EACH).filter(|n| of.contains(&verdict(*n))) {
            let verdict = verdict(n);
            let merged = format!(
                r#"{{"n":{n}.0,"verdict":"{verdict}","meta":{{"checked":{{"verdict":"{verdict}"}}}}}}"#
            );
            assert!(values.contains(&merged), "{merged} {values:?}");
        }
    }
}

#[test]
fn separate_processes_share_tier() {
    // All pipelines of a broker share the consumer group of a tier, also across processes.
    let setup = |name: &str| PipeBuilder::new(name).plan(PLAN).shared_tiers(&[431, 862]);
    let pipes = ["e2e-one", "e2e-other"].map(|name| setup(name).create());
    let _running = pipes
        .each_ref()
        .map(|pipe| (pipe.enricher("a"), pipe.retry_tier("a")));
    let sent = pipes.each_ref().map(|pipe| pipe.produce(records(100)));
    for (pipe, sent) in pipes.iter().zip(&sent) {
        pipe.settle(sent, DEADLINE).meets(&PLAN, sent);
    }
}

/// I9, for all services and all outcomes.
#[test]
fn no_process_logs_payloads_or_secrets() {
    const SECRETS: [&str; 4] = ["hunter-kafka", "hunter-http", "hunter-jobs", "hunter-dlq"];
    const HELD: [&str; 3] = ["body-of-a-record", "header-of-a-record", "key-of-a-record"];
    let files = Scratch::new("secrets").unwrap();
    let [http, jobs, dlq] = ["http", "jobs", "dlq"].map(|name| {
        let file = files.path().join(name);
        std::fs::write(&file, format!("hunter-{name}\n")).unwrap();
        path(&file).to_owned()
    });
    // The endpoint echoes the request, also in failures.
    let setup = PipeBuilder::new("e2e-silent").tiers(&[200]).behave(|request| {
        assert_eq!(request.headers["authorization"], "hunter-http");
        let word = String::from_utf8_lossy(&request.body);
        let status = match word.split(' ').next_back() {
            Some("busy") => 503,
            Some("refused") => 422,
            _ => 200,
        };
        Reply::Status(status, Vec::new(), request.body.clone())
    });
    let app = format!("{}-app", setup.name());
    let pipe = setup
        .through_scheduler()
        .with_inspector()
        .pipeline("http.header_files", &format!("{{ authorization: {http} }}"))
        .set("kafka.properties.sasl.password", "hunter-kafka")
        .set("scheduler.apps.demo.topic", &app)
        .set("scheduler.token_file", &jobs)
        .set("dlq_inspector.token_file", &dlq)
        .create();
    let mut services = SERVICES.map(|name| pipe.start(name, "a", &[]));

    let draft = |end: &str| {
        let key = format!("{} {end}", HELD[2]);
        Draft::new(key, format!("{} {end}", HELD[0])).header("tenant", HELD[1].as_bytes())
    };
    // A record that a tier rejects.
    let tier = pipe.first_tier();
    pipe.produce_to(
        &tier,
        vec![draft("forged").header("process-after", HELD[1].as_bytes())],
    );
    let sent = pipe.produce(["fine", "busy", "refused"].map(draft).into());
    let ends = pipe.settle(&sent, DEADLINE);
    for failed in &sent[1..] {
        let said = text(ends.of(failed), ERROR_RESPONSE).unwrap().unwrap();
        assert_eq!(said.as_bytes(), failed.body());
    }
    // A job, and rejected requests.
    let (_, topics) = pipe.jobs.as_ref().unwrap();
    let request = |app: &str| format!(r#"{{"appName":"{app}","delay":"1s","jobData":"{}"}}"#, HELD[0]);
    let requests = [request("demo"), request("nobody"), format!("{{ {}", HELD[0])];
    pipe.produce_to(
        &topics.ingest,
        requests.map(|text| Draft::new(HELD[2], text)).into(),
    );
    for (topic, count) in [
        (Arc::from(app), 1),
        (topics.dlq.clone(), 2),
        (pipe.pipeline.dead_letter_topic(), 3),
    ] {
        let found = || pipe.read(std::slice::from_ref(&topic)).len();
        until_seen(&format!("{count} records in {topic}"), found, |&found| {
            found >= count
        });
    }

    for (service, name) in services.iter_mut().zip(SERVICES) {
        let pages = ["/config", "/metrics", "/readyz"].map(|page| service.get(page).1);
        service.shut_down();
        let output = service.output();
        assert!(
            output.contains("started") && output.contains("stopped"),
            "{name}: {output}"
        );
        for word in SECRETS.iter().chain(&HELD) {
            assert!(!output.contains(word), "{name} printed {word}:\n{output}");
            assert!(!pages.concat().contains(word), "{name} shows {word}: {pages:?}");
        }
    }
}
