//! Values of the control topic.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::Timestamp;
use redeliver_core::token_bucket::RATES;
use redeliver_kafka::TopicId;
use redeliver_proto::convert::{from_timestamp, to_timestamp};
use redeliver_proto::v1::control_record::Desired as ProtoDesired;
use redeliver_proto::v1::rate_limit::Limit;
use redeliver_proto::{Message as _, has_unknown_fields, v1};
use redeliver_store::Document;

use super::name::ControlName;

/// The format of values.
const FORMAT: u32 = 0;
/// The maximum size of a value, in bytes. A release contains an offset for each partition.
const MAX_VALUE: usize = 512 << 10;

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
    pub reason: String,
    /// Different for each change.
    pub change_id: Bytes,
    /// What is wanted.
    pub desired: Desired,
}

/// What is wanted, by kind.
#[derive(Clone, Debug, PartialEq)]
pub enum Desired {
    /// Of an application.
    Application(ApplicationControl),
    /// Of the workers of a pipeline.
    Pipeline(PipelineControl),
    /// Of a tier.
    Tier(TierControl),
}

/// What is wanted of an application. `None`: as the configuration says.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ApplicationControl {
    /// Whether its jobs are dispatched.
    pub run: Option<Run>,
    /// How many of them per second.
    pub rate: Option<RateLimit>,
}

/// What is wanted of the workers of a pipeline.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PipelineControl {
    /// Whether they read records and start attempts.
    pub run: Option<Run>,
    /// How many attempts they start per second, in all processes together.
    pub rate: Option<RateLimit>,
}

/// What is wanted of a tier.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TierControl {
    /// Whether it releases records.
    pub run: Option<Run>,
    /// How many of them per second.
    pub rate: Option<RateLimit>,
    /// What does not wait for its due time.
    pub release: Option<Arc<Release>>,
}

/// What waits in a tier, or in the scheduler, at one moment, and is released without waiting for its due time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Release {
    /// The topic of the tier, or the ingest topic of the scheduler.
    pub topic: TopicId,
    /// The end of each partition at that moment.
    pub ends: Vec<i64>,
    /// When it was wanted.
    pub at: Option<Timestamp>,
}

impl Release {
    /// The offset before which the records of a partition are released; 0 in a topic that was created since.
    #[must_use]
    pub fn before(&self, topic: Option<TopicId>, partition: i32) -> i64 {
        let end = usize::try_from(partition)
            .ok()
            .and_then(|partition| self.ends.get(partition));
        end.copied().filter(|_| topic == Some(self.topic)).unwrap_or(0)
    }

    /// This release and an earlier one, which may not have ended yet.
    #[must_use]
    pub fn and(mut self, earlier: Option<&Self>) -> Self {
        let Some(earlier) = earlier.filter(|earlier| earlier.topic == self.topic) else {
            return self;
        };
        // No partition goes away while the topic exists. An answer of a broker with old metadata must not
        // undo the request.
        self.ends.resize(self.ends.len().max(earlier.ends.len()), 0);
        for (end, earlier) in self.ends.iter_mut().zip(&earlier.ends) {
            *end = (*end).max(*earlier);
        }
        self
    }
}

impl Desired {
    /// Everything of this kind is as the configuration says.
    #[must_use]
    pub fn default_of(name: &ControlName) -> Self {
        match name {
            ControlName::Application(_) => Self::Application(ApplicationControl::default()),
            ControlName::Pipeline(_) => Self::Pipeline(PipelineControl::default()),
            ControlName::Tier(..) | ControlName::WholeTier(_) | ControlName::LongWaits(_) => {
                Self::Tier(TierControl::default())
            }
        }
    }

    /// What applies while a value of this kind cannot be read: to run by mistake could do harm, and to wait does not.
    #[must_use]
    pub fn fail_safe(name: &ControlName) -> Self {
        let run = Some(Run::Paused);
        match name {
            ControlName::Application(_) => Self::Application(ApplicationControl { run, rate: None }),
            ControlName::Pipeline(_) => Self::Pipeline(PipelineControl { run, rate: None }),
            ControlName::Tier(..) | ControlName::WholeTier(_) | ControlName::LongWaits(_) => {
                Self::Tier(TierControl {
                    run,
                    ..TierControl::default()
                })
            }
        }
    }

    /// Whether it is of the kind of this name.
    #[must_use]
    pub fn fits(&self, name: &ControlName) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(&Self::default_of(name))
    }

    /// Whether it runs; `None`: as the configuration says.
    #[must_use]
    pub fn run(&self) -> Option<Run> {
        match self {
            Self::Application(app) => app.run,
            Self::Pipeline(pipeline) => pipeline.run,
            Self::Tier(tier) => tier.run,
        }
    }

    /// How many per second; `None`: as the configuration says.
    #[must_use]
    pub fn rate(&self) -> Option<RateLimit> {
        match self {
            Self::Application(app) => app.rate,
            Self::Pipeline(pipeline) => pipeline.rate,
            Self::Tier(tier) => tier.rate,
        }
    }
}

impl fmt::Display for Desired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Application(app) => app.fmt(f),
            Self::Pipeline(pipeline) => {
                write!(f, "{}{}", state_text(pipeline.run), rate_text(pipeline.rate))
            }
            Self::Tier(tier) => {
                write!(f, "{}{}", state_text(tier.run), rate_text(tier.rate))?;
                let Some(release) = &tier.release else {
                    return Ok(());
                };
                let at = release.at.and_then(Timestamp::to_rfc3339).unwrap_or_default();
                write!(f, ", released what waited at {at}")
            }
        }
    }
}

impl fmt::Display for ApplicationControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", state_text(self.run), rate_text(self.rate))
    }
}

const fn state_text(run: Option<Run>) -> &'static str {
    match run {
        Some(Run::Running) => "running",
        Some(Run::Paused) => "paused",
        None => "state as configured",
    }
}

fn rate_text(rate: Option<RateLimit>) -> String {
    match rate {
        Some(RateLimit::PerSecond(rate)) => format!(", rate {rate}/s"),
        Some(RateLimit::Unlimited) => ", rate unlimited".to_owned(),
        None => ", rate as configured".to_owned(),
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

impl RateLimit {
    /// How many per second; `None`: there is no limit.
    #[must_use]
    pub fn per_second(self) -> Option<f64> {
        match self {
            Self::PerSecond(rate) => Some(rate),
            Self::Unlimited => None,
        }
    }
}

/// Why a value cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidValue {
    /// It is not a `redeliver.v1.ControlRecord`.
    #[error("is not a redeliver.v1.ControlRecord")]
    Malformed,
    /// Another version has written it.
    #[error("has a format or a field that this version does not know")]
    Format,
    /// Its kind does not fit its name.
    #[error("is of an unknown kind")]
    Kind,
    /// It is neither paused nor running.
    #[error("has an unknown state")]
    State,
    /// The limit is missing or out of range.
    #[error("has an invalid rate")]
    Rate,
    /// The topic or an offset is missing or out of range.
    #[error("has an invalid release")]
    Release,
}

impl Document for Value {
    type Key = ControlName;
    type Invalid = InvalidValue;

    // It may want a pause, so what it names is paused.
    const IF_UNREADABLE: &'static str = ", and is paused until it can be read";

    fn parse_key(key: &str) -> Option<ControlName> {
        key.parse().ok()
    }

    fn record_key(name: &ControlName) -> String {
        name.to_string()
    }

    fn decode(name: &ControlName, value: &Bytes) -> Result<Self, InvalidValue> {
        let value = Self::decode(value)?;
        let fits = value.desired.fits(name);
        fits.then_some(value).ok_or(InvalidValue::Kind)
    }

    fn revision(&self) -> u64 {
        self.revision
    }

    fn change_id(&self) -> &Bytes {
        &self.change_id
    }
}

impl Value {
    /// Reads the value of a record.
    ///
    /// # Errors
    /// When the value cannot be applied.
    pub fn decode(value: &Bytes) -> Result<Self, InvalidValue> {
        if value.len() > MAX_VALUE {
            return Err(InvalidValue::Malformed);
        }
        let record = v1::ControlRecord::decode(value.clone()).map_err(|_| InvalidValue::Malformed)?;
        if record.format != FORMAT || has_unknown_fields(value, &record) {
            return Err(InvalidValue::Format);
        }
        let desired = match &record.desired {
            Some(ProtoDesired::Application(app)) => Desired::Application(read_application(app)?),
            Some(ProtoDesired::Pipeline(pipeline)) => Desired::Pipeline(read_pipeline(pipeline)?),
            Some(ProtoDesired::Tier(tier)) => Desired::Tier(read_tier(tier)?),
            None => return Err(InvalidValue::Kind),
        };
        Ok(Self {
            revision: record.revision,
            changed_at: record.changed_at.as_ref().and_then(from_timestamp),
            changed_by: record.changed_by,
            reason: record.reason,
            change_id: record.change_id,
            desired,
        })
    }

    /// The value of a record.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let record = v1::ControlRecord {
            revision: self.revision,
            changed_at: self.changed_at.map(to_timestamp),
            changed_by: self.changed_by.clone(),
            reason: self.reason.clone(),
            change_id: self.change_id.clone(),
            format: FORMAT,
            desired: Some(match &self.desired {
                Desired::Application(app) => ProtoDesired::Application(write_application(app)),
                Desired::Pipeline(pipeline) => ProtoDesired::Pipeline(write_pipeline(pipeline)),
                Desired::Tier(tier) => ProtoDesired::Tier(write_tier(tier)),
            }),
        };
        record.encode_to_vec().into()
    }
}

fn read_application(app: &v1::ApplicationControl) -> Result<ApplicationControl, InvalidValue> {
    let rate = app.rate.as_ref().map(read_rate);
    Ok(ApplicationControl {
        run: read_run(app.state)?,
        rate: rate.transpose()?,
    })
}

fn read_pipeline(pipeline: &v1::PipelineControl) -> Result<PipelineControl, InvalidValue> {
    let rate = pipeline.rate.as_ref().map(read_rate);
    Ok(PipelineControl {
        run: read_run(pipeline.state)?,
        rate: rate.transpose()?,
    })
}

fn read_tier(tier: &v1::TierControl) -> Result<TierControl, InvalidValue> {
    let rate = tier.rate.as_ref().map(read_rate);
    let release = tier.release.as_ref().map(read_release);
    Ok(TierControl {
        run: read_run(tier.state)?,
        rate: rate.transpose()?,
        release: release.transpose()?.map(Arc::new),
    })
}

fn read_run(state: i32) -> Result<Option<Run>, InvalidValue> {
    Ok(
        match v1::RunState::try_from(state).map_err(|_| InvalidValue::State)? {
            v1::RunState::Unspecified => None,
            v1::RunState::Running => Some(Run::Running),
            v1::RunState::Paused => Some(Run::Paused),
        },
    )
}

fn read_release(release: &v1::TierRelease) -> Result<Release, InvalidValue> {
    let id: Result<[u8; 16], _> = (&*release.topic_id).try_into();
    let id = id.map_err(|_| InvalidValue::Release)?;
    if release.ends.iter().any(|end| *end < 0) {
        return Err(InvalidValue::Release);
    }
    Ok(Release {
        topic: TopicId::from_bits(u128::from_be_bytes(id)),
        ends: release.ends.clone(),
        at: release.released_at.as_ref().and_then(from_timestamp),
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
    v1::ApplicationControl {
        state: write_run(app.run).into(),
        rate: app.rate.map(write_rate),
    }
}

/// The message for what is wanted of a pipeline.
#[must_use]
pub fn write_pipeline(pipeline: &PipelineControl) -> v1::PipelineControl {
    v1::PipelineControl {
        state: write_run(pipeline.run).into(),
        rate: pipeline.rate.map(write_rate),
    }
}

/// The message for what is wanted of a tier.
#[must_use]
pub fn write_tier(tier: &TierControl) -> v1::TierControl {
    v1::TierControl {
        state: write_run(tier.run).into(),
        rate: tier.rate.map(write_rate),
        release: tier.release.as_ref().map(|release| v1::TierRelease {
            topic_id: Bytes::copy_from_slice(&release.topic.bits().to_be_bytes()),
            ends: release.ends.clone(),
            released_at: release.at.map(to_timestamp),
        }),
    }
}

const fn write_run(run: Option<Run>) -> v1::RunState {
    match run {
        None => v1::RunState::Unspecified,
        Some(Run::Running) => v1::RunState::Running,
        Some(Run::Paused) => v1::RunState::Paused,
    }
}

fn write_rate(rate: RateLimit) -> v1::RateLimit {
    let limit = match rate {
        RateLimit::PerSecond(rate) => Limit::PerSecond(rate),
        RateLimit::Unlimited => Limit::Unlimited(true),
    };
    v1::RateLimit { limit: Some(limit) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(desired: ApplicationControl) -> Value {
        value_of(Desired::Application(desired))
    }

    fn value_of(desired: Desired) -> Value {
        Value {
            revision: 3,
            changed_at: Some(Timestamp::from_millis(5)),
            changed_by: "ann".to_owned(),
            reason: "outage".to_owned(),
            change_id: Bytes::from_static(b"1"),
            desired,
        }
    }

    fn release(topic: u128, ends: &[i64]) -> Release {
        Release {
            topic: TopicId::from_bits(topic),
            ends: ends.to_vec(),
            at: Some(Timestamp::from_millis(7)),
        }
    }

    #[test]
    fn release_names_ends_of_one_topic() {
        let released = release(1, &[5, 0, 9]);
        let topic = |bits| Some(TopicId::from_bits(bits));
        for (id, partition, before) in [
            (topic(1), 0, 5),
            (topic(1), 1, 0),
            (topic(1), 2, 9),
            // Partitions that were added since, and a topic that was created again.
            (topic(1), 3, 0),
            (topic(2), 0, 0),
            (None, 0, 0),
        ] {
            assert_eq!(released.before(id, partition), before, "{id:?} {partition}");
        }
    }

    #[test]
    fn release_keeps_earlier_releases() {
        let earlier = release(1, &[5, 3]);
        assert_eq!(release(1, &[4, 8]).and(Some(&earlier)), release(1, &[5, 8]));
        assert_eq!(release(1, &[9]).and(Some(&earlier)), release(1, &[9, 3]));
        assert_eq!(release(2, &[1]).and(Some(&earlier)), release(2, &[1]));
        assert_eq!(release(1, &[1]).and(None), release(1, &[1]));
    }

    #[test]
    fn pipeline_and_tier_values_round_trip() {
        for run in [None, Some(Run::Running), Some(Run::Paused)] {
            for rate in [None, Some(RateLimit::Unlimited), Some(RateLimit::PerSecond(0.5))] {
                let value = value_of(Desired::Pipeline(PipelineControl { run, rate }));
                assert_eq!(Value::decode(&value.encode()), Ok(value));
            }
            for release in [None, Some(Arc::new(release(u128::MAX - 1, &[0, i64::MAX])))] {
                let rate = Some(RateLimit::PerSecond(0.5));
                let value = value_of(Desired::Tier(TierControl { run, rate, release }));
                assert_eq!(Value::decode(&value.encode()), Ok(value));
            }
        }
    }

    #[test]
    fn an_invalid_release_is_not_read() {
        let release = |topic_id: &'static [u8], ends| v1::TierRelease {
            topic_id: Bytes::from_static(topic_id),
            ends,
            released_at: None,
        };
        for release in [
            release(b"", vec![1]),
            release(&[0; 17], vec![1]),
            release(&[0; 16], vec![-1]),
        ] {
            let record = v1::ControlRecord {
                desired: Some(ProtoDesired::Tier(v1::TierControl {
                    release: Some(release.clone()),
                    ..v1::TierControl::default()
                })),
                ..v1::ControlRecord::default()
            };
            let read = Value::decode(&record.encode_to_vec().into());
            assert_eq!(read, Err(InvalidValue::Release), "{release:?}");
        }
    }

    #[test]
    fn value_round_trips() {
        for run in [None, Some(Run::Running), Some(Run::Paused)] {
            for rate in [None, Some(RateLimit::Unlimited), Some(RateLimit::PerSecond(0.5))] {
                let value = value(ApplicationControl { run, rate });
                assert_eq!(Value::decode(&value.encode()), Ok(value));
            }
        }
    }

    #[test]
    fn unknown_parts_are_told_apart() {
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
        assert_eq!(
            with(|record| record.format = FORMAT + 1),
            Err(InvalidValue::Format)
        );
        let mut with_field = value(ApplicationControl::default()).encode().to_vec();
        with_field.extend([0xc0, 0x3e, 1]);
        assert_eq!(Value::decode(&with_field.into()), Err(InvalidValue::Format));
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
