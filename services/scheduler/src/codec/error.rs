//! Why a record cannot be decoded.

/// Why a record cannot be decoded as a job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// It is not the protobuf message.
    #[error("{0}")]
    Malformed(String),
    /// A field is missing or out of range.
    #[error("field `{0}` of a job record is missing or out of range")]
    Field(&'static str),
    /// A newer scheduler wrote it; contains the unsupported part.
    #[error("{0}")]
    Newer(String),
}
