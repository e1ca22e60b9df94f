//! Jobs through all services: requests in JSON and protobuf, the scheduler, the source topic, the enricher, tiers, output and
//! dead letters. Each job ends once, and no record of it appears before it is due.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use redeliver_client::{JobProducer, JobRequest, When};
use redeliver_core::headers::{DISPATCHED_AT, JOB_APP, JOB_ID, JOB_PRIORITY, SCHEDULED_TIME};
use redeliver_core::job::Priority;
use redeliver_core::{Clock as _, JobId, Record, SystemClock, Timestamp};
use redeliver_testkit::eventually;

use crate::support::{DEADLINE, Draft, PLAN, Pipe, PipeBuilder, Sent, text};

const JOBS: u64 = 600;
const APP: &str = "documents";

/// A requested job.
struct Job {
    due: Timestamp,
    priority: Priority,
    key: Option<Bytes>,
    value: Bytes,
}

impl Job {
    fn new(n: u64) -> Self {
        let is_json = n.is_multiple_of(2);
        let mut value = format!("{{ \"document\" : {n} }}").into_bytes();
        if !is_json {
            value.extend([0xff, 0x00]);
        }
        // Within four seconds, and some long ago.
        let due = if n.is_multiple_of(10) {
            Timestamp::from_millis(1_000_000_000_000)
        } else {
            SystemClock
                .now()
                .after(Duration::from_millis(500 + 37 * n % 4_000))
        };
        Self {
            due,
            priority: [Priority::High, Priority::Normal, Priority::Low][usize::try_from(n % 3).unwrap()],
            key: (!n.is_multiple_of(5)).then(|| format!("customer {}", n % 97).into()),
            value: value.into(),
        }
    }

    fn json(&self) -> Draft {
        let Self { due, priority, .. } = self;
        let data = std::str::from_utf8(&self.value).unwrap();
        let text = format!(
            r#"{{"appName":"{APP}","scheduledTime":"{due}","priority":"{priority}","jobData":{data}}}"#
        );
        Draft {
            key: self.key.clone(),
            value: Some(text.into()),
            ..Draft::default()
        }
    }

    fn request(&self) -> JobRequest {
        let request = JobRequest::new(APP, When::At(self.due)).priority(self.priority);
        let request = request.data(self.value.clone());
        match &self.key {
            Some(key) => request.key(key.clone()),
            None => request,
        }
    }
}

/// Requests jobs as JSON and with the client, and returns the expected ids.
fn ask(pipe: &Pipe, jobs: &[Job]) -> Vec<JobId> {
    let (_, topics) = pipe.jobs.as_ref().unwrap();
    let (json, protobuf): (Vec<_>, Vec<_>) = (0_u32..).zip(jobs).partition(|(n, _)| n.is_multiple_of(2));
    let sent = pipe.produce_to(&topics.ingest, json.iter().map(|(_, job)| job.json()).collect());
    let client = JobProducer::new(&pipe.kafka, topics.ingest.clone()).unwrap();
    let requests: Vec<JobRequest> = protobuf.iter().map(|(_, job)| job.request()).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let scheduling = futures::future::try_join_all(requests.iter().map(|job| client.schedule(job)));
    let protobuf_ids = runtime.block_on(scheduling).unwrap();
    let requested = pipe.read(std::slice::from_ref(&topics.ingest));
    let requested: HashMap<_, _> = requested
        .into_iter()
        .map(|record| (record.position, record.timestamp.unwrap()))
        .collect();
    let json_ids = sent.iter().map(|sent| {
        let place = &sent.position;
        JobId::new(requested[place], place.partition, place.offset)
    });
    let mut ids: Vec<(u32, JobId)> = json.iter().map(|(n, _)| *n).zip(json_ids).collect();
    ids.extend(protobuf.iter().map(|(n, _)| *n).zip(protobuf_ids));
    ids.sort_unstable();
    ids.into_iter().map(|(_, id)| id).collect()
}

/// A job in the source topic must be as requested, and not there before it was due.
#[track_caller]
fn is_as_requested(job: &Job, id: JobId, record: &Record) {
    assert_eq!((&record.key, record.value.as_ref()), (&job.key, Some(&job.value)));
    for (name, value) in [
        (JOB_ID, id.to_string()),
        (JOB_APP, APP.to_owned()),
        (SCHEDULED_TIME, job.due.to_string()),
        (JOB_PRIORITY, job.priority.to_string()),
    ] {
        assert_eq!(text(record, name), Ok(Some(value)), "{record:?}");
    }
    let dispatched: Timestamp = text(record, DISPATCHED_AT).unwrap().unwrap().parse().unwrap();
    assert!(dispatched >= job.due, "{record:?} is early");
    assert!(record.timestamp >= Some(job.due), "{record:?} is early");
}

#[test]
fn jobs_end_once_as_planned() {
    let calls: Arc<Mutex<BTreeMap<Bytes, Timestamp>>> = Arc::default();
    let seen = calls.clone();
    let setup = PipeBuilder::new("all-services")
        .tiers(&[1_000, 2_000])
        .behave(move |request| {
            let mut seen = seen.lock().unwrap();
            seen.entry(request.body.clone())
                .or_insert_with(|| SystemClock.now());
            PLAN.reply(request)
        });
    let source = setup.name().to_owned();
    let pipe = setup
        .through_scheduler()
        .set(&format!("scheduler.apps.{APP}.topic"), &source)
        .create();
    let _services = [pipe.scheduler("a"), pipe.enricher("a"), pipe.retry_tier("a")];
    let jobs: Vec<Job> = (0..JOBS).map(Job::new).collect();
    let ids = ask(&pipe, &jobs);

    let dispatched = eventually("all jobs are in the source topic", DEADLINE, || {
        let records = pipe.read(std::slice::from_ref(&pipe.pipeline.source));
        if records.len() >= jobs.len() {
            Ok(records)
        } else {
            Err(records.len())
        }
    });
    assert_eq!(dispatched.len(), jobs.len());
    let by_id: HashMap<String, &Record> = dispatched
        .iter()
        .map(|record| (text(record, JOB_ID).unwrap().unwrap(), record))
        .collect();
    for (job, id) in jobs.iter().zip(&ids) {
        is_as_requested(job, *id, by_id[&id.to_string()]);
    }

    let sent: Vec<Sent> = dispatched
        .iter()
        .map(|record| Sent::from(record.clone()))
        .collect();
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets(&PLAN, &sent);
    ends.were_called(&PLAN, &sent, &pipe.endpoint);
    println!("{}", ends.report);
    let calls = calls.lock().unwrap();
    for job in &jobs {
        let called = calls[&job.value];
        assert!(
            called >= job.due,
            "called at {called}, and it was due at {}",
            job.due
        );
    }
    // Nothing was rejected, and there is no other record.
    let (_, topics) = pipe.jobs.as_ref().unwrap();
    assert!(pipe.read(std::slice::from_ref(&topics.dlq)).is_empty());
    assert_eq!(
        pipe.read(std::slice::from_ref(&pipe.pipeline.source)).len(),
        jobs.len()
    );
}
