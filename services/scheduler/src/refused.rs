//! Replaces a record that its topic refuses.

use redeliver_core::headers::{self, Origin, ReservedHeaders};
use redeliver_core::job::JobId;
use redeliver_core::route::{self, Arrival, DeadLetter};
use redeliver_core::{Failure, Headers, Output, Timestamp};

use crate::request::NAME;
use crate::settings::Settings;

/// What replaces a refused record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Replacement {
    /// Nothing. The turn is retried until the topic accepts the record.
    Nothing,
    /// A dead letter, or a dead letter without its value, key or headers.
    DeadLetter,
    /// A dead letter, in place of the record of this job.
    OfJob(JobId),
}

/// Replaces a refused record by a dead letter, or strips a dead letter of its value, key or headers. Nothing can replace the
/// state of a job.
pub(crate) fn replace(
    settings: &Settings,
    output: &mut Output,
    failure: &Failure,
    now: Timestamp,
) -> Replacement {
    if output.topic == settings.state {
        return Replacement::Nothing;
    }
    if settings.is_dead_letter(output) {
        return match route::strip_payload(output) {
            true => Replacement::DeadLetter,
            false => Replacement::Nothing,
        };
    }
    let reserved = ReservedHeaders::from_headers(&output.headers).ok();
    let owner = settings.pipeline_named_by(&output.headers).filter(|pipeline| {
        let is_its = reserved
            .as_ref()
            .is_some_and(|reserved| reserved.is_retry_of(&pipeline.name));
        is_its && [pipeline.due_topic(), pipeline.source.clone()].contains(&output.topic)
    });
    if let Some(pipeline) = &owner {
        // The record of a long wait belongs to its pipeline and keeps its lineage.
        let unknown = Origin {
            topic: settings.ingest.clone(),
            partition: 0,
            offset: 0,
            timestamp: None,
        };
        route::replace_refused(pipeline, output, unknown, failure, now);
        return Replacement::DeadLetter;
    }
    let origin = reserved.and_then(|reserved| reserved.origin().ok());
    // Only the record of a job has an id that the scheduler wrote.
    let job = job_of(&output.headers).filter(|_| origin.is_none());
    let origin = origin.or_else(|| request_of(settings, job?));
    let arrival = origin.map(|origin| Arrival {
        origin,
        failed_attempts: 0,
        redriven_at: None,
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
    job.map_or(Replacement::DeadLetter, Replacement::OfJob)
}

fn job_of(headers: &Headers) -> Option<JobId> {
    let id = std::str::from_utf8(headers.last(headers::JOB_ID)?).ok()?;
    id.parse().ok()
}

/// The position of a dispatched job's request, which is part of its id; `None` if a schedule has created the job.
fn request_of(settings: &Settings, id: JobId) -> Option<Origin> {
    id.has_request().then_some(())?;
    Some(Origin {
        topic: settings.ingest.clone(),
        partition: id.shard(),
        offset: i64::try_from(id.offset()).ok()?,
        timestamp: Some(id.requested_at()),
    })
}
