//! Pausing and limiting applications at run time.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::{Headers, Output};
use redeliver_kafka::reader::TopicReader;
use redeliver_kafka::topology::{self, Role, TopicSpec, TopologySpec};
use redeliver_proto::v1::control_service_client::ControlServiceClient;
use redeliver_proto::{Message as _, v1};
use redeliver_runtime::Config;
use redeliver_service::topics::topic_settings;
use redeliver_testkit::ServiceProcess;
use redeliver_testkit::kafka_request::{configure_topic, delete_records, delete_topic};
use tonic::transport::Channel;

use crate::env::{DEADLINE, SchedulerEnv, changed};
use crate::oracle::JobSpec;
use crate::requests::{Request, in_millis};

const PAUSED: &str = "mail";
const OTHER: &str = "sms";

fn control_topic(env: &SchedulerEnv) -> Arc<str> {
    format!("{}-control", env.test.name()).into()
}

fn connect(env: &SchedulerEnv, scheduler: &mut ServiceProcess) -> ControlServiceClient<Channel> {
    ControlServiceClient::new(env.channel(scheduler))
}

fn request(app: &str) -> v1::ChangeControlRequest {
    v1::ChangeControlRequest {
        name: format!("app/{app}"),
        reason: "test".to_owned(),
        expected_revision: None,
    }
}

fn jobs(app: &str, count: u32) -> Vec<Request> {
    let jobs = (0..count).map(|n| {
        let spec = JobSpec::new(app, format!("{app} {n}")).at(in_millis(u64::from(n) * 20));
        Request::protobuf(spec)
    });
    jobs.collect()
}

#[test]
fn pause_survives_restarts() {
    let env = SchedulerEnv::new(SchedulerEnv::builder("pause"));
    let mut schedulers = [env.start("a"), env.start("b")];
    let mut control = connect(&env, &mut schedulers[0]);
    let paused = env.block_on(changed(async || control.pause_control(request(PAUSED)).await));
    assert_eq!(paused.revision, 1);
    // Who, what and why.
    let output = schedulers[0].wait_for_output("control changed", DEADLINE);
    let line = output
        .lines()
        .find(|line| line.contains("control changed"))
        .unwrap();
    for part in ["name=app/mail", "revision=1", "by=", "reason=\"test\"", "Paused"] {
        assert!(line.contains(part), "{part}: {line}");
    }
    // It applies in the other process too.
    schedulers[1].until_ready_but(&format!("paused applications: {PAUSED}"));

    let mut sent = env.send(jobs(PAUSED, 50));
    let others = env.send(jobs(OTHER, 50));
    let mut watch = env.watch();
    watch.until_jobs_ended(others.len());
    for scheduler in &mut schedulers {
        scheduler.shut_down();
    }
    for scheduler in &mut schedulers {
        scheduler.start_again();
    }
    for scheduler in &mut schedulers {
        scheduler.until_ready_but(&format!("paused applications: {PAUSED}"));
    }
    let more = env.send(jobs(OTHER, 50));
    watch.until_jobs_ended(others.len() + more.len());
    watch.look();
    let of_paused = &env.topics.apps[PAUSED];
    assert!(
        watch
            .seen
            .apps
            .iter()
            .all(|record| record.position.topic != *of_paused)
    );

    let mut control = connect(&env, &mut schedulers[1]);
    let resumed = env.block_on(changed(async || control.resume_control(request(PAUSED)).await));
    assert_eq!(resumed.revision, 2);
    sent.extend(others);
    sent.extend(more);
    // Each exactly once.
    watch.settle(&mut sent);
}

#[test]
fn unreadable_application_stays_paused() {
    let env = SchedulerEnv::new(SchedulerEnv::builder("unreadable"));
    let mut scheduler = env.start("a");
    let mut control = connect(&env, &mut scheduler);
    env.block_on(changed(async || control.pause_control(request(PAUSED)).await));
    let name = format!("app/{PAUSED}");
    let write = |key: &str, value: Vec<u8>| {
        env.write(&[Output {
            topic: control_topic(&env),
            partition: Some(0),
            key: Some(Bytes::copy_from_slice(key.as_bytes())),
            value: Some(value.into()),
            headers: Headers::new(),
        }]);
    };
    let write_app = |format: u32, app: v1::ApplicationControl| {
        let record = v1::ControlRecord {
            revision: 2,
            format,
            desired: Some(v1::control_record::Desired::Application(app)),
            ..v1::ControlRecord::default()
        };
        write(&name, record.encode_to_vec());
    };
    write("planet/mars", b"terraform".to_vec());
    scheduler.until_ready_but("`planet/mars` is of an unknown kind, and ignored");
    // A state of a newer version.
    write_app(0, v1::ApplicationControl { state: 9, rate: None });
    let problem = "has an unknown state, and is paused until it can be read";
    scheduler.until_ready_but(&format!("`{name}` {problem}"));
    scheduler.until_ready_but(&format!("paused applications: {PAUSED}"));
    assert_eq!(scheduler.metric("redeliver_control_problems"), 2);
    let get = v1::GetControlRequest { name: name.clone() };
    let shown = env.block_on(control.get_control(get)).unwrap().into_inner();
    let Some(v1::control::Effective::EffectiveApplication(app)) = &shown.effective else {
        panic!("{shown:?}");
    };
    assert_eq!((app.state(), &*shown.problem), (v1::RunState::Paused, problem));
    assert_eq!(shown.desired, None);
    let listed = env
        .block_on(control.list_controls(v1::ListControlsRequest::default()))
        .unwrap();
    assert_eq!(listed.into_inner().controls, [shown]);
    let refused = env.block_on(control.resume_control(request(PAUSED))).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition, "{refused:?}");
    let mut sent = env.send(jobs(PAUSED, 5));
    let others = env.send(jobs(OTHER, 5));
    let mut watch = env.watch();
    watch.until_jobs_ended(others.len());
    watch.look();
    let of_paused = &env.topics.apps[PAUSED];
    let dispatched = &watch.seen.apps;
    assert!(
        dispatched
            .iter()
            .all(|record| record.position.topic != *of_paused)
    );
    // Another change is not affected.
    env.block_on(changed(async || control.pause_control(request("crawl")).await));
    env.block_on(changed(async || control.reset_control(request("crawl")).await));
    let running = v1::ApplicationControl {
        state: v1::RunState::Running.into(),
        rate: None,
    };
    // Of a newer format, and then readable.
    write_app(1_000, running);
    scheduler.until_ready_but("has a format or a field that this version does not know");
    scheduler.until_ready_but(&format!("paused applications: {PAUSED}"));
    write_app(0, running);
    sent.extend(others);
    watch.settle(&mut sent);
}

#[test]
fn change_continues_from_followed_position() {
    let env = SchedulerEnv::new(SchedulerEnv::builder("tail-control"));
    let mut scheduler = env.start("a");
    let mut control = connect(&env, &mut scheduler);
    let paused = env.block_on(changed(async || control.pause_control(request(PAUSED)).await));
    assert_eq!(paused.revision, 1);
    // Who reads the topic from its start finds no value.
    let (brokers, topic) = (&env.kafka.brokers, control_topic(&env));
    let reader = TopicReader::new(&env.kafka, std::slice::from_ref(&topic)).unwrap();
    let (_, end) = reader.topics().watermarks(&topic, 0).unwrap();
    configure_topic(brokers, &topic, &[("cleanup.policy", "delete")]);
    delete_records(brokers, &topic, 0, end);
    let resume = v1::ChangeControlRequest {
        expected_revision: Some(1),
        ..request(PAUSED)
    };
    let resumed = env.block_on(changed(async || control.resume_control(resume.clone()).await));
    assert_eq!(resumed.revision, 2);
}

#[test]
fn missing_topic_keeps_last_values() {
    let env = SchedulerEnv::new(SchedulerEnv::builder("gone-control"));
    let mut scheduler = env.start("a");
    let mut control = connect(&env, &mut scheduler);
    env.block_on(changed(async || control.pause_control(request(PAUSED)).await));
    let mut sent = env.send(jobs(PAUSED, 5));
    env.watch().until_known(sent.len());
    let topic = control_topic(&env);
    delete_topic(&env.kafka.brokers, &topic);
    scheduler.until_ready_but("the control topic cannot be read, so what it contained last applies");
    assert_eq!(scheduler.metric("redeliver_control_readable"), 0);
    scheduler.until_ready_but(&format!("paused applications: {PAUSED}"));
    let unavailable = env.block_on(control.pause_control(request(OTHER))).unwrap_err();
    assert_eq!(unavailable.code(), tonic::Code::Unavailable, "{unavailable:?}");
    env.block_on(async {
        let settings = topic_settings(&Config::default());
        let spec = TopicSpec::of_one_partition(&*topic, Role::Documents, "controls", &settings);
        let spec = TopologySpec::of([spec]);
        topology::apply(&env.kafka.client(), &spec, DEADLINE)
            .await
            .unwrap();
    });
    let gone = "control override lost; using configuration";
    scheduler.wait_for_output(gone, DEADLINE);
    env.watch().settle(&mut sent);
    let mut reader = TopicReader::new(&env.kafka, &[topic]).unwrap();
    let mut records = 0;
    reader
        .read_to_end(Duration::from_secs(30), |_| records += 1)
        .unwrap();
    assert_eq!(records, 0);
}
