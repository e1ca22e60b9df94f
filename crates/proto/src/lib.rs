//! Protobuf messages and gRPC services, generated from `proto/redeliver/v1`, and their conversions.
//!
//! The generated code is part of the repository, so that builds need no compiler of schemas. After a change of a schema,
//! `REDELIVER_UPDATE=1 cargo test --package redeliver-proto --test it` writes it again.
//!
//! Services convert these types to domain types at their boundary, see [`convert`]. The domain types are in
//! `redeliver-core`.

pub mod auth;
pub mod convert;
pub mod error;
pub mod long_wait;
pub mod names;
pub mod page;

/// Messages and services of version 1.
#[expect(
    missing_docs,
    clippy::all,
    reason = "generated from proto/, which contains the documentation"
)]
pub mod v1 {
    include!("generated/redeliver.v1.rs");
}

pub use prost::Message;

/// All schemas as a `FileDescriptorSet`, for server reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!("generated/descriptors.bin");

/// Whether an encoded message had fields that its type does not have. Decoding drops them, so the message
/// must not replace the original. Only for messages that this crate has encoded: other encoders may encode
/// the same fields in more bytes.
#[must_use]
pub fn has_unknown_fields(encoded: &[u8], message: &impl Message) -> bool {
    encoded.len() != message.encoded_len()
}

/// The header `content-type` of records whose value is a message of this crate.
pub const CONTENT_TYPE: &str = "application/x-protobuf";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_fields_are_noticed() {
        let message = v1::ControlRecord {
            revision: 300,
            desired: Some(v1::control_record::Desired::Pipeline(v1::PipelineControl {
                rate: Some(v1::RateLimit {
                    limit: Some(v1::rate_limit::Limit::PerSecond(0.5)),
                }),
                ..v1::PipelineControl::default()
            })),
            ..v1::ControlRecord::default()
        };
        let known = message.encode_to_vec();
        assert!(!has_unknown_fields(&known, &message));
        // The field 1000 with the number 1, at the end and in a message in it.
        let field = [0xc0, 0x3e, 1];
        let of_newer = [&known[..], &field].concat();
        let mut nested = v1::PipelineControl::default().encode_to_vec();
        nested.extend(field);
        // The field 17, with its length.
        let nested = [&[0x8a, 1, 3][..], &nested].concat();
        for encoded in [of_newer, nested] {
            let read = v1::ControlRecord::decode(&*encoded).unwrap();
            assert!(has_unknown_fields(&encoded, &read), "{encoded:?}");
        }
    }
}
