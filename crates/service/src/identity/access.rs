//! What entitles a request to be answered, for calls that last.

use std::fmt;

use http::header::AUTHORIZATION;
use http::{HeaderValue, Request, Uri};
use redeliver_runtime::config::{Area, Verb};
use redeliver_runtime::listen::PeerCertificates;
use redeliver_runtime::watched_files::CHECK_INTERVAL;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use super::grpc::GET_ACCESS;
use super::refusal::{Reason, Refusal};
use super::{Authenticator, Identity};

/// What a call requires, by the path of its request. A call without an entry is refused to everybody, except `GetAccess`.
pub type Permissions = fn(path: &str) -> Option<(Area, Verb)>;

/// Why a call that lasts must end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Withdrawn {
    /// The same request would be refused.
    Refused(Refusal),
    /// The caller has other scopes now.
    ScopesChanged,
}

/// The credentials of a request, and what the request requires of them. [`authenticate`](super::authenticate)
/// adds it to the extensions of each request. A call that lasts ends when [`withdrawn`](Self::withdrawn) does.
#[derive(Clone)]
pub struct Access {
    authenticator: Authenticator,
    authorization: Option<HeaderValue>,
    peer: Option<PeerCertificates>,
    required: Option<Permissions>,
    uri: Uri,
}

impl Access {
    pub(super) fn of<B>(
        request: &Request<B>,
        authenticator: Authenticator,
        required: Option<Permissions>,
    ) -> Self {
        Self {
            authenticator,
            authorization: request.headers().get(AUTHORIZATION).cloned(),
            peer: request.extensions().get().cloned(),
            required,
            uri: request.uri().clone(),
        }
    }

    /// Who sends the request. A refusal is counted and logged.
    pub(super) async fn check(&self) -> Result<Identity, Refusal> {
        let authorization = self.authorization.as_ref().map(HeaderValue::as_bytes);
        let certificates = self.peer.as_ref().map_or(&[][..], |peer| &peer.0);
        let identified = self.authenticator.authenticate(authorization, certificates).await;
        let permitted = identified.and_then(|identity| {
            if let Some(permissions) = self.required
                && self.uri.path() != GET_ACCESS
            {
                let Some((area, verb)) = permissions(self.uri.path()) else {
                    return Err(Refusal::of(
                        Reason::PermissionDenied,
                        "no caller may make this call",
                    ));
                };
                identity.require_some(area, verb)?;
            }
            Ok(identity)
        });
        permitted.inspect_err(|refusal| self.refused(refusal))
    }

    /// Counts and logs that an operation has refused the request.
    pub fn refused(&self, refusal: &Refusal) {
        self.authenticator.refused(refusal, self.uri.path());
    }

    /// Completes when the same request would be refused, because its token was revoked or has expired, or when the scopes of the
    /// caller are not those of `identity` any more. It is checked as often as the files of tokens and keys. A refusal is counted
    /// and logged. A client certificate was verified when the connection began, and stays valid as long as the connection, also
    /// after it has expired.
    pub async fn withdrawn(&self, identity: &Identity) -> Withdrawn {
        let mut checks = interval_at(Instant::now() + CHECK_INTERVAL, CHECK_INTERVAL);
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            checks.tick().await;
            match self.check().await {
                Err(refusal) => return Withdrawn::Refused(refusal),
                Ok(current) if current.scopes != identity.scopes => return Withdrawn::ScopesChanged,
                Ok(_) => {}
            }
        }
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access")
            .field("uri", &self.uri)
            .finish_non_exhaustive()
    }
}
