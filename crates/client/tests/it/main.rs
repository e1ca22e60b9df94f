//! The client on real services.

mod producer;
