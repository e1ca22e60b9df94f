//! An index that lacks records of the state topic: answers that depend on them are refused.

use std::time::Duration;

use redeliver_core::{JobId, Timestamp};
use redeliver_scheduler::job::{Job, Kind};
use redeliver_scheduler::schedules::shard;
use reqwest::Method;
use tokio::task::JoinSet;

use super::server::{Server, answer_to};
use super::state_records::{state_record, waiting_job};
use crate::requests::in_millis;

/// The number of librdkafka clients of the process.
fn kafka_clients(server: &mut Server) -> usize {
    let threads = format!("/proc/{}/task", server.process().process().id().number());
    let names = std::fs::read_dir(threads).unwrap().filter_map(|thread| {
        // A thread may have ended meanwhile.
        std::fs::read_to_string(thread.ok()?.path().join("comm")).ok()
    });
    names.filter(|name| name.trim() == "rdk:main").count()
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_need_a_complete_index() {
    const REQUESTS: usize = 40;
    let mut server = Server::start();
    // One schedule is in the shard whose index will stay behind, and one is not.
    let id = |is_behind| {
        let mut names = (0..).map(|number| format!("s{number}"));
        names.find(|id| (shard(id, 3) == 0) == is_behind).unwrap()
    };
    let (behind, other) = (id(true), id(false));
    for id in [&behind, &other] {
        let definition = format!(r#"{{"id":"{id}","cron":"0 0 1 1 *","appName":"sms","jobData":1}}"#);
        let created = server.json(Method::POST, "/v1/schedules", &definition).await;
        created.is(201);
    }
    // Another program writes a record that no index contains.
    let old = |offset| JobId::new(Timestamp::from_millis(1_763_722_800_000), 0, offset);
    let long_wait = Job {
        kind: Kind::LongWait,
        ..waiting_job(&server, old(1_000), "crawl", in_millis(3_600_000))
    };
    server.write(&[state_record(&server, &long_wait)]).await;
    let unknown = (0..REQUESTS).map(|number| format!("/v1/jobs/{}", old(i64::try_from(number).unwrap())));
    let paths = [
        "/v1/jobs".to_owned(),
        "/v1/jobs?app=sms".to_owned(),
        "/v1/stats".to_owned(),
        format!("/v1/schedules/{behind}"),
        format!("/v1/schedules/{behind}/preview"),
    ];
    let before = kafka_clients(&mut server);
    let mut asked = JoinSet::new();
    for path in unknown.chain(paths) {
        asked.spawn(answer_to(server.request(Method::GET, &path)));
    }
    let mut most = before;
    loop {
        most = most.max(kafka_clients(&mut server));
        match tokio::time::timeout(Duration::from_millis(5), asked.join_next()).await {
            Ok(Some(answer)) => {
                let answer = answer.unwrap();
                assert_eq!(answer.retry_after.as_deref(), Some("1"));
                answer.problem(503, "index_incomplete", "being rebuilt");
            }
            Ok(None) => break,
            // None has ended meanwhile.
            Err(_) => {}
        }
    }
    assert!(before > 0);
    // The requests share a reader, which has two clients. After an error, another one replaces it while it is being closed.
    assert!(
        most <= before + 4,
        "{most} clients of Kafka, {before} of them before the requests"
    );
    server.get(&format!("/v1/schedules/{other}")).await.is(200);

    tokio::task::block_in_place(|| server.restart(|_| {}));
    tokio::task::block_in_place(|| server.process().until_ready());
    let list = server.get("/v1/jobs?app=crawl").await.is(200);
    let jobs = list.body["jobs"].as_array().unwrap();
    assert_eq!(jobs.len(), 1, "{list:?}");
    assert_eq!(
        (&jobs[0]["appName"], &jobs[0]["longWait"]),
        (&"crawl".into(), &true.into())
    );
    let stats = server.get("/v1/stats?app=crawl").await.is(200);
    assert_eq!(stats.body["scheduled"], 1);
    // It belongs to its pipeline.
    server
        .get(&format!("/v1/jobs/{}", long_wait.id))
        .await
        .problem(404, "job_unknown", "no such job");
}
