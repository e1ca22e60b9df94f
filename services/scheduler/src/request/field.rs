//! The fields of a request: their names in each format, and the failures of invalid fields.

use std::borrow::Cow;

use redeliver_core::Failure;

/// The format of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// JSON, with names such as `appName`.
    Json,
    /// Protobuf, with names such as `idempotency_key`.
    Protobuf,
}

/// A field of a request, by its name in JSON, such as `cron.zone`. The code of its failures contains this name in both formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field<'a>(pub &'a str);

/// The code of a request that is not the JSON that it should be.
pub(crate) const NOT_JSON: &str = "request.json";
/// The code of a request with another content type.
pub(crate) const CONTENT_TYPE: &str = "request.contentType";

/// What codes of failures name that concern no field.
const NOT_FIELDS: [&str; 8] = [
    "conflict",
    "contentType",
    "json",
    "protobuf",
    "query",
    "reason",
    "unknownField",
    "value",
];

impl<'a> Field<'a> {
    /// Its name in a format.
    #[must_use]
    pub fn name(self, format: Format) -> Cow<'a, str> {
        match (format, self.0) {
            (Format::Json, name) => name.into(),
            (Format::Protobuf, "appName") => "app".into(),
            (Format::Protobuf, "jobData") => "data".into(),
            (Format::Protobuf, "cancel" | "reschedule") => "id".into(),
            (Format::Protobuf, name) => {
                let mut snake = String::with_capacity(name.len() + 2);
                for char in name.chars() {
                    if char.is_ascii_uppercase() {
                        snake.push('_');
                    }
                    snake.push(char.to_ascii_lowercase());
                }
                snake.into()
            }
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
    pub(crate) fn of(failure: &'a Failure) -> Option<Self> {
        let name = failure.code.strip_prefix("request.")?;
        (!NOT_FIELDS.contains(&name)).then_some(Self(name))
    }

    fn code(self) -> String {
        format!("request.{}", self.0)
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
