//! `PlanEdit`: plans a redrive of one dead letter with another value, other headers or another key.

use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::{Headers, Output, Record};
use redeliver_proto::error::{invalid, status};
use redeliver_proto::{Message as _, v1};
use tonic::{Code, Status};

use super::super::{Api, bounded, kafka_unavailable};
use super::plan::{Plan, RequestKey, checked};
use crate::access::Viewer;
use crate::redrive::change::Change;
use crate::redrive::edit::{Edit, edited};
use crate::redrive::job::{self, Item, Kind, TargetOptions};
use crate::redrive::jobs::plan_key;
use crate::redrive::record::Candidate;

/// An id that is as long as those of jobs.
const SAMPLE_ID: &str = "0000000000000000";

impl Api {
    pub(super) async fn plan_of_edit(
        &self,
        viewer: &Viewer,
        mut request: v1::PlanEditRequest,
    ) -> Result<v1::Redrive, Status> {
        self.check_accepts_edits()?;
        let spec = checked(&v1::PlanRedriveRequest {
            kind: v1::RedriveKind::Redrive.into(),
            destination: request.destination.clone(),
            reason: request.reason.clone(),
            request_id: request.request_id.clone(),
            all_at_once: true,
            observe: request.observe,
            force: request.force,
            ..v1::PlanRedriveRequest::default()
        })?;
        let key = RequestKey::new("edit", std::mem::take(&mut request.request_id), &request);
        let edit = Edit::read(request.edit.unwrap_or_default());
        let options = TargetOptions {
            destination: request.destination,
            force: request.force,
        };
        let edit = edit.map_err(|error| invalid("edit", error.to_string(), "EDIT_INVALID", []))?;
        // Also tells whether the caller sees the topic.
        let completeness = self.completeness();
        let found = self.find(viewer, &request.id).await;
        // What a caller may do with the topic does not depend on the dead letter.
        if let Ok(letter) = &found {
            viewer.require_editing(&letter.id.topic)?;
        }
        if let Some(job) = self.job_of_request(viewer, &key)? {
            return self.redrive_message(viewer, &job).await;
        }
        let letter = found?;
        Self::check_states(true, &completeness)?;
        if request.content_hash != letter.content[..] {
            return Err(changed(&request.id));
        }
        let destinations = self.redrives.destinations.clone();
        let sources = self.sources().await?;
        let mut plan = Plan::new(
            Kind::Redrive,
            options.clone(),
            destinations,
            self.masking.clone(),
            sources,
        );
        plan.add(&letter);
        let item = match plan.items.as_slice() {
            [item] => item.clone(),
            _ => return self.job_or_nothing(viewer, &key, &plan).await,
        };
        viewer.require_operating([&*letter.id.topic].into_iter())?;
        for destination in plan.destinations.keys() {
            viewer.require_destination(destination)?;
        }
        plan.require_origins(viewer)?;
        let stored = self.record_of(&letter).await?;
        let whole = match self.at_origin(viewer, &letter, &stored.record).await? {
            Some(at_origin) => Some(at_origin.required(viewer)?),
            None => None,
        };
        let target = |whole: Option<&Record>| {
            let candidate = match whole {
                Some(whole) => Candidate::restored(&stored.record, whole),
                // The editor has not seen the omitted parts of the dead letter.
                None => Candidate::of(&stored.record),
            };
            self.redrives.destinations.target(candidate, &options)
        };
        let found = whole.transpose();
        let (whole, target) = match found.and_then(|whole| Ok((target(whole.as_ref())?, whole))) {
            Ok((target, whole)) => (whole.unwrap_or(stored.record), target),
            Err(skip) => {
                plan.refuse(skip, &letter.id);
                return self.job_or_nothing(viewer, &key, &plan).await;
            }
        };
        let record = edited(&edit, &whole, &target, SAMPLE_ID, self.clock.now());
        self.check_sizes(record, &item, &edit).await?;
        let warnings = self.warnings(&plan, viewer, &completeness).await?;
        let record = plan.record(spec, warnings, key);
        let change = Change::Edit(Box::new(record), item, Box::new(edit));
        self.write_job(viewer, change).await
    }

    pub(crate) fn check_accepts_edits(&self) -> Result<(), Status> {
        if self.redrives.accepts_edits {
            return Ok(());
        }
        let text = "this inspector does not accept edits; set dlq_inspector.redrive.edit";
        Err(status(Code::FailedPrecondition, text, "EDIT_DISABLED", []))
    }

    /// Refuses an edit if the record cannot be written to its destination, or the edit not to the topic of
    /// redrives. Batches can be compressed, but it is unknown how well.
    async fn check_sizes(&self, record: Output, item: &Item, edit: &Edit) -> Result<(), Status> {
        let mut chunks = job::chunks(std::slice::from_ref(item));
        if let Some(chunk) = chunks.first_mut() {
            chunk.edit = Some(edit.to_record());
        }
        let chunks = chunks.into_iter().map(|chunk| Output {
            topic: self.redrives.topic.clone(),
            partition: Some(0),
            key: Some(plan_key(SAMPLE_ID, 0).into()),
            value: Some(Bytes::from(chunk.encode_to_vec())),
            headers: Headers::new(),
        });
        let outputs: Vec<Output> = chunks.chain([record]).collect();
        let topics: Vec<Arc<str>> = outputs.iter().map(|output| output.topic.clone()).collect();
        let limits = self.redrives.surveyor.max_message_bytes(&topics).await;
        let limits = limits.map_err(|error| kafka_unavailable(&error))?;
        for output in &outputs {
            // Without the right to see its configuration, the limit of a topic is unknown.
            let limit = limits.get(&*output.topic).copied().unwrap_or(u64::MAX);
            let size = output.size() as u64;
            if size > limit {
                let topic = &output.topic;
                let problem = format!(
                    "takes {size} bytes in the topic `{topic}`, which accepts {limit} (max.message.bytes)"
                );
                return Err(invalid("edit", problem, "EDIT_TOO_LARGE", []));
            }
        }
        Ok(())
    }
}

fn changed(id: &str) -> Status {
    let text = format!(
        "the dead letter `{}` has another content_hash; look at it again before you edit it",
        bounded(id)
    );
    status(Code::Aborted, text, "DEAD_LETTER_CHANGED", [("id", bounded(id))])
}
