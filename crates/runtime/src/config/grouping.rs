//! `ordering` and `limit_by`: which records of a pipeline wait for each other.

use serde::{Deserialize, Serialize};

use super::error::Findings;
use super::output::{is_pointer, pointer_problem};

/// `pipelines.<name>.ordering`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OrderingConfig {
    /// Records are processed concurrently, in any order.
    #[default]
    None,
    /// Records with the same key are processed one after the other.
    Key,
    /// Records of the same partition are processed one after the other.
    Partition,
}

/// `pipelines.<name>.limit_by`: records with the same header, field or key. Without `header` and `pointer`, it is the key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitByConfig {
    /// The name of a header.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub header: Option<String>,
    /// A field of the JSON value, by JSON pointer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pointer: Option<String>,
    /// Maximum number of concurrent attempts.
    pub concurrency: u32,
}

impl LimitByConfig {
    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        findings.range("concurrency", self.concurrency, 1..=10_000);
        if let Some(pointer) = &self.pointer {
            if !is_pointer(pointer) {
                findings.report("pointer", pointer_problem(pointer));
            }
            if self.header.is_some() {
                findings.report("pointer", "cannot be combined with `header`: write one of them");
            }
        }
        if self.header.as_deref() == Some("") {
            findings.report("header", "is empty: write the name of a header");
        }
    }
}
