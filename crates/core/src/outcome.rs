//! The outcome of an attempt.

use std::sync::Arc;

use bytes::Bytes;

use crate::failure::Failure;
use crate::record::Headers;

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
}
