//! `ReadPayload`: the value of a dead letter as a stream of chunks.

use bytes::Bytes;
use futures::stream;
use redeliver_proto::v1;
use redeliver_service::audit::Action;
use redeliver_service::memory_budget::Reservation;
use tonic::Status;

use super::origin::not_there;
use super::value::{self, RecordValue, ShownValue};
use super::{Api, ResponseStream};
use crate::access::Viewer;
use crate::audit::Disclosure;

/// Maximum size of a chunk in bytes.
const CHUNK: usize = 256 << 10;

impl Api {
    /// A null value and an empty value both yield an empty stream.
    pub(super) async fn payload(
        &self,
        viewer: &Viewer,
        id: String,
    ) -> Result<(ResponseStream<v1::ReadPayloadResponse>, Reservation), Status> {
        let letter = self.find(viewer, &id).await?;
        viewer.require_payloads(&letter.id.topic)?;
        let mut memory = self.reserve(viewer, letter.record_size).await?;
        let mut record = self.record_of(&letter).await?.record;
        if let Some(at_origin) = self.at_origin(viewer, &letter, &record).await? {
            record = at_origin.required(viewer)?.map_err(not_there)?;
            drop(memory);
            memory = self.hold_bytes(viewer, record.size() as u64).await?;
        }
        let value = RecordValue {
            topic: letter.id.topic.clone(),
            bytes: record.value.unwrap_or_default(),
        };
        let shown = value::shown(viewer, vec![Some(value)]).await?;
        let Some(ShownValue::Shown(mut rest, mut masked_paths)) = shown.into_iter().flatten().next() else {
            viewer.require_unmasked(&letter.id.topic)?;
            return Err(Status::internal("a value is masked for a caller that sees it"));
        };
        memory.shrink_to(rest.len() as u64);
        let disclosure = Disclosure {
            target: letter.id.to_string(),
            count: 1,
            is_masked: !masked_paths.is_empty(),
            ..Disclosure::new(Action::ReadPayload)
        };
        self.audit.record(viewer, disclosure, self.clock.now()).await?;
        let chunks = std::iter::from_fn(move || {
            let chunk: Bytes = rest.split_to(rest.len().min(CHUNK));
            let masked_paths = std::mem::take(&mut masked_paths);
            (!chunk.is_empty()).then_some(Ok(v1::ReadPayloadResponse { chunk, masked_paths }))
        });
        Ok((Box::pin(stream::iter(chunks)), memory))
    }
}
