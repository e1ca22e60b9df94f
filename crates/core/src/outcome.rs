//! The outcome of an attempt.

use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;

use crate::failure::Failure;
use crate::record::Headers;

/// The error code of a result that cannot be written as JSON.
const RESULT_JSON: &str = "result.json";

/// The outcome of an attempt, returned by the handler. The handler does not choose tiers or dead-letter topics.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The record was processed. All results are written in one transaction with the record's offset.
    Success(Vec<Produced>),
    /// The attempt failed. [`Failure::class`] decides whether the record is tried again.
    Failed(Failure),
}

/// One result of a successful attempt.
#[derive(Clone, Debug)]
pub struct Produced {
    /// The topic, which must be an output of the pipeline; `None` is its first output. With any other topic the record
    /// becomes a dead letter with the error code `output.unknown`.
    pub topic: Option<Arc<str>>,
    /// The key: `None` keeps the record's key, `Some(None)` is a null key.
    pub key: Option<Option<Bytes>>,
    /// The value: `None` keeps the record's value, `Some(None)` is a null value.
    pub value: Option<Option<Bytes>>,
    /// Headers of the result. They replace user headers of the record with the same name, regardless of case; all others are
    /// kept.
    pub headers: Headers,
}

impl Produced {
    /// The unchanged record, for the first output of the pipeline.
    #[must_use]
    pub fn unchanged() -> Self {
        Self {
            topic: None,
            key: None,
            value: None,
            headers: Headers::new(),
        }
    }

    /// The record with a new value, for the first output of the pipeline.
    #[must_use]
    pub fn value(value: Option<Bytes>) -> Self {
        Self {
            value: Some(value),
            ..Self::unchanged()
        }
    }
}

impl Outcome {
    /// Success; the unchanged record is written to the first output of the pipeline.
    #[must_use]
    pub fn unchanged() -> Self {
        Self::Success(vec![Produced::unchanged()])
    }

    /// Success; the record is written to the first output of the pipeline with a new value.
    #[must_use]
    pub fn value(value: impl Into<Bytes>) -> Self {
        Self::Success(vec![Produced::value(Some(value.into()))])
    }

    /// Success; the record is written to the first output of the pipeline with this value as JSON.
    ///
    /// # Errors
    /// A permanent failure with the code `result.json` if the value cannot be written as JSON, for example because of a map
    /// whose keys are not strings.
    pub fn json(value: &impl Serialize) -> Result<Self, Failure> {
        let json = serde_json::to_vec(value);
        json.map(Self::value)
            .map_err(|error| Failure::permanent(RESULT_JSON, error.to_string()))
    }

    /// The same outcome with its results in this topic, which must be an output of the pipeline.
    #[must_use]
    pub fn to_topic(self, topic: impl Into<Arc<str>>) -> Self {
        match self {
            Self::Success(mut results) => {
                let topic = topic.into();
                for result in &mut results {
                    result.topic = Some(topic.clone());
                }
                Self::Success(results)
            }
            Self::Failed(failure) => Self::Failed(failure),
        }
    }

    /// Success without a result.
    #[must_use]
    pub const fn nothing() -> Self {
        Self::Success(Vec::new())
    }
}

impl From<Failure> for Outcome {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<Produced> for Outcome {
    fn from(result: Produced) -> Self {
        Self::Success(vec![result])
    }
}

impl From<Vec<Produced>> for Outcome {
    fn from(results: Vec<Produced>) -> Self {
        Self::Success(results)
    }
}

/// The new value of the record, for the first output of the pipeline.
impl From<Bytes> for Outcome {
    fn from(value: Bytes) -> Self {
        Self::value(value)
    }
}

/// The new value of the record, for the first output of the pipeline.
impl From<Vec<u8>> for Outcome {
    fn from(value: Vec<u8>) -> Self {
        Self::value(value)
    }
}

/// The new value of the record, for the first output of the pipeline.
impl From<String> for Outcome {
    fn from(value: String) -> Self {
        Self::value(value)
    }
}

/// Success without a result.
impl From<()> for Outcome {
    fn from((): ()) -> Self {
        Self::nothing()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn unrepresentable_value_fails_permanently() {
        let by_pair = BTreeMap::from([((1, 2), 3)]);
        let failure = Outcome::json(&by_pair).unwrap_err();
        assert_eq!(
            (&*failure.code, failure.class),
            (RESULT_JSON, crate::ErrorClass::Permanent)
        );
        assert!(matches!(Outcome::json(&[1, 2]), Ok(Outcome::Success(results))
            if results[0].value == Some(Some("[1,2]".into()))));
    }
}
