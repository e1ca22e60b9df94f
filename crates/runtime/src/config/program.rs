//! The configuration of one program: the sections that programs share, and those that only this one reads.

use std::ops::Deref;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Config;
use super::error::Findings;

/// The sections that only one program reads, in its own crate: a struct with a field for each, and `#[serde(default)]`. Other services
/// skip these sections; commands read those of all services.
pub trait OwnSections: Default + Serialize + DeserializeOwned {
    /// Reports what is out of range, or contradicts the shared sections.
    fn check(&self, shared: &Config, findings: &mut Findings<'_>);
}

/// For programs that need only shared sections.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NoSections {}

impl OwnSections for NoSections {
    fn check(&self, _: &Config, _: &mut Findings<'_>) {}
}

/// The configuration of a program. It dereferences to the shared sections. `Debug` and serde show no secrets.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ProgramConfig<S = NoSections> {
    /// The sections that programs share.
    #[serde(flatten)]
    pub shared: Config,
    /// The sections that only this program reads.
    #[serde(flatten)]
    pub own: S,
}

impl<S> Deref for ProgramConfig<S> {
    type Target = Config;

    fn deref(&self) -> &Config {
        &self.shared
    }
}

impl<S: OwnSections> ProgramConfig<S> {
    /// The effective configuration as YAML, without secrets. It can be loaded again.
    ///
    /// # Panics
    /// Never: every configuration can be serialized.
    #[must_use]
    pub fn to_yaml(&self) -> String {
        serde_saphyr::to_string(self).expect("a configuration can be serialized as YAML")
    }

    /// The effective configuration as JSON, without secrets.
    ///
    /// # Panics
    /// Never: every configuration can be serialized.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("a configuration can be serialized as JSON")
    }
}
