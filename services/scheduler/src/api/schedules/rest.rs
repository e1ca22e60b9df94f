//! REST: `/v1/schedules`.
//!
//! | request | answer |
//! |---|---|
//! | `POST /v1/schedules` | 201 created, 200 the same schedule exists, 409 another one exists, 503 index full |
//! | `GET /v1/schedules` | 200 |
//! | `GET /v1/schedules/{id}` | 200, 404 |
//! | `PUT /v1/schedules/{id}` | 200, 404, 409 another revision than `expectedRevision`, or than `revision` of the body |
//! | `DELETE /v1/schedules/{id}` | 200, 404 |
//! | `POST /v1/schedules/{id}:pause`, `:resume`, `:trigger` | 200, 404 |
//! | `GET /v1/schedules/{id}/preview` | 200, 404 |
//! | `POST /v1/schedules:preview` | 200 |

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use redeliver_proto::v1;
use redeliver_proto::v1::change_schedule::{Change, Delete, Pause, Resume, Trigger};
use serde::{Deserialize, Serialize};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{IntoParams, PartialSchema, ToSchema};

use super::view::{OccurrenceView, UnreadableView};
use super::{Expected, PreviewRequest, Previewed, ScheduleView, changed};
use crate::api::call::Call;
use crate::api::documented::{BodyProblems, DocumentedRouter, Problems, ScheduleProblems};
use crate::api::error::RequestError;
use crate::api::jobs::Jobs;
use crate::api::list::{ListSchedules, SchedulePage};
use crate::api::problem::Problem;
use crate::api::rest::{JsonBody, Options, Params, ReasonHeader};
use crate::index::Index;
use crate::request::{Field, Format, ReadSchedule, ScheduleRequest, read_instant, read_schedule_json};

const FORMAT: Format = Format::Json;

/// Adds the routes.
pub(in crate::api) fn add<I: Index>(
    router: DocumentedRouter<Arc<Jobs<I>>>,
    max_body: usize,
) -> DocumentedRouter<Arc<Jobs<I>>> {
    router
        .with(__path_create, &create::<I>, max_body)
        .with(__path_list, &list::<I>, max_body)
        .with(__path_show, &show::<I>, max_body)
        .with(__path_update, &update::<I>, max_body)
        .with(__path_delete, &delete::<I>, max_body)
        .with(__path_preview, &preview::<I>, max_body)
        .with(__path_preview_definition, &preview_definition::<I>, max_body)
        .with(__path_pause, &pause::<I>, max_body)
        .with(__path_resume, &resume::<I>, max_body)
        .with(__path_trigger, &trigger::<I>, max_body)
}

/// Creates a schedule
///
/// Its first occurrence is after the creation, and its progress starts from zero, even if the body is the
/// response of `GET` for another one. The `state` that it shows must be that of the new schedule, which is
/// not paused. Needs the scope `jobs:write` for the application.
#[utoipa::path(
    post,
    path = "/v1/schedules",
    operation_id = "createSchedule",
    params(ReasonHeader),
    request_body = ScheduleRequest,
    responses(
        (status = 201, description = "A new schedule", body = ScheduleView),
        (status = 200, description = "The same schedule was created before", body = ScheduleView),
        Problems, BodyProblems, ScheduleProblems,
    ),
)]
async fn create<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    body: JsonBody,
) -> Result<Response, Problem> {
    let ReadSchedule { id, spec, state, .. } = read_definition(&jobs, &body)?;
    let missing = || Field("id").malformed(FORMAT, "is missing; choose an id such as nightly-report");
    let id = id.ok_or_else(missing)?;
    let location = format!("/v1/schedules/{id}");
    let (schedule, is_new) = jobs.create_schedule(&call, id, spec, state).await?;
    let status = if is_new {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    let view = Json(ScheduleView::from(schedule));
    Ok((status, [(header::LOCATION, location)], view).into_response())
}

/// A page of schedules.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(in crate::api) struct SchedulesResponse {
    /// By the due time of the next occurrence, without key, data and headers of their jobs; paused and finished ones last.
    schedules: Vec<ScheduleView>,
    /// Unreadable schedules that belong to this page. With `app`, also those of which it cannot read the
    /// application.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unreadable: Vec<UnreadableView>,
    /// The `pageToken` of the next page; missing on the last page.
    #[serde(skip_serializing_if = "String::is_empty")]
    next_page_token: String,
}

#[derive(Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// Only schedules of this application
    #[serde(default)]
    app: String,
    /// The maximum number of schedules, 100 by default, at most 1000
    #[serde(default)]
    #[param(value_type = i64, minimum = 0, maximum = 4294967295_u64)]
    page_size: u32,
    /// `nextPageToken` of the previous page, which had the same `app`
    #[serde(default)]
    page_token: String,
}

/// Lists schedules
///
/// Needs the scope `jobs:read` for the application, or for all of them without `app`.
#[utoipa::path(
    get,
    path = "/v1/schedules",
    operation_id = "listSchedules",
    params(ListQuery),
    responses((status = 200, description = "A page of schedules", body = SchedulesResponse), Problems),
)]
async fn list<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Params(query): Params<ListQuery>,
) -> Result<Json<SchedulesResponse>, Problem> {
    let request = ListSchedules {
        app: (!query.app.is_empty()).then_some(query.app),
        page_size: query.page_size,
        page_token: query.page_token,
    };
    let SchedulePage {
        schedules,
        unreadable,
        next_page_token,
    } = jobs.list_schedules(&call, &request).await?;
    Ok(Json(SchedulesResponse {
        schedules: schedules.into_iter().map(ScheduleView::from).collect(),
        unreadable: unreadable.into_iter().map(UnreadableView::from).collect(),
        next_page_token,
    }))
}

/// The schedule of a request.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
struct SchedulePath {
    /// The id of the schedule
    #[param(pattern = "^[a-zA-Z0-9._-]{1,128}$")]
    id: String,
}

/// Gets a schedule
///
/// Needs the scope `jobs:read` for the application of the schedule.
#[utoipa::path(
    get,
    path = "/v1/schedules/{id}",
    operation_id = "getSchedule",
    params(SchedulePath),
    responses((status = 200, description = "The schedule", body = ScheduleView), Problems, ScheduleProblems),
)]
async fn show<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Path(SchedulePath { id }): Path<SchedulePath>,
) -> Result<Json<ScheduleView>, Problem> {
    let schedule = jobs.get_schedule(&call, &id).await?;
    Ok(Json(ScheduleView::whole(schedule)))
}

#[derive(Deserialize, IntoParams)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct UpdateQuery {
    /// Answer 409 unless the schedule has this revision. By default, that in the body
    #[param(minimum = 1)]
    expected_revision: Option<u32>,
}

/// Replaces the definition of a schedule
///
/// The next occurrence is the first one of the new definition after now and after the last decided one. The body may be what
/// `GET` returned. Then, the answer is 409 if the schedule has another `revision` meanwhile, and 422 if it would have another `state`:
/// `PUT` neither pauses nor resumes. The other progress is ignored. Needs the scope `jobs:write` for the previous and the new application.
#[utoipa::path(
    put,
    path = "/v1/schedules/{id}",
    operation_id = "updateSchedule",
    params(SchedulePath, UpdateQuery, ReasonHeader),
    request_body = ScheduleRequest,
    responses(
        (status = 200, description = "The schedule has this definition", body = ScheduleView),
        Problems, BodyProblems, ScheduleProblems,
    ),
)]
async fn update<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Path(SchedulePath { id }): Path<SchedulePath>,
    Params(query): Params<UpdateQuery>,
    body: JsonBody,
) -> Result<Json<ScheduleView>, Problem> {
    let UpdateQuery { expected_revision } = query;
    let ReadSchedule {
        id: given,
        spec,
        state,
        revision,
    } = read_definition(&jobs, &body)?;
    if given.is_some_and(|given| given != id) {
        let problem = "differs from the path; the id of a schedule cannot be changed";
        return Err(Field("id").malformed(FORMAT, problem).into());
    }
    if let (Some(expected), Some(given)) = (expected_revision, revision)
        && expected != given
    {
        let problem = format!("is {given}, but `expectedRevision` is {expected}; leave out one of the two");
        return Err(Field("revision").malformed(FORMAT, &problem).into());
    }
    let expected = Expected {
        state,
        revision: expected_revision.or(revision),
    };
    Ok(Json(
        jobs.update_schedule(&call, id, spec, expected).await?.into(),
    ))
}

/// The response to a deletion.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct DeletedSchedule {
    id: String,
}

/// Deletes a schedule
///
/// Jobs that it has created stay. Needs the scope `jobs:write` for the application of the schedule.
#[utoipa::path(
    delete,
    path = "/v1/schedules/{id}",
    operation_id = "deleteSchedule",
    params(SchedulePath, ReasonHeader),
    responses((status = 200, description = "Deleted", body = DeletedSchedule), Problems, ScheduleProblems),
)]
async fn delete<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Path(SchedulePath { id }): Path<SchedulePath>,
) -> Result<Json<DeletedSchedule>, Problem> {
    jobs.change_schedule(&call, id.clone(), Change::Delete(Delete {}))
        .await?;
    Ok(Json(DeletedSchedule { id }))
}

/// A command without options: `{}`.
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct NoOptions {}

/// How to resume a schedule.
#[derive(Default, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(in crate::api) struct ResumeRequest {
    /// Whether what fell due during the pause is subject to the misfire policy. Otherwise, it is skipped.
    catch_up: Option<bool>,
}

/// Pauses a schedule
///
/// Without an effect if it is paused. Needs the scope `jobs:write` for the application of the schedule.
#[utoipa::path(
    post,
    path = "/v1/schedules/{id}:pause",
    operation_id = "pauseSchedule",
    params(SchedulePath, ReasonHeader),
    request_body = NoOptions,
    responses(
        (status = 200, description = "The schedule is paused", body = ScheduleView),
        Problems, BodyProblems, ScheduleProblems,
    ),
)]
async fn pause<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Path(SchedulePath { id }): Path<SchedulePath>,
    Options(NoOptions {}): Options<NoOptions>,
) -> Result<Json<ScheduleView>, Problem> {
    let paused = jobs.change_schedule(&call, id, Change::Pause(Pause {})).await?;
    Ok(Json(changed(paused)?.into()))
}

/// The response to a resumption.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct ResumedSchedule {
    schedule: Option<ScheduleView>,
    /// The number of occurrences that fell due during the pause and are skipped.
    skipped: u64,
}

/// Resumes a paused schedule
///
/// Without an effect if it is not paused. Needs the scope `jobs:write` for the application of the schedule.
#[utoipa::path(
    post,
    path = "/v1/schedules/{id}:resume",
    operation_id = "resumeSchedule",
    params(SchedulePath, ReasonHeader),
    request_body = ResumeRequest,
    responses(
        (status = 200, description = "The schedule is not paused", body = ResumedSchedule),
        Problems, BodyProblems, ScheduleProblems,
    ),
)]
async fn resume<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Path(SchedulePath { id }): Path<SchedulePath>,
    Options(options): Options<ResumeRequest>,
) -> Result<Json<ResumedSchedule>, Problem> {
    let catch_up = options.catch_up.unwrap_or(false);
    let v1::CommandOutcome {
        schedule, skipped, ..
    } = jobs
        .change_schedule(&call, id, Change::Resume(Resume { catch_up }))
        .await?;
    Ok(Json(ResumedSchedule {
        schedule: schedule.map(ScheduleView::from),
        skipped,
    }))
}

/// The job of a triggered schedule.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(in crate::api) struct TriggeredSchedule {
    job_id: String,
}

/// Creates one additional job of a schedule now
///
/// Even if the schedule is paused or finished. It changes neither the following occurrences nor the count.
/// Needs the scope `jobs:write` for the application of the schedule.
#[utoipa::path(
    post,
    path = "/v1/schedules/{id}:trigger",
    operation_id = "triggerSchedule",
    params(SchedulePath, ReasonHeader),
    request_body = NoOptions,
    responses(
        (status = 200, description = "The job", body = TriggeredSchedule),
        Problems, BodyProblems, ScheduleProblems,
    ),
)]
async fn trigger<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Path(SchedulePath { id }): Path<SchedulePath>,
    Options(NoOptions {}): Options<NoOptions>,
) -> Result<Json<TriggeredSchedule>, Problem> {
    let triggered = jobs
        .change_schedule(&call, id, Change::Trigger(Trigger {}))
        .await?;
    let job_id = triggered.job.unwrap_or_default().id;
    Ok(Json(TriggeredSchedule { job_id }))
}

/// The body of a preview.
pub(in crate::api) struct PreviewDefinition;

impl ToSchema for PreviewDefinition {}

impl PartialSchema for PreviewDefinition {
    fn schema() -> RefOr<Schema> {
        let mut schema = ScheduleRequest::schema();
        if let RefOr::T(Schema::Object(preview)) = &mut schema {
            let description = "The definition of a recurring schedule, which may lack `appName` and the other fields of its job.";
            let times = ["cron", "zone", "every", "start", "end", "maxCount", "jitter"];
            preview.description = Some(description.to_owned());
            preview.additional_properties = None;
            preview.required.clear();
            preview
                .properties
                .retain(|field, _| times.contains(&field.as_str()));
        }
        schema
    }
}

/// The next occurrences.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct PreviewResponse {
    /// By time. Fewer than requested if the schedule ends.
    occurrences: Vec<OccurrenceView>,
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct PreviewQuery {
    /// The maximum number of occurrences, 10 by default, at most 1000
    #[serde(default)]
    #[param(maximum = 1000)]
    count: u32,
    /// Only occurrences after this time, by default now
    #[param(format = DateTime)]
    after: Option<String>,
}

/// Previews the next occurrences of a schedule
///
/// Needs the scope `jobs:read` for the application of the schedule.
#[utoipa::path(
    get,
    path = "/v1/schedules/{id}/preview",
    operation_id = "previewSchedule",
    params(SchedulePath, PreviewQuery),
    responses((status = 200, description = "The occurrences", body = PreviewResponse), Problems, ScheduleProblems),
)]
async fn preview<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Path(SchedulePath { id }): Path<SchedulePath>,
    Params(query): Params<PreviewQuery>,
) -> Result<Json<PreviewResponse>, Problem> {
    preview_of(&jobs, &call, Previewed::Id(id), query).await
}

/// Previews the occurrences of a definition
///
/// The definition may lack its job. Needs the scope `jobs:read` for the application of the job, or for any application without one.
#[utoipa::path(
    post,
    path = "/v1/schedules:preview",
    operation_id = "previewDefinition",
    params(PreviewQuery),
    request_body = PreviewDefinition,
    responses((status = 200, description = "The occurrences", body = PreviewResponse), Problems, BodyProblems),
)]
async fn preview_definition<I: Index>(
    State(jobs): State<Arc<Jobs<I>>>,
    call: Call,
    Params(query): Params<PreviewQuery>,
    body: JsonBody,
) -> Result<Json<PreviewResponse>, Problem> {
    let ReadSchedule { spec, .. } = read_definition(&jobs, &body)?;
    let definition = Previewed::Definition(Box::new(spec));
    preview_of(&jobs, &call, definition, query).await
}

async fn preview_of<I: Index>(
    jobs: &Jobs<I>,
    call: &Call,
    schedule: Previewed,
    query: PreviewQuery,
) -> Result<Json<PreviewResponse>, Problem> {
    let time = |text: String| read_instant(Field("after"), &text, &jobs.rules.time_zone);
    let after = query.after.map(time).transpose()?;
    let request = PreviewRequest {
        schedule,
        after,
        count: query.count,
    };
    let occurrences = jobs.preview_schedule(call, request).await?;
    let occurrences = occurrences.into_iter().map(OccurrenceView::from).collect();
    Ok(Json(PreviewResponse { occurrences }))
}

/// The definition in the body of a request.
fn read_definition<I: Index>(
    jobs: &Jobs<I>,
    JsonBody(body): &JsonBody,
) -> Result<ReadSchedule, RequestError> {
    Ok(read_schedule_json(body, &jobs.rules.time_zone)?)
}
