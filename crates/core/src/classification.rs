//! The failure class of an HTTP status.

use std::collections::BTreeMap;

use crate::failure::{ErrorClass, FailureScope};

/// Maps HTTP statuses to failure classes and scopes.
///
/// | status | default meaning |
/// |---|---|
/// | 2xx | success |
/// | 429 | throttled |
/// | 401, 403, 407, and 5xx except 500, 501 and 505 | the endpoint fails |
/// | 408, 425, 500 | transient; the record or the endpoint may be the cause |
/// | every other status | permanent |
///
/// An unknown 5xx is not permanent (RFC 9110, section 15): proxies and content delivery networks use many. A 503 with a
/// `Retry-After` header is throttled. A pipeline can override single statuses. Timeouts and broken connections have no
/// status; the endpoint fails.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Classification {
    overrides: BTreeMap<u16, Verdict>,
}

/// The meaning of a status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The attempt succeeded.
    Success,
    /// The attempt failed because of the record or the endpoint, and a later one may succeed.
    Transient,
    /// The endpoint asks for a delay.
    Throttled,
    /// The endpoint may fail for every record: it is down, overloaded, or refuses the credentials.
    Endpoint,
    /// The attempt failed, and every later one would fail too.
    Permanent,
}

impl Classification {
    /// The default classification, except for the given statuses.
    #[must_use]
    pub fn with_overrides(overrides: BTreeMap<u16, Verdict>) -> Self {
        Self { overrides }
    }

    /// Classifies a status.
    ///
    /// # Errors
    /// The class and the scope of the failure, unless the status means success. The class is transient, throttled or
    /// permanent.
    pub fn of_status(&self, status: u16, has_retry_after: bool) -> Result<(), (ErrorClass, FailureScope)> {
        let own = self.overrides.get(&status).copied();
        let failure = match own.unwrap_or_else(|| default_verdict(status)) {
            Verdict::Success => return Ok(()),
            Verdict::Endpoint if status == 503 && has_retry_after => {
                (ErrorClass::Throttled, FailureScope::Record)
            }
            Verdict::Endpoint => (ErrorClass::Transient, FailureScope::Endpoint),
            Verdict::Transient => (ErrorClass::Transient, FailureScope::Unknown),
            Verdict::Throttled => (ErrorClass::Throttled, FailureScope::Record),
            Verdict::Permanent => (ErrorClass::Permanent, FailureScope::Record),
        };
        Err(failure)
    }
}

fn default_verdict(status: u16) -> Verdict {
    match status {
        200..=299 => Verdict::Success,
        408 | 425 | 500 => Verdict::Transient,
        429 => Verdict::Throttled,
        501 | 505 => Verdict::Permanent,
        401 | 403 | 407 | 502..=599 => Verdict::Endpoint,
        _ => Verdict::Permanent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENDPOINT: Result<(), (ErrorClass, FailureScope)> =
        Err((ErrorClass::Transient, FailureScope::Endpoint));
    const TRANSIENT: Result<(), (ErrorClass, FailureScope)> =
        Err((ErrorClass::Transient, FailureScope::Unknown));
    const THROTTLED: Result<(), (ErrorClass, FailureScope)> =
        Err((ErrorClass::Throttled, FailureScope::Record));
    const PERMANENT: Result<(), (ErrorClass, FailureScope)> =
        Err((ErrorClass::Permanent, FailureScope::Record));

    #[test]
    fn default_classification_is_as_documented() {
        let table = Classification::default();
        for status in 100..=599_u16 {
            let expected = match status {
                200..=299 => Ok(()),
                429 => THROTTLED,
                408 | 425 | 500 => TRANSIENT,
                501 | 505 => PERMANENT,
                401 | 403 | 407 | 502..=599 => ENDPOINT,
                _ => PERMANENT,
            };
            assert_eq!(table.of_status(status, false), expected, "{status}");
        }
        assert_eq!(table.of_status(429, true), THROTTLED);
        assert_eq!(table.of_status(503, true), THROTTLED);
        assert_eq!(table.of_status(502, true), ENDPOINT);
        assert_eq!(table.of_status(404, true), PERMANENT);
    }

    #[test]
    fn overrides_take_precedence_over_the_default() {
        let table = Classification::with_overrides(
            [
                (404, Verdict::Transient),
                (503, Verdict::Permanent),
                (409, Verdict::Success),
                (418, Verdict::Endpoint),
                (500, Verdict::Throttled),
            ]
            .into(),
        );
        assert_eq!(table.of_status(404, false), TRANSIENT);
        assert_eq!(table.of_status(503, true), PERMANENT);
        assert_eq!(table.of_status(409, false), Ok(()));
        assert_eq!(table.of_status(418, false), ENDPOINT);
        assert_eq!(table.of_status(500, false), THROTTLED);
        assert_eq!(table.of_status(502, false), ENDPOINT);
    }
}
