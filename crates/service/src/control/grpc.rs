//! `redeliver.v1.ControlService`.

use std::pin::Pin;
use std::sync::Arc;

use futures::stream::{self, Stream};
use redeliver_proto::v1;
use redeliver_proto::v1::control_service_server::ControlService;
use redeliver_runtime::config::{Area, Verb};
use tonic::{Request, Response, Status};

use super::operations::{ChangeVerb, WantedChange, invalid, read_limit};
use super::{ControlError, ControlField, ControlName, Controls};
use crate::grpc::Reply;
use crate::identity::grpc::caller;

/// What each call requires, of the name that it is about.
const PERMISSIONS: [(&str, Verb); 8] = [
    ("GetControl", Verb::Read),
    ("ListControls", Verb::Read),
    ("PauseControl", Verb::Write),
    ("ResumeControl", Verb::Write),
    ("SetControlRate", Verb::Write),
    ("ReleaseTier", Verb::Write),
    ("ReleaseWholeTier", Verb::Write),
    ("ResetControl", Verb::Write),
];

/// What the call of this method requires of any name; `None` if no caller may make it.
#[must_use]
pub fn required(method: &str) -> Option<(Area, Verb)> {
    let (_, verb) = PERMISSIONS.iter().find(|(name, _)| *name == method)?;
    Some((Area::Control, *verb))
}

/// The gRPC service.
pub struct Service(Arc<Controls>);

impl Service {
    /// A service for these operations.
    #[must_use]
    pub fn new(controls: Arc<Controls>) -> Self {
        Self(controls)
    }

    async fn change(
        &self,
        request: Request<v1::ChangeControlRequest>,
        verb: ChangeVerb,
    ) -> Reply<v1::Control> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let wanted = WantedChange {
            name: read_name(&request.name)?,
            verb,
            reason: request.reason,
            expected_revision: request.expected_revision,
        };
        answer(self.0.change(&caller, wanted).await)
    }
}

fn read_name(name: &str) -> Result<ControlName, Status> {
    let read = name.parse::<ControlName>();
    read.map_err(|error| invalid(ControlField::Name, error.to_string()).into_status())
}

fn answer<T>(result: Result<T, ControlError>) -> Reply<T> {
    result.map(Response::new).map_err(ControlError::into_status)
}

/// What became of the release of a tier.
fn release_result(name: &ControlName, released: Result<v1::Control, ControlError>) -> v1::TierReleaseResult {
    use v1::tier_release_result::Result;
    v1::TierReleaseResult {
        name: name.to_string(),
        result: Some(match released {
            Ok(control) => Result::Released(control),
            Err(error) => Result::Failure(v1::ControlFailure {
                code: error.code().into(),
                reason: error.reason().to_owned(),
                message: error.message(),
            }),
        }),
    }
}

#[tonic::async_trait]
impl ControlService for Service {
    type ReleaseWholeTierStream = Pin<Box<dyn Stream<Item = Result<v1::TierReleaseResult, Status>> + Send>>;

    async fn get_control(&self, request: Request<v1::GetControlRequest>) -> Reply<v1::Control> {
        let name = read_name(&request.get_ref().name)?;
        answer(self.0.get(&caller(&request)?, &name))
    }

    async fn list_controls(
        &self,
        request: Request<v1::ListControlsRequest>,
    ) -> Reply<v1::ListControlsResponse> {
        let page = self
            .0
            .list(&caller(&request)?, |_| true, &request.get_ref().page_token);
        answer(page.map(|page| v1::ListControlsResponse {
            controls: page.controls,
            next_page_token: page.next_page_token,
        }))
    }

    async fn pause_control(&self, request: Request<v1::ChangeControlRequest>) -> Reply<v1::Control> {
        self.change(request, ChangeVerb::Pause).await
    }

    async fn resume_control(&self, request: Request<v1::ChangeControlRequest>) -> Reply<v1::Control> {
        self.change(request, ChangeVerb::Resume).await
    }

    async fn set_control_rate(&self, request: Request<v1::SetControlRateRequest>) -> Reply<v1::Control> {
        let limit = read_limit(request.get_ref().rate.as_ref()).map_err(ControlError::into_status)?;
        let request = request.map(|request| v1::ChangeControlRequest {
            name: request.name,
            reason: request.reason,
            expected_revision: request.expected_revision,
        });
        self.change(request, ChangeVerb::Rate(limit)).await
    }

    async fn release_tier(&self, request: Request<v1::ChangeControlRequest>) -> Reply<v1::Control> {
        self.change(request, ChangeVerb::Release).await
    }

    async fn release_whole_tier(
        &self,
        request: Request<v1::ReleaseWholeTierRequest>,
    ) -> Reply<Self::ReleaseWholeTierStream> {
        let caller = caller(&request)?;
        let v1::ReleaseWholeTierRequest { name, reason } = request.into_inner();
        let releases = self.0.release_whole_tier(&caller, &read_name(&name)?, reason);
        let releases = releases.map_err(ControlError::into_status)?;
        let results = stream::unfold(
            (self.0.clone(), releases),
            |(controls, mut releases)| async move {
                let (name, released) = controls.release_next(&mut releases).await?;
                Some((Ok(release_result(&name, released)), (controls, releases)))
            },
        );
        Ok(Response::new(Box::pin(results)))
    }

    async fn reset_control(&self, request: Request<v1::ChangeControlRequest>) -> Reply<v1::Control> {
        self.change(request, ChangeVerb::Reset).await
    }
}

#[cfg(test)]
mod tests {
    use redeliver_proto::DESCRIPTORS;

    use super::*;

    #[test]
    fn each_call_has_a_requirement() {
        for method in [
            "GetControl",
            "ListControls",
            "PauseControl",
            "ResumeControl",
            "SetControlRate",
            "ReleaseTier",
            "ReleaseWholeTier",
            "ResetControl",
        ] {
            assert!(required(method).is_some(), "{method}");
            let is_known = DESCRIPTORS
                .windows(method.len())
                .any(|window| window == method.as_bytes());
            assert!(is_known, "{method} is in the schema");
        }
        assert_eq!(required("ReleaseEverything"), None);
    }
}
