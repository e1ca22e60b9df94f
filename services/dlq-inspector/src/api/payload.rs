//! The value of a dead letter in pieces.

use bytes::Bytes;
use futures::stream;
use redeliver_proto::v1;
use tonic::Status;

use super::{Answers, Api, not_found};

/// Bytes of one piece.
const PIECE: usize = 256 << 10;

impl Api {
    /// A null value and an empty one have no pieces.
    pub(super) async fn payload(&self, id: String) -> Result<Answers<v1::ReadPayloadResponse>, Status> {
        let found = self.find(&id).await?;
        let record = self.record_of(&found).await?.ok_or_else(|| not_found(&id))?;
        let mut rest = record.value.unwrap_or_default();
        let pieces = std::iter::from_fn(move || {
            let piece: Bytes = rest.split_to(rest.len().min(PIECE));
            (!piece.is_empty()).then_some(Ok(v1::ReadPayloadResponse { chunk: piece }))
        });
        Ok(Box::pin(stream::iter(pieces)))
    }
}
