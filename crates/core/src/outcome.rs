//! What a handler says of one record.

use std::sync::Arc;

use bytes::Bytes;

use crate::failure::Failure;
use crate::record::Headers;

/// The result of handling one record. A handler never decides about topics of retries or dead letters.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Handled. Any number of results are written, all in one transaction with the record's offset.
    Success(Vec<Produced>),
    /// Not handled; [`Failure::class`] decides what becomes of the record.
    Failed(Failure),
}

/// One result of a success.
#[derive(Clone, Debug)]
pub struct Produced {
    /// The topic, one of those that the pipeline declares; `None` is its (first) output. With any other topic the
    /// record becomes a dead letter with the code `output.unknown`.
    pub topic: Option<Arc<str>>,
    /// The key; `None` keeps the record's key, `Some(None)` is null.
    pub key: Option<Option<Bytes>>,
    /// The value; `None` keeps the record's value, `Some(None)` is null.
    pub value: Option<Option<Bytes>>,
    /// Headers that are added behind the record's own.
    pub headers: Headers,
}

impl Produced {
    /// The record itself, unchanged, to the pipeline's output.
    #[must_use]
    pub fn unchanged() -> Self {
        Self {
            topic: None,
            key: None,
            value: None,
            headers: Headers::new(),
        }
    }

    /// The record with a new value, to the pipeline's output.
    #[must_use]
    pub fn value(value: Option<Bytes>) -> Self {
        Self {
            value: Some(value),
            ..Self::unchanged()
        }
    }
}

impl Outcome {
    /// Handled; the record goes to the pipeline's output as it came.
    #[must_use]
    pub fn unchanged() -> Self {
        Self::Success(vec![Produced::unchanged()])
    }

    /// Handled; the record goes to the pipeline's output with a new value.
    #[must_use]
    pub fn value(value: impl Into<Bytes>) -> Self {
        Self::Success(vec![Produced::value(Some(value.into()))])
    }
}
