//! A client for what its caller may do.

use redeliver_proto::v1::access_service_client::AccessServiceClient;
use redeliver_proto::v1::{GetAccessRequest, GetAccessResponse};

use crate::endpoint::client;

client! {
    /// Asks the scheduler or the inspector what the caller may do there. Clones share one connection.
    AccessClient(AccessServiceClient);

    /// The scopes of the caller. Each caller may ask.
    ///
    /// # Errors
    /// [`Code::Unauthenticated`](tonic::Code::Unauthenticated) if the service does not accept the token; if it is unavailable.
    get = get_access(GetAccessRequest) -> GetAccessResponse;
}
