//! Requests that change recurring schedules.

use jiff::tz::TimeZone;
use redeliver_core::failure::bounded_text;
use redeliver_core::{Failure, Headers, Timestamp};
use redeliver_proto::convert::{from_duration, from_priority, to_duration, to_priority};
use redeliver_proto::v1;
use redeliver_recurrence::{CatchUp, Invalid, Recurrence, ScheduleId};

use super::field::{Field, Format};
use super::parsed::When;
use super::protobuf::template_draft;
use super::{Envelope, Request, Rules};
use crate::schedules::read_spec;

/// A change of a schedule as it is parsed, before it is checked against the rules.
pub type ParsedChange = Change<String, v1::ScheduleSpec>;
/// A change of a schedule that complies with the rules.
pub type CheckedChange = Change<ScheduleId, ScheduleDefinition>;

/// A change of a schedule.
#[derive(Clone, Debug, PartialEq)]
pub struct Change<I, D> {
    /// The id of the schedule.
    pub id: I,
    /// What to do.
    pub action: Action<D>,
    /// The application of its job; with another one, it is unknown to this change. `None`: any application.
    pub expected_app: Option<String>,
}

/// What to do with a schedule.
#[derive(Clone, Debug, PartialEq)]
pub enum Action<D> {
    /// Create it.
    Create(Box<D>),
    /// Replace its definition.
    Update {
        /// The new definition.
        definition: Box<D>,
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

impl ParsedChange {
    pub(super) fn check(
        self,
        format: Format,
        rules: &Rules,
        envelope: &Envelope<'_>,
    ) -> Result<CheckedChange, Failure> {
        let id = self.id.parse().map_err(|error: Invalid| {
            let shown = bounded_text(&self.id, 60);
            Field::Id.malformed(format, &format!("is `{shown}`; it {}", error.problem))
        })?;
        let definition =
            |spec: v1::ScheduleSpec| check_definition(spec, format, rules, envelope.now).map(Box::new);
        let action = match self.action {
            Action::Create(spec) => Action::Create(definition(*spec)?),
            Action::Update {
                definition: spec,
                expected_revision,
            } if expected_revision != Some(0) => Action::Update {
                definition: definition(*spec)?,
                expected_revision,
            },
            Action::Update { .. } => {
                let problem = "is 0; the first revision is 1";
                return Err(Field::ExpectedRevision.malformed(format, problem));
            }
            Action::Pause => Action::Pause,
            Action::Resume(catch_up) => Action::Resume(catch_up),
            Action::Trigger => Action::Trigger,
            Action::Delete => Action::Delete,
        };
        Ok(Change {
            id,
            action,
            expected_app: self.expected_app,
        })
    }
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
        Format::Json => Field::App.malformed(format, "is missing; set it to the name of the application"),
        Format::Protobuf => Field::Job.malformed(format, "is missing; set at least its app"),
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
    read_spec(&spec).map_err(|invalid| match Field::of_definition(invalid.field) {
        Some(field) => field.rejected(format, &invalid.problem),
        None => Failure::permanent(format!("request.{}", invalid.field), invalid.to_string()),
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
    template_draft(template.clone(), When::At(due))?.check(format, rules, &envelope)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cron_expression_is_in_the_default_zone() {
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
    fn an_invalid_definition_has_the_name_of_the_field_in_its_format() {
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
