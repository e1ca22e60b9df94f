//! When a job is due.

use redeliver_core::{HumanDuration, Timestamp};

/// A due time: an instant, or a delay from the request on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// An instant.
    At(Timestamp),
    /// A delay from the request on.
    After(HumanDuration),
}
