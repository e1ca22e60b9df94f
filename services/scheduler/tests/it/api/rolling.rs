//! Rolling restarts of two schedulers under load, from clients that repeat requests as is usual and have no idempotency keys.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use redeliver_proto::v1::job_service_client::JobServiceClient;
use redeliver_proto::{Message as _, v1};
use redeliver_testkit::{ensure, eventually_async, http};
use tokio::task::JoinSet;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use super::hours;
use super::server::with_json;
use crate::env::{DEADLINE, SchedulerEnv};

const CLIENTS: u32 = 16;
const PAUSE: Duration = Duration::from_millis(20);

/// The result of a request, after its repetitions.
enum Ended {
    Scheduled,
    /// The client cannot know, and does not repeat the request.
    Unknown,
}

/// A client that alternates between two servers.
#[derive(Clone)]
struct Client {
    addresses: [String; 2],
    channels: [Channel; 2],
    http: reqwest::Client,
    repetitions: Arc<AtomicU32>,
    /// The responses with the status 503, and `UNAVAILABLE` over gRPC.
    unavailable: Arc<AtomicU32>,
}

impl Client {
    fn new(addresses: [String; 2]) -> Self {
        let connect = |address: &String| Endpoint::from_shared(address.clone()).unwrap().connect_lazy();
        Self {
            channels: [connect(&addresses[0]), connect(&addresses[1])],
            addresses,
            http: http::client(),
            repetitions: Arc::default(),
            unavailable: Arc::default(),
        }
    }

    /// As in a service config with `retryableStatusCodes: [UNAVAILABLE, RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED, ABORTED]`.
    async fn schedule_over_grpc(&self, request: &str) -> Ended {
        let job = v1::JobSpec {
            app: "sms".to_owned(),
            when: Some(v1::job_spec::When::Delay(hours(1))),
            request_id: Some(request.to_owned()),
            ..v1::JobSpec::default()
        };
        for channel in self.channels.iter().cycle() {
            let ask = v1::ScheduleJobRequest {
                job: Some(job.clone()),
                no_wait: false,
            };
            match JobServiceClient::new(channel.clone()).schedule_job(ask).await {
                Ok(_) => return Ended::Scheduled,
                Err(status) => match status.code() {
                    Code::Unavailable => self.count_unavailable(),
                    Code::ResourceExhausted | Code::DeadlineExceeded | Code::Aborted => {}
                    Code::Unknown => return Ended::Unknown,
                    // Not from the server: the connection ended before the response.
                    _ if status.source().is_some() => return Ended::Unknown,
                    _ => panic!("{status:?}"),
                },
            }
            self.pause().await;
        }
        unreachable!("the servers are tried in turn");
    }

    /// As usual libraries do: connections that cannot be established, 408, 425, 429, and all statuses from 500 on.
    async fn schedule_over_rest(&self, request: &str) -> Ended {
        let body = format!(r#"{{"appName":"sms","delay":"1h","requestId":"{request}","jobData":1}}"#);
        for address in self.addresses.iter().cycle() {
            let post = self.http.post(format!("{address}/v1/jobs"));
            match with_json(post, &body).send().await {
                Ok(response) => match response.status().as_u16() {
                    201 => return Ended::Scheduled,
                    503 => self.count_unavailable(),
                    408 | 425 | 429 | 500.. => {}
                    424 => return Ended::Unknown,
                    _ => panic!("{response:?}"),
                },
                Err(error) if error.is_connect() => {}
                // The connection was closed when it was idle, as after any response.
                Err(_) => return Ended::Unknown,
            }
            self.pause().await;
        }
        unreachable!("the servers are tried in turn");
    }

    fn count_unavailable(&self) {
        self.unavailable.fetch_add(1, Ordering::Relaxed);
    }

    async fn pause(&self) {
        self.repetitions.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(PAUSE).await;
    }
}

#[test]
fn rolling_restart_doubles_no_job() {
    restart_under_load("rolling", 1);
}

#[test]
#[ignore = "long"]
fn twenty_rolling_restarts_double_no_job() {
    restart_under_load("rolling-20", 20);
}

/// Restarts two schedulers one after the other, several times, and checks the jobs of clients that repeat requests meanwhile.
fn restart_under_load(name: &str, passes: u32) {
    let mut env = SchedulerEnv::new(SchedulerEnv::builder(name).partitions(4));
    env.test.set("kafka.session_timeout", "6s");
    let (mut schedulers, listen) = env.start_two();
    let client = env.block_on(async { Client::new(listen.map(|listen| format!("http://{listen}"))) });
    let stop = Arc::new(AtomicBool::new(false));
    let count = Arc::new(AtomicU32::new(0));
    let load = env.spawn_task({
        let (client, stop, count) = (client.clone(), stop.clone(), count.clone());
        async move {
            let mut clients = JoinSet::new();
            for number in 0..CLIENTS {
                let (client, stop, count) = (client.clone(), stop.clone(), count.clone());
                clients.spawn(async move {
                    let mut ended = Vec::new();
                    while !stop.load(Ordering::Relaxed) {
                        let request = format!("{number}-{}", ended.len());
                        let result = if number % 2 == 0 {
                            client.schedule_over_grpc(&request).await
                        } else {
                            client.schedule_over_rest(&request).await
                        };
                        count.fetch_add(1, Ordering::Relaxed);
                        ended.push((request, result));
                    }
                    ended
                });
            }
            clients.join_all().await.into_iter().flatten().collect::<Vec<_>>()
        }
    });
    let until_more = || {
        let before = count.load(Ordering::Relaxed);
        env.block_on(eventually_async("more are scheduled", DEADLINE, async || {
            let now = count.load(Ordering::Relaxed);
            ensure(now >= before + 4 * CLIENTS, now - before)
        }));
    };
    for pass in 1..=passes {
        let before = client.repetitions.load(Ordering::Relaxed);
        for scheduler in &mut schedulers {
            until_more();
            scheduler.restart();
        }
        let repetitions = client.repetitions.load(Ordering::Relaxed) - before;
        assert!(
            repetitions > 0,
            "no request was repeated in pass {pass}, so this proves nothing"
        );
    }
    until_more();
    stop.store(true, Ordering::Relaxed);
    let ended = env.block_on(load).unwrap();

    let mut watch = env.watch();
    watch.look_at_state();
    let mut jobs: BTreeMap<String, BTreeSet<_>> = BTreeMap::new();
    for record in &watch.seen.state {
        let job = v1::JobRecord::decode(record.value.clone().unwrap()).unwrap();
        jobs.entry(job.request_id).or_default().insert(record.key.clone());
    }
    let doubled: Vec<_> = jobs.iter().filter(|(_, ids)| ids.len() > 1).collect();
    let unknown = ended
        .iter()
        .filter(|(_, result)| matches!(result, Ended::Unknown));
    println!(
        "{passes} restarts of each scheduler: {} requests, {} repetitions, {} times 503 or UNAVAILABLE, {} of unknown outcome; {} jobs",
        ended.len(),
        client.repetitions.load(Ordering::Relaxed),
        client.unavailable.load(Ordering::Relaxed),
        unknown.count(),
        jobs.len(),
    );
    assert!(doubled.is_empty(), "{doubled:?}");
    for (request, result) in &ended {
        if matches!(result, Ended::Scheduled) {
            assert!(jobs.contains_key(request), "{request} is lost");
        }
    }
}
