//! The gRPC service `redeliver.v1.RedriveService`. How changes are written and executed is in [`crate::redrive`].

mod edit;
mod plan;
mod preview;
pub(super) mod visible;

use std::sync::Arc;

use redeliver_core::Position;
use redeliver_kafka::survey::Surveyor;
use redeliver_proto::convert::{from_timestamp, to_timestamp};
use redeliver_proto::error::{invalid, reasons, status};
use redeliver_proto::page::fitting;
use redeliver_proto::v1;
use redeliver_proto::v1::redrive_service_server::RedriveService;
use redeliver_runtime::config::Verb;
use redeliver_service::audit::AuditLog;
use redeliver_service::grpc::Reply;
use redeliver_store::{Replica, Writer};
use tonic::{Code, Request, Status};

use super::list::page_size;
use super::token::{NameToken, PageToken, query_hash};
use super::{Api, bounded};
use crate::access::Viewer;
use crate::index::{Cursor, IndexedLetter};
use crate::redrive::change::{Change, ChangeError, ChangeRequest, JobChange, RefusedChange};
use crate::redrive::job::{self, CHUNK, Item, Job};
use crate::redrive::jobs::{JobEntry, JobProblem, Jobs};
use crate::redrive::pace::waits_until;
use crate::redrive::record::Destinations;
use crate::redrive::returns::{count_returned, returning_to};
use crate::redrive::room::MAX_EDIT_BYTES;

use visible::{hide_topics, sees, sees_destination};

/// The maximum length of the id of a job.
const MAX_ID: usize = 32;

/// The jobs. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Redrives {
    pub(crate) jobs: Replica<Jobs>,
    pub(crate) writer: Writer<ChangeRequest>,
    pub(crate) audit: AuditLog,
    pub(crate) destinations: Arc<Destinations>,
    /// Tells what the destinations accept.
    pub(crate) surveyor: Surveyor,
    /// The topic of the jobs.
    pub(crate) topic: Arc<str>,
    /// Whether records may be edited.
    pub(crate) accepts_edits: bool,
}

#[tonic::async_trait]
impl RedriveService for Api {
    async fn plan_redrive(&self, request: Request<v1::PlanRedriveRequest>) -> Reply<v1::Redrive> {
        let (viewer, request) = self.open(request)?;
        let response = self.plan(&viewer, request);
        self.call("PlanRedrive", &viewer, response).await
    }

    async fn plan_edit(&self, request: Request<v1::PlanEditRequest>) -> Reply<v1::Redrive> {
        let (viewer, request) = self.open(request)?;
        let response = self.plan_of_edit(&viewer, request);
        self.call("PlanEdit", &viewer, response).await
    }

    async fn start_redrive(&self, request: Request<v1::ChangeRedriveRequest>) -> Reply<v1::Redrive> {
        let (viewer, request) = self.open(request)?;
        let response = async {
            let start_at = request.start_at.as_ref().map(|at| {
                let at = from_timestamp(at).filter(|at| *at > self.clock.now());
                let problem = "must be a time in the future; leave it out to start now";
                at.ok_or_else(|| invalid("start_at", problem, "START_INVALID", []))
            });
            let change = JobChange::Start(start_at.transpose()?);
            self.change_job(&viewer, &request, change).await
        };
        self.observe("StartRedrive", response).await
    }

    async fn pause_redrive(&self, request: Request<v1::ChangeRedriveRequest>) -> Reply<v1::Redrive> {
        let (viewer, request) = self.open(request)?;
        let response = self.change_running(&viewer, &request, JobChange::Pause);
        self.observe("PauseRedrive", response).await
    }

    async fn resume_redrive(&self, request: Request<v1::ChangeRedriveRequest>) -> Reply<v1::Redrive> {
        let (viewer, request) = self.open(request)?;
        let response = self.change_running(&viewer, &request, JobChange::Resume);
        self.observe("ResumeRedrive", response).await
    }

    async fn cancel_redrive(&self, request: Request<v1::ChangeRedriveRequest>) -> Reply<v1::Redrive> {
        let (viewer, request) = self.open(request)?;
        let response = self.change_running(&viewer, &request, JobChange::Cancel);
        self.observe("CancelRedrive", response).await
    }

    async fn set_redrive_rate(&self, request: Request<v1::SetRedriveRateRequest>) -> Reply<v1::Redrive> {
        let (viewer, request) = self.open(request)?;
        let change = JobChange::Rate(request.rate_per_second);
        let request = v1::ChangeRedriveRequest {
            id: request.id,
            expected_revision: request.expected_revision,
            start_at: None,
        };
        let response = self.change_job(&viewer, &request, change);
        self.observe("SetRedriveRate", response).await
    }

    async fn get_redrive(&self, request: Request<v1::GetRedriveRequest>) -> Reply<v1::Redrive> {
        let (viewer, request) = self.open(request)?;
        let response = async {
            self.visible_job(&viewer, &request.id).await?;
            self.redrive_message(&viewer, &request.id).await
        };
        self.observe("GetRedrive", response).await
    }

    async fn get_redrive_preview(
        &self,
        request: Request<v1::GetRedriveRequest>,
    ) -> Reply<v1::RedrivePreview> {
        let (viewer, request) = self.open(request)?;
        let preview = self.preview(&viewer, &request.id);
        self.call_with_memory("GetRedrivePreview", &viewer, preview).await
    }

    async fn list_redrives(
        &self,
        request: Request<v1::ListRedrivesRequest>,
    ) -> Reply<v1::ListRedrivesResponse> {
        let (viewer, request) = self.open(request)?;
        let response = self.observe("ListRedrives", self.page(&viewer, &request));
        self.held(&viewer, response).await
    }

    async fn list_redrive_items(
        &self,
        request: Request<v1::ListRedriveItemsRequest>,
    ) -> Reply<v1::ListRedriveItemsResponse> {
        let (viewer, request) = self.open(request)?;
        let response = self.observe("ListRedriveItems", self.items(&viewer, &request));
        self.held(&viewer, response).await
    }
}

impl Api {
    fn jobs(&self) -> Result<Arc<Jobs>, Status> {
        self.redrives.jobs.state().ok_or_else(|| {
            let text = "the topic of redrives was not read yet; retry later";
            status(Code::Unavailable, text, "REDRIVES_UNKNOWN", [])
        })
    }

    /// The record that a job has written for a dead letter, if the caller sees the job.
    pub(super) fn redriven_as(&self, viewer: &Viewer, letter: &IndexedLetter) -> Option<v1::RedrivenAs> {
        // Without the topic of jobs, the dead letter is shown as well.
        let jobs = self.redrives.jobs.state()?;
        let item = Item {
            id: letter.id.clone(),
            content: letter.content,
        };
        let (job, written) = jobs.redriven_by(&item)?;
        sees(viewer, &job).then(|| v1::RedrivenAs {
            redrive_id: job.spec().id.clone(),
            edited: job.spec().edited.clone(),
            written: self.written_message(viewer, written.as_ref()),
        })
    }

    /// The job with this id, if the caller sees it. One that this process does not know may have been planned by another one a moment ago.
    async fn visible_job(&self, viewer: &Viewer, id: &str) -> Result<(Arc<JobEntry>, Job), Status> {
        let is_id = id.len() <= MAX_ID && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_known = |jobs: &Jobs| jobs.get(id).is_some() || jobs.table.problem(id).is_some();
        if !is_known(&*self.jobs()?) && is_id {
            self.redrives.jobs.wait_applied(is_known).await;
        }
        let jobs = self.jobs()?;
        // A job of a newer version can be read, but not changed.
        if let Some(problem) = jobs
            .table
            .problem(id)
            .filter(|problem| !matches!(problem, JobProblem::Newer))
        {
            let text = unknown_format(&problem);
            return Err(status(
                Code::FailedPrecondition,
                text,
                "REDRIVE_UNKNOWN_FORMAT",
                [],
            ));
        }
        let found = jobs.get(id).and_then(|entry| Some((entry.clone(), entry.job()?)));
        found
            .filter(|(_, job)| sees(viewer, job))
            .ok_or_else(|| no_job(id))
    }

    async fn change_running(
        &self,
        viewer: &Viewer,
        request: &v1::ChangeRedriveRequest,
        change: JobChange,
    ) -> Result<v1::Redrive, Status> {
        if request.start_at.is_some() {
            let problem = "is only for StartRedrive";
            return Err(invalid("start_at", problem, "START_INVALID", []));
        }
        self.change_job(viewer, request, change).await
    }

    async fn change_job(
        &self,
        viewer: &Viewer,
        request: &v1::ChangeRedriveRequest,
        change: JobChange,
    ) -> Result<v1::Redrive, Status> {
        let (_, job) = self.visible_job(viewer, &request.id).await?;
        // Neither topics nor destinations of a job ever change.
        let topics =
            |counts: &[v1::RedriveCount]| counts.iter().map(|count| count.topic.clone()).collect::<Vec<_>>();
        let (sources, destinations) = (topics(&job.spec().sources), topics(&job.spec().destinations));
        viewer.require_operating(sources.iter().map(String::as_str))?;
        for destination in &destinations {
            // Does not name one that the caller does not see.
            if sees_destination(viewer, &self.redrives.destinations, destination) {
                viewer.require_destination(destination)?;
            } else {
                viewer.require_all(Verb::Operate)?;
            }
        }
        let begins = matches!(change, JobChange::Start(_) | JobChange::Resume);
        // As above, does not name one that the caller does not see.
        if begins
            && job
                .spec()
                .origins
                .iter()
                .any(|origin| !viewer.sees(&origin.topic))
        {
            viewer.require_all(Verb::Read)?;
        }
        if job.is_edit() && begins {
            self.check_accepts_edits()?;
            for source in &sources {
                viewer.require_editing(source)?;
            }
        }
        let change = Change::Job(request.id.clone(), request.expected_revision, change);
        self.write_job(viewer, change).await
    }

    async fn write_job(&self, viewer: &Viewer, change: Change) -> Result<v1::Redrive, Status> {
        let changing = self.redrives.writer.change(ChangeRequest {
            change,
            by: viewer.name().clone(),
            at: self.clock.now(),
            audit: self.redrives.audit.clone(),
        });
        let changed = changing.await.map_err(|error| change_failed(&error))?;
        self.redrive_message(viewer, &changed.key).await
    }

    /// A job, with what has come back up to now.
    async fn redrive_message(&self, viewer: &Viewer, id: &str) -> Result<v1::Redrive, Status> {
        let jobs = self.jobs()?;
        let found = jobs.get(id).and_then(|entry| Some((entry.clone(), entry.job()?)));
        let (entry, job) = found.ok_or_else(|| no_job(id))?;
        let mut message = self.message(&entry, &job);
        self.count_returned(vec![&mut message]).await;
        self.hide_topics(viewer, &mut message);
        Ok(message)
    }

    /// Call it last: what is counted depends on the topics.
    fn hide_topics(&self, viewer: &Viewer, job: &mut v1::Redrive) {
        hide_topics(viewer, &self.redrives.destinations, &self.json_fields, job);
    }

    /// Where a job has written a record, if the caller may know the topic.
    fn written_message(&self, viewer: &Viewer, written: Option<&Position>) -> Option<v1::Position> {
        let sees =
            |written: &&Position| sees_destination(viewer, &self.redrives.destinations, &written.topic);
        written.filter(sees).map(v1::Position::from)
    }

    /// Counts what has come back up to now, also since the ends of jobs.
    async fn count_returned(&self, mut jobs: Vec<&mut v1::Redrive>) {
        if !*self.shared.caught_up.borrow() {
            return;
        }
        jobs.retain(|job| job.kind() == v1::RedriveKind::Redrive && job.done > 0);
        let topics = jobs.iter().map(|job| {
            let topics = returning_to(job, &self.redrives.destinations);
            (job.id.clone(), topics)
        });
        let (topics, now) = (topics.collect::<Vec<_>>(), self.clock.now());
        let counting = self.pool.query(move |connection| {
            let counts = topics.iter();
            let counts = counts.map(|(id, topics)| count_returned(connection, id, topics, now));
            counts.collect::<rusqlite::Result<Vec<u32>>>()
        });
        // Without an answer of the index, what the executor has counted last is shown.
        if let Ok(counts) = counting.await {
            for (job, returned) in jobs.into_iter().zip(counts) {
                job.returned = returned;
            }
        }
    }

    fn message(&self, entry: &JobEntry, job: &Job) -> v1::Redrive {
        let progress = entry.progress();
        let state = job::state(job, &progress);
        let waits = (state == v1::RedriveState::Running)
            .then(|| waits_until(job, &progress, self.clock.now()))
            .flatten();
        let is_auto_paused = job::is_auto_paused(job, &progress) && state == v1::RedriveState::Paused;
        v1::Redrive {
            revision: job.record.revision,
            state: state.into(),
            done: progress.done,
            failed: progress.failed,
            skipped: progress.skipped,
            pending: job.spec().total.saturating_sub(progress.next),
            returned: progress.returned,
            auto_pause_reason: if is_auto_paused {
                progress.auto_pause_reason
            } else {
                String::new()
            },
            waits_until: waits.map(to_timestamp),
            problem: entry.problem(),
            ..job.spec().clone()
        }
    }

    async fn page(
        &self,
        viewer: &Viewer,
        request: &v1::ListRedrivesRequest,
    ) -> Result<v1::ListRedrivesResponse, Status> {
        let size = page_size(request.page_size)?;
        let query = query_hash(&["redrives"]);
        let before = NameToken::decode(query, &request.page_token)?;
        let jobs = self.jobs()?;
        let visible = jobs.iter().rev().filter(|(id, _, job)| {
            before.as_ref().is_none_or(|before| *id < before.0.as_str()) && sees(viewer, job)
        });
        let messages = visible.map(|(id, entry, job)| (id, self.message(entry, &job)));
        let (mut redrives, last) = fitting(messages, size);
        let next = last.map_or_else(String::new, |id| NameToken(id.to_owned()).encode(query));
        let running = redrives
            .iter_mut()
            .filter(|job| job.state() == v1::RedriveState::Running);
        self.count_returned(running.collect()).await;
        for redrive in &mut redrives {
            self.hide_topics(viewer, redrive);
        }
        Ok(v1::ListRedrivesResponse {
            redrives,
            next_page_token: next,
        })
    }

    async fn items(
        &self,
        viewer: &Viewer,
        request: &v1::ListRedriveItemsRequest,
    ) -> Result<v1::ListRedriveItemsResponse, Status> {
        let (entry, job) = self.visible_job(viewer, &request.id).await?;
        let size = page_size(request.page_size)?;
        let query = query_hash(&["redrive-items", &request.id]);
        let after = PageToken::decode(query, &request.page_token)?;
        let from = after.map_or(0, |cursor| u32::try_from(cursor.dead_at).unwrap_or(u32::MAX));
        let to = from
            .saturating_add(u32::try_from(size).unwrap_or(u32::MAX))
            .min(job.spec().total);
        let mut items = Vec::with_capacity(size);
        for chunk in from / CHUNK..to.div_ceil(CHUNK) {
            let (planned, outcomes) = (entry.items(chunk).unwrap_or_default(), entry.outcomes(chunk));
            let numbers = outcomes.numbers();
            for (number, item) in (chunk * CHUNK..).zip(planned) {
                if (from..to).contains(&number) {
                    let index = (number % CHUNK) as usize;
                    items.push(v1::RedriveItem {
                        id: item.id.to_string(),
                        outcome: numbers.get(index).copied().unwrap_or_default().into(),
                        written: self.written_message(viewer, outcomes.written(index).as_ref()),
                    });
                }
            }
        }
        let token = |next: u32| {
            let cursor = Cursor {
                dead_at: next.into(),
                id_hash: 0,
            };
            PageToken::encode(query, cursor)
        };
        Ok(v1::ListRedriveItemsResponse {
            items,
            next_page_token: if to < job.spec().total {
                token(to)
            } else {
                String::new()
            },
        })
    }
}

/// What to do about a job that this version does not change.
fn unknown_format(problem: &JobProblem) -> String {
    format!("the redrive {problem}; upgrade this inspector, or change it with the version that wrote it")
}

fn no_job(id: &str) -> Status {
    let text = format!("no such redrive: `{}`", bounded(id));
    status(Code::NotFound, text, "REDRIVE_NOT_FOUND", [("id", bounded(id))])
}

fn change_failed(error: &ChangeError) -> Status {
    let (code, reason, text) = match error {
        // A job never loses its revision.
        ChangeError::Revised(0) | ChangeError::Refused(RefusedChange::Missing) => (
            Code::NotFound,
            "REDRIVE_NOT_FOUND",
            "no such redrive; it was removed meanwhile".to_owned(),
        ),
        ChangeError::Revised(revision) => (
            Code::Aborted,
            "REDRIVE_REVISED",
            format!("the redrive has revision {revision}; get it again before you change it"),
        ),
        ChangeError::Unsupported(problem) => (
            Code::FailedPrecondition,
            "REDRIVE_UNKNOWN_FORMAT",
            unknown_format(problem),
        ),
        ChangeError::Refused(RefusedChange::Invalid(invalid)) => (
            Code::FailedPrecondition,
            "REDRIVE_UNKNOWN_FORMAT",
            unknown_format(&JobProblem::Unreadable(*invalid)),
        ),
        ChangeError::Refused(RefusedChange::State(state)) => (
            Code::FailedPrecondition,
            "REDRIVE_STATE",
            format!(
                "the redrive is {}, so that this change makes no sense",
                state.as_str_name().trim_start_matches("REDRIVE_STATE_")
            ),
        ),
        ChangeError::Refused(RefusedChange::RequestIdUsed(id)) => return plan::request_id_used(id),
        ChangeError::Refused(RefusedChange::TooMany) => (
            Code::ResourceExhausted,
            "TOO_MANY_REDRIVES",
            "there are too many redrives that have not ended; cancel some".to_owned(),
        ),
        ChangeError::Refused(RefusedChange::TooManyEdits) => (
            Code::ResourceExhausted,
            "TOO_MANY_EDITS",
            format!(
                "the edits of all redrives would take more than {} MiB; cancel some edits that have not ended, or make this one smaller",
                MAX_EDIT_BYTES >> 20
            ),
        ),
        ChangeError::Unavailable(_) => (Code::Unavailable, "KAFKA_UNAVAILABLE", error.to_string()),
        ChangeError::Unconfirmed(reason) => (
            Code::Unknown,
            reasons::UNCONFIRMED,
            format!(
                "Kafka did not confirm the change, so it may or may not take effect; repeat it with the request id or the expected revision ({reason})"
            ),
        ),
    };
    status(code, text, reason, [])
}

#[cfg(test)]
mod tests {
    use redeliver_proto::error::reason;

    use super::*;

    #[test]
    fn refusal_names_limit_or_remedy() {
        let refused = |error| {
            let status = change_failed(&error);
            (reason(&status).unwrap(), status.message().to_owned())
        };
        let (reason, text) = refused(ChangeError::Refused(RefusedChange::TooManyEdits));
        assert_eq!(reason, "TOO_MANY_EDITS");
        assert!(text.contains("more than 64 MiB"), "{text}");
        let (reason, text) = refused(ChangeError::Unsupported(JobProblem::Newer));
        assert_eq!(reason, "REDRIVE_UNKNOWN_FORMAT");
        assert!(
            text.contains("was written by a newer version") && text.contains("upgrade this inspector"),
            "{text}"
        );
    }
}
