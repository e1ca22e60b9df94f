//! Control over REST: the applications. What the operations do is in [`redeliver_service::control::operations`].

pub(super) mod error;
pub(super) mod rest;
mod view;

pub(super) use view::{ControlView, StateView};
