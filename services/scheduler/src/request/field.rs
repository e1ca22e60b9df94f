//! The fields of a request: their names in each format, and the failures of invalid fields.

use redeliver_core::Failure;
use redeliver_core::failure::bounded_text;

use super::parsed::JobRef;
use crate::job::JobId;

/// The format of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// JSON, with names such as `appName`.
    Json,
    /// Protobuf, with names such as `idempotency_key`.
    Protobuf,
}

/// A field of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the documentation")]
pub enum Field {
    RequestId,
    OnConflict,
    App,
    ScheduledTime,
    Delay,
    Priority,
    IdempotencyKey,
    Data,
    Key,
    Headers,
    ExpireAfter,
    Cancel,
    Reschedule,
    Cron,
    TimeZone,
    Pipeline,
    Due,
    Command,
    AnswerTo,
    Id,
    Minutes,
    Jobs,
    DueFrom,
    DueUntil,
    State,
    PageSize,
    PageToken,
    Spec,
    Job,
    Timing,
    CronExpression,
    Zone,
    CronZone,
    CronGap,
    CronOverlap,
    Every,
    EveryInterval,
    EveryAnchor,
    Start,
    End,
    MaxCount,
    Jitter,
    Misfire,
    MisfirePolicy,
    MisfireLimit,
    MisfireGrace,
    ExpectedRevision,
    Revision,
    Count,
    After,
    Name,
    Why,
    Rate,
    KeyBase64,
    DataBase64,
}

impl Field {
    /// The fields that only protobuf and the API have.
    const NOT_IN_JSON: [Self; 40] = [
        Self::Pipeline,
        Self::Due,
        Self::Command,
        Self::AnswerTo,
        Self::Id,
        Self::Minutes,
        Self::Jobs,
        Self::DueFrom,
        Self::DueUntil,
        Self::State,
        Self::PageSize,
        Self::PageToken,
        Self::Spec,
        Self::Job,
        Self::Timing,
        Self::CronExpression,
        Self::Zone,
        Self::CronZone,
        Self::CronGap,
        Self::CronOverlap,
        Self::Every,
        Self::EveryInterval,
        Self::EveryAnchor,
        Self::Start,
        Self::End,
        Self::MaxCount,
        Self::Jitter,
        Self::Misfire,
        Self::MisfirePolicy,
        Self::MisfireLimit,
        Self::MisfireGrace,
        Self::ExpectedRevision,
        Self::Revision,
        Self::Count,
        Self::After,
        Self::Name,
        Self::Why,
        Self::Rate,
        Self::KeyBase64,
        Self::DataBase64,
    ];

    /// The fields that JSON has.
    pub(crate) const IN_JSON: [Self; 15] = [
        Self::RequestId,
        Self::OnConflict,
        Self::App,
        Self::ScheduledTime,
        Self::Delay,
        Self::Priority,
        Self::IdempotencyKey,
        Self::Data,
        Self::Key,
        Self::Headers,
        Self::ExpireAfter,
        Self::Cancel,
        Self::Reschedule,
        Self::Cron,
        Self::TimeZone,
    ];

    /// Its name in JSON, which is also in the code of failures.
    #[must_use]
    pub fn json(self) -> &'static str {
        match self {
            Self::RequestId => "requestId",
            Self::OnConflict => "onConflict",
            Self::App => "appName",
            Self::ScheduledTime => "scheduledTime",
            Self::Delay => "delay",
            Self::Priority => "priority",
            Self::IdempotencyKey => "idempotencyKey",
            Self::Data => "jobData",
            Self::Key => "key",
            Self::Headers => "headers",
            Self::ExpireAfter => "expireAfter",
            Self::Cancel => "cancel",
            Self::Reschedule => "reschedule",
            Self::Cron => "cron",
            Self::TimeZone => "timeZone",
            Self::Pipeline => "pipeline",
            Self::Due => "due",
            Self::Command => "command",
            Self::AnswerTo => "answerTo",
            Self::Id => "id",
            Self::Minutes => "minutes",
            Self::Jobs => "jobs",
            Self::DueFrom => "dueFrom",
            Self::DueUntil => "dueUntil",
            Self::State => "state",
            Self::PageSize => "pageSize",
            Self::PageToken => "pageToken",
            Self::Spec => "spec",
            Self::Job => "job",
            Self::Timing => "timing",
            Self::CronExpression => "cron.expression",
            Self::Zone => "zone",
            Self::CronZone => "cron.zone",
            Self::CronGap => "cron.gap",
            Self::CronOverlap => "cron.overlap",
            Self::Every => "every",
            Self::EveryInterval => "every.interval",
            Self::EveryAnchor => "every.anchor",
            Self::Start => "start",
            Self::End => "end",
            Self::MaxCount => "maxCount",
            Self::Jitter => "jitter",
            Self::Misfire => "misfire",
            Self::MisfirePolicy => "misfire.policy",
            Self::MisfireLimit => "misfire.limit",
            Self::MisfireGrace => "misfire.grace",
            Self::ExpectedRevision => "expectedRevision",
            Self::Revision => "revision",
            Self::Count => "count",
            Self::After => "after",
            Self::Name => "name",
            Self::Why => "why",
            Self::Rate => "rate",
            Self::KeyBase64 => "keyBase64",
            Self::DataBase64 => "jobDataBase64",
        }
    }

    /// Its name in JSON within the object that contains it.
    pub(super) fn key(self) -> &'static str {
        let name = self.json();
        name.rsplit_once('.').map_or(name, |(_, key)| key)
    }

    /// Its name in protobuf.
    #[must_use]
    pub fn protobuf(self) -> &'static str {
        match self {
            Self::RequestId => "request_id",
            Self::OnConflict => "on_conflict",
            Self::App => "app",
            Self::ScheduledTime => "scheduled_time",
            Self::IdempotencyKey => "idempotency_key",
            Self::Data => "data",
            Self::ExpireAfter => "expire_after",
            Self::Cancel | Self::Reschedule => "id",
            Self::AnswerTo => "answer_to",
            Self::DueFrom => "due_from",
            Self::DueUntil => "due_until",
            Self::PageSize => "page_size",
            Self::PageToken => "page_token",
            Self::MaxCount => "max_count",
            Self::ExpectedRevision => "expected_revision",
            other => other.json(),
        }
    }

    /// Its name in a format.
    #[must_use]
    pub fn name(self, format: Format) -> &'static str {
        match format {
            Format::Json => self.json(),
            Format::Protobuf => self.protobuf(),
        }
    }

    /// The failure of a request in which this field cannot be parsed.
    pub(crate) fn malformed(self, format: Format, problem: &str) -> Failure {
        Failure::malformed(self.code(), format!("`{}` {problem}", self.name(format)))
    }

    /// The failure of a request whose value of this field is not allowed.
    pub(crate) fn rejected(self, format: Format, problem: &str) -> Failure {
        Failure::permanent(self.code(), format!("`{}` {problem}", self.name(format)))
    }

    /// The field that a failure is about.
    pub(crate) fn of(failure: &Failure) -> Option<Self> {
        let name = failure.code.strip_prefix("request.")?;
        let mut all = Self::IN_JSON.into_iter().chain(Self::NOT_IN_JSON);
        all.find(|field| field.json() == name)
    }

    /// The field with this name in protobuf, which the definitions of schedules have.
    pub(super) fn of_definition(name: &str) -> Option<Self> {
        let mut all = Self::NOT_IN_JSON.into_iter();
        all.find(|field| field.protobuf() == name)
    }

    fn code(self) -> String {
        format!("request.{}", self.json())
    }
}

/// `, did you mean ...?` if a valid name is similar, and otherwise the valid names.
pub(super) fn hint<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    const SHOWN: usize = 20;
    let known: Vec<&str> = known.into_iter().collect();
    // The distance takes quadratic time, and no valid name is this long.
    let folded: String = name.chars().take(120).collect::<String>().to_lowercase();
    let nearest = known
        .iter()
        .map(|candidate| {
            (
                strsim::damerau_levenshtein(&folded, &candidate.to_lowercase()),
                *candidate,
            )
        })
        .min_by_key(|(distance, _)| *distance)
        .filter(|(distance, candidate)| *distance <= (candidate.len() / 3).max(1));
    match nearest {
        Some((_, nearest)) => format!(", did you mean `{nearest}`?"),
        None if known.is_empty() => "; none is configured".to_owned(),
        None if known.len() > SHOWN => {
            format!("; expected one of {} and others", known[..SHOWN].join(", "))
        }
        None => format!("; expected one of {}", known.join(", ")),
    }
}

/// Reads how a command names its job, from the fields of a message of which empty ones are not set.
pub(crate) fn read_job_ref(
    field: Field,
    format: Format,
    id: &str,
    app: &str,
    key: &str,
) -> Result<JobRef, Failure> {
    let names = [Field::App, Field::IdempotencyKey].map(|field| field.name(format));
    match (id, app, key) {
        ("", "", "") => {
            let problem = format!("is missing; set it, or set `{}` and `{}`", names[0], names[1]);
            Err(field.malformed(format, &problem))
        }
        (_, "", "") => read_id(field, format, id).map(JobRef::Id),
        ("", "", _) => Err(Field::App.malformed(format, "is missing; set it to the name of the application")),
        ("", _, "") => {
            Err(Field::IdempotencyKey.malformed(format, "is missing; set it to the key of the job"))
        }
        ("", _, _) => Ok(JobRef::Key {
            app: app.into(),
            key: key.into(),
        }),
        _ => {
            let problem = format!("cannot be combined with `{}` and `{}`", names[0], names[1]);
            Err(field.malformed(format, &problem))
        }
    }
}

/// Parses a job id.
pub(crate) fn read_id(field: Field, format: Format, text: &str) -> Result<JobId, Failure> {
    text.parse()
        .map_err(|error| field.malformed(format, &format!("`{}` {error}", bounded_text(text, 60))))
}
