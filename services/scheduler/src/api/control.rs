//! Control over REST: the applications. What the operations do is in [`redeliver_service::control::operations`].

pub(super) mod rest;
mod view;

use axum::http::StatusCode;
use redeliver_service::control::ControlError;

pub(super) use view::{ControlView, StateView};

use super::error::{ErrorParts, RequestError, UNKNOWN_OUTCOME};
use crate::request::{Field, Format};

impl From<ControlError> for RequestError {
    fn from(error: ControlError) -> Self {
        match error {
            ControlError::Refused(refusal) => Self::Refused(refusal),
            ControlError::Invalid { field, problem } => {
                let field = match field {
                    "why" => Field("why"),
                    "rate" => Field("rate"),
                    "page_token" => Field("pageToken"),
                    _ => Field("name"),
                };
                field.malformed(Format::Json, &problem).into()
            }
            error => Self::Control(error),
        }
    }
}

/// What is reported of an error that concerns control only.
pub(super) fn parts_of(error: &ControlError) -> ErrorParts {
    let http = match error {
        ControlError::Refused(_) => StatusCode::FORBIDDEN,
        ControlError::Invalid { .. } => StatusCode::UNPROCESSABLE_ENTITY,
        ControlError::Unknown(_) => StatusCode::NOT_FOUND,
        ControlError::Revised { .. } | ControlError::Newer(_) | ControlError::NoTopicIds => {
            StatusCode::CONFLICT
        }
        ControlError::NotReady | ControlError::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
        ControlError::Unconfirmed(_) => UNKNOWN_OUTCOME.1,
    };
    ErrorParts {
        grpc: error.code(),
        http,
        reason: error.reason(),
        message: error.message(),
        job: None,
        schedule: None,
        position: None,
    }
}
