//! Decodes the value of a dead letter with its schema.

use std::sync::Arc;

use bytes::Bytes;
use redeliver_proto::v1;
use tonic::Status;

use super::value::{self, RecordValue, ShownValue};
use super::{Api, convert, shutting_down};
use crate::access::Viewer;
use crate::decoding::{DecodeError, DecodedJson, Framed, Schema, SchemaFormat};
use crate::decoding_pool::NoResult;

/// The problem of a value that cannot be decoded, if something is masked in it.
const MASKED_PROBLEM: &str = "the value cannot be decoded";

/// Why there is no decoded value.
#[derive(Debug, thiserror::Error)]
enum NotDecoded {
    #[error(transparent)]
    Value(DecodeError),
    #[error("other values take long to decode; retry later")]
    Busy,
    #[error("the decoder has failed")]
    Failed,
}

impl Api {
    /// Adds the decoded value to a dead letter, as this caller may see it. A value that cannot be decoded is
    /// not an error: it is shown as it is, with the reason.
    pub(super) async fn decode(
        &self,
        viewer: &Viewer,
        value: RecordValue,
        letter: &mut v1::DeadLetter,
    ) -> Result<(), Status> {
        let Some(schemas) = self
            .schemas
            .as_ref()
            .filter(|_| viewer.sees_payloads(&value.topic))
        else {
            return Ok(());
        };
        let Some(framed) = Framed::read(&value.bytes) else {
            return Ok(());
        };
        let mut decoded = v1::DecodedValue {
            schema_id: framed.schema_id,
            ..v1::DecodedValue::default()
        };
        let schema = match schemas.schema(framed.schema_id).await {
            Ok(schema) => schema,
            Err(error) => {
                decoded.problem = error.to_string();
                letter.decoded = Some(decoded);
                return Ok(());
            }
        };
        decoded.format = match schema.format() {
            SchemaFormat::Avro => v1::SchemaFormat::Avro,
            SchemaFormat::Protobuf => v1::SchemaFormat::Protobuf,
            SchemaFormat::Json => v1::SchemaFormat::Json,
        }
        .into();
        // How large the value is, or how it is nested, tells something of what is masked in it.
        let is_masked = viewer.mask(&value.topic).has_fields();
        match self.decoded_json(schema, framed.payload).await? {
            Err(NotDecoded::Value(_)) if is_masked => MASKED_PROBLEM.clone_into(&mut decoded.problem),
            Err(problem) => decoded.problem = problem.to_string(),
            Ok(DecodedJson { name, text }) => {
                decoded.name = name;
                let shown = value::shown(viewer, vec![Some(value.decoded(text))]).await?;
                match shown.into_iter().flatten().next() {
                    Some(ShownValue::Shown(text, paths)) => {
                        // Masked fields are text, as before.
                        decoded.json = String::from_utf8_lossy(&text).into_owned();
                        if !paths.is_empty() {
                            convert::add(letter, "decoded");
                            let masked = letter.masked.get_or_insert_default();
                            masked.paths.extend(paths);
                            masked.paths.dedup();
                        }
                    }
                    Some(ShownValue::Withheld) | None => convert::add(letter, "decoded"),
                }
            }
        }
        letter.decoded = Some(decoded);
        Ok(())
    }

    async fn decoded_json(
        &self,
        schema: Arc<Schema>,
        payload: Bytes,
    ) -> Result<Result<DecodedJson, NotDecoded>, Status> {
        let decoded = self.decoding.run(move || schema.decode(&payload)).await;
        match decoded {
            Ok(decoded) => Ok(decoded.map_err(NotDecoded::Value)),
            Err(NoResult::Busy) => Ok(Err(NotDecoded::Busy)),
            // A decoder that panics on a value is no reason to fail.
            Err(NoResult::Panicked) => Ok(Err(NotDecoded::Failed)),
            Err(NoResult::ShuttingDown) => Err(shutting_down()),
        }
    }
}
