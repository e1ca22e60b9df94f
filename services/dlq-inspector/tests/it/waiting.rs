//! Waiting records: which callers see those of which pipelines, and what no caller sees.

use std::collections::BTreeSet;
use std::sync::Arc;

use redeliver_core::{Clock as _, SystemClock};
use redeliver_proto::auth::SendToken;
use redeliver_proto::error::reason;
use redeliver_proto::v1;
use redeliver_proto::v1::waiting_service_client::WaitingServiceClient;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::access::Callers;
use crate::support::{Dead, dead};

type Client = WaitingServiceClient<InterceptedService<Channel, SendToken>>;

/// In keys, values and user headers.
const SECRET: &str = "s3cret-4711";

/// A record that waits, as a worker writes it.
pub(crate) fn waiting(pipeline: &str, offset: usize) -> Dead {
    waiting_after(2, pipeline, offset)
}

fn waiting_after(attempts: usize, pipeline: &str, offset: usize) -> Dead {
    let attempts = attempts.to_string();
    let due = SystemClock.now().after(std::time::Duration::from_secs(3_600));
    let (offset, due) = (offset.to_string(), due.to_string());
    let headers = [
        ("tenant", SECRET),
        ("pipeline", pipeline),
        ("original-topic", pipeline),
        ("original-partition", "0"),
        ("original-offset", &offset),
        ("original-timestamp", "2026-01-31T12:00:00.000Z"),
        ("retry-count", &attempts),
        ("error-class", "transient"),
        ("error-code", "http.503"),
        ("error-message", "no answer for card 4711"),
        ("error-timestamp", "2026-01-31T12:00:00.000Z"),
        ("process-after", &due),
        ("return-topic", "unused"),
    ];
    dead(SECRET, SECRET, &headers)
}

fn client(callers: &Callers, channel: &Channel, caller: &str) -> Client {
    WaitingServiceClient::with_interceptor(channel.clone(), callers.interceptor(caller))
}

/// The messages of a stream, up to its end.
async fn all<T>(stream: Result<tonic::Response<Streaming<T>>, Status>) -> Result<Vec<T>, Status> {
    let mut stream = stream?.into_inner();
    let mut messages = Vec::new();
    while let Some(message) = stream.message().await? {
        messages.push(message);
    }
    Ok(messages)
}

async fn listed(client: &mut Client, pipeline: &str) -> Result<v1::WaitingRecords, Status> {
    let filter = v1::WaitingFilter {
        pipeline: pipeline.to_owned(),
        ..v1::WaitingFilter::default()
    };
    let request = v1::ListWaitingRequest {
        filter: Some(filter),
        limit: 10,
        ..v1::ListWaitingRequest::default()
    };
    let messages = all(client.list_waiting(request).await).await?;
    match messages.last().and_then(|message| message.event.clone()) {
        Some(v1::list_waiting_response::Event::Records(records)) => Ok(records),
        other => panic!("{other:?}"),
    }
}

async fn counted(client: &mut Client, filter: v1::WaitingFilter) -> Result<v1::WaitingStats, Status> {
    let request = v1::GetWaitingStatsRequest {
        filter: Some(filter),
        ..v1::GetWaitingStatsRequest::default()
    };
    let messages = all(client.get_waiting_stats(request).await).await?;
    match messages.last().and_then(|message| message.event.clone()) {
        Some(v1::get_waiting_stats_response::Event::Stats(stats)) => Ok(stats),
        other => panic!("{other:?}"),
    }
}

async fn traced(client: &mut Client, topic: &str) -> Result<Vec<v1::TraceRecordResponse>, Status> {
    let request = v1::TraceRecordRequest {
        position: Some(v1::Position {
            topic: topic.to_owned(),
            partition: 0,
            offset: 0,
        }),
        ..v1::TraceRecordRequest::default()
    };
    all(client.trace_record(request).await).await
}

#[track_caller]
fn is_denied<T: std::fmt::Debug>(result: Result<T, Status>) {
    let status = result.unwrap_err();
    let refusal = (status.code(), reason(&status));
    assert_eq!(
        refusal,
        (Code::PermissionDenied, Some("PERMISSION_DENIED".to_owned()))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn list_continues_beyond_first_page() {
    const RECORDS: usize = 1_205;
    let scopes: [(&str, &[&str]); 1] = [("all", &["dead-letters:*"])];
    let mut callers = Callers::without_dead_letters("waiting-pages", &scopes).await;
    let pipeline = callers.topics[0].strip_suffix("-dlq").unwrap().to_owned();
    let key = format!("pipelines.{pipeline}.retry");
    callers.env.base.set(&key, "{ tiers: [2h] }");
    let tier: Arc<str> = format!("{pipeline}-retry-2h").into();
    callers.env.recreate_topic(&tier, 1).await;
    let records = (0..RECORDS).map(|offset| waiting_after(offset % 7, &pipeline, offset));
    callers.env.put(&tier, 0, records.collect()).await;
    let mut inspector = callers.env.start().await;
    let channel = inspector.channel().await;
    let mut client = client(&callers, &channel, "all");
    let (mut listed, mut request) = (Vec::new(), v1::ListWaitingRequest::default());
    request.set_order(v1::WaitingOrder::Attempts);
    for limit in [1_000, 150, 55] {
        request.limit = limit;
        let messages = all(client.list_waiting(request.clone()).await).await.unwrap();
        let Some(v1::list_waiting_response::Event::Records(page)) = messages.last().unwrap().event.clone()
        else {
            panic!("{messages:?}")
        };
        assert_eq!(
            (page.records.len(), page.matching),
            (usize::try_from(limit).unwrap(), RECORDS as u64)
        );
        listed.extend(page.records);
        request.page_token = page.next_page_token;
    }
    assert_eq!(request.page_token, "");
    let attempts: Vec<u32> = listed.iter().map(|record| record.attempts).collect();
    assert!(attempts.is_sorted_by(|first, next| first >= next), "{attempts:?}");
    let offsets: BTreeSet<i64> = listed
        .iter()
        .map(|record| record.position.as_ref().unwrap().offset)
        .collect();
    assert_eq!(offsets.len(), RECORDS);

    // A token belongs to a filter and an order.
    request.limit = 1;
    let messages = all(client.list_waiting(request.clone()).await).await.unwrap();
    let Some(v1::list_waiting_response::Event::Records(page)) = messages.last().unwrap().event.clone() else {
        panic!("{messages:?}")
    };
    request.page_token = page.next_page_token;
    request.set_order(v1::WaitingOrder::Age);
    let refused = all(client.list_waiting(request.clone()).await).await.unwrap_err();
    assert_eq!(reason(&refused).as_deref(), Some("TOKEN_OF_ANOTHER_QUESTION"));
    request.order = 9;
    let refused = all(client.list_waiting(request).await).await.unwrap_err();
    assert!(refused.message().starts_with("order: must be 0"), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn scope_for_letters_shows_waiting_records() {
    let scopes: [(&str, &[&str]); 3] = [
        ("all", &["dead-letters:*"]),
        ("orders", &["dead-letters:read:{orders}"]),
        ("jobs", &["jobs:read"]),
    ];
    let mut callers = Callers::without_dead_letters("waiting", &scopes).await;
    let pipelines: Vec<String> = callers
        .topics
        .iter()
        .map(|topic| topic.strip_suffix("-dlq").unwrap().to_owned())
        .collect();
    let (orders, people) = (&*pipelines[0], &*pipelines[1]);
    for pipeline in [orders, people] {
        let key = format!("pipelines.{pipeline}.retry");
        callers.env.base.set(&key, "{ tiers: [2h] }");
    }
    let rules = r#"[{"topics": ["*-dlq"], "messages": ["[0-9]+"]}]"#;
    callers.env.base.set("dlq_inspector.masking", rules);
    for pipeline in [orders, people] {
        let tier: Arc<str> = format!("{pipeline}-retry-2h").into();
        callers.env.recreate_topic(&tier, 1).await;
        let records = vec![waiting(pipeline, 0), waiting(pipeline, 1)];
        callers.env.put(&tier, 0, records).await;
    }
    let mut inspector = callers.env.start().await;
    let channel = inspector.channel().await;

    let mut one = client(&callers, &channel, "orders");
    for pipeline in ["", orders] {
        let list = listed(&mut one, pipeline).await.unwrap();
        assert_eq!((list.matching, list.records.len()), (2, 2));
        for record in &list.records {
            let shown = (&*record.pipeline, &*record.place, &*record.error_message);
            assert_eq!(shown, (orders, "2h", "no answer for card <masked>"));
            assert_eq!((record.attempts, &*record.error_code), (2, "http.503"));
            assert_eq!((&record.key, record.key_withheld), (&None, true));
        }
        assert!(!format!("{list:?}").contains(SECRET));
    }
    is_denied(listed(&mut one, people).await);
    let of_people = v1::WaitingFilter {
        pipeline: people.to_owned(),
        ..v1::WaitingFilter::default()
    };
    is_denied(counted(&mut one, of_people.clone()).await);
    let stats = counted(&mut one, v1::WaitingFilter::default()).await.unwrap();
    let places: Vec<&str> = stats.places.iter().map(|place| &*place.pipeline).collect();
    assert_eq!((places, stats.total.unwrap().records), (vec![orders], 2));
    // Whether the other pipeline exists makes no difference.
    is_denied(listed(&mut one, "nothing").await);
    for topic in [format!("{people}-retry-2h"), people.to_owned()] {
        let status = traced(&mut one, &topic).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        let unknown = traced(&mut one, "nothing").await.unwrap_err();
        assert_eq!(
            status.message().replace(&topic, "nothing"),
            unknown.message(),
            "a topic that it does not see is as one that no pipeline has"
        );
    }
    let trace = traced(&mut one, &format!("{orders}-retry-2h")).await.unwrap();
    let shown = format!("{trace:?}");
    assert!(
        shown.contains("no answer for card <masked>") && !shown.contains(SECRET),
        "{shown}"
    );

    let mut everything = client(&callers, &channel, "all");
    let stats = counted(&mut everything, v1::WaitingFilter::default())
        .await
        .unwrap();
    assert_eq!(stats.total.unwrap().records, 4);
    let list = listed(&mut everything, people).await.unwrap();
    let record = &list.records[0];
    assert_eq!(record.error_message, "no answer for card 4711");
    assert_eq!(
        (record.key.as_deref(), record.key_withheld),
        (Some(SECRET.as_bytes()), false)
    );
    let status = listed(&mut everything, "nothing").await.unwrap_err();
    assert_eq!(reason(&status).as_deref(), Some("PIPELINE_UNKNOWN"));
    for (field, filter) in [
        (
            "place",
            v1::WaitingFilter {
                place: "soon".to_owned(),
                ..v1::WaitingFilter::default()
            },
        ),
        (
            "error_class",
            v1::WaitingFilter {
                error_class: "bad".to_owned(),
                ..v1::WaitingFilter::default()
            },
        ),
    ] {
        let status = counted(&mut everything, filter).await.unwrap_err();
        assert_eq!(reason(&status).as_deref(), Some("FILTER_INVALID"));
        assert!(status.message().starts_with(field), "{status:?}");
    }

    let metrics = inspector.metrics();
    assert!(metrics.contains("redeliver_dlq_scans 0\n"), "{metrics}");
    let scanned = metrics
        .lines()
        .find_map(|line| line.strip_prefix("redeliver_dlq_scanned_offsets_total "));
    assert!(scanned.unwrap().parse::<u64>().unwrap() > 0, "{metrics}");

    let mut denied = client(&callers, &channel, "jobs");
    is_denied(listed(&mut denied, "").await);
    is_denied(counted(&mut denied, of_people).await);
    is_denied(traced(&mut denied, orders).await);
}
