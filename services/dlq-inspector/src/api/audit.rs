//! The gRPC service `redeliver.v1.AuditService`.

use redeliver_core::Timestamp;
use redeliver_proto::convert::from_timestamp;
use redeliver_proto::error::invalid;
use redeliver_proto::v1;
use redeliver_proto::v1::audit_service_server::AuditService;
use redeliver_service::grpc::Reply;
use tonic::{Request, Status};

use super::Api;
use super::list::page_size;
use super::token::{AuditToken, query_hash};
use crate::audit::{EntryPage, Place, Wanted};

/// Without a time, entries of this many milliseconds are listed.
const DEFAULT_RANGE: i64 = 86_400_000;
/// Maximum length of a filter in bytes.
const MAX_FILTER: usize = 1_000;

#[tonic::async_trait]
impl AuditService for Api {
    async fn list_audit_entries(
        &self,
        request: Request<v1::ListAuditEntriesRequest>,
    ) -> Reply<v1::ListAuditEntriesResponse> {
        let (viewer, request) = self.open(request)?;
        let response = async {
            viewer.require_audit()?;
            self.audit_entries(request).await
        };
        let response = self.observe("ListAuditEntries", response);
        self.held(&viewer, response).await
    }
}

impl Api {
    async fn audit_entries(
        &self,
        request: v1::ListAuditEntriesRequest,
    ) -> Result<v1::ListAuditEntriesResponse, Status> {
        for (name, text) in [
            ("by", &request.by),
            ("action", &request.action),
            ("target", &request.target),
        ] {
            if text.len() > MAX_FILTER {
                let problem = format!("must have at most {MAX_FILTER} bytes");
                return Err(invalid(name, problem, "FILTER_INVALID", []));
            }
        }
        let size = page_size(request.page_size)?;
        let wrong = |name| move || invalid(name, "is not a valid time", "TIME_INVALID", []);
        let from = request
            .from
            .as_ref()
            .map(|time| from_timestamp(time).ok_or_else(wrong("from")));
        let until = request
            .until
            .as_ref()
            .map(|time| from_timestamp(time).ok_or_else(wrong("until")));
        let (from, until) = (from.transpose()?, until.transpose()?);
        let text =
            |time: Option<Timestamp>| time.map_or_else(String::new, |time| time.as_millis().to_string());
        let query = query_hash(&[
            "audit",
            &text(from),
            &text(until),
            &request.by,
            &request.action,
            &request.target,
        ]);
        let after = AuditToken::decode(query, &request.page_token)?;
        let now = self.clock.now();
        let wanted = Wanted {
            // Later pages begin where the first one has ended.
            from: from.unwrap_or_else(|| match after {
                None => Timestamp::from_millis(now.as_millis().saturating_sub(DEFAULT_RANGE)),
                Some(token) => token.from,
            }),
            // Also what other clocks have written, which are ahead.
            until: until.unwrap_or(Timestamp::from_millis(i64::MAX)),
            by: request.by,
            action: request.action,
            target: request.target,
        };
        let from = wanted.from;
        let EntryPage {
            entries,
            next,
            topic,
            is_incomplete,
        } = self
            .audit
            .read(wanted, after.map(|token| token.next).unwrap_or_default(), size)
            .await?;
        let token = |offset| {
            let next = Place { offset, topic };
            AuditToken { next, from }.encode(query)
        };
        Ok(v1::ListAuditEntriesResponse {
            entries,
            next_page_token: next.map_or_else(String::new, token),
            incomplete: is_incomplete,
        })
    }
}
