//! What a copy of a record says about itself in its reserved headers, without what is masked for a caller.

use std::borrow::Cow;

use redeliver_core::backoff::MAX_WAIT;
use redeliver_core::failure::{MESSAGE_LIMIT, bounded_text};
use redeliver_core::headers::{
    self, ERROR_CLASS, ERROR_CODE, ERROR_MESSAGE, ERROR_TIMESTAMP, Origin, PROCESS_AFTER, ReservedHeaders,
};
use redeliver_core::redrive::{self, REDRIVE_ID};
use redeliver_core::{Headers, Record, Timestamp};

use crate::masking::Mask;
use crate::redrive::is_job_id;

/// The maximum length of a code in answers, in bytes. Workers write no longer ones.
const MAX_CODE: usize = 120;

/// Facts about a copy. `None`: its headers do not contain it, or not validly, or it is masked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) due: Option<Timestamp>,
    pub(crate) attempts: Option<u32>,
    pub(crate) class: Option<String>,
    pub(crate) code: Option<String>,
    pub(crate) failed_at: Option<Timestamp>,
    pub(crate) origin: Option<Origin>,
    /// When the copy was written.
    pub(crate) written: Option<Timestamp>,
    /// How often the record was redriven before.
    pub(crate) redrives: u32,
    /// The job that has redriven it last. Headers of users can have this name, too: a text that no job has as its id is not shown.
    pub(crate) redrive_id: Option<String>,
    /// Whether a service would treat the copy as malformed.
    pub(crate) is_malformed: bool,
}

/// The reserved headers of a record, without what is masked.
pub(crate) struct Visible<'r>(Cow<'r, Headers>);

impl<'r> Visible<'r> {
    pub(crate) fn of(record: &'r Record, mask: &Mask<'_>) -> Self {
        if mask.is_empty() {
            return Self(Cow::Borrowed(&record.headers));
        }
        let own = record.headers.iter();
        let own = own.filter(|(name, _)| headers::is_reserved(name) || redrive::is_redrive_header(name));
        Self(Cow::Owned(mask.headers(own).headers))
    }

    fn text(&self, name: &str, limit: usize) -> Option<String> {
        let value = self.0.last(name)?;
        Some(bounded_text(&String::from_utf8_lossy(value), limit))
    }

    fn parsed<T: std::str::FromStr>(&self, name: &str) -> Option<T> {
        std::str::from_utf8(self.0.last(name)?).ok()?.parse().ok()
    }

    /// The message of the last failure.
    pub(crate) fn message(&self) -> Option<String> {
        self.text(ERROR_MESSAGE, MESSAGE_LIMIT)
    }

    /// Facts about this record, which is a waiting one if `waits`. `now` limits its due time.
    pub(crate) fn facts(&self, record: &Record, waits: bool, now: Timestamp) -> Facts {
        let visible = ReservedHeaders::from_headers(&self.0).unwrap_or_default();
        Facts {
            due: visible.process_after(now, MAX_WAIT).ok(),
            attempts: visible.retry_count().ok(),
            class: self.text(ERROR_CLASS, MAX_CODE),
            code: self.text(ERROR_CODE, MAX_CODE),
            failed_at: self.parsed(ERROR_TIMESTAMP),
            origin: visible.origin().ok(),
            written: record.timestamp,
            redrives: redrive::count(&self.0),
            redrive_id: self.parsed(REDRIVE_ID).filter(|id: &String| is_job_id(id)),
            is_malformed: waits && is_malformed(record, now),
        }
    }
}

impl Facts {
    /// When the record entered its pipeline, or when the copy was written, if the origin has no timestamp.
    pub(crate) fn entered(&self) -> Option<Timestamp> {
        let of_origin = self.origin.as_ref().and_then(|origin| origin.timestamp);
        of_origin.or(self.written)
    }
}

/// Of what is in the record, not of what the caller sees.
fn is_malformed(record: &Record, now: Timestamp) -> bool {
    let Ok(reserved) = ReservedHeaders::read(record) else {
        return true;
    };
    // A released record may lack it.
    let has_due = record.headers.last(PROCESS_AFTER).is_some();
    reserved.origin().is_err()
        || reserved.retry_count().is_err()
        || (has_due && reserved.process_after(now, MAX_WAIT).is_err())
}

#[cfg(test)]
mod tests {
    use redeliver_core::redrive::REDRIVE_COUNT;
    use redeliver_testkit::record_at;

    use super::*;

    #[test]
    fn user_header_with_reserved_name_hidden() {
        let facts = |id: &str, count: &str| {
            let mut headers = Headers::new();
            headers.push_text(REDRIVE_ID, id);
            headers.push_text(REDRIVE_COUNT, count);
            let record = Record {
                headers,
                ..record_at("p-retry-due", 0, 0)
            };
            let facts =
                Visible::of(&record, &Mask::default()).facts(&record, false, Timestamp::from_millis(0));
            (facts.redrive_id, facts.redrives)
        };
        assert_eq!(
            facts("01a212ee742fea04", "2"),
            (Some("01a212ee742fea04".to_owned()), 2)
        );
        assert_eq!(facts("customer 4711", "often"), (None, 0));
    }
}
