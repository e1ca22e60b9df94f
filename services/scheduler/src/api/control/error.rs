//! What is reported of errors that concern control only.

use axum::http::StatusCode;
use redeliver_service::control::ControlError;

use crate::api::error_parts::{ErrorParts, UNKNOWN_OUTCOME};

/// What is reported of an error that concerns control only.
pub(in crate::api) fn parts_of(error: &ControlError) -> ErrorParts {
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
    ErrorParts::new(error.code(), http, error.reason(), error.message())
}
