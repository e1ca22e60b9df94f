//! Why a change of a redrive is refused.

use redeliver_proto::v1;

use super::job::InvalidValue;

/// Why a change is refused. Nothing was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RefusedChange {
    /// There is no such job.
    Missing,
    /// The change makes no sense in this state.
    State(v1::RedriveState),
    /// No version could read the job.
    Invalid(InvalidValue),
    /// The caller has planned this job with the same request id and another request.
    RequestIdUsed(String),
    /// There is no room for another job.
    TooMany,
    /// There is no room for another edit, see [`MAX_EDIT_BYTES`](super::room::MAX_EDIT_BYTES).
    TooManyEdits,
}
