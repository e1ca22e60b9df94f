//! Waiting records: which callers see those of which pipelines, and what no caller sees.

use std::collections::BTreeSet;
use std::sync::Arc;

use redeliver_core::{Clock as _, SystemClock};
use redeliver_proto::auth::SendToken;
use redeliver_proto::error::reason;
use redeliver_proto::v1;
use redeliver_proto::v1::find_records_request::By;
use redeliver_proto::v1::waiting_service_client::WaitingServiceClient;
use redeliver_testkit::{ensure, eventually_async};
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::access::Callers;
use crate::support::{DEADLINE, Dead, assert_refused, dead};

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
    page(client, &request).await
}

async fn page(client: &mut Client, request: &v1::ListWaitingRequest) -> Result<v1::WaitingRecords, Status> {
    let messages = all(client.list_waiting(request.clone()).await).await?;
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
    assert_refused(&status, Code::PermissionDenied, "PERMISSION_DENIED");
}

#[tokio::test(flavor = "multi_thread")]
async fn list_continues_beyond_first_page() {
    const RECORDS: usize = 1_205;
    let scopes: [(&str, &[&str]); 1] = [("all", &["dead-letters:*"])];
    let mut callers = Callers::without_dead_letters("waiting-pages", &scopes).await;
    let pipeline = callers.set_pipeline(0);
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
        let page = page(&mut client, &request).await.unwrap();
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
    request.page_token = page(&mut client, &request).await.unwrap().next_page_token;
    request.set_order(v1::WaitingOrder::Age);
    let refused = page(&mut client, &request).await.unwrap_err();
    assert_eq!(reason(&refused).as_deref(), Some("TOKEN_OF_ANOTHER_QUESTION"));
    request.order = 9;
    let refused = page(&mut client, &request).await.unwrap_err();
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
    let pipelines = [0, 1].map(|topic| callers.set_pipeline(topic));
    let (orders, people) = (&*pipelines[0], &*pipelines[1]);
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
    let filter = |place: &str, error_class: &str| v1::WaitingFilter {
        place: place.to_owned(),
        error_class: error_class.to_owned(),
        ..v1::WaitingFilter::default()
    };
    for (field, filter) in [("place", filter("soon", "")), ("error_class", filter("", "bad"))] {
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

/// The copy of a record of the pipeline that entered it at this offset.
fn copy(pipeline: &str, key: &str, value: &str, offset: &str) -> Dead {
    let headers = [
        ("tenant", SECRET),
        ("pipeline", pipeline),
        ("error-class", "permanent"),
        ("original-topic", pipeline),
        ("original-partition", "0"),
        ("original-offset", offset),
        ("retry-count", "1"),
    ];
    dead(key, value.to_owned(), &headers)
}

async fn found(
    client: &mut Client,
    pipeline: &str,
    by: By,
    from_now: bool,
) -> Result<v1::FoundRecords, Status> {
    let in_an_hour = SystemClock.now().after(std::time::Duration::from_secs(3_600));
    let request = v1::FindRecordsRequest {
        pipeline: pipeline.to_owned(),
        since: from_now.then(|| redeliver_proto::convert::to_timestamp(in_an_hour)),
        by: Some(by),
    };
    let messages = all(client.find_records(request).await).await?;
    match messages.last().and_then(|message| message.event.clone()) {
        Some(v1::find_records_response::Event::Found(found)) => Ok(found),
        other => panic!("{other:?}"),
    }
}

/// Where the records that were found are, with the offsets of their origins.
fn places(found: &v1::FoundRecords) -> BTreeSet<(String, String, Option<i64>)> {
    let place = |record: &v1::FoundRecord| {
        let outcome = record.outcome().name().unwrap_or_default();
        let origin = record.origin.as_ref().map(|origin| origin.offset);
        (outcome, record.place.clone(), origin)
    };
    found.records.iter().map(place).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn found_record_tells_where_it_is() {
    let scopes: [(&str, &[&str]); 3] = [
        ("all", &["dead-letters:*"]),
        ("masked", &["dead-letters:read", "dead-letters:payload"]),
        ("metadata", &["dead-letters:read"]),
    ];
    let mut callers = Callers::without_dead_letters("find", &scopes).await;
    let pipelines = [0, 1].map(|topic| callers.set_pipeline(topic));
    let (orders, people) = (&*pipelines[0], &*pipelines[1]);
    let output: Arc<str> = format!("{orders}-out").into();
    let key = format!("pipelines.{orders}.output");
    callers.env.base.set(&key, &output);
    let rules = r#"[{"topics": ["*-people-dlq"], "key": true}]"#;
    callers.env.base.set("dlq_inspector.masking", rules);
    let tier = |pipeline: &str| Arc::<str>::from(format!("{pipeline}-retry-2h"));
    let in_orders = |key: &str, value: &str, offset: &str| vec![copy(orders, key, value, offset)];
    let foreign = dead("done", r#"{"id": 7.0}"#, &[("tenant", SECRET)]);
    let at_source = dead("new", r#"{"id": 7.0}"#, &[("tenant", SECRET)]);
    for (topic, records) in [
        (orders.into(), vec![at_source]),
        (tier(orders), in_orders("waits", r#"{"v": "a"}"#, "1")),
        (
            output.clone(),
            [in_orders("done", r#"{"v": "a"}"#, "2"), vec![foreign]].concat(),
        ),
        (tier(people), vec![copy(people, "waits", "{}", "9")]),
    ] {
        callers.env.recreate_topic(&topic, 1).await;
        callers.env.put(&topic, 0, records).await;
    }
    let letter = in_orders("dead", r#"{"id": 7, "v": "a"}"#, "3");
    callers.env.put(&callers.topics[0], 0, letter).await;
    let mut inspector = callers.env.start().await;
    let channel = inspector.channel().await;

    let mut client = client(&callers, &channel, "all");
    let named = |name: &str, value: &str| v1::NamedText {
        name: name.to_owned(),
        value: value.to_owned(),
    };
    let place = |outcome: &str, place: &str, origin| (outcome.to_owned(), place.to_owned(), Some(origin));
    let [new, waits] = [place("new", "source", 0), place("waits", "2h", 1)];
    let [done, dead] = [place("succeeded", "output", 2), place("dead", "dead-letters", 3)];
    let of_people = place("waits", "2h", 9);
    let by_header = || By::Header(named("tenant", SECRET));
    eventually_async("the dead letter is indexed", DEADLINE, async || {
        let by = By::Key("dead".to_owned());
        let found = found(&mut client.clone(), "", by, false).await.unwrap();
        let holds = places(&found) == BTreeSet::from([dead.clone()]);
        ensure(holds, format!("{found:?}"))
    })
    .await;
    for (by, expected) in [
        (By::Key("new".to_owned()), vec![&new]),
        (By::Key("waits".to_owned()), vec![&waits, &of_people]),
        // Without the result of somebody else.
        (By::Key("done".to_owned()), vec![&done]),
        (By::Key("DONE".to_owned()), vec![]),
        (by_header(), vec![&new, &waits, &done, &dead, &of_people]),
        // The first field is indexed, the other is not.
        (By::Field(named("/v", "a")), vec![&waits, &done, &dead]),
        (By::Field(named("/id", "70e-1")), vec![&new, &dead]),
    ] {
        let expected: BTreeSet<_> = expected.into_iter().cloned().collect();
        let found = found(&mut client, "", by.clone(), false).await.unwrap();
        assert_eq!(places(&found), expected, "{by:?} {found:?}");
        assert_eq!((found.truncated, found.gaps.len()), (false, 0), "{found:?}");
        assert!(found.searched_since.is_some() && found.completeness.is_some());
    }
    // What waits or is dead is found whatever its age, also by a field that is not indexed.
    let by_field = By::Field(named("/id", "7"));
    let recent = found(&mut client, orders, by_field, true).await.unwrap();
    assert_eq!(places(&recent), BTreeSet::from([dead.clone()]));
    let recent = found(&mut client, orders, by_header(), true).await.unwrap();
    assert_eq!(places(&recent), BTreeSet::from([waits.clone(), dead.clone()]));
    let position = recent.records.iter().find(|record| record.place == "2h");
    let position = position.unwrap().position.clone().unwrap();
    assert_eq!((&*position.topic, position.offset), (&*tier(orders), 0));
    let traced = traced(&mut client, &position.topic).await.unwrap();
    assert!(format!("{traced:?}").contains("Waits"), "{traced:?}");

    let mut client = self::client(&callers, &channel, "masked");
    let by_key = || By::Key("waits".to_owned());
    let visible = found(&mut client, "", by_key(), false).await.unwrap();
    assert_eq!(places(&visible), BTreeSet::from([waits]));
    assert!(
        visible.gaps.len() == 1 && visible.gaps[0].contains(people),
        "{visible:?}"
    );
    is_denied(found(&mut client, people, by_key(), false).await);
    let shown = found(&mut client, people, by_header(), false).await.unwrap();
    assert_eq!(places(&shown), BTreeSet::from([of_people]));
    let mut client = self::client(&callers, &channel, "metadata");
    is_denied(found(&mut client, "", by_header(), false).await);
    assert!(!inspector.process.output().contains(SECRET));
}
