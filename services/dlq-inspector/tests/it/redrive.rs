//! Redrives, discards and restores: each dead letter once, whatever is killed.

pub(crate) mod edit;
mod omitted;
mod uncopied;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::pipeline::retry_tier_group;
use redeliver_core::route::reject;
use redeliver_core::{
    Clock as _, Failure, Headers, HumanDuration, Output, Pipeline, Position, Record, SystemClock, Timestamp,
    redrive,
};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::groups::{self, CommittedOffset, GroupOffsets};
use redeliver_kafka::reader::{ReadError, TopicReader};
use redeliver_kafka::survey::Surveyor;
use redeliver_proto::auth::SendToken;
use redeliver_proto::convert::{to_duration, to_headers, to_timestamp};
use redeliver_proto::v1::redrive_service_client::RedriveServiceClient;
use redeliver_proto::{Message as _, error, long_wait, v1};
use redeliver_testkit::kafka_request::{delete_records, delete_topic};
use redeliver_testkit::{LocalKafka, brokers, ensure, eventually_async, record_at};
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use crate::completeness::{AUTHORIZER, allow_again, allow_all, deny};
use crate::group_states::changed;
use crate::support::{self, DEADLINE, Dead, Inspector, InspectorEnv, Sending, dead, get_letter, get_payload};

/// A pipeline with its topics, and an inspector that knows it.
pub(crate) struct World {
    pub(crate) env: InspectorEnv,
    pipeline: Pipeline,
    pub(crate) dlq: Arc<str>,
    pub(crate) due: Arc<str>,
    worker: Option<Worker>,
}

/// Completes what is in a topic at once. Ends when it is dropped.
struct Worker(Arc<AtomicBool>);

impl Worker {
    fn start(kafka: &KafkaSettings, group: String, topic: &Arc<str>) -> Self {
        let (kafka, topic, stop) = (kafka.clone(), topic.clone(), Arc::new(AtomicBool::new(false)));
        let stopped = stop.clone();
        std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                // Brokers may be down.
                drop(complete(&kafka, &group, &topic));
                std::thread::park_timeout(Duration::from_millis(500));
            }
        });
        Self(stop)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Commits the ends of a topic for a group.
fn complete(kafka: &KafkaSettings, group: &str, topic: &Arc<str>) -> Result<(), ReadError> {
    let mut offsets = GroupOffsets::new();
    for found in Surveyor::new(kafka)?.topics(|name| *name == **topic)? {
        for (partition, extent) in (0..).zip(found.partitions) {
            let offset = extent.map_or(0, |extent| extent.end);
            offsets.insert((topic.to_string(), partition), CommittedOffset::new(offset, ""));
        }
    }
    groups::commit(kafka, group, &offsets)
}

impl World {
    /// With a worker.
    pub(crate) async fn new(name: &str, settings: &str) -> Self {
        Self::on(name, settings, &brokers()).await
    }

    pub(crate) async fn on(name: &str, settings: &str, brokers: &str) -> Self {
        let mut world = Self::without_worker(name, settings, brokers).await;
        let group = world.pipeline.worker_group("");
        world.worker = Some(Worker::start(&world.env.kafka, group, &world.due));
        world
    }

    async fn without_worker(name: &str, settings: &str, brokers: &str) -> Self {
        let yaml = format!("pipelines:\n  {{name}}-p:\n    output: {{name}}-out\n{settings}");
        let env = InspectorEnv::with_yaml_on(name, &yaml, brokers);
        let pipeline = Pipeline::new(&format!("{}-p", env.base.name()));
        let (dlq, due) = (pipeline.dead_letter_topic(), pipeline.due_topic());
        env.recreate_topic(&dlq, 2).await;
        env.recreate_topic(&due, 2).await;
        Self {
            env,
            pipeline,
            dlq,
            due,
            worker: None,
        }
    }

    /// Two inspectors with data directories of their own, which answer.
    pub(crate) async fn start_two(&mut self) -> Vec<Inspector> {
        let mut inspectors = Vec::new();
        for instance in ["a", "b"] {
            self.env.use_data_dir(instance);
            inspectors.push(self.env.spawn());
        }
        for inspector in &mut inspectors {
            inspector.until_serving().await;
            inspector.until_jobs_read().await;
        }
        inspectors
    }

    /// The dead letter of a record of the pipeline at this offset.
    pub(crate) fn dead(&self, offset: i64, value: Option<&[u8]>, headers: Headers) -> Dead {
        let record = Record {
            timestamp: Some(Timestamp::from_millis(1_700_000_000_000)),
            key: Some(Bytes::from(offset.to_string())),
            value: value.map(Bytes::copy_from_slice),
            headers,
            ..record_at(&self.pipeline.source, 0, offset)
        };
        let failure = Failure::permanent("test", "refused");
        reject(&self.pipeline, &record, &failure, Timestamp::from_millis(1)).into()
    }

    /// Writes dead letters of the offsets up to this one.
    pub(crate) async fn put(&self, count: i64) {
        let mut partitions = [Vec::new(), Vec::new()];
        for offset in 0..count {
            let value = format!("value {offset}");
            let dead = self.dead(offset, Some(value.as_bytes()), Headers::new());
            partitions[usize::try_from(offset % 2).unwrap()].push(dead);
        }
        for (partition, letters) in (0..).zip(partitions) {
            self.env.put(&self.dlq, partition, letters).await;
        }
    }

    /// What is in the due topic.
    pub(crate) fn redriven(&self) -> Vec<Record> {
        read(&self.env, &self.due)
    }

    /// What is in the due topic once it has this many records.
    pub(crate) async fn until_redriven(&self, count: usize) -> Vec<Record> {
        eventually_async("records are redriven", DEADLINE, async || {
            let redriven = self.redriven();
            ensure(redriven.len() >= count, redriven.len()).map(|()| redriven)
        })
        .await
    }

    /// The entries of the audit log for a job.
    fn audited(&self, id: &str) -> Vec<v1::AuditEntry> {
        audited(&self.env, id)
    }
}

/// The audit entries about a job.
fn audited(env: &InspectorEnv, id: &str) -> Vec<v1::AuditEntry> {
    let topic = format!("{}-audit", env.base.name());
    let entries = read(env, &topic.into());
    let entries = entries
        .iter()
        .map(|record| v1::AuditEntry::decode(record.value.clone().unwrap()).unwrap());
    entries.filter(|entry| entry.target == id).collect()
}

pub(crate) fn read(env: &InspectorEnv, topic: &Arc<str>) -> Vec<Record> {
    let mut records = Vec::new();
    let mut reader = TopicReader::new(&env.kafka, std::slice::from_ref(topic)).unwrap();
    reader
        .read_to_end(DEADLINE, |record| records.push(record))
        .unwrap();
    records
}

/// How long a job waits for what comes back.
pub(crate) fn observe(seconds: u64) -> prost_types::Duration {
    to_duration(HumanDuration::from_secs(seconds))
}

pub(crate) fn plan(kind: v1::RedriveKind, filter: &str) -> v1::PlanRedriveRequest {
    v1::PlanRedriveRequest {
        kind: kind.into(),
        filter: filter.to_owned(),
        all: filter.is_empty(),
        all_at_once: true,
        observe: Some(observe(0)),
        reason: "fixed".to_owned(),
        ..v1::PlanRedriveRequest::default()
    }
}

/// A plan to redrive everything at this rate.
pub(crate) fn slowly(rate_per_second: u32) -> v1::PlanRedriveRequest {
    v1::PlanRedriveRequest {
        rate_per_second,
        ..plan(v1::RedriveKind::Redrive, "")
    }
}

pub(crate) fn change(id: &str) -> v1::ChangeRedriveRequest {
    v1::ChangeRedriveRequest {
        id: id.to_owned(),
        ..v1::ChangeRedriveRequest::default()
    }
}

pub(crate) async fn client(inspector: &mut Inspector) -> RedriveServiceClient<Channel> {
    RedriveServiceClient::new(inspector.channel().await).max_decoding_message_size(64 << 20)
}

pub(crate) async fn planned(
    inspector: &mut Inspector,
    request: v1::PlanRedriveRequest,
) -> Result<v1::Redrive, Status> {
    let planned = taken(async || client(inspector).await.plan_redrive(request.clone()).await).await;
    planned.map(Response::into_inner)
}

/// The answer to a change, once Kafka takes it.
pub(crate) async fn taken<T>(mut change: impl AsyncFnMut() -> Result<T, Status>) -> Result<T, Status> {
    eventually_async("Kafka takes the change", DEADLINE, async || {
        match change().await {
            // As on a broker that is still loading its transactions. Nothing was written.
            Err(status) if error::reason(&status).as_deref() == Some("KAFKA_UNAVAILABLE") => Err(status),
            answer => Ok(answer),
        }
    })
    .await
}

/// Plans a job, once the inspector knows all of its dead letters.
pub(crate) async fn planned_of(
    inspector: &mut Inspector,
    request: &v1::PlanRedriveRequest,
    total: u32,
) -> v1::Redrive {
    eventually_async("the plan", DEADLINE * 3, async || {
        let job = planned(inspector, request.clone()).await;
        match job.map_err(|status| status.to_string())? {
            job if job.total == total => Ok(job),
            job => Err(job.total.to_string()),
        }
    })
    .await
}

/// Does what a request plans.
pub(crate) async fn done(inspector: &mut Inspector, request: v1::PlanRedriveRequest) -> v1::Redrive {
    let job = planned(inspector, request).await.unwrap();
    start(inspector, &job.id).await;
    until(inspector, &job.id, &ENDED).await
}

/// Another job for what a job has not done.
fn retry_of(id: &str) -> v1::PlanRedriveRequest {
    v1::PlanRedriveRequest {
        all: false,
        retry_of: id.to_owned(),
        ..plan(v1::RedriveKind::Redrive, "")
    }
}

pub(crate) async fn start(inspector: &mut Inspector, id: &str) -> v1::Redrive {
    start_as(inspector, change(id)).await
}

pub(crate) async fn start_as(inspector: &mut Inspector, request: v1::ChangeRedriveRequest) -> v1::Redrive {
    // An inspector that has just started has not read the jobs yet.
    changed(async || client(inspector).await.start_redrive(request.clone()).await).await
}

async fn pause(inspector: &mut Inspector, id: &str) -> v1::Redrive {
    changed(async || client(inspector).await.pause_redrive(change(id)).await).await
}

async fn resume(inspector: &mut Inspector, id: &str) -> v1::Redrive {
    changed(async || client(inspector).await.resume_redrive(change(id)).await).await
}

async fn cancel(inspector: &mut Inspector, id: &str) -> v1::Redrive {
    changed(async || client(inspector).await.cancel_redrive(change(id)).await).await
}

pub(crate) async fn get(inspector: &mut Inspector, id: &str) -> Result<v1::Redrive, Status> {
    let request = v1::GetRedriveRequest { id: id.to_owned() };
    let answer = client(inspector).await.get_redrive(request).await?;
    Ok(answer.into_inner())
}

/// What a job would write.
pub(crate) async fn preview(inspector: &mut Inspector, id: &str) -> Vec<v1::RedriveSample> {
    let request = v1::GetRedriveRequest { id: id.to_owned() };
    let preview = client(inspector).await.get_redrive_preview(request).await;
    preview.unwrap().into_inner().samples
}

/// A record was written with the headers of its preview. Only the time of the redrive differs.
#[track_caller]
pub(crate) fn assert_previewed(sample: &v1::RedriveSample, record: &Record) {
    assert_eq!(sample.outcome(), v1::RedriveOutcome::Done);
    let mut expected = BTreeMap::<&str, Vec<Option<&[u8]>>>::new();
    for (name, value) in record.headers.iter() {
        expected.entry(name).or_default().push(value);
    }
    let mut previewed = BTreeMap::new();
    for header in &sample.headers {
        let values = match header.kind() {
            v1::HeaderChangeKind::Kept => &header.before,
            _ => &header.after,
        };
        if !values.is_empty() {
            let values: Vec<Option<&[u8]>> = values.iter().map(|value| value.bytes.as_deref()).collect();
            previewed.insert(header.name.as_str(), values);
        }
    }
    assert!(previewed.remove("redrive-time").is_some() && expected.remove("redrive-time").is_some());
    assert_eq!(previewed, expected);
}

#[track_caller]
fn change_of(sample: &v1::RedriveSample, name: &str) -> v1::HeaderChangeKind {
    let header = sample.headers.iter().find(|header| header.name == name);
    header.unwrap_or_else(|| panic!("{name}: {sample:?}")).kind()
}

pub(crate) async fn until(inspector: &mut Inspector, id: &str, states: &[v1::RedriveState]) -> v1::Redrive {
    eventually_async("the state of the redrive", DEADLINE * 3, async || {
        let job = get(inspector, id).await.map_err(|status| status.to_string())?;
        let sum = job.done + job.failed + job.skipped + job.pending;
        assert_eq!(sum, job.total, "{job:?}");
        let holds = states.contains(&job.state());
        ensure(holds, format!("{job:?}\n{}", inspector.process.output())).map(|()| job)
    })
    .await
}

pub(crate) const ENDED: [v1::RedriveState; 3] = [
    v1::RedriveState::Succeeded,
    v1::RedriveState::PartiallySucceeded,
    v1::RedriveState::Failed,
];

pub(crate) async fn outcomes(inspector: &mut Inspector, id: &str) -> Vec<v1::RedriveOutcome> {
    let items = items(inspector, id).await;
    items.iter().map(v1::RedriveItem::outcome).collect()
}

pub(crate) async fn items(inspector: &mut Inspector, id: &str) -> Vec<v1::RedriveItem> {
    let (mut items, mut token) = (Vec::new(), String::new());
    loop {
        let request = v1::ListRedriveItemsRequest {
            id: id.to_owned(),
            page_size: 700,
            page_token: token,
        };
        let page = client(inspector).await.list_redrive_items(request).await;
        let page = page.unwrap().into_inner();
        items.extend(page.items);
        token = page.next_page_token;
        if token.is_empty() {
            return items;
        }
    }
}

/// The dead letters of records that have failed again.
pub(crate) fn died(records: &[Record]) -> Vec<Dead> {
    records.iter().cloned().map(Dead::from).collect()
}

/// Where the record of an item was written.
fn written(item: &v1::RedriveItem) -> Position {
    let written = item.written.as_ref().expect("a position");
    Position {
        topic: written.topic.as_str().into(),
        partition: written.partition,
        offset: written.offset,
    }
}

#[tokio::test]
async fn record_returns_once_byte_for_byte() {
    let world = World::new("redrive-bytes", "").await;
    let headers: Headers = [
        ("tenant", Some(&b"a\0\xff"[..])),
        ("tenant", None),
        ("tenant", Some(b"")),
    ]
    .into_iter()
    .collect();
    let with_key = |key: Option<&'static [u8]>, dead: Dead| Dead {
        key: key.map(Bytes::from_static),
        ..dead
    };
    // Its payload was not left out: the header belongs to its producer.
    let named: Headers = [("payload-omitted", Some(&b"value"[..]))].into_iter().collect();
    let letters = vec![
        world.dead(1, Some(b"\0\xffvalue"), headers.clone()),
        world.dead(2, None, headers.clone()),
        world.dead(3, None, named),
        with_key(None, world.dead(5, Some(b""), headers.clone())),
        with_key(Some(b""), world.dead(6, Some(b"{}"), headers.clone())),
        with_key(Some(b"\xff\0"), world.dead(7, Some(b""), Headers::new())),
    ];
    world.env.put(&world.dlq, 0, letters).await;
    let mut omitted = world.dead(4, None, Headers::new());
    omitted.headers.push_text("payload-omitted", "value");
    world.env.put(&world.dlq, 1, vec![omitted]).await;
    let mut inspector = world.env.start().await;
    inspector.until_listed("", 7).await;

    let all = || plan(v1::RedriveKind::Redrive, "");
    let job = planned(&mut inspector, all()).await.unwrap();
    let found = (job.state(), job.total, job.pending);
    assert_eq!(found, (v1::RedriveState::Planned, 6, 6));
    assert_eq!(job.refused[0].reason(), v1::RedriveOutcome::PayloadOmitted);
    assert_eq!(job.destinations[0].topic, &*world.due);
    let samples = preview(&mut inspector, &job.id).await;
    assert_eq!(world.redriven().len(), 0, "a plan does nothing");
    start(&mut inspector, &job.id).await;
    let job = until(&mut inspector, &job.id, &ENDED).await;
    assert_eq!((job.state(), job.done), (v1::RedriveState::Succeeded, 6));

    let redriven = world.redriven();
    assert_eq!(redriven.len(), 6);
    let none = Headers::new();
    for record in &redriven {
        let user = record.headers.filtered(|name| {
            !redeliver_core::headers::is_reserved(name) && !redrive::is_redrive_header(name)
        });
        let offset = record.headers.last("original-offset").unwrap();
        let (key, value, kept): (Option<&[u8]>, Option<&[u8]>, &Headers) = match offset {
            b"1" => (Some(b"1"), Some(b"\0\xffvalue"), &headers),
            b"2" => (Some(b"2"), None, &headers),
            // The header was not reserved in its record: the worker has removed it.
            b"3" => (Some(b"3"), None, &none),
            b"5" => (None, Some(b""), &headers),
            b"6" => (Some(b""), Some(b"{}"), &headers),
            b"7" => (Some(b"\xff\0"), Some(b""), &none),
            other => panic!("{other:?}"),
        };
        assert_eq!(
            (record.key.as_deref(), record.value.as_deref(), &user),
            (key, value, kept)
        );
        assert_eq!(record.headers.last("retry-count"), Some(&b"0"[..]));
        assert_eq!(record.headers.last("error-code"), None);
        assert_eq!(record.headers.last("redrive-id"), Some(job.id.as_bytes()));
        assert_eq!(redrive::count(&record.headers), 1);
    }
    inspector.until_listed("state = REDRIVEN", 6).await;
    let again = planned(&mut inspector, all()).await.unwrap_err();
    assert_eq!(error::reason(&again).as_deref(), Some("NOTHING_TO_REDRIVE"));
    let items = items(&mut inspector, &job.id).await;
    for (item, offset) in items.iter().zip(["1", "2", "3", "5", "6", "7"]) {
        assert_eq!(item.outcome(), v1::RedriveOutcome::Done);
        let written = written(item);
        let found = redriven.iter().find(|record| record.position == written);
        let found = found.expect("a record at the position");
        assert_eq!(found.headers.last("original-offset"), Some(offset.as_bytes()));
        if let Some(sample) = samples.iter().find(|sample| sample.id == item.id) {
            assert_previewed(sample, found);
            assert_eq!(sample.destination, &*world.due);
            assert_eq!(change_of(sample, "error-code"), v1::HeaderChangeKind::Removed);
            assert_eq!(change_of(sample, "original-offset"), v1::HeaderChangeKind::Kept);
        }
    }
    assert_eq!((items.len(), samples.len()), (6, 3));
    let after = preview(&mut inspector, &job.id).await;
    let is_redriven = |sample: &v1::RedriveSample| {
        sample.outcome() == v1::RedriveOutcome::Redriven && sample.headers.is_empty()
    };
    assert!(after.iter().all(is_redriven), "{after:?}");

    let audited = world.audited(&job.id);
    let actions = audited.iter();
    let actions = actions.map(|entry| (&*entry.action, entry.count, entry.ids.len()));
    assert_eq!(
        actions.collect::<Vec<_>>(),
        [
            ("redrives.plan", 6, 6),
            ("redrives.start", 0, 0),
            ("dead-letters.redrive", 6, 6),
        ]
    );
    // Without the setting, nothing can be edited.
    let edited = edit::edit(&mut inspector, &format!("{}/0/0", world.dlq), b"new").await;
    let disabled = edit::refused(edit::planned_edit(&mut inspector, edited).await);
    assert_eq!(disabled, (Code::FailedPrecondition, "EDIT_DISABLED".to_owned()));
}

#[tokio::test]
async fn used_request_id_plans_nothing_else() {
    let world = World::new("redrive-request", "").await;
    world.put(30).await;
    let mut inspector = world.env.start().await;
    inspector.until_listed("", 30).await;
    let with_id = |request_id: &str, request| v1::PlanRedriveRequest {
        request_id: request_id.to_owned(),
        ..request
    };
    let all = || plan(v1::RedriveKind::Redrive, "");
    let mut ids = Vec::new();
    for request_id in ["a", "a", "b"] {
        let job = planned(&mut inspector, with_id(request_id, all())).await.unwrap();
        ids.push(job.id);
    }
    assert_eq!(ids[0], ids[1], "a repeated request is the same job");
    assert_ne!(ids[0], ids[2]);
    for other in [
        plan(v1::RedriveKind::Discard, ""),
        plan(v1::RedriveKind::Redrive, "partition = 0"),
        v1::PlanRedriveRequest {
            destination: world.due.to_string(),
            ..all()
        },
        v1::PlanRedriveRequest { force: true, ..all() },
    ] {
        let refused = planned(&mut inspector, with_id("a", other)).await.unwrap_err();
        let reason = error::reason(&refused);
        assert_eq!(reason.as_deref(), Some("REQUEST_ID_USED"), "{refused:?}");
    }
    // Both plans have the same dead letters, each of which is redriven once.
    for id in [&ids[0], &ids[2]] {
        start(&mut inspector, id).await;
    }
    let one = until(&mut inspector, &ids[0], &ENDED).await;
    let other = until(&mut inspector, &ids[2], &ENDED).await;
    assert_eq!((one.done + other.done, world.redriven().len()), (30, 30));
    let mut all_outcomes = outcomes(&mut inspector, &ids[0]).await;
    all_outcomes.extend(outcomes(&mut inspector, &ids[2]).await);
    let skipped = all_outcomes.iter();
    let skipped = skipped.filter(|outcome| **outcome == v1::RedriveOutcome::Redriven);
    assert_eq!(skipped.count(), 30);
    let again = planned(&mut inspector, with_id("a", all())).await.unwrap();
    assert_eq!((again.id, again.done), (one.id, one.done));
}

#[tokio::test]
async fn failing_redrive_is_auto_paused() {
    let world = World::new("redrive-auto-pause", "").await;
    world.put(40).await;
    let later = world.env.create_topic("later", 1).await;
    world.env.put(&later, 0, vec![dead("k", "v", &[])]).await;
    let mut inspector = world.env.start().await;
    inspector.until_listed("", 41).await;
    let request = v1::PlanRedriveRequest {
        all_at_once: false,
        observe: Some(observe(10)),
        ..plan(v1::RedriveKind::Redrive, "")
    };
    let job = planned(&mut inspector, request).await.unwrap();
    start(&mut inspector, &job.id).await;
    let first = world.until_redriven(10).await;
    // Five of ten come back. A later pipeline gives up on the results of the others: these records have not come back.
    world.env.put(&world.dlq, 0, died(&first[..5])).await;
    world.env.put(&later, 0, died(&first[5..])).await;
    let paused = until(&mut inspector, &job.id, &[v1::RedriveState::Paused]).await;
    assert_eq!((paused.done, paused.returned, paused.pending), (10, 5, 30));
    assert!(paused.auto_pause_reason.contains("5 of 10"), "{paused:?}");
    assert_eq!(world.redriven().len(), 10);
    let resumed = resume(&mut inspector, &job.id).await;
    assert_ne!(resumed.state(), v1::RedriveState::Paused);
    let ended = until(&mut inspector, &job.id, &ENDED).await;
    assert_eq!((ended.done, ended.returned, world.redriven().len()), (40, 5, 40));
    assert_eq!(ended.state(), v1::RedriveState::PartiallySucceeded);
    // More come back after the end.
    let last = &world.redriven()[30..32];
    world.env.put(&world.dlq, 0, died(last)).await;
    for (topic, count) in [(&world.dlq, 47), (&later, 6)] {
        inspector
            .until_listed(&format!("topic = \"{topic}\""), count)
            .await;
    }
    assert_eq!(get(&mut inspector, &job.id).await.unwrap().returned, 7);
    // A list does not count what has come back since the ends of all its jobs.
    let request = v1::ListRedrivesRequest::default();
    let listed = client(&mut inspector).await.list_redrives(request).await;
    assert_eq!(listed.unwrap().into_inner().redrives[0].returned, 5);
}

/// Waits until a job says that so many of its records wait. It has not written more than this before.
async fn until_waiting(inspector: &mut Inspector, id: &str, count: u32, done: u32) {
    eventually_async(&format!("{count} wait"), DEADLINE, async || {
        let found = get(inspector, id).await.unwrap();
        assert!(found.done <= done, "{found:?}");
        let shown = format!("{count} redriven records still wait");
        let is_shown = found.problem.starts_with(&shown);
        ensure(is_shown, format!("{found:?}"))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_records_hold_a_redrive() {
    let settings = "    long_waits: scheduler\n    retry: { tiers: [4711ms] }\nscheduler:\n  group: '{name}-scheduler'\n  topics: { ingest: '{name}-ingest', state: '{name}-state' }\n";
    let world = World::without_worker("redrive-waiting", settings, &brokers()).await;
    let tier = HumanDuration::from_millis(4_711);
    let tier_topic = world.pipeline.tier_topic(tier);
    let name = world.env.base.name();
    let [ingest, state] = ["ingest", "state"].map(|topic| Arc::<str>::from(format!("{name}-{topic}")));
    for topic in [&tier_topic, &ingest, &state] {
        world.env.recreate_topic(topic, 1).await;
    }
    world.put(30).await;
    let mut inspector = world.env.start().await;
    inspector.until_listed("", 30).await;
    let observing = |observe| v1::PlanRedriveRequest {
        all_at_once: false,
        observe,
        ..plan(v1::RedriveKind::Redrive, "")
    };
    // By default, results are awaited until the retries are over.
    let by_default = planned(&mut inspector, observing(None)).await.unwrap();
    let retries = HumanDuration::from_millis(34_711);
    assert_eq!(by_default.observe, Some(to_duration(retries)));
    assert_eq!(by_default.warnings, Vec::<String>::new());
    let at_once = observing(Some(observe(0)));
    let job = planned(&mut inspector, at_once).await.unwrap();
    assert!(job.warnings[0].contains("can take"), "{:?}", job.warnings);
    start(&mut inspector, &job.id).await;
    // The first ones are unprocessed.
    until_waiting(&mut inspector, &job.id, 10, 10).await;
    // One of them waits for its next attempt, and the worker hands two of them over to the scheduler.
    let kafka = &world.env.kafka;
    let redriven = world.redriven();
    world.env.put(&tier_topic, 0, died(&redriven[..1])).await;
    let commands = redriven[1..3].iter().cloned().map(|record| {
        let output = Output {
            topic: record.position.topic,
            partition: None,
            key: record.key,
            value: record.value,
            headers: record.headers,
        };
        Dead::from(long_wait::wrap(&world.pipeline.name, SystemClock.now(), output))
    });
    world.env.put(&ingest, 0, commands.collect()).await;
    let worker = world.pipeline.worker_group("");
    complete(kafka, &worker, &world.due).unwrap();
    until_waiting(&mut inspector, &job.id, 3, 10).await;
    // The scheduler keeps one of these, and has dispatched the other one.
    let scheduled = v1::JobRecord {
        state: v1::JobState::Scheduled.into(),
        long_wait: true,
        headers: to_headers(&redriven[1].headers),
        ..v1::JobRecord::default()
    };
    let id = "0196c0de-0000-7000-8000-000000000001";
    let value = scheduled.encode_to_vec();
    world.env.write(&state, id, Some(value.into())).await;
    complete(kafka, &format!("{name}-scheduler"), &ingest).unwrap();
    complete(kafka, &retry_tier_group("", tier), &tier_topic).unwrap();
    until_waiting(&mut inspector, &job.id, 1, 10).await;
    world.env.write(&state, id, None).await;
    until_waiting(&mut inspector, &job.id, 20, 30).await;
    complete(kafka, &worker, &world.due).unwrap();
    let ended = until(&mut inspector, &job.id, &ENDED).await;
    assert_eq!((ended.state(), ended.done), (v1::RedriveState::Succeeded, 30));
}

#[tokio::test]
async fn cancelled_redrive_keeps_what_was_done() {
    let world = World::new("redrive-pause", "").await;
    world.put(60).await;
    let mut inspector = world.env.start().await;
    inspector.until_listed("", 60).await;
    let job = planned(&mut inspector, slowly(10)).await.unwrap();
    start(&mut inspector, &job.id).await;
    world.until_redriven(2).await;
    let paused = pause(&mut inspector, &job.id).await;
    assert_eq!(paused.state(), v1::RedriveState::Paused);
    // It is paused once two looks, some seconds apart, see the same.
    let done = eventually_async("it is paused", DEADLINE, async || {
        let before = get(&mut inspector, &job.id).await.unwrap().done;
        tokio::time::sleep(Duration::from_secs(2)).await;
        let after = get(&mut inspector, &job.id).await.unwrap().done;
        ensure(before == after, format!("{before}, {after}")).map(|()| after)
    })
    .await;
    assert!(done < 60);
    let cancelled = cancel(&mut inspector, &job.id).await;
    let found = (cancelled.state(), cancelled.done);
    assert_eq!(found, (v1::RedriveState::Cancelled, done));
    assert_eq!(world.redriven().len(), done as usize);
    let refused = client(&mut inspector).await.resume_redrive(change(&job.id)).await;
    assert_eq!(refused.unwrap_err().code(), Code::FailedPrecondition);
    // Another job takes those that were left out.
    let retry = self::done(&mut inspector, retry_of(&job.id)).await;
    assert_eq!((retry.done, world.redriven().len()), (60 - done, 60));
}

#[tokio::test]
async fn delayed_redrive_skips_what_has_changed() {
    let world = World::new("redrive-delayed", "").await;
    world.put(8).await;
    let again = world.env.create_topic("again", 1).await;
    let old = (10..12).map(|offset| world.dead(offset, Some(b"old"), Headers::new()));
    world.env.put(&again, 0, old.collect()).await;
    let mut inspector = world.env.start().await;
    inspector.until_listed("", 10).await;
    let mut request = ids_at(&world, 0, 0..4);
    let others = [0, 1].map(|offset| format!("{again}/0/{offset}"));
    request.ids.extend(others);
    let job = planned(&mut inspector, request).await.unwrap();
    // Two of them are deleted, and the other topic is another one with another dead letter.
    delete_records(&world.env.kafka.brokers, &world.dlq, 0, 2);
    delete_topic(&world.env.kafka.brokers, &again);
    world.env.recreate_topic(&again, 1).await;
    let other = world.dead(20, Some(b"other"), Headers::new());
    world.env.put(&again, 0, vec![other]).await;

    // The second call gives it another time.
    let now = SystemClock.now();
    let [tomorrow, start_at] = [86_400, 5].map(|seconds| now.after(Duration::from_secs(seconds)));
    for start_at in [tomorrow, start_at] {
        let delayed = v1::ChangeRedriveRequest {
            start_at: Some(to_timestamp(start_at)),
            ..change(&job.id)
        };
        let started = start_as(&mut inspector, delayed).await;
        assert_eq!(started.state(), v1::RedriveState::Running);
        assert_eq!(started.start_at, Some(to_timestamp(start_at)));
    }
    let ended = until(&mut inspector, &job.id, &ENDED).await;
    assert_eq!(
        (ended.state(), ended.done, ended.skipped),
        (v1::RedriveState::PartiallySucceeded, 2, 4)
    );
    let of_items = items(&mut inspector, &job.id).await;
    let outcome = |item: &v1::RedriveItem| (item.id.clone(), item.outcome());
    let found: BTreeMap<String, v1::RedriveOutcome> = of_items.iter().map(outcome).collect();
    let (gone, done) = (v1::RedriveOutcome::Gone, v1::RedriveOutcome::Done);
    let of_dlq = (0..).zip([gone, gone, done, done]);
    let of_dlq = of_dlq.map(|(offset, outcome)| (format!("{}/0/{offset}", world.dlq), outcome));
    let of_again = (0..).zip([v1::RedriveOutcome::Changed, gone]);
    let of_again = of_again.map(|(offset, outcome)| (format!("{again}/0/{offset}"), outcome));
    assert_eq!(found, of_dlq.chain(of_again).collect());
    let redriven = world.redriven();
    assert_eq!(redriven.len(), 2);
    let is_late = |record: &Record| redrive::time(&record.headers).is_some_and(|time| time >= start_at);
    assert!(redriven.iter().all(is_late), "{start_at}: {redriven:?}");
}

/// Redrives dead letters while one of two inspectors after the other is killed.
async fn each_is_redriven_once(name: &str, count: i64, rate: u32, kills: usize) {
    let mut world = World::new(name, "").await;
    world.put(count).await;
    let mut inspectors = world.start_two().await;
    let total = u32::try_from(count).unwrap();
    let job = planned_of(&mut inspectors[0], &slowly(rate), total).await;
    start(&mut inspectors[1], &job.id).await;
    let mut reader = TopicReader::new(&world.env.kafka, std::slice::from_ref(&world.due)).unwrap();
    let mut redriven: BTreeMap<Vec<u8>, u32> = BTreeMap::new();
    let mut seen = 0;
    let mut read_more = |redriven: &mut BTreeMap<Vec<u8>, u32>| {
        let read = reader.read_to_end(DEADLINE, |record| {
            let origin = record.headers.last("original-offset").unwrap().to_vec();
            *redriven.entry(origin).or_default() += 1;
            seen += 1;
        });
        read.map(|()| seen).map_err(|error| error.to_string())
    };
    for kill in 1..=kills {
        let wanted = usize::try_from(count).unwrap() * kill / (kills + 2);
        eventually_async("more records are redriven", DEADLINE * 3, async || {
            let seen = read_more(&mut redriven)?;
            ensure(seen >= wanted, format!("{seen} of {wanted}"))
        })
        .await;
        // Probably the leader: the other takes over, or it comes back first.
        let victim = &mut inspectors[kill % 2].process;
        victim.kill_9();
        victim.start_again();
    }
    for inspector in &mut inspectors {
        inspector.until_serving().await;
    }
    let ended = until(&mut inspectors[0], &job.id, &ENDED).await;
    assert_eq!(
        (ended.state(), ended.done),
        (v1::RedriveState::Succeeded, total),
        "{ended:?}"
    );
    read_more(&mut redriven).unwrap();
    let not_once: Vec<_> = redriven
        .iter()
        .filter(|(_, times)| **times != 1)
        .take(5)
        .collect();
    assert!(not_once.is_empty(), "{not_once:?}");
    assert_eq!(redriven.len(), usize::try_from(count).unwrap());
    // The other one reads them within about a second.
    let items = eventually_async("the outcomes", DEADLINE, async || {
        let items = items(&mut inspectors[1], &job.id).await;
        let is_done = |item: &&v1::RedriveItem| item.outcome() == v1::RedriveOutcome::Done;
        let done = items.iter().filter(is_done).count();
        let holds = done == usize::try_from(count).unwrap();
        ensure(holds, format!("{done} of {}", items.len())).map(|()| items)
    })
    .await;
    let reported: BTreeSet<Position> = items.iter().map(written).collect();
    let positions = world.redriven().into_iter().map(|record| record.position);
    assert_eq!(reported, positions.collect());
}

#[tokio::test]
async fn each_letter_is_redriven_once() {
    each_is_redriven_once("redrive-killed", 900, 300, 3).await;
}

#[tokio::test]
#[ignore = "long"]
async fn each_of_50000_is_redriven_once() {
    each_is_redriven_once("redrive-long", 50_000, 0, 10).await;
}

/// The text that an inspector logs when it begins to execute jobs.
pub(crate) const EXECUTES: &str = "became redrive leader";

#[tokio::test]
async fn frozen_inspector_writes_nothing_after_takeover() {
    const COUNT: u16 = 400;
    let mut world = World::new("redrive-frozen", "").await;
    world.env.base.set("kafka.session_timeout", "6s");
    world.put(COUNT.into()).await;
    let mut inspectors = world.start_two().await;
    let job = planned_of(&mut inspectors[0], &slowly(50), COUNT.into()).await;
    start(&mut inspectors[0], &job.id).await;
    world.until_redriven(50).await;
    let executes = |inspector: &Inspector| inspector.process.output().contains(EXECUTES);
    let executor = inspectors.iter().position(executes).unwrap();
    let mut frozen = inspectors.swap_remove(executor);
    let mut other = inspectors.remove(0);
    frozen.process.freeze();
    let _ = other.process.wait_for_output(EXECUTES, DEADLINE * 2);
    frozen.process.thaw();
    let ended = until(&mut other, &job.id, &ENDED).await;
    assert_eq!(
        (ended.state(), ended.done),
        (v1::RedriveState::Succeeded, COUNT.into()),
        "{ended:?}"
    );
    // It has noticed by then that it was replaced.
    frozen.until_serving().await;
    let redriven = world.redriven();
    let origins: BTreeSet<_> = redriven
        .iter()
        .map(|record| record.headers.last("original-offset").unwrap())
        .collect();
    assert_eq!((redriven.len(), origins.len()), (COUNT.into(), COUNT.into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn redrives_need_scopes_and_hide_topics() {
    let yaml = "dlq_inspector:\n  redrive:\n    destinations: ['{name}-legacy']\n";
    let mut world = World::new("redrive-scopes", yaml).await;
    let legacy = format!("{}-legacy", world.env.base.name());
    let other = world.env.create_topic("other", 1).await;
    world.put(2).await;
    let foreign = world.dead(9, Some(b"v"), Headers::new());
    world.env.put(&other, 0, vec![foreign]).await;
    let read = "dead-letters:read".to_owned();
    let operate = format!("dead-letters:operate:{}", world.dlq);
    let scopes = [
        ("all", vec!["dead-letters:*".to_owned()]),
        (
            "viewer",
            vec![format!("dead-letters:read:{}", world.dlq), operate.clone()],
        ),
        ("stranger", vec!["dead-letters:*:other-*".to_owned()]),
        ("reader", vec![read.clone()]),
        // Not for the destination.
        ("half", vec![read.clone(), operate]),
        (
            "operator",
            vec![read, format!("dead-letters:operate:{}*", world.pipeline.name)],
        ),
    ];
    let tokens = world.env.set_tokens(scopes);
    let mut inspector = world.env.start().await;
    let channel = inspector.channel().await;
    let client = |name: &str| {
        let interceptor = SendToken::new(Some(&tokens[name].token)).unwrap();
        RedriveServiceClient::with_interceptor(channel.clone(), interceptor)
    };
    let filter = format!("topic = '{}' OR (topic : '{other}' AND offset > 7)", world.dlq);
    let by_filter = v1::PlanRedriveRequest {
        destination: legacy.clone(),
        ..plan(v1::RedriveKind::Redrive, &filter)
    };
    let by_filter = eventually_async("the plan", DEADLINE, async || {
        let job = client("all").plan_redrive(by_filter.clone()).await;
        let job = job.map_err(|status| status.to_string())?.into_inner();
        ensure(job.total == 2, job.total.to_string()).map(|()| job)
    })
    .await;
    assert!(
        by_filter.warnings.iter().any(|text| text.contains(&legacy)),
        "{by_filter:?}"
    );
    let mut by_ids = ids_at(&world, 0, 0..1);
    by_ids.ids.push(format!("{other}/0/5"));
    let by_ids = changed(async || client("all").plan_redrive(by_ids.clone()).await).await;
    assert_eq!(by_ids.refused[0].sample, format!("{other}/0/5"));

    let hidden = [&*legacy, &*other];
    let shows = |text: &str| hidden.into_iter().find(|topic| text.contains(topic));
    for job in [&by_filter, &by_ids] {
        let request = v1::GetRedriveRequest { id: job.id.clone() };
        let seen = client("all").get_redrive(request.clone()).await.unwrap();
        assert_eq!(seen.into_inner().filter, job.filter);
        let seen = client("viewer").get_redrive(request).await.unwrap().into_inner();
        let text = format!("{seen:?}");
        assert_eq!(shows(&text), None, "{text}");
        // What is counted stays.
        let count = |counts: &[v1::RedriveCount]| counts.iter().map(|count| count.count).sum::<u32>();
        assert_eq!(count(&seen.destinations), job.total, "{text}");
        assert_eq!(seen.refused.len(), job.refused.len(), "{text}");
        assert_eq!(seen.warnings.len(), job.warnings.len(), "{text}");
        assert_eq!((&seen.sources, &seen.samples), (&job.sources, &job.samples));
        let request = v1::GetRedriveRequest { id: job.id.clone() };
        let preview = client("viewer").get_redrive_preview(request).await.unwrap();
        let samples = preview.into_inner().samples;
        assert_eq!(shows(&format!("{samples:?}")), None, "{samples:?}");
        let is_withheld = |sample: &v1::RedriveSample| {
            sample.payload_withheld() == v1::PayloadWithheld::NoPermission
                && sample.headers.is_empty()
                && !sample.destination.is_empty()
        };
        assert!(
            !samples.is_empty() && samples.iter().all(is_withheld),
            "{samples:?}"
        );
        // What is written to the pipeline of dead letters that the caller sees comes back to them.
        let is_of_pipeline = job.id == by_ids.id;
        assert_eq!(seen.destinations == job.destinations, is_of_pipeline, "{text}");
        let refused = client("viewer").start_redrive(change(&job.id)).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied);
        assert_eq!(shows(&format!("{refused:?}")), None, "{refused:?}");
    }
    let listed = client("viewer")
        .list_redrives(v1::ListRedrivesRequest::default())
        .await;
    let text = format!("{:?}", listed.unwrap().into_inner());
    assert_eq!(shows(&text), None, "{text}");
    // Who sees it and may not do it is told so.
    let of_dlq = || plan(v1::RedriveKind::Redrive, &format!("topic = '{}'", world.dlq));
    let job = changed(async || client("operator").plan_redrive(of_dlq()).await).await;
    let code = |refused: Result<Response<v1::Redrive>, Status>| refused.unwrap_err().code();
    for (name, expected) in [
        ("reader", Code::PermissionDenied),
        ("half", Code::PermissionDenied),
        ("stranger", Code::NotFound),
    ] {
        let mut client = client(name);
        if name != "stranger" {
            assert_eq!(code(client.plan_redrive(of_dlq()).await), expected, "{name}");
        }
        let started = client.start_redrive(change(&job.id)).await;
        assert_eq!(code(started), expected, "{name}");
        let cancelled = client.cancel_redrive(change(&job.id)).await;
        assert_eq!(code(cancelled), expected, "{name}");
        let request = v1::GetRedriveRequest { id: job.id.clone() };
        let seen = client.get_redrive(request).await;
        assert_eq!(seen.is_ok(), name != "stranger", "{name}: {seen:?}");
    }
    // Discarding has no destination.
    let discard = v1::PlanRedriveRequest {
        kind: v1::RedriveKind::Discard.into(),
        ..of_dlq()
    };
    changed(async || client("half").plan_redrive(discard.clone()).await).await;
    assert_eq!(world.redriven().len(), 0);
    // Once it is done, neither do its items say where the records are.
    world.env.recreate_topic(&legacy.as_str().into(), 1).await;
    changed(async || client("all").start_redrive(change(&by_filter.id)).await).await;
    eventually_async("the end of the job", DEADLINE * 3, async || {
        let request = v1::GetRedriveRequest {
            id: by_filter.id.clone(),
        };
        let job = client("all").get_redrive(request).await;
        let job = job.map_err(|status| status.to_string())?.into_inner();
        ensure(ENDED.contains(&job.state()), format!("{job:?}"))
    })
    .await;
    let items = async |name: &str| {
        let request = v1::ListRedriveItemsRequest {
            id: by_filter.id.clone(),
            ..v1::ListRedriveItemsRequest::default()
        };
        let items = client(name).list_redrive_items(request).await;
        items.unwrap().into_inner().items
    };
    let (all, seen) = (items("all").await, items("viewer").await);
    assert_eq!(&*written(&all[0]).topic, legacy);
    let text = format!("{seen:?}");
    assert_eq!((seen.len(), shows(&text)), (2, None), "{text}");
}

/// A plan for the dead letters at these offsets of a partition.
pub(crate) fn ids_at(world: &World, partition: i32, offsets: std::ops::Range<i64>) -> v1::PlanRedriveRequest {
    v1::PlanRedriveRequest {
        all: false,
        ids: offsets
            .map(|offset| format!("{}/{partition}/{offset}", world.dlq))
            .collect(),
        ..plan(v1::RedriveKind::Redrive, "")
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn denied_topics_hold_only_their_jobs() {
    let kafka = LocalKafka::start_with(&AUTHORIZER).unwrap();
    let yaml = "dlq_inspector:\n  redrive:\n    destinations: ['{name}-open']\n";
    let world = World::on("redrive-denied", yaml, &kafka.brokers()).await;
    let open: Arc<str> = format!("{}-open", world.env.base.name()).into();
    world.env.recreate_topic(&open, 1).await;
    world.put(20).await;
    let foreign = world.env.create_topic("foreign", 1).await;
    world.env.recreate_topic(&world.pipeline.source, 1).await;
    let of_source = dead("k", "v", &[("kafka_dlt-original-topic", &world.pipeline.source)]);
    world.env.put(&foreign, 0, vec![of_source; 20]).await;
    let ledger = redeliver_dlq_inspector::ledger::TOPIC;
    let mut inspector = world.env.start().await;
    inspector.until_listed("", 40).await;
    allow_all(&kafka, &[&world.due, ledger]);
    deny(&kafka, "Write", &[&world.due]);

    let closed = eventually_async("the warning", DEADLINE, async || {
        let job = planned(&mut inspector, ids_at(&world, 0, 0..5)).await.unwrap();
        let mut warnings = job.warnings.iter();
        let holds = warnings.any(|warning| warning.contains("(Write)") && warning.contains(&*world.due));
        ensure(holds, format!("{:?}", job.warnings)).map(|()| job)
    })
    .await;
    let to_open = v1::PlanRedriveRequest {
        destination: open.to_string(),
        ..ids_at(&world, 1, 0..5)
    };
    let other = planned(&mut inspector, to_open.clone()).await.unwrap();
    assert_eq!(other.warnings, Vec::<String>::new());
    for job in [&closed, &other] {
        start(&mut inspector, &job.id).await;
    }
    let ended = until(&mut inspector, &other.id, &ENDED).await;
    assert_eq!((ended.done, ended.total), (5, 5));
    let ended = until(&mut inspector, &closed.id, &ENDED).await;
    assert_eq!((ended.state(), ended.skipped), (v1::RedriveState::Failed, 5));
    assert_eq!(
        outcomes(&mut inspector, &closed.id).await,
        [v1::RedriveOutcome::DestinationDenied; 5]
    );

    // Without the ledger, nothing can be done at all.
    deny(&kafka, "Write", &[ledger]);
    let later = v1::PlanRedriveRequest {
        destination: open.to_string(),
        ..ids_at(&world, 1, 5..10)
    };
    let cancelled = planned(&mut inspector, later).await.unwrap();
    start(&mut inspector, &cancelled.id).await;
    eventually_async("the reason", DEADLINE * 2, async || {
        let job = get(&mut inspector, &cancelled.id).await.unwrap();
        let holds = job.problem.contains(ledger) && job.pending == 5;
        ensure(holds, format!("{job:?}\n{}", inspector.process.output()))
    })
    .await;
    cancel(&mut inspector, &cancelled.id).await;
    allow_again(&kafka, "Write", &[&world.due, ledger]);
    let ended = done(&mut inspector, retry_of(&closed.id)).await;
    assert_eq!(
        (ended.state(), ended.done, &*ended.problem),
        (v1::RedriveState::Succeeded, 5, "")
    );
    assert_eq!((world.redriven().len(), read(&world.env, &open).len()), (5, 5));
    let cancelled = get(&mut inspector, &cancelled.id).await.unwrap();
    assert_eq!((cancelled.pending, &*cancelled.problem), (5, ""));

    // Invisible topics are not missing.
    deny(&kafka, "Describe", &[&world.due]);
    let unseen = planned(&mut inspector, ids_at(&world, 0, 5..10)).await.unwrap();
    assert!(
        unseen.warnings.iter().any(|warning| warning.contains("Describe")),
        "{:?}",
        unseen.warnings
    );

    // Without auto-pause, it does not matter what comes back.
    allow_all(&kafka, &[&world.dlq]);
    deny(&kafka, "Read", &[&world.dlq]);
    inspector.process.shut_down();
    let mut inspector = world.env.start().await;
    let request = v1::PlanRedriveRequest {
        all_at_once: false,
        max_returned_share: Some(1.0),
        ..plan(v1::RedriveKind::Redrive, &format!("topic = '{foreign}'"))
    };
    let ended = done(&mut inspector, request).await;
    assert_eq!((ended.done, ended.returned), (20, 0));
}

#[tokio::test]
async fn twin_instances_go_on_answering() {
    let mut world = World::new("redrive-twin", "").await;
    world.put(4).await;
    let mut first = world.env.start().await;
    first.until_listed("", 4).await;
    let _ = first.process.wait_for_output(EXECUTES, DEADLINE * 2);
    world.env.use_data_dir("other");
    let mut twins = [
        first,
        Inspector {
            process: world.env.base.spawn("dlq-inspector", "data", &[]),
        },
    ];
    eventually_async("one of them gives way", DEADLINE * 3, async || {
        let outputs = twins.each_ref().map(|twin| twin.process.output());
        let gives_way = |output: &String| output.contains("instance name is in use");
        ensure(outputs.iter().any(gives_way), outputs.concat())
    })
    .await;
    for twin in &mut twins {
        twin.until_serving().await;
        twin.until_listed("", 4).await;
    }
}
