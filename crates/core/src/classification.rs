//! The failure class of an HTTP status.

use std::collections::BTreeMap;

use crate::failure::ErrorClass;

/// Maps HTTP statuses to failure classes.
///
/// By default, 2xx is success; 429 is throttled, and so is 503 with a `Retry-After` header; 408, 425 and the other 5xx are
/// transient, except 501 and 505; every other status is permanent. An unknown 5xx is treated like a 500 (RFC 9110, section
/// 15): proxies and content delivery networks use many. A pipeline can override single statuses. Timeouts and broken
/// connections have no status and are always transient.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Classification {
    overrides: BTreeMap<u16, Verdict>,
}

/// The meaning of a status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The attempt succeeded.
    Success,
    /// The attempt failed, but a later one may succeed.
    Transient,
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
    /// The failure class, unless the status means success: transient, throttled or permanent.
    pub fn of_status(&self, status: u16, has_retry_after: bool) -> Result<(), ErrorClass> {
        match self
            .overrides
            .get(&status)
            .copied()
            .unwrap_or_else(|| default_verdict(status))
        {
            Verdict::Success => Ok(()),
            Verdict::Transient if status == 429 || (status == 503 && has_retry_after) => {
                Err(ErrorClass::Throttled)
            }
            Verdict::Transient => Err(ErrorClass::Transient),
            Verdict::Permanent => Err(ErrorClass::Permanent),
        }
    }
}

fn default_verdict(status: u16) -> Verdict {
    match status {
        200..=299 => Verdict::Success,
        501 | 505 => Verdict::Permanent,
        408 | 425 | 429 | 500..=599 => Verdict::Transient,
        _ => Verdict::Permanent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_classification_is_the_documented_one() {
        let table = Classification::default();
        for status in 100..=599_u16 {
            let expected = match status {
                200..=299 => Ok(()),
                429 => Err(ErrorClass::Throttled),
                501 | 505 => Err(ErrorClass::Permanent),
                408 | 425 | 500..=599 => Err(ErrorClass::Transient),
                _ => Err(ErrorClass::Permanent),
            };
            assert_eq!(table.of_status(status, false), expected, "{status}");
        }
        assert_eq!(table.of_status(429, true), Err(ErrorClass::Throttled));
        assert_eq!(table.of_status(503, true), Err(ErrorClass::Throttled));
        assert_eq!(table.of_status(500, true), Err(ErrorClass::Transient));
        assert_eq!(table.of_status(404, true), Err(ErrorClass::Permanent));
    }

    #[test]
    fn overrides_take_precedence_over_the_default() {
        let table = Classification::with_overrides(
            [
                (404, Verdict::Transient),
                (503, Verdict::Permanent),
                (409, Verdict::Success),
            ]
            .into(),
        );
        assert_eq!(table.of_status(404, false), Err(ErrorClass::Transient));
        assert_eq!(table.of_status(503, true), Err(ErrorClass::Permanent));
        assert_eq!(table.of_status(409, false), Ok(()));
        assert_eq!(table.of_status(500, false), Err(ErrorClass::Transient));
    }
}
