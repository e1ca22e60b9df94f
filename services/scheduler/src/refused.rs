//! What is written in the place of a record that its topic does not take.

use redeliver_core::headers::{self, Origin, ReservedHeaders};
use redeliver_core::job::JobId;
use redeliver_core::{Failure, Output, Position, Record, Timestamp, route};

use crate::request::NAME;
use crate::shard::Settings;

/// Makes a dead letter of a record, or takes something out of one. False where it can only be waited until the topic
/// takes it: for the state of a job.
pub(crate) fn replace(settings: &Settings, output: &mut Output, failure: &Failure, now: Timestamp) -> bool {
    if output.topic == settings.state {
        return false;
    }
    let mut pipelines = settings.rules.pipelines.values();
    let is_letter = |topic: &str| {
        let mut of_pipelines = pipelines.clone().map(|pipeline| pipeline.dead_letter_topic());
        *topic == *settings.dead_letters || of_pipelines.any(|letters| *topic == *letters)
    };
    if is_letter(&output.topic) {
        return route::strip_payload(output);
    }
    let record = Record {
        position: Position {
            topic: settings.ingest.clone(),
            partition: 0,
            offset: 0,
        },
        timestamp: None,
        key: output.key.take(),
        value: output.value.take(),
        headers: std::mem::take(&mut output.headers),
        unreadable_headers: 0,
    };
    let ours = ReservedHeaders::read(&record).ok();
    let own = pipelines.find(|pipeline| {
        let is_its = ours.as_ref().is_some_and(|ours| ours.is_retry_of(&pipeline.name));
        is_its && [pipeline.due_topic(), pipeline.source.clone()].contains(&output.topic)
    });
    if let Some(pipeline) = own {
        // A long wait is over: the record is its pipeline's, with the lineage that it has.
        let mut letters = route::reject(pipeline, &record, failure, now).outputs;
        let Some(letter) = letters.pop() else { return false };
        *output = letter;
        return true;
    }
    let mut list = headers::user_headers(&record.headers, None);
    let origin = ours.and_then(|ours| ours.origin().ok());
    if let Some(origin) = origin.or_else(|| request_of(settings, &record)) {
        headers::write_lineage(&mut list, NAME, &origin, 0);
    }
    headers::write_failure(&mut list, failure, now);
    *output = Output {
        topic: settings.dead_letters.clone(),
        partition: None,
        key: record.key,
        value: record.value,
        headers: list,
    };
    true
}

/// Where the request of a dispatched job stands: its id says so.
fn request_of(settings: &Settings, record: &Record) -> Option<Origin> {
    let id = std::str::from_utf8(record.headers.last(headers::JOB_ID)?).ok()?;
    let id: JobId = id.parse().ok()?;
    Some(Origin {
        topic: settings.ingest.clone(),
        partition: id.shard(),
        offset: i64::try_from(id.offset()).ok()?,
        timestamp: Some(id.requested_at()),
    })
}
