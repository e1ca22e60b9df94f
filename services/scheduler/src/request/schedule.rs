//! Requests that change recurring schedules.

use jiff::tz::TimeZone;
use redeliver_core::failure::bounded_text;
use redeliver_core::{Failure, Headers, Timestamp};
use redeliver_proto::convert::{from_duration, from_priority, to_duration, to_priority};
use redeliver_proto::v1;
use redeliver_recurrence::{CatchUp, Invalid, Recurrence, ScheduleId};

use super::field::{Field, Format};
use super::job::{self, missing_app};
use super::when::When;
use super::{Envelope, Request, Rules};
use crate::schedules::read_spec;

/// A change of a schedule.
#[derive(Clone, Debug, PartialEq)]
pub struct ScheduleChange {
    /// The id of the schedule.
    pub id: ScheduleId,
    /// What to do.
    pub action: Action,
    /// The application of its job; with another one, it is unknown to this change. `None`: any application.
    pub expected_app: Option<String>,
}

/// What to do with a schedule.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Create it.
    Create(Box<ScheduleDefinition>),
    /// Replace its definition.
    Update {
        /// The new definition.
        definition: Box<ScheduleDefinition>,
        /// The revision that it must have.
        expected_revision: Option<u32>,
    },
    /// Pause it.
    Pause,
    /// Resume it.
    Resume(CatchUp),
    /// Create one additional job now.
    Trigger,
    /// Delete it.
    Delete,
}

/// When a schedule recurs, and the job that each occurrence creates.
#[derive(Clone, Debug, PartialEq)]
pub struct ScheduleDefinition {
    /// When it recurs.
    pub recurrence: Recurrence,
    /// The job.
    pub job: v1::JobTemplate,
}

/// Checks a change of a schedule.
pub(super) fn check(
    change: v1::ChangeSchedule,
    format: Format,
    rules: &Rules,
    envelope: &Envelope<'_>,
) -> Result<ScheduleChange, Failure> {
    use v1::change_schedule::Change;
    let invalid = |problem| Field("command").malformed(format, problem);
    let definition = |spec: Option<v1::ScheduleSpec>| {
        let spec = spec.ok_or_else(|| invalid("has no `spec`"))?;
        check_definition(spec, format, rules, envelope.now).map(Box::new)
    };
    let id = change.id.parse().map_err(|error: Invalid| {
        let shown = bounded_text(&change.id, 60);
        Field("id").malformed(format, &format!("is `{shown}`; it {}", error.problem))
    })?;
    let action = match change.change.ok_or_else(|| invalid("has no `change`"))? {
        Change::Create(create) => Action::Create(definition(create.spec)?),
        Change::Update(update) if update.expected_revision == Some(0) => {
            let problem = "is 0; the first revision is 1";
            return Err(Field("expectedRevision").malformed(format, problem));
        }
        Change::Update(update) => Action::Update {
            definition: definition(update.spec)?,
            expected_revision: update.expected_revision,
        },
        Change::Pause(_) => Action::Pause,
        Change::Resume(resume) if resume.catch_up => Action::Resume(CatchUp::Misfire),
        Change::Resume(_) => Action::Resume(CatchUp::Skip),
        Change::Trigger(_) => Action::Trigger,
        Change::Delete(_) => Action::Delete,
    };
    Ok(ScheduleChange {
        id,
        action,
        expected_app: (!change.expected_app.is_empty()).then_some(change.expected_app),
    })
}

/// Checks the definition of a schedule, including its job.
fn check_definition(
    mut spec: v1::ScheduleSpec,
    format: Format,
    rules: &Rules,
    now: Timestamp,
) -> Result<ScheduleDefinition, Failure> {
    let job = spec.job.take();
    let recurrence = check_recurrence(&spec, &rules.time_zone, format)?;
    let mut job = job.ok_or_else(|| match format {
        Format::Json => missing_app(format),
        Format::Protobuf => Field("job").malformed(format, "is missing; set at least its app"),
    })?;
    check_job(&job, format, rules, now)?;
    // In the form in which equal definitions are equal.
    job.priority = v1::Priority::try_from(job.priority).map_or(job.priority, |priority| {
        to_priority(from_priority(priority)).into()
    });
    job.expire_after = job.expire_after.as_ref().and_then(from_duration).map(to_duration);
    Ok(ScheduleDefinition { recurrence, job })
}

/// Checks when a schedule recurs. The job of the definition is not checked. A cron expression without a zone is in `zone`, as times without
/// an offset are.
///
/// # Errors
/// The first invalid field, with its name in `format`.
pub fn check_recurrence(
    spec: &v1::ScheduleSpec,
    zone: &TimeZone,
    format: Format,
) -> Result<Recurrence, Failure> {
    let mut spec = spec.clone();
    if let Some(v1::schedule_spec::Timing::Cron(cron)) = &mut spec.timing {
        let default = || zone.iana_name().map(str::to_owned);
        cron.zone = cron.zone.take().or_else(default);
    }
    read_spec(&spec).map_err(|Invalid { field, problem }| {
        // The only one whose name in JSON differs.
        let field = if field == "max_count" { "maxCount" } else { field };
        Field(field).rejected(format, &problem)
    })
}

/// Checks the job of a schedule.
pub(crate) fn check_job(
    template: &v1::JobTemplate,
    format: Format,
    rules: &Rules,
    now: Timestamp,
) -> Result<(), Failure> {
    request_of(template, now, format, rules, now).map(drop)
}

/// The request for the job of an occurrence that is due at `due`.
pub(crate) fn job_of(
    template: &v1::JobTemplate,
    due: Timestamp,
    rules: &Rules,
    now: Timestamp,
) -> Result<Request, Failure> {
    request_of(template, due, Format::Protobuf, rules, now)
}

fn request_of(
    template: &v1::JobTemplate,
    due: Timestamp,
    format: Format,
    rules: &Rules,
    now: Timestamp,
) -> Result<Request, Failure> {
    let envelope = Envelope {
        requested: now,
        now,
        key: None,
        headers: &Headers::new(),
    };
    let template = template.clone();
    let spec = v1::JobSpec {
        app: template.app,
        when: Some(When::At(due).into()),
        priority: template.priority,
        data: template.data,
        key: template.key,
        headers: template.headers,
        expire_after: template.expire_after,
        ..v1::JobSpec::default()
    };
    job::check(spec, format, rules, &envelope)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cron_uses_default_zone() {
        let zone_of = |zone: Option<&str>| {
            let cron = v1::CronTiming {
                expression: "@daily".into(),
                zone: zone.map(str::to_owned),
                ..v1::CronTiming::default()
            };
            let spec = v1::ScheduleSpec {
                timing: Some(v1::schedule_spec::Timing::Cron(cron)),
                ..v1::ScheduleSpec::default()
            };
            let default = TimeZone::get("Europe/Berlin").unwrap();
            let recurrence = check_recurrence(&spec, &default, Format::Protobuf).unwrap();
            match &recurrence.definition().timing {
                redeliver_recurrence::Timing::Cron { zone, .. } => zone.clone(),
                other @ redeliver_recurrence::Timing::Every { .. } => panic!("{other:?}"),
            }
        };
        assert_eq!(zone_of(None), "Europe/Berlin");
        assert_eq!(zone_of(Some("utc")), "UTC");
    }

    #[test]
    fn invalid_definition_names_field() {
        let spec = |zone: &str, max: u32| v1::ScheduleSpec {
            timing: Some(v1::schedule_spec::Timing::Cron(v1::CronTiming {
                expression: "@daily".into(),
                zone: Some(zone.into()),
                ..v1::CronTiming::default()
            })),
            misfire: Some(v1::Misfire {
                policy: v1::MisfirePolicy::All.into(),
                limit: Some(max),
                grace: None,
            }),
            ..v1::ScheduleSpec::default()
        };
        for (spec, code, begins) in [
            (spec("Europe/Berln", 1), "request.cron.zone", "`cron.zone` "),
            (spec("UTC", 2_000), "request.misfire.limit", "`misfire.limit` "),
            (
                v1::ScheduleSpec::default(),
                "request.timing",
                "`timing` is missing; set cron or every",
            ),
            // What is empty or zero is not what is missing.
            (spec("", 1), "request.cron.zone", "`cron.zone` is empty"),
            (
                spec("UTC", 0),
                "request.misfire.limit",
                "`misfire.limit` 0 is out of range",
            ),
            (
                v1::ScheduleSpec {
                    max_count: Some(0),
                    ..spec("UTC", 1)
                },
                "request.maxCount",
                " is 0; must be at least 1",
            ),
            (
                v1::ScheduleSpec {
                    misfire: Some(v1::Misfire {
                        limit: Some(0),
                        ..v1::Misfire::default()
                    }),
                    ..spec("UTC", 1)
                },
                "request.misfire.limit",
                "`misfire.limit` is 0, but only the policy `all` has a limit",
            ),
        ] {
            for format in [Format::Json, Format::Protobuf] {
                let failure = check_recurrence(&spec, &TimeZone::UTC, format).unwrap_err();
                assert_eq!(failure.code, code);
                assert!(failure.message.contains(begins), "{}", failure.message);
                assert!(Field::of(&failure).is_some());
            }
        }
    }
}
