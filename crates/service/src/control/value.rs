//! Values of the control topic.

use std::fmt;

use bytes::Bytes;
use redeliver_core::Timestamp;
use redeliver_proto::convert::{from_timestamp, to_timestamp};
use redeliver_proto::v1::control_record::Desired as ProtoDesired;
use redeliver_proto::v1::rate_limit::Limit;
use redeliver_proto::{Message as _, v1};

/// The newest format that this version knows.
const FORMAT: u32 = 0;
/// The valid limits of rates, per second.
pub const RATES: std::ops::RangeInclusive<f64> = 0.001..=1_000_000.0;
/// The maximum size of a value, in bytes.
const MAX_VALUE: usize = 16 << 10;

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Increases by 1 with each change.
    pub revision: u64,
    /// When it was changed; `None` if that is not readable.
    pub changed_at: Option<Timestamp>,
    /// The name of the caller.
    pub changed_by: String,
    /// Why, in the words of the caller.
    pub why: String,
    /// Different for each change.
    pub change_id: Bytes,
    /// What is wanted.
    pub desired: Desired,
    /// Whether a newer version has written it, which may want more.
    pub is_newer: bool,
}

/// What is wanted, by kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Desired {
    /// Of an application.
    Application(ApplicationControl),
}

/// What is wanted of an application. `None`: as the configuration says.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ApplicationControl {
    /// Whether its jobs are dispatched.
    pub run: Option<Run>,
    /// How many of them per second.
    pub rate: Option<RateLimit>,
}

impl fmt::Display for ApplicationControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.run {
            Some(Run::Running) => "running",
            Some(Run::Paused) => "paused",
            None => "state as configured",
        })?;
        match self.rate {
            Some(RateLimit::PerSecond(rate)) => write!(f, ", rate {rate}/s"),
            Some(RateLimit::Unlimited) => f.write_str(", rate unlimited"),
            None => f.write_str(", rate as configured"),
        }
    }
}

/// Whether something runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// It runs, whatever the configuration says.
    Running,
    /// It is paused.
    Paused,
}

/// A limit of a rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RateLimit {
    /// So many per second, see [`RATES`].
    PerSecond(f64),
    /// There is none, whatever the configuration says.
    Unlimited,
}

/// Why a value cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidValue {
    /// It is not a `redeliver.v1.ControlRecord`.
    #[error("is not a redeliver.v1.ControlRecord")]
    Malformed,
    /// Its kind does not fit its name, or a newer version has written it.
    #[error("is of an unknown kind")]
    Kind,
    /// A newer version has written it.
    #[error("has an unknown state")]
    State,
    /// The limit is missing or out of range.
    #[error("has an invalid rate")]
    Rate,
}

impl Value {
    /// Reads the value of a record.
    ///
    /// # Errors
    /// When the value cannot be obeyed.
    pub fn decode(value: &Bytes) -> Result<Self, InvalidValue> {
        if value.len() > MAX_VALUE {
            return Err(InvalidValue::Malformed);
        }
        let record = v1::ControlRecord::decode(value.clone()).map_err(|_| InvalidValue::Malformed)?;
        let desired = match &record.desired {
            Some(ProtoDesired::Application(app)) => Desired::Application(read_application(app)?),
            None => return Err(InvalidValue::Kind),
        };
        Ok(Self {
            revision: record.revision,
            changed_at: record.changed_at.as_ref().and_then(from_timestamp),
            changed_by: record.changed_by,
            why: record.why,
            change_id: record.change_id,
            desired,
            is_newer: record.format > FORMAT,
        })
    }

    /// The value of a record.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let record = v1::ControlRecord {
            revision: self.revision,
            changed_at: self.changed_at.map(to_timestamp),
            changed_by: self.changed_by.clone(),
            why: self.why.clone(),
            change_id: self.change_id.clone(),
            format: FORMAT,
            desired: Some(match &self.desired {
                Desired::Application(app) => ProtoDesired::Application(write_application(app)),
            }),
        };
        record.encode_to_vec().into()
    }
}

fn read_application(app: &v1::ApplicationControl) -> Result<ApplicationControl, InvalidValue> {
    let run = match v1::RunState::try_from(app.state).map_err(|_| InvalidValue::State)? {
        v1::RunState::Unspecified => None,
        v1::RunState::Running => Some(Run::Running),
        v1::RunState::Paused => Some(Run::Paused),
    };
    let rate = app.rate.as_ref().map(read_rate);
    Ok(ApplicationControl {
        run,
        rate: rate.transpose()?,
    })
}

/// Reads a limit.
///
/// # Errors
/// When it is missing or out of range.
pub fn read_rate(rate: &v1::RateLimit) -> Result<RateLimit, InvalidValue> {
    match rate.limit {
        Some(Limit::PerSecond(rate)) if RATES.contains(&rate) => Ok(RateLimit::PerSecond(rate)),
        Some(Limit::Unlimited(true)) => Ok(RateLimit::Unlimited),
        Some(Limit::PerSecond(_) | Limit::Unlimited(false)) | None => Err(InvalidValue::Rate),
    }
}

/// The message for what is wanted of an application.
#[must_use]
pub fn write_application(app: &ApplicationControl) -> v1::ApplicationControl {
    let state = match app.run {
        None => v1::RunState::Unspecified,
        Some(Run::Running) => v1::RunState::Running,
        Some(Run::Paused) => v1::RunState::Paused,
    };
    let limit = app.rate.map(|rate| match rate {
        RateLimit::PerSecond(rate) => Limit::PerSecond(rate),
        RateLimit::Unlimited => Limit::Unlimited(true),
    });
    v1::ApplicationControl {
        state: state.into(),
        rate: limit.map(|limit| v1::RateLimit { limit: Some(limit) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(desired: ApplicationControl) -> Value {
        Value {
            revision: 3,
            changed_at: Some(Timestamp::from_millis(5)),
            changed_by: "ann".to_owned(),
            why: "outage".to_owned(),
            change_id: Bytes::from_static(b"1"),
            desired: Desired::Application(desired),
            is_newer: false,
        }
    }

    #[test]
    fn a_value_reads_as_it_is_written() {
        for run in [None, Some(Run::Running), Some(Run::Paused)] {
            for rate in [None, Some(RateLimit::Unlimited), Some(RateLimit::PerSecond(0.5))] {
                let value = value(ApplicationControl { run, rate });
                assert_eq!(Value::decode(&value.encode()), Ok(value));
            }
        }
    }

    #[test]
    fn what_this_version_does_not_know_is_told_apart() {
        let with = |change: fn(&mut v1::ControlRecord)| {
            let text = value(ApplicationControl::default()).encode();
            let mut record = v1::ControlRecord::decode(text).unwrap();
            change(&mut record);
            Value::decode(&record.encode_to_vec().into())
        };
        let app = |state, limit| {
            Some(ProtoDesired::Application(v1::ApplicationControl {
                state,
                rate: Some(v1::RateLimit { limit }),
            }))
        };
        assert!(with(|record| record.format = 1).unwrap().is_newer);
        assert_eq!(with(|record| record.desired = None), Err(InvalidValue::Kind));
        let state = app(9, Some(Limit::Unlimited(true)));
        let mut record = v1::ControlRecord {
            desired: state,
            ..v1::ControlRecord::default()
        };
        assert_eq!(
            Value::decode(&record.encode_to_vec().into()),
            Err(InvalidValue::State)
        );
        for limit in [
            None,
            Some(Limit::Unlimited(false)),
            Some(Limit::PerSecond(0.0)),
            Some(Limit::PerSecond(-1.0)),
            Some(Limit::PerSecond(f64::NAN)),
            Some(Limit::PerSecond(f64::INFINITY)),
        ] {
            record.desired = app(0, limit);
            assert_eq!(
                Value::decode(&record.encode_to_vec().into()),
                Err(InvalidValue::Rate),
                "{limit:?}"
            );
        }
        assert_eq!(
            Value::decode(&Bytes::from_static(&[0xff])),
            Err(InvalidValue::Malformed)
        );
        assert_eq!(
            Value::decode(&vec![0; MAX_VALUE + 1].into()),
            Err(InvalidValue::Malformed)
        );
    }
}
