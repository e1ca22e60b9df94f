//! Replaces a record that its topic refuses.

use redeliver_core::headers::{self, Origin, ReservedHeaders};
use redeliver_core::job::JobId;
use redeliver_core::route::{self, Arrival, DeadLetter};
use redeliver_core::{Failure, Headers, Output, Timestamp};

use crate::request::NAME;
use crate::settings::Settings;

/// Replaces a refused record by a dead letter, or strips a dead letter of its value, key or headers. Returns false for
/// the state of a job: nothing can replace it, so the turn is retried until the state topic accepts it.
pub(crate) fn replace(settings: &Settings, output: &mut Output, failure: &Failure, now: Timestamp) -> bool {
    if output.topic == settings.state {
        return false;
    }
    let mut pipelines = settings.rules.pipelines.values();
    let is_letter = *output.topic == *settings.dead_letters
        || pipelines
            .clone()
            .any(|pipeline| output.topic == pipeline.dead_letter_topic());
    if is_letter {
        return route::strip_payload(output);
    }
    let reserved = ReservedHeaders::from_headers(&output.headers).ok();
    let owner = pipelines.find(|pipeline| {
        let is_its = reserved
            .as_ref()
            .is_some_and(|reserved| reserved.is_retry_of(&pipeline.name));
        is_its && [pipeline.due_topic(), pipeline.source.clone()].contains(&output.topic)
    });
    if let Some(pipeline) = owner {
        // The record of a long wait belongs to its pipeline and keeps its lineage.
        let unknown = Origin {
            topic: settings.ingest.clone(),
            partition: 0,
            offset: 0,
            timestamp: None,
        };
        route::replace_refused(pipeline, output, unknown, failure, now);
        return true;
    }
    let origin = reserved.and_then(|reserved| reserved.origin().ok());
    let origin = origin.or_else(|| request_of(settings, &output.headers));
    let arrival = origin.map(|origin| Arrival {
        origin,
        failed_attempts: 0,
    });
    let letter = DeadLetter {
        topic: settings.dead_letters.clone(),
        pipeline: NAME,
        arrival,
        failure,
        trace: None,
        now,
    };
    letter.replace(output);
    true
}

/// The position of a dispatched job's request, which is part of its id.
fn request_of(settings: &Settings, headers: &Headers) -> Option<Origin> {
    let id = std::str::from_utf8(headers.last(headers::JOB_ID)?).ok()?;
    let id: JobId = id.parse().ok()?;
    Some(Origin {
        topic: settings.ingest.clone(),
        partition: id.shard(),
        offset: i64::try_from(id.offset()).ok()?,
        timestamp: Some(id.requested_at()),
    })
}
