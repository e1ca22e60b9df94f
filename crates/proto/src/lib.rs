//! The schemas that services share, generated from `proto/redeliver/v1`, and their conversions.
//!
//! These are wire types. Services convert them at their edge, see [`convert`]; the domain is in `core`.

pub mod auth;
pub mod convert;
pub mod error;
pub mod long_wait;

/// Messages and services of version 1.
#[expect(
    missing_docs,
    clippy::all,
    reason = "generated from proto/, where the documentation is"
)]
pub mod v1 {
    tonic::include_proto!("redeliver.v1");
}

pub use prost::Message;

/// All schemas as a `FileDescriptorSet`, for server reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// The content type of records whose value is a message of ours.
pub const CONTENT_TYPE: &str = "application/x-protobuf";
