//! A client for the audit log, which the inspector serves over gRPC.

use redeliver_proto::v1::audit_service_client::AuditServiceClient;
use redeliver_proto::v1::{ListAuditEntriesRequest, ListAuditEntriesResponse};

use crate::endpoint::client;

client! {
    /// Lists who has changed or seen what. Clones share one connection.
    AuditClient(AuditServiceClient);

    /// Lists a page of entries, oldest first. There can be fewer than asked for, or none, although there are more pages. Of an entry that
    /// the inspector cannot read, only the position is known.
    ///
    /// # Errors
    /// If the inspector is unavailable, or refuses the request.
    list = list_audit_entries(ListAuditEntriesRequest) -> ListAuditEntriesResponse;
}
