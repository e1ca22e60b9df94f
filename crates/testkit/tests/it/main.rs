//! Starts, kills and restarts the local servers, as the tests of other packages do.

mod local_kafka;
mod local_redis;
