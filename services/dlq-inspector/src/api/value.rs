//! What callers see of values.

use std::sync::Arc;

use bytes::Bytes;
use tonic::Status;

use super::blocking;
use crate::access::Viewer;
use crate::config::FieldPath;
use crate::masking::MaskedValue;

/// Values that are larger than this together are masked on a thread for blocking work, in bytes: that takes milliseconds.
const LARGE: usize = 64 << 10;

/// The value of a dead letter.
#[derive(Debug)]
pub(super) struct RecordValue {
    pub(super) topic: Arc<str>,
    pub(super) bytes: Bytes,
}

impl RecordValue {
    /// The value in JSON, in which the same fields are masked.
    pub(super) fn decoded(self, json: String) -> Self {
        Self {
            topic: self.topic,
            bytes: json.into(),
        }
    }
}

/// A value as a caller sees it.
#[derive(Debug)]
pub(super) enum ShownValue {
    /// With the paths of the masked fields that were found in it.
    Shown(Bytes, Vec<String>),
    /// It is masked as a whole.
    Withheld,
}

/// What a caller sees of these values, in the same order; `None` for null values.
pub(super) async fn shown(
    viewer: &Viewer,
    values: Vec<Option<RecordValue>>,
) -> Result<Vec<Option<ShownValue>>, Status> {
    let is_masked = |value: &&RecordValue| viewer.mask(&value.topic).has_fields();
    let masked = values.iter().flatten().filter(is_masked);
    let size: usize = masked.map(|value| value.bytes.len()).sum();
    if size <= LARGE {
        return Ok(show(viewer, values));
    }
    let viewer = viewer.clone();
    blocking(move || show(&viewer, values)).await
}

fn show(viewer: &Viewer, values: Vec<Option<RecordValue>>) -> Vec<Option<ShownValue>> {
    let show = |value: RecordValue| match viewer.mask(&value.topic).value(value.bytes) {
        MaskedValue::Shown(value, paths) => ShownValue::Shown(value, texts(&paths)),
        MaskedValue::Withheld => ShownValue::Withheld,
    };
    values.into_iter().map(|value| value.map(show)).collect()
}

fn texts(paths: &[&FieldPath]) -> Vec<String> {
    paths.iter().map(|path| path.as_str().to_owned()).collect()
}
