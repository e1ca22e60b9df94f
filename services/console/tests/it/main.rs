//! Tests of sign-in and sessions over HTTP, with services and a provider that say what a test needs.

mod oidc;
mod support;
mod token;
