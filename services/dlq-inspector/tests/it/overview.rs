//! The overview of all pipelines: what it finds in Kafka and the index, who sees what, and that all callers share its surveys.

use std::sync::Arc;
use std::time::Duration;

use futures::future::{join_all, select};
use redeliver_core::{Clock as _, SystemClock};
use redeliver_proto::auth::SendToken;
use redeliver_proto::error::reason;
use redeliver_proto::v1;
use redeliver_proto::v1::ProblemKind;
use redeliver_proto::v1::overview_service_client::OverviewServiceClient;
use redeliver_testkit::{brokers, ensure, eventually_async, kafka_request};
use tokio::time::timeout;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::access::Callers;
use crate::support::{DEADLINE, InspectorEnv, dead};
use crate::waiting::waiting;

type Client = OverviewServiceClient<InterceptedService<Channel, SendToken>>;

/// How many callers watch at the same time, and how many messages each of them reads.
const WATCHERS: usize = 20;
const MESSAGES: usize = 3;

async fn get(client: &mut Client, selection: v1::OverviewSelection) -> Result<v1::Overview, Status> {
    let request = v1::GetOverviewRequest {
        selection: Some(selection),
    };
    Ok(client.get_overview(request).await?.into_inner())
}

async fn watch(client: &Client) -> Streaming<v1::Overview> {
    let request = v1::WatchOverviewRequest::default();
    client.clone().watch_overview(request).await.unwrap().into_inner()
}

async fn next(stream: &mut Streaming<v1::Overview>) -> v1::Overview {
    let message = timeout(DEADLINE, stream.message()).await.expect("an overview");
    message.unwrap().expect("the watch goes on")
}

/// The next overview for which this holds.
async fn until(stream: &mut Streaming<v1::Overview>, holds: impl Fn(&v1::Overview) -> bool) -> v1::Overview {
    let mut last = None;
    let found = timeout(DEADLINE, async {
        loop {
            let overview = next(stream).await;
            if holds(&overview) {
                return overview;
            }
            last = Some(overview);
        }
    });
    match found.await {
        Ok(found) => found,
        Err(_) => panic!("{last:#?}"),
    }
}

fn pipeline_of<'o>(overview: &'o v1::Overview, name: &str) -> &'o v1::PipelineOverview {
    let mut pipelines = overview.pipelines.iter();
    pipelines.find(|pipeline| pipeline.pipeline == name).unwrap()
}

fn kinds(overview: &v1::Overview, pipeline: &str) -> Vec<ProblemKind> {
    let problems = overview.problems.iter();
    problems
        .filter(|problem| problem.pipeline == pipeline)
        .map(v1::Problem::kind)
        .collect()
}

/// A record that is due since a time.
fn overdue(pipeline: &str) -> crate::support::Dead {
    let mut record = waiting(pipeline, 0);
    record.headers = record
        .headers
        .iter()
        .map(|(name, value)| match name {
            "process-after" => (name, Some(&b"2026-01-31T12:00:00.000Z"[..])),
            _ => (name, value),
        })
        .collect();
    record
}

/// Writes source records until it is dropped.
async fn write_records(env: &InspectorEnv, source: &Arc<str>) {
    loop {
        env.put(source, 0, vec![dead("k", "v", &[])]).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn overview_finds_what_is_wrong() {
    let scopes: [(&str, &[&str]); 3] = [
        ("all", &["*"]),
        ("orders", &["dead-letters:read:{orders}"]),
        ("jobs", &["jobs:read"]),
    ];
    let mut callers = Callers::without_dead_letters("overview", &scopes).await;
    let pipelines = [0, 1].map(|topic| callers.set_pipeline(topic));
    let (orders, people) = (&*pipelines[0], &*pipelines[1]);
    for pipeline in [orders, people] {
        for suffix in ["", "-retry-2h", "-retry-due"] {
            let topic: Arc<str> = format!("{pipeline}{suffix}").into();
            callers.env.recreate_topic(&topic, 2).await;
        }
    }
    let topic = |pipeline: &str, suffix: &str| -> Arc<str> { format!("{pipeline}{suffix}").into() };
    let (source, tier) = (topic(orders, ""), topic(orders, "-retry-2h"));
    let letter = || dead("k", "v", &[("error-class", "permanent"), ("pipeline", orders)]);
    let records = || vec![dead("k", "v", &[]); 5];
    for (topic, partition, records) in [
        (&callers.topics[0], 0, vec![letter(), letter()]),
        (&tier, 0, vec![waiting(orders, 1), waiting(orders, 2)]),
        (&tier, 1, vec![overdue(orders)]),
        (&source, 0, records()),
    ] {
        callers.env.put(topic, partition, records).await;
    }
    let mut inspector = callers.env.start().await;
    let channel = inspector.channel().await;
    let client =
        |caller: &str| OverviewServiceClient::with_interceptor(channel.clone(), callers.interceptor(caller));

    let all = client("all");
    let mut watched = watch(&all).await;
    let overview = until(&mut watched, |overview| {
        let row = pipeline_of(overview, orders);
        let letters = row.dead_letters.clone().unwrap_or_default();
        // Without controls, nothing is overdue.
        row.lag.as_ref().unwrap().records == Some(5)
            && letters.new_groups == Some(1)
            && row.run.as_ref().unwrap().paused.is_some()
    })
    .await;
    let row = pipeline_of(&overview, orders);
    assert!(row.lag.as_ref().unwrap().exact);
    assert_eq!(row.dead_letters.as_ref().unwrap().open, Some(2));
    let places = row.waiting.iter().map(|place| {
        let records = place.waiting.as_ref().unwrap().records;
        (&*place.place, records, place.overdue)
    });
    let expected = [("due", Some(0), None), ("2h", Some(3), Some(1))];
    assert_eq!(places.collect::<Vec<_>>(), expected);
    let is_past = |due: &prost_types::Timestamp| due.seconds * 1_000 < SystemClock.now().as_millis();
    assert!(row.next_due.as_ref().is_some_and(is_past));
    let expected = [ProblemKind::Overdue, ProblemKind::GroupNew];
    assert_eq!(kinds(&overview, orders), expected);
    assert!(kinds(&overview, people).is_empty());
    assert_eq!(row.breaker(), v1::BreakerState::Unspecified);

    // What arrives has a rate. Nothing is written in transactions, so that it is exact.
    callers.env.put(&source, 1, records()).await;
    let overview = until(&mut watched, |overview| {
        let row = pipeline_of(overview, orders);
        let rates = row.rates.unwrap_or_default();
        rates.received.is_some_and(|rate| rate > 0.0) && row.lag.as_ref().unwrap().records == Some(10)
    })
    .await;
    let rates = pipeline_of(&overview, orders).rates.unwrap();
    assert_eq!(
        (rates.retried, rates.dead, rates.succeeded),
        (Some(0.0), Some(0.0), None)
    );
    let of_people = pipeline_of(&overview, people).rates.unwrap();
    assert_eq!(of_people.received, Some(0.0));

    // A topic disappears.
    kafka_request::delete_topic(&brokers(), &topic(people, "-retry-due"));
    let overview = until(&mut watched, |overview| !kinds(overview, people).is_empty()).await;
    assert_eq!(kinds(&overview, people), [ProblemKind::TopicMissing]);
    assert_eq!(overview.pipelines[0].pipeline, people, "the worst one is first");

    // One caller sees one pipeline.
    let mut one = client("orders");
    let overview = get(&mut one, v1::OverviewSelection::default()).await.unwrap();
    let names: Vec<&str> = overview.pipelines.iter().map(|row| &*row.pipeline).collect();
    assert_eq!((names, overview.pipeline_count), (vec![orders], 1));
    assert!(!format!("{overview:?}").contains(people));
    let of = |pipeline: &str| v1::OverviewSelection {
        pipeline: pipeline.to_owned(),
        ..v1::OverviewSelection::default()
    };
    for refused in [
        get(&mut one, of(people)).await,
        get(&mut client("jobs"), of("")).await,
    ] {
        assert_eq!(refused.unwrap_err().code(), Code::PermissionDenied);
    }
    let mut all = all;
    let (limit, after) = (1_001, "a".to_owned());
    for (selection, expected) in [
        (of("nothing"), "PIPELINE_UNKNOWN"),
        (v1::OverviewSelection { limit, ..of("") }, "SELECTION_INVALID"),
        (v1::OverviewSelection { after, ..of("") }, "SELECTION_INVALID"),
    ] {
        let status = get(&mut all, selection).await.unwrap_err();
        assert_eq!(reason(&status).as_deref(), Some(expected));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_share_surveys() {
    let scopes: [(&str, &[&str]); 1] = [("all", &["*"])];
    let mut callers = Callers::without_dead_letters("overview-shared", &scopes).await;
    let source: Arc<str> = callers.set_pipeline(0).into();
    callers.env.recreate_topic(&source, 1).await;
    let mut inspector = callers.env.start().await;
    let surveys = |inspector: &mut crate::support::Inspector| {
        inspector.process.metric("redeliver_dlq_overview_surveys_total")
    };
    assert_eq!(surveys(&mut inspector), 0, "no caller has asked");
    let channel = inspector.channel().await;
    let client = OverviewServiceClient::with_interceptor(channel, callers.interceptor("all"));

    // This one reads nothing, and holds up no other.
    let idle = watch(&client).await;
    let watching = join_all((0..WATCHERS).map(|_| async {
        let mut stream = watch(&client).await;
        let mut numbers = Vec::new();
        for _ in 0..MESSAGES {
            numbers.push(next(&mut stream).await.survey);
        }
        assert!(numbers.is_sorted_by(|one, next| one < next), "{numbers:?}");
        numbers
    }));
    let writing = Box::pin(write_records(&callers.env, &source));
    let numbers = match select(Box::pin(watching), writing).await {
        futures::future::Either::Left((numbers, _)) => numbers.concat(),
        futures::future::Either::Right(_) => unreachable!("it writes until it is dropped"),
    };
    let count = surveys(&mut inspector);
    assert!(
        numbers.iter().all(|number| *number <= count),
        "{numbers:?} {count}"
    );
    let messages = (WATCHERS * MESSAGES) as u64;
    assert!(count < messages, "{count} surveys for {messages} messages");
    drop(idle);
    eventually_async("the watches have ended", DEADLINE, async || {
        let watchers = inspector.process.metric("redeliver_dlq_overview_watchers");
        ensure(watchers == 0, watchers)
    })
    .await;
}
