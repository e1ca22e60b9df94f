//! Recurring schedules over both protocols, with the real binary, Kafka and Redis.

use std::collections::{BTreeMap, BTreeSet};

use futures::future::try_join_all;
use redeliver_core::{Record, Timestamp};
use redeliver_proto::auth::SendToken;
use redeliver_proto::convert::{to_duration, to_timestamp};
use redeliver_proto::v1;
use redeliver_proto::v1::schedule_service_client::ScheduleServiceClient;
use redeliver_recurrence::{Definition, Gap, Misfire, Recurrence, Timing};
use redeliver_scheduler::schedules::{shard, write_preview};
use redeliver_testkit::{LocalRedis, ensure, eventually_async, http};
use reqwest::Method;
use serde_json::{Value, json};
use tonic::Code;
use tonic::transport::Channel;
use tonic_types::StatusExt as _;

use super::server::{Answer, Server, send, with_json};
use crate::env::{DEADLINE, SchedulerEnv};
use crate::index::own_redis::Raw;
use crate::recurring::EachSecond;

/// Has its next occurrence within a year, and not soon.
const YEARLY: &str = r#""cron":"0 0 1 1 *","zone":"Europe/Berlin""#;
const JOB: &str = r#""appName":"sms","jobData":{"n": 1.50}"#;

async fn client(server: &Server) -> ScheduleServiceClient<Channel> {
    ScheduleServiceClient::new(server.channel().await)
}

async fn post(server: &Server, path: &str, body: &str) -> Answer {
    server.json(Method::POST, path, body).await
}

fn every(seconds: u64) -> v1::ScheduleSpec {
    let interval = redeliver_core::HumanDuration::from_secs(seconds);
    v1::ScheduleSpec {
        timing: Some(v1::schedule_spec::Timing::Every(v1::IntervalTiming {
            interval: Some(to_duration(interval)),
            anchor: None,
        })),
        job: Some(v1::JobTemplate {
            app: "sms".into(),
            ..v1::JobTemplate::default()
        }),
        ..v1::ScheduleSpec::default()
    }
}

/// Waits for the only record of an occurrence.
async fn record_of(server: &Server, occurrence: &str) -> Record {
    eventually_async("the record of the occurrence", DEADLINE, async || {
        let mut records = tokio::task::block_in_place(|| server.records("sms"));
        records.retain(|record| super::header(record, "job-occurrence") == Some(occurrence));
        ensure(records.len() == 1, format!("{records:?}")).map(|()| records.remove(0))
    })
    .await
}

/// They share a server, whose start takes longer than all of them.
#[tokio::test(flavor = "multi_thread")]
async fn schedules_are_managed_over_both_protocols() {
    let server = Server::start();
    reject_invalid_definitions(&server).await;
    manage_over_rest(&server).await;
    manage_over_grpc(&server).await;
    write_what_was_read(&server).await;
    refuse_stale_definitions(&server).await;
    preview_clock_changes(&server).await;
    server.shut_down();
}

async fn manage_over_rest(server: &Server) {
    let definition = format!("{{\"id\":\"yearly\",{YEARLY},{JOB},\"headers\":{{\"h\":\"v\"}}}}");
    let created = post(server, "/v1/schedules", &definition).await.is(201);
    assert_eq!(created.location.as_deref(), Some("/v1/schedules/yearly"));
    // At once: a created schedule is never unknown.
    let known = server.get("/v1/schedules/yearly").await.is(200);
    assert!(known.text.contains(r#""jobData":{"n": 1.50}"#), "{known:?}");
    known.has(&[("state", "active"), ("appName", "sms")]);
    let cron =
        json!({"expression": "0 0 1 1 *", "zone": "Europe/Berlin", "gap": "shift", "overlap": "first"});
    assert_eq!(known.body["cron"], cron);
    assert!(known.text_of("nextDueTime").ends_with("-12-31T23:00:00.000Z"));
    assert_eq!(created.body["nextDueTime"], known.body["nextDueTime"]);

    let again = post(server, "/v1/schedules", &definition).await.is(200);
    assert_eq!(again.body["revision"], 1);
    let other = definition.replace("1.50", "2");
    let exists = post(server, "/v1/schedules", &other).await;
    assert_eq!(exists.body["schedule"]["revision"], 1);
    assert_eq!(exists.text_of("scheduleId"), "yearly");
    exists.problem(409, "schedule_exists", "exists with another definition");

    let paused = post(server, "/v1/schedules/yearly:pause", "{}").await.is(200);
    assert_eq!(paused.text_of("state"), "paused");
    assert_eq!(paused.body["revision"], 2);
    assert!(paused.body.get("nextDueTime").is_none());
    let again = post(server, "/v1/schedules/yearly%3Apause", "").await.is(200);
    assert_eq!(again.body["revision"], 2);
    let triggered = post(server, "/v1/schedules/yearly:trigger", "{}").await.is(200);
    let job = triggered.text_of("jobId");
    let occurrence = format!("yearly+{job}");
    let record = record_of(server, &occurrence).await;
    assert_eq!(record.value.as_deref(), Some(&br#"{"n": 1.50}"#[..]));
    let is_dispatched = |job: &Answer| job.body["state"] == "dispatched";
    let dispatched = server.get_until(&format!("/v1/jobs/{job}"), is_dispatched).await;
    assert_eq!(dispatched.text_of("occurrence"), occurrence);
    let catch_up = r#"{"catchUp":true}"#;
    let resumed = post(server, "/v1/schedules/yearly:resume", catch_up)
        .await
        .is(200);
    assert_eq!(resumed.body["skipped"], 0);
    assert_eq!(resumed.body["schedule"]["state"], "active");
    assert_eq!(resumed.body["schedule"]["revision"], 3);

    let changed = format!("{{\"every\":\"1h\",{JOB}}}");
    let put = async |query: &str| {
        let path = format!("/v1/schedules/yearly{query}");
        server.json(Method::PUT, &path, &changed).await
    };
    let stale = put("?expectedRevision=2").await;
    assert_eq!(stale.body["schedule"]["revision"], 3);
    stale.problem(409, "schedule_revised", "has revision 3");
    let updated = put("?expectedRevision=3").await.is(200);
    assert_eq!(updated.body["revision"], 4);
    assert_eq!(updated.body["every"]["interval"], "1h");
    assert_eq!(put("").await.is(200).body["revision"], 4);
    // At once: what is shown contains all changes that were answered.
    let changed = server.get("/v1/schedules/yearly").await.is(200);
    assert_eq!(changed.body["revision"], 4);
    assert_eq!(changed.body["dispatched"], 0);

    let deleted = server.delete("/v1/schedules/yearly").await.is(200);
    assert_eq!(deleted.text_of("id"), "yearly");
    for gone in [
        server.delete("/v1/schedules/yearly").await,
        put("").await,
        post(server, "/v1/schedules/yearly:trigger", "{}").await,
        server.get("/v1/schedules/yearly").await,
        server.get("/v1/schedules/yearly/preview").await,
    ] {
        assert_eq!(gone.text_of("scheduleId"), "yearly");
        gone.problem(404, "schedule_unknown", "no such schedule: yearly");
    }
}

async fn manage_over_grpc(server: &Server) {
    let mut client = client(server).await;
    let id = || "hourly".to_owned();
    let create = |seconds| v1::CreateScheduleRequest {
        id: id(),
        spec: Some(every(seconds)),
    };
    let created = client.create_schedule(create(3600)).await.unwrap().into_inner();
    assert_eq!(created.state(), v1::ScheduleState::Active);
    assert_eq!(created.revision, 1);
    client.create_schedule(create(3600)).await.unwrap();
    let exists = client.create_schedule(create(60)).await.unwrap_err();
    assert_eq!(exists.code(), Code::AlreadyExists);
    let info = exists.get_details_error_info().unwrap();
    assert_eq!(info.reason, "SCHEDULE_EXISTS");
    assert_eq!(info.metadata["schedule_id"], "hourly");
    let got = client.get_schedule(v1::GetScheduleRequest { id: id() }).await;
    assert_eq!(got.unwrap().into_inner().next_due_time, created.next_due_time);

    let paused = client.pause_schedule(v1::PauseScheduleRequest { id: id() }).await;
    assert_eq!(paused.unwrap().into_inner().state(), v1::ScheduleState::Paused);
    let trigger = v1::TriggerScheduleRequest { id: id() };
    let triggered = client.trigger_schedule(trigger).await.unwrap();
    let job = triggered.into_inner().job_id;
    record_of(server, &format!("hourly+{job}")).await;
    let resume = v1::ResumeScheduleRequest {
        id: id(),
        catch_up: false,
    };
    let resumed = client.resume_schedule(resume).await.unwrap().into_inner();
    assert_eq!(resumed.skipped, 0);
    assert_eq!(resumed.schedule.unwrap().state(), v1::ScheduleState::Active);
    let update = |expected_revision| v1::UpdateScheduleRequest {
        id: id(),
        spec: Some(every(60)),
        expected_revision: Some(expected_revision),
    };
    let stale = client.update_schedule(update(1)).await.unwrap_err();
    assert_eq!(stale.code(), Code::Aborted);
    assert!(stale.message().contains("has revision 3"), "{stale:?}");
    let updated = client.update_schedule(update(3)).await.unwrap().into_inner();
    assert_eq!(updated.revision, 4);
    let delete = || v1::DeleteScheduleRequest { id: id() };
    client.delete_schedule(delete()).await.unwrap();
    let gone = client.delete_schedule(delete()).await.unwrap_err();
    assert_eq!(gone.code(), Code::NotFound);
}

async fn reject_invalid_definitions(server: &Server) {
    let of = |fields: &str| format!("{{{fields},{JOB}}}");
    let zone = of(r#""id":"a","cron":"0 3 * * *","zone":"Europe/Berln""#);
    let ended = of(r#""id":"a","every":"60s","end":"2020-01-01T00:00:00Z""#);
    let unknown = r#"{"id":"a","every":"1h","appName":"smz","jobData":1}"#.to_owned();
    let no_app = "`appName` is `smz`, which is not an application, did you mean `sms`?";
    let (id, field) = (of(r#""id":"a b","every":"1h""#), of(r#""id":"a","evry":"1h""#));
    let evry = "unknown field `evry`, did you mean `every`?";
    for (body, status, code, says) in [
        (zone, 422, "request.cron.zone", "`cron.zone` "),
        (ended, 422, "request.end", "`end` is before the first occurrence"),
        (id, 422, "request.id", "must be 1 to 128 of the characters"),
        (unknown, 422, "request.appName", no_app),
        (field, 422, "request.unknownField", evry),
        ("[]".to_owned(), 400, "request.json", "not a JSON object"),
    ] {
        let refused = post(server, "/v1/schedules", &body).await;
        refused.problem(status, code, says);
    }
    for path in ["/v1/schedules/a:pauze", "/v1/schedules/a"] {
        post(server, path, "{}").await.problem(405, "method", "");
    }
    let misspelled = post(server, "/v1/schedules/a:resume", r#"{"catchup":true}"#).await;
    misspelled.problem(400, "request.json", "unknown field `catchup`, expected `catchUp`");
    // A form of another web page cannot send the content type.
    let form = send(server.request(Method::POST, "/v1/schedules/a:trigger")).await;
    form.problem(415, "request.contentType", "application/json");
    let got = server.get("/v1/schedules/a:pause").await;
    got.problem(405, "method", "does not support");
    let listed = server.get("/v1/schedules?pageToken=x").await;
    listed.problem(422, "request.pageToken", "is not a page token");

    let mut client = client(server).await;
    let with = |job| v1::ScheduleSpec { job, ..every(60) };
    let of_smz = v1::JobTemplate {
        app: "smz".into(),
        ..v1::JobTemplate::default()
    };
    for (spec, code, field) in [
        (every(0), Code::InvalidArgument, Some("every.interval")),
        (with(None), Code::InvalidArgument, Some("job")),
        (with(Some(of_smz)), Code::NotFound, None),
    ] {
        let request = v1::CreateScheduleRequest {
            id: "a".into(),
            spec: Some(spec),
        };
        let status = client.create_schedule(request).await.unwrap_err();
        assert_eq!(status.code(), code, "{status:?}");
        let violations = status.get_details_bad_request();
        let violations = violations.map(|details| details.field_violations[0].field.clone());
        assert_eq!(violations.as_deref(), field, "{status:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn other_applications_schedules_are_unknown() {
    let callers: [(&str, &[&str]); 4] = [
        ("all", &["jobs:*"]),
        ("sms", &["jobs:*:sms"]),
        ("reader", &["jobs:read"]),
        ("mail", &["jobs:*:mail"]),
    ];
    let (server, tokens) = Server::for_callers(callers, |builder| {
        builder.scheduler(&[("sms", "{name}-sms"), ("mail", "{name}-mail")])
    });
    let [all, sms, reader, mail] = tokens.each_ref().map(|token| token.token.as_str());
    let ask = async |token: &str, method: Method, path: &str, body: &str| {
        server.ask(token, method, path, body).await
    };
    let denied = |answer: Answer, says: &str| answer.problem(403, "permission_denied", says);
    let of_sms = format!("{{\"id\":\"own\",\"every\":\"1h\",{JOB}}}");
    let of_mail = of_sms.replace("sms", "mail");
    for token in [reader, mail] {
        let refused = ask(token, Method::POST, "/v1/schedules", &of_sms).await;
        denied(refused, "jobs:write:sms");
    }
    ask(sms, Method::POST, "/v1/schedules", &of_sms).await.is(201);
    let path = "/v1/schedules/own";
    let got = ask(reader, Method::GET, path, "").await.is(200);
    assert_eq!(got.text_of("appName"), "sms");
    let body = of_mail.replace("\"id\":\"own\",", "");
    for (method, path, body) in [
        (Method::GET, "/v1/schedules/own", ""),
        (Method::GET, "/v1/schedules/own/preview", ""),
        (Method::PUT, "/v1/schedules/own", &*body),
        (Method::DELETE, "/v1/schedules/own", ""),
        (Method::POST, "/v1/schedules/own:pause", "{}"),
        (Method::POST, "/v1/schedules/own:resume", "{}"),
        (Method::POST, "/v1/schedules/own:trigger", "{}"),
    ] {
        let unknown = ask(mail, method, path, body).await;
        unknown.problem(404, "schedule_unknown", "no such schedule");
    }
    // The id is taken, but whose schedule it is stays unknown.
    let taken = ask(mail, Method::POST, "/v1/schedules", &of_mail).await;
    assert!(taken.body.get("schedule").is_none(), "{taken:?}");
    taken.problem(409, "schedule_exists", "choose another id");
    // The previous application is not enough to move a schedule, and reading is not enough to change it.
    denied(ask(sms, Method::PUT, path, &body).await, "jobs:write:mail");
    let paused = ask(reader, Method::POST, "/v1/schedules/own:pause", "{}").await;
    denied(paused, "needs the scope jobs:write");
    ask(all, Method::PUT, path, &body).await.is(200);
    eventually_async("the new application", DEADLINE, async || {
        let of_mail = ask(mail, Method::GET, path, "").await.status.as_u16();
        let of_sms = ask(sms, Method::GET, path, "").await.status.as_u16();
        let is_moved = (of_mail, of_sms) == (200, 404);
        ensure(is_moved, format!("{of_mail} {of_sms}"))
    })
    .await;

    let list = async |token: &str, query: &str| {
        let path = format!("/v1/schedules{query}");
        ask(token, Method::GET, &path, "").await
    };
    denied(list(mail, "").await, "needs the scope jobs:read");
    let ids = |answer: Answer| {
        let schedules = answer.is(200).body["schedules"].take();
        let schedules = serde_json::from_value::<Vec<Value>>(schedules).unwrap();
        schedules.len()
    };
    assert_eq!(ids(list(mail, "?app=mail").await), 1);
    assert_eq!(ids(list(sms, "?app=sms").await), 0);
    assert_eq!(ids(list(reader, "").await), 1);
    let mut client =
        ScheduleServiceClient::with_interceptor(server.channel().await, SendToken::new(Some(sms)).unwrap());
    let get = v1::GetScheduleRequest { id: "own".into() };
    let hidden = client.get_schedule(get).await.unwrap_err();
    assert_eq!(hidden.code(), Code::NotFound);
    server.shut_down();
}

#[tokio::test(flavor = "multi_thread")]
async fn schedules_are_listed_in_pages() {
    const COUNT: usize = 12;
    let server =
        Server::start_with(|builder| builder.scheduler(&[("sms", "{name}-sms"), ("mail", "{name}-mail")]));
    let client = client(&server).await;
    let now = to_timestamp(Timestamp::from_millis(4_000_000_000_000));
    let creating = (0..COUNT).map(|number| {
        let mut client = client.clone();
        let mut spec = every(60 + number as u64);
        // None is due during this test. A few have the same due time.
        spec.start = Some(prost_types::Timestamp {
            seconds: now.seconds + 1_000_000 * (number as i64 / 5),
            nanos: 0,
        });
        if number % 4 == 0 {
            spec.job.as_mut().unwrap().app = "mail".into();
        }
        let id = format!("s-{number}");
        async move {
            let request = v1::CreateScheduleRequest {
                id: id.clone(),
                spec: Some(spec),
            };
            let created = client.create_schedule(request).await?.into_inner();
            if number % 6 == 1 {
                let pause = v1::PauseScheduleRequest { id };
                return Ok(client.pause_schedule(pause).await?.into_inner());
            }
            Ok::<_, tonic::Status>(created)
        }
    });
    let created = try_join_all(creating).await.unwrap();
    let by_id: BTreeMap<&str, &v1::Schedule> = created
        .iter()
        .map(|schedule| (schedule.id.as_str(), schedule))
        .collect();
    assert_eq!(by_id.len(), COUNT);

    let pages = async |app: &str, page_size: u32| {
        let (mut client, mut pages, mut page_token) = (client.clone(), Vec::new(), String::new());
        loop {
            let request = v1::ListSchedulesRequest {
                app: app.into(),
                page_size,
                page_token,
            };
            let page = client.list_schedules(request).await.unwrap().into_inner();
            pages.push(page.schedules);
            page_token = page.next_page_token;
            if page_token.is_empty() {
                return pages;
            }
        }
    };
    let all = pages("", 5).await;
    assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [5, 5, 2]);
    let all = all.concat();
    let ids: BTreeSet<&str> = all.iter().map(|schedule| schedule.id.as_str()).collect();
    assert_eq!(ids.len(), COUNT);
    // Those without an occurrence come last.
    let due = |schedule: &v1::Schedule| schedule.next_due_time.map_or(i64::MAX, |time| time.seconds);
    assert!(all.is_sorted_by_key(due));
    let is_paused = |schedule: &v1::Schedule| schedule.state() == v1::ScheduleState::Paused;
    assert!(all[COUNT - 2..].iter().all(is_paused));
    for schedule in &all {
        assert_eq!(schedule, by_id[schedule.id.as_str()]);
    }
    let mail = pages("mail", 2).await;
    assert_eq!(mail.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1]);
    let of_mail = all.iter().filter(|schedule| {
        let job = schedule.spec.as_ref().unwrap().job.as_ref().unwrap();
        job.app == "mail"
    });
    assert!(mail.concat().iter().eq(of_mail));
    server.shut_down();
}

async fn write_what_was_read(server: &Server) {
    let mut client = client(server).await;
    let header = |name: &str, value: Option<&'static [u8]>| v1::Header {
        name: name.into(),
        value: value.map(bytes::Bytes::from_static),
    };
    let with_data = |data: &'static [u8]| v1::ScheduleSpec {
        start: Some(to_timestamp(Timestamp::from_millis(4_000_000_000_001))),
        max_count: Some(7),
        jitter: Some(to_duration(redeliver_core::HumanDuration::from_secs(5))),
        job: Some(v1::JobTemplate {
            app: "sms".into(),
            priority: v1::Priority::Low.into(),
            data: bytes::Bytes::from_static(data),
            key: Some(bytes::Bytes::from_static(b"\xff")),
            headers: vec![
                header("h", Some(b"\xff\0")),
                header("h", None),
                header("i", Some(b"")),
            ],
            // As it is rounded.
            expire_after: Some(prost_types::Duration {
                seconds: 60,
                nanos: 1,
            }),
        }),
        ..every(3600)
    };
    for data in [&b""[..], b"\xff", b"null", b"{\"n\": 1.50}", b"{}\n"] {
        let request = v1::CreateScheduleRequest {
            id: "binary".into(),
            spec: Some(with_data(data)),
        };
        client.create_schedule(request).await.unwrap();
        let got = async || {
            let request = v1::GetScheduleRequest { id: "binary".into() };
            client.clone().get_schedule(request).await.unwrap().into_inner()
        };
        let path = "/v1/schedules/binary";
        let (before, text) = (got().await, server.get(path).await.is(200).text);
        // Nothing has changed, so the revision stays.
        let written = server.json(Method::PUT, path, &text).await.is(200);
        assert_eq!(written.body["revision"], 1, "{text}");
        assert_eq!(got().await, before, "{text}");
        server.delete(path).await.is(200);
        post(server, "/v1/schedules", &text).await.is(201);
        assert_eq!(got().await.spec, before.spec, "{text}");
        server.delete(path).await.is(200);
    }
}

async fn refuse_stale_definitions(server: &Server) {
    let path = "/v1/schedules/yearly";
    let definition = format!("{{\"id\":\"yearly\",{YEARLY},{JOB}}}");
    let with = |fields: &str| definition.replacen('{', &format!("{{{fields},"), 1);
    let put = async |body: &str| server.json(Method::PUT, path, body).await;
    // A creation has a state, and not one of another schedule.
    for state in ["paused", "finished"] {
        let body = with(&format!("\"state\":\"{state}\""));
        let refused = post(server, "/v1/schedules", &body).await;
        refused.problem(422, "request.state", "the schedule is active");
    }
    server.get(path).await.is(404);
    let copied = with(r#""state":"active","revision":7"#);
    post(server, "/v1/schedules", &copied).await.is(201);

    let change = |text: &str| text.replace("1.50", "2");
    let read = server.get(path).await.is(200).text;
    post(server, &format!("{path}:pause"), "{}").await.is(200);
    // Another caller has changed it.
    let stale = put(&change(&read)).await;
    assert_eq!(stale.body["schedule"]["revision"], 2);
    stale.problem(409, "schedule_revised", "has revision 2");
    // Without a change, nothing would be written, and it stays paused.
    for refused in [put(&read).await, post(server, "/v1/schedules", &copied).await] {
        refused.problem(422, "request.state", "the schedule is paused");
    }
    let read = server.get(path).await.is(200).text;
    // A definition does not resume it.
    for body in [
        change(&read).replace("\"paused\"", "\"active\""),
        change(&with(r#""state":"active""#)),
    ] {
        let refused = put(&body).await;
        refused.problem(422, "request.state", "the schedule is paused");
    }
    let known = server.get(path).await.is(200);
    assert_eq!((&known.body["revision"], known.text == read), (&2.into(), true));
    let written = put(&change(&read)).await.is(200);
    assert_eq!(written.body["revision"], 3);
    assert_eq!(written.text_of("state"), "paused");
    // An update whose answer was lost can be repeated.
    put(&change(&read)).await.is(200);

    post(server, &format!("{path}:resume"), "{}").await.is(200);
    let ended = put(&with(r#""end":"2020-01-01T00:00:00Z","state":"active""#)).await;
    ended.problem(422, "request.state", "the schedule is finished");
    let (expecting, third) = (format!("{path}?expectedRevision=4"), with("\"revision\":3"));
    let refused = server.json(Method::PUT, &expecting, &third).await;
    refused.problem(422, "request.revision", "but `expectedRevision` is 4");
    let refused = put(&with("\"revision\":0")).await;
    refused.problem(422, "request.revision", "the first revision is 1");
    put(&with(r#""revision":4,"state":"active""#)).await.is(200);
    server.delete(path).await.is(200);
    let unknown = put(&read).await;
    unknown.problem(404, "schedule_unknown", "no such schedule");
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_schedules_hide_no_others() {
    const DAMAGE: &str = "
        local damaged = 0
        for _, key in ipairs(redis.call('KEYS', '*:job:*')) do
          for _, id in ipairs(redis.call('HKEYS', key)) do
            if string.find(redis.call('HGET', key, id), ARGV[1], 1, true) then
              redis.call('HSET', key, id, 'damaged')
              damaged = damaged + 1
            end
          end
        end
        return damaged";
    let redis = LocalRedis::start().unwrap();
    let server = Server::start_with(|builder| builder.redis(redis.url()));
    for id in ["first", "damaged", "last"] {
        let definition = format!("{{\"id\":\"{id}\",{YEARLY},{JOB}}}");
        post(&server, "/v1/schedules", &definition).await.is(201);
        // It is in the index.
        server.get(&format!("/v1/schedules/{id}")).await.is(200);
    }
    let raw = Raw::connect(&redis.url()).await;
    let damaged = raw.call(&["EVAL", DAMAGE, "0", "damaged"]).await;
    assert_eq!(damaged.as_i64(), Some(1));
    for path in ["/v1/schedules", "/v1/schedules?app=sms", "/v1/schedules?app=mail"] {
        let list = server.get(path).await.is(200);
        let unreadable = &list.body["unreadable"];
        assert_eq!(unreadable[0]["shard"], shard("damaged", 3), "{list:?}");
        let problem = unreadable[0]["problem"].as_str().unwrap();
        assert!(problem.contains("not a schedule record"), "{problem}");
        assert_eq!(unreadable.as_array().unwrap().len(), 1);
        let schedules = list.body["schedules"].as_array().unwrap().iter();
        let ids: BTreeSet<&str> = schedules
            .map(|schedule| schedule["id"].as_str().unwrap())
            .collect();
        let expected = if path.ends_with("mail") {
            &[][..]
        } else {
            &["first", "last"]
        };
        assert!(ids.iter().eq(expected), "{list:?}");
    }
    let request = v1::ListSchedulesRequest::default();
    let listed = client(&server).await.list_schedules(request).await;
    let listed = listed.unwrap().into_inner();
    assert_eq!((listed.schedules.len(), listed.unreadable.len()), (2, 1));
    assert!(server.output().contains("invalid schedule record in the index"));
    server.shut_down();
}

async fn preview_clock_changes(server: &Server) {
    let recurrence = Recurrence::new(Definition {
        timing: Timing::Cron {
            expression: "30 2 * * *".into(),
            zone: "Europe/Berlin".into(),
            gap: Gap::Shift,
            overlap: None,
        },
        start: None,
        end: None,
        max_count: None,
        jitter: redeliver_core::HumanDuration::default(),
        misfire: Misfire::default(),
    })
    .unwrap();
    let after: Timestamp = "2027-03-26T12:00:00Z".parse().unwrap();
    let expected: Vec<_> = recurrence.preview(after, 300).iter().map(write_preview).collect();
    let shifted = &expected[1];
    assert_eq!(shifted.local_time, "2027-03-28T03:30:00+02:00[Europe/Berlin]");
    assert!(
        expected
            .iter()
            .any(|preview| preview.reason() == v1::OccurrenceReason::FirstOfOverlap)
    );

    let definition = r#""cron":"30 2 * * *","zone":"Europe/Berlin""#;
    let job = format!("{{\"id\":\"nightly\",{definition},{JOB}}}");
    post(server, "/v1/schedules", &job).await.is(201);
    let mut client = client(server).await;
    let request = v1::PreviewScheduleRequest {
        schedule: Some(v1::preview_schedule_request::Schedule::Id("nightly".into())),
        after: Some(to_timestamp(after)),
        count: 300,
    };
    let preview = client.preview_schedule(request).await.unwrap().into_inner();
    assert_eq!(preview.occurrences, expected);

    let query = "count=2&after=2027-03-26T12:00:00Z";
    let of_schedule = format!("/v1/schedules/nightly/preview?{query}");
    let of_schedule = server.get(&of_schedule).await.is(200);
    let path = format!("/v1/schedules:preview?{query}");
    let of_definition = post(server, &path, &format!("{{{definition}}}")).await.is(200);
    assert_eq!(of_schedule.body, of_definition.body);
    assert_eq!(
        of_schedule.body["occurrences"][1],
        json!({
            "nominalTime": "2027-03-28T01:30:00.000Z",
            "latestDueTime": "2027-03-28T01:30:00.000Z",
            "localTime": "2027-03-28T03:30:00+02:00[Europe/Berlin]",
            "reason": "shifted_by_gap",
            "missingLocalTime": "2027-03-28T02:30:00",
        })
    );
    let limited = format!("{{{definition},\"maxCount\":1}}");
    let limited = post(server, "/v1/schedules:preview", &limited).await.is(200);
    assert_eq!(limited.body["occurrences"].as_array().unwrap().len(), 1);
    let definition = format!("{{{definition}}}");
    let refused = post(server, "/v1/schedules:preview?count=1001", &definition).await;
    refused.problem(422, "request.count", "the maximum is 1000");
}

#[test]
fn killed_schedulers_dispatch_each_occurrence_once() {
    const SCHEDULES: usize = 6;
    const COUNT: usize = 12;
    let mut env = SchedulerEnv::new(SchedulerEnv::builder("recurring").partitions(4));
    env.test.set("kafka.session_timeout", "6s");
    let (mut schedulers, listen) = env.start_two();
    let http = env.block_on(async { http::client() });
    for number in 0..SCHEDULES {
        // However long the takeover takes, no occurrence is skipped.
        let body = format!(
            r#"{{"id":"s-{number}","every":"1s","maxCount":{COUNT},"misfire":{{"policy":"all","limit":1000}},{JOB}}}"#
        );
        let url = format!("http://{}/v1/schedules", listen[number % 2]);
        env.block_on(send(with_json(http.post(url), &body))).is(201);
    }
    let schedules = EachSecond {
        schedules: SCHEDULES,
        occurrences: COUNT,
    };
    let mut watch = env.watch();
    schedules.until(&mut watch, 3);
    schedulers[0].kill_9();
    schedules.until(&mut watch, 6);
    schedulers[0].start_again();
    schedulers[0].until_ready();
    schedulers[1].kill_9();
    schedules.until_finished(&mut watch);
    for number in 0..SCHEDULES {
        let url = format!("http://{}/v1/schedules/s-{number}", listen[0]);
        env.block_on(eventually_async("it is finished", DEADLINE, async || {
            let answer = send(http.get(&url)).await;
            let body = &answer.body;
            let holds = body["state"] == "finished" && body["dispatched"] == COUNT && body["skipped"] == 0;
            ensure(holds, answer.text)
        }));
    }
    watch.look();
    assert_eq!(watch.seen.apps.len(), SCHEDULES * COUNT);
}
