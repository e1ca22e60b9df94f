//! `schema`: the JSON Schema of a pipeline's records.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// `pipelines.<name>.schema`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "must be the path of a file, or a JSON Schema: an object"
)]
pub enum SchemaConfig {
    /// A file that contains it, as JSON.
    File(PathBuf),
    /// The schema itself.
    Inline(serde_json::Map<String, serde_json::Value>),
}
