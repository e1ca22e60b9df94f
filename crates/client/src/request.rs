//! Requests for jobs.

use std::time::Duration;

use bytes::Bytes;
use redeliver_core::headers::TraceContext;
use redeliver_core::job::Priority;
use redeliver_core::{HumanDuration, Timestamp};
use redeliver_proto::convert::{time_of_record, to_duration, to_priority};
use redeliver_proto::v1;

/// When a job is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// At this time. A time in the past means immediately.
    At(Timestamp),
    /// This long after the timestamp of the request in the ingest topic, rounded up to the millisecond.
    After(Duration),
}

/// A request to schedule a job.
#[derive(Clone, Debug)]
pub struct JobRequest {
    /// Without a due time if that is out of range.
    spec: v1::JobSpec,
    pub(crate) trace: Option<TraceContext>,
}

/// The request is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {problem}")]
pub struct InvalidRequest {
    /// The invalid field.
    pub field: &'static str,
    /// What is wrong with the field.
    pub problem: &'static str,
}

/// The maximum length of an idempotency key, in bytes.
const MAX_KEY: usize = 512;
const INVALID_TIME: InvalidRequest = InvalidRequest {
    field: "scheduled_time",
    problem: "is not in the years 1 to 9999",
};

impl JobRequest {
    /// A job for an application, which the scheduler's configuration must declare, with a due time.
    #[must_use]
    pub fn at(app: impl Into<String>, time: Timestamp) -> Self {
        Self::new(app, When::At(time))
    }

    /// A job for an application, due after a delay.
    #[must_use]
    pub fn after(app: impl Into<String>, delay: Duration) -> Self {
        Self::new(app, When::After(delay))
    }

    /// A job for an application.
    #[must_use]
    pub fn new(app: impl Into<String>, when: When) -> Self {
        let spec = v1::JobSpec {
            app: app.into(),
            when: when.to_spec().ok(),
            priority: v1::Priority::Normal.into(),
            ..v1::JobSpec::default()
        };
        spec.into()
    }

    /// The value of the record to dispatch. Default: empty.
    #[must_use]
    pub fn data(mut self, data: impl Into<Bytes>) -> Self {
        self.spec.data = data.into();
        self
    }

    /// The key of the record to dispatch, which chooses its partition. Default: null.
    #[must_use]
    pub fn key(mut self, key: impl Into<Bytes>) -> Self {
        self.spec.key = Some(key.into());
        self
    }

    /// Adds a header to the record to dispatch. Names can repeat.
    #[must_use]
    pub fn header(self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.any_header(name, Some(Bytes::copy_from_slice(value.as_ref())))
    }

    /// Adds a header with a null value to the record to dispatch.
    #[must_use]
    pub fn null_header(self, name: &str) -> Self {
        self.any_header(name, None)
    }

    fn any_header(mut self, name: &str, value: Option<Bytes>) -> Self {
        let name = name.to_owned();
        self.spec.headers.push(v1::Header { name, value });
        self
    }

    /// The priority. Default: normal.
    #[must_use]
    pub fn priority(mut self, priority: Priority) -> Self {
        self.spec.priority = to_priority(priority).into();
        self
    }

    /// Makes repeated requests harmless: requests for one application with the same key create one job, by default for
    /// 24 hours. At most 512 bytes.
    #[must_use]
    pub fn idempotency_key(mut self, key: impl Into<String>) -> Self {
        self.spec.idempotency_key = Some(key.into());
        self
    }

    /// Lets the newest request with the idempotency key count instead of the first one (debouncing). It takes the place of a job that
    /// waits. If that job has ended, it gets a new job, unless it repeats the newest request: the same content, the same
    /// [request id](JobRequest::request_id), and a time or a request id. So a request with a delay that can be sent twice needs a
    /// request id, such as the id of the event. Default: the first one counts, and one with different content is refused.
    #[must_use]
    pub fn replace(mut self) -> Self {
        self.spec.on_conflict = v1::ConflictPolicy::Replace.into();
        self
    }

    /// How long after its due time the job can still be dispatched. Default: without limit.
    #[must_use]
    pub fn expire_after(mut self, duration: Duration) -> Self {
        self.spec.expire_after = Some(to_duration(HumanDuration::from(duration)));
        self
    }

    /// An id for the request, which is stored with the job.
    #[must_use]
    pub fn request_id(mut self, id: impl Into<String>) -> Self {
        self.spec.request_id = Some(id.into());
        self
    }

    /// The trace context of the job.
    #[must_use]
    pub fn trace(mut self, trace: TraceContext) -> Self {
        self.trace = Some(trace);
        self
    }

    /// Checks what can be checked without a scheduler. Sending the request does the same checks.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn check(&self) -> Result<(), InvalidRequest> {
        let wrong = |field, problem| Err(InvalidRequest { field, problem });
        let spec = &self.spec;
        match spec.idempotency_key.as_deref() {
            _ if spec.app.is_empty() => wrong("app", "is empty"),
            Some("") => wrong("idempotency_key", "is empty; omit it instead"),
            Some(key) if key.len() > MAX_KEY => wrong("idempotency_key", "is longer than 512 bytes"),
            None if spec.on_conflict() == v1::ConflictPolicy::Replace => {
                wrong("on_conflict", "is replace, which needs an idempotency_key")
            }
            _ if spec.request_id.as_deref() == Some("") => wrong("request_id", "is empty; omit it instead"),
            _ if spec.when.is_none() => Err(INVALID_TIME),
            _ => Ok(()),
        }
    }

    pub(crate) fn to_spec(&self) -> Result<v1::JobSpec, InvalidRequest> {
        self.check().map(|()| self.spec.clone())
    }
}

/// A request as the protocol has it.
impl From<v1::JobSpec> for JobRequest {
    fn from(spec: v1::JobSpec) -> Self {
        Self { spec, trace: None }
    }
}

impl When {
    fn to_spec(self) -> Result<v1::job_spec::When, InvalidRequest> {
        match self {
            Self::At(time) => {
                let time = time_of_record(time).ok_or(INVALID_TIME)?;
                Ok(v1::job_spec::When::ScheduledTime(time))
            }
            Self::After(delay) => Ok(v1::job_spec::When::Delay(to_duration(HumanDuration::from(delay)))),
        }
    }

    pub(crate) fn to_command(self) -> Result<v1::reschedule_job::When, InvalidRequest> {
        Ok(match self.to_spec()? {
            v1::job_spec::When::ScheduledTime(time) => v1::reschedule_job::When::ScheduledTime(time),
            v1::job_spec::When::Delay(delay) => v1::reschedule_job::When::Delay(delay),
        })
    }

    pub(crate) fn to_request(self) -> Result<v1::reschedule_job_request::When, InvalidRequest> {
        Ok(match self.to_spec()? {
            v1::job_spec::When::ScheduledTime(time) => v1::reschedule_job_request::When::ScheduledTime(time),
            v1::job_spec::When::Delay(delay) => v1::reschedule_job_request::When::Delay(delay),
        })
    }
}

#[cfg(test)]
mod tests {
    use redeliver_core::Headers;
    use redeliver_proto::convert::{from_duration, from_headers, from_timestamp};

    use super::*;

    #[test]
    fn set_fields_are_sent() {
        let request = JobRequest::after("sms", Duration::from_micros(90_000_001))
            .data(vec![0xff, 0])
            .key("k")
            .header("a", "b")
            .null_header("a")
            .priority(Priority::High)
            .idempotency_key("sms-1")
            .expire_after(Duration::from_secs(60))
            .request_id("r");
        let spec = request.to_spec().unwrap();
        let Some(v1::job_spec::When::Delay(delay)) = &spec.when else {
            panic!("{spec:?}")
        };
        assert_eq!(from_duration(delay), Some(HumanDuration::from_millis(90_001)));
        let headers: Headers = [("a", Some(&b"b"[..])), ("a", None)].into_iter().collect();
        assert_eq!(from_headers(&spec.headers), headers);
        assert_eq!(spec.expire_after.unwrap().seconds, 60);
        assert_eq!(spec.priority(), v1::Priority::High);
        let (app, data, key) = (spec.app.as_str(), &spec.data[..], spec.key.as_deref());
        assert_eq!((app, data, key), ("sms", &b"\xff\0"[..], Some(&b"k"[..])));
        assert_eq!(
            (spec.idempotency_key.as_deref(), spec.request_id.as_deref()),
            (Some("sms-1"), Some("r"))
        );
    }

    #[test]
    fn unset_fields_are_not_sent() {
        let time = Timestamp::from_millis(1_763_722_800_123);
        let spec = JobRequest::at("sms", time).to_spec().unwrap();
        let Some(v1::job_spec::When::ScheduledTime(sent)) = &spec.when else {
            panic!("{spec:?}")
        };
        assert_eq!(from_timestamp(sent), Some(time));
        assert_eq!((spec.key, spec.expire_after, spec.headers.len()), (None, None, 0));
        assert_eq!((spec.idempotency_key, spec.request_id), (None, None));
    }

    #[test]
    fn invalid_request_names_the_field() {
        let soon = |app: &str| JobRequest::after(app, Duration::ZERO);
        let cases = [
            (soon(""), "app is empty"),
            (
                soon("a").idempotency_key(""),
                "idempotency_key is empty; omit it instead",
            ),
            (
                soon("a").idempotency_key("k".repeat(513)),
                "idempotency_key is longer than 512 bytes",
            ),
            (soon("a").request_id(""), "request_id is empty; omit it instead"),
            (
                JobRequest::at("a", Timestamp::from_millis(i64::MAX)),
                "scheduled_time is not in the years 1 to 9999",
            ),
        ];
        for (request, expected) in cases {
            assert_eq!(request.to_spec().unwrap_err().to_string(), expected);
        }
        assert!(soon("a").idempotency_key("k".repeat(512)).to_spec().is_ok());
    }
}
