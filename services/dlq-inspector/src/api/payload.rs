//! `ReadPayload`: the value of a dead letter as a stream of chunks.

use bytes::Bytes;
use futures::stream;
use redeliver_proto::v1;
use tonic::Status;

use super::{Api, ResponseStream};
use crate::access::Viewer;

/// Maximum size of a chunk in bytes.
const CHUNK: usize = 256 << 10;

impl Api {
    /// A null value and an empty value both yield an empty stream.
    pub(super) async fn payload(
        &self,
        viewer: &Viewer,
        id: String,
    ) -> Result<ResponseStream<v1::ReadPayloadResponse>, Status> {
        let letter = self.find(viewer, &id).await?;
        viewer.require_payloads(&letter.id.topic)?;
        let record = self.record_of(&letter).await?;
        let mut rest = record.value.unwrap_or_default();
        let chunks = std::iter::from_fn(move || {
            let chunk: Bytes = rest.split_to(rest.len().min(CHUNK));
            (!chunk.is_empty()).then_some(Ok(v1::ReadPayloadResponse { chunk }))
        });
        Ok(Box::pin(stream::iter(chunks)))
    }
}
