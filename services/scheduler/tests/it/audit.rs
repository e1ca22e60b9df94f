//! The entries of the audit topic about changes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use redeliver_kafka::reader::TopicReader;
use redeliver_proto::auth::SendToken;
use redeliver_proto::error::reason;
use redeliver_proto::v1::control_service_client::ControlServiceClient;
use redeliver_proto::v1::job_service_client::JobServiceClient;
use redeliver_proto::v1::schedule_service_client::ScheduleServiceClient;
use redeliver_proto::{Message as _, v1};
use redeliver_service::identity::new_token;
use redeliver_testkit::ServiceProcess;
use redeliver_testkit::kafka_request::delete_topic;
use serde_json::json;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;

use crate::env::{SchedulerEnv, changed};

type Intercepted = InterceptedService<Channel, SendToken>;
type Control = ControlServiceClient<Intercepted>;

fn topic(env: &SchedulerEnv, of: &str) -> Arc<str> {
    format!("{}-{of}", env.test.name()).into()
}

/// An environment with a caller `bob`, and his token.
fn env(name: &str) -> (SchedulerEnv, String) {
    let bob = new_token().unwrap();
    let mut env = SchedulerEnv::new(SchedulerEnv::builder(name));
    let file = env.test.directory().join("tokens");
    let scopes = ["control:write", "jobs:*"];
    let tokens = json!({ "tokens": [{ "name": "bob", "sha256": bob.sha256.to_string(), "scopes": scopes }] });
    std::fs::write(&file, tokens.to_string()).unwrap();
    env.test
        .set("scheduler.auth.tokens_file", &file.display().to_string());
    (env, bob.token)
}

fn connect(env: &SchedulerEnv, scheduler: &mut ServiceProcess, token: &str) -> Control {
    let channel = env.channel(scheduler);
    ControlServiceClient::with_interceptor(channel, SendToken::new(Some(token)).unwrap())
}

/// Clients whose caller has a reason for each change.
fn clients(
    env: &SchedulerEnv,
    scheduler: &mut ServiceProcess,
    token: &str,
) -> (ScheduleServiceClient<Intercepted>, JobServiceClient<Intercepted>) {
    let channel = env.channel(scheduler);
    let send = SendToken::new(Some(token)).unwrap().with_reason("incident 42");
    (
        ScheduleServiceClient::with_interceptor(channel.clone(), send.clone()),
        JobServiceClient::with_interceptor(channel, send),
    )
}

fn nightly(data: &'static str) -> Option<v1::ScheduleSpec> {
    Some(v1::ScheduleSpec {
        timing: Some(v1::schedule_spec::Timing::Cron(v1::CronTiming {
            expression: "30 2 * * *".to_owned(),
            ..v1::CronTiming::default()
        })),
        job: Some(v1::JobTemplate {
            app: "mail".to_owned(),
            data: data.into(),
            ..v1::JobTemplate::default()
        }),
        ..v1::ScheduleSpec::default()
    })
}

fn job() -> v1::ScheduleJobRequest {
    v1::ScheduleJobRequest {
        job: Some(v1::JobSpec {
            app: "mail".to_owned(),
            when: Some(v1::job_spec::When::Delay(crate::api::hours(1))),
            ..v1::JobSpec::default()
        }),
        no_wait: false,
    }
}

fn cancel(id: &str) -> v1::CancelJobRequest {
    v1::CancelJobRequest {
        id: id.to_owned(),
        ..v1::CancelJobRequest::default()
    }
}

fn request(reason: &str) -> v1::ChangeControlRequest {
    v1::ChangeControlRequest {
        name: "app/mail".to_owned(),
        reason: reason.to_owned(),
        expected_revision: None,
    }
}

/// The entries, and the changes of the control topic by their ids.
fn written(env: &SchedulerEnv) -> (Vec<v1::AuditEntry>, BTreeMap<String, v1::ControlRecord>) {
    let mut entries = Vec::new();
    let mut reader = TopicReader::new(&env.kafka, &[topic(env, "audit")]).unwrap();
    reader
        .read_to_end(Duration::from_secs(30), |record| {
            entries.push(v1::AuditEntry::decode(record.value.unwrap()).unwrap());
        })
        .unwrap();
    let mut changes = BTreeMap::new();
    let mut reader = TopicReader::new(&env.kafka, &[topic(env, "control")]).unwrap();
    reader
        .read_to_end(Duration::from_secs(30), |record| {
            let value = v1::ControlRecord::decode(record.value.unwrap()).unwrap();
            let digits = value.change_id.iter().map(|byte| format!("{byte:02x}"));
            changes.insert(digits.collect::<String>(), value);
        })
        .unwrap();
    (entries, changes)
}

#[test]
fn changes_have_entries() {
    let (env, token) = env("audit");
    let mut scheduler = env.start("a");
    let control = connect(&env, &mut scheduler, &token);
    let (schedules, jobs) = clients(&env, &mut scheduler, &token);
    change_control(&env, control);
    change_schedules(&env, schedules);
    let (cancelled, moved) = change_jobs(&env, &jobs);
    let (entries, changes) = written(&env);
    let of = |kind: &str| -> Vec<&v1::AuditEntry> {
        let of_kind = entries.iter().filter(|entry| entry.action.starts_with(kind));
        of_kind.collect()
    };
    for entry in &entries {
        assert_eq!(&*entry.by, "token:bob");
        assert_eq!(
            (&*entry.service, &*entry.instance),
            ("scheduler", &*format!("{}-a", env.test.name()))
        );
        assert!(entry.time.is_some());
    }
    for entry in of("control.") {
        assert!(entry.target == "app/mail" && changes.contains_key(&entry.id));
    }
    check_control(&of("control."));
    check_schedules(&of("schedules."));
    check_jobs(&of("jobs."), cancelled, &moved);
}

fn change_control(env: &SchedulerEnv, mut control: Control) {
    let rate = v1::SetControlRateRequest {
        name: "app/mail".to_owned(),
        rate: Some(v1::RateLimit {
            limit: Some(v1::rate_limit::Limit::PerSecond(7.0)),
        }),
        reason: "provider is slow".to_owned(),
        expected_revision: None,
    };
    env.block_on(async {
        changed(async || control.pause_control(request("outage")).await).await;
        // Without an effect.
        changed(async || control.pause_control(request("outage")).await).await;
        let revised = v1::ChangeControlRequest {
            expected_revision: Some(9),
            ..request("late")
        };
        let refused = control.resume_control(revised).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::Aborted, "{refused:?}");
        changed(async || control.resume_control(request("works again")).await).await;
        changed(async || control.set_control_rate(rate.clone()).await).await;
        changed(async || control.reset_control(request("done")).await).await;
    });
}

fn check_control(entries: &[&v1::AuditEntry]) {
    let row = |entry: &&v1::AuditEntry| format!("{}|{}|{}", entry.action, entry.reason, entry.details);
    let found: Vec<_> = entries.iter().map(row).collect();
    let expected = [
        "control.pause|outage|revision 1: paused, rate as configured",
        "control.resume|works again|revision 2: running, rate as configured",
        "control.rate|provider is slow|revision 3: running, rate 7/s",
        "control.reset|done|revision 4: state as configured, rate as configured",
    ];
    assert_eq!(found, expected);
}

fn change_schedules(env: &SchedulerEnv, mut schedules: ScheduleServiceClient<Intercepted>) {
    let id = "nightly".to_owned();
    env.block_on(async {
        let create = v1::CreateScheduleRequest {
            id: id.clone(),
            spec: nightly("secret"),
        };
        changed(async || schedules.create_schedule(create.clone()).await).await;
        let update = |data, expected_revision| v1::UpdateScheduleRequest {
            id: id.clone(),
            spec: nightly(data),
            expected_revision: Some(expected_revision),
        };
        changed(async || schedules.update_schedule(update("", 1)).await).await;
        schedules.update_schedule(update("other", 1)).await.unwrap_err();
        let pause = v1::PauseScheduleRequest { id: id.clone() };
        changed(async || schedules.pause_schedule(pause.clone()).await).await;
        let resume = v1::ResumeScheduleRequest {
            id: id.clone(),
            catch_up: true,
        };
        changed(async || schedules.resume_schedule(resume.clone()).await).await;
        let trigger = v1::TriggerScheduleRequest { id: id.clone() };
        changed(async || schedules.trigger_schedule(trigger.clone()).await).await;
        let delete = v1::DeleteScheduleRequest { id: id.clone() };
        changed(async || schedules.delete_schedule(delete.clone()).await).await;
        schedules.delete_schedule(delete).await.unwrap_err();
    });
}

fn check_schedules(entries: &[&v1::AuditEntry]) {
    let found: Vec<_> = entries
        .iter()
        .map(|entry| (&*entry.action, &*entry.details))
        .collect();
    let definition = |data: u32| {
        format!(
            "data of {data} bytes, no key, no headers, {}",
            r#"{"appName":"mail","cron":{"expression":"30 2 * * *","zone":""}}"#
        )
    };
    let update = |data| format!("expects revision 1, {}", definition(data));
    assert_eq!(
        found,
        [
            ("schedules.create", &*definition(6)),
            ("schedules.update", &*update(0)),
            ("schedules.update", &*update(5)),
            ("schedules.update", "refused: the schedule has another revision"),
            ("schedules.pause", ""),
            ("schedules.resume", "catches up"),
            ("schedules.trigger", ""),
            ("schedules.delete", ""),
            ("schedules.delete", ""),
            ("schedules.delete", "refused: the schedule is unknown"),
        ]
    );
    for entry in entries {
        assert_eq!(entry.target, "nightly");
        assert!(entry.reason == "incident 42" || entry.details.starts_with("refused"));
    }
}

/// The ids of jobs that are cancelled, and of one that is rescheduled.
fn change_jobs(env: &SchedulerEnv, jobs: &JobServiceClient<Intercepted>) -> (Vec<String>, String) {
    let cancelled = env.block_on(async {
        let calls = (0..20).map(|_| {
            let mut jobs = jobs.clone();
            async move {
                let id = changed(async || jobs.schedule_job(job()).await).await.id;
                changed(async || jobs.cancel_job(cancel(&id)).await).await;
                id
            }
        });
        futures::future::join_all(calls).await
    });
    let moved = env.block_on(async {
        let mut jobs = jobs.clone();
        let id = changed(async || jobs.schedule_job(job()).await).await.id;
        let delay = crate::api::hours(2);
        let later = v1::RescheduleJobRequest {
            id: id.clone(),
            when: Some(v1::reschedule_job_request::When::Delay(delay)),
            ..v1::RescheduleJobRequest::default()
        };
        changed(async || jobs.reschedule_job(later.clone()).await).await;
        id
    });
    (cancelled, moved)
}

fn check_jobs(entries: &[&v1::AuditEntry], mut expected: Vec<String>, moved: &str) {
    let of = |action: &'static str| {
        entries
            .iter()
            .copied()
            .filter(move |entry| entry.action == action)
    };
    let named = |entry: &v1::AuditEntry| match entry.ids.is_empty() {
        true => vec![entry.target.clone()],
        false => entry.ids.clone(),
    };
    let mut found: Vec<String> = of("jobs.cancel").flat_map(named).collect();
    found.sort();
    expected.sort();
    assert_eq!(found, expected);
    let count: u64 = of("jobs.cancel").map(|entry| entry.count).sum();
    assert_eq!(count, 20);
    let moves: Vec<_> = of("jobs.reschedule")
        .map(|entry| (&*entry.target, &*entry.details))
        .collect();
    assert_eq!(moves, [(moved, "due after 2h")]);
    assert!(entries.iter().all(|entry| entry.reason == "incident 42"));
}

#[test]
fn nothing_changes_without_audit_topic() {
    let (env, token) = env("audit-gone");
    let mut scheduler = env.start("a");
    let (mut schedules, mut jobs) = clients(&env, &mut scheduler, &token);
    let mut control = connect(&env, &mut scheduler, &token);
    env.block_on(changed(async || control.pause_control(request("outage")).await));
    delete_topic(&env.kafka.brokers, &topic(&env, "audit"));
    env.block_on(async {
        let id = changed(async || jobs.schedule_job(job()).await).await.id;
        let refused = jobs.cancel_job(cancel(&id)).await.unwrap_err();
        assert_eq!(
            reason(&refused).as_deref(),
            Some("AUDIT_UNAVAILABLE"),
            "{refused:?}"
        );
        let create = v1::CreateScheduleRequest {
            id: "nightly".to_owned(),
            spec: nightly(""),
        };
        let refused = schedules.create_schedule(create).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::Unavailable, "{refused:?}");
        let get = v1::GetScheduleRequest {
            id: "nightly".to_owned(),
        };
        let unknown = schedules.get_schedule(get).await.unwrap_err();
        assert_eq!(unknown.code(), tonic::Code::NotFound, "{unknown:?}");
        let job = jobs.get_job(v1::GetJobRequest { id }).await.unwrap().into_inner();
        assert_eq!(job.state(), v1::JobState::Scheduled);
    });
    let refused = env
        .block_on(control.resume_control(request("works again")))
        .unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Unavailable, "{refused:?}");
    assert!(refused.message().contains("audit"), "{refused:?}");
    assert!(reason(&refused).is_some());
    let mut changes = 0;
    let mut reader = TopicReader::new(&env.kafka, &[topic(&env, "control")]).unwrap();
    reader
        .read_to_end(Duration::from_secs(30), |_| changes += 1)
        .unwrap();
    assert_eq!(changes, 1, "only the first change");
}

#[test]
fn kills_separate_no_change_from_entry() {
    let (env, token) = env("audit-kill");
    let mut scheduler = env.start("a");
    for round in 0..3_u64 {
        let mut control = connect(&env, &mut scheduler, &token);
        // Killed at another time of its changes in each round.
        let killed_after = Duration::from_millis(1_000 + 500 * round);
        env.block_on(async {
            let changes = async {
                let mut number = 0;
                loop {
                    number += 1;
                    let pause = request(&format!("{round}.{number}"));
                    changed(async || control.pause_control(pause.clone()).await).await;
                }
            };
            let ended: Result<(), _> = tokio::time::timeout(killed_after, changes).await;
            ended.unwrap_err();
        });
        scheduler.kill_and_restart();
    }
    // Ends the transactions of the processes that were killed.
    let mut control = connect(&env, &mut scheduler, &token);
    env.block_on(changed(async || control.reset_control(request("end")).await));
    let (entries, changes) = written(&env);
    let ids: Vec<&String> = entries.iter().map(|entry| &entry.id).collect();
    let distinct: std::collections::BTreeSet<&String> = ids.iter().copied().collect();
    assert!(distinct.iter().copied().eq(changes.keys()), "{distinct:?}");
    assert_eq!(ids.len(), distinct.len(), "an entry exists twice");
    assert!(changes.len() > 3, "{changes:?}");
    for entry in &entries {
        assert_eq!(entry.reason, changes[&entry.id].reason);
    }
}
