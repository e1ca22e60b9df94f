//! An upgrade under load: `helm upgrade` with a changed configuration restarts all StatefulSets at the same time. In each of
//! them, one Pod after the other restarts, from the highest ordinal down, once the one before is ready. Meanwhile, Pods with the previous
//! and with the changed configuration share the work.

use std::collections::HashMap;
use std::thread;
use std::time::Duration;

use redeliver_client::{JobProducer, JobRequest, When};
use redeliver_core::headers::{DISPATCHED_AT, JOB_ID, ReservedHeaders, SCHEDULED_TIME};
use redeliver_core::{Clock as _, HumanDuration, Record, SystemClock, Timestamp};
use redeliver_testkit::certificates::Authority;
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{ChaosPermit, LocalKafka, ServiceProcess, ensure};

use super::load::under_load;
use super::{settle, setup};
use crate::services::path;
use crate::support::{PLAN, PipeBuilder, text};

const APP: &str = "billing";
const JOBS: u64 = 1_000;
/// The jobs are due at equal intervals within this time, which is longer than the upgrade takes.
const DUE_WITHIN: Duration = Duration::from_secs(40);

/// Environment variables, which override the configuration.
type Environment<'a> = &'a [(&'a str, &'a str)];

/// Restarts the Pods of a StatefulSet.
fn roll(set: &mut [ServiceProcess], environment: Environment<'_>) {
    for pod in set.iter_mut().rev() {
        pod.shut_down();
        pod.start_again_with(environment);
        pod.until_ready();
        let (_, config) = pod.get("/config");
        let overridden = environment
            .first()
            .is_none_or(|(_, value)| config.contains(value));
        assert!(overridden, "{environment:?} is not in {config}");
    }
}

/// The time of a header in which the services write text.
fn time(record: &Record, header: &str) -> Timestamp {
    text(record, header).unwrap().unwrap().parse().unwrap()
}

/// Percentiles of how late something was. Nothing may be early.
#[track_caller]
fn report(what: &str, due_and_done: impl Iterator<Item = (Timestamp, Timestamp)>) {
    let mut late: Vec<i64> = due_and_done
        .map(|(due, done)| done.as_millis() - due.as_millis())
        .collect();
    late.sort_unstable();
    assert!(
        late.first().is_some_and(|earliest| *earliest >= 0),
        "{what}: {late:?}"
    );
    let at = |percent: usize| late[(late.len() - 1) * percent / 100];
    println!(
        "{what}: {} late by p50 {} ms, p99 {} ms, at most {} ms",
        late.len(),
        at(50),
        at(99),
        at(100)
    );
}

/// Restarts all services under load, once with each of these environments.
fn upgrade(setup: PipeBuilder, environments: &[Environment<'_>]) {
    let data = Scratch::new("inspectors").unwrap();
    let topic = format!("{}-{APP}", setup.name());
    let dead = format!("[{}-dlq]", setup.name());
    let pipe = setup
        .through_scheduler()
        .set(&format!("scheduler.apps.{APP}.topic"), &topic)
        .set("dlq_inspector.listen", "127.0.0.1:0")
        .set("dlq_inspector.topics", &dead)
        .create();
    let pair = |service: &str, set: &str, arguments: &[&str]| {
        [0, 1].map(|ordinal| {
            let instance = format!("{set}-{ordinal}");
            let data = format!("dlq_inspector.data_dir={}", path(&data.path().join(&instance)));
            pipe.start(service, &instance, &[arguments, &["--set", &data]].concat())
        })
    };
    let mut sets = vec![
        pair("scheduler", "scheduler", &[]),
        pair("dlq-inspector", "inspector", &[]),
        pair("enricher", "enricher", &[]),
    ];
    for &tier in pipe.pipeline.policy.tiers() {
        let tier = tier.to_string();
        sets.push(pair("retry-tier", &format!("tier-{tier}"), &["--tier", &tier]));
    }

    let (_, topics) = pipe.jobs.as_ref().unwrap();
    let client = JobProducer::new(&pipe.kafka, topics.ingest.clone()).unwrap();
    let first = SystemClock.now().after(Duration::from_secs(1));
    let requests: Vec<JobRequest> = (0..JOBS)
        .map(|n| {
            let wait = DUE_WITHIN.mul_f64(n as f64 / JOBS as f64);
            JobRequest::new(APP, When::At(first.after(wait))).data(n.to_string())
        })
        .collect();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let scheduling = futures::future::try_join_all(requests.iter().map(|job| client.schedule(job)));
    let ids = runtime.block_on(scheduling).unwrap();

    let sent = under_load(&pipe, 100, |load| {
        for environment in environments {
            thread::scope(|scope| {
                for set in &mut sets {
                    scope.spawn(|| roll(set, environment));
                }
            });
            load.until_ended(50);
        }
    });
    settle(&pipe, &sent, &PLAN);
    let dispatched = redeliver_testkit::eventually("all jobs are dispatched", 2 * DUE_WITHIN, || {
        let records = pipe.read(&[topic.as_str().into()]);
        ensure(records.len() >= ids.len(), records.len()).map(|()| records)
    });
    let by_id: HashMap<String, &Record> = dispatched
        .iter()
        .map(|record| (text(record, JOB_ID).unwrap().unwrap(), record))
        .collect();
    assert_eq!((dispatched.len(), by_id.len()), (ids.len(), ids.len()));
    for id in &ids {
        assert!(by_id.contains_key(&id.to_string()), "{id}");
    }
    let times = |record: &Record| (time(record, SCHEDULED_TIME), time(record, DISPATCHED_AT));
    report("jobs", dispatched.iter().map(times));
    let released = pipe.read(&[pipe.pipeline.due_topic()]);
    let longest = HumanDuration::from_secs(86_400);
    let retries = released.iter().map(|record| {
        let written = record.timestamp.unwrap();
        let due = ReservedHeaders::read(record)
            .unwrap()
            .process_after(written, longest);
        (due.unwrap(), written)
    });
    report("retries", retries);
    for pod in sets.as_flattened() {
        println!("{pod}");
        assert_eq!(usize::try_from(pod.shutdowns()).unwrap(), environments.len());
    }
}

#[test]
#[ignore = "long"]
fn upgrade_loses_and_doubles_nothing() {
    let _permit = ChaosPermit::acquire();
    upgrade(setup("upgrade"), &[&[]]);
}

/// A Kafka has a listener with TLS and passwords beside the one without. The services move to it one after the other, and back.
#[test]
#[ignore = "long"]
fn move_to_tls_loses_nothing() {
    let _permit = ChaosPermit::acquire();
    let files = Scratch::new("login").unwrap();
    let authority = Authority::new().unwrap();
    let signed = authority.sign().unwrap();
    let kafka = LocalKafka::start_secured(&signed, "redeliver", "hunter2").unwrap();
    let password = files.path().join("password");
    std::fs::write(&password, "hunter2").unwrap();
    let properties = serde_json::json!({
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "redeliver",
        "sasl.password": { "file": password },
        "ssl.ca.location": authority.write(files.path(), "ca.crt").unwrap(),
    });
    let (brokers, properties) = (kafka.secured_brokers(), properties.to_string());
    let secured = [
        ("REDELIVER__KAFKA__BROKERS", &*brokers),
        ("REDELIVER__KAFKA__PROPERTIES", &properties),
    ];
    let setup = setup("login").brokers(&kafka.brokers());
    upgrade(setup, &[&secured, &[]]);
}
