//! Protobuf messages and gRPC services, generated from `proto/redeliver/v1`, and their conversions.
//!
//! Services convert these types to domain types at their boundary, see [`convert`]. The domain types are in
//! `redeliver-core`.

pub mod auth;
pub mod convert;
pub mod error;
pub mod long_wait;

/// Messages and services of version 1.
#[expect(
    missing_docs,
    clippy::all,
    reason = "generated from proto/, which contains the documentation"
)]
pub mod v1 {
    tonic::include_proto!("redeliver.v1");
}

pub use prost::Message;

/// All schemas as a `FileDescriptorSet`, for server reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// The header `content-type` of records whose value is a message of this crate.
pub const CONTENT_TYPE: &str = "application/x-protobuf";
